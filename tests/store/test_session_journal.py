"""The journal of sessions: against a dictionary, with crashes at every statement, and what damage
leaves.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from quire.base.errors import InvalidArgument, NotDurable
from quire.base.forks import Forked
from quire.store.journal import (
    FILE,
    RESERVE,
    RESERVED,
    Change,
    End,
    Lifetime,
    Moment,
    SessionJournal,
    SessionRecord,
    Use,
)
from quire.store.journal_writer import JournalWriter

MODEL = {"architecture": "Llama", "weights": "1"}
NOW = Moment("boot", 1000.0, 5000.0)


def named(number: int) -> str:
    return f"session-{number:032x}"


def record(number: int, tokens: list[int] | None = None, **fields: Any) -> SessionRecord:
    return SessionRecord(
        id=named(number), model=MODEL, tokens=np.array(tokens if tokens is not None else [number], np.int64), **fields
    )


def plain(one: SessionRecord | None) -> Any:
    """What can be compared."""
    if one is None:
        return None
    found = {name: getattr(one, name) for name in SessionRecord.__struct_fields__ if name != "tokens"}
    listed = {name: list(value) for name, value in found.items() if isinstance(value, (list, tuple))}
    adapters = [list(run) for run in one.adapters]
    return {**found, **listed, "labels": dict(one.labels), "adapters": adapters, "tokens": one.tokens.tolist()}


def contents(journal: SessionJournal) -> dict[str, Any]:
    return {one.id: plain(one) for one in journal.records()}


FULL = record(
    7,
    [0, 5, 2**31 - 1, -4],
    owner="salt:digest",
    name="näme",
    labels={"a": "b", "c": "\U0001f600"},
    parent=named(3),
    created=1.5,
    ttl=60.0,
    window=(8, 2),
    adapters=[[0, None], [3, "f" * 32]],
    salt="s",
    private=True,
    pinned=True,
    chat='{"turns": []}',
    lifetime=Lifetime(30.0, NOW),
)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[SessionJournal]:
    found = SessionJournal(tmp_path / "state")
    yield found
    found.close()


def again(journal: SessionJournal) -> SessionJournal:
    journal.close()
    return SessionJournal(journal.directory)


def test_every_field_comes_back(journal: SessionJournal) -> None:
    wide = record(8, [-(2**61), 5])  # an embedding's id
    journal.write([FULL, wide, record(9, [])])
    journal = again(journal)
    assert [plain(one) for one in journal.records()] == [plain(FULL), plain(wide), plain(record(9, []))]
    assert plain(journal.get(FULL.id)) == plain(FULL)
    assert journal.get(named(1)) is None
    journal.close()


def test_ids_cannot_leave_the_directory() -> None:
    for bad in ("../x", "session-" + "f" * 31, "session-" + "F" * 32, named(1) + "/..", "", "x\0" + named(1)):
        with pytest.raises(InvalidArgument, match="id must be"):
            SessionRecord(id=bad, model=MODEL, tokens=np.array([1]))
    with pytest.raises(InvalidArgument, match="state must be"):
        record(1, state="../../etc/passwd")


def test_times_are_written_alone(journal: SessionJournal) -> None:
    journal.write([FULL])
    journal.write([Use(FULL.id, Lifetime(9.0, NOW)), Use(named(99), Lifetime(9.0, NOW))])
    journal = again(journal)
    assert contents(journal) == {FULL.id: plain(replace(FULL, lifetime=Lifetime(9.0, NOW)))}
    journal.close()


@pytest.mark.parametrize(
    ("later", "left"),
    [
        (Moment("boot", 1010.0, 5010.0), 20.0),
        (Moment("boot", 1010.0, 9e9), 20.0),  # the clock was set
        (Moment("boot", 1010.0, 0.0), 20.0),
        (Moment("other", 3.0, 5010.0), 20.0),
        (Moment("other", 3.0, 0.0), 30.0),  # set back between two starts of the machine
        (Moment("other", 3.0, 5031.0), 0.0),
        (Moment("", 3.0, 5010.0), 20.0),
    ],
)
def test_what_is_left_of_a_life(later: Moment, left: float) -> None:
    assert Lifetime(30.0, NOW).left_at(later) == left
    assert Lifetime(None, NOW).left_at(later) is None


def test_now() -> None:
    first = Moment.now()
    assert 0 <= first.until(Moment.now()) < 60
    assert Moment("", 0, 10.0).until(Moment("", 0, 15.0)) == 5


def test_state_files(journal: SessionJournal) -> None:
    def states() -> set[str]:
        return {path.name for path in (journal.directory / "states").iterdir()}

    first, second, left = (journal.new_state(named(number)) for number in (1, 1, 2))
    for path in (first, second, left):
        path.write_bytes(b"x")
    journal.write([record(1, state=first.name)])
    assert journal.state_path(record(1, state=first.name)) == first
    journal.write([record(1, state=first.name), Use(named(1), Lifetime(1.0, NOW))])
    assert states() == {first.name, second.name, left.name}
    journal.write([record(1, state=second.name)])
    assert states() == {second.name, left.name}
    journal = again(journal)
    assert states() == {second.name}, "what no record names is gone"
    journal.write([End(named(1))])
    assert states() == set()
    journal.close()


# -- crashes ---------------------------------------------------------------------------------------

CHANGES = st.lists(
    st.one_of(
        st.builds(
            record,
            st.integers(0, 5),
            st.lists(st.integers(0, 99), max_size=3000),
            name=st.sampled_from(["a", None]),
            lifetime=st.builds(Lifetime, st.floats(0, 9), st.just(NOW)),
        ),
        st.builds(lambda number: End(named(number)), st.integers(0, 5)),
        st.builds(lambda number: Use(named(number), Lifetime(4.0, NOW)), st.integers(0, 5)),
    ),
    min_size=1,
    max_size=4,
)


class JournalMachine(RuleBasedStateMachine):
    """A journal and a dictionary. A crash is a copy of the directory: what a killed process leaves.

    (Losing power is worse, and is SQLite's to bear: ``synchronous`` is FULL.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        # In memory, where there is such a place: what is tested is the order of writes.
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self.journal = SessionJournal(self.folder / "0")
        self.expected: dict[str, Any] = {}

    def after(self, changes: list[Change]) -> dict[str, Any]:
        found = dict(self.expected)
        for one in changes:
            if isinstance(one, SessionRecord):
                found[one.id] = plain(one)
            elif isinstance(one, End):
                found.pop(one.id, None)
            elif one.id in found:
                found[one.id] = {**found[one.id], "lifetime": list(one.lifetime)}
        return found

    def copied(self) -> Path:
        self.count += 1
        copy = self.folder / str(self.count)
        shutil.copytree(self.journal.directory, copy)
        return copy

    @rule(changes=CHANGES)
    def write(self, changes: list[Change]) -> None:
        self.journal.write(changes)
        self.expected = self.after(changes)

    @rule(changes=CHANGES, place=st.integers(0, 12))
    def write_and_crash(self, changes: list[Change], place: int) -> None:
        """The process ends before the statement of this number, or behind the last one."""
        copies: list[Path] = []
        seen: list[str] = []

        def look(statement: str) -> None:
            if len(seen) == place:
                copies.append(self.copied())
            seen.append(statement)

        database = self.journal._db
        database.set_trace_callback(look)
        self.journal.write(changes)
        database.set_trace_callback(None)
        assert (seen[0], seen[-1]) == ("BEGIN IMMEDIATE", "COMMIT")
        if not copies:
            copies, self.expected = [self.copied()], self.after(changes)
        self.reopen(copies[0])

    @rule()
    def crash(self) -> None:
        self.reopen(self.copied())

    @rule()
    def end(self) -> None:
        self.reopen(self.journal.directory)

    def reopen(self, directory: Path) -> None:
        self.journal.close()
        self.journal = SessionJournal(directory)

    @invariant()
    def same(self) -> None:
        found = {one.id: {**plain(one), "lifetime": list(one.lifetime)} for one in self.journal.records()}
        wanted = {name: {**one, "lifetime": list(one["lifetime"])} for name, one in self.expected.items()}
        assert found == wanted

    def teardown(self) -> None:
        self.journal.close()
        shutil.rmtree(self.folder)


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(max_examples=25, stateful_step_count=12)


# -- damage ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A journal of 30 sessions in some pages, and what is in it."""
    directory = tmp_path_factory.mktemp("whole") / "state"
    journal, dice = SessionJournal(directory), random.Random(1)
    for number in range(30):
        tokens = [dice.randrange(5000) for _ in range(dice.choice([3, 50, 3000]))]
        journal.write([replace(FULL, id=named(number), tokens=np.array(tokens, np.int64))])
    found = contents(journal)
    journal.close()
    return directory, found


def check_damaged(directory: Path, known: dict[str, Any], *, least: int = 0) -> int:
    """Open it: no session is another than it was, and new ones can be written. Their number."""
    journal = SessionJournal(directory)
    found = contents(journal)
    for name, one in found.items():
        if one["lifetime"] != known[name]["lifetime"]:  # damaged, and so it begins anew
            assert one["lifetime"][0] == one["ttl"]
        assert {**one, "lifetime": None} == {**known[name], "lifetime": None}
    assert len(found) >= least
    journal.write([record(99)])
    journal = again(journal)
    assert set(contents(journal)) == {*found, named(99)}
    journal.close()
    return len(found)


@pytest.mark.parametrize("seed", [*range(25), *(pytest.param(n, marks=pytest.mark.slow) for n in range(25, 1500))])
def test_flipped_bytes(whole: tuple[Path, dict[str, Any]], tmp_path: Path, seed: int) -> None:
    dice, directory = random.Random(seed), tmp_path / "state"
    shutil.copytree(whole[0], directory)
    data = bytearray((directory / FILE).read_bytes())
    # Headers of the file and of its first pages are a small part of it.
    for _ in range(dice.choice([1, 1, 3])):
        place = dice.randrange(dice.choice([100, 9000, len(data)]))
        data[place] ^= dice.randrange(1, 256)
    (directory / FILE).write_bytes(data)
    check_damaged(directory, whole[1])


def test_each_byte_of_the_header(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    data = (whole[0] / FILE).read_bytes()
    for place in range(0, 100, 3):
        directory = tmp_path / str(place)
        shutil.copytree(whole[0], directory)
        (directory / FILE).write_bytes(data[:place] + bytes([data[place] ^ 3]) + data[place + 1 :])
        check_damaged(directory, whole[1])


@pytest.mark.parametrize("size", [0, 1, 99, 100, 4096, 5000, 40960, -4096, -1])
def test_cut(whole: tuple[Path, dict[str, Any]], tmp_path: Path, size: int) -> None:
    directory = tmp_path / "state"
    shutil.copytree(whole[0], directory)
    data = (directory / FILE).read_bytes()
    (directory / FILE).write_bytes(data[:size])
    check_damaged(directory, whole[1])


def test_one_bad_record_costs_one_session(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "state"
    shutil.copytree(whole[0], directory)
    data = (directory / FILE).read_bytes()
    longest = max(whole[1].values(), key=lambda one: len(one["tokens"]))
    place = data.index(np.array(longest["tokens"][500:505], "<i4").tobytes())
    (directory / FILE).write_bytes(data[:place] + b"\xff\xff" + data[place + 2 :])
    assert check_damaged(directory, whole[1], least=29) == 29
    (line,) = (one.getMessage() for one in caplog.records)
    assert "is damaged" in line
    assert "29 sessions were kept" in line
    (aside,) = directory.glob(f"{FILE}.damaged-*")
    assert aside.read_bytes()[:place] == data[:place]


def test_a_journal_that_cannot_be_opened_is_not_damaged(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """As with too many open files: then nothing of it can be read, and nothing of it is lost."""
    directory = tmp_path / "state"
    shutil.copytree(whole[0], directory)
    (directory / f"{FILE}-wal").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidArgument, match="unable to open"):
        SessionJournal(directory)
    assert len(os.listdir("/proc/self/fd")) == before
    (directory / f"{FILE}-wal").rmdir()
    assert contents(SessionJournal(directory)) == whole[1]


def test_no_database_at_all(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a database" * 1000)
    assert check_damaged(tmp_path, {}) == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_damaged_log_loses_its_end_only(whole: tuple[Path, dict[str, Any]], tmp_path: Path, seed: int) -> None:
    """A crash leaves the last changes in SQLite's log. What is behind a damaged place is lost; what
    stays is whole.
    """
    journal = SessionJournal(tmp_path / "state")
    states: list[dict[str, Any]] = [{}]
    for number in range(12):
        journal.write([record(number % 5, [number] * 500, name=str(number))])
        states.append(contents(journal))
    shutil.copytree(journal.directory, tmp_path / "copy")
    journal.close()
    log, dice = tmp_path / "copy" / f"{FILE}-wal", random.Random(seed)
    data = bytearray(log.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    log.write_bytes(data[: dice.randrange(len(data) // 2, len(data))] if seed % 2 else data)
    found = SessionJournal(tmp_path / "copy")
    assert contents(found) in states
    found.close()


# -- one process, one version ----------------------------------------------------------------------


def test_one_process_at_a_time(journal: SessionJournal) -> None:
    with pytest.raises(InvalidArgument, match="in use by another LLM of this process"):
        SessionJournal(journal.directory)
    code = f"from pathlib import Path; from quire.store.journal import SessionJournal as J; J(Path({str(journal.directory)!r}))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"is in use by another process (id {os.getpid()})" in other.stderr
    journal.close()
    journal.close()
    SessionJournal(journal.directory).close()


def test_a_newer_version(journal: SessionJournal) -> None:
    journal.write([FULL])
    journal.close()
    with sqlite3.connect(journal.directory / FILE) as database:
        ((kind,),) = database.execute("PRAGMA application_id").fetchall()
        database.execute("PRAGMA user_version = 2")
        database.execute(f"PRAGMA application_id = {kind + 1}")
    database.close()
    with pytest.raises(InvalidArgument, match="a journal of version 2, and this version of Quire reads 1") as caught:
        SessionJournal(journal.directory)
    assert caught.value.field == "state_dir"
    assert not list(journal.directory.glob("*.damaged-*"))


# -- the writer ------------------------------------------------------------------------------------


def test_waiting_changes_are_one_transaction(journal: SessionJournal) -> None:
    writer, statements = JournalWriter(journal), list[str]()
    with journal._lock:
        first = writer.write(record(0))
        journal._db.set_trace_callback(statements.append)
        rest = [writer.write(record(number)) for number in range(1, 50)]
    for done in (first, *rest):
        done.result(20)
    assert statements.count("COMMIT") <= 2
    assert len(contents(journal)) == 50
    writer.write(End(named(3)))
    writer.wait()
    assert len(contents(journal)) == 49
    late = writer.write(record(60))
    writer.close()
    assert late.done()
    with pytest.raises(NotDurable, match="closed"):
        writer.write(FULL).result()
    with pytest.raises(NotDurable, match="closed"):
        journal.get(FULL.id)


def test_a_full_disk(journal: SessionJournal) -> None:
    """Only what does not fit fails, nothing of it stays, and there is room again when there is."""
    writer = JournalWriter(journal)
    writer.write(record(0, [1])).result()
    ((pages,),) = journal._db.execute("PRAGMA page_count").fetchall()
    journal._db.execute(f"PRAGMA max_page_count = {pages + 3}")
    with journal._lock:  # so that all are in one transaction
        done = [writer.write(record(0, [2])), writer.write(record(1, [1] * 9000)), writer.write(record(2, [1]))]
    with pytest.raises(NotDurable, match="full"):
        done[1].result()
    done[0].result()
    done[2].result()
    assert {name: one["tokens"] for name, one in contents(journal).items()} == {named(0): [2], named(2): [1]}
    journal._db.execute(f"PRAGMA max_page_count = {pages + 100}")
    writer.write(record(1, [1] * 9000)).result()
    writer.close()


class FullDisk:
    """A connection on whose disk nothing fits beside the reserve."""

    def __init__(self, db: sqlite3.Connection, reserve: Path) -> None:
        self.db, self.reserve = db, reserve

    def execute(self, statement: str, *values: Any) -> Any:
        if statement == "COMMIT" and self.reserve.exists():
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return self.db.execute(statement, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.db, name)


def test_a_full_disk_does_not_keep_sessions_from_being_deleted(
    journal: SessionJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = journal.new_state(named(2))
    state.write_bytes(b"state")
    journal.write([record(1), record(2, state=state.name), record(3)])
    reserve, database = journal.directory / RESERVE, journal._db
    assert reserve.stat().st_size == RESERVED
    monkeypatch.setattr(journal, "_db", FullDisk(database, reserve))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=1 << 30, used=1 << 30, free=4096))
    for changes in ([record(4)], [End(named(1)), record(4)], [Use(named(1), Lifetime(1.0, NOW))]):
        with pytest.raises(NotDurable, match="disk is full; free space on its disk"):
            journal.write(changes)
        assert reserve.exists(), "it is for deletions"
    journal.write([End(named(2))])
    assert not state.exists()
    assert sorted(contents(journal)) == [named(1), named(3)]
    assert not reserve.exists()
    monkeypatch.undo()
    journal.write([record(4)])
    assert reserve.stat().st_size == RESERVED, "there is room again"
    journal.close()
    again = SessionJournal(journal.directory)
    assert sorted(contents(again)) == [named(1), named(3), named(4)]
    again.close()


def test_a_forked_process_does_not_wait_for_ever(journal: SessionJournal) -> None:
    """It has no writing thread, and the journal is the other process's."""
    writer = JournalWriter(journal)
    child = os.fork()
    if not child:
        try:
            writer.write(FULL)
        except Forked:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    writer.write(FULL).result()
    writer.close()
