"""Chunks come back where a prompt has them: to the bit, layer by layer, or with an error that says
whose did not.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.servers import RedisServer

from quire.base.errors import BlendLoadError, FailedPrecondition, InvalidArgument
from quire.blend import chunk_catalog
from quire.blend.chunk_matching import LEAST
from quire.blend.retriever import ChunkTask
from quire.contracts.blend import BlendRetriever, BlendRetrieverTask
from quire.contracts.store import StoreTier
from quire.statefile.container import read_state
from quire.store import stack
from quire.store.files import FileTier
from quire.store.memory import MemoryTier
from quire.store.redis import RedisTier
from quire.store.remote import ObjectTier

from .chunk_beds import LEAD, SPECS, Bed, SlowShelf, bed, prompt, text, until

A, B, C = text(1, 40), text(2, 33), text(3, LEAST)
QUESTION = text(9, 6)
LAYERS = range(len(SPECS))


def asked(made: Bed, *prompts: tuple[Sequence[int], Sequence[int]], **more: Any) -> ChunkTask:
    ids = [torch.tensor(one, dtype=torch.int64) for one, _ in prompts]
    before = [one.clone() for one in ids]
    task = made.retriever.new_request(ids, [indices for _, indices in prompts], **more)
    assert all(torch.equal(one, other) for one, other in zip(ids, before, strict=True))
    return task


def ones(*parts: tuple[Sequence[int], int]) -> list[int]:
    return [flag for part, flag in parts for _ in part]


def listed(made: Bed, count: int = 1) -> None:
    """Wait until so many chunks are written, and found."""
    assert made.catalog.flush(5)
    assert made.store.flush(5)
    until(lambda: len(made.catalog.known(made.keys.parent).tiers) == count)


# -- what is found ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
def test_rows_stand_where_the_prompt_has_them(layer: int) -> None:
    """All there, holes, nothing, a chunk twice, chunks in any order, several prompts."""
    with bed() as made:
        for one in (A, B, C):
            made.warm(one)
        full = prompt(B, A, C)
        made.check([full[0]], asked(made, full), [1] * len(full[0]), layer)
        mixed = prompt(text(5, 20), A, text(6, 5), [], A, QUESTION)
        valid = ones((range(20), 0), (A, 1), (range(5), 0), (A, 1), (QUESTION, 0))
        made.check([mixed[0]], asked(made, mixed), valid, layer)
        nothing = prompt(text(7, 30), QUESTION)
        made.check([nothing[0]], asked(made, nothing), [0] * 36, layer)
        both = [nothing[0], mixed[0], full[0]]
        task = asked(made, nothing, mixed, full)
        made.check(both, task, [0] * 36 + valid + [1] * len(full[0]), layer)
        assert task.tokens_by_tier == {"memory": 2 * len(A) + len(full[0])}
        assert task.nbytes == (len(A) + len(B) + len(C)) * made.layout.row_bytes
        made.check([], asked(made), [], layer)
        made.check([[]], asked(made, ([], [])), [], layer)
        positions = asked(made, full).positions.tolist()
        assert positions == [len(LEAD) + index for part in (B, A, C) for index in range(len(part))]


def test_anywhere_without_marks() -> None:
    with bed() as made:
        made.warm(A)
        ids = [*text(5, 3), *A, *text(6, 3)]
        made.check([ids], asked(made, (ids, [])), [0] * 3 + [1] * 40 + [0] * 3, 0)
        task = asked(made, (ids, []), wanted=[range(13, 40)])
        made.check([ids], task, [0] * 13 + [1] * 27 + [0] * 6, 1)
        assert task.positions[13] == len(LEAD) + 10


def test_pieces_are_the_result_without_a_copy() -> None:
    with bed() as made:
        made.warm(A)
        made.warm(B)
        task = asked(made, prompt(text(4, 5), A, B, A))
        for layer in LAYERS:
            pieces, result = task.pieces(layer), task.result(layer)
            assert [(one.start, len(one.k), one.original) for one in pieces] == [(5, 40, 1), (45, 33, 1), (78, 40, 1)]
            assert result.k is not None
            assert result.v is not None
            for one in pieces:
                assert torch.equal(result.k[one.start : one.start + len(one.k)], one.k)
                assert torch.equal(result.v[one.start : one.start + len(one.v)], one.v)
            again = task.pieces(layer)
            assert [one.k.data_ptr() for one in again] == [one.k.data_ptr() for one in pieces]
            assert pieces[0].k.data_ptr() == pieces[2].k.data_ptr()


def test_orders_of_dimensions() -> None:
    with bed() as made, bed(order="HND") as other:
        for one in (made, other):
            one.warm(A)
        for layer in LAYERS:
            first, second = (asked(one, prompt(A, QUESTION)).result(layer) for one in (made, other))
            assert first.k is not None
            assert first.v is not None
            assert second.k is not None
            assert second.v is not None
            assert second.k.shape == (first.k.shape[1], 46, first.k.shape[2])
            assert torch.equal(second.k.transpose(0, 1)[:40], first.k[:40])
            assert torch.equal(second.v.transpose(0, 1)[:40], first.v[:40])


def test_it_is_what_the_contract_says() -> None:
    with bed() as made:
        retriever: BlendRetriever = made.retriever
        task: BlendRetrieverTask = retriever.new_request([torch.tensor(A)], [[]])
        assert task.valid_mask.sum() == 0
        with pytest.raises(InvalidArgument, match="order"):
            Bed(made.store, order="NDH").retriever.new_request([], [])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_dtypes_of_ids(dtype: torch.dtype) -> None:
    with bed() as made:
        ids = [one % 200 for one in A]
        made.warm(ids)
        assert made.retriever.new_request([torch.tensor(ids, dtype=dtype)], [[]]).valid_mask.all()


@pytest.mark.parametrize(
    ("prompts", "indices", "more", "field"),
    [
        ([torch.arange(5)], [], {}, "indices"),
        ([torch.arange(5)], [[3, 2]], {}, r"indices\.0"),
        ([torch.arange(5), torch.arange(5)], [[], [6]], {}, r"indices\.1"),
        ([torch.arange(5)], [[-1]], {}, r"indices\.0"),
        ([torch.arange(5)], [[1.5]], {}, r"indices\.0"),
        ([torch.arange(4).view(2, 2)], [[]], {}, r"full_prompts\.0"),
        ([torch.zeros(4)], [[]], {}, r"full_prompts\.0"),
        ([torch.zeros(4, dtype=torch.bool)], [[]], {}, r"full_prompts\.0"),
        ([[1, 2]], [[]], {}, r"full_prompts\.0"),
        ([torch.zeros(4, dtype=torch.int64, device="meta")], [[]], {}, r"full_prompts\.0"),
        ([torch.arange(5)], [[]], {"wanted": []}, "wanted"),
        ([torch.arange(5)], [[]], {"wanted": [range(2, 6)]}, "wanted"),
        ([torch.arange(5)], [[]], {"wanted": [range(3, 2)]}, "wanted"),
        ([torch.arange(5)], [[]], {"wanted": [range(0, 4, 2)]}, "wanted"),
        ([torch.arange(5)], [[]], {"first_layer": 3}, "layer_id"),
    ],
)
def test_arguments_are_checked_before_any_lookup(prompts: Any, indices: Any, more: Any, field: str) -> None:
    shelf = SlowShelf()
    with bed(shelf) as made:
        shelf.open["children"].clear()
        with pytest.raises(InvalidArgument, match=field) as raised:
            made.retriever.new_request(prompts, indices, **more)
        assert raised.value.field is not None
        assert not made.catalog._lists
        shelf.open["children"].set()


def test_layers_are_checked() -> None:
    with bed() as made:
        task = asked(made, prompt(A, QUESTION))
        for layer in (-1, len(SPECS)):
            with pytest.raises(InvalidArgument, match="from 0 to 2"):
                task.result(layer)


def test_key_spaces_are_apart() -> None:
    """Salt, adapter, lead, model: each has chunks of its own."""
    with bed() as made:
        made.warm(A)
        assert asked(made, (A, [])).valid_mask.all()
        for keys in (
            made.keys_of("other"),
            made.keys_of("salt", adapter="x"),
        ):
            made.retriever.keys = keys
            assert not asked(made, (A, [])).valid_mask.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_a_gpu() -> None:
    """The same rows, from pinned memory on a stream of its own; old layers are loaded again."""
    device = torch.device("cuda", 0)
    with bed(specs=SPECS * 3) as made, bed(specs=SPECS * 3, device=device) as other:
        for one in (made, other):
            one.warm(A)
            one.warm(B)
        ids = prompt(B, QUESTION, A, QUESTION)
        mine, theirs = asked(made, ids), asked(other, ids)
        there = mine.valid_mask.bool()
        for layer in [*range(9), *range(9)]:
            host, moved = mine.result(layer), theirs.result(layer)
            assert host.k is not None
            assert host.v is not None
            assert moved.k is not None
            assert moved.v is not None
            assert moved.k.device == moved.v.device == moved.original_positions.device == device
            assert torch.equal(moved.k.cpu()[there], host.k[there])
            assert torch.equal(moved.v.cpu()[there], host.v[there])
            assert torch.equal(moved.original_positions.cpu(), host.original_positions)
        assert len(theirs._layers) <= 4


# -- time ------------------------------------------------------------------------------------------


def test_nothing_is_waited_for_while_all_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_catalog, "LOOK_SECONDS", 0.05)
    shelf = SlowShelf()
    with bed(shelf) as made:
        made.warm(A)
        listed(made)
        for one in shelf.open.values():
            one.clear()
        task = asked(made, prompt(A, QUESTION))
        assert task.valid_mask.tolist() == [1] * 40 + [0] * 6
        results: list[int] = []
        waiting = threading.Thread(target=lambda: results.append(len(task.pieces(1))))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        shelf.open["get"].set()
        waiting.join(10)
        assert results == [1]
        shelf.open["children"].set()
        shelf.open["put"].set()


def test_a_layer_waits_for_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the next one is being loaded, and does not come."""
    with bed() as made:
        made.warm(A)
        held, begun = threading.Event(), threading.Event()
        read = made.layout.read

        def slow(key: Any, file: Any, layer: int) -> Any:
            if layer == 1:
                begun.set()
                held.wait(10)
            return read(key, file, layer)

        monkeypatch.setattr(made.layout, "read", slow)
        task = asked(made, prompt(A, QUESTION))
        assert begun.wait(10)
        made.check([A + QUESTION], task, [1] * 40 + [0] * 6, 0)
        made.check([A + QUESTION], task, [1] * 40 + [0] * 6, 2)
        held.set()
        made.check([A + QUESTION], task, [1] * 40 + [0] * 6, 1)


