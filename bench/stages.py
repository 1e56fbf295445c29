"""Two pipeline stages of one core each, against one process of two cores: prompts and decodes.

    python bench/stages.py MODEL [--tokens 512]

Prints seconds of a long prompt's first token, with and without micro-batches, and tokens a second
of decodes; and whether the texts are equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from quire import LLM, SamplingParams
from quire.runner import micro_batches


def measured(model: str, tokens: int, sequences: int, rounds: int, **options: Any) -> dict[str, Any]:
    """Return medians of one engine."""
    with LLM(model, kv_cache_memory="512MiB", enable_prefix_caching=False, **options) as llm:
        prompts = [[7 + (11 * number + place) % 900 for place in range(tokens)] for number in range(rounds)]
        llm.generate([prompts[0]], SamplingParams(temperature=0, max_tokens=2))
        first, texts = [], []
        for prompt in prompts:
            start = time.perf_counter()
            (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1))
            first.append(time.perf_counter() - start)
            texts.append(output.outputs[0].token_ids)
        found: dict[str, Any] = {"prompt": statistics.median(first)}
        for count in (1, sequences):
            short = [prompt[:16] for prompt in prompts[:1] * count]
            params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
            rates = []
            for _ in range(rounds):
                start = time.perf_counter()
                outputs = llm.generate(short, params)
                rates.append(32 * count / (time.perf_counter() - start))
            found[f"decode {count}"] = statistics.median(rates)
            texts += [output.outputs[0].token_ids for output in outputs]
    return {**found, "texts": texts}


def main() -> None:
    """Measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    least = micro_batches.LEAST_ROWS
    for name, stages, rows_of in (("one process", 1, least), ("2 stages", 2, least), ("2 stages, whole", 2, 1 << 30)):
        micro_batches.LEAST_ROWS = rows_of
        options = {"dtype": given.dtype, "pipeline_parallel_size": stages}
        rows[name] = measured(given.model, given.tokens, given.sequences, given.rounds, **options)
    texts = [row.pop("texts") for row in rows.values()]
    for name, row in rows.items():
        print(f"{name:18}" + "".join(f"{what:>12} {value:8.3f}" for what, value in row.items()))
    print(json.dumps({"benchmark": "stages", "model": given.model, "rows": rows, "equal": texts[0] == texts[1]}))


if __name__ == "__main__":
    main()
