"""Decay of a linear attention state within a chunk of tokens, in matrix products.

Row i of a chunk reads what row j <= i wrote, weakened by the decays of rows j + 1 .. i, and the
earlier state, weakened by the decays of rows 0 .. i. These weights come from sums of log decays, or
from products of decays. Differences and quotients of long sums are inexact, are NaN after a
complete decay (log decay -inf), and overflow relative to a common point. So quotients of products
are used only if enough is left of each column (``LEAST_LEFT``).

Letters: N pieces of sequences; B chunks of each, prepared together; H heads of the state, X = N *
H; h heads of q and k, H or 1 for all; R query heads of each; L rows of a chunk, I = R * L rows of a
reader; K, V sizes of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LEAST_LEFT = 1e-12
"""Least remainder of each column within a chunk for division by column decays. Quotients of such
numbers stay far from overflow and err by no more than the roundings of their factors."""

TOGETHER = 8
"""Chunks with jointly prepared column decays: few enough for caches."""


class Weighed(NamedTuple):
    """Readers (queries, keys) and keys of a chunk, with the weights of their decays. A head's decay
    weakens what is read and written; a column's decay must be in q and k."""

    scores: list[Tensor]
    """``[X, I, L]`` by reader: share of each row's write in each reading; 0 for later rows."""
    readers: list[Tensor]
    """``[X, I, K]``: readers of the state before the chunk, with weighed columns."""
    since: list[Tensor]
    """``[X, I, 1]`` by reader: share of the earlier state that remains at each row; empty: all, or
    columns are weighed."""
    k_XKL: Tensor
    """Keys for writing into the state after the chunk, with weighed columns."""
    until_XL1: Tensor | None
    """Share of each row's write that remains after the chunk; None: all, or columns are weighed."""
    total: Tensor | None
    """``[X, 1, 1]`` or ``[X, K, 1]``: share of the earlier state that remains after the chunk;
    None: all."""
    together: bool = False
    """Keys represent writes at the beginning of the chunk, which fade like the state."""

    def write_(self, states_XKV: Tensor, u_XLV: Tensor) -> None:
        """Update the states by the chunk's writes ``u``, in place, because they are large."""
        if self.total is not None and not self.together:
            states_XKV.mul_(self.total)
        states_XKV.baddbmm_(self.k_XKL, u_XLV if self.until_XL1 is None else u_XLV * self.until_XL1)
        if self.total is not None and self.together:
            states_XKV.mul_(self.total)


def weigh(readers: Sequence[Tensor], k_BNhLK: Tensor, log_decay: Tensor | None, heads: int) -> Iterator[Weighed]:
    """Yield the B chunks for readers ``[B, N, h, R, L, K]`` and log decays <= 0, ``[B, N, H, L]``
    or ``[B, N, H, L, K]``."""
    if log_decay is not None and log_decay.dim() == 5:
        for start in range(0, len(k_BNhLK), TOGETHER):
            some = slice(start, start + TOGETHER)
            q, k = [q[some] for q in readers], k_BNhLK[some]
            left_BNHLK = _left(log_decay[some])
            if left_BNHLK is None:
                yield from _by_column(q, k, log_decay[some])
            else:
                yield from _by_quotients(q, k, left_BNHLK)
        return
    fading = None if log_decay is None else _Fading.of(log_decay)
    scores = [_scores(q, k_BNhLK, fading, heads) for q in readers]
    rows = [q.shape[3] for q in readers]
    whole = [_over_heads(q.flatten(3, 4), heads) for q in readers]
    k_BXKL = _over_heads(k_BNhLK, heads).mT
    for chunk, k_XKL in enumerate(k_BXKL):
        some_scores, some_readers = [score[chunk] for score in scores], [q[chunk] for q in whole]
        if fading is None:
            yield Weighed(some_scores, some_readers, [], k_XKL, None, None)
            continue
        since = fading.since_BXL1[chunk]
        yield Weighed(
            some_scores,
            some_readers,
            [since if groups == 1 else since.repeat(1, groups, 1) for groups in rows],
            k_XKL,
            fading.until_BXL1[chunk],
            fading.total_BX11[chunk],
        )


def _over_heads(x_BNhIK: Tensor, heads: int) -> Tensor:
    """Return ``[B, X, I, K]`` with shared heads repeated, as a view if strides allow it."""
    return x_BNhIK.expand(-1, -1, heads, -1, -1).flatten(1, 2)


