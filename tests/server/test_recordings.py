"""What clients of others sent once, sent again: as ``bench/clients.py --record`` wrote it, without
the clients. The answers must have the same statuses, and be what the official SDKs read.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from quire import AsyncLLM
from quire.server.http.settings import ServerSettings

from .conftest import OPTIONS, Served, serving, shallow_copy
from .test_disconnects import until_free

RECORDINGS = Path(__file__).parent / "recordings"
NAMES = sorted(path.stem for path in RECORDINGS.glob("*.json"))
OPENAI = importlib.util.find_spec("openai") is not None
ANTHROPIC = importlib.util.find_spec("anthropic") is not None
Event = Mapping[str, Any]


@pytest.fixture(scope="module")
def recorded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two layers of the bundled model, told what ``bench/clients.py`` tells its server."""
    folder = tmp_path_factory.mktemp("models") / "tiny-python"
    shallow_copy(folder)
    llm = AsyncLLM(folder, **OPTIONS)
    try:
        with serving(llm, ServerSettings(served_model_name="under-test", tool_call_parser="hermes")) as found:
            yield found
    finally:
        asyncio.run(llm.close())


MADE = re.compile(r"\b(?:resp|call|fc|msg|rs)_[0-9a-f]{16,}")


def filled(value: Any, overflow: str, made: Mapping[int, Sequence[str]]) -> Any:
    """A recorded value with what ``client_watch.recording`` left out. Calls that the larger model
    made, and this one does not, keep a name in place of an id."""

    def put(found: re.Match[str]) -> str:
        number, place = int(found[1]), int(found[2])
        return made[number][place] if place < len(made[number]) else f"made_{number}_{place}"

    return json.loads(re.sub(r"\{made\.(\d+)\.(\d+)\}", put, json.dumps(value).replace("{overflow}", overflow)))


def test_there_are_recordings_of_each_protocol() -> None:
    asked = [one for name in NAMES for one in json.loads((RECORDINGS / f"{name}.json").read_text())["requests"]]
    assert len(NAMES) >= 20
    counts = {path: sum(one["path"] == path for one in asked) for path in PATHS}
    assert all(count >= 20 for count in counts.values()), counts
    assert any("previous_response_id" in one.get("body", ()) for one in asked)
    places = ("127.0.0.1", "localhost", f"{tempfile.gettempdir()}/", f"{Path.home()}/")
    assert not any(place in json.dumps(one) for one in asked for place in places)
    assert not any(MADE.search(json.dumps(one)) for one in asked)


@pytest.mark.product(3)
@pytest.mark.parametrize("name", NAMES)
def test_recorded_requests_are_answered(recorded_server: Served, name: str) -> None:
    recording = json.loads((RECORDINGS / f"{name}.json").read_text(encoding="utf-8"))
    client, llm = recorded_server.client, recorded_server.llm
    overflow = "x " * (llm.engine.max_model_len + 100)
    made: dict[int, list[str]] = {}
    for number, recorded in enumerate(recording["requests"]):
        one = filled(recorded, overflow, made)
        body = {"content": json.dumps(one["body"])} if "body" in one else {}
        with client.stream(one["method"], one["path"], headers=one["headers"], **body) as answer:
            if one.get("given_up"):
                assert answer.status_code == 200, answer.read()
                next(answer.iter_raw())
                continue
            answer.read()
        assert answer.status_code == one["status"], (number, answer.text)
        path = one["path"].partition("?")[0]
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert isinstance(error if path.startswith("/api/") else error["message"], str)
        elif answer.headers["content-type"] == "application/x-ndjson":
            check_lines(path, [json.loads(line) for line in answer.text.splitlines()])
        elif answer.headers["content-type"].startswith("text/event-stream"):
            found = events(answer.text)
            check_stream(path, found)
        else:
            check_answer(path, one["method"], answer.json())
        made[number] = list(dict.fromkeys(MADE.findall(answer.text)))
    until_free(llm)


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream; OpenAI's chats end with a mark."""
    blocks = [block.splitlines() for block in text.removesuffix("\n\n").split("\n\n")]
    found = []
    for lines in blocks:
        data = lines[-1].removeprefix("data: ")
        if data == "[DONE]":
            assert lines is blocks[-1]
            continue
        found.append(json.loads(data))
        if len(lines) == 2:
            assert lines[0] == f"event: {found[-1]['type']}"
    return found


# -- what the SDKs read ----------------------------------------------------------------------------


