"""The terminal chat against a server: what it says and keeps is what the chat with the model itself
says and keeps.
"""

from __future__ import annotations

import asyncio
import io
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.test_bench_serve import Request, answer, chunked, stub, text_event
from tests.server.conftest import (
    OPTIONS,
    Served,
    chat_folder,
    chat_llm,
    pages_free,
    plain_folder,
    plain_llm,
    serving,
    wait_for,
)

from quire import LLM, AsyncLLM
from quire.base.errors import InvalidArgument, NotFound, QuireError, ResourceExhausted, Unsupported
from quire.cli import main as cli
from quire.cli.chat import LocalBackend, TerminalChat, chat_fields, usual_fields
from quire.cli.client import BrokenAnswer, HttpFailure
from quire.cli.remote_chat import Link, RemoteBackend, RemoteModel, run_remote_chat
from quire.server.http.settings import ServerSettings

__all__ = ["chat_folder", "chat_llm", "plain_folder", "plain_llm"]

FIELDS: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
KEY = "secret-1"


@pytest.fixture(params=["plain", "templated"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Served, Path]]:
    """A server, and the model that it serves."""
    templated = request.param == "templated"
    model: AsyncLLM = request.getfixturevalue("chat_llm" if templated else "plain_llm")
    path = request.getfixturevalue("chat_folder" if templated else "plain_folder")
    with serving(model, ServerSettings(api_key=(KEY,)), Authorization=f"Bearer {KEY}") as served:
        yield served, path


def remote(served: Served) -> RemoteModel:
    return RemoteModel(Link(served.url, api_key=KEY))


def open_sessions(served: Served) -> list[dict[str, Any]]:
    return list(served.client.get("/v1/sessions").json()["data"])


def seconds_out(text: str) -> str:
    return re.sub(r"\d+\.\d+ s(?=[];])", "T s", text)


LINES = [
    "def add(a, b):",
    "/fork other",
    "    return a",
    "/switch main",
    "class Stack:",
    "/continue",
    "/rewind",
    "/rewind 5",
    "class Queue:",
    "/edit Queue => Pile",
    "/edit nothing of that => x",
    "/edit Pile",
    "/text",
    "/edit def add(a, b) =>",
    "/text",
    "/rewind 1",
    "/nonsense",
    "/fork",
    "/fork other",
    "/stats",
    "/save {file}",
    "/save {file}/nowhere",
    "def sub(a, b):",
    "/drop",
    "/text",
    "/rewind 1",
    "/drop 7",
    "def mul(a, b):",
    "/rewind 1",
    "/again",
    "/new",
    "/again",
    "/set temperature 0",
    "/set",
    "/set nonsense 1",
    "/set temperature hot",
    "/set temperature null",
    "/set min_tokens 14",
    "/set max_tokens 20",
    "/set min_tokens 14",
    "/set max_tokens 13",
    '/set stop ["ä", "never"]',
    "/set",
    "/set stop default",
    "/set min_tokens default",
    "/set max_tokens default",
    "/set max_tokens 12",
    "/set temperature 0.5",
    "/set temperature default",
    "/set top_k",
    "/set temperature 0",
    "/system",
    "/system Say little.",
    "class Heap:",
    "/system",
    "/system Say a lot.",
    "/text",
    "/new beside",
    "class Tree:",
    "/text",
    "/rewind",
    "class Tree:",
    "/drop",
    "class Leaf:",
    "/text",
    "/new beside",
    "/switch main",
    "/load {file}",
    "/system Say nothing.",
    "def sub(a, b):",
    "/drop 2",
    "/load {file}",
    "/switch nowhere",
    "/adapter nothing-of-that-name",
]


