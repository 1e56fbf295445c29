"""Cost of a long text with windows: pages, process memory and time per token while one session
streams 20,000 tokens.

Four models over the same weights: full attention, a window in every layer (Mistral's
configuration), windowed and full layers by turns (SmolLM3's), and full attention in a session with
window and sink (StreamingLLM), which also goes beyond the model's context. Each has a process of
its own, so that its memory can be measured; they are timed in turn.

At each length a few hundred tokens are timed, in slices: the long session, a young one of the same
model (as long as the long one was at the first length), the next model. Ratios are taken between
neighbouring slices, because a machine's speed drifts in the minutes between two lengths. Texts are
compared with the text that the weights must give, with the model of full attention, and for the
first few hundred tokens with ``transformers``; the deciding tokens are inside every window, so that
all are the same.

``python bench/windows.py [--shape smollm2-135m] [--lengths 1000,2000,5000,10000,20000] [--models
full,window]``
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from quire import LLM, SamplingParams
from quire_bench.checkpoints import (
    DEFAULT_DIRECTORY,
    LAG,
    SHAPES,
    alternating_config,
    checkpoint,
    predicted_text,
    variant,
    windowed_config,
)
from quire_bench.latency import PEERS
from quire_bench.reports import Spread, print_json, print_table, random_prompts

MODELS = ("full", "window", "alternating", "streaming")
POSITIONS = 32768
"""``max_position_embeddings`` of the models with windows; the configuration of a long full model
has at least as many.
"""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and a session on it, for a process of its own."""

    name: str
    path: str
    window: int | None
    """Number of tokens after which the model drops some; None: it drops none."""
    session: dict[str, Any]
    """Keywords of ``LLM.session``."""
    prompt: list[int]
    device: str
    kv_cache_memory: str


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Memory and pages of a subject."""

    pages: int
    resident_bytes: int


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Median seconds of a token, without the first one of the call."""

    long: float
    young: float


