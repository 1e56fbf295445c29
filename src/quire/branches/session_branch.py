"""``SessionBranch``: what a session is between its requests. No torch at run time."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol
from weakref import ref

from quire.base.hints import PinAccount
from quire.base.types import BASE, SeqId
from quire.branches.branch import Branch
from quire.sampling.generations import Generations, cut_generations

if TYPE_CHECKING:
    from torch import Tensor


class Work(Protocol):
    """A request, as its session sees it."""

    @property
    def request_id(self) -> str: ...

    @property
    def branch(self) -> Branch:
        """Return the branch that has the session's sequence until the request ends."""

    @property
    def final_length(self) -> int:
        """Return the number of computed tokens at its end, at most."""


class BranchUser(Protocol):
    """A session, as readers of its branch see it."""

    @property
    def name(self) -> str | None:
        """Return the session's name; None: it has none."""

    @property
    def last_commit(self) -> str | None:
        """Return the id of the commit that the session continues; None: there is none."""


@dataclass(eq=False, slots=True, kw_only=True)
class SessionBranch(Branch):
    """What a session is between its requests."""

    key: Hashable
    """What may share a prefix with it, beside the adapters: the salt."""
    adapter: int | None = None
    """The adapter of its next tokens, as of its last token; None: the base model."""
    pinned: bool = False
    """The state must not be given up."""
    account: PinAccount | None = None
    """The account for which it is pinned."""
    request: Work | None = None
    """The request that works on the sequence now."""
    undo_fork: SeqId | None = None
    """A fork of the sequence before that request, if nothing else brings that state back."""
    successor: SessionBranch | None = None
    """The branch that takes its place once it is computed."""
    logits: Tensor | None = None
    """Logits of the next token, float32 ``[V]``, if they were asked for."""
    number: int = field(default_factory=itertools.count(1).__next__)
    """A number that is unique in the process."""
    user: ref[BranchUser] | None = None
    """The session whose branch it is; None: a call has made it for itself."""
    generations: Generations = ()
    """The generations that made its tokens."""

    def __post_init__(self) -> None:
        self.runs = BASE.then(0, self.adapter)

    @property
    def salt(self) -> Hashable:
        return self.key

    def become(self, other: Branch, length: int, seq: SeqId | None) -> None:
        """See ``Branch``. The generations of these tokens come with them."""
        Branch.become(self, other, length, seq)
        self.generations = cut_generations(other.generations, length) if isinstance(other, SessionBranch) else ()

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens and their generations."""
        self.tokens.truncate(length)
        self.generations = cut_generations(self.generations, length)

    @property
    def present(self) -> Branch:
        """The branch that has the sequence now: of the request, if there is one."""
        return self if self.request is None else self.request.branch

    @property
    def busy(self) -> bool:
        """Return whether some call works on it, or on its successor."""
        return self.request is not None or self.successor is not None

    @property
    def droppable(self) -> bool:
        """Return whether its pages may be taken: no request uses them, it is not pinned, and
        computing gives its state again."""
        return self.seq is not None and not (self.request is not None or self.pinned or self.modified)
