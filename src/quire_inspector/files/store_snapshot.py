"""``store_snapshot``: the commits of a store as a ``Snapshot``. A page is an object; commits that
name the same object share it. An object that is gone is a hole.

Commits of several models may lie in one store. Each layout of state has pools of its own; layers
are shown for the layout that most commits have.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np

from quire.adapters.keys import AdapterKey, read_key
from quire.base.errors import DataLoss, NotFound
from quire.contracts.store import ObjectKey, ObjectKind, StoreTier
from quire.contracts.token_views import NormsView
from quire.contracts.views import BranchView, HeldRows, PageHolder, TiersView, TierView
from quire.statefile.container import StateFile, read_state
from quire.statefile.schema import KINDS, check_metadata
from quire.store.keys import StoredPiece
from quire.store.survey import SurveyedCommit, survey
from quire_inspector.files.known_tokenizers import tokenizer_of
from quire_inspector.files.snapshot import FREE, PINNED, Snapshot, StoredBranch, StoredPage, StoredPool, require_layer
from quire_inspector.files.stored_norms import NormParts, layers_in
from quire_inspector.views.token_texts import TextReader

KIND_NAMES = {"k": "full", "latent": "latent", "state": "recurrent"}
"""Kinds of layers by a tensor that they have in an object."""


async def store_snapshot(tier: StoreTier, reading: int = 1) -> Snapshot:
    """Read the records of a store, without the state itself. ``TierError``, ``DataLoss``: as
    ``survey``."""
    found = await survey(tier)
    layouts: dict[tuple[str, str], list[SurveyedCommit]] = {}
    for one in found.commits:
        layouts.setdefault((one.commit.model["weights"], one.commit.layout_hash), []).append(one)
    groups = [_Layout(commits, await _kinds(tier, commits)) for commits in layouts.values()]
    pools: list[StoredPool] = []
    branches: dict[str, StoredBranch] = {}
    for group in groups:
        first = len(pools)
        pools += group.pools()
        branches |= {branch.view.id: branch for branch in group.branches(first, pools)}
    main = max(groups, key=lambda one: len(one.commits), default=None)
    tokenizer = None if main is None else tokenizer_of(main.model)
    start = 0
    layers: list[dict[str, Any]] = []
    for group in groups:
        if group is main:
            layers = group.layers(start)
        start += len(group.pools())
    stat = found.stat
    about = TierView(
        kind=found.kind,
        label=found.label,
        durable=True,
        objects=stat.objects,
        num_bytes=stat.bytes,
        capacity=stat.capacity,
        pinned=stat.pinned,
    )
    return Snapshot(
        source="store",
        model={
            "name": PurePath(getattr(tier, "directory", found.label)).name,
            **({} if main is None else main.model),
            "models": len({group.model["weights"] for group in groups}),
            "max_length": None,
            "vocab_size": None if tokenizer is None else tokenizer.vocab_size,
            "dtype": None,
            "tokenizer": tokenizer is not None,
        },
        layers=tuple(layers),
        branches=tuple(branches[f"commit:{one.commit.id}"] for one in found.commits),
        pools=tuple(pools),
        tiers=TiersView(tiers=(about,)),
        texts=TextReader(tokenizer),
        reading=reading,
        notes=found.damaged,
        norms=partial(
            _norms, tier, {f"commit:{one.commit.id}": (one, group) for group in groups for one in group.commits}
        ),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Commits of one model and layout of state."""

    commits: Sequence[SurveyedCommit]
    kinds: Mapping[int, str]
    """The kind of each layer, as far as an object tells."""

    @property
    def model(self) -> Mapping[str, str]:
        return self.commits[0].commit.model

    @property
    def chunk(self) -> int:
        return max(one.commit.state.chunk for one in self.commits)

    def layers_of(self, stops: bool) -> tuple[int, ...]:
        """Return the layers in objects of rows, or in stops."""
        return tuple(layer for layer, kind in sorted(self.kinds.items()) if (kind in ("window", "recurrent")) == stops)

    def pools(self) -> list[StoredPool]:
        """Return the pools of rows and of recurrent states that are not empty."""
        return [
            pool for kind, stops in (("tokens", False), ("states", True)) if (pool := self._pool(kind, stops)).pages
        ]

    def _pool(self, kind: str, stops: bool) -> StoredPool:
        holders: dict[ObjectKey, list[PageHolder]] = {}
        there: set[ObjectKey] = set()
        largest = 0
        for one in self.commits:
            there |= one.there
            for piece, nbytes in one.pieces.items():
                if (piece.start == piece.stop) == stops:
                    role = "checkpoint" if stops else None
                    holder = PageHolder(branch=f"commit:{one.commit.id}", start=piece.start, stop=piece.stop, role=role)
                    holders.setdefault(piece.key, []).append(holder)
                    largest = max(largest, nbytes)
        return StoredPool(
            kind=kind,
            layers=self.layers_of(stops),
            window=None,
            page_tokens=1 if stops else self.chunk,
            page_bytes=largest,
            pages=[
                StoredPage(
                    owner=PINNED if key in there else FREE,
                    holders=tuple(listed),
                    references=len(listed) if key in there else 0,
                )
                for key, listed in holders.items()
            ],
        )

    def layers(self, first: int) -> list[dict[str, Any]]:
        """Return the layers as the overview tells them; ``first``: the first of the pools."""
        pools = self.pools()
        at = {layer: first + number for number, pool in enumerate(pools) for layer in pool.layers}
        return [{"id": layer, "kind": kind, "pool": at.get(layer)} for layer, kind in sorted(self.kinds.items())]

    def branches(self, first: int, pools: Sequence[StoredPool]) -> list[StoredBranch]:
        """Return the commits; ``first``: the first of the pools."""
        named = Counter(key for one in self.commits for key in {piece.key for piece in one.pieces})
        rows = first if pools[first:] and pools[first].kind == "tokens" else None
        return [self._branch(one, named, rows) for one in self.commits]

    def _branch(self, one: SurveyedCommit, named: Mapping[ObjectKey, int], rows: int | None) -> StoredBranch:
        commit = one.commit
        keys = {piece.key for piece in one.pieces} & one.there
        ranges = _ranges(one)
        adapter = commit.adapters[-1][1] if commit.adapters else None
        salt = read_key(commit.key, one.space)
        runs = tuple((start, fingerprint) for start, fingerprint in commit.adapters)
        stops = tuple(one.stops)
        return StoredBranch(
            view=BranchView(
                id=f"commit:{commit.id}",
                kind="commit",
                name=", ".join(one.branches) or commit.message or commit.session,
                num_tokens=commit.num_tokens,
                computed=one.computed,
                pinned=bool(one.branches),
                modified=commit.modified,
                exact=True,
                adapter=adapter,
                pages=len(keys),
                shared_pages=sum(named[key] > 1 for key in keys),
                window=None if commit.window is None else (commit.window[0], commit.window[1]),
                last_commit=commit.parent,
                # What no object holds is run again.
                reachable=(range(one.computed + 1),),
                checkpoints=stops,
                held=() if rows is None else (HeldRows(pool=rows, ranges=ranges),),
            ),
            ids=one.ids.astype(np.int64),
            key=AdapterKey(salt, runs) if runs else salt,
        )


