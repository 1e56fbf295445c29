"""Which tokens of a tokenizer control a model, and where a text spells them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import itemgetter

NEVER = re.compile("(?!)")
"""Finds nothing."""
_LOOKS_SPECIAL = re.compile(r"<\|.+\|>|<\N{FULLWIDTH VERTICAL LINE}.+\N{FULLWIDTH VERTICAL LINE}>", re.DOTALL)
"""DeepSeek's marks of turns, for example, are not declared special."""


def control_tokens(contents: Mapping[str, bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the special tokens among added ones, whose ``contents`` tell whether they are declared
    special; and only those that are. A single character is none: it has no other tokens."""
    every = [one for one in contents if place_in(one) and (contents[one] or _LOOKS_SPECIAL.fullmatch(one))]
    return tuple(every), tuple(one for one in every if contents[one])


@lru_cache(maxsize=1024)
def place_in(token: str) -> int:
    """Return the index of the token's character to replace, 0 for none: the first one stays."""
    places = [at for at in range(1, len(token)) if not token[at].isspace()]
    # Rather none that templates write in another way: as an escape or an entity, in capitals.
    return min(
        places,
        key=lambda at: (not token[at].isascii(), token[at] in "<>&\"'\\", token[at].isalnum(), at),
        default=0,
    )


@lru_cache(maxsize=16)
def finder(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that finds the tokens that a text spells."""
    return re.compile(_pattern(tokens)) if tokens else NEVER


def _pattern(words: Sequence[str]) -> str:
    """Return the pattern that matches words, by their beginnings: there may be a thousand."""
    shared, last = min(words), max(words)
    while not last.startswith(shared):
        shared = shared[:-1]
    rests = sorted({word[len(shared) :] for word in words})
    by_first = itertools.groupby(filter(None, rests), key=itemgetter(0))
    inner = [_pattern(tuple(group)) for _, group in by_first]
    tail = f"(?:{'|'.join(inner)}){'?' if '' in rests else ''}" if inner else ""
    return re.escape(shared) + tail
