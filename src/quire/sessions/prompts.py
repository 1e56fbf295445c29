"""Sessions among the prompts of ``LLM.generate``, and prompts that have passed all checks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import InvalidArgument, took_effect
from quire.base.hints import NO_HINTS, CacheHints
from quire.base.media import NO_MEDIA, Media
from quire.base.sampling_params import SamplingParams
from quire.base.segments import BlendParams
from quire.engine.engine import Engine
from quire.engine.prompts import Prompt, Prompts
from quire.engine.segmented_prompts import WHOLE, Pieces
from quire.sessions.session import Session

PromptsOrSessions: TypeAlias = Prompts | Session | Sequence[Prompt | Session]
"""What ``generate`` takes: one prompt or session, or a list of them."""


@dataclass(frozen=True, slots=True)
class PreparedPrompts:
    """Prompts that have passed all checks: as token ids, with their texts where they were text."""

    ids: list[NDArray[np.int64]]
    texts: list[str | None]
    params: list[SamplingParams]
    key: Hashable
    adapter: int | None = None
    media: Sequence[Media] = ()
    """The embeddings of each; empty: there are none."""
    sessions: Sequence[Session | None] = ()
    """Which session each of them is; None where it is none. Empty if none of them is."""
    hints: CacheHints = NO_HINTS
    """What is said about the state of each."""
    pieces: Sequence[Pieces] = ()
    """Of each; empty: all are of one piece."""
    blend: BlendParams | None = None
    """How the state of their segments is reused; None: not at all."""

    def media_of(self, number: int) -> Media:
        """Return the embeddings of one prompt."""
        return self.media[number] if self.media else NO_MEDIA

    def pieces_of(self, number: int) -> Pieces:
        """Return the pieces of one prompt."""
        return self.pieces[number] if self.pieces else WHOLE

    def session_of(self, number: int) -> Session | None:
        """Return the session that is continued in the place of one prompt."""
        return self.sessions[number] if self.sessions else None

    def require_kept(self) -> None:
        """Raise ``NotDurable`` if a session among them is kept, and cannot be."""
        for session in self.sessions:
            if session is not None:
                session.require_kept()

    def keep_sessions(self) -> None:
        """Wait until the sessions among them are durable, if they are kept."""
        for session in self.sessions:
            if session is not None:
                with took_effect():
                    session._keep(wait=True)


def split_sessions(prompts: PromptsOrSessions, engine: Engine) -> tuple[list[Session | None], Prompts]:
    """Return the sessions among the prompts, if any, and the prompts with nothing in their places.
    ``InvalidArgument`` for a session of another LLM, and for a session given twice: it continues in
    one way at a time."""
    if isinstance(prompts, Session):
        prompts = [prompts]
    if not isinstance(prompts, (list, tuple)) or not any(isinstance(one, Session) for one in prompts):
        return [], prompts  # type: ignore[return-value]
    found = [one if isinstance(one, Session) else None for one in prompts]
    places: dict[int, int] = {}
    for number, session in enumerate(found):
        if session is None:
            continue
        if not session.belongs_to(engine):
            raise InvalidArgument(
                f"prompt {number} is a session of another LLM; its own one can continue it", field=f"prompts.{number}"
            )
        first = places.setdefault(id(session), number)
        if first != number:
            raise InvalidArgument(
                f"prompt {number} is the same session as prompt {first}; give it once, and forks of it for more branches",
                field=f"prompts.{number}",
            )
    return found, [() if isinstance(one, Session) else one for one in prompts]
