"""Checkpoints of real models' shapes with made-up weights, for measuring without downloads.

Speed does not depend on the values of weights, but comparing the texts of two runtimes does: in a
network of purely random weights the best two tokens are often closer than bfloat16 rounding, and
the texts of two right implementations diverge after a few tokens. These weights give every step a
wide margin, and a text that never becomes constant:

- the tokens form one random cycle; ``after`` gives the successor of each;
- the row of a token in the (tied) embedding holds a constant, its own code, its successor's code,
  and noise;
- the last block's heads attend, by rotary phases alone, to exactly ``LAG`` positions back, move the
  successor's code found there into the place of the own code, and amplify it.

So the next token is the successor of the token ``LAG`` positions back, which is right only if keys,
values and positions are. All other weights are random, and the other blocks add little, so a fault
in their state shows in the logits and not in the text: equal texts prove tokens, positions and the
last block's state.

Recurrent and hybrid models have purely random weights (``drawn``): their benchmarks compare runs of
one runtime in float32, and logits beside texts.

Letters: V vocabulary, E width, H query heads, K key and value heads, D head size, C size of a code,
P rotary pairs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.base.errors import InvalidArgument, NotFound
from quire.contracts.layers import RopeSpec
from quire.ops.rope import inverse_frequencies

DEFAULT_DIRECTORY = Path("~/.cache/quire/bench")

LAG = 17
"""Number of positions between a token and the one that decides its successor: more than the usual
page of 16 tokens.

Prompts should be longer.
"""

FORMAT = 1
"""Part of the directory's name; raised when the weights of a shape change."""

_SCORE_GAP = 20.0
"""Nats by which the position ``LAG`` back exceeds every other one."""

_EMBEDDING_STD = 0.05
_AMPLIFIED = 4.0
"""Logit of the successor over the logit of the last token itself."""
_NOISE = 0.1
"""RMS of the sum of all other blocks' outputs, relative to the embedding."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Llama or a Qwen3 with tied embeddings."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int
    max_positions: int
    rope: RopeSpec
    qk_norms: bool = False
    """Whether queries and keys are normalised by head, as in Qwen3; then it is a Qwen3."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise InvalidArgument(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.rope.rotary_dim != self.head_size:
            raise InvalidArgument(f"rotary_dim ({self.rope.rotary_dim}) must be the head size ({self.head_size})")
        if self.hidden_size < 2 * self.code_size + 1 or self.code_size < 16:
            raise InvalidArgument(f"hidden_size ({self.hidden_size}) is too small to hold two codes of 16 numbers")

    @property
    def code_size(self) -> int:
        """Number of elements of a token's code: the value heads' width, at most half of the
        embedding."""
        return min(self.kv_heads * self.head_size, (self.hidden_size - 1) // 2)

    @property
    def parameters(self) -> int:
        """Number of weights, the tied ones once."""
        e, q, kv = self.hidden_size, self.heads * self.head_size, self.kv_heads * self.head_size
        block = 2 * e * q + 2 * e * kv + 3 * e * self.intermediate_size + 2 * e + 2 * self.head_size * self.qk_norms
        return self.vocab_size * e + self.layers * block + e

    def config(self) -> dict[str, Any]:
        """``config.json`` of ``transformers``."""
        rope: dict[str, Any] = {"rope_type": self.rope.scaling, "rope_theta": self.rope.theta}
        if self.rope.scaling == "llama3":
            rope |= {
                "factor": self.rope.factor,
                "low_freq_factor": self.rope.low_freq_factor,
                "high_freq_factor": self.rope.high_freq_factor,
                "original_max_position_embeddings": self.rope.original_max_position,
            }
        kind: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
        if self.qk_norms:
            kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}
        return kind | {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "dtype": "bfloat16",
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_positions,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-5,
            "rope_parameters": rope,
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }


