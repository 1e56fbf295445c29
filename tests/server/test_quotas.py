"""What one API key may hold, what all may hold together, and what whoever finds no room is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from quire import AsyncLLM, InvalidArgument
from quire.server.http.errors import ApiError
from quire.server.http.settings import ServerSettings
from quire.server.sessions.held import StoredBytes

from .conftest import OPTIONS, STATE_FILE, Served, pages_free, serving, wait_for

LONG = {"max_tokens": 100, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def small() -> Iterator[AsyncLLM]:
    """A pool of few pages."""
    made = AsyncLLM("tiny-python", **{**OPTIONS, "kv_cache_memory": "4MiB"})
    yield made
    asyncio.run(made.close())


@pytest.fixture(autouse=True)
def nothing_is_left(small: AsyncLLM) -> Iterator[None]:
    yield
    wait_for(lambda: pages_free(small))


class Client:
    """What talks to a server under one key."""

    def __init__(self, served: Served, key: str) -> None:
        self._served, self._headers = served, {"authorization": f"Bearer {key}"}
        self.made: list[str] = []

    def request(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self._served.client.request(method, path, json=body, headers=self._headers, **options)

    def post(self, path: str, **body: Any) -> Any:
        answer = self.request("POST", path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def session(self, **body: Any) -> str:
        self.made.append(self.post("/v1/sessions", **body)["id"])
        return self.made[-1]

    def info(self, name: str) -> Any:
        return self.request("GET", f"/v1/sessions/{name}").json()

    def refused(self, status: int, code: str, path: str, **body: Any) -> str:
        """The message of a refusal that may be tried again."""
        answer = self.request("POST", path, body)
        return refusal(answer, status, code)

    def pages(self) -> int:
        listed = self.request("GET", "/v1/sessions").json()["data"]
        return sum(one["pages"] for one in listed if one["pinned"])

    def leave(self) -> None:
        while self.made:
            assert self.request("DELETE", f"/v1/sessions/{self.made.pop()}").status_code == 200


def refusal(answer: httpx.Response, status: int, code: str) -> str:
    assert answer.status_code == status, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["type"] == ("rate_limit_error" if status == 429 else "server_error")
    return str(error["message"])


def tokens(seed: int, count: int) -> list[int]:
    """A prompt that no other seed begins like."""
    return torch.randint(10, 400, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# -- pinned pages ----------------------------------------------------------------------------------


def test_no_key_pins_what_others_need(small: AsyncLLM) -> None:
    pages = small.engine.runner.state.num_pages
    size = small.engine.runner.state.page_size
    with serving(small, ServerSettings(api_key=("a", "b", "c"))) as served:
        greedy, fair, late = (Client(served, key) for key in "abc")
        most = int(pages * 0.375)
        length = pages * size // 10
        for seed in range(3):
            greedy.session(prompt=tokens(seed, length), pin=True)
        body: dict[str, Any] = {"prompt": tokens(3, length), "pin": True}
        message = greedy.refused(429, "quota_exceeded", "/v1/sessions", **body)
        assert f"of {pages} pages, and may hold {most}" in message
        assert greedy.pages() <= most
        assert len(greedy.request("GET", "/v1/sessions").json()["data"]) == 3
        # Unpinned it may have more, which goes where others need room.
        greedy.session(prompt=tokens(4, length))
        for seed in range(5, 8):
            fair.session(prompt=tokens(seed, length), pin=True)
        # All together hold what may be pinned: it is not this key that has too much.
        message = late.refused(503, "pool_exhausted", "/v1/sessions", prompt=tokens(9, length), pin=True)
        assert f"of {pages} pages, and may hold {int(pages * 0.75)}" in message
        # What may not be pinned is there for everybody.
        answer = late.post("/v1/completions", prompt=tokens(10, length), **{**LONG, "max_tokens": 50})
        assert answer["usage"]["completion_tokens"] == 50
        greedy.leave()
        late.session(prompt=tokens(9, 2 * length), pin=True)
        for client in (fair, late):
            client.leave()


@pytest.mark.turns(2)
@pytest.mark.parametrize("stream", [False, True])
def test_a_pinned_session_does_not_outgrow_its_share(small: AsyncLLM, stream: bool) -> None:
    size = small.engine.runner.state.page_size
    share = 12 / small.engine.runner.state.num_pages
    with serving(small, ServerSettings(api_key=("a",), max_pinned_share_per_key=share + 1e-9)) as served:
        client = Client(served, "a")
        name = client.session(prompt=tokens(0, 8 * size), pin=True)
        before = client.info(name)
        more, much = tokens(1, 8 * size), {"max_tokens": 8 * size, "stream": stream}
        calls: list[tuple[str, dict[str, Any]]] = [
            (f"/v1/sessions/{name}/append", {"tokens": more}),
            (f"/v1/sessions/{name}/generate", much),
            (f"/v1/sessions/{name}/generate", {"prompt": more, "max_tokens": 1, "stream": stream}),
            ("/v1/completions", {"session_id": name, "prompt": more, "max_tokens": 1, "stream": stream}),
            ("/v1/completions", {"session_id": name, "prompt": [5], **much}),
        ]
        for path, body in calls:
            client.refused(429, "quota_exceeded", path, **body)
            after = client.info(name)
            assert (after["tokens"], after["in_use"]) == (before["tokens"], None)
        (child,) = client.post(f"/v1/sessions/{name}/fork")["ids"]
        client.made.append(child)
        client.post(f"/v1/sessions/{child}/append", tokens=tokens(2, size))
        client.refused(429, "quota_exceeded", f"/v1/sessions/{name}/append", tokens=more)
        client.refused(429, "quota_exceeded", f"/v1/sessions/{name}/append", tokens=tokens(3, 3 * size))
        client.leave()


def test_a_written_state_counts_from_when_it_is_uploaded(small: AsyncLLM) -> None:
    """It cannot be computed again, so it is pinned whether that was asked for or not."""
    size = small.engine.runner.state.page_size
    llm = small._llm
    with llm.session(tokens(0, 8 * size)) as session:
        session.set_kv(0, start=3, v=session.kv(0)["v"][3:4] * 2)
        data = session.to_bytes()
    pages = small.engine.runner.state.num_pages
    for allowed, status in ((7, 429), (10, 200)):
        settings = ServerSettings(api_key=("a",), max_pinned_share_per_key=allowed / pages + 1e-9, pinned_ttl=50)
        with serving(small, settings) as served:
            client = Client(served, "a")
            headers = {"authorization": "Bearer a"}
            answer = served.client.post("/v1/sessions/state", content=data, headers={**headers, **STATE_FILE})
            assert answer.status_code == status, answer.text
            if status == 429:
                refusal(answer, 429, "quota_exceeded")
                assert client.request("GET", "/v1/sessions").json()["data"] == []
                wait_for(lambda: pages_free(small))
                continue
            client.made.append(answer.json()["id"])
            found = client.info(client.made[0])
            assert (found["pinned"], found["modified"], found["ttl"]) == (True, True, 50)
            client.leave()
            answer = served.client.post("/v1/sessions/state?ttl=51", content=data, headers={**headers, **STATE_FILE})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "ttl")
            wait_for(lambda: pages_free(small))


@pytest.mark.parametrize("stream", [False, True])
def test_a_pool_that_somebody_else_pins_is_503(small: AsyncLLM, stream: bool) -> None:
    """Such as the program that runs the server, which no quota binds."""
    capacity = small.engine.runner.state.capacity
    assert capacity is not None
    with serving(small, ServerSettings(api_key=("a",))) as served:
        client = Client(served, "a")
        with small._llm.session(tokens(0, min(capacity, small.engine.max_model_len) - 1), pin=True) as one:
            others = [small._llm.session(tokens(seed, len(one)), pin=True) for seed in range(1, capacity // len(one))]
            body: dict[str, Any] = {"prompt": tokens(99, len(one) - 200), "stream": stream, **LONG}
            assert "nothing left to give up" in client.refused(503, "pool_exhausted", "/v1/completions", **body)
            name = client.session()
            client.refused(503, "pool_exhausted", f"/v1/sessions/{name}/append", tokens=body["prompt"])
            client.refused(503, "pool_exhausted", "/v1/sessions", prompt=body["prompt"])
            for other in others:
                other.close()
        assert client.request("POST", "/v1/completions", {**body, "stream": False}).status_code == 200
        client.leave()


def test_how_long_a_pinned_session_lives(small: AsyncLLM) -> None:
    with serving(small, ServerSettings(api_key=("a",), pinned_ttl=500, session_ttl=1000)) as served:
        client = Client(served, "a")
        name = client.session(prompt=[5, 6, 7], pin=True)
        assert client.info(name)["ttl"] == 500
        for path, body in (
            ("/v1/sessions", {"prompt": [5], "pin": True, "ttl": 501}),
            (f"/v1/sessions/{name}/fork", {"ttl": 501}),
        ):
            answer = client.request("POST", path, body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "ttl"), answer.text
            assert "at most 500 seconds" in answer.text
        assert len(client.request("GET", "/v1/sessions").json()["data"]) == 1
        assert client.info(client.session(prompt=[5], ttl=5000))["ttl"] == 5000
        (child,) = client.post(f"/v1/sessions/{name}/fork", ttl=30)["ids"]
        client.made.append(child)
        assert (client.info(child)["ttl"], client.info(child)["pinned"]) == (30, True)
        client.leave()


# -- sessions --------------------------------------------------------------------------------------


def test_a_key_has_its_share_of_the_sessions(small: AsyncLLM) -> None:
    with serving(small, ServerSettings(api_key=("a", "b", "c"), max_sessions=6, session_ttl=40)) as served:
        one, two, three = (Client(served, key) for key in "abc")
        for client in (one, two):
            for _ in range(3):
                client.session()
            message = client.refused(429, "session_limit", "/v1/sessions")
            assert "the 3 that this server holds for an API key" in message
            client.refused(429, "session_limit", f"/v1/sessions/{client.made[0]}/fork")
        answer = three.request("POST", "/v1/sessions", {})
        assert "the 6 that this server holds; others have them" in refusal(answer, 503, "session_limit")
        # By then the first will have ended, unless somebody uses it.
        assert 30 <= int(answer.headers["retry-after"]) <= 40
        answer = three.request("POST", f"/v1/sessions/{one.made[0]}/fork", {"n": 4})
        assert answer.status_code == 404
        answer = one.request("POST", f"/v1/sessions/{one.made[0]}/fork", {"n": 4})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        two.leave()
        three.session()
        for client in (one, three):
            client.leave()


# -- bytes of state files --------------------------------------------------------------------------


def test_bytes_are_counted_and_given_back() -> None:
    stored = StoredBytes(ServerSettings(api_key=("a", "b", "c"), max_stored_bytes=1000))
    stored.change("a", 0, 400)
    stored.change("a", 400, 500)

    def refused(owner: str, old: int, new: int) -> ApiError:
        before = stored.total
        with pytest.raises(ApiError) as error:
            stored.change(owner, old, new)
        assert stored.total == before
        return error.value

    assert (refused("a", 500, 501).status, refused("a", 0, 1).status) == (400, 429)
    stored.change("b", 0, 500)
    found = refused("c", 0, 1)
    assert (found.status, found.code, found.headers) == (503, "storage_limit", {"Retry-After": "1"})
    stored.change("b", 500, 100)
    stored.change("c", 0, 400)
    for owner, size in (("a", 500), ("b", 100), ("c", 400)):
        stored.change(owner, size, 0)
    assert stored.total == 0


def test_files_on_their_way_count(small: AsyncLLM) -> None:
    with serving(small, ServerSettings(api_key=("a", "b"), max_stored_bytes="40MiB")) as served:
        stored, client = served.context.stored, Client(served, "a")
        name = client.session(prompt=tokens(0, 100))
        path = f"/v1/sessions/{name}/state"
        answer = client.request("GET", path)
        assert answer.status_code == 200
        data = answer.content
        wait_for(lambda: stored.total == 0)
        mine = next(iter(served.context.sessions._held.values())).owner
        # Another file of the same key is on its way, so large that this one does not fit beside it.
        other = 20 * 2**20 - len(data) + 1
        stored.change(mine, 0, other)
        refusal(client.request("GET", path), 429, "storage_limit")
        headers = {"authorization": "Bearer a"}
        refusal(
            served.client.post("/v1/sessions/state", content=data, headers={**headers, **STATE_FILE}),
            429,
            "storage_limit",
        )
        assert len(client.request("GET", "/v1/sessions").json()["data"]) == 1
        assert client.info(name)["in_use"] is None
        assert stored.total == other
        stored.change(mine, other, 0)
        answer = served.client.post("/v1/sessions/state", content=data, headers={**headers, **STATE_FILE})
        client.made.append(answer.json()["id"])
        assert client.request("GET", path).content == data
        wait_for(lambda: stored.total == 0)
        client.leave()


# -- settings --------------------------------------------------------------------------------------


def test_what_a_key_may_have_by_default() -> None:
    for keys, part in (((), 1), (("a",), 1), (("a", "a"), 1), (("a", "b"), 2), (("a", "b", "c"), 2)):
        found = ServerSettings(api_key=keys)
        assert found.sessions_per_key == 1024 // part
        assert found.pinned_share_per_key == 0.75 / part
        assert found.stored_per_key == 16 * 2**30 // part
    given = ServerSettings(
        api_key=("a", "b"), max_sessions_per_key=5, max_pinned_share_per_key=0.2, max_stored_bytes_per_key="1MiB"
    )
    assert (given.sessions_per_key, given.pinned_share_per_key, given.stored_per_key) == (5, 0.2, 2**20)
    # No key has more than there is.
    given = ServerSettings(
        max_sessions=3,
        max_sessions_per_key=5,
        max_pinned_share=0.1,
        max_pinned_share_per_key=0.2,
        max_stored_bytes=10,
        max_stored_bytes_per_key=20,
    )
    assert (given.sessions_per_key, given.pinned_share_per_key, given.stored_per_key) == (3, 0.1, 10)
    assert ServerSettings(api_key=("a", "b"), max_sessions=1).sessions_per_key == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_sessions_per_key", 0),
        ("max_sessions_per_key", 1.5),
        ("max_pinned_share", 0),
        ("max_pinned_share", 1.01),
        ("max_pinned_share", None),
        ("max_pinned_share", "half"),
        ("max_pinned_share_per_key", 0),
        ("max_pinned_share_per_key", True),
        ("max_pinned_share_per_key", float("nan")),
        ("max_stored_bytes", "many"),
        ("max_stored_bytes", None),
        ("max_stored_bytes_per_key", -1),
        ("pinned_ttl", 0),
        ("pinned_ttl", float("inf")),
        ("share_prefix_cache", 1),
        ("api_key_weight", (1.0,)),
        ("api_key_weight", "3"),
        ("max_adapters_per_key", 0),
    ],
)
def test_bad_settings(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=name):
        ServerSettings(**{name: value})


def test_weights_of_keys() -> None:
    given = ServerSettings(api_key=("a", "b"), api_key_weight=(1, 3.5))
    assert list(given.key_weights.values()) == [1.0, 3.5]
    assert ServerSettings().key_weights == {"": 1.0}
    for weight in (0, -1, float("inf"), "2", True):
        with pytest.raises(InvalidArgument, match="api_key_weight"):
            ServerSettings(api_key=("a",), api_key_weight=(weight,))
