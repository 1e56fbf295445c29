"""Building a model from a checkpoint directory.

Configuration, headers and memory are checked first. A directory that cannot be loaded thus costs
milliseconds and no memory, independent of its size.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quire.contracts.block_calls import LayerKernels
from quire.errors import CheckpointError, InvalidArgument, ResourceExhausted
from quire.models.checkpoint import Checkpoint, Place, expand, parameter_shapes
from quire.models.config_fields import read_config_file
from quire.models.families import LoadedModel, family_of, is_foreign
from quire.models.processor import Processor

logger = logging.getLogger(__name__)

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
"""Accepted values of ``dtype`` besides "auto"."""

PLAIN = LayerKernels()


def load_model(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: bool = False,
    max_model_len: int | None = None,
    kernels: LayerKernels = PLAIN,
) -> LoadedModel:
    """Load the model in the checkpoint directory ``path``, with its weights on ``device``.

    ``dtype``: see ``resolve_dtype``. ``progress`` shows a bar over bytes if stderr is a terminal.
    ``max_model_len`` is the longest sequence that will run (None: the context length). It sets the
    frequencies of a RoPE that depends on length, and changes nothing in other models. ``kernels``
    run what layers have a place for.
    ``transformers``, if installed, runs architectures that are not native (``models.fallback``).

    Raise ``CheckpointError`` if the directory or a file is missing, damaged or contradicts
    ``config.json``, ``Unsupported`` for an architecture or option that is not computed, and
    ``ResourceExhausted`` if the weights do not fit. These name the file, the found and the
    expected. Raise ``InvalidArgument`` for an unknown dtype or device.
    """
    path = Path(path)
    if not os.path.isdir(path):
        found = "a file" if os.path.exists(path) else "missing"
        raise CheckpointError(f"{path} is {found}; expected the directory of a Hugging Face checkpoint")
    device = _device(device)
    _check_dtype_name(dtype)
    values = read_config_file(path)
    if is_foreign(values):
        return _load_foreign(path, values, device, dtype)
    family = family_of(values)
    config = family.read_config(values, max_model_len)
    with Checkpoint(path) as checkpoint:
        num_layers = config.num_layers
        if num_layers > len(checkpoint.tensors):  # Also bounds the table that a damaged config.json could ask for.
            raise CheckpointError(
                f"{path}: config.json says {num_layers} layers, but there are {len(checkpoint.tensors)} tensors"
            )
        places = checkpoint.choose([expand(table, num_layers) for table in family.spellings(config)])
        checkpoint.check(places, family.ignorable_names(config))
        resolved = resolve_dtype(dtype, checkpoint.dtype(places), device)
        _check_memory(path, places, resolved, device)
        weights = checkpoint.weights(places, dtype=resolved, device=device, progress=progress)
        model = family.build(config, weights, values)
        model.places = places
        weights.release()
        if model.pack(replace(kernels, read=weights.read)):
            logger.info("%s: weights are laid out for this machine's products", path)
        weights.settle()
    return model


def _load_foreign(path: Path, values: Mapping[str, Any], device: torch.device, dtype: str) -> LoadedModel:
    """Load an architecture that is not native through ``transformers``."""
    from quire.models.fallback import load_fallback

    named = values.get("dtype", values.get("torch_dtype"))
    stored = DTYPES.get(str(named).removeprefix("torch."), torch.float32)
    resolved = resolve_dtype(dtype, stored, device)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors")) * resolved.itemsize // stored.itemsize
    free = free_memory(device)
    if free is not None and size > free:
        raise ResourceExhausted(
            f"{path} needs about {size / 2**30:.2f} GiB for its weights in {resolved}, but {free / 2**30:.2f} GiB are free on {device}"
        )
    return load_fallback(path, values, dtype=resolved, device=device)


def resolve_dtype(
    requested: str, checkpoint_dtype: torch.dtype, device: torch.device, processor: Processor | None = None
) -> torch.dtype:
    """Return the dtype to run in; raise ``InvalidArgument`` for an unknown name.

    A name is used as it is. "auto" means the checkpoint's dtype, but float32, with a logged
    warning, on a CPU that would emulate it by conversions. bfloat16 is fast with AVX512-BF16 or AMX
    (on Arm: as oneDNN reports), float16 with AVX512-FP16. ``processor`` None is this machine's CPU.
    """
    _check_dtype_name(requested)
    if requested != "auto":
        return DTYPES[requested]
    if device.type == "cpu" and not (processor or Processor.here()).multiplies(checkpoint_dtype):
        logger.warning("dtype auto: this CPU has no fast %s; the weights are held in float32", checkpoint_dtype)
        return torch.float32
    return checkpoint_dtype


def _check_dtype_name(name: str) -> None:
    if name != "auto" and name not in DTYPES:
        raise InvalidArgument(f"dtype is {name!r}; expected one of {['auto', *DTYPES]}")


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidArgument(f"device is {str(device)!r}, which this machine does not have ({reason})") from error
    return found


def _check_memory(path: Path, places: Mapping[str, Place], dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``ResourceExhausted`` if the weights exceed free memory; a CPU would overcommit."""
    needed = sum(torch.Size(shape).numel() for shape in parameter_shapes(places).values()) * dtype.itemsize
    free = free_memory(device)
    if free is not None and needed > free:
        raise ResourceExhausted(
            f"{path} needs {needed / 2**30:.2f} GiB for its weights in {dtype}, "
            f"but {free / 2**30:.2f} GiB are free on {device}; take a smaller model or dtype"
        )


def free_memory(device: torch.device) -> int | None:
    """Return the bytes free on ``device`` within the control group's limit; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    limits = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        return None
    with suppress(OSError, ValueError):
        # "max": no limit. The group's page cache can be reclaimed, so its use does not count.
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(limits, default=None)
