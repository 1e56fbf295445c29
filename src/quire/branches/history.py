"""``TokenHistory``: the token ids of a branch, or the positions of its tokens. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.branches.media import NO_MEDIA, Media

Ids: TypeAlias = NDArray[np.int64]

UNKNOWN: Final = -1
LAST_PLACEHOLDER: Final = -4
"""Ids below this one are made from the data at placeholders."""


class TokenHistory:
    """An int64 array that grows by doubling. A fork shares it until one of both writes.

    An id below 0 stands for an embedding, which is in ``media`` if it is still known; ``UNKNOWN`` for
    a token whose id is not known, as after loading a file that does not tell.
    """

    __slots__ = ("_buffer", "_shared", "media", "size")

    def __init__(self, ids: Iterable[int] | NDArray[Any] = (), media: Media = NO_MEDIA) -> None:
        self._buffer: Ids = np.array(ids if isinstance(ids, (np.ndarray, list, tuple)) else list(ids), dtype=np.int64)
        self._shared = False
        self.size = self._buffer.size
        self.media = media

    def __len__(self) -> int:
        return self.size

    @property
    def ids(self) -> Ids:
        """A view, valid until the history changes."""
        return self._buffer[: self.size]

    @property
    def is_known(self) -> bool:
        """Whether the ids of all tokens are known."""
        return not (self.ids == UNKNOWN).any()

    def append(self, token: int) -> None:
        if self._shared or self.size == self._buffer.size:
            self._own(self.size, self.size + 1)
        self._buffer[self.size] = token
        self.size += 1

    def extend(self, ids: NDArray[Any] | Iterable[int]) -> None:
        self.replace_from(self.size, np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64))

    def replace_from(self, start: int, ids: Ids) -> None:
        """Let ``ids`` follow the first ``start`` tokens, and nothing follow them."""
        size = start + ids.size
        if self._shared or size > self._buffer.size:
            self._own(start, size)
        self._buffer[start:size] = ids
        self.size = size

    def truncate(self, size: int) -> None:
        """Keep the first ``size`` tokens, of at least as many."""
        self.size = size

    def fork(self, size: int | None = None) -> TokenHistory:
        """Return a history of the first ``size`` tokens (None: all) that copies nothing now."""
        twin = TokenHistory((), self.media)
        twin._buffer, twin.size = self._buffer, self.size if size is None else size
        twin._shared = self._shared = True
        return twin

    def _own(self, kept: int, size: int) -> None:
        """Move the first ``kept`` tokens to a buffer for at least ``size`` that no fork shares."""
        capacity = self._buffer.size
        own = np.empty(capacity if size <= capacity else max(size, 2 * capacity, 16), dtype=np.int64)
        own[:kept] = self._buffer[:kept]
        self._buffer, self._shared = own, False


def common_prefix(a_T: NDArray[Any], b_T: NDArray[Any]) -> int:
    """Return the number of equal leading elements."""
    size = min(a_T.size, b_T.size)
    differs_T = a_T[:size] != b_T[:size]
    first = int(differs_T.argmax()) if size else 0
    return first if size and differs_T[first] else size
