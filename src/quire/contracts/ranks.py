"""Ranks: processes that hold parts of one model and run the same steps together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


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


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a model that one rank holds."""

    rank: int
    size: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"
