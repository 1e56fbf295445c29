"""Every tier does what ``StoreTier`` says: random operations against a dict, with evictions."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from tests.store.oracle import KEYS, PARENTS, Oracle, shown
from tests.store.servers import RedisServer

from quire.contracts.store import Blob, ObjectKey, ObjectPart, StoreTier, TierStat
from quire.store.files import FileTier
from quire.store.memory import MemoryTier, cut
from quire.store.redis import RedisTier
from quire.store.remote import ObjectTier

CAPACITY = 700
SIZES = (100, 100, 100, 200, 300, 0, 1001)
STEPS = 60
SHM = Path("/dev/shm")


@dataclass
class Bed:
    """A place for a tier; ``make`` opens it."""

    make: Callable[[], StoreTier]
    capacity: int | None
    checks: int = 1
    """Operations between two looks at all of the content."""


class Awaited:
    """Memory behind the interface of the other tiers."""

    kind = label = "memory"

    def __init__(self) -> None:
        self.tier = MemoryTier(CAPACITY)

    async def get(self, keys: Sequence[ObjectKey]) -> list[Blob | None]:
        return self.tier.get_now(keys)

    async def part(self, key: ObjectKey, start: int, stop: int) -> ObjectPart | None:
        return cut(self.tier.get_now([key])[0], start, stop)

    async def put(self, key: ObjectKey, blob: Blob) -> bool:
        return self.tier.put_now(key, blob)

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return self.tier.contains_now(keys)

    async def children(self, parents: Sequence[bytes]) -> list[list[ObjectKey]]:
        return self.tier.children_now(parents)

    async def remove(self, keys: Collection[ObjectKey]) -> int:
        return self.tier.remove_now(keys)

    async def pin(self, keys: Collection[ObjectKey], pinned: bool) -> None:
        self.tier.pin_now(keys, pinned)

    async def stat(self) -> TierStat:
        return self.tier.stat_now()

    async def close(self) -> None:
        self.tier.clear_now()


@contextmanager
def memory() -> Iterator[Bed]:
    yield Bed(Awaited, CAPACITY)


@contextmanager
def files(capacity: int | None = CAPACITY) -> Iterator[Bed]:
    # In memory where there is such a file system: nothing here is about syncing.
    directory = tempfile.mkdtemp(dir=SHM if SHM.is_dir() else None)
    try:
        yield Bed(lambda: FileTier(directory, capacity), capacity, checks=6)
    finally:
        shutil.rmtree(directory)


@contextmanager
def endless_files() -> Iterator[Bed]:
    with files(None) as bed:
        yield bed


@contextmanager
def bucket() -> Iterator[Bed]:
    directory = tempfile.mkdtemp(dir=SHM if SHM.is_dir() else None)
    try:
        yield Bed(lambda: ObjectTier(f"file://{directory}"), None, checks=15)
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.kill()


@contextmanager
def on(server: RedisServer, capacity: int | None) -> Iterator[Bed]:
    server.command("FLUSHALL")
    yield Bed(lambda: RedisTier(server.url, capacity), capacity, checks=6)


BEDS = {"memory": memory, "files": files, "endless_files": endless_files, "bucket": bucket}


async def check(tier: StoreTier, oracle: Oracle) -> None:
    """The whole content, without a use."""
    assert await tier.contains(KEYS) == [key in oracle.held for key in KEYS]
    assert [set(keys) for keys in await tier.children(PARENTS)] == [oracle.children(one) for one in PARENTS]
    stat = await tier.stat()
    assert (stat.objects, stat.bytes) == (len(oracle.held), sum(len(one.blob) for one in oracle.held.values()))
    assert stat.pinned == sum(len(one.blob) for one in oracle.held.values() if one.pinned)


async def step(tier: StoreTier, oracle: Oracle, random: Random, blob: bytes) -> None:
    """One operation of both: mostly puts and gets, so that evictions follow long chains of uses."""
    key, keys = random.choice(KEYS), random.choices(KEYS, k=random.randrange(4))
    match random.choices(("put", "get", "part", "pin", "remove", "contains"), (50, 30, 10, 4, 4, 2))[0]:
        case "put":
            note(f"put {shown(key)} {len(blob)}")
            assert await tier.put(key, blob) == oracle.put(key, blob)
        case "get":
            note(f"get {[*map(shown, keys)]}")
            assert [one if one is None else bytes(one) for one in await tier.get(keys)] == oracle.get(keys)
        case "pin":
            pinned = random.random() < 0.5
            note(f"pin {[*map(shown, keys)]} {pinned}")
            await tier.pin(keys, pinned)
            oracle.pin(keys, pinned)
        case "remove":
            note(f"remove {[*map(shown, keys)]}")
            assert await tier.remove(keys) == oracle.remove(keys)
            # Of uses below an object that is taken out of a chain, what it stood under need not
            # know. All are used again, for the order to be the same.
            assert [one is not None for one in await tier.get(KEYS)] == [one is not None for one in oracle.get(KEYS)]
        case "part":
            stop = random.choice((0, 1, 150, 2000))
            note(f"part {shown(key)} {stop}")
            part, (whole,) = await tier.part(key, 0, stop), oracle.get([key])
            found = None if part is None else (bytes(part.blob), part.size)
            assert found == (None if whole is None else (whole[:stop], len(whole)))
        case "contains":
            assert await tier.contains(keys) == [key in oracle.held for key in keys]


async def run(bed: Bed, random: Random) -> None:
    tier, oracle = bed.make(), Oracle(bed.capacity)
    for number in range(STEPS):
        await step(tier, oracle, random, bytes([number]) * random.choice(SIZES))
        if not isinstance(tier, Awaited) and random.random() < 0.03:
            note("reopen")
            await tier.close()
            tier = bed.make()
        if number % bed.checks == 0:
            await check(tier, oracle)
    await check(tier, oracle)
    await tier.close()


@pytest.mark.parametrize("name", BEDS)
@given(random=st.randoms(use_true_random=True))
def test_operations(name: str, random: Random) -> None:
    with BEDS[name]() as bed:
        asyncio.run(run(bed, random))


@pytest.mark.parametrize("capacity", [CAPACITY, None])
@given(random=st.randoms(use_true_random=True))
def test_operations_on_redis(server: RedisServer, capacity: int | None, random: Random) -> None:
    with on(server, capacity) as bed:
        asyncio.run(run(bed, random))


async def pieces(tier: StoreTier) -> None:
    key, blob = KEYS[0], bytes(range(256)) * 2
    assert await tier.part(key, 0, 10) is None
    assert await tier.put(key, blob)
    for start, stop in ((0, 512), (0, 5), (5, 6), (500, 512), (500, 9999)):
        part = await tier.part(key, start, stop)
        assert part is not None
        assert (bytes(part.blob), part.size) == (blob[start:stop], 512)
    await tier.close()


@pytest.mark.parametrize("name", BEDS)
def test_parts_of_an_object(name: str) -> None:
    with BEDS[name]() as bed:
        asyncio.run(pieces(bed.make()))


def test_parts_of_an_object_on_redis(server: RedisServer) -> None:
    with on(server, None) as bed:
        asyncio.run(pieces(bed.make()))
