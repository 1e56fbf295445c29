"""Times of the chat page in Debian's Chromium: its first paint, the field to write in, and keys.

A server of the bundled model runs in a process of its own. Each visit is a new profile, so nothing
is cached; a second load of it has the cache. *Bare* is a text of the same server, which a browser
shows at once. *Keys* are typed behind a conversation of ``--messages`` messages: the time from a
key to the next paint, as the browser's Event Timing tells it, in steps of 8 ms.

``python bench/page_paint.py [--visits 10] [--messages 400]``
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.base.errors import NotFound
from quire_bench.reports import Spread, print_json, print_table

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TARGET = 200.0
"""Milliseconds within which the page shows something."""
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
WATCH = """
const watch = (type, options, take) =>
    new PerformanceObserver((list) => list.getEntries().forEach(take)).observe({type, buffered: true, ...options});
window.times = {keys: []};
watch("paint", {}, (entry) => { times[entry.name] = entry.startTime; });
watch("event", {durationThreshold: 16}, (entry) => {
    if (entry.name === "keydown") times.keys.push(entry.duration);
});
new MutationObserver((_, own) => {
    if (!document.querySelector(".ask")) return;
    own.disconnect();
    requestAnimationFrame(() => setTimeout(() => { times.field = performance.now(); }));
}).observe(document, {subtree: true, childList: true});
"""
"""What runs before the page: it notes when something is painted."""
TEXT = "The quick brown fox jumps over the lazy dog. "


def times(page: Page) -> dict[str, Any]:
    """Return what a page noted, once its field was painted."""
    page.wait_for_selector(".ask")
    page.wait_for_timeout(300)
    found: dict[str, Any] = page.evaluate("times")
    return found


def visited(browser: Browser, url: str, visits: int) -> dict[str, list[float]]:
    """Return the milliseconds of each kind."""
    found: dict[str, list[float]] = {}
    for _ in range(visits):
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        context.add_init_script(WATCH)
        page = context.new_page()
        page.goto(f"{url}/inspector/vendor/d3.LICENSE")
        page.wait_for_timeout(200)
        found.setdefault("a bare text", []).append(page.evaluate("times")["first-contentful-paint"])
        for kind in ("first load", "second load"):
            page.goto("about:blank")
            page.goto(url)
            noted = times(page)
            found.setdefault(f"first paint, {kind}", []).append(noted["first-contentful-paint"])
            found.setdefault(f"the field, {kind}", []).append(noted["field"])
        context.close()
    return found


def typed(browser: Browser, url: str, messages: int) -> tuple[list[float], int]:
    """Return the milliseconds of keys that took 16 or more, and the number of keys."""
    said = [{"role": ("user", "assistant")[number % 2], "content": TEXT * 8} for number in range(messages)]
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.add_init_script(WATCH)
    page = context.new_page()
    page.goto(url)
    times(page)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        Path(file.name).write_text(json.dumps(said))
        page.locator("input[accept]").set_input_files(file.name)
        page.locator("article").nth(messages - 1).wait_for()
    page.get_by_label("Message", exact=True).press_sequentially(TEXT * 3, delay=40)
    page.wait_for_timeout(500)
    slow: list[float] = page.evaluate("times.keys")
    context.close()
    return slow, len(TEXT * 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--visits", type=int, default=10)
    parser.add_argument("--messages", type=int, default=400)
    given = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit(str(NotFound("chromium is not installed; apt-get install chromium brings it")))
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "quire.cli.main", "serve", "tiny-python", "--port", "0", "--allow-edits"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        url = next(line.split()[3] for line in process.stdout if " at http" in line)
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, headless=True, args=[*FLAGS])
            found = visited(browser, url, given.visits)
            slow, keys = typed(browser, url, given.messages)
            browser.close()
    finally:
        process.terminate()
        process.wait()
    spreads = {name: Spread.of(values) for name, values in found.items()}
    print_table([{"": name, "ms": spread} for name, spread in spreads.items()])
    longest = max(slow, default=0)
    print(f"{keys} keys behind {given.messages} messages: {len(slow)} took 16 ms or more, the longest {longest:.0f} ms")
    within = spreads["first paint, first load"].median <= TARGET
    print_json({name: spread.median for name, spread in spreads.items()} | {"slow_keys": len(slow), "within": within})


if __name__ == "__main__":
    main()
