"""Two ranks of one core each, as slices and as stages, against one process of two cores. Decodes
take turns in stages, or run as whole batches.

    python bench/ranks.py [--model DIR] [--shape llama-3.2-1b] [--dtype bfloat16] [--rounds 5]

Each layout is a process of its own, which waits while another one is measured; the layouts take
turns. Prints tokens per second of prompts and of decodes, and the median over the rounds of each
layout's speed over that of one process, with its range.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

from quire import LLM, SamplingParams
from quire.models.catalogue import resolve_model
from quire_bench.checkpoints import checkpoint
from quire_bench.reports import Spread, print_json, print_table, random_prompts

LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "two slices": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "two stages, whole batches": {"pipeline_parallel_size": 2, "async_scheduling": False},
}
SHORT = 32
"""Tokens of a prompt whose decode is measured."""
COLLAPSING = 15.0
"""Seconds in which the weights of all layouts move into huge pages."""


def serve(pipe: Connection, model: str, options: dict[str, Any]) -> None:
    """Measure each task of the pipe: tokens of a prompt, sequences, decoded tokens, and a seed."""
    with LLM(model, enable_prefix_caching=False, kv_cache_memory="1GiB", **options) as llm:
        pipe.send(None)
        vocab_size = json.loads((resolve_model(model) / "config.json").read_text())["vocab_size"]
        while (task := pipe.recv()) is not None:
            length, batch, count, seed = task
            prompts = random_prompts(batch, length, vocab_size, seed=seed).tolist()
            begin = time.perf_counter()
            first = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
            middle = time.perf_counter()
            outputs = first
            if count:
                outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1 + count, ignore_eos=True))
            texts = [output.outputs[0].token_ids for output in outputs]
            # The prompts run again before a decode; what they take is known.
            seconds = time.perf_counter() - middle - (middle - begin) if count else middle - begin
            pipe.send((batch * (count or length) / seconds, texts))


@contextmanager
def opened(model: str, options: dict[str, Any]) -> Iterator[Connection]:
    """Give the pipe to a process that has loaded a layout."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, model, options))
    process.start()
    theirs.close()
    try:
        ours.recv()
        yield ours
        ours.send(None)
    finally:
        process.join()


def main() -> None:
    """Measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint in place of the shape")
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 2048], help="tokens")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=24, help="decoded tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    model = given.model or str(checkpoint(given.shape))
    tasks = {f"prompt {length}": (length, 1, 0) for length in given.prompts}
    tasks |= {f"batch {batch}": (SHORT, batch, given.steps) for batch in given.batches}
    rates: dict[str, dict[str, list[float]]] = {name: {layout: [] for layout in LAYOUTS} for name in tasks}
    same = dict.fromkeys(tasks, True)
    with ExitStack() as stack:
        pipes = {
            layout: stack.enter_context(opened(model, {"dtype": given.dtype, **sizes}))
            for layout, sizes in LAYOUTS.items()
        }
        for number in range(-1, given.rounds):  # The first round warms up.
            if not number:
                time.sleep(COLLAPSING)
            for name, task in tasks.items():
                texts = []
                for layout in list(LAYOUTS)[:: 1 if number % 2 else -1]:
                    pipes[layout].send((*task, number + 2))
                    rate, text = pipes[layout].recv()
                    texts.append(text)
                    if number >= 0:
                        rates[name][layout].append(rate)
                same[name] &= all(text == texts[0] for text in texts)
    rows, found = [], {}
    for name, by_layout in rates.items():
        one_rates = by_layout["one process"]
        ratios = {
            layout: Spread.of([rate / whole for rate, whole in zip(own, one_rates, strict=True)])
            for layout, own in by_layout.items()
        }
        rows.append(
            {"": name, "one process, tokens/s": f"{Spread.of(one_rates)}"}
            | {layout: str(ratios[layout]) for layout in LAYOUTS if layout != "one process"}
            | {"texts": "equal" if same[name] else "differ"}
        )
        found[name] = {layout: by_layout[layout] for layout in LAYOUTS}
    print_table(rows)
    print_json({"benchmark": "ranks", "model": model, "dtype": given.dtype, "rates": found, "equal": same})


if __name__ == "__main__":
    main()
