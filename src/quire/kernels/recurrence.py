"""Recurrences in chunk-parallel form, on any device.

*Linear attention.* A sequence is cut into pieces of at most ``CHUNK`` rows (see ``pieces``). A piece is a few matrix products: what its
rows read of the state before it, what they read of each other, and the state after it. With the delta rule the values
are first replaced by what is new in them, which is one triangular system (the WY representation, arXiv:2406.06484, for decays
arXiv:2412.06464); all decays, by column too, take the same way (see ``decays``). Pieces of single rows (decodes, branching trees,
rows that are all wanted) are one batched update of the states instead.

*Convolution.* Decodes are one batched product; long chains go one by one, by shifted multiplications; short ones and trees
gather each row's ancestors.

Letters: T new tokens (rows) of the whole batch; G given states; M rows whose states are wanted; Hq query heads, H heads of the state,
R = Hq / H query heads of each; N pieces; L rows of a piece; K, V sizes of keys and values; C channels; W taps.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.recurrence import Recurred, RecurrencePlan
from quire.kernels.decays import faded, products, weigh
from quire.kernels.pieces import GroupRows, cut
from quire.ops.recurrence import check_convolve, check_linear_attention, promoted, sum_dtype

CHUNK = 64
"""Rows of a piece: the products within it grow with the square, what goes through the state is done once for each."""
LONG_CHAIN = 32
"""Mean length of a batch's chains from which on each is convolved by itself."""


class _Change(Protocol):
    def __call__(self, x: Tensor, /, *, blank: bool) -> Tensor: ...


class Inputs(NamedTuple):
    """What the rows bring along: ``[T, ...]``, ``[N, L, ...]``, or for one row of each sequence ``[N, ...]``.

    q and k may have one head that all heads share.
    """

    q: Tensor
    """``[.., H, R, K]``"""
    k: Tensor
    """``[.., H, K]``"""
    v: Tensor
    """``[.., H, V]``"""
    log_decay: Tensor | None
    """``[.., H]`` or ``[.., H, K]``"""
    beta: Tensor | None
    """``[.., H]``"""

    def mapped(self, change: _Change) -> Inputs:
        """``change(tensor, blank)`` of each; ``blank``: padding must be 0, so that it writes nothing and lets nothing fade."""
        return Inputs(
            change(self.q, blank=False),
            change(self.k, blank=True),
            change(self.v, blank=False),
            None if self.log_decay is None else change(self.log_decay, blank=True),
            None if self.beta is None else change(self.beta, blank=False),
        )


