"""Sessions to state files and back (the format is documented in ``docs/statefile.md``)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.adapters.history import as_read, written
from quire.adapters.keys import private_salt
from quire.base.errors import DataLoss, FailedPrecondition, InvalidArgument, ResourceExhausted, Unsupported
from quire.base.token_history import Ids, TokenHistory
from quire.branches.saved_rows import CHAT, NO_POSITIONS, SESSION, load_row, other_eviction, read_rows
from quire.branches.session_branch import SessionBranch
from quire.engine.engine import Engine
from quire.engine.progress_bars import byte_bar, counted, verify_shown
from quire.kv import sequencefile
from quire.kv.windows import Window
from quire.models.fingerprint import ModelIdentity
from quire.sessions.chat_turns import ChatTurns
from quire.sessions.live_sequence import LiveSequence
from quire.statefile.container import StateFile, bytes_of, plan_of, read_state, write_state
from quire.statefile.container import to_bytes as container_bytes
from quire.statefile.header import MAX_CONTAINERS, HeaderLimits, TensorSpec, check_json, containers
from quire.statefile.schema import check_metadata

LONGEST = 1 << 22
"""Most token ids in a file, unless the context is longer: windowed sessions have no limit."""
MOST_RUNS = 10_000
"""Changes of the adapter that a file holds at most."""
MOST_ROWS = 16
"""Rows that a KV cache may have of which one is loaded as a session."""
MOST_CHAT = 1 << 25
"""Bytes of a chat that a file holds at most."""


def save(live: LiveSequence, path: Path, use_tqdm: bool | None = False) -> None:
    metadata, plan, tensors = parts(live, live.turns)
    with byte_bar("Saving", sum(one.nbytes for one in plan), use_tqdm) as bar:
        size = write_state(path, metadata, plan, counted(tensors, bar))
    live.engine.metrics.state_bytes_saved.inc(size)


def to_bytes(live: LiveSequence, turns: ChatTurns | None = None) -> bytes:
    """Return a session's file; without ``turns`` it has no chat."""
    metadata, plan, tensors = parts(live, turns or ChatTurns())
    data = container_bytes(metadata, plan, tensors)
    live.engine.metrics.state_bytes_saved.inc(len(data))
    return data


def parts(
    live: LiveSequence, turns: ChatTurns
) -> tuple[dict[str, Any], list[TensorSpec], Iterator[tuple[str, Tensor]]]:
    """Return metadata, plan and tensors of a session with these turns. ``Unsupported`` if it is
    longer than ``load`` takes, ``FailedPrecondition`` if more than its last token is not computed.
    ``InvalidArgument`` for turns that ``load`` does not take."""
    engine, branch = live.engine, live.branch
    require_computed(branch)
    runs, tokens = written(branch.runs, engine.branches.fingerprint_of), branch.tokens.ids.tolist()
    for count, most, what in (
        (len(tokens), _longest(engine), "tokens"),
        (len(runs), MOST_RUNS, "changes of its adapter"),
    ):
        if count > most:
            raise Unsupported(f"the session has {count} {what}; a state file holds at most {most}")
    metadata: dict[str, Any] = {
        "kind": SESSION,
        "model": live.identity.fields(),
        "adapters": runs,
        "exact": branch.origin.exact,
        **({} if branch.origin.exact else {"exact_tokens": branch.origin.inexact_from}),
        "modified": branch.modified,
        "window": None if branch.window is None else [branch.window.size, branch.window.sink],
        "tokens": tokens,
        "positions": [0, len(tokens)],
        "sequence": None,
    }
    plan, tensors = list[TensorSpec](), iter(list[tuple[str, Tensor]]())
    chat = _written(turns)
    if branch.seq is not None:
        metadata["sequence"], plan, tensors = sequencefile.describe(engine.runner.state, branch.seq)
    if chat is not None:
        # As a tensor: a long text costs no reader of the header anything.
        metadata[CHAT] = len(turns.messages)
        spoken = {CHAT: torch.frombuffer(bytearray(chat), dtype=torch.uint8)}
        plan, tensors = [*plan, *plan_of(spoken)], chain(tensors, spoken.items())
    return metadata, plan, tensors


def _written(turns: ChatTurns) -> bytes | None:
    """Return the chat of a file; None if there is none."""
    try:
        data = (turns.written() or "").encode()
    except (TypeError, ValueError, RecursionError) as error:
        message = f"a message of the session's chat is no JSON ({error}); a state file holds only such"
        raise InvalidArgument(message) from None
    if not data:
        return None
    try:
        _read(memoryview(data))
    except ValueError as error:
        raise InvalidArgument(f"the session's chat cannot be saved: {error}") from None
    return data


def turns_of(file: StateFile) -> ChatTurns:
    """Return the turns of the chat in a file; none if it has no chat. ``DataLoss`` for a malformed
    one. ``check_metadata`` has accepted the file's metadata."""
    metadata: Mapping[str, Any] = file.metadata
    if CHAT not in metadata:
        return ChatTurns()
    count, spec = metadata[CHAT], file.specs.get(CHAT)
    if spec is None or spec.dtype != torch.uint8 or len(spec.shape) != 1:
        raise DataLoss(f"the state file has a chat of {count} messages; a tensor {CHAT!r} of bytes is expected")
    try:
        turns = _read(bytes_of(file.tensor(CHAT)))
    except ValueError as error:
        raise DataLoss(f"the state file is malformed: {error}") from None
    found, length, total = len(turns.messages), turns.least_length, len(metadata["tokens"])
    if found != count or length > total:
        raise DataLoss(
            f"the state file has {total} tokens and a chat of {count} messages; its tensor {CHAT!r} has {found} messages "
            f"in {length} tokens"
        )
    return turns


