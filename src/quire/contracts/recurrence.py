"""Recurrent layers over a ragged batch: the predecessor of each token, and the wanted states.

A KV state describes a forward by a ``RecurrencePlan``; a ``RecurrenceBackend`` computes with it.
The backend takes the states from before the forward and returns those after some rows.

Letters: T new tokens (rows) of the whole batch; G given states; M rows with wanted states; Hq query
heads, H heads of the state (query head h reads head ``h // (Hq / H)``); K, V key and value sizes; C
channels; W taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecurrencePlan:
    """One ragged batch: entry i has rows ``starts[i]..starts[i + 1] - 1``, parents first."""

    starts: NDArray[np.int64]
    """``[B + 1]``"""
    parents: NDArray[np.int64]
    """``[T]``: predecessor of each row in its sequence or tree; -1: a given state."""
    given: NDArray[np.int64]
    """``[T]``: index of the given state before each row with parent -1; -1 elsewhere."""
    wanted: NDArray[np.int64]
    """``[M]``: rows with wanted states, ascending."""
    chains: bool
    """Whether all entries are chains: entry i starts from given state i (G is B)."""

    @property
    def num_rows(self) -> int:
        """T"""
        return int(self.starts[-1])

    @property
    def passes_on(self) -> bool:
        """Whether each state that a row needs is given, or is wanted, or can rest where the last
        one of its chain goes: all states are wanted, or entries are chains whose last one is."""
        if len(self.wanted) == self.num_rows:
            return True
        ends = self.starts[1:][np.diff(self.starts) > 0] - 1
        return self.chains and bool(np.isin(ends, self.wanted).all())


class Recurred(NamedTuple):
    """The result of a recurrence."""

    out: Tensor
    """One row per token, fresh, contiguous, in the dtype of the input."""
    states: Tensor
    """``[M, *shape]``: the states after the wanted rows, fresh, in the dtype of the given ones."""


class RecurrenceBackend(Protocol):
    """Computes recurrences. Stateless."""

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
        """Run the gated linear or delta rule: out ``[T, Hq, V]``, float32 states ``[M, H, K, V]``.

        For each token, with S ``[K, V]`` the state of its predecessor: ``S = exp(log_decay) * S``;
        ``u = v``, or with beta the delta rule ``u = beta * (v - S^T k)``; ``S = S + k u^T``;
        ``out = scale * S^T q``. q is ``[T, Hq, K]``, k ``[T, H, K]``, v ``[T, H, V]``,
        ``log_decay`` <= 0 ``[T, H]`` or ``[T, H, K]``, ``beta`` ``[T, H]``. Sums are in float32
        (float64 if the states are). This covers linear attention (arXiv:2006.16236), gated
        (arXiv:2312.06635), Mamba-2's SSD (arXiv:2405.21060: k is B, q is C, v is dt * x, log_decay
        is dt * A), DeltaNet (arXiv:2406.06484) and gated DeltaNet (arXiv:2412.06464).
        """

    def convolve(
        self, plan: RecurrencePlan, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, states_GWC: Tensor
    ) -> Recurred:
        """Run the causal depthwise convolution: out ``[T, C]``, states ``[M, W - 1, C]``.

        ``out[t] = bias + sum over j of weight[:, W - 1 - j] * x[j tokens before t]``. It follows
        sequences and tree paths. A state holds the last W - 1 inputs, oldest first. Sums in float32
        (float64 if x is).
        """


class StatePlaces(NamedTuple):
    """States in a pool. Rows that a call reads are not written by the same call."""

    pool_S: Tensor
    """``[S, *shape]``, contiguous; read and written."""
    sources_G: Tensor
    """int64: the rows of the pool that are the given states."""
    targets_M: Tensor
    """int64: the rows for the wanted states. A row that is not read may occur twice."""


@runtime_checkable
class PooledRecurrence(RecurrenceBackend, Protocol):
    """A backend that reads and writes states in the pool, without copies.

    Its verbs return the output. None: it does not support these dtypes, sizes or this device, and
    has written nothing; use the verbs of ``RecurrenceBackend``.
    """

    def linear_attention_at(
        self,
        plan: RecurrencePlan,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        places: StatePlaces,
        *,
        scale: float = 1.0,
        log_decay: Tensor | None = None,
        beta_TH: Tensor | None = None,
    ) -> Tensor | None:
        """Run ``linear_attention`` on states ``[S, H, K, V]``."""

    def convolve_at(
        self, plan: RecurrencePlan, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, places: StatePlaces
    ) -> Tensor | None:
        """Run ``convolve`` on states ``[S, W - 1, C]``."""


# -- whole mixers ----------------------------------------------------------------------------------


class RecurrentParts(NamedTuple):
    """The states of one layer in a forward, for a call over its whole mixer."""

    plan: RecurrencePlan
    """One object for all layers of a forward; it ``passes_on``."""
    sources_G: Tensor
    targets_M: Tensor
    """As in ``StatePlaces``, also one object for all layers."""
    pools: tuple[Tensor, ...]
    """``[S, *shape]`` of each state of the layer, contiguous; read at sources, written at
    targets."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class StackPools:
    """The pools of several layers of a KV state. Kernels may remember by this object what they make
    of them, without keeping it alive."""

    of_layers: tuple[tuple[Tensor, ...], ...]
    """As in ``RecurrentParts``."""


