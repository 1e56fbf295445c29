"""A server under more load than its pool holds, with clients that disconnect.

No request may be lost or answered wrongly, and nothing may remain. Requests have mixed lengths;
some of them are sessions that are forked and rewound; ``--cancelled`` of them close their
connection at a random moment. Every other one must return the same tokens as alone: another engine
in this process computes them, in float32 at temperature 0, one request at a time without a prefix
cache. The pool holds a ``--share`` of the running requests' needs. At the end no request runs, no
page is held, no session is open, and the server's memory has not grown.

``python bench/soak.py [--requests 5000] [--clients 64] [--prefix-caching] [--url
http://localhost:8000]``

A server of ``--url`` must run the same model in float32, and has its own size. With a prefix cache
pages stay in use by it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from quire.base.errors import QuireError
from quire.base.sampling_params import SamplingParams
from quire.cli.client import BrokenAnswer, HttpFailure
from quire.llm import LLM
from quire_bench.reports import print_json, print_table
from quire_bench.serve_client import ServeClient
from quire_bench.serve_process import ServerProcess, server_process
from quire_bench.serve_trace import LEAST_ID

PREFIXES, PREFIX_TOKENS = 4, 48
"""Number and tokens of the beginnings that half of the prompts share."""
LONGEST_PROMPT, LONGEST_TEXT = 160, 60
SESSION_SHARE = 0.15
PINNED_SHARE = 0.3
"""Share of the sessions that are pinned."""
GROWTH = 1.05
"""Most resident memory at the end over that at half of the requests, beside ``SLACK`` bytes."""
SLACK = 16 * 2**20
SETTLE_SECONDS = 10.0

Tokens = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A completion and its right answer."""

    prompt: Tokens
    output_tokens: int
    text: str


@dataclass(kw_only=True, slots=True)
class Tally:
    """The outcomes of the requests."""

    finished: int = 0
    cancelled: int = 0
    checked: int = 0
    """Number of compared texts."""
    wrong: list[str] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    generations: list[tuple[Tokens, Tokens]] = field(default_factory=list)
    """In sessions: the tokens before, and the new ones."""
    seconds: float = 0.05
    """Running mean of a request's seconds."""


class Oracle:
    """The results of requests alone."""

    def __init__(self, model: str) -> None:
        self.llm = LLM(model, device="cpu", dtype="float32", enable_prefix_caching=False, kv_cache_memory="64MiB")

    def alone(self, prompt: Sequence[int], count: int) -> tuple[Tokens, str]:
        """Return tokens and text."""
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        output = self.llm.generate([list(prompt)], params, use_tqdm=False)[0].outputs[0]
        return tuple(output.token_ids), output.text

    def cases(self, count: int, seed: int) -> list[Case]:
        """Return requests of mixed lengths, short ones more often."""
        draw = random.Random(f"{seed} cases")
        ids = range(LEAST_ID, self.llm.model.vocab_size)
        prefixes = [draw.choices(ids, k=PREFIX_TOKENS) for _ in range(PREFIXES)]
        found = []
        for _ in range(count):
            length = round(LONGEST_PROMPT ** draw.random())
            begin = draw.choice(prefixes) if draw.random() < 0.5 else []
            prompt = (begin + draw.choices(ids, k=length))[:LONGEST_PROMPT]
            tokens = round(LONGEST_TEXT ** draw.random())
            found.append(Case(prompt=tuple(prompt), output_tokens=tokens, text=self.alone(prompt, tokens)[1]))
        return found


