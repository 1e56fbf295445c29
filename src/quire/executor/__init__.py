"""Executors: the verbs of ``contracts.executor`` over a runner, and their KV caches.

The package exports the two faces and all values that they take and return, each imported at its
first use. ``docs/executor.md`` shows them.

Where to read: ``executor``, ``llm_executor``: the faces. ``cache`` over ``cache_rows`` and ``row``:
KV caches; ``cache_pool``: their pages. ``transaction`` over ``row_extension``: one call that
extends rows. ``verification``, ``acceptance``, ``drafting``: drafts. ``rewinding``, ``replay``:
going back. ``forward_packing``: rows into forwards.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.base.config import AttentionConfig, ExecutorConfig, MemoryConfig, OptimizationConfig
    from quire.contracts.executor import (
        AUDIO_PLACEHOLDER,
        END_OF_AUDIO,
        END_OF_IMAGE,
        VISION_PLACEHOLDER,
        AudioData,
        CacheLike,
        DecodeInput,
        DecodeOutput,
        ExecutorInputs,
        ExecutorType,
        LlmExecutorInterface,
        ModelAssets,
        ModelExecutor,
        PrefillInput,
        PrefillOutput,
        RequestSampling,
        SpeculativeOutput,
        TextData,
        VisionData,
    )
    from quire.contracts.kv_cache import CacheHandle, KVCacheInterface
    from quire.executor.cache import KVCache
    from quire.executor.executor import Executor
    from quire.executor.llm_executor import LlmExecutor
    from quire.executor.named_executors import NamedExecutors

__all__ = [
    "AUDIO_PLACEHOLDER",
    "END_OF_AUDIO",
    "END_OF_IMAGE",
    "VISION_PLACEHOLDER",
    "AttentionConfig",
    "AudioData",
    "CacheHandle",
    "CacheLike",
    "DecodeInput",
    "DecodeOutput",
    "Executor",
    "ExecutorConfig",
    "ExecutorInputs",
    "ExecutorType",
    "KVCache",
    "KVCacheInterface",
    "LlmExecutor",
    "LlmExecutorInterface",
    "MemoryConfig",
    "ModelAssets",
    "ModelExecutor",
    "NamedExecutors",
    "OptimizationConfig",
    "PrefillInput",
    "PrefillOutput",
    "RequestSampling",
    "SpeculativeOutput",
    "TextData",
    "VisionData",
]

_ELSEWHERE = {
    **dict.fromkeys(("AttentionConfig", "ExecutorConfig", "MemoryConfig", "OptimizationConfig"), "quire.base.config"),
    "NamedExecutors": "quire.executor.named_executors",
    "CacheHandle": "quire.contracts.kv_cache",
    "Executor": "quire.executor.executor",
    "KVCache": "quire.executor.cache",
    "KVCacheInterface": "quire.contracts.kv_cache",
    "LlmExecutor": "quire.executor.llm_executor",
}
"""Modules of the names that ``quire.contracts.executor`` does not export."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_ELSEWHERE.get(name, "quire.contracts.executor")), name)
    raise AttributeError(f"module 'quire.executor' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
