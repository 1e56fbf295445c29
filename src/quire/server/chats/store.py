"""The conversations that the page at ``/`` shows: a document of each, whose tree of messages only
the page reads.

A document has a version, so that two windows do not overwrite each other. With a ``--state-dir``
documents are in its journal. Everything here runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.base.errors import NotDurable
from quire.server.http.errors import ApiError, bad_field
from quire.server.http.events import encode_json
from quire.server.http.settings import ServerSettings
from quire.server.sessions.keeper import KeptTexts
from quire.sessions.durable import KeptSessions

PREFIX = "chat-"
"""How the ids of conversations begin, over HTTP and in the journal."""
AROUND = 120
"""Characters of a message around a word that was searched for."""
_ID = re.compile(r"chat-[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredChat:
    """One version of a conversation."""

    id: str
    owner: str
    title: str
    version: int
    """1 for the first."""
    updated: float
    """Unix time."""
    text: bytes
    """The document as JSON."""
    pinned: bool = False
    """Whether the page lists it before the others."""

    def summary(self) -> dict[str, Any]:
        """Return the entry of a list."""
        head = {"id": self.id, "object": "chat", "title": self.title}
        return {
            **head,
            "version": self.version,
            "updated": self.updated,
            "bytes": len(self.text),
            "pinned": self.pinned,
        }


class Chats:
    """All conversations of a server."""

    def __init__(self, settings: ServerSettings, kept: KeptSessions | None, owners: Iterable[str]) -> None:
        """``kept`` and ``owners`` are as for ``KeptTexts``."""
        self._settings = settings
        self._kept = KeptTexts(kept, owners, PREFIX)
        self._held: dict[str, StoredChat] = {}

    def of(self, owner: str) -> list[StoredChat]:
        """Return all conversations of an owner, the latest first."""
        own = [one for one in self._held.values() if one.owner == owner]
        return sorted(own, key=lambda one: one.updated, reverse=True)

    async def search(self, owner: str, words: str) -> list[dict[str, Any]]:
        """Return the summaries of an owner's conversations that have all words in the title and in
        messages, the latest first, each with its first message that has one of them as
        ``found``."""
        wanted = words.casefold().split()
        return await asyncio.to_thread(lambda: [one for chat in self.of(owner) for one in _matching(chat, wanted)])

    def get(self, owner: str, name: str) -> StoredChat:
        """Return a conversation. Raise ``ApiError`` 404 for an unknown one or another owner's."""
        found = self._held.get(name)
        if found is None or found.owner != owner:
            raise ApiError(404, f"there is no conversation {name[:60]!r}; it may have been deleted", code="not_found")
        return found

    async def put(
        self, owner: str, name: str, title: str, document: dict[str, Any], version: int, *, pinned: bool = False
    ) -> StoredChat:
        """Store a conversation that was read as ``version`` (0: it is new), and return it when it
        is durable. Raise ``ApiError`` 400 for a bad id, 404 for one that was deleted, 409 if it was
        changed meanwhile, 429 beyond the limits; ``NotDurable`` if it cannot be written, and then
        it is as it was."""
        if not _ID.fullmatch(name):
            raise bad_field("id", f'an id is "{PREFIX}" and 32 hexadecimal digits; got {name[:60]!r}')
        text = await asyncio.to_thread(encode_json, document)
        before = self._held.get(name)
        if before is not None and before.owner != owner:
            raise bad_field("id", "this id is taken; make another one")
        if before is None and version:
            self.get(owner, name)
        present = 0 if before is None else before.version
        if present != version:
            message = f"the conversation was changed meanwhile: its version is {present}, not {version}; read it again"
            raise ApiError(409, message, param="version", code="chat_changed")
        self._check_room(owner, before, len(text))
        head: dict[str, Any] = {"title": title, "version": version + 1, "updated": time.time(), "pinned": pinned}
        self._held[name] = made = StoredChat(id=name, owner=owner, text=text, **head)
        try:
            await self._kept.write(name, owner, f"{json.dumps(head)}\n{text.decode()}", int(made.updated))
        except NotDurable:
            if self._held.get(name) is made:
                if before is None:
                    del self._held[name]
                else:
                    self._held[name] = before
            raise
        return made

    async def delete(self, owner: str, name: str) -> None:
        """Forget a conversation. Raise as ``get`` does, and ``NotDurable`` if the journal cannot
        forget it; then it stays."""
        before = self.get(owner, name)
        del self._held[name]
        try:
            await self._kept.forget(name)
        except NotDurable:
            self._held[name] = before
            raise

    async def resume(self) -> None:
        """Find the conversations in the journal whose owners have keys here."""
        for name, owner, kept in await self._kept.found():
            head, _, text = kept.partition("\n")
            self._held[name] = StoredChat(id=name, owner=owner, text=text.encode(), **json.loads(head))

    def _check_room(self, owner: str, before: StoredChat | None, size: int) -> None:
        settings, own = self._settings, self.of(owner)
        old = 0 if before is None else len(before.text)
        advice = "delete some conversations, or export them first"
        most = settings.of_one_key(settings.max_chats)
        if before is None and len(own) >= most:
            message = f"this server holds {most} conversations of yours at most; {advice}"
            raise ApiError(429, message, code="storage_limit")
        total = sum(len(one.text) for one in own)
        most = settings.of_one_key(settings.max_chat_bytes)
        if total - old + size > most:
            message = (
                f"the conversation's {size} bytes beside {total - old} of others are more than {most} bytes; {advice}"
            )
            raise ApiError(429, message, code="storage_limit")


def _matching(chat: StoredChat, words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the summary of a conversation in which all words occur."""
    nodes = json.loads(chat.text).get("nodes")
    listed = list(nodes.values()) if isinstance(nodes, dict) else []
    texts = [one["content"] for one in listed if isinstance(one, dict) and isinstance(one.get("content"), str)]
    whole = "\n".join((chat.title, *texts)).casefold()
    if all(word in whole for word in words):
        first = next((text for text in texts if any(word in text.casefold() for word in words)), None)
        yield {**chat.summary(), "found": None if first is None else _around(first, words)}


def _around(text: str, words: Sequence[str]) -> str:
    """Return a piece of a text around the first of the words in it."""
    # Case may change lengths, so the place is about right in some scripts.
    at = max(0, min(place for word in words if (place := text.casefold().find(word)) >= 0) - AROUND // 3)
    piece = " ".join(text[at : at + AROUND].split())
    return f"{'…' if at else ''}{piece}{'…' if at + AROUND < len(text) else ''}"
