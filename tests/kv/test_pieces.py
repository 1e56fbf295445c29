"""Sequences that are read and made in pieces: exports that threads read, imports behind pages of
another sequence, imports that count before all has come.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.base.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unsupported,
)
from quire.contracts.kv_state import Export
from quire.contracts.layers import FullAttention, WindowedAttention
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kv import storage
from quire.kv.contract import ContractState
from quire.kv.formats.plain import PlainFormat
from quire.kv.rule_table import COMBINATIONS, Combination

from .faces import contract
from .pair import attention, num_columns, same_bits, windowed
from .pieces import Pieces
from .rule_stories import Story, encoded
from .snapshots import snapshot

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35]
"""What ``Story.begun`` holds."""
each_combination = pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda one: one.name)


def refused(state: ContractState, kind: type[QuireError], call: Callable[[], object], *words: str) -> None:
    """This class, these words, no trace."""
    before = snapshot(state)
    with pytest.raises(kind) as raised:
        call()
    assert type(raised.value) is kind
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert snapshot(state) == before


def same_groups(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(same_bits(one[name], other[name]) for name in one)


def rows_of(metadata: dict[str, Any]) -> dict[int, list[range]]:
    """The rows that metadata promise, by layer."""
    return {layer: [range(*part) for part in one["ranges"]] for one in metadata["held"] for layer in one["layers"]}


def pieces(parts: list[range], rng: random.Random) -> list[range]:
    """The same rows, cut anywhere, in any order."""
    found = []
    for part in parts:
        cuts = sorted(rng.sample(range(part.start + 1, part.stop), rng.randint(0, len(part) - 1)))
        found += [range(low, high) for low, high in zip([part.start, *cuts], [*cuts, part.stop], strict=True)]
    rng.shuffle(found)
    return found


def bring(
    state: ContractState, seq_id: int, layer: int, export: Export, parts: list[range], rng: random.Random
) -> None:
    """All that one layer lacks."""
    if layer in state.recurrent_ids:
        state.import_page_group(seq_id, layer, export.states(layer, export.length))
        return
    for part in pieces(parts, rng):
        if rng.random() < 0.5:
            state.import_rows(seq_id, layer, part.start, export.rows(layer, part.start, part.stop))
        else:
            split = sorted(pieces([part], rng), key=lambda one: one.start)
            several = Pieces([export.rows(layer, one.start, one.stop) for one in split])
            state.import_rows(seq_id, layer, part.start, several)


@pytest.mark.turns(3)
@each_combination
@pytest.mark.parametrize("shared", [0, 4, 8])
@pytest.mark.parametrize("early", [False, True])
def test_pieces_make_what_an_import_makes(combination: Combination, shared: int, early: bool) -> None:
    """To the bit, whatever comes first, and also when the parent is gone."""
    story, rng = Story(combination), random.Random(shared)
    story.begun()
    other = Story(combination)
    state = other.state
    state.prepare_import(1, story.state.get_checkpoint_metadata(0))
    groups = {layer: story.state.export_page_group(0, layer) for layer in range(len(other.kinds))}
    for layer, group in groups.items():
        state.import_page_group(1, layer, group)
    state.finish_import(1)
    export = story.state.open_export(0)
    metadata, free = state.import_metadata(len(TOKENS)), state.free_pages()
    state.prepare_import(2, metadata, parent=1, shared=shared)
    taken = [before - after for before, after in zip(free, state.free_pages(), strict=True)]
    assert taken == state.import_need(metadata, shared=shared)
    keeping = state.geometry.keeping_layers
    assert sum(state.import_need(metadata)) - sum(taken) == (shared // 4 if keeping else 0)
    rows = {
        layer: [range(max(part.start, shared if layer in keeping else 0), part.stop) for part in parts]
        for layer, parts in rows_of(metadata).items()
    }
    assert state.pending_layers(2) == sorted([*rows, *state.recurrent_ids])
    if early:
        state.publish_import(2)
    layers = [*rows, *state.recurrent_ids]
    rng.shuffle(layers)
    for layer in layers:
        bring(state, 2, layer, export, rows.get(layer, []), rng)
        state.check()
    state.finish_import(2)
    assert state.pending_layers(2) == []
    for layer, parts in rows.items():
        for part in parts:
            again = state.open_export(2).rows(layer, part.start, part.stop)
            assert same_groups(again, state.open_export(1).rows(layer, part.start, part.stop))
    for layer in state.recurrent_ids:
        assert same_groups(state.export_page_group(2, layer), groups[layer])
    state.remove_sequence(1)
    if "cross" in other.kinds:
        state.set_cross_kv(other.layer_of("cross"), 2, *encoded())
    other.goes_on(2, TOKENS)
    state.remove_sequence(2)
    assert state.empty()


def test_rows_go_where_their_pages_are() -> None:
    """Also if these do not lie one behind the other."""
    story, other = (Story(Combination(name="both", kinds=("full", "latent"))) for _ in range(2))
    story.begun()
    for seq_id in (10, 11, 12, 13):
        other.add(seq_id)
        other.run(seq_id, [], TOKENS[:4])
    for seq_id in (11, 13, 10, 12):
        other.state.remove_sequence(seq_id)
    state, export = other.state, story.state.open_export(0)
    state.prepare_import(1, state.import_metadata(10))
    for layer in (0, 1):
        state.import_rows(1, layer, 0, Pieces([export.rows(layer, 0, 1), export.rows(layer, 1, 10)]))
    state.finish_import(1)
    for layer in (0, 1):
        assert same_groups(state.open_export(1).rows(layer, 0, 10), export.rows(layer, 0, 10))


def test_each_piece_is_checked_right_before_it_is_written() -> None:
    story, other = (Story(Combination(name="full", kinds=("full",))) for _ in range(2))
    story.begun()
    state, export = other.state, story.state.open_export(0)
    state.prepare_import(1, state.import_metadata(10))
    storage, checked = state.state.parts.paged.classes[0].storage, list[tuple[int, int]]()

    def check(number: int) -> None:
        checked.append((number, int(storage.layers[0].k.flatten(1).any(1).sum())))
        if number == 1 and len(checked) == 2:
            raise DataLoss("damaged")

    pieces = Pieces([export.rows(0, 0, 3), export.rows(0, 3, 4), export.rows(0, 4, 10)], check)
    with pytest.raises(DataLoss, match="damaged"):
        state.import_rows(1, 0, 0, pieces)
    assert checked == [(0, 0), (1, 3)]
    assert state.pending_layers(1) == [0]
    state.import_rows(1, 0, 0, pieces)
    assert checked[2:] == [(0, 3), (1, 3), (2, 4)]
    state.finish_import(1)
    assert same_groups(state.open_export(1).rows(0, 0, 10), export.rows(0, 0, 10))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("parallel", [0, 1 << 30])
def test_rows_are_copied_to_the_bit(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, parallel: int) -> None:
    """In one thread and in several, of any strides."""
    monkeypatch.setattr(storage, "IN_PARALLEL", parallel)
    spec = FullAttention(num_heads=4, num_kv_heads=2, head_dim=3, value_dim=5)
    pool = storage.PagedStorage([spec, spec], 12, PlainFormat(dtype), torch.device("cpu"))
    k_NHD, v_NHD = torch.randn(6, 2, 3).to(dtype), torch.randn(2, 6, 5).to(dtype).transpose(0, 1)
    pool.write_run(1, 4, k_NHD, v_NHD)
    found = pool.read(1, np.array([9, 4, 11]))
    assert same_bits(found.k[:2], k_NHD[[5, 0]])
    assert same_bits(found.v[:2], v_NHD[[5, 0]])
    assert not found.k[2].any()
    assert not any(part.any() for part in pool.layers[0])
    assert pool.read(1, np.empty(0, dtype=np.int64)).v.shape == (0, 2, 5)
    found.k.fill_(7)
    assert same_bits(pool.layers[1].k[4:10], k_NHD)
    for start, rows in ((7, k_NHD), (-1, k_NHD), (0, k_NHD[:, :1])):
        with pytest.raises(InvalidArgument, match="do not fit"):
            storage.copy_rows(pool.layers[1].k, rows, start)


def test_nothing_comes_of_layers_whose_rows_are_all_shared() -> None:
    """The next token takes a page of its own."""
    story = Story(Combination(name="both", kinds=("full", "window")))
    story.add(0)
    story.run(0, [], TOKENS[:8])
    state, export = story.state, story.state.open_export(0)
    state.prepare_import(1, state.import_metadata(8), parent=0, shared=8)
    assert state.pending_layers(1) == [1]
    state.publish_import(1)
    bring(state, 1, 1, export, [range(4, 8)], random.Random(0))
    state.finish_import(1)
    story.goes_on(0, TOKENS[:8])
    story.goes_on(1, TOKENS[:8])


@each_combination
def test_a_forward_waits_for_layers_or_refuses_them(combination: Combination) -> None:
    """Each layer in its turn; a layer that has not come stops the forward, which leaves no trace
    in what comes later.
    """
    story, rng = Story(combination), random.Random(1)
    story.begun()
    export, state = story.state.open_export(0), story.state
    if "cross" in story.kinds:
        metadata = state.get_checkpoint_metadata(0, checksums=False)
    else:
        metadata = state.import_metadata(len(TOKENS))
    state.prepare_import(1, metadata)
    state.publish_import(1)
    rows = rows_of(metadata)
    for missing in range(len(story.kinds)):
        story.begin(1, [8])
        for layer, kind in enumerate(story.kinds[:missing]):
            story.attend(layer, kind, [8])
        refusal = partial(story.attend, missing, story.kinds[missing], [8])
        refused(state, FailedPrecondition, refusal, f"layer {missing} of sequence 1", "has not come")
        if missing in state.recurrent_ids:
            refused(state, FailedPrecondition, lambda missing=missing: state.get(missing, 0), "has not come")  # type: ignore[misc]
            refused(state, FailedPrecondition, lambda: state.end_forward(skipped=range(len(story.kinds))), "not come")
        # It is written while the forward is open, which may go on.
        if story.kinds[missing] == "cross":
            state.import_page_group(1, missing, dict(zip("kv", encoded(), strict=True)))
        else:
            bring(state, 1, missing, export, rows.get(missing, []), rng)
        story.attend(missing, story.kinds[missing], [8])
        state.abort_forward()
        state.check()
    assert state.pending_layers(1) == []
    found = story.forward({1: [8]})
    story.check_row(found, 0, [*TOKENS, 8])
    state.finish_import(1)
    story.goes_on(1, [*TOKENS, 8])
    story.goes_on(0, TOKENS)


@each_combination
def test_a_pass_calls_whoever_waits_for_a_layer(combination: Combination) -> None:
    story, rng = Story(combination), random.Random(2)
    story.begun()
    export, state = story.state.open_export(0), story.state
    metadata = state.get_checkpoint_metadata(0, checksums=False)
    state.prepare_import(1, metadata)
    state.publish_import(1)
    called: list[int] = []

    def wait(layer: int) -> None:
        called.append(layer)
        if story.kinds[layer] == "cross":
            state.import_page_group(1, layer, dict(zip("kv", encoded(), strict=True)))
        else:
            bring(state, 1, layer, export, rows_of(metadata).get(layer, []), rng)

    state.begin_forward([0, 1], [1, 2])
    state.open_pass().wait_for_layers(wait)
    found = [story.attend(layer, kind, [7, 8, 9]) for layer, kind in enumerate(story.kinds)]
    state.end_forward()
    assert called == list(range(len(story.kinds)))
    story.check_row(found, 0, [*TOKENS, 7])
    story.check_row(found, 2, [*TOKENS, 8, 9])


def test_what_an_import_under_way_refuses() -> None:
    story = Story(Combination(name="all", kinds=("full", "window", "recurrent")))
    story.begun()
    state = story.state
    export, metadata = state.open_export(0), state.import_metadata(len(TOKENS))
    state.prepare_import(1, metadata)
    some = export.rows(0, 0, 2)
    assert not state.sequence_length(1)
    story.begin(0, [7])
    for call in (
        partial(state.import_rows, 1, 0, 0, some),
        partial(state.import_page_group, 1, 2, export.states(2, len(TOKENS))),
        partial(state.publish_import, 1),
    ):
        refused(state, FailedPrecondition, call, "while a forward is open")
    state.abort_forward()
    refused(state, FailedPrecondition, lambda: state.begin_forward([1], [1]), "being imported")
    state.publish_import(1)
    refused(state, FailedPrecondition, lambda: state.publish_import(1), "count already")
    state.import_rows(1, 0, 0, some)
    for kind, call, word in (
        (FailedPrecondition, partial(state.import_rows, 1, 0, 1, some), "missing: 2..9"),
        (FailedPrecondition, partial(state.import_page_group, 1, 0, export.rows(0, 0, 10)), "at least in part"),
        (InvalidArgument, partial(state.import_rows, 1, 0, 9, some), "9..10"),
        (InvalidArgument, partial(state.import_rows, 1, 1, 5, some), "6..9"),
        (InvalidArgument, partial(state.import_rows, 1, 0, -1, some), "-1"),
        (InvalidArgument, partial(state.import_rows, 1, 0, 2, {**some, "k": some["k"][:1]}), "of layer 0 is"),
        (InvalidArgument, partial(state.import_rows, 1, 0, 2, {**some, "k": some["k"].float()}), "float32"),
        (InvalidArgument, partial(state.import_rows, 1, 0, 2, {"k": some["k"]}), "['k', 'v'] expected"),
        (InvalidArgument, partial(state.import_rows, 1, 0, 2, {n: x[:0] for n, x in some.items()}), "one or more"),
        (InvalidArgument, partial(state.import_rows, 1, 0, 2, Pieces([{"k": some["k"]}])), "['k', 'v'] expected"),
        (InvalidArgument, partial(state.import_rows, 1, 0, 8, Pieces([some, some])), "8..11"),
        (InvalidArgument, partial(state.import_rows, 1, 0, 2, [some]), "RowPieces"),
        (InvalidArgument, partial(state.import_rows, 1, 7, 2, some), "layer 7"),
        (Unsupported, partial(state.import_rows, 1, 2, 2, some), "'recurrent'"),
        (NotFound, partial(state.import_rows, 5, 0, 2, some), "5"),
        (FailedPrecondition, partial(state.import_rows, 0, 0, 2, some), "not being imported"),
        (NotFound, partial(state.publish_import, 5), "5"),
        (NotFound, partial(state.pending_layers, 5), "5"),
        (FailedPrecondition, partial(state.publish_import, 0), "not being imported"),
        (FailedPrecondition, partial(state.fork_sequence, 1, 2), "being imported"),
        (FailedPrecondition, partial(state.popn, 1, 1), "being imported"),
        (FailedPrecondition, partial(state.rewind_cost, 1, 1), "being imported"),
        (FailedPrecondition, partial(state.checkpoint, 1), "being imported"),
        (FailedPrecondition, partial(state.open_export, 1), "being imported"),
        (FailedPrecondition, partial(state.get_checkpoint_metadata, 1), "being imported"),
        (FailedPrecondition, partial(state.export_page_group, 1, 0), "being imported"),
        (FailedPrecondition, partial(state.debug_get_kv, 1, layer=0), "being imported"),
        (FailedPrecondition, partial(state.debug_get, 2, 0, 1), "being imported"),
        (FailedPrecondition, partial(state.enable_sliding_window_for_seq, 1, 4), "being imported"),
        (FailedPrecondition, partial(state.prepare_import, 2, metadata, parent=1, shared=4), "being imported"),
        (FailedPrecondition, partial(state.finish_import, 1), "[0, 1, 2]"),
    ):
        refused(state, kind, call, word)
    state.begin_forward([0], [1])
    refused(state, FailedPrecondition, lambda: state.remove_sequence(1), "while a forward is open")
    refused(state, FailedPrecondition, lambda: state.finish_import(1), "while a forward is open")
    state.import_rows(1, 0, 2, export.rows(0, 2, 10))
    state.abort_forward()
    state.remove_sequence(1)
    story.goes_on(0, TOKENS)
    state.remove_sequence(0)
    assert state.empty()


def test_what_cannot_be_shared() -> None:
    story = Story(Combination(name="both", kinds=("full", "window")))
    story.begun()
    state = story.state
    metadata, summed = state.import_metadata(len(TOKENS)), state.get_checkpoint_metadata(0)
    for kind, parent, shared, given, word in (
        (InvalidArgument, 0, 3, metadata, "a multiple of 4 in 0..10"),
        (InvalidArgument, 0, -4, metadata, "a multiple of 4 in 0..10"),
        (InvalidArgument, 0, 12, metadata, "a multiple of 4 in 0..10"),
        (InvalidArgument, None, 4, metadata, "no parent"),
        (InvalidArgument, 0, 12, state.import_metadata(13), "whose length is 10"),
        (InvalidArgument, 0, 4, summed, "checksums of all rows of layers [0]"),
        (NotFound, 5, 4, metadata, "5"),
        (NotFound, 5, 0, metadata, "5"),
    ):
        call = partial(state.prepare_import, 9, given, parent=parent, shared=shared)
        refused(state, kind, call, word)
    refused(state, InvalidArgument, lambda: state.import_need(metadata, shared=3), "a multiple of 4")
    refused(state, InvalidArgument, lambda: state.import_metadata(-1), "-1")
    refused(state, InvalidArgument, lambda: state.import_metadata(3, kept=[2]), "kept_recurrent_positions")
    # Checksums of whole layers are no reason where nothing is shared, unless rows come in pieces.
    state.prepare_import(9, summed, parent=0)
    rows = state.open_export(0).rows(0, 0, 10)
    refused(state, FailedPrecondition, lambda: state.import_rows(9, 0, 0, rows), "checksums of all rows of layer 0")
    state.import_page_group(9, 0, rows)
    state.remove_sequence(9)
    story.forward({0: [1]}, [-1])
    call = partial(state.prepare_import, 9, metadata, parent=0, shared=4)
    refused(state, FailedPrecondition, call, "uncommitted")
    state.commit_accepted_token_tree_nodes([0], [0])
    state.enable_sliding_window_for_seq(0, 4)
    story.forward({0: [1]})
    refused(state, FailedPrecondition, call, "evicted")
    # And what a window has let go of is not in the metadata.
    lacking = state.get_checkpoint_metadata(0, checksums=False)
    refused(state, InvalidArgument, partial(state.import_need, lacking, shared=4), "hold positions")
    story.add(1)
    state.enable_sliding_window_for_seq(1, 1)
    story.forward({1: TOKENS[:8]})
    story.begin(1, [1])
    state.abort_forward()
    nothing = state.get_checkpoint_metadata(1, checksums=False)
    assert nothing["held"][0]["ranges"] == []
    refused(state, InvalidArgument, partial(state.import_need, nothing, shared=8), "hold positions nothing")


def test_room_is_looked_for_before_anything_is_taken() -> None:
    """Of every pool; pages that are shared are not needed."""
    specs = [attention(), windowed(3)]
    state = contract(specs, capacity=24, window_capacity=12, page_size=4, backend=SdpaAttention())
    state.add_sequence(0)
    append(state, specs, 0, 8)
    append(state, specs, 0, 2)
    metadata = state.import_metadata(16)
    assert state.import_need(metadata) == [4, 1]
    assert state.import_need(metadata, shared=8) == [2, 1]
    assert state.free_pages() == [3, 1]
    refused(state, ResourceExhausted, lambda: state.prepare_import(1, metadata), "needs 4 pages, 3 free")
    state.prepare_import(1, metadata, parent=0, shared=8)
    assert state.free_pages() == [1, 0]
    assert state.sequence_pages(1) == (5, 2)
    refused(state, ResourceExhausted, lambda: state.prepare_import(2, metadata, parent=0, shared=8), "2 pages, 1 free")
    state.check()
    state.remove_sequence(0)
    assert state.sequence_pages(1) == (5, 0)


def append(state: ContractState, specs: list[Any], seq_id: int, count: int, value: float | None = None) -> None:
    state.begin_forward([seq_id], [count])
    for layer, spec in enumerate(specs):
        given = (
            torch.randn(count, num_columns(spec)) if value is None else torch.full((count, num_columns(spec)), value)
        )
        state.attention_with_fused_qkv(layer, given)
    state.end_forward()


@pytest.mark.product(2)
@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_metadata_name_exactly_what_goes_on(window: int, page_size: int) -> None:
    """One row fewer and the sequence could not go on; with these it can, from its length on."""
    specs: list[FullAttention | WindowedAttention] = [attention(), windowed(window)]
    state = contract(specs, capacity=64, page_size=page_size, backend=SdpaAttention())
    for length in range(9):
        metadata = state.import_metadata(length)
        full, low = metadata["held"][0]["ranges"], max(0, length + 1 - window)
        assert full == ([[0, length]] if length else [])
        assert metadata["held"][1]["ranges"] == ([[low, length]] if low < length else [])
        for one in metadata["held"]:
            if one["ranges"]:
                fewer = [
                    {**other, "ranges": [[one["ranges"][0][0] + 1, length]]} if other is one else other
                    for other in metadata["held"]
                ]
                refused(state, InvalidArgument, partial(state.plan_import, {**metadata, "held": fewer}))
        state.prepare_import(0, metadata)
        state.publish_import(0)
        assert length in set().union(*state.reachable(0))
        for layer, group in state.plan_import(metadata).items():
            state.import_page_group(0, layer, {name: torch.randn(one.shape) for name, one in group.items()})
        state.finish_import(0)
        append(state, specs, 0, 3)
        state.check()
        state.remove_sequence(0)


@pytest.mark.parametrize("how", ["window", "session"])
def test_windows_keep_pages_that_are_still_written(how: str) -> None:
    """A page that has left its window would be another sequence's by the time the row comes."""
    specs = [windowed(3)] if how == "window" else [attention()]
    state = contract(specs, capacity=64, page_size=2, backend=SdpaAttention())
    state.add_sequence(0)
    if how == "session":
        state.enable_sliding_window_for_seq(0, 4, 1)
    append(state, specs, 0, 12)
    metadata, export = state.get_checkpoint_metadata(0, checksums=False), state.open_export(0)
    held = export.held(0)
    assert sum(map(len, held)) > 4
    state.prepare_import(1, metadata)
    state.publish_import(1)
    pages = state.sequence_pages(1).held
    state.begin_forward([1], [1])
    state.abort_forward()
    assert state.sequence_pages(1).held == pages
    bring(state, 1, 0, export, held, random.Random(3))
    state.check()
    state.finish_import(1)
    assert same_groups(state.export_page_group(1, 0), state.export_page_group(0, 0))
    append(state, specs, 1, 1)
    state.check()
    assert state.sequence_pages(1).held < pages + 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_old_values_of_pages_are_not_read(bad: float) -> None:
    """Pages that others have left, filled in pieces, in part only where a window sees no more."""
    specs = [attention(rotary_dim=0), windowed(3, rotary_dim=0)]
    outs = []
    for value in (0.0, bad):
        torch.manual_seed(0)
        state = contract(specs, capacity=32, page_size=4, backend=SdpaAttention())
        state.add_sequence(7)
        append(state, specs, 7, 10)
        export = state.open_export(7)
        groups = [{part: export.rows(layer, part.start, part.stop) for part in export.held(layer)} for layer in (0, 1)]
        state.remove_sequence(7)
        state.add_sequence(0)
        append(state, specs, 0, 32, value)
        state.remove_sequence(0)
        state.prepare_import(1, state.import_metadata(10))
        state.publish_import(1)
        state.begin_forward([1], [2])
        found = []
        for layer, spec in enumerate(specs):
            (part, group), low = *groups[layer].items(), 8 if layer else 0
            rows = {name: tensor[low - part.start :] for name, tensor in group.items()}
            state.import_rows(1, layer, low, rows)
            found.append(state.attention_with_fused_qkv(layer, torch.ones(2, num_columns(spec))))
        state.end_forward()
        outs.append(found)
    for one, other in zip(*outs, strict=True):
        assert same_bits(one, other)


