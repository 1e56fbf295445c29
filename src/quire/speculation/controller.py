"""``Controller``: how many drafts a step verifies, by what steps have cost. No torch.

A step of more rows takes longer, and an accepted draft saves a part of a later step. Both are
estimated: the seconds of a step by its rows from steps as they run, and the accepted drafts by
the proposers' chances, corrected by what was accepted. The drafts that raise tokens per second
most are taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

GAIN = 1.03
"""Drafts are taken if they promise so many times the tokens per second of none."""
BATCH_GAIN = 0.1
"""What a large batch must gain besides; one of n requests, 1 - 1 / n of it. Requests with right
drafts end early, and the others go on in smaller batches, whose tokens cost more."""
SURE = 0.9
"""In a large batch drafts are taken that are accepted with at least this probability; in one of n
requests, 1 - 1 / n of it. The requests of a batch wait for the last one: most of what a draft saves
of a step is saved only if the others have accepted drafts too."""
FIRST_SLOPE = 0.04
"""What a further row costs of a step of one row, until that or a prompt's row is known."""
PROMPT_ROWS = 64
"""Rows of a step with prompts from which on the step tells what a row costs."""
FEW_ROWS = 8
"""Rows of a step beyond which a further one may cost more than the line says: fewer wait for
weights, more for arithmetic, as a prompt's rows do."""
WIDE_MEMORY = 0.5
"""The weight of earlier steps in what such a row costs, each time that one is measured."""
WIDE_TRIALS = 4
"""Number of steps of large batches that have few drafts, to measure the cost of a row."""
COST_MEMORY = 0.98
"""The weight of earlier steps in the line, each time that one is measured."""
SLOPE_BEFORE = 4.0
"""The weight of the first slope in it: a sum of squares, of rows about their mean."""
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
FIRST_DRAFTS, GROWTH = 2, 2
"""Drafts of a request in a batch: at first, and how many more for each that was accepted last."""
OUTLIER = 2.0
"""A measurement counts as at most so many times the estimate: one hiccup ends nothing."""


class StepCosts:
    """The seconds of a step by its number of rows: a line through the steps so far, of which later
    ones weigh more. On a busy machine steps of one width differ by a factor, and a line through all
    of them is nearer to what a row costs than estimates of single widths are."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0
        """Weighted sums over the steps: of 1, rows, seconds, squares of rows, and products."""
        self._prompt_row = 0.0
        """Seconds of a row of prompts; 0: not known."""
        self._wide_row = 0.0
        """Seconds of a draft's row in steps of more than ``FEW_ROWS`` decodes; 0: not known."""
        self.wide_steps = 0
        """Number of such steps that were measured."""

    def seconds(self, rows: int) -> float:
        """Return the estimate for a step of ``rows`` rows. It is monotone in ``rows``."""
        if not self._weight:
            return 1.0 + FIRST_SLOPE * (rows - 1)
        mean, seconds = self._rows / self._weight, self._seconds / self._weight
        spread = max(0.0, self._squares - self._rows * mean)
        guess = self._prompt_row or FIRST_SLOPE * seconds / (1 + FIRST_SLOPE * (mean - 1))
        slope = (self._products - self._rows * seconds + SLOPE_BEFORE * guess) / (spread + SLOPE_BEFORE)
        # No rows take no time at least.
        slope = min(max(slope, 0.0), seconds / mean)
        dearer = max(0.0, (self._wide_row or self._prompt_row) - slope)
        if rows < mean:
            dearer = min(dearer, seconds / mean - slope)
        return seconds + slope * (rows - mean) + dearer * (max(rows, FEW_ROWS) - max(mean, FEW_ROWS))

    def measured_prompts(self, rows: int, seconds: float) -> None:
        """Record the ``seconds`` of a step of prompts. A row of a large batch costs as much at
        least: both are bound by arithmetic."""
        if rows >= PROMPT_ROWS:
            found = seconds / rows
            # Rows of long prompts see more tokens, and cost more.
            weight = OLD if found > self._prompt_row > 0 else 0.0
            self._prompt_row = weight * self._prompt_row + (1 - weight) * found

    def measured(self, rows: int, seconds: float, decodes: int) -> None:
        """Record the ``seconds`` of a step of ``rows`` rows, of which ``decodes`` are no drafts.
        A step with drafts beside more than ``FEW_ROWS`` decodes tells the cost of a draft's row.
        Other steps make the line."""
        if self._weight:
            expected = self.seconds(rows)
            seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
            if FEW_ROWS < decodes < rows:
                found = max(0.0, seconds - self.seconds(decodes)) / (rows - decodes)
                before = self._wide_row or self._prompt_row or found
                self._wide_row = WIDE_MEMORY * before + (1 - WIDE_MEMORY) * found
                self.wide_steps += 1
                return
        self._weight = COST_MEMORY * self._weight + 1
        self._rows = COST_MEMORY * self._rows + rows
        self._seconds = COST_MEMORY * self._seconds + seconds
        self._squares = COST_MEMORY * self._squares + rows * rows
        self._products = COST_MEMORY * self._products + rows * seconds


