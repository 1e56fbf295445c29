"""One request, from waiting to finished, as the scheduler sees it. No torch.

A request is a row of tokens of which the first ``computed`` are in the KV state. Everything follows from that: what
is left to run is ``len(tokens) - computed``, one token left is a decode, preemption is ``computed = 0``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.engine.media import NO_MEDIA, Media
from quire.types import BASE, AdapterRuns, LogitsWanted, SeqId


class TokenBuffer:
    """A growing row of int64 token ids. One below 0 stands for an embedding, which is in ``media`` if it is not gone."""

    __slots__ = ("_ids", "_size", "media")

    def __init__(self, ids: Iterable[int] | NDArray[Any] = (), media: Media = NO_MEDIA) -> None:
        self._ids = np.array(ids if isinstance(ids, (np.ndarray, list, tuple)) else list(ids), dtype=np.int64)
        self._size = self._ids.size
        self.media = media

    def __len__(self) -> int:
        return self._size

    @property
    def ids(self) -> NDArray[np.int64]:
        """A view, valid until the next append."""
        return self._ids[: self._size]

    def append(self, token: int) -> None:
        if self._size == self._ids.size:
            self._grow(self._size + 1)
        self._ids[self._size] = token
        self._size += 1

    def extend(self, tokens: NDArray[Any] | Iterable[int]) -> None:
        new = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens), dtype=np.int64)
        if self._size + new.size > self._ids.size:
            self._grow(self._size + new.size)
        self._ids[self._size : self._size + new.size] = new
        self._size += new.size

    def truncate(self, size: int) -> None:
        self._size = size

    def _grow(self, size: int) -> None:
        grown = np.empty(max(size, 2 * self._ids.size, 16), dtype=np.int64)
        grown[: self._size] = self.ids
        self._ids = grown


def common_prefix(a_T: NDArray[Any], b_T: NDArray[Any]) -> int:
    """Number of equal leading elements."""
    size = min(a_T.size, b_T.size)
    differs_T = a_T[:size] != b_T[:size]
    first = int(differs_T.argmax()) if size else 0
    return first if size and differs_T[first] else size


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """What a sequence keeps of its tokens: the first ``sink`` and the last ``size - sink``."""

    size: int
    sink: int = 0


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class ScheduledRequest:
    """What the scheduler needs to know. The engine's request holds one of these and adds text and sampling."""

    tokens: TokenBuffer
    key: Hashable = None
    """What may share a prefix: salt and adapters (``quire.engine.adapter_keys``)."""
    adapters: AdapterRuns = BASE
    """Under which adapter each of its tokens runs, also those to come."""
    wants: LogitsWanted = "last"
    """``last``: logits of the last token, once all are computed. ``all``: of every token. ``none``: no logits."""
    cacheable: bool = True
    """Whether it may use and feed the prefix cache."""
    fresh_from: int | None = None
    """Tokens from here on must run, whatever is cached: their logits are wanted. None: the last one must."""
    window: SlidingWindow | None = None
    """Of its sequence; None: all tokens are kept."""
    priority: int = 0
    """Order of arrival; the latest is preempted first."""
    seq: SeqId | None = None
    computed: int = 0
    num_cached: int = 0
    """Tokens of the prompt whose state was there at the first admission."""
    known: int = 0
    """Tokens of which the prefix cache, or its session, has had the state, though it may not be there any more."""
    num_replayed: int = 0
    """Those of them that were not there at the first admission, and ran again."""
    branches: set[int] = field(default_factory=set)
    """Positions where other prompts part from this one, or where this one parted from others."""
    reusable: bool = False
    """Whether somebody may go back into the middle of it: the prefix cache, or a session."""
    num_preemptions: int = 0
    status: Status = Status.WAITING
    pinned: bool = False
    """Its state must not be given up: it was asked to stay, or cannot be computed again (somebody wrote into it)."""
    admitted: bool = False
    """Whether it was ever admitted."""
    is_ready: Callable[[], bool] | None = None
    """Whether it can take part in a step, of one for which something is made beside the steps; None: always."""

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def ready(self) -> bool:
        """Whether it can take part in a step."""
        return self.is_ready is None or self.is_ready()

    @property
    def next_adapter(self) -> int | None:
        """Under which adapter its next token runs."""
        return None if self.adapters is BASE else self.adapters.at(self.computed)
