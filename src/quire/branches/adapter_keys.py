"""Which adapters a sequence was run under, as keys of the prefix cache say it, and as sessions name it.

Ids are the runner's and never given twice; fingerprints say what an adapter computes. So a sequence is found again by
fingerprints: another adapter under the same name has another one, and the same adapter, loaded again, the same. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from quire.errors import NotFound
from quire.runner.adapter_history import FingerprintRuns, fingerprint_runs
from quire.types import AdapterRuns

NO_SALT = ("", None)
"""The salt of prompts and sessions that share prefixes with all others that give no ``cache_salt``."""


@dataclass(frozen=True, slots=True)
class AdapterKey:
    """The key of sequences that adapters had a part in."""

    salt: Hashable
    runs: FingerprintRuns

    def names(self, fingerprint: str) -> bool:
        """Whether some token was run under this adapter."""
        return any(found == fingerprint for _, found in self.runs)


def prefix_key(salt: Hashable, runs: AdapterRuns, fingerprint_of: Callable[[int], str]) -> Hashable:
    """What may share a prefix: equal keys, equal K and V of equal tokens. Without adapters it is ``salt`` itself."""
    return AdapterKey(salt, fingerprint_runs(runs, fingerprint_of)) if runs.ids else salt


def runs_of_session(runs: AdapterRuns, length: int, adapter: int | None) -> AdapterRuns:
    """The history of a session of ``length`` tokens that goes on under ``adapter``: its last token, which is run once more for
    the logits after it, belongs to ``adapter`` too, and the tokens before stay as they were run."""
    return runs.cut(length).then(max(length - 1, 0), adapter)


class AdapterNames(Protocol):
    """The names that users know adapters by."""

    def name_of(self, adapter: int) -> str | None:
        """Its name; None if it has none any more."""
        ...

    def id_of(self, name: str) -> int:
        """``NotFound`` if none is loaded under this name."""
        ...


class Fingerprints:
    """Names where nobody has given any: the fingerprints. Both callables are those of the runner's adapters."""

    def __init__(self, fingerprint_of: Callable[[int], str], find: Callable[[str], int | None]) -> None:
        self._fingerprint_of = fingerprint_of
        self._find = find

    def name_of(self, adapter: int) -> str | None:
        """See ``AdapterNames``."""
        return self._fingerprint_of(adapter)

    def id_of(self, name: str) -> int:
        """See ``AdapterNames``."""
        found = self._find(name)
        if found is None:
            raise NotFound(f"no adapter with fingerprint {name!r} is loaded; load it, or give None for the base model")
        return found


def users(requests: int, sessions: int) -> str:
    """How many use something, in words; empty if nobody does."""
    counted = [
        f"{count} {noun}{'s' if count > 1 else ''}"
        for count, noun in ((requests, "request"), (sessions, "session"))
        if count
    ]
    if not counted:
        return ""
    return f"{' and '.join(counted)} {'use' if requests + sessions > 1 else 'uses'} it"
