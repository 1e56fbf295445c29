"""Text before a suffix: prompts of models that were trained to fill in the middle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from quire.server.http.context import Context
from quire.server.http.errors import bad_field, naming
from quire.server.openai.protocol import CompletionRequest
from quire.text.fill_middle import FillTokens

C = TypeVar("C", bound=CompletionRequest)


def filling(
    context: Context, body: C, before: Any, after: str, field: str, others: Sequence[tuple[str, str]] = ()
) -> tuple[C, list[int]]:
    """Return a body that ends where the text between ``before`` and ``after`` ends, and the prompt
    for that text. Raise ``ApiError`` 400, about a ``field``, for a model without the tokens."""
    tokenizer = context.llm.tokenizer
    tokens = FillTokens.of(tokenizer)
    if tokens is None or tokenizer is None:
        raise bad_field(
            field,
            f"{field} is not supported: this model has no tokens for filling in the middle, such as <|fim_prefix|>; "
            "load a code model that has",
            code="unsupported_parameter",
        )
    if not isinstance(before, str):
        raise bad_field("prompt", f"prompt must be one text beside {field}, got {before!r:.60}")
    for name in ("session_id", "echo", "blend"):
        if getattr(body, name):
            raise bad_field(name, f"{name} cannot be given with {field}; leave one of them out")
    with naming({}, "prompt"):
        context.llm.engine.checks.text("".join([*(text for pair in others for text in pair), before, after]))
    stops = [*body.sampling()[0].get("stop_token_ids", ()), *tokens.ends]
    return body.model_copy(update={"stop_token_ids": stops or None}), tokens.prompt(tokenizer, before, after, others)
