"""The journal of sessions: the records from which they resume after the process has ended. No
torch.

A directory belongs to one process at a time. ``sessions.sqlite`` holds a record of each session,
``states/`` the state files of sessions whose state tokens do not give. A record is written in one
transaction, so that a reader sees all of it or the previous one. A damaged journal is renamed, and
its readable records are copied into a new one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from quire.base.errors import DataLoss, InvalidArgument, NotDurable
from quire.base.forks import ParentsLock, in_children, keep_open
from quire.statefile.schema import Document

logger = logging.getLogger("quire.store")

FILE: Final = "sessions.sqlite"
STATES: Final = "states"
RESERVE: Final = "reserve"
RESERVED: Final = 4 << 20
"""Bytes of a file that only holds space. A deletion on a full disk takes it: SQLite's log grows
first, and may grow to 4 MiB before its pages join the database."""
VERSION: Final = 1
_MAGIC: Final = 0x51754A00
"""SQLite's ``application_id`` of a journal, plus its version: with ``user_version`` the version is
stored twice, so that a changed byte is not taken for a newer version."""
_ID: Final = re.compile(r"[a-z]{1,16}-[0-9a-f]{32}")
_STATE: Final = re.compile(r"[a-z]{1,16}-[0-9a-f]{32}-[0-9a-f]{16}\.quire")
_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS sessions (number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, fields BLOB NOT NULL, "
    "tokens BLOB NOT NULL, digest TEXT NOT NULL)",
    # A table of its own, so that a call that changes only the time writes no tokens.
    "CREATE TABLE IF NOT EXISTS times (id TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
)
_NO_ROOM: Final = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}
"""Error codes of a full disk; its quota and its shared memory are I/O errors."""
_OF_THE_DISK: Final = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
}
"""Error codes that concern the system, as too many open files, and not the file's content."""


class Moment(NamedTuple):
    """A point in time on two clocks."""

    boot: str
    """The boot that ``uptime`` counts from; "" if unknown."""
    uptime: float
    """Seconds since boot, independent of clock settings."""
    wall: float
    """Unix time, to compare moments of different boots."""

    @classmethod
    def now(cls) -> Moment:
        """Return the present moment."""
        return cls(_boot(), time.clock_gettime(_UPTIME), time.time())

    def until(self, later: Moment) -> float:
        """Return the seconds from here to a later moment; 0 if a clock was set back in between."""
        same = self.boot and self.boot == later.boot
        return max(0.0, later.uptime - self.uptime if same else later.wall - self.wall)


_UPTIME: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


@cache
def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


class Lifetime(NamedTuple):
    """The time that an unused session has left."""

    left: float | None
    """Seconds left at moment ``at``; None: unlimited."""
    at: Moment

    def left_at(self, now: Moment) -> float | None:
        """Return the seconds left, at least 0; None: unlimited."""
        return None if self.left is None else max(0.0, self.left - self.at.until(now))


_ENDLESS: Final = Lifetime(None, Moment("", 0.0, 0.0))


class SessionFields(Document, frozen=True, kw_only=True, eq=False):
    """The fields of a session that its record stores as JSON."""

    model: Mapping[str, str]
    """``ModelIdentity.fields`` of its model."""
    owner: str = ""
    """``hidden`` of its owner; "": the program itself."""
    name: str | None = None
    labels: Mapping[str, str] = {}
    parent: str | None = None
    """The id of the session that it is a fork of."""
    created: float = 0.0
    """Unix time."""
    ttl: float | None = None
    """Seconds without use after which it expires; None: never."""
    window: Sequence[int] | None = None
    """(window, sink), in tokens."""
    adapters: Sequence[Sequence[int | str | None]] = ()
    """[from position, fingerprint or None] of each run of tokens, as in state files."""
    salt: str | None = None
    private: bool = False
    """Whether it shares no prefixes, whatever the salt."""
    pinned: bool = False
    chat: str | None = None
    """``ChatTurns.written`` in JSON; None: no turns. Or a stored response, which has no other
    content."""
    commit: str | None = None
    """The id of the commit that it was made from, or of its last commit."""
    state: str | None = None
    """The name of its state file in ``states/``; None: its tokens give its state."""

    def values(self) -> dict[str, Any]:
        """Return these fields by their names."""
        return {name: getattr(self, name) for name in SessionFields.__struct_fields__}


class _Stored(SessionFields, frozen=True, kw_only=True, eq=False):
    token_bytes: Literal[4, 8]
    """Bytes of a token id; ids of embeddings have 62 bits."""


