"""Sessions that outlive the process: to records of the journal and back.

A record holds a session's tokens and what belongs to them, and no state: that is found again or
computed at the session's next use. Where tokens do not give the state, a state file lies beside the
journal. A program's sessions are kept by their names, at the end of each call that changed them; a
server keeps its clients' sessions itself, by their ids.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from quire.adapters.history import written
from quire.adapters.keys import is_private, private_salt
from quire.base.errors import DataLoss, InvalidArgument, NotDurable, NotFound, QuireError, StoreDamaged
from quire.branches.session_branch import SessionBranch
from quire.engine.engine import Engine
from quire.kv.sequencefile import IDENTITY, other_length
from quire.models.fingerprint import ModelIdentity
from quire.sessions import saving
from quire.sessions.chat_turns import ChatTurns
from quire.sessions.prompts import cache_key
from quire.sessions.session import Session
from quire.statefile.schema import Fault
from quire.store.journal import End, SessionJournal, SessionRecord
from quire.store.journal_writer import JournalWriter

logger = logging.getLogger("quire.engine")

NAMED = "named-"
"""Begins the ids of sessions that are kept by their names: a program's, not a server's."""


class KeptSessions:
    """The sessions of one LLM in a journal. Any thread may call."""

    def __init__(
        self,
        journal: SessionJournal,
        engine: Engine,
        identity: ModelIdentity,
        session_of: Callable[[SessionBranch], Session],
    ) -> None:
        """Take a journal, which ``close`` closes. ``session_of`` makes a session of its branch."""
        self._model = dict(identity.fields())  # now: the digest of large weights takes long
        self.journal = journal
        self.writer = JournalWriter(journal)
        self._engine = engine
        self._identity = identity
        self._session_of = session_of
        self._saving = threading.Lock()
        """Held from a state file to the order to write its record, so that a later one is last."""
        self._owners: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
        """Which session is kept under a name: the last one that was called so. By ids."""

    # -- records -----------------------------------------------------------------------------------

    def record(self, session: Session, name: str, **more: Any) -> SessionRecord:
        """Return the record of a session, without its state file. Takes no lock: the session must
        be at rest. ``more``: fields that the session does not know. ``NotDurable`` for a chat's
        message that is no JSON."""
        branch = session._branch
        salt = branch.key if isinstance(branch.key, tuple) and not is_private(branch.key) else None
        try:
            chat = session._live.turns.written()
        except (TypeError, ValueError) as error:
            raise NotDurable(f"a message of the session's chat is no JSON ({error}), so it is not kept") from error
        return SessionRecord(
            id=name,
            model=self._model,
            tokens=branch.tokens.ids.copy(),
            name=session.name,
            labels=session.labels,
            window=session.window,
            adapters=written(branch.runs, self._engine.branches.fingerprint_of),
            salt=None if salt is None else salt[1],
            private=salt is None,
            pinned=branch.pinned,
            chat=chat,
            commit=session.last_commit,
            **more,
        )

    @staticmethod
    def needs_state(session: Session) -> bool:
        """Return whether a session's tokens do not give its state."""
        return saving.needs_state(session._branch)

    def with_state(self, session: Session, record: SessionRecord) -> SessionRecord:
        """Return the record with a new state file of the session. This blocks: what is not computed
        is computed. ``NotDurable``: the file cannot be written."""
        path = self.journal.new_state(record.id)
        with durable_errors(path):
            session.save(path, use_tqdm=False)
        return replace(record, state=path.name)

    def write(self, record: SessionRecord) -> Future[None]:
        """Write a record behind all earlier changes. Its state file goes if that fails."""
        done = self.writer.write(record)
        if record.state is not None:
            path = self.journal.state_path(record)
            done.add_done_callback(lambda one: None if one.exception() is None else path.unlink(missing_ok=True))
        return done

    def restored(self, record: SessionRecord) -> Session:
        """Return the session of a record, which nothing keeps yet. Nothing of it is computed.
        ``NotFound``: it is of another model. ``InvalidArgument``: an adapter is not loaded. Of a
        state file also the errors of ``LLM.load_session``, ``StoreDamaged`` for ``DataLoss``."""
        model = self._model
        if dict(record.model) != model:
            if length := other_length(record.model, model):
                raise NotFound(f"the session was computed {length}; it goes on where a model of that length runs")
            differing = ", ".join(
                f"{name} {record.model.get(name)!r:.40} and not {model.get(name)!r:.40}"
                for name in sorted({*model, *record.model})
                if record.model.get(name) != model.get(name)
            )
            raise NotFound(f"the session was made by another model ({differing}); it goes on where that one runs")
        engine = self._engine
        try:
            turns = ChatTurns.read(record.chat)
        except Fault as fault:
            raise StoreDamaged(f"the session's record is malformed: {fault}") from None
        if record.state is not None:
            try:
                with saving.opened(engine, self.journal.state_path(record)) as file, engine.lock:
                    branch = saving.load(engine, file, self._identity, convert_dtype=False)
                    session = self._session_of(branch)
            except DataLoss as error:
                raise StoreDamaged(str(error)) from error
        else:
            key = private_salt() if record.private else cache_key(record.salt)
            with engine.lock:
                branch = saving.branch_of(
                    engine,
                    record.tokens,
                    adapters=record.adapters,
                    window=record.window,
                    key=key,
                    what="the session",
                )
                session = self._session_of(branch)
        session._live.turns, session._live.last_commit = turns, record.commit
        session.name, session.labels = record.name, record.labels
        return session

    # -- by name -----------------------------------------------------------------------------------

    def keep(self, session: Session, *, wait: bool) -> Future[None] | None:
        """Keep a session of a program under its name, if it has one, as ``Keeper`` does. The last
        session that was called so is kept. Without ``wait`` a session that needs a state file is
        left as it was kept before."""
        before, name = session._kept_as, None if session.name is None else self._id_of(session.name)
        if name != before:
            # In this order, so that after an interrupt the next call does it again.
            if name is not None:
                self._owners[name] = session
            if before is not None and self._owners.get(before) is session:
                self.writer.write(End(before))
                del self._owners[before]
            session._kept_as = name
        if name is None or self._owners.get(name) is not session:
            return None
        if self.needs_state(session):
            session._is_behind = True
            if not wait:
                return None
            with self._saving:
                session._unwritten = True
                done = self.write(self.with_state(session, self.record(session, name)))
        else:
            # Under the lock: what another thread changes meanwhile comes later, whole.
            with self._engine.lock:
                done = self.write(self.record(session, name))
        session._is_behind = False
        if wait:
            try:
                done.result()
            finally:
                _note(session, done)
        else:
            done.add_done_callback(partial(_note, session))
            done.add_done_callback(_log_failure)
        return done

    def begin(self, session: Session) -> None:
        """Keep a new session under its name, if it has one, as ``keep`` does. After an error the
        name stays that of the session that had it before."""
        if session.name is not None:
            with self._else_as_before(self._id_of(session.name)):
                self.keep(session, wait=True)

    @contextmanager
    def _else_as_before(self, name: str) -> Iterator[None]:
        """Run a block that takes a name from a session; after an error the session has it again."""
        owner = self._owners.get(name)
        try:
            yield
        except BaseException:
            if owner is not None:
                self._owners[name] = owner
            raise

    def names(self) -> list[str]:
        """Return the names under which sessions of this model are kept, the oldest first."""
        self.writer.wait()
        return [one.name for one in self.journal.records() if one.name is not None and one.id == self._id_of(one.name)]

    def resume(self, name: str) -> Session:
        """Return the session that is kept under a name, and keep it so from now on."""
        record = self._found(name)
        try:
            session = self.restored(record)
        except QuireError as error:
            error.about(f"session {name!r}")
            raise
        session._branch.pinned |= record.pinned
        session._kept_as, self._owners[record.id] = record.id, session
        return session

    def forget(self, name: str) -> None:
        """Keep nothing under a name any more; ``NotFound`` if nothing is."""
        record = self._found(name)
        with self._else_as_before(record.id):
            self._owners.pop(record.id, None)
            self.writer.write(End(record.id)).result()

    def _found(self, name: str) -> SessionRecord:
        if not isinstance(name, str):
            raise InvalidArgument(field="name", given=name, allowed="the name of a session")
        self.writer.wait()
        record = self.journal.get(self._id_of(name))
        if record is None:
            known = ", ".join(map(repr, self.names()[:10])) or "none"
            raise NotFound(f"no session is kept under the name {name!r:.80}; there are: {known}{self._of_others(name)}")
        return record

    def _of_others(self, name: str) -> str:
        """Return a note on other models with a session of this name, for a refusal."""
        found = [one.model for one in self.journal.records() if one.name == name and one.id.startswith(NAMED)]
        lengths = [length for model in found if (length := other_length(model, self._model))]
        if lengths:
            return f"; session {name!r:.80} was computed {lengths[0]}"
        kinds = ", ".join(sorted({str(model.get("architecture")) for model in found}))
        return (
            f"; a session of this name belongs to another model ({kinds}), and goes on where that one runs"
            if found
            else ""
        )

    def _id_of(self, name: str) -> str:
        """Return the id of the session of this model that is kept under a name."""
        whose = json.dumps([name, *(self._model[part] for part in IDENTITY)])
        return f"{NAMED}{hashlib.blake2b(whose.encode(), digest_size=16).hexdigest()}"

    def close(self) -> None:
        """Write the waiting records, and close the journal."""
        self.writer.close()


def _note(session: Session, done: Future[None]) -> None:
    session._unwritten = done.exception() is not None
    session._is_behind = session._is_behind or session._unwritten


def _log_failure(done: Future[None]) -> None:
    if (error := done.exception()) is not None:
        logger.error("a named session is not kept as it is now: %s", error)


@contextmanager
def durable_errors(path: Path) -> Iterator[None]:
    """Turn errors of a save to ``path`` into ``NotDurable``."""
    try:
        yield
    except QuireError as error:
        reason = str(error).replace(f"state file {str(path)!r}", "its state file")
        reason = reason.replace(str(path), "its state file").replace(str(path.parent), "its directory")
        raise NotDurable(f"the session's state cannot be written to the state directory: {reason}") from error
