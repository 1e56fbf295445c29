"""Random calls on random caches of models with recurrent layers: whatever was done, a cache goes on
as a fresh run of its tokens.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.executor.conftest import inputs
from tests.executor.recurrent import Hybrid, check, make_executor, prompt, token
from tests.test_parity import VOCAB

from quire.base.errors import ResourceExhausted
from quire.executor.cache import KVCache
from quire.executor.executor import Executor
from quire.executor.handle import Handle
from quire.executor.llm_executor import LlmExecutor

LIMIT = 20


class Machine:
    """Caches of one row each, and the tokens that must be in them."""

    def __init__(self, hybrid: Hybrid, executor: Executor, seed: int) -> None:
        self.hybrid, self.executor, self.face = hybrid, executor, LlmExecutor(executor)
        self.random = random.Random(seed)
        self.held: list[tuple[KVCache, list[int]]] = []
        self.reference = make_executor(hybrid)
        self.refused = 0

    def ids(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(count)]

    def expected(self, tokens: list[int]) -> torch.Tensor:
        handle = self.reference.prefill(prompt(tokens, logits="last"))
        self.reference.release_cache(handle.kv_cache.cache_id)
        return handle.logits[0, -1]  # type: ignore[index]

    def agree(self, found_V: torch.Tensor, tokens: list[int]) -> None:
        expected_V = self.expected(tokens)
        error = float((found_V - expected_V).abs().max())
        scale = float(expected_V.abs().max()) / float(self.hybrid.expected_TV.abs().max())
        assert error / (2 * max(1.0, scale)) <= self.hybrid.bound, f"{error:.2e} after {len(tokens)} tokens"

    def step(self) -> None:
        if not self.held or (len(self.held) < 4 and self.random.random() < 0.3):
            tokens = self.ids(self.random.randrange(1, 8))
            output = self.executor.prefill(prompt(tokens, logits="last"))
            self.held.append((output.kv_cache.cache, tokens))
            self.agree(output.logits[0, -1], tokens)  # type: ignore[index]
            return
        index = self.random.randrange(len(self.held))
        cache, tokens = self.held[index]
        start = self.random.choice([len(tokens), len(tokens), self.random.randrange(len(tokens) + 1)])
        start = min(start, LIMIT - 8)
        verb = self.random.choice([*VERBS])
        try:
            changed = getattr(self, verb)(cache, tokens, Handle(cache, (start,), cache.revision), start)
        except ResourceExhausted:
            self.refused += 1
            changed = tokens
        if changed is None:
            del self.held[index]
            return
        self.held[index] = (cache, changed)
        assert cache.lengths == (len(changed),)
        assert cache.token_ids(0).tolist() == changed  # type: ignore[union-attr]

    def decode(self, cache: KVCache, tokens: list[int], handle: Handle, start: int) -> list[int]:
        made = [*tokens[:start], *self.ids(1)]
        self.agree(self.executor.decode(token(handle, made[-1])).logits[0], made)
        return made

    def prefill(self, cache: KVCache, tokens: list[int], handle: Handle, start: int) -> list[int]:
        more = self.ids(self.random.randrange(1, 6))
        output = self.executor.prefill(prompt(more, kv_cache=handle))
        made = [*tokens[:start], *more]
        self.agree(output.logits[0, -1], made)  # type: ignore[index]
        return made

    def truncate(self, cache: KVCache, tokens: list[int], handle: Handle, start: int) -> list[int]:
        self.executor.truncate_kv(cache, start)
        return tokens[:start]

    def verify(self, cache: KVCache, tokens: list[int], handle: Handle, start: int) -> list[int]:
        more = self.ids(self.random.randrange(1, 5))
        found = self.executor.forward_verify([token(handle, one) for one in more])
        made = [*tokens[:start], *more]
        self.agree(found[-1].logits[0], made)
        if self.random.random() < 0.5:
            keep = self.random.randrange(start, len(made) + 1)
            try:
                self.executor.truncate_kv(found[-1].kv_cache, keep)
            except ResourceExhausted:
                self.refused += 1
                return made
            return made[:keep]
        return made

    def tree(self, cache: KVCache, tokens: list[int], handle: Handle, start: int) -> list[int]:
        more = self.ids(4)
        found = self.executor.forward_verify([token(handle, one) for one in more], parents=[-1, 0, 0, 2])
        assert cache.lengths == (len(tokens),)
        if self.random.random() < 0.3:
            return tokens
        node, path = self.random.choice([(0, [0]), (1, [0, 1]), (3, [0, 2, 3])])
        made = [*tokens[:start], *(more[one] for one in path)]
        self.agree(found[node].logits[0], made)
        self.executor.commit_path(found[node].kv_cache)
        return made

    def speculate(self, cache: KVCache, tokens: list[int], handle: Handle, start: int) -> list[int]:
        more = self.ids(4)
        threshold = self.random.choice([0.0, 0.05, 1.0])
        found = self.executor.speculative_decode(token(handle, more[0]), more[1:], threshold)
        made = [*tokens[:start], *more[: 1 + found.acceptance_count]]
        self.agree(found.next_logits[0], made)
        return made

    def sample(self, cache: KVCache, tokens: list[int], handle: Handle, start: int) -> list[int]:
        first = self.ids(1)
        drawn = self.face.sample_tokens(2, inputs([first[0]], at=start), cache)
        made = [*tokens[:start], *first, *drawn]
        best = self.expected(made[:-1])
        assert float(best.max() - best[drawn[-1]]) / 2 <= self.hybrid.bound
        return made[:-1]

    def clone(self, cache: KVCache, tokens: list[int], handle: Handle, start: int) -> list[int]:
        if len(self.held) < 4:
            self.held.append((handle.clone_handle().cache, tokens[:start]))
            assert self.held[-1][0].lengths == (start,)
        return tokens

    def reload(self, cache: KVCache, tokens: list[int], handle: Handle, start: int) -> list[int]:
        cache.load(cache.serialize())
        return tokens

    def release(self, cache: KVCache, tokens: list[int], handle: Handle, start: int) -> None:
        self.executor.release_cache(cache.cache_id)


VERBS = ("decode", "prefill", "truncate", "verify", "tree", "speculate", "sample", "clone", "reload", "release")


@pytest.mark.product(8)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"states": 6},
        {"states": 9, "interval": 4, "prefill_chunk_size": 3},
        {"states": 24, "ring": 3, "tokens": 48},
        {"ring": 0, "prefill_chunk_size": 2},
    ],
    ids=["plenty", "few", "interval", "tight", "ringless"],
)
def test_random_calls(hybrid: Hybrid, given: dict[str, Any]) -> None:
    for seed in range(2):
        executor = make_executor(hybrid, **given)
        machine = Machine(hybrid, executor, seed)
        for _ in range(40):
            try:
                machine.step()
            except ResourceExhausted:
                machine.refused += 1
            check(executor)
        for cache, tokens in machine.held:
            executor.truncate_kv(cache, len(tokens))
        for cache, _ in machine.held:
            cache.release()
        check(executor)
        assert executor.pool.state.empty()
        if given == {}:
            assert machine.refused == 0


@pytest.mark.sweep
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_windows_of_sequences_and_states_go_back_together(hybrid: Hybrid, step: int) -> None:
    if not hybrid.has_attention:
        pytest.skip("no layer that a window concerns")
    ids = hybrid.tokens
    given: dict[str, Any] = {"window": 7, "sink": 2}
    for n in range(0, len(ids), step):
        executor = make_executor(hybrid, prefill_chunk_size=5, **given)
        handle = executor.prefill(prompt(ids[:16], logits="none")).kv_cache
        for position in range(16, len(ids)):
            handle = executor.decode(token(handle, ids[position])).kv_cache
        short = executor.truncate_kv(handle, n)
        found = executor.decode(token(short, ids[n])).logits
        plain = make_executor(hybrid, **given)
        expected = plain.prefill(prompt(ids[: n + 1], logits="last")).logits
        assert expected is not None
        assert float((found[0] - expected[0, -1]).abs().max()) / 2 <= hybrid.bound
        check(executor)
