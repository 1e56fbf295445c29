"""Prompts that one engine computes for another, over models of every kind of state."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from tests.examples import examples
from tests.small_llms import Checkpoint, check, engine_of, greedy, make_family, random_tokens, token_ids

from quire import LLM
from quire.base.errors import Cancelled, FailedPrecondition, NotFound
from quire.channels.pair import channel_pair
from quire.engine.handover import IncomingPrompts, send_prompt
from quire.runner.reclaim import ReclaimKind
from quire.sessions.prompts import cache_key

KEY = cache_key(None)


@pytest.fixture(scope="session")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_family("youtu", tmp_path_factory.mktemp("youtu"))


def handed(sender: LLM, receiver: LLM, prompts: IncomingPrompts, tokens: list[int], least: int = 1) -> int:
    """Hand a prompt over, less its last token; return how many tokens came."""
    ours, theirs = channel_pair()
    ids = np.array(tokens[:-1], dtype=np.int64)
    with engine_of(receiver).lock:
        incoming = prompts.begin(ids, key=KEY, adapter=None, channel=theirs, least=least)
    if incoming is None:
        return 0
    here = engine_of(sender)
    if incoming.begin:
        here.run([here.submit_prefix(ids[: incoming.begin], key=KEY)])
    with here.lock:
        request = send_prompt(
            here, ids, key=KEY, adapter=None, begin=incoming.begin, position_map=incoming.map, channel=ours
        )
    while not request.finished:
        here.step()
        engine_of(receiver).runner.state.check()
    with engine_of(receiver).lock:
        prompts.finish(incoming)
    check(receiver)
    return ids.size - incoming.begin


def both_ways(make_llm: Callable[..., LLM], model: Checkpoint, seed: int) -> None:
    """Prompts that continue each other, in chunks and pages of other sizes on each side."""
    chance = random.Random(seed)
    sender = make_llm(model, page_size=chance.choice((4, 16)), max_num_batched_tokens=chance.choice((16, 37, 512)))
    receiver = make_llm(model, page_size=8)
    alone = make_llm(model, enable_prefix_caching=False)
    prompts, tokens = IncomingPrompts(engine_of(receiver)), random_tokens(chance.randint(40, 90), seed)
    for _ in range(3):
        assert handed(sender, receiver, prompts, tokens)
        [found], [expected] = receiver.generate([tokens], greedy(6)), alone.generate([tokens], greedy(6))
        assert token_ids([found]) == token_ids([expected])
        assert found.num_cached_tokens == len(tokens) - 1
        tokens = [*tokens, *found.outputs[0].token_ids, *random_tokens(chance.randint(3, 30), seed)]


def test_rows(make_llm: Callable[..., LLM], checkpoint: Checkpoint) -> None:
    for seed in range(examples(1, 10)):
        both_ways(make_llm, checkpoint, seed)


def test_recurrent_states(make_llm: Callable[..., LLM], hybrid: Checkpoint) -> None:
    for seed in range(examples(1, 10)):
        both_ways(make_llm, hybrid, seed)


def test_latent_rows(make_llm: Callable[..., LLM], latent: Checkpoint) -> None:
    for seed in range(examples(1, 10)):
        both_ways(make_llm, latent, seed)


def test_a_prompt_that_is_cached_on_both_sides(make_llm: Callable[..., LLM], llama: Checkpoint) -> None:
    sender, receiver = make_llm(llama), make_llm(llama)
    prompts, tokens = IncomingPrompts(engine_of(receiver)), random_tokens(50)
    sender.generate([tokens], greedy(1))
    steps = sender.metrics()["quire:prompt_tokens_total"]
    assert handed(sender, receiver, prompts, tokens) == 49
    assert sender.metrics()["quire:prompt_tokens_total"] == steps
    assert handed(sender, receiver, prompts, tokens) == 0
    assert handed(sender, receiver, prompts, [*tokens, 3], least=5) == 0, "too little to ask for"


def test_a_sender_that_preempts(make_llm: Callable[..., LLM], llama: Checkpoint) -> None:
    """The prompt loses its state on the sender: the receiver is told, and nothing is left."""
    sender, receiver = make_llm(llama, max_num_batched_tokens=16), make_llm(llama)
    prompts, ids = IncomingPrompts(engine_of(receiver)), np.array(random_tokens(60), dtype=np.int64)
    ours, theirs = channel_pair()
    incoming = prompts.begin(ids, key=KEY, adapter=None, channel=theirs, least=1)
    assert incoming is not None
    here = engine_of(sender)
    request = send_prompt(here, ids, key=KEY, adapter=None, begin=0, position_map=incoming.map, channel=ours)
    here.step()
    with here.lock:
        here.scheduler.preempt(request)
    with pytest.raises(Cancelled, match="the other side has cancelled the hand-over; 0 of 2 layers of sequence 0"):
        prompts.finish(incoming)
    assert engine_of(receiver).runner.state.empty()
    here.run([request])
    check(sender)


def test_refusals(make_llm: Callable[..., LLM], llama: Checkpoint) -> None:
    sender, receiver = make_llm(llama), make_llm(llama)
    prompts, ids = IncomingPrompts(engine_of(receiver)), np.array(random_tokens(60), dtype=np.int64)
    ours, theirs = channel_pair()
    incoming = prompts.begin(ids, key=KEY, adapter=None, channel=theirs, least=1)
    assert incoming is not None
    with pytest.raises(NotFound, match="no adapter of fingerprint x is loaded here"):
        send_prompt(engine_of(sender), ids, key=KEY, adapter="x", begin=0, position_map=incoming.map, channel=ours)
    with pytest.raises(FailedPrecondition, match="has the first 7 tokens of the prompt, and 0 of them are here"):
        send_prompt(engine_of(sender), ids, key=KEY, adapter=None, begin=7, position_map=incoming.map, channel=ours)
    assert engine_of(sender).runner.state.empty()
    assert prompts.reclaimable() == [incoming.seq]
    assert not prompts.reclaim_one(ReclaimKind.PREFIXES)
    assert prompts.reclaim_one(ReclaimKind.IDLE)
    with pytest.raises(NotFound, match="its pages were needed"):
        prompts.finish(incoming)
    with pytest.raises(FailedPrecondition, match="the prefix cache is off"):
        IncomingPrompts(engine_of(make_llm(llama, enable_prefix_caching=False)))
