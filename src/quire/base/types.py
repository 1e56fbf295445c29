"""Values that all layers exchange: decisions and batches. Importing this imports no torch.

A ``Step`` has edits of sequences, or one ragged batch of chunks with its inputs, or both. The
engine, executors and proposers make steps; ``BranchOwner.apply`` runs edits alone, at once. Every
rank executes each step. All these types are frozen, and none holds anything that can be called: a
step can be sent to another process.

Letters: T new tokens of a step, n of one chunk; K keys of one chunk, the new ones included; M
placeholders; E model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.base.blend_inputs import BlendInputs

if TYPE_CHECKING:
    from torch import Tensor

SeqId: TypeAlias = int
"""Name of a sequence in a KV state: any int64, chosen by the caller."""

LogitsWanted: TypeAlias = Literal["last", "all", "none"]
"""The rows of a chunk that go through the head."""


@dataclass(frozen=True, slots=True)
class AdapterRuns:
    """The adapter of each token of a sequence. With the tokens it decides K, V and states.

    ``runs`` are pairs (first position, adapter id or None for the base model). The first starts at
    0, and neighbours differ, so equal histories are equal values.
    """

    runs: tuple[tuple[int, int | None], ...] = ((0, None),)

    def at(self, position: int) -> int | None:
        """Return the adapter of the token at ``position``; the last run has no end."""
        if len(self.runs) == 1:
            return self.runs[0][1]  # the fast path: called for each sequence in each step
        return next(adapter for start, adapter in reversed(self.runs) if start <= position)

    def end(self, position: int) -> int | None:
        """Return the end of the run that holds ``position``; None for the last run."""
        return None if len(self.runs) == 1 else next((start for start, _ in self.runs if start > position), None)

    def then(self, position: int, adapter: int | None) -> AdapterRuns:
        """Return this history before ``position``, followed by ``adapter``."""
        kept = tuple(run for run in self.runs if run[0] < position)
        if not kept or kept[-1][1] != adapter:
            kept = (*kept, (position if kept else 0, adapter))
        return self if kept == self.runs else AdapterRuns(kept)

    def cut(self, length: int) -> AdapterRuns:
        """Return the history of the first ``length`` tokens; its last run stays open."""
        kept = tuple(run for run in self.runs if run[0] < length) or self.runs[:1]
        return self if kept == self.runs else AdapterRuns(kept)

    def spliced(self, start: int, stop: int, count: int, adapter: int | None) -> AdapterRuns:
        """Return this history with ``count`` tokens under ``adapter`` in place of ``start..stop``;
        later tokens keep their own."""
        found = self.then(start, adapter if count else self.at(stop)).then(start + count, self.at(stop))
        for position, later in self.runs:
            if position > stop:
                found = found.then(position - stop + start + count, later)
        return found

    def agreed(self, other: AdapterRuns, length: int) -> int:
        """Return the number of leading tokens, of ``length``, with equal adapters in both
        histories."""
        edges = sorted({start for start, _ in (*self.runs, *other.runs)})
        return next((start for start in edges if start < length and self.at(start) != other.at(start)), length)

    def between(self, start: int, stop: int) -> frozenset[int]:
        """Return the adapters of tokens ``start..stop - 1`` except the base model."""
        ends = [*(begin for begin, _ in self.runs[1:]), stop]
        return frozenset(
            adapter
            for (begin, adapter), end in zip(self.runs, ends, strict=True)
            if adapter is not None and begin < stop and end > start
        )

    @property
    def ids(self) -> frozenset[int]:
        """All adapters except the base model."""
        return frozenset(adapter for _, adapter in self.runs if adapter is not None)


BASE = AdapterRuns()
"""The base model alone."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """The parent of each new token of a chunk: -1 for a root, else a smaller index.

    Indices count all uncommitted nodes of the sequence, those of earlier chunks first.
    """

    parents: tuple[int, ...]

    def child(self, node: int, token: int, tokens: Sequence[int]) -> int | None:
        """Return the first node behind ``node`` (-1: a root) that has a token; ``tokens``: those of
        the nodes. None if there is none."""
        for index in range(node + 1, len(self.parents)):
            if self.parents[index] == node and tokens[index] == token:
                return index
        return None

    def path(self, wanted: Iterable[int], tokens: Sequence[int]) -> list[int]:
        """Return the nodes from a root on that have the tokens ``wanted``, one behind the other, as
        far as there are such."""
        found = [-1]
        for token in wanted:
            if (child := self.child(found[-1], token, tokens)) is None:
                break
            found.append(child)
        return found[1:]


@dataclass(frozen=True, slots=True)
class Chunk:
    """n >= 1 new tokens of a sequence: a prompt or a part, the next token, a draft, a tree."""

    seq: SeqId
    tokens: Sequence[int]
    """Ids; a negative id stands for an embedding (``Inputs.embeddings``)."""
    tree: TokenTree | None = None
    adapter: int | None = None
    """Id of a loaded adapter for all of these tokens; None: the base model."""
    logits: LogitsWanted = "last"
    checkpoints: tuple[int, ...] = ()
    """Counts of these tokens after which recurrent states are kept, ascending."""


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
    """Make a sequence keep only its first ``sink`` and last ``window - sink`` tokens; None: all."""

    seq: SeqId
    window: int | None
    sink: int = 0


@dataclass(frozen=True, slots=True)
class KeepCheckpoint:
    """Keep the present state of a sequence's recurrent layers for later rewinds."""

    seq: SeqId


