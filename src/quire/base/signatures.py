"""Checks of arguments against annotations, for whole classes: ``@checks_arguments()``.

The annotations are the declaration: no verb has its own code for argument types. Each verb still
checks what an annotation cannot express (a range, a shape, a dtype).
"""

from __future__ import annotations

import collections.abc
import difflib
import inspect
import numbers
import operator
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any, BinaryIO, Literal, TypeAlias, TypeVar, Union

from quire.base.errors import InvalidArgument

T = TypeVar("T")

MAX_NESTING = 64
"""Most levels of lists and mappings in JSON data: a request's body, a message, the arguments of a
call."""

Check: TypeAlias = Callable[[Any], Any]
"""Returns the converted value, or raises ``_Mismatch`` with a description of the wrong value."""

_WORDS = {int: "an integer", float: "a number", bool: "True or False", str: "a string", types.NoneType: "None"}


class _Mismatch(Exception):
    """The description of a value of the wrong type."""


def checks_arguments(*, but: Collection[str] = (), only: Collection[str] | None = None) -> Callable[[type[T]], type[T]]:
    """Make a class's public methods and ``__init__`` refuse arguments of wrong types.

    ``InvalidArgument`` names the verb, the argument, its type and the given value. An integer may
    be anything that ``operator.index`` takes (a NumPy number, a tensor of one) but no bool; the
    body gets a plain ``int``. A sequence of integers may be a 1-D tensor or array. Class methods,
    properties, names with an underscore and those in ``but`` stay unchanged, with ``only`` all but
    those.
    """

    def decorate(cls: type[T]) -> type[T]:
        for name, member in list(vars(cls).items()):
            public = name == "__init__" or not (name.startswith("_") or name in but)
            if isinstance(member, types.FunctionType) and public and (only is None or name in only):
                setattr(cls, name, checked(member, "" if name == "__init__" else name))
        return cls

    return decorate


def checked(function: Callable[..., Any], verb: str) -> Callable[..., Any]:
    """Return a function that checks all arguments but the first, and names ``verb`` if one is
    wrong; empty: the class of the first."""
    order = [one.name for one in inspect.signature(function).parameters.values()][1:]
    if not order:
        return function
    checks: dict[str, Check] = {}
    in_order: list[Check] = []

    @wraps(function)
    def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not checks:
            # At the first call, when all names in the annotations of arguments exist. That of the
            # result may exist for type checkers only.
            annotations = {name: one for name, one in function.__annotations__.items() if name != "return"}
            names = inspect.unwrap(function).__globals__
            hints = typing.get_type_hints(SimpleNamespace(__annotations__=annotations), names)
            checks.update({name: check_of(hint) for name, hint in hints.items()})
            in_order.extend(checks.get(name, ANYTHING) for name in order)
        try:
            given = [check(value) for check, value in zip(in_order, args, strict=False)]
            named = {name: checks.get(name, ANYTHING)(value) for name, value in kwargs.items()}
        except _Mismatch:  # The argument is named by ``_accept``.
            label = verb or type(self).__name__
            given = [_accept(checks, label, name, value) for name, value in zip(order, args, strict=False)]
            named = {name: _accept(checks, label, name, value) for name, value in kwargs.items()}
        return function(self, *given, *args[len(given) :], **named)

    return wrapper


def suggests_keywords(cls: type[T]) -> type[T]:
    """Make ``__init__`` refuse an unknown keyword by a ``TypeError`` with the nearest name, or with
    all names if none is near."""
    function: Callable[..., None] = cls.__init__
    known = list(inspect.signature(function).parameters)[1:]

    @wraps(function)
    def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> None:
        if unknown := [name for name in kwargs if name not in known]:
            near = difflib.get_close_matches(unknown[0], known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise TypeError(f"{cls.__name__} has no keyword {unknown[0]!r}; {hint}")
        function(self, *args, **kwargs)

    cls.__init__ = wrapper  # type: ignore[method-assign, assignment]
    return cls


def _accept(checks: Mapping[str, Check], verb: str, name: str, value: Any) -> Any:
    check = checks.get(name)
    if check is None:
        return value  # Python itself refuses an unknown name
    try:
        return check(value)
    except _Mismatch as found:
        message = f"{verb}: {name} must be {check.__doc__}; got {found}"
        raise InvalidArgument(message, field=name, given=value, allowed=str(check.__doc__)) from None


def require_bool(name: str, value: object) -> bool:
    """Return the value; raise ``InvalidArgument`` unless it is True or False."""
    if not isinstance(value, bool):
        raise InvalidArgument(field=name, given=value, allowed=_WORDS[bool])
    return value


def require_nesting(name: str, value: object) -> None:
    """Raise ``InvalidArgument`` for a value of more than ``MAX_NESTING`` levels, which functions
    that call themselves could not walk."""
    left = [(value, 0)]
    while left:
        one, levels = left.pop()
        if not isinstance(one, Mapping | list | tuple):
            continue
        if levels == MAX_NESTING:
            raise InvalidArgument(f"{name} nests more than {MAX_NESTING} lists and objects in each other", field=name)
        left += [(part, levels + 1) for part in (one.values() if isinstance(one, Mapping) else one)]


def require_text(name: str, value: object) -> bytes:
    """Return a text in UTF-8; raise ``InvalidArgument`` for others and for lone surrogates."""
    if not isinstance(value, str):
        raise InvalidArgument(field=name, given=value, allowed="a str")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        code, where = ord(value[error.start]), f"at index {error.start}"
        if 0xDC80 <= code <= 0xDCFF:  # a surrogate: an undecodable byte of a command line or of stdin
            problem = f"is not UTF-8: byte 0x{code - 0xDC00:02x} {where}, which stands there as U+{code:04X}"
        else:
            problem = f"must be valid Unicode, got a lone surrogate U+{code:04X} {where}"
        raise InvalidArgument(f"{name} {problem}", field=name) from None


def shown(value: object) -> str:
    """Return a value in a few words: tensors and arrays by type and shape."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__} {value.dtype} {list(value.shape)}"
    if isinstance(value, str | int | float | complex | None):
        text = repr(value[:61] if isinstance(value, str) else value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return type(value).__name__


# -- annotations ----------------------------------------------------------------------------


def check_of(hint: Any) -> Check:
    """Return the check of an annotation; its ``__doc__`` describes accepted values."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is None:
        hint = types.NoneType
    if hint is Any or hint is object or isinstance(hint, TypeVar):
        return ANYTHING
    if origin in (Union, types.UnionType):
        return _any_of([check_of(one) for one in arguments])
    if origin is Literal:
        return _test(lambda value: isinstance(value, str) and value in arguments, " or ".join(map(repr, arguments)))
    if hint is int:
        return INTEGER
    if hint is float:
        return _test(lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool), _WORDS[float])
    if origin is tuple and Ellipsis not in arguments:
        return _tuple_of([check_of(one) for one in arguments])
    if origin in (collections.abc.Sequence, list, tuple):
        return _sequence_of(check_of(arguments[0]), tuple if origin is tuple else None)
    if origin in (collections.abc.Iterable, collections.abc.Collection, set, frozenset):
        return _collection_of(check_of(arguments[0]))
    if origin in (collections.abc.Mapping, dict):
        return _mapping_of(check_of(arguments[1]))
    if origin is collections.abc.Callable:
        return _test(callable, "callable")
    if hint is BinaryIO:
        return _test(lambda value: hasattr(value, "read"), "a binary file")
    cls = origin or hint
    if getattr(cls, "_is_protocol", False):
        members = [name for name in dir(cls) if not name.startswith("_")]
        # Looked up on the type, so that no property is computed.
        return _test(lambda value: all(hasattr(type(value), name) for name in members), _class_words(cls))
    return _test(lambda value: isinstance(value, cls), _WORDS.get(cls) or _class_words(cls))


