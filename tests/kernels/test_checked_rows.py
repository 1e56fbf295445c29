"""Rows that C++ verifies and copies in one call, against the plain checksum and copies by index."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import xxhash
from numpy.typing import NDArray

from quire.kernels.native_library import native_problem
from quire.kernels.rows.checked_rows import SHORTEST, CheckedPieces, CheckedRows, RowRuns, checked_rows

SIZES = (*range(SHORTEST, 340), 1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 2112, 5000, 98304)
"""In bytes. XXH3 goes by stripes of 64 and blocks of 1,024, the last stripe by itself."""
NOTHING = 0xA5
"""What slots hold that nothing is written to."""


@pytest.fixture
def call() -> CheckedRows:
    found = checked_rows()
    if found is None:
        pytest.skip(native_problem())
    return found


@dataclass
class Pool:
    """Pieces in memory, at any address, and slots for their rows."""

    row: int
    slots: int
    pieces: list[NDArray[np.uint8]] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)

    def add(self, rng: np.random.Generator, rows: int) -> None:
        memory = rng.integers(0, 256, rows * self.row + 64, dtype=np.uint8)
        begin = int(rng.integers(64))
        self.pieces.append(memory[begin : begin + rows * self.row])
        self.digests.append(xxhash.xxh3_128_digest(self.pieces[-1]))

    def run(self, call: CheckedRows, runs: RowRuns) -> tuple[int, NDArray[np.uint8]]:
        """Return the answer and the slots, around which nothing may be written."""
        memory = torch.full((self.slots + 2, self.row), NOTHING, dtype=torch.uint8)
        places, sizes = (
            np.array([one.ctypes.data for one in self.pieces], dtype=np.int64),
            np.array([one.size for one in self.pieces], dtype=np.int64),
        )
        found = call(CheckedPieces(places, sizes, b"".join(self.digests)), runs, memory[1:-1])
        assert (memory[[0, -1]] == NOTHING).all()
        return found, memory[1:-1].numpy()

    def expected(
        self, counts: list[int], skipped: list[int], slots: NDArray[np.int64], whole: int
    ) -> NDArray[np.uint8]:
        """The slots when the first ``whole`` pieces are right and the next one is not."""
        found, place = np.full((self.slots, self.row), NOTHING, dtype=np.uint8), 0
        for piece, count, skip in list(zip(self.pieces, counts, skipped, strict=True))[:whole]:
            found[slots[place : place + count]] = piece.reshape(-1, self.row)[skip : skip + count]
            place += count
        return found


def numbers(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


@pytest.mark.turns(3)  # of 6 none may be whole stripes
@pytest.mark.parametrize("size", SIZES)
def test_the_checksum_is_that_of_state_files(call: CheckedRows, size: int) -> None:
    rng = np.random.default_rng(size)
    pool = Pool(row=1, slots=size)
    pool.add(rng, size)
    runs = RowRuns.of(numbers([size]), numbers([0]), np.arange(size))
    found, slots = pool.run(call, runs)
    assert found == 1
    assert (slots[:, 0] == pool.pieces[0]).all()
    edges = {
        0,
        7,
        63,
        64,
        size - 65,
        size - 64,
        size - 63,
        size - 1,
        *range(1023, size, 1024),
        *range(1024, size, 1024),
    }
    for place in sorted(edges | set(rng.integers(0, size, 20).tolist())):
        bit = np.uint8(1 << int(rng.integers(8)))
        pool.pieces[0][place] ^= bit
        found, slots = pool.run(call, runs)
        assert found == 0, place
        assert (slots == NOTHING).all()
        pool.pieces[0][place] ^= bit
    for digit in range(128):
        wrong = int.from_bytes(pool.digests[0]) ^ 1 << digit
        right, pool.digests[0] = pool.digests[0], wrong.to_bytes(16)
        assert pool.run(call, runs)[0] == 0
        pool.digests[0] = right


@pytest.mark.turns(2)
@pytest.mark.parametrize("seed", range(40))
def test_rows_go_where_the_plain_copy_puts_them(call: CheckedRows, seed: int) -> None:
    """Also rows of odd lengths, parts of pieces, slots in any order; up to a damaged piece."""
    rng = np.random.default_rng(seed)
    row = int(rng.choice([1, 3, 16, 24, 64, 100, 384, 1024]))
    pool = Pool(row=row, slots=4000)
    counts, skipped = [], []
    for _ in range(int(rng.integers(1, 6))):
        rows = -(-SHORTEST // row) + int(rng.integers(0, 40))
        pool.add(rng, rows)
        skipped.append(int(rng.integers(rows)))
        counts.append(int(rng.integers(1, rows - skipped[-1] + 1)))
    total = sum(counts)
    # Pages in any order, which sometimes follow each other.
    page = int(rng.choice([1, 4, 16]))
    pages = rng.permutation(-(-total // page) + 3)
    slots = (pages[:, None] * page + np.arange(page)).reshape(-1)[:total].astype(np.int64)
    runs = RowRuns.of(numbers(counts), numbers(skipped), slots)
    assert runs.lengths.sum() == total
    found, there = pool.run(call, runs)
    assert found == len(counts)
    assert (there == pool.expected(counts, skipped, slots, found)).all()
    damaged = int(rng.integers(len(counts)))
    pool.pieces[damaged][int(rng.integers(pool.pieces[damaged].size))] ^= 1
    found, there = pool.run(call, runs)
    assert found == damaged
    assert (there == pool.expected(counts, skipped, slots, damaged)).all()


def test_runs_are_as_long_as_they_can_be() -> None:
    runs = RowRuns.of(numbers([3, 4, 1]), numbers([2, 0, 5]), numbers([7, 8, 9, 10, 11, 3, 4, 5]))
    assert runs.rows.tolist() == [2, 0, 2, 5]
    assert runs.slots.tolist() == [7, 10, 3, 5]
    assert runs.lengths.tolist() == [3, 2, 2, 1]
    assert runs.ends.tolist() == [1, 3, 4]
