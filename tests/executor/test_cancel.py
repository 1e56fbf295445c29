"""Cancelling: prompt, harmless when idle, and the cache stays usable."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from tests.executor.conftest import Tiny, assert_close, inputs, make_executor, prompt, some_ids, token

from quire.base.errors import Cancelled
from quire.contracts.executor import ExecutorState
from quire.executor.executor import Executor
from quire.executor.llm_executor import LlmExecutor


class Pausing:
    """A model that stops before its n-th embed call until it is let go, so that a test can act in
    the middle.
    """

    def __init__(self, executor: Executor, at: int) -> None:
        self.model = executor.pool.runner.model
        self.calls, self.at = 0, at
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.runner = executor.pool.runner
        self.runner.model = self

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            self.inside.set()
            assert self.go_on.wait(30)
        return self.model.embed(tokens)

    def run(self, call: Callable[[], object], meanwhile: Callable[[], None]) -> object:
        """The result of ``call``, or its error, with ``meanwhile`` in its middle."""
        results: list[object] = []

        def work() -> None:
            try:
                results.append(call())
            except BaseException as error:
                results.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        assert self.inside.wait(30)
        meanwhile()
        self.go_on.set()
        thread.join(30)
        self.runner.model = self.model
        return results[0]


def cancel_twice(executor: Executor) -> None:
    status = executor.status()
    assert status.state is ExecutorState.BUSY
    assert status.is_ready
    assert status.current_batch_size == 1
    executor.cancel()
    executor.cancel()


def test_idle_cancel_changes_nothing(llama: Tiny, ex: Executor) -> None:
    ex.cancel()
    ids = some_ids(5)
    assert_close(ex.prefill(prompt(ids)).logits[0], llama.logits(ids))


def test_cancelled_prefill_keeps_whole_chunks(llama: Tiny) -> None:
    ex = make_executor(llama, prefill_chunk_size=4)
    llm = LlmExecutor(ex)
    cache, ids = llm.create_kv_cache(), some_ids(15)
    error = Pausing(ex, 2).run(lambda: llm.prefill(inputs(ids), cache), lambda: cancel_twice(ex))
    assert isinstance(error, Cancelled)
    assert error.token_ids == []
    assert cache.length == 8
    assert ex.metrics().total_operations == 0
    llm.prefill(inputs(ids[8:]), cache)
    assert_close(llm.step(inputs([3]), cache)[0], llama.logits([*ids, 3])[-1:])


def test_cancelled_fresh_prefill_is_freed(llama: Tiny) -> None:
    ex = make_executor(llama, prefill_chunk_size=4)
    error = Pausing(ex, 2).run(lambda: ex.prefill(prompt(some_ids(15))), lambda: cancel_twice(ex))
    assert isinstance(error, Cancelled)
    assert ex.pool.state.empty()
    handle = ex.prefill(prompt(some_ids(6))).kv_cache
    error = Pausing(ex, 2).run(lambda: ex.prefill(prompt(some_ids(15), kv_cache=handle)), lambda: cancel_twice(ex))
    assert isinstance(error, Cancelled)
    assert handle.cache.length == 6 + 8
    assert handle.is_valid


def test_cancelled_sampling_keeps_whole_steps(llama: Tiny) -> None:
    ex = make_executor(llama)
    llm = LlmExecutor(ex)
    cache, ids = llm.create_kv_cache(), some_ids(6)
    llm.prefill(inputs(ids[:5]), cache)
    plain = llm.sample_tokens(8, inputs(ids[5:]), cache.deep_copy())
    operations = ex.metrics().total_operations
    error = Pausing(ex, 4).run(lambda: llm.sample_tokens(8, inputs(ids[5:]), cache), lambda: cancel_twice(ex))
    assert isinstance(error, Cancelled)
    assert error.token_ids == plain[:4], "the forward that was running is finished"
    assert cache.length == 5 + 4
    assert ex.metrics().total_operations == operations
    # The caller continues with the last sampled id.
    assert llm.sample_tokens(4, inputs([error.token_ids[-1]]), cache) == plain[4:]


def test_cancelled_batch_changes_nothing(llama: Tiny) -> None:
    ex = make_executor(llama, prefill_chunk_size=4)
    handle = ex.prefill(prompt(some_ids(6))).kv_cache
    pausing = Pausing(ex, 2)

    def call() -> None:
        ex.batch_prefill([prompt(some_ids(6)), prompt(some_ids(7), kv_cache=handle)])

    before = ex.pool.state.num_used_pages, handle.cache.lengths
    assert isinstance(pausing.run(call, lambda: ex.cancel()), Cancelled)
    assert (ex.pool.state.num_used_pages, handle.cache.lengths) == before


def test_a_waiting_call_is_cancelled_before_it_runs_anything(llama: Tiny, ex: Executor) -> None:
    handle = ex.prefill(prompt(some_ids(6))).kv_cache
    newest = ex.decode(token(handle, 1)).kv_cache
    errors: list[object] = []

    def waiting() -> None:
        try:
            ex.decode(token(handle, 2))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=waiting)

    def meanwhile() -> None:
        thread.start()
        while len(ex._operations._running) < 2:
            pass
        ex.cancel()

    # The running call had passed its last check, so it ends well.
    assert Pausing(ex, 1).run(lambda: ex.decode(token(newest, 3)).logits, meanwhile) is not None
    thread.join(30)
    assert isinstance(errors[0], Cancelled)
    assert handle.cache.token_ids(0).tolist() == [*some_ids(6), 1, 3]
    assert newest.is_valid


def test_shutdown_cancels_what_runs(llama: Tiny) -> None:
    ex = make_executor(llama, prefill_chunk_size=4)
    stopper = threading.Thread(target=ex.shutdown)

    def meanwhile() -> None:
        stopper.start()
        while not ex._closed:
            pass

    error = Pausing(ex, 1).run(lambda: ex.prefill(prompt(some_ids(15))), meanwhile)
    stopper.join(30)
    assert isinstance(error, Cancelled)
    assert ex.status().state is ExecutorState.SHUTDOWN
    with pytest.raises(Exception, match="shut down"):
        ex.prefill(prompt([1]))