def test_layers_are_loaded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    with bed(specs=SPECS * 3, ahead=2) as made:
        made.warm(A)
        read, seen = made.layout.read, list[int]()

        def noted(key: Any, file: Any, layer: int) -> Any:
            seen.append(layer)
            return read(key, file, layer)

        monkeypatch.setattr(made.layout, "read", noted)
        task = asked(made, prompt(A, QUESTION), first_layer=3)
        until(lambda: len(task._layers) == 2)
        assert seen == [3, 4]
        task.result(3)
        until(lambda: len(task._layers) == 3)
        assert seen == [3, 4, 5]
        task.result(8)
        task.result(8)
        assert seen == [3, 4, 5, 8]
        task.result(0)
        until(lambda: len(task._layers) == 7)
        assert seen == [3, 4, 5, 8, 0, 1, 2]


def test_what_does_not_come_in_time() -> None:
    shelf = SlowShelf()
    with bed(MemoryTier(1 << 20), shelf, seconds=0.1) as made:
        made.warm(A)
        made.warm(B)
        listed(made, 2)
        memory = made.store.memory
        assert memory is not None
        memory.clear_now()
        made.warm(C)
        shelf.open["get"].clear()
        started = time.monotonic()
        task = asked(made, prompt(C, QUESTION), prompt(A, QUESTION), prompt(B, A))
        with pytest.raises(BlendLoadError, match="in time") as raised:
            task.result(1)
        assert raised.value.requests == (1, 2)
        assert time.monotonic() - started < 5
        with pytest.raises(BlendLoadError):
            task.result(0)
        assert not asked(made, prompt(A, QUESTION)).valid_mask.any()
        assert asked(made, prompt(C, QUESTION)).result(0).k is not None
        shelf.open["get"].set()


