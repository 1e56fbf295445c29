"""Where a text stands among the tokens of a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.base.errors import InvalidArgument, Unsupported
from quire.base.signatures import require_text
from quire.base.token_history import Ids
from quire.text.token_bytes import PieceStream, TokenBytes
from quire.text.tokenizer import Tokenizer

NO_TEXT = b"\xff"
"""In place of the bytes of special tokens and embeddings: no text has this byte."""


@dataclass(frozen=True, slots=True)
class TextPlace:
    """A range of tokens, and the text at its ends that does not belong to the searched text."""

    start: int
    stop: int
    before: str = ""
    after: str = ""


def place_of(tokenizer: Tokenizer, ids_T: Ids, text: str) -> TextPlace:
    """Return the fewest tokens that hold the only occurrence of a text. ``InvalidArgument`` if it
    does not occur, or more than once. ``Unsupported``: tokens have no texts of their own."""
    table = tokenizer.token_bytes
    if not table.concatenates:
        raise Unsupported(
            "the tokens of this model have no texts of their own, so that a text cannot be found among them; give positions",
            field="span",
        )
    pieces = pieces_of(table, ids_T, behind=[])
    whole, wanted = b"".join(pieces), require_text("span", text)
    if not wanted:
        raise InvalidArgument(field="span", given=text, allowed="a text of at least one character")
    if (at := whole.find(wanted)) < 0:
        raise InvalidArgument(
            f"the text {text[:80]!r} does not occur in the session, where special tokens are in no text; "
            "give one that does, or positions",
            field="span",
            given=text,
            allowed="a text that occurs once",
        )
    if whole.find(wanted, at + 1) >= 0:
        raise InvalidArgument(
            f"the text {text[:80]!r} occurs more than once in the session; give a longer one, or positions",
            field="span",
            given=text,
            allowed="a text that occurs once",
        )
    ends_T = np.cumsum([len(piece) for piece in pieces])
    start = int(np.searchsorted(ends_T, at, side="right"))
    stop = int(np.searchsorted(ends_T, at + len(wanted))) + 1
    # Further out, to where whole characters begin and end.
    while (before := text_of(whole[ends_T[start] - len(pieces[start]) : at])) is None and start:
        start -= 1
    while (after := text_of(whole[at + len(wanted) : ends_T[stop - 1]])) is None and stop < len(pieces):
        stop += 1
    if before is None or after is None:
        raise InvalidArgument(f"the text {text[:80]!r} stands beside part of a character; give positions", field="span")
    return TextPlace(start, stop, before, after)


def pieces_of(table: TokenBytes, ids_T: Ids, behind: Sequence[int] | None = None) -> list[bytes]:
    """Return the bytes of each token; ``NO_TEXT`` of those that have none. They stand ``behind``
    other tokens, which decide how their text begins; None: inside of a text."""
    texts = None if behind is None else PieceStream(table, behind, skip_special_tokens=True)
    push = table.piece if texts is None else texts.push
    return [NO_TEXT if one < 0 or one in table.special_ids else push(one) for one in ids_T.tolist()]


def changed_text(table: TokenBytes, token_id: int, behind: Ids, now_behind: Ids) -> bytes | None:
    """Return the bytes of a token ``behind`` other tokens; None if they are the same behind those
    that are to take their place."""
    before, after = (
        PieceStream(table, table.end_of(ids[ids >= 0], skip_special_tokens=True), skip_special_tokens=True).push(
            token_id
        )
        for ids in (behind, now_behind)
    )
    return None if before == after else before


def text_of(part: bytes) -> str | None:
    """Return the text of bytes; None if they begin or end inside of a character."""
    try:
        return part.decode()
    except UnicodeDecodeError:
        return None
