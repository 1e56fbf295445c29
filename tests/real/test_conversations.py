"""Chats, tools, structured output and agent loops with a real template."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from quire import LLM, SamplingParams, StructuredOutputs

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file of the project",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]
CALL = {"type": "function", "id": "call-1", "function": {"name": "read_file", "arguments": {"path": "a.py"}}}
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a careful programmer."},
    {"role": "user", "content": "What does a.py do?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "read_file", "tool_call_id": "call-1", "content": "def add(a, b):\n    return a + b\n"},
    {"role": "assistant", "content": "It adds two numbers."},
    {"role": "user", "content": "Add a docstring.   \n\n"},
]
GREEDY = SamplingParams(max_tokens=24, temperature=0)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("turns", [2, 4, 6])
def test_a_chat_is_rendered_as_by_transformers(
    llm: LLM, instructed: transformers.PreTrainedTokenizerBase, turns: int, tools: list[dict[str, Any]] | None
) -> None:
    messages: Any = TURNS[:turns]
    output = llm.chat(messages, SamplingParams(max_tokens=1), tools=tools)[0]
    wanted: Any = instructed.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert output.prompt_token_ids == wanted


def test_a_schema_is_kept(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=64, temperature=0.8, seed=5, structured_outputs=StructuredOutputs(json=schema))
    for output in llm.generate(["Alice is 42 years old. As JSON: "] * 4, params):
        found = json.loads(output.outputs[0].text)
        assert set(found) == {"name", "age"}
        assert isinstance(found["name"], str)
        assert 0 <= found["age"] <= 150


def test_an_agent_loop_in_a_session_is_a_chat_of_all_turns(
    llm: LLM, instructed: transformers.PreTrainedTokenizerBase
) -> None:
    """Each turn runs new tokens only, and says what a stateless chat would say."""
    session, turns = llm.session(cache_salt="loop"), [TURNS[0]]
    new: list[dict[str, Any]] = [TURNS[0]]
    for step, text in enumerate(("Write hello world in Python.", "Now in C.", "Which is shorter?")):
        turns.append({"role": "user", "content": text})
        new.append(turns[-1])
        before = len(session)
        output = session.chat(new, GREEDY)
        whole = llm.chat(turns, GREEDY, cache_salt="whole")[0]
        assert output.prompt_token_ids == whole.prompt_token_ids
        assert output.outputs[0].token_ids == whole.outputs[0].token_ids
        # The rendered text may be cut into other tokens at the answer's end.
        assert step == 0 or output.num_cached_tokens >= before - 2
        turns.append({"role": "assistant", "content": output.outputs[0].text})
        new = []
    session.close()
