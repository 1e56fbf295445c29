"""The peer of the speed benchmarks: Hugging Face ``transformers``.

Letters: B sequences, S prompt tokens, N new tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from quire.base.errors import InvalidArgument, Unsupported
from quire_bench.reports import random_prompts

CONTINUOUS_PAGE = 256
"""Tokens of a page of the continuous batching, its own default."""
CPU_BATCH_TOKENS = 512
"""Most tokens of a step of the continuous batching on a CPU. There its attention is a dense masked
product with the states of all requests; its default of 8,192 would compute mostly waste."""

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """One pass over prompts: its time, and the last tokens' logits ``[B, V]`` on the CPU."""

    logits: Tensor
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Greedy text of a batch with the times of each step's logits."""

    tokens: tuple[tuple[int, ...], ...]
    """New tokens of each sequence."""
    prefill_seconds: float
    """From the call to the first new token's logits, including the library's preparation."""
    decode_seconds: tuple[float, ...]
    """From one new token's logits to the next one's; one entry less than new tokens."""

    @property
    def seconds_per_token(self) -> float:
        """Median time of a decode step for the whole batch.

        Raises:
            InvalidArgument: only one token was made, so there was no decode step.
        """
        if not self.decode_seconds:
            raise InvalidArgument("one new token needs no decode step; ask for two steps or more")
        return statistics.median(self.decode_seconds)


@dataclass(frozen=True, kw_only=True)
class Served:
    """Greedy texts of many requests, in their order."""

    tokens: tuple[tuple[int, ...], ...]
    """New tokens of each, as many as requested."""
    seconds: float
    """From the submission to the last token of the last request."""
    cpu_seconds: float = math.nan
    """Of the process on all CPUs in that time, where it was measured."""


