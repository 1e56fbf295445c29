"""Drafts of heads that read hidden states: their logits are those of the definition, tokens those
of plain steps, and hidden states those of the right tokens.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.adapters.test_adapters import Merged, World, merged  # noqa: F401
from tests.small_llms import (
    FAMILIES,
    Checkpoint,
    MakeLLM,
    assert_empty,
    check,
    engine_of,
    greedy,
    make_checkpoint,
    make_family,
    random_tokens,
    token_ids,
)
from tests.speculation.test_speculation import Drafted, Everything, drafts_of, step_all
from torch import Tensor

from quire import LLM, SamplingParams, Speculation
from quire.base.errors import CheckpointError, InvalidArgument, QuireError, Unsupported
from quire.base.types import Add, Chunk, Inputs, Remove, SeqId, Step
from quire.build import make_state
from quire.kv.formats import kv_format
from quire.runner.local import LocalRunner
from quire.runner.pool_budget import PoolSizes
from quire.speculation import heads, likely_trees
from quire.speculation.controller import FIRST_DRAFTS, GROWTH, Pace
from quire.speculation.heads import Heads
from quire.speculation.proposer import Context

from .head_checkpoints import MTP, eagle_follower, make_eagle, make_mtp, mtp_follower
from .test_steps_ahead import REQUEST, array, run

PROMPT = random_tokens(20)
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "4MiB", "max_num_seqs": 4}
EAGLE = {"llama": (0, 0, 1), "gemma3": (1, 0, 1), "qwen3-next": (2, 0, 3)}
"""Targets of EAGLE-3 heads, and the blocks that these read."""
EVERY = (*(f"eagle-{kind}" for kind in EAGLE), *(f"mtp-{kind}" for kind in MTP))


@pytest.fixture(scope="module", autouse=True)
def drafts_at_any_price() -> Iterator[None]:
    """Nothing depends on time, and no chain ends early."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "drafts", lambda *_: True)
        patch.setattr(likely_trees, "LEAST_CHANCE", 0.0)
        yield


class Made:
    """A target, the option that names its head, and what defines the head's logits."""

    def __init__(self, target: Checkpoint, option: str, logits: Callable[[Sequence[int]], Tensor]) -> None:
        self.target, self.option, self.logits = target, option, logits


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    known: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in known:
            path, (method, _, kind) = tmp_path_factory.mktemp("heads"), name.partition("-")
            if method == "mtp":
                mtp = make_mtp(kind, path / "target")
                known[name] = Made(mtp.target, "mtp", mtp.logits)
            else:
                maker = make_checkpoint if kind in FAMILIES else make_family
                target = maker(kind, path / "target")
                head = make_eagle(path / "head", EAGLE[kind], width=target.model.config.hidden_size)
                known[name] = Made(target, f"eagle:{head.path}", lambda tokens: head.logits(target, tokens))
        return known[name]

    return make


def proposer_of(llm: LLM) -> Heads:
    found = drafts_of(llm)._proposer
    assert isinstance(found, Heads)
    return found


def drafting(make_llm: MakeLLM, one: Made, *, depth: int = 16, **options: Any) -> LLM:
    """An LLM with a head, all of whose drafts are verified."""
    method, _, model = one.option.partition(":")
    speculative = Speculation(method=method, model=model or None, depth=depth)  # type: ignore[arg-type]
    llm = make_llm(one.target, **{"kv_cache_memory": "4MiB", **options, "speculative": speculative})
    drafts_of(llm).controller = Everything()
    return llm


def check_head(llm: LLM, *, empty: bool = True) -> None:
    """The bookkeeping of the head's state."""
    proposer = proposer_of(llm)
    state = proposer.runner.state
    state.check()
    readers = {one.seq: one for one in proposer._readers.values()}
    assert set(state.sequence_ids()) <= set(readers)
    for seq, reader in readers.items():
        rows = state.sequence_length(seq) if state.has_sequence(seq) else 0
        assert rows >= reader.num_run
        assert reader.first <= reader.next
        assert reader.known <= len(reader.tokens)
    if empty:
        assert all(reader.has_ended for reader in readers.values())
        assert len(readers) <= heads.MOST_ENDED


