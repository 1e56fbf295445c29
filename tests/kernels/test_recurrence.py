"""The recurrence backends against a definition in float64 by loops, over chains, trees, pieces and
every kind of decay.

The definition follows the words of ``RecurrenceBackend`` number by number and shares no code with
the backends. How far a float32 run may be off is derived from what the reference itself is off at
that precision; float64 runs are held to float64's own.

Letters: T rows; B entries; G given states; M wanted rows; Hq, H heads; K, V sizes of keys and
values; C channels; W taps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.triton_machine import CarriedRecurrence
from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.contracts.recurrence import Recurred, RecurrenceBackend, RecurrencePlan
from quire.kernels.recurrence import chunked as kernel
from quire.kernels.recurrence import decays
from quire.kernels.recurrence.chunked import CACHED, CHUNK, PIECE, ChunkedRecurrence
from quire.kernels.recurrence.decays import weigh
from quire.kernels.recurrence.groups import cut
from quire.ops.recurrence import ReferenceRecurrence

BACKENDS: dict[str, RecurrenceBackend] = {"reference": ReferenceRecurrence(), "torch": ChunkedRecurrence()}
DECAYS = ("none", "head", "column")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=[*sorted(BACKENDS), pytest.param("triton", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> RecurrenceBackend:
    """Each backend; Triton's on a GPU only, since its interpreter would take minutes for them
    all."""
    return BACKENDS[request.param] if request.param in BACKENDS else CarriedRecurrence()


@pytest.fixture(autouse=True)
def _needs_its_device(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


# -- plans -----------------------------------------------------------------------------------------


def chain_plan(lengths: Sequence[int], wanted: Sequence[int] | None = None) -> RecurrencePlan:
    """Chains, by default with the state after each one's last row wanted."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    parents = np.arange(starts[-1]) - 1
    parents[starts[:-1]] = -1
    given = np.full(starts[-1], -1, dtype=np.int64)
    given[starts[:-1]] = np.arange(len(lengths))
    ends = starts[1:] - 1 if wanted is None else np.array(sorted(wanted), dtype=np.int64)
    return RecurrencePlan(starts=starts, parents=parents, given=given, wanted=ends, chains=True)


def tree_plan(trees: Sequence[Sequence[int]], wanted: Sequence[int] | None = None) -> RecurrencePlan:
    """Trees by the parents within each: j is its node j, ``-1 - g`` the given state g of the batch.

    All rows wanted by default.
    """
    starts = np.concatenate([[0], np.cumsum([len(tree) for tree in trees])]).astype(np.int64)
    parents, states = [], []
    for start, tree in zip(starts.tolist(), trees, strict=False):
        for parent in tree:
            parents.append(start + parent if parent >= 0 else -1)
            states.append(-1 - parent if parent < 0 else -1)
    rows = range(len(parents)) if wanted is None else sorted(wanted)
    return RecurrencePlan(
        starts=starts,
        parents=np.array(parents, dtype=np.int64),
        given=np.array(states, dtype=np.int64),
        wanted=np.array(list(rows), dtype=np.int64),
        chains=False,
    )


def number_given(plan: RecurrencePlan) -> int:
    return int(plan.given.max(initial=-1)) + 1


# -- the definition --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """Arguments of ``linear_attention``."""

    q: Tensor
    k: Tensor
    v: Tensor
    states: Tensor
    scale: float
    log_decay: Tensor | None
    beta: Tensor | None

    def mapped(self, change: Any) -> Inputs:
        log_decay = None if self.log_decay is None else change(self.log_decay)
        beta = None if self.beta is None else change(self.beta)
        return Inputs(change(self.q), change(self.k), change(self.v), change(self.states), self.scale, log_decay, beta)

    def to(self, dtype: torch.dtype) -> Inputs:
        return self.mapped(lambda x: x.to(dtype))

    def rows(self, rows: slice | list[int], states: Tensor) -> Inputs:
        """Some rows, from other states."""
        return replace(replace(self, states=self.q).mapped(lambda x: x[rows]), states=states)


def run(backend: RecurrenceBackend, plan: RecurrencePlan, inputs: Inputs) -> Recurred:
    return backend.linear_attention(
        plan,
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.states,
        scale=inputs.scale,
        log_decay=inputs.log_decay,
        beta_TH=inputs.beta,
    )


