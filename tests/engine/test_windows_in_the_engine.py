"""Windowed models under everything else that the engine does."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tests.small_llms import (
    EOS,
    Checkpoint,
    MakeLLM,
    assert_near,
    check,
    engine_of,
    greedy,
    random_tokens,
    record,
    token_ids,
)

from quire import FailedPrecondition, InvalidArgument


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("seed", range(3))
def test_tight_pools_fail_nobody(make_llm: MakeLLM, checkpoints: dict[str, Checkpoint], family: str, seed: int) -> None:
    """A request that finds no room leaves a fork of a running one behind; that must not cost the
    running one its page.
    """
    checkpoint, rng = checkpoints[family], random.Random(seed)
    llm = make_llm(checkpoint, pool=rng.choice([96, 110, 140]), page_size=rng.choice([1, 4, 32]), max_num_seqs=4)
    base = random_tokens(60, seed=seed)
    prompts = [base[: rng.randint(1, 50)] + random_tokens(rng.randint(1, 9), seed=n) for n in range(12)]
    wanted = [checkpoint.greedy(prompt, 12) for prompt in prompts]
    assert token_ids(llm.generate(prompts, greedy(12))) == wanted
    check(llm)


@pytest.mark.parametrize("family", ["mistral", "llama"])
def test_cancel_on_a_written_session_gives_its_state_back(
    make_llm: MakeLLM, checkpoints: dict[str, Checkpoint], family: str
) -> None:
    llm = make_llm(checkpoints[family], page_size=4, max_num_batched_tokens=16)
    session = llm.session(random_tokens(60))
    session.set_kv(0, v=torch.zeros(5, 2, 16), start=50)
    before, engine = session.logits(), engine_of(llm)
    request = engine.submit_run(session._branch, np.append(session._branch.tokens.ids, random_tokens(80)))
    for _ in range(4):
        engine.step()
    engine.cancel(request.request_id)
    engine.run([request])
    assert len(session) == 60
    assert_near(session.logits(), before)
    assert len(session.generate(greedy(4)).outputs[0].token_ids) == 4
    check(llm)


def test_a_refused_turn_leaves_a_written_session_usable(make_llm: MakeLLM, checkpoints: dict[str, Checkpoint]) -> None:
    llm = make_llm(checkpoints["mistral"], page_size=4)
    session = llm.session(random_tokens(60))
    session.set_kv(0, v=torch.zeros(5, 2, 16), start=50)
    session.append(random_tokens(20)).append(random_tokens(20, seed=1))
    engine = engine_of(llm)
    tokens = np.append(session._branch.tokens.ids[:50], random_tokens(9))
    with pytest.raises(FailedPrecondition, match="written into"):
        engine.submit_run(session._branch, tokens)  # type: ignore[arg-type]
    assert len(session.generate(greedy(3)).outputs[0].token_ids) == 3
    check(llm)


def test_a_stop_string_that_a_window_cannot_take_back(make_llm: MakeLLM, checkpoints: dict[str, Checkpoint]) -> None:
    """A written session goes back to where the generation began, and computes what stays of it
    again.
    """
    llm = make_llm(checkpoints["mistral"], page_size=1)
    session = llm.session(random_tokens(60))
    session.set_kv(0, v=torch.zeros(5, 2, 16), start=50)
    bias = {EOS: 100.0}
    found = session.generate(greedy(8)).outputs[0].token_ids
    assert session.generate(greedy(3, ignore_eos=False, logit_bias=bias)).outputs[0].stop_reason == EOS
    assert session.tokens == random_tokens(60) + list(found)
    assert len(session.generate(greedy(3)).outputs[0].token_ids) == 3
    check(llm)


def test_set_kv_of_one_half_on_rows_that_are_no_run(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, page_size=4)
    session = llm.session(random_tokens(24), window=16, sink=4).append(random_tokens(4))
    before = session.kv(0)
    where = before["positions"].tolist()
    row = where.index(20)
    session.set_kv(0, k=torch.ones(2, 2, 16), start=20)
    after = session.kv(0)
    assert after["positions"].tolist() == where
    assert torch.equal(after["v"], before["v"])
    assert torch.equal(after["k"][row : row + 2], torch.ones(2, 2, 16))
    with pytest.raises(FailedPrecondition, match=r"window holds positions 0\.\.3, "):
        session.set_kv(0, k=torch.ones(2, 2, 16), start=3)
    for wrong in (torch.full((2, 2, 16), torch.nan), torch.ones(2, 2, 8), torch.ones(2, 2, 16).half()):
        with pytest.raises(InvalidArgument, match="set_kv: k"):
            session.set_kv(0, k=wrong, start=20)


def test_a_prompt_longer_than_the_pool_slides(make_llm: MakeLLM, llama: Checkpoint) -> None:
    tight, roomy = make_llm(llama, pool=64, page_size=4), make_llm(llama)
    prompt = random_tokens(200)
    found = [llm.session(prompt, window=16, sink=4).generate(greedy(6)).outputs[0].token_ids for llm in (tight, roomy)]
    assert found[0] == found[1]


def test_forks_are_kept_at_turns_and_not_at_every_token(make_llm: MakeLLM, checkpoints: dict[str, Checkpoint]) -> None:
    llm = make_llm(checkpoints["mistral"], page_size=4)
    state = engine_of(llm).runner.state
    session = llm.session(random_tokens(40))
    for token in random_tokens(50, seed=1):
        session.append([token])
    assert len(state.sequences) <= 3
    recorder = record(llm)
    assert session.rewind(to=38) == 0, "the fork at the prompt's end"
    assert session.generate(greedy(3)).outputs[0].token_ids == checkpoints["mistral"].greedy(session.tokens[:38], 3)
    assert recorder.num_tokens <= 4


def test_a_window_longer_than_the_context_needs_no_room(
    make_llm: MakeLLM, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from tests.small_llms import make_checkpoint

    checkpoint = make_checkpoint("mistral", tmp_path_factory.mktemp("wide"), sliding_window=200)
    llm = make_llm(checkpoint, pool=64, page_size=4, max_model_len=150)
    prompt = random_tokens(20)
    assert llm.generate(prompt, greedy(5))[0].outputs[0].token_ids == checkpoint.greedy(prompt, 5)


def test_a_rewind_from_which_a_written_session_could_not_go_on_is_refused(
    make_llm: MakeLLM, checkpoints: dict[str, Checkpoint]
) -> None:
    """The last token runs again for whatever comes; where windows have let go of what that needs,
    nothing can follow.
    """
    llm = make_llm(checkpoints["gemma3"], page_size=4)
    refused = 0
    for to in range(1, 44):
        with llm.session(random_tokens(36)) as session:
            rows = session.kv(0)
            session.set_kv(0, start=32, k=rows["k"][-4:] * 0.9, v=rows["v"][-4:] * 0.9)
            session.generate(greedy(8))
            before = session.tokens
            try:
                session.rewind(to=to)
            except FailedPrecondition:
                refused += 1
                assert session.tokens == before
            session.logits()
    assert 0 < refused < 43