def near(found: Tensor, wanted: Tensor, tolerance: float = 2e-4) -> None:
    assert found.shape == wanted.shape
    assert float((found.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


# -- the definition --------------------------------------------------------------------------------


def run_whole(runner: Any, tokens: Sequence[int], cut: int, **given: Any) -> list[Any]:
    """Run a sequence in chunks of ``cut`` tokens."""
    seq: SeqId = runner.new_seq()
    runner.execute(Step(edits=(Add(seq),)))
    outputs = []
    for start in range(0, len(tokens), cut):
        chunk = Chunk(seq, list(tokens[start : start + cut]), logits=given.get("logits", "none"))
        rows = given.get("rows")
        inputs = Inputs(
            embeddings=None if rows is None else rows[start : start + cut], features=given.get("features", ())
        )
        outputs.append(runner.execute(Step(chunks=(chunk,), inputs=inputs)))
    runner.execute(Step(edits=(Remove(seq),)))
    return outputs


@pytest.mark.product(2)
@pytest.mark.parametrize("cut", [40, 7, 1])
@pytest.mark.parametrize("name", EVERY)
def test_logits_are_those_of_the_definition(made: Any, make_llm: MakeLLM, name: str, cut: int) -> None:
    one, tokens = made(name), random_tokens(40)
    llm = drafting(make_llm, one)
    proposer = proposer_of(llm)
    outputs = run_whole(engine_of(llm).runner, tokens, cut, features=proposer.layers)
    parts = zip(*(output.features for output in outputs), strict=True)
    head = proposer.head
    with torch.inference_mode():
        rows = head.rows(torch.tensor(tokens[1:]), head.states([torch.cat(part) for part in parts])[:-1])
    found = run_whole(proposer.runner, [-1] * 39, cut, rows=rows, logits="all")
    near(torch.cat([output.logits_RV for output in found]), one.logits(tokens))


@pytest.mark.parametrize("name", EVERY)
def test_each_first_draft_is_that_of_the_definition(made: Any, make_llm: MakeLLM, name: str) -> None:
    """Whatever was drafted and rejected before, in parts of prompts and beside other requests."""
    one = made(name)
    llm = drafting(make_llm, one, depth=3, max_num_batched_tokens=32, max_num_seqs=4)
    proposer = proposer_of(llm)
    propose, seen = proposer.propose, list[tuple[list[int], int]]()

    def noting(contexts: Sequence[Context], most: Sequence[int]) -> Any:
        drafts = propose(contexts, most)
        for context, draft in zip(contexts, drafts, strict=True):
            if draft.tokens:
                seen.append((context.ids.tolist(), draft.tokens[0]))
                # Drafts leave no rows behind.
                seq = proposer._readers[context.name].seq
                assert proposer.runner.state.sequence_length(seq) == len(context.ids) - 1
        return drafts

    proposer.propose = noting  # type: ignore[method-assign]
    prompts = [random_tokens(length, seed=length) for length in (3, 30, 120)]
    outputs = llm.generate(prompts, greedy(12))
    assert token_ids(outputs) == [one.target.greedy(prompt, 12) for prompt in prompts]
    assert len(seen) >= 20
    assert_best(one, proposer, seen)
    check_head(llm)


def assert_best(one: Made, proposer: Heads, seen: Sequence[tuple[list[int], int]]) -> None:
    """First drafts behind tokens are the best ones by the definition, which is computed once for
    tokens that begin alike.
    """
    rows: dict[tuple[int, ...], Tensor] = {}
    for ids, draft in sorted(seen, key=lambda one: -len(one[0])):
        whole = next((known for known in rows if known[: len(ids)] == tuple(ids)), tuple(ids))
        if whole not in rows:
            rows[whole] = one.logits(whole)
        row = rows[whole][len(ids) - 2]
        token = proposer.head.target_ids(range(len(row))).index(draft)
        # As far as the logits may be in ``test_logits_are_those_of_the_definition``.
        assert float(row.max() - row[token]) <= 2e-4 * float(row.abs().max())


# -- hidden states of the right tokens -------------------------------------------------------------


@pytest.fixture(scope="module")
def followers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Checkpoint, str, list[int]]]:
    known: dict[str, tuple[Checkpoint, str, list[int]]] = {}

    def make(name: str) -> tuple[Checkpoint, str, list[int]]:
        if name not in known:
            path = tmp_path_factory.mktemp("followers")
            if name == "eagle":
                target, head, after = eagle_follower(path)
                known[name] = target, f"eagle:{head.path}", after
            else:
                mtp, after = mtp_follower(name.removeprefix("mtp-"), path / "target")
                known[name] = mtp.target, "mtp", after
        return known[name]

    return make


