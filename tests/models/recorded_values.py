"""Writes ``recorded_values.safetensors``: matrices in quantised layouts, and the values that the
layouts' own libraries make of them.

Run it as ``python -m tests.models.recorded_values AWQ GPTQ`` where compressed-tensors 0.20.1,
bitsandbytes 0.50.2 and nvidia-modelopt 0.47.0 are installed. AWQ is
``awq/utils/packing_utils.py`` of AutoAWQ 0.2.9, GPTQ is
``auto_gptq/nn_modules/qlinear/qlinear_cuda.py`` of AutoGPTQ 0.7.1; both run on a CPU.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .quantized_writer import awq, gptq, scheme, section

FILE = Path(__file__).with_suffix(".safetensors")
NAME = "layer"
ROWS, COLUMNS = 24, 64
SEED = torch.Generator().manual_seed(41)
Case = tuple[str, dict[str, Any], Mapping[str, Tensor], Tensor]
"""A name, the section of config.json, the stored tensors, the library's values."""


def module_of(path: str, name: str) -> Any:
    """Import a file of a package that is not installed."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def weights(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, generator=SEED).mul_(0.05).to(dtype)


def compressed_tensors(
    name: str, format: str, given: dict[str, Any], scale: tuple[int, ...], dtype: torch.dtype, size: tuple[int, int]
) -> Case:
    """Quantise and decompress a matrix by the library."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    parsed = QuantizationScheme(**given)
    args = parsed.weights
    most = 448.0 if args.type == "float" else (1 << args.num_bits - 1) - 1
    weight = weights(*size, dtype)
    state: dict[str, Any] = {
        "weight": weight,
        "weight_scale": ((torch.rand(scale, generator=SEED) + 0.5) * 0.15 / most).to(dtype),
    }
    if not args.symmetric:
        low = -(1 << args.num_bits - 1)
        state["weight_zero_point"] = torch.randint(low, -low, scale, generator=SEED).to(torch.int8)
    compressor: Any = BaseCompressor.get_value_from_registry(format)
    stored = compressor.compress(state, parsed)
    values = compressor.decompress(stored, parsed)["weight"]
    named = {f"{NAME}.{one}": tensor for one, tensor in stored.items() if isinstance(tensor, Tensor)}
    return name, section(format, {"a": given}), named, values


