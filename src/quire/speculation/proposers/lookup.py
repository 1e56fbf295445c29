"""``Lookup``: drafts copied from what followed the same tokens earlier. No torch.

The longest suffix of a request's tokens that occurred before, in the request itself or in outputs
under the same salt, says what may come. How likely that is, is counted by the length of the suffix.
Each new token is compared with the one that was to be expected, drafted or not, so that counting
costs no step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from quire.speculation.proposer import NO_DRAFT, Context, Draft, Proposer
from quire.speculation.suffix_automaton import SuffixAutomaton

OUTPUT_TOKENS = 32_768
"""Tokens of outputs under one salt that are kept at least, and half of those kept at most."""
SALTS = 64
"""Most salts whose outputs are kept; the least recently used one goes first."""
CATCH_UP = 64
"""Tokens before a request's first draft that are compared with the outputs of others."""
GAP = -1
"""Stands between outputs, and is never drafted."""
CLASSES = 14
"""Classes of suffixes by their length."""
MEMORY = 0.98
"""The weight of what was counted, each time that more is."""
FEW = 2.0
"""Tokens that came of as many expected ones, which a request counts as beforehand."""
RECENT = 0.03
"""How far a request forgets them with each token."""
LEAST = 0.01
"""Tokens that come with a lower probability are not proposed."""
PRIOR = 4.0
"""Tokens that an estimate counts as beforehand: of all requests for one request."""


def length_class(length: int) -> int:
    """Return the class of a suffix: 1 to 8 tokens by themselves, then by powers of two."""
    return length if length <= 8 else min(5 + (length - 1).bit_length(), CLASSES - 1)


class Chances:
    """How often the expected token came, by the class of the suffix."""

    __slots__ = ("_base", "_came", "_expected", "_hits", "_trials")

    def __init__(self, base: Chances | None = None) -> None:
        """``base``: the estimates of all requests, of which one request's are a refinement."""
        self._base = base
        self._hits, self._trials = [0.0] * CLASSES, [0.0] * CLASSES
        self._expected, self._came = FEW, FEW
        """How many tokens were to come by the estimates of all requests, and how many came."""

    def of(self, length: int) -> float:
        """Return the estimated probability that the expected token comes."""
        kind, base = length_class(length), self._base
        before = length / (length + 2.0)
        if base is not None:
            before = (base._hits[kind] + PRIOR * before) / (base._trials[kind] + PRIOR)
            # A text that repeats less than those before it does so for suffixes of any length.
            before *= min(1.0, self._came / self._expected)
        return (self._hits[kind] + PRIOR * before) / (self._trials[kind] + PRIOR)

    def behind(self, length: int, most: int, least: float) -> list[float]:
        """Return the estimated probabilities of at most ``most`` tokens behind a suffix, each if
        those before it come. They end where all of them come with less than ``least``."""
        found, all_come = list[float](), 1.0
        for longer in range(length, length + most):
            chance = self.of(longer)
            all_come *= chance
            if all_come < least:
                break
            found.append(chance)
        return found

    def count(self, length: int, hit: bool) -> None:
        """Note whether the expected token came."""
        kind = length_class(length)
        if self._base is not None:
            self._expected += RECENT * (FEW - self._expected) + self._base.of(length)
            self._came += RECENT * (FEW - self._came) + hit
            self._base.count(length, hit)
        self._hits[kind] = self._hits[kind] * MEMORY + hit
        self._trials[kind] = self._trials[kind] * MEMORY + 1


class Outputs:
    """The outputs under one salt: the newer ones, and as many before them."""

    def __init__(self) -> None:
        self.texts: list[SuffixAutomaton] = []

    def add(self, tokens: Sequence[int]) -> None:
        """Take in an output; the oldest ones go."""
        if not self.texts or len(self.texts[-1]) >= OUTPUT_TOKENS:
            self.texts = [*self.texts[-1:], SuffixAutomaton()]
        self.texts[-1].extend([GAP, *tokens])


@dataclass(slots=True, eq=False)
class Cursor:
    """The longest suffix of a request that a text of others has."""

    text: SuffixAutomaton
    state: int = 0
    length: int = 0

    def move(self, token: int) -> None:
        self.state, self.length = self.text.walk(self.state, self.length, token)

    @property
    def behind(self) -> int:
        return self.text.behind(self.state)


