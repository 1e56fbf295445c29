"""Chunks are taken as they are computed, put into tiers once, and known there."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.adapters.keys import private_salt
from quire.base.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.blend import chunk_catalog
from quire.blend.chunk_capture import ChunkCapture
from quire.blend.chunk_catalog import ChunkCatalog, store_of_chunks
from quire.blend.chunk_matching import LEAST, MOST
from quire.blend.chunks import ChunkKeys, ChunkLayout, refusal
from quire.blend.sequence_rows import Move, SequenceTask
from quire.branches.stored_state import StoredState
from quire.contracts.layers import CrossAttention, Recurrent, StateTensor
from quire.contracts.store import ObjectKind
from quire.kv.state import State
from quire.statefile.container import read_state
from quire.store.collection import collect
from quire.store.files import FileTier
from quire.store.memory import MemoryTier
from quire.store.stack import Store

from .chunk_beds import FULL, LEAD, SPECS, SlowShelf, bed, rows, text, until

A, B = text(1, 40), text(2, 33)


@pytest.mark.parametrize("steps", [(1,), (2,), (64,), (3, 11)])
def test_all_rows_of_all_layers(steps: tuple[int, ...]) -> None:
    """Those of a window too, in steps of any size; the object says what it is."""
    with bed() as made:
        capture = made.warm(A, steps)
        memory = made.store.memory
        assert memory is not None
        (blob,) = memory.get_now([capture.key])
        assert blob is not None
        file = read_state(blob)
        assert file.metadata["chunk"] == {"lead": list(LEAD), "position": 1, "exact": True}
        assert file.metadata["tokens"] == A
        assert list(file.names) == ["layer.0.k", "layer.0.v", "layer.1.k", "layer.1.v", "layer.2.latent"]
        for layer in range(3):
            k, v = made.layout.split(layer, made.layout.read(capture.key, file, layer))
            expected = rows(layer, A, 1)[:, None, None]
            assert torch.equal(k, expected.expand(k.shape))
            assert torch.equal(v, -expected.expand(v.shape))
        assert capture.key.kind is ObjectKind.CHUNK
        assert capture.key.count == len(A)
        assert capture.key.parent == made.keys.parent


def test_a_window_that_has_moved_on_is_noticed() -> None:
    with bed() as made:
        capture = ChunkCapture(made.catalog, made.layout, made.keys, A)
        seq = made.sequence()
        made.forward(seq, capture.ids[:9], 0)
        made.forward(seq, capture.ids[9:18], 9)
        with pytest.raises(FailedPrecondition, match="layer 1, which holds"):
            capture.ran(seq, 18)
        again = made.sequence()
        made.forward(again, capture.ids[:20], 0)
        capture.ran(again, 20)
        made.forward(again, capture.ids[20:], 20)
        with pytest.raises(FailedPrecondition, match="20 of the chunk's 41 tokens"):
            capture.store()
        capture.ran(again, 41)
        assert capture.store()


def test_a_sequence_that_starts_anew() -> None:
    """What was copied stays; only what is new is copied, from where it is now."""
    with bed() as made:
        capture = ChunkCapture(made.catalog, made.layout, made.keys, A)
        seq = made.sequence()
        made.forward(seq, capture.ids[:30], 0)
        capture.ran(seq, 30)
        made.state.remove_sequence(seq)
        seq = made.sequence()
        for start in (0, 20):
            step = capture.ids[start : start + 20]
            made.forward(seq, step, start)
            capture.ran(seq, start + len(step))
        made.forward(seq, [*capture.ids[40:], 5, 6], 40)
        capture.ran(seq, 43)
        assert capture.store()
        task = made.retriever.new_request([torch.tensor(A)], [[]])
        for layer in range(3):
            made.check([A], task, [1] * 40, layer)


def test_what_is_there_is_not_stored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with bed() as made:
        first = made.warm(A)
        assert first.is_stored
        again = ChunkCapture(made.catalog, made.layout, made.keys, A)
        assert again.key == first.key
        assert again.is_stored
        monkeypatch.setattr(made.layout, "pack", None)
        assert again.store()  # nothing had to run
        assert not ChunkCapture(made.catalog, made.layout, made.keys, B).is_stored


@pytest.mark.parametrize("count", [0, LEAST - 1, MOST + 1])
def test_lengths(count: int) -> None:
    with bed() as made, pytest.raises(InvalidArgument, match=f"{LEAST} to {MOST}"):
        ChunkCapture(made.catalog, made.layout, made.keys, text(0, count))


def test_states_without_chunks() -> None:
    cross = CrossAttention(num_heads=1, num_kv_heads=1, head_dim=2, value_dim=2)
    recurrent = Recurrent(states=(StateTensor(shape=(2,), dtype="float32"),))
    for spec, more, word in (
        (cross, {"cross_capacity": 4}, "encoder"),
        (recurrent, {"num_states": 4}, "recurrent"),
    ):
        given: dict[str, Any] = more
        state = State([FULL, spec], capacity=16, page_size=4, **given)
        assert word in refusal(state)
        with pytest.raises(Unsupported, match=word):
            ChunkLayout(state)
    assert refusal(State(list(SPECS), capacity=16, page_size=4)) == ""


def test_keys_depend_on_all_that_rows_depend_on() -> None:
    with bed() as made:
        ids = np.array(A)
        fields = {"model": {"weights": "w"}, "layout_hash": "l", "dtype": "d", "salt": ("", None), "lead": [1]}
        others = (
            {},
            {"model": {"weights": "x"}},
            {"layout_hash": "m"},
            {"dtype": "e"},
            {"salt": ("", "s")},
            {"adapter": "a"},
            {"lead": [2]},
            {"lead": []},
        )
        keys = [type(made.keys).of(**{**fields, **other}).key(ids) for other in others]  # type: ignore[arg-type]
        assert len({one.parent for one in keys}) == len(others)
        assert len({one.digest for one in keys}) == len(others)


class Weights:
    def fields(self) -> dict[str, str]:
        return {"architecture": "a", "config": "c", "weights": "w"}


def test_keys_of_an_engine() -> None:
    """Of a model that is known, under a store that outlives the process, they do as well."""
    state = State(list(SPECS), capacity=16, page_size=4)
    runner: Any = SimpleNamespace(state=state, model=SimpleNamespace(dtype="float32"))

    def keys(store: Store | None, salt: Any = ("", None), adapter: str | None = None, lead: Any = (1,)) -> ChunkKeys:
        return StoredState(runner, store, Weights()).keys.chunk_keys(salt, adapter, lead)

    durable = Store([SlowShelf()])
    one = keys(durable)
    assert one == keys(durable)
    assert not one.private
    assert one.lead == (1,)
    assert one.model == Weights().fields()
    others = [keys(durable, ("", "s")), keys(durable, adapter="f"), keys(durable, lead=()), keys(None), keys(None)]
    assert len({one.parent, *(other.parent for other in others)}) == 6
    assert keys(durable, private_salt()).private


# -- tiers -----------------------------------------------------------------------------------------


def test_durable_tiers_are_written_behind() -> None:
    """At once in memory, though the disk does not answer; private ones are in memory only."""
    shelf = SlowShelf()
    with bed(MemoryTier(1 << 20), shelf) as made:
        shelf.open["put"].clear()
        key = made.warm(A).key
        assert made.retriever.new_request([torch.tensor(A)], [[]]).result(0).k is not None
        assert not shelf.held
        shelf.open["put"].set()
        assert made.catalog.flush(5)
        assert made.store.flush(5)
        assert list(shelf.held) == [key]
        private = made.keys_of("mine", private=True)
        secret = made.warm(B, keys=private)
        assert made.catalog.flush(5)
        assert made.store.flush(5)
        assert list(shelf.held) == [key]
        assert secret.is_stored
    with bed(SlowShelf(), private=True) as made:
        capture = ChunkCapture(made.catalog, made.layout, made.keys, A)
        seq = made.sequence()
        made.forward(seq, capture.ids, 0)
        capture.ran(seq, len(capture.ids))
        assert not capture.store()
        assert not capture.is_stored


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = SlowShelf()
    with bed(MemoryTier(1 << 20), shelf) as made:
        made.store._queue_bytes = 1
        shelf.open["put"].clear()
        made.warm(A)
        until(lambda: bool(made.store._queued))
        made.warm(B)
        assert not made.catalog.flush(0.01)
        monkeypatch.setattr(chunk_catalog, "WAITING_BYTES", 10)
        last = made.warm(text(3, 20))
        assert made.store.snapshot()["quire:store_dropped_total"] == 1
        assert last.is_stored
        shelf.open["put"].set()
        assert made.catalog.flush(5)
        assert made.store.flush(5)
        assert len(shelf.held) == 2


def test_chunks_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are found by one that was there before they were written, within the time a list is kept."""
    monkeypatch.setattr(chunk_catalog, "FRESH_SECONDS", 0.05)
    with bed(FileTier(tmp_path, None)) as made, bed(FileTier(tmp_path, None)) as other:
        ids = torch.tensor(A)
        assert not other.retriever.new_request([ids], [[]]).valid_mask.any()
        made.warm(A)
        assert made.catalog.flush(5)
        assert made.store.flush(5)
        until(lambda: bool(other.retriever.new_request([ids], [[]]).valid_mask.all()))
        for layer in range(3):
            other.check([A], other.retriever.new_request([ids], [[]]), [1] * 40, layer)
        assert ChunkCapture(other.catalog, other.layout, other.keys, A).is_stored


