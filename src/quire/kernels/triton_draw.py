"""Draws by temperature and min-p in Triton, for CUDA devices. The reference is ``ops.filters``."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.triton_support import on_device_of, triton_problem

BLOCK = 2048
"""Tokens that a program weighs."""


class TritonDraw:
    """``ops.filters.DrawKernel``: two programs, which read the logits twice and write sums."""

    def draw(self, z_WV: Tensor, max_W: Tensor, table_G4: Tensor, one: float) -> Tensor:
        """See ``DrawKernel``."""
        from quire.kernels.draw_programs import find_tokens, sum_blocks

        if z_WV.stride(1) != 1:
            z_WV = z_WV.contiguous()
        count, vocab_size = len(table_G4), z_WV.shape[1]
        blocks = -(-vocab_size // BLOCK)
        sums_GN = torch.empty(count, blocks, dtype=torch.int64, device=z_WV.device)
        tokens_G = torch.empty(count, dtype=torch.int64, device=z_WV.device)
        given, sizes = (z_WV, max_W, table_G4, z_WV.stride(0)), {"ONE": one, "VOCAB": vocab_size, "B": BLOCK}
        with on_device_of(z_WV):
            sum_blocks[(count, blocks)](sums_GN, *given, **sizes)
            find_tokens[(count,)](tokens_G, sums_GN, *given, N=1 << (blocks - 1).bit_length(), **sizes)
        return tokens_G


def fastest_draw(device: torch.device) -> TritonDraw | None:
    """Return what draws fastest on a device; None: PyTorch's operations."""
    return TritonDraw() if device.type == "cuda" and not triton_problem(device) else None
