"""Rows of stored objects that go into a pool: in one call of C++, and object by object. Both write
the same, and nothing of an object that is damaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.branches import object_rows
from quire.branches.object_layout import ObjectLayout
from quire.branches.object_rows import ObjectRows
from quire.contracts.kv_state import TensorPlan
from quire.contracts.layers import FullAttention, LatentAttention
from quire.contracts.store import ObjectKind
from quire.kernels.native_library import native_problem
from quire.kernels.rows.checked_rows import checked_rows
from quire.kv.state import State
from quire.store.keys import Chain, StoredPiece
from quire.store.objects import Contents, pack, tensor_name, unpack
from quire.store.records import Unfit

LENGTH, PAGE, CHUNK = 52, 4, 16
"""The last of four objects has 4 tokens."""
SPECS = (
    FullAttention(num_heads=4, num_kv_heads=2, head_dim=16, value_dim=16),
    LatentAttention(num_heads=2, row_dim=40, value_dim=32),
    FullAttention(num_heads=4, num_kv_heads=2, head_dim=24, value_dim=64),
)
MODEL = {"architecture": "none", "config": "00", "weights": "00"}
ROADS = ("C++", "plain")


@pytest.fixture(params=ROADS)
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(object_rows, "checked_rows", lambda: None)
    elif checked_rows() is None:
        pytest.skip(native_problem())
    return str(request.param)


class Kept:
    """A state, and the objects of a history that is to come into it."""

    def __init__(self, seed: int = 0) -> None:
        self.state = State(SPECS, capacity=160, page_size=PAGE, dtype=torch.float32)
        self.layout = ObjectLayout(self.state)
        ids = np.arange(LENGTH, dtype=np.int64)
        self.chain = Chain.of(b"x" * 20, ids, (), CHUNK)
        self.pieces = [
            StoredPiece(self.chain.rows(start, stop), start, stop)
            for start in range(0, LENGTH, CHUNK)
            for stop in [min(start + CHUNK, LENGTH)]
        ]
        draw = torch.Generator().manual_seed(seed)
        whole = {layer: self.plan(layer, LENGTH) for layer in self.layout.row_layers}
        self.rows = {
            layer: {name: torch.randn(one.shape, generator=draw) for name, one in group.items()}
            for layer, group in whole.items()
        }
        self.blobs = [bytearray(self.packed(piece)) for piece in self.pieces]
        self.dropped: list[int] = []

    def plan(self, layer: int, tokens: int) -> dict[str, TensorPlan]:
        return self.layout.plan(ObjectKind.ROWS, tokens, layer)

    def contents(self, piece: StoredPiece) -> Contents:
        tokens, adapters = self.chain.between(piece.start, piece.stop)
        return Contents(MODEL, self.state.get_layout_hash(), tokens, adapters)

    def packed(self, piece: StoredPiece, less: int = 0) -> bytes:
        """An object; with ``less`` rows than it should have."""
        tokens = piece.stop - piece.start - less
        plan = {layer: self.plan(layer, tokens) for layer in self.rows}
        tensors = (
            (tensor_name(layer, name), one[piece.start : piece.stop - less])
            for layer, group in self.rows.items()
            for name, one in group.items()
        )
        return pack(piece.key, self.contents(piece), plan, tensors)

    def scatter(self, rng: np.random.Generator) -> None:
        """Let the pages that are free lie in any order, full of numbers."""
        for seq in range(1, 9):
            self.state.prepare_import(seq, self.state.import_metadata(16))
            for layer, group in self.rows.items():
                self.state.import_rows(seq, layer, 0, {name: one[:16] + 9 for name, one in group.items()})
            self.state.finish_import(seq)
        for seq in rng.permutation(np.arange(1, 9)):
            self.state.remove_sequence(int(seq))

    def load(self, seq: int = 0, tokens: range = range(LENGTH), **prepared: Any) -> None:
        """Bring ``tokens`` into a new sequence."""

        @contextmanager
        def dropping(piece: StoredPiece) -> Iterator[None]:
            try:
                yield
            except Unfit:
                self.dropped.append(self.pieces.index(piece))
                raise

        self.state.prepare_import(seq, self.state.import_metadata(tokens.stop), **prepared)
        wanted = [one for one in self.pieces if one.stop > tokens.start and one.start < tokens.stop]
        files = [
            unpack(piece.key, self.contents(piece), memoryview(blob))
            for piece, blob in zip(self.pieces, self.blobs, strict=True)
            if piece in wanted
        ]
        found = ObjectRows(wanted, files, tokens, dropping)
        assert found.start == tokens.start
        for layer in self.rows:
            self.state.import_rows(seq, layer, found.start, found.of(layer, partial(self.plan, layer)))
        self.state.finish_import(seq)

    def there(self, seq: int) -> dict[int, dict[str, Tensor]]:
        export = self.state.open_export(seq)
        return {layer: export.rows(layer, 0, export.length) for layer in self.rows}

    def pool(self) -> list[Tensor]:
        return [tensor.clone() for one in self.state.parts.paged.classes for tensor in one.storage._tensors]


def same(found: dict[int, dict[str, Tensor]], wanted: dict[int, dict[str, Tensor]], length: int) -> bool:
    return all(
        torch.equal(found[layer][name], one[:length]) for layer, group in wanted.items() for name, one in group.items()
    )


@pytest.mark.turns(6)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("length", [LENGTH, 50, 33, 32, 17])
def test_all_rows_come(road: str, seed: int, length: int) -> None:
    """Wherever their pages are, and of the last object only as many as are wanted."""
    kept = Kept(seed)
    kept.scatter(np.random.default_rng(seed))
    kept.load(tokens=range(length))
    assert same(kept.there(0), kept.rows, length)
    assert not kept.dropped


@pytest.mark.parametrize("shared", [4, 16, 20, 48])
def test_rows_come_behind_shared_ones(road: str, shared: int) -> None:
    """Also from within an object."""
    kept = Kept()
    kept.load(0)
    before = kept.there(0)
    kept.load(1, range(shared, LENGTH), parent=0, shared=shared)
    assert same(kept.there(1), kept.rows, LENGTH)
    assert same(kept.there(0), before, LENGTH)


def test_the_call_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it can be, pieces are not read one by one."""
    if checked_rows() is None:
        pytest.skip(native_problem())
    monkeypatch.setattr(object_rows, "read_tensors", None)
    kept = Kept()
    kept.load()
    assert same(kept.there(0), kept.rows, LENGTH)


