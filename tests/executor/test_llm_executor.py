"""``LlmExecutor``: LiteRT-LM's tests, with constants from an oracle, and what they leave open."""

from __future__ import annotations

import math

import pytest
import torch
from tests.executor.conftest import (
    CONTEXT,
    VOCAB,
    Tiny,
    assert_close,
    forget_tokens,
    inputs,
    make_executor,
    prompt,
    refused,
    some_ids,
    token,
)
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument, NotFound, QuireError, ResourceExhausted, Unsupported
from quire.base.sampling_params import SamplingParams
from quire.contracts.executor import AudioData, ExecutorInputs, ModelAssets, TextData, VisionData
from quire.executor.executor import Executor
from quire.executor.handle import handle_of
from quire.executor.llm_executor import LlmExecutor
from quire.executor.request_sampling import ParamsSampling, draw_from


def greedy(tiny: Tiny, ids: list[int], steps: int) -> list[int]:
    """Greedy continuation by full passes of the oracle."""
    ids = list(ids)
    for _ in range(steps):
        ids.append(int(tiny.logits(ids)[-1].argmax()))
    return ids[len(ids) - steps :]


# -- the four tests of LiteRT-LM's stateless executor ----------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_external_sampler(tiny: Tiny, executor: Executor, dynamic: bool) -> None:
    llm = LlmExecutor(executor)
    cache = llm.create_kv_cache(dynamic=dynamic)
    assert llm.prefill(inputs([2, 28, 56, 12], at=0), cache) is None
    first = llm.step(inputs([24], at=4), cache)
    assert first.shape == (1, 1, VOCAB)
    assert_close(first[0], tiny.logits([2, 28, 56, 12, 24])[-1:])
    held = first.clone()
    second = llm.step(inputs([48], at=5), cache)
    assert_close(second[0], tiny.logits([2, 28, 56, 12, 24, 48])[-1:])
    assert torch.equal(first, held)
    assert cache.length == 6


@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_incremental_prefill(tiny: Tiny, executor: Executor, chunk: int) -> None:
    llm = LlmExecutor(executor, prefill_chunk_size=chunk)
    cache = llm.create_kv_cache(dynamic=True)
    llm.prefill(inputs([2, 28], at=0), cache)
    llm.prefill(inputs([56, 12, 7, 7], at=2), cache)
    assert_close(llm.step(inputs([24], at=6), cache)[0], tiny.logits([2, 28, 56, 12, 7, 7, 24])[-1:])


def test_internal_sampler_and_multi_step(tiny: Tiny, executor: Executor) -> None:
    llm = LlmExecutor(executor)
    ids = [2, 28, 56, 12, 24]
    expected = greedy(tiny, ids, 4)
    one, many = llm.create_kv_cache(), llm.create_kv_cache()
    for cache in (one, many):
        llm.prefill(inputs(ids[:4], at=0), cache)
    found = [24]
    for step in range(4):
        found += llm.sample_tokens(1, inputs([found[-1]], at=4 + step), one)
    assert found[1:] == expected
    assert llm.sample_tokens(3, inputs([24]), many) == expected[:3]
    assert many.length == 4 + 3, "the last sampled id is not in the cache"
    assert many.token_ids(0).tolist() == [*ids, *expected[:2]]
    assert llm.sample_tokens(1, inputs([expected[2]]), many) == expected[3:]


# -- rewinds and positions -------------------------------------------------------------------------


def test_next_position_rewinds(llama: Tiny, ex: Executor, llm: LlmExecutor) -> None:
    cache = llm.create_kv_cache(batch_size=2)
    a, b = some_ids(9, 1), some_ids(9, 2)
    llm.prefill(inputs(a, b, lengths=(9, 5)), cache)
    assert cache.lengths == (9, 5)
    logits = llm.step(inputs([1], [2], at=(3, 4)), cache)
    assert cache.lengths == (4, 5)
    assert_close(logits[:, 0], torch.stack((llama.logits([*a[:3], 1])[-1], llama.logits([*b[:4], 2])[-1])))
    for bad in (5, (5, 5), (0, 0, 0)):
        given = ExecutorInputs(text=TextData(token_ids=torch.tensor([[1], [2]])), next_position=None)
        object.__setattr__(given, "next_position", bad)
        with refused(InvalidArgument, ex, cache):
            llm.step(given, cache)
    llm.prefill(inputs([7], [8], at=0), cache)
    assert cache.lengths == (1, 1)


