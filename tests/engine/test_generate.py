"""``LLM.generate``: when it ends, what it returns, what a cancelled or broken step
leaves behind."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from tests.small_llms import (
    CONTEXT,
    EOS,
    Checkpoint,
    MakeLLM,
    assert_near,
    check,
    engine_of,
    greedy,
    random_tokens,
    token_ids,
)

from quire import LLM, BeamSearchParams, SamplingParams
from quire.base.errors import InvalidArgument, QuireError

PROMPT = random_tokens(20)


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


# -- when it ends ----------------------------------------------------------------------------------


def test_length(llm: LLM, checkpoint: Checkpoint) -> None:
    for count in (1, 2, 9):
        output = llm.generate(PROMPT, greedy(count))[0].outputs[0]
        assert output.token_ids == checkpoint.greedy(PROMPT, count)
        assert (output.finish_reason, output.stop_reason) == ("length", None)


def test_context(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, max_model_len=48)
    output = llm.generate(PROMPT, greedy(1).replace(max_tokens=None))[0].outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("length", "context")
    assert output.token_ids == llama.greedy(PROMPT, 28)
    # What the pool holds ends it too; the last token needs no page.
    tight = make_llm(llama, pool=32)
    output = tight.generate(PROMPT, greedy(1).replace(max_tokens=None))[0].outputs[0]
    assert (output.stop_reason, output.token_ids) == ("context", llama.greedy(PROMPT, 13))
    longest = random_tokens(CONTEXT - 1)
    assert len(make_llm(llama).generate(longest, greedy(1))[0].outputs[0].token_ids) == 1


def test_eos_and_stop_tokens(small: LLM, llama: Checkpoint) -> None:
    eos = SamplingParams(temperature=0, max_tokens=6, logit_bias={EOS: 100})
    output = small.generate(PROMPT, eos)[0].outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([EOS], "stop", EOS)
    assert small.generate(PROMPT, eos.replace(ignore_eos=True))[0].outputs[0].token_ids == [EOS] * 6
    # Banned until three tokens are there.
    output = small.generate(PROMPT, eos.replace(min_tokens=3))[0].outputs[0]
    assert len(output.token_ids) == 4
    assert output.token_ids.index(EOS) == 3
    tokens = llama.greedy(PROMPT, 9)
    output = small.generate(PROMPT, greedy(9, stop_token_ids=[tokens[3], tokens[5]]))[0].outputs[0]
    first = min(tokens.index(tokens[3]), tokens.index(tokens[5]))
    assert (output.token_ids, output.stop_reason) == (tokens[: first + 1], tokens[first])


def test_stop_strings(python_llm: LLM) -> None:
    free = python_llm.generate("def fib(n):\n", greedy(16))[0].outputs[0]
    assert python_llm.tokenizer is not None
    # Across the border of two tokens.
    cut = len(python_llm.tokenizer.decode(free.token_ids[:6]))
    stop = free.text[cut - 2 : cut + 2]
    at = free.text.index(stop)
    output = python_llm.generate("def fib(n):\n", greedy(16, stop=["never to be seen", stop]))[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (free.text[:at], "stop", stop)
    assert output.token_ids == free.token_ids[: len(output.token_ids)]
    output = python_llm.generate("def fib(n):\n", greedy(16, stop=stop, include_stop_str_in_output=True))[0].outputs[0]
    assert output.text == free.text[: at + len(stop)]
    late = python_llm.generate("def fib(n):\n", greedy(16, stop=stop, min_tokens=16))[0].outputs[0]
    assert late.text == free.text
    check(python_llm)


def test_special_tokens_and_the_text_of_a_stop_token(python_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias={1: 100})
    assert python_llm.generate("x =", params)[0].outputs[0].text == ""
    shown = python_llm.generate("x =", params.replace(skip_special_tokens=False))[0].outputs[0].text
    assert shown == "<|pad|>" * 3
    free = python_llm.generate("x =", greedy(4))[0].outputs[0]
    stop = free.token_ids[2]
    assert python_llm.tokenizer is not None
    count = free.token_ids.index(stop)
    without = python_llm.generate("x =", greedy(4, stop_token_ids=[stop]))[0].outputs[0]
    assert without.text == python_llm.tokenizer.decode(free.token_ids[:count])
    params = greedy(4, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert free.text.startswith(python_llm.generate("x =", params)[0].outputs[0].text)
    assert len(python_llm.generate("x =", params)[0].outputs[0].text) > len(without.text)


# -- what it returns -------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_distribution(llm: LLM, checkpoint: Checkpoint) -> None:
    params = SamplingParams(temperature=0.7, top_k=5, seed=1, max_tokens=8, logprobs=3, ignore_eos=True)
    output = llm.generate(PROMPT, params)[0].outputs[0]
    wanted = checkpoint.logits(PROMPT + output.token_ids)[len(PROMPT) - 1 : -1].log_softmax(-1)
    assert output.logprobs is not None
    for row, token, found in zip(wanted, output.token_ids, output.logprobs, strict=True):
        best = row.topk(3).indices.tolist()
        assert set(found) == {token, *best}
        assert next(iter(found)) == token
        for other, entry in found.items():
            assert_near(torch.tensor(entry.logprob), row[other])
            assert entry.rank == 1 + int((row > row[other]).sum())
            assert entry.decoded_token is None
    chosen = sum(float(row[token]) for row, token in zip(wanted, output.token_ids, strict=True))
    assert_near(torch.tensor(output.cumulative_logprob), torch.tensor(chosen))
    plain = llm.generate(PROMPT, params.replace(logprobs=None))[0].outputs[0]
    assert (plain.logprobs, plain.cumulative_logprob, plain.token_ids) == (None, None, output.token_ids)


def test_shapes_of_prompts(small: LLM) -> None:
    for one in (PROMPT, tuple(PROMPT), ids(PROMPT), [PROMPT], [ids(PROMPT)], ids(PROMPT)[None]):
        (output,) = small.generate(one, greedy(3))
        assert output.prompt_token_ids == PROMPT
        assert output.prompt is None
    assert small.generate([], greedy(1)) == []
    many = [random_tokens(n) for n in (9, 3, 30, 1)]
    before = [list(prompt) for prompt in many]
    outputs = small.generate(many, [greedy(n) for n in (4, 1, 3, 2)])
    assert [output.prompt_token_ids for output in outputs] == before == many
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 1, 3, 2]
    assert len({output.request_id for output in outputs}) == 4


def test_metrics_of_a_request(small: LLM) -> None:
    metrics = small.generate(PROMPT, greedy(5))[0].metrics
    assert metrics.time_to_first_token is not None
    assert metrics.e2e_latency is not None
    assert 0 < metrics.time_to_first_token < metrics.e2e_latency
    found = small.metrics()
    assert found["quire:prompt_tokens_total"] == 20
    assert found["quire:generation_tokens_total"] == 5
    assert found['quire:request_success_total{finished_reason="length"}'] == 1


def test_prompt_tokens_count_when_their_state_is_there(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """A prompt and its cached tokens count in the same step, however long it has waited."""
    llm = make_llm(llama, max_num_seqs=1)
    engine = engine_of(llm)
    for _ in range(2):
        engine.submit(np.array(PROMPT), greedy(3))
    assert llm.metrics()["quire:prompt_tokens_total"] == 0
    seen = []
    while engine.has_work:
        engine.step()
        found = llm.metrics()
        seen.append((found["quire:prompt_tokens_total"], found["quire:prompt_tokens_cached_total"]))
    assert sorted(set(seen)) == [(20, 0), (40, 19)]


def test_what_sessions_compute_counts_as_prompts(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """All but the last token, which runs with what follows. A beam search counts its prompt."""
    llm = make_llm(llama)

    def count() -> float:
        return llm.metrics()["quire:prompt_tokens_total"]

    with llm.session(PROMPT) as session:
        assert count() == 19
        session.append(random_tokens(30, seed=1))
        assert count() == 49
        session.generate(greedy(3))
        assert (count(), llm.metrics()["quire:prompt_tokens_cached_total"]) == (49 + 50, 49)
        session.append(random_tokens(10, seed=2))
        assert count() == 99 + 10
    before = count()
    llm.beam_search([random_tokens(12, seed=3)], BeamSearchParams(beam_width=2, max_tokens=4))
    assert count() == before + 12
    llm.prefetch(random_tokens(25, seed=4))
    assert count() == before + 12 + 24


def test_no_leak_over_many_requests(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=128, page_size=4)
    for seed in range(30):
        llm.generate([random_tokens(20, seed=seed), random_tokens(7, seed=seed)], greedy(3, n=2))
        check(llm)


# -- cancel ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9])
def test_cancel_in_every_phase(make_llm: MakeLLM, llama: Checkpoint, steps: int) -> None:
    """Waiting, in its prompt's chunks, decoding: beside a request that is not to notice."""
    llm = make_llm(llama, max_num_batched_tokens=8)
    engine = engine_of(llm)
    other = engine.submit(ids(random_tokens(9)), greedy(12))
    victim = engine.submit(ids(random_tokens(30, seed=1)), greedy(40, n=2), request_id="victim")
    for _ in range(steps):
        engine.step()
    assert engine.cancel("victim")
    assert not engine.cancel("somebody else")
    engine.step()
    assert all(sample.output.finish_reason == "cancelled" for sample in victim)
    assert not engine.cancel("victim")
    check(llm)
    engine.run(other)
    assert other[0].output.token_ids == llama.greedy(random_tokens(9), 12)
    again = engine.submit(ids(random_tokens(30, seed=1)), greedy(4), request_id="victim")
    engine.run(again)
    assert again[0].output.token_ids == llama.greedy(random_tokens(30, seed=1), 4)
    with pytest.raises(InvalidArgument, match="in use"):
        [engine.submit(ids([1]), greedy(1), request_id="twice") for _ in range(2)]
    engine.cancel("twice")
    engine.step()


