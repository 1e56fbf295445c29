"""Low-rank products of a ragged batch: many adapters at once, and only for their rows.

The adapters in use are stored one after the other in the *rank rows* of each piece of a linear map:
an adapter of rank r has r rows of the piece's A and B. The batch is ordered by the first rank row
of its adapters. Neighbours of equal rank then run as one batched product over views of the piece
(grouped LoRA products: Punica, arXiv:2310.18547, and S-LoRA, arXiv:2311.03285). One plan per
forward places the rows for all layers. A given kernel (``contracts.adapters.LowRankKernel``) runs
the short chunks; PyTorch's products run the long ones.

Letters: T rows of a forward, N some of them; S rank rows; G adapters of one product, M rows of
each, R their rank; I input, O output features of a piece; V vocabulary; E model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.contracts.adapters import AddProducts, LowRankKernel, LowRankUpdate, RankedRows, RankPiece

LONG_CHUNK = 32
"""Least number of rows of a chunk that runs as its own products, over views, without copies."""
ROWS_OF_A_CALL = 8
"""Rows of padding that cost less than one more product."""

Index: TypeAlias = slice | Tensor
"""Rows of a batch: a slice if consecutive, else int64."""


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of PyTorch's low-rank products. A and B have it too, unless a kernel wants
    the model's dtype. On the CPU small bfloat16 products take five times as long as float32 ones.
    """
    return torch.float32 if device.type == "cpu" and dtype.itemsize < 4 else dtype


class Share(NamedTuple):
    """The rows of one chunk and the rank rows of its adapter."""

    first: int
    rank: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Product:
    """One batched product: G neighbours of one rank, each with equally many rows."""

    first: int
    """The first rank row."""
    adapters: int
    rank: int
    begin: int
    """The first of its rows among the gathered rows."""
    end: int


@dataclass(frozen=True, slots=True)
class RowSet:
    """Rows of a batch that are processed together."""

    source: Index
    """Rows of x, in the order of the products; padding repeats rows."""
    target: Index
    """Rows of y."""
    kept: Tensor | None
    """int64: indices of the ``target`` rows among the gathered ones; None: all."""
    products: tuple[Product, ...]


def row_index(rows: Sequence[int], device: torch.device) -> Index:
    """Return a slice if the rows are consecutive and ascending, else int64."""
    if all(row == rows[0] + i for i, row in enumerate(rows)):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, dtype=torch.int64, device=device)


def take_rows(x_TI: Tensor, index: Index) -> Tensor:
    """Return ``[N, I]``: a view or a copy."""
    return x_TI[index] if isinstance(index, slice) else x_TI.index_select(0, index)


def plan_parts(shares: Sequence[Share], device: torch.device) -> tuple[RowSet, ...]:
    """Plan PyTorch's work for rows under adapters: each long chunk is a part, all other rows are
    one."""
    short = short_rows(shares)
    return (*long_parts(shares), joint_part(short, device)) if short else long_parts(shares)


def long_parts(shares: Sequence[Share]) -> tuple[RowSet, ...]:
    long = [one for one in shares if one.end - one.begin >= LONG_CHUNK]
    return tuple(
        RowSet(slice(begin, end), slice(begin, end), None, (Product(first, 1, rank, 0, end - begin),))
        for first, rank, begin, end in long
    )


def short_rows(shares: Sequence[Share]) -> list[RankedRows]:
    """Return the rows of the short chunks, by adapter, in the order of their rank rows."""
    short: dict[tuple[int, int], list[int]] = {}
    for first, rank, begin, end in shares:
        if end - begin < LONG_CHUNK:
            short.setdefault((first, rank), []).extend(range(begin, end))
    return [RankedRows(first, rank, rows) for (first, rank), rows in sorted(short.items())]


def joint_part(members: Sequence[RankedRows], device: torch.device) -> RowSet:
    """Make one part of several adapters, given in the order of their rank rows."""
    source: list[int] = []
    target: list[int] = []
    kept: list[int] = []
    products: list[Product] = []
    for run in _runs(members):
        width, begin = max(len(member.rows) for member in run), len(source)
        for member in run:
            target.extend(member.rows)
            kept.extend(range(len(source), len(source) + len(member.rows)))
            source.extend(member.rows + member.rows[:1] * (width - len(member.rows)))
        products.append(Product(run[0].first, len(run), run[0].rank, begin, len(source)))
    padded = len(kept) < len(source)
    return RowSet(
        row_index(source, device),
        row_index(target, device),
        torch.tensor(kept, dtype=torch.int64, device=device) if padded else None,
        tuple(products),
    )


def _runs(members: Sequence[RankedRows]) -> list[list[RankedRows]]:
    """Join neighbours of one rank, unless their padding costs more than a product of their own."""
    runs: list[list[RankedRows]] = []
    padding = width = 0
    for member in members:
        count = len(member.rows)
        if runs:
            last, wider = runs[-1][-1], max(width, count)
            more = padding + (wider - width) * len(runs[-1]) + wider - count
            beside = last.first + last.rank == member.first and last.rank == member.rank
            if beside and more <= ROWS_OF_A_CALL * len(runs[-1]):
                runs[-1].append(member)
                padding, width = more, wider
                continue
        runs.append([member])
        padding, width = 0, count
    return runs


