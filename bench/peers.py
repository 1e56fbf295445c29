"""The peer of the latency benchmarks, Hugging Face ``transformers``, and how to compare with it fairly.

A machine's speed drifts with its temperature and its neighbours, so two candidates are not measured one after the
other: :func:`interleave` runs them in turn, and the ratio is taken within each round.

Letters: B sequences, S prompt tokens, N new tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from quire.errors import InvalidArgument


def random_prompts(batch: int, prompt_len: int, vocab_size: int, *, seed: int = 0) -> Tensor:
    """Token ids, int64 ``[B, S]``, without the three lowest ids, which are often special."""
    for name, value, least in (("batch", batch, 1), ("prompt_len", prompt_len, 1), ("vocab_size", vocab_size, 4)):
        if value < least:
            raise InvalidArgument(f"{name} must be {least} or greater, got {value}")
    return torch.randint(3, vocab_size, (batch, prompt_len), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """One pass over prompts: its time, and the logits of the last tokens, ``[B, V]`` on the CPU."""

    logits: Tensor
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Greedy text of a batch with the time at which each step's logits were there."""

    tokens: tuple[tuple[int, ...], ...]
    """New tokens of each sequence."""
    prefill_seconds: float
    """From the call to the logits of the first new token, the library's own preparation included."""
    decode_seconds: tuple[float, ...]
    """From the logits of one new token to those of the next; one entry less than there are new tokens."""

    @property
    def seconds_per_token(self) -> float:
        """Median time of a decode step, for the whole batch.

        Raises:
            InvalidArgument: only one token was made, so there was no decode step.
        """
        if not self.decode_seconds:
            raise InvalidArgument("one new token needs no decode step; ask for two steps or more")
        return statistics.median(self.decode_seconds)


class TransformersPeer:
    """A checkpoint run by ``transformers``: ``generate``, greedy, dynamic cache, SDPA attention, no end token."""

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.bfloat16, *, device: str = "cpu") -> None:
        self.device = torch.device(device)
        # Any: its methods are untyped, and a decorator hides the signature of `to`.
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
        self.model: Any = model.to(self.device).eval()
        # Nothing may end a text early or bend its logits.
        generation = self.model.generation_config
        generation.eos_token_id = generation.bos_token_id = None
        generation.pad_token_id = 0
        generation.do_sample = False

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return int(self.model.config.vocab_size)

    @torch.inference_mode()
    def prefill(self, prompts_BS: Tensor) -> Prefill:
        """Runs prompts ``[B, S]`` through the model once, with a new cache."""
        prompts_BS = self._checked(prompts_BS)
        self._synchronize()
        started = time.perf_counter()
        logits_BV = self.model(input_ids=prompts_BS, use_cache=True, logits_to_keep=1).logits[:, -1]
        self._synchronize()
        return Prefill(logits=logits_BV.cpu(), seconds=time.perf_counter() - started)

    @torch.inference_mode()
    def generate(self, prompts_BS: Tensor, steps: int) -> Generation:
        """Makes ``steps`` new tokens for each of the prompts ``[B, S]``.

        Raises:
            InvalidArgument: no steps, or prompts that are not a matrix of known tokens.
        """
        if steps < 1:
            raise InvalidArgument(f"steps must be 1 or greater, got {steps}")
        prompts_BS = self._checked(prompts_BS)
        clock = _Clock(self._synchronize)
        self._synchronize()
        started = time.perf_counter()
        output = self.model.generate(
            input_ids=prompts_BS,
            attention_mask=torch.ones_like(prompts_BS),
            max_new_tokens=steps,
            min_new_tokens=steps,
            use_cache=True,
            logits_processor=LogitsProcessorList([clock]),
        )
        stamps = [started, *clock.stamps]
        first, *rest = (later - earlier for earlier, later in itertools.pairwise(stamps))
        tokens = tuple(tuple(row) for row in output[:, prompts_BS.shape[1] :].tolist())
        return Generation(tokens=tokens, prefill_seconds=first, decode_seconds=tuple(rest))

    def decode(self, batch: int, prompt_len: int, steps: int, *, seed: int = 0) -> Generation:
        """:meth:`generate` for ``random_prompts(batch, prompt_len, vocab_size, seed=seed)``."""
        return self.generate(random_prompts(batch, prompt_len, self.vocab_size, seed=seed), steps)

    def _checked(self, prompts_BS: Tensor) -> Tensor:
        if prompts_BS.ndim != 2 or not prompts_BS.numel() or prompts_BS.dtype != torch.int64:
            raise InvalidArgument(
                f"prompts must be int64 of shape [B, S], got {prompts_BS.dtype} of shape {list(prompts_BS.shape)}"
            )
        lowest, highest = int(prompts_BS.min()), int(prompts_BS.max())
        if lowest < 0 or highest >= self.vocab_size:
            raise InvalidArgument(f"tokens must be in 0..{self.vocab_size - 1}, got {lowest}..{highest}")
        return prompts_BS.to(self.device)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Clock(LogitsProcessor):
    """Changes no logits; notes when they are there."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.stamps: list[float] = []
        self._synchronize = synchronize

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._synchronize()
        self.stamps.append(time.perf_counter())
        return scores


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and range of several rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(median=statistics.median(values), least=min(values), most=max(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.least:.3g} to {self.most:.3g})"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of :func:`interleave`; the order of the names is that of the call."""

    seconds: dict[str, tuple[float, ...]]
    """By name, one entry a round."""
    ratios: dict[str, Spread]
    """By name, its seconds over the first one's of the same round: above 1 is slower than the first."""

    def spread(self, name: str) -> Spread:
        """Seconds of ``name``."""
        return Spread.of(self.seconds[name])


