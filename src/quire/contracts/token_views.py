"""Views of one token: probabilities, attention, norms, and the difference of two sequences.

Frozen values of numbers, NumPy arrays and strings, made by ``quire.engine.views``. ``document()``
is the HTTP form: JSON types, arrays as base64 of little-endian values, null for a number that is
infinite or unknown. Log-probabilities, entropies and divergences are in nats.

Letters: n positions; H heads.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.display import Pictured

FORMAT = 1
"""The version of the documents."""


def finite_or_none(value: float | None) -> float | None:
    """Return a number in JSON's range: None if it is not finite."""
    return None if value is None or not math.isfinite(value) else float(value)


def packed_floats(values: NDArray[Any]) -> str:
    """Return float32 values, in C order, as base64."""
    return base64.b64encode(np.ascontiguousarray(values, dtype="<f4").tobytes()).decode()


def packed_positions(values: NDArray[Any]) -> str:
    """Return int32 values as base64."""
    return base64.b64encode(np.ascontiguousarray(values, dtype="<i4").tobytes()).decode()


@dataclass(frozen=True, slots=True)
class TokenChance:
    """The probability of one token at its position."""

    id: int
    text: str | None
    """The token's part of a text; None without a tokenizer."""
    logprob: float
    rank: int
    """1 is the most probable; ties go by lower id."""

    def document(self) -> dict[str, Any]:
        """Return it in JSON types."""
        probability = math.exp(self.logprob)
        chance = {"probability": probability, "logprob": finite_or_none(self.logprob), "rank": self.rank}
        return {"id": self.id, "text": self.text, **chance}


@dataclass(frozen=True, slots=True)
class MaskView:
    """The mask of a structured output under which a token was drawn."""

    kind: str
    """The field of ``StructuredOutputs`` that was given."""
    allowed: int | None
    """Number of allowed tokens; None: not counted, for example if a greedy token needed no mask."""

    def document(self) -> dict[str, Any]:
        """Return it in JSON types."""
        return {"kind": self.kind, "allowed": self.allowed}


@dataclass(frozen=True, slots=True)
class StopView:
    """The end of a generation before a position, and its reason."""

    finish_reason: str
    stop_reason: str | int | None
    """The stop string or token, or "context"."""
    start: int
    """Position at which the generation began."""

    def document(self) -> dict[str, Any]:
        """Return it in JSON types."""
        return {"finish_reason": self.finish_reason, "stop_reason": self.stop_reason, "start": self.start}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChancesView(Pictured):
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

    def document(self) -> dict[str, Any]:
        """Return the document of ``/v1/state/token``."""
        return {
            "format": FORMAT,
            "position": self.position,
            "num_tokens": self.num_tokens,
            "vocab_size": self.vocab_size,
            "id": self.id,
            "text": self.text,
            "token": None if self.token is None else self.token.document(),
            "alternatives": [one.document() for one in self.alternatives],
            "entropy": finite_or_none(self.entropy),
            "computed": self.computed,
            "num_run": self.num_run,
            "exact": self.exact,
            "generated": self.generated,
            "mask": None if self.mask is None else self.mask.document(),
            "stop": None if self.stop is None else self.stop.document(),
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionView(Pictured):
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
        return {
            "format": FORMAT,
            "position": self.position,
            "layer": self.layer,
            "kind": self.kind,
            "num_heads": self.num_heads,
            "heads": list(self.heads),
            "shape": list(self.weights.shape),
            "weights": packed_floats(self.weights),
            "sinks": [float(one) for one in self.sinks],
            "num_run": self.num_run,
            "exact": self.exact,
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormsView(Pictured):
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
        return {
            "format": FORMAT,
            "layer": self.layer,
            "kind": self.kind,
            "num_tokens": self.num_tokens,
            "positions": packed_positions(self.positions),
            "norms": [
                {"name": name, "shape": list(values.shape), "values": packed_floats(values)}
                for name, values in self.norms.items()
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PartingSide:
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

    def document(self) -> dict[str, Any]:
        """Return it in JSON types."""
        return {
            "num_tokens": self.num_tokens,
            "id": self.id,
            "text": self.text,
            "token": None if self.token is None else self.token.document(),
            "other": None if self.other is None else self.other.document(),
            "alternatives": [one.document() for one in self.alternatives],
            "entropy": finite_or_none(self.entropy),
            "exact": self.exact,
            "adapter": self.adapter,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonView(Pictured):
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
        found: Sequence[float | None] = (None, None) if self.divergences is None else self.divergences
        return {
            "format": FORMAT,
            "shared": self.shared,
            "a": self.a.document(),
            "b": self.b.document(),
            "kl_ab": finite_or_none(found[0]),
            "kl_ba": finite_or_none(found[1]),
            "num_run": self.num_run,
        }
