"""``Heads``: drafts of a head that reads the target's hidden states (EAGLE-3, MTP).

Row t of the head has the hidden state of the target at position t and token t + 1, and tells token
t + 2. The head has a KV state with a sequence for each request. Hidden states come with each step
(``ran``), and count as far as the tokens that they were computed for are the request's, so those of
rejected drafts are left. For a draft the missing rows run, several requests in one forward; then
each further level of drafts takes one forward of all requests, with the head's own output in place
of hidden states. These rows are popped.

The sequences of the last requests that have ended stay. A request that goes on where another one
of its salt is, as a turn of a session or a second sample does, forks that one's sequence. Where
hidden states are missing otherwise, as of a cached beginning, the head begins anew behind them: it
has less context, and drafts may be worse.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from quire.base.token_history import Ids, TokenHistory, common_prefix
from quire.base.types import Add, Chunk, Commit, Fork, Inputs, LogitsWanted, Pop, Remove, SeqId, Step, TokenTree
from quire.base.uploads import uploaded
from quire.models.heads import Head
from quire.runner.local import Runner, StepOutput
from quire.speculation.controller import Pace
from quire.speculation.feature_reader import Rows
from quire.speculation.likely_trees import LikelyTree, most_likely
from quire.speculation.proposer import NO_DRAFT, Context, Draft

PLACEHOLDER = -1
"""The id of each token of the head: its rows take the places of embeddings."""
MOST_WAITING = 64
"""Hidden states that a request may have waiting for a draft; then their rows run without."""
MOST_ENDED = 32
"""Requests that have ended whose sequences stay, as long as there is room."""


@dataclass(eq=False, slots=True)
class Reader:
    """The sequence of one request in the head's state, and the hidden states for its next rows."""

    name: Hashable
    seq: SeqId
    salt: Hashable
    states_NE: Tensor
    """The target's hidden states from position ``first`` on, ``[N, E]``: those whose rows have not
    run, and that of the last row."""
    tokens: TokenHistory = field(default_factory=TokenHistory)
    """The tokens of these hidden states, of all before, and of the last row."""
    first: int = 0
    begin: int = 0
    """Position of the first row of the sequence."""
    num_run: int = 0
    """Number of its rows."""
    has_ended: bool = False
    """Whether it only stays for later requests."""

    @property
    def known(self) -> int:
        """The number of tokens whose hidden states have come, or were not to come."""
        return self.first + len(self.states_NE)

    @property
    def next(self) -> int:
        """The position of the next row."""
        return self.begin + self.num_run

    def begin_at(self, position: int) -> None:
        """Leave all rows; the first one will be at ``position``, or where hidden states begin."""
        position = max(position, self.first)
        self.states_NE = self.states_NE[position - self.first :]
        self.first = self.begin = position
        self.num_run = 0

    def keep(self, count: int) -> None:
        """Drop all rows behind the first ``count`` tokens."""
        self.tokens.truncate(count)
        self.states_NE = self.states_NE[: max(0, count - self.first)]
        self.first = min(self.first, count)
        # The last row has the token behind it.
        self.num_run = min(self.num_run, max(0, count - 1 - self.begin))
        if self.begin > count or self.next < self.first:
            self.begin_at(self.first)

    def has(self, rows: Rows) -> bool:
        """Return whether all hidden states before ``rows`` are there, or have been read."""
        ids, start = rows.context.ids, rows.start
        is_there = self.salt == rows.context.salt and self.next <= start <= self.known
        return is_there and common_prefix(self.tokens.ids, ids[:start]) == start

    def go_on_from(self, other: Reader, start: int) -> None:
        """Become a copy of another reader as of its first ``start`` tokens, which it ``has``. The
        sequence is not copied."""
        self.tokens, self.states_NE = other.tokens.fork(), other.states_NE
        self.first, self.begin, self.num_run = other.first, other.begin, other.num_run
        self.keep(start)

    def add(self, rows: Rows, states_nE: Tensor) -> None:
        """Take in the hidden states of tokens that a step has run."""
        ids, start, chunk = rows.context.ids, rows.start, np.asarray(rows.tokens, dtype=np.int64)
        same = common_prefix(self.tokens.ids, ids[:start])
        if same == start:
            same += common_prefix(self.tokens.ids[start:], chunk)
        self.keep(same)
        if self.known < start:
            # Some did not come.
            self.tokens = TokenHistory(ids[:start])
            self.states_NE, self.first = states_nE[:0], start
            self.begin_at(start)
        behind = self.known - start
        if behind < len(chunk):
            self.states_NE = torch.cat((self.states_NE, states_nE[behind:]))
            self.tokens.replace_from(self.known - (len(chunk) - behind), chunk[behind:])
        given = np.flatnonzero(chunk < 0)
        if given.size and start + given[-1] > self.begin:
            # Embeddings, which the head does not know.
            self.begin_at(start + int(given[-1]))

    def follow(self, ids: Ids) -> bool:
        """Return whether the rows that the next draft needs can run: those of all tokens ``ids``
        but the last one, whose hidden state is not known. What belongs to other tokens is left."""
        self.keep(common_prefix(self.tokens.ids, ids))
        last = len(ids) - 2
        if self.known <= last or self.begin > last:
            return False
        # The last row runs even if it has run: the draft is taken from its logits.
        self.num_run = min(self.num_run, last - self.begin)
        self.tokens.replace_from(last + 1, ids[last + 1 :])
        return self.next >= self.first

    def ran(self, count: int) -> None:
        """Record the next rows as run; the hidden state of the last one stays."""
        self.num_run += count
        self.states_NE = self.states_NE[self.next - 1 - self.first :].clone()
        self.first = self.next - 1


