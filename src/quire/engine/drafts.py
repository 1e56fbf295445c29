"""``Drafts``: chooses the draft tokens of each step, and counts the accepted ones. No torch.

A decode with drafts runs its last token and the drafts behind it, and has the logits of each. Its
tokens are drawn one after the other, as they always are; while one is the next draft, what ran
behind it counts (``EngineSteps``). Drafts change no output.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quire.base.metrics import EngineMetrics
from quire.base.speculation import Speculation, SpeculationCounts
from quire.branches.extension import path_to
from quire.engine.request import Request
from quire.engine.step_builder import ScheduledStep, StepBuilder
from quire.speculation.controller import Controller, Trust
from quire.speculation.feature_reader import FeatureReader, Rows
from quire.speculation.proposer import NO_DRAFT, Context, Draft, Proposer, Remembering, problem_of, proposed

if TYPE_CHECKING:
    from torch import Tensor

    from quire.contracts.kv_state import ModelState
    from quire.grammars.matcher import GrammarMatcher
    from quire.runner.local import StepOutput
    from quire.text.tokenizer import Tokenizer

logger = logging.getLogger("quire.engine")

GRAMMAR = "grammar"
"""The proposer's name where a grammar leaves no choice."""
FORCED = 0.9
"""The chance of a token of a forced text: that the model cuts the text as the tokenizer does."""
STEPS_AHEAD = 8
"""Steps ahead in a row, whose requests have no drafts. Then the tokens are read before the next."""


@dataclass(eq=False, slots=True)
class RequestDrafts:
    """What speculation has done for one request."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    by_proposer: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Drafted and accepted, by proposer."""
    dropped: str = ""
    """The reason why its proposer was dropped."""
    trust: Trust = field(default_factory=Trust)
    verifying: Draft | None = None
    """The drafts of the step under way."""
    before: int = 0
    """Tokens of the output before that step."""
    features: Sequence[Tensor] = ()
    """Of that step: what the proposer reads of the drafts of a tree."""