@dataclass(slots=True, eq=False)
class Trust:
    """How far a proposer's chances are right for one request: of the drafts that were compared with
    a token, how many were it, and how many were to be."""

    others: Trust | None = None
    """That of all requests, from which one request's begins."""
    promised: float = 0.0
    accepted: float = 0.0
    last: int = 0
    """Accepted drafts of its last step that had drafts."""

    @property
    def most_in_batch(self) -> int:
        """The most drafts beside others. A long copy that ends costs a batch more than it saves, so
        their number grows with those that were accepted."""
        return FIRST_DRAFTS + GROWTH * self.last

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
        self.last = accepted
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

    def may_gain(self, decodes: int, rows: int, most: int) -> bool:
        """Return whether at most ``most`` drafts of a step can pay, even if all were accepted.
        ``decodes``, ``rows``: as for ``depths``."""
        most, seconds = self._most(decodes, most), self.costs.seconds
        without, own = seconds(rows), seconds(decodes)
        # The rate is monotone up to the width where rows become dearer, and behind it.
        counts = {1, min(max(1, FEW_ROWS - rows), most), most}
        least = self._rate_to_beat(decodes)
        return most > 0 and any((decodes + count) / (own + seconds(rows + count) - without) > least for count in counts)

    def _most(self, decodes: int, most: int) -> int:
        """Return the most drafts of a step: few, as long as their cost in large batches is not
        known."""
        is_trial = decodes > FEW_ROWS and self.costs.wide_steps < WIDE_TRIALS
        return min(most, FEW_ROWS) if is_trial else most

    def _rate_to_beat(self, decodes: int) -> float:
        """Return the tokens per second from which on drafts are taken."""
        gain = GAIN + BATCH_GAIN * (1 - 1 / max(1, decodes))
        return gain * decodes / self.costs.seconds(decodes)

    @staticmethod
    def least(decodes: int) -> float:
        """Return the least probability of a draft that is taken beside so many decodes."""
        return SURE * (1 - 1 / max(1, decodes))

    def depths(self, promises: Sequence[Sequence[float]], *, decodes: int, rows: int, most: int) -> list[int]:
        """Return the number of drafts of each request to verify, together at most ``most``.

        ``promises[i]``: of each draft of request i the probability that it is accepted, the best
        one first (``Draft.best``). ``decodes``: requests of the step that draw a token anyway.
        ``rows``: its rows without drafts.
        """
        most, least = self._most(decodes, most), self.least(decodes)
        found = [(one, request) for request, drafts in enumerate(promises) for one in drafts if one >= least]
        found.sort(key=lambda one: -one[0])
        depths, seconds = [0] * len(promises), self.costs.seconds
        tokens, without = float(decodes), seconds(rows)
        own = seconds(decodes)
        best, best_count = self._rate_to_beat(decodes), 0
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
