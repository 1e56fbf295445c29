"""Replay for recurrent layers: the tokens to run again, and the states that a call needs.

A recurrent state is kept at some positions only. A call that begins elsewhere forks the row at the
nearest kept position before, and first replays the row's recorded tokens from there on.

Letters: n tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.executor.cache_pool import CachePool
from quire.executor.forward_packing import Piece
from quire.executor.row import Row


def replay_start(pool: CachePool, row: Row, start: int, label: str = "") -> int:
    """Return the position, at most ``start``, from which a fork of a row without an open chain
    must run the row's tokens.

    It is ``start`` if no layer is recurrent or the state there is kept. ``FailedPrecondition``: the
    tokens cannot be replayed (``replay_refusal``).
    """
    if not pool.facts.recurrent_ids or start >= pool.state.sequence_length(row.seq):
        return start
    return pool.reach(row, start, f"{label}: " if label else "")


def states_needed(
    starts: Sequence[int], forwards: Iterable[Sequence[Piece]], trees: Iterable[Sequence[Piece]] = (), *, interval: int
) -> int:
    """Return the largest number of state slots that a call takes beyond those at its beginning.

    Row i begins at ``starts[i]``; ``forwards`` are of chains, ``trees`` come after them. A forward
    takes a slot for each row, for each multiple of ``interval`` strictly inside the row's new
    tokens, and for each node of a tree. The state before a row's new tokens is free after the
    forward, unless it existed before the call or is at a multiple.
    """
    lengths = list(starts)
    own = [False] * len(lengths)
    held = most = 0
    for pieces in forwards:
        taken = freed = 0
        for index, begin, end in pieces:
            length, last = lengths[index], lengths[index] + end - begin
            taken += 1 + _multiples(length, last - 1, interval)
            freed += own[index] and not (interval and length % interval == 0)
            own[index], lengths[index] = True, last
        most = max(most, held + taken)
        held += taken - freed
    for pieces in trees:
        held += sum(end - begin for _, begin, end in pieces)
        most = max(most, held)
    return most


def _multiples(low: int, high: int, interval: int) -> int:
    """Return the number of multiples of ``interval`` in low + 1..high."""
    return high // interval - low // interval if interval else 0
