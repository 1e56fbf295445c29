"""Declarations of sampling fields: their values, effects and interfaces.

``SamplingParams`` declares each field once, with ``declared``. The checks of values, the fields of
HTTP requests, the options of commands and a model's own defaults follow from that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Flag, auto
from numbers import Integral, Real
from typing import Any, TypeVar

from quire.base.config import check_int
from quire.base.errors import InvalidArgument
from quire.base.signatures import require_bool, require_text

MAX_STOP_STRINGS = 256
"""Limit on the number of stop strings. All of them are searched for after every token."""

T = TypeVar("T")


class Surface(Flag):
    """Interfaces that a field can be given through, besides Python."""

    COMMAND = auto()
    COMPLETIONS = auto()
    CHATS = auto()
    SESSIONS = auto()
    GENERATION_CONFIG = auto()
    EXECUTORS = auto()
    """``sample_tokens``, where the caller gives the number of drawn tokens."""
    HTTP = COMPLETIONS | CHATS | SESSIONS


@dataclass(frozen=True, slots=True)
class Kind:
    """The values that a field takes, besides None."""

    check: Callable[[str, Any], Any]
    """Return the checked value of a field, from its name and the given value, or raise
    ``InvalidArgument``."""
    json: Any = None
    """The value's type in JSON."""
    option: Any = None
    """The value's type on the command line, if it is not ``json``."""
    bounds: Mapping[str, float] | None = None
    """The value's range in words of JSON schemas, for descriptions."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """The facts about one field for the interfaces."""

    kind: Kind
    help: str = ""
    on: Surface = Surface.HTTP
    """The interfaces that have the field, besides Python."""
    names: Mapping[Surface, str] | None = None
    """Names on surfaces that call the field differently."""
    alias: str | None = None
    """A second name in HTTP requests."""

    def names_on(self, surface: Surface, name: str) -> list[str]:
        """Return the names of the field ``name`` on a surface; none if the surface lacks it."""
        if surface not in self.on:
            return []
        aliases = [self.alias] if self.alias is not None and surface in Surface.HTTP else []
        return [(self.names or {}).get(surface, name), *aliases]


def declared(
    default: T,
    kind: Kind,
    help: str = "",
    *,
    on: Surface = Surface.HTTP,
    names: Mapping[Surface, str] | None = None,
    alias: str | None = None,
    hash: bool | None = None,
) -> T:
    """Return a dataclass field with its declaration, typed as its default."""
    return field(default=default, hash=hash, metadata={"declaration": Declaration(kind, help, on, names, alias)})


def declarations_on(params: type[Any], surface: Surface) -> dict[str, tuple[str, Declaration]]:
    """Return the fields on one surface: their names there to their own names and declarations."""
    fields = [(one.name, one.metadata["declaration"]) for one in dataclasses.fields(params)]
    return {name: (own, found) for own, found in fields for name in found.names_on(surface, own)}


def check_fields(params: Any) -> None:
    """Replace the fields of a new object by their checked values. A field takes None if its
    annotation ends with it."""
    for one in dataclasses.fields(params):
        value = getattr(params, one.name)
        if value is not None or not str(one.type).endswith("None"):
            check = one.metadata["declaration"].kind.check
            object.__setattr__(params, one.name, check(one.name, value))


# -- kinds -----------------------------------------------------------------------------------------


def integer(low: int, high: int | None = None) -> Kind:
    """Return the kind of the integers in ``[low, high]``."""
    bounds = {"minimum": low} | ({} if high is None else {"maximum": high})
    return Kind(lambda name, value: _integer(name, value, low, high), int, bounds=bounds)


def number(low: float, high: float = math.inf, *, open_low: bool = False) -> Kind:
    """Return the kind of finite numbers in ``[low, high]``; ``open_low``: in ``(low, high]``."""
    bounds = {"exclusiveMinimum" if open_low else "minimum": low} | ({} if high == math.inf else {"maximum": high})
    return Kind(lambda name, value: _number(name, value, low, high, open_low=open_low), float, bounds=bounds)


def is_collection(value: object) -> bool:
    """Return True if a value is a collection of items, and no text or mapping."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes | bytearray | Mapping)


def _integer(name: str, value: object, low: int, high: int | None = None) -> int:
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value
    return check_int(name, number, low, high)


def _seed(name: str, value: object) -> int | None:
    found = _integer(name, value, *_SEEDS)
    return None if found == -1 else found


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an int that no float holds
            number = math.inf
    # A NaN fails every comparison, so it is refused here too.
    if not (math.isfinite(number) and (low < number if open_low else low <= number) and number <= high):
        if high == math.inf:
            allowed = f"a finite number {'>' if open_low else '>='} {low:g}"
        else:
            allowed = f"a number in {'(' if open_low else '['}{low:g}, {high:g}]"
        raise InvalidArgument(field=name, given=value, allowed=allowed)
    return number


def _strings(name: str, value: Any) -> str | tuple[str, ...]:
    items: tuple[Any, ...] = (value,) if isinstance(value, str) else tuple(value) if is_collection(value) else (None,)
    if not all(isinstance(item, str) and item for item in items):
        raise InvalidArgument(field=name, given=value, allowed="a non-empty string or a list of non-empty strings")
    if len(items) > MAX_STOP_STRINGS:
        raise InvalidArgument(f"{name} must hold at most {MAX_STOP_STRINGS} strings, got {len(items)}", field=name)
    for index, item in enumerate(items):
        require_text(name if isinstance(value, str) else f"{name}.{index}", item)
    return value if isinstance(value, str) else items


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not is_collection(value):
        raise InvalidArgument(field=name, given=value, allowed="a list of token ids")
    return tuple(_integer(f"{name}.{number}", item, 0) for number, item in enumerate(value))


def _some_ids(name: str, value: Any) -> tuple[int, ...]:
    if not is_collection(value) or not value:
        raise InvalidArgument(field=name, given=value, allowed="a list of at least one token id")
    return tuple(dict.fromkeys(_token_ids(name, value)))


def _bias(name: str, value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidArgument(field=name, given=value, allowed="a mapping of token ids to numbers in [-100, 100]")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # No vocabulary has longer ids, and Python refuses to read numbers of thousands of digits.
        is_decimal = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 20
        token = int(key) if is_decimal else key
        if not isinstance(token, Integral) or isinstance(token, bool) or token < 0:
            raise InvalidArgument(f"each key of {name} must be an integer >= 0, got {key!r}", field=name)
        if token in biases:
            raise InvalidArgument(f"{name} names token {token} twice; each token may be named once", field=name)
        biases[int(token)] = _number(f"{name}.{token}", bias, -100.0, 100.0)
    return biases


_SEEDS = (-(2**63), 2**64 - 1)
SEED = Kind(_seed, int, bounds={"minimum": _SEEDS[0], "maximum": _SEEDS[1]})
"""-1 is None, as in clients of vLLM and llama.cpp."""
SWITCH = Kind(require_bool, bool)
STRINGS = Kind(_strings, str | list[str], list[str])
TOKEN_IDS = Kind(_token_ids, list[int])
SOME_IDS = Kind(_some_ids, list[int])
BIAS = Kind(_bias, dict[str, float])
