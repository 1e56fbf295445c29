"""Products with the blocks of GGUF files in Triton, against their values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import triton_machine
from tests.models.conftest import Case, make_checkpoint
from tests.models.gguf_writer import write_gguf
from torch import Tensor

from quire import LLM, build
from quire.base.errors import CheckpointError, InvalidArgument
from quire.contracts.block_calls import LayerKernels
from quire.contracts.linear import BlockRows, CodeRows
from quire.kernels.linear.triton_blocks import FEW, MANY, TritonBlocks, TritonMap, TritonStack
from quire.models.decoder import Decoder
from quire.models.fingerprint import kept_formats
from quire.weights import lazy_parameters
from quire.weights.block_panels import KINDS
from quire.weights.gguf_blocks import NVFP4, SIZES
from quire.weights.packed import multiply, unpack

from .test_native_blocks import rows_of_blocks, values_of

pytestmark = triton_machine.needs_triton
DEVICE = triton_machine.DEVICE
SINGLE = 2.0**-24


def made(parts: Sequence[BlockRows], inputs: int, bias: Tensor | None = None) -> TritonMap:
    found = TritonBlocks(DEVICE).pack_blocks(parts, inputs, bias, torch.float32)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_format(kind: str) -> None:
    """To the bit, as rows and as factors of ones; scales of all sizes and zero are among them."""
    inputs = SIZES[kind][0] * 2
    parts = [rows_of_blocks(kind, 18, inputs)]
    wanted = values_of(parts, inputs)
    found = made(parts, inputs)
    assert torch.equal(unpack(found.weights).cpu(), wanted)
    some = torch.tensor([17, 0, 5, 5])
    assert torch.equal(found.rows(some.to(DEVICE)).cpu(), wanted[some])
    columns = torch.tensor([0, 1, 15, 16, 31, 32, inputs - 33, inputs - 1])
    ones = torch.eye(inputs)[columns]
    assert torch.equal(found(ones.to(DEVICE)).cpu(), wanted[:, columns].T)


def near(found: Tensor, x: Tensor, wide: Tensor, bias: Tensor | float = 0.0) -> None:
    """Sums of float32 err by half a unit of the sum of absolute terms for each term, at most."""
    exact = x.double() @ wide.double().T + bias
    bound = (x.double().abs() @ wide.double().abs().T + abs(bias)) * (x.shape[1] + 2) * SINGLE
    assert ((found.cpu().double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("rows", [1, FEW + 1, MANY + 1])
def test_products_of_parts_in_several_formats(rows: int) -> None:
    """Neighbours of one format are one part; the last tile of rows and outputs is not full."""
    parts = [rows_of_blocks(kind, count, 256, count) for kind, count in (("Q4_K", 20), ("Q4_K", 5), ("Q6_K", 67))]
    bias = torch.randn(92)
    multiplied = made(parts, 256, bias.to(DEVICE))
    assert multiplied.weights.kinds == (("Q4_K", 25), ("Q6_K", 67))
    x = torch.randn(rows, 300)[:, 20:276]
    found = multiplied(x.to(DEVICE))
    near(found, x, values_of(parts, 256), bias)
    near(multiply(x.to(DEVICE), multiplied.weights, bias.to(DEVICE)), x, values_of(parts, 256), bias)
    assert multiplied(x[:0].to(DEVICE)).shape == (0, 92)
    wanted = torch.tensor([24, 91, 25, 0])
    assert torch.equal(multiplied.rows(wanted.to(DEVICE)).cpu(), values_of(parts, 256)[wanted])
    assert multiplied.rows(wanted[:0].to(DEVICE)).shape == (0, 256)


@pytest.mark.parametrize("counts", [[0, 3, 0, 1, 17], [5, 0, 0, 0, 0], [0, 0, 0, 0, 0], [40, 70, 0, 90, 200]])
def test_stacks(counts: list[int]) -> None:
    """Each map multiplies its own rows, however few; the device alone knows where they end."""
    kernel = TritonBlocks(DEVICE)
    parts = [[rows_of_blocks("Q5_0", 9, 64, seed), rows_of_blocks(NVFP4, 24, 64, seed)] for seed in range(5)]
    maps = [made(some, 64) for some in parts]
    stack = kernel.join(maps)
    assert stack is not None
    assert [one.form for one in stack.weights] == ["rows"] * 5
    ends = torch.tensor(counts).cumsum(0).int()
    x = torch.randn(sum(counts), 64)
    found = stack(x.to(DEVICE), ends.to(DEVICE)).cpu()
    start = 0
    for some, end in zip(parts, ends.tolist(), strict=True):
        near(found[start:end], x[start:end], values_of(some, 64))
        start = end


def test_codes_with_zeros_and_another_order() -> None:
    """As blocks of Q5_0, which hold codes of 4 bits less a zero."""
    codes = torch.randint(-15, 16, (24, 64), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scales, order = torch.rand(24, 2).half(), torch.randperm(64)
    found = TritonBlocks(DEVICE).pack_codes([CodeRows(4, 32, codes, scales, order)], None, torch.float32)
    assert found is not None
    assert found.weights.kinds == (("Q5_0", 24),)
    wide = torch.empty(24, 64)
    wide[:, order] = codes.float() * scales.float().repeat_interleave(32, 1)
    assert torch.equal(unpack(found.weights).cpu(), wide)
    x = torch.randn(2, 64)
    near(found(x.to(DEVICE)), x, wide)


def test_what_is_not_joined() -> None:
    kernel = TritonBlocks(DEVICE)
    one, other = made([rows_of_blocks("Q5_0", 8, 64)], 64), made([rows_of_blocks("Q8_0", 8, 64)], 64)
    assert kernel.join([one, one]) is not None
    assert kernel.join([one, other]) is None


def test_what_is_not_kept() -> None:
    kernel, eight = TritonBlocks(DEVICE), rows_of_blocks("Q8_0", 32, 64)
    assert kernel.pack_blocks([eight], 64, None, torch.float16) is None
    assert kernel.pack_blocks([eight], 64, None, torch.float64) is None
    other = BlockRows("x", "Q8_1", torch.zeros(32, 40, dtype=torch.uint8))
    assert kernel.pack_blocks([eight, other], 64, None, torch.float32) is None
    assert kernel.lossless(torch.ones(32, 32)) is None
    with pytest.raises(InvalidArgument, match="are of blocks of GGUF files, not of int8 weights"):
        kernel.pack(torch.ones(32, 32), None, "int8")
    with pytest.raises(InvalidArgument, match=r"of torch\.float32 activations; x is torch\.float16"):
        made([eight], 64)(torch.ones(1, 64, dtype=torch.float16, device=DEVICE))


@pytest.mark.parametrize(
    ("kind", "place"), [("Q8_0", 0), ("Q5_1", 2), ("Q3_K", 108), ("Q4_K", 2), ("Q6_K", 208), ("MXFP4", 0), (NVFP4, 2)]
)
def test_scales_that_are_no_numbers_are_refused(kind: str, place: int) -> None:
    part = rows_of_blocks(kind, 32, 256)
    bad = {"MXFP4": [253, 0x77], NVFP4: [0, 0x7F]}.get(kind, [0, 0x7C])
    part.rows_RB[3, place : place + 2] = torch.tensor(bad, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"x has a scale in .* that is not finite"):
        made([part], 256)


# -- whole models ----------------------------------------------------------------------------------

SIZES_OF = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "vocab_size": 128, "num_hidden_layers": 1}
FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = (
    Case("triton-tied", "Qwen2", {**SIZES_OF, "tie_word_embeddings": True}),
    Case("triton-experts", "Qwen3Moe", {**SIZES_OF, **FOUR}),
    Case("triton-shared", "Qwen2Moe", {**SIZES_OF, **FOUR, "shared_expert_intermediate_size": 32}),
)
KIND_OF = {
    "attn_q": "Q5_0",
    "attn_v": "Q8_0",
    "attn_output": "NVFP4",
    "gate_exps": "Q5_0",
    "ffn_down.": "F16",
    "ffn_up_exps": "Q4_1",
}
"""Beside one matrix that the file has as floats; Q4_0 otherwise."""


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_a_kept_model_is_the_expanded_one(case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where matrices have no memory until they are packed, as on a GPU."""
    file = write_gguf(make_checkpoint(case, tmp_path / "model").path, tmp_path / "x.gguf", "Q4_0", kinds=KIND_OF)
    monkeypatch.setattr(lazy_parameters, "untouched", lambda device: False)
    found = []
    for linear in (None, TritonBlocks(DEVICE)):
        monkeypatch.setattr(build, "layer_kernels", lambda *_, linear=linear: LayerKernels(None, linear))
        with LLM(str(file), device=DEVICE.type, dtype="float32", kv_cache_memory="4MiB", max_model_len=64) as llm:
            kept = kept_formats(llm.model)
            with llm.session() as session:
                session.append([5])
                found.append(torch.tensor(session.score([9, 3, 77, 5])))
            assert isinstance(llm.model, Decoder)
            table = llm.model.embedding.plain_weight()
            if linear is None:
                size, wanted = llm.model.parameter_bytes, table.clone()
                assert kept == []
                continue
            assert {"Q4_0", "Q5_0", "Q8_0", NVFP4} <= set(kept)
            assert torch.equal(table, wanted)
            assert llm.model.parameter_bytes < size * 0.5
            mlp: Any = llm.model.blocks[0].mlp
            if "experts" in case.name:
                assert isinstance(mlp.experts.down.stack, TritonStack)
                assert mlp.experts.gate_up.can_group()
    # Two float32 forwards of sums of at most 128 terms, whose scores are a few units large.
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=256 * SINGLE)
