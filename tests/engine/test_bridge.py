"""Sessions as KV caches of the executor and back: whatever was done to either, each goes on as an
undisturbed run of its tokens.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.executor.conftest import forget_tokens
from tests.small_llms import VOCAB, Checkpoint, MakeLLM, engine_of, greedy, make_family, random_tokens, record

from quire import LLM, AsyncLLM, DataLoss, FailedPrecondition, InvalidArgument, LlmExecutor, NotFound, ResourceExhausted
from quire.base.errors import QuireError, Unsupported
from quire.contracts.executor import DecodeInput, ExecutorInputs, PrefillInput, TextData
from quire.executor.cache import KVCache
from quire.executor.executor import Executor
from quire.executor.handle import handle_of
from quire.sessions.session import Session
from quire.statefile.container import plan_of, read_state, to_bytes

PROMPT = random_tokens(40)


def inputs(*tokens: int, **options: Any) -> ExecutorInputs:
    return ExecutorInputs(text=TextData(token_ids=torch.tensor([tokens])), **options)


def next_tokens(llm: LLM, cache: KVCache, count: int) -> list[int]:
    """The greedy tokens behind the one row of a cache, whose last token runs once more.

    The cache is as before.
    """
    copy = cache.deep_copy()
    last = copy.token_ids(0)[-1]
    found = LlmExecutor(llm.executor).sample_tokens(count, inputs(last, next_position=copy.length - 1), copy)
    copy.release()
    return found


def free_pages(llm: LLM) -> int:
    return engine_of(llm).runner.state.num_available_pages()


# -- no bytes copied -------------------------------------------------------------------------------


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


# -- random operations -----------------------------------------------------------------------------


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


@pytest.mark.product(8)
@pytest.mark.parametrize("seed", range(2))
def test_random_operations(make_llm: MakeLLM, bed: Checkpoint, seed: int) -> None:
    run(make_llm, bed, seed, None)


@pytest.mark.turns(3)
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
        except FailedPrecondition:
            # A cache in which a window has let go of what the position needs says so, and is as it
            # was.
            if window is None and bed.path.name not in FORGETFUL:
                raise
            refused += 1
        machine.check()
    assert refused < 15
    for one, tokens in machine.held:
        found = one if isinstance(one, Session) else llm.session(cache=one)
        assert found.generate(greedy(4)).outputs[0].token_ids == machine.expected(tokens, 4)
        machine.drop(one, tokens)


# -- what goes along -------------------------------------------------------------------------------


def test_adapters_of_each_token(python_llm: LLM) -> None:
    python_llm.load_adapter("docs", "tiny-python-docstrings")
    session = python_llm.session("def get_device_count():\n")
    session.use_adapter("docs")
    session.append("    ")
    session.use_adapter(None)
    session.append("return")
    session.use_adapter("docs")
    cache = session.as_cache()
    runs = session._branch.runs
    assert len(runs.runs) == 4
    loaded = python_llm.executor.create_kv_cache()
    loaded.load(cache.serialize())
    found = session.generate(greedy(6)).outputs[0].token_ids
    for source in (cache, loaded):
        with python_llm.session(cache=source) as other:
            assert (other.adapter, other._branch.runs) == ("docs", runs)
            # Computed again from its tokens, each under its own.
            engine_of(python_llm).branches.drop(other._branch)
            assert other.generate(greedy(6)).outputs[0].token_ids == found
    session.close()
    python_llm.unload_adapter("docs")
    with pytest.raises(NotFound, match=r"adapter \d+, which was unloaded"):
        python_llm.session(cache=cache)
    cache.release()
    loaded.release()


@pytest.mark.parametrize("bed", ["llama", "qwen3-next"], indirect=True)
def test_a_state_that_was_written_into(make_llm: MakeLLM, bed: Checkpoint) -> None:
    """It is never computed again: as the session's is not, and no prompt begins with it."""
    llm = make_llm(bed, kv_cache_memory="4MiB", page_size=4)
    session = llm.session(PROMPT)
    layer = 1 if bed.path.name == "llama" else 0
    session.set_kv(
        layer, **{name: torch.zeros_like(one[:20] if layer else one) for name, one in session.kv(layer).items()}
    )
    cache = session.as_cache()
    loaded = llm.executor.create_kv_cache()
    loaded.load(session.to_bytes())
    again = llm.executor.create_kv_cache()
    again.load(cache.serialize())
    found = session.generate(greedy(8)).outputs[0].token_ids
    assert found != session.fork(at=0).append(PROMPT).generate(greedy(8)).outputs[0].token_ids
    for source in (cache, loaded, again):
        other = llm.session(cache=source)
        assert other.modified
        assert other.pinned
        assert other.generate(greedy(8)).outputs[0].token_ids == found
        other.close()
        assert llm.session_from_bytes(source.serialize()).modified
    llm.executor.share_prefixes = True
    before = free_pages(llm)
    fresh = llm.executor.prefill(PrefillInput(input_ids=torch.tensor([PROMPT]), logits="last"))
    pages = 10 if bed.path.name == "llama" else 0
    assert before - free_pages(llm) >= pages, "it shares nothing with those that were written into"
    exact_TV, bound = bed.exact_logits(PROMPT)
    assert float((fresh.logits[0, 0].double() - exact_TV[-1]).abs().max()) <= bound
    cache.clear()
    llm.executor.prefill(PrefillInput(input_ids=torch.tensor([PROMPT]), kv_cache=cache))
    assert not llm.session(cache=cache).modified, "what was written is gone"


