"""A decoder block, or a whole model, as one call in C++, for CPUs.

A decode of few sequences is many short calls. Each costs microseconds of Python and the beginning
and end of a parallel region; one call saves these. The parts are the code of
``linear.cpu_linear``, ``rows.cpu_rows``, ``attention.cpu_attention``,
``recurrence.cpu_recurrence`` and ``experts``, so every number is the same to the bit.

Letters: as in ``contracts.block_calls``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from threading import Lock
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.block_calls import (
    AttentionParts,
    BlockTail,
    MLPParts,
    ModelEnds,
    NormWeight,
    Residuals,
    RowLogits,
    StackParts,
    WholeBlock,
)
from quire.contracts.experts import MixtureCall
from quire.contracts.linear import LinearMap
from quire.contracts.recurrence import MixerCall, RecurrentParts, StackPools
from quire.kernels.experts import NativeGate, NativeMixture, native_gate
from quire.kernels.linear.cpu_linear import NativeMap, native_maps
from quire.kernels.native_library import NativeLibrary, native_library
from quire.kernels.recurrence.cpu_recurrence import NativeMixer
from quire.kernels.rows.cpu_rows import TYPES
from quire.weights.packed import EXACT_FORMS

MOST_ROWS = 64
"""Most rows of a call. With more rows, the overhead of separate calls is small beside their
work."""
_WIDE = 3
_TYPES: Mapping[tuple[torch.dtype, torch.dtype, torch.dtype], int] = {
    **{(rows, weight, rows): number for (rows, weight), number in TYPES.items()},
    (torch.bfloat16, torch.float32, torch.float32): _WIDE,
}
"""C++ numbers of the dtypes of activations, of norms' weights, and of the rows of the residual
stream."""


class _Block(ctypes.Structure):
    """``Block`` of ``cpu/block.h``."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("qkv", "out", "gate_up", "down", "attention_norm", "mlp_norm", "parallel")),
        *((name, ctypes.c_int64) for name in ("types", "width")),
        ("gate", NativeGate),
        *((name, ctypes.c_double) for name in ("attention_eps", "mlp_eps")),
        *((name, ctypes.c_void_p) for name in ("attention_out_norm", "mlp_out_norm")),
        *((name, ctypes.c_double) for name in ("attention_out_eps", "mlp_out_eps")),
        *((name, ctypes.c_double) for name in ("scale", "mlp_scale", "in_factor", "gate_factor", "down_factor")),
        ("gated", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("mixer", "rates", "experts", "columns")),
        ("aside", ctypes.c_int64),
    ]  # fmt: skip


class _States(ctypes.Structure):
    _fields_: ClassVar = [(name, ctypes.c_void_p) for name in ("kept", "states")]


class _Ends(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("head", "norm", "table", "rows")),
        ("vocabulary", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("eps", "embedding_scale", "logit_scale", "softcap")),
    ]


