"""Work on rows between the products: ``contracts.rows.RowKernels`` in PyTorch's operations.

Letters: as there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from quire.base.uploads import uploaded
from quire.contracts.kv_format import KVView
from quire.contracts.rows import ActivationName, HeadNormWeights, Rotation, RowKernels
from quire.ops.rope import rotate, rotate_last

MANY_ELEMENTS = 1 << 16
"""Least number of elements for which temporaries cost more than calls."""

ACTIVATIONS: Mapping[ActivationName, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""Each returns a fresh tensor."""


class ReferenceRows:
    """See ``RowKernels``."""

    def rms_norm(self, x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """See ``RowKernels``.

        transformers rounds the normalised value to the model's dtype before the weight. In float32
        that is the same to the bit. In bfloat16 and float16 the single rounding is closer to the
        exact result, and one call is about 2 microseconds faster than their six for a single row.
        """
        if weight_E.dtype != x.dtype:
            return F.rms_norm(x.float(), weight_E.shape, weight_E, eps).to(x.dtype)
        if x.dtype == torch.float32 or not x.is_cpu or x.numel() < MANY_ELEMENTS:
            return F.rms_norm(x, weight_E.shape, weight_E, eps)
        # In place: the library's call takes twice the temporaries, and these dominate for a long
        # prompt.
        y = x.float()
        scale = y.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        return y.mul_(scale).mul_(weight_E).to(x.dtype)

    def add_rms_norm(self, y_TE: Tensor, x_TE: Tensor, weight_E: Tensor, eps: float, scale: float = 1.0) -> Tensor:
        """See ``RowKernels``."""
        total_TE = y_TE.add_(x_TE) if scale == 1.0 else self.add_scaled(y_TE, x_TE, scale)
        return self.rms_norm(total_TE, weight_E, eps)

    def add_scaled(self, y_TE: Tensor, x_TE: Tensor, scale: float) -> Tensor:
        """See ``RowKernels``. On CPUs ``torch.add`` with a factor rounds by a value's place in its
        tensor: a vector's values once, the last ones of a tensor after the product, too."""
        if not y_TE.is_cpu:
            return torch.add(x_TE, y_TE, alpha=scale, out=y_TE)
        if y_TE.dtype in (torch.float32, torch.float64):
            return y_TE.mul_(scale).add_(x_TE)
        return y_TE.copy_(y_TE.float().mul_(scale).add_(x_TE))

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """See ``RowKernels``."""
        return x.div_(cap).tanh_().mul_(cap)

    def gated(self, gate_up: Tensor, activation: ActivationName) -> Tensor:
        """See ``RowKernels``. In bfloat16 and float16 the activation is rounded before the
        product."""
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate).mul_(up)

    def gate_heads(self, out_THD: Tensor, gate: Tensor) -> Tensor:
        """See ``RowKernels``. In bfloat16 and float16 the sigmoid is rounded before the product."""
        return out_THD.mul_(torch.sigmoid(gate))

    def clamped(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """See ``RowKernels``."""
        gate = gate_up[..., 0::2].float().clamp(max=limit)
        up = gate_up[..., 1::2].float().clamp(-limit, limit)
        return torch.sigmoid(gate * alpha).mul_(gate).mul_(up.add_(1)).to(gate_up.dtype)

    def weigh(self, y_TE: Tensor, x_TE: Tensor, weight_E: Tensor) -> Tensor:
        """See ``RowKernels``."""
        return y_TE.mul_(torch.sigmoid(F.linear(x_TE, weight_E.unsqueeze(0))))

    def rope_and_write_kv(
        self,
        qkv_TC: Tensor,
        num_heads: int,
        rotation: Rotation | None,
        norms: HeadNormWeights | None,
        view: KVView,
        slots_T: Tensor,
    ) -> Tensor:
        """See ``RowKernels``. In bfloat16 and float16 normed heads are rounded before rotation."""
        kv_heads, dk, dv = view.sizes
        columns = (num_heads + kv_heads) * dk
        turned_THD = qkv_TC[:, :columns].view(-1, num_heads + kv_heads, dk)
        if norms is not None:
            q_THD, k_THD = normed_heads(self, turned_THD[:, :num_heads], turned_THD[:, num_heads:], norms)
            turned_THD = torch.cat((q_THD, k_THD), 1)
        if rotation is not None:
            turned_THD = rotate(turned_THD, rotation.cos_T1R, rotation.sin_T1R, interleaved=rotation.interleaved)
        view.write(slots_T, turned_THD[:, num_heads:], qkv_TC[:, columns:].view(-1, kv_heads, dv))
        return turned_THD

    def turn_last(self, x_THD: Tensor, rotation: Rotation) -> Tensor:
        """See ``RowKernels``."""
        cos_T1R, sin_T1R, interleaved = rotation
        return rotate_last(x_THD, cos_T1R, sin_T1R, interleaved=interleaved).contiguous()

    def copy_slots(self, pools: Sequence[Tensor], moves_2N: NDArray[np.int64]) -> None:
        """See ``RowKernels``."""
        source_N, target_N = uploaded(moves_2N, pools[0].device)
        for pool in pools:
            pool.index_copy_(1, target_N, pool.index_select(1, source_N))


REFERENCE_ROWS = ReferenceRows()
"""The shared instance; it has no state."""


def normed_heads(
    rows: RowKernels, q_THD: Tensor, k_THD: Tensor, norms: HeadNormWeights | None
) -> tuple[Tensor, Tensor]:
    """Return the heads of q and k after their norms, if there are any."""
    if norms is None:
        return q_THD, k_THD
    return rows.rms_norm(q_THD, norms.q_weight_D, norms.eps), rows.rms_norm(k_THD, norms.k_weight_D, norms.eps)
