"""``StoredState``: the state of branches outside of the pool, in a store (``docs/store.md``).

State is found by tokens, so no branch owns it there; missing state is computed again.

A branch's objects are the rows of its runs of tokens and the stops on the way. ``save`` copies
state out before the pool evicts it, ``keep`` writes on a thread the objects that durable tiers
lack, ``ask`` and ``bring`` find and load the stored part of a history. The caller holds the
engine's lock.

Letters: T tokens of a history.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from msgspec.structs import replace

from quire.adapters.history import FingerprintRuns
from quire.adapters.keys import is_private
from quire.base.errors import DataLoss, InvalidArgument, ResourceExhausted
from quire.base.metrics import MetricFamily
from quire.base.outputs import Miss
from quire.base.token_history import UNKNOWN, Ids
from quire.base.types import FinishImport, Fork, Import, Remove, SeqId, Step
from quire.branches.branch import Branch
from quire.branches.move_costs import TO_MEMORY, MoveCosts
from quire.branches.object_writer import ObjectWriter, WriteJob
from quire.branches.state_keys import StateKeys
from quire.branches.state_loads import LoadFailed, StateLoad, StateLoader, WholeLoad
from quire.branches.stored_match import Match, Question, find_match
from quire.contracts.kv_state import Export, TensorPlan
from quire.contracts.store import ObjectKey, ObjectKind
from quire.kv.sequencefile import with_groups
from quire.models.fingerprint import ModelIdentity
from quire.runner.local import Runner
from quire.store.commits import StateNames
from quire.store.keys import Chain, StoredPiece
from quire.store.objects import pack, unpack
from quire.store.records import Unfit
from quire.store.stack import Store

logger = logging.getLogger("quire.engine")

Plans: TypeAlias = Mapping[int, Mapping[str, TensorPlan]]
LOOK_SECONDS = 0.25
"""Most seconds that a prompt waits for the tiers to list their objects."""
WHOLE_SECONDS = 2.0
"""Most seconds to wait for the object of a session with a window. Nothing runs meanwhile."""
LEAST = 32
"""Least number of tokens that tiers must have beyond the pool for a load."""


@dataclass(frozen=True, slots=True)
class Brought:
    """The result of ``StoredState.bring``."""

    by_tier: Mapping[str, int] = field(default_factory=dict)
    """Number of tokens by the kind of their tier."""
    miss: Miss = Miss.NONE
    """The reason why none of the ``length`` stored tokens is loaded."""
    length: int = 0


class StoredState:
    """See the module. ``store`` None: nothing is kept outside of the pool."""

    def __init__(self, runner: Runner, store: Store | None = None, identity: ModelIdentity | None = None) -> None:
        """Make a tier; ``identity`` None: keys are for this process only."""
        # Only keys that outlive the process need the digest of the weights.
        self.runner = runner
        self.keys = StateKeys(runner, identity if store is not None and store.is_durable else None)
        self.store = store
        self.costs = MoveCosts()
        self.metrics = self.costs.metrics
        self.least = LEAST
        self.is_worth: Callable[[float, dict[str, int]], bool] = self.costs.is_worth
        self._writer: ObjectWriter | None = None
        self.forks: set[SeqId] = set()
        """The forks that are kept until they are written, or until ``drop_pending_writes`` gives
        them up."""
        self.ahead: dict[SeqId, int] = {}
        """The sequences that were saved ahead of an eviction, with their lengths then. Callers
        write it."""
        self._loader: StateLoader | None = None
        self._loads: dict[SeqId, StateLoad] = {}
        self.open: Collection[SeqId] = self._loads.keys()
        """The sequences with a load that is running, or ended and not yet passed to
        ``finish_load``."""

    def _is_kept(self, branch: Branch) -> bool:
        """Return True if a branch's state may be found by its tokens. A branch that is exact in
        part is not stored; its exact part was stored before it became inexact."""
        return self.store is not None and branch.origin.exact and not branch.modified and not self.keys.layout.refusal

    # -- writing -----------------------------------------------------------------------------------

    def save(self, branch: Branch) -> bool:
        """Copy out the state that a branch is about to lose, if that is worth it and fits. Return
        True if it can be loaded again."""
        if branch.seq is None or self.is_coming(branch.seq) or not self._is_kept(branch):
            return False
        if (branch.tokens.ids[: branch.computed] == UNKNOWN).any():
            return False
        return self._save(branch.seq, self.keys.chain_of(branch, branch.computed), whole=branch.window is not None)

    def save_prefix(
        self, seq: SeqId, ids_T: Ids, runs: FingerprintRuns, salt: Hashable, *, ahead: bool = False
    ) -> bool:
        """As ``save``, for a sequence of the prefix cache. ``ahead``: copy in the background,
        because it may be evicted soon."""
        if self.store is None or self.keys.layout.refusal:
            return False
        return self._save(seq, self.keys.chain(ids_T, runs, salt), again=True, ahead=ahead)

    def _save(self, seq: SeqId, chain: Chain, *, again: bool = False, whole: bool = False, ahead: bool = False) -> bool:
        store, length = self.store, len(chain.ids)
        if store is None or length < self.least:
            return False
        try:
            if not ahead and seq in self.ahead:
                self._bury(cancel=lambda job: job.source == seq)
            started = time.perf_counter()
            wanted = self._missing(seq, chain, again=again, whole=whole)
            if not wanted:
                return True
            nbytes = sum(self.keys.layout.nbytes(one.start, one.stop) for one in wanted)
            tokens = sum(one.stop - one.start for one in wanted) or length
            # Twice the bytes: out to memory and back.
            if not self.is_worth(tokens, {TO_MEMORY: 2 * nbytes}):
                self.metrics.declined.inc()
                return False
            if ahead:
                self._write(seq, chain, wanted, durable=store.memory is None, source=seq, tokens=tokens)
                return True
            for key, make in self._makers(seq, chain, wanted, whole=whole).items():
                if not store.put(key, make(), durable=store.memory is None):
                    return False
            self.costs.moved(TO_MEMORY, nbytes, time.perf_counter() - started)
            self.metrics.saved.inc(tokens)
        except Exception:
            logger.exception("the state of %d tokens could not be kept; it will be computed again", length)
            return False
        return True

    def _write(
        self, seq: SeqId, chain: Chain, wanted: Sequence[StoredPiece], *, whole: bool = False, **job: Any
    ) -> None:
        """Write objects of a sequence on a thread, from a fork. ``job``: fields of ``WriteJob``."""
        assert self.store is not None
        fork = self._fork(seq)
        try:
            objects = [*self._makers(fork, chain, wanted, whole=whole).items()]
        except BaseException:
            self.runner.execute(Step(edits=(Remove(fork),)))
            raise
        self._writer = self._writer or ObjectWriter(self.store)
        self.forks.add(fork)
        self._writer.add(WriteJob(fork, objects, **job))

    def _missing(
        self, seq: SeqId, chain: Chain, *, again: bool = False, whole: bool = False, durable: bool = False
    ) -> list[StoredPiece]:
        """Return the objects of a sequence that no tier is known to have; ``durable``: no durable
        tier."""
        found, store = self.keys.layout.pieces(seq, chain, again=again, whole=whole), self.store
        assert store is not None
        found = [one for one in found if not store.known(one.key)]
        if durable or store.memory is None:
            return found
        there = store.memory.contains_now([one.key for one in found])
        return [one for one, is_there in zip(found, there, strict=True) if not is_there]

    def _makers(
        self, seq: SeqId, chain: Chain, pieces: Sequence[StoredPiece], *, whole: bool
    ) -> dict[ObjectKey, Callable[[], bytes]]:
        """Return functions that serialise each object of a sequence to bytes, safe on any thread
        while the sequence does not change. ``whole``: it has a window, and a single object."""
        export = self.runner.state.open_export(seq)
        if not whole:
            return {one.key: partial(self._pack, chain, one, export) for one in pieces}
        described = self._described(seq)
        return {one.key: partial(self._pack_whole, chain, one, export, *described) for one in pieces}

    def _described(self, seq: SeqId) -> tuple[dict[str, Any], Plans]:
        """Return the import metadata of a sequence with a window, and the plan of its tensors."""
        state = self.runner.state
        sequence = state.get_checkpoint_metadata(seq, checksums=False)
        del sequence["groups"]
        return sequence, state.plan_import(sequence)

    def _pack(self, chain: Chain, piece: StoredPiece, export: Export) -> bytes:
        """Return the bytes of an object of a sequence. Any thread may call."""
        layout, kind = self.keys.layout, piece.key.kind
        n = piece.stop - piece.start or piece.stop
        plan = {layer: layout.plan(kind, n, layer) for layer in layout.layers_of(kind)}
        rows = kind is ObjectKind.ROWS
        tensors = layout.rows(export, piece.start, piece.stop) if rows else layout.stop(export, n)
        return pack(piece.key, self.keys.contents(chain, piece), plan, tensors)

    def _pack_whole(
        self,
        chain: Chain,
        piece: StoredPiece,
        export: Export,
        sequence: Mapping[str, Any],
        plan: Plans,
    ) -> bytes:
        """Return the bytes of the object of a sequence with a window. Any thread may call."""
        return pack(
            piece.key, self.keys.contents(chain, piece), plan, self.keys.layout.whole(export, plan), sequence=sequence
        )

    def keep(self, branch: Branch, *, again: bool = False) -> None:
        """Write a branch's state to durable tiers, if there are any, in the background. ``again``:
        prompts may consist of the same tokens, so that the last one runs again."""
        store, seq = self.store, branch.seq
        if (
            store is None
            or not store.is_durable
            or seq is None
            or branch.computed < self.least
            or not self._is_kept(branch)
        ):
            return
        if branch.origin.private or is_private(branch.salt) or (branch.tokens.ids[: branch.computed] == UNKNOWN).any():
            return
        try:
            self._bury()
            chain = self.keys.chain_of(branch, branch.computed)
            wanted = self._missing(seq, chain, again=again, whole=branch.window is not None, durable=True)
            if not wanted:
                return
            self._write(seq, chain, wanted, whole=branch.window is not None)
        except Exception:
            logger.exception("the state of %d tokens is not written", branch.computed)

    def described(self, branch: Branch) -> tuple[StateNames, Mapping[ObjectKey, Callable[[], bytes]], SeqId | None]:
        """Plan the objects that store a branch. Return their names, a function per object that
        serialises it (safe on any thread), and the forked sequence that they read (None without
        objects). The caller removes the fork. The state must be exact and ``store`` durable."""
        seq, layout, chain = branch.seq, self.keys.layout, self.keys.chain_of(branch, branch.computed)
        names = StateNames(root=chain.boundaries[0].hex(), chunk=chain.chunk, length=branch.computed)
        if seq is None or branch.computed < self.least:
            return replace(names, length=0), {}, None
        whole, fork = branch.window is not None, self._fork(seq)
        pieces = layout.pieces(seq, chain, again=branch.computed == len(branch.tokens), whole=whole)
        makers = self._makers(fork, chain, pieces, whole=whole)
        if whole:
            plan = [one for group in self._described(fork)[1].values() for one in group.values()]
            nbytes = sum(math.prod(one.shape) * one.dtype.itemsize for one in plan)
            return replace(names, stops=((branch.computed, nbytes),)), makers, fork
        stops = tuple((one.stop, layout.nbytes(one.stop, one.stop)) for one in pieces if one.start == one.stop)
        return replace(names, row_bytes=layout.row_bytes, stops=stops), makers, fork

    def _fork(self, seq: SeqId) -> SeqId:
        """Return a fork of a sequence, which is never given up."""
        fork = self.runner.new_seq()
        self.runner.execute(Step(edits=(Fork(seq, fork, -1),)))
        return fork

    def _bury(self, cancel: Callable[[WriteJob], bool] = lambda _: False) -> bool:
        """Remove the forks of finished jobs, and of jobs to ``cancel``. Return False if there were
        none."""
        done = [] if self._writer is None else self._writer.collect(cancel)
        for job in done:
            self.runner.execute(Step(edits=(Remove(job.seq),)))
            self.forks.discard(job.seq)
            if job.source is None:
                continue
            if job.cancelled:
                self.ahead.pop(job.source, None)
            else:
                self.costs.moved(TO_MEMORY, job.nbytes, job.seconds)
                self.metrics.saved.inc(job.tokens)
        return bool(done)

    def drop_pending_writes(self) -> bool:
        """Give up forks that wait to be written; return False if there were none."""
        return self._bury() or self._bury(cancel=self._holds_pages)

    def _holds_pages(self, job: WriteJob) -> bool:
        """Return True if a job's fork may hold pages or states that its source does not hold."""
        state, seq = self.runner.state, job.source
        return seq not in self.ahead or bool(state.recurrent_ids) or state.sequence_length(seq) != self.ahead[seq]

    # -- finding -----------------------------------------------------------------------------------

    def ask(self, branch: Branch) -> Question | None:
        """Query the tiers for a branch's tokens; return the query, or None if nothing can be
        stored."""
        # In this order: a short prompt needs no layout, which the first access makes.
        if len(branch.tokens) <= self.least or not self._is_kept(branch) or (branch.tokens.ids == UNKNOWN).any():
            return None
        assert self.store is not None
        chain = self.keys.chain_of(branch, len(branch.tokens))
        return Question(chain, self.store.children(chain.boundaries, timeout=LOOK_SECONDS))

    def _match(self, question: Question, limit: int, *, whole: bool = False) -> Match | None:
        memory = None if self.store is None else self.store.memory
        return find_match(question, self.keys.layout, memory, limit, whole=whole)

    def held(self, question: Question, limit: int) -> int:
        """Return the number of stored tokens, at most ``limit``; 0 until the query is answered. It
        is computed once for each query."""
        if question.held is None and question.is_answered:
            match = self._match(question, limit)
            question.held = 0 if match is None else match.length
        return question.held or 0

    def reach(self, branch: Branch, length: int) -> int:
        """Return the number of a branch's first ``length`` tokens that could be loaded."""
        if not self._is_kept(branch) or length < self.least:
            return 0
        assert self.store is not None
        chain = self.keys.chain_of(branch, length)
        question = Question(chain, self.store.children(chain.boundaries, timeout=LOOK_SECONDS))
        match = self._match(question, length, whole=branch.window is not None)
        return 0 if match is None else match.length

    # -- loading -----------------------------------------------------------------------------------

    def bring(self, branch: Branch, question: Question, limit: int) -> Brought:
        """Begin to load at most ``limit`` tokens, if the tiers have more than are computed and
        loading beats computing. Then the branch has another ``seq``, of ``computed`` tokens; a
        forward may run after it if its step awaits the sequence."""
        match = self._match(question, limit, whole=branch.window is not None) if limit > 0 else None
        computed = branch.computed
        if match is None or match.length < computed + self.least:
            return Brought()
        if not self.is_worth(match.length - computed, match.nbytes(self.keys.layout, computed)):
            self.metrics.declined.inc()
            return Brought(miss=Miss.TOO_EXPENSIVE, length=match.length)
        try:
            begin = self._begin if branch.window is None else self._begin_whole
            loading = begin(branch, match, question.chain)
        except ResourceExhausted:
            # The import needs more pages than recomputing a part would.
            return Brought()
        except Exception as error:
            logger.warning("stored state of %d tokens is not used: %s", match.length, error)
            self.metrics.failed.inc()
            return Brought(miss=Miss.DAMAGED, length=match.length)
        old, branch.seq, branch.computed = branch.seq, loading.seq, match.length
        if old is not None:
            self.runner.execute(Step(edits=(Remove(old),)))
        self._loads[loading.seq] = self.runner.loads[loading.seq] = loading
        self._loader = self._loader or StateLoader()
        self._loader.add(loading)
        return Brought(match.tokens(loading.shared))

    def _begin(self, branch: Branch, match: Match, chain: Chain) -> StateLoad:
        """Make a sequence that waits for its rows. It shares the complete pages that are
        computed."""
        state, layout = self.runner.state, self.keys.layout
        shared = (
            branch.computed - branch.computed % state.page_size if layout.row_layers and branch.seq is not None else 0
        )
        # The loaded state and the next forward need one slot each.
        room = max(0, state.num_available_states - 2) if layout.recurrent_layers else 0
        earlier = match.stops[:-1][-room:] if room else ()
        stops = (*earlier, *match.stops[-1:])
        metadata = state.import_metadata(match.length, kept=[one.stop for one in earlier])
        seq = self.runner.new_seq()
        self.runner.execute(Step(edits=(Import(seq, metadata, branch.seq if shared else None, shared),)))
        assert self.store is not None
        return StateLoad(
            state,
            layout,
            self.store,
            seq,
            length=match.length,
            shared=shared,
            rows=[one for one in match.rows if one.stop > shared],
            stops=stops,
            contents=partial(self.keys.contents, chain),
        )

    def _begin_whole(self, branch: Branch, match: Match, chain: Chain) -> StateLoad:
        """As ``_begin``, for a sequence with a window, which its object describes."""
        state, piece, store = self.runner.state, match.stops[-1], self.store
        assert store is not None
        try:
            found = store.get([piece.key])[0].result(timeout=WHOLE_SECONDS)
        except TimeoutError:
            found = None
        if found is None:
            raise LoadFailed(f"object {piece.key.name} is not there any more")
        try:
            sequence: Any = unpack(piece.key, self.keys.contents(chain, piece), found.blob).metadata.get("sequence")
            plans = state.plan_import(sequence)
            seq = self.runner.new_seq()
            self.runner.execute(Step(edits=(Import(seq, with_groups(sequence, plans)),)))
        except (Unfit, InvalidArgument, DataLoss) as error:
            store.damaged(piece.key, found.tier, error.code or "other")
            raise LoadFailed(str(error)) from None
        contents = partial(self.keys.contents, chain)
        return WholeLoad(
            state,
            self.keys.layout,
            store,
            seq,
            length=match.length,
            stops=match.stops[-1:],
            contents=contents,
            plans=plans,
        )

    def is_coming(self, seq: SeqId | None) -> bool:
        """Return True if a load of the sequence is still running."""
        loading = self._loads.get(seq) if self._loads and seq is not None else None
        return loading is not None and not loading.ended

    def is_near(self, seq: SeqId | None) -> bool:
        """Return True if a load of the sequence is running and all its objects are local, so that a
        forward may follow it."""
        loading = self._loads.get(seq) if seq is not None else None
        return loading is not None and loading.is_near and not loading.ended

    def wait_for_news(self, seconds: float) -> None:
        """Wait until the first load is local or over, at most ``seconds``. Needs no lock."""
        if (loading := next(iter(list(self._loads.values())), None)) is not None:
            loading.wait_until_near(seconds)

    def finish_load(self, branch: Branch) -> Miss:
        """End the load of a branch. On a failure return its reason; then the branch has no
        sequence, and ``computed`` is 0."""
        loading = None if branch.seq is None else self._ended(branch.seq)
        if loading is None:
            return Miss.NONE
        length, branch.seq, branch.computed = branch.computed, None, 0  # the load was exact: tiers hold no other state
        try:
            if loading.error is None:
                self.runner.execute(Step(edits=(FinishImport(loading.seq),)))
                branch.seq, branch.computed = loading.seq, length
        except Exception:
            logger.exception("state of %d tokens did not come back; they are computed again", length)
        finally:
            if branch.seq is None:
                self.metrics.failed.inc()
                self.runner.execute(Step(edits=(Remove(loading.seq),)))
        if branch.seq is None:
            return loading.miss
        self.metrics.seconds.inc(loading.seconds)
        for tier, nbytes in loading.nbytes.items():
            self.costs.moved(tier, nbytes, loading.seconds * nbytes / max(1, sum(loading.nbytes.values())))
        self.metrics.loaded.inc(loading.count)
        return Miss.NONE

    def drop(self, seq: SeqId) -> None:
        """End the load of a sequence that is about to be removed."""
        self.ahead.pop(seq, None)
        self._ended(seq)

    def _ended(self, seq: SeqId) -> StateLoad | None:
        """End the load of a sequence, and return it; None: it has none."""
        if (loading := self._loads.pop(seq, None)) is not None:
            del self.runner.loads[seq]
            loading.end()
        return loading

    # -- reports and the end -----------------------------------------------------------------------

    def snapshot(self) -> dict[str, float]:
        """Return its metrics by name."""
        return self.metrics.snapshot() | ({} if self.store is None else self.store.snapshot())

    def forget(self) -> None:
        """Clear the memory tier. Durable tiers keep their objects."""
        if self.store is not None and self.store.memory is not None:
            self._bury(cancel=lambda job: not job.durable)
            self.store.memory.clear_now()

    def collect(self) -> list[MetricFamily]:
        """Return the metrics of the tier and of its store, as families."""
        return self.metrics.collect() + ([] if self.store is None else self.store.collect())

    def flush(self, timeout: float) -> bool:
        """Wait until all pending writes are durable; return False on a timeout. Call it without the
        lock."""
        until = time.monotonic() + timeout
        if self.store is None:
            return True
        return (self._writer is None or self._writer.wait(timeout)) and self.store.flush(
            max(0.0, until - time.monotonic())
        )

    def close(self) -> None:
        """End the threads; pending writes are lost. The caller holds the lock."""
        for seq in list(self._loads):
            self.drop(seq)
        if self._loader is not None:
            self._loader.close()
        if self._writer is not None:
            self._writer.close()
            self._bury()
        if self.store is not None:
            self.store.close()
