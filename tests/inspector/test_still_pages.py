"""``quire inspect --open`` in the browser: a state file, a store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.inspector.conftest import Visit
from tests.inspector.page_use import PROMPT, expect, findings, open_view, row
from tests.server.conftest import wait_for

from quire import LLM
from quire.server.http.listeners import bind, url_of
from quire.store.files import FileTier
from quire_inspector.files.snapshot_server import FileSource, SnapshotServer, SnapshotSource, StoreSource

KEY = "a-key"


@pytest.fixture(scope="module")
def stills(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a state file of a windowed session, and a store of two branches."""
    folder = tmp_path_factory.mktemp("stills")
    with LLM("tiny-python", dtype="float32", kv_cache_memory="16MiB", store=[f"file://{folder}/store"]) as llm:
        with llm.session(PROMPT, window=64, sink=4) as session:
            for _ in range(4):
                session.append(PROMPT)
            session.save(folder / "slid.quire")
        with llm.session(PROMPT * 10) as session:
            session.commit("main", "first")
            session.append("x = 1\n")
            session.commit("other")
        yield folder


@contextmanager
def shown(make: Callable[[], SnapshotSource]) -> Iterator[str]:
    """Show it; the address."""
    sockets = bind("127.0.0.1", 0)
    server = SnapshotServer(make(), KEY, sockets[0].getsockname()[1], lambda: None)
    thread = threading.Thread(target=server.run, args=(sockets,))
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield f"{url_of(sockets[0])}/#key={KEY}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def test_a_state_file(visit: Visit, stills: Path) -> None:
    with shown(lambda: FileSource(stills / "slid.quire")) as url, visit(url) as (page, watch):
        expect(row(page, "slid")).to_be_visible()
        assert KEY not in page.url
        bar = page.get_by_role("navigation")
        expect(bar.get_by_role("link", name="Time")).to_be_hidden()
        expect(bar.get_by_role("link", name="Playground")).to_be_hidden()
        row(page, "slid").click()
        details = page.get_by_role("region", name="Details")
        expect(details).to_contain_text("64 tokens, the first 4 among them")
        expect(details.get_by_role("button", name="Fork")).to_have_count(0)
        assert findings(page) == []
        open_view(page, "Pages")
        legend = page.get_by_role("list", name="Legend")
        expect(legend).to_contain_text("held")
        # What needs the model is refused, and the page says why.
        watch.allow("status of 400")
        open_view(page, "Token")
        expect(page.locator("#view")).to_contain_text("need the model")
        expect(page.get_by_role("region", name="Norms")).to_contain_text("positions held")
    assert {one.partition(" ")[0] for one in watch.requests} == {"GET"}


def test_a_store(visit: Visit, stills: Path) -> None:
    with shown(lambda: StoreSource(FileTier(stills / "store", None))) as url, visit(url) as (page, _):
        expect(row(page, "main")).to_be_visible()
        row(page, "other").click()
        page.get_by_role("button", name="Compare…").click()
        row(page, "main").click()
        expect(page.get_by_role("region", name="Comparison")).to_contain_text("are the same")
        open_view(page, "Pages")
        expect(page.get_by_role("list", name="Legend")).to_contain_text("pinned")
        page.get_by_role("link", name="History").click()
        page.goto(url.replace(f"#key={KEY}", "#time"))
        page.wait_for_selector(".view-history")


def test_without_the_key_nothing_is_shown(visit: Visit, stills: Path) -> None:
    with shown(lambda: FileSource(stills / "slid.quire")) as url, visit(url.partition("#")[0]) as (page, watch):
        watch.allow("401")
        expect(page.get_by_role("dialog")).to_be_visible()
        expect(page.get_by_role("treeitem")).to_have_count(0)
