"""Checks of the tensors that verbs are given, and results padded or written to ``out=``.

Letters: T new tokens; N >= T rows of a padded tensor; Hq query heads; Dv size of a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.contracts.attention import AttentionState
from quire.kv.parts import StateParts


def check_type(state: StateParts, name: str, tensor: Tensor) -> None:
    """Raise ``InvalidArgument`` unless the tensor has the state's dtype and device."""
    if tensor.dtype != state.paged.dtype or tensor.device.type != state.device.type:
        raise InvalidArgument(
            f"{name} is {tensor.dtype} on {tensor.device}; {state.paged.dtype} on {state.device} is needed"
        )


def check_states(verb: str, o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> None:
    """Raise ``InvalidArgument`` unless these are two attention states over the same queries."""
    if o1.dim() != 3 or o1.shape != o2.shape or o1.dtype != o2.dtype or not o1.is_floating_point():
        raise InvalidArgument(
            f"{verb}: o1 is {o1.dtype} {tuple(o1.shape)} and o2 {o2.dtype} {tuple(o2.shape)}; two of one shape [N, Hq, Dv] "
            "and floating type are needed"
        )
    for name, lse in (("lse1", lse1), ("lse2", lse2)):
        if lse.shape != o1.shape[:2] or lse.dtype not in (torch.float32, torch.float64):
            raise InvalidArgument(
                f"{verb}: {name} is {lse.dtype} {tuple(lse.shape)}; torch.float32 {tuple(o1.shape[:2])} is needed"
            )
    devices = {tensor.device for tensor in (o1, lse1, o2, lse2)}
    if len(devices) > 1:
        raise InvalidArgument(f"{verb}: o1, lse1, o2 and lse2 are on {sorted(map(str, devices))}; one device is needed")


def padded(result: Tensor, rows: int, fill: float, out: Tensor | None) -> Tensor:
    """Return ``result`` in ``out``, whose further rows stay; or with further rows of ``fill``."""
    tokens = result.shape[0]
    if out is not None:
        out[:tokens] = result
        return out
    if rows == tokens:
        return result
    return torch.cat((result, result.new_full((rows - tokens, *result.shape[1:]), fill)))


def padded_state(found: AttentionState, rows: int, out: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Return the same for both parts of an attention state."""
    result, lse = (None, None) if out is None else out
    return padded(found.out, rows, 0.0, result), padded(found.lse, rows, -torch.inf, lse)


def check_state_out(
    out: tuple[Tensor, Tensor] | None, shape: tuple[int, int, int], dtype: torch.dtype, sources: Sequence[Tensor]
) -> None:
    """Raise ``InvalidArgument`` unless ``out`` is None or takes a state of this shape."""
    if out is None:
        return
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise InvalidArgument("out must be a pair of tensors, for the output and the log-sum-exp")
    for source in sources:
        check_out(out[0], shape, dtype, source)
        check_out(out[1], shape[:2], torch.promote_types(dtype, torch.float32), source)
    check_apart(out[0], out[1])


def filled(out: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ``out``, which takes what was found; ``InvalidArgument`` before if it cannot."""
    for given, value in zip(out, found, strict=True):
        check_out(given, tuple(value.shape), dtype, value)
    check_apart(out[0], out[1])
    for given, value in zip(out, found, strict=True):
        given.copy_(value)
    return out


def check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, source: Tensor) -> None:
    """Raise ``InvalidArgument`` unless ``out`` can take a result of this shape and type."""
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != source.device:
        raise InvalidArgument(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}; {dtype} {shape} on {source.device} is needed"
        )
    check_apart(out, source)


def check_apart(out: Tensor, source: Tensor) -> None:
    """Raise ``InvalidArgument`` if the two share memory."""
    (low, high), (first, last) = address_range(out), address_range(source)
    if max(low, first) < min(high, last):
        raise InvalidArgument("out shares memory with an input; give a tensor of its own")


def address_range(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's first byte and one past its last; an empty range without elements."""
    first = tensor.data_ptr()
    if tensor.numel() == 0:
        return first, first
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.element_size()
