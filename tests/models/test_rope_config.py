"""RoPE as config.json has it: both spellings of real models, every scaling against transformers,
every refusal.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.base.errors import CheckpointError, InvalidArgument, Unsupported
from quire.contracts.layers import RopeSpec
from quire.models.config_fields import ConfigFields
from quire.models.llama import read_qwen2_config
from quire.models.rope_config import ROPE_SCALINGS, read_rope, yarn_magnitude
from quire.ops.rope import RotaryTable, inverse_frequencies

U32 = torch.finfo(torch.float32).eps / 2
CPU = torch.device("cpu")


def frequency_bound(spec: RopeSpec) -> Tensor:
    """How far frequencies with float32 steps may be from ours, for each pair.

    The exponent is rounded, which counts ln(theta) times in the power; a few operations follow. A
    ramp has an error of a few roundings of an index below R or a number of turns, over a width of
    at least 1, and blends between the plain frequency and a smaller one. Longrope divides by a
    rounded number, which the relative terms cover.
    """
    exponent_P = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float64) / spec.rotary_dim
    plain_P = spec.theta**-exponent_P / (torch.tensor(spec.factors, dtype=torch.float64) if spec.factors else 1.0)
    return (20 + math.log(spec.theta) + spec.rotary_dim) * U32 * plain_P


def check_frequencies(spec: RopeSpec, theirs: Tensor, attention_factor: float) -> None:
    ours = inverse_frequencies(spec)
    assert ours.shape == theirs.shape == (spec.rotary_dim // 2,)
    assert ((ours - theirs.double()).abs() <= frequency_bound(spec)).all()
    assert spec.attention_factor == pytest.approx(attention_factor, rel=1e-12)  # float64 by another formula


# Real models


@dataclass(frozen=True)
class Case:
    """What config.json of a model says about RoPE, the class in transformers, and how its family
    reads it.
    """

    name: str
    family: str
    values: dict[str, Any]
    head_dim: int
    expected: RopeSpec
    reading: dict[str, Any] = field(default_factory=dict)
    layer_type: str | None = None


SHORT_96 = [1.0 + 0.02 * pair for pair in range(48)]
LONG_96 = [1.08 * 1.09**pair for pair in range(48)]
PHI3 = {
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
PHI3_SPEC = RopeSpec(
    theta=1e4,
    rotary_dim=96,
    scaling="longrope",
    factors=tuple(LONG_96),
    attention_factor=math.sqrt(1 + math.log(32) / math.log(4096)),
)
LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA31_SPEC = RopeSpec(theta=5e5, rotary_dim=128, scaling="llama3", factor=8.0, original_max_position=8192)
QWEN_YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
QWEN_SPEC = RopeSpec(
    theta=1e6,
    rotary_dim=128,
    scaling="yarn",
    factor=4.0,
    original_max_position=32768,
    attention_factor=0.1 * math.log(4) + 1,
)
GPT_OSS_YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "truncate": False,
}
GPT_OSS_SPEC = RopeSpec(
    theta=150000.0,
    rotary_dim=64,
    scaling="yarn",
    factor=32.0,
    original_max_position=4096,
    truncate=False,
    attention_factor=0.1 * math.log(32) + 1,
)
GEMMA3_GLOBAL = RopeSpec(theta=1e6, rotary_dim=256, scaling="linear", factor=8.0)
GEMMA3_LOCAL = RopeSpec(theta=1e4, rotary_dim=256)
GEMMA3_OLD = {
    "head_dim": 256,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "rope_theta": 1000000.0,
    "max_position_embeddings": 131072,
}
GEMMA3_NEW = {
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "full_attention": {"factor": 8.0, "rope_theta": 1000000.0, "rope_type": "linear"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}
GEMMA_GLOBAL_READING: dict[str, Any] = {"theta_default": 1e6}
GLM4_SPEC = RopeSpec(theta=1e4, rotary_dim=64, interleaved=True)
GLM4_READING: dict[str, Any] = {"partial_default": 0.5, "interleaved": True}
DEEPSEEK_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
DEEPSEEK_SPEC = RopeSpec(
    theta=1e4, rotary_dim=64, interleaved=True, scaling="yarn", factor=40.0, original_max_position=4096
)
CASES = (
    Case(
        "phi-3-mini-128k",
        "Phi3",
        {**PHI3, "rope_scaling": {"long_factor": LONG_96, "short_factor": SHORT_96, "type": "longrope"}},
        96,
        PHI3_SPEC,
    ),
    Case(
        "phi-4-mini",
        "Phi3",
        {
            "hidden_size": 3072,
            "num_attention_heads": 24,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rope_parameters": {
                "long_factor": LONG_96,
                "short_factor": SHORT_96,
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 4096,
            },
        },
        128,
        PHI3_SPEC,
        {"partial_default": 1.0},
    ),
    Case(
        "phi-3-mini-4k",
        "Phi3",
        {**PHI3, "max_position_embeddings": 4096, "rope_scaling": None},
        96,
        RopeSpec(theta=1e4, rotary_dim=96),
    ),
    Case(
        "llama-3.1",
        "Llama",
        {
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rope_scaling": {**LLAMA31, "rope_type": "llama3"},
        },
        128,
        LLAMA31_SPEC,
    ),
    Case(
        "llama-3.1-saved-again",
        "Llama",
        {
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_parameters": {**LLAMA31, "rope_type": "llama3", "rope_theta": 500000.0},
        },
        128,
        LLAMA31_SPEC,
    ),
    Case("llama-2", "Llama", {"head_dim": 128, "rope_scaling": None}, 128, RopeSpec(theta=1e4, rotary_dim=128)),
    Case(
        "qwen2.5-1m",
        "Qwen2",
        {
            "hidden_size": 3584,
            "num_attention_heads": 28,
            "max_position_embeddings": 1010000,
            "rope_theta": 10000000.0,
            "dual_chunk_attention_config": None,
        },
        128,
        RopeSpec(theta=1e7, rotary_dim=128),
    ),
    Case(
        "qwen2.5-yarn",
        "Qwen2",
        {
            "hidden_size": 3584,
            "num_attention_heads": 28,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "rope_scaling": {**QWEN_YARN, "type": "yarn"},
        },
        128,
        QWEN_SPEC,
    ),
    Case(
        "qwen3-yarn",
        "Qwen3",
        {
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_parameters": {**QWEN_YARN, "rope_type": "yarn", "rope_theta": 1000000},
        },
        128,
        QWEN_SPEC,
    ),
    Case(
        "gpt-oss",
        "GptOss",
        {
            "head_dim": 64,
            "initial_context_length": 4096,
            "max_position_embeddings": 131072,
            "rope_scaling": GPT_OSS_YARN,
            "rope_theta": 150000,
        },
        64,
        GPT_OSS_SPEC,
        {"theta_default": 150000.0},
    ),
    Case(
        "gpt-oss-without-theta",
        "GptOss",
        {"head_dim": 64, "max_position_embeddings": 131072, "rope_parameters": GPT_OSS_YARN},
        64,
        GPT_OSS_SPEC,
        {"theta_default": 150000.0},
    ),
    Case("gemma-3-old-full", "Gemma3Text", GEMMA3_OLD, 256, GEMMA3_GLOBAL, GEMMA_GLOBAL_READING, "full_attention"),
    Case("gemma-3-old-sliding", "Gemma3Text", GEMMA3_OLD, 256, GEMMA3_LOCAL, {}, "sliding_attention"),
    Case("gemma-3-new-full", "Gemma3Text", GEMMA3_NEW, 256, GEMMA3_GLOBAL, GEMMA_GLOBAL_READING, "full_attention"),
    Case("gemma-3-new-sliding", "Gemma3Text", GEMMA3_NEW, 256, GEMMA3_LOCAL, {}, "sliding_attention"),
    Case(
        "gemma-3-bare-full",
        "Gemma3Text",
        {"head_dim": 256},
        256,
        RopeSpec(theta=1e6, rotary_dim=256),
        GEMMA_GLOBAL_READING,
        "full_attention",
    ),
    Case(
        "gemma-3-null-sliding",
        "Gemma3Text",
        {"head_dim": 256, "rope_parameters": {"full_attention": {"rope_theta": 7e5}, "sliding_attention": None}},
        256,
        GEMMA3_LOCAL,
        {},
        "sliding_attention",
    ),
    Case(
        "olmo-3-full",
        "Olmo3",
        {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "max_position_embeddings": 65536,
            "rope_theta": 500000,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
        },
        128,
        RopeSpec(
            theta=5e5,
            rotary_dim=128,
            scaling="yarn",
            factor=8.0,
            original_max_position=8192,
            attention_factor=1.2079441541679836,
        ),
        {"theta_default": 5e5},
        "full_attention",
    ),
    Case(
        "glm-4",
        "Glm4",
        {"head_dim": 128, "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_scaling": None},
        128,
        GLM4_SPEC,
        GLM4_READING,
    ),
    Case("glm-4-without-fields", "Glm4", {"head_dim": 128}, 128, GLM4_SPEC, GLM4_READING),
    Case(
        "stablelm-2",
        "StableLm",
        {"hidden_size": 2048, "num_attention_heads": 32, "partial_rotary_factor": 0.25, "rope_theta": 10000},
        64,
        RopeSpec(theta=1e4, rotary_dim=16),
        {"partial_default": 0.25},
    ),
    Case(
        "stablelm-saved-again",
        "StableLm",
        {
            "hidden_size": 2560,
            "num_attention_heads": 32,
            "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000, "rope_type": "default"},
        },
        80,
        RopeSpec(theta=1e4, rotary_dim=20),
        {"partial_default": 0.25},
    ),
    Case(
        "deepseek-v3",
        "DeepseekV3",
        {"qk_rope_head_dim": 64, "max_position_embeddings": 163840, "rope_scaling": DEEPSEEK_YARN, "rope_theta": 10000},
        64,
        DEEPSEEK_SPEC,
        {"interleaved": True},
    ),
    Case(
        "deepseek-v2-lite",
        "DeepseekV3",
        {
            "qk_rope_head_dim": 64,
            "max_position_embeddings": 163840,
            "rope_scaling": {**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
            "rope_theta": 10000,
        },
        64,
        replace(DEEPSEEK_SPEC, attention_factor=(0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)),
        {"interleaved": True},
    ),
    Case(
        "dynamic-ntk",
        "Llama",
        {
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "dynamic", "factor": 2.0},
        },
        128,
        RopeSpec(theta=1e4, rotary_dim=128, scaling="dynamic", factor=2.0, original_max_position=4096, length=4096),
    ),
)


def read(values: dict[str, Any], head_dim: int = 16, **reading: Any) -> RopeSpec:
    given = copy.deepcopy(values)
    max_position, max_model_len = given.get("max_position_embeddings", 2048), reading.pop("max_model_len", None)
    sizes = SimpleNamespace(head_dim=head_dim, max_position=max_position, max_model_len=max_model_len)
    spec = read_rope(ConfigFields(given), sizes, **reading)
    assert given == values
    return spec


def rotary_module(family: str, values: dict[str, Any]) -> tuple[Any, Any]:
    """The configuration and the rotary embedding of a model in transformers."""
    config = getattr(transformers, f"{family}Config")(**copy.deepcopy(values))
    modeling = importlib.import_module(
        f"transformers.models.{config.model_type.removesuffix('_text')}.modeling_{config.model_type.removesuffix('_text')}"
    )
    return config, getattr(modeling, f"{family.removesuffix('Text')}RotaryEmbedding")(config)


@pytest.mark.turns(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_configurations_of_real_models(case: Case) -> None:
    spec = read(case.values, case.head_dim, layer_type=case.layer_type, **case.reading)
    assert spec == replace(case.expected, attention_factor=spec.attention_factor)
    assert spec.attention_factor == pytest.approx(case.expected.attention_factor, rel=1e-15)  # some units of float64
    _, module = rotary_module(case.family, case.values)
    prefix = f"{case.layer_type}_" if case.layer_type else ""
    scaling = getattr(module, f"{prefix}attention_scaling")
    positions = torch.cat((torch.arange(120), torch.arange(900, 960)))
    if spec.scaling == "longrope":
        # Their module switches to the long factors when it meets a long sequence.
        positions = torch.cat((positions, torch.tensor([131071])))
    kinds = {"layer_type": case.layer_type} if case.layer_type else {}
    theirs = module(torch.zeros(1), positions[None], **kinds)
    check_frequencies(spec, getattr(module, f"{prefix}inv_freq"), scaling)
    table = RotaryTable(spec, CPU)
    ours = table.rows(positions, int(positions.max()))
    # The angle in float32 is a rounded frequency times the position, rounded; then come cos, the
    # factor and ours.
    angle_P = positions[:, None] * (frequency_bound(spec) + 2 * U32 * inverse_frequencies(spec))
    bound = spec.attention_factor * (angle_P + 6 * U32)
    pairs = spec.rotary_dim // 2
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if spec.interleaved else (slice(0, pairs), slice(pairs, None))
    )
    for mine, other, sign in zip(ours, theirs, (1, -1), strict=True):
        assert ((mine[:, 0, second].double() - other[0, :, :pairs].double()).abs() <= bound).all()
        assert torch.equal(mine[:, 0, first], sign * mine[:, 0, second])


def test_the_first_name_of_longrope() -> None:
    longrope = {**PHI3, "rope_scaling": {"long_factor": LONG_96, "short_factor": SHORT_96, "type": "longrope"}}
    su = {**PHI3, "rope_scaling": {"long_factor": LONG_96, "short_factor": SHORT_96, "type": "su"}}
    assert read(su, 96) == read(longrope, 96) == replace(PHI3_SPEC, attention_factor=read(su, 96).attention_factor)


def test_olmo_3_scales_its_full_layers_only() -> None:
    values = next(case.values for case in CASES if case.name == "olmo-3-full")
    reading = {"layer_type": "sliding_attention", "theta_default": 5e5}
    assert read(values, 128, **reading) == RopeSpec(theta=5e5, rotary_dim=128)


# Every scaling

FULL = {"head_dim": 32, "max_position_embeddings": 2048}
THETAS = st.sampled_from([100.0, 1e4, 5e5, 1e6, 1e7])
FACTORS = st.sampled_from([1.0, 1.5, 2.0, 4.0, 8.0, 40.0])
ORIGINALS = st.sampled_from([32, 256, 1024, 2048])
WEIGHTS = st.sampled_from([None, 0.5, 0.707, 1.0])


@st.composite
def parameters(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """Parameters of one scaling with which transformers computes something, for heads of 32."""
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(THETAS)}
    fraction = draw(st.sampled_from([None, 1.0, 0.75, 0.5, 0.25]))
    if fraction is not None:
        found["partial_rotary_factor"] = fraction
    if kind in ("linear", "dynamic", "yarn", "llama3"):
        found["factor"] = draw(FACTORS)
    if kind in ("yarn", "longrope", "llama3"):
        found["original_max_position_embeddings"] = draw(ORIGINALS)
    optional: dict[str, st.SearchStrategy[Any]] = {}
    if kind == "yarn":
        optional = {
            "beta_fast": st.sampled_from([16.0, 32.0, 64]),
            "beta_slow": st.sampled_from([1, 2.0]),
            "truncate": st.booleans(),
            "attention_factor": st.sampled_from([0.5, 1.0, 1.3]),
        }
        weight = draw(WEIGHTS)
        if weight is not None:
            found |= {"mscale": weight, "mscale_all_dim": draw(st.sampled_from([0.3, 1.0]))}
    elif kind == "longrope":
        numbers = st.floats(1.0, 60.0)
        pairs = int(32 * (fraction or 1.0)) // 2
        for name in ("short_factor", "long_factor"):
            found[name] = draw(st.lists(numbers, min_size=pairs, max_size=pairs))
        optional = {"factor": FACTORS, "attention_factor": st.sampled_from([1.0, 1.19])}
    elif kind == "llama3":
        found |= {
            "low_freq_factor": draw(st.sampled_from([1.0, 2])),
            "high_freq_factor": draw(st.sampled_from([4, 32])),
        }
    elif kind == "proportional":
        optional = {"factor": FACTORS}
    for name, values in optional.items():
        if draw(st.booleans()):
            found[name] = draw(values)
    return found


@pytest.mark.turns(4)
@pytest.mark.parametrize("kind", [kind for kind in ROPE_SCALINGS if kind != "default"])
@settings(max_examples=40, deadline=None)
@drawn(data=st.data())
def test_against_the_functions_of_transformers(kind: str, data: st.DataObject) -> None:
    given = data.draw(parameters(kind))
    length = data.draw(st.sampled_from([None, 1, 31, 256, 257, 2048, 2049, 5000, 100_000]))
    config = transformers.LlamaConfig(**FULL, rope_parameters=copy.deepcopy(given))
    theirs, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length or 2048)
    spec = read({**FULL, "rope_parameters": given}, 32, max_model_len=length, partial_default=1.0)
    check_frequencies(spec, theirs, attention_factor)
    # The older spelling, in which the base and the fraction stand outside.
    inner = {("type" if name == "rope_type" else name): value for name, value in given.items()}
    outer = {
        name: inner.pop(name)
        for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
        if name in inner
    }
    old = {**FULL, **outer, "rope_scaling": inner}
    assert read(old, 32, max_model_len=length, partial_default=1.0) == spec
    both = {**old, "rope_parameters": given}
    assert read(both, 32, max_model_len=length, partial_default=1.0) == spec
    nested = {**FULL, "rope_parameters": {"full_attention": given, "sliding_attention": {"rope_theta": 3.0}}}
    assert read(nested, 32, max_model_len=length, partial_default=1.0, layer_type="full_attention") == spec


def test_every_scaling_of_transformers_is_read() -> None:
    assert set(ROPE_SCALINGS) == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairing_is_the_familys(interleaved: bool) -> None:
    assert read({}, 16, interleaved=interleaved) == RopeSpec(theta=1e4, rotary_dim=16, interleaved=interleaved)


# Lengths

LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [3.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("max_model_len", "chosen"), [(None, "long"), (256, "long"), (65, "long"), (64, "short"), (1, "short")]
)
def test_longrope_is_fixed_by_the_longest_sequence(max_model_len: int | None, chosen: str) -> None:
    values = {"max_position_embeddings": 256, "rope_scaling": LONGROPE}
    spec = read(values, 8, max_model_len=max_model_len)
    assert spec.factors == tuple(LONGROPE[f"{chosen}_factor"])
    # How much scores grow goes by what the model can do, whichever factors are taken.
    assert spec.attention_factor == pytest.approx(
        math.sqrt(1 + math.log(4) / math.log(64)), rel=1e-15
    )  # some units of float64
    assert spec.fingerprint() == read(values, 8, max_model_len=256 if chosen == "long" else 64).fingerprint()


def test_yarn_stretches_the_context_that_config_json_leaves_as_it_was() -> None:
    """What the models' cards of Qwen2.5 and Qwen3 let users add."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    values = {
        **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 32),
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 80,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "sliding_window": 100,
    }
    config = read_qwen2_config({**values, "rope_scaling": yarn})
    assert (read_qwen2_config(values).context, config.context) == (80, 256)
    assert [spec.layer_window for spec in read_qwen2_config(values).layers] == [None, None]
    assert [spec.layer_window for spec in config.layers] == [None, 100]
    assert read_qwen2_config({**values, "rope_scaling": {**yarn, "factor": 1.1}}).context == 80


