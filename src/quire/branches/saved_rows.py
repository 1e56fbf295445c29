"""Rows of state files, checked: the one reader of both kinds, ``session`` and ``kv_cache``.

A session is one sequence whose last tokens may not be computed yet. A KV cache has a sequence of
computed tokens for each row. Further conditions (a window, room, known tokens) are checked by the
callers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.adapters.history import as_read
from quire.base.errors import DataLoss, InvalidArgument, Unsupported
from quire.base.token_history import LAST_PLACEHOLDER, UNKNOWN, Ids, TokenHistory
from quire.base.types import BASE, AdapterRuns, Load, SeqId, Step
from quire.branches.branch import Branch, Origin
from quire.kv import sequencefile
from quire.kv.rule_table import POSITIONS_OF_WINDOWS
from quire.kv.windows import Window
from quire.models.fingerprint import ModelIdentity
from quire.runner.local import Runner
from quire.statefile.container import StateFile

KV_CACHE = "kv_cache"
KV_CACHE_WITH_POSITIONS = "kv_cache_with_positions"
"""A separate kind, because a reader that ignores positions would continue at wrong ones."""
NO_POSITIONS = "has tokens at positions that are not their indices, and those of a session stand at their indices"
SESSION = "session"
CHAT = "chat"
"""The key and the tensor of a session's chat, which rows do without."""


def other_eviction(window: Window) -> str:
    """Return, in words, the reason why no session can have a row's window."""
    return f"lets go of tokens by {window.eviction!r}; a session does by 'token'"


def row_prefix(row: int) -> str:
    """Return the prefix of the names of a row's tensors; tensors of a session have none."""
    return f"row.{row}."


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRow:
    """One row of a file, checked."""

    sequence: dict[str, Any] | None
    """Its metadata; None: no token of it was computed."""
    prefix: str
    """Prefix of the names of its tensors."""
    ids: Ids | None
    """All token ids; None if the writer did not know them."""
    positions: Ids | None
    """Positions of the tokens; None: their indices."""
    window: Window | None
    runs: AdapterRuns
    origin: Origin

    @property
    def length(self) -> int:
        """Number of tokens with state in the file."""
        return 0 if self.sequence is None else int(self.sequence["length"])

    @property
    def total(self) -> int:
        """Number of all tokens, including those after the state, which a session computes later."""
        return self.length if self.ids is None else self.ids.size

    @property
    def to_replay(self) -> Ids:
        """Token ids without state in the file."""
        return np.empty(0, dtype=np.int64) if self.ids is None else self.ids[self.length :]

    def fill(self, branch: Branch, count: int) -> None:
        """Set the branch's history to the first ``count`` tokens; ``computed`` stays 0."""
        branch.tokens = TokenHistory(np.full(count, UNKNOWN) if self.ids is None else self.ids[:count])
        branch.runs, branch.window, branch.origin = self.runs, self.window, self.origin.cut(self.length)


def read_rows(
    file: StateFile,
    runner: Runner,
    identity: ModelIdentity,
    *,
    vocab_size: int,
    convert_dtype: bool,
    batch_size: int | None = None,
    only: int | None = None,
) -> list[SavedRow]:
    """Check a file against a runner's model and state; return its rows, or ``only`` this one.

    Changes nothing. ``statefile.schema.check_metadata`` has accepted the file's metadata.
    ``InvalidArgument``: another model, another number of rows than ``batch_size`` (None: any),
    another dtype without ``convert_dtype``, an adapter that is not loaded, tensors that no row has.
    ``Unsupported``: positions in a window. ``DataLoss``: metadata that contradict each other.
    """
    of_session = file.metadata["kind"] == SESSION
    found: Mapping[str, Any] = _as_cache(file.metadata) if of_session else file.metadata
    sequencefile.check_model(found["model"], identity.fields())
    count = found["batch_size"]
    if batch_size not in (None, count):
        raise InvalidArgument(f"the state has {count} rows, {batch_size} are expected")
    sequences = _listed(found, "rows", count)
    rows = range(count) if only is None else (only,)
    prefixes = ["" if of_session else row_prefix(row) for row in range(count)]
    checked = [
        None
        if of_session and sequences[row] is None
        else sequencefile.check(runner.state, file, sequences[row], prefixes[row], convert_dtype)
        for row in rows
    ]
    _check_names(file, prefixes, dict(zip(rows, checked, strict=True)))
    saved = [
        _saved_row(found, row, one, prefixes[row], runner, vocab_size, of_session)
        for row, one in zip(rows, checked, strict=True)
    ]
    behind = [one.length if one.positions is None or not one.length else int(one.positions[-1]) + 1 for one in saved]
    for name, expected in (("lengths", [one.length for one in saved]), ("next_positions", behind)):
        listed = _listed(found, name, count)
        if [listed[row] for row in rows] != expected:
            raise DataLoss(f"{name} of the state are {listed!r:.80}, and its rows say {expected}")
    return saved


def window_of(metadata: Mapping[str, Any]) -> Window | None:
    """Return the window of a session's file; ``DataLoss`` for a sink that is as large."""
    if metadata.get("window") is None:
        return None
    size, sink = metadata["window"]
    if sink >= size:
        raise DataLoss(f"the state file holds window {[size, sink]}; [window, sink] with sink < window is expected")
    return Window(size, sink)


