"""Cost of a step beside the model: grammars, the scheduler, the attention plan, sampling, text.

Two measurements at a batch of 16. *Grammars*: the same prompts generated freely, under a JSON
schema and under a regex, in turn; the median time of a step in which all of them run is compared
within each round. The model has random weights, so its best token hardly ever fits, and every step
needs every mask: the worst case. *Known* are the same grammars with a model that writes the form by
itself, as trained ones do: it prefers the text of the rounds before (its logits are raised).
*Shares*: the parts of a step, of a free batch and of each kind of grammar, by clocks around the
engine's methods; they are rounds of their own, because clocks cost time too. A part's time excludes
the parts inside it. On a GPU it is the time of the host, which kernels may overlap.

``python bench/overheads.py [--shape smollm2-135m] [--batch 16] [--rounds 5]``
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

import quire.engine.sampling_step
import quire.engine.steps
import quire.sampling.logit_edits
import quire.sampling.sampler
from quire import LLM, SamplingParams
from quire.base.errors import QuireError
from quire.engine.engine import Engine
from quire.engine.request import Request
from quire.grammars.grammars import Grammars
from quire.grammars.matcher import GrammarMatcher
from quire.kv.state_pass import StatePass
from quire.sampling.request_sampler import RequestSampler
from quire.sampling.sampled_tokens import SampledTokens
from quire.text.detokenizer import IncrementalDetokenizer
from quire_bench.checkpoints import DEFAULT_DIRECTORY, SHAPES, checkpoint, text_tokenizer
from quire_bench.latency import synchronize
from quire_bench.reports import Spread, interleave, print_json, print_table, random_prompts

KNOWN = "known: "
"""Prefix of the name of a kind whose form the model writes by itself."""

TARGET = 0.05
"""Largest share of a step that a grammar may add."""
PLAN_TARGET = 0.03
"""Largest share of a step for scheduler and plan."""

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["function", "class", "module"]},
        "line": {"type": "integer"},
        "documented": {"type": "boolean"},
    },
    "required": ["name", "kind", "line", "documented"],
    "additionalProperties": False,
}
REGEX_ITEM = r"\d{1,4}: [a-z_]{1,12}\([a-z, ]{0,20}\) -> (int|str|None|list\[int\])\n"

SCHEDULER, PLAN, DETOKENIZER, SAMPLING = "scheduler", "attention plan", "detokenizer", "sampling"
KV = "KV bookkeeping"
COUNTED, TOGETHER = (SCHEDULER, KV, PLAN), "scheduler and plan"
"""The parts that the target for scheduler and plan counts, and the name of their sum."""


def grammars(items: int) -> dict[str, dict[str, Any]]:
    """Return structured outputs whose text has at least ``items`` items."""
    array = {"type": "array", "items": ITEM, "minItems": items, "maxItems": items}
    return {
        "JSON schema": {"json": array},
        "regex": {"regex": f"({REGEX_ITEM}){{{items}}}"},
    }


# ---- Generating ----------------------------------------------------------------------------------


class Preferences:
    """Raises the logits of the next tokens of a text; replaces the engine's ``sample``."""

    def __init__(self) -> None:
        self._sample = quire.engine.sampling_step.sample
        self.texts: dict[int, Iterator[int]] = {}
        """Remaining texts by the identity of a request's sampler."""

    def __enter__(self) -> Self:
        quire.engine.sampling_step.sample = self
        return self

    def __exit__(self, *_: object) -> None:
        quire.engine.sampling_step.sample = self._sample

    def __call__(self, logits_RV: Tensor, samplers: Sequence[RequestSampler], *more: Any) -> SampledTokens:
        preferred = [next(self.texts[id(one)]) for one in samplers]
        logits_RV[torch.arange(len(preferred)), preferred] += 1000
        return self._sample(logits_RV, samplers, *more[:3])  # without the given maxima: the logits have changed


def step_seconds(
    llm: LLM,
    prompts: Sequence[Any],
    params: SamplingParams,
    on_step: Callable[[float], None] = lambda seconds: None,
    texts: list[list[int]] | None = None,
    keep: bool = False,
) -> list[float]:
    """Return the seconds of each step in which every request decoded; ``on_step`` is called with
    each.

    ``texts``: of each prompt, to be preferred by the model; with ``keep`` they become the texts
    that are generated now.
    """
    engine = llm.engine
    device = engine.runner.state.device
    requests = [engine.submit(prompt, params)[0] for prompt in prompts]
    with ExitStack() as stack:
        if texts and not keep:
            preferences = stack.enter_context(Preferences())
            preferences.texts = {id(r.output.sampler): iter(text) for r, text in zip(requests, texts, strict=True)}
        seconds = _timed(engine, requests, device, on_step)
    if keep and texts is not None:
        texts[:] = [list(request.output.token_ids) for request in requests]
    for request in requests:
        if request.output.error is not None:
            raise request.output.error
        if request.output.finish_reason != "length":
            raise QuireError(f"a text ended before {params.max_tokens} tokens: {request.output.text!r:.200}")
    return seconds


