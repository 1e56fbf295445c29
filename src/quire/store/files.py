"""``FileTier``: objects as files of a directory that several processes may use at once.

``objects/ab/NAME.quire`` are the objects, ``ab`` the first digits of their digests, and ``pins/``
has an empty file for each pinned object. The files are authoritative; ``index-*.sqlite`` is derived
from them (``quire.store.file_index``). A file gets its final name, complete and synced, in the
transaction that enters it into the index, so that only a killed process leaves a file without an
entry. The next process that opens the directory finds it.

Objects are read by mapping their files, which are never changed in place. An evicted object stays
readable to processes that have it mapped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Concatenate, ParamSpec, TypeVar

from quire.base.errors import InvalidArgument, QuireError, TierError, TierFull
from quire.base.forks import ParentsLock, in_children
from quire.contracts.store import Blob, ObjectKey, ObjectKind, ObjectPart, TierStat
from quire.statefile.atomic_file import remove_stale, replacing, sync_directory
from quire.store.file_index import FileIndex, is_damage
from quire.store.keys import checked_name
from quire.store.memory import cut
from quire.store.threads import DaemonThreads

P = ParamSpec("P")
R = TypeVar("R")

THREADS = 8
SUFFIX = ".quire"
USES_KEPT = 256
"""Number of uses that are collected in memory before they are written to the index."""
MAPPED = 256
"""Most objects that are mapped at once. Each holds a file descriptor, so further ones are read."""
OPEN_SECONDS = 30.0
"""Seconds to wait for another process that is opening the directory."""

_FULL = {errno.ENOSPC, errno.EDQUOT}
# Errors of opening a file that does not exist.
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}


class _NoRoom(Exception):
    """An object does not fit, whatever is evicted."""


class FileTier:
    """Objects in a directory, at most ``capacity`` bytes of them; None: no limit."""

    kind = "disk"

    def __init__(self, directory: str | os.PathLike[str], capacity: int | None) -> None:
        self.directory, self.capacity = Path(directory).absolute(), capacity
        self.label = f"directory {str(self.directory)!r}"
        self._threads = DaemonThreads(THREADS, "quire-files")
        self._lock: Any = threading.Lock()
        """Guards the fields below."""
        in_children(self._forked)
        self._opening = -1
        """The descriptor of the directory's lock, while it is held."""
        self._opened: FileIndex | None = None
        self._closed = self._full = False
        self._used: dict[str, None] = {}
        """Names used since the last write to the index, the last one last."""
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    async def get(self, keys: Sequence[ObjectKey]) -> list[Blob | None]:
        return await self._call(self._get, _names(keys))

    async def part(self, key: ObjectKey, start: int, stop: int) -> ObjectPart | None:
        (blob,) = await self.get([key])
        return cut(blob, start, stop)

    async def put(self, key: ObjectKey, blob: Blob) -> bool:
        return await self._call(self._put, key, checked_name(key), blob)

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return await self._call(self._contains, _names(keys))

    async def children(self, parents: Sequence[bytes]) -> list[list[ObjectKey]]:
        found = await self._call(lambda index: [index.under(parent) for parent in parents])
        return [[ObjectKey.parse(name) for name in names] for names in found]

    async def remove(self, keys: Collection[ObjectKey]) -> int:
        return await self._call(self._remove, _names(keys))

    async def pin(self, keys: Collection[ObjectKey], pinned: bool) -> None:
        await self._call(self._pin, _names(keys), pinned)

    async def stat(self) -> TierStat:
        return await self._call(lambda index: index.stat(self.capacity))

    def _forked(self) -> None:
        self._lock = ParentsLock()
        if self._opening >= 0:  # the parent's lock would last as long as this copy of the descriptor
            os.close(self._opening)

    async def close(self) -> None:
        """Write the last uses to the index and close it."""
        await self._threads.run(self._close)
        self._threads.end()

    async def _call(self, function: Callable[Concatenate[FileIndex, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        if self._closed:
            raise TierError(f"{self.label} is closed")
        return await self._threads.run(lambda: self._with_index(function, *args, **kwargs))

    # ------------------------------------------------------------ on threads of the tier

    def _with_index(self, function: Callable[Concatenate[FileIndex, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call with the index; repeat with a new index if it turns out to be damaged."""
        for attempt in range(2):
            index = None
            try:
                index = self._index()
                return function(index, *args, **kwargs)
            except sqlite3.Error as error:
                # Using an index that another call closes is an error of SQLite, too.
                if attempt or self._closed or not is_damage(error):
                    raise _kind_of(error)(f"the index of {self.label}: {error}") from error
                if index is not None:
                    self._discard(index)
            except TierError:
                raise
            except (OSError, QuireError) as error:
                told = str(error) if self.label in str(error) else f"{self.label}: {error}"
                raise _kind_of(error)(told) from error
        raise AssertionError("the second attempt returns or raises")

    def _index(self) -> FileIndex:
        """Return the open index; open the directory if there is none, or its file is gone."""
        with self._lock:
            if self._closed:
                raise TierError(f"{self.label} is closed")
            if self._opened is None or not self._opened.is_current():
                if self._opened is not None:
                    self._opened.close()
                    self._opened = None
                self._opened = self._open()
            return self._opened

    def _open(self) -> FileIndex:
        try:
            for folder in (self.directory, self._objects, self.directory / "pins"):
                _make(folder)
            with self._alone():
                return self._agreed(FileIndex.find(self.directory))
        except TierError:
            raise
        except (OSError, sqlite3.OperationalError) as error:
            is_busy = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
            if is_busy or (isinstance(error, sqlite3.Error) and is_damage(error)) or not self._objects.is_dir():
                raise
            # A full or read-only disk can still be read.
            self._full = _kind_of(error) is TierFull
            return self._agreed(FileIndex(None, fresh=True))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Prevent other processes from opening the directory during the block."""
        fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._opening = fd
            deadline = time.monotonic() + OPEN_SECONDS
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TierError(f"{self.label} is being opened by another process") from None
                    time.sleep(0.01)
            yield
        finally:
            self._opening = -1
            os.close(fd)

    def _agreed(self, index: FileIndex) -> FileIndex:
        """Make the index consistent with the files, and return it."""
        try:
            with index.change():
                known, there, fresh = index.all_sizes(), set[str](), list[tuple[ObjectKey, int]]()
                for folder in os.scandir(self._objects):
                    if not folder.is_dir(follow_symlinks=False):
                        continue
                    remove_stale(Path(folder.path))
                    for entry in os.scandir(folder):
                        name = entry.name.removesuffix(SUFFIX)
                        if name in known and not _is_record(name):
                            there.add(name)
                        elif folder.name == _folder_of(name) and entry.is_file(follow_symlinks=False):
                            with contextlib.suppress(InvalidArgument):  # a file that is not an object: it stays
                                fresh.append((ObjectKey.parse(name), entry.stat(follow_symlinks=False).st_size))
                                there.add(name)
                index.fill(fresh)
                for name in known.keys() - there:
                    index.drop(name)
                pins = {entry.name for entry in os.scandir(self.directory / "pins")}
                for name in pins | index.pinned():
                    if not index.pin(name, name in pins):
                        with contextlib.suppress(OSError):
                            (self.directory / "pins" / name).unlink(missing_ok=True)
                if index.path is not None and self.capacity is not None:
                    for name in index.shrink(self.capacity)[0]:
                        self._unlink(name)
            return index
        except BaseException as error:
            index.close()
            if isinstance(error, sqlite3.Error) and is_damage(error) and index.path is not None:
                index.path.unlink(missing_ok=True)
            raise

    def _discard(self, index: FileIndex) -> None:
        """Remove a damaged index. Other processes notice that its file is gone."""
        index.close()
        with self._lock:
            if self._opened is index:
                self._opened = None
        if index.path is not None:
            index.path.unlink(missing_ok=True)

    def _get(self, index: FileIndex, names: Sequence[str]) -> list[Blob | None]:
        found: list[Blob | None] = []
        for name, size in zip(names, index.sizes(names), strict=True):
            blob = None if size is None else self._read(self._path(name), size)
            if size is not None and blob is None and (size := self._healed(index, name)) is not None:
                blob = self._read(self._path(name), size)
            found.append(blob)
        self._note_uses(index, [name for name, blob in zip(names, found, strict=True) if blob is not None])
        return found

    def _read(self, path: Path, size: int) -> Blob | None:
        """Return the content of a file; None if there is none of this size."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _NO_FILE:
                return None
            raise
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                return None
            if not size or len(self._maps) >= MAPPED:
                with open(fd, "rb", closefd=False) as file:
                    data = file.read(size)
                return data if len(data) == size else None
            mapped = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
        with self._lock:
            self._maps.add(mapped)
        return memoryview(mapped)

    def _put(self, index: FileIndex, key: ObjectKey, name: str, blob: Blob) -> bool:
        if key.kind is not ObjectKind.RECORD and self._contains(index, [name])[0]:
            self._note_uses(index, [name])
            return True
        size = memoryview(blob).nbytes
        if self.capacity is not None and size > self.capacity:
            return False
        if index.path is None:  # perhaps the directory can be written by now
            self._discard(index)
            index = self._index()
            if index.path is None:
                kind = TierFull if self._full else TierError
                raise kind(f"{self.label} cannot be written: its disk is full or read-only")
        self._write_uses(index)
        path, gone = self._path(name), list[str]()
        _make(path.parent)
        try:
            with contextlib.ExitStack() as change:
                with replacing(path, self.label) as sink:
                    os.fchmod(sink.fileno(), 0o600)
                    _write(sink, blob)
                    os.fsync(sink.fileno())
                    change.enter_context(index.change())
                    index.add(key, size)
                    index.use([name])
                    if self.capacity is not None:
                        gone, fits = index.shrink(self.capacity, spared=name)
                        if not fits:
                            raise _NoRoom
                for name in gone:
                    self._unlink(name)
        except _NoRoom:
            return False
        return True

    def _contains(self, index: FileIndex, names: Sequence[str]) -> list[bool]:
        found = []
        for name, size in zip(names, index.sizes(names), strict=True):
            if size is not None and self._size(name) != size:
                size = self._healed(index, name)
            found.append(size is not None)
        return found

    def _remove(self, index: FileIndex, names: Collection[str]) -> int:
        with index.change():
            for name in names:
                self._unlink(name)
            return sum(index.drop(name) for name in names)

    def _pin(self, index: FileIndex, names: Collection[str], pinned: bool) -> None:
        folder = self.directory / "pins"
        with index.change():
            for name in names:
                if index.pin(name, pinned):
                    if pinned:
                        os.close(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
                    else:
                        (folder / name).unlink(missing_ok=True)
            sync_directory(folder)

    def _healed(self, index: FileIndex, name: str) -> int | None:
        """Return the size on which file and index agree, after repairs; None: there is no such
        object. A file of another size is removed. For a record, which is replaced in place, the
        file is right: its writer was killed before it updated the index."""
        with index.change():
            (size,) = index.sizes([name])
            if size is None or (found := self._size(name)) == size:
                return size
            if found is not None and _is_record(name):
                index.add(ObjectKey.parse(name), found)
                return found
            with contextlib.suppress(OSError):
                self._unlink(name)
            index.drop(name)
            return None

    def _note_uses(self, index: FileIndex, names: Sequence[str]) -> None:
        with self._lock:
            for name in names:
                self._used.pop(name, None)
                self._used[name] = None
            many = len(self._used) >= USES_KEPT
        if many:
            self._write_uses(index)

    def _write_uses(self, index: FileIndex) -> None:
        with self._lock:
            names, self._used = list(self._used), {}
        if names:
            # If these are lost, the recorded order of uses is slightly out of date.
            with contextlib.suppress(sqlite3.OperationalError), index.change():
                index.use(names)

    def _close(self) -> None:
        index = self._opened
        if index is not None and index.is_current():
            with contextlib.suppress(sqlite3.Error):
                self._write_uses(index)
        with self._lock:
            self._closed = True
            if self._opened is not None:
                self._opened.close()
                self._opened = None

    @property
    def _objects(self) -> Path:
        return self.directory / "objects"

    def _path(self, name: str) -> Path:
        return self._objects / _folder_of(name) / f"{name}{SUFFIX}"

    def _size(self, name: str) -> int | None:
        try:
            found = self._path(name).lstat()
        except OSError as error:
            if error.errno in _NO_FILE:
                return None
            raise
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def _unlink(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)
        (self.directory / "pins" / name).unlink(missing_ok=True)


def _kind_of(error: Exception) -> type[TierError]:
    """Return ``TierFull`` for errors of a full disk or quota, else ``TierError``."""
    cause = error.__cause__ if isinstance(error, QuireError) else error
    full = getattr(cause, "errno", None) in _FULL or getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return TierFull if full else TierError


def _names(keys: Collection[ObjectKey]) -> list[str]:
    return [checked_name(key) for key in keys]


def _folder_of(name: str) -> str:
    return name.rpartition("-")[2][:2]


def _make(folder: Path) -> None:
    """Make a directory durably, so that it survives a crash of the machine."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_directory(folder.parent)


def _is_record(name: str) -> bool:
    return f"-{ObjectKind.RECORD}-" in name


def _write(sink: BinaryIO, blob: Blob) -> None:
    rest = memoryview(blob).cast("B")
    while rest:
        rest = rest[sink.write(rest) :]
