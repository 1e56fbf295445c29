"""Export and import of sequences that hold only some of their positions: windows of sequences and
of layers.
"""

from __future__ import annotations

import copy
import json
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from quire.contracts.attention import AttentionBackend
from quire.ops.attention import ReferenceAttention

from .oracle_values import Spec
from .pair import Pair, attention, refused, same_bits, windowed
from .test_exchange import _set, export, load
from .test_trees import SEVEN

SPECS: list[Spec] = [attention(), windowed(5), attention(kv_heads=1, value_dim=5, mode="inline"), windowed(9)]
Eviction = Literal["token", "forward"]


def sender(
    page_size: int = 4,
    window: int | None = 7,
    sink: int = 2,
    eviction: Eviction = "token",
    backend: AttentionBackend | None = None,
) -> Pair:
    """Sequence 0 of 24 tokens, slid; 1 is a fork of it at 23."""
    pair = Pair(SPECS, page_size=page_size, seed=3, backend=backend)
    pair.add(0)
    pair.window(0, window, sink, eviction)
    for count in (9, 14, 1):
        pair.append(0, count)
    pair.fork(0, 1, 23)
    return pair


@pytest.mark.product(8)
@pytest.mark.parametrize(("page_size", "other"), [(16, 5), (4, 16), (4, 4), (1, 3), (5, 2)])
@pytest.mark.parametrize(
    ("window", "sink", "eviction"), [(7, 2, "token"), (9, 0, "forward"), (6, 5, "token"), (None, 0, "token")]
)
def test_round_trip(window: int | None, sink: int, eviction: Eviction, page_size: int, other: int) -> None:
    # Whether pages lie side by side decides about sums of kernels, and is another matter in the
    # receiver.
    backend = ReferenceAttention() if page_size == other else None
    source = sender(page_size, window, sink, eviction, backend)
    receiver = Pair(SPECS, page_size=other, seed=9, backend=backend)
    receiver.add(7)
    receiver.append(7, 11)
    for seq_id in (0, 1):
        metadata, groups = export(source, seq_id)
        for layer, group in enumerate(groups):
            for name, expected in zip(("k", "v"), source.oracle.stored(seq_id, layer), strict=True):
                assert same_bits(group[name], expected)
        load(receiver, seq_id, json.loads(json.dumps(metadata)), groups)
        assert receiver.state.cached_length(seq_id) == source.state.cached_length(seq_id)
        # Nothing more is reachable than what was received.
        assert receiver.state.reachable(seq_id) == source.state.reachable(seq_id)
        again, same = export(receiver, seq_id)
        assert again == metadata
        assert all(same_bits(one[name], two[name]) for one, two in zip(groups, same, strict=True) for name in one)
    values = [source.random(layer, 3) for layer in range(4)]
    results: list[list[Tensor]] = []
    for pair in (source, receiver):
        pair.begin([0, 1], [1, 2])
        results.append([pair.layer(layer, values[layer]) for layer in range(4)])
        pair.end()
        pair.forward([1, 0], [7, 7], [SEVEN, SEVEN])
        pair.commit([0, 1], [3, -1])
        for _ in range(5):
            pair.forward([0, 1], [1, 1])
    if page_size == other:
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    receiver.finish()


def test_metadata_of_windows() -> None:
    pair = sender()
    metadata, _ = export(pair, 0)
    assert (metadata["window"], metadata["sink"], metadata["eviction"]) == (7, 2, "token")
    assert (metadata["length"], metadata["evicted"]) == (24, 17)
    # The last forward began at 23: windows begin at 19 (W - s = 5), and at 15 for the layer that
    # has its own.
    assert metadata["held"] == [
        {"layers": [0, 2], "ranges": [[0, 2], [16, 24]]},
        {"layers": [1], "ranges": [[16, 24]]},
        {"layers": [3], "ranges": [[16, 24]]},
    ]
    rows = [group["tensors"]["k"]["shape"][0] for group in metadata["groups"]]
    assert rows == [10, 8, 10, 8]
    assert [layer["kind"] for layer in metadata["layers"]] == ["full", "window", "full", "window"]
    assert [layer.get("window") for layer in metadata["layers"]][1::2] == [5, 9]