@pytest.mark.parametrize("bed", ["qwen3-next"], indirect=True)
def test_a_written_recurrent_state_is_not_run_again_by_the_executor(make_llm: MakeLLM, bed: Checkpoint) -> None:
    llm = make_llm(bed, kv_cache_memory="4MiB", page_size=4)
    session = llm.session(PROMPT)
    session.set_kv(0, **{name: torch.zeros_like(one) for name, one in session.kv(0).items()})
    cache = session.as_cache()
    for _ in range(2):
        with pytest.raises(FailedPrecondition, match="was written into and cannot be computed again"):
            llm.executor.truncate_kv(cache, 20)
        assert cache.lengths == (40,)
        cache.drop_spare_states()
        assert 39 in llm.executor.pool.state.checkpoints(cache.rows[0].seq), "where the session keeps what was written"
    llm.executor.truncate_kv(cache, 39)
    with pytest.raises(FailedPrecondition, match="written into"):
        llm.session(cache=handle_of(cache, (30,)))


def test_salted_tokens_and_windows_are_no_prefix_for_prompts(small: LLM) -> None:
    small.executor.share_prefixes = True

    def shared() -> int:
        before = free_pages(small)
        output = small.executor.prefill(PrefillInput(input_ids=torch.tensor([[*PROMPT, 1]]), logits="last"))
        taken = before - free_pages(small)
        small.executor.release_cache(output.kv_cache.cache_id)
        return 3 - taken

    assert shared() == 0
    plain = small.session(PROMPT).as_cache()
    assert shared() == 2
    plain.release()
    for options in ({"cache_salt": "tenant"}, {"window": 39, "sink": 2}):
        held = small.session(PROMPT, **options).as_cache()
        assert shared() == 0
        held.clear()
        small.executor.prefill(PrefillInput(input_ids=torch.tensor([PROMPT]), kv_cache=held))
        assert shared() == 2, "a cleared cache is like a new one"
        held.release()


def test_a_session_of_a_cache_is_no_prefix_for_others(small: LLM) -> None:
    output = small.executor.prefill(PrefillInput(input_ids=torch.tensor([PROMPT])))
    session = small.session(cache=output.kv_cache)
    session.generate(greedy(2))
    assert small.generate([[*PROMPT, 3]], greedy(1))[0].num_cached_tokens == 0
    assert session.fork().generate(greedy(1)).num_cached_tokens > 40, "it shares with its own forks"


def test_a_state_from_another_dtype_stays_marked(make_llm: MakeLLM, llama: Checkpoint) -> None:
    data = make_llm(llama).session(PROMPT).to_bytes()
    llm = make_llm(llama, dtype="bfloat16")
    cache = llm.executor.create_kv_cache()
    with pytest.raises(InvalidArgument, match="convert_dtype"):
        cache.load(data)
    cache.load(data, convert_dtype=True)
    converted = llm.session_from_bytes(data, convert_dtype=True)
    assert not converted._branch.origin.exact
    for session in (
        llm.session(cache=cache),
        llm.session(cache=converted.as_cache()),
        llm.session_from_bytes(cache.serialize()),
    ):
        assert not session._branch.origin.exact
    assert llm.session(cache=llm.session(PROMPT).as_cache())._branch.origin.exact


