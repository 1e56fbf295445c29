"""Sessions of clients outlive the server, however it ends."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from quire import LLM, AsyncLLM, SamplingParams
from quire.cli.main import app
from quire.models.catalogue import bundled_adapters
from quire.server.http.settings import ServerSettings
from quire.sessions.session import Session
from quire.store.journal import FILE, Lifetime, Use

from .conftest import OPTIONS, STATE_FILE, Served, serving, wait_for
from .killable import Killable, killable

SMALL = {**OPTIONS, "kv_cache_memory": "16MiB"}
PROMPT = "class Stack:\n    def __init__(self):\n"
GREEDY = {"temperature": 0, "ignore_eos": True}
Tokens = list[int]


@pytest.fixture(scope="module")
def oracle(plain_folder: Path) -> Iterator[LLM]:
    """The model in this program, without interruptions."""
    with LLM(plain_folder, **OPTIONS) as found:
        yield found


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def made(client: httpx.Client, **body: Any) -> str:
    return str(ok(client.post("/v1/sessions", json={"prompt": PROMPT, **body}))["id"])


def tokens_of(client: httpx.Client, name: str) -> Tokens:
    return list(ok(client.get(f"/v1/sessions/{name}"))["tokens"])


def continuation(llm: LLM, tokens: Tokens, count: int) -> Tokens:
    return llm.generate([tokens], SamplingParams(max_tokens=count, **GREEDY))[0].outputs[0].token_ids


def turn(client: httpx.Client, name: str, count: int = 4, **more: Any) -> Tokens:
    answer = ok(client.post(f"/v1/sessions/{name}/generate", json={**GREEDY, "max_tokens": count, **more}))
    return list(answer["choices"][0]["token_ids"])


def error(answer: httpx.Response) -> tuple[int, str, str]:
    found = answer.json()["error"]
    return answer.status_code, found["code"], found["message"]


# -- kill -9 ---------------------------------------------------------------------------------------


LONG = [[number, *range(20, 90)] for number in range(5)]
"""Prompts that are sent again and again, and whose state is worth a load."""


class Client(threading.Thread):
    """A client that makes calls on sessions, commits them, and sends prompts until the server is
    gone. For each session and each branch it knows what it was told, and what it will be told next.
    """

    def __init__(self, url: str, oracle: LLM, known: dict[str, Tokens], branches: dict[str, Tokens], seed: int) -> None:
        super().__init__(name="test-client")
        self.url, self.oracle, self.dice = url, oracle, random.Random(seed)
        self.known, self.branches = known, branches
        self.moving: dict[str, Tokens] = {}
        """The tokens of a branch of which a commit is under way."""
        self.coming: dict[str, Tokens | None] = {}
        """The tokens of a session for which a call is under way; None: it is being deleted."""
        self.making = 0
        self.calls = 0
        """How many were answered."""
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self.url, timeout=120, trust_env=False) as client:
                while True:
                    self.call(client)
                    self.calls += 1
        except httpx.TransportError:
            pass  # the server is gone
        except BaseException as failure:
            self.failure = failure

    def call(self, client: httpx.Client) -> None:
        kind = self.dice.randrange(10)
        if len(self.known) < 3 or kind == 7:
            self.making = 1
            name = made(client, prompt=[1, 2, 3])
            self.known[name], self.making = [1, 2, 3], 0
            return
        name = self.dice.choice(list(self.known))
        tokens = self.known[name]
        path = f"/v1/sessions/{name}"
        if kind == 8:
            branch = self.dice.choice(["main", "side"])
            self.moving[branch] = tokens
            ok(client.post(f"{path}/commit", json={"name": branch, "force": True}))
            self.branches[branch] = self.moving.pop(branch)
        elif kind == 9:
            ask(client, self.oracle, self.dice.choice(LONG))
        if kind >= 8:
            return
        if kind < 3 or len(tokens) > 60:
            count = self.dice.randrange(1, 5)
            self.coming[name] = [*tokens, *continuation(self.oracle, tokens, count)]
            body = {**GREEDY, "max_tokens": count, "stream": kind == 0}
            answer = client.post(f"{path}/generate", json=body)
            assert answer.status_code == 200
            assert kind != 0 or answer.text.endswith("data: [DONE]\n\n")
        elif kind == 3:
            self.coming[name] = [*tokens, 5, 6]
            ok(client.post(f"{path}/append", json={"tokens": [5, 6]}))
        elif kind == 4 and len(tokens) > 3:
            self.coming[name] = tokens[:-1]
            ok(client.post(f"{path}/rewind", json={"n": 1}))
        elif kind == 5 and self.dice.random() < 0.5:
            self.coming[name] = [*tokens[:1], 8, *tokens[2:]]
            ok(client.post(f"{path}/edit", json={"span": [1, 2], "tokens": [8]}))
        elif kind == 5:
            self.making = 2
            for child in ok(client.post(f"{path}/fork", json={"n": 2}))["ids"]:
                self.known[child] = tokens
            self.making = 0
            return
        elif len(self.known) > 6:
            self.coming[name] = None
            ok(client.delete(path))
        else:
            ok(client.post(f"{path}/score", json={"tokens": [4]}))
            return
        result = self.coming.pop(name)
        if result is None:
            del self.known[name]
        else:
            self.known[name] = result


def ask(client: httpx.Client, oracle: LLM, prompt: Tokens) -> int:
    """Check what a prompt gives; return how many of its tokens came from the disk."""
    answer = ok(client.post("/v1/completions", json={**GREEDY, "model": "m", "prompt": prompt, "max_tokens": 3}))
    (output,) = oracle.generate([prompt], SamplingParams(max_tokens=3, **GREEDY))
    assert answer["choices"][0]["text"] == output.outputs[0].text
    return int(answer["quire"]["reuse"]["by_tier"].get("disk", 0))


def check_branches(found: Killable, last: Client) -> None:
    """Each branch stands at the commit that its client was told of, or at the one under way."""
    names = {one["name"] for one in ok(found.client.get("/v1/branches"))["data"]}
    assert set(last.branches) <= names <= {*last.branches, *last.moving}
    for branch in names:
        made = ok(found.client.post("/v1/sessions/checkout", json={"branch": branch}))["id"]
        now = tokens_of(found.client, made)
        assert now in [one for one in (last.branches.get(branch), last.moving.get(branch)) if one is not None]
        last.branches[branch], last.known[made] = now, now


def check_sessions(found: Killable, last: Client) -> None:
    """Each session is as its client was last told, or as the call would have left it that the
    client was told nothing of.
    """
    listed = {one["id"] for one in ok(found.client.get("/v1/sessions?limit=1000"))["data"]}
    gone = {name for name, tokens in last.coming.items() if tokens is None} - listed
    for name in gone:
        del last.known[name]
    assert set(last.known) <= listed
    surplus = listed - set(last.known)
    assert len(surplus) <= last.making
    for name in surplus:
        ok(found.client.delete(f"/v1/sessions/{name}"))
    for name, tokens in last.known.items():
        now = tokens_of(found.client, name)
        assert now in [one for one in (tokens, last.coming.get(name)) if one is not None]
        last.known[name] = now


def kill_and_resume(model: Path, folder: Path, oracle: LLM, rounds: int, seed: int) -> None:
    dice, known, branches = random.Random(seed), dict[str, Tokens](), dict[str, Tokens]()
    last: Client | None = None
    answered = committed = loaded = 0
    for number in range(rounds):
        with killable(model, folder / "state", options=SMALL, served_model_name="m") as found:
            if last is None:
                ask(found.client, oracle, LONG[0])
                wait_for(lambda: any((folder / "state/store").rglob("*-rows-*.quire")))
            else:
                check_sessions(found, last)
                check_branches(found, last)
                loaded += ask(found.client, oracle, LONG[0])
                ask(found.client, oracle, dice.choice(LONG))
            if known:
                name = dice.choice(list(known))
                assert turn(found.client, name) == continuation(oracle, known[name], 4)
                known[name] = tokens_of(found.client, name)
            last = Client(found.url, oracle, known, branches, seed + number)
            last.start()
            # By calls and not by the clock, so that a busy machine comes as far.
            wanted = dice.randrange(24)
            wait_for(lambda last=last, wanted=wanted: last.calls >= wanted or not last.is_alive())
            time.sleep(dice.uniform(0, 0.03))
            found.kill()
            last.join(60)
            assert not last.is_alive()
            if last.failure is not None:
                raise last.failure
            answered += sum(map(len, known.values()))
            committed += len(branches)
    assert answered, "no call was answered in all rounds"
    assert committed, "no commit was answered in all rounds"
    assert loaded, "no state came from the disk in all rounds"


def test_kill(plain_folder: Path, oracle: LLM, tmp_path: Path) -> None:
    kill_and_resume(plain_folder, tmp_path, oracle, 3, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(40))
def test_kill_a_thousand_times(plain_folder: Path, oracle: LLM, tmp_path: Path, seed: int) -> None:
    kill_and_resume(plain_folder, tmp_path, oracle, 26, 100 * seed + 7)


@pytest.mark.parametrize("ending", ["kill", "terminate"])
def test_a_chat_client_that_sends_its_history_again(chat_folder: Path, tmp_path: Path, ending: str) -> None:
    """It knows nothing of sessions. Its history is loaded and not computed."""
    openai = pytest.importorskip("openai")
    messages = [{"role": "user", "content": "def area(width, height):\n    return width * height\n\n" * 6}]
    states = tmp_path / "state/store"

    def asked(found: Killable) -> Any:
        with openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", timeout=60) as client:
            answer = client.chat.completions.create(
                model="tiny-chat", messages=messages, temperature=0, max_tokens=12, extra_body={"ignore_eos": True}
            )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return answer

    def is_written(tokens: int) -> bool:
        """Whether the rows of so many tokens are durable."""
        counts = [int(path.name.split("-rows-")[1].split("-")[0]) for path in states.rglob("*-rows-*.quire")]
        return max(counts, default=0) >= tokens

    with killable(chat_folder, tmp_path / "state", options=SMALL, served_model_name="tiny-chat") as found:
        first = asked(found)
        computed = first.usage.total_tokens - 1
        assert 64 < computed < 256
        if ending == "kill":
            wait_for(lambda: is_written(computed))
            found.kill()
        else:
            assert found.terminate() == 0
            assert is_written(computed)
    messages.append({"role": "user", "content": "print(area(2, 3))"})
    with killable(chat_folder, tmp_path / "state", options=SMALL, served_model_name="tiny-chat") as found:
        second = asked(found)
        reuse = second.quire["reuse"]
        assert set(reuse["by_tier"]) == {"disk"}
        # All of the prompt, and the answer as far as the template writes it as the model did.
        assert reuse["cached"] >= first.usage.prompt_tokens
        text = found.client.get("/metrics").text
        assert f'quire:prompt_tokens_reused_total{{tier="disk"}} {reuse["cached"]}' in text
    with LLM(chat_folder, **OPTIONS) as oracle:
        params = SamplingParams(max_tokens=12, **GREEDY)
        wanted = [oracle.chat(messages[:end], params)[0].outputs[0].text for end in (1, 3)]
    assert [first.choices[0].message.content, second.choices[0].message.content] == wanted


# -- SIGTERM ---------------------------------------------------------------------------------------


def told_of(client: httpx.Client, name: str, told: Tokens, **body: Any) -> str:
    """Read a stream as far as it comes, and return its last event."""
    last = ""
    body = {**GREEDY, "stream": True, "max_tokens": 2000, **body}
    try:
        with client.stream("POST", f"/v1/sessions/{name}/generate", json=body) as answer:
            for line in answer.iter_lines():
                last = line or last
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
                        told += choice["token_ids"]
    except httpx.TransportError:
        pass
    return last


def test_what_streams_when_the_server_is_told_to_stop(plain_folder: Path, oracle: LLM, tmp_path: Path) -> None:
    """It is cut off after ``drain_seconds``, and the session has what the client was told."""
    folder = tmp_path / "state"
    with killable(plain_folder, folder, options=SMALL, drain_seconds=0.2) as found:
        names = [made(found.client, prompt=[number, 5, 6]) for number in range(3)]
        told: list[Tokens] = [[] for _ in names]
        streams = [
            threading.Thread(target=told_of, args=(found.client, name, one))
            for name, one in zip(names, told, strict=True)
        ]
        for thread in streams:
            thread.start()
        wait_for(lambda: all(map(len, told)))
        assert found.terminate() == 0
        for thread in streams:
            thread.join(20)
    with killable(plain_folder, folder, options=SMALL) as found:
        for number, (name, one) in enumerate(zip(names, told, strict=True)):
            now = tokens_of(found.client, name)
            assert now[: 3 + len(one)] == [number, 5, 6, *one]
            assert now[3:] == continuation(oracle, now[:3], len(now) - 3)
            assert turn(found.client, name) == continuation(oracle, now, 4)


def test_what_ends_in_time_is_whole(plain_folder: Path, oracle: LLM, tmp_path: Path) -> None:
    folder, told = tmp_path / "state", Tokens()
    with killable(plain_folder, folder, options=SMALL, drain_seconds=30) as found:
        name = made(found.client, prompt=[4, 5, 6])
        ends: list[str] = []
        thread = threading.Thread(target=lambda: ends.append(told_of(found.client, name, told, max_tokens=200)))
        thread.start()
        wait_for(lambda: len(told) > 3)
        assert found.terminate() == 0
        thread.join(20)
        assert (ends, len(told)) == (["data: [DONE]"], 200)
    with killable(plain_folder, folder, options=SMALL) as found:
        assert tokens_of(found.client, name) == [4, 5, 6, *told]


def test_a_second_signal_ends_at_once(plain_folder: Path, oracle: LLM, tmp_path: Path) -> None:
    folder, told = tmp_path / "state", Tokens()
    with killable(plain_folder, folder, options=SMALL, drain_seconds=600) as found:
        name = made(found.client, prompt=[4, 5, 6])
        thread = threading.Thread(target=told_of, args=(found.client, name, told))
        thread.start()
        wait_for(lambda: len(told) > 3)
        began = time.monotonic()
        threading.Timer(0.2, lambda: os.kill(found.process.pid or 0, signal.SIGINT)).start()
        assert found.terminate() == 0
        assert time.monotonic() - began < 20
        thread.join(20)
    with killable(plain_folder, folder, options=SMALL) as found:
        assert tokens_of(found.client, name)[: 3 + len(told)] == [4, 5, 6, *told]


# -- in this process -------------------------------------------------------------------------------


@pytest.fixture
def kept_llm(plain_folder: Path, tmp_path: Path) -> Iterator[AsyncLLM]:
    found = AsyncLLM(plain_folder, state_dir=tmp_path / "state", **SMALL)
    yield found
    asyncio.run(found.close())


@contextmanager
def served(llm: AsyncLLM, key: str | None = None, **settings: Any) -> Iterator[Served]:
    """One life of a server; its sessions go on in the next one over the same journal."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with serving(llm, ServerSettings(**settings), **headers) as found:
        yield found


