"""Norms of K, V, latent rows and recurrent states, from the tensors of state files and objects.

Letters: n positions; H heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.config import KV_FORMATS
from quire.base.errors import DataLoss, Unsupported
from quire.contracts.kv_format import PLAIN, Geometry
from quire.contracts.token_views import NormsView
from quire.kv.formats import kv_format
from quire.statefile.container import StateFile

ROWS = ("k", "v", "latent")
ROWS_AT_ONCE = 4096
"""Rows that become float32 at a time."""
_STATE = re.compile(r"state\.(\d{1,4})(?:@(\d{1,16}))?")


@dataclass(slots=True)
class NormParts:
    """What was found of one layer so far."""

    layer: int
    places: list[int] = field(default_factory=list)
    rows: dict[str, list[NDArray[np.float32]]] = field(default_factory=dict)
    states: dict[int, dict[str, NDArray[np.float32]]] = field(default_factory=dict)
    """By position and name."""

    def planes(self, file: StateFile, prefix: str = "") -> dict[str, Tensor]:
        """Return the tensors of a file that hold the layer's rows, as they are stored."""
        start = f"{prefix}layer.{self.layer}."
        names = (name.removeprefix(start) for name in file.names if name.startswith(start))
        return {name: file.tensor(start + name) for name in names if _STATE.fullmatch(name) is None}

    def add_rows(
        self, file: StateFile, prefix: str, ranges: Sequence[range], sequence: Mapping[str, Any] | None = None
    ) -> None:
        """Add a file's rows of the layer, which have these positions. ``sequence``: metadata that
        describe the layer; without, only plain rows can be read. ``DataLoss``: there are more rows
        or fewer. ``Unsupported``: rows of a format that is not known."""
        count = sum(map(len, ranges))
        found = self.planes(file, prefix)
        is_plain = found.keys() <= set(ROWS)
        for name, tensor in found.items():
            if tensor.dim() < 2 or (is_plain and tensor.dim() > 3) or tensor.shape[0] != count:
                raise DataLoss(f"layer {self.layer} has {name} of shape {list(tensor.shape)} for {count} positions")
        if not found:
            return
        if not is_plain:
            found = _expanded(self.layer, found, sequence)
        for name, tensor in found.items():
            self.rows.setdefault(name, []).append(_row_norms(tensor))
        self.places += [position for part in ranges for position in part]

    def add_states(self, file: StateFile, prefix: str, position: int) -> None:
        """Add a file's states of the layer: those at ``position``, and at others that it names."""
        start = f"{prefix}layer.{self.layer}."
        for name in file.names:
            if name.startswith(start) and (found := _STATE.fullmatch(name[len(start) :])) is not None:
                at = position if found[2] is None else int(found[2])
                self.states.setdefault(at, {})[f"state_{found[1]}"] = _state_norms(file.tensor(name))

    def view(self, kind: str, num_tokens: int) -> NormsView:
        """Return all of it. ``DataLoss``: the states at two positions do not have the same form."""
        if self.states:
            places = sorted(self.states)
            named = sorted({name for one in self.states.values() for name in one})
            try:
                norms = {name: np.stack([self.states[place][name] for place in places]) for name in named}
            except (KeyError, ValueError):
                raise DataLoss(f"layer {self.layer} has states of different forms at {places[:8]}") from None
        else:
            places = self.places
            norms = {name: np.concatenate(parts) for name, parts in self.rows.items()}
        return NormsView(
            layer=self.layer,
            kind=kind,
            num_tokens=num_tokens,
            positions=np.array(places, dtype=np.int64),
            norms=norms,
        )


def _expanded(layer: int, planes: Mapping[str, Tensor], sequence: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Return the plain rows of a layer whose planes are of another format."""
    given: Mapping[str, Any] = {}
    if sequence is not None:
        ids = sequence.get("layer_ids") or range(sequence["first_layer"], layer + 1)
        given = dict(zip(ids, sequence["layers"], strict=False)).get(layer, {})
    if (name := given.get("format", PLAIN)) not in KV_FORMATS:
        what = ", ".join(sorted(planes))
        raise Unsupported(
            f"layer {layer} is stored in tensors {what}, and the file names no format of this release for them: a session that has "
            "loaded the state shows its norms"
        )
    latent = "row_dim" in given
    shape = Geometry(
        1 if latent else given["num_kv_heads"], given["row_dim" if latent else "head_dim"], given["value_dim"], latent
    )
    format = kv_format(name, getattr(torch, given["dtype"]))
    stored = {key: (tuple(one.shape[1:]), one.dtype) for key, one in planes.items()}
    if stored != dict(format.planes(shape)):
        raise DataLoss(f"layer {layer} has planes {stored}; the format {name!r} has {dict(format.planes(shape))}")
    found = format.expand(shape, planes)
    return {"latent": found.k.squeeze(1)} if latent else found._asdict()


def layers_in(file: StateFile, prefix: str = "") -> Mapping[int, set[str]]:
    """Return the layers of which a file has tensors, and the names of these without positions."""
    found: dict[int, set[str]] = {}
    pattern = re.compile(re.escape(prefix) + r"layer\.(\d{1,6})\.([a-z]+)(?:\.\d+)?(?:@\d+)?")
    for name in file.names:
        if (match := pattern.fullmatch(name)) is not None:
            found.setdefault(int(match[1]), set()).add(match[2])
    return found


def _row_norms(rows: Tensor) -> NDArray[np.float32]:
    """Return ``[n, H]``; H is 1 of rows without heads."""
    parts = [torch.linalg.vector_norm(part.float(), dim=-1) for part in torch.split(rows, ROWS_AT_ONCE)]
    norms: NDArray[np.float32] = torch.cat(parts).numpy() if parts else np.empty(rows.shape[:-1], dtype=np.float32)
    return norms if norms.ndim == 2 else norms[:, None]


def _state_norms(state: Tensor) -> NDArray[np.float32]:
    """Return ``[H]``; H is 1 of states without three axes. As ``engine.views`` takes them."""
    rows = state.float().flatten(1) if state.dim() == 3 else state.float().reshape(1, -1)
    found: NDArray[np.float32] = torch.linalg.vector_norm(rows, dim=-1).numpy()
    return found