class Drafts:
    """Chooses the drafts of steps."""

    def __init__(
        self,
        state: ModelState,
        proposer: Proposer,
        options: Speculation,
        *,
        vocab_size: int,
        metrics: EngineMetrics,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """``tokenizer`` gives the tokens of texts that grammars force; None: there are none."""
        self._state, self._options = state, options
        self.use(proposer)
        self._vocab_size, self._metrics, self._tokenizer = vocab_size, metrics, tokenizer
        self.controller = Controller()
        self.are_trees = bool(state.recurrent_ids)
        """Whether chains run as a tree of one path too, whose nodes keep the states of recurrent
        layers."""
        self._requests: dict[Request, RequestDrafts] = {}
        self._trust = Trust()
        self._ahead = 0

    def use(self, proposer: Proposer) -> None:
        """Take the drafts of later steps from this proposer."""
        self._proposer = proposer
        # ``isinstance`` of a protocol looks at each of its members, too slow for each step.
        self._reader = proposer if isinstance(proposer, FeatureReader) else None

    def of(self, request: Request) -> RequestDrafts:
        """Return the counts of drafted and accepted tokens of a request."""
        if (found := self._requests.get(request)) is None:
            found = self._requests[request] = RequestDrafts(trust=Trust(self._trust))
        return found

    def choose(self, batch: StepBuilder, kept: Sequence[tuple[int, ...]] | None) -> list[Draft]:
        """Return the drafts of each request of a step. ``kept``: per request, where recurrent
        states are kept."""
        found = [NO_DRAFT] * len(batch.requests)
        able = [index for index in range(len(found)) if self._may(batch, index, kept)]
        rooms = [self._room(batch.requests[index]) for index in able]
        able = [index for index, room in zip(able, rooms, strict=True) if room > 0]
        rooms = [room for room in rooms if room > 0]
        for index in able:
            # An interrupted step may have left its own.
            self.of(batch.requests[index]).verifying = None
        if not able or batch.budget < 1:
            return found
        decodes = sum(request.branch.remaining == 1 for request in batch.requests)
        rows, most = sum(batch.counts), min(batch.budget, batch.rows - len(able))
        if not self.controller.may_gain(decodes, rows, most):
            return found
        drafts = self._proposed([batch.requests[index] for index in able], rooms, self.controller.least(decodes))
        if not any(draft.tokens for draft in drafts):
            return found
        factors = [self.of(batch.requests[index]).trust.factor for index in able]
        drafts = [draft.best(room, factor) for draft, room, factor in zip(drafts, rooms, factors, strict=True)]
        promises = [draft.promises(factor) for draft, factor in zip(drafts, factors, strict=True)]
        if decodes > 1:
            mosts = [self.of(batch.requests[index]).trust.most_in_batch for index in able]
            promises = [promised[:most] for promised, most in zip(promises, mosts, strict=True)]
        depths = self.controller.depths(promises, decodes=decodes, rows=rows, most=most)
        depths = self._fitting(batch, able, depths, sum(map(len, kept or ())))
        for index, draft, depth in zip(able, drafts, depths, strict=True):
            notes, request = self.of(batch.requests[index]), batch.requests[index]
            if not depth:
                notes.trust.rested()
                continue
            found[index] = notes.verifying = draft.first(depth)
            notes.before = len(request.output.token_ids)
        return found

    def _may(self, batch: StepBuilder, index: int, kept: Sequence[tuple[int, ...]] | None) -> bool:
        """Return whether a request of the step may have drafts."""
        request = batch.requests[index]
        output, params = request.output, request.params
        if params is None or batch.counts[index] != 1 or request.branch.remaining != 1 or not output.token_ids:
            return False
        if output.wants != "last" or not params.speculative or self.of(request).dropped:
            return False
        # A tree keeps no state on its way.
        return not (kept and kept[index])

    def _room(self, request: Request) -> int:
        """Return the most drafts that a request can use."""
        params, tokens, window = request.params, request.branch.tokens, request.branch.window
        assert params is not None
        room = min(self._options.depth, request.asked.limit - len(tokens) - 1)
        if params.max_tokens is not None:
            room = min(room, params.max_tokens - len(request.output.token_ids) - 1)
        if window is not None:
            room = min(room, self._state.largest_step(window.size, window.sink) - 1)
        return room

    def _proposed(self, requests: Sequence[Request], most: Sequence[int], least: float) -> list[Draft]:
        """Return the drafts that are proposed, up to the first that a grammar forbids. A proposer
        that fails is dropped for these requests. ``least``: see ``Context``."""
        try:
            drafts = proposed(self._proposer, [context_of(request, least) for request in requests], most)
        except Exception as error:
            self._drop(requests, error)
            drafts = [NO_DRAFT] * len(requests)
        return [
            self._checked(request, draft, count) for request, draft, count in zip(requests, drafts, most, strict=True)
        ]

    def _drop(self, requests: Sequence[Request], error: Exception) -> None:
        """Leave out the proposer for these requests, from within the handling of its error."""
        logger.warning("the proposer %s failed; these requests go on without it", self._proposer.name, exc_info=True)
        for request in requests:
            self.of(request).dropped = f"the proposer {self._proposer.name} raised {type(error).__name__}: {error}"

    def _checked(self, request: Request, draft: Draft, most: int) -> Draft:
        """Return the part of a draft that can be verified."""
        matcher = request.output.matcher
        if reason := problem_of(draft, self._vocab_size, most):
            self.of(request).dropped = f"the proposer {self._proposer.name} {reason}"
            return NO_DRAFT
        if matcher is None:
            return replace(draft, proposer=self._proposer.name) if draft.tokens else NO_DRAFT
        draft = replace(draft, proposer=self._proposer.name)
        forced = self._forced(matcher)[:most]
        if len(draft.tree.path(forced, draft.tokens)) < len(forced):
            # What the grammar leaves no choice in is surer than what was proposed.
            return Draft(forced, [FORCED] * len(forced), GRAMMAR)
        parents = draft.tree.parents
        kept: set[int] = set()
        for leaf in set(range(len(draft))).difference(parents):
            path = path_to(parents, leaf)
            kept.update(path[: matcher.num_accepted([draft.tokens[node] for node in path])])
        return draft.of(sorted(kept))

    def _forced(self, matcher: GrammarMatcher) -> list[int]:
        """Return the tokens of a text that must come next. The model may cut it otherwise."""
        text = "" if self._tokenizer is None else matcher.forced_text()
        return self._tokenizer.encode_inside(text) if self._tokenizer is not None and text else []

    def _fitting(self, batch: StepBuilder, able: Sequence[int], depths: Sequence[int], kept: int) -> list[int]:
        """Return the depths, or as much of them as there is room for: free pages, and half of the
        slots for recurrent states that the step leaves. ``kept``: slots that it keeps besides."""
        found, spare = list(depths), 0
        if self.are_trees and any(found):
            spare = self._state.spare_states(batch.seqs, batch.counts) - kept
        while any(found):
            counts = list(batch.counts)
            for index, depth in zip(able, found, strict=True):
                counts[index] += depth
            # Each node of a tree has a state.
            nodes = sum(depth + 1 for depth in found if depth)
            roomy = not self.are_trees or 2 * nodes <= spare
            if roomy and not self._state.missing_pages(batch.seqs, counts):
                break
            if max(found) > 1:
                found = [depth // 2 for depth in found]
            else:
                left = sum(found) // 2  # of one draft each, the first half
                found = [int(depth and sum(found[:place]) < left) for place, depth in enumerate(found)]
        return found

    def layers(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """Return the blocks whose outputs the proposer reads of a step of these requests."""
        if self._reader is not None and any(map(self._is_read, requests)):
            return self._reader.layers
        return ()

    def _is_read(self, request: Request) -> bool:
        # Prompts alone, as a session's, are read for what follows.
        wanted = request.params is None or request.params.speculative
        return wanted and not self.of(request).dropped

    def ran_rows(self, scheduled: ScheduledStep, output: StepOutput) -> None:
        """Give the proposer the outputs of the blocks that it reads. One that fails is dropped for
        these requests."""
        if not output.features or self._reader is None:
            return
        counts = [len(chunk.tokens) for chunk in scheduled.step.chunks]
        parts = zip(*(feature_TE.split_with_sizes(counts) for feature_TE in output.features), strict=True)
        read = {}
        for index, (request, extension, features) in enumerate(
            zip(scheduled.requests, scheduled.extensions, parts, strict=True)
        ):
            if not self._is_read(request):
                continue
            tokens = scheduled.step.chunks[index].tokens
            if scheduled.draft(index).parents:
                # Which path of the tree counts is known later.
                self.of(request).features = [one[1:] for one in features]
                tokens, features = tokens[:1], tuple(one[:1] for one in features)
            read[request] = Rows(context_of(request), extension.start, tokens, features)
        self._read(read)

    def _read(self, rows: Mapping[Request, Rows]) -> None:
        """Give the proposer rows of requests. One that fails is dropped for these."""
        assert self._reader is not None
        try:
            self._reader.ran(list(rows.values()))
        except Exception as error:
            self._drop(list(rows), error)

    def record_accepted(self, request: Request) -> None:
        """Record the number of accepted drafts of a request in the step under way."""
        if (notes := self._requests.get(request)) is None or (draft := notes.verifying) is None:
            return
        features, notes.verifying, notes.features = notes.features, None, ()
        path = draft.tree.path(request.output.token_ids[notes.before :], draft.tokens)
        accepted = len(path)
        notes.trust.verified(draft.compared(path), accepted)
        if path and features and self._is_read(request):
            start, tokens = (
                len(request.branch.tokens) - len(request.output.token_ids) + notes.before,
                draft.of(path).tokens,
            )
            rows = Rows(context_of(request), start, tokens, [one[path] for one in features])
            self._read({request: rows})
        notes.drafted += len(draft.tokens)
        notes.accepted += accepted
        notes.steps += 1
        before = notes.by_proposer.get(draft.proposer, (0, 0))
        notes.by_proposer[draft.proposer] = before[0] + len(draft.tokens), before[1] + accepted
        self._metrics.drafted_tokens.inc(len(draft.tokens))
        self._metrics.accepted_tokens.inc(accepted)

    def ran(self, rows: int, decodes: int, seconds: float) -> None:
        """Note the duration of a step of decodes and their drafts."""
        if rows and decodes:
            self.controller.costs.measured(rows, seconds, decodes)

    def may_run_ahead(self) -> bool:
        """Return whether another step may be queued before the tokens of the last one are known.
        Its requests have no drafts."""
        if self._reader is not None:
            return False  # It reads each step, with its tokens.
        self._ahead = (self._ahead + 1) % STEPS_AHEAD
        return self._ahead != 0

    def ended(self, request: Request) -> None:
        """Forget a request that has ended. Its counts go into its output. A proposer that fails at
        that is named there, too."""
        self.record_accepted(request)
        if (notes := self._requests.get(request)) is None:
            return
        if not notes.dropped:
            try:
                self._proposer.ended(context_of(request))
            except Exception as error:
                self._drop([request], error)
        del self._requests[request]
        if request.params is not None:
            request.output.speculation = SpeculationCounts(
                drafted=notes.drafted,
                accepted=notes.accepted,
                steps=notes.steps,
                by_proposer=notes.by_proposer or {self._proposer.name: (0, 0)},
                dropped=notes.dropped,
            )

    def forget(self) -> None:
        """Let proposers forget requests that have ended."""
        if isinstance(self._proposer, Remembering):
            try:
                self._proposer.forget()
            except Exception:
                logger.warning("the proposer %s failed to forget old requests", self._proposer.name, exc_info=True)


def context_of(request: Request, least: float = 0.0) -> Context:
    """Return a request as proposers see it. ``least``: see ``Context``."""
    branch, name = request.branch, (request.request_id, request.asked.index)
    return Context(name, branch.tokens.ids, request.asked.num_prompt, branch.salt, least)
