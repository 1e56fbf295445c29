"""The recurrences of recurrent layers, token by token: the definitions.

``ReferenceRecurrence`` goes through the rows in order, each from the state of its parent or from a
given one, as ``contracts.recurrence`` says. ``recurrence.chunked`` must agree up to rounding.

Letters: T new tokens (rows) of the whole batch; G given states; M rows with wanted states; Hq query
heads, H heads of the state, R = Hq / H query heads of each; K, V key and value sizes; C channels; W
taps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.contracts.recurrence import Recurred, RecurrencePlan


def promoted(*tensors: Tensor) -> torch.dtype:
    """Return the dtype that holds the values of all tensors."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def sum_dtype(*tensors: Tensor) -> torch.dtype:
    """Return float32, or float64 if one of the tensors has it."""
    return torch.promote_types(promoted(*tensors), torch.float32)


def check_linear_attention(
    plan: RecurrencePlan,
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    states_GHKV: Tensor,
    log_decay: Tensor | None,
    beta_TH: Tensor | None,
    given: int | None = None,
) -> None:
    """Raise ``InvalidArgument`` if arguments do not fit ``RecurrenceBackend.linear_attention``.

    Checks shapes, dtypes and devices. ``given``: number of given states; None: the length of
    ``states``. Does not read values: that would wait for the device.
    """
    tensors = {"q": q_THK, "k": k_THK, "v": v_THV, "states": states_GHKV}
    _check_forms(tensors, ("[T, Hq, K]", "[T, H, K]", "[T, H, V]", "[G, H, K, V]"))
    rows = plan.num_rows
    _, heads, keys, values = states_GHKV.shape
    if heads == 0 or q_THK.shape[1] == 0 or q_THK.shape[1] % heads:
        raise InvalidArgument(
            f"the number of query heads must be a multiple of the {heads} heads of the states, got {q_THK.shape[1]}"
        )
    _check_shape("q", q_THK, (rows, q_THK.shape[1], keys))
    _check_shape("k", k_THK, (rows, heads, keys))
    _check_shape("v", v_THV, (rows, heads, values))
    if log_decay is not None:
        _check_shape("log_decay", log_decay, (rows, heads), (rows, heads, keys))
        tensors["log_decay"] = log_decay
    if beta_TH is not None:
        _check_shape("beta", beta_TH, (rows, heads))
        tensors["beta"] = beta_TH
    _check_together(plan, tensors, given)


def check_convolve(
    plan: RecurrencePlan,
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    states_GWC: Tensor,
    given: int | None = None,
) -> None:
    """Raise ``InvalidArgument`` if shapes, dtypes or devices do not fit
    ``RecurrenceBackend.convolve``. ``given``: as for ``check_linear_attention``."""
    tensors = {"x": x_TC, "weight": weight_CW, "states": states_GWC}
    _check_forms(tensors, ("[T, C]", "[C, W]", "[G, W - 1, C]"))
    channels, taps = weight_CW.shape
    if taps == 0:
        raise InvalidArgument("weight must be [C, W] with at least one tap, got none")
    _check_shape("x", x_TC, (plan.num_rows, channels))
    _check_shape("states", states_GWC, (states_GWC.shape[0], taps - 1, channels))
    if bias_C is not None:
        _check_shape("bias", bias_C, (channels,))
        tensors["bias"] = bias_C
    _check_together(plan, tensors, given)


def _check_forms(tensors: Mapping[str, Tensor], forms: Sequence[str]) -> None:
    for (name, tensor), form in zip(tensors.items(), forms, strict=True):
        if tensor.dim() != form.count(",") + 1:
            raise InvalidArgument(f"{name} must be {form}, got the shape {list(tensor.shape)}")


def _check_shape(name: str, tensor: Tensor, *accepted: tuple[int, ...]) -> None:
    if tensor.shape not in accepted:
        forms = " or ".join(str(list(shape)) for shape in accepted)
        raise InvalidArgument(f"{name} must have the shape {forms}, got {list(tensor.shape)}")


