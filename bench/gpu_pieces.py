"""The parts ``float8``, ``experts``, ``copies`` and ``draws`` of ``bench/gpu.py``: one or two
kernels each.

Letters: as in ``contracts``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire import SamplingParams
from quire.kernels.draw.triton_draw import TritonDraw
from quire.kernels.linear.float8 import Float8Linear
from quire.kernels.rows.triton_rows import TritonRows, round_rows
from quire.ops.rows import REFERENCE_ROWS
from quire.sampling.filters import KernelDraws, candidates

Timer: TypeAlias = Callable[[Callable[[], object], int], float]
"""Returns the median seconds of a call over a number of rounds."""
MAPS = {"qkv": (6144, 4096), "gate and up": (28_672, 4096), "down": (4096, 14_336)}
"""Outputs and inputs of Llama-3-8B's maps."""
STACKS = {"gate and up": (128, 1536, 2048), "down": (128, 2048, 768)}
"""Experts, outputs and inputs of Qwen3-30B-A3B, of which a token uses 8."""
VOCABULARY = 151_936
LAYERS, SLOTS = 32, 1 << 14
"""Layers and slots of the pools in which pages are copied: 2 GiB of K and V."""


def float8_products(
    device: torch.device, copy: float, peak: float, rounds: int, seconds_of: Timer
) -> list[dict[str, object]]:
    """Return rows of a table: maps of 8-bit floats beside bfloat16. ``copy``: bytes, ``peak``:
    operations in bfloat16 a second of the device."""
    rows: list[dict[str, object]] = []
    with torch.inference_mode():
        for name, (outs, ins) in MAPS.items():
            # Alternate between several weights, so that no cache holds the operands of a call.
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


def expert_products(
    device: torch.device, copy: float, peak: float, rounds: int, seconds_of: Timer
) -> list[dict[str, object]]:
    """Return rows of a table: stacks of 8-bit floats beside bfloat16, for tokens whose experts are
    spread evenly. ``peak``: operations in bfloat16 a second of the device."""
    del copy
    rows: list[dict[str, object]] = []
    with torch.inference_mode():
        for name, (experts, outs, ins) in STACKS.items():
            weight_XOI = torch.randn(experts, outs, ins, dtype=torch.bfloat16, device=device) * 0.02
            stack = Float8Linear().pack_stack(weight_XOI, "fp8")
            for count in (1, 64, 8192):
                x_PI = torch.randn(8 * count, ins, dtype=torch.bfloat16, device=device)
                # Alternate between several choices, so that no cache holds the operands of a call.
                chosen = [torch.randint(experts, (8 * count,), device=device) for _ in range(4)]
                ends = [one.bincount(minlength=experts).cumsum(0).int() for one in chosen]
                taken, plain = (
                    seconds_of(lambda run=run, x=x_PI, ends=ends: [run(x, one) for one in ends], rounds) / len(ends)  # type: ignore[misc]
                    for run in (stack, lambda x, one, weight=weight_XOI: F.grouped_mm(x, weight.mT, offs=one))
                )
                rows.append(
                    {
                        "stack": f"{name}, {count} tokens",
                        "fp8 us": taken * 1e6,
                        "of bfloat16 GEMM": f"{2 * len(x_PI) * outs * ins / taken / peak:.0%}",
                        "bfloat16 us": plain * 1e6,
                    }
                )
    return rows


def copies(device: torch.device, copy: float, peak: float, rounds: int, seconds_of: Timer) -> list[dict[str, object]]:
    """Return rows of a table: copies of pages in pools of K and V of Llama-3-8B's layers, as in
    writes to forks. ``copy``: bytes a second of the device."""
    del peak
    rows: list[dict[str, object]] = []
    pools = [torch.zeros(LAYERS, SLOTS, 8, 128, dtype=torch.bfloat16, device=device) for _ in range(2)]
    for slots in (16, 256, 2048):
        order = np.random.default_rng(0).permutation(SLOTS // 16)[: 2 * slots // 16]
        moves = (order.reshape(2, -1, 1) * 16 + np.arange(16)).reshape(2, -1)
        taken, plain = (
            seconds_of(lambda kernels=kernels, moves=moves: kernels.copy_slots(pools, moves), rounds)  # type: ignore[misc]
            for kernels in (TritonRows(), REFERENCE_ROWS)
        )
        nbytes = 2 * slots * sum(pool[:, 0].nbytes for pool in pools)
        rows.append(
            {"slots": slots, "us": taken * 1e6, "of copy": f"{nbytes / taken / copy:.0%}", "torch us": plain * 1e6}
        )
    return rows


def draws(device: torch.device, copy: float, peak: float, rounds: int, seconds_of: Timer) -> list[dict[str, object]]:
    """Return rows of a table: tokens of rows with a temperature, without and with top-k and top-p,
    as drawn in a step; ``copy``: bytes a second of the device."""
    del peak
    rows: list[dict[str, object]] = []
    for filters in ({}, {"top_k": 50}, {"top_p": 0.95}):
        for count in (1, 64, 256):
            # Distributed like real logits: few tokens hold most of the probability.
            z_RV = 3 * torch.randn(count, VOCABULARY, device=device)
            params = dict.fromkeys(range(count), SamplingParams(temperature=0.8, **filters))  # type: ignore[arg-type]
            uniforms, max_R = [0.5] * count, z_RV.amax(-1)
            kernel = KernelDraws(TritonDraw(), z_RV, max_R, params, bool(filters))
            taken = seconds_of(lambda kernel=kernel, given=uniforms: kernel.drawn(given), rounds)  # type: ignore[misc]

            def plain(z: Tensor = z_RV, maxima: Tensor = max_R, given: Any = (params, uniforms)) -> object:
                (group,) = candidates(z, maxima, given[0], at_once=True)
                return group.drawn(given[1])

            rows.append(
                {
                    "rows": count,
                    "by": ", ".join(f"{name} {value}" for name, value in filters.items()) or "temperature",
                    "us": taken * 1e6,
                    "of copy": f"{z_RV.nbytes / taken / copy:.0%}",
                    "torch us": seconds_of(plain, rounds) * 1e6,
                }
            )
    return rows