@pytest.mark.turns(3)
@pytest.mark.parametrize("seed", range(30))
def test_a_flipped_bit_is_never_seen(road: str, seed: int) -> None:
    """The load ends, the object is named, and no slot has changed but to rows that are right."""
    rng, kept = np.random.default_rng(seed), Kept(seed)
    kept.scatter(rng)
    before = kept.pool()
    damaged = int(rng.integers(len(kept.pieces)))
    blob, piece = kept.blobs[damaged], kept.pieces[damaged]
    header = 8 + int.from_bytes(blob[:8], "little")
    place = int(rng.choice([header, len(blob) - 1, int(rng.integers(header, len(blob)))]))
    blob[place] ^= 1 << int(rng.integers(8))
    with pytest.raises(Unfit, match="is damaged") as caught:
        kept.load()
    assert caught.value.code == "checksum"
    assert piece.key.name in str(caught.value)
    assert kept.dropped == [damaged]
    right = torch.cat([one.flatten() for group in kept.rows.values() for one in group.values()])
    for old, new in zip(before, kept.pool(), strict=True):
        # What is written is of the rows as they should be: drawn numbers, which are all different.
        assert torch.isin(new[new != old], right).all()


def test_what_does_not_fit_is_said(road: str) -> None:
    kept = Kept()
    kept.blobs[1] = bytearray(kept.packed(kept.pieces[1], less=1))
    with pytest.raises(Unfit, match=r"has no layer\.0\.k") as caught:
        kept.load()
    assert caught.value.code == "layout"
    assert kept.dropped == [1]


@pytest.mark.parametrize("told", ["", "0", "00" * 15, "00" * 17, "zz" * 16, "00" * 16, 7])
def test_a_checksum_that_is_none(road: str, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a writer with a fault would leave it, whose header is right."""
    kept = Kept()
    names = [tensor_name(layer, name) for layer, group in kept.rows.items() for name in group]
    for name in names:
        with monkeypatch.context() as patch:
            opened = object_rows.StateFile.checksums.fget  # type: ignore[attr-defined]
            victim = kept.contents(kept.pieces[2]).tokens

            def lying(self: Any, opened: Any = opened, victim: Any = victim, name: str = name) -> dict[str, Any]:
                found = dict(opened(self))
                return found | ({name: told} if self.metadata["tokens"] == victim else {})

            patch.setattr(object_rows.StateFile, "checksums", property(lying))
            patch.setattr(object_rows.StateFile, "verify", verify_by_checksums)
            with pytest.raises(Unfit, match="damaged"):
                kept.load()
        kept.state.remove_sequence(0)
    kept.load()


def verify_by_checksums(self: Any, *names: str) -> None:
    from quire.base.errors import DataLoss
    from quire.statefile.header import checksum

    for name in names:
        begin, end = self._span(name)
        if checksum(self._open_view()[begin:end]) != self.checksums[name]:
            raise DataLoss(f"tensor {name!r} is damaged")


def test_a_call_that_sees_damage_alone_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the bytes change while they are read."""
    if checked_rows() is None:
        pytest.skip(native_problem())
    monkeypatch.setattr(object_rows, "checked_rows", lambda: lambda stored, runs, target: 2)
    kept = Kept()
    with pytest.raises(Unfit, match="changed while it was read") as caught:
        kept.load()
    assert (caught.value.code, kept.dropped) == ("checksum", [2])
