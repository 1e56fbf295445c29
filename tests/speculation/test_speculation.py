"""Drafts in the engine's steps: whoever proposes them, tokens, texts, logprobs and state are those
of steps without.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.test_steps_ahead import REQUEST, array, run
from tests.sessions.test_conversations import Conversations
from tests.small_llms import (
    VOCAB,
    Checkpoint,
    MakeLLM,
    assert_empty,
    check,
    engine_of,
    greedy,
    make_family,
    random_tokens,
    record,
    token_ids,
)

from quire import LLM, SamplingParams, Session, Speculation
from quire.base.errors import InvalidArgument, NotFound, QuireError, Unsupported
from quire.engine.drafts import Drafts
from quire.kv.recurrent import bytes_per_state
from quire.speculation.controller import Controller, StepCosts
from quire.speculation.proposer import Context, Draft

PROMPT = random_tokens(20)


class Everything(Controller):
    """Takes all drafts, whatever they cost and promise."""

    def may_gain(self, *_: int) -> bool:
        return True

    @staticmethod
    def least(_: int) -> float:
        return 0.0

    def depths(self, promises: Sequence[Sequence[float]], *, decodes: int, rows: int, most: int) -> list[int]:
        found, left = [], most
        for chain in promises:
            found.append(min(len(chain), max(0, left)))
            left -= found[-1]
        return found


class Told:
    """Proposes what it was told that requests will say, with errors; and forgets nothing."""

    name = "told"

    def __init__(self, seed: int = 0, right: float = 0.8) -> None:
        self.rng, self.right = random.Random(seed), right
        self.known: list[list[int]] = []
        self.held: set[Any] = set()

    def propose(self, contexts: Sequence[Context], most: Sequence[int]) -> list[Draft]:
        return [self._draft(context, count) for context, count in zip(contexts, most, strict=True)]

    def _draft(self, context: Context, most: int) -> Draft:
        self.held.add(context.name)
        ids = context.ids.tolist()
        found = next((one[len(ids) :] for one in self.known if one[: len(ids)] == ids), [])
        found += [self.rng.randrange(VOCAB) for _ in range(most - len(found))]
        count = self.rng.randint(0, most)
        tokens = [one if self.rng.random() < self.right else self.rng.randrange(VOCAB) for one in found[:count]]
        return Draft(tokens, [1.0] * len(tokens))

    def ended(self, context: Context) -> None:
        self.held.discard(context.name)


def drafts_of(llm: LLM) -> Drafts:
    drafts = engine_of(llm).requests.drafts
    assert drafts is not None
    return drafts


def drafting(llm: LLM, proposer: Any, *, depth: int = 16) -> LLM:
    """Let an LLM with speculation ask ``proposer``, and verify all that it proposes."""
    drafts = drafts_of(llm)
    drafts.use(proposer)
    drafts.controller = Everything()
    drafts._options = Speculation(depth=depth)
    return llm


def step_all(llm: LLM) -> None:
    while engine_of(llm).has_work:
        engine_of(llm).step()


def speculating(make_llm: MakeLLM, checkpoint: Any, proposer: Any = None, **options: Any) -> LLM:
    return drafting(make_llm(checkpoint, speculative="lookup", **options), proposer or Told())


# -- the same tokens -------------------------------------------------------------------------------

FAMILIES = ("llama", "gemma3", "mistral", "qwen3-next", "mamba2", "deepseek-v3")
"""Full attention, windows beside it and alone, a hybrid, recurrent layers alone, latent rows."""


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, LLM]]:
    """Two LLMs of a family, of which the second one speculates."""
    name = request.param
    made = checkpoints.get(name) or make_family(name, tmp_path_factory.mktemp(name))
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "4MiB", "max_num_seqs": 4}
    both = LLM(made.path, **options), LLM(made.path, speculative="lookup", **options)
    drafting(both[1], Told())
    yield both
    for one in both:
        one.close()
        assert_empty(one)


@pytest.mark.turns(6)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(REQUEST, min_size=1, max_size=7), st.integers(0, 99))
def test_random_requests(pair: tuple[LLM, LLM], requests: list[dict[str, Any]], seed: int) -> None:
    """They come and go at any step, more than there are seats, sampled and greedy, with penalties,
    stops, bans and logprobs, and end by all reasons."""
    plain, speculating = pair
    expected = run(plain, requests)
    told = Told(seed)
    drafts_of(speculating).use(told)
    whole = [one for one in requests if one["cancel"] is None]
    told.known = [
        random_tokens(one["prompt"], seed=requests.index(one)) + found[0]
        for one, found in zip(whole, (found for found in expected if isinstance(found, tuple)), strict=False)
    ]
    assert run(speculating, requests) == expected
    assert not told.held
    assert not drafts_of(speculating)._requests


@pytest.mark.product(4)
@pytest.mark.parametrize("depth", [1, 2, 5, 16])
@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_each_depth(make_llm: MakeLLM, checkpoint: Checkpoint, depth: int, right: float) -> None:
    told = Told(seed=depth, right=right)
    told.known = [PROMPT + checkpoint.greedy(PROMPT, 60)]
    llm = drafting(make_llm(checkpoint, speculative="lookup"), told, depth=depth)
    steps = record(llm)
    (output,) = llm.generate([PROMPT], greedy(60))
    assert output.outputs[0].token_ids == checkpoint.greedy(PROMPT, 60)
    counts = output.speculation
    assert counts is not None
    assert counts.by_proposer == {"told": (counts.drafted, counts.accepted)}
    assert len(steps.forwards) == 1 + 59 - counts.accepted
    if right == 1.0:
        assert counts.accepted == counts.drafted > 0
    metrics = llm.metrics()
    assert metrics["quire:drafted_tokens_total"] == counts.drafted
    assert metrics["quire:accepted_tokens_total"] == counts.accepted
    assert metrics["quire:generation_tokens_total"] == 60


def test_many_requests_beside_a_long_prompt(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    prompts = [random_tokens(length, seed=length) for length in (3, 30, 9, 120)]
    told = Told()
    told.known = [prompt + checkpoint.greedy(prompt, 30) for prompt in prompts]
    llm = drafting(make_llm(checkpoint, speculative="lookup", max_num_batched_tokens=16), told)
    assert token_ids(llm.generate(prompts, greedy(30))) == [checkpoint.greedy(prompt, 30) for prompt in prompts]
    check(llm)


def test_lookup_itself(make_llm: MakeLLM, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own controller and chances, at costs that no noise changes."""
    monkeypatch.setattr(StepCosts, "measured", lambda *_: None)
    llm = make_llm(checkpoint, speculative="lookup")
    prompts = [PROMPT, PROMPT * 3, [7] * 12, random_tokens(40)]
    for _ in range(2):
        outputs = llm.generate(prompts, greedy(80))
        assert token_ids(outputs) == [checkpoint.greedy(prompt, 80) for prompt in prompts]
    assert sum(output.speculation.accepted for output in outputs if output.speculation is not None) > 0


