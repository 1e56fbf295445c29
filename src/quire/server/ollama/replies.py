"""Answers of ``/api/chat`` and ``/api/generate``: replies of chats and completions, in ollama's
lines of JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from starlette.types import Send

from quire.base.outputs import RequestOutput
from quire.server.http.errors import ollama_body
from quire.server.http.events import Chunk, Chunks, EventStream, encode_json, noted
from quire.server.openai.chat import ChatReply
from quire.server.openai.completions import CompletionReply
from quire.server.openai.generation import Source, Usage
from quire.server.tools.messages import message_of


class LineStream(EventStream):
    """A stream of lines of JSON, one for each chunk."""

    media_type = "application/x-ndjson"
    last = b""

    async def _send_event(self, send: Send, chunk: Chunk) -> None:
        await send({"type": "http.response.body", "body": encode_json(chunk) + b"\n", "more_body": True})


def times_of(output: RequestOutput, usage: Usage, began: float) -> dict[str, int]:
    """Return the counts, and the durations in nanoseconds, of an answer asked for at ``began``."""
    now = time.monotonic()
    first = max(began, output.metrics.first_token_time or now)
    return {
        "total_duration": int(1e9 * (now - began)),
        "load_duration": 0,
        "prompt_eval_count": usage.tokens["prompt"],
        "prompt_eval_duration": int(1e9 * (first - began)),
        "eval_count": usage.tokens["completion"],
        "eval_duration": int(1e9 * (now - first)),
    }


def moment() -> str:
    """Return the present time as ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def loaded(model: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a request without a prompt."""
    return {"model": model, "created_at": moment(), **said, "done": True, "done_reason": "load"}


class OllamaChat(ChatReply):
    """A message, or the text of ``/api/generate``."""

    stream_class = LineStream
    plain = False
    """Whether it is a text."""

    def said(self, content: str, thinking: str = "", calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Return the fields with a piece of the answer."""
        thoughts = {"thinking": thinking} if thinking else {}
        if self.plain:
            return {"response": content, **thoughts}
        message = {"role": "assistant", "content": content, **thoughts}
        return {"message": {**message, "tool_calls": list(calls)} if calls else message}

    def body_of(self, choices: Sequence[Mapping[str, Any]]) -> Chunk:
        message = choices[0]["message"]
        calls = _calls(message)
        said = self.said(message["content"] or "", message.get("reasoning_content", ""), calls)
        return {**self._line(said), **self._done(choices[0])}

    async def chunks(self, sources: Sequence[Source]) -> Chunks:
        last: Mapping[str, Any] = {}
        begun = False
        try:
            async with aclosing(super().chunks(sources)) as stream:
                async for chunk in stream:
                    for choice in chunk["choices"]:
                        last = choice
                        content = choice["delta"].get("content") or ""
                        thinking = choice["delta"].get("reasoning_content") or ""
                        if content or thinking:
                            begun = True
                            yield self._line(self.said(content, thinking))
            if calls := _calls(message_of(self._said)):
                yield self._line(self.said("", calls=calls))
        except Exception as error:
            if not begun:
                raise
            yield ollama_body(noted(error, None))
            return
        yield {**self._line(self.said("")), **self._done(last)}

    def _line(self, said: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": self._head["model"], "created_at": moment(), **said, "done": False}

    def _done(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        reason = "length" if choice.get("finish_reason") == "length" else "stop"
        return {"done": True, "done_reason": reason, **times_of(self.outputs[0], self.usage, self._began)}


class OllamaText(OllamaChat):
    """The answer of ``/api/generate``."""

    plain = True


class OllamaRaw(CompletionReply):
    """The continuation of a raw prompt."""

    stream_class = LineStream

    def body_of(self, choices: Sequence[Mapping[str, Any]]) -> Chunk:
        return {**self._line(choices[0]["text"]), **self._done(choices[0])}

    async def chunks(self, sources: Sequence[Source]) -> Chunks:
        last: Mapping[str, Any] = {}
        async with aclosing(super().chunks(sources)) as stream:
            async for chunk in stream:
                for choice in chunk["choices"]:
                    last = choice
                    if choice["text"]:
                        yield self._line(choice["text"])
        yield {**self._line(""), **self._done(last)}

    def _line(self, text: str) -> dict[str, Any]:
        return {"model": self._head["model"], "created_at": moment(), "response": text, "done": False}

    def _done(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        reason = "length" if choice.get("finish_reason") == "length" else "stop"
        return {"done": True, "done_reason": reason, **times_of(self.outputs[0], self.usage, self._began)}


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the calls of a message, with their arguments as objects. One that was cut is left
    out."""
    found = []
    for call in message.get("tool_calls") or ():
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except ValueError:
            continue
        if isinstance(arguments, dict):
            found.append({"function": {"name": call["function"]["name"], "arguments": arguments}})
    return found
