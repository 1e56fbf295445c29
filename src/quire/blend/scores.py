"""Scores: measures of the error of a cached row at a layer that selects. One class each.

Letters: A rows that are alive, C candidates among them; Hq, Hkv query and KV heads; D head size; R
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.base.registry import Registry
from quire.blend.selection import Selection


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreInputs:
    """The inputs of one layer after its projection, norms and RoPE. Heads are those of this
    rank."""

    layer_id: int
    selection: Selection
    """The selection before this layer selects."""
    candidates: Tensor
    """``selection.scored`` on the model's device, int64 ``[C]``."""
    positions: Tensor
    """``[A]``: position of each row in its sequence."""
    fresh_q: Tensor
    """``[A, Hq, D]``"""
    fresh_k: Tensor
    """``[A, Hkv, D]``, rotated at ``positions``."""
    fresh_v: Tensor
    """``[A, Hkv, Dv]``"""
    cached_k: Tensor | None
    """``[A, Hkv, D]``, rotated to ``positions``; undefined, even NaN, for rows that are no
    candidates. None: the score does not read it."""
    cached_v: Tensor | None
    """As ``cached_k``, without a rotation."""
    scale: float
    """Scale of the products of queries and keys."""
    window: int | None = None
    """A query at p sees keys at positions > p - window; None: all before it."""
    question_mass: Tensor | None = None
    """float32 ``[A]``: the attention from the question's rows to the row, summed over heads and
    over the layers from this one on, when they ran over cached rows before this forward. None: they
    did not run."""
    all_reduce: Callable[[Tensor], Tensor] | None = None
    """Sums a tensor over the ranks of tensor parallelism, replicated heads counted once."""

    def over_ranks(self, sums: Tensor) -> Tensor:
        return sums if self.all_reduce is None else self.all_reduce(sums)


class Score(Protocol):
    """A measure that orders candidates."""

    @property
    def needs(self) -> frozenset[str]:
        """The inputs that the score reads: "k" and "v" are cached tensors, "question" is
        ``question_mass``."""

    def scores(self, inputs: ScoreInputs) -> Tensor:
        """Return the candidates' scores, float32 ``[C]``; the highest are computed anew."""


SCORES: Registry[Score] = Registry("score")
"""Scores by their names in a policy."""


def score_of(name: str) -> Score:
    """Return the score of this name; ``InvalidArgument`` lists the known ones."""
    found = SCORES.get(name)
    if found is None:
        raise InvalidArgument(field="score", given=name, allowed=f"one of {', '.join(SCORES)}")
    return found


def _cached(name: str, given: Tensor | None) -> Tensor:
    """Return a cached tensor that a score reads; ``InvalidArgument`` if it was not given."""
    if given is None:
        raise InvalidArgument(field=name, given=None, allowed="a tensor, since the score reads it")
    return given


def _squares(rows: Tensor) -> Tensor:
    """Return the sum of squares of each row, float32 ``[A]``, of float32 rows that may be
    overwritten."""
    return rows.square_().flatten(1).sum(-1)


def _deviations(fresh: Tensor, cached: Tensor, candidates: Tensor) -> Tensor:
    """Return the squared distance of each candidate's rows, summed over heads, float32 ``[C]``.

    All rows are compared: gathering wide rows costs more than the others' sums."""
    return _squares(fresh.float() - cached.float())[candidates]


class ValueDeviation:
    """``v``: the squared distance of fresh and cached V (CacheBlend, EuroSys 2025)."""

    needs = frozenset({"v"})

    def scores(self, inputs: ScoreInputs) -> Tensor:
        return inputs.over_ranks(_deviations(inputs.fresh_v, _cached("cached_v", inputs.cached_v), inputs.candidates))


class WrongOrRead:
    """``v_or_question``: alternates between the row with the largest error and the row with the
    most attention from the question.

    In the order of ``v`` and in that of ``question_mass`` the n-th candidate of a request scores 1
    / n, and a candidate has the higher of its two scores. So each order gets half of a budget. Then
    neither a question that attends to other rows nor a model whose V is uninformative at this layer
    spoils all of it.
    """

    needs = frozenset({"v", "question"})

    def scores(self, inputs: ScoreInputs) -> Tensor:
        mass = _cached("question_mass", inputs.question_mass)[inputs.candidates]
        wrong = _deviations(inputs.fresh_v, _cached("cached_v", inputs.cached_v), inputs.candidates)
        sums = inputs.over_ranks(torch.stack((wrong, mass.float()))).nan_to_num(nan=torch.inf)
        places = torch.empty_like(sums)
        for _, span in inputs.selection.candidate_spans():
            order = sums[:, span].argsort(dim=-1, descending=True, stable=True)
            count = torch.arange(1.0, 1 + order.shape[-1], device=sums.device).expand(2, -1)
            places[:, span] = torch.empty_like(sums[:, span]).scatter_(-1, order, count)
        return 1 / places.amin(0)


class RandomScore:
    """``random``: a floor for comparisons. One seed and layer give a row of a batch one score."""

    needs: frozenset[str] = frozenset()

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def scores(self, inputs: ScoreInputs) -> Tensor:
        rows = inputs.selection.candidates
        drawn = np.random.default_rng((self._seed, inputs.layer_id)).random(int(inputs.selection.alive[-1]) + 1)
        return torch.from_numpy(drawn[rows].astype(np.float32)).to(inputs.fresh_k.device)


class StatedScore:
    """Scores given by the caller, one for each row of the batch: an oracle's, or 1 for rows of a
    list. Register it under a name to use it in a policy."""

    needs: frozenset[str] = frozenset()

    def __init__(self, scores_T: Sequence[float] | Tensor) -> None:
        self._scores_T = torch.as_tensor(scores_T, dtype=torch.float32)

    def scores(self, inputs: ScoreInputs) -> Tensor:
        rows = torch.from_numpy(inputs.selection.candidates)
        return self._scores_T[rows].to(inputs.fresh_k.device)


SCORES.register("v", ValueDeviation())
SCORES.register("v_or_question", WrongOrRead())
SCORES.register("random", RandomScore())
