"""What the tests of refusals rest on: a snapshot differs after every change, and reading changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .pair import Pair, attention, num_columns, snapshot, windowed


def test_snapshots_see_every_change_and_no_reading() -> None:
    pair = Pair([attention(), windowed(4)], page_size=2, capacity=60)
    state = pair.state
    qkv = torch.randn(3, num_columns(pair.specs[0]))
    q, k, v = pair.parts(0, 3)
    other = Pair([attention(), windowed(4)], page_size=2)
    other.add(0)
    other.append(0, 3)
    metadata, groups = other.state.get_checkpoint_metadata(0), [other.state.export_page_group(0, n) for n in (0, 1)]
    steps: list[Callable[[], object]] = [
        partial(state.add_sequence, 0),
        partial(state.enable_sliding_window_for_seq, 0, 6, 2),
        partial(state.enable_sliding_window_for_seq, 0, 6, 2, eviction="forward"),
        partial(state.begin_forward, [0], [3]),
        partial(state.append_kv, 0, k, v),
        partial(state.attention_with_fused_qkv, 0, qkv),
        partial(state.attention_with_fused_qkv, 1, qkv),
        partial(state.end_forward),
        partial(state.fork_sequence, 0, 1),
        partial(state.begin_forward, [1], [3], [-1, 0, 0]),
        partial(state.abort_forward),
        partial(state.begin_forward, [1], [3], [-1, 0, 0]),
        partial(state.end_forward, skipped=[0, 1]),
        partial(state.begin_forward, [1], [1], [2]),
        partial(state.end_forward, skipped=[0, 1]),
        partial(state.commit_accepted_token_tree_nodes, [1], [1]),
        partial(state.popn, 1, 1),
        partial(state.debug_set_kv, 0, 0, torch.ones(1, 2, 8), torch.ones(1, 2, 8), layer=1),
        partial(state.prepare_import, 5, metadata),
        partial(state.import_page_group, 5, 1, groups[1]),
        partial(state.import_page_group, 5, 0, groups[0]),
        partial(state.finish_import, 5),
        partial(state.remove_sequence, 1),
        partial(state.clear),
    ]
    before = snapshot(state)
    for step in steps:
        step()
        assert snapshot(state) != before, step
        before = snapshot(state)
        for seq_id in state.state.sequences.ids:
            state.reachable(seq_id)
            state.cached_length(seq_id)
            if not state.state.parts.imports:
                state.debug_get_kv(seq_id)
        if state.state.sequences.forward is not None:
            state.cross_attention(0, q)
            state.self_attention(1, q, k, v)
            state.get_query_positions(relative=True)
        state.total_sequence_length()
        state.check()
        assert snapshot(state) == before, step