def test_dynamic_is_fixed_by_the_longest_sequence() -> None:
    values = {"max_position_embeddings": 256, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    plain = inverse_frequencies(RopeSpec(theta=1e4, rotary_dim=8))
    for length in (None, 1, 255, 256):
        spec = read(values, 8, max_model_len=length)
        assert torch.equal(inverse_frequencies(spec), plain)
        assert spec == read(values, 8)
    longer = [read(values, 8, max_model_len=length) for length in (257, 512, 4096)]
    assert len({spec.fingerprint() for spec in (spec, *longer)}) == 4
    for one in longer:
        frequencies = inverse_frequencies(one)
        assert frequencies[0] == 1.0
        assert (frequencies[1:] < plain[1:]).all()
        stretch = 2.0 * one.length / 256 - 1
        assert float(plain[-1] / frequencies[-1]) == pytest.approx(stretch, rel=1e-12)  # float64 by another formula


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn", "proportional"])
def test_other_scalings_do_not_look_at_the_length(kind: str) -> None:
    given: dict[str, Any] = {"rope_type": kind}
    if kind != "default":
        given["factor"] = 4.0
    if kind == "llama3":
        given |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    specs = {read({"rope_parameters": given}, max_model_len=length) for length in (None, 1, 2048, 10**6)}
    assert len(specs) == 1


def test_a_length_below_one_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="max_model_len 0; at least 1"):
        read({}, max_model_len=0)


