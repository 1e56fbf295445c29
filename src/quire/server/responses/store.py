"""The responses that clients may continue: each with its whole conversation, as JSON.

Their state is where that of idle sessions is: finished sequences stay in the pool until others need
the pages, and the tiers keep what is given up. So the next turn forks it, and computes what is new.
With a ``--state-dir`` the records are in its journal. Everything here runs on the server's event
loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.base.errors import NotDurable, QuireError
from quire.server.http import logs
from quire.server.http.errors import ApiError
from quire.server.http.events import encode_json
from quire.server.http.settings import ServerSettings
from quire.server.responses.items import Item
from quire.server.sessions.keeper import KeptTexts
from quire.sessions.durable import KeptSessions

PREFIX = "resp_"
"""How the ids of responses begin."""
_KEPT = "response-"
"""How their ids in the journal begin."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    body: dict[str, Any]
    """What ``GET /v1/responses/{id}`` answers."""
    items: list[Item]
    """The conversation that it answered, from the beginning."""
    salt: str | None
    """The request's ``cache_salt``."""


@dataclass(frozen=True, slots=True)
class _Written:
    owner: str
    text: bytes
    outputs: Sequence[str]
    """The ids of the items of its output."""


class Responses:
    """All stored responses of a server. The oldest ones go first if there are too many."""

    def __init__(self, settings: ServerSettings, kept: KeptSessions | None, owners: Iterable[str]) -> None:
        """``kept`` and ``owners`` are as for ``KeptTexts``."""
        self._settings = settings
        self._kept = KeptTexts(kept, owners, _KEPT)
        self._held: dict[str, _Written] = {}
        """The responses by id, the oldest first."""
        self._places: dict[str, str] = {}
        """Which response an item of an output is of."""

    def __len__(self) -> int:
        return len(self._held)

    async def get(self, owner: str, name: str, param: str | None = None) -> StoredResponse:
        """Return a response. Raise ``ApiError`` 404 for unknown, dropped and other owners' ones.
        ``param``: the field that names it."""
        found = self._held.get(name)
        if found is None or found.owner != owner:
            code = "not_found" if param is None else "previous_response_not_found"
            reason = "it was not stored, was deleted, or has given way to newer ones"
            advice = "" if param is None else "; send the whole conversation as input instead"
            raise ApiError(404, f"Response with id {name[:60]!r} not found: {reason}{advice}", param=param, code=code)
        return StoredResponse(**await asyncio.to_thread(json.loads, found.text))

    async def item(self, owner: str, name: str) -> Item | None:
        """Return an item of the output of a stored response; None if there is none."""
        place = self._places.get(name)
        if place is None or self._held[place].owner != owner:
            return None
        stored = await self.get(owner, place)
        return next((item for item in stored.body["output"] if item["id"] == name), None)

    async def put(self, owner: str, stored: StoredResponse) -> None:
        """Store a response, and return when it is durable. Raise ``NotDurable`` if it cannot be
        written; then it is not stored."""
        found = {"body": stored.body, "items": stored.items, "salt": stored.salt}
        text = await asyncio.to_thread(encode_json, found)
        name = stored.body["id"]
        written = self._kept.write(_kept_id(name), owner, text.decode(), stored.body["created_at"])
        # Before the wait: a client that goes away meanwhile does not undo what is written.
        self._hold(name, owner, text, stored.body)
        self._make_room([owner])
        try:
            await written
        except NotDurable:
            self._forget(name)
            raise

    async def delete(self, owner: str, name: str) -> None:
        """Forget a response. Raise as ``get`` does, and ``NotDurable`` if the journal cannot forget
        it; then it stays."""
        await self.get(owner, name)
        await self._kept.forget(_kept_id(name))
        self._forget(name)

    async def resume(self) -> None:
        """Find the responses in the journal whose owners have keys here."""
        for kept_id, owner, text in await self._kept.found():
            name = PREFIX + kept_id.removeprefix(_KEPT)
            self._hold(name, owner, text.encode(), json.loads(text)["body"])
        self._make_room(self._kept.owners)

    def _hold(self, name: str, owner: str, text: bytes, body: dict[str, Any]) -> None:
        outputs = [item["id"] for item in body["output"]]
        self._held[name] = _Written(owner, text, outputs)
        self._places |= dict.fromkeys(outputs, name)

    def _make_room(self, owners: Iterable[str]) -> None:
        """Drop the oldest responses of these owners where they have too many, then the oldest of
        all."""
        settings = self._settings
        for owner in owners:
            most, size = settings.of_one_key(settings.max_responses), settings.of_one_key(settings.max_response_bytes)
            self._drop(owner, most, size)
        self._drop(None, settings.max_responses, int(settings.max_response_bytes))

    def _drop(self, owner: str | None, count: int, size: int) -> None:
        held = {name: len(one.text) for name, one in self._held.items() if owner in (None, one.owner)}
        left, total = len(held), sum(held.values())
        for name, length in held.items():
            if left <= count and total <= size:
                return
            left, total = left - 1, total - length
            self._forget(name)
            self._kept.forget(_kept_id(name)).add_done_callback(_tell)

    def _forget(self, name: str) -> None:
        if (found := self._held.pop(name, None)) is not None:
            for one in found.outputs:
                self._places.pop(one, None)


def _kept_id(name: str) -> str:
    return _KEPT + name.removeprefix(PREFIX)


def _tell(done: Any) -> None:
    error = done.exception()
    if isinstance(error, QuireError):
        logs.event("warning", text=str(error))
