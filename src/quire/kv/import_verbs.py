"""The import verbs of the contract (``contracts.kv_state``): whole layers, or pieces of their rows.

An importing sequence has all of its pages. Those that it shares with another one are full and never
written; the others are its own until the import ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import DataLoss, FailedPrecondition, InvalidArgument, QuireError, ResourceExhausted
from quire.base.types import SeqId
from quire.contracts.kv_state import RowPieces, TensorPlan
from quire.kv.exchange import (
    checksum,
    counts_of,
    describe,
    get_layout,
    group_plan,
    groups_of,
    require_whole,
    rows_by_layer,
)
from quire.kv.forward_need import SlotRange, pages_for
from quire.kv.imports import Import
from quire.kv.metadata_checks import holes_of, promised_checksums, ranges_of, validate, window_of
from quire.kv.parts import StateParts
from quire.kv.sequences import check_id, check_integer
from quire.kv.stored_rows import require_held
from quire.kv.windows import describe_ranges, holds


def plan_import(state: StateParts, metadata: Mapping[str, Any]) -> dict[int, dict[str, TensorPlan]]:
    validate(state, get_layout(state), metadata)
    return groups_of(state, counts_of(rows_by_layer(metadata)), metadata["kept_recurrent_positions"])


def import_metadata(state: StateParts, length: int, *, kept: Sequence[int] = ()) -> dict[str, Any]:
    length = check_integer(length, "import_metadata: length", 0)
    lows = [0 if one.window is None else max(0, length + 1 - one.window) for one in state.paged.classes]
    held = [[range(low, length)] if low < length else [] for low in lows]
    found = describe(
        state, length, held, list(kept), {} if state.encoders is None else dict.fromkeys(state.encoders.specs, 0)
    )
    validate(state, get_layout(state), found)
    return found


def import_need(state: StateParts, metadata: Mapping[str, Any], *, shared: int = 0) -> list[int]:
    validate(state, get_layout(state), metadata)
    _check_shared(state, metadata, shared, "import_need")
    window, kept = window_of(metadata), metadata["kept_recurrent_positions"]
    sink = window.sink if window else 0
    pages = state.sequences.import_pages(metadata["length"], holes_of(metadata), sink, shared)
    return [*(found.size for found in pages), *([] if state.recurrent is None else [1 + len(kept)])]


def prepare_import(
    state: StateParts, seq_id: SeqId, metadata: Mapping[str, Any], *, parent: SeqId | None = None, shared: int = 0
) -> None:
    check_id(seq_id)
    if seq_id in state.sequences:
        raise InvalidArgument(f"prepare_import: sequence {seq_id} exists already; a new id is needed")
    validate(state, get_layout(state), metadata)
    whole, kept = counts_of(rows_by_layer(metadata)), list(metadata["kept_recurrent_positions"])
    checksums = promised_checksums(groups_of(state, whole, kept), metadata.get("groups"))
    keeping = _check_shared(state, metadata, shared, "prepare_import")
    if summed := [layer for layer, _ in checksums if shared and layer in keeping]:
        raise InvalidArgument(
            f"prepare_import: the metadata has checksums of all rows of layers {sorted(set(summed))}, of which {shared} are "
            "shared; give it without"
        )
    rows = rows_by_layer(metadata, dict.fromkeys(keeping, shared))
    missing = {layer: list(parts) for layer, parts in rows.items() if parts}
    missing |= {layer: [] for layer in state.recurrent_ids}
    if state.division is not None and state.division.peers is None:
        missing = {}  # Rank 0 keeps the account, and begins no forward before all has come.
    started = Import(rows, checksums, missing)
    length, window, holes = int(metadata["length"]), window_of(metadata), holes_of(metadata)
    encoders = (
        {} if state.encoders is None else {layer: whole[layer] for layer in state.encoders.specs if layer in whole}
    )
    if parent is not None or shared:
        _check_parent(state, parent, shared)
    state.sequences.require_closed("prepare_import")
    if state.encoders is not None:
        state.encoders.table.require_room(seq_id, max(encoders.values(), default=0), "prepare_import")
    if state.recurrent is not None and (needed := 1 + len(kept)) > (free := state.recurrent.table.num_available):
        raise ResourceExhausted(f"prepare_import: needs {needed} states, {free} free")
    slid = bool(metadata["evicted"])
    state.sequences.reserve_import(seq_id, length, holes, window, slid=slid, parent_id=parent, shared=shared)
    if state.recurrent is not None:
        state.recurrent.table.import_states(seq_id, length, kept)
    if state.encoders is not None and encoders:
        state.encoders.table.own(seq_id, max(encoders.values()))
        for layer, count in encoders.items():
            state.encoders.table.note(seq_id, layer, count)
    for index, one in enumerate(state.paged.classes):
        # The rest of a page held in part is never written, and a kernel reads whole pages.
        one.storage.blank(_rows_between(state, seq_id, index, length))
    started.pages += [table.pages.copy() for table in state.sequences.get(seq_id).tables]
    if state.link is not None:
        started.ready = state.link.computed()
    state.imports[seq_id] = started


def _check_shared(state: StateParts, metadata: Mapping[str, Any], shared: int, verb: str) -> list[int]:
    """Return the layers that keep all tokens; ``InvalidArgument`` unless such metadata, which
    were validated, let their first ``shared`` tokens be another sequence's."""
    length, size = metadata["length"], state.paged.page_size
    if not 0 <= shared <= length or shared % size:
        raise InvalidArgument(f"{verb}: {shared} shared tokens; a multiple of {size} in 0..{length} is needed")
    keeping: list[int] = []
    for one, item in zip(state.paged.classes, metadata["held"], strict=True):
        if one.window is None:
            keeping += item["layers"]
            ranges = ranges_of(item)
            if shared and not holds(ranges, range(shared)):
                raise InvalidArgument(
                    f"{verb}: {shared} shared tokens, and the metadata hold positions {describe_ranges(ranges)} of layers {item['layers']}"
                )
    return keeping


