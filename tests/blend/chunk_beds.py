"""A state whose rows say which token stood where, the chunks made of it, and tiers that wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.blend.chunk_capture import ChunkCapture
from quire.blend.chunk_catalog import ChunkCatalog
from quire.blend.chunks import ChunkKeys, ChunkLayout
from quire.blend.retriever import ChunkRetriever
from quire.contracts.layers import FullAttention, LatentAttention, WindowedAttention
from quire.contracts.store import Blob, ObjectKey, ObjectPart, StoreTier, TierStat
from quire.kv.contract import ContractState
from quire.kv.state import State
from quire.store.memory import MemoryTier, cut
from quire.store.stack import Store

FULL = FullAttention(num_heads=2, num_kv_heads=2, head_dim=4, value_dim=2)
WINDOW = WindowedAttention(num_heads=2, num_kv_heads=1, head_dim=2, value_dim=2, window=3)
LATENT = LatentAttention(num_heads=2, row_dim=6, value_dim=4)
SPECS = (FULL, WINDOW, LATENT)
LEAD = (7,)
MODEL = {"architecture": "a", "config": "c", "weights": "w"}


def text(seed: int, count: int) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(100, 60_000, count)]


def value(layer: int, token: int, position: int) -> float:
    """What all columns of a row of K hold, exactly; V has the negative."""
    return layer + token * 8 + position * 2**-10


def rows(layer: int, ids: Sequence[int], start: int) -> Tensor:
    found = [value(layer, token, start + index) for index, token in enumerate(ids)]
    return torch.tensor(found, dtype=torch.float64)


class Bed:
    """A state, a store and what stands between them."""

    def __init__(self, store: Store, specs: Sequence[Any] = SPECS, *, private: bool = False, **more: Any) -> None:
        self.specs, self.store = specs, store
        self.state = State(list(specs), capacity=4096, page_size=4, dtype=torch.float64)
        self.layout = ChunkLayout(self.state)
        self.keys = self.keys_of("salt", private=private)
        self.catalog = ChunkCatalog(store)
        self.retriever = ChunkRetriever(self.catalog, self.layout, self.keys, **more)
        self._seq = 0

    def keys_of(self, salt: str, **more: Any) -> ChunkKeys:
        layout_hash = self.state.get_layout_hash()
        return ChunkKeys.of(model=MODEL, layout_hash=layout_hash, dtype="float64", salt=salt, lead=LEAD, **more)

    def forward(self, seq: int, ids: Sequence[int], start: int) -> None:
        """Run tokens, which write rows that tell of them."""
        state = ContractState(self.state)
        self.state.begin_forward([seq], [len(ids)])
        for layer, spec in enumerate(self.specs):
            column = rows(layer, ids, start)[:, None]
            if isinstance(spec, LatentAttention):
                halves = [-column.expand(-1, spec.value_dim), column.expand(-1, spec.row_dim - spec.value_dim)]
                state.append_mla_kv(layer, torch.cat(halves, 1))
            else:
                shape = (len(ids), spec.num_kv_heads)
                k = column[..., None].expand(*shape, spec.head_dim)
                state.append_kv(layer, k.contiguous(), -k[..., :1].expand(*shape, spec.value_dim).contiguous())
        self.state.end_forward()

    def sequence(self) -> int:
        self._seq += 1
        self.state.add_sequence(self._seq)
        return self._seq

    def warm(self, tokens: Sequence[int], steps: Sequence[int] = (5,), keys: ChunkKeys | None = None) -> ChunkCapture:
        """Compute a chunk, in steps of these sizes, and store it."""
        capture = ChunkCapture(self.catalog, self.layout, keys or self.keys, tokens)
        seq, done = self.sequence(), 0
        while done < len(capture.ids):
            step = min(steps[done % len(steps)], len(capture.ids) - done)
            self.forward(seq, capture.ids[done : done + step], done)
            done += step
            capture.ran(seq, done)
        assert capture.store()
        self.state.remove_sequence(seq)
        return capture

    def check(self, prompts: Sequence[Sequence[int]], task: Any, valid: Sequence[int], layer: int) -> None:
        """Compare a layer with what it must be: of each chunk all rows from its first position."""
        ids = [token for prompt in prompts for token in prompt]
        assert task.valid_mask.dtype == torch.int32
        assert task.valid_mask.tolist() == list(valid)
        result = task.result(layer)
        assert result.valid_mask is task.valid_mask
        if not any(valid):
            assert result.k is None
            assert result.v is None
            assert result.original_positions.tolist() == [0] * len(ids)
            return
        where = result.original_positions
        assert where.dtype == torch.int64
        where_it_is = [value(layer, token, int(at)) for token, at in zip(ids, where, strict=True)]
        for row, (is_there, expected) in enumerate(zip(valid, where_it_is, strict=True)):
            if is_there:
                assert result.k[row].unique().tolist() == [expected]
                assert result.v[row].unique().tolist() == [-expected]
            else:
                assert where[row] == 0
        spec = self.specs[layer]
        heads = (
            (1, spec.row_dim - spec.value_dim)
            if isinstance(spec, LatentAttention)
            else (spec.num_kv_heads, spec.head_dim)
        )
        assert result.k.shape == (len(ids), *heads)
        assert result.v.shape == (len(ids), heads[0], spec.value_dim)


class SlowShelf:
    """A durable tier that holds objects in a dict, and waits and fails as it is told."""

    kind, label = "disk", "the slow shelf"

    def __init__(self) -> None:
        self.held: dict[ObjectKey, Blob] = {}
        self.open = {verb: threading.Event() for verb in ("get", "part", "put", "children")}
        for one in self.open.values():
            one.set()
        self.gets = 0

    async def _wait(self, verb: str) -> None:
        while not self.open[verb].is_set():
            await asyncio.sleep(0.002)

    async def get(self, keys: Sequence[ObjectKey]) -> list[Blob | None]:
        self.gets += 1
        await self._wait("get")
        return [self.held.get(key) for key in keys]

    async def part(self, key: ObjectKey, start: int, stop: int) -> ObjectPart | None:
        if start:
            await self._wait("part")
        return cut(self.held.get(key), start, stop)

    async def put(self, key: ObjectKey, blob: Blob) -> bool:
        await self._wait("put")
        self.held[key] = blob
        return True

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [key in self.held for key in keys]

    async def children(self, parents: Sequence[bytes]) -> list[list[ObjectKey]]:
        await self._wait("children")
        return [[key for key in self.held if key.parent == parent] for parent in parents]

    async def remove(self, keys: Collection[ObjectKey]) -> int:
        return sum(self.held.pop(key, None) is not None for key in keys)

    async def pin(self, keys: Collection[ObjectKey], pinned: bool) -> None:
        pass

    async def stat(self) -> TierStat:
        return TierStat(objects=len(self.held), bytes=0, capacity=None)

    async def close(self) -> None:
        pass


@contextmanager
def bed(*tiers: StoreTier, specs: Sequence[Any] = SPECS, **more: Any) -> Iterator[Bed]:
    """A bed over tiers; without any over memory."""
    store = Store(list(tiers) or [MemoryTier(1 << 24)], seconds=20.0)
    made = Bed(store, specs, **more)
    try:
        yield made
    finally:
        made.catalog.close()
        store.close(0.0)


def prompt(*parts: Sequence[int]) -> tuple[list[int], list[int]]:
    """A prompt of segments, and where its second, third, ... one begins."""
    ends = np.cumsum([len(part) for part in parts]).tolist()
    return [token for part in parts for token in part], ends[:-1]


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    done = threading.Event()
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        done.wait(0.005)
    raise AssertionError("it does not come to pass")
