"""Cross layers: encoder rows beside sequences, against lists of rows and attention by loops in
float64.

Letters: S rows of an encoder; T new tokens; Hq, Hkv heads; Dk, Dv head sizes; P page size.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

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
from quire.contracts.attention import ForwardPlan
from quire.contracts.layers import CrossAttention, FullAttention, LatentAttention, LayerSpec, Recurrent, StateTensor
from quire.kernels.attention.cpu_attention import NativeAttention
from quire.kernels.attention.sdpa import SdpaAttention, SdpaPlan
from quire.kv import sequencefile
from quire.kv.contract import ContractState
from quire.kv.state_pass import StatePass
from quire.ops.attention import ReferenceAttention
from quire.ops.recurrence import ReferenceRecurrence
from quire.statefile.container import read_state, to_bytes

from .faces import contract
from .oracle_values import Exact, scores_of, softmax_state, state_bounds
from .pair import attention, num_columns, same_bits, windowed
from .snapshots import snapshot

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")],
    ),
]
WIDE = CrossAttention(num_heads=4, num_kv_heads=2, head_dim=6, value_dim=5)
NARROW = CrossAttention(num_heads=3, num_kv_heads=1, head_dim=4, value_dim=4, sm_scale=0.7)
MIXER = Recurrent(states=(StateTensor(shape=(2, 3), dtype="float32"),))
LAYOUTS: dict[str, list[LayerSpec]] = {
    "alone": [WIDE, NARROW],
    "beside": [attention(), WIDE, windowed(5), NARROW],
    "hybrid": [MIXER, WIDE, attention(), NARROW],
    "recurrent": [NARROW, MIXER, WIDE],
}
SEVEN = [-1, 0, 0, 1, 1, 2, 2]


class Rows(NamedTuple):
    """What an encoder has left in one layer."""

    k: Tensor
    v: Tensor


class Held:
    """What forks hold in common; which rows there are and who sees them."""

    def __init__(self, rows: dict[int, Rows]) -> None:
        self.rows = rows

    def pages(self, size: int) -> int:
        return max((-(-len(one.k) // size) for one in self.rows.values()), default=0)


class Story:
    """A state with cross layers, and dictionaries of rows beside it."""

    def __init__(
        self,
        layout: str = "beside",
        *,
        page_size: int = 4,
        cross_capacity: int = 400,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
        backend: Any = None,
        first_layer: int = 0,
    ) -> None:
        specs = LAYOUTS[layout]
        self.specs = dict(enumerate(specs, start=first_layer))
        self.layers = {layer: spec for layer, spec in self.specs.items() if isinstance(spec, CrossAttention)}
        fields: dict[str, Any] = {
            "capacity": 4096,
            "cross_capacity": cross_capacity,
            "page_size": page_size,
            "dtype": dtype,
            "device": device,
            "backend": backend or SdpaAttention(),
            "first_layer": first_layer,
        }
        self.state: ContractState
        if MIXER in specs:
            self.state = contract(specs, num_states=256, recurrence=ReferenceRecurrence(), **fields)
        else:
            self.state = contract(specs, **fields)
        self.generator = torch.Generator().manual_seed(seed)
        self.held: dict[int, Held] = {}
        self.nodes: dict[int, int] = {}

    def random(self, *shape: int) -> Tensor:
        found = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return found.to(self.state.dtype).to(self.state.device)

    def rows(self, layer: int, count: int) -> Rows:
        spec = self.layers[layer]
        return Rows(
            self.random(count, spec.num_kv_heads, spec.head_dim), self.random(count, spec.num_kv_heads, spec.value_dim)
        )

    @property
    def pages(self) -> int:
        """Pages of encoder rows that are in use."""
        distinct = {id(one): one for one in self.held.values()}
        return sum(one.pages(self.state.page_size) for one in distinct.values())

    def add(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            self.state.add_sequence(seq_id)
            self.held[seq_id] = Held({})

    def set(self, layer: int, seq_id: int, count: int) -> Rows:
        """Set a layer; ``ResourceExhausted`` exactly if the pages do not do."""
        given, mine = self.rows(layer, count), self.held[seq_id]
        shared = sum(one is mine for one in self.held.values()) > 1
        after = Held({**mine.rows, layer: given})
        assert self.state.state.parts.encoders is not None
        pool = self.state.state.parts.encoders.table.pool
        used = self.pages - (0 if shared and mine.rows else mine.pages(self.state.page_size))
        if used + after.pages(self.state.page_size) > pool.num_pages:
            message = refused(self.state, ResourceExhausted, lambda: self.state.set_cross_kv(layer, seq_id, *given))
            assert f"{pool.num_free} of {pool.num_pages} are free" in message
        else:
            self.state.set_cross_kv(layer, seq_id, *given)
            self.held[seq_id] = after
        return given

    def fork(self, parent: int, child: int, position: int = -1) -> None:
        splits, used = self.state.num_splits, self.state.num_used_pages
        self.state.fork_sequence(parent, child, position)
        assert (self.state.num_splits, self.state.num_used_pages) == (splits, used)
        self.held[child] = self.held[parent]

    def remove(self, seq_id: int) -> None:
        self.state.remove_sequence(seq_id)
        del self.held[seq_id]
        self.nodes.pop(seq_id, None)

    def forward(
        self, seq_ids: Sequence[int], counts: Sequence[int], trees: Any = None, *, abort: bool = False, pad: int = 0
    ) -> None:
        """All layers over new tokens; what cross layers give is held against the loops."""
        self.state.begin_forward(seq_ids, counts, trees)
        for layer in self.specs:
            self.run(layer, seq_ids, counts, pad)
        if abort:
            self.state.abort_forward()
            return
        self.state.end_forward()
        for entry, seq_id in enumerate(seq_ids):
            if trees is not None and trees[entry] is not None:
                self.nodes[seq_id] = self.nodes.get(seq_id, 0) + counts[entry]

    def run(self, layer: int, seq_ids: Sequence[int], counts: Sequence[int], pad: int = 0) -> None:
        spec, state, total = self.specs[layer], self.state, sum(counts)
        if isinstance(spec, FullAttention) or spec.kind == "window":
            state.attention_with_fused_qkv(layer, self.random(total, num_columns(spec)))
        if not isinstance(spec, CrossAttention):
            return
        q = self.random(total + pad, spec.num_heads, spec.head_dim)
        lacking = next((seq_id for seq_id in seq_ids if layer not in self.held[seq_id].rows), None)
        if lacking is not None:
            message = refused(state, FailedPrecondition, lambda: state.cross_attention(layer, q))
            assert f"layer {layer} has no encoder rows of sequence {lacking}" in message
            refused(state, FailedPrecondition, lambda: state.open_pass().attend_cross(layer, q))
            return
        out, lse = state.cross_attention(layer, q)
        for other in (
            state.cross_attention(layer, q, scope="all"),
            state.cross_attention(layer, q, scope="past"),
        ):
            assert same_bits(other[0], out)
            assert same_bits(other[1], lse)
        assert not out[total:].any()
        assert (lse[total:] == -torch.inf).all()
        single = state.open_pass().attend_cross(layer, q[:total])
        assert single.dtype == state.dtype
        assert single.is_contiguous()
        row = 0
        for seq_id, count in zip(seq_ids, counts, strict=True):
            for _ in range(count):
                found = exact(spec, q[row], self.held[seq_id].rows[layer], state.dtype)
                for given in (out[row], single[row]):
                    assert np.abs(given.double().cpu().numpy() - found.out).max() <= found.out_bound
                assert np.abs(lse[row].double().cpu().numpy() - found.lse).max() <= found.lse_bound
                row += 1

    def check(self) -> None:
        """The books, every row, and what is counted."""
        self.state.check()
        assert self.state.state.parts.encoders is not None
        assert self.state.state.parts.encoders.table.pool.num_used == self.pages
        for seq_id, one in self.held.items():
            for layer in self.layers:
                if layer in one.rows:
                    for found, wanted in zip(
                        self.state.debug_get_kv(seq_id, layer=layer), one.rows[layer], strict=True
                    ):
                        assert same_bits(found, wanted)
                else:
                    refused(self.state, FailedPrecondition, partial(self.state.debug_get_kv, seq_id, layer=layer))


def exact(spec: CrossAttention, q_HD: Tensor, rows: Rows, dtype: torch.dtype) -> Exact:
    """One token over all rows of an encoder."""
    q, k, v = (one.double().cpu().numpy() for one in (q_HD, rows.k, rows.v))
    scale = spec.head_dim**-0.5 if spec.sm_scale is None else spec.sm_scale
    out, lse = softmax_state(scores_of(q, k, scale), v)
    return Exact(out, lse, *state_bounds(q, k, v, lse, scale, False, dtype))


def refused(state: ContractState, kind: type[QuireError], act: Callable[[], object]) -> str:
    """The call raises this very class and leaves no trace; returns what it says."""
    before = snapshot(state)
    with pytest.raises(kind) as raised:
        act()
    assert type(raised.value) is kind, raised.value
    assert snapshot(state) == before
    return str(raised.value)


# -- what is computed ------------------------------------------------------------------------------


@pytest.mark.turns(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_prompts_decodes_and_trees_in_one_batch(layout: str, dtype: torch.dtype, device: str) -> None:
    story = Story(layout, dtype=dtype, device=device)
    story.add(0, 1, 2, 3)
    for seq_id, sizes in enumerate(((9, 3), (1, 1), (4, 17), (8, 8))):
        for layer, size in zip(story.layers, sizes, strict=True):
            story.set(layer, seq_id, size)
    story.forward([2, 0, 3, 1], [11, 1, 2, 3], pad=2)
    story.forward([0, 1, 2, 3], [1, 1, 1, 1])
    story.forward([3, 1, 0], [7, 1, 4], [SEVEN, None, [-1, -1, 0, 1]], pad=1)
    story.forward([0, 3], [2, 1], [[0, 3], [6]])
    story.state.commit_accepted_token_tree_nodes([3, 0], [7, -1])
    story.forward([3, 0], [5, 1])
    assert [story.state.sequence_length(seq) for seq in range(4)] == [3, 5, 12, 12]
    story.check()


@pytest.mark.turns(6)
@pytest.mark.parametrize("backend", [SdpaAttention(), NativeAttention(), ReferenceAttention()])
@pytest.mark.parametrize("page_size", [1, 2, 5, 16])
def test_many_rows(page_size: int, backend: Any) -> None:
    """Beyond every size at which kernels choose another way; new tokens more and fewer
    than rows."""
    story = Story("alone", page_size=page_size, cross_capacity=3000, backend=backend)
    story.add(0, 1, 2)
    for layer in story.layers:
        for seq_id, size in enumerate((1, 700, 33)):
            story.set(layer, seq_id, size)
    story.forward([0, 1, 2], [40, 1, 90])
    story.forward([1], [300])
    story.forward([2, 1], [1, 1])
    story.check()


def test_a_window_does_not_concern_it() -> None:
    story = Story("beside")
    story.add(0)
    story.set(1, 0, 12)
    story.set(3, 0, 5)
    story.state.enable_sliding_window_for_seq(0, 4, 2)
    for count in (6, 5, 1, 1, 9):
        story.forward([0], [count])
    assert story.state.cached_length(0) == 4
    story.check()


def test_scale_of_the_call_and_out() -> None:
    story = Story("alone")
    story.add(0)
    rows = story.set(0, 0, 6)
    story.state.begin_forward([0], [2])
    q = story.random(3, 4, 6)
    out, lse = story.state.cross_attention(0, q, sm_scale=0.25)
    wanted = exact(
        CrossAttention(num_heads=4, num_kv_heads=2, head_dim=6, value_dim=5, sm_scale=0.25), q[1], rows, q.dtype
    )
    assert np.abs(out[1].double().numpy() - wanted.out).max() <= wanted.out_bound
    into = (torch.full((3, 4, 5), 7.0), torch.full((3, 4), 7.0))
    found = story.state.cross_attention(0, q, sm_scale=0.25, out=into)
    assert found[0] is into[0]
    assert same_bits(into[0][:2], out[:2])
    assert same_bits(into[1][:2], lse[:2])
    assert (into[0][2] == 7).all()
    assert (into[1][2] == 7).all()


def test_merge_with_self_attention_is_attention_over_both() -> None:
    """A decoder whose tokens see the encoder and each other in one softmax."""
    state = contract(
        [attention(rotary_dim=0), CrossAttention(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8)],
        capacity=64,
        cross_capacity=64,
        dtype=torch.float64,
        backend=ReferenceAttention(),
    )
    state.add_sequence(0)
    k, v, q = (torch.randn(9, heads, 8, dtype=torch.float64) for heads in (2, 2, 4))
    state.set_cross_kv(1, 0, k[:5], v[:5])
    state.begin_forward([0], [4])
    mine = state.self_attention(0, q[:4], k[5:], v[5:])
    out, _ = state.merge(*mine, *state.cross_attention(1, q[:4]))
    for row in range(4):
        wanted = exact(WIDE_8, q[row], Rows(k[: 6 + row], v[: 6 + row]), torch.float64)
        assert np.abs(out[row].numpy() - wanted.out).max() <= wanted.out_bound


WIDE_8 = CrossAttention(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8)


def test_layers_of_as_many_rows_share_a_plan() -> None:
    plans: list[ForwardPlan] = []

    class Counting(SdpaAttention):
        def plan(self, plan: ForwardPlan, dtype: torch.dtype) -> SdpaPlan:
            plans.append(plan)
            return super().plan(plan, dtype)

    story = Story("alone", backend=Counting())
    story.add(0, 1)
    for seq_id, size in ((0, 6), (1, 9)):
        for layer in story.layers:
            story.set(layer, seq_id, size)
    story.forward([0, 1], [1, 3])
    assert len(plans) == 1
    assert plans[0].plain
    story.add(2)
    story.set(0, 2, 6)
    story.set(1, 2, 7)
    story.forward([0, 2], [1, 3])
    assert len(plans) == 3


def test_the_pass_of_a_model_and_its_weights() -> None:
    story = Story("beside")
    story.add(0, 1)
    for layer, sizes in ((1, (5, 2)), (3, (4, 4))):
        for seq_id, size in enumerate(sizes):
            story.set(layer, seq_id, size)
    state = story.state
    state.begin_forward([1, 0], [2, 3])
    opened = state.open_pass()
    opened.capture_weights()
    q = story.random(5, 4, 6)
    opened.attend_cross(1, q)
    assert [tuple(one.shape) for one in opened.weights[1]] == [(4, 2, 2), (4, 3, 5)]
    k = story.held[0].rows[1].k.double()
    wanted = (q[2:, 1].double() @ k[:, 0].T * 6**-0.5).softmax(-1)
    # Scores of a few units over six columns: each is off by some roundings of its terms.
    bound = 64 * torch.finfo(torch.float32).eps
    assert (opened.weights[1][1][1].double() - wanted).abs().max() <= bound
    for layer, kind in ((0, Unsupported), (2, Unsupported), (9, InvalidArgument)):
        with pytest.raises(kind, match=f"layer {layer}"):
            opened.attend_cross(layer, q)
    half = opened.attend_cross(1, q.bfloat16())
    assert half.dtype == torch.bfloat16
    state.abort_forward()
    with pytest.raises(FailedPrecondition, match="over"):
        opened.attend_cross(1, q)


def test_pass_of_a_state_without_cross_layers() -> None:
    state = contract([attention()], capacity=8, backend=SdpaAttention())
    state.add_sequence(0)
    state.begin_forward([0], [1])
    with pytest.raises(Unsupported, match="attend_cross: layer 0 is of kind 'full'"):
        state.open_pass().attend_cross(0, torch.zeros(1, 4, 8))
    assert isinstance(state.open_pass(), StatePass)
    message = refused(state, Unsupported, lambda: state.set_cross_kv(0, 0, torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)))
    assert "no cross layers" in message


# -- who holds what --------------------------------------------------------------------------------


def test_forks_share_and_the_last_one_frees() -> None:
    story = Story("beside", cross_capacity=40)
    state = story.state
    story.add(0)
    story.set(1, 0, 9)
    story.set(3, 0, 6)
    story.forward([0], [6])
    used = state.num_used_pages
    for child, position in ((1, 6), (2, 3), (3, 0)):
        story.fork(0, child, position)
    assert state.num_used_pages == used
    assert state.sequence_pages(0)[1] >= 3
    assert state.sequence_pages(3) == (3, 3)
    for layer, seq_id in ((1, 1), (3, 2)):
        given = story.rows(layer, 2)
        message = refused(state, FailedPrecondition, partial(state.set_cross_kv, layer, seq_id, *given))
        assert "already" in message
    story.remove(0)
    story.forward([3, 1, 2], [2, 1, 1])
    story.check()
    for seq_id in (1, 3):
        story.remove(seq_id)
    assert state.state.parts.encoders is not None
    assert state.state.parts.encoders.table.pool.num_used == 3
    story.remove(2)
    assert state.empty()
    story.check()


def test_a_layer_that_is_set_after_a_fork_belongs_to_one_side() -> None:
    story = Story("alone", cross_capacity=40)
    state = story.state
    story.add(0)
    story.set(0, 0, 9)
    story.fork(0, 1)
    story.fork(0, 2)
    story.set(1, 1, 14)
    assert state.num_splits == 3
    assert state.num_used_pages == 3 + 4
    story.check()
    refused(state, ResourceExhausted, lambda: state.set_cross_kv(1, 0, *story.rows(1, 16)))
    story.set(1, 0, 3)
    story.check()
    # The last holder writes in place.
    story.set(1, 2, 2)
    assert state.num_splits == 6
    story.check()
    story.forward([0, 1, 2], [2, 1, 3])


def test_a_small_layer_may_need_a_copy_of_a_large_one() -> None:
    """Three pages are held, one is free: two rows on one side of a fork would need three."""
    story = Story("alone", cross_capacity=16)
    story.add(0)
    story.set(0, 0, 9)
    story.fork(0, 1)
    story.set(1, 1, 2)
    assert 1 not in story.held[1].rows
    story.remove(0)
    story.set(1, 1, 2)
    assert 1 in story.held[1].rows
    assert story.state.num_used_pages == 3
    story.check()


def test_neither_pop_nor_commit_nor_abort_touches_it() -> None:
    story = Story("hybrid")
    state = story.state
    story.add(0)
    story.set(1, 0, 5)
    story.forward([0], [6])
    state.popn(0, 6)
    assert state.sequence_length(0) == 0
    story.check()
    state.begin_forward([0], [2])
    story.set(3, 0, 7)
    state.abort_forward()
    story.check()
    story.forward([0], [2], abort=True)
    story.forward([0], [3], [[-1, 0, 0]])
    assert state.total_sequence_length() == 3
    refused(state, FailedPrecondition, lambda: state.set_cross_kv(3, 0, *story.rows(3, 1)))
    state.commit_accepted_token_tree_nodes([0], [-1])
    story.check()
    story.forward([0], [1])
    state.clear()
    assert state.empty()
    assert state.state.parts.encoders is not None
    assert state.state.parts.encoders.table.pool.num_used == 0


def test_set_between_two_layers_of_a_forward() -> None:
    """Also of a sequence that shares with a fork, whose plan was made already."""
    story = Story("alone")
    story.add(0)
    story.set(0, 0, 6)
    story.fork(0, 1)
    story.state.begin_forward([1, 0], [2, 1])
    story.run(0, [1, 0], [2, 1])
    story.run(1, [1, 0], [2, 1])
    story.set(1, 1, 6)
    story.run(0, [1, 0], [2, 1])
    story.run(1, [1, 0], [2, 1])
    story.set(1, 0, 6)
    for layer in (0, 1):
        story.run(layer, [1, 0], [2, 1])
    story.state.end_forward()
    story.check()


def test_pages_are_counted() -> None:
    story = Story("beside", page_size=4, cross_capacity=9)
    state = story.state
    plain = contract([LAYOUTS["beside"][0], LAYOUTS["beside"][2]], capacity=4096, page_size=4, backend=SdpaAttention())
    assert state.num_pages == plain.num_pages + 3
    assert state.num_available_pages() == plain.num_available_pages() == 1024
    assert state.num_bytes == plain.num_bytes + 12 * 4 * (2 * 11 + 1 * 8)
    story.add(0)
    story.set(1, 0, 9)
    assert state.num_used_pages == 3
    assert state.num_available_pages() == 1024
    assert state.missing_pages([0], [40]) == 0
    assert not state.empty()
    alone = Story("alone").state
    assert alone.num_available_pages() == 1024
    assert alone.capacity is None
    alone.add_sequence(0)
    assert alone.missing_pages([0], [10**6]) == 0


def test_rows_behind_the_last_one_are_zero() -> None:
    """A page that changes hands may hold NaN, and a weight of 0 does not hide it."""
    for order in ((0, 1), (1, 0)):
        story = Story("alone", cross_capacity=20)
        story.add(0)
        for layer in story.layers:
            k, v = story.rows(layer, 20)
            story.state.set_cross_kv(layer, 0, torch.full_like(k, torch.nan), torch.full_like(v, torch.nan))
        story.remove(0)
        story.add(1, 2)
        for layer, sizes in zip(order, ((5, 9), (7, 2)), strict=True):
            for seq_id, size in zip((1, 2), sizes, strict=True):
                story.set(layer, seq_id, size)
        assert story.state.state.parts.encoders is not None
        for seq_id in (1, 2):
            for layer in story.layers:
                last = -(-len(story.held[seq_id].rows[layer].k) // 4) * 4
                slots = story.state.state.parts.encoders.table.slots(seq_id, range(last))
                assert story.state.state.parts.encoders.stored(layer).k[slots].isfinite().all()
                assert story.state.state.parts.encoders.stored(layer).v[slots].isfinite().all()
        story.forward([1, 2], [3, 2])
        story.forward([2, 1], [1, 1])
        story.check()


def test_debug_set_changes_one_sequence() -> None:
    story = Story("beside", cross_capacity=24)
    state = story.state
    story.add(0)
    story.set(1, 0, 9)
    story.set(3, 0, 5)
    story.fork(0, 1)
    k, v = story.rows(1, 3)
    state.debug_set_kv(1, 4, k, v, layer=1)
    old = story.held[0].rows
    changed = Rows(*(torch.cat((was[:4], new, was[7:])) for was, new in zip(old[1], (k, v), strict=True)))
    story.held[1] = Held({**old, 1: changed})
    assert state.num_splits == 3
    story.check()
    state.debug_set_kv(1, 0, k, v, layer=1)
    assert state.num_splits == 3
    state.debug_set_kv(1, 9, k[:0], v[:0], layer=1)
    first, _ = state.debug_get_kv(1, 1, 3, layer=1)
    assert same_bits(first, k[1:3])
    into = (torch.zeros(2, 2, 6), torch.zeros(2, 2, 5))
    assert state.debug_get_kv(1, 1, 3, layer=1, relative=True, out=into)[0] is into[0]
    assert same_bits(into[1], v[1:3])
    assert state.debug_get_kv(0, 9, layer=1)[0].shape == (0, 2, 6)
    story.fork(0, 2)
    state.begin_forward([0], [1])
    for start, given in ((0, (k, v)), (2, (k[:0], v[:0]))):
        message = refused(state, FailedPrecondition, partial(state.debug_set_kv, 1, start, *given, layer=1))
        assert "forward is open" in message
    assert same_bits(state.debug_get_kv(1, 0, 3, layer=1)[0], k)
    state.abort_forward()
    message = refused(state, ResourceExhausted, lambda: state.debug_set_kv(2, 0, k, v, layer=1))
    assert "3 pages" in message
    assert "0 of 6" in message


# -- a random run ----------------------------------------------------------------------------------


def random_run(layout: str, seed: int, steps: int) -> None:
    rng = random.Random(seed)
    story = Story(layout, page_size=rng.choice([1, 2, 4, 5]), cross_capacity=rng.choice([12, 40, 90]), seed=seed)
    state, fresh = story.state, 0
    for _ in range(steps):
        ids = sorted(story.held)
        settled = [seq_id for seq_id in ids if seq_id not in story.nodes]
        act = rng.choice(
            ["add", "set", "set", "fork", "pop", "remove", "forward", "forward", "commit", "abort", "overwrite"]
        )
        if act == "add" and len(ids) < 6:
            story.add(fresh)
            fresh += 1
        elif act == "set" and ids:
            seq_id, layer = rng.choice(ids), rng.choice(sorted(story.layers))
            if layer in story.held[seq_id].rows:
                given = story.rows(layer, 2)
                refused(state, FailedPrecondition, partial(state.set_cross_kv, layer, seq_id, *given))
            else:
                story.set(layer, seq_id, rng.randint(1, 11))
        elif act == "fork" and settled and len(ids) < 7:
            parent = rng.choice(settled)
            story.fork(parent, fresh, state.nearest_reachable(parent, rng.randint(0, state.sequence_length(parent))))
            fresh += 1
        elif act == "pop" and settled:
            seq_id = rng.choice(settled)
            target = state.nearest_reachable(seq_id, rng.randint(0, state.sequence_length(seq_id)))
            state.popn(seq_id, state.sequence_length(seq_id) - target)
        elif act == "remove" and ids and rng.random() < 0.5:
            story.remove(rng.choice(ids))
        elif act in ("forward", "abort") and ids:
            batch = rng.sample(ids, rng.randint(1, len(ids)))
            counts = [rng.choice([1, 1, 2, 3, 7]) for _ in batch]
            trees: list[list[int] | None] = []
            for seq_id, count in zip(batch, counts, strict=True):
                old = story.nodes.get(seq_id, 0)
                grow = bool(old) or rng.random() < 0.3
                trees.append([rng.randint(-1, old + node - 1) for node in range(count)] if grow else None)
            story.forward(batch, counts, trees, abort=act == "abort", pad=rng.choice([0, 3]))
        elif act == "commit" and story.nodes:
            chosen = rng.sample(sorted(story.nodes), rng.randint(1, len(story.nodes)))
            state.commit_accepted_token_tree_nodes(chosen, [rng.randint(-1, story.nodes[one] - 1) for one in chosen])
            for seq_id in chosen:
                del story.nodes[seq_id]
        elif act == "overwrite" and ids:
            overwrite(story, rng)
        story.check()
    for seq_id in sorted(story.held):
        story.remove(seq_id)
    assert state.empty()


def overwrite(story: Story, rng: random.Random) -> None:
    """``debug_set_kv`` of some rows of some layer."""
    state = story.state
    choices = [(seq_id, layer) for seq_id, one in story.held.items() for layer in one.rows]
    if not choices:
        return
    seq_id, layer = rng.choice(choices)
    mine = story.held[seq_id]
    old = mine.rows[layer]
    start = rng.randint(0, len(old.k) - 1)
    given = story.rows(layer, rng.randint(1, len(old.k) - start))
    shared = sum(one is mine for one in story.held.values()) > 1
    assert state.state.parts.encoders is not None
    if shared and mine.pages(state.page_size) > state.state.parts.encoders.table.pool.num_free:
        refused(state, ResourceExhausted, lambda: state.debug_set_kv(seq_id, start, *given, layer=layer))
        return
    state.debug_set_kv(seq_id, start, *given, layer=layer)
    stop = start + len(given.k)
    new = Rows(*(torch.cat((was[:start], now, was[stop:])) for was, now in zip(old, given, strict=True)))
    story.held[seq_id] = Held({**mine.rows, layer: new})


@pytest.mark.product(8)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_random_run(layout: str, seed: int) -> None:
    random_run(layout, seed, 60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_random_run_for_long(layout: str, seed: int) -> None:
    random_run(layout, seed, 250)


# -- export and import -----------------------------------------------------------------------------


def told(layout: str, **more: Any) -> Story:
    """A story with sequences 0, of which both layers are set, and its fork 1, at a page that is
    full in part.
    """
    story = Story(layout, **more)
    story.add(0)
    for layer, size in zip(story.layers, (9, 6), strict=True):
        story.set(layer, 0, size)
    story.forward([0], [7])
    story.fork(0, 1)
    story.forward([1], [2])
    return story


@pytest.mark.product(2)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize(("page_size", "other"), [(4, 5), (5, 1), (1, 16), (4, 4)])
def test_export_and_import(layout: str, page_size: int, other: int) -> None:
    source, target = told(layout, page_size=page_size, first_layer=3), Story(layout, page_size=other, first_layer=3)
    metadata = json.loads(json.dumps(source.state.get_checkpoint_metadata(1)))
    assert metadata["cross"] == [
        {"layer": layer, "rows": size} for layer, size in zip(source.layers, (9, 6), strict=True)
    ]
    groups = {one["group"]: source.state.export_page_group(1, one["group"]) for one in metadata["groups"]}
    assert sorted(groups) == sorted(source.specs)
    for layer, rows in source.held[1].rows.items():
        assert same_bits(groups[layer]["k"], rows.k)
        assert same_bits(groups[layer]["v"], rows.v)
    target.add(9)
    target.set(next(iter(target.layers)), 9, 3)
    target.state.prepare_import(4, metadata)
    target.state.check()
    for layer in sorted(groups, reverse=True):
        target.state.import_page_group(4, layer, groups[layer])
    target.state.finish_import(4)
    target.held[4] = Held(dict(source.held[1].rows))
    target.check()
    again = json.loads(json.dumps(target.state.get_checkpoint_metadata(4)))
    assert again == metadata
    target.fork(4, 5)
    target.forward([5, 4], [2, 1])
    target.check()


def test_a_layer_that_is_not_set_is_no_group() -> None:
    source, target = Story("beside"), Story("beside", page_size=3)
    source.add(0)
    source.set(3, 0, 5)
    metadata = json.loads(json.dumps(source.state.get_checkpoint_metadata(0)))
    assert metadata["cross"] == [{"layer": 1, "rows": None}, {"layer": 3, "rows": 5}]
    assert [one["group"] for one in metadata["groups"]] == [0, 2, 3]
    refused(source.state, FailedPrecondition, lambda: source.state.export_page_group(0, 1))
    target.state.prepare_import(0, metadata)
    given = dict(zip("kv", source.rows(1, 2), strict=True))
    assert "not set" in refused(target.state, InvalidArgument, lambda: target.state.import_page_group(0, 1, given))
    rows = source.rows(1, 2)
    assert "being imported" in refused(target.state, FailedPrecondition, lambda: target.state.set_cross_kv(1, 0, *rows))
    for group in (0, 2, 3):
        with pytest.raises(FailedPrecondition, match="missing"):
            target.state.finish_import(0)
        target.state.import_page_group(0, group, source.state.export_page_group(0, group))
    target.state.finish_import(0)
    target.held[0] = Held(dict(source.held[0].rows))
    target.set(1, 0, 8)
    target.forward([0], [3])
    target.check()


def test_imports_that_do_not_fit() -> None:
    source, target = told("beside"), Story("beside", cross_capacity=8)
    state = target.state
    metadata = source.state.get_checkpoint_metadata(0)
    message = refused(state, ResourceExhausted, lambda: state.prepare_import(0, metadata))
    assert "3 pages" in message
    assert "2 of 2 are free" in message
    target = Story("beside")
    state = target.state
    for wrong in (
        None,
        [],
        [{"layer": 1, "rows": 9}],
        [{"layer": 3, "rows": 6}, {"layer": 1, "rows": 9}],
        [{"layer": 1, "rows": 0}, {"layer": 3, "rows": 6}],
        [{"layer": 1, "rows": True}, {"layer": 3, "rows": 6}],
        [{"layer": 1, "rows": "9"}, {"layer": 3, "rows": 6}],
        [{"layer": 1, "rows": 9, "more": 1}, {"layer": 3, "rows": 6}],
        [{"layer": 1, "rows": 8}, {"layer": 3, "rows": 6}],
        [{"layer": 1, "rows": None}, {"layer": 3, "rows": 6}],
        [7, 8],
    ):
        given = {**metadata, "cross": wrong}
        refused(state, InvalidArgument, partial(state.prepare_import, 0, given))
    plain = contract([LAYOUTS["beside"][0]], capacity=64, backend=SdpaAttention())
    plain.add_sequence(0)
    given = {**plain.get_checkpoint_metadata(0), "cross": []}
    assert "no cross layers" in refused(plain, InvalidArgument, lambda: plain.prepare_import(1, given))
    state.prepare_import(0, metadata)
    tensors = source.state.export_page_group(0, 1)
    damaged = {**tensors, "v": tensors["v"].clone()}
    damaged["v"][2, 1, 0] += 1
    refused(state, DataLoss, lambda: state.import_page_group(0, 1, damaged))
    short = {name: tensor[:-1] for name, tensor in tensors.items()}
    refused(state, InvalidArgument, lambda: state.import_page_group(0, 1, short))
    state.import_page_group(0, 1, tensors)
    refused(state, FailedPrecondition, lambda: state.import_page_group(0, 1, tensors))
    refused(state, FailedPrecondition, lambda: state.set_cross_kv(1, 0, tensors["k"], tensors["v"]))
    refused(state, FailedPrecondition, lambda: state.debug_get_kv(0, layer=1))
    refused(state, FailedPrecondition, lambda: state.debug_set_kv(0, 0, tensors["k"], tensors["v"], layer=1))
    refused(state, FailedPrecondition, lambda: state.export_page_group(0, 1))
    state.check()
    state.remove_sequence(0)
    assert state.empty()


def test_export_into_given_tensors() -> None:
    story = told("alone")
    group = story.state.export_page_group(0, 0)
    out = {name: torch.empty_like(tensor) for name, tensor in group.items()}
    assert story.state.export_page_group(0, 0, out) is out
    assert same_bits(out["k"], group["k"])
    wrong = {"k": out["k"][:-1], "v": out["v"]}
    refused(story.state, InvalidArgument, lambda: story.state.export_page_group(0, 0, wrong))


def test_the_layout_covers_the_geometry() -> None:
    def layout(*specs: LayerSpec, dtype: torch.dtype = torch.float32, page_size: int = 4) -> str:
        return contract(
            specs, capacity=8, cross_capacity=8, dtype=dtype, page_size=page_size, backend=SdpaAttention()
        ).get_layout_hash()

    mine = layout(attention(), WIDE)
    assert mine == layout(attention(), WIDE, page_size=2)
    others = [
        layout(attention(), NARROW),
        layout(WIDE, attention()),
        layout(attention(), WIDE, WIDE),
        layout(attention(), WIDE, dtype=torch.bfloat16),
        layout(attention(), CrossAttention(num_heads=4, num_kv_heads=2, head_dim=6, value_dim=6)),
        contract([attention()], capacity=8, backend=SdpaAttention()).get_layout_hash(),
        contract(
            [attention(), FullAttention(num_heads=4, num_kv_heads=2, head_dim=6, value_dim=5)],
            capacity=8,
            backend=SdpaAttention(),
        ).get_layout_hash(),
    ]
    assert len({mine, *others}) == 1 + len(others)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_file(layout: str, dtype: torch.dtype) -> None:
    source, target = told(layout), Story(layout, page_size=5, dtype=dtype)
    source.state.add_sequence(7)
    source.held[7] = Held({})
    late = list(source.layers)[1]
    source.set(late, 7, 2)
    for seq_id in (1, 7):
        metadata, plan, tensors = sequencefile.describe(source.state, seq_id)
        data = to_bytes({"sequence": metadata}, plan, tensors)
        with read_state(data) as file:
            given: Any = file.metadata["sequence"]
            convert = dtype != torch.float32
            if convert:
                refused(target.state, InvalidArgument, lambda: sequencefile.check(target.state, file, given, "", False))  # noqa: B023
            checked = sequencefile.check(target.state, file, given, "", convert)
            assert set(file.names) == sequencefile.tensor_names(checked)
            sequencefile.load(target.state, seq_id, file, checked)
        rows = source.held[seq_id].rows
        target.held[seq_id] = Held({layer: Rows(*(one.to(dtype) for one in two)) for layer, two in rows.items()})
        target.check()
        assert sequencefile.is_exact(target.state, metadata) != convert
    target.forward([1, 7], [2, 1])


# -- what is refused -------------------------------------------------------------------------------


def test_construction() -> None:
    fields: dict[str, Any] = {"capacity": 8, "backend": SdpaAttention()}
    cases: list[tuple[list[LayerSpec], dict[str, Any], str]] = [
        ([WIDE], {}, "cross_capacity is missing"),
        ([WIDE], {"cross_capacity": 0}, "cross_capacity 0"),
        ([attention()], {"cross_capacity": 8}, "no cross layer"),
        (
            [CrossAttention(num_heads=3, num_kv_heads=2, head_dim=4, value_dim=4)],
            {"cross_capacity": 8},
            "give a divisor",
        ),
    ]
    for specs, more, word in cases:
        with pytest.raises(InvalidArgument, match=word):
            contract(specs, **fields, **more)
    with pytest.raises(InvalidArgument, match="cross_capacity is missing"):
        contract([MIXER, WIDE], num_states=4, recurrence=ReferenceRecurrence(), **fields)


BAD_CALLS: dict[str, tuple[type[QuireError], str, Callable[[Story], object]]] = {
    "an unknown layer": (InvalidArgument, "layer 9", lambda s: s.state.set_cross_kv(9, 0, *s.rows(1, 2))),
    "a layer of tokens": (Unsupported, "append_kv", lambda s: s.state.set_cross_kv(0, 0, *s.rows(1, 2))),
    "an unknown sequence": (NotFound, "sequence 9", lambda s: s.state.set_cross_kv(1, 9, *s.rows(1, 2))),
    "no rows": (InvalidArgument, "at least 1", lambda s: s.state.set_cross_kv(1, 1, *s.rows(1, 0))),
    "rows of another layer": (InvalidArgument, r"\[rows, 2, 6\]", lambda s: s.state.set_cross_kv(1, 1, *s.rows(3, 2))),
    "as many rows": (
        InvalidArgument,
        "as many rows",
        lambda s: s.state.set_cross_kv(1, 1, s.rows(1, 2).k, s.rows(1, 3).v),
    ),
    "another dtype": (
        InvalidArgument,
        "float64",
        lambda s: s.state.set_cross_kv(1, 1, *(one.double() for one in s.rows(1, 2))),
    ),
    "a scalar": (InvalidArgument, "shape", lambda s: s.state.set_cross_kv(1, 1, torch.zeros(()), torch.zeros(()))),
    "written already": (FailedPrecondition, "already", lambda s: s.state.set_cross_kv(1, 0, *s.rows(1, 2))),
    "written for a fork": (FailedPrecondition, "already", lambda s: s.state.set_cross_kv(1, 2, *s.rows(1, 2))),
    "no pages": (ResourceExhausted, "30 pages", lambda s: s.state.set_cross_kv(1, 1, *s.rows(1, 120))),
    "no forward": (FailedPrecondition, "begin_forward", lambda s: s.state.cross_attention(1, s.random(1, 4, 6))),
    "another scope": (
        InvalidArgument,
        "scope",
        lambda s: s.state.cross_attention(1, s.random(1, 4, 6), scope="new"),  # type: ignore[arg-type]
    ),
    "another head size": (InvalidArgument, "q has shape", lambda s: s.state.cross_attention(1, s.random(1, 4, 5))),
    "another number of heads": (
        InvalidArgument,
        "q has shape",
        lambda s: s.state.cross_attention(1, s.random(1, 3, 6)),
    ),
    "out of another shape": (
        InvalidArgument,
        "out is",
        lambda s: s.state.cross_attention(1, s.random(1, 4, 6), out=(s.random(1, 4, 6), s.random(1, 4))),
    ),
    "get of rows beyond": (InvalidArgument, r"rows 0\.\.10", lambda s: s.state.debug_get_kv(0, 0, 10, layer=1)),
    "get of no range": (InvalidArgument, "end 2", lambda s: s.state.debug_get_kv(0, 3, 2, layer=1)),
    "get before it is set": (FailedPrecondition, "set_cross_kv", lambda s: s.state.debug_get_kv(1, layer=1)),
    "get of an unknown sequence": (NotFound, "9", lambda s: s.state.debug_get_kv(9, layer=1)),
    "get into another shape": (
        InvalidArgument,
        "out is",
        lambda s: s.state.debug_get_kv(0, layer=1, out=(s.random(9, 2, 6), s.random(8, 2, 5))),
    ),
    "latent rows": (Unsupported, "debug_get_kv_mla: layer 1", lambda s: s.state.debug_get_kv_mla(0, layer=1)),
    "set of rows beyond": (
        InvalidArgument,
        r"rows 8\.\.10",
        lambda s: s.state.debug_set_kv(0, 8, *s.rows(1, 2), layer=1),
    ),
    "set without v": (InvalidArgument, "v is missing", lambda s: s.state.debug_set_kv(0, 0, s.rows(1, 2).k, layer=1)),
    "set of an unset layer": (
        FailedPrecondition,
        "set_cross_kv",
        lambda s: s.state.debug_set_kv(1, 0, *s.rows(1, 2), layer=1),
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_refused_without_a_trace(name: str) -> None:
    kind, word, act = BAD_CALLS[name]
    story = Story("beside", cross_capacity=116)
    story.add(0, 1)
    story.set(1, 0, 9)
    story.forward([0], [3])
    story.fork(0, 2)
    with pytest.raises(kind, match=word):
        act(story)
    generator = story.generator.get_state()
    refused(story.state, kind, lambda: act(story))
    story.generator.set_state(generator)
    story.check()


def test_verbs_of_other_layers() -> None:
    """Outside and inside a forward: the reason is that of the table, whatever is given."""
    story = Story("beside")
    story.add(0)
    story.set(1, 0, 4)
    state, x = story.state, story.random(2, 4, 6)
    verbs: list[tuple[str, Callable[[], object]]] = [
        ("attention_with_fused_qkv", lambda: state.attention_with_fused_qkv(1, x)),
        ("append_kv", lambda: state.append_kv(1, x, x)),
        ("append_mla_kv", lambda: state.append_mla_kv(1, x)),
        ("self_attention", lambda: state.self_attention(1, x, x, x)),
        ("attention_with_shared_kv", lambda: state.attention_with_shared_kv(1, x)),
    ]
    for opened in (False, True):
        if opened:
            state.begin_forward([0], [2])
            verbs += [
                ("attention_with_fused_qkv", lambda: state.open_pass().attend(1, x, x, x)),
                ("attention_with_fused_qkv", lambda: state.open_pass().attend_qkv(1, x)),
                ("attention_with_shared_kv", lambda: state.open_pass().attend_shared(1, x)),
                ("append_mla_kv", lambda: state.open_pass().attend_latent(1, x, x, None)),  # type: ignore[arg-type]
            ]
        for verb, act in verbs:
            assert f"{verb}: layer 1 is of kind 'cross'" in refused(state, Unsupported, act)


def test_states_of_cross_layers_only() -> None:
    story = Story("alone")
    story.add(0)
    story.set(0, 0, 4)
    state = story.state
    story.forward([0], [5])
    assert state.sequence_length(0) == 5
    assert state.num_used_pages == 1
    assert "cross layers only" in refused(state, Unsupported, lambda: state.enable_sliding_window_for_seq(0, 4))
    for act in (
        lambda: state.debug_get_kv(0),
        lambda: state.debug_get_kv_mla(0),
        lambda: state.debug_set_kv(0, 0, *story.rows(0, 2)),
    ):
        assert "layer=" in refused(state, Unsupported, act)
    mixed = contract(
        [LatentAttention(num_heads=2, row_dim=6, value_dim=4), WIDE],
        capacity=8,
        cross_capacity=8,
        backend=SdpaAttention(),
    )
    mixed.add_sequence(0)
    mixed.set_cross_kv(1, 0, *story.rows(0, 3))
    assert mixed.debug_get_kv_mla(0).shape == (1, 0, 6)
    assert mixed.debug_get_kv(0, layer=1)[0].shape == (3, 2, 6)


def test_end_forward_asks_for_no_cross_layer() -> None:
    story = Story("hybrid")
    state = story.state
    story.add(0)
    state.begin_forward([0], [2])
    with pytest.raises(FailedPrecondition, match=r"\[2\]"):
        state.end_forward()
    state.end_forward(skipped=[1, 2, 0])
    assert state.sequence_length(0) == 2
    story.set(1, 0, 3)
    story.check()
    with pytest.raises(Unsupported, match="'cross': it keeps rows of tokens and no state"):
        state.debug_get(1, 0, 0)
    with pytest.raises(Unsupported, match="recurrent"):
        state.set_cross_kv(0, 0, *story.rows(1, 2))


def test_the_count_finds_damage() -> None:
    """``check`` is no formality."""
    for damage, word in (
        (lambda table: table.get(0).rows.update({1: 30}), "pages for rows"),
        (lambda table: table.pool.release(table.get(0).pages[:1]), "reference count"),
        (lambda table: table.fork(0, 55), "does not exist"),
    ):
        story = told("beside")
        assert story.state.state.parts.encoders is not None
        damage(story.state.state.parts.encoders.table)
        with pytest.raises(QuireError, match=word):
            story.state.check()


def test_inspection_shows_the_rows_of_encoders() -> None:
    from quire.cli.inspection import _sequence

    layer = CrossAttention(num_heads=2, num_kv_heads=1, head_dim=8, value_dim=8)
    state = contract([layer, layer], capacity=8, cross_capacity=32, backend=SdpaAttention())
    state.add_sequence(0)
    state.set_cross_kv(1, 0, torch.zeros(7, 1, 8), torch.zeros(7, 1, 8))
    shown = _sequence([], state.get_checkpoint_metadata(0))
    assert shown["encoder_rows"] == {0: None, 1: 7}
    assert shown["layers"] == {"cross, 1 KV heads of 8/8, float32": 2}
