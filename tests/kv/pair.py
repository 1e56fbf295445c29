"""A state and the oracle side by side, for tests that tell a story: each verb goes to both, and
they are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from quire.base.errors import QuireError
from quire.contracts.attention import AttentionBackend
from quire.contracts.layers import FullAttention, RopeMode, RopeSpec, WindowedAttention
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kv.forward_need import SlotCopy

from .faces import contract
from .oracle import Oracle, rotation_bound
from .oracle_refusals import ORDER
from .oracle_values import Spec
from .oracle_windows import ranges
from .snapshots import snapshot

__all__ = ["Pair", "attention", "num_columns", "refused", "same_bits", "snapshot", "split_columns", "windowed", "zeros"]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, NaN and the sign of zero included."""
    kind = BITS[a.element_size()]
    return (
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
    )


def attention(
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    value_dim: int = 0,
    rotary_dim: int = 4,
    mode: RopeMode = "normal",
    **more: Any,
) -> FullAttention:
    """A layer; ``rotary_dim`` 0 is one without RoPE."""
    rope = RopeSpec(theta=10000.0, rotary_dim=rotary_dim) if rotary_dim else None
    return FullAttention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        value_dim=value_dim or dim,
        rope=rope,
        rope_mode=mode if rope else "none",
        **more,
    )


def windowed(window: int, rotary_dim: int = 4, mode: RopeMode = "normal", **more: Any) -> WindowedAttention:
    """The same with a window of its own."""
    rope = RopeSpec(theta=100.0, rotary_dim=rotary_dim) if rotary_dim else None
    return WindowedAttention(
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        value_dim=8,
        rope=rope,
        rope_mode=mode if rope else "none",
        window=window,
        **more,
    )


