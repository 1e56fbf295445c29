"""Recurrences in chunk-parallel form, on any device.

*Linear attention.* A sequence is cut into pieces of at most ``PIECE`` rows (``groups``),
and these into chunks. A chunk is a few matrix products: its rows' reading of the state before it,
their reading of each other, and the state after it. The delta rule first replaces the values by the
new part of them, through one triangular system (the WY representation, arXiv:2406.06484, with
decays arXiv:2412.06464). All decays, by column too, use the same code (``decays``). Pieces of
single rows (decodes, branching trees, all rows wanted) are one batched update of the states.

*Convolution.* Decodes are one batched product. Long chains run one by one, by shifted
multiplications. Short chains and trees gather each row's ancestors.

Letters: T new tokens (rows) of the whole batch; G given states; M rows with wanted states; Hq query
heads, H heads of the state, R = Hq / H query heads of each; N pieces; L rows of a piece; K, V sizes
of keys and values; C channels; W taps.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.uploads import uploaded
from quire.contracts.recurrence import Recurred, RecurrencePlan
from quire.kernels.recurrence.decays import Weighed, faded, weigh
from quire.kernels.recurrence.groups import GroupRows, cut
from quire.ops.recurrence import check_convolve, check_linear_attention, promoted, sum_dtype

PIECE = 256
"""Most rows of a piece: preparation once per piece costs little, and padding stays small."""
CHUNK = 32
"""Rows of a chunk: inner products grow with the square; work on the state is once per chunk."""
CACHED = 1 << 20
"""Bytes of states that a CPU updates at a time."""
LONG_CHAIN = 32
"""Mean length of a batch's chains from which each chain is convolved separately."""


class _Change(Protocol):
    def __call__(self, x: Tensor, /, *, blank: bool) -> Tensor: ...


class Inputs(NamedTuple):
    """Inputs of the rows: ``[T, ...]``, ``[N, L, ...]``, or for one row of each sequence
    ``[N, ...]``. q and k may have one head for all heads."""

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
        """Apply ``change(tensor, blank)`` to each; ``blank``: padding must be 0, so that it writes
        nothing and decays nothing."""
        return Inputs(
            change(self.q, blank=False),
            change(self.k, blank=True),
            change(self.v, blank=False),
            None if self.log_decay is None else change(self.log_decay, blank=True),
            None if self.beta is None else change(self.beta, blank=False),
        )


class ChunkedRecurrence:
    """The backend ``torch``: equal to the reference up to rounding, in a few calls per chunk."""

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
        """See the contract; the output has the promoted dtype of q, k, v. ``InvalidArgument``."""
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
        """Write the outputs and return the wanted states, depth by depth."""
        result = states_GHKV.new_empty(len(plan.wanted), *states_GHKV.shape[1:])
        wanted = np.full(plan.num_rows, -1, dtype=np.int64)
        wanted[plan.wanted] = np.arange(len(plan.wanted))
        known: dict[int, tuple[Tensor, int]] = {}
        """By piece of the previous depth: a tensor of states, and the index of the state after the
        piece."""
        for groups in cut(plan, PIECE):
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
                    out_NPHV = rows.room(out_THV)
                    states = _piece(states, taken, scale, out_NPHV)
                    rows.put(out_THV, out_NPHV)
                after.update((piece, (states, index)) for index, piece in enumerate(group.pieces.tolist()))
                targets = wanted[group.last]
                kept = np.flatnonzero(targets >= 0)
                if kept.size:
                    index = uploaded(targets[kept], result.device)
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
            before_TWC, x = _pick(states_GWC, plan.given).to(compute), x_TC.to(compute)
            out_TC = x * weight_WC[-1]
            for tap in range(before_TWC.shape[1]):
                out_TC.addcmul_(before_TWC[:, tap], weight_WC[tap])
            after_TWC = torch.cat([before_TWC[:, 1:], x.unsqueeze(1)], 1)[:, : before_TWC.shape[1]]
            states_MWC = _pick(after_TWC, plan.wanted)
        elif plan.chains and plan.num_rows >= LONG_CHAIN * (len(plan.starts) - 1):
            return _convolve_chains(plan, x_TC, weight_WC, bias, states_GWC, compute)
        else:
            # Rows of the given states come first, then rows of x.
            pool = torch.cat([states_GWC.flatten(0, 1).to(compute), x_TC.to(compute)])
            taps_WT = addresses(plan, *states_GWC.shape[:2])
            index_WT = uploaded(taps_WT, x_TC.device)
            out_TC = pool.index_select(0, index_WT[0]).mul_(weight_WC[0])
            for index_T, weight_C in zip(index_WT[1:], weight_WC[1:], strict=True):
                out_TC.addcmul_(pool.index_select(0, index_T), weight_C)
            states_MWC = pool[uploaded(taps_WT[1:, plan.wanted].T.copy(), x_TC.device)]
        if bias is not None:
            out_TC.add_(bias)
        return Recurred(out_TC.to(x_TC.dtype), states_MWC.to(states_GWC.dtype).contiguous())