@pytest.mark.product(2)
@pytest.mark.parametrize("depth", [1, 3, 16])
@pytest.mark.parametrize("name", ["eagle", *(f"mtp-{kind}" for kind in MTP)])
def test_a_head_that_is_right_is_always_accepted(followers: Any, make_llm: MakeLLM, name: str, depth: int) -> None:
    target, option, after = followers(name)
    llm = drafting(make_llm, Made(target, option, target.logits), depth=depth, max_num_batched_tokens=48)
    prompts = [random_tokens(length, seed=length) for length in (2, 9, 100, 180)]
    outputs = llm.generate(prompts, greedy(60))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = [after[prompt[-1]]]
        while len(expected) < 60:
            expected.append(after[expected[-1]])
        assert output.outputs[0].token_ids == expected
        counts = output.speculation
        assert counts is not None
        assert counts.accepted == counts.drafted
        # The first token comes without drafts, and each step with them gives one more. Beside
        # others the drafts of a step grow with those that were accepted in the one before.
        steps, tokens, accepted = 1, 1, 0
        while tokens < 60:
            accepted = min(depth, FIRST_DRAFTS + GROWTH * accepted)
            steps, tokens = steps + 1, tokens + accepted + 1
        assert counts.steps <= steps
    check_head(llm)


@pytest.mark.parametrize("name", ["eagle", f"mtp-{next(iter(MTP))}"])
def test_the_hidden_states_of_a_path_are_those_of_its_tokens(followers: Any, make_llm: MakeLLM, name: str) -> None:
    """Behind a tree, too, a head that is right is accepted as deep as its trees are."""
    target, option, after = followers(name)
    llm = drafting(make_llm, Made(target, option, target.logits), depth=12)
    proposer_of(llm)._width = 3
    prompts = [random_tokens(length, seed=length) for length in (9, 40)]
    for prompt, output in zip(prompts, llm.generate(prompts, greedy(40)), strict=True):
        expected = [after[prompt[-1]]]
        while len(expected) < 40:
            expected.append(after[expected[-1]])
        assert output.outputs[0].token_ids == expected
        assert output.speculation is not None
        # Eleven drafts run, at most three of each level, so that there are five levels of tokens.
        # Each step drafts then, and gives six tokens.
        assert output.speculation.accepted >= 39 - (39 // (5 + 1) + 2)
    check_head(llm)


@pytest.mark.parametrize("name", ["eagle-llama", "eagle-gemma3", "mtp-deepseek-v3", "mtp-qwen3-next"])
def test_trees(made: Any, make_llm: MakeLLM, name: str) -> None:
    """Texts are those of plain steps, and the likeliest path of a tree is the chain of a head that
    makes no trees, as likely as there."""
    one = made(name if name in EVERY else EVERY[-1])
    llm = drafting(make_llm, one, depth=12)
    head, pairs = proposer_of(llm), list[Any]()
    propose = head.propose

    def both(contexts: Any, most: Any) -> Any:
        found = []
        for head._width in (1, 3):
            found.append(propose(contexts, most))
        pairs.extend(zip(*found, strict=True))
        return found[1]

    head.propose = both  # type: ignore[method-assign]
    prompts = [random_tokens(length, seed=length) for length in (3, 40)]
    assert token_ids(llm.generate(prompts, greedy(16))) == [one.target.greedy(prompt, 16) for prompt in prompts]
    assert any(tree.parents for _, tree in pairs)
    for chain, tree in pairs:
        path = tree.tree.path(chain.tokens, tree.tokens)
        assert len(path) >= min(2, len(chain))
        # Rows of a tree run beside others, whose products sum in another order.
        assert [tree.chances[node] for node in path] == pytest.approx(chain.chances[: len(path)], rel=1e-3)
    check_head(llm)


# -- the same tokens -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=EVERY)
def pair(request: pytest.FixtureRequest, made: Any) -> Iterator[tuple[LLM, LLM]]:
    """Two LLMs, of which the second one has a head."""
    one = made(request.param)
    both = LLM(one.target.path, **OPTIONS), LLM(one.target.path, speculative=one.option, **OPTIONS)
    drafts_of(both[1]).controller = Everything()
    yield both
    for llm in both:
        llm.close()
        assert_empty(llm)
    check_head(both[1])


@pytest.mark.turns(6)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(REQUEST, min_size=1, max_size=7))
def test_random_requests(pair: tuple[LLM, LLM], requests: list[dict[str, Any]]) -> None:
    """They come and go at any step, more than there are seats, and end by all reasons."""
    plain, drafting = pair
    assert run(drafting, requests) == run(plain, requests)
    check_head(drafting)


