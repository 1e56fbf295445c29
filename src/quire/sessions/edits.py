"""Verbs that change the tokens of a session: append, rewind, edit.

An edit runs on a fork, which takes the session's place at the end. Until then the session is as it
was, and its own state may even be given up for the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quire.adapters.keys import runs_of_session
from quire.base.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.base.outputs import Blend, EditMode, EditReport
from quire.base.segments import BlendParams
from quire.base.token_history import Ids, TokenHistory
from quire.base.types import SeqId
from quire.blend.sequence_rows import Move
from quire.branches.owner import replay_refusal
from quire.branches.session_branch import SessionBranch
from quire.contracts.executor import ExecutorInputs
from quire.engine.prompt_blend import PromptBlend
from quire.engine.prompts import Prompt, Text
from quire.engine.request import Request
from quire.sessions.live_sequence import LiveSequence
from quire.text.text_spans import TextPlace, changed_text, pieces_of, place_of, text_of
from quire.text.token_ids import is_integer

MODES: tuple[EditMode, ...] = ("exact", "blend")


@dataclass(frozen=True, slots=True)
class EditSource:
    """Where an edit's cached rows come from."""

    fork: SeqId
    """The sequence as it was."""
    blend: PromptBlend


def append(live: LiveSequence, text: Prompt, priority: int, use_tqdm: bool | None) -> None:
    """Add a text at the end, and run it."""
    new, media = live.encode(text, live.branch.tokens.ids)
    with live.engine.lock:
        branch = live.require_idle("append")
        if not new.size:
            return
        live.engine.checks.tokens(new, media)
        length = len(live) + new.size
        live.engine.checks_of(branch).length(length, None)
        request = live.submit_first(np.append(branch.tokens.ids, new), length - 1, media, priority=priority)
        if request is None:
            branch.tokens.media |= media
            branch.tokens.extend(new)
            branch.logits = None
    if request is not None:
        live.wait(request, use_tqdm)


def use_adapter(live: LiveSequence, name: str | None) -> None:
    """Let the next tokens run under an adapter; None: under the base model."""
    with live.engine.lock:
        branch = live.require_idle("use_adapter")
        if name is not None and not isinstance(name, str):
            raise InvalidArgument(field="name", given=name, allowed="the name of an adapter or None")
        adapter = None if name is None else live.adapters.id_of(name)
        live.engine.branches.change(branch, len(live), adapter)


# -- forks and rewinds -----------------------------------------------------------------------------


def fork(live: LiveSequence, length: int) -> LiveSequence:
    """Return a fork of the first ``length`` tokens, pinned like the session. It has no name."""
    parent = live.branch
    branch = live.engine.branches.fork(parent, length)
    branch.pinned, branch.account = parent.pinned, parent.account
    if length == len(live) and parent.logits is not None:
        branch.logits = parent.logits.clone()
    return live.child(branch, length)


def rewind(live: LiveSequence, to: int | None, n: int | None) -> int:
    """Shorten the session; return the number of tokens that must run again."""
    with live.engine.lock:
        branch = live.require_idle("rewind")
        if (to is None) == (n is None):
            raise InvalidArgument(f"rewind takes to= or n=, one of them; got to={to!r}, n={n!r}", field="to")
        length = live.position("to", to) if to is not None else len(live) - live.position("n", n)
        cost = _cost(live, length)
        live.engine.branches.change(branch, length, branch.adapter)
        live.turns.cut(length)
        live.engine.metrics.rewinds.inc()
        live.engine.metrics.tokens_replayed.inc(cost)
        return cost


def rewind_cost(live: LiveSequence, to: int) -> int:
    """Return the number of tokens that a rewind would run again."""
    with live.engine.lock:
        live.require_idle("rewind_cost")
        return _cost(live, live.position("to", to))


def _cost(live: LiveSequence, length: int) -> int:
    reached = _reached(live, length)
    if live.branch.seq is None and not reached:
        return length
    # The last token may never have run; then it does not run again either.
    return max(0, min(length, len(live) - 1) - reached)


def _reached(live: LiveSequence, length: int) -> int:
    """Return the number of the first ``length`` tokens that keep their state, if the session
    continues from there under its adapter."""
    branch, branches = live.branch, live.engine.branches
    # The last token there may have run under another adapter than the next ones will.
    same = branch.runs.agreed(runs_of_session(branch.runs, length, branch.adapter), length)
    if branch.seq is None:
        return branches.tier.reach(branch, same)
    reached = branches.reach(branch, same)
    if reached < min(same, branch.computed) and (found := branches.found(branch, same)) is not None:
        # It is not kept; the prefix cache may have a sequence that is nearer.
        reached = max(reached, found[1])
    return reached