@dataclass(eq=False, slots=True, kw_only=True)
class Chain(LikelyTree):
    """The drafts of one request."""

    reader: Reader
    states_NE: Tensor | None = None
    """What stands for the hidden states of its last rows."""


class Heads:
    """Proposes the most likely tokens of a head of the target."""

    def __init__(
        self, runner: Runner, head: Head, name: str, *, max_len: int, step_tokens: int, width: int = 1
    ) -> None:
        """``runner``: of the head; ``max_len``: the longest sequence; ``step_tokens``: most tokens
        of a forward; ``width``: most drafts behind one token."""
        state = runner.state
        self.runner, self.head, self.name, self._state, self._step_tokens = runner, head, name, state, step_tokens
        self._width = width
        self._max_len = max_len if state.capacity is None else min(max_len, state.capacity)
        self._most_waiting = min(MOST_WAITING, step_tokens - 1)
        self._readers: OrderedDict[Hashable, Reader] = OrderedDict()
        """By request, the least recently used one first."""
        self.pace = Pace()

    @property
    def layers(self) -> tuple[int, ...]:
        """See ``FeatureReader``."""
        return self.head.layers

    def ran(self, rows: Sequence[Rows]) -> None:
        """See ``FeatureReader``."""
        counts = [len(one.tokens) for one in rows]
        try:
            with torch.inference_mode():
                joined = [torch.cat(parts) for parts in zip(*(one.features for one in rows), strict=True)]
                states = self.head.states(joined).split_with_sizes(counts)
            for one, states_nE in zip(rows, states, strict=True):
                self._reader(one).add(one, states_nE)
            self._catch_up(rows)
        except Exception:
            for one in rows:
                self._forget(one.context.name)
            raise

    def propose(self, contexts: Sequence[Context], most: Sequence[int]) -> list[Draft]:
        """See ``Proposer``. A request of which hidden states are missing gets no draft."""
        if not self.pace.drafts({context.name: len(context.ids) for context in contexts}):
            return [NO_DRAFT] * len(contexts)
        try:
            chains = [self._follow(context, count) for context, count in zip(contexts, most, strict=True)]
            self._draft([chain for chain in chains if chain is not None])
        except Exception:
            for context in contexts:
                self._forget(context.name)
            raise
        return [NO_DRAFT if chain is None else chain.draft for chain in chains]

    def ended(self, context: Context) -> None:
        """See ``Proposer``. Its sequence stays for requests that go on there."""
        if (reader := self._readers.get(context.name)) is not None:
            reader.has_ended = True
        ended = [one.name for one in self._readers.values() if one.has_ended]
        for name in ended[:-MOST_ENDED]:
            self._forget(name)

    def _reader(self, rows: Rows) -> Reader:
        """Return the reader of a request, for a new one a fork of one that it goes on from."""
        name = rows.context.name
        reader = self._readers.get(name)
        if reader is None or reader.has_ended:
            self._forget(name)
            none = torch.empty(0, self.head.hidden_size // 2, dtype=self.head.dtype, device=self.head.device)
            reader = Reader(name, self.runner.new_seq(), rows.context.salt, none)
            others = [one for one in self._readers.values() if rows.start and one.has(rows)]
            if others:
                other = max(others, key=lambda one: one.num_run)
                self._pop(other)
                self.runner.execute(Step(edits=(Fork(other.seq, reader.seq),)))
                reader.go_on_from(other, rows.start)
            self._readers[name] = reader
        self._readers.move_to_end(name)
        return reader

    def _forget(self, name: Hashable) -> None:
        if (reader := self._readers.pop(name, None)) is not None and self._state.has_sequence(reader.seq):
            self.runner.execute(Step(edits=(Remove(reader.seq),)))

    def _pop(self, reader: Reader) -> None:
        """Take from a sequence what the request's rows do not have: drafts, and other tokens."""
        seq, state = reader.seq, self._state
        if not state.has_sequence(seq):
            self.runner.execute(Step(edits=(Add(seq),)))
        length = state.sequence_length(seq)
        if state.pending_nodes(seq):
            self.runner.execute(Step(edits=(Commit((seq,), (-1,)),)))
            length = state.sequence_length(seq)
        if length < reader.num_run:
            reader.begin_at(reader.first)
        if length > reader.num_run:
            self.runner.execute(Step(edits=(Pop(seq, length - reader.num_run),)))

    def _catch_up(self, rows: Sequence[Rows]) -> None:
        """Run the rows of requests of which many are waiting, as of prompts."""
        for one in rows:
            reader = self._readers.get(one.context.name)
            if reader is None:
                continue
            # Not those of drafts, which may be rejected.
            stop = min(reader.known, len(one.context.ids)) - 1
            if stop - reader.next <= self._most_waiting:
                continue
            self._pop(reader)
            while reader.next < stop:
                count = min(stop - reader.next, self._step_tokens)
                if stop > self._max_len or not self._have_room([reader], [count]):
                    self._forget(reader.name)
                    break
                self._run([reader], [count], self._input(reader, count), "none")
                reader.ran(count)

    def _follow(self, context: Context, most: int) -> Chain | None:
        """Prepare a request's reader for drafts. None: it gets none."""
        ids = context.ids
        most = min(most, self._max_len - len(ids))
        if (reader := self._readers.get(context.name)) is None or most < 1:
            return None
        self._readers.move_to_end(context.name)
        if not reader.follow(ids):
            return None
        self._pop(reader)
        return Chain(reader=reader, most=most, width=self._width, least=context.least)

    def _draft(self, chains: list[Chain]) -> None:
        chains, counts = chains[: self._step_tokens], []
        for chain in chains:
            reader = chain.reader
            counts.append(len(reader.tokens) - 1 - reader.next)
        while chains and (
            sum(counts) > self._step_tokens
            or not self._have_room(
                [chain.reader for chain in chains],
                [count + chain.most for chain, count in zip(chains, counts, strict=True)],
            )
        ):
            chains, counts = chains[:-1], counts[:-1]
        if not chains:
            return
        readers = [chain.reader for chain in chains]
        rows_TC = torch.cat([self._input(reader, count) for reader, count in zip(readers, counts, strict=True)])
        output = self._run(readers, counts, rows_TC, "last")
        for reader, count in zip(readers, counts, strict=True):
            reader.ran(count)
        self._take(chains, output, np.cumsum(counts) - 1)
        try:
            while chains := [chain for chain in chains if chain.next]:
                counts = [len(chain.next) for chain in chains]
                trees = None if self._width == 1 else [TokenTree(chain.next_parents) for chain in chains]
                wanted: LogitsWanted = "last" if trees is None else "all"
                output = self._run([chain.reader for chain in chains], counts, self._drafted(chains), wanted, trees)
                self._take(chains, output, np.arange(sum(counts)))
        finally:
            for reader in readers:
                self._pop(reader)

    def _take(
        self, chains: Sequence[Chain], output: StepOutput, rows: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> None:
        """Give each chain its drafts, of the logits and the outputs ``rows`` of a forward."""
        tokens, chances = most_likely(output.logits_RV, self._width)
        tokens = [self.head.target_ids(one) for one in tokens]
        with torch.inference_mode():
            states_RE = self.head.following(output.features[0].index_select(0, uploaded(rows, self.head.device)))
        start = 0
        for chain in chains:
            stop = start + max(1, len(chain.next))
            chain.add(tokens[start:stop], chances[start:stop])
            chain.states_NE = states_RE[start:stop]
            start = stop

    def _input(self, reader: Reader, count: int) -> Tensor:
        """Return the next rows of a reader."""
        start = reader.next
        tokens = uploaded(reader.tokens.ids[start + 1 : start + 1 + count].copy(), self.head.device)
        with torch.inference_mode():
            return self.head.rows(tokens, reader.states_NE[start - reader.first : start - reader.first + count])

    def _drafted(self, chains: Sequence[Chain]) -> Tensor:
        """Return the rows of the next drafts of each chain."""
        tokens = np.array([token for chain in chains for token in chain.next_tokens], dtype=np.int64)
        with torch.inference_mode():
            states_TE = torch.cat([chain.states_NE[chain.rows] for chain in chains if chain.states_NE is not None])
            return self.head.rows(uploaded(tokens, self.head.device), states_TE)

    def _run(
        self,
        readers: Sequence[Reader],
        counts: Sequence[int],
        rows_TC: Tensor,
        logits: LogitsWanted,
        trees: Sequence[TokenTree] | None = None,
    ) -> StepOutput:
        """Run rows of the head, the next ``counts[i]`` behind each sequence."""
        chunks = tuple(
            Chunk(reader.seq, [PLACEHOLDER] * count, tree, logits=logits)
            for reader, count, tree in zip(readers, counts, trees or repeat(None), strict=False)
        )
        features = () if logits == "none" else (0,)
        return self.runner.execute(Step(chunks=chunks, inputs=Inputs(embeddings=rows_TC, features=features)))

    def _have_room(self, readers: Sequence[Reader], counts: Sequence[int]) -> bool:
        """Return whether there is room for the next ``counts`` rows. Sequences of other requests
        are given up for it, first of those that have ended, the least recently used one first;
        these requests begin anew."""
        seqs, state = [reader.seq for reader in readers], self._state
        while state.shortage_in_steps(seqs, counts, self._step_tokens):
            others = [one for one in self._readers.values() if one not in readers and one.num_run]
            if not others:
                return False
            self._forget(min(others, key=lambda one: not one.has_ended).name)
        return True