def test_windows_go_along(small: LLM) -> None:
    session = small.session(PROMPT, window=20, sink=3)
    found = session.fork().generate(greedy(6)).outputs[0].token_ids
    cache = session.as_cache()
    face = LlmExecutor(small.executor)
    assert face.sample_tokens(6, inputs(PROMPT[-1], next_position=39), cache) == found
    back = small.session(cache=cache)
    assert back.window == (20, 3)
    assert (
        back.generate(greedy(2)).outputs[0].token_ids
        == session.append(found[:5]).generate(greedy(2)).outputs[0].token_ids
    )
    empty = small.session(window=20, sink=3)
    saved = small.executor.create_kv_cache()
    saved.load(empty.to_bytes())
    for cache in (empty.as_cache(), saved):
        face.prefill(inputs(*PROMPT[:-1]), cache)
        assert face.sample_tokens(6, inputs(PROMPT[-1]), cache) == found
        assert small.session(cache=cache).window == (20, 3)


def test_empty_sessions_and_caches(small: LLM, llama: Checkpoint) -> None:
    cache = small.session().as_cache()
    assert cache.lengths == (0,)
    session = small.session(cache=cache)
    assert session.tokens == []
    assert session.append(PROMPT).generate(greedy(3)).outputs[0].token_ids == llama.greedy(PROMPT, 3)


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.turns(3)
def test_files_of_both_are_read_by_both(make_llm: MakeLLM, bed: Checkpoint, tmp_path: Path) -> None:
    llm = make_llm(bed, kv_cache_memory="4MiB", page_size=4)
    other = make_llm(bed, kv_cache_memory="4MiB", page_size=8)
    session = llm.session(PROMPT)
    session.generate(greedy(3))
    session.save(tmp_path / "state.quire")
    expected = session.fork().generate(greedy(5)).outputs[0].token_ids
    for dynamic in (False, True):
        cache = other.executor.create_kv_cache(dynamic=dynamic)
        cache.load((tmp_path / "state.quire").read_bytes())
        assert cache.token_ids(0).tolist() == session.tokens, "the last token, which had no state yet, too"
        assert next_tokens(other, cache, 5) == expected
        (tmp_path / "cache.quire").write_bytes(cache.serialize())
        loaded = llm.load_session(tmp_path / "cache.quire")
        assert loaded.tokens == session.tokens
        recorder = record(llm)
        assert loaded.generate(greedy(5)).outputs[0].token_ids == expected
        assert recorder.num_tokens <= 5 + 3, "the state came from the file"


def test_a_row_of_several_is_picked(small: LLM, llama: Checkpoint) -> None:
    rows = [PROMPT, random_tokens(40, seed=1), random_tokens(40, seed=2)]
    output = small.executor.prefill(PrefillInput(input_ids=torch.tensor(rows)))
    data = output.kv_cache.cache.serialize()
    for row in range(3):
        session = small.session_from_bytes(data, row=row)
        assert session.tokens == rows[row]
        assert session.generate(greedy(3)).outputs[0].token_ids == llama.greedy(rows[row], 3)
    for choice, match in ((None, "3 rows, and a session is one; pick it with row="), (3, "0..2"), (-1, "0..2")):
        with pytest.raises(InvalidArgument, match=match):
            small.session_from_bytes(data, row=choice)
        with pytest.raises(InvalidArgument, match=match):
            small.session(cache=output.kv_cache, row=choice)
    with pytest.raises(InvalidArgument, match="which has no rows"):
        small.session_from_bytes(small.session(PROMPT).to_bytes(), row=0)
    batch = small.executor.create_kv_cache(batch_size=2)
    with pytest.raises(InvalidArgument, match="1 rows, 2 are expected"):
        batch.load(small.session(PROMPT).to_bytes())


