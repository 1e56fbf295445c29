"""Text out of the engine: token ids to text as they come, and the stop strings that end it.

Three small machines in a row, each constant time for a token: ids to bytes (``PieceStream``), bytes
to characters (an incremental UTF-8 decoder, which holds an incomplete character back), characters
to final text (``StopMatcher``, which holds back what may still become a stop string). What has been
emitted is never taken back.
"""

from __future__ import annotations

import codecs
import copy
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from quire.base.errors import FailedPrecondition, InvalidArgument
from quire.text.decoder_stream import REPLACEMENT
from quire.text.token_bytes import PieceStream

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer


class StopMatch(NamedTuple):
    """A stop string that was found in the characters scanned by one call."""

    stop: str
    end: int
    """Number of the scanned characters up to and including the last one of the stop string."""


class StopMatcher:
    """A finder of the first of several strings in a text that comes in pieces, in constant time for
    each character.

    The automaton of Aho and Corasick (1975): its state is the longest end of the text so far that
    begins a stop string. The first match is the one with the first end, of several with the same
    end the longest, so it does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._stop: list[str | None] = [None]
        depth = [0]
        for stop in stops:
            state = 0
            for character in stop:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._stop.append(None)
                    depth.append(depth[state] + 1)
                state = self._next[state][character]
            self._stop[state] = stop
        self._fallback = [0] * len(self._next)
        self._held = [0] * len(self._next)
        queue = deque([0])
        while queue:  # breadth first: a fallback is shorter, so it is complete before it is needed
            state = queue.popleft()
            fallback = self._fallback[state]
            if self._stop[state] is None:
                self._stop[state] = self._stop[fallback]
            # A state that leads nowhere is a whole stop string; only its end can grow into another.
            self._held[state] = depth[state] if self._next[state] else self._held[fallback]
            for character, child in self._next[state].items():
                if state:
                    self._fallback[child] = self._step(fallback, character)
                queue.append(child)
        self._state = 0

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def scan(self, text: str, *, ignore_matches: bool = False) -> StopMatch | None:
        """Read more ``text``; return the first match that ends in it, or None."""
        for index, character in enumerate(text):
            self._state = self._step(self._state, character)
            stop = self._stop[self._state]
            if stop is not None and not ignore_matches:
                return StopMatch(stop, index + 1)
        return None

    @property
    def held(self) -> int:
        """Return the number of characters at the text's end that may still begin a stop string."""
        return self._held[self._state]


