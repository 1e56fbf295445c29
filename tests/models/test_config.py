"""config.json: both spellings, and everything that changes the computation is either read or refused by name."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.contracts.layers import RopeSpec
from quire.errors import CheckpointError, Unsupported
from quire.models.config import HARMLESS, NEUTRAL, ROPE_SCALINGS
from quire.models.families import FAMILIES, family_of

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(architecture: str = "LlamaForCausalLM", **changes: Any) -> Any:
    values = {**BASE, **changes, "architectures": [architecture]}
    if architecture == "MistralForCausalLM":
        values.setdefault("sliding_window", None)
    return family_of(values).read_config({name: value for name, value in values.items() if value != "missing"})


@pytest.mark.parametrize("architecture", list(FAMILIES))
@given(name=st.sampled_from(sorted(NEUTRAL)), value=st.sampled_from([True, 2, 0.37, "gelu", [4, 2], {"bits": 4}]))
def test_what_is_not_computed_is_refused_by_name(architecture: str, name: str, value: Any) -> None:
    with pytest.raises(Unsupported, match=f"{name} is .*; expected "):
        read(architecture, **{name: value})


@pytest.mark.parametrize("architecture", list(FAMILIES))
@given(name=st.sampled_from(sorted(NEUTRAL)), data=st.data())
def test_neutral_values_change_nothing(architecture: str, name: str, data: st.DataObject) -> None:
    value = data.draw(st.sampled_from([None, *NEUTRAL[name]]))
    assert read(architecture, **{name: value}) == read(architecture)


@given(name=st.sampled_from(sorted(HARMLESS - {"architectures", "model_type"})), value=st.sampled_from([None, 3, 0.5]))
def test_harmless_fields_change_nothing(name: str, value: Any) -> None:
    assert read(**{name: value}) == read()
    assert not HARMLESS & set(NEUTRAL)


def test_unknown_fields_are_passed_over_with_a_line_in_the_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="quire.models.config"):
        assert read(some_private_note=7, use_cache=True) == read()
    assert "some_private_note" in caplog.text
    assert "use_cache" not in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 500.0, "rope_scaling": None},
        {"rope_theta": 500.0, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": {"rope_theta": 500.0}},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500},
        {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1.0, "factor": None}},
    ],
)
def test_spellings_of_plain_rope_agree(changes: dict[str, Any]) -> None:
    assert read(**changes).rope == RopeSpec(theta=500.0, rotary_dim=8)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3}},
        {
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3},
            "rope_scaling": {"type": "llama3", **LLAMA3},
        },
    ],
)
def test_spellings_of_llama3_rope_agree(changes: dict[str, Any]) -> None:
    assert read(**changes).rope == RopeSpec(
        theta=1e4,
        rotary_dim=8,
        scaling="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=64,
    )


def test_llama3_rope_without_its_own_length_takes_the_context() -> None:
    scaling = {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": None}
    assert read(rope_scaling=scaling).rope.original_max_position == BASE["max_position_embeddings"]


def test_rope_base_defaults_to_ten_thousand() -> None:
    assert read().rope == RopeSpec(theta=10_000.0, rotary_dim=8)
    assert set(ROPE_SCALINGS) == {"default", "linear", "llama3"}


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "proportional", "mrope", "su"])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_other_scalings_are_refused_by_name(kind: str, field: str, key: str) -> None:
    with pytest.raises(Unsupported, match=f"{field}: RoPE scaling '{kind}'.*default, linear, llama3"):
        read(**{field: {key: kind, "factor": 4.0}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [2, 2]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"type": "mrope", "rope_type": "default"}}, "'default' and type is 'mrope'"),
        ({"rope_scaling": {"type": "default", "factor": 8.0}}, "factor"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, r"layer_types\[1\]"),
        ({"sliding_window": 127}, "sliding_window is 127, shorter than max_position_embeddings"),
        (
            {"sliding_window": "missing", "architecture": "MistralForCausalLM", "max_position_embeddings": 8192},
            "is 4096",
        ),
        ({"architecture": "MistralForCausalLM", "attention_bias": True}, "attention_bias is true"),
        ({"architecture": "Qwen2ForCausalLM", "use_sliding_window": True, "sliding_window": 64}, "use_sliding_window"),
        ({"architecture": "Qwen3ForCausalLM", "mlp_bias": True}, "mlp_bias is true"),
        (
            {"architecture": "GPT2LMHeadModel"},
            "GPT2LMHeadModel.*LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM",
        ),
    ],
)
def test_unsupported_choices_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "missing"}, "hidden_size is missing; expected an integer of 1 or more"),
        ({"vocab_size": "97"}, "vocab_size is '97'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; expected a divisor"),
        ({"num_key_value_heads": "missing", "architecture": "Qwen2ForCausalLM"}, "num_key_value_heads is missing"),
        ({"hidden_size": 33}, "hidden_size is 33; expected a multiple"),
        ({"head_dim": 7}, "head_dim is 7; expected an even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; expected true or false"),
        ({"model_type": "mistral"}, "model_type is 'mistral'; expected 'llama'"),
        ({"sliding_window": "long"}, "sliding_window is 'long'"),
        ({"layer_types": ["full_attention"]}, "layer_types is .*; expected a list of 3"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "rope_theta is 10000.0, but rope_parameters says",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 1e4}}, "disagree"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            "high_freq_factor is 1.0; expected more",
        ),
        ({"rope_scaling": 8.0}, "rope_scaling is 8.0; expected an object"),
    ],
)
def test_bad_values_name_the_field_and_what_is_expected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(**changes)


@pytest.mark.parametrize("found", [None, "LlamaForCausalLM", [], ["LlamaForCausalLM", "Qwen2ForCausalLM"], [3]])
def test_exactly_one_architecture_is_expected(found: Any) -> None:
    with pytest.raises(CheckpointError, match=r"architectures is .*; expected one of \['LlamaForCausalLM'"):
        family_of({"architectures": found})


def test_missing_fields_mean_what_they_mean_in_transformers() -> None:
    assert read(num_key_value_heads="missing").num_kv_heads == BASE["num_attention_heads"]
    assert read("Qwen2ForCausalLM", num_key_value_heads=None).num_kv_heads == BASE["num_attention_heads"]
    assert read("Qwen3ForCausalLM").head_dim == 128
    assert read("Qwen3ForCausalLM", head_dim=6).head_dim == 6
    assert read("Qwen2ForCausalLM", sliding_window=64, use_sliding_window=False).qkv_bias
    assert read(sliding_window=128) == read()


def test_canonical_form_holds_the_computation_only() -> None:
    assert read(rope_theta=1e4, dtype="float16").canonical() == read(max_position_embeddings=64).canonical()
    for change in ({"rope_theta": 500.0}, {"rms_norm_eps": 1e-5}, {"num_key_value_heads": 1}, {"attention_bias": True}):
        assert read(**change).canonical() != read().canonical()
    assert json.loads(read().canonical())["architecture"] == "LlamaForCausalLM"
