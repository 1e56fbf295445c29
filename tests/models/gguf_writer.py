"""GGUF files of small checkpoints, written by llama.cpp's conventions: the names of tensors are
those of the ``gguf`` package; what its converter does to values is written out here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

PERMUTED = ("llama", "mistral3", "granite", "smollm3", "granitehybrid")
DELTA = ("qwen3next", "qwen35", "qwen35moe")
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "ministral3": "mistral3",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "granite": "granite",
    "olmo2": "olmo2",
    "cohere2": "cohere2",
    "stablelm": "stablelm",
    "glm": "chatglm",
    "glm4": "glm4",
    "smollm3": "smollm3",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "lfm2": "lfm2",
    "nemotron_h": "nemotron_h",
    "lfm2_moe": "lfm2moe",
    "mamba2": "mamba2",
    "falcon_h1": "falcon-h1",
    "granitemoehybrid": "granitehybrid",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
"""By ``model_type``."""

Vocabulary = Callable[[gguf.GGUFWriter], object]


def no_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("none")


def write_gguf(
    model: Path,
    path: Path,
    kind: str = "F32",
    *,
    kinds: Mapping[str, str] | None = None,
    vocabulary: Vocabulary = no_vocabulary,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write the checkpoint in directory ``model``. ``kind``: format of matrices; ``kinds``: those
    of some, by a part of their GGUF names. ``changes``: other keys, and other values of keys."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    name = ARCHITECTURES[config["model_type"]]
    if "moe" in (config.get("layers_block_type") or ()):
        name += "_moe"
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type") or ()))
    architecture = next(one for one, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    tensors: dict[str, Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors |= load_file(file)
    writer = gguf.GGUFWriter(path, name)
    for key, value in {**keys_of(config, tensors), **(changes or {})}.items():
        add_key(writer, key if key.startswith(("general.", "tokenizer.", "split.")) else f"{name}.{key}", value)
    vocabulary(writer)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for target, values in converted(config, name, tensors, names).items():
        wanted = next((value for part, value in (kinds or {}).items() if part in target), kind)
        kept = gguf.GGMLQuantizationType[wanted if values.ndim > 1 and "norm" not in target else "F32"]
        if wanted == "NVFP4" and wanted == kept.name:
            # As of files that ModelOpt quantised: a number for each matrix.
            units = torch.linspace(0.01, 0.03, len(values) if values.ndim > 2 else 1)
            values = values / units.view(-1, *[1] * (values.ndim - 1))
            writer.add_tensor(target.replace(".weight", ".scale"), units.numpy())
            writer.add_tensor(target.replace(".weight", ".input_scale"), units.numpy())
        array = values.float().contiguous().numpy()
        raw = nvfp4(array) if wanted == kept.name == "NVFP4" else gguf.quants.quantize(array, kept)
        writer.add_tensor(target, raw, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def nvfp4(values: Any) -> Any:
    """Bytes of rows: for each 64 numbers four scales, then codes of each 16, the lower halves of
    bytes first. The package reads the format, but does not write it."""
    blocks = values.reshape(*values.shape[:-1], -1, 4, 16)
    scales = gguf.quants.NVFP4.fp32_to_ue4m3(np.abs(blocks).max(-1) / 6)
    steps = gguf.quants.NVFP4.ue4m3_to_fp32(scales)[..., None]
    ratios = np.divide(blocks, steps, out=np.zeros_like(blocks), where=steps != 0)
    numbers = np.array(gguf.quants.NVFP4.kvalues, np.float32)
    codes = np.abs(ratios[..., None] - numbers).argmin(-1).astype(np.uint8)
    packed = (codes[..., :8] | codes[..., 8:] << 4).reshape(*blocks.shape[:-2], 32)
    return np.concatenate((scales, packed), -1).reshape(*values.shape[:-1], -1)


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def keys_of(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys below the architecture's name."""
    kind = config["model_type"]
    keys: dict[str, Any] = {"block_count": config["num_hidden_layers"], "embedding_length": config["hidden_size"]}
    keys["context_length"] = config.get("max_position_embeddings", 1 << 20)
    for theirs, ours in (
        ("intermediate_size", "feed_forward_length"),
        ("num_attention_heads", "attention.head_count"),
        ("num_key_value_heads", "attention.head_count_kv"),
        ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
        ("norm_eps", "attention.layer_norm_rms_epsilon"),
        ("layer_norm_eps", "attention.layer_norm_epsilon"),
        ("head_dim", "attention.key_length"),
        ("head_dim", "attention.value_length"),
        ("num_local_experts", "expert_count"),
        ("num_experts", "expert_count"),
        ("num_experts_per_tok", "expert_used_count"),
        ("moe_intermediate_size", "expert_feed_forward_length"),
        ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("attention_multiplier", "attention.scale"),
        ("embedding_multiplier", "embedding_scale"),
        ("residual_multiplier", "residual_scale"),
        ("logits_scaling", "logit_scale"),
        ("logit_scale", "logit_scale"),
        ("use_parallel_residual", "use_parallel_residual"),
    ):
        if config.get(theirs) is not None and kind != "mamba2":
            keys[ours] = config[theirs]
    if kind == "nemotron_h":
        keys |= nemotron_keys(config)
    if kind in ("gemma2", "gemma3_text", "cohere2", "phi3", "gpt_oss") and config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
    head = config.get("head_dim") or config["hidden_size"] // config.get("num_attention_heads", 1)
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:
        keys["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if rope:
        keys["rope.freq_base"] = float(rope["rope_theta"])
    keys["rope.dimension_count"] = int(head * (rope.get("partial_rotary_factor") or 1))
    if rope.get("rope_type") in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        for name in ("beta_fast", "beta_slow"):
            if rope.get(name):
                keys[f"rope.scaling.yarn_{name}"] = float(rope[name])
    if rope.get("rope_type") == "longrope":
        original = config["original_max_position_embeddings"]
        grown = math.sqrt(1 + math.log(config["max_position_embeddings"] / original) / math.log(original))
        keys |= {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": grown}
    if kind == "ministral3":
        keys["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
        keys["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
    if kind == "gpt_oss":
        del keys["feed_forward_length"]
        keys["expert_feed_forward_length"] = config["intermediate_size"]
    if kind == "lfm2_moe":
        keys |= {"leading_dense_block_count": config["num_dense_layers"], "expert_gating_func": 2}
    if kind in ("lfm2", "lfm2_moe"):
        attends = [one == "full_attention" for one in config["layer_types"]]
        keys["attention.head_count_kv"] = [config["num_key_value_heads"] * one for one in attends]
        keys["shortconv.l_cache"] = config["conv_L_cache"]
        keys["feed_forward_length"] = len(tensors["model.layers.0.feed_forward.w1.weight"])
    if kind == "mamba2":
        keys |= {
            "attention.head_count": 0,
            "feed_forward_length": 0,
            "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
            "ssm.conv_kernel": config["conv_kernel"],
            "ssm.inner_size": config["num_heads"] * config["head_dim"],
            "ssm.state_size": config["state_size"],
            "ssm.time_step_rank": config["num_heads"],
            "ssm.group_count": config["n_groups"],
        }
    if kind.startswith("deepseek"):
        keys |= latent_keys(config, rope)
    if kind in ("falcon_h1", "granitemoehybrid"):
        keys |= mixer_keys(config)
    if "linear_num_key_heads" in config:
        values = config["linear_num_value_heads"]
        keys |= {
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.inner_size": values * config["linear_value_head_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.time_step_rank": values,
            "ssm.group_count": config["linear_num_key_heads"],
        }
    return keys


def nemotron_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds = config["layers_block_type"]
    inner = config["moe_intermediate_size" if "moe" in kinds else "intermediate_size"]
    own = "moe" if "moe" in kinds else "mlp"
    keys: dict[str, Any] = {
        "attention.head_count_kv": [config["num_key_value_heads"] * (one == "full_attention") for one in kinds],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "feed_forward_length": [inner * (one == own) for one in kinds],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.time_step_rank": config["mamba_num_heads"],
        "ssm.group_count": config["n_groups"],
    }
    if "moe" in kinds:
        keys |= {
            "expert_count": config["n_routed_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
        }
        if config.get("moe_latent_size"):
            keys["moe_latent_size"] = config["moe_latent_size"]
    return keys


def mixer_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"]
    keys: dict[str, Any] = {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": inner,
        "ssm.state_size": config["mamba_d_state"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "ssm.group_count": config["mamba_n_groups"],
    }
    if config["model_type"] == "granitemoehybrid":
        attends = ["full" in one or one == "attention" for one in config["layer_types"]]
        keys["attention.head_count_kv"] = [config["num_key_value_heads"] * one for one in attends]
        keys |= {
            "rope.scaling.finetuned": False,
            "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        }
    else:
        # Its converter multiplies the weights instead.
        keys["embedding_scale"] = 1.0
    return keys


def latent_keys(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    key = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    keys: dict[str, Any] = {
        "attention.head_count_kv": 1,
        "attention.key_length": config["kv_lora_rank"] + config["qk_rope_head_dim"],
        "attention.value_length": config["kv_lora_rank"],
        "attention.key_length_mla": key,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "rope.dimension_count": config["qk_rope_head_dim"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1,
    }
    if config["q_lora_rank"]:
        keys["attention.q_lora_rank"] = config["q_lora_rank"]
    if config.get("n_group"):
        keys |= {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
    if rope.get("mscale_all_dim"):
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return keys


def converted(config: Mapping[str, Any], name: str, tensors: Mapping[str, Tensor], names: Any) -> dict[str, Tensor]:
    """The tensors of the file, by its names."""
    found: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for source, values in tensors.items():
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", source)
        head = re.fullmatch(r"(.*layernorm)\.norms\.(\d+)\.(.*)", source)
        if (match := expert or head) is not None:
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = values
            continue
        for target, one in changed(config, name, source, values):
            found[names.get_name(target, try_suffixes=(".weight", ".bias")) or target] = one
    for source, stack in stacks.items():
        source = source.removeprefix("model.") if name == "lfm2moe" else source
        source = re.sub("^backbone(.*)mixer", r"model\1mlp", source)
        target = names.get_name(source, try_suffixes=(".weight",))
        found[target] = torch.stack([stack[number] for number in sorted(stack)])
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = llama3_factors(rope, config["head_dim"])
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            found[f"rope_factors_{kind}.weight"] = torch.tensor(rope[f"{kind}_factor"])
    return found


def changed(config: Mapping[str, Any], name: str, source: str, values: Tensor) -> list[tuple[str, Tensor]]:
    """What the converter makes of a tensor: other values, several tensors, none."""
    if config.get("tie_word_embeddings") and source.startswith("lm_head."):
        return []
    if name in PERMUTED and re.search(r"self_attn\.[qk]_proj\.", source):
        heads = config["num_attention_heads" if "q_proj" in source else "num_key_value_heads"]
        return [(source, values.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(values.shape))]
    if source.endswith("rotary_pos_emb.inv_freq"):
        return []
    if name == "chatglm":
        source = source.removeprefix("transformer.")
    if name == "falcon-h1":
        values = multiplied(config, source, values)
    if name.startswith("gemma") and source.endswith("norm.weight"):
        return [(source, values.float() + 1)]
    if name == "gpt-oss" and ".experts." in source:
        return gpt_oss_experts(source, values)
    if name == "gpt-oss" and source.endswith(".sinks"):
        return [(f"{source}.weight", values)]
    if name == "deepseek2" and source.endswith("kv_b_proj.weight"):
        heads = config["num_attention_heads"]
        key, value = values.unflatten(0, (heads, -1)).split([config["qk_nope_head_dim"], config["v_head_dim"]], 1)
        return [(source.replace("kv_b", "k_b"), key.mT), (source.replace("kv_b", "v_b"), value)]
    if source.endswith("e_score_correction_bias"):
        return [(source.replace("correction_bias", "correction.bias"), values)]
    if source.endswith(".expert_bias"):
        return [(f"{source}.bias", values)]
    if name in DELTA and source.endswith("norm.weight") and not source.endswith("linear_attn.norm.weight"):
        return [(source, values.float() + 1)]
    if name in DELTA and ".linear_attn." in source:
        return delta_net(config, name, source, values)
    if name == "granitehybrid" and source.endswith("input_linear.weight"):
        layer, shared = source.split(".")[2], "shared" in source
        kind = ("_shexp" if config["num_local_experts"] else "") if shared else "_exps"
        return [
            (f"blk.{layer}.ffn_{one}{kind}.weight", half)
            for one, half in zip(("gate", "up"), values.chunk(2, -2), strict=True)
        ]
    if name == "granitehybrid" and source.endswith("shared_mlp.output_linear.weight"):
        return [(f"blk.{source.split('.')[2]}.ffn_down{'_shexp' * bool(config['num_local_experts'])}.weight", values)]
    if source.endswith((".conv.conv.weight", ".conv1d.weight")):
        return [(source, values.squeeze(1))]
    if source.endswith(".A_log"):
        return [(source, -torch.exp(values.float()).unsqueeze(-1))]
    if source.endswith((".mixer.D", ".mamba.D")):
        return [(source, values.unsqueeze(-1))]
    if source.endswith(".dt_bias"):
        return [(source.replace(".dt_bias", ".dt_proj.bias"), values)]
    if source.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        return [(source, values.unflatten(0, (config.get("n_groups") or config["mamba_n_groups"], -1)))]
    return [(source, values)]


def multiplied(config: Mapping[str, Any], source: str, values: Tensor) -> Tensor:
    """A weight of Falcon-H1 times the multipliers."""
    rows = torch.ones(len(values))
    inner, grouped = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    if source.endswith("mamba.in_proj.weight"):
        sizes = torch.tensor([inner, inner, grouped, grouped, config["mamba_n_heads"]])
        rows = torch.tensor(config["ssm_multipliers"]).repeat_interleave(sizes) * config["ssm_in_multiplier"]
    factors = {
        "down_proj": config["mlp_multipliers"][1],
        "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * config["attention_in_multiplier"],
        "q_proj": config["attention_in_multiplier"],
        "v_proj": config["attention_in_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "mamba.out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    factor = next((one for part, one in factors.items() if f"{part}.weight" in source), 1.0)
    return (values.mT * rows).mT * factor if values.ndim == 2 else values


def delta_net(config: Mapping[str, Any], name: str, source: str, values: Tensor) -> list[tuple[str, Tensor]]:
    """Qwen3-Next: the parts of a projection of all key heads together; Qwen3.5: value heads in
    turns, the first of each key head, then the second of each.
    """
    heads, key, size = (config[f"linear_{one}"] for one in ("num_key_heads", "key_head_dim", "value_head_dim"))
    served, layer, part = (
        config["linear_num_value_heads"] // heads,
        source.split(".")[2],
        source.split("linear_attn.")[1],
    )
    if part == "in_proj_qkvz.weight":
        parts = values.unflatten(0, (heads, -1)).split([key, key, served * size, served * size], 1)
        q, k, v, z = (one.flatten(0, 1) for one in parts)
        return [(f"blk.{layer}.attn_qkv.weight", torch.cat((q, k, v))), (f"blk.{layer}.attn_gate.weight", z)]

    def in_turns(rows: Tensor, of: int) -> Tensor:
        return rows.reshape(heads, served, of, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    if part == "conv1d.weight":
        values = values.squeeze(1)
    if name != "qwen3next":
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            values = torch.cat((values[: 2 * heads * key], in_turns(values[2 * heads * key :], size)))
        elif part == "in_proj_z.weight":
            values = in_turns(values, size)
        elif part == "out_proj.weight":
            values = in_turns(values.mT, size).mT
        elif part != "norm.weight":
            values = in_turns(values, 1)
    if part == "A_log":
        values = -torch.exp(values.float())
    return [(source.replace("dt_bias", "dt_proj.bias"), values)]


def gpt_oss_experts(source: str, values: Tensor) -> list[tuple[str, Tensor]]:
    part = ".bias" if source.endswith("_bias") else ".weight"
    stem = source.removesuffix("_bias")
    rows = values if part == ".bias" else values.mT
    if stem.endswith("down_proj"):
        return [(f"{stem}{part}", rows)]
    stem = stem.removesuffix("gate_up_proj")
    return [(f"{stem}{one}_proj{part}", rows[:, first::2]) for first, one in ((0, "gate"), (1, "up"))]


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """The divisors of frequencies, as the converter of Llama 3 computes them."""
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = (rope["original_max_position_embeddings"] / rope[f"{one}_freq_factor"] for one in ("low", "high"))
    factors = []
    for frequency in frequencies:
        length = 2 * math.pi / frequency
        if length < high:
            factors.append(1.0)
        elif length > low:
            factors.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / length - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(factors, dtype=torch.float32)
