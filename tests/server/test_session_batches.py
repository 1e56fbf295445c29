"""``POST /v1/sessions/generate``: several sessions in one batch, against ``LLM.generate``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire import LLM, SamplingParams
from quire.server.http.settings import ServerSettings
from quire.server.sessions.batches import SessionBatch

from .conftest import Served, serving, wait_for
from .test_sessions import GREEDY, LONG, PROMPT, made, nothing_is_left, ok, plain, post, refused  # noqa: F401

DRAWN = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}


def branches(client: httpx.Client, n: int = 3) -> list[str]:
    name = made(client, prompt=PROMPT)
    return list(ok(client.post(f"/v1/sessions/{name}/fork", json={"n": n}))["ids"])


def together(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/v1/sessions/generate", json=body)


def num_tokens(client: httpx.Client, names: list[str]) -> list[int]:
    return [ok(client.get(f"/v1/sessions/{name}"))["num_tokens"] for name in names]


def events(client: httpx.Client, **body: Any) -> Iterator[dict[str, Any]]:
    with client.stream("POST", "/v1/sessions/generate", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        yield json.loads(line.removeprefix("data: "))


def test_branches_as_in_python(client: httpx.Client, plain: LLM) -> None:  # noqa: F811
    names = branches(client)
    session = plain.session(PROMPT)
    params = [SamplingParams(**DRAWN, seed=seed) for seed in range(3)]
    expected = plain.generate(session.fork(n=3), params)
    each = [{"seed": seed} for seed in range(3)]
    answer = ok(together(client, ids=names, each=each, **DRAWN))
    assert answer["object"] == "text_completion"
    assert [choice["session_id"] for choice in answer["choices"]] == names, "in order"
    for index, (choice, output) in enumerate(zip(answer["choices"], expected, strict=True)):
        found = output.outputs[0]
        assert choice["index"] == index
        assert (choice["text"], choice["token_ids"]) == (found.text, found.token_ids)
        assert choice["finish_reason"] == found.finish_reason == "length"
        assert choice["num_tokens"] == len(session) + 8
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["usage"]["prompt_tokens"] == 3 * len(session)
    assert num_tokens(client, names) == [len(session) + 8] * 3


def test_streamed(client: httpx.Client) -> None:
    """Events carry the session's id and its place; the pieces are those of the answer at once."""
    names = branches(client)
    again = [ok(client.post(f"/v1/sessions/{name}/fork", json={}))["ids"][0] for name in names]
    each = [{"seed": 7, "logprobs": 1}, {"temperature": 0, "max_tokens": 3}, {"seed": 9}]
    whole = ok(together(client, ids=names, each=each, **DRAWN))
    found = list(events(client, ids=again, each=each, stream_options={"include_usage": True}, **DRAWN))
    assert found.pop()["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [one for event in found for one in event["choices"] if one["index"] == choice["index"]]
        assert {one["session_id"] for one in mine} == {again[choice["index"]]}
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert [token for one in mine for token in one["token_ids"]] == choice["token_ids"]
        assert [one["finish_reason"] for one in mine if one["finish_reason"]] == [choice["finish_reason"]]
        assert all((one["logprobs"] is None) == (choice["logprobs"] is None) for one in mine)
    assert [len(choice["token_ids"]) for choice in whole["choices"]] == [8, 3, 8]


def test_refusals_leave_every_session_as_it_was(client: httpx.Client) -> None:
    names = branches(client, 2)
    before = num_tokens(client, names)
    unknown = "session-" + "0" * 32
    for body, status, param, words in (
        ({"ids": []}, 400, "ids", "at least 1"),
        ({"ids": [names[0], names[1], names[0]]}, 400, "ids", f"'{names[0]}' is given twice"),
        ({"ids": [names[0], unknown]}, 404, "ids.1", "there is no session"),
        ({"ids": [str(number) for number in range(1025)]}, 400, "ids", "1025 sessions; this server holds 1024"),
        ({"ids": names, "each": [{}]}, 400, "each", "each has 1 entries for 2 ids"),
        ({"ids": names, "each": [{}, {"temperature": -1}]}, 400, "each.1.temperature", "temperature"),
        ({"ids": names, "each": [{}, {"stream": True}]}, 400, "each.1.stream", "there is no such field"),
        (
            {"ids": names, "each": [{}, {"max_tokens": 100_000}]},
            400,
            "max_tokens",
            "ids.1: This model's maximum context length",
        ),
        ({"ids": names, "n": 2}, 400, "n", "ids.0: n is 2"),
        ({"ids": names, "prompt": "a"}, 400, "prompt", "/append adds to one before"),
        ({"ids": names, "model": "another"}, 404, "model", "another"),
        ({"ids": names, "stream_options": {}}, 400, "stream_options", "stream=true"),
    ):
        assert words in refused(together(client, **body), status, param)
        assert num_tokens(client, names) == before
    post(client, names[0], "generate", **GREEDY)  # and nobody has it any more


def test_one_in_use(served: Served) -> None:
    client = served.client
    names = branches(client, 2)
    with client.stream("POST", f"/v1/sessions/{names[1]}/generate", json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert "in use by another call" in refused(together(client, ids=names, **GREEDY), 409, "ids.1")
        assert num_tokens(client, names[:1]) == [len(ok(client.get(f"/v1/sessions/{names[0]}"))["tokens"])]
        post(client, names[0], "generate", **GREEDY)
    wait_for(lambda: ok(client.get(f"/v1/sessions/{names[1]}"))["in_use"] is None)


def test_a_client_that_goes_away(served: Served) -> None:
    """All of them end; what was generated stays, and they can be used again."""
    client = served.client
    names = branches(client)
    before = num_tokens(client, names)
    with client.stream("POST", "/v1/sessions/generate", json={"ids": names, **LONG, "stream": True}) as answer:
        lines = (line for line in answer.iter_lines() if line)
        for _ in range(6):
            next(lines)
    wait_for(lambda: served.llm.engine.num_running == 0)
    wait_for(lambda: not any(held.busy for held in served.context.sessions._held.values()))
    assert all(now > then for now, then in zip(num_tokens(client, names), before, strict=True))
    ok(together(client, ids=names, **GREEDY))


def test_one_that_fails_leaves_the_others(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits break; its choice says so, the other one goes on."""
    client = served.client
    names = branches(client, 2)
    before = num_tokens(client, names)
    held = served.context.sessions._held[names[1]].session._session._branch
    drawing = served.llm.engine.sampling
    draw = drawing.draw

    def broken(logits: Any, requests: Any, first: Any) -> Any:
        for row, request in enumerate(requests):
            if request.branch.session is held and len(request.output.token_ids) == 2:
                logits[row] = float("nan")
        return draw(logits, requests, None)  # the first maxima are those of before

    monkeypatch.setattr(drawing, "draw", broken)
    first, second = ok(together(client, ids=names, **LONG | {"max_tokens": 6}))["choices"]
    assert (first["finish_reason"], second["finish_reason"]) == ("length", "error")
    assert "error" not in first
    assert set(second["error"]) == {"message", "type", "param", "code"}
    assert num_tokens(client, names) == [before[0] + 6, before[1]]
    found = [one for event in events(client, ids=names, **LONG | {"max_tokens": 6}) for one in event["choices"]]
    ends = {one["index"]: one for one in found if one["finish_reason"]}
    assert (ends[0]["finish_reason"], ends[1]["finish_reason"], "error" in ends[1]) == ("length", "error", True)


def test_one_that_is_deleted_meanwhile(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the check and the run: its choice says so, the other one runs."""
    client = served.client
    names = branches(client, 2)
    check = SessionBatch.check

    async def deleting(self: SessionBatch) -> None:
        await check(self)
        served.context.sessions._held[names[1]].session._session.close()

    monkeypatch.setattr(SessionBatch, "check", deleting)
    first, second = ok(together(client, ids=names, **GREEDY))["choices"]
    assert first["finish_reason"] == "length"
    assert second["finish_reason"] == "error"
    assert second["token_ids"] == []
    assert "the session is closed" in second["error"]["message"]


def test_sessions_of_another_key(chat_served: Served) -> None:
    with serving(chat_served.llm, ServerSettings(api_key=("one", "two"))) as found:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        name = ok(found.client.post("/v1/sessions", json={"prompt": PROMPT}, headers=one))["id"]
        answer = found.client.post("/v1/sessions/generate", json={"ids": [name]}, headers=two)
        refused(answer, 404, "ids.0")
        ok(found.client.delete(f"/v1/sessions/{name}", headers=one))
