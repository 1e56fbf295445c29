"""Requirements of the kernels for GPUs, and uploads to them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.uploads import uploaded

LEAST_CAPABILITY = (8, 0)
"""Compute capability from which a GPU multiplies bfloat16 and copies asynchronously without
registers."""
ROOMY = (9, 10)
"""Major compute capabilities of GPUs with 227 KiB of shared memory for a program."""


def interpreted() -> bool:
    """Return True if Triton's interpreter runs the kernels on the CPU, for tests. It has no
    bfloat16."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def known_dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes of rows that the kernels support."""
    return (torch.float32, torch.float16) if interpreted() else (torch.float32, torch.float16, torch.bfloat16)


def triton_problem(device: torch.device) -> str:
    """Return the reason why the Triton kernels cannot run on a device; "" if they can."""
    if not _has_triton():
        return "the Triton kernels need the package triton, which comes with PyTorch for CUDA"
    if device.type == "cpu" and interpreted():
        return ""
    if device.type != "cuda":
        return f"the Triton kernels run on CUDA devices; the state is on {device}"
    if not torch.cuda.is_available():
        return "the Triton kernels run on CUDA devices, and there is none"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        needed = ".".join(map(str, LEAST_CAPABILITY))
        return f"the Triton kernels need compute capability {needed}; {device} has {capability[0]}.{capability[1]}"
    return ""


def attention_problem(device: torch.device) -> str:
    """Return the reason why attention cannot run on a device; "" if it can."""
    if (problem := triton_problem(device)) or device.type != "cuda":
        return problem
    major, minor = torch.cuda.get_device_capability(device)
    if major in ROOMY:
        return ""
    needed = " or ".join(map(str, ROOMY))
    return f"the Triton attention needs the shared memory of compute capability {needed}; {device} has {major}.{minor}"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return int32 or uint8 arrays as tensors on a device, by one asynchronous copy.

    Each begins at a multiple of 16 bytes, so that programs are compiled for aligned pointers only.
    """
    sizes = [-(-array.nbytes // 16) * 16 or 16 for array in arrays]
    whole = np.zeros(sum(sizes), dtype=np.uint8)
    at, ends = 0, []
    for array, size in zip(arrays, sizes, strict=True):
        whole[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        ends.append((at, at + size, array.dtype == np.uint8))
        at += size
    held = uploaded(whole, device)
    return [held[start:stop] if is_bytes else held[start:stop].view(torch.int32) for start, stop, is_bytes in ends]


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which programs are launched on the tensor's device."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)
