"""Mixtures of experts: who is chosen, and what the chosen ones give together. The reference.

A router gives each token one logit per expert; the token goes through its K best experts and takes the weighted sum
of what they return (arXiv:1701.06538, in the form of Mixtral, arXiv:2401.04088). Nothing is dropped: an expert takes
as many tokens as choose it. ``route`` is reference and implementation in one; ``mix`` defines what
``quire.nn.experts.Experts`` must give, one token at a time.

Letters: T tokens, X experts, K experts of a token, E model width, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Expert: TypeAlias = Callable[[Tensor], Tensor]
"""``[R, E]`` to a fresh ``[R, E]``, each row by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How logits become K experts and their weights."""

    top_k: int
    softmax: Literal["all", "chosen"] = "all"
    """Over which logits: those of all experts before the choice, or those of the chosen ones after it (gpt-oss)."""
    renormalise: bool = False
    """Whether the weights of the chosen experts are divided by their sum. With ``chosen`` it is 1 as it is."""


def route(logits_TX: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """``[T, X]`` of any float type to float32 weights and int64 experts ``[T, K]``, best first.

    The softmax is in float32, and ``torch.topk`` chooses out of the very values that the models' authors choose out
    of (probabilities for ``all``, logits for ``chosen``): so equal values, also those that only rounding makes equal,
    give the experts that transformers takes. Each token's choice depends on its own row alone.
    """
    if routing.softmax == "chosen":
        best_TK, experts_TK = torch.topk(logits_TX, routing.top_k, dim=-1)
        return best_TK.float().softmax(-1), experts_TK
    weights_TK, experts_TK = torch.topk(logits_TX.float().softmax(-1), routing.top_k, dim=-1)
    return weights_TK / weights_TK.sum(-1, keepdim=True) if routing.renormalise else weights_TK, experts_TK


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
