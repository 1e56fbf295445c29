"""Work on each row of a forward by itself: norms, gates, rotation; and copies in pools.

``ops.rows`` is the reference, on any device. A row's result depends on that row only, to the bit.

Letters: T rows; E model width; F inner width; Hq, Hkv heads; Dk, Dv head sizes; R rotary columns; C
= Hq*Dk + Hkv*Dk + Hkv*Dv; L layers and S slots of a pool; N slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.kv_format import KVView

ActivationName: TypeAlias = Literal["silu", "gelu", "gelu_tanh"]


class HeadNormWeights(NamedTuple):
    """Root mean square norms of query and key heads, before they are rotated."""

    q_weight_D: Tensor
    k_weight_D: Tensor
    eps: float


class Rotation(NamedTuple):
    """Rows of a ``RotaryTable``: ``x * cos + swap(x) * sin`` of the first R columns of a head."""

    cos_T1R: Tensor
    """float32, as ``sin``, which includes the sign; both have the strides of one tensor."""
    sin_T1R: Tensor
    interleaved: bool


class RowKernels(Protocol):
    """Work on rows between the products, computed in float32 and rounded once."""

    def rms_norm(self, x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """Map ``[..., E]`` to a fresh contiguous ``x / sqrt(mean(x^2) + eps) * weight`` in the
        dtype of x. The weight has that dtype or float32."""

    def add_rms_norm(self, y_TE: Tensor, x_TE: Tensor, weight_E: Tensor, eps: float, scale: float = 1.0) -> Tensor:
        """Make y ``x + scale * y`` in place, round; return ``rms_norm`` of the sum."""

    def add_scaled(self, y_TE: Tensor, x_TE: Tensor, scale: float) -> Tensor:
        """Make y ``x + scale * y`` in place; return y."""

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Make x, contiguous in float32, ``cap * tanh(x / cap)`` in place; return x."""

    def gated(self, gate_up: Tensor, activation: ActivationName) -> Tensor:
        """Map ``[..., 2F]``, gate first, to a fresh ``activation(gate) * up``, ``[..., F]``."""

    def gate_heads(self, out_THD: Tensor, gate: Tensor) -> Tensor:
        """Multiply contiguous heads by ``sigmoid(gate)`` in place; return them. ``gate [T, H, D]``,
        or ``[T, H, 1]``."""

    def clamped(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """Map ``[..., 2F]``, columns of gate and up by turns, to a fresh ``[..., F]``:
        ``gate * sigmoid(alpha * gate) * (up + 1)``, gate at most ``limit``, up in
        -``limit``..``limit``."""

    def weigh(self, y_TE: Tensor, x_TE: Tensor, weight_E: Tensor) -> Tensor:
        """Multiply y in place by ``sigmoid(x @ weight)``, one number for each row; return it. The
        weight has the dtype of x and y."""

    def rope_and_write_kv(
        self,
        qkv_TC: Tensor,
        num_heads: int,
        rotation: Rotation | None,
        norms: HeadNormWeights | None,
        view: KVView,
        slots_T: Tensor,
    ) -> Tensor:
        """Norm and rotate the heads of q and k; write k and v to the slots (int64) of a layer.

        Return ``[T, Hq + Hkv, Dk]``: q, then k as given to ``view``; fresh, or a view of ``qkv`` if
        that is the same. Plain rows are contiguous and have the dtype of ``qkv``.
        """

    def turn_last(self, x_THD: Tensor, rotation: Rotation) -> Tensor:
        """Return fresh contiguous heads ``[T, H, D]`` whose last R columns are rotated."""

    def copy_slots(self, pools: Sequence[Tensor], moves_2N: NDArray[np.int64]) -> None:
        """Copy slots ``moves[0]`` to distinct slots ``moves[1]``, in every layer of all pools
        ``[L, S, ...]``, which are on one device. All are read before one is written."""
