"""Triton programs over the blocks of GGUF files. ``triton_blocks`` launches them.

``values_of`` decodes each format of ``weights.block_panels.KINDS`` to the numbers that
``weights.gguf_blocks`` defines, to the bit if the compiler fuses no product with a sum. Letters: M
rows and N outputs of a program; G the 32 inputs of a group; X maps of a stack.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def half_at(at):
    """Return the float16 at an address, in float32."""
    low, high = tl.load(at).to(tl.uint16), tl.load(at + 1).to(tl.uint16)
    return (low | high << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def signed_at(at):
    """Return the int8 at an address, in float32."""
    return tl.load(at).to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def float_at(at):
    """Return the float32 at an address."""
    low = bits_at(at, 0, 8) | bits_at(at + 1, 0, 8) << 8
    return (low | bits_at(at + 2, 0, 8) << 16 | bits_at(at + 3, 0, 8) << 24).to(tl.float32, bitcast=True)


@triton.jit
def float8_at(at):
    """Return the float of 8 bits at an address, divided by 256: the float16 of the same bits."""
    code = tl.load(at).to(tl.uint16)
    half = ((code & 0x80) << 8 | (code & 0x7F) << 7).to(tl.uint16)
    return half.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def bits_at(at, shift, WIDTH: tl.constexpr):
    """Return some bits of the byte at an address."""
    return tl.load(at).to(tl.int32) >> shift & (1 << WIDTH) - 1


@triton.jit
def in_turns(at, group, i_G, WIDTH: tl.constexpr):
    """Return codes of which the groups of a block have the same bytes, the first the lowest
    bits."""
    EACH: tl.constexpr = 8 // WIDTH
    return bits_at(at + group // EACH * 32 + i_G, group % EACH * WIDTH, WIDTH)


@triton.jit
def codes_of(block, group, i_G, KIND: tl.constexpr):
    """Return the codes of a group, less what stands for zero."""
    if KIND == "Q4_0":
        return bits_at(block + 2 + i_G % 16, i_G // 16 * 4, 4) - 8
    elif KIND == "Q4_1":
        return bits_at(block + 4 + i_G % 16, i_G // 16 * 4, 4)
    elif KIND == "Q5_0":
        return (bits_at(block + 6 + i_G % 16, i_G // 16 * 4, 4) | bits_at(block + 2 + i_G // 8, i_G % 8, 1) << 4) - 16
    elif KIND == "Q5_1":
        return bits_at(block + 8 + i_G % 16, i_G // 16 * 4, 4) | bits_at(block + 4 + i_G // 8, i_G % 8, 1) << 4
    elif KIND == "Q2_K":
        return in_turns(block + 16, group, i_G, 2)
    elif KIND == "Q3_K":
        return (in_turns(block + 32, group, i_G, 2) | in_turns(block, group, i_G, 1) << 2) - 4
    elif KIND == "Q4_K":
        return in_turns(block + 16, group, i_G, 4)
    elif KIND == "Q5_K":
        return in_turns(block + 48, group, i_G, 4) | in_turns(block + 16, group, i_G, 1) << 4
    elif KIND == "Q6_K":
        low = bits_at(block + group // 4 * 64 + group % 2 * 32 + i_G, group % 4 // 2 * 4, 4)
        return (low | in_turns(block + 128, group, i_G, 2) << 4) - 32
    elif KIND == "IQ4_NL":
        return bits_at(block + 2 + i_G % 16, i_G // 16 * 4, 4)
    elif KIND == "IQ4_XS":
        return bits_at(block + 8 + group * 16 + i_G % 16, i_G // 16 * 4, 4)
    elif KIND == "NVFP4":
        return bits_at(block + 4 + group * 16 + i_G // 16 * 8 + i_G % 8, i_G % 16 // 8 * 4, 4)
    else:
        tl.static_assert(KIND == "MXFP4")
        return bits_at(block + 1 + i_G % 16, i_G // 16 * 4, 4)


@triton.jit
def six_bits(at, group):
    """Return the step and the minimum of a group of Q4_K and Q5_K: eight of each in 12 bytes."""
    late, own = group >= 4, at + group % 4
    high_step, high_minimum = bits_at(own, 6, 2) << 4, bits_at(own + 4, 6, 2) << 4
    step = tl.where(late, bits_at(own + 8, 0, 4) | high_step, bits_at(own, 0, 6))
    minimum = tl.where(late, bits_at(own + 8, 4, 4) | high_minimum, bits_at(own + 4, 0, 6))
    return step.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def values_of(block, row, group, i_G, table, KIND: tl.constexpr):
    """Return float32 ``[N, G]`` of a group of the blocks at ``[N, 1]``, in rows at ``[N, 1]``.
    ``table``: int8, the numbers of codes of IQ4, then of E2M1."""
    if KIND == "Q8_0":
        numbers = signed_at(block + 2 + i_G)
    elif KIND == "F8_E4M3":
        numbers = float8_at(block + 4 + i_G)
    else:
        codes = codes_of(block, group, i_G, KIND)
        if KIND == "IQ4_NL" or KIND == "IQ4_XS":
            numbers = tl.load(table + codes).to(tl.float32)
        elif KIND == "MXFP4" or KIND == "NVFP4":
            numbers = tl.load(table + 16 + codes).to(tl.float32)
        else:
            numbers = codes.to(tl.float32)
    half = group * 2 + i_G // 16
    if KIND == "Q2_K":
        step, minimum = bits_at(block + half, 0, 4).to(tl.float32), bits_at(block + half, 4, 4).to(tl.float32)
        return numbers * (half_at(block + 80) * step) - half_at(block + 82) * minimum
    elif KIND == "Q3_K":
        step = bits_at(block + 96 + half % 8, half // 8 * 4, 4) | bits_at(block + 104 + half % 4, half // 4 * 2, 2) << 4
        return numbers * (half_at(block + 108) * (step - 32).to(tl.float32))
    elif KIND == "Q4_K" or KIND == "Q5_K":
        step, minimum = six_bits(block + 4, group)
        return numbers * (step * half_at(block)) - minimum * half_at(block + 2)
    elif KIND == "Q6_K":
        return numbers * (half_at(block + 208) * signed_at(block + 192 + half))
    elif KIND == "IQ4_XS":
        step = (
            bits_at(block + 4 + group // 2, group % 2 * 4, 4) | bits_at(block + 2 + group // 4, group % 4 * 2, 2) << 4
        )
        return numbers * (half_at(block) * (step - 32).to(tl.float32))
    elif KIND == "MXFP4":
        # 2 ** (byte - 128), of which the first two have no exponent of their own.
        power = tl.load(block).to(tl.int32)
        power = tl.where(power < 2, 1 << 21 + power, power - 1 << 23).to(tl.float32, bitcast=True)
        return numbers * power
    elif KIND == "F8_E4M3":
        return numbers * (float_at(block) * 256)
    elif KIND == "NVFP4":
        step = float8_at(block + half) * 256
        return numbers * (step * float_at(row) + step * float_at(row + 4))
    elif KIND == "Q4_1" or KIND == "Q5_1":
        return numbers * half_at(block) + half_at(block + 2)
    else:
        return numbers * half_at(block)


@triton.jit
def multiply_blocks(
    y, x, blocks, bias, table, ends, x_stride, y_stride, count, outputs, INPUTS: tl.constexpr, KIND: tl.constexpr,
    NUMBERS: tl.constexpr, BYTES: tl.constexpr, HEAD: tl.constexpr, BIAS: tl.constexpr, MAPS: tl.constexpr, X: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows by some outputs. ``MAPS`` 0: all rows by the blocks at ``blocks``;
    else the rows up to each of ``ends`` by the blocks at each of these addresses, and surplus
    programs do nothing."""
    first, stop, rows = tl.program_id(0) * M, count, blocks
    if MAPS > 0:
        map_X = tl.arange(0, X)
        end_X = tl.load(ends + map_X, mask=map_X < MAPS, other=0)
        start_X = tl.load(ends + map_X - 1, mask=(map_X > 0) & (map_X < MAPS), other=0)
        tiles_X = tl.where(map_X < MAPS, (end_X - start_X + M - 1) // M, 0)
        last_X = tl.cumsum(tiles_X, 0)
        own = tl.sum((last_X <= tl.program_id(0)).to(tl.int32), 0)
        is_own_X = map_X == own
        before = tl.sum(tl.where(is_own_X, last_X - tiles_X, 0), 0)
        first = tl.sum(tl.where(is_own_X, start_X, 0), 0) + (tl.program_id(0) - before) * M
        stop = tl.sum(tl.where(is_own_X, end_X, 0), 0)
        rows = tl.load(blocks + tl.minimum(own, MAPS - 1)).to(tl.pointer_type(tl.uint8))
    if first < stop:
        m = first + tl.arange(0, M)
        n = tl.program_id(1) * N + tl.arange(0, N)
        i_G = tl.arange(0, 32)
        row_N = rows + tl.minimum(n, outputs - 1).to(tl.int64) * (HEAD + INPUTS // NUMBERS * BYTES)
        x_MG = x + m.to(tl.int64)[:, None] * x_stride + i_G[None, :]
        sums_MN = tl.zeros([M, N], tl.float32)
        for k in tl.range(0, INPUTS // 32, loop_unroll_factor=4):
            block_N = row_N + HEAD + k * 32 // NUMBERS * BYTES
            w_NG = values_of(block_N[:, None], row_N[:, None], k % (NUMBERS // 32), i_G[None, :], table, KIND)
            values_MG = tl.load(x_MG + k * 32, mask=m[:, None] < stop, other=0.0)
            sums_MN = tl.dot(values_MG, tl.trans(w_NG.to(x.dtype.element_ty)), sums_MN, input_precision="ieee")
        if BIAS:
            sums_MN += tl.load(bias + n, mask=n < outputs, other=0.0)[None, :]
        held_MN = (m[:, None] < stop) & (n[None, :] < outputs)
        tl.store(y + m.to(tl.int64)[:, None] * y_stride + n[None, :], sums_MN.to(y.dtype.element_ty), mask=held_MN)


@triton.jit
def read_rows(
    out, wanted, blocks, table, count, first, outputs, INPUTS: tl.constexpr, KIND: tl.constexpr,
    NUMBERS: tl.constexpr, BYTES: tl.constexpr, HEAD: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write a group of some wanted rows that lie at ``blocks``, the first of which is ``first``."""
    n, k, i_G = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1), tl.arange(0, 32)
    row_N = tl.load(wanted + n, mask=n < count, other=-1) - first
    held_N = (n < count) & (row_N >= 0) & (row_N < outputs)
    row_N = tl.where(held_N, row_N, 0)
    at_N = blocks + row_N.to(tl.int64) * (HEAD + INPUTS // NUMBERS * BYTES)
    block_N = at_N + HEAD + k * 32 // NUMBERS * BYTES
    w_NG = values_of(block_N[:, None], at_N[:, None], k % (NUMBERS // 32), i_G[None, :], table, KIND)
    to_NG = out + n.to(tl.int64)[:, None] * INPUTS + k * 32 + i_G[None, :]
    tl.store(to_NG, w_NG.to(out.dtype.element_ty), mask=held_N[:, None])
