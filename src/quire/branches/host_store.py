"""``HostStore``: the ``Tier`` in host memory, for preempted requests and idle sessions.

A copy is an export of a sequence, to the bit; it comes back by an import when its owner is admitted
again. Whether that is cheaper than computing is measured: the seconds of prompt tokens and of
copied bytes, as the engine runs. Where a copy is not worth it, does not fit or does not come back,
the tokens are computed again. (vLLM's swapping, arXiv:2309.06180, section 4.5, moves pages; here it
is sequences, so that windows and other kinds of state come along.)

The caller holds the engine's lock.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.branches.branch import Branch
from quire.contracts.kv_state import ModelState
from quire.errors import ResourceExhausted
from quire.metrics import Counter, Gauge
from quire.runner.local import Runner
from quire.types import Pop, Remove, SeqId, Step

logger = logging.getLogger("quire.engine")

PROBE_BYTES = 4 * 2**20
"""Bytes that are copied once, before anything else is, to know how fast that is."""
MOST_SHARED = 0.5
"""The largest part of a copied sequence that others may hold: it comes back as pages of its own."""


@dataclass(eq=False, slots=True)
class HostCopy:
    """The exported state of ``length`` tokens. It never changes, so that forks share it."""

    metadata: Mapping[str, Any]
    groups: dict[int, dict[str, Tensor]]
    """Tensors in host memory, by layer."""
    length: int
    nbytes: int
    stops: tuple[range, ...] = ()
    """Lengths that it can be cut to with nothing to run again, ascending, its own among them."""
    owners: int = 0

    def reach(self, length: int) -> int:
        """Return how many tokens are left for an owner of only the first ``length``."""
        return max((min(length, part.stop - 1) for part in self.stops if part.start <= length), default=0)


@dataclass(slots=True)
class Entry:
    """One owner's share of a copy: its first ``length`` tokens, at which the copy can be cut."""

    copy: HostCopy
    length: int
    waiting: bool
    """Whether a request waits for it; an idle session's gives way to newer ones."""


@dataclass(slots=True)
class Rate:
    """Amount per second over the last measurements."""

    most: int
    measured: deque[tuple[float, float]] = field(default_factory=deque)
    """(amount, seconds), oldest first"""

    def add(self, amount: float, seconds: float) -> None:
        self.measured.append((amount, max(seconds, 1e-9)))
        if len(self.measured) > self.most:
            self.forget_oldest()

    def forget_oldest(self) -> None:
        if self.measured:
            self.measured.popleft()

    def seconds(self, amount: float) -> float | None:
        """Return the seconds that ``amount`` takes; None if nothing was measured."""
        if not self.measured:
            return None
        return amount * sum(seconds for _, seconds in self.measured) / sum(done for done, _ in self.measured)


class MoveCosts:
    """What computing and copying cost on this machine, as measured."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.prompts = Rate(most=64)
        """Tokens per second of steps with prompts."""
        self.out = Rate(most=8)
        """Bytes per second from the pool to host memory."""
        self.back = Rate(most=8)
        self._tokens, self._seconds = 0, 0.0

    def ran(self, num_tokens: int, num_chunks: int, seconds: float, *, waited: bool) -> None:
        """Count a step. ``waited``: its results were waited for. The device may still be busy with
        a step that was not waited for: its time is part of the next one's."""
        self._tokens += num_tokens
        self._seconds += seconds
        if waited:
            # One token of each request is a decode, which says little about prompts.
            if self._tokens > num_chunks:
                self.prompts.add(self._tokens, self._seconds)
            self._tokens, self._seconds = 0, 0.0

    def moving_is_cheaper(self, tokens: float, nbytes: int, *, there: bool = True) -> bool:
        """Return whether copying ``nbytes`` out (``there``) and back beats computing ``tokens``. A
        refusal to copy out forgets the oldest measurement of copying, so that a slow spell ends."""
        if not self.out.measured:
            self._probe()
        back = self.back if self.back.measured else self.out
        moving = (back.seconds(nbytes) or 0.0) + ((self.out.seconds(nbytes) or 0.0) if there else 0.0)
        computing = self.prompts.seconds(tokens)
        if computing is None or moving < computing:
            return True
        if there:
            self.out.forget_oldest()
            self.back.forget_oldest()
        return False

    def _probe(self) -> None:
        source = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=self.device)
        source.clone()
        started = time.perf_counter()
        to_host([(0, {"probe": source.clone()})], self.device)
        self.out.add(PROBE_BYTES, time.perf_counter() - started)


