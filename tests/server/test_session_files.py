"""State files over HTTP: down and up again, files that are wrong, clients that go away; no file is
left anywhere.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.small_llms import make_checkpoint

from quire import LLM, AsyncLLM, SamplingParams
from quire.base.errors import DataLoss
from quire.base.temporary_folders import remove_leftovers
from quire.server.http.errors import hiding
from quire.server.http.settings import ServerSettings
from quire.server.sessions.files import PREFIX, StateFileResponse, TemporaryFile
from quire.server.sessions.held import StoredBytes
from quire.statefile.container import plan_of, read_state, to_bytes
from state_files import MISSING, NOT_A_NUMBER, changed, fields, metadata_of, of_metadata

from .conftest import OPTIONS, STATE_FILE, Served, pages_free, serving, wait_for
from .test_sessions import GREEDY, LONG, PROMPT, info, made, nothing_is_left, ok, post, refused, streaming, user

__all__ = ["nothing_is_left"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files go; none of the server's is left there."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    wait_for(lambda: not left(place))


def left(place: Path) -> list[Path]:
    """The server's files and folders there."""
    return list(place.glob("quire-state-*"))


@pytest.fixture(scope="module")
def state() -> bytes:
    """The file of a session over ``PROMPT`` and 12 tokens more."""
    with LLM("tiny-python", **OPTIONS) as plain, plain.session(PROMPT) as session:
        session.generate(SamplingParams(**GREEDY))
        return session.to_bytes()


def download(client: httpx.Client, session: str) -> bytes:
    answer = client.get(f"/v1/sessions/{session}/state")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == f'attachment; filename="{session}.quire"'
    assert int(answer.headers["content-length"]) == len(answer.content)
    return answer.content


def upload(client: httpx.Client, data: Any, **params: Any) -> httpx.Response:
    return client.post("/v1/sessions/state", content=data, params=params, headers=STATE_FILE)


def test_down_and_up_again(client: httpx.Client, tmp_path: Path) -> None:
    name = made(client, prompt=PROMPT)
    post(client, name, "generate", **GREEDY)
    data = download(client, name)
    (tmp_path / "state.quire").write_bytes(data)
    found = ok(upload(client, data, ttl=77))
    assert found["num_tokens"] == info(client, name)["num_tokens"]
    again = info(client, found["id"])
    assert again["tokens"] == info(client, name)["tokens"]
    assert (again["ttl"], again["parent"]) == (77, None)
    assert again["num_computed"] == again["num_tokens"] - 1
    with LLM("tiny-python", **OPTIONS) as plain, plain.load_session(tmp_path / "state.quire") as session:
        assert session.tokens == again["tokens"]
        expected = session.generate(SamplingParams(**GREEDY)).outputs[0].token_ids
    for one in (name, found["id"]):
        assert post(client, one, "generate", **GREEDY)["choices"][0]["token_ids"] == expected