def define(plan: RecurrencePlan, inputs: Inputs) -> Recurred:
    """The words of the contract, in float64: column by column of the state's keys, head by head."""
    x = inputs.to(torch.float64)
    group = x.q.shape[1] // x.k.shape[1]
    out = np.zeros((plan.num_rows, x.q.shape[1], x.v.shape[2]))
    after: list[np.ndarray[Any, Any]] = []
    q, k, v, states = x.q.numpy(), x.k.numpy(), x.v.numpy(), x.states.numpy()
    for row in range(plan.num_rows):
        parent = plan.parents[row]
        state = (states[plan.given[row]] if parent < 0 else after[parent]).copy()
        for head in range(k.shape[1]):
            for column in range(k.shape[2]):
                if x.log_decay is not None:
                    own = x.log_decay[row, head]
                    state[head, column] *= math.exp(float(own if own.dim() == 0 else own[column]))
            u = v[row, head]
            if x.beta is not None:
                u = float(x.beta[row, head]) * (u - k[row, head] @ state[head])
            for column in range(k.shape[2]):
                state[head, column] += k[row, head, column] * u
        for head in range(q.shape[1]):
            out[row, head] = x.scale * (q[row, head] @ state[head // group])
        after.append(state)
    kept = np.array([after[row] for row in plan.wanted]).reshape(len(plan.wanted), *states.shape[1:])
    return Recurred(torch.from_numpy(out), torch.from_numpy(kept))


def make(
    plan: RecurrencePlan,
    decay: str = "head",
    delta: bool = False,
    *,
    heads: int = 2,
    ratio: int = 1,
    sizes: tuple[int, int] = (8, 5),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    log_decay: Tensor | None = None,
) -> Inputs:
    """Random inputs as models have them: with the delta rule the keys have length 1, or the states
    would explode.
    """
    generator = torch.Generator().manual_seed(seed)
    total, (keys, values) = plan.num_rows, sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    k = normal(total, heads, keys)
    shape = (total, heads, keys) if decay == "column" else (total, heads)
    # From hardly any decay to nearly complete forgetting within a few rows.
    rates = -torch.rand(shape, generator=generator, dtype=torch.float64) * 10 ** normal(*shape).clamp(-3, 1)
    inputs = Inputs(
        normal(total, heads * ratio, keys),
        torch.nn.functional.normalize(k, dim=-1) if delta else k,
        normal(total, heads, values),
        normal(number_given(plan), heads, keys, values),
        0.7,
        None if decay == "none" else rates if log_decay is None else log_decay.expand(shape).to(torch.float64),
        torch.rand(total, heads, generator=generator, dtype=torch.float64) if delta else None,
    )
    # What is compared starts from the rounded values.
    return replace(inputs.to(dtype), states=inputs.states.to(torch.promote_types(dtype, torch.float32)))


def assert_close(found: Recurred, plan: RecurrencePlan, inputs: Inputs, reference: Recurred | None = None) -> None:
    """Within twice what the reference is off at this precision, and a rounding of the largest
    number for each row and each term.

    Outputs in a narrow dtype may be off by half of its spacing beside that.
    """
    exact = define(plan, inputs)
    reference = reference or run(BACKENDS["reference"], plan, inputs)
    terms = plan.num_rows + inputs.k.shape[2]
    for name, one, theirs, expected in zip(("out", "states"), found, reference, exact, strict=True):
        assert one.shape == expected.shape, name
        assert one.dtype == theirs.dtype, name
        assert one.is_contiguous(), name
        if not expected.numel():
            continue
        largest = float(expected.abs().max())
        compute = torch.promote_types(one.dtype, torch.float32)
        bound = 2 * float((theirs.double() - expected).abs().max()) + terms * torch.finfo(compute).eps * largest
        assert bound < 1e-2 * largest, "the bound itself is too wide to say anything"
        error = float((one.double() - expected).abs().max())
        assert error <= bound, f"{name}: error {error:.2e}, expected at most {bound:.2e}"


# -- examples --------------------------------------------------------------------------------------


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32).reshape(-1, 1, 1)


@pytest.mark.parametrize("pieces", [(3,), (1, 1, 1), (1, 2), (2, 1)])
def test_example_of_linear_attention(backend: RecurrenceBackend, pieces: tuple[int, ...]) -> None:
    q, k, v = column(1, 1, 0.5), column(1, 2, 1), column(2, 1, 3)
    log_decay = torch.tensor([0, 0, math.log(0.5)]).reshape(-1, 1)
    expected_out, expected_states = column(2, 4, 2.5), column(2, 4, 5)
    state, start = torch.zeros(1, 1, 1, 1), 0
    for count in pieces:
        rows = slice(start, start + count)
        plan = chain_plan([count], range(count))
        out, states = backend.linear_attention(plan, q[rows], k[rows], v[rows], state, log_decay=log_decay[rows])
        torch.testing.assert_close(out, expected_out[rows])
        torch.testing.assert_close(states[:, 0], expected_states[rows])
        state, start = states[-1:], start + count


def test_example_of_the_delta_rule(backend: RecurrenceBackend) -> None:
    plan, one = chain_plan([2], [0, 1]), column(1, 1)
    beta, state = torch.ones(2, 1), torch.zeros(1, 1, 1, 1)
    out, states = backend.linear_attention(plan, one, one, column(2, 5), state, beta_TH=beta)
    assert out.flatten().tolist() == [2, 5]
    assert states.flatten().tolist() == [2, 5]
    (out, states) = backend.linear_attention(chain_plan([2]), one, one, column(2, 5), state, beta_TH=beta)
    assert (out.flatten().tolist(), states.flatten().tolist()) == ([2, 5], [5])


def test_example_of_the_convolution(backend: RecurrenceBackend) -> None:
    """Weights 1, 10, 100: the digits say which inputs were read."""
    x, weight = torch.tensor([[3.0], [4.0], [5.0]]), torch.tensor([[1.0, 10.0, 100.0]])
    state = torch.tensor([[[1.0], [2.0]]])
    out, states = backend.convolve(chain_plan([3]), x, weight, torch.tensor([0.5]), state)
    assert out.flatten().tolist() == [321.5, 432.5, 543.5]
    assert states.flatten().tolist() == [4, 5]
    assert state.flatten().tolist() == [1, 2]


# -- chains ----------------------------------------------------------------------------------------


@pytest.mark.product(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 65, 200, 300])
def test_chains(backend: RecurrenceBackend, length: int, decay: str, delta: bool, dtype: torch.dtype) -> None:
    plan = chain_plan([length])
    inputs = make(plan, decay, delta, dtype=dtype, seed=length)
    assert_close(run(backend, plan, inputs), plan, inputs)


