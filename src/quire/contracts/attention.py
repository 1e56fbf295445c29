"""Attention over pages: planned once for a forward, run for every layer.

A KV state gives a ``ForwardPlan`` to an ``AttentionBackend``. The backend prepares index tensors,
masks and workspaces from it. ``run`` is then called with the tensors of each layer. A KV state
knows no kernel, and a kernel knows no sequence.

Letters: B batch entries; T new tokens of all entries; S slots of the pool; P page size; Hq, Hkv
query and KV heads; Dk, Dv head sizes.

An *address* is the index of a key of one entry in the order of its page table: first the committed
tokens, then the nodes of its token tree in order of appending. Without a tree it is the position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.kv_format import PLAIN, KVView
from quire.contracts.layers import LayerSpec


class AttentionState(NamedTuple):
    """Attention over a set of keys. States over disjoint sets merge (``ops.attention.merge``)."""

    out: Tensor
    """``[T, Hq, Dv]``; 0 for a query that sees no key."""
    lse: Tensor
    """float32 ``[T, Hq]``: natural log of the sum of exponentials; -inf without keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRule:
    """Visibility for the n new tokens of an entry with a token tree or a mask."""

    first: int
    """Keys at lower addresses follow the usual rule: visible up to the query's own position."""
    allowed: NDArray[np.bool_]
    """``[n, keys - first]``: visible keys from ``first`` on for each new token, before windows."""
    positions: NDArray[np.int64]
    """``[keys - first]``: positions of these keys (siblings in a tree share one)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardPlan:
    """A ragged batch over one layer class: entry i has ``counts[i]`` queries, ``keys[i]`` keys.

    The queries are the entry's new tokens, or some of them (``OpenPass.narrow``): then their
    positions have gaps, and the keys are those of all its tokens, also after the last query. A
    query at position q sees the keys at positions 0..q, or the keys that the entry's rule allows.
    Windows then hide some of them:

    * ``lows``: row t does not see positions below ``lows[t]``, except those of its sink.
    * ``sinks``: row t also sees positions ``sinks[t, 0] <= position < sinks[t, 1]``, with the query
      rotated at its relative position (``q_sink_THD`` of ``run``). The two sets of keys are
      disjoint. A row with an empty range has no sink part: any sink is in the window.

    So the *window part* is attended with ``q_THD``, the *sink part* with ``q_sink_THD``; both
    merge.

    Rows that no query of the entry sees are undefined, even NaN, if they are after the sink, where
    evicted rows share the sink's last page. Elsewhere an unseen row of a visible page is finite, or
    its sequence holds NaN itself.
    """

    page_size: int
    counts: NDArray[np.int64]
    keys: NDArray[np.int64]
    """``[B]``: number of keys of each entry; addresses are 0..keys - 1."""
    origins: NDArray[np.int64]
    """``[B]``: position of address 0; not zero only if the keys are just the new tokens."""
    starts: NDArray[np.int64]
    """``[B + 1]``: rows of entry i are ``starts[i]..starts[i + 1] - 1``."""
    tables: tuple[NDArray[np.int32], ...]
    """Page ids by address. -1 is a page that no query of the entry sees; it must not be read."""
    positions: NDArray[np.int64]
    """``[T]``: positions of the queries."""
    rules: tuple[KeyRule | None, ...]
    """One for each entry; None: positions decide."""
    lows: NDArray[np.int64] | None = None
    """``[T]``; None: no key is hidden."""
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
        """Return True if the order of positions alone decides what each query sees."""
        return self.lows is None and self.sinks is None and not any(self.rules)


@dataclass(frozen=True, slots=True)
class Scoring:
    """The map from dot products to scores."""

    scale: float
    softcap: float | None = None
    """``softcap * tanh(scale * q k / softcap)``; None: ``scale * q k``."""


class AttentionBackend(Protocol):
    """Computes attention over pages. It keeps no state between forwards."""

    name: str

    def refusal(self, spec: LayerSpec, device: torch.device, format: str = PLAIN) -> str:
        """Return the reason why this backend cannot run such a layer, with rows of that format
        (``KVFormat.name``), on that device; "" if it can."""

    def fuses(self, spec: LayerSpec, device: torch.device) -> bool:
        """Return True if kernels run such a layer without forming the weights of all keys."""

    def plan(self, plan: ForwardPlan, dtype: torch.dtype) -> Any:
        """Prepare ``run`` for this batch, once for each forward and layer class."""

    def run(
        self,
        prepared: Any,
        q_THD: Tensor,
        new: tuple[Tensor, Tensor] | None,
        view: KVView,
        scoring: Scoring,
        *,
        q_sink_THD: Tensor | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Return attention of the new tokens over all keys that are visible by the plan.

        The result is ``[T, Hq, Dv]``, fresh, contiguous, in the dtype of q; 0 for a row that sees
        no key. ``q [T, Hq, Dk]`` is rotated. ``q_sink`` is the same query at relative positions,
        given if and only if the plan has sinks. ``view`` is the layer's rows in the pool, which
        already holds the new ones; ``Unsupported`` for a format that ``refusal`` names. ``new`` is
        K and V of the queries' own tokens, ``[T, Hkv, Dk]`` and ``[T, Hkv, Dv]``, so that a prompt
        need not be gathered: the last ``counts[i]`` addresses of each entry whose positions end
        there without a gap. A format may round them, so they stand only for plain rows; others are
        read from ``view``. None if the keys are not those of the new tokens. ``sinks_H`` (float32
        ``[Hq]``) are learned logits that join the softmax without a value.
        """

    def run_state(
        self,
        prepared: Any,
        q_THD: Tensor,
        new: tuple[Tensor, Tensor] | None,
        view: KVView,
        scoring: Scoring,
        *,
        q_sink_THD: Tensor | None = None,
        coarse: bool = False,
    ) -> AttentionState:
        """Return the result of ``run`` as a contiguous attention state, without learned logits. The
        lse is accurate to float32 for every dtype of K and V. With ``coarse``, accuracy of that
        dtype is enough: the caller will round the result to it."""
