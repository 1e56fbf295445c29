"""Linear maps with weights of 8-bit floats, for GPUs that multiply them. The reference is
``quire.ops.packed_weights``.

Letters: T rows, I input, O output features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.contracts.linear import PackedMatrix, WeightForm
from quire.errors import InvalidArgument
from quire.kernels.triton_rows import round_rows
from quire.kernels.triton_support import triton_problem
from quire.ops.packed_weights import pack, rounded_rows

CAPABILITY = (8, 9)
"""Compute capability from which a GPU multiplies 8-bit floats."""
ALIGNED = 16
"""Inputs and outputs come in multiples of this."""


def float8_problem(device: torch.device) -> str:
    """Return why a device does not multiply 8-bit floats; "" if it does."""
    if device.type != "cuda":
        return f"the device is {device}, and only GPUs have it"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        needed, found = (".".join(map(str, one)) for one in (CAPABILITY, capability))
        return f"products of 8-bit floats need compute capability {needed}; {device} has {found}"
    return ""


class Float8Linear:
    """``contracts.linear.LinearKernel`` of the form "fp8", by PyTorch's scaled product.

    It also runs on a CPU, slowly: for tests."""

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
        """Return None: PyTorch's products run all other forms."""
        del weight_OI
        return None

    def pack(self, weight_OI: Tensor, bias_O: Tensor | None, form: WeightForm) -> Float8Map:
        """See the contract. ``InvalidArgument``: ``refusal`` has a reason."""
        if reason := self.refusal(weight_OI, form):
            raise InvalidArgument(reason, field="form", given=form)
        return Float8Map(pack(weight_OI, form), bias_O)


class Float8Map:
    """``contracts.linear.LinearMap`` of bfloat16 activations, which are rounded row by row.

    Nothing waits for the device."""

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
