"""Adapters in the engine: whatever is batched, forked, rewound, switched, dropped or saved, each
token runs under its own.

The oracle is transformers with the adapters added to its weights, in float64: one forward for each
run of a history, with its own cache in between.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from tests.branches.test_stored_state import CHUNK, check_store, force, squeeze
from tests.small_llms import GEOMETRY, Checkpoint, MakeLLM, check, engine_of, greedy, random_tokens, record
from torch import Tensor
from transformers import DynamicCache

from quire import LLM, BeamSearchParams, SamplingParams, Session
from quire.adapters.keys import AdapterKey, fingerprint_runs, prefix_key, runs_of_session, users
from quire.adapters.pool import AdapterPool
from quire.adapters.targets import embedding_of, linears_of
from quire.base.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, QuireError
from quire.base.types import BASE, AdapterRuns, Add, Chunk, Remove, Step
from quire.contracts.adapters import Adapter, LowRankUpdate
from quire.engine.beam import BeamSearch, search
from quire.engine.engine import Engine
from quire.engine.request import Request
from quire.kernels.linear.low_rank import native_low_rank
from quire.sessions.prompts import cache_key
from quire.statefile.container import read_state, to_bytes

RANK = 4
NAMES = ("one", "two", "three")
HEADS, KV_HEADS, HEAD_DIM, WIDE = (
    int(GEOMETRY[name])  # type: ignore[call-overload]
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
)
PARTS = {
    "self_attn.q_proj": ("qkv", 0),
    "self_attn.k_proj": ("qkv", HEADS * HEAD_DIM),
    "self_attn.v_proj": ("qkv", (HEADS + KV_HEADS) * HEAD_DIM),
    "self_attn.o_proj": ("out", 0),
    "mlp.gate_proj": ("gate_up", 0),
    "mlp.up_proj": ("gate_up", WIDE),
    "mlp.down_proj": ("down", 0),
}
"""Where the modules of a Llama are: the linear map of the layer, and the row at which they begin.
"""


def factors(ins: int, outs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A ``[R, I]`` and B^T ``[R, O]`` whose product is about as large as a weight."""
    a_RI = torch.randn(RANK, ins, generator=generator) * ins**-0.5
    return a_RI, torch.randn(RANK, outs, generator=generator) * RANK**-0.5


class Oracle(Protocol):
    """What the tokens of a sequence give, each under the adapter that is named beside it."""

    adapters: dict[str, Adapter]

    def logits(self, tokens: Sequence[int], under: Sequence[str | None]) -> tuple[Tensor, float]:
        """``[T, V]``, and how far others may be from them."""
        ...


def adding(a_RI: Tensor, b_RO: Tensor) -> Callable[[Any, tuple[Tensor, ...], Tensor], Tensor]:
    """A hook that adds an update to what a module gives."""
    return lambda module, inputs, y_TO: y_TO + (inputs[0] @ a_RI.T) @ b_RO


SHAKES = 3
"""Copies of a model with other rounding errors."""


def shaken(model: Any, seed: int) -> Any:
    """Return a copy in float64 whose weights are as far from the model's as float32 rounds."""
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight *= 1 + 2.0**-23 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return other


