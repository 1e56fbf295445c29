"""Chunks: the rows of a piece of text in all layers, computed separately after a lead.

A chunk is found by its tokens, at any position of a prompt. All chunks for one prompt have one
parent in the store, so that the list of their keys is the index. A key's digest is 20 bytes: 4 of a
hash of the first ``WINDOW`` tokens (0 if it has fewer), 4 of a hash of all tokens, both of which a
prompt's sums give for all positions at once (``blend.token_sums``), and 12 of BLAKE2b over parent
and tokens, which decide. The tokens themselves are compared when a chunk is loaded.

Letters: n tokens of a chunk; Hkv heads; Dk, Dv head sizes; R, Dr columns of a latent row.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from quire.base.errors import InvalidArgument, Unsupported
from quire.blend.chunk_matching import LEAST, MOST
from quire.blend.token_sums import Ids, TokenSums
from quire.contracts.kv_state import ModelState, TensorPlan
from quire.contracts.layers import LatentAttention
from quire.contracts.store import ObjectKey
from quire.statefile.container import StateFile
from quire.store.keys import root_key
from quire.store.objects import Contents, pack, read_tensors, tensor_name


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """The keys of all chunks that one prompt can use, and their common properties."""

    model: Mapping[str, str]
    """Fields of the model's fingerprint."""
    layout_hash: str
    adapter: str | None
    """The fingerprint of the adapter that computed them; None: the base model."""
    lead: tuple[int, ...]
    """The ids computed before the tokens of each chunk. Their rows are not kept."""
    private: bool
    """Whether other processes must not find them; then they are not written to durable tiers."""
    parent: bytes
    """Their parent digest."""

    @classmethod
    def of(
        cls,
        model: Mapping[str, str],
        layout_hash: str,
        dtype: str,
        salt: Hashable,
        *,
        adapter: str | None = None,
        lead: Sequence[int] = (),
        private: bool = False,
    ) -> Self:
        """Make keys. ``salt`` is of strings, numbers, None, and tuples of these. The layout's hash
        covers kinds, geometry, dtype and the frequencies of RoPE; ``dtype`` is the model's."""
        ids = tuple(int(token) for token in lead)
        parent = root_key(model, layout_hash, dtype, ("chunks", salt, adapter, ids), 0)
        return cls(dict(model), layout_hash, adapter, ids, private, parent)

    def key(self, ids_n: Ids) -> ObjectKey:
        """Return the key of a chunk. ``InvalidArgument`` unless it has ``LEAST`` to ``MOST``
        tokens."""
        if not LEAST <= ids_n.size <= MOST:
            raise InvalidArgument(field="tokens", given=ids_n.size, allowed=f"{LEAST} to {MOST} ids of a chunk")
        return TokenSums(ids_n).key(self.parent, 0, ids_n.size)

    def contents(self, ids_n: Ids) -> Contents:
        """Return the expected contents of a chunk's object."""
        adapters = [] if self.adapter is None else [[0, self.adapter]]
        return Contents(self.model, self.layout_hash, ids_n.tolist(), adapters, self.lead)


class ChunkLayout:
    """The tensors of a chunk of one KV state: all layers with rows, one after the other."""

    def __init__(self, state: ModelState) -> None:
        """``Unsupported`` for a state without chunks (``refusal``)."""
        if reason := refusal(state):
            raise Unsupported(f"chunks: {reason}")
        self.state = state
        self.layers = state.geometry.layer_ids
        """Layer ids, ascending."""
        self._specs = dict(zip(self.layers, state.geometry.specs, strict=True))
        self.row_bytes = sum(
            math.prod(one.shape) * one.dtype.itemsize for layer in self.layers for one in self.plan(layer, 1).values()
        )
        """Bytes of one token."""

    def require(self, layer_id: int) -> None:
        """Raise ``InvalidArgument`` for an unknown layer."""
        if layer_id not in self._specs:
            allowed = f"a layer from {self.layers[0]} to {self.layers[-1]}"
            raise InvalidArgument(field="layer_id", given=layer_id, allowed=allowed)

    def plan(self, layer: int, n: int) -> dict[str, TensorPlan]:
        """Return a layer's tensors in a chunk."""
        spec, dtype = self._specs[layer], self.state.dtype
        if isinstance(spec, LatentAttention):
            return {"latent": TensorPlan((n, spec.row_dim), dtype)}
        heads = spec.num_kv_heads
        return {
            "k": TensorPlan((n, heads, spec.head_dim), dtype),
            "v": TensorPlan((n, heads, spec.value_dim), dtype),
        }

    def split(self, layer: int, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return K and V ``[n, Hkv, D]`` of rows; of latent ones the part that is rotated,
        ``[n, 1, Dr]``, and the latent, ``[n, 1, R]``. They share memory with ``tensors``."""
        spec = self._specs[layer]
        if isinstance(spec, LatentAttention):
            rows = tensors["latent"].unsqueeze(1)
            return rows[..., spec.value_dim :], rows[..., : spec.value_dim]
        return tensors["k"], tensors["v"]

    def pack(self, keys: ChunkKeys, ids_n: Ids, rows: Mapping[int, Mapping[str, Tensor]]) -> bytes:
        """Return the object of a chunk. ``rows``: its tensors by layer and name."""
        plan = {layer: self.plan(layer, ids_n.size) for layer in self.layers}
        tensors = ((tensor_name(layer, name), one) for layer in self.layers for name, one in rows[layer].items())
        return pack(keys.key(ids_n), keys.contents(ids_n), plan, tensors)

    def end(self, file: StateFile, layer: int) -> int:
        """Return the number of leading bytes of the object that hold a layer and all layers before
        it; 0 if it has no such layer (then ``read`` raises)."""
        names = [name for one in self.plan(layer, 1) if (name := tensor_name(layer, one)) in file.specs]
        return file.end(*names) if names else 0

    def read(self, key: ObjectKey, file: StateFile, layer: int) -> dict[str, Tensor]:
        """Return a layer's tensors, verified. Raise ``Unfit``."""
        return read_tensors(key, file, layer, self.plan(layer, key.count))


def refusal(state: ModelState) -> str:
    """Return the reason why a state has no chunks; empty: it has."""
    if state.recurrent_ids:
        return "the state of a recurrent layer cannot be moved to another place, and it needs every token"
    if len(state.geometry.specs) < len(state.get_layout()["layers"]):
        return "cross layers keep what an encoder read, which tokens do not tell"
    return ""
