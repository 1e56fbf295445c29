"""An ``LLM``'s executor whose verbs are awaited, with both faces."""

from __future__ import annotations

from typing import Any

from quire.async_llm.background import Background, awaited
from quire.executor.executor import Executor
from quire.executor.llm_executor import LlmExecutor


class AsyncExecutor:
    """``LLM.executor``, made by ``AsyncLLM``. Caches and handles are as of ``Executor``, and
    their own verbs block for a moment. A verb that runs when its task is cancelled runs to its end,
    unless ``cancel`` ends it."""

    def __init__(self, background: Background) -> None:
        self._background = background

    @property
    def blocking(self) -> Executor:
        """Return the executor itself. It is another one after ``shutdown``."""
        return self._background.llm.executor

    _inner = blocking

    def cancel(self) -> None:
        """Cancel the running calls, as ``Executor.cancel``. Never waits."""
        self.blocking.cancel()

    create_kv_cache = awaited(Executor.create_kv_cache)
    truncate_kv = awaited(Executor.truncate_kv)
    release_cache = awaited(Executor.release_cache)
    prefill = awaited(Executor.prefill)
    batch_prefill = awaited(Executor.batch_prefill)
    decode = awaited(Executor.decode)
    batch_decode = awaited(Executor.batch_decode)
    forward = awaited(Executor.forward)
    forward_verify = awaited(Executor.forward_verify)
    commit_path = awaited(Executor.commit_path)
    speculative_decode = awaited(Executor.speculative_decode)
    batch_speculative_decode = awaited(Executor.batch_speculative_decode)
    load_lora = awaited(Executor.load_lora)
    unload_lora = awaited(Executor.unload_lora)
    warmup = awaited(Executor.warmup)
    shutdown = awaited(Executor.shutdown)
    supports_batch_size = awaited(Executor.supports_batch_size)
    optimal_batch_size = awaited(Executor.optimal_batch_size)
    info = awaited(Executor.info)
    capabilities = awaited(Executor.capabilities)
    status = awaited(Executor.status)
    metrics = awaited(Executor.metrics)


class AsyncLlmExecutor:
    """LiteRT-LM's face of an ``AsyncExecutor``: ``LlmExecutor``, whose arguments it takes."""

    def __init__(self, executor: AsyncExecutor, **options: Any) -> None:
        self._background = executor._background
        self._inner = LlmExecutor(executor.blocking, **options)

    def cancel(self) -> None:
        """Cancel the running calls, as ``LlmExecutor.cancel``. Never waits."""
        self._inner.cancel()

    create_kv_cache = awaited(LlmExecutor.create_kv_cache)
    load_lora = awaited(LlmExecutor.load_lora)
    unload_lora = awaited(LlmExecutor.unload_lora)
    prefill = awaited(LlmExecutor.prefill)
    step = awaited(LlmExecutor.step)
    sample_tokens = awaited(LlmExecutor.sample_tokens)
    sample_tokens_batch = awaited(LlmExecutor.sample_tokens_batch)
