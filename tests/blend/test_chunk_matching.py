"""Chunks are found wherever they stand, and of those that overlap the best set is taken."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.blend import chunk_matching
from quire.blend.chunk_matching import LEAST, MOST, KnownChunks, Placement, cuts
from quire.blend.token_sums import WINDOW, TokenSums
from quire.contracts.store import ObjectKey, ObjectKind
from quire.store.keys import record_key

PARENT = b"p" * 20
Ids = Sequence[int]


def array(ids: Ids) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(ids, np.int64)


def key_of(ids: Ids) -> ObjectKey:
    return TokenSums(array(ids)).key(PARENT, 0, len(ids))


def known(*texts: Ids) -> KnownChunks:
    return KnownChunks(PARENT, {key_of(one): "memory" for one in texts})


def found(chunks: KnownChunks, ids: Ids, indices: Ids = (), begin: int = 0, end: int | None = None) -> list[Placement]:
    return chunks.match(array(ids), indices, begin, len(ids) if end is None else end)


def spans(placements: Sequence[Placement]) -> list[tuple[int, int, int]]:
    return [(one.start, one.stop, one.skip) for one in placements]


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


# -- an oracle -------------------------------------------------------------------------------------


def best(options: Sequence[tuple[int, int]], low: int) -> tuple[int, list[tuple[int, int]]]:
    """The set of ranges from ``low`` on that covers most; the earliest, then the longest, first."""
    top: tuple[int, list[tuple[int, int]]] = (0, [])
    for start, stop in sorted({one for one in options if one[0] >= low}, key=lambda one: (one[0], -one[1])):
        covered, rest = best(options, stop)
        if covered + stop - start > top[0]:
            top = (covered + stop - start, [(start, stop), *rest])
    return top


def expected(texts: Sequence[Ids], ids: Ids, indices: Ids, begin: int, end: int) -> list[tuple[int, int]]:
    """What ``match`` must find: no hash in it."""
    texts = [list(one) for one in texts]
    marked = [
        (max(start, begin), min(stop, end))
        for start, stop in pairwise([0, *indices, len(ids)])
        if list(ids[start:stop]) in texts and min(stop, end) - max(start, begin) >= LEAST
    ]
    edges = [begin, *(edge for one in marked for edge in one), end]
    taken = list(marked)
    for low, high in zip(edges[::2], edges[1::2], strict=True):
        places = [
            (max(start, low), min(start + len(one), high))
            for one in texts
            if len(one) >= WINDOW
            for start in range(len(ids) - len(one) + 1)
            if list(ids[start : start + len(one)]) == one
        ]
        taken += best([one for one in places if one[1] - one[0] >= LEAST], low)[1]
    return sorted(taken)


@settings(max_examples=100)
@given(data=st.data())
def test_the_best_set_is_found(data: st.DataObject) -> None:
    """Chunks that repeat, overlap and are parts of each other, in prompts made of their pieces."""
    letters = st.integers(0, 2)
    base = data.draw(st.lists(letters, min_size=90, max_size=110))
    texts = []
    for _ in range(data.draw(st.integers(1, 6))):
        start, length = data.draw(st.integers(0, 60)), data.draw(st.integers(WINDOW - 4, 48))
        texts.append(base[start : start + length])
    ids: list[int] = []
    marks = []
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(("chunk", "chunk", "base", "noise", "same")))
        if kind == "chunk":
            ids += data.draw(st.sampled_from(texts))
        elif kind == "base":
            ids += base[data.draw(st.integers(0, 50)) :]
        elif kind == "same":
            ids += [texts[0][0]] * data.draw(st.integers(0, 40))
        else:
            ids += data.draw(st.lists(letters, max_size=30))
        if data.draw(st.integers(0, 2)) == 0:
            marks += [len(ids)] * data.draw(st.integers(1, 2))
    if data.draw(st.booleans()):
        texts.append([texts[0][0]] * WINDOW)  # overlaps itself
    begin = data.draw(st.integers(0, len(ids) // 2))
    end = data.draw(st.integers(max(begin, len(ids) - 20), len(ids)))
    result = found(known(*texts), ids, marks, begin, end)
    for one in result:
        chunk = ids[one.origin : one.origin + one.key.count]
        assert key_of(chunk) == one.key
        assert one.stop - one.start + one.skip <= one.key.count
    assert [(one.start, one.stop) for one in result] == expected(texts, ids, marks, begin, end)


# -- examples --------------------------------------------------------------------------------------


def test_anywhere_and_again() -> None:
    """Without marks, twice in one prompt, with holes between."""
    one, other = numbers(0, 40), numbers(100, 33)
    ids = [5, *other, 6, 6, *one, *one, 9]
    assert spans(found(known(one, other), ids)) == [(1, 34, 0), (36, 76, 0), (76, 116, 0)]
    assert found(known(numbers(1, 40)), ids) == []
    assert found(known(), ids) == []
    assert found(known(one), []) == []


def test_short_chunks_are_found_where_they_are_marked() -> None:
    short = numbers(0, WINDOW - 1)
    ids = [*short, *numbers(500, 20)]
    assert found(known(short), ids) == []
    assert spans(found(known(short), ids, [len(short)])) == [(0, len(short), 0)]
    assert spans(found(known(short), ids, [0, 0, len(short), len(short)])) == [(0, len(short), 0)]
    assert key_of(short).digest[:4] == bytes(4)


def test_marked_segments_come_first() -> None:
    """Also where another choice would cover more."""
    long = numbers(0, 90)
    middle = long[20:60]
    assert spans(found(known(long, middle), long)) == [(0, 90, 0)]
    assert spans(found(known(long, middle), long, [20, 60])) == [(0, 20, 0), (20, 60, 0), (60, 90, 60)]


def test_only_wanted_rows() -> None:
    """A chunk that begins before them is used from there on; too few rows are not worth it."""
    one = numbers(0, 50)
    ids = [*numbers(900, 10), *one, *numbers(950, 10)]
    assert spans(found(known(one), ids, begin=20, end=55)) == [(20, 55, 10)]
    assert spans(found(known(one), ids, [10, 60], begin=20, end=55)) == [(20, 55, 10)]
    assert spans(found(known(one), ids, begin=60 - LEAST)) == [(60 - LEAST, 60, 50 - LEAST)]
    assert found(known(one), ids, begin=61 - LEAST) == []
    assert found(known(one), ids, [10, 60], begin=61 - LEAST) == []


def test_other_objects_are_no_chunks() -> None:
    one = numbers(0, 40)
    rows = ObjectKey(PARENT, ObjectKind.ROWS, 40, key_of(one).digest)
    assert found(KnownChunks(PARENT, {rows: "memory", record_key("branch", "x"): "disk"}), one) == []


def test_hashes_alone_decide_nothing() -> None:
    """Keys of the same hashes whose tokens are others are passed over, and what is left is chosen
    from again."""
    one, inner = numbers(0, 80), numbers(20, 40)
    right = key_of(one)
    forged = ObjectKey(PARENT, ObjectKind.CHUNK, 80, right.digest[:8] + bytes(12))
    inside = key_of(inner)
    assert spans(found(KnownChunks(PARENT, {forged: "memory", inside: "memory"}), one)) == [(20, 60, 0)]
    assert found(KnownChunks(PARENT, {forged: "memory", right: "memory"}), one)[0].key == right
    assert found(KnownChunks(PARENT, {forged: "memory"}), one, [80]) == []
    many = [ObjectKey(PARENT, ObjectKind.CHUNK, 80, right.digest[:8] + bytes([n] * 12)) for n in range(20)]
    assert found(KnownChunks(PARENT, dict.fromkeys(many, "memory")), one) == []


def test_parents_part_chunks() -> None:
    one = numbers(0, 40)
    assert found(KnownChunks(b"q" * 20, {key_of(one): "memory"}), one) == []


def test_equal_sets_are_told_apart_by_their_beginning() -> None:
    ids = numbers(0, 60)
    early, late = ids[:40], ids[20:]
    assert spans(found(known(late, early), ids)) == [(0, 40, 0)]
    # Two give the same wanted rows: the smaller object is read.
    assert found(known(ids, late), [*ids, 5], begin=20)[0].key == key_of(late)


@pytest.mark.parametrize("n", [0, LEAST - 1, LEAST, MOST, MOST + 1, 3 * MOST, 3 * MOST + 1])
def test_segments_are_cut_evenly(n: int) -> None:
    pieces = cuts(n)
    assert len(pieces) == (-(-n // MOST) if n >= LEAST else 0)
    assert [0, *(stop for _, stop in pieces)] == [*(start for start, _ in pieces), n if pieces else 0]
    sizes = [stop - start for start, stop in pieces]
    assert all(LEAST <= size <= MOST for size in sizes)
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_long_segments_are_found_in_pieces() -> None:
    ids = numbers(0, MOST + 10)
    (_, half), _ = cuts(len(ids))
    assert spans(found(known(ids[half:]), ids, [len(ids)])) == [(half, MOST + 10, 0)]


def test_what_is_looked_at_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that repeats, and chunks of it of all lengths: less is found, never something wrong."""
    same = [3] * 3000
    chunks = known(*(same[:n] for n in range(WINDOW, 400)))
    monkeypatch.setattr(chunk_matching, "PAIRS", 3000)
    monkeypatch.setattr(chunk_matching, "CANDIDATES", 100)
    result = found(chunks, same)
    assert result
    assert all(one.key == key_of(same[: one.key.count]) for one in result)
    assert all(a.stop <= b.start for a, b in pairwise(result))


