"""Memory bandwidth and matrix multiplication of this machine, measured as limits of results.

Run it for a table and one JSON line: ``python bench/hardware.py [--device cuda] [--threads N]``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument

GEMM_SIZES = (1024, 2048, 4096, 8192)
"""Sides of the square matrices; large ones that would take too long are skipped."""

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_COLUMNS = 4096


class Hardware(TypedDict):
    """Measured limits: GB/s of 10^9 bytes, TFLOP/s of 10^12 multiplications and additions."""

    device: str
    threads: int
    """Threads of torch on the CPU."""
    torch: str
    buffer_bytes: int
    """Bytes of the buffers of the bandwidth measurements."""
    cache_bytes: int
    """Size of the device's largest cache; 0 if unknown."""
    exceeds_cache: bool
    """Whether buffers have at least twice the size of the cache; else bandwidths are partly the
    cache's."""
    copy_gbps: float
    """Copy, bytes read plus bytes written."""
    read_gbps: float
    """The best of the following: the limit for reading weights."""
    read_methods_gbps: dict[str, float]
    gemm_tflops: dict[str, dict[str, float]]
    """TFLOP/s by dtype and side; int8 adds up in int32."""
    peak_tflops: dict[str, float]
    """The best side's TFLOP/s by dtype."""


def measure(*, device: str = "cpu", threads: int = 0, buffer_bytes: int = 0, seconds: float = 20.0) -> Hardware:
    """Measure bandwidths and multiplication peaks of ``device``.

    Args:
        device: ``cpu`` or a CUDA device.
        threads: CPU threads, 0 for torch's own number; restored afterwards.
        buffer_bytes: size of the bandwidth buffers; 0 takes four times the largest cache, at
            least 1 GiB and at most an eighth of the free memory.
        seconds: time for all measurements, without making buffers; each runs at least twice.

    Raises:
        InvalidArgument: a number out of range.
        FailedPrecondition: torch cannot use ``device`` here.
    """
    if threads < 0 or seconds <= 0 or buffer_bytes < 0:
        raise InvalidArgument(
            f"threads and buffer_bytes must be 0 or greater and seconds above 0, got {threads}, {buffer_bytes}, {seconds}"
        )
    try:
        where = torch.device(device)
        torch.empty(1, device=where)
    except (RuntimeError, AssertionError) as error:
        raise FailedPrecondition(f"torch cannot use the device '{device}' here; use 'cpu' or a CUDA device") from error
    with _threads(threads), torch.inference_mode():
        cache = _cache_bytes(where)
        size = buffer_bytes or default_buffer_bytes(cache, free_bytes(where))
        copy = _copy_gbps(where, size, seconds * 0.15)
        reads = _read_gbps(where, size, seconds * 0.35)
        kinds = {**_DTYPES, "int8": torch.int8}
        gemm = {name: _gemm_tflops(where, dtype, seconds * 0.5 / len(kinds)) for name, dtype in kinds.items()}
        return Hardware(
            device=_device_name(where),
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            buffer_bytes=size,
            cache_bytes=cache,
            exceeds_cache=size >= 2 * cache,
            copy_gbps=copy,
            read_gbps=max(reads.values()),
            read_methods_gbps=reads,
            gemm_tflops=gemm,
            peak_tflops={name: max(by_size.values()) for name, by_size in gemm.items()},
        )


