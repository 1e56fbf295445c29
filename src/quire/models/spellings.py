"""Other names of native architectures, and other fields of the same configurations.

``usual_values`` rewrites config.json as the native family reads it. Sources: the models' cards,
transformers, which gives InternLM3 and IQuest-Coder the layers of Llama, and llama.cpp, whose
converter has the fields of ChatGLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.base.errors import Unsupported
from quire.models.config_fields import ConfigFields
from quire.models.families import MODEL_TYPES

Values = dict[str, Any]
QWEN = ("", "_moe", "_text", "_moe_text")

ARCHITECTURES: Mapping[str, str] = {
    "ChatGLMForConditionalGeneration": "GlmForCausalLM",
    "ChatGLMModel": "GlmForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    **{
        f"Qwen3_8{kind}": f"Qwen3_5{kind}"
        for kind in ("ForCausalLM", "ForConditionalGeneration", "MoeForCausalLM", "MoeForConditionalGeneration")
    },
}
"""Names of architectures, and those that Quire or transformers has for the same layers."""
TYPES: Mapping[str, str] = {
    "chatglm": "glm",
    "internlm3": "llama",
    "iquestcoder": "llama",
    "kimi_k2": "deepseek_v3",
    "shieldgemma2": "gemma3",
    **{f"qwen3_8{kind}": f"qwen3_5{kind}" for kind in QWEN},
}
"""The same of ``model_type``."""

PARTS = ("text_config", "vision_config", "audio_config")


def usual_values(values: Mapping[str, Any]) -> Values:
    """Return config.json in the names that native families have. ``Unsupported`` if a field of the
    other spelling changes what is computed."""
    found = _one_level(values)
    names = found.get("architectures")
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        found["architectures"] = [ARCHITECTURES.get(names[0], names[0])]
    if not isinstance(text := found.get("text_config"), dict):
        return found
    found["text_config"] = text = _one_level(text)
    if found.get("architectures") == [MODEL_TYPES.get(str(text.get("model_type")))]:
        # A model for text alone, beside the configuration of a whole one.
        kept = {name: value for name, value in found.items() if name not in PARTS}
        return {**kept, **text, "architectures": found["architectures"]}
    return found


def _one_level(values: Mapping[str, Any]) -> Values:
    """Return the fields beside ``model_type`` under their usual names."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in TYPES:
        return dict(values)
    found = FIELDS[kind](ConfigFields(values)) if kind in FIELDS else dict(values)
    return {**found, "model_type": TYPES[kind]}


def _internlm3(fields: ConfigFields) -> Values:
    """Two switches of biases: q, k and v have one, all other linear maps the other."""
    found = {name: value for name, value in fields.values.items() if name not in ("bias", "qkv_bias")}
    mine = (fields.flag("qkv_bias", False), fields.flag("bias", False))
    if fields.present("qkv_bias") or fields.present("bias"):
        found |= {"attention_bias": mine[0], "mlp_bias": mine[1]}
    if found.get("attention_bias", False) != found.get("mlp_bias", False):
        raise Unsupported(
            f"{fields.source}: qkv_bias is {str(mine[0]).lower()} and bias is {str(mine[1]).lower()}, which is not "
            "supported; expected the same"
        )
    return found


def _iquestcoder(fields: ConfigFields) -> Values:
    """A window that is switched off is none."""
    fields.expect("use_sliding_window", False)
    return {name: value for name, value in fields.values.items() if name not in ("sliding_window", "max_window_layers")}


CHATGLM: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "padded_vocab_size": "vocab_size",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "multi_query_group_num": "num_key_value_heads",
    "seq_length": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
    "add_qkv_bias": "attention_bias",
}
"""Fields of ChatGLM's configuration, and those of GLM's for the same."""
CHATGLM_DEFAULTS: Mapping[str, Any] = {"add_qkv_bias": False, "layernorm_epsilon": 1e-5, "kv_channels": 128}
"""Values of missing fields, as in ChatGLM's code."""
ALIKE: Mapping[str, bool] = {
    "multi_query_attention": True,
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "add_bias_linear": False,
}
"""Switches of ChatGLM that GLM has in one position only. The first model, of 2023, has them in
others, or lacks them."""


def _chatglm(fields: ConfigFields) -> Values:
    """ChatGLM 2 and 3, GLM-4: half of each head rotates, and ``rope_ratio`` stretches the base."""
    for name, value in ALIKE.items():
        if fields.get(name) != value:
            given = str(fields.get(name)).lower() if fields.present(name) else "missing"
            raise Unsupported(
                f"{fields.source}: {name} is {given}, which is not supported; expected {str(value).lower()}"
            )
    fields.expect("prefix_projection", False)
    fields.expect("pre_seq_len")
    if fields.get("quantization_bit"):
        fields.expect("quantization_bit", 0)
    known = {**CHATGLM_DEFAULTS, **fields.values}
    dropped = {*CHATGLM, *ALIKE, "rope_ratio", "vocab_size"}
    found = {name: value for name, value in fields.values.items() if name not in dropped}
    found |= {name: known[other] for other, name in CHATGLM.items() if other in known}
    return {**found, "rope_theta": 10_000.0 * fields.number("rope_ratio", 1.0)}


FIELDS: Mapping[str, Callable[[ConfigFields], Values]] = {
    "chatglm": _chatglm,
    "internlm3": _internlm3,
    "iquestcoder": _iquestcoder,
}
"""Functions from the fields of a ``model_type`` to the usual ones."""
