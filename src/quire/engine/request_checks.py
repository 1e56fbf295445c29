"""What a model, its context and its pool can never serve, refused before anything is queued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import CONTEXT_FULL, InvalidArgument, ResourceExhausted, Unsupported, context_full
from quire.base.media import NO_MEDIA, Media
from quire.base.sampling_params import SamplingParams
from quire.base.token_history import LAST_PLACEHOLDER
from quire.text.long_texts import TextLimit

if TYPE_CHECKING:
    from quire.grammars.grammars import Grammars
    from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestChecks:
    """The limits of one engine."""

    vocab_size: int
    max_model_len: int
    pool_tokens: int
    """Tokens that the empty pool holds."""
    tokenizer: Tokenizer | None = None
    grammars: Grammars | None = None
    """None without a tokenizer."""

    @property
    def text_limit(self) -> TextLimit | None:
        """Return the longest text that can fit; None if a text's size does not tell."""
        longest = None if self.tokenizer is None else self.tokenizer.longest_token
        tokens = min(self.max_model_len, self.pool_tokens)
        return None if longest is None else TextLimit(tokens, tokens * longest)

    def text(self, text: object) -> None:
        """Raise ``InvalidArgument``, before tokenising, for a text too long whatever its tokens
        are."""
        # A token stands for a byte at least, so that nothing has to be known of short texts.
        if not isinstance(text, str) or len(text) * 4 <= min(self.max_model_len, self.pool_tokens):
            return
        if (limit := self.text_limit) is None:
            return
        size = len(text)
        if size <= limit.bytes:
            size = len(text.encode(errors="replace"))
        if size > limit.bytes:
            problem = f"The text has at least {size} bytes, and {limit.tokens} tokens hold at most {limit.bytes} bytes"
            raise context_full(limit.tokens, problem)

    def tokens(self, tokens: NDArray[np.int64], media: Media = NO_MEDIA) -> None:
        """Raise ``InvalidArgument`` for ids outside of the model and of ``media``'s embeddings."""
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size):
            for token in tokens.tolist():
                if not 0 <= token < self.vocab_size and token not in media.rows:
                    raise InvalidArgument(
                        f"token id {token} is outside of the model's vocabulary, 0..{self.vocab_size - 1}"
                    )

    def history(self, tokens: NDArray[np.int64]) -> None:
        """Check a history whose embeddings may be gone."""
        self.tokens(tokens[tokens >= LAST_PLACEHOLDER])

    def scored(self, tokens: NDArray[np.int64], params: SamplingParams) -> None:
        """Raise ``Unsupported`` if log-probabilities of embeddings are wanted."""
        if params.prompt_logprobs is not None and tokens.size and int(tokens.min()) < 0:
            raise Unsupported(
                "prompt_logprobs of a prompt with embeddings: an embedding has no probability; leave them out",
                field="prompt_logprobs",
            )

    def length(self, length: int, params: SamplingParams | None) -> int:
        """Refuse a prompt that can never run; return the length at which the sequence must end."""
        if length < 1:
            raise InvalidArgument("the prompt is empty; give at least one token", field="prompt")
        new = 0 if params is None else (params.max_tokens or 1)
        if length + (1 if params else 0) > self.max_model_len:
            problem = f"However, your prompt has {length} tokens"
            raise context_full(
                self.max_model_len,
                problem + ("; at least one token must be left to generate" if params else ""),
                "prompt",
            )
        if length + new > self.max_model_len:
            raise context_full(
                self.max_model_len,
                f"However, you requested {length + new} tokens ({length} in the prompt, {new} in the completion); "
                f"max_tokens up to {self.max_model_len - length} is accepted",
                "max_tokens",
            )
        # The last sampled token is never computed.
        if length + max(new - 1, 0) > self.pool_tokens:
            raise ResourceExhausted(
                f"This model's maximum context length is {self.pool_tokens} tokens here, as many as the whole KV pool holds. "
                f"However, you requested {length + new} tokens ({length} in the prompt, {new} in the completion); "
                "give fewer tokens, or a larger kv_cache_memory",
                field="prompt",
                code=CONTEXT_FULL,
            )
        return min(self.max_model_len, self.pool_tokens + 1)

    def params(self, params: SamplingParams, *, in_session: bool = False) -> None:
        """Refuse parameters that this model, or a session, cannot serve."""
        if in_session and params.n != 1:
            raise InvalidArgument(f"n is {params.n}; a session continues once (n=1), fork it for more", field="n")
        if params.stop_strings and self.tokenizer is None:
            raise Unsupported("stop strings need a tokenizer, and there is none; use stop_token_ids", field="stop")
        if params.words and self.tokenizer is None:
            raise Unsupported("bad_words need a tokenizer, and there is none; use logit_bias", field="bad_words")
        for name, ids in params.given_ids.items():
            for token in ids:
                if not 0 <= token < self.vocab_size:
                    raise InvalidArgument(field=name, given=token, allowed=f"token ids in 0..{self.vocab_size - 1}")
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if count is not None and count > self.vocab_size:
                raise InvalidArgument(field=name, given=count, allowed=f"at most {self.vocab_size}, the vocabulary")
        if params.grammar is not None:
            if self.grammars is None:
                raise Unsupported("structured_outputs need a tokenizer, and there is none", field="structured_outputs")
            self.grammars.check(params.grammar)
