"""What holds for every test: which examples Hypothesis tries, that Ctrl-C reaches the tests that
send it, and that old objects are not looked through again and again.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

# Triton decides when it is imported how its programs run, and other packages import it. Without a
# GPU its interpreter runs them.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# OpenMP reads this when torch is loaded, here and in processes that tests start. Threads of tests
# that ask for several would spin while they wait, on processors that other tests need: 30 % of the
# processor time of tests/kernels.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The same examples in every run, 40 unless a test says otherwise, so that a change is red or green
# for everybody. How long one takes says how busy the machine is.
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=40)
# Others in every run, for `make test-all`.
settings.register_profile("random", deadline=None)
settings.load_profile("ci")
# Hypothesis also draws numbers and texts that occur in the modules of this project that are loaded:
# examples would depend on the tests that ran before, and it would parse all modules for them.
assert providers._get_local_constants() is providers._local_constants
providers._get_local_constants = lambda: providers._local_constants

TURNS = {"hybrid": 3, "checkpoint": 3}
"""Fixtures over kinds of models, and how many of these take turns: ``turns(n)`` for all tests that
use them and say nothing else.
"""

# A shell that runs its jobs in the background lets them ignore SIGINT, and so would all that the
# tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures of small models, for every room, where tests run: the process that hands
    them out to others needs no PyTorch."""
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.small_llms")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cases of ``product(n)`` one of n is quick: of two parameters and more each value is
    among them. So of ``turns(n)``, where the name of the test says with which case to begin: what
    one test leaves out is in another one.

    In ``make test`` slow tests are left out here, before other hooks look at each of them.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, all_cases in tests.items():
        count, is_product = share(all_cases[0])
        cases = [case for case in all_cases if is_product or not case.get_closest_marker("slow")] if count else []
        if not cases:
            continue
        begin = 0 if is_product else zlib.crc32(test.rpartition("::")[2].encode())
        quick = [case for case, place in zip(cases, places(cases), strict=True) if (begin + place) % count == 0]
        for case in cases:
            if case not in (quick or cases[begin % len(cases) :][:1]):
                case.add_marker(pytest.mark.slow)
    if config.getoption("markexpr") == "not slow":
        kept: tuple[list[pytest.Item], list[pytest.Item]] = [], []
        for item in items:
            kept[item.get_closest_marker("slow") is None].append(item)
        items[:] = kept[True]
        config.hook.pytest_deselected(items=kept[False])


def share(item: pytest.Item) -> tuple[int, bool]:
    """Of how many cases of a test one is quick, 0 if all are; and whether they are a product."""
    if found := item.get_closest_marker("product"):
        return int(found.args[0]), True
    if found := item.get_closest_marker("turns"):
        return int(found.args[0]), False
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return max((count for name, count in TURNS.items() if name in params), default=0), False


def places(cases: list[pytest.Item]) -> Iterator[int]:
    """For each case the places of its values among those of their parameters, added up.

    ``callspec.indices`` numbers cases, not values, since pytest 9.
    """
    known: dict[tuple[str, ...], dict[tuple[int, ...], int]] = {}
    for case in cases:
        params: dict[str, object] = case.callspec.params  # type: ignore[attr-defined]
        given = [mark.args[0] for mark in case.iter_markers("parametrize")]
        together = [tuple(name.strip() for name in names.split(",")) for names in given if isinstance(names, str)]
        together += [tuple(names) for names in given if not isinstance(names, str)]
        fixtures = [(name,) for name in params if not any(name in names for names in together)]
        yield sum(
            (seen := known.setdefault(names, {})).setdefault(tuple(id(params[name]) for name in names), len(seen))
            for names in (*together, *fixtures)
        )


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
    # Ten times as seldom as usual; all generations about as often.
    gc.set_threshold(7000, 10, 1)
    # In every test pytest adds its handlers to each logger that hands nothing up; PyTorch has 60.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith(("torch", "transformers")):
            logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Leave what a module has left behind out of garbage collection, too: caches, and libraries
    that were imported late. A collection in the middle of the suite took 0.25 s, and tests ask for
    many.
    """
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
