"""Triton programs that draw a token of each row. ``triton_draw`` launches them.

Weights are integers, so sums are the same in any order: a token is the one of ``sampling.filters``.

Top-k and top-p draw in order of probability. Tokens are counted in bins by their distance from the
maximum; as many of the most probable ones as fit are collected as keys, logit above reversed id,
and one program finds all bounds among the keys by bisection. So a row is read twice.

Letters: G rows that draw; B tokens of a block; N blocks of a row, padded to a power of two; D bins;
K collected keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTEGERS = tl.constexpr(4503599627370496.0)
"""2^52: from there on float64 has integers only, so adding it rounds smaller numbers."""
FIELDS = tl.constexpr(6)
"""Row of the logits, temperature, min-p, uniform number, top-k and top-p of a row that draws."""
DEEPEST = tl.constexpr(37.0)
"""``exp(-37)`` is below 2^-53: such weights are 0."""


@triton.jit
def _weights(z, maxima, table, z_stride, block, ONE: tl.constexpr, VOCAB: tl.constexpr, B: tl.constexpr):
    """Return int64 weights ``[B]`` of a block of a row; 0 beyond the vocabulary."""
    row = tl.load(table).to(tl.int64)
    v = block * B + tl.arange(0, B)
    held_B = v < VOCAB
    z_B = tl.load(z + row * z_stride + v, mask=held_B, other=float("-inf"))
    weight_B = _rounded(_below(z_B, maxima, table), ONE)
    return tl.where(held_B & (weight_B >= tl.load(table + 2) * ONE), weight_B, 0.0).to(tl.int64)


@triton.jit
def _below(z_B, maxima, table):
    """Return the difference of logits to the maximum, over the temperature: 0 or less, float64."""
    row = tl.load(table).to(tl.int64)
    return (z_B.to(tl.float64) - tl.load(maxima + row).to(tl.float64)) / tl.load(table + 1)


@triton.jit
def _rounded(x_B, ONE: tl.constexpr):
    """Return the weights as integers in float64."""
    return (tl.exp(x_B) * ONE + INTEGERS) - INTEGERS


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
    # In a row without a finite maximum the target may exceed all sums; its token is not used.
    block = tl.minimum(tl.sum((tl.cumsum(sum_N, 0) <= target).to(tl.int32), 0), BLOCKS - 1)
    before = tl.sum(tl.where(n < block, sum_N, 0), 0)
    weight_B = _weights(z, maxima, table + g * FIELDS, z_stride, block, ONE, VOCAB, B)
    place = tl.sum((before + tl.cumsum(weight_B, 0) <= target).to(tl.int32), 0)
    tl.store(tokens + g, tl.minimum(block * B + place, VOCAB - 1).to(tl.int64))


@triton.jit
def _binned(
    z, maxima, table, z_stride, block, ONE: tl.constexpr, VOCAB: tl.constexpr, B: tl.constexpr, D: tl.constexpr
):
    """Return logits, weights and bins ``[B]`` of a block. Bin 0 holds the maximum, the last bin all
    weights of 0."""
    row = tl.load(table).to(tl.int64)
    v = block * B + tl.arange(0, B)
    z_B = tl.load(z + row * z_stride + v, mask=v < VOCAB, other=float("-inf"))
    x_B = _below(z_B, maxima, table)
    weight_B = _rounded(x_B, ONE)
    counts_B = (v < VOCAB) & (weight_B > 0)
    bin_B = tl.where(counts_B, -x_B * ((D - 1) / DEEPEST), D - 1.0).to(tl.int32)
    return z_B, tl.where(counts_B, weight_B, 0.0).to(tl.int64), tl.where(counts_B, tl.minimum(bin_B, D - 2), D - 1)


@triton.jit
def count_bins(
    counts, sums, z, maxima, table, z_stride,
    ONE: tl.constexpr, VOCAB: tl.constexpr, B: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write the number of tokens in each bin for a block, and the sum of their weights."""
    g, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, weight_B, bin_B = _binned(z, maxima, table + g * FIELDS, z_stride, block, ONE, VOCAB, B, D)
    place = g * tl.num_programs(1) + block
    tl.store(sums + place, tl.sum(weight_B, 0))
    tl.store(counts + place * D + tl.arange(0, D), tl.histogram(bin_B, D))