class Merged:
    """The oracle of a Llama checkpoint: exact with merged weights, and in float32 as adapters are
    run.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.adapters: dict[str, Adapter] = {}
        self.exact: dict[str | None, Any] = {}
        self.peers: dict[str | None, Any] = {}
        for number, name in enumerate((None, *NAMES)):
            model, peer = copy.deepcopy(checkpoint.model).double(), copy.deepcopy(checkpoint.model)
            updates: list[LowRankUpdate] = []
            generator = torch.Generator().manual_seed(100 + number)
            for place, module in model.named_modules():
                _, _, rest = place.partition("layers.")
                layer, _, part = rest.partition(".")
                linear, row = ("head", 0) if place == "lm_head" else PARTS.get(part, ("", 0))
                if name is None or not linear:
                    continue
                a_RI, b_RO = factors(module.in_features, module.out_features, generator)
                full = linear if linear == "head" else f"{layer}.{linear}"
                updates.append(LowRankUpdate(linear=full, row=row, a_RI=a_RI, b_RO=b_RO))
                peer.get_submodule(place).register_forward_hook(adding(a_RI, b_RO))
                with torch.no_grad():
                    module.weight += b_RO.double().T @ a_RI.double()
            if name is not None:
                self.adapters[name] = Adapter(fingerprint=f"of {name}", updates=tuple(updates), source=name)
            self.exact[name], self.peers[name] = model, peer
        self.shaken = [{name: shaken(model, seed) for name, model in self.exact.items()} for seed in range(SHAKES)]

    @torch.inference_mode()
    def run(self, models: dict[str | None, Any], tokens: Sequence[int], under: Sequence[str | None]) -> Tensor:
        cache, rows, at = DynamicCache(), [], 0
        for name, run in groupby(under):
            count = len(list(run))
            ids = torch.tensor([list(tokens[at : at + count])])
            rows.append(models[name](ids, past_key_values=cache, use_cache=True).logits[0].double())
            at += count
        return torch.cat(rows)

    def logits(self, tokens: Sequence[int], under: Sequence[str | None]) -> tuple[Tensor, float]:
        exact_TV = self.run(self.exact, tokens, under)
        # Theirs is one order of the sums, ours another; and each layer rounds the residual stream.
        # Where two keys' scores are near, the order decides how far errors go.
        others = (self.peers, *self.shaken)
        error = max(float((self.run(models, tokens, under) - exact_TV).abs().max()) for models in others)
        return exact_TV, 2 * error + self.checkpoint.tolerance * float(exact_TV.abs().max())


class Stepwise:
    """The oracle of any model: its own runner, one forward for each run, nothing kept between
    calls.
    """

    def __init__(self, checkpoint: Checkpoint, make_llm: MakeLLM) -> None:
        self.llm = make_llm(checkpoint, kv_cache_memory="4MiB", enable_prefix_caching=False)
        self.checkpoint = checkpoint
        generator = torch.Generator().manual_seed(5)
        linears = linears_of(engine_of(self.llm).runner.model)
        self.adapters = {
            name: Adapter(
                fingerprint=f"of {name}",
                updates=tuple(
                    LowRankUpdate(linear=linear, row=0, a_RI=a_RI, b_RO=b_RO)
                    for linear, found in linears.items()
                    for a_RI, b_RO in [factors(found.in_features, found.out_features, generator)]
                ),
            )
            for name in NAMES
        }
        self.ids = load(self.llm, self.adapters)

    def logits(self, tokens: Sequence[int], under: Sequence[str | None]) -> tuple[Tensor, float]:
        runner, rows, at = engine_of(self.llm).runner, [], 0
        seq = runner.new_seq()
        runner.execute(Step(edits=(Add(seq),)))
        for name, run in groupby(under):
            count = len(list(run))
            adapter = None if name is None else self.ids[name]
            chunk = Chunk(seq, tokens[at : at + count], adapter=adapter, logits="all")
            rows.append(runner.execute(Step(chunks=(chunk,))).logits_RV.double())
            at += count
        runner.execute(Step(edits=(Remove(seq),)))
        logits_TV = torch.cat(rows)
        # Two computations in other orders, each a rounding error of every layer off, which
        # recurrences carry on.
        return logits_TV, 16 * self.checkpoint.tolerance * float(logits_TV.abs().max())


def load(llm: LLM, adapters: dict[str, Adapter], capacity: int = 64) -> dict[str, int]:
    """Ids of adapters in a pool of its own."""
    engine = engine_of(llm)
    runner = engine.runner
    linears = linears_of(runner.model)
    pool = AdapterPool(
        linears,
        embedding_of(runner.model),
        dtype=torch.float32,
        device=torch.device("cpu"),
        rank_capacity=capacity,
        kernel=native_low_rank(),
    )
    runner.adapters = pool
    pool.guards.append(engine.users_of)
    return {name: pool.load(adapter) for name, adapter in adapters.items()}


class Names:
    """The names of these tests."""

    def __init__(self, ids: dict[str, int]) -> None:
        self.ids = ids

    def name_of(self, adapter: int) -> str | None:
        return next((name for name, found in self.ids.items() if found == adapter), None)

    def id_of(self, name: str) -> int:
        if name not in self.ids:
            raise NotFound(f"adapter {name!r} is not loaded")
        return self.ids[name]


@dataclass
class World:
    """An LLM with three adapters, and the oracle of what they give."""

    llm: LLM
    oracle: Oracle
    ids: dict[str, int]
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = engine_of(self.llm)

    @classmethod
    def of(cls, llm: LLM, oracle: Oracle, capacity: int = 64) -> World:
        return cls(llm, oracle, load(llm, oracle.adapters, capacity))

    def id_of(self, name: str | None) -> int | None:
        return None if name is None else self.ids[name]

    def session(self, tokens: Sequence[int] = (), adapter: str | None = None, **options: Any) -> Session:
        session = self.llm.session(list(tokens), **options)
        session._live.adapters = Names(self.ids)
        session.use_adapter(adapter)
        return session

    def submit(self, tokens: Sequence[int], adapter: str | None, params: SamplingParams, **options: Any) -> Any:
        given = {"key": cache_key(None), **options}
        return self.engine.submit(np.array(tokens), params, adapter=self.id_of(adapter), **given)

    def generate(self, tokens: Sequence[int], adapter: str | None, count: int, **options: Any) -> Request:
        (request,) = self.submit(tokens, adapter, greedy(count), **options)
        self.engine.run([request])
        assert request.output.error is None
        assert self.continues(tokens, [adapter] * len(tokens), request.output.token_ids, adapter)
        return request  # type: ignore[no-any-return]

    def continues(
        self, tokens: Sequence[int], under: Sequence[str | None], found: Sequence[int], adapter: str | None
    ) -> bool:
        """Whether ``found`` are the greedy tokens under ``adapter`` of what begins like this."""
        if not found:
            return True
        all_under = [*under, *[adapter] * (len(found) - 1)]
        logits_TV, bound = self.oracle.logits([*tokens, *found[:-1]], all_under)
        rows_NV = logits_TV[len(tokens) - 1 :]
        chosen = rows_NV[range(len(found)), list(found)]
        return bool((chosen >= rows_NV.amax(-1) - 2 * bound).all())


@pytest.fixture(scope="module")
def merged(checkpoints: dict[str, Checkpoint]) -> Merged:
    return Merged(checkpoints["llama"])


@pytest.fixture
def world(make_llm: MakeLLM, llama: Checkpoint, merged: Merged) -> World:
    return World.of(make_llm(llama), merged)


PROMPT = random_tokens(40)


# -- keys ------------------------------------------------------------------------------------------


def test_keys() -> None:
    names = {1: "a", 2: "b", 3: "a"}
    salt = ("salt", 7)
    assert prefix_key(salt, BASE, names.__getitem__) == salt
    assert prefix_key(salt, BASE.then(0, None), names.__getitem__) == salt
    one = prefix_key(salt, BASE.then(0, 1), names.__getitem__)
    assert one == AdapterKey(salt, ((0, "a"),)) != salt
    assert one == prefix_key(salt, BASE.then(0, 3), names.__getitem__), "the same adapter, loaded again"
    assert one != prefix_key(None, BASE.then(0, 1), names.__getitem__)
    switched = BASE.then(4, 1)
    assert prefix_key(salt, switched, names.__getitem__) not in (salt, one)
    assert fingerprint_runs(AdapterRuns(((0, 1), (3, 3), (5, 2), (9, None))), names.__getitem__) == (
        (0, "a"),
        (5, "b"),
        (9, None),
    )


@pytest.mark.parametrize(
    ("runs", "length", "adapter", "expected"),
    [
        (BASE, 0, 1, ((0, 1),)),
        (BASE, 1, 1, ((0, 1),)),
        (BASE, 5, 1, ((0, None), (4, 1))),
        (BASE.then(4, 1), 5, 1, ((0, None), (4, 1))),
        (BASE.then(4, 1), 9, 1, ((0, None), (4, 1))),
        (BASE.then(4, 1), 3, 1, ((0, None), (2, 1))),
        (BASE.then(4, 1), 5, None, ((0, None),)),
        (BASE.then(4, 1), 6, 2, ((0, None), (4, 1), (5, 2))),
        (BASE.then(4, 1), 0, 1, ((0, 1),)),
    ],
)
def test_history_of_a_session(
    runs: AdapterRuns, length: int, adapter: int | None, expected: tuple[tuple[int, int | None], ...]
) -> None:
    assert runs_of_session(runs, length, adapter).runs == expected


def test_users_in_words() -> None:
    assert users(0, 0) == ""
    assert users(1, 0) == "1 request uses it"
    assert users(0, 2) == "2 sessions use it"
    assert users(2, 1) == "2 requests and 1 session use it"


# -- requests --------------------------------------------------------------------------------------


def test_a_mixed_batch_is_what_each_gives_alone(world: World) -> None:
    prompts = [random_tokens(8 + 5 * number, seed=number) for number in range(6)]
    wanted = [None, "one", "two", "one", None, "three"]
    requests = [world.submit(prompt, name, greedy(8))[0] for prompt, name in zip(prompts, wanted, strict=True)]
    recorder = record(world.llm)
    world.engine.run(requests)
    assert {chunk.adapter for chunk in recorder.forwards[0].chunks} == {None, *world.ids.values()}, "one batch"
    for prompt, name, request in zip(prompts, wanted, requests, strict=True):
        assert len(request.output.token_ids) == 8
        assert world.continues(prompt, [name] * len(prompt), request.output.token_ids, name)
    found = {tuple(world.generate(PROMPT, name, 6).output.token_ids) for name in (None, *NAMES)}
    assert len(found) == 4, "they do decide something"


def test_samples_and_logprobs_of_the_prompt(world: World, make_llm: MakeLLM, llama: Checkpoint, merged: Merged) -> None:
    params = SamplingParams(n=3, seed=3, temperature=1.2, max_tokens=6, ignore_eos=True)
    samples = world.submit(PROMPT, "two", params)
    others = [world.submit(random_tokens(20, seed=seed), name, greedy(9))[0] for seed, name in enumerate((None, "one"))]
    world.engine.run([*samples, *others])
    alone = World.of(make_llm(llama), merged)
    peers = alone.submit(PROMPT, "two", params)
    alone.engine.run(peers)
    assert [one.output.token_ids for one in samples] == [one.output.token_ids for one in peers]
    assert len({tuple(one.output.token_ids) for one in samples}) > 1
    (request,) = world.submit(PROMPT, "two", greedy(2, prompt_logprobs=0))
    world.engine.run([request])
    logits_TV, bound = world.oracle.logits(PROMPT, ["two"] * len(PROMPT))
    rows = logits_TV.log_softmax(-1)[:-1]
    found = [entry.chosen.logprob for entry in request.output.prompt_logprobs.entries]
    wanted = rows[range(len(PROMPT) - 1), PROMPT[1:]]
    assert float((torch.tensor(found, dtype=torch.float64) - wanted).abs().max()) <= 2 * bound


def test_cached_prefixes_belong_to_fingerprints(world: World) -> None:
    cached = lambda name, **options: world.generate(PROMPT, name, 3, **options).seat.reuse.cached  # noqa: E731
    for name in (None, *NAMES):
        assert cached(name) == 0
        assert cached(name) == len(PROMPT) - 1
    assert cached("one", key="salt") == 0
    # Loaded again, it is the same; another one under its name is not.
    pool, gone = world.engine.runner.adapters, world.oracle.adapters["one"]
    pool.unload(world.ids["one"])
    world.ids["one"] = pool.load(world.oracle.adapters["two"])
    assert world.submit(PROMPT, "one", greedy(3))[0].branch.key == prefix_key(
        cache_key(None), BASE.then(0, world.ids["two"]), world.engine.branches.fingerprint_of
    )
    world.engine.fail_all(QuireError("enough"))
    world.ids["one"] = pool.load(gone)
    assert cached("one") == len(PROMPT) - 1
    pool.unload(world.ids["one"])
    before = world.engine.cache.num_cached  # type: ignore[union-attr]
    world.engine.forget_adapter(gone.fingerprint)
    check(world.llm)
    assert world.engine.cache.num_cached == before - 2, "under two salts"  # type: ignore[union-attr]
    world.ids["one"] = pool.load(gone)
    assert cached("one") == 0
    assert cached("two") == cached(None) == len(PROMPT) - 1


def test_refused_requests_leave_nothing(world: World) -> None:
    session = world.session(PROMPT, "one")
    refused: list[tuple[type[QuireError], Callable[[], object]]] = [
        (NotFound, lambda: world.engine.submit(np.array(PROMPT), greedy(2), adapter=99)),
        (InvalidArgument, lambda: world.submit(PROMPT, "one", greedy(2), session=session._branch)),
        (NotFound, lambda: BeamSearch(world.engine, np.array(PROMPT), BeamSearchParams(beam_width=2), adapter=99)),
        (NotFound, lambda: session.use_adapter("none of these")),
        (InvalidArgument, lambda: session.use_adapter(7)),  # type: ignore[arg-type]
    ]
    for kind, call in refused:
        with pytest.raises(kind):
            call()
        assert not world.engine.has_work
        assert (session.adapter, session._branch.runs) == ("one", BASE.then(len(PROMPT) - 1, world.ids["one"]))


def test_who_uses_an_adapter(world: World) -> None:
    pool, one = world.engine.runner.adapters, world.ids["one"]
    assert world.engine.users_of(one) == ""
    request = world.submit(PROMPT, "one", greedy(3))[0]
    several = world.submit(PROMPT, "one", SamplingParams(n=2, max_tokens=2))
    assert world.engine.users_of(one) == "2 requests use it"
    session = world.session(PROMPT, "one")
    with pytest.raises(FailedPrecondition, match="2 requests and 1 session use it"):
        pool.unload(one)
    world.engine.run([request, *several])
    stream = session.stream(greedy(3))
    next(stream)
    assert world.engine.users_of(one) == "1 session uses it"
    with pytest.raises(FailedPrecondition, match="generating"):
        session.use_adapter(None)
    stream.close()
    session.use_adapter(None)
    assert world.engine.users_of(one) == "1 session uses it", "its tokens may have to be run again"
    child = session.fork()
    session.close()
    assert world.engine.users_of(one) == "1 session uses it"
    child.rewind(to=len(PROMPT) - 1)
    assert world.engine.users_of(one) == ""
    abandoned = world.session(PROMPT, "one")
    del abandoned
    pool.unload(one)
    assert world.engine.users_of(world.ids["two"]) == ""
    child.close()


def test_more_adapters_than_fit_take_turns(make_llm: MakeLLM, llama: Checkpoint, merged: Merged) -> None:
    world = World.of(make_llm(llama), merged, capacity=RANK)
    prompts = [random_tokens(10 + number, seed=number) for number in range(12)]
    wanted = [(None, *NAMES)[number % 4] for number in range(12)]
    requests = [world.submit(prompt, name, greedy(5))[0] for prompt, name in zip(prompts, wanted, strict=True)]
    recorder = record(world.llm)
    world.engine.run(requests)
    for step in recorder.forwards:
        assert len({chunk.adapter for chunk in step.chunks} - {None}) <= 1
    for prompt, name, request in zip(prompts, wanted, requests, strict=True):
        assert world.continues(prompt, [name] * len(prompt), request.output.token_ids, name)
    ended = [request.output.finished_at for request, name in zip(requests, wanted, strict=True) if name is not None]
    assert ended == sorted(ended), "in order of arrival"


def test_nobody_waits_for_adapters_of_those_who_came_later(
    make_llm: MakeLLM, llama: Checkpoint, merged: Merged
) -> None:
    """A session that has to run its beginning under the base model again, and a younger request
    under another adapter.
    """
    world = World.of(make_llm(llama), merged, capacity=RANK)
    session = world.session(random_tokens(40), None)
    session.use_adapter("one")
    session.append(random_tokens(20, seed=3))
    world.engine.branches.drop(session._branch)
    world.engine.reset_prefix_cache()
    older = world.engine.submit(np.array(session.tokens), greedy(2), session=session._branch)[0]
    younger = world.submit(random_tokens(5, seed=9), "two", greedy(100))[0]
    while not older.finished:
        world.engine.step()
    assert not younger.finished
    world.engine.run([younger])
    assert younger.output.error is None


@pytest.mark.parametrize("host", [False, True])
def test_preempted_requests_come_back_under_theirs(
    make_llm: MakeLLM, llama: Checkpoint, merged: Merged, host: bool
) -> None:
    world = World.of(make_llm(llama, pool=96, page_size=4), merged)
    if host:
        force(world.llm)
    prompts = [random_tokens(20, seed=number) for number in range(5)]
    wanted = ["one", None, "two", "one", "three"]
    requests = [world.submit(prompt, name, greedy(20))[0] for prompt, name in zip(prompts, wanted, strict=True)]
    world.engine.run(requests)
    assert world.engine.scheduler.num_preemptions
    for prompt, name, request in zip(prompts, wanted, requests, strict=True):
        assert len(request.output.token_ids) == 20
        assert world.continues(prompt, [name] * len(prompt), request.output.token_ids, name)


def test_beams(world: World, make_llm: MakeLLM, llama: Checkpoint, merged: Merged, tmp_path: Path) -> None:
    """Against an LLM of the weights with the adapter in them."""
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    prompts = {"one": PROMPT, "two": random_tokens(17, seed=2)}
    searches = [
        BeamSearch(world.engine, np.array(prompt), params, key=cache_key(None), adapter=world.ids[name])
        for name, prompt in prompts.items()
    ]
    search(world.engine, searches)
    for (name, prompt), found in zip(prompts.items(), searches, strict=True):
        path = tmp_path / name
        copy.deepcopy(merged.exact[name]).float().save_pretrained(path)
        (wanted,) = make_llm(path).beam_search([prompt], params)
        assert [one.token_ids for one in found.output().sequences] == [one.token_ids for one in wanted.sequences]
        # What the search leaves to the cache is this adapter's alone.
        assert world.generate(prompt, name, 2).seat.reuse.cached == len(prompt) - 1
        assert world.generate(prompt, "three", 2).seat.reuse.cached == 0


# -- sessions --------------------------------------------------------------------------------------


@dataclass
class Told:
    """A session, and beside it its tokens and what each was run under, by the rule alone: new
    tokens run under the present adapter, and the last one always does.
    """

    world: World
    session: Session
    tokens: list[int] = field(default_factory=list)
    under: list[str | None] = field(default_factory=list)
    adapter: str | None = None

    def settle(self) -> None:
        if self.under:
            self.under[-1] = self.adapter
        assert self.session.tokens == self.tokens
        assert self.session.adapter == self.adapter
        runs = self.session._branch.runs
        assert [self.world.id_of(name) for name in self.under] == [runs.at(at) for at in range(len(self.tokens))]
        assert runs == runs_of_session(runs, len(self.tokens), self.world.id_of(self.adapter))

    def add(self, new: Sequence[int]) -> None:
        self.tokens += new
        self.under += [self.adapter] * len(new)
        self.settle()

    def append(self, new: Sequence[int]) -> None:
        self.session.append(new)
        self.add(new)

    def generate(self, count: int) -> None:
        found = self.session.generate(greedy(count)).outputs[0].token_ids
        assert len(found) == count
        assert self.world.continues(self.tokens, self.under, found, self.adapter)
        self.add(found)

    def switch(self, adapter: str | None) -> None:
        self.session.use_adapter(adapter)
        self.adapter = adapter
        self.settle()

    def rewind(self, to: int) -> None:
        cost = self.session.rewind_cost(to)
        assert self.session.rewind(to=to) == cost
        del self.tokens[to:], self.under[to:]
        self.settle()

    def edit(self, start: int, stop: int, new: Sequence[int]) -> None:
        # Without the end, the token before it is the last one, which an edit with new tokens runs.
        cost = self.session.edit_cost((start, stop)) + (stop == len(self.tokens) and bool(new))
        report = self.session.edit((start, stop), new)
        assert (report.removed, report.added, report.exact) == (stop - start, len(new), True)
        assert report.replayed <= max(cost, len(self.tokens) - stop) or self.world.engine.cache is not None
        self.tokens[start:stop] = new
        self.under[start:stop] = [self.adapter] * len(new)
        self.settle()

    def fork(self, at: int | None = None) -> Told:
        length = len(self.tokens) if at is None else at
        child = Told(self.world, self.session.fork(at), self.tokens[:length], self.under[:length], self.adapter)
        child.settle()
        self.settle()
        return child

    def loaded(self) -> Told:
        session = self.world.llm.session_from_bytes(self.session.to_bytes())
        session._live.adapters = Names(self.world.ids)
        found = Told(self.world, session, list(self.tokens), list(self.under), self.adapter)
        found.settle()
        return found

    def check_logits(self) -> None:
        logits_TV, bound = self.world.oracle.logits(self.tokens, self.under)
        assert float((self.session.logits().double() - logits_TV[-1]).abs().max()) <= bound

    def check_score(self, new: Sequence[int]) -> None:
        logits_TV, bound = self.world.oracle.logits([*self.tokens, *new], [*self.under, *[self.adapter] * len(new)])
        wanted = logits_TV[len(self.tokens) - 1 : -1].log_softmax(-1)[range(len(new)), list(new)]
        found = torch.tensor(self.session.score(new), dtype=torch.float64)
        assert float((found - wanted).abs().max()) <= 2 * bound
        self.settle()


def told(world: World, tokens: Sequence[int], adapter: str | None = None, **options: Any) -> Told:
    tokens = list(tokens)
    found = Told(world, world.session(tokens, adapter, **options), tokens, [None] * len(tokens), adapter)
    found.settle()
    return found


def test_a_session_switches(world: World) -> None:
    one = told(world, PROMPT)
    one.generate(3)
    recorder = record(world.llm)
    for adapter in ("one", None, "two", "two"):
        one.switch(adapter)
        assert recorder.num_tokens == 0, "a switch runs nothing"
        one.check_logits()
        assert recorder.num_tokens <= 1, "and its last token alone is run again"
        one.generate(4)
        one.append(random_tokens(5))
        one.check_score(random_tokens(4, seed=3))
        recorder.steps.clear()
    child, whole = one.fork(len(PROMPT) + 5), one.fork()
    whole.check_logits()
    child.switch("three")
    child.generate(4)
    one.rewind(len(PROMPT) + 8)
    one.generate(4)
    squeeze(world.llm)
    for found in (one, child, whole):
        found.check_logits()
        found.generate(3)
    check(world.llm)


def test_logits_are_not_those_of_another_adapter(world: World) -> None:
    one = told(world, PROMPT)
    seen = one.session.logits()
    one.switch("one")
    assert not torch.equal(one.session.logits(), seen)
    one.check_logits()
    child = one.fork()
    child.check_logits()
    one.switch(None)
    assert one.session.logits().argmax() == seen.argmax()
    one.check_logits()


def test_a_switch_while_logits_are_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, after the forward: they are those that were asked for, and not kept."""
    one, run = told(world, PROMPT, "one"), world.engine.run

    def switching(requests: Sequence[Request]) -> None:
        run(requests)
        one.switch("two")

    before = told(world, PROMPT, "one").session.logits()
    with monkeypatch.context() as patch:
        patch.setattr(world.engine, "run", switching)
        found = one.session.logits()
    assert found.argmax() == before.argmax()
    one.check_logits()


