"""Sessions: what they hold, fork, rewind, score, logits, kv, chat, memory, threads."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace

import pytest
import torch
from tests.small_llms import (
    CONTEXT,
    EOS,
    VOCAB,
    WINDOW,
    Checkpoint,
    MakeLLM,
    assert_near,
    attention_layer,
    check,
    engine_of,
    greedy,
    random_tokens,
    record,
)

from quire import LLM, FailedPrecondition, InvalidArgument, ResourceExhausted, SamplingParams, Unsupported
from quire.base.errors import Cancelled, QuireError
from quire.sessions.display import session_repr


def test_length_counts_the_last_sampled_token(llm: LLM, checkpoint: Checkpoint) -> None:
    prompt = random_tokens(20)
    session = llm.session(prompt)
    output = session.generate(greedy(7))
    assert output.outputs[0].token_ids == checkpoint.greedy(prompt, 7)
    assert len(session) == 27
    assert session.tokens == prompt + output.outputs[0].token_ids == output.prompt_token_ids + session.tokens[20:]
    assert session.num_computed == 26
    check(llm)


def test_a_session_continues_as_one_run(llm: LLM, checkpoint: Checkpoint) -> None:
    prompt, more = random_tokens(20), random_tokens(5, seed=1)
    session = llm.session()
    assert len(session) == 0
    assert session.append(prompt[:1]).append(prompt[1:]) is session
    first = session.generate(greedy(6)).outputs[0].token_ids
    session.append(more)
    second = session.generate(greedy(6)).outputs[0].token_ids
    assert first == checkpoint.greedy(prompt, 6)
    assert second == checkpoint.greedy(prompt + first + more, 6)
    assert session.append([]) is session


def test_calls_run_only_what_is_new(small: LLM) -> None:
    session = small.session(random_tokens(50))
    recorder = record(small)
    output = session.generate(greedy(4))
    assert output.num_cached_tokens == 49
    assert recorder.num_tokens == 4
    session.append(random_tokens(10))
    assert recorder.num_tokens == 4 + 10
    session.logits()
    assert recorder.num_tokens == 4 + 10 + 1
    session.logits()
    session.append([1])
    assert recorder.num_tokens == 4 + 10 + 1


def test_stream(llm: LLM, checkpoint: Checkpoint) -> None:
    prompt = random_tokens(9)
    session = llm.session(prompt)
    deltas = list(session.stream(greedy(5)))
    assert [token for delta in deltas for token in delta.token_ids] == checkpoint.greedy(prompt, 5)
    assert [delta.finish_reason for delta in deltas] == [None] * 4 + ["length"]
    assert len(session) == 14


def test_leaving_a_stream_early_keeps_what_came(llm: LLM, checkpoint: Checkpoint) -> None:
    prompt = random_tokens(9)
    session = llm.session(prompt)
    for number, _ in enumerate(session.stream(greedy(50))):
        if number == 2:
            break
    gc.collect()
    assert session.tokens == prompt + checkpoint.greedy(prompt, 3)
    assert session.generate(greedy(4)).outputs[0].token_ids == checkpoint.greedy(session.tokens[:-4], 4)
    check(llm)


def test_a_stream_that_is_never_started_does_nothing(small: LLM) -> None:
    session = small.session([1, 2, 3])
    stream = session.stream(greedy(3))
    assert session.append([4]).tokens == [1, 2, 3, 4]
    assert sum(len(delta.token_ids) for delta in stream) == 3


def test_a_busy_session_refuses(small: LLM) -> None:
    session = small.session([1, 2, 3])
    stream = session.stream(greedy(5))
    next(stream)
    for call in (
        lambda: session.append([1]),
        lambda: session.generate(greedy(1)),
        lambda: session.stream(greedy(1)),
        session.fork,
        lambda: session.rewind(to=0),
        session.logits,
        lambda: session.score([1]),
        session.to_bytes,
        lambda: session.kv(0),
    ):
        with pytest.raises(FailedPrecondition, match="generating"):
            call()
    list(stream)
    assert len(session) == 8


def test_score(llm: LLM, checkpoint: Checkpoint) -> None:
    for length in (1, 2, 17):
        # No number of these tokens' rows lies between two codes of a lossy format.
        prompt, new = random_tokens(length), random_tokens(20, seed=3)
        session = llm.session(prompt)
        logits = checkpoint.logits(prompt + new)[length - 1 : -1].double().log_softmax(-1)
        wanted = [float(row[token]) for row, token in zip(logits, new, strict=True)]
        llm.generate(prompt + new, greedy(1))  # so that all of it is cached
        assert_near(torch.tensor(session.score(new)), torch.tensor(wanted))
        assert session.tokens == prompt
        assert session.generate(greedy(5)).outputs[0].token_ids == checkpoint.greedy(prompt, 5)
    assert session.score([]) == []
    check(llm)


def test_score_in_chunks(make_llm: MakeLLM, llama: Checkpoint) -> None:
    prompt, new = random_tokens(30), random_tokens(40, seed=1)
    wide, narrow = make_llm(llama), make_llm(llama, max_num_batched_tokens=7, page_size=3)
    assert_near(torch.tensor(wide.session(prompt).score(new)), torch.tensor(narrow.session(prompt).score(new)))


def test_logits(llm: LLM, checkpoint: Checkpoint) -> None:
    prompt = random_tokens(20)
    session = llm.session(prompt)
    logits = session.logits()
    assert logits.shape == (VOCAB,)
    assert logits.dtype == torch.float32
    assert_near(logits, checkpoint.logits(prompt)[-1])
    logits.zero_()
    assert_near(session.fork().logits(), checkpoint.logits(prompt)[-1])
    session.append([4])
    assert_near(session.logits(), checkpoint.logits([*prompt, 4])[-1])
    session.rewind(n=1)
    session.append([9])
    assert_near(session.logits(), checkpoint.logits([*prompt, 9])[-1])
    with pytest.raises(InvalidArgument, match="empty"):
        llm.session().logits()


def test_fork(llm: LLM, checkpoint: Checkpoint) -> None:
    prompt = random_tokens(40)
    session = llm.session(prompt)
    recorder = record(llm)
    children = [session.fork(at=at) for at in (0, 1, 16, 17, 39, 40)]
    assert recorder.num_tokens == 0
    for child in children[1:]:
        tokens = child.tokens
        assert tokens == prompt[: len(tokens)]
        assert child.generate(greedy(6)).outputs[0].token_ids == checkpoint.greedy(tokens, 6)
    assert len(children[0]) == 0
    assert session.generate(greedy(6)).outputs[0].token_ids == checkpoint.greedy(prompt, 6)
    many = session.fork(n=3)
    assert [child.tokens for child in many] == [session.tokens] * 3
    assert isinstance(session.fork(n=1), list)
    for n in (0, 16_385):
        with pytest.raises(InvalidArgument, match=r"n must be an integer in \[1, 16384\]"):
            session.fork(n=n)
    check(llm)


def test_forks_share_pages(small: LLM) -> None:
    session = small.session(random_tokens(161))
    state = engine_of(small).runner.state
    before = state.num_available_pages()
    children = session.fork(n=8)
    assert state.num_available_pages() == before
    assert session.pages == (10, 10)
    del children
    assert session.pages == (10, 0)


def test_rewind(llm: LLM, checkpoint: Checkpoint) -> None:
    prompt = random_tokens(40)
    session = llm.session(prompt)
    session.generate(greedy(5))
    recorder = record(llm)
    assert session.rewind_cost(to=17) == 0
    assert session.rewind(to=17) == 0
    assert session.tokens == prompt[:17]
    assert session.generate(greedy(5)).outputs[0].token_ids == checkpoint.greedy(prompt[:17], 5)
    assert recorder.num_tokens == 5
    session.rewind(n=3)
    assert len(session) == 19
    assert session.rewind(n=0) == 0
    assert session.rewind(to=len(session)) == 0
    session.rewind(to=0)
    assert len(session) == 0
    assert session.append(prompt).generate(greedy(5)).outputs[0].token_ids == checkpoint.greedy(prompt, 5)
    check(llm)


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.rewind(),
        lambda s: s.rewind(to=1, n=1),
        lambda s: s.rewind(to=9),
        lambda s: s.rewind(to=-1),
        lambda s: s.rewind(n=9),
        lambda s: s.rewind(n=-1),
        lambda s: s.rewind(to="3"),
        lambda s: s.rewind(n=1.0),
        lambda s: s.rewind_cost(to=9),
        lambda s: s.fork(at=9),
        lambda s: s.fork(at=-1),
        lambda s: s.fork(at=True),
        lambda s: s.fork(n=0),
        lambda s: s.fork(n=1.5),
        lambda s: s.append([VOCAB]),
        lambda s: s.append([-1]),
        lambda s: s.append([1.5]),
        lambda s: s.append([[1]]),
        lambda s: s.append(None),
        lambda s: s.append([2**63]),
        lambda s: s.append([True]),
        lambda s: s.append(b"ab"),
        lambda s: s.append([1] * CONTEXT),
        lambda s: s.score([VOCAB]),
        lambda s: s.score([1] * CONTEXT),
        lambda s: s.generate(greedy(CONTEXT)),
        lambda s: s.generate(SamplingParams(n=2)),
        lambda s: s.generate("greedy"),
        lambda s: s.generate(SamplingParams(stop_token_ids=[VOCAB])),
        lambda s: s.stream(SamplingParams(n=2)),
        lambda s: s.stream(greedy(CONTEXT)),
        lambda s: s.kv(2),
        lambda s: s.kv(-1),
        lambda s: s.set_kv(0),
        lambda s: s.set_kv(0, k=torch.zeros(3, 2, 15)),
        lambda s: s.set_kv(0, k=torch.zeros(9, 2, 16)),
        lambda s: s.set_kv(0, k=torch.zeros(1, 2, 16), v=torch.zeros(2, 2, 16)),
        lambda s: s.set_kv(0, k=torch.zeros(1, 2, 16), start=8),
        lambda s: s.set_kv(0, k=torch.zeros(1, 2, 16), start=-1),
        lambda s: s.set_kv(0, k=torch.zeros(1, 2, 16, dtype=torch.float64)),
        lambda s: s.set_kv(0, k="rows"),
    ],
)
def test_refused_calls_leave_no_trace(small: LLM, llama: Checkpoint, call) -> None:  # type: ignore[no-untyped-def]
    prompt = random_tokens(8)
    session = small.session(prompt)
    with pytest.raises(InvalidArgument):
        call(session)
    assert session.tokens == prompt
    assert not session.modified
    assert session.generate(greedy(4)).outputs[0].token_ids == llama.greedy(prompt, 4)
    check(small)


def test_text_needs_a_tokenizer(small: LLM) -> None:
    session = small.session([1, 2])
    for call in (
        lambda: session.append("text"),
        lambda: session.text,
        lambda: session.score("x"),
        lambda: session.chat([{"role": "user", "content": "hi"}]),
    ):
        with pytest.raises((FailedPrecondition, InvalidArgument), match="tokenizer"):
            call()
    with pytest.raises(Unsupported, match="stop strings"):
        session.generate(SamplingParams(stop="x"))
    assert session.tokens == [1, 2]


def test_stop_tokens_stay_out(llm: LLM, checkpoint: Checkpoint) -> None:
    prompt = random_tokens(20)
    tokens = checkpoint.greedy(prompt, 8)
    stop = tokens[4]
    count = tokens.index(stop)
    session = llm.session(prompt)
    output = session.generate(greedy(8, stop_token_ids=[stop])).outputs[0]
    assert (output.finish_reason, output.stop_reason, output.token_ids) == ("stop", stop, tokens[: count + 1])
    assert session.tokens == prompt + tokens[:count]
    bias = SamplingParams(temperature=0, max_tokens=8, logit_bias={EOS: 100})
    assert session.generate(bias).outputs[0].stop_reason == EOS
    assert session.tokens == prompt + tokens[:count]
    assert session.generate(greedy(3)).outputs[0].token_ids == checkpoint.greedy(prompt + tokens[:count], 3)


# -- kv --------------------------------------------------------------------------------------------


def test_kv_is_that_of_transformers(llm: LLM, checkpoint: Checkpoint) -> None:
    prompt = random_tokens(21)
    session = llm.session(prompt)
    with torch.inference_mode():
        cache = checkpoint.model(torch.tensor([prompt]), use_cache=True).past_key_values
    for layer in range(2):
        found = session.kv(layer)
        windowed = engine_of(llm).runner.state.layer_spec(layer).layer_window is not None
        assert set(found) == ({"k", "v", "positions"} if windowed else {"k", "v"})
        assert_near(found["k"], cache.layers[layer].keys[0].transpose(0, 1))
        assert_near(found["v"], cache.layers[layer].values[0].transpose(0, 1))


def test_kv_of_a_windowed_layer_is_what_it_holds(make_llm: MakeLLM, checkpoints: dict[str, Checkpoint]) -> None:
    llm, checkpoint = make_llm(checkpoints["gemma3"], page_size=4), checkpoints["gemma3"]
    prompt = random_tokens(90)
    session = llm.session(prompt[:60]).append(prompt[60:])
    with torch.inference_mode():
        cache = checkpoint.model(torch.tensor([prompt]), use_cache=True).past_key_values
    found = session.kv(0)
    positions = found["positions"].tolist()
    assert positions == list(range(positions[0], 90))
    assert 90 - 30 - WINDOW - 4 < positions[0] < 90 - WINDOW
    for name, kept in (("k", cache.layers[0].keys), ("v", cache.layers[0].values)):
        assert_near(found[name][-WINDOW + 1 :], kept[0].transpose(0, 1)[-WINDOW + 1 :])
    with pytest.raises(FailedPrecondition, match="window holds positions"):
        session.set_kv(0, k=found["k"][:5], start=positions[0] - 1)
    session.set_kv(0, k=found["k"][:5] * 2, start=positions[0])
    torch.testing.assert_close(session.kv(0)["k"][:5], found["k"][:5] * 2, rtol=0, atol=0)
    # What kv gives, set_kv takes, with the positions.
    changed = {**found, "v": found["v"] * 4}
    session.set_kv(0, **changed)
    for name, rows in session.kv(0).items():
        torch.testing.assert_close(rows, changed[name], rtol=0, atol=0)
    session.set_kv(0, start=positions[2], k=found["k"][2:4], positions=found["positions"][2:4])
    for wrong, said in (
        ({"positions": found["positions"][1:]}, rf"k has {len(positions)} rows for {len(positions) - 1} positions"),
        ({"positions": found["positions"], "start": positions[1]}, f"start {positions[1]}, and positions begin with"),
        ({"positions": positions}, "positions must be a row of int64.* got list"),
        ({"positions": found["positions"][:0]}, "got none"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            session.set_kv(0, k=found["k"], **wrong)


def test_set_kv_names_the_runs_behind_a_sink(make_llm: MakeLLM, checkpoints: dict[str, Checkpoint]) -> None:
    session = make_llm(checkpoints["llama"], page_size=4).session(random_tokens(60), window=16, sink=4)
    found = session.kv(0)
    tail = int(found["positions"][4])
    with pytest.raises(InvalidArgument, match=rf"2 runs; .* as rows 0..3 with start=0, rows 4..\d+ with start={tail}"):
        session.set_kv(0, **found)
    session.set_kv(0, k=found["k"][:4] * 2, start=0)
    session.set_kv(0, k=found["k"][4:] * 2, positions=found["positions"][4:])
    torch.testing.assert_close(session.kv(0)["k"], found["k"] * 2, rtol=0, atol=0)


def test_written_state_is_used_and_shared_with_nobody(llm: LLM, checkpoint: Checkpoint) -> None:
    prompt = random_tokens(40)
    twin, session = llm.session(prompt), llm.session(prompt)
    other = llm.session(random_tokens(40, seed=1))
    for layer in range(2):
        rows = other.kv(layer)
        first = int(rows.pop("positions", torch.zeros(1))[0])
        session.set_kv(layer, k=rows["k"][3:20], v=rows["v"][3:20], start=first + 3)
        kept = session.kv(layer)
        for name, written in rows.items():
            torch.testing.assert_close(kept[name][3:20], written[3:20], rtol=0, atol=0)
    assert session.modified
    assert session.pinned
    child = session.fork()
    assert child.modified
    assert child.pinned
    changed = child.generate(greedy(20)).outputs[0].token_ids
    assert changed != checkpoint.greedy(prompt, 20)
    assert session.generate(greedy(20)).outputs[0].token_ids == changed
    # Neither the twin, whose pages were shared, nor the prefix cache has seen any of it.
    twin.close()
    assert llm.generate(prompt, greedy(20))[0].outputs[0].token_ids == checkpoint.greedy(prompt, 20)
    twin = llm.session(prompt)
    assert twin.generate(greedy(20)).outputs[0].token_ids == checkpoint.greedy(prompt, 20)
    assert llm.generate(prompt, greedy(20))[0].outputs[0].token_ids == checkpoint.greedy(prompt, 20)
    check(llm)


def test_written_state_is_never_computed_again(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm, roomy = make_llm(llama, pool=128, page_size=4), make_llm(llama)
    prompt = random_tokens(30)
    answers = []
    for one in (llm, roomy):
        session = one.session(prompt)
        session.set_kv(0, v=torch.zeros(20, 2, 16))
        one.generate([random_tokens(n) for n in (60, 70, 50)], greedy(10))
        found = session.generate(greedy(10)).outputs[0].token_ids
        state = session.kv(0)["v"]
        assert not state[:20].any()
        answers.append(found)
    assert answers[0] == answers[1] != llama.greedy(prompt, 10)


# -- memory ----------------------------------------------------------------------------------------


def test_logits_after_a_write_are_new(llm: LLM, checkpoint: Checkpoint) -> None:
    """Also if those of before were asked for, and in a fork of such a session."""
    layer = attention_layer(llm)
    session, twin = (llm.session(random_tokens(20)) for _ in range(2))
    before = session.logits()
    child = session.fork()
    for one in (session, twin, child):
        one.set_kv(layer, v=one.kv(layer)["v"][:12] * -3)
    written = [one.logits() for one in (session, twin, child)]
    assert not torch.equal(written[0], before)
    assert torch.equal(written[0], written[1])
    assert torch.equal(written[0], written[2])


def test_idle_sessions_are_dropped_and_come_back(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    llm = make_llm(checkpoint, pool=128, page_size=4, host_memory=0)
    prompts = [random_tokens(30, seed=i) for i in range(6)]
    sessions = [llm.session(prompt) for prompt in prompts]
    dropped = [session for session in sessions if not session.num_computed]
    assert dropped == sessions[: len(dropped)], "the least recently used go first"
    assert 2 <= len(dropped) < 6
    assert dropped[0].pages == (0, 0)
    assert dropped[0].rewind_cost(to=10) == 10
    for session, prompt in zip(sessions, prompts, strict=True):
        assert session.generate(greedy(6)).outputs[0].token_ids == checkpoint.greedy(prompt, 6)
        check(llm)


def test_pinned_sessions_stay(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=128, page_size=4)
    pinned = llm.session(random_tokens(60), pin=True)
    llm.generate([random_tokens(50, seed=i) for i in range(4)], greedy(8))
    assert pinned.num_computed == 59
    with pytest.raises(ResourceExhausted, match="unpin"):
        llm.session(random_tokens(100, seed=2))
    assert pinned.num_computed == 59
    (failed,) = llm.generate(random_tokens(70, seed=3), greedy(8))
    assert failed.outputs[0].finish_reason == "error"
    assert "pages" in (failed.outputs[0].error or "")
    check(llm)
    assert pinned.generate(greedy(5)).outputs[0].token_ids == llama.greedy(random_tokens(60), 5)
    pinned.close()
    assert len(llm.session(random_tokens(100, seed=2))) == 100


def test_a_pinned_session_that_grows_too_long_keeps_its_state(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=64, page_size=4)
    other, session = llm.session(random_tokens(20, seed=1), pin=True), llm.session(random_tokens(30), pin=True)
    with pytest.raises(ResourceExhausted):
        session.generate(greedy(30))
    assert session.tokens == random_tokens(30)
    assert session.generate(greedy(4)).outputs[0].token_ids == llama.greedy(random_tokens(30), 4)
    assert other.num_computed == 19


def test_broken_values_of_a_pinned_session_are_nobodys_prefix(
    small: LLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(small)
    session = small.session(random_tokens(40), pin=True)
    execute = engine.runner.execute

    def poisoned(step):  # type: ignore[no-untyped-def]
        output = execute(step)
        output.logits_RV.fill_(torch.nan)
        return output

    monkeypatch.setattr(engine.runner, "execute", poisoned)
    with pytest.raises(QuireError, match="NaN"):
        session.generate(greedy(3))
    monkeypatch.undo()
    (output,) = small.generate(random_tokens(40), greedy(3))
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == llama.greedy(random_tokens(40), 3)
    assert session.tokens == random_tokens(40)


def test_what_a_failure_left_of_a_session_is_computed_again(
    small: LLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever broke may have broken the session's keys and values too."""
    runner = engine_of(small).runner
    session = small.session(random_tokens(40))
    execute = runner.execute

    def breaking(step):  # type: ignore[no-untyped-def]
        execute(step)
        if step.chunks:
            found = runner.state.debug_get_kv(step.chunks[0].seq, 0, 30, layer=0)
            runner.state.debug_set_kv(step.chunks[0].seq, 0, *(-5 * rows for rows in found), layer=0)
            raise RuntimeError("the device fell over")

    monkeypatch.setattr(runner, "execute", breaking)
    with pytest.raises(QuireError, match="fell over"):
        session.generate(greedy(3))
    monkeypatch.undo()
    assert session.num_computed == 0
    assert session.generate(greedy(5)).outputs[0].token_ids == llama.greedy(random_tokens(40), 5)
    check(small)