def _timed(
    engine: Engine, requests: list[Request], device: torch.device, on_step: Callable[[float], None]
) -> list[float]:
    seconds = []
    try:
        while not all(request.finished for request in requests):
            decoding = all(request.output.token_ids and not request.finished for request in requests)
            synchronize(device)
            started = time.perf_counter()
            engine.step()
            synchronize(device)
            taken = time.perf_counter() - started
            if decoding:
                seconds.append(taken)
            on_step(taken if decoding else 0.0)
    finally:
        engine.end(requests)
    return seconds


def valid_texts(llm: LLM, prompts: Sequence[Any], name: str) -> dict[str, int]:
    """Generate short texts of one kind, sampled to their ends; return the number that have the
    requested form."""
    params = SamplingParams(
        structured_outputs=grammars(1)[name], temperature=1.0, seed=1, max_tokens=2000, ignore_eos=True
    )
    outputs = [output.outputs[0] for output in llm.generate([prompt.tolist() for prompt in prompts], params)]
    return {
        "valid": sum(has_form(name, output.text) for output in outputs if output.finish_reason == "stop"),
        "ended": sum(output.finish_reason == "stop" for output in outputs),
        "of": len(outputs),
    }


def has_form(name: str, text: str) -> bool:
    if name == "regex":
        return re.fullmatch(REGEX_ITEM, text) is not None
    try:
        (item,) = json.loads(text)
    except ValueError:
        return False
    return bool(
        list(item) == ITEM["required"]
        and isinstance(item["name"], str)
        and len(item["name"]) <= 24
        and item["kind"] in ("function", "class", "module")
        and type(item["line"]) in (int, float)
        and type(item["documented"]) is bool
    )


# ---- Clocks --------------------------------------------------------------------------------------


class Clocks:
    """The own time of methods, by part, since the last ``take``."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._inside = [0.0]
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, part: str) -> None:
        """Put a clock around ``owner.name``: a method of an object or class, or a function of a
        module.

        ``AttributeError`` if it has none.
        """
        inner = getattr(owner, name)
        if name in vars(owner):
            before = vars(owner)[name]
            self._undo.append(lambda: setattr(owner, name, before))
        else:
            self._undo.append(lambda: delattr(owner, name))

        def timed(*arguments: Any, **keywords: Any) -> Any:
            self._inside.append(0.0)
            started = time.perf_counter()
            try:
                return inner(*arguments, **keywords)
            finally:
                taken = time.perf_counter() - started
                self._seconds[part] += taken - self._inside.pop()
                self._inside[-1] += taken

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """Return the seconds by part, and reset them."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._undo:
            self._undo.pop()()


def clocks_of(llm: LLM) -> Clocks:
    """Return clocks around all named parts of a step."""
    engine = llm.engine
    state = engine.runner.state
    clocks = Clocks()
    for owner, names, part in (
        (engine.scheduler, ("schedule",), SCHEDULER),
        (quire.engine.steps, ("keep",), SCHEDULER),
        (state, ("begin_forward", "end_forward", "open_pass"), KV),
        (StatePass, ("__init__",), PLAN),
        (StatePass, ("stack_parts", "attention_parts"), PLAN),
        (state.parts.paged.backend, ("plan",), PLAN),
        *((one.storage, ("copy", "blank"), "page copies") for one in state.parts.paged.classes),
        (engine.runner, ("execute",), "model"),
        (Grammars, ("allowed",), "grammar masks"),
        (quire.sampling.logit_edits, ("mask_out",), "grammar masks applied"),
        (quire.sampling.sampler, ("first_allowed",), "grammar masks applied"),
        (GrammarMatcher, ("accept",), "grammar state"),
        (quire.engine.sampling_step, ("sample",), SAMPLING),
        (IncrementalDetokenizer, ("push",), DETOKENIZER),
        (engine.sampling, ("_take",), "taking tokens in"),
        (engine, ("step",), "the rest of the engine"),
    ):
        for name in names:
            clocks.put(owner, name, part)
    return clocks


