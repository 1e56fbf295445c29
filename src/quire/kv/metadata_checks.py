"""Checks of a sequence's metadata before it is imported: does it fit the layers, is it complete.

All errors are ``InvalidArgument`` and name what was found and what is expected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.base.errors import InvalidArgument
from quire.contracts.kv_state import TensorPlan
from quire.kv.parts import StateParts
from quire.kv.windows import NO_HOLE, Hole, Window, describe_ranges, held, holds, visibility
from quire.statefile.schema import FORMAT_VERSION, Extent, Fault, GroupOfTensors, fitted


def hash_of(layout: Mapping[str, Any]) -> str:
    """Return the hash of the layout (``get_layout``): 32 hex digits."""
    text = json.dumps(layout, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def window_of(given: Mapping[str, Any]) -> Window | None:
    """Return the sequence's window; ``InvalidArgument`` for an impossible one."""
    size, sink, eviction = given.get("window"), given["sink"], given["eviction"]
    if size is None:
        if sink != 0 or eviction != "token":
            raise InvalidArgument(
                f"import: sink {sink!r} and eviction {eviction!r} without a window found, 0 and 'token' expected"
            )
        return None
    if sink >= size:
        raise InvalidArgument(f"import: window {size!r}, sink {sink!r} found; 0 <= sink < window expected")
    return Window(size, sink, eviction)


def ranges_of(one: Mapping[str, Any]) -> list[range]:
    """Return the ``ranges`` of one item of ``held``."""
    return [range(start, stop) for start, stop in one["ranges"]]


def holes_of(given: Mapping[str, Any]) -> list[Hole]:
    """Return the holes of each layer class, by metadata that were validated."""
    window = window_of(given)
    return [hole_of(ranges_of(one), given["length"], window.sink if window else 0) for one in given["held"]]


def hole_of(ranges: list[range], length: int, sink: int) -> Hole:
    """Return the hole beside these held ranges; ``InvalidArgument`` if no window leaves them."""
    if ranges == held(length, sink, NO_HOLE):
        return NO_HOLE
    first = ranges[0].start if ranges else min(sink, length)
    if len(ranges) == 2:
        found = Hole(first, ranges[1].start)
    elif not ranges or ranges[0].stop < length:
        # The hole reaches up to the end: the next token sees nothing behind the sink.
        found = Hole(first, length)
    elif first <= sink:
        found = Hole(first, 0)
    else:
        found = Hole(sink, first)
    if held(length, sink, found) != ranges:
        raise InvalidArgument(
            f"import: positions {describe_ranges(ranges)} of {length} are held, which no window with sink {sink} leaves"
        )
    return found


