"""The history of sessions: branches that ``Session.commit`` made, and sessions that continue them.

``owner`` is the owner of the branches: "" for a program, else as in ``Session.commit``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from quire.adapters.keys import read_key
from quire.base.errors import QuireError, StoreDamaged
from quire.base.progress import on_terminal
from quire.base.signatures import require_bool
from quire.contracts.store import KEY_BYTES, Blob, ObjectKey
from quire.kv.sequencefile import check_model
from quire.sessions import commits, saving
from quire.sessions.chat_turns import ChatTurns
from quire.sessions.session import Session
from quire.sessions.sources import SessionSources
from quire.statefile.schema import Fault
from quire.store.collection import Collected, collect
from quire.store.commits import SessionCommit, checked_branch, space_of
from quire.store.history import Difference, History
from quire.store.transfer import Transferred, transfer
from quire.store.urls import durable_tier, existing

R = TypeVar("R")
LOG = logging.getLogger("quire.store")


def checkout(sources: SessionSources, name: str, owner: str) -> Session:
    """Return a session that continues a commit."""
    engine = sources.engine

    async def read(history: History) -> tuple[SessionCommit, Any, list[Any], Blob | None]:
        found = await history.find(name)
        blob = None
        if found.state.file is not None:
            (blob,) = await history.tier.get([ObjectKey.parse(found.state.file[0])])
        return found, await history.tokens(found), await history.items(found.turns), blob

    commit, ids_T, turns, blob = _ask(sources, "checkout", owner, read)
    what = f"commit {commit.id[:12]}"
    chat = None if commit.chat is None else json.dumps({"turns": turns, **commit.chat})
    try:
        spoken = ChatTurns.read(chat)
    except (TypeError, Fault) as fault:
        raise StoreDamaged(f"{what} is damaged: {fault}") from None
    try:
        check_model(commit.model, sources.identity.fields())
        if commit.state.file is not None:
            with saving.opened(engine, _verified(commit, blob)) as file, engine.lock:
                branch = saving.load(engine, file, sources.identity, convert_dtype=False)
                session = sources.session_of(branch)
        else:
            with engine.lock:
                key = read_key(commit.key, owner)
                branch = saving.branch_of(
                    engine, ids_T, adapters=commit.adapters, window=commit.window, key=key, what=what
                )
                session = sources.session_of(branch)
    except QuireError as error:
        if not str(error).startswith(what):
            error.about(what)
        raise
    session._live.turns, session._live.last_commit = spoken, commit.id
    session.labels, session._keeper = commit.labels, sources.kept
    return session


def branches(sources: SessionSources, owner: str, damaged: list[str] | None) -> Mapping[str, SessionCommit]:
    """Return the last commit of each branch, by name."""
    damaged_records = list[str]()
    found = _ask(sources, "branches", owner, lambda history: history.branches(damaged_records))
    if damaged is not None:
        damaged += damaged_records
    elif damaged_records:
        LOG.warning("%s", "; ".join(damaged_records))
    return found


def log(sources: SessionSources, name: str, owner: str) -> list[SessionCommit]:
    """Return a commit and all before it, the latest first."""

    async def log(history: History) -> list[SessionCommit]:
        return await history.log(await history.find(name))

    return _ask(sources, "log", owner, log)


def diff(sources: SessionSources, a: str, b: str, owner: str) -> Difference:
    """Return the tokens that two commits share, and those that each adds."""

    async def diff(history: History) -> Difference:
        return await history.diff(await history.find(a), await history.find(b))

    return _ask(sources, "diff", owner, diff)


def delete(sources: SessionSources, name: str, owner: str) -> str:
    """Remove a branch; return the id of its commit."""

    async def delete(history: History) -> str:
        return await history.delete(name)

    return _ask(sources, "delete", owner, delete, whole=True)


def copy(
    sources: SessionSources, verb: str, name: str, url: str, *, force: bool, owner: str, use_tqdm: bool | None
) -> Transferred:
    """Copy a branch and its history to another store ("push"), or from it ("pull")."""
    require_bool("force", force)
    checked_branch(name)
    show = on_terminal() if use_tqdm is None else use_tqdm
    other = durable_tier(url) if verb == "push" else existing(durable_tier(url))

    async def run(history: History) -> Transferred:
        there = History(other, history.space)
        try:
            ends = (history, there) if verb == "push" else (there, history)
            return await transfer(*ends, name, force=force, show=show)
        finally:
            await other.close()

    return _ask(sources, verb, owner, run)


def gc(sources: SessionSources, dry_run: bool) -> Collected:
    """Remove commits that no branch reaches, and state that only they need."""
    require_bool("dry_run", dry_run)
    found = _ask(sources, "gc", "", lambda history: collect(history.tier, dry_run=dry_run))
    for sentence in found.damaged:
        LOG.warning("gc: %s", sentence)
    if found.keys and (store := sources.engine.stored.store) is not None:
        store.contains(found.keys).result()  # so that it knows that they are gone
    return found


def _ask(
    sources: SessionSources,
    verb: str,
    owner: str,
    function: Callable[[History], Coroutine[Any, Any, R]],
    *,
    whole: bool = False,
) -> R:
    sources.requests.require_open(verb)
    return commits.ask(sources.engine, space_of(owner), function, whole=whole)


def _verified(commit: SessionCommit, blob: Blob | None) -> memoryview:
    """Return a state file, as it was written; ``StoreDamaged``."""
    assert commit.state.file is not None
    lost = "tokens do not give its state, so it cannot be computed again"
    if blob is None:
        raise StoreDamaged(f"its state file is gone, and {lost}")
    if hashlib.blake2b(blob, digest_size=KEY_BYTES).digest() != ObjectKey.parse(commit.state.file[0]).digest:
        raise StoreDamaged(f"its state file is damaged, and {lost}")
    return memoryview(blob)
