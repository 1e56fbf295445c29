"""The parts of a KV state: what the layers of one kind keep of sequences."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from quire.base.types import SeqId
from quire.kv.forward_need import ForwardNeed
from quire.kv.sequence_table import SequenceTable
from quire.kv.sequences import Sequence


class Part:
    """What the layers of one kind keep: pages of rows (``paged``), rows of encoders (``encoders``),
    recurrent states (``recurrent``).

    A verb of the state is a loop over its parts. The state checks ids, lengths and the bracket of a
    forward before it changes any of them, so that no part refuses after another has changed. What
    a part does not override does not concern it.
    """

    def clear(self) -> None:
        """Forget all sequences."""

    def add(self, seq_id: SeqId) -> None:
        """Make a sequence of no tokens."""

    def remove(self, seq_id: SeqId) -> None:
        """Forget a sequence."""

    def fork(self, parent_id: SeqId, child_id: SeqId, length: int) -> None:
        """Share the first ``length`` tokens of the parent with a new sequence; copy nothing."""

    def pop(self, seq_id: SeqId, length: int) -> None:
        """Go back to ``length`` tokens."""

    def commit(self, seq_ids: Seq[SeqId], kept: Seq[tuple[Sequence, list[int]]]) -> None:
        """Keep the nodes of these paths as tokens; forget all other nodes."""

    def reserve(self, need: ForwardNeed, checkpoints: Seq[Seq[int]]) -> Any:
        """Return the argument of ``open``; raise an error for an invalid forward. Change
        nothing."""

    def open(self, reserved: Any) -> None:
        """Take the reserved pages or slots. If it raises, nothing has changed."""

    def complete(self) -> None:
        """Write the rows or states that no layer has written, before ``publish``."""

    def publish(self) -> None:
        """Make the new tokens count."""

    def abort(self) -> None:
        """Restore the part as before ``open``."""

    def check(self, sequences: SequenceTable) -> None:
        """Recount the part's pages or slots of these sequences; raise an error for a wrong
        count."""
