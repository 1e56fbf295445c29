"""How recurrent layers run over a ragged batch: what comes before each token, and whose states are wanted.

A KV state describes a forward by a ``RecurrencePlan``; a ``RecurrenceBackend`` computes with it. Neither knows the other's insides:
the backend is given the states from before the forward and returns those after some rows.

Letters: T new tokens (rows) of the whole batch; G given states; M rows whose states are wanted; Hq query heads, H heads of the state
(Hq is a multiple of H, query head h reads head ``h // (Hq / H)``); K, V sizes of keys and values; C channels; W taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecurrencePlan:
    """One ragged batch. The rows of entry i are ``starts[i]..starts[i + 1] - 1``; a parent comes before its children."""

    starts: NDArray[np.int64]
    """``[B + 1]``"""
    parents: NDArray[np.int64]
    """``[T]``: the row of this forward that comes before each row in its sequence or tree; -1: what comes before is a given state."""
    given: NDArray[np.int64]
    """``[T]``: which of the G given states comes before each row whose parent is -1; -1 elsewhere."""
    wanted: NDArray[np.int64]
    """``[M]``: rows whose states are wanted, ascending."""
    chains: bool
    """Whether every entry is a chain: entry i starts from given state i (so G is B), and each row follows the one before."""

    @property
    def num_rows(self) -> int:
        """T"""
        return int(self.starts[-1])


class Recurred(NamedTuple):
    """What a recurrence returns."""

    out: Tensor
    """One row per token, fresh, contiguous, in the dtype of the input."""
    states: Tensor
    """``[M, *shape]``: the states after the wanted rows, fresh, in the dtype of the given states."""


class RecurrenceBackend(Protocol):
    """A way to compute recurrences. Stateless."""

    name: str

    def linear_attention(
        self,
        plan: RecurrencePlan,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        states_GHKV: Tensor,
        *,
        scale: float = 1.0,
        log_decay: Tensor | None = None,
        beta_TH: Tensor | None = None,
    ) -> Recurred:
        """The gated linear or delta-rule recurrence: out ``[T, Hq, V]``, states ``[M, H, K, V]`` float32.

        For each token, from the state S ``[K, V]`` of what comes before it: ``S = exp(log_decay) * S``; ``u = v``, or with beta the
        delta rule ``u = beta * (v - S^T k)``; ``S = S + k u^T``; ``out = scale * S^T q``. q ``[T, Hq, K]``, k ``[T, H, K]``,
        v ``[T, H, V]``, ``log_decay`` <= 0 ``[T, H]`` or ``[T, H, K]``, ``beta`` ``[T, H]``. Sums in float32 (float64 where the
        states are). Linear attention (arXiv:2006.16236), gated (arXiv:2312.06635), Mamba-2's SSD (arXiv:2405.21060: k is B, q is C,
        v is dt * x, log_decay is dt * A), DeltaNet (arXiv:2406.06484), gated DeltaNet (arXiv:2412.06464).
        """
        ...

    def convolve(
        self, plan: RecurrencePlan, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, states_GWC: Tensor
    ) -> Recurred:
        """The causal depthwise convolution along each sequence or tree path: out ``[T, C]``, states ``[M, W - 1, C]``.

        ``out[t] = bias + sum over j of weight[:, W - 1 - j] * x[j tokens before t]``; a state holds the last W - 1 inputs, oldest
        first. Sums in float32 (float64 where x is).
        """
        ...
