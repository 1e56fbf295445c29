"""Mixtures of experts in C++, for CPUs: one call, and one parallel region, of a layer.

A layer's experts are many short products. Each call costs microseconds of Python and the beginning
and end of a parallel region; one call saves these. Products and the work on rows are the code of
``linear.cpu_linear`` and ``rows.cpu_rows``, so every number is the same to the bit.

Letters: as in ``contracts.experts``; W experts of a panel, P pairs of a token and an expert.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire.contracts.experts import (
    MAX_PAIRS,
    ExpertsCall,
    GateForm,
    GateKind,
    RouterCall,
    Routing,
    SharedParts,
)
from quire.contracts.linear import LinearMap
from quire.kernels.linear.cpu_linear import DTYPES, NativeLinear, NativeMap, native_linear, native_maps
from quire.kernels.native_library import NativeLibrary, native_library
from quire.ops import experts as reference

MOST_EXPERTS = 4096
"""Of a router."""
ROUTED = 16
"""Experts of a panel of a router's weights."""
GATE_NUMBERS: Mapping[GateKind, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped": 3, "squared": 4}


class _Routing(ctypes.Structure):
    _fields_: ClassVar = [
        *(
            (name, ctypes.c_int64)
            for name in ("experts", "choices", "is_of_chosen", "is_sigmoid", "is_renormalised", "groups", "top_groups", "is_by_two")
        ),
        *((name, ctypes.c_double) for name in ("summand", "scale", "reach")),
        ("correction", ctypes.c_void_p),
    ]  # fmt: skip


class _RouterMap(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("map", "weights", "bias")),
        ("width", ctypes.c_int64),
        ("routing", _Routing),
    ]


class NativeGate(ctypes.Structure):
    """``GateForm`` of ``cpu/rows.h``."""

    _fields_: ClassVar = [("kind", ctypes.c_int64), ("alpha", ctypes.c_double), ("limit", ctypes.c_double)]


class _ExpertMaps(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("gate_up", "down")),
        ("count", ctypes.c_int64),
        ("gate", NativeGate),
    ]


class _SharedMaps(ctypes.Structure):
    _fields_: ClassVar = [*((name, ctypes.c_void_p) for name in ("gate_up", "down", "weight")), ("gate", NativeGate)]


class _Mixture(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("router", "experts", "shared", "parallel")),
        *((name, ctypes.c_int64) for name in ("choices", "is_bfloat16")),
    ]


class NativeExperts:
    """``contracts.experts.ExpertKernel`` by the C++ library."""

    def __init__(self, library: NativeLibrary, linear: NativeLinear) -> None:
        """``linear`` packs the weights of routers."""
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._linear, self._parallel = linear, library.parallel
        self._route = library.function(
            "quire_route", *(pointer, pointer, number, pointer, pointer, pointer, number, number, number), result=ctypes.c_int
        )  # fmt: skip
        self._choose = library.function("quire_choose", *[pointer] * 4)
        self._mix = library.function(
            "quire_mixture", *(pointer, pointer, pointer, number, pointer, pointer, number, number), result=ctypes.c_int
        )

    @cached_property
    def decides_ties(self) -> bool:
        """Whether it takes the same of experts with equal scores as PyTorch does."""
        generator = torch.Generator().manual_seed(0)
        for experts, top_k in ((6, 3), (8, 2), (32, 4), (60, 4), (128, 8), (256, 8), (512, 4)):
            logits_TX = torch.randint(0, 3, (8, experts), generator=generator).float()
            routing = Routing(top_k=top_k)
            native, chosen = _routing(routing, experts, None), np.empty((8, top_k), np.int64)
            expected, weights = reference.route(logits_TX, routing)[1], np.empty(top_k, np.float32)
            for row in range(8):
                self._choose(
                    ctypes.addressof(native), logits_TX[row].data_ptr(), weights.ctypes.data, chosen[row].ctypes.data
                )
            if not np.array_equal(chosen, expected.numpy()):
                return False
        return True

    def router(
        self, weight_XE: Tensor, bias_X: Tensor | None, correction_X: Tensor | None, routing: Routing
    ) -> NativeRouter | None:
        """See the contract."""
        experts, dtype = len(weight_XE), weight_XE.dtype
        per_group = experts // routing.groups
        if (
            not (self.decides_ties and weight_XE.is_cpu and dtype in DTYPES)
            or not routing.top_k <= experts <= MOST_EXPERTS
            or experts % routing.groups
            or (routing.group_score == "best_two" and routing.top_groups < routing.groups and per_group < 2)
        ):
            return None
        is_wide = routing.in_float32 or dtype == torch.float32
        form = None if is_wide else self._linear.lossless(weight_XE)
        if form is None and not is_wide:
            return None
        packed = None if form is None else self._linear.pack(weight_XE, bias_X, form)
        return NativeRouter(self._route, packed, self._parallel, weight_XE, bias_X, correction_X, routing)

    def experts(
        self, gate_up: Sequence[LinearMap], down: Sequence[LinearMap], gate: GateForm
    ) -> NativeExpertsCall | None:
        """See the contract."""
        found = native_maps([*gate_up, *down])
        if found is None or len(gate_up) != len(down) or not gate_up:
            return None
        first, last = found[: len(gate_up)], found[len(gate_up) :]
        if not _fit(first, last, gate):
            return None
        return NativeExpertsCall(self._mix, self._parallel, first, last, gate)

    def mixture(self, router: RouterCall, experts: ExpertsCall, shared: SharedParts | None) -> NativeMixture | None:
        """See the contract."""
        if not (isinstance(router, NativeRouter) and isinstance(experts, NativeExpertsCall)):
            return None
        if (router.dtype, router.width) != (experts.dtype, experts.width) or router.experts != experts.count:
            return None
        if shared is None:
            return NativeMixture(router, experts, None, ())
        maps = native_maps([shared.gate_up, shared.down])
        if maps is None or maps[0].dtype != experts.dtype or not _fit(maps[:1], maps[1:], shared.gate):
            return None
        weight_E = shared.weight_E
        if maps[1].weights.outputs != experts.width:
            return None
        if weight_E is not None and (
            (weight_E.dtype, len(weight_E)) != (experts.dtype, experts.width) or not weight_E.is_contiguous()
        ):
            return None
        place = None if weight_E is None else weight_E.data_ptr()
        native = _SharedMaps(maps[0].place, maps[1].place, place, native_gate(shared.gate))
        return NativeMixture(router, experts, native, (maps, weight_E))


