"""What a tier must do, said as plainly as possible, and the keys that tests use."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from quire.contracts.store import ObjectKey, ObjectKind
from quire.store.keys import record_key


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=20).digest()


def rows(path: str) -> ObjectKey:
    """The rows at the end of a path of letters, one for each chunk."""
    return ObjectKey(digest(path[:-1]), ObjectKind.ROWS, 256, digest(path))


def stop(path: str) -> ObjectKey:
    return ObjectKey(digest(path[:-1]), ObjectKind.STOP, 256, digest(path))


PATHS = ("a", "ab", "abc", "abcd", "abd", "ac", "acd", "b", "bc")
CHUNKS = tuple(ObjectKey(digest("chunks"), ObjectKind.CHUNK, 40, digest(name)) for name in ("chunk 1", "chunk 2"))
RECORDS = (record_key("commit", "x"), record_key("commit", "y"))
KEYS = (*map(rows, PATHS), *map(stop, ("a", "ab", "b")), *CHUNKS, *RECORDS)
PARENTS = tuple(dict.fromkeys(key.parent for key in KEYS))


def shown(key: ObjectKey) -> str:
    """A key for messages."""
    names = {digest(path): path for path in ("", *PATHS)}
    return f"{names.get(key.parent, '?')}/{key.kind}/{names.get(key.digest, '?')}"


@dataclass
class Held:
    blob: bytes
    use: int
    pinned: bool = False


class Oracle:
    """A dict of objects. A use is one of all that the object stands under, at once; what nothing
    stands under and was used longest ago is given up first.
    """

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.held: dict[ObjectKey, Held] = {}
        self.uses = 0

    def get(self, keys: Iterable[ObjectKey]) -> list[bytes | None]:
        found = []
        for key in keys:
            if key in self.held:
                self._use(key)
            found.append(self.held[key].blob if key in self.held else None)
        return found

    def put(self, key: ObjectKey, blob: bytes) -> bool:
        if key in self.held and key.kind is not ObjectKind.RECORD:
            self._use(key)
            return True
        after = dict(self.held)
        after[key] = Held(blob, 0, key in self.held and self.held[key].pinned)
        while self.capacity is not None and sum(len(one.blob) for one in after.values()) > self.capacity:
            parents = {one.parent for one in after}
            may_go = [
                one for one, held in after.items() if not held.pinned and one.digest not in parents and one != key
            ]
            if not may_go:
                return False
            del after[min(may_go, key=lambda one: (after[one].use, one.name))]
        self.held = after
        self._use(key)
        return True

    def remove(self, keys: Iterable[ObjectKey]) -> int:
        return sum(self.held.pop(key, None) is not None for key in set(keys))

    def pin(self, keys: Iterable[ObjectKey], pinned: bool) -> None:
        for key in keys:
            if key in self.held:
                self.held[key].pinned = pinned

    def children(self, parent: bytes) -> set[ObjectKey]:
        return {key for key in self.held if key.parent == parent}

    def _use(self, key: ObjectKey) -> None:
        self.uses += 1
        above = [key]
        for one in above:
            self.held[one].use = self.uses
            above += [other for other in self.held if other.digest == one.parent and other not in above]