def kept_of(llm: AsyncLLM) -> Any:
    assert llm.kept is not None
    return llm.kept


def test_a_session_is_what_it_was(kept_llm: AsyncLLM) -> None:
    with served(kept_llm) as found:
        parent = made(found.client, name="one", labels={"task": "42"}, ttl=500, window=64, sink=2)
        turn(found.client, parent)
        (child,) = ok(found.client.post(f"/v1/sessions/{parent}/fork", json={"at": 5, "labels": {}}))["ids"]
        pinned = made(found.client, pin=True, cache_salt="x")
        before = [ok(found.client.get(f"/v1/sessions/{name}")) for name in (parent, child, pinned)]
        keys = [held.session._session._branch.key for held in found.context.sessions.of("")]
    with served(kept_llm) as found:
        after = [ok(found.client.get(f"/v1/sessions/{name}")) for name in (parent, child, pinned)]
        statements: list[str] = []
        kept_of(kept_llm).journal._db.set_trace_callback(statements.append)
        ok(found.client.post(f"/v1/sessions/{parent}/score", json={"tokens": [1]}))
        wait_for(lambda: "COMMIT" in statements)
        assert not any("tokens" in one for one in statements), "only the time of its use has changed"
        for one, other in zip(before, after, strict=True):
            own = {"num_computed", "pages", "shared_pages", "rewind_costs", "ttl_left"}
            assert {name: one[name] for name in one.keys() - own} == {name: other[name] for name in one.keys() - own}
            assert 0 < other["ttl_left"] <= one["ttl_left"]
        listed = ok(found.client.get("/v1/sessions?label=task=42"))["data"]
        assert [one["id"] for one in listed] == [parent]
        assert [held.session._session._branch.key for held in found.context.sessions.of("")] == keys
        for name in (parent, child, pinned):
            ok(found.client.delete(f"/v1/sessions/{name}"))
    with served(kept_llm) as found:
        assert ok(found.client.get("/v1/sessions"))["data"] == []


