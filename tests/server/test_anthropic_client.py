"""``/v1/messages`` through Anthropic's official client, and against its types."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, get_args

import pydantic
import pytest

from .conftest import Served
from .test_anthropic_messages import CALL, FREE, MARK, TOOL, ask, capable, events, says, text, user
from .test_disconnects import broken_at

__all__ = ["capable", "says"]

pytestmark = pytest.mark.skipif(find_spec("anthropic") is None, reason="Anthropic's client is not installed")
SENT: dict[str, Any] = {"model": "tiny-chat", "max_tokens": 12, "extra_body": {"ignore_eos": True, "temperature": 0}}


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """Return the client's package, whose import takes a second."""
    return importlib.import_module("anthropic")


def connected(served: Served) -> Any:
    return importlib.import_module("anthropic").Anthropic(base_url=served.url, api_key="none", max_retries=0)


@pytest.fixture
def api(chat_served: Served) -> Iterator[Any]:
    with connected(chat_served) as client:
        yield client


@pytest.mark.turns(2)
@pytest.mark.parametrize("thought", [False, True])
def test_events_have_the_official_types(
    anthropic: Any, capable: Served, says: Callable[[str], None], thought: bool
) -> None:
    types = anthropic.types
    kinds = {
        get_args(kind.model_fields["type"].annotation)[0]: kind
        for kind in get_args(get_args(types.RawMessageStreamEvent)[0])
    }
    says(f"<think>\nHm.\n</think>\n\nYes.{CALL}" if thought else "Yes.")
    body = {**FREE, "tools": [{**TOOL, "cache_control": MARK}]}
    found = events(capable.client, **body)
    assert found.pop(1) == {"type": "ping"}
    for event in found:
        kinds[event["type"]].model_validate(event, strict=True)
    said = types.Message.model_validate(ask(capable.client, **body), strict=True)
    assert [block.type for block in said.content] == (["thinking", "text", "tool_use"] if thought else ["text"])


def test_texts(api: Any) -> None:
    whole = api.messages.create(messages=[user()], system=[text("Be brief.", cache_control=MARK)], **SENT)
    (block,) = whole.content
    assert (block.type, whole.stop_reason, whole.usage.output_tokens) == ("text", "max_tokens", 12)
    with api.messages.stream(messages=[user()], system="Be brief.", **SENT) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (block.text, "max_tokens")
    assert final.usage.output_tokens == 12
    used = [
        one.input_tokens + one.cache_read_input_tokens + one.cache_creation_input_tokens
        for one in (whole.usage, final.usage)
    ]
    counted = api.messages.count_tokens(model="tiny-chat", messages=[user()], system="Be brief.")
    assert used == [counted.input_tokens] * 2


def test_tools(capable: Served, says: Callable[[str], None]) -> None:
    says(f"<think>\nHm.\n</think>\n\nYes.{CALL}")
    options: dict[str, Any] = {"model": "capable", "max_tokens": 300, "tools": [TOOL]}
    with connected(capable) as client:
        whole = client.messages.create(messages=[user()], **options)
        with client.messages.stream(messages=[user()], tool_choice={"type": "auto"}, **options) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_message()
        assert {"thinking", "signature", "text", "input_json", "content_block_stop", "message_stop"} <= kinds
        for message in (whole, final):
            thought, said, use = message.content
            assert (thought.thinking, said.text, use.input) == ("Hm.", "Yes.", {"city": "Rome"})
            assert message.stop_reason == "tool_use"
        says("Sunny.")
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "hot"}
        turns = [user(), {"role": "assistant", "content": final.content}, user([result])]
        assert client.messages.create(messages=turns, **options).content[0].text == "Sunny."


def test_parsed_answers(api: Any) -> None:
    class Answer(pydantic.BaseModel):
        ok: bool

    # tiny-chat loops in white space where a schema allows it, so the seed is one that ends.
    options: dict[str, Any] = {"model": "tiny-chat", "max_tokens": 400, "extra_body": {"seed": 5}}
    parsed = api.messages.parse(messages=[user()], output_format=Answer, **options)
    assert parsed.parsed_output.ok in (True, False)


def test_errors(anthropic: Any, api: Any, chat_served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as caught:
        api.messages.create(messages=[user("x " * 9000)], **SENT)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        api.messages.create(messages=[user()], **{**SENT, "model": "claude"})
    broken_at(5, chat_served.llm, monkeypatch)
    with (
        pytest.raises(anthropic.APIStatusError, match="internal error"),
        api.messages.stream(messages=[user()], **SENT) as stream,
    ):
        stream.until_done()
