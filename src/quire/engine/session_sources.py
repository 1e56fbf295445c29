"""Where an LLM's sessions come from: prompts, KV caches, state files, the journal."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quire.branches.history import TokenHistory
from quire.branches.model_facts import checked_window
from quire.config import check_int
from quire.contracts.executor import CacheLike, ExecutorInputs
from quire.engine import row_sessions, saved_sessions
from quire.engine.engine import Engine
from quire.engine.kept_sessions import KeptSessions
from quire.engine.named_adapters import NamedAdapters
from quire.engine.prompts import Prompt
from quire.engine.request_preparation import RequestPreparation, cache_key
from quire.engine.session import Session
from quire.engine.session_branch import SessionBranch
from quire.engine.session_labels import checked_labels, checked_name
from quire.errors import FailedPrecondition, InvalidArgument
from quire.interrupts import uninterrupted
from quire.models.families import LoadedModel
from quire.models.fingerprint import ModelIdentity
from quire.sampling_params import SamplingParams
from quire.signatures import require_bool
from quire.store.session_journal import SessionJournal, SessionRecord

if TYPE_CHECKING:
    from quire.executor.executor import Executor


class SessionSources(RequestPreparation):
    """The part of an ``LLM`` that makes sessions."""

    def __init__(
        self,
        engine: Engine,
        adapters: NamedAdapters,
        default_params: SamplingParams,
        *,
        identity: ModelIdentity,
        journal: SessionJournal | None,
    ) -> None:
        """``journal``: where sessions are kept that have a name; None: nowhere."""
        super().__init__(engine, adapters, default_params)
        self._identity = identity
        self._kept = None if journal is None else KeptSessions(journal, engine, identity, self._session)

    @property
    @abstractmethod
    def model(self) -> LoadedModel:
        """Return the model, which holds the weights."""

    @property
    @abstractmethod
    def executor(self) -> Executor:
        """Return the executor over the engine's runner."""

    @uninterrupted
    def session(
        self,
        prompt: Prompt = "",
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        pin: bool = False,
        window: int | None = None,
        sink: int = 0,
        cache: CacheLike | None = None,
        row: int | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        use_tqdm: bool | None = None,
    ) -> Session:
        """Return a live sequence that starts with ``prompt``, which is run.

        ``prompt`` is text, token ids, either with embeddings as in ``generate``, or nothing.
        ``pin``: its state is never dropped when the pool is short. ``adapter`` is the name of a
        loaded one; ``Session.use_adapter`` changes it.

        ``window``: only the first ``sink`` tokens and the last ``window - sink`` are seen and kept
        (StreamingLLM). So memory and time per token stay constant however long it gets, also beyond
        the model's context. Such a session shares no prefix with others. ``Unsupported``: a sink on
        a model that runs through transformers' layers.

        ``cache`` is a KV cache of ``executor``, or a handle; the session becomes a copy-on-write
        fork of it. It replaces all of these but ``pin``, ``name`` and ``labels``; ``row`` picks one
        of several rows. The session has the row's tokens, window and adapters, goes on under the
        last of these, and shares no prefix with others.

        ``name`` and ``labels`` (strings by strings) tell many sessions apart; they need not be
        unique. With ``state_dir`` a session that has a name outlives the process: ``resume``.
        ``use_tqdm`` is as in ``Session.append``.
        """
        self._require_open("session")
        if use_tqdm is not None:
            require_bool("use_tqdm", use_tqdm)
        called, labelled = checked_name(name), checked_labels({} if labels is None else labels)
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

            with self._engine.lock:
                forked = row_sessions.fork_to_session(self._engine, *resolve_row(self._engine.runner, cache, row))
                forked.pinned |= pin
                session = self._session(forked, called, labelled)
            return self._keeping(session)
        if row is not None:
            raise InvalidArgument(f"row {row!r} without a KV cache; give cache=, or leave row out", field="row")
        require_bool("pin", pin)
        kept = checked_window(window, sink, self.model.layer_specs, self._engine.max_model_len)
        key = cache_key(cache_salt)
        tokens, media, _ = self._read(prompt, self._engine.checks if kept is None else None)
        self._engine.checks.tokens(tokens, media)
        # Under the lock the adapter stays loaded until the session is known to use it.
        with self._engine.lock:
            held = TokenHistory(tokens, media)
            state = SessionBranch(tokens=held, key=key, pinned=pin, window=kept, adapter=self._adapter(adapter))
            if tokens.size:
                self._engine.checks_of(state).length(tokens.size, None)
            session = self._session(state, called, labelled)
        try:
            session.compute(use_tqdm=use_tqdm)
        except BaseException:
            session.close()
            raise
        return self._keeping(session)

    def _keeping(self, session: Session) -> Session:
        """Keep a new session from now on, if it is called something."""
        session._kept = self._kept
        try:
            session._keep(wait=True)
        except BaseException:
            session._kept = None
            session.close()
            raise
        return session

    def _session(
        self, state: SessionBranch, name: str | None = None, labels: Mapping[str, str] | None = None
    ) -> Session:
        session = Session(
            self._engine,
            state,
            identity=self._identity,
            defaults=lambda: self.default_params,
            executor=lambda: self.executor,
            adapters=self._adapters,
        )
        session.name, session.labels = name, labels or {}
        return session

    def load_session(
        self,
        path: str | Path,
        *,
        convert_dtype: bool = False,
        row: int | None = None,
        use_tqdm: bool | None = None,
    ) -> Session:
        """Return the session of a file by ``Session.save``, or of a row of a serialized KV cache.

        ``row`` picks one of several rows of what ``KVCache.serialize`` returned. ``convert_dtype``
        accepts another KV dtype. ``use_tqdm`` shows the bytes on stderr; None: on a terminal, if it
        takes long. ``InvalidArgument`` (another model, dtype or version: expected and
        found), ``DataLoss`` (damaged), ``NotFound``, ``ResourceExhausted``.
        """
        self._require_open("load_session")
        if not isinstance(path, (str, Path)):
            message = f"load_session takes a path, got {type(path).__name__}; bytes go to session_from_bytes"
            raise InvalidArgument(message, field="path")
        if use_tqdm is not None:
            require_bool("use_tqdm", use_tqdm)
        return self._restore(path, convert_dtype, row, use_tqdm)

    def session_from_bytes(
        self, data: bytes | bytearray | memoryview, *, convert_dtype: bool = False, row: int | None = None
    ) -> Session:
        """Return the session of bytes by ``Session.to_bytes``; the rest as in ``load_session``."""
        self._require_open("session_from_bytes")
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
        with saved_sessions.opened(self._engine, source, use_tqdm) as file, self._engine.lock:
            loaded = saved_sessions.load(self._engine, file, self._identity, convert_dtype=convert_dtype, row=row)
            session = self._session(loaded)
        session._kept = self._kept
        return session

    def resume(self, name: str) -> Session:
        """Return the session that ``state_dir`` keeps under a name, be it of an earlier process.

        Its tokens, labels, adapters, window and chat are those after the last call on it that
        returned; its state is found or computed at its next use. ``NotFound``: no session of that
        name is kept, or it is of another model. ``InvalidArgument``: an adapter of it is not
        loaded.
        """
        session = self._keeper("resume").resume(name)
        session._kept = self._kept
        return session

    def resumable(self) -> list[str]:
        """Return the names of the sessions that ``resume`` returns, the oldest first."""
        return self._keeper("resumable").names()

    def forget(self, name: str) -> None:
        """Keep the session of a name no longer; ``NotFound``. One that is open goes on unkept."""
        self._keeper("forget").forget(name)

    def restored(self, record: SessionRecord) -> Session:
        """Return the session of a record. Nothing keeps it: a server keeps its own, by ids."""
        return self._keeper("restored").restored(record)

    @property
    def kept(self) -> KeptSessions | None:
        """Return the part that keeps sessions in ``state_dir``; None without a directory."""
        return self._kept

    def _keeper(self, verb: str) -> KeptSessions:
        self._require_open(verb)
        if self._kept is None:
            raise FailedPrecondition(f"{verb}: sessions are not kept; give state_dir=, a directory, to the LLM")
        return self._kept
