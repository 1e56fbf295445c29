"""Freed memory of a CPU process: kept for the next activations, unless a user has chosen."""

from __future__ import annotations

import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from quire.kernels import cpu_process

SCRIPT = """
import resource, torch
from quire.kernels.cpu_process import keep_freed_memory
if {keeps}:
    print(keep_freed_memory())
for _ in range(16):  # Aligned blocks fit into freed ones once some lie side by side.
    torch.ones(40 << 20, dtype=torch.uint8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(40 << 20, dtype=torch.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keeps: bool) -> int:
    script = SCRIPT.format(keeps=keeps)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return int(done.stdout.split()[-1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked to keep freed memory")
def test_blocks_are_not_taken_again_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cpu_process.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    # Ten times 40 MiB are 102,400 pages of 4 KiB, or fewer of more.
    assert faults(keeps=True) < 200
    assert cpu_process.keep_freed_memory()


@pytest.mark.parametrize("name", cpu_process.ALLOCATOR_VARIABLES)
def test_a_choice_of_the_user_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert not cpu_process.keep_freed_memory()


@pytest.mark.parametrize("most", [1 << 30, 32 << 20, 1 << 20])
def test_what_an_older_glibc_refuses_is_asked_for_in_less(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_: dict[int, int] = {}

    def mallopt(number: int, value: int) -> int:
        if number == cpu_process.M_MMAP_THRESHOLD and value > most:
            return 0
        set_[number] = value
        return 1

    for name in cpu_process.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu_process.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    assert cpu_process.keep_freed_memory() == (most > 1 << 20)
    found = {cpu_process.M_MMAP_THRESHOLD: min(most, 128 << 20), cpu_process.M_TRIM_THRESHOLD: cpu_process.KEPT_BYTES}
    assert set_ == (found if most > 1 << 20 else {})


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cpu_process.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu_process.ctypes, "CDLL", lambda name: object())
    assert not cpu_process.keep_freed_memory()