def altered(data: bytes, **changes: Any) -> bytes:
    """A state file whose metadata say something else; None takes an entry away."""
    with read_state(data) as file:
        tensors = {name: file.tensor(name) for name in file.names}
        metadata = {
            name: value
            for name, value in {**file.metadata, **changes}.items()
            if name not in changes or value is not None
        }
        return to_bytes(metadata, plan_of(tensors), iter(tensors.items()))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"modified": 1}, DataLoss, "metadata.modified is 1"),
        ({"exact": None}, DataLoss, "metadata.exact is missing"),
        ({"tokens": [3] * 5}, DataLoss, r"positions \[0, 40\]; \[0, 5\] is expected"),
        ({"tokens": [3] * 5, "positions": [0, 5]}, DataLoss, "state of 39 tokens and names 5"),
        ({"tokens": [VOCAB] * 40}, DataLoss, f"0..{VOCAB - 1}"),
        ({"tokens": [3] * 300, "positions": [0, 300]}, InvalidArgument, "256 slots"),
        ({"window": [5]}, DataLoss, r"metadata.window is \[5\]"),
        (
            {"window": [9, 2]},
            DataLoss,
            r"window, sink and eviction \(None, 0, 'token'\), and its session \(9, 2, 'token'\)",
        ),
        ({"model": {"architecture": "x", "config": "", "weights": ""}}, InvalidArgument, "another model"),
        ({"kind": "soup"}, InvalidArgument, "soup"),
        ({"adapters": [[0, "f" * 32]]}, InvalidArgument, "load that adapter first"),
    ],
)
def test_sessions_files_that_a_cache_refuses(
    small: LLM, changes: dict[str, Any], error: type[QuireError], match: str
) -> None:
    data = altered(small.session(PROMPT).to_bytes(), **changes)
    cache = small.executor.create_kv_cache()
    cache.load(small.session(random_tokens(9)).to_bytes())
    before = (cache.token_ids(0).tolist(), cache.revision, free_pages(small), len(small.executor.pool.caches))
    with pytest.raises(error, match=match):
        cache.load(data)
    assert (cache.token_ids(0).tolist(), cache.revision, free_pages(small), len(small.executor.pool.caches)) == before


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"rows": None}, DataLoss, "metadata.rows is missing"),
        ({"rows": [3]}, DataLoss, r"metadata.rows\[0\] is 3"),
        ({"tokens": [None]}, InvalidArgument, "does not tell the tokens of row 0"),
        ({"tokens": [[3]]}, DataLoss, "state of 40 tokens and names 1"),
        ({"tokens": [[VOCAB] * 40]}, DataLoss, f"0..{VOCAB - 1}"),
        ({"exact": [2]}, DataLoss, r"metadata.exact\[0\] is 2"),
        ({"modified": True}, DataLoss, "metadata.modified is True"),
    ],
)
def test_files_of_caches_that_are_no_sessions(
    small: LLM, changes: dict[str, Any], error: type[QuireError], match: str
) -> None:
    data = small.session(PROMPT).as_cache().serialize()
    assert small.session_from_bytes(altered(data, exact=None, modified=None)).tokens == PROMPT, "older files"
    before = (free_pages(small), len(engine_of(small).branches.sessions))
    with pytest.raises(error, match=match):
        small.session_from_bytes(altered(data, **changes))
    assert (free_pages(small), len(engine_of(small).branches.sessions)) == before


# -- refusals --------------------------------------------------------------------------------------


