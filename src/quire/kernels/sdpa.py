"""Attention over pages with PyTorch's scaled dot product attention, on any device.

The batch is cut into groups that one call serves each:

* prompts without a past: their own fresh K and V, causal, padded together where lengths are close;
* decodes, and apart from them short chunks: pages gathered into a padded tensor, with a mask; a single entry whose
  pages lie in one run is a view of the pool and gathers nothing;
* long chunks with a past: self attention (causal) merged with attention over the past (no mask), by log-sum-exp.

A query head group is folded into the query rows of a decode, so that K and V are read once per KV head.

Letters: T new tokens; S slots; b entries of a group; n rows of an entry, padded; m keys, padded; G = Hq / Hkv.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from quire.contracts.attention import AttentionState, ForwardPlan
from quire.contracts.layers import LayerSpec
from quire.ops.attention import merge

SHORT_CHUNK = 16
"""Chunks up to this many tokens are padded together; longer ones run one by one."""
MAX_WASTE = 1.25
"""A padded group may compute this many times the keys that it needs."""
VIEW_KEYS = 192
"""On a CPU an entry with this many keys in one run of pages is attended by itself, in place: from about here one
more call costs less than copying the keys into a padded tensor does."""
MAX_SCORES = 1 << 26
"""Scores (float32, so 256 MiB) that exist at a time where no kernel returns the log-sum-exp."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a group in the batch: a slice where they are neighbours, else an index."""

    first: int
    stop: int
    index: Tensor | None

    def take(self, x_THD: Tensor) -> Tensor:
        return x_THD[self.first : self.stop] if self.index is None else x_THD.index_select(0, self.index)


@dataclass(frozen=True, slots=True)
class CausalGroup:
    """b prompts without a past, padded to n tokens."""

    b: int
    n: int
    rows: Rows
    """b * n rows; padding names some row of the same entry."""
    real: Tensor | None
    """Which of the b * n rows are no padding; None: all."""
    target: Rows


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """b entries of up to n tokens over m keys."""

    b: int
    n: int
    m: int
    rows: Rows
    real: Tensor | None
    target: Rows
    pages: Tensor | None
    """int64 ``[b * pages]``; None: the keys are the slots ``first_slot..first_slot + m - 1``."""
    first_slot: int
    mask: Tensor | None
    """``[b, 1, n, m]`` in the dtype of the queries, 0 or -inf."""


@dataclass(frozen=True, slots=True)
class LongChunk:
    """One entry of many new tokens behind a past of m keys."""

    start: int
    stop: int
    m: int
    pages: Tensor | None
    first_slot: int


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    page_size: int
    causal: list[CausalGroup]
    paged: list[PagedGroup]
    long: list[LongChunk]

    @property
    def single(self) -> bool:
        """One group serves the whole batch, in order."""
        groups: list[CausalGroup | PagedGroup] = [*self.causal, *self.paged]
        return len(groups) == 1 and not self.long and groups[0].real is None and groups[0].target.index is None


def waste_bounded(entries: list[int], cost: NDArray[np.int64], slack: int) -> list[list[int]]:
    """Cut entries, sorted by cost, into groups whose padding stays below ``MAX_WASTE``."""
    groups: list[list[int]] = []
    order = sorted(entries, key=lambda entry: -int(cost[entry]))
    total = 0
    for entry in order:
        total += int(cost[entry])
        top = int(cost[groups[-1][0]]) if groups else 0
        if groups and top * (len(groups[-1]) + 1) <= MAX_WASTE * total + slack:
            groups[-1].append(entry)
        else:
            groups.append([entry])
            total = int(cost[entry])
    return [sorted(group) for group in groups]


