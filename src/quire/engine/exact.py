"""Exact requests: their tokens are those of a run alone, to the bit. No torch.

Where rows of a model know the rows beside them, the tokens of a step depend on its batch. So the
tokens of an exact request count only once a *window* has verified them (arXiv 2601.17768): a
forward of one sequence alone, of a fixed number of rows, which begins at a multiple of that number.
Row i of it depends on the first i tokens only, whatever stands behind it. The state at the
beginning of each window is made by windows too, so it is a function of the tokens before.

What a window verifies is guessed as the batch falls: a *guess* is another request, on a fork of the
exact one, which runs in the steps of all, until the window is full. Then the window runs on a fork,
and the request draws from its logits, one token after the other, while the next one is the guessed
one. If all are, the fork becomes the request's sequence. If not, it goes, the token drawn stands,
and another guess begins behind it. So nothing is ever taken back from the request itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from quire.adapters.keys import AdapterKey, salt_of
from quire.base.errors import FailedPrecondition, PoolExhausted, Unsupported
from quire.base.sampling_params import SamplingParams
from quire.base.token_history import Ids
from quire.base.types import BASE, LogitsWanted, Step
from quire.branches.extension import Extension
from quire.branches.session_branch import SessionBranch
from quire.branches.session_branches import SessionBranches
from quire.engine.request import AskedFor, Output, Request, RequestBranch, Seat, Status
from quire.engine.scheduler import Scheduler

WINDOW = 32
"""Rows of a window, in whole pages."""
LARGEST_PAGE = 64
"""Larger pages do not widen windows: a fork then copies the page that it continues."""
FILLING = 0
"""The token of rows behind the last one that is known or guessed."""


def window_size(page_size: int, step_tokens: int) -> int:
    """Return the rows of a window. ``step_tokens``: most tokens of a forward."""
    page = page_size if page_size <= LARGEST_PAGE else 1
    size = -(-WINDOW // page) * page
    return size if size <= step_tokens else max(1, step_tokens // page * page or step_tokens)


def exact_key(key: Hashable) -> AdapterKey:
    """Return the prefix cache's key of an exact request with windows, which shares with such
    requests only."""
    runs = key.runs if isinstance(key, AdapterKey) else ()
    return AdapterKey(salt_of(key), runs, exact=True)


@dataclass(eq=False, slots=True)
class ExactWindow:
    """A forward of one exact request."""

    request: Request
    start: int
    tokens: Ids
    """Those of its rows."""
    extension: Extension
    """On a fork."""
    draws: bool
    """Whether tokens are drawn from it: not within a prompt."""

    @property
    def step(self) -> Step:
        logits: LogitsWanted = "all" if self.draws else "none"
        return Step(chunks=(self.extension.chunk(self.tokens, logits),))

    @property
    def first_row(self) -> int:
        """The row behind which the next token is drawn."""
        return len(self.request.branch.tokens) - 1 - self.start

    def is_next(self, row: int) -> bool:
        """Return whether a row exists, whose token is the one that the request has drawn."""
        ids = self.request.branch.tokens.ids
        return row < len(self.tokens) and int(ids[self.start + row]) == int(self.tokens[row])

    @property
    def is_right(self) -> bool:
        """Whether all of its rows have the request's tokens."""
        found = self.request.branch.tokens.ids[self.start : self.start + len(self.tokens)]
        return np.array_equal(found, self.tokens)


