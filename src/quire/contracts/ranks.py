"""Ranks: processes that hold parts of one model and run the same steps together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.base.types import SeqId
from quire.contracts.adapters import Adapter


class Group(Protocol):
    """The ranks of one model, as one of them sees them.

    All ranks make the same calls in the same order, with tensors of the same shape and dtype.
    ``RanksBroken`` if another one ended, or does not call in time.
    """

    @property
    def rank(self) -> int:
        """This one's number, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def sum(self, x: Tensor) -> Tensor:
        """Add the ranks' tensors, in place on each of them; return ``x``. The result is the same to
        the bit on all. Sums of 16-bit numbers are rounded to 16 bits once, at the end."""

    def gather(self, x_RO: Tensor) -> Tensor | None:
        """Return the ranks' columns side by side, a fresh ``[R, size * O]``, on rank 0; else
        None."""


class PeerRows(Protocol):
    """The rows of K and V that the other ranks hold, as rank 0 reads and writes them.

    Any thread may call. A ``place`` is a layer class and the number of a layer in it; *planes* are
    as in ``contracts.kv_format``. ``RanksBroken`` if a rank ended, or does not answer in time.
    """

    def take(
        self, place: tuple[int, int], slots_N: NDArray[np.int64], ranks: Sequence[int]
    ) -> list[Mapping[str, Tensor]]:
        """Return the planes ``[N, ...]`` of slots of a layer, one of each of these ranks, in host
        memory."""

    def put(
        self,
        seq: SeqId,
        place: tuple[int, int],
        slots_N: NDArray[np.int64],
        parts: Sequence[Mapping[str, Tensor]],
    ) -> None:
        """Write to each rank its part: planes for slots of a sequence that is being imported. Later
        steps see them. A rank that has removed the sequence ignores its part."""


class PeerAdapters(Protocol):
    """The adapters of the other ranks, as rank 0 loads and unloads them."""

    def load_adapter(self, adapter_id: int, parts: Sequence[Adapter]) -> None:
        """Let each of the others keep its part under this id. Raise the error of one that cannot;
        ``unload_adapter`` then gives back what the others have."""

    def unload_adapter(self, adapter_id: int) -> None:
        """Let the others forget an adapter, if they have it."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a model that one rank holds."""

    rank: int
    size: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"
