"""Views of one token: probabilities, attention, norms, and the difference of two sequences.

Frozen values of numbers, NumPy arrays and strings, made by ``quire.engine.views``. ``document()``
is the HTTP form. Log-probabilities, entropies and divergences are in nats.

Letters: n positions; H heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.display import Pictured
from quire.base.documents import Document, View, plain


@dataclass(frozen=True, slots=True)
class TokenChance(Document):
    """The probability of one token at its position."""

    id: int
    text: str | None
    """The token's part of a text; None without a tokenizer."""
    logprob: float
    rank: int
    """1 is the most probable; ties go by lower id."""

    def document(self) -> dict[str, Any]:
        """See ``Document``; it has the probability too."""
        return Document.document(self) | {"probability": math.exp(self.logprob)}


@dataclass(frozen=True, slots=True)
class MaskView(Document):
    """The mask of a structured output under which a token was drawn."""

    kind: str
    """The field of ``StructuredOutputs`` that was given."""
    allowed: int | None
    """Number of allowed tokens; None: not counted, for example if a greedy token needed no mask."""


@dataclass(frozen=True, slots=True)
class StopView(Document):
    """The end of a generation before a position, and its reason."""

    finish_reason: str
    stop_reason: str | int | None
    """The stop string or token, or "context"."""
    start: int
    """Position at which the generation began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChancesView(View, Pictured):
    """The token at a position, and the model's distribution there."""

    position: int
    num_tokens: int
    """Number of tokens of the sequence. At this position there is none yet."""
    vocab_size: int
    token: TokenChance | None
    """None: at the end, at an embedding, and for the first token, which has no predecessor."""
    id: int | None
    """The id of the token; None at the end."""
    text: str | None
    alternatives: tuple[TokenChance, ...]
    """The most probable tokens there, by rank; none at position 0."""
    entropy: float | None
    """Entropy of the distribution, in nats."""
    computed: bool
    """Whether the distribution was computed now."""
    num_run: int
    """Number of tokens that ran for it: 1 if the state before was available."""
    exact: bool
    """Whether the state before is the one that its tokens give: not written into, blended or
    converted."""
    generated: bool
    """Whether the token is recorded as generated, and not as given."""
    mask: MaskView | None
    stop: StopView | None
    """The end of a generation right before the position; None: none is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionView(View, Pictured):
    """The attention of one token at one layer: the weights of its query over all positions up to
    it."""

    position: int
    layer: int
    kind: str
    """"full", "window" or "latent"."""
    num_heads: int
    """Query heads of the layer."""
    heads: tuple[int, ...]
    """The heads of the rows."""
    weights: NDArray[np.float32]
    """``[H, n]``, n = position + 1; 0 for positions that the query does not see."""
    sinks: NDArray[np.float32]
    """``[H]``: the share of learned sink logits. Together with it the weights of a head sum to
    1."""
    num_run: int
    """Number of tokens that ran for it, the query included."""
    exact: bool
    """As in ``ChancesView``."""

    def document(self) -> dict[str, Any]:
        """Return the document of ``/v1/state/attention``."""
        return View.document(self) | {"shape": list(self.weights.shape), "sinks": self.sinks.tolist()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormsView(View, Pictured):
    """Euclidean norms of a layer's state: of rows by position, or of recurrent states."""

    layer: int
    kind: str
    """The kind of the layer: "full", "window", "latent" or "recurrent"."""
    num_tokens: int
    positions: NDArray[np.int64]
    """``[n]``, ascending: positions of the rows in the pool, or of the kept states."""
    norms: Mapping[str, NDArray[np.float32]]
    """``[n, H]`` by name: ``k`` and ``v`` by KV head, ``latent`` of whole rows (H = 1), ``state_0``
    and so on by the first axis of states with three axes (H = 1 for others)."""

    def document(self) -> dict[str, Any]:
        """Return the document of ``/v1/state/norms``."""
        norms = [
            {"name": name, "shape": list(values.shape), "values": plain(values)} for name, values in self.norms.items()
        ]
        return View.document(self) | {"norms": norms}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartingSide(Document):
    """One side of two sequences at their first difference."""

    num_tokens: int
    token: TokenChance | None
    """Its next token, with its probability after its own state; None: it ends there, or the token
    is an embedding or the first one."""
    id: int | None
    """The id of its next token; None: it ends there."""
    text: str | None
    other: TokenChance | None
    """The other side's next token, with its probability after this side's state."""
    alternatives: tuple[TokenChance, ...]
    entropy: float | None
    exact: bool
    """As in ``ChancesView``."""
    adapter: str | None
    """The name of the adapter under which its last shared token ran; None: the base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonView(View, Pictured):
    """The first difference of two sequences, with both sides' distributions there."""

    shared: int
    """Number of tokens that both begin with."""
    a: PartingSide
    b: PartingSide
    divergences: tuple[float, float] | None
    """KL(a || b) and KL(b || a) of the next token after the shared ones, in nats; None: nothing is
    shared."""
    num_run: int
    """Number of tokens that ran for it."""

    def document(self) -> dict[str, Any]:
        """Return the document of ``/v1/state/compare``."""
        found = View.document(self)
        one, other = found.pop("divergences") or (None, None)
        return {**found, "kl_ab": one, "kl_ba": other}
