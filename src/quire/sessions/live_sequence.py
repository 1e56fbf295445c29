"""``LiveSequence``: the branch of a session, and how calls on it begin, encode and run.

The functions behind a session's verbs take one: those of ``edits``, ``generation``, ``chat``,
``scoring``, ``saving``, ``commits``, ``state`` and ``views``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.adapters.keys import AdapterNames
from quire.base.errors import Cancelled, FailedPrecondition, InvalidArgument
from quire.base.media import NO_MEDIA, Media
from quire.base.sampling_params import SamplingParams
from quire.base.token_history import Ids
from quire.branches.session_branch import SessionBranch
from quire.contracts.executor import ExecutorInputs
from quire.contracts.layers import LayerSpec
from quire.engine.engine import Engine
from quire.engine.progress_bars import run_shown
from quire.engine.prompts import Prompt, Text, is_segmented, read_prompt, read_segments, unwrapped
from quire.engine.request import Request
from quire.models.fingerprint import ModelIdentity
from quire.sessions.chat_turns import ChatTurns
from quire.sessions.labels import NO_LABELS
from quire.text.token_ids import as_token_ids, is_integer
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.executor.executor import Executor


@dataclass(eq=False, slots=True, kw_only=True)
class LiveSequence:
    """A branch that stays until its session is closed, with the engine that runs it. Its state may
    be dropped and computed again."""

    engine: Engine
    branch: SessionBranch
    identity: ModelIdentity
    defaults: SamplingParams
    """The parameters of calls without any."""
    executor: Callable[[], Executor]
    """Returns the executor over the engine's runner, made at the first call."""
    adapters: AdapterNames
    name: str | None = None
    labels: Mapping[str, str] = field(default_factory=lambda: NO_LABELS)
    turns: ChatTurns = field(default_factory=ChatTurns)
    """The turns of its chat; none if it has no chat."""
    last_commit: str | None = None
    """The id of the commit that it was made from, or was last committed as."""
    closed: bool = False

    def __len__(self) -> int:
        return len(self.branch.tokens)

    @property
    def adapter(self) -> str | None:
        """The name of the adapter under which the next tokens run; None: the base model."""
        adapter = self.branch.adapter
        return None if adapter is None else self.adapters.name_of(adapter)

    def child(self, branch: SessionBranch, length: int) -> LiveSequence:
        """Return the live sequence of a fork of the first ``length`` tokens. It has no name."""
        return replace(self, branch=branch, name=None, turns=self.turns.up_to(length))

    def require_open(self, verb: str) -> SessionBranch:
        """Return the branch; ``FailedPrecondition`` once the session or the LLM is closed."""
        self.engine.lock.require_own()
        if self.closed or self.engine.closed:
            what = "session" if self.closed else "LLM"
            raise FailedPrecondition(f"{verb}: the {what} is closed; make a new one")
        return self.branch

    def require_idle(self, verb: str) -> SessionBranch:
        """Return the branch, as the one used last; ``FailedPrecondition`` while it is generating.
        The caller holds the engine's lock."""
        branch = self.require_open(verb)
        self.engine.finalizers.run_finalizers()  # an unreferenced stream among them
        if branch.busy:
            raise FailedPrecondition(f"{verb}: the session is generating; finish or close its stream first")
        self.engine.branches.note_use(branch)
        return branch

    def require_tokenizer(self, verb: str) -> Tokenizer:
        """Return the tokenizer; ``FailedPrecondition`` without one."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise FailedPrecondition(f"{verb} needs a tokenizer, and this model has none; use token ids")
        return tokenizer

    def position(self, name: str, value: object) -> int:
        """Return a checked number of tokens of the session; ``name`` is the argument's."""
        if not is_integer(value) or not 0 <= int(value) <= len(self):  # type: ignore[call-overload]
            allowed = f"an integer in 0..{len(self)}, the tokens of the session"
            raise InvalidArgument(field=name, given=value, allowed=allowed)
        return int(value)  # type: ignore[call-overload, no-any-return]

    def layer_spec(self, layer: int) -> LayerSpec:
        if not is_integer(layer):
            raise InvalidArgument(field="layer", given=layer, allowed="an integer, as in kv(0)")
        return self.engine.runner.state.layer_spec(layer)

    # -- text --------------------------------------------------------------------------------------

    @property
    def given_ids(self) -> list[int]:
        """All token ids; -1 to -4, as they were given, at the places of embeddings."""
        held = self.branch.tokens
        return held.media.as_given(held.ids)

    def encode(self, text: Prompt, before: Ids) -> tuple[NDArray[np.int64], Media]:
        """Return the ids and embeddings of a text that follows the tokens ``before``."""
        text = unwrapped(text)
        if isinstance(text, str):
            self.engine.checks_of(self.branch).text(text)
            return np.array(self.require_tokenizer("text").encode_after(before, text), dtype=np.int64), NO_MEDIA
        if isinstance(text, (Mapping, ExecutorInputs)):
            return read_prompt(text, self.engine.runner.model.hidden_size)
        if is_segmented(text):
            held = [before]

            def encode(part: Text, _: bool) -> NDArray[np.int64]:
                held.append(self.encode(part, np.concatenate(held))[0])
                return held[-1]

            return read_segments(text, encode)[0], NO_MEDIA  # type: ignore[arg-type]
        return as_token_ids(text), NO_MEDIA  # type: ignore[arg-type]

    # -- runs without sampling ---------------------------------------------------------------------

    def submit_first(
        self, tokens: NDArray[Any], length: int, media: Media = NO_MEDIA, *, priority: int = 0
    ) -> Request | None:
        """Queue a run of the first ``length`` tokens; return None if they are computed already. The
        session becomes all of ``tokens``. ``media`` holds embeddings that it does not have yet."""
        branch = self.branch
        if length < 1 or (branch.seq is not None and branch.computed >= length):
            return None
        tail = tokens[length:].tolist()
        return self.engine.submit_run(branch, tokens[:length], tail=tail, media=media, priority=priority)

    def wait(self, request: Request, use_tqdm: bool | None = False) -> None:
        """Run a request to its end. Raise its error, and ``Cancelled`` for a cancelled run.
        ``use_tqdm`` shows how far its prompt is; None: on a terminal, if it takes long."""
        run_shown(self.engine, request, use_tqdm)
        if request.output.error is not None:
            raise request.output.error
        if request.output.finish_reason == "cancelled" and request.params is None:
            raise Cancelled("the session's call was cancelled; the session is as it was before")

    def compute(self, verb: str, *, priority: int = 0, use_tqdm: bool | None = False) -> Request | None:
        """Run all tokens but the last one, as far as they are not computed. None: they were."""
        with self.engine.lock:
            request = self.submit_first(self.require_idle(verb).tokens.ids, len(self) - 1, priority=priority)
        if request is not None:
            self.wait(request, use_tqdm)
        return request

    def catch_up(self, verb: str, length: int) -> None:
        """Make the state hold exactly the first ``length`` tokens: all, or all but the last."""
        engine = self.engine
        with engine.lock:
            branch = self.require_idle(verb)
            if not len(self):
                raise InvalidArgument("the session is empty; append at least one token to have a state")
            if branch.seq is not None and branch.computed > length:
                engine.branches.rewind(branch, length)
            request = self.submit_first(branch.tokens.ids, length)
        if request is not None:
            self.wait(request)

    def compute_to_save(self, verb: str) -> None:
        """Run all tokens but the last, and that too if it is an embedding: files have none."""
        with self.engine.lock:
            self.require_idle(verb)
            ends_in_media = bool(len(self)) and self.branch.tokens.ids[-1] < 0
        if ends_in_media:
            self.catch_up(verb, len(self))
        else:
            self.compute(verb)

    def require_computed(self, verb: str, length: int) -> SessionBranch:
        """Return the branch after ``catch_up``; ``FailedPrecondition`` if it was changed."""
        branch = self.require_idle(verb)
        if (branch.computed if branch.seq is not None else 0) != length:
            raise FailedPrecondition(f"{verb}: the session was changed by another thread meanwhile; call again")
        return branch

    @contextmanager
    def forked(self, verb: str) -> Iterator[LiveSequence]:
        """Fork the session for one call."""
        with self.engine.lock:
            fork = self.child(self.engine.branches.fork(self.require_idle(verb), len(self)), len(self))
        try:
            yield fork
        finally:
            self.engine.forget(fork.branch)
