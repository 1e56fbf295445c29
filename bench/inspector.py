"""Cost of the inspector for a running engine, and the time of its readers.

*Decoding*: a batch of the bundled model decodes in a server without viewers, with viewers that
listen (``/v1/state/events``), and with viewers that fetch all documents at each event, as the page
does. The three take turns, and ratios are within a round: of elapsed time, and of the server
process's compute time. The second one counts: viewers are a process of their own, which takes time
from the engine only if no core is spare.

*Readers*: the time of each, and the time for which the engine waits, over a pool of ``--pages``
pages, most of them taken, by ``--sessions`` sessions with common beginnings.

``python bench/inspector.py [--viewers 4] [--rounds 8] [--pages 10000] [--sessions 1000]``
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO

from quire import LLM, AsyncLLM, SamplingParams
from quire.server.http.app import create_app
from quire.server.http.listeners import bind, url_of
from quire.server.http.serving import Server
from quire_bench.reports import Spread, interleave, print_json, print_table
from quire_inspector.routes.state_answers import encoded_document

TARGET = 0.02
"""Largest share of the time that viewers may take."""
DOCUMENTS = ("", "/history", "/pages?pool=0", "/pages/0/0", "/tiers")
"""Documents that a viewer fetches at each event, besides the new steps."""
NOBODY, LISTENING, LOOKING = "nobody looks", "viewers listen", "viewers look"
TOKEN_BYTES = 8192
"""Bytes of a token of the bundled model's state in float32."""
BASES = 20
"""Number of beginnings that the sessions share."""


# -- viewers, in a process of their own ------------------------------------------------------------


class Viewers:
    """Threads that listen to a server, and fetch documents on command."""

    def __init__(self, address: str, count: int) -> None:
        self.address = address
        self.count = count
        self.fetched = 0
        self.events = 0
        self._lock = threading.Lock()

    def run(self, orders: IO[str], answers: IO[str]) -> None:
        """Execute lines ("viewers look" and the like, "end") and answer each after its
        execution."""
        for order in orders:
            self.fetched = self.events = 0
            over, threads = threading.Event(), list[threading.Thread]()
            if (wanted := order.strip()) in (LISTENING, LOOKING):
                threads = [
                    threading.Thread(target=self._watch, args=(wanted == LOOKING, over)) for _ in range(self.count)
                ]
            for thread in threads:
                thread.start()
            print("ready", file=answers, flush=True)
            next(orders)
            over.set()
            for thread in threads:
                thread.join()
            print(json.dumps({"events": self.events, "fetched": self.fetched}), file=answers, flush=True)
            if wanted == "end":
                return

    def _watch(self, look: bool, over: threading.Event) -> None:
        with ExitStack() as stack:
            stream, client = (
                stack.enter_context(closing(http.client.HTTPConnection(self.address, timeout=seconds)))
                for seconds in (5, 30)
            )
            stream.request("GET", "/v1/state/events")
            answer, step = stream.getresponse(), 0
            while not over.is_set():
                try:
                    line = answer.readline()
                except TimeoutError:
                    return
                if not line.startswith(b"data: "):
                    continue
                with self._lock:
                    self.events += 1
                for path in (*DOCUMENTS, f"/timeline?since={step}") if look else ():
                    client.request("GET", f"/v1/state{path}")
                    found = json.loads(client.getresponse().read())
                    step = found.get("step", step)
                    with self._lock:
                        self.fetched += 1


