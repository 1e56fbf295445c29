"""Processor time of recurrent layers between their projections, in C++, on one thread.

Shapes are those of ``bench/hybrids.py``, in bfloat16: decodes of some sequences, and prompts. The
least of several calls. *GB/s* is what reading and writing the states takes. ``python
bench/mixers.py [--rounds 20]``
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch import Tensor

from quire.contracts.recurrence import (
    GatedNormWeight,
    MixerCall,
    RecurrencePlan,
    RecurrentParts,
    StateSizes,
    StepRates,
)
from quire.kernels.native_library import native_problem
from quire.kernels.recurrence.cpu_recurrence import NativeMixers, native_mixers
from quire_bench.reports import print_json, print_table

SIZES = {"gated delta net": StateSizes(16, 16, 128, 128), "Mamba-2": StateSizes(32, 1, 128, 64)}
CONVOLUTION = "short convolution"
CHANNELS = 1024
"""Of the short convolution."""
BATCHES, PROMPTS = (1, 4, 16), (512, 2048)


def chains(count: int, length: int) -> RecurrencePlan:
    """Return the plan of ``count`` chains of ``length`` tokens; the states after their ends are
    wanted."""
    starts, rows = np.arange(count + 1) * length, np.arange(count * length)
    first = rows % length == 0
    given = np.where(first, rows // length, -1)
    return RecurrencePlan(
        starts=starts, parents=np.where(first, -1, rows - 1), given=given, wanted=starts[1:] - 1, chains=True
    )


class Layer:
    """A layer with random weights."""

    def __init__(self, name: str, mixers: NativeMixers) -> None:
        sizes = self.sizes = SIZES.get(name)
        self.taps, self.channels = 3, CHANNELS
        call: MixerCall | None
        if sizes is None:
            call, self.columns = mixers.short_conv(normal(CHANNELS, self.taps), None), 3 * CHANNELS
        else:
            self.taps, self.channels = 4, 2 * sizes.key_heads * sizes.keys + sizes.width
            conv_CW, rates = (
                normal(self.channels, self.taps),
                StepRates(-torch.ones(sizes.heads), torch.ones(sizes.heads)),
            )
            if name == "Mamba-2":
                norm = GatedNormWeight(torch.ones(sizes.width), 1e-6, sizes.width, gate_first=True)
                call = mixers.ssd(conv_CW, normal(self.channels), sizes, rates, torch.ones(sizes.heads), norm)
            else:
                norm = GatedNormWeight(torch.ones(sizes.values), 1e-6, sizes.values, gate_first=False)
                call = mixers.delta_rule(conv_CW, sizes, rates, norm, sizes.keys**-0.5)
            self.columns = self.channels + sizes.width + sizes.heads * (name == "Mamba-2")
        assert call is not None
        self.call, self.rated = call, name == "gated delta net"

    def seconds(self, plan: RecurrencePlan, rounds: int) -> float:
        """Return the least processor time of a call."""
        entries, rows, sizes = len(plan.starts) - 1, plan.num_rows, self.sizes
        pools = [normal(2 * entries, self.taps - 1, self.channels)]
        rates = None
        if sizes is not None:
            pools.append(torch.randn(2 * entries, sizes.heads, sizes.keys, sizes.values))
            rates = normal(rows, 2 * sizes.heads) if self.rated else None
        parts = RecurrentParts(plan, torch.arange(entries), torch.arange(entries, 2 * entries), tuple(pools))
        x_TC, least = normal(rows, self.columns), float("inf")
        for _ in range(rounds):
            started = time.thread_time()
            self.call(x_TC, parts, rates)
            least = min(least, time.thread_time() - started)
        return least


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    mixers = native_mixers()
    if mixers is None or arguments.rounds < 1:
        parser.error(native_problem() or f"--rounds must be 1 or greater, got {arguments.rounds}")
    torch.set_num_threads(1)
    rows = []
    for name in (*SIZES, CONVOLUTION):
        layer, sizes = Layer(name, mixers), SIZES.get(name)
        bytes_of_states = 0 if sizes is None else 8 * sizes.heads * sizes.keys * sizes.values
        for count, length in (*((batch, 1) for batch in BATCHES), *((1, length) for length in PROMPTS)):
            least = layer.seconds(chains(count, length), arguments.rounds)
            rows.append(
                {
                    "layer": name,
                    "what": f"decode of {count}" if length == 1 else f"prompt of {length}",
                    "µs": least * 1e6,
                    "µs/row": least * 1e6 / (count * length),
                    "GB/s": bytes_of_states * count / least / 1e9 if length == 1 else "",
                }
            )
    print_table(rows)
    print_json({"benchmark": "mixers", "rounds": arguments.rounds, "rows": rows})


if __name__ == "__main__":
    main()
