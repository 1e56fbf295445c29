"""Calibration of blending by probes: the best check layer of a model, and the error of its answers.

A probe is a prompt of chunks and a question; its answers are logits of the question's rows.
Letters: L layers; Q rows of the question; M tokens of a vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec

from quire.base.blend_inputs import check_ratio
from quire.base.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

PROJECTION = 0.1
"""Approximate share of Q, K and V in a layer's linear work: the cost of the check layer for rows
that it leaves out."""
PROBES = 32
"""Default number of probes of a calibration."""
RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
"""Ratios that are measured at the chosen layer."""
LAYER_RATIO = 0.15
"""The ratio at which layers are compared."""
LAYERS_TRIED = 4
TEXT_TOKENS = 24
"""Tokens of a greedy text that are compared, at most."""
MOST_KL = 1e6
"""Nats. It stands for all larger values and for non-numbers, which JSON does not have."""


class Deviation(NamedTuple):
    """The error of the answers to one probe."""

    kl: float
    """KL divergence in nats from the true answers to ours, on average over Q."""
    agreement: float
    """Share of Q with the same most likely token."""
    is_equal: bool
    """Whether the greedy text is the same."""


def deviation(true_QM: Tensor, ours_QM: Tensor, text: int = 1) -> Deviation:
    """Compare two sets of logits: those of the question, and behind its last row ``text - 1`` rows
    of the true greedy text, which has ``text`` tokens. KL and agreement are those of the question.
    """
    same = true_QM.argmax(-1) == ours_QM.argmax(-1)
    rows = len(true_QM) - text + 1
    true, ours = (logits[:rows].double().log_softmax(-1) for logits in (true_QM, ours_QM))
    # A token with logit -inf in both adds 0 * (-inf + inf) = NaN, which nansum skips.
    kl = math.nan if (true.isnan() | ours.isnan()).any() else float((true.exp() * (true - ours)).nansum(-1).mean())
    # Ours is the true text if each of its tokens is the most likely one behind those before it.
    return Deviation(
        max(0.0, kl) if kl < MOST_KL else MOST_KL, float(same[:rows].double().mean()), bool(same[rows - 1 :].all())
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityLimits:
    """The quality that probes must reach for prompts to be blended."""

    mean_kl: float = 0.05
    """Largest mean KL divergence in nats from a full computation's answers to blended ones."""
    worst_agreement: float = 0.5
    """Least share of a question's rows with the same most likely token, in each probe."""
    equal_texts: float = 0.9
    """Least share of probes with the greedy text of a full computation."""

    def __post_init__(self) -> None:
        if not self.mean_kl >= 0:
            raise InvalidArgument(field="mean_kl", given=self.mean_kl, allowed="a number >= 0")
        check_ratio("worst_agreement", self.worst_agreement)
        check_ratio("equal_texts", self.equal_texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendQuality:
    """The error of the answers to all probes, with one check layer and ratio."""

    layer: int
    ratio: float
    mean_kl: float
    """Nats, on average over probes."""
    agreement: float
    """Share of questions' rows with the same most likely token, on average over probes."""
    worst_agreement: float
    """The least of these shares over the probes."""
    equal_texts: float
    """Share of probes whose greedy text, of at most ``TEXT_TOKENS`` tokens, is that of a full
    computation."""
    cost: float
    """Linear work of the model, relative to a full computation."""

    @classmethod
    def of(cls, found: Sequence[Deviation], layers: int, layer: int, ratio: float) -> Self:
        """Return the quality from the probes' errors, for a model of ``layers`` layers."""
        shares = [one.agreement for one in found]
        return cls(
            layer=layer,
            ratio=ratio,
            mean_kl=fmean(one.kl for one in found),
            agreement=fmean(shares),
            worst_agreement=min(shares),
            equal_texts=fmean(one.is_equal for one in found),
            cost=linear_cost(layers, layer, ratio),
        )

    def passes(self, limits: QualityLimits) -> bool:
        """Return True if the quality is within ``limits``."""
        return (
            self.mean_kl <= limits.mean_kl
            and self.worst_agreement >= limits.worst_agreement
            and self.equal_texts >= limits.equal_texts
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendCalibration:
    """The measurements of ``LLM.calibrate_blending`` for a model without adapters."""

    layer: int
    """The check layer, after whose projection rows are selected, from 0 on."""
    probes: int
    sampled: bool
    """Whether the model wrote the probes itself. If it uses no earlier chunk in them, as a model
    trained to answer may, they show no loss."""
    limits: QualityLimits
    """The quality that is required for prompts to be blended."""
    qualities: tuple[BlendQuality, ...]
    """All measurements: several layers at one ratio, and several ratios at ``layer``."""

    @property
    def ratios(self) -> tuple[BlendQuality, ...]:
        """The measurements at ``layer``, by ascending ratio."""
        return tuple(sorted((one for one in self.qualities if one.layer == self.layer), key=lambda one: one.ratio))

    def at(self, ratio: float) -> BlendQuality:
        """Return the quality of the largest measured ratio that is at most ``ratio``."""
        return [one for one in self.ratios if one.ratio <= ratio][-1]

    def ratio_for(self, target: float) -> float | None:
        """Return the smallest ratio with a mean KL of at most ``target`` nats; None: none has."""
        return next((one.ratio for one in self.ratios if one.mean_kl <= target), None)

    def refusal(self, ratio: float) -> str:
        """Return the reason why prompts are not blended at a ratio; empty: they are."""
        found = self.at(ratio)
        return "" if found.passes(self.limits) else f"the model's calibration refuses it: {self.describe(found)}"

    def describe(self, found: BlendQuality) -> str:
        """Describe a quality beside its limits."""
        return (
            f"{self.probes} probes at a ratio of {found.ratio:g}, mean KL {found.mean_kl:.3g} nats (limit "
            f"{self.limits.mean_kl:g}), worst agreement {found.worst_agreement:.0%} (limit {self.limits.worst_agreement:.0%}), "
            f"equal texts {found.equal_texts:.0%} (limit {self.limits.equal_texts:.0%})"
        )

    def document(self) -> dict[str, Any]:
        """Return it in JSON types."""
        return asdict(self)

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Self:
        """Return the calibration of a ``document``, perhaps from another process."""
        return msgspec.convert(document, cls)


def linear_cost(layers: int, check_layer: int, share: float) -> float:
    """Return the linear work of a blended forward over that of a full one, if ``share`` of its rows
    continues from the check layer."""
    return (check_layer + PROJECTION * (1 - share) + (layers - check_layer) * share) / layers


def default_layer(layers: int) -> int:
    """Return the default check layer of a model of L layers."""
    return min(2, max(0, layers - 2))


def layers_to_try(layers: int) -> range:
    """Return the check layers worth trying in a model of L layers. At layer 0 nothing is wrong yet,
    and the last layer saves nothing."""
    return range(1, min(LAYERS_TRIED, layers - 2) + 1) or range(default_layer(layers), default_layer(layers) + 1)


def choose_layer(found: Sequence[BlendQuality], reused: float) -> int:
    """Return the layer with the highest product of removed KL and saved work, each as a share.

    ``reused``: the mean KL of reuse alone, in nats. A later layer identifies wrong rows better, and
    saves less. Ties go to the earlier layer.
    """

    def worth(one: BlendQuality) -> float:
        removed = 1 - one.mean_kl / reused if reused > 0 else 1.0
        return max(0.0, removed) * (1 - one.cost)

    return max(sorted(found, key=lambda one: one.layer), key=worth).layer
