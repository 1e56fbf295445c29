"""Mixtures of experts: the choice of experts and the sum of their outputs. The reference.

A router gives each token one logit per expert. The token goes through its K best experts and takes
the weighted sum of their outputs (arXiv:1701.06538, in the form of Mixtral, arXiv:2401.04088).
Nothing is dropped: an expert takes all tokens that choose it. ``route`` is reference and
implementation in one; ``mix`` defines ``quire.nn.experts.Experts``, one token at a time.

Letters: T tokens, X experts, K experts of a token, G groups, N some of them, E model width, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from quire.contracts.experts import Routing

Expert: TypeAlias = Callable[[Tensor], Tensor]
"""Maps ``[R, E]`` to a fresh ``[R, E]``, each row by itself."""


def route(logits_TX: Tensor, routing: Routing, correction_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Route ``[T, X]`` of any float type: float32 weights and int64 experts ``[T, K]``, best first.

    ``correction_X`` (float32) is added to the scores for the choice of groups and experts only;
    weights use plain scores (DeepSeek-V3, arXiv:2408.15664). None with ``softmax="chosen"``.

    Scores are in float32. ``torch.topk`` chooses among the same values as the models' authors do
    (probabilities for ``all``, logits for ``chosen``), so ties, even those made by rounding, give
    the experts that transformers takes. Each token's choice depends on its own row alone."""
    if routing.reach is not None:
        return _sparsely(logits_TX.float(), routing.reach)
    if routing.softmax == "chosen":
        best_TK, experts_TK = torch.topk(logits_TX, routing.top_k, dim=-1)
        return _scaled(best_TK.float().softmax(-1), routing), experts_TK
    scores_TX = _sigmoid(logits_TX) if routing.scores == "sigmoid" else logits_TX.float().softmax(-1)
    choice_TX = scores_TX if correction_X is None else scores_TX + correction_X
    if routing.top_groups < routing.groups:
        choice_TX = _in_best_groups(choice_TX, routing)
    best_TK, experts_TK = torch.topk(choice_TX, routing.top_k, dim=-1)
    weights_TK = best_TK if correction_X is None else scores_TX.gather(-1, experts_TK)
    if routing.renormalise:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + routing.summand)
    return _scaled(weights_TK, routing), experts_TK


def _sparsely(logits_TX: Tensor, reach: float) -> tuple[Tensor, Tensor]:
    """Choose the best expert, then the best of the others (``Routing.reach``)."""
    left_TX, weights, experts = logits_TX, [], []
    for _ in range(2):
        best_T1, expert_T1 = left_TX.max(-1, keepdim=True)
        size_TX = logits_TX.abs().clamp(min=best_T1)
        near_TX = left_TX.masked_fill((best_T1 - logits_TX) / size_TX > reach, float("-inf"))
        weights.append(near_TX.softmax(-1).gather(-1, expert_T1))
        experts.append(expert_T1)
        left_TX = left_TX.scatter(-1, expert_T1, float("-inf"))
    return torch.cat(weights, -1), torch.cat(experts, -1)


def _sigmoid(logits_TX: Tensor) -> Tensor:
    """Return float32 sigmoids, rounded from float64 if the device has it. A kernel may use another
    formula for the last elements of a tensor; ties must not depend on position."""
    wide = torch.float64 if logits_TX.device.type in ("cpu", "cuda") else torch.float32
    return logits_TX.to(wide).sigmoid().float()


def _scaled(weights_TK: Tensor, routing: Routing) -> Tensor:
    return weights_TK if routing.scale == 1.0 else weights_TK * routing.scale


def _in_best_groups(choice_TX: Tensor, routing: Routing) -> Tensor:
    """Return the scores with minus infinity for experts outside the best groups."""
    tokens, experts = choice_TX.shape
    grouped_TGN = choice_TX.view(tokens, routing.groups, experts // routing.groups)
    best_TGN = grouped_TGN.topk(1 if routing.group_score == "best" else 2, dim=-1).values
    groups_TN = torch.topk(best_TGN.sum(-1), routing.top_groups, dim=-1).indices
    other_TG = torch.ones(tokens, routing.groups, dtype=torch.bool, device=choice_TX.device)
    other_TG.scatter_(-1, groups_TN, False)
    return grouped_TGN.masked_fill(other_TG.unsqueeze(-1), float("-inf")).view(tokens, experts)


def mix(x_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor, experts: Sequence[Expert]) -> Tensor:
    """Return a fresh ``[T, E]``: sum over k of ``weights[t, k] * experts[experts[t, k]](x[t])``.

    Summed in float32 (float64 for such an ``x``) from the first choice to the last, rounded once.
    """
    wide = torch.promote_types(x_TE.dtype, torch.float32)
    out_TE = torch.zeros_like(x_TE, dtype=wide)
    for token, chosen in enumerate(experts_TK.tolist()):
        for k, expert in enumerate(chosen):
            y_1E = experts[expert](x_TE[token : token + 1])
            out_TE[token] += weights_TK[token, k].to(wide) * y_1E[0].to(wide)
    return out_TE.to(x_TE.dtype)