@pytest.mark.turns(4)
def test_in_a_pool_that_is_too_small(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    """Requests are preempted and come back, with drafts before and after."""
    prompts = [random_tokens(20, seed=seed) for seed in range(6)]
    told = Told()
    told.known = [prompt + checkpoint.greedy(prompt, 40) for prompt in prompts]
    llm = drafting(make_llm(checkpoint, pool=150, page_size=4, speculative="lookup"), told)
    outputs = llm.generate(prompts, greedy(40))
    assert token_ids(outputs) == [checkpoint.greedy(prompt, 40) for prompt in prompts]
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    check(llm)


@pytest.mark.parametrize("kind", ["mistral", "qwen3-next"])
def test_nothing_runs_twice(make_llm: MakeLLM, checkpoints: dict[str, Checkpoint], tmp_path: Path, kind: str) -> None:
    """A draft that is taken back costs its own row: recurrent layers have a state behind each."""
    checkpoint = checkpoints.get(kind) or make_family(kind, tmp_path)
    told = Told(right=0.6)
    told.known = [PROMPT + checkpoint.greedy(PROMPT, 40)]
    llm = drafting(make_llm(checkpoint, speculative="lookup"), told)
    steps = record(llm)
    (output,) = llm.generate([PROMPT], greedy(40))
    counts = output.speculation
    assert counts is not None
    assert 0 < counts.accepted < counts.drafted
    assert steps.num_tokens == len(PROMPT) + len(steps.forwards) - 1 + counts.drafted


def test_many_recurrent_requests_in_few_slots(make_llm: MakeLLM, tmp_path: Path) -> None:
    """Drafts take what others leave of the slots for states, and no step fails for lack of one."""
    checkpoint = make_family("mamba2", tmp_path)
    prompts = [random_tokens(12, seed=seed) for seed in range(6)]
    told = Told()
    told.known = [prompt + checkpoint.greedy(prompt, 24) for prompt in prompts]
    state_bytes = bytes_per_state(engine_of(make_llm(checkpoint)).runner.state.parts.recurrent.specs.values())  # type: ignore[attr-defined]
    llm = drafting(make_llm(checkpoint, kv_cache_memory=26 * state_bytes, speculative="lookup"), told)
    assert token_ids(llm.generate(prompts, greedy(24))) == [checkpoint.greedy(prompt, 24) for prompt in prompts]
    assert llm.metrics()["quire:accepted_tokens_total"] > 0


# -- what is drawn ---------------------------------------------------------------------------------


def both(make_llm: MakeLLM, checkpoint: Any, ask: Callable[[LLM], Any], **options: Any) -> tuple[Any, Any]:
    """What ``ask`` gives without and with drafts, of which most are right."""
    plain = make_llm(checkpoint, **options)
    first = ask(plain)
    told = Told(seed=3)
    told.known = [output.prompt_token_ids + sample.token_ids for output in first for sample in output.outputs]
    llm = drafting(make_llm(checkpoint, speculative="lookup", **options), told)
    second = ask(llm)
    assert sum(output.speculation.accepted for output in second) > 0
    check(llm)
    return first, second


def test_logprobs_and_samples(make_llm: MakeLLM, llama: Checkpoint) -> None:
    params = SamplingParams(temperature=0.9, seed=5, n=3, logprobs=3, max_tokens=40, ignore_eos=True)
    first, second = both(make_llm, llama, lambda llm: llm.generate([PROMPT], params))
    for a, b in zip(first[0].outputs, second[0].outputs, strict=True):
        assert a.token_ids == b.token_ids
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert list(x) == list(y)
            # float32 products of several rows sum in another order than those of one.
            assert [one.logprob for one in x.values()] == pytest.approx([one.logprob for one in y.values()], abs=1e-4)


def test_penalties_and_processors_see_the_tokens_before(make_llm: MakeLLM, llama: Checkpoint) -> None:
    def ban_last(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
        if generated:
            logits[generated[-1]] = -torch.inf
        return logits

    params = SamplingParams(
        temperature=0.7,
        seed=1,
        max_tokens=40,
        frequency_penalty=0.4,
        repetition_penalty=1.1,
        ignore_eos=True,
        logits_processors=[ban_last],
    )
    first, second = both(make_llm, llama, lambda llm: llm.generate([PROMPT], params))
    tokens = first[0].outputs[0].token_ids
    assert tokens == second[0].outputs[0].token_ids
    assert all(a != b for a, b in itertools.pairwise(tokens))


def test_a_processor_that_raises_ends_its_request_only(make_llm: MakeLLM, llama: Checkpoint) -> None:
    def at_nine(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(generated) == 9:
            raise ValueError("nine")
        return logits

    told = Told(right=1.0)
    told.known = [PROMPT + llama.greedy(PROMPT, 30), PROMPT[:9] + llama.greedy(PROMPT[:9], 30)]
    llm = drafting(make_llm(llama, speculative="lookup"), told)
    broken, whole = llm.generate([PROMPT, PROMPT[:9]], [greedy(30, logits_processors=[at_nine]), greedy(30)])
    assert broken.outputs[0].finish_reason == "error"
    assert "nine" in broken.outputs[0].error
    assert broken.outputs[0].token_ids == llama.greedy(PROMPT, 9)
    assert whole.outputs[0].token_ids == llama.greedy(PROMPT[:9], 30)
    check(llm)


def test_the_draws_have_the_distribution_of_the_target(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Pairs of tokens behind a draft that is always the most likely token, over many seeds: equal
    to those drawn without drafts, seed by seed."""
    prompts, count = [PROMPT[:6]] * 24, 3
    params = [SamplingParams(temperature=1.3, top_k=4, max_tokens=count, seed=n, ignore_eos=True) for n in range(24)]
    expected = token_ids(make_llm(llama).generate(prompts, params))
    told = Told(right=1.0)
    told.known = [PROMPT[:6] + llama.greedy(PROMPT[:6], count)]
    llm = drafting(make_llm(llama, speculative="lookup"), told)
    assert token_ids(llm.generate(prompts, params)) == expected
    assert len({tuple(one) for one in expected}) > 10


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 9])
def test_stops_cut_within_drafts(make_llm: MakeLLM, checkpoint: Checkpoint, cut: int) -> None:
    tokens = checkpoint.greedy(PROMPT, 30)
    told = Told(right=1.0)
    told.known = [PROMPT + tokens]
    llm = drafting(make_llm(checkpoint, speculative="lookup"), told)
    session = llm.session(PROMPT)
    output = session.generate(greedy(30, stop_token_ids=[tokens[cut]])).outputs[0]
    first = tokens.index(tokens[cut])
    assert output.token_ids == tokens[: first + 1]
    assert output.stop_reason == tokens[cut]
    state = engine_of(llm).runner.state
    assert {state.sequence_length(seq) for seq in state.sequences.ids} <= {len(PROMPT), len(PROMPT) + first}  # type: ignore[attr-defined]
    assert session.generate(greedy(12)).outputs[0].token_ids == checkpoint.greedy(session.tokens[:-12], 12)
    check(llm)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_max_tokens_and_the_context_end_within_drafts(make_llm: MakeLLM, checkpoint: Checkpoint, count: int) -> None:
    llm = speculating(make_llm, checkpoint, Told(right=0.0), max_model_len=len(PROMPT) + 9)
    assert len(llm.generate([PROMPT], greedy(count))[0].outputs[0].token_ids) == count
    output = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0].outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("length", "context")
    assert output.token_ids == checkpoint.greedy(PROMPT, 9)


GRAMMARS: list[dict[str, Any]] = [
    {"regex": "(one|two|three)( [0-9]{3}){4}"},
    {"json": {"type": "object", "properties": {"name": {"enum": ["aa", "bb"]}, "n": {"type": "integer"}},
              "required": ["name", "n"], "additionalProperties": False}},
    {"choice": ["left and then right", "left and then left"]},
]  # fmt: skip


@pytest.mark.parametrize("form", GRAMMARS)
def test_grammars(form: dict[str, Any]) -> None:
    """Drafts are cut where the grammar forbids them, and the mask holds at each draw."""
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=40, structured_outputs=form)
    prompts = ["def f(x):\n    return", "# numbers\n"]
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "16MiB", "max_model_len": 256}
    with LLM("tiny-python", **options) as plain:
        first = plain.generate(prompts, params, use_tqdm=False)
    told = Told(right=0.9)
    told.known = [one.prompt_token_ids + one.outputs[0].token_ids for one in first]
    with drafting(LLM("tiny-python", speculative="lookup", **options), told) as llm:
        second = llm.generate(prompts, params, use_tqdm=False)
        check(llm)
    assert [one.outputs[0].text for one in second] == [one.outputs[0].text for one in first]
    assert token_ids(second) == token_ids(first)
    assert sum(one.speculation.accepted for one in second if one.speculation is not None) > 0


def test_what_a_grammar_forces_is_drafted() -> None:
    """Names of properties run in one step, though nothing like them occurred before."""
    form = {"type": "object", "properties": {"first_name_of_person": {"enum": ["aa", "bb"]}},
            "required": ["first_name_of_person"], "additionalProperties": False}  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs={"json": form})
    found = []
    for speculative in (None, "lookup"):
        with LLM("tiny-python", device="cpu", dtype="float32", kv_cache_memory="16MiB", speculative=speculative) as llm:
            if speculative:
                drafts_of(llm).controller = Everything()
            found += llm.generate(["x = "], params, use_tqdm=False)
    plain, drafted = found
    assert drafted.outputs[0].text == plain.outputs[0].text
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    tried, accepted = drafted.speculation.by_proposer["grammar"]
    assert 3 <= accepted <= tried
    assert drafted.speculation.accepted == sum(pair[1] for pair in drafted.speculation.by_proposer.values())


def test_texts_stream_in_order() -> None:
    """Several tokens a step: the pieces join to the text, also with a stop string within them."""
    prompt = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n"
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "16MiB", "max_model_len": 512}
    for changes in ({}, {"stop": ["\n\n"]}, {"stop": ["return"], "include_stop_str_in_output": True}):
        params = SamplingParams(temperature=0, max_tokens=60, **changes)  # type: ignore[arg-type]
        texts = []
        for speculative in (None, "lookup"):
            with LLM("tiny-python", speculative=speculative, **options) as llm:
                if speculative:
                    drafts_of(llm).controller = Everything()
                session = llm.session(prompt)
                texts.append("".join(delta.text for delta in session.stream(params)))
                texts.append(session.text)
        assert texts[0] == texts[2]
        assert texts[1] == texts[3]


# -- verbs between drafts --------------------------------------------------------------------------


class Drafted(Conversations):
    """Conversations with drafts: a stream brings several tokens at once."""

    def stream_and_leave(self) -> None:
        session, tokens = self.pick()
        before = list(tokens)
        stream = session.stream(greedy(9))
        for _, delta in zip(range(self.rng.randint(1, 3)), stream, strict=False):
            tokens += delta.token_ids
        stream.close()
        assert len(tokens) > len(before)
        assert self.checkpoint.continues(before, tokens[len(before) :])


KINDS = ("llama", "gemma3", "mistral", "qwen3-next", "mamba2", "lfm2", "deepseek-v3", "falcon-h1")


@pytest.mark.turns(8)
@pytest.mark.parametrize("kind", KINDS)
def test_conversations(make_llm: MakeLLM, checkpoints: dict[str, Checkpoint], tmp_path: Path, kind: str) -> None:
    """Forks, rewinds, edits, scores, files, streams that are left, in a pool that is too small."""
    converse(make_llm, checkpoints.get(kind) or make_family(kind, tmp_path / "model"), tmp_path, 0, 25)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("kind", KINDS)
def test_long_conversations(
    make_llm: MakeLLM, checkpoints: dict[str, Checkpoint], tmp_path: Path, kind: str, seed: int
) -> None:
    converse(make_llm, checkpoints.get(kind) or make_family(kind, tmp_path / "model"), tmp_path, seed, 400)


def converse(make_llm: MakeLLM, checkpoint: Checkpoint, folder: Path, seed: int, steps: int) -> None:
    room = "8MiB" if "falcon" in type(checkpoint.model).__name__.lower() else "2MiB"  # Its states are large.
    llm = speculating(make_llm, checkpoint, Told(seed), kv_cache_memory=room, page_size=4)
    drafts = drafts_of(llm)
    conversations = Drafted(llm, checkpoint, seed, folder)
    for number in range(steps):
        told = drafts._proposer
        assert isinstance(told, Told)
        if conversations.sessions and number % 2:
            some = conversations.sessions[-3:]
            told.known = [tokens + checkpoint.greedy(tokens, 9) for _, tokens in some]
        conversations.step()
        check(llm)
    conversations.finish()
    assert llm.metrics()["quire:accepted_tokens_total"] > 0


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_cancelled_between_drafts(make_llm: MakeLLM, checkpoint: Checkpoint, steps: int) -> None:
    told = Told(right=0.8)
    told.known = [PROMPT + checkpoint.greedy(PROMPT, 60)]
    llm = drafting(make_llm(checkpoint, speculative="lookup"), told)
    engine = engine_of(llm)
    (victim,) = engine.submit(array(PROMPT), greedy(60), request_id="victim")
    for _ in range(steps):
        engine.step()
    engine.cancel("victim")
    assert victim in engine.step()
    assert victim.output.token_ids == checkpoint.greedy(PROMPT, 60)[: len(victim.output.token_ids)]
    assert not drafts_of(llm)._requests
    check(llm)


@pytest.mark.product(2)
@pytest.mark.parametrize("at", range(1, 6))
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3-next"])
def test_interrupted_while_tokens_are_taken(
    make_llm: MakeLLM,
    checkpoints: dict[str, Checkpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    at: int,
) -> None:
    """Ctrl-C between two draws of a step: what is there is right, and the request goes on."""
    checkpoint = checkpoints.get(kind) or make_family(kind, tmp_path)
    tokens = checkpoint.greedy(PROMPT, 40)
    told = Told(right=1.0)
    told.known = [PROMPT + tokens]
    llm = drafting(make_llm(checkpoint, speculative="lookup"), told)
    engine = engine_of(llm)
    (request,) = engine.submit(array(PROMPT), greedy(40))
    take, calls = engine.sampling.take, 0

    def broken(drawing: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1 + at:
            raise KeyboardInterrupt
        take(drawing)

    monkeypatch.setattr(engine.sampling, "take", broken)
    with pytest.raises(KeyboardInterrupt):
        step_all(llm)
    check(llm)
    step_all(llm)
    assert request.output.token_ids == tokens
    check(llm)


def test_windowed_sessions(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """A window with sinks slides over drafts as over tokens."""
    found = []
    told = Told(right=0.8)
    for speculative in (None, "lookup"):
        llm = make_llm(llama, speculative=speculative, page_size=4)
        if speculative:
            drafting(llm, told)
        session = llm.session(PROMPT, window=16, sink=4)
        found.append(session.generate(greedy(60)).outputs[0].token_ids)
        told.known = [PROMPT + found[0]]
        check(llm)
    assert found[0] == found[1]
    assert drafts_of(llm)._metrics.accepted_tokens.value > 0


@pytest.mark.parametrize("family", ["llama", "qwen3-next"])
def test_a_processor_that_ends_its_own_stream(
    make_llm: MakeLLM, checkpoints: dict[str, Checkpoint], tmp_path: Path, family: str
) -> None:
    """While drafts behind its token have run, and are not verified: the session has none of them.
    With recurrent layers these are a tree."""
    checkpoint = checkpoints.get(family) or make_family(family, tmp_path)
    told = Told(right=1.0)
    told.known = [PROMPT + checkpoint.greedy(PROMPT, 40)]
    llm = speculating(make_llm, checkpoint, told, kv_cache_memory="4MiB")
    for calls in range(1, 8):
        with llm.session(PROMPT) as session:
            said = left_at(session, calls)
            assert len(said) == calls - 1
            assert session.sequence_id is not None
            assert engine_of(llm).runner.state.sequence_length(session.sequence_id) == session.num_computed
            session.append([7, 8, 9])
            ids = session.tokens
            assert session.generate(greedy(8)).outputs[0].token_ids == checkpoint.greedy(ids, 8)


def left_at(session: Session, calls: int) -> list[int]:
    """The tokens of a stream that a logits processor closes, when it is called so often."""
    left = iter(range(calls - 1, -1, -1))

    def leave(ids: Sequence[int], logits_V: torch.Tensor) -> torch.Tensor:
        if not next(left):
            stream.close()
        return logits_V

    stream = session.stream(greedy(40, logits_processors=[leave]))
    return [token for delta in stream for token in delta.token_ids]


# -- who proposes ----------------------------------------------------------------------------------


class Broken(Told):
    """Fails in one way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def propose(self, contexts: Sequence[Context], most: Sequence[int]) -> list[Draft]:
        if self.way == "raises":
            raise RuntimeError("out of ideas")
        if self.way == "outside":
            return [Draft([3, VOCAB], [0.5, 0.5]) for _ in contexts]
        if self.way == "negative":
            return [Draft([-1], [0.5]) for _ in contexts]
        if self.way == "chances":
            return [Draft([3, 4], [0.5]) for _ in contexts]
        return []


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("raises", "RuntimeError: out of ideas"),
        ("outside", "gave token 97, outside of 0..96"),
        ("negative", "gave token -1"),
        ("chances", "no chance per draft"),
        ("few", "0 drafts for"),
    ],
)
def test_a_proposer_that_fails_is_dropped(make_llm: MakeLLM, llama: Checkpoint, way: str, reason: str) -> None:
    llm = speculating(make_llm, llama, Broken(way))
    (output,) = llm.generate([PROMPT], greedy(12))
    assert output.outputs[0].token_ids == llama.greedy(PROMPT, 12)
    assert output.speculation is not None
    assert reason in output.speculation.dropped
    assert output.speculation.drafted == 0


class Unforgetting(Told):
    """Fails when a request has ended, and when it is to forget old ones."""

    def ended(self, context: Context) -> None:
        raise RuntimeError("cannot let go")

    def forget(self) -> None:
        raise RuntimeError("cannot forget")


def test_a_proposer_that_fails_at_the_end_of_a_request(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """The request ends all the same: its session goes on, and its pages come back."""
    llm = speculating(make_llm, llama, Unforgetting())
    with llm.session(PROMPT) as session:
        first = session.generate(greedy(8))
        assert first.outputs[0].error is None
        assert first.speculation is not None
        assert first.speculation.dropped == "the proposer told raised RuntimeError: cannot let go"
        again = session.generate(greedy(8)).outputs[0].token_ids
    assert [*first.outputs[0].token_ids, *again] == llama.greedy(PROMPT, 16)
    llm.reset_prefix_cache()


def test_more_drafts_than_asked_for_are_cut(make_llm: MakeLLM, llama: Checkpoint) -> None:
    class Talkative(Told):
        def _draft(self, context: Context, most: int) -> Draft:
            return Draft([1] * 500, [0.9] * 500)

    llm = speculating(make_llm, llama, Talkative())
    steps = record(llm)
    assert llm.generate([PROMPT], greedy(12))[0].outputs[0].token_ids == llama.greedy(PROMPT, 12)
    assert max(len(chunk.tokens) for step in steps.forwards for chunk in step.chunks if chunk.logits == "all") == 11


def test_garbage_is_soon_left(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """With the real controller: promises that are not kept end the drafts."""
    llm = make_llm(llama, speculative="lookup")
    drafts_of(llm).use(Told(right=0.0))
    (output,) = llm.generate([PROMPT], greedy(200))
    assert output.outputs[0].token_ids == llama.greedy(PROMPT, 200)
    counts = output.speculation
    assert counts is not None
    assert counts.steps < 60


def test_off_for_a_request(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = speculating(make_llm, llama)
    on, off = llm.generate([PROMPT, PROMPT[:9]], [greedy(30), greedy(30, speculative=False)])
    assert off.speculation is None
    assert on.speculation is not None
    assert on.speculation.drafted > 0


def test_nothing_changes_without_it(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    steps = record(llm)
    (output,) = llm.generate([PROMPT], greedy(9))
    assert output.speculation is None
    assert all(chunk.tree is None and len(chunk.tokens) == 1 for step in steps.forwards[1:] for chunk in step.chunks)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("draft", InvalidArgument, "the draft model, as in draft:DIR"),
        ("lookup:some/model", InvalidArgument, "left out: only draft and eagle have one"),
        ("mtp:some/model", InvalidArgument, "left out: only draft and eagle have one"),
        ("eagle", InvalidArgument, "the EAGLE-3 head, as in eagle:DIR"),
        ({"method": "draft", "model": 7}, InvalidArgument, "the path or name of a model"),
        ("mtp", Unsupported, "has no layers that draft"),
        ("eagle:no/such/head/here", NotFound, "no such directory"),
        ("guess", InvalidArgument, "auto, lookup"),
        ({"method": "lookup", "depth": 0}, InvalidArgument, "1..64"),
        ({"method": "lookup", "depth": 65}, InvalidArgument, "1..64"),
        ({"method": "lookup", "wdith": 2}, InvalidArgument, "wdith"),
        ({"method": "lookup", "width": 2}, InvalidArgument, "lookup makes chains"),
        ({"method": "mtp", "width": 9}, InvalidArgument, "1..8"),
        ({"depth": True}, InvalidArgument, "depth"),
        (7, InvalidArgument, "quire.Speculation"),
    ],
)
def test_bad_options(llama: Checkpoint, given: Any, error: type[QuireError], words: str) -> None:
    with pytest.raises(error, match=words):
        LLM(llama.path, device="cpu", speculative=given)


@pytest.mark.parametrize("given", [None, "off", "lookup", "auto", Speculation(), {"depth": 3}])
def test_good_options(make_llm: MakeLLM, llama: Checkpoint, given: Any) -> None:
    llm = make_llm(llama, speculative=given)
    (output,) = llm.generate([PROMPT], greedy(4))
    assert (output.speculation is None) == (given in (None, "off"))
    assert len(output.outputs[0].token_ids) == 4
