"""What a layer remembers, as data: the geometry that a model declares and a KV state stores.

Letters: Hq, Hkv query and KV heads; Dk, Dv head sizes of K and V. Sizes are counts of elements. No torch here:
a spec is compared, hashed, printed and written into state files.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias

RopeMode: TypeAlias = Literal["none", "normal", "inline"]
RopeScaling: TypeAlias = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary position embedding of one layer (RoFormer, arXiv:2104.09864).

    ``rotary_dim`` columns of each head turn, the others pass through. ``scaling`` names the rule by which the
    frequencies ``theta ** (-2j / rotary_dim)`` are changed; ``factor`` and the following belong to it.
    """

    theta: float
    rotary_dim: int
    interleaved: bool = False
    """Pairs are (0, 1), (2, 3), ...; otherwise column j pairs with j + rotary_dim / 2."""
    scaling: RopeScaling = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0

    def fingerprint(self) -> str:
        """16 hex digits of what decides the angles; equal fingerprints mean equal rotations."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class FullAttention:
    """Every token's K and V are kept, and every later token may see them. MHA, GQA and MQA."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Dk"""
    value_dim: int
    """Dv, which may differ from Dk"""
    rope: RopeSpec | None = None
    rope_mode: RopeMode = "none"
    """``normal``: K is stored rotated. ``inline``: K is stored raw and rotated when read. ``none``: as given."""
    sm_scale: float | None = None
    """Scale of the scores; None is Dk ** -0.5."""
    kind: Literal["full"] = field(default="full", init=False)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowedAttention:
    """As ``FullAttention``, but a query at position q sees only positions > q - window."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int
    rope: RopeSpec | None = None
    rope_mode: RopeMode = "none"
    sm_scale: float | None = None
    kind: Literal["window"] = field(default="window", init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """One row per token, ``[c_kv | k_pe]``, shared by all heads (MLA, DeepSeek-V2, arXiv:2405.04434)."""

    num_heads: int
    row_dim: int
    value_dim: int
    """The first ``value_dim`` columns of the row are the value."""
    rope: RopeSpec | None = None
    sm_scale: float | None = None
    kind: Literal["latent"] = field(default="latent", init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossAttention:
    """K and V of an encoder, written once per sequence."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    sm_scale: float | None = None
    kind: Literal["cross"] = field(default="cross", init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTensor:
    """One tensor of a recurrent state."""

    shape: tuple[int, ...]
    dtype: str
    initial: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrent:
    """A few tensors of fixed size that the tokens so far have left behind."""

    states: tuple[StateTensor, ...]
    kind: Literal["recurrent"] = field(default="recurrent", init=False)


LayerSpec: TypeAlias = FullAttention | WindowedAttention | LatentAttention | CrossAttention | Recurrent
