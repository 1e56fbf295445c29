"""Selection of the rows of a blended forward that are computed anew, for each request separately.

Rows that *must* run: rows without a cached row, the last one, the question's, and rows that the
caller forces. *Candidates* are the other rows that are alive and not known to be exact. A budget of
candidates runs too, those with the highest scores. No torch here: a runner's bookkeeping uses this.

Letters: R requests; T rows of a batch, those of request 0 first; A rows that are alive; C
candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quire.base.blend_inputs import BlendedRows, check_ratio, check_threshold, is_count, is_finite
from quire.base.errors import FailedPrecondition, InvalidArgument

SLACK = 1e-9
"""Subtracted from a budget before it is rounded up, so that 0.15 times 20 is 3 rows in spite of
rounding errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendPolicy:
    """The rules for choosing rows. ``InvalidArgument`` for values outside of each field's range."""

    ratio: float = 0.15
    """Share of the candidates that is computed anew, 0..1. Rows that must run are not counted."""
    layers: tuple[int, ...] = (1,)
    """Layers that select, ascending; the first is the check layer."""
    layer_ratios: tuple[float, ...] = ()
    """Factors of ``ratio``, one for each of ``layers``; empty: 1 for all. A product above 1 is
    1."""
    score: str = "v"
    """Name of the score (``quire.blend.scores.score_of``)."""
    threshold: float | None = None
    """Only candidates of higher scores are computed anew, within the budget; None: no threshold."""
    min_tokens: int = 256
    """A request with fewer valid rows in the batch runs in full. A runtime that splits prompts must
    count the rows of whole prompts itself, and pass 0 here."""
    protect_last: bool = True
    """The last row of each request always runs. False is for comparisons with LMCache 0.3 only."""

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio)
        check_threshold(self.threshold)
        layers, factors = self.layers, self.layer_ratios
        if (
            not isinstance(layers, tuple)
            or not layers
            or not all(is_count(one) for one in layers)
            or any(after <= before for before, after in pairwise(layers))
        ):
            raise InvalidArgument(field="layers", given=layers, allowed="a tuple of ascending layer ids, at least one")
        if (
            not isinstance(factors, tuple)
            or len(factors) not in (0, len(layers))
            or not all(is_finite(one) and one >= 0 for one in factors)
        ):
            allowed = f"an empty tuple, or {len(layers)} numbers >= 0, one for each of layers"
            raise InvalidArgument(field="layer_ratios", given=factors, allowed=allowed)
        if not isinstance(self.score, str) or not self.score:
            raise InvalidArgument(field="score", given=self.score, allowed="the name of a score")
        if not is_count(self.min_tokens):
            raise InvalidArgument(field="min_tokens", given=self.min_tokens, allowed="an integer >= 0")
        if not isinstance(self.protect_last, bool):
            raise InvalidArgument(field="protect_last", given=self.protect_last, allowed="True or False")

    def share(self, layer: int, ratio: float) -> float:
        """Return the share of the candidates that runs after one of ``layers``, for a request with
        this ratio."""
        factor = self.layer_ratios[self.layers.index(layer)] if self.layer_ratios else 1.0
        return min(1.0, ratio * factor)


