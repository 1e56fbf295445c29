"""Blended prompts of a model that has to read across chunks, through the engine: the goals of
``bench/blend_quality.py`` hold for what users call, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest
from recipes.chunk_recall.task import BOS, Kind, Question, make_question
from tests.small_llms import assert_empty, check, engine_of, greedy

from quire import LLM, BlendParams, Segment

MODEL = Path(__file__).resolve().parents[2] / "recipes/chunk_recall/model"
PROMPTS = 24
"""For each number of hops."""


@pytest.fixture(scope="module")
def recall() -> Iterator[LLM]:
    llm = LLM(MODEL, dtype="float32", device="cpu", kv_cache_memory="64MiB", max_model_len=512)
    yield llm
    llm.close()
    assert_empty(llm)


@pytest.fixture(scope="module")
def questions(recall: LLM) -> list[Question]:
    """Questions of one and two hops; chunks are kept, as they are behind BOS."""
    rng = random.Random("recall")
    found = [make_question(rng, Kind(), hops) for hops in (1, 2) for _ in range(PROMPTS)]
    recall.warm([Segment(chunk) for one in found for chunk in one.chunks])
    return found


def answers(llm: LLM, questions: list[Question], params: BlendParams) -> tuple[float, float]:
    """Mean divergence from full computations, and the part of right answers."""
    prompts = [[[BOS, *one.chunks[0]], *map(Segment, one.chunks[1:]), list(one.ask)] for one in questions]
    llm.reset_prefix_cache()
    llm.warm([Segment(chunk) for one in questions for chunk in one.chunks])
    outputs = llm.generate(prompts, greedy(1), blend=params)
    blends = [output.blend for output in outputs if output.blend is not None]
    assert len(blends) == len(questions)
    assert all(blend.blended or params.ratio == 1 for blend in blends)
    right = [output.outputs[0].token_ids == [one.answer] for output, one in zip(outputs, questions, strict=True)]
    return mean(blend.divergence or 0.0 for blend in blends), mean(right)


def test_lead(recall: LLM) -> None:
    assert engine_of(recall).blending.lead == (BOS,)


def test_goals(recall: LLM, questions: list[Question]) -> None:
    """At 15 %: a KL of at most 0.1 nats and 92 % right, where reuse alone answers hardly any."""
    none, few = answers(recall, questions, BlendParams(ratio=0.0, least=16, keep=False, verify=1.0))
    assert none > 1.0
    assert few < 0.6
    blended, right = answers(recall, questions, BlendParams(ratio=0.15, least=16, keep=False, verify=1.0))
    assert blended <= 0.1
    assert right >= 0.92
    full, everything = answers(recall, questions, BlendParams(ratio=1.0, least=16, keep=False, verify=1.0))
    assert full == 0.0
    assert everything >= 0.92
    check(recall)
