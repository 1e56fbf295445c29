"""What runs only while nothing else does: it takes nothing from others, ends when they come, and
later turns go on from it, also those of sessions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.small_llms import Checkpoint, MakeLLM, check, engine_of, greedy, random_tokens, record

from quire import LLM, InvalidArgument, ResourceExhausted
from quire.base.sampling_params import SamplingParams
from quire.contracts.executor_calls import PrefillInput
from quire.sessions.chat_turns import next_turn_ids, parts_from
from quire.text.tokenizer import Tokenizer

KEY = ("", None)


def ids(length: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(random_tokens(length, seed), dtype=np.int64)


# -- prefixes that are run -------------------------------------------------------------------------


def next_turn(llm: LLM, model: Checkpoint) -> None:
    """A turn whose answer is written in another way into the next prompt, which finds it."""
    start, thought, answer, question = (random_tokens(count, seed=count) for count in (40, 11, 23, 13))
    llm.generate([*start, 3, *thought], greedy(20))
    history = [*start, *answer]
    output = llm.prefetch([*history, 0], only_idle=True)
    assert output.finished
    assert output.prompt_token_ids == history
    steps = record(llm)
    found = llm.generate([*history, *question], greedy(4))[0]
    assert found.num_cached_tokens == len(history)
    assert steps.forwards[0].num_tokens == len(question)
    assert found.outputs[0].token_ids == model.greedy([*history, *question], 4)
    check(llm)


def test_the_next_turn_starts_hot(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    next_turn(make_llm(checkpoint), checkpoint)


def test_the_next_turn_of_a_hybrid(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    """A state is kept exactly where the history ends."""
    next_turn(make_llm(hybrid, kv_cache_memory="2MiB"), hybrid)


def test_only_so_many_tokens_are_run(small: LLM) -> None:
    prompt = random_tokens(60)
    steps = record(small)
    output = small.prefetch(prompt, only_idle=True, most=58)
    assert (output.finished, output.prompt_token_ids, steps.forwards) == (False, [], [])
    small.generate(prompt[:31], greedy(1))
    output = small.prefetch(prompt, only_idle=True, most=20)
    assert (output.finished, output.prompt_token_ids) == (False, prompt[:31])
    assert small.prefetch(prompt, only_idle=True, most=28).finished
    for bad in (0, True, "x"):
        with pytest.raises(InvalidArgument, match="most"):
            small.prefetch(prompt, only_idle=True, most=bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="only_idle"):
        small.prefetch(prompt, only_idle=1)  # type: ignore[arg-type]


def test_it_ends_when_anything_comes(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    """A request, a session's call, a prefetch that was asked for; each runs in the next step."""
    llm = make_llm(checkpoint, max_num_batched_tokens=16)
    engine = engine_of(llm)
    long, prompt = ids(200), ids(12, seed=1)
    with llm.session(random_tokens(5)) as session:
        for start in (
            lambda: engine.submit(prompt, greedy(1), key=KEY)[0],
            lambda: engine.submit_run(session._branch, prompt),
            lambda: engine.submit_prefix(prompt, key=KEY),
        ):
            llm.reset_prefix_cache()
            run = engine.submit_prefix(long, key=KEY, only_idle=True)
            engine.step()
            assert (run.branch.computed, run.finished) == (16, False)
            other = start()
            assert run.output.finish_reason == "cancelled"
            assert not run.succeeded
            engine.step()
            assert other.finished
            assert engine.requests.yielding is None
            check(llm)


