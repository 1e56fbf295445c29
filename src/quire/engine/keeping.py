"""How a session's verbs tell what keeps the session that it has changed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

from quire.errors import QuireError

P = ParamSpec("P")
R = TypeVar("R")


class Keeper(Protocol):
    """What makes a program's sessions outlive the process."""

    def keep(self, session: Any, *, wait: bool) -> Future[None] | None:
        """Keep an idle session as it is now. ``wait``: return when that is durable; else return
        what is done then, None if there is nothing to write. ``NotDurable``."""
        ...


def kept(verb: Callable[P, R]) -> Callable[P, R]:
    """Make a session's verb return when what it did is durable, if the session is kept. After an
    error the session is kept as it then is, without waiting; the error passes."""

    @wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        session: Any = args[0]
        if session._kept is None:
            return verb(*args, **kwargs)
        try:
            found = verb(*args, **kwargs)
        except BaseException:
            with suppress(QuireError):
                session._keep(wait=False)
            raise
        session._keep(wait=True)
        return found

    return call
