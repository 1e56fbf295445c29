"""The engine: requests in, tokens out, one step at a time.

``submit`` checks and queues. ``step`` runs one forward of what the scheduler chose, samples, turns
tokens into text and ends what is finished. Continuous batching is the loop over ``step``; nothing
here knows pages or layers.

Any thread may call; one lock serialises. A thread that waits for its own requests steps all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from quire.branches.adapter_keys import AdapterKey, users
from quire.engine.page_use import OWNERS, PageUse, page_use
from quire.engine.sequence_request import SequenceRequest
from quire.engine.steps import EngineSteps
from quire.interrupts import check, uninterrupted

logger = logging.getLogger("quire.engine")

CLOSE_SECONDS = 10.0
"""How long a closing engine waits for state to become durable."""
MOST_LOST_LOADS = 64
"""Steps in a row whose state did not come, before their requests end: a fault, not bad luck."""
ANSWER_SECONDS = 0.02
"""The longest wait for tiers' answers while nothing can run. Then the engine looks around again."""


class Engine(EngineSteps):
    """Continuous batching over one runner."""

    @property
    def has_work(self) -> bool:
        return not self.scheduler.idle

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @uninterrupted
    def run(self, requests: Iterable[SequenceRequest], on_step: Callable[[], None] | None = None) -> None:
        """Step until these requests are finished. An interrupt between two steps cancels them."""
        waiting = list(requests)
        try:
            if self.wait is not None:
                self.wait(waiting)
            while waiting := [request for request in waiting if not request.finished]:
                if self.closed:
                    # The closing thread waits for the lock, which this loop would keep taking.
                    self.end(waiting)
                    return
                self.step()
                if on_step is not None:
                    on_step()
                check()
        except BaseException:
            self.end(waiting)
            raise

    def users_of(self, adapter_id: int) -> str:
        """Return an adapter's users, as in "2 requests and 1 session use it"; "" without any. They
        are requests that wait or run, and open sessions that go on under it or have tokens that
        would have to run under it again."""
        with self.lock:
            self.orphans.bury()
            self.give_way()
            requests = [request for samples in self._by_id.values() for request in samples if not request.finished]
            plain = {one.request_id for one in requests if one.session is None and adapter_id in one.work.runs.ids}
            held = [*self.branches.sessions.values(), *(one.session for one in requests if one.session is not None)]
            sessions = {id(one) for one in held if adapter_id in one.runs.ids}
            return users(len(plain), len(sessions))

    def forget_adapter(self, fingerprint: str) -> None:
        """Give back the finished sequences of an unloaded adapter. Only the same adapter, loaded
        again, could find them. It has no user, so host memory holds no state of it."""
        if self.cache is not None:
            with self.lock:
                self.prefix_pins.clear(lambda key: isinstance(key, AdapterKey) and key.names(fingerprint))
                gone = self.cache.forget_keys(lambda key: isinstance(key, AdapterKey) and key.names(fingerprint))
                self.branches.remove_all(gone)

    def reset_prefix_cache(self) -> None:
        """Forget all finished sequences, pinned ones too, also those in memory outside of the pool,
        and what there was before. Durable tiers keep what they have."""
        with self.lock:
            self.prefix_pins.clear()
            self.branches.clear_cache()
            self.stored.forget()
            self.past.clear()

    def page_use(self) -> PageUse:
        """Count the pages by their kinds of owners, now."""
        with self.lock:
            return page_use(self.runner.state, self.branches, self.cache)

    def snapshot(self) -> dict[str, float]:
        """Return all metrics by name, gauges as of now."""
        with self.lock:
            self.orphans.bury()
            metrics, state = self.metrics, self.runner.state
            metrics.num_requests_running.set(self.num_running)
            metrics.num_requests_waiting.set(self.num_waiting)
            use = self.page_use()
            metrics.kv_cache_usage.set(use.usage)
            for owner in OWNERS:
                getattr(metrics, f"pages_{owner}").set(getattr(use, owner))
            metrics.blend_calibrated.set(self.blending.calibration is not None)
            metrics.pages_shared.set(state.num_shared_pages())
            metrics.adapters_loaded.set(len(self.runner.adapters.ids))
            metrics.adapters_resident.set(len(self.runner.adapters.resident))
            metrics.checkpoints_kept.set(state.num_checkpoints)
            for counter, value in (
                (metrics.num_preemptions, self.scheduler.num_preemptions),
                (metrics.copy_on_write_splits, state.num_splits),
                (metrics.adapter_transfers, self.runner.adapters.loads),
            ):
                counter.inc(value - counter.value)
            return metrics.snapshot() | self.branches.tier.snapshot()

    def flush(self, timeout: float) -> bool:
        """Write what only this process has of its state to where it outlives the process, for at
        most ``timeout`` seconds; return whether nothing is left. Any thread may call."""
        until = time.monotonic() + timeout
        handed = self.blending.flush(timeout)
        return self.stored.flush(max(0.0, until - time.monotonic())) and handed

    def shutdown(self) -> None:
        """Cancel what runs, give all pages back, and accept nothing from now on."""
        self.closed = True
        if self.grammars is not None:
            self.grammars.close()
        self.flush(CLOSE_SECONDS)
        with self.lock:
            for samples in list(self._by_id.values()):
                self.end(samples)
            self._flight = None
            self.prefix_pins.clear()
            for session in list(self.branches.sessions.values()):
                self.forget(session)
            self.reset_prefix_cache()
            self.blending.close()
            self.stored.close()
