"""What measurements of blending decide: check layer, ratios, and whether prompts are blended."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import InvalidArgument
from quire.blend.calibration import (
    MOST_KL,
    RATIOS,
    BlendCalibration,
    BlendQuality,
    Deviation,
    QualityLimits,
    choose_layer,
    default_layer,
    deviation,
    layers_to_try,
    linear_cost,
)


def quality(
    layer: int = 2, ratio: float = 0.15, kl: float = 0.01, worst: float = 1.0, equal: float = 1.0, cost: float = 0.5
) -> BlendQuality:
    return BlendQuality(
        layer=layer, ratio=ratio, mean_kl=kl, agreement=1.0, worst_agreement=worst, equal_texts=equal, cost=cost
    )


def calibration(*qualities: BlendQuality, limits: QualityLimits | None = None) -> BlendCalibration:
    return BlendCalibration(
        layer=2, probes=32, sampled=False, limits=limits or QualityLimits(), qualities=tuple(qualities)
    )


TABLE = calibration(
    quality(layer=1, ratio=0.3, kl=0.0),
    *(quality(ratio=ratio, kl=kl) for ratio, kl in ((0.5, 0.001), (0.0, 2.0), (0.15, 0.04), (0.05, 0.3))),
)


class TestDeviation:
    def test_is_that_of_our_answers_from_the_true_ones(self) -> None:
        halves, sure = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.9, 0.1]).log()
        found = deviation(torch.stack((sure, sure)), torch.stack((halves, sure + 3.0)))  # logits need no norm
        true_kl = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
        assert found.kl == pytest.approx(true_kl / 2, rel=1e-5)  # logits are float32
        assert deviation(torch.stack((sure, sure)), torch.stack((sure, sure.flip(0)))).agreement == 0.5
        assert deviation(sure[None], sure[None]) == Deviation(0.0, 1.0, True)

    def test_what_no_model_says_does_not_count_and_what_is_no_number_is_the_worst(self) -> None:
        never = torch.tensor([[1.0, 0.0, -torch.inf]])
        assert deviation(never, never) == Deviation(0.0, 1.0, True)
        assert deviation(never, torch.tensor([[-torch.inf, 0.0, -torch.inf]])).kl == MOST_KL
        assert deviation(never, torch.full((1, 3), torch.nan)).kl == MOST_KL
        assert deviation(torch.full((1, 3), torch.nan), never).kl == MOST_KL

    def test_a_text_is_equal_if_each_of_its_tokens_is_the_most_likely_one(self) -> None:
        """From the question's last row on; rows of the text count in nothing else."""
        one, other = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0])
        true = torch.stack((one, one, other, one))
        for wrong, is_equal, agreement in ((0, True, 0.5), (1, False, 0.5), (2, False, 1.0), (3, False, 1.0)):
            ours = true.clone()
            ours[wrong] = ours[wrong].flip(0)
            found = deviation(true, ours, text=3)
            assert (found.is_equal, found.agreement) == (is_equal, agreement)
            assert (found.kl > 0) == (wrong < 2)

    def test_of_many_probes(self) -> None:
        found = BlendQuality.of([Deviation(0.25, 1.0, True), Deviation(0.75, 0.5, False)], 10, 2, 0.1)
        assert (found.mean_kl, found.agreement, found.worst_agreement, found.equal_texts) == (0.5, 0.75, 0.5, 0.5)
        assert (found.layer, found.ratio, found.cost) == (2, 0.1, linear_cost(10, 2, 0.1))


