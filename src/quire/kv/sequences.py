"""Sequences over pages: lengths, page tables, windows, refusals, needs of forwards. No torch.

This module only looks and checks; ``sequence_table.SequenceTable`` changes the sequences.

Letters: P page size. A *slot* is ``page * P + offset``. An *address* is a position, or the
committed length plus the index of a tree node.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from quire.contracts.pool_verbs import TokenTreeParents
from quire.errors import FailedPrecondition, InvalidArgument, NotFound, QuireError
from quire.kv.forward_need import ForwardNeed, OpenForward, Sequence, SlotRange, class_need, pages_for, slots_of
from quire.kv.pages import PagePool
from quire.kv.trees import NO_TREE, Tree, parents_of_entries
from quire.kv.windows import Hole, Window, describe_ranges, held, intersection, reachable, visibility, window_pages
from quire.types import SeqId


class SequenceBooks:
    """All sequences of a KV state, looked up and checked. ``pools``: one pool per layer class;
    ``layer_windows``: the window of each class (None: all tokens are kept)."""

    def __init__(self, pools: Seq[PagePool], page_size: int, layer_windows: Seq[int | None] = (None,)) -> None:
        self.pools = list(pools)
        self.page_size = page_size
        self.layer_windows = list(layer_windows)
        self._sequences: dict[SeqId, Sequence] = {}
        self.forward: OpenForward | None = None
        self.slack = 0
        """Tokens by which windows let go later than they must."""
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
        pages = self.get(seq_id).tables[index].pages
        parts = [slots_of(pages, part.start, part.stop, self.page_size) for part in rows]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

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
        """Raise ``FailedPrecondition`` for a sequence that is being imported. ``loading``: not for
        one whose tokens count already."""
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

    def require_reachable(self, seq_id: SeqId, sequence: Sequence, position: int, verb: str) -> None:
        """Raise ``FailedPrecondition``, with the reachable positions, for an evicted one."""
        if position == sequence.length:
            return
        found = self.reachable(sequence)
        if not any(position in part for part in found):
            raise FailedPrecondition(
                f"{verb}: position {position} is evicted; reachable: {describe_ranges(found)} of sequence {seq_id}"
            )

    def check_fork(self, parent_id: SeqId, child_id: SeqId, pos: int) -> tuple[Sequence, int]:
        """Return the parent and the child's length; raise every refusal of a fork."""
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

    def check_pop(self, seq_id: SeqId, count: int) -> Sequence:
        """Return the sequence; raise every refusal of a pop."""
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
        return [
            count if type(count) is int and count > 0 else check_integer(count, f"{verb}: append length", 1)
            for count in counts
        ]

    # -- room --------------------------------------------------------------------------------------

    def plan_forward(
        self,
        seq_ids: Seq[SeqId],
        counts: Seq[int],
        parents: TokenTreeParents | None = None,
        *,
        verb: str = "begin_forward",
    ) -> ForwardNeed:
        """Return what a forward needs; check all but the bracket and free pages, for ``verb``.

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
        sequences share; check these as ``plan_forward``. False: that has to be planned."""
        counts = self.check_batch(seq_ids, counts, verb)
        self._growing(seq_ids, verb)
        most = sum([pages_for(count, self.page_size) for count in counts]) + len(counts)  # and each tail is split
        return all(most <= pool.num_free for pool in self.pools)

    def _growing(self, seq_ids: Seq[SeqId], verb: str, nodes: Seq[bool] | None = None) -> list[Sequence]:
        """Return the sequences of a forward; raise what is wrong with them. ``nodes``: which of
        them get nodes of a tree; None: none of them."""
        sequences = [self.get(seq_id) for seq_id in seq_ids]
        for entry, sequence in enumerate(sequences):
            if sequence.reserved is not None:
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
        """Return how many pages ``need`` is short of, over all classes; 0 if there is room. Pages
        that the open forward has taken count as free."""
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
        """Return how many pages of this sequence, over all classes, others hold too."""
        tables = self.get(seq_id).tables
        return sum(int((pool.references[table.held] > 1).sum()) for pool, table in zip(self.pools, tables, strict=True))

    def import_pages(self, length: int, holes: Seq[Hole], sink: int, shared: int = 0) -> list[NDArray[np.int64]]:
        """Return, for each class, the indices in the page table of an import's own pages: those
        with held rows of ``length`` tokens, and the one of the next token. In classes that keep all
        tokens those of the first ``shared`` tokens belong to another sequence."""
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


def sink_of(sequence: Sequence) -> int:
    """Return how many tokens the sequence's window keeps at its beginning."""
    return sequence.window.sink if sequence.window else 0


def require_different(seq_ids: Seq[SeqId], fault: str) -> None:
    """Raise ``InvalidArgument`` if a sequence is named twice."""
    if len(set(seq_ids)) != len(seq_ids):
        twice = next(seq for seq in seq_ids if list(seq_ids).count(seq) > 1)
        raise InvalidArgument(f"{fault.format(twice)}; give each sequence once")


def check_integer(value: int, what: str, least: int) -> int:
    """Return ``value`` as a plain integer; ``InvalidArgument`` if it is none or below ``least``."""
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
    """Raise ``InvalidArgument`` unless ``seq_id`` is an int64."""
    if isinstance(seq_id, bool) or not isinstance(seq_id, (int, np.integer)) or not -(2**63) <= seq_id < 2**63:
        raise InvalidArgument(f"sequence id {seq_id!r} is not an integer of 64 bits")


def slot_index(ranges: Iterable[SlotRange]) -> NDArray[np.int64]:
    """Return all slots of all ranges."""
    parts = [np.arange(part.start, part.start + part.count, dtype=np.int64) for part in ranges]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
