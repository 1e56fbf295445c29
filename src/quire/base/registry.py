"""Registries by name: models, attention backends, executors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from quire.base.errors import AlreadyExists, InvalidArgument, NotFound

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
