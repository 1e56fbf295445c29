"""Errors of log-probabilities in bfloat16, from one process and from ranks, against float32.

The tokens of some prompts of the bundled model. *rms* is the root mean square of the errors.

``python bench/rank_errors.py [--sizes 1,2,4] [--dtype bfloat16]``
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from quire import LLM, SamplingParams
from quire_bench.reports import print_json, print_table

PROMPTS = ["def fib(n):", "class Stack:\n    def __init__(self", "import os\nimport sys\n\n\ndef main("]


def log_probabilities(size: int, dtype: str) -> list[float]:
    """Return those of all tokens but the first ones, from so many ranks."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM("tiny-python", tensor_parallel_size=size, dtype=dtype, kv_cache_memory="16MiB") as llm:
        return [
            chances[token].logprob
            for output in llm.generate(PROMPTS, params, use_tqdm=False)
            for token, chances in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
            if chances is not None
        ]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table and the JSON line; return the line's content."""
    exact, found = log_probabilities(1, "float32"), {}
    for size in map(int, arguments.sizes.split(",")):
        errors = [abs(a - b) for a, b in zip(log_probabilities(size, arguments.dtype), exact, strict=True)]
        found[size] = {"rms": statistics.fmean(e * e for e in errors) ** 0.5, "largest": max(errors)}
    print_table([{"processes": size, **{name: f"{e:.4f}" for name, e in one.items()}} for size, one in found.items()])
    report = {"tokens": len(exact), "dtype": arguments.dtype, "errors": found}
    print_json(report)
    return report


def main(argv: list[str] | None = None) -> None:
    """Read the arguments, measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sizes", default="1,2,4", help="numbers of processes")
    parser.add_argument("--dtype", default="bfloat16")
    run(parser.parse_args(argv))


if __name__ == "__main__":
    main()