def test_lists_are_asked_for_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = SlowShelf()
    with bed(shelf) as made:
        asked = []
        children = made.store.children
        monkeypatch.setattr(made.store, "children", lambda *given, **more: asked.append(1) or children(*given, **more))
        for _ in range(20):
            made.catalog.known(made.keys.parent)
        assert len(asked) == 1
        found = made.catalog._lists[made.keys.parent]
        assert time.monotonic() < found.due <= time.monotonic() + 1
        found.due = 0.0
        made.catalog.known(made.keys.parent)
        until(lambda: len(asked) == 2)


def test_slow_lists_are_asked_for_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_catalog, "FRESH_SECONDS", 0.0)
    shelf = SlowShelf()
    with bed(shelf) as made:
        shelf.open["children"].clear()
        made.catalog.ask(made.keys.parent)
        time.sleep(0.1)
        shelf.open["children"].set()
        found = made.catalog._lists[made.keys.parent]
        until(lambda: found.answered)
        made.catalog.ask(made.keys.parent)
        assert not found.pending
        assert found.due > time.monotonic() + 0.5


def test_the_first_list_is_waited_for_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = SlowShelf()
    with bed(shelf) as made:
        made.warm(A)
        made.catalog.flush(5)
        made.store.flush(5)
        fresh = ChunkCatalog(made.store)
        assert len(fresh.known(made.keys.parent).tiers) == 1
        fresh.close()
        shelf.open["children"].clear()
        monkeypatch.setattr(chunk_catalog, "LOOK_SECONDS", 0.1)
        fresh = ChunkCatalog(made.store)
        started = time.monotonic()
        assert not fresh.known(made.keys.parent).tiers
        assert 0.05 < time.monotonic() - started < 5
        started = time.monotonic()
        for _ in range(100):
            assert not fresh.known(made.keys.parent).tiers
        assert time.monotonic() - started < 5, "to wait each time would take 10 s"
        shelf.open["children"].set()
        until(lambda: len(fresh.known(made.keys.parent).tiers) == 1)
        fresh.close()


