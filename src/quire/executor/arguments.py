"""The arguments of the verbs, checked and turned into rows of ids. Nothing is computed or changed.

Letters: B batch rows; S tokens of a row with padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import InvalidArgument, QuireError, Unsupported
from quire.base.token_history import Ids
from quire.branches.model_facts import ModelFacts
from quire.contracts.executor import DecodeInput, PrefillInput
from quire.executor.cache import KVCache
from quire.executor.cache_pool import CachePool
from quire.executor.forward_packing import LOGITS_ONLY, WantedOutputs
from quire.executor.handle import Handle
from quire.executor.row_extension import require_vocabulary
from quire.runner.local import Runner

T = TypeVar("T")

NO_MASKS = "recurrent layers see the tokens of a row in order, and no mask can change that; give the image with bidirectional=False"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallItem:
    """One item of a call: the start of each row and the tokens to append."""

    cache: KVCache | None
    """None: a fresh one."""
    starts: tuple[int, ...]
    tokens: tuple[Ids, ...]
    spans: tuple[tuple[int, int], ...]
    """Columns of the real tokens of each row."""
    columns: int
    """S"""
    adapter: int | None = None
    """The adapter of its tokens; None: the base model."""
    asked: WantedOutputs = LOGITS_ONLY
    positions: tuple[Ids | None, ...] = ()
    """The given positions of each row's tokens; None: directly after the tokens before them."""

    @property
    def batch_size(self) -> int:
        return len(self.tokens)

    @property
    def is_padded(self) -> bool:
        return any(span != (0, self.columns) for span in self.spans)


def resolve_cache(pool: CachePool, given: object) -> tuple[KVCache, tuple[int, ...]]:
    """Return the cache of a handle or a cache, and the lengths that it covers.

    ``InvalidArgument``: another executor's cache, or a stale handle. ``NotFound``: released.
    ``FailedPrecondition``: a node of a tree. Call it under the lock.
    """
    if not isinstance(given, Handle | KVCache):
        raise InvalidArgument(field="kv_cache", given=given, allowed="a handle or a KV cache of this executor")
    cache = given.cache if isinstance(given, Handle) else given
    if cache.pool is not pool:
        raise InvalidArgument(f"KV cache {cache.cache_id} is of another executor; serialize and load", field="kv_cache")
    if isinstance(given, Handle):
        given.require_committed()
        return cache, given.lengths
    return cache, cache.lengths


def resolve_row(runner: Runner, given: object, row: int | None) -> tuple[KVCache, int, int]:
    """Return a cache over ``runner``, the index of a row (None: the only one) and its covered
    length.

    ``given`` is the cache or a handle of it. ``InvalidArgument``: another runner's cache, a stale
    handle, no such row. ``NotFound``: released. Call it under the lock.
    """
    found = getattr(given, "cache", given)
    if not isinstance(found, KVCache):
        raise InvalidArgument(f"cache must be a KV cache or a handle of one; got {type(given).__name__}")
    found.require_live()
    if found.pool.runner_or_none is not runner:
        raise InvalidArgument(
            f"KV cache {found.cache_id} belongs to another model's pages; give session_from_bytes what its serialize() returns"
        )
    cache, lengths = resolve_cache(found.pool, given)
    if row is None:
        if cache.batch_size > 1:
            raise InvalidArgument(f"the KV cache has {cache.batch_size} rows, and a session is one; pick it with row=")
        row = 0
    if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < cache.batch_size:
        raise InvalidArgument(f"row {row!r} does not exist; the KV cache has rows 0..{cache.batch_size - 1}")
    return cache, row, lengths[row]


def prefill_item(pool: CachePool, given: PrefillInput) -> CallItem:
    """Check a ``PrefillInput`` completely."""
    spans = given.real_spans()
    tokens = tuple(to_ids(row) for row in given.token_rows())
    for ids in tokens:
        require_vocabulary(ids, pool.facts.vocab_size, "input_ids")
    fresh = (None, (0,) * len(tokens)) if given.kv_cache is None else None
    return _item(pool, given, fresh or resolve_cache(pool, given.kv_cache), tokens, spans, given.sequence_length)


def decode_item(pool: CachePool, given: DecodeInput, verb: str = "decode") -> CallItem:
    """Check a ``DecodeInput`` completely."""
    ids = to_ids(given.tokens(verb))
    require_vocabulary(ids, pool.facts.vocab_size, "input_ids")
    return _item(pool, given, resolve_cache(pool, given.kv_cache), tuple(ids[:, None]), ((0, 1),) * len(ids), 1)


