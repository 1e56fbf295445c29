"""What a forward needs: pages to take, shared tails to copy, pages that leave windows. No torch.

``SequenceTable.plan_forward`` computes it before anything changes, so refusals leave no trace.

Letters: P page size; n new tokens of an entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.base.types import SeqId
from quire.kv.pages import PageIds, PagePool
from quire.kv.sequences import Sequence
from quire.kv.trees import Tree
from quire.kv.windows import Window, floors, leaving, sink_pages


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


@dataclass(frozen=True, slots=True)
class ReceivedPages:
    """The pages, in one class, of a sequence whose next tokens come from another state."""

    pages: PageIds
    """The whole table."""
    slots: NDArray[np.int64]
    """Of each of those tokens; -1: no later query sees it."""
    blanks: list[SlotRange]
    """To be zeroed before anything else."""
    copies: list[SlotCopy]
    """Of the partly filled last page, to be made then."""


@dataclass(frozen=True, slots=True)
class Split:
    """The shared tail page of entry ``entry``, of which ``valid`` slots go to a page of its own."""

    entry: int
    index: int
    page: int
    valid: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """Pages of one entry that left the window: indices into its table."""

    entry: int
    sink: range
    window: range
    layer_floor: int
    """Positions below are out of the layer's own window."""


@dataclass(frozen=True, slots=True)
class ClassNeed:
    """What one layer class needs for a forward."""

    splits: list[Split]
    fresh: list[int]
    """New pages of each entry, without the splits."""
    leaving: list[Leaving] = field(default_factory=list)
    freed: int = 0
    """Pages without a holder once those have left."""

    @property
    def pages(self) -> int:
        return len(self.splits) + sum(self.fresh)


@dataclass(frozen=True, slots=True)
class ForwardNeed:
    """A forward that was checked against the sequences, not yet against the free pages."""

    seq_ids: tuple[SeqId, ...]
    lengths: tuple[int, ...]
    """Committed tokens."""
    stored: tuple[int, ...]
    """Addresses in use before: committed tokens and uncommitted nodes."""
    counts: tuple[int, ...]
    trees: tuple[Tree | None, ...]
    """All nodes of each entry, the new ones included; None for an entry of ordinary tokens."""
    windows: tuple[Window | None, ...]
    classes: list[ClassNeed]


@dataclass(slots=True)
class OpenForward:
    """A forward whose pages are taken: what ``publish`` and ``abort`` need."""

    need: ForwardNeed
    copies: list[list[SlotCopy]] = field(default_factory=list)
    """Per class."""
    blanks: list[list[SlotRange]] = field(default_factory=list)
    """Per class: rows of last pages behind the new rows. They become zero: a kernel that pads with
    them multiplies them by a weight of 0, and 0 times an old NaN is NaN."""


def pages_for(tokens: int, page_size: int) -> int:
    """Return the pages that hold ``tokens`` tokens."""
    return -(-tokens // page_size)


def class_need(
    index: int,
    pool: PagePool,
    page_size: int,
    layer_window: int | None,
    seq_ids: Seq[SeqId],
    sequences: Seq[Sequence],
    stored: Seq[int],
    counts: Seq[int],
    split_before: Mapping[SeqId, int],
    slack: int = 0,
) -> ClassNeed:
    """Return the pages needed of class ``index``. ``split_before``: shared tail pages that an open
    forward has split, by sequence; the need is that before it. ``slack``: tokens by which windows
    let go later than they must."""
    gone: list[Leaving] = []
    for entry, sequence in enumerate(sequences):
        if (sequence.window is None and layer_window is None) or sequence.loading:
            continue  # Rows of an import that has not ended may still be written, into any of its pages.
        floor = floors(max(0, sequence.length - slack), sequence.window, layer_window)
        first_page = sink_pages(sequence.window, page_size)
        sink, window = leaving(sequence.holes[index], floor, first_page, page_size)
        if sink or window:
            gone.append(Leaving(entry, sink, window, floor.layer))
    references = pool.references
    # Holders of a page by the time when it is written: less those that let go of it in this call.
    holders: dict[int, int] = Counter(split_before.values()) if split_before else {}
    left: dict[int, int] = Counter(left_pages(index, sequences, gone)) if gone else {}
    for page, count in left.items():
        holders[page] = holders.get(page, 0) - count
    fresh: list[int] = []
    owners: dict[int, list[Split]] = {}
    for entry, (seq_id, sequence, old, count) in enumerate(zip(seq_ids, sequences, stored, counts, strict=True)):
        last, valid = divmod(old, page_size)
        fresh.append((old + count + page_size - 1) // page_size - last - (valid > 0))
        if valid:
            page = split_before[seq_id] if seq_id in split_before else sequence.tables[index].page(last)
            if references.item(page) + holders.get(page, 0) > 1:
                owners.setdefault(page, []).append(Split(entry, last, page, valid))
    splits: list[Split] = []
    for page, found in owners.items():
        if len(found) == references[page] + holders.get(page, 0):
            # All owners write in this forward, so one may stay: the longest, because its new rows
            # are behind all owners' valid rows and an abort can share the page again.
            found.remove(max(found, key=lambda split: split.valid))
        splits.extend(found)
    freed = sum(int(references[page]) == count for page, count in left.items())
    return ClassNeed(splits, fresh, gone, freed)


def left_pages(index: int, sequences: Seq[Sequence], leaving: Seq[Leaving]) -> list[int]:
    """Return the pages of ``leaving``, once for each entry that lets go of them."""
    parts = [
        sequences[one.entry].tables[index].pages[part.start : part.stop]
        for one in leaving
        for part in (one.sink, one.window)
        if part
    ]
    return [page for part in parts for page in part.tolist() if page >= 0]


def slots_of(pages: PageIds, start: int, stop: int, page_size: int) -> NDArray[np.int64]:
    """Return the slots of addresses ``start..stop - 1`` in a page table. Cost O(rows)."""
    addresses = np.arange(start, stop, dtype=np.int64)
    return pages[addresses // page_size].astype(np.int64) * page_size + addresses % page_size


def slots_in(pages: PageIds, ranges: Iterable[range], page_size: int) -> NDArray[np.int64]:
    """Return the slots of all addresses of all ranges in a page table."""
    parts = [slots_of(pages, part.start, part.stop, page_size) for part in ranges]
    return np.concatenate([*parts, np.empty(0, dtype=np.int64)])


def breaks_of(slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the places at which a slot does not follow the slot before it."""
    return np.flatnonzero(slots[1:] != slots[:-1] + 1) + 1


def slot_index(ranges: Iterable[SlotRange]) -> NDArray[np.int64]:
    """Return all slots of all ranges."""
    parts = [np.arange(part.start, part.start + part.count, dtype=np.int64) for part in ranges]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
