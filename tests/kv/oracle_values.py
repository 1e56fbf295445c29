"""Numbers of the naive KV state: rotations, scores and attention one query at a time in float64,
and how far a right answer in some precision may be from them.

Letters: Hq, Hkv heads; Dk, Dv head sizes; M keys; u, u32 unit roundoffs of the stored type and of
float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.layers import FullAttention, RopeSpec, WindowedAttention

Float = NDArray[np.float64]
Spec = FullAttention | WindowedAttention

Row = tuple[Tensor, Tensor]
"""K ``[Hkv, Dk]`` and V ``[Hkv, Dv]`` of one token in one layer, as stored."""


@cache
def frequencies(spec: RopeSpec) -> list[float]:
    """Angle per position of each pair, one by one."""
    result = []
    for pair in range(spec.rotary_dim // 2):
        freq = spec.theta ** (-2 * pair / spec.rotary_dim)
        if spec.scaling == "linear":
            freq /= spec.factor
        elif spec.scaling == "llama3":
            wavelength = 2 * math.pi / freq
            if wavelength > spec.original_max_position / spec.low_freq_factor:
                freq /= spec.factor
            elif wavelength >= spec.original_max_position / spec.high_freq_factor:
                smooth = (spec.original_max_position / wavelength - spec.low_freq_factor) / (
                    spec.high_freq_factor - spec.low_freq_factor
                )
                freq = (1 - smooth) * freq / spec.factor + smooth * freq
        result.append(freq)
    return result


def turned(x_MHD: Float, positions_M: Sequence[int], spec: RopeSpec) -> Float:
    """The heads of M tokens at M positions (which may be negative), pair by pair."""
    pairs = np.arange(spec.rotary_dim // 2)
    first, second = (2 * pairs, 2 * pairs + 1) if spec.interleaved else (pairs, pairs + spec.rotary_dim // 2)
    angles_M1R = np.multiply.outer(np.array(positions_M, dtype=np.float64), np.array(frequencies(spec)))[:, None]
    cos, sin = np.cos(angles_M1R), np.sin(angles_M1R)
    out = x_MHD.copy()
    a, b = x_MHD[..., first], x_MHD[..., second]
    with np.errstate(invalid="ignore"):
        out[..., first] = a * cos - b * sin
        out[..., second] = b * cos + a * sin
    return out


def rotated(x_HD: Tensor, position: int, spec: RopeSpec) -> Tensor:
    """``turned`` for the heads of one token, in float64."""
    return torch.from_numpy(turned(x_HD.double().numpy()[None], [position], spec)[0])


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def rotation_bound(x_HD: Tensor, dtype: torch.dtype) -> float:
    """How far a rotation in float32, rounded to ``dtype``, may be from the exact one.

    Each of two products has a rounded factor and one rounding, their sum one more: 3 u32 (|a| +
    |b|), at most 3 sqrt(2) u32 times the norm of the pair; then one rounding to the type, or to its
    smallest subnormal.
    """
    info = torch.finfo(dtype)
    size = float(x_HD.double().norm(dim=-1).max()) if x_HD.numel() else 0.0
    return 2 * size * (3 * math.sqrt(2) * unit(torch.float32) + unit(dtype)) + info.tiny * info.eps


# -- one query -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exact:
    """The attention state of one query, and how far a right answer may be from it."""

    out: Float
    """``[Hq, Dv]``"""
    lse: Float
    """``[Hq]``; -inf where no key is seen"""
    out_bound: float
    lse_bound: float


def scores_of(q_HD: Float, k_MHD: Float, scale: float, softcap: float | None = None) -> Float:
    """``[Hq, M]``: query head h reads KV head h // (Hq / Hkv)."""
    group = q_HD.shape[0] // k_MHD.shape[1]
    scores = np.empty((q_HD.shape[0], k_MHD.shape[0]))
    for head in range(k_MHD.shape[1]):
        own = slice(head * group, (head + 1) * group)
        scores[own] = q_HD[own] @ k_MHD[:, head].T * scale
    return scores if softcap is None else softcap * np.tanh(scores / softcap)


