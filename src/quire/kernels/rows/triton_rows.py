"""Work on rows between the products in Triton, for CUDA devices. The reference is
``quire.ops.rows``.

The reference also runs unsupported inputs: other devices and dtypes. Letters: as in
``contracts.rows``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.uploads import uploaded
from quire.contracts.kv_format import KVView, PlainRows
from quire.contracts.rows import ActivationName, HeadNormWeights, Rotation
from quire.kernels.triton_support import known_dtypes, on_device_of, triton_problem
from quire.ops.rows import ReferenceRows
from quire.weights.float8 import FLOAT8, rounded_rows

ACTIVATION_CODES: dict[ActivationName, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
WIDEST = 1 << 15
"""Most columns of a row in a program."""
AT_ONCE = 2048
"""Elements in a program of short rows."""


class TritonRows(ReferenceRows):
    """``contracts.rows.RowKernels`` by Triton programs, computed in float32 and rounded once.

    The relative error of ``gelu`` is 2e-7 beyond that of the exponential function.
    """

    name = "Triton"

    def rms_norm(self, x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """See ``RowKernels``."""
        if not _known(x, weight_E) or not 0 < x.shape[-1] == weight_E.shape[0] <= WIDEST:
            return super().rms_norm(x, weight_E, eps)
        return _normed(x, None, weight_E, eps)

    def add_rms_norm(self, y_TE: Tensor, x_TE: Tensor, weight_E: Tensor, eps: float, scale: float = 1.0) -> Tensor:
        """See ``RowKernels``."""
        fits = y_TE.dim() == 2 and y_TE.shape == x_TE.shape and 0 < y_TE.shape[1] == weight_E.shape[0] <= WIDEST
        if not fits or not _known(y_TE, weight_E) or x_TE.dtype != y_TE.dtype or y_TE.stride(1) != 1:
            return super().add_rms_norm(y_TE, x_TE, weight_E, eps, scale)
        return _normed(y_TE, x_TE if x_TE.stride(1) == 1 else x_TE.contiguous(), weight_E, eps, scale)

    def gated(self, gate_up: Tensor, activation: ActivationName) -> Tensor:
        """See ``RowKernels``."""
        from quire.kernels.rows.row_programs import gate_rows

        if not _known(gate_up) or gate_up.shape[-1] % 2 or gate_up.shape[-1] == 0:
            return super().gated(gate_up, activation)
        if gate_up.dim() != 2 or gate_up.stride(1) != 1:
            gate_up = gate_up.contiguous()
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        columns = min(1024, _power(width))
        if count := out.numel() // width:
            stride = gate_up.stride(0) if gate_up.dim() == 2 else 2 * width
            with on_device_of(gate_up):
                gate_rows[(count, -(-width // columns))](
                    out, gate_up, stride, FEATURES=width, W=columns, ACTIVATION=ACTIVATION_CODES[activation]
                )
        return out

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
        from quire.kernels.rows.row_programs import place_heads

        dtype, (kv_heads, dk, dv) = qkv_TC.dtype, view.sizes
        weights = () if norms is None else (norms.q_weight_D, norms.k_weight_D)
        if (
            not _known(qkv_TC, *weights)
            or not isinstance(view, PlainRows)
            or not view.k.dtype == dtype == view.v.dtype
            or qkv_TC.stride(1) != 1
            or max(dk, dv) > AT_ONCE
            or (rotation is not None and rotation.cos_T1R.stride() != rotation.sin_T1R.stride())
        ):
            return super().rope_and_write_kv(qkv_TC, num_heads, rotation, norms, view, slots_T)
        count, rotary, angle_stride = qkv_TC.shape[0], 0, 0
        cos = sin = slots_T
        if rotation is not None:
            cos, sin = rotation.cos_T1R, rotation.sin_T1R
            rotary, angle_stride = cos.shape[2], cos.stride(0)
        out = qkv_TC.new_empty(count, num_heads + kv_heads, dk)
        width = _power(max(dk, dv))
        heads = min(_power(num_heads + kv_heads), max(1, AT_ONCE // width))
        if count:
            groups = -(-(num_heads + kv_heads) // heads) + -(-kv_heads // heads)
            with on_device_of(qkv_TC):
                place_heads[(count, groups)](
                    out, view.k, view.v, qkv_TC, slots_T, cos, sin, *(weights or (out, out)),
                    qkv_TC.stride(0), angle_stride, 0.0 if norms is None else float(norms.eps),
                    HEADS=num_heads, KV_HEADS=kv_heads, DK=dk, DV=dv, ROTARY=rotary,
                    INTERLEAVED=rotation is not None and rotation.interleaved, NORMS=norms is not None,
                    W=width, H=heads,
                )  # fmt: skip
        return out

    def copy_slots(self, pools: Sequence[Tensor], moves_2N: NDArray[np.int64]) -> None:
        """See ``RowKernels``. Programs run in no order, so they copy only if no target slot is also
        a source."""
        from quire.kernels.rows.row_programs import copy_words

        words = [pool.flatten(2).view(torch.int32) for pool in pools if _in_words(pool)]
        if len(words) < len(pools) or np.isin(*moves_2N).any():
            super().copy_slots(pools, moves_2N)
            return
        moves = uploaded(moves_2N, words[0].device)
        for pool_LSW in words:
            layers, _, width = pool_LSW.shape
            columns = min(1024, _power(width))
            with on_device_of(pool_LSW):
                copy_words[(moves.shape[1], layers, -(-width // columns))](
                    pool_LSW, moves, moves.shape[1], pool_LSW.stride(0), WIDTH=width, W=columns
                )


def _in_words(pool_LSHD: Tensor) -> bool:
    """Return True if programs can copy a pool: its slots are whole 4-byte words."""
    size = pool_LSHD[0, 0].nbytes
    return pool_LSHD.is_contiguous() and size % 4 == 0 and size > 0 and not triton_problem(pool_LSHD.device)


def round_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``weights.float8.rounded_rows`` of rows, by one Triton program each where possible."""
    from quire.kernels.rows.row_programs import scale_rows

    count, width = x_TI.shape
    if not _known(x_TI) or not 0 < width <= WIDEST:
        return rounded_rows(x_TI)
    if x_TI.stride(1) != 1:
        x_TI = x_TI.contiguous()
    values_TI, scales_T1 = x_TI.new_empty(count, width, dtype=FLOAT8), x_TI.new_empty(count, 1, dtype=torch.float32)
    columns = _power(width)
    if count:
        with on_device_of(x_TI):
            scale_rows[(count,)](
                values_TI,
                scales_T1,
                x_TI,
                x_TI.stride(0),
                WIDTH=width,
                W=columns,
                num_warps=4 if columns <= 4096 else 8,
            )
    return values_TI, scales_T1


