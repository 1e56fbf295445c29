"""From ``config.json`` to the geometry of a decoder.

Every field that decides what is computed is read, or is refused by name when it has a value that this runtime does
not compute. ``NEUTRAL`` lists the fields of other models (and of options that are not there) with the values at which
they change nothing; anything else in them raises ``Unsupported``. ``HARMLESS`` lists the fields that are known not to
change the logits. A field in neither list is passed over with a line in the debug log: configurations carry too many
private fields to refuse them all, and a field that adds weights shows up as tensors that no name table expects.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from quire.contracts.layers import RopeScaling, RopeSpec
from quire.errors import CheckpointError, Unsupported

logger = logging.getLogger(__name__)

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # Activation and norms.
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "norm_type": ("rms_norm", "rmsnorm"),
    "qk_layernorm": (False,),
    "use_qk_norm": (False,),
    "qk_norm": (False,),
    # Scales and caps (Gemma, Granite, Cohere, MiniCPM, Falcon-H1).
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "scale_emb": (1.0,),
    "scale_depth": (),
    "dim_model_base": (),
    "lm_head_multiplier": (1.0,),
    "clip_qkv": (),
    "attn_temperature_tuning": (False,),
    # Shapes of attention.
    "attention_chunk_size": (),
    "use_sliding_window": (False,),
    "no_rope_layers": (),
    "no_rope_layer_interval": (),
    "num_kv_shared_layers": (0,),
    "cross_layer_sharing": (False,),
    "kv_lora_rank": (),
    "q_lora_rank": (),
    "v_head_dim": (),
    "attention_sinks": (False,),
    "alibi": (False,),
    "position_embedding_type": ("rope", "rotary"),
    "use_mrope": (False,),
    "mrope_section": (),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1.0,),
    "rotary_pct": (1.0,),
    # Shapes of blocks.
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "moe_num_experts": (0,),
    "parallel_attn": (False,),
    "use_parallel_residual": (False,),
    "per_layer_config": (),
    "block_configs": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "vision_config": (),
    "audio_config": (),
    # How the weights are written.
    "quantization_config": (),
    "compression_config": (),
}
"""Fields that change the computation in a way that we lack, with the values at which they do not. ``null`` is one."""

HARMLESS: frozenset[str] = frozenset(
    {
        "architectures",
        "auto_map",
        "dtype",
        "model_type",
        "name_or_path",
        "torch_dtype",
        "transformers_version",
        "_name_or_path",
        "attention_dropout",
        "embd_pdrop",
        "hidden_dropout",
        "initializer_range",
        "mlp_dropout",
        "resid_pdrop",
        "pretraining_tp",
        "use_cache",
        "chunk_size_feed_forward",
        "gradient_checkpointing",
        "attn_implementation",
        "_attn_implementation",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "torchscript",
        "use_flash_attn",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "task_specific_params",
        "finetuning_task",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "repetition_penalty",
        "max_length",
        "min_length",
        "num_beams",
        "max_new_tokens",
        "tie_encoder_decoder",
        "tie_last_hidden_states",
        "is_decoder",
        "prefix",
        "pruned_heads",
    }
)
"""Known not to change the logits of a decoder. ``pretraining_tp`` only split the same products into slices."""

DEFAULT_ROPE_THETA = 10_000.0
"""The base of RoFormer, and of Llama 1 and 2, whose configurations did not write it down."""

ROPE_SCALINGS = get_args(RopeScaling)
"""The rules for frequencies that ``quire.ops.rope`` computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Geometry of a pre-norm decoder with rotary attention and a gated MLP. Sizes are counts of elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_embeddings: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    """RMSNorm of each query and key head before the rotation."""

    def canonical(self) -> str:
        """JSON of what decides the logits, keys sorted. The context length is a limit, so it is not in it."""
        fields = asdict(self)
        del fields["max_position"]
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))


