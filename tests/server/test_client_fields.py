"""What clients of OpenAI's protocol send and read: overflow, histories, fields of other servers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import AsyncLLM
from quire.server.http.errors import ApiError
from quire.server.openai.conversations import request_variables, thinking_variables
from quire.server.openai.protocol import ChatRequest

from .conftest import OPTIONS, Served, serving, wait_for
from .test_chat import MESSAGES, ask
from .test_completions import events


@pytest.mark.parametrize(
    ("path", "body", "param", "problem"),
    [
        ("/v1/completions", {"prompt": [5] * 5000}, "prompt", "your prompt has 5000 tokens"),
        ("/v1/completions", {"prompt": [5], "max_tokens": 10**6}, "max_tokens", "requested 1000001 tokens"),
        ("/v1/completions", {"prompt": "x " * 10**6}, "prompt", "The text has at least"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 9000}]}, "messages", "your prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 10**6}]}, "messages", "The messages"),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "max_completion_tokens": 10**6},
            "max_completion_tokens",
            "in the completion",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_overflow(chat_served: Served, path: str, body: dict[str, Any], param: str, problem: str, stream: bool) -> None:
    """As programs recognise it: by the code, or by the beginning of the message."""
    answer = chat_served.client.post(path, json={**body, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(
        f"This model's maximum context length is {chat_served.llm.engine.max_model_len} tokens. "
    )
    assert problem in error["message"]
    # What OpenAI's client raises has the message only, and LangChain looks for the code there.
    assert error["message"].endswith(" (context_length_exceeded)")


def test_overflow_of_the_pool() -> None:
    llm = AsyncLLM("tiny-python", **{**OPTIONS, "kv_cache_memory": "512KiB"})
    with serving(llm) as small:
        longest = small.client.get("/v1/models").json()["data"][0]["max_model_len"]
        for body in ({"prompt": [5] * (longest + 1), "max_tokens": 1}, {"prompt": [5], "max_tokens": longest + 1}):
            answer = small.client.post("/v1/completions", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
            assert error["message"].startswith(f"This model's maximum context length is {longest} tokens here")
    asyncio.run(llm.close())


@pytest.fixture(scope="module")
def walking(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """What talks to a model whose template walks over arguments, and knows no content of None."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% for call in m.tool_calls or [] %}{{ call.function.name }}"
        "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}{% endfor %}"
        "{{ (m.content or '') + (m.reasoning_content or '') }}<|end|>{% endfor %}<|assistant|>"
    )
    llm = AsyncLLM(chat_folder, **OPTIONS, chat_template=template)
    with serving(llm) as found:
        yield found.client
    asyncio.run(llm.close())


