"""Registries by name: of objects that code registers, and of the modules in a package."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any, Generic, TypeVar

from quire.base.errors import AlreadyExists, InvalidArgument, NotFound, QuireError

T = TypeVar("T")


class Registry(Generic[T]):
    """A mapping that refuses duplicates, returns what it registers and lists what it knows."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str, item: T) -> T:
        """Keep and return ``item``; ``InvalidArgument`` if unnamed, ``AlreadyExists`` if taken."""
        if not name:
            raise InvalidArgument(f"{self.kind} name must not be empty")
        if name in self._items:
            raise AlreadyExists(f"{self.kind} {name!r} is registered already; choose another name or remove it first")
        self._items[name] = item
        return item

    def get(self, name: str) -> T | None:
        """Return the item, or None for an unknown name."""
        return self._items.get(name)

    def require(self, name: str) -> T:
        """Return the item; raise ``NotFound`` with the known names."""
        try:
            return self._items[name]
        except KeyError:
            raise NotFound(f"{self.kind} {name!r} not found. Available: {self.list_names()}") from None

    def remove(self, name: str) -> T | None:
        """Remove and return the item without shutting it down; None if unknown."""
        return self._items.pop(name, None)

    def list_names(self) -> list[str]:
        return sorted(self._items)

    def __iter__(self) -> Iterator[str]:
        return iter(self.list_names())

    def __contains__(self, name: object) -> bool:
        return name in self._items


def modules_in(package: str) -> dict[str, str]:
    """Return the modules of a package by their names in it, ascending. Imports none of them."""
    found = find_spec(package)
    paths = None if found is None else found.submodule_search_locations
    return {one.name: f"{package}.{one.name}" for one in iter_modules(paths)}


def class_in(module: str, base: type) -> Any:
    """Import a module and return the heir of ``base`` that it defines; ``QuireError`` unless it
    defines one."""
    defined = [one for one in vars(import_module(module)).values() if isinstance(one, type)]
    found = [one for one in defined if base in one.__mro__[1:] and one.__module__ == module]
    if len(found) != 1:
        raise QuireError(f"{module} defines {len(found)} heirs of {base.__name__}; it needs one")
    return found[0]
