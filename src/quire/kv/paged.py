"""``PagedKVState``: K and V of every token, in pages, for layers of full attention.

It ties the bookkeeping (``sequences``), the rows (``storage``) and an attention backend together, and is what the KV
state contract promises: every call is checked completely, then it changes.

Letters: L layers; B entries of the batch; T new tokens; N >= T rows of a padded tensor; Hq, Hkv heads; Dk, Dv head sizes; P page size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.contracts.attention import AttentionBackend, ForwardPlan
from quire.contracts.layers import FullAttention, LayerSpec, RopeSpec
from quire.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.kv import exchange
from quire.kv.pages import PagePool
from quire.kv.rules import RefusedVerbs, refuse
from quire.kv.sequences import ForwardNeed, SequenceTable, check_integer, pages_for, slots_of
from quire.kv.storage import PagedStorage
from quire.ops.rope import RotaryTable, rotate
from quire.types import SeqId

TokenTreeParents = Sequence[int] | Sequence[Sequence[int] | None] | None


class AttentionPass:
    """One open forward, as the blocks of a model see it (``contracts.model.Pass``)."""

    def __init__(self, state: PagedKVState, plan: ForwardPlan, prepared: Any) -> None:
        self._state = state
        self._prepared = prepared
        self.plan = plan
        self._rotations: dict[RopeSpec, tuple[Tensor, Tensor]] = {}
        self.written: set[int] = set()

    @property
    def positions_T(self) -> Tensor:
        return self.plan.positions_T.to(torch.int32)

    def _rotation(self, spec: RopeSpec) -> tuple[Tensor, Tensor]:
        found = self._rotations.get(spec)
        if found is None:
            found = self._state.rotary_table(spec).rows(self.plan.positions_T, self.plan.max_position)
            self._rotations[spec] = found
        return found

    def attend(self, layer_id: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        spec = self._state.spec(layer_id)
        if spec.rope is not None and spec.rope_mode == "normal":
            cos, sin = self._rotation(spec.rope)
            q_THD = rotate(q_THD, cos, sin, interleaved=spec.rope.interleaved)
            k_THD = rotate(k_THD, cos, sin, interleaved=spec.rope.interleaved)
        return self._run(layer_id, q_THD, k_THD, v_THD, spec.scale)

    def attend_qkv(self, layer_id: int, qkv_TC: Tensor, scale: float | None = None) -> Tensor:
        spec = self._state.spec(layer_id)
        heads, kv_heads, dk = spec.num_heads, spec.num_kv_heads, spec.head_dim
        qk_columns = (heads + kv_heads) * dk
        qk_THD = qkv_TC[:, :qk_columns].view(-1, heads + kv_heads, dk)
        v_THD = qkv_TC[:, qk_columns:].view(-1, kv_heads, spec.value_dim)
        if spec.rope is not None and spec.rope_mode == "normal":
            cos, sin = self._rotation(spec.rope)
            qk_THD = rotate(qk_THD, cos, sin, interleaved=spec.rope.interleaved)
        return self._run(layer_id, qk_THD[:, :heads], qk_THD[:, heads:], v_THD, spec.scale if scale is None else scale)

    def _run(self, layer_id: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, scale: float) -> Tensor:
        state, layer = self._state, layer_id - self._state.first_layer
        if not state.is_open(self):
            # Its slots may belong to somebody else by now.
            raise FailedPrecondition("this forward is over; take the pass of the open one")
        dtype = q_THD.dtype
        if dtype != state.dtype or k_THD.dtype != state.dtype:
            # Attention reads what is stored, so that a token's result does not depend on where a chunk began.
            q_THD, k_THD, v_THD = (x_THD.to(state.dtype) for x_THD in (q_THD, k_THD, v_THD))
        state.storage.write(layer, self.plan.slots_T, k_THD, v_THD)
        self.written.add(layer_id)
        rows = state.storage.layers[layer]
        out_THD = state.backend.run(self._prepared, q_THD, k_THD, v_THD, rows.k, rows.v, scale)
        return out_THD if dtype == state.dtype else out_THD.to(dtype)


class PagedKVState(RefusedVerbs):
    """The KV state of a model whose layers are all full attention.

    ``capacity``: tokens that the pool holds, rounded up to whole pages. ``first_layer``: the global id of ``specs[0]``
    (a pipeline stage owns a range). Raises ``Unsupported`` for a layer or a RoPE mode that it does not have, and
    ``ResourceExhausted`` if the pool does not fit in memory. One thread at a time.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        *,
        capacity: int,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        backend: AttentionBackend,
        first_layer: int = 0,
    ) -> None:
        if page_size < 1:
            raise InvalidArgument(f"page_size {page_size}; at least 1 is needed")
        if capacity < 1:
            raise InvalidArgument(f"capacity {capacity} tokens; at least 1 is needed")
        if dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise InvalidArgument(f"KV dtype {dtype}; float32, float16, bfloat16 or float64 are stored")
        self.device = torch.device(device)
        self.specs = [self._supported(index + first_layer, spec, backend) for index, spec in enumerate(specs)]
        if not self.specs:
            raise InvalidArgument("a KV state needs at least one layer")
        self.page_size = page_size
        self.dtype = dtype
        self.backend = backend
        self.first_layer = first_layer
        num_pages = pages_for(capacity, page_size)
        self.storage = PagedStorage(self.specs, num_pages * page_size, dtype, self.device)
        self.table = SequenceTable([PagePool(num_pages)], page_size)
        self._rotary: dict[RopeSpec, RotaryTable] = {}
        self._pass: AttentionPass | None = None
        self.imports: dict[SeqId, exchange.Import] = {}

    def _supported(self, layer_id: int, spec: LayerSpec, backend: AttentionBackend) -> FullAttention:
        if not isinstance(spec, FullAttention):
            raise Unsupported(f"layer {layer_id} is of kind {spec.kind!r}; PagedKVState has layers of kind 'full' only")
        if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
            raise InvalidArgument(
                f"layer {layer_id}: {spec.num_heads} query heads cannot share {spec.num_kv_heads} KV heads; give a divisor"
            )
        if spec.rope_mode == "inline":
            raise Unsupported(f"layer {layer_id}: RoPE mode 'inline' is not in this release; use 'normal' or 'none'")
        if spec.rope and (spec.rope.rotary_dim > spec.head_dim or spec.rope.rotary_dim % 2):
            raise InvalidArgument(
                f"layer {layer_id}: {spec.rope.rotary_dim} rotary columns in heads of {spec.head_dim}; an even number that fits is needed"
            )
        reason = backend.refusal(spec, self.device)
        if reason:
            raise Unsupported(f"layer {layer_id}: {reason}")
        return spec

    # -- sequences -------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop everything; legal at any time."""
        self.table.clear()
        self._pass = None
        self.imports.clear()

    def add_sequence(self, seq_id: SeqId) -> None:
        """A new sequence of length 0 that holds no page."""
        self.table.add(seq_id)

    def remove_sequence(self, seq_id: SeqId) -> None:
        """Forget a sequence; pages that nobody else holds are free."""
        self.table.remove(seq_id)
        self.imports.pop(seq_id, None)

    def fork_sequence(self, parent_id: SeqId, child_id: SeqId, fork_pos: int = -1) -> int:
        """The child holds the parent's first ``fork_pos`` tokens (-1: all). Shares pages, copies nothing. Returns 0."""
        self.table.fork(parent_id, child_id, fork_pos)
        return 0

    def popn(self, seq_id: SeqId, n: int) -> int:
        """Take back the last ``n`` tokens. Returns 0: nothing must be run again."""
        self.table.pop(seq_id, n)
        return 0

    def rewind_cost(self, seq_id: SeqId, pos: int) -> int:
        """Tokens that must be run again after a pop or fork to ``pos``: 0."""
        pos = check_integer(pos, "rewind_cost: position", 0)
        length = self.table.get(seq_id).length
        if pos > length:
            raise InvalidArgument(f"rewind_cost: position {pos} of sequence {seq_id} is outside of 0..{length}")
        return 0

    def reachable(self, seq_id: SeqId) -> list[range]:
        """Positions that ``popn`` and ``fork_sequence`` can go to: all."""
        return [range(self.table.get(seq_id).length + 1)]

    def checkpoints(self, seq_id: SeqId) -> list[int]:
        """Kept recurrent states: none, for there are no recurrent layers."""
        self.table.get(seq_id)
        return []

    def enable_sliding_window_for_seq(
        self, seq_id: SeqId, window: int | None, sink: int = 0, *, eviction: str = "token"
    ) -> None:
        """Not in this release, but for ``window=None``, which is how a sequence is."""
        if window is not None and (window < 1 or not 0 <= sink < window):
            raise InvalidArgument(f"window {window} with sink {sink}; 0 <= sink < window is needed")
        if eviction not in ("token", "forward"):
            raise InvalidArgument(f"eviction {eviction!r}; 'token' or 'forward' are accepted")
        self.table.get(seq_id)
        if window is not None:
            refuse("enable_sliding_window_for_seq")
        self.table.require_closed("enable_sliding_window_for_seq")

    # -- queries ---------------------------------------------------------------------------------------------

    def empty(self) -> bool:
        return len(self.table) == 0 and all(pool.num_used == 0 for pool in self.table.pools)

    @property
    def num_pages(self) -> int:
        return sum(pool.num_pages for pool in self.table.pools)

    def num_available_pages(self) -> int:
        return min(pool.num_free for pool in self.table.pools)

    def missing_pages(
        self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int], token_tree_parents: TokenTreeParents = None
    ) -> int:
        """Pages that this ``begin_forward`` would be short of, copies on write included. While a forward is open: as
        before it."""
        return self.table.shortage(self._plan(seq_ids, append_lengths, token_tree_parents))

    def sequence_length(self, seq_id: SeqId) -> int:
        return self.table.get(seq_id).length

    def cached_length(self, seq_id: SeqId) -> int:
        return self.table.get(seq_id).length

    def pending_nodes(self, seq_id: SeqId) -> int:
        self.table.get(seq_id)
        return 0

    def total_sequence_length(self) -> int:
        return sum(self.table.get(seq_id).length for seq_id in self.table.ids)

    def sequence_pages(self, seq_id: SeqId) -> tuple[int, int]:
        """(pages that the sequence holds, those of them that others hold too)"""
        sequence = self.table.get(seq_id)
        return sum(table.size for table in sequence.tables), self.table.shared_pages(seq_id)

    def num_shared_pages(self) -> int:
        """Pages that more than one sequence holds."""
        return sum(int((pool.references > 1).sum()) for pool in self.table.pools)

    @property
    def num_splits(self) -> int:
        """Shared pages that were copied because one of their owners wrote, since the state was made."""
        return self.table.num_splits

    def check(self) -> None:
        """Recount pages and references; ``QuireError`` names a broken invariant."""
        self.table.check()

    # -- forward ---------------------------------------------------------------------------------------------

    def _plan(self, seq_ids: Sequence[SeqId], counts: Sequence[int], parents: TokenTreeParents) -> ForwardNeed:
        if parents is not None and has_tree(parents, self.table.check_batch(seq_ids, counts)):
            for seq_id in seq_ids:
                self.table.get(seq_id)
            refuse("token_tree_parents")
        return self.table.plan_forward(seq_ids, counts)

    def begin_forward(
        self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int], token_tree_parents: TokenTreeParents = None
    ) -> None:
        """Announce ``append_lengths[i]`` new tokens for ``seq_ids[i]``; takes pages and plans the forward."""
        need = self._plan(seq_ids, append_lengths, token_tree_parents)
        opened = self.table.open_forward(need)
        try:
            self.storage.copy(opened.copies[0])
            self.storage.blank(opened.blanks[0])
            plan = self._forward_plan(need)
            self._pass = AttentionPass(self, plan, self.backend.plan(plan, self.dtype))
        except BaseException:
            self.table.abort()
            raise

    def _forward_plan(self, need: ForwardNeed) -> ForwardPlan:
        counts, pasts = np.array(need.counts, dtype=np.int64), np.array(need.lengths, dtype=np.int64)
        starts = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        tables = tuple(self.table.get(seq_id).tables[0].pages for seq_id in need.seq_ids)
        positions = np.arange(starts[-1]) + np.repeat(pasts - starts[:-1], counts)
        if (counts == 1).all():
            last = np.fromiter((table[-1] for table in tables), dtype=np.int64, count=len(tables))
            slots = last * self.page_size + pasts % self.page_size
        else:
            slots = np.concatenate(
                [
                    slots_of(table, past, past + count, self.page_size)
                    for table, past, count in zip(tables, need.lengths, need.counts, strict=True)
                ]
            )
        return ForwardPlan(
            page_size=self.page_size,
            counts=counts,
            pasts=pasts,
            starts=starts,
            tables=tables,
            positions_T=torch.from_numpy(positions).to(self.device),
            slots_T=torch.from_numpy(slots).to(self.device),
            max_position=int((pasts + counts).max()) - 1,
            device=self.device,
        )

    def open_pass(self) -> AttentionPass:
        """The open forward; ``FailedPrecondition`` if there is none."""
        if self._pass is None:
            raise FailedPrecondition("no forward is open; call begin_forward first")
        return self._pass

    def is_open(self, pass_: AttentionPass) -> bool:
        """Whether ``pass_`` is the open forward."""
        return self._pass is pass_

    def end_forward(self, *, skipped: Iterable[int] = ()) -> None:
        """Publish. Every layer must have been written, or be named in ``skipped``: its rows read as zeros."""
        skipped = set(skipped)
        for layer_id in skipped:
            self.spec(layer_id)
        opened = self.open_pass()
        layers = range(self.first_layer, self.first_layer + len(self.specs))
        missing = [layer for layer in layers if layer not in opened.written and layer not in skipped]
        if missing:
            raise FailedPrecondition(
                f"end_forward: layers {missing} were not written; run them, or name them in skipped=, or call abort_forward"
            )
        for layer_id in skipped:
            if layer_id not in opened.written:
                rows = self.storage.layers[layer_id - self.first_layer]
                rows.k.index_fill_(0, opened.plan.slots_T, 0.0)
                rows.v.index_fill_(0, opened.plan.slots_T, 0.0)
        self.table.publish()
        self._pass = None

    def abort_forward(self) -> None:
        """Lengths and pages as before ``begin_forward``."""
        self.table.abort()
        self._pass = None

    def get_query_positions(self, *, relative: bool = False) -> Tensor:
        """int32 ``[T]``: position of each new token. Without windows relative positions are the true ones."""
        del relative
        return self.open_pass().positions_T

    def attention_with_fused_qkv(
        self,
        layer_id: int,
        qkv: Tensor,
        *,
        sm_scale: float | None = None,
        mask: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Rotate, store, attend. ``qkv [N, Hq + 2 * Hkv, D]`` if Dk = Dv, or flat; returns ``[N, Hq, Dv]``."""
        spec = self.spec(layer_id)
        tokens = self._pass.plan.num_tokens if self._pass else 0
        columns = (spec.num_heads + spec.num_kv_heads) * spec.head_dim + spec.num_kv_heads * spec.value_dim
        flat = qkv
        if qkv.dim() == 3 and spec.head_dim == spec.value_dim and qkv.shape[2] == spec.head_dim:
            flat = qkv.flatten(1)
        if flat.dim() != 2 or flat.shape[1] != columns or flat.shape[0] < tokens:
            raise InvalidArgument(
                f"qkv of layer {layer_id} has shape {tuple(qkv.shape)}; at least {tokens} rows of {columns} columns are needed"
            )
        if flat.dtype != self.dtype or flat.device.type != self.device.type:
            raise InvalidArgument(f"qkv is {flat.dtype} on {flat.device}; {self.dtype} on {self.device} is needed")
        shape = (flat.shape[0], spec.num_heads, spec.value_dim)
        if out is not None:
            check_out(out, shape, self.dtype, qkv)
        if mask is not None:
            refuse("mask")
        result = self.open_pass().attend_qkv(layer_id, flat[:tokens], sm_scale)
        if out is not None:
            out[:tokens] = result
            return out
        if flat.shape[0] > tokens:
            result = torch.cat((result, result.new_zeros(flat.shape[0] - tokens, *shape[1:])))
        return result

    # -- reading and writing rows ----------------------------------------------------------------------------

    def debug_get_kv(
        self,
        seq_id: SeqId,
        start: int = 0,
        end: int | None = None,
        *,
        layer: int | None = None,
        relative: bool = False,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rows ``start..end - 1`` as stored: K ``[L, n, Hkv, Dk]``, V ``[L, n, Hkv, Dv]``; without L for one ``layer``."""
        del relative  # nothing is evicted, so both addressings agree
        layers = self._layers(layer)
        start = check_integer(start, "debug_get_kv: start", 0)
        end = None if end is None else check_integer(end, "debug_get_kv: end", start)
        if out is not None and len(out) != 2:
            raise InvalidArgument(f"debug_get_kv: out has {len(out)} tensors; a pair for K and V is needed")
        length = self.table.get(seq_id).length
        end = length if end is None else end
        if not 0 <= start <= end <= length:
            raise InvalidArgument(
                f"debug_get_kv: rows {start}..{end} of sequence {seq_id}; 0 <= start <= end <= {length} is needed"
            )
        self.table.require_ready(seq_id, self.table.get(seq_id), "debug_get_kv")
        slots = self.table.slots(0, seq_id, start, end)
        rows = [self.storage.read(index, slots) for index in layers]
        k = rows[0].k if layer is not None else torch.stack([row.k for row in rows])
        v = rows[0].v if layer is not None else torch.stack([row.v for row in rows])
        if out is None:
            return k, v
        for given, value in zip(out, (k, v), strict=True):
            check_out(given, tuple(value.shape), self.dtype, value)
        out[0].copy_(k)
        out[1].copy_(v)
        return out

    def debug_set_kv(
        self, seq_id: SeqId, start: int, k: Tensor, v: Tensor | None = None, *, layer: int | None = None
    ) -> None:
        """Overwrite rows from ``start`` on; shared pages are split first, so no other sequence changes."""
        layers = self._layers(layer)
        start = check_integer(start, "debug_set_kv: start", 0)
        if v is None:
            raise InvalidArgument("debug_set_kv: v is missing; layers of full attention have K and V")
        spec = self.specs[layers[0]]
        count = k.shape[-3] if k.dim() >= 3 else -1
        lead = () if layer is not None else (len(layers),)
        for name, given, dim in (("k", k, spec.head_dim), ("v", v, spec.value_dim)):
            wanted = (*lead, count, spec.num_kv_heads, dim)
            if tuple(given.shape) != wanted or given.dtype != self.dtype:
                raise InvalidArgument(
                    f"debug_set_kv: {name} is {given.dtype} {tuple(given.shape)}; {self.dtype} {wanted} with the same number of rows is needed"
                )
        length = self.table.get(seq_id).length
        if start + count > length:
            raise InvalidArgument(
                f"debug_set_kv: rows {start}..{start + count} of sequence {seq_id}, whose length is {length}"
            )
        self.table.require_closed("debug_set_kv")
        self.table.require_ready(seq_id, self.table.get(seq_id), "debug_set_kv")
        self.storage.copy(self.table.own_pages(seq_id, start, start + count)[0])
        slots = torch.from_numpy(self.table.slots(0, seq_id, start, start + count)).to(self.device)
        for row, index in enumerate(layers):
            new_k, new_v = (k, v) if layer is not None else (k[row], v[row])
            self.storage.write(index, slots, new_k.to(self.device), new_v.to(self.device))

    def _layers(self, layer: int | None) -> list[int]:
        if layer is not None:
            self.spec(layer)
            return [layer - self.first_layer]
        first = self.specs[0]
        geometry = (first.num_kv_heads, first.head_dim, first.value_dim)
        if any((spec.num_kv_heads, spec.head_dim, spec.value_dim) != geometry for spec in self.specs):
            raise InvalidArgument("the layers differ in geometry; name one with layer=")
        return list(range(len(self.specs)))

    def spec(self, layer_id: int) -> FullAttention:
        """What the layer is; ``InvalidArgument`` outside of this state's layers."""
        index = layer_id - self.first_layer
        if not 0 <= index < len(self.specs):
            raise InvalidArgument(
                f"layer {layer_id}; this state has layers {self.first_layer}..{self.first_layer + len(self.specs) - 1}"
            )
        return self.specs[index]

    def rotary_table(self, spec: RopeSpec) -> RotaryTable:
        """The table of one set of frequencies, shared by all layers that use it."""
        table = self._rotary.get(spec)
        if table is None:
            table = self._rotary[spec] = RotaryTable(spec, self.device)
        return table

    # -- export and import -----------------------------------------------------------------------------------

    def get_layout_hash(self) -> str:
        return exchange.layout_hash(self)

    def get_checkpoint_metadata(self, seq_id: SeqId) -> dict[str, Any]:
        return exchange.metadata(self, seq_id)

    def export_page_group(self, seq_id: SeqId, group: int, out: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        return exchange.export_group(self, seq_id, group, out)

    def prepare_import(self, seq_id: SeqId, metadata: dict[str, Any]) -> None:
        exchange.prepare(self, seq_id, metadata)

    def import_page_group(self, seq_id: SeqId, group: int, tensors: dict[str, Tensor]) -> None:
        exchange.import_group(self, seq_id, group, tensors)

    def finish_import(self, seq_id: SeqId) -> None:
        exchange.finish(self, seq_id)


def has_tree(parents: Sequence[int] | Sequence[Sequence[int] | None], counts: Sequence[int]) -> bool:
    """Whether any entry has a token tree; ``InvalidArgument`` for what is neither a list per entry nor T parents."""
    if len(parents) > 0 and all(isinstance(parent, (int, np.integer)) for parent in parents):
        if len(parents) != sum(counts):
            raise InvalidArgument(f"token_tree_parents: {len(parents)} parents for {sum(counts)} new tokens")
        flat = [int(parent) for parent in parents]  # type: ignore[arg-type]
        ends = np.cumsum(counts).tolist()
        entries: list[list[int] | None] = [flat[end - count : end] for end, count in zip(ends, counts, strict=True)]
    else:
        entries = [None if entry is None else list(entry) for entry in parents]  # type: ignore[arg-type]
        if len(entries) != len(counts):
            raise InvalidArgument(f"token_tree_parents: {len(entries)} items for {len(counts)} entries; give one each")
    for entry, count in zip(entries, counts, strict=True):
        if entry is None:
            continue
        if len(entry) != count:
            raise InvalidArgument(f"token_tree_parents: {len(entry)} parents for an append length of {count}")
        for node, parent in enumerate(entry):
            if not -1 <= parent < node:
                raise InvalidArgument(
                    f"token_tree_parents: node {node} has parent {parent}; -1 <= parent < {node} is needed"
                )
    return any(entry is not None for entry in entries)


def check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, source: Tensor) -> None:
    """``InvalidArgument`` unless ``out`` can take a result of this shape and type."""
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != source.device:
        raise InvalidArgument(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}; {dtype} {shape} on {source.device} is needed"
        )
    (low, high), (first, last) = address_range(out), address_range(source)
    if max(low, first) < min(high, last):
        raise InvalidArgument("out shares memory with an input; give a tensor of its own")


def address_range(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor and one past its last; the range is empty for a tensor without elements."""
    first = tensor.data_ptr()
    if tensor.numel() == 0:
        return first, first
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.element_size()
