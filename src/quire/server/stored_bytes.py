"""The count of bytes of state files on the disk, for uploads and downloads, in all and by key."""

from __future__ import annotations

from collections import Counter

from quire.server.errors import RETRY_AFTER, ApiError
from quire.server.settings import ServerSettings


class StoredBytes:
    """The count of one server. It runs on the server's event loop."""

    def __init__(self, settings: ServerSettings) -> None:
        self._limit, self._each = settings.stored_limit, settings.stored_per_key
        self._held: Counter[str] = Counter()

    def change(self, owner: str, old: int, new: int) -> None:
        """Count ``new`` bytes instead of ``old`` ones for a file of ``owner``. Raise ``ApiError``,
        and change nothing: 429 if the owner then has too many, 503 if all together have, 400 if the
        file alone is too large for an owner."""
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
