"""The backend ``triton`` of recurrences against the definition of ``test_recurrence``: on a GPU, or
on the CPU by Triton's interpreter. On a GPU that file runs it too, with all its cases.

Letters: as there.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.test_recurrence import (
    CONVOLUTIONS,
    DECAYS,
    TREES,
    assert_close,
    chain_plan,
    check_convolution,
    make,
    make_convolution,
    run,
    scattered,
    tree_plan,
)
from tests.triton_machine import DTYPES, CarriedRecurrence, needs_triton

from quire.base.errors import InvalidArgument
from quire.contracts.recurrence import Recurred, RecurrencePlan, StatePlaces
from quire.kernels.recurrence import triton_recurrence
from quire.kernels.recurrence.chunked import ChunkedRecurrence
from quire.kernels.recurrence.groups import cut
from quire.kernels.recurrence.steps import Steps, steps_of
from quire.kernels.recurrence.triton_recurrence import ROWS, TritonRecurrence, alone

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")]
BACKEND = CarriedRecurrence()
RAGGED = chain_plan([63, 1, 64, 0, 65, 5, 130], [62, 63, 127, 192, 197, 327])
"""With all states after the ends wanted but that of an entry without rows."""
WANTED = chain_plan([150, 4, 66, 1, 9], [0, 1, 62, 63, 64, 100, 149, 150, 153, 219])


# -- linear attention ------------------------------------------------------------------------------


@pytest.mark.product(2)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_ragged_batches(decay: str, delta: bool) -> None:
    """Chunks, short entries and none; query heads that share a state; narrow inputs."""
    dtype = DTYPES[delta]
    inputs = make(RAGGED, decay, delta, heads=1 + (decay == "none"), ratio=2 - delta, sizes=(20, 17), dtype=dtype)
    inputs = replace(inputs, states=torch.cat((inputs.states, inputs.states[:1])))
    assert_close(run(BACKEND, RAGGED, inputs), RAGGED, inputs)


@pytest.mark.parametrize(("decay", "delta"), [("none", False), ("head", True), ("column", True)])
def test_wanted_rows_within_chunks(decay: str, delta: bool) -> None:
    inputs = make(WANTED, decay, delta, heads=1)
    assert_close(run(BACKEND, WANTED, inputs), WANTED, inputs)


@pytest.mark.turns(4)
@pytest.mark.parametrize("decay", ["head", "column"])
@pytest.mark.parametrize("kind", ["zero", "strong", "huge", "forget", "mixed", "all"])
def test_extreme_decays(kind: str, decay: str) -> None:
    """-inf is complete forgetting; nothing overflows or is not a number."""
    plan = chain_plan([70, 3], [30, 69, 72])
    rates = torch.zeros(73, 1, 8, dtype=torch.float64)
    if kind == "strong":
        rates[::3] = -60.0
    elif kind == "huge":
        rates[::5] = -1e38
    elif kind == "forget":
        rates[[20, 50, 51, 71]] = -torch.inf
    elif kind == "mixed":
        rates = torch.randn(rates.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).abs().neg()
        rates[rates < -1] = -torch.inf
    elif kind == "all":
        rates[:] = -torch.inf
    inputs = make(plan, decay, True, heads=1, log_decay=rates if decay == "column" else rates[..., 0])
    found = run(BACKEND, plan, inputs)
    assert all(bool(one.isfinite().all()) for one in found)
    assert_close(found, plan, inputs)


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_systems_far_from_the_identity(beta: float) -> None:
    """One key throughout; with beta 2 nothing of an error fades, so the inverse is all of it.

    Nothing decays: NumPy's e^x is off by 1.8 units in the last place on some processors, by 0.5 on
    others, and these systems make such a difference a hundred times as large.
    """
    plan = chain_plan([130])
    inputs = make(plan, "head", True, heads=1, log_decay=torch.zeros(130, 1))
    assert inputs.beta is not None
    alike = replace(inputs, k=inputs.k[:1].expand_as(inputs.k), beta=torch.full_like(inputs.beta, beta))
    assert_close(run(BACKEND, plan, alike), plan, alike)


@pytest.mark.turns(5)
@pytest.mark.parametrize("tree", sorted(TREES))
def test_trees(tree: str) -> None:
    """Row by row; what branches start from is kept, whether or not it is wanted."""
    plan = tree_plan(TREES[tree])
    for wanted, delta, decay in ((plan.wanted, True, "head"), (plan.wanted[1::3], False, "column")):
        part = replace(plan, wanted=wanted)
        inputs = make(part, decay, delta, heads=1, ratio=2)
        assert_close(run(BACKEND, part, inputs), part, inputs)


@pytest.mark.turns(8)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("sizes", [(8, 5), (12, 70), (128, 65)])
def test_decodes(sizes: tuple[int, int], decay: str, delta: bool) -> None:
    """With all states wanted in their order nothing of the plan is uploaded; else it is."""
    for plan in (chain_plan([1, 1, 1]), chain_plan([1, 1, 1], [0, 2])):
        assert alone(plan, 3) == (len(plan.wanted) == 3)
        inputs = make(plan, decay, delta, ratio=2, sizes=sizes)
        assert_close(run(BACKEND, plan, inputs), plan, inputs)


def test_views_and_shared_heads() -> None:
    plan = chain_plan([70, 3])
    inputs = make(plan, "head", True)
    found = run(BACKEND, plan, inputs.mapped(scattered))
    assert_close(found, plan, inputs)
    before = inputs.mapped(torch.clone)
    found.out.fill_(7)
    found.states.fill_(7)
    for one, old in zip(vars_of(inputs), vars_of(before), strict=True):
        assert torch.equal(one, old)
    shared = replace(inputs, k=inputs.k[:, :1].expand_as(inputs.k), q=inputs.q[:, :1].expand_as(inputs.q))
    assert_close(run(BACKEND, plan, shared), plan, shared)


def vars_of(inputs: Any) -> list[torch.Tensor]:
    return [inputs.q, inputs.k, inputs.v, inputs.states, inputs.log_decay, inputs.beta]


def test_states_of_another_dtype_are_rounded_at_the_end() -> None:
    for plan in (chain_plan([70, 1]), tree_plan([[-1, 0, 0, 1]])):
        inputs = make(plan)
        half = replace(inputs, states=inputs.states.half())
        found = run(BACKEND, plan, half)
        assert found.states.dtype == torch.float16
        assert torch.equal(found.states, run(BACKEND, plan, half.to(torch.float32)).states.half())


# -- convolution -----------------------------------------------------------------------------------


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", sorted(CONVOLUTIONS))
def test_convolution(name: str) -> None:
    plan = CONVOLUTIONS[name]
    for turn, taps in enumerate((1, 4) if "long" in name else (1, 2, 4)):
        x, weight, bias, states = make_convolution(plan, taps, DTYPES[turn % len(DTYPES)])
        check_convolution(BACKEND.convolve(plan, x, weight, bias, states), plan, x, weight, bias, states)
        views = [scattered(one) for one in (x, weight, states)]
        check_convolution(BACKEND.convolve(plan, *views[:2], None, views[2]), plan, x, weight, None, states)


# -- states in a pool ------------------------------------------------------------------------------

PLANS = {
    "decodes": chain_plan([1] * 5),
    "some wanted": chain_plan([1] * 5, [0, 3]),
    "chunks and drafts": chain_plan([70, 1, 3], [0, 64, 69, 70, 71, 72, 73]),
    "trees": tree_plan([[-1, 0, 0, 1], [-1, -1, 0]]),
}


def placed(plan: RecurrencePlan, states: torch.Tensor) -> tuple[StatePlaces, torch.Tensor, torch.Tensor]:
    """Put the given states into a pool whose other rows are 7, in any order. The first and the last
    are one, as initial values are. Return the places, the pool as it was, and which rows stay."""
    rows = torch.randperm(len(states) + len(plan.wanted) + 2, generator=torch.Generator().manual_seed(5))
    sources, targets = rows[: len(states)], rows[len(states) : len(states) + len(plan.wanted)]
    sources[-1] = sources[0]
    pool = torch.full((len(rows), *states.shape[1:]), 7, dtype=states.dtype)
    pool[sources] = states
    stay = torch.ones(len(rows), dtype=torch.bool)
    stay[targets] = False
    return StatePlaces(pool, sources, targets), pool.clone(), stay


@pytest.mark.turns(20)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("decay", ["head", "column"])
def test_states_are_read_and_written_in_their_pool(name: str, decay: str) -> None:
    """With the very numbers of states that are handed over. What is not wanted stays."""
    plan = PLANS[name]
    inputs = make(plan, decay, True, ratio=2, sizes=(12, 9))
    places, before, stay = placed(plan, inputs.states)
    inputs = replace(inputs, states=before[places.sources_G])
    gates = {"scale": inputs.scale, "log_decay": inputs.log_decay, "beta_TH": inputs.beta}
    out = BACKEND.linear_attention_at(plan, inputs.q, inputs.k, inputs.v, places, **gates)
    expected = run(BACKEND, plan, inputs)
    assert out is not None
    assert torch.equal(out, expected.out)
    assert torch.equal(places.pool_S[places.targets_M], expected.states)
    assert torch.equal(places.pool_S[stay], before[stay])
    assert_close(Recurred(out, places.pool_S[places.targets_M]), plan, inputs)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("taps", [1, 4])
def test_inputs_of_convolutions_are_read_and_written_in_their_pool(name: str, taps: int) -> None:
    plan = PLANS[name]
    x, weight, bias, states = make_convolution(plan, taps, torch.float32)
    places, before, stay = placed(plan, states)
    states = before[places.sources_G]
    out = BACKEND.convolve_at(plan, x, weight, bias, places)
    assert out is not None
    found = Recurred(out, places.pool_S[places.targets_M])
    expected = BACKEND.convolve(plan, x, weight, bias, states)
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.states, expected.states)
    assert torch.equal(places.pool_S[stay], before[stay])
    check_convolution(found, plan, x, weight, bias, states)


def test_rows_without_tokens_may_write_one_place() -> None:
    """As rows of a captured decode do that no sequence has."""
    plan = PLANS["decodes"]
    inputs = make(plan, "head", True)
    places, before, stay = placed(plan, inputs.states)
    alike = places._replace(targets_M=torch.cat((places.targets_M[:3], places.targets_M[3:4].expand(2))))
    stay[places.targets_M[4]] = True
    gates = {"scale": inputs.scale, "log_decay": inputs.log_decay, "beta_TH": inputs.beta}
    assert BACKEND.linear_attention_at(plan, inputs.q, inputs.k, inputs.v, alike, **gates) is not None
    expected = run(BACKEND, plan, replace(inputs, states=before[places.sources_G]))
    assert torch.equal(places.pool_S[places.targets_M[:3]], expected.states[:3])
    assert torch.equal(places.pool_S[stay], before[stay])


def test_pools_that_the_programs_do_not_know_stay() -> None:
    plan = PLANS["decodes"]
    inputs = make(plan, dtype=torch.float64)
    places, before, _ = placed(plan, inputs.states.double())
    assert BACKEND.linear_attention_at(plan, inputs.q, inputs.k, inputs.v, places) is None
    x, weight, bias, states = make_convolution(plan, 3, torch.float64)
    inner, old, _ = placed(plan, states)
    assert BACKEND.convolve_at(plan, x, weight, bias, inner) is None
    assert torch.equal(places.pool_S, before)
    assert torch.equal(inner.pool_S, old)


def test_arguments_are_checked_against_the_places() -> None:
    plan = PLANS["decodes"]
    inputs = make(plan, sizes=(8, 5))
    places, before, _ = placed(plan, inputs.states)
    few = places._replace(sources_G=places.sources_G[:4])
    with pytest.raises(InvalidArgument, match="reads the given state 4; there are 4"):
        BACKEND.linear_attention_at(plan, inputs.q, inputs.k, inputs.v, few)
    with pytest.raises(InvalidArgument, match="q must have the shape"):
        BACKEND.linear_attention_at(plan, inputs.q[:3], inputs.k, inputs.v, places)
    x, weight, bias, states = make_convolution(plan, 3, torch.float32)
    inner, _, _ = placed(plan, states)
    with pytest.raises(InvalidArgument, match="reads the given state 4; there are 4"):
        BACKEND.convolve_at(plan, x, weight, bias, inner._replace(sources_G=inner.sources_G[:4]))
    assert torch.equal(places.pool_S, before)


# -- steps -----------------------------------------------------------------------------------------


def check_steps(plan: RecurrencePlan, steps: Steps) -> None:
    """Follow the programs: each row is run once, from the state after its parent."""
    states: dict[tuple[str, int], int] = {}
    runs: list[list[int]] = []
    for first, count, given in steps.chunked.tolist():
        state = given
        for row, length, target in steps.chunks[first : first + count].tolist():
            assert 1 <= length <= ROWS
            assert (plan.parents[row], plan.given[row]) == (
                (-1, state) if row == first_row(plan, row) else (row - 1, -1)
            )
            assert (plan.parents[row + 1 : row + length] == np.arange(row, row + length - 1)).all()
            assert not set(plan.wanted) & set(range(row, row + length - 1))
            if target >= 0:
                states["wanted", target] = row + length - 1
            runs.append(list(range(row, row + length)))
    for first, count, _ in steps.walked.tolist():
        last = None
        for row in range(first, first + count):
            source, target, keep = steps.rows[row].tolist()
            if source >= 0:
                assert (plan.parents[row], plan.given[row]) == (-1, source)
            else:
                assert plan.parents[row] == (last if source == -1 else states["kept", -2 - source])
            for name, place in (("wanted", target), ("kept", keep)):
                if place >= 0:
                    states[name, place] = row
            last = row
        runs.append(list(range(first, first + count)))
    assert sorted(row for run_ in runs for row in run_) == list(range(plan.num_rows))
    assert [states["wanted", place] for place in range(len(plan.wanted))] == plan.wanted.tolist()
    assert {place for name, place in states if name == "kept"} == set(range(steps.kept))


def first_row(plan: RecurrencePlan, row: int) -> int:
    return int(plan.starts[np.searchsorted(plan.starts, row, side="right") - 1])


def test_steps_follow_the_plan() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        share = rng.choice([0, 0.02, 0.3, 1])
        if rng.random() < 0.5:
            lengths = [rng.choice([0, 1, 2, rng.randint(1, 300)]) for _ in range(rng.randint(1, 4))]
            plan = chain_plan([*lengths, 1])
        else:
            along = rng.choice([0.5, 0.99])
            trees = [
                [node - 1 if rng.random() < along and node else rng.randint(-1, node - 1) for node in range(size)]
                for size in (rng.choice([1, 4, 40, 200]) for _ in range(rng.randint(1, 3)))
            ]
            plan = tree_plan(trees)
        if plan.num_rows:
            chosen = [row for row in range(plan.num_rows) if rng.random() < share]
            part = replace(plan, wanted=np.array(chosen, dtype=np.int64))
            check_steps(part, steps_of(part, ROWS))


def test_long_chains_run_in_chunks_and_drafts_row_by_row() -> None:
    steps = steps_of(chain_plan([200, 1, 8, 9]), ROWS)
    assert steps.chunks[:, 1].tolist() == [64, 64, 64, 8, 9]
    assert steps.walked[:, 1].tolist() == [1, 8]
    assert len(steps_of(chain_plan([8], range(8)), ROWS).chunks) == 0
    assert len(cut(chain_plan([200]), ROWS)) == 4


# -- where it runs ---------------------------------------------------------------------------------


def test_layers_of_a_forward_share_what_is_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[Any] = []
    usual = triton_recurrence.upload
    monkeypatch.setattr(triton_recurrence, "upload", lambda *given: (uploads.append(given), usual(*given))[1])
    backend = CarriedRecurrence()
    for plan, expected in ((chain_plan([9, 2]), 2), (chain_plan([2, 9]), 4), (chain_plan([1, 1]), 4)):
        inputs = make(plan, heads=1)
        x, weight, bias, states = make_convolution(plan, 3)
        for _ in range(3):
            run(backend, plan, inputs)
            check_convolution(backend.convolve(plan, x, weight, bias, states), plan, x, weight, bias, states)
        assert len(uploads) == expected


def test_what_the_programs_do_not_know_runs_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """float64, large heads: the same results by the form for all devices."""
    taken: list[RecurrencePlan] = []
    usual = ChunkedRecurrence.linear_attention

    def counted(self: ChunkedRecurrence, plan: RecurrencePlan, *args: Any, **kwargs: Any) -> Any:
        taken.append(plan)
        return usual(self, plan, *args, **kwargs)

    monkeypatch.setattr(ChunkedRecurrence, "linear_attention", counted)
    plan = chain_plan([3, 1])
    for number, inputs in enumerate(
        (
            make(plan, dtype=torch.float64),
            replace(make(plan), states=make(plan).states.double()),
            make(plan, sizes=(257, 2), heads=1),
            make(plan, "column", sizes=(129, 2), heads=1),
        )
    ):
        assert_close(run(BACKEND, plan, inputs), plan, inputs)
        assert len(taken) == number + 1
    run(BACKEND, plan, make(plan))
    assert len(taken) == 4


def test_gpus_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(triton_recurrence.fastest_recurrence(torch.device("cpu"))) is ChunkedRecurrence
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, kind in (((7, 5), ChunkedRecurrence), ((9, 0), TritonRecurrence)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert type(triton_recurrence.fastest_recurrence(cuda)) is kind
