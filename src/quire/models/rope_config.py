"""RoPE in ``config.json``: two spellings and seven scalings become one numeric ``RopeSpec``.

transformers 5 writes one object ``rope_parameters``, or in it one object per type of layer. Older
files have ``rope_theta``, ``rope_scaling``, ``rope_local_base_freq``. Both are read, and must
agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, get_args

from quire.base.errors import CheckpointError, InvalidArgument, Unsupported
from quire.contracts.layers import RopeScaling, RopeSpec
from quire.models.config_fields import ConfigFields

DEFAULT_ROPE_THETA = 10_000.0
"""The base of RoFormer, and of Llama 1 and 2, whose configurations omit it."""

ROPE_SCALINGS: tuple[str, ...] = get_args(RopeScaling)
"""The rules for frequencies that ``quire.ops.rope`` computes."""

OTHER_NAMES: Mapping[str, str] = {"su": "longrope"}
"""Names of scalings in older configurations (the first of Phi-3)."""

BORDER = "original_max_position_embeddings"
"""The field with the longest sequence of longrope's short factors."""

SCALED_LAYERS = "full_attention"
"""The type of layer that ``rope_scaling`` applies to in models with several types (Gemma 3, OLMo
3)."""

THETA_FIELDS: Mapping[str, str] = {"sliding_attention": "rope_local_base_freq"}
"""By type of layer, the field of a base other than ``rope_theta`` (older files of Gemma 3)."""


