"""Attention over pages with PyTorch's scaled dot product attention, on any device.

The batch is cut into groups of one call each:

* prompts without a past: their own fresh K and V, causal, padded together if lengths are close;
* decodes, and separately short chunks: pages gathered into a padded tensor, with a mask; a
  single entry with pages in one run is a view of the pool and gathers nothing;
* long chunks with a past: causal self attention merged with unmasked attention over the past;
* long chunks with keys hidden by a window, a tree or a mask, or of rows that are not neighbours:
  blocks of rows (``row_blocks``).

Invisible pages are in no group: a windowed decode costs its window. A query head group is folded
into the query rows of a decode, so that K and V are read once per KV head. If parts are merged or
scores capped, groups return attention states (``lse_attention``).

Letters: T new tokens; S slots; B entries of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.contracts.attention import AttentionState, ForwardPlan, Scoring
from quire.contracts.kv_format import PLAIN, KVView, PlainRows, format_refusal, plain_rows
from quire.contracts.layers import KeyValueAttention, LayerSpec
from quire.kernels.attention.group_calls import (
    blinded,
    exact,
    run_block,
    run_causal,
    run_paged,
    state_of_block,
    state_of_causal,
    state_of_long,
    state_of_paged,
    with_keys,
)
from quire.kernels.attention.groups import (
    BatchRows,
    CausalGroup,
    LongChunk,
    PagedGroup,
    causal_group,
    is_run,
    keys_of,
    paged_group,
    pages_of,
    waste_bounded,
)
from quire.kernels.attention.lse_attention import has_lse_kernel
from quire.kernels.attention.row_blocks import BlockPlanner, RowBlock
from quire.kernels.attention.visibility import VisibleKeys, chains, sink_part, window_part
from quire.ops.attention import check_sink_query, kind_refusal, merge

SHORT_CHUNK = 16
"""Most tokens of chunks that are padded together; longer ones run one by one."""
VIEW_KEYS = 192
"""Least number of keys in one run of pages for which a CPU attends an entry separately, in place:
one more call then costs less than a copy of the keys into a padded tensor."""


@dataclass(frozen=True, slots=True)
class PartGroups:
    """Groups of one part of the plan, window or sink. Each row is in one group, or sees nothing."""

    causal: list[CausalGroup]
    paged: list[PagedGroup]
    long: list[LongChunk]
    blocks: list[RowBlock]
    complete: bool
    """Whether every row is in a group, or blind."""
    blind: Tensor | None
    """Rows without keys, in entries with some visible key; None: there are none."""

    @property
    def single(self) -> bool:
        """Return True if one group serves the whole batch, in order."""
        groups: list[CausalGroup | PagedGroup] = [*self.causal, *self.paged]
        if len(groups) != 1 or self.long or self.blocks or not self.complete:
            return False
        return groups[0].real is None and groups[0].target.index is None


@dataclass(slots=True)
class SdpaPlan:
    plan: ForwardPlan
    dtype: torch.dtype
    window: PartGroups
    sink: PartGroups | None
    _new_slots: Tensor | None = field(default=None, init=False)

    def check(self, q_THD: Tensor, q_sink_THD: Tensor | None) -> None:
        check_sink_query(self.plan, q_sink_THD)
        if q_THD.dtype != self.dtype:
            # Some kernels misread a mask of another type.
            raise InvalidArgument(f"the batch was planned for {self.dtype}; q is {q_THD.dtype}")

    def fresh(self, part: PartGroups, new: tuple[Tensor, Tensor] | None, pool: PlainRows) -> tuple[Tensor, Tensor]:
        """Return K and V of the new tokens, for the groups that use them."""
        if new is not None or not (part.causal or part.long):
            return new or (pool.k[:0], pool.v[:0])
        if self._new_slots is None:
            self._new_slots = self._slots().to(self.plan.device)
        return pool.k.index_select(0, self._new_slots), pool.v.index_select(0, self._new_slots)

    def _slots(self) -> Tensor:
        """Return int64 ``[T]``: slots of each entry's last ``counts`` keys, 0 if missing or
        null."""
        plan = self.plan
        slots = np.zeros(plan.num_tokens, dtype=np.int64)
        for entry, table in enumerate(plan.tables):
            keys, count, start = int(plan.keys[entry]), int(plan.counts[entry]), int(plan.starts[entry])
            if keys >= count:
                page, offset = np.divmod(np.arange(keys - count, keys), plan.page_size)
                slots[start : start + count] = table[page].astype(np.int64) * plan.page_size + offset
        return torch.from_numpy(np.maximum(slots, 0))


class SdpaAttention:
    """The backend ``torch``: exact attention through PyTorch's own kernels."""

    name = "torch"

    def refusal(self, spec: LayerSpec, device: torch.device, format: str = PLAIN) -> str:
        del device
        return kind_refusal(self.name, spec) or format_refusal(self.name, format)

    def fuses(self, spec: LayerSpec, device: torch.device) -> bool:
        """Return True if kernels run such a layer without forming all weights: they cap no scores,
        and merges need the lse."""
        if isinstance(spec, KeyValueAttention) and (spec.softcap is not None or not spec.sinks):
            return spec.softcap is None
        return has_lse_kernel(device)

    # -- plan --------------------------------------------------------------------------------------

    def plan(self, plan: ForwardPlan, dtype: torch.dtype) -> SdpaPlan:
        window, sink = window_part(plan), sink_part(plan)
        nowhere = np.zeros(plan.num_entries, dtype=np.bool_)
        return SdpaPlan(
            plan,
            dtype,
            self._part(plan, window, chains(plan, window), dtype),
            None if sink is None else self._part(plan, sink, nowhere, dtype),
        )

    @staticmethod
    def _part(plan: ForwardPlan, part: VisibleKeys, chain_B: NDArray[np.bool_], dtype: torch.dtype) -> PartGroups:
        prompts: list[int] = []
        decodes: list[int] = []
        short: list[int] = []
        views: list[list[int]] = []
        tables: dict[int, NDArray[np.int32]] = {}
        long: list[LongChunk] = []
        blocks: list[RowBlock] = []
        blind: list[NDArray[np.int64]] = []
        complete = True
        planner = BlockPlanner(plan, part, dtype)
        lengths = part.stop - part.first
        on_cpu = plan.device.type == "cpu"
        facts = (plan.counts, plan.starts[:-1], part.first, part.stop, chain_B)
        for entry, (count, start, first, stop, chain) in enumerate(
            zip(*(fact.tolist() for fact in facts), strict=True)
        ):
            if first >= stop:
                complete = False
                continue
            if chain and count > 1 and count == stop:
                prompts.append(entry)
                continue
            if chain and count > SHORT_CHUNK:
                past = stop - count
                keys, _ = keys_of([pages_of(plan, entry, 0, past)], plan, 0, past)
                long.append(LongChunk(start, start + count, keys))
                continue
            if not chain:
                blind.append(part.blind(entry, start, start + count))
            if count > SHORT_CHUNK or planner.splits(entry):
                blocks += planner.blocks(entry)
                continue
            tables[entry] = pages_of(plan, entry, first, stop)
            if on_cpu and stop - first >= VIEW_KEYS and is_run(tables[entry]):
                views.append([entry])
            else:
                # Not together: padded to the rows of a chunk, decodes would cost several times as
                # much.
                (decodes if count == 1 else short).append(entry)
        causal = [causal_group(group, plan) for group in waste_bounded(prompts, plan.counts, slack=64)]
        groups = [*views, *waste_bounded(decodes, lengths, slack=512), *waste_bounded(short, lengths, slack=512)]
        paged = [paged_group(group, [tables[entry] for entry in group], plan, part, dtype) for group in groups]
        rows = np.concatenate(blind) if blind else np.empty(0, dtype=np.int64)
        return PartGroups(
            causal, paged, long, blocks, complete, torch.from_numpy(rows).to(plan.device) if rows.size else None
        )

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
        """See the contract. ``InvalidArgument``: ``q_sink_THD`` missing or surplus, q not of the
        planned type."""
        plan: SdpaPlan = prepared
        plan.check(q_THD, q_sink_THD)
        pool = plain_rows(view, self.name)
        if plan.sink is None and sinks_H is None and scoring.softcap is None:
            return run_part(plan, plan.window, q_THD, new, pool, scoring)
        state = run_states(plan, q_THD, q_sink_THD, new, pool, scoring)
        if sinks_H is not None:
            nothing = state.out.new_zeros(1, 1, 1)
            state = merge(state, AttentionState(nothing, sinks_H.to(state.lse.dtype).expand_as(state.lse)))
        return state.out.to(q_THD.dtype).contiguous()

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
        """See the contract; ``lse`` is float64 for float64 input. Raise as ``run``. PyTorch's
        kernel for CPUs uses a coarser exponential for 16 bits (``lse_attention``). float32 queries
        make it compute in float32, at about three times the cost."""
        plan: SdpaPlan = prepared
        plan.check(q_THD, q_sink_THD)
        dtype = q_THD.dtype
        if not coarse:
            wide = torch.promote_types(dtype, torch.float32)
            q_THD, q_sink_THD = q_THD.to(wide), None if q_sink_THD is None else q_sink_THD.to(wide)
        state = run_states(plan, q_THD, q_sink_THD, new, plain_rows(view, self.name), scoring)
        return AttentionState(state.out.to(dtype).contiguous(), state.lse.contiguous())


