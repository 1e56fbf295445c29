"""A sequence: its length, page tables, window and tree; limits of ids and of integers. No torch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from quire.base.errors import InvalidArgument
from quire.base.types import SeqId
from quire.kv.pages import PageTable
from quire.kv.trees import Tree
from quire.kv.windows import Hole, Window


@dataclass(slots=True)
class Sequence:
    """One sequence: its committed length and one page table per layer class."""

    length: int
    tables: list[PageTable]
    holes: list[Hole]
    """Per class: what is held no longer."""
    tree: Tree | None = None
    """Uncommitted nodes; None: there are none."""
    window: Window | None = None
    slid: bool = False
    """Whether a forward was published after the window was set: from then on ``evicted`` counts."""
    cut: bool = False
    """Whether the window has evicted pages that the layers' own windows would have kept."""
    reserved: int | None = None
    """Tokens that an import will publish, whose pages it holds; None: an ordinary sequence."""
    loading: bool = False
    """Whether the tokens of an import count already, though it has not ended."""
    receiving: bool = False
    """Whether later tokens come from another state (``reception``)."""
    stale_tail: bool = False
    """Whether old values may follow the last row in its page (pop, fork, split, import)."""

    @property
    def nodes(self) -> int:
        return 0 if self.tree is None else self.tree.size

    @property
    def stored(self) -> int:
        """Addresses in use: committed tokens and uncommitted nodes."""
        return self.length + self.nodes

    @property
    def evicted(self) -> int:
        """Committed tokens between the sink and the window."""
        return max(0, self.length - self.window.size) if self.window and self.slid else 0


def sink_of(sequence: Sequence) -> int:
    """Return the number of tokens that the sequence's window keeps at the beginning."""
    return sequence.window.sink if sequence.window else 0


def require_different(seq_ids: Seq[SeqId], fault: str) -> None:
    """Raise ``InvalidArgument`` if a sequence is named twice."""
    if len(set(seq_ids)) != len(seq_ids):
        twice = next(seq for seq in seq_ids if list(seq_ids).count(seq) > 1)
        raise InvalidArgument(f"{fault.format(twice)}; give each sequence once")


def check_integer(value: int, what: str, least: int) -> int:
    """Return ``value``; ``InvalidArgument`` if it is below ``least``."""
    if value < least:
        raise InvalidArgument(f"{what} {value}; at least {least} is needed")
    return value


def check_id(seq_id: SeqId) -> None:
    """Raise ``InvalidArgument`` unless ``seq_id`` is an int64."""
    if not -(2**63) <= seq_id < 2**63:
        raise InvalidArgument(f"sequence id {seq_id!r} is not an integer of 64 bits")
