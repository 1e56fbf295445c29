"""Covering arrays: few rows that have every pair of values of any two factors."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Value = tuple[str, Any]
CANDIDATES = 30
"""Rows that are made for each row that is taken."""


def pairs_of(row: Row) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield the pairs of values that a row has."""
    for (one, a), (other, b) in itertools.combinations(row.items(), 2):
        yield one, a, other, b


def covering_array(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[Row]:
    """Return rows that have every pair of values of any two factors. The greedy method of Cohen et
    al., "The AETG system" (1997): each row is the candidate with the most missing pairs."""
    rng, rows = random.Random(seed), list[Row]()
    missing = {
        (one, a, other, b)
        for one, other in itertools.combinations(factors, 2)
        for a in factors[one]
        for b in factors[other]
    }
    while missing:
        ordered, partners = sorted(missing, key=repr), defaultdict[Value, set[Value]](set)
        for name, a, other, b in missing:
            partners[name, a].add((other, b))
            partners[other, b].add((name, a))
        made = [_candidate(factors, ordered, partners, rng) for _ in range(CANDIDATES)]
        rows.append(max(made, key=lambda row: sum(pair in missing for pair in pairs_of(row))))
        missing.difference_update(pairs_of(rows[-1]))
    return rows


def _candidate(
    factors: Mapping[str, Sequence[Any]],
    missing: Sequence[Any],
    partners: Mapping[Value, set[Value]],
    rng: random.Random,
) -> Row:
    """Return a row that begins with a missing pair; each further factor has the value that is in
    the most missing pairs. ``partners``: the other values of missing pairs, of each value."""
    one, a, other, b = rng.choice(missing)
    found: Row = {one: a, other: b}
    order = list(factors)
    rng.shuffle(order)

    def gain(name: str, value: Any) -> int:
        return len(partners[name, value] & found.items()) if (name, value) in partners else 0

    for name in order:
        if name not in found:
            values = rng.sample(list(factors[name]), len(factors[name]))
            found[name] = max(values, key=lambda value: gain(name, value))
    return {name: found[name] for name in factors}


def random_rows(factors: Mapping[str, Sequence[Any]], count: int, seed: int) -> list[Row]:
    """Return rows of independent values: of any three factors, so many random triples."""
    rng = random.Random(seed)
    return [{name: rng.choice(list(values)) for name, values in factors.items()} for _ in range(count)]
