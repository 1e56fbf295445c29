"""Prefill and decode of models with recurrent layers or experts, beside ``transformers``, as shares
of the hardware's limits.

Random checkpoints (``checkpoints.drawn``) of a gated delta net, a Mamba-2 hybrid, a model with
short convolutions, and one with 4 of 32 experts. Each runtime is a process of its own that is
stopped while the other one is measured. A round measures the same cell on each: the time to the
first token of a prompt, or of steps after contexts that were placed before.

*of possible* is the least time by the limits of the hardware over the measured one: computing at
the peak of matrix products, or reading all weights once, K and V, and reading and writing the
recurrent states, whichever takes longer. The rate of reading is the median of those before each of
Quire's turns, since it varies with a machine's neighbours. Of experts those are read that a batch
of as many random choices is expected to have. With ``--quantization`` the bytes of plain weights
still count, so the share says how much faster than these it is.

``python bench/hybrids.py [--shapes qwen3.5-325m,bamba-250m,lfm2-245m,qwen3-moe-669m]
[--dtype bfloat16] [--quantization int4] [--no-peer] [--rounds 3] [--quick] [--small] [--dir DIR]``
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open

from quire_bench.checkpoints import DEFAULT_DIRECTORY, DRAWN, drawn
from quire_bench.hardware import Hardware, Reads, measure
from quire_bench.peer_process import PeerFailed, PeerProcess
from quire_bench.peer_table import Cell, parse_cells, started
from quire_bench.reports import interleave, print_json, print_table, random_prompts

SHAPES = ("qwen3.5-325m", "bamba-250m", "lfm2-245m", "qwen3-moe-669m")
SMALL = ("qwen3.5-small", "bamba-small", "lfm2-small", "qwen3-moe-small")
BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Costs:
    """What a model reads, writes and computes, in numbers."""

    matrices: int
    """Weights that every token multiplies, without the map to logits."""
    experts: int
    """Weights of experts, of which a token takes ``chosen`` parts."""
    chosen: float
    head: int
    kept: int
    """Elements of a state in the model's dtype."""
    wide: int
    """Elements of a state in float32, of all layers."""
    kv: int
    """Elements of K and V of a token."""
    scores: int
    """Elements of the query heads of all layers."""

    def possible_seconds(self, dtype: str, cell: Cell, hardware: Hardware, read_gbps: float, rounds: int) -> float:
        """Return the least seconds for a cell by the hardware's limits."""
        size, peak = BYTES[dtype], hardware["peak_tflops"][dtype]
        length = cell.tokens + cell.room(rounds) // 2 if cell.steps else cell.tokens
        new, seen = (1, length) if cell.steps else (length, length / 2)
        # A recurrence reads its state by a key, writes it and reads it by a query: two operations
        # each. Without the delta rule it does not do the first.
        multiplied = 2 * (self.matrices + self.experts * self.chosen)
        flops = cell.batch * (2 * self.head + new * (multiplied + 4 * self.wide + 4 * self.scores * seen))
        read = 1 - (1 - self.chosen) ** (cell.batch * (1 if cell.steps else cell.tokens))
        moved = (self.matrices + self.experts * read + self.head) * size
        if cell.steps:
            moved += cell.batch * (length * self.kv * size + 2 * (self.kept * size + 4 * self.wide))
        return float(max(flops / peak / 1e12, moved / read_gbps / 1e9))


