"""``SuffixAutomaton``: all substrings of a growing sequence, online.

After Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985). A state
stands for substrings that end at the same places; its link is the state of the longest of their
suffixes that ends at more places. There are at most 2T states and 3T transitions for T tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

NONE = -1


class SuffixAutomaton:
    """The substrings of the tokens so far. A token takes amortised constant time."""

    __slots__ = ("_last", "_length", "_link", "_more", "_place", "_target", "_token", "tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("q")
        self._length, self._link = array("i", [0]), array("i", [NONE])
        self._place = array("i", [NONE])
        """By state the index of the last token of one of its substrings' occurrences."""
        # Most states have one transition, which needs no dictionary.
        self._token, self._target = array("q", [0]), array("i", [NONE])
        self._more: dict[int, dict[int, int]] = {}
        self._last = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        length, link = self._length, self._link
        self.tokens.append(token)
        state = self._last
        new = self._new(length[state] + 1, NONE, len(self.tokens) - 1)
        while state != NONE and self.step(state, token) == NONE:
            self._set(state, token, new)
            state = link[state]
        if state == NONE:
            link[new] = 0
        else:
            after = self.step(state, token)
            if length[after] > length[state] + 1:
                after = self._split(state, token, after)
            link[new] = after
        self._last = new

    def step(self, state: int, token: int) -> int:
        """Return the state of the substrings of ``state`` with ``token`` behind them, or
        ``NONE``."""
        if self._token[state] == token and self._target[state] != NONE:
            return self._target[state]
        more = self._more.get(state)
        return NONE if more is None else more.get(token, NONE)

    def longest_repeat(self) -> tuple[int, int]:
        """Return the length of the longest suffix that occurs earlier too, and the index of the
        token behind that occurrence. Of several occurrences it is the last one that this was asked
        for, or the first one. (0, 0) if there is none."""
        state = self._link[self._last]
        if state <= 0:
            return 0, 0
        behind = self._place[state] + 1
        # The suffix occurs here as well: the next question finds the nearer place.
        self._place[state] = len(self.tokens) - 1
        return self._length[state], behind

    def walk(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the longest suffix, as a state and its length, of the text that ``state`` and
        ``length`` stand for and ``token``: the walk of another text. It begins at (0, 0)."""
        # The state may have been split since.
        while state and length <= self._length[self._link[state]]:
            state = self._link[state]
        while state and self.step(state, token) == NONE:
            state = self._link[state]
            length = self._length[state]
        after = self.step(state, token)
        if after == NONE:
            return 0, 0
        length += 1
        while length <= self._length[self._link[after]]:
            after = self._link[after]
        return after, length

    def behind(self, state: int) -> int:
        """Return the index of the token behind one of a state's occurrences."""
        return self._place[state] + 1

    def _new(self, length: int, link: int, place: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._place.append(place)
        self._token.append(0)
        self._target.append(NONE)
        return len(self._length) - 1

    def _set(self, state: int, token: int, after: int) -> None:
        if self._target[state] == NONE or self._token[state] == token:
            self._token[state], self._target[state] = token, after
        else:
            self._more.setdefault(state, {})[token] = after

    def _split(self, state: int, token: int, after: int) -> int:
        """Divide the substrings of ``after``: those that ``state`` and ``token`` make get a state
        of their own, which is returned."""
        twin = self._new(self._length[state] + 1, self._link[after], self._place[after])
        self._token[twin], self._target[twin] = self._token[after], self._target[after]
        if after in self._more:
            self._more[twin] = dict(self._more[after])
        self._link[after] = twin
        while state != NONE and self.step(state, token) == after:
            self._set(state, token, twin)
            state = self._link[state]
        return twin