@dataclass(eq=False, slots=True)
class ExactWindows:
    """Chooses the windows of an engine's exact requests, and has them guessed."""

    branches: SessionBranches
    scheduler: Scheduler
    size: int
    dependence: str
    """What makes rows depend on others; empty: nothing does, and all requests are exact."""
    refusal: str = ""
    """Why not even windows are exact: a row depends on which tokens stand behind it; empty: it does
    not."""
    _turns: int = field(default=0, init=False)

    def has_windows(
        self,
        params: SamplingParams,
        tokens: Ids,
        session: SessionBranch | None,
        *,
        adapter: int | None,
        blended: bool,
    ) -> bool:
        """Return whether a new exact request has windows: it does, unless its rows depend on no
        others. ``Unsupported`` or ``FailedPrecondition`` where its tokens cannot be exact."""
        runs = BASE.then(0, adapter) if session is None else session.runs.then(len(session.tokens), session.adapter)
        windows = bool(self.dependence) or runs != BASE
        reason = ""
        if windows and self.refusal:
            reason = self.refusal
        elif blended:
            reason = "a blended prompt's state is not what its tokens give"
        elif tokens.size and int(tokens.min()) < 0:
            reason = "windows do not run the embeddings of images and sounds"
        elif session is not None and session.window is not None:
            reason = "the session keeps a window of its tokens, whose state depends on how they ran"
        elif windows and len(runs.runs) > 1:
            reason = "tokens of the session ran under several adapters, and a window runs under one"
        elif windows and params.prompt_logprobs is not None:
            reason = "windows draw from the last token of a prompt on; leave prompt_logprobs out"
        if reason:
            raise Unsupported(f"exact: {reason}", field="exact")
        if session is not None and session.modified:
            raise FailedPrecondition(
                "exact: the session's state was written into by set_kv, and is not what its tokens give", field="exact"
            )
        return windows

    def next(self) -> Request | None:
        """Return the request whose window is full, in turns, and begin guesses of the others."""
        due = [one for one in list(self.scheduler.running) if one.asked.exact and self._is_due(one)]
        if not due:
            return None
        found = min(due, key=lambda one: one.seat.window_turn)
        self._turns += 1
        found.seat.window_turn = self._turns
        self.scheduler.queues.shares.charge(Counter({found.asked.owner: self.size}))
        return found

    @contextmanager
    def window(self, request: Request) -> Iterator[ExactWindow]:
        """Make the window of a request. At the end its fork becomes the request's sequence, if all
        its rows are right, and is removed otherwise. ``PoolExhausted`` without room."""
        branch, guess = request.branch, request.seat.guess
        start, end = branch.computed, self._end(request)
        filled: list[int] = branch.tokens.ids[start:end].tolist()
        if start + len(filled) < end:
            filled += [] if guess is None else guess.output.token_ids
            filled += [FILLING] * (end - start - len(filled))
            request.seat.guess = None
        assert branch.seq is not None
        fork = RequestBranch(tokens=branch.tokens, runs=branch.runs, seq=self.branches.fork_of(branch.seq))
        assert fork.seq is not None
        try:
            if missing := self.scheduler.room_for(request, fork.seq, end - start):
                raise PoolExhausted(
                    f"exact: a window of {end - start} tokens is short of {missing} pages with nothing left to give up; "
                    "close or unpin sessions, or give a larger kv_cache_memory"
                )
            tokens = np.array(filled[: end - start], dtype=np.int64)
            window = ExactWindow(request, start, tokens, Extension(fork, start, branch.runs), len(branch.tokens) <= end)
            yield window
            if not request.finished and window.is_right:
                self._replace(request, fork, end)
        finally:
            if fork.seq is not None:
                self.branches.remove(fork.seq)

    def _replace(self, request: Request, fork: RequestBranch, end: int) -> None:
        """Let a fork be the sequence of a request, which prompts find now."""
        branch, cache = request.branch, self.branches.cache
        assert branch.seq is not None
        shared = cache is not None and branch.seq in cache
        if cache is not None and shared:
            cache.remove(branch.seq)
        self.branches.remove(branch.seq)
        branch.seq, fork.seq, branch.computed = fork.seq, None, end
        if shared:
            self.branches.share(branch, branch.key, live=True)

    def _end(self, request: Request) -> int:
        """Return the end of the window under way. The last token of a context does not run."""
        return min(request.branch.computed + self.size, request.asked.limit - 1)

    def _is_due(self, request: Request) -> bool:
        """Return whether a request's window can run. If tokens are missing, they are guessed."""
        branch, seat = request.branch, request.seat
        if branch.seq is None or not request.ready:
            return False
        if len(branch.tokens) >= self._end(request):
            return True
        if seat.guess is None:
            seat.guess = self._guess(request)
        return seat.guess is None or seat.guess.finished

    def _guess(self, request: Request) -> Request | None:
        """Begin to guess the missing tokens of a window; None: the next one is the last."""
        asked, branch, output, params = request.asked, request.branch, request.output, request.params
        assert branch.seq is not None
        assert params is not None
        assert output.sampler is not None
        count = self._end(request) - len(branch.tokens)
        if params.max_tokens is not None:
            count = min(count, params.max_tokens - len(output.token_ids) - 1)
        if count < 1:
            return None
        early = min(count, max(0, params.min_tokens - len(output.token_ids)))
        params = params.replace(
            n=1, max_tokens=count, min_tokens=early, stop=None, logprobs=None, prompt_logprobs=None, exact=False
        )
        guess = Request(
            AskedFor(
                request_id=f"{asked.request_id}/guess",
                params=params,
                num_prompt=len(branch.tokens),
                index=asked.index,
                owner=asked.owner,
                limit=asked.limit,
                forgets=asked.forgets,
                guesses=True,
            ),
            RequestBranch(
                tokens=branch.tokens.fork(),
                key=branch.key,
                runs=branch.runs,
                cacheable=False,
                seq=self.branches.fork_of(branch.seq),
                computed=branch.computed,
            ),
            Seat(priority=request.seat.priority, status=Status.RUNNING),
            Output(
                sampler=output.sampler.fork(params), matcher=None if output.matcher is None else output.matcher.fork()
            ),
        )
        self.scheduler.run(guess)
        return guess
