"""Which field an answer calls wrong (``param``), with status and code, for many bad bodies:
whatever messages say.

And that no module of the server decides anything by what a message says.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import quire.server

from .conftest import Served

LONG = "x " * 9000
"""More tokens than the context has."""
HUGE = LONG * 50
"""More bytes than the tokens of the context can have."""
MESSAGES = [{"role": "user", "content": "x"}]
FUNCTION = {"type": "function", "function": {"name": "f"}}
UNSUPPORTED = "unsupported_parameter"
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "x"}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "completion in a session": ("/v1/completions", {"session_id": "ID"}),
    "chat in a session": ("/v1/chat/completions", {"messages": MESSAGES, "session_id": "ID"}),
    "session": ("/v1/sessions/ID/generate", {}),
    "session with a prompt": ("/v1/sessions/ID/generate", {"prompt": "x"}),
    "session with messages": ("/v1/sessions/ID/generate", {"messages": MESSAGES}),
    "sessions": ("/v1/sessions/generate", {"ids": ["ID"]}),
}

EVERYWHERE: list[dict[str, Any]] = [
    {"n": 0},
    {"n": -3},
    {"n": 2000},
    {"n": "two"},
    {"temperature": -1},
    {"temperature": float("nan")},
    {"temperature": "hot"},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_k": -2},
    {"min_p": 1.5},
    {"seed": 2**65},
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": 10**6},
    {"min_tokens": -1},
    {"min_tokens": 9, "max_tokens": 4},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": ["x"] * 300},
    {"stop": "x" * 20000},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [5, 99999]},
    {"presence_penalty": 3},
    {"frequency_penalty": -3},
    {"repetition_penalty": 0},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"5": 101}},
    {"logit_bias": {"5": 1, "05": 1}},
    {"logit_bias": {"99999": 1}},
    {"logit_bias": {"1111111111111111111111111111111111111111": 1}},
    {"logprobs": 21},
    {"logprobs": -1},
    {"prompt_logprobs": 21},
    {"prompt_logprobs": -1},
    {"ignore_eos": "yes"},
    {"include_stop_str_in_output": 3},
    {"skip_special_tokens": "no"},
    {"structured_outputs": {}},
    {"structured_outputs": {"json": "{"}},
    {"structured_outputs": {"json": 3}},
    {"structured_outputs": {"json": {"type": "prompt"}}},
    {"structured_outputs": {"json_object": "yes"}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"regex": ""}},
    {"structured_outputs": {"regex": 3}},
    {"structured_outputs": {"regex": "prompt("}},
    {"structured_outputs": {"regex": "[^\\x00-\\U0010ffff]"}},
    {"structured_outputs": {"grammar": "start: ("}},
    {"structured_outputs": {"grammar": "start: x[temperature=1]\nx[temperature=1]: /a/"}},
    {"structured_outputs": {"grammar": "x" * 1000001}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"choice": ["a", ""]}},
    {"structured_outputs": {"choice": ["a", "\ud800"]}},
    {"structured_outputs": {"choice": ["a"] * 10001}},
    {"structured_outputs": {"choice": "abc"}},
    {"structured_outputs": {"regex": "a", "json": {}}},
    {"structured_outputs": {"messages": "x"}},
    {"model": "another"},
    {"model": 3},
    {"cache_salt": 3},
    {"cache_salt": "\ud800"},
    {"stop": "\ud800"},
    {"stop": ["a", "\ud800"]},
    {"best_of": 2},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
    {"stream_options": {}},
]
"""Each is refused by the name of its first field."""
OTHERS: dict[str, list[tuple[Any, Any]]] = {
    "/v1/completions": [
        ({}, (400, None, "prompt")),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, (400, None, "prompt")),
        ({"prompt": {}}, (400, None, "prompt")),
        ({"prompt": 3}, (400, None, "prompt")),
        ({"prompt": [1.5]}, (400, None, "prompt.0")),
        ({"prompt": ["a", 1]}, (400, None, "prompt.1")),
        ({"prompt": ["a", ""]}, "prompt.1"),
        ({"prompt": [[1], [True]]}, (400, None, "prompt.1")),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": "x", "cache_salt": "\ud800"}, "cache_salt"),
        ({"prompt": [[1], [-1]]}, "prompt.1"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": ["a", "\ud800"]}, "prompt.1"),
        ({"prompt": [5] * 4096}, "prompt"),
        ({"prompt": [[5], [5] * 5000]}, "prompt.1"),
        ({"prompt": LONG}, "prompt"),
        ({"prompt": ["x", LONG]}, "prompt.1"),
        ({"prompt": ["x", "y"], "max_tokens": 10**6}, "max_tokens"),
        ({"prompt": ["x", "y"], "logit_bias": {"99999": 1}}, "logit_bias"),
        ({"prompt": ["a"] * 2000}, (400, None, "prompt")),
        ({"prompt": HUGE}, "prompt"),
        ({"prompt": "x", "echo": True, "session_id": "ID"}, (400, None, "echo")),
        ({"prompt": ["x", "y"], "session_id": "ID"}, (400, None, "prompt")),
        ({"prompt": [10**9], "session_id": "ID"}, "session_id"),
        ({"prompt": [10**30], "session_id": "ID"}, "session_id"),
        ({"prompt": [-1], "session_id": "ID"}, "session_id"),
        ({"prompt": "\ud800", "session_id": "ID"}, "session_id"),
        ({"prompt": LONG, "session_id": "ID"}, "prompt"),
        ({"prompt": [5] * 5000, "session_id": "ID"}, "prompt"),
        ({"prompt": HUGE, "session_id": "ID"}, "session_id"),
        ({"session_id": "session-unknown"}, (404, "not_found", "session_id")),
        ({"session_id": "EMPTY"}, "prompt"),
        ({"session_id": "BUSY"}, (409, "failed_precondition", "session_id")),
        ({"prompt": "x", "session_id": "BUSY"}, (409, "failed_precondition", "session_id")),
    ],
    "/v1/chat/completions": [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": ["x"]}, "messages.0"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\udc00"}]}, "messages"),
        ({"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ({"messages": [{"role": "user", "content": HUGE}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages"),
        ({"messages": MESSAGES, "top_logprobs": 1}, (400, None, "top_logprobs")),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": MESSAGES, "cache_salt": "\ud800"}, "cache_salt"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"messages": MESSAGES, "max_completion_tokens": 0, "max_tokens": 4}, "max_completion_tokens"),
        ({"messages": MESSAGES, "regex": "("}, "regex"),
        ({"messages": MESSAGES, "ebnf": "root ::= ("}, "ebnf"),
        ({"messages": MESSAGES, "guided_json": 3}, "guided_json"),
        ({"messages": MESSAGES, "guided_json": False}, "guided_json"),
        ({"messages": MESSAGES, "guided_choice": []}, "guided_choice"),
        ({"messages": MESSAGES, "guided_choice": "a"}, "guided_choice"),
        ({"messages": MESSAGES, "guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_regex"),
        ({"messages": MESSAGES, "guided_whitespace_pattern": " "}, (400, None, "guided_whitespace_pattern")),
        ({"messages": MESSAGES, "regex": "a", "guided_regex": "b"}, (400, None, "regex")),
        ({"messages": MESSAGES, "regex": "a", "structured_outputs": {"regex": "a"}}, (400, None, "structured_outputs")),
        ({"messages": MESSAGES, "regex": "a", "response_format": {"type": "json_object"}}, (400, None, "regex")),
        ({"messages": MESSAGES, "guided_decoding_backend": "xgrammar"}, (400, UNSUPPORTED, "guided_decoding_backend")),
        ({"messages": MESSAGES, "store": "yes"}, "store"),
        ({"messages": MESSAGES, "metadata": 3}, "metadata"),
        ({"messages": MESSAGES, "priority": "high"}, "priority"),
        ({"messages": MESSAGES, "enable_thinking": True}, (400, UNSUPPORTED, "enable_thinking")),
        ({"messages": MESSAGES, "reasoning": {"effort": "low"}}, (400, UNSUPPORTED, "reasoning.effort")),
        ({"messages": MESSAGES, "reasoning": {"enabled": True}}, (400, UNSUPPORTED, "reasoning.enabled")),
        ({"messages": MESSAGES, "reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
        ({"messages": MESSAGES, "reasoning_effort": "low"}, (400, UNSUPPORTED, "reasoning_effort")),
        ({"messages": MESSAGES, "documents": [{"text": "a"}]}, (400, UNSUPPORTED, "documents")),
        (
            {"messages": MESSAGES, "reasoning_effort": "low", "reasoning": {"effort": "high"}},
            (400, None, "reasoning.effort"),
        ),
        ({"messages": MESSAGES, "enable_thinking": True, "session_id": "ID"}, (400, UNSUPPORTED, "enable_thinking")),
        (
            {"messages": MESSAGES, "reasoning": {"effort": "low"}, "session_id": "ID"},
            (400, UNSUPPORTED, "reasoning.effort"),
        ),
        *(
            (
                {"messages": MESSAGES, "tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", **allowed}},
                (400, None, "tool_choice"),
            )
            for allowed in (
                {},
                {"allowed_tools": {"mode": "none", "tools": [FUNCTION]}},
                {"allowed_tools": {"mode": "auto", "tools": []}},
                {"allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}},
                {"allowed_tools": {"mode": "required", "tools": ["f"]}},
                {"mode": "auto", "tools": [FUNCTION]},
            )
        ),
        ({"messages": MESSAGES, "tools": [], "tool_choice": "required"}, (400, None, "tool_choice")),
        ({"messages": MESSAGES, "tools": [{"type": "x"}]}, "tools.0.type"),
        ({"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "no stop"}}]}, "tools"),
        ({"messages": MESSAGES, "tools": [FUNCTION, FUNCTION], "tool_choice": "required"}, "tools"),
        ({"messages": MESSAGES, "tools": [FUNCTION], "tool_choice": "x"}, (400, None, "tool_choice")),
        (
            {"messages": MESSAGES, "tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
        ),
        ({"messages": MESSAGES, "tool_choice": "required"}, (400, None, "tool_choice")),
        (
            {
                "messages": MESSAGES,
                "tools": [FUNCTION],
                "tool_choice": "required",
                "structured_outputs": {"regex": "a"},
            },
            (400, None, "structured_outputs"),
        ),
        ({"messages": MESSAGES, "tools": [FUNCTION], "tool_choice": "required", "max_tokens": 10**6}, "max_tokens"),
        (
            {
                "messages": MESSAGES,
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
            },
            "tools",
        ),
        (
            {
                "messages": MESSAGES,
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}}, (400, None, "chat_template_kwargs.messages")),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"a": {"b": 1}}, "documents": [{"temperature": 1}], "n": 0},
            "n",
        ),
        ({"messages": [], "session_id": "ID"}, "messages"),
        ({"messages": [{"role": "user"}], "session_id": "ID"}, "messages"),
        ({"messages": [{"role": "user", "content": HUGE}], "session_id": "ID"}, "messages"),
        ({"messages": [{"role": "user", "content": LONG}], "session_id": "ID"}, "messages"),
        ({"messages": [{"role": "user", "content": "\udc00"}], "session_id": "ID"}, "messages"),
        ({"messages": MESSAGES, "session_id": "session-unknown"}, (404, "not_found", "session_id")),
        ({"messages": MESSAGES, "session_id": "BUSY"}, (409, "failed_precondition", "session_id")),
        ({"messages": MESSAGES, "tools": [FUNCTION], "session_id": "ID"}, (400, None, "tools")),
    ],
    "/v1/sessions": [
        ({"tools": [FUNCTION]}, (400, None, "tools")),
        ({"chat_template_kwargs": {"a": 1}}, (400, None, "chat_template_kwargs")),
        ({"messages": MESSAGES, "chat_template_kwargs": {"tools": 1}}, (400, None, "chat_template_kwargs.tools")),
        ({"messages": MESSAGES, "tools": [{"type": "x"}]}, "tools.0.type"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [3] * 5000}, "prompt"),
        ({"prompt": LONG}, "prompt"),
        ({"prompt": HUGE}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"ttl": 0}, "ttl"),
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"labels": {"a": 5}}, "labels.a"),
        ({"labels": {"a=b": "c"}}, "labels"),
        ({"labels": {"a": "\n"}}, "labels"),
        ({"labels": {str(number): "" for number in range(17)}}, "labels"),
        ({"pin": 1}, "pin"),
        ({"window": 0}, "window"),
        ({"window": 4, "sink": 4}, "window"),
        ({"window": 4, "sink": -1}, "window"),
        ({"sink": 3}, "sink"),
        ({"window": 10**6}, "window"),
        ({"window": "x"}, "window"),
        ({"model": "another"}, (404, "model_not_found", "model")),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"messages": [{"role": "\ud800", "content": "a"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"content": "temperature"}]}, "messages"),
        ({"prompt": "a", "messages": MESSAGES}, (400, None, "messages")),
        ({"messages": [{"role": "user", "content": HUGE}]}, "messages"),
        ({"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ({"ttl": 1000000000.0, "pin": True}, (400, None, "ttl")),
    ],
    "/v1/sessions/ID/append": [
        ({}, (400, None, "text")),
        ({"text": "\ud800"}, "text"),
        ({"text": 5}, "text"),
        ({"text": LONG}, "text"),
        ({"text": HUGE}, "text"),
        ({"tokens": [-5]}, "tokens"),
        ({"tokens": [10**9]}, "tokens"),
        ({"tokens": [10**30]}, "tokens"),
        ({"tokens": [3] * 5000}, "tokens"),
    ],
    "/v1/sessions/BUSY/append": [
        ({"text": "x"}, (409, "failed_precondition", None)),
    ],
    "/v1/sessions/ID/score": [
        ({}, (400, None, "text")),
        ({"text": "\ud800"}, "text"),
        ({"text": LONG}, "text"),
        ({"text": HUGE}, "text"),
        ({"tokens": [-5]}, "tokens"),
        ({"tokens": [10**9]}, "tokens"),
        ({"tokens": [3] * 5000}, "tokens"),
    ],
    "/v1/sessions/EMPTY/score": [
        ({"text": "a"}, "text"),
    ],
    "/v1/sessions/EMPTY/generate": [
        ({}, None),
        ({"prompt": ""}, "prompt"),
    ],
    "/v1/sessions/BUSY/generate": [
        ({}, (409, "failed_precondition", None)),
    ],
    "/v1/sessions/ID/generate": [
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ({"messages": [{"role": "user", "content": HUGE}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\udc00"}]}, "messages"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": LONG}, "prompt"),
        ({"prompt": HUGE}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [3] * 5000}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, (400, None, "messages")),
    ],
    "/v1/sessions/ID/fork": [
        ({"at": 10**6}, "at"),
        ({"at": -1}, "at"),
        ({"n": 0}, "n"),
        ({"n": 5000}, (400, "session_limit", "n")),
        ({"name": ""}, "name"),
        ({"labels": {"": ""}}, "labels"),
        ({"ttl": 0}, "ttl"),
    ],
    "/v1/sessions/ID/rewind": [
        ({}, (400, None, "to")),
        ({"to": 1, "n": 1}, (400, None, "to")),
        ({"to": 10**6}, "to"),
        ({"to": -1}, "to"),
        ({"n": -1}, "n"),
        ({"n": 10**6}, "n"),
    ],
    "/v1/sessions/ID/edit": [
        ({"text": "x"}, "span"),
        ({"span": [0, 1]}, (400, None, "text")),
        ({"span": [0, 10**6], "text": "x"}, "span"),
        ({"span": [1, 0], "text": "x"}, "span"),
        ({"span": [0, 1, 2], "text": "x"}, "span"),
        ({"span": "nowhere in it", "text": "x"}, "span"),
        ({"span": 3, "text": "x"}, "span"),
        ({"span": [0, 1], "tokens": [10**6]}, "tokens"),
        ({"span": [0, 1], "tokens": [-1]}, "tokens"),
        ({"span": [0, 1], "text": "x", "mode": "roughly"}, "mode"),
        ({"span": [0, 1], "text": "x", "blend": True}, "blend"),
        ({"span": [0, 1], "text": "x", "mode": "blend", "blend": 1}, (400, None, "blend")),
        ({"span": [0, 1], "text": "x", "mode": "blend", "blend": {"least": 0}}, "blend.least"),
    ],
    "/v1/sessions/ID/adapter": [
        ({}, "name"),
        ({"name": "another"}, (404, "model_not_found", "name")),
    ],
    "/v1/sessions/session-unknown/append": [
        ({"text": "x"}, (404, "not_found", None)),
    ],
    "GET /v1/sessions/ID?rewind_to=99999": [
        (None, "rewind_to"),
    ],
    "GET /v1/sessions/ID?rewind_to=-1": [
        (None, "rewind_to"),
    ],
    "GET /v1/sessions?tokens=true": [
        (None, (400, None, "tokens")),
    ],
    "GET /v1/sessions?nme=review": [
        (None, "nme"),
    ],
    "GET /v1/sessions/ID?limit=1": [
        (None, "limit"),
    ],
    "DELETE /v1/sessions/session-unknown?force=1": [
        (None, "force"),
    ],
    "/v1/sessions?ttl=9": [
        ({}, "ttl"),
    ],
    "/v1/sessions/state?ttl=9&foo=1": [
        (b"", "foo"),
    ],
    "GET /v1/branches?name=main": [
        (None, "name"),
    ],
    "GET /v1/branches/main?a=main": [
        (None, "a"),
    ],
    "/v1/sessions/state?name=": [
        (b"", "name"),
    ],
    "/v1/sessions/state?label=task": [
        (b"", (400, None, "label")),
    ],
    "/v1/sessions/state?label==1": [
        (b"", "labels"),
    ],
    "/v1/sessions/state?label=a=%0A": [
        (b"", "labels"),
    ],
    "/v1/sessions/state": [
        (b"nothing", (400, "data_loss", None)),
    ],
    "/v1/sessions/generate": [
        ({"ids": []}, "ids"),
        ({"ids": ["ID", "ID"]}, (400, None, "ids")),
        ({"ids": ["ID", "session-unknown"]}, (404, "not_found", "ids.1")),
        ({"ids": ["ID", "EMPTY"]}, "ids.1"),
        ({"ids": ["ID", "BUSY"]}, (409, "failed_precondition", "ids.1")),
        ({"ids": ["ID"], "each": []}, (400, None, "each")),
        ({"ids": ["ID"], "each": [{"temperature": -1}]}, "each.0.temperature"),
        ({"ids": ["ID"], "each": [{"min_tokens": 9, "max_tokens": 3}]}, "each.0.min_tokens"),
        ({"ids": ["ID"], "each": [{"max_tokens": 10**6}]}, "max_tokens"),
        ({"ids": ["ID"], "each": [{"n": 2}]}, "n"),
        ({"ids": ["ID"], "each": [{"logprobs": 21}]}, (400, None, "each.0.logprobs")),
        ({"ids": ["ID"], "each": [{"stop": 3}]}, "each.0.stop"),
        ({"ids": ["ID"], "each": [{"stop": ""}]}, "each.0.stop"),
        ({"ids": ["ID"], "each": [{"stop_token_ids": [99999]}]}, "stop_token_ids"),
        ({"ids": ["ID"], "each": [{"structured_outputs": {"regex": "("}}]}, "structured_outputs"),
        ({"ids": ["ID"], "each": [{"structured_outputs": {"regex": ""}}]}, "each.0.structured_outputs"),
        ({"ids": ["ID"], "each": [{"max_completion_tokens": 0}]}, "each.0.max_completion_tokens"),
        ({"ids": ["ID"], "each": [{"tools": [1]}]}, (400, "unsupported_parameter", "each.0.tools")),
        ({"ids": ["ID"], "each": [{"logit_bias": {"x": 1}}]}, "each.0.logit_bias"),
        ({"ids": ["ID"], "prompt": "a"}, (400, "unsupported_parameter", "prompt")),
    ],
    "GET /v1/state/text": [
        (None, (400, "invalid_argument", "branch")),
    ],
    "GET /v1/state/text?branch=session:unknown": [
        (None, (404, "not_found", "branch")),
    ],
    "GET /v1/state/text?branch=commit:0123": [
        (None, (404, "not_found", "branch")),
    ],
    "GET /v1/state/text?branch=session:ID&start=-1": [
        (None, "start"),
    ],
    "GET /v1/state/text?branch=session:ID&start=99999": [
        (None, "start"),
    ],
    "GET /v1/state/text?branch=session:ID&start=2&stop=1": [
        (None, "stop"),
    ],
    "GET /v1/state/text?branch=session:ID&stop=99999": [
        (None, "stop"),
    ],
    "GET /v1/state/text?branch=session:ID&start=x": [
        (None, "start"),
    ],
    "GET /v1/state/pages?pool=9": [
        (None, (404, "not_found", "pool")),
    ],
    "GET /v1/state/pages?pool=-1": [
        (None, (404, "not_found", "pool")),
    ],
    "GET /v1/state/pages?pool=all": [
        (None, "pool"),
    ],
    "GET /v1/state/pages/0/999999999999": [
        (None, (404, "not_found", "page")),
    ],
    "GET /v1/state/pages/7/0": [
        (None, (404, "not_found", "pool")),
    ],
    "GET /v1/state/pages/0/first": [
        (None, "page"),
    ],
    "/tokenize": [
        ({"prompt": "x", "messages": MESSAGES}, (400, None, "prompt")),
        ({"prompt": HUGE}, None),
        ({"prompt": "\ud800"}, None),
        ({"messages": []}, None),
        ({"messages": [{"role": "user"}]}, None),
        ({"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}}, (400, None, "chat_template_kwargs.messages")),
    ],
    "/detokenize": [
        ({"tokens": [-1]}, "tokens.0"),
        ({"tokens": [99999]}, "tokens.0"),
        ({"tokens": [10**30]}, "tokens.0"),
    ],
}
"""``param`` of an answer with 400 and ``code_of`` its body, or status, code and ``param``."""


def code_of(body: Any) -> str:
    """What is too long for the context has OpenAI's code for it."""
    too_long = len(str(body)) > 5000 or "tokens': 1000000" in str(body)
    return "context_length_exceeded" if too_long else "invalid_argument"