def softmax_state(scores_HM: Float, v_MHD: Float, sinks: Sequence[float] = ()) -> tuple[Float, Float]:
    """``(out [Hq, Dv], lse [Hq])`` of one query; a learned sink takes part in the sum and has no
    value.
    """
    heads = scores_HM.shape[0]
    if sinks:
        scores_HM = np.concatenate([scores_HM, np.array(sinks)[:, None]], 1)
        v_MHD = np.concatenate([v_MHD, np.zeros((1, *v_MHD.shape[1:]))])
    if not scores_HM.shape[1]:
        return np.zeros((heads, v_MHD.shape[-1])), np.full(heads, -np.inf)
    top = scores_HM.max(1, keepdims=True)
    weights = np.exp(scores_HM - top)
    total = weights.sum(1, keepdims=True)
    weights /= total
    group = heads // v_MHD.shape[1]
    out = np.stack([weights[head] @ v_MHD[:, head // group] for head in range(heads)])
    return out, (top + np.log(total))[:, 0]


def attend_one(q_HD: Float, keys: Sequence[Row], scale: float) -> Float:
    """One token's attention over rows of K and V."""
    k_MHD = torch.stack([k for k, _ in keys]).double().numpy()
    v_MHD = torch.stack([v for _, v in keys]).double().numpy()
    return softmax_state(scores_of(q_HD, k_MHD, scale), v_MHD)[0]


def _out_bound(score: float, size: float, dim: int, keys: int, dtype: torch.dtype) -> tuple[float, float]:
    """Error of a result and of its scores, for scores of at most ``score`` over ``dim`` columns,
    values of at most ``size``.
    """
    u, u32 = unit(dtype), unit(torch.float32)
    d = score * (6 * u + (dim + 12) * u32)
    return size * (math.expm1(2 * d) + (keys + 8) * u32 + 4 * u) + torch.finfo(dtype).tiny, d


def attention_bound(q_HD: Tensor, keys: Sequence[Row], scale: float, dtype: torch.dtype) -> float:
    """How far one query's attention, computed in ``dtype`` with sums in float32, may be from the
    exact one.

    A score is off by at most d = scale |q| |k| (c u + (Dk + 12) u32): q, k, both times the root of
    the scale and the score itself may be rounded (c = 6, with the rotation of q and k), and the sum
    over Dk terms and the float32 rotations have float32 errors. Weights are then off by a factor
    e^(2d); weights, products and the result are rounded once each, and m terms are summed in
    float32.
    """
    k_norm = float(torch.stack([k for k, _ in keys]).double().norm(dim=-1).max())
    v_size = float(torch.stack([v for _, v in keys]).double().abs().max())
    score = scale * float(q_HD.double().norm(dim=-1).max()) * k_norm
    return _out_bound(score, v_size, q_HD.shape[-1], len(keys), dtype)[0]


def state_bounds(
    q_HD: Float, k_MHD: Float, v_MHD: Float, lse_H: Float, scale: float, capped: bool, dtype: torch.dtype
) -> tuple[float, float]:
    """``attention_bound`` for a result that may be merged from several parts, and the same for its
    lse.

    A soft cap has a slope of at most 1, but its quotient, tanh and product are rounded once each:
    half as much again. Each part's result is rounded to the type before it is merged in float32,
    and its lse is a float32, so that the weight of a part is off by 2 u32 |lse| more. The lse
    itself is off by d, by the sum of m terms, and by its own rounding.
    """
    if not len(k_MHD):
        return 0.0, 0.0
    u, u32 = unit(dtype), unit(torch.float32)
    score = abs(scale) * float(np.linalg.norm(q_HD, axis=-1).max() * np.linalg.norm(k_MHD, axis=-1).max())
    size = float(np.abs(v_MHD).max())
    error, d = _out_bound(1.5 * score if capped else score, size, q_HD.shape[-1], len(k_MHD), dtype)
    top = float(np.abs(lse_H).max())
    float32 = (len(k_MHD) + 12) * u32 + 4 * u32 * (top + score)
    return error + size * (4 * u + 4 * float32), d + float32
