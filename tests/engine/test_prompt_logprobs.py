"""Log-probabilities of prompts against transformers' logits, however the prompt is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.exact import TINY_PYTHON
from tests.small_llms import TOLERANCE, VOCAB, Checkpoint, MakeLLM, check, engine_of, greedy, random_tokens, record

from quire import LLM, FailedPrecondition, InvalidArgument, SamplingParams
from quire.base.outputs import Logprob, RequestOutput
from quire.engine.request_outputs import request_output
from quire.engine.step_builder import ALL_LOGITS_CHUNK
from quire.sampling.token_logprobs import PromptLogprobs

PROMPT = random_tokens(40)


def assert_right(output: RequestOutput, checkpoint: Checkpoint, count: int) -> None:
    prompt = output.prompt_token_ids
    found = output.prompt_logprobs
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    logprobs = checkpoint.logits(prompt).double().log_softmax(-1)
    for position in range(1, len(prompt)):
        row, entries, token = logprobs[position - 1], found[position], prompt[position]
        assert entries is not None
        best = row.topk(count).indices.tolist()
        assert set(entries) == {token, *best}
        assert next(iter(entries)) == token
        for other, entry in entries.items():
            assert isinstance(entry, Logprob)
            assert abs(entry.logprob - float(row[other])) <= TOLERANCE * float(row.abs().max())
            assert entry.rank == 1 + int((row > row[other]).sum())


@pytest.mark.parametrize("count", [0, 1, 5])
def test_equal_transformers(llm: LLM, checkpoint: Checkpoint, count: int) -> None:
    outputs = llm.generate([PROMPT, random_tokens(1), random_tokens(2)], greedy(4, prompt_logprobs=count))
    for output in outputs:
        assert_right(output, checkpoint, count)
        assert output.outputs[0].token_ids == checkpoint.greedy(output.prompt_token_ids, 4)
        assert output.outputs[0].logprobs is None
    check(llm)
    assert llm.generate(PROMPT, greedy(1))[0].prompt_logprobs is None


def test_what_is_cached_runs_again(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """The whole prompt was run before, by a request that is gone and by one that goes on."""
    llm = make_llm(llama)
    engine = engine_of(llm)
    llm.generate(PROMPT, greedy(3))
    live = engine.submit(np.array(PROMPT), greedy(30))
    engine.step()
    recorder = record(llm)
    (output,) = llm.generate(PROMPT, greedy(3, prompt_logprobs=2))
    assert_right(output, llama, 2)
    assert output.num_cached_tokens == 0
    assert len(PROMPT) in [len(chunk.tokens) for step in recorder.forwards for chunk in step.chunks]
    # And others find it.
    assert llm.generate([*PROMPT, 1, 2], greedy(1))[0].num_cached_tokens >= len(PROMPT)
    engine.run(live)
    check(llm)


def test_equal_prompts_at_once(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Those that want log-probabilities do not wait for another's prompt, since they could not use
    it.
    """
    llm = make_llm(llama)
    recorder = record(llm)
    params = [greedy(2), greedy(2, prompt_logprobs=1), greedy(2, prompt_logprobs=3), greedy(2)]
    outputs = llm.generate([PROMPT] * 4, params)
    assert [output.prompt_logprobs is not None for output in outputs] == [False, True, True, False]
    assert_right(outputs[1], llama, 1)
    assert_right(outputs[2], llama, 3)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, len(PROMPT) - 1]
    assert [chunk.logits for chunk in recorder.forwards[0].chunks] == ["last", "all", "all"]
    # Once the prompt is there, only the last row is wanted.
    assert {chunk.logits for step in recorder.forwards[1:] for chunk in step.chunks} == {"last"}


@pytest.mark.parametrize("budget", [1, 7, 16])
def test_in_chunks(make_llm: MakeLLM, llama: Checkpoint, budget: int) -> None:
    llm = make_llm(llama, max_num_batched_tokens=budget)
    outputs = llm.generate([PROMPT, random_tokens(23)], greedy(3, prompt_logprobs=2, n=2))
    for output in outputs:
        assert_right(output, llama, 2)
        assert [sample.token_ids for sample in output.outputs] == [llama.greedy(output.prompt_token_ids, 3)] * 2
    check(llm)