# -- edits -----------------------------------------------------------------------------------------


def replace(
    live: LiveSequence,
    span: range | tuple[int, int] | str,
    new: Text,
    mode: EditMode,
    blend: BlendParams | None,
) -> EditReport:
    """Replace the tokens of a span; compute those that follow it again, or blend them."""
    if mode not in MODES:
        raise InvalidArgument(field="mode", given=mode, allowed=" or ".join(map(repr, MODES)))
    params = _blending(live, mode, blend)
    ids, place, added = _replacement(live, "edit", span, new)
    turns = live.turns.edited(ids, place.start, place.stop, added, live.engine.tokenizer)
    replayed, engine = 0, live.engine
    with engine.lock:
        branch = _edited(live, "edit", ids, place, added)
        source = None
        try:
            if params is not None:
                source = _source(live, place, added.size, params)
            request = _run(live, branch, None if source is None else source.blend)
        except BaseException:
            engine.forget(branch)
            _give_back(live, source)
            raise
        live.branch.successor = branch
    try:
        if request is not None:
            live.wait(request)
            replayed = _replayed(request.seat.reuse.cached, len(request.branch.tokens), place.start, added.size)
        with engine.lock:
            _take_over(live, live.require_open("edit"), branch)
            live.turns = turns
    finally:
        with engine.lock:
            live.branch.successor = None
            engine.forget(branch)
            _give_back(live, source)
    engine.metrics.tokens_replayed.inc(replayed)
    done = Blend() if source is None or request is None else source.blend.report(request.branch)
    return EditReport(
        removed=place.stop - place.start,
        added=added.size,
        replayed=replayed - (0 if source is None else source.blend.spared),
        blended=done.blended,
        released=0 if source is None else source.blend.released,
        mode=mode,
        exact=live.branch.origin.exact,
    )


def edit_cost(live: LiveSequence, span: range | tuple[int, int] | str) -> int:
    """Return the number of tokens that taking out ``span`` would run again."""
    ids, place, new_ids = _replacement(live, "edit_cost", span, "")
    added = new_ids.size
    with live.engine.lock:
        live.require_idle("edit_cost")
        length = ids.size - (place.stop - place.start) + added
        return _replayed(_reached(live, place.start), length - 1, place.start, added)


def _place(live: LiveSequence, verb: str, span: object) -> tuple[Ids, TextPlace]:
    """Return the session's tokens, and the place of a span among them."""
    with live.engine.lock:
        ids = live.require_idle(verb).tokens.ids.copy()
    if isinstance(span, str):
        return ids, place_of(live.require_tokenizer(verb), ids, span)
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


def _replacement(live: LiveSequence, verb: str, span: object, new: Text) -> tuple[Ids, TextPlace, Ids]:
    """Return the session's tokens, the place of a span among them, and the tokens that replace
    it."""
    if isinstance(new, (Mapping, ExecutorInputs)):
        raise InvalidArgument(field="new", given=new, allowed="text or token ids")
    ids, place = _place(live, verb, span)
    is_text = isinstance(new, str) and (isinstance(span, str) or new != "")
    try:
        added = _tokens_of(live, ids, place, new)
        live.engine.checks.tokens(added)
        while is_text and (longer := _with_next(live, ids, place, added)) is not None:
            place, added = longer, _tokens_of(live, ids, longer, new)
    except InvalidArgument as error:
        error.field = "new"
        raise
    if place.before or place.after:
        pieces = b"".join(pieces_of(live.require_tokenizer(verb).token_bytes, added, _spoken(ids[: place.start])))
        if not pieces.startswith(place.before.encode()) or not pieces.endswith(place.after.encode()):
            raise InvalidArgument(
                f"the text begins or ends inside of a token, and the rest of that ({place.before!r}, {place.after!r}) has no tokens "
                "of its own; give positions",
                field="span",
            )
    return ids, place, added


def _tokens_of(live: LiveSequence, ids: Ids, place: TextPlace, new: Text) -> Ids:
    """Return the tokens of a replacement, and of the text at its ends."""
    parts: list[Text] = [place.before, new, place.after]
    if isinstance(new, str):
        parts = [f"{place.before}{new}{place.after}"]
    behind = ids[: place.start]
    for part in parts:
        if len(part):
            behind = np.append(behind, live.encode(part, behind)[0])
    return behind[place.start :]


