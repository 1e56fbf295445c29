"""What the state costs: fork, deep copy, rewind, save and restore of a long sequence; a second chat turn; start-up.

``python bench/state.py [--tokens 32768] [--shape smollm2-135m] [--rounds 5]``
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checkpoints import DEFAULT_DIRECTORY, checkpoint
from quire import LLM, SamplingParams
from quire.bench.reports import print_json, print_table, random_prompts


def best_and_median(function: Callable[[], object], rounds: int) -> tuple[float, float]:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times), statistics.median(times)


def state_rows(llm: LLM, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Fork, deep copy, rewind, save and restore of one sequence of ``tokens`` tokens."""
    engine = llm.engine
    vocab = llm.model.vocab_size
    ids = random_prompts(1, tokens, vocab)[0].tolist()
    started = time.perf_counter()
    session = llm.session(ids)
    prefill = time.perf_counter() - started
    rows: list[dict[str, Any]] = [
        {"what": f"prefill of {tokens} tokens", "median": f"{prefill:.1f} s", "best": "", "note": ""}
    ]
    state = engine.runner.state

    used = state.num_pages - state.num_available_pages()
    children: list[Any] = []

    def fork() -> None:
        children.append(session.fork())

    best, median = best_and_median(fork, 20 * rounds)
    copied = state.num_pages - state.num_available_pages() - used
    rows.append(
        {
            "what": "Session.fork",
            "median": f"{median * 1e6:.0f} µs",
            "best": f"{best * 1e6:.0f} µs",
            "note": f"{copied} pages taken, {state.num_splits} copied",
        }
    )
    for child in children:
        child.close()

    sequences: list[int] = []

    def raw_fork() -> None:
        sequences.append(engine.runner.new_seq())
        state.fork_sequence(session_seq(session), sequences[-1])

    best, median = best_and_median(raw_fork, 20 * rounds)
    rows.append(
        {
            "what": "fork_sequence",
            "median": f"{median * 1e6:.0f} µs",
            "best": f"{best * 1e6:.0f} µs",
            "note": "the KV state's verb",
        }
    )

    def pop() -> None:
        state.popn(sequences[-1], 16)

    best, median = best_and_median(pop, 20 * rounds)
    rows.append({"what": "popn of 16", "median": f"{median * 1e6:.0f} µs", "best": f"{best * 1e6:.0f} µs", "note": ""})
    for seq in sequences:
        state.remove_sequence(seq)

    cache = llm.executor.create_kv_cache(capacity=tokens)
    copies: list[Any] = []
    fill_cache(llm, cache, ids[:-1])

    def copy() -> None:
        copies.append(cache.deep_copy())

    used = state.num_available_pages()
    best, median = best_and_median(copy, 20 * rounds)
    rows.append(
        {
            "what": "KVCache.deep_copy",
            "median": f"{median * 1e6:.0f} µs",
            "best": f"{best * 1e6:.0f} µs",
            "note": f"{used - state.num_available_pages()} pages taken",
        }
    )
    for each in (*copies, cache):
        llm.executor.release_cache(each.cache_id)

    child = session.fork()

    def rewind() -> None:
        child.rewind(n=16)

    best, median = best_and_median(rewind, 20 * rounds)
    rows.append(
        {"what": "Session.rewind by 16", "median": f"{median * 1e6:.0f} µs", "best": f"{best * 1e6:.0f} µs", "note": ""}
    )
    child.close()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "long.quire"
        best, median = best_and_median(lambda: session.save(path), rounds)
        size = path.stat().st_size
        rows.append(
            {
                "what": "save",
                "median": f"{median:.2f} s",
                "best": f"{best:.2f} s",
                "note": f"{size / 2**20:.0f} MiB, synced",
            }
        )
        session.close()
        best, median = best_and_median(lambda: llm.load_session(path).close(), rounds)
        rows.append(
            {
                "what": "restore",
                "median": f"{median:.2f} s",
                "best": f"{best:.2f} s",
                "note": f"{prefill / median:.0f} times faster than prefill",
            }
        )
    return rows


def session_seq(session: Any) -> int:
    return int(session.sequence_id)


def fill_cache(llm: LLM, cache: Any, ids: list[int]) -> None:
    """Prefill a KV cache through LiteRT-LM's face."""
    from quire import LlmExecutor
    from quire.contracts.executor import ExecutorInputs, TextData

    LlmExecutor(llm.executor).prefill(ExecutorInputs(text=TextData(token_ids=torch.tensor([ids]))), cache)


def chat_row(llm: LLM, history: int) -> dict[str, Any]:
    """A second turn on a long history."""
    ids = random_prompts(1, history, llm.model.vocab_size, seed=7)[0].tolist()
    one = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    started = time.perf_counter()
    first = llm.generate(ids, one)[0]
    cold = time.perf_counter() - started
    turn = [*ids, *first.outputs[0].token_ids, *random_prompts(1, 20, llm.model.vocab_size, seed=8)[0].tolist()]
    started = time.perf_counter()
    second = llm.generate(turn, one)[0]
    warm = time.perf_counter() - started
    ran = len(second.prompt_token_ids) - second.num_cached_tokens
    note = f"{second.num_cached_tokens} of {len(second.prompt_token_ids)} prompt tokens cached, {ran} run; first turn {cold:.2f} s"
    return {"what": f"second turn on {history} tokens", "median": f"{warm:.2f} s", "best": "", "note": note}


def start_rows(rounds: int) -> list[dict[str, Any]]:
    """Import time apart from torch's, and the first token of ``quire generate``."""
    code = "import time, torch; t = time.perf_counter(); import quire; from quire import LLM; print(time.perf_counter() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(rounds)
    ]
    rows = [
        {
            "what": "import quire and LLM, after torch",
            "median": f"{statistics.median(times):.2f} s",
            "best": f"{min(times):.2f} s",
            "note": "",
        }
    ]
    firsts = []
    for _ in range(rounds):
        started = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-m", "quire.cli", "generate", "def main():", "--max-tokens", "4"], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            firsts.append(time.perf_counter() - started)
            process.stdout.read()
    return [
        *rows,
        {
            "what": "quire generate, first token",
            "median": f"{statistics.median(firsts):.2f} s",
            "best": f"{min(firsts):.2f} s",
            "note": "from the start of the process, bundled model",
        },
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY)
    arguments = parser.parse_args()
    rows = start_rows(arguments.rounds)
    long_shape = (
        "smollm2-135m-32k" if arguments.shape == "smollm2-135m" and arguments.tokens > 8192 else arguments.shape
    )
    llm = LLM(str(checkpoint(long_shape, directory=arguments.dir)), kv_cache_memory="3GiB")
    rows += state_rows(llm, arguments.tokens, arguments.rounds)
    rows.append(chat_row(llm, 2000))
    print_table(rows)
    print_json({"benchmark": "state", "shape": long_shape, "tokens": arguments.tokens, "rows": rows})


if __name__ == "__main__":
    main()