Names = dict[str, str]


def answered(served: Served, names: Names, path: str, body: Any) -> tuple[int, str | None, str | None]:
    """Status, code and ``param`` of an answer; ``names`` are those of sessions."""
    sent = body if isinstance(body, bytes) else json.dumps(body)
    kind = "octet-stream" if path.startswith("/v1/sessions/state") else "json"
    for name, session in names.items():
        path = path.replace(name, session)
        sent = sent if isinstance(sent, bytes) else sent.replace(f'"{name}"', f'"{session}"')
    method, _, path = path.rpartition(" ")
    answer = served.client.request(
        method or "POST",
        path,
        content=sent,
        headers={"Content-Type": f"application/{kind}"} if body is not None else {},
    )
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


@pytest.fixture(scope="module")
def names(chat_served: Served) -> Names:
    """A session with two tokens, and one without."""
    bodies: dict[str, dict[str, Any]] = {"ID": {"prompt": "def f"}, "EMPTY": {}}
    return {name: chat_served.client.post("/v1/sessions", json=body).json()["id"] for name, body in bodies.items()}


@pytest.mark.turns(6)
@pytest.mark.parametrize("place", PLACES)
def test_parameters_everywhere(chat_served: Served, names: Names, place: str) -> None:
    path, base = PLACES[place]
    found = [answered(chat_served, names, path, {**base, **body}) for body in EVERYWHERE]
    assert [param for _, _, param in found] == [next(iter(body)) for body in EVERYWHERE]
    assert {status for status, _, _ in found} == {400, 404}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"prompt": "x", "max_tokens": "a"}, "max_tokens: Input should be a valid integer, got 'a'"),
        ({"prompt": "x", "max_tokens": 5.0}, "max_tokens: Input should be a valid integer, got 5.0"),
        ({"prompt": True}, "prompt must be text, token ids, or a list of either, got true"),
        ({"prompt": "x", "n": None, "temperature": True}, "temperature: Input should be a valid number, got true"),
        ({"prompt": "x", "suffix_of": 3, "stream": "x" * 99}, "got 'xxxxx"),
        ([], "the body must be a JSON object, sent as Content-Type: application/json"),
    ],
)
def test_what_was_given_is_told(chat_served: Served, body: Any, told: str) -> None:
    message = chat_served.client.post("/v1/completions", json=body).json()["error"]["message"]
    assert told in message
    assert len(message) < 200


