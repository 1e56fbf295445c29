"""The sessions and texts of a server's clients in the journal of ``--state-dir``.

Everything here runs on the server's event loop; the journal has a thread of its own. API keys are
not written: a record holds a digest of the key's digest with random bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from quire.async_llm import AsyncLLM, AsyncSession
from quire.async_llm.session import inner_session
from quire.base.errors import NotDurable
from quire.server.http import logs
from quire.server.http.errors import hiding
from quire.sessions.durable import KeptSessions, durable_errors
from quire.store.adoption import adopt
from quire.store.journal import End, Lifetime, Moment, SessionRecord, Use

PREFIX = "session-"
"""How the ids of clients' sessions begin."""
SESSION_ID = re.compile(r"session-[0-9a-f]{32}")


class SessionKeeper:
    """What writes the sessions of one server, and finds them again."""

    def __init__(
        self,
        llm: AsyncLLM,
        kept: KeptSessions,
        owners: Iterable[str],
        salt: Callable[[str, str | None], str | None],
        others: Path | None = None,
    ) -> None:
        """``owners``: digests of the API keys. ``salt``: ``Context.salt``. ``others``: a folder of
        state directories, out of which ``adopted`` takes sessions."""
        self._llm = llm
        self._kept = kept
        self._owners = tuple(owners)
        self._salt = salt
        self._others = others
        self.failing = False
        """Whether the last write failed."""

    async def keep(
        self,
        held: AsyncSession,
        name: str,
        durable: str | None,
        is_gone: Callable[[], bool],
        *,
        owner: str,
        left: float,
        **fields: Any,
    ) -> str:
        """Return a digest of a session at rest when it is durable as it is now. ``durable`` is the
        digest of what is; where only the time of its use has changed, that is written without
        waiting. ``is_gone``: whether a client has deleted it meanwhile. ``fields``: the fields of a
        record. ``NotDurable``: it cannot be written."""
        session, lifetime = inner_session(held), Lifetime(left, Moment.now())
        record = self._kept.record(session, name, owner=hidden(owner), lifetime=lifetime, **fields)
        record = replace(record, salt=_given_salt(owner, record.salt))
        with_state = self._kept.needs_state(session)
        digest = digest_of(record, with_state=with_state)
        if digest == durable:
            self._kept.writer.write(Use(name, lifetime))
            return digest
        try:
            if with_state:
                path = self._kept.journal.new_state(name)
                with durable_errors(path):
                    await held.save(path, use_tqdm=False)
                record = replace(record, state=path.name)
                if is_gone():
                    path.unlink(missing_ok=True)
                    return digest
            await _written(self._kept.write(record))
        except NotDurable as error:
            self._note(error)
            raise
        self._note(None)
        return digest

    def _note(self, error: NotDurable | None) -> None:
        """Note whether a write failed; log it where the last one did not do the same."""
        if self.failing is (failing := error is not None):
            return
        self.failing = failing
        if failing:
            logs.event("sessions_not_written", level=logging.ERROR, error=str(error))
        else:
            logs.event("sessions_written_again", level=logging.WARNING)

    def adopt(self, session: AsyncSession) -> None:
        """Take over a new session. It is kept by its id, whatever it is called."""
        inner_session(session)._keeper = None

    async def forget(self, name: str) -> None:
        """Wait until a session's record is gone for good. ``NotDurable``: it is not."""
        await _written(self._kept.writer.write(End(name)))

    async def owners(self) -> dict[str, str]:
        """Return the owners of the sessions whose owners have keys here, by their ids, the oldest
        session first. Forget sessions whose time is over."""

        def find() -> dict[str, str]:
            now, found = Moment.now(), {}
            for record in self._kept.journal.records():
                if not record.id.startswith(PREFIX):
                    continue
                if left_of(record, now) == 0:
                    self._kept.writer.write(End(record.id))
                    continue
                if (owner := owner_of(record, self._owners)) is not None:
                    found[record.id] = owner
            return found

        return await asyncio.to_thread(find)

    async def adopted(self, name: str, owner: str) -> bool:
        """Return whether a session of this owner was moved here from the state directory of a
        server that has ended."""
        if self._others is None or not SESSION_ID.fullmatch(name):
            return False
        return await asyncio.to_thread(
            adopt, self._others, self._kept.journal, name, lambda record: is_hidden(owner, record.owner)
        )

    async def restored(self, name: str, owner: str) -> tuple[SessionRecord, AsyncSession] | None:
        """Return a session, and its record; None if there is none or its time is over. Errors are
        as for ``KeptSessions.restored``."""
        record = await asyncio.to_thread(self._kept.journal.get, name)
        if record is None or left_of(record, Moment.now()) == 0:
            return None
        path = self._kept.journal.directory if record.state is None else self._kept.journal.state_path(record)
        with hiding(path, "its state file"):
            return record, await self._llm.restored(replace(record, salt=self._salt(owner, record.salt)))


class KeptTexts:
    """Texts of one kind: stored responses, or chats of the page. Without a journal they end with
    the process."""

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


def digest_of(record: SessionRecord, *, with_state: bool | None = None) -> str:
    """Return a digest of a session's record, without the name of its state file. ``with_state``: it
    has one; None: as the record says."""
    has_state = record.state is not None if with_state is None else with_state
    return f"{replace(record, owner='', state=None).content()[2]} {has_state}"


def left_of(record: SessionRecord, now: Moment) -> float:
    """Return the seconds that a session has left: at most its ``ttl``, whatever the clock says."""
    left, ttl = record.lifetime.left_at(now), record.ttl or 0.0
    return ttl if left is None else min(ttl, left)


def hidden(owner: str, salt: str | None = None) -> str:
    """Return a salted digest of an owner for a record. It does not reveal the owner."""
    salt = secrets.token_hex(16) if salt is None else salt
    return f"{salt}:{hashlib.blake2b(owner.encode(), key=salt.encode(), digest_size=32).hexdigest()}"


def owner_of(record: SessionRecord, owners: Iterable[str]) -> str | None:
    """Return the owner of a record; None if it is none of these."""
    return next((one for one in owners if is_hidden(one, record.owner)), None)


def is_hidden(owner: str, written: str) -> bool:
    """Return whether ``hidden`` of an owner gave this."""
    return hmac.compare_digest(hidden(owner, written.partition(":")[0]), written)


def _given_salt(owner: str, salt: str | None) -> str | None:
    """Return the client's part of a salt, which ``Context.salt`` puts behind the owner."""
    if salt is None or not owner or not salt.startswith(owner):
        return salt
    return salt[len(owner) + 1 :] if len(salt) > len(owner) else None


async def _written(done: asyncio.Future[None] | object) -> None:
    await asyncio.shield(asyncio.wrap_future(done))  # type: ignore[arg-type]
