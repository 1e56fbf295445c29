"""Rotary embeddings against transformers' modules, against exact arithmetic at far positions, and
as they are stored.
"""

from __future__ import annotations

import dataclasses
import json
import math
from functools import cache
from itertools import pairwise
from typing import Any

import mpmath  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.examples import examples
from torch import Tensor
from transformers import CohereConfig, GlmConfig, GPTNeoXConfig, GptOssConfig, LlamaConfig, Phi3Config
from transformers.models.cohere import modeling_cohere
from transformers.models.glm import modeling_glm
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

from quire.base.errors import InvalidArgument, Unsupported
from quire.contracts.layers import FullAttention, RopeMode, RopeSpec
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kv.contract import ContractState
from quire.ops.rope import RotaryTable, inverse_frequencies, rotate

from .faces import contract
from .oracle import attention_bound, rotation_bound, unit
from .pair import Pair, num_columns, same_bits, split_columns

CPU = torch.device("cpu")
U32, U64 = unit(torch.float32), unit(torch.float64)


# The oracle: one pair after the other, in 200 bits


@cache
def exact_frequencies(spec: RopeSpec) -> tuple[Any, ...]:
    """Angle per position of each pair, by the rules as their authors wrote them down."""
    mp = mpmath.mp
    mp.prec = 200
    dim, original = spec.rotary_dim, mp.mpf(spec.original_max_position)
    found = []
    for pair in range(dim // 2):
        base, factor = mp.mpf(spec.theta), mp.mpf(spec.factor)
        if spec.scaling == "dynamic":
            stretch = factor * max(spec.length, spec.original_max_position) / original - (factor - 1)
            base *= stretch ** (mp.mpf(dim) / (dim - 2))
        freq = base ** (-mp.mpf(2 * pair) / dim)
        wavelength = 2 * mp.pi / freq
        if spec.scaling == "linear":
            freq /= factor
        elif spec.scaling == "longrope":
            freq /= spec.factors[pair]
        elif spec.scaling == "proportional":
            freq = freq / factor if pair < spec.turning_dim // 2 else mp.mpf(0)
        elif spec.scaling == "llama3":
            if wavelength > original / spec.low_freq_factor:
                freq /= factor
            elif wavelength >= original / spec.high_freq_factor:
                smooth = (original / wavelength - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
                freq = (1 - smooth) * freq / factor + smooth * freq
        elif spec.scaling == "yarn":
            low, high = (
                dim * mp.log(original / (2 * mp.pi * turns)) / (2 * mp.log(base))
                for turns in (spec.beta_fast, spec.beta_slow)
            )
            if spec.truncate:
                low, high = mp.floor(low), mp.ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            high = high + mp.mpf("0.001") if low == high else high
            ramp = min(max((pair - low) / (high - low), 0), 1)
            freq = ramp * freq / factor + (1 - ramp) * freq
        found.append(freq)
    return tuple(found)


@cache
def frequencies(spec: RopeSpec) -> list[float]:
    return [float(freq) for freq in exact_frequencies(spec)]


def rotated(x_HD: Tensor, position: int, spec: RopeSpec) -> Tensor:
    """One token's heads at one position, in float64, pair by pair."""
    out = x_HD.double().clone()
    half = spec.rotary_dim // 2
    for pair, freq in enumerate(frequencies(spec)):
        a, b = (2 * pair, 2 * pair + 1) if spec.interleaved else (pair, pair + half)
        cos, sin = (spec.attention_factor * one(position * freq) for one in (math.cos, math.sin))
        out[:, a] = x_HD[:, a].double() * cos - x_HD[:, b].double() * sin
        out[:, b] = x_HD[:, b].double() * cos + x_HD[:, a].double() * sin
    return out


def turn(spec: RopeSpec, x_THD: Tensor, positions_T: Tensor) -> Tensor:
    cos, sin = RotaryTable(spec, CPU).rows(positions_T, int(positions_T.max()))
    assert cos.shape == sin.shape == (len(positions_T), 1, spec.rotary_dim)
    assert cos.dtype == sin.dtype == torch.float32
    return rotate(x_THD, cos, sin, interleaved=spec.interleaved)


def float32_angle_bound(spec: RopeSpec, x_THD: Tensor, positions_T: Tensor) -> Tensor:
    """How far an implementation with float32 angles may be from the exact rotation, ``[T, 1, 1]``.

    The frequency takes a power, a quotient and at most five operations more, the product with the
    position one: the angle is off by 8 u times itself; then the rotation in float32, as
    ``rotation_bound`` has it. A ramp over the pairs has an error of R u, and an exponent that is no
    binary fraction counts ln(theta) times.
    """
    size = x_THD.double().norm(dim=-1).amax(-1) * spec.attention_factor
    fastest = max(frequencies(spec))
    steps = 8 if spec.scaling in ("default", "linear", "llama3") else 20 + math.log(spec.theta) + spec.rotary_dim
    angle = steps * U32 * positions_T.double() * fastest
    bound: Tensor = size * (math.sqrt(2) * angle + 2 * (4 * math.sqrt(2) + 1) * U32)
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


def test_longrope_and_partial_columns_against_transformers() -> None:
    short, long = [1.0 + 0.1 * pair for pair in range(6)], [2.0 * 1.5**pair for pair in range(6)]
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": short,
        "long_factor": long,
    }
    config = Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=4096,
        original_max_position_embeddings=128,
        rope_parameters=parameters,
    )
    module = modeling_phi3.Phi3RotaryEmbedding(config)
    grown = math.sqrt(1 + math.log(32) / math.log(128))
    # Their module looks at the longest position of the call.
    for factors, last in ((short, 127), (long, 128)):
        spec = RopeSpec(
            theta=10000.0, rotary_dim=12, scaling="longrope", factors=tuple(factors), attention_factor=grown
        )
        positions = torch.cat((torch.arange(100), torch.tensor([last])))
        x = torch.randn(101, 2, 16, generator=torch.Generator().manual_seed(0))
        against(module, modeling_phi3, spec, x, positions)


