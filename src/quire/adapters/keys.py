"""The adapters of a sequence: in keys of the prefix cache, and by their names in sessions. No
torch.

Ids are the runner's and never reused; fingerprints identify the computation of an adapter. A
sequence is found again by fingerprints: another adapter of the same name has another fingerprint,
and the same adapter, loaded again, has the same one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from quire.adapters.history import FingerprintRuns, fingerprint_runs
from quire.base.types import AdapterRuns

NO_SALT = ("", None)
"""The salt of prompts and sessions without ``cache_salt``, which share prefixes with each other."""


class OwnedSalt(str):
    """The ``cache_salt`` of a server's client. All salts of one API key have one owner, who may see
    reports about prompts under any of its salts."""

    owner: str
    """The digest of the API key; its fixed length makes each pair give a different salt."""
    given: str | None
    """The client's own salt."""

    def __new__(cls, given: str | None, owner: str) -> Self:
        made = super().__new__(cls, owner if given is None else f"{owner} {given}")
        made.given, made.owner = given, owner
        return made


def written_key(key: tuple[str, str | None]) -> list[str | None]:
    """Return the key of a session in the form of records, without its owner."""
    owner, salt = key
    return ["owned", salt.given] if isinstance(salt, OwnedSalt) else [owner, salt]


def read_key(written: Sequence[str | None], owner: str) -> Hashable:
    """Return the key of a ``written_key``, for its owner."""
    kind, salt = written
    return (owner, OwnedSalt(salt, owner)) if kind == "owned" else (kind, salt)


@dataclass(frozen=True, slots=True)
class AdapterKey:
    """The key of sequences of which some tokens ran under adapters, or of exact requests."""

    salt: Hashable
    runs: FingerprintRuns
    exact: bool = False
    """Whether all of the state is that of windows (``engine.exact``)."""

    @property
    def last(self) -> str | None:
        """The adapter of the last tokens; None: the base model, as in an exact request's key."""
        return self.runs[-1][1] if self.runs else None

    def names(self, fingerprint: str) -> bool:
        """Return True if some token was run under this adapter."""
        return any(found == fingerprint for _, found in self.runs)


def prefix_key(salt: Hashable, runs: AdapterRuns, fingerprint_of: Callable[[int], str]) -> Hashable:
    """Return a prefix's key: ``salt`` without adapters. Equal keys mean equal K and V of equal
    tokens."""
    return AdapterKey(salt, fingerprint_runs(runs, fingerprint_of)) if runs.ids else salt


PRIVATE = "private"
"""The first part of the salts of branches that share with no other branch."""


def private_salt() -> Hashable:
    """Return a unique salt, also among other processes."""
    return (PRIVATE, secrets.token_hex(16))


def is_private(salt: Hashable) -> bool:
    """Return True if a salt belongs to a single branch."""
    return isinstance(salt, tuple) and salt[:1] == (PRIVATE,)


def salt_of(key: Hashable) -> Hashable:
    """Return the salt of a prefix's key, its owner included."""
    return key.salt if isinstance(key, AdapterKey) else key


def api_key_of(salt: Hashable) -> str:
    """Return the digest of the API key in a salt, "" without one."""
    salt = salt[-1] if isinstance(salt, tuple) else salt
    return salt.owner if isinstance(salt, OwnedSalt) else ""


def owner_of(key: Hashable) -> Hashable:
    """Return the owner of prefixes with this key: an API key's digest, or "" without one."""
    salt = salt_of(key)
    return salt[0] if isinstance(salt, tuple) else salt


def runs_of_session(runs: AdapterRuns, length: int, adapter: int | None) -> AdapterRuns:
    """Return the history of a session of ``length`` tokens that continues under ``adapter``.

    Its last token runs again for the logits after it, and so belongs to ``adapter`` too; earlier
    tokens keep their adapters.
    """
    return runs.cut(length).then(max(length - 1, 0), adapter)


class AdapterNames(Protocol):
    """The names by which users know adapters."""

    def name_of(self, adapter: int) -> str | None:
        """Return its name; None if it has none any more."""
        ...

    def id_of(self, name: str) -> int:
        """Return the id of the adapter with a name; ``NotFound`` if none is loaded under it."""
        ...

    def owner_of(self, adapter: int) -> str:
        """Return the digest of the API key that named the adapter; "" if the name is for all."""
        ...


def users(requests: int, sessions: int) -> str:
    """Return the users of a thing in words, such as "2 requests and 1 session use it"; empty
    without any."""
    counted = [
        f"{count} {noun}{'s' if count > 1 else ''}"
        for count, noun in ((requests, "request"), (sessions, "session"))
        if count
    ]
    if not counted:
        return ""
    return f"{' and '.join(counted)} {'use' if requests + sessions > 1 else 'uses'} it"
