"""Processes that are killed while they write a directory, and processes that write it at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROCESS = """
import asyncio, os, random, signal, sys, time
from quire.store.files import FileTier
from quire.base.errors import TierError
from tests.store.oracle import KEYS, PARENTS

directory, capacity = sys.argv[1], 200_000


def blob_of(key, size):
    return (key.digest * (size // 20 + 1))[:size]


async def work(seed, steps, told=None):
    chosen, tier = random.Random(seed), FileTier(directory, capacity)
    await tier.put(chosen.choice(KEYS), b"")
    if told:
        os.write(told, b".")
    while steps:
        steps -= 1
        key = chosen.choice(KEYS)
        match chosen.randrange(12):
            case 0:
                await tier.remove([key])
            case 1:
                await tier.pin([key], chosen.random() < 0.3)
            case 2 | 3 | 4:
                check(key, (await tier.get([key]))[0])
            case _:
                await tier.put(key, blob_of(key, chosen.randrange(60_000)))
    await tier.close()


def check(key, blob):
    assert blob is None or bytes(blob) == blob_of(key, len(blob)), "a part of an object, or another one"


async def look():
    tier = FileTier(directory, capacity)
    keys = [key for found in await tier.children(PARENTS) for key in found]
    for key, blob in zip(keys, await tier.get(keys)):
        assert blob is not None, "an entry without its file"
        check(key, blob)
    stat = await tier.stat()
    assert stat.objects == len(keys) and stat.bytes <= capacity, stat
    sizes = [os.path.getsize(os.path.join(folder, name))
             for folder, _, names in os.walk(os.path.join(directory, "objects")) for name in names]
    assert (len(sizes), sum(sizes)) == (stat.objects, stat.bytes), "files without an entry"
    await tier.close()
    return len(keys)
"""
KILLER = """
seen = left = 0
random.seed(int(sys.argv[3]))
asyncio.run(look())  # loads all that is needed, once
for round in range(int(sys.argv[2])):
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            asyncio.run(work(round, -1, writer))
        finally:
            os._exit(1)
    os.read(reader, 1)  # it is at work
    os.close(reader)
    os.close(writer)
    time.sleep(random.uniform(0.0, 0.04))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "a writer ended by itself"
    left += any(name.endswith(".tmp") for _, _, names in os.walk(directory) for name in names)
    seen += asyncio.run(look()) > 0
print(seen, left)
"""
TOLD = """
import struct
from quire.store.keys import record_key

async def commit(first, told):
    tier, number = FileTier(directory, None), first
    while True:
        number += 1
        assert await tier.put(record_key("head", "x"), struct.pack("<Q", number) * random.randrange(1, 4000))
        os.write(told, struct.pack("<Q", number))


async def committed():
    tier = FileTier(directory, None)
    (blob,) = await tier.get([record_key("head", "x")])
    await tier.close()
    numbers = set(struct.unpack(f"<{len(blob) // 8}Q", blob)) if blob is not None else {0}
    assert len(numbers) == 1, "parts of two commits"
    return numbers.pop()


last = 0
asyncio.run(committed())
for round in range(int(sys.argv[2])):
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        random.seed(round)
        asyncio.run(commit(last, writer))
    os.close(writer)
    first = os.read(reader, 8)  # it is at work
    time.sleep(random.uniform(0.0, 0.02))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with open(reader, "rb") as pipe:
        told = [number for (number,) in struct.iter_unpack("<Q", first + pipe.read())]
    found = asyncio.run(committed())
    assert found >= max([last, *told]), (found, last, told[-3:])
    last = found
print(last)
"""
PAIR = """
pids = []
for seed in (1, 2):
    pids.append(os.fork())
    if not pids[-1]:
        code = 1
        try:
            asyncio.run(work(seed, int(sys.argv[2])))
            code = 0
        finally:
            os._exit(code)
assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0], "a process failed"
print(asyncio.run(look()))
"""


def launched(*arguments: object) -> list[int]:
    """What a script prints: numbers."""
    result = subprocess.run(
        [sys.executable, "-c", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return list(map(int, result.stdout.split()))


@pytest.mark.parametrize("rounds", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_kill_9_never_leaves_a_part_of_an_object(tmp_path: Path, rounds: int) -> None:
    seen, left = launched(PROCESS + KILLER, tmp_path, rounds, rounds)
    assert seen >= rounds // 2, "hardly any object was written: the test shows nothing"
    assert left, "no kill came while a file was written: the test shows nothing"


@pytest.mark.parametrize("rounds", [15, pytest.param(500, marks=pytest.mark.slow)])
def test_kill_9_loses_nothing_that_was_promised(tmp_path: Path, rounds: int) -> None:
    """A record that was replaced is the new one, once its writer was told so."""
    (last,) = launched(PROCESS + TOLD, tmp_path, rounds)
    assert last >= rounds, "hardly anything was written: the test shows nothing"


@pytest.mark.parametrize("steps", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_two_processes_write_and_give_up_the_same(tmp_path: Path, steps: int) -> None:
    assert launched(PROCESS + PAIR, tmp_path, steps) > [0]
