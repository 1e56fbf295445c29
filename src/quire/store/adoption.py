"""Sessions of a process that has ended, taken over by another one. No torch.

Several servers have state directories in one folder. The lock of a directory tells whether its
process lives. A record moves whole: it is durable in the new journal before it leaves the old one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

from msgspec.structs import replace

from quire.base.errors import InvalidArgument, NotDurable, QuireError
from quire.statefile.atomic_file import replacing
from quire.store.journal import FILE, End, SessionJournal, SessionRecord

TURN = "adopting.lock"
PLACE = "place.lock"


def adopt(folder: Path, journal: SessionJournal, name: str, accept: Callable[[SessionRecord], bool]) -> bool:
    """Move the record of a session, and its state file, into ``journal`` from a directory in
    ``folder`` that no process uses. Return whether there is one that ``accept`` takes.
    ``NotDurable``: it cannot be read there or written here; then it stays where it is."""
    with turn(folder):
        for directory in sorted(one.parent for one in folder.glob(f"*/{FILE}")):
            if directory.resolve() == journal.directory.resolve() or (place := _reserved(directory)) is None:
                continue
            with closing(place):
                try:
                    other = SessionJournal(directory)
                except InvalidArgument:  # its process lives, or this one may not read it
                    continue
            with closing(other):
                record = other.get(name)
                if record is None or not accept(record):
                    continue
                if record.state is not None:
                    path = journal.new_state(name)
                    try:
                        with other.state_path(record).open("rb") as state, replacing(path, "its copy") as copy:
                            shutil.copyfileobj(state, copy)
                    except (OSError, QuireError) as error:
                        raise NotDurable(f"the state file of session {name} cannot be moved: {error}") from error
                    record = replace(record, state=path.name)
                try:
                    journal.write([record])
                except NotDurable:
                    if record.state is not None:
                        journal.state_path(record).unlink(missing_ok=True)
                    raise
                other.write([End(name)])
                return True
    return False


def free_directory(folder: Path, count: int) -> tuple[Path, IO[bytes]]:
    """Return the first of ``count`` state directories in ``folder`` that no process uses, and an
    open file that reserves it for this process's child. ``InvalidArgument``: all are in use."""
    with turn(folder):
        for number in range(count):
            directory = folder / f"replica-{number}"
            directory.mkdir(mode=0o700, exist_ok=True)
            if (place := _reserved(directory)) is None:
                continue
            try:
                SessionJournal(directory).close()
            except InvalidArgument:
                place.close()
                continue
            return directory, place
    raise InvalidArgument(f"all {count} state directories in {str(folder)!r} are in use by other processes")


def _reserved(directory: Path) -> IO[bytes] | None:
    """Lock a directory for a process that is yet to start there; None if another one has it, or if
    it is no directory of this user."""
    try:
        place = (directory / PLACE).open("ab")  # the caller closes it
    except OSError:  # this process may not write there
        return None
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        place.close()
        return None
    return place


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that of two processes one after the other looks for directories
    that are free."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.open(folder / TURN, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(found, fcntl.LOCK_EX)
        yield
    finally:
        os.close(found)
