"""Values of the KV cache contract: what they compute, and what they refuse."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import InvalidArgument, ResourceExhausted
from quire.contracts.kv_cache import BlockTable, CacheHandleStats


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
