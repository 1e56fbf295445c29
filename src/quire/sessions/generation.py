"""Generations of a session: their checks, and their requests in the engine's queue."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import InvalidArgument
from quire.base.hints import NO_HINTS, CacheHints
from quire.base.outputs import RequestOutput
from quire.base.sampling_params import SamplingParams
from quire.engine.request import Request
from quire.engine.request_outputs import request_output
from quire.sessions.live_sequence import LiveSequence


def checked_params(live: LiveSequence, verb: str, params: SamplingParams | None) -> SamplingParams:
    """Return the parameters of a generation, checked. Signals come through and no lock is held
    meanwhile: a large grammar takes seconds."""
    with live.engine.lock:
        live.require_idle(verb)
    chosen = live.defaults if params is None else params
    if not isinstance(chosen, SamplingParams):
        raise InvalidArgument(f"{verb} takes SamplingParams, got {type(chosen).__name__}", field="params")
    live.engine.checks.params(chosen, in_session=True)
    return chosen


def check(live: LiveSequence, verb: str, length: int, params: SamplingParams | None) -> SamplingParams:
    """Return the checked parameters of a generation after ``length`` tokens. It refuses whatever
    ``submit`` would refuse. A caller that holds the lock has checked the parameters before."""
    chosen = checked_params(live, verb, params)
    live.engine.checks_of(live.branch).length(length, chosen)
    return chosen


def submit(
    live: LiveSequence,
    tokens: NDArray[Any],
    params: SamplingParams,
    request_id: str | None = None,
    hints: CacheHints = NO_HINTS,
) -> Request:
    """Queue a generation after ``tokens``, which the session's become. The caller holds the
    engine's lock."""
    check(live, "generate", len(tokens), params)
    ids = tokens.astype(np.int64)
    return live.engine.submit(ids, params, request_id=request_id, session=live.branch, hints=hints)[0]


def result(live: LiveSequence, request: Request) -> RequestOutput:
    """Run a generation to its end; return its output."""
    live.wait(request)
    return request_output([request], live.engine.tokenizer)


def cancel(live: LiveSequence) -> bool:
    """End the request that works on the session, at the next step; False: none does."""
    branch = live.branch if live.branch.successor is None else live.branch.successor
    request = branch.request
    return request is not None and live.engine.cancel(request.request_id)
