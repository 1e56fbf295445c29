"""Small checkpoints in the layouts in which quantised ones are published, and their values.

The codes and scales of a matrix are random. Each writer packs them number by number, as the layout
is described, and returns the values that they stand for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.weights.safetensors_files import SINGLE_FILE

Tensors: TypeAlias = dict[str, Tensor]
Layout: TypeAlias = Callable[[str, int, int, torch.Generator], tuple[Tensors, Tensor]]
"""From the name of a module, outputs, inputs: the stored tensors and the values ``[O, I]``."""


def scales_of(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, unit: float) -> Tensor:
    return ((torch.rand(shape, generator=generator) + 0.5) * unit).to(dtype)


def codes_of(shape: tuple[int, ...], generator: torch.Generator, least: int, most: int) -> Tensor:
    codes = torch.randint(least, most + 1, shape, generator=generator)
    codes.view(-1)[:2] = torch.tensor([least, most])
    return codes


def words_of(rows: list[list[int]], bits: int) -> Tensor:
    """Return int32 words ``[rows, words]`` of numbers that lie one after the other, the lowest bits
    first."""
    words = []
    for numbers in rows:
        whole = sum(number << bits * place for place, number in enumerate(numbers))
        words.append([whole >> 32 * word & 0xFFFFFFFF for word in range(-(-len(numbers) * bits // 32))])
    return torch.tensor(
        [[word - (1 << 32) if word >> 31 else word for word in row] for row in words], dtype=torch.int32
    )


def float8(
    block: tuple[int, int] | None,
    suffix: str = "_scale_inv",
    *,
    scalar: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Layout:
    def write(name: str, outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        codes = torch.randn(outputs, inputs, generator=generator).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
        shape = (outputs, 1) if block is None else (-(-outputs // block[0]), -(-inputs // block[1]))
        scales = scales_of(() if scalar else shape, generator, dtype, 1e-3)
        values = torch.empty(outputs, inputs)
        height, width = block or (1, inputs)
        for row in range(0, outputs, height):
            for column in range(0, inputs, width):
                block_at = slice(row, row + height), slice(column, column + width)
                scale = scales if scalar else scales[row // height, column // width]
                values[block_at] = codes[block_at].to(dtype) * scale
        return {f"{name}.weight": codes, f"{name}.weight{suffix}": scales}, values

    return write


def compressed(
    bits: int, group: int, *, packed: bool = True, zeros: bool = False, order: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Layout:  # fmt: skip
    middle = 1 << bits - 1

    def write(name: str, outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        codes = codes_of((outputs, inputs), generator, -middle, middle - 1)
        count = inputs // group if group else 1
        scales = scales_of((outputs, count), generator, dtype, 0.3 / middle)
        shifts = codes_of((outputs, count), generator, -middle, middle - 1) if zeros else torch.zeros(outputs, count)
        groups = torch.arange(inputs) // (group or inputs)
        if order:
            groups = groups[torch.randperm(inputs, generator=generator)]
        values = (codes.to(dtype) - shifts.to(dtype)[:, groups]) * scales[:, groups]
        tensors = {f"{name}.weight_scale": scales}
        if packed:
            tensors[f"{name}.weight_packed"] = words_of((codes + middle).tolist(), bits)
            tensors[f"{name}.weight_shape"] = torch.tensor([outputs, inputs])
        else:
            tensors[f"{name}.weight"] = codes.to(torch.int8)
        if zeros:
            # Zeros are packed along the outputs.
            laid = words_of((shifts.long() + middle).mT.tolist(), bits).mT.contiguous()
            tensors[f"{name}.weight_zero_point"] = laid if packed else shifts.to(torch.int8)
        if order:
            tensors[f"{name}.weight_g_idx"] = groups.int()
        return tensors, values.float()

    return write


def awq(group: int) -> Layout:
    def write(name: str, outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        codes = codes_of((inputs, outputs), generator, 0, 15)
        zeros = codes_of((inputs // group, outputs), generator, 0, 15)
        scales = scales_of((inputs // group, outputs), generator, torch.float16, 0.02)
        groups = torch.arange(inputs) // group
        values = (codes - zeros[groups]).half() * scales[groups]

        def packed(numbers: Tensor) -> Tensor:
            # Of eight outputs, the places from the lowest bits on have these.
            placed = numbers.view(len(numbers), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)
            return words_of(placed.tolist(), 4)

        tensors = {f"{name}.qweight": packed(codes), f"{name}.qzeros": packed(zeros), f"{name}.scales": scales}
        return tensors, values.mT.float()

    return write


def gptq(bits: int, group: int, *, order: bool = False, less_one: bool = True, least: int = 0) -> Layout:
    """``least``: the smallest zero. GPTQModel takes 1 from each by one subtraction from the word,
    which borrows from the next zero where one is 0."""

    def write(name: str, outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        most = (1 << bits) - 1
        codes = codes_of((inputs, outputs), generator, 0, most)
        zeros = codes_of((inputs // group, outputs), generator, least, most)
        scales = scales_of((inputs // group, outputs), generator, torch.float16, 0.3 / most)
        groups = torch.arange(inputs) // group
        if order:  # which activations make, the same for all maps of an input
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        values = (codes - zeros[groups]).half() * scales[groups]
        tensors = {
            f"{name}.qweight": words_of(codes.mT.tolist(), bits).mT.contiguous(),
            f"{name}.qzeros": words_of(zeros.tolist(), bits)
            - int(less_one) * sum(1 << at for at in range(0, 32, bits)),
            f"{name}.scales": scales,
            f"{name}.g_idx": groups.int(),
        }
        return tensors, values.mT.float()

    return write


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The sizes of codes from 0 on; the fourth bit is the sign."""


