"""Sessions that are forks of rows of KV caches, over the same pages.

Both are branches, so a fork is enough. It takes along what a sequence does not record: the tokens,
the adapter of each, and the state's origin (``quire.branches.branch.Origin``).
"""

from __future__ import annotations

from quire.branches.branch import COMPUTED, Origin
from quire.branches.cache_rows import CacheRows
from quire.branches.history import TokenHistory
from quire.branches.row import Row, are_indices
from quire.branches.saved_kinds import NO_POSITIONS
from quire.engine.engine import Engine
from quire.engine.sequence_request import SessionState
from quire.errors import FailedPrecondition, InvalidArgument, NotFound, Unsupported
from quire.kv.windows import Window
from quire.types import Fork


def fork_to_session(engine: Engine, cache: CacheRows, picked: int, length: int) -> SessionState:
    """Return a session's state that is a fork of the first ``length`` tokens of a cache's row.

    The session goes on under the adapter of its last token, and shares no prefix with others. Call
    it under the lock. ``InvalidArgument``: the tokens are not known. ``NotFound``: an adapter was
    unloaded. ``Unsupported``: a window or positions that sessions do not have.
    """
    source, pool = cache.rows[picked], cache.pool
    if not source.tokens.is_known:
        raise InvalidArgument(
            f"the tokens of row {picked} are not known (it was loaded without them), and a session goes by its tokens"
        )
    if source.positions is not None and not are_indices(source.positions.ids[:length], 0):
        raise Unsupported(f"row {picked} {NO_POSITIONS}")
    runs = source.runs_before(length)
    if gone := sorted(one for one in runs.ids if not pool.is_loaded(one)):
        raise NotFound(
            f"row {picked} ran under adapter {gone[0]}, which was unloaded; its session could not be computed again"
        )
    tokens, window = source.tokens.ids[:length], _window_of(source, picked)
    engine.checks.history(tokens)
    # A key of its own: a row's past (files, other dtypes, writes) makes it no other prompt's
    # prefix.
    state = SessionState(
        tokens=TokenHistory(tokens),
        key=("cache", engine.runner.new_seq()),
        window=window,
        adapter=runs.at(max(length - 1, 0)),
    )
    state.runs = runs
    if length:
        engine.checks_of(state).length(length, None)
    cache.settle()
    origin = source.origin if length else COMPUTED
    # A cache does not keep the embeddings that stood at placeholders.
    fixed = origin.modified or bool((tokens < 0).any())
    state.origin, state.pinned = Origin(exact=origin.exact, modified=fixed), fixed
    position = engine.runner.state.nearest_reachable(source.seq, length)
    if fixed and position < length:
        raise FailedPrecondition(
            f"position {length} of row {picked} can only be gone back to by running tokens again from {position}, and a state that "
            "was written into, or has embeddings, cannot be computed again from its tokens"
        )
    if position:
        seq = engine.runner.new_seq()
        engine.states.apply(Fork(source.seq, seq, position))
        state.seq, state.computed = seq, position
    return state


def _window_of(row: Row, index: int) -> Window | None:
    if row.window is not None and row.window.eviction != "token":
        raise Unsupported(f"row {index} lets go of tokens by {row.window.eviction!r}; a session does by 'token'")
    return row.window
