"""``Store``: tiers as one place, whatever happens to them."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.store.oracle import KEYS, PARENTS, digest, rows, stop

from quire.base.errors import InvalidArgument, TierError
from quire.contracts.store import Blob, ObjectKey, ObjectKind, ObjectPart, StoreTier, TierStat
from quire.store import stack, tier_guard
from quire.store.files import FileTier
from quire.store.keys import record_key
from quire.store.memory import MemoryTier, cut
from quire.store.stack import Found, Store
from quire.store.tier_guard import Breaker

R = TypeVar("R")
A, AB, B = rows("a"), rows("ab"), rows("b")
RECORD = record_key("commit", "main")
ROOT = digest("")


class Shelf:
    """A tier that fails and waits as it is told."""

    def __init__(self, kind: str = "disk") -> None:
        self.kind, self.label = kind, f"the {kind} shelf"
        self.held: dict[ObjectKey, Blob] = {}
        self.pinned: set[ObjectKey] = set()
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.broken: Collection[str] = ("get", "part", "put", "contains", "children", "remove", "pin", "stat")
        """The verbs that raise ``error``."""
        self.stuck = False

    async def _call(self, verb: str) -> None:
        self.calls.append(verb)
        while self.stuck:
            await asyncio.sleep(0.002)
        if self.error is not None and verb in self.broken:
            raise self.error

    async def get(self, keys: Sequence[ObjectKey]) -> list[Blob | None]:
        await self._call("get")
        return [self.held.get(key) for key in keys]

    async def part(self, key: ObjectKey, start: int, stop: int) -> ObjectPart | None:
        await self._call("part")
        return cut(self.held.get(key), start, stop)

    async def put(self, key: ObjectKey, blob: Blob) -> bool:
        await self._call("put")
        if len(blob) > 1000:
            return False
        self.held[key] = blob
        return True

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        await self._call("contains")
        return [key in self.held for key in keys]

    async def children(self, parents: Sequence[bytes]) -> list[list[ObjectKey]]:
        await self._call("children")
        return [[key for key in self.held if key.parent == parent] for parent in parents]

    async def remove(self, keys: Collection[ObjectKey]) -> int:
        await self._call("remove")
        return sum(self.held.pop(key, None) is not None for key in keys)

    async def pin(self, keys: Collection[ObjectKey], pinned: bool) -> None:
        await self._call("pin")
        (self.pinned.update if pinned else self.pinned.difference_update)(set(keys) & self.held.keys())

    async def stat(self) -> TierStat:
        await self._call("stat")
        return TierStat(objects=len(self.held), bytes=sum(map(len, self.held.values())), capacity=None)

    async def close(self) -> None:
        self.calls.append("close")


@contextmanager
def opened(*tiers: StoreTier, queue_bytes: int = 1 << 20, seconds: float = 5.0) -> Iterator[Store]:
    store = Store(tiers, queue_bytes=queue_bytes, seconds=seconds)
    try:
        yield store
    finally:
        for tier in tiers:
            if isinstance(tier, Shelf):
                tier.stuck = False
        store.close()


def blob_of(answer: Future[Found | None]) -> bytes | None:
    found = answer.result(10)
    return None if found is None else bytes(found.blob)


def until(condition: object) -> None:
    """Wait for what another thread does."""
    assert callable(condition)
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.002)


# --------------------------------------------------------------------- what works


def test_memory_answers_at_once() -> None:
    with opened(MemoryTier(1000)) as store:
        assert store.put(A, b"1", durable=False)
        assert not store.put(B, b"2", durable=True)
        assert not store.put(B, bytes(1001), durable=False)
        assert not store.is_durable
        found, missing = store.get([A, B])
        assert (found.done(), missing.done()) == (True, True)
        assert (found.result(), missing.result()) == (Found(b"1", "memory"), None)
        children = store.children([ROOT, digest("a")])
        assert children.done()
        assert children.result() == [{A: "memory"}, {}]
        assert store.contains([A, B]).result() == [True, False]
        assert store.snapshot()["quire:store_misses_total"] == 1
        assert store.pin([A], True).result(0)
        assert store.remove([B]).result(0)
        assert store.flush(0)
        assert store.stat()[0].stat == TierStat(objects=1, bytes=1, capacity=1000, pinned=1)
        assert store._thread is None, "no thread is needed"


def test_the_nearest_tier_answers(tmp_path: Path) -> None:
    with opened(MemoryTier(1000), FileTier(tmp_path, None)) as store:
        assert store.put(A, b"a", durable=False)
        assert store.put(A, b"a", durable=True)
        assert store.put(AB, b"ab", durable=True, wait=True)
        assert store.flush(10)
        assert (store.known(AB), store.known(stop("ab"))) == (True, False)
        parents = [ROOT, digest("a"), digest("b")]
        assert store.children(parents, timeout=10).result() == [{A: "memory"}, {AB: "disk"}, {}]
        answers = [one.result(10) for one in store.get([A, AB, B])]
        assert [one and (bytes(one.blob), one.tier) for one in answers] == [(b"a", "memory"), (b"ab", "disk"), None]
        assert store.contains([A, AB, B]).result(10) == [True, True, False]
        numbers = store.snapshot()
        assert numbers["quire:store_misses_total"] == 1
        assert numbers['quire:store_hits_total{tier="disk"}'] == 1
        assert numbers['quire:store_written_bytes_total{tier="disk"}'] == 3
    with opened(FileTier(tmp_path, None)) as store:
        assert blob_of(store.get([AB])[0]) == b"ab"


@pytest.mark.parametrize(("kind", "promoted"), [("redis", True), ("object", True), ("disk", False)])
def test_what_comes_from_afar_stays_near(kind: str, promoted: bool) -> None:
    shelf = Shelf(kind)
    shelf.held = {A: b"a", RECORD: b"r"}
    with opened(MemoryTier(1000), shelf) as store:
        assert [one.result(10) for one in store.get([A, RECORD])] == [Found(b"a", kind), Found(b"r", kind)]
        assert store.children([ROOT, RECORD.parent]).result() == [{A: "memory" if promoted else kind}, {RECORD: kind}]


def test_what_is_removed_while_it_is_read_does_not_stay() -> None:
    shelf, memory = Shelf("redis"), MemoryTier(1000)
    shelf.held, shelf.stuck = {A: b"a"}, True
    with opened(memory, shelf) as store:
        answer = store.get([A])[0]
        until(lambda: shelf.calls == ["get"])
        removed = store.remove([A])
        shelf.stuck = False
        assert blob_of(answer) in (b"a", None)
        assert removed.result(10)
        assert memory.contains_now([A]) == [False]
        assert shelf.held == {}


def test_one_read_for_all_who_want_it() -> None:
    shelf = Shelf()
    shelf.held, shelf.stuck = {A: b"a"}, True
    with opened(shelf) as store:
        first = store.get([A, A])
        until(lambda: shelf.calls == ["get"])
        more = [store.get([A])[0] for _ in range(3)]
        assert not first[0].cancel(), "others wait for it"
        shelf.stuck = False
        assert {blob_of(one) for one in (*first, *more)} == {b"a"}
        assert shelf.calls == ["get"]
        until(lambda: not store._flights)
        assert blob_of(store.get([A])[0]) == b"a"
        assert shelf.calls == ["get", "get"]


def test_a_read_that_began_before_a_change_is_none_after_it() -> None:
    class Late(Shelf):
        async def get(self, keys: Sequence[ObjectKey]) -> list[Blob | None]:
            found = [self.held.get(key) for key in keys]
            await self._call("get")
            return found

    shelf = Late()
    shelf.held = {RECORD: b"old"}
    with opened(shelf) as store:
        shelf.stuck = True
        before = store.get([RECORD])[0]
        until(lambda: shelf.calls == ["get"])
        store.put(RECORD, b"new", durable=True)
        until(lambda: "put" in shelf.calls)
        shelf.held[RECORD] = b"new"
        with store._room:
            store._writing.clear()  # as if it were written by now
        after = store.get([RECORD])[0]
        shelf.stuck = False
        assert (blob_of(before), blob_of(after)) == (b"old", b"new")


def test_what_waits_to_be_written_is_found() -> None:
    shelf = Shelf("redis")
    shelf.held = {RECORD: b"old"}
    with opened(MemoryTier(1000), shelf) as store:
        shelf.stuck = True
        before = store.get([RECORD])[0]
        until(lambda: shelf.calls == ["get"])
        store.put(RECORD, b"older", durable=False)
        store.put(RECORD, b"new", durable=True)
        store.put(A, b"a", durable=True)
        children = store.children([ROOT, RECORD.parent], timeout=0.01)
        assert [one.result(0) for one in store.get([RECORD, A])] == [Found(b"new", "redis"), Found(b"a", "redis")]
        assert children.result(10) == [{A: "redis"}, {RECORD: "redis"}]
        assert not store.known(A)
        store.pin([A], True)
        assert store.get([A])[0].result(0) == Found(b"a", "redis"), "while it waits to be pinned, too"
        store.remove([A])
        removed = store.get([A])[0]
        assert not removed.done(), "it waits for the removal"
        shelf.stuck = False
        assert blob_of(before) in (b"old", b"new")
        assert blob_of(removed) is None
        assert store.flush(10)
        assert shelf.held == {RECORD: b"new"}
        shelf.held = {}
        assert blob_of(store.get([RECORD])[0]) is None, "it is no longer kept here"


def test_what_was_read_is_freed_at_once(tmp_path: Path) -> None:
    """Without a circle that waits for the garbage collector: objects are large."""
    tier = FileTier(tmp_path, None)
    with opened(tier) as store:
        store.put(A, b"a", durable=True)
        store.flush(10)
        gc.disable()
        try:
            answer = store.get([A])[0]
            assert blob_of(answer) == b"a"
            assert len(tier._maps) == 1
            del answer
            until(lambda: not tier._maps)
        finally:
            gc.enable()


def test_changes_of_one_object_keep_their_order() -> None:
    class Slower(Shelf):
        async def put(self, key: ObjectKey, blob: Blob) -> bool:
            await asyncio.sleep(0.002 * (20 - int(bytes(blob))))  # the later the quicker
            return await super().put(key, blob)

    shelf = Slower()
    with opened(shelf) as store:
        for number in range(20):
            assert store.put(RECORD, str(number).encode(), durable=True)
        pinned = store.pin([RECORD], True)
        assert store.flush(10)
        assert (shelf.held, pinned.result(), shelf.pinned) == ({RECORD: b"19"}, True, {RECORD})
        store.put(RECORD, b"20", durable=True)
        removed = store.remove([RECORD])
        store.put(RECORD, b"18", durable=True)
        assert store.flush(10)
        assert removed.result()
        assert shelf.held == {RECORD: b"18"}


def test_memory_stands_first() -> None:
    with pytest.raises(InvalidArgument, match="at most one memory tier, and it stands first"):
        Store([FileTier("/nowhere", None), MemoryTier(1)])


# --------------------------------------------------------------------- the queue


def test_the_queue_is_bounded() -> None:
    shelf = Shelf()
    shelf.stuck = True
    with opened(shelf, queue_bytes=100) as store:
        assert store.put(A, bytes(600), durable=True), "what is larger than the queue goes alone"
        assert not store.put(B, bytes(1), durable=True)
        assert store.snapshot()["quire:store_dropped_total"] == 1
        assert store.snapshot()["quire:store_queued_bytes"] == 600
        waiting = threading.Thread(target=lambda: store.put(B, bytes(60), durable=True, wait=True))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive(), "back-pressure"
        assert not store.flush(0.02)
        shelf.stuck = False
        waiting.join(10)
        assert store.flush(10)
        assert shelf.held.keys() == {A, B}
        assert store.snapshot()["quire:store_queued_bytes"] == 0


def test_flushed_objects_are_read_from_their_tier() -> None:
    """Also where the thread that wrote them is late to say so."""
    shelf = Shelf()
    with opened(shelf) as store:
        changed = store._changed

        def late(*change: Any) -> None:
            time.sleep(0.05)
            changed(*change)

        store._changed = late  # type: ignore[method-assign]
        assert store.put(A, b"1", durable=True)
        assert store.flush(10)
        assert store.snapshot()["quire:store_queued_bytes"] == 0
        shelf.held.clear()
        assert store.get([A])[0].result(10) is None


def test_what_a_tier_has_no_room_for() -> None:
    shelf = Shelf()
    with opened(shelf) as store:
        assert store.put(A, bytes(1001), durable=True)
        assert store.flush(10)
        assert not store.known(A)
        assert store.snapshot()["quire:store_refused_total"] == 1


def test_known_is_what_all_tiers_have() -> None:
    near, far = Shelf("disk"), Shelf("redis")
    with opened(near, far) as store:
        assert not store.known(A)
        far.error = TierError("gone")
        store.put(A, b"a", durable=True)
        store.flush(10)
        assert store.known(A), "a tier that rests does not count"
        near.held.clear()
        assert store.children([ROOT]).result(10) == [{}]
        assert not store.known(A), "it was given up"
    with opened(near, far) as store:
        far.error = None
        store.put(A, b"a", durable=True)
        store.flush(10)
        far.held.clear()
        assert store.known(A)
        store.children([ROOT]).result(10)
        assert not store.known(A), "one tier was flushed"
    with opened(near) as store:
        near.error = TierError("gone")
        store.put(B, b"b", durable=True)
        store.flush(10)
        assert not store.known(B), "nobody has it"


@pytest.mark.parametrize("verb", ["get", "contains", "children"])
def test_what_was_seen_is_known(verb: str) -> None:
    shelf = Shelf()
    shelf.held = {A: b"a"}
    with opened(shelf) as store:
        look = {"get": lambda: store.get([A])[0], "contains": lambda: store.contains([A])}
        look["children"] = lambda: store.children([ROOT])
        look[verb]().result(10)  # type: ignore[attr-defined]
        assert store.known(A)
        shelf.held.clear()
        look[verb]().result(10)  # type: ignore[attr-defined]
        assert not store.known(A)


def test_only_so_much_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_guard, "PARENTS_KNOWN", 2)
    shelf = Shelf()
    with opened(shelf) as store:
        for key in (A, AB, rows("abc"), B):
            store.put(key, b"x", durable=True)
            store.flush(10)
        assert [store.known(key) for key in (A, AB, rows("abc"), B)] == [False, False, True, True]


# --------------------------------------------------------------------- what fails


def test_a_tier_that_fails_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    near, far = Shelf("redis"), Shelf("disk")
    near.held, far.held = {A: b"a", B: b"b"}, {B: b"b"}
    near.error = TierError("no route")
    with caplog.at_level(logging.INFO, "quire.store"), opened(near, far) as store:
        assert store.children([ROOT]).result(10) == [{B: "disk"}]
        assert [blob_of(one) for one in store.get([A, B])] == [None, b"b"]
        assert store.contains([A, B]).result(10) == [False, True]
        numbers = store.snapshot()
        assert numbers['quire:store_failures_total{tier="redis"}'] == 1
        assert numbers['quire:store_skipped_total{tier="redis"}'] == 3
        assert numbers['quire:store_resting{tier="redis"}'] == 1
        assert numbers['quire:store_resting{tier="disk"}'] == 0
        families = {one.name: one for one in store.collect()}
        assert [one.value for one in families["quire:store_resting"].samples] == [1, 0]
        assert store.put(A, b"a", durable=True), "another tier takes it"
        assert store.flush(10)
        assert A in far.held
        assert not store.remove([A]).result(10), "one tier was not asked, or failed"
        assert not store.pin([B], True).result(10)
        assert far.pinned == {B}
        report = store.stat()[0]
        assert report.stat is None
        assert 0 < report.rest_of_reads <= 1
    told = [one.getMessage() for one in caplog.records]
    assert told.count("reading from the redis shelf: no route; the store goes on without it") == 1


def test_a_tier_that_cannot_be_written_is_read() -> None:
    shelf = Shelf()
    shelf.held, shelf.error, shelf.broken = {A: b"a"}, TierError("full"), ("put", "remove", "pin")
    with opened(shelf) as store:
        assert store.put(B, b"b", durable=True)
        assert store.flush(10)
        assert store.stat()[0].rest_of_writes > 0
        assert blob_of(store.get([A])[0]) == b"a"


def test_a_slow_tier_has_nothing() -> None:
    near, far = Shelf("redis"), Shelf("disk")
    near.held, far.held, near.stuck = {A: b"a"}, {B: b"b"}, True
    with opened(near, far, seconds=0.05) as store:
        start = time.monotonic()
        assert store.children([ROOT], timeout=0.05).result(10) == [{B: "disk"}]
        assert blob_of(store.get([A])[0]) is None
        assert store.put(A, b"a", durable=True)
        assert store.flush(10)
        assert time.monotonic() - start < 5
        assert store.snapshot()['quire:store_failures_total{tier="redis"}'] == 2


def test_a_defect_of_a_tier_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf()
    shelf.held, shelf.error = {A: b"a"}, ZeroDivisionError("a defect")
    with opened(shelf) as store:
        assert blob_of(store.get([A])[0]) is None
        assert store.children([ROOT]).result(10) == [{}]
        assert store.put(A, b"", durable=True)
        assert store.flush(10)
    assert "a defect of the tier of the disk shelf" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_tier_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    shelf = Shelf()
    shelf.held, shelf.error = {A: b"a"}, TierError("away")
    store = Store([shelf], clock=lambda: now)
    with caplog.at_level(logging.INFO, "quire.store"):
        for rest in (1, 2, 4, 8, 16, 30, 30):
            before = len(shelf.calls)
            assert [blob_of(store.get([A])[0]) for _ in range(3)] == [None] * 3
            assert len(shelf.calls) == before + 1, "one tries, the others rest"
            assert store.stat()[0].rest_of_reads == rest
            now += rest
        for well in (59, 60):  # a failure within a minute is the same one to the log
            shelf.error = None
            assert [blob_of(store.get([A])[0]) for _ in range(2)] == [b"a"] * 2
            now += well
            assert blob_of(store.get([A])[0]) == b"a"
            shelf.error = TierError("the disk shelf: away")
            assert blob_of(store.get([A])[0]) is None
            assert store.stat()[0].rest_of_reads == 1, "it was whole in between"
            now += 1
        shelf.error = TierError("full")
        assert blob_of(store.get([A])[0]) is None
    store.close()
    assert [one.getMessage() for one in caplog.records] == [
        "reading from the disk shelf: away; the store goes on without it",
        "reading from the disk shelf: works again",
        "reading from the disk shelf: away; the store goes on without it",
    ]


def test_calls_of_before_a_change_decide_nothing() -> None:
    now = 0.0
    breaker = Breaker("x", lambda: now)
    tickets = [breaker.enter() for _ in range(3)]
    assert tickets == [0, 0, 0]
    for _ in range(3):
        breaker.failed(0, "at once")
    assert breaker.seconds == 1
    breaker.worked(0)
    assert breaker.is_broken
    assert breaker.enter() is None
    now = 1.5
    ticket = breaker.enter()
    assert ticket is not None
    assert breaker.enter() is None, "while one tries"
    now = 3.0
    assert breaker.enter() == ticket, "the one that tried has no answer"
    breaker.worked(ticket)
    breaker.failed(ticket, "late")
    assert not breaker.is_broken


def test_damage_is_counted_and_removed() -> None:
    shelf, memory = Shelf(), MemoryTier(1000)
    shelf.held = {A: b"a", B: b"b"}
    with opened(memory, shelf) as store:
        store.put(A, b"a", durable=False)
        store.put(B, b"b", durable=False)
        store.damaged(A, "memory", "checksum")
        assert blob_of(store.get([A])[0]) == b"a"
        store.damaged(A, "disk", "header")
        store.damaged(B, "disk", "something new")
        store.damaged(B, "redis", "key")
        assert blob_of(store.get([A])[0]) is None, "a read comes after that"
        assert store.flush(10)
        assert shelf.held == {}
        assert memory.contains_now([A, B]) == [False, True]
        numbers = store.snapshot()
        assert [numbers[f'quire:store_damaged_total{{reason="{one}"}}'] for one in ("checksum", "header", "key")] == [
            1
        ] * 3
        assert numbers["quire:store_damaged_total"] == 4


# --------------------------------------------------------------------- the end


def test_closing_ends_all_that_waits() -> None:
    before = set(threading.enumerate())
    shelf = Shelf()
    shelf.stuck = True
    store = Store([MemoryTier(1000), shelf], queue_bytes=10)
    store.put(A, b"a", durable=False)
    answers: list[Future[object]] = [*store.get([B, AB]), store.children([ROOT]), store.contains([A, B])]
    answers += [store.remove([B]), store.pin([B], True)]
    assert store.put(stop("a"), bytes(10), durable=True)
    refused: list[bool] = []
    waiting = threading.Thread(target=lambda: refused.append(store.put(stop("b"), b"1", durable=True, wait=True)))
    waiting.start()
    until(lambda: "get" in shelf.calls)
    start = time.monotonic()
    store.close(timeout=0.05)
    waiting.join(10)
    assert time.monotonic() - start < 5
    assert not wait(answers, 10).not_done
    assert [one.result() for one in answers] == [None, None, [{A: "memory"}], [True, False], False, False]
    assert refused == [False]
    assert shelf.calls[-1] == "close"
    assert "quire-store" not in {thread.name for thread in set(threading.enumerate()) - before}
    # From here on all is a miss.
    store.close()
    assert [one.result(0) for one in store.get([A, B])] == [None, None]
    assert not store.put(A, b"", durable=True, wait=True)
    assert not store.put(A, b"", durable=False)
    assert store.flush(0)
    assert store.contains([B]).result(0) == [False]
    assert store.stat(0)[1].stat is None


def test_a_tier_that_does_not_close(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Endless(Shelf):
        async def close(self) -> None:
            await asyncio.sleep(1000)

    monkeypatch.setattr(stack, "CLOSE_SECONDS", 0.05)
    store = Store([Endless()])
    assert blob_of(store.get([A])[0]) is None
    start = time.monotonic()
    store.close()
    assert time.monotonic() - start < 5
    assert "closing the disk shelf: TimeoutError" in caplog.text


def test_a_store_that_nobody_used_closes() -> None:
    shelf = Shelf()
    Store([shelf]).close()
    assert shelf.calls == []


def test_what_is_queued_is_written_at_the_end(tmp_path: Path) -> None:
    store = Store([FileTier(tmp_path, None)])
    for key in KEYS:
        assert store.put(key, key.digest * 100, durable=True)
    store.close()
    with opened(FileTier(tmp_path, None)) as again:
        assert [blob_of(one) for one in again.get(KEYS)] == [key.digest * 100 for key in KEYS]


def test_nothing_keeps_the_interpreter_alive(tmp_path: Path) -> None:
    """Neither a store that nobody closed, nor a tier that hangs."""
    code = f"""
