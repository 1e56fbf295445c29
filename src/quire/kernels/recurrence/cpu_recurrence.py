"""Mixers of recurrent layers in C++, for CPUs: one call from projection to projection.

The reference is the layers of ``quire.nn`` over ``quire.ops.recurrence``. Letters: T rows; C
convolved channels; W taps; H heads; J key heads or groups; K, V key and value sizes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.recurrence import GatedNormWeight, RecurrentParts, StackStates, StateSizes, StepRates
from quire.kernels.native_library import NativeLibrary, native_library
from quire.kernels.rows.cpu_rows import threads_for

TYPES: Mapping[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1}
"""C++ numbers of the dtypes of rows."""
CONVOLUTION, DELTA_RULE, SSD = range(3)
MOST_TAPS, MOST_KEYS = 8, 256
"""``cpu/recurrence.h`` has the same."""

MOST_DECODES = 64
"""Most sequences of decodes whose constant arrays are shared."""
_COUNT, _NONE = np.arange(MOST_DECODES + 1), np.full(MOST_DECODES, -1)
_COUNT_PLACE, _NONE_PLACE = _COUNT.ctypes.data, _NONE.ctypes.data
_POINTER, _NUMBER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class _Mixer(ctypes.Structure):
    """``Mixer`` of ``cpu/recurrence.h``."""

    _fields_ = (
        *((name, _NUMBER) for name in ("kind", "types", "channels", "taps", "heads", "key_heads", "keys", "values")),
        *((name, _NUMBER) for name in ("x_at", "gate_at")),
        *((name, _POINTER) for name in ("taps_WC", "bias_C", "rate_H", "step_bias_H", "skip_H", "norm")),
        *((name, _NUMBER) for name in ("norm_groups", "norm_width", "gate_first")),
        *((name, _REAL) for name in ("least_step", "greatest_step", "scale", "eps")),
        ("parallel", _POINTER),
    )


class _Forward(ctypes.Structure):
    """``Forward`` of ``cpu/recurrence.h``."""

    _fields_ = (
        ("rows", _NUMBER),
        ("entries", _NUMBER),
        *((name, _POINTER) for name in ("starts", "parents", "given", "sources", "targets")),
    )


class _Bound:
    """A plan and its places, ready for calls."""

    def __init__(self, parts: RecurrentParts | StackStates) -> None:
        plan = self.plan = parts.plan
        self.sources_G, self.targets_M = parts.sources_G, parts.targets_M
        self._held: tuple[NDArray[np.int64], ...] = ()
        rows = len(plan.wanted)
        if rows <= MOST_DECODES and plan.chains and np.array_equal(plan.starts, _COUNT[: rows + 1]):
            # One row for each sequence: row i comes behind given state i.
            self.native = _Forward(
                rows,
                rows,
                _COUNT_PLACE,
                _NONE_PLACE,
                _COUNT_PLACE,
                parts.sources_G.data_ptr(),
                parts.targets_M.data_ptr(),
            )
            self.place = ctypes.addressof(self.native)
            return
        slots_T = np.full(plan.num_rows, -1, dtype=np.int64)
        slots_T[plan.wanted] = parts.targets_M.numpy()
        arrays = [np.ascontiguousarray(one, dtype=np.int64) for one in (plan.starts, plan.parents, plan.given)]
        self._held = (*arrays, slots_T)
        starts, parents, given, slots = (one.ctypes.data for one in self._held)
        self.native = _Forward(
            plan.num_rows, len(plan.starts) - 1, starts, parents, given, parts.sources_G.data_ptr(), slots
        )
        self.place = ctypes.addressof(self.native)

    def is_of(self, parts: RecurrentParts | StackStates) -> bool:
        return self.plan is parts.plan and self.sources_G is parts.sources_G and self.targets_M is parts.targets_M


class NativeMixers:
    """``contracts.recurrence.MixerKernel`` by the C++ library."""

    name = "native"

    def __init__(self, library: NativeLibrary) -> None:
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        self.run = library.function(
            "quire_mix",
            *(pointer, pointer, pointer, pointer, number, pointer, number, pointer, pointer, number),
            result=ctypes.c_int,
        )
        self.parallel = library.parallel
        self._bound: _Bound | None = None
        """Of the last forward; its layers share it."""

    def bound(self, parts: RecurrentParts | StackStates) -> _Bound:
        """Return a plan and its places for C++."""
        held = self._bound
        if held is None or not held.is_of(parts):
            # Another thread may replace it meanwhile.
            self._bound = held = _Bound(parts)
        return held

    def short_conv(self, conv_CW: Tensor, bias_C: Tensor | None) -> NativeMixer | None:
        """See the contract."""
        channels, taps = conv_CW.shape
        if not _supports(conv_CW, taps, 0):
            return None
        return NativeMixer(self, CONVOLUTION, conv_CW, bias_C, columns=3 * channels, x_at=0, gate_at=channels)

    def delta_rule(
        self, conv_CW: Tensor, sizes: StateSizes, rates: StepRates, norm: GatedNormWeight, scale: float
    ) -> NativeMixer | None:
        """See the contract."""
        channels, taps = conv_CW.shape
        if not _supports(conv_CW, taps, sizes.keys):
            return None
        return NativeMixer(
            self, DELTA_RULE, conv_CW, None, columns=channels + sizes.width, x_at=0, gate_at=channels, sizes=sizes,
            rates=rates, norm=norm, scale=scale,
        )  # fmt: skip

    def ssd(
        self,
        conv_CW: Tensor,
        bias_C: Tensor | None,
        sizes: StateSizes,
        rates: StepRates,
        skip_H: Tensor,
        norm: GatedNormWeight | None,
    ) -> NativeMixer | None:
        """See the contract."""
        channels, taps = conv_CW.shape
        if not _supports(conv_CW, taps, sizes.keys):
            return None
        return NativeMixer(
            self, SSD, conv_CW, bias_C, columns=sizes.width + channels + sizes.heads, x_at=sizes.width, gate_at=0,
            sizes=sizes, rates=rates, skip_H=skip_H, norm=norm,
        )  # fmt: skip


class NativeMixer:
    """``contracts.recurrence.MixerCall`` by the C++ library."""

    def __init__(
        self,
        mixers: NativeMixers,
        kind: int,
        conv_CW: Tensor,
        bias_C: Tensor | None,
        *,
        columns: int,
        x_at: int,
        gate_at: int,
        sizes: StateSizes | None = None,
        rates: StepRates | None = None,
        skip_H: Tensor | None = None,
        norm: GatedNormWeight | None = None,
        scale: float = 1.0,
    ) -> None:
        self.mixers, self.kind, self.dtype, self.columns = mixers, kind, conv_CW.dtype, columns
        channels, taps = conv_CW.shape
        held = [_wide(one) for one in (conv_CW.T, bias_C, skip_H, None if norm is None else norm.weight)]
        heads = key_heads = keys = values = 0
        self.width, self._kept = channels, (taps - 1, channels)
        self._state: tuple[int, ...] | None = None
        self._work = channels * taps
        least = greatest = 0.0
        if sizes is not None and rates is not None:
            heads, key_heads, keys, values = sizes
            held += [_wide(rates.rate_H), _wide(rates.bias_H)]
            least = rates.least
            greatest = float("inf") if rates.greatest is None else rates.greatest
            self.width, self._state = sizes.width, (heads, keys, values)
            self._work += heads * keys * values
        groups, norm_width, gate_first, eps = sizes.width if sizes else 1, 1, 1, 0.0
        if norm is not None:
            groups, norm_width, gate_first, eps = self.width // norm.part, len(norm.weight), norm.gate_first, norm.eps
        elif sizes is not None:
            groups = heads
        self._held = held
        places = [None if one is None else one.data_ptr() for one in (*held, None, None)][:6]
        weight, bias, skip, norm_weight, rate, step_bias = places
        self._native = _Mixer(
            kind, TYPES[conv_CW.dtype], channels, taps, heads, key_heads, keys, values, x_at, gate_at, weight, bias,
            rate, step_bias, skip, norm_weight, groups, norm_width, int(gate_first), least, greatest, scale, eps,
            mixers.parallel,
        )  # fmt: skip
        self.place = ctypes.addressof(self._native)
        self.rates = 2 * heads if kind == DELTA_RULE else 0
        """Columns of the rates that are given beside the projection."""

    def pools(self, given: Sequence[Tensor]) -> tuple[int, int | None]:
        """Return the addresses of the pools of kept inputs and of states (None: no states)."""
        assert given[0].shape[1:] == self._kept
        assert given[0].dtype == self.dtype
        if self._state is None:
            return given[0].data_ptr(), None
        assert given[1].shape[1:] == self._state
        assert given[1].dtype == torch.float32
        return given[0].data_ptr(), given[1].data_ptr()

    def __call__(self, x_TC: Tensor, parts: RecurrentParts, rates: Tensor | None = None) -> Tensor:
        """See the contract. ``MemoryError``: no memory for a piece."""
        if x_TC.stride(-1) != 1:
            x_TC = x_TC.contiguous()
        rows, (kept, states) = x_TC.shape[0], self.pools(parts.pools)
        assert x_TC.dtype == self.dtype
        assert x_TC.shape[1] == self.columns
        if rates is None:
            # The last columns are the rates of SSD.
            first = self.columns - self._native.heads
            rates_place, rates_stride = x_TC.data_ptr() + first * x_TC.itemsize, x_TC.stride(0)
        else:
            assert rates.dtype == self.dtype
            assert rates.shape == (rows, self.rates)
            rates = rates.contiguous()
            rates_place, rates_stride = rates.data_ptr(), rates.stride(0)
        out_TD = x_TC.new_empty(rows, self.width)
        if self.mixers.run(
            self.place, self.mixers.bound(parts).place, out_TD.data_ptr(), x_TC.data_ptr(), x_TC.stride(0),
            rates_place, rates_stride, kept, states, threads_for(rows * self._work),
        ):  # fmt: skip
            raise MemoryError(f"a recurrent layer over {rows} rows found no memory for its sums")
        return out_TD


def _supports(conv_CW: Tensor, taps: int, keys: int) -> bool:
    return conv_CW.is_cpu and conv_CW.dtype in TYPES and 2 <= taps <= MOST_TAPS and keys <= MOST_KEYS


def _wide(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.float().contiguous()


@cache
def native_mixers() -> NativeMixers | None:
    """Return the kernels; None if they were not built (``native_library.native_problem``)."""
    found = native_library()
    return None if found is None else NativeMixers(found)
