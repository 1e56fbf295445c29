"""Speculation against plain decoding of the same requests, by turns, with equal texts.

Edits of functions of the standard library (a docstring, types, another name), an agent's turns that
copy a tool's result, and free questions. Every group of requests runs with and without speculation
in one engine, one after the other and in turning order. Times are those between the first token of
a group and its end, so that the prompts count on neither side. The CPU time is all of the process;
that of a token behind the first one is what can be compared on a busy machine. A group waits for
its last request. From a queue a request takes the place of one that ended, as on a server; prompts
are in the prefix cache then.
"""

from __future__ import annotations

import importlib
import inspect
import statistics
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from quire.base.config import check_int
from quire.base.errors import InvalidArgument
from quire.base.outputs import RequestOutput
from quire.base.sampling_params import SamplingParams
from quire.engine.request import Request
from quire.llm import LLM
from quire.models.catalogue import resolve_model
from quire_bench.peer_process import PeerFailed, PeerProcess
from quire_bench.peer_table import started
from quire_bench.peers import TransformersPeer
from quire_bench.reports import print_json, print_table

KINDS = ("edit", "agent", "free")
MODULES = (
    "textwrap", "shlex", "bisect", "heapq", "colorsys", "fnmatch", "glob", "posixpath", "shutil", "statistics",
    "string", "calendar", "difflib", "inspect", "json.decoder", "json.encoder", "random", "quopri", "base64", "copy",
)  # fmt: skip
LINES = range(8, 46)
"""Lines of a function that is edited."""
EDITS = (
    "Add a docstring to this function. Answer with the whole function only.",
    "Add type hints to this function. Answer with the whole function only.",
    "Rename the first parameter of this function to `value`. Answer with the whole function only.",
)
FREE = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain how a bicycle stays upright.",
    "What should one know before keeping bees?",
    "Describe the water cycle to a child.",
    "Compare tea and coffee in ten sentences.",
    "Why do cities grow along rivers?",
    "Write an email that declines an invitation politely.",
    "How does a compiler differ from an interpreter?",
)

WAIT, MOST_WAITS = 0.5, 240
"""Seconds of a look at whether the process rests, and most looks."""

VLLM_LENGTH, VLLM_KV_BYTES = 4096, 2 << 30
"""Most tokens of a prompt in vLLM, and its memory for K and V."""

Chat = list[dict[str, str]]


def functions(count: int) -> Iterator[str]:
    """Yield the sources of at most ``count`` functions of the standard library."""
    found = 0
    for name in MODULES:
        module = importlib.import_module(name)
        for function in vars(module).values():
            if not isinstance(function, FunctionType) or function.__module__ != module.__name__:
                continue
            try:
                source = textwrap.dedent(inspect.getsource(function))
            except OSError:  # It was made from text.
                continue
            if source.count("\n") in LINES and found < count:
                yield source
                found += 1


def conversations(kind: str, count: int) -> list[Chat]:
    """Return at most ``count`` conversations of one of ``KINDS``."""
    if kind == "free":
        return [[{"role": "user", "content": question}] for question in FREE[:count]]
    sources = list(functions(count))
    if kind == "edit":
        return [
            [{"role": "user", "content": f"{EDITS[number % len(EDITS)]}\n\n```python\n{source}```"}]
            for number, source in enumerate(sources)
        ]
    return [
        [
            {"role": "user", "content": "Open helper.py and show me its content, unchanged."},
            {"role": "assistant", "content": "I will read the file."},
            {"role": "user", "content": f"[tool result of read_file]\n{source}\nNow show it."},
        ]
        for source in sources
    ]


def seconds_of(outputs: Sequence[RequestOutput]) -> float:
    """Return the time from the first token of a group to its end."""
    starts = [one.metrics.first_token_time for one in outputs if one.metrics.first_token_time is not None]
    ends = [one.metrics.finished_time for one in outputs if one.metrics.finished_time is not None]
    return max(ends) - min(starts)


