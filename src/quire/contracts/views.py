"""Views: readings of a running LLM, of a state file or of a store, as frozen values.

Each has a ``document()``, the answer of an endpoint of ``/v1/state`` and the source of pictures
(``docs/inspector.md``). No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.base.display import Pictured
from quire.base.documents import Document, View, packed

MOST_TEXT = 80
"""Most characters of ``HistoryNode.head`` and ``tail``."""

BranchKind: TypeAlias = Literal["session", "request", "cached", "cache", "commit", "other"]
Source: TypeAlias = Literal["server", "file", "store"]

OWNER_NAMES = ("free", "evictable", "held", "pinned")
"""Owners of pages, by the numbers in ``PoolView.owner``; ``engine.page_use`` describes them."""
NOBODY, SOMEBODY_ELSE = -1, -2
"""Holders of pages that no branch of the view holds: no holder at all, or a holder that is not
shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRows(Document):
    """The positions of a branch whose rows are in one pool."""

    pool: int
    ranges: tuple[range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchView(Document):
    """The holder of a sequence, or of the history for one."""

    id: str
    """Its kind, a colon, and a name or a number; constant while it lives."""
    kind: BranchKind
    name: str | None = None
    """Its user's name for it; for a commit the branch whose head it is, else its message."""
    num_tokens: int
    computed: int
    """Number of tokens whose state is in the pool."""
    busy: bool = False
    """Whether a call works on it."""
    pinned: bool = False
    modified: bool = False
    exact: bool = True
    adapter: str | None = None
    """The adapter of its next token, by name, or by fingerprint if it has no name here."""
    pages: int = 0
    """Number of pages of tokens and of encoder rows that it holds, without null pages."""
    shared_pages: int = 0
    """Number of these that other sequences hold too."""
    window: tuple[int, int] | None = None
    """(window, sink), in tokens, of the part that it keeps; None: it keeps all."""
    last_commit: str | None = None
    """The commit that it continues; for a commit its parent."""
    reachable: tuple[range, ...] = ()
    """The positions to which it can be rewound without a replay."""
    checkpoints: tuple[int, ...] = ()
    """The positions of its recurrent states, ascending, the present one included."""
    held: tuple[HeldRows, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryNode(Document):
    """A run of tokens, from ``start`` to ``end``, common to all branches at and below it."""

    id: str
    """Constant while the histories split here, even if the run grows at its end."""
    parent: str | None
    """The parent node; None: it is the root of a tree."""
    start: int
    end: int
    branches: tuple[str, ...] = ()
    """Ids of the branches that end here."""
    head: str | None = None
    """The text of its first tokens; None without a tokenizer."""
    tail: str | None = None
    """The text of its last tokens beyond ``head``; else ""."""
    key: Mapping[str, str | None] | None = None
    """For a root: the key that separates its tree from others, ``adapter`` and ``salt``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryView(View, Pictured):
    """All branches as trees over tokens; parents precede their children."""

    reading: int
    branches: tuple[BranchView, ...]
    nodes: tuple[HistoryNode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken(Document):
    """One token of a branch."""

    position: int
    id: int
    """-1 to -4 are an embedding, or an unknown token."""
    text: str | None
    """None without a tokenizer, and for an embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextView(View):
    """Tokens of one branch."""

    branch: str
    num_tokens: int
    """Number of tokens of the whole branch."""
    tokens: tuple[ShownToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolView(View, Pictured):
    """The pages of one pool. All arrays are ``[pages]``."""

    reading: int
    pool: int
    references: NDArray[np.int32]
    """Number of page table entries that reference each page."""
    owner: NDArray[np.uint8]
    """An index into ``OWNER_NAMES``."""
    holder: NDArray[np.int32]
    """An index into ``branches``, ``NOBODY`` or ``SOMEBODY_ELSE``."""
    position: NDArray[np.int32]
    """The position of the page's first slot for that holder; -1 without one."""
    eviction: NDArray[np.int32]
    """Order of eviction, if nothing is used meanwhile: 0 is evicted first, -1 never."""
    branches: tuple[str, ...]
    """Ids of the branches that hold pages here."""

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of pages by owner."""
        found = np.bincount(self.owner, minlength=len(OWNER_NAMES))
        return dict(zip(OWNER_NAMES, found.tolist(), strict=True))

    def document(self) -> dict[str, Any]:
        """See ``Document``; it has the numbers too."""
        references = packed(self.references, "u2")
        more = {"num_pages": self.references.size, "references": references, "counts": self.counts}
        return View.document(self) | more


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BranchPagesView(View):
    """The pages of one branch in one pool, in the order of their positions: arrays ``[pages]``."""

    reading: int
    pool: int
    branch: str
    pages: NDArray[np.int32]
    """-1: a null page."""
    positions: NDArray[np.int64]
    """Positions of the pages' first slots, or of recurrent states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageHolder(Document):
    """One reference to a page by a branch."""

    branch: str
    start: int
    """Position of the first slot, or of a recurrent state."""
    stop: int
    """One past the last position with a row in it, or the position of a recurrent state."""
    role: str | None = None
    """For a recurrent state: "present", "checkpoint", "ring" or "node"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView(View):
    """One page."""

    reading: int
    pool: int
    page: int
    references: int
    owner: str
    eviction: int
    holders: tuple[PageHolder, ...]
    others: int
    """Number of references by branches that are not shown."""
    tokens: tuple[ShownToken, ...]
    """The tokens of its rows, from the first holder; for a recurrent state the last ones before it.
    Rows of encoders have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView(Document):
    """One tier outside of the pool."""

    kind: str
    """``memory``, ``disk``, ``redis`` or ``object``."""
    label: str | None
    """Its location; None: hidden from the viewer."""
    durable: bool
    objects: int | None
    """None: unknown."""
    num_bytes: int | None
    capacity: int | None
    """Most bytes that it may hold; None: it knows no limit."""
    pinned: int | None
    """Bytes of pinned objects, which are never evicted."""
    resting: float = 0.0
    """Seconds for which it is skipped, because it failed."""

    def document(self) -> dict[str, Any]:
        """See ``Document``; ``num_bytes`` is called ``bytes``."""
        found = Document.document(self)
        return {**found, "bytes": found.pop("num_bytes")}


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersView(View):
    """All tiers, the nearest first."""

    tiers: tuple[TierView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSummary(Document):
    """A pool in the overview."""

    kind: Literal["tokens", "encoder", "states"]
    layers: tuple[int, ...]
    window: int | None
    num_pages: int
    page_tokens: int
    """Positions of a page; 1 for a recurrent state."""
    page_bytes: int
    counts: Mapping[str, int]
    """Numbers of pages by owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewView(View):
    """A model, its memory, and how busy it is."""

    source: Source
    reading: int
    """Number of the reading of the state: documents of one reading agree with each other."""
    time: float
    """Time of the reading, in Unix time."""
    model: Mapping[str, Any]
    """``name``, ``max_length`` (tokens), ``vocab_size``, ``dtype`` of the state, ``tokenizer``."""
    layers: tuple[Mapping[str, Any], ...]
    """``id``, ``kind``, ``pool`` and, if it has them, ``heads``, ``kv_heads``, ``window``."""
    pools: tuple[PoolSummary, ...]
    tiers: tuple[str, ...]
    """Kinds of the tiers, the nearest first."""
    use: Mapping[str, int]
    """Numbers of pages of all pools: ``total`` and by owner."""
    requests: Mapping[str, int]
    """``running`` and ``waiting``, of all users."""
    branches: Mapping[str, int]
    """Numbers of branches by kind, of all users; without commits."""
    started: float
    """Start of serving, in Unix time; it differs for each process."""
    allow_edits: bool = False
    keys: bool = False
    """Whether other users' branches are hidden."""
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StateFileView(Pictured):
    """A state file's content, with verified checksums."""

    facts: Mapping[str, Any]
    """As printed by ``quire inspect --json``."""

    def document(self) -> dict[str, Any]:
        """Return ``facts`` in JSON types."""
        return dict(self.facts)
