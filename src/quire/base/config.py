"""Configuration: frozen values, checked when they are made, with a help text for each field.

The CLI derives its options from these dataclasses, and a YAML file maps onto them. Options that
this release lacks are refused here by name, before a model is touched. The builder checks the
values that depend on machine or model (presence of a device, lengths). This module does not import
torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from quire.base.errors import InvalidArgument, Unsupported
from quire.base.registry import modules_in
from quire.base.signatures import require_bool
from quire.base.speculation import METHODS, Speculation, read_speculation

DTYPES = ("auto", "float32", "bfloat16", "float16")
_FORMATS = modules_in("quire.kv.formats")
KV_FORMATS = dict.fromkeys(DTYPES[1:], _FORMATS.pop("plain")) | _FORMATS
"""Formats of K and V by name, which ``kv_dtype`` takes: the module of each. The name is a dtype, or
the format's own."""
ATTENTION_CLASSES = {
    "torch": "quire.kernels.attention.sdpa:SdpaAttention",
    "native": "quire.kernels.attention.cpu_attention:NativeAttention",
    "triton": "quire.kernels.attention.triton_attention:TritonAttention",
    "reference": "quire.ops.attention:ReferenceAttention",
}
"""Attention backends by name: the module and the class of each."""
ATTENTION_BACKENDS = ("auto", *ATTENTION_CLASSES)
QUANTIZATIONS = ("int8", "int4", "fp8")
CHAT_TEMPLATES = ("chatml", "plain")
"""Chat templates in the package."""
GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""Fields of generation_config.json that are defaults of requests."""
ATTENTION_TYPES = ("MultiHead", "MultiQuery", "GroupedQuery", "Flash", "Paged", "SlidingWindow")

CUSTOM_FLAGS: tuple[str, ...] = ()
"""Accepted names in ``OptimizationConfig.custom_flags``; none in this release."""
EXECUTOR_OPTIONS = (
    "prefill_chunk_size",
    "modalities",
    "sliding_window_sink",
    "kv_dtype",
    "speculative",
    "tensor_parallel_size",
    "pipeline_parallel_size",
)
"""Accepted names in ``ExecutorConfig.executor_options``: tokens of a prompt per forward (an
integer; <= 0: all), a list of encoders ("vision", "audio"), number of first tokens that a window
keeps, the format of K and V, who drafts for an executor of type Speculative, and how many processes
divide the model of one of type TensorParallel or PipelineParallel (by default 2); the last four as
in ``EngineConfig``."""
EXECUTOR_TYPES = ("Sequential", "Batch", "ContinuousBatch", "Speculative", "PipelineParallel", "TensorParallel")
MODALITIES = ("vision", "audio")

_UNITS = {"B": 1} | {
    name: base**power
    for base, names in ((1000, ("KB", "MB", "GB", "TB")), (1024, ("KiB", "MiB", "GiB", "TiB")))
    for power, name in enumerate(names, start=1)
}
_UNITS_FOLDED = {name.lower(): factor for name, factor in _UNITS.items()}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]+)?")


def parse_bytes(value: int | str, *, name: str = "size") -> int:
    """Parse bytes: an integer >= 0 or text like ``"4GiB"``, ``"1.5 GB"``, ``"4096"``; round down.

    KiB to TiB are powers of 1024 and KB to TB of 1000, in any case; "4G" is ambiguous and refused.
    Raise ``InvalidArgument``, which calls the value ``name``.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    factor = _UNITS_FOLDED.get(match[2].lower() or "b") if match else None
    if match is None or factor is None:
        allowed = f"a number of bytes >= 0, or a string such as '4GiB' (units: {', '.join(_UNITS)})"
        raise InvalidArgument(field=name, given=value, allowed=allowed)
    return int(Decimal(match[1]) * factor)


def named_paths(value: object) -> dict[str, str]:
    """Parse a mapping of names to paths, or "NAME=WHERE" texts; else raise ``InvalidArgument``."""
    allowed = "a mapping of names to directories, or a list of 'NAME=WHERE'"
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, (list, tuple)) and all(isinstance(one, str) and "=" in one for one in value):
        pairs = [tuple(one.split("=", 1)) for one in value]
    else:
        raise InvalidArgument(field="adapters", given=value, allowed=allowed)
    found: dict[str, str] = {}
    for name, path in pairs:
        where = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(name, str) or not isinstance(where, str) or not name.strip() or not where.strip():
            raise InvalidArgument(field="adapters", given=value, allowed=f"{allowed}, neither empty")
        if name in found:
            raise InvalidArgument(f"adapter {name!r} is given twice; give each name once", field="adapters")
        found[name] = where
    return found