class ChunkedRecurrence:
    """The recurrence backend ``torch``: equal to the reference up to rounding, in a few calls for each chunk."""

    name = "torch"

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
        """See the contract; the output has the dtype that q, k and v promote to. ``InvalidArgument``: shapes, dtypes, devices."""
        check_linear_attention(plan, q_THK, k_THK, v_THV, states_GHKV, log_decay, beta_TH)
        compute = sum_dtype(q_THK, k_THK, v_THV, states_GHKV)
        heads, query_heads = states_GHKV.shape[1], q_THK.shape[1]
        out_THV = v_THV.new_empty(plan.num_rows, query_heads, v_THV.shape[2], dtype=promoted(q_THK, k_THK, v_THV))
        if query_heads == heads > 1 and q_THK.stride(1) == k_THK.stride(1) == 0:
            # Heads that share q and k (Mamba-2's B and C): their products are made once.
            q_THK, k_THK = q_THK[:, :1], k_THK[:, :1]
            heads = 1
        q_THRK = q_THK.view(plan.num_rows, heads, -1, q_THK.shape[2])
        inputs = Inputs(q_THRK, k_THK, v_THV, log_decay, beta_TH)
        if bool((plan.parents < 0).all()):
            rows = _pick(states_GHKV, plan.given).to(compute)
            out, states = _update(rows, inputs.mapped(lambda x, blank: x.to(compute)), scale)
            out_THV.copy_(out.flatten(1, 2))
            return Recurred(out_THV, _pick(states, plan.wanted).to(states_GHKV.dtype).contiguous())
        return Recurred(out_THV, self._pieces(plan, inputs, states_GHKV, out_THV, scale, compute))

    @staticmethod
    def _pieces(
        plan: RecurrencePlan,
        inputs: Inputs,
        states_GHKV: Tensor,
        out_THV: Tensor,
        scale: float,
        compute: torch.dtype,
    ) -> Tensor:
        """Write the outputs and return the wanted states, going from one depth of pieces to the next."""
        result = states_GHKV.new_empty(len(plan.wanted), *states_GHKV.shape[1:])
        wanted = np.full(plan.num_rows, -1, dtype=np.int64)
        wanted[plan.wanted] = np.arange(len(plan.wanted))
        known: dict[int, tuple[Tensor, int]] = {}
        """Of the depth before, by piece: a tensor of states, and the place in it of the one after the piece."""
        for groups in cut(plan, CHUNK):
            after: dict[int, tuple[Tensor, int]] = {}
            for group in groups:
                rows = GroupRows(group, states_GHKV.device)
                before = [
                    known[piece] if piece >= 0 else (states_GHKV, given)
                    for piece, given in zip(group.before.tolist(), plan.given[group.first].tolist(), strict=True)
                ]
                states = _gather(before).to(compute)
                taken = inputs.mapped(partial(rows.take, dtype=compute))
                if group.longest == 1:
                    out, states = _update(states, taken.mapped(lambda x, blank: x[:, 0]), scale)
                    rows.put(out_THV, out.flatten(1, 2).unsqueeze(1))
                else:
                    out, states = _chunk(states, taken, scale)
                    rows.put(out_THV, out.flatten(2, 3))
                after.update((piece, (states, index)) for index, piece in enumerate(group.pieces.tolist()))
                targets = wanted[group.last]
                kept = np.flatnonzero(targets >= 0)
                if kept.size:
                    index = torch.from_numpy(targets[kept]).to(result.device)
                    result.index_copy_(0, index, _pick(states, kept).to(result.dtype))
            known = after
        return result

    def convolve(
        self, plan: RecurrencePlan, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, states_GWC: Tensor
    ) -> Recurred:
        """See the contract. ``InvalidArgument``: shapes, dtypes, devices."""
        check_convolve(plan, x_TC, weight_CW, bias_C, states_GWC)
        compute = sum_dtype(x_TC, states_GWC)
        weight_WC = weight_CW.to(compute).T.contiguous()
        bias = None if bias_C is None else bias_C.to(compute)
        if bool((plan.parents < 0).all()):
            inputs_TWC = torch.cat([_pick(states_GWC, plan.given).to(compute), x_TC.to(compute).unsqueeze(1)], 1)
            out_TC = (inputs_TWC * weight_WC).sum(1)
            states_MWC = _pick(inputs_TWC[:, 1:], plan.wanted)
        elif plan.chains and plan.num_rows >= LONG_CHAIN * (len(plan.starts) - 1):
            return _convolve_chains(plan, x_TC, weight_WC, bias, states_GWC, compute)
        else:
            # Rows of the given states, then those of x.
            pool = torch.cat([states_GWC.flatten(0, 1).to(compute), x_TC.to(compute)])
            taps_WT = _addresses(plan, *states_GWC.shape[:2])
            index_WT = torch.from_numpy(taps_WT).to(x_TC.device)
            out_TC = pool.index_select(0, index_WT[0]).mul_(weight_WC[0])
            for index_T, weight_C in zip(index_WT[1:], weight_WC[1:], strict=True):
                out_TC.addcmul_(pool.index_select(0, index_T), weight_C)
            states_MWC = pool[torch.from_numpy(taps_WT[1:, plan.wanted].T.copy()).to(x_TC.device)]
        if bias is not None:
            out_TC.add_(bias)
        return Recurred(out_TC.to(x_TC.dtype), states_MWC.to(states_GWC.dtype).contiguous())


# -- states ------------------------------------------------------------------------------------------------------


def _pick(rows: Tensor, index: NDArray[np.int64]) -> Tensor:
    """``rows[index]``; the tensor itself where that is all of it in order."""
    if len(index) == len(rows) and bool((index == np.arange(len(rows))).all()):
        return rows
    return rows.index_select(0, torch.from_numpy(index).to(rows.device))


def _gather(places: list[tuple[Tensor, int]]) -> Tensor:
    """The states at some places, ``[N, ...]``; not copied where one tensor holds just these in order."""
    tensor = places[0][0]
    if all(other is tensor for other, _ in places):
        if len(places) == 1:
            return tensor[places[0][1]].unsqueeze(0)
        return _pick(tensor, np.array([index for _, index in places]))
    compute = sum_dtype(*(tensor for tensor, _ in places))
    return torch.stack([tensor[index].to(compute) for tensor, index in places])


