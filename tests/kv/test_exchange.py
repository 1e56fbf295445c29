"""Export and import: every sequence comes back to the bit, and whatever does not fit is refused by
name.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.base.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, QuireError, ResourceExhausted
from quire.contracts.layers import FullAttention, RopeSpec
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kv.contract import ContractState
from quire.kv.exchange import FORMAT_VERSION
from quire.ops.attention import ReferenceAttention

from .faces import contract
from .oracle_exchange import Export
from .pair import Pair, attention, refused, same_bits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SPECS = [attention(), attention(kv_heads=1, value_dim=5)]


def source(dtype: torch.dtype = torch.float32, page_size: int = 16) -> Pair:
    """Sequence 0 of 40 tokens, forked at 37 into sequence 1, which goes on to 43."""
    pair = Pair(SPECS, dtype=dtype, page_size=page_size, seed=4)
    pair.add(0)
    pair.append(0, 40)
    pair.fork(0, 1, 37)
    pair.append(1, 6)
    return pair


def export(pair: Pair, seq_id: int) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
    metadata = pair.state.get_checkpoint_metadata(seq_id)
    expected = pair.oracle.export(seq_id).metadata(pair.oracle.classes)
    assert {name: metadata[name] for name in expected} == expected
    return metadata, [pair.state.export_page_group(seq_id, layer) for layer in range(len(pair.specs))]


def load(pair: Pair, seq_id: int, metadata: dict[str, Any], groups: Sequence[dict[str, Tensor]]) -> None:
    """Into a pair, last layer first."""
    pair.state.prepare_import(seq_id, metadata)
    pair.oracle.prepare_import(seq_id, Export.read(metadata))
    for layer in reversed(range(len(groups))):
        assert pair.state.sequence_length(seq_id) == 0
        pair.state.import_page_group(seq_id, layer, groups[layer])
        pair.oracle.import_group(seq_id, layer, groups[layer]["k"], groups[layer]["v"])
    pair.state.finish_import(seq_id)
    pair.oracle.finish_import(seq_id)
    pair.compare()


@pytest.mark.turns(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("page_size", "other"), [(16, 5), (5, 16), (4, 4), (1, 3)])
@pytest.mark.parametrize("seq_id", [0, 1])
def test_round_trip(dtype: torch.dtype, page_size: int, other: int, seq_id: int) -> None:
    sender = source(dtype, page_size)
    metadata, groups = export(sender, seq_id)
    for layer, group in enumerate(groups):
        for name, expected in zip(("k", "v"), sender.oracle.stored(seq_id, layer), strict=True):
            assert same_bits(group[name], expected)
    metadata = json.loads(json.dumps(metadata))
    receiver = Pair(SPECS, dtype=dtype, page_size=other, seed=9)
    receiver.add(7)
    receiver.append(7, 11)
    load(receiver, 3, metadata, groups)
    assert receiver.state.sequence_length(3) == metadata["length"]
    again, same = export(receiver, 3)
    assert again == metadata
    for one, two in zip(groups, same, strict=True):
        assert all(same_bits(one[name], two[name]) for name in ("k", "v"))
    # It goes on like any other sequence, and like the one it came from.
    receiver.fork(3, 4, metadata["length"] - 2)
    receiver.forward([4, 3, 7], [3, 1, 2])
    rows = [torch.randn(2, _columns(spec)).to(dtype) for spec in SPECS]
    results = []
    for pair, target in ((sender, seq_id), (receiver, 3)):
        if pair is receiver:
            pair.pop(3, 1)
        pair.begin([target], [2])
        results.append([pair.layer(layer, rows[layer]) for layer in range(2)])
        pair.end()
    # (Both were held against the oracle; with one page size they are equal to the bit.)
    if page_size == other:
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    receiver.finish()
    sender.finish()


def _columns(spec: FullAttention) -> int:
    return (spec.num_heads + spec.num_kv_heads) * spec.head_dim + spec.num_kv_heads * spec.value_dim


def test_values_that_are_not_numbers_come_back_to_the_bit() -> None:
    sender = Pair(SPECS)
    sender.add(0)
    sender.append(0, 6)
    for layer, spec in enumerate(SPECS):
        k = torch.full((3, spec.num_kv_heads, spec.head_dim), float("nan"))
        v = torch.full((3, spec.num_kv_heads, spec.value_dim), -float("inf"))
        v[0] = -0.0
        sender.state.debug_set_kv(0, 2, k, v, layer=layer)
        sender.oracle.debug_set_kv(0, 2, k, v, layer)
    load(Pair(SPECS, page_size=5), 1, *export(sender, 0))


def test_an_empty_sequence() -> None:
    sender = Pair(SPECS)
    sender.add(0)
    metadata, groups = export(sender, 0)
    assert metadata["length"] == 0
    assert groups[1]["v"].shape == (0, 1, 5)
    receiver = Pair(SPECS, capacity=4)
    receiver.add(5)
    receiver.append(5, 4)
    assert receiver.free == 0
    load(receiver, 0, metadata, groups)
    receiver.finish()


def test_metadata_says_what_there_is() -> None:
    pair = source()
    metadata = pair.state.get_checkpoint_metadata(1)
    assert metadata["format_version"] == FORMAT_VERSION
    assert metadata["length"] == 43
    assert metadata["held"] == [{"layers": [0, 1], "ranges": [[0, 43]]}]
    assert (metadata["window"], metadata["sink"], metadata["eviction"]) == (None, 0, "token")
    assert metadata["kept_recurrent_positions"] == []
    assert [layer["kind"] for layer in metadata["layers"]] == ["full", "full"]
    assert metadata["layers"][1]["value_dim"] == 5
    assert metadata["layers"][0]["rope_fingerprint"] == SPECS[0].rope.fingerprint()  # type: ignore[union-attr]
    assert metadata["groups"][1]["group"] == 1
    assert metadata["groups"][1]["tensors"]["v"]["shape"] == [43, 1, 5]
    assert metadata["groups"][1]["tensors"]["v"]["bytes"] == 43 * 5 * 4
    checksums = {tensor["checksum"] for group in metadata["groups"] for tensor in group["tensors"].values()}
    assert len(checksums) == 4
    assert all(len(checksum) == 16 for checksum in checksums)


def test_layout_hash_covers_what_must_agree_and_nothing_else() -> None:
    def state(*specs: FullAttention, **more: Any) -> ContractState:
        return contract(specs, **{"capacity": 8, "backend": SdpaAttention(), **more})

    spec = attention(value_dim=6)
    assert isinstance(spec.rope, RopeSpec)
    base = state(spec).get_layout_hash()
    for same in (
        state(spec, page_size=3),
        state(spec, capacity=99),
        state(spec, backend=ReferenceAttention()),
        # Keys and values are the same however many queries read them.
        state(dataclasses.replace(spec, num_heads=8)),
        state(dataclasses.replace(spec, sm_scale=0.5)),
    ):
        assert same.get_layout_hash() == base
    different = [
        state(spec, spec),
        state(spec, first_layer=1),
        state(spec, dtype=torch.float16),
        state(dataclasses.replace(spec, num_kv_heads=1)),
        state(dataclasses.replace(spec, head_dim=16)),
        state(dataclasses.replace(spec, value_dim=7)),
        state(dataclasses.replace(spec, rope_mode="none")),
        state(dataclasses.replace(spec, rope=None, rope_mode="none")),
        state(dataclasses.replace(spec, rope=dataclasses.replace(spec.rope, theta=5.0))),
    ]
    assert len({base, *(other.get_layout_hash() for other in different)}) == len(different) + 1


def test_export_into_given_tensors() -> None:
    pair = source()
    expected = pair.state.export_page_group(1, 1)
    out = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    assert pair.state.export_page_group(1, 1, out) is out
    assert all(same_bits(out[name], expected[name]) for name in ("k", "v"))
    wrong: list[dict[str, Tensor]] = [
        {},
        {"k": out["k"]},
        {**out, "w": out["v"]},
        {"k": out["k"], "v": out["v"][1:]},
        {"k": out["k"].double(), "v": out["v"]},
    ]
    for given in wrong:
        kept = {name: tensor.clone() for name, tensor in given.items()}
        refused(pair, InvalidArgument, lambda given=given: pair.state.export_page_group(1, 1, given))  # type: ignore[misc]
        assert all(torch.equal(given[name], kept[name]) for name in given)


def test_others_go_on_while_an_import_is_under_way() -> None:
    metadata, groups = export(source(), 0)
    pair = Pair(SPECS, page_size=5, capacity=300)
    pair.add(0)
    pair.append(0, 12)
    pair.state.prepare_import(9, metadata)
    pair.oracle.prepare_import(9, Export.read(metadata))
    pair.fork(0, 1, 11)
    pair.forward([0, 1], [1, 2])
    pair.state.import_page_group(9, 1, groups[1])
    pair.oracle.import_group(9, 1, groups[1]["k"], groups[1]["v"])
    pair.pop(0, 4)
    pair.append(0, 9)
    assert pair.state.total_sequence_length() == pair.state.sequence_length(0) + 13
    assert pair.state.sequence_length(9) == 0
    pair.state.import_page_group(9, 0, groups[0])
    pair.oracle.import_group(9, 0, groups[0]["k"], groups[0]["v"])
    pair.remove(1)
    pair.state.finish_import(9)
    pair.oracle.finish_import(9)
    pair.compare()
    pair.finish()


def test_giving_up_gives_back_the_pages() -> None:
    metadata, groups = export(source(), 0)
    pair = Pair(SPECS, capacity=44, page_size=4)
    free = pair.free
    for groups_done in (0, 1, 2):
        pair.state.prepare_import(9, metadata)
        assert pair.state.num_available_pages() == free - 10
        for layer in range(groups_done):
            pair.state.import_page_group(9, layer, groups[layer])
        pair.state.remove_sequence(9)
        assert pair.state.empty()
        # Whoever is called 9 next is not being imported.
        pair.state.add_sequence(9)
        for call in (lambda: pair.state.import_page_group(9, 0, groups[0]), lambda: pair.state.finish_import(9)):
            refused(pair, FailedPrecondition, call, "call prepare_import first")
        pair.state.remove_sequence(9)
    pair.state.prepare_import(9, metadata)
    pair.state.clear()
    assert pair.state.empty()
    refused(pair, NotFound, lambda: pair.state.import_page_group(9, 0, groups[0]))


def test_an_importing_sequence_can_be_used_for_nothing_else() -> None:
    metadata, groups = export(source(), 0)
    pair = Pair(SPECS)
    state = pair.state
    state.prepare_import(9, metadata)
    state.import_page_group(9, 0, groups[0])
    calls: list[Callable[[], object]] = [
        lambda: state.begin_forward([9], [1]),
        lambda: state.missing_pages([9], [1]),
        lambda: state.fork_sequence(9, 1),
        lambda: state.fork_sequence(9, 1, 0),
        lambda: state.popn(9, 0),
        lambda: state.debug_get_kv(9, layer=0),
        lambda: state.debug_set_kv(9, 0, groups[0]["k"][:0], groups[0]["v"][:0], layer=0),
        lambda: state.get_checkpoint_metadata(9),
        lambda: state.export_page_group(9, 0),
    ]
    for call in calls:
        refused(pair, FailedPrecondition, call, "import")
    refused(pair, InvalidArgument, lambda: state.add_sequence(9), "9")
    refused(pair, InvalidArgument, lambda: state.fork_sequence(0, 9), "9")
    refused(pair, InvalidArgument, lambda: state.prepare_import(9, metadata), "9")
    assert state.sequence_length(9) == state.cached_length(9) == state.pending_nodes(9) == 0
    state.check()


def _set(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Change one entry of the metadata, named by keys with dots between."""

    def change(metadata: dict[str, Any]) -> None:
        *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
        place: Any = metadata
        for key in keys:
            place = place[key]
        if value is None:
            del place[last]
        else:
            place[last] = value

    return change


