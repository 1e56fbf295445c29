"""LoRA adapters (arXiv:2106.09685) as values: the content of a file, checked against a model.

An adapter adds low-rank terms to linear maps, ``W + s B A``. It may also bring its own tables for
the embedding and the head. ``quire.adapters.peft`` reads files into ``Adapter`` values;
``quire.adapters.pool`` holds them under ids.

Letters: R rank; I and O input and output features of the updated piece of a linear map; V
vocabulary; E model width; T rows of a forward; S rank rows of all adapters on the device, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LowRankUpdate:
    """The term ``x A^T B^T``, added to ``O`` outputs of one linear map from output ``row`` on. A
    fused map (q, k and v; gate and up) has one update for each part that an adapter changes."""

    linear: str
    """``Linear.name``: the parameter without ``.weight``, as "3.qkv"; "head"; or "embed"."""
    row: int
    a_RI: Tensor
    """``[R, I]``. For the embedding it is ``[R, V]``: column t stands for ``A x`` of token t."""
    b_RO: Tensor
    """``[R, O]``: B transposed, times alpha / r or alpha / sqrt(r) in float32."""

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
    """Equal for adapters with equal results; the name and place of the files have no part in it."""
    updates: tuple[LowRankUpdate, ...] = ()
    """At most one for each pair of linear map and row."""
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    """Whole tables ``[V, E]`` that replace the model's: "embed", "head"."""
    source: str = ""
    """Where the adapter came from, for people."""

    @property
    def rank(self) -> int:
        """Return the largest rank of the updates; 0 if there are only tables."""
        return max((update.rank for update in self.updates), default=0)

    @property
    def nbytes(self) -> int:
        return sum(update.nbytes for update in self.updates) + sum(table.nbytes for table in self.tables.values())


class RankedRows(NamedTuple):
    """Rows of a batch under one adapter, and the place of its rank rows."""

    first: int
    rank: int
    rows: list[int]


class RankPiece(NamedTuple):
    """A and B of one piece of a linear map."""

    a_SI: Tensor
    b_SO: Tensor
    column: int
    """First output of the piece among the outputs of the map."""


class AddProducts(Protocol):
    """The term of one linear map in one forward."""

    def __call__(self, y_TO: Tensor, x_TI: Tensor) -> None:
        """Add ``x A^T B^T`` to the rows of y that are under adapters; leave other rows unchanged.
        Sums are in float32 and rounded once."""


class LowRankKernel(Protocol):
    """Computes the terms of many adapters at once. ``quire.adapters.low_rank`` uses PyTorch."""

    name: str

    def refusal(self, dtype: torch.dtype, device: torch.device) -> str:
        """Return the reason why the kernel cannot run on such tensors; "" if it can."""

    def plan(self, members: Sequence[RankedRows]) -> Any:
        """Return a plan that all maps of a forward share. ``members``: the rows and rank rows of
        the adapters."""

    def bind(self, plan: Any, pieces: Sequence[RankPiece]) -> AddProducts:
        """Return a map's term, valid until the pieces move; A, B in the model's dtype."""
