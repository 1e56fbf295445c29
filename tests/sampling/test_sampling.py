"""The sampler against naive float64 code, transformers' processors, the chi-square test, and itself
in other batches.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.examples import examples
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.base.errors import FailedPrecondition, InvalidArgument, QuireError
from quire.base.sampling_params import SamplingParams
from quire.sampling import filters, logit_edits
from quire.sampling import sampler as sampling
from quire.sampling.filters import Candidates, GivenMasks, Words, candidates, mask_out, num_words, zero_bits
from quire.sampling.logit_edits import FAILED
from quire.sampling.request_sampler import RequestSampler, make_generator
from quire.sampling.sampler import probabilities, sample, sample_later
from quire.sampling.token_logprobs import logprobs_of

F32 = 2.0**-24
"""Rounding error of one float32 operation, relative."""


def sampler(
    vocab_size: int, prompt: list[int] | None = None, output: list[int] | None = None, index: int = 0, **fields: Any
) -> RequestSampler:
    made = RequestSampler(SamplingParams(**{"seed": 0} | fields), prompt or [], vocab_size=vocab_size, index=index)
    for token in output or []:
        made.observe(token)
    return made


def logits(*shape: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


# ---- A naive definition --------------------------------------------------------------------------


def naive_edits(
    z: list[float], p: SamplingParams, prompt: list[int], output: list[int], banned: list[int]
) -> list[float]:
    z = list(z)
    for token, bias in p.token_bias.items():
        z[token] += bias
    for token in {*prompt, *output}:
        z[token] = z[token] / p.repetition_penalty if z[token] > 0 else z[token] * p.repetition_penalty
    for token, count in Counter(output).items():
        z[token] -= p.frequency_penalty * count + p.presence_penalty
    for token in banned:
        z[token] = -math.inf
    return z


def naive_probabilities(z: list[float], p: SamplingParams, decided: Callable[[bool], object] = bool) -> list[float]:
    """Filters one after the other over sorted Python lists; ``decided`` hears whether rounding had
    no say.
    """
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))
    if p.temperature == 0:
        return [float(i == order[0]) for i in range(len(z))]
    weight = {i: math.exp((z[i] - z[order[0]]) / p.temperature) for i in order}
    kept = order[: p.top_k] if p.top_k > 0 else order
    if p.top_p < 1:
        total, before, inside = math.fsum(weight[i] for i in kept), 0.0, []
        for i in kept:
            decided(abs(before - p.top_p * total) > 2.0**-40 * total)
            if before < p.top_p * total:
                inside.append(i)
            before += weight[i]
        kept = inside
    decided(all(p.min_p in (0, weight[i]) or abs(weight[i] - p.min_p) > 2.0**-40 for i in kept))
    kept = [i for i in kept if weight[i] >= p.min_p]
    total = math.fsum(weight[i] for i in kept)
    return [weight[i] / total if i in kept else 0.0 for i in range(len(z))]


def close(p: Tensor, want: list[float] | Tensor, relative: float = 0.0) -> None:
    """Weights are rounded to 2**-44 of the largest at worst; ``relative`` is what the inputs were
    off by.
    """
    want_V = torch.as_tensor(want, dtype=torch.float64)
    torch.testing.assert_close(p, want_V, rtol=relative + 2.0**-40, atol=2.0**-44)


filter_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-300, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 8, 1000]),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0), st.just(1.0)),
    seed=st.integers(0, 2**32),
)
coarse = st.integers(-40, 40).map(lambda i: i / 4)  # many ties
rows_of_logits = st.lists(st.one_of(coarse, st.just(-math.inf), st.just(-0.0)), min_size=1, max_size=40)


@settings(max_examples=examples(100, 300), deadline=None)
@given(rows_of_logits, filter_params, st.sampled_from([3, 8, 1024]))
def test_kept_set_and_probabilities_are_the_naive_ones(z: list[float], p: SamplingParams, top_width: int) -> None:
    assume(max(z) > -math.inf)
    want = naive_probabilities(z, p, assume)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "TOP_WIDTH", min(top_width, len(z)))
        got = probabilities(torch.tensor([z]), [RequestSampler(p, vocab_size=len(z))])[0]
    close(got, want)
    # A kept token may have rounded to weight 0, nothing else may differ.
    assert all((g > 0) == (w > 0) for g, w in zip(got.tolist(), want, strict=True) if not 0 < w < 2.0**-40)


@settings(max_examples=examples(50, 150), deadline=None)
@given(
    st.lists(coarse, min_size=10, max_size=10),
    st.lists(st.integers(0, 9), max_size=12),
    st.lists(st.integers(0, 9), max_size=12),
    st.lists(st.integers(0, 9), max_size=5),
    st.dictionaries(st.integers(0, 9), st.floats(-100, 100)),
    st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.floats(0.5, 2)),
)
def test_edits_are_the_naive_ones(
    z: list[float],
    prompt: list[int],
    output: list[int],
    banned: list[int],
    bias: dict[int, float],
    penalties: tuple[float, float, float],
) -> None:
    presence, frequency, repetition = penalties
    fields: dict[str, Any] = {
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "repetition_penalty": repetition,
    }
    s = sampler(10, prompt, output, logit_bias=bias, **fields)
    want = naive_probabilities(naive_edits(z, s.params, prompt, output, banned), s.params)
    # Five float32 operations on numbers below (10 + 100) * 2 + 2 * 12 + 2, each rounding its inputs
    # too; p = exp(z).
    close(probabilities(torch.tensor([z]), [s], [banned])[0], want, relative=2 * 5 * 2 * 250 * F32)


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"temperature": 0.6},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1},
    ],
)
def test_agrees_with_transformers(fields: dict[str, Any]) -> None:
    from transformers.generation import logits_process as hf

    z_RV, prompt, output = logits(4, 300), [5, 9, 9, 2], [250, 9]
    processors = hf.LogitsProcessorList()
    for name, make in {
        "repetition_penalty": hf.RepetitionPenaltyLogitsProcessor,
        "temperature": hf.TemperatureLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
    }.items():
        if name in fields:
            processors.append(make(fields[name]))
    ids = cast(torch.LongTensor, torch.tensor([prompt + output] * 4))
    want = processors(ids, cast(torch.FloatTensor, z_RV.clone())).double().softmax(-1)
    got = probabilities(z_RV, [sampler(300, prompt, output, **fields) for _ in range(4)])
    # Two float32 roundings (penalty, temperature) of logits that stay below 2 * max |z|.
    close(got, want, relative=2 * 2 * 2 * 2 * float(z_RV.abs().max()) * F32)
    assert torch.equal(got > 0, want > 0)


# ---- The draw ------------------------------------------------------------------------------------


def assert_drawn_from(counts: Tensor, p: Tensor) -> None:
    """Chi-square; the quantile at one in a million by Wilson and Hilferty (PNAS 1931).

    Expectations below 5 are pooled.
    """
    total = int(counts.sum())
    assert int(counts[p == 0].sum()) == 0
    rare = p * total < 5
    observed = torch.cat((counts[~rare], counts[rare].sum().reshape(1))).double()
    expected = torch.cat((p[~rare], p[rare].sum().reshape(1))) * total
    observed, expected = observed[expected > 0], expected[expected > 0]
    if (dof := len(expected) - 1) == 0:
        return
    spread = 2 / (9 * dof)
    assert float(((observed - expected) ** 2 / expected).sum()) < dof * (1 - spread + 4.753 * spread**0.5) ** 3


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "min_p": 0.1},
        {"top_k": 5},
        {"top_p": 0.7},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
        {"logit_bias": {3: 4.0, 0: -100}, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    ],
)
def test_tokens_have_the_distribution(fields: dict[str, Any]) -> None:
    z, prompt, output, count = logits(1, 40, spread=1.5), [1, 2, 3], [4, 4, 5], 20_000
    s = sampler(40, prompt, output, **fields)
    drawn = sample(z.expand(count, -1), [s] * count).token_ids
    edited = naive_edits(z[0].tolist(), s.params, prompt, output, [])
    want = torch.tensor(naive_probabilities(edited, s.params), dtype=torch.float64)
    assert_drawn_from(torch.bincount(torch.tensor(drawn), minlength=40), want)


def test_chi_square_can_fail() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    with pytest.raises(AssertionError):
        assert_drawn_from(torch.tensor([10_500, 5_700, 3_800]), p)


@given(
    st.lists(st.one_of(st.just(0), st.integers(1, 2**52)), min_size=1, max_size=30).filter(any),
    st.floats(0, 1, exclude_max=True),
)
@settings(deadline=None)
def test_draw_inverts_the_cumulative_sum_and_takes_no_zero(weights: list[int], u: float) -> None:
    for extreme in (u, 0.0, 1 - 2.0**-53):
        (token,) = Candidates([0], torch.tensor([weights]), None).draw([extreme])
        assert weights[token] > 0
        before = sum(weights[:token])
        # float64 rounds u * total by at most 2**-53 of it, then the fraction is cut off.
        slack = sum(weights) * 2.0**-53 * 2 + 1
        assert before - slack <= extreme * sum(weights) < before + weights[token] + slack
    first, last = (Candidates([0], torch.tensor([weights]), None).draw([x])[0] for x in (0.0, 1 - 2.0**-53))
    assert first == next(i for i, w in enumerate(weights) if w)
    assert last == max(i for i, w in enumerate(weights) if w) or weights[-1] <= sum(weights) * 2.0**-52


@given(st.integers(53, 62), st.integers(-1100, 1100))
def test_draw_with_totals_that_float64_cannot_hold(exponent: int, offset: int) -> None:
    total = min(2**exponent + offset, 2**62)
    weights = torch.tensor([[0, total // 2, total - total // 2, 0]])
    assert Candidates([0], weights, None).draw([1 - 2.0**-53]) == [2]
    assert Candidates([0], weights, None).draw([0.0]) == [1]


def test_weights_are_integers_that_sum_exactly() -> None:
    z = torch.zeros(1, 1500)
    for fields in ({}, {"top_k": 1499}, {"top_p": 0.5}):
        (group,) = candidates(z, z[:, 0], {0: SamplingParams(**fields)})
        assert group.weights.dtype == torch.int64
        kept = [w for w in group.weights[0].tolist() if w]
        assert set(kept) == {2 ** (62 - 11)}
        assert len(kept) == {"top_k": 1499, "top_p": 750}.get(next(iter(fields), ""), 1500)


def test_top_p_that_is_off_drops_nothing_by_rounding() -> None:
    # Weights 2**52 three times and 1: the total needs 54 bits and float64 rounds it down to what
    # comes before the 1.
    z = torch.tensor([[0.0, 0.0, 0.0, -52 * math.log(2), -math.inf]])
    assert probabilities(z, [sampler(5, top_k=4)])[0, 3] > 0


def test_ties_go_to_the_first() -> None:
    z = torch.tensor([[1.0, 2.0, 0.0, 2.0, 2.0]])
    assert sample(z, [sampler(5, temperature=0)]).token_ids == [1]
    assert sample(z, [sampler(5, top_k=1)]).token_ids == [1]
    assert probabilities(z, [sampler(5, top_k=2)])[0].tolist() == [0, 0.5, 0, 0.5, 0]
    flat = torch.zeros(1, 8)
    flat[0, ::2] = -0.0
    assert probabilities(flat, [sampler(8, top_p=0.5)])[0].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert probabilities(flat, [sampler(8, top_k=3)])[0].nonzero().flatten().tolist() == [0, 1, 2]
    assert sample(torch.full((1, 70_001), 3.0), [sampler(70_001, temperature=0)]).token_ids == [0]


# ---- Independence --------------------------------------------------------------------------------

MIX: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.7, "min_p": 0.02},
    {"top_k": 3},
    {"top_k": 50, "top_p": 0.9},
    {"top_p": 0.6},
    {"top_p": 0.999, "temperature": 3.0},
    {"top_k": 1500, "top_p": 0.95},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {7: 3.0}},
    {"repetition_penalty": 1.5, "top_k": 1, "logprobs": 3},
    {"logprobs": 0, "min_p": 0.3},
    {"allowed_token_ids": [3, 9, 30, 36], "temperature": 0, "logprobs": 1},
    {"allowed_token_ids": range(3, 31), "top_p": 0.8},
]


def generate(fields: list[dict[str, Any]], columns: list[int], steps: int, vocab_size: int) -> list[list[Any]]:
    """Tokens and logprobs of requests ``columns`` of a fixed population, run in one batch."""
    samplers = [sampler(vocab_size, [1, 2, 3], **{"seed": c} | fields[c]) for c in columns]
    tokens: list[list[Any]] = [[] for _ in columns]
    for step in range(steps):
        z_RV = torch.stack([logits(vocab_size, seed=1000 * c + step) for c in columns])
        out = sample(z_RV, samplers, [[c, c + 1] if step < 2 else [] for c in columns])
        for made, s, token, logprob in zip(tokens, samplers, out.token_ids, out.logprobs, strict=True):
            s.observe(token)
            made += [token, logprob]
    return tokens


@pytest.mark.parametrize(
    ("vocab_size", "top_width", "chunk"), [(2001, 1024, 1 << 24), (2001, 16, 5000), (37, 1024, 100)]
)
def test_a_request_does_not_see_its_batch(
    vocab_size: int, top_width: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [generate(MIX, [c], 4, vocab_size)[0] for c in range(len(MIX))]
    monkeypatch.setattr(filters, "TOP_WIDTH", min(top_width, vocab_size))
    monkeypatch.setattr(logit_edits, "CHUNK_ELEMENTS", chunk)
    everybody = list(range(len(MIX)))
    for columns in (everybody, everybody[::-1], everybody[::2], [5, 6], [9, 4, 8]):
        assert generate(MIX, columns, 4, vocab_size) == [alone[c] for c in columns]


@settings(max_examples=examples(40, 60), deadline=None)
@given(st.lists(filter_params, min_size=1, max_size=6), st.integers(0, 2**31), st.data())
def test_a_row_has_the_same_distribution_bits_in_any_batch(params: list[SamplingParams], seed: int, data: Any) -> None:
    z_RV = logits(len(params), 67, seed=seed).round(decimals=1)
    samplers = [RequestSampler(p, vocab_size=67) for p in params]
    whole = probabilities(z_RV, samplers)
    some = data.draw(st.lists(st.sampled_from(range(len(params))), unique=True, min_size=1))
    assert torch.equal(probabilities(z_RV[some], [samplers[i] for i in some]), whole[some])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "TOP_WIDTH", 4)
        assert torch.equal(probabilities(z_RV, samplers), whole)


AT_ONCE = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1.1, "top_k": 5, "top_p": 0.9},
    {"temperature": 0.9, "top_p": 0.7, "min_p": 0.01},
    {"temperature": 0, "logit_bias": {3: 9.0}},
    {"temperature": 1.0, "top_p": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 1.0, "top_p": 0.99, "top_k": 50},
]


class Transfers(TorchDispatchMode):
    """Counts values that Python takes: a device has to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        name = func._schema.name.removeprefix("aten::")
        waits = ("_local_scalar_dense", "nonzero", "masked_select")
        # The numbers of requests' generators, float64, are on the host.
        if name in waits and args[0].dtype != torch.float64:
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_come_with_one_transfer(seed: int, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU draws what the CPU draws, from the same numbers, and takes values once;
    twice if some row's top-p is wide. Rows that cannot be drawn from leave their streams alone.
    """
    if wide:
        monkeypatch.setattr(filters, "TOP_WIDTH", 3)
    fields = [*AT_ONCE, *AT_ONCE, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 0.7}]
    z_RV = logits(len(fields), 97, seed=seed).round(decimals=1)
    z_RV[-1], z_RV[-2, 4], z_RV[-3, 9] = -torch.inf, torch.nan, torch.inf
    banned = [[1, 2] if row % 3 == 0 else [] for row in range(len(fields))]
    banned[1] = list(range(97))

    def made() -> list[RequestSampler]:
        return [sampler(97, [1, 5], [5, 7], index=row, **one) for row, one in enumerate(fields)]

    before, after = made(), made()
    expected = sample(z_RV, before, banned)
    taken: list[int] = []
    numpy = Tensor.numpy
    with monkeypatch.context() as patch, Transfers() as transfers:
        patch.setattr(Tensor, "tolist", lambda x: (taken.append(x.numel()), numpy(x).tolist())[1])
        patch.setattr(Tensor, "numpy", None)
        patch.setattr(torch, "tensor", None)  # Would be copied without a queue.
        found = sample_later(z_RV, after, banned).read()
    assert found.token_ids == expected.token_ids
    assert {row: str(error) for row, error in found.failures.items()} == {
        row: str(error) for row, error in expected.failures.items()
    }
    assert set(found.failures) == {1, len(fields) - 3, len(fields) - 2, len(fields) - 1}
    assert taken[0] == 3 * len(fields)
    assert (len(taken) > 1) == wide
    assert transfers.waits == []
    for one, other in zip(before, after, strict=True):
        assert one.params.is_greedy or one.uniform() == other.uniform()


def test_greedy_batch_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    z_RV = logits(5, 100)
    monkeypatch.setattr(sampling, "edited", None)
    out = sample(z_RV, [sampler(100, temperature=0)] * 5)
    assert out.token_ids == z_RV.argmax(-1).tolist()
    assert (out.logprobs, out.failures) == ([None] * 5, {})


def test_nothing_given_is_changed() -> None:
    z_RV = logits(len(MIX), 50)
    before = z_RV.clone()
    samplers = [sampler(50, [1], [2], **{k: v for k, v in f.items() if k != "top_k"}) for f in MIX]
    sample(z_RV, samplers, [[3]] * len(MIX))
    probabilities(z_RV, samplers, [[3]] * len(MIX))
    assert torch.equal(z_RV, before)


def test_no_rows() -> None:
    assert sample(torch.empty(0, 5), []).token_ids == []
    assert probabilities(torch.empty(0, 5), []).shape == (0, 5)


# ---- Seeds ---------------------------------------------------------------------------------------


def state(s: RequestSampler) -> Tensor:
    assert s._generator is not None
    return s._generator.get_state()


def test_generator_is_the_documented_one() -> None:
    data = (2**64 - 3).to_bytes(8, "little") + (2).to_bytes(8, "little")
    seed = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    want = torch.rand(4, generator=torch.Generator().manual_seed(seed))
    for same in (-3, 2**64 - 3):
        assert torch.equal(torch.rand(4, generator=make_generator(same, 2)), want)


def test_seeds_and_indices_have_their_own_streams() -> None:
    z = torch.zeros(1, 1 << 16)
    streams = [(seed, index) for seed in (0, 1, 2**32, 2**63) for index in (0, 1, 2)]
    tokens = [sample(z, [sampler(1 << 16, seed=seed, index=index)]).token_ids[0] for seed, index in streams]
    assert len(set(tokens)) == len(tokens)
    assert tokens == [sample(z, [sampler(1 << 16, seed=seed, index=index)]).token_ids[0] for seed, index in streams]


def test_without_a_seed_the_engine_gives_one() -> None:
    def tokens(engine: torch.Generator) -> list[int]:
        z, params = torch.zeros(1, 1 << 16), SamplingParams()
        made = [RequestSampler(params, vocab_size=1 << 16, index=i, entropy=engine) for i in (0, 0, 1)]
        return [sample(z, [s]).token_ids[0] for s in made]

    first = tokens(torch.Generator().manual_seed(1))
    assert first == tokens(torch.Generator().manual_seed(1)) != tokens(torch.Generator().manual_seed(2))
    assert len(set(first)) == 3
    with pytest.raises(InvalidArgument, match="entropy"):
        RequestSampler(SamplingParams(), vocab_size=4)
    RequestSampler(SamplingParams(temperature=0), vocab_size=4)  # draws nothing, so needs none
    with pytest.raises(InvalidArgument, match=r"index.*-1"):
        make_generator(0, -1)


@pytest.mark.parametrize("fields", [f for f in MIX if not SamplingParams(**f).is_greedy])
def test_one_uniform_for_one_token(fields: dict[str, Any]) -> None:
    used, counted = (sampler(2001, **fields) for _ in range(2))
    sample(logits(1, 2001), [used])
    probabilities(logits(1, 2001), [used])
    assert 0 <= counted.uniform() < 1
    assert torch.equal(state(used), state(counted))


def test_uniform_numbers_have_53_bits() -> None:
    s = sampler(4)
    scaled = [s.uniform() * 2**53 for _ in range(20)]
    assert all(x == int(x) < 2**53 for x in scaled)
    assert any(int(x) % 2 for x in scaled)


def test_greedy_requests_have_no_stream() -> None:
    with pytest.raises(FailedPrecondition, match="greedy"):
        sampler(4, temperature=0).uniform()


# ---- Rows that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [[0.0, math.nan, 1.0], [-math.inf] * 3, [0.0, math.inf, 1.0]])
@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5, "logprobs": 1}])
def test_a_broken_row_fails_alone(bad: list[float], fields: dict[str, Any]) -> None:
    z_RV = torch.tensor([[0.0, 2.0, 1.0], bad, [3.0, 0.0, 1.0]])
    samplers = [sampler(3, **fields) for _ in range(3)]
    fresh = sampler(3, **fields)
    good = sample(z_RV[[0, 2]], [sampler(3, **fields) for _ in range(2)])
    out = sample(z_RV, samplers)
    assert out.token_ids == [good.token_ids[0], FAILED, good.token_ids[1]]
    assert out.logprobs == [good.logprobs[0], None, good.logprobs[1]]
    assert list(out.failures) == [1]
    with pytest.raises(QuireError, match="row 1 hold NaN"):
        out.raise_failures()
    good.raise_failures()
    assert not probabilities(z_RV, samplers)[1].any()
    if not fresh.params.is_greedy:
        assert torch.equal(state(samplers[1]), state(fresh))


def test_a_row_with_everything_banned_fails_alone() -> None:
    z_RV = torch.tensor([[0.0, 2.0, -math.inf], [0.0, 2.0, 1.0]])
    cases: list[dict[str, Any]] = [{"temperature": 0}, {"top_k": 2}, {}]
    for fields in cases:
        out = sample(z_RV, [sampler(3, **fields)] * 2, [[0, 1, 1], [1, 2]])
        assert out.token_ids == [FAILED, 0]
        assert "banned" in str(out.failures[0])


def test_large_logits_do_not_overflow() -> None:
    z_RV = torch.tensor([[3e38, -3e38, 3e38]])
    cases: list[dict[str, Any]] = [
        {"repetition_penalty": 0.01},
        {"temperature": 1e-300},
        {"frequency_penalty": -2, "top_k": 2},
    ]
    for fields in cases:
        assert probabilities(z_RV, [sampler(3, [0, 2], [0, 2], **fields)])[0].tolist() == [0.5, 0, 0.5]


# ---- Masks and processors ------------------------------------------------------------------------


def words(vocab_size: int, allowed: list[int] | set[int]) -> Words:
    made = np.zeros(num_words(vocab_size), dtype=np.uint32)
    for token in allowed:
        made[token // 32] |= np.uint32(1 << token % 32)
    return made


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 96, 1000])
def test_masks_are_bits(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    rows = [set(np.flatnonzero(rng.random(vocab_size) < share).tolist()) for share in (0.0, 0.02, 0.5, 1.0)]
    words_WB = np.stack([words(vocab_size, row) for row in rows])
    # Bits behind the vocabulary mean nothing.
    words_WB[:, -1] |= np.uint32(0xFFFFFFFF << (vocab_size - 1) % 32 + 1 & 0xFFFFFFFF)
    z_WV = logits(4, vocab_size)
    before = z_WV.clone()
    mask_out(z_WV, words_WB)
    zeros_WV = zero_bits(torch.from_numpy(words_WB.view(np.int32)), vocab_size)
    for row, allowed in enumerate(rows):
        for token in range(vocab_size):
            assert z_WV[row, token] == (before[row, token] if token in allowed else -math.inf)
            assert bool(zeros_WV[row, token]) == (token not in allowed)


@pytest.mark.parametrize("vocab_size", [1, 31, 33, 100])
def test_greedy_rows_under_a_mask_take_the_short_way(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is the first maximum of what the mask leaves, as the long way has it: with ties,
    infinities and empty masks.
    """
    rng = np.random.default_rng(vocab_size)
    z_RV = logits(9, vocab_size).round(decimals=0)
    z_RV[rng.random(z_RV.shape) < 0.2] = -math.inf
    z_RV[7, 0] = math.nan
    z_RV[8] = -math.inf
    masks = {r: words(vocab_size, set(np.flatnonzero(rng.random(vocab_size) < 0.4).tolist())) for r in range(1, 9)}
    masks[6] = words(vocab_size, set())
    masks[5][-1] |= np.uint32(0xFFFFFFFF << (vocab_size - 1) % 32 + 1 & 0xFFFFFFFF)
    samplers = [sampler(vocab_size, temperature=0)] * 9
    # A bias of nothing sends a row the long way.
    longer = sample(z_RV, [sampler(vocab_size, temperature=0, logit_bias={0: 0.0})] * 9, allowed=masks)
    monkeypatch.setattr(sampling, "edited", None)
    short = sample(z_RV, samplers, allowed=masks)
    assert short.token_ids == longer.token_ids
    assert {r: str(e) for r, e in short.failures.items()} == {r: str(e) for r, e in longer.failures.items()}
    assert short.token_ids[6] == FAILED
    for row, token in enumerate(short.token_ids):
        if token != FAILED:
            allowed = [t for t in range(vocab_size) if row not in masks or masks[row][t // 32] >> np.uint32(t % 32) & 1]
            assert token == max(allowed, key=lambda t: (float(z_RV[row, t]), -t))


def test_masks_are_made_where_they_matter() -> None:
    """Only rows that draw by chance, whose logits are edited, which have bans, or whose best token
    is not allowed ask.
    """
    asked: list[int] = []

    class Recorded:
        """``Allowed`` that notes what is asked for."""

        def __init__(self, masks: dict[int, Words]) -> None:
            self.rows = masks.keys()
            self.accepts = GivenMasks(masks).accepts
            self._masks = masks

        def masks(self, rows: Sequence[int]) -> Mapping[int, Words]:
            asked.extend(rows)
            return {row: self._masks[row] for row in rows}

    z_RV = logits(7, 40)
    best = z_RV.argmax(-1).tolist()
    masks = {row: words(40, {token, (token + 1) % 40}) for row, token in enumerate(best)} | {1: words(40, {0, 1})}
    del masks[6]
    fields = [{}, {}, {"temperature": 1.0, "seed": 1}, {"logit_bias": {5: 1.0}}, {"repetition_penalty": 1.1}, {}, {}]
    samplers = [sampler(40, **{"temperature": 0, **given}) for given in fields]
    banned = [[], [], [], [], [], [best[5]], []]
    found = sample(z_RV, samplers, banned, Recorded(masks))
    assert asked == [1, 2, 3, 4, 5]
    assert found.token_ids[0] == best[0]
    assert found.token_ids[6] == best[6]
    assert found.token_ids[1] in (0, 1)
    assert found.token_ids[5] == (best[5] + 1) % 40


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_masks_on_a_gpu() -> None:
    rng = np.random.default_rng(0)
    words_WB = rng.integers(0, 2**32, (5, num_words(1000)), dtype=np.uint32)
    z_WV = logits(5, 1000)
    on_gpu = z_WV.cuda()
    mask_out(z_WV, words_WB)
    mask_out(on_gpu, words_WB)
    assert torch.equal(on_gpu.cpu(), z_WV)


@settings(max_examples=examples(40, 100), deadline=None)
@given(st.lists(filter_params, min_size=1, max_size=5), st.integers(0, 2**31), st.data())
def test_a_masked_row_is_one_of_a_smaller_vocabulary(params: list[SamplingParams], seed: int, data: Any) -> None:
    """A mask leaves the distribution that the allowed tokens alone would have, whatever edits there
    are, and concerns no other row.

    Rows without work, with a mask, and with a ban beside it are mixed.
    """
    z_RV = logits(len(params), 40, seed=seed).round(decimals=1)
    edits = {"logit_bias": {3: 2.0, 9: -1.0}, "repetition_penalty": 1.4, "presence_penalty": 0.3}
    params = [p.replace(**edits) if i % 2 else p for i, p in enumerate(params)]
    samplers = [RequestSampler(p, [3, 5], vocab_size=40) for p in params]
    masks = {
        row: data.draw(st.sets(st.integers(0, 39), min_size=1))
        for row in range(len(params))
        if data.draw(st.booleans())
    }
    banned = [[0] if data.draw(st.booleans()) else [] for _ in params]
    allowed = {row: words(40, kept) for row, kept in masks.items()}
    found = probabilities(z_RV, samplers, banned, allowed)
    everything = list(range(40))
    for row in range(len(params)):
        kept = sorted(masks.get(row, set(everything)) - set(banned[row]))
        if not kept:
            assert not found[row].any()
            continue
        # The same row with what is excluded banned one by one.
        one = probabilities(z_RV[row : row + 1], [samplers[row]], [sorted(set(everything) - set(kept))])
        assert torch.equal(found[row], one[0])
        assert not found[row][sorted(set(everything) - set(kept))].any()
    fresh = [RequestSampler(p, [3, 5], vocab_size=40) for p in params]
    drawn = sample(z_RV, fresh, banned, allowed)
    for row, token in enumerate(drawn.token_ids):
        assert (token == FAILED) == (row in drawn.failures) == (not found[row].any())
        assert token == FAILED or found[row, token] > 0


def test_a_mask_without_tokens_fails_alone() -> None:
    z_RV = logits(3, 70)
    fields: list[dict[str, Any]] = [{"temperature": 0}, {"top_k": 2}, {}]
    for f in fields:
        samplers = [sampler(70, **f) for _ in range(3)]
        out = sample(z_RV, samplers, None, {1: words(70, []), 2: words(70, [69])})
        assert out.token_ids[1:] == [FAILED, 69]
        assert "no token to draw" in str(out.failures[1])
        assert list(out.failures) == [1]


@pytest.mark.parametrize(
    "allowed",
    [
        {2: words(70, [1])},
        {-1: words(70, [1])},
        {0: words(96, [1])[:2]},
        {0: words(70, [1]).astype(np.int64)},
        {0: words(70, [1])[None]},
    ],
)
def test_a_mask_must_fit(allowed: dict[int, Any]) -> None:
    with pytest.raises(
        InvalidArgument, match=r"a mask must be (uint32 \[3\], got|of a row in 0\.\.1, got row (-1|2)$)"
    ):
        sample(logits(2, 70), [sampler(70)] * 2, None, allowed)


def test_a_mask_holds_after_processors() -> None:
    def up(_: list[int], z_V: Tensor) -> Tensor:
        return z_V.index_fill(0, torch.tensor([5, 6, 7]), 50.0)

    p = {"logits_processors": [up], "temperature": 0}
    out = sample(
        logits(3, 40), [sampler(40, **p)] * 3, [[5], [], [5, 6, 7]], {0: words(40, [5, 6, 9]), 1: words(40, [9])}
    )
    assert out.token_ids[:2] == [6, 9]
    assert out.token_ids[2] not in (5, 6, 7)


def test_a_processor_that_fails_draws_nothing() -> None:
    def fail(_: list[int], z_V: Tensor) -> Tensor:
        raise RuntimeError("broken")

    z_RV = logits(3, 40)
    good, bad, other = sampler(40), sampler(40, logits_processors=[fail]), sampler(40)
    state = bad._generator.get_state() if bad._generator is not None else torch.empty(0)
    out = sample(z_RV, [good, bad, other])
    assert out.token_ids == [
        sample(z_RV[:1], [sampler(40)]).token_ids[0],
        FAILED,
        sample(z_RV[2:], [sampler(40)]).token_ids[0],
    ]
    assert "(fail) raised RuntimeError: broken" in str(out.failures[1])
    assert bad._generator is not None
    assert torch.equal(bad._generator.get_state(), state)
    assert not probabilities(z_RV, [good, bad, other])[1].any()


# ---- Log-probabilities ---------------------------------------------------------------------------


def test_logprobs_are_raw_and_ranked() -> None:
    z_RV = logits(6, 50).round()  # with ties
    wanted = [None, 0, 3, 50, 1, 7]
    fields: list[dict[str, Any]] = [
        {"logprobs": n, "logit_bias": {4: 100}, "temperature": t} for n, t in zip(wanted, (0, 1) * 3, strict=True)
    ]
    out = sample(z_RV, [sampler(50, **f) for f in fields])
    assert out.token_ids == [4] * 6
    assert out.logprobs == logprobs_of(z_RV, out.token_ids, wanted)
    exact = z_RV.double().log_softmax(-1)
    for row, (n, got) in enumerate(zip(wanted, out.logprobs, strict=True)):
        if n is None:
            assert got is None
            continue
        assert got is not None
        z = z_RV[row].tolist()
        order = [i for _, i in sorted((-z[i], i) for i in range(50))]
        assert (got.chosen.token_id, got.chosen.rank) == (4, order.index(4) + 1)
        assert [entry.token_id for entry in got.top] == order[:n]
        assert [entry.rank for entry in got.top] == list(range(1, n + 1))
        for entry in (got.chosen, *got.top):
            # A sum of 50 positive float32 numbers, its log, two subtractions of numbers of the size
            # of max |z|.
            bound = (50 + 4 * float(z_RV.abs().max())) * F32
            assert entry.logprob == pytest.approx(float(exact[row, entry.token_id]), abs=bound, rel=0)
        assert got.chosen not in got.top or got.chosen.rank <= n


def test_logprobs_refuse() -> None:
    z_RV = logits(2, 5)
    for ids, top_n in (([0, 5], [0, 0]), ([0, -2], [0, 0]), ([0, 1], [0, 6]), ([0, 1], [0, -1]), ([0], [0, 0])):
        with pytest.raises(InvalidArgument):
            logprobs_of(z_RV, ids, top_n)
    assert logprobs_of(z_RV, [FAILED, 1], [3, None]) == [None, None]


# ---- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("z", "count", "banned", "message"),
    [
        (torch.zeros(4), 4, None, r"float32 \[R, V\].*\[4\]"),
        (torch.zeros(2, 4, dtype=torch.float16), 2, None, "float16"),
        (torch.zeros(2, 4), 1, None, "2 rows.*got 1"),
        (torch.zeros(2, 5), 2, None, "4 tokens.*5"),
        (torch.zeros(2, 4), 2, [[]], "2 rows.*got 1"),
        (torch.zeros(2, 4), 2, [[], [4]], "row 1.*0..3.*got 4"),
        (torch.zeros(2, 4), 2, [[-1], []], "row 0.*got -1"),
    ],
)
def test_a_refused_batch_leaves_no_trace(z: Tensor, count: int, banned: list[list[int]] | None, message: str) -> None:
    samplers = [sampler(4) for _ in range(count)]
    with pytest.raises(InvalidArgument, match=message):
        sample(z, samplers, banned)
    assert all(torch.equal(state(s), state(sampler(4))) for s in samplers)


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([0, 4], {}, "prompt.*0..3.*got 4"),
        ([-1], {}, "prompt.*got -1"),
        ([0.5], {}, "prompt.*float64"),
        ([[1]], {}, "prompt"),
        ([], {"logit_bias": {4: 1}}, "logit_bias.*got 4"),
        ([], {"logit_bias": {2**63: 1}}, "logit_bias.*got 9223372036854775808"),
        ([], {"stop_token_ids": [9]}, "stop_token_ids.*got 9"),
        ([], {"stop_token_ids": [2**63]}, "stop_token_ids.*got 9223372036854775808"),
        ([], {"logprobs": 5}, "logprobs.*4, got 5"),
    ],
)
def test_a_request_must_fit_the_vocabulary(prompt: list[Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        sampler(4, prompt, **fields)


def test_observe_checks_and_counts() -> None:
    s = sampler(100, [5, 5, 7], repetition_penalty=1.1)
    for bad in (-1, 100):
        with pytest.raises(InvalidArgument, match=f"0..99, got {bad}"):
            s.observe(bad)
    tokens = np.random.default_rng(0).integers(0, 100, 300).tolist()
    for token in tokens:
        s.observe(token)
    assert s.counts is not None
    counted = dict(zip(s.counts.ids_N.tolist(), s.counts.counts_N.tolist(), strict=True))
    assert counted == {5: 0, 7: 0} | Counter(tokens)
