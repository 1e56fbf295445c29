"""Drafts of a second model: tokens are those of plain steps, its sequences follow the requests,
and it takes no more memory than it was given.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.engine.test_steps_ahead import REQUEST, array, run
from tests.examples import examples
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

from quire import LLM, SamplingParams, Speculation
from quire.base.errors import InvalidArgument, NotFound, QuireError, ResourceExhausted
from quire.base.types import Step
from quire.branches.extension import path_to
from quire.build import make_state
from quire.engine.drafts import context_of
from quire.kv.formats import kv_format
from quire.models.catalogue import bundled_models
from quire.runner.local import LocalRunner
from quire.runner.pool_budget import PoolSizes
from quire.speculation import draft_model, likely_trees
from quire.speculation.controller import Pace
from quire.speculation.draft_model import DraftModel
from quire.speculation.proposer import NO_DRAFT, Context

from .test_speculation import Drafted, Everything, drafts_of, step_all

PROMPT = random_tokens(20)
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "4MiB", "max_num_seqs": 4}
EVERY = ("llama", "gemma3", "mistral", "qwen3-next", "mamba2", "deepseek-v3")


@pytest.fixture(scope="module", autouse=True)
def drafts_at_any_price() -> Iterator[None]:
    """Nothing depends on time, and no chain ends early."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "drafts", lambda *_: True)
        patch.setattr(likely_trees, "LEAST_CHANCE", 0.0)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes models of a family: ``llama``, and ``llama+1`` with other weights."""
    known: dict[str, Checkpoint] = {}

    def make(name: str) -> Checkpoint:
        if name not in known:
            path, (kind, _, seed) = tmp_path_factory.mktemp("draft") / name, name.partition("+")
            known[name] = make_checkpoint(kind, path, int(seed or 0)) if kind in FAMILIES else make_family(kind, path)
        return known[name]

    return make


def proposer_of(llm: LLM) -> DraftModel:
    found = drafts_of(llm)._proposer
    assert isinstance(found, DraftModel)
    return found


def taking_all(llm: LLM) -> LLM:
    drafts_of(llm).controller = Everything()
    return llm


def check_draft(llm: LLM, *, empty: bool = True) -> None:
    """The bookkeeping of the draft model's state, which nobody else has sequences in."""
    proposer = proposer_of(llm)
    proposer.runner.state.check()
    held = {one.seq for one in proposer._followers.values()}
    assert set(proposer.runner.state.sequence_ids()) <= held
    assert not proposer._forks
    if empty:
        proposer.forget()
        assert not proposer._followers
        assert proposer.runner.state.empty()


def in_a_small_pool(llm: LLM, tokens: int, step_tokens: int = 64) -> None:
    """Give the draft model room for so many tokens."""
    old = proposer_of(llm)
    model, size = old.runner.model, old.runner.state.page_size
    sizes = PoolSizes(tokens, None, step_tokens)
    device = old.runner.state.device
    state = make_state(model.layer_specs, sizes, size, kv_format("auto", model.dtype), device, "auto")
    drafts_of(llm).use(DraftModel(LocalRunner(model, state, device), max_len=256, step_tokens=step_tokens))


def count_tokens(llm: LLM) -> list[int]:
    """Note the tokens of each forward of the draft model from now on."""
    runner, found = proposer_of(llm).runner, list[int]()
    execute = runner.execute

    def counting(step: Step) -> Any:
        if step.chunks:
            found.append(step.num_tokens)
        return execute(step)

    runner.execute = counting  # type: ignore[method-assign]
    return found


# -- the same tokens -------------------------------------------------------------------------------

PAIRS = (
    ("llama", "llama"),
    ("llama", "llama+1"),
    ("gemma3", "mistral"),
    ("mistral", "mistral"),
    ("llama", "qwen3-next"),
    ("qwen3-next", "qwen3-next"),
    ("mamba2", "mamba2"),
    ("deepseek-v3", "gemma3"),
)


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest, models: Any) -> Iterator[tuple[LLM, LLM]]:
    """Two LLMs, of which the second one has a draft model."""
    target, draft = map(models, request.param)
    both = LLM(target.path, **OPTIONS), LLM(target.path, speculative=f"draft:{draft.path}", **OPTIONS)
    taking_all(both[1])
    yield both
    for one in both:
        one.close()
        assert_empty(one)
    check_draft(both[1])


