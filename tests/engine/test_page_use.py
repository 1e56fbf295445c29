"""Who has the pages: free, evictable, held, pinned, against a naive count and against giving up all
that can be.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.small_llms import WINDOW, Checkpoint, MakeLLM, check, engine_of, greedy, random_tokens

from quire import LLM
from quire.base.types import SeqId
from quire.engine.page_use import PageUse


def kinds_of_pages(llm: LLM) -> list[list[str]]:
    """Page by page, for each pool: whoever names it, the most demanding one decides."""
    engine = engine_of(llm)
    state, cache = engine.runner.state, engine.cache
    sessions = list(engine.branches.sessions.values())
    pinned = {one.request.branch.seq if one.request else one.seq for one in sessions if one.pinned or one.modified}
    pinned |= engine.branches.written()
    idle = {one.seq for one in sessions if not (one.request or one.pinned or one.modified)}
    cached = set() if cache is None else {seq for seq, entry in cache._entries.items() if not entry.live}

    def kind(seq: SeqId) -> str:
        return "pinned" if seq in pinned else "evictable" if seq in idle | cached else "held"

    found: list[list[str]] = []

    def sort(size: int, used: set[int], named: dict[SeqId, set[int]]) -> None:
        found.append([])
        for page in range(size):
            kinds = {kind(seq) for seq, pages in named.items() if page in pages}
            if page not in used:
                assert not kinds
                found[-1].append("free")
            else:
                found[-1].append(next((one for one in ("pinned", "held") if one in kinds), "evictable"))

    for index, pool in enumerate(state.sequences.pools):
        named = {seq: {*state.sequences.get(seq).tables[index].pages.tolist()} - {-1} for seq in state.sequences.ids}
        sort(pool.num_pages, set().union(*named.values()), named)
    if state.parts.recurrent is not None:
        table = state.parts.recurrent.table
        slots: dict[SeqId, set[int]] = {}
        for seq, states in table._sequences.items():
            kept = states.kept.values() if seq in engine.branches.written() else ()
            slots[seq] = {states.present, *states.nodes, *kept} - {-1}
        sort(table.pool.num_pages, set(np.flatnonzero(table.pool.references).tolist()), slots)
    return found


def naive(llm: LLM) -> PageUse:
    """The numbers of pages of each kind."""
    every = [kind for kinds in kinds_of_pages(llm) for kind in kinds]
    counts = {kind: every.count(kind) for kind in ("free", "evictable", "held", "pinned")}
    return PageUse(total=engine_of(llm).runner.state.num_pages, **counts)


class Traffic:
    """Random use of an LLM: requests half way and finished, sessions of all kinds, on prompts with
    common beginnings.
    """

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm, self.engine, self.draw = llm, engine_of(llm), random.Random(seed)
        self.sessions: list[Any] = []
        self.running: list[Any] = []

    def prompt(self) -> list[int]:
        length = self.draw.choice((2, 7, 20, 40))
        return [
            *random_tokens(self.draw.choice((0, 13, 32)), seed=1),
            *random_tokens(length, seed=self.draw.randrange(9)),
        ]

    def idle(self) -> Any:
        return self.draw.choice(self.sessions)

    def session(self, pin: bool = False) -> None:
        pin = pin or self.draw.random() < 0.25
        self.sessions.append(self.llm.session(self.prompt(), pin=pin))

    def fork(self) -> None:
        parent = self.idle()
        self.sessions.append(parent.fork(self.draw.randrange(len(parent) + 1)))

    def rewind(self) -> None:
        session = self.idle()
        session.rewind(to=self.draw.randrange(len(session) + 1))

    def append(self) -> None:
        self.idle().append(self.prompt()[:20])

    def go_on(self) -> None:
        session = self.idle()
        if 0 < len(session) < 200:
            session.generate(greedy(self.draw.randrange(1, 8)))

    def write(self) -> None:
        session = self.idle()
        if 1 < len(session) < WINDOW:  # which holds all of it
            found = session.kv(0)
            found.pop("positions", None)
            session.set_kv(0, **found)

    def close(self) -> None:
        session = self.idle()
        self.sessions.remove(session)
        session.close()

    def generate(self) -> None:
        self.llm.generate([self.prompt(), self.prompt()], greedy(self.draw.randrange(1, 6)))

    def begin(self) -> None:
        """A request, or one in a session, that stops half way."""
        if self.sessions and self.draw.random() < 0.5 and len(session := self.idle()) in range(1, 200):
            self.sessions.remove(session)
            stream = session.stream(greedy(30))
            self.running.append((session, stream))
            next(stream)
        else:
            (request,) = self.engine.submit(np.array(self.prompt()), greedy(30))
            self.running.append((request, None))
            self.engine.step()

    def end(self) -> None:
        if self.running:
            held, stream = self.running.pop(self.draw.randrange(len(self.running)))
            if stream is None:
                self.engine.end([held])
            else:
                stream.close()
                self.sessions.append(held)

    def give_up(self) -> None:
        self.engine.runner.room.make()

    def step(self) -> None:
        verbs = [self.session, self.generate, self.begin, self.end, self.give_up]
        if self.sessions:
            verbs += [self.fork, self.rewind, self.append, self.go_on, self.close, self.write]
        self.draw.choice(verbs)()

    def stop(self) -> None:
        while self.running:
            self.end()
        for session in self.sessions:
            session.close()


def checked(llm: LLM, seed: int, steps: int) -> None:
    """Count after each of ``steps`` random operations, then give up all that can be and see what is
    left.
    """
    traffic, engine = Traffic(llm, seed), engine_of(llm)
    traffic.session(pin=True)
    seen: set[str] = set()
    for _ in range(steps):
        traffic.step()
        found = engine.page_use()
        assert found == naive(llm)
        assert found.free + found.evictable + found.held + found.pinned == found.total
        seen |= {name for name in ("free", "evictable", "held", "pinned") if getattr(found, name)}
    assert seen == {"free", "evictable", "held", "pinned"}, "the traffic shows all four"
    before = engine.page_use()
    while engine.runner.room.make():
        pass
    after = engine.page_use()
    assert (after.held, after.pinned) == (before.held, before.pinned), "what is needed stays"
    recurrent = engine.runner.state.parts.recurrent
    ringed = 0 if recurrent is None else recurrent.table.num_available - recurrent.table.pool.num_free
    assert after.evictable == ringed, (
        "what was called evictable could be given up, but for rings, which give way by themselves"
    )
    assert after.free == before.free + before.evictable - ringed
    check(llm)
    traffic.stop()


@pytest.mark.turns(6)
@pytest.mark.parametrize("seed", [1, 2])
def test_counts_of_attention(make_llm: MakeLLM, checkpoint: Checkpoint, seed: int) -> None:
    checked(make_llm(checkpoint, pool=2048, page_size=4), seed, 60)


def test_counts_of_recurrent_states(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    checked(make_llm(hybrid, kv_cache_memory="4MiB", checkpoint_interval=16), 3, 60)


def test_without_a_prefix_cache(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, enable_prefix_caching=False)
    llm.generate(random_tokens(40), greedy(4))
    assert (engine_of(llm).page_use().evictable, llm.status()["kv_cache_usage"]) == (0, 0.0)


def test_copies_for_a_store_use_nothing(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path) -> None:
    """A finished request's copy is not held, be it written or not."""
    llm = make_llm(llama, store=[f"file://{tmp_path}"])
    llm.generate(random_tokens(100), greedy(4))
    engine = engine_of(llm)
    assert engine.stored.forks, "the copy stays until the engine looks again"
    use = engine.page_use()
    assert (use.evictable > 0, use.held, use.pinned) == (True, 0, 0)
    assert engine.flush(20)
    while engine.runner.room.make():
        pass
    assert not engine.stored.forks
    assert engine.page_use().free == use.total