@pytest.mark.product(3)
@pytest.mark.parametrize("depth", [1, 2, 5, 16])
@pytest.mark.parametrize("name", ["eagle-llama", "mtp-qwen3-next", "mtp-deepseek-v3"])
def test_each_depth(made: Any, make_llm: MakeLLM, name: str, depth: int) -> None:
    one = made(name)
    llm = drafting(make_llm, one, depth=depth)
    (output,) = llm.generate([PROMPT], greedy(40))
    assert output.outputs[0].token_ids == one.target.greedy(PROMPT, 40)
    counts = output.speculation
    assert counts is not None
    assert counts.by_proposer == {one.option.partition(":")[0]: (counts.drafted, counts.accepted)}
    assert 0 < counts.drafted <= depth * counts.steps
    check_head(llm)


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", EVERY)
def test_preempted_requests(made: Any, make_llm: MakeLLM, name: str) -> None:
    one = made(name)
    prompts = [random_tokens(20, seed=seed) for seed in range(6)]
    room: dict[str, Any] = {"kv_cache_memory": 150 * 2 * 2 * 2 * 16 * 4 * 2, "page_size": 4}
    if name != "eagle-llama":
        room = {"kv_cache_memory": "300KiB", "page_size": 4}
    llm = drafting(make_llm, one, **room)
    outputs = llm.generate(prompts, greedy(40))
    assert token_ids(outputs) == [one.target.greedy(prompt, 40) for prompt in prompts]
    if name == "eagle-llama":
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    check(llm)
    check_head(llm)


@pytest.mark.parametrize("tokens", [16, 40, 100])
def test_the_heads_pool_is_too_small(followers: Any, make_llm: MakeLLM, tokens: int) -> None:
    """Requests without room have no drafts, or begin anew."""
    target, option, _ = followers("eagle")
    llm = drafting(make_llm, Made(target, option, target.logits), page_size=4)
    old = proposer_of(llm)
    device = old.runner.state.device
    state = make_state(
        old.head.layer_specs, PoolSizes(tokens, None, 64), 4, kv_format("auto", torch.float32), device, "auto"
    )
    drafts_of(llm).use(Heads(LocalRunner(old.head, state, device), old.head, "eagle", max_len=256, step_tokens=64))
    prompts = [random_tokens(20, seed=seed) for seed in range(6)]
    outputs = llm.generate(prompts, greedy(40))
    assert token_ids(outputs) == [target.greedy(prompt, 40) for prompt in prompts]
    counts = [output.speculation for output in outputs if output.speculation is not None]
    assert all(not one.dropped and one.accepted == one.drafted for one in counts)
    assert (sum(one.accepted for one in counts) > 0) == (tokens > 20)
    check_head(llm)


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", ["eagle-llama", "eagle-gemma3", "mtp-qwen3-next", "mtp-deepseek-v3"])
def test_conversations(made: Any, make_llm: MakeLLM, tmp_path: Path, name: str) -> None:
    """Forks, rewinds, edits, scores, files, streams that are left, in a pool that is too small."""
    one = made(name)
    llm = drafting(make_llm, one, kv_cache_memory="3MiB", page_size=4)
    conversations = Drafted(llm, one.target, 0, tmp_path)
    for _ in range(40):
        conversations.step()
        check(llm)
        check_head(llm)
    conversations.finish()
    assert llm.metrics()["quire:drafted_tokens_total"] > 0


