"""Structures for calls of the C++ attention (``cpu/paged_attention.h``, ``cpu/block.cpp``), and
decode plans that are refilled in the same memory.

Letters: as in ``kernels.attention.cpu_attention``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.layers import RopeSpec

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ONE_THREAD = 1 << 20
"""Number of products below which one thread is faster than two."""
MADE = 7
"""Numbers per row that the planner computes."""
MOST_DECODES = 64
"""Most sequences of a refilled plan; calls over blocks take no more."""
MOST_KEPT = 64 << 20
"""Most bytes that a refilled plan keeps."""


class PartFields(ctypes.Structure):
    _fields_: ClassVar = [(name, ctypes.c_void_p) for name in ("low", "high", "first", "stop", "columns", "bits")]


class BatchFields(ctypes.Structure):
    _fields_: ClassVar = [
        ("parts", PartFields * 2),
        *((name, ctypes.c_void_p) for name in ("starts", "table_starts", "pages")),
        ("made", ctypes.c_void_p * MADE),
        ("items", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in (
                "num_parts", "entries", "rows", "page_size", "heads", "kv_heads", "key_size", "value_size",
                "one_thread", "capacity", "num_items", "num_states", "most_rows", "threads",
            )
        ),
    ]  # fmt: skip


class CallFields(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("batch", "states", "left", "room")),
        *((name, ctypes.c_int64) for name in ("state_size", "room_size")),
        ("strides", ctypes.c_int64 * 8),
        *((name, ctypes.c_int64) for name in ("type", "level")),
        ("of_one_layer", ctypes.c_int64 * 11),
    ]


class LayerFields(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("k", "v", "sinks", "q_norm", "k_norm")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "key_width", "value_width")),
        *((name, ctypes.c_double) for name in ("head_eps", "scale", "softcap")),
    ]


class ForwardFields(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("call", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("turn_stride", "rotary", "interleaved")),
        ("slots", ctypes.c_void_p),
    ]


class _Decodes(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("batch", "call", "forward", "lengths", "sizes", "turns")),
        *((name, ctypes.c_int64) for name in ("window", "room", "states")),
    ]


@dataclass(frozen=True, slots=True)
class NativePart:
    """A structure of ``cpu/block.cpp``, with the memory that it points to."""

    native: ctypes.Structure
    kept: object
    place: int
    """Its address, valid while this object lives."""

    @classmethod
    def of(cls, native: ctypes.Structure, *kept: object) -> Self:
        return cls(native, kept, ctypes.addressof(native))


ITEM_SIZE = 11
"""Numbers of an item."""


class Shapes(NamedTuple):
    """The tensor sizes and strides of a call that its items of work depend on."""

    heads: int
    key_size: int
    slots: int
    kv_heads: int
    value_size: int
    strides: tuple[int, ...]
    """Row and head strides of the queries, of the sink queries (0: none), of K and of V."""


def joint_shapes(num_heads: int, k_SHD: Tensor, v_SHD: Tensor) -> Shapes:
    """Return the shapes of a call whose query and K heads are in one tensor."""
    (_, kv_heads, width), (slots, _, value_width) = k_SHD.shape, v_SHD.shape
    strides = ((num_heads + kv_heads) * width, width, 0, 0, *k_SHD.stride()[:2], *v_SHD.stride()[:2])
    return Shapes(num_heads, width, slots, kv_heads, value_width, strides)


class NativeDecodes:
    """``contracts.block_calls.DecodeForwards``: the results of ``plan``, ``bind`` and
    ``forward_part`` of ``NativeAttention`` for decodes, refilled in the same memory."""

    def __init__(
        self,
        run: Callable[[int, int], int],
        parallel: bool,
        shapes: Shapes,
        call: CallFields,
        page_size: int,
        window: int | None,
        rope: RopeSpec | None,
    ) -> None:
        """``call``: with type and level set."""
        self._run, self._parallel, self._call = run, parallel, call
        columns = 0 if rope is None else rope.rotary_dim
        starts, numbers = np.arange(MOST_DECODES + 1), np.zeros((6, MOST_DECODES + 1), dtype=np.int64)
        turned = np.empty((MOST_DECODES, 2, columns), np.float32)
        self._lengths, self._sizes = numbers[:2]
        lengths, sizes, tables, low, high, slots = (row.ctypes.data for row in numbers)
        self._batch = BatchFields(
            starts=starts.ctypes.data, table_starts=tables, num_parts=1, page_size=page_size, heads=shapes.heads,
            kv_heads=shapes.kv_heads, key_size=shapes.key_size, value_size=shapes.value_size, one_thread=ONE_THREAD,
        )  # fmt: skip
        self._batch.parts[0] = PartFields(low, high, low, high, None, None)
        call.batch, call.strides = ctypes.addressof(self._batch), (ctypes.c_int64 * 8)(*shapes.strides)
        call.state_size = -(-shapes.value_size // 16) * 16 + 16
        cos = None if rope is None else turned.ctypes.data
        self._forward = ForwardFields(
            ctypes.addressof(call), cos, cos and cos + 4 * columns, 2 * columns, columns, rope is not None and rope.interleaved, slots
        )  # fmt: skip
        self.place = ctypes.addressof(self._forward)
        self._native = _Decodes(call.batch, self._forward.call, self.place, lengths, sizes, None, window or 0)
        self._native_place = ctypes.addressof(self._native)
        self._kept = (starts, numbers, turned)
        self._pages = self._left = np.empty(0, np.int32)
        self._room = self._states = torch.empty(0)
        self._take_items(MOST_DECODES)

    def plan(self, lengths: Sequence[int], tables: Sequence[NDArray[np.int32]], turns_N2R: Tensor | None) -> bool:
        """See the contract. ``MemoryError``: no memory."""
        rows, batch = len(lengths), self._batch
        if rows > MOST_DECODES:
            return False
        sizes = [table.size for table in tables]
        self._lengths[:rows], self._sizes[:rows] = lengths, sizes
        pages = sum(sizes)
        if pages > self._pages.size:
            self._pages = np.empty(2 * pages, np.int32)
            batch.pages = self._pages.ctypes.data
        np.concatenate(tables, out=self._pages[:pages])
        batch.rows = batch.entries = rows
        self._native.turns = None if turns_N2R is None else turns_N2R.data_ptr()
        threads = torch.get_num_threads() if self._parallel else 1
        while (short := self._run(self._native_place, threads)) > 0:
            if not self._grow():
                return False
        if short < 0:
            raise MemoryError(f"no memory for a plan of {rows} rows")
        return True

    def _grow(self) -> bool:
        """Take the memory that the last plan lacked. Return False if it exceeds ``MOST_KEPT``."""
        batch, call, native = self._batch, self._call, self._native
        room, states = batch.threads * call.room_size, batch.num_states * batch.heads * call.state_size
        if room + 4 * states > MOST_KEPT:
            return False
        if batch.num_items > batch.capacity:
            self._take_items(2 * batch.num_items)
        if room > native.room:
            self._room = torch.empty(2 * room, dtype=torch.uint8)
            call.room, native.room = self._room.data_ptr(), 2 * room
        if states > native.states:
            self._states = torch.empty(2 * states, dtype=torch.float32)
            self._left = np.empty(MOST_DECODES * batch.kv_heads, dtype=np.int32)
            call.states, call.left, native.states = self._states.data_ptr(), self._left.ctypes.data, 2 * states
        return True

    def _take_items(self, count: int) -> None:
        self._made = np.empty(MADE * MOST_DECODES + ITEM_SIZE * count, dtype=np.int64)
        at = self._made.ctypes.data
        self._batch.made[:] = [at + 8 * MOST_DECODES * index for index in range(MADE)]
        self._batch.items, self._batch.capacity = at + 8 * MOST_DECODES * MADE, count
