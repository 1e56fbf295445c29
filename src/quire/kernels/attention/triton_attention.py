"""Attention over pages in Triton, for CUDA devices. The reference is ``quire.ops.attention``.

K and V are read in place, through the page table. A batch becomes tiles of rows and items of work
(``tiles``), which are uploaded once for a forward; ``run`` launches programs
(``attention_programs``) without waiting.

Letters: T new tokens; B entries; S slots; Hq, Hkv query and KV heads; Dk, Dv head sizes; M rows and
N keys of a program.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.base.uploads import SharedMemory, StaticInputs, StaticPart
from quire.contracts.attention import AttentionState, ForwardPlan, Scoring
from quire.contracts.kv_format import PLAIN, KVView, format_refusal, plain_rows
from quire.contracts.layers import LayerSpec
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kernels.attention.tiles import (
    ITEM_FIELDS,
    MERGE_FIELDS,
    Sight,
    reach_of,
    sight_of,
    split_size,
    tiles_of,
    work_of,
)
from quire.kernels.attention.visibility import sink_part, window_part
from quire.kernels.triton_support import attention_problem, known_dtypes, on_device_of, upload
from quire.ops.attention import check_sink_query, kind_refusal

LEAST_SPLIT = 128
"""Least keys of an item, if a tile is cut."""
FEW_ROWS = 16
"""Rows of the smallest program, for decodes."""
PROGRAMS = {True: 8, False: 2}
"""Wanted programs per multiprocessor: of few rows (True), and of many."""
MERGED_AT_ONCE = 16
"""States that a merging program reads at a time."""
LOG2E = 1.4426950408889634


class Settings(NamedTuple):
    """Compile-time settings of a program of M rows."""

    keys: int
    """N"""
    warps: int
    stages: int
    """Number of steps whose keys are loaded concurrently."""


def most_rows(value_size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the possible numbers of rows of a program: their sums must fit into registers."""
    if dtype == torch.float32:
        return (FEW_ROWS, 32)
    return (FEW_ROWS, 64, 128) if value_size <= 128 else (FEW_ROWS, 64)


def settings(rows: int, key_size: int, value_size: int, dtype: torch.dtype) -> Settings:
    """Return the settings of a program for these sizes."""
    large = key_size > 256 or value_size > 128
    if dtype == torch.float32:
        return Settings(16 if large else 32, 4, 2)
    if rows == FEW_ROWS:
        return Settings(32 if large else 64, 4, 3)
    if large:
        return Settings(32, 8, 2)
    return Settings(64, 4 if rows == 64 else 8, 3)


def power(size: int) -> int:
    """Return the smallest power of two that is at least the size, and at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def key_blocks(size: int) -> tuple[int, int]:
    """Return the powers of two in which the columns of K are read; the second is 0 if one is
    enough. 192 columns are 128 and 64."""
    if power(size) == size or size < 16:
        return power(size), 0
    main = power(size) // 2
    return main, power(size - main)


class Shape(NamedTuple):
    """The properties of a layer that the launches of a plan depend on."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    fresh: bool
    """Whether K and V of the new tokens are given, so that prompts read them."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Items of one part for programs of one kind."""

    items: Tensor
    count: int
    part: int
    rows: int
    """M"""
    together: int
    """Query heads of a KV head in one program."""
    linear: bool
    """Whether keys are the new tokens' own rows, not in pages."""
    made: Settings


@dataclass(frozen=True, slots=True)
class BoundTiles:
    """A plan for layers of one shape, on the device."""

    launches: tuple[Launch, ...]
    tables: Tensor
    ranges: tuple[tuple[Tensor, Tensor], ...]
    """``low`` and ``high`` of rows in each part."""
    bits: tuple[Tensor, ...]
    has_bits: tuple[bool, ...]
    merges: Tensor
    num_merges: int
    state_out: Tensor
    state_lse: Tensor


class PartWork(NamedTuple):
    """The items of one launch."""

    items: NDArray[np.int32]
    part: int
    rows: int
    linear: bool
    made: Settings