def test_an_empty_session_and_one_token(world: World) -> None:
    one = told(world, [], "one")
    one.append([3])
    one.check_logits()
    one.switch("two")
    assert one.under == ["two"]
    one.generate(3)
    one.rewind(0)
    one.append(random_tokens(9))
    one.check_logits()


def test_a_rewind_into_another_run(world: World) -> None:
    one = told(world, PROMPT)
    one.generate(2)
    one.switch("one")
    one.append(random_tokens(20))
    assert one.session.rewind_cost(30) == 1, "the last token there was run under the base model"
    assert one.session.rewind_cost(50) == 0
    one.rewind(30)
    one.check_logits()
    one.generate(3)
    check(world.llm)


def test_a_fork_within_another_run(world: World) -> None:
    """The last token of a fork runs under the session's adapter, though the parent's state of it is
    of the base model.
    """
    one = told(world, PROMPT)
    one.generate(2)
    one.switch("one")
    one.append(random_tokens(20))
    one.check_logits()
    child = one.fork(30)
    child.append(random_tokens(5, seed=4))
    child.check_logits()
    check(world.llm)


def test_sessions_and_the_prefix_cache(world: World) -> None:
    """What a session computed is found under its history only, also after it changed."""
    one = told(world, PROMPT)
    one.generate(4)
    assert world.generate(PROMPT, None, 2).seat.reuse.cached == len(PROMPT) - 1
    assert world.generate(PROMPT, "one", 2).seat.reuse.cached == 0
    before = list(one.tokens)
    one.switch("two")
    one.append(random_tokens(12))
    one.session.compute()
    check(world.llm)
    longer = world.generate(one.tokens, None, 2).seat.reuse
    assert len(PROMPT) - 1 <= longer.cached <= len(before)
    assert world.generate(one.tokens, "two", 2).seat.reuse.cached == 0
    twin = told(world, before)
    twin.switch("two")
    twin.append(one.tokens[len(before) :])
    recorder = record(world.llm)
    squeeze_sessions(world, twin.session)
    twin.check_logits()
    assert recorder.num_tokens < len(twin.tokens) - len(before), "the first one's state has the same history"


