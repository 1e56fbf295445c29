"""Views: what readers found in a running LLM, in a state file or in a store, as frozen values.

Each has a ``document()``, which is what an endpoint of ``/v1/state`` answers and what pictures are
drawn from: dictionaries, lists, strings and numbers only (``docs/inspector.md``). No torch.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.display import Pictured

FORMAT = 1
"""The format of all documents. It grows when a field changes its meaning or goes away."""
MOST_TEXT = 80
"""Characters of ``HistoryNode.head`` and ``tail``, at most."""

BranchKind: TypeAlias = Literal["session", "request", "cached", "cache", "commit", "other"]
Source: TypeAlias = Literal["server", "file", "store"]

OWNER_NAMES = ("free", "evictable", "held", "pinned")
"""Owners of pages, by the numbers in ``PoolView.owner``; ``engine.page_use`` describes them."""
NOBODY, SOMEBODY_ELSE = -1, -2
"""Holders of pages that no branch of the view holds: nobody does, or one that is not shown."""


def packed(array: NDArray[Any], kind: str) -> str:
    """Return an array as base64 of little-endian values; ``kind``: "u1", "u2", "i4" or "f4". Values
    beyond the range of an integer kind become its nearest one."""
    if kind[0] in "ui":
        bounds = np.iinfo(kind)
        array = np.clip(array, bounds.min, bounds.max)
    return base64.b64encode(np.ascontiguousarray(array, dtype=f"<{kind}").tobytes()).decode("ascii")


def unpacked(text: str, kind: str) -> NDArray[Any]:
    """Return the array of what ``packed`` returned."""
    return np.frombuffer(base64.b64decode(text), dtype=f"<{kind}")


def ranges_of(parts: Sequence[range]) -> list[list[int]]:
    """Return half-open ranges as pairs."""
    return [[part.start, part.stop] for part in parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRows:
    """The positions whose rows the layers of one pool hold of a branch."""

    pool: int
    ranges: tuple[range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchView:
    """What holds a sequence, or would go on from one."""

    id: str
    """Its kind, a colon, and a name or a number: the same while it lives."""
    kind: BranchKind
    name: str | None = None
    """What its user calls it; of a commit the branch that stands there, else its message."""
    num_tokens: int
    computed: int
    """Tokens whose state is in the pool."""
    busy: bool = False
    """Whether a call works on it."""
    pinned: bool = False
    modified: bool = False
    exact: bool = True
    adapter: str | None = None
    """The adapter of its next token, by name, or by fingerprint if it has none here."""
    pages: int = 0
    """Pages of tokens and of encoder rows that it holds, null pages left out."""
    shared_pages: int = 0
    """Those of them that other sequences hold too."""
    window: tuple[int, int] | None = None
    """(window, sink), in tokens, of what it keeps; None: it keeps all."""
    last_commit: str | None = None
    """The commit that it goes on from; of a commit the one before it."""
    reachable: tuple[range, ...] = ()
    """The positions to which it can be rewound without running tokens again."""
    checkpoints: tuple[int, ...] = ()
    """The positions of its recurrent states, ascending, the present one among them."""
    held: tuple[HeldRows, ...] = ()

    def document(self) -> dict[str, Any]:
        """See the module."""
        return {
            "id": self.id,
            "kind": self.kind,
            "name": self.name,
            "num_tokens": self.num_tokens,
            "computed": self.computed,
            "busy": self.busy,
            "pinned": self.pinned,
            "modified": self.modified,
            "exact": self.exact,
            "adapter": self.adapter,
            "pages": self.pages,
            "shared_pages": self.shared_pages,
            "window": None if self.window is None else list(self.window),
            "last_commit": self.last_commit,
            "reachable": ranges_of(self.reachable),
            "checkpoints": list(self.checkpoints),
            "held": [{"pool": one.pool, "ranges": ranges_of(one.ranges)} for one in self.held],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryNode:
    """A run of tokens, from ``start`` to ``end``, that all branches at and below it have."""

    id: str
    """The same while histories part here, also if the run grows at its end."""
    parent: str | None
    """The node before; None: it is the root of a tree."""
    start: int
    end: int
    branches: tuple[str, ...] = ()
    """Ids of the branches that end here."""
    head: str | None = None
    """The text of its first tokens; None without a tokenizer."""
    tail: str | None = None
    """The text of its last tokens, where ``head`` does not reach them; else ""."""
    key: Mapping[str, str | None] | None = None
    """Of a root: what its tree does not share with others, ``adapter`` and ``salt``."""

    def document(self) -> dict[str, Any]:
        """See the module."""
        return {
            "id": self.id,
            "parent": self.parent,
            "start": self.start,
            "end": self.end,
            "branches": list(self.branches),
            "head": self.head,
            "tail": self.tail,
            "key": None if self.key is None else dict(self.key),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryView(Pictured):
    """All branches as trees over tokens: parents come before what is below them."""

    reading: int
    branches: tuple[BranchView, ...]
    nodes: tuple[HistoryNode, ...]

    def document(self) -> dict[str, Any]:
        """See the module."""
        return {
            "format": FORMAT,
            "reading": self.reading,
            "branches": [one.document() for one in self.branches],
            "nodes": [one.document() for one in self.nodes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """One token of a branch."""

    position: int
    id: int
    """-1 to -4 stand for an embedding, or a token that is not known."""
    text: str | None
    """None without a tokenizer, and of an embedding."""

    def document(self) -> dict[str, Any]:
        """See the module."""
        return {"position": self.position, "id": self.id, "text": self.text}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextView:
    """Tokens of one branch."""

    branch: str
    num_tokens: int
    """Of the whole branch."""
    tokens: tuple[ShownToken, ...]

    def document(self) -> dict[str, Any]:
        """See the module."""
        return {
            "format": FORMAT,
            "branch": self.branch,
            "num_tokens": self.num_tokens,
            "tokens": [one.document() for one in self.tokens],
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolView(Pictured):
    """The pages of one pool. All arrays are ``[pages]``."""

    reading: int
    pool: int
    references: NDArray[np.int32]
    """How many entries of page tables name each page."""
    owner: NDArray[np.uint8]
    """An index into ``OWNER_NAMES``."""
    holder: NDArray[np.int32]
    """An index into ``branches``, ``NOBODY`` or ``SOMEBODY_ELSE``."""
    position: NDArray[np.int32]
    """The position of the page's first slot for that holder; -1 without one."""
    eviction: NDArray[np.int32]
    """When the page is given up, if nothing is used meanwhile: 0 goes first, -1 never."""
    branches: tuple[str, ...]
    """Ids of the branches that hold pages here."""

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of pages by owner."""
        found = np.bincount(self.owner, minlength=len(OWNER_NAMES))
        return dict(zip(OWNER_NAMES, found.tolist(), strict=True))

    def document(self) -> dict[str, Any]:
        """See the module."""
        return {
            "format": FORMAT,
            "reading": self.reading,
            "pool": self.pool,
            "num_pages": self.references.size,
            "references": packed(self.references, "u2"),
            "owner": packed(self.owner, "u1"),
            "holder": packed(self.holder, "i4"),
            "position": packed(self.position, "i4"),
            "eviction": packed(self.eviction, "i4"),
            "branches": list(self.branches),
            "counts": self.counts,
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BranchPagesView:
    """The pages of one branch in one pool, in the order of their positions: arrays ``[pages]``."""

    reading: int
    pool: int
    branch: str
    pages: NDArray[np.int32]
    """-1: a null page."""
    positions: NDArray[np.int64]
    """Of each page's first slot; of a recurrent state where it stands."""

    def document(self) -> dict[str, Any]:
        """See the module."""
        return {
            "format": FORMAT,
            "reading": self.reading,
            "pool": self.pool,
            "branch": self.branch,
            "pages": packed(self.pages, "i4"),
            "positions": packed(self.positions, "i4"),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PageHolder:
    """One naming of a page by a branch."""

    branch: str
    start: int
    """Of token pages the position of the first slot; of a recurrent state where it stands."""
    stop: int
    """One past the last position with a row in it; of a recurrent state where it stands."""
    role: str | None = None
    """Of a recurrent state: "present", "checkpoint", "ring" or "node"."""

    def document(self) -> dict[str, Any]:
        """See the module."""
        return {"branch": self.branch, "start": self.start, "stop": self.stop, "role": self.role}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView:
    """One page."""

    reading: int
    pool: int
    page: int
    references: int
    owner: str
    eviction: int
    holders: tuple[PageHolder, ...]
    others: int
    """Namings by branches that are not shown."""
    tokens: tuple[ShownToken, ...]
    """The tokens of its rows, as the first holder has them; of a recurrent state the last ones
    before it. Rows of encoders have none."""

    def document(self) -> dict[str, Any]:
        """See the module."""
        return {
            "format": FORMAT,
            "reading": self.reading,
            "pool": self.pool,
            "page": self.page,
            "references": self.references,
            "owner": self.owner,
            "eviction": self.eviction,
            "holders": [one.document() for one in self.holders],
            "others": self.others,
            "tokens": [one.document() for one in self.tokens],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView:
    """One tier outside of the pool."""

    kind: str
    """``memory``, ``disk``, ``redis`` or ``object``."""
    label: str | None
    """Where it is; None: the viewer need not know."""
    durable: bool
    objects: int | None
    """None: it does not say."""
    num_bytes: int | None
    capacity: int | None
    """Bytes that it may hold; None: it knows no limit."""
    pinned: int | None
    """Bytes that are never given up."""
    resting: float = 0.0
    """Seconds for which it is not asked, since it failed."""

    def document(self) -> dict[str, Any]:
        """See the module."""
        return {
            "kind": self.kind,
            "label": self.label,
            "durable": self.durable,
            "objects": self.objects,
            "bytes": self.num_bytes,
            "capacity": self.capacity,
            "pinned": self.pinned,
            "resting": self.resting,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersView:
    """All tiers, the nearest first."""

    tiers: tuple[TierView, ...]

    def document(self) -> dict[str, Any]:
        """See the module."""
        return {"format": FORMAT, "tiers": [one.document() for one in self.tiers]}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSummary:
    """A pool in the overview."""

    kind: Literal["tokens", "encoder", "states"]
    layers: tuple[int, ...]
    window: int | None
    num_pages: int
    page_tokens: int
    """Positions of a page; 1 of a recurrent state."""
    page_bytes: int
    counts: Mapping[str, int]
    """Numbers of pages by owner."""

    def document(self) -> dict[str, Any]:
        """See the module."""
        return {
            "kind": self.kind,
            "layers": list(self.layers),
            "window": self.window,
            "num_pages": self.num_pages,
            "page_tokens": self.page_tokens,
            "page_bytes": self.page_bytes,
            "counts": dict(self.counts),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewView:
    """A model, its memory, and how busy it is."""

    source: Source
    reading: int
    """Which reading of the state it is of: documents of one reading agree with each other."""
    time: float
    """When that was, in Unix time."""
    model: Mapping[str, Any]
    """``name``, ``max_length`` (tokens), ``vocab_size``, ``dtype`` of the state, ``tokenizer``."""
    layers: tuple[Mapping[str, Any], ...]
    """``id``, ``kind``, ``pool`` and ``heads``, ``kv_heads``, ``window`` where it has such."""
    pools: tuple[PoolSummary, ...]
    tiers: tuple[str, ...]
    """Kinds of the tiers, the nearest first."""
    use: Mapping[str, int]
    """Numbers of pages of all pools: ``total`` and those by owner."""
    requests: Mapping[str, int]
    """``running`` and ``waiting``, of all users."""
    branches: Mapping[str, int]
    """Numbers of branches by kind, of all users; without commits."""
    started: float
    """When the process began to serve, in Unix time: another one has another."""
    allow_edits: bool = False
    keys: bool = False
    """Whether other users' branches are not shown."""
    versions: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """See the module."""
        return {
            "format": FORMAT,
            "source": self.source,
            "reading": self.reading,
            "time": self.time,
            "model": dict(self.model),
            "layers": [dict(one) for one in self.layers],
            "pools": [one.document() for one in self.pools],
            "tiers": list(self.tiers),
            "use": dict(self.use),
            "requests": dict(self.requests),
            "branches": dict(self.branches),
            "started": self.started,
            "allow_edits": self.allow_edits,
            "keys": self.keys,
            "versions": dict(self.versions),
        }