class RowPlans:
    """Rows under any set of adapters for one kind of map (for all rows, or the head)."""

    def __init__(
        self,
        shares: Mapping[int, Sequence[Share]],
        rows: int,
        device: torch.device,
        kernel: LowRankKernel | None = None,
    ) -> None:
        """Take ``shares`` by adapter id, the number of ``rows`` of the forward, and a ``kernel``
        for short chunks."""
        self.rows = rows
        self.used = frozenset(shares)
        self._shares = shares
        self._device = device
        self._kernel = kernel
        self._plans: dict[frozenset[int], tuple[tuple[RowSet, ...], Any]] = {}

    def plan_of(self, adapters: frozenset[int]) -> tuple[tuple[RowSet, ...], Any]:
        """Return the parts for PyTorch and the kernel's plan for the other rows, for adapters of
        one piece."""
        if adapters not in self._plans:
            # By row, not by id: rows that are neighbours stay neighbours.
            shares = sorted((one for adapter in adapters for one in self._shares[adapter]), key=lambda one: one.begin)
            if self._kernel is None:
                self._plans[adapters] = plan_parts(shares, self._device), None
            else:
                short = short_rows(shares)
                self._plans[adapters] = long_parts(shares), self._kernel.plan(short) if short else None
        return self._plans[adapters]

    def work_of(self, adapters: frozenset[int], pieces: Sequence[RankRows]) -> tuple[list[Task], list[AddProducts]]:
        """Return the tasks and kernel calls of a map, for the rows under adapters that change these
        pieces."""
        parts, plan = self.plan_of(adapters)
        tasks = [Task(part, tuple(piece_of(rows, part) for rows in pieces)) for part in parts]
        if plan is None or self._kernel is None:
            return tasks, []
        return tasks, [self._kernel.bind(plan, [RankPiece(rows.a_SI, rows.b_SO, rows.row) for rows in pieces])]

    def index_of(self, adapter: int) -> Index:
        return row_index([row for one in self._shares[adapter] for row in range(one.begin, one.end)], self._device)


