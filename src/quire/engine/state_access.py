"""The state of a session as files, KV caches and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from quire.branches.adapter_keys import NO_SALT
from quire.branches.cache_rows import become_fork
from quire.contracts.layers import LayerSpec
from quire.engine import layer_memory, saved_sessions, session_commits
from quire.engine.keeping import kept
from quire.engine.live_sequence import LiveSequence
from quire.engine.token_ids import is_integer
from quire.errors import AlreadyExists, FailedPrecondition, InvalidArgument, ResourceExhausted
from quire.interrupts import uninterrupted
from quire.signatures import require_bool
from quire.store.commit_history import History
from quire.store.commits import SessionCommit, checked_branch, checked_message, space_of

if TYPE_CHECKING:
    from quire.executor.cache import KVCache


class StateAccess(LiveSequence):
    """A live sequence whose state can be saved, shared with the executor, read and written."""

    @uninterrupted
    def save(self, path: str | Path, *, use_tqdm: bool | None = None) -> None:
        """Write the state file: under a temporary name, synced, renamed. Tokens that are not
        computed yet are computed first. ``use_tqdm`` shows the bytes on stderr; None: on a
        terminal, if it takes long."""
        if not isinstance(path, (str, Path)) or not str(path):
            raise InvalidArgument(f"save takes the name of a file, got {path!r}; to_bytes gives bytes", field="path")
        if use_tqdm is not None:
            require_bool("use_tqdm", use_tqdm)
        self._compute_to_save("save")
        with self._branch("save") as branch:
            saved_sessions.save(self._engine, branch, self._identity, Path(path), use_tqdm)

    @uninterrupted
    def to_bytes(self) -> bytes:
        """Return the bytes of the state file."""
        self._compute_to_save("to_bytes")
        with self._branch("to_bytes") as branch:
            return saved_sessions.to_bytes(self._engine, branch, self._identity)

    @uninterrupted
    @kept
    def commit(self, name: str, message: str | None = None, *, force: bool = False, owner: str = "") -> SessionCommit:
        """Keep the session as it is now in the store's first durable tier, as the next commit of
        the branch ``name``. Only what the tier lacks is written; tokens that are not computed yet
        are computed first.

        A new branch is made. One that exists goes on, if this session continues its last commit;
        ``AlreadyExists`` else, unless ``force``. ``owner`` tells branches of equal names apart: a
        server gives that of the API key. ``InvalidArgument``: the name is none.
        ``FailedPrecondition``: the store has no durable tier. ``TierError``,
        ``ResourceExhausted``: it cannot be written, or has no room.
        """
        branch, text, space = checked_branch(name), checked_message(message), space_of(owner)
        require_bool("force", force)
        engine = self._engine

        async def require_way(history: History) -> None:
            if not force:
                await history.require_way(branch, self._last_commit)

        self._idle("commit")
        session_commits.ask(engine, space, require_way)
        self._compute_to_save("commit")
        with engine.lock:
            made = session_commits.draft(
                engine,
                self._idle("commit"),
                self._identity,
                turns=self._turns,
                parent=self._last_commit,
                message=text,
                name=self.name,
                labels=self.labels,
            )
        try:
            session_commits.write(engine, space, made)
        finally:
            session_commits.release(engine, made)

        async def move(history: History) -> None:
            await require_way(history)
            await history.move(branch, made.commit.id)

        # Before the branch: if nobody can tell whether that was written, the next commit continues.
        self._last_commit, before = made.commit.id, self._last_commit
        try:
            session_commits.ask(engine, space, move, whole=True)
        except AlreadyExists:
            self._last_commit = before
            raise
        return made.commit

    def _compute_to_save(self, verb: str) -> None:
        """Run all tokens but the last, and that too if it is an embedding: files have none."""
        with self._engine.lock:
            self._idle(verb)
            ends_in_media = bool(len(self)) and self._state.tokens.ids[-1] < 0
        if ends_in_media:
            self._catch_up(verb, len(self))
        else:
            self._compute(verb)

    @uninterrupted
    def as_cache(self, *, capacity: int | None = None, dynamic: bool = False) -> KVCache:
        """Return a KV cache of one row for the verbs of ``LLM.executor``: a copy-on-write fork.

        No page is copied, and the session and the cache go on independently.
        ``LLM.session(cache=...)`` converts back. The cache has all tokens, with their adapters and
        the session's window; the last token is run if it was not. ``capacity`` and ``dynamic`` are
        those of ``create_kv_cache``; ``ResourceExhausted`` if the session is longer than that.
        """
        with self._engine.lock:
            self._idle("as_cache")
            cache = self._executor().create_kv_cache(capacity=capacity, dynamic=dynamic)
            room = cache.pool.max_model_len if cache.dynamic else cache.capacity
            if len(self) > room:
                cache.release()
                raise ResourceExhausted(
                    f"as_cache: the session has {len(self)} tokens, and a row of this KV cache holds {room}"
                )
        try:
            if len(self):
                self._catch_up("as_cache", len(self))
            with self._engine.lock:
                state = self._computed("as_cache", len(self))
                become_fork(cache, state, private=state.key != NO_SALT)
                self._engine.metrics.forks.inc(state.seq is not None)
        except BaseException:
            cache.release()
            raise
        return cache

    @uninterrupted
    def kv(self, layer: int) -> dict[str, Tensor]:
        """Return what a layer remembers of the session, as stored.

        Attention layers have ``k [tokens, Hkv, Dk]`` (rotated) and ``v [tokens, Hkv, Dv]``, latent
        layers ``latent [tokens, row]``, of all tokens. With a window they have the tokens that are
        still held, and ``positions`` (int64) of these. Recurrent layers have ``state_0`` and so on,
        as they are before the last token, where the session goes on.
        """
        spec = self._layer_spec(layer)
        found = self._kept_states(layer, spec)
        if found is not None:
            return found
        self._catch_up("kv", len(self) - (spec.kind == "recurrent"))
        with self._engine.lock:
            state = self._computed("kv", len(self) - (spec.kind == "recurrent"))
            if state.seq is None:
                return layer_memory.initial(spec)
            partly = state.window is not None or getattr(spec, "layer_window", None) is not None
            return layer_memory.read(self._engine.runner.state, state.seq, layer, partly=partly)

    def _kept_states(self, layer: int, spec: LayerSpec) -> dict[str, Tensor] | None:
        """Return a recurrent layer's kept states before the last token, if that has run."""
        with self._engine.lock:
            state, kv = self._idle("kv"), self._engine.runner.state
            last = len(self) - 1
            if spec.kind != "recurrent" or state.seq is None or state.computed <= last:
                return None
            if kv.nearest_reachable(state.seq, last) != last:
                return None
            return layer_memory.read(kv, state.seq, layer, partly=False, position=last)

    @uninterrupted
    @kept
    def set_kv(self, layer: int, *, start: int = 0, **tensors: Tensor | None) -> None:
        """Overwrite what a layer remembers, by the names that ``kv`` gives.

        The tensors are rows from position ``start`` on, or the states of a recurrent layer. Those
        that are not given stay as they are.

        From then on the session is pinned and ``modified``, never feeds the prefix cache, and is
        never computed again. Only its last token runs again where the logits after it are wanted
        (``generate``, ``logits``, ``score``), which recomputes that token's rows from what was
        written.
        """
        spec = self._layer_spec(layer)
        count, length = layer_memory.check_names(spec, layer, tensors, start, len(self)), len(self)
        try:
            self._write(spec, layer, tensors, start, count, length)
        except BaseException:
            if not self._state.modified:
                self._state.mark = None
            raise

    def _write(
        self, spec: LayerSpec, layer: int, tensors: Mapping[str, Tensor | None], start: int, count: int, length: int
    ) -> None:
        engine = self._engine
        recurrent = spec.kind == "recurrent"
        if recurrent or (engine.runner.state.recurrent_ids and not self.modified):
            # Keep the states before the last token: for its logits it runs again, after the write.
            self._catch_up("set_kv", length - 1)
            with engine.lock:
                engine.branches.anchor(self._computed("set_kv", length - 1))
        if not recurrent:
            self._catch_up("set_kv", length)
        with engine.lock:
            state = self._computed("set_kv", length - recurrent)
            if state.seq is None:
                raise FailedPrecondition(
                    f"set_kv: before its only token the session has no state of layer {layer} of its own; append a token"
                )
            found = layer_memory.checked(engine.runner.state, state.seq, layer, start, count, tensors)
            engine.branches.overwrite(state, layer, start, found)

    def _layer_spec(self, layer: int) -> LayerSpec:
        if not is_integer(layer):
            raise InvalidArgument(field="layer", given=layer, allowed="an integer, as in kv(0)")
        return self._engine.runner.state.layer_spec(layer)