def faded(log_decay: Tensor) -> Tensor:
    """Return a fresh ``exp(log_decay)``; weights below sqrt(smallest normal number) become 0. That
    is far below rounding beside a weight of 1. Products of smaller weights are subnormal numbers,
    which take a CPU up to a hundred times as long."""
    least = 0.5 * math.log(torch.finfo(log_decay.dtype).tiny)
    clamped = torch.empty_like(log_decay, memory_format=torch.contiguous_format)
    return _without_faint(torch.clamp(log_decay, min=least - 1, out=clamped).exp_())


def _without_faint(weights: Tensor) -> Tensor:
    """Zero weights below sqrt(smallest normal number), in place."""
    faint = math.sqrt(torch.finfo(weights.dtype).tiny)
    torch.threshold_(weights, faint, 0.0)
    return weights


class _Fading(NamedTuple):
    """One decay for each head and row: the state space dual form of Mamba-2 (arXiv:2405.21060)."""

    within_BNHLL: Tensor
    """Weights of the scores, 0 above the diagonal."""
    since_BXL1: Tensor
    until_BXL1: Tensor
    total_BX11: Tensor

    @staticmethod
    def of(log_decay_BNHL: Tensor) -> _Fading:
        rows = log_decay_BNHL.shape[-1]
        below_LL = torch.ones(rows, rows, dtype=torch.bool, device=log_decay_BNHL.device).tril_(-1)
        # In column j: the sum of the log decays below row j.
        sums_BNHLL = log_decay_BNHL.unsqueeze(-1).masked_fill(~below_LL, 0).cumsum(-2)
        within_BNHLL = faded(sums_BNHLL).tril_()
        since_BXL1 = faded(log_decay_BNHL.cumsum(-1)).flatten(1, 2).unsqueeze(-1)
        until_BXL1 = within_BNHLL[..., -1, :].flatten(1, 2).unsqueeze(-1)
        return _Fading(within_BNHLL, since_BXL1, until_BXL1, since_BXL1[:, :, -1:])


def _scores(q_BNhRLK: Tensor, k_BNhLK: Tensor, fading: _Fading | None, heads: int) -> Tensor:
    """Return ``[B, X, I, L]``: products of queries and keys, weighed."""
    chunks, pieces, some, groups, rows, _ = q_BNhRLK.shape
    made = q_BNhRLK.new_empty(chunks, pieces * some, groups * rows, rows)
    # Chunk by chunk: the heads of one can be read in place.
    for q, k, out in zip(q_BNhRLK.flatten(3, 4).flatten(1, 2), k_BNhLK.flatten(1, 2), made, strict=True):
        torch.bmm(q, k.mT, out=out)
    scores = made.view(chunks, pieces, some, groups, rows, rows)
    if fading is None:
        scores.tril_()
    elif some == heads:
        scores.mul_(fading.within_BNHLL.unsqueeze(3))
    else:
        scores = scores * fading.within_BNHLL.unsqueeze(3)
    return _over_heads(scores.flatten(3, 4), heads)


def _left(log_decay_BNHLK: Tensor) -> Tensor | None:
    """Return the remainder of each column at each row: products of decays, exact up to a rounding
    each. None if it is too small to divide by, and off the CPU, where the check would wait for the
    device."""
    if log_decay_BNHLK.device.type != "cpu":
        return None
    # The rows of a head are contiguous, as matrix products need them.
    left = torch.exp(log_decay_BNHLK, out=torch.empty_like(log_decay_BNHLK, memory_format=torch.contiguous_format))
    for row in range(1, left.shape[3]):
        left[..., row, :].mul_(left[..., row - 1, :])
    return left if float(left[..., -1, :].min()) >= LEAST_LEFT else None


def _by_quotients(readers: Sequence[Tensor], k_BNhLK: Tensor, left_BNHLK: Tensor) -> Iterator[Weighed]:
    """Weigh by one decay for each column, if little fades (arXiv:2312.06635, section 4.2). Queries
    read the state before the chunk; keys represent writes before it."""
    k_BXLK = torch.div(k_BNhLK, left_BNHLK, out=torch.empty_like(left_BNHLK)).flatten(1, 2)
    weighed_q = [(left_BNHLK.unsqueeze(3) * q).flatten(3, 4).flatten(1, 2) for q in readers]
    total_BXK1 = left_BNHLK[..., -1, :].flatten(1, 2).unsqueeze(-1)
    rows = k_BXLK.shape[2]
    for chunk, (k_XLK, total) in enumerate(zip(k_BXLK, total_BXK1, strict=True)):
        q = [weighed[chunk] for weighed in weighed_q]
        scores = [torch.bmm(one, k_XLK.mT) for one in q]
        for score in scores:
            score.view(len(score), -1, rows, rows).tril_()
        yield Weighed(scores, q, [], k_XLK.mT, None, total, together=True)


