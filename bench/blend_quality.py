"""How near blended answers are to those of a full prefill, by method, share of rows and hops.

Prompts are those of ``recipes/chunk_recall``: chunks computed alone behind BOS, a question whose
answer takes 0, 1 or 2 aliases from chunk to chunk. The model is the recipe's. The first chunk is
exact, as it stands where it stood; the question always runs.

``python bench/blend_quality.py [--prompts 200] [--methods ...] [--ratios ...]``
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plain_llama import PlainLlama, PlainRun
from quire.blend.scores import Score, ScoreInputs, StatedScore, score_of
from quire.blend.selection import BlendedRows, BlendPolicy
from quire_bench.reports import print_json, print_table
from recipes.chunk_recall.task import BOS, MAX_HOPS, Kind, Question, make_question

MODEL = Path(__file__).resolve().parents[1] / "recipes/chunk_recall/model"
RATIOS = (0.0, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)


@dataclass(frozen=True, eq=False)
class Case:
    """A prompt, what a full prefill makes of it, and the cached rows of its chunks."""

    tokens: Tensor
    full: PlainRun
    k: Tensor
    """``[L, n, Hkv, D]``: as chunks give it, moved to the prompt's positions."""
    v: Tensor
    context: int
    """Leading rows that are exact: BOS and the first chunk."""
    starts: tuple[int, ...]
    """Where the chunks behind the context begin, as rows of the forward."""
    asks: int
    """Where the question begins, as a row of the forward."""
    wrong: Tensor
    """``[n]``: squared distance of cached K and V from the true ones, each layer relative to the
    true ones of the prompt, summed over layers."""
    question: Question | None = None

    def rows(self) -> BlendedRows:
        return BlendedRows(chunk_starts=self.starts, question_start=self.asks)


def make_case(
    model: PlainLlama,
    chunks: Sequence[Sequence[int]],
    ask: Sequence[int],
    lead: int = BOS,
    question: Question | None = None,
) -> Case:
    """Compute what a case consists of: ``lead``, chunks that were computed alone, ``ask``."""
    tokens = torch.tensor([lead, *(token for chunk in chunks for token in chunk), *ask])
    full = model.full(tokens)
    k, v = torch.zeros_like(full.k), torch.zeros_like(full.v)
    starts = [1]
    for chunk in chunks:
        start, stop = starts[-1], starts[-1] + len(chunk)
        alone = model.full(torch.tensor([lead, *chunk]))
        shift = torch.full((len(chunk),), start - 1)
        k[:, start:stop] = model.rotated(alone.k[:, 1:], shift)
        v[:, start:stop] = alone.v[:, 1:]
        starts.append(stop)
    context = starts[1]
    k[:, :context], v[:, :context] = full.k[:, :context], full.v[:, :context]
    return Case(
        tokens,
        full,
        k,
        v,
        context,
        tuple(start - context for start in starts[1:-1]),
        starts[-1] - context,
        deviations(k, full.k) + deviations(v, full.v),
        question,
    )


def deviations(ours: Tensor, true: Tensor) -> Tensor:
    """Return ``[n]``: squared distances of rows, each layer relative to its mean row, summed."""
    squares = (ours - true).square().flatten(2).sum(-1)
    return (squares / true.square().flatten(2).sum(-1).mean(-1, keepdim=True)).sum(0)


@dataclass(frozen=True)
class Method:
    """A way to choose rows."""

    layers: tuple[int, ...]
    score: Callable[[PlainLlama, Case, float], Score]
    """Made for each case and ratio."""
    factors: tuple[float, ...] = ()
    bottom_right: bool = False
    passes: Callable[[Case, float], float] = lambda case, ratio: 0.0
    """Token-layers that the score spends before the forward."""


def named(name: str) -> Callable[[PlainLlama, Case, float], Score]:
    return lambda model, case, ratio: score_of(name)


def oracle(model: PlainLlama, case: Case, ratio: float) -> Score:
    return StatedScore(case.wrong[case.context :])


METHODS: dict[str, Method] = {
    "random": Method((1,), named("random")),
    "first_k": Method((1,), named("first_k")),
    "v c=1, bottom right": Method((1,), named("v"), bottom_right=True),
    "v c=1": Method((1,), named("v")),
    "gradual 1,2,3": Method((1, 2, 3), named("v"), (1.5, 1.0, 0.7)),
    "query c=1": Method((1,), named("query")),
    "v_query c=1": Method((1,), named("v_query")),
    "v c=2": Method((2,), named("v")),
    "v_query c=2": Method((2,), named("v_query")),
    "oracle": Method((1,), oracle),
}


@dataclass(frozen=True)
class Outcome:
    """One blended prompt."""

    hops: int
    kl: float
    agrees: bool
    right: bool
    full_right: bool
    error: tuple[float, ...]
    """Relative Frobenius error of K and V, by layer."""
    recall: float
    """Of the rows that are most wrong, as many as were chosen: the share that was chosen."""
    cost: float
    """Token-layers over those of a prefill of all rows behind the context."""


