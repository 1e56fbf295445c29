"""Quire on one CUDA device, against the device's limits and beside transformers: ``make
gpu-bench``.

The device's limits come first, measured in the same run: a copy (bytes read and written) and the
product of two bfloat16 matrices of 8,192 x 8,192. Then, one table and one JSON line for each part:

* ``attention``: decodes, prompts and latent decodes of models' shapes, by the Triton kernels, as
  shares of these limits, by FlashInfer if it is installed, and by PyTorch's operations;
  ``--tune`` tries other sizes of programs;
* ``recurrence``: the same of recurrent layers and their convolutions;
* ``latency``: decodes of batch 1 and 64 after 1,024 tokens, prompts of 8,192, of models' shapes;
* ``contexts``: decodes of batch 64 after 8,192 tokens, or of as many sequences as fit;
* ``peers``: ``latency``, and 256 requests of 100 to 1,024 tokens in and out, each in turn with
  transformers, with half of the memory;
* ``throughput``: these requests with all of the memory;
* ``hybrid``: ``latency`` of Qwen3-Next's shape with few layers, in turn with transformers;
* ``captured``: decodes of batch 1, 8 and 64, captured and launched one by one: the time of a step,
  and the share of it in which the device is busy;
* ``float8``: products with 8-bit weights beside bfloat16, ``experts``: of stacks of experts;
  ``quantized``: ``latency`` with them;
* ``copies``: copies of pages inside the pool; ``draws``: tokens of rows with a temperature.

Weights are random and made on the device. Nothing is downloaded. Each part, of each model, has a
process of its own: a part that fails, or leaves the device unusable, does not prevent the others.
The last lines name the failed parts.

``python bench/gpu.py [--parts attention,latency,copies] [--models qwen3-0.6b] [--tune]``; with
``--device cpu --models quick`` it tries the parts of models without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from gpu_pieces import copies, draws, expert_products, float8_products
from gpu_recurrence import recurrences
from quire import LLM, SamplingParams
from quire.contracts.attention import AttentionBackend, ForwardPlan, Scoring
from quire.contracts.kv_format import PlainRows
from quire.kernels.attention import triton_attention
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kernels.attention.triton_attention import Settings, TritonAttention
from quire.kernels.linear.float8 import Float8Linear, float8_problem
from quire.kernels.triton_support import triton_problem
from quire_bench.checkpoints import DEFAULT_DIRECTORY
from quire_bench.hardware import Hardware, free_bytes
from quire_bench.latency import run_latency, synchronize
from quire_bench.reports import print_json, print_table
from quire_bench.throughput import run_throughput

PIECES = {
    "recurrence": recurrences,
    "float8": float8_products,
    "experts": expert_products,
    "copies": copies,
    "draws": draws,
}
OF_MODELS = ("latency", "contexts", "captured", "throughput", "peers", "quantized")
PARTS = ("attention", *OF_MODELS, "hybrid", *PIECES)
PAGE_SIZE = 16
SHARD_BYTES = 4 << 30
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "llama-3-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 16_384,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "tie_word_embeddings": False,
    },
    "qwen3-next-4-layers": {
        "model_type": "qwen3_next",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 40_960,
    },
    "quick": {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
}
"""``config.json`` of each shape; missing fields have transformers' defaults."""


# -- checkpoints -----------------------------------------------------------------------------------


def drawn_checkpoint(name: str, directory: Path, device: torch.device) -> Path:
    """Return the directory of a shape's checkpoint with random weights; write it if it is missing.
    Values are drawn on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = directory.expanduser() / f"gpu-{name}"
    if (path / "config.json").is_file():
        return path
    path.mkdir(parents=True, exist_ok=True)
    values = dict(MODELS[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values, eos_token_id=0, bos_token_id=0, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    generator = torch.Generator(device).manual_seed(0)
    index: dict[str, str] = {}
    for number, names in enumerate(_shards(shapes)):
        file = f"model-{number:05d}.safetensors"
        tensors = {one: _drawn(one, shapes[one], generator).cpu() for one in names}
        save_file(tensors, path / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    total = sum(2 * shape.numel() for shape in shapes.values())
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(path)
    return path


def _shards(shapes: Mapping[str, torch.Size]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        if names and size + 2 * shape.numel() > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += 2 * shape.numel()
    yield names


def _drawn(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return values that keep activations finite: norms near 1, others small."""
    values = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32).mul_(0.02)
    return (values + 1 if name.endswith("norm.weight") else values).to(torch.bfloat16)


