"""The thread that writes a session journal, so that callers may wait or continue."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from typing import Any

from quire.base.errors import NotDurable
from quire.base.forks import ParentsLock, in_children
from quire.base.process_exit import end_with_process
from quire.store.journal import Change, SessionJournal

CLOSE_SECONDS = 30.0
"""Most seconds that ``close`` waits for pending writes."""

Order = tuple[Change, "Future[None]"]


class JournalWriter:
    """A journal's only writer. Pending changes share one transaction, so that sessions that end
    their calls together wait for one sync of the disk."""

    def __init__(self, journal: SessionJournal) -> None:
        """Start the thread. ``close`` closes the journal too."""
        self.journal = journal
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._lock: Any = threading.Lock()
        in_children(self._forked)
        self._closed = False
        self._last: Future[None] = Future()
        self._last.set_result(None)
        self._thread = threading.Thread(target=self._run, name="quire-journal", daemon=True)
        self._thread.start()
        end_with_process(self.close)

    def write(self, change: Change) -> Future[None]:
        """Queue a change. The future is done when it is durable; its error is ``NotDurable``."""
        written: Future[None] = Future()
        written.set_running_or_notify_cancel()  # so that a caller that stops waiting does not cancel the change
        with self._lock:
            if not self._closed:
                self._orders.put((change, written))
                self._last = written
                return written
        written.set_exception(NotDurable("the state directory is closed, so nothing is kept in it any more"))
        return written

    def wait(self) -> None:
        """Wait until all queued changes are written, or have failed."""
        wait([self._last])

    def close(self) -> None:
        """Write the pending changes, and close the journal; give up if the disk hangs. A second
        call is harmless."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._orders.put(None)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self.journal.close()

    def _forked(self) -> None:
        self._lock = ParentsLock()

    def _run(self) -> None:
        while True:
            orders = [self._orders.get()]
            while orders[-1] is not None:
                try:
                    orders.append(self._orders.get_nowait())
                except Empty:
                    break
            waiting = [order for order in orders if order is not None]
            if not self._write(waiting) and len(waiting) > 1:
                # One session's change may be the cause of the failure, so write each by itself.
                for order in waiting:
                    self._write([order])
            if orders[-1] is None:
                return

    def _write(self, orders: list[Order]) -> bool:
        """Write changes in one transaction. Return False if it failed and has several changes."""
        try:
            self.journal.write([change for change, _ in orders])
        except BaseException as error:
            if len(orders) == 1:
                orders[0][1].set_exception(error)
            return False
        for _, written in orders:
            written.set_result(None)
        return True
