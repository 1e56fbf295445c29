"""Penalties by a table on the logits' device: what the list of all tokens gives, to the bit, by
PyTorch's operations and by Triton's programs.
"""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from tests.triton_machine import DEVICE, needs_triton
from torch import Tensor

from quire import SamplingParams
from quire.base.errors import InvalidArgument
from quire.kernels.draw import triton_penalties
from quire.kernels.draw.triton_penalties import TritonPenalties, fastest_penalties
from quire.sampling.logit_edits import _penalise
from quire.sampling.request_sampler import RequestSampler
from quire.sampling.sampler import sample, sample_later
from quire.sampling.seen_tokens import PenaltyKernel, ReferencePenalties, SeenTokens

VOCAB = 97
PENALTIES: list[dict[str, float]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7},
    {},
    {"presence_penalty": -1.1},
    {"repetition_penalty": 0.6, "frequency_penalty": -0.3, "presence_penalty": 1.9},
    {"repetition_penalty": 1.7, "presence_penalty": 0.1},
]
KERNELS = [
    pytest.param(ReferencePenalties, id="torch"),
    pytest.param(TritonPenalties, id="triton", marks=[needs_triton, pytest.mark.gpu]),
]


def made(number: int, **fields: Any) -> RequestSampler:
    rng = random.Random(number)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(30))]
    params = SamplingParams(temperature=1.0, seed=number, **PENALTIES[number % len(PENALTIES)], **fields)
    return RequestSampler(params, prompt, vocab_size=VOCAB)


def logits(rows: int, seed: int) -> Tensor:
    """With zeros, -inf and large ones, which penalties below 1 make larger."""
    z_RV = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
    z_RV[:, 3], z_RV[:, 5], z_RV[:, 7] = 0.0, -torch.inf, 3e38
    return z_RV.to(DEVICE)


def expected(z_RV: Tensor, samplers: list[RequestSampler]) -> Tensor:
    found = z_RV.clone()
    _penalise(found, samplers)
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_requests_come_and_go(kernel: type[PenaltyKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, more than the table had room for, at any length; some rest for a while."""
    monkeypatch.setattr(triton_penalties, "BLOCK", 32)
    seen, rng = SeenTokens(VOCAB, torch.device(DEVICE), kernel()), random.Random(1)
    everybody = [made(number) for number in range(11)]
    for step in range(14):
        batch = rng.sample(everybody, rng.randrange(1, 8))
        z_RV = logits(len(batch), step)
        found = z_RV.clone()
        seen.penalise(found, batch)
        assert torch.equal(found, expected(z_RV, batch))
        for sampler in batch:
            for _ in range(rng.choice((0, 1, 1, 3))):
                sampler.observe(rng.choice((3, 5, 7, rng.randrange(VOCAB))))
    assert seen.nbytes == 8 * VOCAB * 4


@pytest.mark.parametrize("kernel", KERNELS)
def test_tokens_that_nobody_has_read_count(kernel: type[PenaltyKernel]) -> None:
    """Once: also when they have been read, and when a request was in no step meanwhile."""
    seen, rng = SeenTokens(VOCAB, torch.device(DEVICE), kernel()), random.Random(2)
    samplers = [made(number) for number in range(6)]
    pending: list[int] | None = None
    for step in range(10):
        rows = sorted(rng.sample(range(6), 5)) if step == 4 else range(6)
        if pending is not None and step in (3, 4, 8):
            for sampler, token in zip(samplers, pending, strict=True):
                sampler.observe(token)
            pending = None
        z_RV = logits(len(rows), step)
        found = z_RV.clone()
        unread = None if pending is None else torch.tensor([pending[row] for row in rows], device=DEVICE)
        seen.penalise(found, [samplers[row] for row in rows], unread)
        if pending is not None:
            for sampler, token in zip(samplers, pending, strict=True):
                sampler.observe(token)
        assert torch.equal(found, expected(z_RV, [samplers[row] for row in rows]))
        pending = [rng.choice((3, rng.randrange(VOCAB))) for _ in samplers]
    seen.forget(samplers[0])
    z_RV = logits(6, 99)
    found = z_RV.clone()
    seen.penalise(found, samplers)
    assert torch.equal(found, expected(z_RV, samplers))


def test_rows_are_given_back() -> None:
    """By requests that are gone, and to others by those that are in no step."""
    seen = SeenTokens(VOCAB, torch.device("cpu"))
    for number in range(40):
        sampler = made(number)
        seen.penalise(logits(1, number).cpu(), [sampler])
        del sampler
        gc.collect()
    assert len(seen._rows) == 0
    assert seen.nbytes == VOCAB * 4
    held = [made(number) for number in range(3, 6)]
    for sampler in held:
        seen.penalise(logits(1, 0).cpu(), [sampler])
    assert len(seen._rows) == 1


def test_rows_without_penalties_take_no_memory() -> None:
    seen = SeenTokens(VOCAB, torch.device("cpu"))
    z_RV = logits(2, 1).cpu()
    found = z_RV.clone()
    seen.penalise(found, [made(2), made(8)])
    assert torch.equal(found, z_RV)
    assert seen.nbytes == 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_draws_are_the_same(kernel: type[PenaltyKernel]) -> None:
    """As without the table, while tokens of the step before are read later."""
    seen = SeenTokens(VOCAB, torch.device(DEVICE), kernel())
    waiting, ahead = ([made(number, logprobs=1, top_p=0.8) for number in range(6)] for _ in range(2))
    before = None
    for step in range(8):
        z_RV = logits(6, step).clamp(max=20.0)
        found = sample(z_RV.cpu(), waiting)
        drawn = sample_later(z_RV, ahead, seen=seen, unread_R=None if before is None else before.tokens_R)
        for token, one in zip(found.token_ids, waiting, strict=True):
            one.observe(token)
        if before is not None:
            for token, one in zip(before.read().token_ids, ahead, strict=True):
                one.observe(token)
        assert drawn.tokens_R.tolist() == found.token_ids
        before = drawn


def test_penalties_behind_unread_tokens_need_the_table() -> None:
    with pytest.raises(InvalidArgument, match="behind tokens that nobody has read need `seen`"):
        sample_later(torch.zeros(1, VOCAB), [made(0)], unread_R=torch.tensor([1]))


def test_only_gpus_take_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fastest_penalties(torch.device("cpu")) is None
    monkeypatch.setattr(triton_penalties, "triton_problem", lambda device: "")
    assert isinstance(fastest_penalties(torch.device("cuda")), TritonPenalties)
