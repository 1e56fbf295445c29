"""A real browser before a real server.

``browser`` is Debian's Chromium, headless, driven by Playwright; where one of the two is missing
the tests are skipped with the reason. Of the packages that have one ``chromium-headless-shell``
takes less processor time, so it comes first. ``visit`` opens pages in it. Each page is watched:
whatever it must never do (a dialog, an error on the console, a violation of the content security
policy, a request to anybody but its own server) fails the test.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

import httpx
import pytest
from tests.server.conftest import OPTIONS, TEMPLATE, Served, serving, shallow_copy

from quire import AsyncLLM
from quire.server.http.settings import ServerSettings

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

MODEL = os.environ.get("QUIRE_CHAT_MODEL", "")
"""A real model to tell the stories of ``test_chat.py`` with, instead of two layers of the bundled
one."""
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-software-rasterizer",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    # Nothing but this machine has an address: what the browser itself asks for goes nowhere.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
PATIENCE = 180_000 if MODEL else 20_000
"""Milliseconds that the page may take for anything: a real model writes for many of them."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Close the sessions that a failed test has left, so that tests behind it do not see them."""
    report = yield
    if call.when == "call" and report.failed:
        from tests.inspector.page_use import close_all  # needs Playwright, which these tests have

        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Served):
                with suppress(httpx.HTTPError):  # A server that the test has ended has none.
                    close_all(value.client)
    return report


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the pages of a module; each page has a profile of its own. While it runs,
    Playwright's event loop is the thread's, so that nothing else may run one."""
    if (chromium := shutil.which("chromium-headless-shell") or shutil.which("chromium")) is None:
        pytest.skip("chromium is not installed (apt-get install chromium-headless-shell)")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install '.[browser]')"
    )
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=chromium, headless=True, args=[*FLAGS])
        try:
            yield found
        finally:
            found.close()


class Watch:
    """What a page did that no page of ours may do."""

    def __init__(self, page: Page, origin: str) -> None:
        self.faults: list[str] = []
        self.allowed: list[str] = [r"status of 409 .*/v1/chats/"]
        """Patterns of faults that a test brings about: a server that is gone, a wrong key. The page
        that wrote a conversation second (also one that was reloaded while its last write was on its
        way) is told so by 409, and merges."""
        self.requests: list[str] = []
        """Method and path of every request to the server."""
        self._origin = origin
        page.on("console", self._console)
        page.on("pageerror", lambda error: self._fault(f"uncaught: {error}"))
        page.on("dialog", self._dialog)
        page.on("popup", lambda other: self._fault(f"popup: {other.url}"))
        page.on("request", lambda request: self._request(request.method, request.url))

    def _console(self, said: Any) -> None:
        if said.type in ("error", "warning"):
            address = said.location.get("url") if said.text.startswith("Failed to load") else None
            self._fault(f"console: {said.text}{f' {address}' if address else ''}")

    def _fault(self, text: str) -> None:
        self.faults.append(text)

    def _dialog(self, dialog: Any) -> None:
        self._fault(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, method: str, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme in ("data", "blob"):
            return
        if f"{parts.scheme}://{parts.netloc}" != self._origin:
            self._fault(f"request to {url}")
        self.requests.append(f"{method} {parts.path}{f'?{parts.query}' if parts.query else ''}")

    def allow(self, *patterns: str) -> None:
        """Tolerate faults in which one of these regular expressions is found."""
        self.allowed += patterns

    def unexpected(self) -> list[str]:
        """Return the faults that no test has announced."""
        return [fault for fault in self.faults if not any(re.search(pattern, fault) for pattern in self.allowed)]


Visit: TypeAlias = Callable[..., AbstractContextManager[tuple["Page", Watch]]]


@pytest.fixture
def visit(browser: Browser) -> Visit:
    """Return what opens a page: ``with visit(url) as (page, watch)``. Its options are those of
    Playwright's contexts: ``color_scheme``, ``viewport`` ...
    """

    @contextmanager
    def opened(url: str, **options: Any) -> Iterator[tuple[Page, Watch]]:
        parts = urlsplit(url)
        settings = {"viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce", **options}
        context = browser.new_context(**settings)
        context.set_default_timeout(PATIENCE)
        try:
            page = context.new_page()
            watch = Watch(page, f"{parts.scheme}://{parts.netloc}")
            page.goto(url)
            yield page, watch
            assert watch.unexpected() == [], watch.requests[-12:]
        finally:
            context.close()

    return opened


def run_aside(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in a thread: on this one Playwright's own event loop runs."""
    thread = threading.Thread(target=asyncio.run, args=(work,))
    thread.start()
    thread.join()


def small_model(folder: Path, template: str = TEMPLATE) -> Path:
    """Make two layers of the bundled model with a chat template."""
    shallow_copy(folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(MODEL) if MODEL else small_model(tmp_path_factory.mktemp("models") / "tiny-chat")


@contextmanager
def engine(folder: Path | str, **options: Any) -> Iterator[AsyncLLM]:
    """Make an LLM that is closed afterwards."""
    room = {"kv_cache_memory": "512MiB"} if MODEL else {}
    made = AsyncLLM(folder, **{**OPTIONS, **room, **options})
    try:
        yield made
    finally:
        run_aside(made.close())


@pytest.fixture(scope="module")
def inspected(chat_folder: Path) -> Iterator[Served]:
    """A server with two layers of the bundled model, whose page may fork and rewind."""
    with engine(chat_folder) as llm, serving(llm, ServerSettings(allow_edits=True)) as found:
        yield found


@pytest.fixture(scope="module")
def looked_at(chat_folder: Path) -> Iterator[Served]:
    """The same without ``--allow-edits``."""
    with engine(chat_folder) as llm, serving(llm) as found:
        yield found