def _check_parent(state: StateParts, parent: SeqId | None, shared: int) -> None:
    """Raise each refusal of sharing the first ``shared`` tokens of a sequence."""
    verb = "prepare_import"
    if parent is None:
        raise InvalidArgument(f"{verb}: {shared} shared tokens and no parent; give the sequence that has them")
    if shared > (length := state.sequences.get(parent).length):
        raise InvalidArgument(f"{verb}: {shared} shared tokens of sequence {parent}, whose length is {length}")
    require_whole(state, parent, verb)
    for index, one in enumerate(state.paged.classes):
        if one.window is None:
            require_held(state, parent, index, [range(shared)], verb)


def import_page_group(state: StateParts, seq_id: SeqId, group: int, tensors: Mapping[str, Tensor]) -> None:
    part, verb = state.recurrent, "import_page_group"
    started = state.imports.get(seq_id)
    if part is not None and group in part.specs:
        state.sequences.get(seq_id)
        plan = part.group_plan(group, part.table.kept(seq_id))
    else:
        state.spec(group)
        state.sequences.get(seq_id)
        if started and group not in started.rows:
            raise InvalidArgument(
                f"import_page_group: tensors {sorted(tensors)} of layer {group} found, none expected: the metadata says that its "
                "encoder rows are not set"
            )
        # Only an import says how many rows there must be; else the given number is taken.
        given = next((tensor.shape[0] for tensor in tensors.values() if tensor.dim()), 0)
        rows = sum(map(len, started.rows[group])) if started else given
        plan = group_plan(state.whole_specs[group], rows, state.paged.format)
    _check_tensors(verb, group, tensors, plan)
    with _writing(state, started, seq_id, verb) as found:
        expected = found.rows.get(group)  # None: a recurrent layer; []: all is shared.
        if found.missing.get(group, []) != (expected or []) or (group not in found.missing and expected != []):
            raise FailedPrecondition(f"import_page_group: layer {group} was imported already, at least in part")
        for name, tensor in tensors.items():
            promised = found.checksums.get((group, name), "")
            if promised and (given_sum := checksum(tensor)) != promised:
                raise DataLoss(
                    f"import_page_group: {name} of layer {group} has checksum {given_sum}, expected {promised}"
                )
        if part is not None and expected is None:
            _load(state, found, group, partial(part.import_group, seq_id, group), tensors)
        elif state.encoders is not None and group in state.encoders.specs:
            state.encoders.fill(seq_id, group, tensors)
        else:
            _write(state, found, seq_id, group, expected or [], _Whole(tensors))
        found.missing.pop(group, None)