@triton.jit
def choose_bins(chosen, begins, counts, blocks, D: tl.constexpr, K: tl.constexpr):
    """Write, for each row, the number of its first bins with at most K tokens, the number of tokens
    in these bins, and the number of tokens with a weight; and the first key position of each block.
    """
    g, d = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    count_D = tl.zeros((D,), tl.int32)
    for block in range(blocks):
        count_D += tl.load(counts + (g * blocks + block) * D + d)
    count_D = tl.where(d < D - 1, count_D, 0)
    bins = tl.sum(((tl.cumsum(count_D, 0) <= K) & (d < D - 1)).to(tl.int32), 0)
    begin = 0
    for block in range(blocks):
        tl.store(begins + g * blocks + block, begin)
        begin += tl.sum(tl.where(d < bins, tl.load(counts + (g * blocks + block) * D + d), 0), 0)
    tl.store(chosen + g * 3, bins)
    tl.store(chosen + g * 3 + 1, begin)
    tl.store(chosen + g * 3 + 2, tl.sum(count_D, 0))


@triton.jit
def collect_keys(
    keys, chosen, begins, z, maxima, table, z_stride,
    ONE: tl.constexpr, VOCAB: tl.constexpr, B: tl.constexpr, D: tl.constexpr, K: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Write the keys of a block's tokens in the chosen bins: unique, and ordered by logit, then by
    lower id. An id has ``IDS`` bits."""
    g, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    z_B, _, bin_B = _binned(z, maxima, table + g * FIELDS, z_stride, block, ONE, VOCAB, B, D)
    bits_B = tl.where(z_B == 0, 0.0, z_B).to(tl.int32, bitcast=True)  # Both zeros are equal.
    order_B = (bits_B ^ ((bits_B >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    v = block * B + tl.arange(0, B)
    taken_B = bin_B < tl.load(chosen + g * 3)
    begin = tl.load(begins + g * tl.num_programs(1) + block)
    place_B = begin + tl.cumsum(taken_B.to(tl.int32), 0) - 1
    tl.store(keys + g * K + place_B, (order_B << IDS) | (VOCAB - 1 - v).to(tl.int64), mask=taken_B)


@triton.jit
def _found(key_K, weight_K, target, BITS: tl.constexpr):
    """Return the first key, in descending order, at which the cumulative weight exceeds the target;
    0 if none does."""
    found = target * 0
    for bit in range(BITS):
        tried = found | (target * 0 + 1 << (BITS - 1 - bit))
        found = tl.where(tl.sum(tl.where(key_K >= tried, weight_K, 0), 0) > target, tried, found)
    return found


@triton.jit
def find_ranked(
    tokens, complete, keys, chosen, sums, maxima, table, blocks,
    ONE: tl.constexpr, VOCAB: tl.constexpr, K: tl.constexpr, IDS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the token of a row after top-k, top-p and min-p, and ``complete``: 1 if the collected
    keys hold all candidates."""
    g, i, n = tl.program_id(0).to(tl.int64), tl.arange(0, K), tl.arange(0, N)
    own = table + g * FIELDS
    count, all_count = tl.load(chosen + g * 3 + 1), tl.load(chosen + g * 3 + 2)
    key_K = tl.load(keys + g * K + i, mask=i < count, other=-1)
    order_K = (key_K >> IDS) - 2147483648
    bits_K = (order_K ^ ((order_K >> 63) & 0x7FFFFFFF)).to(tl.int32)
    weight_K = _rounded(_below(bits_K.to(tl.float32, bitcast=True), maxima, own), ONE)
    weight_K = tl.where(i < count, weight_K, 0.0).to(tl.int64)
    most, part = tl.load(own + 4).to(tl.int64), tl.load(own + 5)
    whole = tl.sum(tl.load(sums + g * blocks + n, mask=n < blocks, other=0), 0)
    is_complete = count >= 0
    if most < VOCAB:
        is_complete = (most <= count) | (count == all_count)
        if most < count:
            weight_K = tl.where(key_K >= _found(key_K, (key_K >= 0).to(tl.int64), most - 1, 32 + IDS), weight_K, 0)
        whole = tl.sum(weight_K, 0)
    if part < 1:
        mass = tl.minimum(tl.ceil(part * whole.to(tl.float64)).to(tl.int64), whole)
        is_complete = is_complete & (tl.sum(weight_K, 0) >= mass)
        weight_K = tl.where(key_K >= _found(key_K, weight_K, mass - 1, 32 + IDS), weight_K, 0)
    weight_K = tl.where(weight_K.to(tl.float64) >= tl.load(own + 2) * ONE, weight_K, 0)
    target = (tl.load(own + 3) * tl.sum(weight_K, 0).to(tl.float64)).to(tl.int64)
    found = _found(key_K, weight_K, target, 32 + IDS)
    tl.store(tokens + g, tl.maximum(VOCAB - 1 - (found & ((1 << IDS) - 1)), 0))
    tl.store(complete + g, is_complete)
