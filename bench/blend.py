"""Gains of blending: first tokens of prompts made of cached documents, from memory and from disk.

They are compared with full prefills and prefix caching. Further parts: the cost of loading; the
cost of a prompt without cached parts; batches of the same documents in new orders; a trace of
retrieval with a pool that is too small; edits in the middle of a long session.

Documents are random tokens, in a new order for each prompt, so a prefix cache finds at most one of
them. Rounds of the compared ways alternate, and shares are of medians in one run.
``bench/blend_quality.py`` measures the accuracy of blended answers, on a trained model.

``python bench/blend.py [--models smollm2-135m-32k,llama-3.2-1b] [--tokens 4000,8000,16000]
[--rounds 5] [--parts first,overlap,miss,orders,trace,edit] [--select auto]``
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.base.segments import BlendParams, Segment
from quire_bench.checkpoints import DEFAULT_DIRECTORY, checkpoint
from quire_bench.hardware import measure
from quire_bench.reports import Comparison, Spread, interleave, print_json, print_table, random_prompts

FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
DOCUMENTS = 8
QUESTION = 32
"""Tokens of the question."""
PARTS = ("first", "overlap", "miss", "orders", "trace", "edit")
BATCHES = 4
PER_BATCH = 3
"""Prompts of a batch."""


def documents(llm: LLM, count: int, tokens: int, seed: int = 0) -> list[Segment]:
    return [Segment(ids.tolist()) for ids in random_prompts(count, tokens, llm.model.vocab_size, seed=seed)]


def ask(llm: LLM, parts: Sequence[Any], blend: BlendParams | None, tokens: int = 1) -> tuple[float, Any]:
    """Return the seconds of one prompt, and its output."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    begun = time.perf_counter()
    (output,) = llm.generate([list(parts)], params, blend=blend, use_tqdm=False)
    return time.perf_counter() - begun, output


def forget(llm: LLM) -> None:
    """Empty the prefix cache only."""
    engine = llm.engine
    with engine.lock:
        engine.branches.clear_cache()


