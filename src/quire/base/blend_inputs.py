"""The blending of one step, as values that can be sent to another process. No torch.

Letters: n rows of a chunk.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlendedRows:
    """The known facts about one request's rows in a batch. Row 0 is the request's first row in the
    batch, not its first token."""

    ratio: float | None = None
    """None: the policy's."""
    threshold: float | None = None
    """None: the policy's."""
    forced: NDArray[np.bool_] | None = None
    """bool ``[n]``: rows that must run."""
    exact: NDArray[np.bool_] | None = None
    """bool ``[n]``: rows whose cached K and V are exact. They run only if they must."""
    question_start: int | None = None
    """First row of the last segment, 0..n, of a prompt of two or more segments. Rows from there on
    must run, and ``v_or_question`` measures their attention; None or n: the last row's."""

    def __post_init__(self) -> None:
        if self.ratio is not None:
            check_ratio("ratio", self.ratio)
        check_threshold(self.threshold)

    def check(self, count: int) -> None:
        """Raise ``InvalidArgument`` unless this fits a request of ``count`` rows."""
        for name, mask in (("forced", self.forced), ("exact", self.exact)):
            if mask is not None and (mask.dtype != np.bool_ or mask.shape != (count,)):
                raise InvalidArgument(field=name, given=mask, allowed=f"a NumPy array, bool [{count}]")
        start = self.question_start
        if start is not None and not (is_count(start) and start <= count):
            raise InvalidArgument(field="question_start", given=start, allowed=f"a row, 0..{count}")


@dataclass(frozen=True, slots=True, eq=False)
class BlendedChunk:
    """The blending of one chunk of a step."""

    source: int
    """Name of the source of its cached rows (``quire.blend.row_sources``)."""
    start: int
    """Position in the prompt of the chunk's first token."""
    valid_n: NDArray[np.bool_]
    """Mask of the chunk's rows that have a cached row."""
    rows: BlendedRows
    score: str
    """Name of the score that orders the candidates."""


@dataclass(frozen=True, slots=True, eq=False)
class BlendInputs:
    """The blending of a step."""

    chunks: tuple[BlendedChunk | None, ...]
    """One for each chunk of the step; None: all of its rows run."""
    check_layer: int | None
    """Layer behind whose projection rows are selected; None: the runner's own ``BlendExecutor``
    selects, in all layers."""


def check_ratio(field: str, given: object) -> None:
    """Raise ``InvalidArgument`` unless ``given`` is a number in 0..1."""
    if not is_finite(given) or not 0 <= given <= 1:  # type: ignore[operator]
        raise InvalidArgument(field=field, given=given, allowed="a number in 0..1")


def check_threshold(given: object) -> None:
    """Raise ``InvalidArgument`` unless ``given`` is a finite number or None."""
    if given is not None and not is_finite(given):
        raise InvalidArgument(field="threshold", given=given, allowed="None or a finite number")


def is_finite(given: object) -> bool:
    """Return True for a finite number."""
    return isinstance(given, numbers.Real) and not isinstance(given, bool) and math.isfinite(given)


def is_count(given: object) -> bool:
    """Return True for an integer >= 0."""
    return isinstance(given, numbers.Integral) and not isinstance(given, bool) and int(given) >= 0