def squeeze_sessions(world: World, session: Session) -> None:
    """Drop the state of one session."""
    with world.engine.lock:
        world.engine.branches.drop(session._branch)


def test_a_chat_that_parts_from_the_session(world: World) -> None:
    """Tokens that take the place of others run under the present adapter; those before stay."""
    for length in (25, 41, 60):
        one = told(world, PROMPT)
        one.generate(2)
        one.switch("one")
        one.append(random_tokens(10))
        tokens = [*one.tokens[:length], *random_tokens(max(0, 55 - length), seed=9)][: max(55, length)]
        if length == 25:
            tokens = one.tokens[:25]
        shared = next(
            (at for at, (a, b) in enumerate(zip(tokens, one.tokens, strict=False)) if a != b), len(one.tokens)
        )
        shared = min(shared, len(tokens))
        under = [*one.under[:shared], *["one"] * (len(tokens) - shared)]
        under[-1] = "one"
        (request,) = world.engine.submit(np.array(tokens), greedy(4), session=one.session._branch)
        world.engine.run([request])
        assert world.continues(tokens, under, request.output.token_ids, "one")
        one.tokens, one.under = [*tokens, *request.output.token_ids], [*under, *["one"] * 4]
        one.settle()
        one.generate(2)
        one.session.close()
        check(world.llm)


