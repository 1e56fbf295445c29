"""The peer of the latency benchmarks: Hugging Face ``transformers``.

Letters: B sequences, S prompt tokens, N new tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from quire.bench.reports import random_prompts
from quire.errors import InvalidArgument


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