def test_a_window_that_has_not_slid_yet() -> None:
    source, receiver = Pair(SPECS, page_size=4), Pair(SPECS, page_size=16)
    source.add(0)
    source.append(0, 20)
    source.window(0, 8, 3)
    metadata, groups = export(source, 0)
    assert metadata["evicted"] == 0
    load(receiver, 4, metadata, groups)
    assert receiver.state.cached_length(4) == 20
    receiver.append(4)
    assert receiver.state.cached_length(4) == 8
    receiver.finish()


@pytest.mark.parametrize("other", [2, 3, 4, 16])
def test_a_window_of_one_token(other: int) -> None:
    """Nothing of the last page is held, and yet the next token goes there."""
    source, receiver = Pair([attention()], page_size=1), Pair([attention()], page_size=other)
    source.add(0)
    source.window(0, 1)
    source.append(0, 9)
    source.append(0, 2)
    source.fork(0, 1, 9)
    metadata, groups = export(source, 1)
    assert metadata["held"] == [{"layers": [0], "ranges": []}]
    load(receiver, 0, metadata, groups)
    receiver.append(0, 3)
    receiver.finish()


def test_pages_of_an_import_by_class() -> None:
    metadata, groups = export(sender(page_size=4), 0)
    needed = [3, 2, 2]
    for short in range(3):
        pair = Pair(SPECS, page_size=4, capacity=40)
        for pool, count in zip(pair.state.state.sequences.pools, needed, strict=True):
            taken = pool.num_free - count + (pool is pair.state.state.sequences.pools[short])
            pool.take(taken)
        before = [pool.num_free for pool in pair.state.state.sequences.pools]
        with pytest.raises(ResourceExhausted, match=f"needs {needed[short]} pages.*, {needed[short] - 1} free"):
            pair.state.prepare_import(0, metadata)
        assert [pool.num_free for pool in pair.state.state.sequences.pools] == before
    pair = Pair(SPECS, page_size=4, capacity=12, window_capacity=8)
    load(pair, 0, metadata, groups)
    assert [pool.num_free for pool in pair.state.state.sequences.pools] == [0, 0, 0]
    pair.finish()


def test_rows_that_were_not_received_cannot_be_read() -> None:
    metadata, groups = export(sender(page_size=4), 0)
    pair = Pair(SPECS, page_size=16)
    load(pair, 0, metadata, groups)
    # Two pages of 16 hold it all, but positions 2..15 never came.
    assert pair.state.reachable(0) == [range(1), range(20, 25)]
    for start, end in ((2, 3), (0, 3), (10, 20), (15, 24)):
        act = partial(pair.state.debug_get_kv, 0, start, end, layer=0)
        refused(pair, FailedPrecondition, act, "0..1", "16..23")
    rows = torch.zeros(1, 2, 8)
    refused(pair, FailedPrecondition, partial(pair.state.debug_set_kv, 0, 5, rows, rows, layer=0), "0..1", "16..23")
    for m in (1, 2, 16, 19):
        refused(pair, FailedPrecondition, partial(pair.state.popn, 0, 24 - m), f"position {m}")
    refused(pair, FailedPrecondition, partial(pair.state.enable_sliding_window_for_seq, 0, 30), "evicted")
    pair.pop(0, 24)
    pair.append(0, 3)
    pair.finish()


