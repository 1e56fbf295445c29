r"""Bounds on the work of matching regular expressions from files, computed before any match.

Python's matcher tries the ways to match one after the other, and blocks all other threads. A few
characters can cause endless work: ``((\w|\.)+)+!``. So the ways are counted in the parsed
expression, and an expression with too many is refused.

The count is a polynomial: coefficient ``k`` counts ways with ``k`` repeats of open length, which
share a name of ``n`` characters in at most ``C(n + k, k)`` ways.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any, TypeAlias

MAX_LENGTH = 2000
"""Most characters of an expression."""
NAME_LENGTH = 64
"""Length of a module's name for the bound; models' names are about as long."""
MAX_WAYS = 2_000_000
"""Limit for all expressions of a file: some hundredths of a second per module if all ways fail
late. Four open repeats in a row have 814,385."""
FEW = 8
"""Number of possible lengths from which a repeat counts as open."""

Ways: TypeAlias = tuple[int, ...]

try:
    _parser: Any = import_module("re._parser")
except ImportError:  # in the standard library, but private
    _parser = None


def ways_of(pattern: str) -> int:
    """Return an upper bound of the ways to match a name. ``ValueError``: it repeats something empty
    or ambiguous; ``re.error``, ``OverflowError``, ``RecursionError``: it is not a valid expression.
    """
    if len(pattern) > MAX_LENGTH:
        raise ValueError(f"it has {len(pattern)} characters; at most {MAX_LENGTH} are read")
    re.compile(pattern)
    if _parser is None:
        if not re.fullmatch(r"[\w.$^()-]*", pattern.replace(r"\.", ".").replace("(.*.)?", "")):
            raise ValueError("this Python has no re._parser, so only plain names are read")
        return NAME_LENGTH
    ways, asserted = _sequence(_parser.parse(pattern))
    return _count(ways) + _count(asserted)


def _count(ways: Ways) -> int:
    return sum(count * math.comb(NAME_LENGTH + opened, opened) for opened, count in enumerate(ways))


def _add(one: Ways, other: Ways) -> Ways:
    size = max(len(one), len(other))
    return tuple(a + b for a, b in zip(_padded(one, size), _padded(other, size), strict=True))


def _padded(ways: Ways, size: int) -> Ways:
    return ways + (0,) * (size - len(ways))


def _product(one: Ways, other: Ways) -> Ways:
    found = [0] * (len(one) + len(other) - 1)
    for i, a in enumerate(one):
        for k, b in enumerate(other):
            found[i + k] += a * b
    while len(found) > 1 and not found[-1]:
        found.pop()
    # Larger counts are refused alike.
    return tuple(min(count, MAX_WAYS + 1) for count in found[: NAME_LENGTH + 1])


ONE: Ways = (1,)
NONE: Ways = (0,)
OPEN: Ways = (0, 1)


def _sequence(items: Sequence[Any]) -> tuple[Ways, Ways]:
    """Count the ways of consecutive items, and the ways that are tried inside assertions."""
    ways, asserted = ONE, NONE
    for item in items:
        more, inside = _item(item)
        asserted = _add(asserted, _product(ways, inside))
        ways = _product(ways, more)
    return ways, asserted


def _item(item: Any) -> tuple[Ways, Ways]:
    kind, given = str(item[0]), item[1]
    if kind == "SUBPATTERN":
        return _sequence(given[-1])
    if kind == "ATOMIC_GROUP":
        return _sequence(given)
    if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        return _repeat(*given)
    if kind == "BRANCH":
        return _branch(given[1])
    if kind == "GROUPREF_EXISTS":
        return _branch([one for one in given[1:] if one is not None])
    if kind in ("ASSERT", "ASSERT_NOT"):
        # Matching does not backtrack into an assertion, so the assertion counts as one way.
        ways, asserted = _sequence(given[1])
        return ONE, _add(ways, asserted)
    return ONE, NONE


def _repeat(least: int, most: int, item: Any) -> tuple[Ways, Ways]:
    least, most = int(least), int(most)
    ways, asserted = _sequence(item)
    if most <= 1:
        return (ways if least else _add(ONE, ways)), asserted
    if item.getwidth()[0] == 0:
        raise ValueError("it repeats what may be empty")
    if ways == ONE:
        found = OPEN if most - least >= FEW else (most - least + 1,)
        return found, _product(OPEN, asserted)
    if most > FEW:
        raise ValueError("it repeats what already matches in several ways, as a repeat within a repeat does")
    found, power = NONE, ONE
    for count in range(most + 1):
        found = _add(found, power) if count >= least else found
        power = _product(power, ways)
    return found, _product((sum(found),), _product(power, asserted))


def _branch(alternatives: Sequence[Any]) -> tuple[Ways, Ways]:
    """Count the ways of alternatives. Several can match at one place only if their literal heads
    are prefixes of each other."""
    heads = [_head(one) for one in alternatives]
    both = [_sequence(one) for one in alternatives]
    asserted = NONE
    for _, inside in both:
        asserted = _add(asserted, inside)
    together: Ways = NONE
    for longest in heads:
        ways: Ways = NONE
        for head, (mine, _) in zip(heads, both, strict=True):
            if longest.startswith(head):
                ways = _add(ways, mine)
        size = max(len(together), len(ways))
        together = tuple(max(a, b) for a, b in zip(_padded(together, size), _padded(ways, size), strict=True))
    return together, asserted


def _head(items: Sequence[Any]) -> str:
    """Return the literal characters at the beginning, in lower case."""
    found = ""
    for kind, given in items:
        if str(kind) != "LITERAL" or given > 127:  # ignoring case, others may be equal to it
            break
        found += chr(given).lower()
    return found
