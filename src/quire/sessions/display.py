"""The text of a session in a notebook, a debugger or a log."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.branches.session_branch import SessionBranch
    from quire.engine.engine import Engine
    from quire.sessions.live_sequence import LiveSequence
    from quire_inspector.drawing.summaries import Summary

SHOWN = 24
"""Characters of each end of a text that are shown."""
DECODED = 32
"""Tokens of each end that are decoded for that."""
SHOWN_IN_SUMMARIES = 200
"""Tokens of each end that a summary shows."""


def session_repr(live: LiveSequence) -> str:
    """Return name, length, pages and both ends of the text, escaped, on one line.

    It never raises and never waits: what cannot be had now (pages while a step runs, text without a
    tokenizer) is left out.
    """
    engine, branch, name = live.engine, live.branch, live.name
    parts = [f"{len(branch.tokens)} tokens"]
    if live.closed or engine.closed:
        parts.append("closed")
    else:
        parts += _tried(lambda: _pages(engine, branch))
    parts += _tried(lambda: _text(engine, branch))
    return f"<Session {'' if name is None else _short(name) + ' '}of {', '.join(parts)}>"


def session_summary(live: LiveSequence) -> Summary:
    """Return the facts of ``session_repr`` as a table, with more of the text. It never raises and
    never waits, either."""
    from quire_inspector.drawing.summaries import Summary

    engine, branch, name = live.engine, live.branch, live.name
    facts = [("tokens", f"{len(branch.tokens):,}")]
    if live.closed or engine.closed:
        facts.append(("state", "closed"))
    else:
        facts += [("state", one) for one in _tried(lambda: _pages(engine, branch))]
        words = [word for word in ("pinned", "modified") if getattr(branch, word)]
        facts += [("is", ", ".join(words))] if words else []
    facts += [("adapter", one) for one in _tried(lambda: [live.adapter or ""]) if one]
    facts += [("label", f"{label} = {value}") for label, value in live.labels.items()]
    texts = [("text", one) for one in _tried(lambda: _ends(engine, branch, SHOWN_IN_SUMMARIES))]
    return Summary("Session" if name is None else f"Session {name}", facts, texts)


def _tried(part: Callable[[], list[str]]) -> list[str]:
    try:
        return part()
    except Exception:  # others may change the session meanwhile
        return []


def _pages(engine: Engine, branch: SessionBranch) -> list[str]:
    if not engine.lock.acquire(blocking=False):
        return ["generating"] if branch.busy else []
    try:
        seq = branch.present.seq
        held, shared = (0, 0) if seq is None else engine.runner.state.sequence_pages(seq)
    finally:
        engine.lock.release()
    return [f"{held} pages ({shared} shared)"] + (["generating"] if branch.busy else [])


def _text(engine: Engine, branch: SessionBranch) -> list[str]:
    # What lies between the ends is as long as it takes to be left out.
    return [_short(one) for one in _ends(engine, branch, DECODED)]


def _ends(engine: Engine, branch: SessionBranch, most: int) -> list[str]:
    """Return the text, with ``most`` tokens of each end and spaces between; [] without any."""
    if engine.tokenizer is None:
        return []
    tokens = branch.tokens.ids
    parts = [tokens] if tokens.size <= 2 * most else [tokens[:most], tokens[-most:]]
    # Ids below 0 stand for embeddings.
    texts = [engine.tokenizer.decode(part[part >= 0].tolist(), skip_special_tokens=True) for part in parts]
    return [(" " * 2 * SHOWN).join(texts)]


def _short(text: str) -> str:
    """Return a text as Python writes it, of a long one both ends."""
    return repr(text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]} ... {text[-SHOWN:]}")
