"""``Lookup``: drafts copied from what followed the same tokens earlier. No torch.

A suffix of a request's tokens that occurred before, in the request itself or in outputs under the
same salt, says what may come. How likely that is, is counted by the length of the suffix.
Each new token is compared with the one that was to be expected, drafted or not, so that counting
costs no step.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from quire.speculation.proposer import NO_DRAFT, Context, Draft, Proposer

OUTPUT_TOKENS = 32_768
"""Tokens of outputs under one salt that are kept at least, and half of those kept at most."""
SALTS = 64
"""Most salts whose outputs are kept; the least recently used one goes first."""
RUNS = (8, 4, 2, 1)
"""Sizes of runs of tokens that are searched for, the longest one first."""
LONGEST = 256
"""Most tokens of a suffix that are compared."""
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
        kind = length_class(length)
        before = length / (length + 2.0)
        if self._base is not None:
            # A text that repeats less than those before it does so for suffixes of any length.
            before = self._base.of(length) * min(1.0, self._came / self._expected)
        return (self._hits[kind] + PRIOR * before) / (self._trials[kind] + PRIOR)

    def count(self, length: int, hit: bool) -> None:
        """Note whether the expected token came."""
        kind = length_class(length)
        if self._base is not None:
            self._expected += RECENT * (FEW - self._expected) + self._base.of(length)
            self._came += RECENT * (FEW - self._came) + hit
            self._base.count(length, hit)
        self._hits[kind] = self._hits[kind] * MEMORY + hit
        self._trials[kind] = self._trials[kind] * MEMORY + 1


class KnownText:
    """Tokens so far, and where each run of them stood last before the last token."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("q")
        self._behind: tuple[dict[int, int], ...] = tuple({} for _ in RUNS)
        """By size and hash of a run the index of the token behind it."""
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        count = len(self.tokens)
        for size, behind in zip(RUNS, self._behind, strict=True):
            if count >= size:
                behind[hash(tuple(self.tokens[count - size :]))] = count
        self.tokens.append(token)

    def find(self, other: array[int]) -> tuple[int, int]:
        """Return the length of a suffix of ``other`` that occurs here, and the index of the token
        behind it: that of the longest run that was found, where it stood last. (0, 0) if there is
        none. ``other`` may be the tokens here."""
        for size, places in zip(RUNS, self._behind, strict=True):
            behind = places.get(hash(tuple(other[-size:])), 0)
            most, length = min(behind, len(other), LONGEST), 0
            while length < most and self.tokens[behind - 1 - length] == other[-1 - length]:
                length += 1
            if length >= size:
                return length, behind
        return 0, 0


class Outputs:
    """The outputs under one salt: the newer ones, and as many before them."""

    def __init__(self) -> None:
        self.texts: list[KnownText] = []

    def add(self, tokens: Sequence[int]) -> None:
        """Take in an output; the oldest ones go."""
        if not self.texts or len(self.texts[-1]) >= OUTPUT_TOKENS:
            self.texts = [*self.texts[-1:], KnownText()]
        self.texts[-1].extend([GAP, *tokens])


@dataclass(slots=True, eq=False)
class Match:
    """A suffix that occurred before: its length, and the place behind the earlier occurrence. A
    token of it may have been replaced: it counts as the first one of the suffix."""

    text: KnownText
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

    own: KnownText
    chances: Chances
    match: Match | None = None

    def take(self, token: int, texts: Sequence[KnownText]) -> None:
        """Take in a token of the output, and count whether it was the expected one."""
        before, self.match = self.match, None
        if before is not None and (expected := before.expected(1)):
            self.chances.count(before.length, expected[0] == token)
            if before.behind + 1 < len(before.text):
                # Behind a token that was replaced the text may go on as before.
                length = before.length + 1 if expected[0] == token else 1
                self.match = replace(before, length=length, behind=before.behind + 1)
        self.own.append(token)
        self.find(texts)

    def find(self, texts: Sequence[KnownText]) -> None:
        """Find a suffix that occurred before, here or in ``texts`` of others, and is longer than
        the match that continues."""
        for text in (self.own, *texts):
            length, behind = text.find(self.own.tokens)
            # An output's end tells nothing.
            if behind < len(text) and (self.match is None or length > self.match.length) and length:
                self.match = Match(text, length, behind, text is self.own)


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
        match = self._reader(context).match
        if match is None or not (tokens := match.expected(most)):
            return NO_DRAFT
        chances = self._readers[context.name].chances
        return Draft(tokens, [chances.of(match.length + index) for index in range(len(tokens))])

    def _reader(self, context: Context) -> Reader:
        """Return what is known of a request, its last token included."""
        outputs = self._outputs.get(context.salt)
        texts = [] if outputs is None else outputs.texts
        reader = self._readers.get(context.name)
        if reader is None:
            reader = Reader(KnownText(context.ids[: context.num_prompt].tolist()), Chances(self._chances))
            reader.find(texts)
            self._readers[context.name] = reader
        for token in context.ids[len(reader.own) :].tolist():
            reader.take(token, texts)
        return reader

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
