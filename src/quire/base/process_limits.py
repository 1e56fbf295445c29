"""Memory and processor time that this process may use, within the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import torch

ROOT = Path("/")
"""The folder that holds proc and sys."""


def free_memory(device: torch.device) -> int | None:
    """Return the bytes free on ``device``, of the host within the control groups' limits; None if
    unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    try:
        lines = (ROOT / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    limits = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*limits, *free_in_groups()], default=None)


def free_in_groups(root: Path = ROOT) -> Iterator[int]:
    """Yield the free bytes of each control group that limits memory. The kernel's cache of files
    counts as free."""
    for folder, is_first in _groups("memory", root):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_first else ("memory.max", "memory.current")
        prefix = "total_" if is_first else ""
        with suppress(OSError, ValueError):  # "max": no limit
            limit, used = (int((folder / name).read_text(encoding="ascii")) for name in names)
            stat = dict(one.split() for one in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
            yield max(0, limit - used + cached)


def time_limit(root: Path = ROOT) -> float | None:
    """Return the lowest limit of processor time of the control groups, in cores; None: no limit."""
    limits: list[float] = []
    for folder, is_first in _groups("cpu", root):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_first else ("cpu.max",)
        with suppress(OSError, ValueError):  # "max": no limit
            quota, period = " ".join((folder / name).read_text(encoding="ascii") for name in names).split()
            if float(quota) > 0:  # -1: no limit
                limits.append(float(quota) / float(period))
    return min(limits, default=None)


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each control group that may limit this process, from its own to the
    outermost, and whether it is of version 1, which has a tree for each controller."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        tree = root / "sys/fs/cgroup" / (controller if controllers else "")
        # In a container the path may be the host's, and the mount begins at the container's group.
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents) if inside.name else (inside,):
            yield tree / group, bool(controllers)