def test_every_command_does_what_it_does_without_a_server(
    pair: tuple[Served, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    served, path = pair

    def typed(folder: Path) -> None:
        folder.mkdir()
        lines = [line.format(file=folder / "a.quire") for line in LINES]
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))

    typed(tmp_path / "here")
    with LLM(path, **OPTIONS) as local, pytest.raises(SystemExit, match="2"):  # lines were refused
        TerminalChat(LocalBackend(local, FIELDS)).run()
    here = capsys.readouterr()
    typed(tmp_path / "there")
    assert pages_free(served.llm)  # what others have left in the cache is forgotten: /stats counts all pages
    with pytest.raises(SystemExit, match="2"):
        run_remote_chat(served.url, api_key=KEY, sampling=FIELDS)
    there = capsys.readouterr()
    assert there.out == here.out
    assert here.out.count("\n") >= 5
    wanted = seconds_out(here.err).replace("here/", "there/").splitlines()
    found = seconds_out(there.err).splitlines()[1:]
    unequal = [(one, other) for one, other in zip(wanted, found, strict=True) if one != other]
    assert re.search(r"last turn: tokens 0\.\.\d+ are reused; .* \(\d+ from pool\)$", here.err, re.MULTILINE)
    # Only the message about what does not exist is the server's own.
    assert len(unequal) == 1, unequal
    assert "nothing-of-that-name" in unequal[0][1]
    assert open_sessions(served) == []
    assert pages_free(served.llm)


def held_tokens(chat: TerminalChat, served: Served) -> list[int]:
    """The tokens of a chat's session, wherever it is."""
    session: Any = chat._session
    if isinstance(chat._backend, RemoteBackend):
        return list(served.client.get(f"/v1/sessions/{session._name}").json()["tokens"])
    return list(session.tokens)


@pytest.mark.parametrize("folder", [pytest.param("plain_folder", marks=pytest.mark.slow), "chat_folder"])
def test_a_full_context_and_the_ways_on(folder: str, request: pytest.FixtureRequest) -> None:
    """The refusal names them, and each of them works; with a window the context never fills."""
    path, short = request.getfixturevalue(folder), {**OPTIONS, "max_model_len": 52}
    served_llm = AsyncLLM(path, **short)
    with LLM(path, **short) as local, serving(served_llm) as served:
        model = RemoteModel(Link(served.url))
        fields = {**FIELDS, "max_tokens": 20}
        texts: list[str] = []
        for chat in (
            TerminalChat(LocalBackend(local, fields)),
            TerminalChat(RemoteBackend(model, fields)),
        ):
            chat.take("a = 1")
            chat.take("b = 2")
            before = chat._session.text
            with pytest.raises(ResourceExhausted, match=r"context .*/drop forgets .*--window"):
                chat.take("c = 3")
            assert chat._session.text == before
            assert [turn.line for turn in chat._branch.turns] == ["a = 1", "b = 2"]
            chat.take("/drop")
            assert "a = 1" not in chat._session.text
            assert chat._session.text in before
            kept = held_tokens(chat, served)
            chat.take("c = 3")
            chat.take("/fork other")
            chat.take(
                "/rewind 1"
            )  # the turn stands where the template had begun an answer: what is left is computed anew
            assert held_tokens(chat, served) == kept
            chat.take("/switch main")
            chat.take("/rewind 1")
            assert held_tokens(chat, served) == kept
            chat.take("d = 4")
            chat.take("/drop")
            chat.take("e = 5")
            chat.take("/rewind 2")
            assert len(chat._session) == 0
            chat.take("f = 6")
            chat.take("/rewind 1")
            assert len(chat._session) == 0
            chat.take("g = 7")
            texts.append(chat._session.text)
        window = {"window": 32, "sink": 4}
        for chat in (
            TerminalChat(LocalBackend(local, fields, **window)),
            TerminalChat(RemoteBackend(model, fields, **window)),
        ):
            for number in range(4):
                chat.take(f"c{number} = 3")
            assert len(chat._session) > 64
            held, _ = chat._session.pages
            assert held <= 32 // 16 + 2
            chat.take("/rewind 1")
            assert len(chat._branch.turns) == 3
            chat.take("/drop")
            chat.take("/rewind 2")  # where the turns that are left began is no longer so
            assert len(chat._session) == 0
            chat.take("d = 4")
            texts.append(chat._session.text)
        assert texts[0] == texts[1]
        assert texts[2] == texts[3]
        model.close()
    asyncio.run(served_llm.close())


def test_turns_behind_an_edit_are_taken_back(pair: tuple[Served, Path]) -> None:
    """They begin elsewhere then."""
    _, path = pair
    with LLM(path, **OPTIONS) as local:
        chat = TerminalChat(LocalBackend(local, FIELDS))
        chat.take("value_one = 1")
        chat.take("value_two = 2")
        chat.take("/fork other")
        chat.take("/switch main")
        chat.take("/edit value_one => x")
        assert [turn.line for turn in chat._branch.turns] == ["x = 1", "value_two = 2"]
        assert "value_one" not in chat._session.text
        chat.take("/rewind 1")
        left = chat._session.text
        chat.take("/switch other")
        chat.take("/rewind 1")
        assert left == chat._session.text.replace("value_one", "x")