@pytest.mark.parametrize("host", [False, True])
def test_failed_and_cancelled_requests_leave_the_history(
    make_llm: MakeLLM, llama: Checkpoint, merged: Merged, host: bool
) -> None:
    world = World.of(make_llm(llama), merged)
    if host:
        force(world.llm)
    one = told(world, PROMPT)
    one.generate(2)
    one.switch("one")
    one.append(random_tokens(10))
    # A run over other tokens, from the middle of the base model's on, which is preempted and
    # cancelled.
    tokens = np.array([*one.tokens[:30], *random_tokens(12, seed=4)], dtype=np.int32)
    world.engine.scheduler.queues.limits = type(world.engine.scheduler.limits)(max_num_seqs=4, max_num_batched_tokens=4)
    for preempted in (False, True):
        request = world.engine.submit_run(one.session._branch, tokens)
        world.engine.step()
        assert request.branch.computed > 30
        if preempted:
            world.engine.scheduler.preempt(request)
        world.engine.end([request])
        one.settle()
        check_store(world.llm) if host else check(world.llm)
        one.check_logits()
    with pytest.raises(QuireError, match="broken"):
        one.session._live.wait(world.engine.submit_run(one.session._branch, tokens, on_logits=breaks, fresh_from=0))
    one.settle()
    one.check_logits()
    one.generate(3)
    one.session.close()


