"""The parts that all decoders' configurations share: sizes, heads, windows, activations.

A family's reader calls these, adds its own fields, and is a ``config_reader``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.base.errors import CheckpointError, Unsupported
from quire.contracts.layers import FullAttention, RopeSpec, WindowedAttention
from quire.contracts.rows import ActivationName
from quire.models.config_fields import ConfigFields
from quire.models.decoder import AttentionSpec
from quire.models.rope_config import read_rope, stretched_length

MAX_LAYERS = 10_000
"""A bound above any model's, so that a damaged config.json does not cost memory."""

ACTIVATION_NAMES: Mapping[str, ActivationName] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Accepted values of ``hidden_act``, with our names for them."""

WINDOW_KINDS: Mapping[str, bool] = {"full_attention": False, "sliding_attention": True}
"""Accepted entries of ``layer_types``; True for a layer with a window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderGeometry:
    """Sizes that decide the shapes of weights, in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    max_model_len: int | None

    def common(self) -> dict[str, Any]:
        """Return the fields of the same name in ``DecoderConfig``."""
        names = ("architecture", "vocab_size", "hidden_size", "intermediate_size", "max_position", "max_model_len")
        return {name: getattr(self, name) for name in names}

    def usual(
        self,
        fields: ConfigFields,
        eps: float = 1e-6,
        *,
        eps_field: str = "rms_norm_eps",
        tied: bool = False,
        qkv_bias: bool | None = None,
    ) -> dict[str, Any]:
        """Return ``common`` and the fields that most families share: the norms' epsilon, the
        activation, ``tie_word_embeddings``, and biases of q, k, v and o by ``attention_bias``.
        ``eps`` and ``tied`` are defaults. With a given ``qkv_bias`` o has no bias, and
        ``attention_bias`` is not read."""
        bias = fields.flag("attention_bias", False) if qkv_bias is None else False
        return {
            **self.common(),
            "norm_eps": fields.number(eps_field, eps),
            "activation": read_activation(fields),
            "tie_embeddings": fields.flag("tie_word_embeddings", tied),
            "qkv_bias": qkv_bias or bias,
            "out_bias": bias,
        }

    def all_but_every(self, period: int) -> tuple[bool, ...]:
        """Return, for each layer, False for the last of every ``period`` layers, else True."""
        return tuple((layer + 1) % period != 0 for layer in range(self.num_layers))

    def every_other(self) -> tuple[bool, ...]:
        """Return, for each layer, True if its number is even."""
        return tuple(layer % 2 == 0 for layer in range(self.num_layers))

    def layers(
        self,
        ropes: RopeSpec | Sequence[RopeSpec | None],
        windows: Sequence[int | None] | int | None = None,
        *,
        sm_scale: float | None = None,
        softcap: float | None = None,
    ) -> tuple[AttentionSpec, ...]:
        """Return a spec per layer from a rope and a window for all, or one for each (None: none).

        A window that no position can leave is left out.
        """
        if isinstance(ropes, RopeSpec):
            ropes = (ropes,) * self.num_layers
        if windows is None or isinstance(windows, int):
            windows = (windows,) * self.num_layers
        last = max([self.max_position, self.max_model_len or 0, *map(stretched_length, ropes)])
        return tuple(
            self._layer(rope, window if window is None or window < last else None, sm_scale, softcap)
            for rope, window in zip(ropes, windows, strict=True)
        )

    def _layer(
        self, rope: RopeSpec | None, window: int | None, sm_scale: float | None, softcap: float | None
    ) -> AttentionSpec:
        shape: dict[str, Any] = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "value_dim": self.head_dim,
            "rope": rope,
            "rope_mode": "none" if rope is None else "normal",
            "sm_scale": sm_scale,
            "softcap": softcap,
        }
        return FullAttention(**shape) if window is None else WindowedAttention(**shape, window=window)


def read_geometry(
    fields: ConfigFields,
    architecture: str,
    model_type: str,
    max_model_len: int | None,
    *,
    kv_heads_required: bool = False,
    head_dim: int | None = None,
    exact_head_dim: int | None = None,
) -> DecoderGeometry:
    """Read the sizes. transformers has its own default of ``num_key_value_heads``, so a family may
    require that field. ``head_dim``: default of its field (None: the width divided by the heads).
    ``exact_head_dim``: the value implied by other fields, which the field must equal."""
    fields.expect_model_type(model_type, architecture)
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if kv_heads_required and not fields.present("num_key_value_heads"):
        raise fields.error("num_key_value_heads", "the number of KV heads, or null for one per query head")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    if exact_head_dim is not None:
        size = exact_head_dim
        if fields.get("head_dim") not in (None, size):
            raise fields.error("head_dim", f"{size}, as other fields make it")
    elif not fields.present("head_dim") and head_dim is not None:
        size = head_dim
    elif fields.get("head_dim") is None and hidden_size % num_heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads ({num_heads}), or head_dim")
    else:
        size = fields.count("head_dim", hidden_size // num_heads)
    if size % 2:
        raise CheckpointError(f"{fields.source}: head_dim is {size}; expected an even number, as RoPE turns pairs")
    return DecoderGeometry(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=size,
        max_position=fields.count("max_position_embeddings"),
        max_model_len=max_model_len,
    )


def read_activation(fields: ConfigFields, name: str = "hidden_act", default: str = "silu") -> ActivationName:
    """Read the gate's activation; raise ``Unsupported`` with the field for an unknown one."""
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, str) or value not in ACTIVATION_NAMES:
        raise Unsupported(
            f"{fields.source}: {name} is {value!r}, which is not supported; expected one of {list(ACTIVATION_NAMES)}"
        )
    return ACTIVATION_NAMES[value]


