"""Executors: the verbs of ``contracts.executor`` over a runner, and their KV caches.

The package exports the two faces and all values that they take and return, each imported at its
first use. ``docs/executor.md`` shows them.

Where to read: ``executor``, ``llm_executor``: the faces. ``cache`` over ``cache_rows`` and ``row``:
KV caches; ``cache_pool``: their pages. ``transaction`` over ``row_extension``: one call that
extends rows. ``verification``, ``acceptance``, ``drafting``: drafts. ``rewinding``: going
back. ``forward_packing``: rows into forwards.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.base.config import AttentionConfig as AttentionConfig
    from quire.base.config import ExecutorConfig as ExecutorConfig
    from quire.base.config import MemoryConfig as MemoryConfig
    from quire.base.config import OptimizationConfig as OptimizationConfig
    from quire.contracts.executor import LlmExecutorInterface as LlmExecutorInterface
    from quire.contracts.executor import ModelExecutor as ModelExecutor
    from quire.contracts.executor import RequestSampling as RequestSampling
    from quire.contracts.executor_calls import CacheLike as CacheLike
    from quire.contracts.executor_calls import DecodeInput as DecodeInput
    from quire.contracts.executor_calls import DecodeOutput as DecodeOutput
    from quire.contracts.executor_calls import PrefillInput as PrefillInput
    from quire.contracts.executor_calls import PrefillOutput as PrefillOutput
    from quire.contracts.executor_calls import SpeculativeOutput as SpeculativeOutput
    from quire.contracts.executor_inputs import AUDIO_PLACEHOLDER as AUDIO_PLACEHOLDER
    from quire.contracts.executor_inputs import END_OF_AUDIO as END_OF_AUDIO
    from quire.contracts.executor_inputs import END_OF_IMAGE as END_OF_IMAGE
    from quire.contracts.executor_inputs import VISION_PLACEHOLDER as VISION_PLACEHOLDER
    from quire.contracts.executor_inputs import AudioData as AudioData
    from quire.contracts.executor_inputs import ExecutorInputs as ExecutorInputs
    from quire.contracts.executor_inputs import ModelAssets as ModelAssets
    from quire.contracts.executor_inputs import TextData as TextData
    from quire.contracts.executor_inputs import VisionData as VisionData
    from quire.contracts.executor_reports import ExecutorType as ExecutorType
    from quire.contracts.kv_cache import CacheHandle as CacheHandle
    from quire.contracts.kv_cache import KVCacheInterface as KVCacheInterface
    from quire.executor.cache import KVCache as KVCache
    from quire.executor.executor import Executor as Executor
    from quire.executor.llm_executor import LlmExecutor as LlmExecutor
    from quire.executor.named_executors import NamedExecutors as NamedExecutors

_NAMES = {
    "quire.base.config": "AttentionConfig ExecutorConfig MemoryConfig OptimizationConfig",
    "quire.contracts.executor_calls": "CacheLike DecodeInput DecodeOutput PrefillInput PrefillOutput SpeculativeOutput",
    "quire.contracts.executor_inputs": (
        "AUDIO_PLACEHOLDER AudioData END_OF_AUDIO END_OF_IMAGE ExecutorInputs ModelAssets TextData "
        "VISION_PLACEHOLDER VisionData"
    ),
    "quire.contracts.executor": "LlmExecutorInterface ModelExecutor RequestSampling",
    "quire.contracts.executor_reports": "ExecutorType",
    "quire.contracts.kv_cache": "CacheHandle KVCacheInterface",
    "quire.executor.cache": "KVCache",
    "quire.executor.executor": "Executor",
    "quire.executor.llm_executor": "LlmExecutor",
    "quire.executor.named_executors": "NamedExecutors",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:
    __all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'quire.executor' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
