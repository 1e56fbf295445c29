"""How OpenMP's threads wait: what Quire asks for where it still can, what the user says, and what
``quire doctor`` tells.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quire.base import openmp
from quire.cli import doctor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP comes with torch on Linux")


def told(program: str, **given: str) -> tuple[str, str]:
    """What the runtime says of its settings while it is loaded, and what ``doctor``
    makes of them."""
    kept = {name: value for name, value in os.environ.items() if name not in openmp.VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nfrom quire.cli.doctor import _waiting; import torch; print(_waiting())"],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
        env=kept | {"OMP_DISPLAY_ENV": "VERBOSE"} | given,
    )
    spins = [line.split("'")[1] for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    assert len(spins) == 1, done.stderr
    return spins[0], done.stdout


def test_quire_comes_first() -> None:
    spins, finding = told("import quire")
    assert spins == str(openmp.SPINS)
    assert "set by Quire" in finding
    assert "ok=True" in finding


def test_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in openmp.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    before = dict(os.environ)
    assert openmp.decide() == "user"
    assert dict(os.environ) == before


@pytest.mark.slow
def test_the_user_has_the_last_word() -> None:
    spins, finding = told("import quire", OMP_WAIT_POLICY="PASSIVE")
    assert spins == "0"
    assert "OMP_WAIT_POLICY=PASSIVE" in finding


@pytest.mark.slow
def test_torch_was_there_before() -> None:
    spins, finding = told("import torch, quire")
    assert spins not in ("0", str(openmp.SPINS))
    assert "ok=False" in finding
    assert "import quire before torch" in finding


@pytest.mark.parametrize("decision", ["quire", "user", "late", "none"])
def test_doctor_tells(decision: openmp.Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "DECISION", decision)
    assert [finding.ok for finding in doctor.examine() if finding.name == "waiting threads"] == [decision != "late"]


def test_another_system_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in openmp.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert openmp.decide() == "none"
    assert not set(openmp.VARIABLES) & set(os.environ)
