"""Scores of candidates against sums written as loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.base.blend_inputs import BlendedRows
from quire.base.errors import InvalidArgument
from quire.blend.scores import SCORES, ScoreInputs, StatedScore, score_of
from quire.blend.selection import BlendPolicy, Selection

BOUND = 64 * torch.finfo(torch.float32).eps
"""Relative; sums of fewer than 64 terms of one sign."""
GROUPS = 2
HEADS = 4
POLICY = BlendPolicy(ratio=0.5, layers=(1, 2), min_tokens=0)


def inputs(seed: int, *, window: int | None = None, second: bool = False) -> ScoreInputs:
    """Return three requests, one of them behind a context; ``second``: rows have left already.

    Rows that are no candidates hold NaN."""
    draw = np.random.default_rng(seed)
    counts = [12, 1, 9]
    total = sum(counts)
    known = [BlendedRows(question_start=9), None, None]
    selection = Selection(POLICY, counts, draw.random(total) < 0.8, known)
    places = np.concatenate([np.arange(12), [30], 5 + np.arange(9)])
    if second:
        selection.select(1, draw.random(len(selection.candidates)))
    count = len(selection.alive)

    def rows(heads: int) -> Tensor:
        return torch.from_numpy(draw.standard_normal((count, heads, 4)).astype(np.float32))

    cached = [rows(GROUPS), rows(GROUPS)]
    for one in cached:
        one[np.setdiff1d(np.arange(count), selection.scored)] = torch.nan
    return ScoreInputs(
        layer_id=2 if second else 1,
        selection=selection,
        candidates=torch.from_numpy(selection.scored),
        positions=torch.from_numpy(places[selection.alive]),
        fresh_q=rows(HEADS),
        fresh_k=rows(GROUPS),
        fresh_v=rows(GROUPS),
        cached_k=cached[0],
        cached_v=cached[1],
        scale=0.5,
        window=window,
        question_mass=torch.from_numpy(draw.random(count).astype(np.float32)),
    )


def squares(fresh: Tensor, cached: Tensor | None, at: Tensor) -> np.ndarray:
    assert cached is not None
    gap = fresh.double() - cached.double()
    return np.array([sum(float(x) ** 2 for x in gap[row].flatten()) for row in at])


def wanted(name: str, given: ScoreInputs) -> np.ndarray:
    at = given.candidates
    v = squares(given.fresh_v, given.cached_v, at)
    match name:
        case "v":
            return v
        case "v_or_question":
            assert given.question_mass is not None
            mass = given.question_mass.double().numpy()[at]
            found = np.zeros(len(at))
            for _, span in given.selection.candidate_spans():
                for order in (v[span], mass[span]):
                    for row, one in enumerate(order):
                        place = 1 + sum(other > one for other in order)
                        found[span][row] = max(found[span][row], 1 / place)
            return found
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["v", "v_or_question"])
@given(st.integers(0, 1000), st.sampled_from([None, 1, 4]), st.booleans())
def test_scores_are_those_of_loops(name: str, seed: int, window: int | None, second: bool) -> None:
    given_inputs = inputs(seed, window=window, second=second)
    found = score_of(name).scores(given_inputs)
    assert found.dtype == torch.float32
    assert found.shape == given_inputs.candidates.shape
    expected = wanted(name, given_inputs)
    assert np.allclose(found.numpy(), expected, rtol=BOUND, atol=BOUND * max(1.0, expected.max(initial=0)))


@pytest.mark.parametrize("name", ["v", "v_or_question"])
def test_ranks_have_the_scores_of_all_heads(name: str) -> None:
    """Each rank has half of the heads; partial sums are added up before anything else."""
    whole = inputs(8)
    assert whole.cached_k is not None
    assert whole.cached_v is not None
    assert whole.question_mass is not None
    ranks = [
        dataclasses.replace(
            whole,
            fresh_q=whole.fresh_q[:, 2 * rank : 2 * rank + 2],
            fresh_k=whole.fresh_k[:, rank : rank + 1],
            fresh_v=whole.fresh_v[:, rank : rank + 1],
            cached_k=whole.cached_k[:, rank : rank + 1],
            cached_v=whole.cached_v[:, rank : rank + 1],
            question_mass=whole.question_mass * (0.25, 0.75)[rank],
        )
        for rank in range(2)
    ]
    parts: list[Tensor] = []

    def kept(sums: Tensor) -> Tensor:
        parts.append(sums.clone())
        return sums

    for rank in ranks:
        score_of(name).scores(dataclasses.replace(rank, all_reduce=kept))
    assert len(parts) == 2  # one reduction for each score and rank
    found = [
        score_of(name).scores(dataclasses.replace(rank, all_reduce=lambda _: parts[0] + parts[1])) for rank in ranks
    ]
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found[0], score_of(name).scores(whole), rtol=BOUND)


def test_stated_and_random_scores_belong_to_rows_of_the_batch() -> None:
    given_inputs = inputs(4, second=True)
    stated = torch.arange(22.0)
    rows = given_inputs.selection.candidates
    assert StatedScore(stated).scores(given_inputs).tolist() == rows.tolist()
    one = score_of("random").scores(given_inputs)
    assert torch.equal(one, score_of("random").scores(given_inputs))
    assert len(set(one.tolist())) == len(rows)
    other = score_of("random").scores(dataclasses.replace(given_inputs, layer_id=1))
    assert not torch.equal(one, other)


def test_wrong_rows_and_read_rows_share_the_budget() -> None:
    rows = BlendedRows(question_start=11)
    selection = Selection(BlendPolicy(ratio=0.4, min_tokens=0), [12], np.ones(12, dtype=bool), [rows])
    wrong, read = torch.zeros(12), torch.zeros(12)
    wrong[[1, 2, 3, 4]] = torch.tensor([9.0, torch.nan, 7.0, 6.0])
    read[[2, 7, 8, 9]] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    found = score_of("v_or_question").scores(
        dataclasses.replace(
            inputs(0),
            selection=selection,
            candidates=torch.from_numpy(selection.scored),
            fresh_v=wrong[:, None, None].sqrt(),
            cached_v=torch.zeros(12, 1, 1),
            question_mass=read,
        )
    )
    assert (1 / found).tolist()[:5] == [5, 2, 1, 3, 4]
    assert selection.alive[selection.select(1, found)].tolist() == [1, 2, 3, 7, 8, 11]


def test_what_the_question_reads_must_be_known() -> None:
    assert score_of("v_or_question").needs == {"v", "question"}
    for name in ("question_mass", "cached_v"):
        with pytest.raises(InvalidArgument) as refused:
            score_of("v_or_question").scores(dataclasses.replace(inputs(1), **{name: None}))
        assert refused.value.field == name


@pytest.mark.parametrize(
    ("name", "needs"),
    [("v", "v"), ("random", "")],
)
def test_scores_say_what_they_read(name: str, needs: str) -> None:
    score, given_inputs = score_of(name), inputs(1)
    assert score.needs == set(needs)
    spared = {f"cached_{one}": None for one in "kv" if one not in needs}
    with_all = inputs(1)
    found = score.scores(dataclasses.replace(given_inputs, **spared))
    assert torch.equal(found, score.scores(with_all))
    for one in needs:
        with pytest.raises(InvalidArgument) as refused:
            score.scores(dataclasses.replace(given_inputs, **{f"cached_{one}": None}))
        assert refused.value.field == f"cached_{one}"


@pytest.fixture
def oracle() -> Iterator[str]:
    SCORES.register("oracle", StatedScore([0.0, 1.0]))
    yield "oracle"
    SCORES.remove("oracle")


def test_scores_are_found_by_name(oracle: str) -> None:
    assert isinstance(score_of(oracle), StatedScore)
    with pytest.raises(InvalidArgument, match="'q'") as refused:
        score_of("q")
    assert refused.value.field == "score"
    for name in SCORES:
        assert name in refused.value.allowed
