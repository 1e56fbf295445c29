"""A state that keeps K and V in 8 bits, against the oracle that keeps them in full.

New rows may be as far from the oracle's as the format rounds, and what attends to them as far as
follows from that. Once they are stored the oracle takes their bits, which every verb must keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.int8_rows import error_of, kept_in_int8, rounded, suites
from torch import Tensor

from . import (
    oracle,
    oracle_attention,
    pair,
    test_forward,
    test_isolation,
    test_layer_windows,
    test_masks,
    test_narrowing,
    test_rehearsal,
    test_snapshots,
    test_trees,
    test_windows,
)
from .oracle_values import Float

SUITES = (
    test_forward,
    test_isolation,
    test_layer_windows,
    test_masks,
    test_narrowing,
    test_rehearsal,
    test_snapshots,
    test_trees,
    test_windows,
)


@pytest.fixture(autouse=True)
def int8() -> Iterator[pytest.MonkeyPatch]:
    with kept_in_int8() as patch:
        bounds, written = oracle_attention.state_bounds, oracle.Oracle.debug_set_kv

        def wider(q: Float, k: Float, v: Float, lse: Float, scale: float, capped: bool, dtype: Any) -> Any:
            """A score is a sum of Dk products, each with a K that is off; weights are off by a
            factor e^(2d), as in ``attention_bound``."""
            out, found = bounds(q, k, v, lse, scale, capped, dtype)
            if not len(k):
                return out, found
            k_error, v_error = (error_of(torch.from_numpy(x)) for x in (k, v))
            d = abs(scale) * float(np.abs(q).sum(-1).max()) * k_error
            return out + v_error + float(np.abs(v).max()) * 2 * float(np.expm1(2 * d)), found + d

        def set_rounded(self: oracle.Oracle, seq: int, start: int, k: Tensor, v: Tensor, layer: int) -> None:
            written(self, seq, start, rounded(k), rounded(v), layer)

        patch.setattr(oracle_attention, "state_bounds", wider)
        patch.setattr(oracle.Oracle, "debug_set_kv", set_rounded)
        patch.setattr(pair.Pair, "adopt", adopt)
        yield patch


def adopt(self: pair.Pair, seq_id: int, start: int, stop: int) -> None:
    """Take the new rows of all layers, once they are found near enough."""
    for layer, spec in enumerate(self.specs):
        found = self.state.state.parts.layer(layer)
        slots = self.state.state.sequences.slots(found.class_index, seq_id, [range(start, stop)])
        k, v = self.state.state.parts.paged.classes[found.class_index].storage.read(found.index, slots)
        exact = self.oracle.sequences[seq_id].rows[layer][start:stop]
        turned = spec.rope is not None and spec.rope_mode == "normal"
        for k_HD, v_HD, (k_exact, v_exact) in zip(k, v, exact, strict=True):
            rounding = oracle.rotation_bound(k_exact, self.dtype) if turned else 0.0
            assert (k_HD.double() - k_exact.double()).abs().max() <= rounding + error_of(k_exact)
            assert (v_HD.double() - v_exact.double()).abs().max() <= error_of(v_exact)
        self.oracle.adopt(seq_id, layer, start, k, v)


OTHER = {
    # They have oracles of their own for rows that no pair adopts.
    "test_latent_rows",
    "test_rows_that_were_given_are_kept_to_the_bit",
}
LONG = {
    "test_every_chunking_gives_the_same_rows",
    "test_any_rows_of_any_batch",
    "test_any_rows_of_any_entries",
}
"""Tests of which a format changes nothing that shorter ones do not show."""

globals().update(suites(*SUITES, without=OTHER | LONG, turn=0))
