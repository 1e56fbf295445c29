"""Tiny random checkpoints of every family, made and saved by transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

GEOMETRY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # So short that frequencies of this small head fall into all three ranges of the rule.
    "original_max_position_embeddings": 32,
}
# Half of the tokens of a test lie beyond the original length.
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 16}
MINISTRAL_ROPE = {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 200.0,
    "short_factor": [1.0, 1.1, 1.4, 2.0],
    "long_factor": [1.2, 2.0, 4.0, 9.0],
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
FULL = ["full_attention"] * 8


@dataclass(frozen=True)
class Case:
    """A configuration, and whether it is saved in several files."""

    name: str
    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    sharded: bool = False


CASES = (
    Case("llama-gqa", "Llama"),
    Case("llama-mha-sharded", "Llama", {"num_key_value_heads": 4}, sharded=True),
    Case("llama-mqa-tied", "Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    Case("llama-biases", "Llama", {"attention_bias": True, "mlp_bias": True}, sharded=True),
    Case("llama-head-dim", "Llama", {"head_dim": 12, "num_attention_heads": 2}),
    Case("llama-rope-llama3", "Llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 16}),
    Case(
        "llama-rope-linear", "Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}
    ),
    Case("llama-rope-yarn", "Llama", {"rope_parameters": YARN_ROPE, "head_dim": 16}),
    Case("mistral", "Mistral", {"sliding_window": None, "head_dim": 16}),
    Case("mistral-long-window", "Mistral", {"sliding_window": 128, "rms_norm_eps": 1e-2}),
    Case("mistral-window", "Mistral", {"sliding_window": 7}),
    Case("ministral3", "Ministral3", {"head_dim": 8, "rope_parameters": MINISTRAL_ROPE}),
    Case("qwen2", "Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    Case("qwen2-tied-sharded", "Qwen2", {"tie_word_embeddings": True}, sharded=True),
    Case("qwen2-windows", "Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    Case("qwen3", "Qwen3", {"head_dim": 16}),
    Case(
        "qwen3-layer-types",
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", *FULL[:2]]},
    ),
    Case("qwen3-biases-tied", "Qwen3", {"head_dim": 6, "attention_bias": True, "tie_word_embeddings": True}),
    Case("phi3", "Phi3"),
    Case("phi3-longrope", "Phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 16}),
    Case(
        "phi3-longrope-partial",
        "Phi3",
        {
            "rope_parameters": {**LONG_ROPE, "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.5]},
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 16,
            "sliding_window": 11,
        },
    ),
    Case("phi3-window-partial", "Phi3", {"sliding_window": 6, "partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    Case(
        "gemma2",
        "Gemma2",
        {
            "num_hidden_layers": 4,
            "sliding_window": 7,
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    Case(
        "gemma2-biases-untied",
        "Gemma2",
        {
            "head_dim": 8,
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "hidden_activation": "gelu",
        },
        sharded=True,
    ),
    Case("gemma3", "Gemma3", {"num_hidden_layers": 7, "sliding_window": 5, "head_dim": 8}),
    Case(
        "gemma3-ropes",
        "Gemma3",
        {
            "sliding_window": 9,
            "head_dim": 16,
            "query_pre_attn_scalar": 9,
            "final_logit_softcapping": 4.0,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    Case("gemma3-with-vision", "Gemma3WithVision", {"sliding_window": 5, "head_dim": 8}),
    Case("olmo2", "Olmo2"),
    Case("olmo2-biases-mha", "Olmo2", {"attention_bias": True, "num_key_value_heads": 4}, sharded=True),
    Case("cohere2", "Cohere2", {"num_hidden_layers": 5, "sliding_window": 7, "layer_norm_eps": 1e-2}),
    Case(
        "cohere2-biases-pattern",
        "Cohere2",
        {
            "attention_bias": True,
            "tie_word_embeddings": False,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "logit_scale": 0.3,
        },
    ),
    Case("smollm3", "SmolLM3", {"num_hidden_layers": 5}),
    Case(
        "smollm3-windows-biases",
        "SmolLM3",
        {
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    Case("stablelm", "StableLm", {"partial_rotary_factor": 0.25}),
    Case(
        "stablelm-2",
        "StableLm",
        {"partial_rotary_factor": 0.5, "use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    Case("stablelm-head-norms", "StableLm", {"partial_rotary_factor": 0.5, "qk_layernorm": True}, sharded=True),
    Case(
        "granite",
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 7.0,
        },
    ),
    Case("granite-biases", "Granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    Case("glm", "Glm", {"head_dim": 8}),
    Case("glm-no-bias-tied", "Glm", {"head_dim": 16, "attention_bias": False, "tie_word_embeddings": True}),
    Case("glm4", "Glm4", {"head_dim": 8}),
    Case("glm4-no-bias-whole", "Glm4", {"head_dim": 16, "attention_bias": False, "partial_rotary_factor": 1.0}),
)


@dataclass(frozen=True)
class TinyCheckpoint:
    """A saved model, and the same model in transformers (float32)."""

    case: Case
    path: Path
    model: Any


def make_checkpoint(case: Case, path: Path) -> TinyCheckpoint:
    """Every weight random, also those that transformers starts at 0 or 1 and that a test would not
    notice.
    """
    if case.family == "Gemma3WithVision":
        text = transformers.Gemma3TextConfig(**{**GEOMETRY, **case.changes})
        kind = transformers.Gemma3ForConditionalGeneration
        config = kind.config_class(text_config=text.to_dict(), vision_config=VISION, mm_tokens_per_image=4)
    else:
        kind = getattr(transformers, f"{case.family}ForCausalLM")
        config = kind.config_class(**{**GEOMETRY, **case.changes})
    model = kind(config).float().eval()
    generator = torch.Generator().manual_seed(len(case.name))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = weight.shape[-1] ** -0.5 if weight.ndim == 2 and "embed" not in name else 0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale + ("norm" in name))
    model.save_pretrained(path, **({"max_shard_size": "12KB"} if case.sharded else {}))
    return TinyCheckpoint(case=case, path=path, model=model)


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], TinyCheckpoint]:
    made: dict[str, TinyCheckpoint] = {}

    def make(case: Case) -> TinyCheckpoint:
        if case.name not in made:
            made[case.name] = make_checkpoint(case, tmp_path_factory.mktemp("checkpoints") / case.name)
        return made[case.name]

    return make


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def tiny(request: pytest.FixtureRequest, make_tiny: Callable[[Case], TinyCheckpoint]) -> TinyCheckpoint:
    """Each case in turn; do not change its files."""
    return make_tiny(request.param)


@pytest.fixture
def single_file(make_tiny: Callable[[Case], TinyCheckpoint], tmp_path: Path) -> Path:
    """A copy, to be damaged, of a Llama in one file."""
    return Path(shutil.copytree(make_tiny(CASES[0]).path, tmp_path / "single"))


@pytest.fixture
def sharded(make_tiny: Callable[[Case], TinyCheckpoint], tmp_path: Path) -> Path:
    """A copy, to be damaged, of a Llama in several files."""
    return Path(shutil.copytree(make_tiny(CASES[1]).path, tmp_path / "sharded"))
