"""Values that all layers exchange: what is decided, and what runs. No torch here.

A ``Step`` is a complete decision: edits of sequences, then one ragged batch of chunks. The scheduler makes
it, every rank replays it, a log shows it. All of these are frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

SeqId: TypeAlias = int
"""Name of a sequence in a KV state: any int64, chosen by the caller."""

LogitsWanted: TypeAlias = Literal["last", "all", "none"]
"""Which rows of a chunk go through the head."""


@dataclass(frozen=True, slots=True)
class AdapterRuns:
    """Under which adapter each token of a sequence is run: what its K, V and recurrent states depend on, beside the tokens.

    ``runs`` are (from position, adapter id or None for the base model), the first from 0 on, positions and neighbours
    different: so equal histories are equal values.
    """

    runs: tuple[tuple[int, int | None], ...] = ((0, None),)

    def at(self, position: int) -> int | None:
        """The adapter of the token at ``position``; behind the last run it goes on for ever."""
        return next(adapter for start, adapter in reversed(self.runs) if start <= position)

    def end(self, position: int) -> int | None:
        """Where the run of the token at ``position`` ends; None: nowhere."""
        return next((start for start, _ in self.runs if start > position), None)

    def then(self, position: int, adapter: int | None) -> AdapterRuns:
        """This history of the tokens before ``position``, and ``adapter`` from there on."""
        kept = tuple(run for run in self.runs if run[0] < position)
        if kept and kept[-1][1] == adapter:
            return AdapterRuns(kept)
        return AdapterRuns((*kept, (position if kept else 0, adapter)))

    def cut(self, length: int) -> AdapterRuns:
        """The history of the first ``length`` tokens; its last run goes on."""
        return AdapterRuns(tuple(run for run in self.runs if run[0] < length) or self.runs[:1])

    def agreed(self, other: AdapterRuns, length: int) -> int:
        """How many of the first ``length`` tokens have the same adapter in both, from the first on."""
        edges = sorted({start for start, _ in (*self.runs, *other.runs)})
        return next((start for start in edges if start < length and self.at(start) != other.at(start)), length)

    @property
    def ids(self) -> frozenset[int]:
        """All adapters, the base model aside."""
        return frozenset(adapter for _, adapter in self.runs if adapter is not None)


BASE = AdapterRuns()
"""The base model alone."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Parents of the new tokens of one chunk, one each: -1 is a root, otherwise an index below the own one.

    Indices count all uncommitted nodes of the sequence, those of earlier chunks first.
    """

    parents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """n >= 1 new tokens of one sequence: a prompt, a piece of one, the next token, a draft, a tree."""

    seq: SeqId
    tokens: Sequence[int]
    """Ids; a negative one is a placeholder, for which the runner is given an embedding."""
    tree: TokenTree | None = None
    adapter: int | None = None
    """Id of a loaded adapter, under which all of them run; None: the base model."""
    logits: LogitsWanted = "last"
    checkpoints: tuple[int, ...] = ()
    """After how many of these tokens the state of recurrent layers is kept as a checkpoint, ascending."""


@dataclass(frozen=True, slots=True)
class Add:
    """Make an empty sequence."""

    seq: SeqId


@dataclass(frozen=True, slots=True)
class Fork:
    """Make ``child`` a copy-on-write copy of the first ``pos`` tokens of ``parent`` (-1: all)."""

    parent: SeqId
    child: SeqId
    pos: int = -1


@dataclass(frozen=True, slots=True)
class Pop:
    """Take back the last ``n`` tokens."""

    seq: SeqId
    n: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Keep the path from a root to ``leaf`` of each sequence's token tree; -1 rejects the tree."""

    seqs: tuple[SeqId, ...]
    leaves: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SetWindow:
    """Let a sequence keep its first ``sink`` tokens and the last ``window - sink`` only; None: all."""

    seq: SeqId
    window: int | None
    sink: int = 0


@dataclass(frozen=True, slots=True)
class KeepCheckpoint:
    """Keep the present state of a sequence's recurrent layers, to come back to it."""

    seq: SeqId


@dataclass(frozen=True, slots=True)
class DropCheckpoint:
    """Give up the recurrent state that a sequence keeps at ``position``; its forks keep theirs."""

    seq: SeqId
    position: int


@dataclass(frozen=True, slots=True)
class Remove:
    """Forget a sequence."""

    seq: SeqId


Edit: TypeAlias = Add | Fork | Pop | Commit | SetWindow | KeepCheckpoint | DropCheckpoint | Remove


@dataclass(frozen=True, slots=True)
class Step:
    """One decision: ``edits`` in order, then one forward over ``chunks`` (none: edits only)."""

    edits: tuple[Edit, ...] = ()
    chunks: tuple[Chunk, ...] = field(default=())

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)
