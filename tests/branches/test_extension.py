"""Tokens run before they count: of a branch of an engine, and of one of an executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tests.executor.conftest import Tiny, assert_close, hybrid, llama, make_executor, tinies  # noqa: F401
from tests.executor.recurrent import Hybrid
from tests.executor.recurrent import make_executor as make_hybrid_executor
from torch import Tensor

from quire.base.errors import QuireError
from quire.base.metrics import EngineMetrics
from quire.base.token_history import TokenHistory
from quire.base.types import Add, Step
from quire.branches.branch import Branch
from quire.branches.extension import Extension, extend, keep
from quire.branches.owner import BranchOwner
from quire.branches.prefix_cache import RadixCache
from quire.branches.session_branches import SessionBranches
from quire.branches.stored_state import StoredState
from quire.executor.executor import Executor

PROMPT, DRAFTS = 7, 5
WRONG = 1


def engine_pool(executor: Executor) -> BranchOwner:
    runner = executor.pool.runner
    cache = RadixCache(runner.state.nearest_reachable)
    return SessionBranches(runner, cache=cache, tier=StoredState(runner), metrics=EngineMetrics())


def executor_pool(executor: Executor) -> BranchOwner:
    return executor.pool


pools = pytest.mark.parametrize("made", [engine_pool, executor_pool])
MakePool = Callable[[Executor], BranchOwner]


def run(pool: BranchOwner, new: Extension, ids: Sequence[int]) -> Tensor:
    """Logits of all of these tokens, which do not count yet."""
    before = new.branch.computed
    step = Step(chunks=(new.chunk(np.array(ids, dtype=np.int64), "all"),))
    logits_RV = extend(pool.runner, step, [new]).logits_RV
    assert new.branch.computed == before
    return logits_RV


def begun(pool: BranchOwner, ids: Sequence[int]) -> Branch:
    """A branch whose tokens are all computed."""
    branch = Branch(tokens=TokenHistory(ids), seq=pool.new_seq())
    assert branch.seq is not None
    pool.apply(Add(branch.seq))
    compute(pool, branch)
    return branch


def compute(pool: BranchOwner, branch: Branch) -> Tensor:
    new = Extension(branch, branch.computed, branch.runs)
    logits_RV = run(pool, new, branch.tokens.ids[branch.computed :].tolist())
    keep(pool, [new])
    assert not branch.remaining
    return logits_RV


def drafted(tokens: Sequence[int], right: int) -> list[int]:
    """Drafts of which the first are the tokens behind the prompt."""
    ids = list(tokens[PROMPT : PROMPT + DRAFTS])
    ids[right:] = [(one + WRONG) % 97 for one in ids[right:]]
    return ids


def require_length(pool: BranchOwner, branch: Branch, length: int) -> None:
    assert branch.seq is not None
    assert branch.computed == length == pool.state.sequence_length(branch.seq)
    pool.state.check()


@pytest.mark.product(2)
@pools
@pytest.mark.parametrize("right", range(DRAFTS + 1))
def test_drafts_of_a_chain_are_verified_and_taken_back(llama: Tiny, made: MakePool, right: int) -> None:  # noqa: F811
    pool, tokens = made(make_executor(llama)), list(range(10, 34))
    branch, expected_TV = begun(pool, tokens[:PROMPT]), llama.logits(tokens)
    new = Extension(branch, PROMPT)
    rows_RV = run(pool, new, drafted(tokens, right))
    if right:
        assert_close(rows_RV[:right], expected_TV[PROMPT : PROMPT + right])
    keep(pool, [new], [right])
    require_length(pool, branch, PROMPT + right)
    branch.tokens.extend(tokens[PROMPT : PROMPT + right + 1])
    assert_close(compute(pool, branch), expected_TV[PROMPT + right :][:1])


@pools
@pytest.mark.parametrize("node", [-1, 0, 2, 4])
def test_a_path_of_a_tree_counts(llama: Tiny, made: MakePool, node: int) -> None:  # noqa: F811
    pool, tokens, nodes, parents = (
        made(make_executor(llama)),
        list(range(10, 17)),
        [40, 41, 42, 43, 44],
        (-1, 0, 0, 2, 3),
    )
    branch = begun(pool, tokens)
    new = Extension(branch, PROMPT, parents=parents)
    rows_RV = run(pool, new, nodes)
    path = new.kept(node).tolist()
    keep(pool, [new], [node])
    require_length(pool, branch, PROMPT + len(path))
    expected_TV = llama.logits([*tokens, *(nodes[one] for one in path), 50])
    if path:
        assert_close(rows_RV[path], expected_TV[PROMPT:-1])
    branch.tokens.extend([*(nodes[one] for one in path), 50])
    assert_close(compute(pool, branch), expected_TV[-1:])


@pools
@pytest.mark.parametrize("right", [0, 2, DRAFTS])
def test_recurrent_drafts_are_a_path_with_a_state_behind_each(hybrid: Hybrid, made: MakePool, right: int) -> None:  # noqa: F811
    pool, tokens = made(make_hybrid_executor(hybrid)), hybrid.tokens
    branch = begun(pool, tokens[:PROMPT])
    new = Extension(branch, PROMPT, parents=tuple(range(-1, DRAFTS - 1)))
    rows_RV = run(pool, new, drafted(tokens, right))
    if right:
        hybrid.close(rows_RV[:right], PROMPT)
    keep(pool, [new], [right - 1])
    require_length(pool, branch, PROMPT + right)
    branch.tokens.extend(tokens[PROMPT : PROMPT + right + 1])
    hybrid.close(compute(pool, branch), PROMPT + right)


@pools
def test_a_recurrent_chain_that_is_cut_is_left_to_run_again(hybrid: Hybrid, made: MakePool) -> None:  # noqa: F811
    """The state behind the accepted drafts was not kept, so they run once more."""
    pool, tokens = made(make_hybrid_executor(hybrid, ring=0)), hybrid.tokens
    branch = begun(pool, tokens[:PROMPT])
    new = Extension(branch, PROMPT)
    run(pool, new, drafted(tokens, 2))
    keep(pool, [new], [2])
    require_length(pool, branch, 0)
    branch.tokens.extend(tokens[PROMPT : PROMPT + 3])
    hybrid.close(compute(pool, branch), 0)


@pools
def test_a_chain_of_several_forwards_counts_as_one(llama: Tiny, made: MakePool) -> None:  # noqa: F811
    pool, tokens = made(make_executor(llama)), list(range(10, 34))
    branch, expected_TV = begun(pool, tokens[:PROMPT]), llama.logits(tokens)
    new = Extension(branch, PROMPT)
    run(pool, new, tokens[PROMPT:11])
    assert_close(run(pool, new, tokens[11:20]), expected_TV[11:20])
    assert new.end == 20
    keep(pool, [new], [3])
    require_length(pool, branch, PROMPT + 3)
    pool.rollback(branch, 4)
    require_length(pool, branch, 4)
    assert_close(compute(pool, branch), expected_TV[4:PROMPT])


@pools
def test_what_fails_runs_nothing(llama: Tiny, made: MakePool) -> None:  # noqa: F811
    pool = made(make_executor(llama))
    branch = begun(pool, range(10, 17))
    new, failing = Extension(branch, PROMPT), Extension(branch, PROMPT, parents=(-1,))
    for one, count in ((new, 0), (failing, -1)):
        with pytest.raises(IndexError):
            run(pool, one, [2**40])
        keep(pool, [one], [count])
        require_length(pool, branch, PROMPT)
    with pytest.raises(QuireError, match="without a sequence"):
        Extension(Branch(), 0).chunk(np.array([1]))


def test_a_prompt_finds_no_drafts_that_were_taken_back(llama: Tiny) -> None:  # noqa: F811
    pool: Any = engine_pool(make_executor(llama))
    tokens = list(range(10, 30))
    branch = begun(pool, tokens)
    pool.share(branch, None, live=True)
    pool.rollback(branch, 12)
    assert pool.cache.length(branch.seq) == 12
    assert pool.cache.find(np.array(tokens), None) == (branch.seq, 12)


@pools
def test_a_fork_computes_what_its_state_does_not_hold(hybrid: Hybrid, made: MakePool) -> None:  # noqa: F811
    pool, tokens = made(make_hybrid_executor(hybrid, interval=4)), hybrid.tokens
    parent, child = begun(pool, tokens[:12]), Branch()
    child.become(parent, 10, None)
    pool.fork_state(parent, child, pool.reach(parent, 10))
    require_length(pool, child, 8)
    hybrid.close(compute(pool, child), 8)
    require_length(pool, parent, 12)