class Numbers(NamedTuple):
    """A plan for layers of one shape, on the host."""

    tables: NDArray[np.int32]
    works: list[PartWork]
    merges: NDArray[np.int32]
    states: int


@dataclass(frozen=True, slots=True)
class StaticTiles:
    """The memory of a static plan's numbers, for layers of one shape."""

    low: StaticPart
    high: StaticPart
    items: StaticPart
    merges: StaticPart

    def fill(self, found: Numbers, prepared: TiledPlan, memory: StaticInputs) -> None:
        """Replace the numbers. Absent items have 0 rows, absent merges row -1; rows without a token
        are merged from no states, so they become 0."""
        (sight,), (work,) = prepared.parts, found.works
        self.low.fill(sight.low_T)
        self.high.fill(sight.high_T)
        items = work.items.copy()
        items[:, ITEM_FIELDS.index("table")] += memory.append(found.tables)
        self.items.fill(items)
        rows = prepared.entries * int(prepared.plan.counts[0])
        empty = np.arange(prepared.plan.num_tokens, rows)
        merges = np.zeros((empty.size, len(MERGE_FIELDS)), dtype=np.int32)
        merges[:, 0] = empty
        self.merges.fill(np.concatenate([found.merges, merges]), rest=-1)


@dataclass(slots=True)
class TiledPlan:
    """A batch over pages, for layers of any shape."""

    plan: ForwardPlan
    dtype: torch.dtype
    parts: list[Sight]
    bound: dict[Shape, BoundTiles] = field(default_factory=dict)
    memory: StaticInputs | None = None
    """Memory of a static plan; None: each forward has a plan of its own."""
    entries: int = 0
    """Most entries of a static plan."""
    static: dict[Shape, StaticTiles] = field(default_factory=dict)
    """The memory of a static plan's numbers, by shape."""


