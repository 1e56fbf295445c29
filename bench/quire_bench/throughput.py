"""Throughput of many requests: Quire against ``transformers``' continuous and static batches.

The workload is nano-vllm's: prompts and texts of 100 to 1,024 random tokens, uniformly drawn,
greedy and without an end token. ``scale`` shortens both alike to fit a machine. All requests are
submitted at once. Each way of the peer runs at the best of a few batch sizes, found on some
requests. Fast enough ways then run in turn with Quire on all requests, and the texts are compared.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quire.base.errors import InvalidArgument, QuireError, Unsupported
from quire.base.sampling_params import SamplingParams
from quire.contracts.layers import FullAttention, LatentAttention, WindowedAttention
from quire.llm import LLM
from quire.models.catalogue import resolve_model
from quire_bench import latency
from quire_bench.hardware import Hardware, measure
from quire_bench.latency import matrix_parameters, synchronize
from quire_bench.reports import Comparison, interleave, print_json, print_table, random_prompts

SHORTEST, LONGEST = 100, 1024
"""Tokens of a prompt, and of a text, at scale 1."""
LEAST_SCALE = 0.01
PEER_BATCHES = (8, 16, 32, 64)
BUDGET_SECONDS = 300.0
"""Target seconds of the default scale for all runs together."""
SAMPLE_REQUESTS, SAMPLE_SCALE, SAMPLE_BATCH = 32, 0.05, 16
"""Sizes of the measurement by which the scale is chosen."""
SLOWER = 3.0
"""A way of the peer is skipped in the rounds if it is this many times slower than the best in
trials."""

QUIRE, STATIC, CONTINUOUS = "quire", "transformers, static batches", "transformers, continuous batching"
RATIO = "time / quire"


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests: prompts, and the number of new tokens of each."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def new_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and text."""
        return max(len(prompt) + new for prompt, new in zip(self.prompts, self.lengths, strict=True))

    def middle(self, count: int) -> list[int]:
        """Return ``count`` requests with medium numbers of tokens, close to the average."""
        order = sorted(range(len(self)), key=lambda index: (self.lengths[index], len(self.prompts[index])))
        first = (len(order) - count) // 2
        return order[first : first + count]

    def only(self, members: Sequence[int]) -> Workload:
        """Return some of the requests."""
        return Workload(
            prompts=tuple(self.prompts[index] for index in members),
            lengths=tuple(self.lengths[index] for index in members),
        )


def make_workload(requests: int, scale: float, vocab_size: int, *, seed: int = 0) -> Workload:
    """Draw requests; a seed's lengths are equal at all scales except for the factor."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(SHORTEST, LONGEST + 1, (2, requests), generator=generator)
    sizes, lengths = ([max(1, round(length * scale)) for length in row] for row in drawn.tolist())
    tokens = iter(random_prompts(1, sum(sizes), vocab_size, seed=seed)[0].tolist())
    return Workload(prompts=tuple(tuple(itertools.islice(tokens, size)) for size in sizes), lengths=tuple(lengths))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """New tokens of each request, and the seconds from the first to the last of all."""

    tokens: tuple[tuple[int, ...], ...]
    seconds: float
    preemptions: int = 0
    cached_tokens: int = 0
    """Prompt tokens that Quire found in its prefix cache."""


class QuireSubject:
    """``LLM.generate`` of all requests at once, with an empty prefix cache."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def serve(self, work: Workload) -> Outcome:
        device = self.llm.model.device
        self.llm.reset_prefix_cache()
        params = [SamplingParams(temperature=0, max_tokens=new, ignore_eos=True) for new in work.lengths]
        synchronize(device)
        started = time.perf_counter()
        outputs = self.llm.generate([list(prompt) for prompt in work.prompts], params, use_tqdm=False)
        synchronize(device)
        seconds = time.perf_counter() - started
        for output in outputs:
            if output.outputs[0].error is not None:
                raise QuireError(f"{output.request_id} failed: {output.outputs[0].error}")
        return Outcome(
            tokens=tuple(tuple(output.outputs[0].token_ids) for output in outputs),
            seconds=seconds,
            preemptions=sum(output.metrics.num_preemptions for output in outputs),
            cached_tokens=sum(output.num_cached_tokens for output in outputs),
        )


PeerWay = Callable[[Workload, int], Outcome]
"""A way of the peer to serve requests with a given batch size."""


