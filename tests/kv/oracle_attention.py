"""The verbs of the naive KV state that belong to an open forward: what each query sees, key by key,
and what comes out.

Letters: T new tokens; M keys; Hq, Hkv heads; Dk, Dv head sizes; n committed length when the forward
began.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unsupported

from .oracle_forward import Entry, ModelForward, Scope, States, addresses
from .oracle_pages import Pages, Table
from .oracle_refusals import Faults, raise_first
from .oracle_values import Exact, Float, Row, Spec, rotated, scores_of, softmax_state, state_bounds, turned
from .oracle_windows import Part, seen

if TYPE_CHECKING:
    from .oracle import LayerClass, ModelSequence, Parents


class ForwardVerbs:
    """The bracket and what is legal in it. Mixed into ``Oracle``, which has the sequences."""

    if TYPE_CHECKING:
        specs: list[Spec]
        dtype: torch.dtype
        classes: list[LayerClass]
        class_of: list[int]
        pools: list[Pages]
        sequences: dict[int, ModelSequence]
        forward: ModelForward | None

        def _faults(
            self,
            *,
            needs: Iterable[int] = (),
            new: Iterable[int] = (),
            ready: bool = True,
            closed: bool = True,
            loading: bool = False,
        ) -> Faults: ...
        def pending_layers(self, seq_id: int) -> list[int]: ...
        def _pending(self, seq_id: int) -> bool: ...
        def _release(
            self, pools: list[Pages], tables: list[Table], absent: list[set[int]], sequence: ModelSequence
        ) -> None: ...
        def _take(
            self, pools: list[Pages], tables: dict[int, list[Table]], ids: Sequence[int], counts: Sequence[int]
        ) -> None: ...
        def _tables(self) -> dict[int, list[Table]]: ...
        def missing(self, ids: Sequence[int], counts: Sequence[int]) -> int: ...
        def held(self, seq_id: int, index: int, address: int) -> bool: ...

    # -- the bracket -------------------------------------------------------------------------------

    def _batch_faults(
        self, ids: Sequence[int], counts: Sequence[int], parents: Parents, *, closed: bool = True
    ) -> tuple[Faults, list[list[int] | None]]:
        """Everything but the room, and the parents by entry."""
        faults = self._faults(needs=ids, closed=closed, loading=True)
        trees: list[list[int] | None] = [None] * len(ids)
        if len(ids) != len(counts) or not ids or len(set(ids)) != len(ids) or any(count < 1 for count in counts):
            return faults | {InvalidArgument}, trees
        if parents is not None:
            flat = [parent for parent in parents if isinstance(parent, int)]
            if flat and len(flat) == len(parents) == sum(counts):
                rest = list(flat)
                trees = [[rest.pop(0) for _ in range(count)] for count in counts]
            elif not flat and len(parents) == len(ids):
                trees = [None if one is None else list(one) for one in parents]  # type: ignore[arg-type]
            else:
                faults.add(InvalidArgument)
        for seq_id, count, tree in zip(ids, counts, trees, strict=True):
            if tree is None:
                if self._pending(seq_id):
                    faults.add(FailedPrecondition)
                continue
            first = self.sequences[seq_id].nodes if seq_id in self.sequences else 0
            if len(tree) != count or any(not -1 <= parent < first + j for j, parent in enumerate(tree)):
                faults.add(InvalidArgument)
        return faults, trees

    def missing_pages(self, ids: Sequence[int], counts: Sequence[int], parents: Parents = None) -> int:
        faults, _ = self._batch_faults(ids, counts, parents, closed=False)
        raise_first(faults)
        return self.missing(ids, counts)

    def begin_forward(self, ids: Sequence[int], counts: Sequence[int], parents: Parents = None) -> None:
        faults, trees = self._batch_faults(ids, counts, parents)
        if not faults and self.missing(ids, counts):
            faults.add(ResourceExhausted)
        raise_first(faults)
        for seq_id in ids:
            sequence = self.sequences[seq_id]
            self._release(self.pools, sequence.tables, sequence.absent, sequence)
        before = self._tables(), [pool.copy() for pool in self.pools]
        self._take(self.pools, {seq_id: self.sequences[seq_id].tables for seq_id in ids}, ids, counts)
        entries: list[Entry] = []
        start = 0
        for seq_id, count, tree in zip(ids, counts, trees, strict=True):
            found = self.sequences[seq_id]
            nodes = None if tree is None else found.parents + tree
            entries.append(Entry(seq_id, found.length, found.stored, count, nodes, found.window, start))
            start += count
        self.forward = ModelForward(entries, before)

    def end_forward(self, skipped: Iterable[int] = ()) -> None:
        left_out = set(skipped)
        faults: Faults = set()
        if any(not 0 <= layer < len(self.specs) for layer in left_out):
            faults.add(InvalidArgument)
        if self.forward is None or set(range(len(self.specs))) - set(self.forward.written) - left_out:
            faults.add(FailedPrecondition)
        raise_first(faults)
        assert self.forward is not None
        for layer, spec in enumerate(self.specs):
            zero = (
                torch.zeros(spec.num_kv_heads, spec.head_dim, dtype=self.dtype),
                torch.zeros(spec.num_kv_heads, spec.value_dim, dtype=self.dtype),
            )
            written = self.forward.written.get(layer) or [[zero] * count for count in self.forward.counts]
            for entry, rows in zip(self.forward.entries, written, strict=True):
                self.sequences[entry.seq_id].rows[layer].extend(rows)
        for entry in self.forward.entries:
            sequence = self.sequences[entry.seq_id]
            sequence.slid = sequence.window is not None
            if entry.parents is None:
                sequence.length += entry.count
            else:
                sequence.parents = entry.parents
        self.forward = None

    def abort_forward(self) -> None:
        if self.forward is None:
            raise FailedPrecondition("the oracle refuses")
        tables, self.pools = self.forward.before
        for seq_id, before in tables.items():
            self.sequences[seq_id].tables = before
        self.forward = None

    def open_forward(self) -> ModelForward:
        if self.forward is None:
            raise FailedPrecondition("the oracle refuses")
        return self.forward

    def reach(self, layer: int) -> None:
        """Refuse a layer of which an import has not brought all."""
        if any(layer in self.pending_layers(seq_id) for seq_id in self.open_forward().ids):
            raise FailedPrecondition("the oracle refuses")

    def positions(self, relative: bool = False) -> list[int]:
        found = []
        for entry in self.open_forward().entries:
            for address in range(entry.old, entry.end):
                q = entry.position(address)
                found.append(q - entry.window.evicted(q, entry.n) if relative and entry.window else q)
        return found

    # -- what is seen ------------------------------------------------------------------------------

    def _views(self, index: int, scope: Scope) -> list[list[tuple[int, Part]]]:
        """For each new token, in a layer class: the addresses that it sees without a mask."""
        forward = self.open_forward()
        key = index, scope
        if key not in forward.views:
            forward.views[key] = [
                self._seen(entry, index, query, (a for a in addresses(entry, scope) if entry.precedes(a, query)))
                for entry in forward.entries
                for query in range(entry.old, entry.end)
            ]
        return forward.views[key]

    def _seen(self, entry: Entry, index: int, query: int, addresses: Iterable[int]) -> list[tuple[int, Part]]:
        found: list[tuple[int, Part]] = []
        for address in addresses:
            part = seen(
                entry.position(query), entry.position(address), entry.n, entry.window, self.classes[index].window
            )
            if part:
                assert address >= entry.old or self.held(entry.seq_id, index, address), (
                    f"sequence {entry.seq_id} sees position {address}, which it has given up"
                )
                found.append((address, part))
        return found

    def _masked(self, index: int, mask: Tensor, scope: Scope) -> list[list[tuple[int, Part]]]:
        """The same under a mask, which takes the place of the order: flat, entry by entry, row by
        row.
        """
        values = iter(mask.tolist())
        return [
            self._seen(entry, index, query, [a for a in addresses(entry, scope) if next(values)])
            for entry in self.open_forward().entries
            for query in range(entry.old, entry.end)
        ]

    def mask_size(self, scope: Scope = "all") -> int:
        return sum(len(addresses(entry, scope)) * entry.count for entry in self.open_forward().entries)

    # -- attention ---------------------------------------------------------------------------------

    def _attend(
        self,
        layer: int,
        q_THD: Tensor,
        views: list[list[tuple[int, Part]]],
        new: Sequence[Sequence[Row]],
        scale: float | None,
        sinks: Sequence[float] = (),
        *,
        past: bool = True,
    ) -> States:
        """Each query over what it sees.

        ``new``: rows of the new tokens by entry, as they would be stored; ``past``: whether stored
        rows are read at all.
        """
        spec = self.specs[layer]
        scale = spec.scale if scale is None else scale
        value_dim = new[0][0][1].shape[-1]
        found: list[Exact | None] = []
        for number, (entry, rows) in enumerate(zip(self.open_forward().entries, new, strict=True)):
            held = [a for a in range(entry.old) if past and self.held(entry.seq_id, self.class_of[layer], a)]
            stored = self.sequences[entry.seq_id].rows[layer]
            own = views[entry.start : entry.start + entry.count]
            keys = [*held, *range(entry.old, entry.end)]
            all_rows = [*(stored[a] for a in held), *rows]
            k_MHD, v_MHD = (torch.stack([row[i] for row in all_rows]).double().numpy() for i in (0, 1))
            finite = bool(np.isfinite(k_MHD).all() and np.isfinite(v_MHD).all())
            # Pages are read whole: rows that this entry wrote in this forward already may reach it
            # (and nobody else).
            mine = self.open_forward().written.get(layer)
            if mine is not None:
                finite &= all(bool(x.isfinite().all()) for row in mine[number] for x in row)
            if spec.rope and spec.rope_mode == "inline":
                k_MHD = turned(k_MHD, [entry.position(a) for a in keys], spec.rope)
            place = {address: i for i, address in enumerate(keys)}
            for row, view in enumerate(own):
                q_HD = q_THD[entry.start + row].double().numpy()
                if not finite or not np.isfinite(q_HD).all():
                    found.append(None)
                    continue
                q = entry.position(entry.old + row)
                e = entry.window.evicted(q, entry.n) if entry.window else 0
                found.append(
                    self._one(spec, q_HD, q, e, [(place[a], part) for a, part in view], k_MHD, v_MHD, scale, sinks)
                )
        return States.of(found, q_THD.shape[1], value_dim)

    def _one(
        self,
        spec: Spec,
        q_HD: Float,
        q: int,
        e: int,
        view: list[tuple[int, Part]],
        k_MHD: Float,
        v_MHD: Float,
        scale: float,
        sinks: Sequence[float],
    ) -> Exact:
        """The sink part is seen from the relative position, the window part from the true one."""
        order = [i for part in ("window", "sink") for i, which in view if which == part]
        cut = sum(which == "window" for _, which in view)
        rope = spec.rope
        if rope is None:
            q_window = q_sink = q_HD
        elif spec.rope_mode == "none":
            q_window, q_sink = q_HD, turned(q_HD[None], [-e], rope)[0]
        else:
            q_window, q_sink = turned(np.stack([q_HD, q_HD]), [q, q - e], rope)
        k, v = k_MHD[order], v_MHD[order]
        scores = np.concatenate(
            [scores_of(q_window, k[:cut], scale, spec.softcap), scores_of(q_sink, k[cut:], scale, spec.softcap)], 1
        )
        out, lse = softmax_state(scores, v, sinks)
        top = np.array([*lse, *sinks])
        bounds = state_bounds(q_HD, k, v, top, scale, spec.softcap is not None, self.dtype)
        return Exact(out, lse, *bounds)

    def _new_rows(self, layer: int, k_THD: Tensor, v_THD: Tensor) -> list[list[Row]]:
        """By entry, rotated as the layer stores them."""
        spec = self.specs[layer]
        turn = spec.rope if spec.rope_mode == "normal" else None
        result = []
        for entry in self.open_forward().entries:
            rows: list[Row] = []
            for j in range(entry.count):
                k, v = k_THD[entry.start + j], v_THD[entry.start + j]
                rows.append((rotated(k, entry.position(entry.old + j), turn).to(k.dtype) if turn else k, v))
            result.append(rows)
        return result

    def attention_with_fused_qkv(
        self,
        layer: int,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        scale: float | None = None,
        mask: Tensor | None = None,
    ) -> States:
        self.reach(layer)
        rows = self._new_rows(layer, k_THD, v_THD)
        index = self.class_of[layer]
        views = self._views(index, "all") if mask is None else self._masked(index, mask, "all")
        result = self._attend(layer, q_THD, views, rows, scale, self.specs[layer].sinks)
        self.open_forward().written[layer] = rows
        return result

    def append_kv(self, layer: int, k_THD: Tensor, v_THD: Tensor) -> None:
        self.reach(layer)
        rows = self._new_rows(layer, k_THD, v_THD)
        self.open_forward().written[layer] = rows

    def self_attention(
        self,
        layer: int,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        scale: float | None = None,
        mask: Tensor | None = None,
    ) -> States:
        """K and V may have another number of heads and other sizes than the layer."""
        index = self.class_of[layer]
        views = self._views(index, "new") if mask is None else self._masked(index, mask, "new")
        return self._attend(layer, q_THD, views, self._new_rows(layer, k_THD, v_THD), scale, past=False)

    def cross_attention(self, layer: int, q_THD: Tensor, scope: Scope = "past", scale: float | None = None) -> States:
        forward = self.open_forward()
        self.reach(layer)
        rows = forward.written.get(layer)
        if rows is None:
            if scope == "all":
                raise FailedPrecondition("the oracle refuses")
            rows = self._no_rows(layer)
        return self._attend(layer, q_THD, self._views(self.class_of[layer], scope), rows, scale)

    def _no_rows(self, layer: int) -> list[list[Row]]:
        """What stands for new tokens where nobody sees them."""
        spec = self.specs[layer]
        row = (
            torch.zeros(spec.num_kv_heads, spec.head_dim, dtype=self.dtype),
            torch.zeros(spec.num_kv_heads, spec.value_dim, dtype=self.dtype),
        )
        return [[row] * count for count in self.open_forward().counts]

    def attention_with_shared_kv(
        self,
        layer: int,
        q_THD: Tensor,
        k_THD: Tensor | None = None,
        v_THD: Tensor | None = None,
        scale: float | None = None,
    ) -> States:
        faults: Faults = set()
        if self.specs[layer].sinks:
            faults.add(Unsupported)
        if self.forward is None or (k_THD is None and layer not in self.forward.written):
            faults.add(FailedPrecondition)
        raise_first(faults)
        self.reach(layer)
        if k_THD is None or v_THD is None:
            rows = self.open_forward().written[layer]
        else:
            rows = self._new_rows(layer, k_THD, v_THD)
        return self._attend(layer, q_THD, self._views(self.class_of[layer], "all"), rows, scale)
