"""Penalties in Triton, for CUDA devices. The reference is ``sampling.seen_tokens``."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.triton_support import on_device_of, triton_problem
from quire.sampling.seen_tokens import OUTPUT

COUNTED = 256
"""Tokens that a program counts."""
BLOCK = 2048
"""Tokens whose logits a program changes."""


class TritonPenalties:
    """``sampling.seen_tokens.PenaltyKernel``: one launch for each verb."""

    def add(self, seen_SV: Tensor, slots_N: Tensor, tokens_N: Tensor, amounts_N: Tensor) -> None:
        """See ``PenaltyKernel``."""
        from quire.kernels.draw.penalty_programs import add_amounts

        count = len(slots_N)
        with on_device_of(seen_SV):
            add_amounts[(-(-count // COUNTED),)](
                seen_SV, slots_N, tokens_N, amounts_N, count, VOCAB=seen_SV.shape[1], B=COUNTED
            )

    def penalise(self, z_WV: Tensor, seen_SV: Tensor, table_G5: Tensor) -> None:
        """See ``PenaltyKernel``; rows of ``z_WV`` are contiguous."""
        from quire.kernels.draw.penalty_programs import penalise

        assert z_WV.stride(1) == 1
        vocab_size = z_WV.shape[1]
        with on_device_of(z_WV):
            penalise[(len(table_G5), -(-vocab_size // BLOCK))](
                z_WV, seen_SV, table_G5, z_WV.stride(0), OUTPUT=OUTPUT, VOCAB=vocab_size, B=BLOCK,
                enable_fp_fusion=False,
            )  # fmt: skip


def fastest_penalties(device: torch.device) -> TritonPenalties | None:
    """Return the fastest penalty kernel on a device; None: PyTorch's operations."""
    return TritonPenalties() if device.type == "cuda" and not triton_problem(device) else None