# Defaults


def test_missing_fields_mean_what_they_mean_in_transformers() -> None:
    yarn = {"type": "yarn", "original_max_position_embeddings": 512}
    spec = read({"rope_scaling": yarn})
    assert (spec.factor, spec.beta_fast, spec.beta_slow, spec.truncate) == (4.0, 32.0, 1.0, True)
    assert read({"rope_scaling": {**yarn, "factor": None, "beta_fast": None, "truncate": None}}) == spec
    assert read({"rope_scaling": {"type": "yarn", "factor": 4.0}}).original_max_position == 2048
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert read({"rope_scaling": scaling}).original_max_position == 2048
    assert read({"rope_parameters": {"rope_type": "proportional"}}).turning_dim == 16
    # A base of the family, and one of the configuration.
    assert read({}, theta_default=5e5).theta == 5e5
    assert read({"rope_theta": 7e5}, theta_default=5e5).theta == 7e5
    assert read({"rope_parameters": {}, "rope_scaling": {}}) == read({})


@pytest.mark.parametrize(
    "weights", [{}, {"mscale": 1.0}, {"mscale": 1, "mscale_all_dim": 0}, {"mscale": 0, "mscale_all_dim": None}]
)
def test_weights_that_say_nothing_are_yarns_own(weights: dict[str, Any]) -> None:
    spec = read({"rope_scaling": {"type": "yarn", "factor": 40.0, **weights}})
    assert spec.attention_factor == yarn_magnitude(40.0) == 0.1 * math.log(40.0) + 1
    assert yarn_magnitude(1.0) == yarn_magnitude(0.5, 7.0) == 1.0