def test_after_the_deadline_what_is_there_is_there() -> None:
    with bed(seconds=0.0) as made:
        made.warm(A)
        for layer in LAYERS:
            made.check([A], asked(made, (A, [])), [1] * 40, layer)


# -- what goes wrong -------------------------------------------------------------------------------


def test_memory_gives_chunks_up() -> None:
    """Before a request: it is a miss. After it: its task still has them."""
    with bed() as made:
        made.warm(A)
        inner = made.warm(A[:36])
        memory = made.store.memory
        assert memory is not None
        made.catalog.known(made.keys.parent)
        key = made.warm(A).key
        memory.remove_now([key])
        assert asked(made, prompt(A, QUESTION)).valid_mask.tolist() == [1] * 36 + [0] * 10  # another one fits
        task = asked(made, prompt(A[:36], QUESTION))
        memory.clear_now()
        made.check([A[:36] + QUESTION], task, [1] * 36 + [0] * 6, 2)
        assert not asked(made, prompt(A, QUESTION)).valid_mask.any()
        assert not inner.is_stored


def test_a_file_that_is_gone_is_still_mapped(tmp_path: Path) -> None:
    with bed(FileTier(tmp_path, None)) as made:
        capture = made.warm(A)
        listed(made)
        assert capture.is_stored
        task = asked(made, prompt(A, QUESTION))
        made.check([A + QUESTION], task, [1] * 40 + [0] * 6, 0)
        (file,) = tmp_path.rglob("*.quire")
        file.unlink()
        made.check([A + QUESTION], task, [1] * 40 + [0] * 6, 2)


