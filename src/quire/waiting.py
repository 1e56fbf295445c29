"""How long the threads of one computation spin while they wait for each other, before they sleep.

PyTorch computes with OpenMP's threads, on Linux with GNU's, which spin for 300,000 rounds by default.
That is longer than a time slice: on a machine with other work the thread that is waited for may have
no processor because the waiting one has it. 3,000 rounds, a tenth of a millisecond, reach from one
operation to the next, so that a quiet machine hardly notices the difference (to sleep at once makes a
decode step up to 1.9 times as long there). docs/log.md has the figures, ``bench/waiting.py`` measures.

The runtime reads its environment once, when torch is loaded. So ``import quire``, which loads no torch,
sets the number there, unless the user has said something about it.
"""

from __future__ import annotations

import os
import sys
from typing import Literal

SPINS = 3000
"""Rounds of a waiting thread before it sleeps."""

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Who sets one of these has decided: the standard's, GNU's, and two of LLVM's and Intel's."""

Decision = Literal["quire", "user", "late", "nobody"]


def decide() -> Decision:
    """Limit the spinning where that can take effect, and return who has decided how threads wait.

    "user": the environment says something. "late": torch was loaded before, and has read what it reads.
    "nobody": another system than Linux, with another runtime, which was not measured.
    """
    if any(name in os.environ for name in VARIABLES):
        return "user"
    if sys.platform != "linux":
        return "nobody"
    if "torch" in sys.modules:
        return "late"
    os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    return "quire"


DECISION = decide()
"""As it was made when Quire was imported."""
