"""Metrics in Prometheus' text format, under exactly the names of ``quire.metrics``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from quire.async_llm import AsyncLLM
from quire.executor import counters
from quire.metrics import MetricFamily, Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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


async def metrics_text(llm: AsyncLLM, *, under_way: int, sessions: int) -> bytes:
    """Return the engine's metrics, and the server's: running requests, open sessions."""
    snapshot = await llm.metrics()
    families = llm.engine.metrics.collect()
    families += rest(snapshot, families)
    families += [
        gauge("quire:http_requests_under_way", "HTTP requests being answered.", under_way),
        gauge("quire:sessions_open", "Sessions that clients hold.", sessions),
    ]
    return generate_latest(_Families(families))


def rest(snapshot: Mapping[str, float], families: Iterable[MetricFamily]) -> list[MetricFamily]:
    """Yield a family for each further number of a snapshot, of the host memory and the executor.
    Names that end in ``_total`` are counters."""
    known = {name for family in families for sample in family.samples for name in (sample.key, sample.name)}
    return [
        MetricFamily(
            name=name,
            type="counter" if name.endswith("_total") else "gauge",
            help=counters.HELP.get(name, "See quire.metrics."),
            samples=(Sample(name=name, value=value),),
        )
        for name, value in snapshot.items()
        if name not in known
    ]


def gauge(name: str, help: str, value: float) -> MetricFamily:
    return MetricFamily(name=name, type="gauge", help=help, samples=(Sample(name=name, value=float(value)),))
