"""Codes of a quantised checkpoint that a kernel multiplies as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM
from quire.contracts.linear import CodeRows, WeightForm
from quire.kernels.native_library import native_library
from quire.models.fingerprint import kept_formats, model_fingerprint
from quire.nn.experts import ExpertLinear
from quire.nn.packed import KernelLinear
from quire.weights.packed import FORMS, unpack
from quire.weights.panels import codes_of, pack_codes
from quire.weights.safetensors_files import SINGLE_FILE

from .conftest import Case, make_checkpoint
from .quantized_writer import Layout, compressed, scheme, section, write_quantized

native = pytest.mark.skipif(native_library() is None, reason="needs the C++ library")
MODEL = Case("kept", "Qwen3", {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2})
EXPERTS = Case(
    "kept-experts",
    "Qwen3Moe",
    {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "hidden_size": 64, "head_dim": 16,
        "num_hidden_layers": 1,
    },
)  # fmt: skip
FORM: dict[int, WeightForm] = {4: "int4", 8: "int8"}
TOKENS = [5, 9, 3, 77, 5, 18, 64, 33, 12, 7, 4, 3]


@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (33, 128), (7, 24)])
def test_codes_go_into_panels_and_back(form: WeightForm, outputs: int, inputs: int) -> None:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    packed = FORMS[form].pack(weight)
    codes, scales = codes_of(packed)
    assert torch.equal(codes.float() * scales.float().repeat_interleave(packed.group, 1), unpack(packed))
    split = outputs // 2
    parts = [
        CodeRows(4 if form == "int4" else 8, packed.group, codes[rows], scales[rows])
        for rows in (slice(0, split), slice(split, outputs))
    ]
    again = pack_codes(parts)
    assert again is not None
    assert again.scales is not None
    assert packed.scales is not None
    assert (again.form, again.outputs, again.inputs, again.group) == (form, outputs, inputs, packed.group)
    assert torch.equal(again.values, packed.values)
    assert torch.equal(again.scales, packed.scales)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [8, 16, 64, 256])
def test_groups_of_other_sizes(bits: int, group: int) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(1 - (1 << bits - 1), 1 << bits - 1, (40, 256), generator=generator).to(torch.int8)
    scales = torch.rand(40, 256 // group, generator=generator).bfloat16().float()
    made = pack_codes([CodeRows(bits, group, codes, scales)])
    assert made is not None
    assert torch.equal(unpack(made), codes.float() * scales.repeat_interleave(group, 1))


def test_what_has_no_place_in_a_form() -> None:
    codes, scales = torch.zeros(32, 64, dtype=torch.int8), torch.ones(32, 1)
    assert pack_codes([CodeRows(8, 64, codes, scales)]) is not None
    lowest = codes.clone()
    lowest[3, 5] = -128
    assert pack_codes([CodeRows(8, 64, lowest, scales)]) is None
    assert pack_codes([CodeRows(4, 64, codes, scales + 1e-5)]) is None
    assert pack_codes([CodeRows(4, 4, codes, scales.repeat(1, 16))]) is None
    assert pack_codes([CodeRows(4, 64, codes, scales), CodeRows(8, 64, codes, scales)]) is None


def scores_of(path: Path, **given: Any) -> tuple[Tensor, Any]:
    with LLM(str(path), **{"dtype": "float32", "kv_cache_memory": "8MiB", **given}) as llm, llm.session() as session:
        session.append(TOKENS[:1])
        scores = session.score(TOKENS[1:])
        return torch.tensor(scores), llm.model


def exactly(path: Path, bits: int, group: int, layout: Layout) -> tuple[Path, Path]:
    """A checkpoint in codes without -128, and one of codes times scales that are not rounded."""
    quantized, plain = write_quantized(
        path, path.parent / f"{bits}-{group}", layout, section("pack-quantized", {"a": scheme(bits, group)})
    )
    stored, values = load_file(quantized / SINGLE_FILE), load_file(plain / SINGLE_FILE)
    for name in [name for name in stored if name.endswith("weight_packed")]:
        module = name.removesuffix("_packed")
        _, columns = stored[f"{module}_shape"].tolist()
        words = stored[name].view(torch.uint8)
        if bits == 8:
            words[words == 0] = 1
        codes = torch.stack((words & 15, words >> 4), -1).flatten(1) if bits == 4 else words
        scales = stored[f"{module}_scale"].float()
        numbers = codes.float()[:, :columns] - (1 << bits - 1)
        values[module] = numbers * scales.repeat_interleave(columns // scales.shape[1], 1)
    save_file(stored, quantized / SINGLE_FILE)
    save_file(values, plain / SINGLE_FILE)
    return quantized, plain


@native
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 16), (8, 32), (8, 0)])
@pytest.mark.parametrize("case", [MODEL, EXPERTS], ids=["dense", "experts"])
def test_a_kept_model_is_the_expanded_one(tmp_path: Path, case: Case, bits: int, group: int) -> None:
    path = make_checkpoint(case, tmp_path / "model").path
    quantized, plain = exactly(path, bits, group, compressed(bits, group))
    wanted, other = scores_of(plain)
    found, model = scores_of(quantized)
    # Float32 products of codes and of numbers add in other orders: thousands of roundings of 2^-24.
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    name = f"int{bits}" + (f" group {group}" if group else "")
    assert kept_formats(model) == [name]
    assert model.expanded == {}
    assert model.parameter_bytes < other.parameter_bytes
    assert model_fingerprint(quantized, model).weights.endswith(f"-blocks:{name}")
    block = model._decoder_blocks[0]
    maps = [block.attention.qkv, block.attention.out]
    if case is EXPERTS:
        assert isinstance(block.mlp.experts.down, ExpertLinear)
        maps += [*block.mlp.experts.gate_up.maps, *block.mlp.experts.down.maps]
    for one in maps:
        assert isinstance(one, KernelLinear)
        assert one.map.weights.form == FORM[bits]
    if case is MODEL and bits == 4:
        # Another quantisation is of the values.
        assert kept_formats(scores_of(quantized, quantization="int8")[1]) == []


@native
@pytest.mark.parametrize(
    ("layout", "group"),
    [
        (compressed(4, 32, zeros=True), scheme(4, 32, symmetric=False)),
        (compressed(4, 32, order=True), scheme(4, 32)),
        (compressed(4, 32, dtype=torch.float16), scheme(4, 32)),
        (compressed(3, 32), scheme(3, 32)),
        (compressed(8, 32), scheme(8, 32)),
    ],
    ids=["zeros", "order", "scales", "bits", "lowest"],
)
def test_what_no_form_holds_is_expanded(tmp_path: Path, layout: Layout, group: dict[str, Any]) -> None:
    path = make_checkpoint(MODEL, tmp_path / "model").path
    quantized, plain = write_quantized(path, tmp_path, layout, section("pack-quantized", {"a": group}))
    found, model = scores_of(quantized)
    # The same float32 products; only the layout of the weights may differ.
    torch.testing.assert_close(found, scores_of(plain)[0], rtol=1e-5, atol=1e-5)
    assert kept_formats(model) == []
    assert model.expanded
