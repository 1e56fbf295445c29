"""Sessions as history: branches that ``Session.commit`` made, and sessions that go on from them."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from quire.branches.adapter_keys import read_key
from quire.contracts.store import KEY_BYTES, Blob, ObjectKey
from quire.engine import saved_sessions, session_commits
from quire.engine.chat_turns import ChatTurns
from quire.engine.session import Session
from quire.engine.session_sources import SessionSources
from quire.errors import QuireError, StoreDamaged
from quire.interrupts import uninterrupted
from quire.kv.sequencefile import check_model
from quire.signatures import require_bool
from quire.store.collection import Collected, collect
from quire.store.commit_history import Difference, History
from quire.store.commits import SessionCommit, checked_branch, space_of
from quire.store.transfer import Transferred, transfer
from quire.store.urls import durable_tier

R = TypeVar("R")
LOG = logging.getLogger("quire.store")


class SessionHistory(SessionSources):
    """The part of an ``LLM`` that knows branches. ``owner`` is whose branches are meant: "" those
    of a program, else as in ``Session.commit``. Commits are named by branches, or by their ids, of
    which 8 digits suffice. All raise ``FailedPrecondition`` if the store has no durable tier,
    ``TierError`` if that cannot be reached, and ``StoreDamaged`` for a damaged record."""

    @uninterrupted
    def checkout(self, name: str, *, owner: str = "") -> Session:
        """Return a session that goes on from a commit: its tokens, adapters, window, labels and
        chat, and the place in history from which its own commits follow. It has no name.

        Its state is found by its tokens at its next use, or computed again. State that tokens do
        not give (after ``set_kv``, or of embeddings) is loaded here; ``StoreDamaged`` if it is
        damaged or gone. ``NotFound``: there is no such branch. ``InvalidArgument``: another model's
        commit, or one of its adapters is not loaded.
        """
        engine = self._engine

        async def read(history: History) -> tuple[SessionCommit, Any, list[Any], Blob | None]:
            found = await history.find(name)
            blob = None
            if found.state.file is not None:
                (blob,) = await history.tier.get([ObjectKey.parse(found.state.file[0])])
            return found, await history.tokens(found), await history.items(found.turns), blob

        commit, ids_T, turns, blob = self._ask("checkout", owner, read)
        what = f"commit {commit.id[:12]}"
        try:
            check_model(commit.model, self._identity.fields())
            if commit.state.file is not None:
                with saved_sessions.opened(engine, _verified(commit, blob)) as file, engine.lock:
                    state = saved_sessions.load(engine, file, self._identity, convert_dtype=False)
                    session = self._session(state)
            else:
                with engine.lock:
                    key = read_key(commit.key, owner)
                    state = saved_sessions.branch_of(
                        engine, ids_T, adapters=commit.adapters, window=commit.window, key=key, what=what
                    )
                    session = self._session(state)
        except QuireError as error:
            if not str(error).startswith(what):
                error.about(what)
            raise
        chat = None if commit.chat is None else json.dumps({"turns": turns, **commit.chat})
        session._turns, session._last_commit = ChatTurns.read(chat), commit.id
        session.labels, session._kept = commit.labels, self._kept
        return session

    def branches(self, *, owner: str = "", damaged: list[str] | None = None) -> Mapping[str, SessionCommit]:
        """Return the commit at which each branch stands, by name in order. ``damaged`` gets a
        sentence for each that cannot be read; the log has these if it is None."""
        told = list[str]()
        found = self._ask("branches", owner, lambda history: history.branches(told))
        if damaged is not None:
            damaged += told
        elif told:
            LOG.warning("%s", "; ".join(told))
        return found

    def log(self, name: str, *, owner: str = "") -> list[SessionCommit]:
        """Return a commit and all before it, the latest first. ``NotFound``."""

        async def log(history: History) -> list[SessionCommit]:
            return await history.log(await history.find(name))

        return self._ask("log", owner, log)

    def diff(self, a: str, b: str, *, owner: str = "") -> Difference:
        """Return what two commits have in common, and what each adds. ``NotFound``."""

        async def diff(history: History) -> Difference:
            return await history.diff(await history.find(a), await history.find(b))

        return self._ask("diff", owner, diff)

    @uninterrupted
    def delete(self, name: str, *, owner: str = "") -> str:
        """Forget a branch; return the id of its commit, which stays until ``gc``; "" if that is
        lost. ``NotFound``."""

        async def delete(history: History) -> str:
            return await history.delete(name)

        return self._ask("delete", owner, delete, whole=True)

    @uninterrupted
    def push(
        self, name: str, url: str, *, force: bool = False, owner: str = "", use_tqdm: bool | None = None
    ) -> Transferred:
        """Copy a branch and its history to another store, as ``store=`` names one. What is there is
        not sent again; everything is verified before the branch is written there. ``NotFound``;
        ``AlreadyExists``: the branch there is no earlier state of this one, and not ``force``.
        ``use_tqdm`` shows the bytes on stderr; None: on a terminal."""
        return self._transfer("push", name, url, force, owner, use_tqdm)

    @uninterrupted
    def pull(
        self, name: str, url: str, *, force: bool = False, owner: str = "", use_tqdm: bool | None = None
    ) -> Transferred:
        """Copy a branch and its history from another store; the rest as in ``push``."""
        return self._transfer("pull", name, url, force, owner, use_tqdm)

    def _transfer(self, verb: str, name: str, url: str, force: bool, owner: str, use_tqdm: bool | None) -> Transferred:
        require_bool("force", force)
        checked_branch(name)
        show = sys.stderr.isatty() if use_tqdm is None else use_tqdm
        other = durable_tier(url)

        async def run(history: History) -> Transferred:
            there = History(other, history.space)
            try:
                ends = (history, there) if verb == "push" else (there, history)
                return await transfer(*ends, name, force=force, show=show)
            finally:
                await other.close()

        return self._ask(verb, owner, run)

    @uninterrupted
    def gc(self, *, dry_run: bool = False) -> Collected:
        """Remove commits that no branch of any owner reaches, and state that only they need.
        ``dry_run``: only say what that is. Commits of the last hour stay: other processes may be
        about to name them. A damaged record keeps what it may reach, and is in ``damaged``."""
        require_bool("dry_run", dry_run)
        found = self._ask("gc", "", lambda history: collect(history.tier, dry_run=dry_run))
        for sentence in found.damaged:
            LOG.warning("gc: %s", sentence)
        if found.keys and (store := self._engine.stored.store) is not None:
            store.contains(found.keys).result()  # so that it knows that they are gone
        return found

    def _ask(
        self,
        verb: str,
        owner: str,
        function: Callable[[History], Coroutine[Any, Any, R]],
        *,
        whole: bool = False,
    ) -> R:
        self._require_open(verb)
        return session_commits.ask(self._engine, space_of(owner), function, whole=whole)


def _verified(commit: SessionCommit, blob: Blob | None) -> memoryview:
    """Return a state file, as it was written; ``StoreDamaged``."""
    assert commit.state.file is not None
    lost = "tokens do not give its state, so it cannot be computed again"
    if blob is None:
        raise StoreDamaged(f"its state file is gone, and {lost}")
    if hashlib.blake2b(blob, digest_size=KEY_BYTES).digest() != ObjectKey.parse(commit.state.file[0]).digest:
        raise StoreDamaged(f"its state file is damaged, and {lost}")
    return memoryview(blob)
