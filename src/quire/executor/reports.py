"""What an executor says about its model and its memory. Taken from the loaded model, the device and what is implemented."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch

from quire.branches.cache_pool import NO_PAGES, CachePool
from quire.branches.row_media import NO_PER_LAYER
from quire.branches.row_media import refusal as media_refusal
from quire.config import MODALITIES
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
from quire.executor.executor_types import NO_PARALLELISM
from quire.executor.verification import LOGITS_OF_SPECULATION
from quire.executor.warmup import Activations
from quire.models.families import LoadedModel
from quire.models.loading import DTYPES
from quire.runner.local import Runner


def refusals(pool: CachePool, executor_type: ExecutorType, modalities: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Each verb or combination that raises ``Unsupported``, with the reason."""
    found = [
        ("per_layer_embeddings", NO_PER_LAYER),
        ("speculative_decode with hidden states or attention weights", LOGITS_OF_SPECULATION),
    ]
    if pool.adapter_refusal:
        found += [(verb, pool.adapter_refusal) for verb in ("load_lora", "unload_lora", "adapter")]
    if pool.position_refusal:
        found.append(("position_ids", pool.position_refusal))
    if reason := weights_refusal(pool):
        found.append(("attention weights", reason))
    if pool.recurrent_ids:
        found.append(("vision bidirectional", NO_MASKS))
    if not pool.specs:
        found.append(("block_table", NO_PAGES))
    found += [(kind, media_refusal(kind)) for kind in MODALITIES if kind not in modalities]
    if executor_type is ExecutorType.BATCH:
        found.append(("continuous_batching", "of type 'Batch': sequences that were prefilled together run together"))
    found += [("tensor_parallelism", NO_PARALLELISM), ("pipeline_parallelism", NO_PARALLELISM)]
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is asked about a model when its runner may be gone."""

    architecture: str
    hidden_size: int
    dtype: torch.dtype
    num_parameters: int
    parameter_bytes: int
    storage_bytes: int
    """Of the K/V pool and the slots for recurrent states."""
    fused: bool
    """Whether some layer attends in kernels that never form the weights."""

    @classmethod
    def of(cls, runner: Runner) -> ModelFacts:
        model = cast(LoadedModel, runner.model)
        return cls(
            architecture=model.architecture,
            hidden_size=model.hidden_size,
            dtype=model.dtype,
            num_parameters=model.num_parameters,
            parameter_bytes=model.parameter_bytes,
            storage_bytes=runner.state.num_bytes,
            fused=len(runner.state.unfused_layers()) < len(runner.state.geometry.specs),
        )

    def info(self, pool: CachePool) -> ExecutorInfo:
        spec = pool.specs[0] if pool.specs else None
        return ExecutorInfo(
            architecture=self.architecture,
            vocab_size=pool.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=pool.num_blocks,
            num_heads=spec.num_heads if spec else 0,
            num_kv_heads=spec.num_kv_heads if spec else 0,
            head_dim=spec.head_dim if spec else 0,
            max_sequence_length=pool.max_model_len,
            dtype=dtype_name(self.dtype),
            device=str(pool.device),
            num_parameters=self.num_parameters,
            fingerprint=fingerprint_of(pool),
        )

    def capabilities(
        self,
        pool: CachePool,
        max_batch_size: int,
        executor_type: ExecutorType,
        modalities: Collection[str],
        activations: Activations | None,
    ) -> ExecutorCapabilities:
        mechanisms = {mechanism_of(spec) for spec in pool.specs}
        if pool.specs:
            mechanisms.add(AttentionMechanism.PAGED)
        if self.fused:
            mechanisms.add(AttentionMechanism.FLASH)
        if pool.is_windowed:
            mechanisms.add(AttentionMechanism.SLIDING_WINDOW)
        continuous = executor_type is ExecutorType.CONTINUOUS_BATCH
        return ExecutorCapabilities(
            max_batch_size=max_batch_size,
            max_sequence_length=pool.max_model_len,
            attention_mechanisms=tuple(sorted(mechanisms)),
            supports_dynamic_batching=max_batch_size > 1,
            supports_continuous_batching=continuous and max_batch_size > 1,
            supports_speculative_decoding=True,
            supports_tensor_parallelism=False,
            supports_pipeline_parallelism=False,
            supported_dtypes=computable_dtypes(pool.device),
            supported_devices=present_devices(),
            memory_requirements=MemoryRequirements(
                parameter_memory=self.parameter_bytes,
                activation_memory_per_token=activations.bytes_per_token if activations else None,
                # Rounded up where layers differ; the same for all in the usual model.
                kv_cache_memory_per_token=-(-sum(pool.page_bytes) // (pool.page_size * pool.num_blocks)),
                recurrent_memory_per_row=pool.state_bytes,
                overhead_memory=activations.overhead_bytes if activations else None,
            ),
            layer_kinds=pool.layer_kinds,
            refusals=refusals(pool, executor_type, modalities),
        )

    def memory_usage(self, pool: CachePool) -> MemoryUsage:
        """Weights and K/V pool of the runner, whoever uses the pages; nothing after shutdown but the peak."""
        peak = self.parameter_bytes + pool.peak_bytes
        if pool.runner_or_none is None:
            return MemoryUsage(peak_bytes=peak)
        used = self.parameter_bytes + pool.used_bytes
        return MemoryUsage(
            allocated_bytes=self.parameter_bytes + self.storage_bytes, used_bytes=used, peak_bytes=max(used, peak)
        )


def fingerprint_of(pool: CachePool) -> str:
    """32 hex digits over architecture, configuration and weights."""
    text = json.dumps(dict(pool.identity.fields()), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def mechanism_of(spec: KeyValueAttention | LatentAttention) -> AttentionMechanism:
    """How query heads share K and V. Those of latent attention share one row."""
    if spec.num_kv_heads == spec.num_heads:
        return AttentionMechanism.MULTI_HEAD
    return AttentionMechanism.MULTI_QUERY if spec.num_kv_heads == 1 else AttentionMechanism.GROUPED_QUERY


@cache
def computable_dtypes(device: torch.device) -> tuple[str, ...]:
    """The dtypes of weights that the loader takes and with which this device multiplies matrices."""
    return tuple(sorted(dtype_name(dtype) for dtype in set(DTYPES.values()) if _multiplies(device, dtype)))


def _multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    ones = torch.ones(2, 2, dtype=dtype, device=device)
    try:
        return bool((ones @ ones == 2).all())
    except RuntimeError:
        return False


def present_devices() -> tuple[str, ...]:
    """Devices of this machine that an executor can run on."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ("cpu", *(f"cuda:{index}" for index in range(count)))