class NativeBlocks:
    """``contracts.block_calls.BlockKernel`` by the C++ library."""

    def __init__(self, library: NativeLibrary) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._tail = library.function(
            "quire_block_tail", *(pointer, pointer, pointer, number, pointer, number, number), result=ctypes.c_int
        )
        self._whole = library.function(
            "quire_blocks", *(pointer, number, pointer, pointer, number, number), result=ctypes.c_int
        )
        self._model = library.function(
            "quire_model", pointer, pointer, number, pointer, pointer, pointer, number, number, result=ctypes.c_int
        )
        self._parallel = library.parallel

    def tail(self, out: LinearMap, residuals: Residuals, mlp: MLPParts | MixtureCall) -> NativeTail | None:
        """See the contract."""
        if not isinstance(out, NativeMap):
            return None
        norms = [one for one in (residuals.mlp_in, residuals.attention_out, residuals.mlp_out) if one is not None]
        kinds = {one.weight_E.dtype for one in norms}
        native = self._block(out.dtype, next(iter(kinds), out.dtype), out.dtype, out.weights.outputs)
        if native is None or len(kinds) > 1 or any(_width(one) != native.width for one in norms):
            return None
        kept = _feed(native, mlp, out.dtype)
        if kept is None:
            return None
        native.out, native.scale, native.mlp_scale = out.place, residuals.scale, residuals.mlp_scale
        native.mlp_norm, native.mlp_eps = _norm(residuals.mlp_in)
        native.attention_out_norm, native.attention_out_eps = _norm(residuals.attention_out)
        native.mlp_out_norm, native.mlp_out_eps = _norm(residuals.mlp_out)
        return NativeTail(self._tail, native, (kept, residuals), out, has_norms=bool(norms))

    def bare_tail(self, out: LinearMap, scale: float = 1.0, row_dtype: torch.dtype | None = None) -> NativeTail | None:
        """See the contract."""
        if not isinstance(out, NativeMap):
            return None
        native = self._block(out.dtype, row_dtype or out.dtype, row_dtype or out.dtype, out.weights.outputs)
        if native is None:
            return None
        native.out, native.scale = out.place, scale
        return NativeTail(self._tail, native, None, out, has_norms=False)

    def feed_forward(self, norm: NormWeight, mlp: MLPParts | MixtureCall) -> NativeBlock | None:
        """See the contract."""
        last = mlp.down if isinstance(mlp, MLPParts) else mlp
        if isinstance(last, NativeMap):
            dtype, width = last.dtype, last.weights.outputs
        elif isinstance(last, NativeMixture):
            dtype, width = last.dtype, last.width
        else:
            return None
        native = self._block(dtype, norm.weight_E.dtype, dtype, width)
        if native is None or _width(norm) != width or (kept := _feed(native, mlp, dtype)) is None:
            return None
        native.mlp_norm, native.mlp_eps = _norm(norm)
        return NativeBlock(self._whole, native, (norm, kept), dtype, None)

    def _block(self, dtype: torch.dtype, weight: torch.dtype, row_dtype: torch.dtype, width: int) -> _Block | None:
        """Return a block without any part; None for unsupported types of activations, weights of
        norms, and rows."""
        types = _TYPES.get((dtype, weight, row_dtype))
        if types is None:
            return None
        factors = dict.fromkeys(("scale", "mlp_scale", "in_factor", "gate_factor", "down_factor"), 1.0)
        return _Block(parallel=self._parallel, types=types, width=width, **factors)

    def whole(
        self,
        norm: NormWeight | None,
        qkv: LinearMap,
        tail: BlockTail,
        *,
        gated: bool = False,
        gates: LinearMap | None = None,
        factor: float = 1.0,
    ) -> NativeBlock | None:
        """See the contract."""
        if gates is None:
            return self._begun(norm, (qkv,), tail, None, factor, gated=gated)
        # Heads of equal size, of which each has a gate.
        fits = not gated and isinstance(tail, NativeTail) and tail.columns % gates.weights.outputs == 0
        return self._begun(norm, (qkv, gates), tail, None, factor) if fits else None

    def mixed(
        self,
        norm: NormWeight,
        project: LinearMap,
        rates: LinearMap | None,
        mixer: MixerCall,
        tail: BlockTail,
        *,
        factor: float = 1.0,
        scale_Z: Tensor | None = None,
    ) -> NativeBlock | None:
        """See the contract."""
        if not (isinstance(mixer, NativeMixer) and isinstance(tail, NativeTail)):
            return None
        given = (mixer.dtype, mixer.columns, mixer.width, mixer.rates)
        if given != (tail.dtype, project.weights.outputs, tail.columns, 0 if rates is None else rates.weights.outputs):
            return None
        maps = (project,) if rates is None else (project, rates)
        if scale_Z is None:
            return self._begun(norm, maps, tail, mixer, factor)
        if (scale_Z.dtype, scale_Z.shape) != (tail.dtype, (mixer.columns,)) or not scale_Z.is_contiguous():
            return None
        return self._begun(norm, maps, tail, mixer, factor, scale_Z=scale_Z)

    def _begun(
        self,
        norm: NormWeight | None,
        maps: tuple[LinearMap, ...],
        tail: BlockTail,
        mixer: NativeMixer | None,
        factor: float,
        *,
        gated: bool = False,
        scale_Z: Tensor | None = None,
    ) -> NativeBlock | None:
        """Return a block with this end, and these maps of its normed input."""
        found = native_maps(maps)
        if found is None or not isinstance(tail, NativeTail) or found[0].dtype != tail.dtype:
            return None
        if {one.weights.inputs for one in maps} != {tail.width}:
            return None
        native = _Block.from_buffer_copy(tail.native)
        if norm is not None:
            types = _TYPES.get((tail.dtype, norm.weight_E.dtype, tail.row_dtype))
            if types is None or _width(norm) != tail.width or (tail.has_norms and types != native.types):
                return None
            native.types = types
        elif factor != 1.0 or tail.row_dtype != tail.dtype:
            return None
        native.qkv, (native.attention_norm, native.attention_eps) = found[0].place, _norm(norm)
        native.gated, native.mixer = gated, None if mixer is None else mixer.place
        native.rates = found[1].place if len(found) > 1 else None
        native.in_factor, native.columns = factor, None if scale_Z is None else scale_Z.data_ptr()
        return NativeBlock(self._whole, native, (norm, found, tail, scale_Z), tail.dtype, mixer)

    def beside(self, mixer: WholeBlock, block: WholeBlock) -> NativeBlock | None:
        """See the contract."""
        if not (isinstance(mixer, NativeBlock) and isinstance(block, NativeBlock)) or mixer.kind != block.kind:
            return None
        if len(mixer.steps) > 1 or mixer.native.down or mixer.native.experts or not block.native.out:
            return None
        native = _Block.from_buffer_copy(mixer.native)
        native.aside = 1
        first = NativeBlock(self._whole, native, mixer, mixer.dtype, mixer.steps[0].mixer)
        return NativeBlock(self._whole, block.native, (first, block), block.dtype, None, (*first.steps, *block.steps))

    def stack(self, blocks: Sequence[WholeBlock], ends: ModelEnds | None) -> NativeStack | None:
        """See the contract."""
        found = [one for one in blocks if isinstance(one, NativeBlock)]
        if not found or len(found) < len(blocks) or len({one.kind for one in found}) > 1:
            return None
        return NativeStack(self._whole, self._model, found, ends if _fit(ends, found[0]) else None)