def shares(llm: LLM, prompts: Sequence[Any], params: SamplingParams, rounds: int) -> dict[str, dict[str, float]]:
    """Return, by part, the mean seconds of a step, and their share of it.

    Only the quicker half of the steps count, which were disturbed less: unlike medians of parts,
    these add up.
    """
    steps: list[tuple[float, dict[str, float]]] = []
    with clocks_of(llm) as clocks:

        def keep(seconds: float) -> None:
            parts = clocks.take()
            if seconds:
                steps.append((seconds, parts))

        for _ in range(rounds):
            step_seconds(llm, prompts, params, keep)
    steps.sort(key=lambda step: step[0])
    quick = steps[: (len(steps) + 1) // 2]
    total = sum(seconds for seconds, _ in quick)
    sums: dict[str, float] = defaultdict(float)
    for _, parts in quick:
        for name, seconds in parts.items():
            sums[name] += seconds
    sums[TOGETHER] = sum(sums[name] for name in COUNTED)
    return {name: {"seconds": seconds / len(quick), "share": seconds / total} for name, seconds in sums.items()}


# ---- The benchmark -------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, print tables and the JSON line; return the line's content."""
    shape = SHAPES[arguments.shape]
    llm = LLM(
        str(checkpoint(arguments.shape, directory=arguments.dir)),
        tokenizer=str(text_tokenizer(shape.vocab_size, directory=arguments.dir)),
        device=arguments.device,
        kv_cache_memory=arguments.kv_cache_memory,
        enable_prefix_caching=False,
    )
    prompts = [row.numpy() for row in random_prompts(arguments.batch, arguments.context, llm.model.vocab_size)]
    free = SamplingParams(temperature=0, max_tokens=arguments.decode, ignore_eos=True)
    kinds = {"free": free} | {
        name: SamplingParams(temperature=0, max_tokens=arguments.decode, ignore_eos=True, structured_outputs=grammar)
        for name, grammar in grammars(arguments.decode).items()
    }

    texts: dict[str, list[list[int]]] = {name: [] for name in kinds}
    for name, params in kinds.items():
        step_seconds(llm, prompts, params, texts=texts[name], keep=True)

    def median_step(name: str, *, known: bool) -> Callable[[], float]:
        return lambda: statistics.median(step_seconds(llm, prompts, kinds[name], texts=texts[name] if known else None))

    # The free text is the model's own greedy choice; raised logits are in both sides of each ratio
    # with "known".
    compared = interleave(
        {name: median_step(name, known=False) for name in kinds}
        | {KNOWN + name: median_step(name, known=True) for name in kinds},
        arguments.rounds,
    )
    parts = {name: shares(llm, prompts, params, arguments.rounds) for name, params in kinds.items()}
    rows: list[dict[str, Any]] = []
    for name, times in compared.seconds.items():
        known, kind = name.startswith(KNOWN), name.removeprefix(KNOWN)
        base = compared.seconds[KNOWN + "free" if known else "free"]
        rows.append(
            {
                "steps": name,
                "seconds_per_step": compared.spread(name),
                "to_free": Spread.of([own / other for own, other in zip(times, base, strict=True)]),
                "texts": {} if known or kind == "free" else valid_texts(llm, prompts, kind),
            }
        )
    print_table([structured_line(row) for row in rows])
    print()
    names = sorted(parts["JSON schema"], key=lambda name: (name == TOGETHER, -parts["JSON schema"][name]["seconds"]))
    print_table([part_line(name, parts) for name in names])
    both = parts["free"][TOGETHER]["share"]
    worst = {
        known: max(r["to_free"].median for r in rows if r["steps"].startswith(KNOWN) == known)
        for known in (True, False)
    }
    result = {
        "benchmark": "overheads",
        "shape": arguments.shape,
        "device": arguments.device,
        "batch": arguments.batch,
        "context": arguments.context,
        "decode": arguments.decode,
        "rounds": arguments.rounds,
        "structured": rows,
        "parts": parts,
        "structured_cost": worst[True] - 1,
        "structured_cost_random_weights": worst[False] - 1,
        "scheduler_and_plan_share": both,
        "target": {"structured": TARGET, "scheduler_and_plan": PLAN_TARGET},
        "met": {"structured": worst[True] - 1 < TARGET, "scheduler_and_plan": both < PLAN_TARGET},
    }
    print_json(result)
    return result


def structured_line(row: dict[str, Any]) -> dict[str, Any]:
    texts = row["texts"]
    return {
        "steps": row["steps"],
        "ms/step": row["seconds_per_step"].median * 1e3,
        "to free": str(row["to_free"]),
        "valid texts": f"{texts['valid']}/{texts['ended']} of those that ended" if texts else "",
    }


def part_line(part: str, parts: dict[str, dict[str, dict[str, float]]]) -> dict[str, Any]:
    found: dict[str, Any] = {"part": part}
    for name, measured in parts.items():
        if part in measured:
            found[f"{name}, µs"] = round(measured[part]["seconds"] * 1e6)
            found[f"{name}, share"] = f"{measured[part]['share']:.1%}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m", choices=list(SHAPES))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-cache-memory", default="1GiB")
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    for name, least in (("batch", 1), ("context", 1), ("decode", 3), ("rounds", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} must be {least} or greater")
    run(arguments)


if __name__ == "__main__":
    main()
