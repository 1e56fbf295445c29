"""``DraftModel``: drafts of a second model, usually a smaller one, of the same vocabulary.

It has a KV state of its own with a sequence for each request, which follows the request's tokens:
tokens that differ are popped, and missing ones run, several requests in one forward. Then each
request gets the tokens that the model finds most likely, one forward for each further level of all
requests' trees together. Of a tree the likeliest path stays in the state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from quire.base.errors import InvalidArgument
from quire.base.token_history import Ids, TokenHistory, common_prefix
from quire.base.types import Add, Chunk, Commit, Fork, Pop, Remove, SeqId, Step, TokenTree
from quire.runner.local import Runner
from quire.speculation.controller import Pace
from quire.speculation.likely_trees import LikelyTree, most_likely
from quire.speculation.proposer import NO_DRAFT, Context, Draft
from quire.text.tokenizer import Tokenizer

KEPT = 64
"""Most sequences of requests that have ended; the least recently used one goes first."""


class Ended:
    """The name of a sequence whose request has ended."""


@dataclass(eq=False, slots=True)
class Follower:
    """The sequence of one request in the draft model's state."""

    name: Hashable
    """That of the request, or an ``Ended``."""
    salt: Hashable
    seq: SeqId
    tokens: TokenHistory = field(default_factory=TokenHistory)
    """Its tokens, and those that ran on a fork. The state has fewer of them also if a forward has
    failed, and more if a pop has."""


@dataclass(eq=False, slots=True, kw_only=True)
class Chain(LikelyTree):
    """The drafts of one request."""

    follower: Follower
    ids: Ids
    """The tokens of the request, ``[T]``."""
    seq: SeqId
    """The sequence that runs drafts: the follower's, or a fork of it."""

    @property
    def num_missing(self) -> int:
        """Number of the request's tokens that have not run."""
        return len(self.ids) - len(self.follower.tokens)


