"""Hand-over of states between processes: bytes per second of each channel, and the first token.

``copy``: the rows of a sequence go to another process's pages, beside the same bytes in the same
pieces from one array to another over the same channel; by the clock, and by the processor time of
both processes, which other work disturbs less. ``first``: seconds to the first token of a
prompt that another process computes, over the seconds of computing it here. Both in turn, and each
process with as many threads as the other.

``python bench/handover.py [--parts copy,first] [--model smollm2-135m] [--tokens 1024]
[--rounds 5]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire import AsyncLLM, SamplingParams
from quire.base.errors import DataLoss, QuireError
from quire.channels.greeting import Trust
from quire.channels.pair import channel_pair
from quire.channels.sealed import can_seal
from quire.channels.socket_end import SocketEnd
from quire.channels.urls import Listener, connect
from quire.contracts.channel import Channel
from quire.contracts.layers import FullAttention
from quire.kernels.cpu_process import keep_freed_memory
from quire.kernels.linear.packed_memory import COLLAPSING
from quire.kv.send_mark import PIECE_BYTES
from quire.kv.state import State
from quire.server.handover.decode import DecodeSide
from quire.server.handover.prefill import PrefillSide
from quire_bench.checkpoints import checkpoint
from quire_bench.hardware import measure
from quire_bench.reports import Spread, interleave, print_json, print_table, random_prompts

LAYERS, TOKENS = 16, 4096
LAYER = FullAttention(num_heads=8, num_kv_heads=8, head_dim=128, value_dim=128)
SECRET = b"the secret of a benchmark"
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def state() -> State:
    """Return a state with the layers of an 8B model's half, in bfloat16."""
    return State([LAYER] * LAYERS, capacity=TOKENS + 64, dtype=torch.bfloat16)


NUM_BYTES = LAYERS * TOKENS * 2 * 8 * 128 * 2


# -- the other process -----------------------------------------------------------------------------


def answer(end: Channel) -> None:
    """Receive what the other end sends, in the way that it asks for."""
    keep_freed_memory()  # as servers do
    mine, target = state(), np.empty(NUM_BYTES, dtype=np.uint8)
    target[:] = 1  # its pages are mapped before anything is measured
    for number in range(2):
        mine.add_sequence(number)
    for rows in mine.parts.paged.classes[0].storage._tensors:
        rows.fill_(1)
    while True:
        try:
            asked = end.receive()
        except DataLoss:
            return
        assert asked is not None
        if bytes(asked) == b"copy":
            for start in range(0, NUM_BYTES, PIECE_BYTES):
                data = end.receive()
                assert data is not None
                target[start : start + PIECE_BYTES] = np.frombuffer(data, dtype=np.uint8)
            end.send([b"here"])
        elif bytes(asked) == b"state":
            found = mine.disagg_prepare_recv(0, TOKENS, channel=end)
            end.send([json.dumps(found).encode()])
            mine.disagg_wait(0)
            mine.popn(0, TOKENS)
        else:
            raise QuireError(f"the benchmark has no {bytes(asked)!r}")


def serve_child(kind: str, *given: str) -> None:
    """Be the other process: ``copy URL SEALS``, or ``first MODEL URL THREADS``. Print the address,
    and wait for the end of the input."""
    if kind == "copy":
        url, seals = given
        listener = Listener(url, Trust(SECRET, seals=seals == "yes"), answer, print)
        print(listener.url, flush=True)
        sys.stdin.read()
        listener.close()
        return
    model, url, threads = given
    torch.set_num_threads(int(threads))
    llm = AsyncLLM(model, kv_cache_memory="1GiB")
    warm(llm)
    side = PrefillSide(llm, url, Trust(SECRET), llm.identity.fields())
    print(side.url, flush=True)
    sys.stdin.read()
    side.close()
    asyncio.run(llm.close())


