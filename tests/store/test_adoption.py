"""Records of sessions that move from the directory of a process that has ended."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.errors import InvalidArgument, NotDurable
from quire.store import adoption
from quire.store.adoption import adopt, free_directory
from quire.store.journal import SessionJournal, SessionRecord

NAME = f"session-{7:032x}"


def record(session: str = NAME, **fields: Any) -> SessionRecord:
    return SessionRecord(id=session, model={"a": "b"}, tokens=np.arange(5), **fields)


def always(found: SessionRecord) -> bool:
    return True


@pytest.fixture
def journal(tmp_path: Path) -> Callable[[str], SessionJournal]:
    return lambda name: SessionJournal(tmp_path / name)


def test_a_record_moves_whole(tmp_path: Path, journal: Callable[[str], SessionJournal]) -> None:
    old, new = journal("old"), journal("new")
    path = old.new_state(NAME)
    path.write_bytes(b"state")
    old.write([record(state=path.name, name="n", labels={"l": "1"}), record(f"session-{8:032x}")])
    assert not adopt(tmp_path, new, NAME, always), "its process lives"
    old.close()
    assert not adopt(tmp_path, new, NAME, lambda found: False)
    assert not adopt(tmp_path, new, f"session-{9:032x}", always)
    assert adopt(tmp_path, new, NAME, always)
    found = new.get(NAME)
    assert found is not None
    assert (found.tokens.tolist(), found.name, dict(found.labels)) == ([0, 1, 2, 3, 4], "n", {"l": "1"})
    assert new.state_path(found).read_bytes() == b"state"
    assert not adopt(tmp_path, new, NAME, always), "it is there no more"
    old = journal("old")
    assert [one.id for one in old.records()] == [f"session-{8:032x}"]
    assert not list((tmp_path / "old" / "states").iterdir())


def test_what_cannot_be_written_stays(
    tmp_path: Path, journal: Callable[[str], SessionJournal], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = journal("old"), journal("new")
    old.write([record()])
    old.close()

    def full(changes: Any) -> None:
        raise NotDurable("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(new, "write", full)
        with pytest.raises(NotDurable):
            adopt(tmp_path, new, NAME, always)
    assert adopt(tmp_path, new, NAME, always)


def test_a_state_file_is_durable_before_it_leaves(
    tmp_path: Path, journal: Callable[[str], SessionJournal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy is synced before the record says that it is here. What cannot be copied stays."""
    old, new = journal("old"), journal("new")
    path = old.new_state(NAME)
    path.write_bytes(b"state")
    old.write([record(state=path.name)])
    old.close()
    synced: list[str] = []

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))

    def full(changes: Any) -> None:
        assert sum("/new/states/" in one for one in synced) == 1
        raise NotDurable("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(new, "write", full)
        with pytest.raises(NotDurable, match="full"):
            adopt(tmp_path, new, NAME, always)
    assert not list((tmp_path / "new" / "states").iterdir())
    path.rename(tmp_path / "hidden")
    with pytest.raises(NotDurable, match="cannot be moved"):
        adopt(tmp_path, new, NAME, always)
    (tmp_path / "hidden").rename(path)
    assert adopt(tmp_path, new, NAME, always)


def test_a_directory_that_is_reserved_is_left_alone(tmp_path: Path, journal: Callable[[str], SessionJournal]) -> None:
    """Its server starts: it would find a lock."""
    with closing(journal("replica-0")) as old:
        old.write([record()])
    new = journal("new")
    directory, place = free_directory(tmp_path, 2)
    assert directory == tmp_path / "replica-0"
    assert not adopt(tmp_path, new, NAME, always)
    place.close()
    assert adopt(tmp_path, new, NAME, always)


def test_directories_are_given_once(tmp_path: Path) -> None:
    first, one = free_directory(tmp_path, 2)
    second, two = free_directory(tmp_path, 2)
    assert (first.name, second.name) == ("replica-0", "replica-1")
    with pytest.raises(InvalidArgument, match="all 2 state directories"):
        free_directory(tmp_path, 2)
    one.close()
    held = SessionJournal(first)  # the child that was started there outlives its parent
    with pytest.raises(InvalidArgument, match="all 2 state directories"):
        free_directory(tmp_path, 2)
    held.close()
    assert free_directory(tmp_path, 2)[0] == first
    two.close()


def test_a_damaged_directory_hinders_nobody(tmp_path: Path, journal: Callable[[str], SessionJournal]) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / adoption.FILE).mkdir()
    old, new = journal("old"), journal("new")
    old.write([record()])
    old.close()
    assert adopt(tmp_path, new, NAME, always)