def test_chats_go_on(chat_folder: Path, tmp_path: Path) -> None:
    def say(client: httpx.Client, session_id: str, text: str) -> str:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 6, **GREEDY, "session_id": session_id}
        return str(ok(client.post("/v1/chat/completions", json=body))["choices"][0]["message"]["content"])

    llm = AsyncLLM(chat_folder, state_dir=tmp_path, **SMALL)
    try:
        with served(llm) as found:
            name, whole = (made(found.client, prompt=[]) for _ in range(2))
            for one in (name, whole):
                say(found.client, one, "def f(x):")
            wanted = say(found.client, whole, "return")
        with served(llm) as found:
            assert say(found.client, name, "return") == wanted
            assert tokens_of(found.client, name) == tokens_of(found.client, whole)
    finally:
        asyncio.run(llm.close())


def test_each_key_has_its_own(kept_llm: AsyncLLM, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"api_key": ("first-key", "second-key")}
    with served(kept_llm, "first-key", **keys) as found:
        name = made(found.client, cache_salt="secret")
        key = found.context.sessions.of(hashlib.sha256(b"first-key").hexdigest())[0].session._session._branch.key
    written = b"".join(path.read_bytes() for path in (tmp_path / "state").glob(f"{FILE}*"))
    assert name.encode() in written
    for text in (
        b"first-key",
        hashlib.sha256(b"first-key").hexdigest().encode(),
        hashlib.sha256(b"first-key").digest(),
    ):
        assert text not in written
    with served(kept_llm, "second-key", **keys) as found:
        unknown = name[:-4] + "0000"
        answers = [error(found.client.get(f"/v1/sessions/{one}")) for one in (name, unknown)]
        assert answers[0] == (404, "not_found", answers[1][2].replace(unknown, name))
        assert ok(found.client.get("/v1/sessions"))["data"] == []
    with served(kept_llm, "second-key", api_key=("second-key",)) as found:
        assert error(found.client.get(f"/v1/sessions/{name}"))[:2] == (404, "not_found")
    with served(kept_llm) as found:
        assert error(found.client.get(f"/v1/sessions/{name}"))[:2] == (404, "not_found")
    with served(kept_llm, "first-key", **keys) as found:
        assert tokens_of(found.client, name)
        (held,) = found.context.sessions.of(hashlib.sha256(b"first-key").hexdigest())
        assert held.session._session._branch.key == key


