"""Engines and executors of pipeline stages, and of slices of stages: what two slices can."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.exact import TINY_PYTHON
from tests.ranks import test_ranks as slices
from tests.ranks.test_ranks import GREEDY, LONG, PROMPTS, made, texts, worth  # noqa: F401
from tests.ranks.thread_ranks import thread_ranks  # noqa: F401

from quire import LLM, SamplingParams, build
from quire.base.config import ExecutorConfig, MemoryConfig
from quire.base.errors import CheckpointError, InvalidArgument, Unsupported
from quire.base.segments import BlendParams, Segment
from quire.blend.forward import pieces_of
from quire.build import EXECUTOR_FACTORY
from quire.contracts.executor import PrefillInput
from quire.engine import blending

pytestmark = pytest.mark.usefixtures("thread_ranks")


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with made(1) as llm:
        yield llm


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(
    scope="module",
    params=[pytest.param((1, 3), id="three-stages"), pytest.param((2, 2), id="two-by-two", marks=pytest.mark.slow)],
)
def many(request: pytest.FixtureRequest, thread_ranks: None, kept: Path) -> Iterator[LLM]:  # noqa: F811
    size, stages = request.param
    folder = kept / f"{size}-{stages}"
    options: dict[str, Any] = {"store": (f"file://{folder}/store",), "state_dir": folder / "state"}
    with made(size, pipeline_parallel_size=stages, **options) as llm:
        yield llm


def folder_of(many: LLM, kept: Path) -> Path:
    grid = slices.runner_of(many).ranks.grid
    return kept / f"{grid.slices}-{grid.stages}"


def test_log_probabilities_are_those_of_one_process(one: LLM, many: LLM) -> None:
    slices.test_log_probabilities_are_those_of_one_process(one, many)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.9, seed=7, max_tokens=12, n=3, top_p=0.9),
        SamplingParams(temperature=0, max_tokens=20, structured_outputs={"regex": "[a-z]+: [0-9]{3}"}),
    ],
    ids=["sampled", "grammar"],
)
def test_texts_are_those_of_one_process(one: LLM, many: LLM, params: SamplingParams) -> None:
    assert texts(many, params) == texts(one, params)


def test_decodes_in_turn(one: LLM, many: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage has a group of requests. What one forks or saves meanwhile runs behind them."""
    turns, begun = many.engine.stepper.turns, list[int]()
    assert turns is not None
    monkeypatch.setattr(turns, "_least_rows", 1)
    begin = turns.begin

    def note(scheduled: Any, *given: Any) -> None:
        begin(scheduled, *given)
        begun.append(len(many.engine.stepper.in_flight.turns))

    monkeypatch.setattr(turns, "begin", note)
    prompts = [*PROMPTS, *(f"def f{number}(a, b):" for number in range(5))]
    grammar = SamplingParams(temperature=0, max_tokens=20, structured_outputs={"regex": "[a-z]+: [0-9]{3}"})
    params = [SamplingParams(temperature=0.9, seed=7, max_tokens=9, n=2), grammar, *[GREEDY] * (len(prompts) - 2)]
    found = []
    for llm in (one, many):
        with llm.session(LONG) as session, llm.session(LONG[:120]) as other:
            stream = iter(session.stream(GREEDY))
            requests = [llm.engine.submit(np.array(llm.tokenizer.encode(prompt)), GREEDY)[0] for prompt in prompts[:4]]
            for _ in range(6):
                next(stream)
            with other.fork(at=40) as child:
                answers = [child.generate(GREEDY).outputs[0].token_ids]
            rest = [chunk.token_ids for chunk in stream]
            llm.engine.run(requests)
            answers += [one.output.token_ids for one in requests]
        outputs = llm.generate(prompts, params)
        found.append((answers, rest, [[sample.token_ids for sample in output.outputs] for output in outputs]))
    assert found[1] == found[0]
    assert max(begun) == slices.runner_of(many).ranks.grid.stages


def test_sessions_fork_rewind_and_edit(one: LLM, many: LLM) -> None:
    slices.test_sessions_fork_rewind_and_edit(one, many)


def test_executors(one: LLM, many: LLM) -> None:
    slices.test_executors(one, many)


def test_adapters(one: LLM, many: LLM, tmp_path: Path) -> None:
    slices.test_adapters(one, many, tmp_path)


def test_state_files_know_no_ranks(one: LLM, many: LLM, tmp_path: Path) -> None:
    slices.test_state_files_know_no_ranks(one, many, tmp_path)


def test_rows_are_read_and_written(one: LLM, many: LLM, tmp_path: Path) -> None:
    slices.test_rows_are_read_and_written(one, many, tmp_path)


def test_stores_know_no_ranks(many: LLM, kept: Path, tmp_path: Path) -> None:
    slices.test_stores_know_no_ranks(many, folder_of(many, kept), tmp_path)


def test_embeddings_go_to_all_ranks(one: LLM, many: LLM) -> None:
    slices.test_embeddings_go_to_all_ranks(one, many)


def test_hidden_states_are_of_all_blocks(one: LLM, many: LLM) -> None:
    tokens = torch.arange(20, 50)[None]
    found = [
        llm.executor.prefill(PrefillInput(input_ids=tokens, output_hidden_states=True)).hidden_states
        for llm in (one, many)
    ]
    assert found[0] is not None
    assert found[1] is not None
    assert len(found[0]) == len(found[1]) == 8
    for mine, theirs in zip(found[1], found[0], strict=True):
        # The rounding of another order of sums, as for log-probabilities.
        assert (mine - theirs).abs().max() <= TINY_PYTHON * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("select", ["v", "v_or_question"])