def test_each_member_of_a_union_is_told(chat_served: Served, names: Names) -> None:
    answer = chat_served.client.post(f"/v1/sessions/{names['ID']}/edit", json={"span": [0, None]})
    found = answer.json()["error"]
    told = "span: Input should be a valid string, got a list; or span.1: Input should be a valid integer, got null"
    assert (answer.status_code, found["param"], found["message"]) == (400, "span", told)


def test_a_wrong_method_is_told_the_right_ones(chat_served: Served) -> None:
    answer = chat_served.client.get("/v1/completions")
    assert answer.json()["error"]["message"] == "/v1/completions does not take GET; it takes POST"


def test_an_adapter_that_is_not_loaded_is_no_model(chat_served: Served, names: Names) -> None:
    answer = chat_served.client.post(f"/v1/sessions/{names['ID']}/adapter", json={"name": "zz"})
    message = "there is no adapter 'zz'; loaded: none; null is the base model"
    assert answer.json()["error"]["message"] == message


def test_a_query_that_is_not_known_is_told_what_is(chat_served: Served) -> None:
    answer = chat_served.client.get("/v1/sessions?label=a&nme=review")
    message = "there is no query parameter 'nme' here; accepted: limit, after, name, label, tokens"
    assert answer.json()["error"]["message"] == message


