"""``Drafting``: the drafts of an executor of type Speculative, of the engine's proposers.

A row is to a proposer what a request of the engine is: its tokens, and the next one, which has not
run. All rows have one salt. A row that goes back, or whose tokens are replaced, is a new one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from torch import Tensor

from quire.base.errors import Cancelled
from quire.base.token_history import Ids
from quire.branches.owner import replay_refusal
from quire.executor.acceptance import AcceptResult
from quire.executor.cache import KVCache
from quire.executor.cache_pool import CachePool
from quire.executor.request_sampling import Draw
from quire.executor.rewinding import truncate
from quire.executor.row_extension import RowExtension
from quire.executor.running_calls import Operation, Stopwatch
from quire.executor.transaction import Transaction
from quire.speculation.controller import Controller, Trust
from quire.speculation.proposer import Context, Draft, Proposer, problem_of, proposed

logger = logging.getLogger("quire.executor")

Accept = Callable[[Sequence[Tensor]], Sequence[AcceptResult]]
"""From the logits of each row, ``[R, V]``, to what is accepted of its drafts."""


@dataclass(eq=False, slots=True)
class KnownRow:
    """A row of a cache, as a proposer knows it."""

    context: Context
    trust: Trust = field(default_factory=Trust)


class Drafting:
    """Asks a proposer for the drafts of rows."""

    def __init__(self, proposer: Proposer, depth: int, vocab_size: int) -> None:
        """``depth``: most drafts of a row in one forward."""
        self.proposer, self.depth, self._vocab_size = proposer, depth, vocab_size
        self.controller = Controller()
        self.dropped = ""
        """The reason why the proposer is not asked any more."""
        self._rows: dict[tuple[str, int], KnownRow] = {}
        """By cache and row."""

    def drafts(self, rows: Sequence[tuple[KVCache, int, Ids]], most: Sequence[int]) -> list[Draft]:
        """Return the drafts of each row, at most ``most[i]`` of row i. The controller chooses the
        number. Of a tree only the likeliest chain is taken. ``rows``: a cache, the number of a row
        of it, and all tokens of the row; the last token has not run."""
        known = [] if self.dropped else [self._known(cache, row, ids) for cache, row, ids in rows]
        if self.dropped:
            return [Draft()] * len(rows)
        most, decodes = [max(0, min(self.depth, count)) for count in most], len(rows)
        if not self.controller.may_gain(decodes, decodes, sum(most)):
            return [Draft()] * decodes
        least = self.controller.least(decodes)
        try:
            found = proposed(self.proposer, [replace(one.context, least=least) for one in known], most)
            problems = [problem_of(draft, self._vocab_size, count) for draft, count in zip(found, most, strict=True)]
            if bad := next(filter(None, problems), ""):
                self.dropped = f"the proposer {self.proposer.name} {bad}"
        except Exception as error:
            self._drop(error)
        if self.dropped:
            return [Draft()] * len(rows)
        found = [draft.chain().first(count) for draft, count in zip(found, most, strict=True)]
        promises = [draft.promises(one.trust.factor) for one, draft in zip(known, found, strict=True)]
        depths = self.controller.depths(promises, decodes=decodes, rows=decodes, most=sum(map(len, found)))
        return [draft.first(depth) for draft, depth in zip(found, depths, strict=True)]

    def record_accepted(self, cache: KVCache, row: int, draft: Draft, accepted: int) -> None:
        """Record the number of accepted drafts of a row."""
        if (known := self._rows.get((cache.cache_id, row))) is not None:
            if draft.tokens:
                known.trust.verified(draft.compared(range(accepted)), accepted)
            else:
                known.trust.rested()

    def forget(self, live: Collection[str]) -> None:
        """Forget the rows of all caches but ``live`` ones."""
        for name in [name for name in self._rows if name[0] not in live]:
            self._end(self._rows.pop(name).context)

    def _end(self, context: Context) -> None:
        """Let the proposer forget a row. One that fails is not asked any more."""
        try:
            self.proposer.ended(context)
        except Exception as error:
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        """Leave out the proposer, from within the handling of its error."""
        logger.warning("the proposer %s failed; rows go on without it", self.proposer.name, exc_info=True)
        self.dropped = f"the proposer {self.proposer.name} raised {type(error).__name__}: {error}"

    def _known(self, cache: KVCache, row: int, ids: Ids) -> KnownRow:
        name: tuple[str, int] = cache.cache_id, row
        known = self._rows.get(name)
        if known is not None:
            before = known.context.ids
            if len(ids) >= len(before) and np.array_equal(ids[: len(before)], before):
                known.context = Context(name, ids, known.context.num_prompt, None)
                return known
            self._end(known.context)
        known = self._rows[name] = KnownRow(Context(name, ids, len(ids), None))
        return known


def verify_drafts(
    pool: CachePool,
    make: Callable[[Sequence[int]], list[RowExtension]],
    ids: Sequence[Ids],
    accept: Accept,
    operation: Operation,
) -> tuple[list[Tensor], list[AcceptResult]]:
    """Run the next token of each row and the drafts behind it; keep the accepted ones. Return the
    logits and what was accepted. ``make`` returns the extensions by so many tokens of each row."""
    counts = [len(one) for one in ids]
    parts = make(counts)
    chains = all(part.new.parents is None for part in parts)
    # Recurrent layers can be cut behind an accepted token only if its state is there.
    is_recurrent = bool(pool.facts.recurrent_ids) and chains and max(counts) > 1
    with Transaction(
        pool, parts, operation, several=is_recurrent, tree_if_room=is_recurrent, may_retry=is_recurrent
    ) as work:
        rows = [one.logits_RV for one in work.run(ids, ["all"] * len(ids))]
        found = list(accept(rows))
        taken = [1 + one.accepted for one in found]
        opened = parts[0].new.parents is not None
        if opened:
            work.commit([one.row for one in found])
        elif not is_recurrent or taken == counts:
            work.commit(taken)
    if is_recurrent and not opened and taken != counts:
        # That run was undone; now with the accepted tokens alone.
        with Transaction(pool, make(taken), operation) as work:
            work.run([one[:count] for one, count in zip(ids, taken, strict=True)], ["none"] * len(ids))
            work.commit()
        pool.replayed_tokens += sum(taken)
    return rows, found


def sample_with_drafts(
    drafting: Drafting,
    num_steps: int,
    tokens: Sequence[Ids],
    cache: KVCache,
    make: Callable[[Sequence[int], Sequence[int]], list[RowExtension]],
    draws: Sequence[Draw],
    operation: Operation,
    record: Callable[[int, float, int], None],
) -> list[list[int]]:
    """Draw ``num_steps`` tokens for each row of a cache, several in a forward where drafts are the
    tokens drawn. Each forward counts by itself: a cancelled call keeps the complete ones.

    ``make`` returns the extensions of rows, by their indices, by so many tokens of each. ``record``
    takes the rows, seconds and tokens of a forward.
    """
    pool = cache.pool
    drawn: list[list[int]] = [[] for _ in tokens]
    with Transaction(pool, make(range(len(tokens)), [num_steps] * len(tokens)), operation, several=True):
        pass  # there is room for all steps
    starts, capacity = cache.lengths, cache.capacity
    # Forks hold what no rewind brings back: tokens that windows let go of, and recurrent states
    # without a replay.
    on_forks = pool.facts.is_windowed or any(
        row.window is not None or (pool.facts.recurrent_ids and replay_refusal(row, 0, row.computed, pool.adapter_ids))
        for row in cache.rows
    )
    before = pool.fork_rows(cache.rows, starts) if on_forks else []
    for row in cache.rows:
        cache.mark(row)
    try:
        while rows := [row for row, found in enumerate(drawn) if len(found) < num_steps]:
            _round(drafting, num_steps, rows, tokens, drawn, cache, make, draws, operation, record)
    except Cancelled:
        raise Cancelled(
            f"{operation.verb} was cancelled after {sum(map(len, drawn))} of {num_steps * len(drawn)} tokens",
            [token for row in drawn for token in row],
        ) from None
    except BaseException:
        for index, (row, start) in enumerate(zip(cache.rows, starts, strict=True) if on_forks else ()):
            row.seq, before[index] = before[index], row.seq
            cache.mark_cut(row, start)
        truncate(cache, starts, operation)
        cache.capacity = capacity
        raise
    finally:
        pool.remove(*before)
    return drawn


def _round(
    drafting: Drafting,
    num_steps: int,
    rows: Sequence[int],
    tokens: Sequence[Ids],
    drawn: list[list[int]],
    cache: KVCache,
    make: Callable[[Sequence[int], Sequence[int]], list[RowExtension]],
    draws: Sequence[Draw],
    operation: Operation,
    record: Callable[[int, float, int], None],
) -> None:
    """Run one forward of some rows, and draw behind their last tokens and accepted drafts."""
    last = [np.array(drawn[row][-1:] or tokens[row], dtype=np.int64) for row in rows]
    known = [cache.token_ids(row) for row in rows]
    drafts = [Draft()] * len(rows)
    if all(ids is not None for ids in known):
        whole = [np.concatenate((ids, one)) for ids, one in zip(known, last, strict=True) if ids is not None]
        places = [(cache, row, ids) for row, ids in zip(rows, whole, strict=True)]
        drafts = drafting.drafts(places, [num_steps - len(drawn[row]) - 1 for row in rows])
    ids = [np.array([*one, *draft.tokens], dtype=np.int64) for one, draft in zip(last, drafts, strict=True)]
    new: list[list[int]] = []

    def accept(logits: Sequence[Tensor]) -> list[AcceptResult]:
        new.extend(
            _draw_behind(rows_RV, draft.tokens, draws[row])
            for row, rows_RV, draft in zip(rows, logits, drafts, strict=True)
        )
        return [AcceptResult(tuple(range(len(one) - 1))) for one in new]

    watch = Stopwatch(cache.pool.facts.device)
    verify_drafts(cache.pool, partial(make, rows), ids, accept, operation)
    seconds = watch.seconds()
    drafting.controller.costs.measured(sum(map(len, ids)), seconds, len(ids))
    for row, draft, found in zip(rows, drafts, new, strict=True):
        drawn[row] += found
        drafting.record_accepted(cache, row, draft, len(found) - 1)
    record(len(rows), seconds, sum(map(len, new)))


def _draw_behind(rows_RV: Tensor, drafts: Sequence[int], draw: Draw) -> list[int]:
    """Draw the next token, and while it is the next draft, the one behind it."""
    found = [draw(rows_RV[:1])]
    while len(found) <= len(drafts) and found[-1] == drafts[len(found) - 1]:
        found.append(draw(rows_RV[len(found) : len(found) + 1]))
    return found
