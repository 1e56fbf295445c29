"""Attention over pages on a CPU: the C++ kernels against PyTorch's attention.

Decodes and prompts of models' shapes: ``native`` reads K and V in place, ``torch`` is the backend
that gathers pages for PyTorch's kernel, and ``contiguous`` is that kernel alone on contiguous K and
V, without a page table. Each measured time is that of all layers, one after the other, as in a
decode, so that the data are not in caches. K and V are in memory like the pool's.

For decodes: bytes of K and V by time, and their share of the bandwidth of memory. That bandwidth is
measured in the same rounds, because it drifts: by the fastest method of ``quire_bench.hardware``
without packing weights, the maximum of many integers. Last, for each shape, whether the share is 80
%.

``--levels`` also times other instructions of this processor in the same rounds, such as those
without tiles on one with AMX: ``--levels AVX512-BF16 --prompt 512,2048,8192 --context 4096,32768``.

``python bench/attention.py [--context 4096] [--prompt 2048] [--batch 1,4,16] [--rounds 15] [--dtype
bfloat16] [--levels NAMES] [--heads NAME ...] [--pool 256] [--small]``
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quire.contracts.attention import AttentionBackend, ForwardPlan, Scoring
from quire.contracts.kv_format import PlainRows
from quire.kernels.attention.cpu_attention import LEVELS, NativeAttention
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kv.storage import lazy_zeros
from quire_bench.hardware import measure
from quire_bench.reports import Comparison, Spread, interleave, print_json, print_table

TARGET = 0.8
"""Target share of the read bandwidth for a decode."""
PAGE_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """Heads of a layer."""

    kv_heads: int
    group: int
    size: int


SHAPES = {
    "64, grouped": Shape(3, 3, 64),
    "64": Shape(9, 1, 64),
    "128, grouped": Shape(8, 4, 128),
    "128": Shape(8, 1, 128),
}


class Work:
    """Layers of one shape, and ``count`` new tokens at the end of ``keys`` in each of ``batch``
    sequences with pages in any order."""

    def __init__(self, shape: Shape, batch: int, keys: int, count: int, dtype: torch.dtype, pool_bytes: int) -> None:
        width = -(-keys // PAGE_SIZE)
        slots = batch * width * PAGE_SIZE
        self.scoring = Scoring(shape.size**-0.5)
        self.bytes = 2 * batch * keys * shape.kv_heads * shape.size * dtype.itemsize
        # Each query sees half of the new tokens on average.
        self.operations = 4 * batch * count * (keys - count / 2) * shape.kv_heads * shape.group * shape.size
        pages = np.random.default_rng(0).permutation(batch * width).astype(np.int32).reshape(batch, width)
        self.plan = ForwardPlan(
            page_size=PAGE_SIZE,
            counts=np.full(batch, count),
            keys=np.full(batch, keys),
            origins=np.zeros(batch, dtype=np.int64),
            starts=np.arange(batch + 1) * count,
            tables=tuple(pages),
            positions=np.tile(np.arange(keys - count, keys), batch),
            rules=(None,) * batch,
            device=torch.device("cpu"),
        )
        self.count = count
        self.batch, self.keys = batch, keys
        self.dtype = dtype
        layers = max(1, min(32, pool_bytes // self.bytes))
        # Memory like the pool's, which is in huge pages where the system has them.
        sizes = slots, shape.kv_heads, shape.size
        self.layers = [(lazy_zeros(sizes, dtype).normal_(), lazy_zeros(sizes, dtype).normal_()) for _ in range(layers)]
        self.q_THD = torch.randn(batch * count, shape.kv_heads * shape.group, shape.size).to(dtype)

    def paged(self, backend: AttentionBackend) -> Callable[[], None]:
        """Return the call of all layers through the page table."""
        prepared = backend.plan(self.plan, self.dtype)

        def run() -> None:
            for k, v in self.layers:
                backend.run(prepared, self.q_THD, None, PlainRows(k, v), self.scoring)

        return run

    def contiguous(self) -> Callable[[], None]:
        """Return PyTorch's call on the same numbers, contiguous."""
        q = self.q_THD.unflatten(0, (self.batch, self.count)).transpose(1, 2)

        def run() -> None:
            for layer in self.layers:
                k, v = (x.unflatten(0, (self.batch, -1))[:, : self.keys].transpose(1, 2) for x in layer)
                scaled_dot_product_attention(q, k, v, is_causal=self.count > 1, enable_gqa=True)

        return run


