"""One call that extends rows of caches: room for all of it first, then forwards, then all of it counts or nothing does.

A row that is rewound runs on a fork at the new start, and takes the fork's place at the end: until then the old tokens
are there to come back to. Only where the pool has no room for both versions is the old one given up beforehand.

Letters: N rows of the call; n tokens of a row; R rows of logits; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
import torch

from quire.errors import InvalidArgument, QuireError, ResourceExhausted
from quire.executor.cache import KVCache
from quire.executor.forwards import LOGITS_ONLY, Asked, Gathered, Piece, RowOutput, extras_of, pack
from quire.executor.media import RowMedia, recorded_ids
from quire.executor.operations import Operation
from quire.executor.pool import CachePool
from quire.executor.rows import Ids, Pending, Row, path_to
from quire.runner.local import Extras, StepOutput
from quire.types import Chunk, Commit, Edit, LogitsWanted, Pop, SeqId, Step, TokenTree


@dataclass(slots=True, eq=False)
class Extension:
    """One row that a call extends by up to ``count`` tokens from ``start`` on."""

    cache: KVCache
    row: Row
    start: int
    count: int
    old_length: int
    label: str
    """How an error names it."""
    parents: tuple[int, ...] | None = None
    """Of its tokens, which run as one tree in one forward; None: a chain."""
    seq: SeqId = field(init=False)
    """Where it runs: the row's sequence, or a fork of it."""
    old_seq: SeqId | None = field(init=False)
    """The sequence that is kept to come back to; None if there is none beside ``seq``."""
    written: list[Ids] = field(default_factory=list)
    """What ran, as it will be recorded."""

    def __post_init__(self) -> None:
        self.seq, self.old_seq = self.row.seq, None

    @property
    def num_written(self) -> int:
        return sum(ids.size for ids in self.written)

    @property
    def rewinds(self) -> bool:
        return self.start < self.old_length

    @property
    def depth(self) -> int:
        """Positions that it needs: of a tree those of its longest path."""
        if self.parents is None:
            return self.count
        return max(len(path_to(self.parents, node)) for node in range(len(self.parents)))


def extensions(cache: KVCache, starts: Sequence[int], counts: Sequence[int], label: str = "") -> list[Extension]:
    """All rows of a cache."""
    return [
        Extension(cache, row, start, count, old, f"{label}row {index}" if cache.batch_size > 1 else label)
        for index, (row, start, count, old) in enumerate(zip(cache.rows, starts, counts, cache.lengths, strict=True))
    ]


