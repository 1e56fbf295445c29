"""The part ``float8`` of ``bench/gpu.py``: pieces of a step that are one kernel or two.

Letters: T rows, I input, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812

from quire.kernels.float8 import Float8Linear
from quire.kernels.triton_rows import round_rows

Timer: TypeAlias = Callable[[Callable[[], object], int], float]
"""Returns the median seconds of a call, of so many rounds."""
MAPS = {"qkv": (6144, 4096), "gate and up": (28_672, 4096), "down": (4096, 14_336)}
"""Outputs and inputs of Llama-3-8B's maps."""


def float8_products(
    device: torch.device, copy: float, peak: float, rounds: int, seconds_of: Timer
) -> list[dict[str, object]]:
    """Return rows of a table: maps of 8-bit floats beside bfloat16. ``copy``: bytes, ``peak``:
    operations in bfloat16 a second of the device."""
    rows: list[dict[str, object]] = []
    with torch.inference_mode():
        for name, (outs, ins) in MAPS.items():
            # Several weights in turn, so that no cache holds what a call reads.
            weights = [torch.randn(outs, ins, dtype=torch.bfloat16, device=device) * 0.02 for _ in range(4)]
            maps = [Float8Linear().pack(weight, None, "fp8") for weight in weights]
            for count in (1, 64, 8192):
                x_TI = torch.randn(count, ins, dtype=torch.bfloat16, device=device)
                taken = seconds_of(lambda x=x_TI, maps=maps: [one(x) for one in maps], rounds) / len(maps)  # type: ignore[misc]
                plain = seconds_of(lambda x=x_TI, weights=weights: [F.linear(x, one) for one in weights], rounds) / len(
                    maps
                )  # type: ignore[misc]
                rounding = seconds_of(lambda x=x_TI: round_rows(x), rounds)  # type: ignore[misc]
                rows.append(
                    {
                        "map": f"{name}, {count} rows",
                        "fp8 us": taken * 1e6,
                        "of copy": f"{maps[0].weights.nbytes / taken / copy:.0%}",
                        "of bfloat16 GEMM": f"{2 * count * outs * ins / taken / peak:.0%}",
                        "rounding us": rounding * 1e6,
                        "bfloat16 us": plain * 1e6,
                    }
                )  # fmt: skip
    return rows
