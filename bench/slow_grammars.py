"""Cost of a slow grammar for others: a stream beside requests whose grammar is highly ambiguous.

Three ways in turn: the stream alone; beside ``--slow`` such requests, whose masks are made beside
the engine (``quire.grammars.slow_masks``); and beside them with their masks made in the engine's
steps, as if no grammar counted as slow. For each the median and the longest time between two tokens
of the stream, its tokens per second, and the number of rounds with the same tokens as alone. The
slow requests are sent again whenever they reach the limit of their grammar.

``python bench/slow_grammars.py [--model tiny-python] [--slow 2] [--tokens 960] [--rounds 3]
[--warm-up 5]``
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire import AsyncLLM, SamplingParams
from quire.base.errors import ResourceExhausted
from quire.grammars import slow_masks
from quire_bench.reports import print_json, print_table

ALONE, BESIDE, WITHIN = "alone", "masks beside the engine", "masks in the steps"
GRAMMAR = 'start: s\ns: s s | s s s | "x" | ""'


@dataclass
class Found:
    """The results of one way, over its rounds."""

    gaps: list[float] = field(default_factory=list)
    """Seconds between two tokens."""
    seconds: float = 0.0
    tokens: list[list[int]] = field(default_factory=list)
    slow_tokens: int = 0
    ended: int = 0
    """Number of slow requests that reached the limit."""


async def slow_requests(llm: AsyncLLM, params: SamplingParams, found: Found) -> None:
    """Send slow requests one after the other, until cancelled."""
    while True:
        try:
            async with llm.stream("x = ", params) as stream:
                async for delta in stream:
                    found.slow_tokens += len(delta.token_ids)
        except ResourceExhausted:
            found.ended += 1


async def measure(llm: AsyncLLM, way: str, options: argparse.Namespace, found: Found) -> None:
    usual = slow_masks.SLOW_SECONDS
    slow_masks.SLOW_SECONDS = float("inf") if way == WITHIN else usual
    params = SamplingParams(temperature=0, max_tokens=options.tokens, structured_outputs={"grammar": GRAMMAR})
    others = [
        asyncio.create_task(slow_requests(llm, params, found)) for _ in range(0 if way == ALONE else options.slow)
    ]
    try:
        await asyncio.sleep(options.warm_up if others else 0)
        plain = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
        tokens: list[int] = []
        started = last = time.perf_counter()
        async with llm.stream("class Stack:\n", plain) as stream:
            async for delta in stream:
                now = time.perf_counter()
                if tokens:
                    found.gaps += [(now - last) / len(delta.token_ids)] * len(delta.token_ids)
                last = now
                tokens += delta.token_ids
        found.seconds += time.perf_counter() - started
        found.tokens.append(tokens)
    finally:
        for task in others:
            task.cancel()
        for ended in await asyncio.gather(*others, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        slow_masks.SLOW_SECONDS = usual


async def run(options: argparse.Namespace) -> Mapping[str, Found]:
    found = {way: Found() for way in (ALONE, BESIDE, WITHIN)}
    async with await asyncio.to_thread(AsyncLLM, options.model, max_model_len=options.tokens + 64) as llm:
        for _ in range(options.rounds):
            for way, one in found.items():
                await measure(llm, way, options, one)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-python")
    parser.add_argument("--slow", type=int, default=2, help="slow requests at a time")
    parser.add_argument("--tokens", type=int, default=960, help="of the stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--warm-up", type=float, default=5.0, help="seconds that the slow requests have before the stream"
    )
    options = parser.parse_args()
    found = asyncio.run(run(options))
    expected = found[ALONE].tokens[0]
    rows, report = [], {}
    for way, one in found.items():
        longest = max(one.gaps)
        rate = sum(map(len, one.tokens)) / one.seconds
        same = sum(tokens == expected for tokens in one.tokens)
        median = statistics.median(one.gaps)
        report[way] = {
            "tokens_per_second": rate,
            "median_gap_ms": median * 1e3,
            "longest_gap_ms": longest * 1e3,
            "same_tokens": [same, len(one.tokens)],
            "slow_tokens": one.slow_tokens,
            "slow_requests_ended": one.ended,
        }
        rows.append(
            {
                "way": way,
                "tok/s": f"{rate:.0f}",
                "median gap, ms": f"{median * 1e3:.2f}",
                "longest gap, ms": f"{longest * 1e3:.0f}",
                "same tokens": f"{same} of {len(one.tokens)}",
                "tokens of slow grammars": one.slow_tokens,
            }
        )
    print(f"A stream of {options.tokens} tokens beside {options.slow} slow grammars, {options.model}")
    print_table(rows)
    print_json({"benchmark": "slow grammars", **vars(options), "found": report})


if __name__ == "__main__":
    main()
