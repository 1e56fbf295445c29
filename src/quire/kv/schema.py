"""Declarations of what a JSON value must be, for what strangers wrote.

A check is a function of a value and its path; it raises ``Fault``, which names the path, the value and what is expected there,
or returns nothing. Checks are made of each other, so that one declaration says all that a document may hold.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import TypeAlias

Check: TypeAlias = Callable[[object, str], None]

MOST = 2**53
"""The largest count or position that a document may name. Every reader of JSON has it exactly, and sums of it fit an int64."""


class Fault(ValueError):
    """A part of a document that is not as declared."""

    def __init__(self, path: str, found: str, expected: str) -> None:
        super().__init__(f"{path} is {found}; {expected} is expected")


def _shown(value: object) -> str:
    # The text of a whole value would be made first and cut then; reprlib looks at the beginning of it only.
    return reprlib.repr(value)


def integer(least: int = 0, most: int = MOST) -> Check:
    """An integer in [least, most]; no bool and no float."""

    def check(value: object, path: str) -> None:
        if type(value) is not int or not least <= value <= most:
            raise Fault(path, _shown(value), f"an integer in [{least}, {most}]")

    return check


def integers(least: int = 0, most: int = MOST) -> Check:
    """A list of such integers, of any length; looked at without a call for each."""

    def check(value: object, path: str) -> None:
        if not isinstance(value, (list, tuple)):
            raise Fault(path, _shown(value), "a list of integers")
        if not set(map(type, value)) <= {int} or (value and not least <= min(value) <= max(value) <= most):
            one = integer(least, most)
            for index, item in enumerate(value):
                one(item, f"{path}[{index}]")

    return check


def text(value: object, path: str) -> None:
    """A check for text."""
    if not isinstance(value, str):
        raise Fault(path, _shown(value), "text")


def flag(value: object, path: str) -> None:
    """A check for true or false."""
    if not isinstance(value, bool):
        raise Fault(path, _shown(value), "true or false")


def anything(value: object, path: str) -> None:
    """A check that nothing fails, for what is only ever compared with something known."""


def one_of(*accepted: str) -> Check:
    """One of these texts."""

    def check(value: object, path: str) -> None:
        if not isinstance(value, str) or value not in accepted:
            raise Fault(path, _shown(value), " or ".join(map(repr, accepted)))

    return check


def nullable(check: Check) -> Check:
    """What ``check`` accepts, or null."""
    return lambda value, path: None if value is None else check(value, path)


def list_of(check: Check) -> Check:
    """A list of what ``check`` accepts."""

    def check_all(value: object, path: str) -> None:
        if not isinstance(value, (list, tuple)):
            raise Fault(path, _shown(value), "a list")
        for index, item in enumerate(value):
            check(item, f"{path}[{index}]")

    return check_all


def row(*checks: Check) -> Check:
    """A list of exactly these items."""

    def check_all(value: object, path: str) -> None:
        if not isinstance(value, (list, tuple)) or len(value) != len(checks):
            raise Fault(path, _shown(value), f"a list of {len(checks)}")
        for index, (item, check) in enumerate(zip(value, checks, strict=True)):
            check(item, f"{path}[{index}]")

    return check_all


def record(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """An object with exactly these keys; the ``optional`` ones may be missing."""
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