@pytest.mark.turns(6)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("format_version", 1), ("version", "1", "2")),
        (_set("format_version", None), ("version",)),
        (_set("layers", []), ("0 layers", "2")),
        (_set("layers", None), ("layers", "2")),
        (_set("layers.1", None), ("1 layers", "2")),
        (_set("layers.1", "full"), ("layer 1",)),
        (_set("layers.1.kind", "window"), ("layer 1", "'window'", "'full'")),
        (_set("layers.0.dtype", "float16"), ("layer 0", "'float16'", "'float32'")),
        (_set("layers.0.num_kv_heads", 4), ("num_kv_heads", "4", "2")),
        (_set("layers.0.head_dim", 16), ("head_dim", "16", "8")),
        (_set("layers.0.value_dim", 16), ("value_dim", "16", "8")),
        (_set("layers.0.rope_mode", "none"), ("rope_mode", "'none'", "'normal'")),
        (_set("layers.0.rope.theta", 5.0), ("rope", "5.0")),
        (_set("layers.0.rope_fingerprint", "0" * 16), ("rope_fingerprint",)),
        (_set("layers.0.colour", "red"), ("layer 0", "colour")),
        (_set("layout_hash", "0" * 32), ("layout", "0" * 32)),
        (_set("first_layer", 1), ("layout",)),
        (_set("length", -1), ("length", "-1")),
        (_set("length", 4.0), ("length", "4.0")),
        (_set("length", True), ("length", "True")),
        (_set("length", None), ("length",)),
        (_set("length", 39), ("held", "0..39")),
        (_set("length", 41), ("held",)),
        (_set("held", None), ("held",)),
        (_set("held", [[0, 40]]), ("held", "[0, 40]")),
        (_set("held", []), ("held", "[0, 1]")),
        (_set("held.0.layers", [0]), ("held", "[0]", "[0, 1]")),
        (_set("held.0.ranges", [4, 40]), ("held[0].ranges[0] is 4;",)),
        (_set("held.0.ranges", [[4, 40]]), ("held", "4..39")),
        (_set("held.0.ranges", [[0, 4], [8, 40]]), ("held", "0..3", "8..39")),
        (_set("held.0.ranges", [[0, -1]]), ("held[0].ranges[0][1] is -1;",)),
        (_set("held.0.ranges", []), ("held",)),
        (_set("window", 0), ("window", "0")),
        (_set("window", "8"), ("window", "'8'")),
        (_set("window", True), ("window", "True")),
        (_set("sink", 2), ("sink", "2", "0")),
        (_set("eviction", "forward"), ("eviction", "forward", "token")),
        (_set("eviction", "never"), ("eviction", "never", "token")),
        (_set("evicted", 3), ("evicted", "3")),
        (_set("kept_recurrent_positions", [4]), ("kept_recurrent_positions", "[4]")),
        (_set("groups", None), ("groups", "[0, 1]")),
        (_set("groups.1", None), ("groups [0]", "[0, 1]")),
        (_set("groups.1.group", 0), ("groups [0, 0]", "[0, 1]")),
        (_set("groups.1.group", 2), ("groups [0, 2]", "[0, 1]")),
        (_set("groups.1.tensors.v", None), ("layer 1", "['k']", "['k', 'v']")),
        (_set("groups.0.tensors", {"latent": {}}), ("layer 0", "['latent']", "['k', 'v']")),
        (_set("groups.0.tensors.k.shape", [40, 2, 9]), ("k of layer 0", "[40, 2, 9]", "[40, 2, 8]")),
    ],
)
def test_metadata_that_does_not_fit(change: Callable[[dict[str, Any]], None], words: tuple[str, ...]) -> None:
    metadata, _ = export(source(), 0)
    given = copy.deepcopy(metadata)
    change(given)
    pair = Pair(SPECS)
    pair.add(0)
    pair.append(0, 3)
    refused(pair, InvalidArgument, lambda: pair.state.prepare_import(5, given), *words)
    pair.state.prepare_import(5, metadata)


