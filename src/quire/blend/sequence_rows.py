"""``SequenceTask``: rows of a live sequence as a source of blending, without a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.base.errors import FailedPrecondition, InvalidArgument
from quire.blend.chunks import ChunkLayout
from quire.blend.rows_task import Order, RowsPiece, RowsTask
from quire.contracts.kv_state import Export


class Move(NamedTuple):
    """Rows of a sequence at another position in a prompt."""

    start: int
    """Position of the first row in the prompt."""
    source: int
    """Position of the first row in the sequence."""
    length: int


class SequenceTask(RowsTask):
    """``BlendRetrieverTask`` over a live sequence. Each call reads its rows."""

    def __init__(
        self, layout: ChunkLayout, export: Export, length: int, moves: Sequence[Move], order: Order = "NHD"
    ) -> None:
        """Make a task over a prompt of ``length`` tokens, with only the moved rows valid.
        ``export`` must stay readable until ``close`` (see ``Export``).

        ``InvalidArgument``: moves that overlap, leave the prompt, or name rows that some layer of
        the sequence does not hold.
        """
        end = 0
        for one in sorted(moves):
            if one.length < 1 or one.start < end or one.start + one.length > length or one.source < 0:
                allowed = f"rows of their own within 0..{length - 1}, from positions of the sequence"
                raise InvalidArgument(field="moves", given=one, allowed=allowed)
            end = one.start + one.length
            for layer in layout.layers:
                held = export.held(layer)
                if not any(part.start <= one.source and one.source + one.length <= part.stop for part in held):
                    raise InvalidArgument(field="moves", given=one, allowed=f"rows that layer {layer} holds: {held}")
        super().__init__(layout, length, moves, order)
        self._export: Export | None = export
        self._moves = sorted(moves)

    def pieces(self, layer_id: int) -> list[RowsPiece]:
        """Return the rows of a layer, in order of ``start``; fresh tensors."""
        self._layout.require(layer_id)
        if (export := self._export) is None:
            raise FailedPrecondition("the task is closed; make another one")
        found = list[RowsPiece]()
        for start, source, length in self._moves:
            k, v = self._layout.split(layer_id, export.plain_rows(layer_id, source, source + length))
            found.append(RowsPiece(start, k, v, source))
        return found

    def close(self) -> None:
        """Release the export. Closing again does nothing."""
        self._export = None
