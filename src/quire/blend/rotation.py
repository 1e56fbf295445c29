"""Rotation of keys from their stored positions to new ones, by one float32 rotation.

The angle from position o to p is composed of the table's rows of both, so that it has the same
errors as the rows of fresh keys. Moving through unrotated keys would round twice.

Letters: T rows; H heads; D columns of a row; R rotary columns.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.ops.rope import RotaryTable, rotate, rotate_last


class KeyMove:
    """The rotation of T rows of keys, for all layers of one table. Make it once a forward.

    Rows that do not move are copied to the bit. If all rows move by one distance, like the rows of
    one chunk, they share one row of cos and sin; that is up to three times as fast.
    """

    def __init__(self, table: RotaryTable, origins_T: NDArray[np.int64], targets_T: NDArray[np.int64]) -> None:
        """Take int64 positions ``[T]``, on the CPU. ``InvalidArgument`` for negative ones."""
        if origins_T.ndim != 1 or origins_T.shape != targets_T.shape:
            raise InvalidArgument(field="origins_T", given=origins_T, allowed=f"[{len(targets_T)}], as targets_T")
        for name, positions in (("origins_T", origins_T), ("targets_T", targets_T)):
            if positions.size and positions.min() < 0:
                raise InvalidArgument(field=name, given=int(positions.min()), allowed="positions >= 0")
        self._interleaved = table.spec.interleaved
        self._count = len(origins_T)
        shifts = targets_T - origins_T
        self._moves = bool(shifts.any())
        self._staying: Tensor | None = None
        if not self._moves:
            return
        if (shifts == 0).any():
            self._staying = torch.from_numpy(np.flatnonzero(shifts == 0)).to(table.device)
        if (shifts == shifts[0]).all():
            origins_T, targets_T = origins_T[:1], targets_T[:1]
        highest = int(max(origins_T.max(), targets_T.max()))
        cos_o, sin_o = table.rows(torch.from_numpy(origins_T).to(table.device), highest)
        cos_p, sin_p = table.rows(torch.from_numpy(targets_T).to(table.device), highest)
        # The sign of each column's sine is in the table: it cancels in the cosine, and stays in the
        # sine. So does the magnitude, squared in both.
        self._cos_T1R = torch.addcmul(cos_p * cos_o, sin_p, sin_o)
        self._sin_T1R = torch.addcmul(sin_p * cos_o, cos_p, sin_o, value=-1)
        magnitude = table.spec.attention_factor
        if magnitude != 1.0:
            self._cos_T1R /= magnitude**2
            self._sin_T1R /= magnitude**2

    def __call__(self, k_THD: Tensor, *, last: bool = False) -> Tensor:
        """Return moved rows ``[T, H, D]`` in their dtype, fresh. The first R columns rotate, or the
        ``last`` ones, as in latent rows. ``InvalidArgument`` for another number of rows."""
        if k_THD.shape[0] != self._count:
            raise InvalidArgument(field="k_THD", given=k_THD, allowed=f"{self._count} rows, one for each position")
        if not self._moves:
            return k_THD.clone()
        turn = rotate_last if last else rotate
        moved = turn(k_THD, self._cos_T1R, self._sin_T1R, interleaved=self._interleaved)
        if self._staying is not None:
            moved.index_copy_(0, self._staying, k_THD.index_select(0, self._staying))
        return moved
