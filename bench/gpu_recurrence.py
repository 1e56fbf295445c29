"""Recurrent layers on one CUDA device, as a part of ``gpu.py``: by the Triton kernels and by
PyTorch's operations.

Letters: H heads of the state; K, V sizes of keys and values; C channels of a convolution; W taps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quire.contracts.recurrence import PooledRecurrence, RecurrenceBackend, RecurrencePlan, StatePlaces
from quire.kernels.recurrence.chunked import ChunkedRecurrence
from quire.kernels.recurrence.triton_recurrence import TritonRecurrence


@dataclass(frozen=True)
class Recurring:
    """One layer over ``batch`` sequences with ``count`` new tokens, in float32 as from models; a
    convolution of H * V channels in bfloat16 if it has taps."""

    name: str
    batch: int
    count: int
    heads: int
    keys: int
    values: int
    delta: bool = False
    shared: bool = False
    """Whether all heads share one q and k."""
    taps: int = 0

    @property
    def bytes(self) -> int:
        """Bytes that must be read or written: inputs, outputs and states, each once."""
        tokens, width = self.batch * self.count, self.heads * self.values
        if self.taps:
            return 2 * (2 * tokens * width + self.taps * width + 2 * self.batch * (self.taps - 1) * width)
        rows = 2 * width + 2 * self.keys * (1 if self.shared else self.heads) + self.heads * (1 + self.delta)
        return 4 * (tokens * rows + 2 * self.batch * width * self.keys)

    @property
    def operations(self) -> int:
        """Multiplications and additions of the definition, token by token."""
        products = self.taps if self.taps else self.keys * (2 + self.delta)
        return 2 * self.batch * self.count * self.heads * self.values * products

    def plan(self) -> RecurrencePlan:
        """Return the plan of chains with their last states wanted."""
        starts = np.arange(self.batch + 1) * self.count
        parents, given = np.arange(starts[-1]) - 1, np.full(starts[-1], -1)
        parents[starts[:-1]], given[starts[:-1]] = -1, np.arange(self.batch)
        return RecurrencePlan(starts=starts, parents=parents, given=given, wanted=starts[1:] - 1, chains=True)

    def call(self, backend: RecurrenceBackend, device: torch.device) -> Callable[[], object]:
        """Return the call of one layer, on states in a pool if the backend supports that."""
        plan, tokens = self.plan(), self.batch * self.count
        sources, targets = torch.arange(2 * self.batch, device=device).chunk(2)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device)

        if self.taps:
            width = self.heads * self.values
            x, weight = drawn(tokens, width).bfloat16(), drawn(width, self.taps).bfloat16()
            inputs = drawn(self.batch, self.taps - 1, width).bfloat16()
            if isinstance(backend, PooledRecurrence):
                places = StatePlaces(inputs.repeat(2, 1, 1), sources, targets)
                return lambda: backend.convolve_at(plan, x, weight, None, places)
            return lambda: backend.convolve(plan, x, weight, None, inputs)
        q, k = (
            torch.nn.functional.normalize(drawn(tokens, 1 if self.shared else self.heads, self.keys), dim=-1)
            .expand(-1, self.heads, -1)
            for _ in range(2)
        )  # fmt: skip
        v, states = drawn(tokens, self.heads, self.values), drawn(self.batch, self.heads, self.keys, self.values)
        log_decay, beta = -0.1 * drawn(tokens, self.heads).abs(), drawn(tokens, self.heads).sigmoid()
        gates = {"log_decay": log_decay, "beta_TH": beta if self.delta else None}
        if isinstance(backend, PooledRecurrence):
            places = StatePlaces(states.repeat(2, 1, 1, 1), sources, targets)
            return lambda: backend.linear_attention_at(plan, q, k, v, places, **gates)
        return lambda: backend.linear_attention(plan, q, k, v, states, **gates)


RECURRING = (
    Recurring("gated delta, decode 1", 1, 1, 32, 128, 128, delta=True),
    Recurring("gated delta, decode 64", 64, 1, 32, 128, 128, delta=True),
    Recurring("gated delta, drafts 16 x 8", 16, 8, 32, 128, 128, delta=True),
    Recurring("gated delta, prompt of 8,192", 1, 8192, 32, 128, 128, delta=True),
    Recurring("gated delta, 8 prompts of 1,024", 8, 1024, 32, 128, 128, delta=True),
    Recurring("state space, decode 64", 64, 1, 80, 128, 64, shared=True),
    Recurring("state space, prompt of 8,192", 1, 8192, 80, 128, 64, shared=True),
    Recurring("convolution, decode 64", 64, 1, 64, 0, 128, taps=4),
    Recurring("convolution, prompt of 8,192", 1, 8192, 64, 0, 128, taps=4),
)
"""Qwen3-Next's gated delta rule and convolution, and Mamba-2's state space of 2.7 billion
parameters."""


def recurrences(
    device: torch.device,
    copy: float,
    peak: float,
    rounds: int,
    seconds_of: Callable[[Callable[[], object], int], float],
) -> list[dict[str, object]]:
    """Return rows of a table; ``copy``: bytes, ``peak``: operations a second of the device."""
    rows: list[dict[str, object]] = []
    with torch.inference_mode():
        for case in RECURRING:
            taken = seconds_of(case.call(TritonRecurrence(), device), rounds)
            other = seconds_of(case.call(ChunkedRecurrence(), device), max(3, rounds // 4))
            rows.append(
                {
                    "recurrence": case.name,
                    "triton us": taken * 1e6,
                    "of copy": f"{case.bytes / taken / copy:.0%}",
                    "of GEMM": f"{case.operations / taken / peak:.1%}",
                    "torch us": other * 1e6,
                }
            )
    return rows
