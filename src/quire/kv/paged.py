"""The attention layers of a KV state: K and V, or latent rows, of every token, in pages.

Layers that keep the same positions form a *layer class* with a pool and a storage of its own. The
page tables belong to the sequences (``sequence_table``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq

import torch

from quire.base.types import SeqId
from quire.contracts.attention import AttentionBackend, Scoring
from quire.contracts.block_calls import PartsBackend
from quire.contracts.kv_format import KVFormat
from quire.contracts.layers import LatentAttention, RopeSpec
from quire.contracts.rows import RowKernels
from quire.kv.block_calls import LayerParts
from quire.kv.forward_need import ForwardNeed, pages_for
from quire.kv.layer_classes import Layer, LayerClass
from quire.kv.pages import PagePool
from quire.kv.part import Part
from quire.kv.sequence_table import SequenceTable
from quire.kv.sequences import Sequence
from quire.kv.storage import PagedSpec, PagedStorage
from quire.ops.rope import RotaryTable


class PagedPart(Part):
    """The sequences, and the layers that keep rows of their tokens.

    ``specs``: the layers by id, ascending. ``capacity``: tokens that the pool of each class holds,
    in whole pages; ``window_capacity``: the same for classes with a window; None: as many.
    ``padding``, ``slack``: see ``State``. ``absent``: layers, by id, whose rows other stages hold.
    """

    def __init__(
        self,
        specs: Mapping[int, PagedSpec],
        *,
        capacity: int,
        window_capacity: int | None,
        page_size: int,
        format: KVFormat,
        device: torch.device,
        backend: AttentionBackend,
        rows: RowKernels,
        padding: bool,
        slack: int,
        absent: Collection[int] = (),
    ) -> None:
        self.specs = dict(specs)
        self.page_size = page_size
        self.format = format
        self.dtype = format.dtype
        self.device = device
        self.backend = backend
        self.rows = rows
        self.padding = padding
        self.absent = absent
        self.pages_of_tokens = pages_for(capacity, page_size)
        self.classes: list[LayerClass] = []
        self.layers: dict[int, Layer] = {}
        """By id."""
        self.sequences = SequenceTable(
            self._make_pools(window_capacity), page_size, [one.window for one in self.classes]
        )
        self.sequences.slack = slack
        self._rotary: dict[RopeSpec, RotaryTable] = {}
        self.layer_parts: LayerParts | None = None
        if isinstance(backend, PartsBackend):
            self.layer_parts = LayerParts(backend, self.layers.__getitem__, self.rotary_table, page_size)
        """For calls over whole blocks; None if the backend knows none."""

    def _make_pools(self, window_capacity: int | None) -> list[PagePool]:
        """Make the layer classes and their storage; return their pools."""
        members: dict[int | None, list[int]] = {}
        for layer_id, spec in self.specs.items():
            members.setdefault(spec.layer_window, []).append(layer_id)
        pools: list[PagePool] = []
        for window, layers in members.items():
            full = window is None or window_capacity is None
            pools.append(PagePool(self.pages_of_tokens if full else pages_for(window_capacity or 1, self.page_size)))
            slots = pools[-1].num_pages * self.page_size
            storage = PagedStorage(
                [self.specs[layer_id] for layer_id in layers],
                slots,
                self.format,
                self.device,
                padding=self.padding,
                row_kernels=self.rows,
                absent=[place for place, layer_id in enumerate(layers) if layer_id in self.absent],
            )
            for place, layer_id in enumerate(layers):
                spec, sinks_H, view = self.specs[layer_id], None, storage.layers.get(place)
                scoring = Scoring(spec.scale)
                if not isinstance(spec, LatentAttention):
                    scoring = Scoring(spec.scale, spec.softcap)
                    sinks_H = torch.tensor(spec.sinks, dtype=torch.float32, device=self.device) if spec.sinks else None
                self.layers[layer_id] = Layer(spec, len(self.classes), place, view, scoring, sinks_H)
            self.classes.append(LayerClass(window, tuple(layers), storage))
        return pools

    def rotary_table(self, spec: RopeSpec) -> RotaryTable:
        """Return the table of one set of frequencies, which all layers that use it share."""
        table = self._rotary.get(spec)
        if table is None:
            table = self._rotary[spec] = RotaryTable(spec, self.device)
        return table

    # -- the verbs of a part -----------------------------------------------------------------------

    def clear(self) -> None:
        self.sequences.clear()

    def add(self, seq_id: SeqId) -> None:
        self.sequences.add(seq_id)

    def remove(self, seq_id: SeqId) -> None:
        self.sequences.remove(seq_id)

    def fork(self, parent_id: SeqId, child_id: SeqId, length: int) -> None:
        self.sequences.fork(parent_id, child_id, length)

    def pop(self, seq_id: SeqId, length: int) -> None:
        self.sequences.pop(seq_id, length)

    def commit(self, seq_ids: Seq[SeqId], kept: Seq[tuple[Sequence, list[int]]]) -> None:
        for one, copies in zip(self.classes, self.sequences.commit(kept), strict=True):
            one.storage.copy(copies)

    def reserve(self, need: ForwardNeed, checkpoints: Seq[Seq[int]]) -> ForwardNeed:
        self.sequences.require_room(need)
        return need

    def open(self, reserved: ForwardNeed) -> None:
        opened = self.sequences.open_forward(reserved)
        try:
            for one, copies, blanks in zip(self.classes, opened.copies, opened.blanks, strict=True):
                one.storage.copy(copies)
                one.storage.blank(blanks)
        except BaseException:
            self.sequences.abort()
            raise

    def publish(self) -> None:
        self.sequences.publish()

    def abort(self) -> None:
        self.sequences.abort()
