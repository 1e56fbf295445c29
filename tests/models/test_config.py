"""config.json: both name_tables, and everything that changes the computation is either read or
refused by name.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import CheckpointError, InvalidArgument, Unsupported
from quire.contracts.layers import FullAttention, WindowedAttention
from quire.models.config_fields import HARMLESS, NEUTRAL
from quire.models.decoder import DecoderConfig
from quire.models.families import family_of

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}
ROPE = {"partial_rotary_factor"}
"""Read by all with the rest of RoPE."""
ALL = ROPE | {"hidden_act"}
READS: dict[str, set[str]] = {
    "LlamaForCausalLM": ALL | {"attention_bias", "mlp_bias"},
    "MistralForCausalLM": ALL,
    "Ministral3ForCausalLM": ALL,
    "Qwen2ForCausalLM": ALL | {"use_sliding_window", "attention_bias"},
    "Qwen3ForCausalLM": ALL | {"use_sliding_window", "attention_bias"},
    "Phi3ForCausalLM": ALL,
    "Gemma2ForCausalLM": ALL
    | {
        "hidden_activation",
        "attention_bias",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    },
    "Gemma3ForCausalLM": ALL
    | {
        "hidden_activation",
        "attention_bias",
        "query_pre_attn_scalar",
        "final_logit_softcapping",
        "sliding_window_pattern",
    },
    "Olmo2ForCausalLM": ALL | {"attention_bias"},
    "Cohere2ForCausalLM": ALL | {"attention_bias", "sliding_window_pattern", "logit_scale", "position_embedding_type"},
    "SmolLM3ForCausalLM": ALL
    | {"attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval", "use_sliding_window"},
    "StableLmForCausalLM": ALL | {"use_qkv_bias", "qk_layernorm", "use_parallel_residual"},
    "GraniteForCausalLM": ALL
    | {
        "attention_bias",
        "mlp_bias",
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    },
    "GlmForCausalLM": ALL | {"attention_bias"},
    "Glm4ForCausalLM": ALL | {"attention_bias"},
}
"""What each dense family computes of the fields that are refused elsewhere."""


def read(architecture: str = "LlamaForCausalLM", max_model_len: int | None = None, **changes: Any) -> DecoderConfig:
    """The configuration that ``BASE`` with ``changes`` makes; "missing" takes a field out."""
    values = {**BASE, **changes, "architectures": [architecture]}
    values = {name: value for name, value in values.items() if value != "missing"}
    found = family_of(values).read_config(values, max_model_len)
    assert isinstance(found, DecoderConfig)
    return found


@pytest.mark.parametrize("architecture", READS)
@given(data=st.data(), value=st.sampled_from([True, 2, 0.37, "relu", [4, 2], {"bits": 4}]))
def test_what_is_not_computed_is_refused_by_name(architecture: str, data: st.DataObject, value: Any) -> None:
    name = data.draw(st.sampled_from(sorted(set(NEUTRAL) - READS[architecture])))
    with pytest.raises(Unsupported, match=f"{name} is .*; expected "):
        read(architecture, **{name: value})


@pytest.mark.parametrize("architecture", READS)
@given(data=st.data())
def test_neutral_values_change_nothing(architecture: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(set(NEUTRAL) - READS[architecture])))
    value = data.draw(st.sampled_from([None, *NEUTRAL[name]]))
    assert read(architecture, **{name: value}) == read(architecture)


@pytest.mark.parametrize("architecture", READS)
@pytest.mark.parametrize("value", ["relu", "gelu_new", "quick_gelu", 3, [2]])
def test_activations_are_read_by_name(architecture: str, value: Any) -> None:
    field = "hidden_activation" if architecture.startswith("Gemma") else "hidden_act"
    names = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
    for name, expected in names.items():
        assert read(architecture, **{field: name}).activation == expected
    with pytest.raises(Unsupported, match=f"{field} is .*expected one of .*silu"):
        read(architecture, **{field: value})


@given(name=st.sampled_from(sorted(HARMLESS - {"architectures", "model_type"})), value=st.sampled_from([None, 3, 0.5]))
def test_harmless_fields_change_nothing(name: str, value: Any) -> None:
    assert read(**{name: value}) == read()
    assert not HARMLESS & set(NEUTRAL)


def test_unknown_fields_are_passed_over_with_a_line_in_the_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="quire.models.config_fields"):
        assert read(some_private_note=7, use_cache=True) == read()
    assert "some_private_note" in caplog.text
    assert "use_cache" not in caplog.text


@pytest.mark.parametrize("architecture", READS)
def test_each_layer_has_the_rotation_and_the_window_of_its_kind(architecture: str) -> None:
    """Every family's own: which layers have windows, which rotate, how much of a head and which
    pairs.
    """
    windows, rotations = WINDOWS.get(architecture, (None, None)), ROTATIONS.get(architecture, {})
    config = read(architecture, num_hidden_layers=8, sliding_window=windows[0] and 6, rope_theta=500.0)
    found = [spec.layer_window for spec in config.layers]
    assert found == [6 if windows[0] and (layer + 1) % windows[1] else None for layer in range(8)]
    for layer, spec in enumerate(config.layers):
        assert isinstance(spec, FullAttention if found[layer] is None else WindowedAttention)
        if (layer + 1) % rotations.get("nope", 99) == 0:
            assert (spec.rope, spec.rope_mode) == (None, "none")
            continue
        assert spec.rope is not None
        assert spec.rope_mode == "normal"
        assert spec.rope.rotary_dim == spec.head_dim * rotations.get("partial", 1.0)
        assert spec.rope.interleaved == rotations.get("interleaved", False)
        local = architecture == "Gemma3ForCausalLM" and found[layer] is not None
        assert spec.rope.theta == (10_000.0 if local else 500.0)


WINDOWS: dict[str, tuple[int | None, Any]] = {
    "MistralForCausalLM": (6, 99),
    "Phi3ForCausalLM": (6, 99),
    "Gemma2ForCausalLM": (6, 2),
    "Gemma3ForCausalLM": (6, 6),
    "Cohere2ForCausalLM": (6, 4),
}
"""Where ``sliding_window`` alone makes windows: and of how many layers the last one has none."""

ROTATIONS: dict[str, dict[str, Any]] = {
    "Cohere2ForCausalLM": {"interleaved": True, "nope": 4},
    "SmolLM3ForCausalLM": {"nope": 4},
    "StableLmForCausalLM": {"partial": 0.25},
    "GlmForCausalLM": {"partial": 0.5, "interleaved": True},
    "Glm4ForCausalLM": {"partial": 0.5, "interleaved": True},
}


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_windows_of_qwen_begin_at_a_layer_and_have_a_switch(architecture: str) -> None:
    def windows(**changes: Any) -> list[int | None]:
        changes = {"sliding_window": 6, "num_hidden_layers": 4, **changes}
        return [spec.layer_window for spec in read(architecture, **changes).layers]

    assert windows(max_window_layers=1) == windows(max_window_layers=0, use_sliding_window=False) == [None] * 4
    assert windows(max_window_layers=1, use_sliding_window=True) == [None, 6, 6, 6]
    assert windows(max_window_layers=0, use_sliding_window=True) == [6] * 4
    assert windows(use_sliding_window=True) == [None] * 4
    assert windows(use_sliding_window=True, max_window_layers=0, sliding_window=None) == [None] * 4
    assert windows(use_sliding_window=True, max_window_layers=0, sliding_window=128) == [None] * 4
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows(use_sliding_window=True, layer_types=kinds) == [6, None, 6, None]
    with pytest.raises(
        CheckpointError, match="layer 0 is a sliding_attention layer, but sliding_window is null or off"
    ):
        windows(layer_types=kinds)


def test_windows_of_smollm3_are_of_the_layers_without_rotation() -> None:
    def layers(**changes: Any) -> list[tuple[int | None, bool]]:
        config = read("SmolLM3ForCausalLM", **{"num_hidden_layers": 4, "sliding_window": 6, **changes})
        return [(spec.layer_window, spec.rope is not None) for spec in config.layers]

    assert layers() == [(None, True)] * 3 + [(None, False)]
    assert layers(use_sliding_window=True) == [(None, True)] * 3 + [(6, False)]
    assert layers(no_rope_layer_interval=2) == [(None, True), (None, False)] * 2
    # More entries than layers are no fault: published models were cut down.
    found = layers(no_rope_layers=[1, 0, 0, 1, 0], use_sliding_window=True)
    assert found == [(None, True), (6, False), (6, False), (None, True)]
    kinds = ["sliding_attention"] + ["full_attention"] * 3
    assert layers(use_sliding_window=True, layer_types=kinds) == [(6, True), (None, True), (None, True), (None, False)]


@pytest.mark.parametrize("architecture", READS)
def test_a_window_that_nobody_can_leave_is_none(architecture: str) -> None:
    """Of 128 positions the last one sees all 128."""
    switch: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 0} if "Qwen" in architecture else {}
    if architecture == "Ministral3ForCausalLM":  # whose RoPE stretches the context by default
        switch = {"rope_parameters": {"rope_theta": 1e4}}
    assert {spec.kind for spec in read(architecture, sliding_window=128, **switch).layers} == {"full"}
    if architecture in WINDOWS or switch:
        assert "window" in {spec.kind for spec in read(architecture, sliding_window=127, **switch).layers}


def test_a_longer_context_than_the_models_can_leave_its_window() -> None:
    scaling = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "sliding_window": 128}
    for length, window in ((None, None), (128, None), (129, 128)):
        found = read("MistralForCausalLM", length, **scaling)
        assert {spec.layer_window for spec in found.layers} == {window}
        assert found.context == (length or 128)


def test_gemma_2_and_3_scale_and_cap() -> None:
    found = read("Gemma2ForCausalLM")
    assert (found.layers[0].softcap, found.logit_softcap, found.layers[0].sm_scale) == (50.0, 30.0, 256**-0.5)
    found = read(
        "Gemma2ForCausalLM", query_pre_attn_scalar=64, attn_logit_softcapping=None, final_logit_softcapping=7.0
    )
    assert (found.layers[0].softcap, found.logit_softcap, found.layers[0].sm_scale) == (None, 7.0, 0.125)
    assert (found.layers[0].head_dim, found.tie_embeddings, found.embedding_scale) == (256, True, 32**0.5)
    found = read("Gemma3ForCausalLM", final_logit_softcapping=7.0, query_pre_attn_scalar=64)
    assert (found.layers[0].softcap, found.logit_softcap, found.layers[0].sm_scale) == (None, 7.0, 0.125)
    assert read("Gemma3ForCausalLM").logit_softcap is None
    # Of two names for the activation transformers reads the newer one; the older must agree.
    both = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    assert read("Gemma2ForCausalLM", **both).activation == "gelu_tanh"
    with pytest.raises(Unsupported, match=r'hidden_act is "silu".*expected "gelu_pytorch_tanh"'):
        read("Gemma2ForCausalLM", **{**both, "hidden_act": "silu"})


def test_multipliers_of_granite_and_cohere() -> None:
    found = read(
        "GraniteForCausalLM",
        embedding_multiplier=12.0,
        attention_multiplier=0.015625,
        residual_multiplier=0.22,
        logits_scaling=8,
    )
    assert (found.embedding_scale, found.layers[0].sm_scale) == (12.0, 0.015625)
    assert (found.residual_scale, found.logit_scale) == (0.22, 0.125)
    # As transformers has it, a missing multiplier of the scores is 1, and not the root of the head
    # size.
    assert read("GraniteForCausalLM").layers[0].sm_scale == 1.0
    assert read("Cohere2ForCausalLM").logit_scale == 0.0625
    assert read("Cohere2ForCausalLM", logit_scale=0.25).logit_scale == 0.25


def test_what_published_configurations_of_cohere2_say_besides() -> None:
    said = {
        "position_embedding_type": "rope_gptj",
        "order_of_interleaved_layers": "local_attn_first",
        "use_parallel_block": True,
        "use_gated_activation": True,
        "cache_implementation": "hybrid",
        "layer_switch": 4,
        "rotary_pct": 1.0,
    }
    assert read("Cohere2ForCausalLM", **said) == read("Cohere2ForCausalLM")
    for name, value in (
        ("position_embedding_type", "alibi"),
        ("order_of_interleaved_layers", "global_attn_first"),
        ("use_parallel_block", False),
        ("use_gated_activation", False),
    ):
        with pytest.raises(Unsupported, match=f"{name} is "):
            read("Cohere2ForCausalLM", **{**said, name: value})


def test_stablelm_has_two_kinds_of_blocks_and_of_heads() -> None:
    found = read("StableLmForCausalLM")
    assert (found.placement, found.head_norms, found.qkv_bias, found.norm, found.norm_bias) == (
        "pre",
        "none",
        False,
        "layer",
        True,
    )
    found = read("StableLmForCausalLM", use_parallel_residual=True, qk_layernorm=True, use_qkv_bias=True)
    assert (found.placement, found.head_norms, found.qkv_bias) == ("parallel", "each", True)


def test_the_language_model_inside_of_gemma_3_with_vision() -> None:
    name = "Gemma3ForConditionalGeneration"
    outside = {"architectures": [name], "model_type": "gemma3", "vision_config": {"hidden_size": 16}}

    def read_both(**changes: Any) -> DecoderConfig:
        values = {**outside, "text_config": {**BASE, "model_type": "gemma3_text", "sliding_window": 6}, **changes}
        found = family_of(values).read_config(values)
        assert isinstance(found, DecoderConfig)
        return found

    alone = read("Gemma3ForCausalLM", sliding_window=6)
    assert read_both() == replace(alone, architecture=name)
    # What published checkpoints leave out is transformers' default.
    found = read_both(text_config={"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024})
    assert (found.vocab_size, found.max_position, found.num_layers) == (262_208, 131_072, 34)
    assert (found.layers[0].num_heads, found.layers[0].num_kv_heads, found.layers[0].head_dim) == (8, 4, 256)
    with pytest.raises(CheckpointError, match="text_config: vocab_size is 0"):
        read_both(text_config={**BASE, "vocab_size": 0})
    with pytest.raises(CheckpointError, match="tie_word_embeddings is False; expected that of text_config"):
        read_both(text_config={**BASE, "tie_word_embeddings": True}, tie_word_embeddings=False)
    with pytest.raises(Unsupported, match="audio_config is"):
        read_both(audio_config={"layers": 2})
    with pytest.raises(CheckpointError, match="model_type is 'gemma3n'"):
        read_both(model_type="gemma3n")


@pytest.mark.parametrize("architecture", READS)
def test_the_longest_sequence_reaches_the_rotation(architecture: str) -> None:
    """Layers for which a scaling is said have the base for that length; it is recorded, and no part
    of the context.
    """
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    if architecture == "Phi3ForCausalLM":
        with pytest.raises(Unsupported, match=r"RoPE scaling 'dynamic'.*\['default', 'longrope'\]"):
            read(architecture, rope_scaling=scaling)
        return
    found = read(architecture, 512, head_dim=16, rope_scaling=scaling, num_hidden_layers=8)
    assert found.max_model_len == 512
    assert 512 in {spec.rope.length for spec in found.layers if spec.rope is not None}
    assert found.canonical() != read(architecture, head_dim=16, rope_scaling=scaling, num_hidden_layers=8).canonical()
    assert read(architecture, 512).canonical() == read(architecture).canonical()
    with pytest.raises(InvalidArgument, match="max_model_len 0"):
        read(architecture, 0)


def test_the_context_of_a_longrope_that_fits_the_original_length() -> None:
    longrope = {
        "rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
        "original_max_position_embeddings": 64,
    }
    for length, factor in ((None, 4.0), (65, 4.0), (64, 1.0)):
        rope = read("Phi3ForCausalLM", length, **longrope).layers[0].rope
        assert rope is not None
        assert rope.factors == (factor,) * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [2, 2]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, r"layer_types\[1\]"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, r"layer_types\[1\] is 'chunked"),
        ({"sliding_window": 127}, r"sliding_window is 127.*at least as long as max_position_embeddings \(128\)"),
        (
            {"architecture": "MistralForCausalLM", "sliding_window": 6, "layer_types": ["full_attention"] * 3},
            r"layer_types\[0\] is 'full_attention'.*expected 'sliding_attention'",
        ),
        ({"architecture": "Phi3ForCausalLM", "attention_bias": True}, "attention_bias is true"),
        ({"architecture": "Phi3ForCausalLM", "lm_head_bias": True}, "lm_head_bias is true"),
        ({"architecture": "Gemma2ForCausalLM", "use_bidirectional_attention": True}, "use_bidirectional_attention is"),
        ({"architecture": "Gemma3ForCausalLM", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"architecture": "Olmo2ForCausalLM", "clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ({"architecture": "MistralForCausalLM", "attention_bias": True}, "attention_bias is true"),
        ({"architecture": "Qwen3ForCausalLM", "mlp_bias": True}, "mlp_bias is true"),
        (
            {"architecture": "GPT2LMHeadModel"},
            "GPT2LMHeadModel.*LlamaForCausalLM, Mamba2ForCausalLM,.*Qwen2ForCausalLM",
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
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; expected an integer from 1 to 10000"),
        (
            {"architecture": "Qwen2ForCausalLM", "max_window_layers": -1},
            "max_window_layers is -1; expected an integer of 0",
        ),
        (
            {"architecture": "SmolLM3ForCausalLM", "no_rope_layers": [1, 0]},
            "no_rope_layers is .*at least 3 numbers 0 or 1",
        ),
        ({"architecture": "SmolLM3ForCausalLM", "no_rope_layers": [1, 0, 2]}, "no_rope_layers is "),
        ({"architecture": "Gemma2ForCausalLM", "attn_logit_softcapping": 0}, "attn_logit_softcapping is 0"),
        ({"architecture": "Gemma2ForCausalLM", "query_pre_attn_scalar": -4}, "query_pre_attn_scalar is -4"),
        ({"architecture": "Cohere2ForCausalLM", "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ({"architecture": "Cohere2ForCausalLM", "sliding_window": None}, "layer 0 is a sliding_attention layer, but"),
        ({"architecture": "Glm4ForCausalLM", "head_dim": 16, "partial_rotary_factor": 0.2}, "partial_rotary_factor"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "rope_theta is 10000.0, but rope_parameters says",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 1e4}}, "disagree"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": 8.0}, "rope_scaling is 8.0; expected an object"),
    ],
)
def test_bad_values_name_the_field_and_what_is_expected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(**changes)


@pytest.mark.parametrize("found", [None, "LlamaForCausalLM", [], ["LlamaForCausalLM", "Qwen2ForCausalLM"], [3]])
def test_exactly_one_architecture_is_expected(found: Any) -> None:
    with pytest.raises(CheckpointError, match=r"architectures is .*; expected one of \[.*'LlamaForCausalLM'"):
        family_of({"architectures": found})


def test_missing_fields_mean_what_they_mean_in_transformers() -> None:
    assert read(num_key_value_heads="missing").layers[0].num_kv_heads == BASE["num_attention_heads"]
    assert read("Qwen2ForCausalLM", num_key_value_heads=None).layers[0].num_kv_heads == BASE["num_attention_heads"]
    assert read("Qwen3ForCausalLM").layers[0].head_dim == 128
    assert read("Qwen3ForCausalLM", head_dim=6).layers[0].head_dim == 6
    assert read("Qwen2ForCausalLM", sliding_window=64, use_sliding_window=False).qkv_bias
    assert {spec.layer_window for spec in read("MistralForCausalLM", max_position_embeddings=8192).layers} == {4096}
    assert {read(name).norm_eps for name in ("Phi3ForCausalLM", "Olmo2ForCausalLM", "Cohere2ForCausalLM")} == {1e-5}
    assert read("Glm4ForCausalLM").norm_eps == 1.5625e-7
    assert read("Glm4ForCausalLM").qkv_bias
    assert not read("Glm4ForCausalLM", attention_bias=False).qkv_bias
    tied = {name for name in READS if read(name).tie_embeddings}
    assert tied == {"Gemma2ForCausalLM", "Gemma3ForCausalLM", "Cohere2ForCausalLM", "SmolLM3ForCausalLM"}
    rope = read("SmolLM3ForCausalLM").layers[0].rope
    assert rope is not None
    assert rope.theta == 2_000_000.0
    assert read(sliding_window=128) == read()


def test_canonical_form_holds_the_computation_only() -> None:
    assert read(rope_theta=1e4, dtype="float16").canonical() == read(max_position_embeddings=64).canonical()
    for change in ({"rope_theta": 500.0}, {"rms_norm_eps": 1e-5}, {"num_key_value_heads": 1}, {"attention_bias": True}):
        assert read(**change).canonical() != read().canonical()
    assert json.loads(read().canonical())["architecture"] == "LlamaForCausalLM"
