"""``/v1/state`` and the page at ``/``: what is sent is what the engine holds, each key sees its
own, and looking neither waits for ever nor goes on when nobody looks.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import httpx
import numpy as np
import pytest
from tests.documents import unpacked

from quire import LLM, AsyncLLM, FailedPrecondition, SamplingParams
from quire.contracts.views import OWNER_NAMES
from quire.server.http.settings import ServerSettings
from quire_inspector.routes import state_events
from quire_inspector.routes.page_routes import FOLDER, POLICY
from quire_inspector.routes.state_events import StateEvents, events_of

from .conftest import OPTIONS, Served, serving, wait_for

KEYS = ("first-key", "second-key")
KINDS = {"references": "u2", "owner": "u1", "holder": "i4", "position": "i4", "eviction": "i4"}


def got(client: httpx.Client, path: str, **headers: str) -> Any:
    answer = client.get(f"/v1/state{path}", headers=headers)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["format"] == 1
    return found


def fresh(served: Served) -> None:
    """Let the next documents be of the state as it is now, whatever looking has cost."""
    served.llm.views.forget()
    served.llm.views.budget._free = float("-inf")


@contextmanager
def session(client: httpx.Client, **body: Any) -> Iterator[str]:
    headers = body.pop("headers", {})
    name = client.post("/v1/sessions", json=body, headers=headers).json()["id"]
    yield name
    client.delete(f"/v1/sessions/{name}", headers=headers)


# -- documents -------------------------------------------------------------------------------------


def test_documents(served: Served) -> None:
    client, llm = served.client, served.llm
    llm.engine.reset_prefix_cache()
    text = "def fib(n):\n    return n\n" * 4
    with session(client, prompt=text, name="<b>x</b>") as name, session(client, prompt=text[:50], pin=True) as other:
        fresh(served)
        overview = got(client, "")
        use = llm.engine.page_use()
        assert overview["use"] == {"total": use.total, **{one: getattr(use, one) for one in OWNER_NAMES}}
        assert overview["use"]["pinned"] > 0
        assert overview["model"]["name"] == "tiny-python"
        assert (overview["source"], overview["allow_edits"], overview["keys"]) == ("server", False, False)
        assert overview["branches"] == {"session": 2}
        assert overview["started"] == served.context.started
        history = got(client, "/history")
        branches = {one["id"]: one for one in history["branches"]}
        assert branches.keys() == {f"session:{name}", f"session:{other}"}
        mine = branches[f"session:{name}"]
        summary = client.get(f"/v1/sessions/{name}").json()
        assert (mine["name"], mine["num_tokens"]) == ("<b>x</b>", summary["num_tokens"])
        assert branches[f"session:{other}"]["pinned"]
        ends = {branch: node for node in history["nodes"] for branch in node["branches"]}
        parents = {node["id"]: node for node in history["nodes"]}
        together = parents[ends[f"session:{name}"]["parent"]]
        assert text.startswith(together["head"])
        assert 0 < together["end"] < mine["num_tokens"]
        tokens = got(client, f"/text?branch=session:{name}")["tokens"]
        assert [one["id"] for one in tokens] == summary["tokens"]
        assert "".join(one["text"] for one in tokens) == text
        assert got(client, f"/text?branch=session:{name}&start=3&stop=5")["tokens"] == tokens[3:5]
        pool = got(client, "/pages?pool=0")
        arrays = {field: unpacked(pool[field], kind) for field, kind in KINDS.items()}
        assert {array.size for array in arrays.values()} == {pool["num_pages"]}
        references = llm.engine.runner.state.sequences.pools[0].references
        assert arrays["references"].tolist() == references.tolist()
        assert pool["counts"] == {one: getattr(use, one) for one in OWNER_NAMES}
        assert np.bincount(arrays["owner"], minlength=4).tolist() == list(pool["counts"].values())
        shared = int(np.flatnonzero(references == 2)[0])
        page = got(client, f"/pages/0/{shared}")
        assert {one["branch"] for one in page["holders"]} == {f"session:{name}", f"session:{other}"}
        assert (page["references"], page["owner"], page["others"]) == (2, "pinned", 0)
        start = page["holders"][0]["start"]
        assert page["tokens"] == tokens[start : start + 16]
        assert pool["branches"][arrays["holder"][shared]] == f"session:{other}", "it is pinned for its sake"
        assert arrays["position"][shared] == start
        assert {pool["reading"], history["reading"], overview["reading"], page["reading"]} == {overview["reading"]}


def test_a_reading_is_shared_until_something_changes(served: Served) -> None:
    client = served.client
    with session(client, prompt="def f") as name:
        fresh(served)
        readings = [got(client, path)["reading"] for path in ("", "/history", "/pages", "/history", "")]
        assert len(set(readings)) == 1
        client.post(f"/v1/sessions/{name}/append", json={"text": "(x): return"})
        served.llm.views.budget._free = float("inf")
        assert got(client, "/history")["reading"] == readings[0], "there is no time to look again"
        assert got(client, "")["reading"] == readings[0]
        served.llm.views.budget._free = float("-inf")
        later = got(client, "/history")
        assert later["reading"] > readings[0]
        assert got(client, "")["reading"] == later["reading"]
        (branch,) = [one for one in later["branches"] if one["id"] == f"session:{name}"]
        assert branch["num_tokens"] == client.get(f"/v1/sessions/{name}").json()["num_tokens"]


def test_what_may_be_edited(llm: AsyncLLM) -> None:
    with serving(llm, ServerSettings(allow_edits=True, served_model_name="acme/tiny")) as served:
        found = got(served.client, "")
        assert found["allow_edits"] is True
        assert found["model"]["name"] == "acme/tiny"


def test_tiers_and_commits(tmp_path: Path) -> None:
    llm = AsyncLLM("tiny-python", **{**OPTIONS, "store": [f"file://{tmp_path}/store"]})
    try:
        with serving(llm) as served, session(served.client, prompt="def f(x): return x") as name:
            body = {"name": "main", "message": "m"}
            made = served.client.post(f"/v1/sessions/{name}/commit", json=body).json()["commit"]
            kinds = [one["kind"] for one in got(served.client, "/tiers")["tiers"]]
            assert "disk" in kinds
            assert got(served.client, "")["tiers"] == kinds
            assert got(served.client, "/tiers")["tiers"][-1]["label"] is not None
            fresh(served)
            (commit,) = [one for one in got(served.client, "/history")["branches"] if one["kind"] == "commit"]
            assert (commit["id"], commit["name"]) == (f"commit:{made['id']}", "main")
            tokens = got(served.client, f"/text?branch=commit:{made['id']}")["tokens"]
            assert "".join(one["text"] for one in tokens) == "def f(x): return x"
    finally:
        asyncio.run(llm.close())


# -- owners ----------------------------------------------------------------------------------------


@contextmanager
def two_keys(llm: AsyncLLM, **settings: Any) -> Iterator[tuple[Served, httpx.Client, httpx.Client]]:
    with ExitStack() as stack:
        served = stack.enter_context(serving(llm, ServerSettings(api_key=KEYS, **settings)))
        headers = [{"authorization": f"Bearer {key}"} for key in KEYS]
        clients = [
            stack.enter_context(httpx.Client(base_url=served.url, timeout=60, trust_env=False, headers=one))
            for one in headers
        ]
        yield served, clients[0], clients[1]


SECRET = "def secret_of_the_first():\n    return 'hidden words'\n"


def everything(client: httpx.Client) -> tuple[str, dict[str, Any]]:
    """All that a key can read, as one text, and its documents."""
    found: dict[str, Any] = {path: got(client, path) for path in ("", "/history", "/pages", "/tiers")}
    for page in range(8):
        found[f"/pages/0/{page}"] = got(client, f"/pages/0/{page}")
    return json.dumps(found), found


def test_each_key_sees_its_own(llm: AsyncLLM) -> None:
    with two_keys(llm) as (served, first, second):
        llm.engine.reset_prefix_cache()
        first.post("/v1/completions", json={"prompt": f"# {SECRET}", "max_tokens": 1, "temperature": 0})
        body = {"prompt": f"{SECRET}# more\n", "name": "a name of the first"}
        with session(first, **body) as mine, session(second, prompt="def other(): pass") as theirs:
            fresh(served)
            told, documents = everything(second)
            for word in ("secret", "hidden", mine, "a name of the first"):
                assert word not in told
            assert [one["id"] for one in documents["/history"]["branches"]] == [f"session:{theirs}"]
            assert [node["key"]["salt"] for node in documents["/history"]["nodes"] if node["key"]] == [None]
            assert documents[""]["keys"] is True
            pool = documents["/pages"]
            holder, owner = unpacked(pool["holder"], "i4"), unpacked(pool["owner"], "u1")
            assert pool["branches"] == [f"session:{theirs}"]
            assert set(holder[owner > 0].tolist()) == {0, -2}
            assert (unpacked(pool["position"], "i4")[holder < 0] == -1).all()
            others = np.flatnonzero(holder == -2)
            page = got(second, f"/pages/0/{others[0]}")
            assert page["holders"] == page["tokens"] == []
            assert page["others"] == page["references"] > 0
            refused = second.get(f"/v1/state/text?branch=session:{mine}")
            assert refused.status_code == 404
            assert "secret" not in refused.text
            # The first sees what is its own, and nothing of the second.
            told, documents = everything(first)
            kinds = {one["kind"] for one in documents["/history"]["branches"]}
            assert kinds == {"session", "cached"}
            assert theirs not in told
            assert "secret" in told
            cached = next(one for one in documents["/history"]["branches"] if one["kind"] == "cached")
            assert first.get(f"/v1/state/text?branch={cached['id']}").status_code == 200
            assert second.get(f"/v1/state/text?branch={cached['id']}").status_code == 404
            # Both see the same pages taken.
            assert documents["/pages"]["references"] == pool["references"]


def test_running_requests_are_their_keys_own(llm: AsyncLLM) -> None:
    with two_keys(llm) as (served, first, second):
        body = {"prompt": SECRET, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with first.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # the stream ends with them
            next(lines)
            fresh(served)
            kinds = [[one["kind"] for one in got(one, "/history")["branches"]] for one in (first, second)]
        assert kinds[0].count("request") == 1
        assert "request" not in kinds[1]


def test_shared_prefixes_are_shown_to_all_keys(llm: AsyncLLM) -> None:
    """Sessions stay their key's own."""
    with two_keys(llm, share_prefix_cache=True) as (served, first, second):
        llm.engine.reset_prefix_cache()
        first.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 1, "temperature": 0})
        with session(first, prompt="def session_of_the_first(): pass") as mine:
            fresh(served)
            told, documents = everything(second)
            assert [one["kind"] for one in documents["/history"]["branches"]] == ["cached"]
            assert "secret" in told
            assert "session_of_the_first" not in told
            assert second.get(f"/v1/state/text?branch=session:{mine}").status_code == 404
            assert first.get(f"/v1/state/text?branch=session:{mine}").status_code == 200


