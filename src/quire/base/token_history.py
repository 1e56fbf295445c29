"""``TokenHistory``: the token ids of a branch, or the positions of its tokens. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import InvalidArgument
from quire.base.media import NO_MEDIA, Media

Ids: TypeAlias = NDArray[np.int64]

UNKNOWN: Final = -1
LAST_PLACEHOLDER: Final = -4
"""Ids below this one are computed from the data at placeholders."""

_MAX_ID: Final = int(np.iinfo(np.int32).max)


class TokenHistory:
    """An int64 array that grows by doubling. A fork shares it until either of them writes.

    An id below 0 stands for an embedding, which is in ``media`` if it is still known; ``UNKNOWN``
    for a token whose id is not known, as after loading a file without ids.
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
        """Return a view of the ids, which is valid until the history changes."""
        return self._buffer[: self.size]

    @property
    def is_known(self) -> bool:
        """Return True if the ids of all tokens are known."""
        return not (self.ids == UNKNOWN).any()

    def append(self, token: int) -> None:
        if self._shared or self.size == self._buffer.size:
            self._own(self.size, self.size + 1)
        self._buffer[self.size] = token
        self.size += 1

    def extend(self, ids: NDArray[Any] | Iterable[int]) -> None:
        self.replace_from(self.size, np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64))

    def replace_from(self, start: int, ids: Ids) -> None:
        """Replace everything after the first ``start`` tokens by ``ids``."""
        size = start + ids.size
        if ids.size:
            if self._shared or size > self._buffer.size:
                self._own(start, size)
            self._buffer[start:size] = ids
        self.size = size

    def truncate(self, size: int) -> None:
        """Keep the first ``size`` tokens, of at least as many."""
        self.size = size

    def fork(self, size: int | None = None) -> TokenHistory:
        """Return a history of the first ``size`` tokens (None: all), without a copy until a
        write."""
        twin = TokenHistory((), self.media)
        twin._buffer, twin.size = self._buffer, self.size if size is None else size
        twin._shared = self._shared = True
        return twin

    def _own(self, kept: int, size: int) -> None:
        """Move the first ``kept`` tokens to a private buffer for at least ``size``."""
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


def checked_ids(tokens: Sequence[int] | NDArray[Any]) -> Ids:
    """Return ids ``[T]`` as int64: an int64 array as it is, other arrays and lists converted.

    ``InvalidArgument`` unless they are one row of integers in 0..2^31 - 1, or, in an array, below
    -4: those ids are computed from the data of an image or an embedding (``quire.base.media``).
    A plain placeholder (-1 to -4) does not identify its data, so it must never match.
    """
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise InvalidArgument(f"tokens must be a 1-D integer array, got {tokens.dtype} of shape {tokens.shape}")
        ids = tokens
    else:
        if isinstance(tokens, bytes | bytearray | str):
            raise InvalidArgument(f"tokens must be integer token ids, got {type(tokens).__name__}; tokenize text first")
        try:
            # Unsigned: less than half the time of np.asarray, and floats are refused instead of
            # truncated.
            ids = np.frombuffer(array("I", tokens), dtype=np.uintc)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(f"tokens must be integers in [0, {_MAX_ID}]: {error}") from None
    if ids.size and (
        int(ids.max()) > _MAX_ID or (int(ids.min()) < 0 and ((ids < 0) & (ids >= LAST_PLACEHOLDER)).any())
    ):
        raise InvalidArgument(
            f"token ids must be in [0, {_MAX_ID}], got ids from {ids.min()} to {ids.max()}; "
            "placeholders of other data cannot be cached by their ids"
        )
    return ids.astype(np.int64, copy=False)