def compared(work: Work, read: Tensor, levels: list[str], rounds: int) -> Comparison:
    """Time all layers in each way, and the reading of ``read``."""

    def read_all() -> None:
        read.amax()

    ways: dict[str, Callable[[], float | None]] = {
        "native": work.paged(NativeAttention()),
        "read": read_all,
        "torch": work.paged(SdpaAttention()),
        "contiguous": work.contiguous(),
    } | {level: work.paged(NativeAttention(level)) for level in levels}
    return interleave(ways, rounds, warmup=2)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Attention over pages on a CPU against PyTorch's.")
    parser.add_argument("--context", default="4096", help="keys of a decode, numbers with commas")
    parser.add_argument("--prompt", default="2048", help="tokens of a prompt, numbers with commas")
    parser.add_argument("--batch", default="1,4,16", help="sequences of a decode")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--levels", default="", help=f"other instructions, with commas: {', '.join(LEVELS)}")
    parser.add_argument(
        "--heads", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="sizes and kinds of heads"
    )
    parser.add_argument("--pool", type=int, default=256, help="MiB of K and V that the layers of a decode have")
    parser.add_argument("--small", action="store_true", help="small sizes, to see that it runs")
    arguments = parser.parse_args()
    contexts, prompts, batches = (
        [int(text) for text in texts.split(",")] for texts in (arguments.context, arguments.prompt, arguments.batch)
    )
    levels = arguments.levels.split(",") if arguments.levels else []
    if arguments.small:
        contexts, prompts, arguments.rounds, arguments.pool, batches = [64], [32], 2, 1, [1, 2]
    if min(*contexts, *prompts, arguments.rounds, arguments.pool, *batches) < 1:
        parser.error("--context, --prompt, --batch, --rounds and --pool must be 1 or greater")
    if unknown := set(levels) - set(LEVELS):
        parser.error(f"--levels: {', '.join(sorted(unknown))} given; there are {', '.join(LEVELS)}")
    dtype = getattr(torch, arguments.dtype)
    limits = measure(seconds=0.2, buffer_bytes=1 << 20) if arguments.small else measure(seconds=5)
    read = torch.zeros(max(1, limits["buffer_bytes"] // 4), dtype=torch.int32)
    rows, report = [], []
    with torch.inference_mode():
        for name in arguments.heads:
            shape = SHAPES[name]
            works = [("decode", batch, context, 1) for context in contexts for batch in batches]
            for what, batch, keys, count in [*works, *(("prompt", 1, prompt, prompt) for prompt in prompts)]:
                reads = count == 1
                # Layers of a prompt need not exceed caches: it computes.
                work = Work(shape, batch, keys, count, dtype, arguments.pool << 20 if reads else 0)
                result = compared(work, read, levels, arguments.rounds)
                seconds = {way: result.spread(way) for way in result.seconds}
                total, taken = work.bytes * len(work.layers), seconds["native"].median
                shares = Spread.of(
                    [
                        total / mine / (read.nbytes / roof)
                        for mine, roof in zip(result.seconds["native"], result.seconds["read"], strict=True)
                    ]
                )
                rows.append(
                    {
                        "head": name,
                        "what": what,
                        "batch": batch,
                        "keys": keys,
                        "layers": len(work.layers),
                        "native ms": taken * 1e3,
                        "torch / native": str(result.ratios["torch"]),
                        "contiguous / native": str(result.ratios["contiguous"]),
                        **{f"{level} / native": str(result.ratios[level]) for level in levels},
                        "GB/s": total / taken / 1e9 if reads else "",
                        "read GB/s": read.nbytes / seconds["read"].median / 1e9,
                        "of roof": str(shares) if reads else "",
                        "GFLOP/s": "" if reads else work.operations * len(work.layers) / taken / 1e9,
                    }
                )
                report.append(
                    {"head": name, "what": what, "batch": batch, "keys": keys, "layers": len(work.layers)}
                    | {"seconds": seconds, "ratios": result.ratios, "share": shares if reads else None}
                )
    roof = limits["read_gbps"]
    print(f"{limits['device']}; {limits['threads']} threads; reads {roof:.1f} GB/s at first; {NativeAttention().level}")
    print_table(rows)
    found = {
        (row["head"], row["batch"], row["keys"]): row["share"].median for row in report if row["share"] is not None
    }
    print()
    for (head, batch, keys), share in found.items():
        verdict = "reached" if share >= TARGET else "missed"
        print(f"decode of {batch} x {keys}, heads of {head}: {share:.0%} of the read bandwidth; {TARGET:.0%} {verdict}")
    print_json(
        {
            "benchmark": "attention",
            "level": NativeAttention().level,
            "dtype": arguments.dtype,
            "context": contexts,
            "prompt": prompts,
            "rounds": arguments.rounds,
            "threads": torch.get_num_threads(),
            "read_gbps": roof,
            "target": TARGET,
            "all_met": all(share >= TARGET for share in found.values()),
            "rows": report,
        }
    )


if __name__ == "__main__":
    main()