# -- linear attention --------------------------------------------------------------------------------------------


def _update(states_NHKV: Tensor, rows: Inputs, scale: float) -> tuple[Tensor, Tensor]:
    """One row of each sequence: outputs ``[N, H, R, V]`` and the states after, fresh."""
    states, u_NHV = states_NHKV, rows.v
    if rows.log_decay is not None:
        states = states * faded(rows.log_decay).reshape(*states.shape[:2], -1, 1)
    if rows.beta is not None:
        known_NHV = torch.matmul(rows.k.unsqueeze(-2), states).squeeze(-2)
        u_NHV = rows.beta.unsqueeze(-1) * (u_NHV - known_NHV)
    states = torch.addcmul(states, rows.k.unsqueeze(-1), u_NHV.unsqueeze(-2))
    return torch.matmul(rows.q, states).mul_(scale), states


def _chunk(states_NHKV: Tensor, rows: Inputs, scale: float) -> tuple[Tensor, Tensor]:
    """L rows of each sequence: outputs ``[N, L, H, R, V]`` and the states after, fresh.

    With the delta rule the u of the rows solve ``u_i + sum over j < i of beta_i s_ij u_j = beta_i (v_i - r_i)``: s are the scores of
    the keys with each other, r is what the keys read of the state before.
    """
    q, k, u = rows.q.permute(0, 2, 3, 1, 4), rows.k.transpose(1, 2), rows.v.transpose(1, 2)
    if rows.beta is not None:
        q = torch.cat([k.unsqueeze(2), q], 2)  # keys read as one more query head
    weighed = weigh(q, k, None if rows.log_decay is None else rows.log_decay.transpose(1, 2))
    scores, read = weighed.scores_NHRLL, weighed.read(states_NHKV)
    if rows.beta is not None:
        beta_NHL1 = rows.beta.transpose(1, 2).unsqueeze(-1)
        system = beta_NHL1 * scores[:, :, 0]  # its diagonal counts as 1, whatever is there
        right = beta_NHL1 * (u - read[:, :, 0])
        u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        scores, read = scores[:, :, 1:], read[:, :, 1:]
    out = (read + products(scores, u)).mul_(scale)
    return out.permute(0, 3, 1, 2, 4), weighed.write(states_NHKV, u)


# -- convolution -------------------------------------------------------------------------------------------------


def _addresses(plan: RecurrencePlan, given: int, kept: int) -> NDArray[np.int64]:
    """``[W, T]``: where the inputs of each row lie, oldest first, in the rows of the G given states followed by those of x."""
    offset, rows = given * kept, np.arange(plan.num_rows)
    found = np.empty((kept + 1, plan.num_rows), dtype=np.int64)
    found[kept] = offset + rows
    # What comes before each row: its parent, or the newest row of its given state.
    before = np.where(plan.parents >= 0, offset + plan.parents, plan.given * kept + kept - 1)
    for tap in reversed(range(kept)):
        later = found[tap + 1]
        # A row of a state comes after the one beside it; it is never the oldest, since W - 1 rows are enough for all taps.
        found[tap] = np.where(later >= offset, before[np.maximum(later - offset, 0)], later - 1)
    return found


def _convolve_chains(
    plan: RecurrencePlan,
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    states_GWC: Tensor,
    compute: torch.dtype,
) -> Recurred:
    """Chains one by one: each tap is the whole chain, shifted."""
    taps = len(weight_WC)
    out_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    states: list[Tensor] = []
    for entry, (start, stop) in enumerate(itertools.pairwise(plan.starts.tolist())):
        inputs = torch.cat([states_GWC[entry].to(compute), x_TC[start:stop].to(compute)])
        count = stop - start
        if bias_C is None:
            out = inputs[:count] * weight_WC[0]
        else:
            out = torch.addcmul(bias_C, inputs[:count], weight_WC[0])
        for tap in range(1, taps):
            out.addcmul_(inputs[tap : tap + count], weight_WC[tap])
        out_TC[start:stop] = out
        wanted = plan.wanted[np.searchsorted(plan.wanted, start) : np.searchsorted(plan.wanted, stop)] - start
        index = torch.from_numpy(wanted[:, None] + np.arange(1, taps)).to(x_TC.device)
        states.append(inputs[index].to(states_GWC.dtype))
    return Recurred(out_TC, torch.cat(states))
