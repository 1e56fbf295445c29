"""Answers of ``/v1/responses``: a chat's reply, said in items and in OpenAI's events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request

from quire.server.http.context import Context
from quire.server.http.errors import ApiError
from quire.server.http.events import Chunk, Chunks, NamedEventStream
from quire.server.openai.chat import ChatReply
from quire.server.openai.generation import Source
from quire.server.openai.protocol import ChatRequest
from quire.server.responses.body import ResponseRequest, tools_of
from quire.server.responses.items import Item, new_id
from quire.server.responses.store import PREFIX, StoredResponse
from quire.server.tools.formats import json_type

ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
"""Codes of failed responses by the status that the error would have had. Others are
"server_error"."""

EMPTY: Mapping[str, Item] = {
    "reasoning": {"summary": [], "content": []},
    "message": {"role": "assistant", "content": []},
    "function_call": {"arguments": ""},
}
"""What an item has at its beginning."""


class OutputItems:
    """The output of one response as a chat's deltas make it, and the events that tell of it.

    One item is open at a time. What a model writes behind a call begins a message of its own.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._call: int | None = None
        """The number in the chat of the call that is open."""
        self._open = False
        """Whether the last item is still open."""
        self._events = 0

    def event(self, kind: str, **fields: Any) -> Chunk:
        self._events += 1
        return {"type": f"response.{kind}", **fields, "sequence_number": self._events - 1}

    def feed(self, delta: Mapping[str, Any]) -> Iterator[Chunk]:
        """Add a delta of the message, and yield its events."""
        calls = delta.get("tool_calls", ())
        # Arguments of an open call come before the text of the same delta, new calls behind it.
        yield from self._calls(call for call in calls if call["index"] == self._call)
        begun = [call for call in calls if "id" in call]
        for field, kind in (("reasoning_content", "reasoning"), ("content", "message")):
            if text := delta.get(field):
                if not self._open or self.items[-1]["type"] != kind:
                    yield from self._begin(kind)
                self._part["text"] += text
                yield self.event(f"{self._part['type']}.delta", **self._place, **_logprobs(kind), delta=text)
        yield from self._calls(begun)

    def _calls(self, calls: Iterable[Mapping[str, Any]]) -> Iterator[Chunk]:
        for call in calls:
            function = call["function"]
            if call["index"] != self._call:
                yield from self._begin("function_call", call_id=call["id"], name=function["name"])
                self._call = call["index"]
            if text := function["arguments"]:
                self.items[-1]["arguments"] += text
                yield self.event("function_call_arguments.delta", **self._place, delta=text)

    def end(self, status: str) -> Iterator[Chunk]:
        """End the output, and yield the events of that. ``status``: of the last item. An answer
        without anything is an empty message."""
        if not self.items:
            yield from self._begin("message")
        yield from self._close(status)

    def status(self, finish: str | None) -> str:
        """Return the status of the response and of its last item, which is not closed yet. A stop
        string or a token may cut a call, which must not be made then."""
        last = self.items[-1] if self.items else {}
        cut = last.get("type") == "function_call" and json_type(last["arguments"]) != "object"
        return "incomplete" if cut or finish == "length" else "completed"

    @property
    def reasoning(self) -> str:
        return "".join(part["text"] for item in self.items if item["type"] == "reasoning" for part in item["content"])

    @property
    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self.items[-1]["content"][0]
        return part

    @property
    def _place(self) -> dict[str, Any]:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return place if self.items[-1]["type"] == "function_call" else {**place, "content_index": 0}

    def _begin(self, kind: str, **fields: Any) -> Iterator[Chunk]:
        """Open an item, with its only part."""
        if self._open:
            yield from self._close("completed")
        item: Item = {"type": kind, "id": new_id(kind), "status": "in_progress", **fields, **EMPTY[kind]}
        self.items.append(item)
        self._open = True
        yield self.event("output_item.added", output_index=len(self.items) - 1, item=_copied(item))
        if kind != "function_call":
            text: Item = {"type": "reasoning_text", "text": ""}
            if kind == "message":
                text = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"] = [text]
            yield self.event("content_part.added", **self._place, part=dict(text))

    def _close(self, status: str) -> Iterator[Chunk]:
        item = self.items[-1]
        self._open, self._call, item["status"] = False, None, status
        if item["type"] == "function_call":
            said = {"name": item["name"], "arguments": item["arguments"]}
            yield self.event("function_call_arguments.done", **self._place, **said)
        else:
            part = dict(self._part)
            yield self.event(f"{part['type']}.done", **self._place, **_logprobs(item["type"]), text=part["text"])
            yield self.event("content_part.done", **self._place, part=part)
        yield self.event("output_item.done", output_index=len(self.items) - 1, item=_copied(item))


