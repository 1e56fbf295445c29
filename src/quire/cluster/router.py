"""``Router``: which replica takes a request.

A session's calls go where the session is. A prompt goes to the replica that knows the longest
beginning of it, unless that one has ``slack`` more requests under way than the least loaded one.
Anything else goes to the least loaded one.

A prompt is a text of blocks. The digest of a block covers all blocks before it, so equal digests
are equal beginnings. ``PrefixMap`` says what was sent to a replica, not what is still in its cache:
the least recently used blocks are forgotten.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import xxhash

Reason = Literal["session", "prefix", "load", "overload"]
MOST_SESSIONS = 1 << 18
"""Sessions whose replicas are remembered. A front looks for others again."""

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


@dataclass(frozen=True, slots=True)
class Choice:
    """The replica of a request."""

    replica: str
    reason: Reason
    """"overload": another one knows a beginning of the prompt, and has too much to do."""
    blocks: int = 0
    """Blocks of the prompt that the replica knows."""


class Router:
    """Load, prefixes and sessions of the replicas. Used by one thread."""

    def __init__(self, slack: int = 4) -> None:
        """``slack``: requests that a replica may have under way beyond the least loaded one and
        still get a prompt of which it knows more."""
        self.slack = slack
        self.prefixes = PrefixMap()
        self.load: dict[str, int] = {}
        """Requests under way of each replica."""
        self.sessions: dict[str, str] = {}
        """The replicas of sessions and stored responses, by their ids; some have ended."""
        self.calls: Counter[str] = Counter()
        """Requests under way about each session."""
        self.names: tuple[str, ...] = ()
        self._turn = 0

    def update(self, names: Sequence[str]) -> None:
        """Take the replicas that there are now. Load and prefixes of others are forgotten."""
        for gone in set(self.names) - set(names):
            self.prefixes.remove(gone)
        self.names = tuple(names)
        self.load = {name: self.load.get(name, 0) for name in names}

    def choose(self, blocks: Sequence[int] = (), without: Collection[str] = ()) -> Choice | None:
        """Return the replica for a prompt of these blocks, None if there is none. ``without``:
        replicas that did not answer."""
        reason: Reason = "load"
        for count, replicas in self.prefixes.longest(blocks):
            if found := [name for name in replicas if name in self.load and name not in without]:
                best = min(found, key=self.load.__getitem__)
                if not self.is_overloaded(best):
                    return Choice(best, "prefix", count)
                reason = "overload"
                break
        least = self.least(without)
        return None if least is None else Choice(least, reason)

    def least(self, without: Collection[str] = ()) -> str | None:
        """Return a least loaded replica, equal ones in turns."""
        left = {name: load for name, load in self.load.items() if name not in without} if without else self.load
        if not left:
            return None
        low = min(left.values())
        equal = [name for name, load in left.items() if load == low]
        self._turn += 1
        return equal[self._turn % len(equal)]

    def is_overloaded(self, name: str) -> bool:
        """Return whether a replica has ``slack`` more requests under way than the least loaded."""
        return self.load[name] > min(self.load.values()) + self.slack

    def place(self, session: str, replica: str) -> None:
        self.sessions.pop(session, None)
        self.sessions[session] = replica
        if len(self.sessions) > MOST_SESSIONS:
            del self.sessions[next(iter(self.sessions))]

    @contextmanager
    def under_way(self, replica: str, blocks: Sequence[int] = (), sessions: Sequence[str] = ()) -> Iterator[None]:
        """Count a request to a replica, and about ``sessions``, while it is under way."""
        self.prefixes.add(blocks, replica)
        self.load[replica] = self.load.get(replica, 0) + 1
        self.calls.update(sessions)
        try:
            yield
        finally:
            self.calls -= Counter(sessions)
            if self.load.get(replica):  # else the replica has left meanwhile
                self.load[replica] -= 1
