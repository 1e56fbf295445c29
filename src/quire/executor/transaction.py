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
from torch import Tensor

from quire.errors import InvalidArgument, QuireError, ResourceExhausted
from quire.executor.cache import KVCache
from quire.executor.operations import Operation
from quire.executor.pool import CachePool
from quire.executor.rows import Ids, Row
from quire.runner.local import StepOutput
from quire.types import Chunk, LogitsWanted, Pop, SeqId, Step


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
    seq: SeqId = field(init=False)
    """Where it runs: the row's sequence, or a fork of it."""
    old_seq: SeqId | None = field(init=False)
    """The sequence that is kept to come back to; None if there is none beside ``seq``."""
    written: list[Ids] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seq, self.old_seq = self.row.seq, None

    @property
    def num_written(self) -> int:
        return sum(ids.size for ids in self.written)

    @property
    def rewinds(self) -> bool:
        return self.start < self.old_length


def extensions(cache: KVCache, starts: Sequence[int], counts: Sequence[int], label: str = "") -> list[Extension]:
    """All rows of a cache."""
    return [
        Extension(cache, row, start, count, old, f"{label}row {index}" if cache.batch_size > 1 else label)
        for index, (row, start, count, old) in enumerate(zip(cache.rows, starts, counts, cache.lengths, strict=True))
    ]


class Transaction:
    """``with Transaction(...) as work: work.run(...); work.commit()``. Leaving without ``commit`` undoes everything.

    Enter it under the pool's lock and stay under it. Entering raises ``ResourceExhausted`` before anything changes.
    """

    def __init__(
        self, pool: CachePool, parts: Sequence[Extension], operation: Operation, *, several: bool = False
    ) -> None:
        """``several``: there may be more than one forward."""
        self.pool = pool
        self.parts = list(parts)
        self.operation = operation
        self.several = several
        self._committed = False

    def __enter__(self) -> Self:
        for part in self.parts:
            self._check_limits(part)
        kept = [part for part in self.parts if part.rewinds or (self.several and self._shares_tail(part))]
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
        end, cache, label = part.start + part.count, part.cache, f"{part.label}: " if part.label else ""
        if end > self.pool.max_model_len:
            raise ResourceExhausted(
                f"{label}{part.count} tokens from position {part.start} on are beyond the model's maximum of "
                f"{self.pool.max_model_len}"
            )
        if not cache.dynamic and end > cache.capacity:
            raise ResourceExhausted(
                f"{label}KV cache full: {part.count} tokens from position {part.start} on do not fit its {cache.capacity} slots"
            )

    def _shares_tail(self, part: Extension) -> bool:
        """Whether the page that the first new token goes to must be copied. A forward that fails undoes that itself,
        but not what earlier forwards of the call did; a fork does. It costs no page unless rows share that page."""
        if part.start % self.pool.page_size == 0:
            return False
        table = self.pool.state.table
        return bool(table.pools[0].references[table.get(part.row.seq).tables[0].pages[-1]] > 1)

    def _reserve(self, kept: Sequence[Extension]) -> None:
        """Make sure of the pages for everything; give up old versions only if that is what makes it fit."""
        counts = [part.count for part in self.parts]
        missing = self.pool.missing_pages([part.seq for part in self.parts], counts)
        if missing and not all(part.rewinds for part in kept):
            # Rows that share their last page need a page more for each fork: run where they are, as one forward would.
            self._drop_unused_forks([part for part in kept if not part.rewinds])
            kept = [part for part in kept if part.rewinds]
            missing = self.pool.missing_pages([part.seq for part in self.parts], counts)
        if not missing:
            return
        if missing > sum(self._freed_without_old(part) for part in kept):
            state = self.pool.state
            raise ResourceExhausted(
                f"no room for {sum(counts)} more tokens: {missing} pages of {state.page_size} tokens are missing, "
                f"{state.num_available_pages()} of {state.num_pages} are free; release or clear caches"
            )
        self.pool.remove([part.row.seq for part in kept])
        for part in kept:
            # From here on an error leaves the row at ``start``: what lay behind it is gone.
            part.row.seq, part.old_seq = part.seq, None
            self._mark_rewound(part)

    def _freed_without_old(self, part: Extension) -> int:
        """Pages that are free, or need not be copied, once the version before the rewind is gone."""
        table = self.pool.state.table
        pages = table.get(part.row.seq).tables[0].pages
        kept = table.get(part.seq).tables[0].size
        references = table.pools[0].references
        freed = int((references[pages[kept:]] == 1).sum())
        # The last common page is written by the fork; with two holders, it is its own once the other is gone.
        own_tail = part.start % self.pool.page_size != 0 and references[pages[kept - 1]] == 2
        return freed + int(own_tail)

    def _mark_rewound(self, part: Extension) -> None:
        if not part.rewinds:
            return
        part.cache.mark_cut(part.row, part.start)
        if part.row.tokens is not None:
            part.row.tokens.size = part.start

    # -- running ---------------------------------------------------------------------------------------------

    def run(self, tokens: Sequence[Ids], wanted: Sequence[LogitsWanted], *, budget: int = 0) -> list[Tensor]:
        """Run ``tokens[i]`` for part i; returns the logits ``wanted[i]`` of each, float32 ``[R, V]``.

        At most ``budget`` tokens go into one forward (0: all); a row that does not fit is continued in the next one.
        """
        pieces = pack([ids.size for ids in tokens], budget)
        # One tensor for each row from the start, so that pieces are never joined by a copy of all of them.
        gathered: list[Tensor | None] = [None] * len(tokens)
        for piece in pieces:
            self.operation.check()
            self.operation.num_sequences = len(piece)
            output = self._execute(Step(chunks=tuple(self._chunk(tokens, wanted, *place) for place in piece)))
            for number, (index, begin, end) in enumerate(piece):
                rows_RV = output.rows(number)
                if wanted[index] == "all":
                    gathered[index] = _gather(gathered[index], rows_RV, begin, end, tokens[index].size)
                elif len(rows_RV):
                    gathered[index] = rows_RV
                self.parts[index].written.append(tokens[index][begin:end])
            self.pool.note_use()
        empty = torch.empty(0, self.pool.vocab_size, device=self.pool.device)
        return [empty if rows is None else rows for rows in gathered]

    def _chunk(self, tokens: Sequence[Ids], wanted: Sequence[LogitsWanted], index: int, begin: int, end: int) -> Chunk:
        kind = wanted[index]
        if kind == "last" and end < tokens[index].size:
            kind = "none"
        return Chunk(self.parts[index].seq, tokens[index][begin:end], logits=kind)  # type: ignore[arg-type]

    def _execute(self, step: Step) -> StepOutput:
        try:
            return self.pool.runner.execute(step)
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
        """Let the first ``keep[i]`` tokens that ran count (None: all); a part without tokens stays as it was."""
        kept = [part.num_written for part in self.parts] if keep is None else list(keep)
        pops = [
            Pop(part.seq, part.num_written - count)
            for part, count in zip(self.parts, kept, strict=True)
            if part.num_written > count
        ]
        self.pool.edit(*pops)
        for part, count in zip(self.parts, kept, strict=True):
            if part.num_written == 0:
                continue
            if part.old_seq is not None:
                self.pool.remove([part.old_seq])
                part.row.seq, part.old_seq = part.seq, None
                self._mark_rewound(part)
            if part.row.tokens is not None:
                part.row.tokens.replace_from(part.start, np.concatenate(part.written)[:count])
            part.cache.capacity = max(part.cache.capacity, part.start + count)
            part.cache.touch()
        self._drop_unused_forks()
        self._committed = True

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
        pops = [Pop(part.seq, part.num_written) for part in self.parts if part.old_seq is None and part.num_written]
        self._drop_unused_forks()
        self.pool.edit(*pops)