def validate(state: StateParts, layout: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` for the first disagreement. ``layout``: as of ``get_layout``."""
    if given.get("format_version") != FORMAT_VERSION:
        raise InvalidArgument(
            f"import: format version {given.get('format_version')!r} found, {FORMAT_VERSION} expected"
        )
    check_layout(layout, given, "import")
    if given.get("layout_hash") != hash_of(layout):
        raise InvalidArgument(f"import: layout {given.get('layout_hash')!r} found, {hash_of(layout)!r} expected")
    try:
        fitted({name: given[name] for name in Extent.__struct_fields__ if name in given}, Extent, "")
    except Fault as fault:
        raise InvalidArgument(f"import: {fault}") from None
    length, kept = given["length"], given["kept_recurrent_positions"]
    _validate_windows(state, given, length)
    expected = "[]" if state.recurrent is None else f"ascending positions in 1..{length}"
    ascends = all(low < high for low, high in zip([0, *kept], [*kept, length + 1], strict=True))
    if not ascends or (kept and state.recurrent is None):
        raise InvalidArgument(f"import: kept_recurrent_positions {kept!r} found, {expected} expected")
    _validate_encoders(state, given)


def check_layout(layout: Mapping[str, Any], given: object, verb: str) -> None:
    """Raise ``InvalidArgument`` for the first disagreement of two layouts (``get_layout``)."""
    found = given if isinstance(given, Mapping) else {}
    layers, mine = found.get("layers"), layout["layers"]
    if not isinstance(layers, list) or len(layers) != len(mine):
        count = len(layers) if isinstance(layers, list) else "no"
        raise InvalidArgument(f"{verb}: {count} layers found, {len(mine)} expected")
    for index, (found_layer, expected_layer) in enumerate(zip(layers, mine, strict=True)):
        if found_layer != expected_layer:
            for name, expected in {"format": None, **expected_layer}.items():
                value = found_layer.get(name) if isinstance(found_layer, dict) else None
                if value != expected:
                    raise InvalidArgument(f"{verb}: layer {index} has {name} {value!r}, expected {expected!r}")
            raise InvalidArgument(
                f"{verb}: layer {index} has unknown properties {sorted(set(found_layer) - set(expected_layer))}"
            )
    for name in ("first_layer", "layer_ids", "recurrent"):
        if found.get(name) != layout.get(name):
            raise InvalidArgument(
                f"{verb}: layout with {name} {found.get(name)!r} found, {layout.get(name)!r} expected"
            )


def _validate_encoders(state: StateParts, given: Mapping[str, Any]) -> None:
    """Check that each cross layer has a number of rows or none."""
    found = given.get("cross")
    if state.encoders is None:
        if found is not None:
            raise InvalidArgument(f"import: cross {found!r} found, and this state has no cross layers")
        return
    layers = list(state.encoders.specs)
    if [one["layer"] for one in found or ()] != layers:
        raise InvalidArgument(
            f"import: cross {found!r} found; layer and rows, a number above 0 or null, of each of the layers {layers} expected"
        )


def _validate_windows(state: StateParts, given: Mapping[str, Any], length: int) -> None:
    """Check that all positions are held that a continuation needs."""
    window, evicted = window_of(given), given["evicted"]
    accepted = [0] if window is None else [0, max(0, length - window.size)]
    if evicted not in accepted:
        raise InvalidArgument(f"import: evicted {evicted!r} found, one of {accepted} expected")
    items, mine = given["held"], [list(one.layers) for one in state.paged.classes]
    if [one["layers"] for one in items] != mine:
        raise InvalidArgument(f"import: held {items!r} found; one item for each of the layers {mine} expected")
    sink = window.sink if window else 0
    for one, item in zip(state.paged.classes, items, strict=True):
        ranges = ranges_of(item)
        hole = hole_of(ranges, length, sink)
        if hole.sink and one.window is None:
            raise InvalidArgument(f"import: positions {describe_ranges(ranges)} are held, those from 0 expected too")
        seen = visibility(np.array([length]), length, window, one.window)
        needed = [range(int(seen.lows_T[0]), length)]
        if seen.sinks_T2 is not None:
            needed.append(range(*seen.sinks_T2[0].tolist()))
        for part in needed:
            if part and not holds(ranges, part):
                raise InvalidArgument(
                    f"import: positions {describe_ranges(ranges)} are held, and the next token sees {describe_ranges([part])}"
                )


def promised_checksums(plans: Mapping[int, Mapping[str, TensorPlan]], groups: object) -> dict[tuple[int, str], str]:
    """Return checksums by layer and name; ``InvalidArgument`` unless groups are as planned."""
    try:
        entries = fitted([] if groups is None else groups, list[GroupOfTensors], "groups")
    except Fault as fault:
        raise InvalidArgument(f"import: {fault}") from None
    if (found := sorted(one.group for one in entries)) != (wanted := list(plans)):
        raise InvalidArgument(f"import: groups {found} found, {wanted} expected")
    checksums: dict[tuple[int, str], str] = {}
    for layer, tensors in ((one.group, one.tensors) for one in entries):
        shapes = {name: list(one.shape) for name, one in plans[layer].items()}
        if set(tensors) != set(shapes):
            raise InvalidArgument(
                f"import: tensors {sorted(tensors)} of layer {layer} found, {sorted(shapes)} expected"
            )
        for name, shape in shapes.items():
            if tensors[name].shape != shape:
                raise InvalidArgument(
                    f"import: {name} of layer {layer} is of shape {tensors[name].shape}, {shape} expected"
                )
            if tensors[name].checksum:
                checksums[layer, name] = tensors[name].checksum
    return checksums
