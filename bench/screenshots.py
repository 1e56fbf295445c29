"""Screenshots of all displays of state: the inspector's page, notebooks, terminals.

It runs servers of the bundled model and drives Debian's Chromium (``apt-get install chromium``;
``pip install '.[browser,notebook]'``). The scene is the same each time, times and rates are not.

``python bench/screenshots.py [--only history,pages] [--output docs/images]``
"""

from __future__ import annotations

import argparse
import asyncio
import io
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from rich.console import Console

from quire import LLM, AsyncLLM, SamplingParams
from quire.base.errors import NotFound
from quire.cli.remote_chat import Link
from quire.server.http.app import create_app
from quire.server.http.listeners import bind, url_of
from quire.server.http.serving import Server
from quire.server.http.settings import ServerSettings
from quire_inspector.top import Watch, screen
from screenshot_chat import conversation
from screenshot_scene import MODULE, Scene

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

OUTPUT = Path(__file__).parents[1] / "docs" / "images"
LARGEST = 200_000
"""Most bytes of a picture."""
COLORS = (256, 128, 64, 32)
"""Numbers of colours of a picture; the first that keeps it small enough."""
WIDE = {"width": 1280, "height": 800}
COLUMNS = 110
"""Columns of a terminal."""
PHONE = {"width": 360, "height": 740}
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
OPTIONS: dict[str, Any] = {
    "max_num_batched_tokens": 96,
    "device": "cpu",
    "dtype": "float32",
    "kv_cache_memory": "48MiB",
    "max_num_seqs": 4,
}

OTHER_FOLDER = """([old, other]) => {
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode())
        if (walker.currentNode.data.includes(old)) walker.currentNode.data = walker.currentNode.data.replaceAll(old, other);
}"""
"""Replaces this machine's folders in pictures."""

Taken = Callable[["Page"], None]


class Album:
    """The folder of pictures, and the browser that takes them."""

    def __init__(self, browser: Browser, folder: Path, scratch: Path, only: list[str]) -> None:
        self._browser, self._folder, self._only = browser, folder, only
        self.scratch = scratch
        folder.mkdir(parents=True, exist_ok=True)

    def wants(self, name: str) -> bool:
        """Return True if a picture is to be made."""
        return not self._only or any(name.startswith(one) for one in self._only)

    def take(
        self, name: str, url: str, act: Taken, *, size: dict[str, int] = WIDE, schemes: tuple[str, ...] = ("light",)
    ) -> None:
        """Open a page, act on it, and save its picture. The dark one's name ends in ``-dark``."""
        for scheme in schemes if self.wants(name) else ():
            context = self._browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
            try:
                page = context.new_page()
                page.goto(url)
                act(page)
                page.wait_for_timeout(600)
                page.evaluate(OTHER_FOLDER, [str(self.scratch), "/var/quire"])
                self.keep(name if scheme == "light" else f"{name}-{scheme}", page.screenshot())
            finally:
                context.close()

    def of_html(self, name: str, html: str, width: int = 900) -> None:
        """Save the picture of a document."""
        page = self._browser.new_page(viewport={"width": width, "height": 200})
        try:
            page.set_content(f"<body style='margin:12px;background:white'>{html}</body>")
            self.keep(name, page.screenshot(full_page=True))
        finally:
            page.close()

    def of_terminal(self, name: str, parts: list[Any]) -> None:
        """Save the picture of a terminal's content."""
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), markup=False, emoji=False)
        for part in parts:
            console.print(part)
        svg = console.export_svg(title="quire", font_aspect_ratio=0.61)
        page = self._browser.new_page(viewport={"width": 1200, "height": 200})
        try:
            # Use local fonts only: rich's HTML refers to fonts on another server.
            page.route("**/*", lambda route: route.abort())
            page.set_content(f"<body style='margin:0'>{svg}</body>")
            self.keep(name, page.locator("svg").first.screenshot())
        finally:
            page.close()

    def keep(self, name: str, data: bytes) -> None:
        """Write a picture, small enough for a slow connection."""
        image = Image.open(io.BytesIO(data)).convert("RGB")
        for colors in COLORS:
            packed = io.BytesIO()
            image.quantize(colors, dither=Image.Dither.NONE).save(packed, "PNG", optimize=True)
            if packed.tell() < LARGEST:
                break
        (self._folder / f"{name}.png").write_bytes(packed.getvalue())
        print(f"{name}.png: {packed.tell():,} bytes, {colors} colours", flush=True)