def test_sessions_of_the_program_are_nobodys(llm: AsyncLLM) -> None:
    made = asyncio.run(llm.session("def of_the_program(): pass"))
    try:
        with two_keys(llm) as (served, first, _):
            fresh(served)
            assert "of_the_program" not in everything(first)[0]
            assert first.get(f"/v1/state/text?branch=session:{made.number}").status_code == 404
        with serving(llm) as served:
            fresh(served)
            assert f"session:{made.number}" in {one["id"] for one in got(served.client, "/history")["branches"]}
    finally:
        asyncio.run(made.close())


def test_commits_are_their_keys_own(tmp_path: Path) -> None:
    llm = AsyncLLM("tiny-python", **{**OPTIONS, "store": [f"file://{tmp_path}/store"]})
    try:
        with two_keys(llm) as (served, first, second):
            with session(first, prompt=SECRET) as name:
                made = first.post(f"/v1/sessions/{name}/commit", json={"name": "main"}).json()["commit"]["id"]
            fresh(served)
            assert f"commit:{made}" in {one["id"] for one in got(first, "/history")["branches"]}
            told, _ = everything(second)
            assert made not in told
            assert second.get(f"/v1/state/text?branch=commit:{made}").status_code == 404
            assert first.get(f"/v1/state/text?branch=commit:{made}").status_code == 200
            assert {one["label"] for one in got(second, "/tiers")["tiers"]} == {None}
            assert str(tmp_path) not in told
    finally:
        asyncio.run(llm.close())


