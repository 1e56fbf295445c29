"""The token record of a row, and refusals of sampling that must not cost a rewound row its tokens."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from quire.branches.history import TokenHistory
from quire.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from quire.executor.llm_executor import LlmExecutor
from quire.sampling_params import SamplingParams

from .conftest import Tiny, check_pages, forget_tokens, inputs, make_executor, refused, some_ids

LISTS = st.lists(st.integers(0, 96), max_size=40)
STEPS = st.lists(st.tuples(st.sampled_from(["write", "fork", "cut"]), st.integers(0, 7), st.integers(0, 99), LISTS))


@given(LISTS, STEPS)
def test_records_against_lists(first: list[int], steps: list[tuple[str, int, int, list[int]]]) -> None:
    """Whatever forks share, no write of one shows in another."""
    records, lists = [TokenHistory(np.array(first, dtype=np.int64))], [list(first)]
    for verb, which, position, ids in steps:
        index = which % len(records)
        start = position % (len(lists[index]) + 1)
        if verb == "write":
            records[index].replace_from(start, np.array(ids, dtype=np.int64))
            lists[index] = lists[index][:start] + ids
        elif verb == "cut":
            records[index].size = start
            lists[index] = lists[index][:start]
        else:
            records.append(records[index].fork())
            lists.append(list(lists[index]))
        assert [record.ids.tolist() for record in records] == lists


def test_a_fork_copies_at_the_first_write_only() -> None:
    record = TokenHistory(np.arange(1000))
    forks = [record.fork() for _ in range(3)]
    assert all(np.shares_memory(fork.ids, record.ids) for fork in forks)
    forks[0].replace_from(1000, np.array([7]))
    assert not np.shares_memory(forks[0].ids, record.ids)
    before = forks[0].ids
    forks[0].replace_from(1001, np.array([8]))
    assert np.shares_memory(before, forks[0].ids)
    assert np.shares_memory(forks[1].ids, record.ids)


def test_refused_sampling_keeps_the_tokens_of_a_rewound_row(llama: Tiny) -> None:
    """In a full pool a rewind gives up the old tokens, which must not happen for a call that is then refused."""
    executor = make_executor(llama, tokens=16)
    llm = LlmExecutor(executor)
    cache = llm.create_kv_cache()
    llm.prefill(inputs(some_ids(16)), cache)
    with refused(InvalidArgument, executor, cache, match="one per row"):
        llm.sample_tokens_batch(4, inputs([1], at=2), cache, sampling=[])
    with refused(InvalidArgument, executor, cache, match="sampling must be"):
        llm.sample_tokens(4, inputs([1], at=2), cache, sampling="greedy")  # type: ignore[arg-type]
    forget_tokens(cache.rows[0])
    with pytest.raises(FailedPrecondition, match="repetition_penalty"):
        llm.sample_tokens(4, inputs([1], at=2), cache, sampling=SamplingParams(repetition_penalty=1.5))
    assert cache.lengths == (16,)


@pytest.mark.parametrize("verb", ["prefill", "sample"])
def test_rows_that_share_their_last_page_run_in_a_pool_that_just_holds_them(llama: Tiny, verb: str) -> None:
    """Two rows of five tokens on two common pages of four; the third page is for the first row that writes."""
    executor = make_executor(llama, tokens=12)
    llm = LlmExecutor(executor)
    one, both = llm.create_kv_cache(), llm.create_kv_cache(batch_size=2)
    llm.prefill(inputs(some_ids(5)), one)
    both.broadcast_and_copy_from(one)
    one.release()
    state = executor.pool.state
    assert state.missing_pages([row.seq for row in both.rows], [1, 1]) == 0
    if verb == "prefill":
        llm.prefill(inputs([1], [2]), both)
    else:
        llm.sample_tokens_batch(1, inputs([1], [2]), both)
    assert both.lengths == (6, 6)
    assert [both.token_ids(row).tolist() for row in range(2)] == [[*some_ids(5), 1], [*some_ids(5), 2]]  # type: ignore[union-attr]
    with refused(ResourceExhausted, executor, both):
        llm.prefill(inputs([1, 1, 1], [2, 2, 2]), both)
    check_pages(executor)
