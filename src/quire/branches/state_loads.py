"""``StateLoad``: loading state from a store into a sequence, layer by layer, on a thread.

The sequence counts as computed from the start, so that a forward may run after it: before each
block it waits for that layer. So reading the next layers overlaps with computing. A missing or
unfit object ends the load; the tokens are then computed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from quire.base.errors import QuireError
from quire.base.outputs import Miss
from quire.base.process_exit import end_with_process
from quire.base.types import SeqId
from quire.branches.object_layout import ObjectLayout
from quire.branches.object_rows import ObjectRows
from quire.contracts.kv_state import ModelState, TensorPlan
from quire.contracts.store import ObjectKey, ObjectKind
from quire.statefile.container import StateFile
from quire.store.keys import StoredPiece
from quire.store.objects import Contents, read_tensors, unpack
from quire.store.records import Unfit
from quire.store.stack import Found, Store

logger = logging.getLogger("quire.engine")

GET_SECONDS = 30.0
"""Most seconds to wait for an object."""
LOOK_SECONDS = 0.02
"""Seconds between checks for the end of a load while it waits for an object."""


class LoadFailed(QuireError):
    """State could not be loaded from a store. The tokens are computed again."""


class StateLoad:
    """The load of one sequence. ``StateLoader`` runs it."""

    def __init__(
        self,
        state: ModelState,
        layout: ObjectLayout,
        store: Store,
        seq: SeqId,
        *,
        length: int,
        shared: int,
        rows: Sequence[StoredPiece],
        stops: Sequence[StoredPiece],
        contents: Callable[[StoredPiece], Contents],
    ) -> None:
        """Describe the load of ``rows`` after the first ``shared`` of ``length`` tokens, and of
        ``stops``, the last of which is at ``length``. ``seq`` is being imported, and published."""
        self.seq = seq
        self.shared = shared
        self.count = length - shared
        """Number of tokens to load."""
        self.nbytes: dict[str, int] = {}
        """Loaded bytes by tier, once the load has ended."""
        self.seconds = 0.0
        self.error: QuireError | None = None
        self.miss = Miss.DAMAGED
        """The reason of a failure, valid if it failed."""
        self._state, self._layout, self._store = state, layout, store
        self._rows, self._stops, self._contents = rows, stops, contents
        self._length = length
        self._runs: ObjectRows | None = None
        """The rows being written, while their files are open; None: none."""
        self._arrived: set[int] = set()
        """Ids of the layers that are complete."""
        self._changed = threading.Condition()
        self.is_near = False
        """Whether all objects are local, so that no other machine is waited for any more."""
        self._started = self._stopped = self._ended = False

    @property
    def ended(self) -> bool:
        """Return True if the load is over, with success or failure."""
        return self._ended

    def wait(self, layer: int) -> None:
        """Wait until a layer is complete. Raise ``LoadFailed``."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or layer in self._arrived)
            if self.error is not None:
                raise LoadFailed(str(self.error))

    def wait_until_near(self, seconds: float) -> None:
        """Wait until all objects are local or the load is over, at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_near or self._ended, seconds)

    def end(self) -> None:
        """End the load, at once unless all layers are complete, and wait until nothing writes into
        the sequence any more."""
        with self._changed:
            self._stopped = True
            if not self._started:
                self._ended, self.error = True, LoadFailed("the load was ended before it began")
            self._changed.wait_for(lambda: self._ended)

    def run(self) -> None:
        """Read the objects and write the layers, on the loader's thread."""
        with self._changed:
            if self._ended:
                return
            self._started = True
        started = time.perf_counter()
        try:
            self._fill()
        except QuireError as error:
            self.error = error
        except BaseException as error:
            logger.exception("a load failed")
            self.error = LoadFailed(f"{type(error).__name__}: {error}")
        self._runs = None  # frees the loaded objects
        with self._changed:
            self.seconds = time.perf_counter() - started
            self._ended = True
            self._changed.notify_all()

    def _fill(self) -> None:
        pieces = [*self._rows, *self._stops]
        objects: list[Found] = []
        for piece, answer in zip(pieces, self._store.get([one.key for one in pieces]), strict=True):
            if (found := self._fetched(answer)) is None:
                self.miss = Miss.EVICTED
                raise LoadFailed(f"object {piece.key.name} is not there any more")
            objects.append(found)
        with self._changed:
            self.is_near = True
            self._changed.notify_all()
        files: dict[ObjectKey, StateFile] = {}
        for piece, found in zip(pieces, objects, strict=True):
            try:
                files[piece.key] = unpack(piece.key, self._contents(piece), found.blob)
            except Unfit as error:
                self._drop(piece.key, found.tier, error)
                raise
            self.nbytes[found.tier] = self.nbytes.get(found.tier, 0) + files[piece.key].nbytes
        if self._rows:
            opened = [files[piece.key] for piece in self._rows]
            self._runs = ObjectRows(self._rows, opened, range(self.shared, self._length), self._dropping)
        for layer in self._layout.layers:
            self._check()
            self._put(layer, files)
            with self._changed:
                self._arrived.add(layer)
                self._changed.notify_all()

    def _fetched(self, answer: Future[Found | None]) -> Found | None:
        """Wait for an object; None if it does not arrive in time. Raises ``LoadFailed`` if the load
        is ended."""
        for _ in range(int(GET_SECONDS / LOOK_SECONDS)):
            self._check()
            if wait([answer], LOOK_SECONDS).done:
                return answer.result()
        return None

    def _check(self) -> None:
        """Raise ``LoadFailed`` if the load is to end."""
        if self._stopped:
            raise LoadFailed("the load was stopped")

    def _drop(self, key: ObjectKey, tier: str, error: QuireError) -> None:
        logger.warning("%s; it is dropped", error)
        self._store.damaged(key, tier, error.code or "other")

    def _tensors(self, layer: int, piece: StoredPiece, file: StateFile) -> dict[str, Tensor]:
        count = piece.stop - piece.start or piece.stop
        return self._verified(piece, file, layer, self._layout.plan(piece.key.kind, count, layer))

    def _verified(
        self, piece: StoredPiece, file: StateFile, layer: int, plan: Mapping[str, TensorPlan]
    ) -> dict[str, Tensor]:
        with self._dropping(piece):
            return read_tensors(piece.key, file, layer, plan)

    @contextmanager
    def _dropping(self, piece: StoredPiece) -> Iterator[None]:
        """Drop an object from its tier if it turns out to be unfit."""
        try:
            yield
        except Unfit as error:
            for tier in self.nbytes:
                self._drop(piece.key, tier, error)
            raise

    def _put(self, layer: int, files: Mapping[ObjectKey, StateFile]) -> None:
        """Write a layer."""
        if layer in self._layout.row_layers:
            self._put_rows(layer)
        elif layer in self._layout.window_layers:
            self._put_window(layer, files[self._stops[-1].key])
        else:
            self._put_states(layer, files)

    def _put_rows(self, layer: int) -> None:
        if self._runs is not None:
            plan = partial(self._layout.plan, ObjectKind.ROWS, layer=layer)
            self._state.import_rows(self.seq, layer, self._runs.start, self._runs.of(layer, plan))

    def _put_window(self, layer: int, file: StateFile) -> None:
        tensors = self._tensors(layer, self._stops[-1], file)
        self._state.import_rows(self.seq, layer, self._layout.window_start(layer, self._length), tensors)

    def _put_states(self, layer: int, files: Mapping[ObjectKey, StateFile]) -> None:
        found: dict[str, Tensor] = {}
        for index, piece in enumerate(self._stops):
            is_last = index == len(self._stops) - 1
            for name, tensor in self._tensors(layer, piece, files[piece.key]).items():
                found[name if is_last else f"{name}@{piece.stop}"] = tensor
        self._state.import_page_group(self.seq, layer, found)


class WholeLoad(StateLoad):
    """The load of a sequence with a window, from its single object."""

    def __init__(self, *given: Any, plans: Mapping[int, Mapping[str, TensorPlan]], **named: Any) -> None:
        super().__init__(*given, shared=0, rows=(), **named)
        self._plans = plans

    def _put(self, layer: int, files: Mapping[ObjectKey, StateFile]) -> None:
        (piece,) = self._stops
        tensors = self._verified(piece, files[piece.key], layer, self._plans[layer])
        self._state.import_page_group(self.seq, layer, tensors)


class StateLoader:
    """The thread that runs loads, one after the other."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[StateLoad | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="quire-load", daemon=True)
        self._thread.start()
        end_with_process(self.close)

    def add(self, loading: StateLoad) -> None:
        """Queue a load."""
        self._waiting.put(loading)

    def close(self) -> None:
        """End the thread after all queued loads."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (loading := self._waiting.get()) is not None:
            loading.run()
