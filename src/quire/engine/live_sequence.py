"""What a session holds: its tokens, the state of most of them, and the helpers of its verbs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from quire.branches.adapter_keys import AdapterNames, Fingerprints
from quire.branches.history import Ids
from quire.branches.media import NO_MEDIA, Media
from quire.contracts.executor import ExecutorInputs
from quire.engine.chat_turns import ChatTurns
from quire.engine.engine import Engine
from quire.engine.keeping import Keeper
from quire.engine.progress_bars import run_shown
from quire.engine.prompts import Prompt, Text, is_segmented, read_prompt
from quire.engine.request import Request
from quire.engine.segmented_prompts import read_segments
from quire.engine.session_branch import SessionBranch
from quire.engine.session_labels import Labelled
from quire.engine.session_repr import session_repr
from quire.engine.token_ids import as_token_ids
from quire.engine.tokenizer import Tokenizer
from quire.errors import Cancelled, FailedPrecondition, InvalidArgument
from quire.interrupts import uninterrupted
from quire.models.fingerprint import ModelIdentity
from quire.orphans import unless_exiting
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.executor.executor import Executor


class LiveSequence(Labelled):
    """A sequence that stays until it is closed. Its state may be dropped and computed again."""

    def __init__(
        self,
        engine: Engine,
        state: SessionBranch,
        *,
        identity: ModelIdentity,
        defaults: Callable[[], SamplingParams],
        executor: Callable[[], Executor],
        adapters: AdapterNames | None = None,
    ) -> None:
        """Register the session with the engine. ``executor`` returns the one over the engine's
        runner, made at the first call. ``adapters`` names the loaded adapters; with None they go by
        their fingerprints."""
        self._engine = engine
        self._executor = executor
        if adapters is None:
            adapters = Fingerprints(engine.branches.fingerprint_of, engine.runner.adapters.find)
        self._names = adapters
        self._identity = identity
        self._defaults = defaults
        self._state = state
        self._turns = ChatTurns()
        self._kept: Keeper | None = None
        """What keeps it under its name; None: nothing does."""
        self._last_commit: str | None = None
        self._kept_as: str | None = None
        """The id of its record there."""
        self._is_behind = False
        """Whether what is kept is older than the session; ``close`` keeps it as it is then."""
        with engine.lock:
            state.user = ref(self)
            engine.branches.hold(state)
            self._end = partial(engine.forget, state)
            engine.orphans.watch(self, self._end)
            self._closed = False

    def __len__(self) -> int:
        return len(self._state.tokens)

    def __repr__(self) -> str:
        return session_repr(self._engine, self._state, closed=self._closed, name=self.name)

    @property
    def tokens(self) -> list[int]:
        """All token ids; -1 to -4, as they were given, at the places of embeddings."""
        held = self._state.tokens
        return held.media.as_given(held.ids)

    @property
    def text(self) -> str:
        """Return the text of all tokens without special tokens and embeddings.
        ``FailedPrecondition`` without a tokenizer."""
        spoken = [token for token in self.tokens if token >= 0]
        return self._tokenizer("text").decode(spoken, skip_special_tokens=True)

    @property
    def pinned(self) -> bool:
        """Return whether its state is kept even if the pool is short."""
        return self._state.pinned

    @property
    def window(self) -> tuple[int, int] | None:
        """(window, sink), in tokens, of what it keeps; None: it keeps all tokens."""
        window = self._state.window
        return None if window is None else (window.size, window.sink)

    @property
    def adapter(self) -> str | None:
        """Return the name of the adapter under which its next tokens run; None: the base model."""
        adapter = self._state.adapter
        return None if adapter is None else self._names.name_of(adapter)

    @property
    def modified(self) -> bool:
        """Return whether computing its tokens would not give its state. Then ``set_kv`` wrote into
        it, or it came from a file or a KV cache without the embeddings that stood at
        placeholders."""
        return self._state.modified

    @property
    def exact(self) -> bool:
        """Return whether its state is what its tokens give, apart from what ``modified`` tells. It
        is not if some of it went through another dtype, or was blended. It becomes exact again when
        it is computed again: after a rewind to ``exact_tokens`` or before, or once it was
        dropped."""
        return self._state.origin.exact

    @property
    def exact_tokens(self) -> int:
        """Return how many of its first tokens have exact state; all of them, if ``exact``."""
        return self._state.origin.exact_part(len(self))

    @property
    def last_commit(self) -> str | None:
        """Return the id of the commit that it was made from, or was last committed as. A fork has
        that of its parent."""
        return self._last_commit

    @property
    def num_computed(self) -> int:
        """Tokens whose state is in the pool now."""
        return self._state.computed

    @property
    def pages(self) -> tuple[int, int]:
        """(pages that it holds, those of them that it shares)"""
        with self._engine.lock:
            seq = self._open("pages").seq
            return (0, 0) if seq is None else self._engine.runner.state.sequence_pages(seq)

    @property
    def sequence_id(self) -> int | None:
        """Its sequence in the KV state, for the state's own verbs; None: it is not in the pool. It
        may change with every call."""
        return self._open("sequence_id").seq

    @property
    def number(self) -> int:
        """Return the number that no other session of the process has. ``engine.views`` use it as a
        name."""
        return self._state.number

    def belongs_to(self, engine: Engine) -> bool:
        """Return whether this engine runs it."""
        return self._engine is engine

    @uninterrupted
    def close(self) -> None:
        """Give the pages back at once. Closing twice is harmless. A kept session stays kept."""
        if self._closed or self._engine.lock.is_parents:
            return
        try:
            if self._is_behind and not self._engine.closed:
                self._keep(wait=True)
        finally:
            self._closed = True
            self._engine.forget(self._state)
            self._engine.orphans.unwatch(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @unless_exiting
    def __del__(self) -> None:
        # No reference to it is left.
        if not getattr(self, "_closed", True):
            self._engine.orphans.leave(self._end)

    def _keep(self, *, wait: bool) -> Future[None] | None:
        return None if self._kept is None else self._kept.keep(self, wait=wait)

    def _renamed(self) -> None:
        self._engine.branches.revision += 1
        if self._kept is None:
            return
        # Without waiting: an event loop may set a name, and a step may run.
        if not self._engine.lock.acquire(blocking=False):
            self._is_behind = True
            return
        try:
            self._keep(wait=False)
        finally:
            self._engine.lock.release()

    def _open(self, verb: str) -> SessionBranch:
        self._engine.lock.require_own()
        if self._closed or self._engine.closed:
            what = "session" if self._closed else "LLM"
            raise FailedPrecondition(f"{verb}: the {what} is closed; make a new one")
        return self._state

    def _idle(self, verb: str) -> SessionBranch:
        state = self._open(verb)
        self._engine.orphans.bury()  # an unreferenced stream among them
        if state.busy:
            raise FailedPrecondition(f"{verb}: the session is generating; finish or close its stream first")
        self._engine.branches.hold(state)
        return state

    def _tokenizer(self, verb: str) -> Tokenizer:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise FailedPrecondition(f"{verb} needs a tokenizer, and this model has none; use token ids")
        return tokenizer

    def encode(self, text: Text) -> NDArray[np.int64]:
        """Return the token ids that ``append`` adds for a text, or the given ids."""
        return self._encode(text, self._state.tokens.ids)[0]

    def _encode(self, text: Prompt, before: Ids) -> tuple[NDArray[np.int64], Media]:
        """Return the ids and embeddings of what stands behind the tokens ``before``."""
        if isinstance(text, str):
            self._engine.checks_of(self._state).text(text)
            return np.array(self._tokenizer("text").encode_after(before, text), dtype=np.int64), NO_MEDIA
        if isinstance(text, (Mapping, ExecutorInputs)):
            return read_prompt(text, self._engine.runner.model.hidden_size)
        if is_segmented(text):
            held = [before]

            def encode(part: Text, _: bool) -> NDArray[np.int64]:
                held.append(self._encode(part, np.concatenate(held))[0])
                return held[-1]

            return read_segments(text, encode)[0], NO_MEDIA  # type: ignore[arg-type]
        return as_token_ids(text), NO_MEDIA  # type: ignore[arg-type]

    def _submit_first(
        self, tokens: NDArray[Any], length: int, media: Media = NO_MEDIA, *, priority: int = 0
    ) -> Request | None:
        """Queue a run of the first ``length`` tokens; return None if they are computed already. The
        session becomes all of ``tokens``. ``media`` holds embeddings that it does not have yet."""
        state = self._state
        if length < 1 or (state.seq is not None and state.computed >= length):
            return None
        tail = tokens[length:].tolist()
        return self._engine.submit_run(state, tokens[:length], tail=tail, media=media, priority=priority)

    def _wait(self, request: Request, use_tqdm: bool | None = False) -> None:
        """Run a request to its end. Raise its error, and ``Cancelled`` for a cancelled run.
        ``use_tqdm`` shows how far its prompt is; None: on a terminal, if it takes long."""
        run_shown(self._engine, request, use_tqdm)
        if request.output.error is not None:
            raise request.output.error
        if request.output.finish_reason == "cancelled" and request.params is None:
            raise Cancelled("the session's call was cancelled; the session is as it was before")

    def _compute(self, verb: str, *, priority: int = 0, use_tqdm: bool | None = False) -> Request | None:
        """Run all tokens but the last one, as far as they are not computed. None: they were."""
        with self._engine.lock:
            request = self._submit_first(self._idle(verb).tokens.ids, len(self) - 1, priority=priority)
        if request is not None:
            self._wait(request, use_tqdm)
        return request

    def _catch_up(self, verb: str, length: int) -> None:
        """Make the state hold exactly the first ``length`` tokens: all, or all but the last."""
        engine = self._engine
        with engine.lock:
            state = self._idle(verb)
            if not len(self):
                raise InvalidArgument("the session is empty; append at least one token to have a state")
            if state.seq is not None and state.computed > length:
                engine.branches.rewind(state, length)
            request = self._submit_first(state.tokens.ids, length)
        if request is not None:
            self._wait(request)

    def _computed(self, verb: str, length: int) -> SessionBranch:
        """Return the state after ``_catch_up``; ``FailedPrecondition`` if it was changed."""
        state = self._idle(verb)
        if (state.computed if state.seq is not None else 0) != length:
            raise FailedPrecondition(f"{verb}: the session was changed by another thread meanwhile; call again")
        return state

    @contextmanager
    def _branch(self, verb: str) -> Iterator[SessionBranch]:
        """Fork the session's state for one call."""
        with self._engine.lock:
            state = self._idle(verb)
            branch = self._engine.branches.fork(state, len(self))
        try:
            yield branch
        finally:
            self._engine.forget(branch)
