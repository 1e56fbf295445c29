"""What the routes of one server share: ``request.app.state.context``."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from quire.async_llm import AsyncLLM
from quire.server.errors import ApiError
from quire.server.gate import Gate
from quire.server.settings import ServerSettings
from quire.server.text_threads import Texts

if TYPE_CHECKING:
    from quire.server.sessions import Sessions
    from quire.server.stored_bytes import StoredBytes


def public_name(model: str | Path) -> str:
    """What clients are told of the place from which a model or an adapter was loaded: of a directory its name alone."""
    return Path(os.path.abspath(model)).name if os.path.isdir(model) else str(model)


@dataclass(slots=True)
class Context:
    """One per server."""

    llm: AsyncLLM
    settings: ServerSettings
    model_name: str
    """What clients call the base model. Adapters go by their own names."""
    gate: Gate
    """Counts what is under way; refuses when full or shutting down."""
    sessions: Sessions
    stored: StoredBytes
    texts: Texts = field(default_factory=Texts)
    """Where texts are rendered and tokenised."""
    started: float = field(default=0.0)
    """Unix time."""
    adapters: set[str] = field(default_factory=set)
    """Names of the loaded adapters, as of the last look at the engine: at start, whenever one is loaded or unloaded over HTTP,
    and whenever they are listed. Kept here so that nobody waits for the engine to learn who is meant."""

    @property
    def longest(self) -> int:
        """Tokens that a request may have: the model's length, or what the pool of pages holds."""
        capacity = self.llm.engine.runner.state.capacity
        length = self.llm.engine.max_model_len
        return length if capacity is None else min(length, capacity)

    async def refresh_adapters(self) -> None:
        """Look at the engine."""
        self.adapters = set(await self.llm.adapters())

    def salt(self, owner: str, given: str | None) -> str | None:
        """The salt under which a request of ``owner`` finds and leaves prefixes, with the ``cache_salt`` that it gives itself: no
        other API key has it, unless the server shares. ``owner`` is a digest, and of one length, so no two pairs give the same."""
        if not owner or self.settings.share_prefix_cache:
            return given
        return owner if given is None else f"{owner} {given}"

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a request's ``model`` names; None for the base model (also if ``model`` is missing).
        ``ApiError`` 404 with the code "model_not_found" for anything else."""
        if model is None or model == self.model_name:
            return None
        if model in self.adapters:
            return model
        known = ", ".join(map(repr, [self.model_name, *sorted(self.adapters)]))
        raise ApiError(
            404, f"there is no model {model[:200]!r}; this server has {known}", param="model", code="model_not_found"
        )
