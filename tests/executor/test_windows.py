"""Layers and sequences that let go of tokens, under all verbs of the executors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.executor.conftest import (
    CONTEXT,
    LAYERS,
    PAGE,
    VOCAB,
    Tiny,
    assert_close,
    check_pages,
    inputs,
    make_executor,
    make_tiny,
    prompt,
    refused,
    some_ids,
    token,
)
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument, QuireError, ResourceExhausted
from quire.contracts.executor import AttentionMechanism
from quire.executor.executor import Executor
from quire.executor.llm_executor import LlmExecutor

WINDOW = 6
KINDS = {
    "all": ("Mistral", {"sliding_window": WINDOW}),
    "some": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "shared": (
        "Gemma3n",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_kv_shared_layers": 1,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 4,
            "laurel_rank": 4,
        },
    ),
}
"""In all layers, in some, and in one of two whose K and V a third layer reads."""


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tiny]:
    path: Path = tmp_path_factory.mktemp("windowed")
    return {name: make_tiny(family, path / name, **fields) for name, (family, fields) in KINDS.items()}


@pytest.fixture(params=KINDS)
def tiny(request: pytest.FixtureRequest, windowed: dict[str, Tiny]) -> Tiny:
    return windowed[request.param]


def last(tiny: Tiny, ids: list[int]) -> Tensor:
    return tiny.logits(ids)[-1]


@pytest.mark.turns(6)
@pytest.mark.parametrize("chunk", [0, 1, 3, 7])
def test_every_chunking_equals_transformers(tiny: Tiny, chunk: int) -> None:
    ids = some_ids(33)
    ex = make_executor(tiny, prefill_chunk_size=chunk)
    output = ex.prefill(prompt(ids[:25]))
    assert_close(output.logits[0], tiny.logits(ids[:25]))
    handle = output.kv_cache
    for position in range(25, 29):
        found = ex.decode(token(handle, ids[position]))
        handle = found.kv_cache
        assert_close(found.logits[0], last(tiny, ids[: position + 1]))
    verified = ex.forward_verify([token(handle, i) for i in ids[29:]])
    for position, found in enumerate(verified, start=29):
        assert_close(found.logits[0], last(tiny, ids[: position + 1]))
    assert AttentionMechanism.SLIDING_WINDOW in ex.capabilities().attention_mechanisms
    check_pages(ex)


def test_rewinds_reach_what_is_held_and_are_refused_elsewhere(tiny: Tiny) -> None:
    ex = make_executor(tiny)
    ids = some_ids(30)
    handle = ex.prefill(prompt(ids[:10])).kv_cache
    early = handle
    for i in ids[10:]:
        handle = ex.decode(token(handle, i)).kv_cache
    cache = handle.cache
    other = ex.prefill(prompt([1, 2])).kv_cache
    ex.decode(token(other, 3))
    assert early.is_valid
    for call in (
        lambda: ex.truncate_kv(handle, 12),
        lambda: ex.decode(token(early, 1)),
        lambda: ex.prefill(prompt([1, 2], kv_cache=early)),
        lambda: ex.batch_decode([token(other, 1), token(early, 1)]),
        lambda: ex.forward_verify([token(early, 1)]),
        lambda: ex.forward_verify([token(early, 1)], parents=[-1]),
        lambda: ex.speculative_decode(token(early, 1), [2], 0.0),
        lambda: early.clone_handle(),
        lambda: LlmExecutor(ex).step(inputs([1], at=10), cache),
    ):
        with refused(FailedPrecondition, ex, cache, other.cache, match="reachable"):
            call()
    short = ex.truncate_kv(handle, 29)
    assert_close(ex.decode(token(short, 4)).logits[0], last(tiny, [*ids[:29], 4]))
    assert ex.truncate_kv(handle.cache, 0).sequence_length == 0
    assert_close(ex.prefill(prompt(ids, kv_cache=cache)).last_token_logits()[0], last(tiny, ids))


def test_rows_of_a_batch_are_cut_together_or_not_at_all(tiny: Tiny) -> None:
    ex = make_executor(tiny)
    mask = torch.tensor([[1] + [0] * 11, [1] * 12])
    both = ex.prefill(prompt(some_ids(12), some_ids(12, 1), attention_mask=mask)).kv_cache
    for _ in range(5):
        both = ex.decode(token(both, 1, 2)).kv_cache
    with refused(FailedPrecondition, ex, both.cache):
        ex.truncate_kv(both, 3)  # The first row could.
    assert both.cache.lengths == (6, 17)
    assert both.is_valid


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_random_verbs(windowed: dict[str, Tiny], data: st.DataObject) -> None:
    """Branches of one conversation: each equals a fresh run, and a refusal changes nothing."""
    tiny = windowed[data.draw(st.sampled_from(sorted(KINDS)))]
    ex = make_executor(tiny, prefill_chunk_size=data.draw(st.sampled_from([0, 3])))
    branches = [(ex.prefill(prompt([1, 2, 3])).kv_cache, [1, 2, 3])]
    refusals = 0
    for _ in range(data.draw(st.integers(1, 10))):
        index = data.draw(st.integers(0, len(branches) - 1))
        handle, ids = branches[index]
        new = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))
        length = data.draw(st.integers(0, len(ids)))
        verb = data.draw(st.sampled_from(["prefill", "decode", "truncate", "fork", "tree", "speculate"]))
        before = handle.cache.lengths
        try:
            if verb == "prefill":
                handle, ids = ex.prefill(prompt(new, kv_cache=handle, logits="last")).kv_cache, ids + new
            elif verb == "decode":
                handle, ids = ex.decode(token(handle, new[0])).kv_cache, ids + new[:1]
            elif verb == "truncate":
                handle, ids = ex.truncate_kv(handle, length), ids[:length]
            elif verb == "tree":
                outputs = ex.forward_verify([token(handle, i) for i in new], parents=[-1, *[0] * (len(new) - 1)])
                handle = ex.commit_path(outputs[-1].kv_cache)
                ids = ids + (new[:1] if len(new) == 1 else [new[0], new[-1]])
            elif verb == "speculate":
                output = ex.speculative_decode(token(handle, new[0]), new[1:], 1.0)
                handle, ids = output.kv_cache, [*ids, new[0], *output.accepted_tokens]
            else:
                branches.append((handle.clone_handle(), ids))
        except FailedPrecondition:
            refusals += 1
            assert verb == "truncate"
            assert handle.cache.lengths == before
        branches[index] = (handle, ids)
        ex.pool.state.check()
    for handle, ids in branches:
        assert handle.cache.token_ids(0).tolist() == ids
        assert_close(ex.decode(token(handle, 9)).logits[0], last(tiny, [*ids, 9]))


def test_a_prompt_longer_than_the_window_pool(tiny: Tiny) -> None:
    """Pages of a window are taken forward by forward, as others have left."""
    tight = make_executor(tiny, window_tokens=4 * PAGE, prefill_chunk_size=PAGE)
    ids = some_ids(60)
    assert_close(tight.prefill(prompt(ids)).logits[0], tiny.logits(ids))
    # What goes on behind a window needs the pages of the way back too.
    ex = make_executor(tiny, window_tokens=7 * PAGE, prefill_chunk_size=PAGE)
    llm = LlmExecutor(ex)
    cache = ex.prefill(prompt(ids)).kv_cache.cache
    drawn = llm.sample_tokens(20, inputs([3]), cache)
    assert_close(llm.step(inputs([drawn[-1]]), cache)[0, 0], last(tiny, [*ids, 3, *drawn]))
    check_pages(ex)


def test_no_pages_in_the_middle_of_a_call(tiny: Tiny) -> None:
    """Without room for a later forward nothing of the call stays."""
    ex = make_executor(tiny, window_tokens=6 * PAGE, prefill_chunk_size=PAGE)
    ids = some_ids(20)
    first = ex.prefill(prompt(ids)).kv_cache
    ex.prefill_chunk_size = 7 * PAGE
    with refused(ResourceExhausted, ex, first.cache):
        ex.prefill(prompt(some_ids(60, 1), kv_cache=first))
    with refused(ResourceExhausted, ex, first.cache):
        LlmExecutor(ex).prefill(inputs(some_ids(60, 1)), first.cache)
    assert_close(ex.decode(token(first, 3)).logits[0], last(tiny, [*ids, 3]))
    full = make_executor(tiny, tokens=8 * PAGE, window_tokens=16 * PAGE, prefill_chunk_size=PAGE)
    held = full.prefill(prompt(ids)).kv_cache
    if tiny.family == "Qwen3":
        # Layers that keep all tokens are asked for all of the call beforehand: no forward runs.
        ran: list[object] = []
        execute = full.pool.runner.execute
        full.pool.runner.execute = lambda step, *rest: ran.append(step.chunks) or execute(step, *rest)  # type: ignore[func-returns-value, method-assign]
        with refused(ResourceExhausted, full, held.cache):
            full.prefill(prompt(some_ids(30, 1), kv_cache=held))
        assert not any(ran)


def test_a_failure_in_a_late_forward_is_undone(tiny: Tiny) -> None:
    """The first forwards of the call have let pages go; a fork has kept them."""
    ex = make_executor(tiny, prefill_chunk_size=3)
    ids = some_ids(20)
    handle = ex.prefill(prompt(ids)).kv_cache
    block = ex.pool.runner.model.blocks[1]
    calls = 0

    def failing(x: Tensor, pass_: object) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("boom")
        return block(x, pass_)  # type: ignore[arg-type]

    ex.pool.runner.model.blocks[1] = failing  # type: ignore[index]
    try:
        with refused(QuireError, ex, handle.cache, match="boom"):
            ex.prefill(prompt(some_ids(18, 1), kv_cache=handle))
        calls = 0
        with refused(QuireError, ex, handle.cache, match="boom"):
            LlmExecutor(ex).sample_tokens(9, inputs([1]), handle.cache)
    finally:
        ex.pool.runner.model.blocks[1] = block  # type: ignore[index]
    assert handle.is_valid
    assert_close(ex.decode(token(handle, 3)).logits[0], last(tiny, [*ids, 3]))
    check_pages(ex)


def test_what_handles_show(tiny: Tiny) -> None:
    ex = make_executor(tiny)
    ids = some_ids(21)
    handle = ex.prefill(prompt(ids[:20])).kv_cache
    handle = ex.decode(token(handle, ids[20])).kv_cache
    fresh = make_executor(tiny, prefill_chunk_size=0)
    whole = fresh.prefill(prompt(ids)).kv_cache
    held = 21 - WINDOW
    for layer in range(len(tiny.model.layer_specs)):
        keys, values = handle.key_cache(layer), handle.value_cache(layer)
        assert keys.shape == values.shape == (1, 21, 2, 8)
        assert_close(keys[:, held:], whole.key_cache(layer)[:, held:])
        assert_close(values[:, held:], whole.value_cache(layer)[:, held:])
        if tiny.family == "Mistral" or layer != 1:
            assert torch.count_nonzero(keys[:, : held // PAGE * PAGE]) == 0, "let go of, so zero"
    table = handle.block_table
    assert (table.sequence_length, table.num_blocks) == (21, 6)
    assert (-1 in table.blocks) == (tiny.family == "Mistral")
    stats = handle.stats
    state = ex.pool.state
    assert stats.blocks_allocated == state.sequence_pages(handle.cache.rows[0].seq)[0]
    assert 0 < stats.utilization <= 1
    assert stats.memory_bytes == ex.pool.used_bytes
    assert stats.tokens_stored == 21
    assert ex.status().memory_usage.used_bytes == tiny.model.parameter_bytes + ex.pool.used_bytes


def test_serialised_caches_go_on(tiny: Tiny) -> None:
    ex, other = make_executor(tiny), make_executor(tiny, prefill_chunk_size=5)
    ids = some_ids(25)
    handle = ex.prefill(prompt(ids[:15], some_ids(15, 3))).kv_cache
    for i in ids[15:]:
        handle = ex.decode(token(handle, i, i)).kv_cache
    target = other.create_kv_cache(batch_size=2)
    target.load(handle.cache.serialize())
    assert target.lengths == (25, 25)
    expected = ex.decode(token(handle.clone_handle(), 4, 4)).logits
    assert torch.equal(other.decode(token(target, 4, 4)).logits, expected)
    assert_close(expected[0], last(tiny, [*ids, 4]))
    copy = target.deep_copy()
    assert_close(other.decode(token(copy, 5, 5)).logits[0], last(tiny, [*ids, 4, 5]))
    single = other.create_kv_cache()
    single.select_and_copy_from(target, 0)
    assert_close(other.decode(token(single, 5)).logits[0], last(tiny, [*ids, 4, 5]))


# -- windows of sequences --------------------------------------------------------------------------


def test_sequences_with_a_window(tinies: dict[str, Tiny]) -> None:
    """What a token sees: the sink and the window, at relative positions.

    In the first layer, whose keys depend on token and position only, its weights are those of a
    short sequence of the kept tokens.
    """
    tiny = tinies["Llama"]
    ex = make_executor(tiny, window=8, sink=2, prefill_chunk_size=5)
    ids = some_ids(30)
    handle = ex.prefill(prompt(ids, logits="last")).kv_cache
    output = ex.decode(token(handle, 7, output_attentions=True))
    kept = [0, 1, *range(25, 31)]
    for weights in output.attention_weights:
        assert (weights[0, 0, 0] > 0).nonzero()[:, 0].tolist() == kept
    short = make_executor(tiny).prefill(prompt([([*ids, 7])[i] for i in kept], output_attentions=True))
    assert_close(output.attention_weights[0][0, :, 0, kept], short.attention_weights[0][0, :, -1])
    assert AttentionMechanism.SLIDING_WINDOW in ex.capabilities().attention_mechanisms
    assert output.kv_cache.stats.blocks_allocated <= 1 + 3 + 1
    with refused(FailedPrecondition, ex, handle.cache, match="reachable"):
        ex.truncate_kv(handle, 12)
    clone, copied = output.kv_cache.clone_handle(), ex.create_kv_cache()
    copied.load(clone.cache.serialize())
    expected = ex.decode(token(output.kv_cache, 3)).logits
    assert_close(ex.decode(token(clone, 3)).logits, expected)
    assert_close(ex.decode(token(copied, 3)).logits, expected)
    llm = LlmExecutor(ex)
    dynamic = llm.create_kv_cache(dynamic=True)
    llm.prefill(inputs(ids), dynamic)
    assert_close(llm.step(inputs([7]), dynamic)[0], output.logits)
    check_pages(ex)


def test_a_window_as_long_as_the_context_changes_nothing(tinies: dict[str, Tiny]) -> None:
    tiny = tinies["Llama"]
    ids = some_ids(40)
    wide = make_executor(tiny, window=CONTEXT)
    assert_close(wide.prefill(prompt(ids)).logits[0], tiny.logits(ids))


def test_bad_windows(tinies: dict[str, Tiny]) -> None:
    for fields in ({"window": 0}, {"window": 4, "sink": 4}, {"sink": 1}, {"window": 4, "sink": -1}):
        with pytest.raises(InvalidArgument):
            make_executor(tinies["Llama"], **fields)


def test_a_window_pool_is_reported(windowed: dict[str, Tiny]) -> None:
    ex: Executor = make_executor(windowed["some"], tokens=32 * PAGE, window_tokens=8 * PAGE)
    per_page = PAGE * 2 * (8 + 8) * 4
    memory = ex.status().memory_usage
    weights = windowed["some"].model.parameter_bytes
    assert memory.allocated_bytes == weights + 32 * per_page + 8 * 2 * per_page
    ex_handle = ex.prefill(prompt(some_ids(PAGE))).kv_cache
    assert ex.status().memory_usage.used_bytes == weights + 3 * per_page
    assert ex_handle.stats.memory_bytes == 3 * per_page
    assert ex.capabilities().memory_requirements.kv_cache_memory_per_token * LAYERS * PAGE == 3 * per_page


def test_a_windowed_cache_that_was_loaded_is_undone_too(tinies: dict[str, Tiny]) -> None:
    """A file brings its window into an executor whose own caches have none."""
    tiny = tinies["Llama"]
    source = make_executor(tiny, window=8, sink=2)
    ids = some_ids(30)
    first = source.prefill(prompt(ids)).kv_cache
    ex = make_executor(tiny, prefill_chunk_size=4)
    cache = ex.create_kv_cache()
    cache.load(first.cache.serialize())
    head = ex.pool.runner.model.head
    ex.pool.runner.model.head = lambda x: (_ for _ in ()).throw(RuntimeError("boom"))  # type: ignore[method-assign]
    try:
        with refused(QuireError, ex, cache, match="boom"):
            ex.prefill(prompt(some_ids(18, 1), kv_cache=cache, logits="last"))
    finally:
        ex.pool.runner.model.head = head  # type: ignore[method-assign]
    assert_close(ex.decode(token(cache, 3)).logits, source.decode(token(first, 3)).logits)
    check_pages(ex)


def test_prompts_share_what_windows_still_hold(tiny: Tiny) -> None:
    ex = make_executor(tiny, share_prefixes=True)
    ids = some_ids(40)
    held = ex.prefill(prompt(ids[:20], logits="last")).kv_cache
    for i in ids[20:]:
        held = ex.decode(token(held, i)).kv_cache
    ran: list[int] = []
    execute = ex.pool.runner.execute
    ex.pool.runner.execute = lambda step, *rest: ran.append(step.num_tokens) or execute(step, *rest)  # type: ignore[func-returns-value, method-assign]
    again = ex.prefill(prompt([*ids, 3], logits="last"))
    assert_close(again.last_token_logits()[0], last(tiny, [*ids, 3]))
    assert sum(ran) == 1
    ran.clear()
    gone = ex.prefill(prompt([*ids[:12], 3], logits="last"))
    assert_close(gone.last_token_logits()[0], last(tiny, [*ids[:12], 3]))
    assert sum(ran) == 13, "position 12 cannot be forked any more"
    check_pages(ex)
