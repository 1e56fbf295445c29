"""Sessions over HTTP: each call against ``quire.Session``, whose they are, how long they live, what
ends them.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.exact import TINY_PYTHON

from quire import LLM, AsyncLLM, FailedPrecondition, NotFound, SamplingParams
from quire.server.http.errors import ApiError
from quire.server.http.settings import ServerSettings
from quire.server.sessions.held import HeldSession, Sessions

from .conftest import OPTIONS, STATE_FILE, Served, pages_free, serving, wait_for

PROMPT = "class Stack:\n    def __init__(self):\n"
MORE = "        self.items = []\n"
GREEDY = {"temperature": 0, "max_tokens": 12}
LONG = {"temperature": 0, "max_tokens": 400, "ignore_eos": True}
"""Goes on until somebody ends it."""


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    """What the server must agree with: the same model in this program."""
    with LLM("tiny-python", **OPTIONS) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: once the sessions are deleted, all pages are free."""
    yield
    for name in ("served", "chat_served"):
        if name in request.fixturenames:
            found: Served = request.getfixturevalue(name)
            for listed in found.client.get("/v1/sessions", params={"tokens": False}).json()["data"]:
                assert found.client.delete(f"/v1/sessions/{listed['id']}").status_code == 200
    for name in ("llm", "chat_llm"):
        if name in request.fixturenames:
            llm: AsyncLLM = request.getfixturevalue(name)
            wait_for(lambda llm=llm: pages_free(llm))  # type: ignore[misc]


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer: httpx.Response, status: int, param: str | None = None) -> str:
    """The message of an error in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    return str(error["message"])


def made(client: httpx.Client, **body: Any) -> str:
    found = ok(client.post("/v1/sessions", json=body))
    assert found["id"].startswith("session-")
    assert len(found["id"]) == 40
    return str(found["id"])


def post(client: httpx.Client, session: str, verb: str, **body: Any) -> Any:
    return ok(client.post(f"/v1/sessions/{session}/{verb}", json=body))


def info(client: httpx.Client, session: str, **params: Any) -> Any:
    return ok(client.get(f"/v1/sessions/{session}", params=params))


@contextmanager
def streaming(client: httpx.Client, session: str, **body: Any) -> Iterator[Iterator[Any]]:
    """The events of a generation; leaving it closes the connection."""
    with client.stream("POST", f"/v1/sessions/{session}/generate", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")

        def events() -> Iterator[Any]:
            for line in answer.iter_lines():
                if line:
                    assert line.startswith("data: ")
                    yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])

        yield events()


# -- the verbs -------------------------------------------------------------------------------------


def test_every_verb_does_what_a_session_does(client: httpx.Client, plain: LLM) -> None:
    name, session = made(client, prompt=PROMPT, model="tiny-python"), plain.session(PROMPT)
    assert info(client, name)["tokens"] == session.tokens

    assert post(client, name, "append", text=MORE) == {"id": name, "num_tokens": len(session.append(MORE))}
    answer = post(client, name, "generate", **GREEDY)
    output = session.generate(SamplingParams(**GREEDY))
    (choice,) = answer["choices"]
    assert choice["token_ids"] == output.outputs[0].token_ids
    assert choice["text"] == output.outputs[0].text
    assert choice["finish_reason"] == output.outputs[0].finish_reason
    assert (answer["session_id"], answer["num_tokens"], answer["object"]) == (name, len(session), "text_completion")
    assert answer["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": output.num_cached_tokens}

    scored = post(client, name, "score", text="    def push")
    assert scored["logprobs"] == pytest.approx(session.score("    def push"), abs=TINY_PYTHON)
    assert plain.tokenizer is not None
    assert plain.tokenizer.decode(scored["tokens"]) == "    def push"
    assert post(client, name, "score", tokens=scored["tokens"])["logprobs"] == pytest.approx(scored["logprobs"])

    child = post(client, name, "fork", at=9)
    assert child["num_tokens"] == 9
    assert child["parent"] == name
    assert info(client, child["ids"][0])["tokens"] == session.fork(at=9).tokens

    back = post(client, name, "rewind", n=3)
    assert back == {"id": name, "replayed": session.rewind(n=3), "num_tokens": len(session)}
    back = post(client, name, "rewind", to=5)
    assert back == {"id": name, "replayed": session.rewind(to=5), "num_tokens": 5}
    assert post(client, name, "generate", prompt=MORE, **GREEDY)["choices"][0]["token_ids"] == (
        session.append(MORE).generate(SamplingParams(**GREEDY)).outputs[0].token_ids
    )
    for span, new in (([2, 4], {"text": "pop"}), ("pop", {"tokens": []}), ([0, 0], {"tokens": [7, 9]})):
        done = post(client, name, "edit", span=span, **new)
        wanted = session.edit(span if isinstance(span, str) else (span[0], span[1]), *new.values())
        numbers = {"id": name, "num_tokens": len(session), "blended": 0, "mode": "exact", "exact": True}
        assert done == {
            **numbers,
            "removed": wanted.removed,
            "added": wanted.added,
            "replayed": wanted.replayed,
            "released": 0,
        }
    found = info(client, name)
    assert (found["exact"], found["exact_tokens"], found["has_chat"]) == (True, len(session), False)
    assert found["tokens"] == session.tokens
    assert found["text"] == session.text
    assert ok(client.delete(f"/v1/sessions/{name}")) == {"id": name, "object": "session", "deleted": True}
    refused(client.get(f"/v1/sessions/{name}"), 404)
    session.close()


def test_an_empty_session_and_token_ids(client: httpx.Client, plain: LLM) -> None:
    name = made(client)
    assert info(client, name)["tokens"] == []
    assert info(client, name)["pages"] == 0
    refused(client.post(f"/v1/sessions/{name}/score", json={"tokens": [5]}), 400, "tokens")
    assert post(client, name, "append", tokens=[5, 9, 11])["num_tokens"] == 3
    other = made(client, prompt=[5, 9, 11])
    with plain.session([5, 9, 11]) as session:
        expected = session.generate(SamplingParams(**GREEDY)).outputs[0].token_ids
    for one in (name, other):
        assert post(client, one, "generate", **GREEDY)["choices"][0]["token_ids"] == expected


def test_a_description(client: httpx.Client, plain: LLM) -> None:
    name = made(client, prompt=PROMPT * 4, ttl=500)
    (child,) = post(client, name, "fork")["ids"]
    with plain.session(PROMPT * 4) as session:
        length = len(session)
        full = session.pages[0]
    found = info(client, child)
    assert found["parent"] == name
    assert found["num_tokens"] == length
    assert found["pages"] == found["shared_pages"] == full
    assert found["adapter"] is None
    assert found["model"] == "tiny-python"
    assert found["in_use"] is None
    assert sum(found["state_kinds"].values()) == len(plain.model.layer_specs)
    assert found["ttl"] == 500
    assert 490 < found["ttl_left"] <= 500
    assert [cost["to"] for cost in found["rewind_costs"]] == sorted(
        {0, length // 4, length // 2, length * 3 // 4, length - 1}
    )
    assert all(cost["replayed"] == 0 for cost in found["rewind_costs"])
    asked = info(client, child, rewind_to=[3, 1], tokens=False)
    assert asked["rewind_costs"] == [{"to": 3, "replayed": 0}, {"to": 1, "replayed": 0}]
    assert "tokens" not in asked
    assert "text" not in asked
    refused(client.get(f"/v1/sessions/{child}", params={"rewind_to": length + 1}), 400, "rewind_to")
    refused(client.get(f"/v1/sessions/{child}", params={"rewind_to": [1] * 65}), 400, "rewind_to")

    listed = ok(client.get("/v1/sessions"))
    assert [one["id"] for one in listed["data"]] == [name, child]
    assert not listed["has_more"]
    # A list says what a session is, not what it holds: that is told of one session only.
    assert all(not {"tokens", "text", "rewind_costs"} & set(one) for one in listed["data"])
    told = {key: value for key, value in listed["data"][1].items() if key != "ttl_left"}
    assert told.items() <= found.items()
    assert ok(client.get("/v1/sessions", params={"tokens": False}))["data"][0].keys() == listed["data"][0].keys()
    assert "GET /v1/sessions/{id}" in refused(client.get("/v1/sessions", params={"tokens": True}), 400, "tokens")
    page = ok(client.get("/v1/sessions", params={"limit": 1}))
    assert [one["id"] for one in page["data"]] == [name]
    assert page["has_more"]
    page = ok(client.get("/v1/sessions", params={"limit": 1, "after": name}))
    assert [one["id"] for one in page["data"]] == [child]
    assert not page["has_more"]


def test_a_tree_of_forks(client: httpx.Client, plain: LLM) -> None:
    root = made(client, prompt=PROMPT)
    branches = post(client, root, "fork", n=3)["ids"]
    leaves = {}
    for number, branch in enumerate(branches):
        post(client, branch, "append", text=f"        self.size_{number} = ")
        leaves[number] = post(client, branch, "fork", n=2)["ids"]
    assert ok(client.delete(f"/v1/sessions/{branches[0]}"))["deleted"]

    def run(leaf: str) -> list[int]:
        return list(post(client, leaf, "generate", **GREEDY)["choices"][0]["token_ids"])

    with ThreadPoolExecutor(6) as pool:
        found = {number: list(pool.map(run, pair)) for number, pair in leaves.items()}
    for number, pair in leaves.items():
        with plain.session(PROMPT) as session:
            session.append(f"        self.size_{number} = ")
            expected = session.generate(SamplingParams(**GREEDY)).outputs[0].token_ids
        assert found[number] == [expected, expected]
        for leaf in pair:
            assert info(client, leaf)["parent"] == branches[number]
    assert info(client, root)["num_tokens"] == len(plain.session(PROMPT))


def test_a_stream_is_the_whole_in_pieces(client: httpx.Client) -> None:
    name = made(client, prompt=PROMPT)
    (other,) = post(client, name, "fork")["ids"]
    whole = post(client, other, "generate", logprobs=2, **GREEDY)
    with streaming(client, name, logprobs=2, stream_options={"include_usage": True}, **GREEDY) as events:
        *chunks, last, done = events
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    (expected,) = whole["choices"]
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    assert [token for choice in choices for token in choice["token_ids"]] == expected["token_ids"]
    assert {choice["finish_reason"] for choice in choices[:-1]} <= {None}
    assert choices[-1]["finish_reason"] == "length"
    for part in ("tokens", "token_logprobs", "text_offset"):
        joined = [value for choice in choices for value in choice["logprobs"][part]]
        assert (
            joined == pytest.approx(expected["logprobs"][part])
            if part == "token_logprobs"
            else (joined == expected["logprobs"][part])
        )
    assert all(chunk["session_id"] == name and chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert info(client, name)["tokens"] == info(client, other)["tokens"]
    with streaming(client, name, stream_options={"continuous_usage_stats": True}, **GREEDY) as events:
        running = [event["usage"]["completion_tokens"] for event in events if event != "[DONE]"]
    assert running == sorted(running)
    assert running[-1] == 12


def test_sampling_parameters_arrive(client: httpx.Client, plain: LLM) -> None:
    given: list[dict[str, Any]] = [
        {"temperature": 0.9, "seed": 7, "max_tokens": 10, "top_k": 20, "min_p": 0.01},
        {"temperature": 0, "max_completion_tokens": 30, "stop": ["self"]},
        {"temperature": 0, "max_tokens": 8, "logit_bias": {"40": 100}, "repetition_penalty": 1.0},
        {"temperature": 0, "max_tokens": 20, "structured_outputs": {"choice": ["alpha", "beta"]}},
    ]
    for body in given:
        name = made(client, prompt=PROMPT)
        (choice,) = post(client, name, "generate", **body)["choices"]
        options = {key.replace("max_completion_tokens", "max_tokens"): value for key, value in body.items()}
        with plain.session(PROMPT) as session:
            output = session.generate(plain.default_params.replace(**options)).outputs[0]
            assert choice["token_ids"] == output.token_ids
            assert choice["text"] == output.text
            assert (choice["finish_reason"], choice["stop_reason"]) == (output.finish_reason, output.stop_reason)
            assert info(client, name)["tokens"] == session.tokens


def test_a_window(client: httpx.Client, plain: LLM) -> None:
    name = made(client, prompt=PROMPT * 8, window=32, sink=4)
    with plain.session(PROMPT * 8, window=32, sink=4) as session:
        assert post(client, name, "generate", **GREEDY)["choices"][0]["token_ids"] == (
            session.generate(SamplingParams(**GREEDY)).outputs[0].token_ids
        )
        found = info(client, name, rewind_to=20)
        assert found["window"] == {"window": 32, "sink": 4}
        assert found["pages"] == session.pages[0]
        assert found["rewind_costs"] == [{"to": 20, "replayed": session.rewind_cost(20)}]
        assert post(client, name, "rewind", to=20)["replayed"] == session.rewind(to=20) > 0
    refused(client.post("/v1/sessions", json={"window": 4, "sink": 4}), 400, "window")
    refused(client.post("/v1/sessions", json={"sink": 4}), 400, "sink")


def test_adapters_are_models(plain: LLM) -> None:
    options = {**OPTIONS, "adapters": {"docs": "tiny-python-docstrings"}}
    llm = AsyncLLM("tiny-python", **options)
    try:
        with serving(llm) as found:
            client = found.client
            base, adapted = made(client, prompt=PROMPT), made(client, prompt=PROMPT, model="docs")
            assert info(client, adapted)["adapter"] == info(client, adapted)["model"] == "docs"
            plain.load_adapter("docs", "tiny-python-docstrings")
            with plain.session(PROMPT, adapter="docs") as session:
                expected = session.generate(SamplingParams(**GREEDY)).outputs[0].token_ids
            refused(client.post(f"/v1/sessions/{adapted}/generate", json={"model": "tiny-python"}), 400, "model")
            answer = post(client, adapted, "generate", model="docs", **GREEDY)
            assert answer["choices"][0]["token_ids"] == expected
            assert answer["model"] == "docs"
            assert post(client, base, "adapter", name="docs")["adapter"] == "docs"
            with plain.session(PROMPT) as session:
                session.use_adapter("docs")
                expected = session.generate(SamplingParams(**GREEDY)).outputs[0].token_ids
            assert post(client, base, "generate", **GREEDY)["choices"][0]["token_ids"] == expected
            assert post(client, base, "adapter", name=None)["adapter"] is None
            refused(client.post(f"/v1/sessions/{base}/adapter", json={"name": "other"}), 404, "name")
            refused(client.post("/v1/sessions", json={"model": "other"}), 404, "model")
        assert pages_free(llm)
    finally:
        asyncio.run(llm.close())


# -- chats -----------------------------------------------------------------------------------------


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_chat_goes_on_with_new_messages_only(chat_client: httpx.Client, chat_folder: Path) -> None:
    with LLM(chat_folder, **OPTIONS) as plain, plain.session() as session:
        name = made(chat_client, messages=[user("def fib(n):")])
        assert plain.tokenizer is not None
        expected = plain.tokenizer.encode("<|user|>def fib(n):<|end|><|assistant|>", add_special_tokens=False)
        assert info(chat_client, name)["tokens"] == expected
        assert info(chat_client, name)["has_chat"] is True
        output = session.chat([user("def fib(n):"), user("fast")], SamplingParams(**GREEDY))
        answer = post(chat_client, name, "generate", messages=[user("fast")], **GREEDY)
        assert answer["choices"][0]["token_ids"] == output.outputs[0].token_ids
        output = session.chat([user("slow")], SamplingParams(**GREEDY))
        with streaming(chat_client, name, messages=[user("slow")], **GREEDY) as events:
            *chunks, _ = events
        assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == output.outputs[0].token_ids
        assert info(chat_client, name)["tokens"] == session.tokens


def test_messages_that_cannot_be_rendered(plain_client: httpx.Client, chat_client: httpx.Client) -> None:
    refused(plain_client.post("/v1/sessions", json={"messages": [user("no template")]}), 400, "messages")
    for wrong in ([], [{"content": "no role"}], [user("half \ud800 a pair")]):
        body = json.dumps({"messages": wrong})
        refused(
            chat_client.post("/v1/sessions", content=body, headers={"content-type": "application/json"}),
            400,
            "messages",
        )
    refused(chat_client.post("/v1/sessions", json={"messages": [user("a")], "prompt": "b"}), 400, "messages")
    assert ok(chat_client.get("/v1/sessions"))["data"] == []


# -- whose they are --------------------------------------------------------------------------------


def calls(session: str) -> list[tuple[str, str, dict[str, Any] | None]]:
    """Every call about a session."""
    path = f"/v1/sessions/{session}"
    return [
        ("GET", path, None),
        ("GET", f"{path}/state", None),
        ("POST", f"{path}/append", {"text": "x"}),
        ("POST", f"{path}/generate", {"max_tokens": 2}),
        ("POST", f"{path}/generate", {"max_tokens": 2, "stream": True}),
        ("POST", f"{path}/score", {"text": "x"}),
        ("POST", f"{path}/fork", {}),
        ("POST", f"{path}/rewind", {"to": 0}),
        ("POST", f"{path}/edit", {"span": [0, 0], "text": ""}),
        ("POST", f"{path}/adapter", {"name": None}),
        ("DELETE", path, None),
    ]


def test_another_key_sees_nothing(llm: AsyncLLM) -> None:
    with serving(llm, ServerSettings(api_key=("one", "two")), authorization="Bearer one") as found:
        other = {"authorization": "Bearer two"}
        name = made(found.client, prompt=PROMPT)
        for method, path, body in calls(name):
            message = refused(
                found.client.request(method, path, json=body, headers=other),
                404,
                "session_id" if path.endswith("generate") else None,
            )
            unknown = refused(
                found.client.request(method, path.replace(name, "session-" + "0" * 32), json=body),
                404,
                "session_id" if path.endswith("generate") else None,
            )
            assert message.replace(name, "") == unknown.replace("session-" + "0" * 32, "")
        assert ok(found.client.get("/v1/sessions", headers=other))["data"] == []
        refused(found.client.get("/v1/sessions", params={"after": name}, headers=other), 404)
        refused(found.client.get("/v1/sessions", headers={"authorization": "Bearer three"}), 401)
        theirs = ok(found.client.post("/v1/sessions", json={"prompt": PROMPT}, headers=other))["id"]
        refused(found.client.get(f"/v1/sessions/{theirs}"), 404)
        assert [one["id"] for one in ok(found.client.get("/v1/sessions"))["data"]] == [name]
        before = info(found.client, name)
        assert before["tokens"]
        assert before["num_tokens"] == len(before["tokens"])


@pytest.mark.parametrize("name", ["", "x", "session-", "session-" + "f" * 32, "%00", "..%2f..", "a" * 5000])
def test_ids_that_nobody_has(client: httpx.Client, name: str) -> None:
    for method, path, body in calls(name):
        answer = client.request(method, path, json=body)
        if not name and path in ("/v1/sessions/",):
            assert answer.status_code == 404
            continue
        assert answer.status_code in (404, 405), answer.text
        assert len(answer.text) < 7000


# -- how long they live ----------------------------------------------------------------------------


class Closing:
    """Something that can be closed."""

    def __init__(self) -> None:
        self.closed = False

    async def close(self) -> None:
        self.closed = True


def registry(now: list[float], **settings: Any) -> tuple[Sessions, Callable[..., tuple[str, Closing]]]:
    sessions = Sessions(ServerSettings(**settings), clock=lambda: now[0])

    def create(owner: str = "", *, ttl: float | None = None, pinned: bool = False) -> tuple[str, Closing]:
        closing, lifetime = Closing(), sessions.lifetime(ttl, pinned=pinned)
        return sessions.create(owner, closing, ttl=lifetime), closing  # type: ignore[arg-type]

    return sessions, create


def test_what_is_not_used_is_closed() -> None:
    async def main() -> None:
        now = [100.0]
        sessions, create = registry(now, session_ttl=10, pinned_ttl=1000)
        (first, one), (second, two), (third, three), (fourth, four) = (
            create(),
            create(ttl=30),
            create(pinned=True),
            create(pinned=True, ttl=5),
        )
        assert [sessions.time_left(sessions.get("", name)) for name in (first, second, third, fourth)] == [
            10,
            30,
            1000,
            5,
        ]
        now[0] += 6
        with pytest.raises(NotFound):
            sessions.get("", fourth)  # its time is over, though nobody has looked yet
        async with sessions.use("", first, "append"):
            now[0] += 10
            # In use, it does not expire.
            assert sessions.time_left(sessions.get("", first)) == 10
            await asyncio.sleep(0.05)
        assert four.closed
        assert not (one.closed)
        assert not (two.closed)
        assert not (three.closed)
        now[0] += 9
        assert sessions.time_left(sessions.get("", first)) == 1
        now[0] += 10
        assert [held.id for held in sessions.of("")] == [third]
        await asyncio.wait_for(_until(lambda: one.closed and two.closed), 10)
        assert not three.closed
        assert len(sessions) == 1
        with pytest.raises(ApiError) as error:
            sessions.lifetime(1001, pinned=True)
        assert (error.value.status, error.value.param) == (400, "ttl")
        assert sessions.lifetime(1001, pinned=False) == 1001
        now[0] += 1000  # nobody keeps anything for ever
        await asyncio.wait_for(_until(lambda: three.closed), 10)
        await sessions.close_all()
        assert len(sessions) == 0
        with pytest.raises(FailedPrecondition, match="shutting down"):
            create()

    asyncio.run(main())


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_one_call_at_a_time_and_places_that_are_kept() -> None:
    async def main() -> None:
        sessions, create = registry([0.0], max_sessions=3)
        name, _ = create("a")
        async with sessions.use("a", name, "generate"):
            with pytest.raises(FailedPrecondition, match="generate"):
                sessions.take("a", name, "append")
            with pytest.raises(NotFound):
                sessions.take("b", name, "append")
        held: HeldSession = sessions.take("a", name, "append")
        sessions.release(held)
        with sessions.room("a", 2):
            with pytest.raises(ApiError) as error, sessions.room("a"):
                raise AssertionError("there is none")
            assert error.value.status == 429
        with pytest.raises(ApiError), sessions.room("a", 3):
            raise AssertionError("there are two")
        with sessions.room("b", 2):
            create("b")
            create("b")
        with pytest.raises(ApiError), sessions.room("a"):
            raise AssertionError("there is none")
        await sessions.close("a", name)
        with sessions.room("a"):
            pass
        await sessions.close_all()

    asyncio.run(main())


def test_expiry_gives_pages_back(llm: AsyncLLM) -> None:
    with serving(llm, ServerSettings(session_ttl=0.2)) as found:
        kept, gone = made(found.client, prompt=PROMPT, ttl=60), made(found.client, prompt=PROMPT * 5)
        pinned = made(found.client, prompt=PROMPT, pin=True)
        (child,) = post(found.client, pinned, "fork")["ids"]
        assert info(found.client, child)["pinned"]
        assert info(found.client, child)["ttl"] == info(found.client, pinned)["ttl"] == 14400
        wait_for(lambda: len(found.context.sessions) == 3)
        refused(found.client.get(f"/v1/sessions/{gone}"), 404)
        assert [one["id"] for one in ok(found.client.get("/v1/sessions"))["data"]] == [kept, pinned, child]


def test_the_limit_of_sessions(llm: AsyncLLM) -> None:
    with serving(llm, ServerSettings(max_sessions=3)) as found:
        client = found.client
        first = made(client, prompt=PROMPT)
        message = refused(client.post(f"/v1/sessions/{first}/fork", json={"n": 3}), 429)
        assert "3" in message
        # To try again later, as 429 says, would not help.
        message = refused(client.post(f"/v1/sessions/{first}/fork", json={"n": 4}), 400, "n")
        assert "3 sessions at most" in message
        assert len(ok(client.get("/v1/sessions"))["data"]) == 1
        post(client, first, "fork", n=2)
        refused(client.post("/v1/sessions", json={"prompt": PROMPT}), 429)
        refused(client.post(f"/v1/sessions/{first}/fork", json={}), 429)
        refused(client.post("/v1/sessions/state", content=b"x", headers=STATE_FILE), 429)
        assert ok(client.delete(f"/v1/sessions/{first}"))["deleted"]
        made(client)


# -- what ends them --------------------------------------------------------------------------------


def test_a_second_call_is_refused(client: httpx.Client) -> None:
    name = made(client, prompt=PROMPT)
    with streaming(client, name, **LONG) as events:
        next(events)
        for method, path, body in calls(name):
            if method == "POST" or path.endswith("state"):
                assert "generate" in refused(client.request(method, path, json=body), 409)
        found = info(client, name)
        assert found["in_use"] == "generate"
        assert found["rewind_costs"] is None
    wait_for(lambda: info(client, name)["in_use"] is None)


def test_a_client_that_leaves_a_stream(client: httpx.Client, plain: LLM) -> None:
    name = made(client, prompt=PROMPT)
    with streaming(client, name, **LONG) as events:
        seen = [token for _, event in zip(range(3), events, strict=False) for token in event["choices"][0]["token_ids"]]
    wait_for(lambda: info(client, name)["in_use"] is None)
    tokens = info(client, name)["tokens"]
    with plain.session(PROMPT) as session:
        start = len(session)
        session.generate(SamplingParams(**LONG))
        # What was generated by then stays, and no more was.
        assert start + len(seen) <= len(tokens) < len(session)
        assert tokens == session.tokens[: len(tokens)]
        session.rewind(to=len(tokens))
        expected = session.generate(SamplingParams(**GREEDY)).outputs[0].token_ids
    assert post(client, name, "generate", **GREEDY)["choices"][0]["token_ids"] == expected


def test_a_client_that_leaves_before_the_answer(served: Served, client: httpx.Client) -> None:
    name = made(client, prompt=PROMPT)
    start = info(client, name)["num_tokens"]
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=served.url, timeout=0.1, trust_env=False) as hasty:
        hasty.post(f"/v1/sessions/{name}/generate", json=LONG)
    wait_for(lambda: info(client, name)["in_use"] is None)
    assert start <= info(client, name)["num_tokens"] < start + 400
    wait_for(lambda: served.llm.engine.num_running == 0)


def test_deleted_while_it_streams(served: Served, client: httpx.Client) -> None:
    name = made(client, prompt=PROMPT)
    with streaming(client, name, **LONG) as events:
        next(events)
        assert ok(client.delete(f"/v1/sessions/{name}"))["deleted"]
        *_, last, done = events
    assert done == "[DONE]"
    assert last["choices"][0]["finish_reason"] == "cancelled"
    assert pages_free(served.llm)


def test_the_server_ends_while_one_streams(llm: AsyncLLM) -> None:
    with serving(llm) as found:
        name = made(found.client, prompt=PROMPT)
        with streaming(found.client, name, **LONG) as events:
            next(events)
            remover = threading.Thread(
                target=lambda: asyncio.run_coroutine_threadsafe(
                    found.context.sessions.close_all(), found.server.servers[0].get_loop()
                ).result(20)
            )
            remover.start()
            *_, last, _ = events
            remover.join(20)
        assert last["choices"][0]["finish_reason"] == "cancelled"
        assert pages_free(llm)
        refused(found.client.post("/v1/sessions", json={"prompt": PROMPT}), 409)
        assert pages_free(llm)


# -- bad input -------------------------------------------------------------------------------------

BAD: list[tuple[str, dict[str, Any], str | None]] = [
    ("append", {}, "text"),
    ("append", {"text": "a", "tokens": [1]}, "text"),
    ("append", {"text": 5}, "text"),
    ("append", {"tokens": [1, -5]}, "tokens"),
    ("append", {"tokens": [10**9]}, "tokens"),
    ("append", {"tokens": [10**30]}, "tokens"),
    ("append", {"tokens": [True]}, "tokens.0"),
    ("append", {"tokens": [3] * 5000}, None),
    ("score", {"text": None}, "text"),
    ("score", {"tokens": [10**9]}, "tokens"),
    ("fork", {"at": 10**6}, "at"),
    ("fork", {"at": -1}, "at"),
    ("fork", {"n": 0}, "n"),
    ("fork", {"n": "2"}, "n"),
    ("rewind", {}, "to"),
    ("rewind", {"to": 1, "n": 1}, "to"),
    ("rewind", {"to": 10**6}, "to"),
    ("rewind", {"n": -1}, "n"),
    ("edit", {"span": [0, 1]}, "text"),
    ("edit", {"span": [0, 1], "text": "a", "tokens": [1]}, "text"),
    ("edit", {"text": "a"}, "span"),
    ("edit", {"span": [0, 10**6], "text": ""}, "span"),
    ("edit", {"span": [2], "text": ""}, "span"),
    ("edit", {"span": "not there", "text": ""}, "span"),
    ("edit", {"span": [0, 1], "tokens": [10**9]}, "tokens"),
    ("edit", {"span": [0, 1], "tokens": [3] * 5000}, "tokens"),
    ("edit", {"span": [0, 1], "text": "", "mode": "rough"}, "mode"),
    ("edit", {"span": [0, 1], "text": "", "blend": True}, "blend"),
    ("edit", {"span": [0, 1], "text": "", "mode": "blend", "blend": {"ratio": 2}}, "blend.ratio"),
    ("adapter", {}, "name"),
    ("generate", {"n": 2}, "n"),
    ("generate", {"temperature": -1}, "temperature"),
    ("generate", {"temperature": "hot"}, "temperature"),
    ("generate", {"max_tokens": 0}, "max_tokens"),
    ("generate", {"min_tokens": 40, "max_tokens": 4}, "min_tokens"),
    ("generate", {"logit_bias": {"x": 1}}, "logit_bias"),
    ("generate", {"stop_token_ids": [10**6]}, "stop_token_ids"),
    ("generate", {"logprobs": 21}, "logprobs"),
    ("generate", {"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ("generate", {"structured_outputs": {}}, "structured_outputs"),
    ("generate", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("generate", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "messages"),
    ("generate", {"messages": []}, "messages"),
    ("generate", {"tools": [{}]}, "tools"),
    ("generate", {"response_format": {"type": "json_object"}}, "response_format"),
    ("generate", {"best_of": 2}, "best_of"),
    ("generate", {"prompt": [10**9]}, "prompt"),
    ("generate", {"model": "other"}, "model"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_bodies_change_nothing(client: httpx.Client, stream: bool) -> None:
    name = made(client, prompt=PROMPT)
    before = {**info(client, name), "ttl_left": None}
    for verb, body, param in BAD:
        sent = {**body, "stream": True} if verb == "generate" and stream and "stream_options" not in body else body
        answer = client.post(f"/v1/sessions/{name}/{verb}", json=sent)
        assert answer.status_code == (404 if body.get("model") else 400), (verb, body, answer.text)
        if param is not None:
            assert answer.json()["error"]["param"] == param, (verb, body, answer.text)
        assert {**info(client, name), "ttl_left": None} == before, (verb, body)
    assert len(ok(client.get("/v1/sessions"))["data"]) == 1


def test_a_prompt_is_taken_back_if_the_generation_is_refused(client: httpx.Client) -> None:
    name = made(client, prompt=PROMPT)
    before = info(client, name)["tokens"]
    answer = client.post(f"/v1/sessions/{name}/generate", json={"prompt": MORE, "structured_outputs": {"regex": "("}})
    refused(answer, 400, "structured_outputs")
    assert info(client, name)["tokens"] == before


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [3] * 5000}, None),
        ({"ttl": 0}, "ttl"),
        ({"ttl": -5}, "ttl"),
        ({"ttl": "long"}, "ttl"),
        ({"pin": 1}, "pin"),
        ({"model": "other"}, "model"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"messages": "hello"}, "messages"),
    ],
)
def test_sessions_that_cannot_be_made(client: httpx.Client, body: dict[str, Any], param: str | None) -> None:
    answer = client.post("/v1/sessions", json=body)
    assert answer.status_code == (404 if "model" in body else 400), answer.text
    if param is not None:
        assert answer.json()["error"]["param"] == param, answer.text
    assert ok(client.get("/v1/sessions"))["data"] == []
