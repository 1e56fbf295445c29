"""Steps cut into micro-batches: the same rows in the same order, and which steps stay whole."""

from __future__ import annotations

import pytest

from quire.base.types import Add, Chunk, Inputs, Step, TokenTree
from quire.runner.local import logits_rows
from quire.runner.micro_batches import LEAST_ROWS, micro_batches

LONG = 5 * LEAST_ROWS


def tokens(parts: list[Step], seq: int) -> list[int]:
    return [token for part in parts for chunk in part.chunks if chunk.seq == seq for token in chunk.tokens]


def test_a_prompt_beside_decodes_is_cut_evenly() -> None:
    step = Step(
        chunks=(Chunk(1, [7]), Chunk(2, range(LONG)), Chunk(3, [8, 9], logits="all"), Chunk(4, [1], logits="none"))
    )
    parts = micro_batches(step, 2, cuts_chunks=True)
    assert [part.num_tokens for part in parts] == [81, 81, 81, 81]
    assert tokens(parts, 2) == list(range(LONG))
    assert tokens(parts, 3) == [8, 9]
    wanted = [chunk.logits for part in parts for chunk in part.chunks if chunk.seq == 2]
    assert wanted == ["none", "none", "none", "last"]
    assert sum(logits_rows(part.chunks)[1][-1] for part in parts) == logits_rows(step.chunks)[1][-1]


def test_chunks_that_stay_whole_are_dealt() -> None:
    step = Step(chunks=tuple(Chunk(seq, range(LEAST_ROWS)) for seq in range(6)))
    parts = micro_batches(step, 2, cuts_chunks=False)
    assert [[chunk.seq for chunk in part.chunks] for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert micro_batches(Step(chunks=(Chunk(1, range(LONG)),)), 2, cuts_chunks=False) == [
        Step(chunks=(Chunk(1, range(LONG)),))
    ]


@pytest.mark.parametrize(
    ("step", "stages"),
    [
        (Step(chunks=(Chunk(1, range(LONG)),)), 1),
        (Step(chunks=(Chunk(1, range(2 * LEAST_ROWS - 1)),)), 2),
        (Step(edits=(Add(1),), chunks=(Chunk(1, range(LONG)),)), 2),
        (Step(chunks=(Chunk(1, range(LONG)),), inputs=Inputs(hidden_states=True)), 2),
        (Step(chunks=(Chunk(1, range(LONG)), Chunk(2, [1, 2], tree=TokenTree((-1, 0))))), 2),
        (Step(chunks=(Chunk(1, range(LONG), checkpoints=(16,)),)), 2),
    ],
    ids=["one-stage", "short", "edits", "outputs", "tree", "checkpoints"],
)
def test_steps_that_stay_whole(step: Step, stages: int) -> None:
    assert micro_batches(step, stages, cuts_chunks=True) == [step]