@contextmanager
def viewers(url: str, count: int) -> Iterator[Callable[[str], dict[str, int]]]:
    """Start the viewers' process. Yield a function that gives them an order; called with "" it ends
    the order and returns the numbers of events and of fetched documents."""
    command = [sys.executable, str(Path(__file__)), "--serve-viewers", url.removeprefix("http://"), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def tell(order: str) -> dict[str, int]:
            print(order, file=process.stdin, flush=True)
            said = process.stdout.readline() if process.stdout else ""
            found: dict[str, int] = {} if order else json.loads(said)
            return found

        try:
            yield tell
        finally:
            process.stdin.close()


# -- decoding --------------------------------------------------------------------------------------


def decoding(count: int, rounds: int, batch: int, tokens: int) -> dict[str, object]:
    """Compare the time of decoding with and without ``count`` viewers."""
    llm = AsyncLLM("tiny-python", device="cpu", kv_cache_memory="128MiB", enable_prefix_caching=True)
    sockets = bind("127.0.0.1", 0)
    server = Server(create_app(llm))
    thread = threading.Thread(target=server.run, args=(sockets,))
    thread.start()
    seen: dict[str, list[dict[str, int]]] = {LISTENING: [], LOOKING: []}
    work: dict[str, list[float]] = {kind: [] for kind in (NOBODY, LISTENING, LOOKING)}
    """Seconds of compute of the process."""
    try:
        while not server.started:
            time.sleep(0.01)
        prompts = [f"def function_{number}(x):\n" for number in range(batch)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        with viewers(url_of(sockets[0]), count) as tell:

            def run(kind: str) -> float:
                llm.engine.reset_prefix_cache()
                tell(kind)
                time.sleep(0.2)
                started, computed = time.perf_counter(), time.process_time()
                asyncio.run(llm.generate(prompts, params))
                work[kind].append(time.process_time() - computed)
                taken = time.perf_counter() - started
                told = tell("")
                if kind in seen:
                    seen[kind].append(told)
                return taken

            def runner(kind: str) -> Callable[[], float]:
                return lambda: run(kind)

            found = interleave({kind: runner(kind) for kind in (NOBODY, LISTENING, LOOKING)}, rounds)
    finally:
        server.should_exit = True
        thread.join()
        asyncio.run(llm.close())
    rows = []
    for kind in (NOBODY, LISTENING, LOOKING):
        told = seen.get(kind, [])[-rounds:]
        rows.append(
            {
                "decoding while": kind,
                "seconds": found.spread(kind),
                "tokens_per_second": batch * tokens / found.spread(kind).median,
                "to_nobody": found.ratios[kind],
                "work_to_nobody": Spread.of(
                    [own / base for own, base in zip(work[kind][-rounds:], work[NOBODY][-rounds:], strict=True)]
                ),
                "events": sum(one["events"] for one in told),
                "documents": sum(one["fetched"] for one in told),
            }
        )
    print_table(
        [{name: str(value) if isinstance(value, Spread) else value for name, value in row.items()} for row in rows]
    )
    return {"viewers": count, "batch": batch, "tokens": tokens, "rounds": rounds, "rows": rows}


# -- readers ---------------------------------------------------------------------------------------


def readers(pages: int, sessions: int, rounds: int) -> dict[str, object]:
    """Time each reader over a state of this size."""
    page_size = 4
    memory = pages * page_size * TOKEN_BYTES * 11 // 10
    llm = LLM("tiny-python", device="cpu", dtype="float32", page_size=page_size, kv_cache_memory=memory)
    draw = random.Random(0)
    vocabulary = llm.engine.runner.model.vocab_size
    own = max(1, pages * page_size * 9 // 10 // sessions)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, vocabulary) for _ in range(count)]

    with closing(llm):
        bases = [llm.session(tokens(64)) for _ in range(min(BASES, sessions))]
        held = [bases[number % len(bases)].fork() for number in range(sessions - len(bases))]
        for session in held:
            session.append(tokens(own))
        views = llm.views
        steps: dict[str, Callable[[], object]] = {
            "reading (the engine waits)": lambda: views.state(),
            "overview": lambda: encoded_document(views.overview(state).document()),
            "history": lambda: encoded_document(views.history(state=state).document()),
            "pages": lambda: encoded_document(views.pages(0, state=state).document()),
            "page": lambda: encoded_document(views.page(0, 7, state=state).document()),
            "text": lambda: encoded_document(
                views.text(f"session:{(held or bases)[-1].number}", state=state).document()
            ),
        }
        times: dict[str, list[float]] = {name: [] for name in (*steps, "lock held")}
        sizes: dict[str, int] = {}
        for _ in range(rounds + 1):
            # Properties that a reading computes once must be computed anew in each round.
            state = views.state()
            times["lock held"].append(state.reading.seconds)
            for name, step in steps.items():
                started = time.perf_counter()
                made = step()
                times[name].append(time.perf_counter() - started)
                sizes[name] = len(made) if isinstance(made, bytes) else 0
        use = llm.engine.page_use()
        first = {name: taken[0] for name, taken in times.items()}
        rows = [
            {
                "reader": name,
                "ms": Spread.of([1000 * one for one in times[name][1:]]),
                "first_ms": 1000 * first[name],
                "bytes": sizes.get(name, 0),
            }
            for name in ("lock held", *steps)
        ]
        print_table([{**row, "ms": str(row["ms"])} for row in rows])
        taken = use.total - use.free
        for session in (*held, *bases):
            session.close()
    return {"pages": use.total, "taken": taken, "sessions": sessions, "rows": rows}


def main() -> None:
    """Run the measurements and print a table for each, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--viewers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="that each sequence decodes in a round")
    parser.add_argument("--pages", type=int, default=10_000)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--serve-viewers", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    for name in ("viewers", "rounds", "batch", "tokens", "pages", "sessions"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(given, name)}")
    if given.serve_viewers is not None:
        Viewers(given.serve_viewers[0], int(given.serve_viewers[1])).run(sys.stdin, sys.stdout)
        return
    read = readers(given.pages, given.sessions, given.rounds)
    decoded = decoding(given.viewers, given.rounds, given.batch, given.tokens)
    print_json({"benchmark": "inspector", "target": TARGET, "readers": read, "decoding": decoded})


if __name__ == "__main__":
    main()
