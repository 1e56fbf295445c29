"""A recount of a KV state's bookkeeping (section 9 of the contract's rules), for tests. No torch.

Letters: P page size.
"""

from __future__ import annotations

import numpy as np

from quire.errors import QuireError
from quire.kv.forward_need import OpenForward, Sequence, pages_for
from quire.kv.sequences import SequenceBooks
from quire.kv.windows import describe_ranges, visibility
from quire.types import SeqId


def audit(books: SequenceBooks) -> None:
    """Recount everything; ``QuireError`` names the first thing that is broken. Visits all pages."""
    opened = books.forward
    growing = dict(zip(opened.need.seq_ids, opened.need.counts, strict=True)) if opened else {}
    for index, pool in enumerate(books.pools):
        expected = np.zeros(pool.num_pages, dtype=np.int32)
        for seq_id in books.ids:
            sequence = books.get(seq_id)
            table = sequence.tables[index]
            tokens = (sequence.stored if sequence.reserved is None else sequence.reserved) + growing.get(seq_id, 0)
            pages = table.held
            if sequence.reserved is not None and (pool.references[pages] != 1).any():
                raise QuireError(f"sequence {seq_id} is being imported and shares a page")
            if table.size != pages_for(tokens, books.page_size):
                raise QuireError(
                    f"sequence {seq_id} of {tokens} tokens has {table.size} pages instead of {pages_for(tokens, books.page_size)}"
                )
            if np.unique(pages).size != pages.size:
                raise QuireError(f"sequence {seq_id} names a page twice")
            check_null_pages(books, seq_id, sequence, index)
            np.add.at(expected, pages, 1)
        pool.check(expected)
        if opened:
            check_writes(books, opened, index)
    for seq_id in books.ids:
        check_sequence(books, seq_id, books.get(seq_id))


def check_null_pages(books: SequenceBooks, seq_id: SeqId, sequence: Sequence, index: int) -> None:
    """Check that null entries are the pages that hold nothing, and that visible rows are held."""
    size, table = books.page_size, sequence.tables[index]
    length = sequence.length if sequence.reserved is None else sequence.reserved
    rows = np.zeros(table.size * size, bool)
    for part in books.held(seq_id, index):
        rows[part.start : part.stop] = True
    rows[length:] = True
    if ((table.pages < 0) != ~rows.reshape(-1, size).any(1)).any():
        raise QuireError(f"the null pages of sequence {seq_id} are not those of which nothing is held")
    seen = visibility(np.array([length]), length, sequence.window, books.layer_windows[index])
    visible = np.zeros(length, bool)
    visible[int(seen.lows_T[0]) :] = True
    if seen.sinks_T2 is not None:
        visible[seen.sinks_T2[0, 0] : seen.sinks_T2[0, 1]] = True
    if (visible & ~rows[:length]).any():
        raise QuireError(f"sequence {seq_id} lacks positions that its next query sees")


def check_writes(books: SequenceBooks, opened: OpenForward, index: int) -> None:
    """Check that no page that the open forward writes has more than one holder."""
    written = [
        books.get(seq_id).tables[index].pages[stored // books.page_size :]
        for seq_id, stored in zip(opened.need.seq_ids, opened.need.stored, strict=True)
    ]
    pages = np.concatenate(written)
    if (books.pools[index].references[pages] != 1).any() or np.unique(pages).size != pages.size:
        raise QuireError("a page that the open forward writes has more than one holder")


def check_sequence(books: SequenceBooks, seq_id: SeqId, sequence: Sequence) -> None:
    """Check a sequence's tree and window, and that positions 0 and its length are reachable."""
    if sequence.tree is not None and (sequence.tree.size == 0 or sequence.tree.check()):
        raise QuireError(f"the tree of sequence {seq_id}: {sequence.tree.check() or 'no nodes'}")
    window = sequence.window
    if window is not None and not 0 <= window.sink < window.size:
        raise QuireError(f"sequence {seq_id} has window {window.size} with sink {window.sink}")
    if sequence.reserved is None:
        found = books.reachable(sequence)
        if not all(any(position in part for part in found) for position in (0, sequence.length)):
            raise QuireError(f"sequence {seq_id} of length {sequence.length} can reach {describe_ranges(found)} only")