def nvfp4(*, divides: bool) -> Layout:
    """``divides``: as compressed-tensors writes it, else as ModelOpt."""

    def write(name: str, outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        codes = codes_of((outputs, inputs), generator, 0, 15)
        scales = scales_of((outputs, inputs // 16), generator, torch.float32, 200.0).to(torch.float8_e4m3fn)
        one = scales_of((), generator, torch.float32, 1e4 if divides else 1e-4)
        steps = scales.float() / one if divides else scales.float() * one
        signed = torch.tensor([*E2M1, *(-one for one in E2M1)])
        values = signed[codes] * steps.repeat_interleave(16, 1)
        weight = f"{name}.weight"
        tensors = {
            f"{weight}_packed" if divides else weight: (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
            f"{weight}_scale": scales,
            f"{weight}_global_scale" if divides else f"{weight}_scale_2": one.view(1) if divides else one,
            f"{name}.input_global_scale" if divides else f"{name}.input_scale": torch.ones(1),
        }
        return tensors, values.bfloat16().float() if divides else values

    return write


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of codes from 0 on."""


def nf4(*, nested: bool, dtype: torch.dtype = torch.bfloat16) -> Layout:
    def write(name: str, outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        count, blocks = outputs * inputs, -(-outputs * inputs // 64)
        codes = codes_of((count,), generator, 0, 15)
        table = torch.tensor(NF4)
        state: dict[str, Any] = {
            "quant_type": "nf4",
            "blocksize": 64,
            "dtype": str(dtype).removeprefix("torch."),
            "shape": [outputs, inputs],
        }
        weight = f"{name}.weight"
        tensors = {weight: ((codes[::2] << 4) | codes[1::2]).to(torch.uint8).unsqueeze(1), f"{weight}.quant_map": table}
        if nested:
            codes8 = codes_of((blocks,), generator, 0, 255)
            map8 = torch.linspace(-1, 1, 256)
            steps = scales_of((-(-blocks // 256),), generator, torch.float32, 0.05)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.09}
            tensors |= {
                f"{weight}.absmax": codes8.to(torch.uint8),
                f"{weight}.nested_absmax": steps,
                f"{weight}.nested_quant_map": map8,
            }
            scales = map8[codes8] * steps.repeat_interleave(256)[:blocks] + torch.tensor(0.09)
        else:
            scales = scales_of((blocks,), generator, torch.float32, 0.1)
            tensors[f"{weight}.absmax"] = scales
        raw = json.dumps(state).encode()
        tensors[f"{weight}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(raw), dtype=torch.uint8)
        values = table[codes] * scales.repeat_interleave(64)[:count]
        return tensors, values.to(dtype).float().view(outputs, inputs)

    return write


def scheme(bits: int, group: int, *, kind: str = "int", format: str = "pack-quantized", **given: Any) -> dict[str, Any]:
    """A group of compressed-tensors, as config.json has it."""
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": "group" if group else "channel",
        "group_size": group or None,
        "dynamic": False,
        **given,
    }
    return {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": format}


def section(format: str, groups: Mapping[str, Any], **given: Any) -> dict[str, Any]:
    """A section of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": dict(groups),
        "ignore": ["lm_head"],
        **given,
    }


def write_quantized(
    model: Path, path: Path, layout: Layout | Mapping[str, Layout], section: Mapping[str, Any]
) -> tuple[Path, Path]:
    """Copy a checkpoint with the matrices of its layers in a layout, or in those of their last
    names, and one with their values; return both."""
    tensors, generator = load_file(model / SINGLE_FILE), torch.Generator().manual_seed(1)
    stored, plain = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        chosen = layout if not isinstance(layout, Mapping) else layout.get(module.rpartition(".")[2])
        if name.endswith("_proj.weight") and chosen is not None:
            made, values = chosen(module, *weight.shape, generator)
            del stored[name]
            stored |= made
            plain[name] = values.contiguous()
    for name, kept, given in (("quantized", stored, {"quantization_config": dict(section)}), ("plain", plain, {})):
        shutil.copytree(model, path / name)
        save_file(kept, path / name / SINGLE_FILE, metadata={"format": "pt"})
        config = json.loads((model / "config.json").read_text())
        (path / name / "config.json").write_text(json.dumps({**config, **given}))
    return path / "quantized", path / "plain"
