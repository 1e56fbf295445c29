"""Linear maps with weights in the layout of a kernel.

Decoding is reading weights, and a row-major weight is read at two thirds or less of the memory
bandwidth of a blocked layout. ``KernelLinear`` has that of ``contracts.linear``, in any of its
forms. Without such a kernel ``PackedLinear`` has oneDNN's own (CPU, bfloat16): PyTorch's compiler
calls these functions when it freezes a model. They are not public; a PyTorch without them gets
plain weights.

Letters: T rows, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.contracts.block_calls import LayerKernels
from quire.contracts.linear import LinearMap, WeightForm
from quire.nn.linear import Linear
from quire.weights.packed import unpack

LAYERS = ("quire.nn.", "quire.models.")
"""Packages that define the classes of a model's layers."""
ROWS_HINT = 16
"""Number of rows for oneDNN's choice of layout; any number runs."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether this PyTorch packs such weights. It refuses without AVX-512 or its like."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class PackedLinear(Linear):
    """The same map as its plain ``Linear``. ``weight`` is opaque: right shape, oneDNN's bytes."""

    __slots__ = ()

    def __init__(self, plain: Linear) -> None:
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(plain.weight, ROWS_HINT), plain.bias, plain.name)

    def plain_weight(self) -> Tensor:
        """Return the weight ``[O, I]`` as rows."""
        return self.weight.to_dense()

    def product(self, x_TI: Tensor) -> Tensor:
        """Map ``[T, I]`` to a fresh ``[T, O]``."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self.weight, self.bias, "none", [], "")
        return out


class KernelLinear(Linear):
    """The same map as its plain ``Linear``, or one of fewer bits. ``weight`` has shape and dtype
    only."""

    __slots__ = ("map",)

    def __init__(self, plain: Linear, made: LinearMap) -> None:
        super().__init__(plain.weight.to("meta"), plain.bias, plain.name)
        self.map = made

    @property
    def weight_bytes(self) -> int:
        return self.map.weights.nbytes

    def plain_weight(self) -> Tensor:
        """Return the weight ``[O, I]`` as rows."""
        return unpack(self.map.weights).to(self.weight.dtype)

    def product(self, x_TI: Tensor) -> Tensor:
        """Map ``[T, I]`` to a fresh ``[T, O]``."""
        return self.map(x_TI)


PLAIN = LayerKernels()


def packed(plain: Linear, kernels: LayerKernels = PLAIN) -> Linear:
    """Return the map in the form that the kernels want, else packed by oneDNN, else as it is."""
    weight = plain.weight if kernels.read is None else kernels.read(plain.weight)
    if (kernel := kernels.linear) is not None:
        form: WeightForm | None = kernels.quantization
        if form is None or kernel.refusal(weight, form):
            form = kernel.lossless(weight)
        if form is not None:
            return KernelLinear(plain, kernel.pack(weight, plain.bias, form))
    return PackedLinear(Linear(weight, plain.bias, plain.name)) if can_pack(weight.dtype, weight.device) else plain


def pack_maps(layer: object, kernels: LayerKernels) -> int:
    """Give a layer, and the layers in it, the kernels that they have a place for. Replace linear
    maps by their packed forms, if there are any. A layer that keeps some of its maps as they are
    has a ``pack`` of its own. Return the bytes by which the weights have grown."""
    grown = 0
    if kernels.rows is not None and hasattr(layer, "row_kernels"):
        layer.row_kernels = kernels.rows
    for name, part in parts_of(layer):
        if isinstance(part, Linear):
            made = packed(part, kernels)
            grown += made.weight_bytes - part.weight_bytes
            setattr(layer, name, made)
        elif hasattr(part, "pack"):
            grown += part.pack(kernels)
        elif type(part).__module__.startswith(LAYERS):
            grown += pack_maps(part, kernels)
    return grown


def parts_of(layer: object) -> Iterator[tuple[str, object]]:
    """Yield the names and values of an object's attributes."""
    slots = [name for kind in type(layer).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in (*slots, *getattr(layer, "__dict__", ())):
        yield name, getattr(layer, name, None)
