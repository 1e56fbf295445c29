"""Which names of the server and which web pages a request may come with."""

from __future__ import annotations

from typing import Any

import pytest

from quire.server.http.errors import ApiError
from quire.server.http.settings import ServerSettings
from quire.server.http.sites import STATELESS, Sites

from .conftest import STATE_FILE, Served, serving

OWN = "http://localhost:8000"
FOREIGN = "https://evil.example"


def refusal(
    path: str = "/v1/x", method: str = "POST", *, public: bool = False, given: Any = None, **headers: str
) -> str:
    """The code of a refusal, "" if a request passes, "reads only" if a page may only read."""
    named = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": named}
    try:
        return "reads only" if Sites(ServerSettings(**given or {})).check(scope, public=public) else ""
    except ApiError as error:
        return str(error.code if error.status == 403 else error.status)


@pytest.mark.parametrize(
    ("host", "settings", "known"),
    [
        ("127.0.0.1:8000", {}, True),
        ("[::1]", {}, True),
        ("[::1]:8000", {}, True),
        ("10.0.3.7:8000", {}, True),  # a probe of Kubernetes; and no name can be had for it
        ("localhost", {}, True),
        ("LocalHost.:9000", {}, True),  # a tunnel has a port of its own
        ("evil.example:8000", {}, False),
        ("localhost.evil.example", {}, False),
        ("127.0.0.1.evil.example", {}, False),
        ("", {}, False),
        (":8000", {}, False),
        ("localhost:x", {}, False),
        ("evil.example@localhost", {}, True),  # what a browser never sends; the name is localhost
        ("box", {}, False),
        ("box:8000", {"host": "box"}, True),
        ("Quire.Example", {"allowed_host": ("quire.example",)}, True),
        ("quire.example", {"allowed_host": ("QUIRE.example", "other")}, True),
        ("evil.example", {"allowed_host": ("quire.example",)}, False),
        ("evil.example", {"allowed_host": ("*",)}, True),
        ("evil.example", {"api_key": ("secret",)}, True),
        ("evil.example", {"api_key": ("secret",), "allowed_host": ("quire.example",)}, False),
    ],
)
def test_names_of_the_server(host: str, settings: dict[str, Any], known: bool) -> None:
    for method, path in (("GET", "/v1/sessions"), ("GET", "/"), ("POST", "/v1/completions"), ("GET", "/metrics")):
        found = refusal(path, method, public=path == "/", given=settings, host=host)
        assert found == ("" if known else "host_not_allowed"), path
    assert refusal("/health", "GET", public=True, given=settings, host=host) == ""


def test_a_client_without_the_header_is_no_browser() -> None:
    assert refusal() == ""


def test_two_names_are_none() -> None:
    assert refusal(host="localhost, localhost") == "host_not_allowed"


@pytest.mark.parametrize("settings", [{}, {"api_key": ("secret",)}, {"allow_edits": True}])
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": FOREIGN},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"origin": "http://127.0.0.1:8000"},
        {"origin": FOREIGN, "sec_fetch_site": "cross-site"},
        {"origin": "http://localhost:3000", "sec_fetch_site": "same-site"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "something new"},
    ],
)
def test_pages_of_other_sites(headers: dict[str, str], settings: dict[str, Any]) -> None:
    for method in ("GET", "POST", "DELETE"):
        assert refusal("/v1/sessions", method, given=settings, host="localhost:8000", **headers) == "origin_not_allowed"
        allowed = {**settings, "allowed_origin": ("*",)}
        assert refusal("/v1/sessions", method, given=allowed, host="localhost:8000", **headers) == ""
    # Links lead to the page, and to the documentation.
    assert refusal("/", "GET", public=True, given=settings, host="localhost:8000", **headers) == ""


def test_an_allowed_origin_is_taken_as_it_is() -> None:
    allowed = {"allowed_origin": ("https://a.example", "app://notes")}
    for origin, code in (
        ("https://a.example", ""),
        ("app://notes", ""),
        ("https://a.example:444", "origin_not_allowed"),
    ):
        assert refusal(given=allowed, host="localhost", origin=origin, sec_fetch_site="cross-site") == code


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (OWN, "localhost:8000"),
        ("https://quire.example", "quire.example"),  # a proxy with a certificate, in front
        ("https://quire.example", "quire.example:443"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_pages_of_its_own(origin: str, host: str) -> None:
    names = {"allowed_host": ("*",)}
    for site in ({}, {"sec_fetch_site": "same-origin"}):
        headers = {"origin": origin, "host": host, **site}
        assert refusal("/v1/sessions", given=names, **headers) == "edits_not_allowed"
        assert refusal("/v1/sessions/x", "DELETE", given=names, **headers) == "edits_not_allowed"
        assert refusal("/v1/sessions", "GET", given=names, **headers) == "reads only"
        for path in STATELESS:
            assert refusal(path, given=names, **headers) == "reads only"
        assert refusal("/v1/sessions", given={**names, "allow_edits": True}, **headers) == ""
        assert refusal("/v1/sessions", given={**names, "allowed_origin": (origin,)}, **headers) == ""


def test_a_proxy_may_rename_the_server() -> None:
    """Then only the browser knows that the page is the server's own."""
    headers = {"host": "127.0.0.1:8000", "origin": "https://quire.example"}
    assert refusal(sec_fetch_site="same-origin", **headers) == ""
    assert refusal(**headers) == "origin_not_allowed"


def test_a_page_reads_sessions_and_changes_none(served: Served) -> None:
    client, page = served.client, {"origin": served.url}
    made = client.post("/v1/sessions", json={"prompt": "x = 1"}).json()
    body = {"prompt": "y", "max_tokens": 1}
    assert client.post("/v1/completions", json=body, headers=page).status_code == 200
    for path, given in (
        ("/v1/completions", {**body, "session_id": made["id"]}),
        (f"/v1/sessions/{made['id']}/append", {"text": "y"}),
        ("/v1/sessions", {}),
    ):
        answer = client.post(path, json=given, headers=page)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "edits_not_allowed")
    assert client.get(f"/v1/sessions/{made['id']}", headers=page).json()["num_tokens"] == made["num_tokens"]
    client.delete(f"/v1/sessions/{made['id']}")


def test_a_page_of_another_site_makes_nothing(served: Served) -> None:
    client = served.client
    with serving(served.llm, ServerSettings(allowed_origin=("*",))) as open_to_all:
        for kind in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
            for one in (client, open_to_all.client):
                answer = one.post("/v1/sessions/state", content=b"x", headers=kind)
                assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
                answer = one.post("/v1/sessions", content=b'{"prompt": "x"}', headers=kind)
                assert answer.status_code == 400
                assert "Content-Type: application/json" in answer.json()["error"]["message"]
    answer = client.post("/v1/sessions/state", content=b"x", headers={**STATE_FILE, "origin": FOREIGN})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    answer = client.get("/v1/sessions", headers={"host": "evil.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
    assert "--allowed-host" in answer.json()["error"]["message"]
    assert client.get("/health", headers={"host": "evil.example"}).status_code == 200
