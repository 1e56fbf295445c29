"""Typed access to ``config.json``, and refusal of features that are not computed.

Every field that decides the computation is read, or refused by name. ``NEUTRAL`` lists fields of
other models and of missing options with the values that change nothing; other values raise
``Unsupported``. ``HARMLESS`` lists fields known not to change the logits. Fields in neither list
are skipped with a line in the debug log: configurations hold too many private fields to refuse them
all. A field that adds weights is found by its tensors, which have no place in the name table.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, TypeVar

from quire.base.errors import CheckpointError, Unsupported
from quire.base.json_files import read_json

logger = logging.getLogger(__name__)

C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # Activation, norms, biases.
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "lm_head_bias": (False,),
    "use_bias": (False,),
    "use_qkv_bias": (False,),
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
    "use_bidirectional_attention": (False,),
    "attention_chunk_size": (),
    "use_sliding_window": (False,),
    "sliding_window_pattern": (),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
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
"""Fields of unsupported computations, with their neutral values; null is always neutral."""

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
"""Fields that do not change a decoder's logits. ``pretraining_tp`` only slices the products."""


class ConfigFields:
    """The typed fields of one ``config.json``, with a record of those that were read.

    Readers raise ``CheckpointError`` with the file, the field, its value and the expected one. The
    default replaces a missing or null field. A field without default is required.
    """

    def __init__(
        self, values: Mapping[str, Any], source: str = "config.json", shown: Callable[[Any], str] = repr
    ) -> None:
        """``shown`` writes a value in an error."""
        self.values = values
        self.source = source
        self._shown = shown
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """Return the raw value; None if it is missing."""
        self._read.add(name)
        return self.values.get(name)

    def present(self, name: str) -> bool:
        return name in self.values

    def error(self, name: str, expected: str) -> CheckpointError:
        found = self._shown(self.values[name]) if name in self.values else "missing"
        return CheckpointError(f"{self.source}: {name} is {found}; expected {expected}")

    def count(self, name: str, default: int | None = None, *, most: int | None = None) -> int:
        """Read an integer of 1 or more."""
        return self._integer(name, default, 1, most)

    def whole(self, name: str, default: int | None = None, *, most: int | None = None) -> int:
        """Read an integer of 0 or more."""
        return self._integer(name, default, 0, most)

    def _integer(self, name: str, default: int | None, least: int, most: int | None) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value < least or (most is not None and value > most):
            allowed = f"an integer of {least} or more" if most is None else f"an integer from {least} to {most}"
            raise self.error(name, allowed)
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        """Read a finite number above 0."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not _is_finite_above_0(value):
            raise self.error(name, "a finite number above 0")
        return float(value)

    def numbers(self, name: str, count: int, default: Sequence[float] | None = None) -> tuple[float, ...]:
        """Read a list of ``count`` finite numbers above 0."""
        value = self.get(name)
        if value is None and default is not None:
            return tuple(default)
        if not isinstance(value, list) or len(value) != count or not all(map(_is_finite_above_0, value)):
            raise self.error(name, f"a list of {count} finite numbers above 0")
        return tuple(map(float, value))

    def optional_number(self, name: str, default: float | None) -> float | None:
        """Read a finite number above 0; null gives None, a missing field ``default``."""
        if not self.present(name):
            return default
        return None if self.get(name) is None else self.number(name)

    def expect(self, name: str, *accepted: object) -> None:
        """Raise ``Unsupported`` unless the field is missing, null or one of ``accepted``."""
        value = self.get(name)
        # In Python True equals 1; in a configuration they differ.
        if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted):
            return
        expected = " or ".join(json.dumps(one) for one in (*accepted, None))
        raise Unsupported(f"{self.source}: {name} is {_short(value)}, which is not supported; expected {expected}")

    def expect_model_type(self, model_type: str, architecture: str) -> None:
        """Raise ``CheckpointError`` for the ``model_type`` of another architecture."""
        if self.get("model_type") not in (None, model_type):
            raise self.error("model_type", f"{model_type!r}, which goes with {architecture}")

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Read a JSON object; empty if it is missing."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return value

    def unread(self) -> Iterator[str]:
        return (name for name in sorted(self.values) if name not in self._read)


class ConfigReader(Protocol[C_co]):
    """A function from ``config.json`` to a family's configuration."""

    def __call__(self, values: Mapping[str, Any], max_model_len: int | None = None) -> C_co:
        """Read ``values``; a RoPE may depend on ``max_model_len`` (None: all positions)."""
        ...


def config_reader(read: Callable[[ConfigFields, int | None], C]) -> ConfigReader[C]:
    """Make a reader of a parsed config.json from a reader of fields. It refuses unsupported fields
    that were not read."""

    @wraps(read)
    def reader(values: Mapping[str, Any], max_model_len: int | None = None) -> C:
        fields = ConfigFields(values)
        config = read(fields, max_model_len)
        refuse_unsupported(fields)
        return config

    return reader


def read_config_file(path: Path) -> dict[str, Any]:
    """Read ``config.json`` in ``path``; raise ``CheckpointError`` if it is no JSON object."""
    file = path / "config.json"
    if not file.exists():
        raise CheckpointError(f"{path} is no model checkpoint: it has neither config.json nor a GGUF file")
    return read_json(file)


def refuse_unsupported(fields: ConfigFields) -> None:
    """Raise ``Unsupported`` for the first field with a computation that the family lacks.

    Call it after all other fields were read. An unread field of ``NEUTRAL`` must have a neutral
    value; other unread fields are skipped.
    """
    unread = frozenset(fields.unread())
    for name, neutral in NEUTRAL.items():
        if name in unread:
            fields.expect(name, *neutral)
    unknown = [name for name in fields.unread() if name not in HARMLESS]
    if unknown:
        logger.debug("%s: fields passed over: %s", fields.source, ", ".join(unknown))


def _is_finite_above_0(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value <= sys.float_info.max


def _short(value: object, limit: int = 100) -> str:
    text = json.dumps(value)
    return text if len(text) <= limit else text[:limit] + "..."