def test_what_happens_while_a_list_is_made_counts() -> None:
    """A list that was begun before a chunk was written, or missed, does not undo that."""
    shelf = SlowShelf()
    with bed(MemoryTier(1 << 20), shelf) as made:
        gone = made.warm(A).key
        made.catalog.flush(5)
        made.store.flush(5)
        memory, parent = made.store.memory, made.keys.parent
        assert memory is not None
        fresh = ChunkCatalog(made.store)
        shelf.open["children"].clear()
        fresh.ask(parent)
        until(lambda: bool(made.store._tasks))
        memory.clear_now()
        fresh.drop(gone)
        key = ChunkCapture(fresh, made.layout, made.keys, B).key
        assert fresh.put(key, b"x", private=True)
        shelf.open["children"].set()
        until(lambda: fresh._lists[parent].answered)
        assert list(fresh.known(parent).tiers) == [key]
        fresh.close()


def test_lists_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_catalog, "PARENTS", 3)
    with bed() as made:
        for index in range(10):
            made.catalog.known(bytes([index] * 20))
        assert len(made.catalog._lists) == 3


def test_a_store_for_chunks() -> None:
    made = store_of_chunks(None)
    assert made.memory is not None
    assert made.memory.capacity == 1 << 30
    assert store_of_chunks(made) is made
    made.close()
    own = Store([SlowShelf()])
    assert store_of_chunks(own) is own


