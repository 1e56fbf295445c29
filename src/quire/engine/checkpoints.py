"""Recurrent states that are kept: at an interval and where prompts branch. No torch.

A recurrent layer keeps a state of fixed size, so a sequence can be forked and rewound only to
positions at which a state was kept. Ends of prompts and turns are kept as forks
(``SessionBranches.share``). Within long prompts and texts, states are kept here: every ``interval``
tokens, and where two prompts turned out to part. No chunk is cut for that: a step names the
positions (``Chunk.checkpoints``), and the state keeps what it passes.

A checkpoint is optional. It never takes what a step needs, and the engine drops it before anything
else when state slots are short: the state that saves the fewest tokens first, of several the one of
the least recently used sequence.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from quire.base.token_history import common_prefix
from quire.base.types import DropCheckpoint, Edit, SeqId
from quire.engine.request import Request

if TYPE_CHECKING:
    from quire.branches.session_branches import SessionBranches
    from quire.branches.stored_state import StoredState
    from quire.contracts.kv_state import ModelState
    from quire.engine.request_queues import RequestQueues


LEAST = 32
"""Tokens that two prompts have in common at least."""

COMPARED = 16
"""Prompts with the same beginning, of those that arrived last, with which a new one is compared."""


@dataclass(frozen=True, slots=True)
class EngineSequences:
    """The sequences of an engine, and when each was used."""

    queues: RequestQueues
    branches: SessionBranches
    stored: StoredState

    def apply(self, edit: Edit) -> None:
        """Execute an edit at once."""
        self.branches.apply(edit)

    def ages(self) -> Mapping[SeqId, int]:
        """Return the sequences whose checkpoints may be given up, the least recently used one with
        the lowest number. Others have another owner, or cannot be computed again."""
        branches = self.branches
        ages = {} if branches.cache is None else branches.cache.ages()
        in_use = len(ages)
        ages |= {one.seq: in_use for one in branches.sessions.values() if one.seq is not None}
        under_way = (one.branch for one in (*self.queues.running, *self.queues.waiting))
        ages |= {branch.seq: in_use for branch in under_way if branch.seq is not None}
        for seq in branches.written():
            ages.pop(seq, None)
        return {seq: age for seq, age in ages.items() if not self.stored.is_coming(seq)}


class Checkpoints:
    """The decision which states are kept. ``interval``: tokens between two; 0: only where prompts
    branch."""

    def __init__(self, state: ModelState, interval: int, sequences: EngineSequences) -> None:
        self._state = state
        self.interval = interval
        self._sequences = sequences
        self.branch_points = BranchPoints()
        self.num_dropped = 0

    def wishes(self, requests: Sequence[Request], counts: Sequence[int]) -> list[tuple[int, ...]]:
        """Return, per request, after how many of its next ``counts[i]`` tokens a state is to be
        kept: as many as fit beside the step itself, more valuable ones in place of less valuable
        ones."""
        wanted = [self._wanted(request, count) for request, count in zip(requests, counts, strict=True)]
        if not any(wanted):
            return wanted
        seqs = [request.branch.seq for request in requests if request.branch.seq is not None]
        spare = self._state.spare_states(seqs, counts)
        victims: Victims | None = None
        granted: list[tuple[int, ...]] = []
        for request, count, positions in zip(requests, counts, wanted, strict=True):
            kept: list[int] = []
            for tokens in positions:
                # The state at the end of a chunk is there anyway.
                inside = tokens < count
                if inside and spare < 1:
                    victims = victims or self._victims()
                    spare += self._drop(victims, self._saved(request, tokens, kept))
                if not inside or spare > 0:
                    kept.append(tokens)
                    spare -= inside
            granted.append(tuple(kept))
        return granted

    def _wanted(self, request: Request, count: int) -> tuple[int, ...]:
        if not request.branch.reusable:
            return ()
        start, stop = request.branch.computed, request.branch.computed + count
        found = {position - start for position in request.seat.branch_points if start < position <= stop}
        if self.interval:
            found.update(
                position - start
                for position in range((start // self.interval + 1) * self.interval, stop + 1, self.interval)
            )
        return tuple(sorted(found))

    def _saved(self, request: Request, tokens: int, kept: Sequence[int]) -> int:
        """Return the number of tokens saved by a state after ``tokens`` new ones, on going back
        there."""
        if kept:
            return tokens - kept[-1]
        seq, position = request.branch.seq, request.branch.computed + tokens
        before = [] if seq is None else self._state.kept_positions(seq)
        return position - max((one for one in before if one < position), default=0)

    def free_state_slots(self, seqs: Sequence[SeqId], counts: Sequence[int]) -> bool:
        """Give up checkpoints for the state slots that a forward lacks; return whether any was."""
        short = -self._state.spare_states(seqs, counts)
        if short <= 0:
            return False
        victims = self._victims()
        return sum(self._drop(victims) for _ in range(short)) > 0

    def drop_one(self) -> bool:
        """Give up the checkpoint that saves least; says whether there was one."""
        return self._drop(self._victims())

    def _victims(self) -> Victims:
        return Victims(self._state, self._sequences.ages())

    def _drop(self, victims: Victims, most: int | None = None) -> bool:
        """Drop one slot's checkpoints, those that save least, at most ``most`` tokens (None:
        any)."""
        holders = victims.take(most)
        for seq, position in holders:
            self._sequences.apply(DropCheckpoint(seq, position))
        self.num_dropped += bool(holders)
        return bool(holders)


class Victims:
    """The slots that only checkpoints hold: the fewest saved tokens first, then the oldest use.
    Made at one moment, for one decision; what is taken counts as dropped. Cost O(n log n), and
    O(log n) for each that is taken."""

    def __init__(self, state: ModelState, ages: Mapping[SeqId, int]) -> None:
        self._held = state.loose_checkpoints()
        self._ages = ages
        self._kept: dict[SeqId, list[int]] = {}
        self._positions = state.kept_positions
        self._order = [
            (*self._worth(named), slot)
            for slot, named in self._held.items()
            if all(seq in ages for seq, _ in named)  # the others are not ours to give up
        ]
        heapq.heapify(self._order)

    def _worth(self, named: Sequence[tuple[SeqId, int]]) -> tuple[int, int]:
        """Return the tokens that it saves on going back there, and when it was used last."""
        saved = used = 0
        for seq, position in named:
            if seq not in self._kept:
                self._kept[seq] = self._positions(seq)
            kept = self._kept[seq]
            saved = max(saved, position - kept[bisect_left(kept, position) - 1])
            used = max(used, self._ages[seq])
        return saved, used

    def take(self, most: int | None) -> list[tuple[SeqId, int]]:
        """Return the next one's sequences and positions; none if it saves over ``most`` tokens."""
        while self._order:
            saved, used, slot = self._order[0]
            now = self._worth(self._held[slot])
            if now != (saved, used):
                # The one before it has been taken: it saves more than it did.
                heapq.heapreplace(self._order, (*now, slot))
                continue
            if most is not None and saved > most:
                return []
            heapq.heappop(self._order)
            for seq, position in self._held[slot]:
                self._kept[seq].remove(position)
            return self._held[slot]
        return []