def measured(
    llm: LLM, kind: str, *, tasks: int, tokens: int, batch: int, peers: Sequence[PeerAnswers] = ()
) -> dict[str, Any]:
    """Run conversations of one kind in groups of ``batch``; return a row of the table. ``peers``
    answer them too, beside each group."""
    found, ratios, equal, number, drafted, accepted = conversations(kind, tasks), [], 0, 0, 0, 0
    seconds, cpu = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}
    # Others' answers would tell these, which differ in the size of their group only.
    salt = f"{kind} {batch}"
    for first in range(0, len(found), batch):
        group = found[first : first + batch]
        runs: dict[bool, list[RequestOutput]] = {}
        order = (False, True) if (first // batch) % 2 else (True, False)
        # Both find the state of the prompts, and memory that was touched before.
        _ask(llm, group, tokens, speculative=False, salt=salt)
        for speculative in order:
            began = time.process_time()
            runs[speculative] = _ask(llm, group, tokens, speculative=speculative, salt=salt)
            cpu[speculative] += time.process_time() - began
            seconds[speculative] += seconds_of(runs[speculative])
        for peer in peers:
            peer.add(runs[False], seconds_of(runs[True]))
        ratios.append(seconds_of(runs[False]) / seconds_of(runs[True]))
        for plain, drafting in zip(runs[False], runs[True], strict=True):
            equal += plain.outputs[0].token_ids == drafting.outputs[0].token_ids
            number += len(drafting.outputs[0].token_ids)
            if drafting.speculation is not None:
                drafted, accepted = drafted + drafting.speculation.drafted, accepted + drafting.speculation.accepted
    return {
        "kind": kind,
        "batch": batch,
        "requests": len(found),
        "tokens": number,
        "equal texts": equal,
        "times as fast": seconds[False] / seconds[True],
        "by CPU time": cpu[False] / cpu[True],
        "CPU ms a token": 1000 * cpu[True] / max(1, number - len(found)),
        "plain CPU ms": 1000 * cpu[False] / max(1, number - len(found)),
        "median": statistics.median(ratios),
        "least": min(ratios),
        "plain tok/s": number / seconds[False],
        "tok/s": number / seconds[True],
        "drafted": drafted,
        "accepted": accepted,
        **{name: value for peer in peers for name, value in peer.row.items()},
    }


def measured_queue(llm: LLM, kind: str, *, tasks: int, tokens: int, batch: int) -> dict[str, Any]:
    """Run conversations of one kind from a queue, ``batch`` at a time: without speculation, which
    touches memory, and again, with it, and without; return a row of the table."""
    salt = f"{kind} {batch}"
    warm = _ask(llm, conversations(kind, tasks), 1, speculative=False, salt=salt)
    prompts = [np.array(one.prompt_token_ids) for one in warm]
    seconds: list[float] = []
    texts: list[list[list[int]]] = []
    for speculative in (False, False, True, False):
        params = SamplingParams(temperature=0, max_tokens=tokens, speculative=speculative)
        began = time.perf_counter()
        texts.append(_from_queue(llm, prompts, params, batch, salt))
        seconds.append(time.perf_counter() - began)
    _, first, drafting, last = seconds
    number = sum(map(len, texts[2]))
    return {
        "kind": kind,
        "batch": batch,
        "requests": len(prompts),
        "tokens": number,
        "equal texts": sum(one == drafted for _, one, drafted, _ in zip(*texts, strict=True)),
        "times as fast": (first + last) / 2 / drafting,
        "least": min(first, last) / drafting,
        "plain tok/s": 2 * number / (first + last),
        "tok/s": number / drafting,
    }


def _from_queue(
    llm: LLM, prompts: Sequence[NDArray[np.int64]], params: SamplingParams, batch: int, salt: str
) -> list[list[int]]:
    """Return the tokens of each prompt's answer."""
    requests: list[Request] = []
    active: list[Request] = []
    while len(requests) < len(prompts) or active:
        while len(requests) < len(prompts) and len(active) < batch:
            active += (new := llm.engine.submit(prompts[len(requests)], params, key=salt))
            requests += new
        llm.engine.step()
        active = [one for one in active if not one.finished]
    for one in requests:
        if one.output.error is not None:
            raise one.output.error
    return [list(one.output.token_ids) for one in requests]


class PeerAnswers(Protocol):
    """The same answers by another runtime, for one row of the table."""

    def add(self, outputs: Sequence[RequestOutput], seconds: float) -> None:
        """Continue the prompts of a group by as many tokens. ``seconds``: the time of Quire, with
        speculation, from the group's first token to its end."""
        ...

    @property
    def row(self) -> dict[str, Any]:
        """Its part of a row of the table."""
        ...


@dataclass
class LookedUp:
    """Answers by transformers, with its prompt lookup and without, one after the other."""

    peer: TransformersPeer
    tokens: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    plain_cpu: float = 0.0
    equal: int = 0

    def add(self, outputs: Sequence[RequestOutput], seconds: float) -> None:
        """See ``PeerAnswers``."""
        for output in outputs:
            ids = output.outputs[0].token_ids
            if len(ids) > 1:
                found = self.peer.look_up(output.prompt_token_ids, len(ids))
                self.tokens += len(ids) - 1
                self.seconds += found.seconds
                self.cpu += found.cpu_seconds
                self.plain_cpu += self.peer.look_up(output.prompt_token_ids, len(ids), 0).cpu_seconds
                self.equal += list(found.tokens[0]) == ids

    @property
    def row(self) -> dict[str, Any]:
        """See ``PeerAnswers``."""
        if not self.tokens:
            return {}
        return {
            "transformers tok/s": self.tokens / self.seconds,
            "transformers by CPU time": self.plain_cpu / self.cpu,
            "its CPU ms a token": 1000 * self.cpu / self.tokens,
            "its plain CPU ms": 1000 * self.plain_cpu / self.tokens,
            "equal there": self.equal,
        }


@dataclass
class ByNgrams:
    """Answers by vLLM, with its n-gram speculation, a group at once."""

    process: PeerProcess
    tokens: int = 0
    seconds: float = 0.0
    quire_seconds: float = 0.0
    equal: int = 0

    def add(self, outputs: Sequence[RequestOutput], seconds: float) -> None:
        """See ``PeerAnswers``. The prompts are in vLLM's prefix cache, as in Quire's."""
        prompts = [list(output.prompt_token_ids) for output in outputs]
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        self.process.ask("serve", prompts=prompts, lengths=[1] * len(prompts))
        found = self.process.ask("serve", prompts=prompts, lengths=[len(text) for text in texts])
        self.tokens += sum(len(text) for text in texts) - len(texts)
        self.seconds += found["seconds"] - found["first"]
        self.quire_seconds += seconds
        self.equal += sum(one == other for one, other in zip(texts, found["tokens"], strict=True))

    @property
    def row(self) -> dict[str, Any]:
        """See ``PeerAnswers``."""
        if not self.tokens:
            return {}
        return {
            "vLLM tok/s": self.tokens / self.seconds,
            "its time over Quire's": self.seconds / self.quire_seconds,
            "equal in vLLM": self.equal,
        }


@contextmanager
def vllm_ngrams(python: str, llm: LLM, model: str, tokens: int, batch: int) -> Iterator[PeerProcess]:
    """Load a model's directory into vLLM, in a process of the interpreter ``python``; end it.
    ``InvalidArgument`` if it cannot be loaded."""
    with (
        TemporaryDirectory() as folder,
        started("vllm-ngram", python, torch.get_num_threads(), Path(folder) / "log") as process,
    ):
        try:
            process.ask(
                "load",
                model=str(resolve_model(model)),
                dtype=str(llm.model.dtype).removeprefix("torch."),
                quantization=llm.model.quantization,
                threads=torch.get_num_threads(),
                length=VLLM_LENGTH + tokens,
                batch=batch,
                kv_bytes=VLLM_KV_BYTES,
            )
        except PeerFailed as error:
            raise InvalidArgument(f"vLLM does not run this model: {error.reason}", field="vllm") from error
        yield process


def settle() -> None:
    """Wait until the process rests: behind loading, weights move into huge pages beside the engine,
    and that would count as CPU time of the first group."""
    for _ in range(MOST_WAITS):
        began = time.process_time()
        time.sleep(WAIT)
        if time.process_time() - began < WAIT / 20:
            return


def _ask(llm: LLM, group: Sequence[Chat], tokens: int, *, speculative: bool, salt: str) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=tokens, speculative=speculative)
    if llm.tokenizer is not None and llm.tokenizer.chat_templates:
        return list(llm.chat(list(group), params, cache_salt=salt, use_tqdm=False))
    prompts = ["\n\n".join(message["content"] for message in chat) + "\n\n" for chat in group]
    return list(llm.generate(prompts, params, cache_salt=salt, use_tqdm=False))


