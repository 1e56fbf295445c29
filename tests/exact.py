"""transformers in float64, as the measure of float32 runs, ours and its own.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Every conversion to float32 that a model asks for is one to float64: norms, rotations, softmax, logits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wider(one: Any) -> Any:
            return torch.float64 if one is torch.float32 else one

        func = Tensor.double if func is Tensor.float else func
        return func(*map(wider, args), **{name: wider(one) for name, one in (kwargs or {}).items()})


@torch.inference_mode()
def run_transformers(model: Any, tokens_T: Tensor, attention: str = "eager") -> Tensor:
    """Logits ``[T, V]`` of a causal model of transformers, in the model's dtype."""
    model.set_attn_implementation(attention)
    return model(tokens_T[None]).logits[0]


def run_exactly(model: Any, tokens_T: Tensor) -> Tensor:
    """Logits ``[T, V]`` in float64 throughout, but for the inverse frequencies, which transformers makes in float32."""
    with Float64():
        return run_transformers(copy.deepcopy(model).double(), tokens_T)


def float32_bound(model: Any, tokens_T: Tensor, exact_TV: Tensor) -> float:
    """How far off a float32 run may be: what float32 itself explains, as an absolute error of logits.

    Twice what transformers' own run is off; and that the inverse frequencies of ``exact_TV`` are off by a rounding, which
    turns position p by up to p * eps, and that each layer rounds the residual stream once or twice.
    """
    kinds = ("eager", "sdpa") if model._supports_sdpa else ("eager",)
    theirs = max(float((run_transformers(model, tokens_T, kind) - exact_TV).abs().max()) for kind in kinds)
    largest = float(exact_TV.abs().max())
    layers = model.config.get_text_config().num_hidden_layers
    bound = 2 * theirs + torch.finfo(torch.float32).eps * (len(tokens_T) + 2 * layers) * largest
    assert bound < 1e-4 * largest, "the bound itself is too wide to say anything"
    return bound
