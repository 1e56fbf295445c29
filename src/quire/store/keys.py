"""Keys of state: a chain of hashes over chunks of tokens, with all that the state depends on. No
torch.

The root hashes the model (architecture, configuration, weights, dtype), the layout of its state and
the salt. Each link hashes the link before, the tokens of a chunk and the adapters that they ran
under. So a key identifies a history from its first token on, and cannot be computed without the
salt. Links are BLAKE2b with 20 bytes, so collisions cannot be found, even on purpose.

Letters: T tokens.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.contracts.store import KEY_BYTES, ObjectKey, ObjectKind

CHUNK = 256
"""Tokens of a run that is one object, unless a page is larger."""
KEY_VERSION = 1
"""Version of the key scheme. Objects of another version are never found."""

Runs = tuple[tuple[int, str | None], ...]
"""Adapters as (from position, fingerprint or None), as in ``adapters.history``."""


def root_key(model: Mapping[str, str], layout_hash: str, dtype: str, salt: object, chunk: int) -> bytes:
    """Return the root digest of all keys of one model and one salt. ``salt`` consists of strings,
    numbers, None, and tuples of these."""
    made_of = {"version": KEY_VERSION, "model": dict(model), "layout": layout_hash, "dtype": dtype, "chunk": chunk}
    text = json.dumps({**made_of, "salt": salt}, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def record_key(kind: str, name: str) -> ObjectKey:
    """Return the key of a record; all records of a kind share a parent."""
    return ObjectKey(
        records_of(kind), ObjectKind.RECORD, 0, hashlib.blake2b(name.encode(), digest_size=KEY_BYTES).digest()
    )


def records_of(kind: str) -> bytes:
    """Return the parent of all records of a kind."""
    return hashlib.blake2b(b"record:" + kind.encode(), digest_size=KEY_BYTES).digest()


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """An object of a history: rows ``start..stop - 1``, or a stop at ``start == stop``."""

    key: ObjectKey
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Chain:
    """The keys of one history."""

    ids: NDArray[np.int64]
    """``[T]``"""
    runs: Runs
    chunk: int
    boundaries: tuple[bytes, ...]
    """Digests after 0, ``chunk``, 2 ``chunk`` ... tokens, for all full chunks."""

    @classmethod
    def of(cls, root: bytes, ids_T: NDArray[np.int64], runs: Runs, chunk: int) -> Chain:
        """Hash a history."""
        found = [root]
        for start in range(0, ids_T.size - chunk + 1, chunk):
            found.append(_link(found[-1], ids_T[start : start + chunk], _within(runs, start, start + chunk)))
        return cls(ids_T, runs, chunk, tuple(found))

    def digest(self, length: int) -> bytes:
        """Return the digest of the first ``length`` tokens."""
        index, rest = divmod(length, self.chunk)
        before = self.boundaries[index]
        if not rest:
            return before
        start = length - rest
        return _link(before, self.ids[start:length], _within(self.runs, start, length))

    def rows(self, start: int, stop: int) -> ObjectKey:
        """Return the key of the rows of tokens ``start..stop - 1``; ``start`` is a boundary."""
        return ObjectKey(self.boundaries[start // self.chunk], ObjectKind.ROWS, stop - start, self.digest(stop))

    def between(self, start: int, stop: int) -> tuple[list[int], list[list[Any]]]:
        """Return the tokens ``start..stop - 1`` and their adapters, with positions relative to
        ``start``; [] for the base model alone."""
        return self.ids[start:stop].tolist(), _within(self.runs, start, stop)

    def stop(self, length: int) -> ObjectKey:
        """Return the key of the stop at ``length``: the state besides rows that a continuation
        there needs. Its parent is the last boundary before ``length``, so that a holder of the
        tokens can find it."""
        index = max(0, length - 1) // self.chunk
        return ObjectKey(self.boundaries[index], ObjectKind.STOP, length - index * self.chunk, self.digest(length))


def _link(before: bytes, ids: NDArray[np.int64], runs: list[list[Any]]) -> bytes:
    digest = hashlib.blake2b(before, digest_size=KEY_BYTES)
    if runs:
        text = json.dumps(runs, separators=(",", ":")).encode()
        digest.update(b"adapters" + len(text).to_bytes(8, "little") + text)
    digest.update(b"tokens" + ids.size.to_bytes(8, "little"))
    digest.update(np.ascontiguousarray(ids, dtype="<i8").tobytes())
    return digest.digest()


def _within(runs: Runs, start: int, stop: int) -> list[list[Any]]:
    """Return the adapters of tokens ``start..stop - 1``, with positions relative to ``start``; []
    for the base model alone."""
    if not runs:
        return []
    first = max(0, bisect_right([begin for begin, _ in runs], start) - 1)
    found = [[max(begin, start) - start, name] for begin, name in runs[first:] if begin < stop]
    return [] if all(name is None for _, name in found) else found


def checked_name(key: ObjectKey) -> str:
    """Return the name of a key; ``InvalidArgument`` for one that names no object, with fields of
    any type."""
    return ObjectKey.parse(key.name).name
