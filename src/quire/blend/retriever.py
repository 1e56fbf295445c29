"""``ChunkRetriever``: loads chunks of prompts from the tiers to the device, layer by layer.

A task holds its objects: bytes and mappings stay readable while they are referenced, whatever a
tier evicts meanwhile. Objects are fetched by the store; a layer is verified and moved on request,
or ``ahead`` layers earlier by a thread. Tasks own no thread, so an abandoned task is freed with all
its objects.

Letters: R requests; n tokens of a prompt, N of all; m rows; Hkv heads; D head size.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from quire.base.errors import BlendLoadError, FailedPrecondition, InvalidArgument, QuireError
from quire.blend.chunk_catalog import ChunkCatalog
from quire.blend.chunk_matching import Placement
from quire.blend.chunks import ChunkKeys, ChunkLayout
from quire.blend.rows_task import Order, RowsPiece, RowsTask
from quire.blend.token_sums import Ids
from quire.contracts.store import ObjectKey
from quire.statefile.container import StateFile, header_size
from quire.store.objects import Contents, unpack
from quire.store.records import Unfit
from quire.store.stack import Found

logger = logging.getLogger("quire.blend")

SECONDS = 30.0
GRACE_SECONDS = 1.0
"""Extra seconds for another thread that is loading a layer: the chunks have arrived then."""
AHEAD = 2
ROUNDS = 4
"""Most matches of one prompt, if chunks turn out to be evicted from memory."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """A chunk of a task."""

    key: ObjectKey
    contents: Contents
    answer: Future[Found | None]
    requests: set[int] = field(default_factory=set)
    file: StateFile | None = None
    tier: str = ""

    def has(self, layout: ChunkLayout, layer: int | None) -> bool:
        """Return True if its header (None), or a layer and its header, have arrived, or never
        will."""
        if not self.answer.done():
            return False
        found = self.answer.result()
        if found is None or (arriving := found.arriving) is None or arriving.ended:
            return True
        if self.file is None or layer is None:
            return arriving.there >= max(8, header_size(found.blob, arriving.there))
        return arriving.there >= layout.end(self.file, layer)

    def lacks(self, layout: ChunkLayout, layer: int | None) -> bool:
        """Return True if its bytes ended before the part that ``has`` checks."""
        found = self.answer.result()
        if found is None or (arriving := found.arriving) is None or arriving.is_whole:
            return False
        if self.file is None or layer is None:
            return arriving.there < max(8, header_size(found.blob, arriving.there))
        return arriving.there < layout.end(self.file, layer)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Rows of the task that come from a chunk."""

    start: int
    """The first one, among all N."""
    skip: int
    """Number of rows of the chunk before these."""
    count: int
    fetch: _Fetch


