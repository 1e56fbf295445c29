"""Every number of the recipe in one value, its presets, and the places of the work directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.base.errors import InvalidArgument


def _option(default: Any, text: str) -> Any:
    """A field whose help the command line shows."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of one run; the defaults are those of the bundled model. Checked when made.

    Raises:
        InvalidArgument: a value out of range, or two that do not go together.
    """

    # Text
    sources: tuple[str, ...] = _option(("stdlib", "torch"), "importable top-level names; 'stdlib' is all of it")
    heldout_every: int = _option(40, "one file in so many, by a hash of its path, is kept for evaluation")
    max_file_bytes: int = _option(1_000_000, "longer files are left out (they are mostly generated tables)")
    vocab_size: int = _option(4096, "entries of the tokenizer, special tokens and 256 bytes included")
    sequence_length: int = _option(1024, "tokens of a training sequence")
    synthetic_fraction: float = _option(0.25, "share of training sequences that are made-up modules")

    # Shape
    hidden_size: int = _option(256, "width")
    layers: int = _option(8, "transformer blocks")
    heads: int = _option(4, "query heads")
    kv_heads: int = _option(2, "key and value heads")
    head_size: int = _option(64, "columns of a head")
    intermediate_size: int = _option(704, "columns of the gated MLP")
    max_positions: int = _option(4096, "positions that the exported configuration allows")
    rope_theta: float = _option(10_000.0, "base of the rotary frequencies")

    # Training
    steps: int = _option(2700, "optimizer steps")
    batch: int = _option(8, "sequences of a step")
    micro_batch: int = _option(0, "sequences of one forward pass, a divisor of the batch; 0 is the whole batch")
    warmup_steps: int = _option(60, "steps of linear warm-up")
    decay_from: float = _option(0.5, "share of the steps after which the learning rate falls linearly")
    final_scale: float = _option(0.02, "share of the learning rate that is left at the last step")
    muon_lr: float = _option(0.006, "learning rate of the blocks' matrices (Muon, RMS matched to AdamW)")
    weight_decay: float = _option(0.05, "weight decay of the blocks' matrices")
    adamw_lr: float = _option(0.004, "learning rate of embeddings and norms (AdamW, no weight decay)")
    clip: float = _option(1.0, "largest norm of the gradient")
    seed: int = _option(0, "seed of weights, data order and made-up modules")

    def __post_init__(self) -> None:
        positive = (
            "heldout_every max_file_bytes sequence_length hidden_size layers heads kv_heads head_size "
            "intermediate_size max_positions rope_theta steps batch muon_lr adamw_lr clip"
        )
        for name in positive.split():
            if getattr(self, name) <= 0:
                raise InvalidArgument(f"{name} must be greater than 0, got {getattr(self, name)}")
        for name in ("micro_batch", "warmup_steps", "weight_decay", "seed"):
            if getattr(self, name) < 0:
                raise InvalidArgument(f"{name} must be 0 or greater, got {getattr(self, name)}")
        for name in ("synthetic_fraction", "decay_from", "final_scale"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InvalidArgument(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if not self.sources:
            raise InvalidArgument("sources is empty; name at least one, such as 'stdlib'")
        if self.heldout_every < 2:
            raise InvalidArgument("heldout_every must be 2 or greater, or nothing would be left to train on; got 1")
        if not 260 <= self.vocab_size <= 65_536:
            raise InvalidArgument(
                f"vocab_size must be between 260 (bytes and special tokens) and 65536 (tokens are stored in "
                f"16 bits), got {self.vocab_size}"
            )
        if self.heads % self.kv_heads:
            raise InvalidArgument(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_size % 2:
            raise InvalidArgument(f"head_size must be even for rotary embeddings, got {self.head_size}")
        if self.micro_batch and self.batch % self.micro_batch:
            raise InvalidArgument(f"micro_batch ({self.micro_batch}) must divide batch ({self.batch})")
        if self.sequence_length > self.max_positions:
            raise InvalidArgument(
                f"sequence_length ({self.sequence_length}) must not exceed max_positions ({self.max_positions})"
            )
        if self.sequence_length < 64:
            raise InvalidArgument(
                f"sequence_length must be 64 or greater, so that a made-up module fits; got {self.sequence_length}"
            )

    @property
    def forward_batch(self) -> int:
        """Sequences of one forward pass."""
        return self.micro_batch or self.batch

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and checkpoints."""
        return {**dataclasses.asdict(self), "sources": list(self.sources)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """Inverse of :meth:`as_dict`."""
        return cls(**{**values, "sources": tuple(values["sources"])})

    def differences(self, other: Recipe, *, ignore: frozenset[str] = frozenset()) -> list[str]:
        """``name: own value, other's value`` for each field in which the two differ."""
        return [
            f"{f.name}: {getattr(self, f.name)} here, {getattr(other, f.name)} there"
            for f in dataclasses.fields(self)
            if f.name not in ignore and getattr(self, f.name) != getattr(other, f.name)
        ]


PRESETS: dict[str, Recipe] = {
    # 22.1M tokens, about 90 minutes on two CPU cores.
    "bundled": Recipe(),
    # The same model, 20 times the tokens: for a GPU.
    "bundled-long": Recipe(steps=6800, batch=64, warmup_steps=200),
    # 38M parameters and sequences of 2,048; feed it more packages than torch (--sources).
    "small": Recipe(
        hidden_size=512,
        layers=12,
        heads=8,
        kv_heads=4,
        intermediate_size=1408,
        sequence_length=2048,
        steps=12_000,
        batch=64,
        warmup_steps=300,
        muon_lr=0.004,
        adamw_lr=0.003,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """Files that the stages hand to each other, all under one directory."""

    root: Path

    def _at(self, name: str) -> Path:
        return self.root / name

    @property
    def train_text(self) -> Path:
        return self._at("corpus.train.jsonl")

    @property
    def heldout_text(self) -> Path:
        return self._at("corpus.heldout.jsonl")

    @property
    def sources(self) -> Path:
        """Origin, licence and size of what was collected."""
        return self._at("SOURCES.json")

    @property
    def tokenizer(self) -> Path:
        return self._at("tokenizer.json")

    @property
    def train_tokens(self) -> Path:
        return self._at("tokens.train.npy")

    @property
    def heldout_tokens(self) -> Path:
        return self._at("tokens.heldout.npy")

    @property
    def checkpoint(self) -> Path:
        return self._at("checkpoint.pt")

    @property
    def log(self) -> Path:
        """One JSON line for each reported training step."""
        return self._at("training.jsonl")

    @property
    def evaluation(self) -> Path:
        return self._at("evaluation.json")