def interleave(functions: Mapping[str, Callable[[], float | None]], rounds: int, *, warmup: int = 1) -> Comparison:
    """Runs the functions in turn (A, B, A, B, ...), ``rounds`` times each, after ``warmup`` rounds that do not count.

    A function that returns a number says its own seconds (a part of what it does, or a time measured inside); for one
    that returns None the time of the call is taken.

    Raises:
        InvalidArgument: no functions or no rounds, or a function returned something that is not a positive time.
    """
    if not functions or rounds < 1 or warmup < 0:
        raise InvalidArgument(
            f"interleave needs at least one function and one round, got {len(functions)} functions, {rounds} rounds and "
            f"{warmup} for warming up"
        )
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(-warmup, rounds):
        for name, function in functions.items():
            started = time.perf_counter()
            said = function()
            taken = time.perf_counter() - started
            if said is not None:
                if isinstance(said, bool) or not isinstance(said, int | float) or not said > 0:
                    raise InvalidArgument(f"'{name}' must return its seconds, above 0, or None; it returned {said!r}")
                taken = float(said)
            if turn >= 0:
                seconds[name].append(taken)
    first = next(iter(seconds.values()))
    ratios = {
        name: Spread.of([own / base for own, base in zip(times, first, strict=True)]) for name, times in seconds.items()
    }
    return Comparison(seconds={name: tuple(times) for name, times in seconds.items()}, ratios=ratios)


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows under the names of their columns, in order of first appearance; floats to four digits, numbers to the right.

    A column that a row lacks stays blank.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name, "")) for name in columns] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(columns, *cells, strict=True)]
    numeric = [all(isinstance(row.get(name, 0), int | float) for row in rows) for name in columns]
    lines = [
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in [columns, ["-" * width for width in widths], *cells]
    ]
    return "\n".join(lines)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_table(rows: Sequence[Mapping[str, object]]) -> None:
    """Prints :func:`format_table`; nothing for no rows."""
    if rows:
        print(format_table(rows), flush=True)


def print_json(values: Mapping[str, object]) -> None:
    """Prints one line of JSON; dataclasses become objects."""
    print(json.dumps(values, default=_plain), flush=True)


def _plain(value: object) -> object:
    if isinstance(value, Spread | Comparison | Generation):
        return vars(value)
    if isinstance(value, Path | torch.dtype | torch.device):
        return str(value)
    raise InvalidArgument(f"a {type(value).__name__} has no form in JSON; give numbers, texts, lists or mappings")
