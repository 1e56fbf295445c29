"""Runs the tests that are named with each mutant on a copy of the package that has its fault.

A mutant is *killed* if one of its tests fails, the tests do not end, or the interpreter dies. It
*survived* if all of them pass: then a test is missing. Before anything is changed the same tests
must pass on the copy.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

T = TypeVar("T")
R = TypeVar("R")
Verdict: TypeAlias = Literal["killed", "SURVIVED", "NOT RUN"]

ROOT = Path(__file__).resolve().parents[2]
"""The project."""
LIMIT = 120.0
"""Seconds that the tests of one mutant may take; they need a few."""
BASELINE_LIMIT = 1200.0
"""Seconds that the tests of all mutants may take."""
LIBRARIES = (
    *("pytest", "hypothesis.strategies", "xdist", "numpy", "torch", "safetensors.torch", "tokenizers", "msgspec"),
    *("jinja2", "fastapi.testclient", "uvicorn", "httpx", "prometheus_client", "peft"),
    *("transformers", "transformers.modeling_utils", "transformers.generation"),
)
"""Take long to import; none of them imports Quire."""
MAX_JOBS = 2
"""Each job is one process with one thread."""


class BrokenRun(Exception):
    """The tests say nothing about the mutants, with the reason."""


class NotRun(Exception):
    """One mutant cannot be run, with the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One fault: in ``file`` the text ``old``, which occurs once, becomes ``new``."""

    name: str
    file: str
    """Below ``src/quire``."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Files or test ids below ``tests``; one of them fails."""

    def applied(self, text: str) -> str:
        """The faulty text of the file. ``BrokenRun`` unless ``old`` occurs exactly once."""
        found = text.count(self.old)
        if found != 1:
            raise BrokenRun(f"{self.name}: its old text occurs {found} times in {self.file}; once is needed")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a mutant."""

    mutant: Mutant
    verdict: Verdict
    by: str
    """The test that failed, or what else ended the run."""
    why: str
    """In what way, in one line."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """How a run of pytest ended."""

    code: int | None
    """Exit status, negative for a signal; None: the time was up."""
    failed: tuple[tuple[str, str], ...]
    """Tests and the first line of their errors."""
    output: str

    @property
    def tail(self) -> str:
        return "\n".join(self.output.splitlines()[-12:])


class Pytest:
    """Runs pytest in forks of one process (``tests.mutants.warm``), one at a time."""

    def __init__(self, project: Path, folder: Path, environment: dict[str, str]) -> None:
        """``folder``: for the output."""
        self._output = folder / "output"
        self._lock = threading.Lock()
        self._fork: int | None = None
        self._over = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.warm", *LIBRARIES],
            cwd=project,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, arguments: Sequence[str], limit: float) -> Report:
        """stdout and stderr together; at the limit the whole group of processes is killed."""
        with self._lock:
            if self._over:
                raise BrokenRun("interrupted")
            self._tell(json.dumps([str(self._output), *arguments]))
            self._fork = pid = self._answer()
        is_late = threading.Event()

        def late() -> None:
            is_late.set()
            _kill(pid)

        timer = threading.Timer(limit, late)
        timer.start()
        try:
            code = self._answer()
        finally:
            timer.cancel()
            with self._lock:
                self._fork = None
        _kill(pid)  # what it has left behind
        return Report(None if is_late.is_set() else code, (), self._output.read_text(errors="replace"))

    def end(self) -> None:
        """Kill what runs, start nothing more."""
        with self._lock:
            self._over = True
            if self._fork is not None:
                _kill(self._fork)
            _kill(self._process.pid)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its answer will be missing
            print(line, file=self._process.stdin, flush=True)

    def _answer(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BrokenRun("interrupted" if self._over else "the process that runs pytest has died")
        return int(line)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):  # it may have ended by itself
        os.killpg(group, signal.SIGKILL)


class Copy:
    """A copy of the sources that one worker may change."""

    def __init__(self, project: Path, folder: Path) -> None:
        self._failures = folder / "failures"
        self.sources = folder / "src"
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(project / "src", self.sources, ignore=ignored)
        if (project / "bench").exists():
            shutil.copytree(
                project / "bench", folder / "bench", ignore=shutil.ignore_patterns("__pycache__", "node_modules")
            )
        environment = {
            **os.environ,
            "PYTEST_ADDOPTS": "",
            "PYTHONPATH": os.pathsep.join((str(self.sources), str(folder / "bench"), str(ROOT))),
            "MUTANT_SOURCES": str(self.sources),
            "MUTANT_FAILURES": str(self._failures),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        }
        self.pytest = Pytest(project, folder, environment)

    @contextmanager
    def with_fault(self, mutant: Mutant) -> Iterator[None]:
        path = self.sources / "quire" / mutant.file
        text = path.read_text()
        try:
            self._write(path, mutant.applied(text))
            yield
        finally:
            self._write(path, text)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text)
        # Compiled code is told from its source by size and second, which two texts may share.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def run_tests(self, tests: Iterable[str], limit: float) -> Report:
        """pytest in one process, up to the first failure, on this copy and no other."""
        self._failures.unlink(missing_ok=True)
        options = ["-x", "-q", "-n", "0", "-m", "not slow", "--tb=short", "-p", "no:cacheprovider"]
        options += ["-o", "pythonpath=."]  # without the original quire_bench
        report = self.pytest.run(["-p", "tests.mutants.inside", *options, *(f"tests/{one}" for one in tests)], limit)
        lines = self._failures.read_text().splitlines() if self._failures.exists() else []
        found = tuple((one, why) for one, _, why in (line.partition("\t") for line in lines))
        return Report(report.code, found, report.output)


def judged(mutant: Mutant, report: Report, seconds: float, limit: float) -> Outcome:
    """What a run of its tests says about a mutant."""

    def outcome(verdict: Verdict, by: str, why: str = "") -> Outcome:
        return Outcome(mutant=mutant, verdict=verdict, by=by, why=why, seconds=seconds)

    if report.failed:
        return outcome("killed", *report.failed[0])
    if report.code is None:
        return outcome("killed", f"a hang: not over after {limit:.0f} s")
    if report.code < 0:
        return outcome("killed", f"a crash: signal {-report.code}")
    if report.code == 0:
        return outcome("SURVIVED", "no test failed")
    return outcome("NOT RUN", f"pytest ended with {report.code}", report.tail)


class Harness:
    """Runs mutants on copies, some of them at a time. Use it as a context."""

    def __init__(
        self,
        project: Path = ROOT,
        *,
        jobs: int = 1,
        limit: float = LIMIT,
        copy: Callable[[Path, Path], Copy] = Copy,
    ) -> None:
        """``copy``: makes a copy of a project in a folder."""
        self._limit = limit
        self.folder = Path(tempfile.mkdtemp(prefix="mutants."))
        self._copies = [copy(project, self.folder / str(job)) for job in range(jobs)]

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def check_without_faults(self, mutants: Sequence[Mutant]) -> None:
        """``BrokenRun`` unless every fault fits its file and all tests that are named pass."""
        for mutant in mutants:
            mutant.applied((self._copies[0].sources / "quire" / mutant.file).read_text())
        files: dict[str, list[str]] = {}
        for test in dict.fromkeys(test for mutant in mutants for test in mutant.tests):
            files.setdefault(test.partition("::")[0], []).append(test)
        # A file is begun once, for its fixtures; a file that is named as a whole needs no further
        # names.
        groups = [[file] if file in tests else tests for file, tests in files.items()]
        shares = [groups[job :: len(self._copies)] for job in range(len(self._copies))]

        def run(job: int) -> Report:
            return self._copies[job].run_tests(itertools.chain(*shares[job]), BASELINE_LIMIT)

        for report in self._together(run, [job for job, share in enumerate(shares) if share]):
            if report.code != 0:
                raise BrokenRun(f"the tests do not pass without any fault:\n{report.tail}")

    def run(self, mutants: Sequence[Mutant], tell: Callable[[Outcome], None] = lambda _: None) -> list[Outcome]:
        """The outcomes in order; ``tell`` hears of each when it is there."""
        free: queue.Queue[Copy] = queue.Queue()
        for copy in self._copies:
            free.put(copy)

        def run(mutant: Mutant) -> Outcome:
            copy = free.get()
            try:
                begin = time.monotonic()
                with copy.with_fault(mutant):
                    report = copy.run_tests(mutant.tests, self._limit)
                found = judged(mutant, report, time.monotonic() - begin, self._limit)
            except NotRun as error:
                found = Outcome(mutant=mutant, verdict="NOT RUN", by=str(error), why="", seconds=0.0)
            finally:
                free.put(copy)
            tell(found)
            return found

        return self._together(run, mutants)

    def _together(self, act: Callable[[T], R], items: Iterable[T]) -> list[R]:
        with ThreadPoolExecutor(len(self._copies)) as pool:
            futures = [pool.submit(act, item) for item in items]
            try:
                return [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                self._end()
                raise

    def _end(self) -> None:
        for copy in self._copies:
            copy.pytest.end()


def table(outcomes: Sequence[Outcome]) -> str:
    """One line for each mutant."""
    rows = [("mutant", "file", "killed by", "s")]
    for one in outcomes:
        by = one.by if one.verdict == "killed" else f"{one.verdict}: {one.by}"
        rows.append((one.mutant.name, one.mutant.file, by.removeprefix("tests/"), f"{one.seconds:.1f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=False)) + row[3].rjust(widths[3] + 2)
        for row in rows
    )


def chosen(mutants: Sequence[Mutant], names: Sequence[str]) -> list[Mutant]:
    """Those of these names, all if there are none. ``BrokenRun`` for a name that nobody has."""
    strange = sorted(set(names) - {mutant.name for mutant in mutants})
    if strange:
        raise BrokenRun(f"no mutant is called {', '.join(strange)}; there are {', '.join(one.name for one in mutants)}")
    return [mutant for mutant in mutants if not names or mutant.name in names]


def main(
    mutants: Sequence[Mutant],
    arguments: Sequence[str] | None = None,
    project: Path = ROOT,
    copy: Callable[[Path, Path], Copy] = Copy,
) -> int:
    """0: all were killed; 1: some survived, or could not run; 2: nothing can be said."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description="Plant faults that the tests must find."
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this mutant (may be repeated)")
    parser.add_argument("--jobs", type=int, default=MAX_JOBS, choices=range(1, MAX_JOBS + 1), help="at a time")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="for the tests of one mutant")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    try:
        wanted = chosen(mutants, options.only)
        told: list[Outcome] = []

        def tell(one: Outcome) -> None:
            told.append(one)
            print(
                f"{len(told):3}/{len(wanted)} {one.verdict} {one.mutant.name}: {one.by} ({one.seconds:.1f} s) {one.why}"
            )
            sys.stdout.flush()

        with Harness(project, jobs=min(options.jobs, len(wanted)), limit=options.limit, copy=copy) as harness:
            print(f"The tests of {len(wanted)} mutants, without any fault ...", flush=True)
            harness.check_without_faults(wanted)
            print(f"... pass ({time.monotonic() - begin:.0f} s).", flush=True)
            outcomes = harness.run(wanted, tell)
    except BrokenRun as error:
        print(error, file=sys.stderr)
        return 2
    alive = [one for one in outcomes if one.verdict != "killed"]
    print(f"\n{table(outcomes)}\n")
    print(f"{len(outcomes) - len(alive)} of {len(outcomes)} killed in {time.monotonic() - begin:.0f} s.")
    return 1 if alive else 0
