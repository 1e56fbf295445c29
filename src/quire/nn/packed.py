"""Linear maps with weights in the layout of a kernel.

Decoding is bound by reading weights, and a row-major weight reaches at most two thirds of the
memory bandwidth of a blocked layout. ``KernelLinear`` uses the layout of ``contracts.linear``, in
any of its forms. Without such a kernel ``PackedLinear`` uses oneDNN's layout (CPU, bfloat16), by
the functions that PyTorch's compiler calls when it freezes a model. They are not public; a PyTorch
without them gets plain weights.

Letters: T rows, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from quire.contracts.block_calls import LayerKernels
from quire.contracts.linear import BlockKernel, BlockRows, CodeKernel, CodeRows, LinearMap, WeightForm
from quire.nn.linear import Linear
from quire.weights.packed import unpack

LAYERS = ("quire.nn.", "quire.models.")
"""Packages that define the classes of a model's layers."""
ROWS_HINT = 16
"""Number of rows by which oneDNN chooses a layout; the layout runs any number of rows."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if this PyTorch packs weights of this dtype. It refuses without AVX-512 or
    similar."""
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
    """The same map as its plain ``Linear``. ``weight`` has the right shape; its bytes are
    oneDNN's."""

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
    """The same map as its plain ``Linear``, exact or quantised. ``weight`` has shape and dtype
    only."""

    __slots__ = ("map",)

    def __init__(self, plain: Linear, made: LinearMap) -> None:
        super().__init__(torch.empty_like(plain.weight, device="meta"), plain.bias, plain.name)
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


def kernel_maps(maps: Sequence[Linear]) -> list[LinearMap] | None:
    """Return the kernel's maps if all of these are such; else None."""
    found = [one.map for one in maps if isinstance(one, KernelLinear)]
    return found if len(found) == len(maps) else None


PLAIN = LayerKernels()


def packed(plain: Linear, kernels: LayerKernels = PLAIN) -> Linear:
    """Return the map in the form of the given kernels, else packed by oneDNN, else unchanged."""
    if (made := kept(plain, kernels)) is not None:
        return KernelLinear(plain, made)
    if plain.weight.device.type != "cpu" and kernels.quantization is None:
        return plain  # PyTorch's products are the best of floats there
    weight = plain.weight if kernels.read is None else kernels.read(plain.weight)
    if (kernel := kernels.linear) is not None:
        form: WeightForm | None = kernels.quantization
        if form is None or kernel.refusal(weight, form):
            form = kernel.lossless(weight)
        if form is not None:
            return KernelLinear(plain, kernel.pack(weight, plain.bias, form))
    return PackedLinear(Linear(weight, plain.bias, plain.name)) if can_pack(weight.dtype, weight.device) else plain


def kept(plain: Linear, kernels: LayerKernels) -> LinearMap | None:
    """Return the map of rows as the file has them (``LayerKernels.stored``); None if there are
    none, or no product for them."""
    kernel = kernels.linear
    if kernels.stored is None or kernels.quantization is not None or not isinstance(kernel, BlockKernel):
        return None
    parts = kernels.stored(plain.weight)
    if tensors := [part for part in parts if isinstance(part, Tensor)]:
        return kernel.pack_parts(tensors, plain.bias)
    codes = [part for part in parts if isinstance(part, CodeRows)]
    if codes:
        return kernel.pack_codes(codes, plain.bias, plain.weight.dtype) if isinstance(kernel, CodeKernel) else None
    blocks = [part for part in parts if isinstance(part, BlockRows)]
    return kernel.pack_blocks(blocks, plain.in_features, plain.bias, plain.weight.dtype) if blocks else None


def pack_maps(layer: object, kernels: LayerKernels) -> int:
    """Give a layer and its inner layers their kernels, and replace linear maps by packed forms.

    A layer with a ``pack`` method packs itself. Return the growth of the weights in bytes.
    """
    grown = 0
    if kernels.rows is not None and hasattr(layer, "row_kernels"):
        layer.row_kernels = kernels.rows
    if kernels.mixers is not None and hasattr(layer, "use_kernel"):
        layer.use_kernel(kernels.mixers)
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


def place_late(part: object, place: Callable[[Tensor], Tensor]) -> None:
    """Give memory to the tensors of a layer that have none; ``LazyParameters.place``."""
    seen = set[int]()  # layers may know each other

    def visit(one: object) -> None:
        if isinstance(one, list | tuple):
            for inner in one:
                visit(inner)
        elif type(one).__module__.startswith(LAYERS) and id(one) not in seen:
            seen.add(id(one))
            for name, value in parts_of(one):
                if isinstance(value, Tensor) and value.is_meta:
                    object.__setattr__(one, name, place(value))
                else:
                    visit(value)

    visit(part)