def test_another_model(kept_llm: AsyncLLM, llm: AsyncLLM, tmp_path: Path) -> None:
    """What is another model's stays in the journal. Its owner is told why it cannot go on."""
    keys: dict[str, Any] = {"api_key": ("first", "second")}
    with served(kept_llm, "first", **keys) as found:
        name = made(found.client)
    asyncio.run(kept_llm.close())
    other = AsyncLLM("tiny-python", state_dir=tmp_path / "state", **SMALL)
    try:
        with served(other, "first", **keys) as found:
            path = f"/v1/sessions/{name}"
            for answer in (
                found.client.get(path),
                found.client.delete(path),
                found.client.post(f"{path}/append", json={"text": "x"}),
                found.client.post("/v1/completions", json={"prompt": "x", "session_id": name}),
                found.client.post("/v1/sessions/generate", json={"ids": [name]}),
            ):
                status, code, message = error(answer)
                assert (status, code) == (404, "not_found")
                assert "made by another model (config " in message
            assert ok(found.client.get("/v1/sessions"))["data"] == []
            headers = {"authorization": "Bearer second"}
            assert "another model" not in found.client.get(path, headers=headers).text
    finally:
        asyncio.run(other.close())


def test_an_adapter_that_comes_later(tmp_path: Path) -> None:
    where = str(bundled_adapters()["tiny-python-docstrings"])
    llm = AsyncLLM("tiny-python", state_dir=tmp_path, adapters={"docs": where}, **SMALL)
    with served(llm) as found:
        name = made(found.client, model="docs")
        turn(found.client, name)
        tokens = tokens_of(found.client, name)
        (child,) = ok(found.client.post(f"/v1/sessions/{name}/fork", json={}))["ids"]
        wanted = turn(found.client, child, 8)
    asyncio.run(llm.close())
    llm = AsyncLLM("tiny-python", state_dir=tmp_path, **SMALL)
    try:
        with served(llm) as found:
            status, code, message = error(found.client.get(f"/v1/sessions/{name}"))
            assert (status, code) == (400, "invalid_argument")
            assert "load that adapter first" in message
            assert str(tmp_path) not in message
            ok(
                found.client.post(
                    "/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "tiny-python-docstrings"}
                )
            )
            assert tokens_of(found.client, name) == tokens
            assert turn(found.client, name, 8) == wanted
    finally:
        asyncio.run(llm.close())


