"""Locks of slots in use."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary


class SlotLocks:
    """A lock for each slot of each API key: requests for one slot wait for each other, as in
    llama-server."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[tuple[str, int], asyncio.Lock] = WeakValueDictionary()

    def of(self, owner: str, number: int) -> asyncio.Lock:
        """Return the lock of a slot, for as long as it is referred to."""
        return self._locks.setdefault((owner, number), asyncio.Lock())
