"""``Store``: tiers as one place, whatever happens to them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.store.oracle import digest, rows, stop

from quire.errors import InvalidArgument
from quire.store.files import FileTier
from quire.store.memory import MemoryTier
from quire.store.stack import Found, Store


def test_memory_answers_at_once() -> None:
    store = Store([MemoryTier(1000)])
    assert store.put(rows("a"), b"1", durable=False)
    assert not store.put(rows("b"), b"2", durable=True)
    found, missing = store.get([rows("a"), rows("b")])
    assert found.done()
    assert found.result() == Found(b"1", "memory")
    assert missing.done()
    assert missing.result() is None
    children = store.children([digest(""), digest("a")])
    assert children.done()
    assert children.result() == [{rows("a"): "memory"}, {}]
    assert store._thread is None, "no thread is needed"
    store.close()


def test_the_nearest_tier_answers(tmp_path: Path) -> None:
    store = Store([MemoryTier(1000), FileTier(tmp_path, None)])
    assert store.put(rows("a"), b"a", durable=False)
    assert store.put(rows("a"), b"a", durable=True)
    assert store.put(rows("ab"), b"ab", durable=True, wait=True)
    assert store.flush(10)
    assert store.known(rows("ab"))
    assert not store.known(stop("ab"))
    assert store.children([digest(""), digest("a"), digest("b")], timeout=10).result() == [
        {rows("a"): "memory"},
        {rows("ab"): "disk"},
        {},
    ]
    assert [one.result(10) and one.result().tier for one in store.get([rows("a"), rows("ab"), rows("b")])] == [
        "memory",
        "disk",
        None,
    ]
    assert store.snapshot()["quire:store_misses_total"] == 1
    store.close()
    again = Store([FileTier(tmp_path, None)])
    (answer,) = again.get([rows("ab")])
    found = answer.result(10)
    assert found is not None
    assert bytes(found.blob) == b"ab"
    again.close()
    assert again.get([rows("ab")])[0].result(0) is None


def test_memory_stands_first() -> None:
    with pytest.raises(InvalidArgument, match="at most one memory tier, and it stands first"):
        Store([FileTier("/nowhere", None), MemoryTier(1)])
