"""Export and import of one sequence of the naive KV state: what an exporter holds is what an
importer gets.

Letters: n rows; Hkv heads; Dk, Dv head sizes; P page size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quire.errors import DataLoss, FailedPrecondition, InvalidArgument, ResourceExhausted

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
            self, *, needs: Iterable[int] = (), new: Iterable[int] = (), ready: bool = True, closed: bool = True
        ) -> Faults: ...
        def _pending(self, seq_id: int) -> bool: ...
        def held(self, seq_id: int, index: int, address: int) -> bool: ...
        def empty_sequence(self) -> ModelSequence: ...

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

    def prepare_import(self, seq_id: int, export: Export) -> None:
        faults = self._faults(new=[seq_id])
        # The page of the next token is needed whatever is held of it.
        tail = {export.length // self.page_size} if export.length % self.page_size else set()
        needed = [{i // self.page_size for i in held} | tail for held in export.held]
        if any(len(pages) > pool.free for pages, pool in zip(needed, self.pools, strict=True)):
            faults.add(ResourceExhausted)
        raise_first(faults)
        sequence = self.empty_sequence()
        sequence.importing = export
        size = page_count(export.length, self.page_size)
        for index, (pages, pool, held) in enumerate(zip(needed, self.pools, export.held, strict=True)):
            sequence.tables[index] = [pool.take() if page in pages else None for page in range(size)]
            sequence.absent[index] = {
                i for i in range(export.length) if i // self.page_size in pages and i not in set(held)
            }
        self.sequences[seq_id] = sequence

    def import_group(
        self, seq_id: int, layer: int, k: Tensor, v: Tensor, intact: Callable[[], bool] = lambda: True
    ) -> None:
        faults = self._faults(needs=[seq_id], ready=False)
        export = self.sequences[seq_id].importing if seq_id in self.sequences else None
        if seq_id in self.sequences:
            if export is None or layer in self.sequences[seq_id].imported:
                faults.add(FailedPrecondition)
            if export is not None and len(k) != len(export.held[self.class_of[layer]]):
                faults.add(InvalidArgument)
        if not intact():
            faults.add(DataLoss)
        raise_first(faults)
        assert export
        sequence, spec = self.sequences[seq_id], self.specs[layer]
        nothing = k.new_zeros(spec.num_kv_heads, spec.head_dim), v.new_zeros(spec.num_kv_heads, spec.value_dim)
        rows = [nothing] * export.length
        for row, position in enumerate(export.held[self.class_of[layer]]):
            rows[position] = k[row].clone(), v[row].clone()
        sequence.rows[layer] = rows
        sequence.imported.add(layer)

    def finish_import(self, seq_id: int) -> None:
        faults = self._faults(needs=[seq_id], ready=False)
        if seq_id in self.sequences:
            sequence = self.sequences[seq_id]
            if sequence.importing is None or len(sequence.imported) < len(self.specs):
                faults.add(FailedPrecondition)
        raise_first(faults)
        export = sequence.importing
        assert export
        sequence.length, sequence.window, sequence.slid = export.length, export.window, export.slid
        sequence.importing, sequence.imported = None, set()
