"""How a linear attention state fades within a chunk of tokens, in matrix products.

Row i of a chunk sees what row j <= i wrote, weakened by the decays of the rows j + 1 .. i, and what was before the chunk weakened by
those of the rows 0 .. i. All these weights are made from sums of log decays, or products of decays, and never from differences or
quotients: those of long sums are inexact, are not numbers where something was forgotten completely (log decay -inf), and overflow
where rows are weighed against a common point.

Letters: N pieces of sequences; H heads of the state; h heads of q and k, either H or 1 that all share; R query heads of each;
L rows of a piece; K, V sizes of keys and values.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Weighed(NamedTuple):
    """The queries and keys of a chunk, with the weights that decays give them."""

    scores_NHRLL: Tensor
    """What row i reads of what row j writes; 0 above the diagonal."""
    q_NHRLK: Tensor
    """As they read the state before the chunk."""
    k_NHLK: Tensor
    """As they write into the state after the chunk."""
    total: Tensor | None
    """``[N, H, 1, 1]`` or ``[N, H, K, 1]``: what is left of the state before in the state after; None: all of it."""

    def read(self, states_NHKV: Tensor) -> Tensor:
        """``[N, H, R, L, V]``: what each row reads of the states before."""
        return products(self.q_NHRLK, states_NHKV)

    def write(self, states_NHKV: Tensor, u_NHLV: Tensor) -> Tensor:
        """The states after ``u`` was written into those before; fresh."""
        pieces, heads = states_NHKV.shape[:2]
        states = torch.empty_like(states_NHKV, memory_format=torch.contiguous_format)
        if self.total is None:
            states.copy_(states_NHKV)
        else:
            torch.mul(states_NHKV, self.total, out=states)
        # In place: the states are the largest tensors here.
        k_NHKL = self.k_NHLK.mT.expand(pieces, heads, -1, -1)
        states.flatten(0, 1).baddbmm_(k_NHKL.flatten(0, 1), u_NHLV.flatten(0, 1))
        return states


def weigh(q_NHRLK: Tensor, k_NHLK: Tensor, log_decay: Tensor | None) -> Weighed:
    """By log decays ``[N, H, L]`` or ``[N, H, L, K]``, all at most 0; q and k have h heads."""
    if log_decay is None:
        return Weighed(products(q_NHRLK, k_NHLK.mT).tril_(), q_NHRLK, k_NHLK, None)
    return (_by_head if log_decay.dim() == 3 else _by_column)(q_NHRLK, k_NHLK, log_decay)


def products(q_NHRLK: Tensor, right_NHKX: Tensor) -> Tensor:
    """``[N, H, R, L, X]``, with the query heads folded into rows, so that the right side is read once."""
    groups, rows = q_NHRLK.shape[2:4]
    made = torch.matmul(q_NHRLK.flatten(2, 3), right_NHKX)
    return made.view(*made.shape[:2], groups, rows, made.shape[3])


def faded(log_decay: Tensor) -> Tensor:
    """``exp(log_decay)``, fresh, in which weights below the square root of the smallest normal number are 0.

    That is far below rounding, for a weight of 1 stands beside each of them. Smaller ones, and their products, are subnormal numbers,
    which take a CPU up to a hundred times as long.
    """
    least = 0.5 * math.log(torch.finfo(log_decay.dtype).tiny)
    return _without_faint(log_decay.clamp(min=least - 1).exp_())


def _without_faint(weights: Tensor) -> Tensor:
    """In place."""
    faint = math.sqrt(torch.finfo(weights.dtype).tiny)
    torch.threshold_(weights, faint, 0.0)
    return weights


def _by_head(q_NHRLK: Tensor, k_NHLK: Tensor, log_decay_NHL: Tensor) -> Weighed:
    """One decay for each head and row: the state space dual form of Mamba-2 (arXiv:2405.21060)."""
    rows = log_decay_NHL.shape[-1]
    below_LL = torch.ones(rows, rows, dtype=torch.bool, device=log_decay_NHL.device).tril_(-1)
    # In column j: the log decays below row j, added up.
    sums_NHLL = log_decay_NHL.unsqueeze(-1).masked_fill(~below_LL, 0).cumsum(-2)
    within_NHLL = faded(sums_NHLL).tril_()
    since_NHL = faded(log_decay_NHL.cumsum(-1))
    return Weighed(
        products(q_NHRLK, k_NHLK.mT) * within_NHLL.unsqueeze(2),
        q_NHRLK * since_NHL[:, :, None, :, None],
        k_NHLK * within_NHLL[..., -1, :, None],
        since_NHL[..., -1, None, None],
    )


def _by_column(q_NHRLK: Tensor, k_NHLK: Tensor, log_decay_NHLK: Tensor) -> Weighed:
    """One decay for each column of the keys (arXiv:2312.06635): it stands between q and k, inside of their product.

    The scores are made of squares. A block of 2 m rows is halved: whatever a row of the right half reads of a row of the left half
    fades up to the middle and from the middle on, both by weights of at most 1, so the square of the two is one product. The
    halves are blocks of their own, down to single rows.
    """
    pieces, heads, rows, _ = log_decay_NHLK.shape
    size = 1 << (rows - 1).bit_length()
    q, k = _padded(q_NHRLK, size), _padded(k_NHLK, size)
    diagonal = (q * k.unsqueeze(2)).sum(-1)
    scores = q.new_zeros(pieces, heads, q.shape[2], size, size)
    scores.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    # Products of decays in blocks of ``half`` rows: from the beginning to each row, with it; and from each row, without it, to the end.
    since = faded(_padded(log_decay_NHLK, size))
    until = torch.ones_like(since)
    half = 1
    while half < size:
        left_since, right_since = _halves(since, half)
        left_until, _ = _halves(until, half)
        square = torch.matmul(
            _halves(q, half)[1] * right_since.unsqueeze(2), (_halves(k, half)[0] * left_until).unsqueeze(2).mT
        )
        blocks = size // (2 * half)
        grid = scores.view(*scores.shape[:3], blocks, 2, half, blocks, 2, half)
        # Of [.., block, side, half, block, side, half] the squares right of left, each of a block with itself.
        grid.diagonal(dim1=-6, dim2=-3)[..., 1, :, 0, :, :].copy_(square.movedim(-3, -1))
        _without_faint(left_until.mul_(right_since[..., -1:, :]))
        _without_faint(right_since.mul_(left_since[..., -1:, :]))
        half *= 2
    return Weighed(
        scores[..., :rows, :rows],
        q_NHRLK * since[:, :, None, :rows],
        k_NHLK * until[..., :rows, :],
        since[..., -1, :, None],
    )


def _padded(x: Tensor, size: int) -> Tensor:
    """With rows of 0 up to ``size``."""
    return torch.nn.functional.pad(x, (0, 0, 0, size - x.shape[-2])) if x.shape[-2] < size else x


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Views of the left and the right halves of the blocks, ``[.., blocks, half, K]`` each."""
    left, right = x.view(*x.shape[:-2], -1, 2, half, x.shape[-1]).unbind(-3)
    return left, right
