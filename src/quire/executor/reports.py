"""Reports of an executor about its model and its memory, from model, device and code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from functools import cache

import torch

from quire.base.config import MODALITIES
from quire.branches.model_facts import ModelFacts
from quire.branches.row_media import NO_PER_LAYER
from quire.branches.row_media import refusal as media_refusal
from quire.contracts.executor import (
    AttentionMechanism,
    ExecutorCapabilities,
    ExecutorInfo,
    ExecutorType,
    MemoryRequirements,
    MemoryUsage,
)
from quire.contracts.layers import KeyValueAttention, LatentAttention
from quire.executor.arguments import NO_MASKS, weights_refusal
from quire.executor.cache_pool import NO_PAGES, CachePool
from quire.executor.executor_types import NOT_STAGED, UNDIVIDED
from quire.executor.verification import LOGITS_OF_SPECULATION
from quire.executor.warmup import Activations
from quire.kv.exchange import dtype_name
from quire.models.loading import DTYPES


def refusals(
    facts: ModelFacts, executor_type: ExecutorType, modalities: Collection[str]
) -> tuple[tuple[str, str], ...]:
    """Return the verbs and combinations that raise ``Unsupported``, each with the reason."""
    found = [
        ("per_layer_embeddings", NO_PER_LAYER),
        ("speculative_decode with hidden states or attention weights", LOGITS_OF_SPECULATION),
    ]
    if facts.adapter_refusal:
        found += [(verb, facts.adapter_refusal) for verb in ("load_lora", "unload_lora", "adapter")]
    if facts.position_refusal:
        found.append(("position_ids", facts.position_refusal))
    if reason := weights_refusal(facts):
        found.append(("attention weights", reason))
    if facts.recurrent_ids:
        found.append(("vision bidirectional", NO_MASKS))
    if not facts.specs:
        found.append(("block_table", NO_PAGES))
    found += [(kind, media_refusal(kind)) for kind in MODALITIES if kind not in modalities]
    if executor_type is ExecutorType.BATCH:
        found.append(("continuous_batching", "of type 'Batch': sequences that were prefilled together run together"))
    if facts.num_ranks == 1:
        found.append(("tensor_parallelism", UNDIVIDED))
    if facts.num_stages == 1:
        found.append(("pipeline_parallelism", NOT_STAGED))
    return tuple(found)


def info(facts: ModelFacts) -> ExecutorInfo:
    """Return the description of an executor. The first call may read the weights once, for their
    digest."""
    spec = facts.specs[0] if facts.specs else None
    text = json.dumps(dict(facts.identity.fields()), sort_keys=True)
    return ExecutorInfo(
        architecture=facts.architecture,
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        num_layers=facts.num_blocks,
        num_heads=spec.num_heads if spec else 0,
        num_kv_heads=spec.num_kv_heads if spec else 0,
        head_dim=spec.head_dim if spec else 0,
        max_sequence_length=facts.max_model_len,
        dtype=dtype_name(facts.weight_dtype),
        device=str(facts.device),
        num_parameters=facts.num_parameters,
        fingerprint=hashlib.sha256(text.encode()).hexdigest()[:32],
        path=str(getattr(facts.identity, "path", "")),  # an identity that the caller made has no path
    )


def capabilities(
    facts: ModelFacts,
    max_batch_size: int,
    executor_type: ExecutorType,
    modalities: Collection[str],
    activations: Activations | None,
) -> ExecutorCapabilities:
    """Return the abilities, refusals and memory needs of an executor."""
    mechanisms = {mechanism_of(spec) for spec in facts.specs}
    if facts.specs:
        mechanisms.add(AttentionMechanism.PAGED)
    if facts.fused:
        mechanisms.add(AttentionMechanism.FLASH)
    if facts.is_windowed:
        mechanisms.add(AttentionMechanism.SLIDING_WINDOW)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    continuous = executor_type not in (ExecutorType.SEQUENTIAL, ExecutorType.BATCH)
    return ExecutorCapabilities(
        max_batch_size=max_batch_size,
        max_sequence_length=facts.max_model_len,
        attention_mechanisms=tuple(sorted(mechanisms)),
        supports_dynamic_batching=max_batch_size > 1,
        supports_continuous_batching=continuous and max_batch_size > 1,
        supports_speculative_decoding=True,
        supports_tensor_parallelism=facts.num_ranks > 1,
        supports_pipeline_parallelism=facts.num_stages > 1,
        supported_dtypes=computable_dtypes(facts.device),
        supported_devices=("cpu", *(f"cuda:{index}" for index in range(num_gpus))),
        memory_requirements=MemoryRequirements(
            parameter_memory=facts.parameter_bytes,
            activation_memory_per_token=activations.bytes_per_token if activations else None,
            # Rounded up where layers differ; the same for all in the usual model.
            kv_cache_memory_per_token=-(-sum(facts.page_bytes) // (facts.page_size * facts.num_blocks)),
            recurrent_memory_per_row=facts.state_bytes,
            overhead_memory=activations.overhead_bytes if activations else None,
        ),
        layer_kinds=facts.layer_kinds,
        refusals=refusals(facts, executor_type, modalities),
    )


def memory_usage(pool: CachePool) -> MemoryUsage:
    """Return the memory of weights and K/V pool used by all owners; after shutdown the peak
    alone."""
    facts = pool.facts
    peak = facts.parameter_bytes + pool.peak_bytes
    if pool.runner_or_none is None:
        return MemoryUsage(peak_bytes=peak)
    used = facts.parameter_bytes + pool.used_bytes
    return MemoryUsage(
        allocated_bytes=facts.parameter_bytes + facts.storage_bytes, used_bytes=used, peak_bytes=max(used, peak)
    )


def mechanism_of(spec: KeyValueAttention | LatentAttention) -> AttentionMechanism:
    """Return the mechanism by which query heads share K and V. In latent attention all share one
    row."""
    if spec.num_kv_heads == spec.num_heads:
        return AttentionMechanism.MULTI_HEAD
    return AttentionMechanism.MULTI_QUERY if spec.num_kv_heads == 1 else AttentionMechanism.GROUPED_QUERY


@cache
def computable_dtypes(device: torch.device) -> tuple[str, ...]:
    """Return the dtypes of weights that can be loaded and that this device can multiply."""
    return tuple(sorted(dtype_name(dtype) for dtype in set(DTYPES.values()) if _multiplies(device, dtype)))


def _multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    ones = torch.ones(2, 2, dtype=dtype, device=device)
    try:
        return bool((ones @ ones == 2).all())
    except RuntimeError:
        return False
