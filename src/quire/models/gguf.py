"""GGUF files as checkpoints: the configuration that their metadata describe, and the names of their
tensors.

``ARCHITECTURES`` has a row for each ``general.architecture`` that a family of Quire computes. What
a row does to weights undoes what llama.cpp's converter did. Letters: H heads, D head size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from quire.base.errors import CheckpointError, Unsupported
from quire.models.families import MODEL_TYPES
from quire.weights.gguf_blocks import NVFP4
from quire.weights.gguf_container import GgufParts, open_gguf
from quire.weights.gguf_files import GgufFiles, Origin, unit_names

W = ("w1", "w3", "w2")
"""Mixtral's names of the maps of an MLP: gate, up and down."""


def _gated(prefix: str, kind: str = "", names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")) -> dict[str, str]:
    """Return the names of an MLP's maps: ``kind`` is "", "_exps" or "_shexp"."""
    return {f"ffn_{part}{kind}": f"{prefix}.{name}" for part, name in zip(("gate", "up", "down"), names, strict=True)}


TRUNK: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Names of tensors outside of layers, without ``.weight`` and ``.bias``."""
BACKBONE: Mapping[str, str] = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
}
LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    **_gated("mlp"),
}
"""Names of a layer's tensors, as most families have them."""
SANDWICH: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Names of Gemma's and OLMo's norms."""
ROTATION = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.attn_rot_embd\.weight")
"""Tensors that the configuration takes up."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.causal": (True,),
    "attention.scale": (),
    "attention.temperature_scale": (0.0,),
    "attention.sliding_window": (0,),
    "attention.shared_kv_layers": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "embedding_scale": (1.0,),
    "residual_scale": (1.0,),
    "logit_scale": (1.0,),
    "use_parallel_residual": (False,),
    "expert_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "rope.scaling.attn_factor": (1.0,),
    "swin_norm": (False,),
}
"""Keys of computations, with the values that change nothing, for files whose row does not read
them."""


@dataclass
class Metadata:
    """The keys of one architecture in a file, with a record of those that were read."""

    parts: GgufParts
    read: set[str] = field(default_factory=set)

    @property
    def prefix(self) -> str:
        return self.parts.first.architecture

    @property
    def layers(self) -> int:
        """The number of layers, without those that draft tokens and come last."""
        count, drafting = self.count("block_count"), self.whole("nextn_predict_layers", 0)
        if drafting >= count:
            raise self.parts.first.error(self._name("nextn_predict_layers"), f"less than block_count, {count}")
        return count - drafting

    def has(self, key: str) -> bool:
        return self._name(key) in self.parts.first

    def count(self, key: str, default: int | None = None) -> int:
        """Return an integer of 1 or more, perhaps one that an array has for each layer."""
        found = self.counts(key, default)
        if len(set(found)) != 1:
            raise self.parts.first.error(self._name(key), "the same for all layers")
        return found[0]

    def counts(self, key: str, default: int | None = None) -> list[int]:
        """Return the integers of an array, or the only one."""
        name = self._name(key)
        if self.parts.first.is_array(name):
            return self.parts.first.numbers(name) or [0]
        return [self.parts.first.whole(name, default, least=1)]

    def whole(self, key: str, default: int | None = None) -> int:
        return self.parts.first.whole(self._name(key), default)

    def number(self, key: str, default: float | None = None) -> float:
        return self.parts.first.number(self._name(key), default)

    def text(self, key: str, default: str) -> str:
        return self.parts.first.text(self._name(key), default)

    def flag(self, key: str, default: bool) -> bool:
        return self.parts.first.flag(self._name(key), default)

    def holds(self, tensor: str) -> bool:
        return tensor in self.parts.places

    def any(self, part: str) -> bool:
        """Return whether a layer has this tensor."""
        return any(name.endswith(f".{part}") for name in self.parts.places)

    def shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self.parts.places:
            raise CheckpointError(f"{self.parts.first.path} has no tensor {tensor}")
        return self.parts.header(tensor).shape

    def refuse_unread(self) -> None:
        """Raise ``Unsupported`` for the first key of a computation that the row lacks."""
        file = self.parts.first
        for key, accepted in NEUTRAL.items():
            name = f"{self.prefix}.{key}"
            if name in self.read or name not in file:
                continue
            if not any(file.value(name) == one for one in accepted):
                expected = " or ".join(map(repr, accepted)) or "no such key"
                raise Unsupported(
                    f"{file.path}: {name} is {file.value(name)!r}, which is not supported; expected {expected}"
                )

    def _name(self, key: str) -> str:
        name = f"{self.prefix}.{key}"
        self.read.add(name)
        return name


