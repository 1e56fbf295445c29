"""The generations of a session: their tokens, their masks, and why they ended. No torch.

A session has a tuple of them, which forks share. A fork, a rewind or an edit cuts it to the tokens
that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

MOST_GENERATIONS = 64
"""Generations that a session has at most, the latest ones."""
MOST_COUNTS = 16384
"""Masked tokens of a generation whose masks are noted, the first ones."""
UNCOUNTED = -1
"""Stands for a mask that was not counted: a greedy token that the grammar takes is found without
it."""


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """One generation: the tokens at ``start..stop - 1``."""

    start: int
    stop: int
    finish_reason: str
    """Why it ended; empty if it was cut since."""
    stop_reason: str | int | None = None
    """The stop string or token, or "context"."""
    mask: str = ""
    """The kind of structured output ("json", "regex", ...); empty: there was none."""
    allowed: NDArray[np.int32] | None = None
    """Number of tokens that the mask allowed at each position from ``start`` on, or ``UNCOUNTED``.
    There may be one more for the token that ended the text. None: no numbers were noted."""

    def allowed_at(self, position: int) -> int | None:
        """Return the number of tokens that the mask allowed at a position; None: unknown."""
        index = position - self.start
        if self.allowed is None or not 0 <= index < self.allowed.size or self.allowed[index] == UNCOUNTED:
            return None
        return int(self.allowed[index])

    def cut(self, length: int) -> Generation:
        """Return the part of it in the first ``length`` tokens."""
        if self.stop <= length:
            return self
        counts = None if self.allowed is None else self.allowed[: length - self.start]
        return replace(self, stop=length, finish_reason="", stop_reason=None, allowed=counts)


Generations: TypeAlias = tuple[Generation, ...]
"""Of a session, in order of their tokens."""


def cut_generations(generations: Generations, length: int) -> Generations:
    """Return the generations of the first ``length`` tokens."""
    if not generations or generations[-1].stop <= length:
        return generations
    return tuple(one.cut(length) for one in generations if one.start < length)


def with_generation(generations: Generations, generation: Generation) -> Generations:
    """Return generations with one more."""
    return (*generations, generation)[-MOST_GENERATIONS:]


def counts_of(counts: Sequence[int]) -> NDArray[np.int32] | None:
    """Return counts to be noted; None: there are none."""
    return np.array(counts[:MOST_COUNTS], dtype=np.int32) if counts else None


def generation_at(generations: Generations, position: int) -> Generation | None:
    """Return the generation that made the token at a position; None: none did."""
    return next((one for one in reversed(generations) if one.start <= position < one.stop), None)


def ended_at(generations: Generations, position: int) -> Generation | None:
    """Return the generation that ended before a position; None: none did."""
    return next((one for one in reversed(generations) if one.stop == position and one.finish_reason), None)
