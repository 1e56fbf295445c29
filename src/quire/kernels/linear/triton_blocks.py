"""Linear maps over the blocks of GGUF files in Triton, for CUDA devices. The reference is
``quire.weights.packed``.

A program decodes 32 inputs of some outputs at a time, rounds them to the type of the activations
and multiplies. So the weights are those of the model that is expanded when it is loaded. Letters: T
rows, I input, O output features; X maps of a stack, P rows of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from quire.base.errors import CheckpointError, InvalidArgument
from quire.contracts.linear import BlockRows, CodeRows, LinearMap, PackedMatrix, WeightForm
from quire.kernels.linear.ordered_map import by_blocks
from quire.kernels.triton_support import known_dtypes, on_device_of
from quire.weights.block_panels import GROUP, KINDS
from quire.weights.gguf_blocks import FP4_VALUES, HEADS, IQ4_VALUES, SIZES, has_finite_scales
from quire.weights.packed import kept_parts

FEW, MANY = 16, 64
"""Rows of a program, and outputs."""


class TritonBlocks:
    """``contracts.linear.BlockKernel``; weights that a file has as floats stay PyTorch's."""

    name = "Triton"
    bfloat16_kinds: frozenset[str] = frozenset()
    """See the contract: GPUs have instructions for products of bfloat16."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _table(self) -> Tensor:
        return torch.tensor([*IQ4_VALUES, *FP4_VALUES], dtype=torch.int8, device=self._device)

    def refusal(self, weight_OI: Tensor, form: WeightForm) -> str:
        """See the contract."""
        del weight_OI
        return f"the Triton products are of blocks of GGUF files, not of {form} weights"

    def lossless(self, weight_OI: Tensor) -> WeightForm | None:
        """Return None: PyTorch's products are better for all other forms."""
        del weight_OI
        return None

    def pack(self, weight_OI: Tensor, bias_O: Tensor | None, form: WeightForm) -> LinearMap:
        """See the contract. ``InvalidArgument``: always."""
        del bias_O
        raise InvalidArgument(self.refusal(weight_OI, form), field="form", given=form)

    def pack_parts(self, parts: Sequence[Tensor], bias_O: Tensor | None) -> None:
        """Return None: PyTorch's products are better for floats."""
        del parts, bias_O

    def pack_blocks(
        self, parts: Sequence[BlockRows], inputs: int, bias_O: Tensor | None, dtype: torch.dtype
    ) -> TritonMap | None:
        """See ``contracts.linear.BlockKernel``."""
        if dtype == torch.float16 or dtype not in known_dtypes() or any(part.kind not in KINDS for part in parts):
            return None
        found = []
        for part in parts:
            rows_RB = part.rows_RB.to(self._device)
            if not has_finite_scales(part.kind, rows_RB):
                raise CheckpointError(f"{part.name} has a scale in {part.kind} that is not finite; the file is damaged")
            found.append(rows_RB.flatten())
        joined = groupby(parts, lambda part: part.kind)
        kinds = tuple((kind, sum(len(part.rows_RB) for part in some)) for kind, some in joined)
        outputs = sum(rows for _, rows in kinds)
        values = torch.cat(found) if len(found) > 1 else found[0].clone()
        return TritonMap(PackedMatrix("rows", outputs, inputs, 0, values, None, kinds), bias_O, dtype, self._table)

    def pack_codes(self, parts: Sequence[CodeRows], bias_O: Tensor | None, dtype: torch.dtype) -> LinearMap | None:
        """See ``contracts.linear.CodeKernel``."""
        return by_blocks(self, parts, bias_O, dtype)

    def join(self, maps: Sequence[LinearMap]) -> TritonStack | None:
        """See ``contracts.linear.JoiningKernel``."""
        found = [one for one in maps if isinstance(one, TritonMap)]
        same = len({(one.dtype, one.weights.inputs, one.weights.kinds) for one in found}) == 1
        return TritonStack(found) if len(found) == len(maps) and same else None


