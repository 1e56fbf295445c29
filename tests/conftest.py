"""What holds for every test: which examples Hypothesis tries, and that Ctrl-C reaches the tests
that send it.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

# Triton decides when it is imported how its programs run, and other packages import it. Without a
# GPU its interpreter runs them.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples in every run, 40 unless a test says otherwise, so that a change is red or green
# for everybody. How long one takes says how busy the machine is.
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=40)
# Others in every run, for `make test-all`.
settings.register_profile("random", deadline=None)
settings.load_profile("ci")

# A shell that runs its jobs in the background lets them ignore SIGINT, and so would all that the
# tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of ``product(n)`` one of n is quick: of two parameters and more each value is
    among them.

    A value counts by its place among those of its parameter: ``callspec.indices`` numbers cases,
    not values, since pytest 9.
    """
    places: dict[tuple[str, tuple[str, ...]], dict[tuple[int, ...], int]] = {}
    for item in items:
        if not (found := item.get_closest_marker("product")):
            continue
        params: dict[str, object] = item.callspec.params  # type: ignore[attr-defined]
        given = [mark.args[0] for mark in item.iter_markers("parametrize")]
        together = [tuple(name.strip() for name in names.split(",")) for names in given if isinstance(names, str)]
        together += [tuple(names) for names in given if not isinstance(names, str)]
        fixtures = [(name,) for name in params if not any(name in names for names in together)]
        total = 0
        for names in (*together, *fixtures):
            known = places.setdefault((item.nodeid.partition("[")[0], names), {})
            total += known.setdefault(tuple(id(params[name]) for name in names), len(known))
        if total % found.args[0]:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile: syntax trees of all tests would be looked through again and
    again, which takes 7 s.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave libraries and collected tests out of garbage collection: they stay, and looking through
    them takes 0.2 s and more.
    """
    gc.collect()
    gc.freeze()
