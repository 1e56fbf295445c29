"""How attention runs over pages: planned once for a forward, run for every layer.

A KV state hands a ``ForwardPlan`` to an ``AttentionBackend``, which turns it into whatever it wants to have ready
(index tensors, masks, workspaces); ``run`` is then called for each layer with that layer's tensors. A KV state
knows no kernel, and a kernel knows no sequence.

Letters: B entries of the batch; T new tokens of all entries; S slots of the pool; P page size; Hq, Hkv heads; Dk, Dv head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.layers import LayerSpec


class AttentionState(NamedTuple):
    """Attention over some set of keys. States over disjoint sets merge (see ``ops.attention.merge``)."""

    out: Tensor
    """``[T, Hq, Dv]``; 0 where a query sees no key."""
    lse: Tensor
    """``[T, Hq]`` float32, natural logarithm of the sum of exponentials; -inf where a query sees no key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardPlan:
    """One ragged batch over one layer class. Entry i has ``counts[i]`` new tokens behind ``pasts[i]`` stored ones."""

    page_size: int
    counts: NDArray[np.int64]
    pasts: NDArray[np.int64]
    starts: NDArray[np.int64]
    """``[B + 1]``: rows of entry i are ``starts[i]..starts[i + 1] - 1``."""
    tables: tuple[NDArray[np.int32], ...]
    """Page ids of each entry, for old and new tokens; a query at position p sees keys 0..p."""
    positions_T: Tensor
    """int64 ``[T]`` on the device: positions of the new tokens."""
    slots_T: Tensor
    """int64 ``[T]`` on the device: where the new tokens' rows are stored."""
    max_position: int
    device: torch.device

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def num_entries(self) -> int:
        return len(self.tables)


class AttentionBackend(Protocol):
    """A way to compute attention over pages. Stateless between forwards."""

    name: str

    def refusal(self, spec: LayerSpec, device: torch.device) -> str:
        """Why this backend cannot run such a layer there; empty if it can."""
        ...

    def plan(self, plan: ForwardPlan, dtype: torch.dtype) -> Any:
        """What ``run`` needs for this batch, made once per forward and layer class."""
        ...

    def run(
        self,
        prepared: Any,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        k_SHD: Tensor,
        v_SHD: Tensor,
        scale: float,
    ) -> Tensor:
        """Causal attention of the new tokens over all stored ones, themselves included.

        ``q [T, Hq, Dk]``, ``k [T, Hkv, Dk]``, ``v [T, Hkv, Dv]`` are the new rows, rotated; they are in the pool already:
        ``k_SHD [S, Hkv, Dk]``, ``v_SHD [S, Hkv, Dv]``. Returns a fresh contiguous ``[T, Hq, Dv]`` in the dtype of q.
        """
        ...
