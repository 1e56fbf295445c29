"""A server that is killed and comes back on its port: the page goes on, and is not loaded again."""

from __future__ import annotations

from pathlib import Path

from tests.inspector.conftest import Visit
from tests.inspector.page_use import expect, made, row
from tests.ports import lasting_port
from tests.server.conftest import OPTIONS
from tests.server.killable import killable


def test_a_server_goes_away_and_comes_back(visit: Visit, chat_folder: Path, tmp_path: Path) -> None:
    port = lasting_port()
    with killable(chat_folder, tmp_path / "first", options=OPTIONS, port=port) as first:
        made(first.client, name="before the end")
        with visit(f"{first.url}/#history") as (page, watch):
            watch.allow("ERR_", "Failed to load resource", "net::")
            expect(row(page, "before the end")).to_be_visible()
            page.evaluate("window.notLoadedAgain = true")
            first.kill()
            expect(page.locator("#banner")).to_contain_text("What is shown is the last that was known")
            expect(row(page, "before the end")).to_be_visible()
            with killable(chat_folder, tmp_path / "second", options=OPTIONS, port=port) as second:
                made(second.client, name="after it")
                expect(page.locator("#banner")).to_be_hidden()
                expect(row(page, "after it")).to_be_visible()
                expect(page.get_by_role("treeitem").filter(has_text="before the end")).to_have_count(0)
                expect(page.get_by_text("The server was started anew")).to_be_visible()
                assert page.evaluate("window.notLoadedAgain")