def import_rows(
    state: StateParts, seq_id: SeqId, group: int, start: int, rows: Mapping[str, Tensor] | RowPieces
) -> None:
    verb = "import_rows"
    start = check_integer(start, f"{verb}: start", 0)
    state.rows_layer(group, verb)
    pieces = _Whole(rows) if isinstance(rows, Mapping) else rows
    count = sum(pieces.counts)
    _check_tensors(verb, group, pieces.plan, group_plan(state.whole_specs[group], count, state.paged.format))
    part = range(start, start + count)
    started = state.imports.get(seq_id)
    expected = started.rows[group] if started else [part]
    if not part or not holds(expected, part):
        raise InvalidArgument(
            f"{verb}: rows {describe_ranges([part])} of layer {group}; one or more of a range of {describe_ranges(expected)} "
            "are expected"
        )
    state.sequences.get(seq_id)
    with _writing(state, started, seq_id, verb) as found:
        if any(layer == group for layer, _ in found.checksums):
            raise FailedPrecondition(
                f"{verb}: the metadata has checksums of all rows of layer {group}; give them at once, by import_page_group"
            )
        if not holds(found.missing.get(group, []), part):
            raise FailedPrecondition(
                f"{verb}: rows {describe_ranges([part])} of layer {group} were imported already, at least in part; missing: "
                f"{describe_ranges(found.missing.get(group, []))}"
            )
        _write(state, found, seq_id, group, [part], pieces)
        found.has_come(group, part)


@contextmanager
def _writing(state: StateParts, started: Import | None, seq_id: SeqId, verb: str) -> Iterator[Import]:
    """Lock the import that is under way, so that its pages stay while it is written.
    ``FailedPrecondition`` if none is, or if it may not be written while a forward is open."""
    if not state.sequences.get(seq_id).loading:
        state.sequences.require_closed(verb)
    if started is None:
        raise _not_importing(seq_id, verb)
    with started.lock:
        if state.imports.get(seq_id) is not started:  # It was removed meanwhile.
            raise _not_importing(seq_id, verb)
        yield started


def _write(
    state: StateParts, started: Import, seq_id: SeqId, group: int, parts: list[range], pieces: RowPieces
) -> None:
    """Write ``pieces`` to the positions of ``parts``, in all ranks."""
    layer = state.layer(group)
    storage = state.paged.classes[layer.class_index].storage
    slots = started.slots(layer.class_index, parts, state.paged.page_size)
    if state.division is None and pieces.write(storage.planes[layer.index], slots):
        return
    breaks = np.flatnonzero(np.diff(slots) != 1).tolist()
    """The rows behind which the next slot is not the next one."""
    stop = 0
    for number, count in enumerate(pieces.counts):
        start, stop = stop, stop + count
        planes = state.own_planes(seq_id, group, slots[start:stop], pieces.piece(number))
        put: Callable[[Mapping[str, Tensor]], None]
        if start < stop and bisect_left(breaks, start) == bisect_left(breaks, stop - 1):
            put = partial(storage.put_run, layer.index, int(slots[start]))
        else:
            put = partial(storage.put, layer.index, slots[start:stop])
        _load(state, started, group, put, planes)


def _load(
    state: StateParts,
    started: Import,
    group: int,
    write: Callable[[Mapping[str, Tensor]], None],
    tensors: Mapping[str, Tensor],
) -> None:
    """Let ``write`` have tensors of a layer on the device: at once, or for host memory beside
    what the device computes, from which forwards and the import's end wait for it."""
    if state.link is None or not all(tensor.is_cpu for tensor in tensors.values()):
        write({name: tensor.to(state.device) for name, tensor in tensors.items()})
        return
    if started.ready is not None:
        state.link.side_waits(started.ready)
    names = list(tensors)
    state.link.load(list(tensors.values()), lambda *copies: write(dict(zip(names, copies, strict=True))))
    started.arrived[group] = state.link.loaded()


def pending_layers(state: StateParts, seq_id: SeqId) -> list[int]:
    state.sequences.get(seq_id)
    return sorted(started.missing) if (started := state.imports.get(seq_id)) else []


