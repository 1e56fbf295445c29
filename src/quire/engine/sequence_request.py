"""The engine's record of a sequence under way, and of a session. No torch at run time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol
from weakref import ref

from quire.branches.branch import Branch
from quire.engine.generation_notes import GenerationNote, Notes, counts_of, cut_notes, with_note
from quire.engine.scheduled_request import ScheduledRequest
from quire.errors import QuireError
from quire.hints import PinAccount
from quire.outputs import FinishReason
from quire.sampling_params import SamplingParams, StructuredOutputs
from quire.types import BASE, SeqId

if TYPE_CHECKING:
    from torch import Tensor

    from quire.blend.chunk_capture import ChunkCapture
    from quire.engine.detokenizer import IncrementalDetokenizer
    from quire.engine.grammar_matcher import GrammarMatcher
    from quire.engine.prompt_logprobs import PromptLogprobs
    from quire.engine.request_hints import RequestHints
    from quire.ops.request_sampler import RequestSampler
    from quire.ops.sampled_tokens import TokenLogprobs

OnLogits = Callable[[int, "Tensor"], None]
"""A callback for the first row's position and float32 logits ``[rows, V]`` of adjacent tokens."""


class BranchUser(Protocol):
    """A session, as readers of its branch see it."""

    @property
    def name(self) -> str | None:
        """Return the session's name; None: it has none."""

    @property
    def last_commit(self) -> str | None:
        """Return the id of the commit that the session goes on from; None: there is none."""


@dataclass(eq=False, slots=True)
class SequenceRequest:
    """A sequence under way: a request's sample, or a run without sampling (``params`` is None)."""

    request_id: str
    work: ScheduledRequest
    num_prompt: int
    params: SamplingParams | None
    index: int = 0
    session: SessionBranch | None = None
    """The sequence's owner, which gets it back when the request ends."""
    shared: int = 0
    """Tokens that the prompt has in common with ``session``, run under the same adapters."""
    common: int = 0
    """Tokens that it has in common with ``session``."""
    tail: tuple[int, ...] = ()
    """Tokens that join the session after the prompt has been run, without being run themselves."""
    sampler: RequestSampler | None = None
    detokenizer: IncrementalDetokenizer | None = None
    matcher: GrammarMatcher | None = None
    mask_counts: list[int] = field(default_factory=list)
    """With a matcher: how many tokens the mask of each output token allowed, or ``UNCOUNTED``."""
    prompt_logprobs: PromptLogprobs | None = None
    """What collects them, on the first sample of a prompt."""
    on_logits: OnLogits | None = None
    hints: RequestHints | None = None
    """What its caller said about its state, on the first sample of a prompt."""
    capture: ChunkCapture | None = None
    """What takes the rows of a chunk while it is computed."""
    num_kept: int = 0
    """Tokens of the chunk that the store has taken."""
    verification: SequenceRequest | None = None
    """The full computation of its prompt, to see how far off a blended one is."""
    way_back: SeqId | None = None
    """A fork of the session's sequence as it was lent, if nothing else brings that state back."""
    siblings: list[SequenceRequest] = field(default_factory=list)
    """Further samples of the same prompt, which fork from this one when the prompt is computed."""
    forgets: str = ""
    """The reason why state at position ``{0}`` may have to be computed again, from ``{1}``."""
    limit: int = 0
    """Length at which the context, or what the empty pool holds, ends."""
    arrival: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float = 0.0
    finished_at: float | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    """The text, in the pieces in which it became final."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    kept: int | None = None
    """Output tokens before the stop token or stop string; None: all of them, there was no stop."""
    error: QuireError | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_prompt_run(self) -> int:
        """Tokens of the prompt whose state exists, or did when its first answer was sampled."""
        over = self.finished or bool(self.output_ids)
        return self.num_prompt if over else min(self.work.computed, self.num_prompt)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def succeeded(self) -> bool:
        """Return whether its tokens count. Those of a cancelled generation do; a cancelled run is
        undone."""
        return self.finish_reason in ("stop", "length") or (
            self.finish_reason == "cancelled" and self.params is not None
        )


@dataclass(eq=False, slots=True, kw_only=True)
class SessionBranch(Branch):
    """What a session is between its requests."""

    key: Hashable
    """What may share a prefix with it, beside the adapters: the salt."""
    adapter: int | None = None
    """Under which it goes on, as its last token does; None: the base model."""
    pinned: bool = False
    """The state must not be given up."""
    account: PinAccount | None = None
    """The account for which it is pinned."""
    request: SequenceRequest | None = None
    """The request that works on the sequence now."""
    successor: SessionBranch | None = None
    """The branch that takes its place once it is computed."""
    logits: Tensor | None = None
    """Logits of the next token, float32 ``[V]``, if they were asked for."""
    number: int = field(default_factory=itertools.count(1).__next__)
    """What tells it from all others of the process."""
    user: ref[BranchUser] | None = None
    """The session whose branch it is; None: a call has made it for itself."""
    notes: Notes = ()
    """What is noted of generated tokens."""

    def __post_init__(self) -> None:
        self.runs = BASE.then(0, self.adapter)

    @property
    def salt(self) -> Hashable:
        return self.key

    def become(self, other: Branch, length: int, seq: SeqId | None) -> None:
        """See ``Branch``. The notes of these tokens come with them."""
        Branch.become(self, other, length, seq)
        self.notes = cut_notes(other.notes, length) if isinstance(other, SessionBranch) else ()

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens and their notes."""
        self.tokens.truncate(length)
        self.notes = cut_notes(self.notes, length)

    def note(self, request: SequenceRequest) -> None:
        """Note what a request has made of the session's tokens, which are those of the request."""
        self.notes = cut_notes(self.notes, request.common)
        if request.params is None or request.finish_reason is None:
            return
        kept = len(request.output_ids) if request.kept is None else request.kept
        given = request.params.structured_outputs
        form = given if isinstance(given, StructuredOutputs) else None
        made = GenerationNote(
            request.num_prompt,
            request.num_prompt + kept,
            request.finish_reason,
            request.stop_reason,
            "" if form is None else next(iter(form.forms)),
            counts_of(request.mask_counts),
        )
        self.notes = with_note(self.notes, made)

    @property
    def busy(self) -> bool:
        """Return whether some call works on it, or on its successor."""
        return self.request is not None or self.successor is not None

    @property
    def droppable(self) -> bool:
        """Return whether its pages may be taken: no request uses them, it is not pinned, and
        computing gives its state again."""
        return self.seq is not None and not (self.request is not None or self.pinned or self.modified)
