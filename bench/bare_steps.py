"""Cost of a decode step around its model: whole steps, and steps of a model that does nothing.

*Bare*: the model returns at once, so the rest is the scheduler, pages, the attention plan, sampling
and text. *Cold*: the same, but the model reads more memory than caches hold before it returns, as a
model reads its weights; the time for that is subtracted. *Scheduler and plan*: their share of whole
steps, by clocks around methods (``bench/overheads.py``). Kinds of steps are timed in turn.

``python bench/bare_steps.py [--shape smollm2-135m] [--batches 1,4,16] [--quantization int4]``
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from overheads import PLAN_TARGET, TOGETHER, shares, step_seconds
from quire import LLM, SamplingParams
from quire.base.errors import QuireError, Unsupported
from quire.contracts.block_calls import RowLogits
from quire.sampling.logit_edits import first_maxima
from quire_bench.checkpoints import DEFAULT_DIRECTORY, SHAPES, checkpoint, text_tokenizer
from quire_bench.reports import interleave, print_json, print_table, random_prompts

READ = 64 << 20
"""Bytes whose reading flushes the caches."""


class Bare:
    """Makes a model return at once, within a ``with``."""

    def __init__(self, model: Any, batch: int, read: int) -> None:
        """``read``: bytes to read before returning. ``Unsupported``: the model is no single
        call."""
        if model.stack is None or batch > model.stack.call.most_tokens:
            raise Unsupported(
                f"{batch} tokens of this model are no single call on this machine, which ``quire doctor`` explains"
            )
        self._model, self._stack = model, model.stack
        self._logits_RV = torch.randn(batch, model.vocab_size)
        self._first = first_maxima(self._logits_RV)
        self._memory = torch.ones(read // 8, dtype=torch.int64)
        self.reading = 0.0
        """Seconds of the reading."""

    def __enter__(self) -> Self:
        self._model.stack = self
        return self

    def __exit__(self, *_: object) -> None:
        self._model.stack = self._stack

    def run_model(self, model: Any, tokens: Any, pass_: Any) -> RowLogits:
        """Replaces the model, after planning its attention."""
        if pass_.stack_parts(self._stack.layers, model.dtype) is None:
            raise QuireError(f"a step of {len(model.blocks)} blocks that are no single call")
        self._read()
        return RowLogits(self._logits_RV[: len(tokens)].clone(), self._first[: len(tokens)])

    def _read(self) -> None:
        if self._memory.numel():
            started = time.perf_counter()
            self._memory.sum()
            self.reading += time.perf_counter() - started


def bare_seconds(llm: LLM, prompts: Sequence[Any], params: SamplingParams, read: int) -> float:
    """Return the median seconds of a step without its model."""
    engine = llm.engine
    requests = [engine.submit(prompt, params)[0] for prompt in prompts]
    while not all(request.output.token_ids for request in requests):
        engine.step()
    ends: list[float] = []
    with Bare(llm.model, len(prompts), read) as bare:
        engine.run(requests, lambda: ends.append(time.perf_counter() - bare.reading))
    for request in requests:
        if request.output.error is not None:
            raise request.output.error
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))


def whole_seconds(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> float:
    """Return the median seconds of a step."""
    return statistics.median(step_seconds(llm, prompts, params))


def measured(llm: LLM, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure steps of one batch."""
    prompts = [row.numpy() for row in random_prompts(batch, arguments.context, llm.model.vocab_size)]
    params = SamplingParams(temperature=0, max_tokens=arguments.decode, ignore_eos=True)
    functions: dict[str, Callable[[], float]] = {
        "step": partial(whole_seconds, llm, prompts, params),
        "bare": partial(bare_seconds, llm, prompts, params, 0),
        "cold": partial(bare_seconds, llm, prompts, params, READ),
    }
    compared = interleave(functions, arguments.rounds)
    parts = shares(llm, prompts, params, arguments.rounds)
    return {"batch": batch, "parts": parts} | {name: compared.spread(name) for name in functions}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table and the JSON line; return the line's content."""
    llm = LLM(
        str(checkpoint(arguments.shape, directory=arguments.dir)),
        tokenizer=str(text_tokenizer(SHAPES[arguments.shape].vocab_size, directory=arguments.dir)),
        device=arguments.device,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        kv_cache_memory=arguments.kv_cache_memory,
        enable_prefix_caching=False,
    )
    rows = [measured(llm, batch, arguments) for batch in arguments.batches]
    print_table([line_of(row) for row in rows])
    result = {
        "benchmark": "bare_steps",
        "shape": arguments.shape,
        "dtype": arguments.dtype,
        "quantization": arguments.quantization,
        "context": arguments.context,
        "decode": arguments.decode,
        "rows": rows,
        "target": PLAN_TARGET,
    }
    print_json(result)
    return result


def line_of(row: dict[str, Any]) -> dict[str, Any]:
    both = row["parts"][TOGETHER]
    return {
        "batch": row["batch"],
        "step, ms": row["step"].median * 1e3,
        "bare, µs": round(row["bare"].median * 1e6),
        "cold, µs": round(row["cold"].median * 1e6),
        "scheduler and plan, µs": round(both["seconds"] * 1e6),
        "of a step": f"{both['share']:.1%}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m", choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu", help="Where blocks are one call. Default cpu.")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--batches", type=lambda text: [int(one) for one in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-cache-memory", default="1GiB")
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY)
    arguments = parser.parse_args()
    for name, least in (("context", 1), ("decode", 3), ("rounds", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} must be {least} or greater")
    if min(arguments.batches) < 1:
        parser.error("--batches must be 1 or greater")
    try:
        run(arguments)
    except QuireError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