@pytest.mark.parametrize("name", ["eagle", "mtp-qwen3-next"])
def test_what_was_not_read_leaves_the_rest_right(followers: Any, make_llm: MakeLLM, name: str) -> None:
    """Turns of a session, prompts whose beginning is cached, samples of one prompt, rewinds."""
    target, option, _ = followers(name)
    llm = drafting(make_llm, Made(target, option, target.logits))
    session = llm.session(PROMPT)
    for turn in range(3):
        output = session.generate(greedy(20))
        assert output.outputs[0].token_ids == target.greedy(session.tokens[:-20], 20)
        counts = output.speculation
        assert counts is not None
        assert 0 < counts.accepted == counts.drafted
        session.append(random_tokens(5, seed=turn))
        session.rewind(len(session.tokens) - 2)
    params = SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=30, ignore_eos=True)
    for _ in range(2):
        (output,) = llm.generate([PROMPT], params)
        assert output.speculation is not None
        assert output.speculation.accepted > 0
    check_head(llm)


def test_turns_and_samples_go_on_with_the_context(made: Any, make_llm: MakeLLM) -> None:
    """Of a turn before, or of the sample whose prompt it is; not under another salt, and not where
    hidden states are missing."""
    one = made("eagle-llama")
    llm = drafting(make_llm, one, depth=2)
    proposer = proposer_of(llm)

    def begins() -> set[int]:
        found = {reader.begin for reader in proposer._readers.values()}
        for name in [*proposer._readers]:
            proposer._forget(name)
        return found

    def first_drafts() -> list[tuple[list[int], int]]:
        seen = list[tuple[list[int], int]]()
        propose = type(proposer).propose

        def noting(contexts: Sequence[Context], most: Sequence[int]) -> Any:
            drafts = propose(proposer, contexts, most)
            seen.extend((c.ids.tolist(), d.tokens[0]) for c, d in zip(contexts, drafts, strict=True) if d.tokens)
            return drafts

        proposer.propose = noting  # type: ignore[method-assign]
        return seen

    seen = first_drafts()
    session = llm.session(PROMPT)
    for _ in range(3):
        session.generate(greedy(12))
        session.append(random_tokens(5))
    assert begins() == {0}
    llm.generate([random_tokens(30)], SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=9, ignore_eos=True))
    assert begins() == {0}
    assert len(seen) > 20
    assert_best(one, proposer, seen)
    llm.generate([random_tokens(40)], greedy(4))
    begins()
    llm.generate([random_tokens(40)], greedy(4))
    (begin,) = begins()
    assert begin >= 32, "the beginning was cached, and its hidden states are gone"


def test_samples_and_seeds(made: Any, make_llm: MakeLLM) -> None:
    one = made("mtp-deepseek-v3")
    params = SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=30, ignore_eos=True, repetition_penalty=1.2)
    (plain,) = make_llm(one.target, kv_cache_memory="4MiB").generate([PROMPT], params)
    (drafted,) = drafting(make_llm, one).generate([PROMPT], params)
    assert [sample.token_ids for sample in drafted.outputs] == [sample.token_ids for sample in plain.outputs]
    assert drafted.speculation is not None
    assert drafted.speculation.drafted > 0


