"""``POST /v1/warm``: the state of segments is computed before prompts have them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.http.bodies import BodyRoute
from quire.server.http.context import context_of
from quire.server.http.errors import bad_field, naming
from quire.server.http.events import JsonAnswer, unless_gone
from quire.server.openai.generation import encode, in_texts
from quire.server.sessions.bodies import Prompt, StrictBody

router = APIRouter(route_class=BodyRoute)


class WarmBody(StrictBody):
    """``POST /v1/warm``."""

    segments: list[Prompt]
    """Texts, or lists of token ids."""
    behind: Prompt | None = None
    """What the prompts begin with; none: anything."""
    model: str | None = None
    """The model's name or an adapter's; the base model if it is missing."""
    cache_salt: str | None = None
    """That of the requests which are to find them."""


@router.post("/v1/warm", tags=["blending"])
async def warm(request: Request, body: WarmBody) -> Response:
    """Compute the state that segments have by themselves, as far as it is not kept. Of each:
    ``tokens``, those whose state is ``kept``, and how many were ``computed`` for it."""
    context = context_of(request)
    checks, adapter = context.llm.engine.checks, context.adapter_of(body.model)
    with naming({"blend": "model"}):
        context.llm.engine.blending.require()
    if not body.segments or len(body.segments) > context.settings.max_waiting:
        raise bad_field(
            "segments", f"segments must hold 1 to {context.settings.max_waiting} texts, got {len(body.segments)}"
        )
    parts = [(f"segments.{number}", segment) for number, segment in enumerate(body.segments)]
    if body.behind is not None:
        parts.append(("behind", body.behind))
    for where, text in parts:
        with naming({}, where):
            checks.text(text)

    def encode_all() -> list[Any]:
        found = []
        for where, text in parts:
            with naming({}, where):
                found.append(encode(context.llm.tokenizer, text, inside=where != "behind"))
                checks.tokens(found[-1])
                checks.length(found[-1].size, None)
        return found

    ids = await in_texts(context, request, sum(len(text) for _, text in parts), encode_all)
    behind = None if body.behind is None else ids.pop().tolist()
    request.state.tokens = {"prompt": sum(one.size for one in ids)}
    salt = context.salt(request.state.owner, body.cache_salt)
    kept = await unless_gone(request, context.llm.warm(ids, behind=behind, adapter=adapter, cache_salt=salt))
    return JsonAnswer({"model": body.model or context.model_name, "segments": [asdict(one) for one in kept]})