@contextmanager
def child(*given: str) -> Iterator[tuple[str, int]]:
    """Run the other process; its address and its id."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield next(line.strip() for line in process.stdout if line.startswith(("tcp:", "shm:"))), process.pid
    finally:
        process.stdin.close()
        process.wait(60)


# -- bytes per second ------------------------------------------------------------------------------


def busy_seconds(other: int | None) -> float:
    """Return the processor time of this process and of another one."""
    tasks = [] if other is None else Path(f"/proc/{other}/task").glob("*/schedstat")
    return time.process_time() + sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def copies(end: Channel, rounds: int, other: int | None = None) -> dict[str, Any]:
    """Measure both over one channel to this process or another one."""
    keep_freed_memory()
    mine, source = state(), torch.randint(0, 255, (NUM_BYTES,), dtype=torch.uint8).numpy()
    mine.add_sequence(0)
    mine.begin_forward([0], [TOKENS])
    rows = torch.randn(TOKENS, 8, 128, dtype=torch.bfloat16)
    for layer in range(LAYERS):
        mine.open_pass().append(layer, rows, rows)
    mine.end_forward()

    def plain() -> None:
        end.send([b"copy"])
        for start in range(0, NUM_BYTES, PIECE_BYTES):
            end.send([source[start : start + PIECE_BYTES].data])
        end.receive()

    def handed() -> None:
        end.send([b"state"])
        offer, found = end.receive(), end.receive()
        assert offer is not None
        assert found is not None
        mine.parts.offers.setdefault(end, []).append(
            json.loads(bytes(offer[12:])[: int.from_bytes(offer[8:12], "little")])
        )
        mine.disagg_mark_send(0, 0, json.loads(bytes(found)), end)
        mine.disagg_wait(0)

    busy: dict[str, list[float]] = {"copy": [], "hand-over": []}

    def counted(name: str, function: Callable[[], None]) -> Callable[[], float]:
        def run() -> float:
            before, begun = busy_seconds(other), time.perf_counter()
            function()
            seconds = time.perf_counter() - begun
            busy[name].append(busy_seconds(other) - before)
            return seconds

        return run

    found = interleave({name: counted(name, one) for name, one in (("copy", plain), ("hand-over", handed))}, rounds)
    shares = [
        Spread.of([a / b for a, b in zip(one["copy"][-rounds:], one["hand-over"][-rounds:], strict=True)])
        for one in (found.seconds, busy)
    ]
    speeds = {f"{name} GB/s": NUM_BYTES / Spread.of(seconds).median / 1e9 for name, seconds in found.seconds.items()}
    times = {f"{name} busy": Spread.of(seconds[-rounds:]).median for name, seconds in busy.items()}
    return {**speeds, "share": shares[0], **times, "share of busy": shares[1]}


def copy_part(rounds: int) -> dict[str, Any]:
    """Measure all channels."""
    ours, theirs = channel_pair()
    thread = threading.Thread(target=answer, args=(theirs,))
    thread.start()
    found = {"one process": copies(ours, rounds)}
    ours.close()
    thread.join()
    with tempfile.TemporaryDirectory() as folder:
        kinds = {"shared memory": (f"shm:{folder}/s", "no"), "TCP": ("tcp://127.0.0.1:0", "no")}
        if can_seal():
            kinds["TCP, encrypted"] = ("tcp://127.0.0.1:0", "yes")
        for name, (url, seals) in kinds.items():
            with child("copy", url, seals) as (at, other):
                end: SocketEnd = connect(at, Trust(SECRET, seals=seals == "yes"))
                found[name] = copies(end, rounds, other)
                end.close()
    print_table([{"channel": name, **one} for name, one in found.items()])
    return found


# -- the first token -------------------------------------------------------------------------------


def warm(llm: AsyncLLM) -> None:
    """Run a prompt, touch the whole pool, as a server's prompts have after minutes, and wait until
    weights lie in huge pages."""
    asyncio.run(llm.generate([prompt_of(llm, 300, 99)], FIRST))
    for one in llm.engine.runner.state.parts.paged.classes:
        for rows in one.storage._tensors:
            rows.zero_()
    asyncio.run(llm.reset_prefix_cache())
    for thread in threading.enumerate():
        if thread.name == COLLAPSING:
            thread.join()


def prompt_of(llm: AsyncLLM, tokens: int, seed: int) -> list[int]:
    """Return random tokens."""
    found: list[int] = random_prompts(1, tokens, llm.model.vocab_size, seed=seed)[0].tolist()
    return found


def first_part(name: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Measure prompts over TCP and over shared memory, beside computing them here."""
    path, threads = str(checkpoint(name)), torch.get_num_threads()
    found: dict[str, Any] = {"model": name, "tokens": tokens}
    llm = AsyncLLM(path, kv_cache_memory="1GiB")
    warm(llm)
    with tempfile.TemporaryDirectory() as folder:
        for url in ("tcp://127.0.0.1:0", f"shm:{folder}/s"):
            with child("first", path, url, str(threads)) as (at, _):
                side = DecodeSide(llm, at, Trust(SECRET), llm.identity.fields())
                seeds, texts = iter(range(10**6)), dict[str, list[Any]](here=[], there=[])

                def timed(key: str, prompt: list[int]) -> float:
                    begun = time.perf_counter()
                    [output] = asyncio.run(llm.generate([prompt], FIRST))
                    seconds = time.perf_counter() - begun
                    texts[key].append(output.outputs[0].token_ids)  # noqa: B023
                    asyncio.run(llm.reset_prefix_cache())
                    return seconds

                here, there = list[float](), list[float]()
                for round_ in range(rounds + 1):
                    prompt = prompt_of(llm, tokens, next(seeds))
                    llm.before_prompts = None
                    own = timed("here", prompt)
                    llm.before_prompts = side.bring
                    other = timed("there", prompt)
                    if round_:
                        here.append(own)
                        there.append(other)
                llm.before_prompts = None
                side.close()
            shares = Spread.of([b / a for a, b in zip(here, there, strict=True)])
            key = at.split(":")[0]
            found[f"{key}: seconds here"], found[f"{key}: over that"] = Spread.of(here), shares
            found[f"{key}: same"] = texts["here"] == texts["there"]
    counts = {name: value for name, value in llm.engine.snapshot().items() if "handed_over" in name}
    asyncio.run(llm.close())
    found["counts"] = counts
    print_table([{"what": key, "value": value} for key, value in found.items()])
    return found


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        serve_child(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="copy,first")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    results: dict[str, Any] = {"threads": torch.get_num_threads(), "hardware": measure(seconds=5.0)}
    if "copy" in given.parts.split(","):
        results["copy"] = copy_part(given.rounds)
    if "first" in given.parts.split(","):
        results["first"] = first_part(given.model, given.tokens, given.rounds)
    print_json(results)


if __name__ == "__main__":
    main()