def test_an_export_names_the_pages_of_its_time() -> None:
    """A page that splits is still where it was, as long as a sequence holds it."""
    state, specs = contract([attention()], capacity=32, page_size=4, backend=SdpaAttention()), [attention()]
    state.add_sequence(0)
    append(state, specs, 0, 6)
    state.fork_sequence(0, 1)
    export, before = state.open_export(0), state.export_page_group(0, 0)
    append(state, specs, 0, 1)
    state.debug_set_kv(0, 0, torch.ones(6, 2, 8), torch.ones(6, 2, 8), layer=0)
    append(state, specs, 0, 9)
    assert same_groups(export.rows(0, 0, 6), before)
    assert (export.length, export.held(0), export.positions) == (6, [range(6)], [])
    for start, stop in ((0, 7), (-1, 2), (3, 3), (4, 3)):
        refused(state, InvalidArgument, partial(export.rows, 0, start, stop), "a range of 0..5")
    refused(state, InvalidArgument, lambda: export.rows(3, 0, 1), "layer 3")
    refused(state, Unsupported, lambda: export.states(0, 6), "layer 0")


def test_an_export_has_checkpoints_and_no_rings() -> None:
    """The ring may be given up, and may have another state at the position of a checkpoint."""
    story = Story(Combination(name="recurrent", kinds=("recurrent",)))
    story.begun()
    state = story.state
    state.checkpoint(0)
    kept = state.debug_get(0, 1, 0)
    state.debug_set(0, 1, 0, kept + 1)
    story.run(0, TOKENS, [7])
    story.run(0, [*TOKENS, 7], [8])
    export = state.open_export(0)
    assert export.positions == [10, 12]
    assert state.kept_positions(0) == [0, 10, 11, 12]
    assert torch.equal(export.states(0, 10)["state.1"], kept)
    refused(state, InvalidArgument, lambda: export.states(0, 11), "[10, 12]")
    refused(state, InvalidArgument, lambda: export.states(1, 10), "layer 1")
    refused(state, Unsupported, lambda: export.rows(0, 0, 1), "'recurrent'")
    refused(state, Unsupported, lambda: export.held(0), "'recurrent'")


