"""Prefill and decode of Quire, ``transformers``, llama.cpp and vLLM on one CPU, interleaved.

All load the same random checkpoints; ``docs/benchmarks.md`` describes the peers' installation and
settings. Each is a process of its own that is stopped while another one is measured. A round
measures the same cell on each: the time to the first of n new tokens, or of steps after contexts
that were placed before. No peer has a prefix cache.

``quire bench peers --vllm PYTHON --llama PYTHON [--quick] [--dir DIR] [--plot FILE]``
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quire_bench.checkpoints import LAG, SHAPES, Shape, checkpoint, predicted_text
from quire_bench.hardware import Hardware, free_bytes, measure
from quire_bench.peer_process import PeerFailed, PeerProcess
from quire_bench.reports import interleave, print_json, print_table, random_prompts

NAMES = ("quire", "transformers", "llama.cpp", "vllm")
DTYPES = {"bfloat16": 16.0, "float32": 32.0, "int8": 8.5, "int4": 4.5}
"""Bits of a weight, including the scale of every 32 weights."""
LEAST_OF_HEAD = 8.5
"""Least bits of a weight of the map to logits."""
WORKER = Path(__file__).with_name("peer_worker.py")
QUICK = {"shapes": "smollm2-135m", "prefill": "512", "decode": "1x128,4x128,16x128"}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement: a prompt (no steps), or steps of a batch after a context."""

    batch: int
    tokens: int
    """Tokens of each prompt."""
    steps: int = 0

    def __str__(self) -> str:
        return f"decode {self.batch} after {self.tokens}" if self.steps else f"prefill {self.tokens}"

    def room(self, rounds: int) -> int:
        """Return the number of new tokens of a sequence: all rounds', and those made while others
        are still placed."""
        return self.steps * (rounds + 1) + 2 * self.batch + self.batch * self.tokens // 1024 + 1

    @property
    def produced(self) -> int:
        """Tokens of one measured time."""
        return self.batch if self.steps else self.tokens


def possible_seconds(shape: Shape, dtype: str, cell: Cell, hardware: Hardware, rounds: int) -> float:
    """Return the least seconds by the hardware's limits: of computing or of reading, the longer
    one.

    All weights are read once, and each sequence's K and V. Computing is two operations for each
    weight and token, and attention to the tokens before; the head runs for last tokens only.
    """
    head = shape.vocab_size * shape.hidden_size
    matrices = shape.parameters - head
    kinds = ("bfloat16", "int8") if dtype.startswith("int") else (dtype,)
    peak = max(hardware["peak_tflops"][kind] for kind in kinds)
    length = cell.tokens + cell.room(rounds) // 2 if cell.steps else cell.tokens
    new, seen = (1, length) if cell.steps else (length, length / 2)
    flops = 2 * matrices * new + 4 * shape.layers * shape.heads * shape.head_size * new * seen
    flops = cell.batch * (flops + 2 * head)
    weights = matrices * DTYPES[dtype] + head * max(DTYPES[dtype], LEAST_OF_HEAD)
    read = weights / 8 + cell.batch * length * kv_bytes(shape, dtype) * bool(cell.steps)
    return max(flops / peak / 1e12, read / hardware["read_gbps"] / 1e9)


def kv_bytes(shape: Shape, dtype: str) -> int:
    """Return the bytes of a token's K and V."""
    return 2 * shape.layers * shape.kv_heads * shape.head_size * (4 if dtype == "float32" else 2)


