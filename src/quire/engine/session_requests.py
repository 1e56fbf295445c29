"""The requests of sessions: they begin with their sessions' state, and give it back at their ends.

The caller holds the engine's lock.
"""

from __future__ import annotations

from quire.adapters.keys import runs_of_session
from quire.base.outputs import Miss
from quire.base.sampling_params import StructuredOutputs
from quire.base.token_history import common_prefix
from quire.branches.session_branch import SessionBranch
from quire.branches.session_branches import SessionBranches
from quire.engine.miss_search import LEAST, QUOTED
from quire.engine.request import Request
from quire.sampling.generations import Generation, counts_of, cut_generations, with_generation

KEEP_TOKENS = 32
"""Tokens that a run without sampling must add for a fork of its end to be kept (a prompt's)."""


def begin(branches: SessionBranches, session: SessionBranch, request: Request) -> None:
    """Let the request work on the session's sequence, as far as it agrees; at least one token
    must run. New tokens and the last one run under the session's adapter."""
    work, reuse = request.branch, request.seat.reuse
    common = common_prefix(session.tokens.ids, work.tokens.ids)
    last = len(work.tokens) + len(request.asked.tail) - 1
    work.runs = session.runs.then(min(common, last), session.adapter)
    work.key = branches.prefix_key(session.key, work.runs)
    shared = session.runs.agreed(work.runs, common)
    wanted = min(shared, len(work.tokens) - 1)
    reuse.known = min(wanted, session.computed)
    if LEAST <= common < min(session.computed, len(work.tokens)):
        reuse.miss(Miss.OTHER_TEXT, common, session.tokens.ids[common : common + QUOTED].copy())
    branches.rewind(session, wanted)
    branches.leave_other_key(session, work.key)
    if session.modified:
        branches.anchor(session)
    _take_nearer(branches, session, request)
    work.shared, work.common = shared, common
    work.session, session.request = session, request
    if session.modified and session.seq is not None and (branches.state.forgets or session.window is not None):
        session.undo_fork = branches.fork_of(session.seq)
    work.seq, work.computed, work.origin = session.seq, session.computed, session.origin
    request.seat.admitted = session.seq is not None
    reuse.count(session.computed)
    if reuse.replayed and request.seat.admitted:
        reuse.miss(branches.forgets, reuse.known)
    work.reusable = True
    # A state that forgets is no prefix for others.
    work.cacheable = not session.modified and session.window is None
    work.window = session.window
    work.pinned = session.pinned or session.modified


def _take_nearer(branches: SessionBranches, session: SessionBranch, request: Request) -> None:
    """Let a session whose tokens change continue from a fork of another sequence, if that has
    more of the new ones."""
    if branches.cache is None or session.seq is None or session.modified or session.window is not None:
        return
    work, fresh_from = request.branch, request.output.fresh_from
    limit = len(work.tokens) - 1 if fresh_from is None else min(len(work.tokens) - 1, fresh_from)
    found = branches.cache.find(work.tokens.ids[:limit], work.key, without=session.seq)
    if found is not None and found[1] > session.computed and found[0] != session.seq:
        branches.continue_from(session, *found)


def end(branches: SessionBranches, session: SessionBranch, request: Request) -> None:
    """Give the sequence back to its session; after success the tokens join it."""
    work, output = request.branch, request.output
    session.request = None
    session.seq, work.seq = work.seq, None
    session.origin = work.origin
    session.truncate_computed(work.computed if session.seq is not None else 0)
    if request.succeeded:
        count = len(work.tokens) if output.kept is None else request.asked.num_prompt + output.kept
        tokens = work.tokens.fork(count)
        tokens.extend(request.asked.tail)
        session.tokens, session.logits = tokens, None
        _note(session, request)
        session.runs = runs_of_session(work.runs, len(tokens), session.adapter)
        _return_to(branches, session, request, work.runs.agreed(session.runs, count))
    elif output.finish_reason == "error" and not (session.pinned or session.modified):
        # Whatever broke, the state may be broken too.
        branches.drop(session)
    else:
        _return_to(branches, session, request, work.shared)
        if session.modified and session.computed < len(session.tokens) - 1 and session.undo_fork is None:
            # What was taken back was written by ``set_kv`` and cannot be computed again.
            session.truncate(session.computed)
            session.logits = None
            runs = runs_of_session(session.runs, session.computed, session.adapter)
            same = session.runs.agreed(runs, session.computed)
            branches.rollback(session, same)
            session.runs = runs
    if session.undo_fork is not None:
        branches.remove(session.undo_fork)
        session.undo_fork = None
    branches.note_use(session)
    if branches.cache is None or session.seq is None or not session.computed:
        return
    is_end = request.params is not None or len(work.tokens) - request.seat.reuse.cached >= KEEP_TOKENS
    if work.cacheable:
        branches.leave_other_key(session, branches.key_of(session))
        branches.share(session, branches.key_of(session), live=True, keep=is_end)
    if is_end and (work.cacheable or session.window is not None):
        branches.tier.keep(session)


def _return_to(branches: SessionBranches, session: SessionBranch, request: Request, length: int) -> None:
    """Take back what is computed after ``length``. If a window has let go of what that needs,
    and the tokens cannot bring it back, use the fork made by ``begin``. It never refuses."""
    undo_fork = session.undo_fork
    if undo_fork is None or session.seq is None or session.computed <= length:
        branches.rewind(session, length)
    elif branches.state.nearest_reachable(session.seq, length) == length:
        branches.rollback(session, length)
    else:
        branches.remove(session.seq)
        session.seq, session.undo_fork = undo_fork, None
        session.computed = branches.state.sequence_length(undo_fork)


def _note(session: SessionBranch, request: Request) -> None:
    """Note the request's generation in its session. Both have the same tokens."""
    session.generations = cut_generations(session.generations, request.branch.common)
    asked, output = request.asked, request.output
    if asked.params is None or output.finish_reason is None:
        return
    kept = len(output.token_ids) if output.kept is None else output.kept
    given = asked.params.structured_outputs
    form = given if isinstance(given, StructuredOutputs) else None
    made = Generation(
        asked.num_prompt,
        asked.num_prompt + kept,
        output.finish_reason,
        output.stop_reason,
        "" if form is None else next(iter(form.forms)),
        counts_of(output.mask_counts),
    )
    session.generations = with_generation(session.generations, made)
