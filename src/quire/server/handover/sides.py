"""``side_of``: what a server's role starts beside its routes."""

from __future__ import annotations

from quire.async_llm import AsyncLLM
from quire.channels.greeting import Trust
from quire.server.handover.decode import DecodeSide
from quire.server.handover.prefill import PrefillSide
from quire.server.http.settings import ServerSettings


def side_of(llm: AsyncLLM, settings: ServerSettings) -> PrefillSide | DecodeSide | None:
    """Begin to listen for decode servers, or to ask a prefill server; None for a server that does
    both itself."""
    if settings.peer is None:
        return None
    trust, model = Trust(settings.secret), llm.identity.fields()
    if settings.role == "prefill":
        return PrefillSide(llm, settings.peer, trust, model)
    found = DecodeSide(llm, settings.peer, trust, model)
    llm.before_prompts = found.bring
    return found