def _with_next(live: LiveSequence, ids: Ids, place: TextPlace, added: Ids) -> TextPlace | None:
    """Return the place with the token behind it, if its text would change: as the first one of
    a text it has no space before it, and in the middle it has one. None: it stays as it is."""
    tokenizer, stop = live.engine.tokenizer, place.stop
    if tokenizer is None or not tokenizer.token_bytes.concatenates or stop == ids.size or ids[stop] < 0:
        return None
    new = np.append(ids[: place.start], added)
    found = changed_text(tokenizer.token_bytes, int(ids[stop]), ids[:stop], new)
    after = None if found is None else text_of(found)
    return None if after is None else TextPlace(place.start, stop + 1, place.before, place.after + after)


def _edited(live: LiveSequence, verb: str, ids: Ids, place: TextPlace, added: Ids) -> SessionBranch:
    """Return a fork with the new tokens, and the state of those before the span as far as it is
    held."""
    branch, engine = live.require_idle(verb), live.engine
    if not np.array_equal(branch.tokens.ids, ids):
        raise FailedPrecondition(f"{verb}: the session was changed by another thread meanwhile; call again")
    if place.stop < ids.size and (reason := replay_refusal(branch, place.stop, ids.size, engine.runner.adapters.ids)):
        raise FailedPrecondition(
            f"{verb}: tokens {place.stop}..{ids.size - 1}, which follow, would have to run again, and {reason}"
        )
    tokens = TokenHistory(np.concatenate((ids[: place.start], added, ids[place.stop :])), branch.tokens.media)
    if len(tokens):
        try:
            engine.checks_of(branch).length(len(tokens), None)
        except InvalidArgument as error:
            error.field = "new"
            raise
        engine.pins.check(branch, len(tokens), branch.account)
    fork = engine.branches.fork(branch, place.start)
    runs = branch.runs.spliced(place.start, place.stop, added.size, branch.adapter)
    fork.tokens, fork.runs = tokens, runs_of_session(runs, len(tokens), branch.adapter)
    fork.pinned = branch.pinned
    return fork


def _run(live: LiveSequence, branch: SessionBranch, blend: PromptBlend | None) -> Request | None:
    """Queue a run of all tokens but the last of a branch; None: they are computed."""
    ids, last = branch.tokens.ids, len(branch.tokens) - 1
    if last < 1 or branch.computed >= last:
        return None
    return live.engine.submit_run(branch, ids[:last], tail=ids[last:].tolist(), blend=blend)


def _blending(live: LiveSequence, mode: EditMode, params: BlendParams | None) -> BlendParams | None:
    """Return the parameters of a blended edit; None: it is exact. Refuse ``params`` of an exact
    edit, and their ``target``."""
    if mode == "exact":
        if params is not None:
            raise InvalidArgument('blend is for mode="blend"; leave it out, or give that mode', field="blend")
        return None
    if params is not None and params.target is not None:
        raise Unsupported("target: a calibration is of prompts; an edit takes a ratio", field="target")
    params = BlendParams() if params is None else params
    live.engine.blending.check(params)
    return params


def _source(live: LiveSequence, place: TextPlace, added: int, params: BlendParams) -> EditSource | None:
    """Return the source of the rows that follow the span; None: there is none."""
    branch, engine = live.branch, live.engine
    exact = branch.origin.exact_part(branch.computed)
    if branch.seq is None or branch.modified or exact <= place.stop:
        return None
    fork = engine.branches.fork_of(branch.seq)
    blend = None
    try:
        move = Move(place.start + added, place.stop, exact - place.stop)
        blend = engine.blending.moved(fork, move, params, windowed=branch.window is not None)
    finally:
        if blend is None:
            engine.branches.remove(fork)
    return None if blend is None else EditSource(fork, blend)


def _give_back(live: LiveSequence, source: EditSource | None) -> None:
    if source is not None:
        source.blend.end()
        live.engine.branches.remove(source.fork)


def _take_over(live: LiveSequence, branch: SessionBranch, fork: SessionBranch) -> None:
    """Give the session the tokens and the state of a fork, which then holds nothing."""
    branches = live.engine.branches
    if branch.seq is not None:
        branches.remove(branch.seq)
    branch.become(fork, len(fork.tokens), fork.seq)
    branch.runs, branch.logits = fork.runs, None
    branch.truncate_computed(fork.computed)
    fork.seq, fork.computed = None, 0
    branches.note_use(branch)


def _spoken(ids: Ids) -> list[int]:
    return ids[ids >= 0].tolist()  # type: ignore[no-any-return]


def _replayed(held: int, length: int, start: int, added: int) -> int:
    """Count the tokens from ``held`` to ``length`` that are not among the ``added`` ones."""
    new = max(0, min(length, start + added) - max(held, start))
    return max(0, length - held) - new
