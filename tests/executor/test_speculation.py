"""``speculative_decode``: the threshold rule, exact rejection sampling, refusals."""

from __future__ import annotations

import math
import random

import pytest
import torch
from tests.executor.conftest import CONTEXT, VOCAB, Tiny, assert_close, prompt, refused, some_ids, token
from tests.executor.test_llm_executor import greedy
from torch import Tensor

from quire.base.errors import InvalidArgument, ResourceExhausted
from quire.base.sampling_params import SamplingParams
from quire.executor.acceptance import accept_by_threshold, rejection_sample
from quire.executor.executor import Executor
from quire.executor.request_sampling import ParamsSampling, draw_from


def test_full_partial_and_no_acceptance(tiny: Tiny, executor: Executor) -> None:
    ids = some_ids(6)
    best = greedy(tiny, [*ids, 5], 4)
    wrong = (best[2] + 1) % VOCAB
    for drafts, accepted in (
        (best, 4),
        ([*best[:2], wrong, best[3]], 2),
        ([(best[0] + 1) % VOCAB, *best[1:]], 0),
        ([], 0),
    ):
        handle = executor.prefill(prompt(ids)).kv_cache
        output = executor.speculative_decode(token(handle, 5), drafts, 1.0)
        assert output.accepted_tokens == tuple(drafts[:accepted])
        assert output.acceptance_count == accepted
        assert output.kv_cache.sequence_length == 6 + 1 + accepted
        run = [*ids, 5, *drafts[:accepted]]
        assert_close(output.next_logits[0], tiny.logits(run)[-1])
        # The cache holds exactly the accepted ones: what follows is a fresh run.
        following = executor.decode(token(output.kv_cache, 9))
        assert_close(following.logits[0], tiny.logits([*run, 9])[-1])
        assert handle.is_valid
        assert handle.cache.token_ids(0).tolist() == [*run, 9]
        assert executor.speculative_decode(token(handle, 5), [wrong] * 3, 0.0).acceptance_count == 3


def test_threshold_rule_is_relative_and_monotone() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]])
    logits = p.log()
    drafts = [1, 0]
    expected = {0.0: 2, 0.2: 2, 0.33: 2, 0.34: 1, 0.59: 1, 0.61: 0, 1.0: 0}
    for threshold, count in expected.items():
        assert accept_by_threshold(logits, drafts, threshold).accepted == count
    ties = torch.zeros(2, 3)
    assert accept_by_threshold(ties, [2], 1.0).accepted == 1, "ties are accepted"


class Given:
    """Sampling with a fixed target distribution and a seeded generator."""

    def __init__(self, target_RV: Tensor, seed: int) -> None:
        self.target, self.generator = target_RV, random.Random(seed)

    def probabilities(self, logits_RV: Tensor, drafted: object) -> Tensor:
        return self.target.clone()

    def uniform(self) -> float:
        return self.generator.random()


