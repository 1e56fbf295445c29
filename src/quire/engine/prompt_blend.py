"""``PromptBlend``: what one prompt is blended with, and what came of it.

Letters: S tokens of the prompt; n tokens of a step's chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.base.blend_inputs import BlendedChunk, BlendedRows
from quire.base.outputs import Blend
from quire.base.segments import BlendParams
from quire.blend.given_parts import RetrievedRows
from quire.blend.row_sources import RowSources
from quire.blend.rows_task import RowsTask
from quire.branches.branch import Branch
from quire.engine.prompts import Pieces

MOST_ASKING = 1 / 3
"""Part of a step's tokens up to which the rows that must run do so twice, the first time to tell
what they read."""


def _nothing() -> NDArray[np.bool_]:
    return np.zeros(0, dtype=np.bool_)


@dataclass(eq=False, slots=True)
class PromptBlend:
    params: BlendParams
    pieces: Pieces
    length: int
    """S"""
    ratio: float
    """Part of the rows with a cached copy to compute anew."""
    score: str
    """Name of what orders its candidates."""
    most: int
    """Tokens that may count as one in a step's budget while it is blended."""
    find: Callable[[Branch, PromptBlend], RowsTask | RetrievedRows | str]
    """Finds chunks for tokens that are not computed, or returns the reason for having none."""
    sources: RowSources
    """The runner's sources of cached rows."""
    task: RowsTask | RetrievedRows | None = None
    """What brings the rows, while some are needed."""
    source: int = -1
    """Name of the task among the sources."""
    valid: NDArray[np.bool_] = field(default_factory=_nothing)
    """``[S]``: tokens with cached rows."""
    exact: NDArray[np.bool_] = field(default_factory=_nothing)
    """``[S]``: the ``valid`` tokens whose rows equal a full computation's."""
    left_out: NDArray[np.bool_] = field(default_factory=_nothing)
    """``[S]``: those that were not computed anew, and are not exact."""
    anew: NDArray[np.bool_] = field(default_factory=_nothing)
    """``[S]``: those that were."""
    released: int = 0
    """Of an edit: tokens that follow and have no rows, since a window has let go of them."""
    spared: int = 0
    """Tokens that did not run, those with exact rows too."""
    windowed: bool = False
    """Whether its sequence has a window of its own."""
    by_tier: dict[str, int] = field(default_factory=dict)
    reason: str = "the prompt did not run"
    warning: str = ""
    """What a reader of the answer should know if some of the prompt was blended."""
    divergence: float | None = None

    @property
    def budget_factor(self) -> int:
        """See ``RequestBranch``."""
        if self.task is None:
            return 1
        running = self.length - (1 - self.ratio) * int(self.valid.sum())
        return max(1, min(self.most, int(self.length / max(1, running))))

    @property
    def question(self) -> int:
        """Return the position at which the last piece begins."""
        return self.pieces.question(self.length)

    def begin(self, work: Branch) -> None:
        """Find chunks for the tokens of an admitted prompt that are not computed."""
        self.end()
        self.valid, self.exact, self.left_out, self.anew = (np.zeros(self.length, dtype=np.bool_) for _ in range(4))
        self.spared, self.windowed = 0, work.window is not None
        found = self.find(work, self)
        if isinstance(found, str):
            self.reason = found
            return
        self.take(found)

    def take(self, task: RowsTask | RetrievedRows) -> None:
        """Blend with the rows that a task brings."""
        self.task, self.source = task, self.sources.add(task)
        self.reason, self.valid = "", task.valid_mask.numpy() != 0

    def end(self) -> None:
        """Close the task that brings rows."""
        if self.task is not None:
            self.sources.remove(self.source)
            self.task.close()
            self.task = None

    def chunk(self, start: int, count: int) -> BlendedChunk | None:
        """Return the blending of the next ``count`` tokens; None: they are not blended."""
        if self.task is None or start >= self.length:
            return None
        valid, exact = np.zeros((2, count), dtype=np.bool_)
        stop = min(self.length, start + count)
        valid[: stop - start], exact[: stop - start] = self.valid[start:stop], self.exact[start:stop]
        if not valid.any():
            return None
        question = None
        if self.pieces.offsets:
            question = min(max(self.question - start, 0), count)
        rows = BlendedRows(
            ratio=self.ratio,
            threshold=self.params.threshold,
            exact=exact,
            question_start=question,
        )
        return BlendedChunk(self.source, start, valid, rows, self._score(start + count, rows, valid))

    def _score(self, stop: int, rows: BlendedRows, valid: NDArray[np.bool_]) -> str:
        """Return the name of the score that orders the candidates of a step's chunk ending at
        ``stop``. ``v`` takes the place of what asks the question where no row of that is in this
        chunk, where asking does not pay or decides nothing, and where a sink is read at relative
        positions."""
        if self.score != "v_or_question" or self.windowed:
            return "v" if self.score == "v_or_question" else self.score
        others = valid[: rows.question_start]
        asks = stop > min(self.question, self.length - 1) and 0 < self.ratio < 1
        return self.score if asks and valid.size - others.sum() <= MOST_ASKING * valid.size else "v"

    def ran(self, start: int, left_out_n: NDArray[np.bool_], anew_n: NDArray[np.bool_]) -> None:
        """Note the left-out rows of a chunk that are not exact, and the rows computed anew."""
        count = min(left_out_n.size, self.length - start)  # Others were generated after the prompt.
        self.left_out[start : start + count] = left_out_n[:count]
        self.anew[start : start + count] = anew_n[:count]

    def report(self, work: Branch) -> Blend:
        blended = int(self.left_out.sum())
        return Blend(
            blended=blended,
            recomputed=int(self.anew.sum()),
            exact=work.origin.exact_part(self.length),
            by_tier=dict(self.by_tier) if blended or (self.exact.any() and not self.reason) else {},
            reason=self.reason,
            warning=self.warning if blended else "",
            divergence=self.divergence,
            unplaced=self.pieces.unplaced,
        )
