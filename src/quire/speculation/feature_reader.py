"""``FeatureReader``: the Protocol of a proposer that reads the target's hidden states. No torch at
run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from quire.speculation.proposer import Context, Proposer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """What a step has run of a request."""

    context: Context
    start: int
    """The position of its first token."""
    tokens: Sequence[int]
    """Those that ran, drafts included, which may be rejected."""
    features: Sequence[Tensor]
    """By block of ``FeatureReader.layers``, its output for each of them, ``[n, E]``."""


@runtime_checkable
class FeatureReader(Proposer, Protocol):
    """A proposer that reads hidden states of the target."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the target's blocks whose outputs it reads."""

    def ran(self, rows: Sequence[Rows]) -> None:
        """Take in what a step has run of some requests."""
