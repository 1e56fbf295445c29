"""``FileTier`` where the disk is full or read-only, files and index are damaged or
replaced: a miss at worst, never a part of an object, never a lost file.

A flipped byte inside of a file is nothing that the tier notices: the reader's checksums are for it.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import os
import resource
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.store.oracle import KEYS, PARENTS, digest, rows, stop

from quire.base.errors import InvalidArgument, TierError, TierFull
from quire.contracts.store import ObjectKey, StoreTier
from quire.store import file_index, files
from quire.store.files import FileTier
from quire.store.keys import record_key
from quire.store.memory import MemoryTier
from quire.store.redis import RedisTier
from quire.store.remote import ObjectTier

R = TypeVar("R")
A, AB, B = rows("a"), rows("ab"), rows("b")
RECORD = record_key("commit", "main")


def path_of(directory: Path, key: ObjectKey) -> Path:
    return directory / "objects" / key.digest.hex()[:2] / f"{key.name}.quire"


def index_of(directory: Path) -> Path:
    (path,) = directory.glob("index-*.sqlite")
    return path


def do(directory: Path, function: Callable[[FileTier], Awaitable[R]], capacity: int | None = None) -> R:
    """What a function does with an open tier, which is closed then."""

    async def run() -> R:
        tier = FileTier(directory, capacity)
        try:
            return await function(tier)
        finally:
            await tier.close()

    return asyncio.run(run())


async def fill(tier: FileTier) -> None:
    for key, blob in ((A, b"a"), (AB, b"ab"), (RECORD, b"first")):
        assert await tier.put(key, blob)
    await tier.pin([AB], True)


async def content(tier: FileTier) -> dict[ObjectKey, bytes]:
    """All that is found by its parent, read, and counted."""
    keys = [key for found in await tier.children(PARENTS) for key in found]
    blobs = await tier.get(keys)
    stat = await tier.stat()
    found = {key: bytes(blob) for key, blob in zip(keys, blobs, strict=True) if blob is not None}
    assert (stat.objects, stat.bytes) == (len(found), sum(map(len, found.values())))
    return found


FULL = {A: b"a", AB: b"ab", RECORD: b"first"}


# --------------------------------------------------------------------- a disk that does not take it


def half_a_write(sink: Any, blob: object) -> None:
    sink.write(b"half")
    fail(sink, blob)


def fail(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def full_index(*arguments: object) -> None:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise error


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (files, "_write", half_a_write),
        (os, "fsync", fail),
        (os, "replace", fail),
        (os, "fchmod", fail),
        (file_index.FileIndex, "add", full_index),
        (file_index.FileIndex, "use", full_index),
    ],
    ids=["write", "fsync", "rename", "permissions", "entry", "use"],
)
def test_what_cannot_be_written_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: object, name: str, fault: Callable[..., None]
) -> None:
    async def run(tier: FileTier) -> None:
        await fill(tier)
        with monkeypatch.context() as full:
            full.setattr(place, name, fault)
            for key in (B, RECORD):
                with pytest.raises(TierFull, match=r"directory '/.*full|directory '/.*No space left"):
                    await tier.put(key, b"second")
            assert await content(tier) == FULL
        assert await tier.put(B, b"b")
        assert await content(tier) == {**FULL, B: b"b"}

    do(tmp_path, run)
    assert not list(tmp_path.rglob("*.tmp"))
    assert do(tmp_path, content) == {**FULL, B: b"b"}


def test_a_file_that_the_system_cuts(tmp_path: Path) -> None:
    """The kernel's own error, at a limit of a file's size."""

    async def run(tier: FileTier) -> None:
        await fill(tier)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        try:
            with pytest.raises(TierError, match="File too large"):
                await tier.put(B, bytes(2 << 20))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert await content(tier) == FULL

    do(tmp_path, run)
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A filled directory that this process cannot write, not even as root."""
    directory = Path(tempfile.mkdtemp())
    do(directory, fill)
    is_root = os.geteuid() == 0

    def allow(folders: int, others: int) -> None:
        for path in (directory, *directory.rglob("*")):
            path.chmod(folders if path.is_dir() else others)

    allow(0o555, 0o444)
    if is_root:
        os.seteuid(65534)
    try:
        yield directory
    finally:
        if is_root:
            os.seteuid(0)
        allow(0o700, 0o600)
        shutil.rmtree(directory)


