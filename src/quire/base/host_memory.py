"""Free memory of a device; for the host within the limits of this process's control groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import torch

GROUPS = Path("/sys/fs/cgroup")
"""Where control groups are mounted."""


def free_memory(device: torch.device) -> int | None:
    """Return the bytes free on ``device`` within the control groups' limits; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    limits = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*limits, *free_in_groups(groups)], default=None)


def free_in_groups(lines: list[str], root: Path = GROUPS) -> Iterator[int]:
    """Yield the free bytes of each control group of a process that has a limit. ``lines``: the
    lines of its ``/proc/PID/cgroup``. The kernel's cache of files counts as free."""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names, cache = root, ("memory.max", "memory.current"), ("inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            cache = ("total_inactive_file", "total_active_file")
        else:
            continue
        # In a container the path may be the host's, and the mount begins at the container's group.
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents) if inside.name else (inside,):
            folder = base / group
            with suppress(OSError, ValueError):  # "max": no limit
                limit, used = (int((folder / name).read_text(encoding="ascii")) for name in names)
                stat = dict(one.split() for one in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
                yield max(0, limit - used + sum(int(stat.get(name, 0)) for name in cache))


def size_words(nbytes: int) -> str:
    """Return a number of bytes for a message, in GiB or MiB and in bytes."""
    unit, name = (30, "GiB") if nbytes >= 1 << 30 else (20, "MiB")
    return f"{nbytes / (1 << unit):.2f} {name} ({nbytes:,} bytes)"
