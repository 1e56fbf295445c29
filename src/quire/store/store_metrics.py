"""Metrics of a store."""

from __future__ import annotations

from collections.abc import Sequence

from quire.base.metrics import Counter, Gauge, LabelledCounter, LabelledGauge, MetricGroup

DAMAGE = ("header", "checksum", "key", "layout", "version", "other")
"""Reasons for which objects from tiers are unusable."""


class StoreMetrics(MetricGroup):
    """All metrics of a store; ``tiers`` are the kinds of its tiers."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self.hits = LabelledCounter("quire:store_hits_total", "Objects read, by tier.", "tier", tiers)
        self.misses = Counter("quire:store_misses_total", "Objects asked for that no tier had.")
        self.read = LabelledCounter("quire:store_read_bytes_total", "Bytes of objects read, by tier.", "tier", tiers)
        self.written = LabelledCounter(
            "quire:store_written_bytes_total", "Bytes of objects that a tier keeps, by tier.", "tier", tiers
        )
        self.refused = LabelledCounter(
            "quire:store_refused_total", "Objects for which a tier had no room, by tier.", "tier", tiers
        )
        self.dropped = Counter("quire:store_dropped_total", "Objects not written since the queue was full.")
        self.failures = LabelledCounter(
            "quire:store_failures_total", "Operations of a tier that failed or took too long, by tier.", "tier", tiers
        )
        self.skipped = LabelledCounter(
            "quire:store_skipped_total", "Operations left out since a tier had failed before, by tier.", "tier", tiers
        )
        self.resting = LabelledGauge(
            "quire:store_resting", "Whether a tier is left alone now since it failed, by tier.", "tier", tiers
        )
        self.damaged = LabelledCounter(
            "quire:store_damaged_total", "Objects that were damaged or did not fit, by reason.", "reason", DAMAGE
        )
        self.queued = Gauge("quire:store_queued_bytes", "Bytes that wait to be written.")
        self._share_lock()