class BranchPoints:
    """The requests under way, by their keys and first tokens. They tell at which positions running
    prompts diverge."""

    def __init__(self) -> None:
        self._alike: dict[tuple[Hashable, bytes], dict[Request, None]] = {}
        """In order of arrival."""

    def __len__(self) -> int:
        """Return the number of different beginnings."""
        return len(self._alike)

    def note(self, request: Request) -> None:
        """Note the positions of states to keep for a new request: its branch points with others,
        and the position before its last token, which a request of the same tokens runs again
        (without logits: its end)."""
        request.seat.branch_points.add(len(request.branch.tokens) - (request.output.wants != "none"))
        if not request.branch.cacheable or len(request.branch.tokens) <= LEAST:
            return
        alike = self._alike.setdefault(_name(request), {})
        for other in islice(reversed(alike), COMPARED):
            common = common_prefix(request.branch.tokens.ids, other.branch.tokens.ids)
            common = min(common, len(request.branch.tokens) - 1, len(other.branch.tokens) - 1)
            if common >= LEAST:
                other.seat.branch_points.add(common)
                request.seat.branch_points.add(common)
        alike[request] = None

    def forget(self, request: Request) -> None:
        alike = self._alike.get(_name(request), {})
        alike.pop(request, None)
        if not alike:
            self._alike.pop(_name(request), None)


def _name(request: Request) -> tuple[Hashable, bytes]:
    return request.branch.key, request.branch.tokens.ids[:LEAST].tobytes()
