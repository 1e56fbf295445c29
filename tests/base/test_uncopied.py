"""Live objects are not copied: a copy would give back what the original still uses."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM, AsyncLLM, SamplingParams, Unsupported

WAYS = [copy.copy, copy.deepcopy, pickle.dumps]


def refused(way: Callable[[Any], object], live: object) -> None:
    with pytest.raises(Unsupported, match=rf"{type(live).__name__} objects are live and cannot be copied or pickled; "):
        way(live)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_refused_and_the_original_keeps_its_state(way: Callable[[Any], object]) -> None:
    with LLM("tiny-python", dtype="float32", kv_cache_memory="8MiB") as llm:
        session, other = llm.session("def f(x):\n", pin=True), llm.session("x = ")
        cache = llm.executor.create_kv_cache(capacity=16)
        before = repr(llm), repr(session)
        stream = other.stream(SamplingParams(max_tokens=4))
        for live in (llm, llm.executor, session, cache, stream):
            refused(way, live)
        stream.close()
        assert (repr(llm), repr(session)) == before


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_what_is_awaited_is_refused(way: Callable[[Any], object]) -> None:
    async def run() -> None:
        async with AsyncLLM("tiny-python", dtype="float32", kv_cache_memory="8MiB") as llm:
            stream = llm.stream("x = ", SamplingParams(max_tokens=4))
            for live in (llm, await llm.session("x"), stream):
                refused(way, live)
            assert sum(len(delta.token_ids) for delta in [one async for one in stream]) == 4

    asyncio.run(run())