def _by_column(readers: Sequence[Tensor], k_BNhLK: Tensor, log_decay_BNHLK: Tensor) -> Iterator[Weighed]:
    """Weigh by one decay for each column of the keys (arXiv:2312.06635), between q and k.

    The scores are made of squares. A block of 2 m rows is halved. A right row's reading of a left
    row fades up to the middle and after it, by weights of at most 1, so the square of right by left
    rows is one product. The halves are blocks themselves, down to single rows. Queries and keys
    carry weights as blocks grow: a query the decay from the beginning of its block to its row,
    inclusive; a key the decay from its row, exclusive, to the end.
    """
    rows = k_BNhLK.shape[3]
    size = 1 << (rows - 1).bit_length()
    decays = faded(_padded(log_decay_BNHLK, size))
    shape = decays.shape[:3]
    k = _padded(k_BNhLK, size)
    weighed_k = k.expand(*shape, -1, -1).clone(memory_format=torch.contiguous_format)
    weighed_q, scores = [], []
    for reader in readers:
        q = _padded(reader, size)
        score = q.new_zeros(*shape, q.shape[3], size, size)
        score.diagonal(dim1=-2, dim2=-1).copy_((k.unsqueeze(3) * q).sum(-1))
        weighed_q.append(decays.unsqueeze(3) * q)  # the decays are the first operand: the result has their layout
        scores.append(score)
    totals = decays  # of each block
    half = 1
    while half < size:
        blocks = size // (2 * half)
        left_total, right_total = _sides(totals, 1)
        left_k = _sides(weighed_k, half)[0]
        for score, q in zip(scores, weighed_q, strict=True):
            right_q = _sides(q, half)[1]
            square = _square(right_q, left_k.unsqueeze(3))
            grid = score.view(*score.shape[:4], blocks, 2, half, blocks, 2, half)
            # Of [.., block, side, half, block, side, half] the squares right of left, each of a
            # block with itself.
            grid.diagonal(dim1=-6, dim2=-3)[..., 1, :, 0, :, :].copy_(square.movedim(-3, -1))
            _normal(right_q.mul_(left_total.unsqueeze(3)))
        _normal(left_k.mul_(right_total))
        totals = _without_faint(left_total * right_total).squeeze(-2)
        half *= 2
    chosen = [score[..., :rows, :rows].flatten(3, 4).flatten(1, 2) for score in scores]
    read = [q[..., :rows, :].flatten(3, 4).flatten(1, 2) for q in weighed_q]
    k_BXKL = weighed_k[:, :, :, :rows].flatten(1, 2).mT
    total_BXK1 = totals.flatten(1, 2).mT
    for chunk, (k_XKL, total) in enumerate(zip(k_BXKL, total_BXK1, strict=True)):
        yield Weighed([score[chunk] for score in chosen], [q[chunk] for q in read], [], k_XKL, None, total)


def _square(right: Tensor, left: Tensor) -> Tensor:
    """Return ``right @ left.mT``, for single rows without a call for each."""
    if right.shape[-2] == 1:
        return (right * left).sum(-1, keepdim=True)
    return torch.matmul(right, left.mT)


def _normal(x: Tensor) -> None:
    """Make subnormal numbers 0, in place."""
    torch.ops.aten.hardshrink.out(x, torch.finfo(x.dtype).tiny, out=x)


def _padded(x: Tensor, size: int) -> Tensor:
    """Append rows of 0 up to ``size``."""
    return torch.nn.functional.pad(x, (0, 0, 0, size - x.shape[-2])) if x.shape[-2] < size else x


def _sides(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return views of the left and right halves of blocks, ``[.., blocks, half, K]`` each."""
    left, right = x.view(*x.shape[:-2], -1, 2, half, x.shape[-1]).unbind(-3)
    return left, right
