"""Packed forms in panels of 32 outputs: the definition of ``kernels/cpu/linear.h``.

Outputs up to the next multiple of 32 are 0.

Letters: O output, I input features; G inputs of a group, g groups of a row; p panels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire.contracts.linear import CodeRows, PackedMatrix

PANEL = 32
"""Outputs of a panel."""
INT4_LOW, INT4_HIGH = [0, 4, 1, 5], [2, 6, 3, 7]
"""Inputs of a word in the low and high halves of its bytes."""
SMALLER_SCALES = (0.95, 0.9, 0.85, 0.8, 0.75)
"""Factors for a smaller INT4 scale: it clips the largest value and may fit most values better."""


def _padded(weight_OI: Tensor) -> Tensor:
    return F.pad(weight_OI, (0, 0, 0, -weight_OI.shape[0] % PANEL))


@dataclass(frozen=True, slots=True)
class FloatPanels:
    """float32 ``[p, I, 32]``, or bfloat16 ``[p, I / 2, 32, 2]``: pairs of inputs stand together."""

    name: Literal["float32", "bfloat16"]
    bits: float
    dtype: torch.dtype
    together: int
    """Inputs that stand together."""

    def group(self, inputs: int) -> int:
        """See ``PackedForm``."""
        del inputs
        return 0

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """See ``PackedForm``."""
        pairs = (self.together,) if self.together > 1 else ()
        return -(-outputs // PANEL), inputs // self.together, PANEL, *pairs

    def pack(self, weight_OI: Tensor) -> PackedMatrix:
        """See ``PackedForm``."""
        outputs, inputs = weight_OI.shape
        rows = _padded(weight_OI).to(self.dtype).view(-1, PANEL, inputs // self.together, self.together)
        values = rows.transpose(1, 2).contiguous().view(self.shape(outputs, inputs))
        return PackedMatrix(self.name, outputs, inputs, 0, values, None)

    def unpack(self, packed: PackedMatrix) -> Tensor:
        """See ``PackedForm``."""
        values = packed.values.float().view(*packed.values.shape[:3], self.together)
        return values.transpose(1, 2).reshape(-1, packed.inputs)[: packed.outputs]


FLOAT32 = FloatPanels("float32", 32.0, torch.float32, 1)
BFLOAT16 = FloatPanels("bfloat16", 16.0, torch.bfloat16, 2)


@dataclass(frozen=True, slots=True)
class CodePanels:
    """Codes, uint8 ``[p, I * width / 32, 2, 64]``, with a bfloat16 scale for a group of inputs.

    Codes of 8 bits are sign and magnitude, and the scale is the largest absolute value over 127.
    The scale of 4 bits makes the largest value -8, or is one of ``SMALLER_SCALES`` of that: the
    first with the least squared error.
    """

    name: Literal["int4", "int8"]
    width: int
    """Bits of a code."""
    bits: float
    least: int
    most: int
    groups: tuple[int, ...]
    """Sizes of groups; the first one that fits counts."""
    dtype: torch.dtype = torch.uint8

    def group(self, inputs: int) -> int:
        """See ``PackedForm``."""
        return next((group for group in self.groups if inputs % group == 0), 0)

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """See ``PackedForm``."""
        return -(-outputs // PANEL), inputs * self.width // 32, 2, 64

    def pack(self, weight_OI: Tensor) -> PackedMatrix:
        """See ``PackedForm``."""
        outputs, inputs = weight_OI.shape
        group = self.group(inputs)
        values_OgG = _padded(weight_OI).float().view(-1, inputs // group, group)
        int8_Og = (values_OgG.abs().amax(-1) / 127).bfloat16()
        scales_Og = int8_Og if self.width == 8 else _int4_scales(values_OgG)
        codes = _codes(values_OgG, scales_Og, self.least, self.most).view(-1, PANEL, inputs)
        return PackedMatrix(
            self.name, outputs, inputs, group, _lay(codes.to(torch.int8), self.width), _panels(scales_Og)
        )

    def unpack(self, packed: PackedMatrix) -> Tensor:
        """See ``PackedForm``."""
        codes_OI, scales_Og = codes_of(packed)
        return codes_OI.float() * scales_Og.float().repeat_interleave(packed.group, -1)


INT8 = CodePanels("int8", 8, 8.25, -127, 127, (64, 32, 16, 8))
INT4 = CodePanels("int4", 4, 4.5, -8, 7, (32, 16, 8))


def pack_codes(parts: Sequence[CodeRows]) -> PackedMatrix | None:
    """Return rows of codes, one part after the other, in panels with the same codes and scales.

    None for floats, if a scale is no bfloat16, if a code has more bits or is -128, or if the parts
    or their groups do not fit.
    """
    if any(part.codes_RI.is_floating_point() or part.codes_RI.dtype == torch.uint8 for part in parts):
        return None
    bits, inputs = parts[0].bits, parts[0].codes_RI.shape[1]
    form = INT4 if bits == 4 else INT8
    group = math.gcd(form.group(inputs), *(part.group for part in parts))
    fits = all(part.bits == form.width and part.fits(form.least, form.most) for part in parts)
    if group < 8 or not fits:
        return None
    scales = torch.cat([_spread(part.scales_Rg, part.group // group) for part in parts])
    codes = torch.cat([part.codes_RI for part in parts]).to(torch.int8)
    narrow = scales.bfloat16()
    if not torch.equal(narrow.float(), scales.float()):
        return None
    laid = _lay(_padded(codes).view(-1, PANEL, inputs), form.width)
    return PackedMatrix(form.name, len(codes), inputs, group, laid, _panels(_padded(narrow)))


def _spread(scales_Rg: Tensor, times: int) -> Tensor:
    return scales_Rg.repeat_interleave(times, 1)


def codes_of(packed: PackedMatrix) -> tuple[Tensor, Tensor]:
    """Return the codes int8 ``[O, I]`` and scales bfloat16 ``[O, g]`` of "int4" or "int8"."""
    assert packed.scales is not None
    scales = packed.scales.mT.reshape(-1, packed.inputs // packed.group)[: packed.outputs]
    if packed.form == "int8":
        found = _read(packed.values, packed.inputs)
        codes = torch.where(found >= 128, -(found & 127).to(torch.int8), found.to(torch.int8))
    else:
        laid = packed.values.view(len(packed.values), -1, 2, 16, 4)
        words = torch.empty(*laid.shape[:-1], 8, dtype=torch.uint8)
        words[..., INT4_LOW], words[..., INT4_HIGH] = laid & 15, laid >> 4
        codes = words.permute(0, 2, 3, 1, 4).reshape(len(laid), PANEL, -1).view(torch.int8) - 8
    return codes.view(-1, packed.inputs)[: packed.outputs], scales


def _int4_scales(values_OgG: Tensor) -> Tensor:
    """Return the scales of groups, bfloat16 ``[O, g]``."""
    largest = values_OgG.gather(-1, values_OgG.abs().argmax(-1, keepdim=True)).squeeze(-1)
    best = (largest / -8).bfloat16()
    least = _error(values_OgG, best)
    for factor in SMALLER_SCALES:
        other = (largest / -8 * factor).bfloat16()
        error = _error(values_OgG, other)
        best, least = torch.where(error < least, other, best), torch.minimum(error, least)
    return best


def _error(values_OgG: Tensor, scales_Og: Tensor) -> Tensor:
    rest = values_OgG - _codes(values_OgG, scales_Og, -8, 7) * scales_Og.float().unsqueeze(-1)
    return rest.square().sum(-1)


def _codes(values_OgG: Tensor, scales_Og: Tensor, least: int, most: int) -> Tensor:
    """Return int64 codes; 0 where the scale is 0."""
    scale = scales_Og.float().unsqueeze(-1)
    codes = torch.where(scale == 0, 0.0, (values_OgG / scale).round())
    return codes.clamp(least, most).long()


def _panels(scales_Og: Tensor) -> Tensor:
    """Return scales ``[p, g, 32]``."""
    return scales_Og.view(-1, PANEL, scales_Og.shape[1]).mT.contiguous()


def _lay(codes_pOI: Tensor, width: int) -> Tensor:
    """Return ``CodePanels.values`` of codes int8 ``[p, 32, I]``."""
    panels, _, inputs = codes_pOI.shape
    if width == 8:  # pairs of codes are moved as one number
        pairs = (codes_pOI.abs() | (codes_pOI < 0).to(torch.int8) << 7).view(torch.int16)
        moved = pairs.view(panels, 2, 4, 4, inputs // 4, 2).permute(0, 4, 1, 2, 5, 3)
    else:
        unsigned = (codes_pOI + 8).view(torch.uint8)
        words = (unsigned[..., 0::2] | unsigned[..., 1::2] << 4).view(torch.int32)
        even, odd = words & 0x0F0F0F0F, words >> 4 & 0x0F0F0F0F
        even, odd = ((one | one >> 4) & 0x00FF00FF for one in (even, odd))
        even, odd = ((one | one >> 8) & 0xFFFF for one in (even, odd))
        moved = (even | odd << 16).view(panels, 2, 16, inputs // 8).permute(0, 3, 1, 2)
    return moved.contiguous().view(torch.uint8).view(panels, inputs * width // 32, 2, 64)


def _read(laid: Tensor, inputs: int) -> Tensor:
    """Return codes ``[p, 32, I]`` of ``[p, I / 4, 2, 64]``."""
    words = laid.view(-1, inputs // 4, 2, 4, 2, 8).transpose(3, 4).reshape(-1, inputs // 4, 2, 2, 16, 2)
    return words.permute(0, 2, 4, 1, 3, 5).reshape(-1, PANEL, inputs)
