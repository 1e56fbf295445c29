"""The watch over pages notices what it is there for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.inspector.conftest import Visit

PAGES = {
    "/quiet": "<h1>nothing</h1>",
    "/dialog": "<script>alert(1)</script>",
    "/error": "<script>console.error('broken')</script>",
    "/thrown": "<script>throw new Error('broken')</script>",
    "/missing": "<img src=/nothing.png>",
    "/abroad": "<img src=https://example.com/x.png>",
    "/policy": "<meta http-equiv=Content-Security-Policy content=\"script-src 'self'\"><p onclick='x()'>a</p><script>1</script>",
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = PAGES.get(self.path)
        self.send_response(200 if body is not None or self.path == "/favicon.ico" else 404)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(f"<!doctype html><title>page</title>{body}".encode())

    def log_message(self, *said: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def pages() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/dialog", "dialog: 1"),
        ("/error", "console: broken"),
        ("/thrown", "uncaught: "),
        ("/missing", "404"),
        ("/abroad", "request to https://example.com/x.png"),
        ("/policy", "Content Security Policy"),
    ],
)
def test_what_a_page_must_not_do_is_noticed(visit: Visit, pages: str, path: str, told: str) -> None:
    with pytest.raises(AssertionError, match=told), visit(pages + path) as (page, _):
        page.wait_for_timeout(50)


def test_a_quiet_page_passes_and_what_was_announced_is_let_through(visit: Visit, pages: str) -> None:
    with visit(f"{pages}/quiet") as (page, watch):
        assert page.inner_text("h1") == "nothing"
        assert watch.faults == []
    with visit(f"{pages}/error") as (page, watch):
        watch.allow("broken")
        page.wait_for_timeout(50)
        assert watch.faults == ["console: broken"]
