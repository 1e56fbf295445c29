"""Edits of logits between the model and the draw.

Their order: masks of grammars, exclusions, bias, penalties, bans, users' processors. Letters: V
vocabulary; W rows of one chunk of work, G some of these; N token ids of all rows together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import InvalidArgument, QuireError
from quire.base.uploads import uploaded
from quire.sampling.filters import Ids, Words, mask_out, take_rows
from quire.sampling.request_sampler import RequestSampler

FAILED = -1
"""Token of a failed row, from which none can be drawn."""

CHUNK_ELEMENTS = 1 << 24
"""Number of logits worked on at a time (128 MB per float64 temporary); more rows run in several
chunks."""


def chunks(rows: Sequence[int], vocab_size: int) -> Iterator[Sequence[int]]:
    """Divide rows into chunks of at most ``CHUNK_ELEMENTS`` logits."""
    step = max(1, CHUNK_ELEMENTS // vocab_size)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def check_logits(logits_RV: Tensor) -> tuple[int, int]:
    """Return R and V; ``InvalidArgument`` unless logits are float32 ``[R, V]``."""
    if logits_RV.dim() != 2 or logits_RV.dtype != torch.float32 or logits_RV.shape[1] < 1:
        raise InvalidArgument(f"logits must be float32 [R, V], got {logits_RV.dtype} {list(logits_RV.shape)}")
    return logits_RV.shape[0], logits_RV.shape[1]


def not_finite(row: int) -> QuireError:
    """Return the error of a row whose maximum is not finite."""
    return QuireError(f"the logits of row {row} hold NaN or +inf, or are all -inf; no token can be drawn from them")


def nothing_left() -> QuireError:
    """Return the error of a row in which all tokens are excluded."""
    # The model's own logits are finite, so the request's own parameters exclude all tokens.
    return InvalidArgument("there is no token to draw: every token is banned or has logit -inf")


def is_settled(sampler: RequestSampler, banned: Sequence[int], allowed: bool) -> bool:
    """Return True if the row's token is its first maximum: a greedy choice without edits or
    exclusion."""
    return allowed and sampler.takes_maximum and not len(banned)


@dataclass(frozen=True, slots=True)
class Bans:
    """Tokens that must not be drawn, by row of the batch."""

    ids: Sequence[Sequence[int]]
    allowed: Mapping[int, Words]

    def mask(self, z_WV: Tensor, rows: Sequence[int]) -> None:
        """Apply the grammars, in place."""
        _mask(z_WV, {i: self.allowed[row] for i, row in enumerate(rows) if row in self.allowed})

    def ban(self, z_WV: Tensor, rows: Sequence[int]) -> None:
        """Ban single tokens, in place."""
        banned = [self.ids[row] for row in rows]
        if any(len(ids) for ids in banned):
            z_WV[_places(banned, z_WV.device)] = -torch.inf


Penalise: TypeAlias = Callable[[Tensor, Sequence[RequestSampler]], None]
"""Applies penalties to logits ``[W, V]``, in place; one sampler for each row."""


def edited(
    logits_RV: Tensor,
    rows: Sequence[int],
    samplers: Sequence[RequestSampler],
    bans: Bans,
    penalise: Penalise | None = None,
) -> tuple[Tensor, dict[int, QuireError]]:
    """Return logits ``[W, V]`` of some rows after all edits, and errors of processors by row of the
    batch. ``penalise`` None: penalties count the tokens that samplers have observed."""
    z_WV = take_rows(logits_RV, rows)
    members = [samplers[row] for row in rows]
    bans.mask(z_WV, rows)
    _exclude(z_WV, members)
    _add_bias(z_WV, members)
    (penalise or _penalise)(z_WV, members)
    bans.ban(z_WV, rows)
    reasons = _process(z_WV, rows, members, bans)
    return z_WV, reasons


def first_maxima(z_WV: Tensor) -> list[int]:
    """Return the place of each row's first maximum; ``FAILED`` if the maximum is not finite. A
    maximum is NaN if any logit is, infinite if one is +inf or all are -inf: one reduction."""
    if z_WV.device.type == "cpu":
        # NumPy's search takes two thirds of the time of PyTorch's.
        z = z_WV.numpy()
        tokens: list[int] = z.argmax(-1).tolist()
        found = [token if math.isfinite(z.item(row, token)) else FAILED for row, token in enumerate(tokens)]
    else:
        found = maxima(z_WV)[1].tolist()
    return found


def maxima(z_WV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row maxima, and their positions as in ``first_maxima`` (int64), on the logits'
    device."""
    best = z_WV.max(-1)
    return best.values, torch.where(best.values.isfinite(), best.indices, FAILED)