HISTORIES: list[list[dict[str, Any]]] = [
    [{"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]}]
    for function in (
        {"name": "weather", "arguments": '{"city": "Ro'},
        {"name": "weather", "arguments": ""},
        {"name": "weather", "arguments": "[1]"},
    )
] + [
    [{"role": "assistant", "content": None}],
    [{"role": "assistant", "content": None, "refusal": "No.", "tool_calls": []}],
    [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
    [{"role": "assistant", "content": None, "reasoning_content": "Hm.", "function_call": None, "audio": None}],
    [{"role": "developer", "content": "Be brief."}],
]


@pytest.mark.turns(2)
@pytest.mark.parametrize("history", HISTORIES)
def test_a_conversation_goes_on(chat_client: httpx.Client, walking: httpx.Client, history: list[Any]) -> None:
    messages = [*MESSAGES, *history, {"role": "tool", "tool_call_id": "a", "content": None}, *MESSAGES]
    for client in (chat_client, walking):
        for more in ({}, {"tools": []}, {"tools": [], "tool_choice": "auto"}, {"tools": [], "tool_choice": "none"}):
            assert ask(client, messages, max_tokens=1, **more)["choices"][0]["message"]["role"] == "assistant"


FORMS: list[dict[str, Any]] = [
    {"regex": "[ab]{4}"},
    {"ebnf": 'root ::= "a" "b"'},
    {"guided_regex": "[ab]{4}"},
    {"guided_grammar": 'start: "a" "b"'},
    {"guided_choice": ["yes", "no"]},
    {"grammar": 'root ::= "a" "b"'},
    {"json_schema": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, "grammar": ""},
    {"guided_json": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}},
    {
        "guided_json": '{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}',
        "guided_whitespace_pattern": " ",
    },
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_forms_by_the_names_of_other_servers(chat_client: httpx.Client, path: str, form: dict[str, Any]) -> None:
    body = {"messages": MESSAGES} if "chat" in path else {"prompt": "x"}
    answer = chat_client.post(path, json={**body, **form, "guided_json_object": False, "max_tokens": 20, "seed": 1})
    (choice,) = answer.json()["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    if "guided_json" in form or "json_schema" in form:
        space = form.get("guided_whitespace_pattern", "")
        assert json.loads(text) == {"a": 1}
        assert text.replace(space, "") == '{"a":1}'
    else:
        assert re.fullmatch(r"[ab]{4}|ab|yes|no", text)
    assert choice["finish_reason"] == "stop"


ONE = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("format", "found"),
    [
        ({"type": "json_object", "schema": ONE}, None),
        ({"type": "json_schema", "schema": ONE}, None),
        ({"type": "json_object", "schema": None, "json_schema": None}, "{"),
        ({"type": "text", "schema": ONE}, "response_format.schema"),
        ({"type": "json_schema", "schema": ONE, "json_schema": {"name": "x", "schema": ONE}}, "response_format.schema"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_object", "schema": {"type": "x"}}, "response_format"),
        ({"type": "json_object", "schema": "x"}, "response_format.schema"),
    ],
    ids=str,
)
def test_schemas_of_a_response_format(chat_client: httpx.Client, format: dict[str, Any], found: str | None) -> None:
    body = {"messages": MESSAGES, "response_format": format, "max_tokens": 20, "seed": 1}
    answer = chat_client.post("/v1/chat/completions", json=body)
    if answer.status_code == 200:
        text = answer.json()["choices"][0]["message"]["content"]
        assert text.startswith(found) if found else text == '{"a":1}'
    else:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, found)


@pytest.mark.parametrize(
    ("other", "own"),
    [
        ({"repeat_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"repeat_penalty": 1.7, "repeat_last_n": -1}, {"repetition_penalty": 1.7}),
        ({"repeat_penalty": 1, "repeat_last_n": 64}, {}),
        ({"n_predict": 3}, {"max_tokens": 3}),
        ({"num_predict": 3, "max_tokens": 3}, {"max_tokens": 3}),
        ({"max_new_tokens": 3, "min_new_tokens": 2}, {"max_tokens": 3, "min_tokens": 2}),
        ({"sampling_seed": 9, "temperature": 1.5}, {"seed": 9, "temperature": 1.5}),
        ({"mirostat": 0.0, "mirostat_tau": 5, "top_n_sigma": -1, "xtc_threshold": 0.1, "cache_prompt": True}, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_parameters_by_the_names_of_other_servers(
    chat_client: httpx.Client, path: str, other: dict[str, Any], own: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"messages": MESSAGES} if "chat" in path else {"prompt": "x x x x"}
    body |= {"temperature": 0, "ignore_eos": True}
    # Some of them say how long the text is.
    body |= {} if own.keys() & {"max_tokens"} else {"max_tokens": 12}
    found = [chat_client.post(path, json={**body, **more}).json() for more in (other, own)]
    assert found[0]["choices"] == found[1]["choices"]
    assert found[0]["usage"]["completion_tokens"] == own.get("max_tokens", 12)
    if own.keys() & {"repetition_penalty", "seed"}:
        assert found[0]["choices"] != chat_client.post(path, json=body).json()["choices"]


def test_no_limit_by_the_names_of_other_servers(chat_client: httpx.Client) -> None:
    body = {"prompt": [5] * 4000, "temperature": 0, "ignore_eos": True}
    longest = chat_client.get("/v1/models").json()["data"][0]["max_model_len"]
    for more in ({"n_predict": -1}, {"num_predict": -2}):
        assert chat_client.post("/v1/completions", json={**body, **more}).json()["usage"]["total_tokens"] == longest


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
        ({"presence_penalty": 1, "repetition_penalty_range": 1024}, "repetition_penalty_range"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
        ({"n_predict": 5, "max_tokens": 6}, "n_predict"),
        ({"n_predict": 0}, "n_predict"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"repeat_penalty": "1.1"}, "repeat_penalty"),
        ({"repeat_penalty": True}, "repeat_penalty"),
        ({"mirostat": 2}, "mirostat"),
        ({"mirostat": False}, "mirostat"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"samplers": ["top_k", "temperature"]}, "samplers"),
        ({"options": {"num_ctx": 4096}}, "options"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"prompt_cache_options": {"mode": "x"}}, "prompt_cache_options"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "So", "prefix": True}]}, "messages"),
    ],
    ids=str,
)
def test_what_has_no_meaning_here_is_refused_by_name(
    chat_client: httpx.Client, body: dict[str, Any], param: str
) -> None:
    answer = chat_client.post("/v1/chat/completions", json={"messages": MESSAGES, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert answer.json()["error"]["message"].startswith(param)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses", {"input": "x"}), ("/v1/messages", {"messages": MESSAGES})],
)
def test_other_chats_refuse_them_too(chat_client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    body |= {"max_output_tokens": 1} if path == "/v1/responses" else {"max_tokens": 1}
    refused: list[dict[str, Any]] = [
        *({"mirostat": 2}, {"repeat_penalty": 1.1}, {"dry_multiplier": 0.8}, {"n_predict": 5}, {"num_predict": 5}),
        *({"regex": "a"}, {"guided_regex": "a"}, {"grammar": 'root ::= "a"'}, {"json_schema": {}}, {"ebnf": "a"}),
        *({"truncate_prompt_tokens": 3}, {"return_token_ids": True}, {"return_tokens_as_token_ids": True}),
        *({"best_of": 2}, {"n": 2}, {"echo": True}, {"suffix": "a"}, {"prompt": "a"}, {"enable_thinking": False}),
        *({"continue_final_message": True}, {"add_generation_prompt": False}, {"add_special_tokens": True}),
        {"repeat_last_n": 64, "repetition_penalty": 1.1},
    ]
    for more in refused:
        answer = chat_client.post(path, json={**body, **more})
        assert answer.status_code == 400, more
        assert f"{next(iter(more))} is not supported" in answer.json()["error"]["message"]
    harmless: dict[str, Any] = {"mirostat": 0, "dry_multiplier": 0.0, "best_of": 1, "n": 1, "repeat_last_n": 64}
    harmless |= {"grammar": "", "guided_json_object": False, "n_predict": -1, "echo": False, "regex": None}
    assert chat_client.post(path, json={**body, **harmless}).status_code == 200


def test_ids_of_tokens(chat_client: httpx.Client, chat_served: Served) -> None:
    """vLLM's ``return_token_ids``: of the prompt once, of the text as it comes."""
    tokenizer = chat_served.llm.tokenizer
    assert tokenizer is not None
    given: dict[str, Any] = {"max_tokens": 12, "temperature": 1.8, "seed": 3, "n": 2, "return_token_ids": True}
    prompts = ["x = 1", "def f():"]
    answer = chat_client.post("/v1/completions", json={"prompt": prompts, **given}).json()
    found = [choice["token_ids"] for choice in answer["choices"]]
    for number, choice in enumerate(answer["choices"]):
        assert choice["prompt_token_ids"] == tokenizer.encode(prompts[number // 2])
        assert tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == choice["text"]
    assert sum(map(len, found)) == answer["usage"]["completion_tokens"]
    streamed: list[list[int]] = [[], [], [], []]
    of_prompts: list[int] = []
    for chunk in events(chat_client, "/v1/completions", prompt=prompts, **given):
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["token_ids"]
        of_prompts += [choice["index"]] * ("prompt_token_ids" in choice)
    assert (streamed, sorted(of_prompts)) == (found, [0, 1, 2, 3])

    chat = ask(chat_client, **given)
    found = [choice["token_ids"] for choice in chat["choices"]]
    assert sum(map(len, found)) == chat["usage"]["completion_tokens"]
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    # A stop string holds text back, and no ids.
    first, *rest = events(chat_client, "/v1/chat/completions", messages=MESSAGES, stop="never said", **given)
    assert first["prompt_token_ids"] == chat["prompt_token_ids"]
    streamed = [[], []]
    for chunk in rest:
        assert "prompt_token_ids" not in chunk
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0].get("token_ids", [])
    assert streamed == found
    assert "token_ids" not in ask(chat_client, max_tokens=1)["choices"][0]


def test_tokens_are_named_by_their_ids(chat_client: httpx.Client) -> None:
    """vLLM's ``return_tokens_as_token_ids``."""
    given: dict[str, Any] = {"max_tokens": 4, "seed": 3, "return_token_ids": True, "return_tokens_as_token_ids": True}
    body = {"prompt": "x = 1", "logprobs": 2, **given}
    (choice,) = chat_client.post("/v1/completions", json=body).json()["choices"]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert all(name in top for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True))
    assert choice["logprobs"]["text_offset"][1] > 0
    (choice,) = ask(chat_client, logprobs=True, top_logprobs=1, **given)["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(entry["top_logprobs"][0]["token"].startswith("token_id:") and entry["bytes"] for entry in content)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x = 1"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/completion", {"prompt": "x = 1"}),
    ],
)
def test_tokens_and_words_that_are_excluded(chat_client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """vLLM's ``allowed_token_ids`` and ``bad_words``."""

    def text_of(**more: Any) -> str:
        answer = chat_client.post(path, json={**body, "max_tokens": 8, "seed": 1, **more})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        choice = found.get("choices", [{}])[0]
        return str(found.get("content", choice.get("text", choice.get("message", {}).get("content"))))

    digits = chat_client.post("/tokenize", json={"prompt": "1", "add_special_tokens": False}).json()["tokens"]
    assert text_of(allowed_token_ids=digits) == "1" * 8
    only = {str(digits[0]): 100.0, str(digits[0] + 1): 50.0}
    if path != "/completion":
        assert "1" not in text_of(logit_bias=only, bad_words=["1"])
    for field, wrong in (("allowed_token_ids", []), ("allowed_token_ids", [10**6]), ("bad_words", [""])):
        answer = chat_client.post(path, json={**body, field: wrong})
        assert (answer.status_code, answer.json()["error"]["param"].split(".")[0]) == (400, field), answer.text


def test_completions_and_chats_refuse_each_others_fields(chat_client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    others: dict[str, list[dict[str, Any]]] = {
        "/v1/completions": [
            *({"messages": MESSAGES}, {"tools": [tool]}, {"tool_choice": "required"}, {"top_logprobs": 2}),
            *({"documents": [{"a": "b"}]}, {"chat_template_kwargs": {"a": 1}}),
        ],
        "/v1/chat/completions": [{"prompt": "x"}, {"echo": True}, {"suffix": "x"}],
    }
    harmless: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x", "tools": [], "tool_choice": "auto", "top_logprobs": 0, "messages": None},
        "/v1/chat/completions": {"messages": MESSAGES, "prompt": "", "echo": False, "suffix": ""},
    }
    for path, body in harmless.items():
        assert chat_client.post(path, json={**body, "max_tokens": 1}).status_code == 200
        for more in others[path]:
            answer = chat_client.post(path, json={**body, **more, "max_tokens": 1})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(more)))


def test_deprecated_calls_in_a_history(chat_client: httpx.Client, walking: httpx.Client) -> None:
    """They are in the prompt as the newer ones are."""
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    old = [
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "12"},
    ]
    new = [
        {"role": "assistant", "tool_calls": [{"id": "call00001", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "12"},
    ]
    texts = [
        walking.post("/tokenize", json={"messages": [*MESSAGES, *turn]}).json()["tokens"]
        for turn in (old, new, old[1:])
    ]
    assert texts[0] == texts[1] != texts[2]
    for bad in ("weather", {}, {"name": 3}, {"name": "f", "arguments": 3}):
        answer = chat_client.post(
            "/v1/chat/completions", json={"messages": [*MESSAGES, {"role": "assistant", "function_call": bad}]}
        )
        assert answer.status_code == 400
        assert "messages.1.function_call" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_fields_without_effect(chat_client: httpx.Client, path: str) -> None:
    body: dict[str, Any] = {"messages": MESSAGES} if "chat" in path else {"prompt": "x"}
    body |= {"temperature": 0, "max_tokens": 4}
    more = {"store": True, "metadata": {"a": "b"}, "user": "u", "service_tier": "flex", "verbosity": "low"}
    more |= {"safety_identifier": "s", "prompt_cache_key": "k", "priority": 3}
    plain, other = (chat_client.post(path, json=one).json()["choices"] for one in (body, {**body, **more}))
    assert plain == other


def test_the_newer_name_of_max_tokens_counts(chat_client: httpx.Client) -> None:
    for first, second in ((2, 5), (5, 2), (5, 10**6)):
        found = {"max_tokens": first, "max_completion_tokens": min(second, 9), "ignore_eos": True}
        assert ask(chat_client, **found)["usage"]["completion_tokens"] == min(second, 9)
    assert ask(chat_client, max_tokens=10**9, max_completion_tokens=1)["usage"]["completion_tokens"] == 1


SWITCHED = (
    "{% if enable_thinking is defined and not enable_thinking %}off{% endif %}{{ messages }}{# <think></think> #}"
)
EFFORTS = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}{{ reasoning_effort }}"
)


