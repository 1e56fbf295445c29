"""Cross layers: K and V of an encoder, written once for a sequence, shared by forks, in a pool.

An *encoding* is what the encoder has left for one sequence: pages, of which each cross layer uses
the first S rows in its own tensors. Forks share all of its pages; a writer gets copies. Windows,
trees, pops and the bracket of a forward do not concern it.

Letters: S rows of the encoder in one layer; T new tokens; Hq, Hkv heads; Dk, Dv head sizes; P page
size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import FailedPrecondition, QuireError, ResourceExhausted
from quire.base.types import SeqId
from quire.contracts.attention import AttentionBackend, AttentionState, Scoring
from quire.contracts.kv_format import KVFormat, KVView, PlainRows
from quire.contracts.layers import CrossAttention
from quire.kv import plans
from quire.kv.forward_need import SlotCopy, pages_for, slots_of
from quire.kv.pages import PageIds, PagePool
from quire.kv.part import Part
from quire.kv.plans import Batch, Prepared
from quire.kv.sequence_table import SequenceTable
from quire.kv.storage import PagedStorage
from quire.ops.attention import attention_weights


@dataclass(slots=True, eq=False)
class Encoding:
    """What the encoder has left for one sequence."""

    pages: PageIds
    """At least one. Either all are shared with forks, or none is."""
    rows: dict[int, int]
    """S of each layer that is set, by layer id."""


class EncodingTable:
    """Which sequence holds which encoding, and the pages of each. Moves no tensors."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.pool = PagePool(num_pages)
        self.page_size = page_size
        self.num_splits = 0
        """Shared pages that were copied so far."""
        self._held: dict[SeqId, Encoding] = {}

    def get(self, seq_id: SeqId) -> Encoding | None:
        """Return the encoding of a sequence; None: none of its layers is set."""
        return self._held.get(seq_id)

    def rows(self, seq_id: SeqId, layer_id: int) -> int:
        """S of a layer; 0: it is not set."""
        found = self._held.get(seq_id)
        return 0 if found is None else found.rows.get(layer_id, 0)

    def num_pages(self, seq_id: SeqId) -> tuple[int, int]:
        """Return two counts: the pages of the sequence, and the shared ones among them."""
        found = self._held.get(seq_id)
        return (0, 0) if found is None else (found.pages.size, 0 if self._is_alone(found) else found.pages.size)

    def _is_alone(self, found: Encoding) -> bool:
        """Return whether no fork shares the pages of an encoding."""
        return self.pool.references.item(found.pages[0]) == 1

    def require_room(self, seq_id: SeqId, rows: int, verb: str) -> None:
        """Raise ``ResourceExhausted`` unless there are pages for ``own``."""
        found, needed = self._held.get(seq_id), pages_for(rows, self.page_size)
        if found is not None:
            needed = max(needed, found.pages.size) - (found.pages.size if self._is_alone(found) else 0)
        if needed > self.pool.num_free:
            raise ResourceExhausted(
                f"{verb}: {needed} pages of {self.page_size} encoder rows are needed and {self.pool.num_free} of "
                f"{self.pool.num_pages} are free; remove sequences, or make the state with a larger cross_capacity"
            )

    def own(self, seq_id: SeqId, rows: int) -> list[SlotCopy]:
        """Let a sequence have pages of its own for at least ``rows`` rows. The caller asks
        ``require_room`` before, and makes the copies before anything is written."""
        found, wanted = self._held.get(seq_id), pages_for(rows, self.page_size)
        if found is not None and self._is_alone(found):
            if wanted > found.pages.size:
                found.pages = np.concatenate((found.pages, self.pool.take(wanted - found.pages.size)))
            return []
        old = np.empty(0, dtype=np.int32) if found is None else found.pages
        pages = self.pool.take(max(wanted, old.size))
        self.pool.release(old)
        self._held[int(seq_id)] = Encoding(pages, {} if found is None else found.rows)
        self.num_splits += old.size
        size, moves = self.page_size, zip(old.tolist(), pages[: old.size].tolist(), strict=True)
        return [SlotCopy(source * size, target * size, size) for source, target in moves]

    def note(self, seq_id: SeqId, layer_id: int, rows: int) -> None:
        """Note the ``rows`` rows of a layer, which lie in pages of the sequence's own."""
        self._held[seq_id].rows[layer_id] = rows

    def slots(self, seq_id: SeqId, part: range) -> NDArray[np.int64]:
        """Return the slots of these rows."""
        return slots_of(self._held[seq_id].pages, part.start, part.stop, self.page_size)

    def fork(self, parent_id: SeqId, child_id: SeqId) -> None:
        """Share the parent's pages with the child."""
        found = self._held.get(parent_id)
        if found is not None:
            self.pool.share(found.pages)
            self._held[int(child_id)] = Encoding(found.pages, dict(found.rows))

    def remove(self, seq_id: SeqId) -> None:
        """Release the pages of a sequence's encoding."""
        if (found := self._held.pop(seq_id, None)) is not None:
            self.pool.release(found.pages)

    def clear(self) -> None:
        self._held.clear()
        self.pool.clear()

    def check(self, known: Collection[SeqId]) -> None:
        """Recount everything; ``QuireError`` names what is broken. ``known``: all sequences."""
        expected = np.zeros(self.pool.num_pages, dtype=np.int32)
        for seq_id, one in self._held.items():
            if seq_id not in known:
                raise QuireError(f"encoder rows of sequence {seq_id} are held, which does not exist")
            np.add.at(expected, one.pages, 1)
            needed = pages_for(max(one.rows.values(), default=0), self.page_size)
            if not needed or min(one.rows.values()) < 1 or one.pages.size != needed:
                raise QuireError(f"the encoding of sequence {seq_id} has {one.pages.size} pages for rows {one.rows}")
        self.pool.check(expected)


