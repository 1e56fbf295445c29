"""Linear maps whose weights a kernel holds in a layout of its own.

Letters: T rows, I input, O output features; H heads; X maps of a stack, P rows of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

WeightForm: TypeAlias = Literal["float32", "bfloat16", "int8", "int4", "fp8", "blocks", "rows"]
"""The form of a stored weight. "int8" and "int4": codes with one bfloat16 scale for a group of
inputs. "fp8": float8_e4m3fn with one float32 scale for each output. "blocks": codes and scales of a
file, in panels; "rows": the same as they lie in the file."""

Quantization: TypeAlias = Literal["int8", "int4", "fp8"]


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """The weights ``[O, I]`` of one map, laid out as ``kernels/cpu/linear.h`` says; "fp8": rows."""

    form: WeightForm
    outputs: int
    inputs: int
    group: int
    """Number of inputs that share a scale; 0 without scales."""
    values: Tensor
    """float32, bfloat16, uint8 codes, or float8_e4m3fn."""
    scales: Tensor | None
    """bfloat16 ``[ceil(O / 32), I / group, 32]``; for "fp8" float32 ``[O, 1]``"""
    kinds: tuple[tuple[str, int], ...] = ()
    """"blocks" and "rows": the formats of consecutive outputs, and their numbers."""
    order_I: Tensor | None = None
    """The input of each column of the values; None: they are in order."""

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """Rows of a matrix in the blocks of one format, as a file has them."""

    name: str
    """Of the tensor, in errors."""
    kind: str
    """The format, by its name in GGUF."""
    rows_RB: Tensor
    """uint8 ``[R, bytes of a row]``, with a head if the format has one in memory
    (``gguf_blocks.HEADS``)."""
    is_mapped: bool = False
    """Whether the rows are a part of a file's map, so that their pages may be dropped once they are
    packed."""


@dataclass(frozen=True, slots=True, eq=False)
class CodeRows:
    """Rows of a matrix as codes times scales, as a file has them, less their zeros."""

    bits: int
    group: int
    """Inputs that share a scale."""
    codes_RI: Tensor
    """int8 or int16, or float8_e4m3fn; uint8 for floats of 4 bits (E2M1)."""
    scales_Rg: Tensor
    """Of any float type."""
    order_I: Tensor | None = None
    """The input of each column, int64; None: they are in order."""
    name: str = ""
    """Of the tensor, in errors."""
    unit: float = 1.0
    """Factor of all scales; each product is rounded to float32."""

    def fits(self, least: int, most: int) -> bool:
        """Return True if all codes are within these bounds."""
        found = torch.aminmax(self.codes_RI)
        return int(found.min) >= least and int(found.max) <= most


class LinearMap(Protocol):
    """``y = x W^T + b`` over packed weights."""

    weights: PackedMatrix

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Map ``[T, I]`` to a fresh ``[T, O]`` of the same dtype. Sums are in float32. On a CPU a
        row's result is the same to the bit whatever other rows there are, on any number of threads.
        """
        ...


@runtime_checkable
class TableMap(LinearMap, Protocol):
    """A map whose weights are also read row by row, such as a tied head."""

    def rows(self, outputs_T: Tensor) -> Tensor:
        """Return rows ``[T, I]`` of the weights by output number, int64 in 0..O-1."""
        ...


class LinearKernel(Protocol):
    """Packs weights and multiplies with them."""

    name: str

    def refusal(self, weight_OI: Tensor, form: WeightForm) -> str:
        """Return the reason why a weight cannot be packed in a form, for activations of its dtype;
        "" if it can."""
        ...

    def lossless(self, weight_OI: Tensor) -> WeightForm | None:
        """Return the smallest form that holds all values exactly; None if the weight cannot be
        packed."""
        ...

    def pack(self, weight_OI: Tensor, bias_O: Tensor | None, form: WeightForm) -> LinearMap:
        """Return the map for activations of the weight's dtype. It holds no reference to the
        weight."""
        ...


@runtime_checkable
class BlockKernel(Protocol):
    """A ``LinearKernel`` that also packs a matrix from several tensors, and multiplies blocks of
    some formats without expanding them."""

    bfloat16_kinds: frozenset[str]
    """Formats whose blocks it multiplies faster in bfloat16, though this CPU has no instructions
    for products of bfloat16."""

    def pack_parts(self, parts: Sequence[Tensor], bias_O: Tensor | None) -> LinearMap | None:
        """Return the map of rows of one dtype that follow each other, in the smallest form that
        holds all values exactly; None if they cannot be one map without being copied first."""
        ...

    def pack_blocks(
        self, parts: Sequence[BlockRows], inputs: int, bias_O: Tensor | None, dtype: torch.dtype
    ) -> LinearMap | None:
        """Return the map of rows that follow each other, for activations of ``dtype``; None if one
        of the formats has no product, or they cannot be one map.

        ``CheckpointError``: a scale is not finite.
        """
        ...


@runtime_checkable
class CodeKernel(Protocol):
    """A ``LinearKernel`` that also multiplies codes of 4 or 8 bits of a file as they are."""

    def pack_codes(self, parts: Sequence[CodeRows], bias_O: Tensor | None, dtype: torch.dtype) -> LinearMap | None:
        """Return the map of rows that follow each other, for activations of ``dtype``; None if a
        code or a scale has no place in one of its forms."""
        ...


class HeadMap(Protocol):
    """``y = x W^T`` of each of H heads, over packed weights."""

    nbytes: int
    """Of the weights."""

    def __call__(self, x_THI: Tensor, y_THO: Tensor) -> None:
        """Write the products of ``x`` to ``y``, of the same dtype. Their rows and heads may be any
        distance apart, the columns of y follow each other. Sums are in float32. On a CPU a row's
        result is the same to the bit whatever other rows there are, on any number of threads."""
        ...


@runtime_checkable
class HeadKernel(Protocol):
    """A ``LinearKernel`` that also runs the maps of all heads in one call."""

    def pack_heads(self, weight_HOI: Tensor) -> HeadMap | None:
        """Return the maps for activations of the weight's dtype, in the smallest form that holds
        all values exactly; None if the weight cannot be packed. They hold no reference to it."""
        ...


class LinearStack(Protocol):
    """X maps ``y = x W^T`` of one shape over packed weights, each with rows of its own."""

    weights: Sequence[PackedMatrix]
    """Weights of each map, in the memory of the stack."""

    def __call__(self, x_PI: Tensor, ends_X: Tensor) -> Tensor:
        """Map ``[P, I]``, sorted by map, to a fresh ``[P, O]`` of the same dtype. int32 ``ends_X``:
        the ends of the maps' rows, on the device, without a wait. Sums are in float32."""
        ...


@runtime_checkable
class StackKernel(Protocol):
    """A ``LinearKernel`` that also runs all maps of a stack in one call."""

    def stack_refusal(self, weight_XOI: Tensor, form: WeightForm) -> str:
        """Return the reason why a stack cannot be packed in a form on its device; "" if it can.
        Only shape, type and device of the weight are used."""
        ...

    def pack_stack(self, weight_XOI: Tensor, form: WeightForm) -> LinearStack:
        """Return the maps for activations of the weight's dtype. They hold no reference to the
        weight."""
        ...


@runtime_checkable
class JoiningKernel(Protocol):
    """A ``LinearKernel`` that runs maps which it has packed one by one in one call."""

    def join(self, maps: Sequence[LinearMap]) -> LinearStack | None:
        """Return a stack of these maps, without their biases, over their memory; None if it has no
        product for them together."""
        ...