def run_part(
    plan: SdpaPlan,
    part: PartGroups,
    q_THD: Tensor,
    new: tuple[Tensor, Tensor] | None,
    pool: PlainRows,
    scoring: Scoring,
) -> Tensor:
    """Return attention of one part, without a merge."""
    k_THD, v_THD = plan.fresh(part, new, pool)
    scale = scoring.scale
    if part.single:
        if part.causal:
            return run_causal(part.causal[0], q_THD, k_THD, v_THD, scale)
        out = run_paged(part.paged[0], q_THD, pool, scale)
        return out if part.blind is None else out.index_fill_(0, part.blind, 0.0)
    make: Callable[..., Tensor] = q_THD.new_empty if part.complete else q_THD.new_zeros
    out = make((q_THD.shape[0], q_THD.shape[1], pool.v.shape[-1]))
    for causal in part.causal:
        store(out, causal.target, causal.real, run_causal(causal, q_THD, k_THD, v_THD, scale))
    for paged in part.paged:
        store(out, paged.target, paged.real, run_paged(paged, q_THD, pool, scale))
    for chunk in part.long:
        rows = slice(chunk.start, chunk.stop)
        out[rows] = state_of_long(chunk, q_THD[rows], k_THD[rows], v_THD[rows], pool, scoring).out
    for block, k, v in with_keys(part.blocks, pool):
        rows = slice(block.start, block.stop)
        out[rows] = run_block(block, q_THD[rows], k, v, scale)
    return out if part.blind is None else out.index_fill_(0, part.blind, 0.0)


