"""Calls that were given up, and turns for long texts: no other thread has to wait for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire.base import interrupts
from quire.base.errors import Cancelled

LONG = 1 << 18
"""Bytes of a long text: over a tenth of a second, and a thousand bytes for each of its own."""
LOOK = 0.05
"""Seconds between two checks whether a call that waits for its turn was given up."""


@dataclass(frozen=True, slots=True)
class TextLimit:
    """The longest text that can fit in the context, whatever its tokens are."""

    tokens: int
    """Tokens that fit."""
    bytes: int
    """Bytes that they have, at most."""


_calls = threading.local()
_free = threading.Condition()
_turns: dict[object, None] = {}


def _forked() -> None:
    global _free
    _free = threading.Condition()
    _turns.clear()


os.register_at_fork(after_in_child=_forked)


@contextmanager
def given_up_by(is_given_up: Callable[[], bool], step_aside: Callable[[], None] | None = None) -> Iterator[None]:
    """Let ``check`` on this thread ask ``is_given_up``, and ``step_aside`` call that function."""
    before = getattr(_calls, "is_given_up", None), getattr(_calls, "step_aside", None)
    _calls.is_given_up, _calls.step_aside = is_given_up, step_aside
    try:
        yield
    finally:
        _calls.is_given_up, _calls.step_aside = before


def step_aside() -> None:
    """Announce a long wait of this thread's call without computing: other calls may run."""
    function = getattr(_calls, "step_aside", None)
    if function is not None:
        function()


def check() -> None:
    """Raise ``Cancelled`` if this thread's call was given up. Interrupts take effect here."""
    interrupts.check()
    is_given_up = getattr(_calls, "is_given_up", None)
    if is_given_up is not None and is_given_up():
        raise Cancelled("the call was given up")


@contextmanager
def turn(size: int) -> Iterator[None]:
    """Wait until no other thread tokenises a long text, if ``size`` bytes are one: it takes memory
    beyond its size, and cannot be interrupted. ``Cancelled`` if the call is given up before."""
    check()
    if size < LONG:
        yield
        return
    mine = object()
    # An interrupt may come anywhere, so the turn is within, and given back before anything else.
    try:
        with _free:
            while _turns:
                _free.wait(LOOK)
                check()
            _turns[mine] = None
        yield
    finally:
        _turns.pop(mine, None)
        with _free:
            _free.notify_all()
