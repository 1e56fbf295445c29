"""State that is copied before it has to leave the pool: evictions find it copied, and make nothing
while others wait.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.small_llms import Checkpoint, MakeLLM, check, engine_of, greedy, random_tokens

from quire import LLM
from quire.branches.object_writer import ObjectWriter, WriteJob
from quire.contracts.store import ObjectKey, ObjectKind
from quire.engine import engine
from quire.store.memory import MemoryTier
from quire.store.stack import Store

from .test_stored_state import check_store, force, memory_of, squeeze, stored_of

PROMPTS = [random_tokens(24, seed=seed) for seed in range(3)]
SECONDS = 20.0


def made(llm: LLM) -> list[str]:
    """From now on, the threads that make objects."""
    stored, found = stored_of(llm), list[str]()
    pack = stored._pack

    def noting(*given: Any) -> Any:
        found.append(threading.current_thread().name)
        return pack(*given)

    stored._pack = noting  # type: ignore[method-assign]
    return found


def keys(count: int) -> list[ObjectKey]:
    return [ObjectKey(bytes(20), ObjectKind.ROWS, 1, bytes([index]) * 20) for index in range(count)]


def test_what_would_go_next_is_copied_before(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    """All of it in the other thread; what it says is the same then."""
    llm = make_llm(checkpoint, pool=96, page_size=4)
    force(llm)
    threads = made(llm)
    llm.generate(PROMPTS[0], greedy(2))
    assert not threads, "there is room"
    for prompt in PROMPTS[1:]:
        llm.generate(prompt, greedy(2))
    assert engine_of(llm).flush(SECONDS)
    assert set(threads) == {"quire-write"}
    cache = engine_of(llm).cache
    assert cache is not None
    (first,) = cache.next_to_go(1)
    assert stored_of(llm).ahead[first] == cache.length(first)
    before = memory_of(llm).stat_now().objects
    assert before > 0
    assert engine_of(llm).branches.evict()
    assert memory_of(llm).stat_now().objects == before
    assert set(threads) == {"quire-write"}
    squeeze(llm)
    assert not stored_of(llm).ahead
    assert not stored_of(llm).forks
    for prompt in PROMPTS:
        (output,) = llm.generate(prompt, greedy(6))
        assert output.outputs[0].token_ids == checkpoint.greedy(prompt, 6)
        assert output.reuse.by_tier["memory"] >= 16
    check_store(llm)


def test_what_is_not_copied_yet_is_copied_at_once(
    make_llm: MakeLLM, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a writer that does not come to it, and its forks keep no pages."""
    monkeypatch.setattr(ObjectWriter, "_run", lambda self: None)
    monkeypatch.setattr(engine, "CLOSE_SECONDS", 0.0)
    llm = make_llm(checkpoint, pool=96, page_size=4)
    force(llm)
    for prompt in PROMPTS:
        llm.generate(prompt, greedy(2))
    stored = stored_of(llm)
    assert stored.forks
    assert stored.ahead
    # Forks of what is still cached keep no pages from others.
    if not engine_of(llm).runner.state.recurrent_ids:
        assert not stored.drop_pending_writes()
    squeeze(llm)
    assert not stored.forks
    assert engine_of(llm).runner.state.empty()
    assert stored._writer is not None
    for prompt in PROMPTS:
        (output,) = llm.generate(prompt, greedy(6))
        assert output.outputs[0].token_ids == checkpoint.greedy(prompt, 6)
        assert output.reuse.by_tier["memory"] >= 16
    check(llm)
    llm.close()  # while it waits for no writer


def test_a_reset_ends_copies(make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was forgotten does not come into memory later."""
    gate, begun = threading.Event(), threading.Event()
    llm = make_llm(llama, pool=96, page_size=4)
    stored = force(llm)
    pack = stored._pack

    def slow(*given: Any) -> Any:
        begun.set()
        assert gate.wait(SECONDS)
        return pack(*given)

    monkeypatch.setattr(stored, "_pack", slow)
    for prompt in PROMPTS:
        llm.generate(prompt, greedy(2))
    assert begun.wait(SECONDS)
    threading.Timer(0.05, gate.set).start()
    llm.reset_prefix_cache()
    assert engine_of(llm).flush(SECONDS)
    assert memory_of(llm).stat_now().objects == 0
    assert llm.generate(PROMPTS[0], greedy(2))[0].num_cached_tokens == 0


def test_jobs_that_are_cancelled_do_not_wait_for_others() -> None:
    """Only one whose object is being made is waited for."""
    store, gate, begun = Store([MemoryTier(1 << 20)]), threading.Event(), threading.Event()
    writer = ObjectWriter(store)

    def slow() -> bytes:
        begun.set()
        assert gate.wait(SECONDS)
        return b"1"

    first, second, third, fourth = keys(4)
    writer.add(WriteJob(1, [(first, slow), (second, lambda: b"2")], durable=False, source=10))
    writer.add(WriteJob(2, [(third, lambda: b"3")], durable=False, source=20))
    writer.add(WriteJob(3, [(fourth, lambda: b"4")], durable=False, source=30))
    assert begun.wait(SECONDS)
    assert [(job.seq, job.cancelled) for job in writer.collect(lambda job: job.source == 20)] == [(2, True)]
    assert not writer.collect()
    threading.Timer(0.05, gate.set).start()
    found = writer.collect(lambda job: job.source == 10)
    assert [(job.seq, job.cancelled) for job in found[:1]] == [(1, True)]
    assert writer.wait(SECONDS)
    found += writer.collect()
    assert [(job.seq, job.cancelled, job.nbytes) for job in found] == [(1, True, 1), (3, False, 1)]
    assert store.memory is not None
    assert store.memory.contains_now([first, second, third, fourth]) == [True, False, False, True]
    writer.close()
    store.close()
