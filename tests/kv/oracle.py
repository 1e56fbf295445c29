"""A naive KV state that decides what is right: every token's K and V in Python lists, attention
query by query, no pages in the values. Pages exist as a count of holders only, so that the oracle
knows when a refusal for lack of them is due and which tokens are still held.

Each verb works out every reason there is to refuse the call and raises the first class in the order
of the contract; otherwise it changes the model. Values are float64; stored rows have been rounded
to the type of the state. ``oracle_attention`` has the verbs of an open forward, ``oracle_exchange``
export and import.

Letters: T new tokens; Hq, Hkv heads; Dk, Dv head sizes; P page size; L layers. An *address* is a
position, or the committed length plus the index of a tree node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted

from .oracle_attention import ForwardVerbs
from .oracle_exchange import ExchangeVerbs, Export
from .oracle_forward import ModelForward
from .oracle_pages import Pages, Table, grow, page_count
from .oracle_refusals import ORDER, Faults, raise_first
from .oracle_values import Row, Spec, attend_one, attention_bound, frequencies, rotated, rotation_bound, unit
from .oracle_windows import Window, ranges, reachable, wanted

__all__ = [
    "ORDER",
    "Export",
    "ModelSequence",
    "Oracle",
    "Row",
    "Window",
    "attend_one",
    "attention_bound",
    "frequencies",
    "raise_first",
    "rotated",
    "rotation_bound",
    "unit",
]

Parents = Sequence[int] | Sequence[Sequence[int] | None] | None


@dataclass
class LayerClass:
    """Layers that keep the same positions."""

    window: int | None
    """W_l; None: full attention."""
    layers: list[int]


@dataclass
class ModelSequence:
    rows: list[list[Row]]
    """By layer, then by address; what was evicted is still here, but nobody may look at it."""
    tables: list[Table]
    """By class."""
    absent: list[set[int]]
    """By class: positions that are gone though their page has others: what an import did not bring,
    and what only shares a page with the sink.
    """
    length: int = 0
    parents: list[int] = field(default_factory=list)
    """Of the uncommitted nodes."""
    window: Window | None = None
    slid: bool = False
    """Whether a forward has run since the window was set: from then on what lies outside of it
    counts as evicted.
    """
    importing: Export | None = None
    loading: bool = False
    """Whether its tokens count though it is still being imported."""
    shared: int = 0
    """Tokens whose rows an import does not bring, in the classes that keep all."""
    come: dict[int, set[int]] = field(default_factory=dict)
    """By layer: positions whose rows an import has brought."""
    imported: set[int] = field(default_factory=set)
    """Recurrent layers that an import has brought."""

    @property
    def nodes(self) -> int:
        return len(self.parents)

    @property
    def stored(self) -> int:
        """Addresses in use."""
        return self.length + self.nodes

    @property
    def evicted(self) -> int:
        return max(0, self.length - self.window.size) if self.window and self.slid else 0

    @property
    def cached(self) -> int:
        return self.length - self.evicted


class Oracle(ForwardVerbs, ExchangeVerbs):
    """The model of ``State``."""

    def __init__(
        self,
        specs: Sequence[Spec],
        capacity: int,
        page_size: int,
        dtype: torch.dtype,
        window_capacity: int | None = None,
    ) -> None:
        self.specs = list(specs)
        self.page_size = page_size
        self.dtype = dtype
        self.classes: list[LayerClass] = []
        self.class_of: list[int] = []
        for layer, spec in enumerate(specs):
            windows = [found.window for found in self.classes]
            if spec.layer_window not in windows:
                self.classes.append(LayerClass(spec.layer_window, []))
                windows.append(spec.layer_window)
            self.class_of.append(windows.index(spec.layer_window))
            self.classes[self.class_of[-1]].layers.append(layer)
        self.pools: list[Pages] = []
        for found in self.classes:
            tokens = capacity if found.window is None or window_capacity is None else window_capacity
            self.pools.append(Pages(page_count(tokens, page_size)))
        self.sequences: dict[int, ModelSequence] = {}
        self.forward: ModelForward | None = None

    # -- pages -------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """The fewest free pages over the classes that keep all tokens, or over all if there is none
        such.
        """
        full = [pool.free for pool, found in zip(self.pools, self.classes, strict=True) if found.window is None]
        return min(full or [pool.free for pool in self.pools])

    def _release(
        self, pools: list[Pages], tables: list[Table], absent: list[set[int]], sequence: ModelSequence
    ) -> None:
        """Give up the pages of which no query at the committed length or later can see a token.

        Rows between them and the sink do not count any more, whatever page they are on.
        """
        for index, found in enumerate(self.classes):
            table = tables[index]
            if sequence.loading:
                continue
            # The page of the next token, and those behind it, are needed as they are.
            for page in range(sequence.length // self.page_size):
                tokens = range(page * self.page_size, (page + 1) * self.page_size)
                if not any(wanted(i, sequence.length, sequence.window, found.window) for i in tokens):
                    pools[index].drop(table[page])
                    table[page] = None
                    sink = sequence.window.sink if sequence.window else 0
                    absent[index] |= set(range(sink, tokens.stop))

    def _take(
        self, pools: list[Pages], tables: dict[int, list[Table]], ids: Sequence[int], counts: Sequence[int]
    ) -> None:
        for index, pool in enumerate(pools):
            for seq_id, count in zip(ids, counts, strict=True):
                grow(pool, tables[seq_id][index], self.sequences[seq_id].stored, count, self.page_size)

    def missing(self, ids: Sequence[int], counts: Sequence[int]) -> int:
        """Pages that a forward is short of, over all classes; while one is open, as if it were
        aborted.
        """
        tables, pools = self.forward.before if self.forward else (self._tables(), self.pools)
        tables = {seq_id: [list(table) for table in tables[seq_id]] for seq_id in ids}
        pools = [pool.copy() for pool in pools]
        for seq_id in ids:
            nothing: list[set[int]] = [set() for _ in pools]
            self._release(pools, tables[seq_id], nothing, self.sequences[seq_id])
        self._take(pools, tables, ids, counts)
        return sum(max(0, -pool.free) for pool in pools)

    def _tables(self) -> dict[int, list[Table]]:
        return {seq_id: [list(table) for table in found.tables] for seq_id, found in self.sequences.items()}

    def held(self, seq_id: int, index: int, address: int) -> bool:
        """Whether a class still has the row of an address."""
        sequence = self.sequences[seq_id]
        return (
            address // self.page_size < len(sequence.tables[index])
            and sequence.tables[index][address // self.page_size] is not None
            and address not in sequence.absent[index]
        )

    def pages_of(self, seq_id: int) -> tuple[int, int]:
        """(pages that the sequence holds, those of them that others hold too)"""
        held = [
            (pool, page)
            for pool, table in zip(self.pools, self.sequences[seq_id].tables, strict=True)
            for page in table
            if page is not None
        ]
        return len(held), sum(pool.shared(page) for pool, page in held)

    # -- sequences ---------------------------------------------------------------------------------

    def _faults(
        self,
        *,
        needs: Iterable[int] = (),
        new: Iterable[int] = (),
        ready: bool = True,
        closed: bool = True,
        loading: bool = False,
    ) -> Faults:
        """Refusals that every verb which edits has in common."""
        faults: Faults = set()
        if closed and self.forward is not None:
            faults.add(FailedPrecondition)
        for seq_id in new:
            if seq_id in self.sequences or not -(2**63) <= seq_id < 2**63:
                faults.add(InvalidArgument)
        for seq_id in needs:
            if seq_id not in self.sequences:
                faults.add(NotFound)
            elif ready and self.is_importing(seq_id) and not (loading and self.sequences[seq_id].loading):
                faults.add(FailedPrecondition)
        return faults

    def _pending(self, seq_id: int) -> bool:
        return seq_id in self.sequences and self.sequences[seq_id].nodes > 0

    def is_importing(self, seq_id: int) -> bool:
        return seq_id in self.sequences and self.sequences[seq_id].importing is not None

    def is_prepared(self, seq_id: int) -> bool:
        """Whether it is being imported and counts for nothing yet."""
        return self.is_importing(seq_id) and not self.sequences[seq_id].loading

    def clear(self) -> None:
        self.sequences.clear()
        self.forward = None
        self.pools = [Pages(pool.total) for pool in self.pools]

    def empty_sequence(self) -> ModelSequence:
        return ModelSequence([[] for _ in self.specs], [[] for _ in self.pools], [set() for _ in self.pools])

    def add_sequence(self, seq_id: int) -> None:
        raise_first(self._faults(new=[seq_id]))
        self.sequences[seq_id] = self.empty_sequence()

    def remove_sequence(self, seq_id: int) -> None:
        raise_first(self._faults(needs=[seq_id], ready=False))
        for pool, table in zip(self.pools, self.sequences.pop(seq_id).tables, strict=True):
            pool.shorten(table, 0)

    def reachable_set(self, seq_id: int) -> set[int]:
        sequence = self.sequences[seq_id]
        found = set(range(sequence.length + 1))
        if self.is_prepared(seq_id):
            return found
        for index, part in enumerate(self.classes):
            if None not in sequence.tables[index] and not sequence.absent[index]:
                continue
            held = [self.held(seq_id, index, i) for i in range(sequence.length)]
            found &= reachable(sequence.length, held.__getitem__, sequence.window, part.window)
        return found

    def reachable(self, seq_id: int) -> list[range]:
        raise_first(self._faults(needs=[seq_id], ready=False, closed=False))
        return ranges(self.reachable_set(seq_id))

    def _go_back_faults(self, seq_id: int, position: int) -> Faults:
        """What fork and pop to a position have in common."""
        faults: Faults = set()
        if seq_id not in self.sequences:
            return faults
        if not 0 <= position <= self.sequences[seq_id].length:
            faults.add(InvalidArgument)
        elif self._pending(seq_id) or position not in self.reachable_set(seq_id):
            faults.add(FailedPrecondition)
        return faults

    def fork_sequence(self, parent_id: int, child_id: int, fork_pos: int = -1) -> int:
        faults = self._faults(needs=[parent_id], new=[child_id])
        length = self.sequences[parent_id].length if parent_id in self.sequences and fork_pos == -1 else fork_pos
        faults |= self._go_back_faults(parent_id, length)
        if fork_pos < -1:
            faults.add(InvalidArgument)
        raise_first(faults)
        parent = self.sequences[parent_id]
        size = page_count(length, self.page_size)
        child = ModelSequence(
            [rows[:length] for rows in parent.rows],
            [table[:size] for table in parent.tables],
            [{i for i in absent if i < length} for absent in parent.absent],
            length,
            window=parent.window,
            slid=parent.slid,
        )
        for pool, table in zip(self.pools, child.tables, strict=True):
            for page in table:
                pool.share(page)
        self.sequences[child_id] = child
        return 0

    def popn(self, seq_id: int, n: int) -> int:
        faults = self._faults(needs=[seq_id])
        if n < 0:
            faults.add(InvalidArgument)
        if seq_id in self.sequences:
            faults |= self._go_back_faults(seq_id, self.sequences[seq_id].length - n)
        raise_first(faults)
        sequence = self.sequences[seq_id]
        self._cut(sequence, sequence.length - n)
        return 0

    def _cut(self, sequence: ModelSequence, length: int) -> None:
        """Nothing behind ``length`` is left."""
        sequence.length, sequence.parents = length, []
        for rows in sequence.rows:
            del rows[length:]
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.shorten(table, page_count(length, self.page_size))
        sequence.absent = [{i for i in absent if i < length} for absent in sequence.absent]

    def rewind_cost(self, seq_id: int, position: int) -> int:
        """As ``popn`` to that position would refuse; asked outside of a forward only."""
        faults = self._faults(needs=[seq_id]) | self._go_back_faults(seq_id, position)
        if position < 0:
            faults.add(InvalidArgument)
        raise_first(faults)
        return 0

    def enable_sliding_window_for_seq(
        self, seq_id: int, window: int | None, sink: int = 0, eviction: str = "token"
    ) -> None:
        faults = self._faults(needs=[seq_id])
        if (window is not None and (window < 1 or not 0 <= sink < window)) or eviction not in ("token", "forward"):
            faults.add(InvalidArgument)
        if self._pending(seq_id) or (seq_id in self.sequences and self._lost(seq_id)):
            faults.add(FailedPrecondition)
        raise_first(faults)
        sequence = self.sequences[seq_id]
        sequence.window = None if window is None else Window(window, sink, eviction)
        sequence.slid = False

    def _lost(self, seq_id: int) -> bool:
        """Whether anything was evicted that the layers' own windows would not have given up."""
        sequence = self.sequences[seq_id]
        return sequence.evicted > 0 or any(
            not self.held(seq_id, index, i) and wanted(i, sequence.length, None, part.window)
            for index, part in enumerate(self.classes)
            for i in range(sequence.length)
        )

    def total_length(self) -> int:
        return sum(sequence.cached + sequence.nodes for sequence in self.sequences.values())

    # -- trees -------------------------------------------------------------------------------------

    def commit_accepted_token_tree_nodes(self, ids: Sequence[int], leaves: Sequence[int]) -> None:
        faults = self._faults(needs=ids, loading=True)
        if len(ids) != len(leaves) or len(set(ids)) != len(ids) or any(leaf < -1 for leaf in leaves):
            faults.add(InvalidArgument)
        for seq_id, leaf in zip(ids, leaves, strict=False):
            if seq_id in self.sequences:
                if leaf >= self.sequences[seq_id].nodes:
                    faults.add(InvalidArgument)
                if not self._pending(seq_id):
                    faults.add(FailedPrecondition)
        raise_first(faults)
        for seq_id, leaf in zip(ids, leaves, strict=True):
            sequence = self.sequences[seq_id]
            path: list[int] = []
            while leaf != -1:
                path.insert(0, leaf)
                leaf = sequence.parents[leaf]
            for rows in sequence.rows:
                rows[sequence.length :] = [rows[sequence.length + node] for node in path]
            self._cut(sequence, sequence.length + len(path))

    # -- rows --------------------------------------------------------------------------------------

    def stack(self, layer: int, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        spec = self.specs[layer]
        if not rows:
            return (
                torch.empty(0, spec.num_kv_heads, spec.head_dim, dtype=self.dtype),
                torch.empty(0, spec.num_kv_heads, spec.value_dim, dtype=self.dtype),
            )
        return torch.stack([k for k, _ in rows]), torch.stack([v for _, v in rows])

    def held_addresses(self, seq_id: int, layer: int) -> list[int]:
        """All addresses of which the layer still has the row."""
        return [a for a in range(self.sequences[seq_id].stored) if self.held(seq_id, self.class_of[layer], a)]

    def stored(self, seq_id: int, layer: int) -> tuple[Tensor, Tensor]:
        """K ``[n, Hkv, Dk]`` and V ``[n, Hkv, Dv]`` of what a layer holds of a sequence, nodes
        included.
        """
        rows = self.sequences[seq_id].rows[layer]
        return self.stack(layer, [rows[address] for address in self.held_addresses(seq_id, layer)])

    def adopt(self, seq_id: int, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Take the bits of rotated keys as they were stored, once they have been found close
        enough.
        """
        rows = self.sequences[seq_id].rows[layer]
        for index in range(len(k)):
            rows[start + index] = (k[index].clone(), v[index].clone())

    def _layer_faults(self, layer: int | None) -> Faults:
        if layer is not None:
            return set() if 0 <= layer < len(self.specs) else {InvalidArgument}
        shapes = {(spec.num_kv_heads, spec.head_dim, spec.value_dim) for spec in self.specs}
        return {InvalidArgument} if len(shapes) > 1 else set()

    def debug_get_kv(
        self, seq_id: int, start: int = 0, end: int | None = None, layer: int | None = None, relative: bool = False
    ) -> list[tuple[Tensor, Tensor]]:
        """Rows of each layer that was asked for."""
        faults = self._faults(needs=[seq_id], closed=False) | self._layer_faults(layer)
        layers = range(len(self.specs)) if layer is None else [layer]
        addresses: list[int] = []
        if start < 0 or (end is not None and end < start):
            faults.add(InvalidArgument)
        elif seq_id in self.sequences:
            sequence = self.sequences[seq_id]
            limit = (sequence.cached if relative else sequence.length) + sequence.nodes
            stop = limit if end is None else end
            if not start <= stop <= limit:
                faults.add(InvalidArgument)
            elif InvalidArgument not in faults:
                addresses = list(range(start, stop))
                if relative and sequence.evicted:
                    assert sequence.window
                    sink = sequence.window.sink
                    addresses = [a if a < sink else a + sequence.evicted for a in addresses]
                rows = [one for one in layers if one < len(self.specs)]
                if not all(self.held(seq_id, self.class_of[one], a) for one in rows for a in addresses):
                    faults.add(FailedPrecondition)
        raise_first(faults)
        rows = self.sequences[seq_id].rows
        return [self.stack(one, [rows[one][a] for a in addresses]) for one in layers]

    def debug_set_kv(self, seq_id: int, start: int, k: Tensor, v: Tensor, layer: int) -> None:
        """Rows of one layer."""
        faults = self._faults(needs=[seq_id]) | self._layer_faults(layer)
        stop = start + len(k)
        if start < 0 or (seq_id in self.sequences and stop > self.sequences[seq_id].length):
            faults.add(InvalidArgument)
        shared: list[int] = []
        if layer < len(self.specs) and seq_id in self.sequences and InvalidArgument not in faults and stop > start:
            index = self.class_of[layer]
            table, pool = self.sequences[seq_id].tables[index], self.pools[index]
            if not all(self.held(seq_id, index, i) for i in range(start, stop)):
                faults.add(FailedPrecondition)
            touched = range(start // self.page_size, page_count(stop, self.page_size))
            shared = [page for page in touched if pool.shared(table[page])]
            if len(shared) > pool.free:
                faults.add(ResourceExhausted)
        raise_first(faults)
        sequence = self.sequences[seq_id]
        for page in shared:
            pool.own(table, page)
        for offset in range(len(k)):
            sequence.rows[layer][start + offset] = (k[offset].clone(), v[offset].clone())
