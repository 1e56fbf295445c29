"""An open forward of the naive KV state: its entries, their trees, and what comes out of it.

Letters: T new tokens; Hq heads; Dv head size; n committed length when the forward began. An
*address* is a position, or the committed length plus the index of a tree node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .oracle_pages import Pages, Table
from .oracle_values import Exact, Row
from .oracle_windows import Part, Window

Scope = Literal["past", "new", "all"]


@dataclass
class Entry:
    """One entry of an open forward."""

    seq_id: int
    n: int
    old: int
    """Addresses in use before this forward: committed tokens and uncommitted nodes."""
    count: int
    parents: list[int] | None
    """Of all nodes of the sequence, old ones first; None: ordinary tokens."""
    window: Window | None
    start: int
    """Row of its first new token."""

    @property
    def end(self) -> int:
        return self.old + self.count

    def position(self, address: int) -> int:
        if address < self.n or self.parents is None:
            return address
        depth, node = 0, self.parents[address - self.n]
        while node != -1:
            depth, node = depth + 1, self.parents[node]
        return self.n + depth

    def precedes(self, key: int, query: int) -> bool:
        """Whether a query sees a key by order alone: committed tokens, ancestors and itself."""
        if key < self.n:
            return True
        if self.parents is None:
            return key <= query
        node = query - self.n
        while node != -1:
            if node == key - self.n:
                return True
            node = self.parents[node]
        return False


@dataclass
class ModelForward:
    entries: list[Entry]
    before: tuple[dict[int, list[Table]], list[Pages]]
    """Page tables and holders as an abort leaves them: without the pages that had left every
    window.
    """
    written: dict[int, list[list[Row]]] = field(default_factory=dict)
    """By layer, by entry: the new rows."""
    views: dict[tuple[int, Scope], list[list[tuple[int, Part]]]] = field(default_factory=dict)
    """By class and scope, by new token: the keys that it sees and how."""

    @property
    def ids(self) -> list[int]:
        return [entry.seq_id for entry in self.entries]

    @property
    def counts(self) -> list[int]:
        return [entry.count for entry in self.entries]

    @property
    def tokens(self) -> int:
        return sum(self.counts)


@dataclass
class States:
    """Exact attention states of the new tokens, and how far right ones may be from them; infinitely
    far where a row of the entry is not finite, for then anything may come out.
    """

    out: Tensor
    """``[T, Hq, Dv]``"""
    lse: Tensor
    """``[T, Hq]``"""
    out_bound: Tensor
    """``[T]``"""
    lse_bound: Tensor

    @classmethod
    def of(cls, found: Sequence[Exact | None], heads: int, value_dim: int) -> States:
        """None: a query for which anything may come out."""
        wild = Exact(np.zeros((heads, value_dim)), np.zeros(heads), math.inf, math.inf)
        rows = [wild if one is None else one for one in found]
        return cls(
            torch.from_numpy(np.array([one.out for one in rows]).reshape(-1, heads, value_dim)),
            torch.from_numpy(np.array([one.lse for one in rows]).reshape(-1, heads)),
            torch.tensor([one.out_bound for one in rows], dtype=torch.float64),
            torch.tensor([one.lse_bound for one in rows], dtype=torch.float64),
        )

    def check(self, out: Tensor, lse: Tensor | None = None) -> None:
        """Assert that the first T rows of a result are right."""
        tokens = len(self.out)
        error = (out[:tokens].double() - self.out).abs().amax((1, 2))
        good = (error <= self.out_bound) | self.out_bound.isinf()
        assert good.all(), f"error {error.tolist()}, bound {self.out_bound.tolist()}"
        if lse is None:
            return
        assert lse.dtype == torch.float32
        given = lse[:tokens].double()
        error = torch.where(given == self.lse, 0.0, (given - self.lse).abs()).amax(1)
        good = (error <= self.lse_bound) | self.lse_bound.isinf()
        assert good.all(), f"lse: error {error.tolist()}, bound {self.lse_bound.tolist()}"


def addresses(entry: Entry, scope: Scope) -> range:
    return range(entry.old if scope == "new" else 0, entry.old if scope == "past" else entry.end)


def parts_of(views: list[list[tuple[int, Part]]]) -> Iterator[list[int]]:
    """Addresses alone, for tests that look at what is seen."""
    for view in views:
        yield sorted(address for address, _ in view)
