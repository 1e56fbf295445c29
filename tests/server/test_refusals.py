"""What is refused is counted; what is misspelt is refused where nobody else's clients call; what
only generating shows.
"""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from quire import AsyncLLM

from .conftest import OPTIONS, STATE_FILE, Served, serving

AMBIGUOUS = 'start: s\ns: s s | s s s | "x" | ""'
"""A text of n letters has more readings than there are atoms."""


def refusals(client: httpx.Client) -> dict[str, float]:
    text = client.get("/metrics").text
    return {
        name: float(value) for name, value in re.findall(r'^quire:refusals_total{error="(\w+)"} (\S+)$', text, re.M)
    }


@pytest.mark.parametrize(
    ("error", "method", "path", "body"),
    [
        ("InvalidArgument", "POST", "/v1/completions", {"prompt": "a", "temperature": -1}),
        ("InvalidArgument", "POST", "/v1/completions", {"prompt": 3.5}),
        ("NotFound", "GET", "/v1/sessions/session-0", None),
        ("NotFound", "POST", "/v1/completions", {"prompt": "a", "model": "nobody"}),
        ("NotFound", "POST", "/v1/unload_lora_adapter", {"lora_name": "tiny-python"}),
        ("DataLoss", "POST", "/v1/sessions/state", "no state"),
    ],
)
def test_refusals_are_counted(served: Served, error: str, method: str, path: str, body: Any) -> None:
    before = refusals(served.client)
    given = (
        {"content": body, "headers": STATE_FILE}
        if isinstance(body, str)
        else {"json": body}
        if body is not None
        else {}
    )
    answer = served.client.request(method, path, **given)
    assert 400 <= answer.status_code < 500
    after = refusals(served.client)
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert grown == {error: 1.0}, answer.text


@pytest.mark.parametrize(
    ("verb", "body", "slip"),
    [
        ("", {"prompt": "a", "pinned": True}, "pinned"),
        ("append", {"text": "a", "token": [1]}, "token"),
        ("score", {"text": "a", "top": 3}, "top"),
        ("fork", {"count": 2}, "count"),
        ("rewind", {"to": 1, "by": 1}, "by"),
        ("edit", {"span": [0, 1], "text": "", "new": "x"}, "new"),
        ("adapter", {"name": None, "lora_name": "x"}, "lora_name"),
        ("generate", {"max_tokens": 1, "temprature": 0}, "temprature"),
    ],
)
def test_a_slip_in_a_call_of_sessions(served: Served, verb: str, body: dict[str, Any], slip: str) -> None:
    made = served.client.post("/v1/sessions", json={"prompt": "class Stack:"}).json()
    path = f"/v1/sessions/{made['id']}/{verb}" if verb else "/v1/sessions"
    answer = served.client.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == slip
    assert error["message"] == f"{slip}: there is no such field in this call"
    assert served.client.get(f"/v1/sessions/{made['id']}").json()["num_tokens"] == made["num_tokens"]
    served.client.delete(f"/v1/sessions/{made['id']}")


def test_clients_of_others_may_send_what_nobody_knows(served: Served) -> None:
    body = {"prompt": "a", "max_tokens": 1, "some_new_field": 1}
    assert served.client.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_cannot_go_on(served: Served, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gave it is told why; it is nobody else's fault."""
    monkeypatch.setattr("quire.grammars.formats.MASK_ITEMS", 300)  # 50,000 take half a minute
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "structured_outputs": {"grammar": AMBIGUOUS}}
    answer = served.client.post("/v1/completions", json={**body, "stream": stream}, timeout=120)
    if stream:
        assert answer.status_code == 200
        assert "the grammar cannot go on from here" in answer.text
        assert "internal error" not in answer.text
    else:
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith("structured_outputs: the grammar cannot go on from here: ")
        assert "items" in answer.text
    assert served.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_the_length_of_a_model_in_a_small_pool() -> None:
    llm = AsyncLLM("tiny-python", **{**OPTIONS, "kv_cache_memory": "512KiB"})
    with serving(llm) as small:
        (card,) = small.client.get("/v1/models").json()["data"]
        assert card["max_model_len"] == llm.engine.runner.state.capacity
        assert card["max_model_len"] < llm.engine.max_model_len
        answer = small.client.post("/tokenize", json={"prompt": "a"})
        assert answer.json()["max_model_len"] == card["max_model_len"]
