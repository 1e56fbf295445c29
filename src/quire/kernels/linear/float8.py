"""Linear maps with weights of 8-bit floats, for GPUs that can multiply them.

The reference is ``quire.weights.packed``. Letters: T rows, I input, O output features; X maps
of a stack, P rows of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.contracts.linear import PackedMatrix, WeightForm
from quire.kernels.rows.triton_rows import round_rows
from quire.kernels.triton_support import triton_problem
from quire.weights.float8 import FLOAT8, rounded_rows
from quire.weights.packed import pack

CAPABILITY = (8, 9)
"""Compute capability from which a GPU multiplies 8-bit floats."""
STACK_CAPABILITY = (9, 0)
"""Compute capability of GPUs that multiply stacks of them. PyTorch accepts 10.0 too, but its
program uses instructions of 9.0 only."""
ALIGNED = 16
"""Inputs and outputs must be multiples of this."""
MOST_MAPS = 1023
"""Most maps of a stack in one product."""


def float8_problem(device: torch.device) -> str:
    """Return the reason why a device cannot multiply 8-bit floats; "" if it can."""
    if device.type != "cuda":
        return f"the device is {device}, and only GPUs have it"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        needed, found = (".".join(map(str, one)) for one in (CAPABILITY, capability))
        return f"products of 8-bit floats need compute capability {needed}; {device} has {found}"
    return ""


class Float8Linear:
    """``contracts.linear.LinearKernel`` of the form "fp8", by PyTorch's scaled product.

    It also runs on a CPU, slowly, for tests.
    """

    name = "float8"

    def refusal(self, weight_OI: Tensor, form: WeightForm) -> str:
        """See the contract."""
        if form != "fp8":
            return f"products of 8-bit floats have fp8 weights, not {form}"
        if weight_OI.dtype != torch.bfloat16:
            return f"products of 8-bit floats are of bfloat16 activations; the weight is {weight_OI.dtype}"
        if weight_OI.shape[0] % ALIGNED or weight_OI.shape[1] % ALIGNED:
            return f"fp8 weights have multiples of {ALIGNED} outputs and inputs; there are {list(weight_OI.shape)}"
        return ""

    def lossless(self, weight_OI: Tensor) -> WeightForm | None:
        """Return None: PyTorch's products are better for all other forms."""
        del weight_OI
        return None

    def pack(self, weight_OI: Tensor, bias_O: Tensor | None, form: WeightForm) -> Float8Map:
        """See the contract. ``InvalidArgument``: ``refusal`` has a reason."""
        if reason := self.refusal(weight_OI, form):
            raise InvalidArgument(reason, field="form", given=form)
        return Float8Map(pack(weight_OI, form), bias_O)

    def stack_refusal(self, weight_XOI: Tensor, form: WeightForm) -> str:
        """See ``contracts.linear.StackKernel``."""
        if reason := self.refusal(weight_XOI[0], form):
            return reason
        if len(weight_XOI) > MOST_MAPS:
            return f"a product of 8-bit floats takes at most {MOST_MAPS} experts; there are {len(weight_XOI)}"
        if (device := weight_XOI.device).type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if capability != STACK_CAPABILITY:
                needed, found = (".".join(map(str, one)) for one in (STACK_CAPABILITY, capability))
                return f"products of experts in 8-bit floats need compute capability {needed}; {device} has {found}"
        return ""

    def pack_stack(self, weight_XOI: Tensor, form: WeightForm) -> Float8Stack:
        """See ``contracts.linear.StackKernel``. ``InvalidArgument``: ``stack_refusal`` has a
        reason."""
        if reason := self.stack_refusal(weight_XOI, form):
            raise InvalidArgument(reason, field="form", given=form)
        return Float8Stack(weight_XOI)


class Float8Map:
    """``contracts.linear.LinearMap`` of bfloat16 activations, which are rounded to 8 bits row by
    row.

    Calls do not wait for the device.
    """

    __slots__ = ("_bias", "_round", "_scales_1O", "_weight_IO", "weights")

    def __init__(self, weights: PackedMatrix, bias_O: Tensor | None) -> None:
        assert weights.scales is not None
        self.weights = weights
        # The kernels read columns of inputs, as the weight has them, and scales in a row.
        self._weight_IO, self._scales_1O = weights.values.t(), weights.scales.t()
        self._bias = bias_O
        self._round = rounded_rows if triton_problem(weights.values.device) else round_rows

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See the contract. ``InvalidArgument``: x is not bfloat16."""
        if x_TI.dtype != torch.bfloat16:
            raise InvalidArgument(f"the map is of torch.bfloat16 activations; x is {x_TI.dtype}")
        if not len(x_TI):
            return x_TI.new_empty(0, self.weights.outputs)
        values_TI, scales_T1 = self._round(x_TI)
        # Sums in float32 throughout: the fast ones of a GPU keep 14 bits.
        return torch._scaled_mm(
            values_TI,
            self._weight_IO,
            scale_a=scales_T1,
            scale_b=self._scales_1O,
            bias=self._bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=False,
        )


class Float8Stack:
    """``contracts.linear.LinearStack`` of bfloat16 activations, which are rounded to 8 bits row by
    row.

    All maps are one product, which PyTorch has for GPUs alone; tests give a replacement for the
    CPU.
    """

    __slots__ = ("_round", "_scales_XO", "_weight_XIO", "weights")

    def __init__(self, weight_XOI: Tensor) -> None:
        maps, outputs, inputs = weight_XOI.shape
        values_XOI = weight_XOI.new_empty(weight_XOI.shape, dtype=FLOAT8)
        self._scales_XO = weight_XOI.new_empty(maps, outputs, dtype=torch.float32)
        # One at a time: rounding needs a float32 copy.
        for weight_OI, values_OI, scales_O in zip(weight_XOI, values_XOI, self._scales_XO, strict=True):
            rounded_OI, scales_O1 = rounded_rows(weight_OI)
            values_OI.copy_(rounded_OI)
            scales_O.copy_(scales_O1.squeeze(1))
        self.weights: Sequence[PackedMatrix] = [
            PackedMatrix("fp8", outputs, inputs, inputs, values_OI, scales_O.unsqueeze(1))
            for values_OI, scales_O in zip(values_XOI, self._scales_XO, strict=True)
        ]
        self._weight_XIO = values_XOI.transpose(1, 2)
        self._round = rounded_rows if triton_problem(weight_XOI.device) else round_rows

    def __call__(self, x_PI: Tensor, ends_X: Tensor) -> Tensor:
        """See the contract. ``InvalidArgument``: x is not bfloat16."""
        if x_PI.dtype != torch.bfloat16:
            raise InvalidArgument(f"the maps are of torch.bfloat16 activations; x is {x_PI.dtype}")
        if not len(x_PI):
            return x_PI.new_empty(0, self._scales_XO.shape[1])
        values_PI, scales_P1 = self._round(x_PI)
        return torch._scaled_grouped_mm(
            values_PI,
            self._weight_XIO,
            scales_P1.squeeze(1),
            self._scales_XO,
            offs=ends_X,
            out_dtype=torch.bfloat16,
            use_fast_accum=False,
        )
