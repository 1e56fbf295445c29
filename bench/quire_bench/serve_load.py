"""``quire bench serve``: load on an OpenAI-compatible server, measured by its clients.

Requests arrive by plan, whether or not earlier ones are answered, unless ``concurrency`` limits the
running ones. Times begin when a request is sent. A second server takes turns with the first, round
by round, with the same requests. Every round draws other tokens, so no prefix cache has them.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from quire.base.errors import InvalidArgument, QuireError
from quire.cli.client import BrokenAnswer, HttpFailure
from quire_bench.reports import Spread, print_json, print_table
from quire_bench.serve_client import ServeClient
from quire_bench.serve_trace import Planned, TraceRow, random_requests, read_trace, trace_requests

PERCENTILES = (50, 90, 99)
TIMES = ("ttft", "itl", "tpot", "e2e")
"""Times to the first token, between pieces of text, per token after the first, to the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The outcome of one request. Times are in seconds from its sending."""

    error: str | None = None
    """None for an answer; else the status, or "timeout", "connection" or "broken"."""
    detail: str = ""
    """The error's message."""
    ttft: float | None = None
    gaps: tuple[float, ...] = ()
    """Times between pieces of text."""
    e2e: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult:
    """The result of one round on one server."""

    seconds: float
    """From the first request's arrival to the last answer's end."""
    records: tuple[Record, ...]

    @property
    def answered(self) -> list[Record]:
        return [record for record in self.records if record.error is None]

    @property
    def errors(self) -> dict[str, int]:
        """Number of failed requests by kind of failure."""
        return dict(Counter(record.error for record in self.records if record.error is not None))

    def times(self, name: str) -> list[float]:
        """Return all measurements of one of ``TIMES`` in seconds."""
        if name == "itl":
            return [gap for record in self.answered for gap in record.gaps]
        found = [getattr(record, name) for record in self.answered]
        return [value for value in found if value is not None]

    def summary(self) -> dict[str, Any]:
        """Return counts, rates per second, and means and percentiles of ``TIMES`` in ms."""
        done = self.answered
        prompt = sum(record.prompt_tokens for record in done)
        output = sum(record.output_tokens for record in done)
        found: dict[str, Any] = {
            "requests": len(self.records),
            "answered": len(done),
            "errors": self.errors,
            "seconds": self.seconds,
            "requests_per_second": len(done) / self.seconds,
            "output_tokens_per_second": output / self.seconds,
            "total_tokens_per_second": (prompt + output) / self.seconds,
            "prompt_tokens": prompt,
            "cached_tokens": sum(record.cached_tokens for record in done),
            "output_tokens": output,
        }
        for name in TIMES:
            if values := self.times(name):
                found[f"{name}_ms"] = {"mean": statistics.fmean(values) * 1e3} | {
                    f"p{share}": percentile(values, share) * 1e3 for share in PERCENTILES
                }
        return found


