"""What a state says about its sizes and its room (``contracts.pool_verbs``) is what then
happens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from quire.base.errors import NotFound, ResourceExhausted, Unsupported
from quire.contracts.layers import CrossAttention, FullAttention, LatentAttention, LayerSpec, Recurrent, StateTensor
from quire.contracts.layers import WindowedAttention as Windowed
from quire.contracts.pool_verbs import SequenceUse, SequenceWindow, Shortage, StateRole
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kv.contract import ContractState

from .faces import contract

PAGE = 4
FULL = FullAttention(num_heads=2, num_kv_heads=1, head_dim=4, value_dim=8)
SLIDING = Windowed(num_heads=2, num_kv_heads=1, head_dim=4, value_dim=4, window=6)
LATENT = LatentAttention(num_heads=2, row_dim=6, value_dim=4)
CROSS = CrossAttention(num_heads=2, num_kv_heads=1, head_dim=4, value_dim=4)
MIXER = Recurrent(states=(StateTensor(shape=(2, 3), dtype="float32"), StateTensor(shape=(5,), dtype="bfloat16")))
KINDS: dict[str, list[LayerSpec]] = {
    "full": [FULL],
    "sliding": [SLIDING],
    "both": [SLIDING, FULL, LATENT],
    "hybrid": [MIXER, FULL, MIXER, SLIDING],
    "recurrent": [MIXER],
}


def make(kind: str, *, tokens: int = 96, **given: Any) -> ContractState:
    specs = KINDS[kind]
    sizes: dict[str, Any] = {"page_size": PAGE}
    if any(not isinstance(spec, Recurrent) for spec in specs):
        sizes["capacity"] = tokens
    if MIXER in specs:
        sizes |= {"num_states": 24, "ring": 1}
    return contract(specs, **sizes | given)


def run(state: ContractState, seqs: Sequence[int], counts: Sequence[int]) -> None:
    state.begin_forward(seqs, counts)
    state.end_forward(skipped=state.geometry.layer_ids)


def branched(kind: str, seed: int, **given: Any) -> ContractState:
    """A state after some forks, forwards and checkpoints, and a window of a sequence now
    and then."""
    state, rng = make(kind, **given), random.Random(seed)
    state.add_sequence(0)
    if kind != "recurrent" and rng.random() < 0.3:
        state.enable_sliding_window_for_seq(0, 5, 1)
    run(state, [0], [rng.randint(1, 9)])
    for child in range(1, 5):
        parent = rng.choice(state.sequence_ids())
        state.fork_sequence(parent, child)
        grown = [seq for seq in state.sequence_ids() if rng.random() < 0.4]
        if grown:
            run(state, grown, [rng.randint(1, 5) for _ in grown])
        if MIXER in KINDS[kind] and rng.random() < 0.5:
            state.checkpoint(parent)
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_free_pages_without_sequences(kind: str) -> None:
    for seed in range(12):
        state, rng = branched(kind, seed), random.Random(seed)
        gone = rng.sample(state.sequence_ids(), rng.randint(0, 4))
        expected, before = state.free_pages(gone), state.free_pages()
        assert (expected == before) or gone
        for seq in gone:
            state.remove_sequence(seq)
        assert state.free_pages() == expected
        assert len(expected) == len(state.pool_sizes())
        state.clear()
        assert state.free_pages() == state.pool_sizes()


@pytest.mark.product(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ring", [0, 1, 3])
def test_states_freed(kind: str, ring: int) -> None:
    found = set()
    for seed in range(12):
        state = branched(kind, seed, **({"ring": ring} if MIXER in KINDS[kind] else {}))
        for seq in state.sequence_ids():
            expected, before = state.states_freed(seq), state.num_available_states
            state.remove_sequence(seq)
            gained = state.num_available_states - before
            assert gained == expected or (ring and gained > expected), "rings of others are not looked at"
            found.add(expected)
    assert len(found) > 1 or MIXER not in KINDS[kind]


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", ["full", "both", "sliding"])
def test_pages_freed(kind: str) -> None:
    """The free pages and the copy that the fork saves, seen when it grows by a token."""

    def taken() -> int:
        before = sum(state.free_pages())
        state.begin_forward([99], [1])
        used = before - sum(state.free_pages())
        state.abort_forward()
        return used

    found = set()
    for seed in range(25):
        state, rng = branched(kind, seed), random.Random(seed)
        seq = rng.choice(state.sequence_ids())
        position = rng.choice([one for part in state.reachable(seq) for one in part])
        state.fork_sequence(seq, 99, position)
        expected, free = state.pages_freed(seq, 99), sum(state.free_pages())
        copied = taken()
        assert state.shares_tail(99) == (position % PAGE != 0)
        state.remove_sequence(seq)
        assert sum(state.free_pages()) - free + copied - taken() == expected
        found.add(expected)
    assert len(found) > 2


def test_the_tail_is_shared_until_one_writes() -> None:
    state = make("full")
    state.add_sequence(0)
    assert not state.shares_tail(0)
    run(state, [0], [6])
    assert not state.shares_tail(0)
    state.fork_sequence(0, 1)
    assert state.shares_tail(0)
    assert state.shares_tail(1)
    run(state, [1], [1])
    assert not state.shares_tail(0)
    state.fork_sequence(0, 2, 4)
    assert not state.shares_tail(2), "its last page is full"


@pytest.mark.parametrize("kind", ["full", "both", "hybrid"])
def test_page_shortage(kind: str) -> None:
    """The missing pages are those of ``missing_pages`` but for states; ``never`` is what an empty
    state refuses too.
    """
    for count in (1, 3, 40, 60, 80, 95, 96, 97, 200):
        state = make(kind)
        for seq in (0, 1):
            state.add_sequence(seq)
        run(state, [1], [50])
        short = state.page_shortage([0], [count])
        assert short == (state.missing_pages([0], [count]), count > 96), "there are states enough"
        assert short.never <= bool(short.missing)
        if short.missing:
            with pytest.raises(ResourceExhausted):
                state.begin_forward([0], [count])
        state.remove_sequence(1)
        assert bool(state.page_shortage([0], [count]).missing) == short.never
        tree = state.page_shortage([0], [count], [tuple(range(-1, count - 1))])
        assert tree == state.page_shortage([0], [count]), "a chain of nodes takes the pages of a chain"


@pytest.mark.parametrize("kind", ["full", "sliding", "both"])
def test_room_that_is_seen_at_a_glance_is_there(kind: str) -> None:
    """``missing_pages`` plans no forward where any would fit; ``page_shortage`` always does."""
    fits = 0
    for tokens in range(2 * PAGE, 12 * PAGE, PAGE):
        state = make(kind, tokens=tokens)
        state.add_sequence(0)
        run(state, [0], [PAGE - 1])
        state.fork_sequence(0, 1)  # both share a tail, which has room for one more
        for count in range(1, 5 * PAGE):
            for seqs, counts in (([1], [count]), ([0, 1], [1, count])):
                missing = state.missing_pages(seqs, counts)
                assert missing == state.page_shortage(seqs, counts).missing, (tokens, counts)
                fits += missing == 0
    assert fits > 50


def test_states_are_no_pages() -> None:
    state = make("hybrid", num_states=2, ring=0)
    for seq in (0, 1, 2):
        state.add_sequence(seq)
    assert state.missing_pages([0, 1, 2], [1, 1, 1]) == 1
    assert state.page_shortage([0, 1, 2], [1, 1, 1]) == Shortage(0, False)
    assert state.num_free_states == state.num_available_states == 2
    run(state, [0], [1])
    assert (state.num_free_states, state.num_available_states) == (1, 1)


def test_states_in_rings_are_available_and_not_free() -> None:
    state = make("recurrent")
    state.add_sequence(0)
    run(state, [0], [1])
    run(state, [0], [1])
    assert state.num_available_states - state.num_free_states == 1
    assert state.free_pages() == [state.num_available_states]


def test_full_page_shortage() -> None:
    state = make("both")
    for seq in (0, 1, 2):
        state.add_sequence(seq)
    state.enable_sliding_window_for_seq(2, 8)
    run(state, [0, 1], [13, 50])
    free = state.num_available_pages()
    assert free == 24 - 4 - 13
    assert state.full_page_shortage([0], [3]) == Shortage(0, False)
    assert state.full_page_shortage([0], [3 + PAGE * free]) == Shortage(0, False)
    assert state.full_page_shortage([0], [4 + PAGE * free]) == Shortage(1, False)
    assert state.full_page_shortage([0, 1], [4, PAGE * free]) == Shortage(1, False)
    assert state.full_page_shortage([2, 0], [1000, 3]) == Shortage(0, False), "a window keeps less"
    assert state.full_page_shortage([0], [3 + 96]) == Shortage(24 - free, False)
    assert state.full_page_shortage([0], [4 + 96]) == Shortage(25 - free, True)
    for kind in ("sliding", "recurrent"):
        other = make(kind)
        other.add_sequence(0)
        assert other.full_page_shortage([0], [1000]) == Shortage(0, False), "no layer keeps all tokens"


def test_sizes() -> None:
    state = make("hybrid", checkpoint_interval=8)
    geometry = state.geometry
    assert geometry.specs == (FULL, SLIDING)
    assert geometry.layer_ids == (1, 3)
    assert state.recurrent_ids == (0, 2)
    assert geometry.windows == (None, 6)
    assert geometry.page_bytes == (PAGE * (4 + 8) * 4, PAGE * (4 + 4) * 4)
    assert geometry.state_bytes == 2 * (6 * 4 + 5 * 2)
    assert (geometry.interval, geometry.ring) == (8, 1)
    assert state.geometry is geometry
    alone = make("both").geometry
    assert (alone.state_bytes, alone.interval, alone.ring) == (0, 0, 0)
    assert alone.windows == (6, None)


def test_bytes_in_use() -> None:
    state = contract([CROSS, FULL, MIXER], capacity=16, cross_capacity=8, num_states=4, page_size=PAGE, ring=0)
    assert state.num_used_bytes == 0
    state.add_sequence(0)
    run(state, [0], [13])
    assert state.num_used_bytes == 4 * state.geometry.page_bytes[0] + state.geometry.state_bytes
    assert state.sequence_use(0) == SequenceUse(4, 13, state.num_used_bytes)
    k = torch.zeros(8, 1, 4)
    state.set_cross_kv(0, 0, k, k)
    for _ in range(3):
        state.checkpoint(0)
        run(state, [0], [1])
    assert state.num_used_pages == state.num_pages
    assert state.num_used_bytes == state.num_bytes, "all of it"


def test_what_a_sequence_takes() -> None:
    state = make("both")
    state.add_sequence(0)
    run(state, [0], [21])
    state.fork_sequence(0, 1)
    run(state, [0], [1])
    held = [len(part) for layer in (0, 1) for part in state.held(0, layer)]
    use = state.sequence_use(0)
    assert use.pages == state.sequence_pages(0).held
    assert use.rows == sum(held)
    assert use.rows < 2 * 22, "a window has let go of some"
    full = -(-22 // PAGE)
    sizes = state.geometry.page_bytes
    assert use.num_bytes == full * sizes[1] + (use.pages - full) * sizes[0]
    assert state.page_table(0).size == full
    assert (state.page_table(0) >= 0).all(), "of the layers that keep all tokens"
    assert (make_and_run("sliding", 21).page_table(0) < 0).any()


def make_and_run(kind: str, tokens: int) -> ContractState:
    state = make(kind)
    state.add_sequence(0)
    run(state, [0], [tokens])
    run(state, [0], [1])
    return state


def test_page_tables_are_copies() -> None:
    state = make_and_run("full", 5)
    state.page_table(0)[:] = 77
    assert (state.page_table(0) != 77).all()
    with pytest.raises(Unsupported, match="page_table: no layer keeps rows of tokens"):
        make_and_run("recurrent", 5).page_table(0)
    with pytest.raises(NotFound):
        state.page_table(1)


def test_windows_and_ids() -> None:
    state = make("full")
    state.add_sequence(3)
    assert state.window(3) is None
    state.enable_sliding_window_for_seq(3, 9, 2, eviction="forward")
    assert state.window(3) == SequenceWindow(9, 2, "forward")
    assert state.has_sequence(3)
    assert not state.has_sequence(4)
    with pytest.raises(NotFound):
        state.window(4)
    assert not state.forward_is_open
    state.begin_forward([3], [1])
    assert state.forward_is_open
    state.abort_forward()
    assert not state.forward_is_open


def test_layers_without_fused_attention() -> None:
    """The reference forms the weights of every layer, PyTorch's kernels those of layers that they
    do not have.
    """
    assert make("both").unfused_layers() == [0, 1, 2]
    state = make("both", backend=SdpaAttention())
    fuses = state.state.parts.paged.backend.fuses
    assert state.unfused_layers() == [
        layer for layer, spec in state.state.parts.paged.specs.items() if not fuses(spec, torch.device("cpu"))
    ]
    assert make("recurrent").unfused_layers() == []


# -- what sequences name ---------------------------------------------------------------------------


def with_encoder(seed: int) -> ContractState:
    """A state with rows of encoders, some of them shared by forks."""
    state, rng = contract([FULL, CROSS], page_size=PAGE, capacity=96, cross_capacity=40), random.Random(seed)
    for seq in (0, 1):
        state.add_sequence(seq)
        rows = torch.zeros(rng.randint(1, 9), 1, 4)
        state.set_cross_kv(1, seq, rows, rows)
        run(state, [seq], [rng.randint(1, 9)])
    state.fork_sequence(0, 2)
    state.add_sequence(3)
    return state


@pytest.mark.parametrize("kind", [*KINDS, "encoder"])
def test_held_pages(kind: str) -> None:
    """Entries of tables are what reference counts count, and stand where the sequences' own verbs
    say.
    """
    for seed in range(12):
        state = with_encoder(seed) if kind == "encoder" else branched(kind, seed)
        facts, references = state.pool_facts, state.page_references()
        assert [one.num_pages for one in facts] == [one.size for one in references]
        assert sum(one.num_pages for one in facts) == state.num_pages
        assert sum(one.num_pages * one.page_bytes for one in facts) == state.num_bytes
        kinds = [state.layer_spec(layer).kind for one in facts for layer in one.layers]
        assert len(kinds) == len(KINDS.get(kind, [FULL, CROSS]))
        found = state.held_pages(state.sequence_ids())
        for pool, (fact, counted) in enumerate(zip(facts, references, strict=True)):
            named = np.concatenate([one.tables[pool] for one in found])
            names = np.bincount(named[named >= 0], minlength=fact.num_pages)
            assert names.tolist() == counted.tolist()
            assert fact.kind != "encoder" or names.max() > 1, "a fork shares the rows of its encoder"
        for seq, one in zip(state.sequence_ids(), found, strict=True):
            assert one.length == state.sequence_length(seq)
            assert one.window == state.window(seq)
            assert list(one.reachable) == state.reachable(seq)
            for pool, ranges in enumerate(one.held):
                assert list(ranges) == state.held(seq, facts[pool].layers[0])
                pages = one.tables[pool]
                held = {position // PAGE for part in ranges for position in part}
                assert set(np.flatnonzero(pages >= 0).tolist()) == held
            if kind in ("hybrid", "recurrent"):
                assert sorted({0, *one.state_positions.tolist()}) == state.kept_positions(seq)
                present = one.state_positions[one.state_roles == StateRole.PRESENT]
                assert present.tolist() == ([one.length] if one.length else [])
                checkpoints = one.state_positions[one.state_roles == StateRole.CHECKPOINT].tolist()
                assert checkpoints == state.state.parts.recurrent.table.kept(seq)  # type: ignore[union-attr]
            else:
                assert one.state_positions.size == one.state_roles.size == 0


def test_held_pages_are_copies() -> None:
    state = branched("hybrid", 3)
    state.held_pages([0])[0].tables[0][:] = 77
    state.page_references()[0][:] = 77
    state.check()
    with pytest.raises(NotFound):
        state.held_pages([0, 99])


def test_states_of_uncommitted_nodes() -> None:
    state = make("hybrid")
    state.add_sequence(0)
    run(state, [0], [5])
    state.begin_forward([0], [3], [[-1, 0, 0]])
    state.end_forward(skipped=state.geometry.layer_ids)
    (found,) = state.held_pages([0])
    nodes = found.state_roles == StateRole.NODE
    assert found.state_positions[nodes].tolist() == [5, 5, 5]
    assert found.tables[-1][nodes].tolist() == state.state.parts.recurrent.table._sequences[0].nodes  # type: ignore[union-attr]
    state.commit_accepted_token_tree_nodes([0], [1])
    assert StateRole.NODE not in state.held_pages([0])[0].state_roles.tolist()