def test_a_chat_goes_on_from_its_file(chat_client: httpx.Client) -> None:
    name = made(chat_client, messages=[{"role": "system", "content": "Be brief."}, user("def fib(n):")])
    post(chat_client, name, "generate", **GREEDY)
    post(chat_client, name, "generate", messages=[user("fast")], **GREEDY)
    data = download(chat_client, name)
    again = ok(upload(chat_client, data))["id"]
    assert info(chat_client, again)["has_chat"] is True
    messages = info(chat_client, again)["messages"]
    assert [one["role"] for one in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages == info(chat_client, name)["messages"]
    for turn in ("slow", "again"):
        wanted = post(chat_client, name, "generate", messages=[user(turn)], **GREEDY)
        found = post(chat_client, again, "generate", messages=[user(turn)], **GREEDY)
        assert found["choices"][0]["token_ids"] == wanted["choices"][0]["token_ids"]
        assert info(chat_client, again)["tokens"] == info(chat_client, name)["tokens"]
    with read_state(data) as file:
        tensors = {name: file.tensor(name) for name in file.names}
        tensors["chat"] = tensors["chat"][:-1]
        cut = to_bytes(file.metadata, plan_of(tensors), tensors.items())
    assert "the state file is malformed: chat is no JSON" in refused(upload(chat_client, cut), 400)


def test_an_upload_in_pieces(client: httpx.Client, state: bytes) -> None:
    found = ok(upload(client, (state[i : i + 1000] for i in range(0, len(state), 1000))))
    assert download(client, found["id"]) == state


def test_files_that_are_wrong(client: httpx.Client, state: bytes, folder: Path) -> None:
    flipped = bytearray(state)
    flipped[-5] ^= 1
    for data in (state[: len(state) // 2], state[:-1], state[:40], bytes(flipped), b"", b"no state file" * 100):
        message = refused(upload(client, data), 400)
        assert str(folder) not in message
        assert "quire-state" not in message
    assert ok(client.get("/v1/sessions"))["data"] == []


def test_a_file_of_another_model(client: httpx.Client, tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    make_checkpoint("llama", path)
    with LLM(path, device="cpu", dtype="float32", kv_cache_memory="4MiB") as other, other.session([1, 2, 3]) as session:
        data = session.to_bytes()
    message = refused(upload(client, data), 400)
    assert "expected" in message, message
    assert "found" in message, message
    assert ok(client.get("/v1/sessions"))["data"] == []


def test_another_dtype_is_converted_on_request(client: httpx.Client) -> None:
    with LLM("tiny-python", **{**OPTIONS, "kv_dtype": "bfloat16"}) as other, other.session(PROMPT) as session:
        data, tokens = session.to_bytes(), session.tokens
    refused(upload(client, data), 400)
    found = ok(upload(client, data, convert_dtype=True))
    assert info(client, found["id"])["tokens"] == tokens


def test_files_that_are_too_large(llm: AsyncLLM, state: bytes) -> None:
    with serving(llm, ServerSettings(max_upload_bytes=len(state), max_body_bytes=1000)) as found:
        ok(upload(found.client, state))  # other bodies have their own limit
        assert "max_upload_bytes" in refused(upload(found.client, state + b"x"), 413)
        # Without a length that says it beforehand.
        assert "max_upload_bytes" in refused(upload(found.client, iter((state, b"x"))), 413)
        assert len(ok(found.client.get("/v1/sessions"))["data"]) == 1
    assert pages_free(llm)


def test_queries_that_are_wrong(client: httpx.Client, state: bytes) -> None:
    for params, name in (
        ({"ttl": "-1"}, "ttl"),
        ({"ttl": "inf"}, "ttl"),
        ({"convert_dtype": "maybe"}, "convert_dtype"),
    ):
        refused(upload(client, state, **params), 400, name)


def test_an_upload_that_ends_too_soon(served: Served, state: bytes, folder: Path) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/sessions/state HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(state)}\r\n"
        head += "Content-Type: application/octet-stream\r\n\r\n"
        connection.sendall(head.encode() + state[: len(state) // 2])
        wait_for(lambda: bool(left(folder)))
    wait_for(lambda: not left(folder))
    wait_for(lambda: served.context.gate.under_way == 0)
    assert ok(served.client.get("/v1/sessions"))["data"] == []
    with served.context.sessions.room("", served.context.settings.max_sessions):
        pass  # the place that was kept for it is free


def test_a_download_that_is_left(served: Served, client: httpx.Client, folder: Path) -> None:
    name = made(client, prompt=PROMPT * 10)
    with client.stream("GET", f"/v1/sessions/{name}/state") as answer:
        assert answer.status_code == 200
        # The session is free while its file is on its way.
        post(client, name, "append", text="x")
        next(answer.iter_raw(100))
    wait_for(lambda: not left(folder))
    wait_for(lambda: served.context.gate.under_way == 0)


def test_a_reader_that_goes_away(folder: Path) -> None:
    """The response alone: its client takes the first piece, and is gone."""

    async def main() -> None:
        sent: list[Any] = []
        gone = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "http.response.body":
                gone.set()
                await asyncio.Event().wait()  # a connection that takes no more

        async def receive() -> Any:
            await gone.wait()
            return {"type": "http.disconnect"}

        place = TemporaryFile(StoredBytes(ServerSettings()), "")
        place.path.write_bytes(bytes(3 << 20))
        assert left(folder)
        response = StateFileResponse(place, name="name")
        await asyncio.wait_for(response({"type": "http"}, receive, send), 10)
        assert len(sent) == 2
        assert len(sent[1]["body"]) == 1 << 20
        assert not left(folder)

    asyncio.run(main())


def test_a_session_that_goes_on_elsewhere_keeps_its_id_parent_and_age(client: httpx.Client) -> None:
    root = made(client, prompt=PROMPT)
    (child,) = post(client, root, "fork", n=1)["ids"]
    told = info(client, child)
    state = download(client, child)
    assert client.delete(f"/v1/sessions/{child}").status_code == 200
    given = {"id": child, "parent": root, "created": told["created"] - 100}
    assert ok(upload(client, state, **given))["id"] == child
    again = info(client, child)
    assert (again["parent"], again["created"]) == (root, told["created"] - 100)
    other = f"session-{'0' * 32}"
    for wrong, param in (
        ({"parent": root}, "parent"),
        ({"created": 5}, "created"),
        ({"id": other, "parent": "x"}, "parent"),
        ({"id": other, "created": -1}, "created"),
        ({"id": other, "created": "nan"}, "created"),
    ):
        answer = upload(client, state, **wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_files_of_servers_that_were_killed_are_removed(folder: Path) -> None:
    killed, new, other = (folder / name for name in ("quire-state-killed", "quire-state-new", "other"))
    for place in (killed, new, other):
        place.mkdir()
        (place / "state.quire").write_bytes(b"x")

    async def main() -> None:
        held = TemporaryFile(StoredBytes(ServerSettings()), "")
        for place in (killed, other, held.path.parent):
            os.utime(place, (1, 1))
        remove_leftovers(PREFIX)
        assert sorted(folder.iterdir()) == sorted([new, other, held.path.parent])
        await held.aclose()
        os.utime(new, (1, 1))
        remove_leftovers(PREFIX)
        assert [*folder.iterdir()] == [other]

    asyncio.run(main())


def test_no_download_of_a_busy_or_empty_session(client: httpx.Client) -> None:
    name = made(client, prompt=PROMPT)
    with streaming(client, name, **LONG) as events:
        next(events)
        refused(client.get(f"/v1/sessions/{name}/state"), 409)
    wait_for(lambda: info(client, name)["in_use"] is None)
    empty = made(client)
    found = client.get(f"/v1/sessions/{empty}/state")
    assert found.status_code == 200
    assert info(client, ok(upload(client, found.content))["id"])["num_tokens"] == 0


# -- headers that mean no good ---------------------------------------------------------------------


def test_every_malformed_field_is_the_clients_fault(client: httpx.Client, state: bytes) -> None:
    for field, value in zip(fields(metadata_of(state)), itertools.cycle((NOT_A_NUMBER, 2**63, {"a": 1})), strict=False):
        answer = upload(client, changed(state, field, value))
        assert answer.status_code == 400, (field, value, answer.text)
        assert answer.json()["error"]["code"] in ("data_loss", "invalid_argument")
    assert ok(client.get("/v1/sessions"))["data"] == []


def test_a_missing_window(client: httpx.Client, state: bytes) -> None:
    assert "metadata.window is missing" in refused(upload(client, changed(state, ("window",), MISSING)), 400)
    assert "metadata.sequence.window is missing" in refused(
        upload(client, changed(state, ("sequence", "window"), MISSING)), 400
    )


def test_headers_of_containers_are_not_parsed(client: httpx.Client) -> None:
    bomb = of_metadata('{"kind":"session","tokens":[' + "[]," * 1_000_000 + "0]}")
    assert "arrays and objects" in refused(upload(client, bomb), 400)


# -- where files lie -------------------------------------------------------------------------------


def test_a_disk_that_is_full(
    client: httpx.Client, state: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = made(client, prompt=PROMPT)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "quire-state-x" / "state.quire"))

    monkeypatch.setattr("quire.statefile.atomic_file.os.fsync", full)
    answer = client.get(f"/v1/sessions/{name}/state")
    assert answer.status_code >= 400
    assert "No space left" in answer.json()["error"]["message"]
    assert str(tmp_path) not in answer.text
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr("quire.server.sessions.files._write", full)
    answer = upload(client, state)
    assert answer.json()["error"]["code"] == "resource_exhausted"
    assert str(tmp_path) not in answer.text
    client.delete(f"/v1/sessions/{name}")


def test_errors_call_a_file_by_another_name(tmp_path: Path) -> None:
    path = tmp_path / "quire-state-x" / "state.quire"
    with pytest.raises(DataLoss) as caught, hiding(path, "the file"):
        raise DataLoss(f"state file {str(path)!r} in {path.parent} is damaged")
    assert str(caught.value) == "the file in the server's directory is damaged"