class DraftModel:
    """Proposes the most likely tokens of another model."""

    name = "draft"

    def __init__(
        self, runner: Runner, *, max_len: int, step_tokens: int, vocab_size: int | None = None, width: int = 1
    ) -> None:
        """``max_len``: the longest sequence; ``step_tokens``: most tokens of a forward;
        ``vocab_size``: that of the model it drafts for, None: its own; ``width``: most drafts
        behind one token; with recurrent layers it is 1."""
        state = runner.state
        self._vocab_size = runner.model.vocab_size if vocab_size is None else vocab_size
        self.runner, self._state, self._step_tokens = runner, state, step_tokens
        # Each node of a tree would need a recurrent state.
        self._width = 1 if state.recurrent_ids else width
        self._max_len = max_len if state.capacity is None else min(max_len, state.capacity)
        self._followers: OrderedDict[Hashable, Follower] = OrderedDict()
        """By request, the least recently used one first."""
        self.pace = Pace()
        self._forks: list[SeqId] = []
        """Sequences that run drafts, where a pop could not take these back."""

    def propose(self, contexts: Sequence[Context], most: Sequence[int]) -> list[Draft]:
        """See ``Proposer``. A request whose tokens have not all run yet gets no draft, and none
        gets one in steps that are faster without."""
        if not self.pace.drafts({context.name: len(context.ids) for context in contexts}):
            return [NO_DRAFT] * len(contexts)
        try:
            self._remove_forks()
            chains = [self._follow(context, count) for context, count in zip(contexts, most, strict=True)]
            ready = self._catch_up([chain for chain in chains if chain is not None])
            self._extend(ready)
            self._remove_forks()
        except Exception:
            # These requests are dropped.
            self._remove_forks()
            for context in contexts:
                self._forget(context.name)
            raise
        return [NO_DRAFT if chain is None else chain.draft for chain in chains]

    def ended(self, context: Context) -> None:
        """See ``Proposer``. Its sequence is kept for what begins with its tokens: the next turn of
        a session or of a chat."""
        self._remove_forks()
        if (follower := self._followers.pop(context.name, None)) is None:
            return
        follower.name = Ended()
        self._followers[follower.name] = follower
        ended = [name for name in self._followers if isinstance(name, Ended)]
        for name in ended[: max(0, len(ended) - KEPT)]:
            self._forget(name)

    def forget(self) -> None:
        """Remove the sequences of requests that have ended."""
        for name in [name for name in self._followers if isinstance(name, Ended)]:
            self._forget(name)

    def _begin(self, context: Context) -> Follower:
        """Return the sequence of a new request: one that has ended and of which the request begins
        with the larger part, or an empty one."""
        best: Follower | None = None
        most = 0
        for one in self._followers.values():
            if not isinstance(one.name, Ended) or one.salt != context.salt or not self._state.has_sequence(one.seq):
                continue
            same = self._state.nearest_reachable(
                one.seq, min(common_prefix(one.tokens.ids, context.ids), len(context.ids) - 1)
            )
            if 2 * same > max(2 * most, len(one.tokens)):
                best, most = one, same
        if best is None:
            return Follower(context.name, context.salt, self.runner.new_seq())
        del self._followers[best.name]
        best.name = context.name
        return best

    def _forget(self, name: Hashable) -> None:
        if (follower := self._followers.get(name)) is not None:
            if self._state.has_sequence(follower.seq):
                self.runner.execute(Step(edits=(Remove(follower.seq),)))
            del self._followers[name]

    def _remove_forks(self) -> None:
        edits = tuple(Remove(seq) for seq in self._forks if self._state.has_sequence(seq))
        if edits:
            self.runner.execute(Step(edits=edits))
        self._forks.clear()

    def _follow(self, context: Context, most: int) -> Chain | None:
        """Pop the tokens of a request's sequence that the request does not have. None: it gets no
        drafts, because it is too long, or has embeddings or tokens that the model does not know."""
        ids, state = context.ids, self._state
        most = min(most, self._max_len - len(ids))
        if (follower := self._followers.get(context.name)) is None:
            follower = self._followers[context.name] = self._begin(context)
        self._followers.move_to_end(context.name)
        seq, tokens = follower.seq, follower.tokens
        if not state.has_sequence(seq):
            self.runner.execute(Step(edits=(Add(seq),)))
        length = state.sequence_length(seq)
        # The last token runs even if it has run: its logits are what the first draft is taken from.
        same = min(common_prefix(tokens.ids, ids), len(ids) - 1)
        kept = state.nearest_reachable(seq, same)
        if most < 1 or (ids[kept:] < 0).any() or (ids[kept:] >= self.runner.model.vocab_size).any():
            self._forget(context.name)
            return None
        tokens.truncate(kept)
        if kept < length:
            self.runner.execute(Step(edits=(Pop(seq, length - kept),)))
        return Chain(follower=follower, ids=ids, most=most, seq=seq, width=self._width, least=context.least)

    def _catch_up(self, chains: list[Chain]) -> list[Chain]:
        """Run missing tokens of the requests, at most those of one forward, short ones first.
        Return the requests of which none is missing now, each with its first draft."""
        chains = sorted(chains, key=lambda chain: chain.num_missing)
        # A fork copies the page that it writes first.
        spare = self._state.page_size if self._state.forgets else 0
        counts = [chain.num_missing + chain.most + spare for chain in chains]
        chunks: list[Chunk] = []
        left, ready = self._step_tokens, []
        for chain in self._fitting(chains, counts):
            if not left:
                break
            follower = chain.follower
            start, count = len(follower.tokens), min(chain.num_missing, left)
            left -= count
            follower.tokens.extend(chain.ids[start : start + count])
            if not chain.num_missing:
                ready.append(chain)
            tokens: Ids = chain.ids[start : start + count]
            logits = "none" if chain.num_missing else "last"
            chunks.append(Chunk(follower.seq, tokens, logits=logits))  # type: ignore[arg-type]
        if chunks:
            self._run(chunks, ready)
        return ready

    def _extend(self, chains: list[Chain]) -> None:
        """Draft further tokens."""
        going_on = [chain for chain in chains if chain.next]
        if self._state.forgets and going_on:
            for chain in going_on:
                chain.seq = self.runner.new_seq()
                self._forks.append(chain.seq)
            self.runner.execute(Step(edits=tuple(Fork(chain.follower.seq, chain.seq) for chain in going_on)))
        busy = {chain.follower.seq for chain in chains}
        while going_on := [chain for chain in going_on if chain.next]:
            # Trees have the room that was found for as many tokens.
            if self._width == 1 and not (going_on := self._fitting(going_on, busy=busy)):
                break
            chunks = []
            for chain in going_on:
                if self._width == 1:
                    chain.follower.tokens.append(chain.tokens[-1])
                    chunks.append(Chunk(chain.seq, chain.next_tokens))
                else:
                    chunks.append(Chunk(chain.seq, chain.next_tokens, TokenTree(chain.next_parents), logits="all"))
            self._run(chunks, going_on)
        if self._width > 1:
            self._keep_paths([chain for chain in chains if chain.ran])

    def _keep_paths(self, chains: Sequence[Chain]) -> None:
        """Keep the likeliest path of each tree that has run."""
        leaves = []
        for chain in chains:
            path = [-1]
            # Of siblings the first one is the likeliest.
            while (node := next((one for one in chain.ran if chain.parents[one] == path[-1]), None)) is not None:
                path.append(node)
            leaves.append(chain.ran.index(path[-1]))
            chain.follower.tokens.extend([chain.tokens[one] for one in path[1:]])
        if chains:
            self.runner.execute(Step(edits=(Commit(tuple(chain.seq for chain in chains), tuple(leaves)),)))

    def _run(self, chunks: Sequence[Chunk], chains: Sequence[Chain]) -> None:
        """Run a forward whose rows of logits are those of ``chains``, and give each its drafts."""
        output = self.runner.execute(Step(chunks=tuple(chunks)))
        if not chains:
            return
        tokens, chances = most_likely(output.logits_RV[:, : self._vocab_size], self._width)
        start = 0
        for chain in chains:
            stop = start + max(1, len(chain.next))
            chain.add(tokens[start:stop], chances[start:stop])
            start = stop

    def _fitting(
        self, chains: list[Chain], counts: Sequence[int] | None = None, *, busy: Collection[SeqId] = ()
    ) -> list[Chain]:
        """Return the first chains for whose next ``counts`` tokens (None: one each) there is room.
        Sequences of other requests are given up for it, the least recently used one first, except
        ``busy`` ones. Their tokens run again when they are needed."""
        chains, state = chains[: self._step_tokens], self._state
        while chains:
            seqs = [chain.seq for chain in chains]
            lengths = [1] * len(seqs) if counts is None else counts[: len(seqs)]
            if not state.shortage_in_steps(seqs, lengths, self._step_tokens):
                break
            kept = {*busy, *(chain.follower.seq for chain in chains)}
            given_up = next(
                (one.name for one in self._followers.values() if one.seq not in kept and len(one.tokens)), None
            )
            if given_up is None:
                chains = chains[:-1]
            else:
                self._forget(given_up)
        return chains