# -- states ----------------------------------------------------------------------------------------


def _pick(rows: Tensor, index: NDArray[np.int64]) -> Tensor:
    """Return ``rows[index]``; the tensor itself if the index is all rows in order."""
    if len(index) == len(rows) and bool((index == np.arange(len(rows))).all()):
        return rows
    return rows.index_select(0, uploaded(index, rows.device))


def _gather(places: list[tuple[Tensor, int]]) -> Tensor:
    """Return the states at some places, ``[N, ...]``: a view if one tensor holds just these."""
    tensor = places[0][0]
    if all(other is tensor for other, _ in places):
        if len(places) == 1:
            return tensor[places[0][1]].unsqueeze(0)
        return _pick(tensor, np.array([index for _, index in places]))
    compute = sum_dtype(*(tensor for tensor, _ in places))
    return torch.stack([tensor[index].to(compute) for tensor, index in places])


# -- linear attention ------------------------------------------------------------------------------


def _update(states_NHKV: Tensor, rows: Inputs, scale: float) -> tuple[Tensor, Tensor]:
    """Run one row of each sequence; return outputs ``[N, H, R, V]`` and the states after, fresh.
    Each state is used several times, so CPUs take as many sequences at a time as caches allow."""
    number, heads, _, values = states_NHKV.shape
    decay = None
    if rows.log_decay is not None:
        decay = faded(rows.log_decay).reshape(number, heads, -1, 1)
    states = torch.empty_like(states_NHKV, memory_format=torch.contiguous_format)
    out_NHRV = states.new_empty(number, heads, rows.q.shape[2], values)
    # A row of one head (shared) or of all, as matrices.
    q, k_NHK1, v_NH1V = rows.q, rows.k.unsqueeze(-1), rows.v.unsqueeze(-2)
    beta_NH11 = None if rows.beta is None else rows.beta[..., None, None]
    some = number
    if states.device.type == "cpu":
        some = max(1, CACHED * number // max(1, states.numel() * states.element_size()))
    for start in range(0, number, some):
        part = slice(start, start + some)
        state, k, u = states[part], k_NHK1[part], v_NH1V[part]
        if decay is None:
            state.copy_(states_NHKV[part])
        else:
            torch.mul(states_NHKV[part], decay[part], out=state)
        if beta_NH11 is not None:
            u = (u - torch.matmul(k.mT, state)).mul_(beta_NH11[part])
        state.addcmul_(k, u)
        torch.mul(torch.matmul(q[part], state), scale, out=out_NHRV[part])
    return out_NHRV, states


def _piece(states_NHKV: Tensor, rows: Inputs, scale: float, out_NPHV: Tensor) -> Tensor:
    """Run P rows of each sequence, chunk by chunk, into ``out_NPHV``; return fresh states. With the
    delta rule the rows' u solve ``u_i + sum over j < i of beta_i s_ij u_j = beta_i (v_i - r_i)``: s
    scores keys with each other, r is the keys' reading of the state before."""
    heads, count = states_NHKV.shape[1], out_NPHV.shape[1]
    chunks = -(-count // CHUNK)
    q, k, v, log_decay, beta = rows.mapped(lambda x, blank: _chunked(x, chunks))
    q, v_BXLV = q.movedim(4, 3), v.flatten(1, 2)
    states_XKV = states_NHKV.clone(memory_format=torch.contiguous_format).flatten(0, 1)
    out_BXIV = v.new_empty(chunks, len(states_XKV), q.shape[3] * q.shape[4], v.shape[-1])
    if beta is None:
        for weighed, u_XLV, out in zip(weigh([q], k, log_decay, heads), v_BXLV, out_BXIV, strict=True):
            _read(weighed, 0, states_XKV, out)
            out.baddbmm_(weighed.scores[0], u_XLV, beta=scale, alpha=scale)
            weighed.write_(states_XKV, u_XLV)
    else:
        parts = list(weigh([q, k.unsqueeze(3)], k, log_decay, heads))
        inverse_BXLL = _inverse(torch.stack([weighed.scores[1] for weighed in parts]), beta.flatten(1, 2))
        known = v.new_empty(v_BXLV.shape[1:])
        for weighed, v_XLV, inverse_XLL, out in zip(parts, v_BXLV, inverse_BXLL, out_BXIV, strict=True):
            _read(weighed, 1, states_XKV, known)
            u_XLV = torch.bmm(inverse_XLL, torch.sub(v_XLV, known, out=known))
            _read(weighed, 0, states_XKV, out)
            out.baddbmm_(weighed.scores[0], u_XLV, beta=scale, alpha=scale)
            weighed.write_(states_XKV, u_XLV)
    # [N, B, L, H, R, V]
    found = out_BXIV.view(chunks, *states_NHKV.shape[:2], *q.shape[3:5], -1).permute(1, 0, 4, 2, 3, 5)
    if count == chunks * q.shape[4]:
        out_NPHV.view(found.shape).copy_(found)
    else:
        out_NPHV.copy_(found.reshape(len(states_NHKV), -1, *out_NPHV.shape[2:])[:, :count])
    return states_XKV.view(states_NHKV.shape)


def _chunked(x: Tensor, chunks: int) -> Tensor:
    """Chunk ``[N, P, H, ..]`` as ``[B, N, H, L, ..]``: a view if B divides P, else padded by 0."""
    missing = -x.shape[1] % chunks
    if missing:
        x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1)
    return x.view(x.shape[0], chunks, x.shape[1] // chunks, *x.shape[2:]).transpose(0, 1).transpose(2, 3)


def _read(weighed: Weighed, reader: int, states_XKV: Tensor, out_XIV: Tensor) -> Tensor:
    """Read the states before with a reader's rows, into ``out``."""
    torch.bmm(weighed.readers[reader], states_XKV, out=out_XIV)
    return out_XIV.mul_(weighed.since[reader]) if weighed.since else out_XIV


def _inverse(scores_BXLL: Tensor, beta_BXL: Tensor) -> Tensor:
    """Return ``(I + beta s)^-1 beta`` for the scores below the diagonal, of keys with each other.
    For keys of length 1 and beta up to 2 no entry exceeds 4: contractions of one key, read by
    another. Products with it err no more than solving does."""
    system = scores_BXLL * beta_BXL.unsqueeze(-1)  # The diagonal counts as 1, whatever its values are.
    one = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    inverse: Tensor = torch.linalg.solve_triangular(system, one.expand_as(system), upper=False, unitriangular=True)
    return inverse * beta_BXL.unsqueeze(-2)


# -- convolution -----------------------------------------------------------------------------------


def addresses(plan: RecurrencePlan, given: int, kept: int) -> NDArray[np.int64]:
    """Return ``[W, T]``: indices of each row's inputs, oldest first, in the states' rows, then
    x's."""
    offset, rows = given * kept, np.arange(plan.num_rows)
    found = np.empty((kept + 1, plan.num_rows), dtype=np.int64)
    found[kept] = offset + rows
    # Predecessor of each row: its parent, or the newest row of its given state.
    before = np.where(plan.parents >= 0, offset + plan.parents, plan.given * kept + kept - 1)
    for tap in reversed(range(kept)):
        later = found[tap + 1]
        # Predecessor within a state; never before its oldest row, since W - 1 rows are enough for
        # all taps.
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
    """Convolve chains one by one: each tap is the whole chain, shifted."""
    taps, kept = len(weight_WC), len(weight_WC) - 1
    out_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    size = plan.num_rows
    if x_TC.device.type == "cpu":
        size = max(taps, CACHED // max(1, weight_WC.nbytes // taps))
    states: list[Tensor] = []
    for entry, (start, stop) in enumerate(itertools.pairwise(plan.starts.tolist())):
        window = states_GWC[entry].to(compute)
        for first in range(start, stop, size):
            rows = slice(first, min(first + size, stop))
            # The last inputs before these rows, then the inputs of these rows.
            window = torch.cat([window[len(window) - kept :], x_TC[rows].to(compute)])
            count = rows.stop - first
            if bias_C is None:
                out = window[:count] * weight_WC[0]
            else:
                out = torch.addcmul(bias_C, window[:count], weight_WC[0])
            for tap in range(1, taps):
                out.addcmul_(window[tap : tap + count], weight_WC[tap])
            out_TC[rows] = out
        wanted = plan.wanted[np.searchsorted(plan.wanted, start) : np.searchsorted(plan.wanted, stop)]
        states += [_inputs_until(row + 1, start, x_TC, states_GWC[entry]) for row in wanted.tolist()]
    after = states_GWC.new_empty(len(states), *states_GWC.shape[1:])
    for place, state in zip(after, states, strict=True):
        place.copy_(state)
    return Recurred(out_TC, after)


def _inputs_until(stop: int, start: int, x_TC: Tensor, state_WC: Tensor) -> Tensor:
    """Return a state's worth of inputs before row ``stop`` of a chain from ``start`` on."""
    kept = len(state_WC)
    inputs_WC = x_TC[max(start, stop - kept) : stop]
    return torch.cat([state_WC[len(inputs_WC) :], inputs_WC]) if len(inputs_WC) < kept else inputs_WC