def _item(
    pool: CachePool,
    given: PrefillInput | DecodeInput,
    cache: tuple[KVCache | None, tuple[int, ...]],
    tokens: tuple[Ids, ...],
    spans: tuple[tuple[int, int], ...],
    columns: int,
) -> CallItem:
    require_adapter(pool, given.adapter)
    starts = cache[1]
    if len(tokens) != len(starts):
        raise InvalidArgument(
            f"input_ids have {len(tokens)} rows, and the KV cache has {len(starts)}", field="input_ids"
        )
    return CallItem(
        cache=cache[0],
        starts=starts,
        tokens=tokens,
        spans=spans,
        columns=columns,
        adapter=given.adapter,
        positions=given_positions(pool, given.position_ids, starts, spans, columns),
        asked=asked_of(pool, given),
    )


def to_ids(row: Tensor) -> Ids:
    """Return a 1-D tensor of ids as int64 on the host."""
    ids: Ids = row.detach().cpu().to(torch.int64).numpy()
    return ids


def require_adapter(pool: CachePool, adapter: int | None) -> None:
    """Raise ``NotFound`` unless it is loaded, ``Unsupported`` if the model can run no adapter."""
    if adapter is None:
        return
    if pool.facts.adapter_refusal:
        raise Unsupported(f"adapter {adapter}: {pool.facts.adapter_refusal}", field="adapter", given=adapter)
    pool.runner.adapters.check([adapter])


def require_together(pool: CachePool, items: Sequence[CallItem]) -> None:
    """Raise ``ResourceExhausted`` if one forward cannot use all adapters of these items."""
    pool.runner.adapters.check([item.adapter for item in items])


def distinct_items(check: Callable[[T], CallItem], inputs: Sequence[T], verb: str) -> list[CallItem]:
    """Check the items of a batch; ``InvalidArgument`` if two of them extend one cache."""
    items: list[CallItem] = []
    first: dict[str, int] = {}
    for index, given in enumerate(inputs):
        with naming_item(verb, index):
            items.append(check(given))
    for index, cache in enumerate(item.cache for item in items):
        if cache is not None and (other := first.setdefault(cache.cache_id, index)) != index:
            raise InvalidArgument(
                f"{verb}: items {other} and {index} continue the same cache {cache.cache_id}; "
                "give each cache once, or clone_handle",
                field="kv_cache",
            )
    return items


@contextmanager
def naming_item(verb: str, index: int) -> Iterator[None]:
    """Name the item of a batch in errors about it."""
    try:
        yield
    except QuireError as error:
        error.about(f"{verb} item {index}")
        raise


def weights_refusal(facts: ModelFacts) -> str:
    """Return the reason why no call can return attention weights; empty if a call can."""
    if len(facts.layer_ids) >= facts.num_blocks:
        return ""
    return (
        f"{facts.num_blocks - len(facts.layer_ids)} of {facts.num_blocks} blocks have no K and V of their own, so that they "
        "have no weights; leave output_attentions False"
    )


def asked_of(pool: CachePool, given: PrefillInput | DecodeInput) -> WantedOutputs:
    """Return the optional outputs of an input. ``Unsupported`` for attention weights that the model
    does not have."""
    if given.output_attentions and (reason := weights_refusal(pool.facts)):
        raise Unsupported(f"attention weights: {reason}", field="output_attentions")
    return WantedOutputs(hidden_states=given.output_hidden_states, attention_weights=given.output_attentions)


def union(asked: Iterable[WantedOutputs]) -> WantedOutputs:
    """Return the union of the wanted outputs."""
    found = list(asked)
    return WantedOutputs(
        hidden_states=any(one.hidden_states for one in found),
        attention_weights=any(one.attention_weights for one in found),
    )


def tree_of(parents: Sequence[int], count: int, what: str) -> tuple[int, ...]:
    """Return parents of ``count`` nodes; ``InvalidArgument`` unless each parent precedes its
    node."""
    if len(parents) != count:
        raise InvalidArgument(field=what, given=list(parents), allowed=f"{count} parents, one for each token")
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise InvalidArgument(field=f"{what}.{node}", given=parent, allowed=f"in -1..{node - 1}")
    return tuple(parents)


def given_positions(
    pool: CachePool,
    positions: Tensor | None,
    starts: Sequence[int],
    spans: Sequence[tuple[int, int]],
    columns: int,
) -> tuple[Ids | None, ...]:
    """Return the positions of each row's real tokens; positions of padding are ignored.

    None for rows without given positions, and where only the indices are possible. ``Unsupported``:
    other positions than the indices if the model or the executor allows none.
    """
    if positions is None:
        return (None,) * len(starts)
    rows = [to_ids(row[a:b]) for row, (a, b) in zip(positions.reshape(len(starts), columns), spans, strict=True)]
    if not pool.facts.position_refusal:
        return tuple(rows)
    for row, (start, given) in enumerate(zip(starts, rows, strict=True)):
        if not np.array_equal(given, np.arange(start, start + given.size)):
            message = f"position_ids of row {row}, which must count from {start}: {pool.facts.position_refusal}"
            raise Unsupported(message, field="position_ids")
    return (None,) * len(starts)
