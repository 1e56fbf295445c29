"""The adapters of a sequence: in keys of the prefix cache, and as sessions name them. No torch.

Ids are the runner's and never given twice; fingerprints say what an adapter computes. A sequence is
found again by fingerprints: another adapter under the same name has another one, and the same
adapter, loaded again, the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from quire.errors import NotFound
from quire.runner.adapter_history import FingerprintRuns, fingerprint_runs
from quire.types import AdapterRuns

NO_SALT = ("", None)
"""The salt of prompts and sessions without ``cache_salt``, which share prefixes with each other."""


class OwnedSalt(str):
    """The ``cache_salt`` of a server's client. All salts of one API key have one owner, who may be
    told what it asked under another of its salts."""

    owner: str
    """Of fixed length, so that no two pairs give the same salt."""
    given: str | None
    """The client's own salt."""

    def __new__(cls, given: str | None, owner: str) -> Self:
        made = super().__new__(cls, owner if given is None else f"{owner} {given}")
        made.given, made.owner = given, owner
        return made


def written_key(key: tuple[str, str | None]) -> list[str | None]:
    """Return the key of a session as records have it, without its owner."""
    owner, salt = key
    return ["owned", salt.given] if isinstance(salt, OwnedSalt) else [owner, salt]


def read_key(written: Sequence[str | None], owner: str) -> Hashable:
    """Return the key of what ``written_key`` gave, for its owner."""
    kind, salt = written
    return (owner, OwnedSalt(salt, owner)) if kind == "owned" else (kind, salt)


@dataclass(frozen=True, slots=True)
class AdapterKey:
    """The key of sequences that adapters had a part in."""

    salt: Hashable
    runs: FingerprintRuns

    def names(self, fingerprint: str) -> bool:
        """Return whether some token was run under this adapter."""
        return any(found == fingerprint for _, found in self.runs)


def prefix_key(salt: Hashable, runs: AdapterRuns, fingerprint_of: Callable[[int], str]) -> Hashable:
    """Return a prefix's key: equal keys, equal K and V of equal tokens; no adapters: ``salt``."""
    return AdapterKey(salt, fingerprint_runs(runs, fingerprint_of)) if runs.ids else salt


PRIVATE = "private"
"""The first part of the salts of branches that share with no other."""


def private_salt() -> Hashable:
    """Return a salt that no other branch has, in this process or another."""
    return (PRIVATE, secrets.token_hex(16))


def is_private(salt: Hashable) -> bool:
    """Return whether a salt is of one branch alone."""
    return isinstance(salt, tuple) and salt[:1] == (PRIVATE,)


def salt_of(key: Hashable) -> Hashable:
    """Return the salt of a prefix's key, its owner included."""
    return key.salt if isinstance(key, AdapterKey) else key


def api_key_of(salt: Hashable) -> str:
    """Return the digest of the API key in a salt, "" without one."""
    salt = salt[-1] if isinstance(salt, tuple) else salt
    return salt.owner if isinstance(salt, OwnedSalt) else ""


def owner_of(key: Hashable) -> Hashable:
    """Return whose prefixes have this key: an API key's digest, or "" without one."""
    salt = salt_of(key)
    return salt[0] if isinstance(salt, tuple) else salt


def runs_of_session(runs: AdapterRuns, length: int, adapter: int | None) -> AdapterRuns:
    """Return the history of a session of ``length`` tokens that goes on under ``adapter``.

    Its last token, which is run once more for the logits after it, belongs to ``adapter`` too; the
    tokens before it stay as they were run.
    """
    return runs.cut(length).then(max(length - 1, 0), adapter)


class AdapterNames(Protocol):
    """The names that users know adapters by."""

    def name_of(self, adapter: int) -> str | None:
        """Return its name; None if it has none any more."""
        ...

    def id_of(self, name: str) -> int:
        """Return the id of the adapter with a name; ``NotFound`` if none is loaded under it."""
        ...

    def owner_of(self, adapter: int) -> str:
        """Return the digest of the API key whose name for it that is, "" if it is for all."""
        ...


class Fingerprints:
    """Fingerprints as names; both callables are those of the runner's adapters."""

    def __init__(self, fingerprint_of: Callable[[int], str], find: Callable[[str], int | None]) -> None:
        self._fingerprint_of = fingerprint_of
        self._find = find

    def name_of(self, adapter: int) -> str | None:
        """See ``AdapterNames``."""
        return self._fingerprint_of(adapter)

    def owner_of(self, adapter: int) -> str:
        """See ``AdapterNames``."""
        return ""

    def id_of(self, name: str) -> int:
        """See ``AdapterNames``."""
        found = self._find(name)
        if found is None:
            raise NotFound(f"no adapter with fingerprint {name!r} is loaded; load it, or give None for the base model")
        return found


def users(requests: int, sessions: int) -> str:
    """Return, in words, how many use something; empty if none does."""
    counted = [
        f"{count} {noun}{'s' if count > 1 else ''}"
        for count, noun in ((requests, "request"), (sessions, "session"))
        if count
    ]
    if not counted:
        return ""
    return f"{' and '.join(counted)} {'use' if requests + sessions > 1 else 'uses'} it"
