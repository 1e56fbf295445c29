"""``ObjectWriter``: the thread that writes state to tiers, from forks that are kept until then."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.base.process_exit import end_with_process
from quire.base.types import SeqId
from quire.contracts.store import Blob, ObjectKey
from quire.store.stack import Store

logger = logging.getLogger("quire.engine")

LAST_SECONDS = 10.0
"""Most seconds that the end of the process waits for pending writes."""


@dataclass(slots=True, eq=False)
class WriteJob:
    """Objects of one fork, each serialised when its turn comes."""

    seq: SeqId
    objects: Sequence[tuple[ObjectKey, Callable[[], Blob]]]
    durable: bool = True
    """Whether they are written to durable tiers; else to memory."""
    source: SeqId | None = None
    """The sequence of a copy ahead of its eviction; None: the copy does not depend on it."""
    tokens: int = 0
    started: bool = False
    cancelled: bool = False
    nbytes: int = 0
    """Number of bytes that were serialised, in ``seconds``."""
    seconds: float = 0.0


class ObjectWriter:
    """Jobs in order of arrival. Any thread may call."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs: deque[WriteJob] = deque()
        self._done: list[WriteJob] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="quire-write", daemon=True)
        self._thread.start()
        end_with_process(self._end_with_process)

    def add(self, job: WriteJob) -> None:
        """Write the objects of a fork. The caller keeps the fork until ``collect`` returns the
        job."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def collect(self, cancel: Callable[[WriteJob], bool] = lambda _: False) -> list[WriteJob]:
        """Return the jobs whose forks are not needed any more, each once. ``cancel``: cancel these
        jobs first, and wait for an object that is being written."""
        with self._changed:
            waiting = [job for job in self._jobs if not job.started and cancel(job)]
            for job in waiting:
                job.cancelled = True
                self._jobs.remove(job)
            if self._jobs and self._jobs[0].started and cancel(first := self._jobs[0]):
                first.cancelled = True
                self._changed.wait_for(lambda: first not in self._jobs)
            done, self._done = self._done + waiting, []
            return done

    def wait(self, timeout: float) -> bool:
        """Wait until all jobs are handed to the store; return False on a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout)

    def close(self) -> None:
        """Cancel the pending jobs, and end the thread."""
        with self._changed:
            self._closed = True
            for job in self._jobs:
                job.cancelled = True
            self._changed.notify_all()
        self._thread.join()

    def _end_with_process(self) -> None:
        self.wait(LAST_SECONDS)
        self.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs[0]
                job.started = True
            self._write(job)
            with self._changed:
                self._jobs.popleft()
                self._done.append(job)
                self._changed.notify_all()

    def _write(self, job: WriteJob) -> None:
        memory = None if job.durable else self._store.memory
        try:
            for key, make in job.objects:
                if job.cancelled:
                    return
                if self._store.known(key) or (memory is not None and memory.contains_now([key])[0]):
                    continue
                started = time.perf_counter()
                blob = make()
                job.seconds += time.perf_counter() - started
                job.nbytes += len(blob)
                if not self._store.put(key, blob, durable=job.durable, wait=True) and not job.durable:
                    return
        except Exception:
            logger.exception("state could not be written to the store; it will be computed again")
