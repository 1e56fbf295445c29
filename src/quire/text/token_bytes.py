"""The bytes that a token adds to a text, for decoding, streaming, log-probabilities and grammars.

A tokenizer's decoder maps a whole list of tokens to a string, and a character may span several
tokens. All decoders of generating models, however, concatenate: each token has its bytes, whatever
surrounds it, except that a text's first token may lose the space that encoding had put there.
``TokenBytes`` reads which concatenation it is from the decoder's own description:

- byte-level (GPT-2, Llama 3, Qwen, DeepSeek): each character of a token stands for one byte;
- SentencePiece-style (Llama 2, Mistral, Gemma): ``▁`` is a space, ``<0xNN>`` is a byte, one leading
  space is dropped;
- Metaspace (T5): ``▁`` is a space, dropped in the first token.

Any other decoder (WordPiece, BPE with end-of-word suffixes, CTC, none, and every other sequence of
steps) is asked for the text of the last tokens, again after each token (``DecoderStream``).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from quire.text.decoder_stream import DecoderStream

_CONTEXT = 64
"""The last tokens of a prompt that decide how its continuation begins."""
_MAX_PARTIAL_BYTES = 3
"""An incomplete UTF-8 sequence has at most this many bytes."""


def _byte_level_alphabet() -> dict[str, int]:
    """Map characters to bytes: printable Latin-1 is itself, the rest is shifted to U+0100
    (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_level_alphabet()
"""The byte that each character of a byte-level token stands for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Concatenation:
    """A decoder that concatenates: the bytes of a token, and what the text's beginning loses."""

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    marker: str = ""
    """Metaspace's stand-in for a space."""
    drops_first_marker: bool = False
    strip: bytes = b""
    """One ASCII character that is removed from the text's beginning, at most ``max_strips``
    times."""
    max_strips: int = 0

    def piece(self, token: str, *, first: bool) -> bytes:
        """Return the bytes of ``token``; ``first``: it is the first one of the text."""
        if self.byte_level:
            values = [BYTE_OF_CHARACTER.get(character, -1) for character in token]
            # An added token with a character outside the alphabet stands for itself.
            return token.encode() if -1 in values else bytes(values)
        if self.marker:
            token = token.replace(self.marker, "" if first and self.drops_first_marker else " ")
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                pass
        return token.encode()


def _parse_decoder(decoder: dict[str, Any] | None) -> Concatenation | None:
    """Return the concatenation that a tokenizer.json's decoder describes, None if it is unknown."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds and kinds[-1] == "Fuse" and kinds.count("Fuse") == 1:
        steps, kinds = steps[:-1], kinds[:-1]
    if kinds == ["ByteLevel"]:
        return Concatenation(byte_level=True)
    if kinds == ["Metaspace"]:
        scheme = steps[0].get("prepend_scheme", "always")
        return Concatenation(marker=steps[0]["replacement"], drops_first_marker=scheme != "never")
    # SentencePiece-style: Replace* ByteFallback? (Fuse Strip)?, in this order.
    strip, max_strips = b"", 0
    if kinds[-2:] == ["Fuse", "Strip"]:
        strip, max_strips = steps[-1]["content"].encode(), int(steps[-1]["start"])
        if len(strip) != 1 or steps[-1]["stop"] != 0:
            return None
        steps, kinds = steps[:-2], kinds[:-2]
    byte_fallback = kinds[-1:] == ["ByteFallback"]
    if byte_fallback:
        steps, kinds = steps[:-1], kinds[:-1]
    if any(kind != "Replace" or "String" not in step["pattern"] for kind, step in zip(kinds, steps, strict=True)):
        return None
    replacements = tuple((step["pattern"]["String"], step["content"]) for step in steps)
    return Concatenation(replacements=replacements, byte_fallback=byte_fallback, strip=strip, max_strips=max_strips)


class TokenBytes:
    """Token ids to bytes for one tokenizer; tables fill as ids are asked for."""

    def __init__(self, backend: tokenizers.Tokenizer, size: int | None = None) -> None:
        """``size``: the highest id plus one; None: it is looked up, which takes a while."""
        self._backend = backend
        if size is None:
            size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._size = size
        state = backend.decoder.__getstate__() if backend.decoder is not None else b"null"
        self._rule = _parse_decoder(json.loads(state))
        self._pieces: dict[int, bytes] = {}
        self.special_ids = frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        self._specials = np.array(sorted(self.special_ids), dtype=np.int64)

    @property
    def size(self) -> int:
        """Return the highest id of the tokenizer, plus one."""
        return self._size

    @property
    def concatenates(self) -> bool:
        """Return whether a token's bytes do not depend on its neighbours. If they do, a piece of
        text needs the token before it."""
        return self._rule is not None

    @property
    def rule(self) -> Concatenation | None:
        """Return the decoder's rule of concatenation; None if it has no such rule."""
        return self._rule

    def token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it, None for an id without one (padding)."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self._size else None

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of a token inside a text; empty for an unknown id. If the decoder does
        not concatenate: the bytes of the token alone."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self.token(token_id)
            if token is None:
                piece = b""
            elif self._rule is not None:
                piece = self._rule.piece(token, first=False)
            else:
                piece = self._backend.decode([token_id], skip_special_tokens=False).encode()
            self._pieces[token_id] = piece
        return piece

    def first_piece(self, token_id: int) -> bytes:
        """Return the bytes of a token that begins a text, before leading spaces are stripped."""
        token = self.token(token_id)
        if token is None or self._rule is None:
            return self.piece(token_id)
        return self._rule.piece(token, first=True)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of known ids by the decoder itself, special tokens spelled out."""
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def end_of(self, ids_T: NDArray[np.int64], *, skip_special_tokens: bool) -> list[int]:
        """Return as many of the last of these ids as a ``PieceStream`` needs for its context: only
        those that have a text, however many others are among them."""
        count = max(_CONTEXT, 0 if self._rule is None else self._rule.max_strips + 1)
        found: list[int] = []
        for part_T in (ids_T[-4 * count :], ids_T):  # mostly the end tells
            visible_T = part_T[part_T < self._size]
            if skip_special_tokens:
                visible_T = visible_T[~np.isin(visible_T, self._specials)]
            found = visible_T[-count:].tolist()
            if len(found) == count:
                break
        return found


class PieceStream:
    """Token ids to the bytes of one growing text, in constant time for each token.

    ``context`` are the ids before (a prompt): they decide whether the stream begins a text. With
    ``skip_special_tokens`` special tokens have no bytes and do not count, as when a decoder skips
    them. A decoder that does not concatenate gives whole characters only: ``finish`` has the rest.
    """

    def __init__(self, table: TokenBytes, context: Sequence[int] = (), *, skip_special_tokens: bool) -> None:
        self._table = table
        self._skipped = table.special_ids if skip_special_tokens else frozenset()
        self._is_first = True
        self._strips = table.rule.max_strips if table.rule is not None else 0
        self._decoded: DecoderStream | None = None
        if not table.concatenates:
            self._decoded = DecoderStream(table.decode, [one for one in context if self._is_visible(one)])
            return
        for token_id in context:
            self.push(token_id)
            if not self._is_first and not self._strips:
                break

    def fork(self) -> PieceStream:
        """Return a copy, for another continuation."""
        other = copy.copy(self)
        other._decoded = None if self._decoded is None else self._decoded.fork()
        return other

    def push(self, token_id: int) -> bytes:
        if not self._is_visible(token_id):
            return b""
        if self._decoded is not None:
            return self._decoded.push(token_id).encode()
        piece = self._table.first_piece(token_id) if self._is_first else self._table.piece(token_id)
        self._is_first = False
        return self._stripped(piece) if self._strips else piece

    def finish(self) -> bytes:
        """Return the bytes that were held back: none of a decoder that concatenates."""
        return b"" if self._decoded is None else self._decoded.finish().encode()

    @property
    def is_incomplete(self) -> bool:
        """Return whether bytes are held back."""
        return self._decoded is not None and self._decoded.is_incomplete

    def partial_character(self, context: Sequence[int]) -> bytes:
        """Return the bytes of an incomplete UTF-8 character at the end of ``context``; mostly
        none."""
        if not self._table.concatenates:
            return b""
        tail = b""
        for token_id in reversed(context):
            if self._is_visible(token_id):
                tail = self._table.piece(token_id)[-_MAX_PARTIAL_BYTES:] + tail
            if len(tail) >= _MAX_PARTIAL_BYTES:
                break
        tail = tail[-_MAX_PARTIAL_BYTES:]
        return next((tail[start:] for start in range(len(tail)) if _is_partial(tail[start:])), b"")

    def _is_visible(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._table.token(token_id) is not None

    def _stripped(self, piece: bytes) -> bytes:
        rule = self._table.rule
        assert rule is not None  # only a rule strips
        while self._strips and piece:
            if not piece.startswith(rule.strip):
                self._strips = 0
                break
            piece, self._strips = piece[1:], self._strips - 1
        return piece


def _is_partial(tail: bytes) -> bool:
    """Return whether ``tail`` begins one UTF-8 character and could still become it."""
    try:
        tail.decode()
    except UnicodeDecodeError as error:
        return error.start == 0 and error.reason == "unexpected end of data"
    return False


def join_pieces(table: TokenBytes, token_ids: Iterable[int], *, skip_special_tokens: bool) -> bytes:
    """Return the bytes of a whole text."""
    stream = PieceStream(table, skip_special_tokens=skip_special_tokens)
    return b"".join([*(stream.push(token_id) for token_id in token_ids), stream.finish()])