def test_close_gives_pages_back_at_once(small: LLM) -> None:
    state = engine_of(small).runner.state
    session = small.session(random_tokens(50))
    session.close()
    session.close()
    assert state.empty()
    for call in (lambda: session.append([1]), session.fork, lambda: session.generate(), session.logits):
        with pytest.raises(FailedPrecondition, match="closed"):
            call()
    with small.session(random_tokens(50)) as other:
        assert not state.empty()
    assert state.empty()
    with pytest.raises(FailedPrecondition):
        other.append([1])
    forgotten = small.session(random_tokens(50))
    del forgotten
    assert state.empty()


def test_close_in_the_middle_of_a_stream(small: LLM) -> None:
    session = small.session(random_tokens(20))
    stream = session.stream(greedy(50))
    next(stream)
    session.close()
    assert engine_of(small).scheduler.idle
    assert [delta.finish_reason for delta in stream] == ["cancelled"]
    check(small)
    assert engine_of(small).runner.state.empty()


def test_sessions_found_by_the_garbage_collector_in_mid_step(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(small)
    held = [small.session(random_tokens(20)), small.session(random_tokens(30))]
    execute = engine.runner.execute

    def collecting(step):  # type: ignore[no-untyped-def]
        held.clear()
        return execute(step)

    monkeypatch.setattr(engine.runner, "execute", collecting)
    small.generate(random_tokens(9), greedy(4))
    monkeypatch.undo()
    check(small)
    small.reset_prefix_cache()
    assert engine.runner.state.empty()


def test_after_the_llm_is_closed(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    session = llm.session([1, 2])
    llm.close()
    for call in (lambda: session.append([1]), lambda: llm.generate([1]), llm.session, llm.status, llm.metrics):
        with pytest.raises(FailedPrecondition, match="closed"):
            call()
    session.close()


# -- threads ---------------------------------------------------------------------------------------


def test_many_threads(llm: LLM, checkpoint: Checkpoint) -> None:
    errors: list[BaseException] = []

    def converse(seed: int) -> None:
        try:
            tokens = random_tokens(10, seed=seed)
            session = llm.session(tokens)
            for turn in range(4):
                found = session.generate(greedy(4)).outputs[0].token_ids
                new = random_tokens(3, seed=turn)
                assert checkpoint.continues(tokens, found)
                session.append(new)
                tokens = tokens + found + new
                assert (
                    llm.generate(tokens, greedy(2))[0].outputs[0].token_ids
                    == session.fork().generate(greedy(2)).outputs[0].token_ids
                )
            session.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=converse, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    check(llm)


def test_two_threads_on_one_session(small: LLM) -> None:
    session = small.session(random_tokens(10))
    done: list[int] = []

    def use() -> None:
        for _ in range(20):
            try:
                done.append(len(session.generate(greedy(3)).outputs[0].token_ids))
            except FailedPrecondition:
                done.append(0)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == 40
    assert len(session) == 10 + sum(done)
    check(small)


def test_cancel_from_another_thread(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(small)
    session = small.session(random_tokens(10))
    assert not session.cancel()
    execute, steps = engine.runner.execute, []

    def cancelling(step):  # type: ignore[no-untyped-def]
        if step.chunks:
            steps.append(step)
            if len(steps) == 3:
                thread = threading.Thread(target=session.cancel)
                thread.start()
                thread.join(5)
                assert not thread.is_alive(), "cancel never waits"
        return execute(step)

    monkeypatch.setattr(engine.runner, "execute", cancelling)
    output = session.generate(greedy(50)).outputs[0]
    assert output.finish_reason == "cancelled"
    assert len(output.token_ids) == 3
    assert len(session) == 13
    steps.clear()
    engine.scheduler.queues.limits = type(engine.scheduler.limits)(max_num_seqs=8, max_num_batched_tokens=4)
    with pytest.raises(Cancelled):
        session.append(random_tokens(50))
    assert len(session) == 13
    assert session.num_computed <= 13
    assert session.kv(0)["k"].shape[0] == 13
    assert len(session.append(random_tokens(5))) == 18
    check(small)


# -- text and chat ---------------------------------------------------------------------------------


def test_text(python_llm: LLM) -> None:
    prompt = "def add(a, b):\n"
    with python_llm.session(prompt) as session:
        assert session.text == prompt
        session.append("    return")
        assert session.text == prompt + "    return"
        output = session.generate(greedy(6))
        assert session.text == prompt + "    return" + output.outputs[0].text
        twin = session.fork()
        texts = [delta.text for delta in session.stream(greedy(4))]
        assert "".join(texts) == twin.generate(greedy(4)).outputs[0].text
    check(python_llm)


def test_a_stop_string_stays_out_of_the_session(python_llm: LLM) -> None:
    with python_llm.session("def fib(n):\n") as session:
        free = session.fork().generate(greedy(14)).outputs[0].text
        stop = free[7:12]
        at = free.index(stop)
        output = session.generate(greedy(14, stop=stop)).outputs[0]
        assert (output.text, output.stop_reason) == (free[:at], stop)
        # Whole tokens only: one that reaches into the stop string is out too.
        assert ("def fib(n):\n" + free[:at]).startswith(session.text)
        assert len(session.text) >= len("def fib(n):\n")
    check(python_llm)


# -- how they look ---------------------------------------------------------------------------------


def test_repr(python_llm: LLM) -> None:
    with python_llm.session("") as session:
        assert repr(session) == "<Session of 0 tokens, 0 pages (0 shared), ''>"
        session.append("a = 'b'\n")
        assert repr(session) == f"<Session of {len(session)} tokens, 1 pages (0 shared), {session.text!r}>"
        with session.fork():
            assert "1 pages (1 shared)" in repr(session)
        text = "first = 1\n" + "x = 2\n" * 100 + "last = 3\n"
        with python_llm.session(text) as long:
            shown = repr(long)
            assert repr(f"{text[:24]} ... {text[-24:]}") in shown
            assert "\n" not in shown
            assert len(shown) < 160
        named = session_repr(replace(session._live, name="a 'name'"))
        assert named == repr(session).replace("Session", "Session \"a 'name'\"", 1)
        stream = session.stream(greedy(5))
        next(stream)
        assert "pages (0 shared), generating, " in repr(session)
        stream.close()
    assert repr(session) == f"<Session of {len(session)} tokens, closed, {session.text!r}>"


def test_repr_never_waits_and_never_raises(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread is in the middle of a step; a model without tokenizer; a tokenizer that fails;
    a closed LLM.
    """
    session = small.session(random_tokens(5))
    assert repr(session) == "<Session of 5 tokens, 1 pages (0 shared)>"
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with engine_of(small).lock:
            held.set()
            go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert repr(session) == "<Session of 5 tokens>"
    go.set()
    thread.join()
    monkeypatch.setattr(engine_of(small), "tokenizer", object())
    assert repr(session) == "<Session of 5 tokens, 1 pages (0 shared)>"
    small.close()
    assert repr(session) == "<Session of 5 tokens, closed>"