class _Few:
    """The common part of calls over one block: few rows of one dtype."""

    __slots__ = ("_kept", "_run", "dtype", "native", "place", "row_dtype", "width")

    def __init__(self, run: ctypes._NamedFuncPointer, native: _Block, kept: object, dtype: torch.dtype) -> None:
        """``native`` holds addresses of memory that ``kept`` owns. ``dtype``: of activations."""
        self._run, self.native, self.place, self._kept = run, native, ctypes.addressof(native), kept
        self.dtype, self.width = dtype, native.width
        self.row_dtype = torch.float32 if native.types == _WIDE else dtype
        """Dtype of the rows that are given and returned."""

    def takes(self, x_TE: Tensor) -> bool:
        """See the contracts."""
        return 0 < x_TE.shape[0] <= MOST_ROWS and x_TE.dtype == self.row_dtype and x_TE.is_contiguous()


class NativeTail(_Few):
    """``contracts.rows.BlockTail`` with everything ready for calls."""

    __slots__ = ("columns", "has_norms")

    def __init__(
        self, run: ctypes._NamedFuncPointer, native: _Block, kept: object, out: NativeMap, *, has_norms: bool
    ) -> None:
        """``out``: the projection of the heads. ``kept``: as of ``_Few``, without ``out``."""
        super().__init__(run, native, (kept, out), out.dtype)
        self.columns, self.has_norms = out.weights.inputs, has_norms

    def __call__(self, heads_TC: Tensor, x_TE: Tensor) -> Tensor:
        """See the contract. ``MemoryError``: no memory for sums."""
        if heads_TC.stride(1) != 1:
            heads_TC = heads_TC.contiguous()
        y_TE, rows = torch.empty_like(x_TE), x_TE.shape[0]
        if self._run(
            self.place, y_TE.data_ptr(), heads_TC.data_ptr(), heads_TC.stride(0), x_TE.data_ptr(), rows, torch.get_num_threads()
        ):  # fmt: skip
            raise MemoryError(f"the end of a block over {rows} rows found no memory for its sums")
        return y_TE


class _Step(NamedTuple):
    """A structure of a block, and the layer in it: a mixer, attention, or neither."""

    place: int
    mixer: NativeMixer | None
    attends: bool


class NativeBlock(_Few):
    """``contracts.block_calls.WholeBlock`` with everything ready for calls."""

    __slots__ = ("steps",)

    def __init__(
        self,
        run: ctypes._NamedFuncPointer,
        native: _Block,
        kept: object,
        dtype: torch.dtype,
        mixer: NativeMixer | None,
        steps: tuple[_Step, ...] = (),
    ) -> None:
        """``mixer``: None: the block has attention or no layer. ``steps``: all structures, the last
        one ``native``; empty: it alone."""
        super().__init__(run, native, kept, dtype)
        self.steps = steps or (_Step(self.place, mixer, mixer is None and bool(native.qkv)),)

    def __call__(self, x_TE: Tensor, *parts: AttentionParts | RecurrentParts) -> Tensor:
        """See the contract. ``MemoryError``: no memory for sums."""
        places, held, given = [], list[object](), iter(parts)
        for step in self.steps:
            one = next(given) if step.attends or step.mixer is not None else None
            if step.mixer is not None:
                assert isinstance(one, RecurrentParts)
                assert one.plan.num_rows == x_TE.shape[0]
                states, bound = _States(*step.mixer.pools(one.pools)), step.mixer.mixers.bound(one)
                held += [states, bound]
                places.append((step.place, ctypes.addressof(states), bound.place))
            else:
                assert one is None or isinstance(one, AttentionParts)
                places.append((step.place, *(one or (0, 0))))
        return _run_blocks(self._run, np.array(places), x_TE)

    @property
    def kind(self) -> tuple[torch.dtype, int, int]:
        """A key that is equal for blocks that one call can run."""
        return self.dtype, self.width, self.native.types


