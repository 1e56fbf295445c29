"""How a session looks in a notebook, a debugger or a log."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engine.engine import Engine
    from quire.engine.sequence_request import SessionBranch

SHOWN = 24
"""Characters of each end of a text that are shown."""
DECODED = 32
"""Tokens of each end that are decoded for that."""


def session_repr(engine: Engine, state: SessionBranch, *, closed: bool, name: str | None = None) -> str:
    """Return name, length, pages and both ends of the text, escaped, on one line.

    It never raises and never waits: what cannot be had now (pages while a step runs, text without a
    tokenizer) is left out.
    """
    parts = [f"{len(state.tokens)} tokens"]
    if closed or engine.closed:
        parts.append("closed")
    else:
        parts += _tried(lambda: _pages(engine, state))
    parts += _tried(lambda: _text(engine, state))
    return f"<Session {'' if name is None else _short(name) + ' '}of {', '.join(parts)}>"


def _tried(part: Callable[[], list[str]]) -> list[str]:
    try:
        return part()
    except Exception:  # others may change the session meanwhile
        return []


def _pages(engine: Engine, state: SessionBranch) -> list[str]:
    if not engine.lock.acquire(blocking=False):
        return ["generating"] if state.busy else []
    try:
        seq = state.seq if state.request is None else state.request.work.seq
        held, shared = (0, 0) if seq is None else engine.runner.state.sequence_pages(seq)
    finally:
        engine.lock.release()
    return [f"{held} pages ({shared} shared)"] + (["generating"] if state.busy else [])


def _text(engine: Engine, state: SessionBranch) -> list[str]:
    if engine.tokenizer is None:
        return []
    ids = [token for token in state.tokens.ids.tolist() if token >= 0]  # others stand for embeddings
    ends = [ids] if len(ids) <= 2 * DECODED else [ids[:DECODED], ids[-DECODED:]]
    texts = [engine.tokenizer.decode(end, skip_special_tokens=True) for end in ends]
    # What lies between the ends is as long as it takes to be left out.
    return [_short((" " * 2 * SHOWN).join(texts))]


def _short(text: str) -> str:
    """Return a text as Python writes it, of a long one both ends."""
    return repr(text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]} ... {text[-SHOWN:]}")
