"""Positions that callers give: exact against transformers, kept with the row by every verb, never
mixed with others, refused by name where something else than a rotation depends on them.

Tolerances are those of ``conftest``. transformers takes jumps in ``position_ids`` for the borders
of packed sequences where it is given no mask and no cache, so the oracle is given a mask of ones.

Letters: S tokens; V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.executor.conftest import (
    CONTEXT,
    Tiny,
    assert_close,
    inputs,
    make_executor,
    make_tiny,
    prompt,
    refused,
    some_ids,
    token,
)
from tests.executor.recurrent import Hybrid
from tests.executor.test_adapters import executor_of
from tests.executor.test_serialize import rewritten
from torch import Tensor

from quire.base.errors import DataLoss, InvalidArgument, ResourceExhausted, Unsupported
from quire.base.types import Add, Chunk, Inputs, Remove, Step
from quire.executor.executor import Executor
from quire.executor.llm_executor import LlmExecutor
from quire.kv.rule_table import POSITIONS_OF_RECURRENT, POSITIONS_OF_WINDOWS
from quire.statefile.container import read_state

IDS = some_ids(17, seed=4)
JUMPS = [*range(5), *range(40, 46), *range(9, 15)]
"""Ahead and back again: positions of a row need not ascend."""
ANYWHERE = random.Random(3).sample(range(CONTEXT), 17)
REPEATED = [0, 0, 1, 1, 1, *range(2, 14)]
SHIFTED = [position + 30 for position in range(17)]


def at(*rows: Sequence[int]) -> dict[str, Tensor]:
    return {"position_ids": torch.tensor(rows)}


def oracle(tiny: Tiny, ids: Sequence[int], positions: Sequence[int]) -> Tensor:
    """float32 ``[S, V]`` of transformers."""
    with torch.no_grad():
        given = torch.tensor([list(ids)])
        return tiny.reference(given, attention_mask=torch.ones_like(given), **at(positions)).logits[0]


def logits(output: Any) -> Tensor:
    assert output.logits is not None
    return output.logits[0]


# -- exactness -------------------------------------------------------------------------------------


@pytest.mark.turns(2)
@pytest.mark.parametrize("positions", [JUMPS, ANYWHERE, REPEATED, SHIFTED], ids=["jumps", "any", "repeated", "shifted"])
def test_prefill_and_what_follows_are_those_of_transformers(
    tiny: Tiny, executor: Executor, positions: list[int]
) -> None:
    for size in (17, 4, 1):  # all at once, in chunks, token by token
        cut = 0
        cache: Any = None
        found = []
        while cut < 17:
            part = slice(cut, cut + size)
            output = executor.prefill(prompt(IDS[part], kv_cache=cache, **at(positions[part])))
            found.append(logits(output))
            cache, cut = output.kv_cache, cut + size
        assert_close(torch.cat(found), oracle(tiny, IDS, positions))
        assert cache.cache.positions(0).tolist() == positions
    run, places, handle = list(IDS), list(positions), cache
    for given in (77, None, 3):  # given, one behind it, given
        run.append(given or 50)
        places.append(places[-1] + 1 if given is None else given)
        more = {} if given is None else at([given])
        output = executor.decode(token(handle, run[-1], **more))
        assert_close(output.logits[0], oracle(tiny, run, places)[-1])
        handle = output.kv_cache
    assert handle.cache.positions(0).tolist() == places
    handle.cache.release()


def test_chunks_of_one_call_and_rows_of_a_batch(llama: Tiny, ex: Executor) -> None:
    """Padding carries any positions; the rows of a forward stand where each of them stands."""
    chunked = make_executor(llama, prefill_chunk_size=5)
    mask = torch.tensor([[1] * 17, [0] * 6 + [1] * 11])
    ids = torch.tensor([IDS, [0] * 6 + IDS[:11]])
    places = torch.tensor([JUMPS, [99] * 6 + ANYWHERE[:11]])
    for one in (ex, chunked):
        output = one.prefill(prompt(*ids.tolist(), attention_mask=mask, position_ids=places))
        assert output.logits is not None
        assert_close(output.logits[0], oracle(llama, IDS, JUMPS))
        assert_close(output.logits[1, 6:], oracle(llama, IDS[:11], ANYWHERE[:11]))
        several = one.batch_prefill([prompt(IDS, **at(JUMPS)), prompt(IDS[:9]), prompt(IDS[:3], **at([9, 9, 9]))])
        wanted = [(IDS, JUMPS), (IDS[:9], range(9)), (IDS[:3], [9, 9, 9])]
        for found, (run, stand) in zip(several, wanted, strict=True):
            assert_close(logits(found), oracle(llama, run, list(stand)))
        decoded = one.batch_decode([token(found.kv_cache, 8) for found in several])
        for got, (run, stand) in zip(decoded, wanted, strict=True):
            assert_close(got.logits[0], oracle(llama, [*run, 8], [*stand, list(stand)[-1] + 1])[-1])


def test_hidden_states_and_attention_weights(llama: Tiny, ex: Executor) -> None:
    output = ex.prefill(prompt(IDS, output_hidden_states=True, output_attentions=True, **at(JUMPS)))
    llama.reference.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            given = torch.tensor([IDS])
            found = llama.reference(
                given,
                attention_mask=torch.ones_like(given),
                output_attentions=True,
                output_hidden_states=True,
                **at(JUMPS),
            )
    finally:
        llama.reference.set_attn_implementation("sdpa")
    assert output.attention_weights is not None
    assert output.hidden_states is not None
    for mine, theirs in zip(output.attention_weights, found.attentions, strict=True):
        assert_close(mine, theirs)
    for mine, theirs in zip(output.hidden_states[:-1], found.hidden_states[1:-1], strict=True):
        assert_close(mine, theirs)


def test_verify_tree_and_speculation(llama: Tiny, ex: Executor) -> None:
    start = ex.prefill(prompt(IDS, **at(JUMPS))).kv_cache
    drafts = [5, 6, 7, 8]
    for given, stand in (
        ([None] * 4, [15, 16, 17, 18]),
        ([20, None, 60, None], [20, 21, 60, 61]),
    ):
        items = [
            token(start, one, **({} if place is None else at([place])))
            for one, place in zip(drafts, given, strict=True)
        ]
        outputs = ex.forward_verify(items)
        for index, output in enumerate(outputs):
            expected = oracle(llama, [*IDS, *drafts[: index + 1]], [*JUMPS, *stand[: index + 1]])
            assert_close(output.logits[0], expected[-1])
        assert start.cache.positions(0).tolist() == [*JUMPS, *stand]
        start = ex.truncate_kv(outputs[-1].kv_cache, 17)
    # A tree: two nodes behind the row, one behind each; one node of the second level says where it
    # stands.
    parents = [-1, -1, 0, 1]
    outputs = ex.forward_verify(
        [token(start, one, **(at([70]) if index == 3 else {})) for index, one in enumerate(drafts)], parents=parents
    )
    for node, (path, stand) in enumerate(
        [([5], [15]), ([6], [15]), ([5, 7], [15, 16]), ([6, 8], [15, 70])],
    ):
        assert_close(outputs[node].logits[0], oracle(llama, [*IDS, *path], [*JUMPS, *stand])[-1])
    kept = ex.commit_path(outputs[3].kv_cache)
    assert kept.cache.positions(0).tolist() == [*JUMPS, 15, 70]
    run, places = [*IDS, 6, 8, 9], [*JUMPS, 15, 70, 71]
    assert_close(ex.decode(token(kept, 9)).logits[0], oracle(llama, run, places)[-1])
    # Speculation: the target's favourites behind a given position are accepted, and stand behind
    # it.
    start = ex.truncate_kv(kept.cache, 17)
    run, places = [*IDS, 9], [*JUMPS, 50]
    for _ in range(3):
        run.append(int(oracle(llama, run, places)[-1].argmax()))
        places.append(places[-1] + 1)
    found = ex.speculative_decode(token(start, 9, **at([50])), run[18:], 1.0)
    assert list(found.accepted_tokens) == run[18:]
    assert_close(found.next_logits[0], oracle(llama, run, places)[-1])
    assert found.kv_cache.cache.positions(0).tolist() == places


def test_tree_positions_that_look_like_indices_are_not_taken_for_defaults(llama: Tiny, ex: Executor) -> None:
    start = ex.prefill(prompt(IDS[:5])).kv_cache
    outputs = ex.forward_verify([token(start, 1, **at([5])), token(start, 2, **at([6]))], parents=[-1, -1])
    for output, one, stand in zip(outputs, (1, 2), (5, 6), strict=True):
        assert_close(output.logits[0], oracle(llama, [*IDS[:5], one], [*range(5), stand])[-1])
    kept = ex.commit_path(outputs[1].kv_cache)
    assert kept.cache.positions(0).tolist() == [*range(5), 6]


# -- kept with the row -----------------------------------------------------------------------------


def test_every_copy_of_a_row_goes_on_where_it_stands(llama: Tiny, ex: Executor) -> None:
    llm = LlmExecutor(ex)
    handle = ex.prefill(prompt(IDS, IDS, **at(JUMPS, SHIFTED))).kv_cache
    cache = handle.cache
    one, two = ex.create_kv_cache(), ex.create_kv_cache(batch_size=2)
    one.select_and_copy_from(cache, 1)
    two.broadcast_and_copy_from(one)
    elsewhere = LlmExecutor(make_executor(llama))
    loaded = elsewhere.create_kv_cache(batch_size=2)
    loaded.load(cache.serialize())
    for face, made, rows in (
        (llm, one, [SHIFTED]),
        (llm, two, [SHIFTED, SHIFTED]),
        (llm, cache.deep_copy(), [JUMPS, SHIFTED]),
        (llm, handle.clone_handle().cache, [JUMPS, SHIFTED]),
        (elsewhere, loaded, [JUMPS, SHIFTED]),
        (llm, cache, [JUMPS, SHIFTED]),
    ):
        found = face.step(inputs(*[[8]] * len(rows)), made)
        for row, places in enumerate(rows):
            assert_close(found[row, 0], oracle(llama, [*IDS, 8], [*places, places[-1] + 1])[-1])
            assert made.positions(row).tolist() == [*places, places[-1] + 1]
    ids = llm.sample_tokens(3, inputs([8]), one)
    run, places = [*IDS, 8, 8], [*SHIFTED, 47, 48]
    for found_id in ids:
        assert found_id == int(oracle(llama, run, places)[-1].argmax())
        run, places = [*run, found_id], [*places, places[-1] + 1]
    assert one.positions(0).tolist() == places[:-1]


def test_going_back_takes_positions_back(llama: Tiny, ex: Executor) -> None:
    output = ex.prefill(prompt(IDS, **at(JUMPS)))
    cache, old = output.kv_cache.cache, output.kv_cache
    cut = ex.truncate_kv(old, 8)
    assert cache.positions(0).tolist() == JUMPS[:8]
    found = ex.decode(token(cut, 8))
    assert_close(found.logits[0], oracle(llama, [*IDS[:8], 8], [*JUMPS[:8], JUMPS[7] + 1])[-1])
    # An older handle: a rewind. Then to where the row's positions are its indices: nothing is kept
    # of the others.
    again = ex.decode(token(cut, 9, **at([3])))
    assert cache.positions(0).tolist() == [*JUMPS[:8], 3]
    assert_close(again.logits[0], oracle(llama, [*IDS[:8], 9], [*JUMPS[:8], 3])[-1])
    LlmExecutor(ex).prefill(inputs(IDS[5:7], at=5), cache)
    assert cache.rows[0].positions is None
    assert_close(ex.decode(token(cache, 8)).logits[0], llama.logits([*IDS[:7], 8])[-1])
    cache.clear()
    assert_close(logits(ex.prefill(prompt(IDS, kv_cache=cache))), llama.logits(IDS))


def test_a_call_that_fails_leaves_positions_as_they_were(llama: Tiny, ex: Executor, monkeypatch: Any) -> None:
    handle = ex.prefill(prompt(IDS, **at(JUMPS))).kv_cache
    short = ex.truncate_kv(handle, 12)
    monkeypatch.setattr(ex.pool.runner.model, "head", lambda x: 1 / 0)
    with pytest.raises(Exception, match="failed while computing"):
        ex.decode(token(short, 1, **at([90])))
    monkeypatch.undo()
    assert handle.cache.positions(0).tolist() == JUMPS[:12]
    found = ex.decode(token(short, 8))
    assert_close(found.logits[0], oracle(llama, [*IDS[:12], 8], [*JUMPS[:12], JUMPS[11] + 1])[-1])


def test_prefixes_are_shared_as_far_as_tokens_stand_alike(llama: Tiny) -> None:
    ex = make_executor(llama, share_prefixes=True)
    held = [ex.prefill(prompt(IDS, logits="last", **at(JUMPS))), ex.prefill(prompt(IDS, logits="last"))]
    before = ex.pool.state.num_used_pages
    for given, shares in (
        (JUMPS, 16),
        (None, 16),
        (SHIFTED, 0),
        ([*JUMPS[:8], *JUMPS[9:], 3], 8),
        ([0, 1, 2, 9, *range(13)], 3),
    ):
        more = {} if given is None else at(given)
        output = ex.prefill(prompt(IDS, logits="last", **more))
        assert_close(logits(output)[-1], oracle(llama, IDS, given or list(range(17)))[-1])
        assert output.kv_cache.cache.positions(0).tolist() == (given or list(range(17)))
        fresh = ex.pool.state.num_used_pages - before
        assert fresh == 5 - shares // 4, "pages of 4 tokens that are its own; a shared one is copied when it is written"
        output.kv_cache.cache.release()
    assert len(held) == 2


# -- state files -----------------------------------------------------------------------------------


def test_files_say_where_tokens_stand_and_old_readers_refuse_them(ex: Executor, monkeypatch: Any) -> None:
    cache = ex.prefill(prompt(IDS, IDS, **at(JUMPS, list(range(17))))).kv_cache.cache
    data = cache.serialize()
    with read_state(data) as file:
        found = dict(file.metadata)
    # What readers from before there were such rows check first.
    assert found["kind"] == "kv_cache_with_positions"
    assert found["positions"] == [JUMPS, None]
    assert found["next_positions"] == [15, 17]
    other = ex.create_kv_cache(batch_size=2)
    other.load(data)
    assert [other.positions(row).tolist() for row in (0, 1)] == [JUMPS, list(range(17))]
    assert other.serialize() == data
    ordinary = ex.truncate_kv(other, 5)
    with read_state(ordinary.cache.serialize()) as file:
        assert file.metadata["kind"] == "kv_cache"
        assert "positions" not in file.metadata
    for kind, changes, match in (
        (DataLoss, {"kind": "kv_cache"}, "metadata.positions is not known"),
        (DataLoss, {"positions": None}, "metadata.positions is None"),
        (DataLoss, {"positions": [JUMPS]}, "a list of 2 is expected"),
        (DataLoss, {"positions": [JUMPS[:-1], None]}, "a row of 17 tokens"),
        (DataLoss, {"positions": [[-1, *JUMPS[1:]], None]}, r"metadata.positions\[0\]\[0\] is"),
        (DataLoss, {"positions": [[True, *JUMPS[1:]], None]}, r"metadata.positions\[0\]\[0\] is"),
        (DataLoss, {"positions": [[2**63, *JUMPS[1:]], None]}, r"metadata.positions\[0\]\[0\] is"),
        (DataLoss, {"positions": [[0.0, *JUMPS[1:]], None]}, r"metadata.positions\[0\]\[0\] is"),
        (DataLoss, {"positions": ["x" * 17, None]}, r"metadata.positions\[0\] is"),
        (DataLoss, {"next_positions": [17, 17]}, "its rows say"),
        (ResourceExhausted, {"positions": [[CONTEXT, *JUMPS[1:]], None]}, f"position {CONTEXT}"),
        (InvalidArgument, {"kind": "soup"}, "'soup'"),
    ):
        with refused(kind, ex, other, match=match):
            other.load(rewritten(data, changes))
    monkeypatch.setattr(ex.pool, "facts", replace(ex.pool.facts, position_refusal=POSITIONS_OF_WINDOWS))
    with refused(Unsupported, ex, other, match="not their indices: a window"):
        other.load(data)


# -- refusals --------------------------------------------------------------------------------------


def test_limits(ex: Executor) -> None:
    handle = ex.prefill(prompt(IDS)).kv_cache
    with refused(ResourceExhausted, ex, handle.cache, match=f"position {CONTEXT} is beyond .* 0..{CONTEXT - 1}"):
        ex.decode(token(handle, 1, **at([CONTEXT])))
    last = ex.decode(token(handle, 1, **at([CONTEXT - 1]))).kv_cache
    with refused(ResourceExhausted, ex, handle.cache, match=f"position {CONTEXT} "):
        ex.decode(token(last, 1))
    with refused(ResourceExhausted, ex, handle.cache, match=f"position {CONTEXT + 1} "):
        LlmExecutor(ex).sample_tokens(2, inputs([1]), handle.cache)


def test_windows_and_recurrent_layers_refuse_by_name(llama: Tiny, hybrid: Hybrid, tmp_path: Path) -> None:
    windowed = make_tiny("Mistral", tmp_path / "windowed", sliding_window=8)
    for ex, reason in (
        (make_executor(llama, window=16), POSITIONS_OF_WINDOWS),
        (make_executor(llama, window=16, sink=2), POSITIONS_OF_WINDOWS),
        (make_executor(windowed), POSITIONS_OF_WINDOWS),
        (executor_of(hybrid.model), POSITIONS_OF_RECURRENT),
    ):
        assert dict(ex.capabilities().refusals)["position_ids"] == reason
        handle = ex.prefill(prompt(IDS[:9], **at(range(9)))).kv_cache
        for call in (
            lambda ex=ex: ex.prefill(prompt(IDS, **at(SHIFTED))),
            lambda ex=ex, handle=handle: ex.decode(token(handle, 1, **at([12]))),
            lambda ex=ex, handle=handle: ex.forward_verify([token(handle, 1, **at([8])), token(handle, 1)]),
            lambda ex=ex, handle=handle: ex.forward_verify(
                [token(handle, 1), token(handle, 1, **at([10]))], parents=[-1, -1]
            ),
            lambda ex=ex, handle=handle: ex.speculative_decode(token(handle, 1, **at([8])), [1], 0.5),
        ):
            with pytest.raises(Unsupported, match="must count from") as caught:
                call()
            assert reason in str(caught.value)
        assert handle.cache.lengths == (9,)
        ex.decode(token(handle, 1, **at([9])))
        if ex.pool.facts.row_window is None:
            with ex.lock, pytest.raises(Unsupported, match=f"positions: {reason}"):
                ex.pool.runner.execute(
                    Step(edits=(Add(901),), chunks=(Chunk(901, [1, 2]),), inputs=Inputs(positions=np.array([4, 5])))
                )
            assert 901 not in ex.pool.state.sequences
    assert "position_ids" not in dict(make_executor(llama).capabilities().refusals)


def test_a_row_with_a_window_of_its_own(llama: Tiny) -> None:
    """Loaded by an executor that gives its rows none."""
    data = make_executor(llama, window=16).prefill(prompt(IDS[:9])).kv_cache.cache.serialize()
    ex = make_executor(llama)
    cache = ex.create_kv_cache()
    cache.load(data)
    with refused(Unsupported, ex, cache, match="a window counts"):
        ex.decode(token(cache, 1, **at([12])))
    ex.decode(token(cache, 1, **at([9])))
    forged = rewritten(
        data, {"kind": "kv_cache_with_positions", "positions": [[*range(8), 30]], "next_positions": [31]}
    )
    with refused(Unsupported, ex, cache, match="a window counts"):
        cache.load(forged)


def test_the_runner_checks_their_number(ex: Executor) -> None:
    runner = ex.pool.runner
    for positions in (np.array([1]), np.array([1, -1])):
        with ex.lock, pytest.raises(InvalidArgument, match="2 of 0 or more are needed"):
            runner.execute(Step(edits=(Add(901),), chunks=(Chunk(901, [1, 2]),), inputs=Inputs(positions=positions)))
        runner.execute(Step(edits=(Remove(901),)))