def test_it_takes_no_room_from_sessions(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """But from finished prompts it does, the least recently used ones, as any prompt."""
    llm = make_llm(llama, pool=256)
    llm.generate(random_tokens(90, seed=3), greedy(1))
    with llm.session(random_tokens(120)) as session:
        assert llm.prefetch(random_tokens(100, seed=4), only_idle=True).finished
        assert session.num_computed == 119
        with pytest.raises(ResourceExhausted, match="short of"):
            llm.prefetch(random_tokens(200, seed=5), only_idle=True)
        assert session.num_computed == 119
        check(llm)
        assert llm.prefetch(random_tokens(200, seed=5)).finished
        assert session.num_computed == 0, "what was asked for takes what it needs"


def test_others_that_want_room_get_it(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """An executor's call is not refused for a run that nobody waits for."""
    llm = make_llm(llama, pool=256, max_num_batched_tokens=64)
    engine = engine_of(llm)
    run = engine.submit_prefix(ids(200), key=KEY, only_idle=True)
    for _ in range(3):
        engine.step()
    assert run.branch.computed == 192
    llm.executor.prefill(PrefillInput(input_ids=torch.tensor([random_tokens(150, seed=1)])))
    assert run.output.finish_reason == "cancelled"
    engine.runner.state.check()


# -- sessions whose tokens change ------------------------------------------------------------------


def diverging(llm: LLM, model: Checkpoint) -> None:
    """A session's next prompt parts from its tokens; a cached sequence has more of the new ones."""
    engine = engine_of(llm)
    first, other = random_tokens(60), [*random_tokens(60)[:20], *random_tokens(35, seed=8)]
    llm.prefetch([*other, 0])
    with llm.session(first) as session:
        prompt = np.array([*other, 1, 2], dtype=np.int64)
        request = engine.submit(prompt, greedy(4), session=session._branch)[0]
        assert request.seat.reuse.cached == len(other)
        check(llm)
        engine.run([request])
        assert request.output.token_ids == model.greedy(prompt.tolist(), 4)
        assert session.tokens == [*prompt.tolist(), *request.output.token_ids]
        check(llm)
        # A run that is cancelled leaves the session as it was, whatever it went on from.
        before = session.tokens
        again = engine.submit_run(session._branch, np.array([*before[:20], *other[20:], 7, 8]))
        engine.end([again])
        assert session.tokens == before
        check(llm)
        assert session.generate(greedy(3)).outputs[0].token_ids == model.greedy(before, 3)
        check(llm)


def test_a_session_goes_on_from_what_is_cached(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    diverging(make_llm(checkpoint), checkpoint)


def test_a_session_of_a_hybrid_too(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    diverging(make_llm(hybrid, kv_cache_memory="2MiB"), hybrid)


# -- what the next turn begins with ----------------------------------------------------------------


def written(messages: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f"[{one['role']}] {one.get('content') or one.get('tool_calls')}\n" for one in messages)


def test_what_the_next_prompt_begins_with(python_llm: LLM) -> None:
    """All that no next message can change: never more, and little less."""
    tokenizer = python_llm.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    answer = {"role": "assistant", "content": "return sum(values)"}
    messages = [{"role": "user", "content": "def total(values):"}, answer]
    found = next_turn_ids(written, messages, tokenizer).tolist()
    for text in ("x", " y", "\n", "0 1", "[1]", "é"):
        prompt = tokenizer.encode(written([*messages, {"role": "user", "content": text}]), add_special_tokens=False)
        assert prompt[: len(found)] == found
    head = tokenizer.encode(written(messages) + "[user]", add_special_tokens=False)
    assert len(found) >= len(head) - 1
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": {"name": "f"}}]}
    text = tokenizer.decode(next_turn_ids(written, [messages[0], calls], tokenizer).tolist())
    assert "[tool" in text, "calls are answered by a tool"


def test_whether_a_history_parts() -> None:
    held = np.array([1, 2, 3, 4])
    for history, parts in (([1, 2, 3, 4, 5], False), ([1, 2, 3], False), ([1, 2, 9], True), ([], False)):
        assert parts_from(np.array(history, dtype=np.int64), held) == parts


def test_a_session_without_a_turn_has_nothing_to_run(python_llm: LLM) -> None:
    with python_llm.session("def f():") as session:
        assert session.prefetch_next_turn() is None
        session.chat([{"role": "user", "content": "def g():"}], SamplingParams(max_tokens=3, temperature=0))
        assert session.prefetch_next_turn() is None, "this template writes answers as they are"
        session.append("x")
        assert session.prefetch_next_turn() is None
