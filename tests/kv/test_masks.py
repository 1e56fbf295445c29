"""Masks: they take the place of the causal and tree rule, and windows still apply."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from quire.base.errors import FailedPrecondition, InvalidArgument

from .machine import GEOMETRIES
from .pair import Pair, refused, split_columns
from .seer import Seer
from .test_states import TREE, own


def test_a_mask_takes_the_place_of_the_order() -> None:
    """An image of four tokens sees itself in both directions; the other entry is a chain
    as ever."""
    seer = Seer()
    seer.add(3, 2)
    image = torch.ones(4, 7, dtype=torch.bool)
    causal = torch.ones(2, 4, dtype=torch.bool).tril(2)
    views = seer.append([0, 1], [4, 2], mask=torch.cat((image.flatten(), causal.flatten())))
    assert views == [[*range(7)]] * 4 + [[0, 1, 2], [0, 1, 2, 3]]
    # Next time order rules again.
    assert seer.append([0], [2]) == [[*range(8)], [*range(9)]]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_windows_still_apply_under_a_mask(page_size: int) -> None:
    seer = Seer(page_size=page_size)
    seer.add(9, 9)
    seer.state.enable_sliding_window_for_seq(0, 6, 2)
    seer.state.enable_sliding_window_for_seq(1, 6, 2, eviction="forward")
    mask = torch.ones(2 * 3 * 12, dtype=torch.bool)
    views = seer.append([0, 1], [3, 3], mask=mask)
    later = [9, 10, 11]
    assert views == [
        [0, 1, *range(6, 12)],
        [0, 1, *range(7, 12)],
        [0, 1, *range(8, 12)],
        *[[0, 1, 5, 6, 7, 8, *later]] * 3,
    ]
    local = Seer(4, page_size=page_size)
    local.add(9)
    assert local.append([0], [3], mask=mask[:36]) == [[*range(6, 12)], [*range(7, 12)], [*range(8, 12)]]


def test_a_mask_over_a_tree() -> None:
    """Columns are positions, then nodes in order of appending; a node may be made to see its
    sibling.
    """
    seer = Seer()
    seer.add(2)
    seer.append([0], [3], [[-1, 0, 0]])
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0, [1, 4, 5]] = True
    assert seer.append([0], [2], [[1, 2]], mask=mask.flatten()) == [[1, 4, 5], []]
    assert seer.append([0], [1], [[4]]) == [[0, 1, 2, 4, 6, 7]]


@pytest.mark.turns(6)
@pytest.mark.parametrize("geometry", sorted(GEOMETRIES))
def test_random_masks(geometry: str) -> None:
    pair = Pair(GEOMETRIES[geometry], page_size=2, capacity=300)
    pair.add(0, 1, 2)
    pair.window(1, 6, 2)
    pair.window(2, 5, 1, "forward")
    pair.forward([0, 1, 2], [7, 9, 10])
    generator = torch.Generator().manual_seed(3)
    for ids, counts, parents in (
        ([2, 0, 1], [3, 1, 5], None),
        ([0, 1], [5, 5], [TREE, TREE]),
        ([1, 2], [2, 20], [[0, 4], None]),
    ):
        pair.begin(ids, counts, parents)
        for density in (0.2, 0.8):
            mask = torch.rand(pair.oracle.mask_size(), generator=generator) < density
            mine = torch.rand(pair.oracle.mask_size("new"), generator=generator) < density
            for layer in range(len(pair.specs)):
                own(pair, layer, *pair.parts(layer, sum(counts)), mask=mine)
                pair.layer(layer, pair.random(layer, sum(counts)), mask=mask)
        pair.end()


def test_masks_that_are_refused() -> None:
    pair = Pair()
    pair.add(0, 1)
    pair.forward([0, 1], [3, 2])
    pair.begin([0, 1], [2, 1])
    qkv, (q, k, v) = pair.random(0, 3), pair.parts(0, 3)
    fused, mine = pair.state.attention_with_fused_qkv, pair.state.self_attention
    good, small = torch.ones(2 * 5 + 3, dtype=torch.bool), torch.ones(5, dtype=torch.bool)
    for mask, words in (
        (good[:-1], ("12", "13")),
        (torch.cat((good, good[:1])), ("14", "13")),
        (good.float(), ("float32", "bool")),
        (good.view(1, -1), ("(1, 13)",)),
        (small, ("5", "13")),
        (good.to("meta"), ("meta", "cpu")),
    ):
        refused(pair, InvalidArgument, partial(fused, 0, qkv, mask=mask), "mask", *words)
    for mask, words in ((small[:-1], ("4", "5")), (good, ("13", "5")), (small.long(), ("int64", "bool"))):
        refused(pair, InvalidArgument, partial(mine, 0, q, k, v, mask=mask), "mask", *words)
    pair.layer(0, qkv, mask=good)
    own(pair, 0, q, k, v, mask=small)
    pair.abort()
    refused(pair, FailedPrecondition, lambda: fused(0, qkv, mask=good))
    refused(pair, InvalidArgument, lambda: fused(0, qkv, mask=good.float()), "mask")


def test_one_mask_for_all_layers_of_a_forward() -> None:
    """What a model's pass is given once holds for each layer, as ``mask=`` does."""
    specs = GEOMETRIES["alternating"]
    pair = Pair(specs, page_size=2)
    pair.add(0, 1)
    pair.window(1, 6, 2)
    pair.forward([0, 1], [5, 9])
    pair.begin([0, 1], [3, 4])
    mask = torch.rand(pair.oracle.mask_size(), generator=torch.Generator().manual_seed(4)) < 0.6
    opened = pair.state.open_pass()
    for wrong in (mask[:-1], mask.float(), mask.view(1, -1)):
        refused(pair, InvalidArgument, partial(opened.use_mask, wrong), "mask")
    opened.use_mask(mask)
    for layer, spec in enumerate(specs):
        qkv = pair.random(layer, 7)
        exact = pair.oracle.attention_with_fused_qkv(layer, *split_columns(spec, qkv), mask=mask)
        exact.check(opened.attend_qkv(layer, qkv))
        exact.check(opened.attend(layer, *split_columns(spec, qkv)))
    pair.end()
