"""The C++ kernel of ``text.gguf_tokenizer``: the merges that texts use, half as many.

When a union is made inside of a text, all merges inside of it were those of BPE of its own text:
none crossed its ends, and the best pair of the whole text is the best of all inside. So a token's
last merge is always the same, and no text uses its other pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import numpy as np

from quire.kernels.native_library import native_library
from quire.text.gguf_tokenizer import FindMerges, Merges, merges_of

LONG = 256
"""Most characters of a token whose last merge is searched; ``cpu/merges.cpp`` has the same
number."""


def scored_merges() -> FindMerges:
    """Return the C++ kernel, or without the library ``merges_of``."""
    return merges_of if native_library() is None else used_merges


def used_merges(tokens: Sequence[str], scores: Sequence[float], joined: Sequence[int]) -> Merges:
    """Return the merges of ``merges_of`` that texts use, in its order, and of tokens with more than
    ``LONG`` characters all. ``MemoryError``: no memory for them."""
    library = native_library()
    assert library is not None
    find = library.function(
        "quire_merges", c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int64, result=c_int64
    )
    text = "".join(tokens).encode()
    sizes = np.fromiter(map(len, tokens), np.int64, len(tokens))
    unions = np.array(joined, np.int32)
    unions = unions[np.argsort(-np.array(scores, np.float64)[unions], kind="stable")]
    long = sizes[unions]
    room = len(tokens) + int(long[long > LONG].sum())
    pairs = np.empty((room, 2), np.int64)
    found = find(pairs.ctypes.data, room, text, sizes.ctypes.data, len(tokens), unions.ctypes.data, len(unions))
    if found < 0:
        raise MemoryError("there is no memory for a tokenizer's merges")
    left, right = pairs[:found].T.tolist()
    return list(zip(map(tokens.__getitem__, left), map(tokens.__getitem__, right), strict=True))
