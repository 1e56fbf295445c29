"""Packed forms of weights in memory, and products with them in PyTorch: the reference of kernels.

Letters: T rows; O output, I input features; X matrices, P rows of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire.contracts.linear import PackedMatrix, WeightForm
from quire.weights.block_panels import block_rows_of, unpack_blocks
from quire.weights.float8 import Float8Rows, rounded_rows
from quire.weights.gguf_blocks import HEADS, SIZES, values_of_rows
from quire.weights.panels import BFLOAT16, FLOAT32, INT4, INT8, PANEL


class PackedForm(Protocol):
    """One way to keep the weights ``[O, I]`` of a map in memory."""

    @property
    def name(self) -> WeightForm:
        """The name in options, errors and logs."""

    @property
    def bits(self) -> float:
        """The bits of a weight with its share of a scale, at least."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of ``PackedMatrix.values``."""

    def group(self, inputs: int) -> int:
        """Return the number of inputs that share a scale; 0 if the form has no scales, or none for
        this number of inputs."""

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Return the shape of ``PackedMatrix.values``."""

    def pack(self, weight_OI: Tensor) -> PackedMatrix:
        """Return the weights in this form, rounded to its values."""

    def unpack(self, packed: PackedMatrix) -> Tensor:
        """Return the values ``[O, I]`` in float32."""


FORMS: Mapping[WeightForm, PackedForm] = {form.name: form for form in (FLOAT32, BFLOAT16, INT8, INT4, Float8Rows())}


EXACT_FORMS: tuple[WeightForm, ...] = ("float32", "bfloat16", "blocks", "rows")
"""Forms whose rows are those of the checkpoint, so that a tied embedding reads them."""


def pack(weight_OI: Tensor, form: WeightForm) -> PackedMatrix:
    return FORMS[form].pack(weight_OI)


def unpack(packed: PackedMatrix) -> Tensor:
    """Return the values ``[O, I]`` in float32, which is exact for all forms but "fp8"."""
    if packed.order_I is not None:
        return unpack(replace(packed, order_I=None))[:, packed.order_I.argsort()]
    if packed.form == "rows":
        return torch.cat([values_of_rows(kind, rows_RB) for kind, rows_RB in kept_parts(packed)])
    return unpack_blocks(packed) if packed.form == "blocks" else FORMS[packed.form].unpack(packed)


def kept_parts(packed: PackedMatrix) -> list[tuple[str, Tensor]]:
    """Return the formats of "rows", and their blocks, uint8 ``[R, bytes of a row]``."""
    sizes = [HEADS.get(kind, 0) + packed.inputs // SIZES[kind][0] * SIZES[kind][1] for kind, _ in packed.kinds]
    parts = torch.split(packed.values, [rows * size for (_, rows), size in zip(packed.kinds, sizes, strict=True)])
    return [(kind, part.view(rows, -1)) for (kind, rows), part in zip(packed.kinds, parts, strict=True)]


def rows_of(packed: PackedMatrix, outputs_T: Tensor) -> Tensor:
    """Return rows ``[T, I]`` of the weights by output number, int64 in 0..O-1, in the dtype of the
    values. The form is "float32", "bfloat16" or "blocks" (float32)."""
    if packed.form == "blocks":
        return block_rows_of(packed, outputs_T)
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
    """Return ``[P, O]``. Each matrix multiplies the rows from the end before it to its own end."""
    rows = x_PI.tensor_split(ends_X[:-1].long().cpu())
    return torch.cat([multiply(rows_TI, one, None) for rows_TI, one in zip(rows, stack, strict=True)])