def _read(data: memoryview) -> ChatTurns:
    """Return the turns of a chat. ``ValueError``: it is malformed, or more than a file holds."""
    if len(data) > MOST_CHAT:
        raise ValueError(f"a chat of at most {MOST_CHAT} bytes is expected, {len(data)} are found")
    # As of headers: the brackets in texts count too, so that these need not be told apart.
    if (found := containers(text := bytes(data))) > MAX_CONTAINERS:
        raise ValueError(f"a chat with at most {MAX_CONTAINERS} opening brackets is expected, {found} are found")
    turns = ChatTurns.read(text)
    check_json([turns.messages, turns.inputs.tools, turns.inputs.variables], "a chat")
    return turns


def require_computed(branch: SessionBranch) -> None:
    """Raise ``FailedPrecondition`` if more than a session's last token is not computed."""
    if (0 if branch.seq is None else branch.computed) < len(branch.tokens) - 1:
        raise FailedPrecondition(
            "the session's state was dropped while it was to be saved, for the pool is short; call again"
        )


def needs_state(branch: SessionBranch) -> bool:
    """Return whether a session's tokens do not give its state: it was written into, it is not
    exact, or embeddings stand in it, which only this process has."""
    return branch.modified or not branch.origin.exact or bool((branch.tokens.ids < 0).any())


def branch_of(
    engine: Engine,
    ids_T: Ids,
    *,
    adapters: Sequence[Sequence[Any]],
    window: Sequence[int] | None,
    key: Hashable,
    what: str,
) -> SessionBranch:
    """Return a session's state of which nothing is computed. The caller has the engine's lock.
    ``InvalidArgument``: an adapter is not loaded; ``what``: the subject of that."""
    pool = engine.runner.adapters
    runs = as_read([list(run) for run in adapters], ids_T.size, pool.find, pool.fingerprints, what)
    branch = SessionBranch(tokens=TokenHistory(ids_T), key=key, adapter=runs.runs[-1][1])
    branch.runs, branch.window = runs, None if window is None else Window(window[0], window[1])
    if ids_T.size:
        engine.checks.history(ids_T)
        engine.checks_of(branch).length(ids_T.size, None)
    return branch


def opened(
    engine: Engine, source: str | Path | bytes | bytearray | memoryview, use_tqdm: bool | None = False
) -> StateFile:
    """Open a file of this engine's model, fully checked, without the lock. Close it afterwards."""

    def limits(size: int) -> HeaderLimits:
        return sequencefile.header_limits(engine.runner.state, _longest(engine), MOST_RUNS, MOST_ROWS, size)

    file = read_state(source, limits=limits, verify=False)
    try:
        verify_shown(file, "Restoring", use_tqdm)
        check_metadata(file.metadata)
    except BaseException:
        file.close()
        raise
    return file


def _longest(engine: Engine) -> int:
    return max(LONGEST, engine.max_model_len)


def load(
    engine: Engine, file: StateFile, identity: ModelIdentity, *, convert_dtype: bool, row: int | None = None
) -> SessionBranch:
    """Load a saved session, or a row of a saved KV cache, into the pool. Everything is checked
    before the pool is touched."""
    picked = _picked(file, row)
    (saved,) = read_rows(
        file,
        engine.runner,
        identity,
        vocab_size=engine.runner.model.vocab_size,
        convert_dtype=convert_dtype,
        only=picked,
    )
    if saved.window is not None and saved.window.eviction != "token":
        raise Unsupported(f"row {picked} of the state {other_eviction(saved.window)}")
    if saved.positions is not None:
        raise Unsupported(f"row {picked} of the state {NO_POSITIONS}")
    if saved.ids is None:
        raise InvalidArgument(f"the state does not tell the tokens of row {picked}, and a session goes by its tokens")
    # A writer computes all tokens but the last one, so that loading runs none.
    if saved.length not in (saved.total, max(0, saved.total - 1)):
        raise DataLoss(
            f"the state file has the state of {saved.length} tokens and names {saved.total}; the state of all of them, or of all but "
            "the last, is expected"
        )
    # A key of its own: state from a file, perhaps of another dtype, is no other prompt's prefix.
    branch = SessionBranch(key=private_salt(), adapter=saved.runs.runs[-1][1])
    saved.fill(branch, saved.total)
    if saved.total:
        engine.checks_of(branch).length(saved.total, None)
    # The embeddings are not in the file, so that what stands for them cannot be computed again.
    branch.pinned = saved.origin.modified or bool((saved.ids < 0).any())
    branch.origin = replace(saved.origin, modified=branch.pinned)
    if saved.length:
        seq = engine.runner.new_seq()
        while True:
            try:
                load_row(engine.runner, seq, file, saved)
                break
            except ResourceExhausted:
                if not engine.runner.room.make():
                    raise
        branch.seq, branch.computed = seq, saved.length
    engine.metrics.state_bytes_loaded.inc(file.nbytes)
    return branch


def _picked(file: StateFile, row: int | None) -> int:
    """Return the row of a file that becomes a session; None: the only one."""
    metadata: Mapping[str, Any] = file.metadata
    if metadata["kind"] == SESSION and row is not None:
        raise InvalidArgument(f"row {row}: the state file holds a {SESSION!r}, which has no rows")
    count = 1 if metadata["kind"] == SESSION else len(metadata["rows"])
    if row is None and count > 1:
        raise InvalidArgument(f"the state holds a KV cache of {count} rows, and a session is one; pick it with row=")
    picked = 0 if row is None else row
    if not 0 <= picked < count:
        raise InvalidArgument(f"row {picked} does not exist; the state holds a KV cache with rows 0..{count - 1}")
    return picked
