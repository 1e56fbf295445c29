"""Speculation by lookup against plain decoding, interleaved, with equal texts.

Edits of functions of the standard library (add a docstring, add type hints, rename a parameter),
answers to free questions, and an agent's turns that copy a tool's result. Each task runs with and
without speculation in one process, by turns; the table has the median ratio of the times between
first and last token, and the drafts. ``--peers`` adds transformers' prompt lookup.

``python bench/speculative.py --model DIR [--dtype auto] [--quantization int4] [--tasks 60]
[--tokens 256] [--batches 1,4,16]``
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch

from quire import LLM, RequestOutput, SamplingParams
from quire_bench.reports import print_json, print_table

MODULES = (
    "textwrap", "shlex", "bisect", "heapq", "colorsys", "fnmatch", "glob", "posixpath", "shutil", "statistics",
    "string", "calendar", "difflib", "inspect", "json.decoder", "json.encoder", "random", "quopri", "base64", "copy",
)  # fmt: skip
EDITS = (
    "Add a docstring to this function. Answer with the whole function only.",
    "Add type hints to this function. Answer with the whole function only.",
    "Rename the first parameter of this function to `value`. Answer with the whole function only.",
)
FREE = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain how a bicycle stays upright.",
    "What should one know before keeping bees?",
    "Describe the water cycle to a child.",
    "Compare tea and coffee in ten sentences.",
    "Why do cities grow along rivers?",
    "Write an email that declines an invitation politely.",
    "How does a compiler differ from an interpreter?",
)


def functions(count: int) -> Iterator[str]:
    """Yield sources of functions of 8 to 45 lines."""
    found = 0
    for name in MODULES:
        module: ModuleType = __import__(name, fromlist=["_"])
        for function in vars(module).values():
            if not isinstance(function, FunctionType) or function.__module__ != module.__name__:
                continue
            source = textwrap.dedent(inspect.getsource(function))
            if 8 <= source.count("\n") <= 45:
                yield source
                found += 1
                if found == count:
                    return


def tasks(kind: str, count: int) -> list[list[dict[str, str]]]:
    """Return conversations of one kind."""
    if kind == "free":
        return [[{"role": "user", "content": FREE[number % len(FREE)]}] for number in range(min(count, len(FREE)))]
    sources = list(functions(count))
    if kind == "edit":
        return [
            [{"role": "user", "content": f"{EDITS[number % len(EDITS)]}\n\n```python\n{source}```"}]
            for number, source in enumerate(sources)
        ]
    return [
        [
            {"role": "user", "content": "Open helper.py and show me its content, unchanged."},
            {"role": "assistant", "content": "I will read the file."},
            {"role": "user", "content": f"[tool result of read_file]\n{source}\nNow show it."},
        ]
        for source in sources
    ]


def seconds_of(outputs: Sequence[RequestOutput]) -> float:
    """Return the time from the first token of the batch to its end."""
    starts = [one.metrics.first_token_time for one in outputs]
    ends = [one.metrics.finished_time for one in outputs]
    return max(end for end in ends if end) - max(start for start in starts if start)


def measured(llm: LLM, kind: str, given: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Run the tasks of one kind with and without speculation, by turns."""
    found = tasks(kind, given.tasks)
    base = {"temperature": 0.0, "max_tokens": given.tokens}
    ratios, drafted, accepted, steps, tokens, equal = [], 0, 0, 0, 0, 0
    plain_seconds = drafting_seconds = 0.0
    for first in range(0, len(found), batch):
        group, runs = found[first : first + batch], {}
        order = (False, True) if (first // batch) % 2 else (True, False)
        llm.chat(group, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)  # the prompts' state
        for speculative in order:
            params = SamplingParams(**base, speculative=speculative)
            runs[speculative] = llm.chat(group, params, use_tqdm=False)
        plain, drafting = runs[False], runs[True]
        equal += sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(plain, drafting, strict=True))
        plain_seconds += seconds_of(plain)
        drafting_seconds += seconds_of(drafting)
        ratios.append(seconds_of(plain) / max(seconds_of(drafting), 1e-9))
        tokens += sum(len(one.outputs[0].token_ids) for one in drafting)
        for one in drafting:
            if one.speculation is not None:
                drafted, accepted = drafted + one.speculation.drafted, accepted + one.speculation.accepted
                steps += one.speculation.steps
        print(f"{kind} {batch}: {ratios[-1]:.2f}", flush=True)
    return {
        "kind": kind,
        "batch": batch,
        "tasks": len(found),
        "tokens": tokens,
        "equal": equal,
        "ratio": plain_seconds / drafting_seconds,
        "median": statistics.median(ratios),
        "least": min(ratios),
        "tokens/s plain": tokens / plain_seconds,
        "tokens/s": tokens / drafting_seconds,
        "drafted": drafted,
        "accepted": accepted,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--kinds", default="edit,agent,free")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    rows: list[dict[str, Any]] = []
    with LLM(
        given.model,
        dtype=given.dtype,
        quantization=given.quantization,
        max_model_len=4096,
        kv_cache_memory="1GiB",
        speculative="lookup",
    ) as llm:
        llm.chat([[{"role": "user", "content": "Hello"}]], SamplingParams(max_tokens=8), use_tqdm=False)
        for kind in given.kinds.split(","):
            for batch in map(int, given.batches.split(",")):
                rows.append(measured(llm, kind, given, batch))
                print_table(rows[-1:])
    print_table(rows)
    print_json({"bench": "speculative", "rows": rows})


if __name__ == "__main__":
    main()
