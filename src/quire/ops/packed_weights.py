"""Packed weights in PyTorch: the definition of ``kernels/cpu/linear.h`` and ``kernels.float8``.

Letters: O output, I input features; G inputs of a group; p panels of 32 outputs; X matrices, P rows
of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire.contracts.linear import PackedMatrix, WeightForm, group_of

PANEL = 32
"""Outputs of a panel."""
INT4_BITS = torch.tensor([16 * (i % 2) + 4 * (i // 2) for i in range(8)])
"""First bits of eight inputs in a word."""
FLOAT8 = torch.float8_e4m3fn
SMALLER_SCALES = (0.95, 0.9, 0.85, 0.8, 0.75)
"""Factors for a smaller INT4 scale: it clips the largest value and may fit most values better."""


def pack(weight_OI: Tensor, form: WeightForm) -> PackedMatrix:
    """Return the weights in panels; outputs up to the next multiple of 32 are 0.

    A scale of "int8" is the largest absolute value over 127. A scale of "int4" maps the largest
    value to -8, or is that scale times one of ``SMALLER_SCALES``: the first with the least squared
    error. "fp8" is ``rounded_rows`` of the weights.
    """
    outputs, inputs = weight_OI.shape
    if form == "fp8":
        return PackedMatrix(form, outputs, inputs, inputs, *rounded_rows(weight_OI))
    weight = F.pad(weight_OI, (0, 0, 0, -outputs % PANEL))
    panels = len(weight) // PANEL
    if form == "float32":
        return PackedMatrix(form, outputs, inputs, 0, weight.float().view(panels, PANEL, inputs).mT.contiguous(), None)
    if form == "bfloat16":
        pairs = weight.bfloat16().view(panels, PANEL, inputs // 2, 2).transpose(1, 2).contiguous()
        return PackedMatrix(form, outputs, inputs, 0, pairs, None)
    group = group_of(form, inputs)
    values = weight.float().view(len(weight), inputs // group, group)
    scales = _scales(values, form)
    codes = _codes(values, scales, form)
    if form == "int8":
        laid = _lay((codes.abs() | ((codes < 0) << 7)).view(panels, PANEL, inputs))
    else:
        words = ((codes + 8).view(panels, 2, 16, inputs // 8, 8) << INT4_BITS).sum(-1).transpose(2, 3).transpose(1, 2)
        laid = torch.stack([words >> bit & 255 for bit in (0, 8, 16, 24)], -1).flatten(3)
    scales_pGP = scales.view(panels, PANEL, inputs // group).mT.contiguous()
    return PackedMatrix(form, outputs, inputs, group, laid.to(torch.uint8), scales_pGP)


def unpack(packed: PackedMatrix) -> Tensor:
    """Return the values ``[O, I]`` in float32: exact for all forms but "fp8", whose values are
    rounded once."""
    if packed.form == "fp8":
        assert packed.scales is not None
        return packed.values.float() * packed.scales
    values, inputs = packed.values, packed.inputs
    panels = len(values)
    if packed.form == "float32":
        return values.mT.reshape(-1, inputs)[: packed.outputs]
    if packed.form == "bfloat16":
        return values.float().transpose(1, 2).reshape(-1, inputs)[: packed.outputs]
    laid = values.long()
    if packed.form == "int8":
        codes = _read(laid, inputs)
        numbers = torch.where(codes >= 128, 128 - codes, codes)
    else:
        words = (laid.view(panels, -1, 2, 16, 4) << torch.tensor([0, 8, 16, 24])).sum(-1)
        codes = words.permute(0, 2, 3, 1).unsqueeze(-1) >> INT4_BITS & 15
        numbers = codes.reshape(panels, PANEL, inputs) - 8
    assert packed.scales is not None
    scales = packed.scales.float().mT.repeat_interleave(packed.group, -1)
    return (numbers.float() * scales).view(-1, inputs)[: packed.outputs]


def rows_of(packed: PackedMatrix, outputs_T: Tensor) -> Tensor:
    """Return rows ``[T, I]`` of the weights by output number, int64 in 0..O-1, in the dtype of the
    values. The form is "float32" or "bfloat16"."""
    values = packed.values
    if packed.form == "bfloat16":  # pairs of inputs are taken as one number
        values = values.view(torch.int32).squeeze(-1)
    return values[outputs_T // PANEL, :, outputs_T % PANEL].view(packed.values.dtype)


def multiply(x_TI: Tensor, packed: PackedMatrix, bias_O: Tensor | None) -> Tensor:
    """Return ``[T, O]`` in the dtype of x, rounded once. "fp8" multiplies ``rounded_rows`` of x."""
    bias = None if bias_O is None else bias_O.float()
    if packed.form == "fp8":
        assert packed.scales is not None
        values_TI, scales_T1 = rounded_rows(x_TI)
        sums_TO = F.linear(values_TI.float(), packed.values.float()) * (scales_T1 * packed.scales.mT)
        return (sums_TO if bias is None else sums_TO + bias).to(x_TI.dtype)
    return F.linear(x_TI.float(), unpack(packed), bias).to(x_TI.dtype)


def multiply_stack(x_PI: Tensor, stack: Sequence[PackedMatrix], ends_X: Tensor) -> Tensor:
    """Return ``[P, O]``: ``multiply`` by matrix x of the rows from ``ends[x - 1]`` to
    ``ends[x]``."""
    rows = x_PI.tensor_split(ends_X[:-1].long().cpu())
    return torch.cat([multiply(rows_TI, one, None) for rows_TI, one in zip(rows, stack, strict=True)])


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows ``[T, I]`` in float8_e4m3fn, and their scales, float32 ``[T, 1]``. The largest
    absolute value of a row becomes the largest value of that type."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True) / torch.finfo(FLOAT8).max
    scales.clamp_(min=torch.finfo(torch.float32).tiny)
    return (wide / scales).to(FLOAT8), scales


def _scales(values_OgG: Tensor, form: WeightForm) -> Tensor:
    """Return the scales of groups, bfloat16 ``[O, g]``."""
    largest = values_OgG.gather(-1, values_OgG.abs().argmax(-1, keepdim=True)).squeeze(-1)
    if form == "int8":
        return (largest.abs() / 127).bfloat16()
    best = (largest / -8).bfloat16()
    least = _error(values_OgG, best)
    for factor in SMALLER_SCALES:
        other = (largest / -8 * factor).bfloat16()
        error = _error(values_OgG, other)
        best, least = torch.where(error < least, other, best), torch.minimum(error, least)
    return best


def _error(values_OgG: Tensor, scales_Og: Tensor) -> Tensor:
    rest = values_OgG - _codes(values_OgG, scales_Og, "int4") * scales_Og.float().unsqueeze(-1)
    return rest.square().sum(-1)


def _codes(values_OgG: Tensor, scales_Og: Tensor, form: WeightForm) -> Tensor:
    """Return int64 codes; 0 where the scale is 0."""
    scale = scales_Og.float().unsqueeze(-1)
    codes = torch.where(scale == 0, 0.0, (values_OgG / scale).round())
    return codes.clamp(*((-127, 127) if form == "int8" else (-8, 7))).long()


def _lay(codes_pOI: Tensor) -> Tensor:
    """Return ``[p, I / 4, 2, 64]`` of codes ``[p, 32, I]``."""
    panels, _, inputs = codes_pOI.shape
    words = codes_pOI.view(panels, 2, 16, inputs // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return words.reshape(panels, inputs // 4, 2, 2, 4, 8).transpose(3, 4).reshape(panels, inputs // 4, 2, 64)


def _read(laid: Tensor, inputs: int) -> Tensor:
    """Return codes ``[p, 32, I]`` of ``[p, I / 4, 2, 64]``."""
    words = laid.view(-1, inputs // 4, 2, 4, 2, 8).transpose(3, 4).reshape(-1, inputs // 4, 2, 2, 16, 2)
    return words.permute(0, 2, 4, 1, 3, 5).reshape(-1, PANEL, inputs)
