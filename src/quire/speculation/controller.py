"""``Controller``: how many drafts a step verifies, by what steps have cost. No torch.

A step of more rows takes longer, and an accepted draft saves a part of a later step. Both are
estimated: the seconds of a step by its rows from steps as they run, and the accepted drafts by
the proposers' chances, corrected by what was accepted. The drafts that raise tokens per second
most are taken.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

GAIN = 1.03
"""Drafts are taken if they promise so many times the tokens per second of none."""
SURE = 0.8
"""In a large batch drafts are taken that are accepted with at least this probability; in one of n
requests, 1 - 1 / n of it. The requests of a batch wait for the last one: most of what a draft saves
of a step is saved only if the others have accepted drafts too."""
FIRST_SLOPE = 0.04
"""What a further row costs of a step of one row, until that is known."""
WEIGHT = 0.2
"""The weight of a measurement in the estimate of its width."""
DRIFT = 0.05
"""Its weight in the estimates of all widths: contexts grow, and machines get busy."""
FORGETTING = 0.01
"""How far the estimate of a width that was not tried for long comes back to the first guess, each
step."""
LONG = 200
"""Steps after which that begins."""
TRIAL = 5
"""Steps for which drafting or not is tried. The first one, which prepares, is not measured."""
PAUSE = 32
"""Steps between two such trials; twice as many each time that the other way was slower."""
LONGEST_PAUSE = {True: 64, False: 512}
"""Most steps between two trials, while drafting and while not."""
OLD = 0.9
"""The weight of earlier steps in a speed, each time that one is measured."""
DRAFTS_BEFORE = 4.0
"""Drafts that a proposer's trust counts as beforehand."""
TRUST_MEMORY = 0.98
"""The weight of earlier drafts in it, each time that some are verified."""
TRUST_REST = 0.995
"""Their weight after a step without drafts."""
OUTLIER = 2.0
"""A measurement counts as at most so many times the estimate: one hiccup ends nothing."""


class StepCosts:
    """The seconds of a step by its number of rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._widths: list[int] = []
        """The measured widths, ascending."""
        self._steps = 0
        self._tried: dict[int, int] = {}
        """By width the step of its last measurement."""

    def seconds(self, rows: int) -> float:
        """Return the estimate for a step of ``rows`` rows. It is monotone in ``rows``."""
        widths, known = self._widths, self._seconds
        if not widths:
            return 1.0 + FIRST_SLOPE * (rows - 1)
        index = bisect_left(widths, rows)
        if index == len(widths):
            return self._beyond(rows)
        # A step that was wider and took less bounds it.
        least = min(known[width] for width in widths[index:])
        if widths[index] == rows or index == 0:
            return least
        below = widths[index - 1]
        base = min(known[below], least)
        return base + (least - base) * (rows - below) / (widths[index] - below)

    def _beyond(self, rows: int) -> float:
        """Return the estimate for a width above all that were measured."""
        first, last = self._widths[0], self._widths[-1]
        base, end = min(self._seconds.values()), self._seconds[last]
        slope = FIRST_SLOPE * base
        if last > first:
            slope = max(slope, (end - base) / (last - first))
        return end + slope * (rows - last)

    def measured(self, rows: int, seconds: float) -> None:
        """Note that a step of ``rows`` rows has taken ``seconds``."""
        expected = self.seconds(rows) if self._widths else seconds
        ratio = min(max(seconds / expected, 1 / OUTLIER), OUTLIER)
        if rows not in self._seconds:
            insort(self._widths, rows)
            self._seconds[rows] = expected * ratio
        else:
            self._seconds[rows] *= 1 + WEIGHT * (ratio - 1)
        self._steps += 1
        self._tried[rows] = self._steps
        base = self._seconds[self._widths[0]]
        for width in self._widths:
            if width == rows:
                continue
            value = self._seconds[width] * (1 + DRIFT * (ratio - 1))
            if self._steps - self._tried[width] > LONG:
                guess = min(value, base * (1 + FIRST_SLOPE * (width - self._widths[0])))
                value += FORGETTING * (guess - value)
            self._seconds[width] = value


@dataclass(slots=True, eq=False)
class Trust:
    """How far a proposer's chances are right for one request: of the drafts that were compared with
    a token, how many were it, and how many were to be."""

    others: Trust | None = None
    """That of all requests, from which one request's begins."""
    promised: float = 0.0
    accepted: float = 0.0

    @property
    def factor(self) -> float:
        """Return the factor for each chance, at most 1."""
        before = DRAFTS_BEFORE * (1.0 if self.others is None else self.others.factor)
        return min(1.0, (self.accepted + before) / (self.promised + DRAFTS_BEFORE))

    def verified(self, promised: float, accepted: int) -> None:
        """Note the number of accepted drafts. ``promised``: the sum of the chances of the drafts
        that were compared with a token."""
        self.promised = TRUST_MEMORY * self.promised + promised
        self.accepted = TRUST_MEMORY * self.accepted + accepted
        if self.others is not None:
            self.others.verified(promised, accepted)

    def rested(self) -> None:
        """Note a step without drafts: after many, the chances are trusted again."""
        self.promised *= TRUST_REST
        self.accepted *= TRUST_REST
        if self.others is not None:
            self.others.rested()


