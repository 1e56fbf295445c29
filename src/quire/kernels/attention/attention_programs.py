"""Triton programs of attention over pages. ``triton_attention`` launches them.

A program works on one item (``tiles``) for some query heads of one KV head: M rows of
queries, which are tokens times heads, against N keys at a time. Scores are in units of log 2.

Letters: M rows of a program; N keys of a step; D columns of K; V columns of values.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FIELDS = tl.constexpr(12)
MERGED = tl.constexpr(4)


@triton.jit
def _capped(x, cap):
    """Return ``cap * tanh(x / cap)``."""
    t = tl.exp2(tl.abs(x) * (-2.0 * LOG2E / cap))
    size = cap * (1.0 - t) / (1.0 + t)
    return tl.where(x < 0, -size, size)


@triton.jit
def _columns(base, where_N, d, known_N, DIM: tl.constexpr, FULL: tl.constexpr, MASKED: tl.constexpr):
    """Load the columns d of rows; 0 if a row is unknown or has no such column."""
    where_ND = base + where_N[:, None] + d[None, :]
    if MASKED:
        if FULL:
            x_ND = tl.load(where_ND, mask=known_N[:, None], other=0.0)
        else:
            x_ND = tl.load(where_ND, mask=known_N[:, None] & (d < DIM)[None, :], other=0.0)
    else:
        if FULL:
            x_ND = tl.load(where_ND)
        else:
            x_ND = tl.load(where_ND, mask=(d < DIM)[None, :], other=0.0)
    return x_ND


@triton.jit
def _advance(
    total_M, top_M, sum_MV, q_MD, q_rest_MD, low_M, high_M, bits_M, held_M,
    begin, end, first, stop, bits_first, bits_stop, table, base, k_base, v_base, k_stride, v_stride, scale, cap,
    PAGE: tl.constexpr, LINEAR: tl.constexpr, N: tl.constexpr, DK: tl.constexpr, MAIN: tl.constexpr,
    REST: tl.constexpr, DV: tl.constexpr, VALUE: tl.constexpr, SHARED: tl.constexpr, BITS: tl.constexpr,
    CAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys at addresses ``begin .. end - 1`` to the running softmax, in steps of N."""
    d = tl.arange(0, MAIN)
    for start in range(begin, end, N):
        address_N = start + tl.arange(0, N)
        known_N = (address_N >= first) & (address_N < stop)
        if LINEAR:
            slot_N = (base + address_N).to(tl.int64)
        else:
            if MASKED:
                page_N = tl.load(table + address_N // PAGE, mask=known_N, other=-1)
                known_N = known_N & (page_N >= 0)
            else:
                page_N = tl.load(table + address_N // PAGE)
            slot_N = page_N.to(tl.int64) * PAGE + address_N % PAGE
        k_slot_N = slot_N * k_stride
        k_ND = _columns(k_base, k_slot_N, d, known_N, DK, DK >= MAIN, MASKED)
        s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
        if REST > 0:
            e = MAIN + tl.arange(0, REST)
            rest_ND = _columns(k_base, k_slot_N, e, known_N, DK, DK == MAIN + REST, MASKED)
            s_MN = tl.dot(q_rest_MD, tl.trans(rest_ND), s_MN, input_precision="ieee")
        s_MN = s_MN * scale
        if CAP:
            s_MN = _capped(s_MN, cap) * LOG2E
        if MASKED:
            seen_MN = (address_N[None, :] >= low_M[:, None]) & (address_N[None, :] < high_M[:, None])
            if BITS:
                ruled_N = (address_N >= bits_first) & (address_N < bits_stop)
                # A shift by less than 0 may be anything.
                bit_N = tl.where(ruled_N, address_N - bits_first, 0)
                byte_MN = tl.load(
                    bits_M[:, None] + (bit_N // 8)[None, :], mask=held_M[:, None] & ruled_N[None, :], other=0
                )
                seen_MN = seen_MN | (((byte_MN.to(tl.int32) >> (bit_N % 8)[None, :]) & 1) != 0)
            s_MN = tl.where(seen_MN & known_N[None, :], s_MN, -float("inf"))
        highest_M = tl.maximum(top_M, tl.max(s_MN, 1))
        shift_M = tl.where(highest_M == -float("inf"), 0.0, highest_M)
        p_MN = tl.exp2(s_MN - shift_M[:, None])
        fade_M = tl.exp2(top_M - shift_M)
        total_M = total_M * fade_M + tl.sum(p_MN, 1)
        sum_MV = sum_MV * fade_M[:, None]
        if SHARED:
            v_NV = k_ND
        else:
            v = tl.arange(0, VALUE)
            v_NV = _columns(v_base, slot_N * v_stride, v, known_N, DV, DV == VALUE, MASKED)
        sum_MV = tl.dot(p_MN.to(v_NV.dtype), v_NV, sum_MV, input_precision="ieee")
        top_M = highest_M
    return total_M, top_M, sum_MV


@triton.jit
def attend_items(
    items, tables, lows, highs, bits, q, k, v, sinks, out, lse, state_out, state_lse,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head, lse_row, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr, HEAD_AXIS: tl.constexpr,
    PAGE: tl.constexpr, LINEAR: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    DK: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, DV: tl.constexpr, VALUE: tl.constexpr,
    SHARED: tl.constexpr, BITS: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Write the result of an item, or its attention state.

    ``GROUP`` query heads share a KV head; ``TOGETHER`` of them run in one program; ``HEADS`` query
    heads in all. ``scale``: in units of log 2; with ``CAP``, of natural scores.
    """
    item = items + tl.program_id(1 - HEAD_AXIS) * FIELDS
    row, rows = tl.load(item), tl.load(item + 1)
    table = tl.load(item + 2)
    first, stop = tl.load(item + 3), tl.load(item + 4)
    plain_first, plain_stop = tl.load(item + 5), tl.load(item + 6)
    state = tl.load(item + 7)
    PIECES: tl.constexpr = (GROUP + TOGETHER - 1) // TOGETHER
    kv_head = tl.program_id(HEAD_AXIS) // PIECES
    piece = tl.program_id(HEAD_AXIS) % PIECES

    m = tl.arange(0, M)
    token_M, member_M = m // TOGETHER, piece * TOGETHER + m % TOGETHER
    held_M = (token_M < rows) & (member_M < GROUP)
    head_M = kv_head * GROUP + member_M
    row_M = row + token_M
    q_M = q + row_M.to(tl.int64) * q_row + head_M * q_head
    d = tl.arange(0, MAIN)
    q_MD = tl.load(q_M[:, None] + d[None, :], mask=held_M[:, None] & (d < DK)[None, :], other=0.0)
    q_rest_MD = q_MD
    if REST > 0:
        e = MAIN + tl.arange(0, REST)
        q_rest_MD = tl.load(q_M[:, None] + e[None, :], mask=held_M[:, None] & (e < DK)[None, :], other=0.0)
    low_M = tl.load(lows + row_M, mask=held_M, other=0)
    high_M = tl.load(highs + row_M, mask=held_M, other=0)
    bits_M = bits + tl.load(item + 8) + token_M * tl.load(item + 9)
    bits_first, bits_stop = tl.load(item + 10), tl.load(item + 11)

    top_M = tl.full([M], -float("inf"), tl.float32)
    total_M = tl.zeros([M], tl.float32)
    sum_MV = tl.zeros([M, VALUE], tl.float32)
    k_base, v_base = k + kv_head * k_head, v + kv_head * v_head
    pages = tables + table
    begin = first // N * N
    total_M, top_M, sum_MV = _advance(
        total_M, top_M, sum_MV, q_MD, q_rest_MD, low_M, high_M, bits_M, held_M,
        begin, plain_first, first, stop, bits_first, bits_stop, pages, table, k_base, v_base, k_row, v_row, scale, cap,
        PAGE, LINEAR, N, DK, MAIN, REST, DV, VALUE, SHARED, BITS, CAP, True,
    )  # fmt: skip
    total_M, top_M, sum_MV = _advance(
        total_M, top_M, sum_MV, q_MD, q_rest_MD, low_M, high_M, bits_M, held_M,
        plain_first, plain_stop, first, stop, bits_first, bits_stop, pages, table, k_base, v_base, k_row, v_row, scale, cap,
        PAGE, LINEAR, N, DK, MAIN, REST, DV, VALUE, SHARED, BITS, CAP, False,
    )  # fmt: skip
    total_M, top_M, sum_MV = _advance(
        total_M, top_M, sum_MV, q_MD, q_rest_MD, low_M, high_M, bits_M, held_M,
        plain_stop, stop, first, stop, bits_first, bits_stop, pages, table, k_base, v_base, k_row, v_row, scale, cap,
        PAGE, LINEAR, N, DK, MAIN, REST, DV, VALUE, SHARED, BITS, CAP, True,
    )  # fmt: skip

    v_V = tl.arange(0, VALUE)
    stored_MV = held_M[:, None] & (v_V < DV)[None, :]
    if state >= 0:
        norm_M = tl.where(total_M > 0, total_M, 1.0)
        place_M = (state + token_M).to(tl.int64) * HEADS + head_M
        tl.store(state_out + place_M[:, None] * DV + v_V[None, :], sum_MV / norm_M[:, None], mask=stored_MV)
        tl.store(state_lse + place_M, top_M + tl.log2(total_M), mask=held_M)
    else:
        if SINKS:
            sink_M = tl.load(sinks + head_M, mask=held_M, other=0.0) * LOG2E
            highest_M = tl.maximum(top_M, sink_M)
            fade_M = tl.exp2(top_M - highest_M)
            total_M = total_M * fade_M + tl.exp2(sink_M - highest_M)
            sum_MV = sum_MV * fade_M[:, None]
            top_M = highest_M
        norm_M = tl.where(total_M > 0, total_M, 1.0)
        where_M = out + row_M.to(tl.int64) * out_row + head_M * out_head
        result_MV = sum_MV / norm_M[:, None]
        tl.store(where_M[:, None] + v_V[None, :], result_MV.to(out.dtype.element_ty), mask=stored_MV)
        if LSE:
            tl.store(lse + row_M.to(tl.int64) * lse_row + head_M, (top_M + tl.log2(total_M)) * LN2, mask=held_M)


@triton.jit
def merge_states(
    merges, state_out, state_lse, sinks, out, lse, out_row, out_head, lse_row,
    HEADS: tl.constexpr, STATES: tl.constexpr, DV: tl.constexpr, VALUE: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Merge the states of one row and head, in order, ``STATES`` at a time; row -1 has none."""
    merge = merges + tl.program_id(0) * MERGED
    head = tl.program_id(1)
    row, state = tl.load(merge).to(tl.int64), tl.load(merge + 1).to(tl.int64)
    step, count = tl.load(merge + 2), tl.load(merge + 3)
    v_V = tl.arange(0, VALUE)
    top = -float("inf")
    total = 0.0
    if SINKS:
        top = tl.load(sinks + head) * LOG2E
        total = 1.0
    sum_V = tl.zeros([VALUE], tl.float32)
    for begin in range(0, count, STATES):
        index = begin + tl.arange(0, STATES)
        place = (state + index * step) * HEADS + head
        lse_S = tl.load(state_lse + place, mask=index < count, other=-float("inf"))
        out_SV = tl.load(
            state_out + place[:, None] * DV + v_V[None, :],
            mask=(index < count)[:, None] & (v_V < DV)[None, :],
            other=0.0,
        )
        highest = tl.maximum(top, tl.max(lse_S, 0))
        shift = tl.where(highest == -float("inf"), 0.0, highest)
        weight_S = tl.exp2(lse_S - shift)
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(weight_S, 0)
        sum_V = sum_V * fade + tl.sum(out_SV * weight_S[:, None], 0)
        top = highest
    norm = tl.where(total > 0, total, 1.0)
    result_V = (sum_V / norm).to(out.dtype.element_ty)
    tl.store(out + row * out_row + head * out_head + v_V, result_V, mask=(v_V < DV) & (row >= 0))
    if LSE:
        tl.store(lse + row * lse_row + head, (top + tl.log2(total)) * LN2, mask=row >= 0)