class SessionRecord(SessionFields, frozen=True, kw_only=True, eq=False):
    """A session's record. Its state is computed or loaded by its tokens, or is in ``state``."""

    id: str
    """A word, "-" and 32 hexadecimal digits."""
    tokens: NDArray[np.int64]
    lifetime: Lifetime = _ENDLESS

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise InvalidArgument(field="id", given=self.id, allowed='a word, "-" and 32 hexadecimal digits')
        if self.state is not None and not _STATE.fullmatch(self.state):
            raise InvalidArgument(field="state", given=self.state, allowed="a name by SessionJournal.new_state")

    def content(self) -> tuple[bytes, bytes, str]:
        """Return all but the lifetime: as JSON, the tokens' bytes, and a digest of both."""
        small = not self.tokens.size or -(1 << 31) <= int(self.tokens.min()) <= int(self.tokens.max()) < 1 << 31
        text = msgspec.json.encode(_Stored(token_bytes=4 if small else 8, **self.values()), enc_hook=dict)
        blob = self.tokens.astype("<i4" if small else "<i8").tobytes()
        return text, blob, _digest(self.id, text, blob)


class Use(NamedTuple):
    """A change of the journal: a session was used, which only renews its lifetime."""

    id: str
    lifetime: Lifetime


class End(NamedTuple):
    """A change of the journal: a session is deleted."""

    id: str


Change = SessionRecord | Use | End


def _digest(name: str, fields: bytes, tokens: bytes) -> str:
    return str(xxhash.xxh3_128_hexdigest(b"%d %d %s" % (len(fields), len(tokens), name.encode()) + fields + tokens))


def _timed(name: str, lifetime: Lifetime) -> str:
    """Return a lifetime in its stored form, with a checksum."""
    text = msgspec.json.encode(lifetime).decode()
    return f"{text} {xxhash.xxh3_64_hexdigest((name + text).encode())}"


def _record(
    name: str, fields: bytes, tokens: bytes, digest: str, timed: str | None, *, renew: bool = False
) -> SessionRecord:
    """Return the record of a row; ``DataLoss`` for a damaged one. ``renew``: if only the lifetime
    is damaged, it starts anew."""
    try:
        if _digest(name, fields, tokens) != digest:
            raise DataLoss(f"session {name!r:.60} has another checksum than its record")
        found = msgspec.json.decode(fields, type=_Stored)
        ids = np.frombuffer(tokens, dtype=f"<i{found.token_bytes}").astype(np.int64)
        text, _, checksum = (timed or "").rpartition(" ")
        if xxhash.xxh3_64_hexdigest((name + text).encode()) == checksum:
            lifetime = msgspec.json.decode(text, type=Lifetime)
        elif renew:
            lifetime = Lifetime(found.ttl, Moment.now())
        else:
            raise DataLoss(f"session {name!r:.60} has another checksum than its lifetime")
        return SessionRecord(id=name, tokens=ids, lifetime=lifetime, **found.values())
    except (ValueError, TypeError, AttributeError) as error:
        raise DataLoss(f"session {name!r:.60} is damaged: {error}") from error