def test_what_tokens_do_not_give(kept_llm: AsyncLLM, oracle: LLM, tmp_path: Path) -> None:
    with oracle.session([4, 5, 6, 7]) as changed:
        changed.set_kv(0, start=0, v=changed.kv(0)["v"] * -3)
        data = changed.to_bytes()
        changed.generate(SamplingParams(max_tokens=4, **GREEDY))
        wanted = changed.generate(SamplingParams(max_tokens=9, **GREEDY)).outputs[0].token_ids
        assert wanted != continuation(oracle, changed.tokens[:8], 9)
    with served(kept_llm) as found:
        name = ok(found.client.post("/v1/sessions/state", content=data, headers=STATE_FILE))["id"]
        turn(found.client, name)
        found.client.post(f"/v1/sessions/{name}/score", json={"tokens": [1]})
        (path,) = (tmp_path / "state/states").iterdir()
        assert path.name.startswith(name)
    with served(kept_llm) as found:
        described = ok(found.client.get(f"/v1/sessions/{name}"))
        assert (described["modified"], described["pinned"]) == (True, True)
        assert turn(found.client, name, 9) == wanted
        (path,) = (tmp_path / "state/states").iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    with served(kept_llm) as found:
        status, code, message = error(found.client.get(f"/v1/sessions/{name}"))
        assert (status, code) == (500, "store_damaged")
        assert str(tmp_path) not in message


