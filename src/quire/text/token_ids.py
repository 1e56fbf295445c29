"""Token ids and other integers as users give them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvalidArgument


def is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def as_token_ids(tokens: Sequence[int]) -> NDArray[np.int64]:
    """Return a row of token ids; ``InvalidArgument`` for anything that is not integers."""
    found = None
    if isinstance(tokens, Tensor):
        tokens = tokens.tolist()  # from any device
    if not isinstance(tokens, (str, bytes, bytearray)):
        try:
            found = np.asarray(tokens)
        except (ValueError, TypeError, OverflowError):
            found = None
    if found is not None and found.ndim == 1 and not found.size:
        return np.empty(0, dtype=np.int64)
    if found is None or found.ndim != 1 or found.dtype.kind not in "iu" or bool in map(type, tokens):
        raise InvalidArgument(f"token ids must be a row of integers, got {tokens!r:.60}")
    if int(found.max()) > np.iinfo(np.int32).max:
        raise InvalidArgument(f"token id {int(found.max())} is outside of every vocabulary; int32 ids are accepted")
    return found.astype(np.int64)
