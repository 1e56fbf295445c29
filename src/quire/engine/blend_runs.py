"""Runs for blending: chunks that are computed by themselves, and checks of blended prompts."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire.base.errors import QuireError
from quire.base.metrics import EngineMetrics
from quire.base.token_history import Ids, TokenHistory
from quire.base.types import BASE
from quire.engine.blending import Blending, chunks_of
from quire.engine.prompt_blend import PromptBlend
from quire.engine.request import BACKGROUND, AskedFor, Output, Request, RequestBranch, Seat
from quire.engine.request_checks import RequestChecks
from quire.engine.requests import Requests, owner_of
from quire.runner.local import Runner

logger = logging.getLogger("quire.engine")


@dataclass(eq=False, slots=True, kw_only=True)
class BlendRuns:
    """The requests of an engine that serve blending. The caller holds the engine's lock."""

    runner: Runner
    requests: Requests
    blending: Blending
    checks: RequestChecks
    metrics: EngineMetrics

    def submit_chunk(
        self,
        ids: Ids,
        *,
        key: Hashable,
        adapter: int | None,
        priority: int = 0,
        lead: tuple[int, ...] | None = None,
    ) -> Request | None:
        """Queue the computation of a chunk's tokens behind a lead (``Blending.capture``), whose
        rows the store gets; None: it has them. ``key`` is the salt. ``Unsupported``, ``NotFound``,
        ``ResourceExhausted``."""
        self.runner.adapters.check([adapter])
        capture = self.blending.capture(ids, key, adapter, lead)
        if capture.is_stored:
            return None
        tokens = np.array(capture.ids, dtype=np.int64)
        self.checks.tokens(tokens)
        self.checks.length(tokens.size, None)
        request = Request(
            AskedFor(request_id=self.requests.name(), num_prompt=tokens.size, owner=owner_of(key), capture=capture),
            RequestBranch(tokens=TokenHistory(tokens), key=key, runs=BASE.then(0, adapter), cacheable=False),
            Seat(priority=priority),
            Output(wants="none"),
        )
        self.blending.under_way.add(capture.key)
        self.requests.queue([request])
        return request

    def submit_chunks(
        self, segments: Sequence[Ids], *, key: Hashable, adapter: int | None, behind: Ids | None = None
    ) -> list[tuple[int, list[Request]]]:
        """Queue the computation of all chunks of segments that the store lacks, or of none. Return,
        for each segment, its tokens and these requests. ``behind``: the beginning of the prompts.
        """
        lead = None if behind is None else self.blending.add_lead(behind)
        found: list[tuple[int, list[Request]]] = []
        try:
            for ids in segments:
                found.append((ids.size, []))
                for chunk in chunks_of(ids, [(0, ids.size)]):
                    if (request := self.submit_chunk(chunk, key=key, adapter=adapter, lead=lead)) is not None:
                        found[-1][1].append(request)
        except BaseException:
            self.requests.end(request for _, requests in found for request in requests)
            raise
        return found

    def keep_chunks(self, request: Request, blend: PromptBlend) -> None:
        """Have chunks of a prompt's segments that are not kept computed, when nothing else runs."""
        branch = request.branch
        if not blend.params.keep:
            return
        lead, adapter = self.blending.lead_of(branch.tokens.ids[: blend.length]), next(iter(branch.runs.ids), None)
        for ids in self.blending.missing(request, blend):
            try:
                self.submit_chunk(ids, key=branch.salt, adapter=adapter, priority=BACKGROUND, lead=lead)
            except QuireError as error:
                logger.debug("a chunk of %d tokens is not kept: %s", ids.size, error)
                return

    def verify(self, request: Request, blend: PromptBlend, logits_V: Tensor) -> None:
        """Queue the full computation of a blended prompt that gave these logits, if it is this
        prompt's turn. What they are off goes into its report, and into the metrics."""
        branch = request.branch
        if branch.origin.exact or not self.blending.is_verified(blend):
            return
        found_V, ids = logits_V.double().log_softmax(-1), branch.tokens.ids[: request.asked.num_prompt].copy()

        def compare(position: int, rows_RV: Tensor) -> None:
            full_V = rows_RV[-1].double().log_softmax(-1)
            blend.divergence = max(0.0, float((full_V.exp() * (full_V - found_V)).nansum()))
            self.metrics.blend_divergence.observe(blend.divergence)

        full = Request(
            AskedFor(request_id=self.requests.name(), num_prompt=ids.size, owner=owner_of(branch.salt)),
            RequestBranch(tokens=TokenHistory(ids), key=branch.key, runs=branch.runs, reusable=True),
            Seat(priority=request.seat.priority),
            Output(on_logits=compare),
        )
        request.output.verification = full
        self.requests.queue([full])