class Soak:
    """The clients."""

    def __init__(self, client: ServeClient, model: str, cases: Sequence[Case], *, cancelled: float, seed: int) -> None:
        self.tally = Tally()
        self._client, self._model, self._cases = client, model, cases
        self._cancelled, self._seed = cancelled, seed
        self._pin = asyncio.Lock()

    async def run(self, requests: int, clients: int, progress: Callable[[int], None]) -> None:
        """Send all requests, ``clients`` at a time; ``progress`` is called after each with the
        number done."""
        numbers = iter(range(requests))
        done = 0

        async def one_client() -> None:
            nonlocal done
            for number in numbers:
                await self._one(number)
                done += 1
                progress(done)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(one_client())

    async def _one(self, number: int) -> None:
        draw, tally = random.Random(f"{self._seed} {number}"), self.tally
        # Some requests end before their moment of cancellation; others are cancelled instead, so
        # that the share is right.
        behind = tally.cancelled < self._cancelled * (tally.cancelled + tally.finished)
        hangs_up = draw.random() < self._cancelled or behind
        patience = draw.uniform(0, 1.2 * tally.seconds) if hangs_up else None
        work = self._session(draw) if draw.random() < SESSION_SHARE else self._completion(draw)
        started = time.perf_counter()
        try:
            async with asyncio.timeout(patience):
                await work
        except TimeoutError:
            if patience is None:
                tally.failed["timeout"] += 1
            else:
                tally.cancelled += 1
        except (HttpFailure, BrokenAnswer, OSError) as error:
            tally.failed[str(error)[:200] or type(error).__name__] += 1
        else:
            tally.finished += 1
            tally.seconds += 0.05 * (time.perf_counter() - started - tally.seconds)

    async def _completion(self, draw: random.Random) -> None:
        case = draw.choice(self._cases)
        stream = draw.random() < 0.5
        body = {"model": self._model, "prompt": list(case.prompt), "max_tokens": case.output_tokens, "stream": stream}
        body |= {"temperature": 0, "ignore_eos": True}
        text = ""
        if stream:
            async with aclosing(self._client.events("/v1/completions", body)) as events:
                async for event in events:
                    text += "".join(choice["text"] for choice in event["choices"])
        else:
            text = (await self._client.json("POST", "/v1/completions", body))["choices"][0]["text"]
        self.tally.checked += 1
        if text != case.text:
            self.tally.wrong.append(
                f"{len(case.prompt)} prompt tokens, stream={stream}: {text!r} instead of {case.text!r}"
            )

    # -- sessions ----------------------------------------------------------------------------------

    async def _session(self, draw: random.Random) -> None:
        """Run a session, pinned or not.

        The pool is so narrow that an unpinned session's pages are taken between any two of its
        calls; a pinned one keeps its pages, so that forks share them. Only one at a time is pinned,
        because the longest request must fit beside it.
        """
        case = draw.choice(self._cases)
        if draw.random() < PINNED_SHARE:
            async with self._pin:
                await self._forked(draw, case, pin=True)
        else:
            await self._forked(draw, case, pin=False)

    async def _forked(self, draw: random.Random, case: Case, *, pin: bool) -> None:
        ids: list[str] = []
        try:
            body = {"model": self._model, "prompt": list(case.prompt), "ttl": 600, "pin": pin}
            ids.append((await self._client.json("POST", "/v1/sessions", body))["id"])
            tokens = await self._generate(draw, ids[0], case.prompt)
            at = draw.randint(1, len(tokens))
            ids += (await self._verb(ids[0], "fork", {"at": at}))["ids"]
            to = draw.randint(1, len(tokens))
            left = (await self._verb(ids[0], "rewind", {"to": to}))["num_tokens"]
            if left != to:
                self.tally.wrong.append(f"rewind to {to} left {left} tokens")
            await asyncio.gather(
                self._generate(draw, ids[0], tokens[:to]),
                self._generate(draw, ids[1], tokens[:at]),
            )
        finally:
            for name in ids:
                await asyncio.shield(self._delete(name))

    async def _verb(self, name: str, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._client.json("POST", f"/v1/sessions/{name}/{verb}", body)

    async def _generate(self, draw: random.Random, name: str, before: Tokens) -> Tokens:
        """Generate more tokens; return all tokens."""
        body = {"max_tokens": draw.randint(1, LONGEST_TEXT // 3), "temperature": 0, "ignore_eos": True}
        if draw.random() < 0.5:
            async with aclosing(
                self._client.events(f"/v1/sessions/{name}/generate", {**body, "stream": True})
            ) as events:
                async for _ in events:
                    pass
        else:
            await self._verb(name, "generate", body)
        tokens = tuple((await self._client.json("GET", f"/v1/sessions/{name}"))["tokens"])
        if tokens[: len(before)] != before or len(tokens) != len(before) + body["max_tokens"]:
            self.tally.wrong.append(f"a session of {len(before)} tokens and {body['max_tokens']} more holds {tokens}")
        self.tally.generations.append((before, tokens[len(before) :]))
        return tokens

    async def _delete(self, name: str) -> None:
        with suppress(HttpFailure, BrokenAnswer, OSError):
            await self._client.fetch("DELETE", f"/v1/sessions/{name}")


# -- before and after ------------------------------------------------------------------------------


def check_generations(oracle: Oracle, tally: Tally) -> None:
    """Compare the sessions' generations with those of single requests of the same tokens."""
    for before, new in tally.generations:
        tally.checked += 1
        wanted, _ = oracle.alone(before, len(new))
        if wanted != new:
            tally.wrong.append(f"in a session, after {len(before)} tokens: {new} instead of {wanted}")


async def gauges(client: ServeClient) -> dict[str, float]:
    """Return the samples of ``/metrics`` without labels, by name."""
    text = (await client.fetch("GET", "/metrics")).decode()
    return {name: float(value) for name, value in re.findall(r"^(quire:\w+) (\S+)$", text, re.MULTILINE)}


async def settled(client: ServeClient, *, prefix_caching: bool) -> dict[str, float]:
    """Delete sessions whose id was lost with the answer, then wait until the server is idle.

    Return the gauges that are not 0, by name.
    """
    for session in (await client.json("GET", "/v1/sessions?limit=1000&tokens=false"))["data"]:
        await client.fetch("DELETE", f"/v1/sessions/{session['id']}")
    names = ["num_requests_running", "num_requests_waiting", "sessions_open", "pages_held", "pages_pinned"]
    names = [f"quire:{name}" for name in (*names, *(() if prefix_caching else ("pages_evictable",)))]
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        found = await gauges(client)
        left = {name: found[name] for name in names if found[name] != 0}
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.05)


def run_soak(
    url: str,
    oracle: Oracle,
    *,
    requests: int,
    clients: int,
    cancelled: float = 0.3,
    distinct: int = 200,
    prefix_caching: bool = False,
    api_key: str | None = None,
    process: ServerProcess | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Put load on the server at ``url``. Return the counts; "complaints" names the errors."""
    cases = oracle.cases(distinct, seed)
    memory: dict[int, int] = {}

    def progress(done: int) -> None:
        if done % max(1, requests // 8) == 0:
            used = None if process is None else process.memory()
            if used is not None:
                memory[done] = used
            print(
                f"{done}/{requests}" + (f", {used / 2**20:.0f} MiB" if used is not None else ""),
                file=sys.stderr,
                flush=True,
            )

    async def work() -> tuple[Tally, dict[str, float], dict[str, float], float]:
        async with ServeClient(url, api_key=api_key, timeout=300) as client:
            soak = Soak(client, await client.model(), cases, cancelled=cancelled, seed=seed)
            before = await gauges(client)
            started = time.perf_counter()
            await soak.run(requests, clients, progress)
            seconds = time.perf_counter() - started
            left = await settled(client, prefix_caching=prefix_caching)
            after = await gauges(client)
            grown = {name: after[name] - before.get(name, 0) for name in after if name.endswith("_total")}
            return soak.tally, left, grown, seconds

    tally, left, grown, seconds = asyncio.run(work())
    check_generations(oracle, tally)
    complaints = [f"wrong: {text}" for text in tally.wrong[:10]]
    complaints += [f"failed {count} times: {reason}" for reason, count in tally.failed.most_common(10)]
    complaints += [f"{name} is {value:g} at the end" for name, value in left.items()]
    half, end = memory.get(requests // 8 * 4), memory.get(requests // 8 * 8)
    if half and end and end > half * GROWTH + SLACK:
        complaints.append(
            f"memory grew from {half / 2**20:.0f} MiB at half of the requests to {end / 2**20:.0f} MiB at the end"
        )
    return {
        "requests": requests,
        "clients": clients,
        "seconds": seconds,
        "finished": tally.finished,
        "cancelled": tally.cancelled,
        "failed": sum(tally.failed.values()),
        "checked": tally.checked,
        "wrong": len(tally.wrong),
        "preemptions": grown.get("quire:num_preemptions_total"),
        "forks": grown.get("quire:forks_total"),
        "rewinds": grown.get("quire:rewinds_total"),
        "memory_mib": {done: round(used / 2**20, 1) for done, used in memory.items()},
        "complaints": complaints,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-python")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--cancelled", type=float, default=0.3)
    parser.add_argument(
        "--share", type=float, default=0.1, help="what the pool holds of the tokens of all clients' requests"
    )
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--url")
    parser.add_argument("--api-key")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    oracle = Oracle(arguments.model)
    options = {
        "requests": arguments.requests,
        "clients": arguments.clients,
        "cancelled": arguments.cancelled,
        "prefix_caching": arguments.prefix_caching,
        "seed": arguments.seed,
    }
    if arguments.url is not None:
        result = run_soak(arguments.url, oracle, api_key=arguments.api_key, **options)
    else:
        drawn = oracle.cases(200, arguments.seed)
        mean = sum(len(case.prompt) + case.output_tokens for case in drawn) / len(drawn)
        # The longest request must fit.
        longest = LONGEST_PROMPT + LONGEST_TEXT + 32
        pool = max(longest, round(arguments.clients * mean * arguments.share))
        flags = ["--device", "cpu", "--dtype", "float32", "--kv-cache-memory", str(pool * oracle.llm.bytes_per_token)]
        flags.append("--enable-prefix-caching" if arguments.prefix_caching else "--no-enable-prefix-caching")
        print(
            f"a pool of {pool} tokens for {arguments.clients} clients of {mean:.0f} tokens on average", file=sys.stderr
        )
        with server_process(arguments.model, flags) as process:
            result = run_soak(process.url, oracle, process=process, **options)
    print_table([{name: value for name, value in result.items() if isinstance(value, int | float)}])
    print_json({"benchmark": "soak", **result})
    if result["complaints"]:
        sys.exit("\n".join(result["complaints"]))


if __name__ == "__main__":
    try:
        main()
    except QuireError as error:
        sys.exit(str(error))
