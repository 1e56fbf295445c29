"""Every step of an engine is pickled and run again in a second process with the same weights. It
computes the same there, to the bit, and leaves the same sequences.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.executor.conftest import prompt, token
from tests.runner.second_process import SECONDS, SecondProcess, Write, found_by, metadata_of, sequences_of
from tests.small_llms import (  # noqa: F401
    BYTES_PER_TOKEN,
    Checkpoint,
    MakeLLM,
    engine_of,
    greedy,
    make_checkpoint,
    make_family,
    make_llm,
    random_tokens,
)
from torch import Tensor

from quire import LLM, BlendParams, SamplingParams, Segment, Unsupported
from quire.base.errors import QuireError
from quire.base.types import Add, Chunk, Fork, Import, Inputs, Load, Overwrite, Remove, Step
from quire.contracts.executor import PrefillInput
from quire.contracts.kv_state import RowPieces
from quire.runner.local import StepOutput
from quire.store.memory import MemoryTier
from quire.store.stack import Store

FAMILIES: dict[str, Callable[[Path], Checkpoint]] = {
    "dense": lambda path: make_checkpoint("llama", path),
    "windowed": lambda path: make_checkpoint("gemma3", path),
    "hybrid": lambda path: make_family("qwen3-next", path),
    "latent": lambda path: make_family("deepseek-v2-lite", path),
}
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 48, "page_size": 8}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    made: dict[str, Checkpoint] = {}

    def checkpoint(family: str) -> Checkpoint:
        if family not in made:
            made[family] = FAMILIES[family](tmp_path_factory.mktemp(family))
        return made[family]

    return checkpoint


@pytest.fixture(scope="module")
def second() -> Iterator[SecondProcess]:
    process = SecondProcess()
    yield process
    process.close()


def follow(llm: LLM, second: SecondProcess) -> list[Step]:
    """From now on run each step there, too, with the rows that it names; return the steps."""
    steps: list[Step] = []
    writes: list[Write] = []
    runner = engine_of(llm).runner
    state: Any = runner.state
    execute, import_rows, import_group = runner.execute, state.import_rows, state.import_page_group

    awaited = threading.Event()

    def rows(seq: int, layer: int, start: int, given: Any) -> None:
        awaited.wait(SECONDS)
        writes.append((seq, layer, start, whole(given)))
        import_rows(seq, layer, start, given)

    def group(seq: int, layer: int, given: Mapping[str, Tensor]) -> None:
        if seq not in runner.files:  # A transfer brings it, and no edit.
            awaited.wait(SECONDS)
            writes.append((seq, layer, None, dict(given)))
        import_group(seq, layer, given)

    def both(step: Step) -> StepOutput:
        copy, kept = pickle.dumps(step), set(runner.logits)
        files = {edit.seq: bytes(runner.files[edit.seq]._view or b"") for edit in step.edits if isinstance(edit, Load)}
        if step.awaited:
            awaited.set()
        try:
            output, error = execute(step), None
        except QuireError as raised:
            output, error = None, raised
        for chunk in () if step.blend is None else step.blend.chunks:
            if chunk is not None:
                source = runner.row_sources.sources[chunk.source]
                layers = {layer: list(source.pieces(layer)) for layer in state.geometry.layer_ids}
                second.ask("rows", chunk.source, layers)
        second.ask("imported", [writes.pop(0) for _ in range(len(writes))])
        answer = second.ask("run", copy, kept, files)
        if output is None:
            assert error is not None
            assert answer == type(error).__name__
            raise error
        found = found_by(runner, step, output)
        assert len(answer) == len(found), answer
        assert all(torch.equal(one, other) for one, other in zip(answer, found, strict=True)), step
        steps.append(step)
        return output

    runner.execute = both  # type: ignore[method-assign]
    state.import_rows, state.import_page_group = rows, group
    return steps


def whole(given: Mapping[str, Tensor] | RowPieces) -> dict[str, Tensor]:
    """Return rows that are given at once or in pieces."""
    if isinstance(given, Mapping):
        return dict(given)
    pieces = [given.piece(number) for number in range(len(given.counts))]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def generate(llm: LLM) -> None:
    """Prompts in pieces, samples that fork, a cached beginning, and steps ahead."""
    shared = random_tokens(30)
    prompts = [[*shared, *random_tokens(count, seed=count)] for count in (3, 20, 55)]
    llm.generate(prompts[:1], SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=9, ignore_eos=True))
    llm.generate(prompts, [greedy(12), greedy(5, logprobs=2), greedy(4, prompt_logprobs=1)])
    engine = engine_of(llm)
    engine.stepper.runs_ahead = engine.sampling.later = True
    llm.generate(prompts, greedy(8))
    engine.stepper.runs_ahead = engine.sampling.later = False


def sessions(llm: LLM) -> None:
    """Turns, forks, rewinds, scores, edits, and the attention of a token."""
    with llm.session(random_tokens(40)) as session:
        session.generate(greedy(6))
        with session.fork(at=25) as child:
            child.append(random_tokens(7))
            child.generate(greedy(3))
        session.rewind(n=4)
        session.score(random_tokens(9, seed=2))
        session.edit((10, 14), random_tokens(5, seed=3))
        session.generate(greedy(2))
        session.token(20)
        layer = next((one for one, spec in enumerate(llm.model.layer_specs) if spec.kind == "full"), None)
        if layer is not None:
            session.attention(20, layer)


def executor(llm: LLM) -> None:
    """Ragged prompts at once and in pieces, a decode, more tokens, drafts, a rewind."""
    ex, ids = llm.executor, [random_tokens(31, seed=row) for row in range(3)]
    mask = torch.tensor([[0] * row + [1] * (31 - row) for row in range(3)])
    for size in (2048, 17):
        ex.prefill_chunk_size = size
        cache = ex.prefill(prompt(*ids, attention_mask=mask)).kv_cache
        cache = ex.decode(token(cache, 3, 4, 5)).kv_cache
        cache = ex.prefill(prompt(*ids, kv_cache=cache)).kv_cache
        cache.cache.release()
    given = PrefillInput(input_ids=torch.tensor(ids[:1]), output_hidden_states=True)
    cache = ex.prefill(given).kv_cache
    output = ex.speculative_decode(token(cache, 7), random_tokens(4), 0.5)
    ex.decode(token(ex.truncate_kv(output.kv_cache, 31), 8))


def blended(llm: LLM) -> None:
    """Documents whose cached rows stand at other positions."""
    documents = [random_tokens(40, seed=10 + one) for one in range(3)]
    segments = [Segment(one) for one in documents]
    llm.warm(segments)
    order = [segments[2], segments[0], segments[1], random_tokens(9)]
    llm.generate([order], greedy(3), blend=BlendParams(ratio=0.3, least=8, keep=False))


def restored(llm: LLM) -> None:
    """A prompt whose state has left the pool, and comes back layer by layer while its step runs."""
    engine, tokens = engine_of(llm), random_tokens(70)
    stored = engine.stored
    stored.store = Store([MemoryTier(1 << 30)])
    stored.least, stored.is_worth, stored.keys.layout.chunk = 1, lambda *_: True, 8
    llm.generate(tokens, greedy(3))
    while engine.runner.room.make():
        pass
    llm.generate(tokens, greedy(3))


def preempted(llm: LLM) -> None:
    """More sequences than the pool holds until the end."""
    llm.generate([random_tokens(24, seed=one) for one in range(8)], greedy(60))
    assert engine_of(llm).scheduler.num_preemptions


def written(llm: LLM) -> None:
    """Rows and states that a user writes, in a session that shares its pages."""
    with llm.session(random_tokens(40)) as session, session.fork() as other:
        for layer, spec in enumerate(llm.model.layer_specs):
            found = {name: one for name, one in other.kv(layer).items() if name != "positions"}
            changed = {name: one[-3:] + 1 if spec.kind != "recurrent" else one * 2 for name, one in found.items()}
            other.set_kv(layer, start=0 if spec.kind == "recurrent" else 37, **changed)
        other.generate(greedy(3))
        session.generate(greedy(3))


def loaded(llm: LLM) -> None:
    """State files of a session and of a KV cache."""
    with llm.session(random_tokens(40)) as session:
        session.generate(greedy(3))
        data = session.to_bytes()
    with llm.session_from_bytes(data) as session:
        session.generate(greedy(3))
    ex = llm.executor
    cache = ex.prefill(prompt(random_tokens(20), random_tokens(20, seed=1))).kv_cache
    data = cache.cache.serialize()
    cache.cache.release()
    other = ex.create_kv_cache(batch_size=2)
    other.load(data)
    other.release()


def features(llm: LLM) -> None:
    """Outputs of blocks, as heads read them: of a prompt's parts beside a decode."""
    runner, last = engine_of(llm).runner, len(llm.model.blocks) - 1
    one, two = runner.new_seq(), runner.new_seq()
    runner.execute(Step(edits=(Add(one), Add(two)), chunks=(Chunk(one, random_tokens(9)),)))
    chunks = Chunk(one, [3]), Chunk(two, random_tokens(20), logits="none")
    output = runner.execute(Step(chunks=chunks, inputs=Inputs(features=(last, 0))))
    assert [part.shape[0] for part in output.features] == [21, 21]
    runner.execute(Step(edits=(Remove(one), Remove(two))))


