"""Memory of packed weights: its bytes stay, in small pages and in huge ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from quire.kernels.linear import packed_memory
from quire.kernels.linear.packed_memory import ALIGNMENT, HUGE, SLAB, PackedMemory, collapses


def huge_bytes(tensor: torch.Tensor) -> int:
    """Bytes of huge pages in the mapping that holds the tensor."""
    text = Path("/proc/self/smaps").read_text()
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        start, stop = (int(part, 16) for part in mapping.split(" ", 1)[0].split("-"))
        if start <= tensor.data_ptr() < stop:
            found = re.search(r"AnonHugePages:\s+(\d+) kB", mapping)
            return int(found[1]) * 1024 if found else 0
    return 0


def filled(memory: PackedMemory, nbytes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    taken = memory.take(nbytes)
    taken.copy_(values)
    return taken, values


def test_bytes_stay_while_pages_are_collapsed() -> None:
    memory = PackedMemory()
    found = [filled(memory, 3 * HUGE + 100, 1), filled(memory, 7, 2)]
    thread = memory.collapse()
    if not collapses():
        assert thread is None
    else:
        assert thread is not None
        thread.join()
        assert huge_bytes(found[0][0]) >= 2 * HUGE
    found.append(filled(memory, HUGE, 3))
    for taken, values in found:
        assert torch.equal(taken, values)
        assert taken.data_ptr() % ALIGNMENT == 0


def test_other_systems_have_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_memory, "collapses", lambda: False)
    memory = PackedMemory()
    taken, values = filled(memory, 2 * HUGE, 1)
    assert memory.collapse() is None
    assert torch.equal(taken, values)


def test_little_memory_needs_no_thread() -> None:
    memory = PackedMemory()
    small = memory.take(1000)
    assert memory.collapse() is None
    assert small.numel() == 1000


@pytest.mark.skipif(not collapses(), reason="the system does not collapse pages")
def test_a_freed_slab_is_passed_over() -> None:
    memory = PackedMemory()
    filled(memory, SLAB + 1, 1)  # is freed at once
    taken, values = filled(memory, 2 * HUGE, 2)
    thread = memory.collapse()
    assert thread is not None
    thread.join()
    assert huge_bytes(taken) >= HUGE
    assert torch.equal(taken, values)


def test_untouched_memory_is_not_taken() -> None:
    """A slab is larger than what is used of it."""
    memory = PackedMemory()
    taken, _ = filled(memory, 2 * HUGE + ALIGNMENT, 1)
    thread = memory.collapse()
    if thread is not None:
        thread.join()
    assert huge_bytes(taken) <= 4 * HUGE
