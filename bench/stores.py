"""Costs and gains of state outside of the pool.

Parts: resumption after a killed process, from disk and from memory; decoding while state is
written; loading that overlaps with computing; evictions to memory; a trace of agents' sessions with
a pool of a tenth of their needs.

The first process computes a prompt and is killed; the second one, over the same directory, gets the
same prompt with a few tokens more. Shares are seconds to the first token over those of the whole
prompt without a store, each in the same run. The trace is run with tiers and without them in turn;
all texts are compared.

``python bench/stores.py [--models smollm2-135m-32k,bamba-150m-32k] [--tokens 32768] [--rounds 3]
[--parts resume,decode,overlap,evict,trace] [--vllm PYTHON]``
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from agent_trace import AgentTrace, Played
from quire import LLM, SamplingParams
from quire.base.errors import QuireError
from quire_bench.checkpoints import DEFAULT_DIRECTORY, DRAWN, SHAPES, checkpoint, drawn
from quire_bench.hardware import measure
from quire_bench.reports import Spread, interleave, print_json, print_table, random_prompts

FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
MORE = 8
"""Number of additional tokens of a resumed prompt."""
PARTS = ("resume", "decode", "overlap", "evict", "trace")
POOL = "4GiB"


def prompt_of(llm: LLM, tokens: int, seed: int = 0) -> list[int]:
    found: list[int] = random_prompts(1, tokens, llm.model.vocab_size, seed=seed)[0].tolist()
    return found


def started(path: str, **options: Any) -> LLM:
    given: dict[str, Any] = {"kv_cache_memory": POOL, "host_memory": 0, **options}
    llm = LLM(path, **given)
    # Touch the memory's pages now; otherwise the first measurement would include their page faults.
    llm.generate(prompt_of(llm, 600, seed=99), FIRST)
    llm.reset_prefix_cache()
    return llm


def first_token(llm: LLM, prompt: Sequence[int]) -> tuple[float, Any]:
    begun = time.perf_counter()
    (output,) = llm.generate(list(prompt), FIRST, use_tqdm=False)
    return time.perf_counter() - begun, output


def evict(llm: LLM) -> None:
    """Evict everything that can be loaded or computed again from the pool."""
    while llm._engine.runner.room.make():
        pass


# -- resumption ------------------------------------------------------------------------------------


def child(path: str, tokens: int, directory: str, more: int) -> None:
    """Run one process of ``resume``: print its seconds, and wait to be killed."""
    with_store = {"store": [f"file://{directory}"]} if directory else {}
    llm = started(path, **with_store)
    prompt = (prompt_of(llm, tokens) + prompt_of(llm, MORE, seed=1))[: tokens + more]
    seconds, output = first_token(llm, prompt)
    written = llm._engine.flush(600)
    found = {"seconds": seconds, "text": output.outputs[0].token_ids, "by_tier": output.reuse.by_tier}
    print(json.dumps({**found, "written": written}), flush=True)
    time.sleep(600)


def in_child(path: str, tokens: int, directory: str, more: int) -> dict[str, Any]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", path, str(tokens), directory, str(more)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            break
    else:
        raise QuireError("the process ended without an answer")
    process.send_signal(signal.SIGKILL)
    process.wait()
    found: dict[str, Any] = json.loads(line)
    return found


@contextmanager
def folder(base: Path | None) -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="quire-store-", dir=base)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def resume(path: str, tokens: int, rounds: int, base: Path | None) -> dict[str, Any]:
    """Measure the first token after kill -9 from disk, and after an eviction from memory."""
    whole, disk, memory, same = [], [], [], True
    for _ in range(rounds):
        with folder(base) as directory:
            plain = in_child(path, tokens, "", MORE)
            in_child(path, tokens, directory, 0)
            back = in_child(path, tokens, directory, MORE)
        same &= plain["text"] == back["text"] and back["by_tier"].get("disk", 0) > 0.9 * tokens
        whole.append(plain["seconds"])
        disk.append(back["seconds"])
    with closing(started(path, host_memory="6GiB")) as llm:
        llm._engine.stored.is_worth = lambda *_: True
        prompt = prompt_of(llm, tokens)
        for round_ in range(rounds):
            first_token(llm, prompt)
            evict(llm)
            seconds, output = first_token(llm, prompt + prompt_of(llm, MORE, seed=1))
            same &= output.reuse.by_tier.get("memory", 0) > 0.9 * tokens
            memory.append(seconds)
            llm.reset_prefix_cache()
            del round_
    bytes_per_token = llm.bytes_per_token
    base_seconds = Spread.of(whole).median
    return {
        "tokens": tokens,
        "bytes_per_token": bytes_per_token,
        "prefill_seconds": Spread.of(whole),
        "disk_seconds": Spread.of(disk),
        "memory_seconds": Spread.of(memory),
        "disk_share": Spread.of(disk).median / base_seconds,
        "memory_share": Spread.of(memory).median / base_seconds,
        "same": same,
    }


# -- decoding --------------------------------------------------------------------------------------


def decode(path: str, rounds: int, base: Path | None) -> dict[str, Any]:
    """Measure the seconds of eight decodes of 600 tokens after 256 others, while state is written
    or not."""
    params = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True)
    with folder(base) as directory:
        llms = {"plain": started(path), "store": started(path, store=[f"file://{directory}"])}
        texts: dict[str, Any] = {}
        seeds = iter(range(10_000))

        def run(name: str, seed: int) -> float:
            llm = llms[name]
            prompts = [prompt_of(llm, 256, seed=8 * seed + index) for index in range(8)]
            begun = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - begun
            texts[name] = [one.outputs[0].token_ids for one in outputs]
            return seconds

        current = [0]

        def of(name: str) -> Callable[[], float]:
            def call() -> float:
                if name == "plain":
                    current[0] = next(seeds)
                return run(name, current[0])

            return call

        found = interleave({name: of(name) for name in llms}, rounds)
        written = llms["store"].metrics()["quire:store_written_bytes_total"]
        for llm in llms.values():
            llm.close()
    return {"decode_ratio": found.ratios["store"], "written_bytes": written, "same": texts["plain"] == texts["store"]}


# -- overlap ---------------------------------------------------------------------------------------


def overlap(path: str, tokens: int, rounds: int, base: Path | None, fixed: int | None) -> dict[str, Any]:
    """Measure the seconds of loading ``tokens``, of computing others, and of both. ``fixed``:
    number of other tokens; None: about equally long, and at least 32."""
    loads, computes, both = [], [], []
    with folder(base) as directory, closing(started(path, store=[f"file://{directory}"])) as llm:
        llm._engine.stored.is_worth = lambda *_: True
        prompt = prompt_of(llm, tokens)
        first_token(llm, prompt)
        llm._engine.flush(600)
        new = fixed or 256
        for turn in range(rounds + 1):
            tail = prompt_of(llm, new, seed=turn + 2)
            evict(llm)
            load, _ = first_token(llm, [*prompt, 5])
            compute, _ = first_token(llm, [*prompt, *tail])
            evict(llm)
            seconds, output = first_token(llm, [*prompt, *prompt_of(llm, new, seed=turn + 100)])
            assert output.reuse.by_tier.get("disk", 0) > 0.9 * tokens, output.reuse
            if turn:
                loads.append(load)
                computes.append(compute)
                both.append(seconds)
            elif fixed is None:
                new = max(32, min(2000, int(new * load / compute)))
    ratios = [one / max(a, b) for one, a, b in zip(both, loads, computes, strict=True)]
    return {
        "load_seconds": Spread.of(loads),
        "compute_seconds": Spread.of(computes),
        "both_seconds": Spread.of(both),
        "both_over_larger": Spread.of(ratios),
        "new_tokens": new,
    }


# -- evictions -------------------------------------------------------------------------------------


def evictions(path: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Measure the engine's pause while a prompt's state moves from the pool to memory: copied
    before, as in a nearly full pool, and copied only then."""
    with closing(LLM(path, kv_cache_memory="256MiB", host_memory=0)) as probe:
        pool = tokens * probe.bytes_per_token * 9 // 8
    before, then, processor = [], [], []
    with closing(started(path, host_memory="8GiB", kv_cache_memory=pool)) as llm:
        engine = llm._engine
        engine.stored.is_worth = lambda *_: True
        for turn in range(rounds):
            first_token(llm, prompt_of(llm, tokens, seed=turn))
            engine.flush(600)
            for found in (before, then):
                with engine.lock:
                    begun, used = time.perf_counter(), time.thread_time()
                    assert engine.branches.evict()
                    found.append(time.perf_counter() - begun)
                    processor.append(time.thread_time() - used)
                if found is before:
                    # Load it back into the pool and clear the memory tier, so that the next
                    # eviction copies all of it.
                    first_token(llm, prompt_of(llm, tokens, seed=turn))
                    engine.flush(600)
                    engine.stored.store.memory.clear_now()
    return {
        "evict_copied_before_seconds": Spread.of(before),
        "evict_copied_then_seconds": Spread.of(then),
        "evict_processor_seconds": [Spread.of(processor[0::2]).median, Spread.of(processor[1::2]).median],
    }


