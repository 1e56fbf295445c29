"""Prefixes that were given up, against a list of all of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.prefix_trees import check_trees

from quire.engine.miss_search import LEAST, PastPrefixes

COMMON = [1] * LEAST
ENDS = st.lists(st.integers(0, 2), max_size=8)
NOTES = st.lists(st.tuples(ENDS, st.sampled_from("ab")), max_size=12)


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def common(a: list[int], b: list[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(notes=NOTES, asked=ENDS, key=st.sampled_from("ab"))
def test_all_that_fits_is_remembered(notes: list[tuple[list[int], str]], asked: list[int], key: str) -> None:
    past = PastPrefixes()
    for end, name in notes:
        past.note(ids(COMMON + end), name)
    known = [COMMON + end for end, name in notes if name == key]
    prompt = COMMON + asked
    length, following = past.ahead(ids(prompt), key, 3)
    assert length == max((common(one, prompt) for one in known), default=0)
    begun = prompt[:length] + following.tolist()
    assert not known or any(one[: len(begun)] == begun for one in known)
    distinct = {(name, *(COMMON + end)[:stop]) for end, name in notes for stop in range(1, LEAST + len(end) + 1)}
    assert past.num_tokens == len(distinct)
    past.clear()
    assert past.num_tokens == past.ahead(ids(prompt), key, 3)[0] == 0


@given(notes=NOTES, most_tokens=st.integers(LEAST, 60), most_prefixes=st.integers(1, 4))
def test_it_stays_within_its_bounds(notes: list[tuple[list[int], str]], most_tokens: int, most_prefixes: int) -> None:
    past = PastPrefixes(most_tokens, most_prefixes)
    for end, name in notes:
        past.note(ids(COMMON + end), name)
        assert past.num_tokens <= most_tokens
        assert past._tree.num_cached <= most_prefixes
        if LEAST + len(end) <= most_tokens:
            assert past.ahead(ids(COMMON + end), name, 0)[0] == LEAST + len(end), "the last one is there"
        check_trees(past._tree)


def test_too_few_and_too_many_tokens_are_passed_over() -> None:
    past = PastPrefixes(100)
    past.note(ids(list(range(LEAST - 1))), "a")
    past.note(ids(list(range(101))), "a")
    assert past.num_tokens == 0
    past.note(ids(list(range(100))), "a")
    assert past.num_tokens == 100


def test_those_noted_first_go_first() -> None:
    past = PastPrefixes(3 * 40)
    texts = [[number] * 40 for number in range(4)]
    for text in texts:
        past.note(ids(text), "a")
    assert [past.ahead(ids(text), "a", 0)[0] for text in texts] == [0, 40, 40, 40]
