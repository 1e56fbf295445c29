"""Prefill and decode speed of one model, interleaved with a peer, as a share of the peak.

Times are medians of rounds. On a shared machine only ratios of interleaved rounds are meaningful.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.base.errors import InvalidArgument, Unsupported
from quire.base.sampling_params import SamplingParams
from quire.contracts.layers import FullAttention, LatentAttention
from quire.llm import LLM
from quire.models.catalogue import resolve_model
from quire_bench.hardware import Hardware, measure
from quire_bench.reports import interleave, print_json, print_table, random_prompts

PEERS = ("none", "transformers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One generation: new tokens of each sequence, seconds to the first and per later step."""

    tokens: tuple[tuple[int, ...], ...]
    prefill_seconds: float
    decode_seconds: tuple[float, ...]


class Subject(Protocol):
    """A model that generates greedily."""

    def generate(self, prompts_BS: Tensor, steps: int) -> Run: ...


class QuireSubject:
    """The engine of an ``LLM``, without its prefix cache."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def generate(self, prompts_BS: Tensor, steps: int) -> Run:
        """Generate ``steps`` greedy tokens for each prompt, and time every engine step."""
        engine = self.llm.engine
        params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
        synchronize(engine.runner.state.device)
        started = time.perf_counter()
        requests = [engine.submit(row.numpy(), params)[0] for row in prompts_BS]
        stamps: list[float] = []
        while not all(request.finished for request in requests):
            engine.step()
            synchronize(engine.runner.state.device)
            if all(request.output.token_ids for request in requests):
                stamps.append(time.perf_counter())
        for request in requests:
            if request.output.error is not None:
                raise request.output.error
        return Run(
            tokens=tuple(tuple(request.output.token_ids) for request in requests),
            prefill_seconds=stamps[0] - started,
            decode_seconds=tuple(b - a for a, b in pairwise(stamps)),
        )


class PeerSubject:
    """``transformers``' generate."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        from quire_bench.peers import TransformersPeer

        self._peer = TransformersPeer(path, dtype, device=str(device))

    def generate(self, prompts_BS: Tensor, steps: int) -> Run:
        done = self._peer.generate(prompts_BS, steps)
        return Run(tokens=done.tokens, prefill_seconds=done.prefill_seconds, decode_seconds=done.decode_seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_latency(
    model: str,
    *,
    engine_options: Mapping[str, Any],
    batches: Sequence[int],
    prompts: Sequence[int],
    decode: int,
    context: int,
    rounds: int,
    peer: str = "none",
    hardware: Hardware | None = None,
) -> dict[str, Any]:
    """Measure, print a table and one JSON line, and return the line's content.

    Raise ``InvalidArgument`` for counts below 1, and ``Unsupported`` if the peer is not installed.
    """
    check(decode=decode, context=context, rounds=rounds, peer=peer)
    llm = LLM(model, **{"enable_prefix_caching": False, "max_num_batched_tokens": 4096, **engine_options})
    loaded = llm.model
    subjects: dict[str, Subject] = {"quire": QuireSubject(llm)}
    if peer == "transformers":
        subjects["transformers"] = PeerSubject(resolve_model(model), loaded.dtype, loaded.device)
    found = hardware or measure(device=loaded.device.type, seconds=8.0)
    dtype = str(loaded.dtype).removeprefix("torch.")
    peak = found["peak_tflops"].get(dtype, 0.0)
    rows: list[dict[str, Any]] = []
    vocab = loaded.vocab_size
    for length in prompts:
        given = random_prompts(1, length, vocab, seed=length)
        cell = compare(subjects, given, 1, rounds, lambda run: run.prefill_seconds)
        tflops = prefill_flops(llm, length) / cell.seconds / 1e12
        rows.append(
            {"cell": f"prefill {length}", "quire": f"{length / cell.seconds:.0f} tok/s", "ms": cell.seconds * 1e3}
            | {"of possible": f"{tflops / peak:.0%} of {peak:.2f} TFLOP/s" if peak else "", **cell.columns()}
        )
    for batch in batches:
        given = random_prompts(batch, context, vocab, seed=batch)
        cell = compare(subjects, given, decode, rounds, lambda run: statistics.median(run.decode_seconds))
        gbps = decode_bytes(llm, batch, context + decode // 2) / cell.seconds / 1e9
        possible = {"of possible": f"{gbps / found['read_gbps']:.0%} of {found['read_gbps']:.1f} GB/s"}
        if loaded.device.type == "cuda":
            possible["of copy"] = f"{gbps / found['copy_gbps']:.0%}"
        rows.append(
            {"cell": f"decode batch {batch}", "quire": f"{batch / cell.seconds:.1f} tok/s", "ms": cell.seconds * 1e3}
            | {**possible, **cell.columns()}
        )
    print(f"{model}: {loaded.architecture}, {loaded.num_parameters / 1e6:.0f}M parameters, {dtype} on {loaded.device}")
    print_table(rows)
    result = {"benchmark": "latency", "model": model, "dtype": dtype, "context": context, "decode": decode}
    result |= {"rounds": rounds, "rows": rows, "hardware": found}
    print_json(result)
    llm.close()
    del subjects, llm, loaded
    gc.collect()
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Median seconds of Quire; the peer's time over Quire's; number of equal tokens."""

    seconds: float
    ratio: tuple[float, float, float] | None
    equal: str

    def columns(self) -> dict[str, Any]:
        if self.ratio is None:
            return {}
        median, least, most = self.ratio
        return {"peer / quire": f"{median:.2f} ({least:.2f} to {most:.2f})", "equal tokens": self.equal}


def compare(
    subjects: Mapping[str, Subject], prompts_BS: Tensor, steps: int, rounds: int, pick: Callable[[Run], float]
) -> Cell:
    """Run the subjects in turn."""
    last: dict[str, Run] = {}

    def timed(name: str, subject: Subject) -> Callable[[], float]:
        def call() -> float:
            last[name] = subject.generate(prompts_BS, steps)
            return pick(last[name])

        return call

    result = interleave({name: timed(name, subject) for name, subject in subjects.items()}, rounds)
    seconds = result.spread("quire").median
    if "transformers" not in result.ratios:
        return Cell(seconds=seconds, ratio=None, equal="")
    ratio = result.ratios["transformers"]
    ours, theirs = ([token for row in last[name].tokens for token in row] for name in ("quire", "transformers"))
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    return Cell(seconds=seconds, ratio=(ratio.median, ratio.least, ratio.most), equal=f"{same}/{len(ours)}")


def matrix_parameters(llm: LLM) -> int:
    """Return the number of parameters that multiply every token: all but the embedding and the
    head."""
    model = llm.model
    return model.num_parameters - model.vocab_size * model.hidden_size * (1 if model.tied else 2)


def decode_bytes(llm: LLM, batch: int, length: int) -> int:
    """Return the bytes read by a decode step: matrices and head once, each sequence's K and V."""
    model = llm.model
    weights = (matrix_parameters(llm) + model.vocab_size * model.hidden_size) * model.dtype.itemsize
    return int(weights + batch * length * llm.bytes_per_token)


def prefill_flops(llm: LLM, length: int) -> float:
    """Return a prompt's operations: matrices, attention to half of the square, one row's head."""
    model = llm.model
    attention = sum(
        2 * spec.num_heads * (spec.head_dim + spec.value_dim) * length * length / 2
        for spec in model.layer_specs
        if isinstance(spec, FullAttention | LatentAttention)
    )
    return 2.0 * matrix_parameters(llm) * length + attention + 2.0 * model.vocab_size * model.hidden_size


def check(*, decode: int, context: int, rounds: int, peer: str) -> None:
    """Raise ``InvalidArgument`` or ``Unsupported`` for impossible measurements."""
    for name, value, least in (("decode", decode, 2), ("context", context, 1), ("rounds", rounds, 1)):
        if value < least:
            raise InvalidArgument(f"{name} {value}; at least {least} is needed")
    if peer not in PEERS:
        raise InvalidArgument(f"peer {peer!r}; one of {', '.join(PEERS)} is accepted")
    if peer == "transformers":
        try:
            import transformers  # noqa: F401
        except ImportError as error:
            raise Unsupported("peer 'transformers' is not installed; pip install transformers") from error
