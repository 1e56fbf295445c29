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
    Case("mistral", "Mistral", {"sliding_window": None, "head_dim": 16}),
    Case("mistral-long-window", "Mistral", {"sliding_window": 128, "rms_norm_eps": 1e-2}),
    Case("qwen2", "Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    Case("qwen2-tied-sharded", "Qwen2", {"tie_word_embeddings": True}, sharded=True),
    Case("qwen3", "Qwen3", {"head_dim": 16}),
    Case("qwen3-biases-tied", "Qwen3", {"head_dim": 6, "attention_bias": True, "tie_word_embeddings": True}),
)


@dataclass(frozen=True)
class TinyCheckpoint:
    """A saved model, and the same model in transformers (float32)."""

    case: Case
    path: Path
    model: Any


def make_checkpoint(case: Case, path: Path) -> TinyCheckpoint:
    """Every weight random, also those that transformers starts at 0 or 1 and that a test would not notice."""
    config = getattr(transformers, f"{case.family}Config")(**{**GEOMETRY, **case.changes})
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).float().eval()
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
