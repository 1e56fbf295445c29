"""Chats in state files: a loaded session goes on as the saved one would, and a malformed chat is
refused before anything of the session is loaded.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.small_llms import MakeLLM, check, engine_of, greedy

from quire import LLM, DataLoss, InvalidArgument, Session
from quire.base.errors import QuireError, StoreDamaged
from quire.cli.inspection import describe, print_description
from quire.sessions import saving
from quire.sessions.chat_turns import ChatTurns
from quire.statefile.container import plan_of, read_state, to_bytes
from state_files import MISSING, VALUES, changed, metadata_of

from .test_session_chat import RULES, TEMPLATE, TOOLS, assistant, chatty, folder, user

__all__ = ["chatty", "folder"]

SYSTEM = {"role": "system", "content": "Say little."}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, 2]}'}}


def of_call(_: str) -> dict[str, Any]:
    """The message of an answer that calls a tool."""
    return {**assistant("look"), "tool_calls": [CALL]}


def spoken(llm: LLM) -> Session:
    """A session with two answers and a system message."""
    session = llm.session()
    session.chat([SYSTEM, user("The quick brown fox")], greedy(6))
    session.chat([user("jumps over")], greedy(6))
    return session


def appended(session: Session) -> None:
    session.append(" and more")


def rewound(session: Session) -> None:
    session.rewind(n=3)


def rewound_far(session: Session) -> None:
    """Into the messages of the last turn, of which a rest stands."""
    session.rewind(n=14)


def emptied(session: Session) -> None:
    session.rewind(to=0)


def edited(session: Session) -> None:
    session.edit("brown", "red")


def tooled(session: Session) -> None:
    session.chat([user("tool")], greedy(4), tools=TOOLS, answer=of_call)
    session.chat([{"role": "tool", "tool_call_id": "a", "content": "[3, 4]"}], greedy(4), tools=TOOLS)


def left_open(session: Session) -> None:
    """Messages without an answer."""
    output = session.chat([user("nothing")], greedy(1, ignore_eos=True))
    session.rewind(to=len(output.prompt_token_ids))


CHANGES = (lambda _: None, appended, rewound, rewound_far, emptied, edited, tooled, left_open)


@pytest.mark.parametrize("change", CHANGES)
def test_a_chat_goes_on_as_if_it_had_not_been_saved(
    make_llm: MakeLLM, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: Callable[[Session], None]
) -> None:
    llm, other = make_llm(folder), make_llm(folder, page_size=5, max_model_len=512)
    for one in (llm, other):
        monkeypatch.setattr(one.tokenizer, "chat_templates", {"default": RULES + TEMPLATE})
    session = spoken(llm)
    change(session)
    session.save(tmp_path / "a.quire")
    loaded = other.load_session(tmp_path / "a.quire")
    assert (loaded.has_chat, loaded.chat_start) == (session.has_chat, session.chat_start)
    assert loaded._live.turns.written() == session._live.turns.written()
    assert loaded.messages == session.messages
    again = other.session_from_bytes(loaded.fork().to_bytes())
    for turn, tools in (("the lazy", None), ("dog", TOOLS)):
        wanted = session.chat([user(turn)], greedy(6), tools=tools)
        for one in (loaded, again):
            found = one.chat([user(turn)], greedy(6), tools=tools)
            assert found.prompt_token_ids == wanted.prompt_token_ids
            assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
    for one in (loaded, again):
        one.rewind(n=5)
    session.rewind(n=5)
    assert (
        loaded.chat([user("end")], greedy(3)).prompt_token_ids == again.chat([user("end")], greedy(3)).prompt_token_ids
    )
    assert session.chat([user("end")], greedy(3)).prompt_token_ids == loaded.tokens[:-3]
    check(other)


def test_the_state_of_earlier_turns_comes_from_the_file(make_llm: MakeLLM, folder: Path) -> None:
    session = spoken(make_llm(folder))
    output = make_llm(folder).session_from_bytes(session.to_bytes()).chat([user("over")], greedy(2))
    assert output.num_cached_tokens >= len(session) - 8
    with pytest.raises(InvalidArgument, match="image"):
        session.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], greedy(2))


def test_without_a_chat_a_file_is_as_before(chatty: LLM) -> None:
    session = chatty.session("The quick")
    data = session.to_bytes()
    assert "chat" not in metadata_of(data)
    with read_state(data) as file:
        assert "chat" not in file.names
    loaded = chatty.session_from_bytes(data)
    assert not loaded.has_chat
    assert loaded.chat_start is None
    wanted = session.chat([user("one")], greedy(3)).prompt_token_ids
    assert session.chat_start == len(loaded)
    assert loaded.chat([user("one")], greedy(3)).prompt_token_ids == wanted


def test_a_long_chat_is_no_large_header(chatty: LLM) -> None:
    """Its commas and brackets are not those of a header, whose limits are far below."""
    said = "[{,\"'\\\n" * 150_000
    session = chatty.session()
    session.chat([user("one")], greedy(3), answer=lambda text: {**assistant(text), "reasoning": said})
    loaded = chatty.session_from_bytes(session.to_bytes())
    assert loaded._live.turns.messages[1]["reasoning"] == said
    assert (
        loaded.chat([user("two")], greedy(3)).prompt_token_ids
        == session.chat([user("two")], greedy(3)).prompt_token_ids
    )


def test_chats_that_no_file_holds_are_not_saved(chatty: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = chatty.session()
    deep: Any = 1
    for _ in range(70):
        deep = [deep]
    for more, match in (
        ({"object": object()}, "no JSON"),
        ({"deep": deep}, "64 levels deep"),
        ({"role": 1}, r"chat.turns\[1\]\[1\].role is 1; text is expected"),
        ({"content": ["a"]}, "the text of an answer is expected"),
        ({"long": "x" * 2000}, "at most 1000 bytes is expected, [0-9]+ are found"),
        ({"many": [[]] * 60}, "at most 50 opening brackets"),
    ):
        session.rewind(to=0)
        session.chat([user("one")], greedy(2), answer=lambda text, more=more: {**assistant(text), **more})
        with monkeypatch.context() as small:
            small.setattr(saving, "MOST_CHAT", 1000 if "long" in more else 1 << 20)
            small.setattr(saving, "MAX_CONTAINERS", 50 if "many" in more else 10**6)
            for save in (session.to_bytes, lambda: session.save(tmp_path / "a.quire")):
                with pytest.raises(InvalidArgument, match=match):
                    save()
    assert not list(tmp_path.iterdir())
    check(chatty)


def with_chat(data: bytes, chat: bytes | torch.Tensor | None) -> bytes:
    """The file with another tensor of its chat; None: with none."""
    with read_state(data) as file:
        tensors = {name: file.tensor(name) for name in file.names if name != "chat"}
        if chat is not None:
            raw = chat if isinstance(chat, torch.Tensor) else torch.frombuffer(bytearray(chat), dtype=torch.uint8)
            tensors["chat"] = raw
        return to_bytes(file.metadata, plan_of(tensors), tensors.items())


def chat_of(data: bytes) -> dict[str, Any]:
    with read_state(data) as file:
        found: dict[str, Any] = json.loads(bytes(file.tensor("chat").tolist()))
    return found


def refused(llm: LLM, data: bytes, match: str) -> None:
    """Loading raises, and afterwards the pool is as it was."""
    state = engine_of(llm).runner.state
    before = (list(state.sequences.ids), state.num_available_pages(), len(engine_of(llm).branches.sessions))
    with pytest.raises(DataLoss, match=match):
        llm.session_from_bytes(data)
    assert (list(state.sequences.ids), state.num_available_pages(), len(engine_of(llm).branches.sessions)) == before


@pytest.fixture
def data(chatty: LLM) -> bytes:
    return spoken(chatty).to_bytes()


def test_a_malformed_chat_is_refused_with_its_place(chatty: LLM, data: bytes) -> None:
    chat = chat_of(data)
    end, message, answer = chat["turns"][1]
    for place, value, match in (
        ("turns", 7, "chat.turns is 7; a list is expected"),
        ("cut", None, "chat.cut is None; true or false"),
        ("start", -1, "chat.start is -1"),
        ("start", 10_000, "a chat of 5 messages; its tensor 'chat' has 5 messages in 10000 tokens"),
        ("colour", 1, "chat.colour is not known; one of turns, cut, start, inputs"),
        ("inputs", {"tools": 1, "variables": {}}, "chat.inputs.tools is 1"),
        ("inputs", {}, "chat.inputs.tools is missing"),
        ("turns", [[end, message]], r"chat.turns\[0\] is .*; a list of 3"),
        ("turns", [[end, "hello", answer]], r"chat.turns\[0\]\[1\] is 'hello'; an object"),
        ("turns", [[end, {"content": "a"}, answer]], r"chat.turns\[0\]\[1\].role is missing"),
        ("turns", [[end, {**message, "content": 1}, answer]], r"chat.turns\[0\]\[1\].content is 1"),
        ("turns", [[end, {**message, "tool_calls": [1]}, answer]], r"chat.turns\[0\]\[1\].tool_calls\[0\] is 1"),
        ("turns", [[end, {**message, "content": []}, True]], r"chat.turns\[0\]\[1\].content is a list"),
        ("turns", [[True, message, answer]], r"chat.turns\[0\]\[0\] is True"),
        ("turns", [[10_000, message, answer]] * 5, "its tensor 'chat' has 5 messages in 10000 tokens"),
        ("turns", [[end, message, answer]], "a chat of 5 messages; its tensor 'chat' has 1 messages"),
    ):
        refused(chatty, with_chat(data, json.dumps({**chat, place: value}).encode()), match)
    text = json.dumps(chat).encode()
    deep = text.replace(b'"Say little."', b'"Say little.","deep":' + b"[" * 65 + b"]" * 65)
    bytes_, halves = torch.zeros(2, 40, dtype=torch.uint8), torch.zeros(80, dtype=torch.int8)
    for given, match in (
        (text[:-1], "chat is no JSON"),
        (b"\xff" + text, "chat is no JSON"),
        (b"[" * 9000, "chat is no JSON"),
        (b"null", "chat is None; an object"),
        (deep, "a chat may be nested 64 levels deep"),
        (torch.zeros(0, dtype=torch.uint8), "chat is no JSON"),
        (None, "a chat of 5 messages; a tensor 'chat' of bytes is expected"),
        (bytes_, "a tensor 'chat' of bytes is expected"),
        (halves, "a tensor 'chat' of bytes is expected"),
    ):
        refused(chatty, with_chat(data, given), match)
    for value in VALUES:
        if value is not MISSING:
            match = "metadata.chat is|a chat of 2147483648 messages|NaN is no finite JSON number"
            refused(chatty, changed(data, ("chat",), value), match)
    with pytest.raises(InvalidArgument, match="tensors that no row has"):
        chatty.session_from_bytes(changed(data, ("chat",), MISSING))
    check(chatty)


def test_a_hostile_chat_is_refused_before_it_is_parsed(chatty: LLM, data: bytes) -> None:
    for bomb, match in (
        (b"[" + b"[]," * 3_000_000 + b"0]", "opening brackets"),
        (b" " * (1 << 26), "bytes is expected"),
    ):
        given = with_chat(data, bomb)
        tracemalloc.start()
        try:
            refused(chatty, given, match)
            assert tracemalloc.get_traced_memory()[1] < 2 * len(given)
        finally:
            tracemalloc.stop()


def test_damage_in_a_chat_is_found(chatty: LLM, data: bytes) -> None:
    with read_state(data) as file:
        at = len(data) - max(stop for _, stop in file.spans.values()) + file.spans["chat"][0]
    assert data[at : at + 9] == b'{"turns":'
    for place in range(at, len(data), 23):
        flipped = bytearray(data)
        flipped[place] ^= 1
        refused(chatty, bytes(flipped), "tensor 'chat' is damaged")
        refused(chatty, data[:place], "truncated")


def test_a_cache_leaves_the_chat_of_a_file_out(chatty: LLM, data: bytes) -> None:
    cache = chatty.executor.create_kv_cache(batch_size=1)
    cache.load(data)
    session = chatty.session(cache=cache)
    assert session.tokens == metadata_of(data)["tokens"]
    assert not session.has_chat
    assert "chat" not in metadata_of(cache.serialize())


def test_the_number_of_messages_is_shown(data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.quire").write_bytes(data)
    view = describe(tmp_path / "a.quire")
    assert view.facts["messages"] == 5
    print_description(view.facts)
    assert "5 messages" in capsys.readouterr().out
    assert "5 messages" in view._repr_html_()


def test_modified_states_keep_their_chat_everywhere(make_llm: MakeLLM, folder: Path, tmp_path: Path) -> None:
    """A commit and a journal have a state file and the chat beside it."""
    llm = make_llm(folder, state_dir=tmp_path / "state")
    session = spoken(llm)
    session.set_kv(1, v=torch.zeros(10, 2, 16))
    session.name = "kept"
    session.commit("main")
    session.append("")
    data = session.to_bytes()
    wanted = session.fork().chat([user("on")], greedy(4))
    llm.close()
    again = make_llm(folder, state_dir=tmp_path / "state")
    for found in (again.checkout("main"), again.resume("kept"), again.session_from_bytes(data)):
        assert found.modified
        output = found.chat([user("on")], greedy(4))
        assert output.prompt_token_ids == wanted.prompt_token_ids
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids


@pytest.mark.parametrize("verb", ["checkout", "resume"])
def test_malformed_chats_of_commits_and_journals_are_named(
    make_llm: MakeLLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    llm = make_llm(folder, state_dir=tmp_path / "state")
    session = spoken(llm)
    written = json.loads(session._live.turns.written() or "")
    written["turns"][0][1] = "hello"
    with monkeypatch.context() as wrong:
        wrong.setattr(ChatTurns, "written", lambda _: json.dumps(written))
        session.name = "main"
        session.commit("main")
    llm.close()
    again = make_llm(folder, state_dir=tmp_path / "state")
    with pytest.raises(StoreDamaged, match=r"chat.turns\[0\]\[1\] is 'hello'; an object is expected") as caught:
        getattr(again, verb)("main")
    assert isinstance(caught.value, QuireError)
    check(again)
