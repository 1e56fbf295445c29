"""Log-probabilities in the two shapes that OpenAI has for them.

Completions: parallel lists of the tokens' texts, log-probabilities, most probable alternatives, and
offsets in the text. Chat: an object for each token, with its bytes, since several tokens may make
one character.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.base.outputs import Logprob
from quire.text.token_bytes import PieceStream
from quire.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""vLLM's replacement for -inf, which JSON does not have."""

Entry = Mapping[int, Logprob]
"""The chosen token first, then the most probable ones."""


def finite(logprob: float) -> float:
    """Return a log-probability as JSON can hold it."""
    return max(logprob, LOWEST)


class Offsets:
    """Offsets of tokens in their text, in characters. Within a character, that of the next one."""

    def __init__(self, tokenizer: Tokenizer | None, context: Sequence[int], *, skip_special_tokens: bool) -> None:
        """Begin after ``context``, the ids before the text."""
        self._pieces = (
            None
            if tokenizer is None
            else PieceStream(tokenizer.token_bytes, context, skip_special_tokens=skip_special_tokens)
        )
        self._characters = 0

    def push(self, token_id: int) -> int:
        """Return the offset of ``token_id``, the next token."""
        start = self._characters
        if self._pieces is not None:
            # Count a character at its first byte. All other bytes of UTF-8 look like 10xxxxxx.
            self._characters += sum(byte & 0xC0 != 0x80 for byte in self._pieces.push(token_id))
        return start


def completion_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry | None], count: int, offsets: Offsets, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return the four lists for the next tokens of ``offsets``. ``count``: most probable tokens
    beside each one. The entry None, of a prompt's first token, is null. ``tokenizer`` None: tokens
    are named by their ids."""
    tokens: list[str] = []
    chosen: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        tokens.append(_text(token_id, tokenizer))
        if entry is None:
            chosen.append(None)
            top.append(None)
            continue
        chosen.append(finite(entry[token_id].logprob))
        texts: dict[str, float] = {}
        for other, found in _kept(entry, count):
            # Of several tokens with one text (parts of characters), the most probable one counts.
            text, logprob = _text(other, tokenizer), finite(found.logprob)
            texts[text] = max(logprob, texts.get(text, logprob))
        top.append(texts)
    return {
        "tokens": tokens,
        "token_logprobs": chosen,
        "top_logprobs": top,
        "text_offset": [offsets.push(token_id) for token_id in token_ids],
    }


def chat_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Entry],
    count: int,
    tokenizer: Tokenizer | None,
    *,
    by_id: bool = False,
) -> dict[str, Any]:
    """Return ``{"content": [...]}``. ``count``: most probable tokens beside each one. ``by_id``:
    tokens are named by their ids, as they are without a tokenizer."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        best = sorted(entry.items(), key=lambda item: item[1].rank)[:count]
        content.append(
            {
                **_token(token_id, entry[token_id], tokenizer, by_id),
                "top_logprobs": [
                    _token(other, found, tokenizer, by_id) for other, found in best if found.rank <= count
                ],
            }
        )
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[Entry | None] | None, count: int) -> list[dict[str, Any] | None] | None:
    """Return vLLM's shape: for each token of the prompt an object by id, null for the first one."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token_id): {"logprob": finite(found.logprob), "rank": found.rank, "decoded_token": found.decoded_token}
            for token_id, found in _kept(entry, count)
        }
        for entry in entries
    ]


def _kept(entry: Entry, count: int) -> list[tuple[int, Logprob]]:
    """Return the chosen token and the ``count`` most probable ones of an entry."""
    return [
        (token_id, found) for number, (token_id, found) in enumerate(entry.items()) if not number or found.rank <= count
    ]


def _token(token_id: int, found: Logprob, tokenizer: Tokenizer | None, by_id: bool) -> dict[str, Any]:
    piece = None if tokenizer is None else list(tokenizer.token_bytes.piece(token_id))
    text = _text(token_id, None if by_id else tokenizer)
    return {"token": text, "logprob": finite(found.logprob), "bytes": piece}


def _text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """Return the token's text; without a tokenizer its id, as vLLM writes it."""
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)