class SessionJournal:
    """All records of a directory. Any thread may call."""

    def __init__(self, directory: Path) -> None:
        """Open or make the journal. ``InvalidArgument``, about ``state_dir``: the directory cannot
        be written, another process uses it, or a newer version of Quire wrote it."""
        self.directory = directory
        self._lock: Any = threading.RLock()
        self._claim = _claimed(directory)
        try:
            self._db = self._opened()
            self._states = {one.id: one.state for one in self.records() if one.state is not None}
            for path in (directory / STATES).iterdir():
                if path.name not in self._states.values():
                    path.unlink(missing_ok=True)
            self._reserve()
        except BaseException as error:
            self.close()
            if isinstance(error, (sqlite3.Error, OSError)):
                raise _unusable(directory, str(error)) from error
            raise
        in_children(self._forked)

    def _forked(self) -> None:
        """After a fork: leave the directory to the parent, whose lock lasts as long as this copy of
        its descriptor is open."""
        self._lock = ParentsLock()
        if self._claim >= 0:
            keep_open(self._db)
            os.close(self._claim)

    # -- reading -----------------------------------------------------------------------------------

    def get(self, name: str) -> SessionRecord | None:
        """Return a session's record."""
        with self._locked_database():
            row = self._db.execute(_SELECT + " WHERE sessions.id = ?", (name,)).fetchone()
            return None if row is None else _record(*row)

    def records(self) -> Iterator[SessionRecord]:
        """Yield all records, the oldest session first."""
        with self._locked_database():
            names = [name for (name,) in self._db.execute("SELECT id FROM sessions ORDER BY number").fetchall()]
        for name in names:
            if (found := self.get(name)) is not None:
                yield found

    # -- writing -----------------------------------------------------------------------------------

    def write(self, changes: Sequence[Change]) -> None:
        """Make changes durable, all or none, and remove state files without a record. Deletions by
        themselves take the reserve on a full disk. ``NotDurable``: it is full, or it failed."""
        with self._locked_database():
            states = dict(self._states)
            for one in changes:
                if not isinstance(one, Use):
                    states.pop(one.id, None)
                if isinstance(one, SessionRecord) and one.state is not None:
                    states[one.id] = one.state
            named = {*self._states.values(), *(one.state for one in changes if isinstance(one, SessionRecord))}
            try:
                self._commit(changes)
            except sqlite3.Error as error:
                if _code(error) not in _NO_ROOM or not all(isinstance(one, End) for one in changes):
                    raise
                (self.directory / RESERVE).unlink(missing_ok=True)
                with suppress(sqlite3.Error):
                    # The next pages of the log then take the places of those before.
                    self._db.execute("PRAGMA wal_checkpoint(RESTART)")
                self._commit(changes)
            self._states = states
            for name in named.difference(states.values(), [None]):
                with suppress(OSError):
                    (self.directory / STATES / str(name)).unlink(missing_ok=True)
            self._reserve()

    def _commit(self, changes: Sequence[Change]) -> None:
        with _transaction(self._db):
            for one in changes:
                _execute(self._db, one)

    def _reserve(self) -> None:
        """Allocate the reserve, unless it is there, or the disk has little more room."""
        path = self.directory / RESERVE
        with suppress(OSError):
            if path.exists() or shutil.disk_usage(self.directory).free <= 2 * RESERVED:
                return
            found = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
            written = 0
            try:
                written = os.write(found, bytes(RESERVED))
            finally:
                os.close(found)
                if written < RESERVED:
                    path.unlink()

    def new_state(self, name: str) -> Path:
        """Return the path of a new state file of a session. It is kept once a record names it."""
        return self.directory / STATES / f"{name}-{secrets.token_hex(8)}.quire"

    def state_path(self, record: SessionRecord) -> Path:
        """Return the path of a record's state file."""
        assert record.state is not None
        return self.directory / STATES / record.state

    def close(self) -> None:
        """Close the journal, and release the directory to other processes. A second call is
        harmless."""
        with self._lock:
            if self._claim >= 0:
                with suppress(sqlite3.Error, AttributeError):  # it may not be open yet
                    self._db.close()
                _released(self._claim)
                self._claim = -1

    @contextmanager
    def _locked_database(self) -> Iterator[None]:
        """Hold the lock; convert errors of SQLite to Quire's."""
        with self._lock:
            if self._claim < 0:
                raise NotDurable("the state directory is closed, so nothing is kept in it any more")
            try:
                yield
            except sqlite3.Error as error:
                helps = "; free space on its disk" if _code(error) == sqlite3.SQLITE_FULL else ""
                raise NotDurable(f"the state directory cannot be read or written: {error}{helps}") from error

    # -- opening -----------------------------------------------------------------------------------

    def _opened(self) -> sqlite3.Connection:
        path = self.directory / FILE
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        db = _connected(path)
        try:
            _verify(db)
            return db
        except (sqlite3.DatabaseError, UnicodeError, DataLoss) as error:
            if _code(error) in _OF_THE_DISK:
                db.close()
                raise
            reason = str(error)
        except BaseException:
            db.close()
            raise
        rows = _readable(db)
        with suppress(sqlite3.Error):
            db.close()
        aside = self._set_aside(path, rows)
        logger.error("%s is damaged (%s): %d sessions were kept, it is now %s", path, reason, len(rows), aside.name)
        db = _connected(path)
        _verify(db)
        return db

    def _set_aside(self, path: Path, rows: Sequence[SessionRecord]) -> Path:
        """Put a journal of these records in the place of a damaged one. Return the damaged one's
        new path."""
        aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")
        fresh = path.with_name(f"{path.name}.new")
        fresh.unlink(missing_ok=True)
        os.close(os.open(fresh, os.O_CREAT | os.O_RDWR, 0o600))
        with closing(sqlite3.connect(fresh, isolation_level=None)) as db, _transaction(db):
            _make(db)
            for row in rows:
                _execute(db, row)
        shutil.copy2(path, aside)
        # The damaged journal's log would be applied to the new one.
        for end in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.replace(f"{path}{end}", f"{aside}{end}")
        os.replace(fresh, path)
        return aside


ROOM: Final = 64 << 10
"""Free bytes of a disk below which an open journal has no room."""

_SELECT: Final = "SELECT sessions.id, fields, tokens, digest, value FROM sessions LEFT JOIN times USING (id)"


