"""Work on rows between the products in C++, for CPUs. The reference is ``quire.ops.rows``.

The reference also runs unsupported inputs: other devices and dtypes, columns that are not
contiguous. Letters: as in ``contracts.rows``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from quire.contracts.kv_format import KVView, PlainRows
from quire.contracts.rows import ActivationName, HeadNormWeights, Rotation
from quire.kernels.native_library import NativeLibrary, native_library
from quire.ops.rows import ReferenceRows

ONE_THREAD = 1 << 16
"""Number of elements below which one thread is faster than two."""
TYPES: Mapping[tuple[torch.dtype, torch.dtype], int] = {
    (torch.float32, torch.float32): 0,
    (torch.bfloat16, torch.bfloat16): 1,
    (torch.bfloat16, torch.float32): 2,
}
"""C++ numbers of the dtypes of rows and of weights."""
ACTIVATION_NUMBERS: Mapping[ActivationName, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


class NativeRows(ReferenceRows):
    """``contracts.rows.RowKernels`` by the C++ library.

    The error of the exponential function is at most 2 units in the last place of float32; the
    relative error of the normal distribution function in ``gelu`` at most 3e-7.
    """

    name = "C++"

    def __init__(self, library: NativeLibrary) -> None:
        pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        end = (number, pointer)
        self._rms_norm = library.function(
            "quire_rms_norm", number, pointer, pointer, number, pointer, number, number, real, *end
        )
        self._add_rms_norm = library.function(
            "quire_add_rms_norm",
            *(number, pointer, pointer, number, pointer, number, real, pointer, number, number, real, *end),
        )
        self._soft_cap = library.function("quire_soft_cap", pointer, number, real, *end)
        self._gated = library.function("quire_gated", number, number, pointer, pointer, *[number] * 3, *end)
        self._gate_heads = library.function("quire_gate_heads", number, pointer, pointer, *[number] * 6, *end)
        self._clamped = library.function("quire_clamped", *(number, pointer, pointer, *[number] * 3, real, real, *end))
        self._weigh = library.function("quire_weigh", *(number, pointer, pointer, number, pointer, *[number] * 3, *end))
        self._place_qkv = library.function(
            "quire_place_qkv",
            *(number, pointer, pointer, *[number] * 6, pointer, pointer, *[number] * 3),
            *(pointer, pointer, real, pointer, pointer, pointer, *end),
        )
        self._turn_last = library.function(
            "quire_turn_last", number, pointer, pointer, *[number] * 5, pointer, pointer, *[number] * 3, *end
        )
        self._set_level = library.function("quire_rows_level", number, result=number)
        self._parallel = library.parallel

    def use_level(self, level: int) -> int:
        """Use AVX-512 (2), AVX2 (1) or no extension (0) from now on, or the processor's best if
        that is less. Return the level in use. For tests."""
        found: int = self._set_level(level)
        return found

    def rms_norm(self, x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """See ``RowKernels``."""
        types, width = TYPES.get((x.dtype, weight_E.dtype)), weight_E.shape[0]
        if types is None or not x.is_cpu or x.shape[-1] != width:
            return super().rms_norm(x, weight_E, eps)
        stride = width
        if not x.is_contiguous():
            if x.dim() == 2 and x.stride(1) == 1:
                stride = x.stride(0)
            else:
                x = x.contiguous()
        out, numbers = torch.empty_like(x, memory_format=torch.contiguous_format), x.numel()
        self._rms_norm(
            *(types, out.data_ptr(), x.data_ptr(), stride, weight_E.data_ptr(), numbers // (width or 1), width, eps),
            *(threads_for(numbers), self._parallel),
        )
        return out

    def add_rms_norm(self, y_TE: Tensor, x_TE: Tensor, weight_E: Tensor, eps: float, scale: float = 1.0) -> Tensor:
        """See ``RowKernels``."""
        types, shape = TYPES.get((y_TE.dtype, weight_E.dtype)), y_TE.shape
        if types is None or not _add(y_TE, x_TE) or shape != (shape[0], weight_E.shape[0]):
            return super().add_rms_norm(y_TE, x_TE, weight_E, eps, scale)
        count, width = shape
        out = torch.empty_like(y_TE)
        self._add_rms_norm(
            *(types, out.data_ptr(), y_TE.data_ptr(), width, x_TE.data_ptr(), width, scale, weight_E.data_ptr()),
            *(count, width, eps, threads_for(count * width), self._parallel),
        )
        return out

    def add_scaled(self, y_TE: Tensor, x_TE: Tensor, scale: float) -> Tensor:
        """See ``RowKernels``."""
        types = TYPES.get((y_TE.dtype, y_TE.dtype))
        if types is None or not _add(y_TE, x_TE):
            return super().add_scaled(y_TE, x_TE, scale)
        count, width = y_TE.shape
        self._add_rms_norm(
            *(types, None, y_TE.data_ptr(), width, x_TE.data_ptr(), width, scale, None),
            *(count, width, 0.0, threads_for(count * width), self._parallel),
        )
        return y_TE

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """See ``RowKernels``."""
        if x.dtype != torch.float32 or not (x.is_cpu and x.is_contiguous()):
            return super().soft_cap(x, cap)
        self._soft_cap(x.data_ptr(), x.numel(), cap, threads_for(x.numel()), self._parallel)
        return x

    def gated(self, gate_up: Tensor, activation: ActivationName) -> Tensor:
        """See ``RowKernels``."""
        types, shape = TYPES.get((gate_up.dtype, gate_up.dtype)), gate_up.shape
        if types is None or not gate_up.is_cpu or len(shape) != 2 or shape[1] % 2 or gate_up.stride(1) != 1:
            return super().gated(gate_up, activation)
        count, width = shape[0], shape[1] // 2
        out = gate_up.new_empty(count, width)
        self._gated(
            *(
                types,
                ACTIVATION_NUMBERS[activation],
                out.data_ptr(),
                gate_up.data_ptr(),
                gate_up.stride(0),
                count,
                width,
            ),
            *(threads_for(2 * count * width), self._parallel),
        )
        return out

    def gate_heads(self, out_THD: Tensor, gate: Tensor) -> Tensor:
        """See ``RowKernels``."""
        types, (count, heads, width), gate_width = TYPES.get((out_THD.dtype, gate.dtype)), out_THD.shape, gate.shape[-1]
        fits = out_THD.is_cpu and out_THD.is_contiguous() and gate.shape == (count, heads, gate_width)
        if types is None or types == 2 or not fits or gate_width not in (1, width) or gate.stride(2) != 1 != gate_width:
            return super().gate_heads(out_THD, gate)
        numbers = out_THD.numel()
        self._gate_heads(
            *(
                types,
                out_THD.data_ptr(),
                gate.data_ptr(),
                gate.stride(0),
                gate.stride(1),
                count,
                heads,
                width,
                gate_width,
            ),
            *(threads_for(numbers), self._parallel),
        )
        return out_THD

    def clamped(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """See ``RowKernels``."""
        types, shape = TYPES.get((gate_up.dtype, gate_up.dtype)), gate_up.shape
        if types is None or not gate_up.is_cpu or len(shape) != 2 or shape[1] % 2 or gate_up.stride(1) != 1:
            return super().clamped(gate_up, alpha, limit)
        count, width = shape[0], shape[1] // 2
        out = gate_up.new_empty(count, width)
        self._clamped(
            *(types, out.data_ptr(), gate_up.data_ptr(), gate_up.stride(0), count, width, alpha, limit),
            *(threads_for(2 * count * width), self._parallel),
        )
        return out

    def weigh(self, y_TE: Tensor, x_TE: Tensor, weight_E: Tensor) -> Tensor:
        """See ``RowKernels``. A row's sum is in float64, and rounded to the dtype."""
        types, width = TYPES.get((y_TE.dtype, weight_E.dtype)), len(weight_E)
        if (
            types is None
            or {y_TE.dtype} != {x_TE.dtype, weight_E.dtype}
            or not (y_TE.is_cpu and y_TE.is_contiguous() and weight_E.is_contiguous() and x_TE.stride(1) == 1)
        ):
            return super().weigh(y_TE, x_TE, weight_E)
        count, outputs = y_TE.shape
        self._weigh(
            *(types, y_TE.data_ptr(), x_TE.data_ptr(), x_TE.stride(0), weight_E.data_ptr(), count, width, outputs),
            *(threads_for(count * width), self._parallel),
        )
        return y_TE

    def rope_and_write_kv(
        self,
        qkv_TC: Tensor,
        num_heads: int,
        rotation: Rotation | None,
        norms: HeadNormWeights | None,
        view: KVView,
        slots_T: Tensor,
    ) -> Tensor:
        """See ``RowKernels``."""
        dtype = qkv_TC.dtype
        types = TYPES.get((dtype, dtype if norms is None else norms.q_weight_D.dtype))
        if (
            types is None
            or not isinstance(view, PlainRows)
            or not (qkv_TC.is_cpu and view.k.dtype == dtype == view.v.dtype and qkv_TC.stride(1) == 1)
        ):
            return super().rope_and_write_kv(qkv_TC, num_heads, rotation, norms, view, slots_T)
        count, columns = qkv_TC.shape
        k_SHD, v_SHD = view
        _, kv_heads, key_width = k_SHD.shape
        value_width = v_SHD.shape[2]
        cos = sin = q_weight = k_weight = None
        stride = rotary = interleaved = 0
        eps = 0.0
        if rotation is not None:
            cos_T1R, sin_T1R, interleaved = rotation
            cos, sin, stride, rotary = cos_T1R.data_ptr(), sin_T1R.data_ptr(), cos_T1R.stride(0), cos_T1R.shape[2]
        if norms is not None:
            q_weight, k_weight, eps = norms.q_weight_D.data_ptr(), norms.k_weight_D.data_ptr(), norms.eps
        out = qkv_TC.new_empty(count, num_heads + kv_heads, key_width)
        self._place_qkv(
            *(types, out.data_ptr(), qkv_TC.data_ptr(), qkv_TC.stride(0), count, num_heads, kv_heads, key_width),
            *(value_width, cos, sin, stride, rotary, interleaved, q_weight, k_weight, eps),
            *(k_SHD.data_ptr(), v_SHD.data_ptr(), slots_T.data_ptr(), threads_for(count * columns), self._parallel),
        )
        return out

    def turn_last(self, x_THD: Tensor, rotation: Rotation) -> Tensor:
        """See ``RowKernels``."""
        types = TYPES.get((x_THD.dtype, x_THD.dtype))
        if types is None or not x_THD.is_cpu or x_THD.stride(2) != 1:
            return super().turn_last(x_THD, rotation)
        (count, heads, width), (cos_T1R, sin_T1R, interleaved) = x_THD.shape, rotation
        out = x_THD.new_empty(count, heads, width)
        self._turn_last(
            *(types, out.data_ptr(), x_THD.data_ptr(), x_THD.stride(0), x_THD.stride(1), count, heads, width),
            *(cos_T1R.data_ptr(), sin_T1R.data_ptr(), cos_T1R.stride(0), cos_T1R.shape[2], interleaved),
            *(threads_for(out.numel()), self._parallel),
        )
        return out


def _add(y_TE: Tensor, x_TE: Tensor) -> bool:
    """Return True if C++ can add rows to others in place."""
    alike = y_TE.dim() == 2 and x_TE.shape == y_TE.shape and x_TE.dtype == y_TE.dtype
    return alike and y_TE.is_cpu and y_TE.is_contiguous() and x_TE.is_contiguous()


def threads_for(numbers: int) -> int:
    """Return the number of threads for a call: one for each ``ONE_THREAD`` of its ``numbers``."""
    return 1 if numbers <= ONE_THREAD else min(torch.get_num_threads(), -(-numbers // ONE_THREAD))


@cache
def native_rows() -> NativeRows | None:
    """Return the kernels; None if they were not built (``native_problem``)."""
    found = native_library()
    return None if found is None else NativeRows(found)
