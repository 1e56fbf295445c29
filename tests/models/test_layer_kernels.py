"""Every family with the C++ kernels and without them: the same greedy tokens in float32."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.base.types import Add, Chunk, Step
from quire.contracts.block_calls import LayerKernels
from quire.contracts.layers import Recurrent
from quire.contracts.rows import RowKernels
from quire.kernels.attention.cpu_attention import NativeAttention
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kernels.block import native_blocks
from quire.kernels.linear.cpu_linear import EMULATED, NativeLinear, native_linear
from quire.kernels.native_library import NativeLibrary, native_library, native_problem
from quire.kernels.recurrence.chunked import ChunkedRecurrence
from quire.kernels.recurrence.cpu_recurrence import native_mixers
from quire.kernels.rows.cpu_rows import NativeRows, native_rows
from quire.kv.state import State
from quire.models.loading import load_model
from quire.runner.local import LocalRunner

from . import test_deepseek, test_moe_families, test_recurrent_families
from .conftest import Case, TinyCheckpoint

PROMPTS = ([5, 9, 60, 3, 8, 8, 31, 44, 2, 70, 11, 12], [7], [90, 1, 33])
DECODES = 14
OWN_NORMS = ("Olmo2", "StableLm", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
"""Families some of whose heads have norms, or gates, of another kind; then q, k and v are apart."""
LAYER_NORMS = ("Cohere2", "StableLm")
OTHERS: Sequence[tuple[Any, str]] = (
    (test_moe_families, "mixtral"),
    (test_moe_families, "qwen2-moe-some"),
    (test_moe_families, "qwen3-moe"),
    (test_moe_families, "gpt-oss"),
    (test_deepseek, "v2"),
    (test_deepseek, "v3"),
    (test_recurrent_families, "mamba2"),
    (test_recurrent_families, "bamba"),
    (test_recurrent_families, "falcon-h1"),
    (test_recurrent_families, "granite-4"),
    (test_recurrent_families, "lfm2"),
    (test_recurrent_families, "qwen3-next"),
)


class CountedRows(NativeRows):
    """Kernels that count their calls."""

    def __init__(self, library: NativeLibrary) -> None:
        super().__init__(library)
        self.calls: Counter[str] = Counter()

    def rms_norm(self, *given: Any) -> Tensor:
        self.calls["rms_norm"] += 1
        return super().rms_norm(*given)

    def add_rms_norm(self, *given: Any) -> Tensor:
        self.calls["add_rms_norm"] += 1
        return super().add_rms_norm(*given)

    def gated(self, *given: Any) -> Tensor:
        self.calls["gated"] += 1
        return super().gated(*given)

    def rope_and_write_kv(self, *given: Any) -> Tensor:
        self.calls["rope_and_write_kv"] += 1
        return super().rope_and_write_kv(*given)


@pytest.fixture
def kernels() -> CountedRows:
    found = native_library()
    if found is None:
        pytest.skip(native_problem())
    return CountedRows(found)


def greedy(path: Path, kernels: RowKernels | None) -> tuple[list[list[int]], Tensor]:
    """The tokens of three sequences, decoded together, and the last logits."""
    products = None if kernels is None else native_linear()
    mixers = None if kernels is None else native_mixers()
    model = load_model(path, dtype="float32", kernels=LayerKernels(kernels, products, mixers=mixers))
    recurrent = sum(isinstance(spec, Recurrent) for spec in model.layer_specs)
    state = State(
        model.layer_specs,
        capacity=128 if recurrent < len(model.layer_specs) else None,
        num_states=32 if recurrent else None,
        page_size=4,
        backend=SdpaAttention(),
        recurrence=ChunkedRecurrence(),
        rows=kernels,
    )
    runner = LocalRunner(model, state, torch.device("cpu"))
    edits = tuple(Add(seq) for seq in range(3))
    output = runner.execute(Step(edits=edits, chunks=tuple(map(Chunk, range(3), PROMPTS))))
    tokens = []
    for _ in range(DECODES):
        tokens.append(output.logits_RV.argmax(-1).tolist())
        output = runner.execute(Step(chunks=tuple(Chunk(seq, [token]) for seq, token in enumerate(tokens[-1]))))
    return tokens, output.logits_RV


def check(case: Case, path: Path, kernels: CountedRows) -> None:
    expected, logits = greedy(path, None)
    tokens, found = greedy(path, kernels)
    assert tokens == expected
    # Sums in another order, through up to 7 layers: 840 units in the last place of float32 at 1.
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
    if case.family not in OWN_NORMS and "Deepseek" not in case.family and case.family != "Mamba2":
        assert kernels.calls["rope_and_write_kv"] >= DECODES
    if case.family not in LAYER_NORMS:
        assert kernels.calls["rms_norm"] >= DECODES
    if case.family not in ("GptOss", "FalconH1", "Mamba2"):
        assert kernels.calls["gated"] >= DECODES


@pytest.mark.turns(4)
def test_tokens_of_dense_families(tiny: TinyCheckpoint, kernels: CountedRows) -> None:
    check(tiny.case, tiny.path, kernels)


@pytest.mark.turns(6)
@pytest.mark.parametrize(("module", "name"), OTHERS, ids=lambda given: given if isinstance(given, str) else "")
def test_tokens_of_other_families(module: Any, name: str, tmp_path: Path, kernels: CountedRows) -> None:
    case = next(one for one in module.CASES if one.name == name)
    module.make_checkpoint(case, tmp_path)
    check(case, tmp_path, kernels)


PROMPT = [5, 9, 60, 3, 8, 8, 31, 44, 2, 70, 11, 12, 33, 90, 1, 7, 20, 21, 22, 23, 24]


def logits_of(path: Path, cut: Sequence[int], others: int, joined: bool = True, level: int | None = None) -> Tensor:
    """The last logits of ``PROMPT`` in bfloat16, cut into chunks, beside some other sequences.
    ``joined``: whether whole blocks are one call. ``level``: of the linear maps."""
    library = native_library()
    assert library is not None
    kernels = LayerKernels(native_rows(), NativeLinear(library, level), blocks=native_blocks() if joined else None)
    model = load_model(path, dtype="bfloat16", kernels=kernels)
    state = State(
        model.layer_specs,
        capacity=512,
        page_size=4,
        dtype=torch.bfloat16,
        backend=NativeAttention(),
        rows=kernels.rows,
    )
    runner = LocalRunner(model, state, torch.device("cpu"))
    runner.execute(Step(edits=tuple(Add(seq) for seq in range(others + 1))))
    for start, stop in itertools.pairwise((0, *cut, len(PROMPT))):
        beside = tuple(Chunk(seq, PROMPT[seq % 9 : seq % 9 + 1 + (start + seq) % 3]) for seq in range(1, others + 1))
        output = runner.execute(
            Step(chunks=(*beside[: others // 2], Chunk(0, PROMPT[start:stop]), *beside[others // 2 :]))
        )
    return output.rows(others // 2).clone()


@pytest.mark.turns(8)
@pytest.mark.skipif(native_library() is None, reason="the products are PyTorch's here")
@pytest.mark.parametrize("level", [None, EMULATED])
def test_bfloat16_results_do_not_depend_on_the_batch(tiny: TinyCheckpoint, level: int | None) -> None:
    """To the bit: alone, in pieces, token by token, among other sequences."""
    alone = logits_of(tiny.path, (), 0, joined=False, level=level)
    assert torch.equal(logits_of(tiny.path, (), 0, level=level), alone)
    for cut, others in (((7,), 0), (tuple(range(1, len(PROMPT))), 0), ((), 3), ((4, 5, 18), 6), ((20,), 40)):
        assert torch.equal(logits_of(tiny.path, cut, others, level=level), alone)


@pytest.mark.turns(4)
@pytest.mark.skipif(native_library() is None, reason="the products are PyTorch's here")
@pytest.mark.parametrize(("module", "name"), OTHERS[:4], ids=lambda given: given if isinstance(given, str) else "")
def test_bfloat16_results_of_mixtures_do_not_either(module: Any, name: str, tmp_path: Path) -> None:
    case = next(one for one in module.CASES if one.name == name)
    module.make_checkpoint(case, tmp_path)
    alone = logits_of(tmp_path, (), 0, joined=False)
    assert torch.equal(logits_of(tmp_path, (), 0), alone)
    for cut, others in (((7,), 0), (tuple(range(1, len(PROMPT))), 0), ((), 3), ((4, 5, 18), 6), ((20,), 40)):
        assert torch.equal(logits_of(tmp_path, cut, others), alone), (cut, others)
