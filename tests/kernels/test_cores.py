"""The number of threads: cores that are a process's own, control groups, and the user's choice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.kernels import cores
from quire.kernels.cores import limit_threads, physical_cores, time_limit, usable_cores


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    for name in cores.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_num_threads(before)


def machine(root: Path, siblings: dict[int, str]) -> None:
    for cpu, text in siblings.items():
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n")


def group(root: Path, name: str, limits: dict[str, str]) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"3:cpu:/old\n0::/{name}\n")
    for path, text in limits.items():
        folder = root / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(f"{text}\n")


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


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, None),
        ({"": "max 100000", "a": "max 100000", "a/b": "max 100000"}, None),
        ({"a/b": "250000 100000"}, 2.5),
        ({"a": "150000 50000", "a/b": "max 100000"}, 3.0),
        ({"": "100000 100000", "a": "150000 50000", "a/b": "800000 100000"}, 1.0),
        ({"other": "100000 100000"}, None),
        ({"a/b": "nonsense"}, None),
    ],
)
def test_the_tightest_group_limits(tmp_path: Path, limits: dict[str, str], expected: float | None) -> None:
    group(tmp_path, "a/b", limits)
    assert time_limit(tmp_path) == expected


@pytest.mark.parametrize(("limit", "expected"), [("250000", 2), ("50000", 1), ("9900000", 3), ("max", 3)])
def test_whole_cores_of_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, expected: int) -> None:
    runs_on(monkeypatch, {0, 1, 2})
    group(tmp_path, "", {"": f"{limit} 100000"})
    assert usable_cores(tmp_path) == expected


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert time_limit(tmp_path) is None


def test_the_default_is_lowered_and_a_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    runs_on(monkeypatch, {0, 1, 2, 3})
    monkeypatch.setattr(cores, "usable_cores", lambda: 2)
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
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    torch.set_num_threads(1)
    limit_threads()
    assert torch.get_num_threads() == 1
