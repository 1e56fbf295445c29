"""A report on this machine and on Quire's use of it."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from quire.base import openmp
from quire.cli.tables import folding_table, print_tables

if TYPE_CHECKING:
    from quire.models.loading import Outline


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    value: str
    ok: bool = True
    advice: str = ""
    """The remedy if ``ok`` is false."""


def versions() -> dict[str, str]:
    """Return the versions of the packages that affect results."""
    found = {"quire": "", "python": platform.python_version()}
    for name in ("quire", "torch", "numpy", "tokenizers", "safetensors", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {name: value for name, value in found.items() if value}


def examine() -> list[Finding]:
    """Examine everything; report missing parts instead of raising."""
    python = f"{platform.python_version()} on {platform.platform()}"
    findings = [
        Finding("versions", ", ".join(f"{name} {value}" for name, value in versions().items())),
        Finding("Python", python, sys.version_info >= (3, 11), "Quire needs Python 3.11 or later."),
    ]
    try:
        import torch
    except ImportError as error:
        return [*findings, Finding("PyTorch", f"cannot be imported: {error}", False, "pip install 'torch>=2.11'")]
    return [
        *findings,
        *_devices(torch.__version__),
        _waiting(),
        _memory(),
        _kernels(),
        _ranks(),
        _weights(),
        _server(),
        _model_cache(),
    ]


def _devices(torch_version: str) -> list[Finding]:
    import torch

    from quire.base.config import ATTENTION_BACKENDS
    from quire.kernels.attention.cpu_attention import NativeAttention
    from quire.kernels.cpu_process import usable_cores
    from quire.kernels.native_library import native_problem
    from quire.models.processor import Processor

    findings = [Finding("PyTorch", f"{torch_version}, {torch.get_num_threads()} threads")]
    fast = Processor.here().multiplies(torch.bfloat16)
    speed, taken = ("fast", "the checkpoint's type") if fast else ("slow", "float32 for bfloat16 checkpoints")
    cores = f"{os.cpu_count()} CPUs, {usable_cores()} cores for this process; bfloat16 is {speed} here, so dtype 'auto' takes {taken}"
    findings.append(Finding("CPU", cores))
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
        room = f"{torch.cuda.get_device_name(index)}, {free:.1f} of {total:.1f} GiB free"
        findings.append(Finding(f"CUDA device {index}", room))
    if not torch.cuda.is_available():
        built = "a CUDA build" if torch.version.cuda else "a CPU build"
        findings.append(Finding("CUDA", f"no device ({built} of PyTorch): models run on the CPU"))
    choices = ", ".join(ATTENTION_BACKENDS)
    native = f"on the CPU native ({NativeAttention().level}), " if not native_problem() else ""
    kernels = "on CUDA devices triton, " if find_spec("triton") is not None else ""
    found = f"{native}{kernels}elsewhere torch (scaled dot product attention); attention_backend can be {choices}"
    findings.append(Finding("attention", found))
    return findings


def _waiting() -> Finding:
    found = ", ".join(f"{one}={os.environ[one]}" for one in openmp.VARIABLES if one in os.environ)
    value = {
        "user": f"as the environment says: {found}",
        "late": "spin for OpenMP's default time: torch was loaded before quire, which could not shorten it any more",
        "none": "as OpenMP's default has it on this system",
        "quire": f"spin for a tenth of a millisecond, then sleep (GOMP_SPINCOUNT={openmp.SPINS}, set by Quire), so that other "
        "work slows decoding less; OMP_WAIT_POLICY=ACTIVE lets them spin, on a machine of their own",
    }[openmp.DECISION]
    advice = (
        "Other work on this machine makes decoding several times slower; import quire before torch, "
        f"or set GOMP_SPINCOUNT={openmp.SPINS}."
    )
    return Finding("waiting threads", value, openmp.DECISION != "late", advice)


def _memory() -> Finding:
    import torch

    from quire.runner.pool_budget import free_budget

    pool = free_budget(torch.device("cpu")).nbytes
    text = f"{pool / 2**30:.1f} GiB would be the KV pool on the CPU (a quarter of what is free)"
    return Finding("memory", text, pool > 64 * 2**20, "Free some memory, or give kv_cache_memory.")


def _kernels() -> Finding:
    from quire.kernels.attention.cpu_attention import LEVELS
    from quire.kernels.linear.cpu_linear import native_linear
    from quire.kernels.native_library import native_library, native_problem

    library = native_library()
    if library is None:
        advice = "Install a C++ compiler and then Quire again; without them models and adapters take longer on the CPU, and there are no int8 and int4 weights."
        return Finding("C++ kernels", native_problem(), False, advice)
    linear = native_linear()
    used = "" if linear is None else f", linear maps those for {LEVELS[linear.level]}"
    if linear is not None and linear.float_level != linear.level:
        used += f", of weights in bfloat16 and blocks those for {LEVELS[linear.float_level]}, which are faster here"
    if linear is not None and linear.bfloat16_kinds:
        used += "; dtype auto is bfloat16 for GGUF files, which whole numbers multiply faster"
    threads = "" if library.parallel else ", on one thread: PyTorch has no OpenMP runtime with GOMP_parallel"
    text = f"built; models and adapters on the CPU use them{used}{threads}"
    return Finding("C++ kernels", text, bool(library.parallel), "Install a PyTorch that computes with OpenMP.")


def _ranks() -> Finding:
    """Report how processes that divide a model would exchange rows, and how fast on this CPU."""
    import torch.distributed as dist

    options = "tensor_parallel_size and pipeline_parallel_size need a PyTorch with"
    if not dist.is_available():
        return Finding("ranks", "PyTorch has no torch.distributed", False, f"{options} torch.distributed")
    ways = []
    if dist.is_gloo_available():
        seconds, rate = _link()
        ways.append(f"gloo between CPUs ({seconds * 1e6:.0f} µs a row, {rate / 2**30:.1f} GiB/s from stage to stage)")
    if dist.is_nccl_available():
        ways.append("NCCL between GPUs")
    return Finding("ranks", ", ".join(ways) or "neither gloo nor NCCL", bool(ways), f"{options} gloo or NCCL")


def _link(rows: int = 2048, width: int = 1024, turns: int = 20) -> tuple[float, float]:
    """Send rows from one stage to the next; return the seconds of one row, and bytes a second."""
    import torch

    from quire.contracts.ranks import Grid, Stages
    from quire.runner.torch_group import TorchLine

    grid, cpu = Grid(stages=2), torch.device("cpu")
    stages = Stages(1, (range(1), range(1, 2)), {}, width, torch.float32)

    def serve(meeting: Path) -> None:
        line = TorchLine(1, grid, cpu, meeting)
        line.use(stages, width)
        for count in (1, *[1] * turns, rows):
            line.give(line.receive(count)[:1])
            line.finish_sends()

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve, Path(folder) / "meeting")
        line = TorchLine(0, grid, cpu, Path(folder) / "meeting")
        line.use(stages, width)

        def timed(count: int, turns: int) -> float:
            x_TW, start = torch.zeros(count, width), time.perf_counter()
            for _ in range(turns):
                line.send(x_TW)
                line.fetch(1)
                line.finish_sends()
            return (time.perf_counter() - start) / turns

        timed(1, 1)
        there_and_back, whole = timed(1, turns), timed(rows, 1)
        served.result()
    return there_and_back / 2, rows * width * 4 / whole


def _weights() -> Finding:
    from quire.models.quantized import METHODS, OWN
    from quire.weights.block_panels import KINDS
    from quire.weights.floats import DTYPES
    from quire.weights.gguf_blocks import BLOCKS, FLOAT8

    return Finding(
        "weights",
        f"safetensors and GGUF files in {', '.join((*DTYPES, *(one for one in BLOCKS if one != FLOAT8)))}; on a CPU with the "
        f"C++ library, {', '.join(one for one in KINDS if one != FLOAT8)} are multiplied as they are; all others but the first "
        f"three are expanded at load; safetensors quantised by {', '.join((*sorted(METHODS), *OWN))}; of these, floats of 8 bits "
        "and of 4 (NVFP4), and integers whose scales allow it, are multiplied as they are, and all others are expanded at load",
    )


def _weights_of(outline: Outline) -> str:
    """Return the formats of a model's weights, and what those cost that no kernel multiplies."""
    from quire.build import weights_note

    form = str(outline.dtype).removeprefix("torch.")
    if outline.expanded:
        return weights_note(outline.formats, outline.expanded, form, outline.weight_bytes)
    found = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in outline.formats.items())
    return f"{found} in the file; none are expanded, but integers whose scales or zeros do not fit"


