"""How many bytes of state files lie on this machine's disk on their way in or out: of each API key, and in all."""

from __future__ import annotations

from collections import Counter

from quire.server.errors import RETRY_AFTER, ApiError
from quire.server.settings import ServerSettings


class StoredBytes:
    """All of one server. It runs on the server's event loop."""

    def __init__(self, settings: ServerSettings) -> None:
        self._limit, self._each = settings.stored_limit, settings.stored_per_key
        self._held: Counter[str] = Counter()

    def change(self, owner: str, old: int, new: int) -> None:
        """A file of ``owner`` has ``new`` bytes and no longer ``old``. ``ApiError`` 429 if the owner has too many then, 503 if all
        together have, 400 if one file is more than an owner may have; nothing is changed then."""
        if new > old:
            if new > self._each:
                raise ApiError(
                    400, f"a state file of {new} bytes; at most {self._each} bytes are stored", code="storage_limit"
                )
            more, later = f"{new - old} more bytes of state files", {"Retry-After": str(RETRY_AFTER)}
            if (own := self._held[owner]) + new - old > self._each:
                raise ApiError(
                    429,
                    f"{more} would be too many beside {own} of yours; at most {self._each} are stored: wait for the others to end",
                    code="storage_limit",
                    headers=later,
                )
            if (held := self._held.total()) + new - old > self._limit:
                raise ApiError(
                    503,
                    f"{more} would be too many beside {held} of all; at most {self._limit} are stored: try again later",
                    code="storage_limit",
                    headers=later,
                )
        self._held[owner] += new - old
        if not self._held[owner]:
            del self._held[owner]

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return self._held.total()
