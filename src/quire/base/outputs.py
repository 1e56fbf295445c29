"""The results of a request. No torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.base.display import Pictured
from quire.base.errors import QuireError
from quire.base.hints import HintResult
from quire.base.speculation import SpeculationCounts

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprob:
    """Log-probability of one token in the raw distribution (before any sampling parameter)."""

    logprob: float
    rank: int
    """1 is the most likely token."""
    decoded_token: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    """All emitted tokens, a stop token or the tokens of a stop string included."""
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    """The stop string or stop token id at its end, or "context" at the end of the context."""
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token: the chosen one and the most likely ones, by id."""
    error: str | None = None
    """The reason if ``finish_reason`` is "error"."""
    failure: QuireError | None = field(default=None, repr=False, compare=False)
    """The same as an exception, for programs that raise it or use its class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """Times in seconds, on a monotonic clock where absolute."""

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def e2e_latency(self) -> float | None:
        return None if self.finished_time is None else self.finished_time - self.arrival_time


TIERS = ("pool", "memory", "disk", "redis", "object")
"""Where reused state comes from: the pool, then kinds of ``contracts.store.StoreTier``."""


class Miss(enum.StrEnum):
    """Reasons why the state of no more tokens was reused."""

    NONE = "none"
    OTHER_TEXT = "other_text"
    OTHER_ADAPTER = "other_adapter"
    OTHER_SALT = "other_salt"
    EVICTED = "evicted"
    WINDOW = "window"
    NO_CHECKPOINT = "no_checkpoint"
    TOO_EXPENSIVE = "too_expensive"
    DAMAGED = "damaged"
    UNREACHABLE = "unreachable"


MISSES: Mapping[Miss, str] = {
    Miss.NONE: "nothing that was kept begins with more of this prompt",
    Miss.OTHER_TEXT: "token {at} differs from a text that was computed before",
    Miss.OTHER_ADAPTER: "the first {at} tokens were computed under another adapter, which gives another state",
    Miss.OTHER_SALT: "the first {at} tokens were computed under another cache_salt, which nothing is shared with",
    Miss.EVICTED: "the state of the first {at} tokens was there and has been given up",
    Miss.WINDOW: "windows have let go of what a continuation at {at} needs",
    Miss.NO_CHECKPOINT: "{at} tokens were known, and recurrent layers kept no state there",
    Miss.TOO_EXPENSIVE: "to load the state of the first {at} tokens takes longer than to compute it",
    Miss.DAMAGED: "what a tier has of the state of the first {at} tokens is damaged",
    Miss.UNREACHABLE: "a tier that may have more did not answer",
}
"""A sentence for each reason; ``at`` is ``Reuse.missed_at``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reuse:
    """The reuse of a prompt's state at its first admission, and the reason for its extent."""

    cached: int = 0
    """Tokens with reused state: ``RequestOutput.num_cached_tokens``."""
    by_tier: Mapping[str, int] = field(default_factory=dict)
    """Tokens by tier, one of ``TIERS`` each."""
    replayed: int = 0
    """Tokens computed again: ``RequestOutput.num_replayed_tokens``."""
    miss: Miss = Miss.NONE
    missed_at: int | None = None
    """The length of the longest match that was missed. For another text that is the position of the
    first token that differs. None: none longer is known."""
    quote: str = ""
    """The tokens from ``missed_at`` on, in this prompt and in the other text."""

    @property
    def reason(self) -> str:
        """The reason why no more was reused, in a sentence."""
        begin = f"tokens 0..{self.cached - 1} are reused" if self.cached else "no token is reused"
        return f"{begin}; {MISSES[self.miss].format(at=self.missed_at)}{self.quote}"

    def as_dict(self) -> dict[str, Any]:
        """Return it in the form of HTTP replies."""
        return {
            "cached": self.cached,
            "by_tier": dict(self.by_tier),
            "replayed": self.replayed,
            "miss": str(self.miss),
            "missed_at": self.missed_at,
            "reason": self.reason,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Blend:
    """The blending of a prompt: the numbers of tokens with reused and with computed state."""

    blended: int = 0
    """Tokens with the state of a separate computation, moved to their position: approximate."""
    recomputed: int = 0
    """Tokens with such a state that were computed anew nevertheless."""
    exact: int = 0
    """Leading tokens whose state equals a full computation's; all, if nothing was blended."""
    by_tier: Mapping[str, int] = field(default_factory=dict)
    """Tokens with cached state by the kind of their tier."""
    reason: str = ""
    """Reason why nothing was blended."""
    warning: str = ""
    """Reason to doubt the answer: the model is not calibrated. Empty if it is, or if nothing was
    blended."""
    divergence: float | None = None
    """KL divergence of the next token's distribution from that of a full computation, in nats; None
    if it was not measured (``BlendParams.verify``)."""
    unplaced: tuple[str, ...] = ()
    """Paths of marked texts of messages that are no segments, because the chat template does not
    write them unchanged: "messages.0.content.1"."""

    def as_dict(self) -> dict[str, Any]:
        """Return it in the form of HTTP replies."""
        return {
            "blended": self.blended,
            "recomputed": self.recomputed,
            "exact": self.exact,
            "by_tier": dict(self.by_tier),
            "reason": self.reason,
            "warning": self.warning,
            "divergence": self.divergence,
            "unplaced": list(self.unplaced),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmedSegment:
    """The stored state of a segment (``LLM.warm``)."""

    tokens: int
    """Its length."""
    kept: int
    """Number of tokens whose state is stored; 0 if it is too short."""
    computed: int
    """Number of these that ran for it; the others were stored before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput(Pictured):
    """A prompt and its continuations."""

    request_id: str
    prompt: str | None
    """None if token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each token of the prompt, itself and the likeliest in its place, by id (first: None).
    None if not asked for, or if the prompt did not run to its end."""
    num_cached_tokens: int = 0
    """Prompt tokens with reused state."""
    num_replayed_tokens: int = 0
    """Prompt tokens computed again, because their former state was not kept everywhere."""
    cache_note: str = ""
    """The reason for replayed tokens in a sentence; empty if there are none."""
    reuse: Reuse = field(default_factory=Reuse)
    """The tokens whose state was reused, their tiers, and the reason for their number."""
    hints: tuple[HintResult, ...] = ()
    """The result of each hint of the request, after it has ended."""
    blend: Blend | None = None
    """The blending of the prompt; None if it was not requested."""
    speculation: SpeculationCounts | None = None
    """What speculation did for its samples that have ended; None: it was off."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


class RequestOutputs(list[RequestOutput], Pictured):
    """Outputs in the order of their prompts: a list that notebooks draw as a table."""

    __slots__ = ()


EditMode = Literal["exact", "blend"]
"""The state of the tokens after an edit: run again, or blended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EditReport:
    """The result of an edit of a session."""

    removed: int
    """Number of tokens that were removed."""
    added: int
    """Number of tokens in their place."""
    replayed: int
    """Number of other tokens that were run again, all or in part."""
    blended: int = 0
    """Number of other tokens whose state was kept and moved: approximate. Tokens that see none of
    the replaced ones, in a model with windows only, are kept too, and are exact."""
    released: int = 0
    """Number of replayed tokens after the span that a window had dropped: they have no state in the
    layers with windows, so that no edit could keep it."""
    mode: EditMode
    exact: bool
    """Whether all state of the session is the one that its tokens give."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearchSequence:
    """One continuation that a beam search found."""

    tokens: list[int]
    """The prompt and the continuation, as in vLLM."""
    token_ids: list[int]
    """The continuation, with the token that ended it."""
    text: str
    """Text of the prompt and the continuation, as in vLLM."""
    output_text: str
    """Text of the continuation, without the stop token or stop string that ended it."""
    logprobs: list[dict[int, Logprob]]
    """For each token of the continuation, its own log-probability."""
    cum_logprob: float
    """Sum of these log-probabilities."""
    score: float
    """``cum_logprob / len(token_ids) ** length_penalty``."""
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    """The stop string or token id at its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearchOutput:
    """A prompt and the continuations that a beam search found, sorted by score, best first."""

    prompt: str | None
    """None if token ids were given."""
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]
    """At most ``beam_width``; ``finish_reason`` marks those cut short by an error or a cancel."""
    num_cached_tokens: int = 0
    """Prompt tokens with reused state."""
    error: str | None = None
    """The error that ended the search early."""
    failure: QuireError | None = field(default=None, repr=False, compare=False)
    """The same as an exception."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamDelta:
    """The additions of one step of a stream."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
