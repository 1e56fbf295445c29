"""The torch attention where its inputs or its plan are unusual, against the reference backend in float32.

Both sum the same terms in another order: for sums of m products of numbers around 1 they agree within ``m * eps``.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.contracts.attention import AttentionBackend, AttentionState, ForwardPlan
from quire.contracts.layers import FullAttention
from quire.kernels import sdpa
from quire.kernels.sdpa import SdpaAttention, SdpaPlan
from quire.kv.paged import PagedKVState
from quire.ops.attention import ReferenceAttention

PAST, KV_HEADS, DIM = 21, 2, 4


def run(backend: AttentionBackend, chunks: list[Tensor], value_dim: int, groups: int) -> Tensor:
    """Outputs of the last chunk of one sequence."""
    spec = FullAttention(num_heads=groups * KV_HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, value_dim=value_dim)
    state = PagedKVState([spec], capacity=256, page_size=4, backend=backend)
    state.add_sequence(0)
    for qkv_TC in chunks:
        state.begin_forward([0], [len(qkv_TC)])
        out = state.attention_with_fused_qkv(0, qkv_TC)
        state.end_forward()
    return out


def assert_agree(found: Tensor, expected: Tensor, keys: int) -> None:
    assert float((found - expected).abs().max()) <= keys * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("count", [1, 3, 16, 17, 40])
@pytest.mark.parametrize("past", [0, PAST])
@pytest.mark.parametrize("groups", [1, 2])
def test_rows_of_any_stride(count: int, past: int, groups: int) -> None:
    """A projection whose columns are not neighbours in memory, as the transpose of one."""
    torch.manual_seed(count)
    columns = (groups + 2) * KV_HEADS * DIM
    chunks = [torch.randn(past, columns)] if past else []
    strided = torch.randn(columns, count).T
    found = run(SdpaAttention(), [*chunks, strided], DIM, groups)
    expected = run(ReferenceAttention(), [*chunks, strided.contiguous()], DIM, groups)
    assert_agree(found, expected, past + count)


@pytest.mark.parametrize("scores", [1, 100, 1 << 12, sdpa.MAX_SCORES])
@pytest.mark.parametrize("groups", [1, 3])
def test_explicit_scores_in_blocks(scores: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dk != Dv has no kernel with a log-sum-exp: scores exist, a block of queries at a time."""
    torch.manual_seed(groups)
    monkeypatch.setattr(sdpa, "MAX_SCORES", scores)
    columns = (groups + 1) * KV_HEADS * DIM + KV_HEADS * 6
    chunks = [torch.randn(PAST, columns), torch.randn(37, columns)]
    assert_agree(run(SdpaAttention(), chunks, 6, groups), run(ReferenceAttention(), chunks, 6, groups), PAST + 37)


def test_no_more_scores_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "MAX_SCORES", 512)
    sizes: list[int] = []
    explicit = sdpa.explicit

    def counting(q_NHD: Tensor, k_HMD: Tensor, *args: Tensor | float, **kwargs: int | None) -> AttentionState:
        sizes.append(q_NHD.shape[0] * q_NHD.shape[1] * k_HMD.shape[1])
        return explicit(q_NHD, k_HMD, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(sdpa, "explicit", counting)
    columns = 2 * KV_HEADS * DIM + KV_HEADS * 6
    run(SdpaAttention(), [torch.randn(PAST, columns), torch.randn(37, columns)], 6, 1)
    assert len(sizes) > 2
    assert max(sizes) <= 512


def test_decodes_are_not_padded_to_the_rows_of_a_chunk() -> None:
    """One short chunk in the batch must not multiply the work of every decode beside it."""
    counts, pasts = np.array([1, 5, 1, 16, 1]), np.array([30] * 5)
    starts = np.concatenate(([0], np.cumsum(counts)))
    plan = ForwardPlan(
        page_size=16,
        counts=counts,
        pasts=pasts,
        starts=starts,
        tables=tuple(np.array([2 * entry + 1, 2 * entry, entry + 20], dtype=np.int32) for entry in range(5)),
        positions_T=torch.arange(24),
        slots_T=torch.arange(24),
        max_position=45,
        device=torch.device("cpu"),
    )
    prepared: SdpaPlan = SdpaAttention().plan(plan, torch.float32)
    assert sorted((group.b, group.n) for group in prepared.paged) == [(2, 16), (3, 1)]
