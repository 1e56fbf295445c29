"""Hidden states and attention weights on request, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.executor.conftest import (
    LAYERS,
    WIDTH,
    Tiny,
    assert_close,
    make_executor,
    prompt,
    some_ids,
    token,
)
from torch import Tensor

from quire.executor.executor import Executor

HEADS = 4
BOTH: dict[str, Any] = {"output_hidden_states": True, "output_attentions": True}


@contextmanager
def eager(tiny: Tiny) -> Iterator[None]:
    """transformers gives weights in its eager mode only."""
    before = tiny.reference.config._attn_implementation
    tiny.reference.set_attn_implementation("eager")
    try:
        yield
    finally:
        tiny.reference.set_attn_implementation(before)


def expected_of(tiny: Tiny, ids: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Per layer what it returned ``[S, E]`` (the last one after the final norm) and weights ``[Hq,
    S, S]``.
    """
    with eager(tiny), torch.no_grad():
        out = tiny.reference(torch.tensor([ids]), **BOTH)
    return [x[0] for x in out.hidden_states[1:]], [w[0] for w in out.attentions]


def close(tiny: Tiny, found: tuple[Tensor, ...], expected: list[Tensor]) -> None:
    """``found``: what layers returned, of the same tokens."""
    assert len(found) == LAYERS
    with torch.no_grad():
        found = (*found[:-1], tiny.reference.model.norm(found[-1]))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_prefill(tiny: Tiny, chunk: int) -> None:
    executor = make_executor(tiny, prefill_chunk_size=chunk)
    a, b = some_ids(6, 1), some_ids(3, 2)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 0]])
    plain = executor.prefill(prompt(a, [0, 0, *b, 0], attention_mask=mask))
    assert (plain.hidden_states, plain.attention_weights) == (None, None)
    output = executor.prefill(prompt(a, [0, 0, *b, 0], attention_mask=mask, **BOTH))
    assert torch.equal(output.logits, plain.logits)
    assert [x.shape for x in output.hidden_states] == [(2, 6, WIDTH)] * LAYERS
    assert [w.shape for w in output.attention_weights] == [(2, HEADS, 6, 6)] * LAYERS
    for row, (ids, columns) in enumerate(((a, slice(0, 6)), (b, slice(2, 5)))):
        states, weights = expected_of(tiny, ids)
        close(tiny, tuple(x[row, columns] for x in output.hidden_states), states)
        for found, expected in zip(output.attention_weights, weights, strict=True):
            assert_close(found[row, :, columns, : len(ids)], expected)
    for found in output.attention_weights:
        assert torch.count_nonzero(found[1, :, [0, 1, 5]]) == torch.count_nonzero(found[1, ..., 3:]) == 0
    assert torch.count_nonzero(output.hidden_states[0][1, [0, 1, 5]]) == 0


def test_continuation_and_decode(tiny: Tiny, executor: Executor) -> None:
    ids = some_ids(12)
    states, weights = expected_of(tiny, ids)
    start = executor.prefill(prompt(ids[:5])).kv_cache
    output = executor.prefill(prompt(ids[5:11], kv_cache=start, logits="none", **BOTH))
    assert output.logits is None
    close(tiny, tuple(x[0] for x in output.hidden_states), [x[5:11] for x in states])
    for found, expected in zip(output.attention_weights, weights, strict=True):
        assert_close(found[0], expected[:, 5:11, :11])
    decoded = executor.decode(token(output.kv_cache, ids[11], **BOTH))
    assert decoded.hidden_state.shape == (1, WIDTH)
    with torch.no_grad():
        assert_close(tiny.reference.model.norm(decoded.hidden_state), states[-1][11:])
    for found, expected in zip(decoded.attention_weights, weights, strict=True):
        assert_close(found[0], expected[:, 11:])
    only = executor.decode(token(output.kv_cache, ids[11], output_attentions=True))
    assert only.hidden_state is None
    assert only.attention_weights is not None


def test_a_batch_gives_each_item_what_it_asked_for(tiny: Tiny, executor: Executor) -> None:
    rows = [some_ids(n, n) for n in (4, 7, 2)]
    flags = ({}, {"output_hidden_states": True}, {"output_attentions": True})
    outputs = executor.batch_prefill([prompt(row, **flag) for row, flag in zip(rows, flags, strict=True)])
    for output, row, flag in zip(outputs, rows, flags, strict=True):
        states, weights = expected_of(tiny, row)
        assert (output.hidden_states is not None) == ("output_hidden_states" in flag)
        assert (output.attention_weights is not None) == ("output_attentions" in flag)
        if output.hidden_states:
            close(tiny, tuple(x[0] for x in output.hidden_states), states)
        if output.attention_weights:
            assert_close(output.attention_weights[0][0], weights[0])
    decoded = executor.batch_decode(
        [token(output.kv_cache, 5, **flag) for output, flag in zip(outputs, flags, strict=True)]
    )
    assert [item.hidden_state is None for item in decoded] == [True, False, True]
    assert [item.attention_weights is None for item in decoded] == [True, True, False]
    assert decoded[2].attention_weights[0].shape == (1, HEADS, 1, 3)
    ragged = executor.prefill(prompt(rows[0][:2], [3, 0], attention_mask=torch.tensor([[1, 1], [1, 0]])))
    both = executor.decode(token(ragged.kv_cache, 1, 2, **BOTH))
    assert both.hidden_state.shape == (2, WIDTH)
    assert [w.shape for w in both.attention_weights] == [(2, HEADS, 1, 3)] * LAYERS
    assert_close(both.attention_weights[0][1, :, 0, :2], expected_of(tiny, [3, 2])[1][0][:, 1])
    assert torch.count_nonzero(both.attention_weights[0][1, ..., 2]) == 0


def test_verify_equals_chained_decodes(tiny: Tiny, executor: Executor) -> None:
    start = executor.prefill(prompt(some_ids(5))).kv_cache
    ids = some_ids(4, 1)
    verified = executor.forward_verify([token(start, i, **BOTH) for i in ids])
    handle = start
    for found, i in zip(verified, ids, strict=True):
        one = executor.decode(token(handle, i, **BOTH))
        handle = one.kv_cache
        assert_close(found.hidden_state, one.hidden_state)
        for a, b in zip(found.attention_weights, one.attention_weights, strict=True):
            assert_close(a, b)


def test_results_are_ordinary_tensors_of_the_caller(ex: Executor) -> None:
    output = ex.prefill(prompt([1, 2, 3], **BOTH))
    kept = [x.clone() for x in (*output.hidden_states, *output.attention_weights)]
    ex.prefill(prompt([4, 5, 6], **BOTH))
    for tensor, copy in zip((*output.hidden_states, *output.attention_weights), kept, strict=True):
        assert torch.equal(tensor, copy)
        tensor.zero_()