def costs_of(path: Path) -> Costs:
    """Return the costs of a checkpoint of ``DRAWN``, whose heads are not tied."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    matrices = head = experts = 0
    with safe_open(path / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            shape = tensors.get_slice(name).get_shape()
            if ".experts." in name:
                experts += math.prod(shape)
            elif len(shape) == 2 and "embed" not in name:
                matrices, head = (
                    matrices + shape[0] * shape[1] * ("head" not in name),
                    max(head, shape[0] * shape[1] * ("head" in name)),
                )
    layers = config["num_hidden_layers"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kept = wide = 0
    if config["model_type"] == "bamba":
        attending = len(config["attn_layer_indices"])
        heads, width, state = config["mamba_n_heads"], config["mamba_d_head"], config["mamba_d_state"]
        kept = (config["mamba_d_conv"] - 1) * (heads * width + 2 * config["mamba_n_groups"] * state)
        wide = heads * width * state
    elif config["model_type"] == "qwen3_moe":
        attending = layers
    else:
        attending = config["layer_types"].count("full_attention")
        if config["model_type"] == "lfm2":
            kept = (config["conv_L_cache"] - 1) * config["hidden_size"]
        else:
            keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
            values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
            kept = (config["linear_conv_kernel_dim"] - 1) * (2 * keys + values)
            wide = values * config["linear_key_head_dim"]
    recurrent = layers - attending
    return Costs(
        matrices,
        experts,
        config.get("num_experts_per_tok", 0) / config.get("num_experts", config.get("num_local_experts", 1)),
        head,
        recurrent * kept,
        recurrent * wide,
        2 * attending * config["num_key_value_heads"] * size,
        attending * config["num_attention_heads"] * size,
    )


class Bench:
    """The runtimes that have loaded one checkpoint."""

    def __init__(self, name: str, path: Path, options: argparse.Namespace, hardware: Hardware, reads: Reads) -> None:
        self.name, self.options, self.hardware, self.reads = name, options, hardware, reads
        self.costs = costs_of(path)
        self.vocabulary: int = DRAWN[name][1]["vocab_size"]
        self.peers: dict[str, PeerProcess] = {}

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Return the figures of a cell. ``PeerFailed``."""
        prompts = random_prompts(cell.batch, cell.tokens, self.vocabulary, seed=cell.tokens).tolist()
        rounds, texts = self.options.rounds, dict[str, list[list[int]]]()
        rates = list[float]()

        def prefill(peer: PeerProcess) -> float:
            done = peer.ask("prefill", prompt=prompts[0])
            texts[peer.name] = [done["tokens"]]
            return float(done["seconds"])

        def decode(peer: PeerProcess) -> float:
            done = peer.ask("decode", steps=cell.steps)
            for text, tokens in zip(texts[peer.name], done["tokens"], strict=True):
                text.extend(tokens)
            return float(statistics.median(done["seconds"]))

        if cell.steps:
            for peer in self.peers.values():
                texts[peer.name] = peer.ask("place", prompts=prompts, room=cell.room(rounds))

        def turn(peer: PeerProcess) -> float:
            if peer.name == "quire":
                rates.append(self.reads.gbps())
            return (decode if cell.steps else prefill)(peer)

        calls: dict[str, Callable[[], float]] = {peer.name: partial(turn, peer) for peer in self.peers.values()}
        result = interleave(calls, rounds)
        for peer in self.peers.values():
            peer.ask("release")
        rate = statistics.median(rates)
        possible = self.costs.possible_seconds(self.options.dtype, cell, self.hardware, rate, rounds)
        found: dict[str, Any] = {"cell": str(cell), "read_gbps": rate, "possible_seconds": possible}
        for name in calls:
            seconds = result.spread(name).median
            found[name] = {
                "seconds": result.seconds[name],
                "tokens_per_second": cell.produced / seconds,
                "of_possible": possible / seconds,
                "over_quire": result.ratios[name],
                "equal_tokens": equal_tokens(texts["quire"], texts[name]),
            }
        return found


def equal_tokens(ours: list[list[int]], theirs: list[list[int]]) -> str:
    """Return the number of tokens before the first difference of each text, of all, as ``n/m``."""
    equal = 0
    for pair in zip(ours, theirs, strict=True):
        same = [one == other for one, other in zip(*pair, strict=False)]
        equal += same.index(False) if False in same else len(same)
    return f"{equal}/{sum(map(len, ours))}"


