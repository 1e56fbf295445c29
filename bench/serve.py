"""Cost of HTTP: ``quire serve`` against the engine itself, in turn, on the same cores.

Throughput: ``--clients`` clients, each of which sends its next request when the last is answered,
not streaming; through the server, whose process shares the machine with the load generator, and
through ``AsyncLLM`` in this process. Time to the first token: single requests, streaming, one
through the server and one through ``AsyncLLM`` in turn. Random tokens, greedy, no end token, no
prefix cache; a checkpoint of SmolLM2-135M's shape, made on demand.

``python bench/serve.py [--shape smollm2-135m] [--clients 32] [--requests 96] [--rounds 3] [--model
DIRECTORY]``
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from quire.async_llm import AsyncLLM
from quire.base.errors import InvalidArgument, QuireError
from quire.base.sampling_params import SamplingParams
from quire_bench.checkpoints import DEFAULT_DIRECTORY, SHAPES, checkpoint, text_tokenizer
from quire_bench.reports import Spread, print_json, print_table
from quire_bench.serve_client import ServeClient
from quire_bench.serve_load import LoadResult, Record, Target, send_load
from quire_bench.serve_process import server_process
from quire_bench.serve_trace import Planned, random_requests

SERVER, ENGINE = "server", "engine"
LEAST_SHARE = 0.9
"""Least share of the engine's throughput through HTTP."""
MOST_MILLISECONDS = 5.0
"""Most milliseconds that HTTP may add to the median time to the first token."""


class EngineTarget:
    """``Target`` without HTTP."""

    def __init__(self, llm: AsyncLLM, *, stream: bool) -> None:
        self._llm, self._stream = llm, stream

    async def ask(self, planned: Planned) -> Record:
        """Send one request."""
        params = SamplingParams(temperature=0, max_tokens=planned.output_tokens, ignore_eos=True)
        started = time.perf_counter()
        first: float | None = None
        if self._stream:
            async with self._llm.stream(list(planned.prompt), params) as stream:
                async for _ in stream:
                    first = first or time.perf_counter() - started
            output = stream.output
        else:
            output = (await self._llm.generate([list(planned.prompt)], params))[0]
        if output.outputs[0].error is not None:
            raise QuireError(f"{output.request_id} failed: {output.outputs[0].error}")
        return Record(
            ttft=first,
            e2e=time.perf_counter() - started,
            prompt_tokens=len(planned.prompt),
            output_tokens=len(output.outputs[0].token_ids),
        )


def run_path(
    model: str,
    options: dict[str, Any],
    *,
    requests: int = 96,
    clients: int = 32,
    prompt_tokens: tuple[int, int] = (32, 128),
    output_tokens: tuple[int, int] = (32, 128),
    vocab_size: int = 1024,
    singles: int = 30,
    rounds: int = 3,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure, print tables and one JSON line; return the line's content.

    ``options``: of the engine, by keyword.
    """
    for name, value in (("requests", requests), ("clients", clients), ("singles", singles), ("rounds", rounds)):
        if value < 1:
            raise InvalidArgument(f"{name} {value}; at least 1 is accepted")
    flags: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        flags += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]

    def plan(turn: int, count: int) -> list[Planned]:
        return random_requests(
            count,
            rate=math.inf,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            vocab_size=vocab_size,
            seed=seed + turn,
        )

    async def measure(url: str) -> tuple[dict[str, list[LoadResult]], dict[str, list[float]]]:
        llm = await asyncio.to_thread(AsyncLLM, model, **options)
        async with llm, ServeClient(url) as client:
            name = await client.model()
            whole = {
                ENGINE: EngineTarget(llm, stream=False),
                SERVER: Target(client=client, model=name, stream=False),
            }
            streaming = {ENGINE: EngineTarget(llm, stream=True), SERVER: Target(client=client, model=name)}
            results: dict[str, list[LoadResult]] = {way: [] for way in whole}
            for turn in range(-1, rounds):
                for way, target in whole.items():
                    count = requests if turn >= 0 else min(requests, clients)
                    result = await send_load(plan(turn, count), target.ask, concurrency=clients)
                    _complain(way, result.records)
                    if turn >= 0:
                        results[way].append(result)
            first: dict[str, list[float]] = {way: [] for way in streaming}
            for index, planned in enumerate(plan(rounds, singles + 1)):
                short = Planned(at=0.0, prompt=planned.prompt, output_tokens=4)
                for way, target in streaming.items():
                    record = await target.ask(short)
                    _complain(way, (record,))
                    if index:
                        first[way].append(record.ttft or record.e2e)
        return results, first

    with server_process(model, flags) as process:
        results, first = asyncio.run(measure(process.url))
    rates = {way: [result.summary()["output_tokens_per_second"] for result in found] for way, found in results.items()}
    share = Spread.of([own / base for own, base in zip(rates[SERVER], rates[ENGINE], strict=True)])
    medians = {way: statistics.median(values) * 1e3 for way, values in first.items()}
    added = Spread.of([(own - base) * 1e3 for own, base in zip(first[SERVER], first[ENGINE], strict=True)])
    print_table([{"way": way, "output tok/s": str(Spread.of(rates[way])), "ttft ms": medians[way]} for way in rates])
    print(f"\nserver / engine, output tok/s: {share}; at least {LEAST_SHARE} is wanted")
    print(f"server - engine, ttft of single requests: {added} ms; less than {MOST_MILLISECONDS:g} is wanted")
    line = {
        "benchmark": "serve_path",
        "model": model,
        "clients": clients,
        "requests": requests,
        "rounds": rounds,
        "output_tokens_per_second": rates,
        "share": share,
        "ttft_ms": medians,
        "ttft_added_ms": added,
    }
    print_json(line)
    return line


def _complain(way: str, records: tuple[Record, ...]) -> None:
    for record in records:
        if record.error is not None:
            raise QuireError(f"a request to the {way} failed with {record.error}: {record.detail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--model", help="a model in place of the shape")
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--singles", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    options = {"device": arguments.device, "kv_cache_memory": "1GiB", "enable_prefix_caching": False}
    model = arguments.model
    if model is None:
        model = str(checkpoint(arguments.shape, directory=arguments.dir))
        options["tokenizer"] = str(text_tokenizer(SHAPES[arguments.shape].vocab_size, directory=arguments.dir))
    run_path(
        model,
        options,
        requests=arguments.requests,
        clients=arguments.clients,
        singles=arguments.singles,
        rounds=arguments.rounds,
    )


if __name__ == "__main__":
    try:
        main()
    except QuireError as error:
        sys.exit(str(error))
