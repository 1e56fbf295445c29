"""The end of a decoder block as one call in C++, for CPUs.

A decode of one sequence is many short calls. Each costs some microseconds of Python and one
beginning and end of a parallel region, which this saves. The parts are those of ``kernels.linear``
and ``kernels.rows``, so every number is the same to the bit.

Letters: as in ``contracts.rows``; M inner width of the MLP.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from quire.contracts.linear import LinearMap
from quire.contracts.rows import ActivationName, BlockTail
from quire.kernels.linear import NativeMap
from quire.kernels.native_library import NativeLibrary, native_library
from quire.kernels.rows import ACTIVATION_NUMBERS, TYPES

MOST_ROWS = 64
"""Rows of a call. With more, calls one by one are long beside what they cost by themselves."""


class _BlockTail(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("out", "gate_up", "down", "norm_weight", "parallel")),
        ("types", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("eps", ctypes.c_double),
    ]


class NativeTails:
    """``contracts.rows.TailKernel`` by the C++ library."""

    def __init__(self, library: NativeLibrary) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        arguments = (pointer, pointer, pointer, number, pointer, number, number)
        self._run = library.function("quire_block_tail", *arguments, result=ctypes.c_int)
        self._parallel = library.parallel

    def join(
        self,
        out: LinearMap,
        norm_weight_E: Tensor,
        eps: float,
        gate_up: LinearMap,
        down: LinearMap,
        activation: ActivationName,
    ) -> BlockTail | None:
        """See the contract."""
        maps = [one for one in (out, gate_up, down) if isinstance(one, NativeMap)]
        if len(maps) < 3 or len({one.dtype for one in maps}) > 1 or not norm_weight_E.is_contiguous():
            return None
        types = TYPES.get((maps[0].dtype, norm_weight_E.dtype))
        width, inner = out.weights.outputs, down.weights.inputs
        fits = down.weights.outputs == width == gate_up.weights.inputs == len(norm_weight_E)
        if types is None or not fits or gate_up.weights.outputs != 2 * inner:
            return None
        native = _BlockTail(
            *(one.place for one in maps), norm_weight_E.data_ptr(), self._parallel, types, ACTIVATION_NUMBERS[activation], eps
        )  # fmt: skip
        return NativeTail(self._run, native, maps, norm_weight_E)


class NativeTail:
    """``contracts.rows.BlockTail`` with everything ready for calls."""

    __slots__ = ("_dtype", "_kept", "_native", "_place", "_run", "_width")

    def __init__(
        self, run: ctypes._NamedFuncPointer, native: _BlockTail, maps: list[NativeMap], norm_weight_E: Tensor
    ) -> None:
        """``native`` has addresses in ``maps`` and of the weight."""
        self._run, self._native, self._place = run, native, ctypes.addressof(native)
        self._kept = (maps, norm_weight_E)
        self._dtype, self._width = maps[0].dtype, len(norm_weight_E)

    def takes(self, x_TE: Tensor) -> bool:
        """See the contract."""
        return 0 < x_TE.shape[0] <= MOST_ROWS and x_TE.dtype == self._dtype and x_TE.is_contiguous()

    def __call__(self, heads_TC: Tensor, x_TE: Tensor) -> Tensor:
        """See the contract. ``MemoryError``: no memory for sums."""
        if heads_TC.stride(1) != 1:
            heads_TC = heads_TC.contiguous()
        y_TE, rows = torch.empty_like(x_TE), x_TE.shape[0]
        if self._run(
            self._place, y_TE.data_ptr(), heads_TC.data_ptr(), heads_TC.stride(0), x_TE.data_ptr(), rows, torch.get_num_threads()
        ):  # fmt: skip
            raise MemoryError(f"the end of a block over {rows} rows found no memory for its sums")
        return y_TE


@cache
def native_tails() -> NativeTails | None:
    """Return the kernel; None if it was not built (``native_library.native_problem``)."""
    found = native_library()
    return None if found is None else NativeTails(found)
