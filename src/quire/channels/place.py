"""An address at which two ends meet: ``tcp://HOST:PORT``, or ``shm:/PATH`` on one machine."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from quire.base.errors import InvalidArgument, Unsupported

_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.%]+\]|[^/:\s]+):(\d{1,5})")
_SHM = re.compile(r"shm:(/\S+)")


@dataclass(frozen=True, slots=True)
class Place:
    """An address, parsed."""

    url: str
    host: str = ""
    port: int = 0
    path: str = ""
    """Of a Unix socket; empty: it is TCP."""

    @classmethod
    def of(cls, url: str) -> Place:
        """Parse an address; ``InvalidArgument`` for another form."""
        if (found := _TCP.fullmatch(url)) is not None and int(found[2]) < 1 << 16:
            return cls(url, found[1].strip("[]"), int(found[2]))
        if (found := _SHM.fullmatch(url)) is not None:
            if not sys.platform.startswith("linux"):
                raise Unsupported(f"{url}: shared memory without a name is Linux's; give tcp://HOST:PORT", field="peer")
            return cls(url, path=found[1])
        raise InvalidArgument(
            field="peer", given=url, allowed="tcp://HOST:PORT, or shm:/PATH of a socket on this machine"
        )