class HostStore:
    """Copies of sequences in up to ``capacity`` bytes (0: none are made), by their owners.

    ``worth_moving(tokens, nbytes, there=True)`` decides; by default as ``MoveCosts`` has measured.
    """

    def __init__(self, runner: Runner, *, capacity: int = 0) -> None:
        self.runner = runner
        self.capacity = capacity
        self.used = 0
        """Bytes, each copy counted once."""
        self.costs = MoveCosts(runner.state.device)
        self.worth_moving: Callable[..., bool] = self.costs.moving_is_cheaper
        self._entries: dict[Branch, Entry] = {}
        """Oldest first."""
        self._swaps_out = Counter("quire:swaps_out_total", "Sequences moved to host memory because pages ran out.")
        self._swaps_in = Counter("quire:swaps_in_total", "Sequences that came back from host memory.")
        self._bytes_out = Counter("quire:swap_out_bytes_total", "Bytes of state moved to host memory.")
        self._bytes_in = Counter("quire:swap_in_bytes_total", "Bytes of state that came back from host memory.")
        self._bytes_held = Gauge("quire:host_memory_bytes", "Bytes of state in host memory now.")

    def ran(self, num_tokens: int, num_chunks: int, seconds: float, *, waited: bool) -> None:
        """See ``Tier``."""
        self.costs.ran(num_tokens, num_chunks, seconds, waited=waited)

    def snapshot(self) -> dict[str, float]:
        """See ``Tier``."""
        self._bytes_held.set(self.used)
        counted = (self._swaps_out, self._swaps_in, self._bytes_out, self._bytes_in, self._bytes_held)
        return {metric.name: metric.value for metric in counted}

    def holds(self, owner: Branch) -> int:
        """See ``Tier``."""
        entry = self._entries.get(owner)
        return 0 if entry is None else entry.length

    def discard(self, owner: Branch) -> None:
        """See ``Tier``."""
        entry = self._entries.pop(owner, None)
        if entry is not None:
            entry.copy.owners -= 1
            if not entry.copy.owners:
                self.used -= entry.copy.nbytes

    def truncate(self, owner: Branch, length: int) -> None:
        """See ``Tier``."""
        entry = self._entries.get(owner)
        if entry is not None and entry.length > length:
            entry.length = entry.copy.reach(length)
            if not entry.length:
                self.discard(owner)

    def reach(self, owner: Branch, length: int) -> int:
        """See ``Tier``."""
        entry = self._entries.get(owner)
        return 0 if entry is None else entry.copy.reach(min(length, entry.length))

    def move(self, source: Branch, target: Branch, *, waiting: bool) -> None:
        """See ``Tier``."""
        entry = self._entries.pop(source, None)
        if entry is not None:
            self.discard(target)
            entry.waiting = waiting
            self._entries[target] = entry

    def share(self, source: Branch, target: Branch, length: int) -> None:
        """See ``Tier``."""
        entry, held = self._entries.get(source), self.reach(source, length)
        if entry is not None and held:
            self._enter(target, entry.copy, held, waiting=False)

    def _enter(self, owner: Branch, copy: HostCopy, length: int, *, waiting: bool) -> None:
        self.discard(owner)
        if not copy.owners:
            self.used += copy.nbytes
        copy.owners += 1
        self._entries[owner] = Entry(copy, length, waiting)

    def save(self, owner: Branch, *, waiting: bool) -> bool:
        """See ``Tier``. The copies of idle sessions make room, oldest first."""
        seq, state = owner.seq, self.runner.state
        if not self.capacity or seq is None or state.sequence_length(seq) != owner.computed:
            return False
        shared = shared_part(state, seq)
        if not owner.computed or shared > MOST_SHARED:
            return False
        try:
            started = time.perf_counter()
            metadata = state.get_checkpoint_metadata(seq, checksums=False)
            nbytes = export_bytes(metadata)
            # The prefix cache is likely to have what others hold too.
            tokens = owner.computed * (1 - shared)
            if nbytes > self.capacity or not self.worth_moving(tokens, nbytes) or not self._make_room(nbytes):
                return False
            layers = [int(group["group"]) for group in metadata["groups"]]
            # Layer by layer: the device never gathers a second copy of everything.
            groups = to_host(((layer, state.export_page_group(seq, layer)) for layer in layers), state.device)
            self.costs.out.add(nbytes, time.perf_counter() - started)
        except Exception:
            logger.exception("the state of %d tokens could not be kept; it will be computed again", owner.computed)
            return False
        copy = HostCopy(metadata, groups, owner.computed, nbytes, stops_of(state, seq))
        self._enter(owner, copy, owner.computed, waiting=waiting)
        self._swaps_out.inc()
        self._bytes_out.inc(nbytes)
        return True

    def _make_room(self, nbytes: int) -> bool:
        """Forget copies of idle sessions, oldest first, to make room; return whether there is."""
        if self.used + nbytes <= self.capacity:
            return True
        needed = {id(entry.copy): entry.copy.nbytes for entry in self._entries.values() if entry.waiting}
        if sum(needed.values()) + nbytes > self.capacity:
            return False
        for owner in [owner for owner, entry in self._entries.items() if not entry.waiting]:
            if self.used + nbytes > self.capacity:
                self.discard(owner)
        return True

    def beats(self, owner: Branch, cached: int, limit: int) -> bool:
        """See ``Tier``."""
        entry, length = self._entries.get(owner), self.reach(owner, limit)
        if entry is None or length <= cached:
            return False
        return self.worth_moving(length - cached, entry.copy.nbytes, there=False)

    def restore(self, owner: Branch, limit: int) -> None:
        """See ``Tier``."""
        entry = self._entries.get(owner)
        if entry is None:
            return
        copy, length = entry.copy, self.reach(owner, limit)
        self.discard(owner)
        empty = owner.seq
        if empty is None or owner.computed or length < 1:
            return
        seq = self.runner.new_seq()
        started = time.perf_counter()
        try:
            self._bring_back(seq, copy, length)
        except ResourceExhausted:
            # The whole copy takes more pages than the part that is left of it.
            logger.debug("no room for the state of %d tokens; %d are computed again", copy.length, length)
            return
        except Exception:
            logger.exception("the state of %d tokens did not come back; they are computed again", length)
            return
        self.costs.back.add(copy.nbytes, time.perf_counter() - started)
        self._swaps_in.inc()
        self._bytes_in.inc(copy.nbytes)
        owner.seq, owner.computed = seq, length
        self.runner.execute(Step(edits=(Remove(empty),)))

    def _bring_back(self, seq: SeqId, copy: HostCopy, length: int) -> None:
        """Import a copy and cut it to ``length``, where it can be cut. A failure leaves nothing."""
        state = self.runner.state
        metadata, groups = self._fitting(copy, length)
        state.prepare_import(seq, metadata)
        try:
            for group, tensors in groups.items():
                state.import_page_group(seq, group, tensors)
            state.finish_import(seq)
            if length < copy.length:
                self.runner.execute(Step(edits=(Pop(seq, copy.length - length),)))
        except BaseException:
            state.remove_sequence(seq)
            raise

    def _fitting(self, copy: HostCopy, length: int) -> tuple[dict[str, Any], dict[int, dict[str, Tensor]]]:
        """Return the copy without recurrent states behind ``length``, or that find no room."""
        state, kept = self.runner.state, list(copy.metadata["kept_recurrent_positions"])
        if not kept:
            return dict(copy.metadata), copy.groups
        # The present state and the next forward take a slot each. A cut needs the state there.
        room = max(state.num_available_states - 2, int(length < copy.length))
        taken = [position for position in kept if position <= length][-room:] if room else []
        gone = {str(position) for position in set(kept) - set(taken)}

        def stays(name: str) -> bool:
            return name.partition("@")[2] not in gone

        metadata = dict(copy.metadata)
        metadata["kept_recurrent_positions"] = taken
        metadata["groups"] = [
            {**group, "tensors": {name: one for name, one in group["tensors"].items() if stays(name)}}
            for group in metadata["groups"]
        ]
        groups = {
            layer: {name: tensor for name, tensor in tensors.items() if stays(name)}
            for layer, tensors in copy.groups.items()
        }
        return metadata, groups


