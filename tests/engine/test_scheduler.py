"""The scheduler on a page state of numbers: no tensors, no model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import pytest

from quire.base.errors import ResourceExhausted
from quire.base.token_history import common_prefix
from quire.base.types import BASE, AdapterRuns, Add, Edit, Fork, Pop, Remove
from quire.branches.owner import BranchOwner
from quire.branches.prefix_cache import RadixCache
from quire.engine.request import Request, Status
from quire.engine.request_queues import RequestQueues
from quire.engine.scheduler import Scheduler
from quire.engine.step_builder import Limits, ScheduledStep
from quire.runner.local import Runner

from .made_requests import QuestionToTiers, made_request


class Pages:
    """Sequences that hold pages of 4 tokens; forks share whole pages."""

    SIZE = 4

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.held: dict[int, list[object]] = {}
        self.lengths: dict[int, int] = {}

    @property
    def used(self) -> int:
        return len({id(page) for pages in self.held.values() for page in pages})

    def grown(self, seq: int, count: int) -> int:
        """New pages: of an unfilled tail that is shared there is a copy."""
        pages, length = self.held[seq], self.lengths[seq]
        shared = bool(length % self.SIZE) and any(
            pages[-1] in other for name, other in self.held.items() if name != seq
        )
        return -(-(length + count) // self.SIZE) - len(pages) + shared

    def shortage_in_steps(self, seq_ids: Sequence[int], append_lengths: Sequence[int], most: int) -> int:
        del most  # nothing slides here
        return self.missing_pages(seq_ids, append_lengths)

    def missing_pages(self, seq_ids: Sequence[int], append_lengths: Sequence[int]) -> int:
        need = sum(self.grown(seq, count) for seq, count in zip(seq_ids, append_lengths, strict=True))
        return max(0, need - (self.num_pages - self.used))

    def empty(self) -> bool:
        return not self.held

    def apply(self, edit: Edit) -> None:
        match edit:
            case Add(seq):
                self.held[seq], self.lengths[seq] = [], 0
            case Fork(parent, child, pos):
                self.held[child] = self.held[parent][: -(-pos // self.SIZE)]
                self.lengths[child] = pos
            case Remove(seq):
                del self.held[seq], self.lengths[seq]
            case Pop(seq, n):
                self.lengths[seq] -= n
                del self.held[seq][-(-self.lengths[seq] // self.SIZE) :]

    def run(self, scheduled: ScheduledStep) -> None:
        chunks = scheduled.step.chunks
        assert not self.missing_pages([chunk.seq for chunk in chunks], [len(chunk.tokens) for chunk in chunks])
        for chunk in chunks:
            new = self.grown(chunk.seq, len(chunk.tokens))
            if self.lengths[chunk.seq] % self.SIZE:
                self.held[chunk.seq][-1:] = [object()] if self._shares_tail(chunk.seq) else self.held[chunk.seq][-1:]
            self.lengths[chunk.seq] += len(chunk.tokens)
            while len(self.held[chunk.seq]) * self.SIZE < self.lengths[chunk.seq]:
                self.held[chunk.seq].append(object())
            assert new >= 0

    def _shares_tail(self, seq: int) -> bool:
        return any(self.held[seq][-1] in pages for name, pages in self.held.items() if name != seq)


class World(BranchOwner):
    """A scheduler with its state, a cache, and a loop that appends a token to whatever has run
    completely.
    """

    def __init__(
        self,
        num_pages: int = 100,
        *,
        seqs: int = 8,
        budget: int = 64,
        caching: bool = True,
        fits: Callable[[Collection[int]], bool] | None = None,
    ) -> None:
        self.pages = Pages(num_pages)
        self.cache = RadixCache() if caching else None
        self.next = 0
        self.judge = fits
        self.scheduler = Scheduler(
            self.pages,
            queues=RequestQueues(Limits(max_num_seqs=seqs, max_num_batched_tokens=budget)),
            branches=self,
            cache=self.cache,
        )

    @property
    def runner(self) -> Runner:
        raise AssertionError("no step runs here")

    def new_seq(self) -> int:
        self.next += 1
        return self.next

    def apply(self, *edits: Edit) -> None:
        for edit in edits:
            self.pages.apply(edit)

    def fits(self, adapters: Collection[int]) -> bool:
        return self.judge is None or self.judge(adapters)

    def make_room(self) -> bool:
        seq = None if self.cache is None else self.cache.evict()
        if seq is not None:
            self.pages.apply(Remove(seq))
        return seq is not None

    def submit(self, tokens: Sequence[int] | int, **options: object) -> Request:
        ids = np.arange(tokens) + 1000 * self.next if isinstance(tokens, int) else np.array(tokens)
        request = made_request(ids, **options)
        self.next += 1
        self.scheduler.submit(request)
        return request

    def step(self) -> ScheduledStep:
        scheduled = self.scheduler.schedule()
        self.pages.run(scheduled)
        for request, extension, chunk in zip(
            scheduled.requests, scheduled.extensions, scheduled.step.chunks, strict=True
        ):
            assert (extension.branch, extension.end) == (request.branch, request.branch.computed)
            request.branch.computed += len(chunk.tokens)
            assert request.branch.seq is not None
            assert request.branch.computed == self.pages.lengths[request.branch.seq]
            if not request.branch.remaining:
                if self.cache is not None and request.branch.cacheable and request.branch.seq not in self.cache:
                    for seq in self.cache.insert(
                        request.branch.seq, request.branch.tokens.ids, request.branch.key, live=True
                    ):
                        self.pages.apply(Remove(seq))
                request.branch.tokens.append(7)
        return scheduled

    def finish(self, request: Request) -> None:
        self.scheduler.finish(request)
        if request.branch.seq is None:
            return
        gone = [request.branch.seq]
        if self.cache is not None:
            gone = self.cache.insert(
                request.branch.seq, request.branch.tokens.ids[: request.branch.computed], request.branch.key
            )
        for seq in gone:
            self.pages.apply(Remove(seq))


def counts(scheduled: ScheduledStep) -> list[int]:
    return [len(chunk.tokens) for chunk in scheduled.step.chunks]


@pytest.mark.parametrize(
    ("a", "b", "length"), [([], [], 0), ([1], [], 0), ([1], [2], 0), ([1, 2], [1], 1), ([1, 2, 3], [1, 2, 4], 2)]
)
def test_common_prefix(a: list[int], b: list[int], length: int) -> None:
    assert common_prefix(np.array(a), np.array(b)) == length


def test_decodes_come_first_and_prompts_are_cut() -> None:
    world = World(budget=10)
    first, second = world.submit(6), world.submit(25)
    assert counts(world.step()) == [6, 4]
    assert counts(world.step()) == [1, 9]
    scheduled = world.step()
    assert counts(scheduled) == [1, 9]
    assert [chunk.logits for chunk in scheduled.step.chunks] == ["last", "none"]
    scheduled = world.step()
    assert counts(scheduled) == [1, 3]
    assert [chunk.logits for chunk in scheduled.step.chunks] == ["last", "last"]
    assert (first.branch.computed, second.branch.computed) == (9, 25)


def test_first_come_first_served() -> None:
    world = World(seqs=2)
    requests = [world.submit(5) for _ in range(4)]
    assert world.step().requests == tuple(requests[:2])
    world.finish(requests[0])
    assert world.step().requests == (requests[1], requests[2])


def test_admission_leaves_room_for_what_running_prompts_still_need() -> None:
    world = World(num_pages=12, budget=8, caching=False)
    first = world.submit(32)  # 8 pages, of which this step takes 2
    second = world.submit(20)
    assert world.step().requests == (first,)
    assert (second.branch.seq, second.seat.status) == (None, Status.WAITING)
    for _ in range(3):
        world.step()
    world.finish(first)
    assert world.step().requests == (second,)
    assert world.scheduler.num_preemptions == 0


def test_a_blocked_request_is_not_overtaken() -> None:
    world = World(num_pages=10, caching=False)
    world.submit(30)
    long, short = world.submit(20), world.submit(2)
    world.step()
    assert (long.branch.seq, short.branch.seq) == (None, None)


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    world = World(num_pages=4, caching=False)
    old, young = world.submit(7), world.submit(7)
    world.step()
    late = world.submit(2)
    world.step()
    world.step()
    assert (young.seat.status, young.branch.seq, young.branch.computed, young.seat.num_preemptions) == (
        Status.WAITING,
        None,
        0,
        1,
    )
    assert world.scheduler.running == [old]
    assert world.scheduler.waiting == [young, late]
    world.finish(old)
    assert world.step().requests[0] is young
    assert young.branch.computed == len(young.branch.tokens) - 1


def test_pinned_state_is_never_given_up() -> None:
    world = World(num_pages=4, caching=False)
    old, young = world.submit(7), world.submit(7, pinned=True)
    world.step()
    world.step()
    world.step()
    assert (old.seat.status, young.seat.status) == (Status.WAITING, Status.RUNNING)


def test_alone_without_room_is_an_error() -> None:
    world = World(num_pages=3, caching=False)
    grows = world.submit(12)
    world.step()
    ((failed, error),) = world.scheduler.schedule().failed
    assert failed is grows
    assert isinstance(error, ResourceExhausted)
    assert world.scheduler.idle
    assert world.pages.used == 0
    never, fine = world.submit(13), world.submit(3)
    scheduled = world.step()
    assert [request for request, _ in scheduled.failed] == [never]
    assert scheduled.requests == (fine,)


def test_equal_prompts_wait_for_the_first() -> None:
    world = World(budget=40)
    prompt = list(range(60))
    first, second = world.submit(prompt), world.submit([*prompt, 90])
    other_key, other = world.submit(prompt, key="salt"), world.submit([5, 6])
    assert world.step().requests == (first,)
    world.step()
    assert second.branch.seq is None
    # The same tokens under another key are computed beside it.
    world.step()
    world.step()
    assert second.seat.reuse.cached == 60
    world.step()
    assert (other_key.seat.reuse.cached, other.seat.reuse.cached) == (0, 0)
    assert other.branch.computed


def test_equal_prompts_under_other_keys_do_not_wait() -> None:
    world = World(budget=100)
    first, second = world.submit(list(range(40))), world.submit(list(range(40)), key="salt")
    assert world.step().requests == (first, second)


def test_waiting_requests_with_state_give_it_up() -> None:
    world = World(num_pages=6, caching=False)
    runner = world.submit(16)
    world.step()
    waiting = made_request(range(9), seq=77, computed=8)
    world.pages.apply(Add(77))
    world.pages.held[77], world.pages.lengths[77] = [object(), object()], 8
    world.scheduler.queues.limits = Limits(max_num_seqs=1, max_num_batched_tokens=64)
    world.scheduler.submit(waiting)
    for _ in range(4):
        world.step()
    assert (waiting.branch.seq, waiting.branch.computed) == (None, 0)
    assert runner.seat.status is Status.RUNNING


def test_what_a_blocked_request_found_stays_findable() -> None:
    world = World(num_pages=12, budget=64)
    prompt = list(range(20))
    done = world.submit(prompt)
    world.step()
    world.finish(done)
    busy = world.submit(24)
    world.step()
    blocked = world.submit([*prompt, *range(100, 112)])
    for _ in range(3):
        world.step()
    assert blocked.branch.seq is None
    assert world.cache is not None
    assert world.cache.peek(prompt, None) == 20
    world.finish(busy)
    world.step()
    assert blocked.seat.reuse.cached == 20


def test_cached_sequences_make_room() -> None:
    world = World(num_pages=8)
    for _ in range(10):
        request = world.submit(20)
        world.step()
        assert request.branch.computed == 20
        world.finish(request)
    assert world.pages.used <= 8


def test_fresh_tokens_are_run_whatever_is_cached() -> None:
    world = World()
    prompt = list(range(30))
    done = world.submit(prompt)
    world.step()
    world.finish(done)
    for fresh, cached in ((0, 0), (10, 10), (None, 29)):
        request = world.submit(prompt, fresh_from=fresh, wants="all")
        world.step()
        assert request.seat.reuse.cached == cached
        world.finish(request)


def test_random_load_finishes() -> None:
    rng = np.random.default_rng(0)
    for trial in range(20):
        world = World(num_pages=int(rng.integers(8, 20)), budget=int(rng.integers(1, 40)), caching=bool(trial % 2))
        targets = {world.submit(int(n)): int(n + m) for n, m in rng.integers(1, 15, (12, 2))}
        for _ in range(3000):
            scheduled = world.step()
            assert not scheduled.failed
            for request in scheduled.requests:
                if len(request.branch.tokens) > targets[request]:
                    world.finish(request)
            if world.scheduler.idle:
                break
        assert world.scheduler.idle
        assert all(request.seat.status is Status.FINISHED for request in targets)


# -- adapters --------------------------------------------------------------------------------------


def under(*runs: tuple[int, int | None]) -> AdapterRuns:
    return AdapterRuns(runs)


def one(adapter: int | None) -> AdapterRuns:
    return BASE.then(0, adapter)


def at_most(count: int) -> Callable[[Collection[int]], bool]:
    """Room for so many adapters."""

    def fits(adapters: Collection[int]) -> bool:
        assert len(adapters) > 1, "one always fits"
        return len(adapters) <= count

    return fits


@pytest.mark.parametrize("wants", ["last", "all", "none"])
def test_a_chunk_ends_where_the_adapter_changes(wants: str) -> None:
    world = World(budget=9)
    request = world.submit(20, runs=under((0, None), (6, 1), (16, 2)), wants=wants)
    chunks = [world.step().step.chunks[0] for _ in range(4)]
    assert [len(chunk.tokens) for chunk in chunks] == [6, 9, 1, 4]
    assert [chunk.adapter for chunk in chunks] == [None, 1, 1, 2]
    last = ["none"] * 3 + ["last"] if wants == "last" else [wants] * 4
    assert [chunk.logits for chunk in chunks] == last
    assert world.step().step.chunks[0].adapter == 2, "it goes on under the last one"
    assert request.branch.computed == 21


def test_adapters_that_do_not_fit_together_take_turns() -> None:
    world = World(fits=at_most(1))
    first, second = world.submit(5, runs=one(1)), world.submit(5, runs=one(2))
    base, third = world.submit(5), world.submit(5, runs=one(1))
    assert world.step().requests == (first, base), "the third would overtake the second"
    assert (second.branch.seq, third.branch.seq) == (None, None), "who waits holds nothing"
    fourth = world.submit(5)
    assert set(world.step().requests) == {first, base, fourth}
    world.finish(first)
    assert second in world.step().requests
    assert third.seat.status is Status.WAITING
    world.finish(second)
    assert third in world.step().requests


def test_who_is_not_ready_keeps_no_room_for_its_adapter() -> None:
    world = World(fits=at_most(1))
    first, second = world.submit(5, runs=one(1)), world.submit(5, runs=one(2))
    assert world.step().requests == (first,)
    question = QuestionToTiers()
    first.seat.question = question  # type: ignore[assignment]
    assert world.step().requests == (second,)
    assert world.step().requests == (second,)
    question.is_answered = True
    assert world.step().requests == (first,)


def test_a_running_request_that_waits_for_its_adapter_is_not_overtaken() -> None:
    world = World(fits=at_most(1))
    first, changing = world.submit(4, runs=one(1)), world.submit(8, runs=under((0, None), (3, 2)))
    assert world.step().requests == (first, changing)
    late, base = world.submit(4, runs=one(1)), world.submit(4)
    for _ in range(3):
        assert changing not in world.step().requests
    assert (late.seat.status, base.seat.status, changing.branch.computed) == (Status.WAITING, Status.RUNNING, 3)
    world.finish(first)
    assert changing in world.step().requests
    assert late.seat.status is Status.WAITING
    world.finish(changing)
    assert late in world.step().requests


def test_what_was_found_may_end_under_an_adapter_that_does_not_fit() -> None:
    world = World(fits=at_most(1))
    runs, prompt = under((0, 1), (8, 2)), list(range(20))
    done = world.submit(prompt, runs=runs, key="runs")
    while done.branch.remaining != 1 or done.branch.computed < 20:
        world.step()
    world.finish(done)
    busy = world.submit(5, runs=one(1))
    world.step()
    waiting = world.submit(prompt, runs=runs, key="runs")
    for _ in range(3):
        assert world.step().requests == (busy,)
    assert (waiting.branch.seq, waiting.branch.computed, waiting.seat.status) == (None, 0, Status.WAITING)
    world.finish(busy)
    assert world.step().requests == (waiting,)
    assert waiting.seat.reuse.cached == 19


def test_random_adapters_finish_in_order() -> None:
    rng = np.random.default_rng(1)
    for trial in range(20):
        most = int(rng.integers(1, 4))
        world = World(
            num_pages=int(rng.integers(10, 24)), budget=int(rng.integers(1, 40)), caching=False, fits=at_most(most)
        )
        targets: dict[Request, int] = {}
        for prompt, extra in rng.integers(1, 15, (14, 2)):
            adapters = [None if one_ == 0 else int(one_) for one_ in rng.integers(0, 6, 2)]
            runs = one(adapters[0]) if trial % 2 else one(adapters[0]).then(int(rng.integers(0, prompt)), adapters[1])
            targets[world.submit(int(prompt), runs=runs)] = int(prompt + extra)
        order: list[int] = []
        for _ in range(3000):
            scheduled = world.step()
            assert scheduled.step.chunks or scheduled.failed, "no step is idle"
            used = {chunk.adapter for chunk in scheduled.step.chunks} - {None}
            assert len(used) <= most
            for request, chunk in zip(scheduled.requests, scheduled.step.chunks, strict=True):
                start = request.branch.computed - len(chunk.tokens)
                assert {request.branch.runs.at(at) for at in range(start, request.branch.computed)} == {chunk.adapter}
                if request.branch.runs.ids and request.seat.arrival not in order:
                    order.append(request.seat.arrival)
                if len(request.branch.tokens) > targets[request]:
                    world.finish(request)
            if world.scheduler.idle:
                break
        assert world.scheduler.idle
        assert order == sorted(order), "no adapter's user was overtaken by a later one"
