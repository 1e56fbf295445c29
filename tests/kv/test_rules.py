"""The rule table, cell by cell: verbs on kinds of layers and on states of every combination of
them.

What works gives what a computation from scratch gives (``rule_stories``); what is refused raises
``Unsupported`` with the table's reason, computes nothing and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from quire.contracts.kv_state import AttentionKVCache, RNNState
from quire.contracts.layers import FullAttention
from quire.kv.contract import ContractState
from quire.kv.rule_table import (
    COMBINATIONS,
    LAYER_DETAILS,
    LAYER_ROWS,
    STATE_ROWS,
    Combination,
    layer_cell,
    state_cell,
)
from quire.kv.rules import LAYER_KINDS, LAYER_VERBS

from .faces import contract
from .rule_checks import EXACT, refused
from .rule_stories import HQ, SIZES, SPECS, D, H, R, Story, encoded, refused_call

EVERYTHING = Combination(name="every kind", kinds=LAYER_KINDS, every_block_attends=False)
NAMED = {one.name: one for one in (*COMBINATIONS, EVERYTHING)}
BRACKET = set(LAYER_VERBS) - {"debug_get_kv", "debug_get_kv_mla", "debug_set_kv"} | {"linear_attention", "get", "set"}
"""Verbs that need an open forward."""


@cache
def tried(check: Callable[[Story, list[int]], None], name: str) -> None:
    """Run a check, which may serve several verbs, once for each combination."""
    story = Story(NAMED[name])
    check(story, story.begun())


def calls(state: ContractState, layer: int) -> dict[str, Callable[[], object]]:
    """A call of each verb about a layer that is in order but for the kind of the layer, with one
    new token.
    """
    q, kv, row = torch.zeros(1, HQ, D).double(), torch.zeros(1, H, D).double(), torch.zeros(1, R).double()
    return {
        "attention_with_fused_qkv": lambda: state.attention_with_fused_qkv(layer, torch.cat((q, kv, kv), 1)),
        "append_kv": lambda: state.append_kv(layer, kv, kv),
        "append_mla_kv": lambda: state.append_mla_kv(layer, row),
        "self_attention": lambda: state.self_attention(layer, q, kv, kv),
        "cross_attention": lambda: state.cross_attention(layer, q),
        "attention_with_shared_kv": lambda: state.attention_with_shared_kv(layer, q, kv, kv),
        "debug_get_kv": lambda: state.debug_get_kv(0, layer=layer),
        "debug_get_kv_mla": lambda: state.debug_get_kv_mla(0, layer=layer),
        "debug_set_kv": lambda: state.debug_set_kv(0, 0, kv, kv, layer=layer),
        "set_cross_kv": lambda: state.set_cross_kv(layer, 0, *encoded()),
        "linear_attention": lambda: state.linear_attention(layer, q.float(), kv.float(), kv.float()),
        "get": lambda: state.get(layer, 0),
        "set": lambda: state.set(layer, 0, torch.zeros(1, H, D, D)),
        "debug_get": lambda: state.debug_get(layer, 0, 0),
        "debug_set": lambda: state.debug_set(layer, 0, 0, torch.zeros(H, D, D)),
    }


def refuses_layer(story: Story, verb: str, layer: int, reason: str) -> None:
    """The verb is refused for this layer, with the reason."""
    if verb in BRACKET:
        story.begin(0, [7])
    refused(story, calls(story.state, layer)[verb], reason)
    if verb in BRACKET:
        story.state.abort_forward()


def layers_asked(story: Story, verb: str) -> set[int]:
    """The layers that a verb is called for from now on."""
    method, asked = getattr(story.state, verb), set()

    def noting(*args: Any, **more: Any) -> object:
        asked.add(more.get("layer", args[0]))
        return method(*args, **more)

    setattr(story.state, verb, noting)
    return asked


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", LAYER_KINDS)
@pytest.mark.parametrize("verb", LAYER_ROWS)
def test_layer_cells(verb: str, kind: str) -> None:
    """Beside layers of every other kind. That what works is exact is tried on states below."""
    cell, story = layer_cell(verb, kind), Story(EVERYTHING)
    if cell.works:
        asked = layers_asked(story, verb)
        EXACT[verb](story, story.begun())
        assert story.layer_of(kind) in asked, "the check is about this kind too"
        return
    tokens = story.begun()
    refuses_layer(story, verb, story.layer_of(kind), cell.reason)
    story.goes_on(0, tokens)


def test_layer_details() -> None:
    shared, linear = LAYER_DETAILS.values()
    story = Story(NAMED["full"])
    story.state = contract(
        [FullAttention(**SIZES, sinks=(0.0,) * HQ)], capacity=40, dtype=torch.float64, backend=story.attention
    )
    story.add(0)
    story.begin(0, [7])
    refused(story, calls(story.state, 0)["attention_with_shared_kv"], shared)
    story = Story(NAMED["recurrent"])
    other = SPECS["recurrent"].states[::-1]  # type: ignore[union-attr]
    spec = type(SPECS["recurrent"])(states=other)  # type: ignore[call-arg]
    story.state = contract(
        [spec], num_states=4, recurrence=story.recurrence, backend=story.attention, dtype=torch.float64
    )
    story.add(0)
    story.begin(0, [7])
    refused(story, calls(story.state, 0)["linear_attention"], linear)


@pytest.mark.product(8)
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("verb", STATE_ROWS)
def test_state_cells(verb: str, name: str) -> None:
    cell = state_cell(verb, NAMED[name])
    if cell.works:
        tried(EXACT[verb], name)
        return
    story = Story(NAMED[name])
    tokens = story.begun()
    if verb in LAYER_VERBS:
        for layer, kind in enumerate(story.kinds):
            refuses_layer(story, verb, layer, layer_cell(verb, kind).reason)
        if verb in ("debug_get_kv", "debug_get_kv_mla"):
            refused(story, lambda: getattr(story.state, verb)(0), verb)
    elif verb == "enable_sliding_window_for_seq":
        refused(story, lambda: story.state.enable_sliding_window_for_seq(0, 4), cell.reason)
    else:
        refused(story, refused_call(story.state, verb), f"{verb}: ", cell.reason)
    story.goes_on(0, tokens)


def test_every_verb_of_the_contracts_is_a_row() -> None:
    """So a new verb cannot be forgotten."""
    verbs = {
        name
        for contract in (AttentionKVCache, RNNState)
        for base in contract.__mro__
        for name in vars(base)
        if not name.startswith("_") and base.__module__.startswith("quire.")
    }
    assert set(STATE_ROWS) == verbs
    assert len(STATE_ROWS) == len(verbs)
    works = {verb for verb in STATE_ROWS for one in NAMED.values() if state_cell(verb, one).works}
    assert set(EXACT) == works, "what works somewhere is tried, and nothing else"
    assert set(LAYER_ROWS) <= verbs
    assert set(calls(None, 0)) == set(LAYER_ROWS)  # type: ignore[arg-type]


def test_a_refused_verb_is_refused_on_each_of_its_layers() -> None:
    """The table of states says what the table of layers says."""
    for verb in set(LAYER_ROWS):
        for one in NAMED.values():
            cells = [layer_cell(verb, kind) for kind in one.kinds]
            assert state_cell(verb, one).works == any(cell.works for cell in cells)