class Selection:
    """The rows of one forward that are alive, layer by layer.

    ``alive`` (int64 ``[A]``, rows of the batch, ascending) and ``counts`` (int64 ``[R]``, alive
    rows of each request) change with each ``select``."""

    def __init__(
        self,
        policy: BlendPolicy,
        row_counts: Sequence[int],
        valid_T: NDArray[np.bool_],
        requests: Sequence[BlendedRows | None],
    ) -> None:
        """Begin with all rows. ``valid_T``: mask of rows with a cached row. ``requests``: the facts
        about each; None: none. ``InvalidArgument`` for lengths that disagree."""
        counts = np.asarray(row_counts, dtype=np.int64)
        if counts.ndim != 1 or not counts.size or counts.min() < 1:
            raise InvalidArgument(field="row_counts", given=list(row_counts), allowed="one count >= 1 for each request")
        total = int(counts.sum())
        if valid_T.dtype != np.bool_ or valid_T.shape != (total,):
            raise InvalidArgument(field="valid_T", given=valid_T, allowed=f"bool [{total}]")
        if len(requests) != len(counts):
            raise InvalidArgument(field="requests", given=len(requests), allowed=f"one for each of {len(counts)}")
        self.policy = policy
        self.alive: NDArray[np.int64] = np.arange(total)
        self.counts = counts
        self._known = [one or BlendedRows() for one in requests]
        self._bounds = np.concatenate(([0], np.cumsum(counts)))
        self._must = ~valid_T
        self._layer = -1
        exact_T = np.zeros(total, dtype=np.bool_)
        for known, (start, stop) in zip(self._known, pairwise(self._bounds.tolist()), strict=True):
            known.check(stop - start)
            must = self._must[start:stop]
            if stop - start - int(must.sum()) < policy.min_tokens:
                must[:] = True
            if known.forced is not None:
                must |= known.forced
            if known.exact is not None:
                exact_T[start:stop] = known.exact
            if known.question_start is not None:
                must[known.question_start :] = True
            if policy.protect_last:
                must[-1] = True
        self.candidates: NDArray[np.int64] = np.flatnonzero(~(self._must | exact_T))
        """Rows of the batch that a selecting layer scores, ascending, int64 ``[C]``."""
        self._first_counts = self._by_request(self.candidates)
        """Number of candidates of each request at the first layer that selects; budgets are shares
        of it."""

    def _by_request(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of these rows of the batch in each request."""
        return np.diff(np.searchsorted(rows, self._bounds))

    @property
    def scored(self) -> NDArray[np.int64]:
        """``candidates`` as indices of ``alive``."""
        return np.searchsorted(self.alive, self.candidates)

    @property
    def must(self) -> NDArray[np.int64]:
        """Rows of the batch that must run, ascending."""
        return np.flatnonzero(self._must)

    @property
    def question_counts(self) -> list[int]:
        """For each request, the number of its last alive rows that belong to the question: at least
        1."""
        starts = [known.question_start for known in self._known]
        counts = zip(np.diff(self._bounds).tolist(), starts, strict=True)
        return [1 if start is None else max(1, count - start) for count, start in counts]

    def candidate_spans(self) -> Iterator[tuple[int, slice]]:
        """Yield each request that has candidates, with its slice of ``candidates``."""
        ends = np.searchsorted(self.candidates, self._bounds).tolist()
        for request, (start, stop) in enumerate(pairwise(ends)):
            if start < stop:
                yield request, slice(start, stop)

    def select(self, layer: int, scores_C: ArrayLike) -> NDArray[np.int64]:
        """Keep rows that must run and the candidates with the highest scores. Return the kept rows
        as indices of the earlier ``alive``, int64 ``[S]``, ascending.

        ``scores_C``: one for each of ``candidates``, on the CPU; NaN and infinities count as the
        highest. Equal scores go to the lower row. ``InvalidArgument`` for another number of scores,
        or a layer that does not select; ``FailedPrecondition`` for a layer that has selected.
        """
        scores = np.asarray(scores_C, dtype=np.float64)
        if layer not in self.policy.layers:
            raise InvalidArgument(field="layer", given=layer, allowed=f"one of {self.policy.layers}")
        if layer <= self._layer:
            raise FailedPrecondition(f"layer {layer} cannot select: layer {self._layer} has done so already")
        if scores.shape != self.candidates.shape:
            raise InvalidArgument(field="scores_C", given=scores, allowed=f"[{len(self.candidates)}]")
        self._layer = layer
        scores = np.where(np.isfinite(scores), scores, np.inf)
        stays_T = self._must.copy()
        for request, span in self.candidate_spans():
            highest = np.argsort(-scores[span], kind="stable")[: self._budget(layer, request, scores[span])]
            stays_T[self.candidates[span][highest]] = True
        kept: NDArray[np.int64] = np.flatnonzero(stays_T[self.alive])
        self.alive = self.alive[kept]
        self.counts = self._by_request(self.alive)
        self.candidates = self.candidates[stays_T[self.candidates]]
        return kept

    def _budget(self, layer: int, request: int, scores: NDArray[np.float64]) -> int:
        """Return the number of a request's candidates with these scores that run."""
        known, first_count = self._known[request], int(self._first_counts[request])
        ratio = self.policy.ratio if known.ratio is None else known.ratio
        budget = math.ceil(self.policy.share(layer, ratio) * first_count - SLACK)
        threshold = self.policy.threshold if known.threshold is None else known.threshold
        return budget if threshold is None else min(budget, int((scores > threshold).sum()))