@pytest.mark.parametrize("with_state", [False, True])
def test_what_is_deleted_while_it_runs(
    kept_llm: AsyncLLM, oracle: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_state: bool
) -> None:
    """Also while its state file is being written, after which there is no record to write."""
    with oracle.session([4, 5, 6, 7]) as changed:
        if with_state:
            changed.set_kv(0, start=0, v=changed.kv(0)["v"] * -3)
        data = changed.to_bytes()
    with served(kept_llm) as found:
        name = ok(found.client.post("/v1/sessions/state", content=data, headers=STATE_FILE))["id"]
        began, go_on = threading.Event(), threading.Event()
        save = Session.save

        def slow(self: Any, path: Any, **options: Any) -> None:
            save(self, path, **options)
            began.set()
            go_on.wait(20)

        monkeypatch.setattr(Session, "save", slow)
        told = Tokens()
        thread = threading.Thread(
            target=told_of, args=(found.client, name, told), kwargs={"max_tokens": 2 if with_state else 2000}
        )
        thread.start()
        wait_for(lambda: began.is_set() or len(told) > 3)
        deleting = threading.Thread(target=lambda: ok(found.client.delete(f"/v1/sessions/{name}")))
        deleting.start()
        wait_for(lambda: kept_of(kept_llm).journal.get(name) is None)
        go_on.set()
        for one in (thread, deleting):
            one.join(30)
            assert not one.is_alive()
    assert kept_of(kept_llm).journal.get(name) is None
    assert list((tmp_path / "state/states").iterdir()) == []


