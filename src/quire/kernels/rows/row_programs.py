"""Triton programs for work on rows between the products. ``triton_rows`` launches them.

Everything is computed in float32 and rounded once. Each program works on its own rows.

Letters: R rows of a program; W columns of a row, padded to a power of two; H heads of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950216293335)
"""log2(e), rounded to float32."""
LOG2E_REST = tl.constexpr(1.9259629911266175e-08)
"""The rounding error of ``LOG2E``."""
LN2 = tl.constexpr(0.6931471805599453)
TANH_SCALE = tl.constexpr(1.5957691216057308)
"""Twice the root of 2 / pi."""
ROOT_HALF = tl.constexpr(0.7071067811865476)
LARGEST_FLOAT8 = tl.constexpr(448.0)
LEAST_SCALE = tl.constexpr(1.1754943508222875e-38)
"""Smallest normal float32."""


@triton.jit(do_not_specialize=["count"])
def norm_rows(
    out, y, x, weight, count, inner, y_outer, y_inner, x_outer, x_inner, eps, scale,
    WIDTH: tl.constexpr, W: tl.constexpr, R: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Norm rows of y; with ``ADD`` these become ``x + scale * y`` first, in place. Row r is at ``r
    // inner`` outer strides plus ``r % inner`` inner strides."""
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    w = tl.arange(0, W)
    held_RW = (row_R < count)[:, None] & (w < WIDTH)[None, :]
    place_RW = y + ((row_R // inner) * y_outer + (row_R % inner) * y_inner)[:, None] + w[None, :]
    y_RW = tl.load(place_RW, mask=held_RW, other=0.0).to(tl.float32)
    if ADD:
        other_RW = x + ((row_R // inner) * x_outer + (row_R % inner) * x_inner)[:, None] + w[None, :]
        x_RW = tl.load(other_RW, mask=held_RW, other=0.0).to(tl.float32)
        total_RW = (y_RW * scale + x_RW).to(y.dtype.element_ty)
        tl.store(place_RW, total_RW, mask=held_RW)
        y_RW = total_RW.to(tl.float32)
    mean_R = tl.sum(y_RW * y_RW, 1) / WIDTH
    scale_R = 1.0 / tl.sqrt_rn(mean_R + eps)
    weight_W = tl.load(weight + w, mask=w < WIDTH, other=0.0).to(tl.float32)
    normed_RW = y_RW * scale_R[:, None] * weight_W[None, :]
    tl.store(out + row_R[:, None] * WIDTH + w[None, :], normed_RW.to(out.dtype.element_ty), mask=held_RW)


@triton.jit
def _exp(x):
    """Return e^x. A GPU has powers of 2 only, so the rounding error of the product with log2(e),
    which counts for large exponents, is added back."""
    power = x * LOG2E
    lost = tl.fma(x, tl.full(x.shape, LOG2E, tl.float32), -power) + x * LOG2E_REST
    return tl.exp2(power) * tl.where(tl.abs(x) < 1000.0, 1.0 + lost * LN2, 1.0)


@triton.jit
def _erfc(z):
    """Return the complementary error function, with a relative error below 2e-7 (Press et al.,
    Numerical Recipes in C, section 6.2)."""
    t = 1.0 / (1.0 + 0.5 * tl.abs(z))
    p = t * 0.17087277 - 0.82215223
    p = t * p + 1.48851587
    p = t * p - 1.13520398
    p = t * p + 0.27886807
    p = t * p - 0.18628806
    p = t * p + 0.09678418
    p = t * p + 0.37409196
    p = t * p + 1.00002368
    p = t * p - 1.26551223
    found = t * _exp(p - z * z)
    return tl.where(z >= 0, found, 2.0 - found)


@triton.jit
def gate_rows(
    out, gate_up, row_stride, FEATURES: tl.constexpr, W: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Write ``activation(gate) * up`` of W columns of a row. ``ACTIVATION``: 0 silu, 1 gelu, 2 gelu
    by tanh."""
    row = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * W + tl.arange(0, W)
    held_W = w < FEATURES
    place_W = gate_up + row * row_stride + w
    gate_W = tl.load(place_W, mask=held_W, other=0.0).to(tl.float32)
    up_W = tl.load(place_W + FEATURES, mask=held_W, other=0.0).to(tl.float32)
    if ACTIVATION == 1:
        active_W = gate_W * (0.5 * _erfc(-gate_W * ROOT_HALF))
    else:
        x_W = gate_W
        if ACTIVATION == 2:
            x_W = TANH_SCALE * (gate_W + 0.044715 * gate_W * gate_W * gate_W)
        active_W = gate_W / (1.0 + _exp(-x_W))
    tl.store(out + row * FEATURES + w, (active_W * up_W).to(out.dtype.element_ty), mask=held_W)


@triton.jit
def scale_rows(out, scales, x, row_stride, WIDTH: tl.constexpr, W: tl.constexpr):
    """Round a row to 8-bit floats, its largest value to the largest of the type, and write the
    scale."""
    row = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, W)
    held_W = w < WIDTH
    x_W = tl.load(x + row * row_stride + w, mask=held_W, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x_W), 0), LARGEST_FLOAT8), LEAST_SCALE)
    tl.store(out + row * WIDTH + w, tl.div_rn(x_W, scale).to(out.dtype.element_ty), mask=held_W)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["count"])
def copy_words(pool, moves, count, layer_stride, WIDTH: tl.constexpr, W: tl.constexpr):
    """Copy W numbers of a slot of a layer to another slot."""
    w = tl.program_id(2) * W + tl.arange(0, W)
    held_W = w < WIDTH
    source, target = tl.load(moves + tl.program_id(0)), tl.load(moves + count + tl.program_id(0))
    rows = pool + tl.program_id(1).to(tl.int64) * layer_stride
    tl.store(rows + target * WIDTH + w, tl.load(rows + source * WIDTH + w, mask=held_W), mask=held_W)


@triton.jit
def place_heads(
    out, k, v, qkv, slots, cos, sin, q_weight, k_weight, row_stride, angle_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORMS: tl.constexpr, W: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Norm and rotate H heads of q and k of one token, and write its k heads; or copy H heads of
    v."""
    token = tl.program_id(0).to(tl.int64)
    TURNED: tl.constexpr = HEADS + KV_HEADS
    GROUPS: tl.constexpr = (TURNED + H - 1) // H
    w = tl.arange(0, W)
    if tl.program_id(1) >= GROUPS:
        head_H = (tl.program_id(1) - GROUPS) * H + tl.arange(0, H)
        held_HW = (head_H < KV_HEADS)[:, None] & (w < DV)[None, :]
        place_HW = (head_H * DV)[:, None] + w[None, :]
        v_HW = tl.load(qkv + token * row_stride + TURNED * DK + place_HW, mask=held_HW, other=0.0)
        tl.store(v + tl.load(slots + token) * (KV_HEADS * DV) + place_HW, v_HW, mask=held_HW)
    else:
        head_H = tl.program_id(1) * H + tl.arange(0, H)
        held_HW = (head_H < TURNED)[:, None] & (w < DK)[None, :]
        row_H1 = qkv + token * row_stride + (head_H * DK)[:, None]
        x_HW = tl.load(row_H1 + w[None, :], mask=held_HW, other=0.0).to(tl.float32)
        scale_H1 = tl.full([H, 1], 1.0, tl.float32)
        is_query_HW = (head_H < HEADS)[:, None] & held_HW
        is_key_HW = (head_H >= HEADS)[:, None] & held_HW
        if NORMS:
            scale_H1 = (1.0 / tl.sqrt_rn(tl.sum(x_HW * x_HW, 1) / DK + eps))[:, None]
            weight_HW = tl.load(q_weight + w[None, :] + 0 * head_H[:, None], mask=is_query_HW, other=0.0).to(tl.float32)
            weight_HW += tl.load(k_weight + w[None, :] + 0 * head_H[:, None], mask=is_key_HW, other=0.0).to(tl.float32)
            x_HW = x_HW * scale_H1 * weight_HW
        if ROTARY > 0:
            turns = w < ROTARY
            if INTERLEAVED:
                other = w ^ 1
            else:
                other = tl.where(w < ROTARY // 2, w + ROTARY // 2, w - ROTARY // 2)
            other = tl.where(turns, other, 0)
            turned_HW = held_HW & turns[None, :]
            other_HW = tl.load(row_H1 + other[None, :], mask=turned_HW, other=0.0).to(tl.float32)
            if NORMS:
                there_HW = other[None, :] + 0 * head_H[:, None]
                weight_HW = tl.load(q_weight + there_HW, mask=is_query_HW & turned_HW, other=0.0).to(tl.float32)
                weight_HW += tl.load(k_weight + there_HW, mask=is_key_HW & turned_HW, other=0.0).to(tl.float32)
                other_HW = other_HW * scale_H1 * weight_HW
            cos_W = tl.load(cos + token * angle_stride + w, mask=turns, other=1.0)
            sin_W = tl.load(sin + token * angle_stride + w, mask=turns, other=0.0)
            x_HW = tl.where(turns[None, :], x_HW * cos_W[None, :] + other_HW * sin_W[None, :], x_HW)
        done_HW = x_HW.to(out.dtype.element_ty)
        tl.store(out + token * (TURNED * DK) + (head_H * DK)[:, None] + w[None, :], done_HW, mask=held_HW)
        key_HW = ((head_H - HEADS) * DK)[:, None] + w[None, :]
        tl.store(k + tl.load(slots + token) * (KV_HEADS * DK) + key_HW, done_HW, mask=is_key_HW)
