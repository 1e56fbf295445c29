"""Some rows of a forward that run alone before it, against a state that runs all, and the forward
that follows: nothing of them is left in it, and what they were given is.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.contracts.layers import Recurrent, StateTensor
from quire.ops import attention as attention_module
from quire.ops.attention import ReferenceAttention

from .faces import contract
from .pair import attention, refused, windowed
from .test_latent import Story, latent
from .test_narrowing import BACKENDS, SPECS, Narrowed, of_rows, rows_of


def mixed(one: torch.Tensor, other: torch.Tensor, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> torch.Tensor:
    """``one`` with some rows of ``other``."""
    return one.index_copy(0, torch.from_numpy(rows), other[torch.from_numpy(rows)])


ENTRIES = st.lists(
    st.tuples(st.integers(0, 30), st.lists(st.booleans(), min_size=1, max_size=35), st.integers(0, 35)),
    min_size=1,
    max_size=3,
).filter(lambda entries: any(any(kept) for _, kept, _ in entries))


@pytest.mark.parametrize("examples", [3, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_rows_of_any_entries(backend: str, examples: int) -> None:
    """Decodes and prompts, none of whose rows, some or all rehearse; what comes out, what the
    asking ones attend to, and the forward behind it, narrowed to these and others."""

    @settings(max_examples=examples)
    @given(
        entries=ENTRIES,
        page_size=st.sampled_from([1, 4, 16]),
        first_layer=st.integers(0, len(SPECS)),
        at_once=st.sampled_from([1, 300, 2**24]),
        data=st.data(),
    )
    def run(
        entries: list[tuple[int, list[bool], int]], page_size: int, first_layer: int, at_once: int, data: st.DataObject
    ) -> None:
        pair, twin = (Narrowed(SPECS, page_size=page_size, backend=BACKENDS[backend](), capacity=500) for _ in range(2))
        ids, counts = list(range(len(entries))), [len(kept) for _, kept, _ in entries]
        for one in (pair, twin):
            one.add(*ids)
            for seq_id, (past, _, _) in enumerate(entries):
                if past:
                    one.append(seq_id, past)
            one.begin(ids, counts)
        rows, starts = rows_of([kept for _, kept, _ in entries]), np.cumsum([0, *counts])
        asking = np.array(data.draw(st.lists(st.sampled_from(rows.tolist()), unique=True).map(sorted)), dtype=np.int64)
        entry_of = np.repeat(ids, counts)
        given_rows = np.setdiff1d(np.flatnonzero(np.isin(entry_of, entry_of[rows])), rows)
        opened = pair.state.open_pass()
        rehearsal = opened.rehearse(rows, asking, first_layer)
        assert rehearsal.positions_T.tolist() == [pair.oracle.positions()[row] for row in rows]
        twin.state.open_pass().capture_weights()
        masses, index, old = np.zeros(starts[-1]), torch.from_numpy(rows), []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention_module, "WEIGHTS_AT_ONCE", at_once)
            for layer in range(len(SPECS)):
                q, k, v = twin.parts(layer, int(starts[-1]))
                old.append((k, v))
                exact = twin.oracle.attention_with_fused_qkv(layer, q, k, v)
                twin.state.open_pass().attend(layer, q, k, v)
                rehearsal.write_rows(layer, given_rows, pair.stored(layer, k)[given_rows], v[given_rows])
                of_rows(exact, rows).check(rehearsal.attend(layer, q[index], k[index], v[index]))
                for entry, weights_HnK in enumerate(twin.state.open_pass().weights[layer]):
                    asks = asking[entry_of[asking] == entry] - starts[entry]
                    if layer >= first_layer and asks.size:
                        new = weights_HnK[:, asks, entries[entry][0] :].double().sum((0, 1)).numpy()
                        masses[starts[entry] : starts[entry + 1]] += new
        # Sums of at most 5 * 4 * 35 weights of 1e-6 relative error each.
        assert np.allclose(rehearsal.mass_T.numpy(), masses, atol=1e-4, rtol=1e-4)
        pair.layer(0, pair.random(0, int(starts[-1])))
        # Of what was given some may stay.
        left = np.array(data.draw(st.lists(st.sampled_from([*given_rows.tolist(), -1]), unique=True)), dtype=np.int64)
        left = np.sort(left[left >= 0])
        left = left[~np.isin(left, starts[1:] - 1)]
        running = np.setdiff1d(np.arange(starts[-1]), left)
        opened.narrow(running)
        for layer in range(1, len(SPECS)):
            q, k, v = pair.parts(layer, int(starts[-1]))
            k, v = mixed(k, old[layer][0], left), mixed(v, old[layer][1], left)
            exact = pair.oracle.attention_with_fused_qkv(layer, q, k, v)
            found = opened.attend(layer, q[running], k[running], v[running])
            of_rows(exact, running).check(found)
        pair.end()

    run()


def test_what_was_rehearsed_is_not_of_the_forward() -> None:
    """Rows that rehearsed are lacking, whether they were given before or not."""
    pair = Narrowed([attention()])
    pair.add(0)
    pair.begin([0], [6])
    q, k, v = pair.parts(0, 6)
    opened = pair.state.open_pass()
    rows = np.array([3, 5])
    rehearsal = opened.rehearse(rows, rows, 0)
    refused(pair, FailedPrecondition, lambda: rehearsal.attend(0, q[rows], k[rows], v[rows]), "lacks 4 rows")
    pair.give(0, np.arange(6), k, v)
    rehearsal.attend(0, q[rows], k[rows], v[rows])
    refused(pair, FailedPrecondition, pair.state.end_forward, "[0]")
    opened.narrow(np.array([5]))
    one = np.array([5])
    refused(pair, FailedPrecondition, lambda: opened.attend(0, q[one], k[one], v[one]), "lacks 1 rows", "which is 3")
    pair.give(0, np.array([3]), k, v)
    opened.attend(0, q[one], k[one], v[one])
    pair.oracle.attention_with_fused_qkv(0, q, k, v)
    pair.end()


@pytest.mark.parametrize("backend", BACKENDS)
def test_latent_rows(backend: str) -> None:
    """What comes out and the masses, from the weights that a state of all rows keeps."""
    some, whole = (Story(latent(sm_scale=0.4), page_size=4, backend=BACKENDS[backend]()) for _ in range(2))
    spec, rows, asking = some.spec, np.array([1, 2, 8, 29, 33]), np.array([8, 29, 33])
    index = torch.from_numpy(rows)
    for story in (some, whole):
        story.add(0, 1, 2)
        story.forward([0], [7])
        story.state.begin_forward([0, 1, 2], [30, 6, 3])
    q_THD = some.draw(39, spec.num_heads, some.nope + spec.row_dim - spec.value_dim)
    rows_TR = some.draw(39, spec.row_dim)
    every, opened = whole.state.open_pass(), some.state.open_pass()
    every.capture_weights()
    expected = every.attend_latent(some.LAYER, q_THD, rows_TR, some.expansion)
    rehearsal = opened.rehearse(rows, asking, some.LAYER)
    others = np.setdiff1d(np.arange(36), rows)
    turned_TR = opened.turn_last(rows_TR.unsqueeze(1), spec.rope).squeeze(1)
    rehearsal.write_rows(some.LAYER, others, turned_TR[others], None)
    found = rehearsal.attend_latent(some.LAYER, q_THD[index], rows_TR[index], some.expansion)
    # Two forms of one sum, float32, of values near 1.
    assert torch.allclose(found, expected[index], atol=1e-4, rtol=1e-4)
    first, second, _ = every.weights[some.LAYER]
    wanted = torch.cat((first[:, [8, 29], 7:].sum((0, 1)), second[:, 3].sum(0), torch.zeros(3)))
    # Sums of at most 3 * 4 weights.
    assert torch.allclose(rehearsal.mass_T, wanted, atol=1e-4, rtol=1e-4)


def test_learned_logits_take_their_share() -> None:
    pair = Narrowed([attention(sinks=(9.0, 9.0, 9.0, 9.0))], backend=ReferenceAttention())
    pair.add(0)
    pair.begin([0], [4])
    q, k, v = pair.parts(0, 4)
    rehearsal = pair.state.open_pass().rehearse(np.arange(4), np.array([3]), 0)
    rehearsal.attend(0, q, k, v)
    assert 0 < float(rehearsal.mass_T.sum()) < 1


def test_refusals() -> None:
    pair = Narrowed([attention(), windowed(4)])
    pair.add(0, 1)
    pair.begin([0, 1], [4, 2])
    opened, none, one, two = pair.state.open_pass(), np.array([], dtype=np.int64), np.array([1]), np.array([1, 5])
    for rows, asking, word in (
        (none, none, "at least one"),
        (one, two, "a part of rows"),
        (np.array([5, 1]), one, "ascending"),
        (np.array([6]), none, "0..5"),
    ):
        refused(pair, InvalidArgument, lambda rows=rows, asking=asking: opened.rehearse(rows, asking, 0), word)
    rehearsal = opened.rehearse(two, one, 0)
    opened.narrow(two)
    refused(pair, FailedPrecondition, lambda: opened.rehearse(one, one, 0), "narrowed")
    pair.abort()
    k, v = torch.zeros(2, 2, 8), torch.zeros(2, 2, 8)
    q = torch.zeros(2, 4, 8)
    for act in (
        lambda: rehearsal.attend(0, q, k, v),
        lambda: rehearsal.write_rows(0, two, k, v),
        lambda: opened.rehearse(one, one, 0),
    ):
        refused(pair, FailedPrecondition, act, "over")
    pair.begin([0, 1], [4, 2])
    pair.layer(0, pair.random(0, 6))
    refused(pair, FailedPrecondition, lambda: pair.state.open_pass().rehearse(one, one, 0), "has run")
    pair.abort()
    pair.begin([0], [3])
    pair.state.open_pass().capture_weights()
    refused(pair, Unsupported, lambda: pair.state.open_pass().rehearse(one, one, 0), "rehearse", "all rows")
    pair.abort()
    recurrent = Recurrent(states=(StateTensor(shape=(2,), dtype="float32"),))
    state = contract([attention(), recurrent], capacity=32, num_states=8)
    state.add_sequence(0)
    state.begin_forward([0], [3])
    with pytest.raises(Unsupported, match="recurrent"):
        state.open_pass().rehearse(one, one, 0)