class NativeRouter:
    """``contracts.experts.RouterCall`` by the C++ library."""

    def __init__(
        self,
        run: ctypes._NamedFuncPointer,
        packed: NativeMap | None,
        parallel: int | None,
        weight_XE: Tensor,
        bias_X: Tensor | None,
        correction_X: Tensor | None,
        routing: Routing,
    ) -> None:
        """``packed``: the map to logits in the dtype; None: they are sums in float64."""
        self._run, self._parallel, self._routing = run, parallel, routing
        self.dtype, (self.experts, self.width) = weight_XE.dtype, weight_XE.shape
        self._correction = None if correction_X is None else correction_X.float().contiguous()
        self._weights, self._bias, self._map = None, None, packed
        if packed is None:
            panels = -(-self.experts // ROUTED)
            rows_XE = F.pad(weight_XE.float(), (0, 0, 0, panels * ROUTED - self.experts))
            self._weights = rows_XE.view(panels, ROUTED, self.width).transpose(1, 2).contiguous()
            self._bias = None if bias_X is None else bias_X.float().contiguous()
        self.native = _RouterMap(
            None if packed is None else packed.place, _place(self._weights), _place(self._bias), self.width,
            _routing(routing, self.experts, self._correction),
        )  # fmt: skip
        self.place = ctypes.addressof(self.native)

    @property
    def choices(self) -> int:
        """K."""
        return self._routing.top_k

    def takes(self, x_TE: Tensor) -> bool:
        """See the contract."""
        return x_TE.is_cpu and x_TE.dtype == self.dtype

    def __call__(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """See the contract. ``MemoryError``: no memory for logits."""
        if x_TE.stride(1) != 1:
            x_TE = x_TE.contiguous()
        rows = x_TE.shape[0]
        weights_TK = torch.empty(rows, self.choices, device="cpu")
        experts_TK = torch.empty(rows, self.choices, dtype=torch.int64, device="cpu")
        if rows and self._run(
            self.place, self._parallel, int(self.dtype == torch.bfloat16), weights_TK.data_ptr(), experts_TK.data_ptr(),
            x_TE.data_ptr(), x_TE.stride(0), rows, torch.get_num_threads(),
        ):  # fmt: skip
            raise MemoryError(f"a router of {rows} rows found no memory for its logits")
        return weights_TK, experts_TK


class NativeExpertsCall:
    """``contracts.experts.ExpertsCall`` by the C++ library."""

    def __init__(
        self,
        run: ctypes._NamedFuncPointer,
        parallel: int | None,
        gate_up: Sequence[NativeMap],
        down: Sequence[NativeMap],
        gate: GateForm,
    ) -> None:
        self.run, self.parallel = run, parallel
        self.dtype, self.width, self.count = down[0].dtype, down[0].weights.outputs, len(down)
        self._places = np.array([[one.place for one in maps] for maps in (gate_up, down)], np.int64)
        self._kept = (gate_up, down)
        self.native = _ExpertMaps(
            self._places[0].ctypes.data, self._places[1].ctypes.data, self.count, native_gate(gate)
        )
        self.place = ctypes.addressof(self.native)

    def takes(self, x_TE: Tensor) -> bool:
        """See the contract."""
        return x_TE.is_cpu and x_TE.dtype == self.dtype

    def __call__(self, x_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """See the contract. ``MemoryError``: no memory for activations."""
        choices = experts_TK.shape[1]
        native = _Mixture(None, self.place, None, self.parallel, choices, int(self.dtype == torch.bfloat16))
        return _mixed(self.run, native, x_TE, choices, weights_TK.contiguous(), experts_TK.contiguous())


class NativeMixture:
    """``contracts.experts.MixtureCall`` by the C++ library."""

    def __init__(
        self, router: NativeRouter, experts: NativeExpertsCall, shared: _SharedMaps | None, kept: object
    ) -> None:
        """``kept`` owns the memory whose addresses are in ``shared``."""
        self._router, self._experts, self._shared, self._kept = router, experts, shared, kept
        self.dtype, self.width = experts.dtype, experts.width
        self._native = _Mixture(
            router.place, experts.place, None if shared is None else ctypes.addressof(shared), experts.parallel,
            router.choices, int(experts.dtype == torch.bfloat16),
        )  # fmt: skip
        self.place = ctypes.addressof(self._native)

    def takes(self, x_TE: Tensor) -> bool:
        """See the contract."""
        return self._experts.takes(x_TE)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """See the contract. ``MemoryError``: no memory for activations."""
        return _mixed(self._experts.run, self._native, x_TE, self._router.choices, None, None)


def _mixed(
    run: ctypes._NamedFuncPointer,
    native: _Mixture,
    x_TE: Tensor,
    choices: int,
    weights_TK: Tensor | None,
    experts_TK: Tensor | None,
) -> Tensor:
    if x_TE.stride(1) != 1:
        x_TE = x_TE.contiguous()
    y_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device="cpu")
    block, place, threads = max(1, MAX_PAIRS // choices), ctypes.addressof(native), torch.get_num_threads()
    for start in range(0, len(x_TE), block):
        rows = min(block, len(x_TE) - start)
        if run(
            place, y_TE[start:].data_ptr(), x_TE[start:].data_ptr(), x_TE.stride(0),
            None if weights_TK is None else weights_TK[start:].data_ptr(),
            None if experts_TK is None else experts_TK[start:].data_ptr(), rows, threads,
        ):  # fmt: skip
            raise MemoryError(f"experts of {rows} rows found no memory for their activations")
    return y_TE


def _routing(routing: Routing, experts: int, correction_X: Tensor | None) -> _Routing:
    return _Routing(
        experts, routing.top_k, routing.softmax == "chosen", routing.scores == "sigmoid", routing.renormalise,
        routing.groups, routing.top_groups, routing.group_score == "best_two", routing.summand, routing.scale,
        -1.0 if routing.reach is None else routing.reach, _place(correction_X),
    )  # fmt: skip


def native_gate(form: GateForm) -> NativeGate:
    """Return the form for C++."""
    return NativeGate(GATE_NUMBERS[form.kind], form.alpha, form.limit)


def _place(found: Tensor | None) -> int | None:
    return None if found is None else found.data_ptr()


def _fit(gate_up: Sequence[NativeMap], down: Sequence[NativeMap], gate: GateForm) -> bool:
    """Return True if all maps have one shape, and the second ones take the results of the first."""
    shapes = {(one.weights.inputs, one.weights.outputs) for one in gate_up}
    others = {(one.weights.outputs, one.weights.inputs) for one in down}
    if len(shapes) != 1 or len(others) != 1:
        return False
    (width, columns), (out, inner) = *shapes, *others
    return width == out and columns == gate.factor * inner


@cache
def native_experts() -> NativeExperts | None:
    """Return the kernel; None if it was not built (``native_library.native_problem``)."""
    library, linear = native_library(), native_linear()
    return None if library is None or linear is None else NativeExperts(library, linear)
