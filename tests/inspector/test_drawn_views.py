"""The views Pages, Time and Token: what they show equals the documents; keys; refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.documents import unpacked
from tests.inspector.conftest import Visit, engine
from tests.inspector.page_use import PROMPT, close_all, expect, findings, made, sideways, told
from tests.server.conftest import Served, serving, wait_for

from quire.base.outputs import MISSES
from quire.contracts.views import OWNER_NAMES
from quire.server.http.settings import ServerSettings
from quire_inspector.routes.page_routes import FOLDER

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page

POOL_BYTES = "8MiB"
"""A pool so small that its pages are drawn with all there is to draw on them."""


@pytest.fixture(scope="module")
def small(chat_folder: Path) -> Iterator[Served]:
    """A server with a pool of some hundred pages."""
    with (
        engine(chat_folder, kv_cache_memory=POOL_BYTES) as llm,
        serving(llm, ServerSettings(allow_edits=True)) as found,
    ):
        yield found


@pytest.fixture
def server(small: Served) -> Iterator[Served]:
    yield small
    close_all(small.client)


def fresh(served: Served) -> None:
    """Let the next documents be of the state as it is now, whatever looking has cost."""
    served.llm.views.forget()
    served.llm.views.budget._free = float("-inf")


def legend(page: Page) -> dict[str, int]:
    """Numbers of the legend by what they are of."""
    entries = page.locator(".page-legend [data-kind]").all()
    return {str(one.get_attribute("data-kind")): int(one.locator("b").inner_text().replace(",", "")) for one in entries}


def pool(served: Served) -> dict[str, Any]:
    found: dict[str, Any] = told(served.client, "/v1/state/pages")
    return found


def test_the_grid_s_numbers_are_those_of_the_engine(visit: Visit, server: Served) -> None:
    made(server.client, PROMPT * 3, name="held fast", pin=True)
    made(server.client, PROMPT + "x = 1\n", name="loose")
    server.client.post("/v1/completions", json={"model": "tiny-chat", "prompt": PROMPT, "max_tokens": 4})
    fresh(server)
    with visit(f"{server.url}/#pages?evictions=128") as (page, _):
        page.wait_for_selector(".page-legend [data-kind]")
        use = server.llm.engine.page_use()
        document = pool(server)
        assert document["counts"] == {name: getattr(use, name) for name in OWNER_NAMES}
        assert use.pinned > 0 < use.evictable
        shown = legend(page)
        assert {name: shown[name] for name in OWNER_NAMES} == document["counts"]
        eviction = unpacked(document["eviction"], "i4")
        assert shown["eviction"] == int(((eviction >= 0) & (eviction < 128)).sum()) > 0
        server.llm.engine.runner.state.check()
        # The table alternative says the same.
        page.get_by_text("The grid as a table").click()
        page.get_by_label("Pages in the table").select_option("pinned pages")
        expect(page.locator(".page-table tbody tr")).to_have_count(min(50, use.pinned))
        assert findings(page) == []


def test_the_grid_is_walked_by_keys_and_says_what_it_stands_on(visit: Visit, server: Served) -> None:
    session = made(server.client, PROMPT * 3, name="walked")
    fresh(server)
    with visit(f"{server.url}/#pages") as (page, _):
        page.wait_for_selector(".page-legend [data-kind]")
        page.locator(".page-grid-stack canvas").last.focus()
        page.keyboard.press("Control+Home")
        expect(page.get_by_role("heading", name="Page 0", exact=True)).to_be_visible()
        expect(page.locator("#live")).to_have_text(re.compile("^Page 0, "))
        for key, number in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("ArrowLeft", 0)):
            page.keyboard.press(key)
            expect(page.get_by_role("heading", name=f"Page {number}", exact=True)).to_be_visible()
        pages = unpacked(told(server.client, f"/v1/state/branch-pages?branch=session:{session}")["pages"], "i4")
        for _ in range(int(pages[0])):
            page.keyboard.press("ArrowRight")
        expect(page.get_by_role("heading", name=f"Page {pages[0]}", exact=True)).to_be_visible()
        expect(page.locator(".page-tokens")).to_contain_text("def add")
        page.locator(".holder", has_text="walked").click()
        expect(page.locator(".axis-head")).to_contain_text("walked")
        wait_for(lambda: legend(page)["chosen"] == pages.size)
        # The axis is a slider over positions, which says where a rewind lands.
        axis = page.get_by_role("slider", name="Position in the branch")
        axis.press("Home")
        expect(axis).to_have_attribute("aria-valuetext", "Position 0: held by all layers; a rewind lands here.")
        expect(page).to_have_url(re.compile(f"branch=session%3A{session}"))


def test_ten_thousand_pages_are_drawn_in_a_few_calls(visit: Visit, inspected: Served) -> None:
    """What drawing takes is counted: each page is looked at a few times, and the canvas gets all of
    them at once."""
    made(inspected.client, PROMPT)
    with visit(f"{inspected.url}/#pages?tail=1") as (page, _):
        expect(page.locator(".page-grid-stack canvas").first).to_be_visible()
        found = page.evaluate(
            """async () => {
                const { PageGrid } = await import("/inspector/views/page_grid.js");
                const { pictureOf } = await import("/inspector/views/page_model.js");
                const { readTheme } = await import("/inspector/views/inks.js");
                const host = document.createElement("div"), counts = { reads: 0, calls: 0 };
                document.querySelector(".pages-body").append(host);
                host.style.width = "1000px";
                const { prototype } = CanvasRenderingContext2D;
                for (const [name, { value }] of Object.entries(Object.getOwnPropertyDescriptors(prototype)))
                    if (typeof value === "function")
                        prototype[name] = function (...given) { counts.calls += 1; return value.apply(this, given); };
                const watched = (array) => new Proxy(array, { get(all, key) { counts.reads += 1; return all[key]; } });
                const grid = new PageGrid(host, { onMove() {}, onLeave() {}, onPick() {} });
                return [5000, 10000].map((count) => {
                    const fill = (Kind, value) => watched(Kind.from({ length: count }, (_, at) => value(at)));
                    const pool = { count, references: fill(Uint16Array, (at) => at % 12), owner: fill(Uint8Array, (at) => at % 4),
                        holder: fill(Int32Array, (at) => at % 500), position: fill(Int32Array, () => 0),
                        eviction: fill(Int32Array, (at) => at % 900), branches: Array.from({ length: 500 }, (_, at) => `session:${at}`) };
                    const theme = readTheme();
                    Object.assign(counts, { reads: 0, calls: 0 });
                    grid.show({ ...pictureOf(pool, "branch", theme, count), evictions: new Map([[5, 0]]), chosen: [1, 2, 3] }, theme);
                    return { ...counts };
                });
            }"""
        )
        half, whole = found
        assert half["calls"] == whole["calls"] < 50, found
        assert 10_000 <= whole["reads"] <= 2 * half["reads"] <= 2 * 5000 * 4, found


def test_lanes_are_the_requests_and_steps_of_the_timeline(visit: Visit, server: Served) -> None:
    for number in range(3):
        body = {"model": "tiny-chat", "prompt": PROMPT + f"# {number}\n", "max_tokens": 5, "ignore_eos": True}
        assert server.client.post("/v1/completions", json=body).status_code == 200
    with visit(f"{server.url}/#time?lanes=each") as (page, _):
        found = told(server.client, "/v1/state/timeline")
        lanes = len(found["requests"])
        expect(page.locator(".lane-counts")).to_contain_text(f"{lanes} lanes")
        expect(page.locator(".lane-counts")).to_contain_text(f"{found['step']} steps")
        page.locator(".lane-canvas").focus()
        page.keyboard.press("ArrowDown")
        last = found["requests"][-1]
        detail = page.get_by_role("region", name="Request", exact=True)
        expect(detail).to_contain_text(f"#{last['number']} request")
        expect(detail).to_contain_text(last["id"])
        expect(detail).to_contain_text("5 tokens of at most 5")
        expect(detail).to_contain_text("as many tokens as were asked for")
        expect(page.locator("#live")).to_have_text(re.compile(f"^#{last['number']} request, finished"))
        # The present is followed until somebody moves.
        follow = page.get_by_role("button", name="Follow")
        expect(follow).to_have_attribute("aria-pressed", "true")
        page.keyboard.press("ArrowLeft")
        expect(follow).to_have_attribute("aria-pressed", "false")
        page.keyboard.press("f")
        expect(follow).to_have_attribute("aria-pressed", "true")
        expect(page.locator(".plot canvas").first).to_be_visible()
        assert findings(page) == []


def test_every_reason_for_a_miss_has_its_sentence() -> None:
    told = (FOLDER / "views" / "lane_details.js").read_text(encoding="utf-8")
    for miss, sentence in MISSES.items():
        assert f'  {miss}: "{sentence}",\n' in told


def test_a_token_s_numbers_are_those_of_the_document(visit: Visit, server: Served) -> None:
    session = made(server.client, PROMPT, name="looked into")
    branch = f"session:{session}"
    with visit(f"{server.url}/#token?branch={branch}&position=7&layer=1") as (page, _):
        found = told(server.client, f"/v1/state/token?branch={branch}&position=7")
        expect(page.locator(".chance-figure")).to_contain_text(f"rank {found['token']['rank']}")
        expect(page.locator(".chances .chance .token-chip").first).to_have_text(
            found["alternatives"][0]["text"].replace("\n", "↵")
        )
        weights = told(server.client, f"/v1/state/attention?branch={branch}&position=7&layer=1")
        mean = unpacked(weights["weights"], "f4").reshape(weights["shape"]).mean(0)
        top = page.locator(".top-weights button").first
        expect(top).to_have_attribute("aria-label", re.compile(f"^Position {int(np.argmax(mean))}, "))
        expect(page.locator(".token-mark.heated")).to_have_count(8)
        page.get_by_label("Head", exact=True).select_option("Head 1")
        first = unpacked(weights["weights"], "f4").reshape(weights["shape"])[1]
        expect(top).to_have_attribute("aria-label", re.compile(f"^Position {int(np.argmax(first))}, "))
        expect(page.locator(".norm-card .plot")).to_have_count(2)
        # Tokens are chosen by click and by key.
        page.locator("[data-position='3']").click()
        expect(page.get_by_label("Position", exact=True)).to_have_value("3")
        page.locator(".token-list").focus()
        page.keyboard.press("ArrowRight")
        expect(page.get_by_label("Position", exact=True)).to_have_value("4")
        expect(page.locator("#live")).to_have_text(re.compile("^Position 4: probability "))
        page.get_by_role("button", name="After the end").click()
        expect(page.locator(".chance-head")).to_contain_text("what the model would say next")
        assert findings(page) == []


def test_a_refusal_is_shown_in_the_server_s_words(visit: Visit, server: Served) -> None:
    server.client.post("/v1/completions", json={"model": "tiny-chat", "prompt": PROMPT * 2, "max_tokens": 4})
    fresh(server)
    cached = [one["id"] for one in told(server.client, "/v1/state/history")["branches"] if one["kind"] == "cached"]
    refused = server.client.get(f"/v1/state/token?branch={cached[0]}&position=3")
    assert refused.status_code == 400
    with visit(f"{server.url}/#token?branch={cached[0]}&position=3") as (page, watch):
        watch.allow("status of 400")
        expect(page.locator(".chance-host [role=alert]")).to_have_text(refused.json()["error"]["message"])


def test_the_token_view_opens_on_a_session_with_tokens(visit: Visit, server: Served) -> None:
    """And stays there. A session without tokens, and a cached prefix, have nothing to compute."""
    made(server.client, "", name="empty")
    server.client.post("/v1/completions", json={"model": "tiny-chat", "prompt": PROMPT * 2, "max_tokens": 4})
    fresh(server)
    with visit(f"{server.url}/#token") as (page, watch):
        watch.allow("status of 400")
        chosen = page.locator(".branch-select option:checked")
        expect(chosen).to_be_attached()
        assert "empty" not in chosen.inner_text()
        made(server.client, PROMPT, name="written")
        made(server.client, PROMPT, name="another")
        expect(chosen).to_contain_text("written")
        expect(page.locator(".chance-figure")).to_contain_text("rank")


def test_a_branch_that_grows_is_read_again(visit: Visit, server: Served) -> None:
    session = made(server.client, PROMPT, name="growing")
    with visit(f"{server.url}/#token?branch=session:{session}") as (page, watch):
        watch.allow(r"409 \(Conflict\)")  # the view may ask while the session is appended to
        before = page.locator(".token-mark")
        wait_for(lambda: before.count() > 0)
        count = before.count()
        server.client.post(f"/v1/sessions/{session}/append", json={"text": "# more\n"})
        wait_for(lambda: before.count() > count, seconds=20)


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", ["pages", "time", "token"])
def test_they_fit_a_phone(name: str, visit: Visit, server: Served) -> None:
    session = made(server.client, PROMPT * 3, name="narrow")
    options: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    with visit(f"{server.url}/#{name}?branch=session:{session}", **options) as (page, _):
        page.wait_for_selector(f".view-{name} .card")
        page.wait_for_timeout(300)
        assert sideways(page) == []
        assert findings(page) == []