def test_a_read_only_directory_is_read(read_only: Path) -> None:
    async def run(tier: FileTier) -> None:
        assert await content(tier) == FULL
        assert (await tier.stat()).pinned == 2
        for key in (B, RECORD):
            with pytest.raises(TierError, match="full or read-only"):
                await tier.put(key, b"other")
        assert await content(tier) == FULL

    do(read_only, run)


def test_a_directory_that_can_be_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    do(tmp_path, fill)

    async def run(tier: FileTier) -> None:
        with monkeypatch.context() as full:
            full.setattr(FileTier, "_alone", fail)
            assert await content(tier) == FULL
            with pytest.raises(TierError):
                await tier.put(B, b"b")
        assert await tier.put(B, b"b")

    do(tmp_path, run)
    assert do(tmp_path, content) == {**FULL, B: b"b"}


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def run(tier: FileTier) -> None:
        for verb in (tier.get([A]), tier.put(A, b""), tier.stat(), tier.children([digest("")])):
            with pytest.raises(TierError, match=r"directory '/.*file/x'"):
                await verb

    do(tmp_path / "file/x", run)


# --------------------------------------------------------------------- the index


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: 3 * 4096 + 100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for position in range(4096, len(data), 97):
        data[position] ^= 0xFF
    path.write_bytes(data)