class Transaction:
    """``with Transaction(...) as work: work.run(...); work.commit()``. Leaving without ``commit`` undoes everything.

    Enter it under the pool's lock and stay under it. Entering raises ``ResourceExhausted`` before anything changes, and
    ``FailedPrecondition`` where a window has forgotten what a rewind would need.
    """

    def __init__(
        self,
        pool: CachePool,
        parts: Sequence[Extension],
        operation: Operation,
        *,
        several: bool = False,
        aside: bool = False,
    ) -> None:
        """``several``: there may be more than one forward. ``aside``: run on forks only, and leave by ``set_aside``."""
        self.pool = pool
        self.parts = list(parts)
        self.operation = operation
        self.several = several
        self.aside = aside
        self._committed = False
        self._lets_go = False

    def __enter__(self) -> Self:
        for part in self.parts:
            self._check_limits(part)
        self._lets_go = self.several and any(self.pool.lets_go(part.row.seq) for part in self.parts)
        kept = [part for part in self.parts if self.aside or part.rewinds or self._needs_a_way_back(part)]
        forks = self.pool.fork([part.row.seq for part in kept], [part.start for part in kept])
        for part, seq in zip(kept, forks, strict=True):
            part.seq, part.old_seq = seq, part.row.seq
        try:
            self._reserve(kept)
        except BaseException:
            self._drop_unused_forks()
            raise
        return self

    def _check_limits(self, part: Extension) -> None:
        end, cache, label = part.start + part.depth, part.cache, f"{part.label}: " if part.label else ""
        if end > self.pool.max_model_len:
            raise ResourceExhausted(
                f"{label}{part.depth} tokens from position {part.start} on are beyond the model's maximum of "
                f"{self.pool.max_model_len}"
            )
        if not cache.dynamic and end > cache.capacity:
            raise ResourceExhausted(
                f"{label}KV cache full: {part.depth} tokens from position {part.start} on do not fit its {cache.capacity} slots"
            )

    def _needs_a_way_back(self, part: Extension) -> bool:
        """Whether the forwards of the call, but the last, could not be undone by taking tokens back.

        That is so where the page that the first new token goes to must be copied: a forward that fails undoes that itself,
        but not what earlier ones did. And where a window lets go of tokens. A fork keeps both, and costs no page unless
        rows share that page.
        """
        if not self.several or part.start == 0 or part.count == 0:
            return False
        return self._lets_go or self.pool.shares_tail(part.row.seq)

    def _reserve(self, kept: Sequence[Extension]) -> None:
        """Make sure of the pages for everything; give up old versions only if that is what makes it fit."""
        missing = self._missing()
        required = [part for part in kept if self.aside or part.rewinds or self._lets_go]
        if missing and len(required) < len(kept):
            # Rows that share their last page need a page more for each fork: run where they are, as one forward would.
            self._drop_unused_forks([part for part in kept if part not in required])
            missing = self._missing()
        if not missing:
            return
        given_up = [] if self.aside else [part for part in required if part.rewinds]
        if missing > sum(self._freed_without_old(part) for part in given_up):
            state = self.pool.state
            raise ResourceExhausted(
                f"no room for {sum(part.count for part in self.parts)} more tokens: {missing} pages of {state.page_size} "
                f"tokens are missing, {state.num_available_pages()} of {state.num_pages} are free; release or clear caches"
            )
        self.pool.remove([part.row.seq for part in given_up])
        for part in given_up:
            # From here on an error leaves the row at ``start``: what lay behind it is gone.
            part.row.seq, part.old_seq = part.seq, None
            self._mark_rewound(part)

    def _missing(self) -> int:
        """Pages that the whole call is short of.

        Where windows let go of pages between forwards, that is not known beforehand: then what a first token of each row
        needs, and what layers without a window need for all; ``run`` looks again before each forward.
        """
        growing = [part for part in self.parts if part.count]
        if not growing:
            return 0
        seqs, counts = [part.seq for part in growing], [part.count for part in growing]
        trees = [part.parents for part in growing]
        if self._lets_go:
            return max(self.pool.missing_pages(seqs, [1] * len(seqs)), self.pool.missing_full_pages(seqs, counts))
        return self.pool.missing_pages(seqs, counts, trees)

    def _freed_without_old(self, part: Extension) -> int:
        """Pages that are free, or need not be copied, once the version before the rewind is gone."""
        return self.pool.freed_without(part.row.seq, part.seq, part.start)

    def _mark_rewound(self, part: Extension) -> None:
        if not part.rewinds:
            return
        part.cache.mark_cut(part.row, part.start)
        if part.row.tokens is not None:
            part.row.tokens.size = part.start

    # -- running ---------------------------------------------------------------------------------------------

    def run(
        self,
        tokens: Sequence[Ids],
        wanted: Sequence[LogitsWanted],
        *,
        budget: int = 0,
        media: Sequence[RowMedia | None] | None = None,
        asked: Asked = LOGITS_ONLY,
    ) -> list[RowOutput]:
        """Run ``tokens[i]``, with ``media[i]`` at its placeholders, for part i; ``wanted[i]`` says which logits of it are
        returned.

        At most ``budget`` tokens go into one forward (0: all); a row that does not fit is continued in the next one.
        """
        media = [None] * len(tokens) if media is None else media
        blocks = [() if found is None else found.blocks for found in media]
        records = [recorded_ids(ids, found) for ids, found in zip(tokens, media, strict=True)]
        results = [Gathered(ids.size, kind == "all") for ids, kind in zip(tokens, wanted, strict=True)]
        for pieces in pack([ids.size for ids in tokens], budget, blocks):
            self.operation.check()
            self.operation.num_sequences = len(pieces)
            self._check_room(pieces)
            lengths = [self.parts[piece.row].start + self.parts[piece.row].num_written for piece in pieces]
            step = Step(chunks=tuple(self._chunk(tokens, wanted, piece) for piece in pieces))
            output = self._execute(step, extras_of(pieces, media, lengths, asked))
            for number, piece in enumerate(pieces):
                results[piece.row].add(output, number, piece)
            for row, begin, end in pieces:
                self.parts[row].written.append(records[row][begin:end])
            self.pool.note_use()
        return [result.finished(self.pool.vocab_size, self.pool.device) for result in results]

    def _check_room(self, pieces: Sequence[Piece]) -> None:
        """``ResourceExhausted`` if a forward of a windowed state finds no pages; for others ``__enter__`` has seen to it."""
        if not self._lets_go:
            return
        seqs = [self.parts[piece.row].seq for piece in pieces]
        if missing := self.pool.missing_pages(seqs, [piece.end - piece.begin for piece in pieces]):
            raise ResourceExhausted(f"no room for the call: {missing} pages are missing; release or clear caches")

    def _chunk(self, tokens: Sequence[Ids], wanted: Sequence[LogitsWanted], piece: Piece) -> Chunk:
        kind, part = wanted[piece.row], self.parts[piece.row]
        if kind == "last" and piece.end < tokens[piece.row].size:
            kind = "none"
        tree = None if part.parents is None else TokenTree(part.parents)
        return Chunk(part.seq, tokens[piece.row][piece.begin : piece.end], tree, logits=kind)  # type: ignore[arg-type]

    def _execute(self, step: Step, extras: Extras) -> StepOutput:
        try:
            return self.pool.runner.execute(step, extras)
        except QuireError:
            raise
        except torch.AcceleratorError as error:
            # The device's context is lost; nothing can run on it any more.
            self.pool.broken = f"the device failed: {error}"
            raise QuireError(f"{self.operation.verb}: {self.pool.broken}") from error
        except Exception as error:
            raise QuireError(f"{self.operation.verb} failed while computing: {error}") from error

    # -- the end ---------------------------------------------------------------------------------------------

    def commit(self, keep: Sequence[int] | None = None) -> None:
        """Let the first ``keep[i]`` tokens that ran count (None: all); of a tree the path to node ``keep[i]``, -1: nothing. A
        part without tokens stays as it was."""
        kept = [part.num_written for part in self.parts] if keep is None else list(keep)
        self.pool.edit(*(edit for part, count in zip(self.parts, kept, strict=True) for edit in _kept(part, count)))
        for part, count in zip(self.parts, kept, strict=True):
            if part.num_written == 0:
                continue
            if part.old_seq is not None:
                self.pool.remove([part.old_seq])
                part.row.seq, part.old_seq = part.seq, None
                self._mark_rewound(part)
            ids = np.concatenate(part.written)
            ids = ids[:count] if part.parents is None else ids[path_to(part.parents, count)]
            part.cache.record(part.row, part.start, ids)
        self._drop_unused_forks()
        self._committed = True

    def set_aside(self) -> list[Pending]:
        """Keep what ran, one tree per row, beside the rows, which stay as they were."""
        found = []
        for part in self.parts:
            if part.parents is None or part.old_seq is None:
                raise QuireError("only a tree that ran on a fork can be set aside")
            pending = Pending(part.seq, part.start, np.concatenate(part.written), part.parents)
            part.seq, part.old_seq = part.old_seq, None
            part.cache.set_pending(part.row, pending)
            found.append(pending)
        self._committed = True
        return found

    def _drop_unused_forks(self, parts: Sequence[Extension] | None = None) -> None:
        """Of these parts; None: of all."""
        for part in self.parts if parts is None else parts:
            if part.old_seq is not None:
                self.pool.remove([part.seq])
                part.seq, part.old_seq = part.old_seq, None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._committed:
            return
        undone = [part for part in self.parts if part.old_seq is None and part.num_written]
        self._drop_unused_forks()
        self.pool.edit(*(edit for part in undone for edit in _kept(part, -1 if part.parents is not None else 0)))


def _kept(part: Extension, count: int) -> list[Edit]:
    """The edits after which ``count`` tokens of what ran count, or the path to node ``count`` of a tree."""
    if part.parents is not None:
        return [Commit((part.seq,), (count,))] if part.num_written else []
    surplus = part.num_written - count
    return [Pop(part.seq, surplus)] if surplus > 0 else []


def require_vocabulary(ids: Ids, vocab_size: int, what: str, *, placeholders: bool = False) -> None:
    """``InvalidArgument`` if an id lies outside of 0..V-1. ``placeholders``: negative ones were checked already."""
    bad = ids[(ids >= vocab_size) | ((ids < 0) & (not placeholders))]
    if bad.size:
        raise InvalidArgument(f"{what}: token id {int(bad[0])} is outside of 0..{vocab_size - 1}")
