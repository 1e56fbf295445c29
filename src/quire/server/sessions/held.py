"""What clients of a server hold: sessions with owners, lifetimes and present calls, stored bytes.

Everything here runs on the server's event loop. Ids are 128 random bits. The id of another owner's
session is answered as an unknown one, so that guessing tells nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from quire.async_llm import AsyncSession
from quire.base.errors import FailedPrecondition, NotDurable, NotFound, QuireError, took_effect
from quire.base.hints import PinAccount
from quire.server.http import logs
from quire.server.http.errors import RETRY_AFTER, ApiError, bad_field, busy
from quire.server.http.settings import ServerSettings
from quire.server.sessions.keeper import PREFIX, SessionKeeper, digest_of, left_of
from quire.store.journal import Moment

logger = logging.getLogger("quire.server")

LOOK = 1.0
"""Most seconds between two searches for expired sessions."""
SHORTEST = 0.005
"""Least seconds between them."""
SETTLE_SECONDS = 5.0
"""Most seconds that the server's end waits for cancelled calls, whose disk may hang."""


@dataclass(slots=True, eq=False)
class HeldSession:
    id: str
    owner: str
    session: AsyncSession
    parent: str | None
    """The id of the session that it was forked from, which may be closed."""
    ttl: float
    """Seconds without use after which it is closed."""
    used: float
    """Time of its last use, on the registry's clock."""
    busy: str | None = None
    """The call that uses it now."""
    created: float = 0.0
    """Time of its creation, in Unix time."""
    durable: str | None = None
    """The digest of what the journal has of it; None: not what the session is."""
    is_closing: bool = False
    """Whether a client is deleting it."""


