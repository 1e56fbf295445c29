"""Models with recurrent layers in the engine: what a turn runs again, what is refused, what is said
about it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.small_llms import Checkpoint, MakeLLM, attention_layer, engine_of, greedy, random_tokens

from quire import LLM, SamplingParams
from quire.base.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unsupported
from quire.base.types import Add, Chunk, Fork, Inputs, Pop, Remove, Step
from quire.kv.recurrent import bytes_per_state


def tokens_run(make: Callable[[], Any], llm: Any) -> int:
    """Tokens that forwards run while ``make`` is called."""
    runner = engine_of(llm).runner
    execute, counted = runner.execute, [0]

    def count(step: Step, *more: Any) -> Any:
        counted[0] += step.num_tokens
        return execute(step, *more)

    runner.execute = count
    try:
        make()
    finally:
        runner.execute = execute
    return counted[0]


def test_a_second_turn_runs_new_tokens_only(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB")
    history = random_tokens(60)
    session = llm.session(history)
    first = session.generate(greedy(8)).outputs[0].token_ids
    assert hybrid.continues(history, first)
    turn = random_tokens(9, seed=1)

    def second() -> None:
        session.append(turn)
        found = session.generate(greedy(5)).outputs[0].token_ids
        assert hybrid.continues([*history, *first, *turn], found)

    # The last generated token was not run yet.
    assert tokens_run(second, llm) == 1 + 9 + 5 - 1


def test_a_prompt_goes_on_from_the_end_of_an_earlier_one(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB")
    prompt, tail = random_tokens(50), random_tokens(7, seed=2)
    llm.generate(prompt, greedy(4))
    output = llm.generate([*prompt, *tail], greedy(4))[0]
    assert output.num_cached_tokens == 50
    assert hybrid.continues([*prompt, *tail], output.outputs[0].token_ids)


def test_sessions_go_back_to_every_position(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB")
    tokens = random_tokens(30)
    for position in range(1, 31):
        session = llm.session(tokens)
        branch = session.fork(at=position)
        session.rewind(to=position)
        for one in (session, branch):
            assert hybrid.continues(tokens[:position], one.generate(greedy(2)).outputs[0].token_ids)
            one.close()
    engine_of(llm).runner.state.check()


def test_keys_and_values_of_attention_layers_can_be_written(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB")
    layer = attention_layer(llm)
    tokens = random_tokens(20)
    session = llm.session(tokens)
    found = session.kv(layer)
    session.set_kv(layer, start=3, k=found["k"][3:5], v=found["v"][3:5])
    # What was written is what stood there, so the text is still that of the tokens.
    assert hybrid.continues(tokens, session.generate(greedy(4)).outputs[0].token_ids)
    with pytest.raises(FailedPrecondition, match="written into and cannot be computed again"):
        session.rewind(to=8)
    other = llm.session(tokens)
    other.set_kv(layer, start=3, k=found["k"][3:5], v=-found["v"][3:5])
    assert not torch.equal(other.logits(), llm.session(tokens).logits())


def test_samples_and_beams_share_a_prompt(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB")
    prompt = random_tokens(20)
    many = llm.generate(prompt, SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=6))[0]
    for index, output in enumerate(many.outputs):
        alone = llm.generate(prompt, SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=6))[0].outputs[index]
        assert output.token_ids == alone.token_ids


def test_edits_run_nothing(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    """A step's edit that would need tokens to be run again is refused without a trace."""
    llm = make_llm(hybrid, kv_cache_memory="4MiB")
    session = llm.session(random_tokens(30))
    session.logits()
    runner, seq = engine_of(llm).runner, session._branch.seq
    assert seq is not None
    length = runner.state.sequence_length(seq)
    for edit in (Pop(seq, 5), Fork(seq, runner.new_seq(), length - 5)):
        with pytest.raises(FailedPrecondition, match="again"):
            runner.execute(Step(edits=(edit,)))
    assert runner.state.sequence_length(seq) == length
    runner.state.check()