def test_adapters_by_request(made: Any, make_llm: MakeLLM, merged: Merged) -> None:  # noqa: F811
    """They change the target, whose embedding and hidden states the head reads."""
    world = World.of(drafting(make_llm, made("eagle-llama"), depth=4), merged)
    names = [None, "one", "two", "one", "three"]
    prompts = [random_tokens(8 + 5 * number, seed=number) for number in range(len(names))]
    requests = [world.submit(prompt, name, greedy(12))[0] for prompt, name in zip(prompts, names, strict=True)]
    world.engine.run(requests)
    for prompt, name, request in zip(prompts, names, requests, strict=True):
        assert len(request.output.token_ids) == 12
        assert world.continues(prompt, [name] * len(prompt), request.output.token_ids, name)
        assert request.output.speculation is not None
        assert not request.output.speculation.dropped
        assert request.output.speculation.drafted > 0
    check_head(world.llm)


def test_windowed_sessions(made: Any, make_llm: MakeLLM) -> None:
    one, found = made("eagle-llama"), []
    for llm in (make_llm(one.target, page_size=4), drafting(make_llm, one, page_size=4)):
        found.append(llm.session(PROMPT, window=16, sink=4).generate(greedy(60)).outputs[0].token_ids)
    assert found[0] == found[1]
    check_head(llm)


# -- beginnings and ends ---------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_cancelled_between_drafts(made: Any, make_llm: MakeLLM, steps: int) -> None:
    """Also within the prompt, before there was a draft."""
    one = made("eagle-llama")
    llm = drafting(make_llm, one, depth=3, max_num_batched_tokens=16)
    engine, prompt = engine_of(llm), random_tokens(40)
    (victim,) = engine.submit(array(prompt), greedy(60), request_id="victim")
    for _ in range(steps):
        engine.step()
        check_head(llm, empty=False)
    assert len(proposer_of(llm)._readers) == 1
    engine.cancel("victim")
    assert victim in engine.step()
    check_head(llm)


def test_closed_between_drafts(made: Any) -> None:
    one = made("mtp-qwen3-next")
    llm = LLM(one.target.path, speculative="mtp", **OPTIONS)
    drafts_of(llm).controller = Everything()
    engine_of(llm).submit(array(PROMPT), greedy(100))
    for _ in range(3):
        engine_of(llm).step()
    assert proposer_of(llm)._readers
    llm.close()
    check_head(llm)


@pytest.mark.product(3)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("name", ["eagle-llama", "mtp-qwen3-next"])
def test_a_forward_of_the_head_fails(
    made: Any, make_llm: MakeLLM, name: str, at: int, error: type[BaseException]
) -> None:
    """An error ends the drafts of the request, an interrupt nothing, and no sequence is left."""
    one = made(name)
    llm = drafting(make_llm, one, depth=3, max_num_batched_tokens=16)
    runner, calls, prompt = proposer_of(llm).runner, 0, random_tokens(40)
    execute = runner.execute

    def breaking(step: Step) -> Any:
        nonlocal calls
        calls += 1
        if calls != at:
            return execute(step)
        if at % 2:
            execute(step)
        raise error("broken")

    runner.execute = breaking  # type: ignore[method-assign]
    engine = engine_of(llm)
    (request,) = engine.submit(array(prompt), greedy(30))
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            step_all(llm)
    step_all(llm)
    assert calls >= at
    assert request.output.token_ids == one.target.greedy(prompt, 30)
    assert request.output.speculation is not None
    assert ("broken" in request.output.speculation.dropped) == (error is RuntimeError)
    check(llm)
    check_head(llm)


def test_off_for_a_request(made: Any, make_llm: MakeLLM) -> None:
    """Nothing is read of requests without."""
    one = made("eagle-llama")
    llm = drafting(make_llm, one)
    on, off = llm.generate([PROMPT, PROMPT[:9]], [greedy(20), greedy(20, speculative=False)])
    assert off.speculation is None
    assert on.speculation is not None
    assert on.speculation.drafted > 0
    assert off.outputs[0].token_ids == one.target.greedy(PROMPT[:9], 20)


