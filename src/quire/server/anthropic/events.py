"""Answers of ``/v1/messages``: a chat's reply, said in blocks and in Anthropic's events."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from pydantic_core import from_json

from quire.base.outputs import RequestOutput
from quire.server.anthropic.blocks import BlockTurns
from quire.server.http.errors import ApiError, anthropic_body
from quire.server.http.events import Chunk, Chunks, NamedEventStream
from quire.server.openai.chat import ChatReply
from quire.server.openai.generation import Source
from quire.server.responses.events import OutputItems
from quire.server.responses.items import Item
from quire.server.tools.formats import json_type

SIGNATURE = "unsigned"
"""The signature of thoughts, which clients want to be there. Nothing is read from it."""

_DELTAS = {
    "response.output_text.delta": ("text_delta", "text"),
    "response.reasoning_text.delta": ("thinking_delta", "thinking"),
    "response.function_call_arguments.delta": ("input_json_delta", "partial_json"),
}
"""Anthropic's deltas, and the field of the text in each."""


class MessagesReply(ChatReply):
    """A message of blocks, or the events of one."""

    stream_class = NamedEventStream

    def __init__(self, turns: BlockTurns, *rest: Any) -> None:
        """``turns``: the chat that is answered. The rest: as in ``ChatReply``."""
        super().__init__(*rest)
        self._turns = turns
        self._output = OutputItems()
        self._id = f"msg_{secrets.token_hex(12)}"

    def quire(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Name hints as the request has them."""
        found = super().quire(outputs)
        if hints := found.get("quire", {}).get("hints"):
            found["quire"]["hints"] = [{**hint, "id": self._turns.place(hint["id"])} for hint in hints]
        return found

    def body_of(self, choices: Sequence[Mapping[str, Any]]) -> Chunk:
        for delta in self._said:
            list(self._output.feed(delta))
        more = self.quire(list(self.outputs.values()))
        content = [_block(item) for item in self._output.items]
        return {**self._message(content), **self._ended(choices[0]), "usage": self._usage(more), **more}

    async def chunks(self, sources: Sequence[Source]) -> Chunks:
        output, begun = self._output, False
        last: Mapping[str, Any] = {}
        async with aclosing(self.choices(sources)) as stream:
            async for last in stream:
                if not begun:
                    begun = True
                    yield {"type": "message_start", "message": {**self._message([]), "usage": self._usage({})}}
                    yield {"type": "ping"}
                for event in output.feed(last["delta"]):
                    for said in _said(event):
                        yield said
        if output.items:
            for event in output.end("completed"):
                for said in _said(event):
                    yield said
        more = self.report
        yield {"type": "message_delta", "delta": self._ended(last), "usage": self._usage(more), **more}
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> Chunk:
        return anthropic_body(error)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _ended(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        """Return the stop reason of the last choice. Calls that are not whole must not be made."""
        stop = choice["stop_reason"]
        calls = [item["arguments"] for item in self._output.items if item["type"] == "function_call"]
        reason = "end_turn"
        if choice["finish_reason"] == "length":
            reason = "max_tokens"
        elif calls and all(json_type(call) == "object" for call in calls):
            reason = "tool_use"
        elif isinstance(stop, str):
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}

    def _usage(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tokens. Each of the prompt is in one number: found, or computed and pinned, or
        only computed. ``more``: what was done with marks."""
        counts = self.tokens
        hints = more.get("quire", {}).get("hints", ())
        pins = [hint["tokens"] for hint in hints if hint["hint"] == "pin" and hint["status"] == "done"]
        created = max(counts["cached"], *pins) - counts["cached"] if pins else 0
        return {
            "input_tokens": counts["prompt"] - counts["cached"] - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": counts["cached"],
            "output_tokens": counts["completion"],
            "service_tier": "standard",
        }


def _said(event: Chunk) -> Iterator[Chunk]:
    """Translate an event of items into events of blocks."""
    kind, place = event["type"], {"index": event.get("output_index")}
    if kind == "response.output_item.added":
        yield {"type": "content_block_start", **place, "content_block": _block(event["item"], signature="")}
    elif kind in _DELTAS:
        name, field = _DELTAS[kind]
        yield {"type": "content_block_delta", **place, "delta": {"type": name, field: event["delta"]}}
    elif kind == "response.output_item.done":
        if event["item"]["type"] == "reasoning":
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            yield {"type": "content_block_delta", **place, "delta": signed}
        yield {"type": "content_block_stop", **place}


def _block(item: Item, signature: str = SIGNATURE) -> dict[str, Any]:
    if item["type"] == "function_call":
        return {"type": "tool_use", "id": item["call_id"], "name": item["name"], "input": _input(item["arguments"])}
    text = "".join(part["text"] for part in item["content"])
    if item["type"] == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": signature}
    return {"type": "text", "text": text}


def _input(arguments: str) -> dict[str, Any]:
    """Return arguments as an object, as far as they were written."""
    try:
        found = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
