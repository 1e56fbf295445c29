"""LoRA adapters (arXiv:2106.09685) as values: what a file says, checked against a model, before anybody runs it.

An adapter changes linear maps by terms of low rank, ``W + s B A``, and may bring tables of its own for the embedding and
the head. Who reads files makes ``Adapter`` values (``quire.models.peft``); who runs them holds them under ids
(``quire.runner.adapter_pool``).

Letters: R rank; I input, O output features of the piece of a linear map that an update changes; V vocabulary; E model width;
T rows of a forward; S rank rows, those of all adapters on the device, one adapter behind the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LowRankUpdate:
    """What is added to ``O`` outputs of one linear map, from output ``row`` on: ``x A^T B^T``.

    A fused map (the projections of q, k and v; gate and up) has one update for each of the parts that an adapter changes.
    """

    linear: str
    """``Linear.name``: the model's parameter without ``.weight``, as in "3.qkv"; "head"; or "embed" for the table."""
    row: int
    a_RI: Tensor
    """``[R, I]``. Of the embedding ``[R, V]``: a token's column is what its row of the table is multiplied with."""
    b_RO: Tensor
    """``[R, O]``: B transposed, with the adapter's scale (alpha / r, or alpha / sqrt(r)) multiplied in, in float32."""

    @property
    def rank(self) -> int:
        return int(self.a_RI.shape[0])

    @property
    def nbytes(self) -> int:
        return self.a_RI.nbytes + self.b_RO.nbytes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """A whole adapter, on the host, in the model's dtype."""

    fingerprint: str
    """What makes two adapters the same: everything that decides their results, and neither name nor place of the files."""
    updates: tuple[LowRankUpdate, ...] = ()
    """At most one for a linear map and row."""
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    """Whole tables ``[V, E]`` in the place of the model's: "embed", "head"."""
    source: str = ""
    """Where it came from, for people."""

    @property
    def rank(self) -> int:
        """The largest rank of its updates; 0 where it has tables only."""
        return max((update.rank for update in self.updates), default=0)

    @property
    def nbytes(self) -> int:
        return sum(update.nbytes for update in self.updates) + sum(table.nbytes for table in self.tables.values())


class RankedRows(NamedTuple):
    """Rows of a batch under one adapter, and where its rank rows are."""

    first: int
    rank: int
    rows: list[int]


class RankPiece(NamedTuple):
    """A and B of one piece of a linear map."""

    a_SI: Tensor
    b_SO: Tensor
    column: int
    """Of the map's results, the first."""


class AddProducts(Protocol):
    """The term of one linear map in one forward."""

    def __call__(self, y_TO: Tensor, x_TI: Tensor) -> None:
        """Add ``x A^T B^T`` to the rows of y that are under adapters, summed in float32 and rounded once. Other rows stay."""
        ...


class LowRankKernel(Protocol):
    """A way to compute the terms of many adapters at once; ``quire.nn.low_rank`` does it with PyTorch's operations."""

    name: str

    def refusal(self, dtype: torch.dtype, device: torch.device) -> str:
        """Why it does not run on such tensors; empty if it does."""
        ...

    def plan(self, members: Sequence[RankedRows]) -> Any:
        """What all maps of a forward share. Rows and rank rows are there."""
        ...

    def bind(self, plan: Any, pieces: Sequence[RankPiece]) -> AddProducts:
        """The term of one map, good as long as the pieces do not move. A and B are in the model's dtype."""
        ...
