"""A cluster on paper: hit rate, time to the first token and state that is computed again ("run
again") in a trace of agents, by the policy that chooses a replica, for 1 to 1,000 replicas.

    python bench/cluster_sim.py --model tiny-python --replicas 1 2 10 100 1000
    python bench/cluster_sim.py --model tiny-python --check   # beside two servers of this machine

``prefix`` is ``quire.cluster.router.Router`` itself, which is asked for every request. A replica is
a queue of prompts, and requests that decode together; costs of both are measured with ``--model``.
Its cache keeps the most recently used blocks. Agents share one of eight system prompts, and send a
turn when the last one is answered and a pause is over: its prompt is all that was said, and a
tool's result. Lengths are log-normal, as in published traces of agents: medians of 600 new tokens
and 120 of an answer, 8 turns.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import random
import statistics
import tempfile
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quire.cluster.router import Choice, Router

BLOCK = 64
"""Tokens of a block."""
SYSTEMS, SYSTEM = 8, 40
"""System prompts, and blocks of one."""
POLICIES = ("prefix", "least loaded", "round robin")


@dataclass(frozen=True)
class Costs:
    """Seconds of a model on this machine."""

    prompt: float
    """Per token of a prompt."""
    step: float
    """Per step of decoding, and ``row`` more for each request in it."""
    row: float
    bytes: int
    """Of state per token."""


@dataclass(frozen=True)
class Turn:
    new: int
    """Blocks of a tool's result."""
    answer: int
    """Tokens."""
    pause: float


@dataclass
class Agent:
    system: int
    turns: list[Turn]
    blocks: list[int] = field(default_factory=list)
    at: int = 0


def agents(count: int, rng: random.Random, pause: float) -> list[Agent]:
    """Return agents with their turns. ``pause``: mean seconds between turns."""

    def lognormal(median: float, spread: float, most: int) -> int:
        return max(1, min(most, round(median * 2.718281828 ** rng.gauss(0.0, spread))))

    made = []
    for _ in range(count):
        system = rng.randrange(SYSTEMS)
        turns = [
            Turn(lognormal(600 / BLOCK, 0.8, 64), lognormal(120, 0.7, 1000), rng.expovariate(1 / pause))
            for _ in range(lognormal(8, 0.5, 32))
        ]
        agent = Agent(system, turns)
        agent.blocks = [system * SYSTEM + index for index in range(SYSTEM)]
        made.append(agent)
    return made