import sys, time
from quire.store.files import FileTier
from quire.store.stack import Store
from tests.store.oracle import KEYS
FileTier._put = lambda *arguments: time.sleep(1000)
store = Store([FileTier({str(tmp_path)!r}, None)])
store.put(KEYS[0], b"x", durable=True)
print(store.children([KEYS[-1].parent], timeout=20).result())
"""
    path = [*sys.path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[{}]\n", "")


# --------------------------------------------------------------------- anything at all


@given(random=st.randoms(use_true_random=True))
def test_never_a_wrong_object_and_never_an_error(random: Random) -> None:
    """Whatever fails, what is found is what was put. What can no longer fail is found, too."""
    shelves = [Shelf("disk"), Shelf("redis")]
    # What may be read of each key: of a record each version, until one is known to be the last.
    put: dict[ObjectKey, list[bytes]] = {}
    with opened(MemoryTier(60), *shelves, seconds=0.01, queue_bytes=200) as store:
        for number in range(40):
            key = random.choice(KEYS)
            match random.choices(("put", "get", "children", "contains", "fault", "other"), (10, 10, 4, 2, 4, 3))[0]:
                case "put":
                    blob = key.digest if key.kind is not ObjectKind.RECORD else b"%20d" % number
                    put.setdefault(key, []).append(blob)
                    store.put(key, blob, durable=random.random() < 0.7, wait=random.random() < 0.5)
                case "get":
                    for one, answer in zip(keys := random.choices(KEYS, k=3), store.get(keys), strict=True):
                        assert blob_of(answer) in (None, *put.get(one, ()))
                case "children":
                    for found, parent in zip(
                        store.children(PARENTS, random.choice((0.0, 0.01))).result(10), PARENTS, strict=True
                    ):
                        assert all(one in put and one.parent == parent for one in found)
                case "contains":
                    assert all(
                        one in put for one, there in zip(KEYS, store.contains(KEYS).result(10), strict=True) if there
                    )
                case "fault":
                    shelf = random.choice(shelves)
                    shelf.error = random.choice((None, None, TierError("x"), ValueError("y")))
                    shelf.stuck = random.random() < 0.1
                    shelf.broken = random.sample(("get", "put", "contains", "children", "remove", "pin"), 3)
                case "other":
                    random.choice((store.remove, lambda keys: store.pin(keys, True)))([key])
        for shelf in shelves:
            shelf.error, shelf.stuck = None, False
        assert store.flush(10)
        for guard in store._far:
            for breaker in (guard.reads, guard.writes):
                breaker._until = 0.0
        for key in KEYS:
            held = any(key in shelf.held for shelf in shelves)
            assert blob_of(store.get([key])[0]) in (put[key] if held else (None, *put.get(key, ())))
