"""The sequences of a KV state over pages: lengths, page tables, windows, trees. No torch.

Everything is checked before anything changes: ``plan_forward`` computes the whole need for pages,
and ``open_forward`` cannot fail after it. The caller makes the returned copies (``SlotCopy``).

Letters: P page size. A *slot* is ``page * P + offset``. An *address* is a position, or the
committed length plus the index of a tree node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import FailedPrecondition, InvalidArgument, NotFound, QuireError, ResourceExhausted
from quire.base.types import SeqId
from quire.contracts.pool_verbs import TokenTreeParents
from quire.kv.forward_need import (
    ClassNeed,
    ForwardNeed,
    OpenForward,
    ReceivedPages,
    SlotCopy,
    SlotRange,
    class_need,
    pages_for,
    slots_in,
    slots_of,
)
from quire.kv.pages import NULL_PAGE, PageIds, PagePool, PageTable
from quire.kv.sequences import Sequence, check_id, check_integer, require_different, sink_of
from quire.kv.trees import NO_TREE, Tree, parents_of_entries
from quire.kv.windows import (
    NO_HOLE,
    Hole,
    Window,
    describe_ranges,
    floors,
    held,
    intersection,
    reachable,
    visibility,
    window_pages,
)


class SequenceTable:
    """All sequences of a KV state: look-up, checks, edits. ``pools``: one pool per layer class;
    ``layer_windows``: the window of each class (None: all tokens are kept)."""

    def __init__(self, pools: Seq[PagePool], page_size: int, layer_windows: Seq[int | None] = (None,)) -> None:
        self.pools = list(pools)
        self.page_size = page_size
        self.layer_windows = list(layer_windows)
        self._sequences: dict[SeqId, Sequence] = {}
        self.forward: OpenForward | None = None
        self.received: dict[SeqId, list[PageIds]] = {}
        """By sequence one page table for each layer class: those that replace the present ones when
        the hand-over ends. Their pages are taken and counted already."""
        self.slack = 0
        """Tokens that windows keep beyond their need, so that a step ahead can be taken back."""
        self.num_splits = 0
        """Copy-on-write splits so far."""

    # -- look-up -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, seq_id: object) -> bool:
        return seq_id in self._sequences

    @property
    def ids(self) -> list[SeqId]:
        return list(self._sequences)

    def get(self, seq_id: SeqId) -> Sequence:
        """Return the sequence; ``NotFound`` for an unknown id."""
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

    def held(self, seq_id: SeqId, index: int) -> list[range]:
        """Return the positions of committed tokens that class ``index`` holds, ascending."""
        sequence = self.get(seq_id)
        length = sequence.length if sequence.reserved is None else sequence.reserved
        return held(length, sink_of(sequence), sequence.holes[index])

    def slots(self, index: int, seq_id: SeqId, rows: Iterable[range]) -> NDArray[np.int64]:
        """Return the slots of these addresses, all held, in class ``index``."""
        return slots_in(self.get(seq_id).tables[index].pages, rows, self.page_size)

    def reachable(self, sequence: Sequence) -> list[range]:
        """Return the positions that a fork or pop may go to, ascending."""
        found = [range(sequence.length + 1)]
        for layer_window, hole in zip(self.layer_windows, sequence.holes, strict=True):
            if hole.window or hole.sink:
                found = intersection(found, reachable(sequence.length, sequence.window, layer_window, hole))
        return found

    # -- refusals ----------------------------------------------------------------------------------

    def require_closed(self, verb: str) -> None:
        """Raise ``FailedPrecondition`` while a forward is open."""
        if self.forward is not None:
            raise FailedPrecondition(f"{verb} while a forward is open; call end_forward or abort_forward first")

    @staticmethod
    def require_committed(seq_id: SeqId, sequence: Sequence, verb: str) -> None:
        """Raise ``FailedPrecondition`` for a sequence with uncommitted nodes."""
        if sequence.tree is not None:
            raise FailedPrecondition(
                f"{verb}: sequence {seq_id} has {sequence.nodes} uncommitted nodes; call commit_accepted_token_tree_nodes first"
            )

    @staticmethod
    def require_ready(seq_id: SeqId, sequence: Sequence, verb: str, *, loading: bool = False) -> None:
        """Raise ``FailedPrecondition`` for a sequence that is being imported or received.
        ``loading``: not for one whose tokens count already."""
        if sequence.receiving:
            raise FailedPrecondition(
                f"{verb}: sequence {seq_id} is being received; call disagg_wait, disagg_cancel or remove_sequence"
            )
        if sequence.reserved is not None or (sequence.loading and not loading):
            raise FailedPrecondition(
                f"{verb}: sequence {seq_id} is being imported; call finish_import or remove_sequence"
            )

    def require_settled(self, seq_id: SeqId, verb: str) -> Sequence:
        """Return the sequence. ``FailedPrecondition`` while a forward is open, and for a sequence
        that is being imported or has uncommitted nodes."""
        sequence = self.get(seq_id)
        self.require_closed(verb)
        self.require_ready(seq_id, sequence, verb)
        self.require_committed(seq_id, sequence, verb)
        return sequence

    def require_reachable(self, seq_id: SeqId, position: int, verb: str) -> None:
        """Raise ``FailedPrecondition``, with the reachable positions, for an evicted one."""
        sequence = self.get(seq_id)
        if position == sequence.length:
            return
        found = self.reachable(sequence)
        if not any(position in part for part in found):
            raise FailedPrecondition(
                f"{verb}: position {position} is evicted; reachable: {describe_ranges(found)} of sequence {seq_id}"
            )

    def check_new(self, seq_id: SeqId, verb: str) -> None:
        """Raise every refusal of a new sequence."""
        check_id(seq_id)
        if seq_id in self._sequences:
            raise InvalidArgument(f"sequence {seq_id} exists already; a new id is needed")
        self.require_closed(verb)

    def check_fork(self, parent_id: SeqId, child_id: SeqId, pos: int) -> int:
        """Return the length of a fork at ``pos``; raise every refusal but that of an evicted
        position."""
        check_id(child_id)
        if child_id in self._sequences:
            raise InvalidArgument(f"fork_sequence: child {child_id} exists already; a new id is needed")
        pos = check_integer(pos, "fork_sequence: position", -1)
        parent = self.get(parent_id)
        if pos > parent.length:
            raise InvalidArgument(
                f"fork_sequence: position {pos} of sequence {parent_id} is outside of -1..{parent.length} (its length)"
            )
        self.require_settled(parent_id, "fork_sequence")
        return parent.length if pos == -1 else pos

    def check_pop(self, seq_id: SeqId, count: int) -> int:
        """Return the length after a pop; raise every refusal but that of an evicted position."""
        count = check_integer(count, "popn: token count", 0)
        sequence = self.get(seq_id)
        if count > sequence.length:
            raise InvalidArgument(
                f"popn: {count} tokens of sequence {seq_id}; 0..{sequence.length} (its length) can be taken back"
            )
        self.require_settled(seq_id, "popn")
        return sequence.length - count

    def check_commit(self, seq_ids: Seq[SeqId], leaves: Seq[int]) -> list[tuple[Sequence, list[int]]]:
        """Return each sequence with the path that stays; raise every refusal of a commit."""
        verb = "commit_accepted_token_tree_nodes"
        if len(seq_ids) != len(leaves):
            raise InvalidArgument(f"{verb}: {len(seq_ids)} sequence ids but {len(leaves)} leaves; give one each")
        require_different(seq_ids, f"{verb}: sequence {{}} is given twice")
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

    @staticmethod
    def check_batch(seq_ids: Seq[SeqId], counts: Seq[int], verb: str) -> list[int]:
        """Return append lengths as plain integers; ``InvalidArgument`` for a malformed batch."""
        if len(seq_ids) != len(counts):
            raise InvalidArgument(
                f"{verb}: {len(seq_ids)} sequence ids but {len(counts)} append lengths; give one each"
            )
        if len(seq_ids) == 0:
            raise InvalidArgument(f"{verb}: the batch is empty; give at least one sequence")
        require_different(seq_ids, f"{verb}: sequence {{}} is in the batch twice")
        return [count if count > 0 else check_integer(count, f"{verb}: append length", 1) for count in counts]

    # -- room --------------------------------------------------------------------------------------

    def plan_forward(
        self,
        seq_ids: Seq[SeqId],
        counts: Seq[int],
        parents: TokenTreeParents | None = None,
        *,
        verb: str = "begin_forward",
    ) -> ForwardNeed:
        """Return the pages needed by a forward; check all but the bracket and free pages, for
        ``verb``.

        Changes nothing. In an open forward the need is that before it. Cost O(entries, new nodes).
        """
        counts = self.check_batch(seq_ids, counts, verb)
        trees: list[Tree | None] = [None] * len(counts)
        if parents is None:
            sequences = self._growing(seq_ids, verb)
        else:
            pending = [self._sequences[seq_id].nodes if seq_id in self._sequences else 0 for seq_id in seq_ids]
            entries = parents_of_entries(parents, counts, pending)
            sequences = self._growing(seq_ids, verb, [entry is not None for entry in entries])
            trees = [
                None if entry is None else (sequence.tree or NO_TREE).grown(entry)
                for sequence, entry in zip(sequences, entries, strict=True)
            ]
        split = [self._split_tails(index) for index in range(len(self.pools))]
        stored = tuple([sequence.stored for sequence in sequences])
        return ForwardNeed(
            tuple(seq_ids),
            tuple([sequence.length for sequence in sequences]),
            stored,
            tuple(counts),
            tuple(trees),
            tuple([sequence.window for sequence in sequences]),
            [
                class_need(
                    index, pool, self.page_size, window, seq_ids, sequences, stored, counts, split[index], self.slack
                )
                for index, (pool, window) in enumerate(zip(self.pools, self.layer_windows, strict=True))
            ],
        )

    def has_room(self, seq_ids: Seq[SeqId], counts: Seq[int], verb: str) -> bool:
        """Return whether there are so many free pages that ordinary tokens fit whatever their
        sequences share; check these as ``plan_forward``. False: only ``plan_forward`` can tell."""
        counts = self.check_batch(seq_ids, counts, verb)
        self._growing(seq_ids, verb)
        most = sum([pages_for(count, self.page_size) for count in counts]) + len(counts)  # and each tail is split
        return all(most <= pool.num_free for pool in self.pools)

    def _growing(self, seq_ids: Seq[SeqId], verb: str, nodes: Seq[bool] | None = None) -> list[Sequence]:
        """Return the sequences of a forward; raise an error for an invalid one. ``nodes``: which of
        them get nodes of a tree; None: none of them."""
        sequences = [self.get(seq_id) for seq_id in seq_ids]
        for entry, sequence in enumerate(sequences):
            if sequence.reserved is not None or sequence.receiving:
                self.require_ready(seq_ids[entry], sequence, verb, loading=True)
            if sequence.tree is not None and not (nodes and nodes[entry]):
                self.require_committed(seq_ids[entry], sequence, f"{verb} with ordinary tokens")
        return sequences

    def _split_tails(self, index: int) -> dict[SeqId, int]:
        """Return the shared tail pages that the open forward has split, by sequence."""
        if self.forward is None:
            return {}
        need = self.forward.need
        return {need.seq_ids[split.entry]: split.page for split in need.classes[index].splits}

    def shortage(self, need: ForwardNeed) -> int:
        """Return the number of pages missing for ``need``, over all classes; 0 if there is room.
        Pages that the open forward has taken count as free."""
        taken = [part.pages for part in self.forward.need.classes] if self.forward else [0] * len(self.pools)
        return sum(
            max(0, part.pages - part.freed - pool.num_free - own)
            for part, pool, own in zip(need.classes, self.pools, taken, strict=True)
        )

    def shortage_in_steps(self, seq_ids: Seq[SeqId], counts: Seq[int], most: int) -> int:
        """Return an upper bound of the pages, over all classes, that these tokens are short of in
        forwards of at most ``most`` tokens: windows let go of pages in between."""
        need = self.plan_forward(seq_ids, counts, verb="shortage_in_steps")
        sequences = [self._sequences[seq_id] for seq_id in need.seq_ids]
        short = 0
        for index, (part, pool) in enumerate(zip(need.classes, self.pools, strict=True)):
            split = Counter(found.entry for found in part.splits)
            wanted = 0
            for entry, sequence in enumerate(sequences):
                growth = part.fresh[entry] + split[entry]
                bound = window_pages(sequence.window, self.layer_windows[index], most + self.slack, self.page_size)
                if bound is not None and growth > 0:
                    table = sequence.tables[index].held
                    mine = int((pool.references[table] == 1).sum())
                    growth = min(growth, max(1, bound - mine))
                wanted += growth
            short += max(0, wanted - pool.num_free)
        return short

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

    def pages_held(self, seq_ids: Iterable[SeqId]) -> list[int]:
        """Return the pages of each class that these sequences hold; shared ones count once."""
        tables = [self.get(seq_id).tables for seq_id in seq_ids]
        return [
            int(np.unique(np.concatenate([of_sequence[index].held for of_sequence in tables])).size) if tables else 0
            for index in range(len(self.pools))
        ]

    def pages_at_most(self, length: int, window: Window | None, step: int) -> list[int]:
        """Return the most pages of each class for ``length`` tokens, run ``step`` at a time."""
        whole = pages_for(length, self.page_size)
        most = step + self.slack
        bounds = [window_pages(window, layer_window, most, self.page_size) for layer_window in self.layer_windows]
        return [whole if bound is None else min(whole, bound) for bound in bounds]

    def shared_pages(self, seq_id: SeqId) -> int:
        """Return the number of pages, over all classes, that this sequence shares with others."""
        tables = self.get(seq_id).tables
        return sum(int((pool.references[table.held] > 1).sum()) for pool, table in zip(self.pools, tables, strict=True))

    def import_pages(self, length: int, holes: Seq[Hole], sink: int, shared: int = 0) -> list[NDArray[np.int64]]:
        """Return, for each class, the indices in the page table of an import's own pages: pages
        with held rows of ``length`` tokens, and the page of the next token. In classes that keep
        all tokens, pages of the first ``shared`` tokens belong to another sequence."""
        found: list[NDArray[np.int64]] = []
        for layer_window, hole in zip(self.layer_windows, holes, strict=True):
            kept = held(length, sink, hole)
            if length % self.page_size:
                # The next token goes into the last page, whatever is held of it.
                kept = [*kept, range(length - 1, length)]
            parts = [np.arange(part.start // self.page_size, pages_for(part.stop, self.page_size)) for part in kept]
            pages = np.unique(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)
            found.append(pages[pages >= shared // self.page_size] if layer_window is None else pages)
        return found

    # -- edits -------------------------------------------------------------------------------------

    def add(self, seq_id: SeqId) -> Sequence:
        """Make a sequence (``check_new``) of no tokens."""
        sequence = Sequence(0, [PageTable() for _ in self.pools], [NO_HOLE] * len(self.pools))
        self._sequences[int(seq_id)] = sequence
        return sequence

    def remove(self, seq_id: SeqId) -> None:
        sequence = self._sequences[seq_id]
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.release(table.pages)
        del self._sequences[seq_id]

    def clear(self) -> None:
        self._sequences.clear()
        self.received.clear()
        self.forward = None
        for pool in self.pools:
            pool.clear()

    def fork(self, parent_id: SeqId, child_id: SeqId, length: int) -> None:
        """Share all pages of the first ``length`` tokens, a partly filled one too, with a child;
        see ``check_fork``."""
        parent = self._sequences[parent_id]
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

    def pop(self, seq_id: SeqId, length: int) -> None:
        """Go back to ``length`` tokens; see ``check_pop``."""
        sequence = self._sequences[seq_id]
        sequence.stale_tail |= length < sequence.length
        sequence.length = length
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

    def require_room(self, need: ForwardNeed) -> None:
        """Raise ``ResourceExhausted`` unless there are free pages for a forward."""
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

    def open_forward(self, need: ForwardNeed) -> OpenForward:
        """Let go of what left its window, take the pages (``require_room``). Nothing can fail."""
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
                pool.release(table.evict(leaving))
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

    # -- tokens that come from another state -------------------------------------------------------

    def holes_at(self, sequence: Sequence, length: int) -> list[Hole]:
        """Return, by class, what no query behind ``length`` tokens sees."""
        seen = [floors(length, sequence.window, layer_window) for layer_window in self.layer_windows]
        return [Hole(one.sink, one.window).clipped(length, sink_of(sequence)) for one in seen]

    def reserve_reception(self, seq_id: SeqId, count: int) -> list[ReceivedPages]:
        """Take the pages of a sequence as it will be ``count`` tokens later; the sequence stays as
        it is. The caller has checked it. ``ResourceExhausted`` before any change."""
        verb, sequence, size = "disagg_prepare_recv", self.get(seq_id), self.page_size
        length, sink = sequence.length + count, sink_of(sequence)
        holes = self.holes_at(sequence, length)
        wanted = self.import_pages(length, holes, sink)
        whole = sequence.length // size
        fresh = [pages[pages >= whole] for pages in wanted]
        for pool, own in zip(self.pools, fresh, strict=True):
            if own.size > pool.num_free:
                raise ResourceExhausted(f"{verb}: needs {own.size} pages, {pool.num_free} free")
        found: list[ReceivedPages] = []
        for pool, table, hole, all_pages, own in zip(self.pools, sequence.tables, holes, wanted, fresh, strict=True):
            pages = np.full(pages_for(length, size), NULL_PAGE, dtype=np.int32)
            shared = all_pages[all_pages < whole]
            pages[shared] = table.pages[shared]
            pool.share(pages[shared])
            pages[own] = pool.take(own.size)
            kept = np.zeros(pages.size * size, dtype=np.bool_)
            kept[length:] = True
            for part in held(length, sink, hole):
                kept[part.start : part.stop] = True
            slots = np.where(kept[sequence.length : length], slots_of(pages, sequence.length, length, size), -1)
            # The rest of a page held in part is never written, and a kernel reads whole pages.
            partly = own[~kept.reshape(-1, size)[own].all(1)]
            blanks = [SlotRange(int(page) * size, size) for page in pages[partly]]
            copies: list[SlotCopy] = []
            if (valid := sequence.length % size) and whole in own and table.page(whole) >= 0:
                copies = [SlotCopy(table.page(whole) * size, int(pages[whole]) * size, valid)]
            found.append(ReceivedPages(pages, slots, blanks, copies))
        self.received[int(seq_id)] = [one.pages for one in found]
        sequence.receiving = True
        return found

    def give_back_reception(self, seq_id: SeqId) -> None:
        """Release what was taken for a sequence, which is an ordinary one again."""
        for pool, pages in zip(self.pools, self.received.pop(seq_id), strict=True):
            pool.release(pages)
        self.get(seq_id).receiving = False

    def publish_reception(self, seq_id: SeqId, length: int) -> None:
        """Make the tokens that have come count."""
        sequence = self.get(seq_id)
        sequence.holes = self.holes_at(sequence, length)
        for index, (pool, pages) in enumerate(zip(self.pools, self.received.pop(seq_id), strict=True)):
            pool.release(sequence.tables[index].pages)
            sequence.tables[index] = PageTable(pages)
        sequence.length, sequence.stale_tail, sequence.receiving = length, True, False
        sequence.slid |= sequence.window is not None
        self._recount_cut(sequence)

    # -- for tests ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Recount everything; ``QuireError`` names the first broken thing. Visits all pages."""
        opened = self.forward
        growing = dict(zip(opened.need.seq_ids, opened.need.counts, strict=True)) if opened else {}
        for index, pool in enumerate(self.pools):
            expected = np.zeros(pool.num_pages, dtype=np.int32)
            for seq_id in self.ids:
                sequence = self.get(seq_id)
                table = sequence.tables[index]
                tokens = (sequence.stored if sequence.reserved is None else sequence.reserved) + growing.get(seq_id, 0)
                pages = table.held
                if table.size != pages_for(tokens, self.page_size):
                    raise QuireError(
                        f"sequence {seq_id} of {tokens} tokens has {table.size} pages instead of {pages_for(tokens, self.page_size)}"
                    )
                if np.unique(pages).size != pages.size:
                    raise QuireError(f"sequence {seq_id} names a page twice")
                self._check_null_pages(seq_id, sequence, index)
                np.add.at(expected, pages, 1)
            for received in self.received.values():
                np.add.at(expected, received[index][received[index] >= 0], 1)
            pool.check(expected)
            if opened:
                self._check_writes(opened, index)
        for seq_id in self.ids:
            self._check_sequence(seq_id, self.get(seq_id))

    def _check_null_pages(self, seq_id: SeqId, sequence: Sequence, index: int) -> None:
        """Check that null entries are pages that hold nothing, and that visible rows are held."""
        size, table = self.page_size, sequence.tables[index]
        length = sequence.length if sequence.reserved is None else sequence.reserved
        rows = np.zeros(table.size * size, bool)
        for part in self.held(seq_id, index):
            rows[part.start : part.stop] = True
        rows[length:] = True
        if ((table.pages < 0) != ~rows.reshape(-1, size).any(1)).any():
            raise QuireError(f"the null pages of sequence {seq_id} are not those of which nothing is held")
        seen = visibility(np.array([length]), length, sequence.window, self.layer_windows[index])
        visible = np.zeros(length, bool)
        visible[int(seen.lows_T[0]) :] = True
        if seen.sinks_T2 is not None:
            visible[seen.sinks_T2[0, 0] : seen.sinks_T2[0, 1]] = True
        if (visible & ~rows[:length]).any():
            raise QuireError(f"sequence {seq_id} lacks positions that its next query sees")

    def _check_writes(self, opened: OpenForward, index: int) -> None:
        """Check that no page that the open forward writes has more than one holder."""
        written = [
            self.get(seq_id).tables[index].pages[stored // self.page_size :]
            for seq_id, stored in zip(opened.need.seq_ids, opened.need.stored, strict=True)
        ]
        pages = np.concatenate(written)
        if (self.pools[index].references[pages] != 1).any() or np.unique(pages).size != pages.size:
            raise QuireError("a page that the open forward writes has more than one holder")

    def _check_sequence(self, seq_id: SeqId, sequence: Sequence) -> None:
        """Check a sequence's tree and window, and that positions 0 and its length are reachable."""
        if sequence.tree is not None and (sequence.tree.size == 0 or sequence.tree.check()):
            raise QuireError(f"the tree of sequence {seq_id}: {sequence.tree.check() or 'no nodes'}")
        window = sequence.window
        if window is not None and not 0 <= window.sink < window.size:
            raise QuireError(f"sequence {seq_id} has window {window.size} with sink {window.sink}")
        if sequence.reserved is None:
            found = self.reachable(sequence)
            if not all(any(position in part for part in found) for position in (0, sequence.length)):
                raise QuireError(
                    f"sequence {seq_id} of length {sequence.length} can reach {describe_ranges(found)} only"
                )
