"""Texts tokenised by rules of strangers, in a child process with limits.

A regular expression may take the square of a text's length, or more, and a normaliser may make a
text a million times as long. Neither can be stopped on the way. So a tokenizer whose expressions
popular models do not have, or which makes texts much longer, tokenises in a child whose
memory and time have limits. Its ids are the same.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import tokenizers

from quire.base.errors import InvalidArgument
from quire.text.limited_process import LimitedProcess, LimitReached, serve

SECONDS = 10.0
"""How long one call may take."""

GROWTH = 64
"""Times that a text may become as long, at most, to be tokenised in this process."""

ADDED = 64
"""Characters, or tokens, that may be put around a text, to be tokenised in this process."""

ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LOWER, UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
WORD = r"[^\r\n\p{L}\p{N}]?"
"""Parts of expressions that split texts into words."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{ENDS}|{WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}"
QWEN2 = rf"{ENDS}|{WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}"
O200K = (
    rf"{WORD}{UPPER}*{LOWER}+{ENDS}?|{WORD}{UPPER}+{LOWER}*{ENDS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{TAIL}"
)
KNOWN = frozenset(
    {
        *(r"\p{N}", r"\p{N}{1,3}", r"\d", r"[0-9][0-9][0-9]", r"\s+", r" {2,}"),
        r"\n[ ]*|[ ]?[A-Za-z_]+|[0-9]| ?[^\sA-Za-z0-9_]+|\s+(?!\S)|\s+",
        *(GPT2, LLAMA3, QWEN2, O200K),
    }
)
"""Expressions of GPT-2, Llama 3, Qwen 2, o200k, the bundled model and others. They take time in
proportion to a text: a match includes all characters that were read for it."""


class TextEncoder:
    """Tokenises with a backend, in this process if that is safe."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._process: LimitedProcess | None = None
        self._is_safe: bool | None = None

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text. ``InvalidArgument`` if that takes too much."""
        if self._here():
            # The call for batches lets other Python threads run meanwhile, that for single texts
            # does not.
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            return [one.ids for one in found]
        ids: list[list[int]] = self._asked(texts=list(texts), add_special_tokens=add_special_tokens)["ids"]
        return ids

    def places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of a text without special ones around it, and the characters from
        and to which each one stands. ``InvalidArgument`` if that takes too much."""
        if self._here():
            found = self._backend.encode(text, add_special_tokens=False)
            return found.ids, found.offsets
        answer = self._asked(texts=[text], add_special_tokens=False)
        return answer["ids"][0], [(start, stop) for start, stop in answer["places"][0]]

    def _here(self) -> bool:
        """Return whether this process tokenises."""
        if self._is_safe is None:
            self._is_safe = is_safe(self._backend)
        return self._is_safe

    def _asked(self, **request: Any) -> dict[str, Any]:
        if self._process is None:
            start = "from quire.text.tokenizer_process import serve_ids; serve_ids()"
            greeting = {"tokenizer": self._backend.to_str()}
            self._process = LimitedProcess("the process that tokenises", start, greeting)
        try:
            answer = self._process.ask(request, SECONDS)
        except LimitReached as error:
            raise InvalidArgument(f"the tokenizer {error} for the text; give a shorter one") from error
        if "failed" in answer:
            raise InvalidArgument(f"the tokenizer failed on the text: {answer['failed']}")
        return answer


def is_safe(backend: tokenizers.Tokenizer) -> bool:
    """Return whether tokenising takes time and memory in proportion to a text."""
    return _are_safe(backend.normalizer, backend.pre_tokenizer, backend.post_processor)


def check_decoder(backend: tokenizers.Tokenizer) -> None:
    """Refuse a tokenizer whose decoder may take any time or memory: ``InvalidArgument``."""
    if not _are_safe(backend.decoder):
        raise InvalidArgument(
            "the tokenizer's decoder has a regular expression that is not known, or makes texts more than "
            f"{GROWTH} times as long; take another tokenizer.json"
        )


def _are_safe(*parts: Any) -> bool:
    steps = [step for part in parts if part is not None for step in _objects(_state_of(part))]
    return all(map(_is_safe, steps)) and math.prod(map(_growth, steps)) <= GROWTH


def _state_of(part: Any) -> Any:
    try:
        return json.loads(part.__getstate__())
    except Exception:  # a part that is written in Python
        return {"Regex": None}


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(item)


def _is_safe(step: dict[str, Any]) -> bool:
    if "Regex" in step:
        return step["Regex"] in KNOWN
    added = (step.get(name) for name in ("prepend", "replacement", "single", "ids"))
    return all(len(one) <= ADDED for one in added if isinstance(one, str | list))


def _growth(step: dict[str, Any]) -> float:
    """Return the factor by which a step may lengthen a text."""
    pattern = step.get("pattern")
    if step.get("type") == "Replace" and isinstance(pattern, dict):
        return max(1.0, len(step["content"].encode()) / max(1, len(pattern.get("String", " ").encode())))
    if step.get("type") == "Precompiled":
        # It replaces characters that have three bytes, nearly all of them.
        return max(1.0, _longest(base64.b64decode(step["precompiled_charsmap"])) / 3)
    return 1.0


def _longest(charsmap: bytes) -> int:
    """Return the length of the longest text in SentencePiece's table of replacements."""
    size = int.from_bytes(charsmap[:4], "little")
    return max(map(len, charsmap[4 + size :].split(b"\0")), default=0)


# -- in the child ----------------------------------------------------------------------------------


def serve_ids() -> None:
    """Tokenise in the child, by the tokenizer of the greeting."""
    held: list[tokenizers.Tokenizer] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if "tokenizer" in request:
            held[:] = [tokenizers.Tokenizer.from_str(request["tokenizer"])]
            return {}
        try:
            found = held[0].encode_batch(request["texts"], add_special_tokens=request["add_special_tokens"])
        except MemoryError:
            raise
        except BaseException as error:  # also a panic of Rust
            return {"failed": str(error)[:200]}
        return {"ids": [one.ids for one in found], "places": [one.offsets for one in found]}

    serve(answer)
