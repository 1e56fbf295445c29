"""Values of windowed attention: against a cache that rotates its keys anew, in each RoPE mode, far
out.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.contracts.layers import FullAttention, RopeMode, RopeSpec
from quire.kernels.attention.sdpa import SdpaAttention

from .faces import contract
from .oracle_values import scores_of, softmax_state, state_bounds, turned
from .pair import Pair, attention, num_columns, split_columns

Eviction = Literal["token", "forward"]
EVICTIONS: tuple[Eviction, ...] = ("token", "forward")


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("mode", ["none", "normal", "inline"])
def test_against_a_cache_that_rotates_its_keys_anew(mode: RopeMode, eviction: Eviction) -> None:
    """StreamingLLM as its authors run it: raw keys are kept, and rotated at 0, 1, 2, ...

    in the cache at each query.
    """
    rope = RopeSpec(theta=100.0, rotary_dim=6)
    spec = FullAttention(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=5, rope=rope, rope_mode=mode)
    state = contract([spec], capacity=200, page_size=4, backend=SdpaAttention())
    state.add_sequence(0)
    state.enable_sliding_window_for_seq(0, 7, 3, eviction=eviction)
    generator = torch.Generator().manual_seed(8)
    raw: list[tuple[Tensor, Tensor]] = []
    for count in (5, 1, 9, 2, 40, 1, 1):
        n = len(raw)
        q, k, v = split_columns(spec, torch.randn(count, num_columns(spec), generator=generator))
        raw += zip(k, v, strict=True)
        if mode == "none":
            q, k = (torch.from_numpy(turned(x.double().numpy(), range(n, n + count), rope)).float() for x in (q, k))
        state.begin_forward([0], [count])
        got = state.attention_with_fused_qkv(0, torch.cat([x.flatten(1) for x in (q, k, v)], 1))
        state.end_forward()
        for row in range(count):
            e = max(0, (n + row + 1 if eviction == "token" else n) - 7)
            kept = [i for i in range(n + row + 1) if i < 3 or i >= 3 + e]
            raw_k, raw_v = (torch.stack([raw[i][which] for i in kept]).double().numpy() for which in (0, 1))
            q_raw = q[row].double().numpy()[None]
            if mode == "none":
                q_raw = turned(q_raw, [-(n + row)], rope)
            query, keys = turned(q_raw, [len(kept) - 1], rope)[0], turned(raw_k, range(len(kept)), rope)
            out, lse = softmax_state(scores_of(query, keys, spec.scale), raw_v)
            bound, _ = state_bounds(query, keys, raw_v, lse, spec.scale, False, torch.float32)
            assert np.abs(got[row].double().numpy() - out).max() <= 2 * bound


def test_modes_are_equal() -> None:
    """Raw q and k in ``normal`` and ``inline``, rotated ones in ``none``, with and
    without windows."""
    rope = RopeSpec(theta=100.0, rotary_dim=4, interleaved=True)
    generator = torch.Generator().manual_seed(2)
    results: dict[str, list[Tensor]] = {}
    values = {count: torch.randn(2 * count, 6 * 8 + 2 * 8, generator=generator) for count in (9, 1, 6)}
    modes: tuple[RopeMode, ...] = ("none", "normal", "inline")
    bounds: list[Tensor] = []
    for mode in modes:
        spec = FullAttention(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8, rope=rope, rope_mode=mode)
        pair = Pair([spec])
        pair.add(0, 1)
        pair.window(0, 6, 2)
        results[mode] = []
        for count, qkv in values.items():
            pair.begin([0, 1], [count, count])
            q, k, v = split_columns(spec, qkv)
            if mode == "none":
                at = pair.oracle.positions()
                q, k = (torch.from_numpy(turned(x.double().numpy(), at, rope)).float() for x in (q, k))
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            exact = pair.oracle.attention_with_fused_qkv(0, q, k, v)
            results[mode].append(pair.layer(0, torch.cat([x.flatten(1) for x in (q, k, v)], 1)))
            bounds.append(exact.out_bound)
            pair.end()
    for other in ("normal", "inline"):
        for one, two, bound in zip(results["none"], results[other], bounds, strict=False):
            assert ((one - two).abs().amax((1, 2)) <= 2 * bound).all()


@pytest.mark.product(2)
@pytest.mark.parametrize("mode", ["none", "normal", "inline"])
@pytest.mark.parametrize("length", [1_000_007, 10_000_019])
def test_positions_that_are_far_out(length: int, mode: RopeMode) -> None:
    """A sequence that has slid for a long time: imported, for nobody wants to run it."""
    spec = attention(mode=mode, rotary_dim=6)
    source = contract([spec], capacity=64, page_size=1, backend=SdpaAttention())
    generator = torch.Generator().manual_seed(length)
    source.add_sequence(0)
    source.enable_sliding_window_for_seq(0, 6, 2)
    for count in (7, 1):
        source.begin_forward([0], [count])
        source.attention_with_fused_qkv(0, torch.randn(count, num_columns(spec), generator=generator))
        source.end_forward()
    metadata, group = source.get_checkpoint_metadata(0), source.export_page_group(0, 0)
    assert metadata["held"] == [{"layers": [0], "ranges": [[0, 2], [4, 8]]}]
    metadata["length"], metadata["evicted"] = length, length - 6
    metadata["held"][0]["ranges"] = [[0, 2], [length - 4, length]]
    state = contract([spec], capacity=64, page_size=4, backend=SdpaAttention())
    state.prepare_import(0, metadata)
    state.import_page_group(0, 0, group)
    state.finish_import(0)
    state.check()
    assert state.reachable(0) == [range(3), range(length - 1, length + 1)]
    places = [0, 1, *range(length - 4, length)]
    keys, values = group["k"].double().numpy(), group["v"].double().numpy()
    for step in range(3):
        q_HD, k_HD, v_HD = (x[0] for x in split_columns(spec, torch.randn(1, num_columns(spec), generator=generator)))
        at = length + step
        state.begin_forward([0], [1])
        assert state.get_query_positions().tolist() == [at]
        assert state.get_query_positions(relative=True).tolist() == [5]
        got = state.attention_with_fused_qkv(0, torch.cat([x.flatten() for x in (q_HD, k_HD, v_HD)])[None])
        state.end_forward()
        stored = state.debug_get_kv(0, at, at + 1, layer=0)[0].double().numpy()
        keys, values = np.concatenate([keys, stored]), np.concatenate([values, v_HD.double().numpy()[None]])
        places.append(at)
        assert spec.rope
        if mode == "normal":
            exact_k = turned(k_HD.double().numpy()[None], [at], spec.rope)
            assert np.abs(stored - exact_k).max() <= 1e-6 * np.abs(exact_k).max()
        raw = q_HD.double().numpy()[None]
        window_q, sink_q = (
            (raw, turned(raw, [5 - at], spec.rope))
            if mode == "none"
            else (
                turned(raw, [at], spec.rope),
                turned(raw, [5], spec.rope),
            )
        )
        seen = [0, 1, *range(3 + step, 7 + step)]
        k_seen = keys[seen]
        if mode == "inline":
            k_seen = turned(k_seen, [places[i] for i in seen], spec.rope)
        scores = np.concatenate(
            [scores_of(sink_q[0], k_seen[:2], spec.scale), scores_of(window_q[0], k_seen[2:], spec.scale)], 1
        )
        out, lse = softmax_state(scores, values[seen])
        bound, _ = state_bounds(raw[0], k_seen, values[seen], lse, spec.scale, False, torch.float32)
        assert np.abs(got[0].double().numpy() - out).max() <= bound