class TransformersPeer:
    """A checkpoint in ``transformers``: greedy, dynamic cache, SDPA attention, no end token."""

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.bfloat16, *, device: str = "cpu") -> None:
        self.device = torch.device(device)
        # Any: its methods are untyped, and a decorator hides the signature of `to`.
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
        self.model: Any = model.to(self.device).eval()
        # No setting may end a text early or change its logits.
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
        """Run prompts ``[B, S]`` through the model once, with a new cache."""
        prompts_BS = self._checked(prompts_BS)
        self._synchronize()
        started = time.perf_counter()
        logits_BV = self.model(input_ids=prompts_BS, use_cache=True, logits_to_keep=1).logits[:, -1]
        self._synchronize()
        return Prefill(logits=logits_BV.cpu(), seconds=time.perf_counter() - started)

    @torch.inference_mode()
    def generate(self, prompts_BS: Tensor, steps: int) -> Generation:
        """Make ``steps`` new tokens for each of the prompts ``[B, S]``.

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

    @torch.inference_mode()
    def look_up(self, prompt: Sequence[int], steps: int, drafts: int = 10) -> Served:
        """Continue one prompt with prompt lookup, ``drafts`` tokens at a time; without for 0. The
        seconds are those behind the first token. The library's assisted generation has no
        batches."""
        clock = _Clock(self._synchronize)
        prompt_BS = self._checked(torch.tensor([list(prompt)], dtype=torch.int64))
        made = self.model.generate(
            input_ids=prompt_BS,
            attention_mask=torch.ones_like(prompt_BS),
            max_new_tokens=steps,
            min_new_tokens=steps,
            use_cache=True,
            prompt_lookup_num_tokens=drafts or None,
            logits_processor=LogitsProcessorList([clock]),
        )
        self._synchronize()
        return Served(
            tokens=(tuple(made[0, len(prompt) :].tolist()),),
            seconds=time.perf_counter() - clock.stamps[0],
            cpu_seconds=time.process_time() - clock.cpu_stamps[0],
        )

    def decode(self, batch: int, prompt_len: int, steps: int, *, seed: int = 0) -> Generation:
        """Call :meth:`generate` for :func:`random_prompts` of these sizes and ``seed``."""
        return self.generate(random_prompts(batch, prompt_len, self.vocab_size, seed=seed), steps)

    @torch.inference_mode()
    def serve_static(self, prompts: Prompts, lengths: Sequence[int], batch: int) -> Served:
        """Make ``lengths[i]`` new tokens for prompt i with ``generate``, ``batch`` prompts at a
        time.

        A batch is padded on the left and runs to its longest text, so similar requests share one.
        """
        self._check_requests(prompts, lengths, batch)
        order = sorted(range(len(prompts)), key=lambda index: (lengths[index], len(prompts[index])))
        tokens: list[tuple[int, ...]] = [()] * len(prompts)
        self._synchronize()
        started = time.perf_counter()
        for start in range(0, len(order), batch):
            members = order[start : start + batch]
            longest = max(len(prompts[index]) for index in members)
            prompts_BS = torch.zeros(len(members), longest, dtype=torch.int64)
            mask_BS = torch.zeros_like(prompts_BS)
            for row, index in enumerate(members):
                prompts_BS[row, longest - len(prompts[index]) :] = torch.tensor(prompts[index])
                mask_BS[row, longest - len(prompts[index]) :] = 1
            steps = lengths[members[-1]]
            made = self.model.generate(
                input_ids=prompts_BS.to(self.device),
                attention_mask=mask_BS.to(self.device),
                max_new_tokens=steps,
                min_new_tokens=steps,
                use_cache=True,
            )
            for index, row in zip(members, made[:, longest:].tolist(), strict=True):
                tokens[index] = tuple(row[: lengths[index]])
        return Served(tokens=tuple(tokens), seconds=time.perf_counter() - started)

    def serve_continuous(self, prompts: Prompts, lengths: Sequence[int], concurrency: int) -> Served:
        """Serve by the library's continuous batching, with up to ``concurrency`` requests at once.

        Its cache fits these and is made before the clock starts.

        Raises:
            Unsupported: this version of the library has none, or it fails here; with the reason.
        """
        self._check_requests(prompts, lengths, concurrency)
        logger = logging.getLogger("ContinuousBatchingLogger")
        level = logger.level
        # The library's handler prints advice each time; here failures are raised.
        logger.setLevel(logging.CRITICAL)
        try:
            return self._serve_continuous(prompts, lengths, concurrency)
        except Exception as error:  # the foreign library's thread may raise any exception
            raise Unsupported(
                f"transformers' continuous batching does not run here: {type(error).__name__}: {error}"
            ) from error
        finally:
            logger.setLevel(level)

    def _serve_continuous(self, prompts: Prompts, lengths: Sequence[int], concurrency: int) -> Served:
        import transformers

        library: Any = transformers  # untyped
        pages = sorted(
            (-(-(len(prompt) + new) // CONTINUOUS_PAGE) for prompt, new in zip(prompts, lengths, strict=True)),
            reverse=True,
        )
        config = library.ContinuousBatchingConfig(
            max_requests_per_batch=concurrency,
            page_size=CONTINUOUS_PAGE,
            # vLLM's scheduler admits no request while less than 15 % are free.
            num_blocks=1 + -(-sum(pages[:concurrency]) * 20 // 17),
            max_batch_tokens=CPU_BATCH_TOKENS if self.device.type == "cpu" else None,
            # Without a GPU, installed flash kernels cannot run.
            auto_switch_to_flash=self.device.type == "cuda",
        )
        greedy = library.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        found: dict[str, list[int]] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=config
        ) as manager:
            try:
                started = time.perf_counter()
                for index, (prompt, new) in enumerate(zip(prompts, lengths, strict=True)):
                    manager.add_request(list(prompt), request_id=str(index), max_new_tokens=new)
                while len(found) < len(prompts):
                    result = manager.get_result(timeout=1.0)
                    if result is None and not manager.is_running():
                        raise RuntimeError(f"its thread has ended: {manager.background_thread_status.fatal_error}")
                    if result is not None and result.error is not None:
                        raise RuntimeError(result.error)
                    if result is not None and result.is_finished():
                        found[result.request_id] = result.generated_tokens
                seconds = time.perf_counter() - started
            except BaseException:
                manager.stop(hard_stop=True)  # otherwise leaving the block would wait for all requests
                raise
        return Served(tokens=tuple(tuple(found[str(index)]) for index in range(len(prompts))), seconds=seconds)

    def _check_requests(self, prompts: Prompts, lengths: Sequence[int], batch: int) -> None:
        if not prompts or len(prompts) != len(lengths) or batch < 1 or min(lengths) < 1:
            raise InvalidArgument(
                f"at least one prompt, a number of new tokens above 0 for each, and a batch of at least 1 are needed; got "
                f"{len(prompts)} prompts, {len(lengths)} numbers from {min(lengths, default=0)} on, and {batch}"
            )
        for prompt in prompts:
            self._checked(torch.tensor([list(prompt)], dtype=torch.int64))

    def _checked(self, prompts_BS: Tensor) -> Tensor:
        if prompts_BS.ndim != 2 or not prompts_BS.numel() or prompts_BS.dtype != torch.int64:
            raise InvalidArgument(field="prompts", given=prompts_BS, allowed="int64 of shape [B, S]")
        lowest, highest = int(prompts_BS.min()), int(prompts_BS.max())
        if lowest < 0 or highest >= self.vocab_size:
            raise InvalidArgument(f"tokens must be in 0..{self.vocab_size - 1}, got {lowest}..{highest}")
        return prompts_BS.to(self.device)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Clock(LogitsProcessor):
    """Changes no logits; notes their times."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.stamps: list[float] = []
        self.cpu_stamps: list[float] = []
        self._synchronize = synchronize

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._synchronize()
        self.stamps.append(time.perf_counter())
        self.cpu_stamps.append(time.process_time())
        return scores
