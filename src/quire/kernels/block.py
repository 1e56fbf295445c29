"""A decoder block, or a whole model, as one call in C++, for CPUs.

A decode of few sequences is many short calls. Each costs microseconds of Python and the beginning
and end of a parallel region; one call saves these. The parts are the code of
``linear.cpu_linear``, ``rows.cpu_rows``, ``attention.cpu_attention``,
``recurrence.cpu_recurrence`` and ``experts``, so every number is the same to the bit.

Letters: as in ``contracts.block_calls``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.block_calls import (
    AttentionParts,
    BlockTail,
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
from quire.contracts.rows import ActivationName
from quire.kernels.experts import NativeMixture
from quire.kernels.linear.cpu_linear import NativeMap
from quire.kernels.native_library import NativeLibrary, native_library
from quire.kernels.recurrence.cpu_recurrence import NativeMixer
from quire.kernels.rows.cpu_rows import ACTIVATION_NUMBERS, TYPES
from quire.weights.packed import EXACT_FORMS

MOST_ROWS = 64
"""Most rows of a call. With more rows, the overhead of separate calls is small beside their
work."""


class _Block(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("qkv", "out", "gate_up", "down", "attention_norm", "mlp_norm", "parallel")),
        *((name, ctypes.c_int64) for name in ("types", "activation")),
        *((name, ctypes.c_double) for name in ("attention_eps", "mlp_eps")),
        *((name, ctypes.c_void_p) for name in ("attention_out_norm", "mlp_out_norm")),
        *((name, ctypes.c_double) for name in ("attention_out_eps", "mlp_out_eps", "scale")),
        ("gated", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("mixer", "rates", "experts")),
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

    def tail(
        self, out: LinearMap, residuals: Residuals, gate_up: LinearMap, down: LinearMap, activation: ActivationName
    ) -> BlockTail | None:
        """See the contract."""
        maps = _native((out, gate_up, down))
        width, inner = out.weights.outputs, down.weights.inputs
        fits = down.weights.outputs == width == gate_up.weights.inputs and gate_up.weights.outputs == 2 * inner
        native = None if maps is None or not fits else self._summed(maps[0], residuals)
        if maps is None or native is None:
            return None
        native.gate_up, native.down, native.activation = maps[1].place, maps[2].place, ACTIVATION_NUMBERS[activation]
        return NativeTail(self._tail, native, (maps, residuals), maps[0])

    def experts_tail(self, out: LinearMap, residuals: Residuals, mixture: MixtureCall) -> NativeTail | None:
        """See the contract."""
        if not (isinstance(out, NativeMap) and isinstance(mixture, NativeMixture)):
            return None
        if (mixture.dtype, mixture.width) != (out.dtype, out.weights.outputs):
            return None
        native = self._summed(out, residuals)
        if native is None:
            return None
        # One call may run it with blocks of gated MLPs, which have the experts' activation.
        native.experts, native.activation = mixture.place, mixture.activation
        return NativeTail(self._tail, native, (mixture, residuals), out)

    def _summed(self, out: NativeMap, residuals: Residuals) -> _Block | None:
        """Return the end of a block without its feed-forward part; None for unsupported norms."""
        norms = [one for one in (residuals.mlp_in, residuals.attention_out, residuals.mlp_out) if one is not None]
        kinds = {one.weight_E.dtype for one in norms}
        types = TYPES.get((out.dtype, next(iter(kinds), out.dtype)))
        if types is None or len(kinds) > 1 or any(_width(one) != out.weights.outputs for one in norms):
            return None
        native = _Block(out=out.place, parallel=self._parallel, types=types, scale=residuals.scale)
        native.mlp_norm, native.mlp_eps = _norm(residuals.mlp_in)
        native.attention_out_norm, native.attention_out_eps = _norm(residuals.attention_out)
        native.mlp_out_norm, native.mlp_out_eps = _norm(residuals.mlp_out)
        return native

    def whole(
        self,
        norm: NormWeight | None,
        qkv: LinearMap,
        tail: BlockTail,
        *,
        gated: bool = False,
        gates: LinearMap | None = None,
    ) -> NativeBlock | None:
        """See the contract."""
        if gates is None:
            return self._begun(norm, (qkv,), tail, None, gated=gated)
        # Heads of equal size, of which each has a gate.
        fits = not gated and isinstance(tail, NativeTail) and tail.columns % gates.weights.outputs == 0
        return self._begun(norm, (qkv, gates), tail, None) if fits else None

    def mixed(
        self, norm: NormWeight, project: LinearMap, rates: LinearMap | None, mixer: MixerCall, tail: BlockTail
    ) -> NativeBlock | None:
        """See the contract."""
        if not (isinstance(mixer, NativeMixer) and isinstance(tail, NativeTail)):
            return None
        given = (mixer.dtype, mixer.columns, mixer.width, mixer.rates)
        if given != (tail.dtype, project.weights.outputs, tail.columns, 0 if rates is None else rates.weights.outputs):
            return None
        return self._begun(norm, (project,) if rates is None else (project, rates), tail, mixer)

    def _begun(
        self,
        norm: NormWeight | None,
        maps: tuple[LinearMap, ...],
        tail: BlockTail,
        mixer: NativeMixer | None,
        *,
        gated: bool = False,
    ) -> NativeBlock | None:
        """Return a block with this end, and these maps of its normed input."""
        found = _native(maps)
        if found is None or not isinstance(tail, NativeTail) or found[0].dtype != tail.dtype:
            return None
        if {one.weights.inputs for one in maps} != {tail.width}:
            return None
        if norm is not None and (TYPES.get((tail.dtype, norm.weight_E.dtype)), _width(norm)) != (
            tail.native.types,
            tail.width,
        ):
            return None
        native = _Block.from_buffer_copy(tail.native)
        native.qkv, (native.attention_norm, native.attention_eps) = found[0].place, _norm(norm)
        native.gated, native.mixer = gated, None if mixer is None else mixer.place
        native.rates = found[1].place if len(found) > 1 else None
        return NativeBlock(self._whole, native, (norm, found, tail), tail, mixer)

    def stack(self, blocks: Sequence[WholeBlock], ends: ModelEnds | None) -> NativeStack | None:
        """See the contract."""
        found = [one for one in blocks if isinstance(one, NativeBlock)]
        if not found or len(found) < len(blocks) or len({one.kind for one in found}) > 1:
            return None
        return NativeStack(self._whole, self._model, found, ends if _fit(ends, found[0]) else None)


class _Few:
    """The common part of calls over one block: few rows of one dtype."""

    __slots__ = ("_kept", "_run", "dtype", "native", "place", "width")

    def __init__(
        self, run: ctypes._NamedFuncPointer, native: _Block, kept: object, dtype: torch.dtype, width: int
    ) -> None:
        """``native`` holds addresses of memory that ``kept`` owns."""
        self._run, self.native, self.place, self._kept = run, native, ctypes.addressof(native), kept
        self.dtype, self.width = dtype, width

    def takes(self, x_TE: Tensor) -> bool:
        """See the contracts."""
        return 0 < x_TE.shape[0] <= MOST_ROWS and x_TE.dtype == self.dtype and x_TE.is_contiguous()


class NativeTail(_Few):
    """``contracts.rows.BlockTail`` with everything ready for calls."""

    __slots__ = ("columns",)

    def __init__(self, run: ctypes._NamedFuncPointer, native: _Block, kept: object, out: NativeMap) -> None:
        """``out``: the projection of the heads. ``kept``: as of ``_Few``, without ``out``."""
        super().__init__(run, native, (kept, out), out.dtype, out.weights.outputs)
        self.columns = out.weights.inputs

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


class NativeBlock(_Few):
    """``contracts.block_calls.WholeBlock`` with everything ready for calls."""

    __slots__ = ("mixer",)

    def __init__(
        self, run: ctypes._NamedFuncPointer, native: _Block, kept: object, tail: NativeTail, mixer: NativeMixer | None
    ) -> None:
        """``mixer``: None: the block has attention."""
        super().__init__(run, native, kept, tail.dtype, tail.width)
        self.mixer = mixer

    def __call__(self, x_TE: Tensor, parts: AttentionParts | RecurrentParts) -> Tensor:
        """See the contract. ``MemoryError``: no memory for sums."""
        if isinstance(parts, AttentionParts):
            assert self.mixer is None
            return _run_blocks(self._run, np.array([(self.place, *parts)]), x_TE)
        assert self.mixer is not None
        assert parts.plan.num_rows == x_TE.shape[0]
        states, bound = _States(*self.mixer.pools(parts.pools)), self.mixer.mixers.bound(parts)
        return _run_blocks(self._run, np.array([(self.place, ctypes.addressof(states), bound.place)]), x_TE)

    @property
    def kind(self) -> tuple[torch.dtype, int, int, int]:
        """A key that is equal for blocks that one call can run."""
        return self.dtype, self.width, self.native.types, self.native.activation


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
        self._places = np.array([(one.place, 0, 0) for one in blocks])
        self._place = self._places.ctypes.data
        self._attending, self._mixing = (
            np.array([place for place, one in enumerate(blocks) if (one.mixer is not None) is mixes], dtype=np.int64)
            for mixes in (False, True)
        )
        self._mixers = [one.mixer for one in blocks if one.mixer is not None]
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
                x_TE = _run_blocks(self._run, self._places[start : block + 1], x_TE)
                found.append(x_TE)
                start = block + 1
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


def _native(maps: Sequence[LinearMap]) -> tuple[NativeMap, ...] | None:
    """Return the maps if all are of this library and for activations of one dtype; else None."""
    found = tuple(one for one in maps if isinstance(one, NativeMap))
    return found if len(found) == len(maps) and len({one.dtype for one in found}) == 1 else None


def _fit(ends: ModelEnds | None, block: NativeBlock) -> bool:
    """Return True if one call can run a whole model with these ends."""
    if ends is None or not isinstance(ends.head, NativeMap):
        return False
    (table, norm, head, *_), types = ends, TYPES.get((block.dtype, ends.norm.weight_E.dtype))
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
