"""Commits of sessions: their content, and access to the store's branches."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.adapters.history import written
from quire.adapters.keys import written_key
from quire.base.errors import AlreadyExists, FailedPrecondition, InvalidArgument, StoreFull, TierFull
from quire.base.interrupts import POLL_SECONDS, check
from quire.base.signatures import require_bool
from quire.base.types import Remove, SeqId, Step
from quire.contracts.store import KEY_BYTES, ObjectKey, ObjectKind
from quire.engine.engine import Engine
from quire.sessions import saving
from quire.sessions.live_sequence import LiveSequence
from quire.store.commits import (
    TOKENS_IN_PIECE,
    TURNS_IN_PIECE,
    SessionCommit,
    Space,
    StateNames,
    checked_branch,
    checked_message,
    space_of,
    split,
)
from quire.store.history import History
from quire.store.keys import records_of

R = TypeVar("R")
LOG = logging.getLogger("quire.store")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitDraft:
    """A commit whose objects are not written yet."""

    commit: SessionCommit
    pieces: Mapping[str, list[Any]]
    objects: Mapping[ObjectKey, Callable[[], bytes]]
    """For each object a function that makes its bytes; valid until ``release``."""
    fork: SeqId | None
    """The sequence that these functions read; None: they read none."""


def ask(
    engine: Engine, space: Space, function: Callable[[History], Coroutine[Any, Any, R]], *, whole: bool = False
) -> R:
    """Run a coroutine over the branches in the first durable tier; return its result. The wait is a
    check point, unless it is to happen ``whole``. ``FailedPrecondition`` without a durable tier;
    ``TierError``: the tier cannot be read or written. ``StoreFull``: its disk is full."""
    store = engine.stored.store
    if store is None or not store.is_durable:
        raise FailedPrecondition(
            "commits and branches are kept in a store that outlives the process, and this LLM has none; give it store= "
            '(--store) with a tier like "file:///DIRECTORY", or state_dir= (--state-dir)'
        )
    future = store.direct(lambda tier: function(History(tier, space)))
    try:
        while True:
            try:
                return future.result(POLL_SECONDS)
            except TimeoutError:
                if future.done():
                    raise
                if not whole:
                    check()
    except CancelledError:
        raise FailedPrecondition("the store was closed meanwhile") from None
    except TierFull as error:
        LOG.error("%s", error)
        raise StoreFull(
            "the disk of the store's first durable tier is full (its log says where); make room on it, or delete branches and "
            "collect garbage"
        ) from error
    except BaseException:
        future.cancel()
        raise


def commit(live: LiveSequence, name: str, message: str | None, *, force: bool, owner: str) -> SessionCommit:
    """Keep a session in the first durable tier as the next commit of the branch ``name``."""
    branch, text, space = checked_branch(name), checked_message(message), space_of(owner)
    require_bool("force", force)
    engine = live.engine

    async def require_way(history: History) -> None:
        if not force:
            await history.require_way(branch, live.last_commit)

    with engine.lock:
        live.require_idle("commit")
    ask(engine, space, require_way)
    live.compute_to_save("commit")
    with engine.lock:
        made = draft(live, text)
    try:
        write(engine, space, made)
    finally:
        release(engine, made)

    async def move(history: History) -> None:
        await require_way(history)
        await history.move(branch, made.commit.id)

    # Before the branch: if it is unknown whether that was written, the next commit continues.
    live.last_commit, before = made.commit.id, live.last_commit
    try:
        ask(engine, space, move, whole=True)
    except AlreadyExists:
        live.last_commit = before
        raise
    return made.commit


def draft(live: LiveSequence, message: str) -> CommitDraft:
    """Describe an idle session of which at most the last token is not computed. The caller has the
    engine's lock, and calls ``release`` later."""
    engine, branch = live.engine, live.require_idle("commit")
    saving.require_computed(branch)
    try:
        chat: Any = json.loads(live.turns.written() or "null")
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"a message of the session's chat is no JSON ({error}); a commit holds only such"
        ) from None
    stored = engine.stored
    modified = saving.needs_state(branch) or bool(stored.keys.layout.refusal)
    objects: Mapping[ObjectKey, Callable[[], bytes]]
    if modified:
        blob = saving.to_bytes(live)
        key = _file_key(blob, len(branch.tokens))
        names, objects, fork = StateNames(file=(key.name, len(blob))), {key: lambda: blob}, None
    else:
        names, objects, fork = stored.described(branch)
    tokens = split(branch.tokens.ids.tolist(), TOKENS_IN_PIECE)
    spoken = split([] if chat is None else chat.pop("turns"), TURNS_IN_PIECE)
    key_of_session: Any = branch.key
    commit = SessionCommit(
        parent=live.last_commit,
        time=time.time(),
        message=message,
        session=live.name,
        labels=dict(live.labels),
        num_tokens=len(branch.tokens),
        model=live.identity.fields(),
        layout_hash=engine.runner.state.get_layout_hash(),
        adapters=[(start, name) for start, name in written(branch.runs, engine.branches.fingerprint_of)],
        key=written_key(key_of_session),
        window=None if branch.window is None else (branch.window.size, branch.window.sink),
        modified=modified,
        tokens=tuple(tokens),
        turns=tuple(spoken),
        chat=chat,
        state=names,
    )
    return CommitDraft(commit=commit.signed(), pieces=tokens | spoken, objects=objects, fork=fork)


def write(engine: Engine, space: Space, made: CommitDraft) -> None:
    """Write the parts of a commit that the tier lacks: its objects, then its records."""
    there = ask(engine, space, lambda history: history.there(list(made.objects)))
    for key, make in made.objects.items():
        if not there[key]:
            blob = make()
            _put(engine, space, key, blob)
            check()
    ask(engine, space, lambda history: history.add(made.commit, made.pieces, made.objects.keys()))


def release(engine: Engine, made: CommitDraft) -> None:
    """Remove a draft's fork."""
    if made.fork is not None:
        with engine.lock:
            engine.runner.execute(Step(edits=(Remove(made.fork),)))


def _put(engine: Engine, space: Space, key: ObjectKey, blob: bytes) -> None:
    if not ask(engine, space, lambda history: history.tier.put(key, blob)):
        raise StoreFull(
            f"the first durable tier of the store has no room for an object of {len(blob)} bytes; give it more room, or delete "
            "branches and collect garbage"
        )


def _file_key(blob: bytes, length: int) -> ObjectKey:
    """Return the key of a whole state file, which no other commit has: what a collection removes is
    never another's."""
    parent = records_of(f"state/{secrets.token_hex(16)}")
    return ObjectKey(parent, ObjectKind.STOP, length, hashlib.blake2b(blob, digest_size=KEY_BYTES).digest())