def shared_part(state: ModelState, seq: SeqId) -> float:
    """Return the part of a sequence that others hold too, by its pages; without any, by states."""
    found = state.sequence_pages(seq)
    if not found.held:
        found = state.sequence_states(seq)
    return found.shared / found.held if found.held else 0.0


def stops_of(state: ModelState, seq: SeqId) -> tuple[range, ...]:
    """Return the lengths that an export of a sequence can be cut to. Of recurrent states only the
    present one and checkpoints are exported."""
    found = state.reachable(seq)
    if not state.recurrent_ids:
        return tuple(found)
    exported = sorted({0, *state.checkpoints(seq), state.sequence_length(seq)})
    return tuple(range(one, one + 1) for one in exported if any(one in part for part in found))


def export_bytes(metadata: Mapping[str, Any]) -> int:
    """Return the bytes of all tensors of an export."""
    return sum(int(tensor["bytes"]) for group in metadata["groups"] for tensor in group["tensors"].values())


def to_host(groups: Iterable[tuple[int, Mapping[str, Tensor]]], device: torch.device) -> dict[int, dict[str, Tensor]]:
    """Return layers with their tensors in host memory. From a GPU they come through pinned memory;
    a CPU's tensors are returned as they are."""
    if device.type == "cpu":
        return {layer: dict(tensors) for layer, tensors in groups}
    found: dict[int, dict[str, Tensor]] = {}
    for layer, tensors in groups:
        found[layer] = {}
        for name, tensor in tensors.items():
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            found[layer][name] = kept.copy_(tensor, non_blocking=True)
    torch.cuda.synchronize(device)
    return found