class Replica:
    """A server: a cache, a queue of prompts, and requests that decode."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.free_at = 0.0
        self.decoding = 0

    def hit(self, blocks: Sequence[int]) -> int:
        """Return the leading blocks that are cached, and cache all of them."""
        found = next((at for at, block in enumerate(blocks) if block not in self.cache), len(blocks))
        for block in reversed(blocks):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.capacity:
            self.cache.popitem(last=False)
        return found


@dataclass
class Result:
    prompt: int = 0
    cached: int = 0
    lost: int = 0
    """Blocks that ran again although a replica had computed them."""
    firsts: list[float] = field(default_factory=list)
    choice: float = 0.0
    seconds: float = 0.0


def simulate(policy: str, count: int, costs: Costs, *, each: int, capacity: int, pause: float, seed: int) -> Result:
    """Play a trace of ``each`` agents for each of ``count`` replicas."""
    rng = random.Random(seed)
    names = [f"replica-{number}" for number in range(count)]
    replicas = {name: Replica(capacity) for name in names}
    router, turn = Router(), 0
    router.update(names)
    result, known = Result(), set[int]()
    crowd = agents(each * count, rng, pause)
    fresh = iter(range(SYSTEMS * SYSTEM, 1 << 62))
    events: list[tuple[float, int, str, int, str]] = []
    for number, _ in enumerate(crowd):
        heapq.heappush(events, (rng.uniform(0, pause * 4), number, "ask", number, ""))
    serial = len(crowd)
    while events:
        now, _, kind, number, name = heapq.heappop(events)
        agent = crowd[number]
        if kind == "done":
            replicas[name].decoding -= 1
            router.load[name] -= 1
            agent.at += 1
            if agent.at < len(agent.turns):
                serial += 1
                heapq.heappush(events, (now + agent.turns[agent.at].pause, serial, "ask", number, ""))
            result.seconds = max(result.seconds, now)
            continue
        asked = agent.turns[agent.at]
        agent.blocks += [next(fresh) for _ in range(asked.new)]
        begun = time.perf_counter()
        if policy == "prefix":
            choice = router.choose(agent.blocks)
            assert choice is not None
            name = choice.replica
            router.prefixes.add(agent.blocks, name)
        elif policy == "least loaded":
            name = router.least() or ""
        else:
            turn += 1
            name = names[turn % count]
        result.choice += time.perf_counter() - begun
        replica = replicas[name]
        router.load[name] += 1
        hit = replica.hit(agent.blocks)
        result.prompt += len(agent.blocks)
        result.cached += hit
        result.lost += sum(block in known for block in agent.blocks[hit:])
        known.update(agent.blocks)
        start = max(now, replica.free_at)
        replica.free_at = start + (len(agent.blocks) - hit) * BLOCK * costs.prompt
        first = replica.free_at + costs.step + costs.row * (replica.decoding + 1)
        result.firsts.append(first - now)
        replica.decoding += 1
        done = first + (asked.answer - 1) * (costs.step + costs.row * replica.decoding)
        agent.blocks += [next(fresh) for _ in range(asked.answer // BLOCK)]
        serial += 1
        heapq.heappush(events, (done, serial, "done", number, name))
    return result


def measured(model: str) -> Costs:
    """Measure a model: prompts of 512 tokens, and decodes of 1 and 8 requests."""
    from quire import LLM, SamplingParams

    with LLM(model, kv_cache_memory="256MiB", enable_prefix_caching=False) as llm:
        most = min(512, llm.engine.max_model_len - 40)
        rng = random.Random(0)

        def run(rows: int, prompt: int, tokens: int) -> float:
            prompts = [[rng.randrange(3, 200) for _ in range(prompt)] for _ in range(rows)]
            begun = time.perf_counter()
            llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True), use_tqdm=False)
            return time.perf_counter() - begun

        run(1, most, 2)
        prompt = min(run(1, most, 1) for _ in range(3)) / most
        steps = {rows: min(run(rows, 8, 33) - run(rows, 8, 1) for _ in range(3)) / 32 for rows in (1, 8)}
        row = max(0.0, (steps[8] - steps[1]) / 7)
        return Costs(prompt, steps[1] - row, row, llm.bytes_per_token)


def common(one: str, other: str) -> int:
    """Return the length of the common beginning."""
    differing = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


async def real(model: str, policy: str, sessions: int, seed: int) -> tuple[float, float, float]:
    """Play turns of agents against two servers of this machine, and return the part of the prompts'
    tokens that was cached; the part of their characters that a cache without limits would have, by
    the same choices; and the median of seconds to the first token."""
    import httpx

    from quire.cluster.front import Front
    from quire.cluster.local import LocalReplicas

    rng = random.Random(seed)

    class Policy(Router):
        """One request is under way at a time, so that the least loaded one is the next in turn."""

        last = ""

        def choose(self, blocks: Sequence[int] = (), without: Collection[str] = ()) -> Choice | None:
            found = super().choose(blocks if policy == "prefix" else (), without)
            self.last = "" if found is None else found.replica
            return found

    with tempfile.TemporaryDirectory() as folder:
        replicas = LocalReplicas([model, "--kv-cache-memory", "64MiB"], Path(folder), 2)
        await replicas.start()
        try:
            router = Policy()
            front = Front(replicas, router)
            transport = httpx.ASGITransport(app=front)
            async with httpx.AsyncClient(transport=transport, base_url="http://front", timeout=600) as client:
                system = "".join(rng.choice("abcdefgh ") for _ in range(600))
                histories = [system for _ in range(sessions)]
                turns = [one for one in range(sessions) for _ in range(4)]
                rng.shuffle(turns)
                prompt, cached, firsts = 0, 0, []
                sent: dict[str, list[str]] = {name: [] for name in replicas.names()}
                letters, expected = 0, 0
                for one in turns:
                    histories[one] += "".join(rng.choice("abcdefgh ") for _ in range(120))
                    begun = time.perf_counter()
                    body = {"prompt": histories[one], "max_tokens": 1, "temperature": 0}
                    answer = (await client.post("/v1/completions", json=body)).json()
                    firsts.append(time.perf_counter() - begun)
                    letters += len(histories[one])
                    expected += max((common(histories[one], text) for text in sent[router.last]), default=0)
                    sent[router.last].append(histories[one])
                    prompt += answer["usage"]["prompt_tokens"]
                    cached += answer["quire"]["reuse"]["cached"]
        finally:
            await replicas.stop()
    return cached / prompt, expected / letters, statistics.median(firsts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-python")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 10, 100, 1000])
    parser.add_argument("--agents", type=int, default=6, help="agents for each replica")
    parser.add_argument("--capacity", type=int, default=60_000, help="tokens of a replica's cache")
    parser.add_argument("--pause", type=float, default=4.0, help="mean seconds between two turns of an agent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="play a small trace against two servers")
    given = parser.parse_args()
    if given.check:
        for policy in POLICIES[:2]:
            hit, paper, first = asyncio.run(real(given.model, policy, 6, given.seed))
            print(f"{policy:13} two servers cached {hit:.1%}, on paper {paper:.1%}; first token {first * 1e3:.1f} ms")
        return
    costs = measured(given.model)
    print(
        f"{given.model}: prompts {1 / costs.prompt:,.0f} tokens/s, step {costs.step * 1e3:.2f} ms + {costs.row * 1e3:.2f} ms a request"
    )
    rows = []
    print(
        f"{'replicas':>8} {'policy':13} {'cached':>7} {'first token: median':>20} {'95 %':>8} {'run again':>11} {'a choice':>9}"
    )
    for count in given.replicas:
        for policy in POLICIES:
            found = simulate(
                policy,
                count,
                costs,
                each=given.agents,
                capacity=given.capacity // BLOCK,
                pause=given.pause,
                seed=given.seed,
            )
            firsts = sorted(found.firsts)
            row = {
                "replicas": count,
                "policy": policy,
                "cached": found.cached / found.prompt,
                "first_median": statistics.median(firsts),
                "first_95": firsts[int(0.95 * len(firsts))],
                "again_tokens": found.lost * BLOCK,
                "again_bytes": found.lost * BLOCK * costs.bytes,
                "choice_us": found.choice / len(firsts) * 1e6,
            }
            rows.append(row)
            print(
                f"{count:8} {policy:13} {row['cached']:7.1%} {row['first_median'] * 1e3:17.0f} ms {row['first_95'] * 1e3:5.0f} ms "
                f"{row['again_bytes'] / 1e9:8.2f} GB {row['choice_us']:6.0f} us"
            )
    print(
        json.dumps(
            {
                "benchmark": "cluster_sim",
                "costs": vars(costs),
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
