"""Rows of models on CPUs: the same to the bit in any batch and any division of a prompt, where C++
computes all that may depend on a row's place; and what is said of other models.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models import conftest as dense_families
from tests.models.conftest import Case
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
from quire.ops.rows import REFERENCE_ROWS
from quire.runner.local import LocalRunner
from quire.runner.row_dependence import row_dependence

LENGTHS = (37, 1, 140, 8)
ODD = {"hidden_size": 36, "intermediate_size": 52, "head_dim": 8}
"""Widths of rows whose last values PyTorch computes otherwise, if they end a tensor."""
DENSE = (
    *("gemma2", "gemma2-biases-untied", "gemma3", "gemma3-ropes", "olmo2"),
    *("granite", "granite-biases", "glm4"),
)
HYBRIDS = (
    *("mamba2", "bamba", "bamba-biases", "lfm2", "lfm2-biases-untied", "lfm3", "qwen3.5"),
    *("granite-4-dense", "falcon-h1", "falcon-h1-normed", "falcon-h1-biases-plain"),
    *("granite-4", "qwen3-next"),
)


@pytest.fixture(autouse=True)
def _needs_the_library() -> None:
    if problem := native_problem():
        pytest.skip(problem)


def loaded(path: Path, dtype: str) -> LoadedModel:
    return load_model(path, dtype=dtype, kernels=layer_kernels(torch.device("cpu")))


def state_of(model: LoadedModel) -> State:
    pages = any(not isinstance(spec, Recurrent) for spec in model.layer_specs)
    states = any(isinstance(spec, Recurrent) for spec in model.layer_specs)
    return State(
        model.layer_specs,
        capacity=1024 if pages else None,
        num_states=40 if states else None,
        ring=1 if states else 0,
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
@pytest.mark.parametrize("name", [*HYBRIDS, *DENSE])
def test_rows_are_the_same_in_any_batch(name: str, dtype: str, tmp_path: Path) -> None:
    if name in DENSE:
        case = next(one for one in dense_families.CASES if one.name == name)
        path = dense_families.make_checkpoint(Case(name, case.family, {**case.changes, **ODD}), tmp_path).path
    else:
        case = named(name)
        odd = ODD if name in ("falcon-h1", "falcon-h1-normed") else {}
        path = make_checkpoint(Case(name, case.family, {**case.changes, **odd}), tmp_path).path
    model = loaded(path, dtype)
    assert row_dependence(model, state_of(model)) == ""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, model.vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]
    alone = [logits_of(model, [prompt], [[len(prompt)]])[0] for prompt in prompts]
    cuts = [[5, 6, 7, 37], [1], [64, 65, 100, 140], [1, 2, 3, 4, 5, 6, 7, 8]]
    for found, expected in zip(logits_of(model, prompts, cuts), alone, strict=True):
        assert torch.equal(found, expected)


def test_what_pytorch_computes_is_named(tmp_path: Path) -> None:
    model = loaded(make_checkpoint(named("mamba2-gelu-narrow"), tmp_path).path, "float32")
    assert "Mamba2Mixer" in row_dependence(model, state_of(model))


@pytest.mark.parametrize(("name", "part"), [("qwen3.5", "GatedAttention"), ("lfm3", "HeadGatedAttention")])
def test_gates_that_pytorch_computes_are_named(name: str, part: str, tmp_path: Path) -> None:
    model = loaded(make_checkpoint(named(name), tmp_path).path, "float32")
    assert row_dependence(model, state_of(model)) == ""
    for block in model.blocks:
        if hasattr(block.attention, "row_kernels"):  # type: ignore[attr-defined]
            block.attention.row_kernels = REFERENCE_ROWS  # type: ignore[attr-defined]
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
