"""Triton programs that draw a token of each row. ``triton_draw`` launches them.

Weights are integers, so sums are the same in any order: a token is that of ``ops.filters``.

Letters: G rows that draw; B tokens of a block; N blocks of a row, padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTEGERS = tl.constexpr(4503599627370496.0)
"""2^52: from there on float64 has integers only, so adding it rounds what is smaller."""
FIELDS = tl.constexpr(4)
"""Row of the logits, temperature, min-p and uniform number of a row that draws."""


@triton.jit
def _weights(z, maxima, table, z_stride, block, ONE: tl.constexpr, VOCAB: tl.constexpr, B: tl.constexpr):
    """Return int64 weights ``[B]`` of a block of a row; 0 behind the vocabulary's end."""
    row = tl.load(table).to(tl.int64)
    v = block * B + tl.arange(0, B)
    held_B = v < VOCAB
    z_B = tl.load(z + row * z_stride + v, mask=held_B, other=float("-inf")).to(tl.float64)
    x_B = (z_B - tl.load(maxima + row).to(tl.float64)) / tl.load(table + 1)
    weight_B = (tl.exp(x_B) * ONE + INTEGERS) - INTEGERS
    return tl.where(held_B & (weight_B >= tl.load(table + 2) * ONE), weight_B, 0.0).to(tl.int64)


@triton.jit
def sum_blocks(sums, z, maxima, table, z_stride, ONE: tl.constexpr, VOCAB: tl.constexpr, B: tl.constexpr):
    """Write the sum of the weights of each block."""
    g, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    weight_B = _weights(z, maxima, table + g * FIELDS, z_stride, block, ONE, VOCAB, B)
    tl.store(sums + g * tl.num_programs(1) + block, tl.sum(weight_B, 0))


@triton.jit
def find_tokens(
    tokens, sums, z, maxima, table, z_stride, ONE: tl.constexpr, VOCAB: tl.constexpr, B: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Write the first token of a row at which the sum of weights exceeds u times the total."""
    g, n = tl.program_id(0).to(tl.int64), tl.arange(0, N)
    BLOCKS: tl.constexpr = (VOCAB + B - 1) // B
    sum_N = tl.load(sums + g * BLOCKS + n, mask=n < BLOCKS, other=0)
    target = (tl.load(table + g * FIELDS + 3) * tl.sum(sum_N, 0).to(tl.float64)).to(tl.int64)
    # A row without a finite maximum, whose token nobody takes, may exceed all sums.
    block = tl.minimum(tl.sum((tl.cumsum(sum_N, 0) <= target).to(tl.int32), 0), BLOCKS - 1)
    before = tl.sum(tl.where(n < block, sum_N, 0), 0)
    weight_B = _weights(z, maxima, table + g * FIELDS, z_stride, block, ONE, VOCAB, B)
    place = tl.sum((before + tl.cumsum(weight_B, 0) <= target).to(tl.int32), 0)
    tl.store(tokens + g, tl.minimum(block * B + place, VOCAB - 1).to(tl.int64))
