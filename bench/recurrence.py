"""Gain of the chunk-parallel recurrences over going step by step, and their cost without chunks.

For each kind of recurrence, with the head sizes of a model that has it, one prompt: the kernel
against the step-by-step reference, in turn, and the difference of their results. Then decodes, and
the tokens of a draft with all states wanted, where both do the same work. Last, for each kind,
whether the prompt is at least ten times as fast.

``python bench/recurrence.py [--tokens 2048] [--rounds 5] [--device cpu] [--dtype float32] [--kinds
ssd,gated-delta] [--small]``
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.contracts.recurrence import Recurred, RecurrenceBackend, RecurrencePlan
from quire.kernels.recurrence.chunked import CHUNK, ChunkedRecurrence
from quire.ops.recurrence import ReferenceRecurrence
from quire_bench.latency import synchronize
from quire_bench.reports import Comparison, Spread, interleave, print_json, print_table

TARGET = 10.0
"""Least ratio of the reference's time to the kernel's for a prompt."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A recurrence with the sizes of a model."""

    heads: int = 16
    keys: int = 128
    values: int = 128
    decay: str = "none"
    """``none``, ``head`` or ``column``"""
    delta: bool = False
    shared: bool = False
    """Whether all heads share one q and k."""
    taps: int = 0
    """Taps of a convolution over ``heads * values`` channels, in place of linear attention; 0:
    none."""


KINDS = {
    "linear": Kind(),
    "ssd": Kind(heads=24, values=64, decay="head", shared=True),
    "gated": Kind(decay="head"),
    "gated-columns": Kind(decay="column"),
    "delta": Kind(delta=True),
    "gated-delta": Kind(decay="head", delta=True),
    "gated-delta-columns": Kind(decay="column", delta=True),
    "convolution": Kind(heads=64, taps=4),
}
"""``ssd``: Mamba-2 with 130 million parameters; the others: heads of 128 x 128, as in Qwen3-Next's
gated DeltaNet."""


def chains(count: int, length: int, *, all_wanted: bool = False) -> RecurrencePlan:
    """Return the plan of ``count`` chains of ``length`` tokens; the states after their ends are
    wanted, or all."""
    starts = np.arange(count + 1, dtype=np.int64) * length
    rows = np.arange(count * length, dtype=np.int64)
    first = rows % length == 0
    return RecurrencePlan(
        starts=starts,
        parents=np.where(first, -1, rows - 1),
        given=np.where(first, rows // length, -1),
        wanted=rows if all_wanted else starts[1:] - 1,
        chains=True,
    )


class Work:
    """Inputs of one kind for one plan."""

    def __init__(self, kind: Kind, plan: RecurrencePlan, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        rows, entries = plan.num_rows, len(plan.starts) - 1

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.plan = plan
        if kind.taps:
            channels = kind.heads * kind.values
            states = normal(entries, kind.taps - 1, channels)
            convolution = (normal(rows, channels), normal(channels, kind.taps), normal(channels), states)
            self._call: Callable[[RecurrenceBackend], Recurred] = lambda backend: backend.convolve(plan, *convolution)
            return
        heads = 1 if kind.shared else kind.heads
        q, k = (
            torch.nn.functional.normalize(normal(rows, heads, kind.keys), dim=-1).expand(rows, kind.heads, kind.keys)
            for _ in range(2)
        )
        v = normal(rows, kind.heads, kind.values)
        states = torch.zeros(entries, kind.heads, kind.keys, kind.values, device=device)
        shape = (rows, kind.heads, kind.keys) if kind.decay == "column" else (rows, kind.heads)
        log_decay = None if kind.decay == "none" else -torch.nn.functional.softplus(normal(*shape).float() - 2)
        beta = normal(rows, kind.heads).sigmoid() if kind.delta else None
        self._call = lambda backend: backend.linear_attention(plan, q, k, v, states, log_decay=log_decay, beta_TH=beta)

    def run(self, backend: RecurrenceBackend) -> Recurred:
        return self._call(backend)


def timed(work: Work, backend: RecurrenceBackend, device: str) -> None:
    work.run(backend)
    synchronize(torch.device(device))


def compared(work: Work, rounds: int, device: str) -> Comparison:
    kernel, reference = ChunkedRecurrence(), ReferenceRecurrence()
    return interleave(
        {"kernel": partial(timed, work, kernel, device), "reference": partial(timed, work, reference, device)},
        rounds,
    )


def difference(work: Work) -> float:
    """Return the largest difference of an output, as a share of the largest output."""
    found, expected = work.run(ChunkedRecurrence()).out.double(), work.run(ReferenceRecurrence()).out.double()
    return float((found - expected).abs().max() / expected.abs().max())


def verdict(name: str, tokens: int, gain: Spread) -> str:
    """Return one sentence on a kind."""
    reached = "reached" if gain.median >= TARGET else "NOT reached"
    return f"{name}: a prompt of {tokens} tokens runs {gain} times as fast as step by step; {TARGET:g} {reached}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a decode")
    parser.add_argument("--draft", type=int, default=8, help="tokens of a draft")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas")
    parser.add_argument("--small", action="store_true", help="few tokens, one round, to see that it runs")
    arguments = parser.parse_args()
    if arguments.small:
        arguments.tokens, arguments.batch, arguments.draft, arguments.rounds = 130, 3, 4, 1
    unknown = [name for name in arguments.kinds.split(",") if name not in KINDS]
    if unknown:
        parser.error(f"--kinds has {', '.join(unknown)}; there are {', '.join(KINDS)}")
    if min(arguments.tokens, arguments.batch, arguments.draft, arguments.rounds) < 1:
        parser.error("--tokens, --batch, --draft and --rounds must be 1 or greater")
    dtype, device = getattr(torch, arguments.dtype), arguments.device
    rows, report = [], []
    with torch.inference_mode():
        for name in arguments.kinds.split(","):
            kind = KINDS[name]
            plans = {
                "prompt": chains(1, arguments.tokens),
                "decodes": chains(arguments.batch, 1),
                "draft": chains(1, arguments.draft, all_wanted=True),
            }
            for what, plan in plans.items():
                work = Work(kind, plan, dtype, device)
                result = compared(work, arguments.rounds, device)
                seconds, gain = result.spread("kernel"), result.ratios["reference"]
                apart = difference(work)
                rows.append(
                    {
                        "kind": name,
                        "what": what,
                        "ms": seconds.median * 1e3,
                        "µs/token": seconds.median / plan.num_rows * 1e6,
                        "reference ms": result.spread("reference").median * 1e3,
                        "reference / kernel": str(gain),
                        "difference": apart,
                    }
                )
                report.append(
                    {"kind": name, "what": what, "tokens": plan.num_rows, "seconds": seconds, "gain": gain}
                    | {"reference_seconds": result.spread("reference"), "difference": apart}
                )
    print_table(rows)
    prompts = {row["kind"]: row["gain"] for row in report if row["what"] == "prompt"}
    print()
    for name, gain in prompts.items():
        print(verdict(name, arguments.tokens, gain))
    print_json(
        {
            "benchmark": "recurrence",
            "tokens": arguments.tokens,
            "chunk": CHUNK,
            "batch": arguments.batch,
            "draft": arguments.draft,
            "rounds": arguments.rounds,
            "device": device,
            "threads": torch.get_num_threads(),
            "dtype": arguments.dtype,
            "target": TARGET,
            "met": {name: gain.median >= TARGET for name, gain in prompts.items()},
            "all_met": all(gain.median >= TARGET for gain in prompts.values()),
            "rows": report,
        }
    )


if __name__ == "__main__":
    main()
