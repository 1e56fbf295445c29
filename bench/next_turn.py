"""Gain of running an answer again in idle time, in the form in which the next prompt begins.

A turn has a prompt, a thought and an answer; the next prompt has the answer without the thought,
and a question. Four ways in turn, each with the seconds to the next turn's first token: the history
is not run again; it was run again before; the question arrives while it is run, after one step of
that; and the same question in a conversation without thoughts, the lower bound.

``python bench/next_turn.py [--model tiny-python] [--prompt 1000] [--thought 300] [--answer 600]
[--question 30] [--rounds 5]``
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from numpy.typing import NDArray

from quire import LLM, SamplingParams
from quire_bench.reports import interleave, print_json, print_table

COLD, HOT, BROKEN_OFF, PLAIN = "not run again", "run again", "broken off", "without thoughts"


class Conversation:
    """Two turns, with new tokens in each round."""

    def __init__(self, llm: LLM, sizes: tuple[int, int, int, int]) -> None:
        self.llm, self.sizes = llm, sizes
        self.rng = np.random.default_rng(0)
        self.one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)

    def turn(self, way: str) -> float:
        """Return the seconds to the first token of the second turn."""
        llm, engine = self.llm, self.llm.engine
        llm.reset_prefix_cache()
        prompt, thought, answer, question = (self._tokens(size) for size in self.sizes)
        history = np.concatenate((prompt, answer))
        llm.prefetch((history if way == PLAIN else np.concatenate((prompt, thought, answer))).tolist())
        if way == HOT:
            llm.prefetch(history.tolist(), only_idle=True)
        if way == BROKEN_OFF:
            engine.submit_prefix(history, key=("", None), only_idle=True)
            engine.step()
        began = time.perf_counter()
        llm.generate(np.concatenate((history, question)).tolist(), self.one)
        return time.perf_counter() - began

    def _tokens(self, count: int) -> NDArray[np.int64]:
        return self.rng.integers(10, self.llm.engine.checks.vocab_size, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-python")
    for name, count in (("prompt", 1000), ("thought", 300), ("answer", 600), ("question", 30), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=count)
    options = parser.parse_args()
    with LLM(options.model) as llm:
        talk = Conversation(llm, (options.prompt, options.thought, options.answer, options.question))
        ways = (COLD, HOT, BROKEN_OFF, PLAIN)
        found = interleave({way: lambda way=way: talk.turn(way) for way in ways}, options.rounds)  # type: ignore[misc]
    spreads = {way: found.spread(way) for way in ways}
    least = spreads[PLAIN].median
    print_table(
        [
            {"way": way, "first token, s": str(spread), "over the least": f"{spread.median / least:.2f}"}
            for way, spread in spreads.items()
        ]
    )
    report = {way: spread.median for way, spread in spreads.items()}
    print_json({"benchmark": "next turn", **vars(options), "seconds": report})


if __name__ == "__main__":
    main()
