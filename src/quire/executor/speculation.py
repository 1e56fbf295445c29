"""Which drafts are accepted: the threshold rule and exact rejection sampling.

Letters: k draft tokens; R = k + 1 rows of target logits, row i after the input token and i drafts; V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.executor import RequestSampling
from quire.errors import InvalidArgument, QuireError


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many drafts are accepted, and in exact mode the distribution of the next token, float32 ``[1, V]``."""

    accepted: int
    next_probs: Tensor | None = None


def check_threshold(threshold: float) -> None:
    """``InvalidArgument`` unless it is a number in [0, 1]."""
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0.0 <= threshold <= 1.0:
        raise InvalidArgument(f"acceptance_threshold must be a number in [0, 1]; got {threshold!r}")


def check_draft_probabilities(probabilities: Tensor, drafts: Sequence[int], vocab_size: int) -> Tensor:
    """The rows as float64 ``[k, V]`` on the CPU; ``InvalidArgument`` unless they are distributions that can give the drafts."""
    shape = (len(drafts), vocab_size)
    if not isinstance(probabilities, Tensor) or not probabilities.is_floating_point():
        raise InvalidArgument("draft_probabilities must be a floating tensor [k, V]")
    if tuple(probabilities.shape) != shape:
        raise InvalidArgument(
            f"draft_probabilities must be {list(shape)}, a row per draft; got {list(probabilities.shape)}"
        )
    p_kV = probabilities.detach().to("cpu", torch.float64)
    # What a softmax in the given precision may miss 1 by: one rounding per term and per level of a pairwise sum.
    tolerance = torch.finfo(probabilities.dtype).eps * (4 + math.ceil(math.log2(vocab_size + 1)))
    for row, draft in enumerate(drafts):
        total = float(p_kV[row].sum())
        if not (p_kV[row] >= 0).all() or not abs(total - 1.0) <= tolerance:
            raise InvalidArgument(f"row {row} of draft_probabilities is no distribution: it sums to {total}")
        if p_kV[row, draft] == 0:
            raise InvalidArgument(
                f"draft {row} is token {draft}, to which its row of draft_probabilities gives probability 0"
            )
    return p_kV


def judge_by_threshold(logits_RV: Tensor, drafts: Sequence[int], threshold: float) -> Verdict:
    """Accept d_i while ``p_i(d_i) >= threshold * max_v p_i(v)``, p_i the softmax of row i."""
    if not drafts:
        return Verdict(0)
    rows_kV = logits_RV[: len(drafts)].double()
    drafted_k = rows_kV.gather(1, torch.tensor(drafts, device=rows_kV.device)[:, None])[:, 0]
    # The softmax's denominator cancels.
    good_k = (drafted_k - rows_kV.amax(1)).exp() >= threshold
    return Verdict(int(good_k.long().cumprod(0).sum()))


def judge_by_sampling(logits_RV: Tensor, drafts: Sequence[int], draft_kV: Tensor, sampling: RequestSampling) -> Verdict:
    """Rejection sampling (Leviathan et al., arXiv:2211.17192), after which the output has the target's distribution.

    d_i, drawn from pD, is accepted iff u * pD(d_i) < pT(d_i). After a rejection the next token must be drawn from the
    normalised positive part of pT - pD, after full acceptance from pT of the last row.
    """
    target_RV = sampling.probabilities(logits_RV, drafts)
    if tuple(target_RV.shape) != tuple(logits_RV.shape):
        raise QuireError(f"sampling made {list(target_RV.shape)} of logits {list(logits_RV.shape)}")
    p_RV = target_RV.to("cpu", torch.float64)
    for index, draft in enumerate(drafts):
        if sampling.uniform() * float(draft_kV[index, draft]) < float(p_RV[index, draft]):
            continue
        rest_V = (p_RV[index] - draft_kV[index]).clamp_min(0.0)
        total = float(rest_V.sum())
        next_V = rest_V / total if total > 0 else p_RV[index]
        return Verdict(index, next_V[None].to(logits_RV.device, torch.float32))
    return Verdict(len(drafts), p_RV[-1:].to(logits_RV.device, torch.float32))