SHAPES: dict[str, Shape] = {
    "smollm2-135m": Shape(
        vocab_size=49152,
        hidden_size=576,
        layers=30,
        heads=9,
        kv_heads=3,
        head_size=64,
        intermediate_size=1536,
        max_positions=8192,
        rope=RopeSpec(theta=100_000.0, rotary_dim=64),
    ),
    "llama-3.2-1b": Shape(
        vocab_size=128256,
        hidden_size=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        head_size=64,
        intermediate_size=8192,
        max_positions=131_072,
        rope=RopeSpec(
            theta=500_000.0,
            rotary_dim=64,
            scaling="llama3",
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position=8192,
        ),
    ),
    "qwen3-0.6b": Shape(
        vocab_size=151_936,
        hidden_size=1024,
        layers=28,
        heads=16,
        kv_heads=8,
        head_size=128,
        intermediate_size=3072,
        max_positions=40_960,
        rope=RopeSpec(theta=1_000_000.0, rotary_dim=128),
        qk_norms=True,
    ),
    "quick-30m": Shape(
        vocab_size=16384,
        hidden_size=512,
        layers=8,
        heads=8,
        kv_heads=2,
        head_size=64,
        intermediate_size=1408,
        max_positions=8192,
        rope=RopeSpec(theta=10_000.0, rotary_dim=64),
    ),
    "quick-1m": Shape(
        vocab_size=1024,
        hidden_size=256,
        layers=2,
        heads=4,
        kv_heads=2,
        head_size=64,
        intermediate_size=512,
        max_positions=4096,
        rope=RopeSpec(theta=10_000.0, rotary_dim=64),
    ),
}
"""The three real shapes, and two for quick runs."""

SHAPES["smollm2-135m-32k"] = replace(SHAPES["smollm2-135m"], max_positions=40_960)
"""The same network with more positions, for measuring states of 32,768 tokens and longer
sequences."""


def checkpoint(name: str, *, directory: Path = DEFAULT_DIRECTORY, seed: int = 0) -> Path:
    """Return the directory of the checkpoint of shape ``name``; make it if it is missing.

    Holds ``config.json`` and ``model.safetensors`` (bfloat16) and no tokenizer: prompts are token
    ids.

    Raises:
        NotFound: no such shape.
    """
    if name not in SHAPES:
        raise NotFound(f"there is no shape '{name}'; there are {', '.join(SHAPES)}")
    path = directory.expanduser() / f"{name}-seed{seed}-v{FORMAT}"
    if not path.exists():
        write_checkpoint(SHAPES[name], path, seed=seed)
    return path