def test_chunks_go_by_use(tmp_path: Path) -> None:
    """In memory and in a directory: the one that was used longest ago."""
    for tier in (MemoryTier(12_000), FileTier(tmp_path, 12_000)):
        with bed(tier) as made:
            keys = []
            for seed in range(4):
                keys.append(made.warm(text(seed, 16)).key)
                made.catalog.flush(5)
                made.store.flush(5)
                made.store.get([keys[0]])[0].result(5)
            there = made.store.contains(keys).result(5)
            assert there[0]
            assert there[-1]
            assert not all(there)


def test_collections_of_commits_leave_chunks_alone() -> None:
    shelf = SlowShelf()
    with bed(shelf) as made:
        key = made.warm(A).key
        assert made.catalog.flush(5)
        assert made.store.flush(5)
        collected = made.store.direct(collect).result(10)
        assert (collected.objects, collected.released) == (0, 0)
        assert list(shelf.held) == [key]


def test_threads_of_one_catalog() -> None:
    with bed(MemoryTier(1 << 20), SlowShelf()) as made:
        captures = [ChunkCapture(made.catalog, made.layout, made.keys, text(seed, 20)) for seed in range(40)]

        def put(index: int) -> None:
            for one in captures[index::4]:
                made.catalog.put(one.key, b"x" * 100, private=False)
                assert one.is_stored
                made.catalog.known(made.keys.parent)

        threads = [threading.Thread(target=put, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(made.catalog.known(made.keys.parent).tiers) == {one.key for one in captures}


# -- live sequences --------------------------------------------------------------------------------


def test_rows_of_a_sequence() -> None:
    with bed(specs=(FULL, SPECS[2])) as made:
        seq = made.sequence()
        made.forward(seq, A, 0)
        export = made.state.open_export(seq)
        task = SequenceTask(made.layout, export, 30, [Move(20, 30, 10), Move(2, 5, 8)])
        assert task.valid_mask.tolist() == [0] * 2 + [1] * 8 + [0] * 10 + [1] * 10
        assert task.positions.tolist() == [0] * 2 + [*range(5, 13)] + [0] * 10 + [*range(30, 40)]
        ids = [0] * 2 + A[5:13] + [0] * 10 + A[30:40]
        specs = made.specs
        for layer in range(len(specs)):
            made.check([ids], task, task.valid_mask.tolist(), layer)
            assert [(one.start, len(one.k), one.original) for one in task.pieces(layer)] == [(2, 8, 5), (20, 10, 30)]
        made.check([[1] * 5], SequenceTask(made.layout, export, 5, []), [0] * 5, 0)
        with pytest.raises(InvalidArgument, match="layer_id"):
            task.pieces(2)
        task.close()
        task.close()
        with pytest.raises(FailedPrecondition, match="closed"):
            task.result(0)


@pytest.mark.parametrize(
    "moves",
    [
        [Move(0, 0, 5), Move(4, 10, 2)],
        [Move(0, 0, 0)],
        [Move(-1, 0, 3)],
        [Move(28, 0, 3)],
        [Move(0, 38, 3)],
        [Move(0, -1, 3)],
    ],
)
def test_moves_are_checked(moves: list[Move]) -> None:
    with bed(specs=(FULL,)) as made:
        seq = made.sequence()
        made.forward(seq, A, 0)
        with pytest.raises(InvalidArgument, match="moves"):
            SequenceTask(made.layout, made.state.open_export(seq), 30, moves)


def test_rows_that_a_window_let_go_of_are_not_moved() -> None:
    with bed() as made:
        seq = made.sequence()
        made.forward(seq, A[:30], 0)
        made.forward(seq, A[30:], 30)
        export = made.state.open_export(seq)
        assert SequenceTask(made.layout, export, 10, [Move(0, 32, 8)]).pieces(1)
        with pytest.raises(InvalidArgument, match="layer 1 holds"):
            SequenceTask(made.layout, export, 10, [Move(0, 20, 10)])


def test_rows_of_the_bed_tell_tokens_and_positions_apart() -> None:
    values = {float(one) for layer in range(3) for position in (0, 7) for one in rows(layer, A, position)}
    assert len(values) == 3 * 2 * len(set(A))