def test_candidates(llama: Tiny, llm: LlmExecutor) -> None:
    """Prefill at batch 1, broadcast to rows, keep one row by select."""
    ids = some_ids(6)
    one, three = llm.create_kv_cache(), llm.create_kv_cache(batch_size=3)
    llm.prefill(inputs(ids), one)
    three.broadcast_and_copy_from(one)
    drawn = llm.sample_tokens_batch(4, inputs([1], [2], [3]), three)
    assert drawn == [greedy(llama, [*ids, first], 4) for first in (1, 2, 3)]
    one.select_and_copy_from(three, 1)
    assert one.length == 6 + 4
    assert_close(llm.step(inputs([drawn[1][-1]]), one)[0], llama.logits([*ids, 2, *drawn[1]])[-1:])


def test_interleaved_caches_and_both_faces(llama: Tiny, ex: Executor, llm: LlmExecutor) -> None:
    a, b = some_ids(6, 1), some_ids(8, 2)
    mine = llm.create_kv_cache(dynamic=True)
    theirs = ex.prefill(prompt(b)).kv_cache
    llm.prefill(inputs(a), mine)
    assert_close(llm.step(inputs([4]), theirs)[0], llama.logits([*b, 4])[-1:])
    decoded = ex.decode(token(mine, 5))
    assert_close(decoded.logits, llama.logits([*a, 5])[-1:])
    assert mine.num_entries >= 7
    assert_close(llm.step(inputs([6]), mine)[0], llama.logits([*a, 5, 6])[-1:])


# -- growth ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("increment", "after"), [(0, 6), (1, 6), (10, 15)])
def test_dynamic_growth(ex: Executor, increment: int, after: int) -> None:
    llm = LlmExecutor(ex, kv_increment_size=increment)
    cache = llm.create_kv_cache(dynamic=True)
    assert cache.num_entries == 1
    llm.prefill(inputs([1, 2, 3, 4, 5]), cache)
    assert cache.num_entries == 5, "a prompt gets what it needs"
    cache = llm.create_kv_cache(dynamic=True, capacity=5)
    llm.prefill(inputs([1, 2, 3, 4, 5]), cache)
    llm.step(inputs([6]), cache)
    assert cache.num_entries == after
    cache.resize(CONTEXT)
    llm.prefill(inputs(some_ids(CONTEXT), at=0), cache)
    with refused(ResourceExhausted, ex, cache, match="maximum"):
        llm.step(inputs([1]), cache)


def test_static_cache_is_full(ex: Executor, llm: LlmExecutor) -> None:
    cache = llm.create_kv_cache(capacity=5)
    with refused(ResourceExhausted, ex, cache):
        llm.prefill(inputs(some_ids(6)), cache)
    llm.prefill(inputs(some_ids(4)), cache)
    with refused(ResourceExhausted, ex, cache, match="KV cache full"):
        llm.sample_tokens(2, inputs([1]), cache)
    llm.step(inputs([1]), cache)
    with refused(ResourceExhausted, ex, cache, match="KV cache full"):
        llm.step(inputs([1]), cache)
    llm.step(inputs([1], at=4), cache)


# -- refusals --------------------------------------------------------------------------------------