def peer_ways(path: Path, dtype: torch.dtype, device: torch.device) -> dict[str, PeerWay]:
    """Return the ways of ``transformers`` by name."""
    from quire_bench.peers import TransformersPeer

    peer = TransformersPeer(path, dtype, device=str(device))

    def static(work: Workload, batch: int) -> Outcome:
        served = peer.serve_static(work.prompts, work.lengths, batch)
        return Outcome(tokens=served.tokens, seconds=served.seconds)

    def continuous(work: Workload, batch: int) -> Outcome:
        served = peer.serve_continuous(work.prompts, work.lengths, batch)
        return Outcome(tokens=served.tokens, seconds=served.seconds)

    return {STATIC: static, CONTINUOUS: continuous}


# -- choosing ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One way of the peer at its best batch size, on a number of requests."""

    batch: int
    rate: float
    """Seconds per new token."""
    members: Sequence[int]
    tokens: tuple[tuple[int, ...], ...]


def try_batches(way: PeerWay, work: Workload, batches: Sequence[int]) -> Trial:
    """Find the best batch size, from small to large, until one is slower than the last or fails,
    for example for lack of memory."""
    best: Trial | None = None
    for batch in sorted({min(batch, len(work)) for batch in batches}):
        members = work.middle(batch)
        some = work.only(members)
        if best is None:
            way(some, batch)  # the first run includes one-time work
        try:
            outcome = way(some, batch)
        except (Unsupported, torch.OutOfMemoryError):
            if best is None:
                raise
            break
        rate = outcome.seconds / some.new_tokens
        if best is not None and rate >= best.rate:
            break
        best = Trial(batch=batch, rate=rate, members=members, tokens=outcome.tokens)
    if best is None:
        raise InvalidArgument("no batch sizes; at least one is needed")
    return best


def worth_it(rates: Mapping[str, float]) -> list[str]:
    """Return the names with at most ``SLOWER`` times the best seconds per token."""
    return [name for name, rate in rates.items() if rate <= SLOWER * min(rates.values())]


def round_scale(scale: float, context: int) -> float:
    """Limit to the possible range and round down to hundredths."""
    hundredths = math.floor(100 * min(scale, 1.0, context / (2 * LONGEST)) + 1e-9)
    return max(LEAST_SCALE, hundredths / 100)


def choose_scale(
    ours: QuireSubject, ways: dict[str, PeerWay], requests: int, rounds: int, *, seed: int, notes: dict[str, str]
) -> float:
    """Choose the scale for about ``BUDGET_SECONDS`` in all; drop failing ways from ``ways``."""
    context = ours.llm.engine.max_model_len
    work = make_workload(
        min(requests, SAMPLE_REQUESTS), round_scale(SAMPLE_SCALE, context), ours.llm.model.vocab_size, seed=seed
    )
    ours.serve(work)
    own = ours.serve(work).seconds / work.new_tokens
    rates: dict[str, float] = {}
    for name, way in list(ways.items()):
        try:
            rates[name] = way(work, min(SAMPLE_BATCH, len(work))).seconds / work.new_tokens
        except Unsupported as error:
            notes[name] = str(error)
            del ways[name]
    kept = worth_it(rates) if rates else []
    # A kept way runs its trials, which take about as long as one round, and all rounds.
    each = (rounds + 1) * (own + sum(rates[name] for name in kept))
    each += sum(rate for name, rate in rates.items() if name not in kept)
    full_tokens = requests * (SHORTEST + LONGEST) / 2
    return round_scale(BUDGET_SECONDS / (each * full_tokens), context)


# -- running -----------------------------------------------------------------------------------


