"""Rotary embeddings against transformers' modules, against exact arithmetic at far positions, and as they are stored."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import mpmath  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import CohereConfig, GlmConfig, GPTNeoXConfig, LlamaConfig
from transformers.models.cohere import modeling_cohere
from transformers.models.glm import modeling_glm
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from quire.contracts.layers import FullAttention, RopeSpec
from quire.ops.rope import RotaryTable, inverse_frequencies, rotate

from .oracle import frequencies, rotated, rotation_bound, unit
from .pair import Pair, same_bits, split_columns

CPU = torch.device("cpu")
U32, U64 = unit(torch.float32), unit(torch.float64)


def turn(spec: RopeSpec, x_THD: Tensor, positions_T: Tensor) -> Tensor:
    cos, sin = RotaryTable(spec, CPU).rows(positions_T, int(positions_T.max()))
    assert cos.shape == sin.shape == (len(positions_T), 1, spec.rotary_dim)
    assert cos.dtype == sin.dtype == torch.float32
    return rotate(x_THD, cos, sin, interleaved=spec.interleaved)


def float32_angle_bound(spec: RopeSpec, x_THD: Tensor, positions_T: Tensor) -> Tensor:
    """How far an implementation with float32 angles may be from the exact rotation, ``[T, 1, 1]``.

    The frequency takes a power, a quotient and at most five operations more, the product with the position one:
    the angle is off by 8 u times itself; then the rotation in float32, as ``rotation_bound`` has it.
    """
    size = x_THD.double().norm(dim=-1).amax(-1)
    fastest = max(frequencies(spec))
    angle = 8 * U32 * positions_T.double() * fastest
    bound: Tensor = size * (math.sqrt(2) * angle + 2 * (3 * math.sqrt(2) + 1) * U32)
    return bound.view(-1, 1, 1)


def against(module: Any, modeling: Any, spec: RopeSpec, x_THD: Tensor, positions_T: Tensor) -> None:
    """Our rotation and that of a transformers module, which are both near the exact one."""
    cos, sin = module(x_THD, positions_T[None])
    x_BHTD = x_THD.transpose(0, 1)[None]
    theirs = modeling.apply_rotary_pos_emb(x_BHTD, x_BHTD, cos, sin)[0][0].transpose(0, 1)
    ours = turn(spec, x_THD, positions_T)
    assert ((ours - theirs).abs() <= 2 * float32_angle_bound(spec, x_THD, positions_T)).all()
    assert not torch.equal(ours[1:, :, : spec.rotary_dim], x_THD[1:, :, : spec.rotary_dim])
    assert same_bits(ours[..., spec.rotary_dim :], x_THD[..., spec.rotary_dim :])


LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("parameters", "spec"),
    [
        ({"rope_type": "default", "rope_theta": 10000.0}, RopeSpec(theta=10000.0, rotary_dim=64)),
        ({"rope_type": "default", "rope_theta": 5e5}, RopeSpec(theta=5e5, rotary_dim=64)),
        (
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            RopeSpec(theta=10000.0, rotary_dim=64, scaling="linear", factor=4.0),
        ),
        (
            {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
            RopeSpec(theta=5e5, rotary_dim=64, scaling="llama3", factor=8.0, original_max_position=256),
        ),
        (
            {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 32.0},
            RopeSpec(
                theta=1e4,
                rotary_dim=64,
                scaling="llama3",
                factor=8.0,
                low_freq_factor=2.0,
                high_freq_factor=32.0,
                original_max_position=256,
            ),
        ),
    ],
)
def test_against_transformers(parameters: dict[str, Any], spec: RopeSpec) -> None:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        rope_parameters=parameters,
    )
    module = modeling_llama.LlamaRotaryEmbedding(config)
    # Every kind of frequency of the rule is there: kept, divided, between.
    ratio = inverse_frequencies(dataclasses.replace(spec, scaling="default")) / inverse_frequencies(spec)
    if spec.scaling == "llama3":
        assert ratio[0] == 1.0
        assert ratio[-1] == 8.0
        assert ((ratio > 1.0) & (ratio < 8.0)).any()
    ours = inverse_frequencies(spec)
    assert ((module.inv_freq.double() - ours).abs() <= 8 * U32 * ours).all()
    positions = torch.cat((torch.arange(300), torch.tensor([1000, 2047])))
    x = torch.randn(len(positions), 3, 64, generator=torch.Generator().manual_seed(0))
    against(module, modeling_llama, spec, x, positions)


def test_interleaved_against_transformers() -> None:
    config = CohereConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    module = modeling_cohere.CohereRotaryEmbedding(config)
    spec = RopeSpec(theta=10000.0, rotary_dim=16, interleaved=True)
    positions = torch.arange(200)
    x = torch.randn(200, 2, 16, generator=torch.Generator().manual_seed(0))
    against(module, modeling_cohere, spec, x, positions)


def test_partial_columns_against_transformers() -> None:
    config = GPTNeoXConfig(
        hidden_size=64,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )
    module = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)
    spec = RopeSpec(theta=10000.0, rotary_dim=8)
    positions = torch.arange(200)
    x = torch.randn(200, 2, 16, generator=torch.Generator().manual_seed(0))
    against(module, modeling_gpt_neox, spec, x, positions)


def test_partial_and_interleaved_against_transformers() -> None:
    config = GlmConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )
    module = modeling_glm.GlmRotaryEmbedding(config)
    spec = RopeSpec(theta=10000.0, rotary_dim=8, interleaved=True)
    positions = torch.arange(100)
    x = torch.randn(100, 2, 16, generator=torch.Generator().manual_seed(0))
    against(module, modeling_glm, spec, x, positions)


SPECS = st.builds(
    RopeSpec,
    theta=st.sampled_from([100.0, 1e4, 5e5, 1e6]),
    rotary_dim=st.sampled_from([2, 4, 6, 10, 64]),
    interleaved=st.booleans(),
    scaling=st.sampled_from(["default", "linear", "llama3"]),
    factor=st.sampled_from([2.0, 8.0, 32.0]),
    low_freq_factor=st.just(1.0),
    high_freq_factor=st.sampled_from([4.0, 8.0]),
    original_max_position=st.sampled_from([64, 8192]),
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@settings(max_examples=60, deadline=None)
@given(spec=SPECS, dtype=st.sampled_from(DTYPES), extra=st.sampled_from([0, 1, 6]), seed=st.integers(0, 2**20))
def test_against_pair_by_pair(spec: RopeSpec, dtype: torch.dtype, extra: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    positions = torch.cat((torch.arange(3), torch.randint(0, 5000, (5,), generator=generator)))
    x = torch.randn(8, 2, spec.rotary_dim + extra, generator=generator).to(dtype)
    before = x.clone()
    out = turn(spec, x, positions)
    assert out.dtype == dtype
    assert torch.equal(x, before)
    for row, position in enumerate(positions.tolist()):
        exact = rotated(x[row], position, spec)
        # Angles in float64: a power and a few operations, then a product with the position.
        angle = 16 * U64 * position * max(frequencies(spec))
        bound = rotation_bound(exact, dtype) + float(exact.norm(dim=-1).max()) * angle
        assert (out[row].double() - exact).abs().max() <= bound
        assert same_bits(out[row, :, spec.rotary_dim :], x[row, :, spec.rotary_dim :])
    assert same_bits(out[0], x[0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("position", [10**7, 10**7 + 1, 5 * 10**7 + 3, 2**31 - 1])
def test_far_positions_against_exact_arithmetic(position: int, interleaved: bool) -> None:
    """float32 has no place for the fraction of an angle from 2^23 on."""
    spec = RopeSpec(theta=10000.0, rotary_dim=16, interleaved=interleaved)
    cos, sin = RotaryTable(spec, CPU).rows(torch.tensor([position]), position)
    mpmath.mp.prec = 200
    for pair in range(8):
        freq = mpmath.power(10000, -mpmath.mpf(2 * pair) / 16)
        angle = position * freq
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 8)
        # The frequency in float64 is off by a few roundings, and so is the product.
        bound = U32 + 8 * U64 * float(angle)
        for column, sign in ((first, -1), (second, 1)):
            assert abs(mpmath.mpf(float(cos[0, 0, column])) - mpmath.cos(angle)) <= bound
            assert abs(mpmath.mpf(float(sin[0, 0, column])) - sign * mpmath.sin(angle)) <= bound


def test_scores_depend_on_differences_only() -> None:
    spec = RopeSpec(theta=10000.0, rotary_dim=8)
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    scores = []
    for shift in (0, 1, 1000, 1 << 19, 10**7):
        positions = torch.tensor([shift + 7, shift])
        turned = turn(spec, torch.cat((q, k)), positions)
        scores.append(float(turned[0, 0].double() @ turned[1, 0].double()))
    size = float(q.norm() * k.norm())
    assert max(scores) - min(scores) <= 4 * size * (3 * math.sqrt(2) + 1) * 2 * U32 + size * 8 * U64 * 10**7


def test_table_grows_and_ends() -> None:
    """Rows are the same whether they were made early, late, or one by one behind the end of the table."""
    spec = RopeSpec(theta=10000.0, rotary_dim=6)
    table = RotaryTable(spec, CPU)
    early = table.rows(torch.tensor([0, 5]), 5)
    kept = early[0].clone()
    table.rows(torch.tensor([70_000]), 70_000)
    late = table.rows(torch.tensor([0, 5]), 5)
    assert all(torch.equal(a, b) for a, b in zip(early, late, strict=True))
    end = RotaryTable.MAX_ROWS
    positions = torch.tensor([0, 5, end - 1])
    inside = table.rows(positions, end - 1)
    beyond = table.rows(torch.cat((positions, torch.tensor([end, 3 * end]))), 3 * end)
    for a, b in zip(inside, beyond, strict=True):
        # float64 angles, rounded once: the last bit at most, where vectors of other lengths are computed.
        assert ((a - b[:3]).abs() <= 2 * U32).all()
    assert torch.equal(early[0], kept)
    assert len(table._rows) <= end
    alone = RotaryTable(spec, CPU).rows(torch.tensor([3 * end]), 3 * end)
    for a, b in zip(alone, beyond, strict=True):
        assert ((a[0] - b[4]).abs() <= 2 * U32).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rope",
    [
        RopeSpec(theta=100.0, rotary_dim=8),
        RopeSpec(theta=100.0, rotary_dim=4, interleaved=True),
        RopeSpec(theta=1e4, rotary_dim=8, scaling="linear", factor=2.0),
        RopeSpec(theta=1e4, rotary_dim=6, scaling="llama3", factor=8.0, original_max_position=64),
    ],
)
def test_stored_keys_by_mode(rope: RopeSpec, dtype: torch.dtype) -> None:
    """``normal``: rotated at the true position, over all chunks, and in a fork; ``none``: as given."""
    specs = [
        FullAttention(num_heads=2, num_kv_heads=2, head_dim=8, value_dim=8, rope=rope, rope_mode=mode)
        for mode in ("normal", "none")
    ]
    pair = Pair(specs, dtype=dtype, page_size=3)
    pair.add(0)
    raw: list[Tensor] = []
    for count in (4, 1, 6):
        pair.begin([0], [count])
        qkv = pair.random(0, count)
        for layer in (0, 1):
            pair.layer(layer, qkv)
        pair.end()
        raw.append(split_columns(specs[0], qkv)[1])
    keys = torch.cat(raw)
    pair.fork(0, 1, 7)
    pair.append(1, 2)
    stored = pair.state.debug_get_kv(0)[0]
    assert same_bits(stored[1], keys)
    for position in range(11):
        exact = rotated(keys[position], position, rope)
        assert (stored[0][position].double() - exact).abs().max() <= rotation_bound(exact, dtype)
    assert same_bits(pair.state.debug_get_kv(1, 0, 7)[0], stored[:, :7])


def test_fingerprints_tell_rotations_apart() -> None:
    base = RopeSpec(theta=10000.0, rotary_dim=8, scaling="llama3", factor=2.0, original_max_position=64)
    others = [
        dataclasses.replace(base, **change)
        for change in (
            {"theta": 5e5},
            {"rotary_dim": 6},
            {"interleaved": True},
            {"scaling": "linear"},
            {"factor": 4.0},
            {"low_freq_factor": 2.0},
            {"high_freq_factor": 8.0},
            {"original_max_position": 128},
        )
    ]
    prints = {spec.fingerprint() for spec in (base, *others)}
    assert len(prints) == len(dataclasses.fields(RopeSpec)) + 1
    assert dataclasses.replace(base).fingerprint() == base.fingerprint()