SCENARIOS = {
    one.__name__: one for one in (generate, preempted, sessions, written, loaded, executor, blended, restored, features)
}
POOL = {"preempted": 320}
"""Tokens of the pool by scenario, where it is no large one."""


HELD: dict[str, list[Callable[[Step], object]]] = {
    "generate": [lambda step: len(step.chunks) > 1, lambda step: step.inputs.drawn is not None],
    "preempted": [lambda step: any(isinstance(edit, Remove) for edit in step.edits)],
    "sessions": [lambda step: any(isinstance(edit, Fork) for edit in step.edits)],
    "written": [lambda step: any(isinstance(edit, Overwrite) for edit in step.edits)],
    "loaded": [lambda step: any(isinstance(edit, Load) for edit in step.edits)],
    "executor": [lambda step: step.inputs.places, lambda step: step.inputs.hidden_states],
    "blended": [lambda step: step.blend],
    "features": [lambda step: step.inputs.features],
    "restored": [lambda step: step.awaited, lambda step: any(isinstance(edit, Import) for edit in step.edits)],
}
"""What some step of a scenario has."""


@pytest.mark.product(4)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_run_in_another_process(
    family: str,
    scenario: str,
    families: Callable[[str], Checkpoint],
    second: SecondProcess,
    make_llm: MakeLLM,  # noqa: F811
) -> None:
    options = {**OPTIONS, "kv_cache_memory": POOL.get(scenario, 2048) * BYTES_PER_TOKEN}
    path = families(family).path
    llm = make_llm(path, **options)
    second.ask("open", str(path), options)
    steps = follow(llm, second)
    try:
        SCENARIOS[scenario](llm)
    except Unsupported:
        assert (family, scenario) == ("hybrid", "blended")
        return
    assert second.ask("sequences") == sequences_of(engine_of(llm).runner)
    assert second.ask("metadata") == metadata_of(engine_of(llm).runner)
    assert all(any(map(held, steps)) for held in HELD[scenario])
