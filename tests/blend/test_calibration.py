"""What probes decide: the check layer, and whether blending is enabled at all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.blend.calibration import (
    BlendQuality,
    QualityLimits,
    check_quality,
    choose_check_layer,
    linear_cost,
)
from quire.blend.selection import BlendPolicy
from quire.errors import InvalidArgument


class StatedForward:
    """Probes that are their own answers."""

    def __init__(self, deviations: Sequence[Tensor] = (), answers: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        self._deviations, self._answers = deviations, answers

    def deviations(self, probe: int) -> Tensor:
        return self._deviations[probe]

    def answers(self, probe: int, policy: BlendPolicy | None) -> Tensor:
        return self._answers[probe][policy is not None]


def recall(scores: list[float], wrong: list[float], count: int) -> float:
    chosen, best = (set(sorted(range(len(wrong)), key=lambda row: -values[row])[:count]) for values in (scores, wrong))
    return len(chosen & best) / count


class TestCheckLayer:
    @given(st.integers(2, 6), st.integers(1, 30), st.floats(0, 1), st.integers(0, 1000))
    def test_equals_its_definition(self, layers: int, rows: int, ratio: float, seed: int) -> None:
        torch.manual_seed(seed)
        probes = [torch.rand(2, layers, rows) for _ in range(3)]
        found = choose_check_layer(StatedForward(probes), range(3), ratio)
        count = max(1, round(ratio * rows))
        for layer in range(layers):
            each = [recall(one[0, layer].tolist(), one[1].sum(0).tolist(), count) for one in probes]
            assert found.recalls[layer] == pytest.approx(sum(each) / 3)
        worth = [found.recalls[layer] * (1 - linear_cost(layers, layer, ratio)) for layer in range(layers)]
        assert found.layer > 0
        assert worth[found.layer] == max(worth[1:])

    def test_a_late_layer_that_knows_no_more_is_not_taken(self) -> None:
        layer = torch.rand(10)
        same = torch.stack((layer, layer, layer))
        assert choose_check_layer(StatedForward([torch.stack((same, same))]), [0], 0.2).layer == 1

    def test_a_layer_that_knows_more_is_taken(self) -> None:
        wrong = torch.arange(100.0)
        values = torch.stack([wrong.flip(0), wrong.flip(0), *[wrong] * 8])
        found = choose_check_layer(StatedForward([torch.stack((values, wrong.expand(10, -1)))]), [0], 0.1)
        assert (found.layer, found.recalls[:3]) == (2, (0.0, 0.0, 1.0))

    def test_cost_is_that_of_the_linear_layers(self) -> None:
        assert linear_cost(32, 1, 0.15) == pytest.approx((1 + 0.1 * 0.85 + 31 * 0.15) / 32)
        for layer in range(5):
            assert linear_cost(5, layer, 1.0) == pytest.approx(1.0)


class TestQuality:
    def test_it_is_measured_over_rows_of_questions(self) -> None:
        halves, sure = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.9, 0.1]).log()
        first = (torch.stack((sure, halves)), torch.stack((sure, sure)))
        second = (sure[None], sure.flip(0)[None] + 3.0)  # logits need not be normalised
        kl_first = 0.5 * (0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1))
        kl_second = 0.8 * math.log(9)
        found = check_quality(StatedForward(answers=[first, second]), [0, 1], BlendPolicy())
        assert found.mean_kl == pytest.approx((kl_first + kl_second) / 2, rel=1e-5)  # logits are float32
        assert found.worst_agreement == 0.0
        assert found.probes == 2
        alone = check_quality(StatedForward(answers=[first]), [0], BlendPolicy())
        assert alone.worst_agreement == 1.0

    @pytest.mark.parametrize(
        ("mean_kl", "worst", "enough"),
        [(0.1, 0.5, True), (0.11, 0.5, False), (0.1, 0.49, False), (math.nan, 1.0, False), (math.inf, 1.0, False)],
    )
    def test_limits(self, mean_kl: float, worst: float, enough: bool) -> None:
        limits = QualityLimits(mean_kl=0.1, worst_agreement=0.5)
        found = BlendQuality(mean_kl=mean_kl, worst_agreement=worst, probes=32, limits=limits)
        assert found.enough == enough
        assert "limit 0.1" in str(found)

    def test_refusals(self) -> None:
        with pytest.raises(InvalidArgument, match="mean_kl"):
            QualityLimits(mean_kl=math.nan)
        with pytest.raises(InvalidArgument, match="worst_agreement"):
            QualityLimits(worst_agreement=1.5)
        with pytest.raises(InvalidArgument, match="probes"):
            check_quality(StatedForward(), [], BlendPolicy())
        with pytest.raises(InvalidArgument, match="probes"):
            choose_check_layer(StatedForward(), [], 0.1)
        with pytest.raises(InvalidArgument, match="ratio"):
            choose_check_layer(StatedForward(), [0], 2.0)