def _check_together(plan: RecurrencePlan, tensors: Mapping[str, Tensor], given: int | None) -> None:
    device = tensors["states"].device
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise InvalidArgument(f"{name} must be of a floating point type, got {tensor.dtype}")
        if tensor.device != device:
            raise InvalidArgument(f"{name} must be on the device of the states, {device}; it is on {tensor.device}")
    given = tensors["states"].shape[0] if given is None else given
    last = int(plan.given.max(initial=-1))
    if last >= given:
        raise InvalidArgument(f"the plan reads the given state {last}; there are {given}")


class ReferenceRecurrence:
    """The recurrence backend that defines the others: one row at a time."""

    name = "reference"

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
        heads = states_GHKV.shape[1]

        def advance(row: int, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
            q_HRK = q_THK[row].to(compute).reshape(heads, -1, q_THK.shape[2])
            k_HK, u_HV = k_THK[row].to(compute), v_THV[row].to(compute)
            if log_decay is not None:
                # [H, 1, 1], or by column [H, K, 1]
                state_HKV = log_decay[row].to(compute).exp().reshape(heads, -1, 1) * state_HKV
            if beta_TH is not None:
                known_HV = torch.einsum("hkv,hk->hv", state_HKV, k_HK)
                u_HV = beta_TH[row].to(compute).unsqueeze(-1) * (u_HV - known_HV)
            state_HKV = state_HKV + k_HK.unsqueeze(-1) * u_HV.unsqueeze(-2)
            return scale * torch.einsum("hkv,hrk->hrv", state_HKV, q_HRK).flatten(0, 1), state_HKV

        out_THV = v_THV.new_empty(q_THK.shape[0], q_THK.shape[1], v_THV.shape[2], dtype=promoted(q_THK, k_THK, v_THV))
        return _walk(plan, states_GHKV, out_THV, compute, advance)

    def convolve(
        self, plan: RecurrencePlan, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, states_GWC: Tensor
    ) -> Recurred:
        """See the contract. ``InvalidArgument``: shapes, dtypes, devices."""
        check_convolve(plan, x_TC, weight_CW, bias_C, states_GWC)
        compute = sum_dtype(x_TC, states_GWC)
        weight_WC = weight_CW.to(compute).T

        def advance(row: int, state_WC: Tensor) -> tuple[Tensor, Tensor]:
            window_WC = torch.cat([state_WC, x_TC[row : row + 1].to(compute)])
            out_C = (window_WC * weight_WC).sum(0)
            return out_C if bias_C is None else out_C + bias_C.to(compute), window_WC[1:]

        return _walk(plan, states_GWC, torch.empty_like(x_TC, memory_format=torch.contiguous_format), compute, advance)


def _walk(
    plan: RecurrencePlan,
    states: Tensor,
    out: Tensor,
    compute: torch.dtype,
    advance: Callable[[int, Tensor], tuple[Tensor, Tensor]],
) -> Recurred:
    """Visit the rows in order; ``advance(row, state)`` gives output and next state in
    ``compute``."""
    wanted = {row: index for index, row in enumerate(plan.wanted.tolist())}
    parents, given = plan.parents.tolist(), plan.given.tolist()
    children = np.bincount(plan.parents[plan.parents >= 0], minlength=plan.num_rows).tolist()
    after = states.new_empty(len(wanted), *states.shape[1:])
    held: dict[int, Tensor] = {}
    for row, parent in enumerate(parents):
        out[row], state = advance(row, states[given[row]].to(compute) if parent < 0 else held[parent])
        if row in wanted:
            after[wanted[row]] = state
        if children[row]:
            held[row] = state
        if parent >= 0:
            children[parent] -= 1
            if not children[parent]:
                del held[parent]
    return Recurred(out, after)
