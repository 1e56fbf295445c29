"""``Router``: which replica takes a request.

A session's calls go where the session is. A prompt goes to the replica that knows the longest
beginning of it, unless that one has ``slack`` more requests under way than the least loaded one.
Anything else goes to the least loaded one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from quire.cluster.prefixes import PrefixMap

Reason = Literal["session", "prefix", "load", "overload"]


@dataclass(frozen=True, slots=True)
class Choice:
    """The replica of a request."""

    replica: str
    reason: Reason
    """"overload": another one knows more of the prompt, and has too much to do."""
    blocks: int = 0
    """Blocks of the prompt that the replica knows."""


class Router:
    """Load, prefixes and sessions of the replicas. Used by one thread."""

    def __init__(self, slack: int = 4) -> None:
        """``slack``: requests that a replica may have under way beyond the least loaded one and
        still get a prompt of which it knows more."""
        self.slack = slack
        self.prefixes = PrefixMap()
        self.load: Counter[str] = Counter()
        """Requests under way of each replica."""
        self.sessions: dict[str, str] = {}
        """The replicas of sessions and stored responses, by their ids; some have ended."""
        self.names: tuple[str, ...] = ()
        self._turn = 0

    def update(self, names: Sequence[str]) -> None:
        """Take the replicas that there are now. Load and prefixes of others are forgotten."""
        for gone in set(self.names) - set(names):
            self.prefixes.remove(gone)
            self.load.pop(gone, None)
        self.names = tuple(names)

    def choose(self, blocks: Sequence[int] = (), without: Collection[str] = ()) -> Choice | None:
        """Return the replica for a prompt of these blocks, None if there is none. ``without``:
        replicas that did not answer."""
        order = self.by_load(without)
        if not order:
            return None
        known = self.prefixes.longest(blocks)
        best = max(order, key=lambda name: known.get(name, 0))  # of equal ones the least loaded
        if not known.get(best):
            return Choice(order[0], "load")
        if self.is_overloaded(best):
            return Choice(order[0], "overload", known.get(order[0], 0))
        return Choice(best, "prefix", known[best])

    def is_overloaded(self, name: str) -> bool:
        """Return whether a replica has ``slack`` more requests under way than the least loaded."""
        return self.load[name] > min(self.load[one] for one in self.names) + self.slack

    def by_load(self, without: Collection[str] = ()) -> list[str]:
        """Return the replicas, the least loaded first, equal ones in turns."""
        self._turn += 1
        names = [name for name in self.names if name not in without]
        start = self._turn % len(names) if names else 0
        return sorted(names[start:] + names[:start], key=lambda name: self.load[name])

    @contextmanager
    def under_way(self, replica: str, blocks: Sequence[int] = ()) -> Iterator[None]:
        """Count a request to a replica while it is under way."""
        self.prefixes.add(blocks, replica)
        self.load[replica] += 1
        try:
            yield
        finally:
            if self.load[replica] > 0:  # 0: the replica has left meanwhile
                self.load[replica] -= 1