class EncoderPart(Part):
    """The cross layers of a KV state: ``specs`` by layer id, ascending. ``capacity``: rows of
    encoders over all sequences, of each layer, in whole pages."""

    def __init__(
        self,
        specs: Mapping[int, CrossAttention],
        *,
        capacity: int,
        page_size: int,
        format: KVFormat,
        device: torch.device,
    ) -> None:
        self.specs = dict(specs)
        self.device = device
        self.dtype = format.dtype
        self.table = EncodingTable(pages_for(capacity, page_size), page_size)
        slots = self.table.pool.num_pages * page_size
        self.storage = PagedStorage(list(self.specs.values()), slots, format, device)
        self._places = {layer: place for place, layer in enumerate(self.specs)}

    def clear(self) -> None:
        self.table.clear()

    def remove(self, seq_id: SeqId) -> None:
        self.table.remove(seq_id)

    def fork(self, parent_id: SeqId, child_id: SeqId, length: int) -> None:
        self.table.fork(parent_id, child_id)

    def check(self, sequences: SequenceTable) -> None:
        self.table.check(sequences.ids)

    def stored(self, layer_id: int) -> KVView:
        """Return the rows of a layer, by slot."""
        return self.storage.layers[self._places[layer_id]]

    def set_rows(self, seq_id: SeqId, layer_id: int, k_SHD: Tensor, v_SHD: Tensor) -> None:
        """Write all rows of a layer, as ``fill``."""
        self.fill(seq_id, layer_id, self.storage.pack(self._places[layer_id], k_SHD, v_SHD))

    def fill(self, seq_id: SeqId, layer_id: int, planes: Mapping[str, Tensor]) -> None:
        """Write a layer's planes ``[S, ...]``, then zeros: kernels read whole pages, and 0 * an old
        NaN is NaN."""
        rows = self.table.rows(seq_id, layer_id)
        count = pages_for(rows, self.table.page_size) * self.table.page_size
        whole = {name: _extended(plane.to(self.device), count) for name, plane in planes.items()}
        self.storage.put(self._places[layer_id], self.table.slots(seq_id, range(count)), whole)

    def write(self, seq_id: SeqId, layer_id: int, start: int, k_SHD: Tensor, v_SHD: Tensor) -> None:
        """Write rows from ``start`` on."""
        slots = torch.from_numpy(self.table.slots(seq_id, range(start, start + k_SHD.shape[0]))).to(self.device)
        self.storage.write(self._places[layer_id], slots, k_SHD.to(self.device), v_SHD.to(self.device))

    def read(self, seq_id: SeqId, layer_id: int, part: range) -> PlainRows:
        """Fresh copies of these rows, all of which are set."""
        return self.storage.read(self._places[layer_id], self.table.slots(seq_id, part))

    def take(self, seq_id: SeqId, layer_id: int) -> dict[str, Tensor]:
        """Return fresh planes of all rows of a layer that is set."""
        slots = self.table.slots(seq_id, range(self.table.rows(seq_id, layer_id)))
        return self.storage.take(self._places[layer_id], slots)


