"""Running one token of a session again, on a fork that is removed afterwards.

The session stays as it is, and so does the prefix cache. State that was written into, blended or
converted is read as it is: what would have to compute it again is refused.

Letters: V vocabulary; Hq query heads; T tokens that run; n positions up to the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire.base.errors import Cancelled, FailedPrecondition, Unsupported
from quire.base.types import Chunk, Inputs, Step
from quire.branches.session_branch import SessionBranch
from quire.engine.engine import Engine
from quire.engine.prompts import embeddings_of
from quire.sessions.blend_calibration import run_step


@dataclass(frozen=True, slots=True, eq=False)
class TokenRun:
    """The results of running a token."""

    logits_V: Tensor
    """float32: of the token after it."""
    weights_HTN: Tensor | None
    """float32 ``[Hq, T, n]`` of the observed layer."""
    num_run: int
    """Tokens that ran, this one among them."""
    exact: bool
    """Whether the state before it is what its tokens give."""


def run_token(
    engine: Engine, source: SessionBranch, position: int, verb: str, observed: int | None = None, count: int = 1
) -> TokenRun:
    """Run the token at a position, and those behind it up to ``count``, behind the state of those
    before it; ``observed``: the layer whose attention weights are wanted.

    ``FailedPrecondition``: the session is busy, or the state before, or of more than one token,
    cannot be had without computing again what its tokens do not give. ``Unsupported``: the layer
    has no weights, or the tokens ran under several adapters. ``ResourceExhausted``: there is no
    room for them.
    """
    with engine.lock:
        require_idle(source, verb)
        if engine.sampling.under_way:
            raise FailedPrecondition(f"{verb}: a step is under way; a logits processor cannot look at its own engine")
        stop = position + count
        if count > 1 and (source.modified or source.origin.exact_part(stop) < stop):
            raise FailedPrecondition(
                f"{verb}: the state was written into, blended or converted, and of {count} tokens it would be computed anew; ask "
                "for one token at a time"
            )
        if (end := source.runs.end(position)) is not None and end < stop:
            raise Unsupported(f"{verb}: tokens {position}..{stop - 1} ran under several adapters; ask for fewer")
        ids = source.tokens.ids[:stop].copy()
        media, adapter = source.tokens.media, source.runs.at(position)
        media.require(ids[position:])
        # The state behind the fork is computed, if it is, before anybody can write into it.
        exact = not source.modified and source.origin.exact_part(position) == position
        fork = _fork(engine, source, position, verb)
    try:
        missing = position - fork.computed
        if missing:
            _compute(engine, fork, ids[:position], verb)
        with engine.lock:
            if engine.closed:
                raise FailedPrecondition(f"{verb}: the LLM is closed; make a new one")
            if fork.seq is None:
                fork.seq = engine.branches.add_seq(fork.window)
            assert fork.seq is not None
            layers = frozenset() if observed is None else frozenset((observed,))
            inputs = Inputs(embeddings=embeddings_of([media.embeddings(ids[position:].tolist())]), observed=layers)
            chunk = Chunk(fork.seq, ids[position:].tolist(), logits="last", adapter=adapter)
            output = run_step(engine, Step(chunks=(chunk,), inputs=inputs))
    finally:
        engine.forget(fork)
    weights_HTN = None if observed is None else output.observed[observed][0]
    return TokenRun(output.rows(0)[-1].float(), weights_HTN, missing + count, exact)


def require_idle(source: SessionBranch, verb: str) -> None:
    """Raise ``FailedPrecondition`` while a session is generating."""
    if source.busy:
        raise FailedPrecondition(f"{verb}: the session is generating; finish or close its stream first")


def _fork(engine: Engine, source: SessionBranch, length: int, verb: str) -> SessionBranch:
    """Fork the first ``length`` tokens with what is there of their state, each under its own
    adapter."""
    fork = SessionBranch(key=source.key, adapter=source.runs.at(length - 1) if length else None)
    fork.become(source, length, None)
    held, wanted = engine.branches.reach(source, length), min(length, source.computed)
    if held < wanted and source.origin.exact_part(wanted) < wanted:
        raise FailedPrecondition(
            f"{verb}: the state before position {length} is reachable only by running tokens {held}..{wanted - 1} again, "
            "and it was blended or converted; looking does not compute it anew"
        )
    # No other request can give it up.
    fork.pinned = True
    engine.branches.fork_state(source, fork, held)
    engine.branches.note_use(fork)
    return fork


def _compute(engine: Engine, fork: SessionBranch, ids: np.ndarray[tuple[int], np.dtype[np.int64]], verb: str) -> None:
    """Compute the missing state of a fork, unseen by the prefix cache."""
    with engine.lock:
        request = engine.submit_run(fork, ids)
        request.branch.cacheable = False
    engine.run([request])
    if request.output.error is not None:
        raise request.output.error
    if request.output.finish_reason == "cancelled":
        raise Cancelled(f"{verb} was cancelled; the session is as it was before")