def write_checkpoint(shape: Shape, path: Path, *, seed: int) -> None:
    """Write the checkpoint atomically; concurrent processes do no harm."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        part = Path(scratch, "new")
        part.mkdir()
        (part / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n", encoding="utf-8")
        save_file(make_weights(shape, seed=seed), part / "model.safetensors", metadata={"format": "pt"})
        try:
            part.rename(path)
        except OSError:
            if not path.is_dir():  # otherwise the other process was first, with the same bytes
                raise


def variant(
    name: str, label: str, config: Mapping[str, Any], *, directory: Path = DEFAULT_DIRECTORY, seed: int = 0
) -> Path:
    """Return a directory with the weights of shape ``name`` under another ``config.json``,
    identified by ``label``."""
    weights = checkpoint(name, directory=directory, seed=seed) / "model.safetensors"
    path = weights.parent.with_name(f"{weights.parent.name}-{label}")
    text = json.dumps(dict(config), indent=2) + "\n"
    path.mkdir(exist_ok=True)
    if not (path / "model.safetensors").is_symlink():
        (path / "model.safetensors").symlink_to(Path("..") / weights.parent.name / weights.name)
    if not (path / "config.json").is_file() or (path / "config.json").read_text(encoding="utf-8") != text:
        (path / "config.json").write_text(text, encoding="utf-8")
    return path


MIXED: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "num_hidden_layers": 18,
    "attn_layer_indices": [5, 11, 17],
    "intermediate_size": 1536,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
    "max_position_embeddings": 8192,
}
PURE: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "num_hidden_layers": 24,
    "num_heads": 24,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 1,
    "expand": 2,
    "chunk_size": 64,
}
QWEN: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "layer_types": ([*["linear_attention"] * 3, "full_attention"]) * 4,
    "intermediate_size": 2816,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 8192,
}
LFM: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "layer_types": ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
    "intermediate_size": 3072,
    "block_auto_adjust_ff_dim": False,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
MOE: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
BESIDE: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_d_ssm": 1536,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "key_multiplier": 0.4,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.25,
    "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.3],
    "mlp_multipliers": [0.9, 0.3],
    "max_position_embeddings": 8192,
}
SINGLE: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "layers_block_type": [*(["linear_attention", "moe"] * 3), "full_attention", "mlp"] * 3,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_num_heads": 32,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 4,
    "n_routed_experts": 32,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "moe_shared_expert_intermediate_size": 1024,
    "max_position_embeddings": 8192,
}
DRAWN: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe-669m": ("qwen3_moe", MOE),
    "qwen3-moe-small": (
        "qwen3_moe",
        MOE
        | {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 48}
        | {"num_experts": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "qwen3.5-325m": ("qwen3_5_text", QWEN),
    "qwen3.5-small": (
        "qwen3_5_text",
        QWEN
        | {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "layer_types": QWEN["layer_types"][:4]}
        | {"intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
        | {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        },
    ),
    "bamba-250m": (
        "bamba",
        MIXED
        | {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "mamba_n_heads": 32}
        | {"mamba_d_state": 128},
    ),
    "lfm2-245m": ("lfm2", LFM),
    "lfm2-small": (
        "lfm2",
        LFM
        | {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "layer_types": LFM["layer_types"][:3]}
        | {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "bamba-150m": ("bamba", MIXED),
    "bamba-150m-32k": ("bamba", MIXED | {"max_position_embeddings": 40_960}),
    "mamba2-120m": ("mamba2", PURE),
    "falcon-h1-185m": ("falcon_h1", BESIDE),
    "nemotron-h-450m": ("nemotron_h", SINGLE),
    "bamba-20m": (
        "bamba",
        MIXED
        | {"vocab_size": 4096, "hidden_size": 384, "num_hidden_layers": 9, "attn_layer_indices": [4]}
        | {"intermediate_size": 768, "num_attention_heads": 6, "num_key_value_heads": 2, "mamba_n_heads": 12},
    ),
    "bamba-small": (
        "bamba",
        MIXED
        | {
            "vocab_size": 256,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "intermediate_size": 48,
        }
        | {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
        },
    ),
    "mamba2-small": (
        "mamba2",
        PURE
        | {
            "vocab_size": 256,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 8,
        },
    ),
}
"""Model types and fields of ``config.json`` of models with recurrent layers.

The mixers of the second are those of Mamba-2 with 130 million parameters; the heads are not tied,
because a random model with a tied one repeats each token.
"""


def drawn(name: str, *, directory: Path = DEFAULT_DIRECTORY, seed: int = 0) -> Path:
    """Return the directory of a checkpoint of ``DRAWN`` with ``transformers``' random weights
    (bfloat16); make it if it is missing.

    Raises:
        NotFound: no such name.
    """
    import transformers

    if name not in DRAWN:
        raise NotFound(f"there is no '{name}'; there are {', '.join(DRAWN)}")
    path = directory.expanduser() / f"{name}-seed{seed}-v{FORMAT}"
    if path.exists():
        return path
    kind, values = DRAWN[name]
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = transformers.AutoConfig.for_model(kind, **values, **tokens)
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.bfloat16)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        part = Path(scratch, "new")
        model.save_pretrained(part)
        part.rename(path)
    return path


def windowed_config(shape: Shape, window: int, max_positions: int) -> dict[str, Any]:
    """Return Mistral's configuration, whose weights have Llama's names: every layer has the
    window."""
    config = {key: value for key, value in shape.config().items() if key not in ("attention_bias", "mlp_bias")}
    return config | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": window,
        "max_position_embeddings": max_positions,
    }


def alternating_config(shape: Shape, window: int, max_positions: int) -> dict[str, Any]:
    """Return SmolLM3's configuration, whose weights have Llama's names: full and windowed layers by
    turns, the last one windowed, all rotate."""
    kinds = ("sliding_attention", "full_attention")
    return shape.config() | {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "use_sliding_window": True,
        "sliding_window": window,
        "layer_types": [kinds[(shape.layers - 1 - layer) % 2] for layer in range(shape.layers)],
        "no_rope_layers": [1] * shape.layers,
        "max_position_embeddings": max_positions,
        "pad_token_id": 0,
    }


def predicted_text(shape: Shape, prompt: list[int], steps: int, *, seed: int = 0) -> list[int]:
    """Return a right runtime's continuation of ``prompt`` (longer than ``LAG``), without a network:
    see the module's docstring."""
    successor, text = after(shape, seed=seed).tolist(), list(prompt)
    for _ in range(steps):
        text.append(successor[text[-1 - LAG]])
    return text[len(prompt) :]


