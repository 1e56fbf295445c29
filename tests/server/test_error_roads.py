"""Whatever fails in the engine reaches the client as what it was: every class of error, on every
road to a client.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire.base.errors import (
    AlreadyExists,
    BlendLoadError,
    Cancelled,
    CheckpointError,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotDurable,
    NotFound,
    PoolExhausted,
    QuireError,
    QuotaExceeded,
    RanksBroken,
    ResourceExhausted,
    StoreDamaged,
    StoreFull,
    TierError,
    TierFull,
    Unsupported,
)
from quire.base.forks import Forked
from quire.base.sampling_params import BeamSearchParams
from quire.branches.state_loads import LoadFailed
from quire.grammars.trial import GrammarsBusy
from quire.server.http.errors import RETRY_AFTER, STATUSES, STORE_UNAVAILABLE, api_error
from quire.store.records import Unfit
from quire_inspector.views.state_views import StateViews

from .conftest import Served, pages_free, wait_for

REFUSED, INTERNAL = "invalid_request_error", "server_error"
EXPECTED: dict[type[QuireError], tuple[int, str, str]] = {
    QuireError: (500, "internal_error", INTERNAL),
    InvalidArgument: (400, "invalid_argument", REFUSED),
    AlreadyExists: (409, "already_exists", REFUSED),
    NotFound: (404, "not_found", REFUSED),
    FailedPrecondition: (409, "failed_precondition", REFUSED),
    Forked: (409, "failed_precondition", REFUSED),
    ResourceExhausted: (400, "resource_exhausted", REFUSED),
    StoreFull: (507, "store_full", INTERNAL),
    PoolExhausted: (503, "pool_exhausted", INTERNAL),
    QuotaExceeded: (429, "quota_exceeded", "rate_limit_error"),
    GrammarsBusy: (429, "rate_limit_exceeded", "rate_limit_error"),
    Unsupported: (400, "unsupported", REFUSED),
    Cancelled: (499, "cancelled", REFUSED),
    DataLoss: (400, "data_loss", REFUSED),
    StoreDamaged: (500, "store_damaged", INTERNAL),
    BlendLoadError: (400, "blend_load_error", REFUSED),
    CheckpointError: (400, "bad_checkpoint", REFUSED),
    NotDurable: (507, "not_durable", INTERNAL),
    LoadFailed: (500, "internal_error", INTERNAL),
    Unfit: (500, "internal_error", INTERNAL),
    TierError: (503, "store_unavailable", INTERNAL),
    TierFull: (503, "store_unavailable", INTERNAL),
    RanksBroken: (500, "ranks_broken", INTERNAL),
}
"""Status, code and type of each class."""

REASON = "the reason why it failed"
WORDS = {"internal_error": "internal error", "store_unavailable": STORE_UNAVAILABLE}
"""What clients learn in place of a reason that is for the log."""
TURN = [{"role": "user", "content": "def fib(n):"}]
LIMITS = {"max_tokens": 4, "temperature": 0}

Road = tuple[str, dict[str, Any]]
ROADS: dict[str, Road] = {
    "completion": ("/v1/completions", {"prompt": "a", **LIMITS}),
    "samples": ("/v1/completions", {"prompt": "a", "n": 2, **LIMITS}),
    "prompts": ("/v1/completions", {"prompt": ["a", "b"], **LIMITS}),
    "scored prompt": ("/v1/completions", {"prompt": "a b", "echo": True, "logprobs": 1, **LIMITS}),
    "completion in a session": ("/v1/completions", {"prompt": "a", "session_id": "ID", **LIMITS}),
    "chat": ("/v1/chat/completions", {"messages": TURN, **LIMITS}),
    "chat in a session": ("/v1/chat/completions", {"messages": TURN, "session_id": "ID", **LIMITS}),
    "session": ("/v1/sessions", {"prompt": "a b c"}),
    "session of messages": ("/v1/sessions", {"messages": TURN}),
    "append": ("/v1/sessions/ID/append", {"text": "a b c"}),
    "generate": ("/v1/sessions/ID/generate", LIMITS),
    "generate behind a prompt": ("/v1/sessions/ID/generate", {"prompt": "a b c", **LIMITS}),
    "answer": ("/v1/sessions/ID/generate", {"messages": TURN, **LIMITS}),
    "score": ("/v1/sessions/ID/score", {"text": "a b c"}),
    "warm": ("/v1/warm", {"segments": [[*range(5, 45)], [*range(6, 46)]]}),
    "blended completion": ("/v1/completions", {"prompt": [{"tokens": [*range(5, 45)]}], "blend": True, **LIMITS}),
    "blended chat": ("/v1/chat/completions", {"messages": TURN, "blend": True, **LIMITS}),
}
"""Path and body of every call that runs something; ID is a session's."""
GENERATING = {name: road for name, road in ROADS.items() if road[0].endswith(("completions", "generate"))}
STREAMS = {f"streamed {name}": (path, {**body, "stream": True}) for name, (path, body) in GENERATING.items()}


READS = ("", "/history", "/text?branch=session:x", "/pages", "/pages/0/0", "/tiers", "/events")
"""What is below ``/v1/state`` and reads the state, or tiers."""


def classes(kind: type[QuireError] = QuireError) -> Iterator[type[QuireError]]:
    """All classes of errors that an engine or a server may raise; clients have their own, and tests
    may have.
    """
    if kind.__module__.startswith("quire.") and kind.__module__ != "quire.cli.client":
        yield kind
    for one in kind.__subclasses__():
        yield from classes(one)


