"""``Room``: the order in which things are given up.

``FinalizerQueue``: what ends when an object is gone.
"""

from __future__ import annotations

import gc
import threading

import pytest

from quire.base.finalizers import FinalizerQueue
from quire.base.interrupts import Lock
from quire.runner.reclaim import ReclaimKind, Room


class Owner:
    """It has some things of each rank."""

    def __init__(self, log: list[tuple[str, ReclaimKind]], name: str, **things: int) -> None:
        self.log, self.name = log, name
        self.things = {ReclaimKind[rank]: count for rank, count in things.items()}

    def reclaim_one(self, rank: ReclaimKind) -> bool:
        if not self.things.get(rank):
            return False
        self.things[rank] -= 1
        self.log.append((self.name, rank))
        return True

    def reclaimable(self) -> list[int]:
        return [sum(self.things.values())]


def test_ranks_go_before_owners() -> None:
    log: list[tuple[str, ReclaimKind]] = []
    room = Room()
    first, second = Owner(log, "a", IDLE=1, PREFIXES=2), Owner(log, "b", FINALIZERS=1, STATES=1, SCARCE_STATES=1)
    room.join(first)
    room.join(second)
    assert room.reclaimable() == {3}
    while room.make():
        pass
    ranks = [rank for _, rank in log]
    assert ranks == sorted(ranks, key=list(ReclaimKind).index)
    assert len(log) == 6
    assert not room.make()


def test_one_thing_at_a_time() -> None:
    log: list[tuple[str, ReclaimKind]] = []
    room, owner = Room(), Owner(log, "a", PREFIXES=3)
    room.join(owner)
    assert room.make()
    assert len(log) == 1


def test_a_call_that_asks_gives_up_orphans_only() -> None:
    log: list[tuple[str, ReclaimKind]] = []
    room = Room()
    asker, other = Owner(log, "asker", FINALIZERS=1, SCARCE_STATES=1, PREFIXES=1), Owner(log, "other", IDLE=1)
    room.join(asker)
    room.join(other)
    while room.make(asker):
        pass
    assert log == [("asker", ReclaimKind.FINALIZERS), ("other", ReclaimKind.IDLE)]
    assert room.make()


def test_owners_are_not_held_and_may_leave() -> None:
    log: list[tuple[str, ReclaimKind]] = []
    room, left = Room(), Owner(log, "left", IDLE=1)
    room.join(left)
    room.leave(left)
    room.join(Owner(log, "gone", IDLE=1))
    gc.collect()
    assert not room.make()
    assert not log


class Thing:
    """Something to watch."""


def test_what_is_watched_ends_once_it_is_gone() -> None:
    finalizers, ended = FinalizerQueue(Lock()), []
    thing, kept, closed = Thing(), Thing(), Thing()
    finalizers.watch(thing, lambda: ended.append("thing"))
    finalizers.watch(kept, lambda: ended.append("kept"))
    finalizers.watch(closed, lambda: ended.append("closed"))
    assert not finalizers.run_finalizers()
    finalizers.unwatch(closed)
    del thing, closed
    assert not ended
    assert finalizers.run_finalizers()
    assert ended == ["thing"]
    assert not finalizers.run_finalizers()


def test_an_end_that_finds_nothing_is_none() -> None:
    finalizers, thing = FinalizerQueue(Lock()), Thing()
    finalizers.watch(thing, lambda: False)
    del thing
    assert not finalizers.run_finalizers()


def test_what_a_finaliser_leaves_ends_at_once_unless_a_thread_is_at_work() -> None:
    lock = Lock()
    finalizers, ended = FinalizerQueue(lock), list[str]()
    finalizers.leave(lambda: ended.append("free"))
    assert ended == ["free"]
    with lock:
        finalizers.leave(lambda: ended.append("own"))
        assert ended == ["free"]
        thread = threading.Thread(target=finalizers.leave, args=[lambda: ended.append("other")])
        thread.start()
        thread.join(30)
        assert ended == ["free"]
        assert finalizers.run_finalizers()
    assert ended == ["free", "own", "other"]


def test_ends_wait_until_they_can_be_called() -> None:
    ready, ended = [False], list[str]()
    finalizers = FinalizerQueue(Lock(), lambda: ready[0])
    finalizers.leave(lambda: ended.append("left"))
    assert not finalizers.run_finalizers()
    ready[0] = True
    assert finalizers.run_finalizers()
    assert ended == ["left"]


def test_an_end_that_fails_does_not_take_the_others_with_it() -> None:
    finalizers, ended = FinalizerQueue(Lock()), list[str]()

    def fail() -> None:
        raise RuntimeError("broken")

    with finalizers._lock:
        finalizers.leave(fail)
        finalizers.leave(lambda: ended.append("next"))
        with pytest.raises(RuntimeError, match="broken"):
            finalizers.run_finalizers()
        assert finalizers.run_finalizers()
    assert ended == ["next"]