class StackStates(NamedTuple):
    """The states of several layers in a forward, for one call over all of them."""

    plan: RecurrencePlan
    sources_G: Tensor
    targets_M: Tensor
    """As in ``RecurrentParts``."""
    pools: StackPools
    """The same object in every forward over these layers of a state."""


class StateSizes(NamedTuple):
    """Sizes of a state ``[H, K, V]``, and the number of heads of keys."""

    heads: int
    key_heads: int
    """Each serves ``heads / key_heads`` consecutive heads."""
    keys: int
    values: int

    @property
    def width(self) -> int:
        """H * V"""
        return self.heads * self.values


class StepRates(NamedTuple):
    """Steps ``softplus(x + bias)``, within bounds, and decays ``exp(rate * step)``, by head."""

    rate_H: Tensor
    """Below 0"""
    bias_H: Tensor
    least: float = 0.0
    greatest: float | None = None


class GatedNormWeight(NamedTuple):
    """A root mean square norm of parts of the output, with a gate (``nn.norm.GatedRMSNorm``)."""

    weight: Tensor
    """Of all columns, or of each part."""
    eps: float
    part: int
    """Columns with a mean of their own."""
    gate_first: bool


class MixerCall(Protocol):
    """A recurrent layer between its projections."""

    def __call__(self, x_TC: Tensor, parts: RecurrentParts, rates: Tensor | None = None) -> Tensor:
        """Map the projection's rows to fresh rows ``[T, H * V]``, or ``[T, C]`` of a short
        convolution; read and write the states. ``rates``: ``[T, 2H]`` of the delta rule: rows of
        beta, then of steps."""


class MixerKernel(Protocol):
    """Joins the parts of recurrent layers. Methods return None for unsupported parts: dtypes,
    devices, sizes.

    A row depends on earlier rows of its sequence only, to the bit, whatever else runs, and however
    a prompt is divided.
    """

    def short_conv(self, conv_CW: Tensor, bias_C: Tensor | None) -> MixerCall | None:
        """Return ``nn.short_conv.ShortConv`` over columns b, c, x of its projection."""

    def delta_rule(
        self, conv_CW: Tensor, sizes: StateSizes, rates: StepRates, norm: GatedNormWeight, scale: float
    ) -> MixerCall | None:
        """Return ``nn.delta.GatedDeltaNet`` with silu, over columns q, k, v, gate."""

    def ssd(
        self,
        conv_CW: Tensor,
        bias_C: Tensor | None,
        sizes: StateSizes,
        rates: StepRates,
        skip_H: Tensor,
        norm: GatedNormWeight | None,
    ) -> MixerCall | None:
        """Return ``nn.mamba.Mamba2Mixer`` with silu, over columns gate, x, B, C, steps."""