def run_throughput(
    model: str,
    *,
    engine_options: Mapping[str, Any],
    requests: int = 256,
    scale: float | None = None,
    rounds: int = 3,
    seed: int = 0,
    peer: str = "none",
    peer_batches: Sequence[int] = PEER_BATCHES,
    engines: Mapping[str, PeerWay] | None = None,
    hardware: Hardware | None = None,
) -> dict[str, Any]:
    """Measure, print a table and one JSON line, and return the line's content.

    ``engines`` schedule by themselves: each gets all requests, without a batch size to find.
    Raise ``InvalidArgument`` for numbers out of range or requests beyond the model's context, and
    ``Unsupported`` for a peer that is not installed.
    """
    check(requests=requests, scale=scale, rounds=rounds, seed=seed, peer=peer, peer_batches=peer_batches)
    with LLM(model, **engine_options) as llm:
        loaded, ours, notes = llm.model, QuireSubject(llm), dict[str, str]()
        least = LEAST_SCALE if scale is None else scale
        work = make_workload(requests, least, loaded.vocab_size, seed=seed)
        check_fits(work, llm.engine.max_model_len, least)
        ways: dict[str, PeerWay] = {}
        if peer == "transformers":
            ways = peer_ways(resolve_model(model, llm.config.revision), loaded.dtype, loaded.device)
        found = hardware or measure(device=loaded.device.type, seconds=8.0)
        if scale is None:
            scale = choose_scale(ours, ways, requests, rounds, seed=seed, notes=notes)
            print(f"scale {scale:g}, so that it takes minutes here; --scale sets it", flush=True)
            work = make_workload(requests, scale, loaded.vocab_size, seed=seed)
        ours.serve(work.only(work.middle(min(8, requests))))  # warm-up; the peer's trials do the same for it
        trials = run_trials(ways, work, peer_batches, notes)
        for name, trial in run_trials(engines or {}, work, (SAMPLE_REQUESTS,), notes).items():
            trials[name] = replace(trial, batch=requests)
        ways |= engines or {}
        outcomes, comparison = run_rounds(ours, ways, trials, work, rounds)
        facts = {"model": model, "requests": requests, "scale": scale, "seed": seed, "rounds": rounds}
        result = {"benchmark": "throughput", **facts}
        result |= report(llm, work, outcomes, comparison, trials, notes, found)
    print_json(result)
    return result


def run_trials(
    ways: Mapping[str, PeerWay], work: Workload, batches: Sequence[int], notes: dict[str, str]
) -> dict[str, Trial]:
    """Return the trials by name; note why others could not run."""
    trials: dict[str, Trial] = {}
    for name, way in ways.items():
        try:
            trials[name] = try_batches(way, work, batches)
        except Unsupported as error:
            notes[name] = str(error)
    return trials


def run_rounds(
    ours: QuireSubject, ways: Mapping[str, PeerWay], trials: Mapping[str, Trial], work: Workload, rounds: int
) -> tuple[dict[str, Outcome], Comparison]:
    """Run all requests in turn; return each one's last outcome and the times."""
    last: dict[str, Outcome] = {}

    def timed(name: str) -> Callable[[], float]:
        def call() -> float:
            last[name] = ours.serve(work) if name == QUIRE else ways[name](work, trials[name].batch)
            print(f"{name}: {last[name].seconds:.1f} s", file=sys.stderr, flush=True)
            return last[name].seconds

        return call

    kept = worth_it({name: trial.rate for name, trial in trials.items()}) if trials else []
    comparison = interleave({name: timed(name) for name in (QUIRE, *kept)}, rounds, warmup=0)
    return last, comparison


# -- reporting ---------------------------------------------------------------------------------


def report(
    llm: LLM,
    work: Workload,
    outcomes: Mapping[str, Outcome],
    comparison: Comparison,
    trials: Mapping[str, Trial],
    notes: Mapping[str, str],
    found: Hardware,
) -> dict[str, Any]:
    """Print the table; return the run's part of the JSON line."""
    own, seconds = outcomes[QUIRE], comparison.spread(QUIRE).median
    state, dtype = llm.engine.runner.state, str(llm.model.dtype).removeprefix("torch.")
    tflops, peak = workload_flops(llm, work) / seconds / 1e12, found["peak_tflops"].get(dtype, 0.0)
    possible = f"{tflops / peak:.0%} of {peak:.2f} TFLOP/s" if tflops and peak else ""
    peers = {name: peer_result(name, own, work, outcomes, comparison, trial) for name, trial in trials.items()}
    rows: list[dict[str, Any]] = [rates("quire", work, seconds) | {"of possible": possible}]
    for name, values in peers.items():
        rows.append(rates(f"{name} of {values['batch']}", work, values["median_seconds"]))
        rows[-1] |= {RATIO: f"{values['ratio']:.2f}{' by its trial' if values['estimated'] else ''}"}
        rows[-1] |= {"equal texts": f"{values['equal_texts']}/{values['compared_texts']}"}
    faster = min(peers, key=lambda name: float(peers[name]["ratio"]), default=None)
    print(f"{llm.model.architecture}, {llm.model.num_parameters / 1e6:.0f}M parameters, {dtype} on {llm.model.device}")
    print(f"{len(work)} requests, {work.prompt_tokens} prompt tokens, {work.new_tokens} new tokens")
    print(f"{state.num_pages} pages, {own.preemptions} preemptions, {own.cached_tokens} prompt tokens cached")
    print_table(rows)
    for name, note in notes.items():
        print(f"{name}: {note}")
    return {
        "dtype": dtype,
        "device": str(llm.model.device),
        "prompt_tokens": work.prompt_tokens,
        "generated_tokens": work.new_tokens,
        "seconds": comparison.spread(QUIRE),
        "generated_per_second": work.new_tokens / seconds,
        "total_per_second": (work.prompt_tokens + work.new_tokens) / seconds,
        "peers": peers,
        "notes": dict(notes),
        "faster_peer": faster,
        "ratio_to_faster_peer": None if faster is None else peers[faster]["ratio"],
        "tflops": tflops or None,
        "peak_tflops": peak,
        "read_gbps": found["read_gbps"],
        "pool": {"pages": state.num_pages, "page_size": llm.config.page_size, "tokens": state.capacity},
        "preemptions": own.preemptions,
        "cached_tokens": own.cached_tokens,
        "hardware": found,
    }


