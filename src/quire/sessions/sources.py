"""The sources of an LLM's sessions: prompts, KV caches, state files, the journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quire.base.config import check_int
from quire.base.errors import FailedPrecondition, InvalidArgument
from quire.base.signatures import require_bool
from quire.base.token_history import TokenHistory
from quire.branches.model_facts import checked_window
from quire.branches.session_branch import SessionBranch
from quire.contracts.executor import CacheLike, ExecutorInputs
from quire.engine.prompts import Prompt
from quire.models.fingerprint import ModelIdentity
from quire.sessions import saving, scoring, state
from quire.sessions.durable import KeptSessions
from quire.sessions.labels import NO_LABELS, checked_labels, checked_name
from quire.sessions.live_sequence import LiveSequence
from quire.sessions.prompts import PromptRequests, cache_key
from quire.sessions.session import Session
from quire.store.journal import SessionJournal

if TYPE_CHECKING:
    from quire.executor.executor import Executor


class SessionSources:
    """The part of an ``LLM`` that makes sessions."""

    def __init__(
        self,
        requests: PromptRequests,
        *,
        identity: ModelIdentity,
        journal: SessionJournal | None,
        executor: Callable[[], Executor],
    ) -> None:
        """``journal``: where sessions are kept that have a name; None: nowhere. ``executor``
        returns the one over the engine's runner, made at the first call."""
        self.requests = requests
        self.engine = requests.engine
        self.identity = identity
        self.kept = None if journal is None else KeptSessions(journal, self.engine, identity, self.session_of)
        """Keeps sessions in ``state_dir``; None without a directory."""
        self._executor = executor

    def session(
        self,
        prompt: Prompt,
        *,
        adapter: str | None,
        cache_salt: str | None,
        pin: bool,
        window: int | None,
        sink: int,
        cache: CacheLike | None,
        row: int | None,
        name: str | None,
        labels: Mapping[str, str] | None,
        use_tqdm: bool | None,
    ) -> Session:
        self.requests.require_open("session")
        if use_tqdm is not None:
            require_bool("use_tqdm", use_tqdm)
        called, labelled = checked_name(name), NO_LABELS if labels is None else checked_labels(labels)
        if cache is not None:
            others = {
                "prompt": isinstance(prompt, ExecutorInputs) or len(prompt) > 0,
                "adapter": adapter is not None,
                "cache_salt": cache_salt is not None,
                "window": window is not None,
                "sink": sink != 0,
            }
            if surplus := [one for one, is_there in others.items() if is_there]:
                message = f"{', '.join(surplus)} beside cache: what it holds says this already; leave it out"
                raise InvalidArgument(message, field=surplus[0])
            require_bool("pin", pin)
            from quire.executor.arguments import resolve_row

            with self.engine.lock:
                forked = state.fork_to_session(self.engine, *resolve_row(self.engine.runner, cache, row))
                forked.pinned |= pin
                session = self.session_of(forked, called, labelled)
            return self._keeping(session)
        if row is not None:
            raise InvalidArgument(f"row {row!r} without a KV cache; give cache=, or leave row out", field="row")
        require_bool("pin", pin)
        kept = checked_window(window, sink, self.engine.runner.model.layer_specs, self.engine.max_model_len)
        key = cache_key(cache_salt)
        tokens, media, _ = self.requests.read(prompt, self.engine.checks if kept is None else None)
        self.engine.checks.tokens(tokens, media)
        # Under the lock the adapter stays loaded until the session is known to use it.
        with self.engine.lock:
            held = TokenHistory(tokens, media)
            branch = SessionBranch(
                tokens=held, key=key, pinned=pin, window=kept, adapter=self.requests.adapter_id(adapter)
            )
            if tokens.size:
                self.engine.checks_of(branch).length(tokens.size, None)
            session = self.session_of(branch, called, labelled)
        try:
            scoring.compute(session._live, use_tqdm=use_tqdm)
        except BaseException:
            session.close()
            raise
        return self._keeping(session)

    def _keeping(self, session: Session) -> Session:
        """Keep a new session from now on, if it is called something."""
        try:
            if self.kept is not None:
                self.kept.begin(session)
        except BaseException:
            session.close()
            raise
        session._keeper = self.kept
        return session

    def session_of(
        self, branch: SessionBranch, name: str | None = None, labels: Mapping[str, str] = NO_LABELS
    ) -> Session:
        """Return a session of a branch, which nothing keeps yet."""
        live = LiveSequence(
            engine=self.engine,
            branch=branch,
            identity=self.identity,
            defaults=self.requests.default_params,
            executor=self._executor,
            adapters=self.requests.adapters,
            name=name,
            labels=labels,
        )
        return Session(live)

    def load(self, path: str | Path, convert_dtype: bool, row: int | None, use_tqdm: bool | None) -> Session:
        """See ``LLM.load_session``."""
        self.requests.require_open("load_session")
        if not isinstance(path, (str, Path)):
            message = f"load_session takes a path, got {type(path).__name__}; bytes go to session_from_bytes"
            raise InvalidArgument(message, field="path")
        if use_tqdm is not None:
            require_bool("use_tqdm", use_tqdm)
        return self._restore(path, convert_dtype, row, use_tqdm)

    def from_bytes(self, data: bytes | bytearray | memoryview, convert_dtype: bool, row: int | None) -> Session:
        """See ``LLM.session_from_bytes``."""
        self.requests.require_open("session_from_bytes")
        if not isinstance(data, (bytes, bytearray, memoryview)):
            message = f"session_from_bytes takes bytes, got {type(data).__name__}; a path goes to load_session"
            raise InvalidArgument(message, field="data")
        return self._restore(data, convert_dtype, row)

    def _restore(
        self,
        source: str | Path | bytes | bytearray | memoryview,
        convert_dtype: bool,
        row: int | None,
        use_tqdm: bool | None = False,
    ) -> Session:
        require_bool("convert_dtype", convert_dtype)
        if row is not None:
            check_int("row", row, None, also="or None")
        with saving.opened(self.engine, source, use_tqdm) as file:
            turns = saving.turns_of(file)
            with self.engine.lock:
                loaded = saving.load(self.engine, file, self.identity, convert_dtype=convert_dtype, row=row)
                session = self.session_of(loaded)
                session._live.turns = turns
        session._keeper = self.kept
        return session

    def resume(self, name: str) -> Session:
        """See ``LLM.resume``."""
        session = self.keeper("resume").resume(name)
        session._keeper = self.kept
        return session

    def keeper(self, verb: str) -> KeptSessions:
        """Return the part that keeps sessions; ``FailedPrecondition`` without a directory."""
        self.requests.require_open(verb)
        if self.kept is None:
            raise FailedPrecondition(f"{verb}: sessions are not kept; give state_dir=, a directory, to the LLM")
        return self.kept
