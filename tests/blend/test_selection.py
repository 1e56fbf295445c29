"""Which rows run, against the definition written down request by request."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire.base.blend_inputs import BlendedRows
from quire.base.errors import FailedPrecondition, InvalidArgument
from quire.blend.selection import BlendPolicy, Selection

scores = st.floats(width=32) | st.sampled_from([0.0, 1.0, 2.0])


def naive(
    policy: BlendPolicy, layer: int, rows: list[dict[str, Any]], first: int, ratio: float, threshold: float | None
) -> list[int]:
    """Return the kept rows of one request: the definition, a row at a time."""
    factor = dict(zip(policy.layers, policy.layer_ratios, strict=True))[layer] if policy.layer_ratios else 1
    candidates = [row for row in rows if row["candidate"]]
    for row in candidates:
        row["rank"] = row["score"] if math.isfinite(row["score"]) else math.inf
    budget = math.ceil(min(1, ratio * factor) * first - 1e-9)
    if threshold is not None:
        budget = min(budget, sum(row["rank"] > threshold for row in candidates))
    chosen = sorted(candidates, key=lambda row: (-row["rank"], row["row"]))[:budget]
    return sorted(row["row"] for row in rows if row["must"] or row in chosen)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[bool], BlendedRows | None]:
    count = draw(st.integers(1, 12))
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    masks = st.none() | flags.map(lambda one: np.array(one, dtype=np.bool_))
    known = st.builds(
        BlendedRows,
        ratio=st.none() | st.sampled_from([0.0, 0.15, 0.3, 1.0]),
        threshold=st.none() | st.floats(-2, 2),
        forced=masks,
        exact=masks,
        question_start=st.none() | st.integers(0, count),
    )
    return draw(flags | st.just([True] * count)), draw(st.none() | known)


@given(
    st.lists(requests(), min_size=1, max_size=6),
    st.sampled_from([((1,), ()), ((0, 3), (1.5, 0.7)), ((1, 2, 3), ())]),
    st.none() | st.floats(-2, 2),
    st.sampled_from([0, 3, 8]),
    st.booleans(),
    st.data(),
)
def test_rows_are_those_of_the_definition(
    batch: list[tuple[list[bool], BlendedRows | None]],
    layers: tuple[tuple[int, ...], tuple[float, ...]],
    threshold: float | None,
    fewest: int,
    protect: bool,
    data: st.DataObject,
) -> None:
    policy = BlendPolicy(
        ratio=0.2,
        layers=layers[0],
        layer_ratios=layers[1],
        threshold=threshold,
        min_tokens=fewest,
        protect_last=protect,
    )
    counts = [len(valid) for valid, _ in batch]
    valid_T = np.array([one for valid, _ in batch for one in valid])
    selection = Selection(policy, counts, valid_T, [known for _, known in batch])
    rows: list[list[dict[str, Any]]] = []
    for start, (valid, given_known) in zip(np.cumsum([0, *counts[:-1]]).tolist(), batch, strict=True):
        known = given_known or BlendedRows()
        rows.append([])
        for at, is_valid in enumerate(valid):
            must = not is_valid or sum(valid) < fewest or (protect and at == len(valid) - 1)
            must |= known.forced is not None and bool(known.forced[at])
            must |= known.question_start is not None and at >= known.question_start
            exact = known.exact is not None and bool(known.exact[at])
            rows[-1].append({"row": start + at, "must": must, "candidate": not must and not exact})
    firsts = [sum(row["candidate"] for row in one) for one in rows]
    alive = [row["row"] for one in rows for row in one]
    for layer in policy.layers:
        candidates = [row for one in rows for row in one if row["candidate"]]
        assert selection.candidates.tolist() == [row["row"] for row in candidates]
        assert [alive[at] for at in selection.scored] == selection.candidates.tolist()
        drawn = data.draw(st.lists(scores, min_size=len(candidates), max_size=len(candidates)))
        for row, score in zip(candidates, drawn, strict=True):
            row["score"] = score
        kept = selection.select(layer, np.array(drawn, dtype=np.float32))
        wanted: list[list[int]] = []
        for one, first, (_, given_known) in zip(rows, firsts, batch, strict=True):
            known = given_known or BlendedRows()
            ratio = policy.ratio if known.ratio is None else known.ratio
            limit = threshold if known.threshold is None else known.threshold
            wanted.append(naive(policy, layer, one, first, ratio, limit))
        now = [row for one in wanted for row in one]
        assert kept.dtype == selection.alive.dtype == np.int64
        assert [alive[at] for at in kept] == selection.alive.tolist() == now
        assert selection.counts.tolist() == [len(one) for one in wanted]
        alive = now
        rows = [[row for row in one if row["row"] in now] for one in rows]


def chosen(ratio: float, given: NDArray[np.float32], **known: Any) -> set[int]:
    policy = BlendPolicy(min_tokens=0)
    selection = Selection(policy, [len(given)], np.ones(len(given), dtype=bool), [BlendedRows(ratio=ratio, **known)])
    return {int(row) for row in selection.alive[selection.select(1, given[selection.candidates])]}


def chosen_rows(policy: BlendPolicy, given: list[float]) -> list[int]:
    selection = Selection(policy, [len(given)], np.ones(len(given), dtype=bool), [None])
    return selection.alive[selection.select(1, np.array(given)[selection.candidates])].tolist()


def test_the_selection_of_lmcache_and_ours() -> None:
    """Ten valid rows of which 2 and 6 deviate: theirs leaves the last one out."""
    deviations = [0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 9.0, 0.0, 0.0, 0.0]
    policy = BlendPolicy(ratio=0.2, min_tokens=0)
    assert chosen_rows(policy, deviations) == [2, 6, 9]
    assert chosen_rows(BlendPolicy(ratio=0.2, min_tokens=0, protect_last=False), deviations) == [2, 6]


@pytest.mark.parametrize(
    ("ratio", "candidates", "budget"), [(0.15, 20, 3), (0.15, 21, 4), (1e-12, 50, 0), (0.1, 30, 3)]
)
def test_budgets_are_rounded_up_but_for_the_noise_of_floats(ratio: float, candidates: int, budget: int) -> None:
    assert len(chosen(ratio, np.arange(candidates + 1, dtype=np.float32))) == budget + 1


@given(st.lists(scores, min_size=2, max_size=30), st.floats(0, 1), st.floats(0, 1))
def test_more_rows_are_the_same_and_others(given_scores: list[float], one: float, other: float) -> None:
    given_rows = np.array(given_scores, dtype=np.float32)
    assert chosen(min(one, other), given_rows) <= chosen(max(one, other), given_rows)


def test_equal_scores_go_to_the_lower_rows() -> None:
    assert chosen(0.3, np.zeros(11, dtype=np.float32)) == {0, 1, 2, 10}


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_scores_that_are_no_numbers_are_the_highest(strange: float) -> None:
    given_rows = np.arange(11, dtype=np.float32)
    given_rows[3] = strange
    assert chosen(0.1, given_rows) == {3, 10}
    assert chosen(1.0, given_rows, threshold=100.0) == {3, 10}


def test_few_valid_rows_are_not_worth_it() -> None:
    policy = BlendPolicy(ratio=0.0, min_tokens=4)
    valid_T = np.array([True] * 4 + [False] + [True] * 3 + [False] * 2)
    selection = Selection(policy, [5, 5], valid_T, [None, None])
    selection.select(1, np.zeros(len(selection.candidates)))
    assert selection.alive.tolist() == [4, 5, 6, 7, 8, 9]


def test_what_a_score_is_told() -> None:
    known = [BlendedRows(question_start=3), None, BlendedRows(question_start=2)]
    selection = Selection(BlendPolicy(min_tokens=0), [5, 3, 2], np.ones(10, dtype=bool), known)
    assert selection.question_counts == [2, 1, 1]
    assert selection.candidates.tolist() == [0, 1, 2, 5, 6, 8]
    assert list(selection.candidate_spans()) == [(0, slice(0, 3)), (1, slice(3, 5)), (2, slice(5, 6))]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ratio", -0.1),
        ("ratio", 1.1),
        ("ratio", math.nan),
        ("ratio", True),
        ("ratio", "0.5"),
        ("layers", ()),
        ("layers", (2, 1)),
        ("layers", (1, 1)),
        ("layers", (-1,)),
        ("layers", [1]),
        ("layers", (1.0,)),
        ("layer_ratios", (1.0, 1.0)),
        ("layer_ratios", (-1.0,)),
        ("layer_ratios", (math.inf,)),
        ("score", ""),
        ("score", None),
        ("threshold", math.nan),
        ("threshold", "high"),
        ("min_tokens", -1),
        ("min_tokens", 1.5),
        ("protect_last", 1),
    ],
)
def test_policies_are_checked(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as refused:
        BlendPolicy(**{field: value})  # type: ignore[arg-type]
    assert refused.value.field == field
    assert refused.value.given is value
    assert refused.value.allowed


@pytest.mark.parametrize(
    ("field", "value"),
    [("ratio", 2.0), ("threshold", math.inf)],
)
def test_what_is_known_is_checked(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as refused:
        BlendedRows(**{field: value})  # type: ignore[arg-type]
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("forced", {"forced": np.ones(3, dtype=bool)}),
        ("exact", {"exact": np.ones(4, dtype=np.int32)}),
        ("question_start", {"question_start": 5}),
        ("question_start", {"question_start": -1}),
    ],
)
def test_what_is_known_fits_its_request(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Selection(BlendPolicy(), [4], np.ones(4, dtype=bool), [BlendedRows(**given)])
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "counts", "valid", "known"),
    [
        ("row_counts", [], np.ones(0, dtype=bool), []),
        ("row_counts", [2, 0], np.ones(2, dtype=bool), [None, None]),
        ("valid_T", [2, 2], np.ones(3, dtype=bool), [None, None]),
        ("valid_T", [2, 2], np.ones(4), [None, None]),
        ("requests", [2, 2], np.ones(4, dtype=bool), [None]),
    ],
)
def test_batches_are_checked(field: str, counts: list[int], valid: Any, known: list[None]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Selection(BlendPolicy(), counts, valid, known)
    assert refused.value.field == field


def test_numbers_of_numpy_are_numbers() -> None:
    policy = BlendPolicy(ratio=np.float32(0.5), layers=(np.int64(1),), threshold=np.float64(0.5))  # type: ignore[arg-type]
    known = BlendedRows(ratio=np.float16(0.25), question_start=np.int32(3))  # type: ignore[arg-type]
    assert Selection(policy, [4], np.ones(4, dtype=bool), [known]).question_counts == [1]


def test_layers_select_once_in_order() -> None:
    policy = BlendPolicy(layers=(1, 3), min_tokens=0)
    selection = Selection(policy, [5], np.ones(5, dtype=bool), [None])
    for layer, given_scores, field in ((0, [0.0] * 4, "layer"), (1, [0.0] * 5, "scores_C")):
        with pytest.raises(InvalidArgument) as refused:
            selection.select(layer, given_scores)
        assert refused.value.field == field
        assert selection.alive.tolist() == [0, 1, 2, 3, 4]
    selection.select(3, [0.0] * 4)
    for layer in (1, 3):
        with pytest.raises(FailedPrecondition):
            selection.select(layer, [0.0])
    assert [int(after - before) for before, after in pairwise(selection.alive)] == [4]
