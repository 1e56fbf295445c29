"""A conversation of a chat request, as the model's template writes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.engine.chat_rendering import render_chat
from quire.engine.chat_turns import next_turn_ids
from quire.engine.long_texts import TextLimit
from quire.engine.spelled_tokens import SpelledTokens
from quire.engine.tokenizer import Tokenizer
from quire.server.cache_marks import Messages, Tools
from quire.server.context import Context
from quire.server.protocol import ChatRequest
from quire.server.thinking_fields import thinking_variables


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """The messages of a request, and what else its template gets."""

    tokenizer: Tokenizer
    texts: SpelledTokens
    template: str
    messages: Messages
    tools: Tools
    variables: Mapping[str, Any]
    text_limit: TextLimit | None
    allowed: Collection[str] | None = None
    """Names of the tools that the template sees; None: all."""

    @classmethod
    def of(
        cls,
        context: Context,
        body: ChatRequest,
        tokenizer: Tokenizer,
        template: str,
        tools: Tools,
        allowed: Collection[str] | None = None,
    ) -> Conversation:
        """Return that of a body. Raise ``ApiError`` 400 for fields that a template does not
        read."""
        variables: dict[str, Any] = {**tokenizer.special_tokens, **(body.chat_template_kwargs or {})}
        variables |= thinking_variables(body, template)
        if body.documents is not None:
            variables["documents"] = body.documents
        texts = SpelledTokens(tokenizer, template, body.messages, tools, variables)
        return cls(
            tokenizer=tokenizer,
            texts=texts,
            template=template,
            messages=body.messages,
            tools=tools,
            variables=variables,
            text_limit=context.llm.engine.checks.text_limit,
            allowed=allowed,
        )

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Tools, *, asks: bool) -> str:
        """Return the text of messages, for ``texts`` to tokenise. ``asks``: it ends where the model
        is to answer."""
        if tools is not None and self.allowed is not None:
            tools = [tool for tool in tools if tool["function"]["name"] in self.allowed]
        return render_chat(
            self.template,
            self.texts.messages(messages),
            add_generation_prompt=asks,
            tools=self.texts.value(tools),
            text_limit=self.text_limit,
            **self.texts.variables(self.variables),
        )

    def next_turn(self, answer: Mapping[str, Any]) -> NDArray[np.int64]:
        """Return the tokens with which the prompt after this answer begins."""
        return next_turn_ids(
            lambda messages: self.render(messages, self.tools, asks=False), [*self.messages, answer], self.texts
        )