Attends: TypeAlias = Literal["all", "some", "none"]
Config: TypeAlias = Callable[[Metadata], dict[str, Any]]
Origins: TypeAlias = Sequence[tuple[str, Origin]]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One ``general.architecture``."""

    model_type: str
    """That of the family, in config.json."""
    config: Config = lambda metadata: {}
    """Returns the fields that differ from those of ``_common`` or add to them."""
    trunk: Mapping[str, str] = field(default_factory=lambda: TRUNK)
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    layers: str = "model.layers"
    attends: Attends = "all"
    """The layers with attention."""
    permuted: bool = False
    """Whether the rows of q and k are neighbours where the family rotates halves."""
    experts: Mapping[str, str] | None = None
    """Names of an expert's projections, with ``{}`` for its number."""
    offset_norms: bool = False
    """Whether the family stores norms as their difference to 1."""
    origins: Callable[[Metadata], Origins] = lambda metadata: ()
    """Returns further tensors of a layer, named as in ``layer`` but with their suffixes, and those
    of the file's layer that make them. One counts if all of these are there."""


# Configurations.


def read_gguf_config(path: Path) -> dict[str, Any]:
    """Return config.json's fields for the model in a GGUF file. ``CheckpointError`` for a
    damaged file or key, ``Unsupported`` with its name for an architecture that is not computed."""
    return config_of(open_gguf(path))