def test_metadata_of_other_states_does_not_fit() -> None:
    metadata, _ = export(source(), 0)
    for other in (
        Pair([SPECS[0]]),
        Pair([*SPECS, SPECS[0]]),
        Pair(SPECS[::-1]),
        Pair(SPECS, dtype=torch.bfloat16),
        Pair([dataclasses.replace(spec, rope=RopeSpec(theta=77.0, rotary_dim=4)) for spec in SPECS]),
    ):
        refused(other, InvalidArgument, lambda other=other: other.state.prepare_import(5, metadata), "expected")  # type: ignore[misc]


def test_exhaustion() -> None:
    metadata, groups = export(source(), 0)
    pair = Pair(SPECS, capacity=40, page_size=5)
    pair.add(0)
    pair.append(0, 1)
    refused(pair, ResourceExhausted, lambda: pair.state.prepare_import(5, metadata), "needs 8 pages, 7 free")
    pair.remove(0)
    load(pair, 5, metadata, groups)
    assert pair.free == 0
    pair.finish()


def test_ids_that_exist_or_are_none() -> None:
    metadata, _ = export(source(), 0)
    pair = Pair(SPECS)
    pair.add(0)
    bad: list[Any] = [0, 2**63, "5", None]
    for seq_id in bad:
        refused(pair, InvalidArgument, lambda seq_id=seq_id: pair.state.prepare_import(seq_id, metadata))  # type: ignore[misc]


