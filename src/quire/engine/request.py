"""One request, from waiting to finished: what was asked, its branch, the scheduler's notes, and its
output. No torch at run time.

What is left to run of a request is ``branch.remaining``; one token left is a decode.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.adapters.keys import salt_of
from quire.base.errors import QuireError
from quire.base.outputs import FinishReason, Miss
from quire.base.sampling_params import SamplingParams
from quire.base.speculation import SpeculationCounts
from quire.base.token_history import Ids
from quire.base.types import BASE, LogitsWanted
from quire.branches.branch import Branch
from quire.branches.session_branch import SessionBranch

if TYPE_CHECKING:
    from torch import Tensor

    from quire.base.hints import RequestHints
    from quire.blend.chunk_capture import ChunkCapture
    from quire.branches.stored_state import Brought
    from quire.engine.prompt_blend import PromptBlend
    from quire.grammars.matcher import GrammarMatcher
    from quire.sampling.request_sampler import RequestSampler
    from quire.sampling.sampled_tokens import TokenLogprobs
    from quire.sampling.token_logprobs import PromptLogprobs
    from quire.text.detokenizer import IncrementalDetokenizer

OnLogits = Callable[[int, "Tensor"], None]
"""A callback for the first row's position and float32 logits ``[rows, V]`` of adjacent tokens."""

BACKGROUND = 2**31 - 1
"""The priority of what runs only if nothing else does: lower than any other."""


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class ReuseNote:
    """The reuse of state until a request's first admission: tokens that were found, and the longest
    match that was missed."""

    cached: int = 0
    """Tokens of the prompt whose state was there at the first admission."""
    known: int = 0
    """Tokens whose state the prefix cache, or its session, has or had."""
    replayed: int = 0
    """The known tokens without state at the first admission, which ran again."""
    by_tier: dict[str, int] = field(default_factory=dict)
    """Reused tokens whose state came from outside of the pool, by the kind of their tier."""
    missed: Miss = Miss.NONE
    missed_at: int | None = None
    """As in ``quire.base.outputs.Reuse``."""
    there: Ids | None = None
    """For another text: its first tokens from ``missed_at`` on."""

    def count(self, computed: int) -> None:
        """Note the number of tokens found."""
        self.cached = computed
        self.replayed = max(0, self.known - computed)

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """Tokens of ``cached`` by tier; only tiers that had some."""
        found = {"pool": self.cached - sum(self.by_tier.values()), **self.by_tier}
        return {tier: count for tier, count in found.items() if count}

    def miss(self, reason: Miss, at: int | None, there: Ids | None = None) -> None:
        """Note a missed match of ``at`` tokens, unless one at least as long is noted. None, a
        length that is not known, counts as the longest."""
        if self.missed is Miss.NONE or at is None or (self.missed_at is not None and at > self.missed_at):
            self.missed, self.missed_at, self.there = reason, at, there


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedFor:
    """What a caller wants. It does not change."""

    request_id: str = ""
    params: SamplingParams | None = None
    """None: a run without sampling."""
    num_prompt: int = 0
    index: int = 0
    """The number of the sample among its prompt's samples."""
    tail: tuple[int, ...] = ()
    """Tokens that join the session after the prompt has been run, without being run themselves."""
    owner: str = ""
    """The API key among which steps and places are divided; empty: none."""
    hints: RequestHints | None = None
    """The caller's hints about its state, on the first sample of a prompt."""
    stops: tuple[int, ...] = ()
    """Positions, ascending, at which a step ends, so that a state that forgets can be kept
    there."""
    capture: ChunkCapture | None = None
    """The taker of the rows of a chunk while it is computed."""
    limit: int = 0
    """Length at which the context, or what the empty pool holds, ends."""
    forgets: str = ""
    """The reason why state at position ``{0}`` may have to be computed again, from ``{1}``."""
    window: int = 0
    """The rows of the windows by which its tokens are verified (``engine.exact``); 0: none are."""
    guesses: bool = False
    """Whether it guesses tokens of an exact request, and is no request of a user."""
    uncounted: bool = False
    """Whether the tokens of a run without sampling count as no prompt's: others have counted
    them."""
    arrival: float = field(default_factory=time.monotonic)

    @property
    def exact(self) -> bool:
        """Whether its tokens are verified by windows."""
        return self.window > 0


@dataclass(eq=False, slots=True, kw_only=True)
class RequestBranch(Branch):
    """The tokens of a request, and what of them is computed."""

    key: Hashable = None
    """What may share a prefix: salt and adapters (``quire.adapters.keys``)."""
    cacheable: bool = True
    """Whether it may use and feed the prefix cache."""
    reusable: bool = False
    """Whether the prefix cache, or a session, may go back into the middle of it."""
    pinned: bool = False
    """Its state must not be given up: it was asked to stay, or cannot be computed again
    (written)."""
    blend: PromptBlend | None = None
    """How cached state of its segments is used; None: not at all."""
    session: SessionBranch | None = None
    """The owner of the sequence, which gets it back when the request ends."""
    shared: int = 0
    """Tokens that the prompt has in common with ``session``, run under the same adapters."""
    common: int = 0
    """Tokens that it has in common with ``session``."""

    @property
    def salt(self) -> Hashable:
        return salt_of(self.key)

    @property
    def budget_factor(self) -> int:
        """Tokens of it that count as one of a step's: most rows of a blended prompt do not run."""
        return 1 if self.blend is None else self.blend.budget_factor

    @property
    def next_adapter(self) -> int | None:
        """The adapter under which its next token runs."""
        return None if self.runs is BASE else self.runs.at(self.computed)

    def truncate_computed(self, length: int) -> None:
        """See ``Branch``. A prompt that goes back to its first token is blended anew later."""
        Branch.truncate_computed(self, length)
        if self.blend is not None and not length:
            self.blend.end()


