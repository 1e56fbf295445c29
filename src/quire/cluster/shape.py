"""``ClusterShape``: the size of a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from quire.base.config import check_int, check_real

MOST = 1000
"""The most replicas, and the most of what each takes."""


@dataclass(frozen=True, kw_only=True)
class ClusterShape:
    """How many replicas there are, and what each takes. ``InvalidArgument`` for a bad value."""

    least: int = 1
    most: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    target: float = 8.0
    """Requests under way for each replica at which their number stays."""
    slack: int = 4
    """``Router.slack``."""

    def __post_init__(self) -> None:
        check_int("replicas", self.least, 1, MOST)
        check_int("max_replicas", self.most, self.least, MOST)
        check_int("slack", self.slack, 0, MOST)
        check_real("cpus", self.cpus, above=0, up_to=MOST)
        if self.gpus != 0:
            check_real("gpus", self.gpus, above=0, up_to=MOST)
        check_real("target", self.target, above=0, up_to=MOST)
