"""Prompts whose last token asks for a value that several chunks decide.

    <bos> f12 k03 -> v17 ; f40 ...  f07 k09 = k03 ; ...  ? k09        (the answer is v17)

A chunk holds statements with filler between them: facts ``k -> v ;`` and aliases ``k = k2 ;`` of a
key that an earlier chunk defined. An alias takes the value that k2 has there, as an assignment
does; the last statement of a key wins. So a ``;`` stands for a value that a chunk that is read
alone does not tell.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.base.errors import InvalidArgument

SPECIAL = ("<bos>", "<eos>", "->", "=", ";", "?")
BOS, EOS, ARROW, EQUALS, END, ASK = range(6)
KEYS, VALUES, FILLERS = 48, 32, 42
FIRST_KEY = len(SPECIAL)
FIRST_VALUE = FIRST_KEY + KEYS
FIRST_FILLER = FIRST_VALUE + VALUES
WORDS = (
    *SPECIAL,
    *(f"k{i:02}" for i in range(KEYS)),
    *(f"v{i:02}" for i in range(VALUES)),
    *(f"f{i:02}" for i in range(FILLERS)),
)
"""The vocabulary, by id."""
STATEMENT = 4
"""Tokens of a statement."""
MAX_HOPS = 2


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How prompts are made up. The defaults are those of the measurements."""

    chunks: int = 4
    statements: int = 3
    """In each chunk."""
    shortest: int = 16
    longest: int = 32
    """Tokens of a chunk, drawn evenly, for each chunk."""
    aliases: float = 0.5
    """Share of the statements behind the first chunk that are aliases, where there is a key."""
    distractors: float = 0.0
    """Share of the filler that are keys, of which nothing is said there."""
    overridden: float = 0.0
    """Share of the statements that give a new value to a key that has one."""
    repeated: bool = False
    """Whether a chunk comes twice, the second time at the end."""
    permuted: bool = False
    """Whether the chunks are shuffled when they are finished, so that an alias may stand before its
    key; nothing is asked about those."""

    def __post_init__(self) -> None:
        if not 1 <= self.chunks * self.statements <= KEYS:
            raise InvalidArgument(f"a prompt has 1 to {KEYS} statements, got {self.chunks} * {self.statements}")
        if not self.statements * STATEMENT <= self.shortest <= self.longest:
            raise InvalidArgument(
                f"a chunk of {self.statements} statements has {self.statements * STATEMENT} tokens or more, got "
                f"shortest={self.shortest}, longest={self.longest}"
            )


VARIANTS = {
    "default": Kind(),
    "64": Kind(shortest=64, longest=64),
    "distractors": Kind(distractors=0.2),
    "overridden": Kind(overridden=0.2),
    "repeated": Kind(repeated=True),
    "permuted": Kind(permuted=True),
}
"""Kinds that are measured, by name."""


@dataclass(frozen=True)
class Definition:
    """What a statement says."""

    key: int
    value: int | None
    """None: an alias of a key that had no value there."""
    hops: int
    end: int
    """Index of its ``;`` in the chunk."""


@dataclass(frozen=True)
class RecallPrompt:
    """BOS, then chunks; ``question`` makes the rest."""

    chunks: tuple[tuple[int, ...], ...]
    definitions: tuple[tuple[Definition, ...], ...]
    """Of each chunk, in order."""

    @property
    def body(self) -> list[int]:
        """Return BOS and all chunks."""
        return [BOS, *(token for chunk in self.chunks for token in chunk)]

    @property
    def known(self) -> dict[int, Definition]:
        """Return the last definition of each key."""
        return {definition.key: definition for chunk in self.definitions for definition in chunk}

    @property
    def labels(self) -> list[tuple[int, int]]:
        """Return the index in ``body`` of each ``;``, and the value that it stands for."""
        found, start = [], 1
        for chunk, definitions in zip(self.chunks, self.definitions, strict=True):
            found += [(start + made.end, made.value) for made in definitions if made.value is not None]
            start += len(chunk)
        return found

    def keys(self, hops: int) -> list[int]:
        """Return the keys that are so many aliases away from their value."""
        return [key for key, made in self.known.items() if made.hops == hops and made.value is not None]