def check_answer(path: str, method: str, answer: Any) -> None:
    """A whole answer has the official type."""
    if path == "/v1/messages":
        if ANTHROPIC:
            from anthropic.types import Message

            Message.model_validate(answer, strict=True)
    elif OPENAI and path in PATHS:
        import openai.types.chat
        import openai.types.responses

        if path == "/v1/responses":
            # The union of items is told apart by the client itself, not by pydantic alone.
            assert openai.types.responses.Response.construct(**answer).output
        elif path == "/v1/completions":
            # With ``echo`` the first token has no log-probability, which the type does not know.
            assert openai.types.Completion.construct(**answer).choices
        else:
            openai.types.chat.ChatCompletion.model_validate(answer)
    assert path not in WHOLE or answer[WHOLE[path]], (method, answer)


WHOLE = {
    "/api/tags": "models",
    "/api/ps": "models",
    "/api/version": "version",
    "/api/show": "capabilities",
    "/v1/models": "data",
    "/v1/chat/completions": "choices",
    "/v1/completions": "choices",
    "/v1/responses": "output",
    "/v1/messages": "content",
}
"""The field that has what was generated."""


def check_stream(path: str, found: Sequence[Event]) -> None:
    """The events come in an order that the official parser takes, and make up a whole answer."""
    PATHS[path](found)


def check_chat(found: Sequence[Event]) -> None:
    choices = [choice for one in found for choice in one["choices"]]
    assert choices[0]["delta"]["role"] == "assistant"
    assert [bool(choice["finish_reason"]) for choice in choices] == [False] * (len(choices) - 1) + [True]
    if OPENAI:
        from openai.lib.streaming.chat import ChatCompletionStreamState
        from openai.types.chat import ChatCompletionChunk

        state: Any = ChatCompletionStreamState()
        for one in found:
            list(state.handle_chunk(ChatCompletionChunk.model_validate(one)))
        message = state.current_completion_snapshot.choices[0].message
        assert (message.content or "") == "".join(choice["delta"].get("content") or "" for choice in choices)


def check_lines(path: str, found: Sequence[Event]) -> None:
    """The lines of ollama's API: each has a piece, and the last one the counts."""
    assert [one["done"] for one in found] == [False] * (len(found) - 1) + [True]
    pieces = [one["message"]["content"] if path == "/api/chat" else one["response"] for one in found]
    assert any(pieces)
    assert found[-1]["eval_count"] > 0 < found[-1]["prompt_eval_count"]


def check_completion(found: Sequence[Event]) -> None:
    assert "".join(choice["text"] for one in found for choice in one["choices"])


def check_response(found: Sequence[Event]) -> None:
    kinds = [one["type"] for one in found]
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    assert kinds[:2] == ["response.created", "response.in_progress"]
    ends = ["response.completed", "response.incomplete"]
    assert [kind in ends for kind in kinds] == [False] * (len(kinds) - 1) + [True]
    if OPENAI:
        import pydantic
        from openai import NOT_GIVEN
        from openai.lib.streaming.responses._responses import ResponseStreamState
        from openai.types.responses import ResponseStreamEvent

        reads = pydantic.TypeAdapter(ResponseStreamEvent)
        state: Any = ResponseStreamState(text_format=NOT_GIVEN, input_tools=NOT_GIVEN)
        told = [event for one in found for event in state.handle_event(reads.validate_python(one))]
        assert [one.type for one in told] == kinds
    whole = found[-1]["response"]
    assert whole["output"] == [one["item"] for one in found if one["type"] == "response.output_item.done"]


def check_message(found: Sequence[Event]) -> None:
    kinds = [one["type"] for one in found]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    if ANTHROPIC:
        from anthropic import types
        from anthropic.lib.streaming._messages import accumulate_event

        reads = {
            get_args(kind.model_fields["type"].annotation)[0]: kind
            for kind in get_args(get_args(types.RawMessageStreamEvent)[0])
        }
        snapshot: Any = None
        buffers: dict[int, bytes] = {}
        for one in found:
            if one["type"] != "ping":
                event = reads[one["type"]].model_validate(one, strict=True)
                snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
        assert snapshot.content
        assert snapshot.stop_reason == found[-2]["delta"]["stop_reason"]


PATHS = {
    "/v1/chat/completions": check_chat,
    "/v1/completions": check_completion,
    "/v1/responses": check_response,
    "/v1/messages": check_message,
}
