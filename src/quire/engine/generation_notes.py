"""What is noted of generated tokens: which mask was on, and why they ended. No torch.

A session has a tuple of notes, which forks share. A fork, a rewind or an edit cuts them to what its
first tokens still are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

MOST_NOTES = 64
"""Generations of a session that are noted, the latest ones."""
MOST_COUNTS = 16384
"""Masked tokens of a generation whose masks are noted, the first ones."""
UNCOUNTED = -1
"""Stands for a mask of which nobody knows how many tokens it allowed: a greedy token that the
grammar takes is found without it."""


@dataclass(frozen=True, slots=True, eq=False)
class GenerationNote:
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
    """How many tokens the mask allowed, from ``start`` on, ``UNCOUNTED`` where that is not known;
    perhaps with the token that ended the text behind the last one."""

    def allowed_at(self, position: int) -> int | None:
        """Return how many tokens the mask allowed at a position; None: that is not known."""
        index = position - self.start
        if self.allowed is None or not 0 <= index < self.allowed.size or self.allowed[index] == UNCOUNTED:
            return None
        return int(self.allowed[index])

    def cut(self, length: int) -> GenerationNote:
        """Return the note of what is left of it in the first ``length`` tokens."""
        if self.stop <= length:
            return self
        counts = None if self.allowed is None else self.allowed[: length - self.start]
        return replace(self, stop=length, finish_reason="", stop_reason=None, allowed=counts)


Notes: TypeAlias = tuple[GenerationNote, ...]
"""Of a session, in order of their tokens."""


def cut_notes(notes: Notes, length: int) -> Notes:
    """Return the notes of the first ``length`` tokens."""
    if not notes or notes[-1].stop <= length:
        return notes
    return tuple(note.cut(length) for note in notes if note.start < length)


def with_note(notes: Notes, note: GenerationNote) -> Notes:
    """Return notes with one more."""
    return (*notes, note)[-MOST_NOTES:]


def counts_of(counts: Sequence[int]) -> NDArray[np.int32] | None:
    """Return counts to be noted; None: there are none."""
    return np.array(counts[:MOST_COUNTS], dtype=np.int32) if counts else None


def note_at(notes: Notes, position: int) -> GenerationNote | None:
    """Return the note of the generation that made the token at a position; None: none did."""
    return next((note for note in reversed(notes) if note.start <= position < note.stop), None)


def ended_at(notes: Notes, position: int) -> GenerationNote | None:
    """Return the note of the generation that ended before a position; None: none did."""
    return next((note for note in reversed(notes) if note.stop == position and note.finish_reason), None)