def pool_bytes(shape: Shape, dtype: str, cell: Cell, rounds: int) -> int:
    """Return the KV memory for a cell, in pages of at most 128 tokens, with one spare page."""
    pages = -(-(cell.tokens + cell.room(rounds)) // 128) + 1
    return (cell.batch * pages + 1) * 128 * kv_bytes(shape, dtype)


class Bench:
    """The peers that have loaded one checkpoint, and their results."""

    def __init__(self, shape: str, dtype: str, rounds: int, hardware: Hardware) -> None:
        self.shape, self.dtype, self.rounds, self.hardware = shape, dtype, rounds, hardware
        self.peers: dict[str, PeerProcess] = {}
        self.about: dict[str, Any] = {}
        self.refused: dict[str, str] = {}
        self.cells: list[dict[str, Any]] = []

    def add(self, peer: PeerProcess, **load: Any) -> None:
        """Let a peer load the model, or record its refusal."""
        self.peers[peer.name] = peer
        try:
            self.about[peer.name] = peer.ask("load", **load)
        except PeerFailed as error:
            self.drop(error)

    def drop(self, error: PeerFailed) -> None:
        """Continue without a peer."""
        self.refused[error.peer] = error.reason
        self.peers.pop(error.peer).close()
        print(f"{self.shape}, {self.dtype}: without {error}", flush=True)

    def measure(self, cell: Cell) -> None:
        """Measure a cell, again without the peers that fail in it."""
        while self.peers:
            try:
                self.cells.append(self._measure(cell))
                return
            except PeerFailed as error:
                self.drop(error)
                for peer in self.peers.values():
                    peer.ask("release")

    def _measure(self, cell: Cell) -> dict[str, Any]:
        shape = SHAPES[self.shape]
        prompts = random_prompts(cell.batch, cell.tokens, shape.vocab_size, seed=cell.tokens).tolist()
        texts: dict[str, list[list[int]]] = {}

        def prefill(peer: PeerProcess) -> float:
            done = peer.ask("prefill", prompt=prompts[0])
            texts[peer.name] = [done["tokens"]]
            return float(done["seconds"])

        def decode(peer: PeerProcess) -> float:
            done = peer.ask("decode", steps=cell.steps)
            if {len(tokens) for tokens in done["tokens"]} != {cell.steps}:
                raise PeerFailed(peer.name, f"not {cell.steps} tokens for each sequence in as many steps")
            for text, tokens in zip(texts[peer.name], done["tokens"], strict=True):
                text.extend(tokens)
            return float(statistics.median(done["seconds"]))

        if cell.steps:
            for peer in self.peers.values():
                texts[peer.name] = peer.ask("place", prompts=prompts, room=cell.room(self.rounds))
        function = decode if cell.steps else prefill
        calls: dict[str, Callable[[], float]] = {peer.name: partial(function, peer) for peer in self.peers.values()}
        result = interleave(calls, self.rounds)
        for peer in self.peers.values():
            peer.ask("release")
        possible = possible_seconds(shape, self.dtype, cell, self.hardware, self.rounds)
        return {
            "cell": str(cell),
            "batch": cell.batch,
            "tokens": cell.tokens,
            "steps": cell.steps,
            "possible_tokens_per_second": cell.produced / possible,
            "peers": {
                name: {
                    "seconds": result.seconds[name],
                    "tokens_per_second": cell.produced / result.spread(name).median,
                    "of_possible": possible / result.spread(name).median,
                    "over_quire": result.ratios[name] if "quire" in calls else None,
                    "text": first_difference(shape, prompts, texts[name]),
                }
                for name in calls
            },
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return the table's rows: each cell's peers below each other."""
        return [
            {
                "cell": cell["cell"],
                "runtime": name,
                "tok/s": found["tokens_per_second"],
                "of possible": f"{found['of_possible']:.0%}",
                "time over Quire's": found["over_quire"] or "",
                "text": "equal" if found["text"] is None else f"differs at token {found['text']}",
            }
            for cell in self.cells
            for name, found in cell["peers"].items()
        ]

    def report(self) -> dict[str, Any]:
        """Return this checkpoint's part of the JSON line."""
        return {
            "shape": self.shape,
            "dtype": self.dtype,
            "about": self.about,
            "refused": self.refused,
            "cells": self.cells,
        }


def first_difference(shape: Shape, prompts: list[list[int]], texts: list[list[int]]) -> int | None:
    """Return the index of the first new token that differs from the predicted text.

    So all texts are compared with one right text: see ``checkpoints.py``.
    """
    found = []
    for prompt, text in zip(prompts, texts, strict=True):
        right = predicted_text(shape, prompt, len(text))
        found += [index for index, pair in enumerate(zip(text, right, strict=True)) if pair[0] != pair[1]][:1]
    return min(found, default=None)


@contextmanager
def started(name: str, python: str, threads: int, log: Path) -> Iterator[PeerProcess]:
    """Start a peer with its environment, and end it."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if python == sys.executable:  # it needs this package, wherever this process found it
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    if name.startswith("vllm"):
        environment |= vllm_environment(Path(python), sorted(os.sched_getaffinity(0))[:threads])
    peer = PeerProcess(name, [python, str(WORKER), name], environment, log)
    try:
        yield peer
    finally:
        peer.close()


def vllm_environment(python: Path, processors: Sequence[int]) -> dict[str, str]:
    """Return the variables that vLLM sets for its own worker processes, because its engine runs in
    one process.

    Only so each step can be timed, and the engine stops between two of them.
    """
    listed = ",".join(map(str, processors))
    openmp = [str(path) for path in (python.parent.parent / "lib").glob("libiomp5.so")]
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_AOT_COMPILE": "0",  # on CPUs, vLLM 0.32 cannot load its own AOT-compiled code
        "VLLM_CPU_OMP_THREADS_BIND": listed,
        "LD_PRELOAD": ":".join([*filter(None, [os.environ.get("LD_PRELOAD")]), *openmp]),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{listed}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }


def run(options: argparse.Namespace, pythons: dict[str, str], directory: Path) -> list[dict[str, Any]]:
    """Measure all cells of all checkpoints; print their tables, and return their reports."""
    threads, rounds = options.threads, options.rounds
    hardware = measure(threads=threads, seconds=options.hardware_seconds)
    peaks = ", ".join(f"{name} {rate:.2f}" for name, rate in hardware["peak_tflops"].items())
    print(f"{hardware['device']}, {threads} threads: reads {hardware['read_gbps']:.1f} GB/s; TFLOP/s: {peaks}")
    reports = []
    for name in options.shapes:
        model = checkpoint(name, directory=directory)
        for dtype in options.dtypes:
            bench = Bench(name, dtype, rounds, hardware)
            cells = fitting(SHAPES[name], dtype, options.cells, rounds, len(pythons))
            quantization = dtype if dtype.startswith("int") else None
            # Rounded up, so that vLLM reuses its compiled code in other cells and rounds.
            length = -(-max((cell.tokens + cell.room(rounds) for cell in cells), default=0) // 1024) * 1024
            whole = (length + 128) * kv_bytes(SHAPES[name], dtype)  # vLLM requires room for one sequence of that length
            with ExitStack() as stack:
                for peer, python in pythons.items() if cells else ():
                    log = directory / f"{peer}.log"
                    bench.add(
                        stack.enter_context(started(peer, python, threads, log)),
                        model=str(model),
                        dtype="bfloat16" if quantization else dtype,
                        quantization=quantization,
                        threads=threads,
                        length=length,
                        batch=max(cell.batch for cell in cells),
                        kv_bytes=max(whole, *(pool_bytes(SHAPES[name], dtype, cell, rounds) for cell in cells)),
                    )
                for cell in cells:
                    bench.measure(cell)
            print(f"\n{name}, {dtype}:")
            print_table(bench.rows())
            reports.append(bench.report())
    print_json({"benchmark": "peers", "rounds": rounds, "hardware": hardware, "models": reports})
    return reports


def fitting(shape: Shape, dtype: str, cells: Sequence[Cell], rounds: int, peers: int) -> list[Cell]:
    """Return the cells whose weights and contexts fit into memory for all peers at once."""
    free, kept = free_bytes(torch.device("cpu")), []
    for cell in cells:
        # Weights need at most the size of float32: some peers widen them, or keep a second, packed
        # copy.
        needed = peers * (4 * shape.parameters + pool_bytes(shape, dtype, cell, rounds))
        if not free or needed < free:
            kept.append(cell)
        else:
            print(f"{dtype}, {cell}: left out, {peers} peers may take {needed >> 20} MiB of {free >> 20}; try --peers")
    return kept


def plot(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw each checkpoint's cells: bars of the reached share of the possible speed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3 * len(reports)), layout="constrained")
    for axes, report in zip(figure.subplots(len(reports), squeeze=False)[:, 0], reports, strict=True):
        names = list(report["about"])
        for index, name in enumerate(names):
            shares = [cell["peers"].get(name, {"of_possible": 0.0})["of_possible"] for cell in report["cells"]]
            axes.bar([x + 0.8 * index / len(names) for x in range(len(shares))], shares, 0.8 / len(names), label=name)
        axes.set_xticks([x + 0.4 for x in range(len(report["cells"]))], [cell["cell"] for cell in report["cells"]])
        axes.set_title(f"{report['shape']}, {report['dtype']}: share of what the hardware allows")
        axes.legend()
    figure.savefig(path)


def parse_cells(prefill: str, decode: str, steps: int) -> list[Cell]:
    """Parse ``128,512`` and ``1x128,4x1024`` (batch and context).

    Raises:
        ValueError: another form, or prompts that are too short for a predicted text.
    """
    cells = [Cell(batch=1, tokens=int(part)) for part in filter(None, prefill.split(","))]
    for part in filter(None, decode.split(",")):
        batch, tokens = map(int, part.split("x"))
        cells.append(Cell(batch=batch, tokens=tokens, steps=steps))
    if not cells or any(cell.batch < 1 or cell.tokens <= LAG for cell in cells):
        raise ValueError(f"cells of at least one sequence, and of prompts longer than {LAG} tokens, are needed")
    return cells


def chosen_pythons(options: argparse.Namespace) -> dict[str, str]:
    """Return the interpreter of each peer: the requested ones, or those that are installed.

    Raises:
        ValueError: an unknown peer, or one that is not installed; with advice.
    """
    found = {"quire": sys.executable}
    for name, module, given in (
        ("transformers", "transformers", ""),
        ("llama.cpp", "llama_cpp", options.llama),
        ("vllm", "vllm", options.vllm),
    ):
        if given or importlib.util.find_spec(module):
            found[name] = given or sys.executable
    for name in options.peers or ():
        if name not in NAMES:
            raise ValueError(f"--peers {name}: there are {', '.join(NAMES)}")
        if name not in found:
            raise ValueError(f"--peers {name}: not installed here; see docs/benchmarks.md, --llama and --vllm")
    return {name: found[name] for name in NAMES if name in (options.peers or found)}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; ``cells`` and ``pythons`` are derived from several options."""

    def listed(known: Sequence[str]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            names = text.split(",")
            if unknown := [name for name in names if name not in known]:
                raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(known)}")
            return names

        return parse

    parser = argparse.ArgumentParser("quire bench peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smallest shape, few cells: 3 minutes")
    parser.add_argument("--shapes", type=listed(list(SHAPES)), default="smollm2-135m,qwen3-0.6b,llama-3.2-1b")
    parser.add_argument("--dtypes", type=listed(list(DTYPES)), default="bfloat16", help=", ".join(DTYPES))
    parser.add_argument("--prefill", default="128,512,2048", help="lengths of prompts")
    default = ",".join(f"{batch}x{context}" for context in (128, 1024, 4096) for batch in (1, 4, 16))
    parser.add_argument("--decode", default=default, help="batches x contexts")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=lambda text: text.split(","), help=f"{', '.join(NAMES)}; all that are there")
    parser.add_argument("--llama", default="", metavar="PYTHON", help="the interpreter that has llama_cpp and gguf")
    parser.add_argument("--vllm", default="", metavar="PYTHON", help="the interpreter that has vllm")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--hardware-seconds", type=float, default=10.0, help="time for bandwidth and GEMM peak")
    parser.add_argument("--dir", type=Path, help="keep checkpoints here (7 GB and more); else they are temporary")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="needs matplotlib")
    if parser.parse_known_args(arguments)[0].quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args(arguments)
    try:
        options.cells = parse_cells(options.prefill, options.decode, options.steps)
        options.pythons = chosen_pythons(options)
    except ValueError as error:
        parser.error(str(error))
    if min(options.steps, options.rounds, options.threads) < 1:
        parser.error("--steps, --rounds and --threads must be 1 or greater")
    if options.plot and not importlib.util.find_spec("matplotlib"):
        parser.error("--plot needs matplotlib; pip install matplotlib")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = parsed(arguments)
    with tempfile.TemporaryDirectory(prefix="quire-peers-") as scratch:
        directory = (options.dir or Path(scratch)).expanduser().resolve()
        directory.mkdir(parents=True, exist_ok=True)
        reports = run(options, options.pythons, directory)
    if options.plot:
        plot(reports, options.plot)
    wrong = [
        f"{report['shape']}, {name}, {cell['cell']}: token {found['text']} differs"
        for report in reports
        for cell in report["cells"]
        for name, found in cell["peers"].items()
        if report["dtype"] == "float32" and found["text"] is not None
    ]
    if wrong:
        raise SystemExit("texts in float32 must be equal:\n" + "\n".join(wrong))
