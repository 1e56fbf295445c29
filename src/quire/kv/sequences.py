"""Sequences over pages: lengths, page tables, copy on write, the bracket of a forward. No torch.

Everything is checked before anything changes: ``plan_forward`` computes the whole need for pages, ``open_forward``
cannot fail after it. The copies to make are returned as ``SlotCopy`` values; the caller moves the bytes.

Letters: P page size; n new tokens of an entry. A *slot* is ``page * P + offset``.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.errors import FailedPrecondition, InvalidArgument, NotFound, QuireError, ResourceExhausted
from quire.kv.pages import PageIds, PagePool, PageTable
from quire.types import SeqId


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Copy ``count`` slots from ``source`` on to ``target`` on, in every layer of one class."""

    source: int
    target: int
    count: int


@dataclass(frozen=True, slots=True)
class SlotRange:
    """``count`` slots from ``start`` on, in every layer of one class."""

    start: int
    count: int


@dataclass(slots=True)
class Sequence:
    """One sequence: its committed length and one page table per layer class."""

    length: int
    tables: list[PageTable]
    reserved: int | None = None
    """Tokens that an import will publish, whose pages it holds; None: an ordinary sequence."""
    stale_tail: bool = False
    """Rows behind the length, in the last page, may be somebody's old values (after a pop, fork, split or import)."""


@dataclass(frozen=True, slots=True)
class Split:
    """The shared tail page of entry ``entry``, of which ``valid`` slots go to a page of its own."""

    entry: int
    index: int
    page: int
    valid: int


@dataclass(frozen=True, slots=True)
class ClassNeed:
    """What one layer class needs for a forward."""

    splits: list[Split]
    fresh: list[int]
    """New pages of each entry, without the splits."""

    @property
    def pages(self) -> int:
        return len(self.splits) + sum(self.fresh)


@dataclass(frozen=True, slots=True)
class ForwardNeed:
    """A forward that was checked against the sequences, not yet against the free pages."""

    seq_ids: tuple[SeqId, ...]
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    classes: list[ClassNeed]