class Stream:
    """One session that grows, in the process of its subject."""

    def __init__(self, subject: Subject, young_tokens: int) -> None:
        self._llm = LLM(
            subject.path,
            device=subject.device,
            kv_cache_memory=subject.kv_cache_memory,
            max_num_seqs=8,
            enable_prefix_caching=False,
        )
        self._subject = subject
        self._young_tokens = young_tokens
        # Memory that is allocated once, whatever the length: buffers, and the pages of the young
        # session.
        warm = (subject.prompt * -(-young_tokens // len(subject.prompt)))[:young_tokens]
        with self._llm.session(warm, **subject.session) as session:
            token_seconds(self._llm, session, 2)
        self._session = self._llm.session(subject.prompt, **subject.session)
        self._young: Any = None

    def grow(self, length: int) -> Usage:
        """Stream until the session has ``length`` tokens."""
        if length > len(self._session):
            token_seconds(self._llm, self._session, length - len(self._session))
        return Usage(pages=self._llm.engine.runner.state.num_used_pages, resident_bytes=resident_bytes())

    def begin(self) -> None:
        """Make the young session."""
        self._young = self._llm.session(self._session.tokens[: self._young_tokens], **self._subject.session)

    def slice(self, tokens: int) -> Slice:
        """Time ``tokens`` tokens of the long session and then of the young one."""
        return Slice(
            long=statistics.median(token_seconds(self._llm, self._session, tokens)),
            young=statistics.median(token_seconds(self._llm, self._young, tokens)),
        )

    def end(self) -> None:
        self._young.close()

    def tokens(self) -> list[int]:
        return list(self._session.tokens)


def token_seconds(llm: LLM, session: Any, tokens: int) -> list[float]:
    """Return the seconds of each of ``tokens`` greedy tokens but the first, which includes the
    call's overhead."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    stamps = []
    for _ in session.stream(params):
        if llm.model.device.type == "cuda":
            torch.cuda.synchronize(llm.model.device)
        stamps.append(time.perf_counter())
    return [later - earlier for earlier, later in itertools.pairwise(stamps)]


def resident_bytes() -> int:
    """Return the memory of this process in RAM; 0 if the system has no Linux /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def serve(connection: Connection, subject: Subject, young_tokens: int, threads: int) -> None:
    """Run the process of a subject: calls on its ``Stream``, until there are no more."""
    torch.set_num_threads(threads)
    stream = Stream(subject, young_tokens)
    connection.send(None)
    while (call := connection.recv()) is not None:
        name, *arguments = call
        connection.send(getattr(stream, name)(*arguments))


class Process:
    """A ``Stream`` in a process of its own."""

    def __init__(self, subject: Subject, young_tokens: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["quire.llm"])
        self._connection, there = context.Pipe()
        arguments = (there, subject, young_tokens, torch.get_num_threads())
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        there.close()  # so that the end of the process is the end of the connection

    def __enter__(self) -> Self:
        self._connection.recv()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.is_alive():
            self._connection.send(None)
        self._connection.close()
        self._process.join()

    def call(self, name: str, *arguments: object) -> Any:
        """Call ``Stream``'s method; ``EOFError`` if the process has died, after printing its
        error."""
        self._connection.send((name, *arguments))
        return self._connection.recv()


def subjects(arguments: argparse.Namespace, lengths: Sequence[int]) -> dict[str, Subject]:
    """Return all models, by name.

    The full one is a longer variant of the shape, if there is one, because its text is the
    reference.
    """
    where = {"directory": arguments.dir}
    name = arguments.shape
    long_name = f"{name}-32k" if f"{name}-32k" in SHAPES else name
    shape, window = SHAPES[long_name], arguments.window
    positions = max(POSITIONS, shape.max_positions, lengths[-1] + arguments.sample + 1)
    prompt = random_prompts(1, 2 * LAG, shape.vocab_size, seed=3)[0].tolist()
    session = {"window": arguments.session_window, "sink": arguments.sink}
    label = f"{window}-{positions}"
    paths = {
        "full": variant(
            long_name, f"full-{positions}", shape.config() | {"max_position_embeddings": positions}, **where
        ),
        "window": variant(long_name, f"window-{label}", windowed_config(shape, window, positions), **where),
        "alternating": variant(
            long_name, f"alternating-{label}", alternating_config(shape, window, positions), **where
        ),
        "streaming": checkpoint(name, **where),
    }
    windows = {"full": None, "window": window, "alternating": window, "streaming": session["window"]}
    return {
        one: Subject(
            name=one,
            path=str(path),
            window=windows[one],
            session=session if one == "streaming" else {},
            prompt=prompt,
            device=arguments.device,
            kv_cache_memory=arguments.kv_cache_memory,
        )
        for one, path in paths.items()
        if one in arguments.models
    }


def measure(
    processes: dict[str, Process], length: int, sample: int, slice_tokens: int
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Return, by model, its memory at ``length`` and the time of a token there; and the same as
    lines of the table."""
    found: dict[str, dict[str, Any]] = {}
    for name, process in processes.items():
        usage = process.call("grow", length)
        found[name] = {"model": name, "tokens": length, "pages": usage.pages, "resident_bytes": usage.resident_bytes}
    slices: dict[str, list[Slice]] = {name: [] for name in processes}
    for process in processes.values():
        process.call("begin")
    for _ in range(max(1, sample // slice_tokens)):
        for name, process in processes.items():
            slices[name].append(process.call("slice", slice_tokens))
    for process in processes.values():
        process.call("end")
    rows = []
    for name, values in found.items():
        seconds = statistics.median(one.long for one in slices[name])
        values["seconds_per_token"] = seconds
        values["to_young"] = Spread.of([one.long / one.young for one in slices[name]])
        if "full" in slices:
            pairs = zip(slices[name], slices["full"], strict=True)
            values["to_full"] = Spread.of([one.long / full.long for one, full in pairs])
        rows.append(
            {"model": name, "tokens": length, "pages": values["pages"]}
            | {"RSS MiB": round(values["resident_bytes"] / 2**20), "ms/token": seconds * 1e3}
            | {"to young": str(values["to_young"])}
            | ({"to full": str(values["to_full"])} if "to_full" in values else {})
        )
    return found, rows


def common(ours: Sequence[int], theirs: Sequence[int]) -> dict[str, int]:
    """Return the number of equal tokens before the first difference, and the number compared."""
    both = min(len(ours), len(theirs))
    same = next((index for index in range(both) if ours[index] != theirs[index]), both)
    return {"same": same, "of": both}


def summary(subject: Subject, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the change from the first length at which the window is full to the last one."""
    settled = next((row for row in rows if subject.window is not None and row["tokens"] >= subject.window), rows[0])
    last = rows[-1]
    return {
        "model": subject.name,
        "from": settled["tokens"],
        "to": last["tokens"],
        "pages": [settled["pages"], last["pages"]],
        "resident_growth_bytes": last["resident_bytes"] - settled["resident_bytes"],
        "seconds_ratio": last["seconds_per_token"] / settled["seconds_per_token"],
        "to_young": last["to_young"],
    }


def compare_texts(
    found: dict[str, Subject], texts: dict[str, list[int]], arguments: argparse.Namespace
) -> dict[str, dict[str, dict[str, int]]]:
    """Return, by model, the tokens in common with each reference."""
    shape = SHAPES[arguments.shape]
    equal: dict[str, dict[str, dict[str, int]]] = {}
    for name, subject in found.items():
        made = texts[name][len(subject.prompt) :]
        # Both shapes of a pair predict the same successors.
        equal[name] = {"predicted": common(made, predicted_text(shape, subject.prompt, len(made)))}
        if name != "full" and "full" in texts:
            equal[name]["full"] = common(texts[name], texts["full"])
        if not subject.session and arguments.peer == "transformers":
            from quire_bench.peers import TransformersPeer

            steps = min(arguments.peer_tokens, len(made))
            peer = TransformersPeer(subject.path, device=arguments.device)
            given = peer.generate(torch.tensor([subject.prompt]), steps).tokens[0]
            equal[name]["transformers"] = common(made, given)
    return equal


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, print tables and the JSON line; return the line's content."""
    lengths = sorted(arguments.lengths)
    found = subjects(arguments, lengths)
    started = {name: Process(subject, lengths[0]) for name, subject in found.items()}
    by_length: list[dict[str, dict[str, Any]]] = []
    table: list[dict[str, Any]] = []
    with ExitStack() as stack:
        processes = {name: stack.enter_context(process) for name, process in started.items()}
        for length in lengths:
            values, rows = measure(processes, length, arguments.sample, arguments.slice)
            by_length.append(values)
            table += rows
            for row in rows:  # the table may be printed only after hours
                print(", ".join(f"{name} {value}" for name, value in row.items()), file=sys.stderr, flush=True)
        texts = {name: process.call("tokens") for name, process in processes.items()}
    equal = compare_texts(found, texts, arguments)
    table.sort(key=lambda row: MODELS.index(row["model"]))
    print_table(table)
    summaries = [
        summary(subject, [values[name] for values in by_length]) | {"equal": equal[name]}
        for name, subject in found.items()
    ]
    print()
    print_table([line(one) for one in summaries])
    result = {
        "benchmark": "windows",
        "shape": arguments.shape,
        "device": arguments.device,
        "window": arguments.window,
        "session_window": arguments.session_window,
        "sink": arguments.sink,
        "context": SHAPES[arguments.shape].max_positions,
        "lengths": lengths,
        "sample": arguments.sample,
        "rows": [values[name] for name in found for values in by_length],
        "summary": summaries,
    }
    print_json(result)
    return result


def line(one: dict[str, Any]) -> dict[str, Any]:
    """Return a summary for the table."""
    return {
        "model": one["model"],
        "tokens": f"{one['from']} to {one['to']}",
        "pages": " to ".join(map(str, one["pages"])),
        "RSS": f"{one['resident_growth_bytes'] / 2**20:+.0f} MiB",
        "time last / first": one["seconds_ratio"],
        "time to young": str(one["to_young"]),
        "equal tokens": ", ".join(f"{name} {count['same']}/{count['of']}" for name, count in one["equal"].items()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m", choices=list(SHAPES))
    parser.add_argument("--models", default=MODELS, type=lambda text: text.split(","), help=", ".join(MODELS))
    parser.add_argument("--lengths", default="1000,2000,5000,10000,20000", help="tokens of the session")
    parser.add_argument("--sample", type=int, default=200, help="tokens that are timed at each length")
    parser.add_argument("--slice", type=int, default=20, help="tokens that are timed at a time")
    parser.add_argument("--window", type=int, default=256, help="of the models with windows")
    parser.add_argument("--session-window", type=int, default=1024, help="of the session")
    parser.add_argument("--sink", type=int, default=4, help="of the session")
    parser.add_argument("--peer", default="transformers", choices=PEERS)
    parser.add_argument("--peer-tokens", type=int, default=400)
    parser.add_argument("--kv-cache-memory", default="1GiB")
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    arguments.lengths = [int(part) for part in arguments.lengths.split(",")]
    if unknown := [name for name in arguments.models if name not in MODELS]:
        parser.error(f"--models: there is no {unknown[0]!r}; there are {', '.join(MODELS)}")
    if min(arguments.lengths) <= 2 * LAG or not 2 <= arguments.slice <= arguments.sample:
        parser.error(f"--lengths must be above {2 * LAG} tokens, and 2 <= --slice <= --sample")
    if any(b - a <= arguments.sample for a, b in itertools.pairwise(sorted(arguments.lengths))):
        parser.error("--lengths must be further apart than --sample tokens")
    run(arguments)


if __name__ == "__main__":
    main()