def test_a_failed_run_of_the_beginning(world: World) -> None:
    """Its last token ran under the present adapter, and is the base model's in the session."""
    one = told(world, PROMPT, pin=True)
    one.generate(2)
    one.switch("one")
    one.append(random_tokens(10))
    ids = np.array(one.tokens[:30], dtype=np.int32)
    with pytest.raises(QuireError, match="broken"):
        one.session._live.wait(world.engine.submit_run(one.session._branch, ids, on_logits=breaks))
    assert one.session.num_computed == 29
    one.settle()
    one.check_logits()


def breaks(position: int, rows_RV: Tensor) -> None:
    raise QuireError("broken")


def test_forks_share_stored_state_as_far_as_they_agree(make_llm: MakeLLM, llama: Checkpoint, merged: Merged) -> None:
    world = World.of(make_llm(llama, enable_prefix_caching=False), merged)
    force(world.llm)
    one = told(world, PROMPT)
    one.generate(2)
    one.switch("one")
    one.append(random_tokens(15))
    one.check_logits()
    squeeze(world.llm)
    # At 30 tokens the last one was the base model's, and is the adapter's now.
    middle, whole = one.fork(30), one.fork()
    whole.switch("two")
    check_store(world.llm)
    recorder = record(world.llm)
    for found in (middle, whole, one):
        found.check_logits()
        found.generate(3)
    # Of two of them the last run of tokens is another one.
    assert recorder.num_tokens <= 3 * 4 + 2 * CHUNK
    for found in (middle, whole, one):
        found.session.close()


