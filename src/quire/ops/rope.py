"""Rotary position embeddings: frequencies, tables, rotation. Reference and only implementation.

Angles are computed in float64 and rounded once to float32, to be right at any position: a float32
product is off by a tenth of a radian and more at position 10^7.

Letters: T tokens, H heads, D head size, R rotary columns, P = R / 2 pairs of columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.base.errors import InvalidArgument, Unsupported
from quire.contracts.layers import RopeSpec


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Return the angle per position of each pair, float64 ``[P]``.

    ``default``: ``theta ** (-2j / R)``. Other rules extend the context beyond the trained length:

    * ``linear``: divide all by ``factor`` (arXiv:2306.15595).
    * ``dynamic``: enlarge the base, so that the fastest pair stays and the slowest is divided by
      ``factor * length / original_max_position - factor + 1`` (NTK-aware; bloc97 and emozilla).
    * ``yarn``: keep pairs that turn often, divide slow ones by ``factor``, with a ramp between them
      over the index of the pair (arXiv:2309.00071).
    * ``longrope``: divide each by its own number, found by search (arXiv:2402.13753).
    * ``llama3``: as ``yarn``, with a ramp over the number of turns (Llama 3.1).
    * ``proportional``: the first ``turning_dim / 2`` pairs of the whole head turn, divided by
      ``factor``; the others stand still (Gemma 4).

    ``Unsupported`` for another scaling, ``InvalidArgument`` for numbers outside a rule's domain."""
    pairs = spec.rotary_dim // 2
    exponent_P = torch.arange(0, 2 * pairs, 2, dtype=torch.float64) / spec.rotary_dim
    theta = _stretched_base(spec) if spec.scaling == "dynamic" else spec.theta
    freq_P = theta**-exponent_P
    match spec.scaling:
        case "default" | "dynamic":
            return freq_P
        case "linear":
            return freq_P / spec.factor
        case "yarn":
            return _blend(freq_P, spec.factor, _yarn_ramp(spec, pairs))
        case "llama3":
            turns_P = spec.original_max_position * freq_P / (2 * math.pi)
            kept_P = (turns_P - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
            return _blend(freq_P, spec.factor, kept_P.clamp(0.0, 1.0))
        case "longrope":
            if len(spec.factors) != pairs:
                raise InvalidArgument(
                    f"longrope: {len(spec.factors)} factors for {pairs} pairs; one for each is needed"
                )
            return freq_P / torch.tensor(spec.factors, dtype=torch.float64)
        case "proportional":
            freq_P[spec.turning_dim // 2 :] = 0.0
            return freq_P / spec.factor
    raise Unsupported(f"RoPE scaling {spec.scaling!r} is not computed")


def _blend(freq_P: Tensor, factor: float, kept_P: Tensor) -> Tensor:
    """Blend: unchanged where ``kept`` is 1, divided by ``factor`` where it is 0."""
    return (1 - kept_P) * freq_P / factor + kept_P * freq_P


def _stretched_base(spec: RopeSpec) -> float:
    if spec.rotary_dim <= 2 or spec.original_max_position < 1:
        raise InvalidArgument(
            f"dynamic: {spec.rotary_dim} rotary columns and an original length of {spec.original_max_position}; "
            "more than 2 and at least 1 are needed"
        )
    length = max(spec.length, spec.original_max_position)
    stretch = spec.factor * length / spec.original_max_position - (spec.factor - 1)
    return float(spec.theta * stretch ** (spec.rotary_dim / (spec.rotary_dim - 2)))


def _yarn_ramp(spec: RopeSpec, pairs: int) -> Tensor:
    """Return the kept share of each pair's frequency: 1 up to a first pair, 0 from a last one."""
    if spec.theta <= 1 or spec.original_max_position < 1:
        raise InvalidArgument(
            f"yarn: theta {spec.theta} and an original length of {spec.original_max_position}; "
            "more than 1 and at least 1 are needed"
        )

    def pair_with(turns: float) -> float:
        """Return the fractional index of the pair with this many turns in the original length."""
        return (
            spec.rotary_dim * math.log(spec.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))
        )

    first, last = pair_with(spec.beta_fast), pair_with(spec.beta_slow)
    if spec.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.rotary_dim - 1)
    if first == last:
        last += 0.001  # A step, as in the authors' code; a quotient of 0 by 0 otherwise.
    return 1 - ((torch.arange(pairs, dtype=torch.float64) - first) / (last - first)).clamp(0.0, 1.0)


