"""A request to a replica and its answer, as values that cross processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A request of HTTP."""

    method: str
    path: str
    """The path and the query, as they stand in the request."""
    headers: Headers = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of an answer, and its body as it comes."""

    status: int
    headers: Headers
    chunks: AsyncIterator[bytes]

    async def read(self) -> bytes:
        """Return the whole body."""
        return b"".join([chunk async for chunk in self.chunks])


class ReplicaGone(Exception):
    """A replica has ended. ``reached``: it may have begun with the call."""

    def __init__(self, message: str, *, reached: bool = True) -> None:
        super().__init__(message)
        self.reached = reached

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ReplicaGone, reached=self.reached), (str(self),)


class Replicas(Protocol):
    """The servers of a cluster."""

    def names(self) -> Sequence[str]:
        """Return the names of the replicas that take requests."""
        ...

    def send(self, name: str, call: Call) -> AbstractAsyncContextManager[Answer]:
        """Open the answer of a replica. The end of the block before the answer's end cancels the
        request. ``ReplicaGone``, also while chunks come: the replica has ended."""
        ...