def test_a_key_is_needed(llm: AsyncLLM) -> None:
    with two_keys(llm) as (served, _, _):
        for path in ("", "/history", "/text", "/pages", "/pages/0/0", "/tiers", "/events"):
            assert served.client.get(f"/v1/state{path}").status_code == 401


# -- events ----------------------------------------------------------------------------------------


def events(lines: Iterator[str], count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    name = ""
    while len(found) < count:
        line = next(lines)
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            assert name == "changed"
            found.append(json.loads(line.removeprefix("data: ")))
    return found


def listening(served: Served) -> StateEvents:
    return events_of(served.context)


def test_events(served: Served) -> None:
    client = served.client
    with session(client, prompt="def f") as name:
        with client.stream("GET", "/v1/state/events") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = stream.iter_lines()
            (first,) = events(lines, 1)
            client.post(f"/v1/sessions/{name}/append", json={"text": "(x): return x" * 4})
            began = time.monotonic()
            (second,) = events(lines, 1)
            assert second["reading"] > first["reading"]
            assert second["use"]["evictable"] > first["use"]["evictable"]
            assert set(second["documents"]) == {"overview", "history", "pages", "timeline"}
            # However much happens, two events are half a second apart.
            for _ in range(6):
                client.post(f"/v1/sessions/{name}/append", json={"text": " x"})
            events(lines, 1)
            assert time.monotonic() - began > state_events.PERIOD * 0.9
        wait_for(lambda: listening(served)._listeners == 0)
        assert listening(served)._task is None, "nobody looks for nobody"


def test_the_head_of_events_waits_for_none(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateEvents, "_watch", lambda self: asyncio.Event().wait())
    monkeypatch.setattr(state_events, "QUIET", 3600.0)
    answer = served.client.head("/v1/state/events")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")
    wait_for(lambda: listening(served)._listeners == 0)


def test_a_state_that_cannot_be_read_any_more_is_the_last_event(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(llm: LLM) -> NoReturn:
        raise FailedPrecondition("no state today")

    with served.client.stream("GET", "/v1/state/events") as stream:
        lines = stream.iter_lines()
        events(lines, 1)
        monkeypatch.setattr(state_events, "_event", broken)
        with session(served.client, prompt="def h"):
            left = [line for line in lines if line]
    assert left[-2] == "event: error"
    assert "no state today" in left[-1]
    wait_for(lambda: listening(served)._task is None)


def test_quiet_streams_cost_no_reading(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_events, "PERIOD", 0.02)
    monkeypatch.setattr(state_events, "QUIET", 0.1)
    with served.client.stream("GET", "/v1/state/events") as stream:
        changes = quiet = number = 0
        for line in filter(None, stream.iter_lines()):
            # What tests before have begun may still be ending.
            changes += line.startswith("data")
            assert changes <= 8
            quiet = quiet + 1 if line == ": nothing new" else 0
            if quiet == 1:
                number = served.llm.views._number
            elif quiet == 5:
                break
        assert quiet == 5, "the server is there"
        assert served.llm.views._number == number
    wait_for(lambda: listening(served)._task is None)


def test_several_listen_to_one_watch(served: Served) -> None:
    with ExitStack() as stack:
        streams = [stack.enter_context(served.client.stream("GET", "/v1/state/events")).iter_lines() for _ in range(3)]
        for lines in streams:
            events(lines, 1)
        assert listening(served)._listeners == 3
        task = listening(served)._task
        before = served.llm.views._number
        with session(served.client, prompt="def g") as name:
            found = [events(lines, 1)[0] for lines in streams]
            assert len({one["reading"] for one in found}) == 1
            assert served.llm.views._number == before + 1
            assert listening(served)._task is task
            assert name
    wait_for(lambda: listening(served)._listeners == 0)


def test_the_end_of_the_server_ends_streams(llm: AsyncLLM) -> None:
    with serving(llm, ServerSettings(drain_seconds=20.0)) as served:
        with served.client.stream("GET", "/v1/state/events") as stream:
            lines = stream.iter_lines()
            events(lines, 1)
            began = time.monotonic()
            served.context.gate.close()
            assert [line for line in lines if line.startswith("data")] == []
            assert time.monotonic() - began < 10
        wait_for(lambda: served.context.gate.under_way == 0)


# -- the page --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_page_needs_no_key(llm: AsyncLLM, method: str) -> None:
    with two_keys(llm) as (served, _, _):
        for path, kind in (("/", "text/html"), ("/inspector/index.html", "text/html")):
            answer = served.client.request(method, path)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(kind)
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["cache-control"] == "no-cache"
            wanted = (FOLDER / "index.html").read_bytes() if method == "GET" else b""
            assert answer.content == wanted
        assert "unsafe" not in POLICY
        assert "*" not in POLICY


def test_every_file_is_served_as_what_it_is(client: httpx.Client) -> None:
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert files
    for path in files:
        answer = client.get(f"/inspector/{path.relative_to(FOLDER).as_posix()}")
        assert answer.content == path.read_bytes()
        kind = answer.headers["content-type"].partition(";")[0]
        assert kind == kinds.get(path.suffix, kind)
        assert kind != "application/octet-stream"


def test_files_are_asked_for_again_by_their_tags(client: httpx.Client) -> None:
    first = client.get("/")
    again = client.get("/", headers={"if-none-match": f'"other", {first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert client.get("/", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/inspector/..%2f..%2f__init__.py",
        "/inspector/%2e%2e/%2e%2e/__init__.py",
        "/inspector/vendor/../../../__init__.py",
        "/inspector//etc/passwd",
        "/inspector/%2fetc%2fpasswd",
        "/inspector/index.html%00.js",
        "/inspector/",
        "/inspector/lib",
        "/inspector/INDEX.HTML",
        "/inspector/index.html/",
    ],
)
def test_no_other_file_is_served(llm: AsyncLLM, path: str) -> None:
    """The paths go out as they are: clients would normalise them."""
    import http.client

    with serving(llm) as served:
        connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=30)
        connection.request("GET", path)
        answer = connection.getresponse()
        body = json.loads(answer.read())
        connection.close()
        assert (answer.status, body["error"]["code"]) == (404, "not_found")


def test_keys_are_needed_below_the_page(llm: AsyncLLM) -> None:
    """A path that begins like the page's is no way to other endpoints."""
    import http.client

    with two_keys(llm) as (served, _, _):
        for path, status in (("/inspector/../v1/state", 404), ("/inspectorate", 401), ("//v1/state", 401)):
            connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=30)
            connection.request("GET", path)
            assert connection.getresponse().status == status, path
            connection.close()


def test_arrays_are_little_endian(served: Served) -> None:
    asyncio.run(served.llm.generate("def fib(n):", SamplingParams(temperature=0, max_tokens=1)))
    fresh(served)
    pool = got(served.client, "/pages")
    raw = base64.b64decode(pool["references"])
    assert len(raw) == 2 * pool["num_pages"]
    assert {raw[0::2][page] for page in range(pool["num_pages"])} >= {0, 1}
    assert set(raw[1::2]) == {0}
