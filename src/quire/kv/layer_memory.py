"""One layer's memory of a session as named tensors, to read and to write.

K and V of attention layers (``k``, ``v``), rows of latent layers (``latent``), the states of
recurrent layers (``state_0``, ...).

Letters: n tokens; Hkv KV heads; Dk, Dv head sizes; R columns of a latent row.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument
from quire.base.signatures import shown
from quire.base.types import SeqId
from quire.contracts.kv_state import ModelState
from quire.contracts.layers import LayerSpec, Recurrent
from quire.kv.recurrent import initial_of
from quire.kv.windows import describe_ranges, holds


def names_of(spec: LayerSpec) -> tuple[str, ...]:
    """Return the names of a layer's tensors."""
    if isinstance(spec, Recurrent):
        return tuple(f"state_{index}" for index in range(len(spec.states)))
    return ("latent",) if spec.kind == "latent" else ("k", "v")


def initial(spec: LayerSpec) -> dict[str, Tensor]:
    """Return the states of a recurrent layer before any token."""
    assert isinstance(spec, Recurrent)
    return {name: initial_of(one) for name, one in zip(names_of(spec), spec.states, strict=True)}


def read(kv: ModelState, seq: SeqId, layer: int, *, partly: bool, position: int | None = None) -> dict[str, Tensor]:
    """Return ``k [n, Hkv, Dk]`` and ``v [n, Hkv, Dv]``, or ``latent [n, R]``, as stored; or a
    recurrent layer's states that are kept at ``position`` (None: the present ones).

    ``partly``: a window may have let go of some tokens; then ``positions`` (int64) of those that
    are held are given too.
    """
    spec = kv.layer_spec(layer)
    if isinstance(spec, Recurrent):
        return {name: kv.debug_get(layer, index, seq, position=position) for index, name in enumerate(names_of(spec))}
    if not partly:
        return dict(zip(names_of(spec), _rows(kv, seq, layer, 0, None), strict=True))
    held = kv.held(seq, layer)
    parts = [_rows(kv, seq, layer, part.start, part.stop) for part in held]
    found = {name: torch.cat(rows) for name, rows in zip(names_of(spec), zip(*parts, strict=True), strict=True)}
    device = next(iter(found.values())).device
    return found | {"positions": torch.cat([torch.arange(part.start, part.stop, device=device) for part in held])}


def _rows(kv: ModelState, seq: SeqId, layer: int, start: int, stop: int | None) -> tuple[Tensor, ...]:
    if kv.layer_spec(layer).kind == "latent":
        return (kv.debug_get_kv_mla(seq, start, stop, layer=layer),)
    return kv.debug_get_kv(seq, start, stop, layer=layer)


def placed(spec: LayerSpec, given: Mapping[str, Tensor | None], start: int) -> tuple[int, Mapping[str, Tensor | None]]:
    """Return where rows begin and the tensors without ``positions``, from which that follows if
    they are given. ``InvalidArgument``: they are not one run of positions, one for each row, from
    ``start`` on if that is given."""
    positions = given.get("positions")
    if positions is None or isinstance(spec, Recurrent):
        return start, given
    rows = {name: one for name, one in given.items() if name != "positions"}
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64 or positions.dim() != 1:
        raise InvalidArgument(f"set_kv: positions must be a row of int64, as kv() gives it; got {shown(positions)}")
    if not len(positions):
        raise InvalidArgument("set_kv: positions must have one position for each row, got none")
    cuts = [0, *(torch.nonzero(positions.diff() != 1).flatten() + 1).tolist(), len(positions)]
    if len(cuts) > 2:
        parts = ", ".join(
            f"rows {one}..{stop - 1} with start={int(positions[one])}" for one, stop in pairwise(cuts[:4])
        )
        raise InvalidArgument(f"set_kv: positions are {len(cuts) - 1} runs; write each by itself, as {parts}")
    first = int(positions[0])
    if start not in (0, first):
        raise InvalidArgument(f"set_kv: start {start}, and positions begin with {first}; give one of them")
    for name, one in rows.items():
        if isinstance(one, Tensor) and one.dim() and one.shape[0] != len(positions):
            raise InvalidArgument(f"set_kv: {name} has {one.shape[0]} rows for {len(positions)} positions")
    return first, rows


def check_names(spec: LayerSpec, layer: int, given: Mapping[str, Tensor | None], start: int, length: int) -> int:
    """Return the number of given rows (0 for states). ``InvalidArgument`` unless the tensors are
    the layer's and their rows lie within a session of ``length`` tokens."""
    names, kept = names_of(spec), {name: one for name, one in given.items() if one is not None}
    if not kept or not set(kept) <= set(names):
        raise InvalidArgument(
            f"set_kv: {', '.join(map(repr, kept)) or 'nothing'} given for layer {layer}, a {spec.kind} layer; it has {', '.join(names)}"
        )
    for name, one in kept.items():
        if not isinstance(one, Tensor):
            raise InvalidArgument(f"set_kv: {name} must be a tensor, as kv() gives it; got {type(one).__name__}")
    if isinstance(spec, Recurrent):
        if start:
            raise InvalidArgument(f"set_kv: start {start}; a recurrent layer has one state and no rows, leave it out")
        return 0
    for name, one in kept.items():
        if one.dim() != (2 if name == "latent" else 3):
            raise InvalidArgument(
                f"set_kv: {name} must be a tensor of rows, as kv() gives it; its shape is {list(one.shape)}"
            )
    count = int(next(iter(kept.values())).shape[0])
    if type(start) is not int or start < 0 or start + count > length:
        raise InvalidArgument(f"set_kv: rows {start}..{start + count}, and the session has {length} tokens")
    return count


def checked(
    kv: ModelState, seq: SeqId, layer: int, start: int, count: int, given: Mapping[str, Tensor | None]
) -> dict[str, Tensor]:
    """Return the tensors to write, those that are not given as they are. ``InvalidArgument`` for
    another shape or type and for values that are not finite; ``FailedPrecondition`` for rows that a
    window has let go of."""
    spec = kv.layer_spec(layer)
    if isinstance(spec, Recurrent):
        kept = read(kv, seq, layer, partly=False)
    else:
        held = kv.held(seq, layer)
        if count and not holds(held, range(start, start + count)):
            raise FailedPrecondition(
                f"set_kv: rows {start}..{start + count - 1} of layer {layer}, whose window holds positions {describe_ranges(held)}; "
                "start= is the position of the first row, which positions= of kv() gives too"
            )
        kept = dict(zip(names_of(spec), _rows(kv, seq, layer, start, start + count), strict=True))
    new = {name: one for name, one in given.items() if one is not None}
    for name, one in new.items():
        if one.shape != kept[name].shape or one.dtype != kept[name].dtype:
            raise InvalidArgument(
                f"set_kv: {name} is {one.dtype} {list(one.shape)}; {kept[name].dtype} {list(kept[name].shape)} is needed"
            )
        if not bool(one.isfinite().all()):
            raise InvalidArgument(f"set_kv: {name} holds NaN or infinity; finite numbers are needed")
    return kept | new


def write(kv: ModelState, seq: SeqId, layer: int, start: int, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite rows from ``start`` on, or the present states; other sequences keep theirs."""
    spec = kv.layer_spec(layer)
    if isinstance(spec, Recurrent):
        for index, name in enumerate(names_of(spec)):
            kv.debug_set(layer, index, seq, tensors[name])
    elif spec.kind == "latent":
        kv.debug_set_kv(seq, start, tensors["latent"], layer=layer)
    else:
        kv.debug_set_kv(seq, start, tensors["k"], tensors["v"], layer=layer)
