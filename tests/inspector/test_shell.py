"""The page around its views: keys, a server that goes away, themes, what others wrote, sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.inspector.conftest import Visit, engine
from tests.inspector.page_use import close_all, expect, findings, made, open_view, row, sideways, told
from tests.server.conftest import Served, serving, wait_for

from quire.server.http.settings import ServerSettings

VIEWS = ("Chat", "History", "Pages", "Time", "Token", "Playground")
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "javascript:alert(1)",
    "{{constructor.constructor('alert(1)')()}} ${alert(1)} <%= 7*7 %>",
    "\u202etxet sdrawkcab\u202c \u2066hidden\u2069",
    "bell\x07 escape\x1b[31m null\u2400 del\x7f line\u2028break",
    "'\"><svg onload=alert(1)><math href=javascript:alert(1)>",
)


@pytest.fixture(scope="module")
def hostile(inspected: Served) -> Iterator[Served]:
    """A server whose sessions' names, labels and texts were written by somebody hostile."""
    for text in HOSTILE:
        name = "".join(letter for letter in text if letter.isprintable())
        made(inspected.client, f"# {text}\n", name=name, labels={"said": name})
    made(inspected.client, "\n".join(HOSTILE) * 3, name="long " + "n" * 251)
    yield inspected
    close_all(inspected.client)


def test_what_others_wrote_is_shown_and_nothing_of_it_happens(visit: Visit, hostile: Served) -> None:
    with visit(f"{hostile.url}/#history") as (page, _):
        expect(page.get_by_role("treeitem").first).to_be_visible()
        shown = page.locator("[role=tree]").inner_text()
        for text in HOSTILE[:4]:
            assert text[:20] in shown
        assert "\u202e" not in shown, "an override of direction stands for itself"
        for item in page.get_by_role("treeitem").all():
            item.click()
            expect(page.get_by_role("region", name="Details")).to_be_visible()
        for name in VIEWS:
            open_view(page, name)
            page.wait_for_timeout(100)
        assert page.evaluate("document.querySelectorAll('#view img, #view script, #view iframe').length") == 0
        assert page.title().endswith("Quire inspector")


@pytest.mark.product(2)
@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("name", VIEWS)
def test_axe_finds_nothing_serious(name: str, scheme: str, visit: Visit, hostile: Served) -> None:
    with visit(f"{hostile.url}/#{name.lower()}", color_scheme=scheme) as (page, _):
        page.wait_for_selector(f".view-{name.lower()}")
        page.wait_for_timeout(300)
        assert findings(page) == []


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", VIEWS)
def test_a_phone_needs_no_scrolling_to_the_side(name: str, visit: Visit, hostile: Served) -> None:
    with visit(f"{hostile.url}/#{name.lower()}", viewport={"width": 360, "height": 740}) as (page, _):
        page.wait_for_selector(f".view-{name.lower()}")
        page.wait_for_timeout(200)
        assert sideways(page) == []


def test_a_theme_is_chosen_and_kept(visit: Visit, inspected: Served) -> None:
    with visit(f"{inspected.url}/#history", color_scheme="light") as (page, _):
        ground = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(ground)
        page.get_by_role("button", name="Switch to the dark theme").click()
        dark = page.evaluate(ground)
        assert dark != light
        page.reload()
        expect(page.get_by_role("button", name="Switch to the light theme")).to_be_visible()
        assert page.evaluate(ground) == dark


def test_a_key_is_asked_for(visit: Visit, inspected: Served) -> None:
    settings = ServerSettings(api_key=("right-key", "other-key"))
    with serving(inspected.llm, settings, authorization="Bearer right-key") as served:
        made(served.client, name="behind a key")
        with visit(f"{served.url}/#history") as (page, watch):
            watch.allow("401")
            dialog = page.get_by_role("dialog")
            expect(dialog).to_be_visible()
            dialog.get_by_label("Key of this server").fill("wrong-key")
            dialog.get_by_role("button", name="Connect").click()
            expect(dialog.get_by_role("alert")).to_contain_text("Wrong key")
            dialog.get_by_label("Key of this server").fill("right-key")
            dialog.get_by_role("button", name="Connect").click()
            expect(row(page, "behind a key")).to_be_visible()
            page.reload()
            expect(row(page, "behind a key")).to_be_visible()
        with visit(f"{served.url}/#key=other-key") as (page, _):
            open_view(page, "History")
            expect(page.get_by_text("Nothing here yet")).to_be_visible()
            assert "other-key" not in page.url
        close_all(served.client)


def test_numbers_at_the_bottom_are_those_of_the_engine(visit: Visit, inspected: Served) -> None:
    """As ``check`` and ``page_use`` count the pages."""
    close_all(inspected.client)
    for number in range(3):
        made(inspected.client, f"x = {number}\n" * 30, name=f"one {number}", pin=number == 0)
    engine_ = inspected.llm.engine
    with engine_.lock:
        engine_.runner.state.check()
        use = engine_.page_use()
    counted = {name: getattr(use, name) for name in ("total", "free", "evictable", "held", "pinned")}
    wait_for(lambda: told(inspected.client, "/v1/state")["use"] == counted)
    taken = use.held + use.pinned
    with visit(f"{inspected.url}/#history") as (page, _):
        bar = page.locator("#statusbar")
        expect(bar).to_contain_text(f"{taken} of {use.total:,} in use, {use.evictable} evictable")
        expect(bar).to_contain_text("Sessions3")
    close_all(inspected.client)


@pytest.mark.slow
def test_a_thousand_sessions_leave_the_page_usable(visit: Visit, chat_folder: object) -> None:
    settings = ServerSettings(allow_edits=True, max_sessions=1100)
    with engine(chat_folder, kv_cache_memory="64MiB") as llm, serving(llm, settings) as served:
        session = made(served.client, name="first of them")
        for start in range(0, 1000, 100):
            answer = served.client.post(
                f"/v1/sessions/{session}/fork", json={"n": 100, "name": f"group {'klmnopqrst'[start // 100]}xy"}
            )
            assert answer.status_code == 200
        with visit(f"{served.url}/#history") as (page, _):
            expect(page.get_by_text("1,001 branches")).to_be_visible()
            assert page.locator("*").count() < 3000
            page.get_by_role("searchbox").fill("group txy")
            expect(page.get_by_text("100 of 1,001 branches")).to_be_visible()
            page.get_by_role("searchbox").fill("")
            # The search waits for the end of typing: before, the last row is one of the hundred.
            expect(page.get_by_text("1,001 branches", exact=True)).to_be_visible()
            page.get_by_role("tree").focus()
            page.keyboard.press("End")
            expect(page.get_by_role("treeitem", selected=True)).to_be_visible()
            page.keyboard.press("Enter")
            expect(page.get_by_role("region", name="Details")).to_be_visible()
            for name in ("Pages", "Token"):
                open_view(page, name)
                assert page.locator("*").count() < 4000
