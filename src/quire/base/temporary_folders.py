"""Temporary folders that are locked for as long as their process lives."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

NEW_SECONDS = 60.0
"""Age up to which such a folder may be one that its process has not locked yet."""


class TemporaryFolder:
    """An empty folder, until ``remove``. Its lock keeps it from ``remove_leftovers``."""

    def __init__(self, prefix: str) -> None:
        """Make the folder, with a name that begins with ``prefix``."""
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock: int | None = os.open(self.path, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def remove(self) -> None:
        """Remove the folder with its content. A second call is harmless."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def remove_leftovers(prefix: str) -> None:
    """Remove the folders of processes that were killed, of those with this prefix."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # it is gone, or another user's, or its process lives
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(lock).st_mtime > NEW_SECONDS:
                    shutil.rmtree(folder)
            finally:
                os.close(lock)
