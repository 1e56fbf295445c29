"""Which replica a prompt goes to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cluster.router import BLOCK, Choice, PrefixMap, Router, digests


def test_equal_digests_are_equal_beginnings() -> None:
    text = "".join(chr(97 + index % 26) for index in range(4 * BLOCK))
    first = digests("", text)
    assert len(first) == 4
    assert digests("", text[: 3 * BLOCK + 5]) == first[:3]
    changed = digests("", "#" + text[1:])
    assert not set(changed) & set(first), "a block's digest covers what stands before it"
    assert not set(digests("other key", text)) & set(first)
    assert digests("", text[: BLOCK - 1]) == []
    assert len(digests("", "\ud800" * BLOCK)) == 1


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.sampled_from("abc")), max_size=12))
def test_the_longest_beginning_is_that_of_a_search(sent: list[tuple[list[int], str]]) -> None:
    """Chains are modelled by tuples of all their elements so far."""

    def chain(parts: list[int]) -> list[int]:
        return [hash(tuple(parts[: end + 1])) for end in range(len(parts))]

    known = PrefixMap()
    for parts, replica in sent:
        known.add(chain(parts), replica)
    for parts, _ in sent:
        expected = dict[str, int]()
        for other, replica in sent:
            common = next((at for at, (a, b) in enumerate(zip(parts, other, strict=False)) if a != b), None)
            length = min(len(parts), len(other)) if common is None else common
            if length:
                expected[replica] = max(expected.get(replica, 0), length)
        found = dict[str, int]()
        for count, replicas in known.longest(chain(parts)):
            found.update({replica: count for replica in replicas if replica not in found})
        assert found == expected


def test_the_end_of_an_old_prompt_is_forgotten_first() -> None:
    known = PrefixMap(limit=4)
    known.add([1, 2, 3], "a")
    known.add([7, 8], "b")
    assert len(known) == 4
    assert next(known.longest([1, 2, 3])) == (2, {"a"})
    known.remove("a")
    assert len(known) == 2
    assert next(known.longest([7, 8])) == (2, {"b"})
    assert not list(known.longest([1, 2, 3]))


def test_prefix_then_load() -> None:
    router = Router(slack=1)
    assert router.choose([1]) is None
    router.update(["a", "b", "c"])
    with router.under_way("a", [1, 2]), router.under_way("b", [1]):
        assert router.choose([1, 2, 3]) == Choice("a", "prefix", 2)
        assert router.choose([1, 2, 3], without={"a"}) == Choice("b", "prefix", 1)
        assert router.choose([9]) == Choice("c", "load")
        assert router.choose() == Choice("c", "load")
        with router.under_way("a"):
            assert router.choose([1, 2, 3]) == Choice("c", "overload")
    assert router.choose([1, 2, 3]) == Choice("a", "prefix", 2)
    router.update(["b", "c"])
    assert router.choose([1, 2, 3]) == Choice("b", "prefix", 1)
    assert not any(router.load.values())


def test_equal_loads_take_turns() -> None:
    router = Router()
    router.update(["a", "b", "c"])
    first = [choice.replica for _ in range(6) if (choice := router.choose()) is not None]
    assert sorted(first[:3]) == ["a", "b", "c"]
    assert first[:3] == first[3:]


def test_sessions_of_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cluster.router.MOST_SESSIONS", 2)
    router = Router()
    for session in ("1", "2", "1", "3"):
        router.place(session, "a")
    assert list(router.sessions) == ["1", "3"]


def test_a_replica_that_leaves_while_it_answers() -> None:
    router = Router()
    router.update(["a", "b"])
    with router.under_way("a"):
        router.update(["b"])
        router.update(["a", "b"])
    assert router.load["a"] == 0
