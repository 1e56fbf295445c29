"""``AdapterPool``: the adapters of one model, on the host and on the device, by id.

All loaded adapters stay on the host. The adapters that forwards use are also in the device's rank
rows, ``rank_capacity`` of them, placed by ``adapters.rank_rows``. Storage is made on demand, and
only for linear maps that a loaded adapter changes. The last unload restores the plain model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from quire.adapters.checks import validate_adapter
from quire.adapters.divided import DividedAdapters
from quire.adapters.low_rank import (
    EmbeddingChange,
    Index,
    LinearWork,
    LowRankEmbedding,
    LowRankLinear,
    RankRows,
    RowPlans,
    Share,
    product_dtype,
)
from quire.adapters.rank_rows import Arrangement, arrange
from quire.base.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, Unsupported
from quire.contracts.adapters import Adapter, LowRankKernel
from quire.nn.embedding import Embedding
from quire.nn.linear import Linear

logger = logging.getLogger("quire.runner")


@dataclass(slots=True, eq=False)
class Loaded:
    """A loaded adapter, and its tensors on the device besides the rank rows."""

    adapter: Adapter
    rank: int
    """The number of its rank rows."""
    head_table: Tensor | None = None
    embedding: EmbeddingChange | None = None


def _own_bytes(held: Loaded) -> int:
    """Return the bytes of an adapter's device tensors that do not share memory with the host's."""
    tensors = [held.head_table]
    if held.embedding is not None:
        tensors += [held.embedding.table_VE, *(factor for _, a, b in held.embedding.factors for factor in (a, b))]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None and tensor.device.type != "cpu")


PlanKey: TypeAlias = tuple[tuple[int | None, ...], tuple[int, ...], tuple[int, ...]]
"""The arguments of ``AdapterPool.activate``."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardWork:
    """The work of the adapter terms in a forward. The next forward reuses it if its key is the same
    and no adapter has moved."""

    key: PlanKey
    rows: int
    linears: list[tuple[LowRankLinear, LinearWork]]
    embeddings: list[tuple[Index, EmbeddingChange]]


