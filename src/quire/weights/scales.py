"""What formats of codes with scales share: values, part by part, and checks of scales."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from quire.base.errors import CheckpointError, Unsupported

AT_ONCE = 1 << 22
"""Most weights that are expanded at a time, which bounds the memory of copies."""
SCALES = ("F32", "F16", "BF16")
"""Element types of scales, by their safetensors names."""
Shape: TypeAlias = tuple[int, ...]


def parts(rows: int, columns: int, multiple: int = 1) -> Iterator[slice]:
    """Yield slices of consecutive rows, each but the last a multiple of ``multiple``."""
    step = max(1, AT_ONCE // max(1, columns) // multiple) * multiple
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def check_finite(name: str, scales: Tensor) -> None:
    """Raise ``CheckpointError`` for a scale that is not finite."""
    wrong = ~torch.isfinite(scales.float())
    if bool(wrong.any()):
        found = scales.float()[wrong].flatten()[0].item()
        raise CheckpointError(f"{name} has a scale of {found}; expected finite scales")


def write(name: str, values: Tensor, out: Tensor) -> None:
    """Write values to ``out``, rounded to its dtype. ``Unsupported`` if float16 cannot hold one."""
    out.copy_(values)
    if out.dtype == torch.float16 and not bool(torch.isfinite(out).all()):
        raise Unsupported(f"{name} has values that float16 does not hold; expected dtype bfloat16 or float32")


def whole(count: int, unit: int) -> int:
    """Return the number of units that hold ``count``."""
    return -(-count // unit)
