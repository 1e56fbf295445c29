"""Who asked for what runs in this context: an API key's owner, and the trace that the call is in.

A server sets it where a call arrives. Whatever submits requests on behalf of the call runs in a
copy of its context, on whichever thread.
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
    """The W3C header of this name, as it came; empty without one."""
    tracestate: str = ""
    """The same."""
    path: str = ""
    """The path of the call."""
    weight: float = 1.0
    """The share of the API key in steps and places, relative to other keys."""


NOBODY = Caller()

caller: ContextVar[Caller] = ContextVar("caller", default=NOBODY)
"""The caller on whose behalf the present context runs."""


@contextmanager
def on_behalf_of(who: Caller) -> Iterator[None]:
    """Let the block run for a caller, on whichever thread."""
    token = caller.set(who)
    try:
        yield
    finally:
        caller.reset(token)
