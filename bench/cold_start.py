"""The first token of a cold process: imports, loading, one step. Files are in the page cache.

Each round starts a new process, whose prompt is a short text. Times are medians in seconds;
*beyond torch* is all but ``import torch``, *processor* the processor time of that in all threads,
which says more than the clock on a busy machine. *Peak* is the largest resident memory, mapped
files included.

``python bench/cold_start.py MODEL [MODEL ...] [--rounds 5] [--dtype auto]``
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from quire_bench.reports import print_json, print_table

PARTS = ("import torch", "import quire", "load", "first token")
PROGRAM = """
import json, resource, sys, time
times = [time.perf_counter()]
import torch
times.append(time.perf_counter())
begun = time.process_time()
from quire import LLM, SamplingParams
times.append(time.perf_counter())
llm = LLM(sys.argv[1], dtype=sys.argv[2], kv_cache_memory="256MiB", max_model_len=2048)
times.append(time.perf_counter())
prompt = [5, 6, 7, 8] if llm.tokenizer is None else "def f(x):"
llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1))
times.append(time.perf_counter())
processor = time.process_time() - begun
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([[end - start for start, end in zip(times, times[1:])], peak / 1024, llm.model.parameter_bytes / 2**20, processor]))
"""


def measure(model: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Return the row of a model."""
    # Byte code is kept, as for any user, from the first process on, which is not counted.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found = []
    for _ in range(rounds + 1):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, model, dtype],
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        found.append(json.loads(done.stdout))
    times = [statistics.median(one) for one in zip(*(times for times, *_ in found[1:]), strict=True)]
    return {
        "model": model,
        **dict(zip(PARTS, times, strict=True)),
        "beyond torch": sum(times[1:]),
        "processor": statistics.median(processor for *_, processor in found[1:]),
        "peak MiB": round(max(peak for _, peak, *_ in found)),
        "weights MiB": round(found[0][2]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    lines = [measure(model, options.dtype, options.rounds) for model in options.models]
    print_table(lines)
    print_json({"benchmark": "cold_start", "rounds": options.rounds, "dtype": options.dtype, "models": lines})


if __name__ == "__main__":
    main()
