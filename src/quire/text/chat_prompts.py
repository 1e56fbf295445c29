"""Chat messages to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.chat_rendering import Message, render_chat, select_template
from quire.text.long_texts import TextLimit
from quire.text.spelled_tokens import SpelledTokens
from quire.text.tokenizer import Tokenizer


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    variables: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    text_limit: TextLimit | None = None,
    inside: bool = False,
    parse_special: bool | None = None,
) -> list[int]:
    """Return the token ids of the prompt for ``messages``, by the tokenizer's template, which gets
    further ``variables``. ``inside``: other text stands before it. ``parse_special`` is that of
    ``SpelledTokens``."""
    template = select_template(tokenizer.chat_templates, with_tools=tools is not None)
    given = {**tokenizer.special_tokens, **(variables or {})}
    texts = SpelledTokens(tokenizer, template, messages, tools, given, parse_special=parse_special)
    text = render_chat(
        template,
        texts.messages(messages),
        add_generation_prompt=add_generation_prompt,
        tools=texts.value(tools),
        text_limit=text_limit,
        **texts.variables(given),
    )
    return texts.encode_rendered(text, inside=inside)