def test_a_factor_of_the_authors_code_multiplies_yarns_magnitude() -> None:
    """As in DeepSeek-R1-0528-Qwen3-8B, where both make 1."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    spec = read({"rope_scaling": {**yarn, "attn_factor": 0.8782488562869419}})
    assert spec.attention_factor == pytest.approx(1.0, rel=1e-15)  # some units of float64
    assert read({"rope_scaling": {**yarn, "finetuned": True}}) == read({"rope_scaling": yarn})
    with pytest.raises(Unsupported, match=r"attn_factor is 0.5, which is not supported; expected null"):
        read({"rope_scaling": {**yarn, "attention_factor": 1.1, "attn_factor": 0.5}})
    weights = {"mscale": 1.0, "mscale_all_dim": 1.0}
    with pytest.raises(Unsupported, match=r"\['attn_factor'\] with RoPE scaling 'yarn'; expected none of them"):
        read({"rope_scaling": {**yarn, **weights, "attn_factor": 0.5}})


def test_a_spec_fits_into_a_header() -> None:
    """What a state file keeps of each layer: short for plain layers, and equal to what JSON gives
    back.
    """
    for case in CASES:
        spec = read(case.values, case.head_dim, layer_type=case.layer_type, **case.reading)
        found = json.loads(json.dumps(spec.as_json()))
        assert found == spec.as_json()
        assert RopeSpec(**{name: tuple(one) if isinstance(one, list) else one for name, one in found.items()}) == spec
        assert len(found) == 2 or spec.scaling != "default" or spec.interleaved
        assert hash(spec) == hash(replace(spec))


# Refusals


@pytest.mark.parametrize("kind", ["mrope", "axial", "ntk", "deepseek_yarn", "Yarn", ""])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_unknown_scalings_are_refused_by_name(kind: str, name: str, key: str) -> None:
    expected = ", ".join(ROPE_SCALINGS)
    with pytest.raises(
        Unsupported, match=f"{name}: RoPE scaling '{kind}' is not supported; expected one of {expected}"
    ):
        read({name: {key: kind, "factor": 4.0}})


COMPLETE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 1024},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "proportional": {"partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("kind", list(COMPLETE))
@pytest.mark.parametrize("name", ["mrope_section", "llama_4_scaling_beta", "alpha", "full_attention", "short_mscale"])
def test_parameters_that_a_scaling_does_not_have_are_refused_by_name(kind: str, name: str) -> None:
    read({"rope_parameters": {"rope_type": kind, **COMPLETE[kind]}})
    with pytest.raises(Unsupported, match=f"rope_parameters: .*{name}.* with RoPE scaling '{kind}'; expected none"):
        read({"rope_parameters": {"rope_type": kind, **COMPLETE[kind], name: {"factor": 1.0}}})


@pytest.mark.parametrize("kind", list(COMPLETE))
def test_parameters_of_another_scaling_are_refused_by_name(kind: str) -> None:
    for other, complete in COMPLETE.items():
        given = dict(complete)
        if kind == "dynamic":
            given.pop("original_max_position_embeddings", None)
        surplus = set(given) - set(COMPLETE[kind]) - {"original_max_position_embeddings", "partial_rotary_factor"}
        if kind in ("longrope", "proportional"):
            surplus -= {"factor"}
        if not surplus:
            continue
        with pytest.raises(Unsupported, match=f"{min(surplus)}.*with RoPE scaling '{kind}'"):
            read({"rope_parameters": {**given, **COMPLETE[kind], "rope_type": kind}})
        assert other != kind


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "linear"}, "factor is missing; expected a finite number above 0"),
        ({"type": "linear", "factor": 0}, "factor is 0"),
        ({"type": "linear", "factor": float("inf")}, "factor is inf"),
        ({"type": "linear", "factor": "8"}, "factor is '8'"),
        ({"type": "linear", "factor": True}, "factor is True"),
        ({"type": "dynamic"}, "factor is missing"),
        ({"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 512}, "512; expected max_position"),
        ({"type": "yarn"}, "factor is missing"),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192.0}, "8192.0; expected an integer"),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}, "is 0; expected an integer of 1"),
        ({"type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 2.0}, "beta_fast is 1.0; expected at least"),
        ({"type": "yarn", "factor": 4.0, "beta_fast": 0}, "beta_fast is 0"),
        ({"type": "yarn", "factor": 4.0, "truncate": 1}, "truncate is 1; expected true or false"),
        ({"type": "yarn", "factor": 4.0, "attention_factor": -1.0}, "attention_factor is -1.0"),
        ({"type": "yarn", "factor": 4.0, "mscale": 0.7}, "mscale_all_dim is missing; expected .* beside mscale"),
        ({"type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0}, "mscale is missing; expected .* mscale_all_dim"),
        ({"type": "yarn", "factor": 4.0, "mscale": False, "mscale_all_dim": 1.0}, "mscale is False"),
        ({"type": "yarn", "factor": 4.0, "mscale": -1.0, "mscale_all_dim": 1.0}, "mscale is -1.0"),
        ({"type": "yarn", "factor": 4.0, "rope_theta": 1.0}, "rope_theta is 1.0; expected more than 1 for yarn"),
        ({**COMPLETE["longrope"], "type": "su", "short_factor": None}, "short_factor is None; expected a list of 8"),
        ({**COMPLETE["longrope"], "type": "longrope", "long_factor": [1.0] * 7}, "long_factor is .*a list of 8"),
        ({**COMPLETE["longrope"], "type": "longrope", "long_factor": [1.0] * 7 + [0]}, "long_factor is .*above 0"),
        ({**COMPLETE["longrope"], "type": "longrope", "long_factor": [10**400] * 8}, "long_factor is .*finite"),
        ({**COMPLETE["longrope"], "type": "longrope", "long_factor": [True] * 8}, "long_factor is .*numbers"),
        ({**COMPLETE["longrope"], "type": "longrope", "original_max_position_embeddings": 1}, "an integer of 2 or"),
        ({**COMPLETE["longrope"], "type": "longrope", "original_max_position_embeddings": None}, "an integer of 1 or"),
        ({**COMPLETE["llama3"], "type": "llama3", "high_freq_factor": 1.0}, "high_freq_factor is 1.0; expected more"),
        ({**COMPLETE["llama3"], "type": "llama3", "low_freq_factor": None}, "low_freq_factor is None"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor is 0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; expected at most 1"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
    ],
)
def test_bad_values_name_the_parameter_and_what_is_expected(given: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"rope_scaling: .*{message}"):
        read({"rope_scaling": given})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "rope_theta is 10000.0, but rope_parameters says",
        ),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            "partial_rotary_factor is 0.5, but rope_parameters says 0.25",
        ),
        (
            {
                "original_max_position_embeddings": 64,
                "rope_scaling": {**LONGROPE, "original_max_position_embeddings": 32},
            },
            "original_max_position_embeddings is 64, but rope_scaling says 32",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 1e4}},
            "rope_parameters .* and rope_scaling .* disagree; keep one",
        ),
        ({"rope_scaling": 8.0}, "rope_scaling is 8.0; expected an object"),
        ({"rope_parameters": [1]}, "rope_parameters is .*; expected an object"),
    ],
)
def test_spellings_that_disagree_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(values, 8, partial_default=1.0)


def test_two_names_of_one_scaling_must_agree() -> None:
    with pytest.raises(Unsupported, match="rope_type is 'default' and type is 'mrope'; expected the same"):
        read({"rope_scaling": {"type": "mrope", "rope_type": "default"}})
    read({"rope_scaling": {**LONGROPE, "type": "su", "rope_type": "longrope"}}, 8)


def test_a_fraction_is_refused_where_heads_turn_as_a_whole() -> None:
    for values in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        with pytest.raises(Unsupported, match=r"partial_rotary_factor 0.5; expected 1.0"):
            read(values)
    assert read({"partial_rotary_factor": 1}) == read({})
    spec = read({"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5}})
    assert (spec.rotary_dim, spec.turning_dim) == (16, 8)


@pytest.mark.parametrize(("head_dim", "fraction"), [(10, 0.5), (16, 0.1), (12, 0.26), (7, 1.0)])
def test_columns_that_make_no_pairs_are_refused(head_dim: int, fraction: float) -> None:
    with pytest.raises(CheckpointError, match=f"of heads of {head_dim} columns makes .*; expected an even number"):
        read({"partial_rotary_factor": fraction}, head_dim, partial_default=1.0)


def test_dynamic_needs_more_than_one_pair() -> None:
    with pytest.raises(CheckpointError, match="dynamic RoPE of 2 columns; expected 4 or more"):
        read({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 2)


def test_parameters_by_type_of_layer_are_checked() -> None:
    with pytest.raises(CheckpointError, match=r"rope_parameters has \['rope_type', 'factor'\]; expected an object"):
        read({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, layer_type="full_attention")
    with pytest.raises(Unsupported, match=r"rope_parameters has \['slidng_attention'\]; expected types of layers"):
        read({"rope_parameters": {"slidng_attention": {"rope_theta": 3.0}}}, layer_type="full_attention")
    declared = {
        "layer_types": ["full_attention", "chunked_attention"],
        "rope_parameters": {"chunked_attention": {"rope_theta": 3.0}, "full_attention": {"rope_theta": 7.0}},
    }
    assert read(declared, layer_type="chunked_attention").theta == 3.0
    with pytest.raises(
        CheckpointError, match=r"rope_local_base_freq is 5.0, but rope_parameters.sliding_attention says"
    ):
        read(
            {"rope_local_base_freq": 5.0, "rope_parameters": {"sliding_attention": {"rope_theta": 3.0}}},
            layer_type="sliding_attention",
        )
    with pytest.raises(CheckpointError, match=r"rope_parameters.full_attention .* and rope_scaling .* disagree"):
        read(
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"full_attention": {"rope_theta": 1e4}},
            },
            layer_type="full_attention",
        )