class NativeStack:
    """``contracts.block_calls.BlockStack`` by the C++ library."""

    def __init__(
        self,
        run: ctypes._NamedFuncPointer,
        run_model: ctypes._NamedFuncPointer,
        blocks: Sequence[NativeBlock],
        ends: ModelEnds | None,
    ) -> None:
        """``blocks``: at least one, for rows of one dtype and width."""
        self._run, self._run_model, self._blocks, self._ends = run, run_model, tuple(blocks), ends
        steps = [step for one in blocks for step in one.steps]
        self._places = np.array([(step.place, 0, 0) for step in steps])
        self._place = self._places.ctypes.data
        self._stops = np.cumsum([len(one.steps) for one in blocks]).tolist()
        """Of each block the number of steps up to its last one."""
        self._attending = np.array([place for place, step in enumerate(steps) if step.attends], dtype=np.int64)
        self._mixing = np.array([place for place, step in enumerate(steps) if step.mixer is not None], dtype=np.int64)
        self._mixers = [step.mixer for step in steps if step.mixer is not None]
        self._states = WeakKeyDictionary[StackPools, tuple[ctypes.Array[_States], NDArray[np.int64]]]()
        """For the pools of each KV state: structures of its layers, and their addresses."""
        self._forward: object = None
        """The structure of the last forward over states; it has to live during the call."""
        self._lock = Lock()
        """For the arrays that calls write here: other threads may run the model over other
        states."""
        self._attention: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        """The arrays written to ``_places``; a caller that passes the same ones has not changed
        them."""
        self.takes, self.dtype = blocks[0].takes, blocks[0].dtype
        """See the contract."""
        self.most_tokens = 0 if ends is None else MOST_ROWS
        self._tokens, self._first = np.empty(MOST_ROWS, np.int64), (ctypes.c_int64 * MOST_ROWS)()
        self._tokens_place = self._tokens.ctypes.data
        self._native = _Ends()
        if ends is not None:
            head, given = ends.head, ends.table_VE
            table, rows = (given, head) if isinstance(given, Tensor) else (None, given or head)
            assert isinstance(head, NativeMap)
            assert isinstance(rows, NativeMap)
            self._rows = rows
            self._native = _Ends(
                head.place, ends.norm.weight_E.data_ptr(), None if table is None else table.data_ptr(),
                rows.place, rows.weights.outputs if table is None else len(table), ends.norm.eps,
                ends.embedding_scale, ends.logit_scale, ends.softcap or 0.0,
            )  # fmt: skip
            self._vocabulary = head.weights.outputs
        self._ends_place = ctypes.addressof(self._native)

    def __call__(self, x_TE: Tensor, parts: StackParts) -> Tensor:
        """See the contract. ``MemoryError``: no memory for sums."""
        return self.outputs(x_TE, parts, (len(self._blocks) - 1,))[0]

    def outputs(self, x_TE: Tensor, parts: StackParts, blocks: Sequence[int]) -> list[Tensor]:
        """See the contract. ``MemoryError``: no memory for sums."""
        found, start = [], 0
        with self._lock:
            self._take(parts)
            for block in blocks:
                x_TE = _run_blocks(self._run, self._places[start : self._stops[block]], x_TE)
                found.append(x_TE)
                start = self._stops[block]
        return found

    def model(self, tokens: NDArray[np.int64], parts: StackParts) -> RowLogits:
        """See the contract. ``MemoryError``: no memory for sums."""
        rows = len(tokens)
        logits_TV = torch.empty(rows, self._vocabulary, device="cpu")
        with self._lock:
            self._take(parts)
            self._tokens[:rows] = tokens
            failed = self._run_model(
                self._ends_place, self._place, len(self._places), logits_TV.data_ptr(), self._first, self._tokens_place,
                rows, torch.get_num_threads(),
            )  # fmt: skip
            first = self._first[:rows]
        if failed == 2:
            raise IndexError(
                f"tokens of {tokens.min()} to {tokens.max()}; ids of 0 to {self._native.vocabulary - 1} are known"
            )
        if failed:
            raise MemoryError(f"{len(self._places)} blocks over {rows} rows found no memory for their sums")
        return RowLogits(logits_TV, first)

    def _take(self, parts: StackParts) -> None:
        """Write the addresses of a forward."""
        if self._mixers:
            assert parts.states is not None
            forward = self._forward = self._mixers[0].mixers.bound(parts.states)
            self._places[self._mixing, 1], self._places[self._mixing, 2] = (
                self._pools(parts.states.pools),
                forward.place,
            )
        if (
            self._attention is None
            or self._attention[0] is not parts.layers
            or self._attention[1] is not parts.forwards
        ):
            self._places[self._attending, 1], self._places[self._attending, 2] = parts.layers, parts.forwards
            self._attention = parts.layers, parts.forwards

    def _pools(self, given: StackPools) -> NDArray[np.int64]:
        """Return the addresses of the structures of the layers with a mixer."""
        found = self._states.get(given)
        if found is None:
            made = (_States * len(self._mixers))(
                *(_States(*mixer.pools(pools)) for mixer, pools in zip(self._mixers, given.of_layers, strict=True))
            )
            places = ctypes.addressof(made) + ctypes.sizeof(_States) * np.arange(len(made))
            found = self._states[given] = made, places
        return found[1]


