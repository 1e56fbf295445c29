"""Low-rank products of a ragged batch in C++, for CPUs. The reference is ``quire.ops.low_rank``.

Without the C++ library ``adapters.low_rank`` uses PyTorch's operations. One call serves one linear
map. PyTorch needs four to ten calls, each dearer than its arithmetic: the model's own products
evict code and data from the caches.

Letters: T rows of a forward; S rank rows; I input, O output features of a piece.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from quire.contracts.adapters import AddProducts, RankedRows, RankPiece
from quire.kernels.native_library import NativeLibrary, native_library

MOST_ROWS = 4
"""Most rows of a block."""
DTYPES = (torch.float32, torch.bfloat16)
ONE_THREAD = 1 << 17
"""Number of multiplications below which one thread is faster than two."""


class _Piece(ctypes.Structure):
    _fields_: ClassVar = [
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("column", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    ]


class _Work(ctypes.Structure):
    _fields_: ClassVar = [
        ("blocks", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("pieces", ctypes.c_void_p),
        ("room", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in ("num_blocks", "num_pieces", "inputs", "largest_rank", "room_of_one", "bfloat16")
        ),
    ]


@dataclass(slots=True)
class RowBlocks:
    """Blocks of rows under adapters, shared by all maps of a forward."""

    blocks: Tensor
    """int64 ``[blocks, 4]``: first index in ``rows``, number of rows, first rank row, rank."""
    rows: Tensor
    """int64"""
    largest_rank: int
    room: Tensor
    """float32 for sums, shared by all maps, which run in turn. It grows to the largest need."""


class NativeLowRank:
    """``contracts.adapters.LowRankKernel`` by the C++ library."""

    name = "C++"

    def __init__(self, library: NativeLibrary) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._run = library.function("quire_low_rank", pointer, pointer, number, pointer, number, number, pointer)
        self._parallel = library.parallel

    def refusal(self, dtype: torch.dtype, device: torch.device) -> str:
        """Return the reason why the kernel cannot run on such tensors; "" if it can."""
        if device.type != "cpu":
            return f"the C++ products run on a CPU; the model is on {device}"
        if dtype not in DTYPES:
            return f"the C++ products are of float32 and bfloat16; the model is in {dtype}"
        return ""

    def plan(self, members: Sequence[RankedRows]) -> RowBlocks:
        """Return the blocks of a forward, by adapter, so that A and B are read once for several
        rows."""
        blocks: list[tuple[int, int, int, int]] = []
        rows: list[int] = []
        for member in members:
            for start in range(0, len(member.rows), MOST_ROWS):
                some = member.rows[start : start + MOST_ROWS]
                blocks.append((len(rows), len(some), member.first, member.rank))
                rows += some
        # C++ reads CPU tensors of this type, whatever PyTorch's defaults are.
        return RowBlocks(
            torch.tensor(blocks, dtype=torch.int64, device="cpu"),
            torch.tensor(rows, dtype=torch.int64, device="cpu"),
            max(member.rank for member in members),
            torch.empty(0, dtype=torch.float32, device="cpu"),
        )

    def bind(self, plan: RowBlocks, pieces: Sequence[RankPiece]) -> AddProducts:
        """Return the call for one map; ``pieces`` share inputs and dtype and hold at least the rank
        rows of ``plan``."""
        inputs, dtype = pieces[0].a_SI.shape[1], pieces[0].a_SI.dtype
        own = (_Piece * len(pieces))(
            *(_Piece(a.data_ptr(), b.data_ptr(), column, b.shape[1]) for a, b, column in pieces)
        )
        outputs = [piece.b_SO.shape[1] for piece in pieces]
        work = len(plan.rows) * plan.largest_rank * (inputs * len(pieces) + sum(outputs))
        threads = min(torch.get_num_threads(), len(plan.blocks)) if work > ONE_THREAD else 1
        room_of_one = MOST_ROWS * (inputs + plan.largest_rank + max(outputs))
        if len(plan.room) < threads * room_of_one:
            plan.room = torch.empty(threads * room_of_one, dtype=torch.float32, device="cpu")
        native = _Work(
            plan.blocks.data_ptr(), plan.rows.data_ptr(), ctypes.addressof(own), plan.room.data_ptr(),
            len(plan.blocks), len(pieces), inputs, plan.largest_rank, room_of_one, int(dtype == torch.bfloat16),
        )  # fmt: skip
        kept = (native, own, plan.room, plan, tuple(pieces))
        return _Bound(self._run, ctypes.addressof(native), threads, self._parallel, dtype, kept)


@dataclass(frozen=True, slots=True)
class _Bound:
    """``AddProducts`` with its C++ arguments prepared."""

    run: ctypes._NamedFuncPointer
    work: int
    threads: int
    parallel: int | None
    dtype: torch.dtype
    kept: object
    """Owner of the memory that ``work`` points to."""

    def __call__(self, y_TO: Tensor, x_TI: Tensor) -> None:
        if y_TO.dtype != self.dtype or y_TO.stride(1) != 1:
            # The model's own maps never give this, but a caller's autocast may.
            own_TO = y_TO.to(self.dtype).contiguous()
            self(own_TO, x_TI)
            y_TO.copy_(own_TO)
            return
        if x_TI.dtype != self.dtype or x_TI.stride(1) != 1:
            x_TI = x_TI.to(self.dtype).contiguous()
        self.run(
            self.work, y_TO.data_ptr(), y_TO.stride(0), x_TI.data_ptr(), x_TI.stride(0), self.threads, self.parallel
        )


@cache
def native_low_rank() -> NativeLowRank | None:
    """Return the kernel; None if it was not built (``native_problem``)."""
    found = native_library()
    return None if found is None else NativeLowRank(found)
