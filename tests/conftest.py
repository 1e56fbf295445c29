"""What holds for every test: which examples Hypothesis tries, and that Ctrl-C reaches the tests that send it."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator

import pytest
from hypothesis import settings

# The same examples in every run, 40 unless a test says otherwise, so that a change is red or green for everybody. How long one takes says how busy the machine is.
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=40)
# Others in every run, for `make test-all`.
settings.register_profile("random", deadline=None)
settings.load_profile("ci")

# A shell that runs its jobs in the background lets them ignore SIGINT, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of ``product(n)`` one of n is quick: of two parameters and more each value is among them."""
    for item in items:
        if (found := item.get_closest_marker("product")) and sum(item.callspec.indices.values()) % found.args[0]:  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile: syntax trees of all tests would be looked through again and again, which takes 7 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave libraries and collected tests out of garbage collection: they stay, and looking through them takes 0.2 s and more."""
    gc.collect()
    gc.freeze()