@pytest.mark.parametrize("truncate", [False, True])
def test_yarn_against_transformers(truncate: bool) -> None:
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 256,
        "truncate": truncate,
    }
    spec = RopeSpec(
        theta=150000.0,
        rotary_dim=64,
        scaling="yarn",
        factor=32.0,
        original_max_position=256,
        truncate=truncate,
        attention_factor=0.1 * math.log(32) + 1,
    )
    config = GptOssConfig(head_dim=64, max_position_embeddings=8192, rope_parameters=parameters)
    positions = torch.arange(200)
    x = torch.randn(200, 2, 64, generator=torch.Generator().manual_seed(0))
    against(modeling_gpt_oss.GptOssRotaryEmbedding(config), modeling_gpt_oss, spec, x, positions)


SCALED = (
    RopeSpec(theta=1e4, rotary_dim=8, scaling="linear", factor=2.0),
    RopeSpec(theta=1e4, rotary_dim=6, scaling="llama3", factor=8.0, original_max_position=64),
    RopeSpec(theta=1e4, rotary_dim=8, scaling="dynamic", factor=2.0, original_max_position=64, length=1000),
    RopeSpec(
        theta=1e4,
        rotary_dim=8,
        scaling="yarn",
        factor=4.0,
        original_max_position=512,
        beta_fast=8.0,
        attention_factor=1.3,
    ),
    RopeSpec(
        theta=100.0,
        rotary_dim=6,
        interleaved=True,
        scaling="yarn",
        factor=4.0,
        original_max_position=64,
        truncate=False,
    ),
    RopeSpec(theta=1e4, rotary_dim=8, scaling="longrope", factors=(1.0, 1.5, 3.0, 7.0), attention_factor=1.19),
    RopeSpec(theta=1e4, rotary_dim=8, scaling="proportional", factor=2.0, turning_dim=4),
)
"""One spec of each scaling, small enough for heads of 8."""


STEP = RopeSpec(
    theta=1e4,
    rotary_dim=64,
    scaling="yarn",
    factor=4.0,
    original_max_position=64,
    beta_fast=2.0,
    beta_slow=2.0,
    truncate=False,
)
"""A ramp without width."""


