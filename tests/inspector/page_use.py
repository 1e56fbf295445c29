"""What tests do with the page and with its server, each in a word."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.inspector.conftest import PATIENCE

REASON = "playwright or axe-playwright-python is not installed (pip install '.[browser]')"
expect = pytest.importorskip("playwright.sync_api", reason=REASON).expect
Axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason=REASON).Axe
# Documents are read as seldom as looking costs little, and machines that test are busy.
expect.set_options(timeout=PATIENCE)

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"
SERIOUS = ("serious", "critical")


def made(client: httpx.Client, prompt: str = PROMPT, **options: Any) -> str:
    """Make a session; its id."""
    answer = client.post("/v1/sessions", json={"prompt": prompt, **options})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def told(client: httpx.Client, path: str) -> Any:
    """A document, or what another endpoint tells. While looking has to wait for its turn a document
    of all branches is an old one; then the next one that has all sessions as they are.
    """
    until = time.monotonic() + 20
    while True:
        answer = client.get(path)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        if path.partition("?")[0] != "/v1/state/history":
            return found
        sessions = client.get("/v1/sessions", params={"limit": 1000}).json()["data"]
        here = {f"session:{one['id']}": one["num_tokens"] for one in sessions}
        shown = {one["id"]: one["num_tokens"] for one in found["branches"] if one["kind"] == "session"}
        if here == shown:
            return found
        assert time.monotonic() < until, (here, shown)
        time.sleep(0.1)


def close_all(client: httpx.Client) -> None:
    """Close all sessions."""
    for one in told(client, "/v1/sessions?limit=1000")["data"]:
        client.delete(f"/v1/sessions/{one['id']}")


def tokens(client: httpx.Client, session: str) -> list[int]:
    """The ids of a session."""
    return list(told(client, f"/v1/sessions/{session}")["tokens"])


def row(page: Page, name: str) -> Locator:
    """The row of a branch in the tree."""
    named = page.locator("bdi.name", has_text=re.compile(f"^{re.escape(name)}$"))
    return page.get_by_role("treeitem").filter(has=named).first


def open_view(page: Page, name: str) -> None:
    """Go to a view by its tab, and wait until it is there."""
    page.get_by_role("navigation").get_by_role("link", name=name).click()
    page.wait_for_selector(f".view-{name.lower()}")


def findings(page: Page, *, within: str | None = None) -> list[str]:
    """What axe-core calls serious or critical, a line each."""
    # The policy of the page forbids scripts that are not its own, and this one is the test's.
    found = Axe().run(page, context=within).response
    return [
        f"{one['id']}: {one['help']} {[node['target'] for node in one['nodes']][:4]}"
        for one in found["violations"]
        if one["impact"] in SERIOUS
    ]


def sideways(page: Page) -> Sequence[str]:
    """What is wider than the window, so that the page would scroll to the side."""
    return list(
        page.evaluate(
            """() => document.scrollingElement.scrollWidth <= innerWidth ? [] :
            [...document.querySelectorAll("body *")].filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
                .map((one) => one.tagName + "." + one.className)"""
        )
    )