def _as_cache(session: Mapping[str, Any]) -> dict[str, Any]:
    """Return a session's metadata in the form of a KV cache of one row. A row without a sequence is
    None, and ``tokens`` may be longer than ``lengths``: the rest has no state in the file."""
    sequence, tokens, window = session["sequence"], session["tokens"], window_of(session)
    length = 0 if sequence is None else sequence["length"]
    if session["positions"] != [0, len(tokens)]:
        raise DataLoss(f"the state file holds positions {session['positions']!r}; [0, {len(tokens)}] is expected")
    if sequence is not None:
        own = (sequence["window"], sequence["sink"], sequence["eviction"])
        if own != (expected := (window.size, window.sink, "token") if window else (None, 0, "token")):
            raise DataLoss(f"the state file's sequence has window, sink and eviction {own}, and its session {expected}")
    of_rows = {name: [session[name]] for name in ("adapters", "tokens", "exact", "modified")}
    of_rows["exact_tokens"] = [session.get("exact_tokens")]
    return {
        **{name: session[name] for name in ("model", "window")},
        **of_rows,
        "batch_size": 1,
        "lengths": [length],
        "next_positions": [length],
        "rows": [sequence],
    }


def _check_names(file: StateFile, prefixes: Sequence[str], checked: Mapping[int, Mapping[str, Any] | None]) -> None:
    """Raise ``InvalidArgument`` for tensors that no row has. Tensors of rows outside of ``checked``
    are ignored."""
    expected = {name for row, one in checked.items() if one for name in sequencefile.tensor_names(one, prefixes[row])}
    expected |= {CHAT} & file.metadata.keys()
    others = tuple(prefix for row, prefix in enumerate(prefixes) if row not in checked)
    if surplus := sorted(name for name in file.names if name not in expected and not name.startswith(others)):
        raise InvalidArgument(f"the state holds tensors that no row has: {surplus[:3]}; expected only k and v of rows")


def _saved_row(
    found: Mapping[str, Any],
    row: int,
    sequence: dict[str, Any] | None,
    prefix: str,
    runner: Runner,
    vocab_size: int,
    of_session: bool,
) -> SavedRow:
    length = 0 if sequence is None else int(sequence["length"])
    ids = _ids(_of_row(found, "tokens", row, None), length, vocab_size, to_replay=of_session)
    total = length if ids is None else ids.size
    what = "the state" if of_session else f"row {row} of the state"
    window = window_of(found) if of_session else None
    if sequence is not None and sequence["window"] is not None:
        window = Window(sequence["window"], sequence["sink"], sequence["eviction"])
    converted = sequence is not None and not sequencefile.is_exact(runner.state, found["rows"][row])
    return SavedRow(
        sequence=sequence,
        prefix=prefix,
        ids=ids,
        positions=_positions(_of_row(found, "positions", row, None), length, window),
        window=window,
        runs=_runs(_of_row(found, "adapters", row, []), total, runner, what, of_session),
        origin=Origin(
            inexact_from=0 if converted else _inexact_from(found, row, length),
            modified=_of_row(found, "modified", row, False),
        ),
    )


def _inexact_from(found: Mapping[str, Any], row: int, length: int) -> int | None:
    exact, tokens = _of_row(found, "exact", row, True), _of_row(found, "exact_tokens", row, None)
    if tokens is not None and (exact or tokens >= length):
        raise DataLoss(
            f"the state of {length} tokens has exact {exact} and exact_tokens {tokens}; a number below that is expected "
            "where exact is false, and null elsewhere"
        )
    return None if exact else tokens or 0


def _ids(listed: list[int] | None, length: int, vocab_size: int, *, to_replay: bool) -> Ids | None:
    """Return a row's ids; None if they are not known. ``to_replay``: more than ``length`` are
    allowed."""
    if listed is None:
        return None
    if len(listed) != length and not (to_replay and len(listed) > length):
        raise DataLoss(
            f"the state file has the state of {length} tokens and names {len(listed)}; as many ids are expected"
        )
    ids = np.array(listed, dtype=np.int64)
    bad = ids[(ids >= vocab_size) | ((ids < 0) & (ids >= LAST_PLACEHOLDER))]
    if bad.size:
        raise DataLoss(f"the state names token {int(bad[0])}; ids in 0..{vocab_size - 1} are expected")
    if (ids[length:] < 0).any():
        raise DataLoss("the state has no state of tokens that stand for embeddings, which are not in it")
    return ids


def _positions(listed: list[int] | None, length: int, window: Window | None) -> Ids | None:
    if listed is None:
        return None
    if window is not None:
        raise Unsupported(f"the state has a row with positions of its own: {POSITIONS_OF_WINDOWS}")
    if len(listed) != length:
        raise DataLoss(f"positions of a row of {length} tokens are {len(listed)}; as many are expected")
    return np.array(listed, dtype=np.int64)


def _runs(value: object, length: int, runner: Runner, what: str, of_session: bool) -> AdapterRuns:
    """Return the adapters of a row, all loaded; ``BASE`` where the base model alone ran."""
    if not value:
        return BASE
    if not length and not of_session:
        raise DataLoss(f"{what} has no tokens and adapters {value!r:.80}; [] is expected")
    return as_read(value, length, runner.adapters.find, runner.adapters.fingerprints, what)


def _listed(found: Mapping[str, Any], name: str, count: int) -> list[Any]:
    value: list[Any] = found[name]
    if len(value) != count:
        raise DataLoss(f"{name} of the state are {len(value)}; a list of {count} is expected")
    return value


def _of_row(found: Mapping[str, Any], name: str, row: int, otherwise: Any) -> Any:
    """Return a row's entry in a list by rows; ``otherwise`` if the list is empty or missing."""
    return _listed(found, name, found["batch_size"])[row] if found.get(name) else otherwise


def load_row(runner: Runner, seq: SeqId, file: StateFile, row: SavedRow) -> None:
    """Load a row with state as sequence ``seq``. ``ResourceExhausted`` without room."""
    assert row.sequence is not None
    runner.files[seq] = file
    try:
        runner.execute(Step(edits=(Load(seq, row.sequence, row.prefix),)))
    finally:
        del runner.files[seq]