def _run_blocks(run: ctypes._NamedFuncPointer, places: NDArray[np.int64], x_TE: Tensor) -> Tensor:
    """Run blocks over a fresh tensor; ``places [blocks, 3]``: for each block the addresses of its
    weights, its layer and its forward."""
    y_TE, rows, count = torch.empty_like(x_TE), x_TE.shape[0], len(places)
    if run(places.ctypes.data, count, y_TE.data_ptr(), x_TE.data_ptr(), rows, torch.get_num_threads()):
        raise MemoryError(f"{count} blocks over {rows} rows found no memory for their sums")
    return y_TE


def _feed(native: _Block, mlp: MLPParts | MixtureCall, dtype: torch.dtype) -> object | None:
    """Give a block its feed-forward part; return the owner of the addresses, None for unsupported
    parts."""
    if isinstance(mlp, MLPParts):
        maps = native_maps((mlp.first, mlp.down))
        shapes = [(one.weights.inputs, one.weights.outputs) for one in (mlp.first, mlp.down)]
        width, inner = native.width, mlp.down.weights.inputs
        if maps is None or maps[0].dtype != dtype or shapes != [(width, mlp.gate.factor * inner), (inner, width)]:
            return None
        native.gate_up, native.down, native.gate = maps[0].place, maps[1].place, native_gate(mlp.gate)
        native.gate_factor, native.down_factor = mlp.gate_factor, mlp.down_factor
        return maps
    if not isinstance(mlp, NativeMixture) or (mlp.dtype, mlp.width) != (dtype, native.width):
        return None
    native.experts = mlp.place
    return mlp


def _fit(ends: ModelEnds | None, block: NativeBlock) -> bool:
    """Return True if one call can run a whole model with these ends."""
    if ends is None or not isinstance(ends.head, NativeMap):
        return False
    (table, norm, head, *_), types = ends, _TYPES.get((block.dtype, ends.norm.weight_E.dtype, block.row_dtype))
    if isinstance(table, Tensor):
        fits = table.is_cpu and table.is_contiguous() and (table.dtype, table.shape[1]) == (block.dtype, block.width)
    else:
        rows = table or ends.head
        fits = isinstance(rows, NativeMap) and rows.weights.form in EXACT_FORMS and rows.weights.inputs == block.width
    same_width = head.weights.inputs == block.width == _width(norm)
    return fits and same_width and ends.head.dtype == block.dtype and types == block.native.types


def _norm(norm: NormWeight | None) -> tuple[int | None, float]:
    """Return the address of a norm's weight, and what is added to its mean."""
    return (None, 0.0) if norm is None else (norm.weight_E.data_ptr(), norm.eps)


def _width(norm: NormWeight) -> int:
    """Return E; 0 for a weight that is not contiguous."""
    return len(norm.weight_E) if norm.weight_E.is_contiguous() else 0


@cache
def native_blocks() -> NativeBlocks | None:
    """Return the kernel; None if it was not built (``native_library.native_problem``)."""
    found = native_library()
    return None if found is None else NativeBlocks(found)
