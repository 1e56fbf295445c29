"""Edits of a session: a piece is replaced, and what follows it runs again or is blended.

An edit runs on a fork, which takes the session's place at the end. Until then the session is as it
was, and its own state may even be given up for the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quire.blend.sequence_rows import Move
from quire.branches.adapter_keys import runs_of_session
from quire.branches.going_back import why_fixed
from quire.branches.history import Ids, TokenHistory
from quire.contracts.executor import ExecutorInputs
from quire.engine.keeping import kept
from quire.engine.prompt_blend import PromptBlend
from quire.engine.prompts import Text
from quire.engine.request import Request
from quire.engine.session_branch import SessionBranch
from quire.engine.session_views import SessionViews
from quire.engine.text_places import TextPlace, changed_text, pieces_of, place_of, text_of
from quire.engine.token_ids import is_integer
from quire.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.interrupts import uninterrupted
from quire.outputs import Blend, EditMode, EditReport
from quire.segments import BlendParams
from quire.types import SeqId


@dataclass(frozen=True, slots=True)
class EditSource:
    """What an edit's cached rows come from."""

    fork: SeqId
    """The sequence as it was."""
    blend: PromptBlend


MODES: tuple[EditMode, ...] = ("exact", "blend")


class SessionEdits(SessionViews):
    """A live sequence of which a piece in the middle can be replaced."""

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

        The chat of a session goes on with the content of the message in which the span is replaced.

        ``InvalidArgument``: no such span, tokens that are not the model's, or too many.
        ``FailedPrecondition``: what follows cannot be run again (``set_kv`` wrote into it, an
        embedding is gone), what leads to the span cannot (as in ``rewind``), or a chat has no one
        message with the span in its content. ``Unsupported``: no blending on this model.
        """
        if mode not in MODES:
            raise InvalidArgument(field="mode", given=mode, allowed=" or ".join(map(repr, MODES)))
        params = self._blending(mode, blend)
        ids, place, added = self._replacement("edit", span, new)
        turns = self._turns.edited(ids, place.start, place.stop, added, self._engine.tokenizer)
        replayed, engine = 0, self._engine
        with engine.lock:
            branch = self._edited("edit", ids, place, added)
            source = None
            try:
                if params is not None:
                    source = self._source(place, added.size, params)
                request = self._run(branch, None if source is None else source.blend)
            except BaseException:
                engine.forget(branch)
                self._give_back(source)
                raise
            self._state.successor = branch
        try:
            if request is not None:
                self._wait(request)
                replayed = _replayed(request.seat.reuse.cached, len(request.branch.tokens), place.start, added.size)
            with engine.lock:
                self._take_over(self._open("edit"), branch)
                self._turns = turns
        finally:
            with engine.lock:
                self._state.successor = None
                engine.forget(branch)
                self._give_back(source)
        engine.metrics.tokens_replayed.inc(replayed)
        done = Blend() if source is None or request is None else source.blend.report(request.branch)
        return EditReport(
            removed=place.stop - place.start,
            added=added.size,
            replayed=replayed - (0 if source is None else source.blend.spared),
            blended=done.blended,
            released=0 if source is None else source.blend.released,
            mode=mode,
            exact=self.exact,
        )

    def edit_cost(self, span: range | tuple[int, int] | str) -> int:
        """Return how many tokens taking out ``span`` would run again."""
        ids, place, new_ids = self._replacement("edit_cost", span, "")
        added = new_ids.size
        with self._engine.lock:
            self._idle("edit_cost")
            length = ids.size - (place.stop - place.start) + added
            return _replayed(self._reached(place.start), length - 1, place.start, added)

    def _place(self, verb: str, span: object) -> tuple[Ids, TextPlace]:
        """Return the session's tokens, and which of them are meant."""
        with self._engine.lock:
            ids = self._idle(verb).tokens.ids.copy()
        if isinstance(span, str):
            return ids, place_of(self._tokenizer(verb), ids, span)
        start = stop = -1
        if isinstance(span, range) and span.step == 1:
            start, stop = span.start, max(span.start, span.stop)
        elif isinstance(span, (tuple, list)) and len(span) == 2 and all(map(is_integer, span)):
            start, stop = map(int, span)
        if not 0 <= start <= stop <= ids.size:
            raise InvalidArgument(
                field="span",
                given=span,
                allowed=f"a range of positions in 0..{ids.size}, a pair (start, stop), or a text of the session",
            )
        return ids, TextPlace(start, stop)

    def _replacement(self, verb: str, span: object, new: Text) -> tuple[Ids, TextPlace, Ids]:
        """Return the session's tokens, which of them are meant, and those that take their place."""
        if isinstance(new, (Mapping, ExecutorInputs)):
            raise InvalidArgument(field="new", given=new, allowed="text or token ids")
        ids, place = self._place(verb, span)
        is_text = isinstance(new, str) and (isinstance(span, str) or new != "")
        try:
            added = self._tokens_of(ids, place, new)
            self._engine.checks.tokens(added)
            while is_text and (longer := self._with_next(ids, place, added)) is not None:
                place, added = longer, self._tokens_of(ids, longer, new)
        except InvalidArgument as error:
            error.field = "new"
            raise
        if place.before or place.after:
            pieces = b"".join(pieces_of(self._tokenizer(verb).token_bytes, added, _spoken(ids[: place.start])))
            if not pieces.startswith(place.before.encode()) or not pieces.endswith(place.after.encode()):
                raise InvalidArgument(
                    f"the text begins or ends inside of a token, and the rest of that ({place.before!r}, {place.after!r}) has no tokens "
                    "of its own; give positions",
                    field="span",
                )
        return ids, place, added

    def _tokens_of(self, ids: Ids, place: TextPlace, new: Text) -> Ids:
        """Return the tokens of a replacement, and of the text at its ends."""
        parts: list[Text] = [place.before, new, place.after]
        if isinstance(new, str):
            parts = [f"{place.before}{new}{place.after}"]
        behind = ids[: place.start]
        for part in parts:
            if len(part):
                behind = np.append(behind, self._encode(part, behind)[0])
        return behind[place.start :]

    def _with_next(self, ids: Ids, place: TextPlace, added: Ids) -> TextPlace | None:
        """Return the place with the token behind it, if its text would change: as the first one of
        a text it has no space before it, and in the middle it has one. None: it stays as it is."""
        tokenizer, stop = self._engine.tokenizer, place.stop
        if tokenizer is None or not tokenizer.token_bytes.concatenates or stop == ids.size or ids[stop] < 0:
            return None
        new = np.append(ids[: place.start], added)
        found = changed_text(tokenizer.token_bytes, int(ids[stop]), ids[:stop], new)
        after = None if found is None else text_of(found)
        return None if after is None else TextPlace(place.start, stop + 1, place.before, place.after + after)

    def _edited(self, verb: str, ids: Ids, place: TextPlace, added: Ids) -> SessionBranch:
        """Return a fork with the new tokens, and the state of those before the span as far as it is
        held."""
        state, engine = self._idle(verb), self._engine
        if not np.array_equal(state.tokens.ids, ids):
            raise FailedPrecondition(f"{verb}: the session was changed by another thread meanwhile; call again")
        if place.stop < ids.size and (reason := why_fixed(state, place.stop, ids.size, engine.runner.adapters.ids)):
            raise FailedPrecondition(
                f"{verb}: tokens {place.stop}..{ids.size - 1}, which follow, would have to run again, and {reason}"
            )
        tokens = TokenHistory(np.concatenate((ids[: place.start], added, ids[place.stop :])), state.tokens.media)
        if len(tokens):
            try:
                engine.checks_of(state).length(len(tokens), None)
            except InvalidArgument as error:
                error.field = "new"
                raise
            engine.pins.check(state, len(tokens), state.account)
        branch = engine.branches.fork(state, place.start)
        runs = state.runs.spliced(place.start, place.stop, added.size, state.adapter)
        branch.tokens, branch.runs = tokens, runs_of_session(runs, len(tokens), state.adapter)
        branch.pinned = state.pinned
        return branch

    def _run(self, branch: SessionBranch, blend: PromptBlend | None) -> Request | None:
        """Queue a run of all tokens but the last of a branch; None: they are computed."""
        ids, last = branch.tokens.ids, len(branch.tokens) - 1
        if last < 1 or branch.computed >= last:
            return None
        return self._engine.submit_run(branch, ids[:last], tail=ids[last:].tolist(), blend=blend)

    def _blending(self, mode: EditMode, params: BlendParams | None) -> BlendParams | None:
        """Return how an edit is blended; None: it is exact. Refuse what is edited exactly only."""
        if mode == "exact":
            if params is not None:
                raise InvalidArgument(field="blend", given=params, allowed='None, or mode="blend"')
            return None
        if params is not None and params.target is not None:
            raise Unsupported("target: a calibration is of prompts; an edit takes a ratio", field="target")
        return self._engine.blending.checked(BlendParams() if params is None else params)

    def _source(self, place: TextPlace, added: int, params: BlendParams) -> EditSource | None:
        """Return what gives the rows that follow the span; None: nothing does."""
        state, engine = self._state, self._engine
        exact = state.origin.exact_part(state.computed)
        if state.seq is None or state.modified or exact <= place.stop:
            return None
        fork = engine.branches.fork_of(state.seq)
        blend = None
        try:
            move = Move(place.start + added, place.stop, exact - place.stop)
            blend = engine.blending.moved(fork, move, params, windowed=state.window is not None)
        finally:
            if blend is None:
                engine.branches.remove(fork)
        return None if blend is None else EditSource(fork, blend)

    def _give_back(self, source: EditSource | None) -> None:
        if source is not None:
            source.blend.end()
            self._engine.branches.remove(source.fork)

    def _take_over(self, state: SessionBranch, branch: SessionBranch) -> None:
        """Let the session be what the branch is, which then holds nothing."""
        branches = self._engine.branches
        if state.seq is not None:
            branches.remove(state.seq)
        state.become(branch, len(branch.tokens), branch.seq)
        state.runs, state.logits = branch.runs, None
        state.recede(branch.computed)
        branch.seq, branch.computed = None, 0
        branches.hold(state)

    def _reached(self, length: int) -> int:
        """Return how many of the first ``length`` tokens keep their state, if the session goes on
        from there under its adapter."""
        state, branches = self._state, self._engine.branches
        # The last token there may have run under another adapter than the next ones will.
        same = state.runs.agreed(runs_of_session(state.runs, length, state.adapter), length)
        if state.seq is None:
            return branches.tier.reach(state, same)
        reached = branches.reach(state, same)
        if reached < min(same, state.computed) and (found := branches.found(state, same)) is not None:
            # It is not kept; the prefix cache may have a sequence that is nearer.
            reached = max(reached, found[1])
        return reached


def _spoken(ids: Ids) -> list[int]:
    return ids[ids >= 0].tolist()  # type: ignore[no-any-return]


def _replayed(held: int, length: int, start: int, added: int) -> int:
    """Count the tokens from ``held`` to ``length`` that are not among the ``added`` ones."""
    new = max(0, min(length, start + added) - max(held, start))
    return max(0, length - held) - new