def _connected(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.text_factory = lambda data: data.decode(errors="replace")  # a damaged text differs from its digest
    return db


def _verify(db: sqlite3.Connection) -> None:
    """Prepare a connection. ``DataLoss`` or SQLite's errors for a damaged journal."""
    (version,), (kind,) = db.execute("PRAGMA user_version").fetchone(), db.execute("PRAGMA application_id").fetchone()
    if version > VERSION and kind == _MAGIC + version:
        raise InvalidArgument(
            f"the state directory has a journal of version {version}, and this version of Quire reads {VERSION}; use a newer one, "
            "or another directory",
            field="state_dir",
        )
    if version or kind or db.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
        if (version, kind) != (VERSION, _MAGIC + VERSION):
            raise DataLoss(f"its version is {version} of kind {kind:#x}")
        if (found := db.execute("PRAGMA integrity_check(1)").fetchone()) != ("ok",):
            raise DataLoss(f"SQLite's check says: {found}")
        for row in db.execute(_SELECT):
            _record(*row)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    # Write immediately, so that a read-only or full disk is reported at the start.
    with _transaction(db):
        _make(db)


def _make(db: sqlite3.Connection) -> None:
    for statement in (*_SCHEMA, f"PRAGMA user_version = {VERSION}", f"PRAGMA application_id = {_MAGIC + VERSION}"):
        db.execute(statement)


def _readable(db: sqlite3.Connection) -> list[SessionRecord]:
    """Return the intact records of a damaged journal."""
    numbers: set[int] = set()
    times: dict[str, str] = {}
    found: dict[str, SessionRecord] = {}
    with suppress(sqlite3.Error, UnicodeError):
        for (number,) in db.execute("SELECT number FROM sessions"):
            numbers.add(number)
    with suppress(sqlite3.Error, UnicodeError):
        for name, timed in db.execute("SELECT id, value FROM times"):
            times[name] = timed
    for number in sorted(one for one in numbers if isinstance(one, int)):
        with suppress(sqlite3.Error, UnicodeError, DataLoss):
            rows = db.execute("SELECT id, fields, tokens, digest FROM sessions WHERE number = ?", (number,))
            for name, fields, tokens, digest in rows:
                record = _record(name, fields, tokens, digest, times.get(name), renew=True)
                found.setdefault(record.id, record)
    return list(found.values())


def _execute(db: sqlite3.Connection, change: Change) -> None:
    if isinstance(change, End):
        db.execute("DELETE FROM sessions WHERE id = ?", change)
        db.execute("DELETE FROM times WHERE id = ?", change)
        return
    if isinstance(change, Use):
        db.execute("UPDATE times SET value = ? WHERE id = ?", (_timed(change.id, change.lifetime), change.id))
        return
    db.execute(
        "INSERT INTO sessions (id, fields, tokens, digest) VALUES (?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
        "fields = excluded.fields, tokens = excluded.tokens, digest = excluded.digest",
        (change.id, *change.content()),
    )
    db.execute("INSERT OR REPLACE INTO times VALUES (?, ?)", (change.id, _timed(change.id, change.lifetime)))


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            if db.in_transaction:
                db.execute("ROLLBACK")
        raise


def _code(error: BaseException) -> int:
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF


def _unusable(directory: Path, reason: str) -> InvalidArgument:
    message = f"state_dir {str(directory)!r} cannot be used: {reason}; give a directory that can be written"
    with suppress(OSError):
        # SQLite calls a full disk an I/O error where its shared memory does not fit.
        disk = shutil.disk_usage(directory)
        if disk.total and disk.free < ROOM:
            message = f"state_dir {str(directory)!r} cannot be used: {reason}; its disk is full, free space on it"
    return InvalidArgument(message, field="state_dir")


_HELD: Final[dict[tuple[int, int], int]] = {}
"""Locks that this process holds, by device and inode, with its process id, because a forked child
inherits copies."""


def _claimed(directory: Path) -> int:
    """Make the directory, lock it for this process, and return the lock's descriptor."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / STATES).mkdir(mode=0o700, exist_ok=True)
        found = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise _unusable(directory, error.strerror or str(error)) from error
    lock = _identity(found)
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(found, 0)
        os.pwrite(found, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        pid = os.pread(found, 32, 0).decode(errors="replace") or "unknown"
        os.close(found)
        # Ids of processes may be the same in two containers.
        if _HELD.get(lock) == os.getpid():
            who, helps = "another LLM of this process", "close that one, or give each its own directory"
        else:
            who, helps = f"another process (id {pid})", "give each its own directory"
        raise InvalidArgument(f"state_dir {str(directory)!r} is in use by {who}; {helps}", field="state_dir") from None
    except OSError as error:
        os.close(found)
        raise _unusable(directory, error.strerror or str(error)) from error
    _HELD[lock] = os.getpid()
    return found


def _released(claim: int) -> None:
    """Release the lock of a directory."""
    _HELD.pop(_identity(claim), None)
    os.close(claim)


def _identity(found: int) -> tuple[int, int]:
    stat = os.fstat(found)
    return stat.st_dev, stat.st_ino
