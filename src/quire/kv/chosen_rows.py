"""Which of a forward's new tokens run, and which rows of the others each layer was given.

Letters: T new tokens of the forward; B entries.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.kv.parts import StateParts
from quire.kv.plans import Batch

Rows = NDArray[np.int64]


class ChosenRows:
    """The rows of one forward that run: all of them until ``choose`` is called."""

    def __init__(self, starts: Rows) -> None:
        self._starts = starts
        """``[B + 1]``"""
        self.rows: Rows | None = None
        """Ascending; None: all run."""
        self._given: dict[int, NDArray[np.bool_]] = {}
        """By layer ``[T]``: the rows that its caller wrote."""

    def check(self, rows: Rows) -> None:
        """Raise ``InvalidArgument`` unless these are ascending rows of the forward."""
        total = int(self._starts[-1])
        ascend = rows.ndim == 1 and rows.dtype == np.int64 and bool((np.diff(rows, prepend=-1) > 0).all())
        if not ascend or (rows.size and rows[-1] >= total):
            raise InvalidArgument(field="rows", given=rows, allowed=f"ascending int64 indices of 0..{total - 1}")

    def choose(self, rows: Rows) -> bool:
        """Let only these rows run; return whether they differ from before. ``InvalidArgument``
        unless they are some of those that run, at least one of each entry."""
        self.check(rows)
        if self.rows is not None and not np.isin(rows, self.rows, assume_unique=True).all():
            raise InvalidArgument(field="rows", given=rows, allowed="a part of the rows that run")
        bare = np.flatnonzero(np.diff(np.searchsorted(rows, self._starts)) == 0)
        if bare.size:
            raise InvalidArgument(
                field="rows", given=rows, allowed=f"at least one row of each entry; entries {bare.tolist()} have none"
            )
        before = int(self._starts[-1]) if self.rows is None else self.rows.size
        if rows.size == before:
            return False
        self.rows = rows.copy()
        return True

    def give(self, layer_id: int, rows: Rows) -> None:
        """Record the layer's new rows."""
        self._given.setdefault(layer_id, np.zeros(int(self._starts[-1]), dtype=np.bool_))[rows] = True

    def given(self, layer_id: int) -> NDArray[np.bool_]:
        """Return a mask of the rows given to the layer, bool ``[T]``."""
        return self._given.get(layer_id, np.zeros(int(self._starts[-1]), dtype=np.bool_))

    def rollback(self, layer_id: int, rows: Rows) -> None:
        """Record rows as overwritten by others."""
        if layer_id in self._given:
            self._given[layer_id][rows] = False

    def require_given(self, layer_id: int) -> None:
        """Raise ``FailedPrecondition`` if the layer lacks some of the rows that do not run."""
        if self.rows is None:
            return
        there = self.given(layer_id).copy()
        there[self.rows] = True
        lacking = np.flatnonzero(~there)
        if lacking.size:
            raise FailedPrecondition(
                f"layer {layer_id} lacks {lacking.size} rows that were left out, the first of which is {lacking[0]}; call write_rows"
            )

    def require_all(self, what: str) -> None:
        """Raise ``Unsupported`` if some rows do not run."""
        if self.rows is not None:
            raise Unsupported(
                f"{what} in a forward of which only some rows go on: they are of all rows; leave narrow out"
            )


def narrow_refusal(state: StateParts, batch: Batch) -> str:
    """Return the reason against leaving out rows of this forward; "" if there is none."""
    if any(tree is not None for tree in batch.trees):
        return "an entry adds nodes of a token tree, whose branches share positions"
    if state.recurrent is not None:
        return "recurrent layers need every token"
    if state.encoders is not None:
        return "cross layers are planned for all rows"
    if any(spec.rope_mode == "inline" for spec in state.paged.specs.values()):
        return "keys of some layers are stored raw and rotated when they are read"
    return ""