def test_a_mask_is_refused_before_anything_runs(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    runner = engine_of(make_llm(hybrid, kv_cache_memory="4MiB")).runner
    seq = runner.new_seq()
    runner.execute(Step(edits=(Add(seq),)))
    with pytest.raises(Unsupported, match="recurrent layers see the tokens"):
        runner.execute(Step(chunks=(Chunk(seq, [1, 2]),), inputs=Inputs(mask=torch.ones(4, dtype=torch.bool))))
    assert runner.state.sequence_length(seq) == 0
    runner.execute(Step(edits=(Remove(seq),)))


def test_what_is_not_there_is_refused_and_said(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB")
    assert llm.capabilities()["verbs"]["checkpoint"] == ""
    if all(spec.kind == "recurrent" for spec in llm.model.layer_specs):
        with pytest.raises(Unsupported, match="recurrent layers only"):
            llm.session(random_tokens(5), window=8)


def test_a_budget_too_small_for_states(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB")
    part = engine_of(llm).runner.state.parts.recurrent
    assert part is not None
    with pytest.raises(ResourceExhausted, match="4 are needed at least"):
        make_llm(hybrid, kv_cache_memory=3 * bytes_per_state(part.specs.values()))


def test_a_saved_state_of_another_kind(
    make_llm: MakeLLM, hybrid: Checkpoint, llama: Checkpoint, tmp_path: Path
) -> None:
    llm, other = make_llm(hybrid, kv_cache_memory="4MiB"), make_llm(llama)
    llm.session(random_tokens(9)).save(tmp_path / "one.quire")
    other.session(random_tokens(9)).save(tmp_path / "two.quire")
    for into, path in ((other, "one.quire"), (llm, "two.quire")):
        with pytest.raises(InvalidArgument, match="another model"):
            into.load_session(tmp_path / path)
        engine_of(into).runner.state.check()


def test_inspection_shows_states(make_llm: MakeLLM, hybrid: Checkpoint, tmp_path: Path, capsys: Any) -> None:
    from quire.cli.inspection import facts_of, print_description

    llm = make_llm(hybrid, kv_cache_memory="4MiB")
    llm.session(random_tokens(9)).save(tmp_path / "one.quire")
    found = facts_of(tmp_path / "one.quire")
    (sequence,) = found["sequences"]
    assert sum(sequence["layers"].values()) == sequence["num_layers"] == len(llm.model.layer_specs)
    print_description(found)
    printed = capsys.readouterr().out
    assert "recurrent states kept: at the end" in printed
    assert "recurrent, states of " in printed


# -- what layers remember, read and written --------------------------------------------------------


def recurrent_layers(llm: LLM) -> list[int]:
    return [layer for layer, spec in enumerate(llm.model.layer_specs) if spec.kind == "recurrent"]


def test_states_of_a_session_are_those_before_its_last_token(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    """However it got there: fresh, after a generation, after its logits, after a rewind."""
    llm = make_llm(hybrid, kv_cache_memory="4MiB")
    tokens = random_tokens(30)
    fresh = llm.session(tokens)
    ran = llm.session(tokens)
    ran.logits()
    longer = llm.session([*tokens, *random_tokens(9, seed=1)])
    longer.generate(greedy(3))
    longer.rewind(to=30)
    for layer in recurrent_layers(llm):
        wanted = fresh.kv(layer)
        assert set(wanted) == {f"state_{index}" for index in range(len(llm.model.layer_specs[layer].states))}
        for session in (ran, longer):
            for name, found in session.kv(layer).items():
                hybrid.assert_same_memory(found, wanted[name], tokens)
    for session in (fresh, ran, longer):
        assert hybrid.continues(tokens, session.generate(greedy(4)).outputs[0].token_ids)


def test_states_of_another_session_take_their_place(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    """A session with all that another remembers continues as that one does, and its forks with it;
    others do not change.
    """
    llm = make_llm(hybrid, kv_cache_memory="4MiB")
    mine, theirs, last = random_tokens(30), random_tokens(30, seed=5), [7]
    one, other, bystander = llm.session([*mine, *last]), llm.session([*theirs, *last]), llm.session([*mine, *last])
    for layer in range(len(llm.model.layer_specs)):
        one.set_kv(layer, **other.kv(layer))
    assert one.modified
    child = one.fork()
    for session in (one, child):
        assert hybrid.continues([*theirs, *last], session.generate(greedy(5)).outputs[0].token_ids)
    assert hybrid.continues([*mine, *last], bystander.generate(greedy(5)).outputs[0].token_ids)
    with pytest.raises(FailedPrecondition, match="written into"):
        one.rewind(to=20)


def test_states_before_the_only_token(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB")
    session, layer = llm.session([3]), recurrent_layers(llm)[0]
    states = session.kv(layer)
    for found, spec in zip(states.values(), llm.model.layer_specs[layer].states, strict=True):
        assert tuple(found.shape) == spec.shape
        assert (found == spec.initial).all()
    with pytest.raises(FailedPrecondition, match="append a token"):
        session.set_kv(layer, **states)
    assert not session.modified


def test_what_cannot_be_written_into_a_layer(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB")
    session, layer = llm.session(random_tokens(20)), recurrent_layers(llm)[0]
    state = session.kv(layer)["state_0"]
    for given, more, words in (
        ({}, {}, "nothing given"),
        ({"k": state}, {}, "'k' given for layer 0, a recurrent layer; it has state_0"),
        ({"state_0": state[:-1]}, {}, "is needed"),
        ({"state_0": state.double()}, {}, "float64"),
        ({"state_0": torch.full_like(state, torch.nan)}, {}, "NaN"),
        ({"state_0": "x"}, {}, "must be a tensor"),
        ({"state_0": state}, {"start": 2}, "no rows"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            session.set_kv(layer, **given, **more)
    with pytest.raises(InvalidArgument, match=r"layer 99; this state has layers 0\.\.\d"):
        session.kv(99)
    assert not session.modified
    assert hybrid.continues(random_tokens(20), session.generate(greedy(4)).outputs[0].token_ids)