def test_hidden_states_that_wait_are_few(made: Any, make_llm: MakeLLM) -> None:
    """Rows of a long prompt run while it does."""
    one = made("eagle-llama")
    llm = drafting(make_llm, one, max_num_batched_tokens=100, max_num_seqs=4)
    engine = engine_of(llm)
    engine.submit(array(random_tokens(230)), greedy(5))
    for done in (100, 200):
        engine.step()
        (reader,) = proposer_of(llm)._readers.values()
        assert reader.next == done - 1
        assert len(reader.states_NE) == 2  # that of the last row, and the next one's
    step_all(llm)
    check_head(llm)


def test_memory_is_shared_out(made: Any, make_llm: MakeLLM) -> None:
    """Both pools together take what one would take."""
    one = made("eagle-llama")
    plain = engine_of(make_llm(one.target)).runner.state.num_bytes
    llm = make_llm(one.target, speculative=one.option)
    both = engine_of(llm).runner.state.num_bytes, proposer_of(llm).runner.state.num_bytes
    assert 0.9 * plain <= sum(both) <= plain
    assert both[0] > both[1] > 0
    assert any("drafts: LlamaForCausalLMEagle3" in note for note in llm._parts.notes)


# -- refusals --------------------------------------------------------------------------------------


def refused(target: Path, option: str, error: type[QuireError], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        LLM(target, speculative=option, **OPTIONS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"vocab_size": 98}, InvalidArgument, "vocab_size is 98; expected the model's vocabulary, 97"),
        ({"width": 48}, InvalidArgument, "hidden_size is 48; expected the model's width, 32"),
        ({"target_hidden_size": 64}, InvalidArgument, "target_hidden_size is 64; expected the model's width, 32"),
        ({"draft_vocab_size": 98}, CheckpointError, "draft_vocab_size is 98; expected at most vocab_size"),
        ({"draft_vocab_size": 41}, CheckpointError, "lm_head.weight has shape .40, 32.; config.json makes it .41, 32."),
        ({"architectures": ["LlamaForCausalLM"]}, CheckpointError, "expected .'LlamaForCausalLMEagle3'."),
        ({"num_hidden_layers": 2}, Unsupported, "num_hidden_layers is 2"),
        ({"layers": (0, 1, 2)}, CheckpointError, "expected 3 of the model's, 0 to 1"),
        ({"layers": (0, 1)}, CheckpointError, "expected 3 of the model's, 0 to 1"),
        ({"eagle_config": None}, CheckpointError, "expected 3 of the model's, 0 to 1"),
        ({"hidden_act": "tanh"}, Unsupported, "hidden_act is 'tanh'"),
        ({"num_key_value_heads": 3}, CheckpointError, "num_key_value_heads is 3"),
    ],
)
def test_an_eagle_head_of_another_model(
    made: Any, tmp_path: Path, changes: dict[str, Any], error: type[QuireError], words: str
) -> None:
    head = make_eagle(tmp_path / "head", **{"layers": (0, 0, 1), **changes})
    refused(made("eagle-llama").target.path, f"eagle:{head.path}", error, words)


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def with_change(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        tensors[name] = change(tensors.get(name, torch.empty(0))).contiguous()

    return apply


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("fc.weight"), "lacks 1 of 13 tensors: fc.weight"),
        (without("midlayer.hidden_norm.weight"), "lacks 1 of 13 tensors: midlayer.hidden_norm.weight"),
        (without("lm_head.weight"), "lacks 1 of 13 tensors: lm_head.weight"),
        (without("d2t"), r"d2t is missing; expected it where draft_vocab_size \(40\)"),
        (with_change("d2t", lambda one: one - 50), "d2t makes its token 0 the model's -.*; expected 0 to 96"),
        (with_change("d2t", lambda one: one + 20), "d2t makes its token .* the model's .*; expected 0 to 96"),
        (with_change("d2t", lambda one: one.float()), "d2t is F32"),
        (
            with_change("fc.weight", lambda one: one[:, :64]),
            "fc.weight has shape .32, 64.; config.json makes it .32, 96.",
        ),
        (with_change("extra.weight", lambda _: torch.ones(3)), "no place for extra.weight"),
    ],
)
def test_a_damaged_eagle_head(
    made: Any, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], words: str
) -> None:
    head = make_eagle(tmp_path / "head", (0, 0, 1))
    change(head.tensors)
    save_file(head.tensors, head.path / "model.safetensors")
    refused(made("eagle-llama").target.path, f"eagle:{head.path}", CheckpointError, words)


