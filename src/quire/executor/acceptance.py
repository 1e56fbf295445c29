"""The rules for accepting drafts of a chain or a tree: threshold and exact rejection.

Letters: k draft tokens; R = k + 1 rows of target logits, row 0 after the input token and row i + 1
after draft i and its ancestors; V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.base.errors import InvalidArgument, QuireError
from quire.contracts.executor import RequestSampling


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """The accepted drafts in order, and in exact mode ``next_probs``, float32 ``[1, V]``."""

    path: tuple[int, ...]
    next_probs: Tensor | None = None

    @property
    def accepted(self) -> int:
        return len(self.path)

    @property
    def row(self) -> int:
        """The row of the logits for the next token."""
        return self.path[-1] + 1 if self.path else 0


def check_threshold(threshold: float) -> None:
    """Raise ``InvalidArgument`` unless it is a number in [0, 1]."""
    if not 0.0 <= threshold <= 1.0:
        raise InvalidArgument(f"acceptance_threshold must be a number in [0, 1]; got {threshold!r}")


def check_draft_probabilities(probabilities: Tensor, drafts: Sequence[int], vocab_size: int) -> Tensor:
    """Return the rows as float64 ``[k, V]`` on the CPU. ``InvalidArgument`` unless they are
    distributions with positive probability of the drafts."""
    shape = (len(drafts), vocab_size)
    if not probabilities.is_floating_point():
        raise InvalidArgument(f"draft_probabilities must be a floating tensor [k, V]; got {probabilities.dtype}")
    if tuple(probabilities.shape) != shape:
        allowed = f"{list(shape)}, a row per draft"
        raise InvalidArgument(field="draft_probabilities", given=probabilities, allowed=allowed)
    p_kV = probabilities.detach().to("cpu", torch.float64)
    # A softmax may miss 1 by one rounding per term and per level of a pairwise sum.
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


def accept_by_threshold(
    logits_RV: Tensor, drafts: Sequence[int], threshold: float, parents: Sequence[int] | None = None
) -> AcceptResult:
    """Accept a draft d while ``p(d) >= threshold * max_v p(v)``, p the softmax before it.

    ``parents``: of each draft, -1 for the input token; None: a chain. Of several drafts that pass,
    the most probable one is taken, the first of equals.
    """
    if not drafts:
        return AcceptResult(())
    before = list(range(len(drafts))) if parents is None else [parent + 1 for parent in parents]
    rows_kV = logits_RV[before].double()
    drafted_k = rows_kV.gather(1, torch.tensor(drafts, device=rows_kV.device)[:, None])[:, 0]
    # The softmax's denominator cancels.
    ratios = (drafted_k - rows_kV.amax(1)).exp().tolist()
    path: list[int] = []
    while passing := [child for child in _children(before, path) if ratios[child] >= threshold]:
        path.append(max(passing, key=lambda child: ratios[child]))
    return AcceptResult(tuple(path))


def _children(before: Sequence[int], path: Sequence[int]) -> list[int]:
    """Return the drafts below the end of a path. ``before``: the row of logits that judges each
    draft."""
    row = path[-1] + 1 if path else 0
    return [draft for draft, place in enumerate(before) if place == row]


def rejection_sample(
    logits_RV: Tensor,
    drafts: Sequence[int],
    draft_kV: Tensor,
    sampling: RequestSampling,
    parents: Sequence[int] | None = None,
) -> AcceptResult:
    """Accept by rejection sampling; the output then has the target's distribution.

    d, drawn from pD, is accepted iff u * pD(d) < pT(d) (Leviathan et al., arXiv:2211.17192). After
    a rejection pT becomes the normalised positive part of pT - pD (pT if that is zero), for the
    next draft below the same token, drawn independently (SpecInfer, arXiv:2305.09781), and finally
    for the next token. After full acceptance the next token is drawn from pT of the last row.
    """
    before = list(range(len(drafts))) if parents is None else [parent + 1 for parent in parents]
    chain_RV = _targets(logits_RV, drafts, sampling) if parents is None else None
    path: list[int] = []
    while True:
        if chain_RV is not None:
            target_V = chain_RV[len(path)]
        else:
            row = path[-1] + 1 if path else 0
            target_V = _targets(logits_RV[row : row + 1], [drafts[draft] for draft in path], sampling)[0]
        for draft in _children(before, path):
            if sampling.uniform() * float(draft_kV[draft, drafts[draft]]) < float(target_V[drafts[draft]]):
                path.append(draft)
                break
            rest_V = (target_V - draft_kV[draft]).clamp_min(0.0)
            total = float(rest_V.sum())
            target_V = rest_V / total if total > 0 else target_V
        else:
            return AcceptResult(tuple(path), target_V[None].to(logits_RV.device, torch.float32))


def _targets(logits_RV: Tensor, drafted: Sequence[int], sampling: RequestSampling) -> Tensor:
    """Return pT of each row, float64 ``[R, V]`` on the CPU; the last row is after all
    ``drafted``."""
    found_RV = sampling.probabilities(logits_RV, drafted)
    if tuple(found_RV.shape) != tuple(logits_RV.shape):
        raise QuireError(f"sampling made {list(found_RV.shape)} of logits {list(logits_RV.shape)}")
    return found_RV.to("cpu", torch.float64)
