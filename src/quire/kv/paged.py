"""``PagedKVState``: what attention keeps in pages: K and V of full and windowed layers and rows of latent ones, of every
token; K and V of an encoder of cross layers.

It ties the bookkeeping (``sequences``), the rows (``storage``) and an attention backend together, and is what the KV
state contract promises: every call is checked completely, then it changes. What a forward computes is in ``passes``
and ``verbs``, reading and writing rows in ``rows``, encoders in ``cross``.

Letters: L layers; B entries of the batch; T new tokens; Hq, Hkv heads; Dk, Dv head sizes; P page size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.contracts.attention import AttentionBackend, Scoring
from quire.contracts.layers import CrossAttention, LatentAttention, LayerSpec, RopeSpec, sink_refusal, window_refusal
from quire.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.interrupts import uninterrupted_verbs
from quire.kv import cross, exchange, rows
from quire.kv.layer_classes import LayerClass, describe_ids, ids_of, supported
from quire.kv.need import ForwardNeed, pages_for
from quire.kv.pages import PagePool
from quire.kv.passes import AttentionPass, Layer
from quire.kv.recurrent import RecurrentPart
from quire.kv.rules import RefusedVerbs, refuse, refuse_layer
from quire.kv.sequences import SequenceTable, check_integer
from quire.kv.storage import PagedSpec, PagedStorage, StoredSpec
from quire.kv.trees import TokenTreeParents
from quire.kv.verbs import CHANGES, AttentionVerbs
from quire.kv.windows import Eviction, Window
from quire.ops.attention import ReferenceAttention
from quire.ops.rope import RotaryTable
from quire.signatures import checks_arguments
from quire.types import SeqId


@checks_arguments(but=("layer", "spec", "is_open", "rotary_table"))  # which a forward calls for each layer
@uninterrupted_verbs(*CHANGES)
class PagedKVState(AttentionVerbs, RefusedVerbs):
    """The KV state of a model whose layers are of full, windowed, latent or cross attention.

    Layers that keep the same positions form a *layer class* with a pool of its own: those of one window, and all without,
    latent ones among them. ``capacity``: tokens that the pool of each class holds, rounded up to whole pages; ``window_capacity``:
    the same for classes with a window, which need less (None: as many). ``cross_capacity``: rows of encoders over all sequences that
    the pool of cross layers holds; needed if and only if there are such layers. ``first_layer``: the global id of ``specs[0]`` (a pipeline
    stage owns a range); ``layer_ids``: those of all ``specs``, ascending, where they are not a range. ``allow_empty``: there may be
    no layers, for a state that keeps sequences of a model without attention. ``backend``: what computes attention; None: the
    reference, which is exact and slow (``quire.kernels.sdpa.SdpaAttention`` is fast). Raises ``Unsupported`` for a layer
    that it does not have, and ``ResourceExhausted`` if the pools do not fit in memory. One thread at a time.
    """

    recurrent: RecurrentPart | None = None
    """The states of recurrent layers, which a ``HybridState`` has."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        *,
        capacity: int,
        window_capacity: int | None = None,
        cross_capacity: int | None = None,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        backend: AttentionBackend | None = None,
        first_layer: int = 0,
        layer_ids: Sequence[int] | None = None,
        allow_empty: bool = False,
    ) -> None:
        backend = ReferenceAttention() if backend is None else backend
        if page_size < 1:
            raise InvalidArgument(f"page_size {page_size}; at least 1 is needed")
        for name, tokens in (("capacity", capacity), ("window_capacity", window_capacity)):
            if tokens is not None and tokens < 1:
                raise InvalidArgument(f"{name} {tokens} tokens; at least 1 is needed")
        if cross_capacity is not None and cross_capacity < 1:
            raise InvalidArgument(f"cross_capacity {cross_capacity} encoder rows; at least 1 is needed")
        if dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise InvalidArgument(f"KV dtype {dtype}; float32, float16, bfloat16 or float64 are stored")
        self.device = torch.device(device)
        self.stored_specs: dict[int, StoredSpec] = {
            layer_id: supported(layer_id, spec, backend, self.device)
            for layer_id, spec in zip(ids_of(len(specs), first_layer, layer_ids), specs, strict=True)
        }
        """All layers with pages, by global id, ascending."""
        tokens_of = {layer: spec for layer, spec in self.stored_specs.items() if not isinstance(spec, CrossAttention)}
        encoders = {layer: spec for layer, spec in self.stored_specs.items() if isinstance(spec, CrossAttention)}
        self.specs: list[PagedSpec] = list(tokens_of.values())
        """Those that keep rows of tokens."""
        self.layer_ids = tuple(tokens_of)
        """Global ids of ``specs``, ascending."""
        if not self.stored_specs and not allow_empty:
            raise InvalidArgument("a KV state needs at least one layer")
        if encoders and cross_capacity is None:
            raise InvalidArgument(
                f"layers {list(encoders)} are cross layers and cross_capacity is missing; give the encoder rows of all sequences"
            )
        if cross_capacity is not None and not encoders:
            raise InvalidArgument(f"cross_capacity {cross_capacity} encoder rows, and there is no cross layer")
        self.page_size = page_size
        self.dtype = dtype
        self.backend = backend
        self.first_layer = first_layer
        self._pages_of_tokens = pages_for(capacity, page_size)
        members: dict[int | None, list[int]] = {}
        for index, spec in enumerate(self.specs):
            members.setdefault(spec.layer_window, []).append(index)
        self.classes: list[LayerClass] = []
        pools: list[PagePool] = []
        for window, layers in members.items():
            tokens = capacity if window is None or window_capacity is None else window_capacity
            pools.append(PagePool(pages_for(tokens, page_size)))
            slots = pools[-1].num_pages * page_size
            storage = PagedStorage([self.specs[index] for index in layers], slots, dtype, self.device)
            self.classes.append(LayerClass(window, tuple(layers), storage))
        self.table = SequenceTable(pools, page_size, [one.window for one in self.classes])
        self._layers = {layer_id: self._layer(index) for index, layer_id in enumerate(self.layer_ids)}
        self._rotary: dict[RopeSpec, RotaryTable] = {}
        self.cross: cross.CrossPart | None = None
        """The encoders of cross layers; None: there are no such layers."""
        if cross_capacity is not None:
            self.cross = cross.CrossPart(
                encoders, capacity=cross_capacity, page_size=page_size, dtype=dtype, device=self.device
            )
        self.current_pass: AttentionPass | None = None
        """The open forward."""
        self.imports: dict[SeqId, exchange.Import] = {}

    def _layer(self, index: int) -> Layer:
        spec = self.specs[index]
        which = next(number for number, one in enumerate(self.classes) if index in one.layers)
        place = self.classes[which].layers.index(index)
        stored = self.classes[which].storage.layers[place]
        if isinstance(spec, LatentAttention):
            return Layer(spec, which, place, stored.k, stored.v, Scoring(spec.scale), None)
        sinks_H = torch.tensor(spec.sinks, dtype=torch.float32, device=self.device) if spec.sinks else None
        return Layer(spec, which, place, stored.k, stored.v, Scoring(spec.scale, spec.softcap), sinks_H)

    # -- layers ----------------------------------------------------------------------------------------------

    def layer(self, layer_id: int, verb: str = "append_kv") -> Layer:
        """A layer that keeps rows of tokens. ``InvalidArgument`` for one that is not of this state; ``Unsupported`` for a cross
        layer, with the reason why it has not this verb."""
        found = self._layers.get(layer_id)
        if found is None:
            refuse_layer(verb, layer_id, self.spec(layer_id).kind)
        return found

    def spec(self, layer_id: int) -> StoredSpec:
        """What the layer is; ``InvalidArgument`` outside of this state's layers."""
        found = self.stored_specs.get(layer_id)
        if found is None:
            raise InvalidArgument(f"layer {layer_id}; {describe_ids(list(self.stored_specs))}")
        return found

    def rotary_table(self, spec: RopeSpec) -> RotaryTable:
        """The table of one set of frequencies, shared by all layers that use it."""
        table = self._rotary.get(spec)
        if table is None:
            table = self._rotary[spec] = RotaryTable(spec, self.device)
        return table

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(one.storage.num_bytes for one in self.classes) + (self.cross.storage.num_bytes if self.cross else 0)

    # -- sequences -------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop everything; legal at any time."""
        self.table.clear()
        if self.cross is not None:
            self.cross.table.clear()
        self.current_pass = None
        self.imports.clear()

    def add_sequence(self, seq_id: SeqId) -> None:
        """A new sequence of length 0 that holds no page."""
        self.table.add(seq_id)

    def remove_sequence(self, seq_id: SeqId) -> None:
        """Forget a sequence; pages that nobody else holds are free."""
        self.table.remove(seq_id)
        if self.cross is not None:
            self.cross.table.remove(seq_id)
        self.imports.pop(seq_id, None)

    def fork_sequence(self, parent_id: SeqId, child_id: SeqId, fork_pos: int = -1, *, exact: bool = False) -> int:
        """The child holds the parent's first ``fork_pos`` tokens (-1: all), its window and its encoder rows. Shares pages, copies
        nothing. Returns 0, so that ``exact`` makes no difference. ``FailedPrecondition`` for a position that is not
        ``reachable``."""
        del exact
        self.table.fork(parent_id, child_id, fork_pos)
        if self.cross is not None:
            self.cross.table.fork(parent_id, child_id)
        return 0

    def popn(self, seq_id: SeqId, n: int, *, exact: bool = False) -> int:
        """Take back the last ``n`` tokens. Returns 0: nothing must be run again, so that ``exact`` makes no difference.
        ``FailedPrecondition`` below what a window has evicted."""
        del exact
        self.table.pop(seq_id, n)
        return 0

    def rewind_cost(self, seq_id: SeqId, pos: int) -> int:
        """Tokens that must be run again after a pop or fork to ``pos``: 0. Refuses as those do."""
        pos = check_integer(pos, "rewind_cost: position", 0)
        sequence = self.table.get(seq_id)
        if pos > sequence.length:
            raise InvalidArgument(
                f"rewind_cost: position {pos} of sequence {seq_id} is outside of 0..{sequence.length}"
            )
        self.table.require_ready(seq_id, sequence, "rewind_cost")
        self.table.require_committed(seq_id, sequence, "rewind_cost")
        self.table.require_reachable(seq_id, sequence, pos, "rewind_cost")
        return 0

    def reachable(self, seq_id: SeqId) -> list[range]:
        """Positions that ``popn`` and ``fork_sequence`` can go to, ascending."""
        return self.table.reachable(self.table.get(seq_id))

    def held(self, seq_id: SeqId, layer_id: int) -> list[range]:
        """Positions of which a layer holds rows, ascending; empty ranges are left out."""
        return self.table.held(seq_id, self.layer(layer_id).class_index)

    def nearest_reachable(self, seq_id: SeqId, position: int) -> int:
        """The latest position that can be gone back to and is not behind ``position``."""
        found = self.reachable(seq_id)
        return max((min(position, part.stop - 1) for part in found if part.start <= position), default=0)

    def checkpoints(self, seq_id: SeqId) -> list[int]:
        """Kept recurrent states: none, for there are no recurrent layers."""
        self.table.get(seq_id)
        return []

    def enable_sliding_window_for_seq(
        self, seq_id: SeqId, window: int | None, sink: int = 0, *, eviction: Eviction = "token"
    ) -> None:
        """The sequence keeps its first ``sink`` tokens and the last ``window - sink`` from its next forward on; None: all.

        ``FailedPrecondition`` once something is evicted; ``Unsupported``: a sink, where layers rotate by a rule of their own;
        any window, where there is no layer that it could concern.
        """
        if eviction not in ("token", "forward"):
            raise InvalidArgument(f"eviction {eviction!r}; 'token' or 'forward' are accepted")
        wanted: Window | None = None
        if window is not None:
            size = check_integer(window, "enable_sliding_window_for_seq: window", 1)
            kept = check_integer(sink, "enable_sliding_window_for_seq: sink", 0)
            if kept >= size:
                raise InvalidArgument(f"window {size} with sink {kept}; 0 <= sink < window is needed")
            if kept and (reason := sink_refusal(self.specs)):
                raise Unsupported(f"window {size} with sink {kept}: {reason}")
            wanted = Window(size, kept, eviction)
        elif sink != 0:
            raise InvalidArgument(f"sink {sink} without a window; give a window, or sink=0")
        if not self.specs:
            self.table.get(seq_id)
            raise Unsupported(f"enable_sliding_window_for_seq: {window_refusal(self.stored_specs.values())}")
        self.table.set_window(seq_id, wanted)

    def commit_accepted_token_tree_nodes(self, seq_ids: Sequence[SeqId], leaf_indices: Sequence[int]) -> None:
        """Keep, for each sequence, the path from a root to the given node (-1: nothing), forget all other nodes."""
        kept = self.table.check_commit(seq_ids, leaf_indices)
        for one, copies in zip(self.classes, self.table.commit(kept), strict=True):
            one.storage.copy(copies)

    # -- queries ---------------------------------------------------------------------------------------------

    def empty(self) -> bool:
        return len(self.table) == 0 and all(pool.num_used == 0 for pool in self._pools())

    @property
    def forgets(self) -> bool:
        """Whether layers have windows of their own, so that positions behind them cannot be gone back to."""
        return any(one.window is not None for one in self.classes)

    @property
    def endless(self) -> bool:
        """Whether positions may run on for ever behind a window: rotations, of which only differences count, or nothing."""
        return all(spec.rope is not None or spec.rope_mode == "none" for spec in self.specs) and any(
            spec.rope is not None for spec in self.specs
        )

    def _pools(self) -> list[PagePool]:
        """The pools of all classes, that of cross layers last."""
        return self.table.pools if self.cross is None else [*self.table.pools, self.cross.table.pool]

    @property
    def num_pages(self) -> int:
        """Pages of all classes, those of encoder rows among them."""
        return sum(pool.num_pages for pool in self._pools())

    @property
    def num_used_pages(self) -> int:
        """Pages of all classes that somebody holds."""
        return sum(pool.num_used for pool in self._pools())

    def _counting_pools(self) -> list[PagePool]:
        """Pools of the classes that keep all tokens, or of all if none does."""
        keeping = [pool for pool, one in zip(self.table.pools, self.classes, strict=True) if one.window is None]
        return keeping or self.table.pools

    @property
    def capacity(self) -> int | None:
        """Tokens of the longest sequence that fits into the empty pools; None: windows leave none of them a limit."""
        keeping = [
            pool.num_pages for pool, one in zip(self.table.pools, self.classes, strict=True) if one.window is None
        ]
        return min(keeping) * self.page_size if keeping else None

    def largest_step(self, window: int, sink: int) -> int:
        """Tokens of one forward that fit into the empty pools beside a sliding window of a sequence; may be below 1."""
        pages = min((pool.num_pages for pool in self.table.pools), default=0) - pages_for(sink, self.page_size) - 1
        return pages * self.page_size - (window - sink)

    def shortage_in_steps(self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int], most: int) -> int:
        """Pages that these tokens would be short of if they came in forwards of at most ``most`` tokens, so that windows
        slide in between. An upper bound; what one forward is short of ``missing_pages`` says exactly."""
        return self.table.shortage_in_steps(seq_ids, append_lengths, most)

    def num_available_pages(self) -> int:
        """Free pages of the class, among those that keep all tokens, that has the fewest. Pages of encoder rows do not count: where
        there are cross layers only it is the whole ``capacity``, for no token takes a page. 0 without layers."""
        without = 0 if self.cross is None else self._pages_of_tokens
        return min((pool.num_free for pool in self._counting_pools()), default=without)

    def missing_pages(
        self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int], token_tree_parents: TokenTreeParents = None
    ) -> int:
        """Pages that this ``begin_forward`` would be short of, over all classes: copies on write included, pages that
        leave their windows deducted. While a forward is open: as before it."""
        return self.table.shortage(
            self.table.plan_forward(seq_ids, append_lengths, token_tree_parents, verb="missing_pages")
        )

    def sequence_length(self, seq_id: SeqId) -> int:
        return self.table.get(seq_id).length

    def cached_length(self, seq_id: SeqId) -> int:
        sequence = self.table.get(seq_id)
        return sequence.length - sequence.evicted

    def pending_nodes(self, seq_id: SeqId) -> int:
        return self.table.get(seq_id).nodes

    def total_sequence_length(self) -> int:
        sequences = [self.table.get(seq_id) for seq_id in self.table.ids]
        return sum(sequence.stored - sequence.evicted for sequence in sequences)

    def sequence_pages(self, seq_id: SeqId) -> tuple[int, int]:
        """(pages that the sequence holds, those of them that others hold too)"""
        sequence = self.table.get(seq_id)
        held, shared = (0, 0) if self.cross is None else self.cross.table.num_pages(seq_id)
        return sum(table.held.size for table in sequence.tables) + held, self.table.shared_pages(seq_id) + shared

    def pool_sizes(self) -> list[int]:
        """Pages of each class that tokens take."""
        return [pool.num_pages for pool in self.table.pools]

    def pages_held(self, seq_ids: Collection[SeqId], kept: Collection[SeqId] = ()) -> list[int]:
        """Pages of each class that these sequences hold together; what they share counts once. ``kept``: see ``HybridState``."""
        return self.table.pages_held(seq_ids)

    def pages_at_most(self, length: int, window: tuple[int, int] | None, step: int) -> list[int]:
        """Pages of each class that a sequence of ``length`` tokens and with this window (size, sink) holds at most while its tokens
        are run, ``step`` at a time."""
        return self.table.pages_at_most(length, None if window is None else Window(*window), step)

    def num_shared_pages(self) -> int:
        """Pages that more than one sequence holds."""
        shared = 0 if self.cross is None else self.cross.table.num_shared
        return sum(int((pool.references > 1).sum()) for pool in self.table.pools) + shared

    @property
    def num_splits(self) -> int:
        """Shared pages that were copied because one of their owners wrote, since the state was made."""
        return self.table.num_splits + (0 if self.cross is None else self.cross.table.num_splits)

    def check(self) -> None:
        """Recount pages and references; ``QuireError`` names a broken invariant."""
        self.table.check()
        if self.cross is not None:
            self.cross.table.check(self.table.ids)

    # -- forward ---------------------------------------------------------------------------------------------

    def begin_forward(
        self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int], token_tree_parents: TokenTreeParents = None
    ) -> None:
        """Announce ``append_lengths[i]`` new tokens, or nodes, for ``seq_ids[i]``; takes pages and plans the forward."""
        need = self.table.plan_forward(seq_ids, append_lengths, token_tree_parents)
        opened = self.table.open_forward(need)
        try:
            for one, copies, blanks in zip(self.classes, opened.copies, opened.blanks, strict=True):
                one.storage.copy(copies)
                one.storage.blank(blanks)
            self.current_pass = self.make_pass(need)
        except BaseException:
            self.table.abort()
            raise

    def make_pass(self, need: ForwardNeed) -> AttentionPass:
        """What blocks see of the forward that is being opened."""
        return AttentionPass(self, need)

    def open_pass(self) -> AttentionPass:
        """The open forward; ``FailedPrecondition`` if there is none."""
        if self.current_pass is None:
            raise FailedPrecondition("no forward is open; call begin_forward first")
        return self.current_pass

    @property
    def open_tokens(self) -> int:
        """T of the open forward; 0 if there is none."""
        return 0 if self.current_pass is None else self.current_pass.batch.num_tokens

    def is_open(self, pass_: AttentionPass) -> bool:
        """Whether ``pass_`` is the open forward."""
        return self.current_pass is pass_

    def end_forward(self, *, skipped: Iterable[int] = ()) -> None:
        """Publish. Every layer that keeps rows of tokens must have been written, or be named in ``skipped``: its rows read as zeros.
        A cross layer keeps its rows."""
        skipped = set(skipped)
        opened = self.require_written(skipped)
        for layer_id in skipped.intersection(self.layer_ids) - opened.written:
            layer = self.layer(layer_id)
            for stored in (layer.k_SHD, layer.v_SHD):
                stored.index_fill_(0, opened.slots[layer.class_index], 0.0)
        self.table.publish()
        self.current_pass = None

    def require_written(self, skipped: Collection[int]) -> AttentionPass:
        """The open forward, in which every layer has been written or is named in ``skipped``; refuses as ``end_forward``."""
        for layer_id in skipped:
            self.spec(layer_id)
        opened = self.open_pass()
        missing = [layer for layer in self.layer_ids if layer not in opened.written and layer not in skipped]
        if missing:
            raise FailedPrecondition(
                f"end_forward: layers {missing} were not written; run them, or name them in skipped=, or call abort_forward"
            )
        return opened

    def abort_forward(self) -> None:
        """Lengths, trees and pages as before ``begin_forward``. What had left every window stays gone, and encoder rows that were set
        meanwhile stay: they belong to the sequence and not to the forward."""
        self.table.abort()
        self.current_pass = None

    def get_query_positions(self, *, relative: bool = False) -> Tensor:
        """int32 ``[T]``: position of each new token; with ``relative`` less the evicted tokens of its query."""
        opened = self.open_pass()
        return opened.relative_T.to(torch.int32) if relative else opened.positions_T

    # -- encoders --------------------------------------------------------------------------------------------

    def set_cross_kv(self, layer_id: int, seq_id: SeqId, k: Tensor, v: Tensor) -> None:
        if self.cross is None:
            refuse("set_cross_kv")
        cross.put(self, self.cross, layer_id, seq_id, k, v)

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
        """Rows ``start..end - 1`` as stored: K ``[L, n, Hkv, Dk]``, V ``[L, n, Hkv, Dv]``; without L for one ``layer``.
        ``Unsupported`` for a latent layer, and where no layer keeps K and V of tokens.

        With ``layer`` a cross layer, rows of its encoder; ``relative`` makes no difference there. ``FailedPrecondition`` if they are
        not set."""
        if self.cross is not None and layer in self.cross.specs:
            return cross.read(self, self.cross, layer, seq_id, start, end, out)
        self._require_token_rows(seq_id, layer, "debug_get_kv")
        return rows.read(self, seq_id, start, end, layer, relative, out)

    def debug_get_kv_mla(
        self,
        seq_id: SeqId,
        start: int = 0,
        end: int | None = None,
        *,
        layer: int | None = None,
        relative: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """The same of latent layers: ``[L, n, row]``; without L for one ``layer``. ``Unsupported`` for other layers."""
        self._require_token_rows(seq_id, layer, "debug_get_kv_mla")
        return rows.read_latent(self, seq_id, start, end, layer, relative, out)

    def debug_set_kv(
        self, seq_id: SeqId, start: int, k: Tensor, v: Tensor | None = None, *, layer: int | None = None
    ) -> None:
        """Overwrite rows from ``start`` on; shared pages are split first, so no other sequence changes. Of latent layers ``k`` is
        ``[.., n, row]`` and ``v`` None. With ``layer`` a cross layer, rows of its encoder that are set."""
        if self.cross is not None and layer in self.cross.specs:
            cross.overwrite(self, self.cross, layer, seq_id, start, k, v)
            return
        self._require_token_rows(seq_id, layer, "debug_set_kv")
        rows.overwrite(self, seq_id, start, k, v, layer)

    def _require_token_rows(self, seq_id: SeqId, layer: int | None, verb: str) -> None:
        """``Unsupported`` where a verb about rows of tokens meets cross layers only."""
        if self.cross is None or (layer not in self.cross.specs if layer is not None else self.specs):
            return
        self.table.get(seq_id)
        if layer is not None:
            refuse_layer(verb, layer, "cross")
        raise Unsupported(
            f"{verb}: the layers of this state keep rows of encoders and none of tokens; name one with layer="
        )

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