@dataclass(slots=True, eq=False)
class Match:
    """A suffix that occurred before: its length, and the place behind the earlier occurrence."""

    text: SuffixAutomaton
    length: int
    behind: int
    repeats: bool
    """Whether the text is the request's own: behind its end it goes on with itself."""

    def expected(self, most: int) -> list[int]:
        """Return the tokens that followed, at most ``most``."""
        known = self.text.tokens
        found = known[self.behind : self.behind + most].tolist()
        if found and len(found) < most and self.repeats:
            period = len(known) - self.behind
            found += [found[index % period] for index in range(len(found), most)]
        gap = next((index for index, token in enumerate(found) if token < 0), len(found))
        return found[:gap]


@dataclass(slots=True, eq=False)
class Reader:
    """What is known of one request."""

    own: SuffixAutomaton
    chances: Chances
    cursors: list[Cursor] = field(default_factory=list)
    match: Match | None = None

    def take(self, token: int) -> None:
        """Take in a token of the output, and count whether it was the expected one."""
        if self.match is not None and (expected := self.match.expected(1)):
            self.chances.count(self.match.length, expected[0] == token)
        self.own.append(token)
        for cursor in self.cursors:
            cursor.move(token)
        self.find()

    def find(self) -> None:
        """Find the longest suffix that occurred before."""
        length, behind = self.own.longest_repeat()
        self.match = Match(self.own, length, behind, True) if length else None
        for cursor in self.cursors:
            # An output's end, or a gap, tells nothing.
            if cursor.length > length and cursor.behind < len(cursor.text):
                length = cursor.length
                self.match = Match(cursor.text, length, cursor.behind, False)


class Lookup(Proposer):
    """Proposes the continuation of an earlier occurrence."""

    name = "lookup"

    def __init__(self) -> None:
        self._readers: dict[Hashable, Reader] = {}
        self._outputs: dict[Hashable, Outputs] = {}
        """By salt, the least recently used one first."""
        self._chances = Chances()

    def propose(self, contexts: Sequence[Context], most: Sequence[int]) -> list[Draft]:
        """See ``Proposer``."""
        return [self._draft(context, count) for context, count in zip(contexts, most, strict=True)]

    def _draft(self, context: Context, most: int) -> Draft:
        reader = self._reader(context)
        if (match := reader.match) is None:
            return NO_DRAFT
        chances = reader.chances.behind(match.length, most, max(LEAST, context.least))
        tokens = match.expected(len(chances))
        return Draft(tokens, chances[: len(tokens)]) if tokens else NO_DRAFT

    def _reader(self, context: Context) -> Reader:
        """Return the automaton of a request, its last token included."""
        outputs = self._outputs.get(context.salt)
        reader = self._readers.get(context.name)
        if reader is None:
            reader = Reader(SuffixAutomaton(context.ids[: context.num_prompt].tolist()), Chances(self._chances))
            self._follow(reader, outputs)
            reader.find()
            self._readers[context.name] = reader
        else:
            self._follow(reader, outputs)
        for token in context.ids[len(reader.own) :].tolist():
            reader.take(token)
        return reader

    @staticmethod
    def _follow(reader: Reader, outputs: Outputs | None) -> None:
        """Let a request follow the present texts of outputs."""
        texts = [] if outputs is None else outputs.texts
        if [cursor.text for cursor in reader.cursors] == texts:
            return
        known = {id(cursor.text): cursor for cursor in reader.cursors}
        reader.cursors = [known.get(id(text)) or Cursor(text) for text in texts]
        for cursor in reader.cursors:
            if id(cursor.text) not in known:
                for token in reader.own.tokens[-CATCH_UP:]:
                    cursor.move(token)

    def ended(self, context: Context) -> None:
        """See ``Proposer``. Its output is kept for later requests of its salt."""
        self._readers.pop(context.name, None)
        output = context.ids[context.num_prompt :].tolist()
        if not output:
            return
        outputs = self._outputs.pop(context.salt, None) or Outputs()
        outputs.add(output)
        self._outputs[context.salt] = outputs
        if len(self._outputs) > SALTS:
            del self._outputs[next(iter(self._outputs))]

    def forget(self) -> None:
        """Forget the outputs of requests that have ended."""
        self._outputs.clear()