def test_groups_that_do_not_fit() -> None:
    metadata, groups = export(source(), 0)
    pair = Pair(SPECS, page_size=5)
    state = pair.state
    pair.add(0)
    pair.append(0, 40)
    state.prepare_import(5, metadata)
    k, v = groups[0]["k"], groups[0]["v"]
    damaged = k.clone()
    damaged[17, 1, 3] += 1.0
    turned = v.clone()
    turned[3] = v[4]
    cases: list[tuple[type[QuireError], int, int, dict[str, Tensor], tuple[str, ...]]] = [
        (InvalidArgument, 5, 2, groups[0], ("layer 2", "0..1")),
        (InvalidArgument, 5, -1, groups[0], ("layer -1",)),
        (InvalidArgument, 5, 0, {"k": k}, ("['k']", "['k', 'v']")),
        (InvalidArgument, 5, 0, {"k": k, "v": v, "latent": k}, ("latent", "['k', 'v']")),
        (InvalidArgument, 5, 0, {"k": k[1:], "v": v}, ("k of layer 0", "(39, 2, 8)", "(40, 2, 8)")),
        (InvalidArgument, 5, 0, {"k": k[1:], "v": v[1:]}, ("(39, 2, 8)", "(40, 2, 8)")),
        (InvalidArgument, 5, 0, {"k": k, "v": v.half()}, ("v of layer 0", "float16", "float32")),
        (InvalidArgument, 5, 0, groups[1], ("k of layer 0", "(40, 1, 8)", "(40, 2, 8)")),
        (NotFound, 6, 0, groups[0], ("6",)),
        (FailedPrecondition, 0, 0, groups[0], ("sequence 0", "prepare_import")),
        (DataLoss, 5, 0, {"k": damaged, "v": v}, ("k of layer 0", "checksum")),
        (DataLoss, 5, 0, {"k": k, "v": turned}, ("v of layer 0", "checksum")),
    ]
    for kind, seq_id, layer, tensors, words in cases:
        refused(
            pair,
            kind,
            lambda seq_id=seq_id, layer=layer, tensors=tensors: state.import_page_group(seq_id, layer, tensors),  # type: ignore[misc]
            *words,
        )
    refused(pair, FailedPrecondition, lambda: state.finish_import(5), "[0, 1]")
    state.import_page_group(5, 0, groups[0])
    refused(pair, FailedPrecondition, lambda: state.finish_import(5), "[1]")
    refused(pair, FailedPrecondition, lambda: state.import_page_group(5, 0, groups[0]), "layer 0", "already")
    state.import_page_group(5, 1, groups[1])
    refused(pair, FailedPrecondition, lambda: state.import_page_group(5, 1, groups[1]), "already")
    state.finish_import(5)
    refused(pair, FailedPrecondition, lambda: state.finish_import(5), "5")
    refused(pair, FailedPrecondition, lambda: state.import_page_group(5, 1, groups[1]), "5")
    refused(pair, NotFound, lambda: state.finish_import(6), "6")
    for layer in (0, 1):
        assert same_bits(state.debug_get_kv(5, layer=layer)[0], groups[layer]["k"])


def test_metadata_that_the_caller_changes_later() -> None:
    metadata, groups = export(source(), 0)
    pair = Pair(SPECS)
    pair.state.prepare_import(5, metadata)
    metadata["length"] = 3
    metadata["groups"][0]["tensors"]["k"]["checksum"] = "0" * 16
    for layer in (0, 1):
        pair.state.import_page_group(5, layer, groups[layer])
    pair.state.finish_import(5)
    assert pair.state.sequence_length(5) == 40


def test_strided_tensors_are_taken_as_their_values() -> None:
    metadata, groups = export(source(), 0)
    pair = Pair(SPECS)
    pair.state.prepare_import(5, metadata)
    for layer, group in enumerate(groups):
        strided = {name: torch.stack((x, x + 1), -1)[..., 0] for name, x in group.items()}
        assert not strided["k"].is_contiguous()
        pair.state.import_page_group(5, layer, strided)
    pair.state.finish_import(5)
    assert same_bits(pair.state.debug_get_kv(5, layer=1)[1], groups[1]["v"])