class RopeSizes(Protocol):
    """The sizes of a model that a RoPE depends on; ``geometry.DecoderGeometry`` has them."""

    @property
    def head_dim(self) -> int:
        """Columns of the heads that RoPE is given (MLA: the rotated part)."""

    @property
    def max_position(self) -> int:
        """The model's ``max_position_embeddings``."""

    @property
    def max_model_len(self) -> int | None:
        """The longest sequence in tokens that will run; None: ``max_position``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Context:
    """Values that a scaling may need besides its parameters; lengths in tokens."""

    head_dim: int
    max_position: int
    length: int
    theta_default: float
    partial_default: float | None
    interleaved: bool
    magnitudes: bool


def read_rope(
    fields: ConfigFields,
    sizes: RopeSizes,
    *,
    layer_type: str | None = None,
    theta_default: float = DEFAULT_ROPE_THETA,
    partial_default: float | None = None,
    interleaved: bool = False,
    magnitudes: bool = False,
) -> RopeSpec:
    """Read the RoPE of a model, or of its layers of one type.

    ``max_model_len`` fixes length-dependent parts once, for every token, as in vLLM; transformers
    changes the frequencies under stored keys as a sequence grows (``length_rule``). ``longrope``
    takes its long factors if it exceeds ``original_max_position_embeddings``, else the short ones.
    ``dynamic`` takes the base for so many tokens, and ``rope_theta`` up to ``max_position``. Other
    scalings ignore the length.

    ``layer_type``: for models with different types of layers. ``rope_parameters`` must then be an
    object by type, else ``CheckpointError``. In the older spelling the base has its own field
    (``THETA_FIELDS``), and ``rope_scaling`` is for full attention only.

    ``theta_default``, ``partial_default``: the family's ``rope_theta`` and
    ``partial_rotary_factor`` if missing. With ``partial_default`` None whole heads rotate, and
    fractions other than 1 are refused. ``proportional`` is an exception: its fraction counts pairs,
    and RoPE has all columns.

    ``magnitudes``: whether ``longrope`` has its attention factors in ``short_mscale`` and
    ``long_mscale`` (PhiMoE).

    Raise ``Unsupported`` with the name of a scaling or parameter that is not computed, and
    ``CheckpointError`` if a parameter is missing or out of range, or if two spellings disagree: the
    one used in training is unknown.
    """
    max_position, max_model_len = sizes.max_position, sizes.max_model_len
    if max_model_len is not None and max_model_len < 1:
        raise InvalidArgument(f"max_model_len {max_model_len}; at least 1 is needed")
    new, new_name = fields.mapping("rope_parameters"), "rope_parameters"
    old, old_name = fields.mapping("rope_scaling"), "rope_scaling"
    if layer_type is not None:
        new, new_name = _of_layer_type(fields, new, layer_type), f"rope_parameters.{layer_type}"
        old = old if layer_type == SCALED_LAYERS else {}
    beside = {
        "rope_theta": THETA_FIELDS.get(layer_type or "", "rope_theta"),
        "partial_rotary_factor": "partial_rotary_factor",
        "original_max_position_embeddings": "original_max_position_embeddings",
    }
    context = _Context(
        head_dim=sizes.head_dim,
        max_position=max_position,
        length=max_position if max_model_len is None else max_model_len,
        theta_default=theta_default,
        partial_default=partial_default,
        interleaved=interleaved,
        magnitudes=magnitudes,
    )
    specs = [
        _rope_spec(ConfigFields(_join(fields, name, given, beside), f"{fields.source}, {name}"), context)
        for name, given in ((new_name, new), (old_name, old))
        if given
    ]
    if not specs:
        return _rope_spec(ConfigFields(_join(fields, new_name, {}, beside), fields.source), context)
    if specs[0] != specs[-1]:
        raise CheckpointError(
            f"{fields.source}: {new_name} ({dict(new)}) and {old_name} ({dict(old)}) disagree; keep one"
        )
    return specs[0]


def _of_layer_type(fields: ConfigFields, given: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
    """Return the parameters of one type of layer; empty if they are missing or null."""
    flat = [name for name, value in given.items() if not (value is None or isinstance(value, dict))]
    if flat:
        raise CheckpointError(
            f"{fields.source}: rope_parameters has {flat}; expected an object for each type of layer, as {layer_type!r}"
        )
    kinds = fields.get("layer_types")
    known = {layer_type, SCALED_LAYERS, *THETA_FIELDS, *(map(str, kinds) if isinstance(kinds, list) else ())}
    strange = [name for name in given if name not in known]
    if strange:
        raise Unsupported(f"{fields.source}: rope_parameters has {strange}; expected types of layers: {sorted(known)}")
    return given.get(layer_type) or {}


def _join(fields: ConfigFields, name: str, given: Mapping[str, Any], beside: Mapping[str, str]) -> dict[str, Any]:
    """Join ``given`` with parameters in other fields of older files, named by ``beside``."""
    joined = dict(given)
    for key, outer in beside.items():
        value = fields.get(outer)
        if value is None:
            continue
        if joined.get(key) is not None and joined[key] != value:
            raise CheckpointError(
                f"{fields.source}: {outer} is {value!r}, but {name} says {joined[key]!r}; expected the same"
            )
        joined[key] = value
    return joined


def _rope_spec(rope: ConfigFields, context: _Context) -> RopeSpec:
    given = [str(kind) for kind in (rope.get("rope_type"), rope.get("type")) if kind is not None]
    kinds = [OTHER_NAMES.get(kind, kind) for kind in given] or ["default"]
    if kinds[0] != kinds[-1]:
        raise Unsupported(f"{rope.source}: rope_type is {given[0]!r} and type is {given[1]!r}; expected the same")
    kind = kinds[0]
    if kind not in _READERS:
        expected = ", ".join(ROPE_SCALINGS)
        raise Unsupported(f"{rope.source}: RoPE scaling {kind!r} is not supported; expected one of {expected}")
    theta = rope.number("rope_theta", context.theta_default)
    plain = RopeSpec(theta=theta, rotary_dim=_rotary_dim(rope, context, kind), interleaved=context.interleaved)
    spec = _READERS[kind](rope, plain, context)
    # Parameters that no reader requests belong to an unknown rule.
    surplus = [name for name in rope.unread() if rope.values[name] is not None]
    if surplus:
        raise Unsupported(f"{rope.source}: {surplus} with RoPE scaling {kind!r}; expected none of them")
    return spec


def _rotary_dim(rope: ConfigFields, context: _Context, kind: str) -> int:
    """Return the number of rotated columns: a fraction of the head, rounded down as in
    transformers."""
    fraction = rope.number("partial_rotary_factor", context.partial_default or 1.0)
    if fraction > 1:
        raise rope.error("partial_rotary_factor", "at most 1")
    if kind == "proportional":
        fraction = 1.0
    elif context.partial_default is None and fraction != 1:
        raise Unsupported(f"{rope.source}: partial_rotary_factor {fraction!r}; expected 1.0")
    columns = int(context.head_dim * fraction)
    if columns < 2 or columns % 2:
        raise CheckpointError(
            f"{rope.source}: partial_rotary_factor {fraction!r} of heads of {context.head_dim} columns makes {columns}; "
            "expected an even number of 2 or more, as RoPE turns pairs"
        )
    return columns


def _read_default(rope: ConfigFields, plain: RopeSpec, context: _Context) -> RopeSpec:
    rope.get("original_max_position_embeddings")  # Describes the training (4,096 for Phi-3) and has no effect.
    return plain


def _read_linear(rope: ConfigFields, plain: RopeSpec, context: _Context) -> RopeSpec:
    rope.get("original_max_position_embeddings")
    return replace(plain, scaling="linear", factor=rope.number("factor"))


def _read_dynamic(rope: ConfigFields, plain: RopeSpec, context: _Context) -> RopeSpec:
    """Read the rule with the model's context as original length, the only one in transformers."""
    if rope.count("original_max_position_embeddings", context.max_position) != context.max_position:
        raise rope.error(
            "original_max_position_embeddings", f"max_position_embeddings ({context.max_position}), which dynamic takes"
        )
    if plain.rotary_dim == 2:
        raise CheckpointError(
            f"{rope.source}: dynamic RoPE of 2 columns; expected 4 or more, as the base does not act on the first pair"
        )
    return replace(
        plain,
        scaling="dynamic",
        factor=rope.number("factor"),
        original_max_position=context.max_position,
        length=max(context.length, context.max_position),
    )


