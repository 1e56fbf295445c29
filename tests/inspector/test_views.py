"""Pages, Time, Token and Playground: what they show is what the engine counts and computes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.documents import unpacked
from tests.inspector.conftest import Visit
from tests.inspector.page_use import PROMPT, close_all, expect, made, open_view, row, tokens, told
from tests.server.conftest import Served, wait_for

from quire.contracts.views import OWNER_NAMES


@pytest.fixture
def server(inspected: Served) -> Iterator[Served]:
    yield inspected
    close_all(inspected.client)


def settled(served: Served) -> None:
    """Wait until documents tell of the state as it is."""
    engine = served.llm.engine
    wait_for(lambda: told(served.client, "/v1/state")["use"]["free"] == engine.page_use().free)


def test_the_legend_of_pages_counts_as_the_engine_does(visit: Visit, server: Served) -> None:
    made(server.client, PROMPT * 4, name="pinned one", pin=True)
    made(server.client, PROMPT * 2, name="idle one")
    settled(server)
    engine = server.llm.engine
    with engine.lock:
        engine.runner.state.check()
        use = engine.page_use()
    pool = told(server.client, "/v1/state/pages?pool=0")
    owners = np.bincount(unpacked(pool["owner"], "u1"), minlength=len(OWNER_NAMES)).tolist()
    assert owners == [use.free, use.evictable, use.held, use.pinned]
    with visit(f"{server.url}/#pages") as (page, _):
        legend = page.get_by_role("list", name="Legend")
        for name, count in zip(OWNER_NAMES, owners, strict=True):
            expect(legend.get_by_role("listitem").filter(has_text=name).first).to_contain_text(f"{count:,}")
        shared = int((unpacked(pool["references"], "u2") > 1).sum())
        expect(page.get_by_text(f"Owners of a page ({shared} shared)")).to_be_visible()


def test_a_page_tells_who_holds_it_and_its_tokens(visit: Visit, server: Served) -> None:
    session = made(server.client, PROMPT * 2, name="holder of pages")
    server.client.post(f"/v1/sessions/{session}/fork", json={"name": "its child"})
    settled(server)
    pool = told(server.client, "/v1/state/pages?pool=0")
    references = unpacked(pool["references"], "u2")
    at = int(np.flatnonzero(references == references.max())[0])
    document = told(server.client, f"/v1/state/pages/0/{at}")
    engine = server.llm.engine
    with engine.lock:
        assert references.tolist() == engine.runner.state.page_references()[0].tolist()
    with visit(f"{server.url}/#pages") as (page, _):
        # The grid has its name when the pages are there: keys before that move nothing.
        grid = page.get_by_role("application", name=f"{len(references):,} pages")
        grid.focus()
        page.keyboard.press("Home")
        for _ in range(at):
            page.keyboard.press("ArrowRight")
        card = page.get_by_role("region", name="Page", exact=True)
        expect(card.get_by_role("heading", name=f"Page {at}")).to_be_visible()
        for holder in document["holders"]:
            expect(card).to_contain_text(f"{holder['start']} to {holder['stop']}")
        for name in ("holder of pages", "its child"):
            expect(card).to_contain_text(name)
        expect(card).to_contain_text("def")


def test_time_shows_the_requests_that_ran(visit: Visit, server: Served) -> None:
    body = {"prompt": "def f(", "max_tokens": 8, "temperature": 0}
    ran = server.client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"]
    document = told(server.client, "/v1/state/timeline?since=0")
    assert document["requests"][-1]["output_tokens"] == ran
    with visit(f"{server.url}/#time") as (page, _):
        page.wait_for_selector(".view-time canvas")
        expect(page.locator("#view")).to_contain_text("request")
        server.client.post("/v1/completions", json={**body, "max_tokens": 16})
        newest = told(server.client, "/v1/state/timeline?since=0")["step"]
        assert newest > document["step"]


def test_a_token_has_its_probability_and_norms(visit: Visit, server: Served) -> None:
    session = made(server.client, name="looked into")
    document = told(server.client, f"/v1/state/token?branch=session:{session}&position=5")
    with visit(f"{server.url}/#token?branch=session:{session}&position=5") as (page, watch):
        # Norms are refused while the chances of the same session are computed, and asked for again.
        watch.allow("status of 409")
        card = page.get_by_role("region", name="Probability")
        expect(card).to_contain_text(f"rank {document['token']['rank']}")
        expect(card).to_contain_text(str(document["id"]))
        expect(page.get_by_role("region", name="Attention")).to_contain_text("What position 5 reads")
        expect(page.get_by_role("region", name="Norms")).to_contain_text("positions held")
    assert len(told(server.client, "/v1/sessions")["data"]) == 1, "what looked is gone"


def test_the_playground_generates_forks_and_stops(visit: Visit, server: Served) -> None:
    session = made(server.client, "def area(shape):\n", name="played with")
    before = tokens(server.client, session)
    with visit(f"{server.url}/#playground?open={session}") as (page, watch):
        watch.allow("status of 4")  # a document of a moment ago
        column = page.get_by_role("region", name="Branch played with")
        expect(column).to_contain_text(f"{len(before)} tokens")
        column.get_by_role("textbox").fill("    return ")
        column.get_by_role("button", name="Run").click()
        wait_for(lambda: len(tokens(server.client, session)) > len(before) + 2)
        expect(column.get_by_role("button", name="Run")).to_be_visible()
        after = tokens(server.client, session)
        assert after[: len(before)] == before
        column.get_by_role("button", name="Fork", exact=True).click()
        expect(page.locator("section.column")).to_have_count(2)
        (child,) = [one for one in told(server.client, "/v1/sessions")["data"] if one["parent"] == session]
        assert tokens(server.client, child["id"]) == after
        other = page.locator(f"section.column[data-session='{child['id']}']")
        expect(other).to_contain_text(f"{len(after)} tokens")
        page.get_by_label("Tokens at most").fill("900")
        other.get_by_role("button", name="Run").click()
        other.get_by_role("button", name="Stop").click()
        expect(other.get_by_role("button", name="Run")).to_be_visible()
        wait_for(lambda: told(server.client, f"/v1/sessions/{child['id']}")["in_use"] is None)
        assert len(tokens(server.client, child["id"])) < len(after) + 900
        assert tokens(server.client, session) == after


def test_views_lead_to_each_other(visit: Visit, server: Served) -> None:
    session = made(server.client, name="walked through")
    with visit(f"{server.url}/#history") as (page, watch):
        watch.allow("status of 409")  # as above
        row(page, "walked through").click()
        page.get_by_role("button", name="Pages").click()
        page.wait_for_selector(".view-pages")
        expect(page.get_by_role("region", name="Branch", exact=True)).to_contain_text("walked through")
        page.go_back()
        page.wait_for_selector(".view-history")
        page.get_by_role("button", name="Token").click()
        page.wait_for_selector(".view-token")
        assert session in page.url
        open_view(page, "Playground")