def run_states(
    plan: SdpaPlan,
    q_THD: Tensor,
    q_sink_THD: Tensor | None,
    new: tuple[Tensor, Tensor] | None,
    pool: PlainRows,
    scoring: Scoring,
) -> AttentionState:
    """Return the batch's state, ``out`` in float32 or better: rounded once, after merges."""
    state = state_of_part(plan, plan.window, q_THD, new, pool, scoring)
    if plan.sink is None or q_sink_THD is None:
        return state
    return merge(state, state_of_part(plan, plan.sink, q_sink_THD, new, pool, scoring))


def state_of_part(
    plan: SdpaPlan,
    part: PartGroups,
    q_THD: Tensor,
    new: tuple[Tensor, Tensor] | None,
    pool: PlainRows,
    scoring: Scoring,
) -> AttentionState:
    k_THD, v_THD = plan.fresh(part, new, pool)
    if part.single:
        if part.causal:
            return exact(state_of_causal(part.causal[0], q_THD, k_THD, v_THD, scoring))
        state = exact(state_of_paged(part.paged[0], q_THD, pool, scoring))
        return state if part.blind is None else blinded(state, part.blind)
    compute = torch.promote_types(q_THD.dtype, torch.float32)
    out = q_THD.new_zeros((q_THD.shape[0], q_THD.shape[1], pool.v.shape[-1]), dtype=compute)
    lse = q_THD.new_full(q_THD.shape[:2], -torch.inf, dtype=compute)
    for causal in part.causal:
        state = state_of_causal(causal, q_THD, k_THD, v_THD, scoring)
        store(out, causal.target, causal.real, state.out)
        store(lse, causal.target, causal.real, state.lse)
    for paged in part.paged:
        state = state_of_paged(paged, q_THD, pool, scoring)
        store(out, paged.target, paged.real, state.out)
        store(lse, paged.target, paged.real, state.lse)
    for chunk in part.long:
        rows = slice(chunk.start, chunk.stop)
        out[rows], lse[rows] = state_of_long(chunk, q_THD[rows], k_THD[rows], v_THD[rows], pool, scoring)
    for block, k, v in with_keys(part.blocks, pool):
        rows = slice(block.start, block.stop)
        out[rows], lse[rows] = state_of_block(block, q_THD[rows], k, v, scoring)
    state = AttentionState(out, lse)
    return state if part.blind is None else blinded(state, part.blind)


def store(out_T: Tensor, target: BatchRows, real: Tensor | None, x_R: Tensor) -> None:
    """Write the rows of a group, without padding, to their places in the batch."""
    x = x_R if real is None else x_R.index_select(0, real)
    if target.index is None:
        out_T[target.first : target.stop] = x
    else:
        out_T.index_copy_(0, target.index, x.to(out_T.dtype))
