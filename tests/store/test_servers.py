"""Redis that dies, hangs, forgets and runs full; buckets that do not answer."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from tests.store.oracle import KEYS, PARENTS, digest, rows
from tests.store.servers import RedisServer

from quire.base.errors import TierError
from quire.contracts.store import StoreTier
from quire.store import redis as redis_tier
from quire.store import remote
from quire.store.keys import record_key
from quire.store.memory import MemoryTier
from quire.store.redis import RedisTier
from quire.store.remote import ObjectTier
from quire.store.stack import Store

R = TypeVar("R")
A, AB, B = rows("a"), rows("ab"), rows("b")


@pytest.fixture
def server() -> Iterator[RedisServer]:
    server = RedisServer()
    try:
        yield server
    finally:
        server.thaw()
        server.kill()


def do(tier: StoreTier, function: Callable[[], Awaitable[R]]) -> R:
    async def run() -> R:
        try:
            return await function()
        finally:
            await tier.close()

    return asyncio.run(run())


def test_a_server_that_dies_and_comes_back(server: RedisServer) -> None:
    tier = RedisTier(server.url, None, label="the server")

    async def run() -> None:
        assert await tier.put(A, b"a")
        server.kill()
        for _ in range(2):
            for call in (tier.get([A]), tier.put(B, b"b"), tier.children([A.parent]), tier.stat(), tier.remove([A])):
                with pytest.raises(TierError, match="the server: "):
                    await call
        server.start()
        assert await tier.get([A]) == [None], "it keeps nothing on a disk"
        assert await tier.put(A, b"a"), "the scripts are loaded again"
        assert await tier.get([A]) == [b"a"]

    do(tier, run)


def test_a_server_that_hangs(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_tier, "ANSWER_SECONDS", 0.1)
    tier = RedisTier(server.url, None)

    async def run() -> None:
        assert await tier.put(A, b"a")
        server.freeze()
        start = time.monotonic()
        for call in (tier.get([A]), tier.put(B, b"b"), tier.contains([A])):
            with pytest.raises(TierError):
                await call
        assert time.monotonic() - start < 5
        server.thaw()
        assert await tier.get([A]) == [b"a"]

    do(tier, run)


def test_a_server_that_accepts_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_tier, "ANSWER_SECONDS", 0.1)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        tier = RedisTier(f"redis://:secret@127.0.0.1:{deaf.getsockname()[1]}/0", None, label="deaf")

        async def run() -> None:
            with pytest.raises(TierError, match="deaf: ") as error:
                await tier.get([A])
            assert "secret" not in str(error.value)

        do(tier, run)


@pytest.mark.parametrize("capacity", [None, 1000])
def test_a_server_that_is_flushed_in_the_middle(server: RedisServer, capacity: int | None) -> None:
    tier = RedisTier(server.url, capacity)

    async def run() -> None:
        for _ in range(2):
            assert await tier.put(A, bytes(600))
            assert await tier.put(AB, bytes(300))
            assert not await tier.put(B, bytes(2000)) or capacity is None
            server.command("FLUSHALL")
            assert await tier.get([A, AB]) == [None, None]
            assert await tier.children(PARENTS) == [[] for _ in PARENTS]
            assert (await tier.stat()).bytes == 0
        server.command("FLUSHALL")
        assert await tier.put(B, bytes(600))
        assert await tier.put(A, bytes(600))
        assert await tier.contains([A, B]) == [True, capacity is None]

    do(tier, run)


@pytest.mark.parametrize("lost", ["object", "bookkeeping"])
def test_keys_that_the_server_gave_up(server: RedisServer, lost: str) -> None:
    tier = RedisTier(server.url, 1000)

    async def run() -> None:
        for key in (A, AB, B):
            assert await tier.put(key, b"123")
        await tier.pin([AB], True)
        if lost == "object":
            server.command("DEL", f"quire:object:{AB.name}")
            assert await tier.children([AB.parent]) == [[AB]], "the name is still there"
            assert await tier.get([AB]) == [None]
            assert await tier.children([AB.parent]) == [[]], "until it was asked for"
            assert (await tier.stat()).bytes == 6
            assert (await tier.stat()).pinned == 0
        else:
            server.command(
                "DEL", "quire:size", "quire:use", "quire:queue", "quire:bytes", f"quire:under:{AB.parent.hex()}"
            )
            assert await tier.get([A, AB, B]) == [b"123"] * 3
        for key in KEYS:
            assert await tier.put(key, bytes(100))
            assert await tier.contains([key]) == [True]

    do(tier, run)


def test_a_server_with_a_limit_of_its_own(server: RedisServer) -> None:
    tier = RedisTier(server.url, None)

    async def run() -> None:
        server.command("CONFIG", "SET", "maxmemory", "9mb")
        server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        answers = [await tier.put(record_key("x", str(number)), bytes(1 << 20)) for number in range(10)]
        assert answers[0]
        assert not answers[-1], "no room that may be had"
        assert await tier.get([record_key("x", "0")]) == [bytes(1 << 20)]
        server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        assert await tier.put(record_key("x", "last"), bytes(1 << 20))
        keys = (await tier.children([record_key("x", "0").parent]))[0]
        blobs = await tier.get(keys)
        assert all(blob is None or len(blob) == 1 << 20 for blob in blobs)

    do(tier, run)


def test_clients_that_write_the_same(server: RedisServer) -> None:
    async def run() -> None:
        tiers = [RedisTier(server.url, 1000) for _ in range(3)]

        async def work(tier: RedisTier, start: int) -> None:
            for number in range(60):
                key = KEYS[(start + number) % len(KEYS)]
                assert await tier.put(key, key.digest * 10)
                (blob,) = await tier.get([key])
                assert blob in (None, key.digest * 10)
                if number % 7 == 0:
                    await tier.remove([key])

        await asyncio.gather(*(work(tier, start) for start, tier in enumerate(tiers)))
        keys = [key for found in await tiers[0].children(PARENTS) for key in found]
        assert await tiers[0].get(keys) == [key.digest * 10 for key in keys]
        stat = await tiers[0].stat()
        assert (stat.objects, stat.bytes) == (len(keys), 200 * len(keys))
        assert stat.bytes <= 1000
        for tier in tiers:
            await tier.close()

    asyncio.run(run())


def test_nothing_is_connected_before_it_is_used() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(0.1)
        tier = RedisTier(f"redis://127.0.0.1:{server.getsockname()[1]}/0", None)
        with pytest.raises(TimeoutError):
            server.accept()
        asyncio.run(tier.close())


def test_a_store_goes_on_whatever_happens_to_redis(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, hanging, flushed and started again, under four threads that read and write."""
    monkeypatch.setattr(redis_tier, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr("quire.store.tier_guard.FIRST_REST", 0.02)
    monkeypatch.setattr("quire.store.tier_guard.LONGEST_REST", 0.05)
    store = Store([MemoryTier(500), RedisTier(server.url, 2000)], seconds=1.0)
    ended, errors, hits = threading.Event(), [], [0]

    def work(start: int) -> None:
        number = start
        try:
            while not ended.is_set():
                number += 1
                key = KEYS[number % len(KEYS)]
                store.put(key, key.digest * 5, durable=True)
                store.children([key.parent], timeout=0.2).result(10)
                found = store.get([key])[0].result(10)
                hits[0] += found is not None
                assert found is None or bytes(found.blob) == key.digest * 5
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(3 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for fault in (server.kill, server.start, server.freeze, server.thaw, lambda: server.command("FLUSHALL")):
        fault()
        time.sleep(0.25)
    before, deadline = hits[0], time.monotonic() + 10
    while hits[0] < before + 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    ended.set()
    for thread in threads:
        thread.join(10)
    assert errors == []
    assert hits[0] >= before + 20, "it is used again"
    assert store.snapshot()["quire:store_failures_total"] > 0
    store.close()


# --------------------------------------------------------------------- buckets


def test_a_bucket_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "very-secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(remote.RETRIES, "max_retries", 0)
    tier = ObjectTier("s3://bucket/prefix")

    async def run() -> None:
        for call in (tier.get([A]), tier.put(A, b""), tier.children([digest("")]), tier.stat(), tier.pin([A], True)):
            with pytest.raises(TierError, match=r"s3://bucket/prefix: .*error sending request") as error:
                await call
            assert "very-secret" not in str(error.value)
            assert "\n" not in str(error.value)

    do(tier, run)


def test_other_objects_of_a_bucket_are_passed_over(tmp_path: Path) -> None:
    tier = ObjectTier(f"file://{tmp_path}")

    async def run() -> None:
        assert await tier.put(A, b"a")
        folder = tmp_path / A.parent.hex()
        (folder / "notes").write_text("not ours")
        (folder / AB.name).write_text("under another parent")
        (tmp_path / A.name).write_text("at another place")
        assert await tier.children([A.parent]) == [[A]]
        assert (await tier.stat()).objects == 1

    do(tier, run)


def test_signatures_are_not_repeated() -> None:
    error = RuntimeError(
        "GET https://x.blob.core.windows.net/c/k?sig=very-secret&se=1 failed: 403\nDebug source:\nmore"
    )
    assert remote._brief(error) == "GET https://x.blob.core.windows.net/c/k?... failed: 403"