@dataclass(frozen=True, slots=True)
class DropCheckpoint:
    """Drop the recurrent state that a sequence keeps at ``position``; its forks keep theirs."""

    seq: SeqId
    position: int


@dataclass(frozen=True, slots=True)
class Import:
    """Make a sequence whose layers a transfer writes, and let its tokens count at once
    (``KVState.prepare_import``, ``publish_import``)."""

    seq: SeqId
    metadata: Mapping[str, object]
    parent: SeqId | None = None
    shared: int = 0
    """First tokens that are those of ``parent``, whose pages are shared."""


@dataclass(frozen=True, slots=True)
class FinishImport:
    """End an import whose layers are all written."""

    seq: SeqId


@dataclass(frozen=True, slots=True)
class Load:
    """Make a sequence from a state file, which the runner has open (``Runner.files``)."""

    seq: SeqId
    metadata: Mapping[str, object]
    """Metadata of the sequence in the file, as ``sequencefile.check`` returns them."""
    prefix: str = ""
    """Prefix of the names of its tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class Overwrite:
    """Overwrite rows of one layer of a sequence, or all present states of a recurrent layer."""

    seq: SeqId
    layer: int
    start: int
    """Position of the first row; 0 for states."""
    tensors: Mapping[str, Tensor]
    """All tensors of the layer, by name (``kv.layer_memory.names_of``)."""


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a sequence."""

    seq: SeqId


Edit: TypeAlias = (
    Add
    | Fork
    | Pop
    | Commit
    | SetWindow
    | KeepCheckpoint
    | DropCheckpoint
    | Import
    | FinishImport
    | Load
    | Overwrite
    | Remove
)


@dataclass(frozen=True, slots=True)
class LogitsPlace:
    """The destination of a chunk's logits: rows of a tensor that the runner makes."""

    tensor: int
    """Name of the tensor (``Runner.logits``), chosen by the caller."""
    size: int
    """Number of rows of the whole tensor."""
    start: int = 0
    """First row of this chunk."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """Optional inputs of a forward besides token ids, and optional outputs besides logits."""

    embeddings: Tensor | None = None
    """Floating ``[M, E]``: row m stands for the m-th negative token id of the step, a placeholder.

    It replaces the result of ``Model.embed``, so a scale that the model applies to embeddings must
    be in it.
    """
    mask: Tensor | None = None
    """bool, flat: chunk by chunk ``[n, K]`` row by row, true = attend. It replaces the rules of
    causality and trees; windows still apply. None: those rules."""
    positions: NDArray[np.int64] | None = None
    """``[T]``, >= 0: positions for the rotation; visibility still follows indices. None: the
    indices."""
    drawn: Tensor | None = None
    """int64 ``[T]`` on the model's device: token ids, all in the vocabulary, that the host has not
    read. They replace the ids in the chunks; None: the chunks' own."""
    hidden_states: bool = False
    features: tuple[int, ...] = ()
    """Blocks of the model whose outputs are returned for all tokens, for heads that draft."""
    attention_weights: bool = False
    observed: frozenset[int] = frozenset()
    """Ids of layers whose attention weights are returned, also if other layers have none."""
    places: tuple[LogitsPlace, ...] = ()
    """Destinations of each chunk's logits; empty: logits are returned.

    They are written a few rows at a time (all at once if a chunk names an adapter), and the output
    has no logits then. The first step that names a tensor makes it, after its blocks have run.
    """

    @property
    def is_plain(self) -> bool:
        """Return True if there is no optional input except ``drawn``, and no optional output."""
        given = self.embeddings is not None or self.mask is not None or self.positions is not None
        asked = self.hidden_states or self.features or self.attention_weights or self.observed or self.places
        return not (given or asked)


NO_INPUTS = Inputs()


@dataclass(frozen=True, slots=True)
class Step:
    """One decision: ``edits`` in order, then one forward over ``chunks`` (none: edits only)."""

    edits: tuple[Edit, ...] = ()
    chunks: tuple[Chunk, ...] = field(default=())
    inputs: Inputs = NO_INPUTS
    awaited: tuple[SeqId, ...] = ()
    """Sequences of the chunks that are still being imported (``KVState.publish_import``). Before
    each layer the forward waits for their transfers (``Runner.loads``). A layer that is
    incomplete then, or of a sequence that is not awaited, raises ``FailedPrecondition``."""
    blend: BlendInputs | None = None
    """The rows that do not run through all blocks, as cached rows take their places; None: all rows
    run."""

    @property
    def is_plain(self) -> bool:
        """Return True if chunks, and perhaps drawn tokens, are all that the forward depends on."""
        return self.inputs.is_plain and not self.awaited and self.blend is None

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)
