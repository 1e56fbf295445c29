"""What tries each verb of the KV state contract where the rule table says that it works, against
what is computed from scratch.

Each check is given a story whose sequence 0 holds ten tokens, and these tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from quire.base.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.channels.pair import channel_pair
from quire.kv.rule_table import SINK_OF_OWN_ROTATION, Combination

from .rule_stories import Story, encoded, expected, given, recurrent_state
from .snapshots import snapshot

FLOAT64 = {"rtol": 1e-13, "atol": 1e-14}
"""Sums of a few dozen terms of float64, in two orders; numbers about 1."""
FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}
"""Recurrent states, which are kept in float32: ten updates of numbers about 1, against float64."""


def refused(story: Story, call: Callable[[], object], *words: str) -> None:
    """``Unsupported`` with these words; nothing was computed, nothing changed."""
    before, computed = snapshot(story.state), story.calls
    with pytest.raises(Unsupported) as raised:
        call()
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert story.calls == computed
    assert snapshot(story.state) == before
    story.state.check()


def is_reachable(story: Story, seq_id: int, position: int) -> bool:
    return any(position in part for part in story.state.reachable(seq_id))


def clear(story: Story, tokens: list[int]) -> None:
    story.state.fork_sequence(0, 1)
    story.begin(1, [7])
    story.state.clear()
    assert story.state.empty()
    story.begun()
    story.goes_on(0, tokens)


def add(story: Story, tokens: list[int]) -> None:
    story.add(-5)
    found = story.forward({-5: [7, 8], 0: [9]})
    story.check_row(found, 1, [7, 8])
    story.check_row(found, 2, [*tokens, 9])
    story.goes_on(-5, [7, 8])


def remove(story: Story, tokens: list[int]) -> None:
    story.state.fork_sequence(0, 1)
    story.state.remove_sequence(0)
    story.goes_on(1, tokens)
    assert not story.state.empty()
    story.state.remove_sequence(1)
    assert story.state.empty()


def fork(story: Story, tokens: list[int]) -> None:
    state, replayed = story.state, 0
    for position in range(len(tokens) + 1):
        if not is_reachable(story, 0, position):
            before = snapshot(state)
            with pytest.raises(FailedPrecondition):
                state.fork_sequence(0, 1, position)
            assert snapshot(state) == before
            continue
        again = state.fork_sequence(0, 1, position)
        replayed += again
        if again:
            story.run(1, tokens[: position - again], tokens[position - again : position])
        story.goes_on(1, tokens[:position])
        state.remove_sequence(1)
    assert (replayed > 0) == story.combination.has("recurrent")
    story.goes_on(0, tokens)


def pop(story: Story, tokens: list[int]) -> None:
    state = story.state
    for position in range(len(tokens) + 1):
        state.fork_sequence(0, 1)
        reachable, cost = is_reachable(story, 1, position), 0
        if reachable:
            cost = state.rewind_cost(1, position)
            again = state.popn(1, len(tokens) - position)
            assert again == cost
            if again:
                story.run(1, tokens[: position - again], tokens[position - again : position])
            story.goes_on(1, tokens[:position])
        else:
            for refusing in (
                lambda position=position: state.popn(1, len(tokens) - position),
                lambda position=position: state.rewind_cost(1, position),
            ):
                before = snapshot(state)
                with pytest.raises(FailedPrecondition):
                    refusing()
                assert snapshot(state) == before
        state.remove_sequence(1)
    story.goes_on(0, tokens)


def bracket(story: Story, tokens: list[int]) -> None:
    state = story.state
    story.begin(0, [7, 8])
    assert state.get_query_positions().tolist() == [len(tokens), len(tokens) + 1]
    assert state.get_query_positions().dtype == torch.int32
    story.attend(0, story.kinds[0], [7, 8])
    state.abort_forward()
    story.goes_on(0, tokens)


def window(story: Story, tokens: list[int]) -> None:
    del tokens
    sinks = (0,) if story.combination.own_rotation else (0, 2)
    for seq_id, sink in enumerate(sinks, 10):
        story.add(seq_id)
        story.state.enable_sliding_window_for_seq(seq_id, 6, sink)
        run: list[int] = []
        for piece in ([1, 2, 3], [4], [5, 6, 7, 8, 9], [10], [11, 12]):
            run = story.run(seq_id, run, piece, (6, sink))
        assert story.state.cached_length(seq_id) == 6
        assert story.state.sequence_length(seq_id) == len(run)
    if story.combination.own_rotation:
        story.add(20)
        refused(story, lambda: story.state.enable_sliding_window_for_seq(20, 6, 2), SINK_OF_OWN_ROTATION)


def trees(story: Story, tokens: list[int]) -> None:
    parents, nodes = [-1, 0, 0, 1, -1, 3], [11, 12, 13, 14, 15, 16]
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [4], [0, 1, 3, 5]]
    for leaf in range(-1, len(nodes)):
        story.state.fork_sequence(0, 1)
        found = story.forward({1: nodes}, parents)
        for row, path in enumerate(paths):
            story.check_row(found, row, [*tokens, *(nodes[node] for node in path)])
        assert story.state.pending_nodes(1) == len(nodes)
        assert story.state.sequence_length(1) == len(tokens)
        story.state.commit_accepted_token_tree_nodes([1], [leaf])
        assert story.state.pending_nodes(1) == 0
        kept = [nodes[node] for node in paths[leaf]] if leaf >= 0 else []
        story.goes_on(1, [*tokens, *kept])
        story.state.remove_sequence(1)


def parts(story: Story, tokens: list[int]) -> None:
    """Appended rows, new and stored tokens apart, merged; in pieces and one by one."""
    for piece in ([7, 8, 9], [10], [11, 12, 13, 14, 15, 16]):
        tokens = story.run(0, tokens, piece, parts=True)
    story.goes_on(0, tokens)


def shared(story: Story, tokens: list[int]) -> None:
    new = [7, 8]
    for given_kv in (False, True):
        story.begin(0, new)
        for layer, kind in story.layers("full", "window"):
            x = given(kind, new)
            own = story.attend(layer, kind, new) if not given_kv else None
            kv = (x["k"], x["v"]) if given_kv else ()
            found = story.state.attention_with_shared_kv(layer, x["q"], *kv)
            if own is not None:
                torch.testing.assert_close(found, own, **FLOAT64)
            else:
                wanted = torch.stack([expected(kind, [*tokens, *new[: row + 1]]) for row in range(2)])
                torch.testing.assert_close(found, wanted, **FLOAT64)
        story.state.abort_forward()
    story.goes_on(0, tokens)


def read_rows(story: Story, tokens: list[int]) -> None:
    state = story.state
    for layer, kind in enumerate(story.kinds):
        if kind == "recurrent":
            continue
        if kind == "cross":
            for found, wanted in zip(state.debug_get_kv(0, None, layer=layer), encoded(), strict=True):
                assert torch.equal(found, wanted)
            continue
        for part in state.held(0, layer):
            x = given(kind, tokens[part.start : part.stop])
            if kind == "latent":
                assert torch.equal(state.debug_get_kv_mla(0, part.start, part.stop, layer=layer), x["rows"])
            else:
                k, v = state.debug_get_kv(0, part.start, part.stop, layer=layer)
                assert torch.equal(k, x["k"])
                assert torch.equal(v, x["v"])


def write_rows(story: Story, tokens: list[int]) -> None:
    """What a fork reads stays; what is written back is as if nothing had been."""
    state = story.state
    state.fork_sequence(0, 1)
    last = len(tokens) - 1
    for layer, kind in enumerate(story.kinds):
        if kind == "recurrent":
            continue
        if kind == "latent":
            rows = state.debug_get_kv_mla(0, last, layer=layer)
            state.debug_set_kv(1, last, 2 * rows, layer=layer)
            assert torch.equal(state.debug_get_kv_mla(1, last, layer=layer), 2 * rows)
            continue
        start = 1 if kind == "cross" else last
        k, v = state.debug_get_kv(0, start, start + 1, layer=layer)
        state.debug_set_kv(1, start, 2 * k, 3 * v, layer=layer)
        for found, wanted in zip(state.debug_get_kv(1, start, start + 1, layer=layer), (2 * k, 3 * v), strict=True):
            assert torch.equal(found, wanted)
    state.check()
    read_rows(story, tokens)
    story.goes_on(0, tokens)


def cross_rows(story: Story, tokens: list[int]) -> None:
    """Set when the sequence was added; once only, also on forks."""
    layer = story.layer_of("cross")
    story.state.fork_sequence(0, 1)
    for seq_id in (0, 1):
        with pytest.raises(FailedPrecondition, match="already"):
            story.state.set_cross_kv(layer, seq_id, *encoded())
    story.goes_on(1, tokens)


def moved(story: Story, tokens: list[int]) -> None:
    other = Story(story.combination, page_size=5)
    assert other.state.get_layout_hash() == story.state.get_layout_hash()
    assert other.state.get_layout() == story.state.get_layout()
    metadata = json.loads(json.dumps(story.state.get_checkpoint_metadata(0)))
    exported = [story.state.export_page_group(0, layer) for layer in range(len(story.kinds))]
    planned = other.state.plan_import(metadata)
    assert [{name: (one.shape, one.dtype) for name, one in planned[layer].items()} for layer in sorted(planned)] == [
        {name: (tuple(one.shape), one.dtype) for name, one in group.items()} for group in exported
    ]
    assert 7 not in other.state.state.sequences
    other.state.prepare_import(7, metadata)
    for layer in reversed(range(len(story.kinds))):
        other.state.import_page_group(7, layer, story.state.export_page_group(0, layer))
    other.state.finish_import(7)
    other.goes_on(7, tokens)
    in_pieces(story, tokens)
    story.goes_on(0, tokens)
    unlike = Story(Combination(name="unlike", kinds=("latent",) if story.kinds != ("latent",) else ("full",)))
    assert unlike.state.get_layout_hash() != story.state.get_layout_hash()
    with pytest.raises(InvalidArgument, match="import: "):
        unlike.state.plan_import(metadata)


def in_pieces(story: Story, tokens: list[int]) -> None:
    """From what the sequence holds now, into a sequence that counts before its rows have come."""
    other, export = Story(story.combination, page_size=2), story.state.open_export(0)
    metadata = other.state.import_metadata(export.length)
    need, free = other.state.import_need(metadata), other.state.free_pages()
    other.state.prepare_import(0, metadata)
    assert need == [before - after for before, after in zip(free, other.state.free_pages(), strict=True)]
    rows = {layer: part["ranges"] for part in metadata["held"] for layer in part["layers"]}
    for layer, ranges in rows.items():
        for start, stop in ranges:
            for position in reversed(range(start, stop)):
                other.state.import_rows(0, layer, position, export.rows(layer, position, position + 1))
    assert other.state.pending_layers(0) == list(other.state.recurrent_ids)
    other.state.publish_import(0)
    assert other.state.sequence_length(0) == export.length
    for layer in other.state.recurrent_ids:
        other.state.import_page_group(0, layer, export.states(layer, export.length))
    other.state.finish_import(0)
    if "cross" in story.kinds:
        other.state.set_cross_kv(story.layer_of("cross"), 0, *encoded())
    other.goes_on(0, tokens)


def handed(story: Story, tokens: list[int]) -> None:
    """What it holds now, and three tokens that run while it is handed over."""
    other, new = Story(story.combination, page_size=5), [3, 1, 2]
    other.add(7)
    ours, theirs = channel_pair()
    length = story.state.sequence_length(0) + len(new)
    with pytest.raises(FailedPrecondition, match="neither being received nor sent"):
        story.state.disagg_cancel(0)
    story.state.disagg_mark_send(0, 0, other.state.disagg_prepare_recv(7, length, channel=theirs), ours)
    story.forward({0: new})
    while not other.state.disagg_receive(7, 0):
        assert other.state.sequence_length(7) == 0
    other.state.disagg_wait(7)
    story.state.disagg_wait(0)
    other.goes_on(7, tokens + new)
    story.goes_on(0, tokens + new)
    other.add(8)
    used = other.state.num_used_pages
    other.state.disagg_prepare_recv(8, length, channel=theirs)
    other.state.disagg_cancel(8)
    assert other.state.num_used_pages == used


def counts(story: Story, tokens: list[int]) -> None:
    state = story.state
    free = state.num_available_pages()
    story.add(1)
    story.forward({1: [1, 2]}, [-1, 0])
    assert (state.sequence_length(0), state.cached_length(0), state.pending_nodes(0)) == (10, 10, 0)
    assert (state.sequence_length(1), state.pending_nodes(1), state.total_sequence_length()) == (0, 2, 12)
    assert state.num_available_pages() < free
    assert state.missing_pages([0], [1]) == 0
    if story.combination.keeps_rows:
        assert state.missing_pages([0], [10_000]) > 0
    assert not state.empty()
    state.check()
    state.remove_sequence(1)
    assert state.num_available_pages() == free
    story.goes_on(0, tokens)


def kept_states(story: Story, tokens: list[int]) -> None:
    state = story.state
    assert state.checkpoints(0) == []
    if not story.combination.has("recurrent"):
        return
    state.checkpoint(0)
    assert state.checkpoints(0) == [10]
    run = tokens
    for token in (1, 2, 3, 4):  # more than the ring holds
        run = story.run(0, run, [token])
    if is_reachable(story, 0, 10):
        assert state.rewind_cost(0, 10) == 0
    torch.testing.assert_close(_state_at(story, 10), recurrent_state(tokens).float(), **FLOAT32)
    state.fork_sequence(0, 1)
    state.drop_checkpoint(0, 10)
    assert (state.checkpoints(0), state.checkpoints(1)) == ([], [10])
    if is_reachable(story, 1, 10):
        state.popn(1, 4)
        story.goes_on(1, tokens)
    story.goes_on(0, run)


def _state_at(story: Story, position: int | None) -> torch.Tensor:
    return story.state.debug_get(story.layer_of("recurrent"), 0, 0, position=position)


def recurrent_values(story: Story, tokens: list[int]) -> None:
    state, layer = story.state, story.layer_of("recurrent")
    torch.testing.assert_close(_state_at(story, None), recurrent_state(tokens).float(), **FLOAT32)
    data = torch.tensor([[1.0, -2.0, 3.0]]).double()
    story.begin(0, [7])
    before = state.get(layer, 0)
    torch.testing.assert_close(before[0], recurrent_state(tokens).float(), **FLOAT32)
    state.set(layer, 1, data)
    assert torch.equal(state.get(layer, 1), torch.zeros(1, 3).double())
    for each, kind in enumerate(story.kinds):
        story.attend(each, kind, [7])
    state.end_forward()
    assert torch.equal(state.debug_get(layer, 1, 0), data[0])
    state.fork_sequence(0, 1)
    state.debug_set(layer, 1, 1, 5 * data[0])
    assert torch.equal(state.debug_get(layer, 1, 1), 5 * data[0])
    assert torch.equal(state.debug_get(layer, 1, 0), data[0])
    story.goes_on(0, [*tokens, 7])


def goes_on(story: Story, tokens: list[int]) -> None:
    story.goes_on(0, tokens)


EXACT: dict[str, Callable[[Story, list[int]], None]] = {
    "clear": clear,
    "add_sequence": add,
    "remove_sequence": remove,
    "fork_sequence": fork,
    "popn": pop,
    "rewind_cost": pop,
    "reachable": pop,
    "checkpoint": kept_states,
    "checkpoints": kept_states,
    "drop_checkpoint": kept_states,
    "begin_forward": bracket,
    "end_forward": goes_on,
    "abort_forward": bracket,
    "get_query_positions": bracket,
    "enable_sliding_window_for_seq": window,
    "commit_accepted_token_tree_nodes": trees,
    "pending_nodes": trees,
    "attention_with_fused_qkv": goes_on,
    "append_kv": parts,
    "append_mla_kv": parts,
    "self_attention": parts,
    "cross_attention": parts,
    "merge": parts,
    "merge_attn_output_inplace": parts,
    "attention_with_shared_kv": shared,
    "set_cross_kv": cross_rows,
    "debug_get_kv": read_rows,
    "debug_get_kv_mla": read_rows,
    "debug_set_kv": write_rows,
    "linear_attention": goes_on,
    "get": recurrent_values,
    "set": recurrent_values,
    "debug_get": recurrent_values,
    "debug_set": recurrent_values,
    "get_layout": moved,
    "get_layout_hash": moved,
    "plan_import": moved,
    "get_checkpoint_metadata": moved,
    "export_page_group": moved,
    "open_export": moved,
    "import_metadata": moved,
    "import_need": moved,
    "import_rows": moved,
    "pending_layers": moved,
    "publish_import": moved,
    "prepare_import": moved,
    "import_page_group": moved,
    "finish_import": moved,
    "disagg_prepare_recv": handed,
    "disagg_mark_send": handed,
    "disagg_receive": handed,
    "disagg_wait": handed,
    "disagg_cancel": handed,
    "empty": counts,
    "num_available_pages": counts,
    "missing_pages": counts,
    "sequence_length": counts,
    "cached_length": counts,
    "total_sequence_length": counts,
    "check": counts,
}
"""What tries each verb where it works."""
