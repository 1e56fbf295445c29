"""Sessions that are forks of rows of KV caches, over the same pages.

Both are branches, so a fork is enough. It takes along what a sequence does not record: the tokens,
the adapter of each, and the state's origin (``quire.branches.branch.Origin``).
"""

from __future__ import annotations

from dataclasses import replace

from quire.branches.adapter_keys import private_salt
from quire.branches.cache_rows import CacheRows
from quire.branches.going_back import require_again
from quire.branches.row import are_indices
from quire.branches.saved_rows import NO_POSITIONS, other_eviction
from quire.engine.engine import Engine
from quire.engine.session_branch import SessionBranch
from quire.errors import InvalidArgument, NotFound, Unsupported


def fork_to_session(engine: Engine, cache: CacheRows, picked: int, length: int) -> SessionBranch:
    """Return a session's state that is a fork of the first ``length`` tokens of a cache's row.

    The session goes on under the adapter of its last token, and shares no prefix with others. Call
    it under the lock. ``InvalidArgument``: the tokens are not known. ``NotFound``: an adapter was
    unloaded. ``Unsupported``: a window or positions that sessions do not have.
    """
    source, loaded = cache.rows[picked], cache.pool.adapter_ids
    if not source.tokens.is_known:
        raise InvalidArgument(
            f"the tokens of row {picked} are not known (it was loaded without them), and a session goes by its tokens"
        )
    if source.positions is not None and not are_indices(source.positions.ids[:length], 0):
        raise Unsupported(f"row {picked} {NO_POSITIONS}")
    if gone := sorted(source.runs_before(length).ids.difference(loaded)):
        raise NotFound(
            f"row {picked} ran under adapter {gone[0]}, which was unloaded; its session could not be computed again"
        )
    if source.window is not None and source.window.eviction != "token":
        raise Unsupported(f"row {picked} {other_eviction(source.window)}")
    # A key of its own: a row's past (files, other dtypes, writes) makes it no other prompt's
    # prefix.
    state = SessionBranch(key=private_salt())
    state.become(source, length, None)
    state.adapter = state.runs.at(max(length - 1, 0))
    engine.checks.history(state.tokens.ids)
    if length:
        engine.checks_of(state).length(length, None)
    cache.commit_chains()
    # A cache does not keep the embeddings that stood at placeholders.
    fixed = state.modified or bool((state.tokens.ids < 0).any())
    state.origin, state.pinned = replace(state.origin, modified=fixed, private=False), fixed
    kv, position = engine.runner.state, engine.runner.state.nearest_reachable(source.seq, length)
    if position < length:
        require_again(kv, source, position, length, loaded, f"row {picked}: ", since=0)
    state.mark = None
    if position:
        state.seq = engine.branches.fork_of(source.seq, position)
    state.recede(position)
    return state
