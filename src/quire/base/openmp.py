"""A limit on how long waiting threads of one computation spin before they sleep.

PyTorch computes with OpenMP's threads, on Linux with GNU's, which spin for 300,000 rounds by
default. That exceeds a time slice: on a busy machine a waiting thread may occupy the processor that
the awaited thread needs. 3,000 rounds (0.1 ms) last from one operation to the next, so a quiet
machine hardly notices them. Sleeping at once would make its decode steps up to 1.9 times as long.
docs/log.md has the figures; ``bench/waiting.py`` measures them.

OpenMP reads its environment once, when torch is loaded. So ``import quire``, which loads no torch,
sets the number there unless the user has set one of these variables.
"""

from __future__ import annotations

import os
import sys
from typing import Literal

SPINS = 3000
"""Rounds of a waiting thread before it sleeps."""

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Variables by which the user decides: the standard's, GNU's, and two of LLVM's and Intel's."""

Decision = Literal["quire", "user", "late", "none"]


def decide() -> Decision:
    """Limit the spinning if possible, and return the origin of the decision.

    "user": the environment has a setting. "late": torch was loaded before and has read it.
    "none": a system other than Linux, with another runtime, which was not measured.
    """
    if any(name in os.environ for name in VARIABLES):
        return "user"
    if sys.platform != "linux":
        return "none"
    if "torch" in sys.modules:
        return "late"
    os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    return "quire"


DECISION = decide()
"""The decision at the import of Quire."""
