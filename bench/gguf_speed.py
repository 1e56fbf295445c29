"""Decode and prompts of GGUF files: weights in the blocks of the file, the same ones expanded to
the dtype of activations, and llama.cpp on the same file, interleaved.

Each is a process of its own that is stopped while another one is measured. Prompts are random
tokens, texts are greedy. In float32 texts of Quire must be equal. In bfloat16 expanded weights are
rounded, and llama.cpp rounds activations to 8 bits, so the table says where a text differs first.

``python bench/gguf_speed.py FILE [FILE ...] [--dtype bfloat16] [--llama PYTHON] [--rounds 5]``
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from quire_bench.peer_process import PeerFailed, PeerProcess
from quire_bench.peer_table import Cell, parse_cells, started
from quire_bench.reports import interleave, print_json, print_table, random_prompts

WORKERS = {"blocks": "quire", "expanded": "quire-expanded", "llama.cpp": "llama.cpp"}
"""Names of the candidates and of their workers."""
TOKENS = 5000
"""Ids of prompts are below it, so that any vocabulary has them."""
KV_BYTES = 1 << 30


def measure(peers: dict[str, PeerProcess], cell: Cell, rounds: int) -> dict[str, Any]:
    """Return the seconds of a cell by candidate, and their texts."""
    prompts = random_prompts(cell.batch, cell.tokens, TOKENS, seed=cell.tokens).tolist()
    texts: dict[str, list[list[int]]] = {}

    def prefill(name: str) -> float:
        done = peers[name].ask("prefill", prompt=prompts[0])
        texts[name] = [done["tokens"]]
        return float(done["seconds"])

    def decode(name: str) -> float:
        done = peers[name].ask("decode", steps=cell.steps)
        for text, tokens in zip(texts[name], done["tokens"], strict=True):
            text.extend(tokens)
        return statistics.median(done["seconds"])

    if cell.steps:
        for name, peer in peers.items():
            texts[name] = peer.ask("place", prompts=prompts, room=cell.room(rounds))
    function = decode if cell.steps else prefill
    calls: dict[str, Callable[[], float]] = {name: (lambda name=name: function(name)) for name in peers}
    result = interleave(calls, rounds)
    for peer in peers.values():
        peer.ask("release")
    return {
        "cell": str(cell),
        "peers": {
            name: {
                "tokens_per_second": cell.produced / result.spread(name).median,
                "seconds": result.seconds[name],
                "over_blocks": result.ratios[name],
                "differs_at": first_difference(texts["blocks"], texts[name]),
            }
            for name in calls
        },
    }


def first_difference(texts: list[list[int]], others: list[list[int]]) -> int | None:
    """Return the index of the first token that differs; None if texts are equal as far as both
    go."""
    found = [
        index
        for text, other in zip(texts, others, strict=True)
        for index, (one, two) in enumerate(zip(text, other, strict=False))
        if one != two
    ]
    return min(found, default=None)


def rows(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the table's rows."""
    return [
        {
            "cell": cell["cell"],
            "weights": name,
            "tok/s": found["tokens_per_second"],
            "time over blocks'": str(found["over_blocks"]),
            "text": "equal" if found["differs_at"] is None else f"differs at token {found['differs_at']}",
        }
        for cell in cells
        for name, found in cell["peers"].items()
    ]


def run(options: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """Measure all cells of all files; print their tables and the JSON line; return the reports."""
    reports = []
    for file in options.files:
        names = [name for name in WORKERS if name != "llama.cpp" or options.llama]
        with ExitStack() as stack:
            peers: dict[str, PeerProcess] = {}
            about: dict[str, Any] = {}
            for name in names:
                python = options.llama if name == "llama.cpp" else sys.executable
                peers[name] = stack.enter_context(
                    started(WORKERS[name], python, options.threads, directory / f"{name}.log")
                )
                about[name] = peers[name].ask(
                    "load",
                    model=str(file.resolve()),
                    dtype=options.dtype,
                    quantization=None,
                    threads=options.threads,
                    length=options.length,
                    batch=max(cell.batch for cell in options.cells),
                    kv_bytes=KV_BYTES,
                )
            cells = [measure(peers, cell, options.rounds) for cell in options.cells]
        print(f"\n{file.name}, {options.dtype}, {options.threads} threads:")
        print_table(rows(cells))
        reports.append({"file": file.name, "about": about, "cells": cells})
    settings = {"dtype": options.dtype, "rounds": options.rounds, "threads": options.threads}
    print_json({"benchmark": "gguf_speed", **settings, "files": reports})
    return reports


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations")
    parser.add_argument("--prefill", default="128,512", help="lengths of prompts")
    parser.add_argument("--decode", default="1x128,4x128,8x128,16x128", help="batches x contexts")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama", default="", metavar="PYTHON", help="the interpreter that has llama_cpp")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(arguments)
    try:
        options.cells = parse_cells(options.prefill, options.decode, options.steps)
    except ValueError as error:
        parser.error(str(error))
    longest = max(cell.tokens + cell.room(options.rounds) for cell in options.cells)
    options.length = -(-longest // 128) * 128
    with tempfile.TemporaryDirectory(prefix="quire-gguf-") as scratch:
        try:
            reports = run(options, Path(scratch))
        except PeerFailed as error:
            parser.error(str(error))
    wrong = [
        f"{report['file']}, {cell['cell']}"
        for report in reports
        for cell in report["cells"]
        if options.dtype == "float32" and cell["peers"]["expanded"]["differs_at"] is not None
    ]
    if wrong:
        raise SystemExit("texts of blocks and of expanded weights must be equal:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
