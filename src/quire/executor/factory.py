"""From a configuration to an executor: checks without loading, and the choices that its flags
imply.

This module decides about the parts of an executor; the ``make`` function of a ``Factory`` builds
them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.base.config import ExecutorConfig
from quire.base.errors import InvalidArgument, NotFound, Unsupported
from quire.base.signatures import checks_arguments
from quire.contracts.executor import AttentionMechanism, ExecutorType
from quire.contracts.kv_state import ModelState
from quire.contracts.layers import KeyValueAttention, LatentAttention
from quire.contracts.ranks import Grid
from quire.executor.executor import Executor
from quire.executor.executor_types import check_type
from quire.executor.reports import computable_dtypes, mechanism_of
from quire.kv.exchange import dtype_name
from quire.models.catalogue import HUB_NAME, bundled_models
from quire.models.families import family_of, is_foreign
from quire.models.loading import DTYPES, check_division
from quire.models.quantized import without_section
from quire.models.sources import read_config

NOT_CAPTURED = "executors neither compile nor capture decode in this release"
NOT_TUNED = "nothing is tuned, and sums keep their precision, in this release"
NOT_MIXED = "all products run in the dtype of the weights in this release"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The choices for a configuration on this machine."""

    model: str
    """A name or a directory."""
    device: torch.device
    executor_type: ExecutorType
    attention_backend: str
    """One of ``ATTENTION_BACKENDS``; "auto": the fastest on the device, as for an ``LLM``."""
    page_size: int
    grid: Grid
    """The processes that divide the model."""

    def arguments(self, config: ExecutorConfig) -> dict[str, Any]:
        """Keyword arguments of ``Executor`` besides the runner and its identity."""
        options = {
            name: value
            for name, value in config.executor_options.items()
            if name not in ("kv_dtype", "speculative", "tensor_parallel_size", "pipeline_parallel_size")
        }
        found: dict[str, Any] = {
            "executor_type": self.executor_type,
            "max_model_len": config.max_sequence_length,
            "max_batch_size": config.max_batch_size,
            "share_prefixes": config.memory_config.enable_kv_cache_sharing,
            "window": config.attention_config.sliding_window_size,
            "sink": options.pop("sliding_window_sink", 0),
        }
        return found | options


@checks_arguments()
class Factory:
    """See ``ExecutorFactory``. ``resolve_device`` returns the device of a name, or raises
    ``Unsupported`` for an absent one. ``make`` loads and builds."""

    def __init__(
        self,
        resolve_device: Callable[[str], torch.device],
        make: Callable[[ExecutorConfig, Choices], Executor],
    ) -> None:
        self._resolve_device = resolve_device
        self._make = make

    def create_executor(self, config: ExecutorConfig) -> Executor:
        """See ``ExecutorFactory``."""
        return self._make(config, self.choices(config))

    def create_batch_executor(self, config: ExecutorConfig) -> Executor:
        """See ``ExecutorFactory``."""
        choices = self.choices(config)
        if choices.executor_type is ExecutorType.SEQUENTIAL:
            kinds = ", ".join(repr(kind.value) for kind in ExecutorType if kind is not ExecutorType.SEQUENTIAL)
            raise InvalidArgument(f"executor_type {config.executor_type!r} does not batch; {kinds} do")
        return self._make(config, choices)

    def validate_config(self, config: ExecutorConfig) -> None:
        """See ``ExecutorFactory``. A model that must be downloaded is checked after the
        download."""
        self.choices(config)

    def supported_types(self) -> list[ExecutorType]:
        """See ``ExecutorFactory``."""
        return list(ExecutorType)

    def choices(self, config: ExecutorConfig) -> Choices:
        """Check everything that can be checked without loading; return the choices."""
        executor_type = check_type(config.executor_type)
        device = self._resolve_device(config.device)
        known = computable_dtypes(device)
        if config.dtype != "auto" and dtype_name(DTYPES[config.dtype]) not in known:
            raise Unsupported(f"dtype {config.dtype!r}: {device} computes {', '.join(known)}")
        if not config.memory_config.enable_memory_pooling:
            raise Unsupported(
                "enable_memory_pooling False: K and V always come from one pool that is allocated beforehand"
            )
        model = _model_of(config)
        ways = (
            (ExecutorType.TENSOR_PARALLEL, "tensor_parallel_size"),
            (ExecutorType.PIPELINE_PARALLEL, "pipeline_parallel_size"),
        )
        sizes = (int(str(config.executor_options.get(name, 2 if executor_type is kind else 1))) for kind, name in ways)
        grid = Grid(*sizes)
        check_devices(device, grid)
        _check_local_model(config, model, grid)
        attention = config.attention_config
        return Choices(
            model=model,
            device=device,
            executor_type=executor_type,
            attention_backend=_backend(config),
            # A page for a whole sequence makes the sequence contiguous.
            page_size=attention.block_size if attention.enable_paged_attention else config.max_sequence_length,
            grid=grid,
        )


