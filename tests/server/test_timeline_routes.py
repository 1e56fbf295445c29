"""``/v1/state/timeline`` of a real server: what it tells whom, and that it keeps up."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
from tests.server.conftest import serving

from quire import AsyncLLM
from quire.engine.view_budget import SHARE, ViewBudget
from quire.server.http.settings import ServerSettings

TEXT = "the secret of the first key"


def ended(client: httpx.Client, since: int = 0) -> list[dict[str, Any]]:
    document = client.get("/v1/state/timeline", params={"since": since}).raise_for_status().json()
    return [one for one in document["requests"] if one["phase"] == "finished"]


def complete(client: httpx.Client, prompt: str = TEXT, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    return client.post("/v1/completions", json=body).raise_for_status().json()


def test_a_request_is_told_with_its_phases_and_its_tokens(llm: AsyncLLM) -> None:
    with serving(llm) as found:
        before = found.client.get("/v1/state/timeline").json()
        usage = complete(found.client)["usage"]
        after = found.client.get("/v1/state/timeline", params={"since": before["step"]}).json()
    (lane,) = after["requests"]
    assert [phase for phase, _ in lane["phases"]] == ["waiting", "prefill", "decode"]
    times = [lane["arrival"], *(at for _, at in lane["phases"]), lane["first_token"], lane["finished"], after["now"]]
    assert times == sorted(times)
    assert lane["prompt_tokens"] == usage["prompt_tokens"]
    assert lane["output_tokens"] == usage["completion_tokens"] == 4
    assert (lane["kind"], lane["finish_reason"], lane["own"]) == ("request", "length", True)
    assert after["steps"]["number"] == list(range(before["step"] + 1, after["step"] + 1))
    assert sum(after["steps"]["generated"]) == 4
    assert sum(after["steps"]["tokens"]) == sum(chunk[3] for chunk in after["prefills"]) + sum(
        after["steps"]["decodes"]
    )
    assert after["epoch"] == before["epoch"]
    assert TEXT not in str(after)
    for name in ("first_token", "inter_token", "request", "queue"):
        assert 0 <= after["latencies"][name]["p50"] <= after["latencies"][name]["p99"]


def test_nothing_new_is_little(llm: AsyncLLM) -> None:
    with serving(llm) as found:
        complete(found.client)
        last = found.client.get("/v1/state/timeline").json()["step"]
        again = found.client.get("/v1/state/timeline", params={"since": last}).json()
        assert (again["step"], again["requests"], again["prefills"]) == (last, [], [])
        assert not any(again["steps"].values())
        assert found.client.get("/v1/state/timeline", params={"since": last + 10**9}).json()["step"] == last


def test_a_bad_since_is_refused_by_name(llm: AsyncLLM) -> None:
    with serving(llm) as found:
        for bad in ("-1", "x", "1.5"):
            answer = found.client.get("/v1/state/timeline", params={"since": bad})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "since"


def test_requests_of_other_keys_are_not_shown(llm: AsyncLLM) -> None:
    for shared in (False, True):
        first, second = f"first-{shared}", f"second-{shared}"
        settings = ServerSettings(api_key=(first, second), share_prefix_cache=shared)
        with serving(llm, settings, authorization=f"Bearer {first}") as found:
            since = found.client.get("/v1/state/timeline").json()["step"]
            complete(found.client)
            name = found.client.post("/v1/sessions", json={"prompt": TEXT}).raise_for_status().json()["id"]
            found.client.post(f"/v1/sessions/{name}/generate", json={"max_tokens": 2}).raise_for_status()
            mine = ended(found.client, since)
            assert [one["kind"] for one in mine] == ["request", "run", "turn"]
            assert all(one["own"] and "id" in one for one in mine)
            with httpx.Client(
                base_url=found.url, headers={"authorization": f"Bearer {second}"}, trust_env=False
            ) as other:
                document = other.get("/v1/state/timeline", params={"since": since}).json()
                complete(other, "another")
                theirs = other.get("/v1/state/timeline", params={"since": since}).json()
            assert found.client.get("/v1/state/timeline", headers={"authorization": "Bearer wrong"}).status_code == 401
        nothing = {"requests", "prefills", "running", "waiting", "preemptions"}
        assert not any(document[name] for name in nothing)
        assert not any(document["steps"].values())
        assert {one["count"] for one in document["latencies"].values()} == {0}
        assert {value for name, value in document["rates"].items() if name != "seconds"} == {0.0}
        # Of its own request it sees all: the number among its own, tokens, and steps.
        (lane,) = theirs["requests"]
        ran, steps = lane["prompt_tokens"] - lane["cached_tokens"], theirs["steps"]
        assert lane["number"] == 1
        assert sum(steps["tokens"]) == ran + lane["output_tokens"] - 1
        assert sum(steps["generated"]) == lane["output_tokens"]
        assert sum(steps["decodes"]) == lane["output_tokens"] - 1
        assert [chunk[1:] for chunk in theirs["prefills"]] == [[lane["number"], lane["cached_tokens"], ran]]
        assert {one["count"] for one in theirs["latencies"].values()} == {1}
        assert theirs["step"] > document["step"] >= steps["number"][0] - 1


def test_it_does_not_wait_for_a_step(llm: AsyncLLM) -> None:
    with serving(llm) as found:
        answers: list[int] = []
        with llm.engine.lock:
            reader = threading.Thread(target=lambda: answers.append(found.client.get("/v1/state/timeline").status_code))
            reader.start()
            reader.join(30)
        assert answers == [200]


def test_looking_has_its_turn(llm: AsyncLLM) -> None:
    """What took long is not done again at once, and nobody waits for longer than a second."""
    with serving(llm) as found:
        for spent, least in ((0.01, 0.4), (10.0, 0.9)):
            llm.engine.timeline.budget = ViewBudget()
            llm.engine.timeline.budget.spend(spent)
            begun = time.monotonic()
            found.client.get("/v1/state/timeline").raise_for_status()
            assert least <= time.monotonic() - begun < 10.0 / SHARE, spent
    llm.engine.timeline.budget = ViewBudget()
