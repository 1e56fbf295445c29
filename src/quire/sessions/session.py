"""``Session``: a live sequence that a user holds: append, generate, fork, rewind, score, save.

A session is its tokens; the KV state of most of them stays in the pool between calls.
``len(session)`` counts every token, also the last sampled one, whose state is computed when it is
next needed. If the pool is short, an idle session's state is dropped and computed again at its next
use, unless the session is pinned.

This is the table of contents. The functions behind the verbs are in the modules that it imports by
name; ``live_sequence`` is what they work on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, Self, TypeVar, overload
from weakref import ref

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.base.config import check_int
from quire.base.errors import FailedPrecondition, InvalidArgument, NotDurable, QuireError, took_effect
from quire.base.finalizers import unless_exiting
from quire.base.hints import MOST_PRIORITY, NO_HINTS, CacheHints, PinAccount, checked_hints
from quire.base.interrupts import uninterrupted
from quire.base.outputs import EditMode, EditReport, RequestOutput, Reuse
from quire.base.sampling_params import MOST_SAMPLES, SamplingParams
from quire.base.segments import BlendParams
from quire.base.signatures import require_bool
from quire.base.uncopied import Uncopied
from quire.contracts.token_views import AttentionView, ChancesView, ComparisonView, NormsView
from quire.engine.engine import Engine
from quire.engine.prompts import Prompt, Text
from quire.engine.request import Request
from quire.sessions import chat, commits, edits, generation, saving, scoring, state, views
from quire.sessions.chat_turns import ReadAnswer, TemplateInputs
from quire.sessions.display import session_repr, session_summary
from quire.sessions.labels import checked_labels, checked_name
from quire.sessions.live_sequence import LiveSequence
from quire.sessions.stream import PreparedTurn, SessionStream
from quire.sessions.token_chances import MOST_ALTERNATIVES
from quire.store.commits import SessionCommit
from quire.text.token_ids import is_integer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quire.executor.cache import KVCache
    from quire_inspector.drawing.branch_tree import BranchTree
    from quire_inspector.drawing.heat import Heat

P = ParamSpec("P")
R = TypeVar("R")


class Keeper(Protocol):
    """Saves the named sessions of a program, so that they outlive the process."""

    def keep(self, session: Session, *, wait: bool) -> Future[None] | None:
        """Save an idle session. ``wait``: return when it is durable; else return the future of
        that, None if there is nothing to write. ``NotDurable``."""
        ...


def kept(verb: Callable[P, R]) -> Callable[P, R]:
    """Decorator: save a durable session after a verb that changes it, and return when it is saved.
    After an error it is saved without waiting; the error passes. A verb is not begun while the
    session cannot be saved."""

    @wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        session: Any = args[0]
        if session._keeper is None:
            return verb(*args, **kwargs)
        session.require_kept()
        try:
            found = verb(*args, **kwargs)
        except BaseException:
            with suppress(QuireError):
                session._keep(wait=False)
            raise
        with took_effect():
            session._keep(wait=True)
        return found

    return call


class Session(Uncopied):
    """Made by ``LLM.session``. Every method raises ``FailedPrecondition`` once the session is
    closed, and while it is generating. A refused or failed call leaves the session as it was.
    Several threads may use sessions; what runs for one of them holds up no other."""

    _instead = "fork() makes another, to_bytes() and save() keep it"

    def __init__(self, live: LiveSequence) -> None:
        """Register the session with the engine."""
        self._engine = live.engine
        self._branch = live.branch
        self._keeper: Keeper | None = None
        """Saves it under its name; None: it ends with the process."""
        self._kept_as: str | None = None
        """The id of its record there."""
        self._is_behind = False
        """Whether that record is older than the session; ``close`` writes it again."""
        self._unwritten = False
        """Whether the last write of that record has failed."""
        with live.engine.lock:
            live.branch.user = ref(self)
            live.engine.branches.note_use(live.branch)
            self._end = partial(live.engine.forget, live.branch)
            live.engine.finalizers.watch(self, self._end)
            self._live = live

    # -- its contents ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._branch.tokens)

    def __repr__(self) -> str:
        return session_repr(self._live)

    def _repr_html_(self) -> str:
        return session_summary(self._live)._repr_html_()

    def __rich__(self) -> RenderableType:
        return session_summary(self._live).__rich__()

    @property
    def name(self) -> str | None:
        """Return its name; None: it has none."""
        return self._live.name

    @name.setter
    def name(self, value: str | None) -> None:
        self._live.name = checked_name(value)
        self._renamed()

    @property
    def labels(self) -> Mapping[str, str]:
        """Values by name, as in ``{"task": "42"}``; to change them set all of them."""
        return self._live.labels

    @labels.setter
    def labels(self, value: Mapping[str, str]) -> None:
        self._live.labels = checked_labels(value)
        self._renamed()

    @property
    def tokens(self) -> list[int]:
        """All token ids; -1 to -4, as they were given, at the places of embeddings."""
        return self._live.given_ids

    @property
    def text(self) -> str:
        """Return the text of all tokens without special tokens and embeddings.
        ``FailedPrecondition`` without a tokenizer."""
        spoken = [token for token in self.tokens if token >= 0]
        return self._live.require_tokenizer("text").decode(spoken, skip_special_tokens=True)

    def encode(self, text: Text) -> NDArray[np.int64]:
        """Return the token ids that ``append`` adds for a text, or the given ids."""
        return self._live.encode(text, self._branch.tokens.ids)[0]

    @property
    def pinned(self) -> bool:
        """Return whether its state is kept even if the pool is short."""
        return self._branch.pinned

    @property
    def window(self) -> tuple[int, int] | None:
        """(window, sink), in tokens, of what it keeps; None: it keeps all tokens."""
        window = self._branch.window
        return None if window is None else (window.size, window.sink)

    @property
    def adapter(self) -> str | None:
        """Return the name of the adapter under which its next tokens run; None: the base model."""
        return self._live.adapter

    @property
    def modified(self) -> bool:
        """Return whether computing its tokens would not give its state. Then ``set_kv`` wrote into
        it, or it came from a file or a KV cache without the embeddings that stood at
        placeholders."""
        return self._branch.modified

    @property
    def exact(self) -> bool:
        """Return whether its state is what its tokens give, apart from ``modified``. It is not if
        some of it went through another dtype, or was blended. It becomes exact again when it is
        computed again: after a rewind to ``exact_tokens`` or before, or once it was dropped."""
        return self._branch.origin.exact

    @property
    def exact_tokens(self) -> int:
        """Return the number of its first tokens with exact state; all of them, if ``exact``."""
        return self._branch.origin.exact_part(len(self))

    @property
    def has_chat(self) -> bool:
        """Return whether ``chat`` continues earlier turns."""
        return bool(self._live.turns)

    @property
    def chat_start(self) -> int | None:
        """Return the number of tokens before the first message of its chat; None without one."""
        return self._live.turns.start

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """Return the messages that ``chat`` continues, the oldest first. ``FailedPrecondition``
        without a tokenizer, if there are any."""
        return chat.messages(self._live)

    @property
    def last_commit(self) -> str | None:
        """Return the id of the commit that it was made from, or was last committed as. A fork has
        that of its parent."""
        return self._live.last_commit

    @property
    def num_computed(self) -> int:
        """Tokens whose state is in the pool now."""
        return self._branch.computed

    @property
    def pages(self) -> tuple[int, int]:
        """(pages that it holds, shared pages among them)"""
        with self._engine.lock:
            seq = self._live.require_open("pages").seq
            return (0, 0) if seq is None else self._engine.runner.state.sequence_pages(seq)

    @property
    def sequence_id(self) -> int | None:
        """Its sequence in the KV state, for the state's own verbs; None: it is not in the pool. It
        may change with every call."""
        return self._live.require_open("sequence_id").seq

    @property
    def number(self) -> int:
        """Return the number that no other session of the process has. ``engine.views`` use it as a
        name."""
        return self._branch.number

    def belongs_to(self, engine: Engine) -> bool:
        """Return whether this engine runs it."""
        return self._engine is engine

    # -- running -----------------------------------------------------------------------------------

    @uninterrupted
    @kept
    def append(self, text: Prompt, *, priority: int = 0, use_tqdm: bool | None = None) -> Self:
        """Add text or token ids (no BOS), perhaps with embeddings, and run them. Text continues
        what the session holds: the tokenizer puts no space between, as it may before a prompt.
        ``quire.engine.prompts.read_prompt`` describes prompts with embeddings; ``priority`` is
        that of ``CacheHints``. ``use_tqdm`` shows on stderr how far it is; None: on a terminal, if
        there are more tokens than one step takes."""
        _check_run(priority, use_tqdm)
        edits.append(self._live, text, priority, use_tqdm)
        return self

    @uninterrupted
    def compute(self, *, priority: int = 0, use_tqdm: bool | None = None) -> Reuse:
        """Run all tokens but the last one, as far as they are not computed; return the reuse. The
        last one runs when its logits are wanted. ``priority`` is that of ``CacheHints``, and
        ``use_tqdm`` as in ``append``."""
        _check_run(priority, use_tqdm)
        return scoring.compute(self._live, priority, use_tqdm)

    def generate(self, params: SamplingParams | None = None, *, hints: CacheHints | None = None) -> RequestOutput:
        """Continue. The new tokens stay in the session, except a stop token or stop string.
        ``hints`` are as in ``LLM.generate``; their prompt is all that the session holds."""
        # Signals come through while the parameters are checked: a large grammar takes seconds.
        chosen = generation.check(self._live, "generate", len(self), params)
        return self._generate(chosen, checked_hints(hints))

    @uninterrupted
    @kept
    def _generate(self, params: SamplingParams, hints: CacheHints) -> RequestOutput:
        with self._engine.lock:
            tokens = self._live.require_idle("generate").tokens.ids
            request = generation.submit(self._live, tokens, params, hints=hints)
        return generation.result(self._live, request)

    def stream(self, params: SamplingParams | None = None, *, hints: CacheHints | None = None) -> SessionStream:
        """Return an iterator that generates token by token.

        Leaving its loop early cancels; what was generated stays.
        """
        return SessionStream(self._engine, *self.prepare(params, hints=hints))

    def prepare(self, params: SamplingParams | None = None, *, hints: CacheHints | None = None) -> PreparedTurn:
        """Check the arguments of ``stream``; return its prepared turn."""
        live, hinted = self._live, checked_hints(hints)
        chosen = generation.check(live, "stream", len(self), params)
        self.require_kept()

        def start() -> Request:
            return generation.submit(live, live.require_idle("stream").tokens.ids, chosen, hints=hinted)

        return PreparedTurn(start, lambda _: self._keep(wait=False))

    def cancel(self) -> bool:
        """Cancel the call that another thread runs on this session, at the next step. Return False
        if nothing runs. It never waits."""
        return generation.cancel(self._live)

    def check_generate(self, params: SamplingParams) -> None:
        """Refuse now whatever ``generate`` would refuse."""
        generation.check(self._live, "generate", len(self), params)

    def submit_generate(
        self, params: SamplingParams, request_id: str | None = None, hints: CacheHints = NO_HINTS
    ) -> Request:
        """Queue the request of ``generate``; the session is generating until steps have run it."""
        with self._engine.lock:
            return generation.submit(self._live, self._branch.tokens.ids, params, request_id, hints)

    # -- chat --------------------------------------------------------------------------------------

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        answer: ReadAnswer | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        hints: CacheHints | None = None,
    ) -> RequestOutput:
        """Add messages, rendered with the model's chat template, and generate the answer.

        ``messages`` are the new ones only. The session's tokens become the tokens of a stateless
        chat of all turns; what they share with the present ones is kept, the rest is run. Tokens
        that were generated or appended after an earlier answer belong to that answer. Tokens at a
        place where an answer could begin are an answer.

        ``answer`` turns the answer's text into the message that the next turn's template gets, for
        models whose text is not its content. None: ``{"role": "assistant", "content": text}``.
        The template also gets ``tools`` and ``variables``, such as ``enable_thinking``, in each
        turn anew. ``hints`` are as in ``generate``.
        """
        chosen = generation.checked_params(self._live, "chat", params)
        inputs = TemplateInputs(tools=tools, variables=variables or {})
        return self._chat(messages, chosen, answer, inputs, checked_hints(hints))

    @uninterrupted
    @kept
    def _chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        answer: ReadAnswer | None,
        inputs: TemplateInputs,
        hints: CacheHints,
    ) -> RequestOutput:
        return chat.answer_messages(self._live, messages, params, answer, inputs, hints)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        answer: ReadAnswer | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        hints: CacheHints | None = None,
    ) -> SessionStream:
        """Return ``chat`` as a stream. What was generated when its loop is left is the answer."""
        turn = self.prepare_chat(messages, params, answer=answer, tools=tools, variables=variables, hints=hints)
        return SessionStream(self._engine, *turn)

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        answer: ReadAnswer | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        hints: CacheHints | None = None,
    ) -> PreparedTurn:
        """Check and render the messages of ``stream_chat``; return its prepared turn."""
        live, hinted, inputs = self._live, checked_hints(hints), TemplateInputs(tools=tools, variables=variables or {})
        chosen = generation.checked_params(live, "chat", params)
        asked, tokens = chat.ask(live, messages, chosen, answer, inputs)
        self.require_kept()

        def start() -> Request:
            live.require_idle("chat")
            return generation.submit(live, tokens, chosen, hints=hinted)

        def end(request: Request) -> Future[None] | None:
            live.turns.answered(asked, request, len(live))
            return self._keep(wait=False)

        return PreparedTurn(start, end)

    @uninterrupted
    def prefetch_next_turn(self, most: int | None = None) -> RequestOutput | None:
        """Run the history as the next ``chat`` will write it, where the template writes the last
        answer in another way than the model did, as ``LLM.prefetch`` runs prompts with
        ``only_idle``. None: there is nothing to run. The session stays as it is."""
        return chat.prefetch_next_turn(self._live, most)

    # -- probabilities -----------------------------------------------------------------------------

    @uninterrupted
    def logits(self) -> Tensor:
        """Return the logits of the next token, float32 ``[V]``. ``InvalidArgument`` for an empty
        session."""
        return scoring.logits(self._live)

    @uninterrupted
    def score(self, text: Text) -> list[float]:
        """Return the log-probability of each of these tokens, after the session and each other. The
        session is unchanged."""
        return scoring.score(self._live, text)

    # -- forks, rewinds, edits ---------------------------------------------------------------------

    @overload
    def fork(self, at: int | None = None) -> Session: ...
    @overload
    def fork(self, at: int | None = None, *, n: int) -> list[Session]: ...
    def fork(self, at: int | None = None, n: int | None = None) -> Session | list[Session]:
        """Return a copy-on-write copy under the same adapter; with ``n`` a list of that many. A
        child has all tokens, or the first ``at``. It is pinned if its parent is, and has the same
        labels and no name."""
        with self._engine.lock:
            self._live.require_idle("fork")
            length = self._live.position("at", at) if at is not None else len(self)
            if n is not None and (not is_integer(n) or not 1 <= n <= MOST_SAMPLES):
                raise InvalidArgument(field="n", given=n, allowed=f"an integer in [1, {MOST_SAMPLES}]")
            children = []
            for _ in range(1 if n is None else n):
                child = Session(edits.fork(self._live, length))
                child._keeper = self._keeper
                children.append(child)
            return children[0] if n is None else children

    @kept
    def rewind(self, to: int | None = None, n: int | None = None) -> int:
        """Go back to the first ``to`` tokens, or by ``n`` tokens.

        Return the number of tokens that must run again before new ones can. If the logits of the
        last token are wanted at once, it runs again too: on models with recurrent layers from the
        nearest state that was kept before it.
        """
        return edits.rewind(self._live, to, n)

    def rewind_cost(self, to: int) -> int:
        """Return the number of tokens that a rewind to ``to`` would have to run again. It is 0 for
        attention whose state is in the pool, and more if the model's windows have freed rows before
        ``to``."""
        return edits.rewind_cost(self._live, to)

    @uninterrupted
    @kept
    def edit(
        self,
        span: range | tuple[int, int] | str,
        new: Text = "",
        mode: EditMode = "exact",
        *,
        blend: BlendParams | None = None,
    ) -> EditReport:
        """Replace the tokens of ``span`` by ``new``: text, token ids, or nothing.

        ``span`` is a range of positions, a pair (start, stop), or a text that occurs once in the
        session. What such a text shares a token with is tokenised anew. Special tokens are in no
        text. New text stands where the old one stood, and no space is put before it. Positions mean
        tokens, so that taking out the first ones may take the space before the next one.

        ``mode`` "exact": what follows is run again, each token under the adapter that it ran under;
        new tokens run under the session's adapter. Then the session is as if it had always had
        these tokens. "blend": what follows is kept, moved, and computed anew in part, as ``blend``
        says; then the session is not ``exact``. State that is approximate already is not kept, and
        tokens that a window has let go of, of the model's or of the session's, are run again.

        The chat of a session continues with the new content of the message that has the span.

        ``InvalidArgument``: no such span, tokens that are not the model's, or too many.
        ``FailedPrecondition``: what follows cannot be run again (``set_kv`` wrote into it, an
        embedding is gone), what leads to the span cannot (as in ``rewind``), or a chat has no one
        message with the span in its content. ``Unsupported``: no blending on this model.
        """
        return edits.replace(self._live, span, new, mode, blend)

    def edit_cost(self, span: range | tuple[int, int] | str) -> int:
        """Return the number of tokens that run again if ``span`` is taken out."""
        return edits.edit_cost(self._live, span)

    @kept
    def use_adapter(self, name: str | None) -> None:
        """Continue under a loaded adapter, or with None under the base model.

        ``NotFound`` for a name that is not loaded. The tokens before the last one stay as they were
        run. The last one, which gives the logits of the next, runs again under the new adapter, and
        so do all later ones.
        """
        edits.use_adapter(self._live, name)

    # -- saving ------------------------------------------------------------------------------------

    @uninterrupted
    def save(self, path: str | Path, *, use_tqdm: bool | None = None) -> None:
        """Write the state file: under a temporary name, synced, renamed. Tokens that are not
        computed yet are computed first. The file has the messages of a chat, which ``chat`` on a
        loaded session continues, but no name and labels. ``use_tqdm`` shows the bytes on stderr;
        None: on a terminal, if it takes long. ``InvalidArgument``: the chat is longer than a file
        holds, or a message of it is no JSON."""
        if not isinstance(path, (str, Path)) or not str(path):
            raise InvalidArgument(f"save takes the name of a file, got {path!r}; to_bytes gives bytes", field="path")
        if use_tqdm is not None:
            require_bool("use_tqdm", use_tqdm)
        self._live.compute_to_save("save")
        with self._live.forked("save") as fork:
            saving.save(fork, Path(path), use_tqdm)

    @uninterrupted
    def to_bytes(self) -> bytes:
        """Return the bytes of the state file."""
        self._live.compute_to_save("to_bytes")
        with self._live.forked("to_bytes") as fork:
            return saving.to_bytes(fork, fork.turns)

    @uninterrupted
    @kept
    def commit(self, name: str, message: str | None = None, *, force: bool = False, owner: str = "") -> SessionCommit:
        """Keep the session as it is now in the store's first durable tier, as the next commit of
        the branch ``name``. Only what the tier lacks is written; tokens that are not computed yet
        are computed first.

        A new branch is made. An existing one gets the commit if this session continues its last
        commit; ``AlreadyExists`` else, unless ``force``. ``owner`` separates branches of equal
        names: a server gives the owner of the API key. ``InvalidArgument``: the name is none.
        ``FailedPrecondition``: the store has no durable tier. ``TierError``,
        ``ResourceExhausted``: it cannot be written, or has no room.
        """
        return commits.commit(self._live, name, message, force=force, owner=owner)

    # -- its state ---------------------------------------------------------------------------------

    @uninterrupted
    def as_cache(self, *, capacity: int | None = None, dynamic: bool = False) -> KVCache:
        """Return a KV cache of one row for the verbs of ``LLM.executor``: a copy-on-write fork.

        No page is copied, and the session and the cache are independent from then on.
        ``LLM.session(cache=...)`` converts back. The cache has all tokens, with their adapters and
        the session's window; the last token is run if it was not. ``capacity`` and ``dynamic`` are
        as in ``create_kv_cache``; ``ResourceExhausted`` if the session is longer than that.
        """
        return state.as_cache(self._live, capacity, dynamic)

    @uninterrupted
    def kv(self, layer: int) -> dict[str, Tensor]:
        """Return a layer's rows or states of the session, as stored.

        Attention layers have ``k [tokens, Hkv, Dk]`` (rotated) and ``v [tokens, Hkv, Dv]``, latent
        layers ``latent [tokens, row]``, of all tokens. With a window they have the tokens that are
        still held, and ``positions`` (int64) of these. Recurrent layers have ``state_0`` and so on,
        as they are before the last token, which runs again at the next generation.
        """
        return state.read(self._live, layer)

    @uninterrupted
    @kept
    def set_kv(self, /, layer: int, *, start: int = 0, **tensors: Tensor | None) -> None:
        """Overwrite a layer's rows or states, by the names that ``kv`` gives.

        The tensors are rows from position ``start`` on, or at ``positions`` (one run of them), or
        the states of a recurrent layer. Those that are not given stay as they are.

        From then on the session is pinned and ``modified``, never feeds the prefix cache, and is
        never computed again. Only its last token runs again where the logits after it are wanted
        (``generate``, ``logits``, ``score``), which recomputes that token's rows from what was
        written.
        """
        state.write(self._live, layer, start, tensors)

    @kept
    def pin(self, account: PinAccount | None = None) -> None:
        """Keep its state even if the pool is short. ``account`` is what its pinned state counts
        for, with all that it will hold; ``QuotaExceeded`` or ``PoolExhausted`` if the account would
        then hold too much."""
        with self._engine.lock:
            branch = self._live.require_idle("pin")
            self._engine.pins.check(branch, len(self), account)
            branch.pinned, branch.account = True, account

    @kept
    def unpin(self) -> None:
        """Let its state be dropped again if the pool is short. ``FailedPrecondition`` once
        ``set_kv`` wrote into it."""
        with self._engine.lock:
            branch = self._live.require_idle("unpin")
            if branch.modified:
                raise FailedPrecondition("unpin: a state that set_kv wrote into cannot be computed again, so it stays")
            branch.pinned, branch.account = False, None

    # -- its views ---------------------------------------------------------------------------------

    @uninterrupted
    def token(self, position: int | None = None, *, top: int = 10) -> ChancesView:
        """Return the model's prediction of the token at ``position`` after the tokens before it:
        its probability and rank, the ``top`` most probable tokens (1..100), and the mask and the
        stop noted there. At ``len(session)``, or None, the token that comes next is meant.

        ``InvalidArgument``: no such position. ``FailedPrecondition``: the session is generating, or
        the state before was changed and would have to be computed again.
        """
        return views.token(self._live, position, top)

    @uninterrupted
    def attention(
        self, position: int | None = None, layer: int | None = None, head: int | None = None
    ) -> AttentionView:
        """Return the attention of the token at ``position`` (None: the last one) in a layer (None:
        the last one with attention): the weights, float32, of its query over all positions up to
        its own, of one query head or of all.

        Its own row is computed anew, like that of the last token before a generation.
        ``InvalidArgument``: no such position, layer or head. ``Unsupported``: the layer has no
        attention over tokens. ``FailedPrecondition``: as of ``token``.
        """
        return views.attention(self._live, position, layer, head)

    @uninterrupted
    def norms(self, layer: int | None = None) -> NormsView:
        """Return the norms of a layer's (None: the last one) rows and states: K and V by position
        and KV head, latent rows by position, recurrent states at the positions at which they are
        kept. Nothing is computed: rows that are not in the pool are missing.

        ``InvalidArgument``: no such layer. ``FailedPrecondition``: the session is generating.
        """
        return views.norms(self._live, layer)

    @uninterrupted
    def compare(self, other: Session, *, top: int = 10) -> ComparisonView:
        """Return the comparison of two sessions of one LLM: the tokens that both begin with, the
        next token of each, and both tokens' chances on either side.

        ``InvalidArgument``: ``other`` is no session of this LLM. ``FailedPrecondition``: as of
        ``token``, of either.
        """
        check_int("top", top, 1, MOST_ALTERNATIVES)
        if not isinstance(other, Session) or not other.belongs_to(self._engine):
            raise InvalidArgument(field="other", given=other, allowed="a session of the same LLM")
        return views.compare(self._live, other._live, top)

    @uninterrupted
    def tree(self) -> BranchTree:
        """Return the tree of all branches that share a beginning with this session: which tokens
        they share, and where they part. It is drawn in notebooks and terminals, and by its
        ``plot``."""
        return views.tree(self._live)

    @uninterrupted
    def heat(
        self,
        *,
        layer: int | None = None,
        head: int | None = None,
        what: str = "attention",
        queries: int | None = None,
    ) -> Heat:
        """Return a heat map of a layer (None: the last one with such a map). ``what`` "attention":
        the weights of the last ``queries`` (1..1024; None: 64, or as many as are not too large)
        tokens over all, of one query head, or on average. "k", "v", "latent" or "state_0": the
        norms of held rows, by position, of one head or of all.

        ``InvalidArgument``: the layer has no such head or ``what``, or the map is too large.
        ``FailedPrecondition``, ``Unsupported``: as of ``attention``, or the tokens' state was
        changed and there is more than one query.
        """
        return views.heat(self._live, layer, head, what, queries)

    # -- its end -----------------------------------------------------------------------------------

    @uninterrupted
    def close(self) -> None:
        """Give the pages back at once. Closing twice is harmless. A kept session stays kept."""
        if self._live.closed or self._engine.lock.is_parents:
            return
        try:
            if self._is_behind and not self._engine.closed:
                self._keep(wait=True)
        finally:
            self._live.closed = True
            self._engine.forget(self._branch)
            self._engine.finalizers.unwatch(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @unless_exiting
    def __del__(self) -> None:
        # No reference to it is left.
        live = getattr(self, "_live", None)
        if live is not None and not live.closed:
            self._engine.finalizers.leave(self._end)

    def require_kept(self) -> None:
        """Save it again if the last save failed. ``NotDurable`` if that fails too: then a call that
        would change it is not begun."""
        if not self._unwritten or self._live.closed:
            return
        try:
            self._keep(wait=True)
        except NotDurable as error:
            error.about("the call was not begun")
            raise

    def _keep(self, *, wait: bool) -> Future[None] | None:
        return None if self._keeper is None else self._keeper.keep(self, wait=wait)

    def _renamed(self) -> None:
        self._engine.branches.revision += 1
        if self._keeper is None:
            return
        # Without waiting: an event loop may set a name, and a step may run.
        if not self._engine.lock.acquire(blocking=False):
            self._is_behind = True
            return
        try:
            self._keep(wait=False)
        finally:
            self._engine.lock.release()


def _check_run(priority: int, use_tqdm: bool | None) -> None:
    check_int("priority", priority, -MOST_PRIORITY, MOST_PRIORITY)
    if use_tqdm is not None:
        require_bool("use_tqdm", use_tqdm)
