"""The draws of ``sample_tokens``: by ``SamplingParams`` with a generator, or a ``RequestSampling``.

Letters: R rows of logits; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument, QuireError, Unsupported
from quire.base.sampling_fields import Surface, declarations_on
from quire.base.sampling_params import SamplingParams
from quire.base.signatures import checks_arguments
from quire.base.token_history import Ids
from quire.contracts.executor import RequestSampling
from quire.sampling.request_sampler import RequestSampler
from quire.sampling.sampler import probabilities, sample

Draw: TypeAlias = Callable[[Tensor], int]
"""From logits ``[1, V]`` to the next id of one row, which joins the row's output."""


_NO_TEXT = "an executor makes no text; decode its ids yourself"
REASONS: Mapping[str, str] = {
    "n": "a row is continued once; give a cache of several rows to sample_tokens_batch",
    "logprobs": "sample_tokens returns ids only; step returns the logits of each token",
    "prompt_logprobs": "sample_tokens returns ids only; prefill has no logits to give, and LLM.generate does",
    "structured_outputs": "a grammar is over text, and an executor has no tokenizer; give a RequestSampling that masks logits, "
    "or use LLM.generate",
    "bad_words": "words are text, and an executor has no tokenizer; give a RequestSampling that masks logits",
    "exact": "a call runs what it is given together; LLM.generate verifies tokens alone",
    "logits_processors": "give a RequestSampling, whose probabilities are its own",
    "skip_special_tokens": _NO_TEXT,
    "include_stop_str_in_output": _NO_TEXT,
}
"""Reasons for refusing fields; fields without an entry concern stopping."""


def check_params(params: SamplingParams) -> SamplingParams:
    """Return the parameters; ``Unsupported``, with the reason, for a field that executors do not
    use."""
    default, taken = SamplingParams(), declarations_on(SamplingParams, Surface.EXECUTORS)
    for name in default.__dataclass_fields__:
        if name not in taken and getattr(params, name) != getattr(default, name):
            reason = REASONS.get(name, "an executor draws exactly as many ids as it is asked for")
            raise Unsupported(
                f"{name}={getattr(params, name)!r:.80}: {reason}; leave {name} at {getattr(default, name)!r}"
            )
    return params


def check_steps(verb: str, num_steps: int, params: SamplingParams) -> None:
    """Raise ``InvalidArgument`` for more steps than ``max_tokens``. Its default does not count,
    because it is meant for texts."""
    most = params.max_tokens
    if most is not None and most != SamplingParams().max_tokens and num_steps > most:
        raise InvalidArgument(
            f"{verb}: num_steps is {num_steps}, and max_tokens of the sampling parameters {most}; ask for at most as many "
            "steps, or leave max_tokens out",
            field="num_steps",
        )


@checks_arguments()
class ParamsSampling:
    """``RequestSampling`` from ``SamplingParams``: one request's parameters, generator and tokens.
    It draws the same tokens as the serving engine for equal parameters, logits, history and seed.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] | Ids = (),
        *,
        vocab_size: int,
        index: int = 0,
        entropy: torch.Generator | None = None,
    ) -> None:
        """Make a sampler. Without a seed in ``params``, ``entropy`` or the system gives the
        seed."""
        if entropy is None:
            entropy = torch.Generator()
            entropy.seed()
        self.params = check_params(params)
        self.sampler = RequestSampler(params, prompt_ids, vocab_size=vocab_size, index=index, entropy=entropy)

    def restart(self, prompt_ids: Sequence[int] | Ids) -> None:
        """Begin another request with the same generator and only ``prompt_ids`` as history."""
        self.sampler.restart(np.asarray(prompt_ids, dtype=np.int64))

    def observe(self, token: int) -> None:
        """Add ``token`` to the output's tokens."""
        self.sampler.observe(token)

    def draw(self, logits_1V: Tensor) -> int:
        """Draw the next token, which joins the output, as the serving engine does."""
        drawn = sample(logits_1V, [self.sampler])
        drawn.raise_failures()
        self.observe(drawn.token_ids[0])
        return drawn.token_ids[0]

    def probabilities(self, logits_RV: Tensor, drafted: Sequence[int]) -> Tensor:
        """See ``RequestSampling``."""
        count = logits_RV.shape[0]
        if count > len(drafted) + 1:
            raise InvalidArgument(f"logits_RV has {count} rows for {len(drafted)} drafts; at most one more is accepted")
        rows = [self._at(drafted[: len(drafted) - count + 1 + row]) for row in range(count)]
        return probabilities(logits_RV, rows).float()

    def _at(self, drafted: Sequence[int]) -> RequestSampler:
        """Return a sampler in the state after ``drafted``; the generator is not touched."""
        if not self.params.needs_history:
            return self.sampler
        sampler = self.sampler.fork(self.params)
        for token in drafted:
            sampler.observe(token)
        return sampler

    def uniform(self) -> float:
        """See ``RequestSampling``. Greedy parameters draw nothing: 0.0 accepts certain tokens."""
        return 0.0 if self.params.is_greedy else self.sampler.uniform()


def drawing(sampling: RequestSampling) -> Draw:
    """Return a function that draws from the distributions of ``sampling`` by inverse CDF."""
    if not callable(getattr(sampling, "probabilities", None)) or not callable(getattr(sampling, "uniform", None)):
        allowed = "SamplingParams or have probabilities() and uniform()"
        raise InvalidArgument(field="sampling", given=sampling, allowed=allowed)
    drawn: list[int] = []

    def draw(logits_1V: Tensor) -> int:
        p_1V = sampling.probabilities(logits_1V, tuple(drawn))
        if tuple(p_1V.shape) != tuple(logits_1V.shape):
            raise QuireError(f"sampling made {list(p_1V.shape)} of logits {list(logits_1V.shape)}")
        drawn.append(draw_from(p_1V[0], sampling.uniform()))
        return drawn[-1]

    return draw


def draw_from(p_V: Tensor, u: float) -> int:
    """Return the token at which the cumulative sum passes ``u`` in [0, 1); never a token of
    probability 0."""
    ids = p_V.nonzero()[:, 0]
    sums = p_V[ids].double().cumsum(0)
    if not len(ids) or not bool(sums[-1].isfinite()) or bool((p_V < 0).any()):
        raise QuireError("a token cannot be drawn: the probabilities are no distribution")
    # The last sum stands for 1, so that rounding leaves no gap above it.
    index = int(torch.searchsorted(sums, sums[-1] * u, right=True))
    return int(ids[min(index, len(ids) - 1)])


def known_ids(known: Ids | None) -> Ids:
    """Return the ids of a row, which a repetition penalty counts; ``FailedPrecondition``: they are
    not known."""
    if known is None:
        raise FailedPrecondition(
            "repetition_penalty needs the token ids of the cache, and they are not known; use 1.0, or prefill the tokens"
        )
    return known
