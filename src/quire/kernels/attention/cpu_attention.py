"""Attention over pages in C++, for CPUs. The reference is ``quire.ops.attention``.

K and V are read in place, through the page table. Work is divided by rows, KV heads and ranges of
keys; pages that entries of a batch share are read once for all of them. A row's result is the same
to the bit whatever else is in the batch, however its prompt was cut, and on any number of threads
(``cpu/paged_attention.h``).

Letters: T new tokens; B entries; S slots; Hq, Hkv query and KV heads; Dk, Dv head sizes.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvalidArgument, Unsupported
from quire.contracts.attention import AttentionState, ForwardPlan, Scoring
from quire.contracts.kv_format import PLAIN, KVView, format_refusal, plain_rows
from quire.contracts.layers import LayerSpec, RopeSpec
from quire.contracts.rows import HeadNormWeights, Rotation
from quire.kernels.attention.cpu_calls import (
    ITEM_SIZE,
    MADE,
    ONE_THREAD,
    TYPES,
    BatchFields,
    CallFields,
    ForwardFields,
    LayerFields,
    NativeDecodes,
    NativePart,
    Shapes,
    joint_shapes,
)
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kernels.attention.visibility import VisibleKeys, sink_part, window_part
from quire.kernels.native_library import NativeLibrary, native_library, native_problem
from quire.ops.attention import check_sink_query, kind_refusal

LEVELS = ("portable", "AVX2", "AVX-512", "AVX512-BF16", "AMX")
WIDENED = "AVX-512"
"""The level of processors that multiply pairs of bfloat16 slowly: K and V become float32."""
EMULATED = "AMX, emulated"
"""Level of emulated tiles of bfloat16, slow on any machine, for tests."""
BLOCK = 64
"""Keys of a block; blocks begin at multiples of it."""


@dataclass(slots=True)
class PagedPlan:
    """A batch over pages, for layers of any shape."""

    plan: ForwardPlan
    dtype: torch.dtype
    pages: NDArray[np.int32]
    """Pages of all entries, concatenated."""
    numbers: NDArray[np.int64]
    """All other inputs of the planner, in one array."""
    parts: list[VisibleKeys]
    columns: list[tuple[NDArray[np.int64], NDArray[np.uint64]] | None]
    bound: dict[Shapes, BoundPlan] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """A plan for tensors of one shape, ready to run."""

    call: int
    items: NDArray[np.int64]
    """Items of work, as in ``cpu/paged_attention.h``."""
    kept: object
    """Owner of the memory that ``call`` points to."""


class NativeAttention:
    """The backend ``native``: exact attention by the C++ library. Batches of an unsupported type,
    such as float64, run through PyTorch's kernels (``SdpaAttention``)."""

    name = "native"

    def __init__(self, level: str | None = None) -> None:
        """``level``: one of ``LEVELS`` or ``EMULATED``, by default the processor's fastest.
        ``Unsupported``: the processor, or this build, has no such level."""
        self._other = SdpaAttention()
        library = native_library()
        if library is not None:
            self._bind_library(library, level)
        elif level is not None:
            raise Unsupported(native_problem())

    def _bind_library(self, library: NativeLibrary, level: str | None) -> None:
        pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        best = library.function("quire_attention_level", result=number)()
        slow = library.function("quire_slow_pairs", result=ctypes.c_int)()
        usual = LEVELS.index(WIDENED) if slow else best
        self._level = usual if level is None else (*LEVELS, EMULATED).index(level)
        if self._level > best and level != EMULATED:
            raise Unsupported(f"attention for {level}: this processor has {', '.join(LEVELS[: best + 1])}")
        self._plan = library.function("quire_attention_plan", pointer, number, result=number)
        self._room = library.function("quire_attention_room", pointer, result=number)
        self._plan_decodes = library.function("quire_plan_decodes", pointer, number, result=number)
        self._run = library.function("quire_attention", *(pointer,) * 8, real, real, pointer)
        self._parallel = library.parallel

    @property
    def level(self) -> str:
        """The instructions that it uses: one of ``LEVELS``, or ``EMULATED``."""
        return (*LEVELS, EMULATED)[self._level]

    def refusal(self, spec: LayerSpec, device: torch.device, format: str = PLAIN) -> str:
        """See the contract."""
        if device.type != "cpu":
            return f"the C++ attention runs on a CPU; the state is on {device}"
        return native_problem() or kind_refusal(self.name, spec) or format_refusal(self.name, format)

    def fuses(self, spec: LayerSpec, device: torch.device) -> bool:
        """Return True: attention weights exist only for a block of keys at a time."""
        del spec, device
        return True

    # -- plan --------------------------------------------------------------------------------------

    def plan(self, plan: ForwardPlan, dtype: torch.dtype) -> Any:
        """See the contract. A plan of another type or device is ``SdpaAttention``'s."""
        if dtype not in TYPES or plan.device.type != "cpu":
            return self._other.plan(plan, dtype)
        window, sink = window_part(plan), sink_part(plan)
        parts = [window] if sink is None else [window, sink]
        pages = np.concatenate(plan.tables)
        table_starts = np.array([0, *itertools.accumulate([table.size for table in plan.tables])])
        arrays = [plan.starts, table_starts]
        for part in parts:
            arrays += [part.low, part.high, part.first, part.stop]
        columns = [_columns(plan, part) if part.columns else None for part in parts]
        return PagedPlan(plan, dtype, pages, np.concatenate(arrays), parts, columns)

    def bind(self, prepared: PagedPlan, shapes: Shapes) -> BoundPlan:
        """Return the items of work of a plan for tensors of such shapes. ``InvalidArgument``: a
        page is not in the pool."""
        plan, dtype = prepared.plan, prepared.dtype
        rows, entries = plan.num_tokens, plan.num_entries
        highest = int(prepared.pages.max(initial=-1))
        if (highest + 1) * plan.page_size > shapes.slots:
            raise InvalidArgument(f"page {highest} of {plan.page_size} keys is not in a pool of {shapes.slots} slots")
        batch = BatchFields(
            num_parts=len(prepared.parts), entries=entries, rows=rows, page_size=plan.page_size,
            heads=shapes.heads, kv_heads=shapes.kv_heads, key_size=shapes.key_size, value_size=shapes.value_size,
            one_thread=ONE_THREAD,
        )  # fmt: skip
        at = prepared.numbers.ctypes.data
        batch.starts, batch.table_starts, batch.pages = at, at + 8 * (entries + 1), prepared.pages.ctypes.data
        at += 16 * (entries + 1)
        for part, columns in zip(batch.parts, prepared.columns, strict=False):
            part.low, part.high, part.first, part.stop = (
                at, at + 8 * rows, at + 16 * rows, at + 16 * rows + 8 * entries,
            )  # fmt: skip
            at += 16 * (rows + entries)
            if columns is not None:
                part.columns, part.bits = (x.ctypes.data for x in columns)
        place, made = ctypes.addressof(batch), np.empty(0, dtype=np.int64)
        found = 32 + 4 * entries * shapes.kv_heads
        while found > batch.capacity:
            made = np.empty(MADE * rows + ITEM_SIZE * found, dtype=np.int64)
            at = made.ctypes.data
            batch.made[:] = [at + 8 * rows * index for index in range(MADE)]
            batch.items, batch.capacity = at + 8 * rows * MADE, found
            found = self._plan(place, torch.get_num_threads() if self._parallel else 1)
        if found < 0:
            raise MemoryError(f"no memory for a plan of {rows} rows")
        room_size = self._room(place)
        room = torch.empty(batch.threads * room_size, dtype=torch.uint8)
        call = CallFields(
            place, None, None, room.data_ptr(), -(-shapes.value_size // 16) * 16 + 16, room_size,
            (ctypes.c_int64 * 8)(*shapes.strides), TYPES[dtype], self._level,
        )  # fmt: skip
        states = left = None
        if batch.num_states:
            states = torch.empty(batch.num_states * shapes.heads * call.state_size, dtype=torch.float32)
            left = np.empty(rows * shapes.kv_heads, dtype=np.int32)
            call.states, call.left = states.data_ptr(), left.ctypes.data
        kept = (prepared.pages, prepared.numbers, batch, made, room, states, left, call)
        items = made[MADE * rows :].reshape(-1, ITEM_SIZE)[:found]
        return BoundPlan(ctypes.addressof(call), items, kept)

    # -- calls over blocks (``contracts.block_calls.PartsBackend``) --------------------------------

    def layer_part(
        self,
        num_heads: int,
        view: KVView,
        scoring: Scoring,
        sinks_H: Tensor | None,
        norms: HeadNormWeights | None,
    ) -> NativePart | None:
        """See the contract. None for pools that are not contiguous."""
        k_SHD, v_SHD = plain_rows(view, self.name)
        if not (k_SHD.is_contiguous() and v_SHD.is_contiguous()):
            return None
        if sinks_H is not None:
            sinks_H = sinks_H.to(torch.float32).contiguous()
        native = LayerFields(
            k_SHD.data_ptr(), v_SHD.data_ptr(), None if sinks_H is None else sinks_H.data_ptr(), None, None,
            num_heads, k_SHD.shape[1], k_SHD.shape[2], v_SHD.shape[2], 0.0, scoring.scale, scoring.softcap or 0.0,
        )  # fmt: skip
        if norms is not None:
            native.q_norm, native.k_norm = norms.q_weight_D.data_ptr(), norms.k_weight_D.data_ptr()
            native.head_eps = norms.eps
        return NativePart.of(native, k_SHD, v_SHD, sinks_H, norms)

    def forward_part(
        self, prepared: Any, num_heads: int, view: KVView, rotation: Rotation | None, slots_T: Tensor
    ) -> NativePart | None:
        """See the contract. None for plans of other backends."""
        if not isinstance(prepared, PagedPlan) or len(prepared.parts) > 1:
            return None
        k_SHD, v_SHD = plain_rows(view, self.name)
        for name, x in (("K", k_SHD), ("V", v_SHD)):
            _require_planned(prepared, name, x)
        bound = self.bound(prepared, joint_shapes(num_heads, k_SHD, v_SHD))
        native = ForwardFields(bound.call, None, None, 0, 0, 0, slots_T.data_ptr())
        if rotation is not None:
            cos_T1R, sin_T1R, native.interleaved = rotation
            native.cos, native.sin = cos_T1R.data_ptr(), sin_T1R.data_ptr()
            native.turn_stride, native.rotary = cos_T1R.stride(0), cos_T1R.shape[2]
        return NativePart.of(native, bound, rotation, slots_T)

    def decode_forwards(
        self, num_heads: int, view: KVView, window: int | None, page_size: int, rope: RopeSpec | None
    ) -> NativeDecodes | None:
        """See the contract."""
        k_SHD, v_SHD = plain_rows(view, self.name)
        if k_SHD.dtype not in TYPES or not k_SHD.is_cpu:
            return None
        call = CallFields(type=TYPES[k_SHD.dtype], level=self._level)
        shapes = joint_shapes(num_heads, k_SHD, v_SHD)
        return NativeDecodes(self._plan_decodes, self._parallel is not None, shapes, call, page_size, window, rope)

    # -- run ---------------------------------------------------------------------------------------

    def run(
        self,
        prepared: Any,
        q_THD: Tensor,
        new: tuple[Tensor, Tensor] | None,
        view: KVView,
        scoring: Scoring,
        *,
        q_sink_THD: Tensor | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """See the contract. ``InvalidArgument``: ``q_sink_THD`` missing or surplus, a tensor not of
        the planned type, a page that is not in the pool."""
        if not isinstance(prepared, PagedPlan):
            return self._other.run(prepared, q_THD, new, view, scoring, q_sink_THD=q_sink_THD, sinks_H=sinks_H)
        return self._attend(prepared, q_THD, view, scoring, q_sink_THD, sinks_H, None)

    def run_state(
        self,
        prepared: Any,
        q_THD: Tensor,
        new: tuple[Tensor, Tensor] | None,
        view: KVView,
        scoring: Scoring,
        *,
        q_sink_THD: Tensor | None = None,
        coarse: bool = False,
    ) -> AttentionState:
        """See the contract; never coarse. Raise as ``run``."""
        if not isinstance(prepared, PagedPlan):
            return self._other.run_state(prepared, q_THD, new, view, scoring, q_sink_THD=q_sink_THD, coarse=coarse)
        lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device="cpu")
        out_THD = self._attend(prepared, q_THD, view, scoring, q_sink_THD, None, lse_TH)
        return AttentionState(out_THD, lse_TH)

    def _attend(
        self,
        prepared: PagedPlan,
        q_THD: Tensor,
        view: KVView,
        scoring: Scoring,
        q_sink_THD: Tensor | None,
        sinks_H: Tensor | None,
        lse_TH: Tensor | None,
    ) -> Tensor:
        check_sink_query(prepared.plan, q_sink_THD)
        k_SHD, v_SHD = plain_rows(view, self.name)
        q_THD, k_SHD, v_SHD = _in_rows(q_THD), _in_rows(k_SHD), _in_rows(v_SHD)
        q_sink_THD = None if q_sink_THD is None else _in_rows(q_sink_THD)
        bound = self.bound(prepared, shapes_of(prepared, q_THD, q_sink_THD, k_SHD, v_SHD))
        if sinks_H is not None:
            sinks_H = sinks_H.to(torch.float32).contiguous()
        out_THD = torch.empty((*q_THD.shape[:2], v_SHD.shape[2]), dtype=prepared.dtype, device="cpu")
        self._run(
            bound.call, q_THD.data_ptr(), None if q_sink_THD is None else q_sink_THD.data_ptr(),
            k_SHD.data_ptr(), v_SHD.data_ptr(), out_THD.data_ptr(), None if lse_TH is None else lse_TH.data_ptr(),
            None if sinks_H is None else sinks_H.data_ptr(), scoring.scale, scoring.softcap or 0.0, self._parallel,
        )  # fmt: skip
        return out_THD

    def bound(self, prepared: PagedPlan, shapes: Shapes) -> BoundPlan:
        """Return the result of ``bind``, made once for all layers of such shapes."""
        bound = prepared.bound.get(shapes)
        if bound is None:
            bound = prepared.bound[shapes] = self.bind(prepared, shapes)
        return bound


def shapes_of(prepared: PagedPlan, q_THD: Tensor, q_sink_THD: Tensor | None, k_SHD: Tensor, v_SHD: Tensor) -> Shapes:
    """Return the shapes of a call's tensors for ``bind``. ``InvalidArgument`` if a tensor differs
    from the plan."""
    strides: list[int] = []
    for name, x in (("q", q_THD), ("q_sink", q_sink_THD), ("K", k_SHD), ("V", v_SHD)):
        strides += (0, 0) if x is None else _require_planned(prepared, name, x).stride()[:2]
    (_, heads, key_size), (slots, kv_heads, value_size) = q_THD.shape, v_SHD.shape
    return Shapes(heads, key_size, slots, kv_heads, value_size, tuple(strides))


def _require_planned(prepared: PagedPlan, name: str, x: Tensor) -> Tensor:
    """Return a tensor of a call; ``InvalidArgument`` if its type or size differs from the plan."""
    if x.dtype != prepared.dtype or not x.is_cpu:
        raise InvalidArgument(
            f"the batch was planned for {prepared.dtype} on the CPU; {name} is {x.dtype} on {x.device}"
        )
    return x


def _in_rows(x: Tensor) -> Tensor:
    """Return the tensor, or a copy, with contiguous rows."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _columns(plan: ForwardPlan, part: VisibleKeys) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the visible keys by rules: ``[T, 3]``, for each row the index of its first word, the
    number of its words and the address of their first bit; and the words, one for each block of
    keys."""
    of_rows = np.zeros((plan.num_tokens, 3), dtype=np.int64)
    words: list[NDArray[np.uint64]] = []
    used = 0
    for entry, columns in part.columns.items():
        rows = np.arange(plan.starts[entry], plan.starts[entry + 1])
        skipped = columns.first % BLOCK
        blocks = -(-(skipped + columns.visible.shape[1]) // BLOCK)
        bits = np.zeros((rows.size, blocks * BLOCK), dtype=np.bool_)
        bits[:, skipped : skipped + columns.visible.shape[1]] = columns.visible
        words.append(np.packbits(bits, axis=1, bitorder="little").view("<u8").ravel())
        of_rows[rows, 0] = used + blocks * np.arange(rows.size)
        of_rows[rows, 1], of_rows[rows, 2] = blocks, columns.first - skipped
        used += rows.size * blocks
    return of_rows, np.concatenate(words)
