"""``TokenHistory`` against lists, and what forks share."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from quire.base.media import Media
from quire.base.token_history import UNKNOWN, TokenHistory
from quire.base.types import BASE
from quire.branches.branch import COMPUTED, Branch, Origin

IDS = st.lists(st.integers(0, 96), max_size=40)
VERBS = st.sampled_from(["write", "append", "extend", "cut", "fork", "fork of the first"])
STEPS = st.lists(st.tuples(VERBS, st.integers(0, 7), st.integers(0, 99), IDS))


@given(IDS, STEPS)
def test_any_verbs_against_lists(first: list[int], steps: list[tuple[str, int, int, list[int]]]) -> None:
    """Whatever forks share, no write of one shows in another."""
    found, lists = [TokenHistory(first)], [list(first)]
    for verb, which, position, ids in steps:
        index = which % len(found)
        start = position % (len(lists[index]) + 1)
        match verb:
            case "write":
                found[index].replace_from(start, np.array(ids, dtype=np.int64))
                lists[index] = lists[index][:start] + ids
            case "append":
                found[index].append(position)
                lists[index].append(position)
            case "extend":
                found[index].extend(ids)
                lists[index] += ids
            case "cut":
                found[index].truncate(start)
                lists[index] = lists[index][:start]
            case "fork":
                found.append(found[index].fork())
                lists.append(list(lists[index]))
            case _:
                found.append(found[index].fork(start))
                lists.append(lists[index][:start])
        assert [one.ids.tolist() for one in found] == lists
        assert [len(one) for one in found] == [len(ids) for ids in lists]


def test_a_fork_copies_at_the_first_write_only() -> None:
    history = TokenHistory(np.arange(1000))
    forks = [history.fork() for _ in range(3)]
    assert all(np.shares_memory(fork.ids, history.ids) for fork in forks)
    forks[0].extend([])
    assert np.shares_memory(forks[0].ids, history.ids)
    forks[0].append(7)
    assert not np.shares_memory(forks[0].ids, history.ids)
    before = forks[0].ids
    forks[0].append(8)
    assert np.shares_memory(before, forks[0].ids)
    assert np.shares_memory(forks[1].ids, history.ids)


def test_what_is_given_is_copied() -> None:
    source = np.arange(3, dtype=np.int32)
    TokenHistory(source).ids[0] = 9
    assert source[0] == 0
    assert len(TokenHistory()) == 0


def test_a_fork_has_the_media_and_what_is_unknown_is_said() -> None:
    media = Media({-9: np.zeros(2)}, {-9: -1})  # type: ignore[dict-item]
    history = TokenHistory([1, -9, 2], media)
    assert history.fork(2).media is media
    assert history.is_known
    assert not TokenHistory([1, UNKNOWN]).is_known
    assert TokenHistory([1, UNKNOWN]).fork(1).is_known


def test_what_a_branch_owes() -> None:
    branch = Branch(tokens=TokenHistory([1, 2, 3]), computed=1, runs=BASE.then(0, 4).then(2, 5))
    assert branch.remaining == 2
    assert branch.runs_before(2) == BASE.then(0, 4)
    assert branch.runs_before(0) == BASE
    assert not branch.modified
    branch.origin = Origin(modified=True)
    assert branch.modified


def test_only_what_tokens_give_is_shared() -> None:
    assert COMPUTED.shareable(5) == 5
    assert Origin(modified=True).shareable(5) == Origin(private=True).shareable(5) == 0
    assert Origin(inexact_from=0).shareable(5) == 0
    assert Origin(inexact_from=3).shareable(5) == 3
    assert Origin(inexact_from=3).shareable(2) == 2


def test_what_comes_before_the_first_inexact_token_is_exact() -> None:
    origin = Origin(inexact_from=3, private=True)
    assert not origin.exact
    assert origin.cut(4) is origin
    assert origin.cut(3) == Origin(private=True)
    parent = Branch(tokens=TokenHistory(range(6)), computed=6, origin=origin)
    for length, exact in ((6, False), (4, False), (3, True), (1, True)):
        child = Branch()
        child.become(parent, length, None)
        assert child.origin == origin.cut(length)
        assert child.origin.exact == exact
    parent.truncate_computed(4)
    assert (parent.computed, parent.origin) == (4, origin)
    parent.truncate_computed(3)
    assert (parent.computed, parent.origin) == (3, Origin(private=True))
