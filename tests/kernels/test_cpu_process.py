"""The number of threads: a process's own cores, the user's choice; the runtime of OpenMP."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.cli import doctor
from quire.kernels import cpu_process, native_library
from quire.kernels.cpu_process import limit_threads, physical_cores, usable_cores


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    for name in cpu_process.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_num_threads(before)


def machine(root: Path, siblings: dict[int, str]) -> None:
    for cpu, text in siblings.items():
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n")


def runs_on(monkeypatch: pytest.MonkeyPatch, cpus: set[int]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cpus, raising=False)


def test_siblings_are_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, {0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7", 4: "0,4", 5: "1,5", 6: "2,6", 7: "3,7"})
    runs_on(monkeypatch, set(range(8)))
    assert physical_cores(tmp_path) == 4
    runs_on(monkeypatch, {0, 4, 5})
    assert physical_cores(tmp_path) == 2
    assert usable_cores(tmp_path) == 2


def test_cpus_without_a_topology_are_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_on(monkeypatch, {0, 1, 9})
    assert usable_cores(tmp_path) == 3


@pytest.mark.parametrize(("limit", "expected"), [("250000", 2), ("50000", 1), ("9900000", 3), ("max", 3)])
def test_whole_cores_of_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, expected: int) -> None:
    runs_on(monkeypatch, {0, 1, 2})
    for name, text in {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": f"{limit} 100000"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert usable_cores(tmp_path) == expected


def test_the_default_is_lowered_and_a_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    runs_on(monkeypatch, {0, 1, 2, 3})
    monkeypatch.setattr(cpu_process, "usable_cores", lambda: 2)
    torch.set_num_threads(3)
    limit_threads()
    assert torch.get_num_threads() == 3
    torch.set_num_threads(4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    limit_threads()
    assert torch.get_num_threads() == 4
    monkeypatch.delenv("OMP_NUM_THREADS")
    limit_threads()
    assert torch.get_num_threads() == 2
    limit_threads()
    assert torch.get_num_threads() == 2


def test_it_is_never_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    runs_on(monkeypatch, {0})
    monkeypatch.setattr(cpu_process, "usable_cores", lambda: 8)
    torch.set_num_threads(1)
    limit_threads()
    assert torch.get_num_threads() == 1


RUNTIMES = """
import torch
from quire.kernels.native_library import native_library
torch.ones(1 << 20).sum()
library = native_library()
parallel = None if library is None else library.parallel
for line in open("/proc/self/maps"):
    place, *_, name = line.split()
    if "gomp" in name.rpartition("/")[2]:
        begin, end = (int(one, 16) for one in place.split("-"))
        print(name, parallel is None or begin <= parallel < end)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP comes with torch on Linux")
def test_the_kernels_run_on_the_runtime_that_pytorch_runs_on(tmp_path: Path) -> None:
    """A runtime that was loaded before takes the place of the one in PyTorch's wheel. A second one
    would have threads of its own, which compete for the cores."""
    wheels = [*(Path(torch.__file__).parent / "lib").glob("libgomp*")]
    if not wheels:
        pytest.skip("this PyTorch brings no libgomp")
    given = tmp_path / "libgomp-given.so"
    shutil.copy(wheels[0], given)
    done = subprocess.run(
        [sys.executable, "-c", RUNTIMES],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "LD_PRELOAD": str(given)},
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _ in lines} == {str(given)}
    assert "True" in {runs for _, runs in lines}


def test_a_function_that_the_runtime_lacks_is_none() -> None:
    assert cpu_process.openmp_function("GOMP_that_does_not_exist") is None


@pytest.mark.skipif(bool(native_library.native_problem()), reason="needs the C++ library")
def test_one_thread_is_no_secret(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without a runtime that they can use, the kernels are slower than PyTorch's operations."""
    monkeypatch.setattr(native_library, "openmp_function", lambda name: None)
    alone = native_library.native_library.__wrapped__()
    assert alone is not None
    assert alone.parallel is None
    assert "run on one thread" in caplog.text
    monkeypatch.setattr(native_library, "native_library", lambda: alone)
    (finding,) = (one for one in doctor.examine() if one.name == "C++ kernels")
    assert not finding.ok
    assert "on one thread" in finding.value