class TestCheckLayer:
    @given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1)), min_size=1, max_size=5), st.floats(0.1, 10))
    def test_equals_its_definition(self, layers: list[tuple[float, float]], reused: float) -> None:
        tried = [quality(layer=number, kl=kl, cost=cost) for number, (kl, cost) in enumerate(layers, 1)]
        worth = [max(0.0, 1 - kl / reused) * (1 - cost) for kl, cost in layers]
        assert choose_layer(tried, reused) == 1 + worth.index(max(worth))

    def test_a_late_layer_that_mends_no_more_is_not_taken(self) -> None:
        assert choose_layer([quality(layer=layer, cost=linear_cost(5, layer, 0.15)) for layer in (3, 2, 1)], 1.0) == 1

    def test_where_nothing_is_lost_the_first_is_taken(self) -> None:
        assert choose_layer([quality(layer=layer, kl=0.0, cost=0.1 * layer) for layer in (1, 2)], 0.0) == 1

    def test_a_layer_that_mends_more_is_taken(self) -> None:
        found = [quality(layer=layer, kl=kl, cost=linear_cost(5, layer, 0.15)) for layer, kl in ((1, 3.9), (2, 0.01))]
        assert choose_layer(found, 4.8) == 2

    def test_cost_is_that_of_the_linear_layers(self) -> None:
        assert linear_cost(32, 1, 0.15) == pytest.approx((1 + 0.1 * 0.85 + 31 * 0.15) / 32)
        for layer in range(5):
            assert linear_cost(5, layer, 1.0) == pytest.approx(1.0)

    def test_which_are_tried(self) -> None:
        assert [list(layers_to_try(layers)) for layers in (1, 2, 3, 5, 30)] == [[0], [0], [1], [1, 2, 3], [1, 2, 3, 4]]
        assert [default_layer(layers) for layers in (1, 2, 3, 4, 30)] == [0, 0, 1, 2, 2]


class TestCalibration:
    @pytest.mark.parametrize(
        ("target", "ratio"), [(5.0, 0.0), (2.0, 0.0), (0.3, 0.05), (0.2, 0.15), (0.01, 0.5), (0.0009, None)]
    )
    def test_the_least_ratio_that_is_near_enough(self, target: float, ratio: float | None) -> None:
        assert TABLE.ratio_for(target) == ratio

    @pytest.mark.parametrize(("ratio", "measured"), [(0.0, 0.0), (0.04, 0.0), (0.05, 0.05), (0.4, 0.15), (1.0, 0.5)])
    def test_a_ratio_is_as_good_as_the_one_below_it(self, ratio: float, measured: float) -> None:
        assert TABLE.at(ratio).ratio == measured

    def test_the_gate_tells_the_numbers(self) -> None:
        assert TABLE.refusal(0.15) == ""
        assert TABLE.refusal(0.5) == ""
        assert "32 probes at a ratio of 0.05, mean KL 0.3 nats (limit 0.05)" in TABLE.refusal(0.1)

    @pytest.mark.parametrize(
        ("mean_kl", "worst", "equal", "enough"),
        [
            (0.05, 0.5, 18 / 20, True),
            (0.06, 0.5, 1.0, False),
            (0.05, 0.49, 1.0, False),
            (0.05, 0.5, 17 / 20, False),
            (math.nan, 1.0, 1.0, False),
            (math.inf, 1.0, 1.0, False),
        ],
    )
    def test_limits(self, mean_kl: float, worst: float, equal: float, enough: bool) -> None:
        assert quality(kl=mean_kl, worst=worst, equal=equal).passes(QualityLimits()) == enough

    def test_it_is_read_as_it_was_written(self) -> None:
        limited = calibration(quality(), limits=QualityLimits(mean_kl=0.2, worst_agreement=0.1))
        for one in (TABLE, limited):
            assert BlendCalibration.read(json.loads(json.dumps(one.document()))) == one

    def test_the_ratios_that_are_measured(self) -> None:
        assert RATIOS[0] == 0.0, "each request's ratio has a measured one below it"
        assert [*RATIOS] == sorted(RATIOS)

    def test_refusals(self) -> None:
        with pytest.raises(InvalidArgument, match="mean_kl"):
            QualityLimits(mean_kl=math.nan)
        with pytest.raises(InvalidArgument, match="worst_agreement"):
            QualityLimits(worst_agreement=1.5)
        with pytest.raises(InvalidArgument, match="equal_texts"):
            QualityLimits(equal_texts=-0.1)
