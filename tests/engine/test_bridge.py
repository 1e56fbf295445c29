"""Sessions as KV caches of the executor and back: whatever was done to either, each goes on as an undisturbed run of its tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from quire import LLM, FailedPrecondition, InvalidArgument, LlmExecutor
from quire.contracts.executor import DecodeInput, ExecutorInputs, PrefillInput, TextData
from quire.engine.session import Session
from quire.executor.cache import KVCache
from quire.executor.handle import handle_of

from .conftest import VOCAB, Checkpoint, MakeLLM, engine_of, greedy, make_family, random_tokens, record

PROMPT = random_tokens(40)


def inputs(*tokens: int, **options: Any) -> ExecutorInputs:
    return ExecutorInputs(text=TextData(token_ids=torch.tensor([tokens])), **options)


def next_tokens(llm: LLM, cache: KVCache, count: int) -> list[int]:
    """The greedy tokens behind the one row of a cache, whose last token runs once more. The cache is as before."""
    copy = cache.deep_copy()
    last = copy.token_ids(0)[-1]
    found = LlmExecutor(llm.executor).sample_tokens(count, inputs(last, next_position=copy.length - 1), copy)
    copy.release()
    return found


def free_pages(llm: LLM) -> int:
    return engine_of(llm).runner.state.num_available_pages()


# -- no bytes copied -------------------------------------------------------------------------------------------


def test_a_cache_shares_all_pages_of_the_session(small: LLM, llama: Checkpoint) -> None:
    session = small.session(PROMPT)
    session.kv(0)  # all tokens are computed from here on
    before = free_pages(small)
    held, _ = session.pages
    cache = session.as_cache()
    assert free_pages(small) == before
    assert session.pages == (held, held)
    assert cache.lengths == (40,)
    assert cache.token_ids(0).tolist() == PROMPT
    back = small.session(cache=cache)
    assert free_pages(small) == before
    assert back.pages == (held, held)
    assert back.tokens == PROMPT
    recorder = record(small)
    assert back.generate(greedy(5)).outputs[0].token_ids == llama.greedy(PROMPT, 5)
    assert recorder.num_tokens == 5, "the last token and four new ones; nothing was computed again"
    assert cache.lengths == (40,)
    assert session.tokens == PROMPT
    assert next_tokens(small, cache, 5) == llama.greedy(PROMPT, 5)


def test_the_last_token_is_run_once(small: LLM) -> None:
    session = small.session(PROMPT)
    assert session.num_computed == 39
    recorder = record(small)
    cache = session.as_cache()
    assert recorder.num_tokens == 1
    session.as_cache().release()
    assert recorder.num_tokens == 1
    assert cache.lengths == (40,)


def test_neither_shows_in_the_other(small: LLM, llama: Checkpoint) -> None:
    session = small.session(PROMPT)
    cache = session.as_cache()
    other = small.session(cache=cache)
    small.executor.prefill(PrefillInput(input_ids=torch.tensor([[1, 2, 3]]), kv_cache=cache))
    other.append([4, 5])
    session.rewind(to=30)
    session.append([6])
    assert session.generate(greedy(4)).outputs[0].token_ids == llama.greedy([*PROMPT[:30], 6], 4)
    assert other.generate(greedy(4)).outputs[0].token_ids == llama.greedy([*PROMPT, 4, 5], 4)
    assert next_tokens(small, cache, 4) == llama.greedy([*PROMPT, 1, 2, 3], 4)
    session.close()
    other.close()
    assert next_tokens(small, cache, 4) == llama.greedy([*PROMPT, 1, 2, 3], 4)


def test_branches_of_a_session_by_broadcast_and_select(small: LLM, llama: Checkpoint) -> None:
    """A session to a batch, a step of each row, and the best row as a session again."""
    session = small.session(PROMPT)
    batch = small.executor.create_kv_cache(batch_size=3)
    batch.broadcast_and_copy_from(session.as_cache())
    small.executor.decode(DecodeInput(input_ids=torch.tensor([[7], [8], [9]]), kv_cache=batch))
    for row, token in enumerate((7, 8, 9)):
        with small.session(cache=batch, row=row) as chosen:
            assert chosen.tokens == [*PROMPT, token]
            assert chosen.generate(greedy(3)).outputs[0].token_ids == llama.greedy([*PROMPT, token], 3)
    assert batch.lengths == (41, 41, 41)


def test_a_verified_path_becomes_a_session(small: LLM, llama: Checkpoint) -> None:
    session = small.session(PROMPT)
    cache = session.as_cache()
    drafts = llama.greedy(PROMPT, 3)
    tree = [DecodeInput(input_ids=torch.tensor([[token]]), kv_cache=cache) for token in (drafts[0], 3, drafts[1])]
    outputs = small.executor.forward_verify(tree, parents=[-1, -1, 0])
    assert int(outputs[2].logits[0].argmax()) == drafts[2]
    with pytest.raises(FailedPrecondition, match="commit_path"):
        small.session(cache=outputs[2].kv_cache)
    kept = small.session(cache=small.executor.commit_path(outputs[2].kv_cache))
    assert kept.tokens == [*PROMPT, *drafts[:2]]
    assert kept.generate(greedy(1)).outputs[0].token_ids == drafts[2:]


def test_a_handle_is_what_it_covers(small: LLM, llama: Checkpoint) -> None:
    cache = small.session(PROMPT).as_cache()
    early = handle_of(cache, (25,))
    assert small.session(cache=early).generate(greedy(3)).outputs[0].token_ids == llama.greedy(PROMPT[:25], 3)
    small.executor.truncate_kv(cache, 20)
    with pytest.raises(InvalidArgument, match="stale"):
        small.session(cache=early)


# -- random operations -----------------------------------------------------------------------------------------


BEDS = ("llama", "gemma3", "mistral", "deepseek-v2-lite", "qwen3-next", "mamba2")
"""Plain attention, windows in some layers and in all, latent attention, hybrid, recurrent alone."""

FORGETFUL = ("gemma3", "mistral")
"""Those of whose past a KV cache may have let go of what an earlier position needs."""


@pytest.fixture(scope="module", params=BEDS)
def bed(
    request: pytest.FixtureRequest, checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    name: str = request.param
    return checkpoints[name] if name in checkpoints else make_family(name, tmp_path_factory.mktemp(name))


class Machine:
    """Sessions and KV caches of one LLM, with the tokens that each must have."""

    def __init__(self, llm: LLM, undisturbed: LLM, seed: int, window: tuple[int, int] | None) -> None:
        self.llm, self.undisturbed, self.random, self.window = llm, undisturbed, random.Random(seed), window
        self.held: list[tuple[Session | KVCache, list[int]]] = []

    def options(self) -> dict[str, int]:
        return {} if self.window is None else {"window": self.window[0], "sink": self.window[1]}

    def expected(self, tokens: list[int], count: int) -> list[int]:
        with self.undisturbed.session(tokens, **self.options()) as session:
            return session.generate(greedy(count)).outputs[0].token_ids

    def ids(self, most: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(self.random.randrange(1, most))]

    def step(self) -> None:
        if not self.held or (len(self.held) < 4 and self.random.random() < 0.3):
            tokens = self.ids(40)
            self.held.append((self.llm.session(tokens, **self.options()), tokens))
            return
        index = self.random.randrange(len(self.held))
        one, tokens = self.held[index]
        names = SESSION_VERBS if isinstance(one, Session) else CACHE_VERBS
        found = getattr(self, self.random.choice(names))(one, tokens)
        if found is None:
            del self.held[index]
        elif found[0] is not one:
            self.held.append(found)
            self.held = self.held[-5:]
        else:
            self.held[index] = found

    # Sessions

    def append(self, one: Session, tokens: list[int]) -> Any:
        more = self.ids(12)
        one.append(more)
        return one, [*tokens, *more]

    def generate(self, one: Session, tokens: list[int]) -> Any:
        count = self.random.randrange(1, 6)
        found = one.generate(greedy(count)).outputs[0].token_ids
        assert found == self.expected(tokens, count)
        return one, [*tokens, *found]

    def rewind(self, one: Session, tokens: list[int]) -> Any:
        to = self.random.randrange(1, len(tokens) + 1)
        one.rewind(to=to)
        return one, tokens[:to]

    def as_cache(self, one: Session, tokens: list[int]) -> Any:
        return one.as_cache(dynamic=self.random.random() < 0.5), tokens

    def save(self, one: Session, tokens: list[int]) -> Any:
        cache = self.llm.executor.create_kv_cache()
        cache.load(one.to_bytes())
        return cache, tokens

    # Caches

    def decode(self, one: KVCache, tokens: list[int]) -> Any:
        start = self.random.choice([len(tokens), max(1, len(tokens) - self.random.randrange(4))])
        more = self.ids(4)
        count = self.random.randrange(1, 4)
        face = LlmExecutor(self.llm.executor)
        if more[:-1]:
            face.prefill(inputs(*more[:-1], next_position=start), one)
        at = start + len(more) - 1
        made = [*tokens[:start], *more]
        found = face.sample_tokens(count, inputs(more[-1], next_position=at), one)
        assert found == self.expected(made, count)
        return one, [*made, *found[:-1]]

    def truncate(self, one: KVCache, tokens: list[int]) -> Any:
        to = max(1, len(tokens) - self.random.randrange(5))
        self.llm.executor.truncate_kv(one, to)
        return one, tokens[:to]

    def fork(self, one: KVCache, tokens: list[int]) -> Any:
        length = self.random.choice([len(tokens), max(1, len(tokens) - self.random.randrange(5))])
        return self.llm.session(cache=handle_of(one, (length,))), tokens[:length]

    def serialize(self, one: KVCache, tokens: list[int]) -> Any:
        return self.llm.session_from_bytes(one.serialize()), tokens

    def drop(self, one: Session | KVCache, tokens: list[int]) -> Any:
        one.close() if isinstance(one, Session) else one.release()

    def check(self) -> None:
        for one, tokens in self.held:
            assert (one.tokens if isinstance(one, Session) else one.token_ids(0).tolist()) == tokens
        engine_of(self.llm).runner.state.check()


SESSION_VERBS = ("append", "generate", "generate", "rewind", "as_cache", "as_cache", "save", "drop")
CACHE_VERBS = ("decode", "decode", "truncate", "fork", "fork", "serialize", "drop")


@pytest.mark.parametrize("seed", range(2))
def test_random_operations(make_llm: MakeLLM, bed: Checkpoint, seed: int) -> None:
    run(make_llm, bed, seed, None)


@pytest.mark.parametrize("bed", BEDS[:5], indirect=True)
def test_random_operations_on_windowed_sessions(make_llm: MakeLLM, bed: Checkpoint) -> None:
    run(make_llm, bed, 2, (12, 2))


def run(make_llm: MakeLLM, bed: Checkpoint, seed: int, window: tuple[int, int] | None) -> None:
    options = {"kv_cache_memory": "4MiB", "page_size": 4}
    llm = make_llm(bed, **options)
    machine = Machine(llm, make_llm(bed, enable_prefix_caching=False, **options), seed, window)
    refused = 0
    for _ in range(50):
        try:
            machine.step()
        except FailedPrecondition as error:
            # A cache in which a window has let go of what the position needs says so, and is as it was.
            assert window is not None or bed.path.name in FORGETFUL, error
            refused += 1
        machine.check()
    assert refused < 15
    for one, tokens in machine.held:
        found = one if isinstance(one, Session) else llm.session(cache=one)
        assert found.generate(greedy(4)).outputs[0].token_ids == machine.expected(tokens, 4)
        machine.drop(one, tokens)
