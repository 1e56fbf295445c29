"""Ids, error classes and their order, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from quire.base.errors import FailedPrecondition, InvalidArgument, NotFound, QuireError, ResourceExhausted, Unsupported
from quire.contracts.kv_state import AttentionKVCache, RNNState
from quire.contracts.layers import CrossAttention, FullAttention, LatentAttention, Recurrent, RopeSpec, StateTensor
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kv.contract import ContractState
from quire.kv.rules import PAGED_REFUSALS, PAGED_VERBS

from .faces import contract
from .oracle_exchange import Export
from .pair import Pair, attention, num_columns, refused, same_bits, split_columns, zeros
from .rule_stories import refused_call


def test_ids_are_any_int64() -> None:
    pair = Pair()
    ids = [-(2**63), 2**63 - 1, -1, 0, -2]
    pair.add(*ids)
    pair.forward(ids, [3, 1, 2, 5, 1])
    pair.fork(-(2**63), 17)
    pair.pop(-1, 1)
    pair.forward([-1, 17], [1, 1])
    for bad in (2**63, -(2**63) - 1, 10**30):
        refused(pair, InvalidArgument, partial(pair.state.add_sequence, bad), str(bad))
        refused(pair, InvalidArgument, partial(pair.state.fork_sequence, 0, bad), str(bad))
    odds: list[Any] = ["0", 1.5, None, True]
    for odd in odds:
        refused(pair, InvalidArgument, partial(pair.state.add_sequence, odd))
    pair.finish()


def test_error_classes_and_their_order() -> None:
    """If several apply, the first in the order of the contract is raised."""
    pair = Pair(capacity=16)
    state = pair.state
    pair.add(0, 1)
    pair.append(0, 5)
    qkv = pair.random(0, 3)
    k, v = zeros(pair, 1)
    metadata = state.get_checkpoint_metadata(0)
    old = metadata | {"format_version": 0}
    tree: Any = [[-1], [-1]]
    mask, flat = torch.ones(3 * 3, dtype=torch.bool), torch.ones(4)
    q, k3, v3 = split_columns(pair.specs[0], qkv)
    pairs = torch.zeros(3, 4, 8), torch.zeros(3, 4)
    groups = state.export_page_group(0, 0)

    def calls() -> list[tuple[type[QuireError] | None, type[QuireError] | None, Callable[[], object]]]:
        """(refusal while no forward is open, refusal while one is open, the call)"""
        return [
            (InvalidArgument, InvalidArgument, lambda: state.add_sequence(0)),
            (NotFound, NotFound, lambda: state.remove_sequence(8)),
            (None, FailedPrecondition, lambda: state.popn(0, 0)),
            (InvalidArgument, InvalidArgument, lambda: state.fork_sequence(8, 0)),
            (InvalidArgument, InvalidArgument, lambda: state.fork_sequence(8, 9, -2)),
            (NotFound, NotFound, lambda: state.fork_sequence(8, 9, 2)),
            (InvalidArgument, InvalidArgument, lambda: state.fork_sequence(0, 9, 6)),
            (InvalidArgument, InvalidArgument, lambda: state.popn(8, -1)),
            (NotFound, NotFound, lambda: state.popn(8, 1)),
            (InvalidArgument, InvalidArgument, lambda: state.begin_forward([8], [0])),
            (InvalidArgument, InvalidArgument, lambda: state.begin_forward([0, 8], [1])),
            (InvalidArgument, InvalidArgument, lambda: state.begin_forward([], [])),
            (InvalidArgument, InvalidArgument, lambda: state.begin_forward([8, 8], [1, 1])),
            (InvalidArgument, InvalidArgument, lambda: state.begin_forward([0], [1.0])),  # type: ignore[list-item]
            (NotFound, NotFound, lambda: state.begin_forward([8], [99])),
            (ResourceExhausted, FailedPrecondition, lambda: state.begin_forward([0], [99])),
            (InvalidArgument, InvalidArgument, lambda: state.begin_forward([0, 0], [1, 1], tree)),
            (InvalidArgument, InvalidArgument, lambda: state.begin_forward([0, 8], [1, 1], [[-1], [0]])),
            (InvalidArgument, InvalidArgument, lambda: state.begin_forward([0, 8], [1, 1], [[-1]])),
            (InvalidArgument, InvalidArgument, lambda: state.begin_forward([0, 8], [1, 1], [-1, -1, -1])),
            (NotFound, NotFound, lambda: state.begin_forward([0, 8], [1, 1], tree)),
            (
                ResourceExhausted,
                FailedPrecondition,
                lambda: state.begin_forward([0, 1], [1, 99], [None, [-1, *range(98)]]),
            ),
            (NotFound, NotFound, lambda: state.begin_forward([8], [2], [-1, 0])),
            (NotFound, NotFound, lambda: state.missing_pages([8], [1])),
            (InvalidArgument, InvalidArgument, lambda: state.missing_pages([8], [0])),
            (InvalidArgument, InvalidArgument, lambda: state.missing_pages([8, 1], [1, 1], [[-1], [1]])),
            (None, None, lambda: state.missing_pages([0, 1], [1, 1], tree)),
            (InvalidArgument, InvalidArgument, lambda: state.end_forward(skipped=[2])),
            (InvalidArgument, InvalidArgument, lambda: state.attention_with_fused_qkv(2, qkv)),
            (InvalidArgument, InvalidArgument, lambda: state.attention_with_fused_qkv(0, qkv[:, :-1])),
            (InvalidArgument, InvalidArgument, lambda: state.attention_with_fused_qkv(0, qkv.double(), mask=qkv)),
            (InvalidArgument, InvalidArgument, lambda: state.attention_with_fused_qkv(0, qkv, mask=flat)),
            (FailedPrecondition, InvalidArgument, lambda: state.attention_with_fused_qkv(0, qkv, mask=mask[:-1])),
            (FailedPrecondition, None, lambda: state.attention_with_fused_qkv(0, qkv, mask=mask)),
            (InvalidArgument, InvalidArgument, lambda: state.append_kv(2, k3, v3)),
            (FailedPrecondition, InvalidArgument, lambda: state.append_kv(0, k3[:2], v3[:2])),
            (FailedPrecondition, None, lambda: state.append_kv(0, k3, v3)),
            (InvalidArgument, InvalidArgument, lambda: state.self_attention(0, q, k3, v3[:, :1])),
            (InvalidArgument, InvalidArgument, lambda: state.self_attention(0, q, k3, v3, mask=flat)),
            (FailedPrecondition, None, lambda: state.self_attention(0, q, k3, v3, mask=mask)),
            (InvalidArgument, InvalidArgument, lambda: state.cross_attention(0, q, scope="none")),  # type: ignore[arg-type]
            (InvalidArgument, InvalidArgument, lambda: state.cross_attention(0, q, out=pairs[:1])),  # type: ignore[arg-type]
            (FailedPrecondition, None, lambda: state.cross_attention(0, q, out=pairs)),
            (FailedPrecondition, None, lambda: state.cross_attention(0, q, scope="all")),
            (FailedPrecondition, FailedPrecondition, lambda: state.cross_attention(1, q, scope="all")),
            (InvalidArgument, InvalidArgument, lambda: state.attention_with_shared_kv(0, q, k3)),
            (FailedPrecondition, None, lambda: state.attention_with_shared_kv(1, q, k3, v3)),
            (FailedPrecondition, FailedPrecondition, lambda: state.attention_with_shared_kv(1, q)),
            (InvalidArgument, InvalidArgument, lambda: state.merge(q, q[:, :, 0], q, q[:, :2, 0])),
            (None, None, lambda: state.merge(q, q[:, :, 0], q, q[:, :, 0])),
            (InvalidArgument, InvalidArgument, lambda: state.commit_accepted_token_tree_nodes([8], [0, 1])),
            (InvalidArgument, InvalidArgument, lambda: state.commit_accepted_token_tree_nodes([8, 8], [0, 0])),
            (InvalidArgument, InvalidArgument, lambda: state.commit_accepted_token_tree_nodes([8, 0], [0, 0])),
            (InvalidArgument, InvalidArgument, lambda: state.commit_accepted_token_tree_nodes([8], [-2])),
            (NotFound, NotFound, lambda: state.commit_accepted_token_tree_nodes([0, 8], [-1, -1])),
            (FailedPrecondition, FailedPrecondition, lambda: state.commit_accepted_token_tree_nodes([0], [-1])),
            (FailedPrecondition, None, lambda: state.get_query_positions(relative=True)),
            (FailedPrecondition, None, lambda: state.attention_with_fused_qkv(0, qkv)),
            (NotFound, NotFound, lambda: state.debug_get_kv(8)),
            (InvalidArgument, InvalidArgument, lambda: state.debug_get_kv(8, layer=2)),
            (InvalidArgument, InvalidArgument, lambda: state.debug_get_kv(8, -1)),
            (InvalidArgument, InvalidArgument, lambda: state.debug_get_kv(8, 3, 2)),
            (InvalidArgument, InvalidArgument, lambda: state.debug_get_kv(0, 0, 6)),
            (InvalidArgument, InvalidArgument, lambda: state.debug_get_kv(0, out=(k,))),  # type: ignore[arg-type]
            (InvalidArgument, InvalidArgument, lambda: state.debug_get_kv(0, out=(k, v))),
            (InvalidArgument, InvalidArgument, lambda: state.debug_set_kv(8, 0, k)),
            (InvalidArgument, InvalidArgument, lambda: state.debug_set_kv(8, 0, k, v[:, :, :1])),
            (InvalidArgument, InvalidArgument, lambda: state.debug_set_kv(8, 0, k.double(), v.double())),
            (InvalidArgument, InvalidArgument, lambda: state.debug_set_kv(8, -1, k, v)),
            (NotFound, NotFound, lambda: state.debug_set_kv(8, 0, k, v)),
            (InvalidArgument, InvalidArgument, lambda: state.debug_set_kv(0, 5, k, v)),
            (None, FailedPrecondition, lambda: state.debug_set_kv(0, 4, k, v)),
            (InvalidArgument, InvalidArgument, lambda: state.rewind_cost(8, -1)),
            (InvalidArgument, InvalidArgument, lambda: state.rewind_cost(0, 6)),
            (NotFound, NotFound, lambda: state.rewind_cost(8, 1)),
            (NotFound, NotFound, lambda: state.reachable(8)),
            (NotFound, NotFound, lambda: state.sequence_length(8)),
            (NotFound, NotFound, lambda: state.cached_length(8)),
            (NotFound, NotFound, lambda: state.pending_nodes(8)),
            (NotFound, NotFound, lambda: state.checkpoints(8)),
            (InvalidArgument, InvalidArgument, lambda: state.enable_sliding_window_for_seq(8, 0)),
            (InvalidArgument, InvalidArgument, lambda: state.enable_sliding_window_for_seq(8, 4, 4)),
            (InvalidArgument, InvalidArgument, lambda: state.enable_sliding_window_for_seq(8, 4, -1)),
            (InvalidArgument, InvalidArgument, lambda: state.enable_sliding_window_for_seq(8, 4, eviction="never")),  # type: ignore[arg-type]
            (NotFound, NotFound, lambda: state.enable_sliding_window_for_seq(8, 4)),
            (None, FailedPrecondition, lambda: state.enable_sliding_window_for_seq(0, 4)),
            (None, FailedPrecondition, lambda: state.enable_sliding_window_for_seq(0, None)),
            (InvalidArgument, InvalidArgument, lambda: state.debug_get_kv(8, 2, 1, relative=True)),
            (InvalidArgument, InvalidArgument, lambda: state.debug_get_kv(0, 0, 6, relative=True)),
            (NotFound, NotFound, lambda: state.get_checkpoint_metadata(8)),
            (InvalidArgument, InvalidArgument, lambda: state.export_page_group(8, 2)),
            (NotFound, NotFound, lambda: state.export_page_group(8, 1)),
            (InvalidArgument, InvalidArgument, lambda: state.prepare_import(0, metadata)),
            (InvalidArgument, InvalidArgument, lambda: state.prepare_import(9, old)),
            (InvalidArgument, InvalidArgument, lambda: state.import_page_group(8, 2, groups)),
            (NotFound, NotFound, lambda: state.import_page_group(8, 1, groups)),
            (FailedPrecondition, FailedPrecondition, lambda: state.import_page_group(0, 1, groups)),
            (NotFound, NotFound, lambda: state.finish_import(8)),
            (FailedPrecondition, FailedPrecondition, lambda: state.finish_import(0)),
            (FailedPrecondition, FailedPrecondition, state.end_forward),
        ]

    for kind, _, call in calls():
        if kind is not None:
            refused(pair, kind, call)
        else:
            call()
    refused(pair, FailedPrecondition, state.abort_forward)
    pair.oracle.debug_set_kv(0, 4, k[0], v[0], 0)
    pair.oracle.debug_set_kv(0, 4, k[1], v[1], 1)
    pair.compare()
    pair.begin([1], [3])
    for _, kind, call in calls():
        if kind is not None:
            refused(pair, kind, call)
        else:
            call()
    pair.abort()
    pair.finish()


def test_verbs_that_edit_are_refused_inside_a_forward() -> None:
    pair = Pair()
    state = pair.state
    pair.add(0, 1)
    pair.append(0, 3)
    metadata, group = state.get_checkpoint_metadata(0), state.export_page_group(0, 0)
    state.prepare_import(5, metadata)
    pair.oracle.prepare_import(5, Export.read(metadata))
    pair.begin([0], [2])
    for call in (
        lambda: state.enable_sliding_window_for_seq(0, 5),
        lambda: state.enable_sliding_window_for_seq(0, None),
        lambda: state.commit_accepted_token_tree_nodes([0], [-1]),
        lambda: state.commit_accepted_token_tree_nodes([], []),
        lambda: state.add_sequence(9),
        lambda: state.remove_sequence(1),
        lambda: state.remove_sequence(5),
        lambda: state.fork_sequence(0, 9),
        lambda: state.popn(0, 1),
        lambda: state.begin_forward([1], [1]),
        lambda: state.debug_set_kv(0, 0, *zeros(pair, 1)),
        lambda: state.prepare_import(9, metadata),
        lambda: state.import_page_group(5, 0, group),
        lambda: state.finish_import(5),
    ):
        refused(pair, FailedPrecondition, call)
    # Reading works, and so does clear.
    assert state.get_checkpoint_metadata(0) == metadata
    assert same_bits(state.export_page_group(0, 0)["k"], group["k"])
    state.check()
    state.clear()
    assert state.empty()
    state.check()
    assert state.num_available_pages() == state.num_pages
    refused(pair, FailedPrecondition, state.end_forward)
    refused(pair, NotFound, lambda: state.finish_import(5))


def test_a_pass_that_is_over_writes_nothing() -> None:
    pair = Pair()
    pair.add(0)
    pair.begin([0], [2])
    old = pair.state.open_pass()
    pair.abort()
    pair.begin([0], [1])
    refused(pair, FailedPrecondition, lambda: old.attend_qkv(0, pair.random(0, 2)))
    q, k, v = split_columns(pair.specs[0], pair.random(0, 2))
    refused(pair, FailedPrecondition, lambda: old.attend(0, q, k, v))


def test_pass_takes_q_k_v_or_one_tensor() -> None:
    pair = Pair()
    pair.add(0)
    pair.begin([0], [3])
    opened = pair.state.open_pass()
    assert opened.positions_T.tolist() == [0, 1, 2]
    qkv = pair.random(0, 3)
    fused = pair.layer(0, qkv)
    slots = pair.state.state.sequences.slots(0, 0, [range(3)])
    stored = pair.state.state.parts.paged.classes[0].storage.read(0, slots)
    assert torch.equal(opened.attend_qkv(0, qkv), fused)
    apart = opened.attend(0, *split_columns(pair.specs[0], qkv))
    assert apart.is_contiguous()
    assert torch.equal(apart, fused)
    again = pair.state.state.parts.paged.classes[0].storage.read(0, slots)
    assert same_bits(stored.k, again.k)


def test_compute_that_fails_leaves_the_forward_open(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.add(0)
    pair.append(0, 3)
    pair.begin([0], [1])
    qkv = pair.random(0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(SdpaAttention, "run", lambda *args, **more: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            pair.state.attention_with_fused_qkv(0, qkv)
    refused(pair, FailedPrecondition, pair.state.end_forward, "[1]")
    pair.abort()
    # A plan that fails takes the whole call back.
    with monkeypatch.context() as patch:
        patch.setattr(SdpaAttention, "plan", lambda *args, **more: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            pair.state.begin_forward([0], [9])
    pair.compare()
    pair.append(0, 4)
    pair.finish()


MEMORY = Recurrent(states=(StateTensor(shape=(2,), dtype="float32"),))


@pytest.mark.parametrize("verb", sorted(PAGED_REFUSALS))
def test_verbs_that_are_not_there_say_so(verb: str) -> None:
    state = Pair().state
    state.add_sequence(0)
    with pytest.raises(Unsupported, match=f"^{verb}: "):
        refused_call(state, verb)()


def test_every_verb_of_the_contract_is_there() -> None:
    names = {
        name
        for contract in (AttentionKVCache, RNNState)
        for base in contract.__mro__
        for name in vars(base)
        if not name.startswith("_") and base.__module__.startswith("quire.")
    }
    assert len(names) > 40
    assert {name for name in names if not callable(getattr(ContractState, name, None))} == set()
    assert set(PAGED_VERBS) <= names
    assert not set(PAGED_VERBS) & set(PAGED_REFUSALS)


def test_what_a_state_cannot_be_made_of() -> None:
    def make(*specs: object, **more: object) -> ContractState:
        return contract(list(specs), **{"capacity": 8, "backend": SdpaAttention(), **more})  # type: ignore[arg-type]

    rope = RopeSpec(theta=1e4, rotary_dim=8)
    fine = attention()
    for specs, more, kind in (
        ([], {}, InvalidArgument),
        ([fine], {"page_size": 0}, InvalidArgument),
        ([fine], {"capacity": 0}, InvalidArgument),
        ([fine], {"dtype": torch.int8}, InvalidArgument),
        ([attention(4, 3)], {}, InvalidArgument),
        ([attention(dim=4, rotary_dim=6)], {}, InvalidArgument),
        ([attention(rotary_dim=3)], {}, InvalidArgument),
        (
            [FullAttention(num_heads=1, num_kv_heads=1, head_dim=4, value_dim=8, rope=rope, rope_mode="inline")],
            {},
            InvalidArgument,
        ),
        ([attention(sinks=(0.0,))], {}, InvalidArgument),
        ([attention(softcap=0.0)], {}, InvalidArgument),
        ([fine], {"window_capacity": 0}, InvalidArgument),
        ([fine, LatentAttention(num_heads=1, row_dim=8, value_dim=9)], {}, InvalidArgument),
        ([CrossAttention(num_heads=1, num_kv_heads=1, head_dim=8, value_dim=8)], {}, InvalidArgument),
        ([fine], {"capacity": None}, InvalidArgument),
        ([fine], {"num_states": 4}, InvalidArgument),
        ([fine], {"checkpoint_interval": 16}, InvalidArgument),
        ([fine, MEMORY], {}, InvalidArgument),
        ([fine, MEMORY], {"num_states": 0}, InvalidArgument),
        ([fine, MEMORY], {"num_states": 4, "ring": -1}, InvalidArgument),
        ([fine, MEMORY], {"num_states": 4, "checkpoint_interval": 7}, InvalidArgument),
        ([MEMORY], {"num_states": 4}, InvalidArgument),
        ([MEMORY], {"num_states": 4, "capacity": None, "window_capacity": 8}, InvalidArgument),
        ([Recurrent(states=())], {"num_states": 4, "capacity": None}, InvalidArgument),
    ):
        with pytest.raises(kind):
            make(*specs, **more)
    assert make(fine, capacity=9, page_size=4).num_available_pages() == 3


def test_layer_ids_are_global() -> None:
    state = contract([attention()] * 2, capacity=16, backend=SdpaAttention(), first_layer=5)
    state.add_sequence(0)
    state.begin_forward([0], [2])
    qkv = torch.randn(2, num_columns(state.state.parts.paged.specs[5]))
    with pytest.raises(InvalidArgument, match=r"layer 0; this state has layers 5\.\.6"):
        state.attention_with_fused_qkv(0, qkv)
    state.attention_with_fused_qkv(6, qkv)
    with pytest.raises(FailedPrecondition, match=r"\[5\]"):
        state.end_forward()
    state.end_forward(skipped=[5])
    assert not state.debug_get_kv(0, layer=5)[0].any()
    assert state.debug_get_kv(0, layer=6)[0].any()
