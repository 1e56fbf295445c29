"""Messages between rank 0 and the others. They are pickles in which tensors are their bytes.

``multiprocessing`` would send a tensor as shared memory, which both sides must hold open.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.types import SeqId
from quire.blend.rows_task import RowsPiece
from quire.contracts.adapters import Adapter

FAILED = "failed"
"""Message and answer: the last step failed here."""


@dataclass(frozen=True, slots=True, eq=False)
class Take:
    """Answer with the planes of these slots (``PeerRows.take``)."""

    place: tuple[int, int]
    slots_N: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Put:
    """Write planes to slots of a sequence that is being imported or received (``PeerRows.put``)."""

    seq: SeqId
    place: tuple[int, int]
    slots_N: NDArray[np.int64]
    planes: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class LoadAdapter:
    """Keep an adapter under this id; answer None, or the error."""

    adapter_id: int
    adapter: Adapter


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Forget an adapter, if it is loaded."""

    adapter_id: int


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The cached rows that the next step names, by name: of all layers, of the rank's heads."""

    sources: Mapping[int, HeldRows]


@dataclass(frozen=True, slots=True, eq=False)
class HeldRows:
    """Cached rows that are all here (``blend.forward.RowSource``)."""

    layers: Mapping[int, Sequence[RowsPiece]]

    def pieces(self, layer_id: int) -> Sequence[RowsPiece]:
        """See ``RowSource``."""
        return self.layers[layer_id]


SEEN = "seen"
"""Answer with ``Seen`` of the last step."""


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What a rank has seen in a step, as ``StepOutput`` has it: of its blocks and heads."""

    attention_weights: tuple[tuple[Tensor, ...], ...] = ()
    observed: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    hidden_states: tuple[tuple[Tensor, ...], ...] = ()
    features: tuple[Tensor, ...] = ()
    left_out: tuple[NDArray[np.bool_] | None, ...] = ()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        raw = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (raw, obj.dtype, tuple(obj.shape))


def _tensor(raw: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(raw).view(dtype).view(shape)


def send(pipe: Connection, message: object) -> None:
    """Send a message. ``OSError`` if the other side has ended."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    pipe.send_bytes(stream.getbuffer())


def receive(pipe: Connection) -> Any:
    """Return the next message. ``EOFError`` or ``OSError`` if the other side has ended."""
    return pickle.loads(pipe.recv_bytes())