def _gather(found: Tensor | None, rows_RV: Tensor, begin: int, end: int, size: int) -> Tensor:
    """Put the logits of tokens ``begin..end - 1`` of a row of ``size`` tokens where those before them are."""
    if end - begin == size:
        return rows_RV
    all_RV = rows_RV.new_empty(size, rows_RV.shape[1]) if found is None else found
    all_RV[begin:end] = rows_RV
    return all_RV


def pack(counts: Sequence[int], budget: int) -> list[list[tuple[int, int, int]]]:
    """Forwards of at most ``budget`` tokens (<= 0: one of all) that cover ``counts[i]`` tokens of row i in order.

    Each is a list of (row, begin, end).
    """
    if budget <= 0:
        budget = max(1, sum(counts))
    forwards: list[list[tuple[int, int, int]]] = []
    room = 0
    for index, count in enumerate(counts):
        begin = 0
        while begin < count:
            if room == 0:
                forwards.append([])
                room = budget
            taken = min(room, count - begin)
            forwards[-1].append((index, begin, begin + taken))
            begin, room = begin + taken, room - taken
    return forwards


def require_vocabulary(ids: Ids, vocab_size: int, what: str) -> None:
    """``InvalidArgument`` if an id lies outside of 0..V-1."""
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if bad.size:
        raise InvalidArgument(f"{what}: token id {int(bad[0])} is outside of 0..{vocab_size - 1}")
