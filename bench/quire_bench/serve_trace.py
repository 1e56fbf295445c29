"""Plans of a load generator: random requests, and conversations' traces in Mooncake's format.

A line of a trace is a JSON object with ``timestamp`` (milliseconds from the start),
``input_length`` and ``output_length`` (tokens), and ``hash_ids``: a number for every ``BLOCK``
tokens of the prompt, the last perhaps partly filled. Requests that begin with equal numbers begin
with equal tokens, so a turn carries the numbers of the turn before. Source: Qin et al., "Mooncake:
A KVCache-centric Disaggregated Architecture for LLM Serving", 2024, and the traces published with
it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.base.errors import InvalidArgument, NotFound

BLOCK = 512
"""Tokens of one entry of ``hash_ids``."""
LEAST_ID = 256
"""The lowest random token: lower ids are often special or single bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One request."""

    at: float
    """Arrival in seconds from the start."""
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRow:
    """One line of a trace. ``InvalidArgument`` for impossible values."""

    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        whole = all(type(value) is int for value in (self.input_length, self.output_length, *self.hash_ids))
        time = self.timestamp
        if not whole or type(time) not in (int, float) or not math.isfinite(time) or time < 0:
            raise InvalidArgument(
                "timestamp must be milliseconds of at least 0; input_length, output_length and hash_ids are whole numbers"
            )
        if self.input_length < 1 or self.output_length < 1:
            raise InvalidArgument(
                f"input_length {self.input_length} and output_length {self.output_length}; at least 1 is accepted"
            )
        if len(self.hash_ids) != -(-self.input_length // BLOCK):
            raise InvalidArgument(
                f"{len(self.hash_ids)} hash_ids for {self.input_length} tokens; one for every {BLOCK} tokens is accepted, "
                f"so {-(-self.input_length // BLOCK)}"
            )


def random_requests(
    requests: int,
    *,
    rate: float,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    vocab_size: int,
    seed: int,
) -> list[Planned]:
    """Draw lengths evenly from closed ranges, and arrivals of a Poisson process of ``rate`` per
    second (infinite: all at once). A seed's lengths do not depend on the rate."""
    _check_vocabulary(vocab_size)
    if requests < 1:
        raise InvalidArgument(f"requests {requests}; at least 1 is accepted")
    if not rate > 0:
        raise InvalidArgument(f"rate {rate}; requests a second above 0 are accepted, inf sends all at once")
    for name, (least, most) in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if not 1 <= least <= most:
            raise InvalidArgument(f"{name} {least}-{most}; a range from at least 1 is accepted, like 100-1024")
    lengths, arrivals, tokens = (random.Random(f"{seed} {what}") for what in ("lengths", "arrivals", "tokens"))
    at = 0.0
    planned: list[Planned] = []
    for _ in range(requests):
        prompt = lengths.randint(*prompt_tokens)
        output = lengths.randint(*output_tokens)
        planned.append(Planned(at=at, prompt=_tokens(tokens, prompt, vocab_size), output_tokens=output))
        at += 0.0 if math.isinf(rate) else arrivals.expovariate(rate)
    return planned


def trace_requests(
    rows: Sequence[TraceRow], *, vocab_size: int, scale: float = 1.0, speed: float = 1.0, salt: int = 0
) -> list[Planned]:
    """Return the requests of a trace, with a random block of tokens for each ``hash_ids`` entry.

    ``scale`` shortens prompts, blocks and texts alike, to fit a small model. ``speed`` 2 halves the
    time. Another ``salt`` gives other tokens, without common prefixes.
    """
    _check_vocabulary(vocab_size)
    block = round(BLOCK * scale) if math.isfinite(scale) else 0
    if not 0 < scale <= 1 or block < 1:
        raise InvalidArgument(f"scale {scale}; at most 1 and at least {1 / BLOCK} is accepted")
    if not speed > 0:
        raise InvalidArgument(f"speed {speed}; above 0 is accepted, inf sends all at once")
    if not rows:
        raise InvalidArgument("the trace holds no requests")
    blocks: dict[int, tuple[int, ...]] = {}
    planned: list[Planned] = []
    start = min(row.timestamp for row in rows)
    for row in rows:
        for name in row.hash_ids:
            if name not in blocks:
                blocks[name] = _tokens(random.Random(f"{salt} {name}"), block, vocab_size)
        full, rest = divmod(row.input_length, BLOCK)
        length = full * block + round(rest / BLOCK * block)
        prompt = [token for name in row.hash_ids for token in blocks[name]][: max(1, length)]
        at = (row.timestamp - start) / 1000 / speed
        output = max(1, round(row.output_length * scale))
        planned.append(Planned(at=at, prompt=tuple(prompt), output_tokens=output))
    return sorted(planned, key=lambda request: request.at)


