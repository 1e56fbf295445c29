"""Files that appear complete, or not at all.

The bytes go to a temporary file in the same directory, are synced, and get their name in one step.
A reader never sees a part of a file, and any failure leaves the earlier file as it was.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash

from quire.base.errors import InvalidArgument, NotFound, QuireError, ResourceExhausted

_EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
# What directories that cannot be opened for reading, and file systems that cannot sync one, answer.
_NO_DIRECTORY_SYNC = {errno.EACCES, errno.EINVAL, errno.ENOTSUP}


@contextlib.contextmanager
def os_errors(label: str) -> Iterator[None]:
    """Turn errors of the operating system into ours, after ``label``.

    ``ResourceExhausted``: a full disk or quota, no memory, too many open files. ``NotFound``: no
    such file. ``QuireError``: the device broke. ``InvalidArgument``: the rest, as no permission.
    """
    try:
        yield
    except QuireError:
        raise
    except OSError as error:
        reason = f"{label}: {error.strerror or error}"
        if error.errno in _EXHAUSTED:
            raise ResourceExhausted(reason) from error
        if error.errno == errno.ENOENT:
            raise NotFound(reason) from error
        if error.errno == errno.EIO:
            raise QuireError(reason) from error
        raise InvalidArgument(reason) from error
    except ValueError as error:  # a name with a null character, a file object that is closed
        raise InvalidArgument(f"{label}: {error}") from error


@contextlib.contextmanager
def replacing(path: Path, label: str) -> Iterator[BinaryIO]:
    """Yield an unbuffered file, which becomes ``path`` when the block ends without an exception.

    After an exception, which passes, ``path`` is as it was and the temporary file is gone. A killed
    process leaves its temporary file, which the next call for the same name removes. A symbolic
    link is replaced, not followed. Errors: as for ``os_errors``; ``NotFound`` also for a missing
    directory, ``InvalidArgument`` also for a path that is no regular file.
    """
    check_regular(path, label, may_be_missing=True)
    remove_stale(path.parent, path.name)
    with contextlib.ExitStack() as cleanup:
        with os_errors(label):
            sink, temporary = _open_temporary(path, cleanup)
        yield sink
        with os_errors(label):
            os.fsync(sink.fileno())
            # Before the file is closed: without its lock it would be taken for stale.
            os.replace(temporary, path)
            sync_directory(path.parent)


def check_regular(path: Path, label: str, *, may_be_missing: bool = False) -> None:
    """Refuse irregular files: renaming would replace a device, opening a pipe would wait."""
    with os_errors(label):
        if may_be_missing and not path.parent.is_dir():
            raise NotFound(f"{label} cannot be written: there is no directory {str(path.parent)!r}")
        if may_be_missing and not path.exists():
            return
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
            raise InvalidArgument(f"{label} is {kind}; give the name of a file")


def _temporary_prefix(name: str) -> str:
    # A digest of the name, since the name itself may be as long as the file system allows.
    return f".quire-{xxhash.xxh3_64_hexdigest(os.fsencode(name))}"


def _open_temporary(path: Path, cleanup: contextlib.ExitStack) -> tuple[BinaryIO, Path]:
    """Open a new, locked file beside ``path``; ``cleanup`` closes it and removes it by this name.

    The lock tells ``remove_stale`` of other processes that the writer lives. The kernel knows
    locks; a process id is reused, and means nothing in another container.
    """
    while True:
        temporary = path.with_name(f"{_temporary_prefix(path.name)}-{os.getpid()}-{secrets.token_hex(8)}.tmp")
        # Before the file exists, so that no interrupt can come between its creation and this line.
        cleanup.callback(_unlink, temporary)
        sink = open(temporary, "xb", buffering=0)  # noqa: SIM115 - closed by cleanup
        cleanup.callback(_close, sink)
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(sink, fcntl.LOCK_EX)
        if os.fstat(sink.fileno()).st_nlink:
            return sink, temporary
        # Another process took it for stale before it was locked: once more.


def remove_stale(directory: Path, name: str | None = None) -> None:
    """Remove temporary files of dead writers in a directory: those for the file ``name``, or for
    any. A failure to do so is ignored."""
    prefix = ".quire-[0-9a-f]{16}" if name is None else re.escape(_temporary_prefix(name))
    pattern = re.compile(prefix + r"-\d+-[0-9a-f]{16}\.tmp")
    with contextlib.suppress(OSError):
        for entry in directory.iterdir():
            if pattern.fullmatch(entry.name):
                with contextlib.suppress(OSError), open(entry, "rb+") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its writer lives
                    entry.unlink()


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _close(sink: BinaryIO) -> None:
    with contextlib.suppress(OSError):
        sink.close()


def sync_directory(directory: Path) -> None:
    """Make the new name itself survive a loss of power."""
    try:
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
