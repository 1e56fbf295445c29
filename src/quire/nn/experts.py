"""The feed-forward layer that is a mixture of experts.

All tokens of a ragged batch are sorted by expert. So each expert runs once, as one matrix product
over its rows, and reads its weights once. Unchosen experts are not read: a decode of one token
reads K of X. ``quire.ops.experts`` defines the result. A kernel may run a router, all experts, or a
whole layer as one call (``contracts.experts``); the parts here define what it computes.

Letters: T tokens, X experts, K experts of a token, P = T * K pairs of a token and an expert, E
model width, F inner width of an expert, G = 2F, I input and O output features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire.base.errors import Unsupported
from quire.contracts.block_calls import LayerKernels
from quire.contracts.experts import MAX_PAIRS, ExpertsCall, GateForm, MixtureCall, RouterCall, Routing, SharedParts
from quire.contracts.linear import JoiningKernel, LinearStack, StackKernel
from quire.contracts.rows import ActivationName, RowKernels
from quire.nn.linear import Linear
from quire.nn.mlp import GatedMLP, SquaredMLP, squared_relu
from quire.nn.packed import KernelLinear, kernel_maps, pack_maps, packed
from quire.ops.experts import route
from quire.ops.rows import REFERENCE_ROWS

GROUPED_CAPABILITY = (8, 0)
"""The oldest CUDA devices with a grouped matrix product."""
GROUPED_ALIGNMENT = 16
"""Row alignment in bytes that the grouped product needs."""


@dataclass(slots=True, eq=False)
class ActivatedGate:
    """``act(gate) * up`` (arXiv:2002.05202) of rows that hold gate first, then up."""

    activation: ActivationName = "silu"
    row_kernels: RowKernels = REFERENCE_ROWS

    @property
    def form(self) -> GateForm:
        return GateForm(self.activation)

    def __call__(self, h_PG: Tensor) -> Tensor:
        """Map ``[P, 2F]`` to a fresh ``[P, F]``."""
        return self.row_kernels.gated(h_PG, self.activation)


@dataclass(slots=True, eq=False)
class ClampedGate:
    """``gate * sigmoid(alpha * gate) * (up + 1)`` of rows with alternating gate and up (gpt-oss).

    Gate is at most ``limit``, up in -``limit``..``limit``. Computed in float32, rounded once."""

    alpha: float
    limit: float
    row_kernels: RowKernels = REFERENCE_ROWS

    @property
    def form(self) -> GateForm:
        return GateForm("clamped", self.alpha, self.limit)

    def __call__(self, h_PG: Tensor) -> Tensor:
        """Map ``[P, 2F]`` to a fresh ``[P, F]``."""
        return self.row_kernels.clamped(h_PG, self.alpha, self.limit)


@dataclass(slots=True, eq=False)
class SquaredGate:
    """``max(h, 0) ** 2``, without a gate (Nemotron-H)."""

    form: ClassVar = GateForm("squared")

    def __call__(self, h_PF: Tensor) -> Tensor:
        """Map ``[P, F]`` to a fresh ``[P, F]``."""
        return squared_relu(h_PF)


Gate: TypeAlias = ActivatedGate | ClampedGate | SquaredGate
"""The function between an expert's two products."""