def _class_words(cls: type) -> str:
    return f"{'an' if cls.__name__[0] in 'AEIOU' else 'a'} {cls.__name__}"


def _named(check: Check, words: str) -> Check:
    check.__doc__ = words
    return check


ANYTHING = _named(lambda value: value, "anything")


def _test(accepts: Callable[[Any], bool], words: str) -> Check:
    def check(value: Any) -> Any:
        if not accepts(value):
            raise _Mismatch(shown(value))
        return value

    return _named(check, words)


def _index(value: Any) -> int:
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise _Mismatch(shown(value)) from None


INTEGER = _named(_index, _WORDS[int])


def _any_of(checks: Sequence[Check]) -> Check:
    none = any(one.__doc__ == _WORDS[types.NoneType] for one in checks)

    def check(value: Any) -> Any:
        if value is None and none:
            return None
        found = []
        for one in checks:
            try:
                return one(value)
            except _Mismatch as error:
                found.append(str(error))
        # Report the longest message: that of a list names the wrong item.
        raise _Mismatch(max(found, key=len))

    return _named(check, " or ".join(str(one.__doc__) for one in checks))


def _items(check: Check, value: Collection[Any]) -> list[Any] | None:
    """Return the items as ``check`` converts them; None if all are unchanged."""
    if check is INTEGER and {*map(type, value)} <= {int}:
        return None  # the fast path: each forward has such lists, of its sequences
    found, same = [], True
    for index, item in enumerate(value):
        try:
            found.append(check(item))
        except _Mismatch as error:
            raise _Mismatch(f"{type(value).__name__} with {error} at index {index}") from None
        same = same and found[-1] is item
    return None if same else found


def _sequence_of(item: Check, kind: type | None) -> Check:
    def check(value: Any) -> Any:
        if type(value) not in (list, tuple):  # as nearly all are
            if getattr(value, "ndim", None) == 1 and hasattr(value, "tolist") and item.__doc__ == _WORDS[int]:
                listed = value.tolist()
                if all(type(one) is int for one in listed):
                    return listed if kind is None else kind(listed)
            if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
                raise _Mismatch(shown(value))
        found = _items(item, value)
        if kind is not None and not isinstance(value, kind):
            return kind(value if found is None else found)
        return value if found is None else found if kind is None else kind(found)

    return _named(check, f"a sequence, each item {item.__doc__}")


def _tuple_of(items: Sequence[Check]) -> Check:
    def check(value: Any) -> Any:
        if not isinstance(value, tuple | list) or len(value) != len(items):
            raise _Mismatch(shown(value))
        found = tuple(one(part) for one, part in zip(items, value, strict=True))
        return value if all(new is old for new, old in zip(found, value, strict=True)) else found

    words = " or ".join(dict.fromkeys(str(one.__doc__) for one in items))
    return _named(check, f"a tuple of {len(items)}, each item {words}")


def _collection_of(item: Check) -> Check:
    def check(value: Any) -> Any:
        if isinstance(value, str | bytes | bytearray) or not isinstance(value, Iterable):
            raise _Mismatch(shown(value))
        found = _items(item, value) if isinstance(value, Collection) else None  # iteration would consume an iterator
        return value if found is None else found

    return _named(check, f"a collection, each item {item.__doc__}")


def _mapping_of(item: Check) -> Check:
    def check(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _Mismatch(shown(value))
        _items(item, list(value.values()))
        return value

    return _named(check, f"a mapping, each value {item.__doc__}")
