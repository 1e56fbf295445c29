"""Sequences over pages: lengths, page tables, windows, token trees, copy on write, the bracket of a forward. No torch.

Everything is checked before anything changes: ``plan_forward`` computes the whole need for pages, ``open_forward``
cannot fail after it. The copies to make are returned as ``SlotCopy`` values; the caller moves the bytes.

Letters: P page size; n new tokens of an entry. A *slot* is ``page * P + offset``. An *address* is a position, or the committed
length plus the index of a tree node.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from quire.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from quire.kv.forward_need import (
    ClassNeed,
    ForwardNeed,
    OpenForward,
    Sequence,
    SlotCopy,
    SlotRange,
    class_need,
    pages_for,
    slots_of,
)
from quire.kv.pages import NULL_PAGE, PagePool, PageTable
from quire.kv.trees import NO_TREE, TokenTreeParents, parents_of_entries
from quire.kv.windows import NO_HOLE, Hole, Window, describe_ranges, floors, held, intersection, reachable, window_pages
from quire.types import SeqId


class SequenceTable:
    """All sequences of a KV state. ``pools`` has one pool per layer class, ``layer_windows`` the window of each class
    (None: all tokens are kept)."""

    def __init__(self, pools: Seq[PagePool], page_size: int, layer_windows: Seq[int | None] = (None,)) -> None:
        self.pools = list(pools)
        self.page_size = page_size
        self.layer_windows = list(layer_windows)
        self._sequences: dict[SeqId, Sequence] = {}
        self.forward: OpenForward | None = None
        self.num_splits = 0
        """Copy-on-write splits so far."""

    # -- look-up ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, seq_id: object) -> bool:
        return seq_id in self._sequences

    @property
    def ids(self) -> list[SeqId]:
        return list(self._sequences)

    def get(self, seq_id: SeqId) -> Sequence:
        """The sequence; ``NotFound`` for an unknown id."""
        try:
            return self._sequences[seq_id]
        except KeyError:
            raise NotFound(f"sequence {seq_id!r} does not exist; {self._known()}") from None

    def _known(self) -> str:
        ids = sorted(self._sequences)
        if not ids:
            return "there are no sequences"
        shown = ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")
        return f"existing ids: {shown}"

    def require_closed(self, verb: str) -> None:
        """``FailedPrecondition`` while a forward is open."""
        if self.forward is not None:
            raise FailedPrecondition(f"{verb} while a forward is open; call end_forward or abort_forward first")

    @staticmethod
    def require_committed(seq_id: SeqId, sequence: Sequence, verb: str) -> None:
        """``FailedPrecondition`` for a sequence with uncommitted nodes."""
        if sequence.tree is not None:
            raise FailedPrecondition(
                f"{verb}: sequence {seq_id} has {sequence.nodes} uncommitted nodes; call commit_accepted_token_tree_nodes first"
            )

    @staticmethod
    def require_ready(seq_id: SeqId, sequence: Sequence, verb: str) -> None:
        """``FailedPrecondition`` for a sequence that is being imported."""
        if sequence.reserved is not None:
            raise FailedPrecondition(
                f"{verb}: sequence {seq_id} is being imported; call finish_import or remove_sequence"
            )

    def require_settled(self, seq_id: SeqId, verb: str) -> None:
        """``FailedPrecondition`` while a forward is open, and for a sequence that is being imported or has uncommitted nodes."""
        sequence = self.get(seq_id)
        self.require_closed(verb)
        self.require_ready(seq_id, sequence, verb)
        self.require_committed(seq_id, sequence, verb)

    # -- edits -----------------------------------------------------------------------------------------------

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

    def check_fork(self, parent_id: SeqId, child_id: SeqId, pos: int) -> tuple[Sequence, int]:
        """The parent, and the length of the child; every refusal of a fork, before anything changes."""
        check_id(child_id)
        if child_id in self._sequences:
            raise InvalidArgument(f"fork_sequence: child {child_id} exists already; a new id is needed")
        pos = check_integer(pos, "fork_sequence: position", -1)
        parent = self.get(parent_id)
        if pos > parent.length:
            raise InvalidArgument(
                f"fork_sequence: position {pos} of sequence {parent_id} is outside of -1..{parent.length} (its length)"
            )
        self.require_closed("fork_sequence")
        self.require_ready(parent_id, parent, "fork_sequence")
        self.require_committed(parent_id, parent, "fork_sequence")
        length = parent.length if pos == -1 else pos
        self.require_reachable(parent_id, parent, length, "fork_sequence")
        return parent, length

    def fork(self, parent_id: SeqId, child_id: SeqId, pos: int) -> None:
        """The child shares all pages of the first ``pos`` tokens, a partly filled one too; nothing is copied."""
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

    def check_pop(self, seq_id: SeqId, count: int) -> Sequence:
        """The sequence; every refusal of a pop, before anything changes."""
        count = check_integer(count, "popn: token count", 0)
        sequence = self.get(seq_id)
        if count > sequence.length:
            raise InvalidArgument(
                f"popn: {count} tokens of sequence {seq_id}; 0..{sequence.length} (its length) can be taken back"
            )
        self.require_closed("popn")
        self.require_ready(seq_id, sequence, "popn")
        self.require_committed(seq_id, sequence, "popn")
        self.require_reachable(seq_id, sequence, sequence.length - count, "popn")
        return sequence

    def pop(self, seq_id: SeqId, count: int) -> None:
        sequence = self.check_pop(seq_id, count)
        sequence.length -= count
        sequence.stale_tail |= count > 0
        self._trim(sequence)

    def _trim(self, sequence: Sequence) -> None:
        """Give back the pages behind the last row."""
        size = pages_for(sequence.stored, self.page_size)
        for index, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
            if table.size > size:
                pool.release(table.truncate(size))
            if sequence.holes[index] is not NO_HOLE:
                sequence.holes[index] = sequence.holes[index].clipped(sequence.length, sink_of(sequence))
        self._recount_cut(sequence)

    def _recount_cut(self, sequence: Sequence) -> None:
        """After going back: whether a class lacks what its own window alone would keep here. One cut back into its sink has lost
        nothing; one whose window is narrower than a layer's may have gone to where only the narrower one has all it needs."""
        sink, sequence.cut = sink_of(sequence), False
        for hole, layer_window in zip(sequence.holes, self.layer_windows, strict=True):
            gone = hole.window if hole.window > sink else hole.sink
            sequence.cut |= gone > (0 if layer_window is None else max(0, sequence.length + 1 - layer_window))

    # -- windows ---------------------------------------------------------------------------------------------

    def set_window(self, seq_id: SeqId, window: Window | None) -> None:
        """Set, replace or drop the window of a sequence of which it has evicted nothing."""
        sequence = self.get(seq_id)
        verb = "enable_sliding_window_for_seq"
        self.require_closed(verb)
        self.require_ready(seq_id, sequence, verb)
        self.require_committed(seq_id, sequence, verb)
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

    def reachable(self, sequence: Sequence) -> list[range]:
        """Positions that a fork or pop may go to, ascending."""
        found = [range(sequence.length + 1)]
        for layer_window, hole in zip(self.layer_windows, sequence.holes, strict=True):
            if hole.window or hole.sink:
                found = intersection(found, reachable(sequence.length, sequence.window, layer_window, hole))
        return found

    def require_reachable(self, seq_id: SeqId, sequence: Sequence, position: int, verb: str) -> None:
        """``FailedPrecondition`` for a position that cannot be gone back to, naming those that can."""
        if position == sequence.length:
            return
        found = self.reachable(sequence)
        if not any(position in part for part in found):
            raise FailedPrecondition(
                f"{verb}: position {position} is evicted; reachable: {describe_ranges(found)} of sequence {seq_id}"
            )

    # -- token trees -----------------------------------------------------------------------------------------

    def check_commit(self, seq_ids: Seq[SeqId], leaves: Seq[int]) -> list[tuple[Sequence, list[int]]]:
        """Each sequence with the path that stays; every refusal of a commit, before anything changes."""
        verb = "commit_accepted_token_tree_nodes"
        if len(seq_ids) != len(leaves):
            raise InvalidArgument(f"{verb}: {len(seq_ids)} sequence ids but {len(leaves)} leaves; give one each")
        if len(set(seq_ids)) != len(seq_ids):
            twice = next(seq for seq in seq_ids if list(seq_ids).count(seq) > 1)
            raise InvalidArgument(f"{verb}: sequence {twice} is given twice; give each sequence once")
        indices = [check_integer(leaf, f"{verb}: leaf", -1) for leaf in leaves]
        for seq_id, leaf in zip(seq_ids, indices, strict=True):
            if seq_id in self._sequences and leaf >= (nodes := self._sequences[seq_id].nodes):
                accepted = f"-1..{nodes - 1} can be kept" if nodes else "it has no uncommitted nodes"
                raise InvalidArgument(f"{verb}: leaf {leaf} of sequence {seq_id}; {accepted}")
        sequences = [self.get(seq_id) for seq_id in seq_ids]
        self.require_closed(verb)
        kept: list[tuple[Sequence, list[int]]] = []
        for seq_id, sequence, leaf in zip(seq_ids, sequences, indices, strict=True):
            if sequence.tree is None:
                raise FailedPrecondition(f"{verb}: sequence {seq_id} has no uncommitted nodes")
            kept.append((sequence, [] if leaf < 0 else sequence.tree.path(leaf)))
        return kept

    def commit(self, kept: Seq[tuple[Sequence, list[int]]]) -> list[list[SlotCopy]]:
        """Keep the paths of ``check_commit``, forget all other nodes. Returns the copies of each class, which must be made
        (all reads before all writes) before anything else happens."""
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

    def clear(self) -> None:
        self._sequences.clear()
        self.forward = None
        for pool in self.pools:
            pool.clear()

    # -- the bracket -----------------------------------------------------------------------------------------

    @staticmethod
    def check_batch(seq_ids: Seq[SeqId], counts: Seq[int], verb: str) -> list[int]:
        """``InvalidArgument`` for what is no batch of any state; the append lengths as plain integers."""
        if len(seq_ids) != len(counts):
            raise InvalidArgument(
                f"{verb}: {len(seq_ids)} sequence ids but {len(counts)} append lengths; give one each"
            )
        if len(seq_ids) == 0:
            raise InvalidArgument(f"{verb}: the batch is empty; give at least one sequence")
        if len(set(seq_ids)) != len(seq_ids):
            twice = next(seq for seq in seq_ids if list(seq_ids).count(seq) > 1)
            raise InvalidArgument(f"{verb}: sequence {twice} is in the batch twice; give each sequence once")
        return [check_integer(count, f"{verb}: append length", 1) for count in counts]

    def plan_forward(
        self, seq_ids: Seq[SeqId], counts: Seq[int], parents: TokenTreeParents = None, *, verb: str = "begin_forward"
    ) -> ForwardNeed:
        """Check everything but the bracket and free pages, for ``verb``; change nothing. Cost O(entries and new nodes).

        While a forward is open the need is that before it.
        """
        counts = self.check_batch(seq_ids, counts, verb)
        pending = [self._sequences[seq_id].nodes if seq_id in self._sequences else 0 for seq_id in seq_ids]
        entries = parents_of_entries(parents, counts, pending)
        sequences = [self.get(seq_id) for seq_id in seq_ids]
        for seq_id, sequence, entry in zip(seq_ids, sequences, entries, strict=True):
            self.require_ready(seq_id, sequence, verb)
            if entry is None:
                self.require_committed(seq_id, sequence, f"{verb} with ordinary tokens")
        split = [self._split_tails(index) for index in range(len(self.pools))]
        return ForwardNeed(
            tuple(seq_ids),
            tuple(sequence.length for sequence in sequences),
            tuple(sequence.stored for sequence in sequences),
            tuple(counts),
            tuple(
                None if entry is None else (sequence.tree or NO_TREE).grown(entry)
                for sequence, entry in zip(sequences, entries, strict=True)
            ),
            tuple(sequence.window for sequence in sequences),
            [
                class_need(index, pool, self.page_size, window, seq_ids, sequences, counts, split[index])
                for index, (pool, window) in enumerate(zip(self.pools, self.layer_windows, strict=True))
            ],
        )

    def _split_tails(self, index: int) -> dict[SeqId, int]:
        """The shared tail pages that the open forward has split, by sequence; empty if none is open."""
        if self.forward is None:
            return {}
        need = self.forward.need
        return {need.seq_ids[split.entry]: split.page for split in need.classes[index].splits}

    def shortage(self, need: ForwardNeed) -> int:
        """How many pages ``need`` is short of, over all classes; 0 if there is room. Pages of the open forward count
        as free, as they were before it."""
        taken = [part.pages for part in self.forward.need.classes] if self.forward else [0] * len(self.pools)
        return sum(
            max(0, part.pages - part.freed - pool.num_free - own)
            for part, pool, own in zip(need.classes, self.pools, taken, strict=True)
        )

    def shortage_in_steps(self, seq_ids: Seq[SeqId], counts: Seq[int], most: int) -> int:
        """An upper bound of the pages that these tokens are short of if they come in forwards of ``most`` tokens at most,
        over all classes: a window lets go of pages in between."""
        need = self.plan_forward(seq_ids, counts, verb="shortage_in_steps")
        sequences = [self._sequences[seq_id] for seq_id in need.seq_ids]
        short = 0
        for index, (part, pool) in enumerate(zip(need.classes, self.pools, strict=True)):
            split = Counter(found.entry for found in part.splits)
            wanted = 0
            for entry, sequence in enumerate(sequences):
                growth = part.fresh[entry] + split[entry]
                bound = window_pages(sequence.window, self.layer_windows[index], most, self.page_size)
                if bound is not None and growth > 0:
                    table = sequence.tables[index].held
                    mine = int((pool.references[table] == 1).sum())
                    growth = min(growth, max(1, bound - mine))
                wanted += growth
            short += max(0, wanted - pool.num_free)
        return short

    def open_forward(self, need: ForwardNeed) -> OpenForward:
        """Let go of what left its window, take the pages. ``FailedPrecondition`` and ``ResourceExhausted`` before anything
        changes; nothing can fail after that."""
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
        """Pages that left their window become null pages."""
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
        """Rows of last pages that may hold anything and are read through a mask: behind what is stored in an old last page, also
        where new rows will lie (a verb may read the page before they are written), and behind the new rows in a fresh one."""
        size = self.page_size
        split = {found.entry for found in part.splits}
        blanks: list[SlotRange] = []
        for entry, sequence in enumerate(sequences):
            pages, stored = sequence.tables[index].pages, need.stored[entry]
            first, used = stored % size, (stored + need.counts[entry]) % size
            if first and (entry in split or sequence.stale_tail):
                blanks.append(SlotRange(int(pages[stored // size]) * size + first, size - first))
            if used and part.fresh[entry]:
                blanks.append(SlotRange(int(pages[-1]) * size + used, size - used))
        return blanks

    def publish(self) -> None:
        """The new tokens count from now on, the new nodes are pending."""
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
        """Pages and tables are as before ``open_forward``; split pages are shared again. What had left every window stays
        gone."""
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

    # -- rows that exist already -----------------------------------------------------------------------------

    def own_pages(self, seq_id: SeqId, start: int, stop: int, classes: Seq[int]) -> list[list[SlotCopy]]:
        """Make the pages of rows ``start..stop - 1`` this sequence's own in these classes (before they are overwritten).

        Returns the copies of each class; whole valid pages are copied, since other rows of them stay. All rows are held.
        ``ResourceExhausted`` before anything changes.
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
            # Only valid rows were copied: behind them are the old values of a page that changed hands.
            sequence.stale_tail |= which.size > 0
        return copies

    def held(self, seq_id: SeqId, index: int) -> list[range]:
        """Positions of committed tokens that class ``index`` holds, ascending."""
        sequence = self.get(seq_id)
        length = sequence.length if sequence.reserved is None else sequence.reserved
        return held(length, sink_of(sequence), sequence.holes[index])

    def reserve_import(self, seq_id: SeqId, length: int, holes: Seq[Hole], window: Window | None, slid: bool) -> None:
        """A new sequence with pages for what it holds of ``length`` tokens, that nobody can use until ``finish_import``."""
        check_id(seq_id)
        if seq_id in self._sequences:
            raise InvalidArgument(f"prepare_import: sequence {seq_id} exists already; a new id is needed")
        self.require_closed("prepare_import")
        size = pages_for(length, self.page_size)
        sink = window.sink if window else 0
        wanted: list[NDArray[np.int64]] = []
        for pool, hole in zip(self.pools, holes, strict=True):
            kept = held(length, sink, hole)
            if length % self.page_size:
                # The next token goes into the last page, whatever is held of it.
                kept = [*kept, range(length - 1, length)]
            rows = [np.arange(part.start, part.stop) // self.page_size for part in kept]
            wanted.append(np.unique(np.concatenate(rows)) if rows else np.empty(0, dtype=np.int64))
            if wanted[-1].size > pool.num_free:
                raise ResourceExhausted(f"prepare_import: needs {wanted[-1].size} pages, {pool.num_free} free")
        tables: list[PageTable] = []
        for pool, indices in zip(self.pools, wanted, strict=True):
            pages = np.full(size, NULL_PAGE, dtype=np.int32)
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
        """The reserved tokens count from now on."""
        sequence = self.get(seq_id)
        sequence.length, sequence.reserved = sequence.reserved or 0, None

    def slots(self, index: int, seq_id: SeqId, rows: Iterable[range]) -> NDArray[np.int64]:
        """Slots of these addresses, all held, in class ``index``."""
        pages = self.get(seq_id).tables[index].pages
        parts = [slots_of(pages, part.start, part.stop, self.page_size) for part in rows]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def num_free_without(self, gone: Iterable[SeqId]) -> list[int]:
        """Return the free pages of each class once the sequences of ``gone`` are removed."""
        sequences = [self._sequences[seq_id] for seq_id in gone]
        if not sequences:
            return [pool.num_free for pool in self.pools]
        found = []
        for index, pool in enumerate(self.pools):
            held = [sequence.tables[index].held for sequence in sequences]
            names = np.bincount(np.concatenate(held), minlength=pool.num_pages)
            found.append(pool.num_free + int(((names > 0) & (names == pool.references)).sum()))
        return found

    # -- accounting ------------------------------------------------------------------------------------------

    def pages_held(self, seq_ids: Iterable[SeqId]) -> list[int]:
        """Pages of each class that these sequences hold together; what they share counts once."""
        tables = [self.get(seq_id).tables for seq_id in seq_ids]
        return [
            int(np.unique(np.concatenate([of_sequence[index].held for of_sequence in tables])).size) if tables else 0
            for index in range(len(self.pools))
        ]

    def pages_at_most(self, length: int, window: Window | None, step: int) -> list[int]:
        """Pages of each class that a sequence of ``length`` tokens holds at most while they are run, ``step`` at a time."""
        whole = pages_for(length, self.page_size)
        bounds = [window_pages(window, layer_window, step, self.page_size) for layer_window in self.layer_windows]
        return [whole if bound is None else min(whole, bound) for bound in bounds]

    def shared_pages(self, seq_id: SeqId) -> int:
        """Pages of this sequence, over all classes, that others hold too."""
        tables = self.get(seq_id).tables
        return sum(int((pool.references[table.held] > 1).sum()) for pool, table in zip(self.pools, tables, strict=True))


def sink_of(sequence: Sequence) -> int:
    """Tokens that the sequence's window keeps at its beginning."""
    return sequence.window.sink if sequence.window else 0


def check_integer(value: int, what: str, least: int) -> int:
    """``value`` as a plain integer; ``InvalidArgument`` if it is none or lies below ``least``."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise InvalidArgument(f"{what} {value!r} is not an integer")
    if number < least:
        raise InvalidArgument(f"{what} {number}; at least {least} is needed")
    return number


def check_id(seq_id: SeqId) -> None:
    """``InvalidArgument`` unless ``seq_id`` is an int64."""
    if isinstance(seq_id, bool) or not isinstance(seq_id, (int, np.integer)) or not -(2**63) <= seq_id < 2**63:
        raise InvalidArgument(f"sequence id {seq_id!r} is not an integer of 64 bits")


def slot_index(ranges: Iterable[SlotRange]) -> NDArray[np.int64]:
    """All slots of all ranges."""
    parts = [np.arange(part.start, part.start + part.count, dtype=np.int64) for part in ranges]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
