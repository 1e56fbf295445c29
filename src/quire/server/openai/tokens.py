"""``/tokenize`` and ``/detokenize``, in vLLM's shapes, and in llama-server's."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, StrictBool, StrictInt, StrictStr
from starlette.responses import Response

from quire.server.http.bodies import BodyRoute, BoundedModel
from quire.server.http.context import Context, context_of
from quire.server.http.errors import bad_field
from quire.server.http.events import JsonAnswer
from quire.server.openai.generation import in_texts
from quire.text.chat_prompts import encode_chat
from quire.text.long_texts import TextLimit
from quire.text.spelled_tokens import SpelledTokens
from quire.text.tokenizer import Tokenizer

router = APIRouter(route_class=BodyRoute, tags=["tokens"])


RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "chat_template"})
RESERVED |= {"tokenizer", "tokenizer_template", "text_limit"}
"""Names that ``chat_template_kwargs`` may not hold."""


class TokenizeRequest(BoundedModel):
    """One of ``prompt``, ``messages`` and, for llama-server's shape, ``content``."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: StrictBool | None = Field(
        default=None, description="Whether the tokenizer adds its own; by default for a prompt, not for messages."
    )
    add_generation_prompt: StrictBool = True
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Further variables of the template.")
    parse_special: StrictBool | None = Field(
        default=None,
        description="Whether special tokens that the text spells are these; by default in a prompt, and in messages as "
        "the server was told.",
    )
    continue_final_message: StrictBool = False
    chat_template: StrictStr | None = None
    return_token_strs: StrictBool = False
    content: StrictStr | None = Field(
        default=None, description="A text, of whose tokens llama-server's answer is made."
    )
    add_special: StrictBool = Field(default=False, description="Beside content: add_special_tokens.")
    with_pieces: StrictBool = Field(default=False, description="Beside content: each token with its text or bytes.")


class TokenizeResponse(BaseModel):
    """Token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(BoundedModel):
    """Token ids."""

    model: StrictStr | None = None
    tokens: list[Annotated[StrictInt, Field(ge=0)]]
    skip_special_tokens: StrictBool = Field(default=False, description="Leave special tokens out of the text.")


class DetokenizeResponse(BaseModel):
    """The tokens' text, with special tokens spelled out if they are not skipped."""

    prompt: str
    content: str
    """The same, where llama-server has it."""


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Return the tokens of a prompt, or of messages in the model's chat template."""
    context = context_of(request)
    context.adapter_of(body.model)
    tokenizer = _tokenizer(context)
    if body.content is not None:
        return await _llamacpp_tokens(request, context, tokenizer, body, body.content)
    if (body.prompt is None) == (body.messages is None):
        given = "neither" if body.prompt is None else "both"
        raise bad_field("prompt", f"either prompt or messages must be given, got {given}")
    if body.continue_final_message:
        raise bad_field(
            "continue_final_message",
            "continue_final_message is not supported; render the messages yourself and send a prompt",
            code="unsupported",
        )
    if body.chat_template is not None:
        raise bad_field(
            "chat_template", "chat_template is not taken from requests; the model's is used", code="unsupported"
        )
    checks = context.llm.engine.checks
    checks.text(body.prompt)
    # The text of messages is about as long as the body that it is made of.
    size = len(await request.body()) if body.prompt is None else len(body.prompt)

    def answer() -> Response:
        tokens = _encode(tokenizer, body, checks.text_limit)
        texts = [tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
        return JsonAnswer(
            {"count": len(tokens), "max_model_len": context.longest, "tokens": tokens, "token_strs": texts}
        )

    return await in_texts(context, request, size, answer)


async def _llamacpp_tokens(
    request: Request, context: Context, tokenizer: Tokenizer, body: TokenizeRequest, content: str
) -> Response:
    if body.prompt is not None or body.messages is not None:
        name = "prompt" if body.messages is None else "messages"
        raise bad_field(name, f"content and {name} are both given; give one of them")
    context.llm.engine.checks.text(content)

    def answer() -> Response:
        texts = SpelledTokens(tokenizer, None, content, parse_special=body.parse_special is not False)
        tokens: list[Any] = texts.encode(content, add_special_tokens=body.add_special)
        if body.with_pieces:
            tokens = [{"id": token, "piece": _piece(tokenizer, token)} for token in tokens]
        return JsonAnswer({"tokens": tokens})

    return await in_texts(context, request, len(content), answer)


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """Return a token's text, or its bytes if these are a part of a character."""
    found = tokenizer.token_bytes.piece(token)
    try:
        return found.decode()
    except UnicodeDecodeError:
        return list(found)


@router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """Return the text of tokens."""
    context = context_of(request)
    context.adapter_of(body.model)
    tokenizer = _tokenizer(context)
    most = context.llm.engine.max_model_len
    if len(body.tokens) > most:
        raise bad_field("tokens", f"tokens has {len(body.tokens)} ids; the model's context holds {most}")

    def answer() -> Response:
        for index, token in enumerate(body.tokens):
            if token >= tokenizer.vocab_size:
                raise bad_field(
                    f"tokens.{index}",
                    f"tokens[{index}] is {token}; ids must be in [0, {tokenizer.vocab_size})",
                    code="invalid_argument",
                )
        text = tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return JsonAnswer({"prompt": text, "content": text})

    return await asyncio.to_thread(answer)


def _tokenizer(context: Context) -> Tokenizer:
    tokenizer = context.llm.tokenizer
    if tokenizer is None:
        raise bad_field("model", "this model has no tokenizer; it takes token ids", code="unsupported")
    return tokenizer


def _encode(tokenizer: Tokenizer, body: TokenizeRequest, text_limit: TextLimit | None) -> list[int]:
    if body.prompt is not None:
        texts = SpelledTokens(tokenizer, None, body.prompt, parse_special=body.parse_special is not False)
        return texts.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    assert body.messages is not None
    for name in body.chat_template_kwargs or {}:
        if name in RESERVED:
            raise bad_field(
                f"chat_template_kwargs.{name}",
                f"chat_template_kwargs must not have {name!r}; that is a field of its own",
            )
    if body.add_special_tokens:
        raise bad_field(
            "add_special_tokens",
            "add_special_tokens must be false for messages; the chat template spells its special tokens",
            code="unsupported",
        )
    return encode_chat(
        tokenizer,
        body.messages,
        body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        tools=body.tools,
        text_limit=text_limit,
        parse_special=body.parse_special,
    )
