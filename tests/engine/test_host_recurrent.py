"""Recurrent and hybrid states that wait in host memory: they come back to the bit with the states
that they keep, and can be cut at those only; what cannot is computed again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.test_parity import FAMILIES, SIZES

from quire import LLM
from quire.kv.recurrent import bytes_per_state

from .conftest import CONTEXT, VOCAB, Checkpoint, MakeLLM, check, engine_of, greedy, random_tokens, record
from .test_host_memory import check_store, force, squeeze, store_of, swaps

KINDS = ("qwen3-next", "mamba2", "lfm2", "falcon-h1")
ROOM: dict[str, Any] = {"kv_cache_memory": "4MiB", "page_size": 4}


@pytest.fixture(scope="module", params=KINDS)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    name, changes = FAMILIES[request.param]
    torch.manual_seed(11)
    kind = getattr(transformers, f"{name}ForCausalLM")
    sizes = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    peer = kind(kind.config_class(**{**sizes, **changes})).float().eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0).add_(0.1 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp(request.param)
    peer.save_pretrained(path)
    return Checkpoint(path, peer)


def few_states(make_llm: MakeLLM, hybrid: Checkpoint, states: int, tokens: int, **more: Any) -> LLM:
    """An LLM with about so many slots for states, and room for about so many tokens."""
    one = make_llm(hybrid, **ROOM)
    part = engine_of(one).runner.state.recurrent
    assert part is not None
    # Half of the budget is for states.
    memory = 2 * max(states * bytes_per_state(part.specs), tokens * one.bytes_per_token)
    return make_llm(hybrid, **{"page_size": 4, "kv_cache_memory": memory, **more})


def test_an_idle_session_comes_back_to_the_bit(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm, other = make_llm(hybrid, **ROOM), make_llm(hybrid, **ROOM)
    force(llm)
    prompt = random_tokens(45)
    recorder = record(llm)
    moved, stays = (each.session(prompt) for each in (llm, other))
    for turn in range(3):
        assert moved.generate(greedy(5)).outputs[0].token_ids == stays.generate(greedy(5)).outputs[0].token_ids
        squeeze(llm)
        check_store(llm)
        assert store_of(llm).holds(moved._state) == len(moved) - 1
        moved.append(random_tokens(4, seed=turn))
        stays.append(random_tokens(4, seed=turn))
    assert torch.equal(moved.logits(), stays.logits())
    assert swaps(llm) == (3, 3)
    # Nothing was run twice.
    assert recorder.num_tokens == len(moved)


def test_preempted_requests_come_back(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    """Pages or states run out, whichever a model has less of."""
    llm = few_states(make_llm, hybrid, 4, 72, max_num_batched_tokens=16, enable_prefix_caching=False)
    force(llm)
    prompts = [random_tokens(length) for length in (20, 11, 17, 5, 9, 12)]
    recorder = record(llm)
    outputs = llm.generate(prompts, greedy(30))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert hybrid.continues(prompt, output.outputs[0].token_ids)
    out, back = swaps(llm)
    assert out == back == llm.metrics()["quire:num_preemptions_total"] > 0
    assert recorder.num_tokens == sum(map(len, prompts)) + len(prompts) * 29
    check_store(llm)


@pytest.mark.product(2)
@pytest.mark.parametrize("to", [49, 48, 33, 32, 20, 9, 0])
def test_what_was_moved_is_cut_at_kept_states(make_llm: MakeLLM, hybrid: Checkpoint, to: int) -> None:
    """Rewind and fork of a session in host memory: as much comes back as a kept state allows, and
    no more is claimed.
    """
    llm = make_llm(hybrid, **ROOM, enable_prefix_caching=False)
    store = force(llm)
    tokens = random_tokens(50)
    session = llm.session(tokens)
    session.logits()
    state, seq = engine_of(llm).runner.state, session._state.seq
    assert seq is not None
    for position in state.checkpoints(seq):
        state.drop_checkpoint(seq, position)
    session.rewind(to=20)
    session.logits()
    assert session._state.seq is not None
    state.checkpoint(session._state.seq)
    session.append(tokens[20:32])
    session.logits()
    state.checkpoint(session._state.seq)
    session.append(tokens[32:])
    session.logits()
    kept = [*state.checkpoints(session._state.seq), session._state.computed]
    assert {20, 32} <= set(kept)
    squeeze(llm)
    assert store.holds(session._state) == session._state.computed or store.holds(session._state) == kept[-1]
    reach = max((one for one in kept if one <= to), default=0)
    assert store.reach(session._state, to) == reach
    if to:
        branch = session.fork(at=to)
        assert store.holds(branch._state) == reach
        check_store(llm)
        # A token of it is run for logits in any case, so what comes back ends before.
        back = max((one for one in kept if one < to), default=0)
        recorder = record(llm)
        found = branch.generate(greedy(3)).outputs[0].token_ids
        assert hybrid.continues(tokens[:to], found)
        assert recorder.num_tokens == to - back + 2
        branch.close()
    session.rewind(to=to)
    assert store.holds(session._state) == reach
    check_store(llm)
    session.append(tokens[to:])
    exact_TV, bound = hybrid.exact_logits(tokens)
    assert float((session.logits().double() - exact_TV[-1]).abs().max()) <= bound
    session.close()
    assert store.used == 0


def test_states_for_which_there_is_no_room_stay_behind(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    """What comes back takes no slots that the next forward needs; checkpoints give way, the
    earliest first.
    """
    llm = few_states(make_llm, hybrid, 6, 64, enable_prefix_caching=False)
    store = force(llm)
    tokens = random_tokens(24)
    session = llm.session(tokens[:4])
    state = engine_of(llm).runner.state
    assert state.recurrent is not None
    for end in (4, 8, 12, 16):
        session.append(tokens[len(session) : end])
        session.logits()
        assert session._state.seq is not None
        state.checkpoint(session._state.seq)
    session.append(tokens[16:])
    session.logits()
    seq = session._state.seq
    assert seq is not None
    kept = state.checkpoints(seq)
    squeeze(llm)
    assert store.holds(session._state) == 24
    table = state.recurrent.table
    blockers = []
    # All but four slots are somebody's.
    while table.num_available > 4:
        blockers.append(engine_of(llm).runner.new_seq())
        state.add_sequence(blockers[-1])
        for layer in state.recurrent.layer_ids[:1]:
            one = state.recurrent.specs[0].states[0]
            state.debug_set(layer, 0, blockers[-1], torch.zeros(one.shape, dtype=getattr(torch, one.dtype)))  # type: ignore[attr-defined]
    owner = session._state
    owner.seq = engine_of(llm).runner.new_seq()
    state.add_sequence(owner.seq)
    store.restore(owner, 24)
    assert owner.computed == 24
    assert owner.seq is not None
    assert state.checkpoints(owner.seq) == kept[-2:]
    assert table.num_available >= 1
    for blocker in blockers:
        state.remove_sequence(blocker)
    assert hybrid.continues(tokens, session.generate(greedy(4)).outputs[0].token_ids)
    check_store(llm)


def conversations(make_llm: MakeLLM, hybrid: Checkpoint, seed: int, turns: int) -> tuple[int, int]:
    """Every verb on several sessions while requests take their pages and states; moves are made and
    refused at random.
    """
    rng = np.random.default_rng(seed)
    llm = few_states(
        make_llm,
        hybrid,
        int(rng.integers(5, 9)),
        int(rng.integers(70, 140)),
        max_num_batched_tokens=int(rng.choice([7, 24])),
        enable_prefix_caching=bool(rng.random() < 0.7),
        checkpoint_interval=int(rng.choice([0, 4, 16])),
    )
    store = force(llm, decide=lambda *_, **__: rng.random() < 0.8)
    store.capacity = int(rng.integers(3, 12)) * 60_000
    sessions = [llm.session(random_tokens(12, seed=each)) for each in range(4)]
    texts = [session.tokens for session in sessions]
    for turn in range(turns):
        which = int(rng.integers(len(sessions)))
        session, text = sessions[which], texts[which]
        match int(rng.integers(7)):
            case 0 if len(text) < 50:
                text += random_tokens(int(rng.integers(1, 9)), seed=turn)
                session.append(text[len(session) :])
            case 1 if len(text) < 50:
                found = session.generate(greedy(4)).outputs[0].token_ids
                assert hybrid.continues(text, found)
                text += found
            case 2 if len(text) > 8:
                to = int(rng.integers(1, len(text)))
                session.rewind(to=to)
                del text[to:]
            case 3:
                child = session.fork(at=int(rng.integers(1, len(text) + 1)))
                sessions[which].close()
                sessions[which], texts[which] = child, text[: len(child)]
                text = texts[which]
            case 4:
                assert session.logits().argmax() == hybrid.logits(text)[-1].argmax()
            case 5:
                squeeze(llm)
            case _:
                prompts = [random_tokens(int(n), seed=turn) for n in rng.integers(10, 40, 3)]
                for prompt, output in zip(prompts, llm.generate(prompts, greedy(6)), strict=True):
                    assert hybrid.continues(prompt, output.outputs[0].token_ids)
        assert sessions[which].tokens == text
        check(llm)
        check_store(llm)
    for session in sessions:
        session.close()
    assert store.used == 0
    return swaps(llm)


def test_random_conversations_with_few_states(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    out, back = conversations(make_llm, hybrid, 0, 60)
    assert out > 3
    assert back > 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_long_conversations_with_few_states(make_llm: MakeLLM, hybrid: Checkpoint, seed: int) -> None:
    out, back = conversations(make_llm, hybrid, seed, 500)
    assert out > 10
    assert back > 5
