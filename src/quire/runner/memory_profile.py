"""Measurement of a device's memory for the largest step and for captured decodes.

They run once before the pool is made; the pool gets the remaining memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import torch

from quire.base.errors import ResourceExhausted
from quire.base.progress import Bar, on_terminal
from quire.base.sampling_params import SamplingParams
from quire.base.types import Add, Chunk, Step
from quire.kernels.draw.triton_penalties import fastest_penalties
from quire.runner.local import LocalRunner
from quire.runner.pool_budget import Budget
from quire.sampling.request_sampler import RequestSampler
from quire.sampling.sampler import sample_later
from quire.sampling.seen_tokens import SeenTokens

logger = logging.getLogger("quire")

MIB = 1 << 20
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=1, seed=0)
"""Sampled rows, because editing, filtering and drawing take more memory than greedy rows."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a device during a call."""

    total: int
    peak: int
    """The most bytes that PyTorch's allocator held, weights and rounding included."""
    outside: int
    """Bytes taken outside of it afterwards: contexts, kernels, other processes."""


class DeviceMemory(Protocol):
    """The memory of one device."""

    name: str

    def free(self) -> int:
        """Return the number of free bytes."""

    def use_of(self, run: Callable[[], int]) -> MemoryUse:
        """Call ``run`` and measure it. It returns a number of held bytes to subtract from the
        peak."""

    def taken_by(self, run: Callable[[], object]) -> int:
        """Call ``run``; return the number of bytes of the device that it has taken."""


class CudaMemory:
    """The memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = str(device)

    def free(self) -> int:
        """See ``DeviceMemory``."""
        return torch.cuda.mem_get_info(self._device)[0]

    def use_of(self, run: Callable[[], int]) -> MemoryUse:
        """See ``DeviceMemory``. Freed memory is returned to the device before and after."""
        device = self._device
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        held = run()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_reserved(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return MemoryUse(total, peak - held, total - free - torch.cuda.memory_reserved(device))

    def taken_by(self, run: Callable[[], object]) -> int:
        """See ``DeviceMemory``."""
        before = self._left()
        run()
        return max(0, before - self._left())

    def _left(self) -> int:
        """Return the free bytes after PyTorch has released its cache."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return self.free()


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory of a device; None for the host, which other programs share."""
    return CudaMemory(device) if device.type == "cuda" else None


def greatest_lengths(max_num_seqs: int, max_num_batched_tokens: int, max_len: int) -> list[int]:
    """Return the new tokens of each sequence in the largest step: as many sequences and tokens as a
    step may have."""
    count = min(max_num_seqs, max_num_batched_tokens)
    tokens = min(max_num_batched_tokens, count * max_len)
    return [tokens // count + (index < tokens % count) for index in range(count)]


def run_greatest_step(runner: LocalRunner, lengths: list[int]) -> None:
    """Run new sequences of these lengths, with the logits of every token, which a request may ask
    for, and draw a token for each."""
    seqs = [runner.new_seq() for _ in lengths]
    chunks = tuple(Chunk(seq, [0] * length, logits="all") for seq, length in zip(seqs, lengths, strict=True))
    output = runner.execute(Step(edits=tuple(map(Add, seqs)), chunks=chunks))
    rows_RV = output.logits_RV[: len(seqs)]
    samplers = [RequestSampler(SAMPLED, [0], vocab_size=rows_RV.shape[1]) for _ in seqs]
    seen = SeenTokens(rows_RV.shape[1], rows_RV.device, fastest_penalties(rows_RV.device))
    sample_later(rows_RV, samplers, seen=seen).read()


def captured_bytes(memory: DeviceMemory, capture: Callable[[int], bool], sizes: Sequence[int]) -> int:
    """Return the bytes of a device that captured decodes of these sizes take, given the largest
    first. All but the first share its memory, and each of them takes at most as much as the second.
    """
    if not sizes:
        return 0
    first, others = memory.taken_by(lambda: capture(sizes[0])), len(sizes) - 1
    return first + (memory.taken_by(lambda: capture(sizes[1])) * others if others else 0)


def capture_usual(memory: DeviceMemory, capture: Callable[[int], bool], sizes: Sequence[int], progress: bool) -> None:
    """Capture decodes of these sizes, given the largest first, until one fails. ``progress`` shows
    a bar if stderr is a terminal."""
    hidden, done = not (progress and on_terminal()), 0

    def run() -> None:
        nonlocal done
        with Bar(sizes, desc="Capturing", unit="size", leave=False, disable=hidden) as bar:
            done = sum(1 for _ in takewhile(capture, bar))

    taken = memory.taken_by(run)
    if done:
        logger.info("captured decodes of %d sizes, up to %d sequences, in %d MiB", done, sizes[0], taken >> 20)


def measured_budget(
    memory: DeviceMemory, share: float, lengths: list[int], run: Callable[[], int], captured: Callable[[], int] = int
) -> Budget:
    """Return the budget of ``share`` of a device less weights, the largest step, which ``run``
    runs, and ``captured`` bytes. ``ResourceExhausted`` if there is no room for that step."""
    free = memory.free()
    try:
        use, graphs = memory.use_of(run), captured()
    except (torch.OutOfMemoryError, ResourceExhausted) as error:
        raise ResourceExhausted(
            f"a step of {sum(lengths)} tokens of {len(lengths)} sequences does not fit into the {free / MIB:.0f} MiB that are free on "
            f"{memory.name} beside the weights; give a smaller max_num_batched_tokens or max_num_seqs"
        ) from error
    nbytes = max(0, int(share * use.total) - use.outside - use.peak - graphs)
    decodes = f"less {graphs / MIB:.0f} MiB for captured decodes, " if graphs else ""
    return Budget(
        nbytes,
        f"{nbytes / MIB:.0f} MiB of {use.total / MIB:.0f} MiB on {memory.name} (gpu_memory_utilization {share}, less {use.peak / MIB:.0f} "
        f"MiB for weights and the greatest step, {decodes}less {use.outside / MIB:.0f} MiB that others hold) hold",
        "give a greater gpu_memory_utilization or a smaller max_num_batched_tokens, or free some memory",
    )