def _known(x: Tensor, *weights: Tensor) -> bool:
    """Return True if programs support rows and weights of these types and devices."""
    if x.dtype not in known_dtypes() or any(one.dtype not in (x.dtype, torch.float32) for one in weights):
        return False
    return x.is_cuda or not triton_problem(x.device)


def _normed(y: Tensor, x: Tensor | None, weight_E: Tensor, eps: float, scale: float = 1.0) -> Tensor:
    """Return the norms of the rows of y. With x these become ``x + scale * y`` first, in place."""
    from quire.kernels.rows.row_programs import norm_rows

    width = y.shape[-1]
    if y.dim() not in (2, 3) or y.stride(-1) != 1:
        y = y.contiguous()
    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    count = y.numel() // width
    if not count:
        return out
    inner, (y_outer, y_inner) = _strides(y)
    x_outer, x_inner = (0, 0) if x is None else _strides(x)[1]
    columns = _power(width)
    rows = max(1, min(AT_ONCE // columns, 16))
    with on_device_of(y):
        norm_rows[(-(-count // rows),)](
            out, y, y if x is None else x, weight_E.contiguous(), count, inner, y_outer, y_inner, x_outer, x_inner, float(eps),
            float(scale), WIDTH=width, W=columns, R=rows, ADD=x is not None,
            num_warps=4 if columns <= 2048 else 8 if columns <= 8192 else 16,
        )  # fmt: skip
    return out


def _strides(x: Tensor) -> tuple[int, tuple[int, int]]:
    """Return the number of rows of an outer step, and the strides of outer and inner steps."""
    if x.dim() == 3:
        return x.shape[1], (x.stride(0), x.stride(1))
    return 1, (x.stride(0) if x.dim() == 2 else x.shape[-1], 0)


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()
