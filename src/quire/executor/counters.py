"""An executor's counters, by their names in ``LLM.metrics`` and a server's ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quire.contracts.executor_reports import ExecutorMetrics

if TYPE_CHECKING:
    from quire.executor.executor import Executor

HELP: Mapping[str, str] = {
    "quire:executor_prefill_operations_total": "Prompts that the executor has run, one for each row of a completed call.",
    "quire:executor_prefill_seconds_total": "Sum of the times of these; each row counts the time of its call.",
    "quire:executor_decode_operations_total": "Decodes that the executor has run, one for each row of a completed call.",
    "quire:executor_decode_seconds_total": "Sum of the times of these; each row counts the time of its call.",
    "quire:executor_replayed_tokens_total": "Tokens that the executor has run again to go back to a position.",
    "quire:executor_batch_utilization": "Rows of a decode call on average, of the most that one may have; 1 means all.",
    "quire:executor_kv_caches": "KV caches of the executor that somebody holds now.",
}
"""Descriptions by name; counters with names in ``_total`` only grow."""


def snapshot(executor: Executor | None) -> dict[str, float]:
    """Return all counts at one moment, 0 without an executor. Never waits for a running call."""
    found = ExecutorMetrics() if executor is None else executor.metrics()
    values = (
        found.prefill_operations,
        found.prefill_operations * found.avg_prefill_latency / 1e3,
        found.decode_operations,
        found.decode_operations * found.avg_decode_latency / 1e3,
        found.replayed_tokens,
        found.batch_utilization,
        0 if executor is None else len(executor.pool.caches),
    )
    return dict(zip(HELP, map(float, values), strict=True))
