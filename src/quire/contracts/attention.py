"""How attention runs over pages: planned once for a forward, run for every layer.

A KV state hands a ``ForwardPlan`` to an ``AttentionBackend``, which turns it into whatever it wants to have ready
(index tensors, masks, workspaces); ``run`` is then called for each layer with that layer's tensors. A KV state
knows no kernel, and a kernel knows no sequence.

Letters: B entries of the batch; T new tokens of all entries; S slots of the pool; P page size; Hq, Hkv heads; Dk, Dv head sizes.

An *address* counts the keys of one entry in the order in which its page table holds them: the committed tokens, then the
nodes of its token tree in order of appending. Where there is no tree an address is a position.
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
class KeyRule:
    """What the n new tokens of one entry may see where the order of positions does not decide it: a token tree, a mask."""

    first: int
    """Keys at addresses below are visible as ever: up to the query's own position."""
    allowed: NDArray[np.bool_]
    """``[n, keys - first]``: which of the keys from address ``first`` on each new token may see. Windows still apply."""
    positions: NDArray[np.int64]
    """``[keys - first]``: their positions (siblings in a tree have the same)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardPlan:
    """One ragged batch over one layer class. Entry i has ``counts[i]`` new tokens (the queries) and ``keys[i]`` keys.

    A query at position q sees the keys at positions 0..q, or what the entry's rule allows, less what windows hide:

    * ``lows``: keys at positions below ``lows[t]`` are hidden from row t, except
    * ``sinks``: keys at positions ``sinks[t, 0] <= position < sinks[t, 1]`` are visible too, for the query that is rotated
      at its relative position (``run``'s ``q_sink_THD``). The two sets are disjoint, and rows with an empty range have no
      such part: their sink, if any, lies within the window.

    What rows hold that no row of the entry sees may be anything, NaN too, behind the sink, where rows that left the window
    share its last page; elsewhere such rows of a page that is seen are finite, or lie in a sequence that holds NaN itself.

    So attention is that over the *window part* with ``q_THD``, merged with that over the *sink part* with ``q_sink_THD``.
    """

    page_size: int
    counts: NDArray[np.int64]
    keys: NDArray[np.int64]
    """``[B]``: number of keys of each entry; addresses are 0..keys - 1."""
    origins: NDArray[np.int64]
    """``[B]``: position of address 0: zero, except where the keys are only the new tokens."""
    starts: NDArray[np.int64]
    """``[B + 1]``: rows of entry i are ``starts[i]..starts[i + 1] - 1``."""
    tables: tuple[NDArray[np.int32], ...]
    """Page ids by address. An entry of -1 is a page that no row of the entry sees: it must not be read."""
    positions: NDArray[np.int64]
    """``[T]``: positions of the new tokens."""
    rules: tuple[KeyRule | None, ...]
    """One per entry; None: by position."""
    lows: NDArray[np.int64] | None = None
    """``[T]``; None: nothing is hidden."""
    sinks: NDArray[np.int64] | None = None
    """``[T, 2]``; None: no row has a sink part."""
    device: torch.device

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def num_entries(self) -> int:
        return len(self.tables)

    @property
    def plain(self) -> bool:
        """Whether order of positions decides everything."""
        return self.lows is None and self.sinks is None and not any(self.rules)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores become weights."""

    scale: float
    softcap: float | None = None
    """``softcap * tanh(scale * q k / softcap)``; None: ``scale * q k``."""


class AttentionBackend(Protocol):
    """A way to compute attention over pages. Stateless between forwards."""

    name: str

    def refusal(self, spec: LayerSpec, device: torch.device) -> str:
        """Why this backend cannot run such a layer there; empty if it can."""
        ...

    def fuses(self, spec: LayerSpec, device: torch.device) -> bool:
        """Whether prompts and decodes of such a layer run in kernels that never form the weights of all keys."""
        ...

    def plan(self, plan: ForwardPlan, dtype: torch.dtype) -> Any:
        """What ``run`` needs for this batch, made once per forward and layer class."""
        ...

    def run(
        self,
        prepared: Any,
        q_THD: Tensor,
        new: tuple[Tensor, Tensor] | None,
        k_SHD: Tensor,
        v_SHD: Tensor,
        scoring: Scoring,
        *,
        q_sink_THD: Tensor | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Attention of the new tokens over all keys that the plan lets them see: ``[T, Hq, Dv]``, fresh, contiguous, in
        the dtype of q; 0 for a row that sees no key.

        ``q [T, Hq, Dk]`` is rotated, ``q_sink`` the same at relative positions (given if and only if the plan has
        sinks). ``k_SHD [S, Hkv, Dk]``, ``v_SHD [S, Hkv, Dv]`` is the pool, in which the new rows are already. ``new``: K and V
        of the new tokens, ``[T, Hkv, Dk]`` and ``[T, Hkv, Dv]``, equal to what the last ``counts[i]`` addresses of each
        entry hold (so a prompt need not be gathered); None where these are not the new tokens. ``sinks_H`` float32 ``[Hq]``:
        learned logits that join the softmax without a value.
        """
        ...

    def run_state(
        self,
        prepared: Any,
        q_THD: Tensor,
        new: tuple[Tensor, Tensor] | None,
        k_SHD: Tensor,
        v_SHD: Tensor,
        scoring: Scoring,
        *,
        q_sink_THD: Tensor | None = None,
        coarse: bool = False,
    ) -> AttentionState:
        """The same as an attention state, contiguous, without learned logits. Its lse is good to float32 whatever the
        type of K and V is; ``coarse``: good to that type is enough, for parts of a result that will be rounded to it."""
        ...