def test_other_fields(chat_served: Served, names: Names) -> None:
    client = chat_served.client
    busy = client.post("/v1/sessions", json={"prompt": "def f"}).json()["id"]
    wrong = []
    with client.stream(
        "POST", f"/v1/sessions/{busy}/generate", json={"max_tokens": 2000, "ignore_eos": True, "stream": True}
    ):
        for path, cases in OTHERS.items():
            for body, expected in cases:
                found = answered(chat_served, {**names, "BUSY": busy}, path, body)
                if found != (expected if isinstance(expected, tuple) else (400, code_of(body), expected)):
                    wrong.append((path, str(body)[:80], found, expected))
    assert not wrong, "\n".join(map(str, wrong))


# -- and no module of the server looks into messages -----------------------------------------------


def readings(text: str) -> list[int]:
    """The lines in which a module may decide something by the message of an error.

    A message may become that of an answer, be part of another one, and have paths replaced in it.
    """
    tree = list(ast.walk(ast.parse(text)))
    errors = {"error", *(node.name for node in tree if isinstance(node, ast.ExceptHandler))}
    for node in tree:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="api_error"))):
                errors.add(name)

    def is_prose(node: ast.AST) -> bool:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr="message" | "args"):
                return name in errors
            case ast.Call(func=ast.Name(id="str" | "repr"), args=[ast.Name(id=name)]):
                return name in errors
        return False

    def is_read(node: ast.AST) -> bool:
        match node:
            case ast.Compare(left=left, comparators=others):
                return any(map(is_prose, (left, *others)))
            case ast.Call(func=ast.Name(id="ApiError")) | ast.Call(func=ast.Attribute(attr="replace")):
                return False
            case ast.Call(func=ast.Attribute(value=value), args=arguments):
                return any(map(is_prose, (value, *arguments)))
            case ast.Call(args=arguments):
                return any(map(is_prose, arguments))
            case ast.Subscript(value=value):
                return is_prose(value) and not isinstance(node.slice, ast.Slice)
        return False

    return [node.lineno for node in tree if is_read(node)]


@pytest.mark.parametrize("path", sorted(Path(quire.server.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_nothing_is_decided_by_messages(path: Path) -> None:
    assert readings(path.read_text()) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("FIELD.search(str(error))", 1),
        ("named_field(str(error), names)", 1),
        ("'prompt' in error.message", 1),
        ("error.message.partition(':')", 1),
        ("str(error).startswith('prompt')", 1),
        ("error.args[0]", 1),
        ("str(error) == 'busy'", 1),
        ("ApiError(400, str(error), param=error.field)", 0),
        ("f'ids.0: {error.message}'", 0),
        ("str(error).replace(path, name)", 0),
    ],
)
def test_what_is_found_in_modules(line: str, found: int) -> None:
    assert len(readings(f"try:\n    go()\nexcept QuireError as error:\n    {line}\n")) == found