def test_hashes_of_runs_depend_on_nothing_else() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(-5, 2**40, 5000)
    sums, starts, counts = TokenSums(ids), rng.permutation(4000)[:200], rng.integers(WINDOW, 1000, 200)
    alone = [TokenSums(ids[start : start + count]) for start, count in zip(starts, counts, strict=True)]
    hashes = [int(one.hashes(np.array([0]), np.array([count]))[0]) for one, count in zip(alone, counts, strict=True)]
    assert sums.hashes(starts, counts).tolist() == hashes
    firsts = [int(one.beginnings()[0]) for one in alone]
    assert sums.beginnings()[starts].tolist() == firsts
    assert len({*hashes, *firsts}) == 400
    changed = ids.copy()
    changed[starts[0] + 1] += 1
    assert TokenSums(changed).hashes(starts[:1], counts[:1])[0] != hashes[0]


def test_matching_is_quick() -> None:
    """100,000 tokens and 10,000 chunks: 8 ms of the processor, here at most 50, in the best try."""
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 50_000, int(size)) for size in rng.integers(100, 1500, 10_000)]
    chunks = KnownChunks(PARENT, {TokenSums(one).key(PARENT, 0, one.size): "memory" for one in texts})
    ids = np.concatenate([texts[index] for index in rng.integers(0, 10_000, 150)])[:100_000]
    seconds = []
    for _ in range(5):
        started = time.thread_time()
        result = chunks.match(ids, [], 0, ids.size)
        seconds.append(time.thread_time() - started)
    assert sum(one.stop - one.start for one in result) > 98_000
    assert min(seconds) < 0.05