def _server() -> Finding:
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    text = f"quire serve needs {', '.join(missing)}" if missing else "quire serve has what it needs"
    return Finding("server", text, not missing, "pip install '.[server]' in Quire's folder, if you want to serve.")


def _model_cache() -> Finding:
    hub = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")) / "hub"
    count = len(list(hub.glob("models--*"))) if hub.is_dir() else 0
    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    return Finding("model cache", f"{hub}, {count} models" + (", offline (HF_HUB_OFFLINE is set)" if offline else ""))


def measured(path: Path | None = None) -> list[Finding]:
    """Measure this machine within seconds; report the limits of some models, or of the one in
    ``path``."""
    import torch

    from quire.cli.rates import SIZES, limits, measure, outline_of, weight_bytes

    outline = None if path is None else outline_of(path)
    rates = measure()
    products = ", ".join(f"{form} {rate / 1e9:.3g}" for form, rate in rates.products.items())
    findings = [
        Finding("reads", f"{rates.reads / 1e9:.1f} GB/s from memory by {torch.get_num_threads()} threads"),
        Finding("products", f"GFLOP/s by the form of the weights: {products}"),
    ]

    def speed(form: str, parameters: float, nbytes: float) -> str:
        found = limits(rates, form, parameters, nbytes)
        return f"{found.decode:.3g} and {found.prompt:.3g} in {form} ({nbytes / 2**30:.2g} GiB)"

    if outline is None:
        forms = [form for form in ("bfloat16", "int8", "int4") if form in rates.products]
        sizes = {f"{size / 1e9:g}B parameters": size for size in SIZES}
        found = {
            name: "; ".join(speed(form, size, weight_bytes(form, size)) for form in forms)
            for name, size in sizes.items()
        }
    else:
        read = outline.weight_bytes * outline.num_read / outline.num_parameters
        form = str(outline.dtype).removeprefix("torch.")
        form = form if form in rates.products else "float32"
        found = {path.name: f"{speed(form, outline.num_read, read)}, read for each token"}  # type: ignore[union-attr]
        findings.append(Finding("its weights", _weights_of(outline)))
    head = "at most so many tokens a second in a decode of one sequence and in a prompt: "
    return findings + [Finding(name, head * (not index) + text) for index, (name, text) in enumerate(found.items())]


def print_findings(findings: list[Finding]) -> None:
    """Print a table on stdout."""
    rows = [("ok", one.name, one.value, "") if one.ok else ("!!", one.name, one.value, one.advice) for one in findings]
    print_tables(folding_table("", "what", "found", "what to do", rows=rows, box=None))
