"""Visible keys of a batch's rows as ranges of addresses, with masks only if necessary.

If positions decide, a row sees the keys at addresses ``low <= address < high``. If the rule of an
entry decides, the visible keys are columns of a boolean matrix. Cost: proportional to the rows and
to the rules' matrices, at any length.

Letters: T rows; B entries; n rows of an entry.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.contracts.attention import ForwardPlan


@dataclass(frozen=True, slots=True)
class Columns:
    """Keys of one entry under its rule, from the first visible one to the last."""

    first: int
    """Address of column 0."""
    visible: NDArray[np.bool_]
    """``[n, columns]``"""

    @property
    def stop(self) -> int:
        return self.first + int(self.visible.shape[1])


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """One part of the plan, window or sink."""

    low: NDArray[np.int64]
    """``[T]``"""
    high: NDArray[np.int64]
    """``[T]``; not above ``low``: no key by position."""
    first: NDArray[np.int64]
    """``[B]``: the lowest address that some row of the entry sees."""
    stop: NDArray[np.int64]
    """``[B]``: one past the highest; not above ``first``: the entry sees nothing."""
    columns: dict[int, Columns]
    """By entry, for entries whose rule leaves some key visible."""
    sink: bool = False
    """Whether this is the sink part. After its visible keys are rows that left the window."""

    def blind(self, entry: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the rows of the batch, among those of an entry, that see no key."""
        nothing = self.low[start:stop] >= self.high[start:stop]
        if entry in self.columns:
            nothing = nothing & ~self.columns[entry].visible.any(1)
        return np.flatnonzero(nothing) + start


def window_part(plan: ForwardPlan) -> VisibleKeys:
    """Return the visible keys of the window part, from each row's low on."""
    decodes = plan.plain and plan.num_tokens == plan.num_entries
    if decodes and (plan.positions + 1 >= plan.origins + plan.keys).all():
        # Each row sees all keys, so no further work is needed.
        low = np.zeros(plan.num_entries, dtype=np.int64)
        return VisibleKeys(low, plan.keys, low, plan.keys, {})
    origins = np.repeat(plan.origins, plan.counts)
    low = np.zeros_like(plan.positions) if plan.lows is None else np.maximum(plan.lows - origins, 0)
    columns = {}
    for entry, start, stop, positions, allowed in ruled(plan):
        visible = allowed if plan.lows is None else allowed & (positions >= plan.lows[start:stop, None])
        columns[entry] = visible
    return visibility(plan, low, by_position(plan, origins), columns)


def sink_part(plan: ForwardPlan) -> VisibleKeys | None:
    """Return the visible keys of the sink part; None if no row has a sink."""
    if plan.sinks is None or not (plan.sinks[:, 0] < plan.sinks[:, 1]).any():
        return None
    origins = np.repeat(plan.origins, plan.counts)
    low = np.maximum(plan.sinks[:, 0] - origins, 0)
    high = np.minimum(plan.sinks[:, 1] - origins, by_position(plan, origins))
    columns = {}
    for entry, start, stop, positions, allowed in ruled(plan):
        sinks = plan.sinks[start:stop]
        columns[entry] = allowed & (positions >= sinks[:, :1]) & (positions < sinks[:, 1:])
    return replace(visibility(plan, low, high, columns), sink=True)


def ruled(plan: ForwardPlan) -> list[tuple[int, int, int, NDArray[np.int64], NDArray[np.bool_]]]:
    """Return entries with a rule: number, first row, one past the last, key positions, mask."""
    return [
        (entry, int(plan.starts[entry]), int(plan.starts[entry + 1]), rule.positions, rule.allowed)
        for entry, rule in enumerate(plan.rules)
        if rule is not None
    ]


def by_position(plan: ForwardPlan, origins: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``[T]``: one past the last address that each row sees by its position."""
    limits = plan.keys
    if any(plan.rules):
        firsts = [
            limit if rule is None else rule.first for rule, limit in zip(plan.rules, limits.tolist(), strict=True)
        ]
        limits = np.minimum(limits, firsts)
    high: NDArray[np.int64] = np.minimum(plan.positions + 1 - origins, np.repeat(limits, plan.counts))
    return high


def visibility(
    plan: ForwardPlan, low: NDArray[np.int64], high: NDArray[np.int64], ruled_columns: dict[int, NDArray[np.bool_]]
) -> VisibleKeys:
    shown = low < high
    edges = plan.starts[:-1]
    first = np.minimum.reduceat(np.where(shown, low, np.iinfo(np.int64).max), edges)
    stop = np.maximum.reduceat(np.where(shown, high, 0), edges)
    columns = {}
    for entry, visible in ruled_columns.items():
        found = trim(visible, int(plan.keys[entry]) - visible.shape[1])
        if found is not None:
            columns[entry] = found
            first[entry], stop[entry] = min(first[entry], found.first), max(stop[entry], found.stop)
    return VisibleKeys(low, high, first, stop, columns)


def trim(visible: NDArray[np.bool_], first: int) -> Columns | None:
    """Return the columns from the first visible to the last, or None; ``first``: column 0's
    address."""
    used = np.flatnonzero(visible.any(0))
    if not used.size:
        return None
    return Columns(first + int(used[0]), visible[:, used[0] : used[-1] + 1])


def chains(plan: ForwardPlan, part: VisibleKeys) -> NDArray[np.bool_]:
    """Return bool ``[B]``, True for entries whose new tokens are the last keys and see all keys up
    to themselves."""
    # A row sees this many keys only if no rule hides the last of them.
    behind = np.repeat(plan.keys - plan.starts[1:], plan.counts) + np.arange(plan.num_tokens) + 1
    rows = (part.low == 0) & (part.high == behind)
    chain: NDArray[np.bool_] = np.logical_and.reduceat(rows, plan.starts[:-1]) & (plan.keys >= plan.counts)
    return chain