class AdapterPool:
    """Adapters of one model, by ids that are never reused. Not thread-safe: callers hold the
    runner's lock."""

    def __init__(
        self,
        linears: Mapping[str, Linear],
        embedding: Embedding | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        rank_capacity: int = 512,
        host_capacity: int | None = None,
        refusal: str = "",
        kernel: LowRankKernel | None = None,
        division: DividedAdapters | None = None,
        absent: Collection[str] = (),
    ) -> None:
        """Make a pool for ``linears``, the maps that adapters may change, by ``Linear.name``.

        "head" is one of them. ``rank_capacity``: largest sum of ranks in one forward.
        ``host_capacity``: largest number of bytes of all loaded adapters on the host; None: no
        limit. ``refusal``: reason to refuse every adapter; empty: adapters can be loaded.
        ``kernel`` computes the products if it runs on such tensors; else PyTorch does.
        ``division`` divides whole adapters among ranks, of which this pool is the first's; None:
        adapters are kept as given. ``absent``: maps that other stages have: changes of them are
        checked, and do nothing here.
        """
        if rank_capacity < 1:
            raise InvalidArgument(f"rank_capacity is {rank_capacity}; expected at least 1")
        self.refusal = refusal
        self.rank_capacity = rank_capacity
        self.host_capacity = host_capacity
        self.guards: list[Callable[[int], str]] = []
        """Functions that return the reason why an adapter must not be unloaded now; empty: it may
        be."""
        self.is_named: Callable[[int], bool] = lambda adapter_id: False
        """Whether users know an adapter by a name."""
        self.loads = 0
        """Number of times that an adapter was written to the device."""
        self.evictions = 0
        """Number of times that an adapter was evicted from the device."""
        self._division = division
        self._linears, self._absent = dict(linears), absent
        self._embedding = embedding
        self._dtype = dtype
        self._device = device
        self._product_dtype = product_dtype(dtype, device)
        self._kernel = None if kernel is None or kernel.refusal(dtype, device) else kernel
        self._held_dtype = self._product_dtype if self._kernel is None else dtype
        """The dtype of the rank rows."""
        self.slowness = ""
        """Reason why products are slower than possible, logged at the first load; empty: none."""
        self._loaded: dict[int, Loaded] = {}
        self._next = 0
        self._first: dict[int, int] = {}
        """The first rank row of each adapter on the device, least recently used first."""
        self._terms: dict[str, LowRankLinear] = {}
        self._embedding_term: LowRankEmbedding | None = None
        self._in_use: frozenset[int] = frozenset()
        self._plan: ForwardWork | None = None

    @classmethod
    def without_sites(cls, refusal: str = "this model cannot run adapters") -> AdapterPool:
        """Return a pool that refuses every adapter."""
        return cls({}, None, dtype=torch.float32, device=torch.device("cpu"), refusal=refusal)

    # -- loaded adapters ---------------------------------------------------------------------------

    def load(self, adapter: Adapter, adapter_id: int | None = None) -> int:
        """Keep an adapter and return its id: ``adapter_id``, or one that was never used.

        ``Unsupported`` (``refusal``; a change of a map that is not among ``linears``),
        ``InvalidArgument`` (shapes, dtype), ``ResourceExhausted`` (rank above ``rank_capacity``,
        host or device memory). Nothing is changed then.
        """
        if self.refusal:
            raise Unsupported(self.refusal)
        adapter, *others = (adapter,) if self._division is None else self._division.parts(adapter)
        validate_adapter(adapter, self._linears, self._embedding, self._dtype)
        rank = max((update.rank for update in adapter.updates if update.linear != "embed"), default=0)
        self.admit(rank, adapter.nbytes)
        if self.slowness:
            logger.warning("adapters run on PyTorch's products, which take longer: %s", self.slowness)
            self.slowness = ""
        # An interrupt may come between any two lines, so undoing a step twice must be harmless.
        adapter_id = self._next if adapter_id is None else adapter_id
        self._next = adapter_id + 1
        try:
            self._loaded[adapter_id] = Loaded(adapter, rank)
            self._enter(adapter_id)
            self._settle([adapter_id], evict=False)
            if self._division is not None:
                self._division.peers.load_adapter(adapter_id, others)
        except BaseException:
            self._forget(adapter_id)
            raise
        return adapter_id

    def admit(self, rank: int, num_bytes: int) -> None:
        """Raise the errors of ``load`` for an adapter of this rank and size, before it is read.
        ``Unsupported`` (``refusal``), ``ResourceExhausted``. Changes nothing."""
        if self.refusal:
            raise Unsupported(self.refusal)
        if rank > self.rank_capacity:
            raise ResourceExhausted(
                f"the adapter's rank is {rank}; the adapters of one forward may have {self.rank_capacity} in all, make "
                "adapter_ranks larger"
            )
        room = None if self.host_capacity is None else self.host_capacity - self.host_bytes
        if room is not None and num_bytes > room:
            raise ResourceExhausted(
                f"the adapter takes {num_bytes} bytes of host memory and {max(room, 0)} are left of {self.host_capacity}; "
                "unload another one or make adapter_memory larger"
            )

    def unload(self, adapter_id: int) -> None:
        """Remove an adapter from host and device. ``NotFound``; ``FailedPrecondition`` if a guard
        gives a reason or an open forward uses it."""
        self.get(adapter_id)
        reasons = [reason for guard in self.guards if (reason := guard(adapter_id))]
        if adapter_id in self._in_use:
            reasons.append("a forward runs with it")
        if reasons:
            raise FailedPrecondition(f"adapter {adapter_id} is in use and cannot be unloaded: {'; '.join(reasons)}")
        self._forget(adapter_id)

    def _forget(self, adapter_id: int) -> None:
        """Remove everything of an adapter, its entry last: an interrupted unload can be
        repeated."""
        self._plan = None
        self._first.pop(adapter_id, None)
        self._leave(adapter_id)
        if self._division is not None:
            self._division.peers.unload_adapter(adapter_id)
        self._loaded.pop(adapter_id, None)

    def get(self, adapter_id: int) -> Adapter:
        """Return an adapter; ``NotFound`` unless it is loaded."""
        if isinstance(adapter_id, bool) or adapter_id not in self._loaded:
            known = f"loaded are {list(self._loaded)}, give one of them or" if self._loaded else "none is, give"
            raise NotFound(f"adapter {adapter_id!r} is not loaded; {known} None, the base model")
        return self._loaded[adapter_id].adapter

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the ids of all loaded adapters, ascending."""
        return tuple(self._loaded)

    def find(self, fingerprint: str) -> int | None:
        """Return the id of a loaded adapter with this fingerprint; None: there is none. Of several
        it is the first that ``is_named`` knows, else the first."""
        same = [one for one, held in self._loaded.items() if held.adapter.fingerprint == fingerprint]
        return min(same, key=lambda one: (not self.is_named(one), one), default=None)

    def fingerprints(self) -> tuple[str, ...]:
        """Return the fingerprints of all loaded adapters, by id; some may be equal."""
        return tuple(held.adapter.fingerprint for held in self._loaded.values())

    @property
    def resident(self) -> tuple[int, ...]:
        """Return the ids of the adapters on the device, ascending."""
        return tuple(sorted(self._first))

    @property
    def host_bytes(self) -> int:
        return sum(held.adapter.nbytes for held in self._loaded.values())

    @property
    def device_bytes(self) -> int:
        """Bytes of all storage on the device, except tensors shared with the host."""
        rows = sum(rows.nbytes for term in self._terms.values() for rows in term.pieces.values())
        return rows + sum(_own_bytes(held) for held in self._loaded.values())

    # -- adapters of a forward ---------------------------------------------------------------------

    def fits(self, adapter_ids: Collection[int]) -> bool:
        """Return True if the sum of the ranks of all these is within ``rank_capacity``."""
        for one in adapter_ids:
            self.get(one)
        return sum(self._loaded[one].rank for one in set(adapter_ids)) <= self.rank_capacity

    def check(self, adapters: Sequence[int | None]) -> None:
        """Raise the errors of ``activate``: ``Unsupported``, ``NotFound``,
        ``ResourceExhausted``."""
        used = [adapter for adapter in adapters if adapter is not None]
        if not used:
            return
        if self.refusal:
            raise Unsupported(self.refusal)
        if not self.fits(used):
            ranks = {one: self._loaded[one].rank for one in sorted(set(used))}
            raise ResourceExhausted(
                f"one forward with adapters of the ranks {ranks}, {sum(ranks.values())} in all; at most {self.rank_capacity} go "
                "together, use fewer or make adapter_ranks larger"
            )

    def activate(self, adapters: Sequence[int | None], counts: Sequence[int], head_counts: Sequence[int]) -> None:
        """Prepare a forward that runs ``counts[i]`` rows under ``adapters[i]``, chunk after chunk.

        Of these, ``head_counts[i]`` rows run through the head. Adapters that are not on the device
        are written to it. Raises the errors of ``check``; ``InvalidArgument``: lists of different
        lengths; ``ResourceExhausted``: the device has no memory.
        """
        self.deactivate()
        if not len(adapters) == len(counts) == len(head_counts):
            raise InvalidArgument(
                f"{len(adapters)} adapters, {len(counts)} counts, {len(head_counts)} counts of the head; give one of each a chunk"
            )
        self.check(adapters)
        used = dict.fromkeys(adapter for adapter in adapters if adapter is not None)
        if not used:
            return
        self._settle(list(used), evict=True)
        for one in used:
            self._first[one] = self._first.pop(one)  # move it to the end: it is the most recently used
        key = (tuple(adapters), tuple(counts), tuple(head_counts))
        if self._plan is None or self._plan.key != key:
            with torch.inference_mode(False), torch.no_grad():
                self._plan = self._work(key)
        self._in_use = frozenset(used)
        for term, work in self._plan.linears:
            term.work = work
        if self._embedding_term is not None:
            self._embedding_term.rows, self._embedding_term.work = self._plan.rows, self._plan.embeddings

    def deactivate(self) -> None:
        """End the forward; afterwards the model computes the base model's results."""
        if not self._in_use:
            return
        for term in self._terms.values():
            term.work = None
        if self._embedding_term is not None:
            self._embedding_term.work = []
        self._in_use = frozenset()  # last: after an interrupt, the next call repeats the work

    # -- plans -------------------------------------------------------------------------------------

    def _work(self, key: PlanKey) -> ForwardWork:
        """Return the work of all linear maps and the embedding in a forward. Its adapters are on
        the device."""
        adapters, counts, head_counts = key
        body, head = (self._row_plans(adapters, one) for one in (counts, head_counts))
        work = ForwardWork(key, body.rows, [], [])
        for name, term in self._terms.items():
            plans = head if name == "head" else body
            mine = LinearWork(plans.rows)
            for adapter in sorted(plans.used & term.tables):
                table = self._loaded[adapter].head_table
                assert table is not None, "what is used is on the device"
                mine.tables.append((plans.index_of(adapter), table))
            together: dict[frozenset[int], list[RankRows]] = {}
            for rows in term.pieces.values():
                if owners := plans.used.intersection(rows.updates):
                    together.setdefault(owners, []).append(rows)
            for owners, pieces in together.items():
                tasks, calls = plans.work_of(owners, pieces)
                mine.tasks += tasks
                mine.calls += calls
            if mine.tasks or mine.calls or mine.tables:
                work.linears.append((term, mine))
        for adapter in sorted(body.used):
            if (change := self._loaded[adapter].embedding) is not None:
                work.embeddings.append((body.index_of(adapter), change))
        return work

    def _row_plans(self, adapters: Sequence[int | None], counts: Sequence[int]) -> RowPlans:
        shares: dict[int, list[Share]] = {}
        begin = 0
        for adapter, count in zip(adapters, counts, strict=True):
            if adapter is not None and count:
                mine = Share(self._first[adapter], self._loaded[adapter].rank, begin, begin + count)
                shares.setdefault(adapter, []).append(mine)
            begin += count
        return RowPlans(shares, begin, self._device, self._kernel)

    # -- memory ------------------------------------------------------------------------------------

    def _settle(self, wanted: Sequence[int], *, evict: bool) -> None:
        """Write adapters to the device; without ``evict`` only if all others keep their places."""
        if all(one in self._first for one in wanted):
            return
        ranks = {one: held.rank for one, held in self._loaded.items()}
        arrangement = arrange(self._first, ranks, wanted, self.rank_capacity, evict=evict)
        if arrangement is None:
            return
        try:
            self._move(arrangement)
        except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
            idle = [one for one in self._first if one not in wanted and _own_bytes(self._loaded[one])]
            if not (evict and idle):
                raise ResourceExhausted(
                    f"adapters {list(wanted)} do not go into the device's memory: {error}"
                ) from error
            for one in idle:  # frees the tables of idle adapters
                self._give_up(one)
            self._settle(wanted, evict=True)

    def _move(self, arrangement: Arrangement) -> None:
        """Allocate the storage of an arrangement, then switch to it."""
        enlarged: list[tuple[RankRows, tuple[Tensor, Tensor]]] = []
        with torch.inference_mode(False), torch.no_grad():
            for rows in self._all_rows():
                ends = [
                    arrangement.first[one] + self._loaded[one].rank for one in rows.updates if one in arrangement.first
                ]
                if ends and (need := max(ends)) > rows.capacity:
                    enlarged.append((rows, rows.enlarged(min(self.rank_capacity, max(need, 2 * rows.capacity)))))
            brought = {one: self._brought(self._loaded[one].adapter) for one in arrangement.written}
            for rows, (a_SI, b_SO) in enlarged:
                rows.a_SI, rows.b_SO = a_SI, b_SO
            self._plan = None
            for one in [one for one in self._first if one not in arrangement.first]:
                self._give_up(one)
            for one in arrangement.written:
                self._first.pop(one, None)
            for one, (head_table, embedding) in brought.items():
                held, first = self._loaded[one], arrangement.first[one]
                held.head_table, held.embedding = head_table, embedding
                for rows in self._all_rows():
                    if one in rows.updates:
                        rows.write(one, first, held.rank)
                self._first[one] = first
                self.loads += 1

    def _give_up(self, adapter_id: int) -> None:
        del self._first[adapter_id]
        held = self._loaded[adapter_id]
        held.head_table = held.embedding = None
        self.evictions += 1
        self._plan = None

    def _brought(self, adapter: Adapter) -> tuple[Tensor | None, EmbeddingChange | None]:
        """Return the head's table and the change of the embedding, copied to the device."""
        tables = {name: table.to(self._device) for name, table in adapter.tables.items()}
        factors = tuple(
            (update.row, update.a_RI.to(self._device), update.b_RO.to(self._device))
            for update in adapter.updates
            if update.linear == "embed"
        )
        change = EmbeddingChange(tables.get("embed"), factors) if factors or "embed" in tables else None
        return tables.get("head"), change

    def _all_rows(self) -> Iterator[RankRows]:
        return (rows for term in self._terms.values() for rows in term.pieces.values())

    # -- the model's terms -------------------------------------------------------------------------

    def _enter(self, adapter_id: int) -> None:
        """Add terms to the maps that the adapter changes."""
        adapter = self._loaded[adapter_id].adapter
        if "embed" in adapter.tables or any(update.linear == "embed" for update in adapter.updates):
            assert self._embedding is not None, "validated"
            if self._embedding_term is None:
                self._embedding_term = self._embedding.low_rank = LowRankEmbedding(self._product_dtype)
            self._embedding_term.adapters.add(adapter_id)
        if "head" in adapter.tables and "head" not in self._absent:
            self._term("head").tables.add(adapter_id)
        for update in adapter.updates:
            if update.linear != "embed" and update.linear not in self._absent:
                pieces = self._term(update.linear).pieces
                inputs, outputs = update.a_RI.shape[1], update.b_RO.shape[1]
                place = (update.row, outputs)
                if place not in pieces:
                    pieces[place] = RankRows(update.row, inputs, outputs, self._held_dtype, self._device)
                pieces[place].updates[adapter_id] = update

    def _term(self, name: str) -> LowRankLinear:
        if name not in self._terms:
            linear = self._linears[name]
            self._terms[name] = linear.low_rank = LowRankLinear(self._product_dtype, linear.bias)
        return self._terms[name]

    def _leave(self, adapter_id: int) -> None:
        """Remove terms and storage that no other loaded adapter uses."""
        if (embedding := self._embedding_term) is not None:
            embedding.adapters.discard(adapter_id)
            if not embedding.adapters and self._embedding is not None:
                self._embedding_term = self._embedding.low_rank = None
        for name, term in list(self._terms.items()):
            term.tables.discard(adapter_id)
            for place, rows in list(term.pieces.items()):
                rows.updates.pop(adapter_id, None)
                if not rows.updates:
                    del term.pieces[place]
            if term.unused:
                del self._terms[name]
                self._linears[name].low_rank = None
