"""The outputs of new samples: what draws their tokens, and what turns them into text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.base.sampling_params import SamplingParams
from quire.base.token_history import TokenHistory
from quire.engine.request import Output
from quire.grammars.grammars import Grammars
from quire.sampling.request_sampler import RequestSampler
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SampleOutputs:
    """The maker of outputs of one engine. ``entropy`` draws the seeds of samples without one."""

    tokenizer: Tokenizer | None
    grammars: Grammars | None
    vocab_size: int
    entropy: torch.Generator

    def make(self, tokens: TokenHistory, params: SamplingParams, index: int) -> Output:
        """Return the output of the sample with this index, which follows ``tokens``."""
        detokenizer = matcher = None
        spoken = tokens.ids[tokens.ids >= 0]  # An image has no text, and no penalty counts it.
        context: list[int] = []
        if self.tokenizer is not None:
            table = self.tokenizer.token_bytes
            context = table.end_of(spoken, skip_special_tokens=params.skip_special_tokens)
        if params.grammar is not None and self.grammars is not None:
            matcher = self.grammars.matcher(params.grammar)
            context = self.grammars.context(context)
        if self.tokenizer is not None:
            detokenizer = IncrementalDetokenizer(
                self.tokenizer,
                context,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop_strings,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        sampler = RequestSampler(params, spoken, vocab_size=self.vocab_size, index=index, entropy=self.entropy)
        return Output(sampler=sampler, detokenizer=detokenizer, matcher=matcher)
