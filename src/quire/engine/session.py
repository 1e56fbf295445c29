"""A live sequence that a user holds: append, generate, fork, rewind, score, save.

A session is its tokens; the KV state of most of them stays in the pool between calls.
``len(session)`` counts every token, also the last sampled one, whose state is computed when it is
next needed. If the pool is short, an idle session's state is dropped and computed again at its next
use, unless the session is pinned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.config import check_int
from quire.contracts.executor import ExecutorInputs
from quire.engine.chat_prompts import encode_chat
from quire.engine.chat_rendering import render_chat, select_template
from quire.engine.chat_turns import Asked, ReadAnswer
from quire.engine.keeping import kept
from quire.engine.next_turn import next_turn_ids, parts_from
from quire.engine.prompts import Prompt, Text
from quire.engine.request import Request
from quire.engine.request_outputs import prefix_output, request_output, reuse_of
from quire.engine.session_branch import SessionBranch
from quire.engine.session_edits import SessionEdits
from quire.engine.session_stream import PreparedTurn, SessionStream
from quire.engine.spelled_tokens import SpelledTokens
from quire.engine.token_ids import is_integer
from quire.errors import FailedPrecondition, InvalidArgument
from quire.hints import MOST_PRIORITY, NO_HINTS, CacheHints, PinAccount, checked_hints
from quire.interrupts import uninterrupted
from quire.outputs import RequestOutput, Reuse
from quire.sampling_params import SamplingParams
from quire.signatures import require_bool
from quire.types import BASE


class Session(SessionEdits):
    """Made by ``LLM.session``. Every method raises ``FailedPrecondition`` once the session is
    closed, and while it is generating. A refused or failed call leaves the session as it was.
    Several threads may use sessions; what runs for one of them holds up no other."""

    @uninterrupted
    @kept
    def append(self, text: Prompt, *, priority: int = 0, use_tqdm: bool | None = None) -> Self:
        """Add text or token ids (no BOS), perhaps with embeddings, and run them. Text continues
        what the session holds: the tokenizer puts no space between, as it may before a prompt.
        ``quire.engine.prompts.read_prompt`` describes prompts with embeddings; ``priority`` is
        that of ``CacheHints``. ``use_tqdm`` shows on stderr how far it is; None: on a terminal, if
        there are more tokens than one step takes."""
        check_int("priority", priority, -MOST_PRIORITY, MOST_PRIORITY)
        if use_tqdm is not None:
            require_bool("use_tqdm", use_tqdm)
        new, media = self._encode(text, self._state.tokens.ids)
        with self._engine.lock:
            state = self._idle("append")
            if not new.size:
                return self
            self._engine.checks.tokens(new, media)
            length = len(self) + new.size
            self._engine.checks_of(state).length(length, None)
            request = self._submit_first(np.append(state.tokens.ids, new), length - 1, media, priority=priority)
            if request is None:
                state.tokens.media |= media
                state.tokens.extend(new)
                state.logits = None
        if request is not None:
            self._wait(request, use_tqdm)
        return self

    # -- generating --------------------------------------------------------------------------------

    def generate(self, params: SamplingParams | None = None, *, hints: CacheHints | None = None) -> RequestOutput:
        """Continue. The new tokens stay in the session, except a stop token or stop string.
        ``hints`` are those of ``LLM.generate``; their prompt is all that the session holds."""
        return self._generate(self._check_params("generate", len(self), params), checked_hints(hints))

    @uninterrupted
    @kept
    def _generate(self, params: SamplingParams, hints: CacheHints) -> RequestOutput:
        with self._engine.lock:
            request = self._submit(self._idle("generate").tokens.ids, params, hints=hints)
        return self._result(request)

    def stream(self, params: SamplingParams | None = None, *, hints: CacheHints | None = None) -> SessionStream:
        """Return an iterator that generates token by token.

        Leaving its loop early cancels; what was generated stays.
        """
        return SessionStream(self._engine, *self.prepare(params, hints=hints))

    def prepare(self, params: SamplingParams | None = None, *, hints: CacheHints | None = None) -> PreparedTurn:
        """Check what ``stream`` runs; return how it starts."""
        hinted = checked_hints(hints)
        with self._engine.lock:
            chosen = self._check_params("stream", len(self), params)
        return PreparedTurn(
            lambda: self._submit(self._idle("stream").tokens.ids, chosen, hints=hinted),
            lambda _: self._keep(wait=False),
        )

    def cancel(self) -> bool:
        """End what another thread is running on this session, at the next step. Return False if
        nothing runs. It never waits."""
        state = self._state if self._state.successor is None else self._state.successor
        request = state.request
        return request is not None and self._engine.cancel(request.request_id)

    def check_generate(self, params: SamplingParams) -> None:
        """Refuse now whatever ``generate`` would refuse."""
        # Without the lock: a grammar may take long to compile.
        self._engine.checks.params(params, in_session=True)
        with self._engine.lock:
            self._check_params("generate", len(self), params)

    def submit_generate(
        self, params: SamplingParams, request_id: str | None = None, hints: CacheHints = NO_HINTS
    ) -> Request:
        """Queue what ``generate`` runs; the session is generating until steps have run it."""
        with self._engine.lock:
            return self._submit(self._state.tokens.ids, params, request_id, hints)

    def _check_params(self, verb: str, length: int, params: SamplingParams | None) -> SamplingParams:
        """Refuse now whatever ``submit`` would refuse."""
        chosen = self._chosen(verb, params)
        self._engine.checks_of(self._state).length(length, chosen)
        return chosen

    def _chosen(self, verb: str, params: SamplingParams | None) -> SamplingParams:
        """Check parameters, interruptibly and without the lock: a large grammar takes seconds."""
        with self._engine.lock:
            self._idle(verb)
        chosen = self._defaults() if params is None else params
        if not isinstance(chosen, SamplingParams):
            raise InvalidArgument(f"{verb} takes SamplingParams, got {type(chosen).__name__}", field="params")
        self._engine.checks.params(chosen, in_session=True)
        return chosen

    def _submit(
        self,
        tokens: NDArray[Any],
        params: SamplingParams | None,
        request_id: str | None = None,
        hints: CacheHints = NO_HINTS,
    ) -> Request:
        state, chosen = self._state, self._check_params("generate", len(tokens), params)
        ids = tokens.astype(np.int64)
        return self._engine.submit(ids, chosen, request_id=request_id, session=state, hints=hints)[0]

    def _result(self, request: Request) -> RequestOutput:
        self._wait(request)
        return request_output([request], self._engine.tokenizer)

    @kept
    def use_adapter(self, name: str | None) -> None:
        """Go on under a loaded adapter, or with None under the base model.

        ``NotFound`` for a name that is not loaded. The tokens before the last one stay as they were
        run. The last one, which gives the logits of the next, runs again under the new adapter, and
        so do all later ones.
        """
        with self._engine.lock:
            state = self._idle("use_adapter")
            if name is not None and not isinstance(name, str):
                raise InvalidArgument(field="name", given=name, allowed="the name of an adapter or None")
            adapter = None if name is None else self._names.id_of(name)
            self._engine.branches.change(state, len(self), adapter)

    # -- probabilities -----------------------------------------------------------------------------

    @uninterrupted
    def compute(self, *, priority: int = 0, use_tqdm: bool | None = None) -> Reuse:
        """Run all tokens but the last one, as far as they are not computed; return what was reused.
        The last one runs when its logits are wanted. ``priority`` is that of ``CacheHints``, and
        ``use_tqdm`` as in ``append``."""
        check_int("priority", priority, -MOST_PRIORITY, MOST_PRIORITY)
        if use_tqdm is not None:
            require_bool("use_tqdm", use_tqdm)
        request = self._compute("compute", priority=priority, use_tqdm=use_tqdm)
        if request is not None:
            return reuse_of(request, self._engine.tokenizer)
        return Reuse(cached=self.num_computed, by_tier={"pool": self.num_computed} if self.num_computed else {})

    @uninterrupted
    def logits(self) -> Tensor:
        """Return the logits of the next token, float32 ``[V]``. ``InvalidArgument`` for an empty
        session."""
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
        # Another thread may have changed the session since.
        work = request.branch
        if state.runs == work.runs and np.array_equal(state.tokens.ids, work.tokens.ids):
            state.logits = rows[-1]
        return rows[-1].clone()

    @uninterrupted
    def score(self, text: Text) -> list[float]:
        """Return the log-probability of each of these tokens, after the session and each other. The
        session is unchanged."""
        if isinstance(text, (Mapping, ExecutorInputs)):
            raise InvalidArgument(
                "score takes text or token ids: an embedding has no probability; append it instead", field="text"
            )
        new = self.encode(text)
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
            # The session's last token and all scored ones but the last give the logits of the next.
            first = len(branch.tokens) - 1
            self._engine.branches.rewind(branch, first)
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

    # -- fork and rewind ---------------------------------------------------------------------------

    @overload
    def fork(self, at: int | None = None) -> Session: ...
    @overload
    def fork(self, at: int | None = None, *, n: int) -> list[Session]: ...
    def fork(self, at: int | None = None, n: int | None = None) -> Session | list[Session]:
        """Return a copy-on-write copy under the same adapter; with ``n`` a list of that many. A
        child has all tokens, or the first ``at``. It is pinned if its parent is, and has the same
        labels and no name."""
        with self._engine.lock:
            state = self._idle("fork")
            length = self._position("at", at) if at is not None else len(self)
            if n is not None and (not is_integer(n) or n < 1):
                raise InvalidArgument(field="n", given=n, allowed="an integer of at least 1")
            children = [self._child(state, length) for _ in range(1 if n is None else n)]
            return children[0] if n is None else children

    def _child(self, parent: SessionBranch, length: int) -> Session:
        state = self._engine.branches.fork(parent, length)
        state.pinned, state.account = parent.pinned, parent.account
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
        child._turns, child._labels, child._kept = self._turns.up_to(length), self._labels, self._kept
        child._last_commit = self._last_commit
        return child

    @kept
    def rewind(self, to: int | None = None, n: int | None = None) -> int:
        """Go back to the first ``to`` tokens, or by ``n`` tokens.

        Return the number of tokens that must run again before new ones can. If the logits of the
        last token are wanted at once, it runs again too: on models with recurrent layers from the
        nearest state that was kept before it.
        """
        with self._engine.lock:
            state = self._idle("rewind")
            if (to is None) == (n is None):
                raise InvalidArgument(f"rewind takes to= or n=, one of them; got to={to!r}, n={n!r}", field="to")
            length = self._position("to", to) if to is not None else len(self) - self._position("n", n)
            cost = self._cost(length)
            self._engine.branches.change(state, length, state.adapter)
            self._turns.cut(length)
            self._engine.metrics.rewinds.inc()
            self._engine.metrics.tokens_replayed.inc(cost)
            return cost

    def rewind_cost(self, to: int) -> int:
        """Return how many tokens a rewind to ``to`` would have to run again. It is 0 for attention
        whose state is in the pool, and more if the model's windows have let go of what lies before
        ``to``."""
        with self._engine.lock:
            self._idle("rewind_cost")
            return self._cost(self._position("to", to))

    def _position(self, name: str, value: object) -> int:
        if not is_integer(value) or not 0 <= int(value) <= len(self):  # type: ignore[call-overload]
            allowed = f"an integer in 0..{len(self)}, the tokens of the session"
            raise InvalidArgument(field=name, given=value, allowed=allowed)
        return int(value)  # type: ignore[call-overload, no-any-return]

    def _cost(self, length: int) -> int:
        reached = self._reached(length)
        if self._state.seq is None and not reached:
            return length
        # The last token may never have run; then it does not run again either.
        return max(0, min(length, len(self) - 1) - reached)

    # -- chat --------------------------------------------------------------------------------------

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        answer: ReadAnswer | None = None,
        hints: CacheHints | None = None,
    ) -> RequestOutput:
        """Add messages, rendered with the model's chat template, and generate the answer.

        ``messages`` are the new ones only. The session's tokens become those of a stateless chat of
        all turns; what they share with the present ones is kept, the rest is run. Tokens that were
        generated or appended after an earlier answer belong to that answer. Tokens at a place where
        an answer could begin are an answer.

        ``answer`` turns the answer's text into the message that the next turn's template gets, for
        models whose text is not its content. None: ``{"role": "assistant", "content": text}``.
        ``hints`` are as in ``generate``.
        """
        return self._chat(messages, self._chosen("chat", params), answer, checked_hints(hints))

    @uninterrupted
    @kept
    def _chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        answer: ReadAnswer | None,
        hints: CacheHints,
    ) -> RequestOutput:
        asked, tokens = self._ask(messages, params, answer)
        with self._engine.lock:
            self._idle("chat")
            request = self._submit(tokens, params, hints=hints)
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
        hints: CacheHints | None = None,
    ) -> SessionStream:
        """Return ``chat`` as a stream. What was generated when its loop is left is the answer."""
        return SessionStream(self._engine, *self.prepare_chat(messages, params, answer=answer, hints=hints))

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        answer: ReadAnswer | None = None,
        hints: CacheHints | None = None,
    ) -> PreparedTurn:
        """Check and render what ``stream_chat`` runs; return how it starts and ends."""
        hinted = checked_hints(hints)
        asked, tokens = self._ask(messages, params, answer)

        def start() -> Request:
            self._idle("chat")
            return self._submit(tokens, params, hints=hinted)

        def end(request: Request) -> Future[None] | None:
            self._turns.answered(asked, request, len(self))
            return self._keep(wait=False)

        return PreparedTurn(start, end)

    def _ask(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None, answer: ReadAnswer | None
    ) -> tuple[Asked, NDArray[np.int64]]:
        """Return what is asked, and all tokens of the session with it."""
        with self._engine.lock:
            self._idle("chat")
            if not isinstance(messages, (list, tuple)) or not messages:
                raise InvalidArgument(field="messages", given=messages, allowed="a list of at least one new message")
            tokenizer, ids = self._tokenizer("chat"), self.tokens
            turns, checks = self._turns.up_to(len(ids)), self._engine.checks_of(self._state)
        # Without the lock: other threads go on while a long conversation is rendered and tokenised.
        asked = turns.ask(messages, ids, tokenizer, answer)
        inside = tokenizer.has_text(np.array(ids[: asked.start], dtype=np.int64))
        rendered = encode_chat(tokenizer, asked.all_messages, text_limit=checks.text_limit, inside=inside)
        tokens = np.array([*ids[: asked.start], *rendered], dtype=np.int64)
        checks.history(tokens)
        with self._engine.lock:
            self._check_params("chat", tokens.size, params)
            if self.tokens != ids:
                raise FailedPrecondition("chat: the session was changed by another thread meanwhile; call again")
            return asked, tokens

    @uninterrupted
    def prefetch_next_turn(self, most: int | None = None) -> RequestOutput | None:
        """Run the history as the next ``chat`` will write it, where the template writes the last
        answer in another way than the model did, as ``LLM.prefetch`` runs prompts with
        ``only_idle``. None: there is nothing to run. The session stays as it is."""
        with self._engine.lock:
            state = self._open("prefetch_next_turn")
            tokenizer, ids = self._tokenizer("prefetch_next_turn"), state.tokens.ids.copy()
            turns, longest = self._turns.up_to(ids.size), self._engine.checks_of(state).text_limit
            plain = state.runs == BASE.then(0, state.adapter) and not (ids < 0).any()
            if not (plain and turns.end_with_answer(ids.size)) or state.modified or state.window is not None:
                return None
            asked, key, adapter = turns.ask([], ids.tolist(), tokenizer, None), state.key, state.adapter
        template, special = select_template(tokenizer.chat_templates), dict[str, Any](tokenizer.special_tokens)
        messages = asked.all_messages
        texts = SpelledTokens(tokenizer, template, messages)
        rendered = next_turn_ids(
            lambda given: render_chat(template, given, add_generation_prompt=False, text_limit=longest, **special),
            texts.messages(messages),
            texts,
            inside=tokenizer.has_text(ids[: asked.start]),
        )
        history = np.concatenate((ids[: asked.start], rendered))
        if not parts_from(history, ids):
            return None
        request = self._engine.submit_prefix(history, key=key, adapter=adapter, only_idle=True, most=most)
        self._engine.run([request])
        return prefix_output(request, tokenizer)

    # -- pinning -----------------------------------------------------------------------------------

    @kept
    def pin(self, account: PinAccount | None = None) -> None:
        """Keep its state even if the pool is short. ``account`` is what its pinned state counts
        for, with all that it will hold; ``QuotaExceeded`` or ``PoolExhausted`` if the account would
        then hold too much."""
        with self._engine.lock:
            state = self._idle("pin")
            self._engine.pins.check(state, len(self), account)
            state.pinned, state.account = True, account

    @kept
    def unpin(self) -> None:
        """Let its state be dropped again if the pool is short. ``FailedPrecondition`` once
        ``set_kv`` wrote into it."""
        with self._engine.lock:
            state = self._idle("unpin")
            if state.modified:
                raise FailedPrecondition("unpin: a state that set_kv wrote into cannot be computed again, so it stays")
            state.pinned, state.account = False, None
