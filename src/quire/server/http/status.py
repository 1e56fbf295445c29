"""``/health``, ``/version``, ``/metrics``, ``/v1/models``, and endpoints that no model supports.

Metrics are in Prometheus' text format, under exactly the names of ``base.metrics``, and those that
vLLM has too also under its names: a family that means the same is told twice, as ``quire:...``, and
as ``vllm:...`` with vLLM's label ``model_name``. What means something else has no second name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Request
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field
from starlette.responses import Response

from quire.async_llm import AsyncLLM
from quire.base.errors import QuireError
from quire.base.metrics import MetricFamily, Sample
from quire.engine.named_adapters import AdapterInfo
from quire.executor import counters
from quire.models.fingerprint import kept_formats
from quire.server.http.bodies import BodyRoute, BoundedModel
from quire.server.http.context import Context, context_of, public_name
from quire.server.http.errors import REFUSED_VALUES, ApiError, bad_field

router = APIRouter(route_class=BodyRoute)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

HEALTH_SECONDS = 10.0
"""Seconds without an answer after which the engine counts as stuck. A slow step takes seconds."""

_probes: WeakKeyDictionary[AsyncLLM, asyncio.Task[Any]] = WeakKeyDictionary()
"""The open health check of each engine, so that only one worker thread waits for it."""


class Health(BaseModel):
    """The engine answers."""

    status: str = "ok"


class Version(BaseModel):
    """The package's version."""

    version: str


class ModelCard(BaseModel):
    """A model as OpenAI lists it, with the fields that vLLM adds."""

    id: str
    object: str = "model"
    created: int
    """Time of loading, in Unix time."""
    owned_by: str = "quire"
    root: str
    """The source that was loaded."""
    parent: str | None = None
    """For an adapter: the model that it belongs to."""
    max_model_len: int | None = None
    """Longest sequence in tokens."""
    weight_formats: list[str] | None = None
    """Formats of the weights in their files."""
    weight_formats_kept: list[str] | None = None
    """Those of them that kernels multiply as they are; the other blocks were expanded at load."""


class ModelList(BaseModel):
    """All models."""

    object: str = "list"
    data: list[ModelCard]


class EmbeddingRequest(BoundedModel):
    """OpenAI's ``usage`` object."""

    model: str | None = None
    input: Any = Field(default=None, description="Text or token ids.")


@router.get("/v1/health", include_in_schema=False)
@router.get("/health", tags=["status"])
async def health(request: Request) -> Health:
    """Answer 200 if the engine answers, 503 if it does not or while the server shuts down. An
    engine of which a rank has ended does not answer."""
    context = context_of(request)
    if context.gate.closing:
        raise ApiError(503, "this server is shutting down", code="shutting_down")
    probe = _probes.get(context.llm)
    if probe is None or probe.done() or probe.get_loop() is not asyncio.get_running_loop():
        probe = _probes[context.llm] = asyncio.ensure_future(context.llm.metrics())
    # It is not cancelled at the timeout: the next request waits for the same answer.
    await asyncio.wait([probe], timeout=HEALTH_SECONDS)
    if not probe.done():
        raise ApiError(503, f"the engine has not answered for {HEALTH_SECONDS:g} seconds", code="unhealthy")
    try:
        probe.result()
    except QuireError as error:
        raise ApiError(503, f"the engine does not run: {error}", code="unhealthy") from error
    if fault := context.llm.engine.runner.fault:
        raise ApiError(503, f"the engine does not run: {fault}", code="unhealthy")
    return Health()


@router.get("/version", tags=["status"])
async def version() -> Version:
    """Tell the server's version."""
    return Version(version=metadata.version("quire"))