def test_written_state_and_another_adapter(world: World) -> None:
    """``set_kv``, then a switch: the last token alone is run anew."""
    one = told(world, PROMPT)
    rows = one.session.kv(1)
    one.session.set_kv(1, k=rows["k"] * 0.5, v=rows["v"])
    twin = told(world, PROMPT)
    base = one.session.logits()
    recorder = record(world.llm)
    one.switch("one")
    changed = one.session.logits()
    assert recorder.num_tokens == 1
    assert not torch.equal(changed, base)
    # Rows before the last token are as they were written, its own are the adapter's.
    twin.switch("one")
    wanted, found = twin.session.kv(1), one.session.kv(1)
    assert torch.equal(found["k"][:-1], rows["k"][:-1] * 0.5)
    assert not torch.equal(wanted["k"][:-1], found["k"][:-1])
    one.switch(None)
    assert float((one.session.logits() - base).abs().max()) <= 1e-4 * float(base.abs().max())
    child = one.fork()
    assert len(child.session.generate(greedy(3)).outputs[0].token_ids) == 3
    assert child.session.modified


def test_pinned_and_windowed_sessions_switch(world: World) -> None:
    pinned = told(world, PROMPT, "one", pin=True)
    pinned.generate(3)
    pinned.switch("two")
    squeeze(world.llm)
    pinned.check_logits()
    windowed = world.session(PROMPT, "one", window=24, sink=4)
    fresh = world.session(PROMPT[:10], None, window=24, sink=4)
    fresh.append(PROMPT[10:])
    fresh.use_adapter("one")
    assert windowed.generate(greedy(6)).outputs[0].token_ids == fresh.generate(greedy(6)).outputs[0].token_ids


