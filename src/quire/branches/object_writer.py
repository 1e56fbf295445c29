"""``ObjectWriter``: the thread that writes state to durable tiers, from forks that stay so long."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.contracts.store import ObjectKey
from quire.store.stack import Store
from quire.types import SeqId

logger = logging.getLogger("quire.engine")


@dataclass(slots=True, eq=False)
class WriteJob:
    """Objects of one fork, each made when its turn comes."""

    seq: SeqId
    objects: Sequence[tuple[ObjectKey, Callable[[], bytes]]]
    started: bool = False
    cancelled: bool = False


class ObjectWriter:
    """Jobs in order of arrival. Any thread may call."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs: deque[WriteJob] = deque()
        self._done: list[SeqId] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="quire-write", daemon=True)
        self._thread.start()

    def add(self, job: WriteJob) -> None:
        """Write the objects of a fork, which stays until ``collect`` returns it."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def collect(self, *, cancel: bool = False) -> list[SeqId]:
        """Return the forks that are not needed any more, each once. ``cancel``: write no more of
        what waits, and wait for the object that is being made."""
        with self._changed:
            if cancel:
                for job in self._jobs:
                    job.cancelled = True
                self._changed.wait_for(lambda: not self._jobs)
            done, self._done = self._done, []
            return done

    @property
    def idle(self) -> bool:
        """Whether everything has been handed to the store."""
        return not self._jobs

    def wait(self, timeout: float) -> bool:
        """Wait until it is idle; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout)

    def close(self) -> None:
        """Cancel what waits, and end the thread."""
        with self._changed:
            self._closed = True
            for job in self._jobs:
                job.cancelled = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs[0]
            self._write(job)
            with self._changed:
                self._jobs.popleft()
                self._done.append(job.seq)
                self._changed.notify_all()

    def _write(self, job: WriteJob) -> None:
        try:
            for key, make in job.objects:
                if job.cancelled:
                    return
                if not self._store.known(key):
                    self._store.put(key, make(), durable=True, wait=True)
        except Exception:
            logger.exception("state could not be written to the store; it will be computed again")
