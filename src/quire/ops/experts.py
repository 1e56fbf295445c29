"""Mixtures of experts: who is chosen, and what the chosen ones give together. The reference.

A router gives each token one logit per expert; the token goes through its K best experts and takes the weighted sum
of what they return (arXiv:1701.06538, in the form of Mixtral, arXiv:2401.04088). Nothing is dropped: an expert takes
as many tokens as choose it. ``route`` is reference and implementation in one; ``mix`` defines what
``quire.nn.experts.Experts`` must give, one token at a time.

Letters: T tokens, X experts, K experts of a token, G groups of experts, N some of them, E model width, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from quire.errors import InvalidArgument

Expert: TypeAlias = Callable[[Tensor], Tensor]
"""``[R, E]`` to a fresh ``[R, E]``, each row by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How logits become K experts and their weights.

    ``InvalidArgument`` for groups that do not go together, or with ``softmax="chosen"``, which has no scores before the choice.
    """

    top_k: int
    softmax: Literal["all", "chosen"] = "all"
    """Over which logits: those of all experts before the choice, or those of the chosen ones after it (gpt-oss)."""
    renormalise: bool = False
    """Whether the weights of the chosen experts are divided by their sum. With ``chosen`` it is 1 as it is."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What a logit becomes before the choice: its part of the softmax, or its own sigmoid (DeepSeek-V3)."""
    groups: int = 1
    """Experts stand in so many groups of equal size, one behind the other (DeepSeek-V2, arXiv:2405.04434)."""
    top_groups: int = 1
    """A token chooses out of the experts of its so many best groups."""
    group_score: Literal["best", "best_two"] = "best"
    """What a group is worth: the score of its best expert (DeepSeek-V2), or the sum of its best two (DeepSeek-V3)."""
    scale: float = 1.0
    """Factor of all weights, after everything else."""
    in_float32: bool = False
    """The logits are made in float32 or wider, whatever type the model has; otherwise in the model's."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_groups <= self.groups:
            raise InvalidArgument(
                f"top_groups is {self.top_groups} of {self.groups} groups; expected 1 to {self.groups}"
            )
        if self.softmax == "chosen" and (self.groups > 1 or self.scores != "softmax"):
            raise InvalidArgument("softmax over the chosen logits with groups or sigmoids; expected neither")


def route(logits_TX: Tensor, routing: Routing, correction_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``[T, X]`` of any float type to float32 weights and int64 experts ``[T, K]``, best first.

    ``correction_X``: float32, added to the scores for the choice of groups and experts alone; the weights are made of the
    scores as they are (DeepSeek-V3, arXiv:2408.15664). None with ``softmax="chosen"``.

    Scores are in float32, and ``torch.topk`` chooses out of the very values that the models' authors choose out
    of (probabilities for ``all``, logits for ``chosen``): so equal values, also those that only rounding makes equal,
    give the experts that transformers takes. Each token's choice depends on its own row alone.
    """
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
        # The summand only counts where all scores have vanished; they stay 0 there.
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return _scaled(weights_TK, routing), experts_TK


def _sigmoid(logits_TX: Tensor) -> Tensor:
    """In float32, rounded from float64 where the device has it: a kernel may take another formula for the last few elements
    of a tensor, and logits that tie must not fall apart by where they stand."""
    wide = torch.float64 if logits_TX.device.type in ("cpu", "cuda") else torch.float32
    return logits_TX.to(wide).sigmoid().float()


def _scaled(weights_TK: Tensor, routing: Routing) -> Tensor:
    return weights_TK if routing.scale == 1.0 else weights_TK * routing.scale


def _in_best_groups(choice_TX: Tensor, routing: Routing) -> Tensor:
    """What is chosen out of, with minus infinity for the experts of the groups that are not the best."""
    tokens, experts = choice_TX.shape
    grouped_TGN = choice_TX.view(tokens, routing.groups, experts // routing.groups)
    best_TGN = grouped_TGN.topk(1 if routing.group_score == "best" else 2, dim=-1).values
    groups_TN = torch.topk(best_TGN.sum(-1), routing.top_groups, dim=-1).indices
    other_TG = torch.ones(tokens, routing.groups, dtype=torch.bool, device=choice_TX.device)
    other_TG.scatter_(-1, groups_TN, False)
    return grouped_TGN.masked_fill(other_TG.unsqueeze(-1), float("-inf")).view(tokens, experts)


def mix(x_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor, experts: Sequence[Expert]) -> Tensor:
    """``[T, E]`` to a fresh ``[T, E]``: the sum over k of ``weights[t, k] * experts[experts[t, k]](x[t])``.

    Summed in float32 (in float64 for such an ``x``) from the first choice to the last, rounded once.
    """
    wide = torch.promote_types(x_TE.dtype, torch.float32)
    out_TE = torch.zeros_like(x_TE, dtype=wide)
    for token, chosen in enumerate(experts_TK.tolist()):
        for k, expert in enumerate(chosen):
            y_1E = experts[expert](x_TE[token : token + 1])
            out_TE[token] += weights_TK[token, k].to(wide) * y_1E[0].to(wide)
    return out_TE.to(x_TE.dtype)