@contextmanager
def served(llm: AsyncLLM, **settings: Any) -> Iterator[str]:
    """Run a server over ``llm`` on a free port; yield its address."""
    app = create_app(llm, ServerSettings(allow_edits=True, **settings))
    sockets = bind("127.0.0.1", 0)
    server = Server(app)
    thread = threading.Thread(target=server.run, args=(sockets,))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.02)
        yield url_of(sockets[0])
    finally:
        server.should_exit = True
        thread.join()


def run_aside(work: Any) -> None:
    """Run a coroutine in a thread, because Playwright's event loop runs on this one."""
    thread = threading.Thread(target=asyncio.run, args=(work,))
    thread.start()
    thread.join()


def row(page: Page, name: str) -> None:
    """Click a branch in the tree."""
    named = page.locator("bdi.name", has_text=re.compile(f"^{re.escape(name)}$"))
    page.locator("[role=treeitem]").filter(has=named).first.click()


# -- the page --------------------------------------------------------------------------------------


def of_history(album: Album, url: str) -> None:
    """Take the tree with details, a comparison, a phone."""

    def details(page: Page) -> None:
        row(page, "put and get")
        page.wait_for_selector(".details:not([hidden])")

    def comparison(page: Page) -> None:
        row(page, "with types")
        page.get_by_role("button", name="Compare…").click()
        row(page, "a deque")
        page.wait_for_selector(".sides")

    album.take("history", f"{url}/#history?scale=even", details, schemes=("light", "dark"))
    album.take("history-compare", f"{url}/#history?scale=even", comparison)
    album.take("history-phone", f"{url}/#history", lambda page: page.wait_for_selector("[role=treeitem]"), size=PHONE)


def of_chat(album: Album, url: str) -> None:
    """Take a conversation with its tree: on a desk, in the dark, on a phone."""
    file = conversation(album.scratch / "conversation.json")

    def bring(page: Page) -> None:
        page.wait_for_selector(".welcome")
        page.locator("input[accept]").set_input_files(file)
        page.wait_for_selector(".katex")

    def talk(page: Page) -> None:
        bring(page)
        for number, question in enumerate(("def median(values):", "def deviation(values):")):
            page.get_by_label("Message", exact=True).fill(question)
            page.keyboard.press("Enter")
            page.locator(".messages > .role-assistant .why:not([hidden]) > .why-row:not([hidden])").nth(
                number
            ).wait_for()
            page.wait_for_timeout(500)
        page.get_by_role("button", name="Branches", exact=True).click()

    def read(page: Page) -> None:
        bring(page)
        page.locator(".thread-scroll").evaluate("one => one.scrollTo(0, 0)")

    album.take("chat", f"{url}/#chat", talk, size={"width": 1280, "height": 1000}, schemes=("light", "dark"))
    album.take("chat-phone", f"{url}/#chat", read, size=PHONE)


def of_pages(album: Album, url: str) -> None:
    """Take a pool, and one of its pages."""

    def hover(page: Page) -> None:
        page.wait_for_selector(".view-pages canvas")
        page.wait_for_timeout(500)
        box = page.locator(".view-pages canvas").first.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 60, box["y"] + 12)

    album.take("pages", f"{url}/#pages", hover, schemes=("light", "dark"))


def of_time(album: Album, url: str, scene: Scene) -> None:
    """Take lanes and plots under load, and the details of one request."""

    def lane(page: Page) -> None:
        page.wait_for_selector(".view-time canvas")
        page.wait_for_timeout(4000)
        box = page.locator(".view-time canvas").first.bounding_box()
        assert box is not None
        page.mouse.click(box["x"] + box["width"] * 0.8, box["y"] + 60)

    if album.wants("time"):
        with scene.loaded():
            time.sleep(8)
            album.take("time", f"{url}/#time", lane, schemes=("light", "dark"))


def of_token(album: Album, url: str, session: str) -> None:
    """Take one token: probabilities, attention, norms."""

    def wait(page: Page) -> None:
        page.wait_for_selector(".view-token canvas")
        page.wait_for_timeout(1500)

    album.take(
        "token",
        f"{url}/#token?branch=session:{session}&position=160",
        wait,
        size={"width": 1280, "height": 1000},
        schemes=("light", "dark"),
    )


def of_playground(album: Album, url: str, scene: Scene) -> None:
    """Take branches side by side."""
    if not album.wants("playground"):
        return
    first = scene.session("def area(shape):\n", "area")
    scene.write(first, 32, seed=3)
    second = scene.fork(first, "area again", at=6)
    scene.write(second, 32, seed=5)
    album.take(
        "playground",
        f"{url}/#playground?open={first},{second}",
        lambda page: page.wait_for_timeout(1500),
        schemes=("light", "dark"),
    )