def run_blended(model: PlainLlama, case: Case, method: Method, ratio: float) -> tuple[PlainRun, float]:
    """Blend a case; return its token-layers over those of all rows behind the context, too."""
    policy = BlendPolicy(ratio=ratio, layers=method.layers, layer_ratios=method.factors, min_tokens=0)
    run = model.blended(
        case.tokens,
        case.k,
        case.v,
        case.context,
        policy,
        method.score(model, case, ratio),
        case.rows(),
        bottom_right=method.bottom_right,
    )
    whole = (len(case.tokens) - case.context) * model.layers
    return run, (run.token_layers + method.passes(case, ratio)) / whole


def measure(model: PlainLlama, case: Case, method: Method, ratio: float) -> Outcome:
    """Blend a case, and compare it with the full prefill."""
    assert case.question is not None
    run, cost = run_blended(model, case, method, ratio)
    true, ours = (logits.log_softmax(-1) for logits in (case.full.logits[-1], run.logits[-1]))
    best, own = int(true.argmax()), int(ours.argmax())
    chosen = {int(row) for row in run.kept if row < case.context + case.asks}
    order = case.wrong[case.context : case.context + case.asks].argsort(descending=True)[: len(chosen)]
    off = (run.k - case.full.k).square().flatten(1).sum(1) + (run.v - case.full.v).square().flatten(1).sum(1)
    whole = case.full.k.square().flatten(1).sum(1) + case.full.v.square().flatten(1).sum(1)
    return Outcome(
        hops=case.question.hops,
        kl=float((true.exp() * (true - ours)).sum()),
        agrees=best == own,
        right=own == case.question.answer,
        full_right=best == case.question.answer,
        error=tuple((off / whole).sqrt().tolist()),
        recall=len(chosen & {int(row) + case.context for row in order}) / len(chosen) if chosen else 1.0,
        cost=cost,
    )


def interval(values: Sequence[float], draws: int = 1000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean."""
    given = torch.tensor(values, dtype=torch.float64)
    drawn = torch.randint(len(given), (draws, len(given)), generator=torch.Generator().manual_seed(0))
    low, high = given[drawn].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def summary(outcomes: Sequence[Outcome], naive: Sequence[Outcome] | None = None) -> dict[str, object]:
    """Return the means of outcomes of one method and ratio; ``naive`` are those of reuse alone."""

    def accuracy(of: Sequence[Outcome], hops: int) -> float:
        found = [outcome.right for outcome in of if outcome.hops == hops]
        return sum(found) / len(found) if found else float("nan")

    kls = [outcome.kl for outcome in outcomes]
    low, high = interval(kls)
    row: dict[str, object] = {"kl": statistics.fmean(kls), "kl_low": low, "kl_high": high}
    for hops in range(MAX_HOPS + 1):
        row[f"acc{hops}"] = accuracy(outcomes, hops)
        row[f"kl{hops}"] = statistics.fmean([one.kl for one in outcomes if one.hops == hops] or [float("nan")])
    if naive is not None:
        got, none, all_ = (
            statistics.fmean(values)
            for values in (
                [one.right for one in outcomes],
                [one.right for one in naive],
                [one.full_right for one in outcomes],
            )
        )
        row["recovered"] = (got - none) / (all_ - none) if all_ > none else float("nan")
    row["agree"] = statistics.fmean(one.agrees for one in outcomes)
    row["error"] = statistics.fmean(statistics.fmean(one.error) for one in outcomes)
    row["recall"] = statistics.fmean(one.recall for one in outcomes)
    row["cost"] = statistics.fmean(one.cost for one in outcomes)
    row["error_by_layer"] = [statistics.fmean(each) for each in zip(*(one.error for one in outcomes), strict=True)]
    return row


def make_cases(model: PlainLlama, kind: Kind, prompts: int, seed: int) -> list[Case]:
    """Draw ``prompts`` questions of each number of hops."""
    return [
        make_case(model, made.chunks, made.ask, question=made)
        for hops in range(MAX_HOPS + 1)
        for rng in [random.Random(f"{seed}/blend/{hops}")]
        for made in (make_question(rng, kind, hops) for _ in range(prompts))
    ]


def compare(
    model: PlainLlama, cases: Sequence[Case], methods: Mapping[str, Method], ratios: Sequence[float]
) -> list[dict[str, object]]:
    """Return a row of the table for each method and ratio."""
    naive = [measure(model, case, METHODS["first_k"], 0.0) for case in cases]
    rows = []
    for ratio in ratios:
        for name, method in methods.items():
            outcomes = [measure(model, case, method, ratio) for case in cases]
            rows.append({"method": name, "ratio": ratio, **summary(outcomes, naive)})
    return rows