def text_tokenizer(vocab_size: int, *, directory: Path = DEFAULT_DIRECTORY) -> Path:
    """Return the directory of a byte-level BPE tokenizer with at most ``vocab_size`` tokens; train
    it if it is missing.

    The text is Python's own library, so that tokens are as long, and share beginnings, as those of
    real vocabularies.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    path = directory.expanduser() / f"tokenizer-{vocab_size}-v{FORMAT}"
    if (path / "tokenizer.json").is_file():
        return path
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(_library_text(256 * vocab_size), trainer)
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path) as scratch:
        made.save(str(Path(scratch, "new")))
        Path(scratch, "new").rename(path / "tokenizer.json")
    return path


def _library_text(size: int) -> Iterator[str]:
    """Yield about ``size`` bytes of source code."""
    for path in sorted(Path(os.__file__).parent.rglob("*.py")):
        if size <= 0:
            return
        if "site-packages" not in path.parts:
            text = path.read_text(encoding="utf-8", errors="replace")
            size -= len(text)
            yield text


def make_weights(shape: Shape, *, seed: int) -> dict[str, Tensor]:
    """Return all tensors by their names in the checkpoint, bfloat16.

    See the module's docstring for their computation.
    """
    rng = torch.Generator().manual_seed(seed)
    weights = {"model.embed_tokens.weight": _embedding(shape, rng)}
    embedding_rms = math.sqrt(weights["model.embed_tokens.weight"][0].float().square().mean())
    for layer in range(shape.layers):
        weights |= {f"model.layers.{layer}.{name}": w for name, w in _random_block(shape, rng, embedding_rms).items()}
    weights |= {
        f"model.layers.{shape.layers - 1}.self_attn.{name}": w
        for name, w in _looking_back(shape, embedding_rms).items()
    }
    weights["model.norm.weight"] = torch.ones(shape.hidden_size)
    return {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}


def after(shape: Shape, *, seed: int) -> Tensor:
    """Return the successor of each token, int64 ``[V]``: one cycle through the whole vocabulary."""
    cycle = torch.randperm(shape.vocab_size, generator=torch.Generator().manual_seed(seed + 1))
    successor = torch.empty_like(cycle)
    successor[cycle] = cycle.roll(-1)
    return successor


def _embedding(shape: Shape, rng: torch.Generator) -> Tensor:
    """Return rows of a constant, the own code, the successor's code, noise; ``[V, E]``."""
    size = shape.code_size
    # Entries are +1 or -1, so all rows have the same length: no token is likelier than another or
    # has more weight in attention.
    table_VE = torch.randint(0, 2, (shape.vocab_size, shape.hidden_size), generator=rng).float() * 2 - 1
    table_VE[:, 0] = _constant(shape)
    code_VC = table_VE[:, 1 : 1 + size]
    table_VE[:, 1 + size : 1 + 2 * size] = code_VC[after(shape, seed=rng.initial_seed())]
    return table_VE * _EMBEDDING_STD


def _constant(shape: Shape) -> float:
    """Return the constant of each embedding, in units of the other entries: a quarter of the norm,
    so that norms hardly change it."""
    return math.sqrt(shape.hidden_size) / 4


def _random_block(shape: Shape, rng: torch.Generator, embedding_rms: float) -> dict[str, Tensor]:
    e, q, kv, f = (
        shape.hidden_size,
        shape.heads * shape.head_size,
        shape.kv_heads * shape.head_size,
        shape.intermediate_size,
    )

    def normal(rows: int, columns: int, scale: float) -> Tensor:
        return torch.randn(rows, columns, generator=rng) * (scale / math.sqrt(columns))

    added = _NOISE * embedding_rms / math.sqrt(2 * shape.layers)
    block = {
        "input_layernorm.weight": torch.ones(e),
        "self_attn.q_proj.weight": normal(q, e, 1.0),
        "self_attn.k_proj.weight": normal(kv, e, 1.0),
        "self_attn.v_proj.weight": normal(kv, e, 1.0),
        "self_attn.o_proj.weight": normal(e, q, added),
        "post_attention_layernorm.weight": torch.ones(e),
        "mlp.gate_proj.weight": normal(f, e, 1.0),
        "mlp.up_proj.weight": normal(f, e, 1.0),
        # silu(gate) * up of unit normals has an RMS of 0.6.
        "mlp.down_proj.weight": normal(e, f, added / 0.6),
    }
    if shape.qk_norms:
        block |= {f"self_attn.{name}_norm.weight": torch.ones(shape.head_size) for name in "qk"}
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        block[name][0] = 0.0  # the constant stays one
    return block