def test_refusals(llama: Tiny, ex: Executor, llm: LlmExecutor) -> None:
    cache = llm.create_kv_cache()
    llm.prefill(inputs([1, 2, 3]), cache)
    foreign = make_executor(llama).create_kv_cache()
    released = llm.create_kv_cache()
    released.release()
    vision = ExecutorInputs(vision=VisionData(embeddings=torch.ones(0, 8)), text=inputs([1]).text)
    audio = ExecutorInputs(audio=AudioData(embeddings=torch.ones(0, 8)), text=inputs([1]).text)
    nothing = ExecutorInputs()
    for given, match in ((nothing, "non-empty"), (inputs([]), "non-empty"), (inputs([1], [2]), "2 rows")):
        with refused(InvalidArgument, ex, cache, match=match):
            llm.prefill(given, cache)
    for given, match in (
        (nothing, "Expect 1 token"),
        (inputs([]), "Expect 1 token"),
        (inputs([1, 2]), "Expect 1 token"),
        (vision, "token ids only"),
        (audio, "token ids only"),
        (inputs([1], [2]), "2 rows"),
        (inputs([VOCAB]), "outside"),
    ):
        with refused(InvalidArgument, ex, cache, match=match):
            llm.step(given, cache)
        with refused(InvalidArgument, ex, cache, match=match):
            llm.sample_tokens(2, given, cache)
    for call in (
        lambda target, lora: llm.prefill(inputs([1]), target, lora),
        lambda target, lora: llm.step(inputs([1]), target, lora),
        lambda target, lora: llm.sample_tokens(1, inputs([1]), target, lora),
    ):
        with refused(InvalidArgument, ex, cache, match="another executor"):
            call(foreign, None)
        with refused(InvalidArgument, ex, cache, match="kv_cache must be a CacheHandle or a KVCacheInterface"):
            call(object(), None)
        with refused(NotFound, ex, cache, match="released"):
            call(released, None)
        with refused(Unsupported, ex, cache, match="adapter 3"):
            call(cache, 3)
    for steps in (-1, 1.5, "2"):
        with refused(InvalidArgument, ex, cache):
            llm.sample_tokens(steps, inputs([1]), cache)
    with refused(InvalidArgument, ex, cache, match="one per row"):
        llm.sample_tokens_batch(1, inputs([1]), cache, sampling=[])
    two = llm.create_kv_cache(batch_size=2)
    for given in (two, handle_of(two)):
        with refused(InvalidArgument, ex, two, match="one row"):
            llm.sample_tokens(1, inputs([1], [2]), given)
    with refused(Unsupported, ex, cache):
        llm.load_lora(ModelAssets(path="nowhere"))
    before = cache.lengths
    assert llm.sample_tokens(0, inputs([1], at=1), cache) == []
    assert cache.lengths == before


# -- sampling --------------------------------------------------------------------------------------


class Uniforms:
    """A request's sampling with given draws, at temperature 1."""

    def __init__(self, *draws: float) -> None:
        self.draws = list(draws)
        self.seen: list[tuple[int, ...]] = []

    def probabilities(self, logits_RV: Tensor, drafted: tuple[int, ...]) -> Tensor:
        self.seen.append(tuple(drafted))
        return logits_RV.softmax(-1)

    def uniform(self) -> float:
        return self.draws.pop(0)


def test_contract_sampling(llama: Tiny, ex: Executor, llm: LlmExecutor) -> None:
    cache = llm.create_kv_cache()
    sampling = Uniforms(0.0, 0.3, math.nextafter(1.0, 0.0))
    drawn = llm.sample_tokens(3, inputs([5]), cache, sampling=sampling)
    ids = [5]
    for u, found in zip((0.0, 0.3, math.nextafter(1.0, 0.0)), drawn, strict=True):
        sums = llama.logits(ids)[-1].double().softmax(-1).cumsum(-1)
        assert found == min(int((sums <= u).sum()), VOCAB - 1)
        ids.append(found)
    assert sampling.seen == [(), tuple(drawn[:1]), tuple(drawn[:2])]
    with refused(InvalidArgument, ex, cache, match="sampling must be a SamplingParams or a RequestSampling"):
        llm.sample_tokens(1, inputs([5]), cache, sampling=object())


def test_seeded_sampling(ex: Executor) -> None:
    params = SamplingParams(temperature=1.5, seed=7, repetition_penalty=1.3)
    runs = []
    for split in ((6,), (1, 2, 3)):
        llm = LlmExecutor(ex, sampling=params)
        cache, drawn = llm.create_kv_cache(), [3]
        for steps in split:
            drawn += llm.sample_tokens(steps, inputs([drawn[-1]]), cache)
        runs.append(drawn)
    assert runs[0] == runs[1], "the generator goes on between calls"
    llm = LlmExecutor(ex)
    override = llm.sample_tokens(6, inputs([3]), llm.create_kv_cache(), sampling=params)
    assert [3, *override] == runs[0]
    llm = LlmExecutor(ex, sampling=params)
    for _ in range(2):
        llm.sample_tokens(6, inputs([3]), llm.create_kv_cache())
    assert len(llm._samplings[0].sampler.output) == 6, "a call keeps the tokens of no other"
    own = ParamsSampling(params, [3], vocab_size=VOCAB)
    assert [3, *LlmExecutor(ex).sample_tokens(6, inputs([3]), llm.create_kv_cache(), sampling=params)] == runs[0]
    assert own.uniform() != own.uniform()