def test_a_request_without_a_name_takes_no_given_one(small: LLM) -> None:
    engine = engine_of(small)
    given = engine.submit(ids(PROMPT), greedy(3), request_id="request-0")
    made = [one for _ in range(2) for one in engine.submit(ids(PROMPT), greedy(3))]
    engine.run([*given, *made])
    assert [one.request_id for one in made] == ["request-1", "request-2"]


def test_a_late_cancel_does_not_hit_the_next_of_that_name(small: LLM) -> None:
    engine = engine_of(small)
    first = engine.submit(ids(PROMPT), greedy(3), request_id="name")
    engine.cancel("name")
    engine.end(first)
    second = engine.submit(ids(PROMPT), greedy(3), request_id="name")
    engine.run(second)
    assert second[0].output.finish_reason == "length"


@pytest.mark.parametrize("where", ["before", "after", "draw"])
def test_interrupt(make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Ctrl-C in a step ends the requests of the call that it hit, and nobody else's."""
    llm = make_llm(llama)
    engine = engine_of(llm)
    others = engine.submit(ids(random_tokens(9)), greedy(12))
    session = llm.session(random_tokens(15))
    count = 0

    def interrupt() -> None:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt

    execute = engine.runner.execute

    def executing(step):  # type: ignore[no-untyped-def]
        if where == "before" and step.chunks:
            interrupt()
        output = execute(step)
        if where == "after" and step.chunks:
            interrupt()
        return output

    monkeypatch.setattr(engine.runner, "execute", executing)
    if where == "draw":
        import quire.engine.sampling_step as module

        draw = module.sample

        def drawing(*arguments):  # type: ignore[no-untyped-def]
            interrupt()
            return draw(*arguments)

        monkeypatch.setattr(module, "sample", drawing)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, random_tokens(5)], greedy(30))
    check(llm)
    engine.run(others)
    assert others[0].output.token_ids == llama.greedy(random_tokens(9), 12)
    count = 1
    with pytest.raises(KeyboardInterrupt):
        session.generate(greedy(9))
    assert session.tokens[:15] == random_tokens(15)
    assert llama.continues(random_tokens(15), session.tokens[15:])
    tokens = session.tokens
    assert session.generate(greedy(5)).outputs[0].token_ids == llama.greedy(tokens, 5)
    check(llm)


