"""What runs when nobody holds an object any more, and must not when the interpreter goes down."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def unless_exiting(method: Callable[Concatenate[T, P], None]) -> Callable[Concatenate[T, P], None]:
    """Let a method do nothing once the interpreter goes down.

    Modules are emptied then. Where somebody still holds ``__main__``, as ``dill`` does, a program's
    objects go last, and a finaliser finds None where functions and classes were. What it would give
    back goes with the process.
    """
    exiting = sys.is_finalizing  # in a closure, which outlives this module's names

    @wraps(method)
    def guarded(self: T, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if not exiting():
            method(self, *args, **kwargs)

    return guarded
