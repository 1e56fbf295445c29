"""Forwards of which only some rows go on, against the naive state, which runs all rows.

The rows of the others are random and given to the layer, so that a query that missed one, or read
one from a page that was not written, would show it.

Letters: T new tokens; S of them that run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.contracts.layers import CrossAttention, Recurrent, StateTensor
from quire.kernels.attention import row_blocks
from quire.kernels.attention.cpu_attention import NativeAttention
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kv import latent as latent_forms
from quire.ops.attention import ReferenceAttention

from .faces import contract
from .oracle_forward import States
from .oracle_values import Spec, rotated
from .pair import Pair, attention, refused, same_bits, windowed
from .snapshots import snapshot
from .test_latent import Story, latent

Rows = NDArray[np.int64]
FIRST = attention()
SPECS: list[Spec] = [
    FIRST,
    windowed(7),
    replace(attention(softcap=1.5), rope=FIRST.rope),  # one rotation for both, as in models
    attention(sinks=(0.5, -1.0, 2.0, 0.0), rotary_dim=8),
    windowed(19, 0),
]
BACKENDS = {"torch": SdpaAttention, "native": NativeAttention, "reference": ReferenceAttention}


def of_rows(exact: States, rows: Rows) -> States:
    """What the naive state says of these rows."""
    index = torch.from_numpy(rows)
    return States(exact.out[index], exact.lse[index], exact.out_bound[index], exact.lse_bound[index])


def rows_of(kept: Sequence[Sequence[bool]]) -> Rows:
    return np.flatnonzero([one for entry in kept for one in entry])


class Narrowed(Pair):
    """A pair whose state runs some rows of a forward."""

    def stored(self, layer: int, k_THD: Tensor) -> Tensor:
        """K as the layer keeps it."""
        rope = self.specs[layer].rope
        positions = self.oracle.positions()
        if rope is None:
            return k_THD
        return torch.stack([rotated(k, p, rope).to(k.dtype) for k, p in zip(k_THD, positions, strict=True)])

    def give(self, layer: int, rows: Rows, k_THD: Tensor, v_THD: Tensor) -> None:
        index = torch.from_numpy(rows)
        self.state.open_pass().write_rows(layer, rows, self.stored(layer, k_THD)[index], v_THD[index])

    def narrowed_layer(self, layer: int, rows: Rows, *, pieces: int = 1) -> Tensor:
        """Run these rows, give the others in so many calls; check what comes out."""
        tokens, index = self.oracle.open_forward().tokens, torch.from_numpy(rows)
        q, k, v = self.parts(layer, tokens)
        exact = self.oracle.attention_with_fused_qkv(layer, q, k, v)
        left_out = np.setdiff1d(np.arange(tokens), rows)
        for piece in range(pieces):
            self.give(layer, left_out[piece::pieces], k, v)
        found = self.state.open_pass().attend(layer, q[index], k[index], v[index])
        of_rows(exact, rows).check(found)
        assert len(found) == len(rows)
        return found


def kept_rows(most: int) -> st.SearchStrategy[list[bool]]:
    """Which rows of an entry run: all, or any but none."""
    some = st.lists(st.booleans(), min_size=1, max_size=most).filter(any)
    return st.one_of(st.just([True]), st.integers(1, most).map(lambda count: [True] * count), some)


ENTRIES = st.lists(st.tuples(st.integers(0, 30), kept_rows(35)), min_size=1, max_size=3)


@pytest.mark.parametrize("examples", [10, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_rows_of_any_batch(backend: str, examples: int) -> None:
    """Prompts, chunks and decodes of which any rows run, all of them among others; rows are given
    to a layer at once or in pieces."""

    @settings(max_examples=examples)
    @given(
        entries=ENTRIES,
        page_size=st.sampled_from([1, 4, 16]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        sizes=st.sampled_from([(64, 512, 2048), (3, 8, 5), (8, 8, 0)]),
        forked=st.booleans(),
        window=st.sampled_from([None, None, (12, 0), (20, 3), (9, 8)]),
        eviction=st.sampled_from(["token", "forward"]),
        data=st.data(),
    )
    def run(
        entries: list[tuple[int, list[bool]]],
        page_size: int,
        dtype: torch.dtype,
        sizes: tuple[int, int, int],
        forked: bool,
        window: tuple[int, int] | None,
        eviction: Literal["token", "forward"],
        data: st.DataObject,
    ) -> None:
        pair = Narrowed(SPECS, page_size=page_size, dtype=dtype, backend=BACKENDS[backend](), capacity=500)
        ids = list(range(len(entries)))
        pair.add(*ids)
        for seq_id, (past, _) in enumerate(entries):
            if window is not None and seq_id == 0:
                pair.window(0, *window, eviction)
            if past:
                pair.append(seq_id, past)
        if forked:
            pair.fork(0, len(ids))  # Its last page is shared: the new rows go to one of their own.
        kept = [one for _, one in entries]
        rows = rows_of(kept)
        with pytest.MonkeyPatch.context() as patch:
            for name, size in zip(("SMALLEST_BLOCK", "LARGEST_BLOCK", "UNMASKED_KEYS"), sizes, strict=True):
                patch.setattr(row_blocks, name, size)
            pair.begin(ids, [len(one) for one in kept])
            pair.layer(0, pair.random(0, sum(map(len, kept))))
            opened = pair.state.open_pass()
            opened.narrow(rows)
            assert opened.positions_T.tolist() == [pair.oracle.positions()[row] for row in rows]
            for layer in range(1, len(SPECS)):
                pair.narrowed_layer(layer, rows, pieces=layer)
                if layer == 2:
                    # Fewer go on: the last of each entry and some others.
                    ends = np.cumsum([len(one) for one in kept])
                    last = {int(rows[rows < end][-1]) for end in ends}
                    rows = np.array([row for row in rows.tolist() if row in last or data.draw(st.booleans())])
                    opened.narrow(rows)
        pair.end()

    run()


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_row_that_runs_has_its_own_window(backend: str) -> None:
    pair = Narrowed(SPECS, page_size=4, backend=BACKENDS[backend]())
    pair.add(0)
    pair.window(0, 9, 3, "token")
    pair.append(0, 6)
    pair.begin([0], [20])
    pair.layer(0, pair.random(0, 20))
    rows = np.array([2, 9, 19])
    pair.state.open_pass().narrow(rows)
    for layer in range(1, len(SPECS)):
        pair.narrowed_layer(layer, rows)
    pair.end()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_were_given_are_kept_to_the_bit(backend: str) -> None:
    pair = Narrowed([attention()], backend=BACKENDS[backend]())
    pair.add(0)
    pair.append(0, 5)
    pair.begin([0], [9])
    q, k, v = pair.parts(0, 9)
    rows, left_out = np.array([2, 3, 8]), np.array([0, 1, 4, 5, 6, 7])
    opened = pair.state.open_pass()
    opened.narrow(rows)
    pair.give(0, left_out, k, v)
    stored = pair.stored(0, k)
    opened.attend(0, q[rows], k[rows], v[rows])
    pair.state.end_forward()
    found_k, found_v = pair.state.debug_get_kv(0, 5, 14, layer=0)
    assert same_bits(found_k[left_out], stored[left_out])
    assert same_bits(found_v, v)
    # The next forward reads them as it reads any others.
    pair.oracle.attention_with_fused_qkv(0, q, k, v)
    pair.oracle.end_forward()
    pair.adopt(0, 5, 14)
    pair.append(0, 3)


@pytest.mark.turns(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_true_rows_change_nothing(dtype: torch.dtype) -> None:
    """The rows of a forward that ran, given to one that runs some: each row comes out as before,
    and no row behind it matters."""
    rows = np.array([0, 3, 4, 17, 40, 41, 59])
    index = torch.from_numpy(rows)
    whole, some, other = (Narrowed(SPECS, dtype=dtype, backend=ReferenceAttention()) for _ in range(3))
    for pair in (whole, some, other):
        pair.add(0)
        pair.append(0, 6)
        pair.begin([0], [60])
    some.state.open_pass().narrow(rows)
    other.state.open_pass().narrow(rows)
    left_out = np.setdiff1d(np.arange(60), rows)
    for layer in range(len(SPECS)):
        q, k, v = whole.parts(layer, 60)
        expected = whole.oracle.attention_with_fused_qkv(layer, q, k, v)
        expected.check(whole.state.open_pass().attend(layer, q, k, v))
        some.give(layer, left_out, k, v)
        found = some.state.open_pass().attend(layer, q[index], k[index], v[index])
        # Everything behind position 6 + 17 is another text.
        k[18:], v[18:], q[18:] = (torch.randn_like(x[18:]) for x in (k, v, q))
        other.give(layer, left_out, k, v)
        elsewhere = other.state.open_pass().attend(layer, q[index], k[index], v[index])
        assert same_bits(found[:4], elsewhere[:4])
        assert not torch.equal(found[4:], elsewhere[4:])
        of_rows(expected, rows).check(found)


def test_layers_that_share_a_source() -> None:
    """A source that ran before the forward was narrowed, and one that ran after."""
    pair = Narrowed([attention(), attention()])
    pair.add(0, 1)
    pair.append(0, 30)
    pair.begin([0, 1], [20, 3])
    pair.layer(0, pair.random(0, 23))
    rows = np.array([1, 2, 15, 20, 21, 22])
    opened = pair.state.open_pass()
    opened.narrow(rows)
    pair.narrowed_layer(1, rows)
    for source in (0, 1):
        q, _, _ = pair.parts(source, 23)
        exact = of_rows(pair.oracle.attention_with_shared_kv(source, q), rows)
        exact.check(opened.attend_shared(source, q[rows]))
        exact.check(pair.state.attention_with_shared_kv(source, q[rows]))
    pair.end()


@pytest.mark.turns(1)
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_latent_rows(backend: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_forms, "worth_expanding", lambda *_: form == "expanded")
    for page_size, past, counts, rows in (
        (4, 11, (30, 1, 25), (0, 7, 8, 29, 30, 32, 50)),
        (1, 0, (40,), tuple(range(0, 40, 2))),
        (16, 11, (3, 20, 9), (2, *range(3, 23), 31)),
    ):
        story = Story(latent(sm_scale=0.4), page_size=page_size, backend=BACKENDS[backend]())
        narrowed_story(story, past, counts, np.array(rows))


def narrowed_story(story: Story, past: int, counts: Sequence[int], rows: Rows) -> None:
    """One forward of the story, narrowed to ``rows``, checked row by row."""
    state, spec, total, ids = story.state, story.spec, sum(counts), list(range(len(counts)))
    story.add(*ids)
    if past:
        story.forward(ids, [past] * len(ids))
    q_THD = story.draw(total, spec.num_heads, story.nope + spec.row_dim - spec.value_dim)
    rows_TR = story.draw(total, spec.row_dim)
    index, starts = torch.from_numpy(rows), np.cumsum([0, *counts])
    for seq_id, first, stop in zip(ids, starts[:-1], starts[1:], strict=True):
        story.naive.sequences[seq_id].rows.extend(rows_TR[first:stop])
        story.naive.sequences[seq_id].length += int(stop - first)
    state.begin_forward(ids, counts)
    opened = state.open_pass()
    turned_TR = opened.turn_last(rows_TR.unsqueeze(1), spec.rope).squeeze(1)
    opened.narrow(rows)
    left_out = np.setdiff1d(np.arange(total), rows)
    opened.write_rows(story.LAYER, left_out, turned_TR[left_out], None)
    out_SHV = opened.attend_latent(story.LAYER, q_THD[index], rows_TR[index], story.expansion)
    assert out_SHV.is_contiguous()
    for found, row in zip(out_SHV, rows.tolist(), strict=True):
        entry = int(np.searchsorted(starts, row, side="right")) - 1
        address = past + row - int(starts[entry])
        exact = story.naive.answer(ids[entry], address, past, q_THD[row])
        assert ((found.double() - exact.out_HV).abs() <= exact.out_bound_HV).all(), row
    state.abort_forward()


def test_expansion_pays_where_many_rows_run() -> None:
    """With R = 6, Dn = 5 and Dv = 7 the expanded form never has fewer products. With R = 64 it
    saves 116 for each pair of row and key, of which half are seen, and costs 768 for each key."""
    for rank, rows, expected in ((6, 60, False), (64, 13, False), (64, 14, True)):
        story = Story(latent(rank=rank, sm_scale=0.4))
        story.add(0)
        story.state.begin_forward([0], [60])
        opened = story.state.open_pass()
        opened.narrow(np.arange(rows))
        assert latent_forms.worth_expanding(opened.batch, story.expansion) == expected


def test_an_abort_leaves_no_trace() -> None:
    pair = Narrowed([attention(), windowed(6)])
    pair.add(0)
    pair.append(0, 13)
    free = pair.free
    pair.begin([0], [9])
    opened, rows = pair.state.open_pass(), np.array([1, 5])
    opened.narrow(rows)
    pair.narrowed_layer(0, rows)
    pair.abort()
    assert pair.free == free
    pair.append(0, 9)  # All of its rows run.
    assert pair.state.sequence_length(0) == 22
    refused(pair, FailedPrecondition, lambda: opened.narrow(np.array([1])), "over")
    k, v = torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)
    refused(pair, FailedPrecondition, lambda: opened.write_rows(1, np.array([0]), k, v), "over")


def test_a_layer_that_lacks_rows_is_refused() -> None:
    """When it runs, and when the forward ends; with them all is well."""
    pair = Narrowed([attention(), attention()])
    pair.add(0, 1)
    pair.begin([0, 1], [6, 2])
    pair.layer(0, pair.random(0, 8))
    rows = np.array([2, 5, 7])
    opened = pair.state.open_pass()
    opened.narrow(rows)
    q, k, v = pair.parts(1, 8)
    qkv_TC = torch.cat([part[rows].flatten(1) for part in (q, k, v)], 1)
    run = [
        lambda: opened.attend(1, q[rows], k[rows], v[rows]),
        lambda: opened.attend_qkv(1, qkv_TC),
        lambda: pair.state.append_kv(1, k[rows], v[rows]),
    ]
    for act in run:
        refused(pair, FailedPrecondition, act, "layer 1", "5 rows", "the first of which is 0", "write_rows")
    pair.give(1, np.array([0, 1, 3, 4]), k, v)
    for act in run:
        refused(pair, FailedPrecondition, act, "1 rows", "the first of which is 6")
    refused(pair, FailedPrecondition, pair.state.end_forward, "[1]")
    pair.give(1, np.array([6]), k, v)
    opened.attend(1, q[rows], k[rows], v[rows])
    pair.oracle.attention_with_fused_qkv(1, q, k, v)
    refused(pair, FailedPrecondition, lambda: pair.give(1, np.array([6]), k, v), "layer 1", "has run")
    refused(pair, FailedPrecondition, lambda: pair.give(0, np.array([6]), k, v), "layer 0", "has run")
    pair.end()


def test_rows_that_run_are_overwritten() -> None:
    """All rows may be given before the forward is narrowed, and those that run among them."""
    pair = Narrowed([attention()])
    pair.add(0)
    pair.begin([0], [6])
    q, k, v = pair.parts(0, 6)
    exact = pair.oracle.attention_with_fused_qkv(0, q, k, v)
    old_k, rows = k.clone(), np.array([3, 5])
    old_k[rows] = 9.0
    pair.give(0, np.arange(6), old_k, v)
    opened = pair.state.open_pass()
    opened.narrow(rows)
    found = opened.attend(0, q[rows], k[rows], v[rows])
    of_rows(exact, rows).check(found)
    pair.end()


def test_arguments() -> None:
    pair = Narrowed([attention(), windowed(4)])
    pair.add(0, 1)
    pair.begin([0, 1], [4, 2])
    opened = pair.state.open_pass()
    for rows in ([], [0], [5], [1, 0, 5], [0, 0, 5], [0, 6], [-1, 5]):
        refused(pair, InvalidArgument, lambda rows=rows: opened.narrow(np.array(rows, dtype=np.int64)), "rows must be")
    refused(pair, InvalidArgument, lambda: opened.narrow(np.array([0.0, 5.0])), "int64")  # type: ignore[arg-type]
    refused(pair, InvalidArgument, lambda: opened.narrow(np.array([[0, 5]])), "int64")
    opened.narrow(np.array([0, 2, 5]))
    refused(pair, InvalidArgument, lambda: opened.narrow(np.array([0, 1, 5])), "that run")
    refused(pair, InvalidArgument, lambda: opened.narrow(np.array([0, 2])), "entries [1]")
    k, v, two = torch.zeros(2, 2, 8), torch.zeros(2, 2, 8), np.array([1, 3])
    for layer, rows, given_k, given_v, word in (
        (0, np.array([3, 1]), k, v, "rows must be"),
        (0, np.array([1, 6]), k, v, "0..5"),
        (0, np.array([1]), k, v, "(1, 2, 8)"),
        (0, two, k[..., :7], v, "k of layer 0"),
        (0, two, k, v.double(), "v of layer 0"),
        (0, two, k, None, "v must be"),
        (2, two, k, v, "0..1"),
    ):
        refused(
            pair,
            InvalidArgument,
            lambda layer=layer, rows=rows, k=given_k, v=given_v: opened.write_rows(layer, rows, k, v),  # type: ignore[misc]
            word,
        )
    pair.abort()
    story = Story()
    story.add(0)
    story.state.begin_forward([0], [3])
    opened = story.state.open_pass()
    row = torch.zeros(1, 10)
    for given_k, given_v, word in ((row, row, "None: the row is k"), (row[:, :9], None, "(1, 10)")):
        with pytest.raises(InvalidArgument) as caught:
            opened.write_rows(1, np.array([0]), given_k, given_v)
        assert word in str(caught.value)


def test_what_no_rows_can_be_left_out_of() -> None:
    one = np.array([1])
    tree = Narrowed([attention()])
    tree.add(0)
    tree.begin([0], [3], [[-1, 0, 0]])
    refused(tree, Unsupported, lambda: tree.state.open_pass().narrow(one), "tree")
    window = Narrowed([attention()])
    window.add(0)
    window.window(0, 100, 2)
    window.begin([0], [3])
    refused(window, Unsupported, lambda: window.state.open_pass().rehearse(one, one, 0), "window")
    inline = Narrowed([attention(), attention(mode="inline")])
    inline.add(0)
    inline.begin([0], [3])
    refused(inline, Unsupported, lambda: inline.state.open_pass().narrow(one), "rotated when")
    recurrent = Recurrent(states=(StateTensor(shape=(2,), dtype="float32"),))
    cross = CrossAttention(num_heads=1, num_kv_heads=1, head_dim=4, value_dim=4)
    for state, word in (
        (contract([attention(), recurrent], capacity=32, num_states=8), "recurrent"),
        (contract([attention(), cross], capacity=32, cross_capacity=8), "cross"),
    ):
        state.add_sequence(0)
        state.begin_forward([0], [3])
        before = snapshot(state)
        with pytest.raises(Unsupported, match=word):
            state.open_pass().narrow(one)
        assert snapshot(state) == before


def test_masks_positions_and_weights_are_of_all_rows() -> None:
    """Neither before nor after the rows were chosen."""
    mask, positions, one = torch.ones(9, dtype=torch.bool), np.array([4, 5, 6]), np.array([1])
    for act in (
        lambda pass_: pass_.use_mask(mask),
        lambda pass_: pass_.use_positions(positions),
        lambda pass_: pass_.capture_weights(),
    ):
        pair = Narrowed([attention(rotary_dim=0)])
        pair.add(0)
        pair.begin([0], [3])
        opened = pair.state.open_pass()
        act(opened)
        refused(pair, Unsupported, lambda opened=opened: opened.narrow(one), "all rows")
        pair.abort()
        pair.begin([0], [3])
        opened = pair.state.open_pass()
        opened.narrow(one)
        refused(pair, Unsupported, lambda act=act, opened=opened: act(opened), "only some rows go on")
        pair.abort()
    pair.begin([0], [3])
    pair.state.open_pass().narrow(one)
    q, k, v = pair.parts(0, 3)
    qkv = torch.cat([x.flatten(1) for x in (q, k, v)], 1)[one]
    for verb in (
        lambda: pair.state.attention_with_fused_qkv(0, qkv, mask=mask[:3]),
        lambda: pair.state.self_attention(0, q[one], k[one], v[one]),
        lambda: pair.state.attention_with_shared_kv(0, q[one], k[one], v[one]),
    ):
        refused(pair, Unsupported, verb, "only some rows go on")
