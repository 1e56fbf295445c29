"""Latent attention: both forms against the naive one, through everything that a sequence can go
through.

Letters: T new tokens; H heads; R columns of ``c_kv``; D columns of a head, Dn without positions; V
value size.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument, NotFound, QuireError, ResourceExhausted, Unsupported
from quire.contracts.attention import AttentionBackend
from quire.contracts.kv_format import KVView
from quire.contracts.layers import LatentAttention, Recurrent, RopeSpec, StateTensor
from quire.contracts.model import LatentExpansion
from quire.kernels.attention.cpu_attention import NativeAttention
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kernels.linear.cpu_linear import native_linear
from quire.kernels.native_library import native_problem
from quire.kernels.rows.cpu_rows import native_rows
from quire.kv import sequencefile
from quire.kv.contract import ContractState
from quire.kv.rules import LAYER_VERBS, PAGED_REFUSALS, PAGED_VERBS, layer_refusal, verbs_of
from quire.nn.latent import absorbing
from quire.ops.attention import ReferenceAttention
from quire.statefile.container import read_state, to_bytes

from .faces import contract
from .oracle_latent import NaiveLatent, NaiveSequence, turned
from .pair import attention, num_columns, same_bits, snapshot, windowed

Form = Literal["pass", "verbs"]
FORMS: tuple[Form, ...] = ("pass", "verbs")
PACKED = pytest.param(True, marks=pytest.mark.skipif(bool(native_problem()), reason=native_problem()))
WAYS = pytest.mark.parametrize(
    ("form", "packed"),
    [
        *((form, False) for form in FORMS),
        pytest.param("pass", True, marks=pytest.mark.skipif(bool(native_problem()), reason=native_problem())),
    ],
)
"""How a story runs its forwards; ``packed``: see ``Story``."""
SEVEN = [-1, 0, 0, 1, 1, 2, 2]


def latent(
    heads: int = 3, rank: int = 6, rotary_dim: int = 4, *, rope: bool = True, interleaved: bool = False, **more: Any
) -> LatentAttention:
    """A layer with rows of ``rank + rotary_dim`` columns."""
    spec = RopeSpec(theta=50.0, rotary_dim=rotary_dim, interleaved=interleaved) if rope else None
    return LatentAttention(num_heads=heads, row_dim=rank + rotary_dim, value_dim=rank, rope=spec, **more)


class Story:
    """A state with one latent layer between others, and the naive layer beside it."""

    LAYER = 1

    def __init__(
        self,
        spec: LatentAttention | None = None,
        *,
        nope: int = 5,
        values: int = 7,
        page_size: int = 4,
        capacity: int = 400,
        dtype: torch.dtype = torch.float32,
        backend: AttentionBackend | None = None,
        layer_window: int = 6,
        packed: bool = False,
        seed: int = 0,
    ) -> None:
        """``packed``: the maps of a CPU's kernels, so that all rows attend in absorbed form."""
        self.spec = spec or latent(sm_scale=0.4)
        self.others = {0: attention(), 2: windowed(layer_window)}
        self.generator = torch.Generator().manual_seed(seed)
        self.nope = nope
        rank = self.spec.value_dim
        self.expansion = LatentExpansion(
            self.draw(self.spec.num_heads, nope, rank), self.draw(self.spec.num_heads, rank, values)
        )
        self.state = contract(
            [self.others[0], self.spec, self.others[2]],
            capacity=capacity,
            page_size=page_size,
            dtype=dtype,
            backend=backend or (NativeAttention() if packed else SdpaAttention()),
            rows=native_rows() if packed else None,
        )
        self.naive = NaiveLatent(self.spec, self.expansion.key_HDR, self.expansion.value_HRV, torch.finfo(dtype).eps)
        self.packed = packed

    def given(self) -> LatentExpansion:
        """The expansion as a pass gets it."""
        kernel = native_linear() if self.packed else None
        return self.expansion if kernel is None else absorbing(self.expansion, kernel)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    # -- sequences ---------------------------------------------------------------------------------

    def add(self, *ids: int) -> None:
        for seq_id in ids:
            self.state.add_sequence(seq_id)
            self.naive.sequences[seq_id] = NaiveSequence()

    def fork(self, parent: int, child: int, position: int = -1) -> None:
        self.state.fork_sequence(parent, child, position)
        self.naive.fork(parent, child, position)

    def pop(self, seq_id: int, count: int) -> None:
        assert self.state.popn(seq_id, count) == 0
        sequence = self.naive.sequences[seq_id]
        sequence.length -= count
        del sequence.rows[sequence.length :]

    def window(self, seq_id: int, size: int, sink: int, eviction: Literal["token", "forward"]) -> None:
        self.state.enable_sliding_window_for_seq(seq_id, size, sink, eviction=eviction)
        self.naive.sequences[seq_id].window = (size, sink, eviction)

    def commit(self, seq_id: int, leaf: int) -> None:
        self.state.commit_accepted_token_tree_nodes([seq_id], [leaf])
        self.naive.commit(seq_id, leaf)

    def remove(self, seq_id: int) -> None:
        self.state.remove_sequence(seq_id)
        del self.naive.sequences[seq_id]

    # -- forwards ----------------------------------------------------------------------------------

    def forward(
        self,
        ids: Sequence[int],
        counts: Sequence[int],
        parents: Sequence[Sequence[int] | None] | None = None,
        *,
        form: Form = "pass",
        mask: Callable[[int, int], Tensor] | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """One forward of random tokens, checked; ``mask(n, keys)``: of each entry.

        Returns the output ``[T, H, V]``.
        """
        state, spec, total = self.state, self.spec, sum(counts)
        q_THD = self.draw(total, spec.num_heads, self.nope + spec.row_dim - spec.value_dim)
        rows_TR = self.draw(total, spec.row_dim) if rows is None else rows
        bases = [self.naive.sequences[seq_id].length for seq_id in ids]
        stored = [len(self.naive.sequences[seq_id].rows) for seq_id in ids]
        state.begin_forward(ids, counts, parents)
        for layer, other in self.others.items():
            state.attention_with_fused_qkv(layer, self.draw(total, num_columns(other)).to(state.dtype))
        masks = [mask(count, before + count) for count, before in zip(counts, stored, strict=True)] if mask else None
        start = 0
        for entry, (seq_id, count) in enumerate(zip(ids, counts, strict=True)):
            sequence = self.naive.sequences[seq_id]
            sequence.rows.extend(rows_TR[start : start + count])
            tree = None if parents is None else parents[entry]
            if tree is not None:
                sequence.parents += list(tree)
            else:
                sequence.length += count
            start += count
        if form == "pass":
            opened = state.open_pass()
            if masks is not None:
                opened.use_mask(torch.cat([one.flatten() for one in masks]))
            out_THV = opened.attend_latent(self.LAYER, q_THD, rows_TR, self.given())
            assert out_THV.is_contiguous()
            self.check(out_THV, ids, counts, bases, stored, q_THD, masks)
        else:
            assert masks is None
            out_THV = self.by_verbs(ids, counts, bases, stored, q_THD, rows_TR)
        state.end_forward()
        state.check()
        return out_THV

    def by_verbs(
        self,
        ids: Sequence[int],
        counts: Sequence[int],
        bases: Sequence[int],
        stored: Sequence[int],
        q_THD: Tensor,
        rows_TR: Tensor,
    ) -> Tensor:
        """Both forms by the verbs of the contract, with a caller that rotates; padded."""
        state, total = self.state, sum(counts)
        rank, nope = self.spec.value_dim, self.nope
        key_HDR, value_HRV = self.expansion.key_HDR, self.expansion.value_HRV
        positions = state.get_query_positions().tolist()
        q = torch.stack([turned(q.double(), self.spec.rope, p) for q, p in zip(q_THD, positions, strict=True)]).float()
        rows = torch.stack([turned(r.double(), self.spec.rope, p) for r, p in zip(rows_TR, positions, strict=True)])
        rows = rows.float()
        pad = torch.full((2, *q.shape[1:]), torch.nan)
        state.append_mla_kv(self.LAYER, torch.cat((rows, torch.full((2, rows.shape[1]), torch.nan))))
        absorbed = torch.cat((torch.einsum("thd,hdr->thr", q[..., :nope], key_HDR), q[..., nope:]), -1)
        out, lse = state.cross_attention(self.LAYER, absorbed, scope="all")
        whole = torch.einsum("thr,hrv->thv", out, value_HRV)
        self.check(whole, ids, counts, bases, stored, q_THD, None, lse)
        k = torch.cat(
            (torch.einsum("tr,hdr->thd", rows[:, :rank], key_HDR), rows[:, None, rank:].expand(-1, len(key_HDR), -1)),
            -1,
        )
        v = torch.einsum("tr,hrv->thv", rows[:, :rank], value_HRV)
        own, own_lse = state.self_attention(
            self.LAYER, torch.cat((q, pad)), torch.cat((k, pad)), torch.cat((v, v.new_ones(2, *v.shape[1:])))
        )
        assert own[total:].eq(0).all()
        assert own_lse[total:].isneginf().all()
        past, past_lse = state.cross_attention(self.LAYER, absorbed)
        past = torch.einsum("thr,hrv->thv", past, value_HRV)
        self.check(own[:total], ids, counts, bases, stored, q_THD, None, own_lse[:total], within="own")
        self.check(past, ids, counts, bases, stored, q_THD, None, past_lse, within="past")
        merged, merged_lse = state.merge(own[:total], own_lse[:total], past, past_lse)
        self.check(merged, ids, counts, bases, stored, q_THD, None, merged_lse)
        return merged

    def check(
        self,
        out_THV: Tensor,
        ids: Sequence[int],
        counts: Sequence[int],
        bases: Sequence[int],
        stored: Sequence[int],
        q_THD: Tensor,
        masks: list[Tensor] | None,
        lse_TH: Tensor | None = None,
        within: str = "all",
    ) -> None:
        row = 0
        for entry, (seq_id, count, base, old) in enumerate(zip(ids, counts, bases, stored, strict=True)):
            keys = {"all": None, "own": range(old, old + count), "past": range(old)}[within]
            for j in range(count):
                allowed = masks[entry][j].tolist() if masks else None
                found = self.naive.answer(seq_id, old + j, base, q_THD[row], within=keys, allowed=allowed)
                where = f"row {j} of sequence {seq_id} over {found.seen}"
                assert ((out_THV[row].double() - found.out_HV).abs() <= found.out_bound_HV).all(), where
                if lse_TH is not None:
                    off = (lse_TH[row].double() - found.lse_H).abs()
                    blind = found.lse_H.isneginf() & lse_TH[row].isneginf()
                    assert (blind | (off <= found.lse_bound_H)).all(), where
                row += 1


# -- forwards --------------------------------------------------------------------------------------


@pytest.mark.product(4)
@WAYS
@pytest.mark.parametrize("page_size", [1, 4, 5, 16])
def test_prompts_pieces_and_decodes(page_size: int, form: Form, packed: bool) -> None:
    story = Story(page_size=page_size, packed=packed)
    story.add(0, 1, 2)
    story.forward([0, 1], [7, 3], form=form)
    story.forward([1, 0, 2], [1, 1, 5], form=form)
    story.forward([0, 1, 2], [1, 1, 1], form=form)
    story.forward([2, 0], [20, 1], form=form)
    story.forward([1], [1], form=form)


@pytest.mark.product(2)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("backend", [SdpaAttention(), ReferenceAttention()], ids=lambda one: one.name)
def test_every_chunking_of_twelve_tokens(backend: AttentionBackend, interleaved: bool) -> None:
    rows = torch.randn(12, 10)
    for chunks in ([12], [1] * 12, [5, 7], [1, 11], [11, 1], [4, 4, 4], [2, 1, 9]):
        story = Story(latent(interleaved=interleaved, sm_scale=0.3), backend=backend)
        story.add(0)
        start = 0
        for count in chunks:
            story.forward([0], [count], rows=rows[start : start + count])
            start += count
        stored = story.state.debug_get_kv_mla(0, layer=1)
        if chunks == [12]:
            first = stored
        assert torch.allclose(stored, first, rtol=0, atol=4 * torch.finfo(torch.float32).eps * float(rows.abs().max()))


def test_form_of_each_batch() -> None:
    """Expanded are new tokens among themselves; absorbed is what was stored before, and every
    decode.
    """
    columns: list[tuple[str, int, int]] = []

    class Spy(SdpaAttention):
        def run(self, made: Any, q: Tensor, new: Any, view: KVView, *rest: Any, **more: Any) -> Tensor:
            columns.append(("run", q.shape[2], view.sizes[2]))
            return super().run(made, q, new, view, *rest, **more)

        def run_state(self, made: Any, q: Tensor, new: Any, view: KVView, *rest: Any, **more: Any) -> Any:
            columns.append(("run_state", q.shape[2], view.sizes[2]))
            return super().run_state(made, q, new, view, *rest, **more)

    story = Story(backend=Spy())
    story.add(0, 1)
    for counts, expected in (
        ([4, 2], [("run", 9, 7)]),
        ([1, 1], [("run", 10, 6)]),
        ([1, 3], [("run_state", 9, 7), ("run_state", 10, 6)]),
    ):
        columns.clear()
        story.forward([0, 1], counts)
        assert [one for one in columns if one[1] != 8] == expected


@pytest.mark.slow
def test_long_chunks() -> None:
    """Beyond every bound at which the kernels cut chunks, with and without a past."""
    story = Story(latent(2, 4, 2, sm_scale=0.5), page_size=16)
    story.add(0, 1, 2)
    story.forward([0, 1], [70, 33])
    story.forward([1, 0, 2], [40, 25, 17])
    story.forward([2, 0, 1], [3, 1, 18])


def test_without_rotation_and_scale() -> None:
    """The scale is that of the row in both forms, as a spec without one says."""
    story = Story(latent(rope=False))
    assert story.spec.scale == 10**-0.5
    story.add(0)
    story.forward([0], [5])
    story.forward([0], [4], form="verbs")
    story.forward([0], [1])


@WAYS
@pytest.mark.parametrize("heads", [16, pytest.param(128, marks=pytest.mark.slow)])
def test_large_geometry(heads: int, form: Form, packed: bool) -> None:
    """DeepSeek's: 16 (V2-Lite) or 128 heads of 128 + 64 columns, rank 512, values of 128."""
    spec = latent(heads, 512, 64, interleaved=True, sm_scale=192**-0.5)
    story = Story(spec, nope=128, values=128, page_size=16, capacity=64, packed=packed)
    # As if by matrices of variance 1 / columns, so that scores are of the size of one.
    story.expansion.key_HDR.mul_(512**-0.5)
    story.expansion.value_HRV.mul_(512**-0.5)
    story.naive = NaiveLatent(spec, story.expansion.key_HDR, story.expansion.value_HRV, torch.finfo(torch.float32).eps)
    story.add(0, 1)
    story.forward([0], [6], form=form)
    story.forward([1, 0], [3, 1], form=form)
    story.fork(0, 2, 5)
    story.forward([0, 1, 2], [1, 1, 1], form=form)


@pytest.mark.parametrize("packed", [False, PACKED])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_less_precision(dtype: torch.dtype, packed: bool) -> None:
    """A model of float32 over stored rows of less: what was rounded when it was stored is read so
    by both forms.
    """
    story = Story(dtype=dtype, page_size=5, packed=packed)
    story.add(0)
    for count in (6, 1, 3, 1):
        out = story.forward([0], [count])
        assert out.dtype == torch.float32
    rows = story.state.debug_get_kv_mla(0, layer=1)
    assert rows.dtype == dtype


# -- sequences -------------------------------------------------------------------------------------


@pytest.mark.turns(2)
@WAYS
def test_fork_and_pop_at_every_position(form: Form, packed: bool) -> None:
    story = Story(page_size=4, packed=packed, layer_window=64)
    story.add(0)
    story.forward([0], [9], form=form)
    for position in range(10):
        story.fork(0, 10 + position, position)
    story.forward([10 + position for position in range(10)], [1 + position % 3 for position in range(10)], form=form)
    for position in range(10):
        child = 10 + position
        story.pop(child, 1 + position // 2)
        story.forward([child, 0], [2, 1], form=form)
    while len(story.naive.sequences) > 0:
        story.remove(next(iter(story.naive.sequences)))
    assert story.state.empty()


@pytest.mark.turns(2)
@WAYS
def test_trees_over_several_forwards(form: Form, packed: bool) -> None:
    story = Story(page_size=4, packed=packed)
    story.add(0, 1, 2)
    story.forward([0, 1, 2], [6, 3, 9], form=form)
    story.fork(0, 3, 5)
    story.forward([0, 1, 3], [7, 2, 4], [SEVEN, None, [-1, -1, 0, 1]], form=form)
    story.forward([0, 3, 2], [2, 1, 1], [[3, 6], [2], None], form=form)
    # Nodes by themselves, absorbed.
    story.forward([3, 0], [1, 1], [[0], [8]], form=form)
    story.commit(0, 9)
    story.commit(3, -1)
    assert story.state.sequence_length(0) == 6 + 5
    for _ in range(3):
        story.forward([0, 3, 1, 2], [1, 1, 1, 1], form=form)
    story.forward([0, 3], [5, 4], form=form)


@pytest.mark.product(8)
@WAYS
@pytest.mark.parametrize("eviction", ["token", "forward"])
@pytest.mark.parametrize(("size", "sink"), [(6, 2), (9, 0), (5, 4), (20, 6)])
def test_windows_with_sinks(
    size: int, sink: int, eviction: Literal["token", "forward"], form: Form, packed: bool
) -> None:
    """The sink is seen by a query turned back, in expanded and in absorbed form."""
    story = Story(page_size=4, capacity=200, packed=packed)
    story.add(0, 1)
    story.window(0, size, sink, eviction)
    story.forward([0, 1], [4, 6], form=form)
    story.forward([0, 1], [size + 3, 1], form=form)
    story.window(1, size + 1, sink, eviction)
    for counts in ([1, 9], [5, 5], [1, 1], [2, 1], [1, 1]):
        story.forward([0, 1], counts, form=form)
    story.fork(0, 2)
    story.forward([2, 0], [2, 1], form=form)
    story.forward([0, 1], [3, 1], [[-1, 0, 0], None], form=form)
    story.forward([0], [2], [[1, 2]], form=form)
    story.commit(0, 3)
    story.forward([0, 2], [1, 1], form=form)


def test_windows_far_out() -> None:
    """Beyond the table of angles, where the query of the sink is turned back by as much."""
    length, story, again = 300_000, Story(page_size=16), Story(page_size=16)
    story.add(0)
    story.window(0, 6, 2, "token")
    story.forward([0], [6])
    metadata = story.state.get_checkpoint_metadata(0)
    metadata |= {"length": length, "evicted": length - 6}
    for held in metadata["held"]:
        held["ranges"] = [[0, 2], [length - 4, length]]
    groups = [story.state.export_page_group(0, group) for group in range(3)]
    # The rows of the window are at their place now.
    raw = story.naive.sequences[0].rows
    places = [0, 1, *range(length - 4, length)]
    groups[1]["latent"] = torch.stack(
        [turned(row.double(), story.spec.rope, place) for row, place in zip(raw, places, strict=True)]
    ).float()
    for group in metadata["groups"]:
        for about in group["tensors"].values():
            about["checksum"] = ""
    again.state.prepare_import(1, metadata)
    for group, tensors in enumerate(groups):
        again.state.import_page_group(1, group, tensors)
    again.state.finish_import(1)
    nothing = torch.zeros(10)
    rows = [*raw[:2], *[nothing] * (length - 6), *raw[2:]]
    again.naive.sequences[1] = NaiveSequence(rows, length, [], (6, 2, "token"))
    again.naive.key, again.naive.value = story.naive.key, story.naive.value
    for form in FORMS:
        again.forward([1], [1], form=form)
    again.forward([1], [2])


# -- masks and weights -----------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, PACKED])
def test_masks(packed: bool) -> None:
    """A mask replaces the causal and tree rule, over the past and over the new tokens."""
    picks = torch.Generator().manual_seed(3)

    def mask(n: int, keys: int) -> Tensor:
        found = torch.rand(n, keys, generator=picks) < 0.5
        found[0] = False
        return found

    story = Story(packed=packed)
    story.add(0, 1)
    story.forward([0, 1], [6, 2], mask=mask)
    story.forward([1, 0], [4, 5], mask=mask)
    story.forward([1, 0], [1, 1], mask=mask)
    story.window(0, 7, 2, "token")
    story.forward([0, 1], [3, 2], mask=lambda n, keys: torch.ones(n, keys, dtype=torch.bool))
    story.forward([1], [3], [[-1, 0, 0]], mask=mask)
    story.forward([1, 0], [2, 3], [[1, 0], None], mask=mask)
    # With a window it is the positions of nodes that count, whatever the mask.
    story.forward([0], [7], [SEVEN], mask=lambda n, keys: torch.ones(n, keys, dtype=torch.bool))
    story.forward([0, 1], [3, 1], [[3, 7, 8], [2]], mask=lambda n, keys: torch.ones(n, keys, dtype=torch.bool))
    story.forward([0], [1], [[9]], mask=lambda n, keys: torch.ones(n, keys, dtype=torch.bool))


def test_own_mask_of_self_attention() -> None:
    story = Story()
    story.add(0)
    story.forward([0], [3])
    story.state.begin_forward([0], [2])
    q, k, v = torch.randn(2, 3, 9), torch.randn(2, 3, 9), torch.randn(2, 3, 7)
    seen = torch.tensor([[False, True], [True, False]])
    out, _ = story.state.self_attention(1, q, k, v, mask=seen.flatten())
    assert torch.allclose(out, v.flip(0))


@pytest.mark.parametrize("packed", [False, PACKED])
@pytest.mark.parametrize("counts", [[1, 1], [4, 1]])
def test_captured_weights(counts: list[int], packed: bool) -> None:
    story = Story(packed=packed)
    story.add(0, 1)
    story.forward([0, 1], [5, 3])
    story.state.begin_forward([0, 1], counts)
    opened = story.state.open_pass()
    opened.capture_weights()
    q, rows = story.draw(sum(counts), 3, 9), story.draw(sum(counts), 10)
    out = opened.attend_latent(1, q, rows, story.given())
    start = 0
    for seq_id, count, weights in zip((0, 1), counts, opened.weights[1], strict=True):
        stored = [*story.naive.sequences[seq_id].rows, *rows[start : start + count]]
        c = torch.stack(stored)[:, :6]
        v = torch.einsum("mr,hrv->mhv", c, story.expansion.value_HRV)
        expected = torch.einsum("hnm,mhv->nhv", weights, v)
        assert weights.shape == (3, count, len(stored))
        assert torch.allclose(weights.sum(-1), torch.ones(3, count))
        # Sums over rows and columns of the latent, in two orders.
        bound = (
            2
            * (len(stored) + 6)
            * torch.finfo(torch.float32).eps
            * float(c.abs().max() * story.expansion.value_HRV.abs().sum(1).max())
        )
        assert float((out[start : start + count] - expected).abs().max()) <= bound
        start += count


# -- rows ------------------------------------------------------------------------------------------


def test_append_stores_what_is_given() -> None:
    story = Story()
    story.add(0, 1)
    story.state.begin_forward([0, 1], [3, 2])
    rows = torch.randn(5, 10)
    story.state.append_mla_kv(1, torch.zeros(6, 10))
    story.state.append_mla_kv(1, rows)
    story.state.end_forward(skipped=[0, 2])
    assert same_bits(story.state.debug_get_kv_mla(0, layer=1), rows[:3])
    assert same_bits(story.state.debug_get_kv_mla(1), rows[None, 3:])
    out = torch.empty(1, 10)
    assert story.state.debug_get_kv_mla(1, 1, 2, layer=1, out=out) is out
    assert same_bits(out, rows[4:])
    assert story.state.debug_get_kv_mla(1, 1, 1).shape == (1, 0, 10)
    # A layer that was skipped has zeros.
    story.state.begin_forward([0], [2])
    story.state.end_forward(skipped=[0, 1, 2])
    assert story.state.debug_get_kv_mla(0, 3, layer=1).eq(0).all()


def test_debug_rows_by_relative_address() -> None:
    story = Story()
    story.add(0)
    story.window(0, 6, 2, "token")
    for count in (5, 4, 1, 3, 1):
        story.forward([0], [count])
    whole = [turned(row.double(), story.spec.rope, p) for p, row in enumerate(story.naive.sequences[0].rows)]
    expected = torch.stack([*whole[:2], *whole[-4:]])
    found = story.state.debug_get_kv_mla(0, layer=1, relative=True)
    assert torch.allclose(
        found.double(), expected, rtol=0, atol=8 * torch.finfo(torch.float32).eps * float(expected.abs().max())
    )
    assert same_bits(story.state.debug_get_kv_mla(0, 3, 5, layer=1, relative=True), found[3:5])
    with pytest.raises(FailedPrecondition, match="evicted"):
        story.state.debug_get_kv_mla(0, layer=1)


def test_set_splits_shared_pages() -> None:
    story = Story()
    story.add(0)
    story.forward([0], [7])
    story.fork(0, 1)
    state = story.state
    before = state.debug_get_kv_mla(0, layer=1)
    k = state.debug_get_kv(1, layer=0)[0]
    new = torch.randn(3, 10)
    state.debug_set_kv(1, 2, new, layer=1)
    state.check()
    assert same_bits(state.debug_get_kv_mla(0, layer=1), before)
    after = state.debug_get_kv_mla(1, layer=1)
    assert same_bits(after, torch.cat((before[:2], new, before[5:])))
    # Full layers of the same class keep theirs.
    assert same_bits(state.debug_get_kv(1, layer=0)[0], k)
    state.debug_set_kv(1, 6, new[None, :1])
    assert same_bits(state.debug_get_kv_mla(1, 6, layer=1), new[:1])
    for row in range(3):
        # As raw rows would be that are stored so.
        story.naive.sequences[1].rows[2 + row] = turned(new[row].double(), story.spec.rope, -(2 + row))
    story.naive.sequences[1].rows[6] = turned(new[0].double(), story.spec.rope, -6)
    story.forward([1, 0], [1, 1])
    story.forward([1, 0], [2, 3])


def test_nan_of_another_sequence_stays_there() -> None:
    story = Story(page_size=4)
    story.add(0)
    story.forward([0], [7])
    story.state.debug_set_kv(0, 0, torch.full((7, 10), torch.nan), layer=1)
    story.remove(0)
    story.add(1, 2)
    for count in (5, 1, 2, 1):
        story.forward([1, 2], [count, 1])


# -- export and import -----------------------------------------------------------------------------


def moved(source: Story, target: Story, seq_id: int, new_id: int) -> None:
    metadata = json.loads(json.dumps(source.state.get_checkpoint_metadata(seq_id)))
    target.state.prepare_import(new_id, metadata)
    for group in (2, 0, 1):
        target.state.import_page_group(new_id, group, source.state.export_page_group(seq_id, group))
    target.state.finish_import(new_id)
    kept = source.naive.sequences[seq_id]
    target.naive.sequences[new_id] = NaiveSequence(list(kept.rows), kept.length, [], kept.window)


@pytest.mark.product(4)
@pytest.mark.parametrize(("page_size", "other"), [(16, 5), (4, 1), (1, 16), (5, 4)])
@pytest.mark.parametrize("window", [None, (7, 2, "token"), (8, 0, "forward")])
def test_export_round_trip(window: tuple[int, int, Any] | None, page_size: int, other: int) -> None:
    source, target = Story(page_size=page_size), Story(page_size=other)
    source.add(0)
    if window:
        source.window(0, *window)
    for count in (6, 7, 1, 1):
        source.forward([0], [count])
    source.fork(0, 1)
    target.add(5)
    target.forward([5], [3])
    moved(source, target, 1, 6)
    group = source.state.export_page_group(0, 1)
    assert list(group) == ["latent"]
    assert same_bits(target.state.export_page_group(6, 1)["latent"], group["latent"])
    out = {"latent": torch.empty_like(group["latent"])}
    assert source.state.export_page_group(0, 1, out) is out
    assert same_bits(out["latent"], group["latent"])
    about = source.state.get_checkpoint_metadata(0)["groups"][1]["tensors"]["latent"]
    assert about["shape"] == list(group["latent"].shape)
    assert about["bytes"] == group["latent"].numel() * 4
    target.forward([6, 5], [1, 1])
    target.forward([5, 6], [2, 4])


def test_state_file_round_trip() -> None:
    source, target = Story(page_size=4), Story(page_size=5)
    source.add(0)
    source.forward([0], [11])
    metadata, plan, tensors = sequencefile.describe(source.state, 0)
    assert [one.name for one in plan] == ["layer.0.k", "layer.0.v", "layer.1.latent", "layer.2.k", "layer.2.v"]
    data = to_bytes({"sequence": metadata}, plan, tensors)
    with read_state(data) as file:
        checked = sequencefile.check(target.state, file, file.metadata["sequence"], "", False)  # type: ignore[arg-type]
        sequencefile.load(target.state, 3, file, checked)
    assert same_bits(target.state.debug_get_kv_mla(3), source.state.debug_get_kv_mla(0))
    target.naive.sequences[3] = source.naive.sequences[0].copy(11)
    target.forward([3], [2])


# -- what is refused -------------------------------------------------------------------------------


def refused(state: ContractState, kind: type[QuireError], act: Callable[[], object], *words: str) -> None:
    """The call raises this very class, says these words, and leaves no trace."""
    before = snapshot(state)
    with pytest.raises(kind) as raised:
        act()
    assert type(raised.value) is kind
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert snapshot(state) == before


def test_malformed_calls() -> None:
    story = Story()
    story.add(0)
    story.forward([0], [5])
    state, rows = story.state, torch.zeros(3, 10)
    q, k, v, absorbed = torch.zeros(3, 3, 9), torch.zeros(3, 3, 9), torch.zeros(3, 3, 7), torch.zeros(3, 3, 10)
    calls: list[tuple[type[QuireError], str, Callable[[], object]]] = [
        (InvalidArgument, "0..2", lambda: state.append_mla_kv(3, rows)),
        (InvalidArgument, "10 columns", lambda: state.append_mla_kv(1, rows[:, :9])),
        (InvalidArgument, "float64", lambda: state.append_mla_kv(1, rows.double())),
        (InvalidArgument, "[3, 10]", lambda: state.cross_attention(1, q)),
        (InvalidArgument, "4 columns", lambda: state.self_attention(1, q[..., :2], k[..., :2], v)),
        (InvalidArgument, "no V", lambda: state.debug_set_kv(0, 0, rows, rows, layer=1)),
        (InvalidArgument, "(3, 10)", lambda: state.debug_set_kv(0, 0, rows[:, :9], layer=1)),
        (InvalidArgument, "(1, 3, 10)", lambda: state.debug_set_kv(0, 0, rows[None, :, :9])),
        (InvalidArgument, "v is missing", lambda: state.debug_set_kv(0, 0, rows, layer=0)),
        (InvalidArgument, "length is 5", lambda: state.debug_set_kv(0, 3, rows, layer=1)),
        (InvalidArgument, "<= 5", lambda: state.debug_get_kv_mla(0, 2, 6)),
        (InvalidArgument, "(1, 5, 10)", lambda: state.debug_get_kv_mla(0, out=torch.zeros(5, 10))),
        (InvalidArgument, "['latent']", lambda: state.export_page_group(0, 1, {"k": rows})),
        (NotFound, "8", lambda: state.debug_get_kv_mla(8)),
        (NotFound, "8", lambda: state.debug_set_kv(8, 0, rows, layer=1)),
        (FailedPrecondition, "begin_forward", lambda: state.append_mla_kv(1, rows)),
        (FailedPrecondition, "begin_forward", lambda: state.cross_attention(1, absorbed)),
    ]
    for kind, word, call in calls:
        refused(state, kind, call, word)
    state.begin_forward([0], [3])
    opened = state.open_pass()
    expansion = story.expansion
    for kind, word, call in [
        *calls[:5],
        (InvalidArgument, "3 rows", lambda: state.append_mla_kv(1, rows[:2])),
        (FailedPrecondition, "append_mla_kv", lambda: state.cross_attention(1, absorbed, scope="all")),
        (FailedPrecondition, "debug_set_kv", lambda: state.debug_set_kv(0, 0, rows, layer=1)),
        (FailedPrecondition, "[0, 1, 2]", state.end_forward),
        (InvalidArgument, "(3, 10)", lambda: opened.attend_latent(1, q, rows[:2], expansion)),
        (InvalidArgument, "[3, 3, more than 4]", lambda: opened.attend_latent(1, q[:, :2], rows, expansion)),
        (InvalidArgument, "expansion", lambda: opened.attend_latent(1, q[..., :8], rows, expansion)),
        (Unsupported, "call attend", lambda: opened.attend_latent(0, q, rows, expansion)),
        (Unsupported, "append_mla_kv", lambda: opened.attend(1, q, k, v)),
        (Unsupported, "append_mla_kv", lambda: opened.attend_qkv(1, rows)),
        (Unsupported, "cross_attention", lambda: opened.attend_shared(1, absorbed)),
        (Unsupported, "no recurrent layers", lambda: opened.linear_attention(1, 0, q, k, v)),
        (Unsupported, "no recurrent layers", lambda: opened.convolve(1, 0, rows, rows)),
    ]:
        refused(state, kind, call, word)
    state.abort_forward()
    refused(state, FailedPrecondition, lambda: opened.attend_latent(1, q, rows, expansion), "over")
    story.naive.sequences[0].rows = story.naive.sequences[0].rows[:5]
    story.forward([0], [3])


def test_an_aborted_forward_leaves_nothing() -> None:
    story = Story()
    story.add(0)
    story.forward([0], [6])
    story.fork(0, 1)
    rows = story.state.debug_get_kv_mla(0, layer=1)
    story.state.begin_forward([0, 1], [3, 1])
    story.state.append_mla_kv(1, torch.randn(4, 10))
    story.state.abort_forward()
    story.state.check()
    for seq_id in (0, 1):
        assert same_bits(story.state.debug_get_kv_mla(seq_id, layer=1), rows)
    story.forward([1, 0], [1, 4])


def test_exhaustion() -> None:
    story = Story(capacity=12)
    story.add(0, 1)
    story.forward([0], [9])
    refused(story.state, ResourceExhausted, lambda: story.state.begin_forward([1, 0], [1, 4]), "2 pages")
    story.forward([0], [3])


def test_every_cell_of_the_table() -> None:
    """What the table says a kind of layer has runs; what it says it has not is refused with its
    sentence.
    """
    story = Story()
    story.add(0)
    story.forward([0], [5])
    state = story.state
    layers = {"full": 0, "latent": 1, "window": 2}
    for verb in LAYER_VERBS:
        assert verb in PAGED_VERBS
        for kind, layer in layers.items():
            reason = layer_refusal(verb, kind)
            if not verb.startswith("debug"):
                state.begin_forward([0], [1])
            call = _calls(state, layer, kind)[verb]
            if reason:
                refused(state, Unsupported, call, verb, kind, reason)
            else:
                call()
            if not verb.startswith("debug"):
                state.abort_forward()
    assert verbs_of(["full", "latent"])["append_mla_kv"] == verbs_of(["full", "latent"])["append_kv"] == ""
    assert "'full' only" in verbs_of(["full"])["append_mla_kv"]
    assert "debug_get_kv_mla" in verbs_of(["latent"])["debug_get_kv"]
    assert set(verbs_of(["latent"])) == {*PAGED_VERBS, *PAGED_REFUSALS}
    # States of one kind only, without a layer named.
    pure = contract([latent()], capacity=8, backend=SdpaAttention())
    pure.add_sequence(0)
    refused(pure, Unsupported, lambda: pure.debug_get_kv(0), "debug_get_kv_mla")
    refused(pure, InvalidArgument, lambda: pure.debug_set_kv(0, 0, torch.zeros(1, 0, 1, 8), torch.zeros(1, 0, 1, 8)))
    plain = contract([attention()], capacity=8, backend=SdpaAttention())
    plain.add_sequence(0)
    refused(plain, Unsupported, lambda: plain.debug_get_kv_mla(0), "debug_get_kv")
    mixed = contract([latent(), latent(rank=8)], capacity=8, backend=SdpaAttention())
    mixed.add_sequence(0)
    refused(mixed, InvalidArgument, lambda: mixed.debug_get_kv_mla(0), "layer=")


def _calls(state: ContractState, layer: int, kind: str) -> dict[str, Callable[[], object]]:
    """A well-formed call of each verb, as far as the kind of layer has it."""
    q, k = torch.zeros(1, 4, 8), torch.zeros(1, 2, 8)
    rows, is_latent = torch.zeros(1, 10), kind == "latent"
    heads = torch.zeros(1, 3, 10)
    return {
        "attention_with_fused_qkv": lambda: state.attention_with_fused_qkv(layer, torch.zeros(1, 64)),
        "append_kv": lambda: state.append_kv(layer, k, k),
        "append_mla_kv": lambda: state.append_mla_kv(layer, rows),
        "self_attention": lambda: state.self_attention(layer, *((heads,) * 3 if is_latent else (q, k, k))),
        "cross_attention": lambda: state.cross_attention(layer, heads if is_latent else q),
        "attention_with_shared_kv": lambda: state.attention_with_shared_kv(layer, q, k, k),
        "debug_get_kv": lambda: state.debug_get_kv(0, 4, layer=layer),
        "debug_get_kv_mla": lambda: state.debug_get_kv_mla(0, 4, layer=layer),
        "debug_set_kv": lambda: state.debug_set_kv(0, 4, *((rows,) if is_latent else (k, k)), layer=layer),
    }


def test_what_a_latent_layer_cannot_be() -> None:
    for spec in (
        LatentAttention(num_heads=0, row_dim=8, value_dim=4),
        LatentAttention(num_heads=2, row_dim=8, value_dim=9),
        LatentAttention(num_heads=2, row_dim=8, value_dim=0),
        LatentAttention(num_heads=2, row_dim=8, value_dim=6, rope=RopeSpec(theta=1e4, rotary_dim=4)),
        LatentAttention(num_heads=2, row_dim=8, value_dim=5, rope=RopeSpec(theta=1e4, rotary_dim=3)),
    ):
        with pytest.raises(InvalidArgument, match="layer 0"):
            contract([spec], capacity=8, backend=SdpaAttention())


# -- which layers there are ------------------------------------------------------------------------


def test_layer_ids_that_are_no_range() -> None:
    def make(ids: Sequence[int] | None, page_size: int = 4) -> ContractState:
        return contract(
            [latent(), attention(), windowed(5)], capacity=32, page_size=page_size, backend=SdpaAttention(),
            first_layer=1, layer_ids=ids,
        )  # fmt: skip

    state = make([2, 5, 9])
    assert state.geometry.layer_ids == (2, 5, 9)
    state.add_sequence(0)
    state.begin_forward([0], [3])
    for bad in (0, 1, 3, 10):
        refused(state, InvalidArgument, lambda bad=bad: state.append_mla_kv(bad, torch.zeros(3, 10)), "2, 5, 9")
    state.append_mla_kv(2, torch.randn(3, 10))
    refused(state, FailedPrecondition, state.end_forward, "[5, 9]")
    refused(state, InvalidArgument, lambda: state.end_forward(skipped=[4]), "layer 4")
    state.attention_with_fused_qkv(5, torch.randn(3, 64))
    state.end_forward(skipped=[9])
    metadata = state.get_checkpoint_metadata(0)
    assert [group["group"] for group in metadata["groups"]] == [2, 5, 9]
    assert [held["layers"] for held in metadata["held"]] == [[2, 5], [9]]
    other = make([2, 5, 9], page_size=5)
    other.prepare_import(4, metadata)
    for group in (9, 2, 5):
        other.import_page_group(4, group, state.export_page_group(0, group))
    other.finish_import(4)
    assert same_bits(other.debug_get_kv_mla(4, layer=2), state.debug_get_kv_mla(0, layer=2))
    assert same_bits(other.debug_get_kv(4, layer=9)[0], state.debug_get_kv(0, layer=9)[0])
    hashes = {make(ids).get_layout_hash() for ids in (None, [2, 5, 9], [2, 5, 8], [1, 2, 4])}
    assert len(hashes) == 4
    assert make([1, 2, 3]).get_layout_hash() == make(None).get_layout_hash()
    for ids in ([2, 5, 8], None):
        refused(
            target := make(ids), InvalidArgument, lambda target=target: target.prepare_import(4, metadata), "layout"
        )
    for odd in ([2, 5], [5, 2, 9], [2, 2, 9], [0, 1, 2]):
        with pytest.raises(InvalidArgument, match="layer_ids"):
            make(odd)
    data = to_bytes(
        {"sequence": sequencefile.describe(state, 0)[0]},
        *sequencefile.describe(state, 0)[1:],
    )
    with read_state(data) as file:
        checked = sequencefile.check(other, file, file.metadata["sequence"], "", False)  # type: ignore[arg-type]
        assert set(file.names) == sequencefile.tensor_names(checked)
        sequencefile.load(other, 7, file, checked)
    assert same_bits(other.debug_get_kv_mla(7), state.debug_get_kv_mla(0))


def test_a_state_without_attention_layers() -> None:
    def make() -> ContractState:
        return contract([Recurrent(states=(StateTensor(shape=(2,), dtype="float32"),))], num_states=8, page_size=4)

    with pytest.raises(InvalidArgument, match="at least one layer"):
        contract([], capacity=8, backend=SdpaAttention())
    state = make()
    assert state.empty()
    assert (state.capacity, state.num_available_pages(), state.num_pages, state.num_used_pages) == (None, 8, 8, 0)
    state.largest_step(4, 1)
    state.add_sequence(0)
    assert state.missing_pages([0], [1000]) == state.shortage_in_steps([0], [1000], 10) == 0
    state.begin_forward([0], [1000])
    assert state.get_query_positions().tolist() == list(range(1000))
    refused(state, InvalidArgument, lambda: state.append_kv(1, torch.zeros(1), torch.zeros(1)), "layer 1")
    state.end_forward()
    state.fork_sequence(0, 1, 0)
    for verb in (state.debug_get_kv, state.debug_get_kv_mla):
        refused(state, Unsupported, lambda verb=verb: verb(0), "no attention layers")
    refused(state, Unsupported, lambda: state.enable_sliding_window_for_seq(0, 4), "recurrent layers only")
    refused(state, NotFound, lambda: state.enable_sliding_window_for_seq(8, 4))
    metadata = state.get_checkpoint_metadata(0)
    other = make()
    other.prepare_import(3, json.loads(json.dumps(metadata)))
    other.import_page_group(3, 0, state.export_page_group(0, 0))
    other.finish_import(3)
    assert other.sequence_length(3) == 1000
    state.check()
    state.clear()
    assert state.empty()


# -- anything at all -------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, PACKED])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_random_stories(seed: int, packed: bool) -> None:
    picks = random.Random(seed)
    story = Story(
        latent(
            picks.choice([1, 2, 4]),
            picks.choice([4, 8]),
            picks.choice([2, 4]),
            interleaved=picks.random() < 0.5,
            sm_scale=0.35,
        ),
        page_size=picks.choice([1, 4, 5, 16]),
        capacity=2000,
        packed=packed,
        seed=seed,
    )
    story.add(0, 1)
    story.window(1, picks.choice([5, 9]), picks.choice([0, 2]), picks.choice(["token", "forward"]))
    fresh = 2
    for _ in range(40):
        ids = list(story.naive.sequences)
        seq_id = picks.choice(ids)
        sequence = story.naive.sequences[seq_id]
        settled = [one for one in ids if not story.naive.sequences[one].parents]
        what = picks.randrange(8)
        if sequence.parents:
            if what < 4:
                story.commit(seq_id, picks.randrange(-1, len(sequence.parents)))
            else:
                nodes = len(sequence.parents)
                story.forward([seq_id], [2], [[picks.randrange(-1, nodes), picks.randrange(-1, nodes + 1)]])
        elif what == 0 and len(ids) < 6:
            story.fork(seq_id, fresh, picks.choice([p for part in story.state.reachable(seq_id) for p in part]))
            fresh += 1
        elif what == 1:
            reachable = [p for part in story.state.reachable(seq_id) for p in part if p + 12 > sequence.length]
            story.pop(seq_id, sequence.length - picks.choice(reachable))
        elif what == 2:
            story.forward([seq_id], [3], [[-1, picks.choice([-1, 0]), picks.choice([0, 1])]])
        elif what == 3 and len(ids) > 3:
            story.remove(seq_id)
        else:
            batch = picks.sample(settled, picks.randint(1, len(settled)))
            form = picks.choice(FORMS)
            story.forward(batch, [picks.choice([1, 1, 1, 2, 5, 18]) for _ in batch], form=form)