def generation_fields(value: object) -> dict[str, Any]:
    """Parse a mapping of fields of generation_config.json, its JSON, or a list of these; else raise
    ``InvalidArgument``."""
    found: dict[str, Any] = {}
    for one in value if isinstance(value, (list, tuple)) else (value,):
        given = one
        with suppress(ValueError):
            given = json.loads(one) if isinstance(one, str) else one
        if not isinstance(given, Mapping) or not set(given) <= set(GENERATION_FIELDS):
            allowed = f"a mapping, or JSON of one, with the fields {', '.join(GENERATION_FIELDS)}"
            raise InvalidArgument(field="override_generation_config", given=value, allowed=allowed)
        found |= given
    return found


def field_help(cls: type[Any]) -> dict[str, str]:
    """Map the fields of a configuration dataclass to their help texts, in order of definition."""
    return {f.name: f.metadata["help"] for f in dataclasses.fields(cls)}


def option(default: Any, text: str, **given: Any) -> Any:
    """Return a field with a default value and a help text."""
    return field(default=default, metadata={"help": text}, **given)


# -- the engine ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The arguments of ``LLM(...)``. Bad values raise ``InvalidArgument``, and options that this
    release lacks raise ``Unsupported``."""

    model: str = field(metadata={"help": "A bundled model, a local directory, or a Hugging Face id."})
    device: str = option("auto", "auto, cpu, cuda, or cuda:N.")
    dtype: str = option("auto", "Weights and activations: float32, bfloat16, float16; auto: the checkpoint's.")
    kv_dtype: str = option("auto", f"K and V: {', '.join(KV_FORMATS)}; auto: the same as dtype.")
    max_model_len: int | None = option(None, "Longest sequence in tokens; by default what the model allows.")
    max_num_seqs: int = option(256, "Most sequences that run in one step.")
    max_num_batched_tokens: int = option(2048, "Most tokens that one step runs; longer prompts run in chunks.")
    kv_cache_memory: int | str | None = option(
        None, "Memory for the KV state, in bytes or like 4GiB; by default measured from what is free."
    )
    gpu_memory_utilization: float = option(
        0.9, "Fraction of the GPU's memory to use, in (0, 1]; kv_cache_memory overrides it."
    )
    page_size: int = option(16, "Tokens in a page of the KV state.")
    checkpoint_interval: int | None = option(
        None,
        "Tokens between kept states of recurrent layers, a multiple of page_size; 0 keeps those at the ends of prompts "
        "and turns only; by default as many as have K and V of the size of a state, 1,024 at most.",
    )
    enable_prefix_caching: bool = option(True, "Keep finished sequences, to start later prompts from their beginnings.")
    attention_backend: str = option("auto", f"One of: {', '.join(ATTENTION_BACKENDS)}.")
    enforce_eager: bool = option(False, "Launch the kernels of decodes one by one, and capture none as CUDA graphs.")
    async_scheduling: bool = option(
        True,
        "On a GPU, queue the next step before the tokens of the last one are known; in stages, let decodes take turns.",
    )
    tensor_parallel_size: int = option(
        1, "Processes, each with a device or a share of the cores, that divide each layer."
    )
    pipeline_parallel_size: int = option(
        1, "Stages, each of tensor_parallel_size processes, that divide the layers among them."
    )
    speculative: Speculation | str | None = option(  # noqa: RUF009
        None,
        f"Draft later tokens and verify several in one step: {', '.join(METHODS)} (as draft:MODEL, eagle:HEAD) or off; the texts stay the same.",
    )
    adapters: Mapping[str, str] | None = option(
        None,
        "LoRA adapters to load at start, NAME=WHERE: a bundled one, a PEFT directory or a Hugging Face id; may be repeated.",
        hash=False,
    )
    quantization: str | None = option(
        None, "Weights of linear maps in fewer bits, made at load: int8 or int4 on a CPU, fp8 on a GPU."
    )
    tokenizer: str | None = option(None, "Directory or Hugging Face id of the tokenizer; by default the model's.")
    chat_template: str | None = option(
        None, f"Chat template in place of the model's: a Jinja file, or a built-in one ({', '.join(CHAT_TEMPLATES)})."
    )
    parse_special: bool = option(
        False, "Let text of chat messages that spells a special token become that token; by default it stays text."
    )
    revision: str | None = option(None, "Branch, tag or commit of the Hugging Face id; by default its main branch.")
    trust_remote_code: bool = option(False, "Code from checkpoints is never run; only false is accepted.")
    seed: int = option(0, "Seed of requests that bring none, in [0, 2^63).")
    override_generation_config: Mapping[str, Any] | None = option(
        None,
        "Defaults of requests in place of the model's: JSON with fields of generation_config.json, as in "
        '{"temperature": 0.6}; may be repeated.',
        hash=False,
    )
    host_memory: int | str | None = option(
        None,
        "Host memory for state that the pool gives up, in bytes or like 4GiB; 0 is off; by default an eighth of what "
        "is free. memory:// in store says the same.",
    )
    store: tuple[str, ...] = option(
        (),
        "Where state is kept outside of the pool, nearest first: memory://4GiB, file:///var/quire?size=200GiB, "
        "redis://HOST/0, s3://BUCKET; may be repeated.",
    )
    adapter_ranks: int = option(
        512, "Most ranks of adapters that one step uses together, as in 32 adapters of rank 16."
    )
    adapter_memory: int | str | None = option(
        None, "Host memory for loaded adapters, in bytes or like 4GiB; by default an eighth of what is free."
    )
    state_dir: str | None = option(
        None,
        "Directory in which sessions outlive the process, even one that is killed; one process at a time. "
        "By default they end with it.",
    )

    def __post_init__(self) -> None:
        _set(self, _path, "model", "tokenizer", "chat_template", "state_dir")
        _set(self, _device, "device")
        if isinstance(self.kv_dtype, str) and self.kv_dtype not in ("auto", *KV_FORMATS):
            raise _unsupported("kv_dtype", self.kv_dtype, _one_of(("auto", *KV_FORMATS)))
        _set(self, _dtype, "dtype")
        _set(self, _dtype, "kv_dtype", choices=("auto", *KV_FORMATS))
        _set(self, check_int, "max_num_seqs", "max_num_batched_tokens", "page_size", "adapter_ranks", low=1)
        _set(self, check_int, "max_model_len", low=1, also="or left out")
        _set(self, check_int, "checkpoint_interval", low=0, also="or left out")
        if self.checkpoint_interval is not None and self.checkpoint_interval % self.page_size:
            allowed = f"a multiple of page_size {self.page_size}, 0 or left out"
            raise InvalidArgument(field="checkpoint_interval", given=self.checkpoint_interval, allowed=allowed)
        _set(self, _bytes, "kv_cache_memory", least=1)
        _set(self, _bytes, "host_memory", "adapter_memory", least=0)
        _set(self, check_real, "gpu_memory_utilization", above=0, up_to=1)
        _set(self, _urls, "store")
        if self.host_memory is not None and any(url.startswith("memory:") for url in self.store):
            raise InvalidArgument(
                field="host_memory", given=self.host_memory, allowed="left out beside memory:// in store"
            )
        _set(self, require_bool, "enable_prefix_caching", "enforce_eager", "async_scheduling", "trust_remote_code")
        _set(self, require_bool, "parse_special")
        _set(self, _name, "revision", "attention_backend")
        _set(self, read_speculation, "speculative")
        _set(self, check_int, "seed", low=0, high=2**63 - 1)
        _set(self, lambda _, value: named_paths(value), "adapters")
        _set(self, lambda _, value: generation_fields(value), "override_generation_config")
        _set(self, check_int, "tensor_parallel_size", "pipeline_parallel_size", low=1)
        for name, supported, accepted in (
            ("attention_backend", self.attention_backend in ATTENTION_BACKENDS, _one_of(ATTENTION_BACKENDS)),
            ("quantization", self.quantization in (None, *QUANTIZATIONS), f"{_one_of(QUANTIZATIONS)}, or left out"),
            ("trust_remote_code", not self.trust_remote_code, "False: code from a checkpoint is never run"),
        ):
            if not supported:
                raise _unsupported(name, getattr(self, name), accepted)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> EngineConfig:
        """Build from a mapping, such as a YAML file's, with kebab-case or snake_case keys. Raise
        ``InvalidArgument`` for an unknown or repeated key, or if ``model`` is missing."""
        return cls(**_from_mapping(cls, mapping, required="model"))


def _from_mapping(
    cls: type[Any], mapping: Mapping[str, Any], *, required: str | None = None, within: str = ""
) -> dict[str, Any]:
    """Return the fields of a configuration; ``within``: name of the field whose value it is."""
    if not isinstance(mapping, Mapping):
        what = within or "a configuration"
        raise InvalidArgument(f"{what} must be a mapping of names to values, got {mapping!r}", field=within or None)
    known, values = list(field_help(cls)), dict[str, Any]()
    for key, value in mapping.items():
        name = key.replace("-", "_") if isinstance(key, str) else key
        path, said = (f"{within}.{name}", f"{within}.{key}") if within else (str(name), key)
        if name not in known:
            raise InvalidArgument(f"unknown configuration key {said!r}; known: {', '.join(known)}", field=path)
        if name in values:
            message = f"configuration key {path!r} is given twice, in kebab-case and in snake_case"
            raise InvalidArgument(message, field=path)
        values[name] = value
    if required is not None and required not in values:
        raise InvalidArgument(f"configuration key {required!r} is missing; required: {required}", field=required)
    return values


# -- executors -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The attention of an executor.

    ``attention_type``: MultiHead accepts the model's sharing of heads; MultiQuery and GroupedQuery
    require it; Flash and Paged require their flags; SlidingWindow keeps a sequence's last tokens.
    """

    attention_type: str = option("MultiHead", f"One of: {', '.join(ATTENTION_TYPES)}.")
    enable_flash_attention: bool = option(True, "Fused attention kernels, if the device supports them.")
    enable_paged_attention: bool = option(
        True, "Keep K and V in pages of block_size tokens; otherwise each sequence in one piece."
    )
    block_size: int = option(16, "Tokens in a page, any number >= 1; meant when paging.")
    sliding_window_size: int | None = option(
        None, "Window in tokens; given if and only if attention_type is SlidingWindow."
    )

    def __post_init__(self) -> None:
        _set(self, _choice, "attention_type", choices=ATTENTION_TYPES)
        _set(self, require_bool, "enable_flash_attention", "enable_paged_attention")
        check_int("block_size", self.block_size, 1 if self.enable_paged_attention else None)
        for kind, name in (("Flash", "enable_flash_attention"), ("Paged", "enable_paged_attention")):
            if self.attention_type == kind and not getattr(self, name):
                raise InvalidArgument(field=name, given=False, allowed=f"True where attention_type is {kind!r}")
        if self.attention_type == "SlidingWindow":
            check_int("sliding_window_size", self.sliding_window_size, 1, also="(attention_type is SlidingWindow)")
        elif self.sliding_window_size is not None:
            allowed = "None unless attention_type is 'SlidingWindow'"
            raise InvalidArgument(field="sliding_window_size", given=self.sliding_window_size, allowed=allowed)


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """The memory of an executor."""

    enable_memory_pooling: bool = option(True, "Take pages and scratch from one pool that is allocated beforehand.")
    memory_pool_size: int | str | None = option(
        None, "Size of the pool, in bytes or like 4GiB; by default max_memory_usage of what is free."
    )
    enable_kv_cache_sharing: bool = option(True, "Let sequences with the same beginning share its pages.")
    max_memory_usage: float = option(90.0, "Percentage, in (0, 100], of the memory that is free after the weights.")

    def __post_init__(self) -> None:
        _set(self, require_bool, "enable_memory_pooling", "enable_kv_cache_sharing")
        _set(self, _bytes, "memory_pool_size", least=1)
        _set(self, check_real, "max_memory_usage", above=0, up_to=100, unit=" percent")