def test_what_is_refused_leaves_no_trace(small: LLM, make_llm: MakeLLM, llama: Checkpoint) -> None:
    session = small.session(PROMPT)
    cache = session.as_cache()
    released = small.session(PROMPT).as_cache()
    released.release()
    unknown = small.session(PROMPT).as_cache()
    forget_tokens(unknown.rows[0])
    foreign = make_llm(llama).session(PROMPT).as_cache()
    sessions = len(engine_of(small).branches.sessions)
    before = (free_pages(small), len(small.executor.pool.caches), list(engine_of(small).runner.state.sequences.ids))
    for error, match, options in (
        (InvalidArgument, "KV cache or a handle", {"cache": 3}),
        (InvalidArgument, "another model's pages", {"cache": foreign}),
        (NotFound, "was released", {"cache": released}),
        (InvalidArgument, "tokens of row 0 are not known", {"cache": unknown}),
        (InvalidArgument, r"rows 0\.\.0", {"cache": cache, "row": 1}),
        (InvalidArgument, r"rows 0\.\.0", {"cache": cache, "row": True}),
        (InvalidArgument, "without a KV cache", {"row": 0}),
        (InvalidArgument, "prompt, adapter, cache_salt, window, sink beside cache",
         {"prompt": [1], "adapter": "x", "cache_salt": "", "window": 0, "sink": 1, "cache": cache}),
        (InvalidArgument, "pin must be", {"cache": cache, "pin": 1}),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            small.session(**options)  # type: ignore[arg-type]
    for error, match, given in (
        (ResourceExhausted, "40 tokens, and a row of this KV cache holds 39", {"capacity": 39}),
        (ResourceExhausted, "maximum", {"capacity": 999}),
        (InvalidArgument, "capacity", {"capacity": 0}),
    ):
        with pytest.raises(error, match=match):
            session.as_cache(**given)
    assert (
        free_pages(small),
        len(small.executor.pool.caches),
        list(engine_of(small).runner.state.sequences.ids),
    ) == before
    assert len(engine_of(small).branches.sessions) == sessions
    assert session.as_cache(capacity=40).num_entries == 40
    assert session.as_cache(dynamic=True).num_entries == 40
    stream = session.stream(greedy(5))
    next(stream)
    with pytest.raises(FailedPrecondition, match="as_cache: the session is generating"):
        session.as_cache()
    stream.close()
    session.close()
    with pytest.raises(FailedPrecondition, match="as_cache: the session is closed"):
        session.as_cache()


def test_a_session_beyond_the_context_is_no_cache(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, max_model_len=48)
    session = llm.session(PROMPT, window=20, sink=2)
    session.generate(greedy(8))
    session.as_cache().release()
    session.generate(greedy(1))
    with pytest.raises(ResourceExhausted, match="49 tokens, and a row of this KV cache holds 48"):
        session.as_cache(dynamic=True)
    with pytest.raises(InvalidArgument, match="49 tokens in a row; this static cache has 48 slots"):
        llm.executor.create_kv_cache().load(session.to_bytes())


def test_an_executor_of_its_own_over_the_same_pages(small: LLM, llama: Checkpoint) -> None:
    """Whose runner it is counts, not which executor made the cache; one with a window gives
    windowed sessions.
    """
    engine = engine_of(small)
    own = Executor(engine.runner, identity=small.executor.pool.facts.identity, lock=engine.lock, window=20, sink=3)
    output = own.prefill(PrefillInput(input_ids=torch.tensor([PROMPT])))
    session = small.session(cache=output.kv_cache)
    assert session.window == (20, 3)
    expected = small.session(PROMPT, window=20, sink=3).generate(greedy(6)).outputs[0].token_ids
    assert session.generate(greedy(6)).outputs[0].token_ids == expected
    own.shutdown()
    with pytest.raises(NotFound, match="released"):
        small.session(cache=output.kv_cache)


def test_rows_at_positions_of_their_own_are_no_sessions(small: LLM, llama: Checkpoint) -> None:
    """A session's tokens stand at their indices: another row is refused, as far as it is
    another."""
    places = torch.tensor([[*range(30), *range(50, 60)]])
    output = small.executor.prefill(PrefillInput(input_ids=torch.tensor([PROMPT]), position_ids=places))
    cache = output.kv_cache.cache
    with pytest.raises(Unsupported, match="row 0 has tokens at positions that are not their indices"):
        small.session(cache=cache)
    with pytest.raises(Unsupported, match="row 0 of the state has tokens at positions"):
        small.session_from_bytes(cache.serialize())
    early = small.session(cache=handle_of(cache, (30,)))
    assert early.generate(greedy(3)).outputs[0].token_ids == llama.greedy(PROMPT[:30], 3)


def test_pinned_and_dropped(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=64, page_size=4)
    session = llm.session(PROMPT)
    cache = session.as_cache()
    assert llm.session(cache=cache, pin=True).pinned
    other = llm.session(cache=cache)
    session.close()
    cache.release()
    assert not other.pinned
    dropped = llm.session(random_tokens(20, seed=3))
    engine_of(llm).branches.drop(dropped._branch)
    assert dropped.as_cache().token_ids(0).tolist() == dropped.tokens, "computed again"


def test_async(llama: Checkpoint) -> None:
    async def use() -> None:
        async with AsyncLLM(llama.path, device="cpu", dtype="float32", kv_cache_memory="2MiB") as llm:
            cache = await (await llm.session(PROMPT)).as_cache()
            back = await llm.session(cache=cache)
            assert (await back.generate(greedy(4))).outputs[0].token_ids == llama.greedy(PROMPT, 4)
            loaded = await llm.session_from_bytes(cache.serialize(), row=0)
            assert loaded.tokens == PROMPT

    asyncio.run(use())
