"""Where text without marks is cut, and what of it is kept."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.blend import unmarked_text
from quire.blend.chunk_matching import KnownChunks
from quire.blend.token_sums import Ids, TokenSums
from quire.blend.unmarked_text import LONGEST, SHORTEST, SeenText, content_cuts, gaps
from quire.contracts.store import ObjectKey

PARENT, OTHER = b"\1" * 32, b"\2" * 32


def text(length: int, seed: int = 0) -> Ids:
    return np.random.default_rng([seed, length]).integers(0, 97, length)


def admits(seen: SeenText, ids: Ids, parent: bytes = PARENT) -> bool:
    return seen.admits(TokenSums(ids).key(parent, 0, ids.size), ids)


def test_lengths() -> None:
    """Chunks touch, are 64 to 512 tokens, about 256 on average, and leave little behind."""
    cuts = content_cuts(text(100_000), to_end=False)
    assert cuts[0][0] == 0
    assert all(one[1] == other[0] for one, other in itertools.pairwise(cuts))
    counts = [stop - start for start, stop in cuts]
    assert min(counts) >= SHORTEST
    assert max(counts) <= LONGEST
    assert 230 < np.mean(counts) < 270
    assert 100_000 - cuts[-1][1] < LONGEST


@given(st.integers(0, 2000), st.booleans(), st.booleans())
def test_ends(length: int, to_end: bool, alike: bool) -> None:
    """Of a text that ends there, at most 63 tokens are left, whatever it is."""
    ids = np.zeros(length, np.int64) if alike else text(length)
    cuts = content_cuts(ids, to_end=to_end)
    left = length - (cuts[-1][1] if cuts else 0)
    assert 0 <= left < (SHORTEST if to_end else LONGEST)
    assert all(SHORTEST <= stop - start <= LONGEST for start, stop in cuts)
    assert content_cuts(ids, to_end=True)[: len(cuts)] == cuts


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(0, 700), st.integers(0, 700))
def test_places_do_not_depend_on_what_stands_before(seed: int, one: int, other: int) -> None:
    """Nor on what comes behind: from the first common cut on all are."""
    document = text(4000, seed)
    found = []
    for before in (one, other):
        whole = np.concatenate((text(before, seed + 1), document, text(before, seed + 2)))
        cuts = content_cuts(whole, to_end=False)
        found.append({(a - before, b - before) for a, b in cuts if a >= before and a - before + LONGEST <= 4000})
    first = min(found[0] & found[1])[0]
    assert first < 3000
    assert {cut for cut in found[0] if cut[0] >= first} == {cut for cut in found[1] if cut[0] >= first}


@given(
    st.integers(0, 40),
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda one: (one[0], sum(one)))),
)
def test_gaps(begin: int, end: int, taken: list[tuple[int, int]]) -> None:
    free = [at for at in range(begin, end) if not any(low <= at < high for low, high in taken)]
    found = list(gaps(begin, end, taken))
    assert [at for low, high in found for at in range(low, high)] == free
    assert all(low < high for low, high in found)
    for at, _ in taken:  # an empty one parts what it stands in
        assert not any(low < at < high for low, high in found)


def test_what_is_seen_is_not_kept_again() -> None:
    seen, one, other = SeenText(), text(300, 1), text(300, 2)
    assert admits(seen, one)
    assert admits(seen, other)
    assert not admits(seen, np.concatenate((one[200:], other[:90])))
    assert not admits(seen, one[20:])
    assert admits(seen, one), "its chunk may be gone"
    assert admits(seen, np.concatenate((one[200:], text(120, 3))))


def test_salts_have_texts_of_their_own() -> None:
    seen, ids = SeenText(), text(300)
    assert admits(seen, ids)
    assert not admits(seen, ids[10:])
    assert admits(seen, ids[10:], OTHER)


def test_what_is_seen_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full table begins anew, and never takes most new text for old."""
    monkeypatch.setattr(unmarked_text, "SLOTS", 1 << 12)
    seen = SeenText()
    for seed in range(40):
        assert admits(seen, text(256, seed))
        assert seen._taken == seen._runs.sum() <= len(seen._runs) / 4
        assert len(seen._keys) <= 5
    assert not admits(seen, text(256, 39)[:200])
    assert admits(seen, text(256, 0)[:200]), "forgotten"


@pytest.mark.parametrize("lengths", [(900, 760, 1010, 830), range(300, 2300, 100), range(250, 450, 10)])
def test_orders_of_the_same_texts(lengths: Sequence[int]) -> None:
    """Whatever orders come, chunks hold each text about once, all but few of them since the first
    round."""
    documents = [text(length, 5) for length in lengths]
    rng, seen, tiers, counts = random.Random(0), SeenText(), dict[ObjectKey, str](), []
    for _ in range(4):
        for _ in range(2 * len(documents)):
            ids = np.concatenate(rng.sample(documents, 3))
            placed = KnownChunks(PARENT, tiers).match(ids, [], 0, ids.size)
            for low, high in gaps(0, ids.size, [(one.start, one.stop) for one in placed]):
                for start, stop in content_cuts(ids[low:high], to_end=high < ids.size):
                    part = ids[low + start : low + stop]
                    if admits(seen, part):
                        tiers[TokenSums(part).key(PARENT, 0, part.size)] = "memory"
        counts.append(len(tiers))
    assert counts[-1] <= 1.1 * counts[0]
    assert sum(key.count for key in tiers) <= 1.25 * sum(lengths)
