"""Spans of requests: their names, times and parents, and that no collector can harm a request."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from quire import AsyncLLM, SamplingParams
from quire.base.errors import InvalidArgument, Unsupported
from quire.server.http import app, spans
from quire.server.http.settings import ServerSettings
from quire.server.http.spans import RequestSpans, exporter_for, traces_url

from .conftest import OPTIONS, Served, serving, wait_for

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=x"}


@contextmanager
def spanned(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, exporter: SpanExporter, settings: ServerSettings | None = None
) -> Iterator[Served]:
    """A server whose spans go to ``exporter``; they are there when it has stopped."""
    monkeypatch.setattr(app, "exporter_for", lambda endpoint: exporter)
    with serving(llm, settings) as found:
        yield found


def by_id(found: Sequence[ReadableSpan]) -> dict[int, list[ReadableSpan]]:
    """The children of each span of a request, in order of time."""
    children: dict[int, list[ReadableSpan]] = {}
    for span in found:
        if span.kind is SpanKind.INTERNAL:
            assert span.parent is not None
            children.setdefault(span.parent.span_id, []).append(span)
    return {parent: sorted(spans, key=lambda one: one.start_time or 0) for parent, spans in children.items()}


def servers(found: Sequence[ReadableSpan]) -> list[ReadableSpan]:
    return sorted((one for one in found if one.kind is SpanKind.SERVER), key=lambda one: one.start_time or 0)


def test_a_request_has_a_span_with_its_phases(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    asyncio.run(llm.reset_prefix_cache())
    body = {"prompt": "def fib(n):\n    return 1", "max_tokens": 7, "temperature": 0.5, "ignore_eos": True}
    begun = time.time_ns()
    with spanned(llm, monkeypatch, exporter) as found:
        usage = [found.client.post("/v1/completions", json=body).raise_for_status().json()["usage"] for _ in range(2)]
    ended = time.time_ns()
    first, second = servers(exporter.get_finished_spans())
    assert first.name == "text_completion tiny-python"
    attributes = dict(second.attributes or {})
    assert {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "tiny-python",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": usage[1]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.output.type": "text",
        "quire.kind": "request",
        "quire.cached_tokens": usage[1]["prompt_tokens"] - 1,
        "quire.cached_tokens.pool": usage[1]["prompt_tokens"] - 1,
        "quire.miss": "none",
        "quire.preemptions": 0,
    }.items() <= attributes.items()
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == attributes["quire.cached_tokens"]
    children = by_id(exporter.get_finished_spans())
    for span in (first, second):
        assert span.context is not None
        inside = children[span.context.span_id]
        assert [one.name for one in inside] == ["queue", "prefill", "decode"]
        times = [time for one in inside for time in (one.start_time, one.end_time)]
        assert times == sorted(times)
        assert begun <= span.start_time == times[0] <= times[-1] == span.end_time <= ended
        assert span.parent is None
        known = dict(span.attributes or {})
        parts = [known[f"gen_ai.latency.time_in_{part}"] for part in ("queue", "model_prefill", "model_decode")]
        assert known["gen_ai.latency.time_to_first_token"] == pytest.approx(sum(parts[:2]))
        assert sum(parts) <= known["gen_ai.latency.e2e"]
        assert known["gen_ai.latency.time_in_model_inference"] == pytest.approx(sum(parts[1:]))
    assert "fib" not in "".join(one.to_json() for one in exporter.get_finished_spans())


def test_all_endpoints_that_generate_go_on_with_their_callers_trace(
    chat_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    messages = [{"role": "user", "content": "hello"}]
    with spanned(chat_llm, monkeypatch, exporter, ServerSettings(served_model_name="m")) as found:
        one = found.client.post("/v1/sessions", json={"prompt": "x"}).raise_for_status().json()["id"]
        calls: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": ["a = 1", "b = 2"], "max_tokens": 2}),
            ("/v1/completions", {"prompt": "c = 3", "max_tokens": 2, "stream": True}),
            ("/v1/chat/completions", {"messages": messages, "max_tokens": 2}),
            ("/v1/chat/completions", {"messages": messages, "max_tokens": 2, "stream": True}),
            ("/v1/responses", {"input": "hello", "max_output_tokens": 2}),
            ("/v1/messages", {"model": "m", "messages": messages, "max_tokens": 2}),
            (f"/v1/sessions/{one}/append", {"text": "y = 2"}),
            (f"/v1/sessions/{one}/generate", {"max_tokens": 2}),
            ("/v1/sessions/generate", {"ids": [one], "max_tokens": 2}),
            (f"/v1/sessions/{one}/generate", {"max_tokens": 2, "stream": True}),
        ]
        for number, (path, body) in enumerate(calls):
            headers = {**HEADERS, "traceparent": f"00-{TRACE}-{number + 1:016x}-01"}
            found.client.post(path, json=body, headers=headers).raise_for_status()
    requests = [span for span in servers(exporter.get_finished_spans()) if span.parent is not None]
    parents: dict[int, list[str]] = {}
    for span in requests:
        assert span.context is not None
        assert span.parent is not None
        assert f"{span.context.trace_id:032x}" == TRACE
        assert span.context.trace_state.get("vendor") == "x"
        parents.setdefault(span.parent.span_id, []).append(span.name)
    assert set(parents) == set(range(1, len(calls) + 1))
    assert parents[1] == ["text_completion m"] * 2
    assert parents[3] == parents[4] == ["chat m"]
    assert set(parents[5]) == set(parents[6]) == {"chat m"}
    assert parents[7] == ["compute_state m"]
    assert "text_completion m" in parents[8]


def test_a_trace_that_its_caller_does_not_sample_is_not_sent(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    body = {"prompt": "a", "max_tokens": 1}
    with spanned(llm, monkeypatch, exporter) as found:
        for header in (f"00-{TRACE}-{SPAN}-00", "nonsense", "x" * 5000, f"00-{'0' * 32}-{SPAN}-01"):
            found.client.post("/v1/completions", json=body, headers={"traceparent": header}).raise_for_status()
    assert [span.parent for span in servers(exporter.get_finished_spans())] == [None] * 3


def test_failures_and_cancels_are_told(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()

    def broken(tokens: Sequence[int], logits: object) -> object:
        raise ValueError("a secret")

    async def run() -> None:
        params = SamplingParams(max_tokens=5, logits_processors=[broken])
        await llm.generate("def f", params)
        stream = llm.stream("def g", SamplingParams(max_tokens=400, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()

    with spanned(llm, monkeypatch, exporter):
        asyncio.run(run())
    failed, cancelled = servers(exporter.get_finished_spans())
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "QuireError")
    assert (failed.attributes or {})["error.type"] == "QuireError"
    assert (cancelled.attributes or {})["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert cancelled.status.status_code is StatusCode.UNSET
    assert "secret" not in failed.to_json()


class Collector(ThreadingHTTPServer):
    """What takes OTLP over HTTP, or answers with an error."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.paths: list[str] = []
        self.names: list[str] = []
        super().__init__(("127.0.0.1", 0), Receiver)
        self.thread = threading.Thread(target=self.serve_forever, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self.thread.join()


class Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        self.server.paths.append(self.path)
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            names = {one.key: one.value.string_value for one in resource.resource.attributes}
            self.server.names.append(names["service.name"])
            self.server.names += [span.name for scope in resource.scope_spans for span in scope.spans]
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No variable of OpenTelemetry's is set."""
    for name in (
        "OTEL_SDK_DISABLED",
        "OTEL_SERVICE_NAME",
        "OTEL_TRACES_EXPORTER",
        *spans._ENDPOINTS,
        *spans._PROTOCOLS,
    ):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("way", ["option", "variable"])
def test_spans_reach_a_collector_before_the_server_has_stopped(
    llm: AsyncLLM, plain: pytest.MonkeyPatch, way: str
) -> None:
    with Collector() as collector:
        if way == "variable":
            plain.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
            plain.setenv("OTEL_SERVICE_NAME", "named")
        with serving(llm, ServerSettings(otlp_endpoint=collector.url if way == "option" else None)) as found:
            found.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).raise_for_status()
            assert not collector.names  # they are sent in batches
        assert set(collector.paths) == {"/v1/traces"}
        service = "quire" if way == "option" else "named"
        assert sorted(collector.names) == sorted([service, "text_completion tiny-python", "queue", "prefill", "decode"])
    assert llm.engine.timeline.on_end == []


