"""Delayed signals: Ctrl-C takes effect between steps, never inside a change of the state.

Python runs a signal's handler on the main thread between any two bytecodes, so its exception may
occur at any line: for example after pages are taken and before a sequence records them. Inside
``SHIELD`` a signal is kept. Its handler runs at the end of the outermost shielded block, or at a
``check()`` in it: between two steps, two forwards of a call, or two tensors of a file. An exception
there acts like an error of that step, and the same ``finally`` clauses undo the step. All signals
with Python handlers are kept, so alarms that raise are safe too. docs/internals.md lists the users
of each tool.

Other threads run no handlers, so for them this module does nothing. It cannot keep exceptions
injected by another thread (``PyThreadState_SetAsyncExc``), a debugger's quit, or SIGKILL.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import functools
import os
import sys
import threading
from _thread import get_ident
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, ParamSpec, Self, TypeVar

from quire.base.forks import FORKED, Forked, ParentsLock, in_children

P = ParamSpec("P")
R = TypeVar("R")

POLL_SECONDS = 0.05
"""Seconds between checks for signals while the main thread waits for a lock or an event."""

_SIGNALS = sorted(int(number) for number in _signal.valid_signals())


_main = threading.main_thread().ident
"""The main thread's identity, cached because each verb needs it many times."""


def _note_main_thread() -> None:
    global _main
    if get_ident() != _main:
        SHIELD.forget()  # the thread that was inside of the block belongs to the parent
    _main = threading.main_thread().ident


os.register_at_fork(after_in_child=_note_main_thread)


class Shield:
    """The process's only shield, ``SHIELD``. It is reentrant. ``with SHIELD:`` costs a few
    microseconds, or a fraction of one inside another."""

    __slots__ = ("_depth", "_exposed", "_handlers", "_keeper", "_seen", "_taken", "_waiting")

    def __init__(self) -> None:
        self._depth = 0
        """Number of shielded blocks around the main thread's code."""
        self._exposed = 0
        """The depth at which signals are delivered: outside all blocks, or in user code."""
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        """Handlers that were replaced, now or before; they get the kept signals."""
        self._seen: list[object] = []
        """The handlers of all signals at the last check."""
        self._taken: list[tuple[int, Callable[[int, FrameType | None], Any]]] = []
        """The handlers among them that are written in Python, by signal number."""
        self._waiting: deque[int] = deque()
        self._keeper = self._keep  # one object, for comparison by identity

    def __enter__(self) -> Self:
        if get_ident() == _main:
            if not self._depth:
                self._install()
            self._depth += 1
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.leave()

    def leave(self, *, deliver: bool = True) -> None:
        """End a block. ``deliver=False`` keeps signals pending: a finaliser would lose their
        exceptions."""
        if get_ident() == _main:
            self._depth -= 1
            if not self._depth:
                self._restore()
            if deliver and self._depth == self._exposed:
                self._deliver()

    @property
    def is_up(self) -> bool:
        """True if signals are being kept for the main thread."""
        return self._depth > self._exposed

    @property
    def outermost(self) -> bool:
        """Return True if exactly one block surrounds the main thread. Blocks around user code that
        ``expose`` calls do not count."""
        return self._depth == self._exposed + 1

    def check(self) -> None:
        """Run the handlers of pending signals here."""
        if self._waiting and get_ident() == _main:
            self._deliver()

    def expose(self, function: Callable[[], R]) -> R:
        """Call user code, in which signals are delivered at once."""
        if not self._depth or get_ident() != _main:
            return function()
        before, self._exposed = self._exposed, self._depth
        try:
            self.check()
            return function()
        finally:
            self._exposed = before

    def forget(self) -> None:
        """Leave all blocks, in a child process without the thread that was inside them."""
        self._depth = self._exposed = 0
        self._waiting.clear()
        self._restore()

    def _keep(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in place of its own handler: keep it, or deliver it outside blocks."""
        self._waiting.append(number)
        if not self._depth:
            # Before the first line of a block or after its last: nothing has begun, or all is done.
            self._restore()
        if self._depth == self._exposed:
            self._deliver()

    def _install(self) -> None:
        # This runs at each verb; the handlers have almost never changed since the last time.
        if (found := list(map(_signal.getsignal, _SIGNALS))) != self._seen:
            self._taken = [
                (number, handler)
                for number, handler in zip(_SIGNALS, found, strict=True)
                if callable(handler) and handler is not self._keeper
            ]
            self._handlers.update(self._taken)
            self._seen = found  # set last: if a signal handler raises before this line, the next call repeats the work
        for number, _ in self._taken:
            _signal.signal(number, self._keeper)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            # A handler installed inside the block stays.
            if _signal.getsignal(number) is self._keeper:
                _signal.signal(number, handler)

    def _deliver(self) -> None:
        if not self._waiting:
            return
        number = self._waiting.popleft()
        while number in self._waiting:
            # Repeated Ctrl-C is one interrupt.
            self._waiting.remove(number)
        try:
            self._handlers[number](number, sys._getframe(1))
        finally:
            self._deliver()


SHIELD: Final = Shield()
check = SHIELD.check
exposed = SHIELD.expose


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function in the shield: signals take effect at its check points and at its end."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if SHIELD.is_up or get_ident() != _main:
            return function(*args, **kwargs)
        with SHIELD:
            return function(*args, **kwargs)

    return call


class Lock:
    """A reentrant lock that shields its holder: a change made under it happens whole.

    The main thread waits for it in pieces. A signal during the wait takes effect at once outside
    other shielded blocks or with ``interruptible``, else at the end of the lock's block.
    """

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        in_children(self._forked)
        self.interruptible = _Interruptible(self)
        """``with lock.interruptible:`` is ``with lock:``, but the wait is a check point."""

    def acquire(self, blocking: bool = True, timeout: float = -1, *, checks: bool = False) -> bool:
        """Acquire as ``threading.RLock`` does; with ``checks`` a signal's error ends the wait."""
        SHIELD.__enter__()
        taken = False
        try:
            taken = self._acquire(blocking, timeout, checks)
        finally:
            if not taken:
                SHIELD.leave()
        return taken

    def _acquire(self, blocking: bool, timeout: float, checks: bool) -> bool:
        if self._lock.acquire(blocking=False) or not blocking:
            return self.owned
        if timeout >= 0 or get_ident() != _main:
            return bool(self._lock.acquire(timeout=timeout))
        while not self._lock.acquire(timeout=POLL_SECONDS):
            if checks or SHIELD.outermost:
                SHIELD.check()
        return True

    def release(self, *, deliver: bool = True) -> None:
        """Release as ``threading.RLock`` does; ``deliver`` is that of ``Shield.leave``."""
        self._lock.release()
        SHIELD.leave(deliver=deliver)

    @property
    def owned(self) -> bool:
        """Return True if this thread holds the lock."""
        return self._lock._is_owned()  # type: ignore[no-any-return]

    def _forked(self) -> None:
        self._lock = ParentsLock()

    @property
    def is_parents(self) -> bool:
        """True if it was made before ``os.fork()``, so that it cannot be acquired here."""
        return isinstance(self._lock, ParentsLock)

    def require_own(self) -> None:
        """Raise ``Forked`` if it was made before ``os.fork()``."""
        if self.is_parents:
            raise Forked(FORKED)

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.release()


class _Interruptible:
    """See ``Lock.interruptible``."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.acquire(checks=True)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._lock.release()


def wait_for(event: threading.Event) -> None:
    """Wait for an event; the wait is a check point."""
    if get_ident() != _main:
        event.wait()
        return
    while not event.wait(POLL_SECONDS):
        SHIELD.check()
