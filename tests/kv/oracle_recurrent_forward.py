"""Recurrent layers in an open forward of the naive KV state: recurrences run row by row, in
float64.

Letters: T new tokens; Hq, H heads of queries and of a state; K, V sizes of keys and values; C
channels; W taps. A *member* is one state tensor of one recurrent layer: (layer id, index).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.contracts.layers import Recurrent

from .oracle_forward import ModelForward
from .oracle_refusals import Faults, raise_first
from .oracle_values import Spec

if TYPE_CHECKING:
    from .oracle_recurrent import Held

Member = tuple[int, int]
Known = Literal["wanted", "end", "token"]


@dataclass(eq=False)
class State:
    """All recurrent layers after one token."""

    values: dict[Member, Tensor] = field(default_factory=dict)
    """In the dtype of the state."""
    bounds: dict[Member, float] = field(default_factory=dict)
    """How far what is stored may be from ``values``; 0: to the bit."""

    def check(self, member: Member, found: Tensor) -> None:
        """Right up to rounding when it is seen for the first time, and to the bit from then on."""
        right, bound = self.values[member], self.bounds[member]
        assert found.dtype == right.dtype
        assert found.shape == right.shape
        if bound:
            error = float((found.double() - right.double()).abs().max())
            assert error <= bound, f"state {member}: error {error}, bound {bound}"
            self.values[member], self.bounds[member] = found.clone(), 0.0
        else:
            assert torch.equal(found, right), f"state {member}"


@dataclass
class OpenStates:
    """The rows of an open forward."""

    before: list[State]
    """What precedes each row: a state from before the forward, or an earlier one of ``rows``."""
    rows: list[State]
    wanted: list[int]
    """Rows whose states take a slot."""
    kept: list[int]
    """Rows of chains whose states become checkpoints."""
    chains: list[range]
    """The rows of each entry that is no tree."""
    known: dict[Member, Known] = field(default_factory=dict)

    @property
    def targets(self) -> list[State]:
        return [self.rows[row] for row in self.wanted]


class RecurrentVerbs:
    """Mixed into ``HybridOracle``, which has the sequences."""

    if TYPE_CHECKING:
        specs: list[Spec]
        recurrent: dict[int, Recurrent]
        initial: State
        parts: dict[int, Held]
        opened: OpenStates | None

        def open_forward(self) -> ModelForward: ...
        def reach(self, layer: int) -> None: ...

    def member_faults(self, layer: int, index: int) -> Faults:
        if layer not in self.recurrent:
            return {Unsupported} if 0 <= layer < len(self.specs) else {InvalidArgument}
        return set() if 0 <= index < len(self.recurrent[layer].states) else {InvalidArgument}

    def _open_faults(self, layer: int, index: int) -> Faults:
        faults = self.member_faults(layer, index)
        return faults if self.opened is not None else faults | {FailedPrecondition}

    def get(self, layer: int, index: int, per_token: bool) -> list[State | None]:
        """The states before each entry or row; None: the row before is of this forward."""
        raise_first(self._open_faults(layer, index))
        self.reach(layer)
        assert self.opened is not None
        if not per_token:
            return [self.parts[entry.seq_id].present for entry in self.open_forward().entries]
        own = {id(row) for row in self.opened.rows}
        return [None if id(one) in own else one for one in self.opened.before]

    def set(self, layer: int, index: int, data: Tensor, per_token: bool) -> None:
        faults = self._open_faults(layer, index)
        if self.opened is not None:
            entries = self.open_forward().entries
            if len(data) != (len(self.opened.rows) if per_token else len(entries)):
                faults.add(InvalidArgument)
            if not per_token and any(entry.parents is not None for entry in entries):
                faults.add(InvalidArgument)
        raise_first(faults)
        assert self.opened is not None
        rows = self.opened.rows if per_token else [self.opened.rows[e.start + e.count - 1] for e in entries]
        for row, one in zip(rows, data, strict=True):
            row.values[layer, index], row.bounds[layer, index] = one.clone(), 0.0
        self.opened.known[layer, index] = "token" if per_token else "end"

    def convolve(
        self, layer: int, index: int, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor
    ) -> list[tuple[Tensor, float]]:
        """Each row ``[C]``, and how far it may be off; in float64."""
        raise_first(self._open_faults(layer, index))
        self.reach(layer)
        assert self.opened is not None
        taps, eps = weight_CW.shape[1], torch.finfo(x_TC.dtype).eps
        outs: list[tuple[Tensor, float]] = []
        for row, (state, before) in enumerate(zip(self.opened.rows, self.opened.before, strict=True)):
            window_WC = torch.cat((before.values[layer, index], x_TC[row : row + 1])).double()
            terms = [weight_CW[:, tap] * window_WC[tap] for tap in range(taps)]
            out = sum(terms[1:], terms[0]) + bias_C
            size = sum(float(term.abs().max()) for term in terms) + float(bias_C.abs().max())
            outs.append((out, 2 * (taps + 2) * eps * size))
            state.values[layer, index] = window_WC[1:].to(x_TC.dtype)
            state.bounds[layer, index] = before.bounds[layer, index]
        self.opened.known[layer, index] = "wanted"
        return outs

    def recur(
        self,
        layer: int,
        index: int,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        scale: float,
        log_decay: Tensor | None,
        beta_TH: Tensor | None,
    ) -> list[tuple[Tensor, float]]:
        """Linear attention, gated or not, by the delta rule or not: each row ``[Hq, V]``, and how
        far it may be off.
        """
        raise_first(self._open_faults(layer, index))
        self.reach(layer)
        assert self.opened is not None
        heads, keys = k_THK.shape[1:]
        group = q_THK.shape[1] // heads
        dtype = self.initial.values[layer, index].dtype
        eps = torch.finfo(dtype).eps
        outs: list[tuple[Tensor, float]] = []
        for row, (state, before) in enumerate(zip(self.opened.rows, self.opened.before, strict=True)):
            s_HKV = before.values[layer, index].double().clone()
            for head in range(heads):
                k, v = k_THK[row, head].double(), v_THV[row, head].double()
                if log_decay is not None:
                    decay = log_decay[row, head].double().exp()
                    s_HKV[head] *= decay if decay.dim() == 0 else decay[:, None]
                u = v if beta_TH is None else float(beta_TH[row, head]) * (v - s_HKV[head].T @ k)
                s_HKV[head] += torch.outer(k, u)
            # Keys have norm 1, so a step makes no earlier error larger, and sums of some K + 8
            # terms of this size are rounded.
            size = max(1.0, float(s_HKV.abs().max()), float(before.values[layer, index].abs().max())) + float(
                v_THV[row].abs().max()
            )
            bound = math.sqrt(keys) * before.bounds[layer, index] + 4 * (keys + 8) * eps * size
            state.values[layer, index], state.bounds[layer, index] = s_HKV.to(dtype), bound
            q_HK = q_THK[row].double()
            out = torch.stack([s_HKV[head // group].T @ q_HK[head] for head in range(len(q_HK))]) * scale
            outs.append((out, abs(scale) * float(q_HK.abs().sum(-1).max()) * (bound + 4 * (keys + 8) * eps * size)))
        self.opened.known[layer, index] = "wanted"
        return outs