@router.get("/metrics", tags=["status"], response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Send all metrics in Prometheus' text format."""
    context = context_of(request)
    snapshot = await context.llm.metrics()
    families = context.llm.engine.metrics.collect() + context.llm.engine.stored.collect()
    families += _rest(snapshot, families)
    families += [
        _gauge("quire:http_requests_under_way", "HTTP requests being answered.", context.gate.under_way),
        _gauge("quire:sessions_open", "Sessions that clients hold.", len(context.sessions)),
    ]
    families += vllm_families(families, context.model_name)
    return Response(generate_latest(_Families(families)), headers={"content-type": CONTENT_TYPE})


@router.get("/models", include_in_schema=False)
@router.get("/v1/models", tags=["models"])
async def models(request: Request) -> ModelList:
    """List the model and its adapters."""
    return ModelList(data=await model_cards(context_of(request)))


@router.get("/v1/models/{model:path}", tags=["models"])
async def model(request: Request, model: str) -> ModelCard:
    """Describe the model or one of its adapters."""
    context = context_of(request)
    cards = await model_cards(context)
    context.adapter_of(model)
    return next(card for card in cards if card.id == model)


@router.post("/v1/embeddings", tags=["models"], responses={200: {"description": "Never."}, **REFUSED_VALUES})
async def embeddings(body: EmbeddingRequest) -> None:
    """Refuse the call: the models that run here generate text."""
    raise bad_field(
        "model",
        "embeddings: no model that this server can run has them; /v1/completions and /v1/chat/completions generate text",
        code="unsupported",
    )


async def model_cards(context: Context) -> list[ModelCard]:
    """Return the base model under each of its names, and the adapters, in order of loading."""
    loaded = await context.refresh_adapters()
    found = [_card(context, name, context.llm.config.model) for name in context.base_names]
    for base in found:
        base.weight_formats = [*context.llm.model.formats]
        base.weight_formats_kept = kept_formats(context.llm.model)
    return found + [adapter_card(context, info) for info in loaded.values() if info.name not in context.base_names]


def adapter_card(context: Context, info: AdapterInfo) -> ModelCard:
    return _card(context, info.name, info.path, parent=context.model_name)


def _card(context: Context, name: str, source: str | Path, parent: str | None = None) -> ModelCard:
    root, longest = public_name(source), context.longest
    return ModelCard(id=name, created=int(context.started), root=root, parent=parent, max_model_len=longest)


# -- metrics ---------------------------------------------------------------------------------------


class _Families(Collector):
    """A collector that hands families to the library that writes them."""

    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            # The library adds "_total" to the names of counters.
            name = family.name.removesuffix("_total") if family.type == "counter" else family.name
            metric = Metric(name, family.help, family.type)
            for sample in family.samples:
                metric.add_sample(sample.name, dict(sample.labels), sample.value)
            yield metric


def _rest(snapshot: Mapping[str, float], families: Iterable[MetricFamily]) -> list[MetricFamily]:
    """Return a family for each further number of a snapshot, of the host memory and the executor.
    Names that end in ``_total`` are counters."""
    known = {name for family in families for sample in family.samples for name in (sample.key, sample.name)}
    return [
        MetricFamily(
            name=name,
            type="counter" if name.endswith("_total") else "gauge",
            help=counters.HELP.get(name, "See quire.base.metrics."),
            samples=(Sample(name=name, value=value),),
        )
        for name, value in snapshot.items()
        if name not in known
    ]


def _gauge(name: str, help: str, value: float) -> MetricFamily:
    return MetricFamily(name=name, type="gauge", help=help, samples=(Sample(name=name, value=float(value)),))


# -- vLLM's names ----------------------------------------------------------------------------------

SAME = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "request_success_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
)
"""Names that both have."""
RENAMED: Mapping[str, str] = {
    "prefix_cache_queries_total": "prompt_tokens_total",
    "prefix_cache_hits_total": "prompt_tokens_cached_total",
    "spec_decode_num_draft_tokens_total": "drafted_tokens_total",
    "spec_decode_num_accepted_tokens_total": "accepted_tokens_total",
}
"""Other names of vLLM's, and what they are here: its prefix cache counts tokens too."""
REASONS: Mapping[str, str] = {"cancelled": "abort"}
"""Values of labels that it calls otherwise."""


def vllm_families(families: Iterable[MetricFamily], model: str) -> list[MetricFamily]:
    """Return the families that vLLM has too, under its names, for a model's name."""
    known = {family.name: family for family in families}
    pairs = [(name, name) for name in SAME] + list(RENAMED.items())
    return [_renamed(known[f"quire:{own}"], f"vllm:{name}", model) for name, own in pairs]


def _renamed(family: MetricFamily, name: str, model: str) -> MetricFamily:
    return replace(family, name=name, samples=tuple(_sample(one, family.name, name, model) for one in family.samples))


def _sample(sample: Sample, own: str, name: str, model: str) -> Sample:
    labels = tuple((label, REASONS.get(value, value)) for label, value in sample.labels)
    return replace(sample, name=name + sample.name.removeprefix(own), labels=(("model_name", model), *labels))
