"""Rows of models with recurrent layers on CPUs: the same to the bit in any batch and any division
of a prompt, where C++ computes the whole model, and what is said of models where it does not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.test_recurrent_families import make_checkpoint, named
from torch import Tensor

from quire.base.types import Add, Chunk, Fork, Step
from quire.build import layer_kernels
from quire.contracts.layers import Recurrent
from quire.kernels.attention.cpu_attention import NativeAttention
from quire.kernels.native_library import native_problem
from quire.kernels.recurrence.chunked import ChunkedRecurrence
from quire.kv.formats import kv_format
from quire.kv.state import State
from quire.models.families import LoadedModel
from quire.models.loading import load_model
from quire.runner.local import LocalRunner
from quire.runner.row_dependence import row_dependence

LENGTHS = (37, 1, 140, 8)


@pytest.fixture(autouse=True)
def _needs_the_library() -> None:
    if problem := native_problem():
        pytest.skip(problem)


def loaded(path: Path, dtype: str) -> LoadedModel:
    return load_model(path, dtype=dtype, kernels=layer_kernels(torch.device("cpu")))


def state_of(model: LoadedModel) -> State:
    kinds = {isinstance(spec, Recurrent) for spec in model.layer_specs}
    return State(
        model.layer_specs,
        capacity=1024 if False in kinds else None,
        num_states=40 if True in kinds else None,
        ring=1,
        page_size=4,
        format=kv_format("auto", model.dtype),
        device=torch.device("cpu"),
        backend=NativeAttention(),
        recurrence=ChunkedRecurrence(),
        rows=layer_kernels(torch.device("cpu")).rows,
    )


def logits_of(model: LoadedModel, prompts: list[list[int]], cuts: list[list[int]]) -> list[Tensor]:
    """Return the logits of every token of prompts that run together, cut at these places."""
    runner = LocalRunner(model, state_of(model), torch.device("cpu"))
    runner.execute(Step(edits=tuple(Add(seq) for seq in range(len(prompts)))))
    found: list[list[Tensor]] = [[] for _ in prompts]
    for turn in range(max(map(len, cuts))):
        chunks = [
            Chunk(seq, prompt[([0, *ends])[turn] : ends[turn]], logits="all")
            for seq, (prompt, ends) in enumerate(zip(prompts, cuts, strict=True))
            if turn < len(ends)
        ]
        rows = runner.execute(Step(chunks=tuple(chunks))).logits_RV
        for chunk, part in zip(chunks, rows.split([len(chunk.tokens) for chunk in chunks]), strict=True):
            found[chunk.seq].append(part)
    return [torch.cat(one) for one in found]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mamba2", "bamba", "bamba-biases", "lfm2", "lfm2-biases-untied"])
def test_rows_are_the_same_in_any_batch(name: str, dtype: str, tmp_path: Path) -> None:
    model = loaded(make_checkpoint(named(name), tmp_path).path, dtype)
    assert row_dependence(model, state_of(model)) == ""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, model.vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]
    alone = [logits_of(model, [prompt], [[len(prompt)]])[0] for prompt in prompts]
    cuts = [[5, 6, 7, 37], [1], [64, 65, 100, 140], [1, 2, 3, 4, 5, 6, 7, 8]]
    for found, expected in zip(logits_of(model, prompts, cuts), alone, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("qwen3.5", "GatedAttention"),
        ("falcon-h1", "SideBySideBlock"),
        ("mamba2-gelu-narrow", "Mamba2Mixer"),
        ("granite-4-dense", "ScaledBlock"),
    ],
)
def test_what_pytorch_computes_is_named(name: str, part: str, tmp_path: Path) -> None:
    model = loaded(make_checkpoint(named(name), tmp_path).path, "float32")
    assert part in row_dependence(model, state_of(model))


def test_a_fork_leaves_the_states_of_its_parent(tmp_path: Path) -> None:
    """A forward writes slots of its own, never the one that others share."""
    model = loaded(make_checkpoint(named("bamba"), tmp_path).path, "float32")
    state = state_of(model)
    runner = LocalRunner(model, state, torch.device("cpu"))
    runner.execute(Step(edits=(Add(0),), chunks=(Chunk(0, list(range(9))),)))
    recurrent = [layer for layer, spec in enumerate(model.layer_specs) if isinstance(spec, Recurrent)]
    before = [state.parts.recurrent.debug_get(layer, index, 0) for layer in recurrent for index in range(2)]
    first = runner.execute(Step(edits=(Fork(0, 1, 9),), chunks=(Chunk(1, [3, 4]),))).logits_RV
    after = [state.parts.recurrent.debug_get(layer, index, 0) for layer in recurrent for index in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    again = runner.execute(Step(chunks=(Chunk(0, [3, 4]),))).logits_RV
    assert torch.equal(first, again)
