"""Signals that wait for a safe place: Ctrl-C takes effect between steps, never inside a change of the state.

Python runs a signal's handler on the main thread between any two bytecodes, so its exception may come out of any
line: after pages are taken and before a sequence knows them. Inside ``SHIELD`` a signal is kept instead. Its handler
runs when the outermost shielded block ends, or where the code inside says ``check()``: between two steps, between two
forwards of a call, between two tensors of a file. There an exception means what an error of that step would mean, and the
same ``finally`` clauses undo it. All signals with handlers written in Python are kept, so alarms that raise are safe too.

Who changes the state takes a ``Lock``, whose holder is shielded; so nobody can forget it. A verb that hands something
over between two locked parts is ``uninterrupted`` as a whole. Code of users inside (logits processors) runs in ``exposed``.

Other threads run no handlers: for them nothing here does anything. What cannot be kept: an exception that another thread
injects (``PyThreadState_SetAsyncExc``), a debugger that quits, and SIGKILL.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import functools
import sys
import threading
from _thread import get_ident
from collections import deque
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final, ParamSpec, Self, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

POLL_SECONDS = 0.05
"""How often the main thread looks for signals while it waits for a lock or an event."""

_SIGNALS = sorted(int(number) for number in _signal.valid_signals())


class Shield:
    """The state of the process's only shield, ``SHIELD``. Reentrant; ``with SHIELD:`` costs a few microseconds, inside of another
    one a fraction of one."""

    __slots__ = ("_depth", "_exposed", "_handlers", "_keeper", "_seen", "_taken", "_waiting")

    def __init__(self) -> None:
        self._depth = 0
        """Blocks that the main thread is inside of."""
        self._exposed = 0
        """The depth at which signals are not kept: outside of all blocks, or where code of a user runs."""
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        """Whose place ours has taken, or had: what is kept goes to them."""
        self._seen: list[object] = []
        """The handlers of all signals as they were found last."""
        self._taken: list[tuple[int, Callable[[int, FrameType | None], Any]]] = []
        """Those of them that are written in Python, by number."""
        self._waiting: deque[int] = deque()
        self._keeper = self._keep  # one object, to know it again

    def __enter__(self) -> Self:
        if get_ident() == threading.main_thread().ident:
            if not self._depth:
                self._install()
            self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self, *, deliver: bool = True) -> None:
        """The end of a block. Without ``deliver`` signals go on waiting: in a finaliser their exceptions would be lost."""
        if get_ident() == threading.main_thread().ident:
            self._depth -= 1
            if not self._depth:
                self._restore()
            if deliver and self._depth == self._exposed:
                self._deliver()

    @property
    def outermost(self) -> bool:
        """Whether the main thread is inside of one block and not of several."""
        return self._depth == self._exposed + 1

    def check(self) -> None:
        """Run the handlers of the signals that wait, here."""
        if self._waiting and get_ident() == threading.main_thread().ident:
            self._deliver()

    def expose(self, function: Callable[[], R]) -> R:
        """Call code of a user, in which signals are not kept."""
        if not self._depth or get_ident() != threading.main_thread().ident:
            return function()
        before, self._exposed = self._exposed, self._depth
        try:
            self.check()
            return function()
        finally:
            self._exposed = before

    def _keep(self, number: int, frame: FrameType | None) -> None:
        """The handler in the place of all others."""
        self._waiting.append(number)
        if not self._depth:
            # Between the first line of a block and its end: nothing has begun, or all is done.
            self._restore()
        if self._depth == self._exposed:
            self._deliver()

    def _install(self) -> None:
        # This runs at each verb, and hardly ever finds others than the time before.
        if (found := list(map(_signal.getsignal, _SIGNALS))) != self._seen:
            self._taken = [
                (number, handler)
                for number, handler in zip(_SIGNALS, found, strict=True)
                if callable(handler) and handler is not self._keeper
            ]
            self._handlers.update(self._taken)
            self._seen = found  # last: a handler that raises in between leaves nothing out
        for number, _ in self._taken:
            _signal.signal(number, self._keeper)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            # Who has put another one there inside of the block keeps it.
            if _signal.getsignal(number) is self._keeper:
                _signal.signal(number, handler)

    def _deliver(self) -> None:
        if not self._waiting:
            return
        number = self._waiting.popleft()
        while number in self._waiting:
            # Ctrl-C pressed again and again is one interrupt.
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
        with SHIELD:
            return function(*args, **kwargs)

    return call


def uninterrupted_verbs(*names: str) -> Callable[[type[R]], type[R]]:
    """Let these methods of a class, which it may have from others, be ``uninterrupted``."""

    def decorate(cls: type[R]) -> type[R]:
        for name in names:
            setattr(cls, name, uninterrupted(getattr(cls, name)))
        return cls

    return decorate


class Lock:
    """A reentrant lock whose holder is shielded: a change made under it happens whole.

    The main thread waits for it in pieces. A signal that comes meanwhile takes effect at once where the thread is in no other
    shielded block, or with ``interruptible``; else when the lock's block ends.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.interruptible = _Interruptible(self)
        """``with lock.interruptible:`` is ``with lock:`` and a check point while it waits: for whom nothing is at stake yet."""

    def acquire(self, blocking: bool = True, timeout: float = -1, *, checks: bool = False) -> bool:
        """As of ``threading.RLock``; ``checks``: raise what a signal that comes meanwhile raises, and do not have it then."""
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
        if timeout >= 0 or get_ident() != threading.main_thread().ident:
            return self._lock.acquire(timeout=timeout)
        while not self._lock.acquire(timeout=POLL_SECONDS):
            if checks or SHIELD.outermost:
                SHIELD.check()
        return True

    def release(self, *, deliver: bool = True) -> None:
        """As of ``threading.RLock``; ``deliver`` as of ``Shield.leave``."""
        self._lock.release()
        SHIELD.leave(deliver=deliver)

    @property
    def owned(self) -> bool:
        """Whether this thread holds it."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class _Interruptible:
    """See ``Lock.interruptible``."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.acquire(checks=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def wait_for(event: threading.Event) -> None:
    """Wait for an event; the wait is a check point."""
    if get_ident() != threading.main_thread().ident:
        event.wait()
        return
    while not event.wait(POLL_SECONDS):
        SHIELD.check()
