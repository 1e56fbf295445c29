"""One row of each recurrent sequence in Triton, against the same by loops in float64: on a GPU, or
on the CPU by Triton's interpreter.

Letters: N sequences; H heads, R queries of each; K, V sizes of keys and values.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.triton_machine import DEVICE, HAS_CUDA, needs_triton
from torch import Tensor

from quire.kernels import recurrence, triton_recurrence
from quire.kernels.recurrence import Inputs

pytestmark = needs_triton
SIZES = [(2, 3, 1, 8, 8), (3, 2, 2, 12, 70), (1, 4, 3, 5, 3), (2, 1, 1, 128, 65)]
"""(N, H, R, K, V)"""


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(
    states: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs and states in float64, and the sums of the magnitudes of what is added up in each."""
    number, heads = states.shape[:2]
    out = torch.zeros(number, heads, q.shape[2], states.shape[3], dtype=torch.float64)
    after, out_size, size = states.double().clone(), out.clone(), states.double().abs()
    for n, h in itertools.product(range(number), range(heads)):
        state = after[n, h]
        key, query = k[n, min(h, k.shape[1] - 1)].double(), q[n, min(h, q.shape[1] - 1)].double()
        if decay is not None:
            state *= decay[n, h].double()[:, None]
            size[n, h] *= decay[n, h].double()[:, None]
        new, new_size = v[n, h].double(), v[n, h].double().abs()
        if beta is not None:
            new = beta[n, h].double() * (new - key @ state)
            new_size = beta[n, h].double().abs() * (new_size + key.abs() @ size[n, h])
        state += key[:, None] * new
        size[n, h] += key.abs()[:, None] * new_size
        out[n, h] = scale * query @ state
        out_size[n, h] = abs(scale) * query.abs() @ size[n, h]
    return out, after, out_size, size


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("decays", ["none", "head", "keys"])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_one_row_of_each_sequence(
    sizes: tuple[int, int, int, int, int], decays: str, delta: bool, shared: bool
) -> None:
    """Each sum of up to K terms in float32, and the few roundings around it: (K + 8) eps of the
    magnitudes at most, twice with the delta rule, which reads the state first.
    """
    n, h, r, keys, values = sizes
    states, v = drawn(n, h, keys, values, seed=1), drawn(n, h, values, seed=2)
    q, k = drawn(n, 1 if shared else h, r, keys, seed=3), drawn(n, 1 if shared else h, keys, seed=4)
    factors = {"none": None, "head": drawn(n, h, 1, seed=5), "keys": drawn(n, h, keys, seed=5)}[decays]
    decay = None if factors is None else factors.sigmoid()
    beta = drawn(n, h, seed=6).sigmoid() if delta else None
    before = states.clone()
    given = [None if x is None else x.to(DEVICE) for x in (states, q, k, v, decay, beta)]
    out, after = (x.cpu() for x in triton_recurrence.updated(*given, 0.3))  # type: ignore[arg-type]
    wanted_out, wanted, out_size, size = exact(states, q, k, v, decay, beta, 0.3)
    unit = (1 + delta) * (keys + 8) * torch.finfo(torch.float32).eps
    assert ((out.double() - wanted_out).abs() <= 2 * unit * out_size).all()
    assert ((after.double() - wanted).abs() <= unit * size).all()
    assert torch.equal(states, before)


def test_decodes_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it runs, the backend's update is this one, with decays as logarithms."""
    rows = Inputs(
        *(x.to(DEVICE) for x in (drawn(2, 3, 1, 8, seed=1), drawn(2, 3, 8, seed=2), drawn(2, 3, 4, seed=3))),
        -drawn(2, 3, seed=4).abs().to(DEVICE),
        drawn(2, 3, seed=5).sigmoid().to(DEVICE),
    )
    states = drawn(2, 3, 8, 4, seed=6).to(DEVICE)
    monkeypatch.setattr(triton_recurrence, "updates", lambda states: False)
    expected = recurrence._update(states, rows, 0.5)
    calls = []
    monkeypatch.setattr(triton_recurrence, "updates", lambda states: not calls.append(states))
    for found, other in zip(recurrence._update(states, rows, 0.5), expected, strict=True):
        torch.testing.assert_close(found, other)
    assert len(calls) == 1


def test_states_that_it_does_not_know() -> None:
    assert triton_recurrence.updates(torch.zeros(1, 1, 8, 8, device=DEVICE)) == HAS_CUDA
    assert not triton_recurrence.updates(torch.zeros(1, 1, 8, 8, dtype=torch.float64, device=DEVICE))
    assert not triton_recurrence.updates(torch.zeros(1, 1, 512, 8, device=DEVICE))
