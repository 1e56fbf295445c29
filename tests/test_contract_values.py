"""Values of the KV cache and blending contracts: what they compute, and what they refuse."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.contracts import channel
from quire.contracts.blend import BlendOutput, BlendPolicy, BlendRequest, BlendRetrieverResult
from quire.contracts.kv_cache import BlockTable, CacheHandleStats
from quire.errors import InvalidArgument, ResourceExhausted

# -- block tables and handles ----------------------------------------------------------------------------------------


@given(st.integers(0, 200), st.integers(1, 40), st.integers(0, 6), st.integers(0, 50))
def test_block_table_against_counting_slots(length: int, block_size: int, spare: int, more: int) -> None:
    held = math.ceil(length / block_size) + spare
    table = BlockTable(block_size=block_size, blocks=tuple(range(held)), sequence_length=length)
    slots = [(block, offset) for block in range(held) for offset in range(block_size)]
    free = slots[length:]
    assert table.free_tokens == len(free)
    assert table.has_free_space == bool(free)
    assert BlockTable.blocks_needed(length, block_size) == len({block for block, _ in slots[:length]})
    if more <= len(free):
        longer = table.extend(more)
        assert (longer.sequence_length, longer.blocks) == (length + more, table.blocks)
    else:
        need = math.ceil((length + more) / block_size)
        with pytest.raises(ResourceExhausted, match=rf"^Insufficient blocks: need {need}, have {held}$"):
            table.extend(more)
    assert table.sequence_length == length


def test_block_table_refusals() -> None:
    assert BlockTable(block_size=16).free_tokens == 0
    for bad in (
        lambda: BlockTable(block_size=0),
        lambda: BlockTable(block_size=4, sequence_length=-1),
        lambda: BlockTable(block_size=4, blocks=(1,), sequence_length=5),
        lambda: BlockTable(block_size=4, blocks=(1,), sequence_length=2).extend(-1),
        lambda: CacheHandleStats(memory_bytes=-1, blocks_allocated=0, tokens_stored=0, utilization=0.0),
        lambda: CacheHandleStats(memory_bytes=1, blocks_allocated=1, tokens_stored=0, utilization=1.5),
    ):
        with pytest.raises(InvalidArgument):
            bad()


def test_transfer_messages() -> None:
    channel.TransferMessage(transfer_id=3, kind="rows", layer_id=0, run=2, payload=b"x", checksum=9)
    channel.TransferMessage(transfer_id=3, kind="end")
    refused: list[dict[str, Any]] = [
        {"transfer_id": 1, "kind": "rows"},
        {"transfer_id": 1, "kind": "end", "run": 1},
        {"transfer_id": 1, "kind": "push"},
        {"transfer_id": -1, "kind": "end"},
    ]
    for bad in refused:
        with pytest.raises(InvalidArgument):
            channel.TransferMessage(**bad)


# -- blending --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 100), st.integers(0, 2000))
def test_blend_budget_in_exact_arithmetic(percent: int, candidates: int) -> None:
    assert BlendPolicy(ratio=percent / 100).budget(candidates) == -(-percent * candidates // 100)


def test_blend_budget() -> None:
    assert 0.07 * 100 > 7, "the case that the small term is for"
    assert BlendPolicy(ratio=0.07).budget(100) == 7
    gradual = BlendPolicy(ratio=0.2, selecting_layers=(1, 2, 3), layer_factors=(1.5, 1.0, 0.7))
    assert [gradual.budget(100, i) for i in range(3)] == [30, 20, 14]
    assert [gradual.budget(100, i, ratio=1.0) for i in range(3)] == [100, 100, 100]
    assert gradual.budget(100, 0, ratio=0.8) == 100
    for bad in ((-1, 0, None), (1, 3, None), (1, -1, None), (1, 0, 1.5)):
        with pytest.raises(InvalidArgument):
            gradual.budget(*bad)


def test_blend_policy_defaults_and_refusals() -> None:
    policy = BlendPolicy()
    assert (policy.ratio, policy.selecting_layers, policy.score, policy.threshold) == (0.15, (1,), "v", None)
    assert (policy.min_tokens, policy.protect_last) == (256, True)
    assert len({policy, BlendPolicy()}) == 1
    for change in (
        {"ratio": 1.1},
        {"ratio": math.nan},
        {"selecting_layers": ()},
        {"selecting_layers": (2, 1)},
        {"selecting_layers": (-1,)},
        {"layer_factors": (1.0, 0.5)},
        {"selecting_layers": (1, 2), "layer_factors": (0.5, 1.0)},
        {"layer_factors": (0.0,)},
        {"score": "w"},
        {"threshold": -1.0},
        {"threshold": math.inf},
        {"min_tokens": -1},
    ):
        with pytest.raises(InvalidArgument):
            replace(policy, **change)
    for request in ({"ratio": 2.0}, {"threshold": -1.0}, {"forced_rows": (1, -1)}, {"exact_rows": (-1,)}):
        with pytest.raises(InvalidArgument):
            BlendRequest(**request)


def test_blend_retriever_result() -> None:
    mask = torch.tensor([1, 0, 1], dtype=torch.int32)
    good = BlendRetrieverResult(
        k=torch.zeros(3, 2, 4), v=torch.zeros(3, 2, 4), valid_mask=mask, original_positions=torch.tensor([5, 0, 7])
    )
    replace(good, k=torch.zeros(2, 3, 4), v=torch.zeros(2, 3, 4))
    replace(good, k=None, v=None, valid_mask=torch.zeros(3, dtype=torch.int32))
    for change, message in (
        ({"k": None, "v": None}, "2 tokens are valid"),
        ({"k": None}, "both be given"),
        ({"k": torch.zeros(4, 2, 4)}, "k must be"),
        ({"v": torch.zeros(3, 8)}, "v must be"),
        ({"valid_mask": mask.bool()}, "valid_mask must be int32"),
        ({"original_positions": torch.zeros(2, dtype=torch.int64)}, "original_positions must be int64"),
        ({"original_positions": torch.zeros(3, dtype=torch.int32)}, "original_positions must be int64"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            replace(good, **change)


def test_blend_output() -> None:
    good = BlendOutput(
        q=torch.zeros(2, 8),
        k=torch.zeros(4, 4),
        v=torch.zeros(4, 4),
        positions=torch.tensor([3, 5]),
        local_indices=torch.tensor([1, 3]),
        query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
    )
    replace(good, kept=torch.tensor([1, 3]), query_start_loc=None)
    for change in (
        {"local_indices": torch.tensor([3, 1])},
        {"local_indices": torch.tensor([1, 1])},
        {"local_indices": torch.tensor([-1, 1])},
        {"local_indices": torch.tensor([1, 3], dtype=torch.int32)},
        {"positions": torch.tensor([3])},
        {"kept": torch.tensor([1])},
        {"query_start_loc": torch.tensor(2)},
    ):
        with pytest.raises(InvalidArgument):
            replace(good, **change)
