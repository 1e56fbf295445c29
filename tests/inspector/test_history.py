"""The History view: the tree, forks and rewinds by clicks, comparing, keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.inspector.conftest import Visit
from tests.inspector.page_use import PROMPT, close_all, expect, made, row, tokens, told
from tests.server.conftest import Served, wait_for


@pytest.fixture
def server(inspected: Served) -> Iterator[Served]:
    yield inspected
    close_all(inspected.client)


def test_a_fork_by_clicks_is_a_session(visit: Visit, server: Served) -> None:
    session = made(server.client, name="adder")
    with visit(f"{server.url}/#history") as (page, _):
        row(page, "adder").click()
        page.get_by_role("slider", name="Tokens to keep").fill("12")
        page.get_by_role("button", name="Fork…").click()
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_label("Tokens to keep")).to_have_value("12")
        dialog.get_by_label("Name of the new session").fill("child of clicks")
        dialog.get_by_role("button", name="Fork", exact=True).click()
        expect(row(page, "child of clicks")).to_be_visible()
        (child,) = [one for one in told(server.client, "/v1/sessions")["data"] if one["name"] == "child of clicks"]
        assert child["parent"] == session
        assert tokens(server.client, child["id"]) == tokens(server.client, session)[:12]
        expect(page.get_by_role("heading", name="child of clicks")).to_be_visible()


def test_a_rewind_by_clicks_removes_tokens(visit: Visit, server: Served) -> None:
    session = made(server.client, name="adder")
    before = tokens(server.client, session)
    with visit(f"{server.url}/#history") as (page, _):
        row(page, "adder").click()
        page.get_by_role("slider", name="Tokens to keep").fill("9")
        expect(page.get_by_text("nothing is run again.")).to_be_visible()
        page.get_by_role("button", name="Rewind…").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        assert tokens(server.client, session) == before
        page.get_by_role("button", name="Rewind…").click()
        page.get_by_role("dialog").get_by_role("button", name="Rewind", exact=True).click()
        wait_for(lambda: tokens(server.client, session) == before[:9])
        expect(row(page, "adder")).to_contain_text("9 tokens, session")


def test_comparing_tells_where_two_part(visit: Visit, server: Served) -> None:
    first = made(server.client, PROMPT + "x = 1\n", name="first one")
    second = made(server.client, PROMPT + "y = 2\n", name="second one")
    ids = [tokens(server.client, one) for one in (first, second)]
    shared = next(at for at, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)
    found = told(server.client, f"/v1/state/compare?a=session:{first}&b=session:{second}")
    assert found["shared"] == shared
    with visit(f"{server.url}/#history") as (page, _):
        row(page, "first one").click()
        page.get_by_role("button", name="Compare…").click()
        row(page, "second one").click()
        panel = page.get_by_role("region", name="Comparison")
        expect(panel.get_by_text(f"they part at position {shared}.")).to_be_visible()
        for side, session in (("A", first), ("B", second)):
            own = found[side.lower()]
            text = panel.get_by_role("region", name=f"{side}: ").inner_text()
            assert told(server.client, f"/v1/sessions/{session}")["name"] in text
            assert f"rank {own['token']['rank']}" in text
        page.keyboard.press("Escape")
        expect(panel).to_be_hidden()


def test_the_tree_is_that_of_the_document(visit: Visit, server: Served) -> None:
    """Rows of branches, their tokens and kinds, where they part; and what the engine recounts."""
    session = made(server.client, name="root")
    for name, text in (("left", "a = 1\n"), ("right", "b = 2\n")):
        child = server.client.post(f"/v1/sessions/{session}/fork", json={"name": name}).json()["ids"][0]
        server.client.post(f"/v1/sessions/{child}/append", json={"text": text})
    branches = told(server.client, "/v1/state/history")["branches"]
    with visit(f"{server.url}/#history") as (page, _):
        expect(row(page, "left")).to_be_visible()
        for branch in branches:
            if branch["kind"] == "session":
                expect(row(page, branch["name"])).to_contain_text(f"{branch['num_tokens']} tokens, session")
        row(page, "left").click()
        (left,) = [one for one in branches if one["name"] == "left"]
        facts = page.get_by_role("region", name="Details").inner_text()
        assert f"{left['pages']}, {left['shared_pages']} shared" in facts
        engine = server.llm.engine
        with engine.lock:
            state = engine.runner.state
            state.check()
            seq = next(one.seq for one in engine.branches.sessions.values() if len(one.tokens) == left["num_tokens"])
            assert seq is not None
            holding = state.sequence_pages(seq)
        assert (left["pages"], left["shared_pages"]) == (holding.held, holding.shared)


def test_the_keyboard_is_enough(visit: Visit, server: Served) -> None:
    session = made(server.client, name="by keys")
    before = tokens(server.client, session)
    with visit(f"{server.url}/#history") as (page, _):
        expect(row(page, "by keys")).to_be_visible()
        page.keyboard.press("/")
        page.keyboard.type("by keys")
        page.keyboard.press("ArrowDown")
        expect(page.get_by_role("tree")).to_be_focused()
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
        expect(page.get_by_role("region", name="Details")).to_be_visible()
        page.keyboard.press("r")
        expect(page.get_by_role("dialog")).to_be_visible()
        page.keyboard.press("Control+a")
        page.keyboard.type("7")
        page.keyboard.press("Enter")
        wait_for(lambda: tokens(server.client, session) == before[:7])
        expect(row(page, "by keys")).to_contain_text("7 tokens, session")
        page.get_by_role("tree").focus()
        page.keyboard.press("f")
        page.keyboard.press("Tab")
        page.keyboard.type("by keys too")
        page.keyboard.press("Enter")
        expect(row(page, "by keys too")).to_be_visible()
        page.keyboard.press("Escape")
        for number, name in enumerate(("Chat", "History", "Pages", "Time", "Token", "Playground"), start=1):
            page.keyboard.press(str(number))
            expect(page.get_by_role("link", name=name)).to_have_attribute("aria-current", "page")
            if name == "Chat":
                expect(page.get_by_label("Message", exact=True)).to_be_focused()
                page.keyboard.press("Escape")
    assert {one["name"] for one in told(server.client, "/v1/sessions")["data"]} == {"by keys", "by keys too"}


def test_without_edits_nothing_can_be_changed(visit: Visit, looked_at: Served) -> None:
    made(looked_at.client, name="only to look at")
    with visit(f"{looked_at.url}/#history") as (page, watch):
        row(page, "only to look at").click()
        details = page.get_by_role("region", name="Details")
        expect(details.get_by_role("button", name="Compare…")).to_be_visible()
        for verb in ("Fork", "Rewind", "Delete", "Open as session"):
            expect(page.get_by_role("button", name=verb)).to_have_count(0)
        page.get_by_role("tree").focus()
        for key in ("f", "r"):
            page.keyboard.press(key)
            expect(page.get_by_role("dialog")).to_have_count(0)
        expect(page.get_by_text("reads only")).to_be_visible()
    assert {one.partition(" ")[0] for one in watch.requests} == {"GET"}
    close_all(looked_at.client)