def _read_yarn(rope: ConfigFields, plain: RopeSpec, context: _Context) -> RopeSpec:
    rope.get("finetuned")  # Only the authors' rule for lengths that grow reads it.
    if plain.theta <= 1:
        raise rope.error("rope_theta", "more than 1 for yarn")
    stretched = rope.get("original_max_position_embeddings") is not None
    original = rope.count("original_max_position_embeddings", context.max_position)
    factor = rope.number("factor", context.max_position / original if stretched else None)
    beta_fast, beta_slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise rope.error("beta_fast", f"at least beta_slow ({beta_slow})")
    if rope.get("attention_factor") is not None:
        rope.expect("attn_factor")  # The one is the whole factor, the other a part of it.
    return replace(
        plain,
        scaling="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
    )


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's factor of queries and keys for a context ``factor`` times longer.

    DeepSeek's MLA multiplies the scale of the scores by its square, weighted by ``mscale_all_dim``.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_attention_factor(rope: ConfigFields, factor: float) -> float:
    """Return the factor of rotated columns: ``mscale``'s magnitude divided by ``mscale_all_dim``'s,
    which is in the scores.

    0 equals missing. With one missing, DeepSeek's code (defaults 1 and 0) and transformers (which
    ignores both) may differ; then the configuration is refused. Without both ``attn_factor``
    multiplies the magnitude, as in the authors' code and in vLLM; transformers ignores it, with a
    warning. DeepSeek-R1-0528-Qwen3-8B has the reciprocal of the magnitude there.
    """
    weights = []
    for name in ("mscale", "mscale_all_dim"):
        value = rope.get(name)
        neutral = value is None or (value == 0 and not isinstance(value, bool))
        weights.append(0.0 if neutral else rope.number(name))
    rotated, everywhere = weights
    if rotated and everywhere:
        return yarn_magnitude(factor, rotated) / yarn_magnitude(factor, everywhere)
    if everywhere or rotated not in (0.0, 1.0):
        given, missing = ("mscale_all_dim", "mscale") if everywhere else ("mscale", "mscale_all_dim")
        raise rope.error(missing, f"a number above 0 beside {given}")
    return yarn_magnitude(factor) * rope.number("attn_factor", 1.0)


