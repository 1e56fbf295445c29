"""A naive KV state with recurrent layers: every state is an object of its own.

What the real state counts as slots and references is found here by looking at who names which
object. ``HybridOracle`` is the naive attention state and this; its attention layers come first, so
their ids are those of ``Oracle``. What a forward computes is in ``oracle_recurrent_forward``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.base.errors import DataLoss, FailedPrecondition, InvalidArgument, ResourceExhausted, Unsupported
from quire.contracts.layers import Recurrent

from .oracle import Oracle, Parents
from .oracle_exchange import Export
from .oracle_recurrent_forward import OpenStates, RecurrentVerbs, State
from .oracle_refusals import Faults, raise_first
from .oracle_values import Spec

Asked = Sequence[Sequence[int]]
"""Per entry, after how many of its new tokens a state is to be kept; empty: after none."""


@dataclass
class Held:
    """The states of one sequence."""

    present: State
    kept: dict[int, State] = field(default_factory=dict)
    ring: dict[int, State] = field(default_factory=dict)
    nodes: list[State] = field(default_factory=list)

    @property
    def strong(self) -> list[State]:
        """What is not given up for others."""
        return [self.present, *self.kept.values(), *self.nodes]


class HybridOracle(RecurrentVerbs, Oracle):
    def __init__(
        self,
        specs: Sequence[Spec],
        recurrent: Sequence[Recurrent],
        *,
        num_states: int,
        ring: int,
        interval: int,
        capacity: int,
        page_size: int,
        dtype: torch.dtype,
        window_capacity: int | None = None,
    ) -> None:
        super().__init__(specs, capacity, page_size, dtype, window_capacity)
        self.recurrent = {len(specs) + index: spec for index, spec in enumerate(recurrent)}
        self.num_states, self.ring, self.interval = num_states, ring, interval
        self.members = [(layer, index) for layer, spec in self.recurrent.items() for index in range(len(spec.states))]
        self.initial = State(
            {
                (layer, index): torch.full(one.shape, one.initial, dtype=getattr(torch, one.dtype))
                for layer, spec in self.recurrent.items()
                for index, one in enumerate(spec.states)
            },
            dict.fromkeys(self.members, 0.0),
        )
        self.parts: dict[int, Held] = {}
        self.opened: OpenStates | None = None
        self.aging: list[State] = []
        """States in rings, by when they entered one."""

    # -- slots -------------------------------------------------------------------------------------

    def _strong(self) -> set[int]:
        found = {id(one) for part in self.parts.values() for one in part.strong}
        return found | {id(one) for one in (self.opened.targets if self.opened else [])}

    def _yielding(self) -> list[State]:
        """States that only rings name, oldest first."""
        strong = self._strong()
        return [one for one in self.aging if id(one) not in strong]

    @property
    def free_states(self) -> int:
        ringed = {id(one) for part in self.parts.values() for one in part.ring.values()}
        return self.num_states - len((self._strong() | ringed) - {id(self.initial)})

    def short_of(self, count: int) -> int:
        """Slots that are missing for ``count`` new states."""
        return max(0, count - self.free_states - len(self._yielding()))

    def _make_room(self, count: int) -> None:
        for one in self._yielding()[: max(0, count - self.free_states)]:
            for part in self.parts.values():
                part.ring = {position: held for position, held in part.ring.items() if held is not one}
        self._forget_aged()

    def _forget_aged(self) -> None:
        ringed = {id(one) for part in self.parts.values() for one in part.ring.values()}
        self.aging = [one for one in self.aging if id(one) in ringed]

    # -- positions ---------------------------------------------------------------------------------

    def stands(self, seq_id: int) -> int:
        sequence = self.sequences[seq_id]
        if sequence.importing is not None and not sequence.loading:
            return sequence.importing.length
        return sequence.length

    def kept_positions(self, seq_id: int) -> list[int]:
        part = self.parts[seq_id]
        return sorted({0, self.stands(seq_id), *part.kept, *part.ring})

    def nearest(self, seq_id: int, position: int) -> int:
        return max(kept for kept in self.kept_positions(seq_id) if kept <= position)

    def stood_at(self, seq_id: int, position: int) -> State:
        """What the state was when the length was ``position``."""
        part = self.parts[seq_id]
        if position == self.stands(seq_id):
            return part.present
        if position in part.ring:
            return part.ring[position]
        return part.kept.get(position, self.initial)

    def shown_at(self, seq_id: int, position: int | None) -> State | None:
        """What looking at a position shows: the checkpoint before anything else."""
        part = self.parts[seq_id]
        if position is None:
            return part.present
        for held in (part.kept, part.ring, {self.stands(seq_id): part.present}, {0: self.initial}):
            if position in held:
                return held[position]
        return None

    # -- sequences ---------------------------------------------------------------------------------

    def clear(self) -> None:
        super().clear()
        self.parts.clear()
        self.opened = None
        self.aging.clear()

    def add_sequence(self, seq_id: int) -> None:
        super().add_sequence(seq_id)
        self.parts[seq_id] = Held(self.initial)

    def remove_sequence(self, seq_id: int) -> None:
        super().remove_sequence(seq_id)
        del self.parts[seq_id]
        self._forget_aged()

    def reachable_set(self, seq_id: int) -> set[int]:
        attention = super().reachable_set(seq_id)
        if self.is_prepared(seq_id):
            return attention
        return {m for m in range(self.sequences[seq_id].length + 1) if self.nearest(seq_id, m) in attention}

    def _target(self, seq_id: int, position: int) -> tuple[int, int]:
        """Where a way back to ``position`` ends, and what is left to run; a position that there is
        not stays as it is.
        """
        if seq_id not in self.sequences or not 0 <= position <= self.sequences[seq_id].length:
            return position, 0
        kept = self.nearest(seq_id, position)
        return kept, position - kept

    def fork_sequence(self, parent_id: int, child_id: int, fork_pos: int = -1) -> int:
        if fork_pos == -1 and parent_id in self.sequences:
            fork_pos = self.sequences[parent_id].length
        kept, again = self._target(parent_id, fork_pos)
        super().fork_sequence(parent_id, child_id, kept)
        parent = self.parts[parent_id]
        self.parts[child_id] = Held(
            self.stood_at(parent_id, kept),
            {position: one for position, one in parent.kept.items() if position <= kept},
            {position: one for position, one in parent.ring.items() if position < kept},
        )
        return again

    def popn(self, seq_id: int, n: int) -> int:
        length = self.sequences[seq_id].length if seq_id in self.sequences else 0
        if n < 0 or n > length:
            return super().popn(seq_id, n)
        kept, again = self._target(seq_id, length - n)
        # Looked up before the length changes, put in its place after all refusals.
        found = None if self.is_importing(seq_id) or seq_id not in self.parts else self.stood_at(seq_id, kept)
        super().popn(seq_id, length - kept)
        part = self.parts[seq_id]
        assert found is not None
        part.present = found
        part.kept = {position: one for position, one in part.kept.items() if position <= kept}
        if kept < length:
            part.ring = {position: one for position, one in part.ring.items() if position < kept}
        self._forget_aged()
        return again

    def rewind_cost(self, seq_id: int, position: int) -> int:
        kept, again = self._target(seq_id, position)
        return super().rewind_cost(seq_id, kept) + again

    def commit_accepted_token_tree_nodes(self, ids: Sequence[int], leaves: Sequence[int]) -> None:
        before = {seq_id: list(self.sequences[seq_id].parents) for seq_id in ids if seq_id in self.sequences}
        super().commit_accepted_token_tree_nodes(ids, leaves)
        for seq_id, leaf in zip(ids, leaves, strict=True):
            path: list[State] = []
            while leaf != -1:
                path.insert(0, self.parts[seq_id].nodes[leaf])
                leaf = before[seq_id][leaf]
            self.parts[seq_id].nodes = []
            if path:
                end = self.sequences[seq_id].length
                passed = dict(enumerate(path, start=end - len(path) + 1))
                kept = {position: one for position, one in passed.items() if self._is_multiple(position)}
                self._advance(seq_id, end - len(path), passed, kept)
        self._forget_aged()

    def _is_multiple(self, position: int) -> bool:
        return self.interval > 0 and position % self.interval == 0

    def _advance(self, seq_id: int, start: int, passed: dict[int, State], kept: dict[int, State]) -> None:
        """From length ``start`` to the last position of ``passed``, the others of which go into the
        ring.
        """
        part = self.parts[seq_id]
        part.kept |= kept
        *earlier, end = sorted(passed)
        entering = ({start: part.present} if start else {}) | {position: passed[position] for position in earlier}
        part.ring |= entering
        self.aging += [one for one in entering.values() if not any(one is other for other in self.aging)]
        part.ring = {
            position: part.ring[position] for position in sorted(part.ring)[max(0, len(part.ring) - self.ring) :]
        }
        part.present = passed[end]
        self._forget_aged()

    # -- checkpoints -------------------------------------------------------------------------------

    def _settled_faults(self, seq_id: int) -> Faults:
        faults = self._faults(needs=[seq_id])
        if self._pending(seq_id):
            faults.add(FailedPrecondition)
        return faults

    def checkpoint(self, seq_id: int) -> None:
        raise_first(self._settled_faults(seq_id))
        if length := self.sequences[seq_id].length:
            self.parts[seq_id].kept[length] = self.parts[seq_id].present

    def checkpoints(self, seq_id: int) -> list[int]:
        raise_first(self._faults(needs=[seq_id], ready=False, closed=False))
        return sorted(self.parts[seq_id].kept)

    def drop_checkpoint(self, seq_id: int, position: int) -> None:
        faults = self._settled_faults(seq_id)
        if position < 0 or (seq_id in self.parts and position not in self.parts[seq_id].kept):
            faults.add(InvalidArgument)
        raise_first(faults)
        del self.parts[seq_id].kept[position]
        self._forget_aged()

    # -- the bracket -------------------------------------------------------------------------------

    def _kept_rows(self, ids: Sequence[int], counts: Sequence[int], trees: Sequence[Any], asked: Asked) -> list[int]:
        """Rows of chains whose states become checkpoints."""
        found: list[int] = []
        start = 0
        for entry, (seq_id, count, tree) in enumerate(zip(ids, counts, trees, strict=True)):
            for new in range(1, count + 1):
                wish = bool(asked) and new in asked[entry]
                if tree is None and (wish or self._is_multiple(self.sequences[seq_id].length + new)):
                    found.append(start + new - 1)
            start += count
        return found

    def _wanted(self, ids: Sequence[int], counts: Sequence[int], trees: Sequence[Any], asked: Asked = ()) -> list[int]:
        """Rows whose states take a slot."""
        found, start = set(self._kept_rows(ids, counts, trees, asked)), 0
        for count, tree in zip(counts, trees, strict=True):
            found |= {start + count - 1} if tree is None else set(range(start, start + count))
            start += count
        return sorted(found)

    def missing_pages(self, ids: Sequence[int], counts: Sequence[int], parents: Parents = None) -> int:
        pages = super().missing_pages(ids, counts, parents)
        _, trees = self._batch_faults(ids, counts, parents, closed=False)
        opened, self.opened = self.opened, None  # As if it were aborted.
        states = self.short_of(len(self._wanted(ids, counts, trees)))
        self.opened = opened
        return pages + states

    def begin_forward(
        self, ids: Sequence[int], counts: Sequence[int], parents: Parents = None, *, checkpoints: Asked = ()
    ) -> None:
        faults, trees = self._batch_faults(ids, counts, parents)
        if checkpoints and len(checkpoints) != len(ids):
            faults.add(InvalidArgument)
        for count, tree, asked in zip(counts, trees, checkpoints, strict=False):
            if any(not 1 <= one <= count for one in asked) or list(asked) != sorted(set(asked)) or (asked and tree):
                faults.add(InvalidArgument)
        if not faults and self.short_of(len(self._wanted(ids, counts, trees, checkpoints))):
            faults.add(ResourceExhausted)
        raise_first(faults)
        # As the rows are now: both depend on lengths and nodes.
        wanted, kept = self._wanted(ids, counts, trees, checkpoints), self._kept_rows(ids, counts, trees, checkpoints)
        super().begin_forward(ids, counts, parents)
        self._make_room(len(wanted))
        rows = [State() for _ in range(sum(counts))]
        before: list[State] = []
        chains: list[range] = []
        for seq_id, count, tree in zip(ids, counts, trees, strict=True):
            part, start = self.parts[seq_id], len(before)
            chains += [range(start, start + count)] if tree is None else []
            for row in range(count):
                # Chains continue the row before, the first one the present state.
                parent = row - 1 if tree is None else tree[row] - len(part.nodes)
                if parent >= 0:
                    before.append(rows[start + parent])
                elif tree is None or tree[row] == -1:
                    before.append(part.present)
                else:
                    before.append(part.nodes[tree[row]])
        self.opened = OpenStates(before, rows, wanted, kept, chains)

    def abort_forward(self) -> None:
        super().abort_forward()
        self.opened = None

    def end_forward(self, skipped: Iterable[int] = ()) -> None:
        forward, opened = self.forward, self.opened
        waiting = (
            {layer for entry in forward.entries for layer in self.pending_layers(entry.seq_id)} if forward else set()
        )
        if waiting.intersection(self.recurrent):
            known = [*range(len(self.specs)), *self.recurrent]
            raise_first({FailedPrecondition} | ({InvalidArgument} if set(skipped) - set(known) else set()))
        super().end_forward([layer for layer in skipped if layer not in self.recurrent])
        assert forward is not None
        assert opened is not None
        self._keep_unset(opened)
        recent = self._recent(opened)
        inside = "end" not in opened.known.values()
        self.opened = None
        for entry in forward.entries:
            rows = range(entry.start, entry.start + entry.count)
            if entry.parents is not None:
                self.parts[entry.seq_id].nodes += [opened.rows[row] for row in rows]
                continue
            at = dict(enumerate(rows, start=entry.n + 1))
            passed = {p: opened.rows[row] for p, row in at.items() if row in recent or row == rows[-1]}
            kept = {p: opened.rows[row] for p, row in at.items() if row in opened.kept and (inside or row == rows[-1])}
            self._advance(entry.seq_id, entry.n, passed, kept)

    def _keep_unset(self, opened: OpenStates) -> None:
        """A state tensor that was not set keeps its state."""
        for member in self.members:
            if member not in opened.known:
                for before, row in zip(opened.before, opened.rows, strict=True):
                    row.values[member], row.bounds[member] = before.values[member], before.bounds[member]

    def _recent(self, opened: OpenStates) -> set[int]:
        """Rows that go into the ring besides the ends of chains: the last of each chain, as far as
        there is room, if all that was set was set after every token.
        """
        found: set[int] = set()
        if not opened.known or any(known != "token" for known in opened.known.values()):
            return found
        free = self.free_states
        for back in range(1, self.ring + 1):
            for rows in opened.chains:
                if back >= len(rows):
                    continue
                row = rows[-1 - back]
                if row in opened.wanted:
                    found.add(row)
                elif free:
                    found.add(row)
                    free -= 1
        return found

    # -- from outside ------------------------------------------------------------------------------

    def debug_get(self, layer: int, index: int, seq_id: int, position: int | None) -> State:
        faults = self.member_faults(layer, index) | self._faults(needs=[seq_id], closed=False)
        if position is not None and position < 0:
            faults.add(InvalidArgument)
        if seq_id in self.parts and self.shown_at(seq_id, position) is None:
            faults.add(FailedPrecondition)
        raise_first(faults)
        found = self.shown_at(seq_id, position)
        assert found is not None
        return found

    def debug_set(self, layer: int, index: int, seq_id: int, data: Tensor) -> None:
        faults = self.member_faults(layer, index) | self._settled_faults(seq_id)
        alone = False
        if seq_id in self.parts:
            present = self.parts[seq_id].present
            names = sum(one is present for part in self.parts.values() for one in (*part.strong, *part.ring.values()))
            alone = present is not self.initial and names == 1
            if not alone and self.short_of(1):
                faults.add(ResourceExhausted)
        raise_first(faults)
        if not alone:
            self._make_room(1)
        own = State(dict(present.values), dict(present.bounds))
        own.values[layer, index], own.bounds[layer, index] = data.clone(), 0.0
        self.parts[seq_id].present = own

    # -- export and import -------------------------------------------------------------------------

    def prepare_import(
        self,
        seq_id: int,
        export: Export,
        parent: int | None = None,
        shared: int = 0,
        *,
        summed: bool = False,
        kept: Sequence[int] = (),
    ) -> None:
        if not self._import_faults(seq_id, export, parent, shared, summed) and self.short_of(1 + len(kept)):
            raise ResourceExhausted("the oracle refuses")
        super().prepare_import(seq_id, export, parent, shared, summed=summed)
        self._make_room(1 + len(kept))
        self.parts[seq_id] = Held(State(), {position: State() for position in kept})

    def import_states(self, seq_id: int, layer: int, tensors: dict[str, Tensor], *, fits: bool, intact: bool) -> None:
        """One recurrent layer.

        ``fits``: the tensors are those of the sequence's checkpoints; ``intact``: their checksums
        agree.
        """
        faults = self._written_faults(seq_id)
        if seq_id in self.sequences:
            if layer in self.sequences[seq_id].imported:
                faults.add(FailedPrecondition)
            if not fits:
                faults.add(InvalidArgument)
        if not intact:
            faults.add(DataLoss)
        raise_first(faults)
        part = self.parts[seq_id]
        for index in range(len(self.recurrent[layer].states)):
            for suffix, one in (("", part.present), *((f"@{p}", one) for p, one in part.kept.items())):
                one.values[layer, index] = tensors[f"state.{index}{suffix}"].clone()
                one.bounds[layer, index] = 0.0
        self.sequences[seq_id].imported.add(layer)

    def pending_layers(self, seq_id: int) -> list[int]:
        found = super().pending_layers(seq_id)
        if self.is_importing(seq_id):
            found += [layer for layer in self.recurrent if layer not in self.sequences[seq_id].imported]
        return found

    def _layer_faults(self, layer: int | None) -> Faults:
        return {Unsupported} if layer in self.recurrent else super()._layer_faults(layer)