def default_buffer_bytes(cache: int, free: int) -> int:
    """Return four times the cache, at least 1 GiB, at most 1/8 of free memory (0: unknown)."""
    wanted = max(1 << 30, 4 * cache)
    return min(wanted, max(free // 8, 1 << 24)) if free else wanted


def parse_size(text: str) -> int:
    """Return the bytes of a size in Linux's notation (``480M``, ``2048K``, ``64``); 0 for
    others."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "")
    return int(number) * units.get(unit, 1) if number.isdigit() else 0


def best_seconds(function: Callable[[], object], *, budget: float, synchronize: Callable[[], None]) -> float:
    """Time at least two runs after a warm-up, more within ``budget`` seconds; return the best."""
    function()
    synchronize()
    best, spent, runs = math.inf, 0.0, 0
    while runs < 2 or spent < budget:
        started = time.perf_counter()
        function()
        synchronize()
        taken = time.perf_counter() - started
        best, spent, runs = min(best, taken), spent + taken, runs + 1
    return best


def _copy_gbps(device: torch.device, size: int, budget: float) -> float:
    source = torch.ones(size // 4, device=device)
    target = torch.zeros_like(source)
    taken = best_seconds(lambda: target.copy_(source), budget=budget, synchronize=_synchronize(device))
    return 2 * source.nbytes / taken / 1e9


def _read_gbps(device: torch.device, size: int, budget: float) -> dict[str, float]:
    """Measure reading as in decoding, by products with one vector, and by the largest entry of all.

    On CPUs torch's plain products and its sum are far from the limit: packed weights are read
    faster, and so is the maximum of integers, which needs one instruction for each vector.
    """
    rates: dict[str, float] = {}
    for name, dtype in _DTYPES.items():
        matrix = torch.full((max(1, size // (_COLUMNS * dtype.itemsize)), _COLUMNS), 0.5, dtype=dtype, device=device)
        vector = torch.full((_COLUMNS,), 0.5, dtype=dtype, device=device)
        methods: dict[str, Callable[[], Tensor]] = {f"gemv {name}": partial(torch.mv, matrix, vector)}
        if dtype == torch.float32:
            methods["max int32"] = matrix.view(torch.int32).amax
        if packs(device, dtype):
            methods[f"packed {name}"] = packed_product(matrix, vector.unsqueeze(0))
        for method, function in methods.items():
            taken = best_seconds(function, budget=budget / 5, synchronize=_synchronize(device))
            rates[method] = matrix.nbytes / taken / 1e9
        del matrix, methods, function  # frees the buffer before the next one is allocated
    return rates


class Reads:
    """Measures reading again and again, since neighbours of a virtual machine share its memory's
    bandwidth: by the largest of all integers, whose rate is the best one or near it."""

    def __init__(self, size: int) -> None:
        self._buffer = torch.zeros(max(1, size // 4), dtype=torch.int32)

    def gbps(self) -> float:
        """Return the rate of the faster one of two passes."""
        taken = best_seconds(self._buffer.amax, budget=0, synchronize=lambda: None)
        return self._buffer.nbytes / taken / 1e9


def packed_product(weight_OI: Tensor, input_BI: Tensor) -> Callable[[], Tensor]:
    """Return the product with weights in oneDNN's packed order."""
    ops: Any = torch.ops.mkldnn
    packed = ops._reorder_linear_weight(weight_OI, input_BI.shape[0])
    return partial(ops._linear_pointwise, input_BI, packed, None, "none", [], "")


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether oneDNN packs weights of this dtype here; of 16 bits it needs AVX-512 or the
    like."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    supports = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return dtype not in supports or bool(getattr(torch.ops.mkldnn, supports[dtype])())


def _gemm_tflops(device: torch.device, dtype: torch.dtype, budget: float) -> dict[str, float]:
    """Measure products of squares: torch's, and of packed weights; the faster one counts."""
    rates: dict[str, float] = {}
    left = budget
    for side in GEMM_SIZES:
        a = torch.ones((side, side), dtype=dtype, device=device)
        if dtype == torch.int8:
            methods: list[Callable[[], Tensor]] = [partial(torch._int_mm, a, a.clone().t())]
        else:
            b = a.normal_().clone()
            methods = [partial(torch.mm, a, b, out=torch.empty_like(a))]
            methods += [packed_product(b, a)] if packs(device, dtype) else []
        started = time.perf_counter()
        taken = min(
            best_seconds(method, budget=left / 4 / len(methods), synchronize=_synchronize(device)) for method in methods
        )
        left -= time.perf_counter() - started
        rates[str(side)] = 2 * side**3 / taken / 1e12
        # Twice the side is eight times the work, done three times: warm-up and two runs.
        if 3 * 8 * taken * len(methods) > left:
            break
    return rates


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _synchronize(device: torch.device) -> Callable[[], None]:
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def _cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((parse_size(path.read_text().strip()) for path in sizes), default=0)


def free_bytes(device: torch.device) -> int:
    """Return the bytes of free memory; 0 if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    available = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(available[0]) << 10 if available else 0


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measures memory bandwidth and matrix multiplication.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 is torch's own number")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for the measurements")
    options = parser.parse_args()
    result = measure(device=options.device, threads=options.threads, seconds=options.seconds)
    print(f"{result['device']}; {result['threads']} threads; torch {result['torch']}")
    if not result["exceeds_cache"]:
        print(
            f"note: buffers of {result['buffer_bytes'] / 2**20:.0f} MiB against {result['cache_bytes'] / 2**20:.0f} MiB "
            "of cache: the bandwidths are partly the cache's"
        )
    print(f"{'copy (read + write)':24} {result['copy_gbps']:10.1f} GB/s")
    for method, rate in result["read_methods_gbps"].items():
        print(f"{'read: ' + method:24} {rate:10.1f} GB/s")
    for name, by_size in result["gemm_tflops"].items():
        for side, rate in by_size.items():
            print(f"{f'gemm {name} {side}':24} {rate:10.2f} TFLOP/s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
