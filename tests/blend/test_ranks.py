"""Tensor parallelism on plain tensors: each rank has a share of the heads, and an executor of its
own, in a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tests.blend.prompts import blender, random_batch, seeds
from tests.blend.small_model import SmallModel, heads, rope, run
from torch import Tensor

from quire.base.blend_inputs import BlendedRows
from quire.blend.executor import TensorBlender
from quire.blend.selection import BlendPolicy
from quire.contracts.blend import BlendOutput

LIMIT = 30.0
"""Seconds for which a rank waits for the others."""


class Ranks:
    """As many executors as there are ranks; what they give is put together."""

    def __init__(self, queries: Sequence[int], keys: Sequence[int], **policy: Any) -> None:
        """``queries``, ``keys``: heads of each rank, of Q, and of K and V."""
        self.policy = BlendPolicy(min_tokens=0, **policy)
        self._shares = [list(queries), list(keys), list(keys)]
        self._barrier = threading.Barrier(len(queries), timeout=LIMIT)
        self._parts: list[Tensor | None] = [None] * len(queries)
        self._blenders = [
            TensorBlender(self.policy, (heads(query, key, rope()),) * 4, all_reduce=partial(self._reduce, rank))
            for rank, (query, key) in enumerate(zip(queries, keys, strict=True))
        ]
        self._threads = ThreadPoolExecutor(len(queries))

    def _reduce(self, rank: int, sums: Tensor) -> Tensor:
        self._parts[rank] = sums
        self._barrier.wait()
        whole = torch.stack([one for one in self._parts if one is not None]).sum(0)
        self._barrier.wait()
        return whole

    def prepare(self, known: Sequence[BlendedRows | None]) -> None:
        for one in self._blenders:
            one.prepare(known)

    def blend(self, layer_id: int, *given: Any) -> BlendOutput:
        cached_k, cached_v, valid, origins, q, k, v, *rest = given

        def of(rank: int, rows: Tensor | None, share: list[int]) -> Tensor | None:
            return None if rows is None else rows.split(share, 1)[rank].contiguous()

        asks, keys, values = self._shares
        calls: list[Callable[[], BlendOutput]] = [
            partial(
                one.blend,
                layer_id,
                of(rank, cached_k, keys),
                of(rank, cached_v, values),
                valid,
                origins,
                of(rank, q, asks),
                of(rank, k, keys),
                of(rank, v, values),
                *rest,
            )
            for rank, one in enumerate(self._blenders)
        ]
        outs = [one.result() for one in [self._threads.submit(each) for each in calls]]
        for one in outs[1:]:
            assert torch.equal(one.local_indices, outs[0].local_indices), "ranks keep the same rows"
            assert torch.equal(one.positions, outs[0].positions)
        joined = {name: torch.cat([getattr(one, name) for one in outs], 1) for name in "qkv"}
        return BlendOutput(
            **joined,
            positions=outs[0].positions,
            local_indices=outs[0].local_indices,
            query_start_loc=outs[0].query_start_loc,
            kept=outs[0].kept,
        )

    def close(self) -> None:
        self._threads.shutdown()


def same_as_one(model: SmallModel, ranks: Ranks, prompts: Any, **policy: Any) -> None:
    try:
        found = run(model, ranks, prompts)  # type: ignore[arg-type]
    finally:
        ranks.close()
    for one, two in zip(run(model, blender(model, **policy), prompts), found, strict=True):
        assert one.rows == two.rows
        assert torch.equal(one.logits, two.logits)


@pytest.mark.parametrize("score", ["v", "kv"])
@settings(max_examples=5)
@given(seeds)
def test_ranks_choose_as_one_does(score: str, seed: int) -> None:
    """Two ranks of two heads each, and three of which one has another number of heads."""
    batch = [[5, 6, 3], [9, 2], [1], [4, 8]]
    given_policy = {"score": score, "layers": (1, 2), "layer_ratios": (1.5, 1.0)}
    model, prompts = random_batch("gqa", seed, batch, ratio=0.3)
    same_as_one(model, Ranks([2, 2], [1, 1], **given_policy), prompts, **given_policy)
    model, prompts = random_batch("mha", seed, batch, ratio=0.3)
    same_as_one(model, Ranks([2, 1], [2, 1], **given_policy), prompts, **given_policy)
