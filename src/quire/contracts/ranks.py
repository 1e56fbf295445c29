"""Ranks: processes that hold parts of one model and run the same steps together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import Unsupported
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


class Line(Protocol):
    """The stages of one model, as a rank of one of them sees them: rows of the residual stream go
    from stage to stage, and the logits of the last stage to rank 0.

    All stages make these calls in the order of their forwards. ``RanksBroken`` if another one
    ended, or does not call in time.
    """

    def receive(self, count: int) -> Tensor:
        """Return ``[count, W]``, the output of the stage before; not on the first stage."""

    def send(self, x_TW: Tensor) -> None:
        """Give the next stage the output of this one; not on the last stage. The tensor must not
        change until ``finish_sends``."""

    def receive_scores(self, count: int) -> Tensor:
        """Return the scores of the stage before, float32 ``[count]``; not on the first stage."""

    def send_scores(self, scores_N: Tensor) -> None:
        """Give the next stage float32 ``[N]``, as for ``send``."""

    def sum(self, x_N: Tensor) -> Tensor:
        """Return the sum of float32 ``[N]`` over the stages, the same on all of them."""

    def fetch(self, count: int) -> Tensor:
        """Return float32 ``[count, V]``, the next logits of the last stage, on rank 0."""

    def give(self, logits_RV: Tensor) -> None:
        """Give rank 0 logits; on the first slice of the last stage."""

    @property
    def num_begun(self) -> int:
        """Number of messages that this rank has sent and fetched since it began."""

    def finish_sends(self, until: int | None = None) -> None:
        """Wait until the first ``until`` messages that this rank has sent and fetched are there;
        None: all of them."""


class PeerRows(Protocol):
    """The rows of K and V, and the recurrent states, of the other ranks, as rank 0 has them.

    Any thread may call. A ``place`` is a layer class and the number of a layer in it, or ``STATES``
    and the id of a recurrent layer; *planes* are as in ``contracts.kv_format``, or by number those
    of a recurrent layer.
    ``RanksBroken`` if a rank ended, or does not answer in time.
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
        parts: Mapping[int, Mapping[str, Tensor]],
    ) -> None:
        """Write to each of these ranks its part: planes for slots of a sequence that is being
        imported or received. Later steps see them. A rank that has removed the sequence ignores its
        part."""

    def follow(self, event: HandOver) -> None:
        """Let the other ranks repeat rank 0's change for a hand-over."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """One change of a hand-over of a sequence (``kv.transfer_verbs``), the same on every rank."""

    kind: Literal["receive", "send", "publish", "forget"]
    """``receive``: take room for tokens; ``send``: let no forward or pop contradict what is sent;
    ``publish``: let received tokens count; ``forget``: end it, if it is under way."""
    seq: SeqId
    begin: int = 0
    end: int = 0
    """Of ``receive`` and ``send``: positions ``begin`` to ``end - 1``."""


class PeerAdapters(Protocol):
    """The adapters of the other ranks, as rank 0 loads and unloads them."""

    def load_adapter(self, adapter_id: int, parts: Sequence[Adapter]) -> None:
        """Let each of the others keep its part under this id. Raise the error of one that cannot;
        ``unload_adapter`` then gives back what the others have."""

    def unload_adapter(self, adapter_id: int) -> None:
        """Let the others forget an adapter, if they have it."""


STATES = -1
"""In the place of a layer class: the recurrent layers."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of each layer that one rank holds."""

    rank: int
    size: int

    def part(self, count: int, what: str) -> int:
        """Return the number of heads, or of other units, that each rank has of ``count``;
        ``Unsupported`` if they do not divide."""
        if count % self.size:
            raise self.refusal(f"{count} {what} do not divide by {self.size}")
        return count // self.size

    def part_or_one(self, count: int, what: str) -> int:
        """Return the same where neighbouring ranks may hold the same unit, if there are fewer of
        them than ranks."""
        if count % self.size and self.size % count:
            raise self.refusal(f"{count} {what} neither divide by {self.size} nor divide it")
        return max(1, count // self.size)

    def refusal(self, reason: str) -> Unsupported:
        """Return the error for a model that ranks cannot divide."""
        name = "tensor_parallel_size"
        return Unsupported(f"{name} {self.size}: {reason}", field=name, given=self.size)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks of one model: stages of its blocks, each of which slices divide."""

    slices: int = 1
    stages: int = 1

    @property
    def size(self) -> int:
        return self.slices * self.stages

    def stage(self, rank: int) -> int:
        """Return the stage of a rank; the first ranks are the slices of the first stage."""
        return rank // self.slices

    def share(self, rank: int) -> Share:
        """Return the slice of a rank, among those of its stage."""
        return Share(rank % self.slices, self.slices)

    def __str__(self) -> str:
        ways = (("tensor_parallel_size", self.slices), ("pipeline_parallel_size", self.stages))
        return ", ".join(f"{name} {size}" for name, size in ways if size > 1)


@dataclass(frozen=True, slots=True)
class Stages:
    """The blocks of each stage of a model, as one of them sees them."""

    stage: int
    blocks: Sequence[range]
    """Of each stage."""
    owners: Mapping[int, int]
    """By layer id the stage that holds it."""
    width: int
    """Columns of the rows that go from stage to stage."""
    dtype: torch.dtype
    """Dtype of these rows."""

    @property
    def own(self) -> range:
        return self.blocks[self.stage]

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == len(self.blocks) - 1

    @property
    def num_blocks(self) -> int:
        return self.blocks[-1].stop
