"""Ends Quire's threads before the interpreter, which would break them off.

A thread in C++ code, such as PyTorch's, at the end of the interpreter aborts the process. So
objects with daemon threads are closed as the process ends, and their accepted work is written.

This happens with the process's exit handlers. The program's other threads have ended by then, and
the program's own handlers have run: both may use an LLM. Processes started by ``multiprocessing``
run no exit handlers but finalizers, so this is a finalizer, which both run.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import util

LEAVE_SECONDS = 2.0
"""Most seconds to wait for daemon threads of the program that are in a call."""
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_OWNERS: dict[weakref.WeakMethod[Callable[[], object]], None] = {}


def end_with_process(end: Callable[[], object]) -> None:
    """Call the method ``end`` when the process ends, if its object is alive then. The last
    registered is called first."""
    _OWNERS[weakref.WeakMethod(end, lambda gone: _OWNERS.pop(gone, None))] = None


def leave_running(end: Callable[[], object]) -> None:
    """Cancel ``end_with_process``."""
    _OWNERS.pop(weakref.WeakMethod(end), None)


def _end_all() -> None:
    interrupt: BaseException | None = None
    callers = [thread for thread in threading.enumerate() if _is_inside(thread)]
    while _OWNERS:
        end = _OWNERS.popitem()[0]()
        try:
            if end is not None:
                end()
        except Exception:
            sys.excepthook(*sys.exc_info())
        except BaseException as error:  # continue: the other owners must be ended too
            interrupt = error
    # Wait for these threads: their calls raise an error, which usually ends the thread and frees
    # its tensors.
    until = time.monotonic() + LEAVE_SECONDS
    for thread in callers:
        thread.join(max(0.0, until - time.monotonic()))
    if interrupt is not None:
        raise interrupt


def _is_inside(thread: threading.Thread) -> bool:
    """Return True if a thread of the program is in a call of Quire."""
    if thread is threading.current_thread() or thread.name.startswith("quire-"):
        return False
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame is not None


def _begin(_: object = None) -> None:
    """Register in a process. In a child the threads belong to the parent, and so does its
    finalizer."""
    _OWNERS.clear()
    util.Finalize(None, _end_all, exitpriority=0)


_begin()
os.register_at_fork(after_in_child=_begin)
# Afterwards ``multiprocessing`` drops a child's finalizers, then calls the ones registered here.
util.register_after_fork(_begin, _begin)
