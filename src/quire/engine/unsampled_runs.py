"""Requests without sampling: sessions that take tokens in, prefixes and chunks computed ahead."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.branches.history import Ids, TokenHistory
from quire.branches.media import NO_MEDIA, Media
from quire.engine.blending import chunks_of
from quire.engine.prompt_blend import PromptBlend
from quire.engine.request_book import RequestBook
from quire.engine.scheduled_request import BACKGROUND, ScheduledRequest
from quire.engine.sequence_request import OnLogits, SequenceRequest, SessionBranch
from quire.engine.session_branches import media_of
from quire.errors import FailedPrecondition, QuireError
from quire.hints import NO_HINTS, CacheHints
from quire.types import BASE

logger = logging.getLogger("quire.engine")


class UnsampledRuns(RequestBook):
    """The requests of an engine, and those whose state alone is wanted."""

    def submit_run(
        self,
        session: SessionBranch,
        tokens: NDArray[np.int64],
        *,
        tail: Sequence[int] = (),
        media: Media = NO_MEDIA,
        on_logits: OnLogits | None = None,
        fresh_from: int | None = None,
        all_logits: bool = False,
        arrival: int | None = None,
        blend: PromptBlend | None = None,
        priority: int = 0,
    ) -> SequenceRequest:
        """Queue a run without sampling, after which the session's tokens are these and ``tail``.

        ``on_logits`` gets the logits of the last token, or with ``all_logits`` of every one that
        runs: at least those from ``fresh_from`` on. A ``QuireError`` from it ends the request.
        ``arrival`` is the place in the queue of an earlier request that this one continues.
        ``media`` is as in ``submit``, of the tail too. ``blend``: what gives rows of some tokens.
        """
        media = media_of(session, tokens, media)
        self.checks_of(session).length(len(tokens) + len(tail), None)
        with self.lock:
            self.pins.check(session, len(tokens), session.account)
            work = ScheduledRequest(
                tokens=TokenHistory(tokens, media),
                reusable=True,
                wants="none" if on_logits is None else ("all" if all_logits else "last"),
                fresh_from=fresh_from,
                blend=blend,
                priority=priority,
            )
            request = SequenceRequest(self._name(None), work, len(tokens), None, tail=tuple(tail), on_logits=on_logits)
            self.branches.lend(session, request)
            self._enqueue(request, [request], arrival)
            return request

    def submit_prefix(
        self,
        tokens: NDArray[np.int64],
        *,
        key: Hashable = None,
        adapter: int | None = None,
        media: Media = NO_MEDIA,
        hints: CacheHints = NO_HINTS,
        only_idle: bool = False,
        most: int | None = None,
    ) -> SequenceRequest:
        """Queue a run without sampling whose state the prefix cache gets, as if it were a finished
        prompt's. Arguments and errors are those of ``submit``.

        ``only_idle``: it is cancelled as soon as anything else is to run, and takes no room from
        idle sessions. It is cancelled at once if it cannot begin now, or if more than ``most``
        tokens of it (None: any number) would have to run.
        """
        self.checks.tokens(tokens, media)
        self.checks.length(tokens.size, None)
        if self.cache is None:
            raise FailedPrecondition("the prefix cache is off, which would hold it; set enable_prefix_caching")
        with self.lock:
            self.runner.adapters.check([adapter])
            runs = BASE.then(0, adapter)
            work = ScheduledRequest(
                tokens=TokenHistory(tokens, media),
                key=self.branches.prefix_key(key, runs),
                runs=runs,
                reusable=True,
                wants="none",
                priority=hints.priority or BACKGROUND,
            )
            request = SequenceRequest(self._name(None), work, len(tokens), None)
            if only_idle:
                work.num_cached = self.cache.peek(tokens[:-1], work.key)
                if not self.scheduler.idle or (most is not None and tokens.size - work.num_cached > most):
                    request.finish_reason = "cancelled"
                    return request
            self._take_hints(request, hints)
            self._enqueue(request, [request])
            self.yielding = request if only_idle else None
            return request

    def submit_chunk(
        self,
        ids: Ids,
        *,
        key: Hashable,
        adapter: int | None,
        priority: int = 0,
        lead: tuple[int, ...] | None = None,
    ) -> SequenceRequest | None:
        """Queue the computation of a chunk's tokens behind a lead (``Blending.capture``), whose
        rows the store gets; None: it has them. ``key`` is the salt. ``Unsupported``, ``NotFound``,
        ``ResourceExhausted``."""
        with self.lock:
            self.runner.adapters.check([adapter])
            capture = self.blending.capture(ids, key, adapter, lead)
            if capture.is_stored:
                return None
            tokens = np.array(capture.ids, dtype=np.int64)
            self.checks.tokens(tokens)
            self.checks.length(tokens.size, None)
            work = ScheduledRequest(
                tokens=TokenHistory(tokens),
                key=key,
                runs=BASE.then(0, adapter),
                wants="none",
                cacheable=False,
                priority=priority,
            )
            request = SequenceRequest(self._name(None), work, tokens.size, None, capture=capture)
            self.blending.under_way.add(capture.key)
            self._enqueue(request, [request])
            return request

    def submit_chunks(
        self, segments: Sequence[Ids], *, key: Hashable, adapter: int | None, behind: Ids | None = None
    ) -> list[tuple[int, list[SequenceRequest]]]:
        """Queue the computation of all chunks of segments that the store lacks, or of none. Return,
        for each segment, its tokens and these requests. ``behind``: what prompts begin with."""
        found: list[tuple[int, list[SequenceRequest]]] = []
        with self.lock:
            lead = None if behind is None else self.blending.add_lead(behind)
            try:
                for ids in segments:
                    found.append((ids.size, []))
                    for chunk in chunks_of(ids, [(0, ids.size)]):
                        if (request := self.submit_chunk(chunk, key=key, adapter=adapter, lead=lead)) is not None:
                            found[-1][1].append(request)
            except BaseException:
                self.end(request for _, requests in found for request in requests)
                raise
        return found

    def keep_chunks(self, work: ScheduledRequest) -> None:
        """Have chunks of a prompt's segments that are not kept computed, when nothing else runs."""
        blend = work.blend
        if blend is None or not blend.params.keep:
            return
        lead, adapter = self.blending.lead_of(work.tokens.ids[: blend.length]), next(iter(work.runs.ids), None)
        for ids in self.blending.missing(work, blend):
            try:
                self.submit_chunk(ids, key=work.salt, adapter=adapter, priority=BACKGROUND, lead=lead)
            except QuireError as error:
                logger.debug("a chunk of %d tokens is not kept: %s", ids.size, error)
                return

    def verify(self, request: SequenceRequest, logits_V: Tensor) -> None:
        """Queue the full computation of a blended prompt that gave these logits, if it is this
        prompt's turn. What they are off goes into its report, and into the metrics."""
        work, blend = request.work, request.work.blend
        if blend is None or work.origin.exact or not self.blending.is_verified(blend):
            return
        found_V, ids = logits_V.double().log_softmax(-1), work.tokens.ids[: request.num_prompt].copy()

        def compare(position: int, rows_RV: Tensor) -> None:
            full_V = rows_RV[-1].double().log_softmax(-1)
            blend.divergence = max(0.0, float((full_V.exp() * (full_V - found_V)).nansum()))
            self.metrics.blend_divergence.observe(blend.divergence)

        exact = ScheduledRequest(
            tokens=TokenHistory(ids), key=work.key, runs=work.runs, reusable=True, priority=work.priority
        )
        request.verification = SequenceRequest(self._name(None), exact, ids.size, None, on_logits=compare)
        self._enqueue(request.verification, [request.verification])
