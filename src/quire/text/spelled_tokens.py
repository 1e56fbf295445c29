"""Special tokens that the text of messages spells stay text: only a template writes special ones.

Before a template gets messages, tools and documents, one character of each special token that they
spell is replaced by a stand-in, a private-use character that they do not have. No text changes its
length, and templates trim, slice and write it as they do. The rendered prompt is cut at both sides
of each stand-in, which becomes its character again, and the pieces are tokenised: none of them
spells the token, and all of them are the text that was given.

Special are the tokens that the tokenizer declares so, which no answer's text has, and those that
are written like them. Other added tokens (``<think>``, ``<tool_call>`` in many models) are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.base.signatures import require_nesting
from quire.text.control_tokens import NEVER, finder, place_in
from quire.text.template_programs import words_of
from quire.text.tokenizer import Tokenizer

_PRIVATE = ("\U00100000", "\U0010fffd")
"""The first and the last character of a plane for private use."""
_PRIVATE_TEXT = re.compile(f"[{_PRIVATE[0]}-{_PRIVATE[1]}]")


Tokens: TypeAlias = tuple[str, ...]


class SpelledTokens:
    """The texts of one conversation, in which special tokens are not spelled out."""

    def __init__(
        self, tokenizer: Tokenizer, template: str | None, *given: Any, parse_special: bool | None = None
    ) -> None:
        """Keep the texts in ``given`` apart from what ``template`` writes. ``parse_special``: leave
        them as they are; None: as the tokenizer does."""
        self._tokenizer, self._given = tokenizer, given
        self._every: Tokens = ()
        self._in_answers: Tokens = ()
        if not (tokenizer.parse_special if parse_special is None else parse_special):
            self._every, declared = tokenizer.control_tokens
            self._in_answers = _not_in(declared, frozenset() if template is None else words_of(template))
        self._free: Iterator[str] | None = None
        self._stand_ins: dict[str, str] = {}
        self._originals: dict[int, str] = {}
        self._cuts = NEVER

    def messages(self, messages: Any) -> Any:
        """Return messages for a template; what is no message stays as it is. ``InvalidArgument``
        for one that nests too deeply."""
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
            return messages
        for number, message in enumerate(messages):
            require_nesting(f"messages.{number}", message)
        return [self.of_role(one.get("role"), one) if isinstance(one, Mapping) else one for one in messages]

    def of_role(self, role: Any, value: Any) -> Any:
        """Return a message, or a value of it, with spelled tokens hidden as for this role."""
        return self._hidden(value, self._in_answers if role == "assistant" else self._every)

    def value(self, value: Any, name: str = "tools") -> Any:
        """Return texts for a template: tools, documents. ``InvalidArgument`` with their ``name`` if
        they nest too deeply."""
        require_nesting(name, value)
        return self._hidden(value, self._every)

    def variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return variables of a template. The tokenizer's own special tokens stay as they are."""
        own = self._tokenizer.special_tokens
        return {
            name: one if name in own and own[name] == one else self.value(one, name) for name, one in variables.items()
        }

    def shown(self, text: str) -> str:
        """Return a rendered prompt as it reads."""
        return self._unescaped(text).translate(self._originals)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text that is no template's, as ``Tokenizer.encode`` does, and special
        tokens that it spells as text."""
        first, rest = self._parts(self.value(text))
        return [*self._tokenizer.encode(first, add_special_tokens), *self._tokenizer.encode_inside(*rest)]

    def encode_rendered(self, text: str, *, inside: bool = False) -> list[int]:
        """Return the ids of a rendered prompt or a part of it, as ``Tokenizer.encode_rendered``
        does."""
        first, rest = self._parts(text)
        return self._tokenizer.encode_rendered(first, *rest, inside=inside)

    def encode_part(self, text: Any, first: bool) -> NDArray[np.int64]:
        """Return the ids of a part of a rendered prompt, the ``first`` one or another."""
        return np.array(self.encode_rendered(text, inside=not first), dtype=np.int64)

    def _parts(self, text: str) -> tuple[str, list[str]]:
        first, *rest = self._cuts.split(self._unescaped(text))
        return first, [part.translate(self._originals) for part in rest if part]

    def _unescaped(self, text: str) -> str:
        """Return a text in which stand-ins are themselves: templates may write JSON in ASCII, and
        lists as Python does."""
        for stand_in in self._stand_ins.values():
            for escaped in (json.dumps(stand_in), repr(stand_in)):
                text = text.replace(escaped[1:-1], stand_in)
        return text

    def _hidden(self, value: Any, tokens: Tokens) -> Any:
        if not tokens:
            return value
        if isinstance(value, str):
            return self._text(value, tokens)
        if isinstance(value, Mapping):
            found = {self._hidden(key, tokens): self._hidden(one, tokens) for key, one in value.items()}
            if isinstance(given := value.get("arguments"), str):
                found["arguments"] = self._arguments(given, tokens)
            return found
        return [self._hidden(one, tokens) for one in value] if isinstance(value, (list, tuple)) else value

    def _text(self, text: str, tokens: Tokens) -> str:
        found = finder(tokens)
        while found.search(text):  # tokens may overlap
            text = found.sub(self._without_token, text)
        # A normaliser may make a token of other text.
        while (place := self._tokenizer.normalized_token(text, tokens, self._originals)) is not None:
            text = text[:place] + self._stand_in(text[place]) + text[place + 1 :]
        return text

    def _without_token(self, found: re.Match[str]) -> str:
        token = found.group()
        at = place_in(token)
        return token[:at] + self._stand_in(token[at]) + token[at + 1 :]

    def _arguments(self, text: str, tokens: Tokens) -> str:
        """Return the arguments of a call, whose JSON may spell tokens with escapes."""
        if "\\" in text:
            with suppress(ValueError, RecursionError):
                given = json.loads(text)
                if (found := self._hidden(given, tokens)) != given:
                    return json.dumps(found, ensure_ascii=False)
        return self._text(text, tokens)

    def _stand_in(self, original: str) -> str:
        if original not in self._stand_ins:
            if self._free is None:
                used = set(
                    _PRIVATE_TEXT.findall(json.dumps(self._given, ensure_ascii=False, skipkeys=True, default=str))
                )
                codes = range(ord(_PRIVATE[1]), ord(_PRIVATE[0]) - 1, -1)
                self._free = (one for one in map(chr, codes) if one not in used)
            self._stand_ins[original] = stand_in = next(self._free)
            self._originals[ord(stand_in)] = original
            self._cuts = re.compile(f"([{''.join(self._stand_ins.values())}])")
        return self._stand_ins[original]


@lru_cache(maxsize=64)
def _not_in(tokens: Tokens, words: frozenset[str]) -> Tokens:
    """Return the tokens that a template does not search in the text of answers, as it may for
    </think>, which is for it to read."""
    return tuple(token for token in tokens if not any(token in word for word in words))