@pytest.mark.turns(8)
@settings(max_examples=examples(5, 12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(REQUEST, min_size=1, max_size=7))
def test_random_requests(pair: tuple[LLM, LLM], requests: list[dict[str, Any]]) -> None:
    """They come and go at any step, more than there are seats, and end by all reasons."""
    plain, drafting = pair
    assert run(drafting, requests) == run(plain, requests)
    check_draft(drafting)


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", EVERY)
def test_a_model_accepts_its_own_drafts(make_llm: MakeLLM, models: Any, kind: str) -> None:
    checkpoint = models(kind)
    options = Speculation(method="draft", model=checkpoint.path, depth=4)
    llm = taking_all(make_llm(checkpoint, speculative=options, kv_cache_memory="4MiB"))
    prompts = [random_tokens(length, seed=length) for length in (3, 30, 9, 120)]
    outputs = llm.generate(prompts, greedy(60))
    assert token_ids(outputs) == [checkpoint.greedy(prompt, 60) for prompt in prompts]
    for output in outputs:
        counts = output.speculation
        assert counts is not None
        assert counts.by_proposer == {"draft": (counts.drafted, counts.accepted)}
        assert counts.drafted <= 4 * counts.steps
        assert counts.accepted >= 0.9 * counts.drafted >= 30
    check_draft(llm)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral", "deepseek-v3", "qwen3-next"])
def test_a_model_accepts_its_own_trees(make_llm: MakeLLM, models: Any, kind: str) -> None:
    """What was drafted beside the likeliest path, too, has the probability that the model gives it
    behind its own path, to float32's products; recurrent layers make chains."""
    checkpoint = models(kind)
    options = Speculation(method="draft", model=checkpoint.path, depth=12, width=3)
    llm = taking_all(make_llm(checkpoint, speculative=options, kv_cache_memory="4MiB"))
    prompts = [random_tokens(length, seed=length) for length in (3, 30)]
    proposer, drafts = proposer_of(llm), list[Any]()
    propose = proposer.propose

    def noting(contexts: Any, most: Any) -> Any:
        found = propose(contexts, most)
        drafts.extend(zip([one.ids.tolist() for one in contexts], found, strict=True))
        return found

    proposer.propose = noting  # type: ignore[method-assign]
    outputs = llm.generate(prompts, greedy(24))
    assert token_ids(outputs) == [checkpoint.greedy(prompt, 24) for prompt in prompts]
    assert all(output.speculation.accepted >= output.speculation.steps for output in outputs if output.speculation)
    assert any(draft.parents for _, draft in drafts) == (kind != "qwen3-next")
    for ids, draft in drafts[:2]:
        for node, (token, chance) in enumerate(zip(draft.tokens, draft.chances, strict=True)):
            path = [draft.tokens[one] for one in path_to(draft.tree.parents, node)]
            p_V = checkpoint.logits([*ids, *path[:-1]])[-1].softmax(-1)
            assert float(p_V[token]) == pytest.approx(chance, rel=1e-3)  # float32 logits of size ten
    check_draft(llm)


def test_each_token_runs_once(make_llm: MakeLLM, models: Any) -> None:
    """What was drafted and accepted is not run again."""
    checkpoint = models("llama")
    llm = taking_all(make_llm(checkpoint, speculative=f"draft:{checkpoint.path}"))
    counts = count_tokens(llm)
    (output,) = llm.generate([PROMPT], greedy(60))
    assert output.outputs[0].token_ids == checkpoint.greedy(PROMPT, 60)
    assert sum(counts) < len(PROMPT) + 60
    assert counts[0] == len(PROMPT) + 1


def test_requests_run_together(make_llm: MakeLLM, models: Any) -> None:
    checkpoint = models("llama")
    llm = taking_all(make_llm(checkpoint, speculative={"method": "draft", "model": str(checkpoint.path), "depth": 3}))
    counts = count_tokens(llm)
    prompts = [random_tokens(12, seed=seed) for seed in range(4)]
    assert token_ids(llm.generate(prompts, greedy(13))) == [checkpoint.greedy(prompt, 13) for prompt in prompts]
    assert counts[0] == 4 * 13
    assert counts[1:3] == [4, 4]


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3-next"])
def test_prompts_run_in_parts(make_llm: MakeLLM, models: Any, kind: str) -> None:
    """A forward of the draft model has no more tokens than one of the engine."""
    checkpoint = models(kind)
    llm = make_llm(checkpoint, speculative=f"draft:{checkpoint.path}", max_num_batched_tokens=16, max_num_seqs=4)
    counts = count_tokens(taking_all(llm))
    prompts = [random_tokens(length, seed=length) for length in (3, 30, 9, 120)]
    outputs = llm.generate(prompts, greedy(30))
    assert token_ids(outputs) == [checkpoint.greedy(prompt, 30) for prompt in prompts]
    assert max(counts) == 16
    assert all(output.speculation.accepted > 0 for output in outputs if output.speculation is not None)
    check_draft(llm)


def test_a_chain_ends_where_it_gets_unlikely(make_llm: MakeLLM, models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = models("llama")
    monkeypatch.setattr(likely_trees, "LEAST_CHANCE", 1.0)
    llm = taking_all(make_llm(checkpoint, speculative=f"draft:{checkpoint.path}"))
    (output,) = llm.generate([PROMPT], greedy(20))
    counts = output.speculation
    assert counts is not None
    assert counts.drafted == counts.steps > 0


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.turns(4)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_preempted_requests(make_llm: MakeLLM, models: Any, kind: str) -> None:
    checkpoint = models(kind)
    prompts = [random_tokens(20, seed=seed) for seed in range(6)]
    llm = taking_all(make_llm(checkpoint, pool=300, page_size=4, speculative=f"draft:{checkpoint.path}"))
    outputs = llm.generate(prompts, greedy(40))
    assert token_ids(outputs) == [checkpoint.greedy(prompt, 40) for prompt in prompts]
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    check(llm)
    check_draft(llm)


@pytest.mark.parametrize("tokens", [16, 40, 100, 160])
def test_the_draft_models_pool_is_too_small(make_llm: MakeLLM, models: Any, tokens: int) -> None:
    """Requests without room have no drafts, until those that end leave it."""
    checkpoint = models("llama")
    llm = taking_all(make_llm(checkpoint, page_size=4, speculative=f"draft:{checkpoint.path}"))
    in_a_small_pool(llm, tokens)
    prompts = [random_tokens(20, seed=seed) for seed in range(6)]
    outputs = llm.generate(prompts, greedy(40))
    assert token_ids(outputs) == [checkpoint.greedy(prompt, 40) for prompt in prompts]
    assert all(not output.speculation.dropped for output in outputs if output.speculation is not None)
    assert (sum(output.speculation.accepted for output in outputs if output.speculation is not None) > 0) == (
        tokens > 20
    )
    check_draft(llm)


def test_sequences_are_given_up_and_come_back(models: Any) -> None:
    """The least recently used one goes, and its tokens run again when it has drafts again."""
    checkpoint = models("llama")
    with taking_all(LLM(checkpoint.path, speculative=f"draft:{checkpoint.path}", page_size=4, **OPTIONS)) as llm:
        in_a_small_pool(llm, 80)
        proposer, counts = proposer_of(llm), count_tokens(llm)
        one, two, three = (
            Context((str(seed), 0), np.array(random_tokens(30, seed=seed), dtype=np.int64), 30, None)
            for seed in range(3)
        )
        expected = [checkpoint.greedy(context.ids.tolist(), 2) for context in (one, two, three)]
        for turn in (one, two, one, three):  # The third takes the place of the second.
            (draft,) = proposer.propose([turn], [2])
            assert draft.tokens == expected[int(turn.name[0])]
        assert [*proposer._followers] == [one.name, three.name]
        (draft,) = proposer.propose([two], [2])
        assert draft.tokens == expected[1]
        assert [*proposer._followers] == [three.name, two.name]
        assert sum(counts) == 4 * 31 + 2
        for context in (one, two, three):
            proposer.ended(context)
        check_draft(llm)


def test_memory_is_shared_out(make_llm: MakeLLM, models: Any) -> None:
    """Both pools together take what one would take."""
    checkpoint = models("llama")
    plain = engine_of(make_llm(checkpoint)).runner.state.num_bytes
    llm = make_llm(checkpoint, speculative=f"draft:{checkpoint.path}")
    both = engine_of(llm).runner.state.num_bytes, proposer_of(llm).runner.state.num_bytes
    assert 0.9 * plain <= sum(both) <= plain
    assert both[1] == pytest.approx(both[0], rel=0.1)  # whole pages
    assert any("drafts: LlamaForCausalLM" in note for note in llm._parts.notes)


def test_no_room_for_its_state(models: Any) -> None:
    checkpoint = models("llama")
    with pytest.raises(ResourceExhausted, match=r"draft model's share of the KV pool, .* holds no page"):
        LLM(checkpoint.path, **{**OPTIONS, "kv_cache_memory": 12_000}, speculative=f"draft:{checkpoint.path}")


# -- verbs between drafts --------------------------------------------------------------------------


@pytest.mark.turns(3)
@pytest.mark.parametrize(("kind", "draft"), [("llama", "llama"), ("mistral", "llama+1"), ("qwen3-next", "qwen3-next")])
def test_conversations(make_llm: MakeLLM, models: Any, tmp_path: Path, kind: str, draft: str) -> None:
    """Forks, rewinds, edits, scores, files, streams that are left, in a pool that is too small."""
    checkpoint = models(kind)
    options: dict[str, Any] = {"speculative": f"draft:{models(draft).path}", "kv_cache_memory": "3MiB", "page_size": 4}
    llm = taking_all(make_llm(checkpoint, **options))
    conversations = Drafted(llm, checkpoint, 0, tmp_path)
    for _ in range(25):
        conversations.step()
        check(llm)
        check_draft(llm)
    conversations.finish()
    if draft == kind:
        assert llm.metrics()["quire:accepted_tokens_total"] > 0


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_cancelled_between_drafts(make_llm: MakeLLM, models: Any, steps: int) -> None:
    checkpoint = models("gemma3")
    llm = taking_all(make_llm(checkpoint, speculative={"method": "draft", "model": checkpoint.path, "depth": 3}))
    engine = engine_of(llm)
    (victim,) = engine.submit(array(PROMPT), greedy(60), request_id="victim")
    for _ in range(steps):
        engine.step()
        check_draft(llm, empty=False)
    assert len(proposer_of(llm)._followers) == (steps > 1)
    engine.cancel("victim")
    assert victim in engine.step()
    assert victim.output.token_ids == checkpoint.greedy(PROMPT, 60)[: len(victim.output.token_ids)]
    check_draft(llm)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3-next"])
def test_the_next_turn_finds_its_sequence(make_llm: MakeLLM, models: Any, kind: str) -> None:
    """Only new tokens run, of sessions and of prompts that begin with an earlier text."""
    checkpoint = models(kind)
    llm = taking_all(make_llm(checkpoint, kv_cache_memory="4MiB", speculative=f"draft:{checkpoint.path}"))
    session, tokens = llm.session(random_tokens(60)), random_tokens(60)
    for turn in range(3):
        counts = count_tokens(llm)
        found = session.generate(greedy(20)).outputs[0].token_ids
        assert found == checkpoint.greedy(tokens, 20)
        tokens = [*tokens, *found, *random_tokens(5, seed=turn)]
        session.append(tokens[-5:])
        assert sum(counts) < (60 if turn == 0 else 0) + 5 + 3 * 20
        assert len(proposer_of(llm)._followers) == 1
    counts = count_tokens(llm)
    llm.generate([tokens], greedy(10))
    assert sum(counts) < 40
    counts = count_tokens(llm)
    llm.generate([tokens], greedy(10), cache_salt="another")
    assert sum(counts) > len(tokens), "state of others is not theirs to find"
    assert len(proposer_of(llm)._followers) == 2
    check_draft(llm)


def test_few_sequences_are_kept(make_llm: MakeLLM, models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = models("llama")
    monkeypatch.setattr(draft_model, "KEPT", 3)
    llm = taking_all(make_llm(checkpoint, speculative=f"draft:{checkpoint.path}"))
    for seed in range(6):
        llm.generate([random_tokens(20, seed=seed)], greedy(6))
    assert [one.tokens.ids[:20].tolist() for one in proposer_of(llm)._followers.values()] == [
        random_tokens(20, seed=seed) for seed in (3, 4, 5)
    ]
    assert len(proposer_of(llm).runner.state.sequence_ids()) == 3
    llm.reset_prefix_cache()
    assert proposer_of(llm).runner.state.empty()


def test_closed_between_drafts(models: Any) -> None:
    checkpoint = models("llama")
    llm = taking_all(LLM(checkpoint.path, speculative=f"draft:{checkpoint.path}", **OPTIONS))
    engine_of(llm).submit(array(PROMPT), greedy(100))
    for _ in range(3):
        engine_of(llm).step()
    assert not proposer_of(llm).runner.state.empty()
    llm.close()
    check_draft(llm)


@pytest.mark.product(4)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3-next"])
def test_a_forward_of_the_draft_model_fails(
    make_llm: MakeLLM, models: Any, kind: str, at: int, error: type[BaseException]
) -> None:
    """An error ends the drafts of the request, an interrupt nothing, and no sequence is left."""
    checkpoint = models(kind)
    llm = taking_all(make_llm(checkpoint, speculative={"method": "draft", "model": checkpoint.path, "depth": 3}))
    runner, calls = proposer_of(llm).runner, 0
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
    (request,) = engine_of(llm).submit(array(PROMPT), greedy(40))
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            step_all(llm)
    step_all(llm)
    assert request.output.token_ids == checkpoint.greedy(PROMPT, 40)
    counts = request.output.speculation
    assert counts is not None
    assert bool(counts.dropped) == (error is RuntimeError)
    check(llm)
    check_draft(llm)
    (output,) = llm.generate([PROMPT], greedy(30))
    assert output.outputs[0].token_ids == checkpoint.greedy(PROMPT, 30)
    assert output.speculation is not None
    assert output.speculation.accepted >= 0.9 * output.speculation.drafted > 0


def test_samples_and_seeds(make_llm: MakeLLM, models: Any) -> None:
    checkpoint = models("llama")
    params = SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=40, ignore_eos=True)
    (plain,) = make_llm(checkpoint).generate([PROMPT], params)
    llm = taking_all(make_llm(checkpoint, speculative=f"draft:{checkpoint.path}"))
    (drafted,) = llm.generate([PROMPT], params)
    assert [one.token_ids for one in drafted.outputs] == [one.token_ids for one in plain.outputs]
    assert drafted.speculation is not None
    assert drafted.speculation.accepted > 0
    check_draft(llm)


# -- what it cannot draft for ----------------------------------------------------------------------


def test_a_shorter_context_of_the_draft_model(make_llm: MakeLLM, models: Any, tmp_path: Path) -> None:
    checkpoint = models("llama")
    short = make_checkpoint("llama", tmp_path, max_position_embeddings=48)
    llm = taking_all(make_llm(checkpoint, speculative=f"draft:{short.path}"))
    inside, beyond = llm.generate([PROMPT, random_tokens(47)], greedy(60))
    assert token_ids([inside, beyond]) == [checkpoint.greedy(PROMPT, 60), checkpoint.greedy(random_tokens(47), 60)]
    assert inside.speculation is not None
    assert 0 < inside.speculation.drafted <= 28
    assert beyond.speculation is not None
    assert beyond.speculation.drafted == 0
    check_draft(llm)


def test_embeddings_in_a_prompt(make_llm: MakeLLM, models: Any) -> None:
    checkpoint = models("llama")
    llm = make_llm(checkpoint, speculative=f"draft:{checkpoint.path}")
    ids = np.array([3, -7, 4], dtype=np.int64)
    assert proposer_of(llm).propose([Context(("a", 0), ids, 3, None)], [4]) == [NO_DRAFT]
    check_draft(llm)


def test_a_windowed_session(make_llm: MakeLLM, models: Any) -> None:
    checkpoint = models("llama")
    found = []
    for options in ({}, {"speculative": f"draft:{checkpoint.path}"}):
        llm = make_llm(checkpoint, page_size=4, **options)
        if options:
            taking_all(llm)
        found.append(llm.session(PROMPT, window=16, sink=4).generate(greedy(60)).outputs[0].token_ids)
    assert found[0] == found[1]
    check_draft(llm)


def test_the_name_of_a_request_is_its_own(make_llm: MakeLLM, models: Any) -> None:
    """Requests with equal tokens have a sequence each."""
    checkpoint = models("llama")
    llm = taking_all(make_llm(checkpoint, speculative={"method": "draft", "model": checkpoint.path, "depth": 2}))
    engine = engine_of(llm)
    requests = [engine.submit(array(PROMPT), greedy(30))[0] for _ in range(3)]
    for _ in range(3):
        engine.step()
    assert {*proposer_of(llm)._followers} == {context_of(one).name for one in requests}
    step_all(llm)
    assert [one.output.token_ids for one in requests] == [checkpoint.greedy(PROMPT, 30)] * 3


# -- refusals --------------------------------------------------------------------------------------


def refused(target: Path | str, draft: Path | str, error: type[QuireError], words: str) -> None:
    with pytest.raises(error, match=words):
        LLM(target, speculative=f"draft:{draft}", **OPTIONS)


def test_another_vocabulary(models: Any, tmp_path: Path) -> None:
    other = make_checkpoint("llama", tmp_path / "other", vocab_size=98)
    refused(models("llama").path, other.path, InvalidArgument, "it has 98 tokens, and the model has 97")


def test_other_token_texts(models: Any, tmp_path: Path) -> None:
    python = bundled_models()["tiny-python"]
    copy = tmp_path / "copy"
    shutil.copytree(python, copy)
    file = copy / "tokenizer.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    vocab = values["model"]["vocab"]
    one, two = [name for name, number in sorted(vocab.items(), key=lambda pair: pair[1]) if number in (40, 41)]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    file.write_text(json.dumps(values), encoding="utf-8")
    refused("tiny-python", copy, InvalidArgument, "its token 40 is .*; give a model of the same vocabulary")
    refused("tiny-python", models("llama").path, InvalidArgument, "the draft model has no tokenizer")
    refused(models("llama").path, "tiny-python", InvalidArgument, "the model has no tokenizer")
    refused("tiny-python", tmp_path / "none", NotFound, "none")


def padded(model: Path, folder: Path, rows: list[int]) -> Path:
    """A copy whose tables have more rows than the vocabulary: those of some tokens, three times as
    large."""
    copy = folder / f"{model.name}-{len(rows)}"
    shutil.copytree(model, copy)
    for file in copy.glob("*.safetensors"):
        tensors = load_file(file)
        for name, table in tensors.items():
            if "embed" in name or "lm_head" in name:
                tensors[name] = torch.cat([table, 3 * table[rows]])
        save_file(tensors, file, {"format": "pt"})
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + len(rows)}))
    return copy


