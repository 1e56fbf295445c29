"""Decoder blocks: where the norms stand and how the residual stream is joined.

Each class is one arrangement, so a model makes no choice per call. Attention and MLP return fresh
tensors. The residual is added to these in place, never to the caller's x.

Letters: T new tokens, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from quire.contracts.model import Pass
from quire.nn.attention import Attention

Norm: TypeAlias = Callable[[Tensor], Tensor]
"""A map of ``[..., E]`` to a fresh ``[..., E]``."""


class FeedForward(Protocol):
    """The part of a block that follows attention: a gated MLP, or experts."""

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``, each row by itself."""
        ...

    def pack(self) -> None:
        """Replace each linear map by its packed form (``quire.nn.packed``) where it has one."""
        ...


class PreNormBlock:
    """``h = x + attention(norm(x))``, then ``h + mlp(norm(h))``: Llama and most others."""

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(self, attention_norm: Norm, attention: Attention, mlp_norm: Norm, mlp: FeedForward) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``; leave ``x`` unchanged."""
        h_TE = self.attention(self.attention_norm(x_TE), pass_).add_(x_TE)
        return self.mlp(self.mlp_norm(h_TE)).add_(h_TE)


class ScaledBlock(PreNormBlock):
    """``h = x + s * attention(norm(x))``, then ``h + s * mlp(norm(h))`` (Granite)."""

    __slots__ = ("scale",)

    def __init__(
        self, attention_norm: Norm, attention: Attention, mlp_norm: Norm, mlp: FeedForward, scale: float
    ) -> None:
        super().__init__(attention_norm, attention, mlp_norm, mlp)
        self.scale = scale

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``; leave ``x`` unchanged."""
        h_TE = torch.add(x_TE, self.attention(self.attention_norm(x_TE), pass_), alpha=self.scale)
        return torch.add(h_TE, self.mlp(self.mlp_norm(h_TE)), alpha=self.scale)


class PostNormBlock:
    """``h = x + norm(attention(x))``, then ``h + norm(mlp(h))`` (OLMo 2)."""

    __slots__ = ("attention", "attention_out_norm", "mlp", "mlp_out_norm")

    def __init__(self, attention: Attention, attention_out_norm: Norm, mlp: FeedForward, mlp_out_norm: Norm) -> None:
        self.attention = attention
        self.attention_out_norm = attention_out_norm
        self.mlp = mlp
        self.mlp_out_norm = mlp_out_norm

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``; leave ``x`` unchanged."""
        h_TE = self.attention_out_norm(self.attention(x_TE, pass_)).add_(x_TE)
        return self.mlp_out_norm(self.mlp(h_TE)).add_(h_TE)


class SandwichBlock(PreNormBlock):
    """``h = x + norm(attention(norm(x)))``, ``h + norm(mlp(norm(h)))`` (Gemma 2 and 3, GLM-4)."""

    __slots__ = ("attention_out_norm", "mlp_out_norm")

    def __init__(
        self,
        attention_norm: Norm,
        attention: Attention,
        attention_out_norm: Norm,
        mlp_norm: Norm,
        mlp: FeedForward,
        mlp_out_norm: Norm,
    ) -> None:
        super().__init__(attention_norm, attention, mlp_norm, mlp)
        self.attention_out_norm = attention_out_norm
        self.mlp_out_norm = mlp_out_norm

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``; leave ``x`` unchanged."""
        h_TE = self.attention_out_norm(self.attention(self.attention_norm(x_TE), pass_)).add_(x_TE)
        return self.mlp_out_norm(self.mlp(self.mlp_norm(h_TE))).add_(h_TE)


class ParallelBlock:
    """``x + attention(n) + mlp(n)``, ``n = norm(x)`` (Cohere, StableLM with parallel residual)."""

    __slots__ = ("attention", "mlp", "norm")

    def __init__(self, norm: Norm, attention: Attention, mlp: FeedForward) -> None:
        self.norm = norm
        self.attention = attention
        self.mlp = mlp

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``; leave ``x`` unchanged."""
        n_TE = self.norm(x_TE)
        return self.attention(n_TE, pass_).add_(x_TE).add_(self.mlp(n_TE))


DecoderBlock: TypeAlias = PreNormBlock | PostNormBlock | ParallelBlock
"""Any block of a decoder; all have ``attention`` and ``mlp``."""