class ChunkTask(RowsTask):
    """``BlendRetrieverTask`` over chunks; ``ChunkRetriever.new_request`` makes it."""

    def __init__(
        self,
        retriever: ChunkRetriever,
        parts: Sequence[_Part],
        length: int,
        first_layer: int,
        tokens_by_tier: dict[str, int],
    ) -> None:
        layout, lead = retriever.layout, len(retriever.keys.lead)
        super().__init__(layout, length, [(one.start, lead + one.skip, one.count) for one in parts], retriever.order)
        self.tokens_by_tier = tokens_by_tier
        """Number of rows by the kind of their nearest tier."""
        self._catalog, self._device, self._ahead = retriever.catalog, retriever.device, retriever.ahead
        self._parts, self._lead = list(parts), lead
        self._fetches = list({one.fetch.key: one.fetch for one in parts}.values())
        self.nbytes = sum(one.key.count for one in self._fetches) * layout.row_bytes
        """Bytes of the chunks' tensors, of all layers."""
        self._until = time.monotonic() + retriever.seconds
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._opening = threading.Lock()
        self._changed = threading.Condition()
        """Guards all fields below; notified of each change."""
        self._loading: set[int] = set()
        self._queued: set[int] = set()
        """Layers that were given to the loading thread."""
        self._layers: OrderedDict[int, tuple[list[RowsPiece], torch.cuda.Event | None]] = OrderedDict()
        """Loaded layers, the most recently used last."""
        self._next = self._after(layout.layers.index(first_layer))
        """Layers to load ahead, once all chunks have arrived."""
        self._error: BlendLoadError | None = None
        self._closed = False
        for one in self._fetches:
            one.answer.add_done_callback(partial(_on_answer, weakref.ref(self)))

    def pieces(self, layer_id: int) -> list[RowsPiece]:
        """Return the rows of a layer, in order of ``start``; on the CPU without a copy. Waits and
        raises as ``result`` does."""
        self._layout.require(layer_id)
        with self._changed:
            while layer_id in self._loading and self._is_open():
                if not self._changed.wait(max(self._left(), GRACE_SECONDS)):
                    raise self._failed(f"layer {layer_id} is not there in time", self._fetches)
            self._is_open()
            found = self._layers.get(layer_id)
            if found is None:
                self._loading.add(layer_id)
            else:
                self._layers.move_to_end(layer_id)
        if found is None:
            found = self._load(layer_id)
        pieces, event = found
        if event is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(event)
            for piece in pieces:
                piece.k.record_stream(current)
                piece.v.record_stream(current)
        with self._changed:
            self._next = self._after(self._layout.layers.index(layer_id) + 1)
            self._load_ahead()
        return list(pieces)

    def close(self) -> None:
        """Release all objects. Closing again does nothing. Waiting callers get an error."""
        with self._changed:
            self._closed = True
            self._parts, self._fetches = [], []
            self._layers.clear()
            self._changed.notify_all()

    def _after(self, index: int) -> tuple[int, ...]:
        return self._layout.layers[index : index + self._ahead]

    def _left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    # ------------------------------------------------------------------ with the condition held

    def _is_open(self) -> bool:
        """Return True; raise the error that ended the task."""
        if self._closed:
            raise FailedPrecondition("the task is closed; make another one")
        if self._error is not None:
            raise BlendLoadError(str(self._error), self._error.requests)
        return True

    def _failed(self, what: str, fetches: Sequence[_Fetch]) -> BlendLoadError:
        """Record that chunks are missing, for all layers: promised rows are lost."""
        requests = {one for fetch in fetches for one in fetch.requests}
        self._error = BlendLoadError(f"{what}; chunks of requests {sorted(requests)} are not valid", requests)
        for fetch in fetches:
            self._catalog.drop(fetch.key)
        self._changed.notify_all()
        return BlendLoadError(str(self._error), requests)

    def _load_ahead(self) -> None:
        """Queue the next layers that have arrived, so that callers need not wait for them."""
        if self._fetches:
            for layer in self._next:
                if not all(one.has(self._layout, layer) for one in self._fetches):
                    return
                if layer not in self._queued and layer not in self._layers:
                    self._queued.add(layer)
                    self._catalog.loading.add(partial(_load_one, weakref.ref(self), layer))

    # ------------------------------------------------------------------ any thread

    def arrived(self) -> None:
        """Handle the arrival, or the failure, of a chunk or a part of it."""
        with self._changed:
            self._changed.notify_all()
            if not self._closed:
                self._load_ahead()

    def load_early(self, layer: int) -> None:
        """Load a layer, unless it is loaded or another thread is loading it."""
        with self._changed:
            self._queued.discard(layer)
            if self._closed or self._error or layer in self._layers or layer in self._loading:
                return
            fetches = self._fetches
        with contextlib.suppress(BlendLoadError, FailedPrecondition):  # raised again by the next request
            self._open(fetches)
        with self._changed:
            # The layer ranges of a chunk are known only after it is opened.
            late = not all(one.has(self._layout, layer) for one in fetches)
            if late or self._closed or self._error or layer in self._layers or layer in self._loading:
                return
            self._loading.add(layer)
        with contextlib.suppress(BlendLoadError, FailedPrecondition):  # raised again by the next request
            self._load(layer)

    def _load(self, layer: int) -> tuple[list[RowsPiece], torch.cuda.Event | None]:
        """Load a layer that is marked as loading."""
        try:
            with self._changed:
                parts, fetches = self._parts, self._fetches
            self._wait(fetches, None)
            self._open(fetches)
            self._wait(fetches, layer)
            loaded = self._read(layer, parts)
            with self._changed:
                self._is_open()
                self._layers[layer] = loaded
                if self._stream is not None and len(self._layers) > self._ahead + 2:
                    self._layers.popitem(last=False)
            return loaded
        except QuireError:
            raise
        except Exception as error:
            logger.exception("layer %d of chunks could not be loaded", layer)
            with self._changed:
                raise self._failed(f"layer {layer}: {type(error).__name__}: {error}", self._fetches) from None
        finally:
            with self._changed:
                self._loading.discard(layer)
                self._changed.notify_all()

    def _wait(self, fetches: Sequence[_Fetch], layer: int | None) -> None:
        """Wait for the headers of chunks, or for a layer."""
        with self._changed:
            while self._is_open() and (late := [one for one in fetches if not one.has(self._layout, layer)]):
                if not self._changed.wait(self._left()):
                    raise self._failed(f"{len(late)} of {len(fetches)} chunks did not come in time", late)
            if broken := [one for one in fetches if one.lacks(self._layout, layer)]:
                what = "their headers ended" if layer is None else f"layer {layer}"
                raise self._failed(f"{len(broken)} of {len(fetches)} chunks broke off before {what}", broken)

    def _open(self, fetches: Sequence[_Fetch]) -> None:
        """Check the headers of chunks, once."""
        with self._opening:
            lost = dict[str, _Fetch]()
            for one in (one for one in fetches if one.file is None):
                if (found := one.answer.result()) is None:
                    lost[f"object {one.key.name} is not there any more"] = one
                    continue
                one.tier = found.tier
                try:
                    one.file = unpack(one.key, one.contents, found.blob)
                except Unfit as error:
                    lost[self._damaged(one, error)] = one
            self._require_all(lost)

    def _read(self, layer: int, parts: Sequence[_Part]) -> tuple[list[RowsPiece], torch.cuda.Event | None]:
        """Verify a layer, and move its rows to the device."""
        tensors, lost = dict[ObjectKey, dict[str, Tensor]](), dict[str, _Fetch]()
        for one in {part.fetch.key: part.fetch for part in parts}.values():
            assert one.file is not None
            try:
                tensors[one.key] = self._layout.read(one.key, one.file, layer)
            except Unfit as error:
                lost[self._damaged(one, error)] = one
        self._require_all(lost)
        pieces, event = list[RowsPiece](), None
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            for part in parts:
                rows = {name: one[part.skip : part.skip + part.count] for name, one in tensors[part.fetch.key].items()}
                k, v = self._layout.split(layer, {name: self._moved(one) for name, one in rows.items()})
                pieces.append(RowsPiece(part.start, k, v, self._lead + part.skip))
            if self._stream is not None:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream)
        return pieces, event

    def _moved(self, rows: Tensor) -> Tensor:
        """Return rows on the device: on the CPU unchanged, else through pinned memory, which torch
        keeps until the copy is done."""
        if self._stream is None:
            return rows
        staged = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        return staged.copy_(rows).to(self._device, non_blocking=True)

    def _damaged(self, fetch: _Fetch, error: Unfit) -> str:
        """Have an unusable chunk counted and removed; return a message."""
        self._catalog.store.damaged(fetch.key, fetch.tier, error.code or "other")
        return str(error)

    def _require_all(self, lost: Mapping[str, _Fetch]) -> None:
        """Raise ``BlendLoadError`` if chunks are lost; the keys are the reasons."""
        if lost:
            with self._changed:
                raise self._failed("; ".join(lost), list(lost.values()))


