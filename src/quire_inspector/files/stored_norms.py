"""Norms of K, V, latent rows and recurrent states, from the tensors of state files and objects.

Letters: n positions; H heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import DataLoss
from quire.contracts.token_views import NormsView
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

    def add_rows(self, file: StateFile, prefix: str, ranges: Sequence[range]) -> None:
        """Add a file's rows of the layer, which have these positions. ``DataLoss``: they are more
        or fewer."""
        count = sum(map(len, ranges))
        names = [name for name in ROWS if f"{prefix}layer.{self.layer}.{name}" in file.specs]
        for name in names:
            tensor = file.tensor(f"{prefix}layer.{self.layer}.{name}")
            if tensor.dim() not in (2, 3) or tensor.shape[0] != count:
                raise DataLoss(f"layer {self.layer} has {name} of shape {list(tensor.shape)} for {count} positions")
            self.rows.setdefault(name, []).append(_row_norms(tensor))
        if names:
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
