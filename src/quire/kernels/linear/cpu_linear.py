"""Linear maps in C++, for CPUs. The reference is ``quire.weights.packed``.

Letters: T rows, I input, O output features.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import CheckpointError, InvalidArgument
from quire.contracts.linear import BlockRows, CodeRows, LinearMap, PackedMatrix, WeightForm
from quire.kernels.linear.ordered_map import by_blocks, in_order
from quire.kernels.linear.packed_memory import PackedMemory, collapses
from quire.kernels.native_library import NativeLibrary, native_library
from quire.weights import packed as reference
from quire.weights.block_panels import GROUP, KINDS, fits_panels
from quire.weights.gguf_blocks import FLOAT8
from quire.weights.mapped_pages import drop_pages
from quire.weights.panels import pack_codes

PANEL = 32
"""Outputs of a panel."""
PACKED_AT_ONCE = 1 << 25
"""Bytes of a weight after which its pages of a file are dropped."""
FORMS: tuple[WeightForm, ...] = ("float32", "bfloat16", "int8", "int4")
"""Forms that weights are packed in."""
NUMBERS: tuple[WeightForm, ...] = (*FORMS, "blocks")
"""All forms, in the order of ``cpu/linear.h``."""
DTYPES = (torch.float32, torch.bfloat16)
AVX2 = 1
"""Level whose products of blocks and bfloat16 rows are those of whole numbers
(``cpu/linear_digits.h``)."""
WHOLE_KINDS = frozenset(KINDS) - {"Q2_K", "Q3_K", FLOAT8}
"""Formats of these blocks."""
WIDE = 2
"""Level of products in float32 (AVX-512)."""
TILES = 4
"""Level of a processor with tiles of bfloat16 (AMX)."""
EMULATED = 5
"""Level of emulated tiles of bfloat16 (AMX), slow on any machine, for tests."""


class _Linear(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "bias", "parallel")),
        *(
            (name, ctypes.c_int64)
            for name in ("inputs", "outputs", "group", "form", "is_bfloat16", "level")
        ),
        ("block_parts", ctypes.c_void_p),
        ("num_block_parts", ctypes.c_int64),
    ]  # fmt: skip


class NativeLinear:
    """``contracts.linear.LinearKernel`` by the C++ library."""

    name = "C++"

    def __init__(self, library: NativeLibrary, level: int | None = None) -> None:
        """``level``: vector instructions, 0 to 4 (``cpu/linear.cpp``), or ``EMULATED``; None: the
        processor's best."""
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        best = library.function("quire_linear_level", result=ctypes.c_int)()
        if level is not None and not 0 <= level <= best and level != EMULATED:
            allowed = f"0 to {best}, which this processor has, or {EMULATED}, tiles that are emulated"
            raise InvalidArgument(field="level", given=level, allowed=allowed)
        self.level: int = best if level is None else level
        slow = level is None and library.function("quire_slow_pairs", result=ctypes.c_int)()
        self.float_level: int = WIDE if slow else self.level
        """Of weights in bfloat16 and of blocks, if codes have another: it decides for any number of
        rows, so that a row's result does not depend on it."""
        self.bfloat16_kinds = WHOLE_KINDS if self.level == AVX2 else frozenset[str]()
        """See ``contracts.linear.BlockKernel``."""
        self._parallel = library.parallel
        arguments = (pointer, pointer, pointer, number, number, number)
        self._run = library.function("quire_linear", *arguments, result=ctypes.c_int)
        self._fits = library.function("quire_fits_bfloat16", pointer, number, result=ctypes.c_int)
        self._run_heads = library.function(
            "quire_linear_heads", *(pointer, number, pointer, number, number, pointer, number, number, number, number), result=ctypes.c_int
        )  # fmt: skip
        self.memory = PackedMemory()
        self._pack = library.function(
            "quire_pack_linear", pointer, *[number] * 6, pointer, pointer, number, pointer
        )  # fmt: skip
        self._pack_blocks = library.function(
            "quire_pack_blocks", pointer, *[number] * 5, pointer, number, number, pointer, result=ctypes.c_int
        )

    def refusal(self, weight_OI: Tensor, form: WeightForm) -> str:
        """See the contract."""
        if weight_OI.device.type != "cpu":
            return f"the C++ products run on a CPU; the weight is on {weight_OI.device}"
        if form not in FORMS:
            return f"the C++ products have no {form} weights"
        if weight_OI.dtype not in DTYPES:
            return f"the C++ products are of float32 and bfloat16; the weight is {weight_OI.dtype}"
        inputs = weight_OI.shape[1]
        if form == "bfloat16" and inputs % 2:
            return f"bfloat16 weights are read in pairs of inputs; there are {inputs} inputs"
        if form in ("int8", "int4") and not reference.FORMS[form].group(inputs):
            return f"{form} weights have a scale for 8 inputs or more; {inputs} inputs are no multiple of 8"
        return ""

    def lossless(self, weight_OI: Tensor) -> WeightForm | None:
        """See the contract."""
        found: WeightForm = "float32"
        if weight_OI.dtype == torch.bfloat16:
            found = "bfloat16"
        elif not self.refusal(weight_OI, "bfloat16"):
            weight_OI = weight_OI.contiguous()
            if self._fits(weight_OI.data_ptr(), weight_OI.numel()):
                found = "bfloat16"
        return None if self.refusal(weight_OI, found) else found

    def pack(self, weight_OI: Tensor, bias_O: Tensor | None, form: WeightForm) -> NativeMap:
        """See the contract. ``InvalidArgument``: ``refusal`` has a reason."""
        if reason := self.refusal(weight_OI, form):
            raise InvalidArgument(reason, field="form", given=form)
        return self._packed([weight_OI], bias_O, form)

    def pack_parts(self, parts: Sequence[Tensor], bias_O: Tensor | None) -> NativeMap | None:
        """See ``contracts.linear.BlockKernel``."""
        forms = {self.lossless(part) for part in parts}
        if None in forms or any(len(part) % PANEL for part in parts[:-1]):
            return None
        return self._packed(parts, bias_O, "float32" if "float32" in forms else "bfloat16")

    def pack_heads(self, weight_HOI: Tensor) -> NativeHeads | None:
        """See ``contracts.linear.HeadKernel``."""
        form = self.lossless(weight_HOI.flatten(0, 1))
        if form is None:
            return None
        return NativeHeads(self._run_heads, [self._packed([weight_OI], None, form) for weight_OI in weight_HOI])

    def _packed(self, parts: Sequence[Tensor], bias_O: Tensor | None, form: WeightForm) -> NativeMap:
        """Pack rows that follow each other, whole panels of all but the last."""
        outputs, inputs = sum(map(len, parts)), parts[0].shape[1]
        packing = reference.FORMS[form]
        group = packing.group(inputs)
        values = self.memory.empty(packing.shape(outputs, inputs), packing.dtype)
        scales = self.memory.empty((len(values), inputs // group, PANEL), torch.bfloat16) if group else None
        step = PANEL * max(1, PACKED_AT_ONCE // (PANEL * inputs * parts[0].itemsize))
        panel = 0
        for part in parts:
            rows_OI = part if part.stride(1) == 1 else part.contiguous()
            for start in range(0, len(rows_OI), step):
                some = rows_OI[start : start + step]
                self._pack(
                    some.data_ptr(), int(some.dtype == torch.bfloat16), some.stride(0), len(some), inputs, FORMS.index(form),
                    group, values[panel:].data_ptr(), None if scales is None else scales[panel:].data_ptr(),
                    torch.get_num_threads(), self._parallel,
                )  # fmt: skip
                drop_pages(some)
                panel += -(-len(some) // PANEL)
        packed = PackedMatrix(form, outputs, inputs, group, values, scales)
        bias = None if bias_O is None else bias_O.float().contiguous()
        level = self.float_level if form == "bfloat16" else self.level
        return NativeMap(self._run, packed, bias, parts[0].dtype, level, self._parallel)

    def pack_blocks(
        self, parts: Sequence[BlockRows], inputs: int, bias_O: Tensor | None, dtype: torch.dtype
    ) -> NativeMap | None:
        """See ``contracts.linear.BlockKernel``."""
        kinds = tuple((part.kind, len(part.rows_RB)) for part in parts)
        if dtype not in DTYPES or not fits_panels(kinds):
            return None
        sizes = [-(-rows // PANEL) * KINDS[kind].panel_bytes(inputs) for kind, rows in kinds]
        values = self.memory.take(sum(sizes), requested=False)
        for part, to in zip(parts, torch.split(values, sizes), strict=True):
            rows_RB = part.rows_RB if part.rows_RB.stride(1) == 1 else part.rows_RB.contiguous()
            if self._pack_blocks(
                rows_RB.data_ptr(), rows_RB.stride(0), len(rows_RB), inputs, list(KINDS).index(part.kind),
                int(part.is_mapped and rows_RB is part.rows_RB), to.data_ptr(), int(collapses()), torch.get_num_threads(),
                self._parallel,
            ):  # fmt: skip
                raise CheckpointError(f"{part.name} has a scale in {part.kind} that is not finite; the file is damaged")
        outputs = sum(rows for _, rows in kinds)
        packed = PackedMatrix("blocks", outputs, inputs, GROUP, values, None, kinds)
        bias = None if bias_O is None else bias_O.float().contiguous()
        return NativeMap(self._run, packed, bias, dtype, self.float_level, self._parallel)

    def pack_codes(self, parts: Sequence[CodeRows], bias_O: Tensor | None, dtype: torch.dtype) -> LinearMap | None:
        """See ``contracts.linear.CodeKernel``."""
        if dtype not in DTYPES:
            return None
        if (made := pack_codes(parts)) is None:
            return by_blocks(self, parts, bias_O, dtype)
        assert made.scales is not None
        values, scales = (self.memory.empty(tuple(one.shape), one.dtype) for one in (made.values, made.scales))
        values.copy_(made.values)
        scales.copy_(made.scales)
        packed = PackedMatrix(made.form, made.outputs, made.inputs, made.group, values, scales)
        bias = None if bias_O is None else bias_O.float().contiguous()
        return in_order(NativeMap(self._run, packed, bias, dtype, self.level, self._parallel), parts)


class NativeMap:
    """``contracts.linear.LinearMap`` with its C++ arguments prepared."""

    __slots__ = ("_bias", "_native", "_parts", "_run", "dtype", "place", "weights")

    def __init__(
        self,
        run: ctypes._NamedFuncPointer,
        weights: PackedMatrix,
        bias_O: Tensor | None,
        dtype: torch.dtype,
        level: int,
        parallel: int | None,
    ) -> None:
        """``bias_O``: float32."""
        self.weights = weights
        self.dtype = dtype
        """Dtype of the activations."""
        self._run, self._bias = run, bias_O
        self._parts = _block_parts(weights)
        self._native = _Linear(
            weights.values.data_ptr(), None if weights.scales is None else weights.scales.data_ptr(),
            None if bias_O is None else bias_O.data_ptr(), parallel, weights.inputs, weights.outputs, weights.group,
            NUMBERS.index(weights.form), int(dtype == torch.bfloat16), level,
            self._parts.ctypes.data, len(self._parts),
        )  # fmt: skip
        self.place = ctypes.addressof(self._native)
        """Address of the map's C++ structure, valid while this object lives."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See the contract. ``MemoryError``: no memory for sums."""
        if x_TI.dtype != self.dtype:
            raise InvalidArgument(f"the map is of {self.dtype} activations; x is {x_TI.dtype}")
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        rows = x_TI.shape[0]
        y_TO = torch.empty(rows, self.weights.outputs, dtype=self.dtype, device="cpu")
        if rows and self._run(
            self.place, y_TO.data_ptr(), x_TI.data_ptr(), x_TI.stride(0), rows, torch.get_num_threads()
        ):
            raise MemoryError(
                f"a product of {rows} rows with {self.weights.inputs} inputs found no memory for its sums"
            )
        return y_TO

    def rows(self, outputs_T: Tensor) -> Tensor:
        """See ``contracts.linear.TableMap``. The form is one of ``reference.EXACT_FORMS``."""
        return reference.rows_of(self.weights, outputs_T)


class NativeHeads:
    """``contracts.linear.HeadMap`` over maps of one shape and form."""

    __slots__ = ("_maps", "_places", "_run", "nbytes")

    def __init__(self, run: ctypes._NamedFuncPointer, maps: Sequence[NativeMap]) -> None:
        self.nbytes = sum(one.weights.nbytes for one in maps)
        self._run, self._maps = run, maps
        self._places = np.array([one.place for one in maps], np.int64)

    def __call__(self, x_THI: Tensor, y_THO: Tensor) -> None:
        """See the contract. ``InvalidArgument``: tensors of other types or sizes. ``MemoryError``:
        no memory for sums."""
        first, heads, rows = self._maps[0], len(self._maps), x_THI.shape[0]
        sizes = first.weights.inputs, first.weights.outputs
        if (x_THI.shape, y_THO.shape) != ((rows, heads, sizes[0]), (rows, heads, sizes[1])) or y_THO.stride(2) != 1:
            raise InvalidArgument(
                f"{heads} heads map {sizes[0]} columns to {sizes[1]} adjacent ones; x is {tuple(x_THI.shape)}, y {tuple(y_THO.shape)}"
            )
        if {x_THI.dtype, y_THO.dtype} != {first.dtype}:
            raise InvalidArgument(f"the maps are of {first.dtype} activations; x is {x_THI.dtype}, y {y_THO.dtype}")
        if x_THI.stride(2) != 1:
            x_THI = x_THI.contiguous()
        if rows and self._run(
            self._places.ctypes.data, heads, y_THO.data_ptr(), *y_THO.stride()[:2], x_THI.data_ptr(), *x_THI.stride()[:2],
            rows, torch.get_num_threads(),
        ):  # fmt: skip
            raise MemoryError(f"products of {rows} rows with {heads} heads found no memory for their sums")


def _block_parts(weights: PackedMatrix) -> NDArray[np.int64]:
    """Return ``BlockPart`` structures: first panel, kind, first byte."""
    parts, panel, start = [], 0, 0
    for name, rows in weights.kinds:
        parts.append((panel, list(KINDS).index(name), start))
        panels = -(-rows // PANEL)
        panel, start = panel + panels, start + panels * KINDS[name].panel_bytes(weights.inputs)
    return np.array(parts, np.int64).reshape(-1, 3)


def native_maps(maps: Sequence[LinearMap]) -> tuple[NativeMap, ...] | None:
    """Return the maps if all are of this library and for activations of one dtype; else None."""
    found = tuple(one for one in maps if isinstance(one, NativeMap))
    return found if len(found) == len(maps) and len({one.dtype for one in found}) == 1 else None


@cache
def native_linear() -> NativeLinear | None:
    """Return the kernel; None if it was not built (``native_library.native_problem``)."""
    found = native_library()
    return None if found is None else NativeLinear(found)
