"""Safe failure of a parent's objects in a child of ``os.fork()``.

A child has one thread. The threads of the parent's engines, stores and journals are missing, and a
lock that one of them held is never released. So a child replaces the locks of existing objects by
``ParentsLock``, which refuses. New objects in the child work.

SQLite's connections must not be closed in a child either: it would fold their log into a file that
the parent writes. They stay open.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from quire.base.errors import FailedPrecondition

_OWNERS: dict[weakref.WeakMethod[Callable[[], object]], None] = {}


FORKED = (
    "this object was made before os.fork(), and its threads and locks are those of the parent process; make "
    "a new LLM or executor in the child, or start children with the 'spawn' method of multiprocessing"
)


class Forked(FailedPrecondition):
    """An object of the parent was used in a child of ``os.fork()``."""


class ParentsLock:
    """Replaces a lock of the parent in a child."""

    def __enter__(self) -> NoReturn:
        raise Forked(FORKED)

    def __exit__(self, *_: object) -> None:
        """End a block in which the process was forked."""

    def release(self) -> None:
        """Release a lock that was taken before the fork."""

    def _is_owned(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise Forked(FORKED)


def in_children(forked: Callable[[], object]) -> None:
    """Call a method first in each child, if its object is alive."""
    _OWNERS[weakref.WeakMethod(forked, lambda gone: _OWNERS.pop(gone, None))] = None


def keep_open(held: object) -> None:
    """Keep an object alive for ever, also when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def _forked() -> None:
    for owner in list(_OWNERS):
        if (forked := owner()) is not None:
            forked()
    _OWNERS.clear()


os.register_at_fork(after_in_child=_forked)