class RotaryTable:
    """float32 rows of cos and sin by position for one ``RopeSpec`` and device, made on demand.

    ``x * cos + swap(x) * sin`` rotates: ``sin`` has the sign, both the ``attention_factor``."""

    PIECE = 4096
    """Rows computed at a time when the table grows."""
    MAX_ROWS = 1 << 18
    """Later positions are computed one by one; the table stays within 128 MiB for 64 columns."""

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self._freq_P = inverse_frequencies(spec)
        # Far positions are computed on their device if it has float64: fetching them would wait for
        # it.
        self._far_freq_P = self._freq_P if device.type == "mps" else self._freq_P.to(device)
        self._rows = self._compute(torch.arange(0), self._freq_P)

    def _compute(self, positions: Tensor, freq_P: Tensor) -> Tensor:
        angle = positions.to(torch.float64).unsqueeze(-1) * freq_P
        cos, sin = angle.cos(), angle.sin()
        if self.spec.attention_factor != 1.0:
            cos, sin = cos * self.spec.attention_factor, sin * self.spec.attention_factor
        if self.spec.interleaved:
            cos = cos.repeat_interleave(2, -1)
            sin = torch.stack((-sin, sin), -1).flatten(-2)
        else:
            cos = torch.cat((cos, cos), -1)
            sin = torch.cat((-sin, sin), -1)
        return torch.stack((cos, sin), -2).float().to(self.device)

    def rows(self, positions_T: Tensor, max_position: int) -> tuple[Tensor, Tensor]:
        """Return ``(cos, sin)``, each float32 ``[T, 1, R]``, of int64 positions >= 0 in any order.
        ``max_position`` is at least the largest of them."""
        if (held := self.up_to(max_position)) is None:
            rows = self._compute(positions_T.to(self._far_freq_P.device), self._far_freq_P)
        else:
            rows = held.index_select(0, positions_T)
        cos_T1R, sin_T1R = rows.split_with_sizes([1, 1], 1)
        return cos_T1R, sin_T1R

    def up_to(self, position: int) -> Tensor | None:
        """Return float32 ``[N, 2, R]``, the rows of positions from 0 to at least this one; None if
        that is so far that there is no row of it."""
        if position >= self._rows.shape[0] and position < self.MAX_ROWS:
            self._grow(min(self.MAX_ROWS, max(256, 1 << position.bit_length())))
        return self._rows if position < self.MAX_ROWS else None

    @property
    def held(self) -> Tensor:
        """Return the present table. It is replaced by a new tensor when it grows, so a caller that
        continues to read this one must hold it."""
        return self._rows

    def _grow(self, size: int) -> None:
        """Make the table ``size`` rows long, in pieces with small float64 temporaries."""
        old = self._rows
        self._rows = old.new_empty(size, *old.shape[1:])
        self._rows[: old.shape[0]] = old
        for start in range(old.shape[0], size, self.PIECE):
            stop = min(size, start + self.PIECE)
            self._rows[start:stop] = self._compute(torch.arange(start, stop), self._freq_P)

    def turn_back(self, counts_T: Tensor, max_count: int) -> tuple[Tensor, Tensor]:
        """Return ``(cos, sin)``, as ``rows``, that rotate values back by ``counts_T`` positions.

        Rotations compose: position p becomes p - count; the ``attention_factor`` stays.
        """
        cos_T1R, sin_T1R = self.rows(counts_T, max_count)
        return cos_T1R / self.spec.attention_factor, sin_T1R / -self.spec.attention_factor


MANY_ROWS = 64
"""Least number of rows for which memory of temporaries costs more than the number of calls."""


def rotate(x_THD: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first R columns of every head in float32, rounded once, into a fresh tensor."""
    rotary_dim = cos_T1R.shape[-1]
    if not interleaved and x_THD.shape[0] >= MANY_ROWS:
        return _rotate_halves(x_THD, cos_T1R, sin_T1R)
    turned = x_THD[..., :rotary_dim].float() if rotary_dim < x_THD.shape[-1] else x_THD.float()
    if interleaved:
        swapped = turned.view(*turned.shape[:-1], rotary_dim // 2, 2).flip(-1).flatten(-2)
    else:
        swapped = turned.roll(rotary_dim // 2, -1)
    out = torch.addcmul(turned * cos_T1R, swapped, sin_T1R).to(x_THD.dtype)
    if rotary_dim < x_THD.shape[-1]:
        out = torch.cat((out, x_THD[..., rotary_dim:]), -1)
    return out


def rotate_last(x_THD: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the last R columns of every head, as ``rotate`` does the first."""
    rest = x_THD.shape[-1] - cos_T1R.shape[-1]
    turned = rotate(x_THD[..., rest:], cos_T1R, sin_T1R, interleaved=interleaved)
    return torch.cat((x_THD[..., :rest], turned), -1) if rest else turned


def _rotate_halves(x_THD: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Rotate by halves: smaller temporaries, up to 3 times as fast for a long prompt."""
    rotary_dim = cos_T1R.shape[-1]
    half = rotary_dim // 2
    out = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    # The table has the sign of the lower half's sine; the upper half's is the opposite.
    cos, minus_sin, sin = cos_T1R[..., :half], sin_T1R[..., :half], sin_T1R[..., half:]
    low, high = x_THD[..., :half].float(), x_THD[..., half:rotary_dim].float()
    turned = low * cos
    out[..., :half] = turned.addcmul_(high, minus_sin)
    torch.mul(high, cos, out=turned)
    out[..., half:rotary_dim] = turned.addcmul_(low, sin)
    if rotary_dim < x_THD.shape[-1]:
        out[..., rotary_dim:] = x_THD[..., rotary_dim:]
    return out