@dataclass(frozen=True, kw_only=True)
class OptimizationConfig:
    """Speed options of an executor. Its constructor refuses those that this release lacks."""

    enable_cuda_graphs: bool = option(False, "Capture decode steps; not in this release.")
    enable_kernel_fusion: bool = option(True, "Fuse kernels, if supported.")
    enable_mixed_precision: bool = option(False, "Lower precision where it is safe; not in this release.")
    optimization_level: int = option(
        1, "0 eager reference; 1 safe fusions; not in this release: 2 captured decode, 3 autotuning."
    )
    custom_flags: Mapping[str, object] = field(
        default_factory=dict, hash=False, metadata={"help": "Further flags by name; this release knows none."}
    )

    def __post_init__(self) -> None:
        _set(self, require_bool, "enable_cuda_graphs", "enable_kernel_fusion", "enable_mixed_precision")
        _set(self, check_int, "optimization_level", low=0, high=3)
        _set(self, _options, "custom_flags", known=CUSTOM_FLAGS)


DEFAULT_LENGTH = 2048
"""The longest sequence of an executor by default."""


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """The parts of an executor.

    ``model_info`` is a model as named in ``EngineConfig.model``, or metadata with a ``path`` and an
    integer ``max_sequence_length``, which bounds the requested one (for a name, at loading): for
    example ``executor.info()``, for another executor of the same model.
    """

    model_info: object = field(metadata={"help": "The model: a name or directory, or the metadata of one."})
    device: str = option("auto", "auto, cpu, cuda, or cuda:N.")
    dtype: str = option("auto", "Weights and activations: float32, bfloat16, float16; auto: the checkpoint's.")
    executor_type: str = option(
        "ContinuousBatch",
        f"How sequences run: {', '.join(EXECUTOR_TYPES)}; of a Sequential one the largest batch is 1.",
    )
    max_batch_size: int = option(32, "Most sequences in one call.")
    max_sequence_length: int = option(
        None, f"Longest sequence in tokens; by default {DEFAULT_LENGTH}, or what model_info says if that is less."
    )
    attention_config: AttentionConfig = field(default_factory=AttentionConfig, metadata={"help": "How to attend."})
    memory_config: MemoryConfig = field(default_factory=MemoryConfig, metadata={"help": "Where memory comes from."})
    optimization_config: OptimizationConfig = field(
        default_factory=OptimizationConfig, metadata={"help": "How far to go for speed."}
    )
    executor_options: Mapping[str, object] = field(
        default_factory=dict, hash=False, metadata={"help": f"Further options by name: {', '.join(EXECUTOR_OPTIONS)}."}
    )

    def __post_init__(self) -> None:
        longest = self._check_model()
        if self.max_sequence_length is None:
            object.__setattr__(self, "max_sequence_length", min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH))
        _set(self, _device, "device")
        _set(self, _dtype, "dtype")
        _set(self, _choice, "executor_type", choices=EXECUTOR_TYPES)
        _set(self, check_int, "max_batch_size", low=1)
        _set(self, check_int, "max_sequence_length", low=1, high=longest)
        for name, cls in _NESTED.items():
            if not isinstance(value := getattr(self, name), cls):
                raise InvalidArgument(field=name, given=value, allowed=f"of class {cls.__name__}")
        _set(self, _options, "executor_options", known=EXECUTOR_OPTIONS)
        options = self.executor_options
        if "prefill_chunk_size" in options:
            check_int("executor_options.prefill_chunk_size", options["prefill_chunk_size"], None)
        if "modalities" in options:
            given = options["modalities"]
            if not isinstance(given, list | tuple | set | frozenset) or any(one not in MODALITIES for one in given):
                allowed = f"a list of {_one_of(MODALITIES)}"
                raise InvalidArgument(field="executor_options.modalities", given=given, allowed=allowed)
        if "sliding_window_sink" in options:
            window = self.attention_config.sliding_window_size
            if window is None:
                raise InvalidArgument(
                    "executor_options.sliding_window_sink belongs to attention_type 'SlidingWindow', got "
                    f"{options['sliding_window_sink']!r} with {self.attention_config.attention_type!r}",
                    field="executor_options.sliding_window_sink",
                )
            check_int("executor_options.sliding_window_sink", options["sliding_window_sink"], 0, window - 1)
        if "kv_dtype" in options and options["kv_dtype"] not in ("auto", *KV_FORMATS):
            raise _unsupported("executor_options.kv_dtype", options["kv_dtype"], _one_of(("auto", *KV_FORMATS)))
        for size, kind in (
            ("tensor_parallel_size", "TensorParallel"),
            ("pipeline_parallel_size", "PipelineParallel"),
        ):
            if size not in options:
                continue
            given, name = options[size], f"executor_options.{size}"
            if self.executor_type != kind:
                raise InvalidArgument(
                    f"{name} belongs to executor_type {kind!r}, got {given!r} with {self.executor_type!r}", field=name
                )
            check_int(name, given, 2)
        drafts = read_speculation("executor_options.speculative", options.get("speculative"))
        if drafts is not None and self.executor_type != "Speculative":
            raise InvalidArgument(
                "executor_options.speculative belongs to executor_type 'Speculative', got "
                f"{options['speculative']!r} with {self.executor_type!r}",
                field="executor_options.speculative",
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ExecutorConfig:
        """Build from a mapping, such as JSON's, with kebab-case or snake_case keys; nested
        configurations are mappings too. ``dataclasses.asdict`` is the inverse. Raise
        ``InvalidArgument`` as ``EngineConfig.from_mapping``."""
        values = _from_mapping(cls, mapping, required="model_info")
        for name, nested in _NESTED.items():
            if name in values and not isinstance(values[name], nested):
                values[name] = nested(**_from_mapping(nested, values[name], within=name))
        return cls(**values)

    def _check_model(self) -> int | None:
        """Return the model's longest sequence if ``model_info`` has it."""
        if isinstance(self.model_info, str | os.PathLike):
            _set(self, _path, "model_info")
            return None
        longest = getattr(self.model_info, "max_sequence_length", None)
        if not isinstance(longest, int) or isinstance(longest, bool):
            allowed = "a model's name or directory, or metadata with an integer max_sequence_length"
            raise InvalidArgument(field="model_info", given=self.model_info, allowed=allowed)
        return longest


_NESTED: Mapping[str, type[Any]] = {
    "attention_config": AttentionConfig,
    "memory_config": MemoryConfig,
    "optimization_config": OptimizationConfig,
}


# -- checks ----------------------------------------------------------------------------------------
# Each error names the field, the value, and what is accepted. A check returns the value to keep.


def _set(config: Any, check: Callable[..., Any], *names: str, **given: Any) -> None:
    """Replace these fields by their checked values. A field takes None if its annotation ends with
    it. ``given``: further arguments of ``check``."""
    for name in names:
        value = getattr(config, name)
        if value is not None or not str(config.__dataclass_fields__[name].type).endswith("None"):
            # A frozen dataclass can change its fields only in this way.
            object.__setattr__(config, name, check(name, value, **given))


def _one_of(choices: Iterable[str]) -> str:
    return "one of " + ", ".join(map(repr, choices))


def _unsupported(name: str, value: object, accepted: str) -> Unsupported:
    message = f"{name}={value!r} is not supported by this release; accepted: {accepted}"
    return Unsupported(message, field=name, given=value, allowed=accepted)


def check_int(name: str, value: Any, low: int | None, high: int | None = None, *, also: str = "") -> int:
    above, below = -math.inf if low is None else low, math.inf if high is None else high
    if isinstance(value, int) and not isinstance(value, bool) and above <= value <= below:
        return value
    span = "" if low is None else f" >= {low}" if high is None else f" in [{low}, {high}]"
    raise InvalidArgument(field=name, given=value, allowed=f"an integer{span}{also and ' ' + also}")


def check_real(name: str, value: Any, *, above: float, up_to: float, unit: str = "") -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # The bound refuses infinity, and integers that are no floats.
    if not (is_number and above < value <= min(up_to, sys.float_info.max)):
        raise InvalidArgument(field=name, given=value, allowed=f"a number in ({above}, {up_to}]{unit}")
    return value


def _bytes(name: str, value: Any, least: int) -> int:
    if (size := parse_bytes(value, name=name)) < least:
        raise InvalidArgument(field=name, given=value, allowed="at least 1 byte")
    return size


def _name(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidArgument(field=name, given=value, allowed="a non-empty string")
    return value


def _urls(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or any(not isinstance(url, str) for url in value):
        raise InvalidArgument(field=name, given=value, allowed="a list of URLs such as 'file:///var/quire?size=200GiB'")
    return tuple(value)


def _path(name: str, value: Any) -> str:
    return _name(name, os.fspath(value) if isinstance(value, os.PathLike) else value)


def _choice(name: str, value: Any, choices: Collection[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgument(field=name, given=value, allowed=_one_of(choices))
    return value


def _device(name: str, value: Any) -> str:
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise InvalidArgument(field=name, given=value, allowed="'auto', 'cpu', 'cuda' or 'cuda:N'")
    return value


def _dtype(name: str, value: Any, choices: Collection[str] = DTYPES) -> str:
    """Convert torch's dtypes to names."""
    return _choice(name, str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value, choices)


def _options(name: str, value: Any, known: Collection[str]) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise InvalidArgument(field=name, given=value, allowed="a mapping")
    if unknown := [key for key in value if key not in known]:
        accepted = ", ".join(known) or "none in this release"
        raise InvalidArgument(f"{name} has no {unknown[0]!r}; accepted: {accepted}", field=name)
    return dict(value)  # the caller may change the original
