"""Metrics under vLLM's names, for boards and alerts that know these.

A family that means the same is told twice: as ``quire:...``, and as ``vllm:...`` with vLLM's label
``model_name``. What means something else has no second name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from quire.metrics import MetricFamily, Sample

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
