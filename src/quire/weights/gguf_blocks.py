"""Formats of tensors in GGUF files: blocks of numbers with scales, as ggml defines them.

``BLOCKS`` has a row for each format that is expanded. Its function is the definition: it gives the
values of ``gguf.quants.dequantize`` to the bit. Letters: N blocks, B bytes of a block.

``FLOAT8`` is in no GGUF file: a float32 scale and 32 floats of 8 bits, which ``code_blocks`` makes
of safetensors files. In memory a row may have a head before its blocks (``HEADS``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.base.errors import CheckpointError, Unsupported
from quire.contracts.weights import StoredTensor

TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""Names of all types by their numbers in files, the numbers of a block, and its bytes."""
TYPE_NAMES: Mapping[int, str] = {number: name for number, (name, _, _) in TYPES.items()}
SIZES: Mapping[str, tuple[int, int]] = {
    **{name: (numbers, nbytes) for name, numbers, nbytes in TYPES.values()},
    "U8": (1, 1),
    "F8_E4M3": (32, 36),
}
"""The numbers of a block, and its bytes, of these types and of two others."""

FLOAT8 = "F8_E4M3"
EXPANDED = 1 << 18
"""Numbers that are expanded at a time, so that they stay in a processor's cache."""

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of E2M1."""


HALVES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
"""Where the float16 numbers of a block stand, if not at 0 only."""
MOST_POWER = 252
"""The largest scale of MXFP4 with which all values are finite."""
NVFP4 = "NVFP4"
HEADS: Mapping[str, int] = {NVFP4: 8}
"""Bytes before the blocks of a row in memory, which no file has there: two float32 numbers. A scale
of the row is multiplied by their sum."""
MOST_NVFP4 = 480.0 * 12
"""The largest scale in 8 bits, times the largest number of a code."""


def heads(units: Tensor) -> Tensor:
    """Return float32 ``[..., R, 2]``: heads of rows whose scales are multiplied by ``units``,
    float32 or float64 ``[..., R, 1]``.

    Both numbers have 20 bits, so that their products with the four bits of a scale are exact, and
    only their sum is rounded. It makes no difference whether a compiler fuses them.
    """
    high = (units.float().view(torch.int32) & -16).view(torch.float32)
    low = ((units - high).float().view(torch.int32) + 8 & -16).view(torch.float32)
    return torch.cat((high, low), -1)


def headed(rows: Tensor, heads: Tensor) -> Tensor:
    """Return rows of blocks ``[..., R, B]`` with heads before them."""
    return torch.cat((heads.view(torch.uint8), rows), -1)


def values_of_rows(kind: str, rows_RB: Tensor) -> Tensor:
    """Return float32 ``[R, I]`` of rows as they lie in memory."""
    head, size = HEADS.get(kind, 0), SIZES[kind][1]
    blocks_NB = rows_RB[:, head:].reshape(-1, size)
    if not head:
        return BLOCKS[kind](blocks_NB).view(len(rows_RB), -1)
    units_R2 = rows_RB[:, :head].contiguous().view(torch.float32)
    return _nvfp4_by(blocks_NB, units_R2.repeat_interleave(len(blocks_NB) // len(rows_RB), 0)).view(len(rows_RB), -1)


def has_finite_scales(kind: str, rows_RB: Tensor) -> bool:
    """Return True if all values of rows, as they lie in memory, are finite."""
    if kind == NVFP4:
        units_R2 = rows_RB[:, : HEADS[kind]].contiguous().view(torch.float32)
        return bool(torch.isfinite(units_R2.sum(-1) * MOST_NVFP4).all())
    blocks_NB = rows_RB.reshape(-1, SIZES[kind][1])
    if kind == "MXFP4":
        return not bool((blocks_NB[:, 0] > MOST_POWER).any())
    if kind == FLOAT8:
        return bool(torch.isfinite(_steps_of_float8(blocks_NB) * torch.finfo(torch.float8_e4m3fn).max).all())
    return all(bool((blocks_NB[:, place + 1] & 0x7C != 0x7C).all()) for place in HALVES.get(kind, (0,)))


def bytes_of_row(kind: str, numbers: int) -> int | None:
    """Return the bytes of a row; None if the format has no rows of this length."""
    block, size = SIZES[kind]
    return None if numbers % block else numbers // block * size


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """``WeightFormat`` of one tensor of bytes, whose last dimension is a row's blocks."""

    name: str
    """One of ``BLOCKS``."""
    is_plain: bool = False

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        return {name: StoredTensor(shape=shape, dtypes=(self.name,))}

    def expand(self, name: str, stored: Mapping[str, Tensor], out: Tensor) -> None:
        """See ``WeightFormat``. Values are rounded to the dtype of ``out``."""
        (found,) = stored.values()
        rows_RB = found.reshape(-1, found.shape[-1])
        # A part of a parameter's rows is contiguous.
        target = out.view(len(rows_RB), -1)
        step = max(1, EXPANDED // max(1, target.shape[1]))
        for first in range(0, len(rows_RB), step):
            part = target[first : first + step]
            expanded = values_of_rows(self.name, rows_RB[first : first + step])
            if not all(map(math.isfinite, (float(one) for one in torch.aminmax(expanded)))):
                raise CheckpointError(f"{name} has a scale in {self.name} that is not finite; the file is damaged")
            part.copy_(expanded)
            if part.dtype == torch.float16 and not bool(torch.isfinite(part).all()):
                raise Unsupported(f"{name} has values that float16 does not hold; expected dtype bfloat16 or float32")


def _halves(blocks: Tensor, start: int) -> Tensor:
    """Return ``[N, 1]``: the float16 at a byte, in float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _bits(packed: Tensor, *shifts: int, mask: int) -> Tensor:
    """Return ``[..., len(shifts), B]`` of ``[..., B]``: the bits at each shift. Eight bytes are
    shifted at a time, or four."""
    wide = torch.int64 if packed.shape[-1] % 8 == 0 else torch.int32
    words, lanes = packed.contiguous().view(wide), mask * (0x0101010101010101 if wide == torch.int64 else 0x01010101)
    return torch.stack([words >> shift & lanes for shift in shifts], -2).view(torch.uint8)


def _joined(low: Tensor, high: Tensor) -> Tensor:
    """Return codes of their low four bits and the bits above, of the same shape."""
    return (low.view(torch.int64) | high.view(torch.int64) << 4).view(torch.uint8)


def _nibbles(blocks: Tensor, start: int) -> Tensor:
    """Return ``[N, 32]``: 16 low halves of bytes, then 16 high ones."""
    return _bits(blocks[:, start : start + 16], 0, 4, mask=15).flatten(1)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Return ``[N, 32]``: the bits of four bytes, the lowest first."""
    eight = torch.arange(256, dtype=torch.uint8).unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    table = eight.view(torch.int64).squeeze(-1).to(blocks.device)
    bits = table.index_select(0, blocks[:, start : start + 4].flatten().int())
    return bits.view(torch.uint8).view(-1, 32)


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks, 2).float().sub_(8).mul_(_halves(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks, 4).float().mul_(_halves(blocks, 0)).add_(_halves(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _joined(_nibbles(blocks, 6), _fifth_bits(blocks, 2))
    return codes.float().sub_(16).mul_(_halves(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _joined(_nibbles(blocks, 8), _fifth_bits(blocks, 4))
    return codes.float().mul_(_halves(blocks, 0)).add_(_halves(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_halves(blocks, 0))


def _q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, :16]
    steps = _halves(blocks, 80) * (scales & 15).float()
    minima = _halves(blocks, 82) * (scales >> 4).float()
    codes = _bits(blocks[:, 16:80].reshape(-1, 2, 32), 0, 2, 4, 6, mask=3).view(-1, 16, 16)
    return codes.float().mul_(steps.unsqueeze(-1)).sub_(minima.unsqueeze(-1)).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    low = _bits(blocks[:, 96:104], 0, 4, mask=15).view(-1, 16)
    high = _bits(blocks[:, 104:108], 0, 2, 4, 6, mask=3).view(-1, 16)
    steps = _halves(blocks, 108) * (_joined(low, high).float() - 32)
    codes = _bits(blocks[:, 32:96].reshape(-1, 2, 32), 0, 2, 4, 6, mask=3).view(-1, 256)
    # A third bit that is not set stands for -4.
    above = _bits(blocks[:, :32], *range(8), mask=1).view(-1, 256)
    return (codes | above << 2).float().sub_(4).view(-1, 16, 16).mul_(steps.unsqueeze(-1)).flatten(1)


def _scales_of_six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 ``[N, 8, 1]`` of the steps and of the minima of ``Q4_K`` and ``Q5_K``."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    steps = torch.cat((first & 63, rest & 15 | first >> 2 & 48), -1)
    minima = torch.cat((second & 63, rest >> 4 | second >> 2 & 48), -1)
    scaled = steps.float() * _halves(blocks, 0), minima.float() * _halves(blocks, 2)
    return scaled[0].unsqueeze(-1), scaled[1].unsqueeze(-1)


def _q4_k(blocks: Tensor) -> Tensor:
    steps, minima = _scales_of_six_bits(blocks)
    codes = _bits(blocks[:, 16:].reshape(-1, 4, 32), 0, 4, mask=15).view(-1, 8, 32)
    return codes.float().mul_(steps).sub_(minima).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    steps, minima = _scales_of_six_bits(blocks)
    low = _bits(blocks[:, 48:].reshape(-1, 4, 32), 0, 4, mask=15).view(-1, 8, 32)
    codes = _joined(low, _bits(blocks[:, 16:48], *range(8), mask=1))
    return codes.float().mul_(steps).sub_(minima).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _bits(blocks[:, :128].reshape(-1, 2, 64), 0, 4, mask=15).view(-1, 16, 16)
    high = _bits(blocks[:, 128:192].reshape(-1, 2, 32), 0, 2, 4, 6, mask=3).view(-1, 16, 16)
    steps = _halves(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return _joined(low, high).float().sub_(32).mul_(steps.unsqueeze(-1)).flatten(1)


def _looked_up(codes: Tensor, values: tuple[int, ...]) -> Tensor:
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def _powers(exponents: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _looked_up(_nibbles(blocks, 2), IQ4_VALUES).mul_(_halves(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Tensor:
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), -1).flatten(1)
    shift = torch.tensor((0, 2, 4, 6), dtype=torch.uint8, device=blocks.device)
    high = (blocks[:, 2:4].unsqueeze(-1) >> shift & 3).flatten(1)
    steps = _halves(blocks, 0) * (_joined(low, high).float() - 32)
    codes = _bits(blocks[:, 8:].reshape(-1, 8, 16), 0, 4, mask=15).view(-1, 8, 32)
    return _looked_up(codes, IQ4_VALUES).mul_(steps.unsqueeze(-1)).flatten(1)


def _mxfp4(blocks: Tensor) -> Tensor:
    # The scale is 2 ** (byte - 127), and the table has twice the values.
    return _powers(blocks[:, :1].int() - 128) * _looked_up(_nibbles(blocks, 1), FP4_VALUES)


def _nvfp4(blocks: Tensor) -> Tensor:
    return values_of_rows(NVFP4, rows_of_file(blocks, torch.ones(len(blocks), 1, device=blocks.device)))


def rows_of_file(rows: Tensor, units: Tensor) -> Tensor:
    """Return rows of NVFP4 as they lie in memory, of rows in a GGUF file ``[..., R, B]``.
    ``units``: float32 ``[..., R, 1]``, which the file has for its tensors.

    ggml reads no sign of a scale, and 0x7F as 0.
    """
    blocks = rows.reshape(*rows.shape[:-1], -1, SIZES[NVFP4][1])
    scales = torch.where(blocks[..., :4] == 0x7F, 0, blocks[..., :4] & 0x7F)
    return headed(torch.cat((scales, blocks[..., 4:]), -1).flatten(-2), heads(units / 2))


def _nvfp4_by(blocks: Tensor, units: Tensor) -> Tensor:
    """Return values of blocks in rows with the heads ``units``, ``[N or 1, 2]``."""
    codes = _bits(blocks[:, 4:].reshape(-1, 4, 8), 0, 4, mask=15).reshape(-1, 4, 16)
    return (nvfp4_steps(blocks[:, :4], units).unsqueeze(-1) * _looked_up(codes, FP4_VALUES)).flatten(1)


def nvfp4_steps(scales: Tensor, units: Tensor) -> Tensor:
    """Return float32 of scales in 8 bits ``[N, scales]``, multiplied by the heads ``[N or 1, 2]``
    of their rows."""
    exponent, mantissa = scales >> 3 & 15, (scales & 7).float()
    size = torch.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * _powers(exponent.int() - 7))
    signed = torch.where(scales > 0x7F, -size, size)
    return signed * units[:, :1] + signed * units[:, 1:]


def _steps_of_float8(blocks: Tensor) -> Tensor:
    return blocks[:, :4].contiguous().view(torch.float32)


def _float8(blocks: Tensor) -> Tensor:
    return blocks[:, 4:].contiguous().view(torch.float8_e4m3fn).float().mul_(_steps_of_float8(blocks))


BLOCKS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    FLOAT8: _float8,
}
"""Functions from blocks ``[N, B]``, uint8, to their values ``[N, numbers]`` in float32."""
