"""Fair comparisons and their presentation: prompts, interleaved rounds, tables, one JSON line.

A machine's speed drifts with its temperature and other work. So :func:`interleave` runs candidates
in turn, and ratios are taken within each round.

Letters: B sequences, S prompt tokens.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.base.errors import InvalidArgument


def random_prompts(batch: int, prompt_len: int, vocab_size: int, *, seed: int = 0) -> Tensor:
    """Return random token ids, int64 ``[B, S]``, without the three lowest, which are often
    special."""
    for name, value, least in (("batch", batch, 1), ("prompt_len", prompt_len, 1), ("vocab_size", vocab_size, 4)):
        if value < least:
            raise InvalidArgument(f"{name} must be {least} or greater, got {value}")
    return torch.randint(3, vocab_size, (batch, prompt_len), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and range of several rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(median=statistics.median(values), least=min(values), most=max(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.least:.3g} to {self.most:.3g})"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of :func:`interleave`, with names in the order of the call."""

    seconds: dict[str, tuple[float, ...]]
    """Seconds by name, one entry per round."""
    ratios: dict[str, Spread]
    """Seconds by name over the first one's in the same round; above 1 is slower."""

    def spread(self, name: str) -> Spread:
        """Return the spread of the seconds of ``name``."""
        return Spread.of(self.seconds[name])


def interleave(functions: Mapping[str, Callable[[], float | None]], rounds: int, *, warmup: int = 1) -> Comparison:
    """Run the functions in turn (A, B, A, B, ...), ``rounds`` times after ``warmup`` rounds.

    A function may return its own seconds (of a part, or measured inside). If it returns None, the
    time of the call counts.

    Raises:
        InvalidArgument: no functions or no rounds, or a result that is no positive time.
    """
    if not functions or rounds < 1 or warmup < 0:
        raise InvalidArgument(
            f"interleave needs at least one function and one round, got {len(functions)} functions, {rounds} rounds and "
            f"{warmup} for warming up"
        )
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(-warmup, rounds):
        for name, function in functions.items():
            started = time.perf_counter()
            said = function()
            taken = time.perf_counter() - started
            if said is not None:
                if isinstance(said, bool) or not isinstance(said, int | float) or not said > 0:
                    raise InvalidArgument(f"'{name}' must return its seconds, above 0, or None; it returned {said!r}")
                taken = float(said)
            if turn >= 0:
                seconds[name].append(taken)
    first = next(iter(seconds.values()))
    ratios = {
        name: Spread.of([own / base for own, base in zip(times, first, strict=True)]) for name, times in seconds.items()
    }
    return Comparison(seconds={name: tuple(times) for name, times in seconds.items()}, ratios=ratios)


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows under column names in order of first appearance; floats have four digits.

    Numbers are aligned to the right. A column that a row lacks stays blank.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name, "")) for name in columns] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(columns, *cells, strict=True)]
    numeric = [all(isinstance(row.get(name, 0), int | float) for row in rows) for name in columns]
    lines = [
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in [columns, ["-" * width for width in widths], *cells]
    ]
    return "\n".join(lines)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_table(rows: Sequence[Mapping[str, object]]) -> None:
    """Print :func:`format_table`; nothing for no rows."""
    if rows:
        print(format_table(rows), flush=True)


def print_json(values: Mapping[str, object]) -> None:
    """Print one line of JSON; dataclasses become objects."""
    print(json.dumps(values, default=_plain), flush=True)


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Path | torch.dtype | torch.device):
        return str(value)
    raise InvalidArgument(f"a {type(value).__name__} has no form in JSON; give numbers, texts, lists or mappings")
