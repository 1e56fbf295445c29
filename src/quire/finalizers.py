"""Finalisers of unreferenced objects that do nothing at interpreter shutdown."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def unless_exiting(method: Callable[Concatenate[T, P], None]) -> Callable[Concatenate[T, P], None]:
    """Make a method do nothing once the interpreter shuts down.

    Modules are emptied then. If a program's objects go last, because for example ``dill`` holds
    ``__main__``, a finaliser finds None in place of functions and classes. The process frees all.
    """
    exiting = sys.is_finalizing  # in a closure, which outlives this module's names

    @wraps(method)
    def guarded(self: T, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if not exiting():
            method(self, *args, **kwargs)

    return guarded
