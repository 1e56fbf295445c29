"""Cost of LoRA adapters: a decode step of a batch over 1, 4, 16 adapters against none, and loading
one.

The adapters are random, of one rank, on q_proj and v_proj (PEFT's default for Llama) or on all
seven projections of a block; the rows of the batch use them in turn. Rounds are interleaved, ratios
are taken within each. The text of every row of a mixed batch is compared with that of the same
prompt alone under its adapter, and the adapters' logits with the base model's, from which they must
differ.

``python bench/adapters.py [--shape smollm2-135m] [--batch 16] [--rank 16] [--adapters 1,4,16]
[--targets qv,all] [--peer peft] [--decode 32] [--context 64] [--rounds 5]``
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.base.errors import InvalidArgument, Unsupported
from quire_bench.checkpoints import DEFAULT_DIRECTORY, SHAPES, Shape, checkpoint
from quire_bench.hardware import measure
from quire_bench.latency import synchronize
from quire_bench.reports import Spread, print_json, print_table, random_prompts

TARGETS = {
    "qv": ("self_attn.q_proj", "self_attn.v_proj"),
    "all": (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ),
}
PEERS = ("none", "peft")


def sizes(shape: Shape, target: str) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a projection."""
    width, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    name = target.rpartition(".")[2].removesuffix("_proj")
    ins = {"o": q, "down": inner}.get(name, width)
    return ins, {"q": q, "k": kv, "v": kv, "gate": inner, "up": inner}.get(name, width)


def write_adapter(directory: Path, shape: Shape, targets: Sequence[str], rank: int, seed: int) -> Path:
    """Write a random PEFT directory in bfloat16, once; return its path."""
    path = directory / f"adapter-{'-'.join(one.rpartition('.')[2][:2] for one in targets)}-{rank}-{seed}"
    if (path / "adapter_config.json").is_file():
        return path
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape.layers):
        for target in targets:
            ins, outs = sizes(shape, target)
            prefix = f"base_model.model.model.layers.{layer}.{target}"
            a = torch.randn(rank, ins, generator=generator) / ins**0.5
            b = torch.randn(outs, rank, generator=generator) * (0.04 / len(targets) / rank**0.5)
            tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"] = a.bfloat16(), b.bfloat16()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [one.rpartition(".")[2] for one in targets],
    }
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@dataclass(frozen=True, slots=True)
class Run:
    """One generation of a batch."""

    tokens: tuple[tuple[int, ...], ...]
    step_seconds: float
    """Median over the decode steps."""