def test_rows_of_a_step_are_bounded(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Logits of prompts are rows of the whole vocabulary: never more than a chunk of them at a
    time, and nobody waits for ever.
    """
    llm = make_llm(llama)
    recorder = record(llm)
    prompts = [random_tokens(length, seed=length) for length in (200, 180, 90, 50, 201)]
    params = [greedy(3, prompt_logprobs=1)] * 4 + [greedy(3)]
    outputs = llm.generate(prompts, params)
    for output, prompt in zip(outputs[:4], prompts, strict=False):
        assert output.prompt_token_ids == prompt
        assert_right(output, llama, 1)
    for step in recorder.forwards:
        assert sum(len(chunk.tokens) for chunk in step.chunks if chunk.logits == "all") <= ALL_LOGITS_CHUNK
    # The last prompt needs no rows, so it did not wait for those that do.
    first = recorder.forwards[0].chunks
    assert [len(chunk.tokens) for chunk in first] == [200, 56, 201]


def test_rows_that_are_known_are_passed_over(llama: Checkpoint) -> None:
    """Of a prompt that is computed again from an earlier position on."""
    logits = llama.logits(PROMPT)
    once = PromptLogprobs(np.array(PROMPT), 2)
    once.take(0, logits)
    assert once.complete
    again = PromptLogprobs(np.array(PROMPT), 2)
    for start, end in ((0, 10), (0, 7), (4, 23), (23, 24), (20, 40), (39, 40), (0, 40)):
        again.take(start, logits[start:end])
    assert again.entries == once.entries
    assert [entry.chosen.token_id for entry in again.entries] == PROMPT[1:]


@pytest.mark.parametrize("at", [1, 2, 4])
def test_preempted(make_llm: MakeLLM, llama: Checkpoint, at: int) -> None:
    """In the middle of the prompt, or after it; nothing is lost, and nothing is there twice."""
    llm = make_llm(llama, max_num_batched_tokens=16)
    engine = engine_of(llm)
    (request,) = engine.submit(np.array(PROMPT), greedy(6, prompt_logprobs=2))
    for _ in range(at):
        engine.step()
    engine.scheduler.preempt(request)
    engine.run([request])
    output = request_output([request], None)
    assert output.metrics.num_preemptions == 1
    assert_right(output, llama, 2)
    assert output.outputs[0].token_ids == llama.greedy(PROMPT, 6)
    check(llm)


def test_in_a_session(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """All of its tokens are the prompt; they are run again, and the session goes on."""
    llm = make_llm(llama)
    with llm.session(PROMPT) as session:
        session.generate(greedy(3))
        tokens = session.tokens
        output = session.generate(greedy(4, prompt_logprobs=1))
        assert output.prompt_token_ids == tokens
        assert_right(output, llama, 1)
        assert session.tokens == tokens + llama.greedy(tokens, 4)
        assert session.generate(greedy(2)).outputs[0].token_ids == llama.greedy(session.tokens[:-2], 2)
        state = session.kv(0)
        session.set_kv(0, k=state["k"])
        before = (session.tokens, session.num_computed)
        with pytest.raises(FailedPrecondition, match=r"prompt_logprobs.*set_kv"):
            session.generate(greedy(1, prompt_logprobs=1))
        assert (session.tokens, session.num_computed) == before
    check(llm)


def test_cancelled_in_the_prompt(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, max_num_batched_tokens=8)
    engine = engine_of(llm)
    requests = engine.submit(np.array(PROMPT), greedy(6, prompt_logprobs=2))
    engine.step()
    engine.end(requests)
    assert request_output(requests, None).prompt_logprobs is None
    check(llm)


def test_logits_that_are_not_finite_end_one_request(
    make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they are in the middle of the prompt, and the last row is fine."""
    llm = make_llm(llama)
    engine = engine_of(llm)
    execute = engine.runner.execute

    def poisoned(step: Any) -> Any:
        output = execute(step)
        for index, chunk in enumerate(step.chunks):
            if chunk.logits == "all" and len(chunk.tokens) == 30:
                output.rows(index)[11, 3] = torch.nan
        return output

    monkeypatch.setattr(engine.runner, "execute", poisoned)
    good, bad, other = llm.generate(
        [PROMPT, random_tokens(30), random_tokens(9)],
        [greedy(3, prompt_logprobs=1), greedy(3, n=2, prompt_logprobs=1), greedy(3)],
    )
    assert_right(good, llama, 1)
    assert other.outputs[0].token_ids == llama.greedy(random_tokens(9), 3)
    assert [sample.finish_reason for sample in bad.outputs] == ["error", "error"]
    assert "token 11 of the prompt" in (bad.outputs[0].error or "")
    assert bad.prompt_logprobs is None
    check(llm)


def test_bad_values(small: LLM) -> None:
    for value in (-1, 1.5, True, "2"):
        with pytest.raises(InvalidArgument, match="prompt_logprobs"):
            SamplingParams(prompt_logprobs=value)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=f"prompt_logprobs must be at most {VOCAB}, .* got {VOCAB + 1}"):
        small.generate(PROMPT, greedy(1, prompt_logprobs=VOCAB + 1))
    (output,) = small.generate(PROMPT[:3], greedy(1, prompt_logprobs=VOCAB))
    assert output.prompt_logprobs is not None
    assert [entries and len(entries) for entries in output.prompt_logprobs] == [None, VOCAB, VOCAB]


def test_texts_of_tokens(python_llm: LLM) -> None:
    (output,) = python_llm.generate("def f(x):\n", greedy(1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    entries = [next(iter(entry.values())) for entry in output.prompt_logprobs if entry is not None]
    assert "def f(x):\n".endswith("".join(entry.decoded_token or "" for entry in entries))
    scores = [entry.logprob for entry in entries]
    with python_llm.session(output.prompt_token_ids[:1]) as session:
        again = session.score(output.prompt_token_ids[1:])
    assert scores == pytest.approx(again, abs=TINY_PYTHON)