@st.composite
def specs(draw: st.DrawFn) -> RopeSpec:
    scaling = draw(st.sampled_from(["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]))
    columns = draw(st.sampled_from([4, 6, 10, 64] if scaling == "dynamic" else [2, 4, 6, 10, 64]))
    numbers = st.lists(st.floats(1.0, 60.0), min_size=columns // 2, max_size=columns // 2)
    return RopeSpec(
        theta=draw(st.sampled_from([100.0, 1e4, 5e5, 1e6])),
        rotary_dim=columns,
        interleaved=draw(st.booleans()),
        scaling=scaling,
        factor=draw(st.sampled_from([1.0, 2.0, 8.0, 32.0])),
        low_freq_factor=1.0,
        high_freq_factor=draw(st.sampled_from([4.0, 8.0])),
        original_max_position=draw(st.sampled_from([64, 8192])),
        beta_fast=draw(st.sampled_from([2.0, 8.0, 32.0])),
        beta_slow=draw(st.sampled_from([1.0, 2.0])),
        truncate=draw(st.booleans()),
        length=draw(st.sampled_from([1, 64, 100_000])),
        factors=tuple(draw(numbers)) if scaling == "longrope" else (),
        turning_dim=2 * draw(st.integers(0, columns // 2)),
        attention_factor=draw(st.sampled_from([1.0, 0.7, 1.3465735902799727])),
    )


@settings(max_examples=examples(50, 150), deadline=None)
@given(spec=specs())
@example(spec=STEP)
def test_frequencies_against_exact_arithmetic(spec: RopeSpec) -> None:
    found = inverse_frequencies(spec)
    assert found.dtype == torch.float64
    assert found.shape == (spec.rotary_dim // 2,)
    for pair, (ours, exact) in enumerate(zip(found.tolist(), exact_frequencies(spec), strict=True)):
        plain = spec.theta ** (-2 * pair / spec.rotary_dim)
        # The exponent is rounded, a ramp has an error of its width's share, then a few operations.
        assert abs(ours - exact) <= (30 + 2 * math.log(spec.theta) + spec.rotary_dim) * U64 * plain


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@settings(max_examples=examples(40, 60), deadline=None)
@given(spec=specs(), dtype=st.sampled_from(DTYPES), extra=st.sampled_from([0, 1, 6]), seed=st.integers(0, 2**20))
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
        angle = (30 + spec.rotary_dim) * U64 * position * max(frequencies(spec))
        bound = rotation_bound(exact, dtype) + float(exact.norm(dim=-1).max()) * angle
        assert (out[row].double() - exact).abs().max() <= bound
        assert same_bits(out[row, :, spec.rotary_dim :], x[row, :, spec.rotary_dim :])
    if spec.attention_factor == 1.0:
        assert same_bits(out[0], x[0])


FAR = (
    RopeSpec(theta=10000.0, rotary_dim=16),
    RopeSpec(theta=10000.0, rotary_dim=16, interleaved=True),
    *SCALED,
)


@pytest.mark.parametrize("spec", FAR, ids=lambda spec: f"{spec.scaling}-{spec.interleaved}")
@pytest.mark.parametrize("position", [10**7, 10**7 + 1, 5 * 10**7 + 3, 2**31 - 1])
def test_far_positions_against_exact_arithmetic(position: int, spec: RopeSpec) -> None:
    """float32 has no place for the fraction of an angle from 2^23 on."""
    cos, sin = RotaryTable(spec, CPU).rows(torch.tensor([position]), position)
    half = spec.rotary_dim // 2
    for pair, freq in enumerate(exact_frequencies(spec)):
        angle = position * freq
        first, second = (2 * pair, 2 * pair + 1) if spec.interleaved else (pair, pair + half)
        # The frequency in float64 is off by a few roundings (of the plain one, where a ramp
        # blends), and so is the product.
        plain = spec.theta ** (-2 * pair / spec.rotary_dim)
        bound = spec.attention_factor * (2 * U32 + (16 if spec.scaling == "default" else 64) * U64 * position * plain)
        for column, sign in ((first, -1), (second, 1)):
            exact_cos, exact_sin = (spec.attention_factor * one(angle) for one in (mpmath.cos, mpmath.sin))
            assert abs(mpmath.mpf(float(cos[0, 0, column])) - exact_cos) <= bound
            assert abs(mpmath.mpf(float(sin[0, 0, column])) - sign * exact_sin) <= bound


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rows", [1, 100])
def test_columns_that_stand_still_pass_to_the_bit(rows: int, interleaved: bool) -> None:
    spec = RopeSpec(theta=1e4, rotary_dim=12, interleaved=interleaved, scaling="proportional", turning_dim=4)
    x = torch.randn(rows, 2, 12, generator=torch.Generator().manual_seed(0))
    out = turn(spec, x, torch.arange(10**7, 10**7 + rows))
    rope = [0, 1, 2, 3] if interleaved else [0, 1, 6, 7]
    still = [column for column in range(12) if column not in rope]
    assert same_bits(out[..., still], x[..., still])
    assert (out[..., rope] != x[..., rope]).any(-1).all()


@pytest.mark.turns(3)
@pytest.mark.parametrize("spec", [FAR[0], FAR[1], *SCALED], ids=lambda spec: f"{spec.scaling}-{spec.interleaved}")
@pytest.mark.parametrize("rows", [3, 80])
def test_rotations_compose_and_turn_back(spec: RopeSpec, rows: int) -> None:
    """The query at its position, turned back by a count, is the query at the difference, and counts
    one factor.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 2, 16, generator=generator)
    table = RotaryTable(spec, CPU)
    for top in (1000, 10**7):
        positions = torch.randint(top // 2, top, (rows,), generator=generator)
        counts = torch.minimum(positions, torch.randint(0, top, (rows,), generator=generator))
        counts[0] = 0
        cos, sin = table.turn_back(counts, int(counts.max()))
        assert cos.shape == sin.shape == (rows, 1, spec.rotary_dim)
        back = rotate(turn(spec, x, positions), cos, sin, interleaved=spec.interleaved)
        assert same_bits(back[0], turn(spec, x, positions)[0])
        for row in range(rows):
            exact = rotated(x[row], int(positions[row] - counts[row]), spec)
            angle = (64 + 2 * spec.rotary_dim) * U64 * top * max(frequencies(spec))
            bound = 3 * rotation_bound(exact, torch.float32) + float(exact.norm(dim=-1).max()) * angle
            assert (back[row].double() - exact).abs().max() <= bound


def test_rows_of_any_order_and_a_generous_maximum() -> None:
    """Queries at relative positions and stored keys ask for rows that are not in order, under a
    common maximum.
    """
    spec = SCALED[3]
    positions = torch.tensor([900, 3, 3, 0, 1023])
    cos, sin = RotaryTable(spec, CPU).rows(positions, 1023)
    for top in (5000, RotaryTable.MAX_ROWS, 10**9):
        other = RotaryTable(spec, CPU).rows(positions, top)
        for a, b in zip((cos, sin), other, strict=True):
            assert ((a - b).abs() <= 2 * U32 * spec.attention_factor).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("spec", FAR, ids=lambda spec: f"{spec.scaling}-{spec.interleaved}")
def test_rows_on_a_gpu(spec: RopeSpec) -> None:
    positions = torch.tensor([0, 1, 77, 4095])
    x = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0))
    table = RotaryTable(spec, torch.device("cuda"))
    for shift in (0, 10**7):
        top = shift + 4095
        near, far = (one.rows(positions.to(one.device) + shift, top) for one in (RotaryTable(spec, CPU), table))
        for a, b in zip(near, far, strict=True):
            assert b.is_cuda
            # cos and sin of a GPU are good to 2 units of float64.
            assert ((a - b.cpu()).abs() <= 2 * U32 * spec.attention_factor).all()
        out = rotate(x.cuda(), *far, interleaved=spec.interleaved).cpu()
        assert ((out - turn(spec, x, positions + shift)).abs() <= 8 * rotation_bound(x, torch.float32)).all()


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (
            RopeSpec(theta=1e4, rotary_dim=8, scaling="longrope", factors=(2.0,)),
            InvalidArgument,
            "longrope: 1 factors for 4 pairs; one for each is needed",
        ),
        (RopeSpec(theta=1e4, rotary_dim=8, scaling="longrope"), InvalidArgument, "longrope: 0 factors for 4 pairs"),
        (
            RopeSpec(theta=1e4, rotary_dim=2, scaling="dynamic", original_max_position=8),
            InvalidArgument,
            "dynamic: 2 rotary columns .*; more than 2",
        ),
        (RopeSpec(theta=1e4, rotary_dim=8, scaling="dynamic"), InvalidArgument, "an original length of 0"),
        (
            RopeSpec(theta=1.0, rotary_dim=8, scaling="yarn", original_max_position=8),
            InvalidArgument,
            "yarn: theta 1.0 .*; more than 1",
        ),
        (RopeSpec(theta=1e4, rotary_dim=8, scaling="yarn"), InvalidArgument, "an original length of 0"),
        (
            RopeSpec(theta=1e4, rotary_dim=8, scaling="mrope"),  # type: ignore[arg-type]
            Unsupported,
            "RoPE scaling 'mrope' is not computed",
        ),
    ],
)
def test_specs_that_say_nothing_are_refused(spec: RopeSpec, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RotaryTable(spec, CPU)


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
    """Rows are the same whether they were made early, late, or one by one behind the end of the
    table.
    """
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
        # float64 angles, rounded once: the last bit at most, where vectors of other lengths are
        # computed.
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
    """``normal``: rotated at the true position, over all chunks, and in a fork;
    ``none``: as given."""
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


def run(state: ContractState, seq_id: int, qkv: Tensor) -> Tensor:
    """One forward of one layer."""
    state.begin_forward([seq_id], [len(qkv)])
    out = state.attention_with_fused_qkv(0, qkv)
    state.end_forward()
    return out


def chunkings(total: int) -> list[list[int]]:
    """Every way to cut so many tokens into chunks."""
    cuts = range(1, total)
    return [
        [b - a for a, b in pairwise((0, *(cut for cut in cuts if bits >> cut & 1), total))]
        for bits in range(0, 1 << total, 2)
    ]


@pytest.mark.turns(6)
@pytest.mark.parametrize("mode", ["normal", "inline"])
@pytest.mark.parametrize("rope", SCALED, ids=lambda spec: f"{spec.scaling}-{spec.interleaved}")
def test_scaled_layers_in_every_chunking(rope: RopeSpec, mode: RopeMode) -> None:
    """Attention and stored keys against the exact rotation, wherever a prompt is cut."""
    total, heads = 5, 2
    spec = FullAttention(num_heads=heads, num_kv_heads=heads, head_dim=8, value_dim=8, rope=rope, rope_mode=mode)
    qkv = torch.randn(total, num_columns(spec), generator=torch.Generator().manual_seed(0))
    q, k, v = split_columns(spec, qkv)
    keys = [(rotated(k[at], at, rope), v[at].double()) for at in range(total)]
    exact = []
    for at in range(total):
        query = rotated(q[at], at, rope)
        scores = torch.stack([(query * key).sum(-1) for key, _ in keys[: at + 1]]) * spec.scale
        exact.append((scores.softmax(0).unsqueeze(-1) * torch.stack([value for _, value in keys[: at + 1]])).sum(0))
    state = contract([spec], capacity=1000, page_size=2, backend=SdpaAttention())
    stored = []
    for seq_id, lengths in enumerate(chunkings(total)):
        state.add_sequence(seq_id)
        out = torch.cat([run(state, seq_id, part) for part in qkv.split(lengths)])
        for at in range(total):
            bound = attention_bound(rotated(q[at], at, rope), keys[: at + 1], spec.scale, torch.float32)
            assert (out[at].double() - exact[at]).abs().max() <= bound
        stored.append(state.debug_get_kv(seq_id)[0])
    assert len(stored) == 16
    assert all(same_bits(one, stored[0]) for one in stored)
    for at in range(total):
        if mode == "inline":
            assert same_bits(stored[0][0][at], k[at])
        else:
            assert (stored[0][0][at].double() - keys[at][0]).abs().max() <= rotation_bound(keys[at][0], torch.float32)


def test_fingerprints_tell_rotations_apart() -> None:
    base = RopeSpec(
        theta=10000.0,
        rotary_dim=8,
        scaling="llama3",
        factor=2.0,
        original_max_position=64,
        factors=(1.0, 2.0, 3.0, 4.0),
    )
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
            {"beta_fast": 16.0},
            {"beta_slow": 2.0},
            {"truncate": False},
            {"length": 100},
            {"factors": (1.0, 2.0, 3.0, 5.0)},
            {"turning_dim": 4},
            {"attention_factor": 1.1},
        )
    ]
    prints = {spec.fingerprint() for spec in (base, *others)}
    assert len(prints) == len(dataclasses.fields(RopeSpec)) + 1
    assert len({base, *others}) == len(prints)
    assert dataclasses.replace(base).fingerprint() == base.fingerprint()
    assert dataclasses.replace(base, theta=10000, factor=2).fingerprint() == base.fingerprint()


def test_json_holds_what_is_not_neutral() -> None:
    assert RopeSpec(theta=10000, rotary_dim=8).as_json() == {"theta": 10000.0, "rotary_dim": 8}
    assert json.dumps(RopeSpec(theta=10000, rotary_dim=8).as_json()) == '{"theta": 10000.0, "rotary_dim": 8}'
    for spec in SCALED:
        found = spec.as_json()
        assert json.loads(json.dumps(found)) == found
        assert RopeSpec(**{**found, "factors": tuple(found.get("factors", ()))}) == spec
