"""Made-up modules: assignments, aliases, and checks that only a model that looks things up can
complete.

    # module base
    port = 8031
    host = 1276
    # module other
    alias = port
    # checks
    assert alias == 8031

Every text is a valid Python program whose assertions hold. A text depends on nothing but its random
generator, so sequences can be made in any order and by any worker.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

STEMS = [
    "port",
    "host",
    "limit",
    "size",
    "count",
    "depth",
    "width",
    "height",
    "index",
    "offset",
    "level",
    "rate",
    "cache",
    "queue",
    "batch",
    "token",
    "frame",
    "block",
    "page",
    "seed",
    "step",
    "scale",
    "bound",
    "delay",
    "retry",
    "epoch",
    "shard",
    "node",
    "worker",
    "buffer",
    "stride",
    "margin",
    "alias",
    "total",
    "quota",
    "weight",
    "budget",
    "window",
    "cursor",
    "target",
]

NAMES = (*STEMS, *(f"{first}_{second}" for first in STEMS for second in STEMS if first != second))
"""1,600 names: 40 stems and their ordered pairs."""

TOKENS_PER_ASSIGNMENT = 21
"""About what an assignment and its check take with the bundled tokenizer; sizes the modules,
nothing depends on it.
"""

ALIAS_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Check:
    """A line ``assert name == value``; ``text[start:stop]`` are the digits of the value.

    ``hops`` is the number of aliases between the name and the number: 0 for a name that was
    assigned the digits.
    """

    name: str
    hops: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Source:
    """The text of a made-up file, and where its answers are."""

    text: str
    checks: tuple[Check, ...]


def generator(seed: int, purpose: str, index: int) -> random.Random:
    """The generator of the ``index``-th sequence; training and evaluation differ in ``purpose``."""
    return random.Random(f"{seed}/{purpose}/{index}")


def largest_module(sequence_length: int) -> int:
    """Assignments that fit into a sequence together with their checks."""
    return max(2, sequence_length // TOKENS_PER_ASSIGNMENT)


def make_source(rng: random.Random, max_assignments: int) -> Source:
    """A file of 2 to ``max_assignments`` assignments in one to four modules, then checks of at
    least half of them.

    The checks come in the order of the assignments half of the time, shuffled otherwise.
    """
    total = rng.randint(2, max_assignments)
    names = rng.sample(NAMES, total + 4)
    modules, names = names[:4], names[4:]
    openings = {0, *rng.sample(range(1, total), min(total - 1, rng.randint(0, 3)))}
    values: dict[str, int] = {}
    hops: dict[str, int] = {}
    lines: list[str] = []
    for index, name in enumerate(names):
        if index in openings:
            lines.append(f"# module {modules[sum(opening < index for opening in openings)]}")
        if values and rng.random() < ALIAS_SHARE:
            target = rng.choice(names[:index])
            values[name], hops[name] = values[target], hops[target] + 1
            lines.append(f"{name} = {target}")
        else:
            values[name], hops[name] = rng.randint(1000, 9999), 0
            lines.append(f"{name} = {values[name]}")
    checked = set(rng.sample(names, rng.randint((total + 1) // 2, total)))
    order = [name for name in names if name in checked]
    if rng.random() < 0.5:
        rng.shuffle(order)
    text = "\n".join([*lines, "# checks", ""])
    checks = []
    for name in order:
        text += f"assert {name} == {values[name]}\n"
        stop = len(text) - 1
        checks.append(Check(name=name, hops=hops[name], start=stop - 4, stop=stop))
    return Source(text=text, checks=tuple(checks))