# -- a trace of agents -----------------------------------------------------------------------------


def trace(path: str, sessions: int, shorter: int, base: Path | None, vllm: str | None) -> dict[str, Any]:
    """Play sessions of agents that pause, fork and return, with and without tiers, and on vLLM.
    ``shorter``: divisor of the lengths of texts."""
    with closing(LLM(path, kv_cache_memory="256MiB", host_memory=0)) as probe:
        vocabulary, per_token = probe.model.vocab_size, probe.bytes_per_token
    agents = AgentTrace(sessions, vocabulary, shorter)
    pool = max(per_token * agents.tokens // 10, 64 << 20)
    params = SamplingParams(temperature=0, max_tokens=agents.answer, ignore_eos=True)

    def run(**options: Any) -> tuple[Played, dict[str, float]]:
        with closing(started(path, kv_cache_memory=pool, **options)) as llm:

            def generate(prompts: list[list[int]]) -> list[tuple[list[int], float]]:
                outputs = llm.generate(prompts, params, use_tqdm=False)
                return [(one.outputs[0].token_ids, one.metrics.time_to_first_token or 0.0) for one in outputs]

            return agents.play(generate), llm.metrics()

    plain, _ = run()
    with folder(base) as directory:
        tiers, metrics = run(store=["memory://1GiB", f"file://{directory}"], host_memory=None)
    found = {
        "sessions": sessions,
        "turns": len(agents.turns),
        "tokens": agents.tokens,
        "pool_bytes": pool,
        "seconds": tiers.seconds,
        "throughput_ratio": plain.seconds / tiers.seconds,
        "first_token_ratio": tiers.first / plain.first,
        "first_token_seconds": Spread.of(tiers.firsts),
        "plain_first_token_seconds": Spread.of(plain.firsts),
        "loaded_tokens": metrics["quire:store_tokens_loaded_total"],
        "declined": metrics["quire:store_loads_declined_total"],
        "same": equal(tiers.answers, plain.answers),
    }
    if vllm is not None:
        print_table([{"trace": key, "value": value} for key, value in found.items()])
        given = [path, sessions, vocabulary, shorter, pool // per_token]
        script = Path(__file__).with_name("agent_trace_vllm.py")
        done = subprocess.run([vllm, str(script), *map(str, given)], capture_output=True, text=True, check=False)
        if done.returncode:
            return found | {"vllm_failed": done.stderr[-2000:]}
        # vLLM logs to the same stream, also after the answer.
        (answer,) = (line for line in done.stdout.splitlines() if line.startswith('{"seconds"'))
        peer = json.loads(answer)
        found |= {
            "throughput_over_vllm": peer["seconds"] / tiers.seconds,
            "first_token_over_vllm": tiers.first / peer["first"],
            "same_as_vllm": equal(tiers.answers, peer["answers"]),
        }
    return found


def equal(one: list[list[int]], other: list[list[int]]) -> float:
    """Return the share of equal answers."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def path_of(name: str, directory: Path) -> str:
    return str(checkpoint(name, directory=directory) if name in SHAPES else drawn(name, directory=directory))


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        path, tokens, directory, more = sys.argv[2:]
        child(path, int(tokens), directory, int(more))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", default="smollm2-135m-32k,bamba-150m-32k", help=f"of {', '.join([*SHAPES, *DRAWN])}"
    )
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--shorter", type=int, default=1, help="the trace's texts are so many times shorter")
    parser.add_argument("--new", type=int, help="tokens to compute beside those that are loaded, in the part overlap")
    parser.add_argument(
        "--vllm", metavar="PYTHON", help="the interpreter of an environment with vLLM, to play the trace too"
    )
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument(
        "--store-dir", type=Path, default=None, help="where stores are made; by default the temporary one"
    )
    given = parser.parse_args()
    parts = given.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if not 1 <= given.shorter <= 8:
        parser.error(f"--shorter is {given.shorter}; 1 to 8 is accepted")
    results: dict[str, Any] = {"hardware": measure(), "threads": torch.get_num_threads(), "processors": os.cpu_count()}
    for name in given.models.split(","):
        path = path_of(name, given.dir)
        found: dict[str, Any] = {}
        if "resume" in parts:
            found |= resume(path, given.tokens, given.rounds, given.store_dir)
        if "decode" in parts:
            found |= {
                f"decode_{key}" if key == "same" else key: value
                for key, value in decode(path, given.rounds, given.store_dir).items()
            }
        if "overlap" in parts:
            found |= overlap(path, given.tokens, given.rounds, given.store_dir, given.new)
        if "evict" in parts:
            found |= evictions(path, given.tokens, given.rounds)
        if "trace" in parts:
            found["trace"] = trace(path, given.sessions, given.shorter, given.store_dir, given.vllm)
        print_table([{"model": name, "what": key, "value": value} for key, value in found.items()])
        results[name] = found
    print_json(results)


if __name__ == "__main__":
    main()
