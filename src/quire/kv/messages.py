"""Messages between two states that hand over a sequence: a JSON header and the bytes of tensors.

A message is the XXH3-64 of all that follows (8 bytes), the length of the header (4 bytes), the
header, spaces up to a multiple of 64 bytes, and the planes of rows or states, one after the other.
Numbers are little-endian. ``docs/handover.md`` describes the headers.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from quire.base.errors import DataLoss, QuireError
from quire.base.types import SeqId
from quire.contracts.channel import Channel
from quire.contracts.kv_state import TensorPlan
from quire.statefile.container import bytes_of

VERSION = 1
"""Of the messages; both sides must have the same."""
_FIXED = 12
_ALIGNMENT = 64


def packed(header: Mapping[str, Any], planes: Iterable[Tensor] = ()) -> list[bytes | memoryview]:
    """Return the parts of a message. ``planes`` must not change while they are sent."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_FIXED + len(text)) % _ALIGNMENT)
    body: list[bytes | memoryview] = [len(text).to_bytes(4, "little") + text, *map(bytes_of, planes)]
    digest = xxhash.xxh3_64()
    for part in body:
        digest.update(part)
    return [digest.intdigest().to_bytes(8, "little"), *body]


def opened(message: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Return a message's header and the bytes of its planes; ``DataLoss`` for a damaged one."""
    size = len(message)
    stop = _FIXED + int.from_bytes(message[8:_FIXED], "little") if size >= _FIXED else 0
    if not _FIXED < stop <= size or xxhash.xxh3_64_intdigest(message[8:]) != int.from_bytes(message[:8], "little"):
        raise DataLoss(f"a message of {size} bytes is damaged: its checksum is another one")
    header = json.loads(bytes(message[_FIXED:stop]))
    return header, message[stop:]


def planes_of(data: memoryview, plan: Mapping[str, TensorPlan], what: str) -> dict[str, Tensor]:
    """Return tensors over the bytes of a message; ``DataLoss`` if these are not so many."""
    sizes = {name: math.prod(one.shape) * one.dtype.itemsize for name, one in plan.items()}
    if sum(sizes.values()) != len(data):
        raise DataLoss(f"{what} came with {len(data)} bytes; {sum(sizes.values())} are expected")
    raw, found, start = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0), {}, 0
    for name, one in plan.items():
        plane = raw[start : start + sizes[name]]
        # A view as another type needs a start that is a multiple of the type's size.
        plane = plane if start % one.dtype.itemsize == 0 else plane.clone()
        start += sizes[name]
        found[name] = plane.view(one.dtype).view(one.shape)
    return found


class Transfer(ABC):
    """A sequence that is received (``reception``) or sent (``send_mark``) over a channel."""

    def __init__(self, seq_id: SeqId, channel: Channel, name: str) -> None:
        """Begin one; ``name`` is in all of its messages."""
        self.seq_id, self.channel, self.name = seq_id, channel, name
        self.error: QuireError | None = None
        """What ended it before its time."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether all has come, or counts at the receiver."""

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.is_done or self.error is not None

    @abstractmethod
    def told(self) -> str:
        """Return the progress, for errors."""

    def fail(self, error: QuireError) -> None:
        """Note the first error."""
        self.error = self.error or error
