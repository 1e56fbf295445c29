"""Feed-forward layers that are mixtures of experts, as calls of a kernel.

``nn.experts`` over ``ops.experts`` is the reference. A row's result depends on that row only, to
the bit.

Letters: T tokens, X experts, K experts of a token, E model width, F inner width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.contracts.linear import LinearMap
from quire.contracts.rows import ActivationName

MAX_PAIRS = 1 << 15
"""Number of pairs of a token and an expert that run at a time. This bounds the copies of
activations, and each expert still has enough rows for a read of its weights."""

GateKind: TypeAlias = ActivationName | Literal["clamped", "squared"]


class GateForm(NamedTuple):
    """The function between an expert's two products: an activation of gate times up, both clamped,
    or the squared positive part of one product."""

    kind: GateKind
    alpha: float = 0.0
    """Of "clamped", as ``limit``: see ``contracts.rows.RowKernels.clamped``."""
    limit: float = 0.0

    @property
    def factor(self) -> int:
        """Columns of the first product for each of F."""
        return 1 if self.kind == "squared" else 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """The rule that turns logits into K experts and their weights. ``InvalidArgument`` for groups
    that do not fit, or with ``softmax="chosen"``, which has no scores before the choice; and for
    another ``top_k`` than two with a ``reach``."""

    top_k: int
    softmax: Literal["all", "chosen"] = "all"
    """Over all experts' logits before the choice, or the chosen ones' after it (gpt-oss)."""
    renormalise: bool = False
    """Whether the chosen experts' weights are divided by their sum (1 with ``chosen``)."""
    summand: float = 1e-20
    """Added to that sum. The usual one only counts where all scores have vanished; they stay 0."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Score of a logit before the choice: its softmax share, or its sigmoid (DeepSeek-V3)."""
    groups: int = 1
    """Number of groups of neighbouring experts, of equal size (DeepSeek-V2, arXiv:2405.04434)."""
    top_groups: int = 1
    """Number of best groups from which a token chooses its experts."""
    group_score: Literal["best", "best_two"] = "best"
    """Score of a group: its best expert (DeepSeek-V2), or the sum of its best two (DeepSeek-V3)."""
    scale: float = 1.0
    """Factor of all weights, applied last."""
    reach: float | None = None
    """Two experts, one after the other (SparseMixer, arXiv:2409.12136). The weight of each is its
    softmax share among the experts whose logits are less than this part below it, of its own or of
    their own size, whichever is more. None: another rule."""
    in_float32: bool = False
    """Whether logits are in float32 or wider for every model dtype; else in the model's."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_groups <= self.groups:
            raise InvalidArgument(
                f"top_groups is {self.top_groups} of {self.groups} groups; expected 1 to {self.groups}"
            )
        if self.reach is not None and self.top_k != 2:
            raise InvalidArgument(f"top_k is {self.top_k} with a reach; expected 2")
        if self.softmax == "chosen" and (self.groups > 1 or self.scores != "softmax"):
            raise InvalidArgument("softmax over the chosen logits with groups or sigmoids; expected neither")


class SharedParts(NamedTuple):
    """The expert that all tokens use."""

    gate_up: LinearMap
    down: LinearMap
    gate: GateForm
    weight_E: Tensor | None
    """Its result is multiplied by the logistic function of each token's product with this; None: it
    is not."""


class RouterCall(Protocol):
    """A router as one call."""

    def takes(self, x_TE: Tensor) -> bool:
        """Return True if the call supports such rows."""

    def __call__(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Map ``[T, E]`` to float32 weights and int64 experts ``[T, K]``, best first: ``route`` of
        logits whose sums are made in one order."""


class ExpertsCall(Protocol):
    """All experts of a layer as one call."""

    def takes(self, x_TE: Tensor) -> bool:
        """Return True if the call supports such rows."""

    def __call__(self, x_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Map ``[T, E]``, float32 ``[T, K]`` and int64 ``[T, K]`` to a fresh ``[T, E]``."""


class MixtureCall(Protocol):
    """A whole layer as one call: router, experts, and the shared expert if there is one."""

    def takes(self, x_TE: Tensor) -> bool:
        """Return True if the call supports such rows."""

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Map ``[T, E]`` to a fresh ``[T, E]``. Each number is the same to the bit as from the
        parts one by one."""


class ExpertKernel(Protocol):
    """Makes the calls. Methods return None for unsupported parts, which run one by one."""

    def router(
        self, weight_XE: Tensor, bias_X: Tensor | None, correction_X: Tensor | None, routing: Routing
    ) -> RouterCall | None:
        """Return the call of a router for activations of the weight's dtype. In float32, and for a
        routing ``in_float32``, sums are in float64 and rounded to float32. Otherwise they are in
        float32, and rounded to the dtype."""

    def experts(self, gate_up: Sequence[LinearMap], down: Sequence[LinearMap], gate: GateForm) -> ExpertsCall | None:
        """Return the call of X experts, whose maps have one shape."""

    def mixture(self, router: RouterCall, experts: ExpertsCall, shared: SharedParts | None) -> MixtureCall | None:
        """Return the call of a layer of these."""