def test_blended_prompts(one: LLM, many: LLM, select: str) -> None:
    slices.test_blended_prompts(one, many, select)


@pytest.mark.parametrize("select", ["v", "v_or_question"])
@pytest.mark.parametrize("check_layer", [4, 7])
def test_any_stage_chooses_rows(
    one: LLM, many: LLM, check_layer: int, select: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stages behind it leave out the same rows, and rank 0 tells which."""
    monkeypatch.setattr(blending, "default_layer", lambda _: check_layer)
    params = BlendParams(ratio=0.3, least=1, gate=False, select=select)
    pieces, found = [Segment(LONG[:150]), Segment(LONG[150:]), "\n\ndef g("], []
    salt = f"{select} {check_layer} {slices.runner_of(many).ranks.grid}"
    for llm in (one, many):
        llm.warm(pieces[:2], cache_salt=salt)
        left_out: list[bool] = []
        with monkeypatch.context() as patch:
            ran = llm.engine.stepper.blending.ran

            def note(scheduled: Any, blend: Any, masks: Any, ran: Any = ran, left: list[bool] = left_out) -> None:
                left.extend(itertools.chain(*(mask.tolist() for mask in masks if mask is not None)))
                ran(scheduled, blend, masks)

            patch.setattr(llm.engine.stepper.blending, "ran", note)
            (output,) = llm.generate([pieces], GREEDY, blend=params, cache_salt=salt)
        found.append((output.outputs[0].token_ids, output.blend, left_out))
    assert found[0][1] is not None
    assert found[0][1].blended > found[0][1].recomputed > 0
    assert any(found[0][2])
    assert found[0] == found[1]


def test_a_stage_that_misses_rows_ends_no_rank(one: LLM, many: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 looks at the rows of all stages before any of them begins."""
    source, lost = slices.runner_of(many).row_sources, []
    pieces = [Segment(LONG[:150]), Segment(LONG[150:]), "\n\ndef g("]
    params = BlendParams(ratio=0.3, least=1, gate=False, select="v")
    many.warm(pieces[:2], cache_salt="lost")

    nothing: Any = SimpleNamespace(pieces=lambda layer: [])

    def some(found: Any, layer: int, chunk: int, one: Any) -> Any:
        lost.append(layer)
        return pieces_of(nothing if layer == 7 else found, layer, chunk, one)

    monkeypatch.setattr("quire.runner.ranks.pieces_of", some)
    (output,) = many.generate([pieces], GREEDY, blend=params, cache_salt="lost")
    assert 7 in lost
    assert output.outputs[0].token_ids == one.generate([pieces], GREEDY)[0].outputs[0].token_ids
    assert not source.sources


def test_drafts_and_preemptions(one: LLM) -> None:
    """State goes out to memory and back; rejected drafts are popped in all stages."""
    options = {"max_model_len": 64, "speculative": "lookup", "host_memory": "8MiB"}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    # A stage's pages are half as large.
    with made(1, pipeline_parallel_size=2, kv_cache_memory="256KiB", **options) as llm:
        found, metrics = texts(llm, params), llm.metrics()
    assert found == texts(one, params)
    assert metrics["quire:num_preemptions_total"] > 0
    assert metrics["quire:store_tokens_loaded_total"] > 0


def test_a_pool_has_as_many_pages_as_its_largest_stage_allows(one: LLM) -> None:
    with made(1, pipeline_parallel_size=2) as llm:
        state, whole = llm.engine.runner.state, one.engine.runner.state
        assert state.num_bytes <= 16 << 20
        assert state.num_pages == 2 * whole.num_pages


def test_executors_of_the_type(one: LLM) -> None:
    config = ExecutorConfig(
        model_info="tiny-python",
        executor_type="PipelineParallel",
        dtype="float32",
        max_sequence_length=64,
        memory_config=MemoryConfig(memory_pool_size="4MiB"),
        executor_options={"pipeline_parallel_size": 2},
    )
    executor = EXECUTOR_FACTORY.create_executor(config)
    capabilities = executor.capabilities()
    assert capabilities.supports_pipeline_parallelism
    assert not capabilities.supports_tensor_parallelism
    assert executor.info().num_parameters == one.executor.info().num_parameters
    tokens = torch.arange(20, 40)[None]
    found, expected = (each.prefill(PrefillInput(input_ids=tokens)).logits for each in (executor, one.executor))
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)
    executor.shutdown()


# -- refusals, before a process is started ---------------------------------------------------------


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a rank was started"))


@pytest.mark.usefixtures("no_process")
def test_more_stages_than_blocks_start_no_process() -> None:
    with pytest.raises(Unsupported, match="pipeline_parallel_size 9: the model has 8 blocks; give as many"):
        made(1, pipeline_parallel_size=9)
    options = {"executor_type": "PipelineParallel", "executor_options": {"pipeline_parallel_size": 9}}
    with pytest.raises(Unsupported, match="the model has 8 blocks"):
        EXECUTOR_FACTORY.create_executor(ExecutorConfig(model_info="tiny-python", **options))
    with pytest.raises(InvalidArgument, match="belongs to executor_type 'PipelineParallel'"):
        ExecutorConfig(model_info="tiny-python", executor_options={"pipeline_parallel_size": 2})


@pytest.mark.usefixtures("thread_ranks")
def test_a_rank_that_sees_another_checkpoint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "checkpoint_mark", lambda path: "another")
    with pytest.raises(CheckpointError, match=r"rank 1 of 2 sees another checkpoint in .* than rank 0"):
        made(1, pipeline_parallel_size=2)