@dataclass(slots=True)
class OpenForward:
    """A forward whose pages are taken: what ``publish`` and ``abort`` need."""

    need: ForwardNeed
    copies: list[list[SlotCopy]] = field(default_factory=list)
    """Per class."""
    blanks: list[list[SlotRange]] = field(default_factory=list)
    """Per class: rows of last pages behind the new lengths. They become zero, for a kernel that pads with them
    multiplies them by a weight of 0, and 0 times an old NaN is NaN."""


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold ``tokens`` tokens."""
    return -(-tokens // page_size)


class SequenceTable:
    """All sequences of a KV state. ``pools`` has one pool per layer class."""

    def __init__(self, pools: Seq[PagePool], page_size: int) -> None:
        self.pools = list(pools)
        self.page_size = page_size
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
    def require_ready(seq_id: SeqId, sequence: Sequence, verb: str) -> None:
        """``FailedPrecondition`` for a sequence that is being imported."""
        if sequence.reserved is not None:
            raise FailedPrecondition(
                f"{verb}: sequence {seq_id} is being imported; call finish_import or remove_sequence"
            )

    # -- edits -----------------------------------------------------------------------------------------------

    def add(self, seq_id: SeqId) -> Sequence:
        check_id(seq_id)
        if seq_id in self._sequences:
            raise InvalidArgument(f"sequence {seq_id} exists already; a new id is needed")
        self.require_closed("add_sequence")
        sequence = Sequence(0, [PageTable() for _ in self.pools])
        self._sequences[int(seq_id)] = sequence
        return sequence

    def remove(self, seq_id: SeqId) -> None:
        sequence = self.get(seq_id)
        self.require_closed("remove_sequence")
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.release(table.pages)
        del self._sequences[seq_id]

    def fork(self, parent_id: SeqId, child_id: SeqId, pos: int) -> None:
        """The child shares all pages of the first ``pos`` tokens, a partly filled one too; nothing is copied."""
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
        length = parent.length if pos == -1 else pos
        size = pages_for(length, self.page_size)
        tables = [table.fork(size) for table in parent.tables]
        for pool, table in zip(self.pools, tables, strict=True):
            pool.share(table.pages)
        self._sequences[int(child_id)] = Sequence(length, tables, stale_tail=True)

    def pop(self, seq_id: SeqId, count: int) -> None:
        count = check_integer(count, "popn: token count", 0)
        sequence = self.get(seq_id)
        if count > sequence.length:
            raise InvalidArgument(
                f"popn: {count} tokens of sequence {seq_id}; 0..{sequence.length} (its length) can be taken back"
            )
        self.require_closed("popn")
        self.require_ready(seq_id, sequence, "popn")
        sequence.length -= count
        sequence.stale_tail |= count > 0
        self._trim(sequence)

    def _trim(self, sequence: Sequence) -> None:
        size = pages_for(sequence.length, self.page_size)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            if table.size > size:
                pool.release(table.truncate(size))

    def clear(self) -> None:
        self._sequences.clear()
        self.forward = None
        for pool in self.pools:
            pool.clear()

    # -- the bracket -----------------------------------------------------------------------------------------

    @staticmethod
    def check_batch(seq_ids: Seq[SeqId], counts: Seq[int]) -> list[int]:
        """``InvalidArgument`` for what is no batch of any state; the append lengths as plain integers."""
        if len(seq_ids) != len(counts):
            raise InvalidArgument(
                f"begin_forward: {len(seq_ids)} sequence ids but {len(counts)} append lengths; give one each"
            )
        if len(seq_ids) == 0:
            raise InvalidArgument("begin_forward: the batch is empty; give at least one sequence")
        if len(set(seq_ids)) != len(seq_ids):
            twice = next(seq for seq in seq_ids if list(seq_ids).count(seq) > 1)
            raise InvalidArgument(f"begin_forward: sequence {twice} is in the batch twice; give each sequence once")
        return [check_integer(count, "begin_forward: append length", 1) for count in counts]

    def plan_forward(self, seq_ids: Seq[SeqId], counts: Seq[int]) -> ForwardNeed:
        """Check everything but the bracket and free pages; change nothing. Cost O(entries).

        While a forward is open the need is that before it.
        """
        counts = self.check_batch(seq_ids, counts)
        sequences = [self.get(seq_id) for seq_id in seq_ids]
        for seq_id, sequence in zip(seq_ids, sequences, strict=True):
            self.require_ready(seq_id, sequence, "begin_forward")
        lengths = tuple(sequence.length for sequence in sequences)
        classes = [self._class_need(index, seq_ids, sequences, counts) for index in range(len(self.pools))]
        return ForwardNeed(tuple(seq_ids), lengths, tuple(counts), classes)

    def _class_need(self, index: int, seq_ids: Seq[SeqId], sequences: Seq[Sequence], counts: Seq[int]) -> ClassNeed:
        size, references = self.page_size, self.pools[index].references
        split = self._split_tails(index)
        released = Counter(split.values())
        fresh: list[int] = []
        owners: dict[int, list[Split]] = {}
        for entry, (seq_id, sequence, count) in enumerate(zip(seq_ids, sequences, counts, strict=True)):
            last, valid = divmod(sequence.length, size)
            fresh.append(pages_for(sequence.length + count, size) - pages_for(sequence.length, size))
            if valid:
                page = split.get(seq_id, int(sequence.tables[index].pages[last]))
                if references[page] + released[page] > 1:
                    owners.setdefault(page, []).append(Split(entry, last, page, valid))
        splits: list[Split] = []
        for page, found in owners.items():
            if len(found) == references[page] + released[page]:
                # All owners write in this forward, so one may stay: the longest, for then its new rows lie behind
                # everybody's valid rows and an abort can share the page again.
                found.remove(max(found, key=lambda split: split.valid))
            splits.extend(found)
        return ClassNeed(splits, fresh)

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
            max(0, part.pages - pool.num_free - own)
            for part, pool, own in zip(need.classes, self.pools, taken, strict=True)
        )

    def open_forward(self, need: ForwardNeed) -> OpenForward:
        """Take the pages. ``FailedPrecondition`` and ``ResourceExhausted`` before anything changes; nothing can fail
        after that."""
        self.require_closed("begin_forward")
        for part, pool in zip(need.classes, self.pools, strict=True):
            if part.pages > pool.num_free:
                raise ResourceExhausted(
                    f"begin_forward: {part.pages} pages of {self.page_size} tokens are needed and {pool.num_free} of "
                    f"{pool.num_pages} are free; remove sequences or give fewer tokens"
                )
        sequences = [self._sequences[seq_id] for seq_id in need.seq_ids]
        opened = OpenForward(need)
        for index, (part, pool) in enumerate(zip(need.classes, self.pools, strict=True)):
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

    def _blanks(self, index: int, part: ClassNeed, need: ForwardNeed, sequences: Seq[Sequence]) -> list[SlotRange]:
        size = self.page_size
        split = {found.entry for found in part.splits}
        blanks: list[SlotRange] = []
        for entry, sequence in enumerate(sequences):
            used = (need.lengths[entry] + need.counts[entry]) % size
            if used and (part.fresh[entry] or entry in split or sequence.stale_tail):
                blanks.append(SlotRange(int(sequence.tables[index].pages[-1]) * size + used, size - used))
        return blanks

    def publish(self) -> None:
        """The new tokens count from now on."""
        opened = self._require_open("end_forward")
        for seq_id, count in zip(opened.need.seq_ids, opened.need.counts, strict=True):
            self._sequences[seq_id].length += count
        self.forward = None

    def abort(self) -> None:
        """Pages and tables are as before ``open_forward``; split pages are shared again."""
        opened = self._require_open("abort_forward")
        sequences = [self._sequences[seq_id] for seq_id in opened.need.seq_ids]
        for index, (part, pool) in enumerate(zip(opened.need.classes, self.pools, strict=True)):
            for sequence in sequences:
                table = sequence.tables[index]
                size = pages_for(sequence.length, self.page_size)
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

    def own_pages(self, seq_id: SeqId, start: int, stop: int) -> list[list[SlotCopy]]:
        """Make the pages of rows ``start..stop - 1`` this sequence's own (before they are overwritten).

        Returns the copies of each class; whole valid pages are copied, since other rows of them stay.
        ``ResourceExhausted`` before anything changes.
        """
        sequence = self.get(seq_id)
        size = self.page_size
        if stop <= start:
            return [[] for _ in self.pools]
        first, last = start // size, pages_for(stop, size)
        shared: list[NDArray[np.intp]] = []
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            which = np.flatnonzero(pool.references[table.pages[first:last]] > 1) + first
            if which.size > pool.num_free:
                raise ResourceExhausted(f"{which.size} shared pages must be split and {pool.num_free} pages are free")
            shared.append(which)
        copies: list[list[SlotCopy]] = []
        for pool, table, which in zip(self.pools, sequence.tables, shared, strict=True):
            old = table.pages[which].copy()
            new = pool.take(which.size)
            parts: list[SlotCopy] = []
            for index, source, target in zip(which.tolist(), old.tolist(), new.tolist(), strict=True):
                valid = min(size, sequence.length - index * size)
                parts.append(SlotCopy(source * size, target * size, valid))
                table.replace(index, target)
            pool.release(old)
            self.num_splits += int(which.size)
            # Only valid rows were copied: behind them are the old values of a page that changed hands.
            sequence.stale_tail |= which.size > 0
            copies.append(parts)
        return copies

    def reserve_import(self, seq_id: SeqId, length: int) -> None:
        """A new sequence with pages for ``length`` tokens that nobody can use until ``finish_import``."""
        check_id(seq_id)
        if seq_id in self._sequences:
            raise InvalidArgument(f"prepare_import: sequence {seq_id} exists already; a new id is needed")
        self.require_closed("prepare_import")
        count = pages_for(length, self.page_size)
        for pool in self.pools:
            if count > pool.num_free:
                raise ResourceExhausted(f"prepare_import: needs {count} pages, {pool.num_free} free")
        tables = [PageTable(pool.take(count)) for pool in self.pools]
        self._sequences[int(seq_id)] = Sequence(0, tables, reserved=length, stale_tail=True)

    def publish_import(self, seq_id: SeqId) -> None:
        """The reserved tokens count from now on."""
        sequence = self.get(seq_id)
        sequence.length, sequence.reserved = sequence.reserved or 0, None

    def slots(self, index: int, seq_id: SeqId, start: int, stop: int) -> NDArray[np.int64]:
        """Slots of rows ``start..stop - 1`` in class ``index``."""
        return slots_of(self.get(seq_id).tables[index].pages, start, stop, self.page_size)

    # -- accounting ------------------------------------------------------------------------------------------

    def shared_pages(self, seq_id: SeqId) -> int:
        """Pages of this sequence, over all classes, that others hold too."""
        tables = self.get(seq_id).tables
        return sum(
            int((pool.references[table.pages] > 1).sum()) for pool, table in zip(self.pools, tables, strict=True)
        )

    def check(self) -> None:
        """Recount everything; ``QuireError`` names what is broken."""
        opened = self.forward
        growing = dict(zip(opened.need.seq_ids, opened.need.counts, strict=True)) if opened else {}
        for index, pool in enumerate(self.pools):
            expected = np.zeros(pool.num_pages, dtype=np.int32)
            for seq_id, sequence in self._sequences.items():
                table = sequence.tables[index]
                tokens = sequence.length if sequence.reserved is None else sequence.reserved
                wanted = pages_for(tokens + growing.get(seq_id, 0), self.page_size)
                if sequence.reserved is not None and (pool.references[table.pages] != 1).any():
                    raise QuireError(f"sequence {seq_id} is being imported and shares a page")
                if table.size != wanted:
                    raise QuireError(
                        f"sequence {seq_id} of length {sequence.length} has {table.size} pages instead of {wanted}"
                    )
                if np.unique(table.pages).size != table.size:
                    raise QuireError(f"sequence {seq_id} names a page twice")
                np.add.at(expected, table.pages, 1)
            pool.check(expected)
            if opened:
                self._check_writes(opened, index)

    def _check_writes(self, opened: OpenForward, index: int) -> None:
        written = [
            self._sequences[seq_id].tables[index].pages[length // self.page_size :]
            for seq_id, length in zip(opened.need.seq_ids, opened.need.lengths, strict=True)
        ]
        pages = np.concatenate(written)
        if (self.pools[index].references[pages] != 1).any() or np.unique(pages).size != pages.size:
            raise QuireError("a page that the open forward writes has more than one holder")


def check_integer(value: int, what: str, least: int) -> int:
    """``value`` as a plain integer; ``InvalidArgument`` if it is none or lies below ``least``."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{what} {value!r} is not an integer") from None
    if number < least:
        raise InvalidArgument(f"{what} {number}; at least {least} is needed")
    return number


def check_id(seq_id: SeqId) -> None:
    """``InvalidArgument`` unless ``seq_id`` is an int64."""
    if isinstance(seq_id, bool) or not isinstance(seq_id, (int, np.integer)) or not -(2**63) <= seq_id < 2**63:
        raise InvalidArgument(f"sequence id {seq_id!r} is not an integer of 64 bits")


def slots_of(pages: PageIds, start: int, stop: int, page_size: int) -> NDArray[np.int64]:
    """Slots of positions ``start..stop - 1`` in a page table. Cost O(rows)."""
    positions = np.arange(start, stop, dtype=np.int64)
    return pages[positions // page_size].astype(np.int64) * page_size + positions % page_size


def slot_index(ranges: Iterable[SlotRange]) -> NDArray[np.int64]:
    """All slots of all ranges."""
    parts = [np.arange(part.start, part.start + part.count, dtype=np.int64) for part in ranges]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
