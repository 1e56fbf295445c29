"""Ports for servers that end and come back on the port that they had."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

NEVER_GIVEN = range(20_000, 32_768)
"""Linux gives ports out from 32,768 to who asks for any and to every connection, others from
49,152. A free one of those may be another process's before the server has it, or while it is away.
"""


def lasting_port() -> int:
    """A free port of 127.0.0.1 that nobody gets by chance."""
    for port in random.SystemRandom().sample(NEVER_GIVEN, 100):
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"100 ports of {NEVER_GIVEN} are taken")
