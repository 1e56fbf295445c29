"""The front, over replicas without a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from quire.cluster.calls import ReplicaGone
from quire.cluster.front import Front, prompt_text
from quire.cluster.router import Router

from .fakes import FakeReplicas

LONG = "x" * 600
IDS = [f"session-{number:032x}" for number in range(4)]

Run = Callable[[FakeReplicas, Callable[[Front, httpx.AsyncClient], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def run() -> Run:
    def run(replicas: FakeReplicas, story: Callable[[Front, httpx.AsyncClient], Coroutine[Any, Any, None]]) -> None:
        async def body() -> None:
            front = Front(replicas, Router(slack=1), patience=0.5)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app=front), base_url="http://front") as client:
                await story(front, client)
            assert not any(front.router.load.values())

        asyncio.run(body())

    return run


def test_prompts_go_where_their_beginnings_are(run: Run) -> None:
    async def story(front: Front, client: httpx.AsyncClient) -> None:
        first = (await client.post("/v1/completions", json={"prompt": LONG})).json()["by"]
        for more in ("", "y", "z" * 600):
            answer = await client.post("/v1/completions", json={"prompt": LONG + more})
            assert answer.json()["by"] == first
        others = {(await client.post("/v1/completions", json={"prompt": "short"})).json()["by"] for _ in range(4)}
        assert others == {"a", "b"}
        # Another key's prompts are not told from its own.
        keyed = (
            await client.post("/v1/completions", json={"prompt": LONG}, headers={"authorization": "Bearer k"})
        ).json()
        assert keyed["by"] in ("a", "b")
        assert front.counts.requests["prefix"] == 3

    run(FakeReplicas("a", "b"), story)


def test_a_body_that_cannot_be_read_goes_to_a_replica_which_refuses_it(run: Run) -> None:
    async def story(front: Front, client: httpx.AsyncClient) -> None:
        for body in (b"{", b"[]", b'{"a":' * 5000 + b"1" + b"}" * 5000):
            answer = await client.post("/v1/completions", content=body)
            assert answer.json()["by"] == "a"

    run(FakeReplicas("a"), story)


def test_a_conversation_s_next_turn_begins_with_the_last_one() -> None:
    turns = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "1"}, {"role": "user", "content": "2"}]
    body = {"model": "m", "tools": [{"type": "function"}]}
    first = prompt_text("/v1/chat/completions", {**body, "messages": turns[:1]})
    assert prompt_text("/v1/chat/completions", {**body, "messages": turns}).startswith(first)
    assert not prompt_text("/v1/chat/completions", {"messages": turns}).startswith(first)
    assert prompt_text("/v1/completions", {"prompt": [1, 2]}) == "1,2"
    assert prompt_text("/v1/completions", {"prompt": [[1, 2], [3]]}) == "1,2"
    assert prompt_text("/v1/completions", {}) == ""


def test_a_request_that_nobody_has_begun_to_answer_is_repeated(run: Run) -> None:
    replicas = FakeReplicas("a", "b")
    replicas.ending = {"a"}

    async def story(front: Front, client: httpx.AsyncClient) -> None:
        for _ in range(3):
            assert (await client.post("/v1/completions", json={"prompt": "p"})).json()["by"] == "b"
        assert front.counts.repeated == 1

    run(replicas, story)


def test_what_a_key_keeps_goes_elsewhere_if_its_replica_does_not_answer(run: Run) -> None:
    replicas = FakeReplicas("a", "b")

    async def story(front: Front, client: httpx.AsyncClient) -> None:
        first = (await client.get("/v1/chats")).json()["by"]
        assert (await client.get("/v1/chats")).json()["by"] == first
        replicas.stuck = {first}
        async with asyncio.timeout(5):
            assert (await client.get("/v1/chats")).json()["by"] != first

    run(replicas, story)


def test_an_answer_that_is_cut_says_so(run: Run) -> None:
    replicas = FakeReplicas("a")
    replicas.cutting = {"a"}

    async def story(front: Front, client: httpx.AsyncClient) -> None:
        text = (await client.post("/v1/completions", json={"prompt": "p", "stream": True})).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        assert events[0] == 1
        assert events[1]["error"]["code"] == "replica_ended"
        with pytest.raises(ReplicaGone):  # the server then closes the connection without an end
            await client.post("/v1/completions", json={"prompt": "p"})

    run(replicas, story)


def test_no_replica(run: Run) -> None:
    async def story(front: Front, client: httpx.AsyncClient) -> None:
        for path in ("/health", "/v1/models"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")

    run(FakeReplicas(), story)


def test_a_session_s_calls_go_to_its_replica(run: Run) -> None:
    replicas = FakeReplicas("a", "b")
    replicas.sessions["b"].add(IDS[0])

    async def story(front: Front, client: httpx.AsyncClient) -> None:
        for _ in range(3):
            assert (await client.get(f"/v1/sessions/{IDS[0]}")).status_code == 200
        assert front.counts.found == 1
        assert front.router.sessions == {IDS[0]: "b"}
        assert (await client.get(f"/v1/sessions/{IDS[1]}")).status_code == 404
        await client.delete(f"/v1/sessions/{IDS[0]}")
        assert front.router.sessions == {}

    run(replicas, story)


def test_a_call_that_may_have_changed_a_session_is_not_repeated(run: Run) -> None:
    replicas = FakeReplicas("a", "b")
    replicas.sessions["a"].add(IDS[0])

    async def story(front: Front, client: httpx.AsyncClient) -> None:
        await client.get(f"/v1/sessions/{IDS[0]}")
        replicas.ending = {"a"}
        replicas.sessions["b"].add(IDS[0])  # it takes the session over
        answer = await client.post(f"/v1/sessions/{IDS[0]}/append", json={"text": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_ended")
        assert "retry-after" in answer.headers
        assert [name for name, call in replicas.calls if call.method == "POST"] == ["a"]
        assert (await client.post(f"/v1/sessions/{IDS[0]}/append", json={"text": "a"})).status_code == 200
        assert front.router.sessions == {IDS[0]: "b"}

    run(replicas, story)


def test_a_session_whose_replica_is_ending_is_waited_for(run: Run) -> None:
    replicas = FakeReplicas("a", "b")
    replicas.sessions["a"].add(IDS[0])

    async def story(front: Front, client: httpx.AsyncClient) -> None:
        await client.get(f"/v1/sessions/{IDS[0]}")
        replicas.there.remove("a")
        asyncio.get_running_loop().call_later(0.1, replicas.sessions["b"].add, IDS[0])
        assert (await client.get(f"/v1/sessions/{IDS[0]}")).status_code == 200

    run(replicas, story)


def test_sessions_of_two_replicas_in_one_batch(run: Run) -> None:
    """The others are moved to the first one's; a pinned one stays, and the call is refused."""
    replicas = FakeReplicas("a", "b")
    replicas.sessions = {"a": {IDS[0]}, "b": {IDS[1], IDS[2]}}
    replicas.pinned = {IDS[2]}
    replicas.parents, replicas.facts = {IDS[1]: IDS[3]}, {IDS[1]: {"created": 5}}

    async def story(front: Front, client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/sessions/generate", json={"ids": IDS[:2]})).status_code == 200
        assert replicas.sessions == {"a": set(IDS[:2]), "b": {IDS[2]}}
        assert replicas.calls[-1][0] == "a"
        assert front.counts.moved == 1
        upload = next(call for _, call in replicas.calls if call.path.startswith("/v1/sessions/state"))
        assert upload.path == f"/v1/sessions/state?id={IDS[1]}&ttl=60.0&name=a&parent={IDS[3]}&created=5&label=b%3Dc"
        answer = await client.post("/v1/sessions/generate", json={"ids": IDS[:3]})
        assert answer.status_code == 409
        assert "pinned" in answer.json()["error"]["message"]
        assert replicas.sessions == {"a": set(IDS[:2]), "b": {IDS[2]}}

    run(replicas, story)


def test_a_session_leaves_a_replica_with_too_much_to_do(run: Run) -> None:
    replicas = FakeReplicas("a", "b")
    replicas.sessions["a"] = set(IDS)
    replicas.pinned = {IDS[1]}
    replicas.facts = {IDS[2]: {"has_chat": True}, IDS[3]: {"last_commit": "0" * 40}}  # a chat goes along

    async def story(front: Front, client: httpx.AsyncClient) -> None:
        for name in IDS:
            await client.get(f"/v1/sessions/{name}")
        with front.router.under_way("a"), front.router.under_way("a"):
            for name in IDS:
                assert (await client.post(f"/v1/sessions/{name}/generate", json={})).status_code == 200
        assert replicas.sessions == {"a": {IDS[1], *IDS[3:]}, "b": {IDS[0], IDS[2]}}

    run(replicas, story)


def test_a_session_with_calls_under_way_is_not_moved(run: Run) -> None:
    """Its state file would not have what they add."""
    replicas = FakeReplicas("a", "b")
    replicas.sessions["a"] = {IDS[0]}

    async def story(front: Front, client: httpx.AsyncClient) -> None:
        replicas.pause = asyncio.Event()
        append = asyncio.create_task(client.post(f"/v1/sessions/{IDS[0]}/append", json={"text": "a"}))
        while not front.router.calls:
            await asyncio.sleep(0)
        with front.router.under_way("a"), front.router.under_way("a"):
            assert (await client.get(f"/v1/sessions/{IDS[0]}")).status_code == 200
            assert replicas.sessions["a"] == {IDS[0]}
            replicas.pause.set()
            assert (await append).status_code == 200
            # Both calls of the same time find it where the first one moves it.
            found = await asyncio.gather(*(client.get(f"/v1/sessions/{IDS[0]}") for _ in range(2)))
            assert [one.status_code for one in found] == [200, 200]
        assert (replicas.sessions, front.counts.moved) == ({"a": set(), "b": {IDS[0]}}, 1)
        assert not front.router.calls

    run(replicas, story)


def test_a_replica_that_only_mentions_a_session_does_not_have_it(run: Run) -> None:
    """Parents are elsewhere; another key's sessions are refused by all."""
    replicas = FakeReplicas("a", "b")
    replicas.sessions = {"a": {IDS[0]}, "b": {IDS[1]}}
    replicas.parents = {IDS[0]: IDS[1]}

    async def story(front: Front, client: httpx.AsyncClient) -> None:
        replicas.refusing = True
        for name in (IDS[1], IDS[0], IDS[1]):
            await client.get(f"/v1/sessions/{name}")
        assert front.router.sessions == {}
        replicas.refusing = False
        for name in (IDS[1], IDS[0], IDS[1]):
            assert (await client.get(f"/v1/sessions/{name}")).status_code == 200
        # What a replica has no more is looked for again.
        replicas.sessions = {"a": {IDS[1]}, "b": {IDS[0]}}
        assert (await client.get(f"/v1/sessions/{IDS[0]}")).status_code == 404
        assert (await client.get(f"/v1/sessions/{IDS[0]}")).status_code == 200

    run(replicas, story)


def test_a_client_that_leaves_while_it_sends() -> None:
    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    asyncio.run(Front(FakeReplicas("a"))({"type": "http"}, receive, None))


def test_lists_are_those_of_all_replicas(run: Run) -> None:
    replicas = FakeReplicas("a", "b")
    replicas.sessions = {"a": {IDS[0], IDS[3]}, "b": {IDS[1], IDS[2]}}

    async def story(front: Front, client: httpx.AsyncClient) -> None:
        page = (await client.get("/v1/sessions?limit=3")).json()
        assert ([one["id"] for one in page["data"]], page["has_more"]) == (IDS[:3], True)
        page = (await client.get(f"/v1/sessions?limit=3&after={IDS[2]}")).json()
        assert ([one["id"] for one in page["data"]], page["has_more"]) == (IDS[3:], False)
        replicas.page = 1  # more sessions than a replica lists at once
        assert [one["id"] for one in (await client.get("/v1/sessions")).json()["data"]] == IDS
        gone = await client.get(f"/v1/sessions?after=session-{9:032x}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")
        assert front.router.sessions == {IDS[0]: "a", IDS[3]: "a", IDS[1]: "b", IDS[2]: "b"}

    run(replicas, story)


def test_adapters_are_loaded_by_all(run: Run) -> None:
    replicas = FakeReplicas("a", "b")

    async def story(front: Front, client: httpx.AsyncClient) -> None:
        await client.post("/v1/load_lora_adapter", json={"lora_name": "x"})
        assert sorted(name for name, _ in replicas.calls) == ["a", "b"]

    run(replicas, story)


def test_what_the_front_tells(run: Run) -> None:
    replicas = FakeReplicas("a")

    async def story(front: Front, client: httpx.AsyncClient) -> None:
        await client.post("/v1/completions", json={"prompt": "p"})
        told = (await client.get("/v1/cluster")).json()
        assert [one["name"] for one in told["replicas"]] == ["a"]
        assert told["requests"] == {"load": 1}
        assert (await client.get("/health")).json() == {"status": "ok", "replicas": 1}
        for path in ("/health", "/v1/cluster", "/v1/sessions"):
            assert (await client.head(path)).status_code == 200
        assert [(call.method, call.path.partition("?")[0]) for _, call in replicas.calls[1:]] == [
            ("GET", "/v1/sessions")
        ]

    run(replicas, story)
