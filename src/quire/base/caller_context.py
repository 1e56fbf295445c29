"""The caller on whose behalf the present context runs: owner of the API key, and trace.

A server sets it when a call arrives. Code that submits requests for the call runs in a copy of its
context, on any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a server."""

    owner: str = ""
    """Digest of the API key; empty for a server without keys, and outside of servers."""
    traceparent: str = ""
    """The W3C header of this name, unchanged; empty without one."""
    tracestate: str = ""
    """The W3C header of this name, unchanged; empty without one."""
    path: str = ""
    """The path of the call."""
    weight: float = 1.0
    """The share of the API key in steps and places, relative to other keys."""


NOBODY = Caller()

caller: ContextVar[Caller] = ContextVar("caller", default=NOBODY)
"""The caller on whose behalf the present context runs."""


@contextmanager
def on_behalf_of(who: Caller) -> Iterator[None]:
    """Run the block on behalf of a caller, on any thread."""
    token = caller.set(who)
    try:
        yield
    finally:
        caller.reset(token)