class Sessions:
    """All sessions of a server. One call at a time uses a session; others are refused at once."""

    def __init__(self, settings: ServerSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without sessions. ``clock``: monotonic seconds."""
        self._settings = settings
        self._clock = clock
        self.keeper: SessionKeeper | None = None
        """What makes sessions durable; None: they end with the server."""
        self._parked: dict[str, str] = {}
        """Sessions in the journal that are not held, as one of another model: owners by ids."""
        self._held: dict[str, HeldSession] = {}
        """The sessions by id, the oldest first."""
        self._reserved: Counter[str] = Counter()
        """Numbers of reserved places, by owner."""
        self._accounts: dict[str, PinAccount] = {}
        """Accounts of pinned sessions, by owner; as many as there are keys."""
        self._closed = False
        self._sweeper: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the ids of all sessions, the oldest first."""
        return tuple(self._held)

    # -- making ------------------------------------------------------------------------------------

    @contextmanager
    def room(self, owner: str, count: int = 1) -> Iterator[None]:
        """Reserve places for an owner's sessions while they are made. Raise ``ApiError`` 429 if the
        owner has too many, 503 if all together have, 400 if that many are never allowed."""
        limit, each = self._settings.max_sessions, self._settings.sessions_per_key
        whose = " for an API key" if owner else ""
        if count > each:
            raise bad_field("n", f"n={count}; this server holds {each} sessions at most{whose}", code="session_limit")
        more = f"{count} more session{'s' if count > 1 else ''} would be more than the"
        own = [held for held in self._held.values() if held.owner == owner]
        if len(own) + self._reserved[owner] + count > each:
            message = f"{more} {each} that this server holds{whose}; delete some"
            raise busy(429, message, "session_limit", self._until_one_ends(own))
        if len(self._held) + self._reserved.total() + count > limit:
            message = f"{more} {limit} that this server holds; others have them, try again later"
            raise busy(503, message, "session_limit", self._until_one_ends(self._held.values()))
        self._reserved[owner] += count
        try:
            yield
        finally:
            self._reserved[owner] -= count

    def lifetime(self, ttl: float | None, *, pinned: bool) -> float:
        """Return a session's lifetime without use, in seconds; ``ttl`` is the request's. Raise
        ``ApiError`` 400 for more than a pinned session may have."""
        if not pinned:
            return self._settings.session_ttl if ttl is None else ttl
        most = self._settings.pinned_ttl
        if ttl is not None and ttl > most:
            raise bad_field("ttl", f"ttl must be at most {most:g} seconds for a pinned session, got {ttl:g}")
        return most if ttl is None else ttl

    def create(
        self,
        owner: str,
        session: AsyncSession,
        *,
        parent: str | None = None,
        ttl: float,
        session_id: str | None = None,
        created: float | None = None,
    ) -> str:
        """Hold a session in its ``room``, and return its id: ``session_id``, by default a new one.
        ``ttl`` is from ``lifetime``. ``created``: when it was made, if not now. Raise ``ApiError``
        409 for the id of another session."""
        if self._closed:
            raise FailedPrecondition("the server is shutting down; it holds no new session")
        session_id = session_id or f"{PREFIX}{secrets.token_hex(16)}"
        if session_id in self._held or session_id in self._parked:
            message = f"there is a session {session_id} already; delete it first"
            raise ApiError(409, message, param="id", code="session_exists")
        began = time.time() if created is None else created
        self._held[session_id] = HeldSession(session_id, owner, session, parent, ttl, self._clock(), created=began)
        self._sweep_soon()
        return session_id

    def _sweep_soon(self) -> None:
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def hold(
        self,
        owner: str,
        sessions: Sequence[AsyncSession],
        *,
        parent: str | None = None,
        ttl: float,
        name: str | None,
        labels: Mapping[str, str],
        ids: Sequence[str | None] = (),
        created: float | None = None,
    ) -> list[str]:
        """Hold each of ``sessions``, with this display name and these labels. Wait until all are
        durable. Return their ids: those in ``ids``, or new ones. After an error all are closed.
        ``created`` is as in ``create``."""
        made: list[str] = []
        for session in sessions:
            if self.keeper is not None:
                self.keeper.adopt(session)
            session.name, session.labels = name, labels
        try:
            for session, given in itertools.zip_longest(sessions, ids):
                held = self.create(owner, session, parent=parent, ttl=ttl, session_id=given, created=created)
                made.append(held)
            await asyncio.gather(*(self.keep(self._held[session_id]) for session_id in made))
        except BaseException:
            for session_id in made:
                self._held.pop(session_id, None)
                if self.keeper is not None:
                    self.spawn(_quietly(self.keeper.forget(session_id)))
            await asyncio.shield(asyncio.gather(*(session.close() for session in sessions)))
            raise
        return made

    def account(self, owner: str) -> PinAccount:
        """Return the account in which an owner's pinned sessions count."""
        if owner not in self._accounts:
            share, total = self._settings.pinned_share_per_key, self._settings.max_pinned_share
            self._accounts[owner] = PinAccount(share=share, total=total)
        return self._accounts[owner]

    def _until_one_ends(self, held: Iterable[HeldSession]) -> int:
        """Return the seconds until the first of these expires, at most 60."""
        return max(RETRY_AFTER, min(60, math.ceil(min(map(self.time_left, held), default=0.0))))

    # -- using -------------------------------------------------------------------------------------

    def get(self, owner: str, session_id: str) -> HeldSession:
        """Return a session. Raise ``NotFound`` for unknown, expired and other owners' ones."""
        held = self._held.get(session_id)
        if held is None or held.owner != owner or self._is_over(held):
            raise NotFound(
                f"there is no session {session_id[:60]!r}; it may have been deleted, or not been used for too long"
            )
        return held

    def of(self, owner: str) -> list[HeldSession]:
        """Return all sessions of an owner, the oldest first."""
        return [held for held in self._held.values() if held.owner == owner and not self._is_over(held)]

    def take(self, owner: str, session_id: str, verb: str) -> HeldSession:
        """Take a session for one call, until ``release``. It does not expire meanwhile. Raise
        ``FailedPrecondition`` if another call has it."""
        held = self.get(owner, session_id)
        if held.busy is not None:
            raise FailedPrecondition(
                f"{verb}: the session is in use by another call ({held.busy}); wait for that to end, or fork the session before"
            )
        held.busy = verb
        return held

    def release(self, held: HeldSession) -> None:
        """End the call that uses a session."""
        held.busy, held.used = None, self._clock()

    @asynccontextmanager
    async def use(self, owner: str, session_id: str, verb: str) -> AsyncIterator[HeldSession]:
        """Take a session. At the end of the block release it when it is durable."""
        await self.ready(owner, session_id)
        held = self.take(owner, session_id, verb)
        try:
            yield held
            with took_effect():
                await self.keep(held)
        except BaseException:
            await asyncio.shield(self.spawn(self.release_when_durable(held)))
            raise
        self.release(held)

    async def release_when_durable(self, held: HeldSession) -> None:
        """End a call that failed or was cancelled, once its changes are durable."""
        try:
            await _quietly(self.keep(held))
        finally:
            self.release(held)

    # -- keeping -----------------------------------------------------------------------------------

    async def keep(self, held: HeldSession) -> None:
        """Wait until a session at rest is durable. ``NotDurable`` if it cannot be written."""

        def is_gone() -> bool:
            return self._held.get(held.id) is not held or held.is_closing

        if self.keeper is not None and not is_gone():
            durable, held.durable = held.durable, None
            held.durable = await self.keeper.keep(
                held.session,
                held.id,
                durable,
                is_gone,
                owner=held.owner,
                left=self.time_left(held),
                parent=held.parent,
                created=held.created,
                ttl=held.ttl,
            )

    async def ready(self, owner: str, session_id: str) -> None:
        """Prepare a session for a call: wake it. ``NotDurable`` while nothing can be written, so
        that the call changes nothing."""
        await self.wake(owner, session_id)
        held = self._held.get(session_id)
        if held is None or held.owner != owner or held.busy is not None or self.keeper is None:
            return
        if self.keeper.failing or held.durable is None:
            held.durable, held.busy = None, "keep"
            try:
                await self.keep(held)
            except NotDurable as error:
                error.about("the call was not begun")
                raise
            finally:
                held.busy = None

    async def wake(self, owner: str, session_id: str) -> None:
        """Continue a parked session, or that of a server that has ended, or raise the reason
        against it."""
        is_unknown = session_id not in self._held and session_id not in self._parked
        if is_unknown and self.keeper is not None and await self.keeper.adopted(session_id, owner):
            self._parked.setdefault(session_id, owner)
        if self._parked.get(session_id) == owner:
            await self._unpark(session_id, owner)

    async def resume(self) -> None:
        """Continue the sessions in the journal. Those that cannot be continued are parked."""
        if self.keeper is None:
            return
        found = await self.keeper.owners()
        self._parked |= found
        for session_id, owner in found.items():
            try:
                await self._unpark(session_id, owner)
            except QuireError as error:
                logs.event("not_resumed", session=session_id, reason=str(error))
        # Counted from now, so that a clock that was set back does not give the same time again.
        await asyncio.gather(*(_quietly(self.keep(held)) for held in self._held.values()))
        if found:
            logs.event("resumed", sessions=len(self._held), kept=len(found))

    async def _unpark(self, session_id: str, owner: str) -> None:
        assert self.keeper is not None
        found = await self.keeper.restored(session_id, owner)
        if found is None or session_id not in self._parked:
            self._parked.pop(session_id, None)
            if found is not None:
                await found[1].close()  # another call was first
            return
        record, session = found
        try:
            if record.pinned:
                await session.pin(self.account(owner))
        except BaseException:
            await session.close()
            raise
        del self._parked[session_id]
        ttl = record.ttl or self._settings.session_ttl
        used = self._clock() - ttl + left_of(record, Moment.now())
        self._held[session_id] = held = HeldSession(
            session_id, owner, session, record.parent, ttl, used, created=record.created
        )
        held.durable = digest_of(record)
        self._sweep_soon()

    def time_left(self, held: HeldSession) -> float:
        """Return the seconds until an unused session is closed."""
        return held.ttl if held.busy else max(0.0, held.used + held.ttl - self._clock())

    def _is_over(self, held: HeldSession) -> bool:
        return self.time_left(held) == 0.0

    # -- closing -----------------------------------------------------------------------------------

    async def close(self, owner: str, session_id: str) -> None:
        """Close a session, and cancel a call that uses it. Raise ``NotFound`` as ``get`` does, and
        ``NotDurable`` if the journal cannot forget it; then it stays."""
        await self.wake(owner, session_id)
        held = self.get(owner, session_id)
        if self.keeper is not None:
            held.is_closing = True
            try:
                await self.keeper.forget(session_id)
            finally:
                held.is_closing = False
        self._held.pop(session_id, None)
        await _close(held)

    async def close_all(self) -> None:
        """Close every session at the server's end, and refuse later ones. The journal keeps what
        they are now."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=SETTLE_SECONDS)
        held = list(self._held.values())
        self._held.clear()
        await asyncio.gather(*(self._close_quietly(one) for one in held))
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=SETTLE_SECONDS)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine to its end, also if no task waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _sweep(self) -> None:
        """Close expired sessions, as long as there are sessions."""
        while self._held:
            for held in [held for held in self._held.values() if self._is_over(held)]:
                del self._held[held.id]
                if self.keeper is not None:
                    self.spawn(_quietly(self.keeper.forget(held.id)))
                await self._close_quietly(held)
            await asyncio.sleep(max(SHORTEST, min([LOOK, *map(self.time_left, self._held.values())])))

    async def _close_quietly(self, held: HeldSession) -> None:
        try:
            await _close(held)
        except Exception:
            logger.exception("session %s could not be closed", held.id)


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    """Await a result. A failure is raised where the result is needed, or at the next call."""
    try:
        await work
    except QuireError as error:
        logs.event("warning", text=str(error))


async def _close(held: HeldSession) -> None:
    # A running request ends in a step, by which its waiter gets the result.
    while held.busy is not None and await held.session.cancel():
        await asyncio.sleep(SHORTEST)
    await held.session.close()


class StoredBytes:
    """The count of bytes of a server's state files on the disk, in all and by key. It runs on the
    server's event loop."""

    def __init__(self, settings: ServerSettings) -> None:
        self._limit, self._each = int(settings.max_stored_bytes), settings.stored_per_key
        self._held: Counter[str] = Counter()

    def change(self, owner: str, old: int, new: int) -> None:
        """Count ``new`` bytes instead of ``old`` ones for a file of ``owner``. Raise ``ApiError``,
        and change nothing: 429 if the owner then has too many, 503 if all together have, 400 if the
        file alone is too large for an owner."""
        if new > old:
            if new > self._each:
                raise ApiError(
                    400, f"a state file of {new} bytes; at most {self._each} bytes are stored", code="storage_limit"
                )
            more, beside = f"{new - old} more bytes of state files", "would be too many beside"
            if (own := self._held[owner]) + new - old > self._each:
                message = f"{more} {beside} {own} of yours; at most {self._each} are stored: wait for the others to end"
                raise busy(429, message, "storage_limit")
            if (held := self._held.total()) + new - old > self._limit:
                message = f"{more} {beside} {held} of all; at most {self._limit} are stored: try again later"
                raise busy(503, message, "storage_limit")
        self._held[owner] += new - old
        if not self._held[owner]:
            del self._held[owner]

    @property
    def total(self) -> int:
        return self._held.total()
