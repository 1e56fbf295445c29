"""Signals are kept while the state changes, and take effect between steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from quire.base.interrupts import SHIELD, Lock, check, exposed, uninterrupted, wait_for


class Heard(BaseException):
    """What the handler of these tests raises."""


@pytest.fixture(autouse=True)
def heard() -> Iterator[list[int]]:
    """Numbers of the signals whose handlers have run.

    That of SIGINT raises, that of SIGUSR1 does not.
    """
    numbers: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        numbers.append(number)
        if number == signal.SIGINT:
            raise Heard

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGUSR1)}
    yield numbers
    for number, handler in before.items():
        assert signal.getsignal(number) is note, "the handler is back in its place"
        signal.signal(number, handler)


def send(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def test_a_signal_waits_for_the_end_of_the_outermost_block() -> None:
    reached = []

    def act() -> None:
        with SHIELD:
            with SHIELD:
                send()
                reached.append("inner")
            reached.append("outer")
        raise AssertionError("the end of the block raises")

    with pytest.raises(Heard):
        act()
    assert reached == ["inner", "outer"]
    with pytest.raises(Heard):
        send()


def test_an_interrupt_at_a_check_point_runs_what_undoes(heard: list[int]) -> None:
    undone = []

    @uninterrupted
    def act() -> None:
        try:
            send()
            send()
            check()
            raise AssertionError("the check point raises")
        finally:
            undone.append(True)
            check()  # nothing waits any more: two presses are one interrupt

    with pytest.raises(Heard):
        act()
    assert undone
    assert heard == [signal.SIGINT]


def test_every_signal_is_delivered_also_behind_one_that_raises(heard: list[int]) -> None:
    @uninterrupted
    def act() -> None:
        send(signal.SIGINT)
        send(signal.SIGUSR1)
        assert heard == []

    with pytest.raises(Heard):
        act()
    assert heard == [signal.SIGINT, signal.SIGUSR1]


def test_an_error_of_the_block_stays_visible() -> None:
    @uninterrupted
    def act() -> None:
        send()
        raise ValueError("of the block")

    with pytest.raises(Heard) as caught:
        act()
    assert isinstance(caught.value.__context__, ValueError)


def test_code_of_users_is_interrupted_where_it_is(heard: list[int]) -> None:
    def endless() -> None:
        send()
        while True:
            pass

    with SHIELD:
        with pytest.raises(Heard):
            exposed(endless)
        send(signal.SIGUSR1)
        assert heard == [signal.SIGINT], "behind it signals are kept again"
    assert heard == [signal.SIGINT, signal.SIGUSR1]


def test_a_shield_inside_of_exposed_code_keeps_again(heard: list[int]) -> None:
    def nested() -> None:
        with SHIELD:
            send(signal.SIGUSR1)
            assert heard == []
        assert heard == [signal.SIGUSR1]

    with SHIELD:
        exposed(nested)
    assert exposed(lambda: 3) == 3, "outside of all blocks it is a plain call"


def test_what_waited_before_exposed_code_comes_first(heard: list[int]) -> None:
    with SHIELD:
        send(signal.SIGUSR1)
        assert exposed(lambda: list(heard)) == [signal.SIGUSR1]


def test_a_handler_that_is_set_inside_stays() -> None:
    before = signal.getsignal(signal.SIGUSR2)

    def mine(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it is not called")

    try:
        with SHIELD:
            signal.signal(signal.SIGUSR2, mine)
        assert signal.getsignal(signal.SIGUSR2) is mine
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_signals_that_are_ignored_or_end_the_process_are_left_alone() -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with SHIELD:
            assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
            send(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_the_holder_of_a_lock_is_shielded_and_lets_it_go() -> None:
    lock = Lock()

    def act() -> None:
        with lock:
            assert lock.owned
            send()
            with lock:
                assert lock.owned

    with pytest.raises(Heard):
        act()
    assert not lock.owned
    with lock.interruptible:
        assert lock.owned
    assert not lock.owned


@pytest.mark.parametrize("nested", [False, True])
def test_who_waits_for_a_lock_can_be_interrupted(nested: bool) -> None:
    """Outside of other blocks always, inside of one with ``interruptible``; the lock is not had
    then.
    """
    lock, holding, leave = Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            holding.set()
            leave.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert holding.wait(60)

    def take() -> None:
        with lock:
            raise AssertionError("nobody gave it")

    def take_inside() -> None:
        with SHIELD, lock.interruptible:
            raise AssertionError("nobody gave it")

    try:
        assert not lock.acquire(blocking=False)
        timer = threading.Timer(0.02, send)
        timer.start()
        with pytest.raises(Heard):
            take_inside() if nested else take()
        timer.join()
        assert not lock.owned
    finally:
        leave.set()
        holder.join()
    with lock:
        assert lock.owned


def test_waiting_for_an_event_can_be_interrupted() -> None:
    timer = threading.Timer(0.02, send)
    timer.start()
    with pytest.raises(Heard), SHIELD:
        wait_for(threading.Event())
    timer.join()
    over = threading.Event()
    over.set()
    wait_for(over)


def test_a_finaliser_lets_signals_wait_for_the_next_block(heard: list[int]) -> None:
    lock = Lock()
    assert lock.acquire(blocking=False)
    send(signal.SIGUSR1)
    lock.release(deliver=False)
    assert heard == []
    with SHIELD:
        assert heard == []
    assert heard == [signal.SIGUSR1]


def test_other_threads_change_nothing(heard: list[int]) -> None:
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with SHIELD:
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    assert inside.wait(60)
    try:
        with pytest.raises(Heard):
            send()
    finally:
        leave.set()
        thread.join()


def test_decorated_functions_and_verbs() -> None:
    done = []

    @uninterrupted
    def act(value: int) -> int:
        """Say so."""
        send()
        done.append(value)
        return value

    assert act.__doc__ == "Say so."
    with pytest.raises(Heard):
        act(3)

    class Thing:
        @uninterrupted
        def change(self) -> None:
            send()
            done.append(4)

    with pytest.raises(Heard):
        Thing().change()
    assert done == [3, 4]