def _read_longrope(rope: ConfigFields, plain: RopeSpec, context: _Context) -> RopeSpec:
    original = rope.count("original_max_position_embeddings")
    if original < 2:
        raise rope.error("original_max_position_embeddings", "an integer of 2 or more")
    factor = rope.number("factor", context.max_position / original)
    grown = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    kinds = ("short", "long")
    factors = [rope.numbers(f"{kind}_factor", plain.rotary_dim // 2) for kind in kinds]
    if context.magnitudes:
        weights = [rope.number(f"{kind}_mscale") for kind in kinds]
    else:
        weights = [rope.number("attention_factor", grown)] * 2
    is_long = context.length > original
    return replace(plain, scaling="longrope", factors=factors[is_long], attention_factor=weights[is_long])


def _read_llama3(rope: ConfigFields, plain: RopeSpec, context: _Context) -> RopeSpec:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"more than low_freq_factor ({low})")
    return replace(
        plain,
        scaling="llama3",
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=rope.count("original_max_position_embeddings", context.max_position),
    )


def _read_proportional(rope: ConfigFields, plain: RopeSpec, context: _Context) -> RopeSpec:
    rope.get("original_max_position_embeddings")
    fraction = rope.number("partial_rotary_factor", context.partial_default or 1.0)
    pairs = int(fraction * context.head_dim // 2)
    return replace(plain, scaling="proportional", factor=rope.number("factor", 1.0), turning_dim=2 * pairs)


_READERS: Mapping[str, Callable[[ConfigFields, RopeSpec, _Context], RopeSpec]] = {
    "default": _read_default,
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
    "llama3": _read_llama3,
    "proportional": _read_proportional,
}


def stretched_length(rope: RopeSpec | None) -> int:
    """Return the length in tokens to which a RoPE stretches the context; 0 if it says none.

    The models' cards of Qwen2.5 and Qwen3 let users add ``yarn`` to config.json, and leave
    ``max_position_embeddings`` at the length of the training.
    """
    match rope:
        case RopeSpec(scaling="dynamic"):
            return rope.length
        case RopeSpec(scaling="yarn"):
            return round(rope.factor * rope.original_max_position)
    return 0


@dataclass(frozen=True, slots=True)
class LengthRule:
    """The lengths that share the frequencies of a length-dependent RoPE."""

    made_for: str
    """The values of ``max_model_len`` with the same frequencies, in words."""
    inexact: str = ""
    """The sequences with other logits than in transformers, which chooses the frequencies by the
    length of each call, in words; "" if there are none."""


def length_rule(values: Mapping[str, Any], ropes: Collection[RopeSpec], length: int) -> LengthRule | None:
    """Return the rule of a model for sequences of up to ``length`` tokens; None if its frequencies
    do not depend on that. ``values``: config.json; ``ropes``: of its layers."""
    for rope in ropes:
        border = rope.original_max_position if rope.scaling == "dynamic" else 0
        if rope.scaling == "longrope":
            text = values.get("text_config") or values
            places = [text, *(text.get(name) or {} for name in ("rope_parameters", "rope_scaling"))]
            border = next(one[BORDER] for one in places if isinstance(one.get(BORDER), int))
        if border and length <= border:
            return LengthRule(f"max_model_len up to {border}")
        if border and rope.scaling == "longrope":
            return LengthRule(
                f"max_model_len above {border}",
                f"RoPE takes the long factors of longrope, as max_model_len {length} is above {border}: sequences of up to {border} "
                "tokens, for which transformers takes the short factors, have other logits than there; with max_model_len "
                f"{border} or less they have the same",
            )
        if border:
            return LengthRule(
                f"max_model_len {length}",
                f"RoPE is stretched for max_model_len {length} (dynamic): shorter sequences, for which transformers stretches "
                f"by their own length, have other logits than there; with max_model_len {border} or less they have the same",
            )
    return None


def without_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the sections of the head that rotate by time, height and width: text has one
    position."""
    found = dict(values)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := found.get(name), dict):
            kept = {key: one for key, one in rope.items() if not key.startswith("mrope_")}
            found[name] = {key: "default" if one == "mrope" else one for key, one in kept.items()}
    return found