def _looking_back(shape: Shape, embedding_rms: float) -> dict[str, Tensor]:
    """Return the last block's attention: it copies the successor's code ``LAG`` positions back to
    the place of the own code."""
    size, head, group = shape.code_size, shape.head_size, shape.heads // shape.kv_heads
    freq_P = inverse_frequencies(shape.rope)
    # Rotated, the query has the phase i * freq and the key (j + LAG) * freq: their product peaks at
    # j = i - LAG.
    pairs, gap = _deciding_pairs(freq_P, shape.max_positions)
    used_P = (torch.arange(len(freq_P)) < pairs).double()
    query_D = torch.cat((used_P, 0 * used_P))
    key_D = torch.cat((used_P * (LAG * freq_P).cos(), used_P * (LAG * freq_P).sin()))
    # The first column of the normalised input, equal for all tokens.
    constant = _constant(shape) * _EMBEDDING_STD / embedding_rms
    gain = math.sqrt(_SCORE_GAP * math.sqrt(head) / gap) / constant

    q_proj = torch.zeros(shape.heads * head, shape.hidden_size)
    k_proj = torch.zeros(shape.kv_heads * head, shape.hidden_size)
    v_proj = torch.zeros(shape.kv_heads * head, shape.hidden_size)
    o_proj = torch.zeros(shape.hidden_size, shape.heads * head)
    q_proj[:, 0] = (query_D * gain).repeat(shape.heads)
    k_proj[:, 0] = (key_D * gain).repeat(shape.kv_heads)
    amplify = _AMPLIFIED * shape.hidden_size / size * embedding_rms / group
    for i in range(size):
        v_proj[i, 1 + size + i] = 1.0
        kv_head, column = divmod(i, head)
        for member in range(group):
            o_proj[1 + i, (kv_head * group + member) * head + column] = amplify
    weights = {"q_proj.weight": q_proj, "k_proj.weight": k_proj, "v_proj.weight": v_proj, "o_proj.weight": o_proj}
    if shape.qk_norms:
        # A norm removes the gain: each used pair has a length of sqrt(D / pairs) after it.
        length = math.sqrt(_SCORE_GAP * math.sqrt(head) / gap * pairs / head)
        weights |= {f"{name}_norm.weight": torch.full((head,), length) for name in "qk"}
    return weights


def _deciding_pairs(freq_P: Tensor, positions: int) -> tuple[int, float]:
    """Return the number of fastest pairs to use, and the least fall of the sum of their cosines
    from distance 0 to others.

    Few pairs repeat at some other distance, and slow ones barely distinguish neighbours but enlarge
    the scores, so that rounding and noise weigh more: best is the largest fall for each pair.
    """
    fall_P = torch.full_like(freq_P, math.inf)
    for distance in torch.split(torch.arange(1, positions, dtype=freq_P.dtype), 1 << 14):
        falls = (1 - (distance.unsqueeze(-1) * freq_P).cos()).cumsum(-1)
        fall_P = torch.minimum(fall_P, falls.min(0).values)
    best = int((fall_P / torch.arange(1, len(freq_P) + 1)).argmax())
    return best + 1, float(fall_P[best])


def main() -> None:
    """Make checkpoints and print their paths."""
    parser = argparse.ArgumentParser(description="Makes checkpoints with made-up weights for the benchmarks.")
    parser.add_argument("names", nargs="*", default=list(SHAPES), metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in options.names:
        print(checkpoint(name, directory=options.dir, seed=options.seed))


if __name__ == "__main__":
    main()
