"""Packing the rows of a call into forwards of bounded size, and their outputs into one result per
row.

Letters: n tokens of a row; K keys of a row, earlier ones included; R rows of logits; E model width;
Hq query heads; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.base.types import NO_INPUTS, AdapterRuns, Chunk, Inputs, LogitsPlace, LogitsWanted
from quire.branches.row_media import RowMedia, image_mask, joined
from quire.runner.local import StepOutput


class Piece(NamedTuple):
    """Tokens ``begin..end - 1`` of one row, which run in one forward."""

    row: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAdapters:
    """The adapter of each token of each row of a call, and which adapters fit one forward."""

    runs: Sequence[AdapterRuns]
    """The adapters of each row, by position."""
    starts: Sequence[int]
    """The position of each row's first token."""
    fits: Callable[[Collection[int]], bool]
    """Whether one forward can use all of these adapters."""

    def at(self, row: int, column: int) -> frozenset[int]:
        """Return the adapter of a token of a row; empty: the base model."""
        adapter = self.runs[row].at(self.starts[row] + column)
        return frozenset() if adapter is None else frozenset((adapter,))

    def end(self, row: int, column: int, count: int) -> int:
        """Return the end of the run of tokens with the same adapter, at most ``count``."""
        end = self.runs[row].end(self.starts[row] + column)
        return count if end is None else min(count, end - self.starts[row])


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedOutputs:
    """The outputs wanted of every row besides logits."""

    hidden_states: bool = False
    attention_weights: bool = False


LOGITS_ONLY = WantedOutputs()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowOutput:
    """The output for one row."""

    logits_RV: Tensor
    """float32"""
    hidden_states: tuple[Tensor, ...] = ()
    """Per layer ``[n, E]``; empty unless asked for."""
    attention_weights: tuple[Tensor, ...] = ()
    """Per layer float32 ``[Hq, n, K]``; empty unless asked for."""


def pack(
    counts: Sequence[int],
    budget: int,
    blocks: Sequence[Sequence[tuple[int, int]]] | None = None,
    adapters: RowAdapters | None = None,
) -> list[list[Piece]]:
    """Return forwards of at most ``budget`` tokens (<= 0: any) for ``counts[i]`` tokens of row i.

    ``blocks``: per row, columns that must not be divided; a forward grows beyond the budget if it
    must. ``adapters``: a piece has one of them, and a forward those that fit together; None: all
    tokens run under the base model.
    """
    if budget <= 0:
        budget = max(1, sum(counts))
    forwards: list[list[Piece]] = []
    room = 0
    used: frozenset[int] = frozenset()
    for row, count in enumerate(counts):
        begin = 0
        while begin < count:
            stop = count
            if adapters is not None:
                stop = adapters.end(row, begin, count)
                used |= adapters.at(row, begin)
                room = room if adapters.fits(used) else 0
            if room <= 0:
                forwards.append([])
                room = budget
                used = frozenset() if adapters is None else adapters.at(row, begin)
            end = min(begin + room, stop)
            for first, last in blocks[row] if blocks else ():
                if first < end < last:
                    # Stop before the block, unless the forward would be empty without it.
                    end = first if first > begin or forwards[-1] else last
            if end == begin:
                room = 0
                continue
            forwards[-1].append(Piece(row, begin, end))
            # A row has one piece per forward: a piece under another adapter goes into the next one.
            begin, room = end, 0 if end == stop < count else room - (end - begin)
    return forwards


def rows_wanted(kind: LogitsWanted, count: int) -> int:
    """Return the number of rows of logits of ``count`` tokens."""
    return {"all": count, "last": 1, "none": 0}[kind]


def places_of(pieces: Sequence[Piece], chunks: Sequence[Chunk], rows: Sequence[LogitsPlace]) -> tuple[LogitsPlace, ...]:
    """Return the destinations of the logits of a forward's pieces: parts of the rows'
    destinations."""
    found = []
    for piece, chunk in zip(pieces, chunks, strict=True):
        place = rows[piece.row]
        found.append(replace(place, start=place.start + piece.begin) if chunk.logits == "all" else place)
    return tuple(found)


def inputs_of(
    pieces: Sequence[Piece],
    media: Sequence[RowMedia | None],
    lengths: Sequence[int],
    asked: WantedOutputs,
    places: tuple[LogitsPlace, ...] = (),
) -> Inputs:
    """Return the inputs of one forward. ``lengths``: number of tokens before each piece in its row.
    ``places``: see ``Inputs``."""
    filled = [(piece, found) for piece in pieces if (found := media[piece.row]) is not None]
    embeddings = [found.slice(piece.begin, piece.end) for piece, found in filled]
    if not embeddings and asked == LOGITS_ONLY:
        return Inputs(places=places) if places else NO_INPUTS
    mask = None
    images = [_within(piece, media) for piece in pieces]
    if any(images):
        mask = image_mask(lengths, [end - begin for _, begin, end in pieces], images)
    return Inputs(
        embeddings=joined(embeddings) if any(map(len, embeddings)) else None,
        mask=mask,
        hidden_states=asked.hidden_states,
        attention_weights=asked.attention_weights,
        places=places,
    )