def test_two_rows_draw_from_streams_of_their_own(ex: Executor) -> None:
    params = SamplingParams(temperature=3.0, seed=1)
    llm = LlmExecutor(ex, sampling=params)
    both = llm.sample_tokens_batch(8, inputs([3], [3]), llm.create_kv_cache(batch_size=2))
    assert both[0] != both[1]
    alone = LlmExecutor(ex, sampling=params)
    assert alone.sample_tokens(8, inputs([3]), alone.create_kv_cache()) == both[0]


def test_what_sampling_refuses(ex: Executor, llm: LlmExecutor) -> None:
    cache = llm.create_kv_cache()
    for params, reason in (
        (SamplingParams(stop="x"), "draws exactly as many ids"),
        (SamplingParams(min_tokens=1), "draws exactly as many ids"),
        (SamplingParams(stop_token_ids=[1]), "draws exactly as many ids"),
        (SamplingParams(ignore_eos=True), "draws exactly as many ids"),
        (SamplingParams(n=2), "a cache of several rows"),
        (SamplingParams(logprobs=1), "step returns the logits"),
        (SamplingParams(prompt_logprobs=0), "returns ids only"),
        (SamplingParams(structured_outputs={"regex": "a"}), "a grammar is over text"),
        (SamplingParams(logits_processors=[lambda ids, logits: logits]), "give a RequestSampling"),
        (SamplingParams(skip_special_tokens=False), "makes no text"),
    ):
        with pytest.raises(Unsupported, match=reason):
            LlmExecutor(ex, sampling=params)
        with refused(Unsupported, ex, cache, match=reason):
            llm.sample_tokens(1, inputs([1]), cache, sampling=params)
    few = SamplingParams(max_tokens=2)
    for takes, given in ((llm, {"sampling": few}), (LlmExecutor(ex, sampling=few), {})):
        with refused(InvalidArgument, ex, cache, match="num_steps is 3, and max_tokens of the sampling parameters 2"):
            takes.sample_tokens(3, inputs([1]), cache, **given)
    two_rows = llm.create_kv_cache(batch_size=2)
    with refused(InvalidArgument, ex, two_rows, match="sample_tokens_batch: num_steps is 3"):
        llm.sample_tokens_batch(3, inputs([1], [1]), two_rows, sampling=[SamplingParams(), few])
    for enough in (few, SamplingParams(max_tokens=None), SamplingParams()):
        steps = 2 if enough is few else 20
        assert len(llm.sample_tokens(steps, inputs([1]), llm.create_kv_cache(), sampling=enough)) == steps
    llm.prefill(inputs([1, 2]), cache)
    forget_tokens(cache.rows[0])
    with pytest.raises(FailedPrecondition, match="not known"):
        llm.sample_tokens(1, inputs([1]), cache, sampling=SamplingParams(repetition_penalty=1.1))
    assert cache.length == 2
    assert len(llm.sample_tokens(2, inputs([1]), cache)) == 2
    assert cache.token_ids(0) is None


def test_a_failing_draw_takes_the_steps_back(ex: Executor, llm: LlmExecutor) -> None:
    cache = llm.create_kv_cache()
    llm.prefill(inputs([1, 2, 3]), cache)

    class Bad(Uniforms):
        def probabilities(self, logits_RV: Tensor, drafted: tuple[int, ...]) -> Tensor:
            return logits_RV.softmax(-1) * (0.0 if len(drafted) == 2 else 1.0)

    with refused(QuireError, ex, cache, match="no distribution"):
        llm.sample_tokens(4, inputs([5], at=1), cache, sampling=Bad(0.1, 0.2, 0.3, 0.4))


def test_no_token_of_probability_0_is_drawn() -> None:
    p = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    draws = [draw_from(p, u / 64) for u in range(64)]
    assert draws == [1] * 16 + [3] * 48
    assert draw_from(p, math.nextafter(1.0, 0.0)) == 3
    with pytest.raises(QuireError):
        draw_from(torch.tensor([0.5, math.nan]), 0.5)
