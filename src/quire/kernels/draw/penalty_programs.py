"""Triton programs for penalties. ``triton_penalties`` launches them.

Letters: N counted tokens; G rows with penalties; V vocabulary; B tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = tl.constexpr(5)
"""Row of the logits, row of the table, repetition, frequency and presence penalty."""
LARGEST = tl.constexpr(3.4028234663852886e38)
"""The largest float32."""


@triton.jit
def add_amounts(seen, slots, tokens, amounts, count, VOCAB: tl.constexpr, B: tl.constexpr):
    """Add amounts to the table. Places may repeat."""
    n = tl.program_id(0) * B + tl.arange(0, B)
    held_B = n < count
    slot_B, token_B = tl.load(slots + n, mask=held_B, other=0), tl.load(tokens + n, mask=held_B, other=0)
    tl.atomic_add(seen + slot_B * VOCAB + token_B, tl.load(amounts + n, mask=held_B, other=0), mask=held_B)


@triton.jit
def penalise(z, seen, table, z_stride, OUTPUT: tl.constexpr, VOCAB: tl.constexpr, B: tl.constexpr):
    """Apply the penalties of a row to a block of its logits. Products are not fused: each operation
    rounds, as in the reference."""
    own = table + tl.program_id(0) * FIELDS
    row, slot = tl.load(own).to(tl.int64), tl.load(own + 1).to(tl.int64)
    repetition, frequency = tl.load(own + 2).to(tl.float32), tl.load(own + 3).to(tl.float32)
    presence = tl.load(own + 4).to(tl.float32)
    v = tl.program_id(1) * B + tl.arange(0, B)
    seen_B = tl.load(seen + slot * VOCAB + v, mask=v < VOCAB, other=0)
    touched_B = seen_B > 0
    z_B = tl.load(z + row * z_stride + v, mask=touched_B, other=0.0)
    count_B = (seen_B // OUTPUT).to(tl.float32)
    new_B = tl.where(z_B > 0, tl.div_rn(z_B, z_B * 0 + repetition), z_B * repetition)
    new_B = tl.where(new_B > LARGEST, LARGEST, new_B)  # NaN stays.
    new_B = new_B - frequency * count_B - tl.where(count_B > 0, presence, 0.0)
    tl.store(z + row * z_stride + v, new_B, mask=touched_B)
