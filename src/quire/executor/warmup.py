"""The measurements of ``warmup``: memory of activations, and the batch that decodes best."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.autograd.profiler import profile

from quire.base.process_limits import free_memory
from quire.base.types import Chunk, Inputs, LogitsPlace, SeqId, Step
from quire.executor.cache_pool import CachePool
from quire.executor.running_calls import Stopwatch
from quire.kv.forward_need import pages_for

LONG_CHUNK, SHORT_CHUNK = 128, 32
"""Tokens of the two forwards whose peaks give a slope and an intercept."""
REPEATS = 3
KNEE = 0.9
"""Least share of the best throughput at the knee, the smallest batch that reaches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Memory of a forward besides weights, K and V, and recurrent states: a part for each token
    with logits, and a part for any forward."""

    bytes_per_token: int
    overhead_bytes: int


def measure(pool: CachePool, chunk_size: int = 0) -> Activations | None:
    """Measure on temporary sequences. None: the pool has no room for two tokens. ``chunk_size``:
    most tokens of a forward; <= 0: any number."""
    room = min(available_pages(pool) * pool.facts.page_size, pool.facts.max_model_len)
    room = min(room, chunk_size) if chunk_size > 0 else room
    if pool.facts.state_interval:
        # A forward takes a state at its end, and one at each multiple of the interval before that.
        room = min(room, pool.available_states * pool.facts.state_interval)
    long, short = min(LONG_CHUNK, room), min(SHORT_CHUNK, room // 2)
    if not short:
        return None
    _peak_of_chunk(pool, short)  # the first forward also allocates permanent data, such as rotary tables
    high, low = _peak_of_chunk(pool, long), _peak_of_chunk(pool, short)
    slope = max(0, -(-(high - low) // (long - short)))
    # Logits with places exist once; the logits of a few rows exist twice.
    high = max(high, _peak_of_chunk(pool, long, placed=True))
    return Activations(bytes_per_token=slope, overhead_bytes=max(0, high - slope * long))


def available_pages(pool: CachePool) -> int:
    """Return the number of free pages; without layers that have pages, the pages of the longest
    sequence. 0 if layers are recurrent and no state slot is free."""
    if pool.facts.recurrent_ids and not pool.available_states:
        return 0
    # The class with the fewest pages limits: a forward writes all its tokens, windows or not.
    pages = pool.state.free_pages()[: len(pool.facts.page_bytes)]
    return min(pages, default=pool.facts.max_model_len)


def fits(activations: Activations | None, rows: int, device: torch.device) -> bool:
    """Return True if a decode of ``rows`` fits into free memory, as far as measured."""
    free = free_memory(device)
    if activations is None or free is None:
        return True
    return activations.bytes_per_token * rows + activations.overhead_bytes <= free


def _peak_of_chunk(pool: CachePool, tokens: int, *, placed: bool = False) -> int:
    """Return the peak bytes of a prompt with all logits; ``placed``: with destinations for the
    logits."""
    seqs = pool.add(1)
    step = Step(chunks=(Chunk(seqs[0], [0] * tokens, logits="all"),))
    if placed:
        step = replace(step, inputs=Inputs(places=(LogitsPlace(0, tokens),)))

    def run() -> object:
        return pool.runner.execute(step), pool.runner.logits.pop(0, None)

    try:
        return peak_bytes(run, pool.facts.device)
    finally:
        pool.remove(*seqs)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that ``run`` had allocated on the device, beyond the bytes before
    it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # Keeps the profiler from writing to stderr, if it is set before its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(profile_memory=True) as profiled:
        run()
    live = peak = 0
    results = profiled.kineto_results
    for event in results.events() if results is not None else ():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def knee_of(pool: CachePool, max_batch_size: int) -> int:
    """Return the smallest batch of decodes with nearly the best throughput."""
    rates: dict[int, float] = {}
    most = min(max_batch_size, available_pages(pool) // pages_for(1 + REPEATS, pool.facts.page_size))
    if pool.facts.recurrent_ids:
        # One for the row's present state, one for its next step, and one for each kept multiple.
        kept = REPEATS // pool.facts.state_interval if pool.facts.state_interval else 0
        most = min(most, pool.available_states // (2 + kept))
    batch = 1
    while batch <= most:
        rates[batch] = _decode_rate(pool, batch)
        batch = batch * 2 if batch * 2 <= most or batch == most else most
    best = max(rates.values(), default=0.0)
    return min((size for size, rate in rates.items() if rate >= KNEE * best), default=1)


def _decode_rate(pool: CachePool, batch: int) -> float:
    """Return the tokens per second of decoding ``batch`` rows, the best of a few repeats."""
    seqs: list[SeqId] = pool.add(batch)
    try:
        step = Step(chunks=tuple(Chunk(seq, [0]) for seq in seqs))
        pool.runner.execute(step)
        times = []
        for _ in range(min(REPEATS, pool.facts.max_model_len - 1)):
            watch = Stopwatch(pool.facts.device)
            pool.runner.execute(step)
            times.append(watch.seconds())
        return batch / min(times) if times else 0.0
    finally:
        pool.remove(*seqs)
