"""``ObjectRows``: rows of stored objects on their way into the pool, layer by layer.

With the C++ library the rows of a layer are verified and copied in one call. Without it, on a
device, and for objects that the call does not support, ``store.objects`` reads each object and
reports errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.kv_state import TensorPlan
from quire.kernels.rows.checked_rows import SHORTEST, CheckedPieces, RowRuns, checked_rows
from quire.statefile.container import StateFile
from quire.store.keys import StoredPiece
from quire.store.objects import read_tensors, tensor_name
from quire.store.records import Unfit

Plan: TypeAlias = Callable[[int], Mapping[str, TensorPlan]]
"""From a number of tokens to the tensors of a layer."""


class ObjectRows:
    """The rows of ``tokens`` in consecutive objects, each with a part of them."""

    def __init__(
        self,
        pieces: Sequence[StoredPiece],
        files: Sequence[StateFile],
        tokens: range,
        dropping: Callable[[StoredPiece], AbstractContextManager[None]],
    ) -> None:
        """``files``: the open objects. ``dropping``: context manager around reading an object,
        which drops a damaged one."""
        self.pieces, self.files, self.dropping = pieces, files, dropping
        self.start = max(pieces[0].start, tokens.start)
        """The first token whose rows are read."""
        self.parts = [
            range(max(one.start, tokens.start) - one.start, min(one.stop, tokens.stop) - one.start) for one in pieces
        ]
        """The range of rows of each object that is read."""
        self.addresses = np.array([file.address for file in files], dtype=np.int64)
        self.tables: list[tuple[StateFile, int]] = []
        """The distinct layouts: an object and its number of tokens. Runs of equal length share a
        layout."""
        table: list[int] = []
        for piece, file in zip(pieces, files, strict=True):
            count = piece.stop - piece.start
            if not self.tables or self.tables[-1][0].specs is not file.specs or self.tables[-1][1] != count:
                self.tables.append((file, count))
            table.append(len(self.tables) - 1)
        self.table_of = np.array(table)
        """Index into ``tables`` of each object."""
        self._runs: tuple[NDArray[np.int64], RowRuns] | None = None

    def of(self, layer: int, plan: Plan) -> ObjectLayerRows:
        """Return the rows of a layer."""
        return ObjectLayerRows(self, layer, plan)

    def runs(self, slots_N: NDArray[np.int64]) -> RowRuns:
        """Return the mapping of all rows to slots. Layers with the same array of slots share it."""
        if self._runs is None or self._runs[0] is not slots_N:
            counts, skipped = np.array([(len(part), part.start) for part in self.parts]).T
            self._runs = slots_N, RowRuns.of(counts, skipped, slots_N)
        return self._runs[1]


@dataclass(frozen=True, slots=True)
class ObjectLayerRows:
    """The rows of one layer: ``contracts.kv_state.RowPieces``. Raises ``Unfit``."""

    rows: ObjectRows
    layer: int
    of_tokens: Plan

    @property
    def plan(self) -> Mapping[str, TensorPlan]:
        return self.of_tokens(sum(self.counts))

    @property
    def counts(self) -> list[int]:
        return [len(part) for part in self.rows.parts]

    def piece(self, number: int) -> dict[str, Tensor]:
        piece, part = self.rows.pieces[number], self.rows.parts[number]
        with self.rows.dropping(piece):
            found = read_tensors(
                piece.key, self.rows.files[number], self.layer, self.of_tokens(piece.stop - piece.start)
            )
        return {name: tensor[part.start : part.stop] for name, tensor in found.items()}

    def write(self, targets: Mapping[str, Tensor], slots_N: NDArray[np.int64]) -> bool:
        call = checked_rows()
        if call is None or not all(one.is_cpu and one.is_contiguous() for one in targets.values()):
            return False
        found = [(self._stored(name), target) for name, target in targets.items()]
        if any(stored is None for stored, _ in found):
            return False
        runs = self.rows.runs(slots_N)
        for stored, target in found:
            assert stored is not None
            if (number := call(stored, runs, target)) < len(self.rows.pieces):
                piece = self.rows.pieces[number]
                self.piece(number)  # raises the error about the damage
                with self.rows.dropping(piece):
                    raise Unfit(f"object {piece.key.name} changed while it was read", code="checksum")
        return True

    def _stored(self, name: str) -> CheckedPieces | None:
        """Return the bytes of one tensor of all objects; None if an object deviates from the plan
        or has fewer bytes than the C++ call supports."""
        full, spans = tensor_name(self.layer, name), list[tuple[int, int]]()
        for file, tokens in self.rows.tables:
            spec, wanted = file.specs.get(full), self.of_tokens(tokens)[name]
            if spec is None or (spec.shape, spec.dtype) != wanted or spec.nbytes < SHORTEST:
                return None
            spans.append(file.spans[full])
        try:
            digests = bytes.fromhex("".join([file.checksums[full] for file in self.rows.files]))
        except (TypeError, ValueError):
            return None
        if len(digests) != 16 * len(self.rows.files):
            return None
        begins, ends = np.array(spans, dtype=np.int64)[self.rows.table_of].T
        return CheckedPieces(self.rows.addresses + begins, ends - begins, digests)
