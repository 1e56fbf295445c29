"""A live sequence that a user holds: append, generate, fork, rewind, score, save.

A session is its tokens; the KV state of most of them sits in the pool between calls. ``len(session)`` counts every
token, also the last sampled one, whose state is computed when it is next needed. If the pool is short an idle
session's state is dropped and computed again at its next use, unless the session is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.branches.adapter_keys import NO_SALT, AdapterNames, Fingerprints, runs_of_session
from quire.branches.cache_rows import become_fork
from quire.branches.media import NO_MEDIA, Media
from quire.contracts.executor import ExecutorInputs
from quire.contracts.layers import LayerSpec
from quire.engine import layer_memory, saved_sessions
from quire.engine.chat_rendering import encode_chat
from quire.engine.chat_turns import Asked, ChatTurns, ReadAnswer
from quire.engine.engine import Engine
from quire.engine.prompts import Prompt, Text, read_prompt
from quire.engine.request_outputs import request_output
from quire.engine.sequence_request import PinAccount, SequenceRequest, SessionState
from quire.engine.session_labels import Labelled
from quire.engine.session_repr import session_repr
from quire.engine.session_stream import SessionStream
from quire.engine.token_ids import as_token_ids, is_integer
from quire.engine.tokenizer import Tokenizer
from quire.errors import Cancelled, FailedPrecondition, InvalidArgument, ResourceExhausted
from quire.finalizers import unless_exiting
from quire.interrupts import uninterrupted
from quire.models.fingerprint import ModelIdentity
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.executor.cache import KVCache
    from quire.executor.executor import Executor


class Session(Labelled):
    """Made by ``LLM.session``. Every method raises ``FailedPrecondition`` once the session is closed, and while it is
    generating. A refused or failed call leaves the session as it was.

    Several threads may use sessions; what runs for one of them holds up nobody else.
    """

    def __init__(
        self,
        engine: Engine,
        state: SessionState,
        *,
        identity: ModelIdentity,
        defaults: Callable[[], SamplingParams],
        executor: Callable[[], Executor],
        adapters: AdapterNames | None = None,
    ) -> None:
        """``executor``: the one over the engine's runner, made when it is first asked for. ``adapters``: the names of the loaded
        adapters; None: they go by their fingerprints."""
        self._engine = engine
        self._executor = executor
        if adapters is None:
            adapters = Fingerprints(engine.states.fingerprint_of, engine.runner.adapters.find)
        self._names = adapters
        self._identity = identity
        self._defaults = defaults
        self._state = state
        self._turns = ChatTurns()
        with engine.lock:
            engine.states.hold(state)
            self._end = partial(engine.forget, state)
            engine.orphans.watch(self, self._end)
            self._closed = False

    # -- what it holds ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._state.tokens)

    @property
    def tokens(self) -> list[int]:
        """All token ids; -1 to -4, as they were given, where embeddings stand."""
        held = self._state.tokens
        return held.media.as_given(held.ids)

    @property
    def text(self) -> str:
        """The text of all tokens, special tokens and embeddings left out. ``FailedPrecondition`` without a tokenizer."""
        spoken = [token for token in self.tokens if token >= 0]
        return self._tokenizer("text").decode(spoken, skip_special_tokens=True)

    @property
    def pinned(self) -> bool:
        """Whether its state is kept even if the pool is short."""
        return self._state.pinned

    @property
    def window(self) -> tuple[int, int] | None:
        """(window, sink) of what it keeps of its tokens; None: all of them."""
        window = self._state.window
        return None if window is None else (window.size, window.sink)

    @property
    def adapter(self) -> str | None:
        """The name of the adapter under which it goes on; None: the base model."""
        adapter = self._state.adapter
        return None if adapter is None else self._names.name_of(adapter)

    @property
    def modified(self) -> bool:
        """Whether its state cannot be had by computing its tokens: ``set_kv`` wrote into it, or it came from a file or a KV cache and
        the embeddings that stood at placeholders did not."""
        return self._state.modified

    @property
    def num_computed(self) -> int:
        """Tokens whose state is in the pool now."""
        return self._state.computed

    @property
    def pages(self) -> tuple[int, int]:
        """(pages that it holds, those of them that others hold too)"""
        with self._engine.lock:
            seq = self._open("pages").seq
            return (0, 0) if seq is None else self._engine.runner.state.sequence_pages(seq)

    @property
    def sequence_id(self) -> int | None:
        """Its sequence in the KV state, for looking at it with the state's own verbs; None while it is not in the pool.
        It may change with every call."""
        return self._open("sequence_id").seq

    def __repr__(self) -> str:
        return session_repr(self._engine, self._state, closed=self._closed, name=self.name)

    # -- running ---------------------------------------------------------------------------------------------

    @uninterrupted
    def append(self, text: Prompt) -> Self:
        """Add text or token ids (no BOS), perhaps with embeddings (``quire.engine.prompts.read_prompt``), and run them."""
        new, media = self._encode(text)
        with self._engine.lock:
            state = self._idle("append")
            if not new.size:
                return self
            self._engine.checks.tokens(new, media)
            self._engine.checks_of(state).length(len(self) + new.size, None)
            request = self._submit_all_but_last(np.append(state.tokens.ids, new), media)
            if request is None:
                state.tokens.media |= media
                state.tokens.extend(new)
                state.logits = None
        if request is not None:
            self._wait(request)
        return self

    def generate(self, params: SamplingParams | None = None) -> RequestOutput:
        """Continue; the new tokens stay in the session, but for a stop token or stop string that ended it."""
        return self._generate(self._check_params("generate", len(self), params))

    @uninterrupted
    def _generate(self, params: SamplingParams) -> RequestOutput:
        with self._engine.lock:
            state = self._idle("generate")
            request = self._submit(state.tokens.ids, params)
        return self._result(request)

    def stream(self, params: SamplingParams | None = None) -> SessionStream:
        """As ``generate``, token by token. Leaving the loop early cancels; what was generated stays."""
        with self._engine.lock:
            chosen = self._check_params("stream", len(self), params)
        return SessionStream(self._engine, lambda: self._submit(self._idle("stream").tokens.ids, chosen))

    def cancel(self) -> bool:
        """End what another thread is running on this session, at the next step; False if nothing is. Never waits."""
        request = self._state.request
        return request is not None and self._engine.cancel(request.request_id)

    def belongs_to(self, engine: Engine) -> bool:
        """Return whether this engine runs it."""
        return self._engine is engine

    def check_generate(self, params: SamplingParams) -> None:
        """Refuse now whatever ``generate`` would refuse."""
        self._engine.checks.params(params, in_session=True)  # without the lock: a grammar may take long to compile
        with self._engine.lock:
            self._check_params("generate", len(self), params)

    def submit_generate(self, params: SamplingParams, request_id: str | None = None) -> SequenceRequest:
        """Queue what ``generate`` runs. The session is generating until whoever steps the engine has run it."""
        with self._engine.lock:
            return self._submit(self._state.tokens.ids, params, request_id)

    def _check_params(self, verb: str, length: int, params: SamplingParams | None) -> SamplingParams:
        """Everything that ``submit`` would refuse, now."""
        chosen = self._chosen(verb, params)
        self._engine.checks_of(self._state).length(length, chosen)
        return chosen

    def _chosen(self, verb: str, params: SamplingParams | None) -> SamplingParams:
        """Check parameters. A large grammar is tried for seconds: not under the lock, and open to interrupts."""
        self._idle(verb)
        chosen = self._defaults() if params is None else params
        if not isinstance(chosen, SamplingParams):
            raise InvalidArgument(f"{verb} takes SamplingParams, got {type(chosen).__name__}", field="params")
        self._engine.checks.params(chosen, in_session=True)
        return chosen

    def _submit(
        self, tokens: NDArray[Any], params: SamplingParams | None, request_id: str | None = None
    ) -> SequenceRequest:
        state, chosen = self._state, self._check_params("generate", len(tokens), params)
        return self._engine.submit(tokens.astype(np.int64), chosen, request_id=request_id, session=state)[0]

    def _result(self, request: SequenceRequest) -> RequestOutput:
        self._engine.run([request])
        if request.error is not None:
            raise request.error
        return request_output([request], self._engine.tokenizer)

    def use_adapter(self, name: str | None) -> None:
        """Go on under a loaded adapter, or with None under the base model. ``NotFound`` for a name that is not loaded.

        The tokens before the last one stay as they were run. The last one, which gives the logits of the next, runs once more
        under the new adapter; so do all that come.
        """
        with self._engine.lock:
            state = self._idle("use_adapter")
            if name is not None and not isinstance(name, str):
                raise InvalidArgument(field="name", given=name, allowed="the name of an adapter or None")
            adapter = None if name is None else self._names.id_of(name)
            self._engine.states.change(state, len(self), adapter)

    @uninterrupted
    def compute(self) -> None:
        """Run what is not computed yet: all but the last token, which whoever needs its logits runs."""
        self._compute("compute")

    def _compute(self, verb: str) -> None:
        with self._engine.lock:
            request = self._submit_all_but_last(self._idle(verb).tokens.ids)
        if request is not None:
            self._wait(request)

    def _submit_all_but_last(self, tokens: NDArray[np.int64], media: Media = NO_MEDIA) -> SequenceRequest | None:
        """None if these are computed already. ``media``: of those that are not the session's yet."""
        state = self._state
        if len(tokens) < 2 or (state.seq is not None and state.computed >= len(tokens) - 1):
            return None
        return self._engine.submit_run(state, tokens[:-1], tail=tokens[-1:].tolist(), media=media)

    def _wait(self, request: SequenceRequest) -> None:
        self._engine.run([request])
        if request.error is not None:
            raise request.error
        if request.finish_reason == "cancelled":
            raise Cancelled("the session's call was cancelled; the session is as it was before")

    @uninterrupted
    def logits(self) -> Tensor:
        """Logits of the next token, float32 ``[V]``. ``InvalidArgument`` for an empty session."""
        with self._engine.lock:
            state = self._idle("logits")
            if not len(self):
                raise InvalidArgument("the session is empty; append at least one token to ask what comes next")
            if state.logits is not None:
                return state.logits.clone()
            rows: list[Tensor] = []
            request = self._engine.submit_run(
                state, state.tokens.ids, on_logits=lambda position, rows_RV: rows.append(rows_RV[-1].float().clone())
            )
        self._wait(request)
        # Others may have changed the session since.
        work = request.work
        if state.runs == work.runs and np.array_equal(state.tokens.ids, work.tokens.ids):
            state.logits = rows[-1]
        return rows[-1].clone()

    @uninterrupted
    def score(self, text: Text) -> list[float]:
        """Log-probability of each of these tokens, after the session and each other. The session is unchanged."""
        if isinstance(text, (Mapping, ExecutorInputs)):
            raise InvalidArgument(
                "score takes text or token ids: an embedding has no probability; append it instead", field="text"
            )
        new, _ = self._encode(text)
        with self._engine.lock:
            state = self._idle("score")
            self._engine.checks.tokens(new)
            if not len(self):
                raise InvalidArgument("the session is empty; append at least one token to score what follows it")
            if not new.size:
                return []
            self._engine.checks_of(state).length(len(self) + new.size, None)
        self._compute("score")
        with self._branch("score") as branch:
            # The last token of the session and all scored ones but the last: each gives its successor's logits.
            first = len(branch.tokens) - 1
            self._engine.states.rewind(branch, first)
            scores = [0.0] * int(new.size)

            def read(position: int, rows_RV: Tensor) -> None:
                # Rows before the session's last token come if its state had to be computed again.
                rows_RV = rows_RV[max(0, first - position) :]
                start = max(0, position - first)
                wanted = torch.from_numpy(new[start : start + rows_RV.shape[0]]).to(rows_RV.device)
                picked = torch.log_softmax(rows_RV.float(), -1).gather(1, wanted.unsqueeze(1))
                scores[start : start + rows_RV.shape[0]] = picked.squeeze(1).tolist()

            tokens = np.append(branch.tokens.ids, new[:-1])
            self._wait(self._engine.submit_run(branch, tokens, on_logits=read, fresh_from=first, all_logits=True))
            return scores

    @contextmanager
    def _branch(self, verb: str) -> Iterator[SessionState]:
        """A fork of the session's state for one call."""
        with self._engine.lock:
            state = self._idle(verb)
            branch = SessionState(tokens=state.tokens.fork(), key=state.key, window=state.window)
            self._engine.states.fork(state, branch, len(self))
        try:
            yield branch
        finally:
            self._engine.forget(branch)

    # -- fork and rewind -------------------------------------------------------------------------------------

    @overload
    def fork(self, at: int | None = None) -> Session: ...
    @overload
    def fork(self, at: int | None = None, *, n: int) -> list[Session]: ...
    def fork(self, at: int | None = None, n: int | None = None) -> Session | list[Session]:
        """A copy-on-write copy under the same adapter: of all tokens, or of the first ``at``. With ``n`` a list of that many.

        A child is pinned if its parent is, and has the same labels and no name.
        """
        with self._engine.lock:
            state = self._idle("fork")
            length = self._position("at", at) if at is not None else len(self)
            if n is not None and (not is_integer(n) or n < 1):
                raise InvalidArgument(field="n", given=n, allowed="an integer of at least 1")
            children = [self._child(state, length) for _ in range(1 if n is None else n)]
            return children[0] if n is None else children

    def _child(self, parent: SessionState, length: int) -> Session:
        state = SessionState(
            tokens=parent.tokens.fork(length),
            key=parent.key,
            pinned=parent.pinned,
            window=parent.window,
        )
        state.account = parent.account
        self._engine.states.fork(parent, state, length)
        if length == len(self) and parent.logits is not None:
            state.logits = parent.logits.clone()
        child = Session(
            self._engine,
            state,
            identity=self._identity,
            defaults=self._defaults,
            executor=self._executor,
            adapters=self._names,
        )
        child._turns, child._labels = self._turns.up_to(length), self._labels
        return child

    def rewind(self, to: int | None = None, n: int | None = None) -> int:
        """Go back to the first ``to`` tokens, or by ``n`` tokens. Returns the tokens that must be run again before new ones can be.

        Where the logits of the last token are wanted at once, it runs again too: on models with recurrent layers from the nearest
        state that was kept before it.
        """
        with self._engine.lock:
            state = self._idle("rewind")
            if (to is None) == (n is None):
                raise InvalidArgument(f"rewind takes to= or n=, one of them; got to={to!r}, n={n!r}", field="to")
            if to is not None:
                length = self._position("to", to)
            else:
                length = len(self) - self._position("n", n)
            cost = self._cost(length)
            self._engine.states.change(state, length, state.adapter)
            self._turns.cut(length)
            self._engine.metrics.rewinds.inc()
            self._engine.metrics.tokens_replayed.inc(cost)
            return cost

    def rewind_cost(self, to: int) -> int:
        """Tokens that a rewind to ``to`` would have to run again: 0 for attention whose state is in the pool, more where the
        model's windows have let go of what lies before ``to``."""
        with self._engine.lock:
            self._idle("rewind_cost")
            return self._cost(self._position("to", to))

    def _position(self, name: str, value: object) -> int:
        if not is_integer(value) or not 0 <= int(value) <= len(self):  # type: ignore[call-overload]
            allowed = f"an integer in 0..{len(self)}, the tokens of the session"
            raise InvalidArgument(field=name, given=value, allowed=allowed)
        return int(value)  # type: ignore[call-overload, no-any-return]

    def _cost(self, length: int) -> int:
        state, states = self._state, self._engine.states
        # The last token there may have been run under another adapter than the one that goes on.
        same = state.runs.agreed(runs_of_session(state.runs, length, state.adapter), length)
        if state.seq is None:
            held = self._engine.host.reach(state, same)
            return max(0, min(length, len(self) - 1) - held) if held else length
        kept = states.reach(state, same)
        if kept < min(same, state.computed) and (found := states.found(state, same)) is not None:
            # It is not kept; the prefix cache may have a sequence that is nearer.
            kept = max(kept, found[1])
        # The last token may never have been run; then it is not run again either.
        return max(0, min(length, len(self) - 1) - kept)

    # -- chat ------------------------------------------------------------------------------------------------

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        answer: ReadAnswer | None = None,
    ) -> RequestOutput:
        """Add messages, rendered with the model's chat template, and generate the answer.

        ``messages`` are the new ones only. The session's tokens become those that a stateless chat of all turns would
        have; what they share with the present ones is kept, the rest is run. What was generated or appended behind an
        earlier answer belongs to it, and what came where one could begin is one.

        ``answer``: makes of the answer's text the message that the next turn's template gets, for models whose text is not
        its content; None: ``{"role": "assistant", "content": text}``.
        """
        return self._chat(messages, self._chosen("chat", params), answer)

    @uninterrupted
    def _chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, answer: ReadAnswer | None
    ) -> RequestOutput:
        asked, tokens = self._ask(messages, params, answer)
        with self._engine.lock:
            self._idle("chat")
            request = self._submit(tokens, params)
        try:
            return self._result(request)
        finally:
            self._turns.answered(asked, request, len(self))

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        answer: ReadAnswer | None = None,
    ) -> SessionStream:
        """``chat`` as a stream. What was generated when the loop is left counts as the answer."""
        asked, tokens = self._ask(messages, params, answer)
        turns, state = self._turns, self._state

        def start() -> SequenceRequest:
            self._idle("chat")
            return self._submit(tokens, params)

        return SessionStream(self._engine, start, lambda request: turns.answered(asked, request, len(state.tokens)))

    def _ask(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None, answer: ReadAnswer | None
    ) -> tuple[Asked, NDArray[np.int64]]:
        """What is asked, and all tokens of the session with it."""
        with self._engine.lock:
            self._idle("chat")
            if not isinstance(messages, (list, tuple)) or not messages:
                raise InvalidArgument(field="messages", given=messages, allowed="a list of at least one new message")
            tokenizer, ids = self._tokenizer("chat"), self.tokens
            turns, checks = self._turns.up_to(len(ids)), self._engine.checks_of(self._state)
        # Nobody else waits while a long conversation is rendered and tokenised.
        asked = turns.ask(messages, ids, tokenizer, answer)
        rendered = encode_chat(tokenizer, asked.all_messages, max_bytes=checks.max_text_bytes)
        tokens = np.array([*ids[: asked.start], *rendered], dtype=np.int64)
        checks.history(tokens)
        with self._engine.lock:
            self._check_params("chat", tokens.size, params)
            if self.tokens != ids:
                raise FailedPrecondition("chat: the session was changed by another thread meanwhile; call again")
            return asked, tokens

    # -- pinning ---------------------------------------------------------------------------------------------

    def pin(self, account: PinAccount | None = None) -> None:
        """Keep its state even if the pool is short. ``account``: among whose pinned sessions it counts, also with all that it will
        hold; ``QuotaExceeded`` or ``PoolExhausted`` if these would hold too much then."""
        with self._engine.lock:
            state = self._idle("pin")
            self._engine.pins.check(state, len(self), account)
            state.pinned, state.account = True, account

    def unpin(self) -> None:
        """Let its state be dropped again if the pool is short. ``FailedPrecondition`` once ``set_kv`` wrote into it."""
        with self._engine.lock:
            state = self._idle("unpin")
            if state.modified:
                raise FailedPrecondition("unpin: a state that set_kv wrote into cannot be computed again, so it stays")
            state.pinned, state.account = False, None

    # -- saving ----------------------------------------------------------------------------------------------

    @uninterrupted
    def save(self, path: str | Path) -> None:
        """Write the state file: under a temporary name, synced, renamed. What is not computed yet is computed first."""
        if not isinstance(path, (str, Path)) or not str(path):
            raise InvalidArgument(f"save takes the name of a file, got {path!r}; to_bytes gives bytes", field="path")
        self._compute_to_save("save")
        with self._branch("save") as branch:
            saved_sessions.save(self._engine, branch, self._identity, Path(path))

    @uninterrupted
    def to_bytes(self) -> bytes:
        """The state file as bytes."""
        self._compute_to_save("to_bytes")
        with self._branch("to_bytes") as branch:
            return saved_sessions.to_bytes(self._engine, branch, self._identity)

    def _compute_to_save(self, verb: str) -> None:
        """All but the last token, and that too if it is an embedding, which the file will not have."""
        with self._engine.lock:
            self._idle(verb)
            ends_in_media = bool(len(self)) and self._state.tokens.ids[-1] < 0
        if ends_in_media:
            self._catch_up(verb, len(self))
        else:
            self._compute(verb)

    @uninterrupted
    def as_cache(self, *, capacity: int | None = None, dynamic: bool = False) -> KVCache:
        """A KV cache of one row for the verbs of ``LLM.executor``, which is a copy-on-write fork of the session: no page is copied,
        and each goes on by itself. ``LLM.session(cache=...)`` is the way back.

        All tokens are in it, with their adapters and the session's window; the last one is run if it was not. ``capacity`` and
        ``dynamic`` as of ``create_kv_cache``; ``ResourceExhausted`` if the session is longer than that.
        """
        with self._engine.lock:
            self._idle("as_cache")
            cache = self._executor().create_kv_cache(capacity=capacity, dynamic=dynamic)
            room = cache.pool.max_model_len if cache.dynamic else cache.capacity
            if len(self) > room:
                cache.release()
                raise ResourceExhausted(
                    f"as_cache: the session has {len(self)} tokens, and a row of this KV cache holds {room}"
                )
        try:
            if len(self):
                self._catch_up("as_cache", len(self))
            with self._engine.lock:
                state = self._computed("as_cache", len(self))
                become_fork(cache, state, private=state.key != NO_SALT)
                self._engine.metrics.forks.inc(state.seq is not None)
        except BaseException:
            cache.release()
            raise
        return cache

    # -- looking inside --------------------------------------------------------------------------------------

    @uninterrupted
    def kv(self, layer: int) -> dict[str, Tensor]:
        """What a layer remembers of the session, as stored.

        Attention layers: ``k [tokens, Hkv, Dk]`` (rotated) and ``v [tokens, Hkv, Dv]``; latent layers: ``latent [tokens, row]``; of all
        tokens, or with a window of those that are still held, whose ``positions`` (int64) are then given too. Recurrent layers:
        ``state_0`` and so on, as they stand before the last token, from where the session goes on.
        """
        spec = self._layer_spec(layer)
        found = self._kept_states(layer, spec)
        if found is not None:
            return found
        self._catch_up("kv", len(self) - (spec.kind == "recurrent"))
        with self._engine.lock:
            state = self._computed("kv", len(self) - (spec.kind == "recurrent"))
            if state.seq is None:
                return layer_memory.initial(spec)
            partly = state.window is not None or getattr(spec, "layer_window", None) is not None
            return layer_memory.read(self._engine.runner.state, state.seq, layer, partly=partly)

    def _kept_states(self, layer: int, spec: LayerSpec) -> dict[str, Tensor] | None:
        """The states of a recurrent layer before the last token, if that has been run and they are kept."""
        with self._engine.lock:
            state, kv = self._idle("kv"), self._engine.runner.state
            last = len(self) - 1
            if spec.kind != "recurrent" or state.seq is None or state.computed <= last:
                return None
            if kv.nearest_reachable(state.seq, last) != last:
                return None
            return layer_memory.read(kv, state.seq, layer, partly=False, position=last)

    @uninterrupted
    def set_kv(self, layer: int, *, start: int = 0, **tensors: Tensor | None) -> None:
        """Overwrite what a layer remembers, by the names that ``kv`` gives: rows from position ``start`` on, or the states of a
        recurrent layer. What is not given stays.

        The session is pinned and marked ``modified`` from then on, never feeds the prefix cache and is never computed
        again. Only its last token is run once more where the logits after it are wanted (``generate``, ``logits``,
        ``score``), which computes the rows of that token anew from what was written.
        """
        spec = self._layer_spec(layer)
        count, length = layer_memory.check_names(spec, layer, tensors, start, len(self)), len(self)
        try:
            self._write(spec, layer, tensors, start, count, length)
        except BaseException:
            if not self._state.modified:
                self._state.anchor = None
            raise

    def _write(
        self, spec: LayerSpec, layer: int, tensors: Mapping[str, Tensor | None], start: int, count: int, length: int
    ) -> None:
        engine = self._engine
        recurrent = spec.kind == "recurrent"
        if recurrent or (engine.runner.state.recurrent_ids and not self.modified):
            # States of recurrent layers before the last token are kept: for its logits it runs again, behind what is written.
            self._catch_up("set_kv", length - 1)
            with engine.lock:
                engine.states.anchor(self._computed("set_kv", length - 1))
        if not recurrent:
            self._catch_up("set_kv", length)
        with engine.lock:
            state = self._computed("set_kv", length - recurrent)
            if state.seq is None:
                raise FailedPrecondition(
                    f"set_kv: before its only token the session has no state of layer {layer} of its own; append a token"
                )
            found = layer_memory.checked(engine.runner.state, state.seq, layer, start, count, tensors)
            engine.states.overwrite(state, layer, start, found)

    def _layer_spec(self, layer: int) -> LayerSpec:
        if not is_integer(layer):
            raise InvalidArgument(field="layer", given=layer, allowed="an integer, as in kv(0)")
        return self._engine.runner.state.layer_spec(layer)

    def _catch_up(self, verb: str, length: int) -> None:
        """Let the state hold the first ``length`` tokens: all, or all but the last."""
        engine = self._engine
        with engine.lock:
            state = self._idle(verb)
            if not len(self):
                raise InvalidArgument("the session is empty; append at least one token to have a state")
            if state.seq is not None and state.computed > length:
                engine.states.rewind(state, length)
            request = None
            if length and (state.seq is None or state.computed < length):
                ids = state.tokens.ids
                request = engine.submit_run(state, ids[:length], tail=ids[length:].tolist())
        if request is not None:
            self._wait(request)

    def _computed(self, verb: str, length: int) -> SessionState:
        """The state after ``_catch_up``."""
        state = self._idle(verb)
        if (state.computed if state.seq is not None else 0) != length:
            raise FailedPrecondition(f"{verb}: the session was changed by another thread meanwhile; call again")
        return state

    # -- closing ---------------------------------------------------------------------------------------------

    @uninterrupted
    def close(self) -> None:
        """Give the pages back at once. Closing twice is harmless."""
        if not self._closed:
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
        # Nobody can use it any more.
        if not getattr(self, "_closed", True):
            self._engine.orphans.leave(self._end)

    # -- helpers ---------------------------------------------------------------------------------------------

    def _open(self, verb: str) -> SessionState:
        if self._closed or self._engine.closed:
            what = "session" if self._closed else "LLM"
            raise FailedPrecondition(f"{verb}: the {what} is closed; make a new one")
        return self._state

    def _idle(self, verb: str) -> SessionState:
        state = self._open(verb)
        self._engine.orphans.bury()  # a stream that nobody holds any more
        if state.busy:
            raise FailedPrecondition(f"{verb}: the session is generating; finish or close its stream first")
        self._engine.states.hold(state)
        return state

    def _tokenizer(self, verb: str) -> Tokenizer:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise FailedPrecondition(f"{verb} needs a tokenizer, and this model has none; use token ids")
        return tokenizer

    def _encode(self, text: Prompt) -> tuple[NDArray[np.int64], Media]:
        if isinstance(text, str):
            self._engine.checks_of(self._state).text(text)
            return np.array(self._tokenizer("text").encode(text, add_special_tokens=False), dtype=np.int64), NO_MEDIA
        if isinstance(text, (Mapping, ExecutorInputs)):
            return read_prompt(text, self._engine.runner.model.hidden_size)
        return as_token_ids(text), NO_MEDIA
