"""The state that the routes of one server share: ``request.app.state.context``."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from starlette.requests import Request

from quire.adapters.keys import OwnedSalt
from quire.async_llm import AsyncLLM
from quire.base.caller_context import caller
from quire.base.signatures import require_text
from quire.engine.named_adapters import AdapterInfo
from quire.server.http.errors import ApiError, naming
from quire.server.http.gate import Gate
from quire.server.http.settings import ServerSettings
from quire.server.http.text_threads import Texts

if TYPE_CHECKING:
    from quire.server.chats.store import Chats
    from quire.server.openai.reruns import Reruns
    from quire.server.responses.store import Responses
    from quire.server.sessions.held import Sessions, StoredBytes


def context_of(request: Request) -> Context:
    """Return the state of the server that a request came to."""
    context: Context = request.app.state.context
    return context


def public_name(model: str | Path) -> str:
    """Return the source of a model or adapter as clients see it: only the name of a directory
    or file."""
    return Path(os.path.abspath(model)).name if os.path.exists(model) else str(model)


@dataclass(slots=True)
class Context:
    """The shared state; one per server."""

    llm: AsyncLLM
    settings: ServerSettings
    base_names: tuple[str, ...]
    """The clients' names of the base model. Adapters have their own names."""
    gate: Gate
    """The count of running requests. It refuses more when full or shutting down."""
    sessions: Sessions
    stored: StoredBytes
    reruns: Reruns
    responses: Responses
    chats: Chats
    texts: Texts = field(default_factory=Texts)
    """The threads that render and tokenise texts."""
    slot_locks: WeakValueDictionary[tuple[str, int], asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """The locks of slots in use, by API key and number."""
    started: float = field(default=0.0)
    """Start of the server in Unix time."""
    adapters: dict[str, set[str]] = field(default_factory=dict)
    """Names of the loaded adapters by the API key that they belong to ("" those of the server), at
    the last look at the engine: at the start, at every load or unload over HTTP, and at every
    listing by that key. Requests need not wait for the engine to find a name."""
    loading: Counter[str] = field(default_factory=Counter)
    """Adapters that are being loaded over HTTP, by API key."""

    @property
    def model_name(self) -> str:
        """Return the first name of the base model, which answers have."""
        return self.base_names[0]

    @property
    def longest(self) -> int:
        """Most tokens of a request: the model's length, or the capacity of the page pool."""
        capacity = self.llm.engine.runner.state.capacity
        length = self.llm.engine.max_model_len
        return length if capacity is None else min(length, capacity)

    async def refresh_adapters(self) -> Mapping[str, AdapterInfo]:
        """Read the adapters that the caller may use from the engine; return them by their names."""
        loaded = await self.llm.adapters()
        for owner in {"", caller.get().owner}:
            self.adapters[owner] = {info.name for info in loaded.values() if info.owner == owner}
        return loaded

    @property
    def adapter_names(self) -> set[str]:
        """Return the names of the adapters that the caller may use."""
        return self.adapters.get("", set()) | self.adapters.get(caller.get().owner, set())

    def salt(self, owner: str, given: str | None) -> str | None:
        """Return the salt of a request's prefixes, out of its owner and its own ``cache_salt``. No
        other API key has it, unless the server shares. ``owner`` is a digest of fixed length. Raise
        ``ApiError`` 400 for half a surrogate pair."""
        with naming({}, "cache_salt"):
            require_text("cache_salt", given or "")
        if not owner or self.settings.share_prefix_cache:
            return given
        return OwnedSalt(given, owner)

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a request's ``model`` names; None for the base model or no name.
        Raise ``ApiError`` 404 with the code "model_not_found" for another name."""
        if model is None or model in self.base_names:
            return None
        names = self.adapter_names
        if model in names:
            return model
        known = ", ".join(map(repr, [*self.base_names, *sorted(names)]))
        raise ApiError(
            404, f"there is no model {model[:200]!r}; this server has {known}", param="model", code="model_not_found"
        )
