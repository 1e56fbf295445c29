"""Sampling state of one request: its parameters, its random stream, the tokens that it has seen.

Letters: V vocabulary; N distinct token ids.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument, QuireError
from quire.base.interrupts import exposed
from quire.base.sampling_params import SamplingParams
from quire.sampling.exclusions import NO_EXCLUSIONS, Exclusions
from quire.sampling.filters import Ids

Values = npt.NDArray[np.float32]


def make_generator(seed: int | None, index: int = 0, entropy: torch.Generator | None = None) -> torch.Generator:
    """Make the CPU generator of sample ``index`` of a request.

    With a seed (any 64-bit integer, signed or unsigned; -1 and 2**64 - 1 are the same) it is seeded
    with the first 8 bytes, little-endian, of ``BLAKE2b(seed as 8 bytes || index as 8 bytes)``, both
    little-endian, so that neighbouring seeds and indices have unrelated streams. This is fixed for
    all releases. Without one the seed is drawn from ``entropy``. (PyTorch's CPU generator, MT19937,
    uses 32 bits of its seed: two given streams are equal by chance with probability 2**-32.)"""
    if index < 0:
        raise InvalidArgument(f"index of a sample must be >= 0, got {index}")
    if seed is None:
        if entropy is None:
            raise InvalidArgument(
                "a request without a seed needs `entropy`, a torch.Generator to draw one from; got None for both"
            )
        seed = int(torch.randint(2**63 - 1, (), generator=entropy))
    data = (seed % 2**64).to_bytes(8, "little") + index.to_bytes(8, "little")
    mixed = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return torch.Generator().manual_seed(mixed)


class TokenCounts:
    """Distinct tokens of a request and their counts in the output; adding a token is O(1)."""

    def __init__(self, prompt_ids: Ids) -> None:
        unique = np.unique(prompt_ids)
        self._slots = {token: slot for slot, token in enumerate(unique.tolist())}
        self.num_prompt = len(unique)
        """Number of distinct tokens of the prompt, the first of ``ids_N``."""
        self._ids = unique
        self._counts = np.zeros(len(unique), dtype=np.float32)

    def add(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros(max(16, slot), dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(len(self._ids) - slot, dtype=np.float32)))
        self._ids[slot] = token
        self._counts[slot] += 1

    @property
    def ids_N(self) -> Ids:
        """Distinct token ids of prompt and output."""
        return self._ids[: len(self._slots)]

    @property
    def counts_N(self) -> Values:
        """Counts in the output; 0 for tokens of the prompt only."""
        return self._counts[: len(self._slots)]


class RequestSampler:
    """Sampling state of one sample of one request: parameters, generator, counts of its tokens. The
    caller reports every token of the output by ``observe``; ``sample`` only advances the generator.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] | Ids = (),
        *,
        vocab_size: int,
        index: int = 0,
        entropy: torch.Generator | None = None,
        exclusions: Exclusions | None = None,
    ) -> None:
        """Prepare sample ``index`` of the request's n samples; ``entropy``: see ``make_generator``.
        ``exclusions`` None: those of the parameters without ``bad_words``, which are texts.
        ``InvalidArgument`` if the prompt or the parameters name a token outside the vocabulary, or
        ``logprobs`` exceeds its size."""
        given = np.asarray(prompt_ids)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise InvalidArgument(f"prompt must be one list of token ids, got {given.dtype} {list(given.shape)}")
        prompt = given.astype(np.int64)
        # As objects, since 64 bits may be too few.
        given_ids = {name: np.array([*ids], dtype=object) for name, ids in params.given_ids.items()}
        for name, ids in {"prompt": prompt, **given_ids}.items():
            check_ids(name, ids, vocab_size)
        self.bias_ids_N: Ids = given_ids["logit_bias"].astype(np.int64)
        self.bias_N: Values = np.fromiter(params.token_bias.values(), dtype=np.float32)
        if params.logprobs is not None and params.logprobs > vocab_size:
            raise InvalidArgument(f"logprobs must be at most the vocabulary size {vocab_size}, got {params.logprobs}")
        self.params = params
        self.vocab_size = vocab_size
        self.exclusions = Exclusions.of(params, vocab_size) if exclusions is None else exclusions
        self.counts: TokenCounts | None = None
        self.restart(prompt)
        self._generator = None if params.is_greedy else make_generator(params.seed, index, entropy)
        self._returned: list[float] = []

    def restart(self, prompt: Ids) -> None:
        """Replace all seen tokens by those of a prompt; the generator goes on."""
        self.output: list[int] = []
        """Tokens drawn so far; kept only if ``reads_output`` or penalties count them."""
        if self.params.needs_history:
            # Presence and frequency penalties count only the output; only repetition counts the
            # prompt.
            self.counts = TokenCounts(prompt if self.params.repetition_penalty != 1.0 else prompt[:0])

    def fork(self, params: SamplingParams) -> RequestSampler:
        """Return an independent sampler with the same state. ``params``: its parameters, equal to
        this one's in all fields that decide a token."""
        found = copy.copy(self)
        found.params, found.output, found._returned = params, list(self.output), list(self._returned)
        found.counts = copy.deepcopy(self.counts)
        found._generator = None if self._generator is None else self._generator.clone_state()
        return found

    @property
    def prompt_ids(self) -> list[int]:
        """Return the distinct prompt tokens that penalties count."""
        found: list[int] = [] if self.counts is None else self.counts.ids_N[: self.counts.num_prompt].tolist()
        return found

    @property
    def takes_maximum(self) -> bool:
        """Return True if the row's token is the first maximum of the logits, unless a grammar or a
        ban forbids it."""
        if self.counts is not None or len(self.bias_ids_N) > 0 or self.exclusions is not NO_EXCLUSIONS:
            return False
        return self.params.is_greedy and not self.params.logits_processors

    @property
    def reads_output(self) -> bool:
        """Return True if a draw needs the tokens before it on the host."""
        return bool(self.params.logits_processors or self.exclusions.sequences)

    def observe(self, token_id: int) -> None:
        """Record that ``token_id`` joined the output. ``InvalidArgument`` outside the
        vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise InvalidArgument(f"token id must be in 0..{self.vocab_size - 1}, got {token_id}")
        if self.counts is not None:
            self.counts.add(token_id)
        if self.counts is not None or self.reads_output:
            self.output.append(token_id)

    def process(self, logits_V: Tensor) -> Tensor:
        """Return edited logits ``[V]`` after the user's processors, which may change them in place.
        ``QuireError`` names a processor that raised, or returned no float32 ``[V]``, NaN or +inf.
        It also names a processor after which every logit is -inf, unless a later one allows a token
        again."""
        closed = bool(logits_V.isneginf().all())
        closed_by = ""
        for number, processor in enumerate(self.params.logits_processors or ()):
            name = f"logits_processors[{number}] ({getattr(processor, '__name__', type(processor).__name__)})"
            try:
                made = exposed(partial(processor, list(self.output), logits_V))
            except Exception as error:
                raise QuireError(f"{name} raised {type(error).__name__}: {error}") from error
            if not isinstance(made, Tensor):
                raise QuireError(f"{name} must return logits, a float32 tensor [{self.vocab_size}], got {made!r:.100}")
            if made.dtype != torch.float32 or list(made.shape) != [self.vocab_size]:
                raise QuireError(f"{name} must return float32 [{self.vocab_size}], got {made.dtype} {list(made.shape)}")
            logits_V = made.detach()
            # NaN and +inf, neither of which is below +inf.
            bad = (~(logits_V < torch.inf)).nonzero()
            if len(bad):
                token = int(bad[0])
                raise QuireError(f"{name} returned {float(logits_V[token])} as the logit of token {token}")
            was_closed, closed = closed, bool(logits_V.isneginf().all())
            if not was_closed:
                closed_by = name
        if closed and closed_by:
            raise QuireError(f"{closed_by} returned -inf as the logit of every token, so that there is none to draw")
        return logits_V

    def uniform(self) -> float:
        """Return the next number of the request's stream: a multiple of 2**-53 in [0, 1)."""
        if self._generator is None:
            raise FailedPrecondition(
                "a greedy request has no random stream; ask for uniform numbers only when temperature > 0"
            )
        if self._returned:
            return self._returned.pop()
        return float(torch.rand((), dtype=torch.float64, generator=self._generator))

    def rollback(self, uniform: float) -> None:
        """Make the last drawn number the next one again. Take several back in reverse order."""
        self._returned.append(uniform)


def check_ids(name: str, ids: npt.NDArray[Any], vocab_size: int) -> None:
    """Raise ``InvalidArgument`` if a token lies outside the vocabulary."""
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        bad = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise InvalidArgument(f"{name}: token ids must be in 0..{vocab_size - 1}, got {bad}")