def test_every_class_has_its_line() -> None:
    assert set(classes()) == set(EXPECTED)
    for kind, (status, code, type_) in EXPECTED.items():
        found = api_error(kind(REASON))
        assert (found.status, found.code, found.type) == (status, code, type_), kind
        assert found.message == WORDS.get(code, REASON)
        headers = {429: {"Retry-After": str(RETRY_AFTER)}, 507: {"x-should-retry": "false"}}
        same = {503: 429, 500: 507 if code in ("store_damaged", "ranks_broken") else 500}
        assert found.headers == headers.get(same.get(status, status), {})
    # A narrower class behind a wider one would never be found.
    for number, (kind, _, _) in enumerate(STATUSES):
        assert not any(issubclass(kind, wider) for wider, _, _ in STATUSES[:number]), kind


@pytest.fixture(scope="module")
def session(chat_served: Served) -> Iterator[str]:
    name = chat_served.client.post("/v1/sessions", json={"prompt": "def add(a, b):"}).json()["id"]
    yield name
    chat_served.client.delete(f"/v1/sessions/{name}")
    wait_for(lambda: pages_free(chat_served.llm))


def answers(client: httpx.Client, session: str, roads: dict[str, Road]) -> Iterator[tuple[str, httpx.Response]]:
    """What every road brings."""
    for name, (path, body) in roads.items():
        sent = {key: session if value == "ID" else value for key, value in body.items()}
        yield name, client.post(path.replace("ID", session), json=sent)


def assert_is(error: dict[str, Any], kind: type[QuireError], where: Any) -> None:
    _, code, type_ = EXPECTED[kind]
    assert (error["code"], error["type"]) == (code, type_), where
    assert error["message"] == WORDS.get(code, REASON), where


@pytest.mark.product(7)
@pytest.mark.parametrize("place", ["forward", "schedule"])
@pytest.mark.parametrize("kind", EXPECTED, ids=lambda kind: kind.__name__)
def test_what_fails_before_a_token_has_its_status(
    chat_served: Served, session: str, monkeypatch: pytest.MonkeyPatch, kind: type[QuireError], place: str
) -> None:
    """In the forward, or where nobody knows whose fault it is; streamed or not."""
    client, engine, status = chat_served.client, chat_served.llm.engine, EXPECTED[kind][0]
    before, execute = client.get(f"/v1/sessions/{session}").json()["tokens"], engine.runner.execute

    def broken(*_: Any, **__: Any) -> None:
        raise kind(REASON)

    if place == "forward":
        monkeypatch.setattr(engine.runner, "execute", lambda step: broken() if step.chunks else execute(step))
    else:
        monkeypatch.setattr(engine.scheduler, "schedule", broken)
    for name, answer in answers(client, session, ROADS | STREAMS):
        where = (name, answer.status_code, answer.text)
        assert answer.status_code == status, where
        assert answer.headers.get("retry-after") == (str(RETRY_AFTER) if status in (429, 503) else None), where
        assert_is(answer.json()["error"], kind, where)
    assert client.get(f"/v1/sessions/{session}").json()["tokens"] == before


@pytest.mark.product(7)
@pytest.mark.parametrize("kind", EXPECTED, ids=lambda kind: kind.__name__)
def test_what_fails_behind_a_token_ends_a_stream(
    chat_served: Served, session: str, monkeypatch: pytest.MonkeyPatch, kind: type[QuireError]
) -> None:
    client, engine = chat_served.client, chat_served.llm.engine
    execute = engine.runner.execute

    def broken(step: Any) -> Any:
        if step.chunks and any(one.output.token_ids for samples in engine.requests.by_id.values() for one in samples):
            raise kind(REASON)
        return execute(step)

    monkeypatch.setattr(engine.runner, "execute", broken)
    for name, answer in answers(client, session, GENERATING | STREAMS):
        where = (name, answer.status_code, answer.text)
        if name in GENERATING:
            assert answer.status_code == EXPECTED[kind][0], where
            assert_is(answer.json()["error"], kind, where)
        else:
            events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            assert (answer.status_code, events[-1]) == (200, "[DONE]"), where
            assert "choices" in json.loads(events[0]), where
            assert_is(json.loads(events[-2])["error"], kind, where)


def test_results_in_python_have_the_error_itself(chat_served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, error = chat_served.llm._llm, PoolExhausted(REASON)

    execute = llm.engine.runner.execute

    def broken(step: Any) -> Any:
        if step.chunks:
            raise error
        return execute(step)

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.runner, "execute", broken)
        (output,) = llm.generate("a b c")
        (search,) = llm.beam_search("a b c", BeamSearchParams(beam_width=2, max_tokens=2))
    (sample,) = output.outputs
    assert (sample.finish_reason, sample.error) == ("error", REASON)
    assert sample.failure is search.failure is error
    (output,) = llm.generate("a b c")
    assert output.outputs[0].failure is None


@pytest.mark.product(3)
@pytest.mark.parametrize("kind", EXPECTED, ids=lambda kind: kind.__name__)
def test_what_fails_in_a_reader_has_its_status(
    chat_served: Served, monkeypatch: pytest.MonkeyPatch, kind: type[QuireError]
) -> None:
    views = chat_served.llm.views

    def broken(*_: Any, **__: Any) -> None:
        raise kind(REASON)

    monkeypatch.setattr(views, "state", broken)
    monkeypatch.setattr(views, "tiers", broken)
    monkeypatch.setattr(StateViews, "tiers", broken)
    views.forget()
    for path in READS:
        answer = chat_served.client.get(f"/v1/state{path}")
        where = (path, answer.status_code, answer.text)
        assert answer.status_code == EXPECTED[kind][0], where
        assert_is(answer.json()["error"], kind, where)
    monkeypatch.undo()
    assert {chat_served.client.get(f"/v1/state{path}").status_code for path in ("", "/history", "/tiers")} == {200}
