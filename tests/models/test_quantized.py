"""Quantised safetensors checkpoints: their values, and the refusal of damaged ones."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from quire import LLM, SamplingParams
from quire.base.errors import CheckpointError, QuireError, Unsupported
from quire.base.progress import Bar
from quire.build import expanded_weights
from quire.models.families import family_of
from quire.models.fingerprint import model_fingerprint
from quire.models.loading import load_model
from quire.models.quantized import read_quantized, without_section
from quire.models.sources import open_weights, read_config
from quire.weights import scales
from quire.weights.checkpoint import Checkpoint
from quire.weights.lazy_parameters import LazyParameters
from quire.weights.places import expand
from quire.weights.safetensors_files import SINGLE_FILE

from .conftest import Case, make_checkpoint
from .quantized_writer import (
    Layout,
    awq,
    compressed,
    float8,
    gptq,
    nf4,
    nvfp4,
    scheme,
    section,
    write_quantized,
)

MODEL = Case("quantised", "Qwen3", {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2})
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SMALL_BLOCKS = {**FP8, "weight_block_size": [40, 24]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
NVFP4 = section(
    "nvfp4-pack-quantized",
    {"a": scheme(4, 16, kind="float", format="nvfp4-pack-quantized", strategy="tensor_group")},
)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
FLOAT = scheme(8, 0, kind="float", format="float-quantized")
LAYOUTS: Mapping[str, tuple[Layout, Mapping[str, Any], str]] = {
    "fp8-blocks": (float8((128, 128)), FP8, "float8 128x128"),
    "fp8-blocks-that-do-not-divide": (float8((40, 24)), SMALL_BLOCKS, "float8 40x24"),
    "fp8-tensor": (float8(None, scalar=True), {**FP8, "weight_block_size": None}, "float8"),
    "fp8-rows": (float8(None), {**FP8, "weight_block_size": None}, "float8"),
    "fbgemm": (float8(None, "_scale"), {"quant_method": "fbgemm_fp8"}, "float8"),
    "ct-float8-rows": (float8(None, "_scale"), section("float-quantized", {"a": FLOAT}), "float8"),
    "ct-float8-bfloat16-scales": (
        float8(None, "_scale", dtype=torch.bfloat16),
        section("float-quantized", {"a": FLOAT}),
        "float8",
    ),
    "ct-float8-blocks": (
        float8((128, 128), "_scale"),
        section(
            "float-quantized",
            {"a": scheme(8, 0, kind="float", format="float-quantized", strategy="block", block_structure=[128, 128])},
        ),
        "float8 128x128",
    ),
    "ct-int4-groups": (compressed(4, 32), section("pack-quantized", {"a": scheme(4, 32)}), "int4 group 32"),
    "ct-int4-zeros": (
        compressed(4, 16, zeros=True),
        section("pack-quantized", {"a": scheme(4, 16, symmetric=False)}),
        "int4 group 16",
    ),
    "ct-int4-order": (
        compressed(4, 16, order=True),
        section("pack-quantized", {"a": scheme(4, 16, actorder="group")}),
        "int4 group 16",
    ),
    "ct-int3-rows": (compressed(3, 0), section("pack-quantized", {"a": scheme(3, 0)}), "int3"),
    "ct-int8-groups": (compressed(8, 32), section("pack-quantized", {"a": scheme(8, 32)}), "int8 group 32"),
    "ct-w8a8": (
        compressed(8, 0, packed=False),
        section("int-quantized", {"a": scheme(8, 0, format="int-quantized")}),
        "int8",
    ),
    "ct-w8a8-zeros-float32": (
        compressed(8, 0, packed=False, zeros=True, dtype=torch.float32),
        section("int-quantized", {"a": scheme(8, 0, format="int-quantized", symmetric=False)}),
        "int8",
    ),
    "awq": (awq(32), AWQ, "awq int4 group 32"),
    "gptq-4": (gptq(4, 32), GPTQ, "gptq int4 group 32"),
    "gptq-4-order": (gptq(4, 16, order=True), {**GPTQ, "group_size": 16, "desc_act": True}, "gptq int4 group 16"),
    "gptq-8": (gptq(8, 32), {**GPTQ, "bits": 8}, "gptq int8 group 32"),
    "gptq-v2": (gptq(4, 32, less_one=False), {**GPTQ, "checkpoint_format": "gptq_v2"}, "gptq int4 group 32"),
    "ct-nvfp4": (nvfp4(divides=True), NVFP4, "nvfp4"),
    "modelopt-nvfp4": (nvfp4(divides=False), MODELOPT, "nvfp4"),
    "modelopt-fp8": (float8(None, "_scale", scalar=True), {**MODELOPT, "quant_algo": "FP8"}, "float8"),
    "nf4": (nf4(nested=False), NF4, "nf4"),
    "nf4-nested": (nf4(nested=True, dtype=torch.float16), {**NF4, "bnb_4bit_use_double_quant": True}, "nf4"),
}
GATE = "model.layers.1.mlp.gate_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(MODEL, tmp_path_factory.mktemp("quantized") / "model").path


def parameters_of(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    values = read_config(path)
    family = family_of(values)
    config = family.read_config(without_section(values), None)
    with Checkpoint(open_weights(path, read_quantized(values))) as checkpoint:
        places = checkpoint.choose([expand(table, config.num_layers) for table in family.name_tables(config)])
        checkpoint.check(places, family.ignorable_names(config))
        weights = LazyParameters(checkpoint, places, dtype, torch.device("cpu"), Bar(disable=True))
        return {name: weights[name].clone() for name in weights}


@pytest.mark.product(2)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("at_once", [1 << 22, 1 << 10], ids=["whole", "in-parts"])
def test_values_are_those_of_the_layout(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at_once: int
) -> None:
    layout, given, _ = LAYOUTS[name]
    quantized, plain = write_quantized(model, tmp_path, layout, given)
    monkeypatch.setattr(scales, "AT_ONCE", at_once)
    for dtype in (torch.float32, torch.bfloat16):
        wanted, found = parameters_of(plain, dtype), parameters_of(quantized, dtype)
        assert wanted.keys() == found.keys()
        for parameter, values in wanted.items():
            assert torch.equal(found[parameter], values), parameter


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_quantised_model_is_the_expanded_one(model: Path, tmp_path: Path, name: str) -> None:
    layout, given, format = LAYOUTS[name]
    paths = write_quantized(model, tmp_path, layout, given)
    loaded = [load_model(path, dtype="float32") for path in paths]
    assert format in loaded[0].formats
    assert loaded[0].canonical_config == loaded[1].canonical_config
    assert loaded[0].expanded == {format: loaded[0].formats[format]}
    (note,) = expanded_weights(loaded[0])
    assert f"{format} " in note
    assert [*expanded_weights(loaded[1])] == []
    marks = [model_fingerprint(path, one).weights for path, one in zip(paths, loaded, strict=True)]
    assert f"-{given['quant_method']}:" in marks[0]
    assert format in marks[0]
    assert "-" not in marks[1]


@pytest.mark.parametrize("name", ["fp8-blocks", "ct-w8a8-zeros-float32", "awq", "gptq-4-order", "nf4-nested"])
def test_tokens_are_those_of_the_expanded_model(model: Path, tmp_path: Path, name: str) -> None:
    layout, given, format = LAYOUTS[name]
    paths = write_quantized(model, tmp_path, layout, given)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    texts = []
    for path in paths:
        with LLM(str(path), dtype="float32", kv_cache_memory="8MiB") as llm:
            texts.append([one.outputs[0].token_ids for one in llm.generate([[3, 5, 7], [11] * 20], params)])
            assert (format in llm.status()["weight_formats"]) == (path == paths[0])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("block", [(128, 128), (32, 32)])
def test_float8_has_the_values_of_transformers(block: tuple[int, int]) -> None:
    from quire.weights.scaled_float8 import ScaledFloat8

    tensors, _ = float8(block)("x", 256, 384, torch.Generator().manual_seed(0))
    codes, steps = tensors.values()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        wanted = Fp8Dequantize(None)._dequantize_one(codes, steps, dtype)
        found = torch.empty(256, 384, dtype=dtype)
        ScaledFloat8("_scale_inv", block).expand("x", tensors, found)
        assert torch.equal(found, wanted)


def test_scales_that_are_powers_of_two() -> None:
    """A byte for an exponent, as DeepSeek V3.1 may store them."""
    from quire.weights.scaled_float8 import ScaledFloat8

    codes = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    steps = torch.tensor([[120, 127], [130, 90]], dtype=torch.uint8)
    wanted = Fp8Dequantize(None)._dequantize_one(codes, steps, torch.float32)
    for stored in (steps, steps.view(torch.float8_e8m0fnu)):
        found = torch.empty(4, 64)
        ScaledFloat8("_scale_inv", (2, 32)).expand("x", {"x": codes, "y": stored}, found)
        assert torch.equal(found, wanted)


# -- the libraries themselves, where they are installed --------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("compressed_tensors") is None, reason="needs compressed-tensors")
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name.startswith("ct-") and "order" not in name])
def test_values_of_compressed_tensors(model: Path, tmp_path: Path, name: str) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    layout, given, _ = LAYOUTS[name]
    quantized, _ = write_quantized(model, tmp_path, layout, given)
    (group,) = given["config_groups"].values()
    their = QuantizationScheme(**group)
    stored, found = load_file(quantized / SINGLE_FILE), parameters_of(quantized)
    parts = {one.removeprefix(f"{GATE}."): tensor for one, tensor in stored.items() if one.startswith(f"{GATE}.")}
    made = BaseCompressor.get_value_from_registry(given["format"]).decompress(parts, their)["weight"]
    assert torch.equal(found["1.gate_up.weight"][:96], made.float())


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_values_of_bitsandbytes(nested: bool, dtype: torch.dtype, kind: str) -> None:
    import bitsandbytes.functional

    from quire.weights.nf4 import FourBits

    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, state = bitsandbytes.functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=nested, quant_type=kind
    )
    wanted = bitsandbytes.functional.dequantize_4bit(codes, state)
    parts = state.as_dict(packed=True)
    made = FourBits(kind, nested, (len(parts["absmax"]), len(parts.get("nested_absmax", ())), 0))
    names = made.stored("x", (96, 128))
    tensors = {name: codes if name == "x" else parts[name.removeprefix("x.")] for name in names}
    found = torch.empty(96, 128, dtype=dtype)
    made.expand("x", tensors, found)
    assert torch.equal(found, wanted)


# -- groups and names ------------------------------------------------------------------------------


def test_each_module_has_the_format_of_its_group(model: Path, tmp_path: Path) -> None:
    """The name counts before the expression, and this before the class; ignored ones are floats."""
    four, eight, rows = scheme(4, 32), scheme(8, 32), scheme(8, 0, format="int-quantized")
    eight["targets"], rows["targets"] = ["re:.*self_attn.*"], ["model.layers.1.self_attn.q_proj"]
    groups = {"a": four, "b": eight, "c": rows}
    layouts = {
        **dict.fromkeys(("gate_proj", "up_proj"), compressed(4, 32)),
        **dict.fromkeys(("k_proj", "v_proj", "o_proj"), compressed(8, 32)),
    }
    given = section("mixed-precision", groups, ignore=["lm_head", "re:.*down_proj", "model.layers.0.self_attn.q_proj"])
    quantized, plain = write_quantized(model, tmp_path, layouts, given)
    name, tensors = "model.layers.1.self_attn.q_proj", load_file(quantized / SINGLE_FILE)
    made, values = compressed(8, 0, packed=False)(name, 64, 64, torch.Generator().manual_seed(2))
    del tensors[f"{name}.weight"]
    save_file({**tensors, **made, f"{name}.input_scale": torch.ones(1)}, quantized / SINGLE_FILE)
    expected, found = parameters_of(plain), parameters_of(quantized)
    expected["1.qkv.weight"][:64] = values
    assert all(torch.equal(found[one], expected[one]) for one in expected)
    formats = load_model(quantized, dtype="float32").formats
    assert {"int4 group 32", "int8 group 32", "int8", "F32"} == set(formats)


def test_experts(tmp_path: Path) -> None:
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "hidden_size": 64}
    case = Case("experts", "Qwen3Moe", {**changes, "head_dim": 16, "num_hidden_layers": 1})
    path = make_checkpoint(case, tmp_path / "model").path
    stored = load_file(path / SINGLE_FILE)
    assert any(".experts.3.up_proj.weight" in name for name in stored)
    quantized, plain = write_quantized(path, tmp_path, float8((32, 32)), {**FP8, "weight_block_size": [32, 32]})
    wanted, found = parameters_of(plain), parameters_of(quantized)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_options_of_single_modules(model: Path, tmp_path: Path) -> None:
    """Of GPTQModel: other bits for some modules, and none for others."""
    layouts = {name: gptq(4, 32) for name in ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj")}
    given = {**GPTQ, "dynamic": {r"-:.*down": {}, r"+:.*layers\.\d\.mlp\.gate": {"bits": 8, "group_size": 16}}}
    layouts["gate_proj"] = gptq(8, 16)
    quantized, plain = write_quantized(model, tmp_path, layouts, given)
    wanted, found = parameters_of(plain), parameters_of(quantized)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# -- bad input -------------------------------------------------------------------------------------


def edited(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        found = change(tensors.pop(name))
        if found is not None:
            tensors[name] = found

    return edit


def put(place: tuple[int, ...], value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[place] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("layout", "name", "change", "message"),
    [
        ("fp8-blocks", "weight_scale_inv", lambda t: t.expand(2, 1).clone(), r"gate_proj.weight_scale_inv has shape \[2, 1\]; config.json makes it \[1, 1\]"),
        ("fp8-blocks", "weight_scale_inv", lambda t: None, "lacks 1 of .* tensors: .*gate_proj.weight_scale_inv"),
        ("fp8-blocks", "weight_scale_inv", put((0, 0), float("nan")), "gate_proj.weight has a scale of nan; expected finite scales"),
        ("fp8-blocks", "weight_scale_inv", lambda t: t.int(), r"weight_scale_inv has dtype I32; expected one of \['F32', 'F16', 'BF16'"),
        ("ct-int4-groups", "weight_packed", lambda t: t[:, 1:].clone(), r"weight_packed has shape \[96, 7\]; config.json makes it \[96, 8\]"),
        ("ct-int4-groups", "weight_scale", lambda t: t[:, :1].clone(), r"weight_scale has shape \[96, 1\]; .*\[96, 2\]"),
        ("ct-int4-groups", "weight_scale", put((5, 1), float("inf")), "gate_proj.weight has a scale of inf"),
        ("ct-int4-groups", "weight_shape", lambda t: t.flip(0), r"its weight_shape says \[64, 96\]; expected \[96, 64\]"),
        ("ct-int4-zeros", "weight_zero_point", lambda t: None, "lacks 1 of .*gate_proj.weight_zero_point"),
        ("ct-int4-order", "weight_g_idx", put((3,), 4), r"g_idx has the group 4; expected groups from 0 to 3"),
        ("awq", "qzeros", lambda t: None, "lacks 1 of .* tensors: .*gate_proj.qzeros"),
        ("awq", "qweight", lambda t: t.mT.contiguous(), r"gate_proj.qweight has shape \[12, 64\]; .*\[64, 12\]"),
        ("awq", "scales", put((1, 7), float("nan")), "gate_proj.weight has a scale of nan"),
        ("gptq-4", "qzeros", lambda t: None, "lacks 1 of .*gate_proj.qzeros"),
        ("gptq-4", "g_idx", put((2,), -1), "g_idx has the group -1; expected groups from 0 to 1"),
        ("nf4", "weight.absmax", lambda t: t[1:].clone(), "gate_proj.weight has 95 numbers in absmax; expected 96"),
        ("nf4", "weight.absmax", put((3,), float("nan")), "gate_proj.weight has a scale of nan"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda t: t[:-4].clone(), "its quant_state is no JSON"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda t: None, "has absmax, but no quant_state"),
        ("nf4-nested", "weight.nested_absmax", lambda t: t.repeat(2), "has 2 numbers in nested_absmax; expected 1"),
    ],
)  # fmt: skip
def test_damaged_tensors(
    model: Path, tmp_path: Path, layout: str, name: str, change: Callable[[Tensor], Tensor | None], message: str
) -> None:
    made, given, _ = LAYOUTS[layout]
    quantized, _ = write_quantized(model, tmp_path, made, given)
    name = f"{GATE}.{name}"
    tensors = load_file(quantized / SINGLE_FILE)
    edited(name, change)(tensors)
    save_file(tensors, quantized / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(quantized, dtype="float32")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"quant_method": "aqlm"}, Unsupported, r"quant_method is 'aqlm', which is not supported; expected one of \['awq'"),
        ({}, Unsupported, "quant_method is None"),
        ("fp8", CheckpointError, "quantization_config is 'fp8'; expected an object"),
        ({**FP8, "weight_block_size": [128]}, CheckpointError, r"weight_block_size is \[128\]; expected two numbers"),
        ({**FP8, "expert_dtype": "fp4"}, Unsupported, 'expert_dtype is "fp4"'),
        ({**AWQ, "version": "gemv"}, Unsupported, 'version is "gemv", which is not supported; expected "gemm"'),
        ({**AWQ, "bits": 3}, Unsupported, "bits is 3"),
        ({**GPTQ, "bits": 3}, Unsupported, "bits is 3"),
        ({**GPTQ, "checkpoint_format": "marlin"}, Unsupported, 'checkpoint_format is "marlin"'),
        ({**GPTQ, "group_size": 0}, CheckpointError, "group_size is 0; expected a number of 1 or more, or -1"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, Unsupported, "load_in_8bit is true"),
        (section("mxfp8-quantized", {"a": {**scheme(8, 32, kind="float"), "format": None}}), Unsupported, "format is 'mxfp8-quantized'"),
        (section("nvfp4-pack-quantized", {"a": {**scheme(4, 32, kind="float"), "format": None}}), Unsupported, "group_size is 32"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, Unsupported, 'quant_algo is "NVFP4_AWQ"'),
        (section("pack-quantized", {"a": scheme(4, 16, kind="float")}), Unsupported, "floats of 4 bits"),
        (section("pack-quantized", {}), CheckpointError, "config_groups is .*; expected an object of groups"),
        (section("pack-quantized", {"a": scheme(4, 16)}, sparsity_config={"format": "sparse-24-bitmask"}), Unsupported, "sparsity_config has the format"),
        (section("pack-quantized", {"a": scheme(4, 16)}, transform_config={"config_groups": {"u": {}}}), Unsupported, "rotates activations"),
        (section("pack-quantized", {"a": scheme(4, 32, group_size=None)}), CheckpointError, "group_size is None; expected a number"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(
    model: Path, tmp_path: Path, given: Any, kind: type[QuireError], message: str
) -> None:
    quantized, _ = write_quantized(model, tmp_path, compressed(4, 32), {})
    file = quantized / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": given}))
    with pytest.raises(kind, match=message):
        load_model(quantized, dtype="float32")


def test_the_section_of_modelopt_in_a_file_of_its_own(model: Path, tmp_path: Path) -> None:
    quantized, plain = write_quantized(model, tmp_path, nvfp4(divides=False), MODELOPT)
    file = quantized / "config.json"
    config = json.loads(file.read_text())
    found = config.pop("quantization_config")
    file.write_text(json.dumps(config))
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": found["quant_algo"], "group_size": 16}}
    (quantized / "hf_quant_config.json").write_text(json.dumps(beside))
    wanted = parameters_of(plain)
    assert all(torch.equal(values, wanted[name]) for name, values in parameters_of(quantized).items())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weight_global_scale", 0.0, "has 0.0 for all its scales; expected a finite number that is not 0"),
        ("weight_global_scale", float("nan"), "has nan for all its scales"),
        ("weight_global_scale", 1e-38, "for all its scales"),
        ("weight_scale", float("nan"), "has a scale of nan; expected finite scales"),
    ],
)
def test_damaged_numbers_of_nvfp4_are_refused(
    model: Path, tmp_path: Path, name: str, value: float, message: str
) -> None:
    quantized, _ = write_quantized(model, tmp_path, nvfp4(divides=True), NVFP4)
    stored = load_file(quantized / SINGLE_FILE)
    stored[f"{GATE}.{name}"].view(-1)[0] = value
    save_file(stored, quantized / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load_model(quantized, dtype="float32")


def test_a_module_without_a_group_is_refused(model: Path, tmp_path: Path) -> None:
    given = section("pack-quantized", {"a": {**scheme(4, 32), "targets": ["re:.*mlp.*"]}})
    quantized, _ = write_quantized(model, tmp_path, compressed(4, 32), given)
    with pytest.raises(CheckpointError, match=r"no group has model.layers.0.self_attn.q_proj as a target"):
        load_model(quantized, dtype="float32")


def test_codes_of_an_ignored_module_are_not_read(model: Path, tmp_path: Path) -> None:
    given = section("pack-quantized", {"a": scheme(4, 32)}, ignore=["lm_head", GATE])
    quantized, _ = write_quantized(model, tmp_path, compressed(4, 32), given)
    with pytest.raises(CheckpointError, match=rf"lacks 1 of .* tensors: {GATE}.weight"):
        load_model(quantized, dtype="float32")


def test_codes_without_a_section_are_refused(model: Path, tmp_path: Path) -> None:
    quantized, _ = write_quantized(model, tmp_path, awq(32), AWQ)
    file = quantized / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"lacks 14 of .* tensors"):
        load_model(quantized, dtype="float32")