def generate(llm: LLM, prompts_BS: torch.Tensor, steps: int, adapters: Sequence[str | None]) -> Run:
    """Generate ``steps`` greedy tokens for each prompt, row i under ``adapters[i]``."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    requests = [
        llm.requests.submit(llm.requests.prepare([row.tolist()], params, adapter=adapter))[0][0]
        for row, adapter in zip(prompts_BS, adapters, strict=True)
    ]
    while not all(request.output.token_ids for request in requests):
        engine.step()
    stamps = [time.perf_counter()]
    while not all(request.finished for request in requests):
        engine.step()
        synchronize(engine.runner.state.device)
        stamps.append(time.perf_counter())
    for request in requests:
        if request.output.error is not None:
            raise request.output.error
    seconds = [b - a for a, b in pairwise(stamps)]
    return Run(tuple(tuple(request.output.token_ids) for request in requests), statistics.median(seconds))


class PeftPeer:
    """transformers' generate with PEFT's mixed batches (``adapter_names``)."""

    def __init__(self, path: Path, directories: Sequence[Path], dtype: torch.dtype, device: torch.device) -> None:
        try:
            from peft import PeftModel
        except ImportError as error:
            raise Unsupported("--peer peft needs the package peft; install it, or leave the peer out") from error
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
        self._model = PeftModel.from_pretrained(base, directories[0], adapter_name="0").eval()
        for number, directory in enumerate(directories[1:], start=1):
            self._model.load_adapter(directory, adapter_name=str(number))
        self._device = device

    def step_seconds(self, prompts_BS: torch.Tensor, steps: int, adapters: int) -> float:
        """Return the seconds of a decode step: of ``steps`` tokens less those of one, over the
        difference."""
        names = [str(row % adapters) if adapters else "__base__" for row in range(len(prompts_BS))]
        taken = []
        for count in (1, steps):
            started = time.perf_counter()
            with torch.inference_mode():
                self._model.generate(
                    input_ids=prompts_BS.to(self._device),
                    attention_mask=torch.ones_like(prompts_BS, device=self._device),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    adapter_names=names,
                )
            synchronize(self._device)
            taken.append(time.perf_counter() - started)
        return (taken[1] - taken[0]) / (steps - 1)


def decode_rows(
    llm: LLM,
    names: Sequence[str],
    counts: Sequence[int],
    prompts_BS: torch.Tensor,
    steps: int,
    rounds: int,
    peer: PeftPeer | None,
) -> list[dict[str, Any]]:
    """Return a row for each number of adapters: step seconds over those without, of the same
    round."""
    batch = len(prompts_BS)
    chosen = {count: [names[row % count] if count else None for row in range(batch)] for count in (0, *counts)}
    generate(llm, prompts_BS, steps, chosen[0])
    seconds: dict[int, list[float]] = {count: [] for count in chosen}
    peers: dict[int, list[float]] = {count: [] for count in chosen}
    last: dict[int, Run] = {}
    for _ in range(rounds):
        for count, adapters in chosen.items():
            last[count] = generate(llm, prompts_BS, steps, adapters)
            seconds[count].append(last[count].step_seconds)
            if peer is not None:
                peers[count].append(peer.step_seconds(prompts_BS, steps, count))
    rows = []
    for count in counts:
        alone = [
            generate(llm, prompts_BS[row : row + 1], steps, chosen[count][row : row + 1]).tokens[0]
            for row in range(batch)
        ]
        ratio = Spread.of([one / base for one, base in zip(seconds[count], seconds[0], strict=True)])
        row = {
            "adapters": count,
            "step ms": 1e3 * statistics.median(seconds[count]),
            "base ms": 1e3 * statistics.median(seconds[0]),
            "over base": ratio,
            "rows as alone": f"{sum(a == b for a, b in zip(alone, last[count].tokens, strict=True))}/{batch}",
        }
        if peer is not None:
            row["peft over its base"] = Spread.of([a / b for a, b in zip(peers[count], peers[0], strict=True)])
            row["peft over quire"] = Spread.of([a / b for a, b in zip(peers[count], seconds[count], strict=True)])
        rows.append(row)
    return rows


def load_row(llm: LLM, directory: Path, rounds: int) -> dict[str, Any]:
    """Return the seconds of loading an adapter, and of reading its bytes: medians, and their
    difference."""
    loads, reads = [], []
    for number in range(rounds + 1):
        started = time.perf_counter()
        (directory / "adapter_model.safetensors").read_bytes()
        read = time.perf_counter() - started
        started = time.perf_counter()
        llm.load_adapter("timed", directory)
        load = time.perf_counter() - started
        llm.unload_adapter("timed")
        if number:  # the first finds cold caches
            loads.append(load)
            reads.append(read)
    return {
        "bytes": (directory / "adapter_model.safetensors").stat().st_size,
        "load ms": 1e3 * statistics.median(loads),
        "read ms": 1e3 * statistics.median(reads),
        "load less reading ms": 1e3 * statistics.median(a - b for a, b in zip(loads, reads, strict=True)),
    }


def is_live(llm: LLM, name: str, prompt: list[int]) -> float:
    """Return the largest difference of logits under an adapter from the base model's."""
    found = []
    for adapter in (None, name):
        with llm.session(prompt, adapter=adapter) as session:
            found.append(session.logits())
    return float((found[0] - found[1]).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shape", default="smollm2-135m", choices=sorted(SHAPES))
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY, help="where checkpoints and adapters are kept")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", default="1,4,16", help="numbers of adapters in the batch")
    parser.add_argument("--targets", default="qv,all", help="qv, all, or both")
    parser.add_argument("--context", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--decode", type=int, default=32, help="tokens that are generated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-memory", default="1GiB")
    parser.add_argument("--peer", default="none", choices=PEERS)
    given = parser.parse_args()
    counts = [int(one) for one in given.adapters.split(",")]
    if min(counts) < 1 or max(counts) > given.batch or given.decode < 2 or given.rounds < 1:
        raise SystemExit("adapters must be in 1..batch, decode at least 2, rounds at least 1")
    if unknown := set(given.targets.split(",")) - set(TARGETS):
        raise SystemExit(f"unknown targets {sorted(unknown)}; known are {', '.join(TARGETS)}")
    directory = given.dir.expanduser()
    shape, path = SHAPES[given.shape], checkpoint(given.shape, directory=directory)
    found: dict[str, Any] = {"bench": "adapters", "shape": given.shape, "batch": given.batch, "rank": given.rank}
    for kind in given.targets.split(","):
        made = [
            write_adapter(directory / given.shape, shape, TARGETS[kind], given.rank, seed)
            for seed in range(max(counts))
        ]
        options = {"device": given.device, "dtype": given.dtype, "kv_cache_memory": given.kv_cache_memory}
        with LLM(path, enable_prefix_caching=False, adapter_ranks=max(512, given.rank * max(counts)), **options) as llm:
            found["hardware"] = found.get("hardware") or measure(device=llm.model.device.type, seconds=4.0)
            names = [f"adapter-{number}" for number in range(len(made))]
            for name, where in zip(names, made, strict=True):
                llm.load_adapter(name, where)
            prompts_BS = random_prompts(given.batch, given.context, llm.model.vocab_size, seed=1)
            difference = is_live(llm, names[0], prompts_BS[0].tolist())
            if not difference:
                raise InvalidArgument("the adapter changes no logit; nothing would be measured")
            peer = None
            if given.peer == "peft":
                peer = PeftPeer(path, made, llm.model.dtype, llm.model.device)
            rows = decode_rows(llm, names, counts, prompts_BS, given.decode, given.rounds, peer)
            loading = load_row(llm, made[0], given.rounds)
            print(
                f"\n{given.shape}, batch {given.batch}, rank {given.rank} on {', '.join(TARGETS[kind])}: "
                f"{llm.adapters[names[0]].num_bytes / 2**20:.2f} MiB an adapter; logits differ from the base by up to {difference:.2g}"
            )
            print_table(rows)
            print_table([loading])
            found[kind] = {"decode": rows, "loading": loading, "logits_differ_by": difference}
    print_json(found)


if __name__ == "__main__":
    main()
