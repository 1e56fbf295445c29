"""Gain of blocks in one call: decode steps with one call per block, and with separate parts, in
turns.

The model is a random checkpoint of a real shape or of ``checkpoints.DRAWN``, or that of
``--model``; the prompts have 120 tokens. *faster* is the time without over the time with, the
median of neighbouring rounds, then the least and the most.

``python bench/blocks.py [--shape smollm2-135m | --model PATH] [--dtype bfloat16] [--quantization
int4] [--batches 1,4,16] [--rounds 7] [--tokens 40]``
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from quire import LLM, SamplingParams
from quire.base.errors import QuireError, Unsupported
from quire.kernels.native_library import native_problem
from quire.models.blocks import Joinable
from quire.sessions.session import Session
from quire_bench.checkpoints import DRAWN, checkpoint, drawn
from quire_bench.reports import print_json, print_table

PROMPT = [1, 5, 9] * 40


def seconds(llm: LLM, sessions: list[Session], tokens: int) -> float:
    """Return the seconds of one step of these sessions."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(sessions, params)
    return (time.perf_counter() - started) / tokens


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table and the JSON line; return the line's content."""
    if reason := native_problem():
        raise Unsupported(f"blocks in one call: {reason}")
    options: dict[str, Any] = {"kv_cache_memory": "512MiB", "enable_prefix_caching": False}
    path = arguments.model or (drawn if arguments.shape in DRAWN else checkpoint)(arguments.shape)
    lines = []
    with LLM(str(path), dtype=arguments.dtype, quantization=arguments.quantization, **options) as llm:
        blocks = [one for one in llm.model.blocks if isinstance(one, Joinable) and one.joined is not None]
        if not blocks:
            raise Unsupported(f"{path}: no block of it runs as one call")
        joined, stack = [one.joined for one in blocks], llm.model.stack
        for batch in arguments.batches:
            sessions = [llm.session([1 + row, *PROMPT[1:]]) for row in range(batch)]
            seconds(llm, sessions, arguments.tokens)
            found: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(arguments.rounds):
                for whole in (True, False):
                    llm.model.stack = stack if whole else None
                    for block, call in zip(blocks, joined, strict=True):
                        block.joined = call if whole else None
                    found[whole].append(seconds(llm, sessions, arguments.tokens))
            ratios = [without / with_ for with_, without in zip(found[True], found[False], strict=True)]
            lines.append(
                {
                    "batch": batch,
                    "with_ms": round(statistics.median(found[True]) * 1e3, 2),
                    "without_ms": round(statistics.median(found[False]) * 1e3, 2),
                    "faster": f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                }
            )
            for session in sessions:
                session.close()
    print_table(lines)
    document = {"benchmark": "blocks", "shape": arguments.shape, "dtype": arguments.dtype}
    document |= {"model": arguments.model} if arguments.model else {}
    document |= {"quantization": arguments.quantization, "rows": lines}
    print_json(document)
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--model", help="a directory or GGUF file, instead of a shape")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--batches", type=lambda text: [int(one) for one in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=40)
    try:
        run(parser.parse_args())
    except QuireError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
