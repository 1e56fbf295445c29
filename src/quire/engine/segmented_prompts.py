"""Prompts made of segments, as token ids. No torch.

Letters: S tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import InvalidArgument
from quire.base.segments import Segment
from quire.engine.prompts import SegmentedPrompt, Text

Encode: TypeAlias = Callable[[Text, bool], NDArray[np.int64]]
"""Returns the ids of a text, with the tokens that begin a prompt or without them, or of ids."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a prompt."""

    offsets: tuple[int, ...] = ()
    """Where the second, third, ... piece begins."""
    marked: tuple[tuple[int, int], ...] = ()
    """First token, and the one behind the last, of each segment that is worth keeping."""
    unplaced: tuple[str, ...] = ()
    """Paths of marked texts of messages that are no segments (``Blend.unplaced``)."""

    def question(self, length: int) -> int:
        """Return the start of the last piece, whose tokens always run; for one piece ``length``."""
        return self.offsets[-1] if self.offsets else length


WHOLE = Pieces()
"""A prompt of one piece."""


def read_segments(prompt: SegmentedPrompt, encode: Encode) -> tuple[NDArray[np.int64], Pieces]:
    """Return the ids ``[S]`` of a prompt, and its pieces. Each piece is tokenised by itself, the
    first one as a prompt is. ``InvalidArgument`` names a piece that is neither."""
    ids: list[NDArray[np.int64]] = []
    ends, marked = [0], []
    for number, part in enumerate(prompt):
        content = part.content if isinstance(part, Segment) else part
        if not isinstance(content, str) and not hasattr(content, "__len__"):
            raise InvalidArgument(
                field=f"prompt.{number}", given=part, allowed="a Segment, text, or a list of token ids"
            )
        ids.append(encode(content, not number))
        ends.append(ends[-1] + ids[-1].size)
        if isinstance(part, Segment):
            marked.append((ends[-2], ends[-1]))
    return np.concatenate(ids), Pieces(tuple(ends[1:-1]), tuple(marked))
