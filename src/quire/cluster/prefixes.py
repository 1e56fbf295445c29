"""``PrefixMap``: which replicas have computed the beginning of a prompt.

A prompt is a text of blocks. The digest of a block covers all blocks before it, so equal digests
are equal beginnings. The map says what was sent to a replica, not what is still in its cache: the
least recently used blocks are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set

import xxhash

BLOCK = 256
"""Characters of a block."""


def digests(salt: str, text: str) -> list[int]:
    """Return the digest of each full block of a text. ``salt``: prompts of other salts differ."""
    found, last = list[int](), xxhash.xxh3_64_intdigest(salt.encode())
    for start in range(0, len(text) - BLOCK + 1, BLOCK):
        block = text[start : start + BLOCK].encode(errors="surrogatepass")
        last = xxhash.xxh3_64_intdigest(block, seed=last)
        found.append(last)
    return found


class PrefixMap:
    """The replicas that each beginning of a prompt was sent to. Used by one thread."""

    def __init__(self, limit: int = 1 << 20) -> None:
        """``limit``: blocks at most."""
        self._limit = limit
        self._replicas: OrderedDict[int, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def longest(self, blocks: Sequence[int]) -> Iterator[tuple[int, Set[str]]]:
        """Yield numbers of leading blocks, largest first, and the replicas that know so many."""
        for count in range(len(blocks), 0, -1):
            if here := self._replicas.get(blocks[count - 1]):
                yield count, here

    def add(self, blocks: Sequence[int], replica: str) -> None:
        """Record blocks that a replica gets."""
        for block in reversed(blocks):  # so that the end of a prompt is forgotten before its beginning
            self._replicas.setdefault(block, set()).add(replica)
            self._replicas.move_to_end(block)
        while len(self._replicas) > self._limit:
            self._replicas.popitem(last=False)

    def remove(self, replica: str) -> None:
        for block in [block for block, replicas in self._replicas.items() if replica in replicas]:
            self._replicas[block].discard(replica)
            if not self._replicas[block]:
                del self._replicas[block]