def synthetic_trace(
    conversations: int,
    *,
    turns: tuple[int, int] = (1, 6),
    system_tokens: int = 2 * BLOCK,
    user_tokens: tuple[int, int] = (50, 1500),
    answer_tokens: tuple[int, int] = (20, 500),
    think_seconds: float = 10.0,
    rate: float = 1.0,
    seed: int = 0,
) -> list[TraceRow]:
    """Draw conversations that share a system prompt; each turn carries all earlier text.

    ``turns``, ``user_tokens`` and ``answer_tokens`` are closed ranges. ``rate`` conversations begin
    each second. After an answer, which takes no time, the next turn waits ``think_seconds`` on
    average.
    """
    ranges = (("turns", turns), ("user_tokens", user_tokens), ("answer_tokens", answer_tokens))
    for name, (least, most) in ranges:
        if not 1 <= least <= most:
            raise InvalidArgument(f"{name} {least}-{most}; a range from at least 1 is accepted")
    if conversations < 1 or system_tokens < 0 or think_seconds < 0 or not rate > 0:
        raise InvalidArgument(
            f"conversations {conversations}, system_tokens {system_tokens}, think_seconds {think_seconds}, rate {rate}; at least one "
            "conversation, nothing negative and a rate above 0 are accepted"
        )
    draw = random.Random(seed)
    rows: list[TraceRow] = []
    shared = list(range(system_tokens // BLOCK))
    unused = len(shared)
    begin = 0.0
    for _ in range(conversations):
        at, length, blocks = begin, system_tokens, list(shared)
        for turn in range(draw.randint(*turns)):
            at += draw.expovariate(1 / think_seconds) if turn and think_seconds else 0.0
            length += draw.randint(*user_tokens)
            full = length // BLOCK
            # A full block keeps its number in later turns; a partial block gets a new one when it
            # grows.
            fresh = range(unused, unused + full - len(blocks))
            unused += len(fresh)
            blocks += fresh
            last = [unused] if length % BLOCK else []
            unused += len(last)
            answer = draw.randint(*answer_tokens)
            rows.append(
                TraceRow(
                    timestamp=round(at * 1000), input_length=length, output_length=answer, hash_ids=(*blocks, *last)
                )
            )
            length += answer
        begin += draw.expovariate(rate) if math.isfinite(rate) else 0.0
    return sorted(rows, key=lambda row: row.timestamp)


def read_trace(path: str | Path, *, limit: int | None = None) -> list[TraceRow]:
    """Read the first ``limit`` rows; raise ``NotFound``, or ``InvalidArgument`` with the line."""
    rows: list[TraceRow] = []
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(rows) >= limit:
                    break
                if line.strip():
                    rows.append(_row(line, f"line {number} of {str(path)!r}"))
    except FileNotFoundError:
        raise NotFound(f"trace {str(path)!r} does not exist") from None
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"trace {str(path)!r} is no text: {error}") from error
    if not rows:
        raise InvalidArgument(f"trace {str(path)!r} holds no requests")
    return rows


def write_trace(rows: Iterable[TraceRow], path: str | Path) -> None:
    """Write one line of JSON for each row."""
    Path(path).write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")


def _row(line: str, where: str) -> TraceRow:
    try:
        found = json.loads(line)
        row = (found["timestamp"], found["input_length"], found["output_length"], tuple(found["hash_ids"]))
    except (ValueError, LookupError, TypeError):
        raise InvalidArgument(
            f"{where} is no JSON object with timestamp, input_length, output_length and hash_ids: {line[:80].strip()!r}"
        ) from None
    try:
        return TraceRow(timestamp=row[0], input_length=row[1], output_length=row[2], hash_ids=row[3])
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error}") from error


def _tokens(draw: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(draw.choices(range(LEAST_ID, vocab_size), k=count))


def _check_vocabulary(vocab_size: int) -> None:
    if vocab_size <= LEAST_ID:
        raise InvalidArgument(f"vocab_size {vocab_size}; above {LEAST_ID} is accepted, since random tokens begin there")
