"""One call that extends rows of caches: all of it counts, or nothing does.

Room for all of it is made first. A row that is rewound runs on a fork at the new start, which takes
its place at the end: until then the old tokens are there to come back to. Only where the pool has
no room for both is the old version given up beforehand. Where recurrent layers have no state at the
new start, the fork stands at the nearest one before and runs the row's tokens from there on
(``CachePool.replay_start``).

Letters: N rows of the call; n tokens of a row; R rows of logits; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import QuireError, ResourceExhausted
from quire.base.token_history import Ids
from quire.base.types import NO_INPUTS, Chunk, DropCheckpoint, Inputs, KeepCheckpoint, LogitsPlace, LogitsWanted, Step
from quire.branches.extension import NOTHING, Extension, extend, keep
from quire.branches.row_media import RowMedia, recorded_ids
from quire.executor.cache_pool import CachePool
from quire.executor.forward_packing import (
    LOGITS_ONLY,
    Gathered,
    Piece,
    RowOutput,
    WantedOutputs,
    inputs_of,
    places_of,
    rows_wanted,
    states_needed,
)
from quire.executor.row_extension import RowExtension, packed
from quire.executor.running_calls import Operation
from quire.runner.local import StepOutput


class Transaction:
    """A call: ``with Transaction(...) as work: work.run(...); work.commit()``.

    Leaving without ``commit`` undoes everything. Enter it under the pool's lock and stay under it.
    Entering raises ``ResourceExhausted`` before anything changes, and ``FailedPrecondition`` where
    a window has forgotten what a rewind needs, or where a recurrent state is not kept and the
    tokens that lead to it are not known.
    """

    def __init__(
        self,
        pool: CachePool,
        parts: Sequence[RowExtension],
        operation: Operation,
        *,
        several: bool = False,
        on_forks: bool = False,
        forwards: Iterable[Sequence[Piece]] | None = None,
        tree_if_room: bool = False,
        may_retry: bool = False,
    ) -> None:
        """Prepare to extend ``parts``.

        ``several``: there may be more than one forward. ``on_forks``: run on forks only, and leave
        by ``set_aside``. ``forwards``: how they will divide the tokens (None: one of all), by which
        recurrent states are counted. ``tree_if_room``: a chain becomes a tree of one path
        (``Extension.parents``) if there are free slots for the recurrent states behind all of its
        tokens. ``may_retry``: the caller may leave without ``commit`` and begin again at the same
        starts, which the rows must hold then.
        """
        self.pool = pool
        self._facts = pool.facts
        self.parts = list(parts)
        self.operation = operation
        self.several = several
        self.on_forks = on_forks
        self._forwards = forwards
        self._tree_if_room = tree_if_room
        self._may_retry = may_retry
        self._needed = 0
        """Slots for recurrent states that the call takes."""
        self._given_up: list[RowExtension] = []
        """Rows whose old sequences were removed to make room, if there are slots for the states at
        their starts."""
        self._replayed = False
        self._committed = False
        self._windows_evict = False
        """Whether a window may drop tokens between two forwards of this call."""
        self.logits: dict[int, Tensor] = {}
        """The tensors that the logits of a run with places were written to, by name."""

    def __enter__(self) -> Self:
        for part in self.parts:
            if part.start > part.old_length:
                raise QuireError(f"{part.label or 'a row'} begins at {part.start} and has {part.old_length} tokens")
            part.require_limits(self._facts)
        for part in self.parts:
            part.cache.commit_chains()
            part.begin = self.pool.replay_start(part.row, part.start, part.label)
        self.pool.note_adapters([part.new.runs for part in self.parts])
        several = self.several or any(part.replayed for part in self.parts)
        self._windows_evict = several and (
            self._facts.is_windowed or any(part.row.window is not None for part in self.parts)
        )
        kept = [part for part in self.parts if self.on_forks or part.rewinds or self._needs_a_way_back(part)]
        forks = self.pool.fork_rows([part.row for part in kept], [part.begin for part in kept])
        for part, seq in zip(kept, forks, strict=True):
            part.new.branch = part.row.like(seq, part.start)
            part.new.branch.truncate_computed(part.begin)
        try:
            self._reserve(kept)
        except BaseException:
            self._drop_unused_forks()
            raise
        if self.several or not self._facts.keeps_last_state:
            self._keep_starts([part for part in self.parts if not part.rewinds])
        return self

    def _needs_a_way_back(self, part: RowExtension) -> bool:
        """Return whether a fork is needed to undo the call's forwards but the last.

        Taking tokens back is not enough where the page of the first new token must be copied (a
        forward that fails undoes that, but not what earlier ones did), nor where a window lets go
        of tokens. A fork keeps both, and costs no page unless rows share that page.
        """
        if not self.several or part.start == 0 or part.count == 0:
            return False
        return self._windows_evict or self.pool.state.shares_tail(part.row.seq)

    def _keep_starts(self, parts: Sequence[RowExtension]) -> None:
        """Keep the recurrent states of ``parts``, all at their starts, that have no old version."""
        state = self.pool.state
        if not self._facts.recurrent_ids:
            return
        for part in parts:
            if not part.on_fork and part.start and part.count and part.new.parents is None:
                part.holds_start = part.start not in state.checkpoints(part.seq)
                if part.holds_start:
                    self.pool.apply(KeepCheckpoint(part.seq))

    def _drop_starts(self) -> None:
        for part in self.parts:
            if part.holds_start:
                self.pool.apply(DropCheckpoint(part.seq, part.start))
                part.holds_start = False

    def _reserve(self, kept: Sequence[RowExtension]) -> None:
        """Make room for everything; give up old versions only if that makes it fit."""
        if self._tree_if_room:
            self._become_paths()
        self._needed = self._states_needed() if self._facts.recurrent_ids else 0
        missing_states = self._missing_states(self._needed)
        if missing_states > self._freed_states(kept):
            raise self._no_states(missing_states)
        missing = self._missing()
        required = [part for part in kept if self.on_forks or part.rewinds or self._windows_evict]
        if missing and len(required) < len(kept):
            # Rows that share their last page need a page for each fork: run them where they are.
            self._drop_unused_forks([part for part in kept if part not in required])
            missing = self._missing()
        if not missing and not missing_states:
            return
        given_up = [] if self.on_forks else [part for part in required if part.rewinds]
        if missing > sum(self.pool.state.pages_freed(part.row.seq, part.seq) for part in given_up):
            state = self.pool.state
            pages = sum(state.pool_sizes()[: len(self._facts.page_bytes)])
            raise ResourceExhausted(
                f"no room for {self._tokens()}: {missing} pages of {state.page_size} "
                f"tokens are missing, {state.num_available_pages()} of {pages} are free; release or clear caches"
            )
        holding = self._needed + sum(self._takes_a_slot(part) for part in given_up)
        if self._may_retry and not self._facts.keeps_last_state:
            missing_states = self._missing_states(holding)
            if missing_states > self._freed_states(given_up):
                raise self._no_states(missing_states)
        self.pool.remove(*(part.row.seq for part in given_up))
        for part in given_up:
            # From here on an error leaves the row at ``start``, or where its fork stands then.
            part.row.seq = part.seq
            self._mark_rewound(part)
        if holding <= self.pool.available_states:
            self._given_up = given_up

    def _tokens(self) -> str:
        """Return, in words, what there is no room for."""
        again, more = sum(part.replayed for part in self.parts), sum(part.count for part in self.parts)
        replayed = f"{again} tokens that must be run again"
        return f"{replayed} and {more} more" if again and more else replayed if again else f"{more} more tokens"

    def _no_states(self, missing: int) -> ResourceExhausted:
        return ResourceExhausted(
            f"no room for {self._tokens()}: {missing} slots for recurrent states are missing; release or clear caches"
        )

    def _takes_a_slot(self, part: RowExtension) -> bool:
        """Return whether keeping the state at the start takes a slot beyond ``_needed``. It does
        unless the state was there before, or is kept by itself."""
        interval = self._facts.state_interval
        return part.replayed > 0 and not (interval and part.start % interval == 0)

    def _freed_states(self, parts: Sequence[RowExtension]) -> int:
        """Return the number of slots freed by dropping the versions before the rewinds of
        ``parts``."""
        if self.on_forks:
            return 0
        return sum(self.pool.state.states_freed(part.row.seq) for part in parts if part.rewinds)

    def _missing(self) -> int:
        """Return the number of pages missing for the whole call.

        Where windows free pages between forwards, the number is not known beforehand. Then count
        the pages for a first token of each row, and for all tokens in layers without a window;
        ``run`` counts again before each forward.
        """
        growing = [part for part in self.parts if part.count + part.replayed]
        if not growing:
            return 0
        seqs, counts = [part.seq for part in growing], [part.replayed + part.count for part in growing]
        # Behind tokens that are run again a tree takes the pages of as many tokens.
        trees = [None if part.replayed else part.new.parents for part in growing]
        if self._windows_evict:
            return max(self.pool.missing_pages(seqs, [1] * len(seqs)), self.pool.missing_full_pages(seqs, counts))
        return self.pool.missing_pages(seqs, counts, trees)

    def _missing_states(self, needed: int) -> int:
        """Return the number of missing slots among ``needed`` ones for recurrent states."""
        if not self._facts.recurrent_ids:
            return 0
        if self.pool.missing_states(needed):
            # The forks hold what their rows have given up, too.
            forks = [part.seq for part in self.parts if part.seq != part.row.seq]
            self.pool.apply(*(DropCheckpoint(seq, at) for seq in forks for at in self.pool.state.checkpoints(seq)))
        return self.pool.missing_states(needed)

    def _states_needed(self) -> int:
        own = self._forwards
        if own is None:
            own = [[Piece(index, 0, part.count) for index, part in enumerate(self.parts) if part.count]]
        chains, trees = (own, ()) if all(part.new.parents is None for part in self.parts) else ((), own)
        return states_needed(
            [part.begin for part in self.parts],
            chain(self._replays(), chains),
            trees,
            interval=self._facts.state_interval,
        )

    def _become_paths(self) -> None:
        for part in self.parts:
            part.new.parents = tuple(range(-1, part.count - 1))
        if not self._facts.recurrent_ids or self._states_needed() > self.pool.available_states:
            for part in self.parts:
                part.new.parents = None

    def _replays(self) -> list[list[Piece]]:
        counts = [part.replayed for part in self.parts]
        return packed(self.pool, self.parts, [part.begin for part in self.parts], counts, self._facts.chunk_size)

    def _mark_rewound(self, part: RowExtension) -> None:
        if part.rewinds:
            part.cache.mark_cut(part.row, part.start)

    # -- running -----------------------------------------------------------------------------------

    def run(
        self,
        tokens: Sequence[Ids],
        wanted: Sequence[LogitsWanted],
        *,
        budget: int = 0,
        media: Sequence[RowMedia | None] | None = None,
        asked: WantedOutputs = LOGITS_ONLY,
        places: Sequence[LogitsPlace] = (),
    ) -> list[RowOutput]:
        """Run ``tokens[i]``, with ``media[i]`` at its placeholders, for part i.

        ``wanted[i]`` says which logits of it are returned, and ``places[i]`` where they are written
        (``logits`` has the tensors then). At most ``budget`` tokens go into one forward (0: all); a
        row that does not fit continues in the next one.
        """
        self.replay()
        media = [None] * len(tokens) if media is None else media
        blocks = [() if found is None else found.blocks for found in media]
        tokens = [recorded_ids(ids, found) for ids, found in zip(tokens, media, strict=True)]
        new, sizes = [part.new for part in self.parts], [ids.size for ids in tokens]
        forwards = packed(self.pool, self.parts, [one.end for one in new], sizes, budget, blocks)
        counts = [rows_wanted(*one) for one in zip(wanted, sizes, strict=True)]
        if not places and len(forwards) > 1:
            # One tensor for each row, so that pieces need not be joined by a copy of all.
            places = [LogitsPlace(row, count) for row, count in enumerate(counts)]
        results = [Gathered(self._facts.logits(0)) for _ in tokens]
        try:
            for pieces in forwards:
                self.operation.check()
                chunks = _chunks(new, tokens, wanted, pieces)
                lengths = [new[piece.row].end for piece in pieces]
                inputs = inputs_of(pieces, media, lengths, asked, places_of(pieces, chunks, places) if places else ())
                if (stand := _positions(new, pieces)) is not None:
                    inputs = replace(inputs, positions=stand)
                output = self._forward(new, pieces, chunks, inputs)
                for number, piece in enumerate(pieces):
                    results[piece.row].add(output, number)
        finally:
            made = self.pool.runner.logits
            self.logits = {name: made.pop(name) for name in {place.tensor for place in places} & made.keys()}
        if places:
            for result, place, count in zip(results, places, counts, strict=True):
                if place.tensor not in self.logits:  # of rows without tokens
                    self.logits[place.tensor] = self._facts.logits(place.size)
                result.logits = self.logits[place.tensor][place.start : place.start + count]
        return [result.finished() for result in results]

    def replay(self) -> None:
        """Replay the tokens from the restored states up to the rows' starts. ``run`` calls it."""
        if self._replayed:
            return
        again = [Extension(part.new.branch, part.begin, part.new.runs) for part in self.parts]
        tokens = [one.branch.tokens.ids[one.start :] if one.branch.remaining else NOTHING for one in again]
        for pieces in self._replays():
            if all(self.parts[piece.row].on_fork for piece in pieces):
                # The others have no state to return to, so they rewind to their starts.
                self.operation.check()
            self._forward(again, pieces, _chunks(again, tokens, ["none"] * len(again), pieces))
        keep(self.pool, again)
        self._replayed = True
        self._keep_starts(self._given_up)

    def _check_room(self, pieces: Sequence[Piece]) -> None:
        """Raise ``ResourceExhausted`` if a forward of a windowed state finds no pages. For other
        states ``__enter__`` has made room."""
        if not self._windows_evict:
            return
        seqs = [self.parts[piece.row].seq for piece in pieces]
        if missing := self.pool.missing_pages(seqs, [piece.end - piece.begin for piece in pieces]):
            raise ResourceExhausted(f"no room for the call: {missing} pages are missing; release or clear caches")

    def _forward(
        self,
        extensions: Sequence[Extension],
        pieces: Sequence[Piece],
        chunks: tuple[Chunk, ...],
        inputs: Inputs = NO_INPUTS,
    ) -> StepOutput:
        self.operation.num_sequences = len(pieces)
        self._check_room(pieces)
        step = Step(chunks=chunks, inputs=inputs)
        try:
            output = extend(self.pool.runner, step, [extensions[piece.row] for piece in pieces])
        except QuireError:
            raise
        except torch.AcceleratorError as error:
            # The device's context is lost; nothing can run on it any more.
            self.pool.broken = f"the device failed: {error}"
            raise QuireError(f"{self.operation.verb}: {self.pool.broken}") from error
        except Exception as error:
            raise QuireError(f"{self.operation.verb} failed while computing: {error}") from error
        self.pool.note_use()
        return output

    # -- the end -----------------------------------------------------------------------------------

    def commit(self, counts: Sequence[int] | None = None) -> None:
        """Let the first ``counts[i]`` tokens that ran count; None: all.

        Of a tree, the path to node ``counts[i]`` counts; -1: nothing. A part without tokens stays
        as it was. Where layers are recurrent, a chain counts as a whole only.
        """
        kept = [part.new.num_run for part in self.parts] if counts is None else list(counts)
        keep(self.pool, [part.new for part in self.parts], kept)
        for part, count in zip(self.parts, kept, strict=True):
            if part.new.num_run:
                self._replace(part)
                part.cache.take(part.row, part.new, count)
        self._finish()

    def commit_cuts(self) -> None:
        """Let the rows end at their starts."""
        self.replay()
        for part in self.parts:
            if part.rewinds:
                self._replace(part)
                part.cache.take(part.row, part.new, 0)
        self._finish()

    def leave_open(self) -> None:
        """Let chains that ran as trees of one path count, with the states behind their tokens."""
        for part in self.parts:
            if part.new.parents is None:
                raise QuireError("only what ran as a tree can be left open")
            self._replace(part)
            part.new.branch = part.row
            part.cache.take(part.row, part.new, part.new.num_run - 1)
            part.row.chain = part.new
        self._finish()

    def _replace(self, part: RowExtension) -> None:
        """Let the sequence that ran be the row's."""
        if part.on_fork:
            self.pool.remove(part.row.seq)
            part.row.seq = part.seq
            self._mark_rewound(part)

    def _finish(self) -> None:
        self._drop_unused_forks()
        self._drop_starts()
        self._committed = True

    def set_aside(self) -> list[Extension]:
        """Keep the new nodes, one tree per row, beside the rows, which stay as they were."""
        found = []
        for part in self.parts:
            if part.new.parents is None or not part.on_fork:
                raise QuireError("only a tree that ran on a fork can be set aside")
            part.cache.set_pending(part.row, part.new)
            found.append(part.new)
            part.new = Extension(part.row, part.start)
        self._finish()
        return found

    def _drop_unused_forks(self, parts: Sequence[RowExtension] | None = None) -> None:
        """Remove the forks of ``parts``; None: of all."""
        for part in self.parts if parts is None else parts:
            if part.on_fork:
                self.pool.remove(part.seq)
                part.new.branch = part.row

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._committed:
            if kind is None and self._replayed:
                self.pool.replayed_tokens += sum(part.replayed for part in self.parts)
            return
        undone = [part for part in self.parts if not part.on_fork]
        self._drop_unused_forks()
        for part in undone:
            self._undo(part)
        self._drop_starts()

    def _undo(self, part: RowExtension) -> None:
        """Take back what ran on the row itself, which may end before its start then."""
        if part.new.parents is not None:
            keep(self.pool, [part.new], [-1])
        self.pool.rollback(part.new.branch, part.start)
        if (end := part.new.branch.computed) < part.start:
            part.cache.mark_cut(part.row, end)


def _chunks(
    extensions: Sequence[Extension], tokens: Sequence[Ids], wanted: Sequence[LogitsWanted], pieces: Sequence[Piece]
) -> tuple[Chunk, ...]:
    """Return the chunks of a forward of pieces of ``tokens[i]``, new ones of extension i."""
    return tuple(
        extensions[row].chunk(
            tokens[row][begin:end], "none" if wanted[row] == "last" and end < tokens[row].size else wanted[row]
        )
        for row, begin, end in pieces
    )


def _positions(extensions: Sequence[Extension], pieces: Sequence[Piece]) -> Ids | None:
    """Return the positions of a forward's tokens; None: all at their indices."""
    if all(extensions[piece.row].positions is None for piece in pieces):
        return None
    found = []
    for row, begin, end in pieces:
        new, count = extensions[row], end - begin
        first = new.num_run
        found.append(
            np.arange(new.end, new.end + count) if new.positions is None else new.positions[first : first + count]
        )
    return np.concatenate(found)
