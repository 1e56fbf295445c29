"""The throughput of traffic of which half is exact, against the same without, by turns.

    python bench/exact.py --model DIR [--dtype bfloat16] [--requests 16] [--tokens 128] [--windows]

All requests are submitted at once, greedy, with random prompts. Each round runs them without exact
ones and with every second one exact, in turning order, on one engine, and the prefix cache is
emptied before each. Seconds are those of the process on all CPUs, so that other work does not
count. ``--windows`` verifies exact requests by windows also where rows of the model
do not depend on their batch, to see what windows cost.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from quire import LLM, SamplingParams
from quire.engine import exact as exact_windows


def seconds(llm: LLM, prompts: list[list[int]], tokens: int, *, exact: bool) -> tuple[float, list[list[int]]]:
    """Return the CPU seconds of all requests, and the tokens of those that may be exact."""
    params = [
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, exact=exact and number % 2 == 0)
        for number in range(len(prompts))
    ]
    llm._engine.reset_prefix_cache()
    began = time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    taken = time.process_time() - began
    return taken, [output.outputs[0].token_ids for output in outputs[::2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", default="512MiB")
    parser.add_argument("--windows", action="store_true")
    parser.add_argument("--rows", type=int, help="rows of a window")
    given = parser.parse_args()
    if given.rows:
        exact_windows.WINDOW = given.rows
    llm = LLM(
        given.model,
        dtype=given.dtype,
        quantization=given.quantization,
        kv_cache_memory=given.memory,
        max_num_seqs=given.requests,
        max_model_len=given.prompt + given.tokens + 64,
    )
    exact = llm._engine.exact
    dependence = exact.dependence
    if given.windows:
        exact.dependence = "windows were asked for"
    rng = random.Random(0)
    size = llm.model.vocab_size
    prompts = [[rng.randrange(size) for _ in range(given.prompt)] for _ in range(given.requests)]
    seconds(llm, prompts, 8, exact=True)
    times: dict[bool, list[float]] = {False: [], True: []}
    texts: dict[bool, list[list[int]]] = {}
    for number in range(given.rounds):
        for turn in (False, True) if number % 2 else (True, False):
            taken, texts[turn] = seconds(llm, prompts, given.tokens, exact=turn)
            times[turn].append(taken)
    (alone,) = llm.generate(
        [prompts[0]],
        SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True, exact=True),
        use_tqdm=False,
    )
    plain, half = (statistics.median(times[turn]) for turn in (False, True))
    total = given.requests * given.tokens
    print(
        json.dumps(
            {
                "model": given.model,
                "dtype": given.dtype,
                "rows depend": dependence,
                "rows": exact.size,
                "windows": llm.metrics()["quire:exact_windows_total"],
                "plain tok/s": round(total / plain, 1),
                "half exact tok/s": round(total / half, 1),
                "lost": round(1 - plain / half, 3),
                "ratios": [round(b / a, 3) for a, b in zip(times[False], times[True], strict=True)],
                "first exact one as alone": texts[True][0] == alone.outputs[0].token_ids,
                "exact ones equal to plain": sum(a == b for a, b in zip(texts[False], texts[True], strict=True)),
            }
        )
    )
    llm.close()


if __name__ == "__main__":
    main()