def _model_of(config: ExecutorConfig) -> str:
    """Return the model's name or directory; ``InvalidArgument`` if the metadata name none."""
    given = config.model_info
    path = given if isinstance(given, str) else getattr(given, "path", None)
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InvalidArgument(f"model_info {given!r} names no model; give a name or directory, or metadata with a path")
    return os.fspath(path)


def _check_local_model(config: ExecutorConfig, model: str, grid: Grid) -> None:
    """Check the configuration against the ``config.json`` of a local model."""
    path = bundled_models().get(model) or Path(os.path.expanduser(model))
    if not os.path.exists(path):
        if not HUB_NAME.fullmatch(model):
            raise NotFound(f"model_info {model!r}: there is no such directory, and it is no name of a model")
        return
    if grid.size > 1:
        check_division(path, grid, config.max_sequence_length)
    values = read_config(path)
    if is_foreign(values):
        return
    found = family_of(values).read_config(without_section(values), None)
    check_length(config, getattr(found, "max_position", config.max_sequence_length))


def check_devices(device: torch.device, grid: Grid) -> None:
    """Raise ``Unsupported`` if there are fewer GPUs than ranks."""
    count = torch.cuda.device_count()
    if device.type == "cuda" and grid.size > 1 and (device.index or 0) + grid.size > count:
        raise Unsupported(
            f"{grid} from {device} on: PyTorch sees {count} CUDA devices; give as many ranks at most",
            field="tensor_parallel_size" if grid.slices > 1 else "pipeline_parallel_size",
        )


def check_length(config: ExecutorConfig, limit: int) -> None:
    """Raise ``InvalidArgument`` if sequences may become longer than the model allows."""
    if config.max_sequence_length > limit:
        allowed = f"an integer in [1, {limit}], the model's"
        raise InvalidArgument(field="max_sequence_length", given=config.max_sequence_length, allowed=allowed)


def check_heads(config: ExecutorConfig, specs: Sequence[KeyValueAttention | LatentAttention]) -> None:
    """Raise ``InvalidArgument`` if the configuration demands a head sharing that the model does not
    have."""
    wanted = config.attention_config.attention_type
    if wanted not in (AttentionMechanism.MULTI_QUERY, AttentionMechanism.GROUPED_QUERY):
        return
    present = sorted({mechanism_of(spec).value for spec in specs})
    if present != [wanted]:
        raise InvalidArgument(f"attention_type must be {' or '.join(map(repr, present))}, the model's, got {wanted!r}")


def _backend(config: ExecutorConfig) -> str:
    """Return the attention backend; ``Unsupported`` for options that no executor of this release
    has."""
    wanted = config.optimization_config
    for asked, name, reason in (
        (wanted.optimization_level == 2, "optimization_level 2", f"{NOT_CAPTURED}; 0 and 1 are levels"),
        (wanted.optimization_level == 3, "optimization_level 3", f"{NOT_TUNED}; 0 and 1 are levels"),
        (wanted.enable_cuda_graphs, "enable_cuda_graphs True", NOT_CAPTURED),
        (wanted.enable_mixed_precision, "enable_mixed_precision True", NOT_MIXED),
    ):
        if asked:
            raise Unsupported(f"{name}: {reason}")
    return "auto" if _wants_fused(config) else "reference"


def _wants_fused(config: ExecutorConfig) -> bool:
    wanted = config.optimization_config
    flash = config.attention_config.enable_flash_attention
    return wanted.optimization_level >= 1 and wanted.enable_kernel_fusion and flash


def check_flash(config: ExecutorConfig, state: ModelState) -> tuple[str, ...]:
    """Return the fallbacks from fused attention requested "if supported": layers without fused
    kernels. ``Unsupported`` if it is demanded and no layer has it."""
    plain, attending = state.unfused_layers(), len(state.geometry.specs)
    reason = f"{len(plain)} of {attending} attention layers run without fused attention on {state.device}"
    if config.attention_config.attention_type == AttentionMechanism.FLASH and len(plain) == attending:
        raise Unsupported(f"attention_type 'Flash': {reason}")
    return (
        (f"enable_flash_attention: {reason}, the first is layer {plain[0]}",) if plain and _wants_fused(config) else ()
    )
