"""Which chunks the tiers have: lists of keys that are asked for in the background."""

from __future__ import annotations

from quire.blend.chunk_matching import KnownChunks
from quire.contracts.store import Blob, ObjectKey
from quire.store.stack import Store


class ChunkCatalog:
    """The chunks of a store, for any number of key spaces. One for each engine; any thread."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def ask(self, parent: bytes) -> None:
        """Have the chunks under a parent listed, unless they were within the last second."""
        raise NotImplementedError

    def known(self, parent: bytes) -> KnownChunks:
        """Return what is known to be under a parent, and ask again in the background. The first
        time it waits for the answer, ``LOOK_SECONDS`` at most, unless ``ask`` was earlier."""
        raise NotImplementedError

    def has(self, key: ObjectKey) -> bool:
        """Return whether a chunk is there, as far as is known."""
        raise NotImplementedError

    def put(self, key: ObjectKey, blob: Blob, *, private: bool) -> bool:
        """Keep a chunk: in memory at once, and unless it is private in durable tiers, which a
        thread writes. Return False if no tier takes it."""
        raise NotImplementedError

    def drop(self, key: ObjectKey) -> None:
        """Forget a chunk that did not come."""
        raise NotImplementedError

    def close(self) -> None:
        """End the threads. The store stays open."""
        raise NotImplementedError
