"""A trace of agents' sessions, to be played by any runtime.

Each session has a system prompt of which half is common to all, returns after others, and sometimes
continues the history of another one, as a sub-agent does. Nothing of Quire is imported, so that a
peer in an environment of its own plays the same trace.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

SYSTEM = 512
"""Tokens of a system prompt."""
TURN = (64, 256)
"""Least and most new tokens of a turn."""
ANSWER = 24
"""Tokens of an answer."""
AT_ONCE = 4
"""Number of concurrent requests."""

Generate = Callable[[list[list[int]]], list[tuple[list[int], float]]]
"""Answers prompts of token ids: for each the ids of the answer, and seconds to the first one."""


@dataclass(frozen=True)
class Turn:
    """One request of a session."""

    session: int
    parent: int
    """The session whose history it continues."""
    text: tuple[int, ...]
    """The new token ids."""


@dataclass(frozen=True)
class Played:
    """A runtime's results of a trace."""

    seconds: float
    firsts: list[float]
    """Seconds to the first token, by turn."""
    answers: list[list[int]]

    @property
    def first(self) -> float:
        """The median of the seconds to the first token."""
        return statistics.median(self.firsts)


class AgentTrace:
    """The turns of ``sessions`` agents over ids below ``vocab_size``; equal for equal arguments.
    All texts and answers have one ``shorter``-th of their tokens."""

    def __init__(self, sessions: int, vocab_size: int, shorter: int = 1, seed: int = 0) -> None:
        rng = random.Random(seed)
        system = SYSTEM // shorter
        self.answer = ANSWER // shorter
        """Tokens of an answer."""

        def text(tokens: int) -> tuple[int, ...]:
            return tuple(rng.randrange(3, vocab_size) for _ in range(tokens))

        common = text(system // 2)
        self._starts = [[*common, *text(system // 2)] for _ in range(sessions)]
        turns = [(one, rng.randint(*TURN) // shorter) for one in range(sessions) for _ in range(rng.randint(2, 4))]
        rng.shuffle(turns)
        self.turns = [
            Turn(one, rng.randrange(sessions) if rng.random() < 0.1 else one, text(tokens)) for one, tokens in turns
        ]
        self.tokens = system * sessions + sum(len(turn.text) for turn in self.turns)
        """Number of tokens of all sessions, without answers."""

    def play(self, generate: Generate) -> Played:
        """Request all turns, ``AT_ONCE`` at a time, each after the answers so far."""
        histories = [list(start) for start in self._starts]
        firsts: list[float] = []
        answers: list[list[int]] = []
        begun = time.perf_counter()
        for at in range(0, len(self.turns), AT_ONCE):
            batch = self.turns[at : at + AT_ONCE]
            prompts = []
            for turn in batch:
                histories[turn.session] = [*histories[turn.parent], *turn.text]
                prompts.append(histories[turn.session])
            for turn, (answer, first) in zip(batch, generate(prompts), strict=True):
                histories[turn.session] = [*histories[turn.session], *answer]
                firsts.append(first)
                answers.append(answer)
        return Played(time.perf_counter() - begun, firsts, answers)