def make_prompt(rng: random.Random, kind: Kind) -> RecallPrompt:
    """Draw the chunks of a prompt."""
    unused = rng.sample(range(FIRST_KEY, FIRST_KEY + KEYS), KEYS)
    drafts: list[list[tuple[int, int, int]]] = []  # key, ARROW or EQUALS, value or key
    hops: dict[int, int] = {}
    for _ in range(kind.chunks):
        earlier = [key for key, count in hops.items() if count < MAX_HOPS]
        draft = []
        for _ in range(kind.statements):
            said = {key for key, _, _ in draft}
            old = [key for key in hops if key not in said]
            key = rng.choice(old) if old and rng.random() < kind.overridden else unused.pop()
            targets = [target for target in earlier if target != key and target not in said]
            if targets and rng.random() < kind.aliases:
                deep = [target for target in targets if hops[target] > 0]
                target = rng.choice(deep if deep and rng.random() < 0.5 else targets)
                draft.append((key, EQUALS, target))
                hops[key] = hops[target] + 1
            else:
                draft.append((key, ARROW, FIRST_VALUE + rng.randrange(VALUES)))
                hops[key] = 0
        drafts.append(draft)
    chunks = [_lay_out(rng, kind, draft) for draft in drafts]
    order = list(range(kind.chunks))
    if kind.permuted:
        rng.shuffle(order)
    if kind.repeated:
        order.append(rng.choice(order))
    return prompt_of([chunks[i] for i in order])


def prompt_of(chunks: Sequence[tuple[int, ...]]) -> RecallPrompt:
    """Return the prompt of these chunks, read from the first to the last."""
    return RecallPrompt(tuple(chunks), _resolve(chunks))


def _lay_out(rng: random.Random, kind: Kind, draft: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    """Return the statements with filler before, between and behind them."""
    spare = rng.randint(kind.shortest, kind.longest) - STATEMENT * len(draft)
    gaps = sorted(rng.randint(0, spare) for _ in draft)
    tokens: list[int] = []
    for (key, sign, right), gap, before in zip(draft, gaps, [0, *gaps], strict=False):
        tokens += [*_filler(rng, kind, gap - before), key, sign, right, END]
    return (*tokens, *_filler(rng, kind, spare - gaps[-1]))


def _filler(rng: random.Random, kind: Kind, count: int) -> list[int]:
    return [
        FIRST_KEY + rng.randrange(KEYS) if rng.random() < kind.distractors else FIRST_FILLER + rng.randrange(FILLERS)
        for _ in range(count)
    ]


def _resolve(chunks: Sequence[tuple[int, ...]]) -> tuple[tuple[Definition, ...], ...]:
    """Return what each statement says at its place."""
    known: dict[int, Definition] = {}
    resolved = []
    for chunk in chunks:
        made = []
        for end in (index for index, token in enumerate(chunk) if token == END):
            key, sign, right = chunk[end - STATEMENT + 1 : end]
            if sign == ARROW:
                made.append(Definition(key, right, 0, end))
            elif right in known:
                made.append(replace(known[right], key=key, hops=known[right].hops + 1, end=end))
            else:
                made.append(Definition(key, None, 1, end))
            known[key] = made[-1]
        resolved.append(tuple(made))
    return tuple(resolved)


@dataclass(frozen=True)
class Question:
    """A finished prompt, in segments."""

    chunks: tuple[tuple[int, ...], ...]
    ask: tuple[int, int]
    answer: int
    hops: int

    @property
    def tokens(self) -> list[int]:
        """Return the whole prompt."""
        return [BOS, *(token for chunk in self.chunks for token in chunk), *self.ask]


def make_question(rng: random.Random, kind: Kind, hops: int) -> Question:
    """Draw a prompt with a question that is ``hops`` aliases away from its answer.

    ``InvalidArgument``: a thousand prompts of this kind have none.
    """
    for _ in range(1000):
        prompt = make_prompt(rng, kind)
        if keys := prompt.keys(hops):
            key = rng.choice(keys)
            answer = prompt.known[key].value
            assert answer is not None
            return Question(prompt.chunks, (ASK, key), answer, hops)
    raise InvalidArgument(f"no prompt of {kind} has a question of {hops} hops")
