"""``TextReader``: the texts of tokens, as they are shown. Nothing here needs the engine's lock."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from quire.base.errors import InvalidArgument
from quire.base.token_history import Ids
from quire.contracts.views import MOST_TEXT, ShownToken, TextView
from quire.text.tokenizer import Tokenizer
from quire_inspector.views.state_reading import ReadBranch
from quire_inspector.views.viewer import Viewer

MOST_TOKENS = 2048
"""Tokens of one ``TextView``, at most."""
LOOKED_AT = 2 * MOST_TEXT
"""Tokens of an edge of which the head and the tail are made, at most, at each end."""
REMEMBERED = 16_384
"""Heads and tails that are kept."""
EMBEDDING = "\N{OBJECT REPLACEMENT CHARACTER}"
"""What stands for an embedding in a text."""


class TextReader:
    """The texts of one tokenizer's tokens. Any thread may call."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Read with a tokenizer; None: there are no texts."""
        self._tokenizer = tokenizer
        self._known: OrderedDict[tuple[bool, bytes], str] = OrderedDict()
        self._lock = Lock()

    @property
    def is_there(self) -> bool:
        """Return whether there are texts, which take a tokenizer."""
        return self._tokenizer is not None

    def tokens(self, branch: ReadBranch, start: int, stop: int) -> tuple[ShownToken, ...]:
        """Return tokens of a branch, as far as it has them."""
        return tuple(
            ShownToken(position=start + number, id=token, text=self.token(token))
            for number, token in enumerate(branch.given(start, stop))
        )

    def token(self, token: int) -> str | None:
        """Return the text of one token; None without a tokenizer, or of an embedding."""
        if self._tokenizer is None or token < 0:
            return None
        return self._tokenizer.token_text(token)

    def view(self, branch: ReadBranch, viewer: Viewer, start: int, stop: int | None) -> TextView:
        """Return tokens ``start`` to ``stop`` (None: all, or as many as fit), or to the end if that
        comes before. ``InvalidArgument`` for a start that the branch has not, a stop before it, and
        more than ``MOST_TOKENS``."""
        if not 0 <= start <= branch.length:
            raise InvalidArgument(field="start", given=start, allowed=f"a position in 0..{branch.length}")
        if stop is None:
            stop = start + MOST_TOKENS
        if stop < start:
            raise InvalidArgument(field="stop", given=stop, allowed=f"a position from start={start} on")
        if stop - start > MOST_TOKENS:
            raise InvalidArgument(
                f"stop - start is {stop - start}; at most {MOST_TOKENS} tokens are given at a time", field="stop"
            )
        stop = min(stop, branch.length)
        return TextView(branch=viewer.id_of(branch), num_tokens=branch.length, tokens=self.tokens(branch, start, stop))

    def ends(self, ids_T: Ids) -> tuple[str | None, str | None]:
        """Return the first and the last ``MOST_TEXT`` characters of tokens; or all and "" if these
        would meet. None, None without a tokenizer."""
        if self._tokenizer is None:
            return None, None
        head = self._text(ids_T[:LOOKED_AT], first=True)
        if ids_T.size <= LOOKED_AT and len(head) <= 2 * MOST_TEXT:
            return head, ""
        return head[:MOST_TEXT], self._text(ids_T[-LOOKED_AT:], first=False)[-MOST_TEXT:]

    def _text(self, ids_T: Ids, *, first: bool) -> str:
        name = (first, ids_T.tobytes())
        with self._lock:
            if (found := self._known.get(name)) is not None:
                self._known.move_to_end(name)
                return found
        text = self._decoded(ids_T.tolist())
        # One more character tells that there are more.
        text = text[: 2 * MOST_TEXT + 1] if first else text[-MOST_TEXT:]
        with self._lock:
            self._known[name] = text
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return text

    def _decoded(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        found, known = list[str](), list[int]()
        for token in [*ids, -1]:
            if token >= 0:
                known.append(token)
            else:
                found.append(self._tokenizer.decode(known, skip_special_tokens=False) if known else "")
                known = []
                found.append(EMBEDDING)
        return "".join(found[:-1])
