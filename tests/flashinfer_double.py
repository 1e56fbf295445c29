"""What stands for FlashInfer in tests: its wrapper for paged attention, in plain PyTorch.

Arguments are checked as FlashInfer's Python checks them, and what its kernels take for granted is
checked, too: types of indices, pages inside of the pool, keys for each row. The kernels are those
of a Hopper device: ``auto`` becomes ``fa3`` or ``fa2`` at the first plan of a wrapper and stays so,
and ``fa3`` knows no masks. A key that is hidden has the weight 0, so that a NaN in its value shows.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire.kernels.attention.flashinfer_attention import FlashInferAttention

HALVES = (torch.float16, torch.bfloat16)
HEAD_SIZES = (64, 128, 256)
WIDE = (torch.float32, *HALVES)


def ints(x: Tensor, name: str) -> list[int]:
    """Return the numbers of a flat int32 tensor."""
    assert isinstance(x, Tensor), f"{name} is {type(x)}"
    assert x.dtype == torch.int32, f"{name} is {x.dtype}"
    assert x.dim() == 1
    return [int(number) for number in x.tolist()]


class BatchPrefillWithPagedKVCacheWrapper:
    """As FlashInfer's. ``dtypes`` and ``sizes``: what the kernels are made for."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = HALVES
    sizes: ClassVar[tuple[int, ...] | None] = HEAD_SIZES
    made: ClassVar[list[BatchPrefillWithPagedKVCacheWrapper]] = []

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.data_ptr() % 16 == 0
        assert kv_layout == "NHD"
        assert backend in ("auto", "fa2", "fa3")
        self.device, self.backend = float_workspace_buffer.device, backend
        self.planned: SimpleNamespace | None = None
        self.plans: list[SimpleNamespace] = []
        self.made.append(self)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        """Check a batch and keep it."""
        assert packed_custom_mask is None, "FlashInfer's offsets of packed masks are right for one request"
        assert head_dim_vo in (None, head_dim_qk)
        assert pos_encoding_mode == "NONE"
        assert rope_scale is rope_theta is None
        assert not use_fp16_qk_reduction
        assert not logits_soft_cap, "FlashInfer's tanh is approximate"
        assert q_data_type in self.dtypes
        assert kv_data_type in (None, q_data_type)
        assert self.sizes is None or head_dim_qk in self.sizes
        assert num_qo_heads % num_kv_heads == 0
        for name, x in (("qo_indptr", qo_indptr), ("indptr", paged_kv_indptr), ("last", paged_kv_last_page_len)):
            assert x.device.type == "cpu", f"{name} is on {x.device}, and a plan would wait for it"
        assert paged_kv_indices.device == self.device
        rows, ends, pages, last = (
            ints(x, name)
            for x, name in (
                (qo_indptr, "qo_indptr"),
                (paged_kv_indptr, "paged_kv_indptr"),
                (paged_kv_indices, "paged_kv_indices"),
                (paged_kv_last_page_len, "paged_kv_last_page_len"),
            )
        )
        batch = len(rows) - 1
        assert batch > 0
        assert len(ends) == batch + 1
        assert len(last) == batch
        assert rows[0] == ends[0] == 0
        assert ends[-1] == len(pages)
        assert all(1 <= size <= page_size for size in last)
        counts = [b - a for a, b in itertools.pairwise(rows)]
        keys = [(b - a - 1) * page_size + size for (a, b), size in zip(itertools.pairwise(ends), last, strict=True)]
        assert min(counts) > 0
        assert min(keys) > 0
        visible = []
        if custom_mask is not None:
            assert custom_mask.dtype == torch.bool
            assert custom_mask.device == self.device
            assert custom_mask.shape == (sum(n * m for n, m in zip(counts, keys, strict=True)),)
        if self.backend == "auto":
            known = self.sizes is None or head_dim_qk in HEAD_SIZES
            self.backend = "fa3" if known and custom_mask is None else "fa2"
        assert custom_mask is None or self.backend == "fa2"
        for number, (n, m) in enumerate(zip(counts, keys, strict=True)):
            position, key = torch.arange(n)[:, None] + m - n, torch.arange(m)
            seen = torch.ones(n, m, dtype=torch.bool)
            if custom_mask is not None:
                before = sum(n * m for n, m in zip(counts[:number], keys[:number], strict=True))
                seen = custom_mask[before : before + n * m].view(n, m).cpu()
            elif causal:
                seen = key <= position
            if window_left >= 0:
                seen = seen & (key >= position - window_left)
            assert seen.any(1).all(), "a row without keys has a finite lse in some releases"
            visible.append(seen)
        self.planned = SimpleNamespace(
            rows=rows, ends=ends, pages=pages, keys=keys, visible=visible, heads=num_qo_heads, kv_heads=num_kv_heads,
            size=head_dim_qk, page=page_size, dtype=q_data_type, window=window_left, causal=causal,
            scale=head_dim_qk**-0.5 if sm_scale is None else sm_scale, masked=custom_mask is not None,
        )  # fmt: skip
        self.plans.append(self.planned)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Return attention, and with it the logarithm to base 2 of the sums."""
        plan = self.planned
        assert plan is not None, "run before plan"
        k, v = paged_kv_cache
        assert isinstance(paged_kv_cache, tuple)
        assert q.shape == (plan.rows[-1], plan.heads, plan.size)
        assert k.shape == v.shape == (k.shape[0], plan.page, plan.kv_heads, plan.size)
        assert k.stride() == v.stride()
        for x in (q, k, v):
            assert x.dtype == plan.dtype
            assert x.device == self.device
            assert x.stride(-1) == 1
        out = q.new_zeros(q.shape) if out is None else out
        assert out.shape == q.shape
        assert out.dtype == q.dtype
        assert return_lse or lse is None
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if lse is None else lse
        assert lse.shape == q.shape[:2]
        assert lse.dtype == torch.float32
        for number, visible in enumerate(plan.visible):
            rows = slice(plan.rows[number], plan.rows[number + 1])
            pages = plan.pages[plan.ends[number] : plan.ends[number + 1]]
            assert min(pages) >= 0
            assert max(pages) < k.shape[0]
            group = plan.heads // plan.kv_heads
            keys, values = (
                x[pages].flatten(0, 1)[: plan.keys[number]].double().repeat_interleave(group, 1) for x in (k, v)
            )
            scores = torch.einsum("nhd,mhd->hnm", q[rows].double(), keys) * plan.scale
            scores = scores.masked_fill(~visible.to(q.device), -math.inf)
            sums = torch.logsumexp(scores, -1)
            out[rows] = torch.einsum("hnm,mhd->nhd", torch.exp(scores - sums[..., None]), values).to(out.dtype)
            lse[rows] = (sums / math.log(2)).T.to(torch.float32)
        return (out, lse) if return_lse else out


def library(dtypes: tuple[torch.dtype, ...] = HALVES, sizes: tuple[int, ...] | None = HEAD_SIZES) -> Any:
    """Return what stands for the module; ``sizes=None``: heads of any size."""
    kind = type("Wrapper", (BatchPrefillWithPagedKVCacheWrapper,), {"dtypes": dtypes, "sizes": sizes, "made": []})
    return SimpleNamespace(__version__="0.7.2.post1", BatchPrefillWithPagedKVCacheWrapper=kind)


def doubled(dtypes: tuple[torch.dtype, ...] = WIDE) -> FlashInferAttention:
    """Return the backend over what stands for FlashInfer, for heads of any size."""
    return FlashInferAttention(library=library(dtypes, sizes=None), dtypes=dtypes)