class SdpaAttention:
    """The backend ``torch``: exact attention through PyTorch's own kernels."""

    name = "torch"

    def refusal(self, spec: LayerSpec, device: torch.device) -> str:
        del device
        return "" if spec.kind == "full" else f"the torch attention has no layers of kind {spec.kind!r}, only 'full'"

    # -- plan ------------------------------------------------------------------------------------------------

    def plan(self, plan: ForwardPlan, dtype: torch.dtype) -> SdpaPlan:
        prompts: list[int] = []
        decodes: list[int] = []
        short: list[int] = []
        views: list[int] = []
        long: list[LongChunk] = []
        lengths = plan.pasts + plan.counts
        on_cpu = plan.device.type == "cpu"
        for entry, table in enumerate(plan.tables):
            count, past = int(plan.counts[entry]), int(plan.pasts[entry])
            if count > 1 and not past:
                prompts.append(entry)
            elif count > SHORT_CHUNK:
                pages = table[: -(-past // plan.page_size)]
                long.append(
                    LongChunk(
                        int(plan.starts[entry]),
                        int(plan.starts[entry + 1]),
                        past,
                        *self._keys([pages], pages.size, plan),
                    )
                )
            elif on_cpu and lengths[entry] >= VIEW_KEYS and is_run(table):
                views.append(entry)
            else:
                # Not together: padded to the rows of a chunk, decodes would cost several times what they do alone.
                (decodes if count == 1 else short).append(entry)
        causal = [self._causal(group, plan) for group in waste_bounded(prompts, plan.counts, slack=64)]
        paged = [self._paged([entry], plan, lengths, dtype) for entry in views]
        for entries in (decodes, short):
            paged += [self._paged(group, plan, lengths, dtype) for group in waste_bounded(entries, lengths, slack=512)]
        return SdpaPlan(plan.page_size, causal, paged, long)

    @staticmethod
    def _rows(group: list[int], n: int, plan: ForwardPlan) -> tuple[Rows, Tensor | None, Rows]:
        """Padded rows, which of them are real, and where the real ones go."""
        counts, starts = plan.counts[group], plan.starts[group]
        neighbours = group == list(range(group[0], group[0] + len(group)))
        first, stop = int(starts[0]), int(starts[-1] + counts[-1])
        if neighbours and (counts == n).all():
            rows = Rows(first, stop, None)
            return rows, None, rows
        column = np.arange(n)
        padded = starts[:, None] + np.minimum(column, counts[:, None] - 1)
        real = np.flatnonzero((column < counts[:, None]).ravel())
        rows = Rows(0, 0, torch.from_numpy(padded.ravel()).to(plan.device))
        if neighbours:
            target = Rows(first, stop, None)
        else:
            target = Rows(0, 0, torch.from_numpy(padded.ravel()[real]).to(plan.device))
        exact = real.size == padded.size
        return rows, None if exact else torch.from_numpy(real).to(plan.device), target

    def _causal(self, group: list[int], plan: ForwardPlan) -> CausalGroup:
        n = int(plan.counts[group].max())
        return CausalGroup(len(group), n, *self._rows(group, n, plan))

    @staticmethod
    def _keys(tables: list[NDArray[np.int32]], width: int, plan: ForwardPlan) -> tuple[Tensor | None, int]:
        """Page index, padded to ``width`` pages for each table, or the first slot of the only table's run."""
        if len(tables) == 1 and is_run(tables[0]):
            return None, int(tables[0][0]) * plan.page_size
        index = np.empty((len(tables), width), dtype=np.int64)
        for row, table in zip(index, tables, strict=True):
            row[: table.size] = table
            # Padding reads rows of the same sequence: one that holds NaN must not reach another through the mask.
            row[table.size :] = table[0]
        return torch.from_numpy(index.ravel()).to(plan.device), 0

    def _paged(self, group: list[int], plan: ForwardPlan, lengths: NDArray[np.int64], dtype: torch.dtype) -> PagedGroup:
        n = int(plan.counts[group].max())
        width = max(plan.tables[entry].size for entry in group)
        pages, first_slot = self._keys([plan.tables[entry] for entry in group], width, plan)
        m = int(lengths[group].max()) if pages is None else width * plan.page_size
        # Row i of an entry is at position past + i; padded rows repeat the last one and are dropped.
        position = plan.pasts[group][:, None] + np.minimum(np.arange(n), plan.counts[group][:, None] - 1)
        mask: Tensor | None = None
        if not (len(group) == 1 and n == 1 and pages is None):
            last = torch.from_numpy(position).to(plan.device)
            hidden = torch.arange(m, device=plan.device) > last.unsqueeze(-1)
            mask = torch.zeros(len(group), 1, n, m, dtype=dtype, device=plan.device)
            mask.masked_fill_(hidden.unsqueeze(1), -torch.inf)
        return PagedGroup(len(group), n, m, *self._rows(group, n, plan), pages, first_slot, mask)

    # -- run -------------------------------------------------------------------------------------------------

    def run(
        self,
        prepared: Any,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        k_SHD: Tensor,
        v_SHD: Tensor,
        scale: float,
    ) -> Tensor:
        plan: SdpaPlan = prepared
        if plan.single:
            if plan.causal:
                return run_causal(plan.causal[0], q_THD, k_THD, v_THD, scale)
            return run_paged(plan.paged[0], plan.page_size, q_THD, k_SHD, v_SHD, scale)
        out = q_THD.new_empty(q_THD.shape[0], q_THD.shape[1], v_THD.shape[-1])
        for causal in plan.causal:
            store(out, causal.target, causal.real, run_causal(causal, q_THD, k_THD, v_THD, scale))
        for paged in plan.paged:
            store(out, paged.target, paged.real, run_paged(paged, plan.page_size, q_THD, k_SHD, v_SHD, scale))
        for chunk in plan.long:
            rows = slice(chunk.start, chunk.stop)
            out[rows] = run_long(chunk, plan.page_size, q_THD[rows], k_THD[rows], v_THD[rows], k_SHD, v_SHD, scale)
        return out


def store(out_THD: Tensor, target: Rows, real: Tensor | None, x_RHD: Tensor) -> None:
    """Put the rows of a group, without padding, to their places in the batch."""
    x = x_RHD if real is None else x_RHD.index_select(0, real)
    if target.index is None:
        out_THD[target.first : target.stop] = x
    else:
        out_THD.index_copy_(0, target.index, x)


def is_run(table: NDArray[np.int32]) -> bool:
    """Whether the pages are consecutive and ascending."""
    size = table.size
    return size == 1 or (int(table[-1]) - int(table[0]) == size - 1 and bool((np.diff(table) == 1).all()))


def gather(pool_SHD: Tensor, pages: Tensor | None, first_slot: int, b: int, m: int, page_size: int) -> Tensor:
    """Keys or values of a group, ``[b, H, m, D]`` (strided)."""
    heads, dim = pool_SHD.shape[1:]
    if pages is None:
        return pool_SHD[first_slot : first_slot + m].unsqueeze(0).transpose(1, 2)
    rows = pool_SHD.view(-1, page_size * heads * dim).index_select(0, pages)
    return rows.view(b, -1, heads, dim)[:, :m].transpose(1, 2)


def run_causal(group: CausalGroup, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, scale: float) -> Tensor:
    q, k, v = (
        group.rows.take(x).view(group.b, group.n, x.shape[1], x.shape[2]).transpose(1, 2) for x in (q_THD, k_THD, v_THD)
    )
    out_BHND = sdpa(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out_BHND.transpose(1, 2).contiguous().view(group.b * group.n, q.shape[1], v.shape[-1])


def run_paged(group: PagedGroup, page_size: int, q_THD: Tensor, k_SHD: Tensor, v_SHD: Tensor, scale: float) -> Tensor:
    heads, dim = q_THD.shape[1:]
    kv_heads = k_SHD.shape[1]
    k = gather(k_SHD, group.pages, group.first_slot, group.b, group.m, page_size)
    v = gather(v_SHD, group.pages, group.first_slot, group.b, group.m, page_size)
    q = group.rows.take(q_THD)
    if group.n == 1:
        q = q.view(group.b, kv_heads, heads // kv_heads, dim)
        out = sdpa(q, k, v, attn_mask=group.mask, scale=scale)
        return out.contiguous().view(group.b, heads, -1)
    q = q.view(group.b, group.n, heads, dim).transpose(1, 2)
    out = sdpa(q, k, v, attn_mask=group.mask, scale=scale, enable_gqa=heads != kv_heads)
    return out.transpose(1, 2).contiguous().view(group.b * group.n, heads, -1)


def run_long(
    chunk: LongChunk,
    page_size: int,
    q_NHD: Tensor,
    k_NHD: Tensor,
    v_NHD: Tensor,
    k_SHD: Tensor,
    v_SHD: Tensor,
    scale: float,
) -> Tensor:
    """Self attention and attention over the past, merged."""
    past_k = gather(k_SHD, chunk.pages, chunk.first_slot, 1, chunk.m, page_size)
    past_v = gather(v_SHD, chunk.pages, chunk.first_slot, 1, chunk.m, page_size)
    own = partial(q_NHD, k_NHD.transpose(0, 1).unsqueeze(0), v_NHD.transpose(0, 1).unsqueeze(0), scale, causal=True)
    past = partial(q_NHD, past_k, past_v, scale, causal=False)
    return merge(own, past).out


def partial(q_NHD: Tensor, k_1HMD: Tensor, v_1HMD: Tensor, scale: float, *, causal: bool) -> AttentionState:
    """One attention state, from a kernel that returns the log-sum-exp where there is one."""
    n, heads, dim = q_NHD.shape
    kv_heads, m = k_1HMD.shape[1:3]
    if q_NHD.device.type == "cpu" and k_1HMD.shape[-1] == v_1HMD.shape[-1]:
        # The kernel itself does not look at the stride of the last dimension: it takes 1 for granted.
        q_NHD, k_1HMD, v_1HMD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_NHD, k_1HMD, v_1HMD))
        # The head group is a dimension of stride 0 of K and V, which the kernel reads in place.
        groups = heads // kv_heads
        q = q_NHD.view(n, kv_heads, groups, dim).permute(1, 2, 0, 3)
        k, v = (x[0].unsqueeze(1).expand(kv_heads, groups, m, dim) for x in (k_1HMD, v_1HMD))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal, scale=scale)
        return AttentionState(out.permute(2, 0, 1, 3).reshape(n, heads, dim), lse.reshape(heads, n).T)
    compute = torch.promote_types(q_NHD.dtype, torch.float32)
    k_HMD, v_HMD = k_1HMD[0].to(compute), v_1HMD[0].to(compute)
    size = max(1, MAX_SCORES // (heads * m))
    blocks = [
        explicit(q_NHD[first : first + size].to(compute), k_HMD, v_HMD, scale, first=first if causal else None)
        for first in range(0, n, size)
    ]
    out_NHD, lse_NH = torch.cat([block.out for block in blocks]), torch.cat([block.lse for block in blocks])
    return AttentionState(out_NHD.to(q_NHD.dtype), lse_NH)


def explicit(q_NHD: Tensor, k_HMD: Tensor, v_HMD: Tensor, scale: float, *, first: int | None) -> AttentionState:
    """One attention state with all its scores in memory. Query i sees the keys up to ``first + i``; None: all."""
    n, heads, dim = q_NHD.shape
    if first is not None:
        k_HMD, v_HMD = k_HMD[:, : first + n], v_HMD[:, : first + n]
    kv_heads, m = k_HMD.shape[:2]
    groups = heads // kv_heads
    q_GND = q_NHD.view(n, kv_heads, groups, dim).permute(1, 2, 0, 3).reshape(kv_heads, groups * n, dim)
    scores = (q_GND @ k_HMD.transpose(1, 2)).view(kv_heads, groups, n, m) * scale
    if first is not None:
        scores.masked_fill_(torch.ones(n, m, dtype=torch.bool, device=scores.device).triu(first + 1), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).view(kv_heads, groups * n, m)
    out_NHD = (weights @ v_HMD).view(kv_heads, groups, n, -1).permute(2, 0, 1, 3).reshape(n, heads, -1)
    return AttentionState(out_NHD, lse.reshape(heads, n).T)
