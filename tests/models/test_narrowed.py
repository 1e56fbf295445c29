"""Models of which only some rows go on from some block on: with the true rows of the others they
compute what they compute with all.

Letters: T tokens; V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.exact import Float32Bound, run_exactly
from torch import Tensor

from quire.contracts.layers import LatentAttention
from quire.contracts.model import Model
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kv.state import State
from quire.models.loading import load_model

from .conftest import CASES as DENSE
from .conftest import Case
from .test_deepseek import V2

NAMES = ("llama-gqa", "llama-rope-yarn", "mistral-window", "qwen3", "phi3-window-partial", "gemma2", "gemma3")
# transformers' other experts do not run in float64.
LATENT = Case("latent", "DeepseekV2", {**V2, "experts_implementation": "eager"})
CHOSEN = [*(case for case in DENSE if case.name in NAMES), LATENT]
LENGTH, PAST = 40, 7
ROWS = np.array([0, 2, 3, 4, 11, 19, 20, 31, 32])
"""Rows of the second forward that go on; the last one does."""


def new_state(model: Model) -> State:
    state = State(model.layer_specs, capacity=64, page_size=4, backend=SdpaAttention())
    state.add_sequence(0)
    return state


@torch.inference_mode()
def through(model: Model, state: State, tokens_T: Tensor) -> Tensor:
    """Run all blocks with all rows; return what goes into the head."""
    state.begin_forward([0], [len(tokens_T)])
    x_TE = model.embed(tokens_T)
    for block in model.blocks:
        x_TE = block(x_TE, state.open_pass())
    state.end_forward()
    return x_TE


@pytest.mark.turns(6)
@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_true_rows_change_nothing(make_tiny: Any, case: Case, first: int) -> None:
    """Rows are left out from block ``first`` on."""
    tiny = make_tiny(case)
    model = load_model(tiny.path, dtype="float32")
    tokens_T = torch.arange(LENGTH) * 31 % (model.vocab_size - 3) + 3
    exact_TV = run_exactly(tiny.model, tokens_T)
    bound = Float32Bound(tiny.model, tokens_T, exact_TV)
    whole, some = new_state(model), new_state(model)
    for state in (whole, some):
        through(model, state, tokens_T[:PAST])
    through(model, whole, tokens_T[PAST:])
    left_out = np.setdiff1d(np.arange(LENGTH - PAST), ROWS)
    some.begin_forward([0], [LENGTH - PAST])
    opened = some.open_pass()
    with torch.inference_mode():
        x_TE = model.embed(tokens_T[PAST:])
        for layer, (block, spec) in enumerate(zip(model.blocks, model.layer_specs, strict=True)):
            if layer == first:
                opened.narrow(ROWS)
                x_TE = x_TE[ROWS]
            if layer >= first:
                if isinstance(spec, LatentAttention):
                    rows, values = whole.debug_get_kv_mla(0, PAST, layer=layer), None
                else:
                    rows, values = whole.debug_get_kv(0, PAST, layer=layer)
                    values = values[left_out]
                opened.write_rows(layer, left_out, rows[left_out], values)
            x_TE = block(x_TE, opened)
        logits_TV = model.head(x_TE)
    some.end_forward()
    error = float((logits_TV.double() - exact_TV[PAST + torch.from_numpy(ROWS)]).abs().max())
    assert error <= bound, f"error {error:.2e}, expected at most {float(bound):.2e}"
    for layer, spec in enumerate(model.layer_specs):
        if not isinstance(spec, LatentAttention):
            for one, other in zip(
                some.debug_get_kv(0, PAST, layer=layer), whole.debug_get_kv(0, PAST, layer=layer), strict=True
            ):
                assert torch.equal(one[left_out], other[left_out])
