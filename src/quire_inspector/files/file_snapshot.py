"""``file_snapshot``: what a state file holds, as a ``Snapshot``. Its tensors stay mapped, and are
read when norms of them are asked for.

A file stores rows and no pages, so its rows are cut into pages of ``PAGE`` positions to be seen.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.adapters.keys import NO_SALT, AdapterKey
from quire.base.errors import DataLoss
from quire.base.token_history import UNKNOWN
from quire.contracts.token_views import NormsView
from quire.contracts.views import BranchKind, BranchView, HeldRows, PageHolder, TiersView, TierView
from quire.kv.windows import Hole, Window, intersection, reachable
from quire.statefile.container import StateFile, read_state
from quire.statefile.schema import check_metadata
from quire_inspector.files.known_tokenizers import tokenizer_of
from quire_inspector.files.snapshot import FREE, HELD, Snapshot, StoredBranch, StoredPage, StoredPool, require_layer
from quire_inspector.files.stored_norms import NormParts
from quire_inspector.views.token_texts import TextReader

PAGE = 16
"""Positions of a page."""


def file_snapshot(path: Path) -> Snapshot:
    """Read a state file of kind ``session``, ``kv_cache`` or ``kv_cache_with_positions``, with its
    checksums. Raise errors of ``read_state``, and ``InvalidArgument`` for another kind of file."""
    file = read_state(path)
    check_metadata(file.metadata)
    metadata: Mapping[str, Any] = file.metadata
    rows = _rows(metadata, path)
    whole = next((row.sequence for row in rows if row.sequence), None)
    classes = [] if whole is None else _classes(whole)
    states = () if whole is None else tuple(one["layer"] for one in whole.get("recurrent", ()))
    pools = [_token_pool(file, one, number, rows) for number, one in enumerate(classes)]
    if states:
        pools.append(_state_pool(file, states, rows))
    layers = () if whole is None else tuple(_layers(whole, classes, states))
    tokenizer = tokenizer_of(metadata["model"])
    size = os.stat(path).st_size
    about = {"kind": "file", "label": str(path), "durable": True, "capacity": None, "pinned": None}
    return Snapshot(
        source="file",
        model={
            "name": path.name,
            **metadata["model"],
            "kind": metadata["kind"],
            "max_length": None,
            "vocab_size": None if tokenizer is None else tokenizer.vocab_size,
            "dtype": None if whole is None else ", ".join(sorted({one["dtype"] for one in whole["layers"]})) or None,
            "tokenizer": tokenizer is not None,
        },
        layers=layers,
        branches=tuple(row.branch(classes, pools) for row in rows),
        pools=tuple(pools),
        tiers=TiersView(tiers=(TierView(objects=len(file.names), num_bytes=size, **about),)),  # type: ignore[arg-type]
        texts=TextReader(tokenizer),
        norms=partial(_norms, file, {row.id: row for row in rows}, {one["id"]: one["kind"] for one in layers}),
    )


async def _norms(
    file: StateFile, rows: Mapping[str, _Row], kinds: Mapping[int, str], branch: StoredBranch, layer: int
) -> NormsView:
    require_layer(kinds, layer)
    row = rows[branch.view.id]

    def read() -> NormsView:
        parts = NormParts(layer)
        for one in row.sequence.get("held", ()):
            if layer in one["layers"]:
                parts.add_rows(file, row.prefix, [range(*part) for part in one["ranges"]], row.sequence)
        parts.add_states(file, row.prefix, row.computed)
        return parts.view(kinds[layer], len(row.ids))

    return await asyncio.to_thread(read)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Row:
    """A sequence of the file."""

    kind: BranchKind
    number: int
    name: str
    prefix: str
    """Of the names of its tensors."""
    ids: NDArray[np.int64]
    sequence: Mapping[str, Any]
    """As ``docs/statefile.md`` describes it; empty if no token was computed."""
    exact: bool
    modified: bool
    adapters: Sequence[Sequence[Any]]

    @property
    def id(self) -> str:
        return f"{self.kind}:{self.number}"

    @property
    def computed(self) -> int:
        return int(self.sequence.get("length", 0))

    @property
    def kept(self) -> list[int]:
        """Positions of its recurrent states, the present one last."""
        if not self.sequence.get("recurrent"):
            return []
        return sorted({*self.sequence["kept_recurrent_positions"], self.computed})

    def ranges(self, pool: int) -> list[range]:
        """Return the positions whose rows a class of layers has."""
        held = self.sequence.get("held", ())
        return [range(*one) for one in held[pool]["ranges"] if one[0] < one[1]] if pool < len(held) else []

    def branch(self, classes: Sequence[_Class], pools: Sequence[StoredPool]) -> StoredBranch:
        window = self.sequence.get("window")
        held = [HeldRows(pool=n, ranges=tuple(self.ranges(n))) for n in range(len(classes))]
        mine = [
            page for pool in pools for page in pool.pages if page.owner != FREE and page.holders[0].branch == self.id
        ]
        adapter = self.adapters[-1][1] if self.adapters else None
        return StoredBranch(
            view=BranchView(
                id=self.id,
                kind=self.kind,
                name=self.name,
                num_tokens=len(self.ids),
                computed=self.computed,
                modified=self.modified,
                exact=self.exact,
                adapter=adapter,
                pages=len(mine),
                window=None if window is None else (window, self.sequence["sink"]),
                reachable=tuple(self._reachable(classes)),
                checkpoints=tuple(self.kept),
                held=tuple(held),
            ),
            ids=self.ids,
            key=AdapterKey(NO_SALT, tuple((start, name) for start, name in self.adapters)) if adapter else NO_SALT,
        )

    def _reachable(self, classes: Sequence[_Class]) -> list[range]:
        """Return the positions that a rewind can reach; compare ``State.reachable``."""
        if not self.sequence:
            return [range(1)]
        size, sink = self.sequence["window"], self.sequence["sink"]
        window = None if size is None else Window(size, sink, self.sequence["eviction"])
        found = [range(self.computed + 1)]
        for number, one in enumerate(classes):
            hole = _hole(self.ranges(number), sink, self.computed)
            found = intersection(found, reachable(self.computed, window, one.window, hole))
        if not self.kept:
            return found
        # From each state that is kept on, up to the next one.
        kept = [*dict.fromkeys((0, *self.kept))]
        parts = [
            range(position, following)
            for position, following in zip(kept, [*kept[1:], self.computed + 1], strict=True)
            if any(position in part for part in found)
        ]
        joined = parts[:1]
        for part in parts[1:]:
            joined[-1:] = [range(joined[-1].start, part.stop)] if joined[-1].stop == part.start else [joined[-1], part]
        return joined


@dataclass(frozen=True, slots=True)
class _Class:
    """Layers that hold rows of the same positions."""

    layers: tuple[int, ...]
    window: int | None


def _rows(metadata: Mapping[str, Any], path: Path) -> list[_Row]:
    if metadata["kind"] == "session":
        return [
            _Row(
                kind="session",
                number=0,
                name=path.stem,
                prefix="",
                ids=np.array(metadata["tokens"], dtype=np.int64),
                sequence=metadata["sequence"] or {},
                exact=metadata["exact"],
                modified=metadata["modified"],
                adapters=metadata["adapters"],
            )
        ]
    count = len(metadata["rows"])
    origins = {name: metadata.get(name) or [usual] * count for name, usual in (("exact", True), ("modified", False))}
    adapters = metadata["adapters"] or [[]] * count
    listed = (metadata["tokens"], origins["exact"], origins["modified"], adapters)
    if any(len(one) != count for one in listed):
        raise DataLoss(f"state file {str(path)!r} holds {count} sequences, and tokens or origins of another number")
    return [
        _Row(
            kind="cache",
            number=number,
            name=f"row {number}",
            prefix=f"row.{number}.",
            # Ids that are not known have places all the same.
            ids=np.array([UNKNOWN] * sequence["length"] if tokens is None else tokens, dtype=np.int64),
            sequence=sequence,
            exact=exact,
            modified=modified,
            adapters=runs,
        )
        for number, (sequence, tokens, exact, modified, runs) in enumerate(zip(metadata["rows"], *listed, strict=True))
    ]


def _ids_of(sequence: Mapping[str, Any]) -> list[int]:
    """Return the ids of the layers with attention."""
    first = sequence["first_layer"]
    return list(sequence.get("layer_ids") or range(first, first + len(sequence["layers"])))


def _classes(sequence: Mapping[str, Any]) -> list[_Class]:
    windows = dict(zip(_ids_of(sequence), (one["window"] for one in sequence["layers"]), strict=True))
    return [_Class(tuple(one["layers"]), windows.get(one["layers"][0])) for one in sequence["held"] if one["layers"]]


def _hole(ranges: Sequence[range], sink: int, length: int) -> Hole:
    """Return the missing part of a sequence; the inverse of ``kv.windows.held``."""
    if not ranges:
        return Hole(min(sink, length), length)
    if len(ranges) == 1 and ranges[0].start <= sink:
        return Hole(sink=ranges[0].start)
    first = ranges[0].start if len(ranges) > 1 else sink
    return Hole(sink=first, window=ranges[-1].start)


def _token_pool(file: StateFile, one: _Class, number: int, rows: Sequence[_Row]) -> StoredPool:
    pages: list[StoredPage] = []
    for row in rows:
        held = row.ranges(number)
        for start in range(0, row.computed, PAGE):
            whole = range(start, min(start + PAGE, row.computed))
            parts = intersection([whole], held)
            shown = whole if not parts else range(parts[0].start, parts[-1].stop)
            holder = PageHolder(branch=row.id, start=shown.start, stop=shown.stop)
            pages.append(StoredPage(owner=HELD if parts else FREE, holders=(holder,), references=len(parts) and 1))
    names = {f"{row.prefix}layer.{layer}." for row in rows for layer in one.layers}
    token_bytes: dict[str, int] = {
        name.split("layer.")[1]: spec.nbytes // spec.shape[0]
        for name, spec in file.specs.items()
        if spec.shape and spec.shape[0] and any(name.startswith(prefix) for prefix in names)
    }
    return StoredPool(
        kind="tokens",
        layers=one.layers,
        window=one.window,
        page_tokens=PAGE,
        page_bytes=PAGE * sum(token_bytes.values()),
        pages=pages,
    )


def _state_pool(file: StateFile, layers: tuple[int, ...], rows: Sequence[_Row]) -> StoredPool:
    pages: list[StoredPage] = []
    for row in rows:
        for position in row.kept:
            role = "present" if position == row.computed else "checkpoint"
            holder = PageHolder(branch=row.id, start=position, stop=position, role=role)
            pages.append(StoredPage(owner=HELD, holders=(holder,), references=1))
    own = {f"layer.{layer}.state." for layer in layers}
    nbytes = sum(
        spec.nbytes
        for name, spec in file.specs.items()
        for prefix in rows[:1]
        if "@" not in name and any(name.startswith(prefix.prefix + one) for one in own)
    )
    return StoredPool(kind="states", layers=layers, window=None, page_tokens=1, page_bytes=nbytes, pages=pages)


def _layers(sequence: Mapping[str, Any], classes: Sequence[_Class], states: Sequence[int]) -> list[dict[str, Any]]:
    pools = {layer: number for number, one in enumerate(classes) for layer in one.layers}
    found: dict[int, dict[str, Any]] = {
        layer: {"id": layer, "kind": one["kind"], "pool": pools.get(layer)}
        | ({"kv_heads": one["num_kv_heads"]} if "num_kv_heads" in one else {})
        | ({} if one["window"] is None else {"window": one["window"]})
        for layer, one in zip(_ids_of(sequence), sequence["layers"], strict=True)
    }
    found |= {layer: {"id": layer, "kind": "recurrent", "pool": len(classes)} for layer in states}
    return [found[layer] for layer in sorted(found)]
