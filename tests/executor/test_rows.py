"""Refusals of sampling that must not cost a rewound row its tokens."""

from __future__ import annotations

import pytest

from quire.base.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from quire.base.sampling_params import SamplingParams
from quire.executor.llm_executor import LlmExecutor

from .conftest import Tiny, check_pages, forget_tokens, inputs, make_executor, refused, some_ids


def test_refused_sampling_keeps_the_tokens_of_a_rewound_row(llama: Tiny) -> None:
    """In a full pool a rewind gives up the old tokens, which must not happen for a call that is
    then refused.
    """
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
    """Two rows of five tokens on two common pages of four; the third page is for the first row that
    writes.
    """
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