def _process(
    z_WV: Tensor, rows: Sequence[int], samplers: Sequence[RequestSampler], bans: Bans
) -> dict[int, QuireError]:
    """Run the users' processors, in place. A row of a failed processor becomes -inf everywhere."""
    processed = [i for i, sampler in enumerate(samplers) if sampler.params.logits_processors]
    if not processed:
        return {}
    reasons: dict[int, QuireError] = {}
    for i in processed:
        try:
            z_WV[i] = samplers[i].process(z_WV[i].clone())
        except QuireError as error:
            reasons[rows[i]] = error
            z_WV[i] = -torch.inf
    # Tokens that are excluded stay excluded, whatever a processor did.
    bans.mask(z_WV, rows)
    _exclude(z_WV, samplers)
    bans.ban(z_WV, rows)
    return reasons


def _mask(z_WV: Tensor, allowed: Mapping[int, Words]) -> None:
    """Apply masks to some rows, in place."""
    masked = list(allowed)
    if len(masked) == len(z_WV):
        mask_out(z_WV, np.stack(list(allowed.values())))
    elif masked:
        z_GV = take_rows(z_WV, masked)
        mask_out(z_GV, np.stack(list(allowed.values())))
        z_WV[masked] = z_GV


def _exclude(z_WV: Tensor, samplers: Sequence[RequestSampler]) -> None:
    """Exclude what ``allowed_token_ids`` and ``bad_words`` do, in place."""
    masks = ((i, sampler.exclusions.allowed_B) for i, sampler in enumerate(samplers))
    _mask(z_WV, {i: allowed_B for i, allowed_B in masks if allowed_B is not None})
    last = [sampler.exclusions.after(sampler.output) for sampler in samplers]
    if any(last):
        z_WV[_places(last, z_WV.device)] = -torch.inf


def _places(ids: Sequence[Sequence[int] | Ids], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return row and column, int64 ``[N]`` each, of ragged ids per row."""
    rows_N = np.repeat(np.arange(len(ids)), [len(row) for row in ids])
    ids_N = np.concatenate([np.asarray(row, dtype=np.int64) for row in ids])
    return uploaded(rows_N, device), uploaded(ids_N, device)


def _add_bias(z_WV: Tensor, samplers: Sequence[RequestSampler]) -> None:
    if any(len(sampler.bias_ids_N) for sampler in samplers):
        place = _places([sampler.bias_ids_N for sampler in samplers], z_WV.device)
        bias_N = uploaded(np.concatenate([sampler.bias_N for sampler in samplers]), z_WV.device)
        z_WV[place] += bias_N


def _penalise(z_WV: Tensor, samplers: Sequence[RequestSampler]) -> None:
    """Apply repetition, then frequency, then presence penalty to seen tokens, in place."""
    seen = {i: sampler.counts for i, sampler in enumerate(samplers) if sampler.counts is not None}
    if not seen:
        return
    sizes = [len(seen[i].ids_N) if i in seen else 0 for i in range(len(samplers))]
    place = _places([seen[i].ids_N if i in seen else () for i in range(len(samplers))], z_WV.device)
    penalties_W3 = np.array(
        [(s.params.repetition_penalty, s.params.frequency_penalty, s.params.presence_penalty) for s in samplers]
    )
    columns = np.repeat(penalties_W3, sizes, axis=0).astype(np.float32).T.copy()
    repetition_N, frequency_N, presence_N = uploaded(columns, z_WV.device)
    count_N = uploaded(np.concatenate([counts.counts_N for counts in seen.values()]), z_WV.device)
    z_WV[place] = penalised(z_WV[place], repetition_N, frequency_N, presence_N, count_N)


def penalised(z: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor, count: Tensor) -> Tensor:
    """Return logits of seen tokens after repetition, then frequency, then presence penalty."""
    z = torch.where(z > 0, z / repetition, z * repetition)
    # A repetition penalty far below 1 may overflow; the largest float still wins. -inf stays.
    z.clamp_(max=torch.finfo(z.dtype).max)
    return z - frequency * count - presence * (count > 0)
