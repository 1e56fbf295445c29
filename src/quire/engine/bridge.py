"""Between sessions and the KV caches of executors: each a copy-on-write fork of the other, over the same pages.

A session is a row of tokens of which the first are computed, and a row of a cache is one whose tokens all are; both are a
sequence in the same state, so that a fork is all there is to it. What a sequence does not say itself goes along: the tokens, under which
adapter each ran, and how the state came to be what it is (``quire.executor.row.Origin``).
"""

from __future__ import annotations

from quire.engine.engine import Engine
from quire.engine.scheduled_request import SlidingWindow, TokenBuffer
from quire.engine.sequence_request import SessionState
from quire.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, Unsupported
from quire.executor.arguments import resolve_cache
from quire.executor.cache import KVCache
from quire.executor.executor import Executor
from quire.executor.row import COMPUTED, Origin, Row, TokenRecord, are_indices, history
from quire.executor.saved_kinds import NO_POSITIONS
from quire.types import Fork, SetWindow

NO_SALT = ("", None)
"""The key of sessions that share prefixes with everybody who gives no ``cache_salt``."""


def cache_for(executor: Executor, length: int, capacity: int | None, dynamic: bool) -> KVCache:
    """An empty cache of one row that a session of so many tokens fits into. Errors are those of ``create_kv_cache``, and
    ``ResourceExhausted`` for a session that is longer."""
    cache = executor.create_kv_cache(capacity=capacity, dynamic=dynamic)
    room = executor.pool.max_model_len if cache.dynamic else cache.capacity
    if length > room:
        cache.release()
        raise ResourceExhausted(f"as_cache: the session has {length} tokens, and a row of this KV cache holds {room}")
    return cache


def fork_to_cache(engine: Engine, session: SessionState, cache: KVCache) -> None:
    """Let the row of such a cache be a fork of a session of which all tokens are computed. Call it under the lock."""
    pool, length = cache.pool, len(session.tokens)
    if session.seq is None:
        if session.window is not None:
            pool.edit(SetWindow(cache.rows[0].seq, session.window.size, session.window.sink))
        return
    runs = history(session.runs, length)
    pool.note_adapters([runs])
    origin = Origin(exact=session.exact, modified=session.modified, private=session.key != NO_SALT)
    (seq,) = pool.fork([session.seq])
    cache.replace_content([Row(seq, TokenRecord(session.tokens.ids), runs, origin=origin)])
    cache.capacity = max(cache.capacity, length)
    engine.metrics.forks.inc()


def fork_to_session(engine: Engine, given: object, row: int | None) -> SessionState:
    """A session's state that is a fork of a row of a KV cache, or of what a handle of it covers. Call it under the lock.

    ``row`` None: the only one. The session goes on under the adapter of its last token, and shares no prefix with others.
    ``InvalidArgument``: another runner's cache, a stale handle, no such row, or tokens that are not known. ``NotFound``: a cache that was
    released, or an adapter that was unloaded. ``Unsupported``: a window or positions that sessions do not have.
    """
    cache, picked, length = _resolve(engine, given, row)
    source, pool = cache.rows[picked], cache.pool
    if source.tokens is None:
        raise InvalidArgument(
            f"the tokens of row {picked} are not known (it was loaded without them), and a session goes by its tokens"
        )
    if source.positions is not None and not are_indices(source.positions.ids[:length], 0):
        raise Unsupported(f"row {picked} {NO_POSITIONS}")
    runs = history(source.runs, length)
    if gone := sorted(one for one in runs.ids if not pool.is_loaded(one)):
        raise NotFound(
            f"row {picked} ran under adapter {gone[0]}, which was unloaded; its session could not be computed again"
        )
    tokens, window = source.tokens.ids[:length], _window_of(engine, source, picked)
    engine.checks.history(tokens)
    # A key of its own: what rows have been through (files, other dtypes, writes) is nobody else's prefix.
    state = SessionState(
        TokenBuffer(tokens), ("cache", engine.runner.new_seq()), window=window, adapter=runs.at(max(length - 1, 0))
    )
    state.runs = runs
    if length:
        engine.checks_of(state).length(length, None)
    cache.settle()
    origin = source.origin if length else COMPUTED
    # A cache does not keep the embeddings that stood at placeholders.
    fixed = origin.modified or bool((tokens < 0).any())
    state.exact, state.modified, state.pinned = origin.exact, fixed, fixed
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


def _resolve(engine: Engine, given: object, row: int | None) -> tuple[KVCache, int, int]:
    """The cache, the row, and how many of its tokens are meant."""
    found = getattr(given, "cache", given)
    if not isinstance(found, KVCache):
        raise InvalidArgument(f"cache must be a KV cache or a handle of one; got {type(given).__name__}")
    found.require_live()
    if found.pool.runner_or_none is not engine.runner:
        raise InvalidArgument(
            f"KV cache {found.cache_id} belongs to another model's pages; give session_from_bytes what its serialize() returns"
        )
    cache, lengths = resolve_cache(found.pool, given)
    if row is None:
        if cache.batch_size > 1:
            raise InvalidArgument(f"the KV cache has {cache.batch_size} rows, and a session is one; pick it with row=")
        row = 0
    if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < cache.batch_size:
        raise InvalidArgument(f"row {row!r} does not exist; the KV cache has rows 0..{cache.batch_size - 1}")
    return cache, row, lengths[row]


def _window_of(engine: Engine, row: Row, index: int) -> SlidingWindow | None:
    window = engine.runner.state.window(row.seq)
    if window is None:
        return None
    if window.eviction != "token":
        raise Unsupported(f"row {index} lets go of tokens by {window.eviction!r}; a session does by 'token'")
    return SlidingWindow(window.size, window.sink)