@pytest.mark.parametrize(
    ("kind", "gone"),
    [
        ("qwen3-next", "mtp.fc.weight"),
        ("qwen3-next", "mtp.layers.0.mlp.experts.3.up_proj.weight"),
        ("qwen3.5", "mtp.layers.0.self_attn.q_norm.weight"),
        ("deepseek-v3", "model.layers.3.eh_proj.weight"),
        ("deepseek-v3", "model.layers.3.self_attn.kv_b_proj.weight"),
    ],
)
def test_an_incomplete_mtp_head(made: Any, tmp_path: Path, kind: str, gone: str) -> None:
    """It is refused only where it is asked for."""
    path = tmp_path / "model"
    shutil.copytree(made(f"mtp-{kind}").target.path, path)
    tensors = load_file(path / "model.safetensors")
    del tensors[gone]
    save_file(tensors, path / "model.safetensors")
    refused(path, "mtp", CheckpointError, f"speculative: mtp: .* lacks 1 of .* tensors: {gone}")
    LLM(path, **OPTIONS).close()


def test_models_without_an_mtp_head(made: Any, tmp_path: Path) -> None:
    refused(made("eagle-llama").target.path, "mtp", Unsupported, "has no layers that draft, by its config.json")
    refused(made("eagle-qwen3-next").target.path, "mtp", CheckpointError, "lacks 19 of 19 tensors: mtp.norm.weight")
    # A layer of DeepSeek's that config.json does not mention is no part of the model.
    path = tmp_path / "model"
    shutil.copytree(made("mtp-deepseek-v3").target.path, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    refused(path, "mtp", CheckpointError, "no place for")


def test_an_mtp_head_with_tables_of_its_own(made: Any, make_llm: MakeLLM, tmp_path: Path) -> None:
    """Copies of the model's are not loaded twice, others are used."""
    path, one = tmp_path / "model", made("mtp-deepseek-v3")
    shared = proposer_of(drafting(make_llm, one)).head
    shutil.copytree(one.target.path, path)
    tensors = load_file(path / "model.safetensors")
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"model.layers.3.{name}.weight"] = tensors[f"model.layers.3.{name}.weight"].flip(0).contiguous()
    save_file(tensors, path / "model.safetensors")
    own = proposer_of(make_llm(path, speculative="mtp", kv_cache_memory="4MiB")).head
    assert own.num_parameters == shared.num_parameters + 2 * tensors["lm_head.weight"].numel()
    tokens, states = torch.tensor([3, 5]), torch.zeros(2, 48)
    assert torch.equal(own.rows(tokens, states), shared.rows(96 - tokens, states))
    x = torch.randn(2, 48)
    near(own.head(x), shared.head(x).flip(1).double(), 1e-5)


def test_an_eagle_head_with_the_targets_tables(made: Any, make_llm: MakeLLM, tmp_path: Path) -> None:
    """One of the whole vocabulary may leave out its head, and any may have an embedding."""
    target = made("eagle-llama").target
    head = make_eagle(tmp_path / "head", (0, 0, 1), draft_vocab_size=None)
    tensors = {name: one for name, one in head.tensors.items() if name not in ("lm_head.weight", "d2t", "t2d")}
    tensors["embed_tokens.weight"] = torch.randn(97, 32)
    save_file(tensors, head.path / "model.safetensors")
    llm = make_llm(target, speculative=f"eagle:{head.path}")
    drafts_of(llm).controller = Everything()
    found = proposer_of(llm).head
    assert found.vocab_size == 97
    rows = found.rows(torch.tensor([3]), torch.zeros(1, 32))
    assert torch.equal(rows[0, :32], tensors["embed_tokens.weight"][3])
    (output,) = llm.generate([PROMPT], greedy(30))
    assert output.outputs[0].token_ids == target.greedy(PROMPT, 30)
    assert output.speculation is not None
    assert output.speculation.drafted > 0
