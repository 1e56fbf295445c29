"""Micro-batches: a step cut into several, which stages run at the same time.

While the second stage runs the first micro-batch, the first stage runs the next one. A piece of a
chunk runs behind the pieces before it, in every stage, so that rows see what they see in one
forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.base.types import Chunk, Step

LEAST_ROWS = 64
"""Tokens of a micro-batch: with fewer, reading the weights once more takes longer than the stages
gain (`bench/ranks.py`)."""
FOR_EACH_STAGE = 2
"""Micro-batches for each stage: so many that the first and the last stage are seldom idle."""


def micro_batches(step: Step, stages: int, *, cuts_chunks: bool) -> list[Step]:
    """Return the micro-batches of a step, in order; the step itself where none pay, or where its
    optional inputs and outputs are of all rows. ``cuts_chunks``: whether a chunk may be cut too."""
    count = min(FOR_EACH_STAGE * stages, step.num_tokens // LEAST_ROWS)
    plain = step.is_plain and not step.edits and step.inputs.drawn is None
    if stages == 1 or count < 2 or not plain or any(chunk.tree or chunk.checkpoints for chunk in step.chunks):
        return [step]
    size = -(-step.num_tokens // count)
    parts: list[list[Chunk]] = [[]]
    room = size
    for chunk in step.chunks:
        start, length = 0, len(chunk.tokens)
        while start < length:
            if room <= 0:
                parts.append([])
                room = size
            stop = min(length, start + room) if cuts_chunks else length
            parts[-1].append(_piece(chunk, start, stop))
            room -= stop - start
            start = stop
    return [replace(step, chunks=tuple(part)) for part in parts]


def _piece(chunk: Chunk, start: int, stop: int) -> Chunk:
    """Return some tokens of a chunk. The last one's logits, if they are wanted, are the last
    piece's."""
    if (start, stop) == (0, len(chunk.tokens)):
        return chunk
    wanted = "none" if chunk.logits == "last" and stop < len(chunk.tokens) else chunk.logits
    tokens: Sequence[int] = chunk.tokens[start:stop]
    return replace(chunk, tokens=tokens, logits=wanted)
