"""``ChunkCapture``: the rows of a chunk, taken as they are computed."""

from __future__ import annotations

from collections.abc import Sequence

from quire.blend.chunk_catalog import ChunkCatalog
from quire.blend.chunks import ChunkKeys, ChunkLayout
from quire.contracts.store import ObjectKey
from quire.types import SeqId


class ChunkCapture:
    """One chunk on its way into the store.

    Run ``ids``, the lead and the chunk's tokens, as an ordinary sequence. Call ``ran`` after each
    forward of it, before the next, and ``store`` at the end.
    """

    def __init__(self, catalog: ChunkCatalog, layout: ChunkLayout, keys: ChunkKeys, tokens: Sequence[int]) -> None:
        """``InvalidArgument`` unless there are ``LEAST`` to ``MOST`` tokens; ``Unsupported`` if the
        layout refuses chunks."""
        self.ids: list[int] = [*keys.lead, *tokens]
        """What is to be run."""
        self.key: ObjectKey
        raise NotImplementedError

    @property
    def is_stored(self) -> bool:
        """Whether the chunk is in the store, so that nothing needs to run."""
        raise NotImplementedError

    def ran(self, seq: SeqId, computed: int) -> None:
        """Copy the rows that are new among the first ``computed`` of ``ids``. What it has already
        is not copied again, as when a sequence starts anew. ``FailedPrecondition``: a layer has let
        go of rows that were not copied (after a reuse of state, a layer with a window has)."""
        raise NotImplementedError

    def store(self) -> bool:
        """Put the chunk into the store; return whether a tier takes it. ``FailedPrecondition``: not
        all rows were copied."""
        raise NotImplementedError
