"""State that is exact up to a token only: what of it is shared, kept and written, and how it
becomes exact again.

Rows from that token on are overwritten behind the engine's back, so that whoever uses them shows.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.test_bridge import altered, free_pages
from tests.small_llms import Checkpoint, MakeLLM, assert_near, check, engine_of, greedy, random_tokens

from quire import LLM, CacheHints, DataLoss, Pin, Session
from quire.branches.branch import Origin
from quire.cli.inspection import facts_of, print_description
from quire.contracts.executor import PrefillInput
from quire.kv import layer_memory
from quire.sessions.prompts import cache_key

from .test_stored_state import check_store, force, kept, memory_of, squeeze

PROMPT = random_tokens(40)
EXACT = 20


def spoil(session: Session, start: int) -> None:
    """Give the state of all tokens from ``start`` on other values."""
    state, seq = session._engine.runner.state, session._branch.seq
    assert seq is not None
    for layer in range(2):
        held = state.held(seq, layer)[-1]
        first = max(start, held.start)
        rows = layer_memory.read(state, seq, layer, partly=True)
        count = held.stop - first
        layer_memory.write(state, seq, layer, first, {name: rows[name][-count:] + 1 for name in ("k", "v")})


def mark(session: Session) -> int:
    """Let what the session computes from now on count as inexact; return from which token on."""
    state = session._branch
    if state.origin.exact:
        state.origin = Origin(inexact_from=state.computed)
    return session.exact_tokens


def rough(llm: LLM, tokens: list[int] = PROMPT, exact: int = EXACT) -> Session:
    session = llm.session(tokens[: exact + 1])
    assert mark(session) == exact
    session.append(tokens[exact + 1 :])
    spoil(session, exact)
    assert (session.exact, session.exact_tokens) == (False, exact)
    return session


def test_prompts_begin_with_the_exact_part(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    llm = make_llm(checkpoint)
    session = rough(llm)
    for number, use in enumerate((lambda: None, lambda: session.generate(greedy(3)), session.close)):
        use()
        (output,) = llm.generate([[*PROMPT, 7]], greedy(4))
        assert output.num_cached_tokens == EXACT or number or checkpoint.path.name != "llama"
        assert (output.num_cached_tokens or 0) <= EXACT
        assert checkpoint.continues([*PROMPT, 7], output.outputs[0].token_ids)
        engine_of(llm).reset_prefix_cache()
        check(llm)
        if not session._live.closed:
            session.append([3])


def test_forks_and_rewinds(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    session = rough(make_llm(checkpoint))
    for at in (EXACT - 1, EXACT, EXACT + 1, 40):
        child = session.fork(at=at)
        assert child.exact == (child.num_computed <= EXACT)
        assert child.exact_tokens == (at if child.exact else EXACT)
        if child.exact:
            assert checkpoint.continues(PROMPT[:at], child.generate(greedy(3)).outputs[0].token_ids)
            assert child.exact
        child.close()
    session.rewind(to=30)
    assert session.exact == (session.num_computed <= EXACT)
    session.rewind(to=EXACT)
    assert (session.exact, session.exact_tokens) == (True, EXACT)
    assert checkpoint.continues(PROMPT[:EXACT], session.generate(greedy(3)).outputs[0].token_ids)


def test_what_was_dropped_is_computed_again_and_exact(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, page_size=4)
    force(llm)
    session = rough(llm)
    squeeze(llm)
    assert (session.num_computed, session.exact, session.exact_tokens) == (0, True, 40)
    assert kept(llm, PROMPT) <= EXACT
    assert_near(session.logits(), llama.logits(PROMPT)[-1])


def test_a_request_that_is_inexact_from_a_token_on(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """As a blended prompt: nothing behind that token is found, by later prompts or in the store."""
    llm = make_llm(llama, max_num_batched_tokens=EXACT, page_size=4)
    force(llm)
    engine = engine_of(llm)
    requests = engine.submit(np.array(PROMPT), greedy(5, n=2), key=cache_key(None))
    engine.step()
    work = requests[0].branch
    assert work.computed == EXACT
    work.origin = Origin(inexact_from=EXACT)
    while not requests[0].output.token_ids:
        engine.step()
    assert engine.cache is not None
    assert engine.cache.peek(PROMPT, cache_key(None)) == EXACT
    assert requests[1].branch.origin == work.origin, "samples of one prompt"
    engine.scheduler.preempt(requests[0])
    assert work.origin.exact, "it runs again"
    engine.run(requests)
    every = [[*PROMPT, *one.output.token_ids] for one in requests]
    assert engine.cache.peek(every[0], cache_key(None)) == len(every[0]) - 1
    squeeze(llm)
    check(llm)

    engine.cache.clear()
    memory_of(llm).clear_now()
    (request,) = engine.submit(np.array(PROMPT[::-1]), greedy(5), key=cache_key(None))
    engine.step()
    request.branch.origin = Origin(inexact_from=EXACT)
    engine.run([request])
    assert engine.cache.peek(PROMPT[::-1], cache_key(None)) == EXACT
    squeeze(llm)
    assert kept(llm, PROMPT[::-1]) == EXACT, "what the prefix cache had"


def test_pins_hold_the_exact_part(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, max_num_batched_tokens=EXACT, page_size=4)
    engine = engine_of(llm)
    hints = CacheHints(pins=[Pin(tokens=30)])
    (request,) = engine.submit(np.array(PROMPT), greedy(2), key=cache_key(None), hints=hints)
    engine.step()
    request.branch.origin = Origin(inexact_from=EXACT)
    engine.run([request])
    assert request.asked.hints is not None
    assert [(one.done, one.tokens) for one in request.asked.hints.results] == [(True, EXACT)]
    assert engine.cache is not None
    assert engine.cache.peek(PROMPT, cache_key(None)) == EXACT


def test_files_say_how_far(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path, capsys: Any) -> None:
    llm = make_llm(llama)
    session = rough(llm)
    cache = session.as_cache()
    files = {"session": session.to_bytes(), "kv_cache": cache.serialize()}
    for kind, data in files.items():
        loaded = llm.session_from_bytes(data)
        assert (loaded.exact, loaded.exact_tokens) == (False, EXACT)
        path = tmp_path / kind
        path.write_bytes(data)
        found = facts_of(path)
        assert (found["exact"], found["exact_tokens"]) in (([False], [EXACT]), (False, EXACT))
        print_description(found)
        assert f"approximate from token {EXACT} on" in capsys.readouterr().out
        again = llm.executor.create_kv_cache()
        again.load(data)
        assert again.rows[0].origin == Origin(inexact_from=EXACT)
        again.truncate((EXACT,))
        assert again.rows[0].origin.exact
        older = altered(data, exact_tokens=None)
        assert llm.session_from_bytes(older).exact_tokens == 0, "older files"
        assert "exact_tokens" not in describe_keys(llm.session(PROMPT).to_bytes())
    child = llm.session(cache=cache)
    assert (child.exact, child.exact_tokens) == (False, EXACT)
    for data, changes in (
        (files["session"], {"exact": True}),
        (files["session"], {"exact_tokens": 40}),
        (files["session"], {"exact_tokens": -1}),
        (files["kv_cache"], {"exact": [True]}),
        (files["kv_cache"], {"exact_tokens": [40]}),
        (files["kv_cache"], {"exact_tokens": [1, 2]}),
    ):
        with pytest.raises(DataLoss, match="exact_tokens"):
            llm.session_from_bytes(altered(data, **changes))


def describe_keys(data: bytes) -> set[str]:
    from tests.state_files import metadata_of

    return set(metadata_of(data))


def test_prompts_of_the_executor_begin_with_the_exact_part(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, page_size=4)
    llm.executor.share_prefixes = True
    cache = rough(llm).as_cache()
    before = free_pages(llm)
    other = llm.executor.prefill(PrefillInput(input_ids=torch.tensor([[*PROMPT, 1]]), logits="last")).kv_cache
    assert before - free_pages(llm) == (41 - EXACT + 3) // 4
    cache.release()
    llm.executor.release_cache(other.cache_id)


def test_commits(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path) -> None:
    llm = make_llm(llama, store=[f"file://{tmp_path}/store"])
    session = rough(llm)
    session.commit("rough")
    found = llm.checkout("rough")
    assert (found.exact, found.exact_tokens) == (False, EXACT)
    assert torch.equal(found.logits(), session.logits())


@pytest.mark.turns(2)
@pytest.mark.parametrize("seed", range(4))
def test_at_random(make_llm: MakeLLM, llama: Checkpoint, seed: int) -> None:
    """Sessions of a few beginnings, marked at random: prompts of their tokens are always right, and
    each knows how far it is exact."""
    rng = random.Random(seed)
    llm = make_llm(llama, pool=rng.choice([400, 1000]), page_size=rng.choice([1, 4, 16]))
    force(llm)
    held: list[tuple[Session, int | None]] = []
    for _ in range(60):
        if len(held) < 3 or (len(held) < 6 and rng.random() < 0.2):
            tokens = random_tokens(60, seed=rng.randint(0, 1))[: rng.randint(2, 40)]
            held.append((llm.session(tokens), None))
        index = rng.randrange(len(held))
        session, inexact = held[index]
        match rng.choice(
            ["mark", "append", "generate", "fork", "rewind", "file", "cache", "serve", "squeeze", "close"]
        ):
            case "mark" if inexact is None and len(session) < 60:
                inexact = mark(session)
                session.append(random_tokens(5, seed=seed))
                if session._branch.computed > inexact:
                    spoil(session, inexact)
            case "append" if len(session) < 60:
                session.append(random_tokens(rng.randint(1, 5)))
            case "generate" if len(session) < 60:
                before = session.tokens
                found = session.generate(greedy(3)).outputs[0].token_ids
                assert not session.exact or inexact is not None or llama.continues(before, found)
            case "fork":
                child = session.fork(at=rng.randint(1, len(session)))
                held.append((child, inexact))
            case "rewind":
                session.rewind(to=rng.randint(1, len(session)))
            case "file":
                held.append((llm.session_from_bytes(session.to_bytes()), inexact))
            case "cache":
                held.append((llm.session(cache=session.as_cache()), inexact))
            case "serve":
                prompt = [*session.tokens, 7]
                assert llama.continues(prompt, llm.generate([prompt], greedy(3))[0].outputs[0].token_ids)
            case "squeeze":
                squeeze(llm)
            case "close":
                session.close()
                del held[index]
        held = [(one, mine) for one, mine in held if not one._live.closed]
        for number, (one, mine) in enumerate(held):
            if one is session:
                mine = inexact
            if mine is not None and mine >= one.num_computed:
                mine = None
            held[number] = (one, mine)
            assert (one.exact, one.exact_tokens) == (mine is None, len(one) if mine is None else mine)
        check_store(llm)
