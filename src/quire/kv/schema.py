"""Declarations of what a JSON value from outside must be.

A check is a function of a value and its path; it returns nothing, or raises ``Fault``, which names
the path, the value and what is expected. Checks are made of checks, one for a whole document.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import TypeAlias

Check: TypeAlias = Callable[[object, str], None]

MOST = 2**53
"""The largest count or position in a document. JSON readers take it exactly; sums fit an int64."""


class Fault(ValueError):
    """A part of a document that is not as declared."""

    def __init__(self, path: str, found: str, expected: str) -> None:
        super().__init__(f"{path} is {found}; {expected} is expected")


def _shown(value: object) -> str:
    # repr would make the text of the whole value first; reprlib looks at its beginning only.
    return reprlib.repr(value)


def integer(least: int = 0, most: int = MOST) -> Check:
    """Check for an integer in [least, most]; no bool and no float."""

    def check(value: object, path: str) -> None:
        if type(value) is not int or not least <= value <= most:
            raise Fault(path, _shown(value), f"an integer in [{least}, {most}]")

    return check


def integers(least: int = 0, most: int = MOST) -> Check:
    """Check for a list of such integers, of any length, without a call for each."""

    def check(value: object, path: str) -> None:
        if not isinstance(value, (list, tuple)):
            raise Fault(path, _shown(value), "a list of integers")
        if not set(map(type, value)) <= {int} or (value and not least <= min(value) <= max(value) <= most):
            one = integer(least, most)
            for index, item in enumerate(value):
                one(item, f"{path}[{index}]")

    return check


def text(value: object, path: str) -> None:
    """Check for text."""
    if not isinstance(value, str):
        raise Fault(path, _shown(value), "text")


def flag(value: object, path: str) -> None:
    """Check for true or false."""
    if not isinstance(value, bool):
        raise Fault(path, _shown(value), "true or false")


def anything(value: object, path: str) -> None:
    """Accept everything, for what is only ever compared with something known."""


def one_of(*accepted: str) -> Check:
    """Check for one of these texts."""

    def check(value: object, path: str) -> None:
        if not isinstance(value, str) or value not in accepted:
            raise Fault(path, _shown(value), " or ".join(map(repr, accepted)))

    return check


def nullable(check: Check) -> Check:
    """Check for what ``check`` accepts, or null."""
    return lambda value, path: None if value is None else check(value, path)


def list_of(check: Check) -> Check:
    """Check for a list of what ``check`` accepts."""

    def check_all(value: object, path: str) -> None:
        if not isinstance(value, (list, tuple)):
            raise Fault(path, _shown(value), "a list")
        for index, item in enumerate(value):
            check(item, f"{path}[{index}]")

    return check_all


def row(*checks: Check) -> Check:
    """Check for a list of exactly these items."""

    def check_all(value: object, path: str) -> None:
        if not isinstance(value, (list, tuple)) or len(value) != len(checks):
            raise Fault(path, _shown(value), f"a list of {len(checks)}")
        for index, (item, check) in enumerate(zip(value, checks, strict=True)):
            check(item, f"{path}[{index}]")

    return check_all


def record(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Check for an object with exactly these keys; the ``optional`` ones may be missing."""
    known = {**required, **(optional or {})}

    def check_all(value: object, path: str) -> None:
        if not isinstance(value, Mapping):
            raise Fault(path, _shown(value), "an object")
        for name in required:
            if name not in value:
                raise Fault(f"{path}.{name}", "missing", "a value")
        for name, item in value.items():
            if name not in known:
                raise Fault(f"{path}.{name!s:.40}", "not known", f"one of {', '.join(known)}")
            known[name](item, f"{path}.{name}")

    return check_all