def peer_result(
    name: str, own: Outcome, work: Workload, outcomes: Mapping[str, Outcome], comparison: Comparison, trial: Trial
) -> dict[str, Any]:
    """Compare a way's time and texts with Quire's, on all requests or only its trial's."""
    ran = name in outcomes
    tokens, members = (outcomes[name].tokens, range(len(work))) if ran else (trial.tokens, trial.members)
    median = comparison.spread(name).median if ran else trial.rate * work.new_tokens
    return {
        "batch": trial.batch,
        "estimated": not ran,
        "median_seconds": median,
        "ratio": median / comparison.spread(QUIRE).median,
        "ratio_in_rounds": comparison.ratios.get(name),
        "equal_texts": sum(own.tokens[index] == text for index, text in zip(members, tokens, strict=True)),
        "compared_texts": len(tokens),
    }


def rates(name: str, work: Workload, seconds: float) -> dict[str, Any]:
    """Return the common cells of every row."""
    return {
        "runs": name,
        "seconds": seconds,
        "generated tok/s": work.new_tokens / seconds,
        "total tok/s": (work.prompt_tokens + work.new_tokens) / seconds,
    }


def workload_flops(llm: LLM, work: Workload) -> float:
    """Return the requests' operations: matrices, visible attention, a head per new token. 0 for
    models with experts, because each token uses only some."""
    model = llm.model
    if any("expert" in name and value for name, value in model.config.items()):
        return 0.0
    # The last new token is never run.
    runs = [len(prompt) + new - 1 for prompt, new in zip(work.prompts, work.lengths, strict=True)]
    attention = 0.0
    for spec in model.layer_specs:
        if isinstance(spec, FullAttention | LatentAttention | WindowedAttention):
            pairs = sum(visible_pairs(length, spec.layer_window) for length in runs)
            attention += 2.0 * spec.num_heads * (spec.head_dim + spec.value_dim) * pairs
    head = 2.0 * model.vocab_size * model.hidden_size * work.new_tokens
    return 2.0 * matrix_parameters(llm) * sum(runs) + attention + head


def visible_pairs(length: int, window: int | None) -> int:
    """Return the number of pairs of a token and one that it sees, itself included."""
    near = length if window is None else min(window, length)
    return near * (near + 1) // 2 + (length - near) * near


# -- refusing ----------------------------------------------------------------------------------


def check(
    *, requests: int, scale: float | None, rounds: int, seed: int, peer: str, peer_batches: Sequence[int]
) -> None:
    """Raise ``InvalidArgument`` for impossible measurements."""
    latency.check(decode=2, context=1, rounds=rounds, peer=peer)
    if requests < 1:
        raise InvalidArgument(f"requests {requests}; at least 1 is needed")
    if scale is not None and not LEAST_SCALE <= scale <= 1:
        raise InvalidArgument(f"scale {scale}; a number from {LEAST_SCALE} to 1 is accepted")
    if not 0 <= seed < 2**63:
        raise InvalidArgument(f"seed {seed}; a number in 0..2^63 - 1 is accepted")
    if not peer_batches or min(peer_batches) < 1:
        raise InvalidArgument(f"peer_batches {list(peer_batches)}; at least one size, each at least 1, is needed")


def check_fits(work: Workload, context: int, scale: float) -> None:
    """Raise ``InvalidArgument`` for requests that are longer than the model's context."""
    if work.longest > context:
        most = math.floor(100 * context / (2 * LONGEST)) / 100
        instead = f"a scale up to {most:g} is accepted" if most >= LEAST_SCALE else "it is too short for this benchmark"
        raise InvalidArgument(
            f"scale {scale:g} gives a request of {work.longest} tokens, and the context ends at {context}; {instead}"
        )
