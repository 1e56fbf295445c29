"""Bounds on the text of one token, read from a tokenizer's description.

A text with more bytes than that for each token of a context cannot fit, which is known without
tokenising it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import models

from quire.text.token_bytes import BYTE_OF_CHARACTER

_NORMALIZED = {"NFC": 4, "NFKC": 4, "NFD": 3, "NFKD": 4, "Lowercase": 3, "Prepend": 1}
"""Bytes of text that become one byte, at most: the Kelvin sign is a K, for example."""
_KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "UnicodeScripts"})
"""Pre-tokenizers that keep all of a text, unless they are set to remove the separators."""


def longest_token(backend: tokenizers.Tokenizer) -> int | None:
    """Return the bytes of text that one token stands for, at most. None: a token may stand for any
    amount, or text may be dropped: unknown characters, white space beside special tokens that take
    it, normalisers that are not known here."""
    shrinks, model = 1, backend.model
    for step in _steps(_description(backend.normalizer), "normalizers"):
        factor = _shrinks(step)
        if factor is None:
            return None
        shrinks *= factor
    splits = list(_steps(_description(backend.pre_tokenizer), "pretokenizers"))
    if any(step["type"] not in _KEEPING or step.get("behavior") == "Removed" for step in splits):
        return None
    added = backend.get_added_tokens_decoder().values()
    if not isinstance(model, models.BPE | models.Unigram) or any(token.lstrip or token.rstrip for token in added):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if any(step["type"] == "ByteLevel" for step in splits):
        # Each character stands for a byte, and every byte has one.
        complete, sizes = BYTE_OF_CHARACTER.keys() <= vocabulary.keys(), [len(token) for token in vocabulary]
    else:
        falls_back = model.byte_fallback if isinstance(model, models.BPE) else _description(model)["byte_fallback"]
        complete = bool(falls_back) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        sizes = [len(token.encode()) for token in vocabulary]
    if not complete:
        return None
    return shrinks * max([1, *sizes, *(len(token.content.encode()) for token in added)])


def _description(part: Any) -> Any:
    """Return the part of ``tokenizer.json`` for a normaliser, pre-tokenizer or model; None for
    None. All of it takes half a second for a vocabulary of 150,000 tokens."""
    return None if part is None else json.loads(part.__getstate__())


def _steps(given: Mapping[str, Any] | None, parts: str) -> Iterator[Mapping[str, Any]]:
    """Return the parts of a normaliser or pre-tokenizer, which may be nested sequences."""
    if given is not None and given["type"] == "Sequence":
        for step in given[parts]:
            yield from _steps(step, parts)
    elif given is not None:
        yield given


def _shrinks(step: Mapping[str, Any]) -> int | None:
    if step["type"] == "Replace" and "String" in step["pattern"] and step["content"]:
        return max(1, -(-len(step["pattern"]["String"].encode()) // len(step["content"].encode())))
    return _NORMALIZED.get(step["type"])