@pytest.mark.parametrize("rounds", [4_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_exact_mode_has_the_target_distribution(rounds: int) -> None:
    """The first emitted token, over many rounds, against the target: chi-square at the 1 in 10**6
    level.
    """
    target = torch.tensor([[0.4, 0.0, 0.35, 0.25], [0.1, 0.2, 0.3, 0.4]])
    draft = torch.tensor([[0.2, 0.5, 0.1, 0.2]], dtype=torch.float64)
    counts, accepted = [0] * 4, 0
    sampling = Given(target, 3)
    for _ in range(rounds):
        drafted = draw_from(draft[0], sampling.uniform())
        result = rejection_sample(torch.zeros(2, 4), [drafted], draft, sampling)
        assert result.next_probs is not None
        accepted += result.accepted
        counts[drafted if result.accepted else draw_from(result.next_probs[0], sampling.uniform())] += 1
    assert counts[1] == 0, "no draw returns a token of probability 0"
    chi = sum((n - rounds * float(p)) ** 2 / (rounds * float(p)) for n, p in zip(counts, target[0], strict=True) if p)
    assert chi < 27.7, "chi-square of 2 degrees of freedom exceeds 27.6 once in a million"
    overlap = float(torch.minimum(target[0].double(), draft[0]).sum())
    assert abs(accepted / rounds - overlap) < 5 * math.sqrt(overlap * (1 - overlap) / rounds)


def test_equal_distributions_are_always_accepted() -> None:
    p = torch.tensor([[0.6, 0.4], [0.6, 0.4], [0.5, 0.5]])
    for seed in range(200):
        result = rejection_sample(torch.zeros(3, 2), [0, 1], p[:2].double(), Given(p, seed))
        assert result.accepted == 2
        assert torch.equal(result.next_probs, p[2:])


def test_exact_mode_through_the_executor(llama: Tiny, ex: Executor) -> None:
    ids = some_ids(6)
    params = SamplingParams(temperature=0.7, top_k=20, repetition_penalty=1.4, seed=5)
    drafts = [4, 9, 4]
    uniform = torch.full((3, VOCAB), 1 / VOCAB)
    handle = ex.prefill(prompt(ids)).kv_cache
    sampling = ParamsSampling(params, [*ids, 5], vocab_size=VOCAB)
    output = ex.speculative_decode(token(handle, 5), drafts, 0.5, draft_probabilities=uniform, sampling=sampling)
    run = [*ids, 5, *drafts[: output.acceptance_count]]
    assert_close(output.next_logits[0], llama.logits(run)[-1])
    assert output.next_probs is not None
    assert output.next_probs.shape == (1, VOCAB)
    assert float(output.next_probs.sum()) == pytest.approx(1.0)
    assert output.kv_cache.sequence_length == len(run)
    # Each row has the penalties of its own prefix.
    fresh = ParamsSampling(params, [*ids, 5], vocab_size=VOCAB)
    rows = fresh.probabilities(llama.logits([*ids, 5, *drafts])[6:], drafts)
    for index in range(4):
        alone = ParamsSampling(params, [*ids, 5, *drafts[:index]], vocab_size=VOCAB)
        one = alone.probabilities(llama.logits([*ids, 5, *drafts])[6 + index : 7 + index], [])
        assert torch.equal(rows[index], one[0])
    # Greedy parameters: one-hot targets, so exactly the greedy continuation is kept.
    best = greedy(llama, [*ids, 5], 2)
    hot = torch.zeros(2, VOCAB)
    hot[[0, 1], best] = 1.0
    greedy_sampling = ParamsSampling(SamplingParams(temperature=0), vocab_size=VOCAB)
    output = ex.speculative_decode(token(handle, 5), best, 0.5, draft_probabilities=hot, sampling=greedy_sampling)
    assert output.accepted_tokens == tuple(best)


def test_refusals(ex: Executor) -> None:
    handle = ex.prefill(prompt(some_ids(6))).kv_cache
    cache, both = handle.cache, ex.prefill(prompt([1], [2])).kv_cache
    sampling = ParamsSampling(SamplingParams(seed=1), vocab_size=VOCAB)
    good = torch.full((2, VOCAB), 1 / VOCAB)
    zero = good.clone()
    zero[0, 3] = 0.0
    zero[0, 4] += 1 / VOCAB
    for threshold in (-0.1, 1.1, math.nan, math.inf, "1", None, True):
        with refused(InvalidArgument, ex, cache, match="acceptance_threshold"):
            ex.speculative_decode(token(handle, 1), [3], threshold)  # type: ignore[arg-type]
    for drafts in ([VOCAB], [-1], [10**30], [1.5], ["3"]):
        with refused(InvalidArgument, ex, cache):
            ex.speculative_decode(token(handle, 1), drafts, 0.5)  # type: ignore[arg-type]
    state = sampling.sampler._generator.get_state()  # type: ignore[union-attr]
    for bad, match in (
        (good[:1], "must be"),
        (good.int(), "floating"),
        (good * 2, "no distribution"),
        (torch.full_like(good, math.nan), "no distribution"),
        (torch.cat((good[:, :1] - 1, good[:, 1:] + 1 / (VOCAB - 1)), 1), "no distribution"),
        (zero, "probability 0"),
    ):
        with refused(InvalidArgument, ex, cache, match=match):
            ex.speculative_decode(token(handle, 1), [3, 4], 0.5, draft_probabilities=bad, sampling=sampling)
    for given in ({"sampling": sampling}, {"draft_probabilities": good}):
        with refused(InvalidArgument, ex, cache, match="together"):
            ex.speculative_decode(token(handle, 1), [3, 4], 0.5, **given)
    with refused(InvalidArgument, ex, both.cache, match="one sequence"):
        ex.speculative_decode(token(both, 1, 2), [3], 0.5)
    with refused(ResourceExhausted, ex, cache):
        ex.speculative_decode(token(handle, 1), [1] * (CONTEXT - 6), 0.5)
    assert torch.equal(sampling.sampler._generator.get_state(), state)  # type: ignore[union-attr]


def test_parameters_are_no_sampling_of_a_request(ex: Executor) -> None:
    """Their generator would begin anew with each call; the error says what to make of them, and
    that works.
    """
    handle = ex.prefill(prompt([1, 2])).kv_cache
    given = {"draft_probabilities": torch.full((1, VOCAB), 1 / VOCAB, dtype=torch.float64)}
    with refused(InvalidArgument, ex, handle.cache, match=r"RequestSampling, whose generator.*ParamsSampling\(params"):
        ex.speculative_decode(token(handle, 5), [3], 0.5, sampling=SamplingParams(seed=1), **given)
    sampling = ParamsSampling(SamplingParams(seed=1), [1, 2, 5], vocab_size=VOCAB)
    output = ex.speculative_decode(token(handle, 5), [3], 0.5, sampling=sampling, **given)
    assert output.next_probs is not None
