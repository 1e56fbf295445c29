"""The timeline as a document for viewers. Takes no lock of the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.engine.timeline import RequestLane, StepRecord, Timeline

FORMAT = 1
RATE_SECONDS = 10.0
"""Seconds over which tokens per second are counted."""
QUANTILES = (50, 90, 95, 99)
DIGITS = 6
"""Times are given in microseconds."""


def timeline_document(timeline: Timeline, since: int = 0, owner: str | None = None) -> dict[str, Any]:
    """Return the steps after number ``since``, and the requests that may have changed since then:
    the requests of ``owner`` alone (None: all), and what steps ran for them."""
    every, now = timeline.steps(since), timeline.now()
    lanes = [(lane, numbers) for lane, numbers in timeline.lanes(since) if is_own(lane, owner)]
    steps = own_steps(every, owner)
    ended = [lane for lane in timeline.ended_lanes() if is_own(lane, owner)]
    total, free = timeline.pages
    running, waiting = timeline.queue_lengths
    preemptions, gaps = timeline.num_preemptions, timeline.recent_gaps()
    drafted, accepted = timeline.metrics.drafted_tokens.value, timeline.metrics.accepted_tokens.value
    numbers_of = {lane.number: lane.number for lane, _ in lanes}
    if owner is not None:
        waits = [lane.phase in ("waiting", "preempted") for lane, _ in lanes if lane.finished is None]
        running, waiting, preemptions = waits.count(False), waits.count(True), timeline.preempted[owner]
        drafted = accepted = 0.0
        gaps = [gap for lane in ended if (gap := _mean_gap(lane)) is not None]
        numbers_of = {lane.number: lane.own_number for lane, _ in lanes}
    return {
        "format": FORMAT,
        "epoch": round(timeline.epoch, DIGITS),
        "now": _rounded(now),
        "step": every[-1].number if every else min(since, timeline.count),
        "steps": _columns(steps),
        "prefills": [
            [step.number, numbers_of.get(chunk[0], chunk[0]), *chunk[1:]]
            for step in steps
            for chunk in step.prefills
            if owner is None or chunk[0] in numbers_of
        ],
        "requests": [_lane(lane, numbers, numbers_of[lane.number]) for lane, numbers in lanes],
        "running": running,
        "waiting": waiting,
        "preemptions": preemptions,
        "pages": {"total": total, "free": free},
        "rates": rates(own_steps(timeline.steps(), owner), now),
        "latencies": latencies(ended, gaps),
        "drafts": {
            "drafted": int(drafted),
            "accepted": int(accepted),
            "rate": round(accepted / drafted, 4) if drafted else None,
        },
    }


def is_own(lane: RequestLane, owner: str | None) -> bool:
    """Return whether a viewer may know of a request; None may know of all."""
    return owner is None or lane.owner == owner


def own_steps(steps: Sequence[StepRecord], owner: str | None) -> Sequence[StepRecord]:
    """Return steps as a viewer may know them: those that ran tokens of its requests, with what they
    ran for these."""
    if owner is None:
        return steps
    return [step._replace(**step.shares[owner]._asdict()) for step in steps if owner in step.shares]


def _mean_gap(lane: RequestLane) -> float | None:
    """Return the mean time between the tokens of an ended request."""
    count, first, last = (lane.numbers[name] for name in ("output_tokens", "first_token", "last_token"))
    return None if first is None or count < 2 else (last - first) / (count - 1)


def rates(steps: Sequence[StepRecord], now: float) -> dict[str, float]:
    """Return tokens and steps per second over the last seconds, or since the engine began."""
    seconds = max(1e-3, min(RATE_SECONDS, now))
    recent: list[StepRecord] = []
    for step in reversed(steps):
        if step.start + step.seconds < now - seconds:
            break
        recent.append(step)
    generated, tokens = sum(one.generated for one in recent), sum(one.tokens - one.decodes for one in recent)
    busy = sum(one.seconds for one in recent)
    return {
        "seconds": round(seconds, 3),
        "generated_tokens_per_second": round(generated / seconds, 2),
        "prompt_tokens_per_second": round(tokens / seconds, 2),
        "steps_per_second": round(len(recent) / seconds, 2),
        "busy": round(min(1.0, busy / seconds), 4),
    }


def latencies(ended: Sequence[RequestLane], gaps: Sequence[float]) -> dict[str, dict[str, float | int | None]]:
    """Return percentiles in seconds: of the ended requests that sampled, and of ``gaps``."""
    sampled = [lane for lane in ended if lane.kind != "run"]
    first = [lane.numbers["first_token"] - lane.arrival for lane in sampled if lane.numbers["first_token"] is not None]
    whole = [lane.finished - lane.arrival for lane in sampled if lane.finished is not None]
    queued = [lane.admitted - lane.arrival for lane in sampled if lane.admitted is not None]
    return {
        "first_token": _percentiles(first),
        "inter_token": _percentiles(gaps),
        "request": _percentiles(whole),
        "queue": _percentiles(queued),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float | int | None]:
    found: dict[str, float | int | None] = {"count": len(values)}
    points = np.percentile(values, QUANTILES).tolist() if values else [None] * len(QUANTILES)
    return found | {f"p{q}": _rounded(point) for q, point in zip(QUANTILES, points, strict=True)}


def _columns(steps: Sequence[StepRecord]) -> dict[str, list[Any]]:
    """Return the numbers of steps as a list for each of their fields, without the others."""
    times = ("start", "schedule_seconds", "model_seconds", "seconds")
    rows = list(zip(*steps, strict=True)) if steps else [()] * len(StepRecord._fields)
    found = {
        name: list(row)
        for name, row in zip(StepRecord._fields, rows, strict=True)
        if name not in ("prefills", "shares")
    }
    return found | {name: [round(value, DIGITS) for value in found[name]] for name in times}


def _lane(lane: RequestLane, numbers: dict[str, Any], number: int) -> dict[str, Any]:
    phases = [[phase, _rounded(at)] for phase, at in list(lane.phases)]
    found: dict[str, Any] = {
        "number": number,
        "own": True,
        "kind": lane.kind,
        "phase": lane.phase,
        "arrival": _rounded(lane.arrival),
        "phases": phases,
        "finished": _rounded(lane.finished),
    }
    numbers = {
        key: _rounded(value) if key in ("first_token", "last_token") else value for key, value in numbers.items()
    }
    return found | {"id": lane.request_id, "index": lane.index, "adapter": lane.adapter, **numbers}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)
