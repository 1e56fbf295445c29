"""An interrupt at any line of loading, unloading and running leaves adapters whole: nothing runs
under the wrong one, ids stay unique, and what was broken off can be done again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest
import torch
from tests.small_llms import Checkpoint, MakeLLM, engine_of, greedy, random_tokens

from quire import LLM
from quire.adapters.pool import AdapterPool
from quire.adapters.targets import linears_of
from quire.base.types import Add, Chunk, Remove, Step
from quire.contracts.adapters import Adapter, LowRankUpdate

PROMPT = random_tokens(19)


@contextmanager
def interrupted_at(line: int, names: tuple[str, ...]) -> Iterator[list[int]]:
    """``KeyboardInterrupt`` before the ``line``-th line that runs in functions of these names of
    the pool; yields how many ran.
    """
    seen = [0]

    def within(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            seen[0] += 1
            if seen[0] == line:
                raise KeyboardInterrupt
        return within

    def tracer(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        return within if code.co_filename.endswith("adapters/pool.py") and code.co_name in names else None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        yield seen
    finally:
        sys.settrace(before)


def some_adapter(llm: LLM, seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    updates = tuple(
        LowRankUpdate(
            linear=name,
            row=0,
            a_RI=torch.randn(2, linear.in_features, generator=generator) * 0.1,
            b_RO=torch.randn(2, linear.out_features, generator=generator) * 0.1,
        )
        for name, linear in linears_of(llm.model).items()
    )
    return Adapter(fingerprint=f"seed {seed}", updates=updates)


def logits(llm: LLM, adapter: int | None) -> torch.Tensor:
    """Of ``PROMPT`` in one forward."""
    runner = engine_of(llm).runner
    seq = runner.new_seq()
    runner.execute(Step(edits=(Add(seq),)))
    try:
        return runner.execute(Step(chunks=(Chunk(seq, PROMPT, adapter=adapter),))).logits_RV
    finally:
        runner.execute(Step(edits=(Remove(seq),)))


def each_line(act: Callable[[int], bool]) -> int:
    """Call ``act`` with 1, 2, ...

    until it says that it was not interrupted; how many lines there are.
    """
    line = 1
    while act(line):
        line += 1
    assert line > 3, "nothing was interrupted"
    return line


def test_the_end_of_a_forward(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, enable_prefix_caching=False)
    pool: AdapterPool = engine_of(llm).runner.adapters
    base = logits(llm, None)
    one = pool.load(some_adapter(llm, 1))
    under = logits(llm, one)

    def act(line: int) -> bool:
        with interrupted_at(line, ("deactivate",)) as seen, suppress(KeyboardInterrupt):
            logits(llm, one)
        assert torch.equal(logits(llm, None), base), f"line {line}"
        assert torch.equal(logits(llm, one), under), f"line {line}"
        return seen[0] >= line

    each_line(act)


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_loading_and_unloading(make_llm: MakeLLM, llama: Checkpoint, verb: str) -> None:
    llm = make_llm(llama, enable_prefix_caching=False)
    pool: AdapterPool = engine_of(llm).runner.adapters
    base = logits(llm, None)
    first, second = some_adapter(llm, 1), some_adapter(llm, 2)
    kept = pool.load(first)
    under = logits(llm, kept)
    given = {kept}

    def act(line: int) -> bool:
        other = -1 if verb == "load" else pool.load(second)
        given.add(other)
        with interrupted_at(line, ("load", "unload", "_forget", "_leave", "_enter", "_settle")) as seen:
            try:
                if verb == "load":
                    other = pool.load(second)
                else:
                    pool.unload(other)
            except KeyboardInterrupt:
                pass
        for left in pool.ids:
            if left != kept:
                pool.unload(left)
        again = pool.load(second)
        assert again not in given, f"line {line}: id {again} was given before"
        given.update((other, again))
        pool.unload(again)
        assert pool.ids == (kept,)
        assert torch.equal(logits(llm, kept), under), f"line {line}"
        assert torch.equal(logits(llm, None), base), f"line {line}"
        return seen[0] >= line

    each_line(act)
    pool.unload(kept)
    assert all(linear.low_rank is None for linear in linears_of(llm.model).values())
    assert not pool.host_bytes
    assert not pool.device_bytes
    assert llm.generate(PROMPT, greedy(1))[0].outputs[0].finish_reason == "length"
