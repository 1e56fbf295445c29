"""Blended prompts beside full prefills of them: cases, methods, backends and measures.

A backend is anything that blends a case. The one here is plain torch (``plain_llama``).
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.chunk_recall.task import ASK, BOS, MAX_HOPS, Kind, Question, make_prompt, make_question, prompt_of

from plain_llama import PlainLlama, PlainRun
from quire.base.blend_inputs import BlendedRows
from quire.blend.scores import Score, StatedScore, score_of
from quire.blend.selection import BlendPolicy

CONTINUED = 64
"""Number of compared greedy tokens."""
ROUNDING = 1e-9
"""Largest squared distance of rows, relative to their squares, that float32 rounding causes."""


@dataclass(frozen=True, eq=False)
class Case:
    """A prompt, its full prefill, and the cached rows of its chunks."""

    tokens: Tensor
    full: PlainRun
    k: Tensor
    """``[L, n, Hkv, D]``: the chunks' rows, moved to the prompt's positions."""
    v: Tensor
    context: int
    """Leading rows that are exact: the lead and the first chunk."""
    starts: tuple[int, ...]
    """First rows of the chunks after the context, as rows of the forward."""
    asks: int
    """First row of the question, as a row of the forward."""
    wrong: Tensor
    """``[n]``: squared distance of cached K and V from the true ones, each over its layer's mean
    row, summed over layers."""
    continuation: Tensor
    """``[CONTINUED]``: the greedy tokens after the full prefill."""
    question: Question | None = None
    """The question, if there is a known answer."""

    @property
    def rows(self) -> BlendedRows:
        return BlendedRows(question_start=self.asks)


def make_case(
    model: PlainLlama,
    chunks: Sequence[Sequence[int]],
    ask: Sequence[int],
    lead: int = BOS,
    question: Question | None = None,
) -> Case:
    """Compute a case: ``lead``, separately computed chunks, ``ask``."""
    alone = [model.full(torch.tensor([lead, *chunk])) for chunk in chunks]
    k, v = (
        torch.cat([each[:, 1:] for each in rows], 1) for rows in zip(*((one.k, one.v) for one in alone), strict=True)
    )
    lengths = torch.tensor([len(chunk) for chunk in chunks])
    shifts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return _case(model, chunks, ask, lead, model.rotated(k, shifts), v, question)


def make_edit(model: PlainLlama, rng: random.Random, kind: Kind, dropped: int) -> Case:
    """Compute a prompt from which a chunk was removed. Cached rows are the other chunks' rows in
    the prompt before."""
    before = make_prompt(rng, kind)
    after = prompt_of([*before.chunks[:dropped], *before.chunks[dropped + 1 :]])
    made = rng.choice([made for made in after.known.values() if made.value is not None])
    assert made.value is not None
    question = Question(after.chunks, (ASK, made.key), made.value, made.hops)
    start = 1 + sum(map(len, before.chunks[:dropped]))
    gone = len(before.chunks[dropped])
    run = model.full(torch.tensor(before.body))
    k, v = (torch.cat((rows[:, 1:start], rows[:, start + gone :]), 1) for rows in (run.k, run.v))
    shifts = torch.where(torch.arange(k.shape[1]) < start - 1, 0, -gone)
    return _case(model, after.chunks, question.ask, BOS, model.rotated(k, shifts), v, question)


def _case(
    model: PlainLlama,
    chunks: Sequence[Sequence[int]],
    ask: Sequence[int],
    lead: int,
    k: Tensor,
    v: Tensor,
    question: Question | None,
) -> Case:
    """Return the case of chunks with cached rows ``k``, ``v`` at their positions in the prompt."""
    tokens = torch.tensor([lead, *(token for chunk in chunks for token in chunk), *ask])
    full = model.full(tokens, len(ask))
    context = 1 + len(chunks[0])
    ends = len(tokens) - len(ask)
    k = torch.cat((full.k[:, :context], k[:, context - 1 :], torch.zeros_like(full.k[:, ends:])), 1)
    v = torch.cat((full.v[:, :context], v[:, context - 1 :], torch.zeros_like(full.v[:, ends:])), 1)
    starts = torch.tensor([len(chunk) for chunk in chunks[1:-1]]).cumsum(0).tolist()
    return Case(
        tokens,
        full,
        k,
        v,
        context,
        (0, *(int(start) for start in starts)),
        ends - context,
        (distances(k, full.k) + distances(v, full.v)).sum(0),
        model.continuation(full, CONTINUED),
        question,
    )


def distances(ours: Tensor, true: Tensor) -> Tensor:
    """Return squared distances of rows over their layer's mean square ``[L, n]``."""
    squares = (ours - true).square().flatten(2).sum(-1)
    return squares / true.square().flatten(2).sum(-1).mean(-1, keepdim=True)