@pytest.mark.product(6)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_ragged_batches_and_query_groups(backend: RecurrenceBackend, ratio: int, decay: str, delta: bool) -> None:
    plan = chain_plan([1, 70, 3, 1, 64, 5, 129, 1])
    inputs = make(plan, decay, delta, ratio=ratio, seed=ratio)
    assert_close(run(backend, plan, inputs), plan, inputs)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("entries", [1, 5])
def test_decodes(backend: RecurrenceBackend, entries: int, decay: str, delta: bool) -> None:
    plan = chain_plan([1] * entries)
    inputs = make(plan, decay, delta, ratio=2, seed=entries)
    assert_close(run(backend, plan, inputs), plan, inputs)


@pytest.mark.parametrize("decay", ["head", "column"])
def test_keys_that_are_alike(decay: str) -> None:
    """The delta rule where its triangular system is least like the identity: one key, and a beta
    near or at 1.
    """
    plan = chain_plan([150])
    inputs = make(plan, decay, True, log_decay=torch.full((150, 1, 1) if decay == "column" else (150, 1), -1e-3))
    assert inputs.beta is not None
    for beta in (0.9, 1.0):
        alike = replace(inputs, k=inputs.k[:1].expand_as(inputs.k), beta=torch.full_like(inputs.beta, beta))
        assert_close(run(BACKENDS["torch"], plan, alike), plan, alike)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("share", [0.2, 0.99, 1.01, 3.0])
