"""The load generator: its client against answers in awkward pieces, plans and traces, what it
measures, what it prints.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.errors import InvalidArgument, NotFound, QuireError
from quire.cli.client import BrokenAnswer, EventParser, HttpFailure, ServerAddress
from quire_bench.serve_client import ServeClient
from quire_bench.serve_load import LoadResult, Record, Target, compare, percentile, run_serve, send_load
from quire_bench.serve_trace import (
    BLOCK,
    LEAST_ID,
    Planned,
    TraceRow,
    random_requests,
    read_trace,
    synthetic_trace,
    trace_requests,
    write_trace,
)

Handler = Callable[["Request", asyncio.StreamWriter], Awaitable[None]]


class Request:
    """What a stub server was asked."""

    def __init__(self, head: str, body: bytes) -> None:
        self.method, self.path, _ = head.split("\r\n")[0].split(" ")
        self.headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head.split("\r\n")[1:])
        }
        self.body: Any = json.loads(body) if body else None


@contextmanager
def stub(handler: Handler) -> Iterator[str]:
    """A server on a free port, in a thread of its own: the handler writes the bytes of each answer.

    Its address.
    """
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    port: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                found = Request(head.decode().strip(), b"")
                size = int(found.headers.get("content-length", "0"))
                await handler(Request(head.decode().strip(), await reader.readexactly(size)), writer)
                await writer.drain()
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port.append(server.sockets[0].getsockname()[1])
        ready.set()
        await stopped.wait()
        server.close()

    stopped = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    ready.wait()
    try:
        yield f"http://127.0.0.1:{port[0]}"
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
            loop.run_until_complete(asyncio.wait([task]))
        loop.close()


def answer(body: bytes, status: str = "200 OK", extra: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{extra}\r\n".encode() + body


def chunked(*pieces: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(f"{len(piece):x};note\r\n".encode() + piece + b"\r\n" for piece in (*pieces, b""))


def event(value: object) -> bytes:
    return f"data: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n\n".encode()


def text_event(text: str, reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": reason}], "usage": None})


def usage_event(prompt: int, output: int, cached: int = 0) -> bytes:
    details = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}
    return event({"choices": [], "usage": details})


def run(url: str, work: Callable[[ServeClient], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with ServeClient(url, **options) as client:
            return await work(client)

    return asyncio.run(main())


async def collect(client: ServeClient, path: str = "/v1/completions") -> list[dict[str, Any]]:
    return [found async for found in client.events(path, {})]


# -- the client ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "authority", "prefix", "port"),
    [
        ("http://localhost:8000", "localhost:8000", "", 8000),
        ("http://localhost:8000/v1/", "localhost:8000", "", 8000),
        ("https://example.org/llm/v1", "example.org", "/llm", 443),
        ("http://[::1]:81", "[::1]:81", "", 81),
        ("http://example.org:443", "example.org:443", "", 443),
    ],
)
def test_addresses(url: str, authority: str, prefix: str, port: int) -> None:
    address = ServerAddress.parse(url)
    assert (address.authority, address.prefix, address.port) == (authority, prefix, port)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://a", "http://", "http://a:x", "http://a:99999", "http://a/?b", "http://a\r\nb", ""]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match="http://localhost:8000 is accepted"):
        ServerAddress.parse(url)


@pytest.mark.parametrize("key", ["", "a\r\nX-Evil: 1", "schlüssel"])
def test_keys_that_no_header_can_hold_are_refused(key: str) -> None:
    with pytest.raises(InvalidArgument, match="api_key"):
        ServeClient("http://localhost", api_key=key)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_do_not_depend_on_how_their_bytes_are_cut(size: int) -> None:
    stream = ": hello\n\ndata: {}\r\n\r\nevent: x\ndata: zwei\ndata:  drei ☃\n\ndata:nospace\nid: 7\n\n\ndata: unfinished\n".encode()
    parser = EventParser()
    found = [one for start in range(0, len(stream), size) for one in parser.feed(stream[start : start + size])]
    assert found == ["{}", "zwei\n drei ☃", "nospace"]


def test_connections_are_used_again_and_carry_the_key() -> None:
    seen: list[tuple[str, str, str | None, int]] = []

    async def handler(request: Request, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")[1]
        seen.append((request.method, request.path, request.headers.get("authorization"), peer))
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" + answer(b'{"data": [{"id": "m"}]}'))

    async def work(client: ServeClient) -> None:
        assert await client.model() == "m"
        assert await client.json("POST", "/x", {"a": 1}) == {"data": [{"id": "m"}]}

    with stub(handler) as url:
        run(url + "/base/v1", work, api_key="k1")
    assert [call[:3] for call in seen] == [
        ("GET", "/base/v1/models", "Bearer k1"),
        ("POST", "/base/x", "Bearer k1"),
    ]
    assert seen[0][3] == seen[1][3]


@pytest.mark.parametrize("way", ["closed by the server", "without a length", "asked to close"])
def test_connections_that_end_are_not_used_again(way: str) -> None:
    ports: list[int] = []

    async def handler(request: Request, writer: asyncio.StreamWriter) -> None:
        ports.append(writer.get_extra_info("peername")[1])
        if way == "without a length":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n{}")
        else:
            writer.write(answer(b"{}", extra="Connection: close\r\n" if way == "asked to close" else ""))
        await writer.drain()
        writer.close()

    async def work(client: ServeClient) -> None:
        for _ in range(2):
            assert await client.json("GET", "/") == {}
            await asyncio.sleep(0.02)

    with stub(handler) as url:
        run(url, work)
    assert len(set(ports)) == 2


def test_a_stream_ends_with_done_and_may_be_cut_anywhere() -> None:
    whole = text_event("a") + text_event("☃") + event("[DONE]")
    middle = whole.index("☃".encode()) + 1

    async def handler(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(chunked(whole[:middle], whole[middle : middle + 3], whole[middle + 3 :]))

    with stub(handler) as url:
        found = run(url, collect)
    assert [one["choices"][0]["text"] for one in found] == ["a", "☃"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (chunked(text_event("a")), r"ended without \[DONE\]"),
        (chunked(text_event("a"))[:-5], "before the answer was complete"),
        (answer(text_event("a"))[:-3], "before the answer was complete"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "before the answer was complete"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "does not begin like HTTP/1.1"),
        (chunked(event("nonsense")), "no JSON object: 'nonsense'"),
        (chunked(event({"error": {"message": "out of pages"}})), "the stream broke: out of pages"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "a chunk of size"),
    ],
)
def test_broken_answers_are_told_apart(raw: bytes, message: str) -> None:
    async def handler(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()
        writer.close()

    with stub(handler) as url, pytest.raises(BrokenAnswer, match=message):
        run(url, collect)


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b'{"error": {"message": "too hot", "param": "temperature", "code": null}}', "400: too hot", "temperature"),
        (b"<h1>Bad</h1>", "400: <h1>Bad</h1>", None),
        (b"[]", r"400: \[\]", None),
        (b"", "400: without a reason", None),
    ],
)
def test_failures_say_what_the_server_says(body: bytes, message: str, param: str | None) -> None:
    async def handler(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(body, "400 Bad Request"))

    with stub(handler) as url, pytest.raises(HttpFailure, match=message) as caught:
        run(url, collect)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_closing_a_stream_closes_its_connection_at_once() -> None:
    closed = threading.Event()

    async def handler(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = text_event("a")
        try:
            while True:
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0.001)
        except ConnectionError:
            closed.set()

    async def work(client: ServeClient) -> None:
        async with aclosing(client.events("/", {})) as events:
            async for _ in events:
                break
        assert await asyncio.to_thread(closed.wait, 5)

    with stub(handler) as url:
        run(url, work)


def test_a_silent_server_is_a_timeout_and_the_callers_own_time_is_none() -> None:
    async def handler(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.path == "/slow":
            await asyncio.sleep(1)
        writer.write(chunked(text_event("a"), event("[DONE]")))

    async def work(client: ServeClient) -> None:
        with pytest.raises(TimeoutError):
            await collect(client, "/slow")
        async for _ in client.events("/quick", {}):
            await asyncio.sleep(0.1)  # not interrupted, though the time is almost over

    with stub(handler) as url:
        run(url, work, timeout=0.15)


# -- plans and traces ------------------------------------------------------------------------------


def test_random_requests_keep_their_ranges_and_their_seed() -> None:
    options: dict[str, Any] = {"prompt_tokens": (3, 9), "output_tokens": (1, 4), "vocab_size": 300}
    plan = random_requests(400, rate=50.0, seed=1, **options)
    assert plan == random_requests(400, rate=50.0, seed=1, **options)
    assert plan != random_requests(400, rate=50.0, seed=2, **options)
    assert {len(one.prompt) for one in plan} == set(range(3, 10))
    assert {one.output_tokens for one in plan} == set(range(1, 5))
    assert {token for one in plan for token in one.prompt} <= set(range(LEAST_ID, 300))
    gaps = np.diff([one.at for one in plan])
    # An exponential distribution's mean and deviation are both 1/rate; 399 draws come within 5
    # standard errors.
    assert abs(gaps.mean() * 50 - 1) < 5 / math.sqrt(399)
    assert abs(gaps.std() * 50 - 1) < 5 * math.sqrt(2 / 399)
    at_once = random_requests(400, rate=math.inf, seed=1, **options)
    assert [one.prompt for one in at_once] == [one.prompt for one in plan]
    assert {one.at for one in at_once} == {0.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requests": 0}, "requests 0"),
        ({"rate": 0.0}, "rate 0.0"),
        ({"rate": math.nan}, "rate nan"),
        ({"prompt_tokens": (5, 4)}, "prompt_tokens 5-4"),
        ({"output_tokens": (0, 4)}, "output_tokens 0-4"),
        ({"vocab_size": LEAST_ID}, "vocab_size 256"),
    ],
)
def test_random_requests_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    options = {"requests": 2, "rate": 1.0, "prompt_tokens": (1, 2), "output_tokens": (1, 2), "vocab_size": 300}
    with pytest.raises(InvalidArgument, match=message):
        random_requests(**{**options, "seed": 0, **change})


def shared(first: Planned, second: Planned) -> int:
    return next(
        (index for index, (a, b) in enumerate(zip(first.prompt, second.prompt, strict=False)) if a != b),
        min(len(first.prompt), len(second.prompt)),
    )


def test_a_trace_shares_the_tokens_of_equal_blocks() -> None:
    rows = [
        TraceRow(timestamp=3000, input_length=BLOCK + 5, output_length=7, hash_ids=(1, 2)),
        TraceRow(timestamp=1000, input_length=2 * BLOCK + 1, output_length=300, hash_ids=(1, 3, 4)),
    ]
    early, late = trace_requests(rows, vocab_size=4096)
    assert (early.at, late.at) == (0.0, 2.0)
    assert (len(early.prompt), early.output_tokens) == (2 * BLOCK + 1, 300)
    assert (len(late.prompt), late.output_tokens) == (BLOCK + 5, 7)
    assert shared(early, late) == BLOCK
    other = trace_requests(rows, vocab_size=4096, salt=1)
    assert shared(early, other[0]) < 8
    assert shared(other[0], other[1]) == BLOCK
    early, late = trace_requests(rows, vocab_size=4096, scale=1 / 8, speed=4)
    assert late.at == 0.5
    assert (len(early.prompt), early.output_tokens) == (2 * 64, 38)
    assert shared(early, late) == 64


def test_conversations_carry_what_was_said_and_share_a_system_prompt() -> None:
    rows = synthetic_trace(20, turns=(2, 4), system_tokens=2 * BLOCK + 100, user_tokens=(600, 900), seed=3)
    assert rows == synthetic_trace(20, turns=(2, 4), system_tokens=2 * BLOCK + 100, user_tokens=(600, 900), seed=3)
    assert [row.timestamp for row in rows] == sorted(row.timestamp for row in rows)
    assert {row.hash_ids[:2] for row in rows} == {(0, 1)}
    conversations: dict[int, list[TraceRow]] = {}
    for row in sorted(rows, key=lambda row: row.input_length):
        owner = next(
            (
                name
                for name, turns in conversations.items()
                if row.hash_ids[: len(full := turns[-1].hash_ids[: turns[-1].input_length // BLOCK])] == full
                and len(full) > 2
            ),
            len(conversations),
        )
        conversations.setdefault(owner, []).append(row)
    turns = [len(found) for found in conversations.values()]
    assert len(turns) == 20
    assert set(turns) == {2, 3, 4}
    for found in conversations.values():
        for before, after in pairwise(found):
            assert after.timestamp >= before.timestamp
            assert after.input_length >= before.input_length + before.output_length + 600
    # No other block is shared.
    names = [name for found in conversations.values() for name in {name for row in found for name in row.hash_ids[2:]}]
    assert len(names) == len(set(names))


def test_traces_are_written_and_read(tmp_path: Path) -> None:
    rows = synthetic_trace(3, seed=1)
    write_trace(rows, tmp_path / "trace.jsonl")
    assert read_trace(tmp_path / "trace.jsonl") == rows
    assert read_trace(tmp_path / "trace.jsonl", limit=2) == rows[:2]
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidArgument, match="holds no requests"):
        read_trace(tmp_path / "empty.jsonl")
    with pytest.raises(NotFound, match=r"missing\.jsonl"):
        read_trace(tmp_path / "missing.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2 .* is no JSON object"),
        ('{"timestamp": 1}', "line 2 .* is no JSON object with timestamp, input_length"),
        (
            '{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "1 hash_ids for 513 tokens; .* so 2",
        ),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}', "input_length 0"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "timestamp must be"),
        ('{"timestamp": 1, "input_length": 1.5, "output_length": 1, "hash_ids": [1]}', "whole numbers"),
    ],
)
def test_bad_lines_of_a_trace_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(InvalidArgument, match=message):
        read_trace(path)


# -- measuring -------------------------------------------------------------------------------------


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=37).tolist()
    for share in (0, 1, 50, 90, 99, 100):
        assert percentile(values, share) == pytest.approx(np.percentile(values, share), rel=1e-12)  # float64
    assert percentile([3.0], 99) == 3.0


def test_a_summary_counts_only_what_was_answered() -> None:
    good = Record(ttft=0.1, gaps=(0.01, 0.03), e2e=0.2, prompt_tokens=10, cached_tokens=4, output_tokens=5)
    result = LoadResult(seconds=2.0, records=(good, Record(error="429", e2e=9.0), good, Record(error="timeout")))
    found = result.summary()
    assert (found["requests"], found["answered"], found["errors"]) == (4, 2, {"429": 1, "timeout": 1})
    assert (found["requests_per_second"], found["output_tokens_per_second"]) == (1.0, 5.0)
    assert (found["total_tokens_per_second"], found["cached_tokens"]) == (15.0, 8)
    assert found["ttft_ms"]["p99"] == found["ttft_ms"]["mean"] == 100.0
    assert found["itl_ms"]["p50"] == pytest.approx(20.0)
    assert found["tpot_ms"]["p50"] == pytest.approx(25.0)
    assert found["e2e_ms"]["p90"] == 200.0
    assert "ttft_ms" not in LoadResult(seconds=1.0, records=(Record(e2e=1.0, output_tokens=3),)).summary()


def test_ratios_are_taken_within_a_round() -> None:
    def summary(rate: float, time: float) -> dict[str, Any]:
        rates = {f"{name}_per_second": rate for name in ("requests", "output_tokens", "total_tokens")}
        return {**rates, "e2e_ms": {"p50": time, "p99": 2 * time}}

    found = compare([summary(1, 10), summary(10, 1)], [summary(2, 30), summary(20, 2)])
    assert found["output_tokens_per_second"].median == 2.0
    assert (found["e2e_p50"].least, found["e2e_p50"].most) == (2.0, 3.0)
    assert "ttft_p50" not in found


def test_concurrency_and_arrivals_are_kept() -> None:
    plan = [Planned(at=0.02 * index, prompt=(300,), output_tokens=index + 1) for index in range(10)]
    running = most = 0
    order: list[tuple[int, float]] = []

    async def ask(planned: Planned) -> Record:
        nonlocal running, most
        running += 1
        most = max(most, running)
        order.append((planned.output_tokens, time.perf_counter() - started))
        await asyncio.sleep(0.05)
        running -= 1
        return Record(output_tokens=planned.output_tokens)

    started = time.perf_counter()
    result = asyncio.run(send_load(plan, ask))
    assert [number for number, _ in order] == list(range(1, 11))
    assert all(at >= planned.at for (_, at), planned in zip(order, plan, strict=True))
    assert most > 2
    assert result.seconds >= plan[-1].at + 0.05
    order, most = [], 0
    result = asyncio.run(send_load(plan, ask, concurrency=2))
    assert most == 2
    assert [record.output_tokens for record in result.records] == list(range(1, 11))


class ModelServer:
    """A stub that answers as a completions server does, slower or quicker."""

    def __init__(self, *, first: float = 0.0, gap: float = 0.0, model: str = "stub", fail_every: int = 0) -> None:
        self.first, self.gap, self.model, self.fail_every = first, gap, model, fail_every
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        if request.path == "/v1/models":
            writer.write(answer(json.dumps({"data": [{"id": self.model}]}).encode()))
            return
        assert (request.method, request.path) == ("POST", "/v1/completions")
        body = request.body
        self.bodies.append(body)
        if self.fail_every and len(self.bodies) % self.fail_every == 0:
            writer.write(answer(b'{"error": {"message": "full"}}', "429 Too Many Requests"))
            return
        prompt, count = len(body["prompt"]), body["max_tokens"]
        await asyncio.sleep(self.first)
        if not body["stream"]:
            usage = {"prompt_tokens": prompt, "completion_tokens": count}
            writer.write(answer(json.dumps({"choices": [{"text": "a" * count}], "usage": usage}).encode()))
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        last = text_event("", "length") + usage_event(prompt, count, prompt // 2) + event("[DONE]")
        for piece in [text_event("a")] * count + [last, b""]:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            if piece and piece is not last:
                await asyncio.sleep(self.gap)


def test_times_of_a_stream_are_those_of_the_server() -> None:
    server = ModelServer(first=0.08, gap=0.02)

    async def work(client: ServeClient) -> Record:
        target = Target(client=client, model="m", extra={"min_p": 0.1})
        return await target.ask(Planned(at=0.0, prompt=(300, 301, 302), output_tokens=6))

    with stub(server) as url:
        record = run(url, work)
    assert record.error is None
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (3, 1, 6)
    assert 0.08 <= record.ttft < 0.16
    assert len(record.gaps) == 5
    assert 0.02 <= statistics.median(record.gaps) < 0.06
    assert record.e2e >= 0.08 + 6 * 0.02
    (body,) = server.bodies
    assert body["prompt"] == [300, 301, 302]
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"], body["min_p"]) == (6, 0, True, 0.1)
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("stream", [True, False])
def test_the_command_prints_tables_and_one_line_of_json(stream: bool, capsys: pytest.CaptureFixture[str]) -> None:
    quick, slow = ModelServer(first=0.01), ModelServer(first=0.1, model="other")
    with stub(quick) as url, stub(slow) as peer:
        found = run_serve(
            url,
            peer=peer,
            requests=6,
            concurrency=3,
            prompt_tokens=(5, 9),
            output_tokens=(2, 4),
            stream=stream,
            rounds=2,
            seed=5,
        )
    out = capsys.readouterr().out
    line = json.loads(out.splitlines()[-1])
    assert line["benchmark"] == "serve"
    assert [line["servers"][name]["model"] for name in ("server", "peer")] == ["stub", "other"]
    assert line["rounds"]["peer"][1]["answered"] == 6
    assert found["ratios"]["e2e_p50"].least > 2
    assert found["ratios"]["requests_per_second"].most < 0.5
    assert ("ttft_ms" in line["rounds"]["server"][0]) is stream
    assert "output tok/s" in out
    assert "peer / server" in out
    # The same requests for both, others in every round; the first of each was for warming up.
    sent = [[(tuple(body["prompt"]), body["max_tokens"]) for body in server.bodies] for server in (quick, slow)]
    assert len(sent[0]) == 13
    assert sorted(sent[0][1:7]) == sorted(sent[1][1:7])
    assert len(set(sent[0])) == 13
    assert all("stream_options" not in body for body in quick.bodies) is not stream


def test_the_command_replays_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(synthetic_trace(4, turns=(2, 2), think_seconds=0.5, rate=10.0, seed=2), tmp_path / "trace.jsonl")
    server = ModelServer()
    with stub(server) as url:
        found = run_serve(url, trace=tmp_path / "trace.jsonl", requests=5, scale=1 / 64, speed=10.0, warmup=0)
    rows = read_trace(tmp_path / "trace.jsonl", limit=5)
    assert [body["max_tokens"] for body in server.bodies] == [max(1, round(row.output_length / 64)) for row in rows]
    assert found["rounds"]["server"][0]["answered"] == 5
    assert len({tuple(body["prompt"][:16]) for body in server.bodies}) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["trace"].endswith("trace.jsonl")


def test_errors_are_counted_by_status(capsys: pytest.CaptureFixture[str]) -> None:
    with stub(ModelServer(fail_every=3)) as url:
        found = run_serve(url, requests=9, concurrency=1, prompt_tokens=(2, 2), output_tokens=(2, 2), warmup=0)
    assert found["rounds"]["server"][0]["errors"] == {"429": 3}
    assert "429: 3" in capsys.readouterr().out


def test_what_went_wrong_with_all_requests_is_said() -> None:
    async def handler(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b'{"error": {"message": "no such model"}}', "404 Not Found"))

    with stub(handler) as url, pytest.raises(QuireError, match=r"answered none of 2 requests; .* 404: no such model"):
        run_serve(url, model="m", requests=2)
    with stub(handler) as url, pytest.raises(HttpFailure, match="404: no such model"):
        run_serve(url, requests=2)


def test_a_server_that_is_not_there_is_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(QuireError, match=f"no server can be reached at {address}"):
            run_serve(f"http://{address}", requests=1)


@pytest.mark.parametrize(
    ("usage", "error"),
    [(None, "does not say how many tokens"), ({"prompt_tokens": 1}, "does not say how many tokens")],
)
def test_a_server_without_usage_is_an_error(usage: object, error: str) -> None:
    async def handler(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(json.dumps({"choices": [], "usage": usage}).encode()))

    async def work(client: ServeClient) -> Record:
        target = Target(client=client, model="m", stream=False)
        return await target.ask(Planned(at=0.0, prompt=(300,), output_tokens=1))

    with stub(handler) as url:
        record = run(url, work)
    assert record.error == "broken"
    assert error in record.detail


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds 0"),
        ({"concurrency": 0}, "concurrency 0"),
        ({"warmup": -1}, "warmup -1"),
        ({"timeout": 0.0}, "timeout 0.0"),
        ({"peer_model": "x"}, "give peer"),
        ({"trace": [], "requests": 1}, "holds no requests"),
        ({"trace": synthetic_trace(1), "scale": 2.0}, "scale 2.0"),
        ({"trace": synthetic_trace(1), "speed": 0.0}, "speed 0.0"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        run_serve("http://127.0.0.1:9", **options)
