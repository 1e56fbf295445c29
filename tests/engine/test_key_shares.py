"""Keys share places, pages and the tokens of steps: against bounds, and a naive count of tokens."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tests.small_llms import Checkpoint, MakeLLM, check, engine_of, greedy, random_tokens, token_ids

from quire import LLM
from quire.base.caller_context import Caller, on_behalf_of
from quire.engine.request import Request, Status
from quire.engine.request_queues import LAG, KeyShares
from quire.engine.scheduler import HEADROOM, OVERTAKING

from .made_requests import QuestionToTiers
from .test_scheduler import World


class Clients:
    """Clients of several keys on a ``World``: each request ends with so many tokens."""

    def __init__(self, **options: int) -> None:
        self.world = World(caching=False, **options)
        self.ends: dict[Request, int] = {}
        self.computed: Counter[str] = Counter()
        self.live: dict[Request, None] = {}
        self.waits: dict[Request, int] = {}
        """Steps before the first token."""

    def weigh(self, **weights: float) -> None:
        for key, weight in weights.items():
            self.world.scheduler.queues.shares.set_weight(key, weight)

    def submit(self, owner: str, prompt: int, output: int = 1, **options: object) -> Request:
        request = self.world.submit(prompt, owner=owner, **options)
        self.ends[request], self.waits[request], self.live[request] = prompt + output, 0, None
        return request

    def step(self) -> Counter[str]:
        """Run a step. Return how many tokens it had for each key."""
        scheduler, new = self.world.scheduler, [one for one in self.live if not one.seat.admitted]
        preempted = scheduler.num_preemptions
        scheduled = self.world.step()
        assert not scheduled.failed
        tokens: Counter[str] = Counter()
        for request, chunk in zip(scheduled.requests, scheduled.step.chunks, strict=True):
            tokens[request.asked.owner] += len(chunk.tokens)
        assert len(scheduled.requests) <= scheduler.limits.max_num_seqs
        if tokens.total() < scheduler.limits.max_num_batched_tokens and preempted == scheduler.num_preemptions:
            self.check_that_none_fits()
        for request in new:
            self.waits[request] += request not in scheduled.requests
        for request in scheduled.requests:
            if len(request.branch.tokens) > self.ends[request]:
                self.world.finish(request)
                del self.live[request]
        self.computed += tokens
        return tokens

    def check_that_none_fits(self) -> None:
        """A step with room for more has none for any request that waits, but behind one that has
        waited for pages too long."""
        scheduler, pages = self.world.scheduler, self.world.pages
        if len(scheduler.running) >= scheduler.limits.max_num_seqs:
            return
        if any(
            scheduler._steps - (one.seat.short_since or scheduler._steps) >= OVERTAKING for one in scheduler.waiting
        ):
            return
        for key in {one.asked.owner for one in scheduler.waiting}:
            first = next(one for one in scheduler.waiting if one.asked.owner == key)
            room = HEADROOM if first.seat.num_preemptions else 0
            growth = sum(pages.grown(one.branch.seq, one.branch.remaining + room) for one in scheduler.running)
            lacking = growth + -(-len(first.branch.tokens) // pages.SIZE) - (pages.num_pages - pages.used)
            assert lacking > 0, key


def test_a_long_prompt_of_one_key_keeps_no_small_one_out() -> None:
    clients = Clients(num_pages=1000, budget=32)
    clients.submit("a", 2000)
    clients.step()
    small = clients.submit("b", 20)
    assert clients.step() == {"b": 20, "a": 12}
    assert small.seat.status is Status.RUNNING
    assert clients.step() == {"b": 1, "a": 31}


def test_a_thousand_requests_of_one_key_do_not_hold_another_up() -> None:
    clients = Clients(num_pages=4000, seqs=8, budget=64)
    crowd = [clients.submit("a", 10, 50) for _ in range(1000)]
    for _ in range(5):
        clients.step()
    for _ in range(20):
        small = clients.submit("b", 12, 2)
        for _ in range(2):
            clients.step()
        assert small.branch.computed, "it starts within two steps"
        while small.seat.status is not Status.FINISHED:
            clients.step()
        displaced = [one for one in crowd if one.seat.num_preemptions]
        assert displaced
        assert all(
            one.branch.seq is not None and one.branch.computed
            for one in displaced
            if one.seat.status is not Status.FINISHED
        )


def test_places_that_a_key_cannot_use_are_not_kept_for_it() -> None:
    clients = Clients(num_pages=1000, seqs=4, budget=64)
    question = QuestionToTiers()
    late = [clients.submit("a", 8, 30, question=question) for _ in range(4)]
    crowd = [clients.submit("b", 8, 30) for _ in range(6)]
    assert clients.step() == {"b": 32}
    question.is_answered = True
    clients.step()
    assert [one.seat.admitted for one in late] == [True, True, False, False]
    assert sum(one.seat.num_preemptions for one in crowd) == 2


def test_pages_of_a_key_that_holds_all_are_taken() -> None:
    clients = Clients(num_pages=64, seqs=16, budget=64)
    for _ in range(100):
        clients.submit("a", 20, 40)
    for _ in range(10):
        clients.step()
    small = clients.submit("b", 16, 4)
    for _ in range(2):
        clients.step()
    assert small.branch.computed
    victims = [one for one in clients.ends if one.seat.num_preemptions]
    assert {one.asked.owner for one in victims} == {"a"}


def test_one_request_that_holds_all_is_preempted_once_and_then_ends() -> None:
    clients = Clients(num_pages=32, budget=64)
    giant = clients.submit("a", 110, 10)
    clients.step()
    clients.step()
    for _ in range(200):
        if giant.seat.status is Status.FINISHED:
            break
        if sum(one.asked.owner == "b" for one in clients.live) < 2:
            clients.submit("b", 30, 5)
        clients.step()
    assert (giant.seat.status, giant.seat.num_preemptions) == (Status.FINISHED, 1)


def test_priorities_order_the_requests_of_a_key_only() -> None:
    clients = Clients(num_pages=1000, seqs=2, budget=32)
    for _ in range(20):
        clients.submit("a", 8, 30, priority=-5)
    clients.step()
    small, later = clients.submit("b", 8), clients.submit("b", 8, priority=-1)
    for _ in range(2):
        clients.step()
    assert (later.seat.admitted, small.seat.admitted) == (True, False)


def test_priorities_do_not_take_another_keys_share_of_steps() -> None:
    clients = Clients(num_pages=1000, seqs=8, budget=16)
    for _ in range(4):
        clients.submit("a", 400, 1, priority=-5)
    clients.submit("b", 400, 1)
    for _ in range(20):
        clients.step()
    assert clients.computed["b"] == pytest.approx(clients.computed["a"], abs=LAG * 16)


def test_more_keys_than_places_take_turns() -> None:
    clients = Clients(num_pages=1000, seqs=1, budget=16)
    for key in "abc":
        clients.submit(key, 8, 2000)
    for _ in range(2000):
        assert sum(clients.step().values()) >= 1
    assert max(clients.computed.values()) - min(clients.computed.values()) <= 3 * 64


@pytest.mark.turns(6)
@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 3.0}, {"a": 1.0, "b": 2.0, "c": 5.0}])
@pytest.mark.parametrize(("prompt", "output"), [(200, 1), (30, 30), (4, 60)])
def test_shares_of_steps_are_as_the_weights(weights: dict[str, float], prompt: int, output: int) -> None:
    """While all keys have more to do than they get."""
    clients = Clients(num_pages=2000, seqs=16, budget=64)
    clients.weigh(**weights)
    rng = np.random.default_rng(prompt)
    steps = 400
    for _ in range(steps):
        for key in weights:
            while sum(one.asked.owner == key for one in clients.live) < 20:
                clients.submit(key, int(rng.integers(prompt // 2, 2 * prompt)), int(rng.integers(1, 2 * output)))
        clients.step()
    total, whole = clients.computed.total(), sum(weights.values())
    for key, weight in weights.items():
        # A key may be LAG steps behind another one, and ahead of a third.
        assert clients.computed[key] / total == pytest.approx(weight / whole, abs=2 * LAG / steps)


def test_random_arrivals() -> None:
    """Against a naive count: no step is idle or has room that somebody could use, every request
    ends, and small requests of a key that has little under way start within two steps."""
    rng = np.random.default_rng(7)
    for trial in range(6):
        seqs, budget = int(rng.integers(4, 12)), int(rng.integers(16, 80))
        clients = Clients(num_pages=int(rng.integers(150, 400)), seqs=seqs, budget=budget)
        keys = "abcd"[: int(rng.integers(2, 5))]
        small: set[Request] = set()
        for step in range(400):
            for key in keys[1:]:
                for _ in range(int(rng.poisson(0.2)) if trial % 3 else 0):
                    clients.submit(key, int(rng.integers(1, 120)), int(rng.integers(1, 30)))
            if step % 7 == 0 and len([one for one in clients.live if one.asked.owner == "a"]) < 1:
                small.add(clients.submit("a", int(rng.integers(1, budget // 2)), 3))
            if step == 3:
                for _ in range(60):
                    clients.submit(keys[-1], int(rng.integers(1, 120)), int(rng.integers(1, 30)))
            clients.step()
        assert max(clients.waits[one] for one in small) <= 2
        for _ in range(4000):
            if not clients.live:
                break
            assert clients.step().total()
        assert not clients.live


def test_idle_time_is_no_credit_and_debts_stay() -> None:
    shares = KeyShares(lag=1000)
    shares.contend({"a"})
    shares.charge({"a": 100})
    shares.contend({"a", "b"})
    assert shares.time("b") == shares.time("a") == 100
    shares.charge({"b": 30})
    shares.contend({"a"})
    shares.contend({"a", "b"})
    assert shares.time("b") == 130, "what it had beyond others counts when it comes back"
    shares.charge({"a": 5000})
    shares.contend({"a", "b"})
    assert shares.time("b") == 4100, "it is never further behind than the lag"


@pytest.mark.parametrize(
    ("total", "wanted", "weights", "places"),
    [
        (8, {"a": 100, "b": 1}, {}, {"a": 7, "b": 1}),
        (8, {"a": 100, "b": 100}, {}, {"a": 4, "b": 4}),
        (8, {"a": 100, "b": 100}, {"b": 3.0}, {"a": 2, "b": 6}),
        (8, {"a": 2, "b": 3}, {}, {"a": 2, "b": 3}),
        (9, {"a": 9, "b": 9, "c": 1}, {}, {"a": 4, "b": 4, "c": 1}),
        (2, {"a": 5, "b": 5, "c": 5}, {}, {"a": 1, "b": 1, "c": 0}),
        (4, {"a": 5, "b": 5}, {"b": 1e9}, {"a": 1, "b": 3}),
    ],
)
def test_places(total: int, wanted: dict[str, int], weights: dict[str, float], places: dict[str, int]) -> None:
    shares = KeyShares(lag=64)
    for key, weight in weights.items():
        shares.set_weight(key, weight)
    assert shares.places(total, wanted) == places


def crowd(llm: LLM, pool_of_one: bool) -> None:
    """Requests of two keys, of which one comes later, each with the tokens that it has alone."""
    engine = engine_of(llm)
    with on_behalf_of(Caller("a")):
        prompts = [random_tokens(30 + seed, seed=seed) for seed in range(8)]
        requests = [engine.submit(np.array(prompt), greedy(12, seed=1))[0] for prompt in prompts]
    for _ in range(6):
        engine.step()
    with on_behalf_of(Caller("b")):
        late = [random_tokens(20, seed=seed) for seed in (20, 21)]
        requests += [engine.submit(np.array(prompt), greedy(4, seed=1))[0] for prompt in late]
    for _ in range(2):
        engine.step()
        check(llm)
    assert any(one.output.token_ids or one.branch.computed for one in requests[8:]), (
        "a small one starts within two steps"
    )
    victims = [one for one in requests if one.seat.num_preemptions]
    assert {one.asked.owner for one in victims} == {"a"}
    assert pool_of_one or all(one.branch.seq is not None for one in victims if one.seat.status is Status.WAITING)
    while engine.has_work:
        engine.step()
        check(llm)
    found = [(prompt, request.output.token_ids) for prompt, request in zip([*prompts, *late], requests, strict=True)]
    alone = llm.generate([prompt for prompt, _ in found], [greedy(len(ids)) for _, ids in found])
    assert [len(ids) for _, ids in found] == [12] * 8 + [4] * 2
    assert [ids for _, ids in found] == token_ids(alone)


@pytest.mark.turns(6)
@pytest.mark.parametrize("pool", [4096, 200])
def test_displaced_requests_go_on_exactly(make_llm: MakeLLM, checkpoint: Checkpoint, pool: int) -> None:
    crowd(make_llm(checkpoint, pool=pool, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128), pool < 4096)


def test_displaced_requests_of_hybrids_go_on_exactly(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    crowd(make_llm(hybrid, kv_cache_memory="4MiB", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128), False)
