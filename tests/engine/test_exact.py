"""Exact requests: their tokens and log-probabilities are those of a run alone, to the bit, where
the rows of every product know how many rows there are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.small_llms import Checkpoint, assert_empty, check, engine_of, greedy, make_family, random_tokens, record
from torch import Tensor

from quire import LLM, SamplingParams
from quire.adapters.keys import AdapterKey
from quire.base.errors import FailedPrecondition, Unsupported
from quire.base.types import Step
from quire.engine.exact import window_size
from quire.engine.request import Request
from quire.nn.linear import Linear
from quire_inspector.views.history_tree import _plain

from .test_steps_ahead import array

FAMILIES = ("llama", "gemma3", "deepseek-v3", "mamba2", "qwen3-next")
"""Full attention, windows beside it, latent rows, recurrent layers alone, a hybrid."""
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "max_num_seqs": 6, "max_num_batched_tokens": 48}
POOLS: dict[str, str] = {
    "llama": "80KiB",
    "gemma3": "96KiB",
    "deepseek-v3": "56KiB",
    "mamba2": "160KiB",
    "qwen3-next": "256KiB",
}
"""So small that requests have to wait, and guesses end early."""


def know_their_batch(monkeypatch: pytest.MonkeyPatch, strength: float = 0.005) -> None:
    """Let a row of each product depend on its place and on the number of rows, as on GPUs, and
    more."""
    plain = Linear.__call__

    def call(self: Linear, x_TI: Tensor) -> Tensor:
        y_TO = plain(self, x_TI)
        if not self.name:
            return y_TO  # of an expert, whose rows are as many as chose it
        rows = x_TI.shape[0]
        place_O, place_T = (torch.arange(size, dtype=torch.float32) for size in (y_TO.shape[-1], rows))
        return (y_TO.float() * (1 + strength * torch.cos(place_O * rows + place_T[:, None]))).to(y_TO.dtype)

    monkeypatch.setattr(Linear, "__call__", call)
    # Blocks in one call would not multiply by these.
    monkeypatch.setattr("quire.models.blocks.joined", lambda *_: None)
    monkeypatch.setattr("quire.build.row_dependence", lambda *_: "products know the number of rows")


@pytest.fixture(scope="module")
def made(checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {name: checkpoints.get(name) or make_family(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


@pytest.fixture
def loose(monkeypatch: pytest.MonkeyPatch) -> None:
    know_their_batch(monkeypatch)


def result(request: Request) -> Any:
    """What must be equal to the bit."""
    output = request.output
    return output.token_ids, output.logprobs, output.finish_reason, output.stop_reason


class Alone:
    """Each request by itself, on an LLM of the same options without a prefix cache."""

    def __init__(self, checkpoint: Checkpoint, **options: Any) -> None:
        self.llm = LLM(checkpoint.path, **{**OPTIONS, **options, "enable_prefix_caching": False})
        self._known: dict[Any, Any] = {}

    def __call__(self, prompt: list[int], params: SamplingParams) -> list[Any]:
        key = tuple(prompt), repr(params)
        if key not in self._known:
            engine = engine_of(self.llm)
            samples = engine.submit(array(prompt), params)
            engine.run(samples)
            self._known[key] = [result(one) for one in samples]
        return self._known[key]


TEXTS = [random_tokens(150, seed=seed) for seed in range(3)]


def some_prompt(rng: random.Random) -> list[int]:
    """A prompt that shares its beginning with others."""
    return rng.choice(TEXTS)[: rng.choice([1, 20, 31, 32, 33, 64])] + random_tokens(
        rng.randrange(1, 12), rng.randrange(4)
    )


def some_params(rng: random.Random, number: int) -> SamplingParams:
    fields: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.8, 1.2]),
        "seed": number % 5,
        "max_tokens": rng.choice([1, 2, 9, 25]),
        "ignore_eos": rng.random() < 0.8,
        "logprobs": rng.choice([None, 0, 2]),
        "n": rng.choice([1, 1, 1, 2]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.3]),
        "presence_penalty": rng.choice([0.0, 0.0, 0.5]),
        "stop_token_ids": rng.choice([None, None, [3, 5, 8]]),
    }
    if fields["temperature"] == 0.0:
        fields["n"] = 1
    fields["min_tokens"] = min(fields["max_tokens"], rng.choice([0, 0, 4]))
    return SamplingParams(**fields)


def traffic(llm: LLM, rng: random.Random, count: int) -> list[tuple[list[int], SamplingParams, list[Request]]]:
    """Run requests of which half are exact, as they come; return those, and how they ended."""
    engine, coming = engine_of(llm), count
    found: list[tuple[list[int], SamplingParams, list[Request]]] = []
    while coming or engine.has_work:
        if coming and (not engine.has_work or rng.random() < 0.2):
            for _ in range(min(coming, rng.choice([1, 1, 3, 5]))):
                prompt, params = some_prompt(rng), some_params(rng, coming).replace(exact=coming % 2 == 0)
                samples = engine.submit(array(prompt), params, request_id=str(coming))
                if params.exact:
                    found.append((prompt, params, samples))
                coming -= 1
        engine.step()
        if rng.random() < 0.1:
            check(llm)
        if rng.random() < 0.03:
            running = [one for one in engine.scheduler.running if not one.asked.exact and not one.asked.guesses]
            if running:
                engine.cancel(rng.choice(running).request_id)
        if rng.random() < 0.05:
            running = [one for one in engine.scheduler.running if one.asked.exact]
            if running:
                engine.scheduler.preempt(rng.choice(running))
        if rng.random() < 0.02:
            engine.reset_prefix_cache()
    return found


def differing(found: list[tuple[list[int], SamplingParams, list[Request]]], alone: Alone) -> int:
    """Count the samples that are not those of their solo runs."""
    wrong = 0
    for prompt, params, samples in found:
        wrong += sum(result(one) != solo for one, solo in zip(samples, alone(prompt, params), strict=True))
    return wrong


@pytest.mark.parametrize("count", [12, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("loose")
def test_traffic_does_not_show(made: dict[str, Checkpoint], family: str, count: int) -> None:
    """400 requests of five families, half of them exact, are 1,000 exact ones."""
    options = {"kv_cache_memory": POOLS[family], "max_model_len": 256}
    alone = Alone(made[family], **options)
    with LLM(made[family].path, **OPTIONS, **options) as llm:
        found = traffic(llm, random.Random(count), count)
        assert differing(found, alone) == 0
        # The test sees something: other requests are not those of their solo runs.
        engine = engine_of(llm)
        plain = [(prompt, params.replace(exact=False)) for prompt, params, _ in found if params.max_tokens > 1][:6]
        samples = [engine.submit(array(prompt), params) for prompt, params in plain]
        engine.run([one for some in samples for one in some])
        assert differing([(*one, some) for one, some in zip(plain, samples, strict=True)], alone) > 0
        metrics = llm.metrics()
        assert metrics["quire:num_preemptions_total"] > 0
        assert metrics["quire:prompt_tokens_cached_total"] > 0
        engine.reset_prefix_cache()
        assert_empty(llm)
    alone.llm.close()


# -- what a request is beside ----------------------------------------------------------------------


@pytest.fixture
def exact(made: dict[str, Checkpoint], loose: None) -> Iterator[tuple[LLM, Alone]]:
    """An LLM whose rows know their batch, and what its requests are alone."""
    alone = Alone(made["llama"], kv_cache_memory="256KiB")
    with LLM(made["llama"].path, **OPTIONS, kv_cache_memory="256KiB", speculative="lookup") as llm:
        yield llm, alone
        check(llm)
    alone.llm.close()


PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=45, ignore_eos=True, exact=True, logprobs=1)


def beside(llm: LLM, *requests: Any) -> None:
    """Run requests beside others, which come and go."""
    engine = engine_of(llm)
    others = [
        engine.submit(array(random_tokens(9 + number)), PARAMS.replace(exact=False, max_tokens=7 * number + 1))[0]
        for number in range(3)
    ]
    engine.run([*others, *requests])


def test_no_token_is_given_before_it_is_verified(exact: tuple[LLM, Alone]) -> None:
    llm, alone = exact
    engine, prompt = engine_of(llm), random_tokens(40)
    ((tokens, *_),) = alone(prompt, PARAMS)
    (request,) = engine.submit(array(prompt), PARAMS)
    counts = set()
    while engine.has_work:
        changed = engine.step()
        assert all(one is request for one in changed), "guesses are nobody's"
        assert request.output.token_ids == tokens[: len(request.output.token_ids)]
        counts.add(len(request.output.token_ids))
    assert len(tokens) == 45
    assert max(b - a for a, b in zip(sorted(counts), sorted(counts)[1:], strict=False)) > 5, "several at a time"
    assert llm.metrics()["quire:generation_tokens_total"] == 45
    assert engine.num_running == 0


def test_speculation_guesses(exact: tuple[LLM, Alone]) -> None:
    llm, alone = exact
    prompt, params = random_tokens(6) * 8, PARAMS.replace(temperature=0)
    (request,) = engine_of(llm).submit(array(prompt), params)
    beside(llm, request)
    assert [result(request)] == alone(prompt, params)


def test_sessions(exact: tuple[LLM, Alone], tmp_path: Path) -> None:
    llm, alone = exact
    session = llm.session(random_tokens(50))
    session.generate(PARAMS.replace(exact=False, max_tokens=20))
    fork = session.fork(at=61)
    session.rewind(48)
    session.save(tmp_path / "state")
    restored = llm.load_session(tmp_path / "state")
    for one in (session, fork, restored):
        before = one.tokens
        found = one.generate(PARAMS).outputs[0]
        ((tokens, *_),) = alone(before, PARAMS)
        assert found.token_ids == tokens
        assert one.tokens == before + tokens
        one.generate(PARAMS.replace(exact=False, max_tokens=3))
    for one in (session, fork, restored):
        one.close()


def test_exact_prefixes_are_shared_by_exact_requests(exact: tuple[LLM, Alone]) -> None:
    llm, alone = exact
    prompt = random_tokens(90)
    ((tokens, *_),) = alone(prompt, PARAMS)
    for params, cached in ((PARAMS.replace(exact=False), 0), (PARAMS, 0), (PARAMS, 64)):
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.num_cached_tokens == cached
        assert not params.exact or output.outputs[0].token_ids == tokens


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "[a-f]{20,40}"},
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    ],
)
def test_grammars(monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]) -> None:
    know_their_batch(monkeypatch)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=24, structured_outputs=form, exact=True, stop=["ff"])
    options: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "kv_cache_memory": "16MiB", "max_model_len": 256}
    texts = []
    with LLM("tiny-python", **options) as llm:
        prompts = ["def area(width, height):", "x = ", "import"]
        texts.append([llm.generate(prompt, params)[0].outputs[0].text for prompt in prompts])
        others = [params.replace(exact=False, seed=seed) for seed in range(3)]
        texts.append([one.outputs[0].text for one in llm.generate([*prompts, *prompts], [params] * 3 + others)[:3]])
        assert_empty(llm)
    assert texts[0] == texts[1]


def test_a_request_that_ends_leaves_nothing(exact: tuple[LLM, Alone]) -> None:
    llm, _ = exact
    engine = engine_of(llm)
    for steps in (1, 2, 3, 6):
        engine.submit(array(random_tokens(20)), PARAMS, request_id="ends")
        for _ in range(steps):
            engine.step()
        engine.cancel("ends")
        engine.step()
        check(llm)
        assert not engine.has_work
    (request,) = engine.submit(array(random_tokens(20)), PARAMS)
    execute = engine.runner.execute

    def fails(step: Step) -> Any:
        if step.chunks and len(step.chunks) == 1 and len(step.chunks[0].tokens) == engine.exact.size:
            raise RuntimeError("no window today")
        return execute(step)

    engine.runner.execute = fails  # type: ignore[method-assign]
    engine.run([request])
    engine.runner.execute = execute  # type: ignore[method-assign]
    assert request.output.finish_reason == "error"
    assert "no window today" in str(request.output.error)


def test_the_end_of_the_context(made: dict[str, Checkpoint], loose: None) -> None:
    options = {"kv_cache_memory": "24KiB", "page_size": 8}  # 96 tokens, no more than a request may have
    alone = Alone(made["llama"], **options)
    with LLM(made["llama"].path, **OPTIONS, **options) as llm:
        prompt, params = random_tokens(70), PARAMS.replace(max_tokens=None)
        (request,) = engine_of(llm).submit(array(prompt), params)
        beside(llm, request)
        assert [result(request)] == alone(prompt, params)
        assert (request.output.finish_reason, len(request.output.token_ids)) == ("length", 27)
    alone.llm.close()


# -- what it costs, and what is refused ------------------------------------------------------------


def test_rows_that_know_no_batch_need_no_window(made: dict[str, Checkpoint]) -> None:
    with LLM(made["llama"].path, **OPTIONS, kv_cache_memory="256KiB") as llm:
        assert any("exact=True costs nothing" in note for note in llm._parts.notes)
        recorder = record(llm)
        llm.generate(random_tokens(9), PARAMS)
        assert recorder.num_tokens == 9 + 44
        assert llm.metrics()["quire:exact_windows_total"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-next"])
def test_a_window_with_a_sink_beside_a_row_does_not_show(made: dict[str, Checkpoint], family: str, dtype: str) -> None:
    """The queries of its session turn twice, and all others as they do alone."""
    options: dict[str, Any] = {"device": "cpu", "kv_cache_memory": "8MiB", "enable_prefix_caching": False}
    with LLM(made[family].path, dtype=dtype, **options) as llm:
        assert any("exact=True costs nothing" in note for note in llm._parts.notes)
        tokens, params = random_tokens(30, seed=1), greedy(6, logprobs=5)
        alone = llm.generate([tokens], params)[0].outputs
        endless = llm.session(random_tokens(60), window=20, sink=2)
        assert llm.generate([tokens, endless], params)[0].outputs == alone


def test_views_of_exact_prefixes(exact: tuple[LLM, Alone]) -> None:
    llm, _ = exact
    llm.generate(random_tokens(40, seed=3), PARAMS)
    assert any(isinstance(entry.key, AdapterKey) for entry in engine_of(llm).cache._entries.values())  # type: ignore[union-attr]
    with llm.session(random_tokens(5)) as session:
        for view in (session.tree(), llm.history(), llm.pages()):
            assert repr(view)
    # Those of one adapter's exact and other prefixes are two trees.
    assert _plain(AdapterKey("", ((0, "f"),))) != _plain(AdapterKey("", ((0, "f"),), exact=True))


def test_windows_are_whole_pages() -> None:
    assert [window_size(page, 2048) for page in (1, 5, 16, 24, 48, 64, 128)] == [32, 35, 32, 48, 48, 64, 32]
    assert [window_size(16, budget) for budget in (1, 7, 16, 20, 31)] == [1, 7, 16, 16, 16]


def test_refusals(exact: tuple[LLM, Alone], made: dict[str, Checkpoint]) -> None:
    llm, _ = exact
    with pytest.raises(Unsupported, match="exact: windows draw from the last token of a prompt on"):
        llm.generate(random_tokens(5), PARAMS.replace(prompt_logprobs=1))
    session = llm.session(random_tokens(20), window=8)
    with pytest.raises(Unsupported, match="exact: the session keeps a window"):
        session.generate(PARAMS)
    session.close()
    session = llm.session(random_tokens(20))
    session.compute()
    session.set_kv(0, start=3, k=session.kv(0)["k"][3:5])
    with pytest.raises(FailedPrecondition, match="exact: the session's state was written into"):
        session.generate(PARAMS)
    session.close()
    engine_of(llm).exact.refusal = "the products of its experts depend on how many rows chose each"
    with pytest.raises(Unsupported, match="exact: the products of its experts"):
        llm.generate(random_tokens(5), PARAMS)
