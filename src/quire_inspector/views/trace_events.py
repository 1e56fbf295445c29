"""A recording of the timeline, and the file that Perfetto and ``chrome://tracing`` read.

Source of the format: "Trace Event Format" of the Chromium project, JSON object form. Slices are
complete events ("X"), which lie inside of each other by their times; counters are "C", names "M".
Times are microseconds after the first process that was recorded began.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.statefile.atomic_file import os_errors, replacing

MOST_STEPS = 500_000
"""Steps of a recording; earlier ones are dropped."""
STEPS, REQUESTS = 1, 2
"""Processes of the trace, for each process that was recorded: ``2 * n + 1`` and ``2 * n + 2``."""
ROUNDING = 3e-6
"""Seconds by which two times may differ that were rounded."""
ANOTHER = 2**62
"""A number that no step has: what is asked for after it are the requests under way alone."""


@dataclass(eq=False, slots=True)
class _Process:
    """What one process did."""

    epoch: float
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    lanes: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    total_pages: int = 0
    last: float = 0.0
    """The latest second that is known."""


class TraceRecorder:
    """Documents of a timeline, collected. ``model`` is the name that the trace has."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.since = 0
        """What the next document is to be asked for."""
        self._processes: list[_Process] = []

    @property
    def num_steps(self) -> int:
        return sum(len(one.steps) for one in self._processes)

    @property
    def num_requests(self) -> int:
        return sum(len(one.lanes) for one in self._processes)

    def begin(self, document: Mapping[str, Any]) -> None:
        """Record from the last step of ``document`` on, and the requests under way in it."""
        self._process(document)
        self.since = document["step"]
        self._note(document, [one for one in document["requests"] if one["finished"] is None])

    def take(self, document: Mapping[str, Any]) -> bool:
        """Take the answer for ``since`` in. Return False if it is of a new process, whose timeline
        is to be asked for from its first step on."""
        if not self._processes or self._processes[-1].epoch != document["epoch"]:
            self._process(document)
            self.since = 0
            return False
        process = self._processes[-1]
        names = list(document["steps"])
        for row in zip(*document["steps"].values(), strict=True):
            step = dict(zip(names, row, strict=True))
            process.steps[step["number"]] = step | {"prefills": []}
        for number, *chunk in document["prefills"]:
            if number in process.steps:
                process.steps[number]["prefills"].append(tuple(chunk))
        while len(process.steps) > MOST_STEPS:
            del process.steps[next(iter(process.steps))]
        self._note(document, document["requests"])
        self.since = document["step"]
        return True

    def _process(self, document: Mapping[str, Any]) -> None:
        self._processes.append(_Process(document["epoch"]))

    def _note(self, document: Mapping[str, Any], lanes: Iterable[Mapping[str, Any]]) -> None:
        process = self._processes[-1]
        process.lanes.update((one["number"], one) for one in lanes)
        process.total_pages, process.last = document["pages"]["total"], document["now"]

    def events(self) -> list[dict[str, Any]]:
        """Return the events of the trace, ordered by time, outer slices before inner ones."""
        found: list[dict[str, Any]] = []
        zero = self._processes[0].epoch if self._processes else 0.0
        for place, process in enumerate(self._processes):
            offset = process.epoch - zero
            found += _step_events(process, offset, 2 * place + STEPS, self.model)
            found += _lane_events(process, offset, 2 * place + REQUESTS, self.model)
        return sorted(found, key=lambda event: (event["ts"], -event.get("dur", 0.0)))

    def write(self, path: Path) -> None:
        """Write the trace to a file, whole or not at all. Errors: as for ``replacing``, as
        ``ResourceExhausted`` for a full disk."""
        document = {
            "traceEvents": self.events(),
            "displayTimeUnit": "ms",
            "otherData": {
                "model": self.model,
                "processes": [{"epoch": one.epoch, "steps": len(one.steps)} for one in self._processes],
            },
        }
        label = f"trace {str(path)!r}"
        with replacing(path, label) as file, os_errors(label):
            data = memoryview(json.dumps(document, separators=(",", ":")).encode())
            while data:  # an unbuffered file may take a part
                data = data[file.write(data) :]


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _slice(name: str, start: float, end: float, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    begin = _micro(start)
    length = max(0.0, round(_micro(end) - begin, 3))
    return {"name": name, "ph": "X", "ts": begin, "dur": length, "pid": pid, "tid": tid, "args": args}


def _named(pid: int, name: str, tid: int | None = None) -> dict[str, Any]:
    what = "process_name" if tid is None else "thread_name"
    return {"name": what, "ph": "M", "ts": 0.0, "pid": pid, "tid": tid or 0, "args": {"name": name}}


def _counter(name: str, at: float, pid: int, **values: float) -> dict[str, Any]:
    return {"name": name, "ph": "C", "ts": _micro(at), "pid": pid, "tid": 0, "args": values}


def _step_events(process: _Process, offset: float, pid: int, model: str) -> Iterator[dict[str, Any]]:
    """Yield a slice for each step with its parts inside, and counters."""
    yield _named(pid, f"{model}: steps")
    yield _named(pid, "steps", 1)
    before = None
    for step in process.steps.values():
        start = offset + step["start"]
        chosen = start + step["schedule_seconds"]
        ran, end = chosen + step["model_seconds"], start + step["seconds"]
        ran = min(ran, end)
        prompt = sum(chunk[2] for chunk in step["prefills"])
        yield _slice(
            f"step {step['number']}",
            start,
            end,
            pid,
            1,
            tokens=step["tokens"],
            decodes=step["decodes"],
            prefills=[list(chunk) for chunk in step["prefills"]],
            generated=step["generated"],
            preemptions=step["preemptions"],
        )
        yield _slice("schedule", start, chosen, pid, 1)
        yield _slice("model", chosen, ran, pid, 1)
        yield _slice("sample", ran, end, pid, 1)
        used = process.total_pages - step["pages_free"]
        yield _counter("pages", end, pid, used=used, free=step["pages_free"])
        yield _counter("batch", start, pid, decodes=step["decodes"], prefill_tokens=max(prompt, _rest(step)))
        yield _counter("requests", end, pid, running=step["running"], waiting=step["waiting"])
        since = start if before is None else before
        if end > since:
            yield _counter("tokens per second", end, pid, generated=round(step["generated"] / (end - since), 1))
        before = end


def _rest(step: Mapping[str, Any]) -> int:
    """Return the tokens of prompts, also of prompts whose chunks are not noted."""
    return int(step["tokens"] - step["decodes"])


def _lane_events(process: _Process, offset: float, pid: int, model: str) -> Iterator[dict[str, Any]]:
    """Yield a slice for each request, its phases inside, and chunks inside of these."""
    yield _named(pid, f"{model}: requests")
    chunks: dict[int, list[tuple[float, float, int, int]]] = {}
    for step in process.steps.values():
        begin = offset + step["start"] + step["schedule_seconds"]
        for number, position, tokens in step["prefills"]:
            chunks.setdefault(number, []).append((begin, begin + step["model_seconds"], position, tokens))
    for number, lane in sorted(process.lanes.items()):
        name = f"{lane['kind']} {lane['id']}" if lane["own"] else f"{lane['kind']} of another key"
        yield _named(pid, name, number)
        start = offset + lane["arrival"]
        finished = lane["finished"] is not None
        end = offset + (lane["finished"] if finished else process.last)
        args = {key: value for key, value in lane.items() if key not in ("phases", "arrival", "finished")}
        yield _slice(name, start, max(start, end), pid, number, **args)
        times = [min(max(offset + at, start), end) for _, at in lane["phases"]] + [end]
        for (phase, _), begin, over in zip(lane["phases"], times, times[1:], strict=False):
            yield _slice(phase, begin, over, pid, number)
            for first, last, position, tokens in chunks.get(number, ()) if phase == "prefill" else ():
                if begin - ROUNDING <= first < over:
                    label = f"tokens {position} to {position + tokens - 1}"
                    inside = max(first, begin), max(begin, min(last, over))
                    yield _slice(label, *inside, pid, number, position=position, tokens=tokens)