class Router:
    """Chooses K of X experts for each token (``quire.ops.experts.route``).

    ``weight [X, E]``, ``bias [X]`` or None, and ``correction [X]`` or None for the choice alone. In
    float32 the logits are computed in float64 and rounded. Otherwise a kernel's order of summation,
    and so the choice between tied experts, would depend on the number of tokens and the expert's
    place in the table: a chunked prompt could take other experts than a whole one. In bfloat16 and
    float16 the coarser rounding of the kernel's float32 sum has the same effect but for the rarest
    cases. A routing ``in_float32`` is treated as float32 for every model dtype.

    A kernel's ``call`` does the same with sums in one order for any number of tokens."""

    __slots__ = ("_given", "_in_float32", "_wide", "bias", "call", "correction", "routing", "weight")

    def __init__(
        self, weight: Tensor, bias: Tensor | None, routing: Routing, correction_X: Tensor | None = None
    ) -> None:
        self._in_float32 = routing.in_float32 or weight.dtype == torch.float32
        dtype = weight.dtype
        if self._in_float32:
            dtype = torch.float64 if weight.device.type in ("cpu", "cuda") else torch.float32
        self._given, self._wide = weight.dtype, dtype
        self.weight = weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        self.correction = None if correction_X is None else correction_X.float()
        self.routing = routing
        self.call: RouterCall | None = None

    def pack(self, kernels: LayerKernels) -> int:
        """Give the router a kernel's call, and keep its weight in the model's dtype. Return the
        growth of the weights in bytes: none of a weight so small is counted."""
        if kernels.experts is not None and self.call is None:
            weight_XE = self.weight.to(self._given)
            self.call = kernels.experts.router(weight_XE, self.bias, self.correction, self.routing)
            if self.call is not None:
                self.weight = weight_XE
        return 0

    def __call__(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Map ``[T, E]`` to float32 weights and int64 experts ``[T, K]``, best first."""
        if self.call is not None and self.call.takes(x_TE):
            return self.call(x_TE)
        logits_TX = F.linear(x_TE.to(self._wide), self.weight.to(self._wide), self.bias)
        logits_TX = logits_TX.to(torch.float32 if self._in_float32 else x_TE.dtype)
        return route(logits_TX, self.routing, self.correction)


class ExpertLinear:
    """X linear maps of one shape: ``weight [X, O, I]``, possibly transposed, ``bias [X, O]`` or
    None. ``maps[x]`` is a ``Linear`` over a slice of ``weight``. After ``pack``, ``weight`` is
    None, and each map has its own packed weight, or ``maps`` is empty; ``stack``: one call of them
    all."""

    __slots__ = ("bias", "count", "maps", "name", "stack", "weight")

    def __init__(self, weight_XOI: Tensor, bias_XO: Tensor | None = None, name: str = "") -> None:
        """``name``: the model's parameter without ``.weight``."""
        self.weight: Tensor | None = weight_XOI
        self.name = name
        self.bias = bias_XO
        self.count = len(weight_XOI)
        self.stack: LinearStack | None = None
        biases: Iterator[Tensor | None] = iter(bias_XO) if bias_XO is not None else iter([None] * len(weight_XOI))
        self.maps = [Linear(weight_OI, bias_O) for weight_OI, bias_O in zip(weight_XOI, biases, strict=True)]

    def can_group(self) -> bool:
        """Return True if the device has a kernel that runs all maps in one call."""
        if self.stack is not None:
            return True
        weight = self.weight
        if weight is None or weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
            return False
        aligned = all(size * weight.dtype.itemsize % GROUPED_ALIGNMENT == 0 for size in weight.shape[1:])
        return aligned and torch.cuda.get_device_capability(weight.device) >= GROUPED_CAPABILITY

    def grouped(self, x_PI: Tensor, ends_X: Tensor, expert_P: Tensor) -> Tensor:
        """Map ``[P, I]``, sorted by expert, to a fresh ``[P, O]`` in one call. int32 ``ends_X``:
        ends of the experts' rows. Only if ``can_group``."""
        if self.stack is not None:
            y_PO = self.stack(x_PI, ends_X)
        else:
            assert self.weight is not None
            y_PO = F.grouped_mm(x_PI, self.weight.transpose(1, 2), offs=ends_X)
        return y_PO if self.bias is None else y_PO.add_(self.bias.index_select(0, expert_P))

    def check(self, kernels: LayerKernels) -> None:
        """Raise ``Unsupported`` if a kernel for packed stacks cannot pack this stack."""
        form, kernel = kernels.quantization, kernels.linear
        if self.weight is None or form is None or not isinstance(kernel, StackKernel):
            return
        if reason := kernel.stack_refusal(self.weight, form):
            raise Unsupported(
                f"quantization {form!r}: not for this model's experts: {reason}; leave it out",
                field="quantization",
                given=form,
            )

    def pack(self, kernels: LayerKernels) -> int:
        """Pack the maps for the kernels, as one stack or one by one, and drop the plain weight.
        Return the growth of the weights in bytes. Call ``check`` first."""
        if self.weight is None:
            return 0
        if kernels.quantization is not None and isinstance(kernels.linear, StackKernel):
            weight_XOI = self.weight if kernels.read is None else kernels.read(self.weight)
            self.stack = kernels.linear.pack_stack(weight_XOI, kernels.quantization)
            grown = sum(one.nbytes for one in self.stack.weights) - self.weight.nbytes
            self.maps, self.weight = [], None
            return grown
        maps = [packed(one, kernels) for one in self.maps]
        grown = sum(one.weight_bytes for one in maps) - sum(one.weight_bytes for one in self.maps)
        if maps[0] is not self.maps[0]:
            self.maps, self.weight = maps, None
            if isinstance(kernels.linear, JoiningKernel):
                self.stack = kernels.linear.join([one.map for one in maps if isinstance(one, KernelLinear)])
        elif kernels.read is not None and self.weight.is_meta:
            self.__init__(kernels.read(self.weight), self.bias, self.name)  # type: ignore[misc]
        return grown


@dataclass(slots=True, eq=False)
class Experts:
    """X feed-forward layers; each token goes through K of them."""

    gate_up: ExpertLinear
    """E to what ``gate`` takes: 2F rows of gate and up, or F without a gate."""
    down: ExpertLinear
    gate: Gate
    call: ExpertsCall | None = field(init=False, default=None)
    """All experts as one call of a kernel; None: they run one by one, or as two grouped
    products."""
    _can_group: bool = field(init=False)

    def __post_init__(self) -> None:
        self._can_group = self.gate_up.can_group() and self.down.can_group()

    def pack(self, kernels: LayerKernels) -> int:
        """Pack both stacks. Return the growth of the weights in bytes. ``Unsupported``, with
        nothing changed, if the kernels cannot pack one of them."""
        for stack in (self.gate_up, self.down):
            stack.check(kernels)
        grown = pack_maps(self, kernels)
        self.__post_init__()
        if kernels.experts is not None:
            gate_up, down = kernel_maps(self.gate_up.maps), kernel_maps(self.down.maps)
            if gate_up is not None and down is not None:
                self.call = kernels.experts.experts(gate_up, down, self.gate.form)
        return grown

    def __call__(self, x_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Map ``[T, E]``, float32 ``[T, K]`` and int64 ``[T, K]`` to a fresh ``[T, E]``:
        ``ops.experts.mix``. Each token's terms are added in float32 in the order of its choices, so
        the rest of the batch changes only the rounding of the products, and those of a kernel's
        call not at all."""
        if self.call is not None and self.call.takes(x_TE):
            return self.call(x_TE, weights_TK, experts_TK)
        block = max(1, MAX_PAIRS // experts_TK.shape[1])
        if len(x_TE) <= block:
            return self._mix(x_TE, weights_TK, experts_TK)
        out_TE = torch.empty_like(x_TE)
        for start in range(0, len(x_TE), block):
            rows = slice(start, start + block)
            out_TE[rows] = self._mix(x_TE[rows], weights_TK[rows], experts_TK[rows])
        return out_TE

    def _mix(self, x_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        if len(x_TE) == 1 and not self._can_group:
            # One token needs no sorting.
            out_TE = torch.zeros_like(x_TE, dtype=torch.float32)
            for k, expert in enumerate(experts_TK[0].tolist()):
                out_TE.addcmul_(self._expert(expert, x_TE).float(), weights_TK[:, k : k + 1])
            return out_TE.to(x_TE.dtype)
        num_choices = experts_TK.shape[1]
        expert_P, pair_P = experts_TK.flatten().sort(stable=True)
        ends_X = torch.searchsorted(expert_P, torch.arange(self.gate_up.count, device=x_TE.device), right=True)
        x_PE = x_TE.index_select(0, pair_P // num_choices)
        if self._can_group:
            y_PE = self._in_one_call(x_PE, ends_X.int(), expert_P)
        else:
            y_PE = self._expert_by_expert(x_PE, ends_X)
        place_P = torch.empty_like(pair_P)
        place_P[pair_P] = torch.arange(len(pair_P), device=x_TE.device)
        place_TK = place_P.view(-1, num_choices)
        out_TE = torch.zeros_like(x_TE, dtype=torch.float32)
        for k in range(num_choices):
            out_TE.addcmul_(y_PE.index_select(0, place_TK[:, k]).float(), weights_TK[:, k : k + 1])
        return out_TE.to(x_TE.dtype)

    def _expert(self, expert: int, x_PE: Tensor) -> Tensor:
        return self.down.maps[expert](self.gate(self.gate_up.maps[expert](x_PE)))

    def _expert_by_expert(self, x_PE: Tensor, ends_X: Tensor) -> Tensor:
        y_PE, start = torch.empty_like(x_PE), 0
        for expert, end in enumerate(ends_X.tolist()):
            if end > start:
                y_PE[start:end] = self._expert(expert, x_PE[start:end])
            start = end
        return y_PE

    def _in_one_call(self, x_PE: Tensor, ends_X: Tensor, expert_P: Tensor) -> Tensor:
        h_PF = self.gate(self.gate_up.grouped(x_PE, ends_X, expert_P))
        return self.down.grouped(h_PF, ends_X, expert_P)


@dataclass(slots=True, eq=False)
class SharedExpert:
    """The expert that all tokens use: ``sigmoid(gate(x)) * mlp(x)`` (Qwen2-MoE) or ``mlp(x)``
    (DeepSeek)."""

    mlp: GatedMLP | SquaredMLP
    gate: Linear | None = None
    """E to 1"""
    row_kernels: RowKernels = REFERENCE_ROWS

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``."""
        y_TE, gate = self.mlp(x_TE), self.gate
        if gate is None:
            return y_TE
        if gate.is_plain and gate.bias is None:
            return self.row_kernels.weigh(y_TE, x_TE, gate.weight[0])
        return y_TE.mul_(torch.sigmoid(gate(x_TE)))

    def pack(self, kernels: LayerKernels) -> int:
        """Pack the MLP; return the growth of its weights in bytes. The small gate stays plain."""
        if kernels.rows is not None:
            self.row_kernels = kernels.rows
        return pack_maps(self.mlp, kernels)

    @property
    def is_plain(self) -> bool:
        """Return True if no adapter changes a map in this forward."""
        return all(one.is_plain for one in self.maps)

    @property
    def maps(self) -> tuple[Linear, ...]:
        """The maps of the MLP, and the gate's if there is one: those that an adapter may change."""
        first = self.mlp.gate_up if isinstance(self.mlp, GatedMLP) else self.mlp.up
        return (first, self.mlp.down) if self.gate is None else (first, self.mlp.down, self.gate)

    def parts(self) -> SharedParts | None:
        """Return the packed parts for a kernel's call; None if there are others."""
        maps = kernel_maps(self.maps[:2])
        if maps is None or (self.gate is not None and self.gate.bias is not None):
            return None
        form = GateForm(self.mlp.activation if isinstance(self.mlp, GatedMLP) else "squared")
        return SharedParts(maps[0], maps[1], form, None if self.gate is None else self.gate.weight[0])


@dataclass(slots=True, eq=False)
class MixtureOfExperts:
    """A router, its experts and, optionally, a shared expert."""

    router: Router
    experts: Experts
    shared: SharedExpert | None = None
    call: MixtureCall | None = field(init=False, default=None)
    """The layer as one call of a kernel; None: its parts run one by one."""

    def pack(self, kernels: LayerKernels) -> int:
        """Pack all parts. Return the growth of the weights in bytes. ``Unsupported``: see
        ``Experts.pack``."""
        grown = pack_maps(self, kernels)
        router, experts = self.router.call, self.experts.call
        shared = None if self.shared is None else self.shared.parts()
        if (
            kernels.experts is not None
            and router is not None
            and experts is not None
            and (self.shared is None or shared is not None)
        ):
            self.call = kernels.experts.mixture(router, experts, shared)
        return grown

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``."""
        if self.call is not None and self.call.takes(x_TE) and (self.shared is None or self.shared.is_plain):
            return self.call(x_TE)
        out_TE = self.experts(x_TE, *self.router(x_TE))
        return out_TE if self.shared is None else out_TE.add_(self.shared(x_TE))


@dataclass(slots=True, eq=False)
class LatentMixture(MixtureOfExperts):
    """Experts that work on a projection of the input; router and shared expert see the input."""

    into: Linear = field(kw_only=True)
    """E to the experts' width."""
    out_of: Linear = field(kw_only=True)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``."""
        out_TE = self.out_of(self.experts(self.into(x_TE), *self.router(x_TE)))
        return out_TE if self.shared is None else out_TE.add_(self.shared(x_TE))
