"""Items as messages, and messages as items and events, against what they say in all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.server.http.errors import ApiError
from quire.server.responses.events import OutputItems
from quire.server.responses.items import messages_of, read_items
from quire.server.tools.messages import message_of

USER = {"role": "user", "content": "u"}
THOUGHT = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "o"}
CALLED = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def messages(items: Any) -> list[dict[str, Any]]:
    return messages_of(list(read_items(items)), lambda number: f"input.{number}")


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("u", [USER]),
        ([USER, said("a"), said("b")], [USER, said("a"), said("b")]),
        ([THOUGHT, said("a")], [{**said("a"), "reasoning_content": "t"}]),
        ([said("a"), THOUGHT, said("b")], [said("a"), {**said("b"), "reasoning_content": "t"}]),
        ([{**THOUGHT, "content": None}, said("a")], [{**said("a"), "reasoning_content": ""}]),
        ([THOUGHT, CALL], [{"role": "assistant", "content": None, "reasoning_content": "t", "tool_calls": CALLED}]),
        ([said("a"), CALL, said("b")], [{**said("ab"), "tool_calls": CALLED}]),
        (
            [CALL, {**CALL, "call_id": "b"}, OUTPUT, said("a")],
            [
                {"role": "assistant", "content": None, "tool_calls": [*CALLED, {**CALLED[0], "id": "b"}]},
                {"role": "tool", "tool_call_id": "a", "content": "o"},
                said("a"),
            ],
        ),
        (
            [CALL, {**OUTPUT, "output": [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}]}],
            [
                {"role": "assistant", "content": None, "tool_calls": CALLED},
                {
                    "role": "tool",
                    "tool_call_id": "a",
                    "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}],
                },
            ],
        ),
    ],
)
def test_one_turn_of_a_model_is_one_message(items: Any, expected: list[dict[str, Any]]) -> None:
    assert messages(items) == expected


def test_what_was_read_is_read_again() -> None:
    """A listed item can be sent back as it is, and keeps its id."""
    read = list(read_items([USER, THOUGHT, said("a"), CALL, OUTPUT]))
    assert list(read_items(read)) == read
    assert len({item["id"] for item in read}) == 5
    with pytest.raises(ApiError, match="no function_call before it"):
        messages([OUTPUT, CALL])


PARTS = st.lists(st.tuples(st.sampled_from(["text", "call", "more"]), st.text("ab\n", max_size=3)), max_size=8)


def as_a_reader_gives_them(thought: str, parts: list[tuple[str, str]], cuts: set[int]) -> list[dict[str, Any]]:
    """The deltas of parts in their order, those up to a cut in one: its text, and pieces of its
    calls, of which only the one that was written last goes on."""
    deltas: list[dict[str, Any]] = [{"reasoning_content": thought} if thought else {}]
    number, within = -1, False
    for place, (kind, text) in enumerate(parts):
        if place in cuts:
            deltas.append({})
        delta = deltas[-1]
        if kind == "text" or (kind == "more" and not within):
            if text:
                delta["content"], within = delta.get("content", "") + text, False
            continue
        calls = delta.setdefault("tool_calls", [])
        if kind == "call":
            number, within = number + 1, True
            begun = {"index": number, "id": f"call_{number}", "type": "function"}
            calls.append({**begun, "function": {"name": "f", "arguments": ""}})
        elif not calls or calls[-1]["index"] != number:
            calls.append({"index": number, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += text
    return deltas


@example("", [("call", "a"), ("more", "b"), ("text", "c"), ("call", "d")], {1}, "completed")
@given(st.sampled_from(["", "hm"]), PARTS, st.sets(st.integers(0, 8)), st.sampled_from(["completed", "incomplete"]))
def test_events_tell_what_the_deltas_say(
    thought: str, parts: list[tuple[str, str]], cuts: set[int], status: str
) -> None:
    deltas = as_a_reader_gives_them(thought, parts, cuts)
    output, found = OutputItems(), list[Any]()
    for delta in deltas:
        found += list(output.feed(delta))
    found += list(output.end(status))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    message = message_of(deltas)
    texts = {"reasoning": "", "message": ""}
    for item in output.items:
        if item["type"] in texts:
            texts[item["type"]] += item["content"][0]["text"]
    assert texts == {"reasoning": message.get("reasoning_content", ""), "message": message["content"] or ""}
    calls = [item for item in output.items if item["type"] == "function_call"]
    assert [(call["call_id"], call["arguments"]) for call in calls] == [
        (call["id"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]
    assert [item["status"] for item in output.items] == ["completed"] * (len(output.items) - 1) + [status]
    begun = [event["output_index"] for event in found if event["type"] == "response.output_item.added"]
    ended = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert (begun, ended) == (list(range(len(output.items))), output.items)
    for number, item in enumerate(output.items):
        pieces = [event["delta"] for event in found if event.get("output_index") == number and "delta" in event]
        assert "".join(pieces) == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