# -- attention -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attended:
    """Attention of one layer over ``batch`` sequences of ``keys`` tokens, ``count`` of them new."""

    name: str
    batch: int
    count: int
    keys: int
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    latent: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of K and V, each once."""
        width = self.key_size + (0 if self.latent else self.value_size)
        return 2 * self.batch * self.keys * self.kv_heads * width

    @property
    def operations(self) -> float:
        """Multiplications and additions for visible keys."""
        pairs = self.batch * self.count * (self.keys - (self.count - 1) / 2)
        return 2 * pairs * self.heads * (self.key_size + self.value_size)

    def plan(self, device: torch.device) -> ForwardPlan:
        """Return the plan over pages in any order."""
        width = -(-self.keys // PAGE_SIZE)
        pages = np.random.default_rng(0).permutation(self.batch * width).astype(np.int32).reshape(self.batch, width)
        return ForwardPlan(
            page_size=PAGE_SIZE,
            counts=np.full(self.batch, self.count),
            keys=np.full(self.batch, self.keys),
            origins=np.zeros(self.batch, dtype=np.int64),
            starts=np.arange(self.batch + 1) * self.count,
            tables=tuple(pages),
            positions=np.tile(np.arange(self.keys - self.count, self.keys), self.batch),
            rules=(None,) * self.batch,
            device=device,
        )


CASES = (
    Attended("decode 64 x 8,192", 64, 1, 8192, 32, 8, 128, 128),
    Attended("decode 64 x 1,024", 64, 1, 1024, 32, 8, 128, 128),
    Attended("decode 1 x 8,192", 1, 1, 8192, 32, 8, 128, 128),
    Attended("verify 16 x 8 of 4,096", 16, 8, 4096, 32, 8, 128, 128),
    Attended("prompt of 8,192", 1, 8192, 8192, 32, 8, 128, 128),
    Attended("chunk of 2,048 behind 6,144", 1, 2048, 8192, 32, 8, 128, 128),
    Attended("prompt of 8,192, heads of 64", 1, 8192, 8192, 32, 8, 64, 64),
    Attended("latent decode 64 x 8,192, 16 heads", 64, 1, 8192, 16, 1, 576, 512, latent=True),
    Attended("latent decode 64 x 8,192, 128 heads", 64, 1, 8192, 128, 1, 576, 512, latent=True),
)


def call_of(case: Attended, backend: AttentionBackend, device: torch.device) -> Callable[[], object]:
    """Return the call of one layer. Layers take turns, so that no cache holds a call's data."""
    dtype, slots = torch.bfloat16, case.batch * -(-case.keys // PAGE_SIZE) * PAGE_SIZE
    number = max(1, min(8, (256 << 20) // case.bytes + 1))
    layers = []
    for _ in range(number):
        k = torch.randn(slots, case.kv_heads, case.key_size, dtype=dtype, device=device)
        v = k[..., : case.value_size]
        if not case.latent:
            v = torch.randn(slots, case.kv_heads, case.value_size, dtype=dtype, device=device)
        layers.append((k, v))
    tokens, fresh = case.batch * case.count, None
    q = torch.randn(tokens, case.heads, case.key_size, dtype=dtype, device=device)
    if case.count > 1:
        fresh = (
            torch.randn(tokens, case.kv_heads, case.key_size, dtype=dtype, device=device),
            torch.randn(tokens, case.kv_heads, case.value_size, dtype=dtype, device=device),
        )
    prepared, scoring, turns = backend.plan(case.plan(device), dtype), Scoring(0.1), itertools.cycle(layers)

    def call() -> object:
        return backend.run(prepared, q, fresh, PlainRows(*next(turns)), scoring)

    return call


failures: list[str] = []
"""Names of the failed measurements."""


def seconds_of(call: Callable[[], object], rounds: int) -> float:
    """Return the median time on the device of a call; NaN, and an entry of ``failures``, if it
    fails."""
    try:
        return _seconds_of(call, rounds)
    except Exception as error:
        failures.append(f"{type(error).__name__}: {error}")
        return math.nan


def _seconds_of(call: Callable[[], object], rounds: int) -> float:
    for _ in range(3):
        call()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for begin, end in pairs:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


class Deferred:
    """``call_of``, made at the first call, because it takes memory."""

    def __init__(self, *given: Any) -> None:
        self._given, self._call = given, None

    def __call__(self) -> object:
        self._call = call_of(*self._given) if self._call is None else self._call
        return self._call()


def attention(device: torch.device, found: Hardware, rounds: int, chosen: str, tune: bool) -> dict[str, Any]:
    """Measure attention of one layer, of cases whose names contain ``chosen``; print a table."""
    rows: list[dict[str, object]] = []
    copy, peak = found["copy_gbps"] * 1e9, found["peak_tflops"]["bfloat16"] * 1e12
    with torch.inference_mode():
        for case in (one for one in CASES if chosen in one.name):
            taken = seconds_of(Deferred(case, TritonAttention(), device), rounds)
            row: dict[str, object] = {"attention": case.name, "triton us": taken * 1e6} | _shares(
                case, taken, copy, peak
            )
            row["torch us"] = seconds_of(Deferred(case, SdpaAttention(), device), max(3, rounds // 4)) * 1e6
            if tune:
                row |= tuned(case, device, rounds)
            rows.append(row)
            torch.cuda.empty_cache()
    print_table(rows)
    return {"attention": rows}


def _shares(case: Attended, seconds: float, copy: float, peak: float) -> dict[str, object]:
    """Return the shares of both limits; the larger one is the kernel's efficiency."""
    return {"of copy": f"{case.bytes / seconds / copy:.0%}", "of GEMM": f"{case.operations / seconds / peak:.0%}"}


def tuned(case: Attended, device: torch.device, rounds: int) -> dict[str, object]:
    """Return the fastest size of programs for a case, their number, and the time."""
    usual, programs = triton_attention.settings, dict(triton_attention.PROGRAMS)
    times: dict[tuple[Settings, int], float] = {}

    def measured(made: Settings, wanted: int) -> None:
        triton_attention.settings = lambda *_: made
        triton_attention.PROGRAMS.update(dict.fromkeys(programs, wanted))
        try:
            times[made, wanted] = _seconds_of(call_of(case, TritonAttention(), device), max(5, rounds // 4))
        except Exception as error:
            # Shared memory or registers do not suffice, or the compiler gives up.
            print(f"{case.name}, {made}: {type(error).__name__}: {error}", file=sys.stderr)

    try:
        for sizes in itertools.product((32, 64, 128), (4, 8), (2, 3, 5)):
            measured(Settings(*sizes), programs[case.count == 1])
        best, _ = min(times, key=times.__getitem__)
        for wanted in (1, 2, 4, 8, 16):
            measured(best, wanted)
    finally:
        triton_attention.settings = usual
        triton_attention.PROGRAMS.update(programs)
    best, wanted = min(times, key=times.__getitem__)
    by = f"{best.keys} keys, {best.warps} warps, {best.stages} stages, {wanted} programs"
    return {"best us": times[best, wanted] * 1e6, "by": by}


# -- models ----------------------------------------------------------------------------------------


def of_model(part: str, name: str, arguments: argparse.Namespace, found: Hardware) -> None:
    """Measure a part of a whole model; print its tables and lines."""
    device, longest = torch.device(arguments.device), MODELS[name]["max_position_embeddings"] - 256
    longest = min(8192, longest)
    path = str(drawn_checkpoint(name, arguments.dir, device))
    options: dict[str, Any] = {
        "device": arguments.device, "max_num_batched_tokens": longest, "max_model_len": longest + 256
    }  # fmt: skip
    common = {"rounds": arguments.rounds, "hardware": found}
    sizes = {"batches": [1, 64], "prompts": [longest], "context": min(1024, longest), "decode": 32, **common}
    requests = {"requests": arguments.requests, "scale": min(1.0, longest / 2048), **common}
    half = {**options, "gpu_memory_utilization": 0.5}
    if part == "latency":
        run_latency(path, engine_options=options, **sizes)
    elif part == "quantized":
        run_latency(path, engine_options={**options, "quantization": "fp8"}, **sizes)
    elif part == "contexts":
        batch = fitting(name, longest + 32, device)
        run_latency(path, engine_options=options, **{**sizes, "batches": [batch], "prompts": [], "context": longest})
    elif part == "throughput":
        run_throughput(path, engine_options={**options, "max_num_seqs": 256}, **requests)
    elif part == "captured":
        print_json({"benchmark": "gpu", "hardware": found, **captured(path, name, arguments)})
    else:
        peer = {"peer": arguments.peer}
        run_latency(path, engine_options=half, **sizes, **peer)
        if part == "peers":
            half["max_num_seqs"] = 256
            run_throughput(path, engine_options=half, peer_batches=[64, 128, 256], **requests, **peer)


def captured(path: str, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure decodes through the engine: by captured steps that run ahead of their tokens, by
    captured ones that wait for them, and by neither. Print a table."""
    rows: list[dict[str, object]] = []
    options = {"device": arguments.device, "max_model_len": min(2048, MODELS[name]["max_position_embeddings"])}
    for eager, ahead in ((False, True), (False, False), (True, False)):
        given = {**options, "enforce_eager": eager, "async_scheduling": ahead}
        with LLM(path, **given, enable_prefix_caching=False) as llm:
            for batch in (1, 8, 64):
                taken, busy = decoded(llm, batch, 40 * arguments.rounds)
                row: dict[str, object] = {"model": name, "batch": batch, "captured": not eager, "ahead": ahead}
                rows.append({**row, "step us": taken, "busy": f"{busy:.0%}"})
    print_table(rows)
    return {"captured": rows}


def decoded(llm: LLM, batch: int, steps: int) -> tuple[float, float]:
    """Return the microseconds of an engine's step with ``batch`` decodes, and the device's busy
    share (0 on a CPU)."""
    engine, device = llm.engine, llm.model.device
    length = min(512, engine.max_model_len // 4)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=min(2 * steps + 40, engine.max_model_len // 2))
    prompts = [np.full(length, 5 + number) for number in range(batch)]
    requests = [one for prompt in prompts for one in engine.submit(prompt, params)]
    while not all(request.output.token_ids for request in requests):
        engine.step()
    # Skip the first step of a size (it compiles) and the second (it is captured).
    for _ in range(4):
        engine.step()
    steps = min(steps, params.max_tokens - max(len(request.output.token_ids) for request in requests) - 24)
    synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    synchronize(device)
    taken = (time.perf_counter() - began) / steps
    kind = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        for _ in range(20):
            engine.step()
        synchronize(device)
    computed = sum(event.self_device_time_total for event in profile.key_averages()) / 20
    assert not any(request.finished for request in requests)
    engine.end(requests)
    return taken * 1e6, computed / (taken * 1e6)


def fitting(name: str, length: int, device: torch.device) -> int:
    """Return the number of sequences of a shape that fit into the pool beside its weights, at most
    64."""
    shape = MODELS[name]
    row = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    heads = shape["num_attention_heads"] + shape["num_key_value_heads"]
    block = width * (2 * heads * shape["head_dim"] + 3 * inner)
    weights = 2 * (shape["num_hidden_layers"] * block + 2 * shape["vocab_size"] * width)
    total = free_bytes(device)
    return max(1, min(64, int(0.85 * total - weights) // (row * length)))


def measured(part: str, name: str, arguments: argparse.Namespace, found: Hardware) -> None:
    """Measure one part, of one model if the part is of models, in this process."""
    device, facts = torch.device(arguments.device), {"benchmark": "gpu", "hardware": found}
    copy, peak = found["copy_gbps"] * 1e9, found["peak_tflops"]["bfloat16"] * 1e12
    if part == "attention":
        print_json({**facts, **attention(device, found, 10 * arguments.rounds, arguments.case, arguments.tune)})
    elif part in PIECES:
        rows = PIECES[part](device, copy, peak, 10 * arguments.rounds, seconds_of)
        print_table(rows)
        print_json({**facts, part: rows})
    else:
        of_model(part, "qwen3-next-4-layers" if part == "hybrid" else name, arguments, found)


def refusal(part: str, device: torch.device) -> str:
    """Return the reason why a part cannot be measured on a device; "" if it can."""
    if part in ("float8", "quantized"):
        return float8_problem(device)
    if part == "experts":
        return float8_problem(device) or Float8Linear().stack_refusal(
            torch.empty(1, 16, 16, dtype=torch.bfloat16, device=device), "fp8"
        )
    return "" if part in OF_MODELS else triton_problem(device)


def main() -> int:
    """Measure and print; return 1 if a part failed, 2 without a device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--models", default="qwen3-0.6b,llama-3-8b", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=3, help="of whole models; attention takes ten times as many")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--peer", default="transformers", choices=("none", "transformers"))
    parser.add_argument("--case", default="", help="only attention whose name holds this, as 'decode 64'")
    parser.add_argument("--tune", action="store_true", help="try other sizes of attention's programs")
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=10.0, help="for the device's limits")
    parser.add_argument("--limits", type=Path, help="a file of the device's limits: measure one part, here")
    arguments = parser.parse_args()
    parts, names = arguments.parts.split(","), arguments.models.split(",")
    if unknown := [*({*parts} - {*PARTS}), *({*names} - {*MODELS})]:
        parser.error(f"{', '.join(sorted(unknown))}: parts are {', '.join(PARTS)}; models are {', '.join(MODELS)}")
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device; gpu.py measures on one only.", file=sys.stderr)
        return 2
    if arguments.limits is not None:
        measured(parts[0], names[0], arguments, json.loads(arguments.limits.read_text(encoding="utf-8")))
        print(*(f"failed: {failure}" for failure in failures), sep="\n", file=sys.stderr)
        return int(bool(failures))
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        limits = Path(directory) / "limits.json"
        limits.write_text(json.dumps(limits_of(arguments)), encoding="utf-8")
        for part in parts:
            if problem := refusal(part, device):
                print(f"{problem[0].upper()}{problem[1:]}: the part {part} is left out.", file=sys.stderr, flush=True)
                continue
            for name in names if part in OF_MODELS else [""]:
                print(f"\n== {part} {name}", flush=True)
                own = ["--parts", part, "--limits", str(limits), *(["--models", name] if name else [])]
                if subprocess.run([sys.executable, __file__, *sys.argv[1:], *own], check=False).returncode:
                    failed.append(f"{part} {name}".strip())
    for one in failed:
        print(f"failed: {one}")
    return int(bool(failed))


def limits_of(arguments: argparse.Namespace) -> Hardware:
    """Return the device's limits, measured in another process, which frees its memory at its
    end."""
    code = "import json, sys; from quire_bench.hardware import measure; "
    code += "print(json.dumps(measure(device=sys.argv[1], seconds=float(sys.argv[2]))))"
    command = [sys.executable, "-c", code, arguments.device, str(arguments.seconds)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: Hardware = json.loads(said.splitlines()[-1])
    rates = {"copy GB/s": found["copy_gbps"], "bfloat16 TFLOP/s": found["peak_tflops"]["bfloat16"]}
    print_table([{"device": found["device"], **rates}])
    return found


if __name__ == "__main__":
    sys.exit(main())