class TritonAttention:
    """The backend ``triton``: exact attention by Triton programs. Batches of an unsupported type,
    such as float64, run through PyTorch's kernels (``SdpaAttention``)."""

    name = "triton"

    def __init__(self, *, least_split: int = LEAST_SPLIT, programs: int | None = None) -> None:
        """Make a backend. For tests: the least keys of an item, and the wanted number of programs
        (None: by the device)."""
        self._other = SdpaAttention()
        self._least, self._programs = least_split, programs

    def refusal(self, spec: LayerSpec, device: torch.device, format: str = PLAIN) -> str:
        """See the contract."""
        return attention_problem(device) or kind_refusal(self.name, spec) or format_refusal(self.name, format)

    def fuses(self, spec: LayerSpec, device: torch.device) -> bool:
        """Return True: attention weights exist only for a block of keys at a time."""
        del spec, device
        return True

    # -- plan --------------------------------------------------------------------------------------

    def plan(self, plan: ForwardPlan, dtype: torch.dtype) -> Any:
        """See the contract. A plan of another type is ``SdpaAttention``'s."""
        if dtype not in known_dtypes():
            return self._other.plan(plan, dtype)
        window, sink = window_part(plan), sink_part(plan)
        return TiledPlan(plan, dtype, [sight_of(plan, part) for part in (window, sink) if part is not None])

    def bind(self, prepared: TiledPlan, shape: Shape) -> BoundTiles:
        """Return the launches of a plan for layers of one shape, made once."""
        found = prepared.bound.get(shape)
        if found is None:
            found = prepared.bound[shape] = self._bind(prepared, shape)
        return found

    def _bind(self, prepared: TiledPlan, shape: Shape) -> BoundTiles:
        plan, group = prepared.plan, shape.heads // shape.kv_heads
        found = self._numbers(prepared, shape)
        if prepared.memory is not None:
            return self._bind_static(prepared, shape, found)
        arrays: list[NDArray[Any]] = [found.tables]
        for sight in prepared.parts:
            arrays += [sight.low_T.astype(np.int32), sight.high_T.astype(np.int32), sight.bits]
        arrays += [work.items for work in found.works]
        arrays.append(found.merges)
        tables, *rest = upload(arrays, plan.device)
        parts_of, rest = rest[: 3 * len(prepared.parts)], rest[3 * len(prepared.parts) :]
        launches = tuple(
            Launch(items, len(work.items), work.part, work.rows, min(group, work.rows), work.linear, work.made)
            for items, work in zip(rest, found.works, strict=False)
        )
        return BoundTiles(
            launches,
            tables,
            tuple(zip(parts_of[::3], parts_of[1::3], strict=True)),
            tuple(parts_of[2::3]),
            tuple(bool(sight.bits.size) for sight in prepared.parts),
            rest[-1],
            len(found.merges),
            *_states(found.states, shape, plan.device),
        )

    def _numbers(self, prepared: TiledPlan, shape: Shape) -> Numbers:
        plan, group = prepared.plan, shape.heads // shape.kv_heads
        choices = np.array(most_rows(shape.value_size, prepared.dtype))
        kind_B = np.minimum(np.searchsorted(choices, plan.counts * group), choices.size - 1)
        tiles = tiles_of(plan, np.maximum(choices // group, 1)[kind_B])
        reaches = [reach_of(plan, tiles, sight) for sight in prepared.parts]
        sizes = np.array([table.size for table in plan.tables])
        # A prompt without a past need not go through pages.
        linear_B = (plan.keys == plan.counts) & (kind_B > 0) & shape.fresh
        table_B = np.where(linear_B, plan.starts[:-1], np.cumsum(sizes) - sizes)
        works: list[PartWork] = []
        merges, states = [], 0
        for kind, linear in sorted({(int(kind), bool(linear)) for kind, linear in zip(kind_B, linear_B, strict=True)}):
            chosen_N = ((kind_B == kind) & (linear_B == linear))[tiles.entry_N]
            some, rows = tiles.chosen(chosen_N), int(choices[kind])
            how = settings(rows, shape.key_size, shape.value_size, prepared.dtype)
            parts = [(sight, reach.chosen(chosen_N)) for sight, reach in zip(prepared.parts, reaches, strict=True)]
            keys = int(sum(reach.keys_N.sum() for _, reach in parts))
            programs = self._wanted(plan.device, rows == FEW_ROWS)
            size = split_size(keys, _pieces(shape, rows), programs, self._least)
            work = work_of(some, parts, table_B, size, how.keys, states)
            states += work.num_states
            merges.append(work.merges)
            works += [PartWork(items, part, rows, linear, how) for part, items in enumerate(work.items) if len(items)]
        return Numbers(np.concatenate(plan.tables).astype(np.int32), works, np.concatenate(merges), states)

    # -- plans that stay where they are ------------------------------------------------------------

    def static_plan(self, plan: ForwardPlan, dtype: torch.dtype, memory: StaticInputs, entries: int) -> Any:
        """Prepare ``run`` for this batch and, with ``replan``, for other batches of up to
        ``entries`` entries with the same number of rows each: their launches are the same, so they
        can be captured. None if no such plan is possible: for sinks, rules, unequal entries, or an
        unsupported type."""
        if dtype not in known_dtypes() or plan.sinks is not None or any(plan.rules) or np.ptp(plan.counts):
            return None
        return TiledPlan(plan, dtype, [sight_of(plan, window_part(plan))], memory=memory, entries=entries)

    def replan(self, prepared: TiledPlan, plan: ForwardPlan) -> None:
        """Replace the batch of a static plan, in its memory. ``MemoryError`` if that is too
        small."""
        prepared.plan, prepared.parts = plan, [sight_of(plan, window_part(plan))]
        for shape, parts in prepared.static.items():
            assert prepared.memory is not None
            parts.fill(self._numbers(prepared, shape), prepared, prepared.memory)

    def _bind_static(self, prepared: TiledPlan, shape: Shape, found: Numbers) -> BoundTiles:
        """Take memory for the largest work of batches of this plan's size.

        A tile that sees s keys has fewer than ``s / size + 2`` items. Sizes are such that the keys
        of all tiles together are at most ``programs`` items.
        """
        plan, memory, group = prepared.plan, prepared.memory, shape.heads // shape.kv_heads
        assert memory is not None
        (work,) = found.works
        tokens = max(1, work.rows // group)
        tiles = prepared.entries * -(-int(plan.counts[0]) // tokens)
        rows = prepared.entries * int(plan.counts[0])
        programs = self._wanted(plan.device, work.rows == FEW_ROWS)
        items = programs // _pieces(shape, work.rows) + 2 * tiles
        numbers = (rows, rows, items * len(ITEM_FIELDS), rows * len(MERGE_FIELDS))
        parts = StaticTiles(*(memory.part(count, np.int32) for count in numbers))
        parts.fill(found, prepared, memory)
        memory.send()
        launch = Launch(parts.items.tensor, items, 0, work.rows, min(group, work.rows), False, work.made)
        prepared.static[shape] = parts
        return BoundTiles(
            (launch,),
            memory.tail,
            ((parts.low.tensor, parts.high.tensor),),
            (memory.tail,),
            (False,),
            parts.merges.tensor,
            rows,
            *_states(items * min(tokens, int(plan.counts[0])), shape, plan.device, memory.shared),
        )

    def _wanted(self, device: torch.device, few: bool) -> int:
        if self._programs is not None:
            return self._programs
        if device.type != "cuda":
            return 1
        return PROGRAMS[few] * int(torch.cuda.get_device_properties(device).multi_processor_count)

    # -- run ---------------------------------------------------------------------------------------

    def run(
        self,
        prepared: Any,
        q_THD: Tensor,
        new: tuple[Tensor, Tensor] | None,
        view: KVView,
        scoring: Scoring,
        *,
        q_sink_THD: Tensor | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """See the contract. ``InvalidArgument``: ``q_sink_THD`` missing or surplus, a tensor not of
        the planned type."""
        if not isinstance(prepared, TiledPlan):
            return self._other.run(prepared, q_THD, new, view, scoring, q_sink_THD=q_sink_THD, sinks_H=sinks_H)
        return self._attend(prepared, q_THD, new, view, scoring, q_sink_THD, sinks_H, None)

    def run_state(
        self,
        prepared: Any,
        q_THD: Tensor,
        new: tuple[Tensor, Tensor] | None,
        view: KVView,
        scoring: Scoring,
        *,
        q_sink_THD: Tensor | None = None,
        coarse: bool = False,
    ) -> AttentionState:
        """See the contract; never coarse. Raise as ``run``."""
        if not isinstance(prepared, TiledPlan):
            return self._other.run_state(prepared, q_THD, new, view, scoring, q_sink_THD=q_sink_THD, coarse=coarse)
        lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
        out_THD = self._attend(prepared, q_THD, new, view, scoring, q_sink_THD, None, lse_TH)
        return AttentionState(out_THD, lse_TH)

    def _attend(
        self,
        prepared: TiledPlan,
        q_THD: Tensor,
        new: tuple[Tensor, Tensor] | None,
        view: KVView,
        scoring: Scoring,
        q_sink_THD: Tensor | None,
        sinks_H: Tensor | None,
        lse_TH: Tensor | None,
    ) -> Tensor:
        from quire.kernels.attention.attention_programs import attend_items, merge_states

        check_sink_query(prepared.plan, q_sink_THD)
        k_SHD, v_SHD = plain_rows(view, self.name)
        given = [("q", q_THD), ("q_sink", q_sink_THD), ("K", k_SHD), ("V", v_SHD)]
        for name, x in given:
            if x is not None and (x.dtype != prepared.dtype or x.device.type != prepared.plan.device.type):
                device = prepared.plan.device
                raise InvalidArgument(
                    f"the batch was planned for {prepared.dtype} on {device}; {name} is {x.dtype} on {x.device}"
                )
        (_, heads, key_size), kv_heads, value_size = q_THD.shape, v_SHD.shape[1], v_SHD.shape[2]
        bound = self.bind(
            prepared, Shape(heads, kv_heads, key_size, value_size, new is not None and prepared.memory is None)
        )
        queries = [_in_rows(x) for x in (q_THD, q_sink_THD) if x is not None]
        pool = _in_rows(k_SHD), _in_rows(v_SHD)
        fresh = pool if new is None else (_in_rows(new[0]), _in_rows(new[1]))
        sinks = bound.state_lse if sinks_H is None else sinks_H.to(torch.float32).contiguous()
        out_THD = q_THD.new_empty(*q_THD.shape[:2], value_size)
        lse = bound.state_lse if lse_TH is None else lse_TH
        main, rest = key_blocks(key_size)
        # A cap is a map of natural scores.
        scale, cap = float(scoring.scale) * (1.0 if scoring.softcap else LOG2E), float(scoring.softcap or 1.0)
        out_row, out_head, lse_row = heads * value_size, value_size, heads
        with on_device_of(q_THD):
            for launch in bound.launches:
                q, (k, v) = queries[launch.part], fresh if launch.linear else pool
                shared = _same_rows(k, v) and value_size == power(value_size) == main
                pieces = kv_heads * -(-(heads // kv_heads) // launch.together)
                few = launch.rows == FEW_ROWS
                attend_items[(pieces, launch.count) if few else (launch.count, pieces)](
                    launch.items, bound.tables, *bound.ranges[launch.part], bound.bits[launch.part],
                    q, k, v, sinks, out_THD, lse, bound.state_out, bound.state_lse,
                    q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
                    out_row, out_head, lse_row, scale, cap,
                    HEADS=heads, GROUP=heads // kv_heads, TOGETHER=launch.together, HEAD_AXIS=0 if few else 1,
                    PAGE=prepared.plan.page_size, LINEAR=launch.linear, M=launch.rows, N=launch.made.keys,
                    DK=key_size, MAIN=main, REST=rest, DV=value_size, VALUE=power(value_size),
                    SHARED=shared, BITS=bound.has_bits[launch.part], CAP=scoring.softcap is not None,
                    SINKS=sinks_H is not None, LSE=lse_TH is not None,
                    num_warps=launch.made.warps, num_stages=launch.made.stages,
                )  # fmt: skip
            if bound.num_merges:
                merge_states[(bound.num_merges, heads)](
                    bound.merges, bound.state_out, bound.state_lse, sinks, out_THD, lse, out_row, out_head, lse_row,
                    HEADS=heads, STATES=MERGED_AT_ONCE, DV=value_size, VALUE=power(value_size),
                    SINKS=sinks_H is not None, LSE=lse_TH is not None,
                    num_warps=4 if value_size > 128 else 1,
                )  # fmt: skip
        return out_THD


def _pieces(shape: Shape, rows: int) -> int:
    """Return the number of programs that share an item's keys, for all KV heads with ``rows`` rows
    each."""
    group = shape.heads // shape.kv_heads
    return shape.kv_heads * -(-group // min(group, rows))


def _states(
    count: int, shape: Shape, device: torch.device, shared: SharedMemory | None = None
) -> tuple[Tensor, Tensor]:
    """Return memory for the attention states of ``count`` rows, one state per row and head."""
    size = max(1, count * shape.heads)
    shared = SharedMemory(device) if shared is None else shared
    return shared.take("states", size * shape.value_size, torch.float32), shared.take("lses", size, torch.float32)


def _in_rows(x: Tensor) -> Tensor:
    """Return the tensor, or a copy, with contiguous rows."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _same_rows(k: Tensor, v: Tensor) -> bool:
    """Return True if V is the first columns of K."""
    return k.data_ptr() == v.data_ptr() and k.stride() == v.stride()
