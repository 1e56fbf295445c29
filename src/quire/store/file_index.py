"""The index of a directory of objects: names, sizes and order of uses.

It is an SQLite database, so several processes may change it. All of it but the order of uses can be
computed from the files, so a missing, damaged or outdated index is made anew, under a new name: a
process that still holds the old index notices that its file is gone, and SQLite's auxiliary files
of the two never mix.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from quire.base.forks import in_children, keep_open
from quire.contracts.store import ObjectKey, TierStat

VERSION = 1
BUSY_SECONDS = 10.0
"""Seconds that a change waits for a change of another process."""

_TABLES = """
CREATE TABLE objects (
    name TEXT PRIMARY KEY, parent BLOB NOT NULL, digest BLOB NOT NULL,
    bytes INTEGER NOT NULL, use INTEGER NOT NULL, pinned INTEGER NOT NULL DEFAULT 0,
    children INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE totals (objects INTEGER, bytes INTEGER, pinned INTEGER, uses INTEGER);
INSERT INTO totals VALUES (0, 0, 0, 0);
CREATE TRIGGER dropped AFTER DELETE ON objects BEGIN
    UPDATE totals SET objects = objects - 1, bytes = bytes - OLD.bytes, pinned = pinned - OLD.bytes * OLD.pinned;
    UPDATE objects SET children = children - 1, use = max(use, OLD.use) WHERE digest = OLD.parent;
END;
CREATE TRIGGER changed AFTER UPDATE OF bytes, pinned ON objects BEGIN
    UPDATE totals SET bytes = bytes + NEW.bytes - OLD.bytes,
        pinned = pinned + NEW.bytes * NEW.pinned - OLD.bytes * OLD.pinned;
END;
"""
# Dropped while many rows are written at once, which is faster without them.
_ORDER = {
    "INDEX by_parent": "ON objects (parent)",
    "INDEX by_digest": "ON objects (digest)",
    "INDEX may_go": "ON objects (use, name) WHERE pinned = 0 AND children = 0",
    "TRIGGER added": """AFTER INSERT ON objects BEGIN
    UPDATE totals SET objects = objects + 1, bytes = bytes + NEW.bytes, pinned = pinned + NEW.bytes * NEW.pinned;
    UPDATE objects SET children = children + 1 WHERE digest = NEW.parent;
    UPDATE objects SET children = (SELECT count(*) FROM objects WHERE parent = NEW.digest) WHERE name = NEW.name;
END""",
}
# Errors that do not mean a damaged index: another process uses it, or the disk is full or
# read-only.
_OUTSIDE = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOMEM,
}


def is_damage(error: sqlite3.Error) -> bool:
    """Return True if an error reports a damaged index, rather than a problem of the system."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code & 0xFF not in _OUTSIDE or code == sqlite3.SQLITE_IOERR_SHORT_READ


class FileIndex:
    """An open index. One thread at a time makes changes; others may read meanwhile."""

    def __init__(self, path: Path | None, *, fresh: bool) -> None:
        """Open the index at ``path``, ``fresh``: make it there. ``path`` None: in memory, for a
        directory that cannot be written. ``sqlite3.Error`` for a damaged one or another version."""
        self.path = path
        self._writer = self._reader = self._connect()
        in_children(self._forked)
        self._writing = self._reading = threading.RLock()
        try:
            if fresh:
                order = "".join(f"CREATE {name} {rest};" for name, rest in _ORDER.items())
                self._writer.executescript(f"BEGIN; {_TABLES} {order} PRAGMA user_version = {VERSION}; COMMIT;")
            elif self._number("PRAGMA user_version") != VERSION or self._text("PRAGMA quick_check(1)") != "ok":
                raise sqlite3.DatabaseError(f"{path} is damaged, or no index of version {VERSION}")
            if path is not None:
                self._reader, self._reading = self._connect(), threading.RLock()
        except BaseException:
            self.close()
            raise

    @classmethod
    def find(cls, directory: Path) -> Self:
        """Open the index of a directory, or make one. The caller holds the directory's lock."""
        opened: Self | None = None
        for path in sorted(directory.glob(f"index-{VERSION}-*.sqlite")):
            if opened is None:
                try:
                    opened = cls(path, fresh=False)
                except sqlite3.Error as error:
                    if not is_damage(error):
                        raise
        if opened is None:
            path = directory / f"index-{VERSION}-{secrets.token_hex(8)}.sqlite"
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            opened = cls(path, fresh=True)
        for other in directory.glob(f"index-{VERSION}-*"):
            if not other.name.startswith(str(opened.path and opened.path.name)):
                other.unlink(missing_ok=True)
        return opened

    def is_current(self) -> bool:
        """Return True if the file is still the index of its directory."""
        return self.path is None or self.path.exists()

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return the bytes of objects; None for unknown ones."""
        with self._reading:
            rows = [
                self._reader.execute("SELECT bytes FROM objects WHERE name = ?", (one,)).fetchone() for one in names
            ]
        return [row and row[0] for row in rows]

    def under(self, parent: bytes) -> list[str]:
        """Return the names with a parent."""
        with self._reading:
            return [name for (name,) in self._reader.execute("SELECT name FROM objects WHERE parent = ?", (parent,))]

    def all_sizes(self) -> dict[str, int]:
        """Return the bytes of all objects by name."""
        with self._reading:
            return dict(self._reader.execute("SELECT name, bytes FROM objects"))

    def pinned(self) -> set[str]:
        """Return the names of pinned objects."""
        with self._reading:
            return {name for (name,) in self._reader.execute("SELECT name FROM objects WHERE pinned = 1")}

    def stat(self, capacity: int | None) -> TierStat:
        """Return the totals."""
        with self._reading:
            objects, size, pinned = self._reader.execute("SELECT objects, bytes, pinned FROM totals").fetchone()
        return TierStat(objects=objects, bytes=size, capacity=capacity, pinned=pinned)

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Run a block as one transaction, after those of other processes."""
        with self._writing:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    # ---------------------------------------------------------------- inside of ``change``

    def use(self, names: Sequence[str]) -> None:
        """Record uses of objects, the last one last."""
        uses = self._number("SELECT uses FROM totals")
        rows = [(uses + index, name) for index, name in enumerate(names, 1)]
        self._writer.executemany("UPDATE objects SET use = ? WHERE name = ?", rows)
        self._writer.execute("UPDATE totals SET uses = uses + ?", (len(names),))

    def add(self, key: ObjectKey, size: int) -> None:
        """Insert an object, or its new size, without a use."""
        self._writer.execute(
            "INSERT INTO objects (name, parent, digest, bytes, use) VALUES (?, ?, ?, ?, 0)"
            " ON CONFLICT (name) DO UPDATE SET bytes = excluded.bytes",
            (key.name, key.parent, key.digest, size),
        )

    def fill(self, objects: Sequence[tuple[ObjectKey, int]]) -> None:
        """As ``add``, for objects that the index does not have; fast if it is empty."""
        if self._number("SELECT objects FROM totals"):
            for key, size in objects:
                self.add(key, size)
            return
        for name in _ORDER:
            self._writer.execute(f"DROP {name}")
        self._writer.executemany(
            "INSERT INTO objects (name, parent, digest, bytes, use) VALUES (?, ?, ?, ?, 0)",
            sorted((key.name, key.parent, key.digest, size) for key, size in objects),
        )
        for name, rest in _ORDER.items():
            self._writer.execute(f"CREATE {name} {rest}")
        self._writer.execute(
            "UPDATE totals SET (objects, bytes) = (SELECT count(*), coalesce(sum(bytes), 0) FROM objects)"
        )
        self._writer.execute(
            "UPDATE objects SET children = one.count"
            " FROM (SELECT parent, count(*) AS count FROM objects GROUP BY parent) AS one WHERE one.parent = digest"
        )

    def drop(self, name: str) -> bool:
        """Remove an object; return True if it was known."""
        return self._writer.execute("DELETE FROM objects WHERE name = ?", (name,)).rowcount > 0

    def pin(self, name: str, pinned: bool) -> bool:
        """Pin or unpin an object; return True if it is known."""
        return self._writer.execute("UPDATE objects SET pinned = ? WHERE name = ?", (pinned, name)).rowcount > 0

    def shrink(self, capacity: int, spared: str | None = None) -> tuple[list[str], bool]:
        """Remove objects without children, least recently used first, until the rest fits. Return
        their names, and True if the rest fits without removing ``spared`` or pinned objects."""
        gone: list[str] = []
        while self._number("SELECT bytes FROM totals") > capacity:
            row = self._writer.execute(
                "SELECT name FROM objects WHERE pinned = 0 AND children = 0 AND name IS NOT ? ORDER BY use, name LIMIT 1",
                (spared,),
            ).fetchone()
            if row is None:
                return gone, False
            self.drop(row[0])
            gone.append(row[0])
        return gone, True

    def close(self) -> None:
        """Close the files, after running calls."""
        with self._writing, self._reading:
            for connection in {self._reader, self._writer}:
                with contextlib.suppress(sqlite3.Error):
                    connection.close()

    def _forked(self) -> None:
        for connection in {self._reader, self._writer}:
            keep_open(connection)

    def _connect(self) -> sqlite3.Connection:
        path = ":memory:" if self.path is None else str(self.path)
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            # After a loss of power the last changes may be missing; they are restored from the
            # files.
            connection.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            connection.close()
            raise
        return connection

    def _number(self, query: str) -> int:
        return int(self._writer.execute(query).fetchone()[0])

    def _text(self, query: str) -> str:
        return str(self._writer.execute(query).fetchone()[0])