def split_columns(spec: Spec, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q ``[T, Hq, Dk]``, K ``[T, Hkv, Dk]``, V ``[T, Hkv, Dv]`` of a flat fused tensor."""
    q = spec.num_heads * spec.head_dim
    k = spec.num_kv_heads * spec.head_dim
    return (
        qkv[:, :q].view(-1, spec.num_heads, spec.head_dim),
        qkv[:, q : q + k].view(-1, spec.num_kv_heads, spec.head_dim),
        qkv[:, q + k :].view(-1, spec.num_kv_heads, spec.value_dim),
    )


def num_columns(spec: Spec) -> int:
    return (spec.num_heads + spec.num_kv_heads) * spec.head_dim + spec.num_kv_heads * spec.value_dim


class Pair:
    def __init__(
        self,
        specs: Sequence[Spec] | None = None,
        *,
        capacity: int = 400,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        backend: AttentionBackend | None = None,
        window_capacity: int | None = None,
        seed: int = 0,
    ) -> None:
        self.specs = list(specs or [attention(), attention()])
        self.dtype = dtype
        self.state = contract(
            self.specs,
            capacity=capacity,
            window_capacity=window_capacity,
            page_size=page_size,
            dtype=dtype,
            backend=backend or SdpaAttention(),
        )
        self.oracle = Oracle(self.specs, capacity, page_size, dtype, window_capacity)
        self.generator = torch.Generator().manual_seed(seed)
        self.copies: list[SlotCopy] = []
        """Copies of slots that the state has made so far, in all classes."""
        for one in self.state.state.parts.paged.classes:
            self._record(one.storage)

    def _record(self, storage: Any) -> None:
        copy_slots = storage.copy

        def record(copies: Sequence[SlotCopy]) -> None:
            self.copies += copies
            copy_slots(copies)

        storage.copy = record

    @property
    def free(self) -> int:
        assert self.state.num_available_pages() == self.oracle.free
        return self.oracle.free

    def random(self, layer: int, rows: int) -> Tensor:
        return torch.randn(rows, num_columns(self.specs[layer]), generator=self.generator).to(self.dtype)

    def parts(self, layer: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random Q, K and V."""
        q, k, v = split_columns(self.specs[layer], self.random(layer, rows))
        return q, k, v

    # -- verbs, on both ----------------------------------------------------------------------------

    def both(self, verb: str, *args: Any, **more: Any) -> Any:
        """Both return the same, or both refuse with the same class (which is raised), the state
        without a trace.
        """
        try:
            expected = getattr(self.oracle, verb)(*args, **more)
        except ORDER as refusal:
            refused(self, type(refusal), lambda: getattr(self.state, verb)(*args, **more))
            raise
        try:
            got = getattr(self.state, verb)(*args, **more)
        except QuireError as error:
            raise AssertionError(f"{verb}{args} was refused: {error}") from error
        assert got == expected
        return got

    def edit(self, verb: str, *args: Any, **more: Any) -> None:
        self.both(verb, *args, **more)
        self.compare()

    def add(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            self.edit("add_sequence", seq_id)

    def remove(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            self.edit("remove_sequence", seq_id)

    def fork(self, parent: int, child: int, pos: int = -1) -> None:
        self.edit("fork_sequence", parent, child, pos)

    def pop(self, seq_id: int, count: int) -> None:
        self.edit("popn", seq_id, count)

    def window(
        self, seq_id: int, window: int | None, sink: int = 0, eviction: Literal["token", "forward"] = "token"
    ) -> None:
        self.edit("enable_sliding_window_for_seq", seq_id, window, sink, eviction=eviction)

    def commit(self, seq_ids: Sequence[int], leaves: Sequence[int]) -> None:
        self.edit("commit_accepted_token_tree_nodes", seq_ids, leaves)

    def begin(self, ids: Sequence[int], counts: Sequence[int], parents: Any = None) -> None:
        assert self.both("missing_pages", ids, counts, parents) == 0
        self.both("begin_forward", ids, counts, parents)
        self.state.check()
        for relative in (False, True):
            assert self.state.get_query_positions(relative=relative).tolist() == self.oracle.positions(relative)

    def layer(self, layer: int, qkv: Tensor, *, mask: Tensor | None = None, **more: Any) -> Tensor:
        """One layer of the open forward, compared with the oracle."""
        tokens = self.oracle.open_forward().tokens
        exact = self.oracle.attention_with_fused_qkv(layer, *split_columns(self.specs[layer], qkv[:tokens]), mask=mask)
        got: Tensor = self.state.attention_with_fused_qkv(layer, qkv, mask=mask, **more)
        exact.check(got)
        return got

    def end(self, skipped: Iterable[int] = ()) -> None:
        forward = self.oracle.open_forward()
        skipped = list(skipped)
        self.state.end_forward(skipped=iter(skipped))
        self.oracle.end_forward(skipped)
        for entry in forward.entries:
            self.adopt(entry.seq_id, entry.old, entry.end)
        self.compare()

    def abort(self) -> None:
        self.state.abort_forward()
        self.oracle.abort_forward()
        self.compare()

    def forward(self, ids: Sequence[int], counts: Sequence[int], parents: Any = None) -> list[Tensor]:
        """A whole forward with random values; the results of each layer."""
        self.begin(ids, counts, parents)
        results = [self.layer(layer, self.random(layer, sum(counts))) for layer in range(len(self.specs))]
        self.end()
        return results

    def append(self, seq_id: int, count: int = 1) -> None:
        self.forward([seq_id], [count])

    # -- comparison --------------------------------------------------------------------------------

    def adopt(self, seq_id: int, start: int, stop: int) -> None:
        """New rotated keys: right up to rounding, and to the bit from here on."""
        for layer, spec in enumerate(self.specs):
            if spec.rope is None or spec.rope_mode != "normal":
                continue
            # No verb looks into a sequence that is being imported.
            found = self.state.state.parts.layer(layer)
            slots = self.state.state.sequences.slots(found.class_index, seq_id, [range(start, stop)])
            k, v = self.state.state.parts.paged.classes[found.class_index].storage.read(found.index, slots)
            exact = [key for key, _ in self.oracle.sequences[seq_id].rows[layer][start:stop]]
            for row, expected in zip(k, exact, strict=True):
                if expected.isfinite().all():
                    # The oracle's own row was rounded once as well.
                    assert (row.double() - expected.double()).abs().max() <= rotation_bound(expected, self.dtype)
                else:
                    assert not row.isfinite().all()
            self.oracle.adopt(seq_id, layer, start, k, v)

    def compare_rows(self, seq_id: int) -> None:
        """Every row that is held, to the bit."""
        if self.oracle.is_importing(seq_id):
            return
        for layer in range(len(self.specs)):
            rows = self.oracle.sequences[seq_id].rows[layer]
            for run in ranges(set(self.oracle.held_addresses(seq_id, layer))):
                got = self.state.debug_get_kv(seq_id, run.start, run.stop, layer=layer)
                expected = self.oracle.stack(layer, rows[run.start : run.stop])
                for name, given, right in zip("KV", got, expected, strict=True):
                    assert same_bits(given, right), f"{name} of sequence {seq_id}, layer {layer}, rows {run}"

    def compare_books(self) -> None:
        """Lengths, pages, nodes, windows."""
        state, oracle = self.state, self.oracle
        state.check()
        assert sorted(state.state.sequences.ids) == sorted(oracle.sequences)
        assert self.free >= 0
        assert state.empty() == (not oracle.sequences)
        assert state.total_sequence_length() == oracle.total_length()
        for seq_id, sequence in oracle.sequences.items():
            which = f"sequence {seq_id} of {sequence.length} tokens, {sequence.nodes} nodes, {sequence.window}"
            assert state.sequence_length(seq_id) == sequence.length, which
            assert state.cached_length(seq_id) == sequence.cached, which
            assert state.pending_nodes(seq_id) == sequence.nodes, which
            assert state.pending_layers(seq_id) == oracle.pending_layers(seq_id), which
            assert state.reachable(seq_id) == oracle.reachable(seq_id), which
            assert state.sequence_pages(seq_id) == oracle.pages_of(seq_id), which

    def compare(self) -> None:
        """Books and every stored row."""
        self.compare_books()
        for seq_id in self.oracle.sequences:
            self.compare_rows(seq_id)

    def finish(self) -> None:
        """Remove what is left; nothing must stay behind."""
        self.remove(*list(self.oracle.sequences))
        assert self.state.empty()
        assert all(pool.free == pool.total for pool in self.oracle.pools)
        assert self.free >= 0


def refused(pair: Pair, kind: type[QuireError], act: Callable[[], object], *words: str) -> None:
    """The call raises this very class, says these words, and leaves no trace."""
    before = snapshot(pair.state)
    with pytest.raises(kind) as raised:
        act()
    assert type(raised.value) is kind
    for word in words:
        assert word in str(raised.value)
    assert str(raised.value)
    assert snapshot(pair.state) == before


def zeros(pair: Pair, rows: int) -> tuple[Tensor, Tensor]:
    spec = pair.specs[0]
    lead = (len(pair.specs), rows, spec.num_kv_heads)
    return torch.zeros(*lead, spec.head_dim), torch.zeros(*lead, spec.value_dim)
