"""The speed of this machine, measured within seconds, and the limits that follow for a model.

A decode reads each weight that a token needs from memory, and a prompt multiplies with it: one
multiplication and one addition for each token. Attention, norms and states take time beside that,
so a model runs at most this fast.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch

from quire.base.process_limits import free_memory
from quire.build import layer_kernels
from quire.contracts.linear import WeightForm
from quire.kernels.cpu_process import limit_threads
from quire.kernels.linear.cpu_linear import FORMS, native_linear
from quire.models.loading import Outline, load_model
from quire.models.processor import Processor
from quire.weights import packed

SECONDS = 4.0
"""Time for all measurements, without the last run of each."""
MOST_BYTES, PIECE = 1 << 30, 1 << 26
"""What is read, unless an eighth of the free memory is less or filling it takes too long."""
ROWS, OUTPUTS, INPUTS = 512, 2048, 1024
SIZES = (0.5e9, 1.5e9, 8e9)
"""Parameters of models whose limits are told."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of all threads together."""

    reads: float
    """Bytes a second from memory."""
    products: Mapping[str, float]
    """Operations a second of products of ``ROWS`` rows, by the form of the weights."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The most tokens a second."""

    decode: float
    """Of one sequence."""
    prompt: float


def measure(seconds: float | None = None, clock: Clock = time.perf_counter) -> Rates:
    """Measure reads and products. Each thing runs at least twice, and not again once its share of
    ``seconds`` is over. ``seconds``: by default ``SECONDS``."""
    seconds = SECONDS if seconds is None else seconds
    limit_threads()
    with torch.inference_mode():
        reads = _reads(seconds / 2, clock)
        runs = _products()
        products = {form: _best(run, seconds / 2 / len(runs), clock) for form, run in runs.items()}
    return Rates(reads, {form: 2 * ROWS * OUTPUTS * INPUTS / taken for form, taken in products.items()})


def limits(rates: Rates, form: str, parameters: float, nbytes: float) -> Limits:
    """Return the limits of a model, of whose weights a token needs so many, in so many bytes."""
    return Limits(rates.reads / nbytes, rates.products[form] / (2 * parameters))


def weight_bytes(form: str, parameters: float) -> float:
    """Return the bytes of so many weights."""
    return parameters * (4.0 if form == "float32" else packed.FORMS[cast("WeightForm", form)].bits / 8)


def outline_of(path: Path) -> Outline:
    """Read what a model has, without its weights. It raises as loading does."""
    found: list[Outline] = []

    def stop(outline: Outline) -> None:
        found.append(outline)
        raise _Seen

    with suppress(_Seen):
        load_model(path, kernels=layer_kernels(torch.device("cpu")), before_weights=stop)
    return found[0]


class _Seen(Exception):
    """Everything is known."""


def _best(run: Callable[[], object], seconds: float, clock: Clock) -> float:
    """Return the seconds of the fastest run, after one that does not count."""
    run()
    end, best = clock() + seconds, math.inf
    while True:
        started = clock()
        run()
        now = clock()
        best = min(best, now - started)
        if now >= end:
            return best


def _reads(seconds: float, clock: Clock) -> float:
    """The maximum of integers reads faster than any other of PyTorch's operations."""
    wanted = min(MOST_BYTES, (free_memory(torch.device("cpu")) or MOST_BYTES) // 8)
    end, pieces = clock() + seconds / 2, [torch.ones(PIECE // 4, dtype=torch.int32)]
    while (len(pieces) + 1) * PIECE <= wanted and clock() < end:
        pieces.append(torch.ones(PIECE // 4, dtype=torch.int32))
    return len(pieces) * PIECE / _best(lambda: [piece.amax() for piece in pieces], seconds / 2, clock)


def _products() -> dict[str, Callable[[], object]]:
    """Return a product with weights in each form, by Quire's kernels if they are there."""
    kernel = native_linear()
    dtype = torch.bfloat16 if Processor.here().multiplies(torch.bfloat16) else torch.float32
    weight_OI, x_TI = torch.randn(OUTPUTS, INPUTS), torch.randn(ROWS, INPUTS)
    if kernel is None:
        plain = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        return {form: partial(torch.mm, x_TI.to(kind), weight_OI.to(kind).t()) for form, kind in plain.items()}
    runs: dict[str, Callable[[], object]] = {}
    for form in FORMS:
        taken = torch.float32 if form == "float32" else dtype
        runs[form] = partial(kernel.pack(weight_OI.to(taken), None, form), x_TI.to(taken))
    return runs