# -- time ------------------------------------------------------------------------------------------


def lifetimes(llm: AsyncLLM, change: Callable[[Lifetime], Lifetime]) -> None:
    """Change what the journal says of times."""
    kept = kept_of(llm)
    kept.writer.wait()
    kept.journal.write([Use(one.id, change(one.lifetime)) for one in kept.journal.records()])


def moved(lifetime: Lifetime, **changes: Any) -> Lifetime:
    return Lifetime(changes.pop("left", lifetime.left), lifetime.at._replace(**changes))


def left_of(found: Served, name: str) -> float:
    return float(ok(found.client.get(f"/v1/sessions/{name}"))["ttl_left"])


def test_a_life_goes_on_while_the_server_is_down(kept_llm: AsyncLLM) -> None:
    with served(kept_llm) as found:
        short, long = made(found.client, ttl=50), made(found.client, ttl=5000)
    lifetimes(kept_llm, lambda one: moved(one, uptime=one.at.uptime - 100))
    with served(kept_llm) as found:
        assert error(found.client.get(f"/v1/sessions/{short}"))[0] == 404
        assert 4800 < left_of(found, long) <= 4900
    assert kept_of(kept_llm).journal.get(short) is None
    with served(kept_llm) as found:
        # Counted on from there, though it was not used.
        assert 4800 < left_of(found, long) <= 4900
        turn(found.client, long)
        assert 4900 < left_of(found, long) <= 5000


def test_a_clock_that_jumps(kept_llm: AsyncLLM) -> None:
    with served(kept_llm) as found:
        name = made(found.client, ttl=50)
    for jump in (1e9, -1e9):  # the clock was set while the machine ran
        lifetimes(kept_llm, lambda one, jump=jump: moved(one, wall=one.at.wall + jump))
        with served(kept_llm) as found:
            assert 30 < left_of(found, name) <= 50
    # The machine was started again with its clock far behind: that is no time at all, but once.
    lifetimes(kept_llm, lambda one: moved(one, left=40.0, boot="another", wall=one.at.wall + 1e9))
    with served(kept_llm) as found:
        assert 20 < left_of(found, name) <= 40
    assert kept_of(kept_llm).journal.get(name).lifetime.at.wall < time.time() + 10
    # Nothing lives longer than its ttl, whatever is written.
    lifetimes(kept_llm, lambda one: moved(one, left=1e9))
    with served(kept_llm) as found:
        assert left_of(found, name) <= 50


def test_what_expires_is_forgotten(kept_llm: AsyncLLM) -> None:
    with served(kept_llm) as found:
        name = made(found.client, ttl=0.05)
        wait_for(lambda: kept_of(kept_llm).journal.get(name) is None)


# -- disks -----------------------------------------------------------------------------------------


def test_a_full_disk(kept_llm: AsyncLLM, oracle: LLM, caplog: pytest.LogCaptureFixture) -> None:
    database = kept_of(kept_llm).journal._db
    caplog.set_level(logging.WARNING, "quire.server")
    with served(kept_llm) as found:
        client = found.client
        name, _ = made(client), made(client, prompt=[1] * 1500)
        ((pages,),) = database.execute("PRAGMA page_count").fetchall()
        database.execute(f"PRAGMA max_page_count = {pages}")
        long = {"tokens": [5] * 1000}
        answer = client.post(f"/v1/sessions/{name}/append", json=long)
        assert error(answer)[:2] == (507, "not_durable")
        assert answer.headers["x-should-retry"] == "false"
        # It took effect, as the message says; what comes next is refused before it begins.
        assert "took effect" in error(answer)[2]
        assert "repeat" not in error(answer)[2]
        held = tokens_of(client, name)
        assert held[-1000:] == [5] * 1000
        status, code, message = error(client.post(f"/v1/sessions/{name}/append", json=long))
        assert (status, code) == (507, "not_durable")
        assert "was not begun" in message
        assert tokens_of(client, name) == held
        assert error(client.post("/v1/sessions", json={"prompt": [1] * 1500}))[:2] == (507, "not_durable")
        stream = client.post(f"/v1/sessions/{name}/generate", json={"stream": True, "max_tokens": 2, **GREEDY})
        assert error(stream)[:2] == (507, "not_durable")
        ok(client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}))
        assert len(ok(client.get("/v1/sessions"))["data"]) == 2
        database.execute(f"PRAGMA max_page_count = {pages + 1000}")
        assert turn(client, name) == continuation(oracle, held, 4)
    told = [json.loads(one.getMessage())["event"] for one in caplog.records]
    assert told == ["sessions_not_written", "sessions_written_again"], "once, however many calls are refused"
    with served(kept_llm) as found:
        assert tokens_of(found.client, name)[: len(held)] == held