@dataclass(frozen=True)
class Method:
    """A way to choose rows."""

    score: str
    """A name of ``SCORES``; "oracle": the rows with the largest error; "first": the first rows of
    each chunk (EPIC, ICML 2025)."""
    layers: tuple[int, ...] = (1,)
    factors: tuple[float, ...] = ()
    bottom_right: bool = False
    """Whether the mask is CacheBlend's, which lets rows see later ones."""

    def score_for(self, case: Case) -> Score:
        if self.score == "first":
            places = torch.arange(len(case.tokens) - case.context)
            return StatedScore(
                torch.stack([1 / (1 + places - start).clamp(min=0.5) for start in case.starts])
                .where(torch.stack([places >= start for start in case.starts]), 0.0)
                .amax(0)
            )
        return StatedScore(case.wrong[case.context :]) if self.score == "oracle" else score_of(self.score)


NAIVE = Method("random", (0,))
"""With a ratio of 0: cached rows unchanged, only the question is computed."""
DEFAULT = "v_or_question c=2"
METHODS: dict[str, Method] = {
    "random": Method("random"),
    "first": Method("first"),
    "v c=1, bottom right": Method("v", bottom_right=True),
    "v c=1": Method("v"),
    "gradual v": Method("v", (1, 2, 3), (1.5, 1.0, 0.7)),
    "v c=2": Method("v", (2,)),
    "v_or_question c=1": Method("v_or_question"),
    "v_or_question c=2": Method("v_or_question", (2,)),
    "oracle": Method("oracle"),
    "oracle c=2": Method("oracle", (2,)),
}


@dataclass(frozen=True, eq=False)
class Answer:
    """A backend's answer to a case."""

    logits: Tensor
    """``[Q, M]`` of the question's rows; only of the last row if a backend has no others."""
    cost: float
    run: PlainRun | None = None
    """Rows and their K and V, if a backend exposes them."""
    common: int | None = None
    """Number of greedy tokens that equal the full prefill's continuation."""


Backend = Callable[[Case, Method, float], Answer]
"""Blends a case by a method at a ratio."""


def answer_plainly(model: PlainLlama, case: Case, method: Method, ratio: float) -> Answer:
    """Blend a case in plain torch."""
    policy = BlendPolicy(ratio=ratio, layers=method.layers, layer_ratios=method.factors, min_tokens=0)
    run = model.blended(
        case.tokens,
        case.k,
        case.v,
        case.context,
        policy,
        method.score_for(case),
        case.rows,
        bottom_right=method.bottom_right,
    )
    count = len(case.tokens) - case.context
    cost = run.token_layers / (count * model.layers)
    return Answer(run.logits[case.asks - count :], cost, run, model.common(run, case.continuation))


@dataclass(frozen=True)
class Outcome:
    """One blended prompt."""

    hops: int
    kl: float
    """KL divergence in nats at the last token."""
    agrees: bool
    right: bool
    full_right: bool
    cost: float
    errors: tuple[float, ...] = ()
    """Relative Frobenius error of K and V together, by layer."""
    attention: tuple[float, ...] = ()
    """As ``errors``, of the attention outputs of the question's rows."""
    recall: float | None = None
    """Share of the rows with the largest errors that were chosen, among as many as were chosen."""
    common: int | None = None
    token_layers: float = 0.0
    read_bytes: int = 0
    """See ``PlainRun``."""


def measure(backend: Backend, case: Case, method: Method, ratio: float) -> Outcome:
    """Blend a case, and compare it with the full prefill."""
    assert case.question is not None
    answer = backend(case, method, ratio)
    true, ours = (logits[-1].log_softmax(-1) for logits in (case.full.logits, answer.logits))
    best, own = int(true.argmax()), int(ours.argmax())
    errors: tuple[float, ...] = ()
    attention, recall = errors, None
    if (run := answer.run) is not None:
        ends = case.context + case.asks
        chosen = {int(row) for row in run.kept if row < ends}
        order = case.wrong[case.context : ends].argsort(descending=True)[: len(chosen)] + case.context
        recall = len(chosen & set(order.tolist())) / len(chosen) if chosen else 1.0
        errors = relative_errors((run.k, run.v), (case.full.k, case.full.v))
        attention = relative_errors([run.attended], [case.full.attended])
    return Outcome(
        hops=case.question.hops,
        kl=float((true.exp() * (true - ours)).sum()),
        agrees=best == own,
        right=own == case.question.answer,
        full_right=best == case.question.answer,
        cost=answer.cost,
        errors=errors,
        attention=attention,
        recall=recall,
        common=answer.common,
        token_layers=0.0 if run is None else run.token_layers,
        read_bytes=0 if run is None else run.read_bytes,
    )