@dataclass(eq=False, slots=True, kw_only=True)
class Seat:
    """The scheduler's notes of a request. Others read them."""

    status: Status = Status.WAITING
    priority: int = 0
    """Lower values are admitted earlier among the requests of a key, and preempted later."""
    arrival: int = 0
    """Order of arrival, which decides among equal priorities."""
    admitted: bool = False
    """Whether it was ever admitted."""
    reuse: ReuseNote = field(default_factory=ReuseNote)
    """Where its state came from at the first admission, and why no more was found."""
    question: Any = None
    """The pending look-up of its tokens in the tiers; None: there is none, or it is of no use."""
    branch_points: set[int] = field(default_factory=set)
    """Positions where other prompts part from this one, or where this one parted from others."""
    num_preemptions: int = 0
    short_since: int | None = None
    """The step since which it waits for pages; None: it does not, as far as is known."""
    guess: Request | None = None
    """Of an exact request: what guesses its next tokens."""
    window_turn: int = 0
    """Of an exact request: its last turn to run a window."""
    siblings: list[Request] = field(default_factory=list)
    """Further samples of the same prompt, which fork from this one when the prompt is computed."""


@dataclass(eq=False, slots=True, kw_only=True)
class Output:
    """What comes of a request: logits that are handed out, tokens, text, and its end."""

    wants: LogitsWanted = "last"
    """Logits of the last token, once all are computed (``last``), of every token, or of none."""
    fresh_from: int | None = None
    """Tokens from here on must run, even if cached: their logits are wanted. None: the last one."""
    on_logits: OnLogits | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """The collector of them, on the first sample of a prompt."""
    sampler: RequestSampler | None = None
    detokenizer: IncrementalDetokenizer | None = None
    matcher: GrammarMatcher | None = None
    mask_counts: list[int] = field(default_factory=list)
    """With a matcher: how many tokens the mask of each output token allowed, or ``UNCOUNTED``."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    """The text, in the pieces in which it became final."""
    kept: int | None = None
    """Output tokens before the stop token or stop string; None: all of them, there was no stop."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: QuireError | None = None
    first_token: float | None = None
    last_token: float = 0.0
    finished_at: float | None = None
    num_kept: int = 0
    """Tokens of the chunk that the store has taken."""
    speculation: SpeculationCounts | None = None
    """What speculation did, once it has ended; None: nothing."""
    verification: Request | None = None
    """The full computation of its prompt, to see how far off a blended one is."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(eq=False, slots=True)
class Request:
    """A sequence under way: a sample of a prompt, or a run without sampling."""

    asked: AskedFor
    branch: RequestBranch
    seat: Seat = field(default_factory=Seat)
    output: Output = field(default_factory=Output)

    @property
    def request_id(self) -> str:
        return self.asked.request_id

    @property
    def params(self) -> SamplingParams | None:
        return self.asked.params

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    @property
    def succeeded(self) -> bool:
        """Whether its tokens count. The tokens of a cancelled generation do; a cancelled run is
        undone."""
        reason = self.output.finish_reason
        return reason in ("stop", "length") or (reason == "cancelled" and self.asked.params is not None)

    @property
    def num_prompt_run(self) -> int:
        """Tokens of the prompt whose state exists, or did when its first answer was sampled."""
        num_prompt = self.asked.num_prompt
        over = self.finished or bool(self.output.token_ids)
        return num_prompt if over else min(self.branch.computed, num_prompt)

    @property
    def final_length(self) -> int:
        """The number of tokens whose state exists at its end, at most."""
        params, asked = self.asked.params, self.asked
        if params is None:
            return len(self.branch.tokens)
        return final_length(asked.num_prompt, params.max_tokens, asked.limit)

    @property
    def ready(self) -> bool:
        """Whether it can take part in a step. It cannot while tiers have not answered."""
        question = self.seat.question
        return question is None or question.is_answered

    def admit(self) -> None:
        """Run from now on; find rows to blend."""
        self.seat.status, self.seat.admitted = Status.RUNNING, True
        if self.branch.blend is not None:
            self.branch.blend.begin(self.branch)

    def note_reuse(self) -> None:
        """Count the tokens found for it, until it is admitted."""
        if not self.seat.admitted:
            self.seat.reuse.count(self.branch.computed)

    def note_found(self, found: Brought) -> None:
        """Note the tokens brought from outside of the pool, until it is admitted."""
        if not self.seat.admitted:
            self.seat.reuse.by_tier |= found.by_tier
            if found.miss is not Miss.NONE:
                self.seat.reuse.miss(found.miss, found.length)

    def note_lost(self, miss: Miss, length: int) -> None:
        """Record a miss of ``length`` tokens that a tier did not deliver. An admission that
        expected them counts as none."""
        if self.seat.reuse.by_tier:
            self.seat.reuse.by_tier.clear()
            self.seat.admitted = False
            self.seat.reuse.miss(miss, length)
            self.note_reuse()


def final_length(prompt: int, max_tokens: int | None, limit: int) -> int:
    """Return the computed tokens at a generation's end: all but the last. ``limit`` bounds them."""
    return limit if max_tokens is None else min(limit, prompt + max_tokens - 1)