def read_layer_types(
    fields: ConfigFields, num_layers: int, known: Mapping[str, bool] = WINDOW_KINDS
) -> tuple[bool, ...] | None:
    """Return, for each layer, the value in ``known`` of its kind in ``layer_types`` (by default
    True for a window); None without that field. Raise ``Unsupported`` for an unknown kind."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error("layer_types", f"a list of {num_layers} strings")
    for layer, kind in enumerate(kinds):
        if not isinstance(kind, str) or kind not in known:
            raise Unsupported(f"{fields.source}: layer_types[{layer}] is {kind!r}; expected one of {list(known)}")
    return tuple(known[kind] for kind in kinds)


def expect_layer_types(fields: ConfigFields, windowed: Sequence[bool]) -> None:
    """Raise ``Unsupported`` if ``layer_types`` is present and differs from the family's layers."""
    found = read_layer_types(fields, len(windowed))
    for layer, (one, expected) in enumerate(zip(found or windowed, windowed, strict=True)):
        if one != expected:
            names = {windowed: name for name, windowed in WINDOW_KINDS.items()}
            raise Unsupported(
                f"{fields.source}: layer_types[{layer}] is {names[one]!r}, which this architecture does not have "
                f"there; expected {names[expected]!r}"
            )


def read_window(fields: ConfigFields, default: int | None) -> int | None:
    """Read ``sliding_window`` in tokens: None for null, ``default`` for a missing field."""
    if not fields.present("sliding_window"):
        return default
    return None if fields.get("sliding_window") is None else fields.count("sliding_window")


def windows_of(fields: ConfigFields, windowed: Sequence[bool], window: int | None) -> tuple[int | None, ...]:
    """Return each layer's window; raise ``CheckpointError`` if a windowed layer has none."""
    if window is None and any(windowed):
        layer = list(windowed).index(True)
        raise CheckpointError(
            f"{fields.source}: layer {layer} is a sliding_attention layer, but sliding_window is null or off; "
            "expected a window"
        )
    return tuple(window if one else None for one in windowed)


def ropes_of(fields: ConfigFields, geometry: DecoderGeometry, windowed: Sequence[bool]) -> list[RopeSpec]:
    """Read each layer's RoPE. With a window it has another base than without, where that is
    1,000,000 by default (Gemma 3, LFM3)."""
    full = read_rope(fields, geometry, layer_type="full_attention", theta_default=1_000_000.0)
    sliding = read_rope(fields, geometry, layer_type="sliding_attention")
    return [sliding if one else full for one in windowed]