def _within(piece: Piece, media: Sequence[RowMedia | None]) -> list[tuple[int, int]]:
    """Return the images of a piece as spans of its columns. ``pack`` divides none."""
    found = media[piece.row]
    if found is None:
        return []
    return [(a - piece.begin, b - piece.begin) for a, b in found.blocks if piece.begin <= a and b <= piece.end]


@dataclass(slots=True, eq=False)
class Gathered:
    """The result of one row while its forwards run."""

    logits: Tensor
    """The logits of the last forward."""
    hidden: list[tuple[Tensor, ...]] = field(default_factory=list)
    weights: list[tuple[Tensor, ...]] = field(default_factory=list)

    def add(self, output: StepOutput, number: int) -> None:
        """Add the output of chunk ``number`` of a step, for one piece of the row."""
        if len(rows_RV := output.rows(number)):
            self.logits = rows_RV
        if output.hidden_states:
            self.hidden.append(output.hidden_states[number])
        if output.attention_weights:
            self.weights.append(output.attention_weights[number])

    def finished(self) -> RowOutput:
        return RowOutput(
            logits_RV=self.logits,
            hidden_states=tuple(
                parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*self.hidden, strict=True)
            ),
            attention_weights=tuple(_stacked(parts) for parts in zip(*self.weights, strict=True)),
        )


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Join ``[Hq, n_i, K_i]`` of successive pieces to ``[Hq, n, K]``, with 0 for later keys."""
    if len(parts) == 1:
        return parts[0]
    keys = max(part.shape[2] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, keys - part.shape[2])) for part in parts], dim=1)


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Stack tensors of one shape to ``[B, ...]``: a view if they are neighbours in memory, as the
    rows of one forward are, else a copy."""
    first = rows[0]
    size = first.numel() * first.element_size()
    together = all(
        row.is_contiguous()
        and row.shape == first.shape
        and row.data_ptr() == first.data_ptr() + index * size
        and row.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for index, row in enumerate(rows)
    )
    if not together:
        return torch.stack(list(rows))
    return first.as_strided((len(rows), *first.shape), (first.numel(), *first.stride()))


def batched(rows: Sequence[Tensor], spans: Sequence[tuple[int, int]], columns: int) -> Tensor:
    """Return rows ``[n_i, ...]`` as ``[B, columns, ...]``, each at its columns; 0 elsewhere."""
    out = rows[0].new_zeros(len(rows), columns, *rows[0].shape[1:])
    for target, row, (begin, end) in zip(out, rows, spans, strict=True):
        target[begin:end] = row
    return out


def batched_weights(rows: Sequence[Tensor], spans: Sequence[tuple[int, int]], columns: int) -> Tensor:
    """Return rows ``[Hq, n_i, K_i]`` of a batch as ``[B, Hq, columns, max K]``; 0 elsewhere."""
    keys = max(row.shape[2] for row in rows)
    out = rows[0].new_zeros(len(rows), rows[0].shape[0], columns, keys)
    for target, row, (begin, end) in zip(out, rows, spans, strict=True):
        target[:, begin:end, : row.shape[2]] = row
    return out


def states_needed(
    starts: Sequence[int], forwards: Iterable[Sequence[Piece]], trees: Iterable[Sequence[Piece]] = (), *, interval: int
) -> int:
    """Return the largest number of state slots that a call takes beyond those at its beginning.

    Row i begins at ``starts[i]``; ``forwards`` are of chains, ``trees`` come after them. A forward
    takes a slot for each row, for each multiple of ``interval`` strictly inside the row's new
    tokens, and for each node of a tree. The state before a row's new tokens is free after the
    forward, unless it existed before the call or is at a multiple.
    """
    lengths = list(starts)
    own = [False] * len(lengths)
    held = most = 0
    for pieces in forwards:
        taken = freed = 0
        for index, begin, end in pieces:
            length, last = lengths[index], lengths[index] + end - begin
            taken += 1 + _multiples(length, last - 1, interval)
            freed += own[index] and not (interval and length % interval == 0)
            own[index], lengths[index] = True, last
        most = max(most, held + taken)
        held += taken - freed
    for pieces in trees:
        held += sum(end - begin for _, begin, end in pieces)
        most = max(most, held)
    return most


def _multiples(low: int, high: int, interval: int) -> int:
    """Return the number of multiples of ``interval`` in low + 1..high."""
    return high // interval - low // interval if interval else 0