def percentile(values: Sequence[float], share: float) -> float:
    """Interpolate linearly between the nearest of one or more values, as numpy does."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * share / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


# -- one request -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A server and the form of its requests."""

    client: ServeClient
    model: str
    stream: bool = True
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request."""

    def body(self, planned: Planned) -> dict[str, Any]:
        """Return the body of a request."""
        body: dict[str, Any] = {"model": self.model, "prompt": list(planned.prompt), "temperature": 0}
        body |= {"max_tokens": planned.output_tokens, "stream": self.stream}
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | dict(self.extra)

    async def ask(self, planned: Planned) -> Record:
        """Send one request and wait for its end; record errors."""
        started = time.perf_counter()
        try:
            if self.stream:
                return await self._streamed(planned, started)
            answer = await self.client.json("POST", "/v1/completions", self.body(planned))
            return _with_usage(Record(e2e=time.perf_counter() - started), answer.get("usage"))
        except HttpFailure as error:
            kind, detail = str(error.status), str(error)
        except TimeoutError:
            kind, detail = "timeout", "the answer took longer than the timeout"
        except BrokenAnswer as error:
            kind, detail = "broken", str(error)
        except OSError as error:
            kind, detail = "connection", error.strerror or str(error) or type(error).__name__
        return Record(error=kind, detail=detail, e2e=time.perf_counter() - started)

    async def _streamed(self, planned: Planned, started: float) -> Record:
        usage: Any = None
        stamps: list[float] = []
        events: AsyncGenerator[dict[str, Any], None] = self.client.events("/v1/completions", self.body(planned))
        async with aclosing(events):
            async for event in events:
                usage = event.get("usage") or usage
                # The last event of a choice may have only a finish reason and no text.
                if any(choice.get("text") or not choice.get("finish_reason") for choice in event.get("choices") or ()):
                    stamps.append(time.perf_counter() - started)
        gaps = tuple(later - earlier for earlier, later in pairwise(stamps))
        ended = time.perf_counter() - started
        return _with_usage(Record(ttft=stamps[0] if stamps else ended, gaps=gaps, e2e=ended), usage)


def _with_usage(record: Record, usage: Any) -> Record:
    try:
        details = usage.get("prompt_tokens_details") or {}
        return replace(
            record,
            prompt_tokens=int(usage["prompt_tokens"]),
            output_tokens=int(usage["completion_tokens"]),
            cached_tokens=int(details.get("cached_tokens") or 0),
        )
    except (AttributeError, LookupError, TypeError, ValueError):
        raise BrokenAnswer(f"the server does not say how many tokens there were: usage is {usage!r}") from None


# -- many requests -----------------------------------------------------------------------------


async def send_load(
    plan: Sequence[Planned], ask: Callable[[Planned], Any], *, concurrency: int | None = None
) -> LoadResult:
    """Send every request of a plan at its time; ``ask`` is like ``Target.ask``. Run at most
    ``concurrency`` at a time; the others wait in order of arrival."""
    gate = nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
    loop = asyncio.get_running_loop()
    records: list[Record] = [Record()] * len(plan)

    async def one(index: int) -> None:
        async with gate:
            records[index] = await ask(plan[index])

    began, started = loop.time(), time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for index, planned in enumerate(plan):
            if (wait := began + planned.at - loop.time()) > 0:
                await asyncio.sleep(wait)
            tasks.create_task(one(index))
    return LoadResult(seconds=time.perf_counter() - started, records=tuple(records))


def run_serve(
    url: str,
    *,
    peer: str | None = None,
    model: str | None = None,
    peer_model: str | None = None,
    api_key: str | None = None,
    peer_api_key: str | None = None,
    requests: int = 256,
    rate: float = math.inf,
    concurrency: int | None = None,
    prompt_tokens: tuple[int, int] = (100, 1024),
    output_tokens: tuple[int, int] = (100, 1024),
    vocab_size: int = 1024,
    trace: str | Path | Sequence[TraceRow] | None = None,
    scale: float = 1.0,
    speed: float = 1.0,
    stream: bool = True,
    ignore_eos: bool = True,
    rounds: int = 1,
    warmup: int = 1,
    seed: int = 0,
    timeout: float = 600.0,
) -> dict[str, Any]:
    """Measure one server, or two in turn; print a table and one JSON line; return its content.

    ``model``: by default the first that a server lists. ``vocab_size``: random token ids of prompts
    stay below it, so it must not exceed the model's. ``trace``: a file or rows in Mooncake's format
    in place of random requests, of which the first ``requests`` are sent; ``scale`` and ``speed``
    are those of ``trace_requests``. ``warmup``: uncounted requests before each server's first
    round. ``ignore_eos`` is unknown to OpenAI's own servers.

    Raise ``InvalidArgument`` or ``NotFound`` for bad arguments, and ``QuireError`` if a server
    cannot be reached or answers nothing at all.
    """
    checks = (("rounds", rounds, 1), ("warmup", warmup, 0), ("requests", requests, 1), ("concurrency", concurrency, 1))
    for name, value, least in checks:
        if value is not None and value < least:
            raise InvalidArgument(f"{name} {value}; at least {least} is accepted")
    if peer is None and (peer_model is not None or peer_api_key is not None):
        raise InvalidArgument("peer_model and peer_api_key are about a second server; give peer, its address")
    rows = None if trace is None else _rows(trace, requests)

    def plan(turn: int) -> list[Planned]:
        if rows is not None:
            return trace_requests(rows, vocab_size=vocab_size, scale=scale, speed=speed, salt=seed + turn)
        return random_requests(
            requests,
            rate=rate,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            vocab_size=vocab_size,
            seed=seed + turn,
        )

    plans = [plan(turn) for turn in range(rounds)]
    clients = {"server": ServeClient(url, api_key=api_key, timeout=timeout)}
    if peer is not None:
        clients["peer"] = ServeClient(peer, api_key=peer_api_key, timeout=timeout)
    given = {"server": model, "peer": peer_model}
    warm = [replace(planned, at=0.0) for planned in plan(-1)[:warmup]]

    async def measure() -> tuple[dict[str, list[LoadResult]], dict[str, str]]:
        targets: dict[str, Target] = {}
        try:
            for name, client in clients.items():
                found = given[name] or await _first_model(client)
                targets[name] = Target(client=client, model=found, stream=stream, ignore_eos=ignore_eos)
                for planned in warm:
                    await targets[name].ask(planned)
            results: dict[str, list[LoadResult]] = {name: [] for name in targets}
            for turn in range(rounds):
                for name, target in targets.items():
                    result = await send_load(plans[turn], target.ask, concurrency=concurrency)
                    if not result.answered:
                        detail = result.records[0].detail
                        address = clients[name].address.authority
                        raise QuireError(
                            f"{address} answered none of {len(result.records)} requests; the first: {detail}"
                        )
                    results[name].append(result)
        finally:
            for client in clients.values():
                await client.close()
        return results, {name: target.model for name, target in targets.items()}

    results, models = asyncio.run(measure())
    summaries = {name: [result.summary() for result in found] for name, found in results.items()}
    for name, client in clients.items():
        print(f"{name}: {models[name]} at {client.address.authority}")
    print_table([row for name, found in summaries.items() for row in _rate_rows(name, found)])
    print()
    print_table([row for name, found in summaries.items() for row in _time_rows(name, found)])
    line: dict[str, Any] = {
        "benchmark": "serve",
        "servers": {name: {"url": url if name == "server" else peer, "model": models[name]} for name in summaries},
        "requests": len(plans[0]),
        "rate": rate if rows is None and math.isfinite(rate) else None,
        "concurrency": concurrency,
        "trace": str(trace) if isinstance(trace, str | Path) else trace is not None,
        "stream": stream,
        "rounds": summaries,
    }
    if peer is not None:
        line["ratios"] = ratios = compare(summaries["server"], summaries["peer"])
        print()
        print_table([{"peer / server": name, "median (least to most)": str(spread)} for name, spread in ratios.items()])
    for name, found in results.items():
        for kind, detail in _first_errors(found).items():
            print(f"{name}: {kind}: {detail}")
    print_json(line)
    return line


def compare(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> dict[str, Spread]:
    """Return the second server's numbers divided by the first one's of the same round: rates, and
    medians and 99th percentiles of times."""

    def numbers(summary: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
        for name in ("requests_per_second", "output_tokens_per_second", "total_tokens_per_second"):
            yield name, summary[name]
        for name in TIMES:
            for share in (50, 99):
                if f"{name}_ms" in summary:
                    yield f"{name}_p{share}", summary[f"{name}_ms"][f"p{share}"]

    found: dict[str, list[float]] = {}
    for own, other in zip(ours, theirs, strict=True):
        others = dict(numbers(other))
        for name, number in numbers(own):
            if name in others and number > 0:
                found.setdefault(name, []).append(others[name] / number)
    return {name: Spread.of(values) for name, values in found.items()}


def _rate_rows(name: str, summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "server": name,
            "round": turn,
            "answered": f"{found['answered']}/{found['requests']}",
            "errors": ", ".join(f"{kind}: {count}" for kind, count in found["errors"].items()) or "none",
            "req/s": found["requests_per_second"],
            "output tok/s": found["output_tokens_per_second"],
            "total tok/s": found["total_tokens_per_second"],
            "cached": f"{found['cached_tokens'] / max(1, found['prompt_tokens']):.0%}",
        }
        for turn, found in enumerate(summaries, 1)
    ]


def _time_rows(name: str, summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for time_name in TIMES:
        measured = [found[f"{time_name}_ms"] for found in summaries if f"{time_name}_ms" in found]
        if measured:
            medians = {f"{key} ms": statistics.median(one[key] for one in measured) for key in measured[0]}
            rows.append({"server": name, "time": time_name, **medians})
    return rows


def _first_errors(results: Sequence[LoadResult]) -> dict[str, str]:
    found: dict[str, str] = {}
    for result in results:
        for record in result.records:
            if record.error is not None:
                found.setdefault(record.error, record.detail)
    return found


def _rows(trace: str | Path | Sequence[TraceRow], limit: int) -> Sequence[TraceRow]:
    return read_trace(trace, limit=limit) if isinstance(trace, str | Path) else trace[:limit]


async def _first_model(client: ServeClient) -> str:
    try:
        return await client.model()
    except TimeoutError:
        raise QuireError(f"the server at {client.address.authority} does not answer") from None
    except OSError as error:
        if isinstance(error, QuireError):
            raise
        raise QuireError(
            f"no server can be reached at {client.address.authority}: {error.strerror or type(error).__name__}"
        ) from error