# -- broken steps ----------------------------------------------------------------------------------


def test_a_step_that_raises_ends_only_its_requests(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, max_num_seqs=2)
    engine = engine_of(llm)
    blocks: Any = engine.runner.model.blocks
    block = blocks[1]
    broken = [True]

    def breaking(*arguments):  # type: ignore[no-untyped-def]
        if broken:
            broken.clear()
            raise RuntimeError("the device fell over")
        return block(*arguments)

    blocks[1] = breaking
    outputs = llm.generate([PROMPT, random_tokens(5), random_tokens(6), random_tokens(7)], greedy(6))
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error", "length", "length"]
    assert "the device fell over" in (outputs[0].outputs[0].error or "")
    assert token_ids(outputs[2:]) == [llama.greedy(random_tokens(n), 6) for n in (6, 7)]
    check(llm)
    session = llm.session(PROMPT)
    broken.append(True)
    with pytest.raises(QuireError, match="fell over"):
        session.generate(greedy(3))
    broken.append(True)
    with pytest.raises(QuireError, match="fell over"):
        session.append([1, 2, 3])
    assert session.tokens == PROMPT
    assert session.generate(greedy(3)).outputs[0].token_ids == llama.greedy(PROMPT, 3)
    check(llm)


@pytest.mark.parametrize("at", [1, 3])
def test_not_finite_logits_end_one_request(
    small: LLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    engine = engine_of(small)
    execute, steps = engine.runner.execute, []

    def poisoned(step):  # type: ignore[no-untyped-def]
        output = execute(step)
        if step.chunks:
            steps.append(step)
            if len(steps) == at:
                output.rows(1)[:, 7] = torch.nan
        return output

    monkeypatch.setattr(engine.runner, "execute", poisoned)
    prompts = [random_tokens(n) for n in (5, 40, 7)]
    outputs = small.generate(prompts, greedy(6))
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert len(outputs[1].outputs[0].token_ids) == at - 1
    assert token_ids(outputs)[::2] == [llama.greedy(prompts[0], 6), llama.greedy(prompts[2], 6)]
    # What may be broken is not found by others.
    (again,) = small.generate(prompts[1], greedy(6))
    assert (again.num_cached_tokens, again.outputs[0].token_ids) == (0, llama.greedy(prompts[1], 6))
    check(small)


def test_waiting_threads_are_woken_by_close(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    found: list[str | None] = []

    def use() -> None:
        for output in llm.generate([PROMPT, random_tokens(9)], greedy(200, n=3)):
            found.extend(sample.finish_reason for sample in output.outputs)

    thread = threading.Thread(target=use)
    engine = engine_of(llm)
    thread.start()
    while len(engine.requests.by_id) < 2 and thread.is_alive():
        pass
    llm.close()
    thread.join(30)
    assert not thread.is_alive()
    assert found == ["cancelled"] * 6
