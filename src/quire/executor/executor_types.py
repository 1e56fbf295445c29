"""The types of executors, and the caches that must run together.

Each cache keeps the set of caches that were prefilled with it; an executor stores nothing about
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

from quire.base.errors import InvalidArgument, Unsupported
from quire.contracts.executor import ExecutorType
from quire.executor.cache import KVCache

UNDIVIDED = (
    "this runner holds all heads; executor_type 'TensorParallel' divides them, or tensor_parallel_size of an LLM"
)
NOT_STAGED = (
    "this runner holds all layers; executor_type 'PipelineParallel' divides them, or pipeline_parallel_size of an LLM"
)


def check_type(name: object) -> ExecutorType:
    """Return the type. ``InvalidArgument``: no such type."""
    try:
        return ExecutorType(str(name))
    except ValueError:
        known = ", ".join(repr(kind.value) for kind in ExecutorType)
        raise InvalidArgument(f"executor_type must be one of {known}; got {name!r}") from None


def join(caches: Sequence[KVCache]) -> None:
    """Make these caches one batch; they leave their earlier batches."""
    for cache in caches:
        if cache.batch is not None:
            cache.batch.discard(cache)
    together = WeakSet(caches)
    for cache in caches:
        cache.batch = together


def require_whole(kind: ExecutorType, given: Sequence[KVCache | None], verb: str) -> None:
    """Raise ``Unsupported`` if the type is Batch, unless these are exactly the caches of one batch
    that are not released."""
    if kind is not ExecutorType.BATCH:
        return
    caches = [cache for cache in given if cache is not None]
    first = caches[0].batch if caches else None
    if len(caches) == 1 and first is None:
        return
    strangers = [cache for cache in caches if cache.batch is None or cache.batch is not first]
    left = [] if first is None else [cache for cache in first if not cache.released and cache not in caches]
    if strangers or left:
        what = f"{len(left)} sequences of the batch are left out" if not strangers else "they are not of one batch"
        raise Unsupported(
            f"{verb}: an executor of type 'Batch' runs the sequences that were prefilled together, and all of them, until they "
            f"are released; {what}. 'ContinuousBatch' lets sequences join and leave"
        )
