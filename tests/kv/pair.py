"""A state and the oracle side by side, for tests that tell a story: each verb goes to both, and they are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.contracts.attention import AttentionBackend
from quire.contracts.layers import FullAttention, RopeSpec
from quire.errors import QuireError
from quire.kernels.sdpa import SdpaAttention
from quire.kv.paged import PagedKVState
from quire.kv.sequences import SlotCopy

from .oracle import Oracle, rotation_bound

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, NaN and the sign of zero included."""
    kind = BITS[a.element_size()]
    return (
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
    )


def attention(
    heads: int = 4, kv_heads: int = 2, dim: int = 8, value_dim: int = 0, rotary_dim: int = 4
) -> FullAttention:
    """A layer; ``rotary_dim`` 0 is one without RoPE."""
    rope = RopeSpec(theta=10000.0, rotary_dim=rotary_dim) if rotary_dim else None
    return FullAttention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        value_dim=value_dim or dim,
        rope=rope,
        rope_mode="normal" if rope else "none",
    )


def split_columns(spec: FullAttention, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q ``[T, Hq, Dk]``, K ``[T, Hkv, Dk]``, V ``[T, Hkv, Dv]`` of a flat fused tensor."""
    q = spec.num_heads * spec.head_dim
    k = spec.num_kv_heads * spec.head_dim
    return (
        qkv[:, :q].view(-1, spec.num_heads, spec.head_dim),
        qkv[:, q : q + k].view(-1, spec.num_kv_heads, spec.head_dim),
        qkv[:, q + k :].view(-1, spec.num_kv_heads, spec.value_dim),
    )


def num_columns(spec: FullAttention) -> int:
    return (spec.num_heads + spec.num_kv_heads) * spec.head_dim + spec.num_kv_heads * spec.value_dim


class Pair:
    def __init__(
        self,
        specs: Sequence[FullAttention] | None = None,
        *,
        capacity: int = 400,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        backend: AttentionBackend | None = None,
        seed: int = 0,
    ) -> None:
        self.specs = list(specs or [attention(), attention()])
        self.dtype = dtype
        self.state = PagedKVState(
            self.specs, capacity=capacity, page_size=page_size, dtype=dtype, backend=backend or SdpaAttention()
        )
        self.oracle = Oracle(self.specs, capacity, page_size, dtype)
        self.generator = torch.Generator().manual_seed(seed)
        self.copies: list[SlotCopy] = []
        """Copies of slots that the state has made so far."""
        copy_slots = self.state.storage.copy

        def record(copies: Sequence[SlotCopy]) -> None:
            self.copies += copies
            copy_slots(copies)

        self.state.storage.copy = record  # type: ignore[method-assign]

    @property
    def free(self) -> int:
        assert self.state.num_available_pages() == self.oracle.pages.free
        return self.oracle.pages.free

    def random(self, layer: int, rows: int) -> Tensor:
        return torch.randn(rows, num_columns(self.specs[layer]), generator=self.generator).to(self.dtype)

    # -- verbs, on both ----------------------------------------------------------------------------------------

    def add(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            self.state.add_sequence(seq_id)
            self.oracle.add_sequence(seq_id)
        self.compare()

    def remove(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            self.state.remove_sequence(seq_id)
            self.oracle.remove_sequence(seq_id)
            self.compare()

    def fork(self, parent: int, child: int, pos: int = -1) -> None:
        assert self.state.fork_sequence(parent, child, pos) == self.oracle.fork_sequence(parent, child, pos) == 0
        self.compare()

    def pop(self, seq_id: int, count: int) -> None:
        assert self.state.popn(seq_id, count) == self.oracle.popn(seq_id, count) == 0
        self.compare()

    def begin(self, ids: Sequence[int], counts: Sequence[int]) -> None:
        assert self.state.missing_pages(ids, counts) == self.oracle.missing_pages(ids, counts) == 0
        self.state.begin_forward(ids, counts)
        self.oracle.begin_forward(ids, counts)
        self.state.check()

    def layer(self, layer: int, qkv: Tensor, **more: Any) -> Tensor:
        """One layer of the open forward, compared with the oracle."""
        forward = self.oracle.forward
        assert forward is not None
        tokens = sum(forward.counts)
        exact, bound = self.oracle.attend(layer, *split_columns(self.specs[layer], qkv[:tokens]))
        got: Tensor = self.state.attention_with_fused_qkv(layer, qkv, **more)
        error = (got[:tokens].double() - exact).abs().amax((1, 2))
        assert ((error <= bound) | bound.isinf()).all(), (
            f"layer {layer}: error {error.tolist()}, bound {bound.tolist()}"
        )
        return got

    def end(self, skipped: Iterable[int] = ()) -> None:
        forward = self.oracle.forward
        assert forward is not None
        skipped = list(skipped)
        self.state.end_forward(skipped=iter(skipped))
        self.oracle.end_forward(skipped)
        for seq_id, count in zip(forward.ids, forward.counts, strict=True):
            self._adopt(seq_id, count)
        self.compare()

    def abort(self) -> None:
        self.state.abort_forward()
        self.oracle.abort_forward()
        self.compare()

    def forward(self, ids: Sequence[int], counts: Sequence[int]) -> list[Tensor]:
        """A whole forward with random values; the results of each layer."""
        self.begin(ids, counts)
        results = [self.layer(layer, self.random(layer, sum(counts))) for layer in range(len(self.specs))]
        self.end()
        return results

    def append(self, seq_id: int, count: int = 1) -> None:
        self.forward([seq_id], [count])

    # -- comparison --------------------------------------------------------------------------------------------

    def _adopt(self, seq_id: int, count: int) -> None:
        """New rotated keys: right up to rounding, and to the bit from here on."""
        length = self.oracle.sequences[seq_id].length
        for layer, spec in enumerate(self.specs):
            if spec.rope is None or spec.rope_mode != "normal":
                continue
            k, v = self.state.debug_get_kv(seq_id, length - count, length, layer=layer)
            exact = self.oracle.stored(seq_id, layer)[0][length - count :]
            for row in range(count):
                if exact[row].isfinite().all():
                    assert (k[row].double() - exact[row].double()).abs().max() <= rotation_bound(exact[row], self.dtype)
            self.oracle.adopt(seq_id, layer, length - count, k, v)

    def compare(self) -> None:
        """Books and every stored row."""
        state, oracle = self.state, self.oracle
        state.check()
        assert sorted(state.table.ids) == sorted(oracle.sequences)
        assert self.free >= 0
        for seq_id, sequence in oracle.sequences.items():
            assert state.sequence_length(seq_id) == state.cached_length(seq_id) == sequence.length
            if sequence.reserved is not None:
                continue
            for layer in range(len(self.specs)):
                got = state.debug_get_kv(seq_id, layer=layer)
                for name, given, expected in zip("KV", got, oracle.stored(seq_id, layer), strict=True):
                    assert same_bits(given, expected), f"{name} of sequence {seq_id}, layer {layer}"

    def finish(self) -> None:
        """Remove what is left; nothing must stay behind."""
        self.remove(*list(self.oracle.sequences))
        assert self.state.empty()
        assert self.free == self.oracle.pages.total


def snapshot(state: PagedKVState) -> list[Any]:
    """Everything that a refused call must leave as it is: books, brackets, imports and bytes."""
    table = state.table
    return [
        {
            seq_id: (
                sequence.length,
                sequence.reserved,
                sequence.stale_tail,
                [t.pages.tolist() for t in sequence.tables],
            )
            for seq_id, sequence in ((seq_id, table.get(seq_id)) for seq_id in table.ids)
        },
        [(pool.references.tolist(), pool._free[: pool.num_free].tolist()) for pool in table.pools],
        table.num_splits,
        id(table.forward),
        sorted(state.open_pass().written) if table.forward is not None else None,
        {seq_id: (started.length, sorted(started.done)) for seq_id, started in state.imports.items()},
        [tensor.view(torch.uint8).numpy().tobytes() for tensor in state.storage._tensors],
    ]


def refused(pair: Pair, kind: type[QuireError], act: Callable[[], object], *words: str) -> None:
    """The call raises this very class, says these words, and leaves no trace."""
    before = snapshot(pair.state)
    with pytest.raises(kind) as raised:
        act()
    assert type(raised.value) is kind
    for word in words:
        assert word in str(raised.value)
    assert snapshot(pair.state) == before


def zeros(pair: Pair, rows: int) -> tuple[Tensor, Tensor]:
    spec = pair.specs[0]
    lead = (len(pair.specs), rows, spec.num_kv_heads)
    return torch.zeros(*lead, spec.head_dim), torch.zeros(*lead, spec.value_dim)