def test_a_disk_that_fills_during_a_stream(kept_llm: AsyncLLM) -> None:
    database = kept_of(kept_llm).journal._db
    with served(kept_llm) as found:
        name = made(found.client, prompt=[1] * 700)
        ((pages,),) = database.execute("PRAGMA page_count").fetchall()
        database.execute(f"PRAGMA max_page_count = {pages}")
        body = {"stream": True, "max_tokens": 300, **GREEDY}
        answer = found.client.post(f"/v1/sessions/{name}/generate", json=body)
        events = [line for line in answer.text.splitlines() if line]
        assert (answer.status_code, events[-1]) == (200, "data: [DONE]")
        told = json.loads(events[-2].removeprefix("data: "))["error"]
        assert told["code"] == "not_durable"
        assert "took effect" in told["message"]
        assert '"finish_reason":"length"' not in answer.text
        database.execute(f"PRAGMA max_page_count = {pages + 1000}")
        turn(found.client, name)


def test_files_that_may_not_grow(plain_folder: Path, oracle: LLM, tmp_path: Path) -> None:
    """The system refuses to write, in whatever place that is."""
    folder = tmp_path / "state"
    with killable(plain_folder, folder, options=SMALL, largest_file=400_000) as found:
        name, tokens, answer = made(found.client, prompt=[1]), [1], None
        while answer is None or answer.status_code == 200:
            answer = found.client.post(f"/v1/sessions/{name}/append", json={"tokens": [7] * 40})
            tokens += [7] * 40 * (answer.status_code == 200)
        assert error(answer)[:2] == (507, "not_durable")
        assert len(tokens) > 200
        ok(found.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}))
        found.kill()
    with killable(plain_folder, folder, options=SMALL) as found:
        assert tokens_of(found.client, name) == tokens
        assert turn(found.client, name) == continuation(oracle, tokens, 4)


def test_a_damaged_journal(plain_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with killable(plain_folder, folder, options=SMALL) as found:
        names = [made(found.client, prompt=[number] * 2000) for number in range(4)]
        assert found.terminate() == 0
    data = (folder / FILE).read_bytes()
    place = data.index(b"\x02\0\0\0" * 500)
    (folder / FILE).write_bytes(data[: place + 99] + b"\xee" + data[place + 100 :])
    with killable(plain_folder, folder, options=SMALL) as found:
        assert [found.client.get(f"/v1/sessions/{name}").status_code for name in names] == [200, 200, 404, 200]
        assert len(list(folder.glob("*.damaged-*"))) == 1


@pytest.mark.parametrize(
    ("directory", "reason"),
    [
        ("state", "in use by another LLM of this process; close that one, or give each its own directory"),
        ("/proc/quire", "cannot be used: "),
    ],
)
def test_a_directory_that_cannot_be_had(
    kept_llm: AsyncLLM, plain_folder: Path, tmp_path: Path, directory: str, reason: str
) -> None:
    """One sentence and exit code 2, before the model is loaded."""
    arguments = ["serve", str(plain_folder), "--port", "0", "--state-dir", str(tmp_path / directory)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("quire: --state-dir: ")
    assert reason in line