# -- threads ---------------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Iterator[Callable[[Callable[[], None]], threading.Thread]]:
    """Starts threads, and says what went wrong in them."""
    started: list[threading.Thread] = []
    errors: list[BaseException] = []

    def start(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        started.append(threading.Thread(target=run, daemon=True))
        started[-1].start()
        return started[-1]

    yield start
    for thread in started:
        thread.join(20)
        assert not thread.is_alive()
    assert not errors, errors


@pytest.mark.turns(4)
@pytest.mark.parametrize("combination", ["full", "window", "latent + recurrent", "full + window + latent"])
def test_an_export_is_read_while_others_write(
    combination: str, threads: Callable[[Callable[[], None]], threading.Thread]
) -> None:
    """Whoever shares its pages runs, goes back, is overwritten and removed meanwhile."""
    story = Story(next(one for one in COMBINATIONS if one.name == combination))
    tokens, state = story.begun(), story.state
    state.fork_sequence(0, 1)
    export, over = state.open_export(1), threading.Event()

    def read() -> list[dict[str, Tensor]]:
        found = []
        for layer in state.geometry.layer_ids:
            found += [export.rows(layer, part.start, part.stop) for part in export.held(layer)]
        return [*found, *(export.states(layer, len(TOKENS)) for layer in state.recurrent_ids)]

    first, reads = read(), []

    def keep_reading() -> None:
        while not over.is_set():
            assert all(same_groups(one, other) for one, other in zip(first, read(), strict=True))
            reads.append(1)

    threads(keep_reading)
    try:
        for turn in range(12):
            tokens = story.run(0, tokens, [turn, 7, 8])
            state.fork_sequence(0, 2)
            story.goes_on(2, tokens)
            state.remove_sequence(2)
        state.remove_sequence(0)
        story.add(3)
        story.goes_on(3, [])
    finally:
        over.set()
    assert reads


@pytest.mark.turns(6)
@each_combination
def test_rows_come_while_others_change(
    combination: Combination, threads: Callable[[Callable[[], None]], threading.Thread]
) -> None:
    """Pages are taken, split, given back and zeroed beside those that are being written."""
    story, rng = Story(combination), random.Random(5)
    tokens, state = story.begun(), story.state
    state.fork_sequence(0, 1)
    export, metadata = state.open_export(1), state.import_metadata(len(TOKENS))
    rows, turns = rows_of(metadata), 0
    for number in range(4):
        state.prepare_import(9, metadata, parent=1, shared=4 * (number % 3))
        state.publish_import(9)
        expected = {layer: list(parts) for layer, parts in state.state.parts.imports[9].rows.items()}

        def load() -> None:
            for layer in reversed(state.pending_layers(9)):
                bring(state, 9, layer, export, expected.get(layer, []), rng)  # noqa: B023

        loader = threads(load)
        while loader.is_alive() or turns < 4 * number:
            turns += 1
            tokens = story.run(0, tokens, [turns % 7, 8])
            state.fork_sequence(0, 2)
            story.goes_on(2, tokens)
            state.remove_sequence(2)
            if len(tokens) > 60:
                state.remove_sequence(0)
                tokens = story.begun()
        state.finish_import(9)
        for layer, parts in rows.items():
            for part in parts:
                given = (state.open_export(seq).rows(layer, part.start, part.stop) for seq in (1, 9))
                assert same_groups(*given)
        if "cross" in story.kinds:
            state.set_cross_kv(story.layer_of("cross"), 9, *encoded())
        story.goes_on(9, TOKENS)
        state.remove_sequence(9)


def test_pages_stay_while_a_row_is_written(
    monkeypatch: pytest.MonkeyPatch, threads: Callable[[Callable[[], None]], threading.Thread]
) -> None:
    """Removing the sequence waits for the row under way; the next one finds no import."""
    state = contract([attention()], capacity=32, page_size=4, backend=SdpaAttention())
    rows = {"k": torch.ones(2, 2, 8), "v": torch.ones(2, 2, 8)}
    writing, go_on, removed = threading.Event(), threading.Event(), threading.Event()
    storage, order = state.state.parts.paged.classes[0].storage, list[str]()
    write = type(storage).put_run

    def slowly(*args: Any) -> None:
        writing.set()
        assert go_on.wait(10)
        write(storage, *args)
        order.append("written")

    monkeypatch.setattr(storage, "put_run", slowly)

    def remove() -> None:
        state.remove_sequence(1)
        order.append("removed")
        removed.set()

    state.prepare_import(1, state.import_metadata(8))
    state.publish_import(1)
    threads(partial(state.import_rows, 1, 0, 0, rows))
    assert writing.wait(10)
    threads(remove)
    assert not removed.wait(0.05)
    assert state.has_sequence(1)
    go_on.set()
    assert removed.wait(10)
    assert order == ["written", "removed"]
    refused(state, NotFound, lambda: state.import_rows(1, 0, 2, rows))
    assert state.empty()


def test_an_import_that_has_begun_anew_takes_no_rows_of_the_old_one() -> None:
    """Between looking it up and taking its lock."""
    state = contract([attention()], capacity=32, page_size=4, backend=SdpaAttention())
    rows = {"k": torch.ones(2, 2, 8), "v": torch.ones(2, 2, 8)}
    state.prepare_import(1, state.import_metadata(8))

    class Meanwhile:
        def __enter__(self) -> None:
            state.state.parts.imports.pop(1)

        def __exit__(self, *error: object) -> None: ...

    state.state.parts.imports[1].lock = Meanwhile()  # type: ignore[assignment]
    with pytest.raises(FailedPrecondition, match="not being imported"):
        state.import_rows(1, 0, 0, rows)
