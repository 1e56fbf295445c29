"""Draws of tokens in Triton, for CUDA devices. The reference is ``sampling.filters``."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.triton_support import on_device_of, triton_problem

BLOCK = 2048
"""Tokens whose weights a program computes."""
BINNED = 4096
"""Tokens that a program counts in bins."""
BINS = 512
"""Number of bins, by distance from the maximum, over the range of nonzero weights."""
ROOM = 4096
"""Most tokens of a row among which top-k and top-p draw; a power of two."""


class TritonDraw:
    """``sampling.filters.DrawKernel`` by programs that read the logits of a row twice.

    ``ranked``: whether it also draws by top-k and top-p.
    """

    def __init__(self, *, ranked: bool = True) -> None:
        self.ranked = ranked

    def draw(self, z_WV: Tensor, max_W: Tensor, table_G6: Tensor, one: float) -> Tensor:
        """See ``DrawKernel``."""
        from quire.kernels.draw.draw_programs import find_tokens, sum_blocks

        if z_WV.stride(1) != 1:
            z_WV = z_WV.contiguous()
        count, vocab_size = len(table_G6), z_WV.shape[1]
        blocks = -(-vocab_size // BLOCK)
        sums_GN = torch.empty(count, blocks, dtype=torch.int64, device=z_WV.device)
        tokens_G = torch.empty(count, dtype=torch.int64, device=z_WV.device)
        given, sizes = (z_WV, max_W, table_G6, z_WV.stride(0)), {"ONE": one, "VOCAB": vocab_size, "B": BLOCK}
        with on_device_of(z_WV):
            sum_blocks[(count, blocks)](sums_GN, *given, **sizes)
            find_tokens[(count,)](tokens_G, sums_GN, *given, N=1 << (blocks - 1).bit_length(), **sizes)
        return tokens_G

    def draw_ranked(self, z_WV: Tensor, max_W: Tensor, table_G6: Tensor, one: float) -> tuple[Tensor, Tensor]:
        """See ``DrawKernel``."""
        from quire.kernels.draw import draw_programs as programs

        if z_WV.stride(1) != 1:
            z_WV = z_WV.contiguous()
        count, vocab_size = len(table_G6), z_WV.shape[1]
        blocks = -(-vocab_size // BINNED)
        counts_GND = torch.empty(count, blocks, BINS, dtype=torch.int32, device=z_WV.device)
        sums_GN, begins_GN = counts_GND.new_empty(count, blocks, dtype=torch.int64), counts_GND.new_empty(count, blocks)
        chosen_G3, keys_GK = counts_GND.new_empty(count, 3), sums_GN.new_empty(count, ROOM)
        tokens_G, complete_G = sums_GN.new_empty(count), sums_GN.new_empty(count, dtype=torch.bool)
        given, sizes = (z_WV, max_W, table_G6, z_WV.stride(0)), {"ONE": one, "VOCAB": vocab_size}
        binned, keyed = {"B": BINNED, "D": BINS, "num_warps": 8}, {"K": ROOM, "IDS": vocab_size.bit_length()}
        with on_device_of(z_WV):
            programs.count_bins[(count, blocks)](counts_GND, sums_GN, *given, **binned, **sizes)
            programs.choose_bins[(count,)](chosen_G3, begins_GN, counts_GND, blocks, D=BINS, K=ROOM, num_warps=2)
            programs.collect_keys[(count, blocks)](keys_GK, chosen_G3, begins_GN, *given, **binned, **keyed, **sizes)
            programs.find_ranked[(count,)](
                tokens_G, complete_G, keys_GK, chosen_G3, sums_GN, max_W, table_G6, blocks,
                N=1 << (blocks - 1).bit_length(), num_warps=8, **keyed, **sizes,
            )  # fmt: skip
        return tokens_G, complete_G


def fastest_draw(device: torch.device) -> TritonDraw | None:
    """Return the fastest draw kernel on a device; None: PyTorch's operations."""
    return TritonDraw() if device.type == "cuda" and not triton_problem(device) else None
