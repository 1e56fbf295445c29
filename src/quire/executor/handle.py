"""``Handle``: an immutable view of a KV cache at one moment (``CacheHandle``).

Letters: B rows; n tokens; Hkv KV heads; Dk, Dv head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument
from quire.base.signatures import checks_arguments
from quire.branches.extension import Extension
from quire.contracts.kv_cache import BlockTable, CacheHandleStats
from quire.executor import rewinding
from quire.executor.cache import KVCache, require_kv_layer
from quire.kv.forward_need import pages_for


@checks_arguments()
@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """See ``CacheHandle``. It references its cache: pages live as long as any handle of them
    does."""

    cache: KVCache
    lengths: tuple[int, ...]
    """Number of covered tokens of each row."""
    revision: int
    pending: Extension | None = None
    """The uncommitted tree that contains its last tokens; None: they are in the cache."""
    node: int = -1
    """The node of its last token in that tree."""

    @property
    def cache_id(self) -> str:
        return self.cache.cache_id

    @property
    def sequence_length(self) -> int | tuple[int, ...]:
        return self.lengths[0] if len(self.lengths) == 1 else self.lengths

    @property
    def num_tokens(self) -> int | tuple[int, ...]:
        return self.sequence_length

    @property
    def block_table(self) -> BlockTable | tuple[BlockTable, ...]:
        with self.cache.pool.lock:
            self.require_committed()
            held = self.cache.pages()
        size = self.cache.pool.facts.page_size
        tables = tuple(
            BlockTable(block_size=size, blocks=tuple(pages[: pages_for(n, size)].tolist()), sequence_length=n)
            for pages, n in zip(held, self.lengths, strict=True)
        )
        return tables[0] if len(tables) == 1 else tables

    @property
    def device(self) -> torch.device:
        return self.cache.pool.facts.device

    @property
    def num_layers(self) -> int:
        return len(self.cache.pool.facts.specs) + len(self.cache.pool.facts.recurrent_ids)

    @property
    def num_heads(self) -> int:
        specs = self.cache.pool.facts.specs
        return specs[0].num_kv_heads if specs else 0

    @property
    def head_dim(self) -> int:
        specs = self.cache.pool.facts.specs
        return specs[0].head_dim if specs else 0

    @property
    def stats(self) -> CacheHandleStats:
        return self.cache.stats()

    @property
    def is_valid(self) -> bool:
        return not self.cache.released and not self._is_stale()

    def _is_stale(self) -> bool:
        with self.cache.pool.lock:
            if self.pending is not None:
                return self.cache.rows[0].pending is not self.pending
            return any(
                row.was_cut(self.revision, length) for row, length in zip(self.cache.rows, self.lengths, strict=True)
            )

    def require_committed(self) -> None:
        """As ``require_valid``; ``FailedPrecondition`` for a handle of a tree's node."""
        self.require_valid()
        if self.pending is not None:
            raise FailedPrecondition(
                f"the handle ends in node {self.node} of a tree that is not committed; call commit_path with it first"
            )

    def require_valid(self) -> None:
        """Raise ``NotFound`` if the cache was released, ``InvalidArgument`` for a stale handle."""
        self.cache.require_live()
        if self._is_stale():
            reason = (
                "its tree was committed or dropped; use the newest handle"
                if self.pending is not None
                else "its tokens were rewound or replaced; use the newest handle, or clone_handle before branching"
            )
            raise InvalidArgument(
                f"the handle of {self.cache_id} with length {self.sequence_length} is stale: {reason}"
            )

    def key_cache(self, layer: int) -> Tensor:
        return self._read(layer, values=False)

    def value_cache(self, layer: int) -> Tensor:
        return self._read(layer, values=True)

    def _read(self, layer: int, *, values: bool) -> Tensor:
        with self.cache.pool.lock:
            self.require_committed()
            require_kv_layer(self.cache.pool, layer)
            return self.cache.read(layer, self.lengths, values=values)

    def clone_handle(self) -> Handle:
        pool = self.cache.pool
        # It may replay tokens, so it counts as a running call of the executor.
        with pool.operations.running("clone_handle") as operation, pool.lock:
            self.require_committed()
            pool.require_working(operation.verb)
            return handle_of(rewinding.copy_of(self.cache, self.lengths, operation))


def handle_of(cache: KVCache, lengths: tuple[int, ...] | None = None) -> Handle:
    """Return a handle of the first ``lengths`` tokens; None: of all tokens of the cache."""
    with cache.pool.lock:
        return Handle(cache, cache.lengths if lengths is None else lengths, cache.revision)
