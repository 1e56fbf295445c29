"""``ChunkRetriever``: chunks of prompts, from the tiers to the device, layer by layer.

Letters: R requests; n tokens of a prompt, N of all; Hkv heads; D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from quire.blend.chunk_catalog import ChunkCatalog
from quire.blend.chunks import ChunkKeys, ChunkLayout
from quire.contracts.blend import BlendRetrieverResult
from quire.contracts.kv_state import Export

Order: TypeAlias = Literal["NHD", "HND"]


class RowsPiece(NamedTuple):
    """Rows of one layer that stand together, in a prompt and where they were computed."""

    start: int
    """The first one, among all N."""
    k: Tensor
    """``[m, Hkv, Dk]``, of a latent layer ``[m, 1, Dr]``. Nobody writes into it."""
    v: Tensor
    """``[m, Hkv, Dv]``, of a latent layer ``[m, 1, R]``."""
    original: int
    """The position at which the K of the first one was rotated."""


class ChunkTask:
    """``BlendRetrieverTask`` over chunks."""

    valid_mask: Tensor
    positions: Tensor
    """int64 ``[N]`` on the CPU: ``original_positions``."""
    tokens_by_tier: dict[str, int]
    """Rows by the kind of the tier that had them when they were looked up."""

    def pieces(self, layer_id: int) -> list[RowsPiece]:
        """Return the rows of a layer, in order of ``start``, without copies on the CPU. Waits and
        raises as ``result`` does."""
        raise NotImplementedError

    def result(self, layer_id: int) -> BlendRetrieverResult:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class ChunkRetriever:
    """``BlendRetriever`` over the chunks of one key space."""

    def __init__(
        self,
        catalog: ChunkCatalog,
        layout: ChunkLayout,
        keys: ChunkKeys,
        *,
        device: torch.device | None = None,
        order: Order = "NHD",
        seconds: float = 30.0,
        ahead: int = 2,
    ) -> None:
        """``device``: of the results; None: the CPU. ``seconds``: what a task waits for objects,
        from its start. ``ahead``: layers that are loaded before they are asked for."""
        raise NotImplementedError

    def new_request(
        self,
        full_prompts: Sequence[Tensor],
        indices: Sequence[Sequence[int]],
        *,
        wanted: Sequence[range] | None = None,
        first_layer: int = 0,
    ) -> ChunkTask:
        """Do as ``BlendRetriever.new_request`` does. ``wanted``: the rows of each prompt that are
        of use, one range each; None: all. ``first_layer``: the first one that will be asked for."""
        raise NotImplementedError


class Move(NamedTuple):
    """Rows of a sequence that stand somewhere else in a prompt."""

    start: int
    """Where they stand in the prompt."""
    source: int
    """Where they stand in the sequence."""
    count: int


class SequenceTask:
    """``BlendRetrieverTask`` over a live sequence: ``valid_mask``, ``positions``, ``pieces``,
    ``result`` and ``close`` as of ``ChunkTask``. Rows are read when a layer is asked for."""


class SequenceRetriever:
    """Rows of a live sequence as a source of blending. No store has a part in it."""

    def __init__(self, layout: ChunkLayout, export: Export, *, order: Order = "NHD") -> None:
        """``export`` must stay readable until the tasks are closed (see ``Export``)."""
        raise NotImplementedError

    def new_task(self, length: int, moves: Sequence[Move]) -> SequenceTask:
        """Return a task over a prompt of ``length`` tokens. ``InvalidArgument``: moves that
        overlap, or leave the prompt or what all layers of the sequence hold."""
        raise NotImplementedError