def publish_import(state: StateParts, seq_id: SeqId) -> None:
    sequence = state.sequences.get(seq_id)
    state.sequences.require_closed("publish_import")
    if seq_id not in state.imports:
        raise _not_importing(seq_id, "publish_import")
    if sequence.loading:
        raise FailedPrecondition(f"publish_import: the tokens of sequence {seq_id} count already")
    state.sequences.publish_import(seq_id)


def finish_import(state: StateParts, seq_id: SeqId) -> None:
    state.sequences.get(seq_id)
    state.sequences.require_closed("finish_import")
    if seq_id not in state.imports:
        raise _not_importing(seq_id, "finish_import")
    if missing := pending_layers(state, seq_id):
        raise FailedPrecondition(f"finish_import: layers {missing} of sequence {seq_id} are missing")
    end_import(state, seq_id)
    state.sequences.finish_import(seq_id)
    if state.recurrent is not None:
        state.recurrent.table.finish_import(seq_id)


def check_imports(state: StateParts) -> None:
    """Check that rows which have not come go to pages that nothing else holds."""
    importing = {
        seq for seq in state.sequences.ids if (one := state.sequences.get(seq)).loading or one.reserved is not None
    }
    if importing != set(state.imports):
        raise QuireError(f"sequences {sorted(importing)} are importing, and imports of {sorted(state.imports)} noted")
    for seq_id, started in state.imports.items():
        with started.lock:  # Another thread may be writing rows.
            missing = dict(started.missing)
        for layer in missing.keys() & state.paged.specs.keys():
            index = state.layer(layer).class_index
            own, pool = started.pages[index], state.sequences.pools[index]
            table = state.sequences.get(seq_id).tables[index].pages[: own.size]
            for part in missing[layer]:
                pages = slice(part.start // state.paged.page_size, pages_for(part.stop, state.paged.page_size))
                if (own[pages] != table[pages]).any() or (pool.references[own[pages]] != 1).any():
                    raise QuireError(
                        f"rows {describe_ranges([part])} of sequence {seq_id}, which is being imported, go to pages of others"
                    )


def end_import(state: StateParts, seq_id: SeqId) -> None:
    """Forget an import, once what is being written is done: its pages may go, or be read."""
    if (started := state.imports.pop(seq_id, None)) is not None:
        with started.lock:
            if state.link is not None:
                state.link.compute_waits(state.link.loaded())


def _rows_between(state: StateParts, seq_id: SeqId, index: int, length: int) -> list[SlotRange]:
    """Return the pages, in one class, in which an import leaves rows below the length unwritten."""
    size, pages = state.paged.page_size, state.sequences.get(seq_id).tables[index].pages
    lacking = np.zeros(pages.size * size, dtype=np.bool_)
    lacking[:length] = True
    for part in state.sequences.held(seq_id, index):
        lacking[part.start : part.stop] = False
    partly = np.flatnonzero(lacking.reshape(-1, size).any(1) & (pages >= 0))
    return [SlotRange(int(pages[page]) * size, size) for page in partly]


def _not_importing(seq_id: SeqId, verb: str) -> FailedPrecondition:
    return FailedPrecondition(f"{verb}: sequence {seq_id} is not being imported; call prepare_import first")


class _Whole:
    """Rows that are one piece: ``contracts.kv_state.RowPieces``."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.plan = {name: TensorPlan(tuple(one.shape), one.dtype) for name, one in tensors.items()}
        self.counts = (next((tensor.shape[0] for tensor in tensors.values() if tensor.dim()), 0),)

    def piece(self, number: int) -> Mapping[str, Tensor]:
        return self._tensors

    def write(self, targets: Mapping[str, Tensor], slots_N: NDArray[np.int64]) -> bool:
        return False


def _check_tensors(
    verb: str, group: int, tensors: Mapping[str, Tensor] | Mapping[str, TensorPlan], plan: Mapping[str, TensorPlan]
) -> None:
    """Raise ``InvalidArgument`` unless the tensors of a layer are as planned."""
    if tensors.keys() != plan.keys():
        raise InvalidArgument(f"{verb}: tensors {sorted(tensors)} of layer {group} found, {sorted(plan)} expected")
    for name, one in plan.items():
        given = tensors[name]
        if given.shape != one.shape or given.dtype != one.dtype:
            raise InvalidArgument(
                f"{verb}: {name} of layer {group} is {given.dtype} {tuple(given.shape)}, expected {one.dtype} {one.shape}"
            )