def rows_of(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the table's rows."""
    return [
        {
            "cell": cell["cell"],
            "reads GB/s": cell["read_gbps"],
            "runtime": name,
            "ms": 1e3 * statistics.median(found["seconds"]),
            "tok/s": found["tokens_per_second"],
            "of possible": f"{found['of_possible']:.0%}",
            "time over Quire's": found["over_quire"] or "",
            "tokens equal": found["equal_tokens"],
        }
        for cell in cells
        for name, found in cell.items()
        if isinstance(found, dict)
    ]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all cells of all checkpoints; print tables and the JSON line, whose content is
    returned."""
    hardware = measure(threads=options.threads, seconds=options.hardware_seconds)
    peaks = ", ".join(f"{name} {rate:.2f}" for name, rate in hardware["peak_tflops"].items())
    print(f"{hardware['device']}, {options.threads} threads: reads {hardware['read_gbps']:.1f} GB/s; TFLOP/s: {peaks}")
    reads, models = Reads(hardware["buffer_bytes"]), []
    with tempfile.TemporaryDirectory(prefix="quire-hybrids-") as logs:
        for name in options.shapes:
            path = drawn(name, directory=options.dir)
            bench = Bench(name, path, options, hardware, reads)
            length = max(cell.tokens + cell.room(options.rounds) for cell in options.cells)
            batch = max(cell.batch for cell in options.cells)
            states = 4 * (bench.costs.wide + bench.costs.kept)
            with ExitStack() as stack:
                for peer in ("quire", *(() if options.no_peer else ("transformers",))):
                    log = Path(logs, f"{peer}.log")
                    process = stack.enter_context(started(peer, sys.executable, options.threads, log))
                    process.ask(
                        "load",
                        model=str(path),
                        dtype=options.dtype,
                        quantization=options.quantization if peer == "quire" else None,
                        threads=options.threads,
                        length=length,
                        batch=batch,
                        # Of each sequence: its present state, the one before, the next one, and its
                        # rows of K and V.
                        kv_bytes=4 * batch * (states + 4 * bench.costs.kv * length) + (64 << 20),
                    )
                    bench.peers[peer] = process
                cells = [bench.measure(cell) for cell in options.cells]
            print(f"\n{name}, {options.quantization or options.dtype}:")
            print_table(rows_of(cells))
            models.append({"shape": name, "cells": cells})
    document = {
        "benchmark": "hybrids",
        "dtype": options.dtype,
        "quantization": options.quantization,
        "threads": options.threads,
        "rounds": options.rounds,
        "hardware": hardware,
        "models": models,
    }
    print_json(document)
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=list(SHAPES))
    parser.add_argument("--dtype", choices=tuple(BYTES), default="bfloat16")
    parser.add_argument("--quantization", choices=("int8", "int4"), help="of Quire's weights")
    parser.add_argument("--prefill", default="512,2048", help="lengths of prompts")
    parser.add_argument("--decode", default="1x128,4x128,16x128", help="batches x contexts")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--quick", action="store_true", help="without prompts of 2,048 tokens, two rounds")
    parser.add_argument("--small", action="store_true", help="tiny models and few tokens, to see that it runs")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--hardware-seconds", type=float, default=10.0, help="time for bandwidth and GEMM peak")
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY, help="keep checkpoints here")
    known = parser.parse_known_args()[0]
    if known.quick:
        parser.set_defaults(prefill="512", rounds=2)
    if known.small:
        small = {"prefill": "40", "decode": "2x20", "steps": 2, "rounds": 1, "hardware_seconds": 0.5}
        parser.set_defaults(shapes=list(SMALL), **small)
    options = parser.parse_args()
    if unknown := [name for name in options.shapes if name not in (*SHAPES, *SMALL)]:
        parser.error(f"--shapes has {', '.join(unknown)}; there are {', '.join((*SHAPES, *SMALL))}")
    if min(options.steps, options.rounds, options.threads) < 1:
        parser.error("--steps, --rounds and --threads must be 1 or greater")
    try:
        options.cells = parse_cells(options.prefill, options.decode, options.steps)
        run(options)
    except (ValueError, PeerFailed) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