def _ranges(one: SurveyedCommit) -> tuple[range, ...]:
    """Return the positions whose rows are there."""
    found: list[range] = []
    for piece in one.pieces:
        if piece.key in one.there and piece.start < piece.stop:
            if found and found[-1].stop == piece.start:
                found[-1] = range(found[-1].start, piece.stop)
            else:
                found.append(range(piece.start, piece.stop))
    return tuple(found)


async def _kinds(tier: StoreTier, commits: Sequence[SurveyedCommit]) -> dict[int, str]:
    """Return the kind of each layer, from one object of rows and one stop."""
    found: dict[int, str] = {}
    for stops in (False, True):
        keys = (
            piece.key
            for one in commits
            for piece in one.pieces
            if (piece.start == piece.stop) == stops and piece.key in one.there
        )
        if (key := next(keys, None)) is None:
            continue
        try:
            file = await _opened(tier, key)
        except (DataLoss, NotFound):
            continue
        in_window = stops and "sequence" not in file.metadata
        for layer, names in layers_in(file).items():
            kind = next((kind for name, kind in KIND_NAMES.items() if name in names), "full")
            found[layer] = "window" if in_window and kind == "full" else kind
    return found


async def _opened(tier: StoreTier, key: ObjectKey) -> StateFile:
    """Return an object, its tensors unread. ``NotFound``: it is gone; ``DataLoss``: damaged."""
    (blob,) = await tier.get([key])
    if blob is None:
        raise NotFound(f"object {key.name} is gone")
    file = read_state(blob, verify=False)
    check_metadata(file.metadata, tuple(KINDS))
    return file


async def _norms(
    tier: StoreTier,
    known: Mapping[str, tuple[SurveyedCommit, _Layout]],
    branch: StoredBranch,
    layer: int,
) -> NormsView:
    one, layout = known[branch.view.id]
    require_layer(layout.kinds, layer)
    parts, read = NormParts(layer), list[Callable[[], None]]()
    last = max(one.stops, default=None)
    for piece in one.pieces:
        if piece.key not in one.there:
            continue
        file = await _opened(tier, piece.key)
        read.append(partial(_add, parts, file, piece, is_last=piece.stop == last))
    await asyncio.to_thread(lambda: [add() for add in read])
    return parts.view(layout.kinds[layer], one.ids.size)


def _add(parts: NormParts, file: StateFile, piece: StoredPiece, *, is_last: bool) -> None:
    """Check an object's checksums, and add its rows and states of the layer."""
    file.verify()
    sequence: Mapping[str, Any] | None = file.metadata.get("sequence")  # type: ignore[assignment]
    if sequence is not None:
        for held in sequence["held"]:
            if parts.layer in held["layers"]:
                parts.add_rows(file, "", [range(*one) for one in held["ranges"]], sequence)
        parts.add_states(file, "", int(sequence["length"]))
    elif piece.key.kind is ObjectKind.ROWS:
        parts.add_rows(file, "", [range(piece.start, piece.stop)])
    else:
        rows = next((len(plane) for plane in parts.planes(file).values()), 0)
        if rows and is_last:
            parts.add_rows(file, "", [range(piece.stop - rows, piece.stop)])
        parts.add_states(file, "", piece.stop)