@pytest.mark.parametrize("trouble", ["refuses", "fails", "is gone"])
def test_a_collector_that_fails_harms_no_request(llm: AsyncLLM, plain: pytest.MonkeyPatch, trouble: str) -> None:
    plain.setattr(spans, "FLUSH_SECONDS", 1.0)
    with Collector(400 if trouble == "refuses" else 503) as collector:
        url = "http://127.0.0.1:1" if trouble == "is gone" else collector.url
        with serving(llm, ServerSettings(otlp_endpoint=url)) as found:
            for _ in range(3):
                answer = found.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
                assert answer.status_code == 200
            begun = time.monotonic()
        assert time.monotonic() - begun < 15  # a second for the spans, and what stopping takes
        assert len(collector.paths) == 0 if trouble == "is gone" else len(collector.paths) >= 1


def test_an_exporter_that_raises_or_hangs_harms_no_request(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    class Broken(InMemorySpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            over.wait(30)
            raise RuntimeError("no")

    with spanned(llm, monkeypatch, Broken()) as found:
        sent = RequestSpans(llm.engine.timeline, Broken(), "m")
        assert found.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        begun = time.monotonic()
        assert not sent.flush(0.3)
        assert time.monotonic() - begun < 5
        sent.close(0.1)
        over.set()


def test_without_any_configuration_nothing_is_exported(plain: pytest.MonkeyPatch) -> None:
    """Nor is a package of OpenTelemetry's imported, as ``test_signals`` asks of a server."""
    assert exporter_for(None) is None
    plain.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    for name, value in (
        ("OTEL_SDK_DISABLED", "true"),
        ("OTEL_TRACES_EXPORTER", "none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            assert exporter_for(None) is None
    assert exporter_for(None) is not None


def test_missing_packages_are_told(plain: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    plain.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(Unsupported, match=r"pip install '.\[otel\]'") as refused:
        exporter_for("http://127.0.0.1:4318")
    assert refused.value.field == "otlp_endpoint"
    plain.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert exporter_for(None) is None
    assert "pip install" in caplog.text


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://h:4318", "http://h:4318/v1/traces"),
        ("http://h:4318/", "http://h:4318/v1/traces"),
        ("https://h/own/path", "https://h/own/path"),
    ],
)
def test_an_address_without_a_path_has_otlps(given: str, url: str) -> None:
    assert traces_url(given) == url


@pytest.mark.parametrize("bad", ["", "h:4318", "grpc://h:4317", "http://", "http://h?x=1", 7])
def test_bad_endpoints_are_refused_by_name(bad: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        ServerSettings(otlp_endpoint=bad)
    assert refused.value.field == "otlp_endpoint"


def test_adapters_are_models_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    llm = AsyncLLM("tiny-python", adapters={"docs": "tiny-python-docstrings"}, **OPTIONS)
    try:
        with spanned(llm, monkeypatch, exporter) as found:
            body = {"model": "docs", "prompt": "a", "max_tokens": 2}
            found.client.post("/v1/completions", json=body).raise_for_status()
            wait_for(lambda: len(llm.engine.timeline.ended_lanes()) > 0)
            assert isinstance(found.client, httpx.Client)
    finally:
        asyncio.run(llm.close())
    (span,) = servers(exporter.get_finished_spans())
    assert (span.attributes or {})["gen_ai.request.model"] == "docs"
    assert span.name == "text_completion docs"