@pytest.mark.parametrize("larger", ["draft", "target"])
def test_tables_with_further_rows(tmp_path: Path, larger: str) -> None:
    """Models of one tokenizer whose tables are padded to other sizes: a row that stands for no
    token is no draft."""
    python = bundled_models()["tiny-python"]
    prompt, texts = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n", []
    with LLM(python, max_model_len=256, **OPTIONS) as llm:
        (output,) = llm.generate([prompt], greedy(40), use_tqdm=False)
    # A draft's further rows are likely where the text's tokens are, a target's are not.
    some = sorted(set(output.outputs[0].token_ids))[:8]
    other = padded(python, tmp_path, some if larger == "draft" else list(range(40, 48)))
    target, draft = (python, other) if larger == "draft" else (other, python)
    for options in ({}, {"speculative": f"draft:{draft}"}):
        with LLM(target, max_model_len=256, **OPTIONS, **options) as llm:
            if options:
                taking_all(llm)
            (output,) = llm.generate([prompt], greedy(40), use_tqdm=False)
            texts.append(output.outputs[0].token_ids)
    assert texts[0] == texts[1]
    assert output.speculation is not None
    assert not output.speculation.dropped
    assert output.speculation.accepted > 0


def test_a_bundled_model_by_name() -> None:
    """Its own draft, with its tokenizer, texts and grammars."""
    prompt = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n"
    texts = []
    for options in ({}, {"speculative": "draft:tiny-python"}):
        with LLM("tiny-python", max_model_len=256, **OPTIONS, **options) as llm:
            if options:
                taking_all(llm)
            params = [greedy(40), greedy(40, structured_outputs={"regex": "(one|two|three)( [0-9]{3}){4}"})]
            outputs = llm.generate([prompt, prompt], params, use_tqdm=False)
            texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1]
    assert all(output.speculation.accepted > 0 for output in outputs if output.speculation is not None)