def of_recurrent(album: Album, folder: Path) -> None:
    """Take pools of a model with recurrent layers: checkpoints beside pages."""
    if not album.wants("pages-recurrent"):
        return
    llm = AsyncLLM(recurrent_model(folder), **{**OPTIONS, "kv_cache_memory": "24MiB"})
    with served(llm, served_model_name="recurrent") as url:
        scene = Scene(url)
        session = scene.session(MODULE * 2, "review")
        for number in range(3):
            scene.write(scene.fork(session, f"way {number}"), 24 + 8 * number, seed=number)
        scene.session(MODULE, "another")

        def wait(page: Page) -> None:
            page.wait_for_selector(".view-pages canvas")
            page.wait_for_timeout(800)

        album.take("pages-recurrent", f"{url}/#pages?branch=session:{session}", wait)
    run_aside(llm.close())


def recurrent_model(folder: Path) -> Path:
    """Make a model of recurrent layers and some attention: random weights, the bundled
    tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from quire.models.catalogue import bundled_models
    from quire_bench.checkpoints import DRAWN

    bundled = bundled_models()["tiny-python"]
    vocabulary = AutoConfig.from_pretrained(bundled).vocab_size
    kind, values = DRAWN["bamba-small"]
    config = AutoConfig.for_model(kind, **{**values, "vocab_size": vocabulary}, eos_token_id=0, bos_token_id=0)
    torch.manual_seed(0)
    path = folder / "recurrent"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    for file in bundled.glob("tokenizer*"):
        shutil.copy(file, path)
    return path


# -- notebooks and terminals -----------------------------------------------------------------------


def of_words(album: Album) -> None:
    """Take the display of sessions and pools in notebooks and terminals."""
    if not (album.wants("notebook") or album.wants("terminal")):
        return
    with LLM("tiny-python", **OPTIONS) as llm:
        session = llm.session(MODULE, name="review")
        children = [session.fork() for _ in range(3)]
        for number, (child, name) in enumerate(zip(children, ("put", "get", "peek"), strict=True)):
            child.name = name
            child.append(f"    def {name}(self")
            child.generate(SamplingParams(temperature=0.9, seed=number, max_tokens=16 + 8 * number))
        heat = children[0].heat(layer=2, head=0)
        shown = [llm, session, session.tree(), heat, llm.pages()]
        if album.wants("notebook"):
            parts = [f"<div style='margin-bottom:14px'>{one._repr_html_()}</div>" for one in shown]
            album.of_html("notebook", "".join(parts))
        if album.wants("terminal"):
            album.of_terminal("terminal", [session, session.tree(), llm.pages()])
        for child in (*children, session):
            child.close()


def of_top(album: Album, url: str, scene: Scene) -> None:
    """Take ``quire top`` under load."""
    if not album.wants("top"):
        return
    watch = Watch(Link(url))
    with scene.loaded():
        for _ in range(12):
            found = watch.look()
            time.sleep(0.5)
    album.of_terminal("top", [screen(found, "http://127.0.0.1:8000", width=COLUMNS, height=30)])


# -- without a model -------------------------------------------------------------------------------


def of_still(album: Album, store: Path) -> None:
    """Take a store in ``quire inspect --open``."""
    if not (album.wants("inspect-store")):
        return
    import subprocess
    import sys

    command = [sys.executable, "-m", "quire.cli.main", "inspect", str(store), "--open", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[3]

        def details(page: Page) -> None:
            row(page, "main")
            page.wait_for_selector(".details:not([hidden])")

        album.take("inspect-store", address, details)
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="beginnings of names, with commas between them")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit(str(NotFound("chromium is not installed; apt-get install chromium brings it")))
    from playwright.sync_api import sync_playwright

    only = [one for one in given.only.split(",") if one]
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        folder = Path(scratch)
        browser = driver.chromium.launch(executable_path=chromium, headless=True, args=[*FLAGS])
        album = Album(browser, given.output, folder, only)
        llm = AsyncLLM("tiny-python", **OPTIONS, store=[f"file://{folder}/store"])
        with served(llm) as url:
            scene = Scene(url)
            found = scene.build()
            of_history(album, url)
            of_pages(album, url)
            of_token(album, url, found["put and get"])
            of_playground(album, url, scene)
            of_time(album, url, scene)
            of_top(album, url, scene)
            of_chat(album, url)
        run_aside(llm.close())
        of_still(album, folder / "store")
        of_words(album)
        of_recurrent(album, folder)
        browser.close()


if __name__ == "__main__":
    main()