def other_version(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def no_tables(path: Path) -> None:
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {file_index.VERSION}")
    connection.close()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(os.urandom(20000)),
    "cut": cut,
    "flipped": flip,
    "version": other_version,
    "no tables": no_tables,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_made_again(tmp_path: Path, damage: str) -> None:
    do(tmp_path, fill)
    index_of(tmp_path).with_suffix(".sqlite-wal").write_bytes(b"left")
    DAMAGES[damage](index_of(tmp_path))
    assert do(tmp_path, content) == FULL
    assert do(tmp_path, lambda tier: tier.stat()).pinned == 2
    assert do(tmp_path, lambda tier: tier.put(B, bytes(4)), capacity=7), "what others stand under is known"
    assert do(tmp_path, content, capacity=7) == {A: b"a", AB: b"ab", B: bytes(4)}
    assert len(list(tmp_path.glob("index-*"))) == 1


def test_the_index_of_another_version_stays(tmp_path: Path) -> None:
    do(tmp_path, fill)
    other = tmp_path / f"index-{file_index.VERSION + 1}-0123456789abcdef.sqlite"
    index_of(tmp_path).rename(other)
    assert do(tmp_path, content) == FULL
    assert other.exists()


def test_a_call_that_runs_while_the_tier_closes_leaves_the_index(tmp_path: Path) -> None:
    async def story() -> None:
        tier = FileTier(tmp_path, None)
        await tier.put(A, b"x")
        at, closed = threading.Event(), threading.Event()

        def slow(index: file_index.FileIndex) -> list[str]:
            at.set()
            assert closed.wait(20)
            return index.under(A.parent)

        call = asyncio.create_task(tier._call(slow))
        assert await asyncio.to_thread(at.wait, 20)
        await tier.close()
        closed.set()
        with pytest.raises(TierError, match="closed"):
            await call
        assert index_of(tmp_path).exists()

    asyncio.run(story())


@pytest.mark.parametrize("damage", ["deleted", "garbage"])
def test_an_index_that_is_damaged_while_it_is_used(tmp_path: Path, damage: str) -> None:
    """Two tiers go on with one new index, as two processes would."""

    async def run() -> None:
        first, second = FileTier(tmp_path, None), FileTier(tmp_path, None)
        await fill(first)
        assert await content(second) == FULL
        for number in range(50):
            await first.put(record_key("other", str(number)), b"x")
        if damage == "deleted":
            for path in tmp_path.glob("index-*"):
                path.unlink()
        else:
            index = sqlite3.connect(index_of(tmp_path))
            index.execute("DROP TABLE totals")
            index.close()
        assert await second.put(B, b"b")
        assert await first.put(stop("a"), b"s")
        for tier in (first, second):
            assert await tier.contains(KEYS) == [key in (*FULL, B, stop("a")) for key in KEYS]
            assert (await tier.stat()).objects == 55
        await first.close()
        await second.close()

    asyncio.run(run())
    assert do(tmp_path, lambda tier: tier.stat()).objects == 55


def test_files_and_entries_that_have_no_other_half(tmp_path: Path) -> None:
    do(tmp_path, fill)
    whole = path_of(tmp_path, B)
    whole.parent.mkdir(exist_ok=True)
    whole.write_bytes(b"a file without an entry")
    (whole.parent / "notes.txt").write_text("not ours")
    (whole.parent / f"{stop('a').name}.quire").write_bytes(b"in a wrong folder")
    path_of(tmp_path, AB).unlink()
    (tmp_path / "pins/nothing").touch()
    assert do(tmp_path, content) == {A: b"a", RECORD: b"first", B: b"a file without an entry"}
    assert (whole.parent / "notes.txt").exists()
    assert list((tmp_path / "pins").iterdir()) == []


def test_files_beyond_the_budget_go_when_the_directory_is_opened(tmp_path: Path) -> None:
    do(tmp_path, fill)
    assert do(tmp_path, content, capacity=7) == {A: b"a", AB: b"ab"}, "a pin keeps what it stands under"


@pytest.mark.parametrize("verb", ["get", "contains", "put"])
@pytest.mark.parametrize("damage", ["cut", "grown", "gone", "a directory", "a link"])
def test_a_file_of_another_size_is_a_miss(tmp_path: Path, damage: str, verb: str) -> None:
    async def run(tier: FileTier) -> None:
        await fill(tier)
        path = path_of(tmp_path, AB)
        if damage == "cut":
            path.write_bytes(b"")
        elif damage == "grown":
            path.write_bytes(b"ab and more")
        else:
            path.unlink()
        if damage == "a directory":
            path.mkdir()
        if damage == "a link":
            (tmp_path / "target").write_bytes(b"xx")
            path.symlink_to(tmp_path / "target")
        if verb == "get":
            assert await tier.get([AB]) == [None]
        elif verb == "contains":
            assert await tier.contains([AB]) == [False]
        if damage == "a directory":  # which nobody removes
            assert verb != "put" or await refused(tier.put(AB, b"ab"))
            assert (await tier.stat()).objects == 2
        elif verb == "put":
            assert await tier.put(AB, b"ab")
            assert await content(tier) == FULL
        else:
            assert not path.is_symlink()
            assert not path.exists()
            assert await content(tier) == {A: b"a", RECORD: b"first"}
            assert (await tier.stat()).pinned == 0

    do(tmp_path, run)


def test_of_a_record_the_file_is_right(tmp_path: Path) -> None:
    """As a writer leaves it that is killed between the file's new name and the index."""

    async def run(tier: FileTier) -> None:
        await fill(tier)
        path_of(tmp_path, RECORD).write_bytes(b"the second")
        assert await content(tier) == {**FULL, RECORD: b"the second"}
        path_of(tmp_path, RECORD).write_bytes(b"3rd")
        assert await tier.contains([RECORD]) == [True]

    do(tmp_path, run)
    path_of(tmp_path, RECORD).write_bytes(b"the fourth")
    assert do(tmp_path, content) == {**FULL, RECORD: b"the fourth"}


async def refused(call: Awaitable[object]) -> bool:
    with pytest.raises(TierError):
        await call
    return True


def test_what_is_given_up_stays_readable_to_its_readers(tmp_path: Path) -> None:
    async def run(tier: FileTier) -> None:
        await tier.put(A, b"a" * 600)
        (blob,) = await tier.get([A])
        assert await tier.put(B, b"b" * 600)
        assert await tier.get([A]) == [None]
        assert blob is not None
        assert bytes(blob) == b"a" * 600
        assert memoryview(blob).readonly

    do(tmp_path, run, capacity=1000)


def test_only_so_many_files_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAPPED", 2)

    async def run(tier: FileTier) -> None:
        await fill(tier)
        blobs = await tier.get([A, AB, RECORD])
        assert [type(blob) for blob in blobs] == [memoryview, memoryview, bytes]
        assert [bytes(blob or b"") for blob in blobs] == [b"a", b"ab", b"first"]
        gc.disable()
        try:
            del blobs
            await asyncio.sleep(0.05)
            assert not tier._maps, "a circle keeps what nobody reads"
        finally:
            gc.enable()
        assert [type(blob) for blob in await tier.get([RECORD])] == [memoryview]

    do(tmp_path, run)


def test_permissions(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        do(tmp_path / "new", fill)
    finally:
        os.umask(before)
    for path in (tmp_path / "new", *(tmp_path / "new").rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_temporary_files_of_dead_writers_are_removed(tmp_path: Path) -> None:
    do(tmp_path, fill)
    folder = path_of(tmp_path, A).parent
    dead = folder / f".quire-{'0' * 16}-1-{'a' * 16}.tmp"
    alive = folder / f".quire-{'0' * 16}-1-{'b' * 16}.tmp"
    other = folder / "other.tmp"
    for path in (dead, alive, other):
        path.write_bytes(b"half")
    with open(alive, "rb+") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert do(tmp_path, content) == FULL
    assert (dead.exists(), alive.exists(), other.exists()) == (False, True, True)


def test_a_busy_index_is_an_error_and_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_index, "BUSY_SECONDS", 0.05)

    async def run(tier: FileTier) -> None:
        await fill(tier)
        other = sqlite3.connect(index_of(tmp_path), isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(TierError, match="locked"):
            await tier.put(B, b"b")
        assert [bytes(blob or b"") for blob in await tier.get([A])] == [b"a"]
        other.execute("ROLLBACK")
        other.close()
        assert await tier.put(B, b"b")

    do(tmp_path, run)


def test_a_directory_that_another_process_opens_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    do(tmp_path, fill)
    monkeypatch.setattr(files, "OPEN_SECONDS", 0.05)
    with open(tmp_path / "lock", "rb+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(TierError, match="is being opened by another process"):
            do(tmp_path, content)
    assert do(tmp_path, content) == FULL


def test_clocks_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the system's, which is set back before each use, nor that of the files."""
    now = 2e9

    def back() -> float:
        nonlocal now
        now -= 1000
        return now

    monkeypatch.setattr(time, "time", back)
    monkeypatch.setattr(time, "time_ns", lambda: int(back() * 1e9))

    async def run(tier: FileTier) -> None:
        for number, name in enumerate("abc"):
            await tier.put(record_key("x", name), bytes(300))
            os.utime(path_of(tmp_path, record_key("x", name)), (1e9 - number, 1e9 - number))
        await tier.get([record_key("x", "a")])
        await tier.put(record_key("x", "d"), bytes(300))
        assert await tier.contains([record_key("x", name) for name in "abcd"]) == [True, False, True, True]

    do(tmp_path, run, capacity=1000)


def test_uses_outlive_the_process(tmp_path: Path) -> None:
    async def use(tier: FileTier) -> None:
        for name in "abc":
            await tier.put(record_key("x", name), bytes(300))
        await tier.get([record_key("x", "a")])

    async def add(tier: FileTier) -> list[bool]:
        await tier.put(record_key("x", "d"), bytes(300))
        return await tier.contains([record_key("x", name) for name in "abcd"])

    do(tmp_path, use, capacity=1000)
    assert do(tmp_path, add, capacity=1000) == [True, False, True, True]


def test_many_uses_are_written_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that only reads tells the others."""
    monkeypatch.setattr(files, "USES_KEPT", 3)

    async def run() -> None:
        reader, writer = FileTier(tmp_path, 1000), FileTier(tmp_path, 1000)
        names = [record_key("x", name) for name in "abcd"]
        for key in names[:3]:
            await writer.put(key, bytes(300))
        await reader.get([names[1], names[2], names[0]])
        await writer.put(names[3], bytes(300))
        assert await reader.contains(names) == [True, False, True, True]
        await reader.close()
        await writer.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "key",
    [
        ObjectKey(digest(""), "../../../x", 0, digest("a")),  # type: ignore[arg-type]
        ObjectKey(digest(""), A.kind, "/../../../x", digest("a")),  # type: ignore[arg-type]
        ObjectKey(b"short", A.kind, 0, digest("a")),
        ObjectKey(digest(""), A.kind, -1, digest("a")),
        ObjectKey(digest(""), A.kind, 0, digest("a") + b"longer"),
    ],
    ids=["kind", "count", "parent", "negative", "digest"],
)
@pytest.mark.parametrize("tier", ["files", "bucket", "redis"])
def test_names_stay_where_they_belong(tmp_path: Path, tier: str, key: ObjectKey) -> None:
    inside = tmp_path / "a/b/c"
    inside.mkdir(parents=True)

    async def run() -> None:
        makers: dict[str, Callable[[], StoreTier]] = {
            "files": lambda: FileTier(inside, None),
            "bucket": lambda: ObjectTier(f"file://{inside}"),
            "redis": lambda: RedisTier("redis://127.0.0.1:1", None),
        }
        one = makers[tier]()
        for call in (one.get([key]), one.put(key, b""), one.contains([key]), one.remove([key]), one.pin([key], True)):
            with pytest.raises(InvalidArgument, match="is no name of an object"):
                await call
        await one.close()

    asyncio.run(run())
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")} == {"a"}
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_closed_tier_says_so(tmp_path: Path) -> None:
    async def run() -> None:
        tier = FileTier(tmp_path, None)
        await tier.close()
        with pytest.raises(TierError, match="is closed"):
            await tier.get([A])
        assert MemoryTier(1).label == "memory"

    asyncio.run(run())
