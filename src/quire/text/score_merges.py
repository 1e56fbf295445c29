"""The merges of SentencePiece's BPE, which has scores of tokens instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TypeAlias

Merges: TypeAlias = list[tuple[str, str]]
FindMerges: TypeAlias = Callable[[Sequence[str], Sequence[float], Sequence[int]], Merges]
"""``merges_of``, or a function that leaves out merges which no text uses."""


def merges_of(tokens: Sequence[str], scores: Sequence[float], joined: Sequence[int]) -> Merges:
    """Return all pairs of tokens whose union is one of the tokens with numbers ``joined``, the best
    score of a union first, then in the order of ``joined`` and of the cuts. A vocabulary of 262,144
    tokens has half a million."""
    known, found = frozenset(tokens), []
    for number in joined:
        token = tokens[number]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                found.append((-scores[number], left, right))
    found.sort(key=itemgetter(0))
    return [(left, right) for _, left, right in found]
