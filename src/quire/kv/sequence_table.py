"""Changes of sequences over pages: edits, copy on write, forwards, imports. No torch.

Everything is checked before anything changes: ``plan_forward`` computes the whole need for pages,
and ``open_forward`` cannot fail after it. The caller makes the returned copies (``SlotCopy``).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from quire.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from quire.kv.forward_need import (
    ClassNeed,
    ForwardNeed,
    OpenForward,
    Sequence,
    SlotCopy,
    SlotRange,
    pages_for,
    slots_of,
)
from quire.kv.pages import NULL_PAGE, PageTable
from quire.kv.sequences import SequenceBooks, check_id, sink_of
from quire.kv.windows import NO_HOLE, Hole, Window, floors
from quire.types import SeqId


class SequenceTable(SequenceBooks):
    """All sequences of a KV state, and what changes them."""

    # -- edits -------------------------------------------------------------------------------------

    def add(self, seq_id: SeqId) -> Sequence:
        check_id(seq_id)
        if seq_id in self._sequences:
            raise InvalidArgument(f"sequence {seq_id} exists already; a new id is needed")
        self.require_closed("add_sequence")
        sequence = Sequence(0, [PageTable() for _ in self.pools], [NO_HOLE] * len(self.pools))
        self._sequences[int(seq_id)] = sequence
        return sequence

    def remove(self, seq_id: SeqId) -> None:
        sequence = self.get(seq_id)
        self.require_closed("remove_sequence")
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.release(table.pages)
        del self._sequences[seq_id]

    def clear(self) -> None:
        self._sequences.clear()
        self.forward = None
        for pool in self.pools:
            pool.clear()

    def fork(self, parent_id: SeqId, child_id: SeqId, pos: int) -> None:
        """Share all pages of the first ``pos`` tokens, a partly filled one too, with a child."""
        parent, length = self.check_fork(parent_id, child_id, pos)
        size = pages_for(length, self.page_size)
        tables = [table.fork(size) for table in parent.tables]
        for pool, table in zip(self.pools, tables, strict=True):
            pool.share(table.pages)
        child = Sequence(
            length,
            tables,
            [hole.clipped(length, sink_of(parent)) for hole in parent.holes],
            window=parent.window,
            slid=parent.slid,
            cut=parent.cut,
            stale_tail=True,
        )
        self._recount_cut(child)
        self._sequences[int(child_id)] = child

    def pop(self, seq_id: SeqId, count: int) -> None:
        sequence = self.check_pop(seq_id, count)
        sequence.length -= count
        sequence.stale_tail |= count > 0
        self._trim(sequence)

    def set_window(self, seq_id: SeqId, window: Window | None) -> None:
        """Set, replace or drop the window of a sequence of which it has evicted nothing."""
        verb = "enable_sliding_window_for_seq"
        sequence = self.require_settled(seq_id, verb)
        if sequence.evicted or sequence.cut:
            raise FailedPrecondition(
                f"{verb}: the window of sequence {seq_id} has evicted tokens already; it can be changed before that, or "
                f"on a fork at a position of at most {sequence.window.sink if sequence.window else 0}"
            )
        sink = window.sink if window else 0
        for index, hole in enumerate(sequence.holes):
            # A layer's own window may have made a hole. From now on it is counted in two parts.
            gone = max(hole.window, hole.sink)
            sequence.holes[index] = Hole(min(gone, sink), gone if gone > sink else 0) if gone else NO_HOLE
        sequence.window, sequence.slid = window, False

    def commit(self, kept: Seq[tuple[Sequence, list[int]]]) -> list[list[SlotCopy]]:
        """Keep the paths of ``check_commit``, forget all other nodes. Returns the copies of each
        class, to be made (all reads before all writes) before anything else happens."""
        copies: list[list[SlotCopy]] = [[] for _ in self.pools]
        for sequence, path in kept:
            base = sequence.length
            for index, table in enumerate(sequence.tables):
                moves = [(node, place) for place, node in enumerate(path) if node != place]
                if moves:
                    slots = slots_of(table.pages, base, sequence.stored, self.page_size)
                    copies[index] += [SlotCopy(int(slots[node]), int(slots[place]), 1) for node, place in moves]
            sequence.length += len(path)
            sequence.tree = None
            sequence.stale_tail = True
            self._trim(sequence)
        return copies

    def _trim(self, sequence: Sequence) -> None:
        """Release the pages behind the last row."""
        size = pages_for(sequence.stored, self.page_size)
        for index, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
            if table.size > size:
                pool.release(table.truncate(size))
            if sequence.holes[index] is not NO_HOLE:
                sequence.holes[index] = sequence.holes[index].clipped(sequence.length, sink_of(sequence))
        self._recount_cut(sequence)

    def _recount_cut(self, sequence: Sequence) -> None:
        """Determine, after going back, whether a class lacks what its own window alone would keep
        here. A sequence cut back into its sink has lost nothing. One with a narrower window than a
        layer's may have gone to where only the narrower one has all it needs."""
        sink, sequence.cut = sink_of(sequence), False
        for hole, layer_window in zip(sequence.holes, self.layer_windows, strict=True):
            gone = hole.window if hole.window > sink else hole.sink
            sequence.cut |= gone > (0 if layer_window is None else max(0, sequence.length + 1 - layer_window))

    # -- the bracket -------------------------------------------------------------------------------

    def open_forward(self, need: ForwardNeed) -> OpenForward:
        """Let go of what left its window, take the pages. ``FailedPrecondition`` and
        ``ResourceExhausted`` before any change; nothing can fail after that."""
        self.require_closed("begin_forward")
        for part, pool, window in zip(need.classes, self.pools, self.layer_windows, strict=True):
            if part.pages > pool.num_free + part.freed:
                of = (
                    ""
                    if len(self.pools) == 1
                    else f" for layers {'of full attention' if window is None else f'with window {window}'}"
                )
                raise ResourceExhausted(
                    f"begin_forward: {part.pages} pages of {self.page_size} tokens{of} are needed and "
                    f"{pool.num_free + part.freed} of {pool.num_pages} are free; remove sequences or give fewer tokens"
                )
        sequences = [self._sequences[seq_id] for seq_id in need.seq_ids]
        opened = OpenForward(need)
        for index, (part, pool) in enumerate(zip(need.classes, self.pools, strict=True)):
            self._leave(index, part, sequences)
            copies: list[SlotCopy] = []
            if part.pages:
                taken = pool.take(part.pages)
                for split, page in zip(part.splits, taken[: len(part.splits)].tolist(), strict=True):
                    sequences[split.entry].tables[index].replace(split.index, page)
                    copies.append(SlotCopy(split.page * self.page_size, page * self.page_size, split.valid))
                if part.splits:
                    # One by one: a page may be released by several entries of this forward.
                    for split in part.splits:
                        pool.release(np.array([split.page], dtype=np.int32))
                    self.num_splits += len(part.splits)
                begin = len(part.splits)
                for sequence, count in zip(sequences, part.fresh, strict=True):
                    if count:
                        sequence.tables[index].append(taken[begin : begin + count])
                        begin += count
            opened.copies.append(copies)
            opened.blanks.append(self._blanks(index, part, need, sequences))
        for sequence in sequences:
            sequence.stale_tail = False
        self.forward = opened
        return opened

    def _leave(self, index: int, part: ClassNeed, sequences: Seq[Sequence]) -> None:
        """Replace the pages that left their window by null pages."""
        pool, size = self.pools[index], self.page_size
        for one in part.leaving:
            sequence = sequences[one.entry]
            table, hole = sequence.tables[index], sequence.holes[index]
            for leaving in (one.sink, one.window):
                if not leaving:
                    continue
                pool.release(table.void(leaving))
                stop = leaving.stop * size
                # A page of the sink may hold rows behind it, too.
                behind = leaving is one.window or stop > sink_of(sequence)
                hole = Hole(
                    hole.sink if leaving is one.window else stop, max(hole.window, stop) if behind else hole.window
                )
                sequence.cut |= behind and stop > one.layer_floor
            sequence.holes[index] = hole

    def _blanks(self, index: int, part: ClassNeed, need: ForwardNeed, sequences: Seq[Sequence]) -> list[SlotRange]:
        """Return the rows of last pages that may hold anything and are read through a mask. These
        are the rows behind what is stored in an old last page, also where new rows will lie (a verb
        may read the page before they are written), and behind the new rows in a fresh page."""
        size = self.page_size
        split = {found.entry for found in part.splits}
        blanks: list[SlotRange] = []
        for entry, sequence in enumerate(sequences):
            table, stored = sequence.tables[index], need.stored[entry]
            first, used = stored % size, (stored + need.counts[entry]) % size
            if first and (entry in split or sequence.stale_tail):
                blanks.append(SlotRange(table.page(stored // size) * size + first, size - first))
            if used and part.fresh[entry]:
                blanks.append(SlotRange(table.page(table.size - 1) * size + used, size - used))
        return blanks

    def publish(self) -> None:
        """Make the new tokens count and the new nodes pending."""
        need = self._require_open("end_forward").need
        for seq_id, count, tree in zip(need.seq_ids, need.counts, need.trees, strict=True):
            sequence = self._sequences[seq_id]
            sequence.slid |= sequence.window is not None
            if tree is None:
                sequence.length += count
            else:
                sequence.tree = tree
        self.forward = None

    def abort(self) -> None:
        """Restore pages, tables and shared pages; what left every window stays gone."""
        opened = self._require_open("abort_forward")
        sequences = [self._sequences[seq_id] for seq_id in opened.need.seq_ids]
        for index, (part, pool) in enumerate(zip(opened.need.classes, self.pools, strict=True)):
            for sequence in sequences:
                table = sequence.tables[index]
                size = pages_for(sequence.stored, self.page_size)
                if table.size > size:
                    pool.release(table.truncate(size))
            for split in part.splits:
                table = sequences[split.entry].tables[index]
                pool.release(table.pages[split.index : split.index + 1])
                table.replace(split.index, split.page)
                pool.share(np.array([split.page], dtype=np.int32))
            self.num_splits -= len(part.splits)
        for sequence in sequences:
            sequence.stale_tail = True
        self.forward = None

    def _require_open(self, verb: str) -> OpenForward:
        if self.forward is None:
            raise FailedPrecondition(f"{verb}: no forward is open; call begin_forward first")
        return self.forward

    # -- rows that exist already -------------------------------------------------------------------

    def own_pages(self, seq_id: SeqId, start: int, stop: int, classes: Seq[int]) -> list[list[SlotCopy]]:
        """Make the pages of held rows ``start..stop - 1`` the sequence's own in these classes.

        For rows that will be overwritten. Returns the copies of each class: all valid rows of a
        page, since its other rows stay. ``ResourceExhausted`` before any change.
        """
        sequence = self.get(seq_id)
        size = self.page_size
        copies: list[list[SlotCopy]] = [[] for _ in self.pools]
        if stop <= start:
            return copies
        first, last = start // size, pages_for(stop, size)
        shared: list[NDArray[np.intp]] = []
        for index in classes:
            pool, table = self.pools[index], sequence.tables[index]
            which = np.flatnonzero(pool.references[table.pages[first:last]] > 1) + first
            if which.size > pool.num_free:
                raise ResourceExhausted(f"{which.size} shared pages must be split and {pool.num_free} pages are free")
            shared.append(which)
        for index, which in zip(classes, shared, strict=True):
            pool, table = self.pools[index], sequence.tables[index]
            old = table.pages[which].copy()
            new = pool.take(which.size)
            for page, source, target in zip(which.tolist(), old.tolist(), new.tolist(), strict=True):
                valid = min(size, sequence.length - page * size)
                copies[index].append(SlotCopy(source * size, target * size, valid))
                table.replace(page, target)
            pool.release(old)
            self.num_splits += int(which.size)
            # Only valid rows were copied; behind them are old values of a page that changed hands.
            sequence.stale_tail |= which.size > 0
        return copies

    def reserve_import(
        self,
        seq_id: SeqId,
        length: int,
        holes: Seq[Hole],
        window: Window | None,
        *,
        slid: bool,
        parent_id: SeqId | None = None,
        shared: int = 0,
    ) -> None:
        """Add an unpublished sequence with pages for what it holds of ``length`` tokens. Classes
        that keep all tokens share the pages of the parent's first ``shared`` tokens.

        The caller has checked that the id is new, that no forward is open, and what is shared.
        """
        sink = window.sink if window else 0
        wanted = self.import_pages(length, holes, sink, shared)
        for pool, indices in zip(self.pools, wanted, strict=True):
            if indices.size > pool.num_free:
                raise ResourceExhausted(f"prepare_import: needs {indices.size} pages, {pool.num_free} free")
        parent = None if parent_id is None else self.get(parent_id)
        tables: list[PageTable] = []
        for index, (pool, indices, layer_window) in enumerate(zip(self.pools, wanted, self.layer_windows, strict=True)):
            pages = np.full(pages_for(length, self.page_size), NULL_PAGE, dtype=np.int32)
            if parent is not None and layer_window is None:
                before = parent.tables[index].pages[: shared // self.page_size]
                pool.share(before)
                pages[: before.size] = before
            pages[indices] = pool.take(indices.size)
            tables.append(PageTable(pages))
        self._sequences[int(seq_id)] = Sequence(
            0,
            tables,
            list(holes),
            window=window,
            slid=slid,
            cut=window is not None
            and any(
                hole.window > max(sink, floors(length, None, layer).layer)
                for hole, layer in zip(holes, self.layer_windows, strict=True)
            ),
            reserved=length,
            stale_tail=True,
        )

    def publish_import(self, seq_id: SeqId) -> None:
        """Make the reserved tokens count."""
        sequence = self.get(seq_id)
        if sequence.reserved is not None:
            sequence.length, sequence.reserved, sequence.loading = sequence.reserved, None, True

    def finish_import(self, seq_id: SeqId) -> None:
        """Make the sequence an ordinary one, all of whose rows have come."""
        self.publish_import(seq_id)
        self.get(seq_id).loading = False