def relative_errors(ours: Sequence[Tensor], true: Sequence[Tensor]) -> tuple[float, ...]:
    """Return the Frobenius error of tensors ``[L, ...]`` together, by layer, relative to the true
    ones."""
    off = sum((own - one).square().flatten(1).sum(1) for own, one in zip(ours, true, strict=True))
    whole = sum(one.square().flatten(1).sum(1) for one in true)
    return tuple((off / whole).sqrt().tolist())


def rank_correlations(cases: Sequence[Case]) -> list[list[float | None]]:
    """Return Spearman's correlation of the rows' deviations in each two layers ``[L, L]``, the mean
    over cases; None for a layer without deviation but rounding."""
    found = []
    for case in cases:
        rows = slice(case.context, case.context + case.asks)
        deviations = (distances(case.k, case.full.k) + distances(case.v, case.full.v))[:, rows]
        ranks = deviations.argsort(-1).argsort(-1).double()
        ranks[deviations.amax(-1) < ROUNDING] = torch.nan
        found.append(torch.corrcoef(ranks))
    means = torch.stack(found).mean(0).tolist()
    return [[one if one == one else None for one in row] for row in means]


def interval(values: Sequence[float], draws: int = 1000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean."""
    given = torch.tensor(values, dtype=torch.float64)
    drawn = torch.randint(len(given), (draws, len(given)), generator=torch.Generator().manual_seed(0))
    low, high = given[drawn].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def summary(outcomes: Sequence[Outcome], naive: Sequence[Outcome]) -> dict[str, object]:
    """Return the means of a method at a ratio; ``naive`` are the outcomes of ``NAIVE``."""
    by_hops = [[one for one in outcomes if one.hops == hops] for hops in range(MAX_HOPS + 1)]
    low, high = interval([one.kl for one in outcomes])
    row: dict[str, Any] = {"kl": statistics.fmean(one.kl for one in outcomes), "low": low, "high": high}
    row |= {f"kl{hops}": statistics.fmean(one.kl for one in some) for hops, some in enumerate(by_hops) if some}
    row |= {f"acc{hops}": statistics.fmean(one.right for one in some) for hops, some in enumerate(by_hops) if some}
    got, least, most = (
        statistics.fmean(rights)
        for rights in (
            [one.right for one in outcomes],
            [one.right for one in naive],
            [one.full_right for one in outcomes],
        )
    )
    row["recovered"] = (got - least) / (most - least) if most > least else None
    row["agree"] = statistics.fmean(one.agrees for one in outcomes)
    if recalls := [one.recall for one in outcomes if one.recall is not None]:
        row["recall"] = statistics.fmean(recalls)
        row["errors"], row["attention_errors"] = (
            [statistics.fmean(layer) for layer in zip(*each, strict=True)]
            for each in ([one.errors for one in outcomes], [one.attention for one in outcomes])
        )
        row["attention"] = statistics.fmean(row["attention_errors"])
        row["common"] = statistics.fmean(one.common for one in outcomes if one.common is not None)
        row["token_layers"] = statistics.fmean(one.token_layers for one in outcomes)
        row["bytes"] = statistics.fmean(one.read_bytes for one in outcomes)
    row["cost"] = statistics.fmean(one.cost for one in outcomes)
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
    backend: Backend, cases: Sequence[Case], methods: Mapping[str, Method], ratios: Sequence[float]
) -> list[dict[str, object]]:
    """Return the table: reuse alone, then each method at each ratio."""
    naive = [measure(backend, case, NAIVE, 0.0) for case in cases]
    rows = [{"method": "reuse alone", "ratio": 0.0, **summary(naive, naive)}]
    for ratio in ratios:
        for name, method in methods.items():
            outcomes = [measure(backend, case, method, ratio) for case in cases]
            rows.append({"method": name, "ratio": ratio, **summary(outcomes, naive)})
    return rows
