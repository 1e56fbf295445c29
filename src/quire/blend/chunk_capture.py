"""``ChunkCapture``: copies the rows of a chunk as they are computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.base.errors import FailedPrecondition
from quire.base.types import SeqId
from quire.blend.chunk_catalog import ChunkCatalog
from quire.blend.chunks import ChunkKeys, ChunkLayout


class ChunkCapture:
    """One chunk on its way into the store.

    Run ``ids``, the lead and the chunk's tokens, as an ordinary sequence. Call ``ran`` after each
    forward of it, before the next, and ``store`` at the end.
    """

    def __init__(self, catalog: ChunkCatalog, layout: ChunkLayout, keys: ChunkKeys, tokens: Sequence[int]) -> None:
        """``InvalidArgument`` unless there are ``LEAST`` to ``MOST`` tokens."""
        self._tokens = np.array(tokens, np.int64)
        self.key = keys.key(self._tokens)
        self.ids: list[int] = [*keys.lead, *self._tokens.tolist()]
        """The ids to run."""
        self._catalog, self._layout, self._keys = catalog, layout, keys
        self._rows: dict[int, dict[str, torch.Tensor]] = {}
        self._done = len(keys.lead)

    @property
    def is_stored(self) -> bool:
        """Return True if the store has the chunk, so that nothing needs to run."""
        return self._catalog.has(self.key)

    def ran(self, seq: SeqId, computed: int) -> None:
        """Copy the new rows among the first ``computed`` of ``ids``. Rows are copied once, even if
        a sequence restarts. ``FailedPrecondition``, with nothing copied: a layer does not hold some
        of them, such as a windowed layer after a reuse of state."""
        lead, start, stop = len(self._keys.lead), self._done, min(computed, len(self.ids))
        if start >= stop:
            return
        export = self._layout.state.open_export(seq)
        for layer in self._layout.layers:
            if not any(held.start <= start and stop <= held.stop for held in export.held(layer)):
                raise FailedPrecondition(
                    f"rows {start}..{stop - 1} of a chunk are not all in layer {layer}, which holds {export.held(layer)}; "
                    "run the chunk from its start without reuse, and take its rows after each forward"
                )
        if not self._rows:
            for layer in self._layout.layers:
                plan = self._layout.plan(layer, self._tokens.size).items()
                self._rows[layer] = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in plan}
        for layer, tensors in self._rows.items():
            for name, rows in export.plain_rows(layer, start, stop).items():
                tensors[name][start - lead : stop - lead].copy_(rows)
        self._done = stop

    def store(self) -> bool:
        """Put the chunk into the store, unless it is there; return True if the store has it.
        ``FailedPrecondition``: not all rows were copied."""
        if self.is_stored:
            return True
        if self._done < len(self.ids):
            raise FailedPrecondition(f"{self._done} of the chunk's {len(self.ids)} tokens have run; run all of them")
        blob = self._layout.pack(self._keys, self._tokens, self._rows)
        self._rows = {}
        return self._catalog.put(self.key, blob, private=self._keys.private)
