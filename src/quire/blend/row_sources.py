"""``RowSources``: the cached rows that blended steps name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor

from quire.base.blend_inputs import BlendInputs
from quire.base.errors import FailedPrecondition
from quire.blend.forward import BlendedForward, RowSource
from quire.blend.given_parts import ExecutedForward
from quire.blend.selection import BlendPolicy
from quire.contracts.blend import BlendExecutor
from quire.contracts.kv_state import ModelState
from quire.contracts.layers import RopeSpec
from quire.ops.rope import RotaryTable


class RowSources:
    """The sources of cached rows that steps of one runner name, and the caller's executor, if there
    is one."""

    def __init__(self, state: ModelState, all_reduce: Callable[[Tensor], Tensor] | None = None) -> None:
        """``all_reduce`` sums a tensor over the ranks that divide the model; None: it is whole."""
        self._state, self._all_reduce = state, all_reduce
        self.sources: dict[int, RowSource] = {}
        """The sources by name."""
        self._names = itertools.count()
        self._tables: dict[RopeSpec, RotaryTable] = {}
        self.executor: BlendExecutor | None = None
        """A caller's own choice of rows; None: rows are selected by scores."""

    def add(self, source: RowSource) -> int:
        """Add a source; return its name, which is new."""
        name = next(self._names)
        self.sources[name] = source
        return name

    def remove(self, name: int) -> None:
        """Remove a source."""
        del self.sources[name]

    def forward(self, blend: BlendInputs, counts: Sequence[int]) -> BlendedForward:
        """Return the blended forward of a step whose chunks have ``counts`` rows.
        ``FailedPrecondition``: there is no source of a name, or no executor."""
        for one in blend.chunks:
            if one is not None and one.source not in self.sources:
                raise FailedPrecondition(f"cached rows {one.source} are to be blended, and no source has them")
        sources = [None if one is None else self.sources[one.source] for one in blend.chunks]
        if blend.check_layer is not None:
            policy = BlendPolicy(layers=(blend.check_layer,), min_tokens=0)
            return BlendedForward(
                self._state, policy, self._table, counts, blend.chunks, sources, all_reduce=self._all_reduce
            )
        if self.executor is None:
            raise FailedPrecondition("a blend executor is to choose rows, and the runner has none; give a check layer")
        return ExecutedForward(self.executor, self._state, self._table, counts, blend.chunks, sources)

    def _table(self, rope: RopeSpec) -> RotaryTable:
        """Return the rows with which the state rotates; rows of equal rules are equal."""
        if rope not in self._tables:
            self._tables[rope] = RotaryTable(rope, self._state.device)
        return self._tables[rope]