class Controller:
    """Chooses drafts by what they cost and promise."""

    def __init__(self) -> None:
        self.costs = StepCosts()

    def depths(self, promises: Sequence[Sequence[float]], *, decodes: int, rows: int, most: int) -> list[int]:
        """Return the number of drafts of each request to verify, together at most ``most``.

        ``promises[i]``: of each draft of request i the probability that it is accepted, the best
        one first (``Draft.best``). ``decodes``: requests of the step that draw a token anyway.
        ``rows``: its rows without drafts.
        """
        least = SURE * (1 - 1 / max(1, decodes))
        found = [(one, request) for request, drafts in enumerate(promises) for one in drafts if one >= least]
        found.sort(key=lambda one: -one[0])
        depths, seconds = [0] * len(promises), self.costs.seconds
        tokens, without = float(decodes), seconds(rows)
        own = seconds(decodes)
        best, best_count = GAIN * tokens / own, 0
        for count, (through, _) in enumerate(found[:most], 1):
            tokens += through
            rate = tokens / (own + seconds(rows + count) - without)
            if rate > best:
                best, best_count = rate, count
        for _, request in found[:best_count]:
            depths[request] += 1
        return depths


@dataclass(slots=True, eq=False)
class Speeds:
    """The tokens per second with drafts and without, and whether the present steps draft."""

    drafting: bool = True
    trying: bool = True
    left: int = TRIAL
    """Steps until that is decided again."""
    pause: int = PAUSE
    prepares: bool = True
    """Whether the step under way is the first one of its kind."""
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    tokens: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Without drafts, and with them."""

    def measured(self, seconds: float, tokens: float) -> None:
        """Note the duration of a step, and the tokens that each request got."""
        if not self.prepares:
            self.seconds[self.drafting] = OLD * self.seconds[self.drafting] + seconds
            self.tokens[self.drafting] = OLD * self.tokens[self.drafting] + tokens
        self.prepares = False

    def choose(self) -> bool:
        """Return whether the next step drafts."""
        if self.left:
            self.left -= 1
            return self.drafting
        if not all(self.seconds):
            # The other way is not known, or this one is not.
            self._begin(not self.drafting if self.seconds[self.drafting] else self.drafting, TRIAL, trying=True)
            return self.drafting
        plain, drafted = (count / seconds for count, seconds in zip(self.tokens, self.seconds, strict=True))
        best = drafted >= GAIN * plain
        if self.trying or self.drafting != best:
            self.pause = PAUSE if self.drafting == best or not self.trying else 2 * self.pause
            self.pause = min(self.pause, LONGEST_PAUSE[best])
            self._begin(best, self.pause, trying=False)
        else:
            self._begin(not best, TRIAL, trying=True)
        return self.drafting

    def _begin(self, drafting: bool, steps: int, *, trying: bool) -> None:
        self.prepares = self.drafting != drafting
        self.drafting, self.trying, self.left = drafting, trying, steps - 1


class Pace:
    """Decides in which steps a proposer that takes time is asked: where tokens come faster so."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._speeds: dict[int, Speeds] = {}
        """By the number of requests, in powers of two."""
        self._last: tuple[float, Mapping[Hashable, int], Speeds] | None = None
        """Of the last step: when it was prepared, the tokens of its requests, and its speeds."""

    def drafts(self, tokens: Mapping[Hashable, int]) -> bool:
        """Return whether a step drafts. ``tokens``: by request of the step, the number of its
        tokens."""
        now = self._clock()
        if self._last is not None:
            began, before, speeds = self._last
            gained = [count - before[name] for name, count in tokens.items() if name in before]
            if sum(gained) > 0:
                speeds.measured(now - began, sum(gained) / len(gained))
        speeds = self._speeds.setdefault(len(tokens).bit_length(), Speeds())
        self._last = now, dict(tokens), speeds
        return speeds.choose()
