"""Any other decoder of ``transformers``: its layers with our attention and KV state.

transformers accepts a named attention function. Ours passes the rotated q, k and v to the pass of
the call. Watching one forward finds each layer's spec (heads, scale, window, soft cap, learned
sinks). Comparing logits with the model's own shows that nothing else decides the result
(``models.probe``). So a model runs exactly, or loading refuses it with the reason. It is slower
than a native family: it has the model's Python code, one block, and no packed weights.

Letters: T new tokens, R rows for the head, E model width, V vocabulary, Hq, Hkv heads, D head size.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.base.errors import CheckpointError, QuireError, ResourceExhausted, Unsupported
from quire.contracts.block_calls import LayerKernels
from quire.contracts.layers import LayerSpec
from quire.contracts.model import Block, Pass
from quire.contracts.ranks import Stages
from quire.models.config_fields import ConfigFields
from quire.models.families import canonical_of
from quire.models.probe import ATTENTION, Probe, core_name, watch
from quire.weights.checkpoint import Checkpoint
from quire.weights.floats import DTYPES
from quire.weights.places import NameTable

logger = logging.getLogger(__name__)

LEGACY_BUFFER = ".masked_bias"
"""Suffix of the names of tensors with the value of masked scores, one per layer in older GPT-2
checkpoints."""


class FallbackModel:
    """A ``transformers`` decoder as ``contracts.model.Model``: one block loops over its layers."""

    fallback = True
    wide = None

    def __init__(self, causal: Any, specs: Sequence[LayerSpec], values: Mapping[str, Any], length: int) -> None:
        """Wrap ``causal``, which uses our attention function, for sequences of ``length`` tokens;
        ``values`` is the parsed config.json."""
        self.causal = causal
        self.core = getattr(causal, core_name(causal))
        self.architecture = type(causal).__name__
        self.config: dict[str, Any] = dict(values)
        self.canonical_config = canonical_of(self.config, None)
        self.whole_specs: Sequence[LayerSpec] = ()
        self.embedding = causal.get_input_embeddings()
        weight: Tensor = self.embedding.weight
        self.vocab_size = int(causal.get_output_embeddings().weight.shape[0])
        self.hidden_size = int(weight.shape[1])
        self.max_position = length
        self.quantization: str | None = None
        self.max_model_len: int | None = None
        self.layer_specs: Sequence[LayerSpec] = list(specs)
        self.blocks: Sequence[Block] = [self._run]
        self.stages: Stages | None = None
        self.stack = None
        self.dtype, self.device = weight.dtype, weight.device
        tensors = list(causal.parameters())
        self.num_parameters = sum(tensor.numel() for tensor in tensors)
        self.parameter_bytes = sum(tensor.nbytes for tensor in (*tensors, *causal.buffers()))
        self.tied = is_tied(causal)
        self.places: NameTable = {}
        self.formats: Mapping[str, int] = {}
        self.expanded: Mapping[str, int] = {}
        self._given = GivenHidden()

    def pack(self, kernels: LayerKernels) -> bool:
        """Return False: nothing is packed."""
        return False

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Map int64 ``[T]`` to ``[T, E]``."""
        x_TE: Tensor = self.embedding(tokens_T)
        return x_TE

    def _run(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        found = self.core(
            inputs_embeds=x_TE.unsqueeze(0),
            position_ids=pass_.positions_T.to(torch.int64).unsqueeze(0),
            use_cache=False,
            quire_pass=pass_,
        )
        out_TE: Tensor = found.last_hidden_state[0]
        return out_TE

    def head(self, x_RE: Tensor) -> Tensor:
        """Map ``[R, E]`` to float32 logits ``[R, V]``, with the model's own code for its head."""
        self._given.x_1RE = x_RE.unsqueeze(0)
        with replaced_core(self.causal, self._given):
            logits: Tensor = self.causal(inputs_embeds=self._given.x_1RE, use_cache=False).logits[0]
        self._given.x_1RE = None
        return logits.float()


class GivenHidden(torch.nn.Module):
    """A stand-in for a model's layers that returns given hidden states."""

    x_1RE: Tensor | None = None

    @property
    def decoder(self) -> GivenHidden:
        """Itself, for models that call a part of their base model."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the given states in the form of the base model's result; compute nothing."""
        del args, kwargs
        return HiddenOnly((self.x_1RE,))


class HiddenOnly(tuple[Any, ...]):
    """A base model's result with hidden states alone: a tuple of them. All other fields
    (``router_logits``, ``past_key_values``, ...) read as None."""

    @property
    def last_hidden_state(self) -> Any:
        return self[0]

    def __getattr__(self, name: str) -> None:
        """Return None for missing fields."""
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def replaced_core(causal: Any, core: torch.nn.Module) -> Iterator[None]:
    """Run the model's head with ``core`` in place of its layers."""
    name = core_name(causal)
    own = getattr(causal, name)
    setattr(causal, name, core)
    try:
        yield
    finally:
        setattr(causal, name, own)


@contextmanager
def without_reports() -> Iterator[None]:
    """Suppress transformers' progress bars and tables of tensors while it loads; restore the user's
    settings afterwards."""
    import huggingface_hub.utils
    import transformers.utils.logging

    # Neither module exports these with types.
    hub: Any = huggingface_hub.utils
    settings: Any = transformers.utils.logging
    was_on, hub_was_off = settings.is_progress_bar_enabled(), hub.are_progress_bars_disabled()
    verbosity = settings.get_verbosity()
    settings.set_verbosity_error()
    if was_on:
        settings.disable_progress_bar()
    try:
        yield
    finally:
        settings.set_verbosity(verbosity)
        if was_on:
            # This switches both on.
            settings.enable_progress_bar()
            if hub_was_off:
                hub.disable_progress_bars()


def context_length(config: Any) -> int:
    """Return the model's number of positions; raise ``Unsupported`` if no field gives it."""
    text = config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise Unsupported("config.json names no context length (max_position_embeddings); the fallback needs one")


@dataclass(frozen=True, slots=True)
class Foreign:
    """An architecture of ``transformers`` that config.json names and the fallback may run."""

    what: str
    """Its name, for errors."""
    config: Any
    """The configuration object of transformers."""
    kind: Any
    """The class of the model."""
    values: Mapping[str, Any]
    """The parsed config.json."""
    length: int
    """The longest sequence in tokens that can run."""

    def outline(self, checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
        """Return the model on PyTorch's meta device: shapes and types without memory. Raise
        ``CheckpointError`` if no model can be made from config.json, or if the files have weights
        of an unsupported type."""
        sizes = [getattr(self.config.get_text_config(decoder=True), "num_hidden_layers", 0), len(checkpoint.tensors)]
        if sizes[0] > sizes[1]:  # Also bounds the modules that a damaged config.json could ask for.
            raise CheckpointError(
                f"{checkpoint.path}: config.json says {sizes[0]} layers, but there are {sizes[1]} tensors"
            )
        with foreign_errors(f"{checkpoint.path}: transformers cannot build {self.what} from config.json"):
            import transformers

            kind: Any = transformers.AutoModelForCausalLM  # which has no types
            with torch.device("meta"):
                model = kind.from_config(self.config, dtype=dtype, attn_implementation="eager", trust_remote_code=False)
            state, prefix = model.state_dict(), f"{model.base_model_prefix}."
            unread = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
        for name, header in checkpoint.tensors.items():
            place = state.get(name, state.get(prefix + name))
            if place is None:
                refused = not any(pattern.search(name) for pattern in unread)
            else:
                refused = place.is_floating_point()
            if refused and header.dtype not in DTYPES:
                raise CheckpointError(f"{header.file}: {name} has dtype {header.dtype}; expected one of {list(DTYPES)}")
        return model

    def load(self, checkpoint: Checkpoint, outline: Any, dtype: torch.dtype, device: torch.device) -> FallbackModel:
        """Read the weights, and find the specs of the layers. Raise ``CheckpointError`` unless the
        files have exactly the tensors of the model, and ``Unsupported`` with the reason if the
        model computes something that our attention and state do not."""
        path = checkpoint.path
        with (
            foreign_errors(f"{path}: transformers cannot make the model's tensors of the stored ones"),
            without_reports(),
        ):
            # Reads only the files that the checkpoint has checked; transformers does not search for
            # others.
            causal, found = self.kind.from_pretrained(
                None,
                config=self.config,
                state_dict=checkpoint.source.slices(),
                dtype=dtype,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        surplus = sorted(name for name in found["unexpected_keys"] if not name.endswith(LEGACY_BUFFER))
        checkpoint.refuse_names(sorted(found["missing_keys"]), surplus, len(outline.state_dict()))
        for name, stored, made in sorted(found["mismatched_keys"]):
            raise checkpoint.misshapen(name, stored, made)
        if is_tied(outline) and not is_tied(causal):
            head = outline.get_output_embeddings().weight
            names = [name for name, one in outline.named_parameters(remove_duplicate=False) if one is head]
            raise checkpoint.untied(names[-1], names[0])
        causal.to(device)
        causal.eval().requires_grad_(False)
        probe: Probe = watch(causal, self.length, self.what)
        causal.set_attn_implementation(ATTENTION)
        model = FallbackModel(causal, probe.specs, self.values, self.length)
        probe.compare(model)
        logger.warning(
            "%s runs through transformers' layers (the fallback): exact, but slower than a native family", self.what
        )
        return model


def read_foreign(path: Path, values: Mapping[str, Any], max_model_len: int | None = None) -> Foreign:
    """Return the architecture that config.json names. Reads no weights.

    A checkpoint with code of its own has the architecture that ``transformers`` has for its
    ``model_type``. ``max_model_len``: see ``load_model``. Raise ``Unsupported`` with the reason if
    ``transformers`` is missing or does not know the architecture, or if our attention and state
    lack one of its computations.
    """
    names = values.get("architectures")
    what = repr(names[0]) if isinstance(names, list) and names else "the model"
    try:
        import transformers
    except ImportError as error:
        raise Unsupported(
            f"architecture {what} is not native, and its fallback needs transformers, which is not installed: pip install transformers"
        ) from error
    own = values.get("auto_map")
    own_model = isinstance(own, dict) and "AutoModelForCausalLM" in own
    if "auto_map" in values and not (own_model and str(values.get("model_type")) in transformers.CONFIG_MAPPING):
        raise Unsupported(
            f"architecture {what} brings its own code (auto_map), which is not run, and transformers {transformers.__version__} "
            f"has no causal language model for its model_type, {values.get('model_type')!r}"
        )
    fields = ConfigFields(values, str(path / "config.json"))
    for name in ("quantization_config", "compression_config", "transformers_weights"):
        fields.expect(name)
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        found = transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
    except (ValueError, KeyError, OSError) as error:
        raise Unsupported(
            f"architecture {what}: transformers {transformers.__version__} does not know it: {first_line(error)}"
        ) from error
    except Exception as error:  # A class of transformers raises anything for values of other types.
        raise CheckpointError(f"{path}: transformers cannot read config.json: {in_one_line(error)}") from error
    name = getattr(found, "__name__", "")
    if own_model and name:
        what = repr(name)
    context = context_length(config)
    refuse_other_kinds(config, what, name, max_model_len or context)
    refuse_attention(found, what)
    return Foreign(what, config, found, values, min(context, chunk_length(config) or context))


def is_tied(causal: Any) -> bool:
    """Return True if a model's head is its embedding."""
    head = causal.get_output_embeddings()
    return head is not None and head.weight is causal.get_input_embeddings().weight


@contextmanager
def foreign_errors(what: str) -> Iterator[None]:
    """Convert exceptions of transformers to ``CheckpointError``. Its classes raise any type for an
    unexpected configuration or file."""
    try:
        yield
    except QuireError:
        raise
    except torch.OutOfMemoryError as error:
        raise ResourceExhausted(f"{what}: {in_one_line(error)}") from error
    except Exception as error:
        raise CheckpointError(f"{what}: {in_one_line(error)}") from error


def chunk_length(config: Any) -> int | None:
    """Return the longest sequence for which attention in chunks is full attention, and queries do
    not grow; None for models without either. Llama 4's grow from position ``floor_scale - 1`` on,
    which transformers counts from the beginning of a call."""
    text = config.get_text_config(decoder=True)
    chunk = getattr(text, "attention_chunk_size", None)
    lengths = [chunk] if chunk and "chunked_attention" in (getattr(text, "layer_types", None) or []) else []
    if getattr(text, "attn_temperature_tuning", False):
        lengths.append(int(text.floor_scale) - 1)
    return min(lengths, default=None)


def refuse_other_kinds(config: Any, what: str, found: str, length: int | None = None) -> None:
    """Raise ``Unsupported`` unless the model is a decoder of attention layers for sequences of
    ``length`` tokens. None: there is a length for which it is."""
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported(f"architecture {what} is an encoder with a decoder; only decoders run")
    if repr(found) != what:
        instead = f"; config.json's model_type leads to {found}" if found else ""
        raise Unsupported(f"architecture {what} is no causal language model of transformers{instead}")
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or []
    rope = getattr(text, "rope_parameters", None) or {}
    for part in [rope, *(part for part in rope.values() if isinstance(part, dict))]:
        if part.get("rope_type") in ("dynamic", "longrope"):
            raise Unsupported(
                f"architecture {what} has RoPE scaling {part['rope_type']!r}, whose frequencies transformers changes with the length "
                "of each call; stored keys cannot follow"
            )
    chunk = chunk_length(config)
    if chunk is not None and length is not None and length > chunk:
        raise Unsupported(
            f"architecture {what} attends in chunks, or otherwise at late positions, and sequences may have {length} tokens; "
            f"give max_model_len {chunk} or less, where it is full attention"
        )
    usual = {"full_attention", "sliding_attention", "attention", "chunked_attention"}
    others = sorted({str(kind) for kind in kinds} - usual)
    if others:
        raise Unsupported(
            f"architecture {what} has layers of kind {', '.join(others)}; the fallback runs full and sliding attention"
        )


def refuse_attention(kind: Any, what: str) -> None:
    """Raise ``Unsupported`` if the attention of a class of transformers cannot be replaced."""
    if not getattr(kind, "_supports_attention_backend", False):
        raise Unsupported(
            f"architecture {what}: its attention cannot be replaced (transformers has no attention interface for it)"
        )


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def in_one_line(error: BaseException, limit: int = 200) -> str:
    """Return an error of foreign code in one line: its class, as many messages are bare values, and
    the beginning of the message."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= limit else text[:limit] + "..."
