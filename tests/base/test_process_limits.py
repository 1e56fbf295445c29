"""Memory and processor time within the limits of control groups, of both versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from quire.base.process_limits import free_in_groups, time_limit

NEW = "anon 600\ninactive_file 100\nactive_file 50"
FIRST = "total_inactive_file 30\ntotal_active_file 20"


def write(root: Path, lines: str, files: Mapping[str, object]) -> None:
    """A machine's control groups: the process's groups, and files in sys/fs/cgroup."""
    for name, content in {
        "proc/self/cgroup": lines,
        **{f"sys/fs/cgroup/{name}": files[name] for name in files},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")


def test_memory_is_free_within_every_limit(tmp_path: Path) -> None:
    """What a group holds counts, other than files that the kernel can give up."""
    files: dict[str, object] = {}
    for place, limit, used in (("pod/task/", "max", 5), ("pod/", 1000, 900), ("", 5000, 1000)):
        files |= {f"{place}memory.max": limit, f"{place}memory.current": used, f"{place}memory.stat": NEW}
    write(tmp_path, "0::/pod/task", files)
    assert sorted(free_in_groups(tmp_path)) == [250, 4150]
    # A container's own group is the root of its mount, whatever the host calls it.
    write(tmp_path, "0::/elsewhere/id", {})
    assert sorted(free_in_groups(tmp_path)) == [4150]
    place = "memory/docker/memory"
    files = {f"{place}.limit_in_bytes": 700, f"{place}.usage_in_bytes": 900, f"{place}.stat": FIRST}
    write(tmp_path, "3:cpuset:/\n4:cpu,memory:/docker", files)
    assert list(free_in_groups(tmp_path)) == [0]


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
def test_the_tightest_group_limits_time(tmp_path: Path, limits: dict[str, str], expected: float | None) -> None:
    write(tmp_path, "3:cpu:/old\n0::/a/b", {f"{name}/cpu.max": text for name, text in limits.items()})
    assert time_limit(tmp_path) == expected


@pytest.mark.parametrize(
    ("own", "outer", "expected"), [(250, -1, 2.5), (-1, 100, 1.0), (-1, -1, None), (300, 800, 3.0)]
)
def test_groups_of_the_first_version_limit_time(tmp_path: Path, own: int, outer: int, expected: float | None) -> None:
    """As of docker on hosts with a tree of groups for each controller."""
    files = {
        f"cpu/{place}cpu.cfs_{name}_us": text
        for place, quota in (("docker/", own), ("", outer))
        for name, text in (("quota", quota * 1000 if quota > 0 else -1), ("period", 100_000))
    }
    write(tmp_path, "4:cpuset:/docker\n5:cpu,cpuacct:/docker", files)
    assert time_limit(tmp_path) == expected


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert time_limit(tmp_path) is None
    assert not list(free_in_groups(tmp_path))
