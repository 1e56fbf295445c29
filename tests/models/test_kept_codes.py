"""Codes of a quantised checkpoint that a kernel multiplies as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.adapters.peft_models import make_adapter
from torch import Tensor

from quire import LLM
from quire.base.errors import CheckpointError
from quire.contracts.linear import CodeRows, WeightForm
from quire.contracts.weights import CodedFormat
from quire.kernels.linear.cpu_linear import native_linear
from quire.kernels.native_library import native_library
from quire.models.fingerprint import kept_formats, model_fingerprint
from quire.nn.experts import ExpertLinear
from quire.nn.packed import KernelLinear
from quire.weights.awq import Awq
from quire.weights.code_format import CodeFormat
from quire.weights.gguf_blocks import FLOAT8, NVFP4
from quire.weights.gptq import Gptq
from quire.weights.integer_codes import IntegerCodes
from quire.weights.lazy_parameters import LazyParameters
from quire.weights.nvfp4 import COMPRESSED_TENSORS, MODELOPT
from quire.weights.packed import FORMS, unpack
from quire.weights.panels import codes_of, pack_codes
from quire.weights.safetensors_files import SINGLE_FILE
from quire.weights.scaled_float8 import ScaledFloat8

from . import test_quantized
from .conftest import Case, make_checkpoint
from .quantized_writer import Layout, awq, compressed, float8, gptq, nvfp4, scheme, section, write_quantized
from .test_quantized import AWQ, FLOAT, FP8, GPTQ

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
def test_adapters_over_codes(tmp_path: Path) -> None:
    tiny = make_checkpoint(MODEL, tmp_path / "model")

    def soften(model: Any) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(0.3)

    directory = tmp_path / "adapter"
    make_adapter(tiny.path, directory, tiny.model, soften, target_modules=["q_proj", "down_proj"])
    paths, found = exactly(tiny.path, 4, 32, compressed(4, 32)), []
    for path in paths:
        with LLM(str(path), dtype="float32", kv_cache_memory="8MiB", adapters={"mine": directory}) as llm:
            for adapter in ("mine", None):
                with llm.session(TOKENS[:1], adapter=adapter) as session:
                    found.append(torch.tensor(session.score(TOKENS[1:])))
            assert bool(kept_formats(llm.model)) == (path == paths[0])
    # As without an adapter: float32 products of codes and of numbers add in other orders.
    torch.testing.assert_close(found[0], found[2], rtol=1e-4, atol=1e-4)
    assert float((found[0] - found[1]).abs().max()) > 0.01


@native
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["awq", "gptq-4", "zeros", "lowest"])
def test_scales_that_are_not_finite_are_refused_where_codes_are_kept(tmp_path: Path, name: str, value: float) -> None:
    layout, given, _, _ = LAYOUTS[name]
    quantized, _ = write_quantized(make_checkpoint(MODEL, tmp_path / "model").path, tmp_path, layout, given)
    stored = load_file(quantized / SINGLE_FILE)
    scales = next(one for one in stored if one.startswith("model.layers.1.mlp.gate_proj") and "scale" in one)
    stored[scales].view(-1)[1] = value
    save_file(stored, quantized / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"gate_proj.weight has a scale of {value}; expected finite scales"):
        scores_of(quantized)


ORDERED = section("pack-quantized", {"a": scheme(4, 32)})
ASYMMETRIC = section("pack-quantized", {"a": scheme(4, 32, symmetric=False)})
LAYOUTS: dict[str, tuple[Layout, dict[str, Any], str, CodedFormat]] = {
    "awq": (awq(32), AWQ, "Q5_0", Awq(32)),
    "gptq-4": (gptq(4, 32), GPTQ, "Q5_0", Gptq(4, 32)),
    "gptq-4-v2": (gptq(4, 64, less_one=False), {**GPTQ, "checkpoint_format": "gptq_v2", "group_size": 64}, "Q5_0", Gptq(4, 64, False)),
    "gptq-4-order": (gptq(4, 32, order=True), {**GPTQ, "desc_act": True}, "Q5_0", Gptq(4, 32, has_order=True)),
    "gptq-2": (gptq(2, 32), {**GPTQ, "bits": 2}, "Q4_0", Gptq(2, 32)),
    "zeros": (compressed(4, 32, zeros=True), ASYMMETRIC, "Q5_0", IntegerCodes(4, 32, True, has_zeros=True)),
    "order": (compressed(4, 32, order=True), section("pack-quantized", {"a": scheme(4, 32)}), "int4", IntegerCodes(4, 32, True, has_order=True)),
    "float16": (compressed(4, 32, dtype=torch.float16), section("pack-quantized", {"a": scheme(4, 32)}), "Q4_0", IntegerCodes(4, 32, True)),
    "3 bits": (compressed(3, 32), section("pack-quantized", {"a": scheme(3, 32)}), "Q4_0", IntegerCodes(3, 32, True)),
    "lowest": (compressed(8, 32), section("pack-quantized", {"a": scheme(8, 32)}), "Q8_0", IntegerCodes(8, 32, True)),
    "float8 32x64": (float8((32, 64)), {**FP8, "weight_block_size": [32, 64]}, FLOAT8, ScaledFloat8("_scale_inv", (32, 64))),
    "float8 24x96": (float8((24, 96)), {**FP8, "weight_block_size": [24, 96]}, FLOAT8, ScaledFloat8("_scale_inv", (24, 96))),
    "float8": (float8(None), {**FP8, "weight_block_size": None}, FLOAT8, ScaledFloat8("_scale_inv")),
    "float8 tensor": (float8(None, scalar=True), {**FP8, "weight_block_size": None}, FLOAT8, ScaledFloat8("_scale_inv")),
    "nvfp4": (nvfp4(divides=True), test_quantized.NVFP4, NVFP4, COMPRESSED_TENSORS),
    "nvfp4 modelopt": (nvfp4(divides=False), test_quantized.MODELOPT, NVFP4, MODELOPT),
    "float8 rounded": (float8(None, "_scale", dtype=torch.bfloat16), section("float-quantized", {"a": FLOAT}), FLOAT8, ScaledFloat8("_scale", rounds=True)),
}  # fmt: skip
"""With the form of their rows."""


@native
@pytest.mark.parametrize("name", LAYOUTS)
def test_kept_values_are_the_expanded_ones_before_they_are_rounded(name: str) -> None:
    """To the type of the scales: a code of 9 bits times a scale of 11 is exact in float32."""
    layout, _, form, format = LAYOUTS[name]
    tensors, _ = layout("x", 40, 128, torch.Generator().manual_seed(0))
    stored = {one: tensors[one] for one in format.stored("x.weight", (40, 128))}
    rows, kernel = format.code_rows("x", stored, (40, 128)), native_linear()
    assert rows is not None
    assert kernel is not None
    made = kernel.pack_codes([rows], None, torch.float32)
    assert made is not None
    assert form == (made.weights.form if form.startswith("int") else made.weights.kinds[0][0])
    wanted = torch.empty(40, 128)
    format.expand("x", stored, wanted)
    rounds = {NVFP4: torch.bfloat16 if format is COMPRESSED_TENSORS else torch.float32}
    assert torch.equal(unpack(made.weights).to(rounds.get(form, rows.scales_Rg.dtype)).float(), wanted)
    # Sums of 128 terms in float32, each within half a unit of the sum of absolute terms.
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    off = made(x).double() - x.double() @ unpack(made.weights).double().T
    assert (off.abs() <= x.abs() @ unpack(made.weights).abs().T * 128 * 2.0**-24).all()


def unrounded(self: CodeFormat, name: str, stored: Mapping[str, Tensor], out: Tensor) -> None:
    made = self.code_rows(name, stored, tuple(out.shape))
    assert made is not None
    values = made.codes_RI.float() * made.scales_Rg.float().repeat_interleave(made.group, 1)
    out[:, slice(None) if made.order_I is None else made.order_I] = values


@native
@pytest.mark.parametrize("name", ["float8 32x64", "float8", "float8 tensor", "nvfp4 modelopt"])
@pytest.mark.parametrize("case", [MODEL, EXPERTS], ids=["dense", "experts"])
def test_models_in_floats_are_kept(tmp_path: Path, name: str, case: Case) -> None:
    layout, given, _, format = LAYOUTS[name]
    if format is MODELOPT:
        case = replace(case, changes={**case.changes, "intermediate_size": 128, "moe_intermediate_size": 64})
    path = make_checkpoint(case, tmp_path / "model").path
    quantized, plain = write_quantized(path, tmp_path, layout, given)
    found, model = scores_of(quantized)
    assert kept_formats(model) == [format.name]
    assert model.expanded == {}
    wanted, other = scores_of(plain)
    # Two float32 forwards of the same weights.
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert model.parameter_bytes < other.parameter_bytes


@native
@pytest.mark.parametrize("kept", [True, False])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, kept: bool) -> None:
    layout, given, _, _ = LAYOUTS["float8"]
    quantized, _ = write_quantized(make_checkpoint(MODEL, tmp_path / "model").path, tmp_path, layout, given)
    stored = load_file(quantized / SINGLE_FILE)
    stored["model.layers.1.mlp.gate_proj.weight"].view(torch.uint8)[3, 5] = 0xFF
    save_file(stored, quantized / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"gate_proj.weight has a weight that is no number; the file is damaged"):
        scores_of(quantized, **({} if kept else {"quantization": "int8"}))


@native
@pytest.mark.parametrize("name", ["awq", "gptq-4-order", "gptq-2"])
@pytest.mark.parametrize("case", [MODEL, EXPERTS], ids=["dense", "experts"])
def test_models_of_other_layouts_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, case: Case
) -> None:
    layout, given, _, format = LAYOUTS[name]
    path = make_checkpoint(case, tmp_path / "model").path
    quantized, _ = write_quantized(path, tmp_path, layout, given)
    found, model = scores_of(quantized)
    assert kept_formats(model) == [format.name]
    assert model.expanded == {}
    monkeypatch.setattr(CodeFormat, "expand", unrounded)
    monkeypatch.setattr(LazyParameters, "stored", lambda *_: [])
    # Two float32 forwards of the same weights.
    torch.testing.assert_close(found, scores_of(quantized)[0], rtol=1e-4, atol=1e-4)


@native
@pytest.mark.parametrize(
    ("layout", "given"),
    [
        (compressed(4, 16, zeros=True), section("pack-quantized", {"a": scheme(4, 16, symmetric=False)})),
        (compressed(4, 32, dtype=torch.float32), section("pack-quantized", {"a": scheme(4, 32)})),
        (compressed(8, 32, zeros=True), section("pack-quantized", {"a": scheme(8, 32, symmetric=False)})),
        (compressed(4, 32, order=True), ORDERED),
    ],
    ids=["groups", "scales", "range", "orders"],
)
def test_what_no_form_holds_is_expanded(tmp_path: Path, layout: Layout, given: dict[str, Any]) -> None:
    """Groups of 16 with zeros; scales that are no 16-bit floats; codes of 9 bits; fused maps that
    order their inputs each in its own way."""
    path = make_checkpoint(MODEL, tmp_path / "model").path
    quantized, plain = write_quantized(path, tmp_path, layout, given)
    found, model = scores_of(quantized)
    assert model.expanded
    if given is ORDERED:  # the other maps are kept, and not rounded
        assert kept_formats(model) == ["int4 group 32"]
    else:
        # The same float32 products; only the layout of the weights may differ.
        torch.testing.assert_close(found, scores_of(plain)[0], rtol=1e-5, atol=1e-5)
        assert kept_formats(model) == []