class RankRows:
    """A and B of one piece of a linear map, of all its adapters: ``a [S, I]``, ``b [S, O]``."""

    __slots__ = ("a_SI", "b_SO", "row", "updates")

    def __init__(self, row: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> None:
        """Start without rank rows; ``row``: first output of the piece."""
        self.row = row
        self.a_SI = torch.empty(0, inputs, dtype=dtype, device=device)
        self.b_SO = torch.empty(0, outputs, dtype=dtype, device=device)
        self.updates: dict[int, LowRankUpdate] = {}
        """By adapter id: updates of all loaded adapters, on the host."""

    @property
    def capacity(self) -> int:
        return len(self.a_SI)

    @property
    def nbytes(self) -> int:
        return self.a_SI.nbytes + self.b_SO.nbytes

    def enlarged(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Return copies of A and B enlarged to ``capacity`` rank rows."""
        a_SI, b_SO = (old.new_empty(capacity, old.shape[1]) for old in (self.a_SI, self.b_SO))
        a_SI[: self.capacity], b_SO[: self.capacity] = self.a_SI, self.b_SO
        return a_SI, b_SO

    def write(self, adapter_id: int, first: int, rank: int) -> None:
        """Write an adapter's update to ``rank`` rows from ``first`` on, with zeros beyond its own
        rank."""
        update = self.updates[adapter_id]
        last, end = first + update.rank, first + rank
        self.a_SI[first:last].copy_(update.a_RI)
        self.b_SO[first:last].copy_(update.b_RO)
        self.a_SI[last:end].zero_()
        self.b_SO[last:end].zero_()


class PieceFactors(NamedTuple):
    """One piece of a linear map, ready for the products of one part."""

    begin: int
    end: int
    factors: tuple[tuple[Tensor, Tensor], ...]
    """For each product ``[G, I, R]`` and ``[G, R, O]``, views of the rank rows."""


def piece_of(rows: RankRows, part: RowSet) -> PieceFactors:
    """Return views of the rank rows that the products of a part read."""
    factors = []
    for product in part.products:
        last = product.first + product.adapters * product.rank
        a_GRI = rows.a_SI[product.first : last].view(product.adapters, product.rank, -1)
        b_GRO = rows.b_SO[product.first : last].view(product.adapters, product.rank, -1)
        factors.append((a_GRI.transpose(1, 2), b_GRO))
    return PieceFactors(rows.row, rows.row + rows.b_SO.shape[1], tuple(factors))


class Task(NamedTuple):
    """Rows of a part, and the pieces to apply to them."""

    part: RowSet
    pieces: tuple[PieceFactors, ...]


@dataclass(slots=True)
class LinearWork:
    """The work of one linear map in the present forward."""

    rows: int
    """Number of rows of the whole batch."""
    tasks: list[Task] = field(default_factory=list)
    calls: list[AddProducts] = field(default_factory=list)
    """Calls of the kernel."""
    tables: list[tuple[Index, Tensor]] = field(default_factory=list)
    """Rows with their own weight ``[O, I]``."""


class LowRankLinear:
    """The term of one linear map: ``pieces`` by (first output, outputs), ``work`` of this
    forward."""

    __slots__ = ("bias", "dtype", "pieces", "tables", "work")

    def __init__(self, dtype: torch.dtype, bias_O: Tensor | None) -> None:
        """Take the ``dtype`` of the products and the map's bias, which is added to the results of
        tables too."""
        self.dtype = dtype
        self.bias = bias_O
        self.pieces: dict[tuple[int, int], RankRows] = {}
        self.tables: set[int] = set()
        """Ids of adapters with their own weight for the whole map."""
        self.work: LinearWork | None = None

    @property
    def unused(self) -> bool:
        """Return True if no loaded adapter changes the map."""
        return not self.pieces and not self.tables

    @property
    def is_idle(self) -> bool:
        """See ``quire.nn.linear.LowRankTerm``."""
        return self.work is None

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> None:
        """See ``quire.nn.linear.LowRankTerm``. ``InvalidArgument`` for rows of another forward."""
        work = self.work
        if work is None:
            return
        if x_TI.shape[0] != work.rows:
            raise InvalidArgument(f"{x_TI.shape[0]} rows where adapters were told of {work.rows}; run them all at once")
        for index, table_OI in work.tables:
            y_TO[index] = F.linear(take_rows(x_TI, index), table_OI, self.bias)
        for call in work.calls:
            call(y_TO, x_TI)
        for part, pieces in work.tasks:
            self._add(part, pieces, y_TO, x_TI)

    def _add(self, part: RowSet, pieces: tuple[PieceFactors, ...], y_TO: Tensor, x_TI: Tensor) -> None:
        x_NI = take_rows(x_TI, part.source).to(self.dtype)
        y_NO = take_rows(y_TO, part.target)
        for piece in pieces:
            y_NO[:, piece.begin : piece.end].add_(_products(x_NI, part, piece))
        if not isinstance(part.target, slice):
            y_TO.index_copy_(0, part.target, y_NO)


def _products(x_NI: Tensor, part: RowSet, piece: PieceFactors) -> Tensor:
    """Return ``x A^T B^T`` of the rows of a part, in the order of its target."""
    inputs, outputs = x_NI.shape[1], piece.end - piece.begin
    factors = [(a_GIR.to(x_NI.dtype), b_GRO.to(x_NI.dtype)) for a_GIR, b_GRO in piece.factors]
    if len(part.products) == 1:
        (a_GIR, b_GRO), adapters = factors[0], part.products[0].adapters
        sum_NO = torch.bmm(torch.bmm(x_NI.view(adapters, -1, inputs), a_GIR), b_GRO).view(-1, outputs)
    else:
        sum_NO = x_NI.new_empty(x_NI.shape[0], outputs)
        for product, (a_GIR, b_GRO) in zip(part.products, factors, strict=True):
            x_GMI = x_NI[product.begin : product.end].view(product.adapters, -1, inputs)
            out_GMO = sum_NO[product.begin : product.end].view(product.adapters, -1, outputs)
            torch.bmm(torch.bmm(x_GMI, a_GIR), b_GRO, out=out_GMO)
    return sum_NO if part.kept is None else sum_NO.index_select(0, part.kept)


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingChange:
    """The effect of one adapter on embeddings, on the device."""

    table_VE: Tensor | None
    factors: tuple[tuple[int, Tensor, Tensor], ...]
    """First column, ``a [R, V]`` and ``b [R, O]`` in the model's dtype."""


class LowRankEmbedding:
    """The term of the embedding: ids of ``adapters`` that change it, ``work`` of this forward."""

    __slots__ = ("adapters", "dtype", "rows", "work")

    def __init__(self, dtype: torch.dtype) -> None:
        """Take the ``dtype`` of the products."""
        self.dtype = dtype
        self.adapters: set[int] = set()
        self.rows = 0
        self.work: list[tuple[Index, EmbeddingChange]] = []

    def apply_to(self, x_TE: Tensor, tokens_T: Tensor) -> None:
        """See ``nn.embedding.EmbeddingTerm``. ``InvalidArgument`` for rows of another forward."""
        if self.work and tokens_T.shape[0] != self.rows:
            raise InvalidArgument(
                f"{tokens_T.shape[0]} tokens where adapters were told of {self.rows}; embed them at once"
            )
        for index, change in self.work:
            tokens_N = take_rows(tokens_T, index)
            if change.table_VE is not None:
                x_TE[index] = change.table_VE.index_select(0, tokens_N)
                continue
            x_NE = take_rows(x_TE, index)
            for column, a_RV, b_RO in change.factors:
                h_NR = a_RV.index_select(1, tokens_N).t().to(self.dtype)
                x_NE[:, column : column + b_RO.shape[1]].add_(h_NR @ b_RO.to(self.dtype))
            if not isinstance(index, slice):
                x_TE.index_copy_(0, index, x_NE)