def test_columns_that_fade_up_to_the_limit_of_quotients(
    share: float, delta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where at least so much is left of a chunk's columns they are divided by it, else weights are
    products only; on both sides of the limit the results are those of the definition.
    """
    taken: list[str] = []
    for name in ("_by_quotients", "_by_column"):
        way = getattr(decays, name)
        monkeypatch.setattr(decays, name, lambda *given, name=name, way=way: (taken.append(name), way(*given))[1])
    plan = chain_plan([3 * CHUNK])
    rate = share * math.log(decays.LEAST_LEFT) / CHUNK
    made = make(plan, "column", delta, seed=int(10 * share))
    assert made.log_decay is not None
    inputs = replace(made, log_decay=torch.full_like(made.log_decay, rate))
    assert_close(run(BACKENDS["torch"], plan, inputs), plan, inputs)
    assert set(taken) == {"_by_quotients" if share < 1 else "_by_column"}


@pytest.mark.parametrize("size", [64, 256, 300])
@pytest.mark.parametrize("rate", [-0.5, -2.0, -5.0])
def test_no_subnormal_numbers_in_products(size: int, rate: float) -> None:
    """What fades by column is 0 before it is subnormal: such numbers take a CPU up to a hundred
    times as long.
    """
    q, k = torch.ones(1, 1, 1, 1, 32, 4), torch.ones(1, 1, 1, 32, 4)
    log_decay = (rate * torch.linspace(0.5, 2, 4)).expand(1, 1, 1, 32, 4)
    (weighed,) = weigh([q * size], k, log_decay, 1)
    for found in (*weighed.scores, *weighed.readers, weighed.k_XKL, weighed.total):
        assert found is not None
        assert not bool(((found != 0) & (found.abs() < torch.finfo(found.dtype).tiny)).any())


@pytest.mark.product(4)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_wanted_rows(backend: RecurrenceBackend, decay: str, delta: bool) -> None:
    """Anywhere: at chunk boundaries, next to each other, at the ends, none of an entry, none at
    all.
    """
    lengths = [150, 4, 66, 1, 9]
    for wanted in (
        [0, 1, 62, 63, 64, 100, 149, 150, 153, 219],
        [63, 127, 149, 153, 219, 220, 229],
        list(range(230)),
        [],
    ):
        plan = chain_plan(lengths, wanted)
        inputs = make(plan, decay, delta, seed=len(wanted))
        assert_close(run(backend, plan, inputs), plan, inputs)


@pytest.mark.product(3)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("pieces", [(64, 66), (65, 65), (1, 129), (128, 1, 1), (40, 40, 50), (1,) * 5 + (125,)])
def test_in_pieces_with_the_state_carried(pieces: tuple[int, ...], decay: str, delta: bool) -> None:
    whole = chain_plan([130])
    inputs = make(whole, decay, delta)
    outs, state, start = [], inputs.states, 0
    for count in pieces:
        part = run(BACKENDS["torch"], chain_plan([count]), inputs.rows(slice(start, start + count), state))
        outs.append(part.out)
        state, start = part.states, start + count
    assert_close(Recurred(torch.cat(outs), state), whole, inputs)


@pytest.mark.product(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", ["head", "column"])
@pytest.mark.parametrize("kind", ["zero", "strong", "huge", "forget", "mixed", "all"])
def test_extreme_decays(backend: RecurrenceBackend, kind: str, decay: str, delta: bool, dtype: torch.dtype) -> None:
    """-inf is complete forgetting, exactly; nothing overflows or is not a number, whatever else is
    in the chunk.
    """
    plan = chain_plan([100, 7, 1], [49, 50, 51, 99, 106, 107])
    rates = torch.full((plan.num_rows, 1, 1) if decay == "column" else (plan.num_rows, 1), -0.02, dtype=torch.float64)
    if kind == "zero":
        rates = torch.zeros_like(rates)
    elif kind == "strong":
        rates[::3] = -60.0
    elif kind == "huge":
        rates[::5] = -1e38 if dtype == torch.float32 else -1e300
    elif kind == "forget":
        rates[[20, 50, 51, 101, 107]] = -torch.inf
    elif kind == "mixed":
        rates = torch.randn(plan.num_rows, 2, 8, dtype=torch.float64).abs().neg()
        rates[torch.rand(rates.shape) < 0.2] = -torch.inf
        rates = rates if decay == "column" else rates[..., 0]
    else:
        rates[:] = -torch.inf
    inputs = make(plan, decay, delta, log_decay=rates, dtype=dtype)
    found = run(backend, plan, inputs)
    assert all(bool(one.isfinite().all()) for one in found)
    assert_close(found, plan, inputs)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", ["head", "column"])
def test_nothing_is_left_of_what_is_forgotten(backend: RecurrenceBackend, decay: str, delta: bool) -> None:
    """To the bit: another past gives the same."""
    plan = chain_plan([90])
    rates = torch.full((90, 1, 1) if decay == "column" else (90, 1), -0.1)
    rates[70] = -torch.inf
    one, other = make(plan, decay, delta, log_decay=rates), make(plan, decay, delta, log_decay=rates, seed=1)
    other = Inputs(
        torch.cat([other.q[:70], one.q[70:]]),
        torch.cat([other.k[:70], one.k[70:]]),
        torch.cat([1e9 * other.v[:70], one.v[70:]]),
        1e9 * other.states,
        one.scale,
        one.log_decay,
        one.beta,
    )
    found, others = run(backend, plan, one), run(backend, plan, other)
    assert torch.equal(found.out[70:], others.out[70:])
    assert torch.equal(found.states, others.states)
    assert not torch.equal(found.out[:70], others.out[:70])


# -- trees -----------------------------------------------------------------------------------------

TREES: dict[str, list[list[int]]] = {
    "chain": [[-1, 0, 1, 2, 3]],
    "star": [[-1, 0, 0, 0, 0]],
    "roots": [[-1, -1, -1, 2, 0, 1]],
    "levels": [[-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6]],
    "depth first": [[-1, 0, 1, 2, 0, 4, 5, 4, 7]],
    "grown over earlier nodes": [[-1, -2, -3, 1, 0, -2, 5]],
    "given states in another order": [[-3, -1, -2, 0], [-5, -4]],
    "several": [[-1, 0, 0, 2], [-2, 0, 1], [-3], [-4, -5, 1, 1]],
    "beside long chains": [[-1, *range(140)], [-2, 0, 0, 1, 2], [-3, *range(66)]],
    "branches off a long chain": [[-1, *range(80), 40, 81, 82, 80, 0]],
}


@pytest.mark.product(5)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("tree", sorted(TREES))
def test_trees(backend: RecurrenceBackend, tree: str, decay: str, delta: bool) -> None:
    plan = tree_plan(TREES[tree])
    for wanted in (plan.wanted, plan.wanted[1::3], plan.wanted[:0]):
        part = replace(plan, wanted=wanted)
        inputs = make(part, decay, delta, ratio=2)
        assert_close(run(backend, part, inputs), part, inputs)


def test_a_chain_is_few_pieces_and_a_bushy_tree_its_levels() -> None:
    """What runs together: of a chain only whole chunks, of equal chains all at once."""
    assert [[group.longest for group in groups] for groups in cut(chain_plan([200]), 64)] == [[64], [64], [64], [8]]
    (groups, *rest) = cut(chain_plan([64] * 3 + [1] * 5), 64)
    assert [(group.longest, len(group.pieces)) for group in groups] == [(1, 5), (64, 3)]
    assert rest == []
    levels = cut(tree_plan([[-1, 0, 0, 1, 1, 2, 2]]), 64)
    assert [[(group.longest, len(group.pieces)) for group in groups] for groups in levels] == [
        [(1, 1)],
        [(1, 2)],
        [(1, 4)],
    ]
    # Of a tree that is one chain with its end wanted: as of a chain.
    (only,) = cut(tree_plan([[-1, *range(9)]], [9]), 64)
    assert [group.longest for group in only] == [10]
    assert len(cut(tree_plan([[-1, *range(9)]]), 64)) == 10


def test_equal_to_paths_run_as_chains() -> None:
    """Each node is what the chain of its ancestors is, decode by decode."""
    plan = tree_plan([[-1, 0, 0, 1, 3, 2, 5, 5]])
    inputs = make(plan, "head", True)
    found = run(BACKENDS["torch"], plan, inputs)
    for path in ([0, 1, 3, 4], [0, 2, 5, 6], [0, 2, 5, 7]):
        chain = chain_plan([len(path)])
        alone = inputs.rows(path, inputs.states)
        part = run(BACKENDS["torch"], chain, alone)
        assert_close(Recurred(found.out[path], found.states[path[-1:]]), chain, alone, part)


# -- dtypes, layouts, devices ----------------------------------------------------------------------


@pytest.mark.product(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_narrow_inputs_are_summed_in_float32(
    backend: RecurrenceBackend, decay: str, delta: bool, dtype: torch.dtype
) -> None:
    plan = chain_plan([70, 1, 5])
    inputs = make(plan, decay, delta, dtype=dtype)
    found = run(backend, plan, inputs)
    assert (found.out.dtype, found.states.dtype) == (dtype, torch.float32)
    assert_close(found, plan, inputs)
    wide = run(backend, plan, inputs.to(torch.float32))
    assert torch.equal(found.out, wide.out.to(dtype))
    assert torch.equal(found.states, wide.states)


def test_dtypes_of_states_and_mixed_inputs(backend: RecurrenceBackend) -> None:
    for plan in (chain_plan([70, 1]), chain_plan([1, 1]), tree_plan([[-1, 0, 0]])):
        inputs = make(plan)
        half = replace(inputs, states=inputs.states.to(torch.bfloat16))
        found = run(backend, plan, half)
        assert (found.out.dtype, found.states.dtype) == (torch.float32, torch.bfloat16)
        # Rounded at the end alone.
        assert torch.equal(found.states, run(backend, plan, half.to(torch.float32)).states.to(torch.bfloat16))
        double = run(backend, plan, replace(inputs, states=inputs.states.double()))
        assert (double.out.dtype, double.states.dtype) == (torch.float32, torch.float64)
        exact, terms = define(plan, inputs).states, plan.num_rows + inputs.k.shape[2]
        assert float((double.states - exact).abs().max()) <= terms * 2.0**-52 * float(exact.abs().max())
        mixed = run(backend, plan, replace(inputs, q=inputs.q.bfloat16(), k=inputs.k.bfloat16()))
        assert mixed.out.dtype == torch.float32


def scattered(x: Tensor) -> Tensor:
    """The same values, no two of them neighbours in memory."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype).transpose(0, -2).contiguous()
    view = wide.transpose(0, -2)[..., ::2]
    view.copy_(x)
    return view


@pytest.mark.product(6)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("lengths", [(70, 3), (1, 1), (65,)])
def test_views_of_any_layout(backend: RecurrenceBackend, lengths: tuple[int, ...], decay: str, delta: bool) -> None:
    plan = chain_plan(lengths)
    inputs = make(plan, decay, delta, heads=4)
    found, other = run(backend, plan, inputs), run(backend, plan, inputs.mapped(scattered))
    assert_close(other, plan, inputs, found)
    # One q and k for all heads, as Mamba-2 has them for a single group; and one k for all with
    # queries of their own.
    shared = replace(inputs, k=inputs.k[:, :1].expand_as(inputs.k))
    for q in (inputs.q[:, :1].expand_as(inputs.q), inputs.q):
        expanded = replace(shared, q=q)
        assert_close(run(backend, plan, expanded), plan, expanded, run(BACKENDS["reference"], plan, expanded))
    rows = replace(inputs, states=inputs.states[:1].expand_as(inputs.states))
    assert_close(run(backend, plan, rows), plan, rows)


@pytest.mark.product(3)
@pytest.mark.parametrize("lengths", [(70, 3), (1, 1), (1,)])
@pytest.mark.parametrize("decay", DECAYS)
def test_inputs_stay_and_results_are_fresh(backend: RecurrenceBackend, lengths: tuple[int, ...], decay: str) -> None:
    plan = chain_plan(lengths)
    inputs = make(plan, decay, True)
    before = inputs.mapped(torch.clone)
    found = run(backend, plan, inputs)
    found.out.fill_(7)
    found.states.fill_(7)
    for name in ("q", "k", "v", "states", "log_decay", "beta"):
        if getattr(inputs, name) is not None:
            assert torch.equal(getattr(inputs, name), getattr(before, name)), name


@pytest.mark.parametrize("decay", DECAYS)
def test_other_entries_are_not_touched_by_what_is_not_a_number(backend: RecurrenceBackend, decay: str) -> None:
    """Nor those that are padded beside it: with rows of 6 and 8 tokens it is in one group."""
    plan = chain_plan([70, 6, 5, 8, 66])
    inputs = make(plan, decay, True)
    clean = run(backend, plan, inputs)
    rows = slice(76, 81)
    inputs.v[rows], inputs.k[rows], inputs.states[2] = torch.nan, torch.inf, torch.nan
    found = run(backend, plan, inputs)
    others = [row for row in range(plan.num_rows) if not 76 <= row < 81]
    assert torch.equal(found.out[others], clean.out[others])
    assert torch.equal(found.states[[0, 1, 3, 4]], clean.states[[0, 1, 3, 4]])
    assert bool(found.out[rows].isnan().all())


@pytest.mark.product(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_on_a_device(backend: RecurrenceBackend, decay: str, delta: bool, device: str) -> None:
    for plan in (chain_plan([70, 1, 5, 6]), chain_plan([1, 1, 1]), tree_plan(TREES["several"])):
        inputs = make(plan, decay, delta, ratio=2)
        out, states = run(backend, plan, inputs.mapped(lambda x: x.to(device)))
        assert (out.device.type, states.device.type) == (device, device)
        assert_close(Recurred(out.cpu(), states.cpu()), plan, inputs)
        x, weight, bias, given_states = make_convolution(plan, 4)
        moved = [one.to(device) for one in (x, weight, bias, given_states)]
        found = backend.convolve(plan, *moved)
        check_convolution(Recurred(found.out.cpu(), found.states.cpu()), plan, x, weight, bias, given_states)


# -- convolution -----------------------------------------------------------------------------------


def make_convolution(
    plan: RecurrencePlan, taps: int, dtype: torch.dtype = torch.float32, channels: int = 5, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias, states"""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((plan.num_rows, channels), (channels, taps), (channels,), (number_given(plan), taps - 1, channels))
    x, weight, bias, states = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, bias, states


def check_convolution(
    found: Recurred, plan: RecurrencePlan, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor
) -> None:
    """Against loops in float64.

    Of a sum of W products and a bias, each step rounds no more than all terms together.
    """
    taps = weight.shape[1]
    for row in range(plan.num_rows):
        inputs, at = [], row
        while at >= 0:
            inputs.insert(0, x[at])
            root, at = at, int(plan.parents[at])
        inputs = [*states[plan.given[root]], *inputs]
        terms = [inputs[len(inputs) - 1 - tap].double() * weight[:, taps - 1 - tap].double() for tap in range(taps)]
        terms += [] if bias is None else [bias.double()]
        expected, size = sum(terms), sum(term.abs() for term in terms)
        error = (found.out[row].double() - expected).abs()
        compute = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        allowed = (taps + 1) * compute * size
        if x.dtype in (torch.bfloat16, torch.float16):
            allowed += torch.finfo(x.dtype).eps / 2 * expected.abs()
        assert bool((error <= allowed).all()), row
        where = np.flatnonzero(plan.wanted == row)
        if where.size:
            kept = torch.stack(inputs[len(inputs) - taps + 1 :]) if taps > 1 else states[0]
            assert torch.equal(found.states[int(where[0])], kept.to(states.dtype)), row
    assert found.out.shape == x.shape
    assert found.states.shape == (len(plan.wanted), *states.shape[1:])
    assert (found.out.dtype, found.states.dtype) == (x.dtype, states.dtype)
    assert found.out.is_contiguous()
    assert found.states.is_contiguous()


CONVOLUTIONS: dict[str, RecurrencePlan] = {
    "decode": chain_plan([1]),
    "decodes": chain_plan([1, 1, 1]),
    "decodes, some wanted": chain_plan([1, 1, 1], [0, 2]),
    "short": chain_plan([2, 1, 5, 3]),
    "short, all wanted": chain_plan([2, 1, 5, 3], range(11)),
    "long": chain_plan([70]),
    "long and short": chain_plan([130, 1, 2, 3], [0, 1, 2, 129, 131, 135]),
    "long, nothing wanted": chain_plan([64], []),
    **{f"tree: {name}": tree_plan(tree) for name, tree in TREES.items()},
}


TAPS = (1, 2, 3, 4, 7)


@pytest.mark.product(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(CONVOLUTIONS))
def test_convolution(backend: RecurrenceBackend, name: str, dtype: torch.dtype) -> None:
    """Each plan with each number of taps, and in each type."""
    plan = CONVOLUTIONS[name]
    others = sorted(CONVOLUTIONS).index(name) + dtype.itemsize
    for taps in TAPS if dtype == torch.float32 else (TAPS[others % len(TAPS)], 4):
        x, weight, bias, states = make_convolution(plan, taps, dtype)
        check_convolution(backend.convolve(plan, x, weight, bias, states), plan, x, weight, bias, states)
        views = [scattered(one) for one in (x, weight, states)]
        check_convolution(backend.convolve(plan, *views[:2], None, views[2]), plan, x, weight, None, states)


def test_convolution_leaves_its_inputs_and_takes_states_of_another_dtype(backend: RecurrenceBackend) -> None:
    long = chain_plan([40], [0, 1, 2, 3, 39])
    for plan in (chain_plan([1, 1]), long, chain_plan([2, 3]), tree_plan(TREES["several"])):
        x, weight, bias, states = make_convolution(plan, 4, torch.bfloat16)
        before = [one.clone() for one in (x, weight, bias, states)]
        for found in backend.convolve(plan, x, weight, bias, states):
            found.fill_(9)
        assert all(torch.equal(one, old) for one, old in zip((x, weight, bias, states), before, strict=True))
        wide = states.float() + 2.0**-20
        check_convolution(backend.convolve(plan, x, weight, bias, wide), plan, x, weight, bias, wide)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(3, 3, 8)}, "multiple of the 2 heads"),
        ({"q": torch.zeros(3, 0, 8)}, "multiple of the 2 heads"),
        ({"q": torch.zeros(3, 8)}, "q must be"),
        ({"q": torch.zeros(4, 2, 8)}, "q must have the shape"),
        ({"k": torch.zeros(3, 2, 7)}, "k must have the shape"),
        ({"k": torch.zeros(3, 1, 8)}, "k must have the shape"),
        ({"v": torch.zeros(3, 2, 6)}, "v must have the shape"),
        ({"states": torch.zeros(1, 2, 8)}, "states must be"),
        ({"states": torch.zeros(0, 2, 8, 5)}, "reads the given state 0; there are 0"),
        ({"log_decay": torch.zeros(3, 2, 5)}, "log_decay must have the shape"),
        ({"log_decay": torch.zeros(3)}, "log_decay must have the shape"),
        ({"beta": torch.zeros(3, 1)}, "beta must have the shape"),
        ({"beta": torch.zeros(3, 2, dtype=torch.int64)}, "beta must be of a floating point type"),
        ({"v": torch.zeros(3, 2, 5, device="meta")}, "v must be on the device"),
    ],
)
def test_wrong_arguments(backend: RecurrenceBackend, change: dict[str, Tensor], words: str) -> None:
    plan = chain_plan([3])
    inputs = replace(make(plan, "head", True), **change)
    with pytest.raises(InvalidArgument, match=words.replace("[", r"\[")):
        run(backend, plan, inputs)


@pytest.mark.parametrize(
    ("index", "given_tensor", "words"),
    [
        (0, torch.zeros(3), "x must be"),
        (0, torch.zeros(2, 5), "x must have the shape"),
        (0, torch.zeros(3, 5, dtype=torch.int32), "floating point"),
        (1, torch.zeros(5, 0), "at least one tap"),
        (1, torch.zeros(4, 4), "x must have the shape"),
        (2, torch.zeros(4), "bias must have the shape"),
        (3, torch.zeros(1, 2, 5), "states must have the shape"),
        (3, torch.zeros(0, 3, 5), "there are 0"),
        (3, torch.zeros(1, 3, 5, device="meta"), "on the device"),
    ],
)
def test_wrong_arguments_of_the_convolution(
    backend: RecurrenceBackend, index: int, given_tensor: Tensor, words: str
) -> None:
    plan = chain_plan([3])
    arguments = list(make_convolution(plan, 4))
    arguments[index] = given_tensor
    with pytest.raises(InvalidArgument, match=words):
        backend.convolve(plan, *arguments)


# -- random ----------------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> RecurrencePlan:
    """Chains with wanted rows, or trees over several given states."""
    pick = random.Random(draw(st.integers(0, 2**32)))
    entries = draw(st.integers(1, 4))
    if draw(st.booleans()):
        lengths = [pick.choice([1, 1, 2, pick.randint(1, 12), pick.randint(1, 90)]) for _ in range(entries)]
        share = pick.choice([0, 0.05, 0.5, 1])
        return chain_plan(lengths, [row for row in range(sum(lengths)) if pick.random() < share])
    trees: list[list[int]] = []
    states = 0
    for _ in range(entries):
        tree: list[int] = []
        own = pick.randint(1, 3)
        along = pick.random()
        for node in range(pick.choice([1, 3, pick.randint(1, 25)])):
            parent = node - 1 if pick.random() < along else pick.randint(-own, node - 1)
            tree.append(parent if parent >= 0 else parent - states)
        states += own
        trees.append(tree)
    share = pick.choice([0, 0.3, 1])
    return tree_plan(trees, [row for row in range(sum(map(len, trees))) if pick.random() < share])


@settings(max_examples=examples(20, 100), deadline=None)
@given(
    plan=plans(),
    decay=st.sampled_from(DECAYS),
    delta=st.booleans(),
    heads=st.sampled_from([1, 3]),
    ratio=st.sampled_from([1, 2, 4]),
    sizes=st.sampled_from([(1, 1), (3, 7), (8, 4)]),
    chunk=st.sampled_from([1, 2, 5, 16, CHUNK]),
    piece=st.sampled_from([1, 2, 5, 16, CHUNK + 3, PIECE]),
    cached=st.sampled_from([1, 100, CACHED]),
    taps=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_any_batch(
    plan: RecurrencePlan,
    decay: str,
    delta: bool,
    heads: int,
    ratio: int,
    sizes: tuple[int, int],
    chunk: int,
    piece: int,
    cached: int,
    taps: int,
    seed: int,
) -> None:
    inputs = make(plan, decay, delta, heads=heads, ratio=ratio, sizes=sizes, seed=seed)
    extra = torch.zeros(1, heads, *sizes)  # a given state that is not read need not be
    inputs = replace(inputs, states=torch.cat([inputs.states, extra])) if seed % 2 else inputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "CHUNK", chunk)
        patch.setattr(kernel, "PIECE", piece)
        patch.setattr(kernel, "CACHED", cached)
        found = run(BACKENDS["torch"], plan, inputs)
        x, weight, bias, states = make_convolution(plan, taps, seed=seed)
        convolved = BACKENDS["torch"].convolve(plan, x, weight, bias, states)
    assert_close(found, plan, inputs)
    check_convolution(convolved, plan, x, weight, bias, states)


def test_the_suite_sees_a_difference() -> None:
    """A decay that is off by a thousandth in one row is far outside of the tolerance."""
    plan = chain_plan([100])
    inputs = make(plan, "head", True)
    found = run(BACKENDS["torch"], plan, inputs)
    assert inputs.log_decay is not None
    inputs.log_decay[90] -= 1e-3
    with pytest.raises(AssertionError, match="error"):
        assert_close(found, plan, inputs)
