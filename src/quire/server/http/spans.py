"""OpenTelemetry: a span for each request that has ended, and one inside of it for each phase.

Names are those of the semantic conventions for generative AI, vLLM's for latencies, and ``quire.``
for the rest. Spans hold no texts. They are made out of lanes of the timeline, and OpenTelemetry
sends them in batches from a thread of its own, so neither an engine nor a request waits for a
collector or fails with it. OpenTelemetry is imported only if there is somewhere to send spans to.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quire.base.errors import Unsupported
from quire.engine.timeline import RequestLane, Timeline

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger("quire.server")

FLUSH_SECONDS = 5.0
"""Most seconds for which a server that stops sends the last spans."""
TRACES_PATH = "/v1/traces"
CHATS = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages"})
PHASES: Mapping[str, str] = {"waiting": "queue", "loading": "load"}
"""Names of spans of phases, where they differ from those of the timeline."""
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def exporter_for(endpoint: str | None) -> SpanExporter | None:
    """Return an exporter of spans to an OTLP endpoint (HTTP, protobuf). None: the standard
    variables ``OTEL_*`` name the endpoint. If they name none, nothing is imported, and the result
    is None. ``Unsupported`` for an endpoint without the packages."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if endpoint is None:
        wanted = any(os.environ.get(name, "").strip() for name in _ENDPOINTS)
        if not wanted or os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in ("", "otlp"):
            return None
        protocol = next(filter(None, (os.environ.get(name, "").strip() for name in _PROTOCOLS)), "http/protobuf")
        if protocol != "http/protobuf":
            logger.warning("no spans are sent: the OTLP protocol is %s, and http/protobuf is supported", protocol)
            return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        text = f"spans need the package {error.name or error}, which is not installed; pip install '.[otel]' in Quire's folder brings it"
        if endpoint is None:
            logger.warning("%s", text)
            return None
        raise Unsupported(text, field="otlp_endpoint") from error
    return OTLPSpanExporter(endpoint=None if endpoint is None else traces_url(endpoint))


def traces_url(endpoint: str) -> str:
    """Return the URL for spans: an address without a path gets OTLP's path."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + TRACES_PATH


class RequestSpans:
    """Spans of the requests of one timeline. ``model`` is its name for clients."""

    def __init__(self, timeline: Timeline, exporter: SpanExporter, model: str) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        own = {} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: "quire"}
        # Resource.create reads the standard variables, which count more than what is given.
        self._provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("quire")
        self._timeline, self._model = timeline, model
        timeline.on_end.append(self.ended)

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Send finished spans, for at most ``seconds``. Return whether all are sent or given up."""
        # The processor's own limit does not hold while its exporter tries again.
        flushed: list[bool] = []
        thread = threading.Thread(target=lambda: flushed.append(self._provider.force_flush()), daemon=True)
        thread.start()
        thread.join(seconds)
        return flushed == [True]

    def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Send the last spans, for at most so long, and stop."""
        if self.ended in self._timeline.on_end:
            self._timeline.on_end.remove(self.ended)
        self.flush(seconds)
        threading.Thread(target=self._provider.shutdown, daemon=True).start()

    def ended(self, lane: RequestLane) -> None:
        """Make the spans of a request, under that of its caller."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        who = lane.caller
        given = {"traceparent": who.traceparent, "tracestate": who.tracestate}
        parent = TraceContextTextMapPropagator().extract({name: value for name, value in given.items() if value})
        end = lane.arrival if lane.finished is None else lane.finished
        operation = operation_of(lane)
        span = self._tracer.start_span(
            f"{operation} {lane.adapter or self._model}",
            context=parent,
            kind=SpanKind.SERVER,
            attributes=attributes_of(lane, self._model),
            start_time=self._nanoseconds(lane.arrival),
        )
        if span.is_recording():
            inside = set_span_in_context(span)
            for phase, start, stop in phases_of(lane, end):
                child = self._tracer.start_span(phase, context=inside, start_time=self._nanoseconds(start))
                child.end(self._nanoseconds(stop))
            if lane.numbers["error"] is not None:
                span.set_status(StatusCode.ERROR, lane.numbers["error"])
        span.end(self._nanoseconds(end))

    def _nanoseconds(self, seconds: float) -> int:
        return int((self._timeline.epoch + seconds) * 1e9)


def operation_of(lane: RequestLane) -> str:
    """Return the operation of a request by its name in the conventions, or "compute_state", for
    which they have no name."""
    if lane.kind == "run":
        return "compute_state"
    return "chat" if lane.caller.path in CHATS else "text_completion"


def phases_of(lane: RequestLane, end: float) -> Iterator[tuple[str, float, float]]:
    """Yield the phases of an ended request: name, start and stop."""
    starts = [at for _, at in lane.phases]
    for (phase, start), stop in zip(lane.phases, [*starts[1:], end], strict=True):
        yield PHASES.get(phase, phase), start, max(start, stop)


def attributes_of(lane: RequestLane, model: str) -> dict[str, Any]:
    """Return the attributes of an ended request's span; what is not known is left out."""
    numbers = lane.numbers
    first, last, admitted = numbers["first_token"], numbers["last_token"], lane.admitted
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation_of(lane),
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": lane.adapter or model,
        "gen_ai.response.model": lane.adapter or model,
        "gen_ai.request.id": lane.request_id,
        "gen_ai.response.id": lane.request_id,
        "gen_ai.request.max_tokens": numbers["max_tokens"],
        "gen_ai.request.temperature": numbers["temperature"],
        "gen_ai.request.top_p": numbers["top_p"],
        "gen_ai.request.choice.count": numbers["n"] if numbers["n"] not in (None, 1) else None,
        "gen_ai.output.type": None if lane.kind == "run" else _output_type(numbers["structured"]),
        "gen_ai.usage.input_tokens": numbers["prompt_tokens"],
        "gen_ai.usage.output_tokens": numbers["output_tokens"],
        "gen_ai.usage.cache_read.input_tokens": numbers["cached_tokens"],
        "gen_ai.response.finish_reasons": [numbers["finish_reason"]],
        "error.type": numbers["error"],
        "gen_ai.latency.e2e": None if lane.finished is None else lane.finished - lane.arrival,
        "gen_ai.latency.time_in_queue": None if admitted is None else admitted - lane.arrival,
        "quire.kind": lane.kind,
        "quire.sample": lane.index,
        "quire.priority": numbers["priority"],
        "quire.cached_tokens": numbers["cached_tokens"],
        "quire.replayed_tokens": numbers["replayed_tokens"],
        "quire.miss": numbers["miss"],
        "quire.missed_at": numbers["missed_at"],
        "quire.prefill_chunks": numbers["chunks"],
        "quire.preemptions": numbers["preemptions"],
        "quire.structured": numbers["structured"],
        "quire.stop": numbers["stop"],
    }
    if first is not None and last is not None and admitted is not None:
        found |= {
            "gen_ai.latency.time_to_first_token": first - lane.arrival,
            "gen_ai.latency.time_in_model_prefill": max(0.0, first - admitted),
            "gen_ai.latency.time_in_model_decode": last - first,
            "gen_ai.latency.time_in_model_inference": max(0.0, last - admitted),
        }
    found |= {f"quire.cached_tokens.{tier}": count for tier, count in numbers["by_tier"].items()}
    blend = numbers["blend"] or {}
    found |= {f"quire.blend.{name}": blend.get(name) for name in ("blended", "recomputed", "exact", "divergence")}
    return {name: value for name, value in found.items() if value is not None}


def _output_type(structured: str | None) -> str:
    return "json" if structured in ("json", "json_object") else "text"
