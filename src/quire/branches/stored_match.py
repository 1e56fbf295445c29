"""Matching a history with the contents of tiers: from objects under its keys to a match. No
torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from quire.contracts.store import ObjectKey, ObjectKind
from quire.store.keys import Chain, StoredPiece
from quire.store.memory import MemoryTier

if TYPE_CHECKING:
    from quire.branches.object_layout import ObjectLayout

Listing: TypeAlias = Sequence[Mapping[ObjectKey, str]]
"""The objects under each boundary of a chain, each with its nearest tier."""


@dataclass(slots=True)
class Question:
    """A query for the objects of a history in the tiers."""

    chain: Chain
    answer: Future[list[dict[ObjectKey, str]]]
    held: int | None = None
    """Number of tokens in the tiers, computed once by ``StoredState.held``; None: not yet."""

    @property
    def is_answered(self) -> bool:
        return self.answer.done()


@dataclass(frozen=True, slots=True)
class Match:
    """The stored objects from which a sequence of ``length`` tokens can be loaded."""

    length: int
    """Number of tokens after which the sequence can continue."""
    rows: tuple[StoredPiece, ...]
    """Runs, adjacent from 0 on."""
    stops: tuple[StoredPiece, ...]
    """Stops before ``length``, and last the one at ``length``; empty if the model needs none."""
    tiers: Mapping[ObjectKey, str]

    def tokens(self, computed: int) -> dict[str, int]:
        """Return the number of tokens after the first ``computed``, by tier."""
        if not self.rows:
            return {self.tiers[self.stops[-1].key]: self.length - computed}
        found: dict[str, int] = {}
        for piece in self.rows:
            if count := max(0, min(piece.stop, self.length) - max(piece.start, computed)):
                found[self.tiers[piece.key]] = found.get(self.tiers[piece.key], 0) + count
        return found

    def nbytes(self, layout: ObjectLayout, computed: int) -> dict[str, int]:
        """Return the bytes of the objects after the first ``computed`` tokens, by tier."""
        found: dict[str, int] = {}
        for piece in (*(one for one in self.rows if one.stop > computed), *self.stops[-1:]):
            found[self.tiers[piece.key]] = found.get(self.tiers[piece.key], 0) + layout.nbytes(piece.start, piece.stop)
        return found


def find_match(
    question: Question, layout: ObjectLayout, memory: MemoryTier | None, limit: int, *, whole: bool = False
) -> Match | None:
    """Return the longest stored prefix of at most ``limit`` tokens; None: there is none.

    ``memory``: searched again, for objects that were saved since the query. ``whole``: for a
    sequence with a window, which is one object.
    """
    chain = question.chain
    listing = [dict(one) for one in question.answer.result()]
    if memory is not None:
        for there, now in zip(listing, memory.children_now(chain.boundaries), strict=True):
            there |= dict.fromkeys(now, memory.kind)
    with_rows = bool(layout.row_layers) and not whole
    rows = _rows(chain, listing) if with_rows else []
    length = min(limit, rows[-1].stop if rows else 0) if with_rows else limit
    stops: list[StoredPiece] = []
    if layout.has_stops or whole:
        stops = _stops(chain, listing, length)
        length = stops[-1].stop if stops else 0
    if length < 1:
        return None
    tiers = {key: tier for under in listing for key, tier in under.items()}
    return Match(length, tuple(one for one in rows if one.start < length), tuple(stops), tiers)


def _rows(chain: Chain, listing: Listing) -> list[StoredPiece]:
    """Return the longest series of adjacent runs from 0 on."""
    found: list[StoredPiece] = []
    for index, under in enumerate(listing):
        start = index * chain.chunk
        counts = {key.count for key in under if key.kind is ObjectKind.ROWS and start + key.count <= len(chain.ids)}
        ends = (start + count for count in sorted(counts, reverse=True))
        piece = next((StoredPiece(key, start, end) for end in ends if (key := chain.rows(start, end)) in under), None)
        if piece is None:
            break
        found.append(piece)
        if piece.stop - start < chain.chunk:
            break
    return found


def _stops(chain: Chain, listing: Listing, most: int) -> list[StoredPiece]:
    """Return the stops at up to ``most`` tokens, ascending."""
    found: list[StoredPiece] = []
    for index, under in enumerate(listing):
        start = index * chain.chunk
        counts = {key.count for key in under if key.kind is ObjectKind.STOP and start + key.count <= most}
        ends = (start + count for count in sorted(counts))
        found += [StoredPiece(key, end, end) for end in ends if (key := chain.stop(end)) in under]
    return found