def test_an_interrupted_answer_ends_on_the_server_and_can_be_taken_back(
    pair: tuple[Served, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, _ = pair
    model = remote(served)
    chat = TerminalChat(RemoteBackend(model, {**FIELDS, "max_tokens": 3000}))
    shown: list[str] = []

    class Impatient(io.StringIO):
        def write(self, text: str) -> int:
            shown.append(text)
            if len(shown) == 5:
                raise KeyboardInterrupt
            return len(text)

    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", Impatient())
        with pytest.raises(KeyboardInterrupt):
            chat.take("def add(a, b):")
    # The server notices within a step; the call waits for it.
    chat.take("/rewind 1")
    (session,) = open_sessions(served)
    assert session["num_tokens"] == 0
    assert session["in_use"] is None
    model.close()
    wait_for(lambda: pages_free(served.llm))


def test_a_refused_turn_leaves_nothing_behind(pair: tuple[Served, Path]) -> None:
    served, _ = pair
    model = remote(served)
    chat = TerminalChat(RemoteBackend(model, {**FIELDS, "temperature": -1}))
    with pytest.raises(HttpFailure, match="temperature") as caught:
        chat.take("def add(a, b):")
    assert (caught.value.status, caught.value.param) == (400, "temperature")
    with pytest.raises(InvalidArgument, match="there are 0 turns"):
        chat.take("/rewind 1")
    assert open_sessions(served)[0]["num_tokens"] == 0
    model.close()


def test_any_verb_of_a_session_is_called_by_its_name(pair: tuple[Served, Path]) -> None:
    """What only the server has, too: ``score`` has no line in the client."""
    served, _ = pair
    model = remote(served)
    session = model.session()
    session.append(text="def add(a, b):")
    child = session.fork()
    assert len(child) == len(session) > 3
    assert child.rewind(to=3) == 0
    scored = session.score(text=" return")
    assert scored["total_logprob"] == pytest.approx(sum(scored["logprobs"]))
    with pytest.raises(HttpFailure) as caught:
        session.append(text="x " * 100_000)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    with pytest.raises(HttpFailure) as caught:
        session.no_such_verb(n=1)
    assert caught.value.status == 404
    model.close()
    assert open_sessions(served) == []


def test_files_that_cannot_be_loaded_or_saved_are_said(pair: tuple[Served, Path], tmp_path: Path) -> None:
    served, _ = pair
    model = remote(served)
    chat = TerminalChat(RemoteBackend(model, FIELDS))
    chat.take("def add(a, b):")
    with pytest.raises(NotFound, match=r"missing\.quire"):
        chat.take(f"/load {tmp_path / 'missing.quire'}")
    chat.take(f"/save {tmp_path / 'a.quire'}")
    whole = (tmp_path / "a.quire").read_bytes()
    (tmp_path / "b.quire").write_bytes(whole[:-100])
    with pytest.raises(HttpFailure, match="400"):
        chat.take(f"/load {tmp_path / 'b.quire'}")
    with pytest.raises(NotFound, match=r"cannot be written: there is no directory .*nowhere"):
        chat.take(f"/save {tmp_path / 'nowhere' / 'a.quire'}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.quire", "b.quire"]
    assert len(open_sessions(served)) == 1
    model.close()


def test_wrong_keys_and_names_are_said(pair: tuple[Served, Path]) -> None:
    served, _ = pair
    with pytest.raises(HttpFailure) as caught:
        run_remote_chat(served.url, api_key="wrong")
    assert caught.value.status == 401
    assert "--api-key, or the environment variable QUIRE_API_KEY" in str(caught.value)
    with pytest.raises(HttpFailure) as caught:
        run_remote_chat(served.url, api_key=KEY, model="unknown-model")
    assert (caught.value.status, "unknown-model" in str(caught.value)) == (404, True)
    with pytest.raises(HttpFailure) as caught:
        run_remote_chat(served.url, api_key=KEY, adapter="unknown-adapter")
    assert (caught.value.status, "unknown-adapter" in str(caught.value)) == (404, True)
    with pytest.raises(QuireError, match=r"no server can be reached at 127\.0\.0\.1:9"):
        run_remote_chat("http://127.0.0.1:9")


def test_a_server_without_sessions_is_told_apart() -> None:
    async def handler(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.path == "/v1/models":
            writer.write(answer(b'{"data": [{"id": "gpt"}]}'))
        elif request.path == "/tokenize":
            writer.write(answer(b'{"tokens": [1]}'))
        else:
            writer.write(answer(b'{"detail": "Not Found"}', "404 Not Found"))

    with stub(handler) as url, pytest.raises(QuireError, match=r"has no sessions .*; a chat needs a server of Quire"):
        run_remote_chat(url)


@pytest.mark.parametrize("raw", [chunked(text_event("a")), chunked(text_event("a"))[:-5], b"HTTP/1.1 200"])
def test_answers_that_end_early_are_errors(raw: bytes) -> None:
    async def handler(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()
        writer.close()

    with stub(handler) as url, pytest.raises(BrokenAnswer):
        list(Link(url).events("/x", {}))


def test_a_download_that_ends_early_leaves_no_file(tmp_path: Path) -> None:
    async def handler(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"0123456789")[:-4])
        await writer.drain()
        writer.close()

    with stub(handler) as url, pytest.raises(BrokenAnswer, match="4 bytes before the end"):
        Link(url).download("/x", tmp_path / "a.quire")
    assert list(tmp_path.iterdir()) == []


def test_a_silent_server_is_a_sentence() -> None:
    async def handler(request: Request, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2)

    with stub(handler) as url, pytest.raises(QuireError, match=r"did not answer within 0\.1 s"):
        Link(url, timeout=0.1).call("GET", "/x")


@pytest.mark.parametrize(("options", "sent"), [([], {}), (["--max-tokens", "7"], {"max_tokens": 7})])
def test_the_length_of_answers_goes_to_the_server(
    options: list[str], sent: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("quire.cli.remote_chat.run_remote_chat", lambda url, **given: asked.append(given["sampling"]))
    with pytest.raises(SystemExit) as ended:
        cli.app(["chat", "--url", "http://127.0.0.1:1", *options])
    assert not ended.value.code
    assert asked == [sent]


@pytest.mark.parametrize(
    ("model", "templated", "usual"), [("mine", True, None), ("mine", False, 128), ("tiny-python", True, 128)]
)
def test_a_model_with_a_template_ends_its_answers_itself(model: str, templated: bool, usual: int | None) -> None:
    assert usual_fields(model, templated=templated) == {"max_tokens": usual}


def test_the_window_goes_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("quire.cli.remote_chat.run_remote_chat", lambda url, **given: asked.append(given))
    with pytest.raises(SystemExit) as ended:
        cli.app(["chat", "--url", "http://127.0.0.1:1", "--window", "512", "--sink", "4"])
    assert not ended.value.code
    assert {name: asked[0][name] for name in ("window", "sink")} == {"window": 512, "sink": 4}


def test_history_in_both_chats(
    plain_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commits, a checkout that goes on with the same answers, and the log."""
    lines = [
        "/log",
        "def add(a, b):",
        "/commit main its first turn",
        "class Stack:",
        "/commit main",
        "/log",
        "/checkout main",
    ]
    lines += ["def sub(a):", "/commit", "/checkout nothing", "/checkout main"]
    told = []
    for place in ("here", "there"):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
        options: dict[str, Any] = {**OPTIONS, "store": [f"file://{tmp_path / place}"]}
        if place == "here":
            with LLM(plain_folder, **options) as local, pytest.raises(SystemExit, match="2"):
                TerminalChat(LocalBackend(local, FIELDS)).run()
        else:
            llm = AsyncLLM(plain_folder, **options)
            with serving(llm) as served, pytest.raises(SystemExit, match="2"):
                run_remote_chat(served.url, sampling=FIELDS)
            llm._llm.close()
        out, err = capsys.readouterr()
        told.append((out, re.sub(r"\b[0-9a-f]{12}  \S+ \S+", "COMMIT", seconds_out(err)).splitlines()))
    (here, here_err), (there, there_err) = told
    assert here == there
    assert here_err == [
        line.removeprefix("the server answered 400: ").removeprefix("the server answered 404: ")
        for line in there_err[1:]
    ]
    assert sum(line.startswith("COMMIT") for line in here_err) == 4
    assert sum(line.endswith(" tokens  its first turn") for line in here_err) == 1
    assert "this conversation was not committed; /commit NAME does" in here_err
    assert [line for line in here_err if line.startswith("now in")] == [
        "now in main', 37 tokens",
        "now in main'', 37 tokens",
    ]
    assert "there is no branch 'nothing'; there are: 'main'" in here_err


def test_a_system_message_comes_before_all_turns(chat_folder: Path) -> None:
    with LLM(chat_folder, **OPTIONS) as llm:
        params = llm.default_params.replace(**FIELDS)
        chat = TerminalChat(LocalBackend(llm, FIELDS), None, "Be brief.")

        def messages(system: str, *lines: str) -> list[dict[str, str]]:
            said = [turn for turn in chat._branch.turns if turn.line in lines]
            spoken = [
                {"role": role, "content": text}
                for turn in said
                for role, text in (("user", turn.line), ("assistant", turn.answer))
            ]
            return [{"role": "system", "content": system}, *spoken][: 2 * len(lines)]

        def prompt(system: str, *lines: str) -> list[int]:
            (output,) = llm.chat(messages(system, *lines), params)
            return list(output.prompt_token_ids)

        for line in ("one", "two"):
            chat.take(line)
        wanted = prompt("Be brief.", "one", "two")
        assert chat._session.tokens[: len(wanted)] == wanted
        chat.take("/system Be long.")
        chat.take("three")
        assert "Be brief." not in chat._session.text
        wanted = prompt("Be long.", "one", "two", "three")
        assert chat._session.tokens[: len(wanted)] == wanted
        chat.take("/rewind 3")
        chat.take("one")
        wanted = prompt("Be long.", "one")
        assert chat._session.tokens[: len(wanted)] == wanted
        chat.take("/new")
        chat.take("one")
        assert chat._session.tokens[: len(wanted)] == wanted


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_chat_goes_on_from_its_file(chat_folder: Path, chat_llm: AsyncLLM, tmp_path: Path, where: str) -> None:
    def told(backend: Any) -> None:
        chat = TerminalChat(backend, None, "Be brief.")
        for line in ("one", "two", f"/save {tmp_path / 'a.quire'}", "three", "four", "/rewind", "five"):
            chat.take(line)
        said = [turn.answer for turn in chat._branch.turns]
        length, text = len(chat._session), chat._session.text
        other = TerminalChat(backend)
        for line in (f"/load {tmp_path / 'a.quire'}", "three", "four", "/rewind", "five"):
            other.take(line)
        assert [turn.answer for turn in other._branch.turns] == said
        assert (len(other._session), other._session.text) == (length, text)

    if where == "here":
        with LLM(chat_folder, **OPTIONS) as llm:
            told(LocalBackend(llm, FIELDS))
    else:
        with serving(chat_llm) as served:
            told(RemoteBackend(RemoteModel(Link(served.url)), FIELDS))


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_loaded_chat_has_its_turns(chat_folder: Path, chat_llm: AsyncLLM, tmp_path: Path, where: str) -> None:
    """Its last answer goes on, and turns are taken back, until nothing but the system message is
    left."""

    def told(backend: Any) -> None:
        file = tmp_path / "a.quire"
        chat, other = TerminalChat(backend, None, "Be brief."), TerminalChat(backend)
        for line in ("one", "two", "/continue", f"/save {file}"):
            chat.take(line)
        other.take(f"/load {file}")
        for lines in (("/continue",), ("/rewind", "three"), ("/again",), ("/drop", "/system Be long.", "four")):
            for line in lines:
                chat.take(line)
                other.take(line)
            assert other._session.text == chat._session.text
            assert said(other) == said(chat)
        assert [line for line, _ in said(other)] == ["three", "four"]
        other.take(f"/load {file}")
        with pytest.raises(InvalidArgument, match=r"1\.\.2 turns can be taken back"):
            other.take("/rewind 3")
        other.take("/rewind 2")
        assert len(other._session) == 0
        other.take("one")
        assert "Be brief." in other._session.text

    def said(chat: TerminalChat) -> list[tuple[str, str]]:
        return [(turn.line, turn.answer) for turn in chat._branch.turns]

    if where == "here":
        with LLM(chat_folder, **OPTIONS) as llm:
            told(LocalBackend(llm, FIELDS))
    else:
        with serving(chat_llm) as served:
            told(RemoteBackend(RemoteModel(Link(served.url)), FIELDS))


def test_loaded_text_that_is_no_such_chat_goes_on(chat_folder: Path, tmp_path: Path) -> None:
    """It has no turns, as taking one back would lose what stands before or between them."""
    user, assistant = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}
    with LLM(chat_folder, **OPTIONS) as llm:
        params = llm.default_params.replace(**FIELDS)
        chat = TerminalChat(LocalBackend(llm, FIELDS))
        for number, (text, messages) in enumerate(
            (
                ("Some text.", [user]),
                ("", [user, user]),
                ("", [user, assistant, assistant, user]),
                ("", [{**user, "name": "Ann"}]),
                ("", [{**user, "content": [{"type": "text", "text": "one"}]}]),
                ("Some text.", []),
            )
        ):
            with llm.session(text) as session:
                if messages:
                    session.chat(messages, params)
                session.save(tmp_path / f"{number}.quire")
            chat.take(f"/load {tmp_path / f'{number}.quire'}")
            before = chat._session.text
            chat.take("/continue")
            assert len(chat._session.text) > len(before)
            assert chat._session.text.startswith(before)
            with pytest.raises(InvalidArgument, match="there are 0 turns to take back"):
                chat.take("/rewind")


def test_an_answer_is_given_again_as_sampling_was_set(plain_folder: Path) -> None:
    with LLM(plain_folder, **OPTIONS) as llm:
        chat = TerminalChat(LocalBackend(llm, {"temperature": 0, "max_tokens": 6, "ignore_eos": True}))
        chat.take("def add(a, b):")
        first, count = chat._branch.turns[0], len(chat._session)
        chat.take("/again")
        assert [turn.answer for turn in chat._branch.turns] == [first.answer]
        chat.take("/set max_tokens 2")
        chat.take("/again")
        assert len(chat._session) == count - 4
        chat.take("/set stop ab")
        chat.take("/set top_p 0.5")
        assert chat._backend.fields["stop"] == "ab"
        for bad in ("/set nonsense 1", "/set nonsense", "/set top_p 3", "/set top_p hot"):
            with pytest.raises(InvalidArgument, match=r"nonsense|top_p"):
                chat.take(bad)
        assert chat._backend.fields["top_p"] == 0.5
        assert "temperature" in chat._completions("/set t")


@pytest.mark.parametrize("where", ["here", "there"])
def test_the_values_in_force_are_shown_and_reset(
    chat_folder: Path, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(chat_folder, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "max_new_tokens": 99}')

    def told(backend: Any) -> None:
        chat = TerminalChat(backend)

        def said(command: str) -> str:
            capsys.readouterr()
            chat.take(command)
            return capsys.readouterr().err

        shown = said("/set").splitlines()
        assert [line.split()[0] for line in shown] == chat_fields()
        assert {"temperature 0.6", "top_k 20", "top_p 0.5", "seed null"} <= set(shown)
        assert said("/set temperature") == "temperature 0.6\n"
        assert said("/set temperature 0.1") == said("/set temperature") == "temperature 0.1\n"
        assert said("/set temperature default") == said("/set  temperature ") == "temperature 0.6\n"
        assert said("/set top_p default") == "top_p 1.0\n"  # without the option that the chat began with
        with pytest.raises(InvalidArgument, match=r"min_tokens must be in 0\.\.max_tokens"):
            said("/set max_tokens 3")
        assert said("/set max_tokens") == "max_tokens 30\n"
        assert said("/set min_tokens default") == "min_tokens 0\n"
        assert said("/set max_tokens 3") == "max_tokens 3\n"

    fields = {"top_p": 0.5, "min_tokens": 20, "max_tokens": 30}
    if where == "here":
        with LLM(folder, **OPTIONS) as llm:
            told(LocalBackend(llm, fields))
    else:
        served_llm = AsyncLLM(folder, **OPTIONS)
        with serving(served_llm) as served:
            told(RemoteBackend(RemoteModel(Link(served.url)), fields))
        asyncio.run(served_llm.close())


def test_text_without_a_template_has_no_system_message(plain_folder: Path) -> None:
    with (
        LLM(plain_folder, **OPTIONS) as llm,
        pytest.raises(Unsupported, match="--system: this model has no chat template"),
    ):
        TerminalChat(LocalBackend(llm, FIELDS), None, "Be brief.")
