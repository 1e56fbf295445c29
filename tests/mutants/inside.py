"""A plugin of the pytest that runs on a copy: it sees to it that the copy is what is tested, and
notes what fails.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import Phase, settings

# The same examples in every run; what fails need not be made small.
settings.register_profile(
    "mutants",
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    print_blob=False,
)


def pytest_configure() -> None:
    settings.load_profile("mutants")  # after tests/conftest.py, which loads another
    import quire

    if not Path(quire.__file__).resolve().is_relative_to(Path(os.environ["MUTANT_SOURCES"]).resolve()):
        raise pytest.UsageError(f"quire is imported from {quire.__file__}, not from the copy")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        reason = report.longreprtext.rstrip().splitlines() or [""]
        first = next((line for line in reason if line.startswith("E ")), reason[-1])
        with Path(os.environ["MUTANT_FAILURES"]).open("a") as file:
            file.write(f"{report.nodeid}\t{' '.join(first[1:].split())[:160]}\n")