def check_vocabulary(model: str, draft: Tokenizer | None, target: Tokenizer | None) -> None:
    """Raise ``InvalidArgument`` unless both tokenizers give each id that both have the same text,
    or there is none on either side."""
    if draft is None and target is None:
        return
    if draft is None or target is None:
        side = "the draft model" if draft is None else "the model"
        _refuse(model, f"{side} has no tokenizer, so their vocabularies cannot be compared")
    ours, theirs = (
        {id: token for token, id in backend.get_vocab(with_added_tokens=True).items()}
        for backend in (target.backend, draft.backend)
    )
    for id in sorted(ours.keys() & theirs.keys()):
        if ours[id] != theirs[id]:
            _refuse(model, f"its token {id} is {theirs[id]!r}, and the model's is {ours[id]!r}")


def check_vocabulary_size(model: str, draft: int, target: int, *, is_compared: bool) -> None:
    """Raise ``InvalidArgument`` unless both models have as many tokens. ``is_compared``: their
    tokenizers agree, so that further rows are padding, or tokens that the other one does not
    draft."""
    if draft != target and not is_compared:
        _refuse(model, f"it has {draft} tokens, and the model has {target}")


def _refuse(model: str, reason: str) -> NoReturn:
    raise InvalidArgument(
        f"speculative: the draft model {model}: {reason}; give a model of the same vocabulary",
        field="speculative.model",
        given=model,
    )
