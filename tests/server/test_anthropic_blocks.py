"""Turns of blocks become messages: invented ones, against those that are made one by one."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.server.anthropic.blocks import BlockTurns

TEXT = st.fixed_dictionaries({"type": st.just("text"), "text": st.text("ab", max_size=3)})
MARKED = st.builds(lambda block, mark: {**block, "cache_control": {"type": mark}}, TEXT, st.text("xyz", min_size=1))
USER = st.text("ab", max_size=3) | st.lists(TEXT | MARKED, min_size=1, max_size=3)
TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), USER), max_size=6)


def at(body: Any, path: str) -> Any:
    for part in path.split("."):
        body = body[int(part) if part.isdigit() else part]
    return body


@given(TURNS, USER)
def test_texts_and_their_places(turns: list[tuple[str, Any]], last: Any) -> None:
    body = {"messages": [{"role": role, "content": content} for role, content in [*turns, ("user", last)]]}
    made = BlockTurns(None, body["messages"])
    wanted: list[tuple[str, list[str]]] = []
    for role, group in itertools.groupby(body["messages"], lambda turn: turn["role"]):
        contents = [turn["content"] for turn in group]
        blocks = [[{"text": one}] if isinstance(one, str) else one for one in contents]
        texts = [block["text"] for block in itertools.chain(*blocks)]
        wanted.append((str(role), ["".join(texts)] if role == "assistant" else texts))
    found = []
    for number, message in enumerate(made.messages):
        content = message["content"]
        parts = [{"text": content}] if isinstance(content, str) else content
        found.append((message["role"], [part["text"] for part in parts]))
        if "cache_control" in message:
            place = made.place(f"messages.{number}.cache_control")
            assert at(body, place) == message["cache_control"]
        for index, part in enumerate(parts if message["role"] != "assistant" else ()):
            block = at(body, made.place(f"messages.{number}.content.{index}"))
            assert (block if isinstance(block, str) else block["text"]) == part["text"]
            assert part.get("cache_control") == (block.get("cache_control") if isinstance(block, dict) else None)
    assert found == wanted


def test_results_are_messages_of_tools() -> None:
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
    inner = {"type": "text", "text": "1", "cache_control": {"type": "x"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [inner, {"type": "text", "text": "2"}]}
    plain = {"type": "tool_result", "tool_use_id": "a", "is_error": True, "cache_control": {"type": "y"}}
    body = {
        "messages": [
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, use]},
            {"role": "user", "content": [result, plain, {"type": "text", "text": "So?"}]},
        ]
    }
    made = BlockTurns(None, body["messages"])
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert made.messages == [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [inner, {"type": "text", "text": "2"}]},
        {"role": "tool", "tool_call_id": "a", "content": "", "is_error": True, "cache_control": {"type": "y"}},
        {"role": "user", "content": "So?"},
    ]
    assert at(body, made.place("messages.1.content.0.cache_control")) == inner["cache_control"]
    assert at(body, made.place("messages.2.cache_control")) == plain["cache_control"]
    assert made.place("tools.0.cache_control") == "tools.0.cache_control"