def _on_answer(task: weakref.ref[ChunkTask], answer: Future[Found | None]) -> None:
    if (found := answer.result()) is not None and found.arriving is not None:
        found.arriving.tell(partial(_came, task))
    _came(task)


def _came(task: weakref.ref[ChunkTask]) -> None:
    if (found := task()) is not None:
        found.arrived()


def _load_one(task: weakref.ref[ChunkTask], layer: int) -> None:
    if (found := task()) is not None:
        found.load_early(layer)


class ChunkRetriever:
    """``BlendRetriever`` over the chunks of one key space. Cheap to make; for any thread."""

    def __init__(
        self,
        catalog: ChunkCatalog,
        layout: ChunkLayout,
        keys: ChunkKeys,
        *,
        device: torch.device | None = None,
        order: Order = "NHD",
        seconds: float = SECONDS,
        ahead: int = AHEAD,
    ) -> None:
        """``device``: of the results; None: the state's. ``seconds``: most time that a task waits
        for chunks, from its start. ``ahead``: number of layers that are loaded ahead."""
        self.catalog, self.layout, self.keys = catalog, layout, keys
        self.device = layout.state.device if device is None else device
        self.order, self.seconds, self.ahead = order, seconds, ahead

    def new_request(
        self,
        full_prompts: Sequence[Tensor],
        indices: Sequence[Sequence[int]],
        *,
        wanted: Sequence[range] | None = None,
        first_layer: int | None = None,
    ) -> ChunkTask:
        """As ``BlendRetriever.new_request``. ``wanted``: one range of useful rows for each prompt;
        None: all. ``first_layer``: the first layer that will be requested; None: the model's."""
        prompts = [_ids(index, prompt) for index, prompt in enumerate(full_prompts)]
        marks = _marks(prompts, indices)
        spans = [range(ids.size) for ids in prompts] if wanted is None else list(wanted)
        allowed = "for each prompt one ascending range in it"
        if len(spans) != len(prompts) or any(
            one.step != 1 or not 0 <= one.start <= one.stop <= ids.size
            for one, ids in zip(spans, prompts, strict=False)
        ):
            raise InvalidArgument(field="wanted", given=wanted, allowed=allowed)
        first = self.layout.layers[0] if first_layer is None else first_layer
        self.layout.require(first)
        parts, fetches, by_tier = list[_Part](), dict[ObjectKey, _Fetch](), dict[str, int]()
        base = 0
        for index, (ids, offsets, span) in enumerate(zip(prompts, marks, spans, strict=True)):
            for place, tier in self._find(ids, offsets, span, fetches):
                fetches[place.key].requests.add(index)
                count = place.stop - place.start
                parts.append(_Part(base + place.start, place.skip, count, fetches[place.key]))
                by_tier[tier] = by_tier.get(tier, 0) + count
            base += ids.size
        return ChunkTask(self, parts, base, first, by_tier)

    def _find(
        self, ids: Ids, offsets: Sequence[int], span: range, fetches: dict[ObjectKey, _Fetch]
    ) -> list[tuple[Placement, str]]:
        """Return the chunks of a prompt and their tiers, all of them being fetched. Chunks that
        memory has evicted since the listing are found out at once, and the prompt is matched again
        without them."""
        known = self.catalog.known(self.keys.parent)
        for _ in range(ROUNDS):
            found = known.match(ids, offsets, span.start, span.stop)
            places = {one.key: one for one in found if one.key not in fetches}
            answers = self.catalog.store.get(list(places))
            gone = set[ObjectKey]()
            for (key, one), answer in zip(places.items(), answers, strict=True):
                if answer.done() and answer.result() is None:
                    gone.add(key)
                    self.catalog.drop(key)
                else:
                    tokens = ids[one.origin : one.origin + key.count]
                    fetches[key] = _Fetch(key, self.keys.contents(tokens), answer)
            if not gone:
                break
            known = known.without(gone)
        return [(one, known.tiers[one.key]) for one in found if one.key not in gone]


def _ids(index: int, prompt: object) -> Ids:
    """Return the ids of a prompt."""
    kinds = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
    fits = isinstance(prompt, Tensor) and prompt.dim() == 1 and prompt.dtype in kinds and prompt.device.type == "cpu"
    if not fits:
        allowed = "an integer tensor [n] on the CPU"
        raise InvalidArgument(field=f"full_prompts.{index}", given=prompt, allowed=allowed)
    assert isinstance(prompt, Tensor)
    return prompt.to(torch.int64, copy=True).numpy()


def _marks(prompts: Sequence[Ids], indices: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the offsets of each prompt's segments."""
    if len(indices) != len(prompts):
        raise InvalidArgument(field="indices", given=indices, allowed=f"{len(prompts)} lists, one for each prompt")
    found = list[list[int]]()
    for index, (ids, offsets) in enumerate(zip(prompts, indices, strict=True)):
        try:
            marks = [operator.index(one) for one in offsets]
        except TypeError:
            marks = [-1]
        if any(one > other for one, other in itertools.pairwise([0, *marks, ids.size])):
            allowed = f"offsets from 0 to {ids.size} that do not descend"
            raise InvalidArgument(field=f"indices.{index}", given=offsets, allowed=allowed)
        found.append(marks)
    return found
