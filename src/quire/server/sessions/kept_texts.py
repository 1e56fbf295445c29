"""Texts of clients in the journal of ``--state-dir``: stored responses, and chats of the page."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import numpy as np

from quire.server.sessions.keeper import hidden, owner_of
from quire.sessions.durable import KeptSessions
from quire.store.journal import End, SessionRecord


class KeptTexts:
    """The texts of one kind. Without a journal they end with the process."""

    def __init__(self, kept: KeptSessions | None, owners: Iterable[str], prefix: str) -> None:
        """``kept``: the journal, None without one. ``owners``: digests of the API keys. ``prefix``:
        how the ids in the journal begin."""
        self._kept = kept
        self._prefix = prefix
        self.owners = tuple(owners)

    def write(self, name: str, owner: str, text: str, created: int) -> asyncio.Future[None]:
        """Write a text, in place of the one of this id. The future ends when it is durable, or with
        ``NotDurable``."""
        return self._written(
            SessionRecord(
                id=name,
                model={},
                tokens=np.array([], dtype=np.int64),
                owner=hidden(owner),
                created=created,
                chat=text,
            )
        )

    def forget(self, name: str) -> asyncio.Future[None]:
        """Forget a text. The future ends as that of ``write``."""
        return self._written(End(name))

    def _written(self, entry: SessionRecord | End) -> asyncio.Future[None]:
        if self._kept is not None:
            return asyncio.shield(asyncio.wrap_future(self._kept.writer.write(entry)))
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def found(self) -> list[tuple[str, str, str]]:
        """Return id, owner and text of those whose owners have keys here."""
        if self._kept is None:
            return []
        journal = self._kept.journal
        own = await asyncio.to_thread(lambda: [one for one in journal.records() if one.id.startswith(self._prefix)])
        owned = [(one, owner_of(one, self.owners)) for one in own]
        return [(one.id, owner, one.chat) for one, owner in owned if owner is not None and one.chat is not None]
