"""The last step of a model: a factor and a soft cap of its logits.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.contracts.rows import RowKernels
from quire.ops.rows import REFERENCE_ROWS


@dataclass(slots=True, eq=False)
class ShapedLogits:
    """``softcap * tanh(scale * logits / softcap)``; without a soft cap ``scale * logits``."""

    scale: float = 1.0
    softcap: float | None = None
    row_kernels: RowKernels = REFERENCE_ROWS

    def __call__(self, logits_RV: Tensor) -> Tensor:
        """Change float32 ``[R, V]`` in place and return it."""
        if self.scale != 1.0:
            logits_RV.mul_(self.scale)
        return logits_RV if self.softcap is None else self.row_kernels.soft_cap(logits_RV, self.softcap)