class IncrementalDetokenizer:
    """The text of one generation, token by token.

    ``push`` returns the text that has become final, ``finish`` the rest; together they are
    ``text``, the continuation of the prompt: ``decode(prompt + output)`` without
    ``decode(prompt)``, with the leading space of a SentencePiece-style token. An incomplete
    character is held back until it is completed; bytes that cannot be completed become U+FFFD, one
    for each maximal ill-formed part (Unicode 15, section 3.9). If the prompt ends inside a
    character, the output that completes it yields the whole character.

    Stop strings are searched in the output only, across tokens; the match that ends first counts,
    the longest of those that end together. Text that may still become a stop string is held back. A
    match that ends within the first ``min_tokens`` tokens does not stop, as in vLLM.
    ``InvalidArgument``: a stop string that is empty or no string, a negative ``min_tokens``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        if isinstance(stop, str) or not all(isinstance(item, str) and item for item in stop):
            raise InvalidArgument(f"stop must be a sequence of non-empty strings, got {stop!r}")
        if not isinstance(min_tokens, int) or isinstance(min_tokens, bool) or min_tokens < 0:
            raise InvalidArgument(f"min_tokens must be an integer of at least 0, got {min_tokens!r}")
        self._pieces = PieceStream(tokenizer.token_bytes, prompt_ids, skip_special_tokens=skip_special_tokens)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        partial = self._pieces.partial_character(prompt_ids)
        self._characters.decode(partial)
        self._prompt_is_partial = bool(partial)
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._token_ends: list[int] = []  # for each token: how many characters cover it and all before it
        self._num_characters = 0  # that have been decoded: emitted or held back
        self._held_text = ""
        self._emitted: list[str] = []
        self._finished = False
        self._stop: str | None = None
        self._stop_start = 0

    def fork(self) -> IncrementalDetokenizer:
        """Return a copy, for another continuation."""
        other = copy.copy(self)
        other._pieces, other._matcher = self._pieces.fork(), copy.copy(self._matcher)
        other._characters = codecs.getincrementaldecoder("utf-8")("replace")
        other._characters.setstate(self._characters.getstate())
        other._token_ends, other._emitted = self._token_ends.copy(), self._emitted.copy()
        return other

    @property
    def text(self) -> str:
        """Everything that ``push`` and ``finish`` have returned."""
        if len(self._emitted) > 1:
            self._emitted = ["".join(self._emitted)]
        return self._emitted[0] if self._emitted else ""

    @property
    def stopped_by(self) -> str | None:
        """Return the stop string that ended the text, or None."""
        return self._stop

    @property
    def num_tokens(self) -> int:
        """Return the number of pushed tokens."""
        return len(self._token_ends)

    @property
    def tokens_before_stop(self) -> int:
        """Return the number of leading tokens with their whole text before the stop string; without
        one, all. A token whose text holds the stop string's first character, or part of its bytes,
        does not count."""
        if self._stop is None:
            return len(self._token_ends)
        return bisect_right(self._token_ends, self._stop_start)

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is final now (often that of the token).
        ``FailedPrecondition`` after a stop string or ``finish``; ``InvalidArgument`` for a negative
        id. An unknown id (of a padded vocabulary) has no text."""
        if self._stop is not None or self._finished:
            why = f"the stop string {self._stop!r}" if self._stop is not None else "finish()"
            raise FailedPrecondition(f"the text ended with {why} already; make a new detokenizer for more tokens")
        if token_id < 0:
            raise InvalidArgument(f"token id must be at least 0, got {token_id}")
        characters = self._decode(self._pieces.push(token_id))
        start = self._num_characters
        incomplete = bool(self._characters.getstate()[0]) or self._pieces.is_incomplete
        self._token_ends.append(start + len(characters) + incomplete)
        return self._accept(characters)

    def finish(self) -> str:
        """Return the text that was held back; after that, or after a stop string, return ""."""
        if self._finished or self._stop is not None:
            self._finished = True
            return ""
        self._finished = True
        delta = self._accept(self._decode(self._pieces.finish(), final=True))
        if self._stop is None:
            delta += self._emit(self._held_text)
            self._held_text = ""
        return delta

    def _decode(self, piece: bytes, *, final: bool = False) -> str:
        characters = self._characters.decode(piece, final)
        if characters and self._prompt_is_partial:
            self._prompt_is_partial = False
            if characters[0] == REPLACEMENT:
                # The output did not complete the prompt's last character: the damage is the
                # prompt's.
                self._token_ends = [0] * len(self._token_ends)
                characters = characters[1:]
        return characters

    def _accept(self, characters: str) -> str:
        """Search stop strings in newly decoded characters, and emit the safe characters."""
        start = self._num_characters
        self._num_characters += len(characters)
        if self._matcher is None:
            return self._emit(characters)
        too_early = 0 < len(self._token_ends) <= self._min_tokens
        match = self._matcher.scan(characters, ignore_matches=too_early)
        text = self._held_text + characters
        if match is not None:
            self._stop = match.stop
            self._stop_start = start + match.end - len(match.stop)
            end = len(self._held_text) + match.end
            self._held_text = ""
            return self._emit(text[: end if self._include_stop else end - len(match.stop)])
        # With the stop string included, text is final whatever comes.
        held = 0 if self._include_stop else self._matcher.held
        final, self._held_text = text[: len(text) - held], text[len(text) - held :]
        return self._emit(final)

    def _emit(self, text: str) -> str:
        if text:
            self._emitted.append(text)
        return text
