"""Answers of ``/api/chat`` and ``/api/generate``: replies of chats and completions, in ollama's
lines of JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from quire.async_llm import SampleDelta
from quire.server.http.errors import ApiError, ollama_body
from quire.server.http.events import Chunk, Chunks, EventStream, encode_json
from quire.server.ollama.models import moment
from quire.server.openai.chat import ChatReply
from quire.server.openai.completions import CompletionReply
from quire.server.openai.generation import Source
from quire.server.openai.logprobs import chat_logprobs
from quire.server.openai.replies import Reply
from quire.server.tools.messages import message_of


class LineStream(EventStream):
    """A stream of lines of JSON, one for each chunk."""

    media_type = "application/x-ndjson"
    last = b""

    def written(self, chunk: Chunk) -> bytes:
        return encode_json(chunk) + b"\n"


def line(reply: Reply, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line with a piece of an answer."""
    return {"model": reply.model, "created_at": moment(time.time()), **said, "done": False}


def done(reply: Reply, choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return the end of a sample, counts, and durations in nanoseconds."""
    now, counts = time.monotonic(), reply.tokens
    first = max(reply.began, reply.outputs[0].metrics.first_token_time or now)
    return {
        "done": True,
        "done_reason": "length" if choice.get("finish_reason") == "length" else "stop",
        "total_duration": int(1e9 * (now - reply.began)),
        "load_duration": 0,
        "prompt_eval_count": counts["prompt"],
        "prompt_eval_duration": int(1e9 * (first - reply.began)),
        "eval_count": counts["completion"],
        "eval_duration": int(1e9 * (now - first)),
    }


def scores(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return the log-probabilities of a choice's tokens, if they are asked for."""
    found = (choice.get("logprobs") or {}).get("content")
    return {"logprobs": found} if found else {}


def loaded(model: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a request without a prompt."""
    return {"model": model, "created_at": moment(time.time()), **said, "done": True, "done_reason": "load"}


class OllamaChat(ChatReply):
    """A message, or the text of ``/api/generate``."""

    stream_class = LineStream
    plain = False
    """Whether it is a text."""

    def said(self, content: str, thinking: str = "", calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Return the line with a piece of the answer."""
        thoughts = {"thinking": thinking} if thinking else {}
        if self.plain:
            return line(self, {"response": content, **thoughts})
        message = {"role": "assistant", "content": content, **thoughts}
        return line(self, {"message": {**message, "tool_calls": list(calls)} if calls else message})

    def body_of(self, choices: Sequence[Mapping[str, Any]]) -> Chunk:
        message = choices[0]["message"]
        said = self.said(message["content"] or "", message.get("reasoning_content", ""), _calls(message))
        return {**said, **scores(choices[0]), **done(self, choices[0])}

    async def chunks(self, sources: Sequence[Source]) -> Chunks:
        last: Mapping[str, Any] = {}
        async with aclosing(self.choices(sources)) as stream:
            async for last in stream:
                content = last["delta"].get("content") or ""
                thinking = last["delta"].get("reasoning_content") or ""
                if content or thinking or scores(last):
                    yield {**self.said(content, thinking), **scores(last)}
        if calls := _calls(message_of(self._said)):
            yield self.said("", calls=calls)
        yield {**self.said(""), **done(self, last)}

    def failed(self, error: ApiError) -> Chunk:
        return ollama_body(error)


class OllamaText(OllamaChat):
    """The answer of ``/api/generate``."""

    plain = True


class OllamaRaw(CompletionReply):
    """The continuation of a raw prompt."""

    stream_class = LineStream

    def choice(self, number: int, delta: SampleDelta) -> dict[str, Any]:
        choice = super().choice(number, delta)
        if (count := self._params.logprobs) is not None:
            choice["logprobs"] = chat_logprobs(delta.token_ids, delta.logprobs or [], count, self.tokenizer)
        return choice

    def body_of(self, choices: Sequence[Mapping[str, Any]]) -> Chunk:
        return {**line(self, {"response": choices[0]["text"]}), **scores(choices[0]), **done(self, choices[0])}

    async def chunks(self, sources: Sequence[Source]) -> Chunks:
        last: Mapping[str, Any] = {}
        async with aclosing(self.choices(sources)) as stream:
            async for last in stream:
                if last["text"] or scores(last):
                    yield {**line(self, {"response": last["text"]}), **scores(last)}
        yield {**line(self, {"response": ""}), **done(self, last)}

    def failed(self, error: ApiError) -> Chunk:
        return ollama_body(error)


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
