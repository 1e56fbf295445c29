"""Linear maps with weights in oneDNN's own layout (CPU, bfloat16).

A plain call lets oneDNN read a row-major weight, at about two thirds of the memory bandwidth of its
blocked layout; and decoding is reading weights. PyTorch's own compiler calls these functions when
it freezes a model. They are not public; a PyTorch without them gets plain weights.

Letters: T rows, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.contracts.rows import LayerKernels
from quire.nn.linear import Linear

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

    def product(self, x_TI: Tensor) -> Tensor:
        """Map ``[T, I]`` to a fresh ``[T, O]``."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self.weight, self.bias, "none", [], "")
        return out


def packed(plain: Linear) -> Linear:
    """Return the packed form if there is one, else the given map."""
    return PackedLinear(plain) if can_pack(plain.weight.dtype, plain.weight.device) else plain


def pack_maps(layer: object, kernels: LayerKernels) -> None:
    """Give a layer, and the layers in it, the kernels that they have a place for. Replace linear
    maps by their packed forms, if there are any. A layer that keeps some of its maps as they are
    has a ``pack`` of its own."""
    if kernels.rows is not None and hasattr(layer, "row_kernels"):
        layer.row_kernels = kernels.rows
    for name, part in parts_of(layer):
        if isinstance(part, Linear):
            setattr(layer, name, packed(part))
        elif hasattr(part, "pack"):
            part.pack(kernels)
        elif type(part).__module__.startswith(LAYERS):
            pack_maps(part, kernels)


def parts_of(layer: object) -> Iterator[tuple[str, object]]:
    """Yield the names and values of an object's attributes."""
    slots = [name for kind in type(layer).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in (*slots, *getattr(layer, "__dict__", ())):
        yield name, getattr(layer, name, None)
