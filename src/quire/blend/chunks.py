"""Chunks: the rows of a piece of text in all layers, computed by itself behind a lead.

A chunk is found by its tokens, wherever they stand in a prompt. All chunks that one prompt can use
stand under one parent in the store, so that the list of their keys is the index. A key's digest is
20 bytes: 4 of a hash of the first ``WINDOW`` tokens, 4 of a hash of all tokens, both of which a
prompt's sums give for every place at once (``quire.blend.token_sums``), and 12 of BLAKE2b over
parent and tokens, which decide. The tokens themselves are compared when a chunk is loaded.

Letters: n tokens of a chunk; Hkv heads; Dk, Dv head sizes; R, Dr columns of a latent row.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from quire.blend.token_sums import TokenSums
from quire.contracts.kv_state import ModelState
from quire.contracts.store import ObjectKey
from quire.errors import InvalidArgument
from quire.store.keys import root_key
from quire.store.objects import Contents

Ids = NDArray[np.int64]

LEAST = 16
"""Tokens of a chunk, at least, and rows of it that a place in a prompt needs to be worth it."""
MOST = 8192
"""Tokens of a chunk, at most: longer pieces of text are cut."""


def cuts(n: int) -> list[tuple[int, int]]:
    """Return the ranges of the chunks of a segment of ``n`` tokens, each computed by itself: as few
    as ``MOST`` allows, as equal as can be, the longer ones first. None below ``LEAST``."""
    count = -(-n // MOST)
    if n < LEAST:
        return []
    ends = [-(-n * index // count) for index in range(count + 1)]
    return list(zip(ends[:-1], ends[1:], strict=True))


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """What all chunks that one prompt can use have in common, and their keys."""

    model: Mapping[str, str]
    """Fields of the model's fingerprint."""
    layout_hash: str
    adapter: str | None
    """The fingerprint of the adapter that computed them; None: the base model."""
    lead: tuple[int, ...]
    """The ids that are computed before the tokens of each chunk, whose rows are not kept."""
    private: bool
    """Whether no other process may find them: they are not written to durable tiers."""
    parent: bytes
    """The digest that they stand under."""

    @classmethod
    def of(
        cls,
        *,
        model: Mapping[str, str],
        layout_hash: str,
        dtype: str,
        salt: Hashable,
        adapter: str | None = None,
        lead: Sequence[int] = (),
        private: bool = False,
    ) -> Self:
        """Make keys. ``salt`` is of strings, numbers, None, and tuples of these. The layout's hash
        covers kinds, geometry, dtype and the frequencies of RoPE; ``dtype`` is the model's."""
        ids = tuple(int(token) for token in lead)
        parent = root_key(model, layout_hash, dtype, ("chunks", salt, adapter, ids), 0)
        return cls(dict(model), layout_hash, adapter, ids, private, parent)

    def key(self, ids: Ids) -> ObjectKey:
        """Return the key of the chunk of ``n`` tokens. ``InvalidArgument`` unless ``n`` is within
        ``LEAST`` and ``MOST``."""
        if not LEAST <= ids.size <= MOST:
            raise InvalidArgument(field="tokens", given=ids.size, allowed=f"{LEAST} to {MOST} of a chunk")
        sums = TokenSums(ids)
        return sums.key(self.parent, 0, ids.size)

    def contents(self, ids: Ids) -> Contents:
        """Return what the object of a chunk must be of."""
        adapters = [] if self.adapter is None else [[0, self.adapter]]
        return Contents(self.model, self.layout_hash, ids.tolist(), adapters, self.lead)


class ChunkLayout:
    """The tensors of a chunk of one KV state: all layers with rows, one after the other."""

    def __init__(self, state: ModelState) -> None:
        self.state = state
        self.layers: tuple[int, ...] = state.geometry.layer_ids
        raise NotImplementedError

    @property
    def refusal(self) -> str:
        """Why there are no chunks of this state; empty: there are."""
        raise NotImplementedError