def test_finished_requests_use_nothing(small: LLM) -> None:
    """The gauge falls back to 0, however full the cache is; status and metrics say the same."""
    names = ("free", "evictable", "held", "pinned")

    def told() -> list[int]:
        status, metrics = small.status(), small.metrics()
        found = [status[f"num_pages_{name}"] for name in names]
        assert found == [metrics[f"quire:pages_{name}"] for name in names]
        assert sum(found) == status["num_pages"]
        assert metrics["quire:kv_cache_usage_perc"] == status["kv_cache_usage"] == sum(found[2:]) / status["num_pages"]
        return found

    total = small.status()["num_pages"]
    assert told() == [total, 0, 0, 0]
    prompt = random_tokens(64)
    small.generate(prompt, greedy(1))
    assert told() == [total - 4, 4, 0, 0]
    # A request that shares all pages of the cached prefix holds them.
    (request,) = engine_of(small).submit(np.array([*prompt, 1, 2]), greedy(20), key=("", None))
    engine_of(small).step()
    assert told() == [total - 5, 0, 5, 0]
    engine_of(small).end([request])
    assert told()[2:] == [0, 0]
    small.reset_prefix_cache()
    with small.session(prompt, pin=True), small.session(prompt) as idle:
        # They share the first 62 tokens; the one before the last is run for each.
        assert told() == [total - 5, 1, 0, 4]
        idle.append(random_tokens(32))
        assert told() == [total - 7, 3, 0, 4]


def test_a_pinned_session_in_its_first_run(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequence is the request's by then."""
    engine, seen = engine_of(small), list[PageUse]()
    execute = engine.runner.execute

    def looking(step: Any, *more: Any) -> Any:
        output = execute(step, *more)
        if step.chunks:
            seen.append(engine.page_use())
        return output

    monkeypatch.setattr(engine.runner, "execute", looking)
    with small.session(random_tokens(40), pin=True):
        assert [(use.held, use.pinned) for use in seen] == [(0, 3)]


def test_an_executor_that_nobody_asked_for_has_no_counters(small: LLM) -> None:
    small.generate(random_tokens(5), greedy(2))
    assert small.status()["executor"] is None
    assert small.executor.status() == small.status()["executor"]
