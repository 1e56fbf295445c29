"""Adapters by the names under which users load them.

A name stands for an id as long as it is loaded. Loaded again, from any files, it stands for another
id; state computed under the old one is known by its fingerprint and never taken for the new one's.

A name belongs to the API key on whose behalf it was loaded (``base.caller_context``), and is there
for calls of that key alone. Names that a program loads itself are there for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.base.caller_context import caller
from quire.base.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from quire.contracts.adapters import Adapter
from quire.engine.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterInfo:
    name: str
    path: str
    """Where it was read from."""
    rank: int
    """The largest of its updates; 0: it has tables of its own only."""
    num_bytes: int
    """On the host."""
    fingerprint: str
    resident: bool
    """Whether it is on the device now; if not, its next use brings it there."""
    owner: str = ""
    """Digest of the API key that it belongs to; empty: of none."""


class NamedAdapters:
    """The names of one engine's adapters. ``AdapterNames`` of its sessions."""

    def __init__(self, engine: Engine, read: Callable[[Path], Adapter]) -> None:
        """Watch the engine's adapters; ``read`` makes one of a directory, with all checks."""
        self._engine = engine
        engine.timeline.adapter_name = self.name_of
        self._read = read
        self._pool = engine.runner.adapters
        self._ids: dict[tuple[str, str], int] = {}
        """By owner and name."""
        self._pool.guards += [self._why_named, engine.users_of]
        self._pool.is_named = lambda adapter_id: adapter_id in self._ids.values()

    def load(self, name: str, path: Path) -> AdapterInfo:
        """Read an adapter and keep it under a name; ``AlreadyExists``: the name is taken.
        Everything is checked before anything is kept."""
        self._check_name(name)
        with self._engine.lock:
            self._require_free(name)
        # The file is read while other requests run.
        adapter = self._read(path)
        with self._engine.lock:
            if self._engine.closed:
                raise FailedPrecondition("load_adapter: the LLM is closed; make a new one")
            self._require_free(name)
            key = (caller.get().owner, name)
            self._ids[key] = self._pool.load(adapter)
            return self._info(key)

    def unload(self, name: str) -> None:
        """Forget an adapter and the state cached under it. ``FailedPrecondition`` while requests or
        sessions use it."""
        with self._engine.lock:
            adapter_id = self.id_of(name)
            key = self._find(name)
            if key is not None and key[0] != caller.get().owner:
                raise FailedPrecondition(f"adapter {name!r} belongs to the server, and no API key may unload it")
            if users := self._engine.users_of(adapter_id):
                raise FailedPrecondition(
                    f"adapter {name!r} is in use: {users}; wait for them, or cancel and close them"
                )
            fingerprint = self._pool.get(adapter_id).fingerprint
            names = self._ids
            # The name itself is no reason to keep it now.
            self._ids = {other: found for other, found in names.items() if other != key}
            try:
                self._pool.unload(adapter_id)
            except BaseException:
                if adapter_id in self._pool.ids:
                    self._ids = names
                raise
            if self._pool.find(fingerprint) is None:
                self._engine.forget_adapter(fingerprint)

    def id_of(self, name: str) -> int:
        """Return a name's adapter id; ``NotFound`` if it is not loaded."""
        self._check_name(name)
        key = self._find(name)
        if key is None:
            known = ", ".join(map(repr, self.infos())) or "none"
            raise NotFound(f"adapter {name!r} is not loaded; loaded are: {known}; load_adapter loads one")
        return self._ids[key]

    def name_of(self, adapter_id: int) -> str | None:
        """Return an id's name; its fingerprint if it has none; None if it is not loaded."""
        found = next((name for (_, name), found in self._ids.items() if found == adapter_id), None)
        if found is None and adapter_id in self._pool.ids:
            return self._pool.get(adapter_id).fingerprint
        return found

    def owner_of(self, adapter_id: int) -> str:
        return next((owner for (owner, _), found in self._ids.items() if found == adapter_id), "")

    def infos(self) -> Mapping[str, AdapterInfo]:
        """Return the adapters that the caller may use by their names, in order of loading."""
        with self._engine.lock:
            return {key[1]: self._info(key) for key in self._ids if key == self._find(key[1])}

    def _find(self, name: str) -> tuple[str, str] | None:
        """Return the key of a name for the caller: of its own adapter, or of an adapter for all."""
        return next((key for key in ((caller.get().owner, name), ("", name)) if key in self._ids), None)

    def _info(self, key: tuple[str, str]) -> AdapterInfo:
        adapter_id = self._ids[key]
        adapter = self._pool.get(adapter_id)
        return AdapterInfo(
            name=key[1],
            path=adapter.source,
            rank=adapter.rank,
            num_bytes=adapter.nbytes,
            fingerprint=adapter.fingerprint,
            resident=adapter_id in self._pool.resident,
            owner=key[0],
        )

    def _require_free(self, name: str) -> None:
        if self._find(name) is not None:
            raise AlreadyExists(f"adapter {name!r} is loaded already; unload it first, or take another name")

    def _why_named(self, adapter_id: int) -> str:
        name = next((name for (_, name), found in self._ids.items() if found == adapter_id), None)
        return "" if name is None else f"it is loaded under the name {name!r}, and unload_adapter({name!r}) unloads it"

    @staticmethod
    def _check_name(name: object) -> None:
        if not isinstance(name, str) or not name.strip():
            raise InvalidArgument(f"an adapter's name must be a non-empty string, got {name!r}")