def _extended(plane: Tensor, count: int) -> Tensor:
    """Return ``count`` rows of a plane: those given and zeros."""
    return torch.cat((plane, plane.new_zeros(count - plane.shape[0], *plane.shape[1:])))


class EncoderPass:
    """One open forward over encoder rows. Layers with equal row counts share one plan."""

    def __init__(self, part: EncoderPart, seq_ids: Sequence[SeqId], batch: Batch, backend: AttentionBackend) -> None:
        self._part = part
        self._seq_ids = tuple(seq_ids)
        self._batch = batch
        self._backend = backend
        self._prepared: dict[tuple[tuple[int, int], ...], Prepared] = {}

    def prepared(self, layer_id: int) -> Prepared:
        """Return the plan of a layer; ``FailedPrecondition`` names a sequence without its rows."""
        table = self._part.table
        held = [(table.get(seq_id), table.rows(seq_id, layer_id)) for seq_id in self._seq_ids]
        key: list[tuple[int, int]] = []
        tables: list[PageIds] = []
        for seq_id, (encoding, rows) in zip(self._seq_ids, held, strict=True):
            if encoding is None or not rows:
                raise FailedPrecondition(
                    f"cross_attention: layer {layer_id} has no encoder rows of sequence {seq_id}; call set_cross_kv"
                )
            key.append((encoding.pages.item(0), rows))
            tables.append(encoding.pages[: pages_for(rows, table.page_size)])
        found = self._prepared.get(tuple(key))
        if found is None:
            plan = plans.encoded(self._batch, tables, table.page_size, np.array([rows for _, rows in key]))
            found = self._prepared[tuple(key)] = Prepared(plan, self._backend.plan(plan, self._part.dtype))
        return found

    def attend(self, layer_id: int, q_THD: Tensor) -> Tensor:
        """Return ``[T, Hq, Dv]``, contiguous, in the dtype of q."""
        stored, scoring = self._part.stored(layer_id), Scoring(self._part.specs[layer_id].scale)
        q = q_THD.to(self._part.dtype)
        return self._backend.run(self.prepared(layer_id).made, q, None, stored, scoring).to(q_THD.dtype)

    def state(self, layer_id: int, q_THD: Tensor, scale: float | None = None) -> AttentionState:
        """Return the same as an attention state; ``scale=None``: that of the layer."""
        stored = self._part.stored(layer_id)
        scoring = Scoring(self._part.specs[layer_id].scale if scale is None else scale)
        q = q_THD.to(self._part.dtype)
        return self._backend.run_state(self.prepared(layer_id).made, q, None, stored, scoring)

    def weights(self, layer_id: int, q_THD: Tensor) -> list[Tensor]:
        """Return ``[Hq, n, S]`` float32 per entry."""
        stored, scoring = self._part.stored(layer_id), Scoring(self._part.specs[layer_id].scale)
        return attention_weights(self.prepared(layer_id).plan, q_THD.to(self._part.dtype), stored, scoring)