def test_an_object_that_is_gone_when_it_is_read() -> None:
    """It was listed, and promised."""
    shelf = SlowShelf()
    with bed(shelf) as made:
        made.warm(A)
        made.warm(B)
        listed(made, 2)
        shelf.open["get"].clear()
        task = asked(made, prompt(text(4, 9), QUESTION), prompt(A, QUESTION), prompt(B, B))
        assert task.valid_mask.sum() == 40 + 66
        shelf.held.clear()
        shelf.open["get"].set()
        with pytest.raises(BlendLoadError, match="not there any more") as raised:
            task.result(1)
        assert raised.value.requests == (1, 2)
        with pytest.raises(BlendLoadError, match=r"requests \[1, 2\]"):
            task.result(0)


def damage_header(blob: bytearray) -> None:
    blob[20] ^= 1


def damage_rows(blob: bytearray) -> None:
    blob[-1] ^= 1


@pytest.mark.parametrize(
    ("damage", "reason", "good"), [(damage_header, "header", []), (damage_rows, "checksum", [0, 1])]
)
def test_damage_is_counted_and_removed(damage: Callable[[bytearray], None], reason: str, good: list[int]) -> None:
    """Each layer is verified when it is read, so those before the damage come."""
    shelf = SlowShelf()
    with bed(shelf, ahead=0) as made:
        key = made.warm(A).key
        listed(made)
        blob = bytearray(shelf.held[key])
        damage(blob)
        shelf.held[key] = bytes(blob)
        task = asked(made, prompt(A, QUESTION))
        for layer in good:
            made.check([A + QUESTION], task, [1] * 40 + [0] * 6, layer)
        with pytest.raises(BlendLoadError, match="requests \\[0\\]"):
            task.result(2)
        until(lambda: key not in shelf.held)
        assert made.store.snapshot()[f'quire:store_damaged_total{{reason="{reason}"}}'] == 1
        assert not asked(made, prompt(A, QUESTION)).valid_mask.any()


def test_an_object_of_other_tokens_is_not_taken() -> None:
    """Even under the right key: tokens are compared."""
    with bed() as made:
        key, other = made.warm(A).key, made.warm(B)
        memory = made.store.memory
        assert memory is not None
        (blob,) = memory.get_now([other.key])
        assert blob is not None
        memory.remove_now([key])
        memory.put_now(key, blob)
        task = asked(made, prompt(A, QUESTION))
        with pytest.raises(BlendLoadError, match="other tokens"):
            task.result(0)
        assert not memory.contains_now([key])[0]