def run_speculative(
    model: str,
    *,
    engine_options: Mapping[str, Any],
    tasks: int = 60,
    tokens: int = 256,
    batches: Sequence[int] = (1, 4, 16),
    kinds: Sequence[str] = KINDS,
    peer: bool = False,
    vllm: str | None = None,
    queue: bool = False,
) -> dict[str, Any]:
    """Measure, print a table and one JSON line, and return the line's content. ``peer``: beside the
    prompt lookup of transformers. ``vllm``: beside the n-grams of vLLM, which this interpreter has.
    ``queue``: requests come from a queue. ``InvalidArgument`` for numbers and kinds out of range,
    for peers beside a queue, and if vLLM does not load the model."""
    for name, values in (("tasks", [tasks]), ("tokens", [tokens]), ("batches", batches)):
        for value in values:
            check_int(name, value, low=1)
    if not batches or not kinds or (unknown := [kind for kind in kinds if kind not in KINDS]):
        given = unknown[0] if batches and kinds else ""
        raise InvalidArgument(field="kinds", given=given, allowed=f"some of {', '.join(KINDS)}, and a batch size")
    if queue and (peer or vllm):
        raise InvalidArgument("peers answer groups of requests, no queue; give peer and vllm, or queue", field="queue")
    options = dict(engine_options)
    if options.get("speculative") in (None, "off"):
        options["speculative"] = "auto"
    rows: list[dict[str, Any]] = []
    with LLM(model, **options) as llm, ExitStack() as stack:
        _ask(llm, conversations("free", 1), 8, speculative=True, salt="first")
        settle()
        other = TransformersPeer(resolve_model(model), llm.model.dtype) if peer else None
        ngrams = stack.enter_context(vllm_ngrams(vllm, llm, model, tokens, max(batches))) if vllm else None
        for kind in kinds:
            for batch in batches:
                numbers = {"tasks": tasks, "tokens": tokens, "batch": batch}
                peers: list[PeerAnswers] = [] if other is None else [LookedUp(other)]
                peers += [] if ngrams is None else [ByNgrams(ngrams)]
                rows.append(
                    measured_queue(llm, kind, **numbers) if queue else measured(llm, kind, **numbers, peers=peers)
                )
                print_table(rows[-1:])
        dtype = str(llm.model.dtype).removeprefix("torch.")
        result = {"bench": "speculative", "model": str(model), "dtype": dtype, "weights": llm.model.quantization}
    print_table(rows)
    document = {**result, "queue": queue, "rows": rows}
    print_json(document)
    return document
