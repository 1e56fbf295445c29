"""``RowExtension``: the new tokens of one row of a call, part of a transaction.

Letters: n tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import InvalidArgument, ResourceExhausted, Unsupported
from quire.base.token_history import Ids
from quire.base.types import BASE, SeqId
from quire.branches.extension import Extension, path_to
from quire.branches.model_facts import ModelFacts
from quire.executor.cache_pool import CachePool
from quire.executor.cache_rows import CacheRows
from quire.executor.forward_packing import Piece, RowAdapters, pack
from quire.executor.row import Row, are_indices
from quire.kv.rule_table import POSITIONS_OF_WINDOWS


@dataclass(slots=True, eq=False)
class RowExtension:
    """One row that a call extends by up to ``count`` tokens."""

    cache: CacheRows
    row: Row
    count: int
    old_length: int
    label: str
    """The row's name in errors."""
    new: Extension
    """Its branch is the row, or a fork of the row that takes its place at the end of the call."""
    begin: int
    """The position from which the branch runs: tokens before the new ones may have to be
    replayed."""
    holds_start: bool = False
    """Whether the recurrent state before the new tokens is kept during the call."""

    @property
    def seq(self) -> SeqId:
        return self.new.seq

    @property
    def start(self) -> int:
        return self.new.start

    @property
    def on_fork(self) -> bool:
        """Whether the row's own sequence is still as it was, for an undo."""
        return self.new.seq != self.row.seq

    @property
    def rewinds(self) -> bool:
        return self.start < self.old_length

    @property
    def replayed(self) -> int:
        """The number of tokens to replay."""
        return self.start - self.begin

    @property
    def depth(self) -> int:
        """The number of positions that the tokens need: for a tree the length of its longest
        path."""
        parents = self.new.parents
        if parents is None:
            return self.count
        return max(len(path_to(parents, node)) for node in range(len(parents)))

    def require_limits(self, facts: ModelFacts) -> None:
        """Raise ``ResourceExhausted`` beyond limits, ``Unsupported`` for positions in a window."""
        end, label = self.start + self.depth, f"{self.label}: " if self.label else ""
        if end > facts.max_model_len:
            raise ResourceExhausted(
                f"{label}{self.depth} tokens from position {self.start} on are beyond the model's maximum of "
                f"{facts.max_model_len}"
            )
        if self.new.positions is not None and self.row.window is not None:
            raise Unsupported(f"{label}position_ids: {POSITIONS_OF_WINDOWS}")
        if self.new.positions is not None and (last := int(self.new.positions.max(initial=0))) >= facts.max_model_len:
            raise ResourceExhausted(
                f"{label}position {last} is beyond the model's maximum; positions are 0..{facts.max_model_len - 1}"
            )
        if not self.cache.dynamic and end > self.cache.capacity:
            raise ResourceExhausted(
                f"{label}KV cache full: {self.depth} tokens from position {self.start} on do not fit its "
                f"{self.cache.capacity} slots"
            )


def extensions(
    cache: CacheRows,
    starts: Sequence[int],
    counts: Sequence[int],
    label: str = "",
    adapter: int | None = None,
    positions: Sequence[Ids | None] | None = None,
) -> list[RowExtension]:
    """Return the extensions of all rows of a cache under ``adapter``, as chains of tokens.
    ``positions``: of the tokens; None: directly after the tokens before."""
    given = [None] * cache.batch_size if positions is None else positions
    return [
        RowExtension(
            cache,
            row,
            count,
            old,
            f"{label}row {index}" if cache.batch_size > 1 else label,
            Extension(row, start, row.runs.then(start, adapter), positions=_positions(row, start, count, given[index])),
            begin=start,
        )
        for index, (row, start, count, old) in enumerate(zip(cache.rows, starts, counts, cache.lengths, strict=True))
    ]


def _positions(row: Row, start: int, count: int, given: Ids | None) -> Ids | None:
    if given is None:
        return row.following(start, count)
    return None if row.positions is None and are_indices(given, start) else given


def placed(row: Row, start: int, given: Sequence[Ids | None], parents: Sequence[int]) -> Ids | None:
    """Return the positions of the nodes of a tree; None: as the tree implies.

    A node is at its position in ``given`` (one for each node), or one after its parent; parent -1
    is the token before ``start``.
    """
    found: list[int] = []
    usual: list[int] = []
    for own, parent in zip(given, parents, strict=True):
        before = found[parent] if parent >= 0 else row.next_position(start) - 1
        found.append(before + 1 if own is None else int(own[0]))
        usual.append(usual[parent] + 1 if parent >= 0 else start)
    return None if row.positions is None and found == usual else np.array(found, dtype=np.int64)


def packed(
    pool: CachePool,
    parts: Sequence[RowExtension],
    positions: Sequence[int],
    counts: Sequence[int],
    budget: int,
    blocks: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> list[list[Piece]]:
    """Return forwards of ``counts[i]`` tokens of part i from ``positions[i]`` on; see ``pack``."""
    if all(part.new.runs == BASE for part in parts):
        return pack(counts, budget, blocks)
    adapters = RowAdapters(runs=[part.new.runs for part in parts], starts=positions, fits=pool.runner.adapters.fits)
    return pack(counts, budget, blocks, adapters)


def require_vocabulary(ids: NDArray[Any], vocab_size: int, what: str, *, placeholders: bool = False) -> None:
    """Raise ``InvalidArgument`` if an id is outside of 0..V-1. ``placeholders``: negative ids are
    allowed, and were checked already."""
    bad = ids[(ids >= vocab_size) | ((ids < 0) & (not placeholders))]
    if bad.size:
        raise InvalidArgument(f"{what}: token id {int(bad[0])} is outside of 0..{vocab_size - 1}", field=what)