@pytest.mark.turns(6)
@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("window", None, ("window",)),
        ("window", 2, ("window 2", "sink 2")),
        ("window", -7, ("-7",)),
        ("window", 7.0, ("7.0",)),
        ("sink", 7, ("sink 7",)),
        ("sink", -1, ("-1",)),
        ("sink", 4, ("0..1",)),
        ("eviction", "never", ("never", "'forward' or 'token'")),
        ("evicted", 16, ("16", "17")),
        ("evicted", -1, ("-1",)),
        ("evicted", True, ("True",)),
        ("evicted", None, ("evicted",)),
        ("length", 25, ()),
        ("length", 23, ()),
        ("held.0", None, ("[0, 2]", "[1]", "[3]")),
        ("held.0.layers", [0], ("[0]", "[0, 2]")),
        ("held.0.ranges", [[0, 24]], ("10",)),
        ("held.0.ranges", [[0, 2], [21, 24]], ("21..23", "20..23")),
        ("held.0.ranges", [[16, 24]], ("16..23",)),
        ("held.0.ranges", [[0, 1], [15, 24]], ()),
        ("held.0.ranges", [[16, 24], [0, 2]], ()),
        ("held.0.ranges", [[0, 2], [10, 12], [18, 24]], ()),
        ("held.0.ranges", [[0, 2], [16, 20], [20, 24]], ()),
        ("held.0.ranges", [[0, 2, 4], [16, 24]], ()),
        ("held.0.ranges", "0-24", ()),
        ("held.1.ranges", [[21, 24], []], ()),
        ("held.1.ranges", [[21, 24]], ("21..23", "20..23")),
        ("held.1.ranges", [[17, 24]], ("8", "7")),
        ("groups.0.tensors.k.shape", [24, 2, 8], ("[24, 2, 8]", "[10, 2, 8]")),
        ("layers.1.window", 6, ("window 6", "5")),
        ("layers.1.kind", "full", ("'full'", "'window'")),
    ],
)
def test_metadata_that_does_not_fit(path: str, value: Any, words: tuple[str, ...]) -> None:
    metadata, groups = export(sender(), 0)
    given = copy.deepcopy(metadata)
    _set(path, value)(given)
    pair = Pair(SPECS, page_size=4)
    pair.add(0)
    pair.append(0, 3)
    refused(pair, InvalidArgument, partial(pair.state.prepare_import, 5, given), *words)
    load(pair, 5, metadata, groups)


def test_groups_of_another_class() -> None:
    metadata, groups = export(sender(), 0)
    pair = Pair(SPECS, page_size=4)
    pair.state.prepare_import(5, metadata)
    act = pair.state.import_page_group
    refused(pair, InvalidArgument, partial(act, 5, 0, groups[1]), "layer 0", "(8, 2, 8)", "(10, 2, 8)")
    refused(pair, InvalidArgument, partial(act, 5, 1, groups[0]), "layer 1", "(10, 2, 8)", "(8, 2, 8)")
    for layer in (3, 0, 2, 1):
        act(5, layer, groups[layer])
    pair.state.finish_import(5)
    pair.state.check()


def test_an_export_into_given_tensors_has_the_held_rows() -> None:
    pair = sender()
    expected = pair.state.export_page_group(0, 0)
    out = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    assert pair.state.export_page_group(0, 0, out) is out
    assert all(same_bits(out[name], expected[name]) for name in out)
    longer = {name: torch.zeros(24, *tensor.shape[1:]) for name, tensor in expected.items()}
    refused(pair, InvalidArgument, partial(pair.state.export_page_group, 0, 0, longer), "(24, 2, 8)", "(10, 2, 8)")


def test_what_layers_gave_up_is_no_matter_of_the_sequence() -> None:
    """Its window may be set, replaced and dropped, here and where it is imported, until it has
    evicted something itself.
    """
    source, receiver = Pair(SPECS, page_size=4), Pair(SPECS, page_size=5)
    source.add(0)
    source.append(0, 20)
    source.append(0, 1)
    source.window(0, 30, 3)
    load(receiver, 0, *export(source, 0))
    for pair in (source, receiver):
        pair.window(0, None)
        pair.window(0, 24, 1)
        pair.append(0, 2)
        pair.window(0, 23, 2)
        pair.append(0, 1)
        pair.append(0, 4)
        refused(pair, FailedPrecondition, partial(pair.state.enable_sliding_window_for_seq, 0, None), "evicted")
        pair.finish()