class TritonMap:
    """``contracts.linear.TableMap`` of activations of one dtype."""

    __slots__ = ("_bias", "_parts", "_table", "dtype", "weights")

    def __init__(self, weights: PackedMatrix, bias_O: Tensor | None, dtype: torch.dtype, table: Tensor) -> None:
        """``table``: the numbers of codes, as ``block_programs.values_of`` takes them."""
        self.weights, self.dtype = weights, dtype
        self._parts, self._table = kept_parts(weights), table
        self._bias = None if bias_O is None else bias_O.float().contiguous()

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See the contract. ``InvalidArgument``: x has another dtype."""
        from quire.kernels.linear.block_programs import multiply_blocks

        x_TI = _checked(x_TI, self.dtype)
        count, size = len(x_TI), _tile(len(x_TI))
        y_TO, first = x_TI.new_empty(count, self.weights.outputs), 0
        with on_device_of(x_TI):
            for kind, rows_RB in self._parts if count else ():
                rows = len(rows_RB)
                bias = self._table if self._bias is None else self._bias[first : first + rows]
                multiply_blocks[(-(-count // size), -(-rows // size))](
                    y_TO[:, first:], x_TI, rows_RB, bias, self._table, self._table, x_TI.stride(0), y_TO.stride(0),
                    count, rows, BIAS=self._bias is not None, MAPS=0, X=1, **_sizes(kind, size), INPUTS=x_TI.shape[1],
                )  # fmt: skip
                first += rows
        return y_TO

    def rows(self, outputs_T: Tensor) -> Tensor:
        """See ``contracts.linear.TableMap``."""
        from quire.kernels.linear.block_programs import read_rows

        (count,), inputs, first = outputs_T.shape, self.weights.inputs, 0
        out_TI = torch.empty(count, inputs, dtype=self.dtype, device=self._table.device)
        with on_device_of(out_TI):
            for kind, rows_RB in self._parts if count else ():
                sizes = _sizes(kind, FEW)
                del sizes["M"]
                read_rows[(-(-count // FEW), inputs // GROUP)](
                    out_TI, outputs_T, rows_RB, self._table, count, first, len(rows_RB), INPUTS=inputs, **sizes
                )
                first += len(rows_RB)
        return out_TI


class TritonStack:
    """``contracts.linear.LinearStack`` over maps of equal parts, whose memory it reads."""

    __slots__ = ("_maps", "_parts", "weights")

    def __init__(self, maps: Sequence[TritonMap]) -> None:
        self._maps = maps
        self.weights: Sequence[PackedMatrix] = [one.weights for one in maps]
        self._parts = [
            (
                some[0][0],
                len(some[0][1]),
                torch.tensor([rows_RB.data_ptr() for _, rows_RB in some]).to(some[0][1].device),
            )
            for some in zip(*(one._parts for one in maps), strict=True)
        ]
        """Format, rows and addresses of each part."""

    def __call__(self, x_PI: Tensor, ends_X: Tensor) -> Tensor:
        """See the contract. ``InvalidArgument``: x has another dtype."""
        from quire.kernels.linear.block_programs import multiply_blocks

        table, maps = self._maps[0]._table, len(self._maps)
        x_PI = _checked(x_PI, self._maps[0].dtype)
        count, first = len(x_PI), 0
        size = _tile(count // maps)
        y_PO = x_PI.new_empty(count, self.weights[0].outputs)
        # Each map has at most one tile that is not full.
        tiles = count // size + min(count, maps)
        with on_device_of(x_PI):
            for kind, rows, addresses_X in self._parts if count else ():
                multiply_blocks[(tiles, -(-rows // size))](
                    y_PO[:, first:], x_PI, addresses_X, table, table, ends_X, x_PI.stride(0), y_PO.stride(0), count, rows,
                    BIAS=False, MAPS=maps, X=1 << (maps - 1).bit_length(), **_sizes(kind, size), INPUTS=x_PI.shape[1],
                )  # fmt: skip
                first += rows
        return y_PO


def _checked(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype != dtype:
        raise InvalidArgument(f"the map is of {dtype} activations; x is {x.dtype}")
    return x if x.stride(1) == 1 else x.contiguous()


def _tile(rows: int) -> int:
    """Return the rows of a program, and its outputs."""
    return FEW if rows <= FEW else MANY


def _sizes(kind: str, tile: int) -> dict[str, Any]:
    numbers, size = SIZES[kind]
    # A product that is fused with a sum would be another weight.
    head = HEADS.get(kind, 0)
    return {
        "KIND": kind, "NUMBERS": numbers, "BYTES": size, "HEAD": head, "M": tile, "N": tile, "enable_fp_fusion": False,
    }  # fmt: skip
