"""transformers in float64, as the measure of float32 runs, ours and its own.

Nothing here may depend on the CPU at hand: in which order a product adds up is the library's
choice, and differs between CPUs, shapes, and even the rows of one weight.

Letters: T tokens, V vocabulary, O output and I input features.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

ORDERS = 32
"""In how many orders of its sums transformers runs to show how far off float32 may be."""
TINY_PYTHON = 2 * 8 * 256**0.5 * torch.finfo(torch.float32).eps * 16
"""How far apart log-probabilities of the bundled model may be that two float32 runs computed in
other batches.

The rounding of a layer grows like the root of its width (256), that of the 8 layers adds up; logits
are below 16 in size.
"""


class Float64(TorchFunctionMode):
    """Every conversion to float32 that a model asks for is one to float64: norms, rotations,
    softmax, logits.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wider(one: Any) -> Any:
            return torch.float64 if one is torch.float32 else one

        func = Tensor.double if func is Tensor.float else func
        return func(*map(wider, args), **{name: wider(one) for name, one in (kwargs or {}).items()})


class ReorderedSums(TorchFunctionMode):
    """Every matrix product adds up in an order of its own, drawn anew each time: what another CPU
    does, on this one.
    """

    PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight_OI, *rest = args
            order_I = self._order(weight_OI.shape[-1])
            args = (x[..., order_I], weight_OI[..., order_I], *rest)
        elif func is torch.addmm:
            bias, x, weight_IO = args
            order_I = self._order(len(weight_IO))
            args = (bias, x[:, order_I], weight_IO[order_I])
        elif func in self.PRODUCTS and min(args[0].dim(), args[1].dim()) > 1:
            order_I = self._order(args[1].shape[-2])
            args = (args[0][..., order_I], args[1][..., order_I, :])
        return func(*args, **(kwargs or {}))

    def _order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator)


class EqualSums(TorchFunctionMode):
    """Equal rows of a weight (and of its bias) give equal results, as in exact arithmetic: each has
    that of the first.

    Kernels need not do so: one row may be added up in full vectors, the next one in the rest of a
    block.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not F.linear:
            return out
        _, rows, *rest = args
        bias = rest[0] if rest else (kwargs or {}).get("bias")
        if bias is not None:
            rows = torch.cat((rows, bias[:, None]), -1)
        same_OO = (rows[:, None] == rows[None]).all(-1)
        return out[..., same_OO.int().argmax(-1)]


@torch.inference_mode()
def run_transformers(model: Any, tokens_T: Tensor, attention: str = "eager") -> Tensor:
    """Logits ``[T, V]`` of a causal model of transformers, in the model's dtype."""
    model.set_attn_implementation(attention)
    return model(tokens_T[None]).logits[0]


def run_exactly(model: Any, tokens_T: Tensor) -> Tensor:
    """Logits ``[T, V]`` in float64 throughout, but for the inverse frequencies, which transformers
    makes in float32.
    """
    with Float64():
        return run_transformers(copy.deepcopy(model).double(), tokens_T)


class Float32Bound:
    """How far off a float32 run may be: what float32 itself explains, as an absolute error of
    logits.

    Twice what transformers' own float32 runs are off, over its kinds of attention and ``ORDERS``
    orders of its sums; and that the inverse frequencies of ``exact_TV`` are off by a rounding,
    which turns position p by up to p * eps, and that each layer rounds the residual stream once or
    twice.

    One run says little. It is one draw, by the CPU at hand, of an error that some models multiply
    on the way: the gated norm behind a delta rule makes rows of 7e-5 a thousand times as large, and
    what was rounded in them too. Of forty runs of Qwen3-Next in other orders, six times in ten one
    is more than twice as far off as a given run, but in less than one of 200 cases more than twice
    as far as the worst of 32.

    ``error <= bound`` runs as many orders as it takes to decide: the bound only grows with them, so
    an error below that of the first ones is below that of all. ``float(bound)`` runs them all. The
    model must stay as it is until then.
    """

    def __init__(self, model: Any, tokens_T: Tensor, exact_TV: Tensor) -> None:
        layers = model.config.get_text_config().num_hidden_layers
        self._largest = float(exact_TV.abs().max())
        self._rounding = torch.finfo(torch.float32).eps * (len(tokens_T) + 2 * layers) * self._largest
        self._worst = 0.0
        self._more = self._runs(model, tokens_T, exact_TV)
        next(self._more)

    def _runs(self, model: Any, tokens_T: Tensor, exact_TV: Tensor) -> Iterator[None]:
        """Go through transformers' runs, and keep the worst."""

        def add(logits_TV: Tensor) -> None:
            self._worst = max(self._worst, float((logits_TV - exact_TV).abs().max()))
            assert self.so_far < 1e-4 * self._largest, "the bound itself is too wide to say anything"

        for kind in ("sdpa", "eager") if model._supports_sdpa else ("eager",):
            add(run_transformers(model, tokens_T, kind))
        for seed in range(ORDERS):
            yield
            with ReorderedSums(seed):
                add(run_transformers(model, tokens_T))

    @property
    def so_far(self) -> float:
        """The bound by the orders that were run by now, which is no larger than that by all."""
        return 2 * self._worst + self._rounding

    def __ge__(self, error: float) -> bool:
        while error > self.so_far:
            if next(self._more, self) is self:
                return False
        return True

    def __float__(self) -> float:
        for _ in self._more:
            pass
        return self.so_far