@pytest.mark.parametrize(
    ("template", "fields", "found"),
    [
        (SWITCHED, {}, {}),
        (SWITCHED, {"enable_thinking": False}, {"enable_thinking": False}),
        (SWITCHED, {"enable_thinking": True}, {"enable_thinking": True}),
        (SWITCHED, {"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        (SWITCHED, {"reasoning_effort": "none"}, {"enable_thinking": False}),
        (SWITCHED, {"reasoning_effort": "low"}, "reasoning_effort"),
        (SWITCHED, {"reasoning_effort": "none", "enable_thinking": True}, "reasoning_effort"),
        (SWITCHED, {"enable_thinking": True, "reasoning": {"enabled": False}}, "reasoning.enabled"),
        ("{{ thinking }}", {"enable_thinking": True}, {"thinking": True}),
        (EFFORTS, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (EFFORTS, {"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
        (EFFORTS, {"enable_thinking": True}, "enable_thinking"),
        ("{{ messages }}", {"enable_thinking": False, "reasoning": {"effort": "none"}}, {}),
        ("{{ messages }}{# <think></think> #}", {"enable_thinking": False}, "enable_thinking"),
        ("{{ messages }}{# <think></think> #}", {"enable_thinking": True}, {}),
    ],
)
def test_reasoning_reaches_the_template_or_is_refused(template: str, fields: dict[str, Any], found: Any) -> None:
    body = ChatRequest.model_validate({"messages": [], **fields})
    if isinstance(found, str):
        with pytest.raises(ApiError) as caught:
            thinking_variables(body, template)
        assert (caught.value.status, caught.value.param) == (400, found)
    else:
        assert thinking_variables(body, template) == found


def test_documents_reach_a_template_that_reads_them() -> None:
    documents = [{"text": "a"}]
    body = ChatRequest.model_validate({"messages": [], "documents": documents})
    assert request_variables(body, "{{ messages }}{{ documents }}") == {"documents": documents}
    with pytest.raises(ApiError, match="reads no documents"):
        request_variables(body, "{{ messages }}")
    none = ChatRequest.model_validate({"messages": [], "documents": []})
    assert request_variables(none, "{{ messages }}") == {"documents": []}


def test_allow_names_all_methods(chat_client: httpx.Client) -> None:
    for path, allowed in (
        ("/v1/sessions", "GET, HEAD, POST"),
        ("/v1/sessions/x", "DELETE, GET, HEAD"),
        ("/metrics", "GET, HEAD"),
        ("/v1/chat/completions", "POST"),
        # Not what an id in their place could be asked by.
        ("/v1/sessions/generate", "POST"),
        ("/v1/sessions/state", "POST"),
        ("/v1/branches/diff", "DELETE, GET, HEAD"),
    ):
        answer = chat_client.put(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


def test_what_answers_get_answers_head(chat_served: Served) -> None:
    """Load balancers, ollama's clients and proxies ask so."""
    client = chat_served.client
    paths = client.get("/openapi.json").json()["paths"]
    assert not any("head" in every for every in paths.values())
    read = ["/", *(path for path, every in paths.items() if "get" in every and "{" not in path)]
    assert {"/health", "/metrics", "/v1/models", "/api/tags", "/v1/sessions"} <= set(read)
    for path in [*read, "/v1/models/none", "/v1/sessions/none"]:
        answer = client.head(path)
        assert answer.content == b""
        # The stream of events of a page has no end.
        if path != "/v1/state/events":
            got = client.get(path)
            assert (answer.status_code, answer.headers["content-type"]) == (
                got.status_code,
                got.headers["content-type"],
            )
    wait_for(lambda: chat_served.context.gate.under_way == 0)
    assert client.head("/v1/chat/completions").status_code == 405


def test_what_only_values_can_tell_is_declared(chat_client: httpx.Client) -> None:
    """A 400 to what fits its schema is declared where values are checked, and nowhere else."""
    paths = chat_client.get("/openapi.json").json()["paths"]
    silent = {path for path, every in paths.items() for one in every.values() if "400" not in one["responses"]}
    assert silent == {"/health", "/version", "/metrics", "/v1/models", "/v1/models/{model}"}


def test_embeddings_are_refused_by_name(chat_client: httpx.Client) -> None:
    answer = chat_client.post("/v1/embeddings", json={"model": "x", "input": "y"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported"
    assert answer.json()["error"]["message"].startswith("embeddings: ")


@pytest.mark.parametrize("name", ["CompletionRequest", "ChatRequest"])
def test_ranges_are_described_as_they_are_checked(chat_client: httpx.Client, name: str) -> None:
    """What lies outside of a described range is refused by name, and its ends are taken."""
    path, body = {
        "CompletionRequest": ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        "ChatRequest": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, "logprobs": True}),
    }[name]
    fields = chat_client.get("/openapi.json").json()["components"]["schemas"][name]["properties"]
    seen = set()
    for field, schema in fields.items():
        for kind in schema.get("anyOf", ()):
            number, step = (int, 1) if kind.get("type") == "integer" else (float, 0.5)
            ends = {
                number(kind[word]) + sign * step for word, sign in (("minimum", -1), ("maximum", 1)) if word in kind
            }
            ends |= {kind["exclusiveMinimum"]} if "exclusiveMinimum" in kind else set()
            for value in ends:
                answer = chat_client.post(path, json={**body, field: value})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
                seen.add(field)
            if "minimum" in kind:
                assert chat_client.post(path, json={**body, field: number(kind["minimum"])}).status_code == 200, field
    assert {"temperature", "top_p", "top_k", "n", "seed", "presence_penalty"} <= seen
