"""Chat messages to prompts, by a tokenizer's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.chat_rendering import Message, render_chat, select_template
from quire.text.long_texts import TextLimit
from quire.text.spelled_tokens import SpelledTokens
from quire.text.tokenizer import Tokenizer


class ChatPrompt:
    """A template with the variables of one conversation. ``texts`` tokenises what it writes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        template: str | None = None,
        text_limit: TextLimit | None = None,
        parse_special: bool | None = None,
    ) -> None:
        """``template``: by default the tokenizer's. ``parse_special`` is that of
        ``SpelledTokens``."""
        chosen = (
            select_template(tokenizer.chat_templates, with_tools=tools is not None) if template is None else template
        )
        self.template = chosen
        self._variables, self._text_limit = {**tokenizer.special_tokens, **(variables or {})}, text_limit
        self.texts = SpelledTokens(tokenizer, chosen, messages, tools, self._variables, parse_special=parse_special)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, *, asks: bool = True
    ) -> str:
        """Return the text of messages. ``asks``: it ends where the model is to answer."""
        return render_chat(
            self.template,
            self.texts.messages(messages),
            add_generation_prompt=asks,
            tools=self.texts.value(tools),
            text_limit=self._text_limit,
            **self.texts.variables(self._variables),
        )


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    variables: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    inside: bool = False,
    **options: Any,
) -> list[int]:
    """Return the token ids of the prompt for ``messages``. ``inside``: other text stands before it.
    ``options``: as for ``ChatPrompt``."""
    chat = ChatPrompt(tokenizer, messages, tools, variables, **options)
    return chat.texts.encode_rendered(chat.render(messages, tools, asks=add_generation_prompt), inside=inside)
