"""A live sequence that a user holds: append, generate, fork, rewind, score, save.

A session is its tokens; the KV state of most of them sits in the pool between calls. ``len(session)`` counts every
token, also the last sampled one, whose state is computed when it is next needed. If the pool is short an idle
session's state is dropped and computed again at its next use, unless the session is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.engine import saved
from quire.engine.chat import encode_chat
from quire.engine.engine import Engine, IdleState, SequenceRequest
from quire.engine.request import TokenBuffer
from quire.engine.tokenizer import Tokenizer
from quire.errors import Cancelled, FailedPrecondition, InvalidArgument, QuireError
from quire.outputs import RequestOutput, StreamDelta
from quire.sampling_params import SamplingParams
from quire.types import Fork

if TYPE_CHECKING:
    from quire.engine.saved import ModelIdentity

Text = str | Sequence[int]
"""Text, or token ids."""


class Session:
    """Made by ``LLM.session``. Every method raises ``FailedPrecondition`` once the session is closed.

    A refused or failed call leaves the session as it was.
    """

    def __init__(
        self,
        engine: Engine,
        tokens: NDArray[np.int64],
        *,
        identity: ModelIdentity,
        defaults: Callable[[], SamplingParams],
        key: Hashable = None,
        pin: bool = False,
        state: IdleState | None = None,
    ) -> None:
        """``state``: computed already, for ``tokens``."""
        engine.check_tokens(tokens)
        if tokens.size:
            engine.check_length(tokens.size, None)
        self._engine = engine
        self._identity = identity
        self._defaults = defaults
        self._state = IdleState(TokenBuffer(tokens), key) if state is None else state
        self._state.pinned |= pin
        self._logits: Tensor | None = None
        self._chat: list[tuple[int, Mapping[str, Any]]] = []
        self._chat_start: int | None = None
        self._closed = False
        engine.hold(self._state)

    # -- what it holds ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._state.tokens)

    @property
    def tokens(self) -> list[int]:
        """All token ids."""
        return list(self._state.tokens.ids.tolist())

    @property
    def text(self) -> str:
        """The text of all tokens, special tokens left out. ``Unsupported`` without a tokenizer."""
        return self._tokenizer("text").decode(self.tokens, skip_special_tokens=True)

    @property
    def pinned(self) -> bool:
        """Whether its state is kept even if the pool is short."""
        return self._state.pinned

    @property
    def modified(self) -> bool:
        """Whether ``set_kv`` wrote into its state, which is then no longer what its tokens give."""
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
        return f"<Session of {len(self)} tokens{', closed' if self._closed else ''}>"

    # -- running ---------------------------------------------------------------------------------------------

    def append(self, text: Text) -> Self:
        """Add text or token ids (no BOS) and run them."""
        with self._engine.lock:
            state = self._idle("append")
            new = self._encode(text)
            if not new.size:
                return self
            self._engine.check_tokens(new)
            self._engine.check_length(len(self) + new.size, None)
            before = len(self)
            state.tokens.extend(new)
            try:
                self.compute()
            except BaseException:
                self._engine.rewind(state, before)
                state.tokens.truncate(before)
                raise
            self._logits = None
            return self

    def generate(self, params: SamplingParams | None = None) -> RequestOutput:
        """Continue; the new tokens stay in the session, but for a stop token or stop string that ended it."""
        request = self._start(params)
        try:
            self._engine.run([request])
        finally:
            self._settle(request)
        return self._engine.output([request])

    def stream(self, params: SamplingParams | None = None) -> Iterator[StreamDelta]:
        """As ``generate``, token by token. Leaving the loop early cancels; what was generated stays."""
        with self._engine.lock:
            self._idle("stream")
            chosen = self._defaults() if params is None else params
            self._engine.check_params(chosen)
            self._engine.check_length(len(self), chosen)
        return self._deltas(chosen)

    def _deltas(self, params: SamplingParams) -> Iterator[StreamDelta]:
        request = self._start(params)
        text, count = 0, 0
        try:
            while True:
                self._engine.step()
                if request.finished:
                    break
                if len(request.output_ids) > count:
                    yield StreamDelta(text=request.text[text:], token_ids=request.output_ids[count:])
                    text, count = len(request.text), len(request.output_ids)
            yield StreamDelta(
                text=request.text[text:],
                token_ids=request.output_ids[count:],
                finish_reason=request.finish_reason,
                stop_reason=request.stop_reason,
            )
        finally:
            if not request.finished:
                self._engine.cancel(request.request_id)
                while not request.finished:
                    self._engine.step()
            self._settle(request)

    def _start(self, params: SamplingParams | None) -> SequenceRequest:
        with self._engine.lock:
            state = self._idle("generate")
            chosen = self._defaults() if params is None else params
            ids = state.tokens.ids.astype(np.int64)
            return self._engine.submit(ids, chosen, key=state.key, state=state)[0]

    def _settle(self, request: SequenceRequest) -> None:
        """Take over the sequence and the tokens that count."""
        with self._engine.lock:
            state = self._state
            kept = request.output_ids if request.kept is None else request.output_ids[: request.kept]
            state.tokens.extend(kept)
            if kept:
                self._logits = None
            self._engine.settle(state, request)
            self._engine.rewind(state, len(state.tokens))
        if request.finish_reason == "error" and request.error is not None:
            raise request.error

    def compute(self, *, logits: bool = False) -> None:
        """Run what is not computed yet: all but the last token, which whoever needs its logits runs."""
        state = self._state
        if not logits and state.computed >= len(state.tokens) - 1 and state.seq is not None:
            return
        if not len(state.tokens) or (len(state.tokens) == 1 and not logits):
            return
        rows: list[Tensor] = []

        def keep(position: int, rows_RV: Tensor) -> None:
            del position
            rows.append(rows_RV[-1])

        if not logits:
            last = int(state.tokens.ids[-1])
            state.tokens.truncate(len(state.tokens) - 1)
            try:
                self._run()
            finally:
                state.tokens.append(last)
        else:
            self._run(on_logits=keep)
            self._logits = rows[-1].float().clone()

    def _run(self, on_logits: Callable[[int, Tensor], None] | None = None) -> None:
        request = self._engine.submit_run(self._state, on_logits=on_logits)
        try:
            self._engine.run([request])
        finally:
            self._engine.settle(self._state, request)
        if request.error is not None:
            raise request.error
        if request.finish_reason == "cancelled":
            raise Cancelled("the session's call was cancelled")

    def logits(self) -> Tensor:
        """Logits of the next token, float32 ``[V]``. ``InvalidArgument`` for an empty session."""
        with self._engine.lock:
            self._idle("logits")
            if not len(self):
                raise InvalidArgument("the session is empty; append at least one token to ask what comes next")
            if self._logits is None:
                self.compute(logits=True)
            if self._logits is None:
                raise QuireError("a forward gave no logits")
            return self._logits.clone()

    def score(self, text: Text) -> list[float]:
        """Log-probability of each of these tokens, after the session and each other. The session is unchanged."""
        with self._engine.lock:
            self._idle("score")
            new = self._encode(text)
            self._engine.check_tokens(new)
            if not len(self):
                raise InvalidArgument("the session is empty; append at least one token to score what follows it")
            if not new.size:
                return []
            self._engine.check_length(len(self) + new.size, None)
            start = len(self)
            self.compute()
            scores = [0.0] * int(new.size)
            with self._branch(start - 1) as branch:
                # The last token of the session and all scored ones but the last: each gives its successor's logits.
                branch.tokens.extend(np.append(self._state.tokens.ids[start - 1 :], new[:-1]))

                def read(position: int, rows_RV: Tensor) -> None:
                    # Rows before the session's last token come if its state had to be computed again.
                    first = position - (start - 1)
                    rows_RV = rows_RV[max(0, -first) :]
                    first = max(0, first)
                    wanted = torch.from_numpy(new[first : first + rows_RV.shape[0]]).to(rows_RV.device)
                    picked = torch.log_softmax(rows_RV.float(), -1).gather(1, wanted.unsqueeze(1))
                    scores[first : first + rows_RV.shape[0]] = picked.squeeze(1).tolist()

                request = self._engine.submit_run(branch, on_logits=read, fresh_from=start - 1, all_logits=True)
                try:
                    self._engine.run([request])
                finally:
                    self._engine.settle(branch, request)
                if request.error is not None:
                    raise request.error
            return scores

    def _branch(self, length: int) -> Branch:
        return Branch(self._engine, self._state, length)

    # -- fork and rewind -------------------------------------------------------------------------------------

    @overload
    def fork(self, at: int | None = None) -> Session: ...
    @overload
    def fork(self, at: int | None = None, *, n: int) -> list[Session]: ...
    def fork(self, at: int | None = None, n: int | None = None) -> Session | list[Session]:
        """A copy-on-write copy: of all tokens, or of the first ``at``. With ``n`` a list of that many."""
        with self._engine.lock:
            state = self._idle("fork")
            length = len(self) if at is None else at
            if not isinstance(length, int) or not 0 <= length <= len(self):
                raise InvalidArgument(f"fork at {at!r}; 0..{len(self)} (the tokens of the session) can be forked")
            if n is not None and (not isinstance(n, int) or n < 1):
                raise InvalidArgument(f"fork n {n!r}; at least 1 is needed")
            children = [self._child(state, length) for _ in range(1 if n is None else n)]
            return children[0] if n is None else children

    def _child(self, state: IdleState, length: int) -> Session:
        child = Session(
            self._engine,
            state.tokens.ids[:length].astype(np.int64),
            identity=self._identity,
            defaults=self._defaults,
            key=state.key,
            pin=state.pinned,
        )
        fork_state(self._engine, state, child._state, min(length, state.computed))
        if length == len(self) and self._logits is not None:
            child._logits = self._logits.clone()
        child._chat_start = self._chat_start if self._chat_start is not None and self._chat_start <= length else None
        child._chat = [turn for turn in self._chat if turn[0] <= length]
        return child

    def rewind(self, to: int | None = None, n: int | None = None) -> int:
        """Go back to the first ``to`` tokens, or by ``n`` tokens. Returns the tokens that must be run again."""
        with self._engine.lock:
            state = self._idle("rewind")
            if (to is None) == (n is None):
                raise InvalidArgument(f"rewind takes to= or n=, one of them; got to={to!r}, n={n!r}")
            length = to if to is not None else len(self) - (n or 0)
            cost = self._cost(length, f"to={to}" if to is not None else f"n={n}")
            if length < len(self):
                self._logits = None
            self._engine.rewind(state, length)
            state.tokens.truncate(length)
            self._chat = [turn for turn in self._chat if turn[0] <= length]
            if self._chat_start is not None and self._chat_start > length:
                self._chat_start = None
            self._engine.metrics.rewinds.inc()
            self._engine.metrics.tokens_replayed.inc(cost)
            return cost

    def rewind_cost(self, to: int) -> int:
        """Tokens that a rewind to ``to`` would have to run again: 0 for attention whose state is in the pool."""
        with self._engine.lock:
            self._idle("rewind_cost")
            return self._cost(to, f"to={to}")

    def _cost(self, length: int, given: str) -> int:
        if not isinstance(length, int) or not 0 <= length <= len(self):
            raise InvalidArgument(f"rewind {given}; 0..{len(self)} (the tokens of the session) can be gone back to")
        state = self._state
        if state.seq is None:
            return length
        reached = min(length, state.computed)
        behind = max(0, min(length, len(self) - 1) - state.computed)
        return behind + self._engine.runner.state.rewind_cost(state.seq, reached)

    # -- chat ------------------------------------------------------------------------------------------------

    def chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None) -> RequestOutput:
        """Add messages, rendered with the model's chat template, and generate the answer.

        ``messages`` are the new ones only. The session's tokens become those that a stateless chat of all turns would
        have; what they share with the present ones is kept, the rest is run.
        """
        self._add_messages(messages, params)
        output = self.generate(params)
        self._chat.append((len(self), {"role": "assistant", "content": output.outputs[0].text}))
        return output

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> Iterator[StreamDelta]:
        """``chat`` as a stream. What was generated when the loop is left counts as the answer."""
        self._add_messages(messages, params)
        return self._chat_deltas(self.stream(params))

    def _chat_deltas(self, deltas: Iterator[StreamDelta]) -> Iterator[StreamDelta]:
        text = ""
        try:
            for delta in deltas:
                text += delta.text
                yield delta
        finally:
            self._chat.append((len(self), {"role": "assistant", "content": text}))

    def _add_messages(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None) -> None:
        with self._engine.lock:
            self._idle("chat")
            start = len(self) if self._chat_start is None else self._chat_start
            turns = [message for _, message in self._chat] + list(messages)
            wanted = np.array(encode_chat(self._tokenizer("chat"), turns), dtype=np.int64)
            self._engine.check_length(start + wanted.size, params or self._defaults())
            present = self._state.tokens.ids[start:]
            size = min(present.size, wanted.size)
            differs = np.flatnonzero(present[:size] != wanted[:size])
            common = int(differs[0]) if differs.size else size
            history, before = list(self._chat), self._state.tokens.copy()
            try:
                self.rewind(to=start + common)
                self.append(wanted[common:].tolist())
            except BaseException:
                self._state.tokens, self._chat = before, history
                raise
            self._chat_start = start
            self._chat = [*history, *((len(self), message) for message in messages)]

    # -- saving ----------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the state file: under a temporary name, synced, renamed. What is not computed yet is computed first."""
        with self._engine.lock:
            saved.save(self._engine, self._savable(), self._identity, Path(path))

    def to_bytes(self) -> bytes:
        """The state file as bytes."""
        with self._engine.lock:
            return saved.to_bytes(self._engine, self._savable(), self._identity)

    def _savable(self) -> IdleState:
        state = self._idle("save")
        self.compute()
        return state

    # -- looking inside --------------------------------------------------------------------------------------

    def kv(self, layer: int) -> dict[str, Tensor]:
        """The layer's state: ``k [tokens, Hkv, Dk]`` as stored (rotated) and ``v [tokens, Hkv, Dv]``, of all tokens."""
        with self._engine.lock:
            state = self._idle("kv")
            self._engine.runner.state.spec(layer)
            if not len(self):
                raise InvalidArgument("the session is empty; append at least one token to have a state")
            if state.computed < len(self):
                self.compute(logits=True)
            if state.seq is None:
                raise QuireError("a computed session has no sequence")
            k, v = self._engine.runner.state.debug_get_kv(state.seq, layer=layer)
            return {"k": k, "v": v}

    def set_kv(self, layer: int, *, k: Tensor | None = None, v: Tensor | None = None, start: int = 0) -> None:
        """Overwrite rows of a layer from position ``start`` on; what is not given stays.

        The session is pinned and marked ``modified`` from then on, and never feeds the prefix cache.
        """
        with self._engine.lock:
            state = self._idle("set_kv")
            if k is None and v is None:
                raise InvalidArgument("set_kv needs k=, v= or both")
            present = self.kv(layer)
            given = k if k is not None else v
            count = given.shape[0] if given is not None and given.dim() == 3 else 0
            if start < 0 or start + count > len(self):
                raise InvalidArgument(f"set_kv: rows {start}..{start + count}, and the session has {len(self)} tokens")
            if state.seq is None:
                raise QuireError("a computed session has no sequence")
            rows = slice(start, start + count)
            new_k, new_v = (present["k"][rows] if k is None else k), (present["v"][rows] if v is None else v)
            cache = self._engine.cache
            if cache is not None and state.seq in cache:
                cache.remove(state.seq)
            self._engine.runner.state.debug_set_kv(state.seq, start, new_k, new_v, layer=layer)
            state.modified = True
            state.pinned = True
            self._logits = None

    # -- closing ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the pages back at once. Closing twice is harmless."""
        if not self._closed:
            self._closed = True
            self._engine.forget(self._state)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Nobody can use it any more. Interpreter shutdown may have taken parts away already.
        try:
            self.close()
        except Exception:  # pragma: no cover - only at interpreter exit
            return

    # -- helpers ---------------------------------------------------------------------------------------------

    def _open(self, verb: str) -> IdleState:
        if self._closed:
            raise FailedPrecondition(f"{verb}: the session is closed; make a new one")
        return self._state

    def _idle(self, verb: str) -> IdleState:
        state = self._open(verb)
        if state.busy:
            raise FailedPrecondition(f"{verb}: the session is generating; finish or close its stream first")
        self._engine.hold(state)
        return state

    def _tokenizer(self, verb: str) -> Tokenizer:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise FailedPrecondition(f"{verb} needs a tokenizer, and this model has none; use token ids")
        return tokenizer

    def _encode(self, text: Text) -> NDArray[np.int64]:
        if isinstance(text, str):
            return np.array(self._tokenizer("text").encode(text, add_special_tokens=False), dtype=np.int64)
        return as_token_ids(text)


class Branch:
    """A fork of a session's state for one call."""

    def __init__(self, engine: Engine, parent: IdleState, length: int) -> None:
        self._engine = engine
        self._state = IdleState(TokenBuffer(parent.tokens.ids[:length]), parent.key)
        self._state.modified = parent.modified
        fork_state(engine, parent, self._state, min(length, parent.computed))

    def __enter__(self) -> IdleState:
        return self._state

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.forget(self._state)


def fork_state(engine: Engine, parent: IdleState, child: IdleState, length: int) -> None:
    """Let ``child`` have the first ``length`` computed tokens of ``parent``."""
    child.modified = parent.modified
    if parent.seq is None or not length:
        return
    seq = engine.runner.new_seq()
    engine.apply(Fork(parent.seq, seq, length))
    child.seq, child.computed = seq, length
    engine.hold(child)


def as_token_ids(tokens: Sequence[int]) -> NDArray[np.int64]:
    """A row of token ids; ``InvalidArgument`` for anything that is not integers."""
    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError):
        ids = np.empty((0, 0))
    if ids.ndim == 1 and ids.size == 0:
        return np.empty(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidArgument(f"token ids must be a row of integers, got {str(tokens)[:60]!r}")
    return ids.astype(np.int64)
