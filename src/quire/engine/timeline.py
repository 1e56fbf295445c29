"""The timeline: the last steps and requests, which the engine writes down as it goes. No torch.

A step is a tuple of a few numbers. A request is a lane: the times at which it changed what it does,
and numbers about its tokens. No texts are kept. Times are seconds after ``Timeline.epoch``.

The engine writes under its own lock, and readers take only the timeline's, so that reading never
waits for a step.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.base.caller_context import Caller, caller
from quire.engine.request import Request, Status
from quire.engine.view_budget import ViewBudget

if TYPE_CHECKING:
    from quire.base.metrics import EngineMetrics
    from quire.branches.stored_state import StoredState
    from quire.contracts.kv_state import ModelState
    from quire.engine.scheduler import Scheduler
    from quire.engine.step_builder import ScheduledStep

STEPS = 2048
"""Steps that are kept."""
LANES = 512
"""Ended requests that are kept; those under way all are."""
GAPS = 4096
"""Times between tokens that are kept."""
NO_SHARES: Mapping[str, StepShare] = MappingProxyType({})
PHASES = 64
"""Changes that are noted of one request. A later one takes the place of the last."""


class StepShare(NamedTuple):
    """What one API key had of a step, and its requests behind it. See ``StepRecord``."""

    tokens: int
    decodes: int
    generated: int
    running: int
    waiting: int
    preemptions: int


class StepRecord(NamedTuple):
    number: int
    """Counts from 1."""
    start: float
    schedule_seconds: float
    """For choosing what runs."""
    model_seconds: float
    """For the forward. On a GPU until it was handed over; the rest counts to ``seconds``."""
    seconds: float
    """For all of it, sampling and texts included. A step ahead starts where the one before it has
    ended; what the host did for it earlier counts to that one."""
    tokens: int
    """Tokens that ran."""
    decodes: int
    """The tokens among them that continue an answer, one for each request."""
    prefills: tuple[tuple[int, int, int], ...]
    """Of each other chunk: its lane, the position of its first token, its tokens."""
    generated: int
    """Tokens that were generated, including beam searches since the last step."""
    pages_free: int
    running: int
    waiting: int
    preemptions: int
    """Requests that were preempted before it ran."""
    shares: Mapping[str, StepShare]
    """What each API key had of it, where there are any."""


@dataclass(eq=False, slots=True)
class StepMark:
    """A step that is under way."""

    began: float
    chosen: float
    decodes: int
    prefills: tuple[tuple[int, int, int], ...]
    preemptions: int
    filled: tuple[RequestLane, ...]
    """Lanes with a prefill in it."""
    owned: tuple[tuple[RequestLane, int, bool], ...]
    """Lanes of API keys in it, each with its tokens, and whether that is a decode."""
    ran: float = 0.0


@dataclass(eq=False, slots=True)
class RequestLane:
    """One request, or one sample of it."""

    number: int
    """Counts from 1 in order of arrival."""
    own_number: int
    """The same among the requests of its owner."""
    kind: str
    """``request``, ``turn`` of a session, or ``run``: state is computed and nothing sampled."""
    owner: str
    caller: Caller
    request_id: str
    index: int
    adapter: str | None
    arrival: float
    phases: list[tuple[str, float]]
    """What it does (``waiting``, ``loading`` from a tier, ``prefill``, ``decode``, ``preempted``)
    and since when."""
    request: Request | None
    """While it is under way."""
    chunks: int = 0
    """Pieces in which its tokens ran, decodes aside."""
    admitted: float | None = None
    """When it was first given a place."""
    finished: float | None = None
    changed: int = 0
    """The step that was under way, or came next, when it ended."""
    generated: int = 0
    """Its tokens that steps have counted as generated, where there are API keys."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """What is known of an ended one."""

    @property
    def phase(self) -> str:
        return "finished" if self.finished is not None else self.phases[-1][0]

    def enter(self, phase: str, at: float) -> None:
        """Begin a phase at ``at`` seconds."""
        if len(self.phases) >= PHASES:
            self.phases[-1] = (phase, self.phases[-1][1])
        else:
            self.phases.append((phase, max(at, self.phases[-1][1])))


class Timeline:
    """The recorder of one engine. ``eos_ids`` end a text."""

    def __init__(
        self,
        queues: Scheduler,
        loads: StoredState,
        pools: ModelState,
        eos_ids: frozenset[int],
        metrics: EngineMetrics,
    ) -> None:
        self._queues, self._loads, self._pools, self._eos_ids = queues, loads, pools, eos_ids
        self.metrics = metrics
        self._num_pages = pools.num_pages
        self._zero = time.monotonic()
        self.epoch = time.time()
        """Unix time of second 0."""
        self.gaps: deque[float] = deque(maxlen=GAPS)
        """Seconds between tokens that followed each other."""
        self.on_end: list[Callable[[RequestLane], None]] = []
        """Called with each lane that ends, under the engine's lock: they must be quick. What they
        raise is dropped."""
        self.budget = ViewBudget()
        """The one budget of all viewers, also of the state (``state_views``)."""
        self.model = "model"
        """The model's name, in recordings."""
        self.adapter_name: Callable[[int], str | None] = str
        self._lock = threading.Lock()
        self._steps: deque[StepRecord] = deque(maxlen=STEPS)
        self._ended: deque[RequestLane] = deque(maxlen=LANES)
        self._live: dict[Request, RequestLane] = {}
        self._lanes = 0
        self._lanes_of: Counter[str] = Counter()
        self.preempted: Counter[str] = Counter()
        """Preemptions so far by API key."""
        self._reported: Counter[str] = Counter()
        """The preemptions that steps have counted."""
        self.count = 0
        """Steps so far."""
        self._preemptions = 0
        self._generated = 0.0
        self._loading: list[RequestLane] = []
        self._end = 0.0
        """When the last step was over."""

    # -- what the engine calls, under its lock -----------------------------------------------------

    def arrived(self, samples: Iterable[Request]) -> None:
        """Begin a lane for each sample of a request that is queued."""
        who = caller.get()
        with self._lock:
            for request in samples:
                asked = request.asked
                self._lanes += 1
                self._lanes_of[asked.owner] += 1
                kind = "run" if request.params is None else "request" if request.branch.session is None else "turn"
                adapter = next(iter(request.branch.runs.ids), None)
                self._live[request] = RequestLane(
                    self._lanes,
                    self._lanes_of[asked.owner],
                    kind,
                    asked.owner,
                    who,
                    asked.request_id,
                    asked.index,
                    None if adapter is None else self.adapter_name(adapter),
                    asked.arrival - self._zero,
                    [("waiting", asked.arrival - self._zero)],
                    request,
                )

    def scheduled(self, scheduled: ScheduledStep, began: float, *, ahead: bool = False) -> StepMark:
        """Note the chunks of a step whose scheduling began at ``began`` (monotonic time).
        ``ahead``: it has decodes only, whose tokens are not known yet."""
        now = time.monotonic() - self._zero
        live, decodes, prefills, filled = self._live, 0, [], []
        if self._queues.num_preemptions != self._preemptions or self._loading or self._loads.open:
            self._look_aside(now)
        owned = [
            (lane, len(chunk.tokens), bool(lane.request and lane.request.output.token_ids) and len(chunk.tokens) == 1)
            for request, chunk in zip(scheduled.requests, scheduled.step.chunks, strict=True)
            if request.asked.owner and (lane := live.get(request)) is not None
        ]
        preemptions = self._queues.num_preemptions
        if ahead:
            return StepMark(began - self._zero, now, len(scheduled.requests), (), preemptions, (), tuple(owned))
        for request, chunk in zip(scheduled.requests, scheduled.step.chunks, strict=True):
            lane = live.get(request)
            size = len(chunk.tokens)
            if lane is None:
                decodes += size == 1  # of a beam search
                continue
            if size == 1 and request.output.token_ids:
                decodes += 1
                if lane.phases[-1][0] != "decode":
                    lane.enter("decode", request.output.last_token - self._zero)
                    lane.admitted = lane.phases[-1][1] if lane.admitted is None else lane.admitted
                continue
            prefills.append((lane.number, request.branch.computed, size))
            filled.append(lane)
            lane.chunks += 1
            if lane.phases[-1][0] != "prefill":
                lane.enter("prefill", now)
                lane.admitted = now if lane.admitted is None else lane.admitted
        return StepMark(began - self._zero, now, decodes, tuple(prefills), preemptions, tuple(filled), tuple(owned))

    def _look_aside(self, now: float) -> None:
        """Note the preempted requests, and the requests whose state is on its way."""
        if self._queues.num_preemptions != self._preemptions:
            for request in self._queues.waiting:
                lane = self._live.get(request)
                if lane is not None and lane.phases[-1][0] not in ("waiting", "preempted"):
                    lane.enter("preempted", now)
                    self.preempted[lane.owner] += 1
        for lane in self._loading:
            waits = lane.request is not None and lane.request.seat.status is Status.WAITING
            if waits and lane.phases[-1][0] == "loading":
                lane.enter("waiting", now)
        self._loading = []
        for request in self._queues.running if self._loads.open else ():
            lane = self._live.get(request)
            if lane is not None and self._loads.is_coming(request.branch.seq):
                self._loading.append(lane)
                if lane.phases[-1][0] != "loading":
                    lane.enter("loading", now)
                    lane.admitted = now if lane.admitted is None else lane.admitted

    def ran(self, mark: StepMark) -> None:
        """Record the return of a step's forward."""
        mark.ran = time.monotonic() - self._zero

    def stepped(self, mark: StepMark, tokens: int, generated: float) -> None:
        """Record the end of a step; ``generated``: tokens generated since the engine began."""
        now, queues = time.monotonic() - self._zero, self._queues
        start = max(mark.began, self._end)
        chosen = max(mark.chosen, start)
        self._end = now
        for lane in mark.filled:
            request = lane.request
            if request is not None and request.output.token_ids and lane.phases[-1][0] == "prefill":
                lane.enter("decode", request.output.last_token - self._zero)
        self.count += 1
        record = StepRecord(
            self.count,
            start,
            chosen - start,
            max(0.0, mark.ran - chosen),
            now - start,
            tokens,
            mark.decodes,
            mark.prefills,
            int(generated - self._generated),
            self._num_pages - self._pools.num_used_pages,
            len(queues.running),
            len(queues.waiting),
            mark.preemptions - self._preemptions,
            self._shares(mark) if mark.owned else NO_SHARES,
        )
        self._preemptions, self._generated = mark.preemptions, generated
        with self._lock:
            self._steps.append(record)

    def _shares(self, mark: StepMark) -> dict[str, StepShare]:
        """Return the share of each API key in a finished step."""
        tokens_of, decodes, generated = Counter[str](), Counter[str](), Counter[str]()
        for lane, tokens, is_decode in mark.owned:
            made = lane.numbers["output_tokens"] if lane.request is None else len(lane.request.output.token_ids)
            tokens_of[lane.owner] += tokens
            decodes[lane.owner] += is_decode
            generated[lane.owner] += made - lane.generated
            lane.generated = made
        running = Counter(one.asked.owner for one in self._queues.running)
        waiting = Counter(one.asked.owner for one in self._queues.waiting)
        shares = {}
        for owner, tokens in tokens_of.items():
            preempted, self._reported[owner] = self.preempted[owner] - self._reported[owner], self.preempted[owner]
            shares[owner] = StepShare(
                tokens, decodes[owner], generated[owner], running[owner], waiting[owner], preempted
            )
        return shares

    def ended(self, request: Request) -> None:
        with self._lock:
            lane = self._live.pop(request, None)
            if lane is None:
                return
            output = request.output
            if output.first_token is not None and all(phase != "decode" for phase, _ in lane.phases):
                lane.enter("decode", output.first_token - self._zero)
                lane.admitted = lane.phases[-1][1] if lane.admitted is None else lane.admitted
            end = time.monotonic() if output.finished_at is None else output.finished_at
            lane.numbers = self._numbers(lane, request)
            lane.finished, lane.request, lane.changed = end - self._zero, None, self.count + 1
            self._ended.append(lane)
        if request.params is not None:
            self._observe(lane, request)
        for listener in self.on_end:
            try:
                listener(lane)
            except Exception:
                continue

    def _observe(self, lane: RequestLane, request: Request) -> None:
        """Count a request that sampled and has ended."""
        metrics, output = self.metrics, request.output
        metrics.request_prompt_tokens.observe(request.asked.num_prompt)
        metrics.request_generation_tokens.observe(len(output.token_ids))
        if lane.admitted is not None:
            metrics.request_queue_time.observe(max(0.0, lane.admitted - lane.arrival))
            if output.first_token is not None:
                first, last = output.first_token - self._zero, output.last_token - self._zero
                metrics.request_prefill_time.observe(max(0.0, first - lane.admitted))
                metrics.request_decode_time.observe(last - first)
                metrics.request_inference_time.observe(max(0.0, last - lane.admitted))

    def _numbers(self, lane: RequestLane, request: Request) -> dict[str, Any]:
        """Return the facts of a request, under way or ended. Every value is a copy."""
        branch, params, output = request.branch, request.params, request.output
        note, first = request.seat.reuse, output.first_token
        form = None if params is None else params.grammar
        found: dict[str, Any] = {
            "priority": request.seat.priority,
            "prompt_tokens": request.asked.num_prompt,
            "cached_tokens": note.cached,
            "by_tier": dict(note.cached_by_tier),
            "replayed_tokens": note.replayed,
            "miss": str(note.missed),
            "missed_at": note.missed_at,
            "computed": branch.computed,
            "output_tokens": len(output.token_ids),
            "first_token": None if first is None else first - self._zero,
            "last_token": None if first is None else output.last_token - self._zero,
            "chunks": lane.chunks,
            "preemptions": request.seat.num_preemptions,
            "structured": None if form is None else next(iter(form.forms)),
            "max_tokens": None if params is None else params.max_tokens,
            "temperature": None if params is None else params.temperature,
            "top_p": None if params is None else params.top_p,
            "n": None if params is None else params.n,
            "finish_reason": output.finish_reason,
            "stop": self._stop(request),
            "error": None if output.error is None else type(output.error).__name__,
            "blend": None,
        }
        if branch.blend is not None and request.finished:
            report = branch.blend.report(branch)
            found["blend"] = {
                "blended": report.blended,
                "recomputed": report.recomputed,
                "exact": report.exact,
                "by_tier": dict(report.by_tier),
                "divergence": report.divergence,
            }
        return found

    def _stop(self, request: Request) -> str | None:
        """Return the kind of a text's stop; the stop may itself be a text."""
        stop = request.output.stop_reason
        if stop is None:
            return None
        if isinstance(stop, str):
            return "context" if request.output.finish_reason == "length" else "stop_string"
        named = request.params is not None and stop in request.params.stop_ids
        return "eos" if stop in self._eos_ids and not named else "stop_token"

    # -- what readers call, on any thread ----------------------------------------------------------

    def now(self) -> float:
        """Return the present time, in seconds after ``epoch``."""
        return time.monotonic() - self._zero

    def steps(self, since: int = 0) -> list[StepRecord]:
        """Return the steps after number ``since`` that are kept, the earliest first."""
        with self._lock:
            missing = self.count - since
            if missing >= len(self._steps):
                return list(self._steps)
            return [self._steps[place] for place in range(-missing, 0)] if missing > 0 else []

    def lanes(self, since: int = 0) -> list[tuple[RequestLane, dict[str, Any]]]:
        """Return the lanes that may have changed after step ``since``, in order of arrival, each
        with its numbers: those under way, and those that have ended. Read a lane's own fields, and
        change nothing."""
        with self._lock:
            found = [(lane, lane.numbers) for lane in self._ended if lane.changed > since]
            for lane in self._live.values():
                if lane.request is not None:
                    found.append((lane, self._numbers(lane, lane.request)))
        return sorted(found, key=lambda one: one[0].number)

    def ended_lanes(self) -> Sequence[RequestLane]:
        with self._lock:
            return list(self._ended)

    def recent_gaps(self) -> list[float]:
        """Return the last times between tokens, in seconds."""
        while True:
            try:
                return list(self.gaps)
            except RuntimeError:  # one was added meanwhile
                continue

    @property
    def pages(self) -> tuple[int, int]:
        """Pages in all, and those that are free."""
        return self._num_pages, self._num_pages - self._pools.num_used_pages

    @property
    def queue_lengths(self) -> tuple[int, int]:
        """Numbers of requests that run, and that wait."""
        return len(self._queues.running), len(self._queues.waiting)

    @property
    def num_preemptions(self) -> int:
        return self._queues.num_preemptions