def test_a_rewind_looks_for_states_of_its_own_history(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    """Where recurrent layers kept no state, the prefix cache may have one: of the same adapter, not
    of the same tokens.
    """
    world = World.of(make_llm(hybrid, kv_cache_memory="4MiB"), Stepwise(hybrid, make_llm))
    world.generate(PROMPT[:20], None, 2)
    one = Told(world, world.session([], "one"), adapter="one")
    one.append(PROMPT)
    one.generate(8)
    one.rewind(22)
    one.check_logits()
    world.generate(PROMPT[:20], "one", 2)
    one.append(random_tokens(20, seed=1))
    one.generate(8)
    assert one.session.rewind_cost(22) <= 2, "the other one's state"
    one.rewind(22)
    one.check_logits()


# -- saved files -----------------------------------------------------------------------------------


def saved_adapters(session: Session) -> object:
    with read_state(session.to_bytes()) as file:
        return file.metadata["adapters"]


def test_saved_histories(world: World) -> None:
    one = told(world, PROMPT)
    assert saved_adapters(one.session) == []
    one.generate(2)
    one.switch("one")
    one.append(random_tokens(9))
    one.switch(None)
    expected = [[0, None], [len(PROMPT) + 1, "of one"], [len(PROMPT) + 10, None]]
    assert saved_adapters(one.session) == expected
    again = one.loaded()
    again.check_logits()
    again.switch("two")
    again.generate(3)
    once_more = again.loaded()
    squeeze_sessions(world, once_more.session)
    once_more.check_logits()
    empty = told(world, [], "one")
    assert saved_adapters(empty.session) == [[0, "of one"]]
    assert empty.loaded().adapter == "one"


def test_a_file_of_an_adapter_that_is_not_here(world: World, make_llm: MakeLLM, llama: Checkpoint) -> None:
    data = world.session(PROMPT, "one").to_bytes()
    with make_llm(llama) as other, pytest.raises(InvalidArgument, match=r"of one .*expected.*loaded are: none"):
        other.session_from_bytes(data)
    pool = world.engine.runner.adapters
    for name in ("one", "three"):
        pool.unload(world.ids[name])
    with pytest.raises(InvalidArgument, match=r"of one .*expected.*loaded are: of two;"):
        world.llm.session_from_bytes(data)
    pool.load(world.oracle.adapters["one"])
    world.llm.session_from_bytes(data).close()


@pytest.mark.parametrize(
    "adapters",
    [
        None,
        {},
        [[0]],
        [0, "of one"],
        [[0, 7]],
        [[0, ""]],
        [["0", "of one"]],
        [[True, "of one"]],
        [[1, "of one"]],
        [[0, None]],
        [[0, None], [0, "of one"]],
        [[0, None], [41, "of one"]],
        [[0, None], [-3, "of one"]],
        [[0, "of one"], [5, "of one"]],
        [[0, "of one"], [9, None], [5, "of two"]],
    ],
)
def test_malformed_histories(world: World, adapters: object) -> None:
    with read_state(world.session(PROMPT, "one").to_bytes()) as file:
        metadata = {**file.metadata, "adapters": adapters, "sequence": None}
    with pytest.raises(DataLoss, match="adapters"):
        world.llm.session_from_bytes(to_bytes(metadata, [], iter(())))
    check(world.llm)


# -- long use --------------------------------------------------------------------------------------


class Conversations:
    """Many sessions, each of which must be what the oracle makes of its history."""

    MOST = 60

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rng = world, random.Random(seed)
        self.sessions: list[Told] = []

    def adapter(self) -> str | None:
        return self.rng.choice([None, *NAMES])

    def tokens(self, most: int) -> list[int]:
        # Few different beginnings, so that conversations share prefixes.
        return random_tokens(60, seed=self.rng.randint(0, 2))[: self.rng.randint(1, most)]

    def pick(self) -> Told:
        if not self.sessions or (len(self.sessions) < 6 and self.rng.random() < 0.2):
            self.sessions.append(told(self.world, self.tokens(35), self.adapter()))
            made = self.sessions[-1]
            # A new session's last token is its adapter's.
            made.settle()
        found = self.rng.choice(self.sessions)
        if len(found.tokens) > self.MOST - 12:
            found.rewind(self.rng.randint(1, 40))
        return found

    def append(self) -> None:
        self.pick().append(self.tokens(10))

    def generate(self) -> None:
        self.pick().generate(self.rng.randint(1, 5))

    def switch(self) -> None:
        self.pick().switch(self.adapter())

    def rewind(self) -> None:
        found = self.pick()
        found.rewind(self.rng.randint(1, len(found.tokens)))

    def fork(self) -> None:
        found = self.pick()
        if len(self.sessions) < 8:
            self.sessions.append(found.fork(self.rng.choice([None, self.rng.randint(1, len(found.tokens))])))

    def edit(self) -> None:
        found = self.pick()
        start = self.rng.randint(0, len(found.tokens) - 1)
        stop = self.rng.randint(start, min(len(found.tokens), start + 10))
        found.edit(
            start, stop, self.tokens(10) if stop == len(found.tokens) - start else self.tokens(10)[: stop - start + 1]
        )

    def stream_and_leave(self) -> None:
        found = self.pick()
        stream, new = found.session.stream(greedy(5)), []
        for _, delta in zip(range(self.rng.randint(1, 3)), stream, strict=False):
            new += delta.token_ids
        stream.close()
        assert self.world.continues(found.tokens, found.under, new, found.adapter)
        found.add(new)

    def logits(self) -> None:
        self.pick().check_logits()

    def score(self) -> None:
        self.pick().check_score(self.tokens(6))

    def save_and_load(self) -> None:
        found = self.pick()
        again = found.loaded()
        if len(self.sessions) < 8:
            self.sessions.append(again)
        else:
            again.check_logits()
            again.session.close()

    def drop(self) -> None:
        squeeze_sessions(self.world, self.pick().session)

    def squeeze(self) -> None:
        squeeze(self.world.llm)

    def serve(self) -> None:
        prompts = [(self.tokens(45), self.adapter()) for _ in range(3)]
        requests = [self.world.submit(prompt, name, greedy(5))[0] for prompt, name in prompts]
        self.world.engine.run(requests)
        for (prompt, name), request in zip(prompts, requests, strict=True):
            assert request.output.error is None
            assert self.world.continues(prompt, [name] * len(prompt), request.output.token_ids, name)

    def close(self) -> None:
        if len(self.sessions) > 3:
            self.sessions.pop(self.rng.randrange(len(self.sessions))).session.close()

    def step(self) -> None:
        verbs = [
            self.append,
            self.generate,
            self.generate,
            self.switch,
            self.switch,
            self.switch,
            self.rewind,
            self.edit,
        ]
        verbs += [self.fork, self.stream_and_leave, self.logits, self.score, self.save_and_load, self.drop]
        verbs += [self.squeeze, self.serve, self.close]
        self.rng.choice(verbs)()
        check_store(self.world.llm)
        for found in self.sessions:
            found.settle()

    def finish(self) -> None:
        for found in self.sessions:
            found.check_logits()
            found.generate(3)
            found.session.close()


def converse(
    make_llm: MakeLLM, checkpoint: Checkpoint, oracle: Oracle, seed: int, steps: int, host: bool, **options: Any
) -> None:
    rng = random.Random(seed)
    llm = make_llm(
        checkpoint,
        page_size=rng.choice([1, 4]),
        max_num_batched_tokens=rng.choice([5, 64]),
        enable_prefix_caching=rng.random() < 0.75,
        **options,
    )
    world = World.of(llm, oracle, capacity=rng.choice([RANK, 2 * RANK, 64]))
    if host:
        force(llm, decide=lambda *_: rng.random() < 0.8)
    conversations = Conversations(world, seed)
    for _ in range(steps):
        conversations.step()
    conversations.finish()
    assert all(not world.engine.users_of(one) for one in world.ids.values())


@pytest.mark.turns(2)
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_conversations(make_llm: MakeLLM, llama: Checkpoint, merged: Merged, seed: int, host: bool) -> None:
    converse(make_llm, llama, merged, seed, 60, host, pool=160)


@pytest.mark.slow
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("seed", range(100, 106))
def test_long_conversations(make_llm: MakeLLM, llama: Checkpoint, merged: Merged, seed: int, host: bool) -> None:
    converse(make_llm, llama, merged, seed, 500, host, pool=(120, 160, 400)[seed % 3])


@pytest.mark.product(4)
@pytest.mark.parametrize("host", [False, True])
def test_conversations_with_recurrent_layers(make_llm: MakeLLM, hybrid: Checkpoint, host: bool) -> None:
    """Replays of what was not kept run under the adapters of the time."""
    converse(make_llm, hybrid, Stepwise(hybrid, make_llm), 7, 40, host, kv_cache_memory="2MiB")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 103))
def test_long_conversations_with_recurrent_layers(make_llm: MakeLLM, hybrid: Checkpoint, seed: int) -> None:
    options = {"kv_cache_memory": ("1MiB", "2MiB")[seed % 2], "checkpoint_interval": (0, 8)[seed % 2]}
    converse(make_llm, hybrid, Stepwise(hybrid, make_llm), seed, 300, bool(seed % 2), **options)