def first(path: str, tokens: int, rounds: int, params: BlendParams, dtype: str) -> list[dict[str, Any]]:
    """Measure the first token of a prompt of eight documents: in full, after the first document was
    cached exactly, and blended, from memory and from disk."""
    with tempfile.TemporaryDirectory(prefix="quire-blend-") as folder:
        common: dict[str, Any] = {"dtype": dtype, "kv_cache_memory": "3GiB", "max_model_len": 2 * tokens}
        with (
            closing(LLM(path, host_memory="4GiB", **common)) as llm,
            closing(LLM(path, host_memory=0, store=[f"file://{folder}"], **common)) as disk,
        ):
            segments = documents(llm, DOCUMENTS, tokens // DOCUMENTS)
            question = random_prompts(1, QUESTION, llm.model.vocab_size, seed=7)[0].tolist()
            for one in (llm, disk):
                one.warm(segments)
                one.engine.flush(120)
            rng, used = random.Random(0), {}

            def prompt() -> list[Any]:
                return [*rng.sample(segments, len(segments)), question]

            def full() -> float:
                forget(llm)
                return ask(llm, prompt(), None)[0]

            def prefix() -> float:
                forget(llm)
                parts = prompt()
                ask(llm, [parts[0], [0]], None)
                return ask(llm, parts, None)[0]

            def blended(name: str, source: LLM, given: BlendParams) -> Callable[[], float]:
                def run() -> float:
                    forget(source)
                    seconds, output = ask(source, prompt(), given)
                    used[name] = output.blend
                    return seconds

                return run

            found = interleave(
                {
                    "full prefill": full,
                    "prefix cache": prefix,
                    f"blended {params.ratio:.0%}, memory": blended("memory", llm, params),
                    f"blended {params.ratio:.0%}, disk": blended("disk", disk, params),
                    "nothing computed anew, memory": blended("nothing", llm, BlendParams(ratio=0.0, select="v")),
                },
                rounds,
            )
    told = {f"blended {params.ratio:.0%}, {name}": used[name] for name in ("memory", "disk")}
    return [
        {
            **row,
            "tokens": tokens,
            "kept": told[row["way"]].blended if row["way"] in told else "",
            "anew": told[row["way"]].recomputed if row["way"] in told else "",
        }
        for row in rows_of("first", found)
    ]


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean share of each way of ``first`` over all lengths."""
    shares: dict[str, list[float]] = {}
    for row in rows:
        shares.setdefault(row["way"], []).append(1 / row["times faster"])
    return [
        {"part": "first", "way": way, "tokens": "mean", "share": round(statistics.fmean(some), 3)}
        for way, some in shares.items()
    ]


def cool(folder: str) -> None:
    """Evict the files in a folder from the system's cache, as far as possible."""
    for file in Path(folder).rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def overlap(path: str, tokens: int, rounds: int, params: BlendParams, dtype: str) -> list[dict[str, Any]]:
    """Measure the hidden part of loading chunks, from memory and from an uncached disk."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="quire-blend-") as folder:
        ways: dict[str, dict[str, Any]] = {
            "memory": {"host_memory": "4GiB"},
            "disk": {"host_memory": 0, "store": [f"file://{folder}"]},
        }
        for name, options in ways.items():
            with closing(LLM(path, dtype=dtype, kv_cache_memory="3GiB", max_model_len=2 * tokens, **options)) as llm:
                times = overlapped(llm, folder, tokens, rounds, params)
            rows.append({"part": "overlap", "way": name, "tokens": tokens, **times})
    return rows


def overlapped(llm: LLM, folder: str, tokens: int, rounds: int, params: BlendParams) -> dict[str, Any]:
    """Return times of a normal blended prompt, and of one that loads all layers before the first
    one runs, with its two parts timed alone. ``overlap`` is the hidden share of the shorter part;
    it is meaningless for a very short part."""
    segments = documents(llm, DOCUMENTS, tokens // DOCUMENTS)
    question = random_prompts(1, QUESTION, llm.model.vocab_size, seed=7)[0].tolist()
    llm.warm(segments)
    llm.engine.flush(120)
    blending, rng = llm.engine.blending, random.Random(0)
    find, loads, computes = blending._find, list[float](), list[float]()

    def load_first(work: Any, blend: Any) -> Any:
        task, begun = find(work, blend), time.perf_counter()
        if not isinstance(task, str):
            for layer in blending.layout.layers[blending.check_layer :]:
                task.pieces(layer)
        loads.append(time.perf_counter() - begun)
        return task

    def run(is_apart: bool) -> float:
        forget(llm)
        cool(folder)
        blending._find = load_first if is_apart else find  # type: ignore[method-assign]
        seconds, output = ask(llm, [*rng.sample(segments, len(segments)), question], params)
        assert output.blend.blended, output.blend.reason
        if is_apart:
            computes.append(seconds - loads[-1])
        return seconds

    found = interleave({"together": lambda: run(False), "apart": lambda: run(True)}, rounds)
    load, compute = (statistics.median(times[-rounds:]) for times in (loads, computes))
    together, shorter, longer = Spread.of(found.seconds["together"]).median, min(load, compute), max(load, compute)
    return {
        "seconds": round(together, 3),
        "load": round(load, 4),
        "compute": round(compute, 3),
        "overlap": round((load + compute - together) / shorter, 3) if shorter > longer / 50 else "",
        "of the longer": round(together / longer, 3),
    }


def miss(path: str, tokens: int, rounds: int, params: BlendParams, dtype: str) -> list[dict[str, Any]]:
    """Measure a prompt without cached parts, with and without ``blend``, while other chunks are
    cached."""
    with closing(LLM(path, dtype=dtype, kv_cache_memory="3GiB", max_model_len=2 * tokens)) as llm:
        llm.warm(documents(llm, DOCUMENTS, 256, seed=1))
        question = random_prompts(1, QUESTION, llm.model.vocab_size, seed=7)[0].tolist()
        segments = documents(llm, DOCUMENTS, tokens // DOCUMENTS)

        def asked(blend: BlendParams | None) -> Callable[[], float]:
            def run() -> float:
                forget(llm)
                seconds, output = ask(llm, [*segments, question], blend)
                assert blend is None or not output.blend.blended
                return seconds

            return run

        found = interleave({"full prefill": asked(None), "nothing found": asked(params)}, rounds)
    return [{**row, "tokens": tokens} for row in rows_of("miss", found)]


def orders(path: str, tokens: int, params: BlendParams, dtype: str) -> list[dict[str, Any]]:
    """Measure batches of prompts of the same documents, each in a new order, with memory for the
    documents once. Each blended prompt is compared with a full prefill of the same prompt."""
    with closing(LLM(path, dtype=dtype, kv_cache_memory="1GiB", max_model_len=2 * tokens)) as probe:
        room = int(1.25 * tokens * probe.bytes_per_token) + (8 << 20)
    common: dict[str, Any] = {"dtype": dtype, "kv_cache_memory": "3GiB", "max_model_len": 2 * tokens}
    with closing(LLM(path, host_memory=room, **common)) as llm:
        segments = documents(llm, DOCUMENTS, tokens // DOCUMENTS)
        question = random_prompts(1, QUESTION, llm.model.vocab_size, seed=7)[0].tolist()
        llm.warm(segments)
        keeping = BlendParams(ratio=params.ratio, select=params.select)
        rng, rows = random.Random(0), list[dict[str, Any]]()
        ask(llm, [segments[0], question], None)
        for batch in range(BATCHES):
            shares = []
            for _ in range(PER_BATCH):
                parts = [*rng.sample(segments, len(segments)), question]
                forget(llm)
                full, _ = ask(llm, parts, None)
                forget(llm)
                blended, output = ask(llm, parts, keeping)
                shares.append(full / blended)
            rows.append(
                {
                    "part": "orders",
                    "way": f"batch {batch + 1}",
                    "tokens": tokens,
                    "times faster": round(statistics.median(shares), 2),
                    "kept": output.blend.blended,
                    "of the first batch": round(
                        statistics.median(shares) / (rows[0]["times faster"] if rows else statistics.median(shares)), 3
                    ),
                }
            )
    return rows


def rows_of(part: str, found: Comparison) -> list[dict[str, Any]]:
    """Return a row for each way, with its rounds' times as shares of the first way's."""
    return [
        {
            "part": part,
            "way": way,
            "seconds": round(Spread.of(times).median, 3),
            "share": str(found.ratios[way]),
            "times faster": round(1 / found.ratios[way].median, 2),
        }
        for way, times in found.seconds.items()
    ]


def trace(path: str, rounds: int, params: BlendParams, dtype: str) -> list[dict[str, Any]]:
    """Measure requests of retrieval: eight of 48 documents each, in any order, with a pool for
    20."""
    size, count = 500, 48
    with closing(LLM(path, dtype=dtype, kv_cache_memory="1GiB", host_memory="4GiB", max_model_len=8192)) as probe:
        pool = 20 * size * probe.bytes_per_token
    with closing(LLM(path, dtype=dtype, kv_cache_memory=int(pool), host_memory="4GiB", max_model_len=8192)) as llm:
        segments = documents(llm, count, size)
        llm.warm(segments)
        question = random_prompts(64, 16, llm.model.vocab_size, seed=7)
        answers = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

        rng = random.Random(1)

        def served(blend: BlendParams | None) -> Callable[[], float]:
            def run() -> float:
                # A new order of the segments in each prompt; the memory tier already holds their
                # state.
                prompts = [[*rng.sample(segments, 8), question[i].tolist()] for i in range(8)]
                begun = time.perf_counter()
                llm.generate(prompts, answers, blend=blend, use_tqdm=False)
                return time.perf_counter() - begun

            return run

        found = interleave({"prefix cache": served(None), "blended": served(params)}, rounds)
    return rows_of("trace", found)


def edit(path: str, tokens: int, rounds: int, params: BlendParams, dtype: str) -> list[dict[str, Any]]:
    """Measure an edit that removes a sixteenth of a session, at a tenth of its length."""
    with closing(LLM(path, dtype=dtype, kv_cache_memory="6GiB", max_model_len=tokens + 64)) as llm:
        ids = random_prompts(1, tokens, llm.model.vocab_size)[0].tolist()
        base = llm.session(ids)
        span = (tokens // 10, tokens // 10 + tokens // 16)

        def edited(mode: str) -> Callable[[], float]:
            def run() -> float:
                forget(llm)
                with base.fork() as session:
                    begun = time.perf_counter()
                    session.edit(span, mode=mode, blend=params if mode == "blend" else None)  # type: ignore[arg-type]
                    return time.perf_counter() - begun

            return run

        found = interleave({"exact": edited("exact"), "blended": edited("blend")}, rounds)
    return [{**row, "tokens": tokens} for row in rows_of("edit", found)]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="smollm2-135m-32k,llama-3.2-1b")
    parser.add_argument("--tokens", default="4000", help="lengths of prompts; a mean is of all; others take the first")
    parser.add_argument("--edit-tokens", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--ratio", type=float, default=0.3)
    parser.add_argument("--select", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY)
    given = parser.parse_args()
    params = BlendParams(ratio=given.ratio, select=given.select, keep=False)
    lengths, rounds, dtype = [int(one) for one in given.tokens.split(",")], given.rounds, given.dtype
    if unknown := set(given.parts.split(",")) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    rows: list[dict[str, Any]] = []
    for name in given.models.split(","):
        path = str(checkpoint(name, directory=given.directory))
        for part in given.parts.split(","):
            match part:
                case "first":
                    found = [row for tokens in lengths for row in first(path, tokens, rounds, params, dtype)]
                    found += means(found) if len(lengths) > 1 else []
                case "overlap":
                    found = overlap(path, lengths[0], rounds, params, dtype)
                case "miss":
                    found = miss(path, lengths[0], rounds, params, dtype)
                case "orders":
                    found = orders(path, lengths[0], params, dtype)
                case "trace":
                    found = trace(path, rounds, params, dtype)
                case _:
                    found = edit(path, given.edit_tokens, rounds, params, dtype)
            rows += [{"model": name, **row} for row in found]
            print_table([row for row in rows if row["model"] == name and row["part"] == part])
    print_json({"bench": "blend", "hardware": measure(), "rows": rows})


if __name__ == "__main__":
    main()