def _logprobs(kind: str) -> dict[str, Any]:
    """Return the fields that only events of texts have."""
    return {"logprobs": []} if kind == "message" else {}


def _copied(item: Item) -> Item:
    """Return an item that does not grow."""
    content = {"content": [dict(part) for part in item["content"]]} if "content" in item else {}
    return {**item, **content}


class ResponseReply(ChatReply):
    stream_class = NamedEventStream

    def __init__(
        self,
        body: ResponseRequest,
        items: list[Item],
        request: Request,
        context: Context,
        chat: ChatRequest,
        *rest: Any,
    ) -> None:
        """``items``: the conversation that is answered. ``chat`` and the rest: as in
        ``ChatReply``."""
        super().__init__(request, context, chat, *rest)
        self._body = body
        self._items = items
        self._salt = chat.cache_salt
        self._output = OutputItems()
        self.body: dict[str, Any] = self._begun()

    def body_of(self, choices: Sequence[Mapping[str, Any]]) -> Chunk:
        for delta in self._said:
            list(self._output.feed(delta))
        status = self._output.status(choices[0]["finish_reason"])
        list(self._output.end(status))
        return self._finished(choices[0]["finish_reason"], status, self.quire(list(self.outputs.values())))

    async def chunks(self, sources: Sequence[Source]) -> Chunks:
        output, begun = self._output, False
        finish: str | None = None
        async with aclosing(self.choices(sources)) as stream:
            async for choice in stream:
                if not begun:
                    begun = True
                    yield output.event("created", response=self.body)
                    yield output.event("in_progress", response=self.body)
                finish = choice["finish_reason"] or finish
                for event in output.feed(choice["delta"]):
                    yield event
        status = output.status(finish)
        for event in output.end(status):
            yield event
        body = self._finished(finish, status, self.report)
        await self.keep()
        yield output.event(body["status"], response=body)

    def failed(self, error: ApiError) -> Chunk:
        failure = {"code": ERROR_CODES.get(error.status, "server_error"), "message": error.message}
        return self._output.event("failed", response={**self._ended("failed"), "error": failure})

    async def keep(self) -> None:
        """Store the finished response, unless the client does not want that."""
        if self.body["store"]:
            stored = StoredResponse(self.body, self._items, self._salt)
            await self.context.responses.put(self.request.state.owner, stored)

    def _begun(self) -> dict[str, Any]:
        """Return the response before anything is generated."""
        body, params = self._body, self._params
        text, reasoning = body.text, body.reasoning
        return {
            "id": f"{PREFIX}{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {
                "format": (text and text.format) or {"type": "text"},
                "verbosity": (text and text.verbosity) or "medium",
            },
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in tools_of(body)],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def _ended(self, status: str) -> dict[str, Any]:
        """Return the response with what was generated."""
        counts = self.tokens
        thought = self._output.reasoning
        reasoning = 0
        if thought and self.tokenizer is not None:
            reasoning = min(len(self.tokenizer.encode_inside(thought)), counts["completion"])
        usage = {
            "input_tokens": counts["prompt"],
            "input_tokens_details": {"cached_tokens": counts["cached"], "cache_write_tokens": 0},
            "output_tokens": counts["completion"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": counts["prompt"] + counts["completion"],
        }
        return {**self.body, "status": status, "output": self._output.items, "usage": usage}

    def _finished(self, finish: str | None, status: str, more: Mapping[str, Any]) -> dict[str, Any]:
        """Return the finished response. ``more``: what OpenAI's clients do not know."""
        self.body = {**self._ended(status), **more}
        if status == "completed":
            self.body["completed_at"] = int(time.time())
        else:
            self.body["incomplete_details"] = {"reason": "max_output_tokens" if finish == "length" else "stop"}
        return self.body
