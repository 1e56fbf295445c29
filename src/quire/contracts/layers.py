"""The memory of a layer as data: the geometry that a model declares and a KV state stores.

Letters: Hq, Hkv query and KV heads; Dk, Dv head sizes of K and V. Sizes count elements. No torch
here: a spec is compared, hashed, printed and written into state files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import InvalidArgument
from quire.base.signatures import checks_arguments

RopeMode: TypeAlias = Literal["none", "normal", "inline"]
RopeScaling: TypeAlias = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary position embedding of one layer (RoFormer, arXiv:2104.09864), as numbers.

    ``rotary_dim`` columns of each head rotate; the others stay. ``scaling`` names the rule that
    changes the frequencies ``theta ** (-2j / rotary_dim)``
    (``quire.ops.rope.inverse_frequencies``). Each later field belongs to the rules that it names
    and is neutral elsewhere. Fields that depend on the context (``length``, ``factors``) are fixed
    with the spec: stored keys cannot follow frequencies that change later.
    """

    theta: float
    rotary_dim: int
    interleaved: bool = False
    """Pairs are (0, 1), (2, 3), ...; otherwise column j pairs with j + rotary_dim / 2."""
    scaling: RopeScaling = "default"
    factor: float = 1.0
    """Divisor of frequencies: linear, dynamic, yarn, llama3, proportional."""
    low_freq_factor: float = 1.0
    """llama3: ``factor`` divides pairs with fewer turns in ``original_max_position`` tokens."""
    high_freq_factor: float = 4.0
    """llama3: pairs with more turns keep their frequency."""
    original_max_position: int = 0
    """dynamic, yarn, llama3: the length in tokens from which the rule starts."""
    beta_fast: float = 32.0
    """yarn: as ``high_freq_factor``."""
    beta_slow: float = 1.0
    """yarn: as ``low_freq_factor``."""
    truncate: bool = True
    """yarn: round the bounds between which pairs blend outwards to whole pairs."""
    length: int = 0
    """dynamic: length in tokens for the base; ``theta`` up to ``original_max_position``."""
    factors: tuple[float, ...] = ()
    """longrope: divisor of each pair's frequency, ``rotary_dim / 2`` numbers, short or long."""
    turning_dim: int = 0
    """proportional: number of columns that rotate; other pairs have frequency 0."""
    attention_factor: float = 1.0
    """Multiplies cos and sin, so its square multiplies the rotated columns' part of a score."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields that are not neutral, in JSON types. Equal specs give equal objects."""
        found: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if value == one.default:
                continue
            if one.type == "float":
                value = float(value)  # A base of 10000 equals one of 10000.0 and must not be written otherwise.
            elif isinstance(value, tuple):
                value = [float(part) for part in value]
            found[one.name] = value
        return found

    def fingerprint(self) -> str:
        """Return 16 hex digits of ``as_json``; equal fingerprints mean equal rotations."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyValueAttention:
    """The common fields of layers that keep K and V of every token: MHA, GQA and MQA."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Dk"""
    value_dim: int
    """Dv, which may differ from Dk"""
    rope: RopeSpec | None = None
    rope_mode: RopeMode = "none"
    """``normal``: K is stored rotated. ``inline``: raw, and rotated when read. ``none``: as
    given."""
    sm_scale: float | None = None
    """Scale of the scores; None is Dk ** -0.5."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)`` (Gemma 2, arXiv:2408.00118); None:
    unchanged."""
    sinks: tuple[float, ...] = ()
    """One learned logit per query head that joins the softmax without a value (gpt-oss)."""
    caller_rotates: bool = False
    """The model rotates q and k by its own rule. So no query can be rotated to another position,
    which the sink of a window would require. Storage and exchange are the same as without."""

    @property
    def layer_window(self) -> int | None:
        """None: no window."""
        return None

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale


@dataclass(frozen=True, kw_only=True, slots=True)
class FullAttention(KeyValueAttention):
    """A query sees all tokens up to its own."""

    kind: Literal["full"] = field(default="full", init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowedAttention(KeyValueAttention):
    """As ``FullAttention``, but a query at position q sees only positions > q - window."""

    window: int
    kind: Literal["window"] = field(default="window", init=False)

    @property
    def layer_window(self) -> int | None:
        """Return the window, in tokens."""
        return self.window


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """One row per token, ``[c_kv | k_pe]``, for all heads (MLA, DeepSeek-V2, arXiv:2405.04434)."""

    num_heads: int
    row_dim: int
    value_dim: int
    """The first ``value_dim`` columns of the row are the value."""
    rope: RopeSpec | None = None
    """The last ``rope.rotary_dim`` columns of rows and queries rotate with these frequencies, in
    absorbed and expanded form; None: none rotate. Rows are stored in the caller's rotation."""
    sm_scale: float | None = None
    """Scale of the scores in every form; None is row_dim ** -0.5."""
    kind: Literal["latent"] = field(default="latent", init=False)

    @property
    def layer_window(self) -> int | None:
        """None: no window."""
        return None

    @property
    def rope_mode(self) -> RopeMode:
        """``none``: rows are stored as given."""
        return "none"

    @property
    def num_kv_heads(self) -> int:
        """1: all query heads read the same row."""
        return 1

    @property
    def head_dim(self) -> int:
        """Columns of the row, which is the key."""
        return self.row_dim

    @property
    def scale(self) -> float:
        return self.row_dim**-0.5 if self.sm_scale is None else self.sm_scale


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossAttention:
    """K and V of an encoder, written once per sequence. Every token sees all rows, without order,
    window or rotation."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Dk"""
    value_dim: int
    """Dv, which may differ from Dk"""
    sm_scale: float | None = None
    """Scale of the scores; None is Dk ** -0.5."""
    kind: Literal["cross"] = field(default="cross", init=False)

    @property
    def layer_window(self) -> int | None:
        """None: no window."""
        return None

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale


STATE_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")
"""Dtypes of state tensors."""


class Listed(Protocol):
    """A tensor or an array."""

    def tolist(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class InitialValues:
    """Initial values that differ by element, as data: equal values compare equal and have one
    hash."""

    shape: tuple[int, ...]
    dtype: str
    """``int64`` or ``float64``."""
    data: bytes

    @classmethod
    def of(cls, array: NDArray[Any]) -> InitialValues:
        """Return the values of an int64 or float64 array."""
        return cls(array.shape, str(array.dtype), array.tobytes())

    @property
    def array(self) -> NDArray[Any]:
        """Return the values as a read-only array."""
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.array.tolist()

    def as_json(self) -> dict[str, Any]:
        """Return shape and digest, in JSON types."""
        return {"shape": list(self.shape), "sha256": hashlib.sha256(self.dtype.encode() + self.data).hexdigest()}


@checks_arguments()
@dataclass(frozen=True, kw_only=True, slots=True)
class StateTensor:
    """One tensor of a recurrent state. ``InvalidArgument``: a size below 1; a dtype outside
    ``STATE_DTYPES``; initial values that are NaN, do not broadcast, or do not fit the dtype."""

    shape: tuple[int, ...]
    dtype: str
    initial: float | Listed = 0.0
    """The value before any token: a number, or a tensor or array that broadcasts to ``shape`` and
    is copied. It reads as a number if all values are the same, else as ``InitialValues``."""
    parts: tuple[int, ...] = field(default=(), compare=False)
    """Sizes of parts of the last dimension, each of which ranks divide by itself; empty: there is
    one part."""

    def __post_init__(self) -> None:
        if min(self.shape, default=1) < 1:
            raise InvalidArgument(f"StateTensor: shape {self.shape}; sizes of at least 1 are needed")
        if self.dtype not in STATE_DTYPES:
            raise InvalidArgument(f"StateTensor: dtype {self.dtype!r}; one of {', '.join(STATE_DTYPES)} is needed")
        object.__setattr__(self, "initial", _initial_values(self.initial, self.shape, self.dtype))

    def initial_as_json(self) -> float | dict[str, Any]:
        """Return the initial values in JSON types: a number, or shape and digest."""
        return self.initial.as_json() if isinstance(self.initial, InitialValues) else float(self.initial)  # type: ignore[arg-type]


def _initial_values(given: float | Listed, shape: tuple[int, ...], dtype: str) -> float | InitialValues:
    """Return the value of ``StateTensor.initial``; ``InvalidArgument`` as in its class."""
    found = np.asarray(given if isinstance(given, float | int) else given.tolist())
    if found.dtype.kind not in "if":
        raise InvalidArgument(f"StateTensor: initial holds {found.dtype}; integers or floating numbers are needed")
    try:
        fits = np.broadcast_shapes(found.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise InvalidArgument(f"StateTensor: initial has shape {found.shape}, which does not broadcast to {shape}")
    if "int" in dtype:
        limits = np.iinfo(dtype)
        wrong = (found != np.floor(found)) | (found < limits.min) | (found > limits.max)
    else:
        # Infinity is legal; overflow to it is not. bfloat16 has the range of float32.
        limit = float(np.finfo("float32" if dtype == "bfloat16" else dtype).max)
        wrong = np.isnan(found) | (np.isfinite(found) & (np.abs(found) > limit))
    if wrong.any():
        raise InvalidArgument(f"StateTensor: initial holds {found[wrong].flat[0]}, which is no value of {dtype}")
    if (found == found.flat[0]).all():
        number: float = found.flat[0].item()
        return number
    return InitialValues.of(found.astype(np.int64 if found.dtype.kind == "i" else np.float64))


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrent:
    """Tensors of fixed size that are updated by each token."""

    states: tuple[StateTensor, ...]
    kind: Literal["recurrent"] = field(default="recurrent", init=False)


LayerSpec: TypeAlias = FullAttention | WindowedAttention | LatentAttention | CrossAttention | Recurrent


def window_refusal(specs: Iterable[LayerSpec]) -> str:
    """Return the reason why no sequence of these layers can have a window; "" if it can."""
    kinds = {spec.kind for spec in specs}
    if not kinds:
        return "there is no attention layer that a window could concern"
    if kinds <= {"cross", "recurrent"}:
        return f"there are {' and '.join(sorted(kinds))} layers only, which no window concerns"
    return ""


def sink_refusal(specs: Iterable[LayerSpec]) -> str:
    """Return the reason why no sequence of these layers can have a window with a sink; "" if it
    can."""
    unknown = [
        layer
        for layer, spec in enumerate(specs)
        if isinstance(spec, KeyValueAttention) and spec.caller_rotates and spec.rope is None
    ]
    if not unknown:
        return ""
    return (
        f"{len(unknown)} layers (the first is {unknown[0]}) put positions into q and k by a rule of their own, so that the query "
        "cannot be moved next to the sink; give sink=0, which runs exactly up to the model's context"
    )
