"""``Viewer``: which branches are shown to a reader, and under which names. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from quire.adapters.keys import OwnedSalt, salt_of
from quire_inspector.views.state_reading import ReadBranch


@dataclass(frozen=True, kw_only=True)
class Viewer:
    """A reader of the views. Equal viewers see the same."""

    owner: str | None = None
    """Only branches of this owner are shown; None: all are."""
    sessions: Mapping[int, str] = field(default_factory=dict)
    """Ids that sessions have outside of the process, by number. All of them are shown."""
    shares_prefixes: bool = False
    """Whether requests and cached prefixes without an owner are shown, too."""

    @property
    def sees_all(self) -> bool:
        """Return whether all branches are shown."""
        return self.owner is None

    def sees(self, branch: ReadBranch) -> bool:
        """Return whether a branch is shown: its name, its tokens and that it holds its pages."""
        if self.owner is None or branch.number in self.sessions:
            return True
        owner = owner_of_branch(branch)
        if owner is None:
            return self.shares_prefixes and branch.kind in ("request", "cached")
        return owner == self.owner

    def id_of(self, branch: ReadBranch) -> str:
        """Return the id of a branch for this viewer."""
        given = None if branch.number is None else self.sessions.get(branch.number)
        return branch.id if given is None else f"session:{given}"

    @cached_property
    def digest(self) -> str:
        """Return a digest that is equal for viewers who see the same."""
        told = repr((self.owner, sorted(self.sessions.items()), self.shares_prefixes))
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


EVERYBODY = Viewer()
"""Sees all branches."""


def owner_of_branch(branch: ReadBranch) -> str | None:
    """Return the owner of a branch's salt; None: it has none."""
    salt = salt_of(branch.key)
    given = salt[1] if isinstance(salt, tuple) and len(salt) == 2 else None
    return given.owner if isinstance(given, OwnedSalt) else None
