"""What probes tell of a model: which layer should check, and whether blended answers are good
enough.

A probe is a prompt of chunks and a question. ``ProbeForward`` runs it, in full and blended; what a
probe is, is its affair. Letters: L layers; C candidates; Q rows of the question; M tokens of a
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from quire.blend.selection import BlendPolicy, check_ratio
from quire.errors import InvalidArgument

PROJECTION = 0.1
"""Share of a layer's linear work that Q, K and V are, about: what a check layer spends on rows that
it leaves out."""
PROBES = 32
"""Probes that decide whether blending is enabled."""

P = TypeVar("P", contravariant=True)


class ProbeForward(Protocol[P]):
    """Forwards of probes."""

    def deviations(self, probe: P) -> Tensor:
        """Return how wrong the candidates' cached rows are, ``[2, L, C]``, C >= 1.

        [0] is the squared distance of cached V from V of a full prefill. [1] is that of K and of V,
        each over the mean squared row of its layer."""

    def answers(self, probe: P, policy: BlendPolicy | None) -> Tensor:
        """Return the logits of the question's rows ``[Q, M]``, Q >= 1; None: of a full prefill."""


@dataclass(frozen=True, kw_only=True)
class CheckLayer:
    """A check layer, and what was measured of each layer that could be one."""

    layer: int
    recalls: tuple[float, ...]
    """By layer: of the rows that are most wrong over all layers, as many as the ratio allows, the
    share that the deviation of V at this layer chooses."""
    costs: tuple[float, ...]
    """By layer: ``linear_cost``."""


@dataclass(frozen=True, kw_only=True)
class QualityLimits:
    """What probes must reach."""

    mean_kl: float = 0.1
    """Nats from a full prefill's answers to blended ones, at most, on average."""
    worst_agreement: float = 0.5
    """Share of a probe's question rows with the same most likely token, at least, in each probe."""

    def __post_init__(self) -> None:
        if not self.mean_kl >= 0:
            raise InvalidArgument(field="mean_kl", given=self.mean_kl, allowed="a number >= 0")
        check_ratio("worst_agreement", self.worst_agreement)


@dataclass(frozen=True, kw_only=True)
class BlendQuality:
    """How near the blended answers of probes were."""

    mean_kl: float
    """Over the probes, of the mean over a probe's question rows."""
    worst_agreement: float
    probes: int
    limits: QualityLimits

    @property
    def enough(self) -> bool:
        """Whether blending may be enabled. A KL that is not finite is not enough."""
        return self.mean_kl <= self.limits.mean_kl and self.worst_agreement >= self.limits.worst_agreement

    def __str__(self) -> str:
        return (
            f"{self.probes} probes: mean KL {self.mean_kl:.3g} nats (limit {self.limits.mean_kl:g}), worst agreement "
            f"{self.worst_agreement:.0%} (limit {self.limits.worst_agreement:.0%})"
        )


def linear_cost(layers: int, check_layer: int, share: float) -> float:
    """Return the linear work of a blended forward over that of a full one, when ``share`` of its
    rows goes on from the check layer."""
    return (check_layer + PROJECTION * (1 - share) + (layers - check_layer) * share) / layers


def choose_check_layer(forward: ProbeForward[P], probes: Sequence[P], ratio: float) -> CheckLayer:
    """Return the layer with the highest product of recall and of the work that is saved.

    A later layer knows better which rows are wrong, and leaves less to be saved. At layer 0 nothing
    is wrong yet: 1 is the first that can check. Ties go to the earlier layer."""
    check_ratio("ratio", ratio)
    _check_probes(probes)
    recalls = torch.stack([_recalls(forward.deviations(probe), ratio) for probe in probes]).mean(0).tolist()
    costs = [linear_cost(len(recalls), layer, ratio) for layer in range(len(recalls))]
    best = max(range(1, len(recalls)), key=lambda layer: recalls[layer] * (1 - costs[layer]), default=0)
    return CheckLayer(layer=best, recalls=tuple(recalls), costs=tuple(costs))


def _recalls(deviations_2LC: Tensor, ratio: float) -> Tensor:
    """Return the recall of each layer, float64 ``[L]``."""
    value_LC, wrong_C = deviations_2LC[0].double(), deviations_2LC[1].double().sum(0)
    count = max(1, round(ratio * wrong_C.numel()))
    oracle_C = torch.zeros_like(wrong_C).index_fill_(0, wrong_C.topk(count).indices, 1.0)
    return oracle_C[value_LC.topk(count).indices].mean(-1)


def check_quality(
    forward: ProbeForward[P], probes: Sequence[P], policy: BlendPolicy, limits: QualityLimits | None = None
) -> BlendQuality:
    """Blend probes, and compare their answers with those of full prefills."""
    _check_probes(probes)
    kls, agreements = [], []
    for probe in probes:
        true, ours = (forward.answers(probe, each).double().log_softmax(-1) for each in (None, policy))
        kls.append(torch.nn.functional.kl_div(ours, true, log_target=True, reduction="batchmean").item())
        agreements.append((true.argmax(-1) == ours.argmax(-1)).double().mean().item())
    return BlendQuality(
        mean_kl=sum(kls) / len(kls),
        worst_agreement=min(agreements),
        probes=len(probes),
        limits=limits or QualityLimits(),
    )


def _check_probes(probes: Sequence[object]) -> None:
    if not probes:
        raise InvalidArgument(field="probes", given=probes, allowed="at least one")