def integers() -> Iterator[Case]:
    for bits in (3, 4, 8):
        for group in (0, 32):
            for symmetric in (True, False):
                found = scheme(bits, group, symmetric=symmetric)
                name = f"ct-int{bits}-{'group' if group else 'rows'}{'' if symmetric else '-zeros'}"
                shape = (ROWS, COLUMNS // group if group else 1)
                yield compressed_tensors(name, "pack-quantized", found, shape, torch.bfloat16, (ROWS, COLUMNS))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name = f"ct-w8a8-{str(dtype).removeprefix('torch.')}"
        rows = scheme(8, 0, format="int-quantized")
        yield compressed_tensors(name, "int-quantized", rows, (ROWS, 1), dtype, (ROWS, COLUMNS))
    one = scheme(8, 0, format="int-quantized", strategy="tensor")
    yield compressed_tensors("ct-w8a8-tensor", "int-quantized", one, (1,), torch.bfloat16, (ROWS, COLUMNS))


def floats() -> Iterator[Case]:
    kinds: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, int]]] = {
        "rows": ({}, (ROWS, 1), (ROWS, COLUMNS)),
        "tensor": ({"strategy": "tensor"}, (1,), (ROWS, COLUMNS)),
        "group": ({"strategy": "group", "group_size": 32}, (ROWS, COLUMNS // 32), (ROWS, COLUMNS)),
        "blocks": ({"strategy": "block", "block_structure": [128, 128]}, (2, 2), (136, 160)),
    }
    for kind, (more, scale, size) in kinds.items():
        for dtype in (torch.bfloat16,) if kind == "blocks" else (torch.float32, torch.bfloat16):
            found = scheme(8, 0, kind="float", format="float-quantized", **more)
            name = f"ct-float8-{kind}-{str(dtype).removeprefix('torch.')}"
            yield compressed_tensors(name, "float-quantized", found, scale, dtype, size)


def floats_of_4_bits() -> Iterator[Case]:
    """By both libraries. The scale of each tensor is one that its own weights make."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    format, seed = "nvfp4-pack-quantized", torch.Generator().manual_seed(43)
    given = scheme(4, 16, kind="float", format=format, strategy="tensor_group")
    parsed, compressor = QuantizationScheme(**given), BaseCompressor.get_value_from_registry(format)
    for number in range(4):
        weight = torch.randn(ROWS, COLUMNS, generator=seed).mul_(0.05 * 10.0**-number).bfloat16()
        most_Og = weight.float().view(ROWS, -1, 16).abs().amax(-1)
        one = 448 * 6 / weight.float().abs().max().view(1)
        scales = (most_Og * one / 6).to(torch.float8_e4m3fn).float()
        state = {"weight": weight, "weight_scale": scales, "weight_global_scale": one}
        stored = compressor.compress(state, parsed)
        values = compressor.decompress(stored, parsed)["weight"]
        named = {f"{NAME}.{name}": tensor for name, tensor in stored.items() if isinstance(tensor, Tensor)}
        yield f"ct-nvfp4-{number}", section(format, {"a": given}), named, values
        made, scales, two = NVFP4QTensor.quantize(weight, 16)
        named = {
            f"{NAME}.weight": made._quantized_data,
            f"{NAME}.weight_scale": scales,
            f"{NAME}.weight_scale_2": two,
        }
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        values = made.dequantize(dtype, scale=scales, double_scale=two, block_sizes={-1: 16})
        name = f"modelopt-nvfp4-{number}-{str(dtype).removeprefix('torch.')}"
        yield name, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, named, values


def bitsandbytes() -> Iterator[Case]:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                weight = weights(8, 4 * COLUMNS, dtype)
                codes, state = quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
                stored = {f"{NAME}.weight": codes}
                stored |= {f"{NAME}.weight.{one}": tensor for one, tensor in state.as_dict(packed=True).items()}
                given = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
                name = f"bnb-{kind}{'-nested' if nested else ''}-{str(dtype).removeprefix('torch.')}"
                yield name, given, stored, dequantize_4bit(codes, state)


def awq_cases(dequantize: Callable[..., Tensor]) -> Iterator[Case]:
    for group in (32, 64):
        stored, _ = awq(group)(NAME, ROWS, COLUMNS, SEED)
        made = dequantize(*stored.values(), 4, group)
        given = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
        yield f"awq-{group}", given, stored, made.mT.contiguous()


def gptq_cases(kind: Any) -> Iterator[Case]:
    """Zeros from 1 on: of one that is 0, AutoGPTQ writes what nobody can read."""
    for bits in (2, 4, 8):
        for order in (False, True):
            stored, _ = gptq(bits, 16, order=order, least=1)(NAME, 32, COLUMNS, SEED)
            layer = kind(bits, 16, COLUMNS, 32, bias=False, weight_dtype=torch.float16)
            for name, tensor in stored.items():
                setattr(layer, name.removeprefix(f"{NAME}."), tensor)
            # Each row of the result has one term, so it is the library's matrix.
            made = layer(torch.eye(COLUMNS, dtype=torch.float16))
            given = {"quant_method": "gptq", "bits": bits, "group_size": 16, "desc_act": order, "sym": False}
            yield f"gptq-{bits}{'-order' if order else ''}", given, stored, made.mT.contiguous()


def main() -> None:
    awq_file, gptq_file = sys.argv[1:]
    tensors, sections = {}, {}
    for name, given, stored, values in (
        *integers(),
        *floats(),
        *bitsandbytes(),
        *awq_cases(module_of(awq_file, "awq_packing").dequantize_gemm),
        *gptq_cases(module_of(gptq_file, "gptq_layer").QuantLinear),
        *floats_of_4_bits(),
    ):
        tensors |= {f"{name}/{one}": tensor.contiguous() for one, tensor in stored.items()}
        tensors[f"{name}="] = values.contiguous()
        sections[name] = json.dumps(given)
    save_file(tensors, FILE, metadata=sections)


if __name__ == "__main__":
    main()
