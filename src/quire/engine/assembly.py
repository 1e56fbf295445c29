"""``make_engine``: builds scheduler, steps and caches of an engine over a runner."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.base.finalizers import FinalizerQueue
from quire.base.interrupts import Lock
from quire.base.metrics import EngineMetrics
from quire.base.speculation import Speculation
from quire.branches.prefix_cache import RadixCache
from quire.branches.session_branches import SessionBranches
from quire.branches.stored_state import StoredState
from quire.engine.blend_runs import BlendRuns
from quire.engine.blending import Blending, lead_text_of, start_of
from quire.engine.checkpoints import Checkpoints, EngineSequences
from quire.engine.drafts import Drafts
from quire.engine.engine import Engine
from quire.engine.exact import ExactWindows, window_size
from quire.engine.in_flight import DecodesAhead, InFlightSteps
from quire.engine.miss_search import MissSearch, PastPrefixes
from quire.engine.pins import Pins, PrefixPins
from quire.engine.reclaim import EngineReclaim
from quire.engine.request_checks import RequestChecks
from quire.engine.request_queues import RequestQueues
from quire.engine.requests import Requests
from quire.engine.sampling_step import SampleOutputs, SamplingStep
from quire.engine.scheduler import Scheduler
from quire.engine.step_builder import Limits
from quire.engine.steps import EngineSteps
from quire.engine.timeline import Timeline
from quire.grammars.grammars import Grammars
from quire.runner.local import Runner
from quire.speculation.proposer import Proposer
from quire.speculation.proposers import proposer_of
from quire.text.tokenizer import Tokenizer


def make_engine(
    runner: Runner,
    *,
    limits: Limits,
    max_model_len: int,
    tokenizer: Tokenizer | None = None,
    eos_ids: Sequence[int] = (),
    enable_prefix_caching: bool = True,
    checkpoint_interval: int = 0,
    seed: int = 0,
    stored: StoredState | None = None,
    speculation: Speculation | None = None,
    proposer: Proposer | None = None,
    dependence: str = "it is not known what computes the rows",
    content_dependence: str = "",
) -> Engine:
    """Return an engine over a runner. It joins ``runner.room``: a caller that lacks pages calls
    ``Room.make``, which calls ``EngineReclaim.reclaim_one``.
    ``proposer``: what drafts tokens with ``speculation``; None: what its method names.
    ``dependence``: what makes rows depend on others, ``content_dependence``: and on their tokens;
    empty: nothing does.
    """
    state, vocab_size = runner.state, runner.model.vocab_size
    ends = frozenset(eos_ids)
    grammars = None
    if tokenizer is not None:
        grammars = Grammars(tokenizer, vocab_size, threads=state.device.type != "cpu")
    checks = RequestChecks(
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        pool_tokens=max_model_len if state.capacity is None else state.capacity,
        tokenizer=tokenizer,
        grammars=grammars,
    )
    # What outlives a request.
    lock, metrics, past = Lock(), EngineMetrics(), PastPrefixes()
    finalizers = FinalizerQueue(lock)
    cache = RadixCache(state.nearest_reachable if state.forgets else None, past.note) if enable_prefix_caching else None
    stored = StoredState(runner) if stored is None else stored
    branches = SessionBranches(runner, cache=cache, tier=stored, metrics=metrics)
    pins = Pins(state, branches.sessions, limits.max_num_batched_tokens)
    prefix_pins = PrefixPins(branches, pins)
    blending = Blending(runner, stored, start_of(tokenizer), lead_text_of(tokenizer, max_model_len), metrics=metrics)
    # What chooses steps.
    queues = RequestQueues(limits)
    checkpoints = None
    if state.recurrent_ids:
        checkpoints = Checkpoints(state, checkpoint_interval, EngineSequences(queues, branches, stored))
    drafts = None
    if speculation is not None:
        drafts = Drafts(
            state,
            proposer or proposer_of(speculation.method),
            speculation,
            vocab_size=vocab_size,
            metrics=metrics,
            tokenizer=tokenizer,
        )
    scheduler = Scheduler(
        state,
        queues=queues,
        branches=branches,
        cache=cache,
        tier=stored,
        checkpoints=checkpoints,
        misses=None if cache is None else MissSearch(cache, past, branches.forgets),
        drafts=drafts,
    )
    window = window_size(state.page_size, limits.max_num_batched_tokens)
    exact = ExactWindows(branches, scheduler, window, dependence, content_dependence)
    # What runs them.
    timeline = Timeline(scheduler, stored, state, ends, metrics)
    in_flight = InFlightSteps(branches)
    requests = Requests(
        scheduler=scheduler,
        in_flight=in_flight,
        branches=branches,
        stored=stored,
        blending=blending,
        prefix_pins=prefix_pins,
        timeline=timeline,
        metrics=metrics,
        drafts=drafts,
    )
    sampling = SamplingStep(eos_ids=ends, grammars=grammars, metrics=metrics, ends=requests, gaps=timeline.gaps)
    blend_runs = BlendRuns(runner=runner, requests=requests, blending=blending, checks=checks, metrics=metrics)
    stepper = EngineSteps(
        runner=runner,
        lock=lock,
        finalizers=finalizers,
        requests=requests,
        scheduler=scheduler,
        decodes_ahead=DecodesAhead(scheduler, state, checkpoints),
        in_flight=in_flight,
        sampling=sampling,
        branches=branches,
        stored=stored,
        blending=blending,
        blend_runs=blend_runs,
        prefix_pins=prefix_pins,
        timeline=timeline,
        metrics=metrics,
        exact=exact,
        drafts=drafts,
    )
    reclaim = EngineReclaim(
        requests=requests,
        in_flight=in_flight,
        branches=branches,
        stored=stored,
        checkpoints=checkpoints,
        prefix_pins=prefix_pins,
        finalizers=finalizers,
    )
    runner.room.join(reclaim)
    return Engine(
        runner=runner,
        tokenizer=tokenizer,
        eos_ids=ends,
        max_model_len=max_model_len,
        lock=lock,
        finalizers=finalizers,
        requests=requests,
        scheduler=scheduler,
        stepper=stepper,
        outputs=SampleOutputs(tokenizer, grammars, vocab_size, torch.Generator().manual_seed(seed)),
        sampling=sampling,
        branches=branches,
        cache=cache,
        past=past,
        stored=stored,
        checkpoints=checkpoints,
        pins=pins,
        prefix_pins=prefix_pins,
        blending=blending,
        blend_runs=blend_runs,
        grammars=grammars,
        checks=checks,
        forgets=_forgets(checkpoints),
        reclaim=reclaim,
        exact=exact,
        timeline=timeline,
        metrics=metrics,
    )


def _forgets(checkpoints: Checkpoints | None) -> str:
    """Return the reason why state at position ``{0}`` may have to be computed again, from
    ``{1}``."""
    if checkpoints is None:
        return (
            "windows have let go of what a continuation at {0} would need, and the nearest position that is held is {1}"
        )
    every = f" every {checkpoints.interval} tokens and" if checkpoints.interval else ""
    return (
        "recurrent layers can go on only where their state was kept, and before {0} that is {1} (states are kept"
        f"{every} at the ends of prompts and turns, as far as there is room)"
    )