def test_whatever_happens_is_a_load_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A defect, or no memory: of all requests with chunks, and said in the log."""
    with bed(ahead=0) as made:
        made.warm(A)

        def broken(*given: Any) -> Any:
            raise MemoryError("none left")

        monkeypatch.setattr(made.layout, "read", broken)
        task = asked(made, prompt(QUESTION), prompt(A, QUESTION))
        with pytest.raises(BlendLoadError, match="MemoryError: none left") as raised:
            task.result(0)
        assert raised.value.requests == (1,)
        assert "none left" in caplog.text


# -- the end of a task -----------------------------------------------------------------------------


def test_closing() -> None:
    """Twice, with a waiting reader who is told, and with nothing kept."""
    shelf = SlowShelf()
    with bed(shelf) as made:
        made.warm(A)
        listed(made)
        shelf.open["get"].clear()
        task = asked(made, prompt(A, QUESTION))
        errors: list[type] = []

        def read() -> None:
            with pytest.raises(FailedPrecondition, match="closed"):
                task.result(0)
            errors.append(FailedPrecondition)

        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(0.02)
        task.close()
        task.close()
        reader.join(10)
        assert errors == [FailedPrecondition]
        with pytest.raises(FailedPrecondition, match="closed"):
            task.result(0)
        shelf.open["get"].set()


def begun(made: Bed, loaded: bool) -> ChunkTask:
    task = asked(made, prompt(A, QUESTION))
    if loaded:
        until(lambda: len(task._layers) == 2)
    return task


@pytest.mark.parametrize("blocked", [False, True])
def test_a_forgotten_task_is_gone(blocked: bool) -> None:
    shelf = SlowShelf()
    with bed(shelf) as made:
        made.warm(A)
        listed(made)
        gc.collect()
        (blob,) = shelf.held.values()
        users = sys.getrefcount(blob)
        if blocked:
            shelf.open["get"].clear()
        gone = weakref.ref(begun(made, not blocked))
        until(lambda: gone() is None)
        shelf.open["get"].set()
        until(lambda: not made.store._flights)
        until(lambda: sys.getrefcount(blob) == users)


def test_threads_of_a_closed_catalog_end() -> None:
    with bed(SlowShelf()) as made:
        made.warm(A)
        listed(made)
        asked(made, (A, [])).result(0)
        names = {"quire-chunks", "quire-chunk-write", "quire-chunk-load"}
        mine = [one for one in threading.enumerate() if one.name in names and one.is_alive()]
        assert len(mine) >= 2
        assert all(one.daemon for one in mine)
        made.catalog.close()
        assert not any(one.is_alive() for one in mine)
        made.catalog.close()
        assert asked(made, (A, [])).result(2).k is not None  # without a thread


def test_many_readers() -> None:
    """Of one task, in any order, while others come and go."""
    with bed(specs=SPECS * 2) as made:
        for one in (A, B, C):
            made.warm(one)
        ids, indices = prompt(A, C, text(4, 9), B, QUESTION)
        valid = ones((A, 1), (C, 1), (range(9), 0), (B, 1), (QUESTION, 0))
        shared = asked(made, (ids, indices))

        def read(seed: int) -> None:
            layers = random.Random(seed).sample(range(6), 6)
            own = asked(made, (ids, indices))
            for layer in layers:
                made.check([ids], shared, valid, layer)
                made.check([ids], own, valid, layer)
            own.close()

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(read, range(16)))


@settings(max_examples=15)
@given(data=st.data())
def test_never_a_wrong_row(data: st.DataObject) -> None:
    """Whatever tiers give up, lose and damage meanwhile: rows are right, or requests are named."""
    texts = [text(100 + index, 20 + 7 * index) for index in range(5)]
    shelf = SlowShelf()
    capacity = data.draw(st.sampled_from((0, 6_000, 20_000, 1 << 20)))
    tiers = [MemoryTier(capacity), shelf] if capacity else [shelf]
    with bed(*tiers, seconds=5.0) as made:
        for _ in range(data.draw(st.integers(3, 14))):
            step = data.draw(st.sampled_from(("warm", "ask", "ask", "lose", "damage", "evict")))
            if step == "warm":
                made.warm(data.draw(st.sampled_from(texts)), data.draw(st.sampled_from(((1,), (7, 2), (64,)))))
            elif step == "evict" and made.store.memory is not None:
                made.store.memory.clear_now()
            elif step in ("lose", "damage"):
                made.catalog.flush(5)
                made.store.flush(5)
                for key in list(shelf.held)[: data.draw(st.integers(1, 2))]:
                    blob = bytearray(shelf.held.pop(key))
                    if step == "damage":
                        blob[data.draw(st.integers(0, len(blob) - 1))] ^= 4
                        shelf.held[key] = bytes(blob)
            else:
                prompts = [
                    prompt(*data.draw(st.lists(st.sampled_from([*texts, QUESTION]), max_size=4)))
                    for _ in range(data.draw(st.integers(1, 2)))
                ]
                task = asked(made, *prompts)
                failed: BlendLoadError | None = None
                for layer in data.draw(st.permutations(LAYERS)):
                    try:
                        made.check([ids for ids, _ in prompts], task, task.valid_mask.tolist(), layer)
                    except BlendLoadError as raised:
                        failed = raised
                if failed is not None:
                    assert set() < set(failed.requests) <= set(range(len(prompts)))
                task.close()


# -- remote tiers ----------------------------------------------------------------------------------


@contextmanager
def far(
    monkeypatch: pytest.MonkeyPatch, piece: int | None, *near: StoreTier, **more: Any
) -> Iterator[tuple[Bed, SlowShelf]]:
    """A bed over a tier whose objects come in pieces (None: the first one has three layers), and
    which has the chunk A."""
    shelf = SlowShelf()
    shelf.kind = "redis"
    with bed(*near, shelf, specs=SPECS * 3, **more) as made:
        made.warm(A)
        listed(made)
        made.store.flush(10)
        (blob,) = shelf.held.values()
        end = made.layout.end(read_state(blob, verify=False), 2)
        monkeypatch.setattr(stack, "PIECE_BYTES", end if piece is None else piece)
        yield made, shelf


def test_layers_of_a_remote_chunk_are_used_while_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    with far(monkeypatch, None, MemoryTier(1 << 20)) as (made, shelf):
        memory = made.store.memory
        assert memory is not None
        memory.clear_now()
        (key,) = shelf.held
        shelf.open["part"].clear()
        task = asked(made, prompt(A, QUESTION))
        for layer in range(3):
            made.check([A + QUESTION], task, [1] * 40 + [0] * 6, layer)
        found: list[int] = []
        waiting = threading.Thread(target=lambda: found.append(len(task.pieces(8))))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        assert made.store.get([key])[0].result(20) is not None, "who comes later gets the same"
        assert memory.get_now([key]) == [None]
        shelf.open["part"].set()
        waiting.join(10)
        assert found == [1]
        made.check([A + QUESTION], task, [1] * 40 + [0] * 6, 8)
        until(lambda: memory.contains_now([key]) == [True])
        assert bytes(memory.get_now([key])[0] or b"") == shelf.held[key]
        assert shelf.gets == 0, "it came in parts alone"


def test_headers_may_be_longer_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    with far(monkeypatch, 5) as (made, _):
        task = asked(made, prompt(A, QUESTION))
        for layer in (8, 0):
            made.check([A + QUESTION], task, [1] * 40 + [0] * 6, layer)


@pytest.mark.parametrize("what", ["gone", "damaged", "closed", "cut"])
def test_what_happens_while_a_chunk_comes(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    with far(monkeypatch, None, seconds=5.0) as (made, shelf):
        (key,) = shelf.held
        shelf.open["part"].clear()
        task = asked(made, prompt(A, QUESTION))
        made.check([A + QUESTION], task, [1] * 40 + [0] * 6, 0)
        blob = bytearray(shelf.held[key])
        blob[-1] ^= 1
        changes: dict[str, Callable[[], object]] = {
            "gone": lambda: shelf.held.clear(),
            "damaged": lambda: shelf.held.update({key: bytes(blob)}),
            "closed": task.close,
            "cut": lambda: shelf.held.update({key: bytes(blob[:-1])}),
        }
        changes[what]()
        threading.Timer(0.05, shelf.open["part"].set).start()
        if what == "closed":
            with pytest.raises(FailedPrecondition, match="closed"):
                task.result(8)
            return
        match = "checksum" if what == "damaged" else "broke off before layer 8"
        with pytest.raises(BlendLoadError, match=match):
            task.result(8)
        made.store.flush(10)
        assert (key in shelf.held) == (what == "cut")


def test_a_remote_chunk_that_was_removed_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with far(monkeypatch, None, MemoryTier(1 << 20)) as (made, shelf):
        memory = made.store.memory
        assert memory is not None
        memory.clear_now()
        (key,) = shelf.held
        shelf.open["part"].clear()
        found = made.store.get([key])[0].result(10)
        assert found is not None
        assert found.arriving is not None
        assert not found.arriving.is_whole
        made.store.remove([key])
        shelf.open["part"].set()
        arriving = found.arriving
        until(lambda: arriving.ended)
        assert memory.contains_now([key]) == [False]


@pytest.mark.parametrize("kind", ["redis", "object"])
def test_parts_of_real_tiers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis by GETRANGE, a bucket by ranges."""
    monkeypatch.setattr(stack, "PIECE_BYTES", 1000)
    server = RedisServer() if kind == "redis" else None
    tier = ObjectTier(tmp_path.as_uri()) if server is None else RedisTier(server.url, None)
    try:
        with bed(tier) as made:
            for ids in (A, B):
                made.warm(ids)
            listed(made, 2)
            assert made.store.flush(10)
            task = asked(made, prompt(B, A, QUESTION))
            for layer in LAYERS:
                made.check([B + A + QUESTION], task, [1] * 73 + [0] * 6, layer)
            assert task.tokens_by_tier == {kind: 73}
            assert {part.fetch.tier for part in task._parts} == {kind}
    finally:
        if server is not None:
            server.kill()