def read_gguf_generation(path: Path) -> dict[str, Any]:
    """Return generation_config.json's fields for a GGUF file."""
    file = open_gguf(path).first
    names = {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
    found: dict[str, Any] = {
        ours: file.value(key) for theirs, ours in names.items() if (key := f"general.sampling.{theirs}") in file
    }
    return found | ({"do_sample": True} if found else {})


def config_of(parts: GgufParts) -> dict[str, Any]:
    """See ``read_gguf_config``."""
    row, metadata = _row_of(parts), Metadata(parts)
    values = (
        _common(metadata, row.attends)
        | {"architectures": [MODEL_TYPES[row.model_type]], "model_type": row.model_type}
        | row.config(metadata)
    )
    metadata.refuse_unread()
    return values


def _row_of(parts: GgufParts) -> Architecture:
    name = parts.first.architecture
    if name not in ARCHITECTURES:
        raise Unsupported(
            f"{parts.first.path}: architecture {name!r} is not supported; known ones: {', '.join(sorted(ARCHITECTURES))}"
        )
    row = ARCHITECTURES[name]
    return MIXTRAL if name == "llama" and parts.first.whole("llama.expert_count", 0) else row


def _common(metadata: Metadata, attends: Attends) -> dict[str, Any]:
    """Return the fields that most families read."""
    fields: dict[str, Any] = {
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "hidden_size": metadata.count("embedding_length"),
        "num_hidden_layers": metadata.layers,
        "max_position_embeddings": metadata.count("context_length"),
        "tie_word_embeddings": not metadata.holds("output.weight"),
    }
    if attends != "none":
        fields |= _attention(metadata, attends)
    for name, key in (("rms_norm_eps", "layer_norm_rms_epsilon"), ("layer_norm_eps", "layer_norm_epsilon")):
        if metadata.has(f"attention.{key}"):
            fields[name] = metadata.number(f"attention.{key}")
    for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if (full := f"tokenizer.ggml.{key}_token_id") in metadata.parts.first:
            fields[name] = metadata.parts.first.whole(full)
    return fields


def _attention(metadata: Metadata, attends: Attends) -> dict[str, Any]:
    heads, width = metadata.count("attention.head_count"), metadata.count("embedding_length")
    groups = metadata.counts("attention.head_count_kv", heads)
    if attends == "all":
        groups = [metadata.count("attention.head_count_kv", heads)]
    head_dim = metadata.count("attention.key_length", max(1, width // heads))
    if metadata.whole("attention.value_length", head_dim) != head_dim and not metadata.has("attention.kv_lora_rank"):
        raise metadata.parts.first.error(f"{metadata.prefix}.attention.value_length", f"key_length, {head_dim}")
    return {
        "intermediate_size": metadata.count("feed_forward_length", 1),
        "num_attention_heads": heads,
        "num_key_value_heads": max(groups),
        "head_dim": head_dim,
        "attention_bias": metadata.any("attn_q.bias") or metadata.any("attn_qkv.bias"),
        "mlp_bias": metadata.holds("blk.0.ffn_down.bias"),
        "rope_parameters": _rope(metadata, head_dim),
    }


def _rope(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """Return ``rope_parameters``, from keys and from the tensors of factors."""
    rope: dict[str, Any] = {"rope_theta": metadata.number("rope.freq_base", 10_000.0), "rope_type": "default"}
    rotary_dim = metadata.count("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        rope["partial_rotary_factor"] = _fraction(rotary_dim, head_dim)
    kind = metadata.text("rope.scaling.type", "linear")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
    context = metadata.count("context_length")
    original = metadata.whole("rope.scaling.original_context_length", 0) or context
    if metadata.holds("rope_factors_long.weight") and metadata.holds("rope_factors_short.weight"):
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        for name in ("long", "short"):
            rope[f"{name}_factor"] = metadata.parts.numbers(f"rope_factors_{name}.weight")
        usual = math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original > 1 else 1.0
        attention = metadata.number("rope.scaling.attn_factor", usual)
        if not math.isclose(attention, usual, rel_tol=1e-6):
            rope["attention_factor"] = attention
    elif metadata.holds("rope_freqs.weight"):
        rope |= _scaled(metadata.parts.numbers("rope_freqs.weight"), rope["rope_theta"], rotary_dim, context)
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for name in ("beta_fast", "beta_slow"):
            if metadata.has(f"rope.scaling.yarn_{name}"):
                rope[name] = metadata.number(f"rope.scaling.yarn_{name}")
        if weight := metadata.number("rope.scaling.yarn_log_multiplier", 0.0) * 10:
            rope |= {"mscale": round(weight, 6), "mscale_all_dim": round(weight, 6)}
    elif kind == "linear" and factor not in (0.0, 1.0):
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("linear", "none"):
        raise Unsupported(
            f"{metadata.parts.first.path}: RoPE scaling {kind!r} is not supported here; expected none, linear or yarn, "
            "or tensors of factors"
        )
    return rope


def _fraction(part: int, whole: int) -> float:
    """Return a factor that gives ``part`` if ``whole`` is multiplied by it and rounded down."""
    found = part / whole
    return found if int(found * whole) == part else math.nextafter(found, math.inf)


def _scaled(factors: Sequence[float], theta: float, rotary_dim: int, context: int) -> dict[str, Any]:
    """Return the scaling with these divisors of frequencies: Llama 3's if its rule makes them, with
    8,192 tokens of training and factors of 1 and 4, else these numbers."""
    if len(factors) == rotary_dim // 2:
        most, trained, low, high = max(factors), 8192, 1.0, 4.0
        made = []
        for pair in range(len(factors)):
            turns = trained / (2 * math.pi * theta ** (2 * pair / rotary_dim))
            kept = min(1.0, max(0.0, (turns - low) / (high - low)))
            made.append(1 / ((1 - kept) / most + kept))
        if all(math.isclose(*pair, rel_tol=1e-5) for pair in zip(made, factors, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": most,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": trained,
            }
    listed = list(factors)
    return {
        "rope_type": "longrope",
        "short_factor": listed,
        "long_factor": listed,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def _gemma(metadata: Metadata, large: int) -> dict[str, Any]:
    """Return Gemma's fields. Its largest size, of ``large`` layers, scales scores by the width of a
    head's share, which llama.cpp knows by the number of layers, too."""
    common = ("embedding_length", "attention.head_count", "attention.key_length")
    width, heads, head_dim = (metadata.count(key) for key in common)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.count("attention.sliding_window"),
        "query_pre_attn_scalar": width // heads if metadata.layers == large else head_dim,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
    }


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    return _gemma(metadata, 46) | {
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0) or None,
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    full = _rope(metadata, metadata.count("attention.key_length")) | {
        "rope_theta": metadata.number("rope.freq_base", 1_000_000.0)
    }
    sliding = {"rope_theta": metadata.number("rope.freq_base_swa", 10_000.0), "rope_type": "default"}
    fields = {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
    return _gemma(metadata, 62) | fields | _windowed(metadata, 6)


def _windowed(metadata: Metadata, period: int) -> dict[str, Any]:
    """Return ``layer_types`` of windows in all but every ``period``-th layer, unless an array says
    which, and their length."""
    layers, key = metadata.layers, "attention.sliding_window_pattern"
    name = f"{metadata.prefix}.{key}"
    if metadata.parts.first.is_array(name):
        windowed = [bool(one) for one in metadata.parts.first.numbers(name)]
    else:
        period = metadata.whole(key, period)
        windowed = [bool(period) and (layer + 1) % period != 0 for layer in range(layers)]
    return {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windowed],
        "sliding_window": metadata.count("attention.sliding_window"),
    }


def _phi3(metadata: Metadata) -> dict[str, Any]:
    window = metadata.whole("attention.sliding_window", 0)
    return {"sliding_window": window if 0 < window < metadata.count("context_length") else None}


def _mistral3(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of Mistral, or of Ministral 3, whose queries grow."""
    rate = metadata.number("attention.temperature_scale", 0.0)
    if not rate:
        return {"sliding_window": None}
    head_dim = metadata.count("attention.key_length")
    weight = metadata.number("rope.scaling.yarn_log_multiplier", 0.0)
    both = {"mscale": weight, "mscale_all_dim": weight} if weight else {}
    return {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "rope_parameters": {**_rope(metadata, head_dim), **both, "llama_4_scaling_beta": rate},
    }


def _granite(metadata: Metadata) -> dict[str, Any]:
    return {
        "attention_multiplier": metadata.number("attention.scale", 1.0),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def _cohere2(metadata: Metadata) -> dict[str, Any]:
    return {"logit_scale": metadata.number("logit_scale")} | _windowed(metadata, 4)


def _stablelm(metadata: Metadata) -> dict[str, Any]:
    return {
        "use_qkv_bias": metadata.holds("blk.0.attn_q.bias"),
        "use_parallel_residual": metadata.flag("use_parallel_residual", False),
        "qk_layernorm": metadata.holds("blk.0.attn_q_norm.weight"),
        "attention_bias": None,
    }


def _mixture(metadata: Metadata, *, renormalise: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.shape("blk.0.ffn_gate_exps.weight")[1],
        "norm_topk_prob": renormalise,
        "qkv_bias": metadata.holds("blk.0.attn_q.bias"),
    }
    if metadata.holds("blk.0.ffn_gate_shexp.weight"):
        fields["shared_expert_intermediate_size"] = metadata.shape("blk.0.ffn_gate_shexp.weight")[0]
    return fields


def _mixtral(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "intermediate_size": metadata.shape("blk.0.ffn_gate_exps.weight")[1],
    }


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    rope = _rope(metadata, metadata.count("attention.key_length"))
    return {
        "num_local_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "intermediate_size": metadata.count("expert_feed_forward_length"),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
        **_windowed(metadata, 2),
    }


def _gpt_oss_origins(metadata: Metadata) -> Origins:
    def alternating(gate: Tensor, up: Tensor) -> Tensor:
        return torch.stack((gate, up), 2).flatten(1, 2)

    return (
        ("mlp.experts.gate_up_proj", Origin(("ffn_gate_exps.weight", "ffn_up_exps.weight"), alternating)),
        ("mlp.experts.gate_up_proj_bias", Origin(("ffn_gate_exps.bias", "ffn_up_exps.bias"), alternating)),
        ("mlp.experts.down_proj", Origin(("ffn_down_exps.weight",))),
        ("mlp.experts.down_proj_bias", Origin(("ffn_down_exps.bias",))),
        ("self_attn.sinks", Origin(("attn_sinks.weight",))),
    )


def _deepseek2(metadata: Metadata) -> dict[str, Any]:
    rope = metadata.count("rope.dimension_count")
    key = metadata.count("attention.key_length_mla", metadata.count("attention.key_length"))
    value = metadata.count("attention.value_length_mla", metadata.count("attention.value_length"))
    # Older files of DeepSeek V3 do not name its sigmoids.
    corrected = metadata.whole("expert_gating_func", 1) == 2 or metadata.any("exp_probs_b.bias")
    layers = metadata.layers
    heads = metadata.count("attention.head_count")
    groups, top_groups = metadata.whole("expert_group_count", 0), metadata.whole("expert_group_used_count", 0)
    dense = metadata.whole("leading_dense_block_count", 0)
    size = metadata.count("expert_feed_forward_length")
    fields: dict[str, Any] = {
        "num_key_value_heads": heads,
        "head_dim": rope,
        "rope_parameters": _rope(metadata, rope),
        "q_lora_rank": metadata.count("attention.q_lora_rank") if metadata.has("attention.q_lora_rank") else None,
        "kv_lora_rank": metadata.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": key - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "n_routed_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "n_shared_experts": metadata.whole("expert_shared_count", 0),
        "moe_intermediate_size": size,
        "first_k_dense_replace": min(dense, layers),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": metadata.flag("expert_weights_norm", corrected),
    }
    if corrected:
        return fields | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "n_group": groups or 1,
            "topk_group": top_groups or 1,
        }
    grouped = {"topk_method": "group_limited_greedy", "n_group": groups, "topk_group": top_groups}
    return fields | {"scoring_func": "softmax"} | (grouped if groups > 1 else {"topk_method": "greedy"})


def _deepseek2_origins(metadata: Metadata) -> Origins:
    def joined(key: Tensor, value: Tensor) -> Tensor:
        return torch.cat((key.mT, value), 1).flatten(0, 1)

    return (
        ("self_attn.kv_b_proj.weight", Origin(("attn_k_b.weight", "attn_v_b.weight"), joined, expanded=True)),
        ("mlp.gate.e_score_correction_bias", Origin(("exp_probs_b.bias",))),
    )


def _lfm2(metadata: Metadata) -> dict[str, Any]:
    heads = metadata.counts("attention.head_count_kv")
    if len(heads) == 1:
        heads = heads * metadata.layers
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if one else "conv" for one in heads],
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": metadata.count("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in metadata.parts.places),
        "block_auto_adjust_ff_dim": False,
        "attention_bias": None,
    }


def _lfm2_moe(metadata: Metadata) -> dict[str, Any]:
    names = ("block_auto_adjust_ff_dim", "attention_bias")
    return {name: one for name, one in _lfm2(metadata).items() if name not in names} | {
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "num_dense_layers": metadata.whole("leading_dense_block_count", 0),
        "use_expert_bias": metadata.any("exp_probs_b.bias"),
    }


def _lfm2_origins(metadata: Metadata) -> Origins:
    return (
        ("conv.conv.weight", Origin(("shortconv.conv.weight",), _channels)),
        ("feed_forward.expert_bias", Origin(("exp_probs_b.bias",))),
    )


def _mamba_origins(mixer: str) -> Origins:
    """Return the tensors of Mamba mixers whose values or shapes the converter changed."""
    return (
        (f"{mixer}.A_log", Origin(("ssm_a",), _log_rate, expanded=True)),
        (f"{mixer}.D", Origin(("ssm_d",), torch.flatten)),
        (f"{mixer}.dt_bias", Origin(("ssm_dt.bias",))),
        (f"{mixer}.conv1d.weight", Origin(("ssm_conv1d.weight",), _channels)),
        (f"{mixer}.norm.weight", Origin(("ssm_norm.weight",), torch.flatten)),
    )


def _mixers(metadata: Metadata, *names: str) -> dict[str, Any]:
    """Return the fields of Mamba-2 mixers under a family's ``names``: heads, size of a head,
    groups, size of the state, taps, biases of the convolution and of the projections. llama.cpp
    gates before it norms."""
    heads = metadata.count("ssm.time_step_rank")
    values = (
        heads,
        metadata.count("ssm.inner_size") // heads,
        metadata.count("ssm.group_count"),
        metadata.count("ssm.state_size"),
        metadata.count("ssm.conv_kernel"),
        metadata.any("ssm_conv1d.bias"),
        metadata.any("ssm_in.bias"),
    )
    return dict(zip(names, values, strict=True))


MIXER_FIELDS = (
    *("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    *("mamba_conv_bias", "mamba_proj_bias"),
)
"""Names for ``_mixers`` in Falcon-H1 and Granite 4."""


def _mamba2(metadata: Metadata) -> dict[str, Any]:
    biases = ("use_conv_bias", "use_bias")
    return {
        **_mixers(metadata, "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", *biases),
        "expand": metadata.count("ssm.inner_size") / metadata.count("embedding_length"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
    }


def _nemotron_h(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of Nemotron-H, whose tensors say the kind of each block."""
    marks = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    kinds = [
        next((kind for part, kind in marks.items() if metadata.holds(f"blk.{layer}.{part}.weight")), "unknown")
        for layer in range(metadata.layers)
    ]
    biases = ("use_conv_bias", "use_bias")
    fields: dict[str, Any] = {
        "layers_block_type": kinds,
        "num_attention_heads": metadata.count("attention.head_count"),
        "num_key_value_heads": max(metadata.counts("attention.head_count_kv")),
        "head_dim": metadata.count("attention.key_length"),
        "intermediate_size": metadata.shape(f"blk.{kinds.index('mlp')}.ffn_up.weight")[0] if "mlp" in kinds else 1,
        "mlp_bias": metadata.any("ffn_up.bias"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
        **_mixers(metadata, "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", *biases),
    }
    if "moe" not in kinds:
        return fields
    return fields | {
        "n_routed_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": metadata.count("expert_shared_feed_forward_length"),
        "moe_latent_size": metadata.count("moe_latent_size") if metadata.has("moe_latent_size") else None,
        "norm_topk_prob": metadata.flag("expert_weights_norm", True),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 0.0) or 1.0,
        "n_group": metadata.whole("expert_group_count", 0) or 1,
        "topk_group": metadata.whole("expert_group_used_count", 0) or 1,
    }


def _falcon_h1(metadata: Metadata) -> dict[str, Any]:
    """Return Falcon-H1's fields. The converter has multiplied the weights by the multipliers."""
    return _mixers(metadata, *MIXER_FIELDS) | {
        "mamba_d_ssm": metadata.count("ssm.inner_size"),
        "mamba_rms_norm": metadata.any("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": metadata.any("ssm_out.bias"),
    }


def _granite_hybrid(metadata: Metadata) -> dict[str, Any]:
    experts = metadata.whole("expert_count", 0)
    fields: dict[str, Any] = {
        **_granite(metadata),
        **_mixers(metadata, *MIXER_FIELDS),
        "mamba_expand": metadata.count("ssm.inner_size") / metadata.count("embedding_length"),
        "layer_types": _kinds(metadata, "attention", "mamba"),
        "position_embedding_type": "rope" if metadata.flag("rope.scaling.finetuned", False) else "nope",
        "num_local_experts": experts,
        "shared_intermediate_size": metadata.shape(f"blk.0.ffn_gate{'_shexp' if experts else ''}.weight")[0],
    }
    if experts:
        fields["num_experts_per_tok"] = metadata.count("expert_used_count")
    return fields


def _kinds(metadata: Metadata, attending: str, other: str) -> list[str]:
    return [attending if metadata.holds(f"blk.{layer}.attn_q.weight") else other for layer in range(metadata.layers)]


def _granite_hybrid_origins(metadata: Metadata) -> Origins:
    def joined(*both: Tensor) -> Tensor:
        return torch.cat(both, -2)

    shared = "shared_mlp.input_linear.weight"
    return (
        *_mamba_origins("mamba"),
        ("block_sparse_moe.input_linear.weight", Origin(("ffn_gate_exps.weight", "ffn_up_exps.weight"), joined)),
        (shared, Origin(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), joined)),
        (shared, Origin(("ffn_gate.weight", "ffn_up.weight"), joined)),
    )


def _delta(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of Qwen's gated delta nets."""
    heads = metadata.count("ssm.time_step_rank")
    return {
        "linear_num_key_heads": metadata.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.count("ssm.state_size"),
        "linear_value_head_dim": metadata.count("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": metadata.count("ssm.conv_kernel"),
        "layer_types": _kinds(metadata, "full_attention", "linear_attention"),
    }


def _delta_mixture(metadata: Metadata) -> dict[str, Any]:
    return _delta(metadata) | _mixture(metadata, renormalise=True)


def _qwen3_next_origins(metadata: Metadata) -> Origins:
    """Return the tensors of Qwen3-Next's delta nets: one projection, key head by key head."""
    fields = _delta(metadata)
    heads, keys = fields["linear_num_key_heads"], fields["linear_num_key_heads"] * fields["linear_key_head_dim"]

    def by_head(qkv: Tensor, gate: Tensor) -> Tensor:
        parts = (*torch.split(qkv, [keys, keys, len(qkv) - 2 * keys]), gate)
        return torch.cat([part.reshape(heads, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)

    return (
        ("linear_attn.in_proj_qkvz.weight", Origin(("attn_qkv.weight", "attn_gate.weight"), by_head)),
        ("linear_attn.A_log", Origin(("ssm_a",), _log_rate, expanded=True)),
        ("linear_attn.dt_bias", Origin(("ssm_dt.bias",))),
        ("linear_attn.conv1d.weight", Origin(("ssm_conv1d.weight",), _channels)),
    )


def _qwen3_5_origins(metadata: Metadata) -> Origins:
    """Return the tensors of Qwen3.5's delta nets, whose value heads the file has in turns: one of
    each key head, then the next of each."""
    fields = _delta(metadata)
    heads, size = fields["linear_num_key_heads"], fields["linear_value_head_dim"]
    keys, served = heads * fields["linear_key_head_dim"], fields["linear_num_value_heads"] // heads

    def grouped(rows: Tensor, of: int = 1) -> Tensor:
        return rows.reshape(served, heads, of, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    def values(rows: Tensor) -> Tensor:
        return grouped(rows, size)

    def after_keys(rows: Tensor) -> Tensor:
        return torch.cat((rows[: 2 * keys], values(rows[2 * keys :])))

    def columns(rows: Tensor) -> Tensor:
        return values(rows.mT).mT

    return (
        ("linear_attn.in_proj_qkv.weight", Origin(("attn_qkv.weight",), after_keys)),
        ("linear_attn.in_proj_z.weight", Origin(("attn_gate.weight",), values)),
        ("linear_attn.in_proj_b.weight", Origin(("ssm_beta.weight",), grouped)),
        ("linear_attn.in_proj_a.weight", Origin(("ssm_alpha.weight",), grouped)),
        ("linear_attn.A_log", Origin(("ssm_a",), lambda one: grouped(_log_rate(one)), expanded=True)),
        ("linear_attn.dt_bias", Origin(("ssm_dt.bias",), grouped)),
        ("linear_attn.conv1d.weight", Origin(("ssm_conv1d.weight",), lambda one: _channels(after_keys(one)))),
        # Columns: no block of a row stays together.
        ("linear_attn.out_proj.weight", Origin(("ssm_out.weight",), columns, expanded=True)),
    )


def _log_rate(rates: Tensor) -> Tensor:
    return torch.log(-rates.flatten())


def _channels(kernel: Tensor) -> Tensor:
    return kernel.unsqueeze(1)


# Names.


def open_gguf_weights(path: Path) -> GgufFiles:
    """Open the weights of a GGUF file, under the names of its family."""
    parts = open_gguf(path)
    config = config_of(parts)
    drafting = tuple(
        f"blk.{layer}." for layer in range(config["num_hidden_layers"], Metadata(parts).count("block_count"))
    )
    unused = {name for name in parts.places if ROTATION.fullmatch(name) or name.startswith(drafting)}
    unused |= {unit for name in parts.places if parts.header(name).type == NVFP4 for unit in unit_names(name)}
    return GgufFiles(path, parts, _origins(parts, config, unused), unused)


def _origins(parts: GgufParts, config: Mapping[str, Any], unused: Container[str]) -> dict[str, Origin]:
    row, metadata = _row_of(parts), Metadata(parts)
    found, further = dict[str, Origin](), row.origins(metadata)
    for layer in range(metadata.layers):
        for name, origin in further:
            tensors = tuple(f"blk.{layer}.{one}" for one in origin.tensors)
            if all(map(metadata.holds, tensors)):
                found[f"{row.layers}.{layer}.{name}"] = replace(origin, tensors=tensors)
    used = {tensor for origin in found.values() for tensor in origin.tensors}
    for tensor in parts.places:
        if tensor not in used and tensor not in unused:
            found.update(_named(tensor, row, parts, config))
    return found


def _named(tensor: str, row: Architecture, parts: GgufParts, config: Mapping[str, Any]) -> Iterator[tuple[str, Origin]]:
    """Yield the checkpoint's names of a tensor; none if the row has no name for it."""
    stem, _, suffix = tensor.rpartition(".")
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
    if match is None:
        if stem in row.trunk:
            yield f"{row.trunk[stem]}.{suffix}", _origin(tensor, stem, row, config)
        return
    layer, part = match.groups()
    prefix = f"{row.layers}.{layer}."
    if row.experts is not None and part in row.experts:
        for expert in range(parts.header(tensor).shape[0]):
            yield f"{prefix}{row.experts[part].format(expert)}.{suffix}", Origin((tensor,), _Picked(expert))
    elif part in row.layer:
        name = row.layer[part]
        if "{}" in name:  # a norm of each head
            for head in range(parts.header(tensor).shape[0]):
                yield f"{prefix}{name.format(head)}.{suffix}", Origin((tensor,), _Picked(head))
        else:
            yield f"{prefix}{name}.{suffix}", _origin(tensor, part, row, config)


def _origin(tensor: str, part: str, row: Architecture, config: Mapping[str, Any]) -> Origin:
    if row.permuted and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        return Origin((tensor,), _Halves(heads))
    if row.offset_norms and part.endswith("norm") and part != "ssm_norm":
        return Origin((tensor,), lambda one: one - 1, expanded=True)
    if part == "ffn_gate_inp_shexp":
        return Origin((tensor,), lambda one: one.view(1, -1))
    return Origin((tensor,))


@dataclass(frozen=True, slots=True)
class _Picked:
    """One matrix of a stack."""

    number: int

    def __call__(self, stack: Tensor) -> Tensor:
        return stack[self.number]


@dataclass(frozen=True, slots=True)
class _Halves:
    """``[H * D, ...]`` with each head's pairs of rows apart: the first ones, then the second."""

    heads: int

    def __call__(self, pairs: Tensor) -> Tensor:
        return pairs.view(self.heads, -1, 2, *pairs.shape[1:]).transpose(1, 2).reshape(pairs.shape)


def _without(names: Mapping[str, str], *parts: str) -> dict[str, str]:
    return {name: value for name, value in names.items() if name not in parts}


QWEN_EXPERTS: Mapping[str, str] = _gated("mlp.experts.{}", "_exps")
QWEN_MIXTURE: Mapping[str, str] = {
    **LAYER,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **_gated("mlp.shared_expert", "_shexp"),
}

MIXER: Mapping[str, str] = {"ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_out": "mamba.out_proj"}
DELTA_NET: Mapping[str, str] = {
    **QWEN_MIXTURE,
    "post_attention_norm": "post_attention_layernorm",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}

MIXTRAL = Architecture(
    model_type="mixtral",
    config=_mixtral,
    layer={**LAYER, "ffn_gate_inp": "block_sparse_moe.gate"},
    permuted=True,
    experts=_gated("block_sparse_moe.experts.{}", "_exps", W),
)
"""Files that call themselves ``llama`` and have experts."""

NEMOTRON_H = Architecture(
    model_type="nemotron_h",
    attends="none",
    config=_nemotron_h,
    trunk=BACKBONE,
    layer={
        "attn_norm": "norm",
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ssm_in": "mixer.in_proj",
        "ssm_conv1d": "mixer.conv1d",
        "ssm_out": "mixer.out_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    layers="backbone.layers",
    experts={"ffn_up_exps": "mixer.experts.{}.up_proj", "ffn_down_exps": "mixer.experts.{}.down_proj"},
    origins=lambda metadata: (
        *_mamba_origins("mixer"),
        ("mixer.gate.e_score_correction_bias", Origin(("exp_probs_b.bias",))),
    ),
)

LFM2 = Architecture(
    model_type="lfm2",
    attends="some",
    config=_lfm2,
    trunk={**TRUNK, "token_embd_norm": "model.embedding_norm"},
    layer={
        **LAYER,
        "attn_norm": "operator_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "ffn_norm": "ffn_norm",
        **_gated("feed_forward", "", W),
        "ffn_gate_inp": "feed_forward.gate",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
    },
    experts=_gated("feed_forward.experts.{}", "_exps", W),
    origins=_lfm2_origins,
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(model_type="llama", permuted=True),
    "mistral3": Architecture(model_type="mistral", permuted=True, config=_mistral3),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3"),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        config=lambda metadata: _mixture(metadata, renormalise=False) | {"attention_bias": None},
        layer=QWEN_MIXTURE,
        experts=QWEN_EXPERTS,
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        config=lambda metadata: _mixture(metadata, renormalise=True),
        layer=QWEN_MIXTURE,
        experts=QWEN_EXPERTS,
    ),
    "gemma2": Architecture(model_type="gemma2", config=_gemma2, layer={**LAYER, **SANDWICH}, offset_norms=True),
    "gemma3": Architecture(
        model_type="gemma3_text",
        config=_gemma3,
        layer={**LAYER, **SANDWICH},
        offset_norms=True,
    ),
    "phi3": Architecture(model_type="phi3", config=_phi3, layer={**LAYER, "ffn_up": "mlp.gate_up_proj"}),
    "granite": Architecture(model_type="granite", config=_granite, permuted=True),
    "olmo2": Architecture(model_type="olmo2", layer=_without({**LAYER, **SANDWICH}, "ffn_norm", "attn_norm")),
    "cohere2": Architecture(model_type="cohere2", config=_cohere2),
    "stablelm": Architecture(
        model_type="stablelm",
        config=_stablelm,
        layer={
            **LAYER,
            "attn_q_norm": "self_attn.q_layernorm.norms.{}",
            "attn_k_norm": "self_attn.k_layernorm.norms.{}",
        },
    ),
    "chatglm": Architecture(model_type="glm", layer={**LAYER, "ffn_up": "mlp.gate_up_proj"}),
    "glm4": Architecture(
        model_type="glm4",
        layer={
            **LAYER,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "smollm3": Architecture(model_type="smollm3", permuted=True),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        config=_gpt_oss,
        layer={**LAYER, "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        origins=_gpt_oss_origins,
    ),
    "deepseek2": Architecture(
        model_type="deepseek_v2",
        config=_deepseek2,
        layer={
            **LAYER,
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "ffn_gate_inp": "mlp.gate",
            **_gated("mlp.shared_experts", "_shexp"),
        },
        experts=QWEN_EXPERTS,
        origins=_deepseek2_origins,
    ),
    "lfm2": LFM2,
    "lfm2moe": replace(LFM2, model_type="lfm2_moe", config=_lfm2_moe),
    "mamba2": Architecture(
        model_type="mamba2",
        attends="none",
        config=_mamba2,
        trunk=BACKBONE,
        layer={
            "attn_norm": "norm",
            "ssm_in": "mixer.in_proj",
            "ssm_conv1d": "mixer.conv1d",
            "ssm_out": "mixer.out_proj",
        },
        layers="backbone.layers",
        origins=lambda metadata: _mamba_origins("mixer"),
    ),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
    "falcon-h1": Architecture(
        model_type="falcon_h1",
        config=_falcon_h1,
        trunk={**TRUNK, "output_norm": "model.final_layernorm"},
        layer={
            **LAYER,
            **MIXER,
            "ffn_norm": "pre_ff_layernorm",
            **_gated("feed_forward"),
        },
        # The converter names one norm without a suffix.
        origins=lambda metadata: (*_mamba_origins("mamba"), ("pre_ff_layernorm.weight", Origin(("ffn_norm",)))),
    ),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        config=_granite_hybrid,
        layer={
            **LAYER,
            **MIXER,
            "ffn_down": "shared_mlp.output_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
            "ffn_down_exps": "block_sparse_moe.output_linear",
            "ffn_gate_inp": "block_sparse_moe.router.layer",
        },
        attends="some",
        permuted=True,
        origins=_granite_hybrid_origins,
    ),
    "qwen3next": Architecture(
        model_type="qwen3_next",
        config=_delta_mixture,
        layer=DELTA_NET,
        experts=QWEN_EXPERTS,
        offset_norms=True,
        origins=_qwen3_next_origins,
    ),
    "qwen35": Architecture(
        model_type="qwen3_5_text",
        config=_delta,
        layer=DELTA_NET,
        offset_norms=True,
        origins=_qwen3_5_origins,
    ),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text",
        config=_delta_mixture,
        layer=DELTA_NET,
        experts=QWEN_EXPERTS,
        offset_norms=True,
        origins=_qwen3_5_origins,
    ),
}
