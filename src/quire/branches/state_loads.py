"""``StateLoad``: state on its way from a store into a sequence, layer by layer, on a thread.

The sequence counts from the start, so that a forward may run behind it: before each block it waits
for that layer. So reading the next layers overlaps with computing. Whatever does not
come, or does not fit, ends the load; the tokens are computed then.
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

from quire.branches.object_layout import ObjectLayout
from quire.branches.object_rows import ObjectRows
from quire.contracts.kv_state import ModelState, TensorPlan
from quire.contracts.store import ObjectKey, ObjectKind
from quire.errors import QuireError
from quire.kv.statefile import StateFile
from quire.outputs import Miss
from quire.process_exit import end_with_process
from quire.store.keys import StoredPiece
from quire.store.objects import Contents, read_tensors, unpack
from quire.store.records import Unfit
from quire.store.stack import Found, Store
from quire.types import SeqId

logger = logging.getLogger("quire.engine")

GET_SECONDS = 30.0
"""How long an object may take to come."""
LOOK_SECONDS = 0.02
"""How often a load that waits for an object looks whether it is to end."""


class LoadFailed(QuireError):
    """State did not come back from a store. The tokens are computed again."""


class StateLoad:
    """One sequence that is filled. ``StateLoader`` runs it."""

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
        """Describe the load of ``rows`` behind the first ``shared`` of ``length`` tokens, and of
        ``stops``, the last of which is at ``length``. ``seq`` is being imported, and published."""
        self.seq = seq
        self.shared = shared
        self.count = length - shared
        """Tokens that come."""
        self.nbytes: dict[str, int] = {}
        """Bytes by tier, once it has ended."""
        self.seconds = 0.0
        self.error: QuireError | None = None
        self.miss = Miss.DAMAGED
        """Why it failed, if it did."""
        self._state, self._layout, self._store = state, layout, store
        self._rows, self._stops, self._contents = rows, stops, contents
        self._length = length
        self._runs: ObjectRows | None = None
        """What is written of ``rows``, while they are open; None: nothing."""
        self._arrived: set[int] = set()
        """Layers that are there."""
        self._changed = threading.Condition()
        self.is_near = False
        """Whether all objects are here, so that no other machine is waited for any more."""
        self._started = self._stopped = self._ended = False

    @property
    def ended(self) -> bool:
        """Return whether the load is over: all is there, or it has failed."""
        return self._ended

    def wait(self, layer: int) -> None:
        """Wait until a layer is there. Raise ``LoadFailed``."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or layer in self._arrived)
            if self.error is not None:
                raise LoadFailed(str(self.error))

    def wait_until_near(self, seconds: float) -> None:
        """Wait until all objects are here, or the load is over, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_near or self._ended, seconds)

    def end(self) -> None:
        """End the load, at once unless all layers are there, and wait until nothing is written into
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
        self._runs = None  # The objects may go.
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
        """Wait for an object, unless the load is ended; None if it does not come in time."""
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
        """Drop an object that does not fit."""
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
    """The load of one object that holds all of a sequence with a window."""

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
        """Run a load when those before it have ended."""
        self._waiting.put(loading)

    def close(self) -> None:
        """End when those that wait have been run."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (loading := self._waiting.get()) is not None:
            loading.run()