class ConfigFields:
    """The fields of one ``config.json``, read by type; remembers what was read.

    Every reader raises ``CheckpointError`` that names the file, the field, its value and what is expected. A default
    is used when the field is missing or null; without one, the field is required.
    """

    def __init__(self, values: Mapping[str, Any], source: str = "config.json") -> None:
        self.values = values
        self.source = source
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """The raw value; None when missing."""
        self._read.add(name)
        return self.values.get(name)

    def present(self, name: str) -> bool:
        return name in self.values

    def error(self, name: str, expected: str) -> CheckpointError:
        found = repr(self.values[name]) if name in self.values else "missing"
        return CheckpointError(f"{self.source}: {name} is {found}; expected {expected}")

    def count(self, name: str, default: int | None = None) -> int:
        """An integer of 1 or more."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, "an integer of 1 or more")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
            raise self.error(name, "a finite number above 0")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A JSON object; empty when missing."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return value

    def unread(self) -> Iterator[str]:
        return (name for name in sorted(self.values) if name not in self._read)


def read_config_file(path: Path) -> dict[str, Any]:
    """``config.json`` of the checkpoint directory ``path``. ``CheckpointError`` when it is missing or no JSON object."""
    file = path / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no model checkpoint: it has no config.json") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds a JSON {type(values).__name__}; expected an object")
    return values


def read_rope(fields: ConfigFields, rotary_dim: int, max_position: int) -> RopeSpec:
    """RoPE in either spelling: ``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling``.

    ``Unsupported`` names a scaling or a parameter that we do not compute; two spellings that disagree are a
    ``CheckpointError``, as nobody can say which of them the weights were trained with.
    """
    new, old = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    outer = {name: fields.get(name) for name in ("rope_theta", "original_max_position_embeddings")}
    specs = [
        _rope_spec(
            ConfigFields(_join(fields, name, given, outer), f"{fields.source}, {name}"), rotary_dim, max_position
        )
        for name, given in (("rope_parameters", new), ("rope_scaling", old))
        if given
    ]
    if not specs:
        return _rope_spec(
            ConfigFields(_join(fields, "rope_parameters", {}, outer), fields.source), rotary_dim, max_position
        )
    if specs[0] != specs[-1]:
        raise CheckpointError(f"{fields.source}: rope_parameters ({new}) and rope_scaling ({old}) disagree; keep one")
    return specs[0]


def _join(fields: ConfigFields, name: str, given: Mapping[str, Any], outer: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with the fields that older configurations keep beside it."""
    joined = dict(given)
    for key, value in outer.items():
        if value is None:
            continue
        if joined.get(key) is not None and joined[key] != value:
            raise CheckpointError(
                f"{fields.source}: {key} is {value!r}, but {name} says {joined[key]!r}; expected the same"
            )
        joined[key] = value
    return joined


def _rope_spec(rope: ConfigFields, rotary_dim: int, max_position: int) -> RopeSpec:
    kinds = [str(kind) for kind in (rope.get("rope_type"), rope.get("type")) if kind is not None] or ["default"]
    if kinds[0] != kinds[-1]:
        raise Unsupported(f"{rope.source}: rope_type is {kinds[0]!r} and type is {kinds[1]!r}; expected the same")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise Unsupported(f"{rope.source}: partial_rotary_factor {rope.get('partial_rotary_factor')!r}; expected 1.0")
    theta = rope.number("rope_theta", DEFAULT_ROPE_THETA)
    original = rope.count("original_max_position_embeddings", max_position)
    if kinds[0] == "default":
        spec = RopeSpec(theta=theta, rotary_dim=rotary_dim)
    elif kinds[0] == "linear":
        spec = RopeSpec(theta=theta, rotary_dim=rotary_dim, scaling="linear", factor=rope.number("factor"))
    elif kinds[0] == "llama3":
        spec = RopeSpec(
            theta=theta,
            rotary_dim=rotary_dim,
            scaling="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position=original,
        )
        if spec.high_freq_factor <= spec.low_freq_factor:
            raise rope.error("high_freq_factor", f"more than low_freq_factor ({spec.low_freq_factor})")
    else:
        expected = ", ".join(ROPE_SCALINGS)
        raise Unsupported(f"{rope.source}: RoPE scaling {kinds[0]!r} is not supported; expected one of {expected}")
    # What no reader has asked for belongs to a rule that we do not know.
    surplus = [name for name in rope.unread() if rope.values[name] is not None]
    if surplus:
        raise Unsupported(f"{rope.source}: {surplus} with RoPE scaling {kinds[0]!r}; expected none of them")
    return spec


def refuse_layer_types(fields: ConfigFields, num_layers: int) -> None:
    """``Unsupported`` for anything but full attention in ``layer_types``."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error("layer_types", f"a list of {num_layers} strings")
    for layer, kind in enumerate(kinds):
        if kind != "full_attention":
            raise Unsupported(f"{fields.source}: layer_types[{layer}] is {kind!r}; expected 'full_attention'")


def refuse_window(fields: ConfigFields, max_position: int, *, default: int | None = None) -> None:
    """``Unsupported`` for a ``sliding_window`` that hides any position below ``max_position``.

    ``default`` is the family's window where the field is missing; null is none.
    """
    window = fields.count("sliding_window", 0) if fields.present("sliding_window") else default
    if window and window < max_position:
        raise Unsupported(
            f"{fields.source}: sliding_window is {window}, shorter than max_position_embeddings ({max_position}); "
            "sliding windows are not supported, expected null or a window at least as long as the context"
        )


def refuse_unsupported(fields: ConfigFields) -> None:
    """``Unsupported`` for the first field that asks for something this runtime does not compute.

    Call it after everything else was read: what nobody has read then is what is passed over.
    """
    for name, neutral in NEUTRAL.items():
        value = fields.get(name)
        # In Python true equals 1, in a configuration it is another kind of value.
        if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
            continue
        accepted = " or ".join(json.dumps(one) for one in (*neutral, None))
        raise Unsupported(f"{fields.source}: {name} is {_short(value)}, which is not supported; expected {accepted}")
    unknown = [name for name in fields.unread() if name not in HARMLESS]
    if unknown:
        logger.debug("%s: fields passed over: %s", fields.source, ", ".join(unknown))


def _short(value: object, limit: int = 100) -> str:
    text = json.dumps(value)
    return text if len(text) <= limit else text[:limit] + "..."
