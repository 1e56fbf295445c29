"""Greedy tokens are those of transformers, and depend on nothing but the prompt; seeded ones on
nothing but the seed.
"""

from __future__ import annotations

import pytest
from tests.small_llms import Checkpoint, MakeLLM, check, engine_of, greedy, random_tokens, record, token_ids

from quire import LLM, SamplingParams

LENGTHS = (1, 2, 5, 16, 17, 40, 63)
PROMPTS = [random_tokens(length) for length in LENGTHS]
COUNT = 14


def expected(checkpoint: Checkpoint, prompts: list[list[int]] = PROMPTS, count: int = COUNT) -> list[list[int]]:
    return [checkpoint.greedy(prompt, count) for prompt in prompts]


@pytest.mark.turns(8)
@pytest.mark.parametrize(
    ("page_size", "budget", "caching"),
    [(1, 7, True), (5, 64, True), (16, 2048, True), (16, 7, False), (5, 2048, False), (1, 64, True)],
)
def test_batches_chunks_pages_and_cache_do_not_show(
    make_llm: MakeLLM, checkpoint: Checkpoint, page_size: int, budget: int, caching: bool
) -> None:
    llm = make_llm(checkpoint, page_size=page_size, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    assert token_ids(llm.generate(PROMPTS, greedy(COUNT))) == expected(checkpoint)
    again = llm.generate(PROMPTS, greedy(COUNT))
    assert token_ids(again) == expected(checkpoint)
    cached = [output.num_cached_tokens for output in again]
    assert cached == ([length - 1 for length in LENGTHS] if caching else [0] * len(LENGTHS))
    check(llm)


def test_alone_is_as_in_a_batch(llm: LLM, checkpoint: Checkpoint) -> None:
    for prompt, tokens in zip(PROMPTS, expected(checkpoint), strict=True):
        assert llm.generate(prompt, greedy(COUNT))[0].outputs[0].token_ids == tokens


def test_partial_prefix_hits(llm: LLM, checkpoint: Checkpoint) -> None:
    base = random_tokens(50)
    llm.generate(base, greedy(COUNT))
    prompts = [base[:n] + random_tokens(9, seed=n) for n in (1, 15, 16, 17, 33, 50)]
    recorder = record(llm)
    for prompt in prompts:
        output = llm.generate(prompt, greedy(COUNT))[0]
        assert output.outputs[0].token_ids == checkpoint.greedy(prompt, COUNT)
        assert output.num_cached_tokens >= len(prompt) - 9
    assert recorder.num_tokens <= len(prompts) * (9 + COUNT)


@pytest.mark.turns(6)
@pytest.mark.parametrize("caching", [True, False])
def test_preemption_does_not_show(make_llm: MakeLLM, checkpoint: Checkpoint, caching: bool) -> None:
    # Where every layer has a window the same requests need less.
    pool = 48 if checkpoint.model.config.model_type == "mistral" else 96
    llm = make_llm(checkpoint, pool=pool, page_size=4, max_num_batched_tokens=16, enable_prefix_caching=caching)
    prompts = [random_tokens(length) for length in (20, 11, 17, 5)]
    outputs = llm.generate(prompts, greedy(40))
    assert token_ids(outputs) == expected(checkpoint, prompts, 40)
    assert llm.metrics()["quire:num_preemptions_total"] >= 2
    assert sum(output.metrics.num_preemptions for output in outputs) == llm.metrics()["quire:num_preemptions_total"]
    check(llm)


def test_preemption_does_not_change_seeded_samples(make_llm: MakeLLM, llama: Checkpoint) -> None:
    prompts = [random_tokens(length) for length in (20, 11, 17, 5)]
    params = [SamplingParams(temperature=1.3, seed=i, max_tokens=40, ignore_eos=True) for i in range(4)]
    roomy = make_llm(llama).generate(prompts, params)
    tight = make_llm(llama, pool=96, page_size=4, max_num_batched_tokens=16)
    assert token_ids(tight.generate(prompts, params)) == token_ids(roomy)
    assert tight.metrics()["quire:num_preemptions_total"] >= 2


def test_salts_share_nothing_and_change_nothing(llm: LLM, checkpoint: Checkpoint) -> None:
    prompt = random_tokens(40)
    found = [llm.generate(prompt, greedy(COUNT), cache_salt=salt)[0] for salt in ("a", "b", None, "a")]
    assert token_ids(found) == [checkpoint.greedy(prompt, COUNT)] * 4
    assert [output.num_cached_tokens for output in found] == [0, 0, 0, 39]


def test_seeds_are_the_same_alone_and_in_any_batch(llm: LLM) -> None:
    params = [SamplingParams(temperature=1.2, top_p=0.95, seed=i, max_tokens=COUNT, ignore_eos=True) for i in range(7)]
    together = token_ids(llm.generate(PROMPTS, params))
    alone = [llm.generate(p, q)[0].outputs[0].token_ids for p, q in zip(PROMPTS, params, strict=True)]
    backwards = token_ids(llm.generate(PROMPTS[::-1], params[::-1]))[::-1]
    assert together == alone == backwards
    other = token_ids(llm.generate(PROMPTS, [p.replace(seed=p.seed + 100) for p in params]))
    assert all(a != b for a, b in zip(together, other, strict=True))


def test_samples_of_a_prompt(llm: LLM) -> None:
    prompt = random_tokens(40)
    params = SamplingParams(n=4, temperature=1.2, seed=7, max_tokens=COUNT, ignore_eos=True)
    recorder = record(llm)
    (output,) = llm.generate(prompt, params)
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 4
    # The prompt once, then each sample's tokens but the last.
    assert recorder.num_tokens == 40 + 4 * (COUNT - 1)
    (again,) = llm.generate([prompt, *PROMPTS], [params, *[greedy(3)] * len(PROMPTS)])[:1]
    assert [sample.token_ids for sample in again.outputs] == [sample.token_ids for sample in output.outputs]
    (first,) = llm.generate(prompt, params.replace(n=1))
    assert first.outputs[0].token_ids == output.outputs[0].token_ids


def test_samples_share_the_pages_of_the_prompt(small: LLM) -> None:
    engine = engine_of(small)
    samples = engine.submit(engine_tokens(40), SamplingParams(n=8, seed=1, max_tokens=4, ignore_eos=True))
    engine.step()
    engine.step()
    state = engine.runner.state
    # 40 tokens are 2 whole pages, which all share, and a half, of which each has its own copy.
    assert state.num_pages - state.num_available_pages() == 2 + 8
    check(small)
    engine.run(samples)


def test_more_samples_than_may_run_at_a_time(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm, roomy = make_llm(llama, max_num_seqs=3), make_llm(llama)
    params = SamplingParams(n=8, seed=5, max_tokens=6, ignore_eos=True)
    recorder = record(llm)
    found = llm.generate([random_tokens(20), random_tokens(9)], params)
    assert max(len(step.chunks) for step in recorder.forwards) <= 3
    for mine, other in zip(found, roomy.generate([random_tokens(20), random_tokens(9)], params), strict=True):
        assert [s.token_ids for s in mine.outputs] == [s.token_ids for s in other.outputs]


def test_equal_prompts_submitted_together_are_computed_once(llm: LLM, checkpoint: Checkpoint) -> None:
    prompt = random_tokens(100)
    recorder = record(llm)
    outputs = llm.generate([prompt] * 5, greedy(COUNT))
    assert token_ids(outputs) == [checkpoint.greedy(prompt, COUNT)] * 5
    assert recorder.num_tokens == 100 + 4 * 1 + 5 * (COUNT - 1)
    assert sorted(output.num_cached_tokens for output in outputs) == [0, 99, 99, 99, 99]


def test_a_second_turn_runs_only_what_is_new(llm: LLM, checkpoint: Checkpoint) -> None:
    history = random_tokens(120)
    answer = llm.generate(history, greedy(COUNT))[0].outputs[0].token_ids
    turn = history + answer + random_tokens(6, seed=1)
    recorder = record(llm)
    (output,) = llm.generate(turn, greedy(COUNT))
    # The last token of an answer is sampled and never run.
    assert output.num_cached_tokens == 120 + COUNT - 1
    assert recorder.num_tokens == 1 + 6 + COUNT - 1
    assert output.outputs[0].token_ids == checkpoint.greedy(turn, COUNT)


def engine_tokens(length: int):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.array(random_tokens(length), dtype=np.int64)
