"""Export and import of one sequence of the naive KV state: what an exporter holds is what an
importer gets.

Letters: n rows; Hkv heads; Dk, Dv head sizes; P page size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.base.errors import DataLoss, FailedPrecondition, InvalidArgument, ResourceExhausted

from .oracle_pages import Pages, page_count
from .oracle_refusals import Faults, raise_first
from .oracle_values import Spec
from .oracle_windows import Window, ranges

if TYPE_CHECKING:
    from .oracle import LayerClass, ModelSequence


@dataclass(frozen=True)
class Export:
    """What an export says of a sequence."""

    length: int
    window: Window | None
    slid: bool
    held: tuple[tuple[int, ...], ...]
    """By class: ascending positions."""

    @classmethod
    def read(cls, metadata: dict[str, Any]) -> Export:
        """From metadata that were found to say the right thing."""
        size = metadata["window"]
        return cls(
            metadata["length"],
            None if size is None else Window(size, metadata["sink"], metadata["eviction"]),
            metadata["evicted"] > 0,
            tuple(tuple(i for run in part["ranges"] for i in range(*run)) for part in metadata["held"]),
        )

    def metadata(self, classes: Sequence[LayerClass]) -> dict[str, Any]:
        """The same as the state says it."""
        return {
            "length": self.length,
            "window": self.window.size if self.window else None,
            "sink": self.window.sink if self.window else 0,
            "eviction": self.window.eviction if self.window else "token",
            "evicted": max(0, self.length - self.window.size) if self.window and self.slid else 0,
            "held": [
                {"layers": part.layers, "ranges": [[run.start, run.stop] for run in ranges(set(held))]}
                for part, held in zip(classes, self.held, strict=True)
            ],
        }


class ExchangeVerbs:
    """Mixed into ``Oracle``, which has the sequences."""

    if TYPE_CHECKING:
        specs: list[Spec]
        page_size: int
        classes: list[LayerClass]
        class_of: list[int]
        pools: list[Pages]
        sequences: dict[int, ModelSequence]

        def _faults(
            self,
            *,
            needs: Iterable[int] = (),
            new: Iterable[int] = (),
            ready: bool = True,
            closed: bool = True,
            loading: bool = False,
        ) -> Faults: ...
        def _pending(self, seq_id: int) -> bool: ...
        def held(self, seq_id: int, index: int, address: int) -> bool: ...
        def empty_sequence(self) -> ModelSequence: ...
        def is_importing(self, seq_id: int) -> bool: ...

    def export(self, seq_id: int) -> Export:
        faults = self._faults(needs=[seq_id], closed=False)
        if self._pending(seq_id):
            faults.add(FailedPrecondition)
        raise_first(faults)
        sequence = self.sequences[seq_id]
        held = (
            tuple(i for i in range(sequence.length) if self.held(seq_id, index, i)) for index in range(len(self.pools))
        )
        return Export(sequence.length, sequence.window, sequence.slid, tuple(held))

    def _import_pages(self, export: Export, shared: int) -> list[set[int]]:
        """By class: the pages that an import takes."""
        # The page of the next token is needed whatever is held of it.
        tail = {export.length // self.page_size} if export.length % self.page_size else set()
        return [
            ({i // self.page_size for i in held} | tail) - set(range(shared // self.page_size if full else 0))
            for held, full in zip(export.held, self._keeping(), strict=True)
        ]

    def _keeping(self) -> list[bool]:
        """By class: whether it keeps all tokens."""
        return [found.window is None for found in self.classes]

    def _shared_faults(self, export: Export, shared: int) -> Faults:
        whole = all(
            set(range(shared)) <= set(held) for held, full in zip(export.held, self._keeping(), strict=True) if full
        )
        fits = 0 <= shared <= export.length and shared % self.page_size == 0
        return set() if fits and whole else {InvalidArgument}

    def import_need(self, export: Export, shared: int) -> list[int]:
        raise_first(self._shared_faults(export, shared))
        return [len(pages) for pages in self._import_pages(export, shared)]

    def _import_faults(self, seq_id: int, export: Export, parent: int | None, shared: int, summed: bool) -> Faults:
        """Everything but the room. ``summed``: the export has checksums."""
        faults = self._faults(new=[seq_id]) | self._shared_faults(export, shared)
        if shared and (parent is None or (summed and any(self._keeping()))):
            faults.add(InvalidArgument)
        if parent is not None:
            faults |= self._faults(needs=[parent])
            if self._pending(parent):
                faults.add(FailedPrecondition)
            if parent in self.sequences:
                if shared > self.sequences[parent].length:
                    faults.add(InvalidArgument)
                for index, full in enumerate(self._keeping()):
                    if full and not all(self.held(parent, index, i) for i in range(shared)):
                        faults.add(FailedPrecondition)
        return faults

    def prepare_import(
        self, seq_id: int, export: Export, parent: int | None = None, shared: int = 0, *, summed: bool = False
    ) -> None:
        faults = self._import_faults(seq_id, export, parent, shared, summed)
        needed = self._import_pages(export, shared)
        if any(len(pages) > pool.free for pages, pool in zip(needed, self.pools, strict=True)):
            faults.add(ResourceExhausted)
        raise_first(faults)
        sequence = self.empty_sequence()
        sequence.importing, sequence.shared = export, shared
        size = page_count(export.length, self.page_size)
        own = [range(shared // self.page_size if full else 0, size) for full in self._keeping()]
        for index, (pages, pool, held) in enumerate(zip(needed, self.pools, export.held, strict=True)):
            sequence.tables[index] = [pool.take() if page in pages else None for page in range(size)]
            for page in range(own[index].start):
                assert parent is not None
                sequence.tables[index][page] = self.sequences[parent].tables[index][page]
                pool.share(sequence.tables[index][page])
            sequence.absent[index] = {
                i for i in range(export.length) if i // self.page_size in pages and i not in set(held)
            }
        for layer, spec in enumerate(self.specs):
            shapes = (spec.num_kv_heads, spec.head_dim), (spec.num_kv_heads, spec.value_dim)
            sequence.rows[layer] = [tuple(torch.zeros(shape, dtype=self.dtype) for shape in shapes)] * export.length  # type: ignore[list-item]
            if parent is not None and own[self.class_of[layer]].start:
                sequence.rows[layer][:shared] = self.sequences[parent].rows[layer][:shared]
            sequence.come[layer] = set()
        self.sequences[seq_id] = sequence

    def expected(self, seq_id: int, layer: int) -> list[int]:
        """Positions whose rows an import brings."""
        sequence = self.sequences[seq_id]
        assert sequence.importing
        index = self.class_of[layer]
        low = sequence.shared if self._keeping()[index] else 0
        return [i for i in sequence.importing.held[index] if i >= low]

    def _written_faults(self, seq_id: int) -> Faults:
        """What writing into an import refuses in common."""
        loading = seq_id in self.sequences and self.sequences[seq_id].loading
        faults = self._faults(needs=[seq_id], ready=False, closed=not loading)
        return faults if self.is_importing(seq_id) or seq_id not in self.sequences else faults | {FailedPrecondition}

    def import_group(
        self, seq_id: int, layer: int, k: Tensor, v: Tensor, intact: Callable[[], bool] = lambda: True
    ) -> None:
        faults = self._written_faults(seq_id)
        if self.is_importing(seq_id):
            expected = self.expected(seq_id, layer)
            if self.sequences[seq_id].come[layer]:
                faults.add(FailedPrecondition)
            if len(k) != len(expected):
                faults.add(InvalidArgument)
        if not intact():
            faults.add(DataLoss)
        raise_first(faults)
        self._bring(seq_id, layer, expected, k, v)

    def import_rows(self, seq_id: int, layer: int, start: int, k: Tensor, v: Tensor, *, summed: bool) -> None:
        faults = self._written_faults(seq_id)
        positions = list(range(start, start + len(k)))
        if start < 0 or not positions:
            faults.add(InvalidArgument)
        if self.is_importing(seq_id):
            if not set(positions) <= set(self.expected(seq_id, layer)):
                faults.add(InvalidArgument)
            if summed or self.sequences[seq_id].come[layer] & set(positions):
                faults.add(FailedPrecondition)
        raise_first(faults)
        self._bring(seq_id, layer, positions, k, v)

    def _bring(self, seq_id: int, layer: int, positions: Sequence[int], k: Tensor, v: Tensor) -> None:
        sequence = self.sequences[seq_id]
        for row, position in enumerate(positions):
            sequence.rows[layer][position] = k[row].clone(), v[row].clone()
        sequence.come[layer] |= set(positions)

    def pending_layers(self, seq_id: int) -> list[int]:
        raise_first(self._faults(needs=[seq_id], ready=False, closed=False))
        if not self.is_importing(seq_id):
            return []
        come = self.sequences[seq_id].come
        return [layer for layer in range(len(self.specs)) if set(self.expected(seq_id, layer)) - come[layer]]

    def publish_import(self, seq_id: int) -> None:
        faults = self._faults(needs=[seq_id], ready=False)
        if seq_id in self.sequences and (not self.is_importing(seq_id) or self.sequences[seq_id].loading):
            faults.add(FailedPrecondition)
        raise_first(faults)
        sequence = self.sequences[seq_id]
        export = sequence.importing
        assert export
        sequence.length, sequence.window, sequence.slid = export.length, export.window, export.slid
        sequence.loading = True

    def finish_import(self, seq_id: int) -> None:
        faults = self._faults(needs=[seq_id], ready=False)
        if seq_id in self.sequences and (not self.is_importing(seq_id) or self.pending_layers(seq_id)):
            faults.add(FailedPrecondition)
        raise_first(faults)
        sequence = self.sequences[seq_id]
        if not sequence.loading:
            self.publish_import(seq_id)
        sequence.importing, sequence.loading, sequence.shared = None, False, 0
        sequence.come, sequence.imported = {}, set()
