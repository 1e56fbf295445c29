"""Prompts without marks in the engine: what is kept of them, and what later ones have of it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from tests.small_llms import Checkpoint, MakeLLM, check, engine_of, greedy, make_checkpoint, random_tokens, token_ids

from quire import LLM, Segment
from quire.base.outputs import RequestOutput
from quire.base.segments import BlendParams
from quire.blend.unmarked_text import LONGEST, content_cuts
from quire.branches.move_costs import MoveCosts
from quire.engine.blending import ASKING, LATER

COUNT = 6
CONTEXT = 4096
DOCUMENTS = [random_tokens(length, seed=length) for length in (900, 760, 1010, 830)]


@pytest.fixture(autouse=True)
def loads_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are depends on how busy the machine is."""
    monkeypatch.setattr(MoveCosts, "is_worth", lambda self, tokens, roads: True)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint("llama", tmp_path_factory.mktemp("long"), max_position_embeddings=CONTEXT)


@pytest.fixture
def llm(make_llm: MakeLLM, long: Checkpoint) -> LLM:
    """Without a prefix cache: what is reused is reused by chunks."""
    return make_llm(long, pool=6 * CONTEXT, enable_prefix_caching=False, max_num_batched_tokens=CONTEXT)


def question(seed: int) -> list[int]:
    return random_tokens(ASKING, seed=seed)


def kept(llm: LLM) -> set[Any]:
    """Chunks, of which none is under way."""
    engine = engine_of(llm)
    while not engine.scheduler.idle:
        engine.step()
    assert not engine.blending.under_way
    check(llm)
    return {
        key
        for listed in engine.blending.catalog._lists.values()
        for key, tier in listed.tiers.items()
        if tier is not None
    }


def ask(llm: LLM, prompts: list[Any], ratio: float = 0.15, **more: Any) -> list[RequestOutput]:
    return llm.generate(prompts, greedy(COUNT), blend=BlendParams(ratio=ratio, **more))


def share(outputs: list[RequestOutput]) -> float:
    """Of the tokens of prompts, but of questions, the part that had a state."""
    blends = [output.blend for output in outputs if output.blend is not None]
    whole = sum(len(output.prompt_token_ids) - ASKING for output in outputs)
    return sum(sum(one.by_tier.values()) for one in blends) / whole


def test_a_prompt_without_marks_leaves_chunks(llm: LLM, long: Checkpoint) -> None:
    """They are those that marks would have given, and they are found at other places."""
    prompt = [*DOCUMENTS[0], *question(1)]
    (first,) = ask(llm, [prompt])
    assert first.outputs[0].token_ids == long.greedy(prompt, COUNT)
    cuts = content_cuts(np.array(DOCUMENTS[0]), to_end=False)
    assert sorted(key.count for key in kept(llm)) == sorted(stop - start for start, stop in cuts)
    whole = llm.warm([Segment(DOCUMENTS[0][start:stop]) for start, stop in cuts])
    assert [one.computed for one in whole] == [0] * len(cuts)
    later = [*random_tokens(333, seed=9), *DOCUMENTS[0], *question(2)]
    (second,) = ask(llm, [later], ratio=0.0)
    assert second.blend is not None
    assert second.blend.blended == cuts[-1][1]
    assert second.blend.by_tier == {"memory": cuts[-1][1]}
    (exact,) = ask(llm, [later], ratio=1.0)
    assert exact.blend is not None
    assert exact.blend.exact == len(later)
    assert exact.outputs[0].token_ids == long.greedy(later, COUNT)


def test_rows_are_those_of_marked_text(llm: LLM, make_llm: MakeLLM, long: Checkpoint) -> None:
    """Blending with chunks that came by themselves is blending with those that a caller warms."""
    ask(llm, [[*DOCUMENTS[0], *question(1)], [*DOCUMENTS[1], *question(1)]])
    kept(llm)
    parts = [
        Segment(document[start:stop])
        for document in DOCUMENTS[:2]
        for start, stop in content_cuts(np.array(document), to_end=False)
    ]
    other = make_llm(long, pool=6 * CONTEXT, enable_prefix_caching=False, max_num_batched_tokens=CONTEXT)
    other.warm(parts)
    assert sorted(key.count for key in kept(other)) == sorted(key.count for key in kept(llm))
    later = [*DOCUMENTS[1], *DOCUMENTS[0], *question(2)]
    one, two = (ask(each, [later], keep=False) for each in (llm, other))
    assert token_ids(one) == token_ids(two)
    assert one[0].blend == two[0].blend
    assert share(one) > 0.5


def test_new_orders_add_nothing(llm: LLM) -> None:
    """Four rounds of all documents in new orders: the chunks are those of the first one, and the
    blended share does not fall. With one chunk for each two texts that meet it would."""
    rng = random.Random(1)
    chunks, shares = [], []
    for number in range(4):
        prompts = [
            [token for document in rng.sample(DOCUMENTS, 3) for token in document] + question(10 * number + index)
            for index in range(6)
        ]
        outputs = [output for prompt in prompts for output in ask(llm, [prompt])]
        shares.append(share(outputs))
        chunks.append(kept(llm))
    assert chunks[0] == chunks[1] == chunks[2] == chunks[3]
    assert shares[1] > 0.5
    assert min(shares[2:]) >= 0.9 * shares[1]
    total = sum(map(len, DOCUMENTS))
    assert sum(key.count for key in chunks[0]) <= 1.5 * total


def test_marks_and_questions_keep_their_bounds(llm: LLM) -> None:
    """Segments are chunks as wholes, what stands between them is cut, questions are left alone."""
    between = DOCUMENTS[1]
    ask(llm, [[Segment(DOCUMENTS[0]), between, Segment(DOCUMENTS[2][:100]), DOCUMENTS[3][:600]]])
    lengths = [stop - start for start, stop in content_cuts(np.array(between), to_end=True)]
    assert sorted(key.count for key in kept(llm)) == sorted([900, 100, *lengths])
    ask(llm, [[Segment(DOCUMENTS[0]), question(1)]])
    assert len(kept(llm)) == 2 + len(lengths)


def test_what_is_covered_is_not_cut(llm: LLM) -> None:
    """A segment that stands in a prompt without marks is no new text."""
    llm.warm([Segment(DOCUMENTS[0])])
    before = kept(llm)
    ask(llm, [[*random_tokens(30), *DOCUMENTS[0], *question(1)]])
    assert kept(llm) == before


def test_exact_prefixes_are_not_cut(make_llm: MakeLLM, long: Checkpoint) -> None:
    llm = make_llm(long, pool=3 * CONTEXT, max_num_batched_tokens=CONTEXT)
    llm.generate([DOCUMENTS[0]], greedy(1))
    (output,) = ask(llm, [[*DOCUMENTS[0], *DOCUMENTS[1], *question(1)]])
    cached = output.num_cached_tokens
    assert cached > 800
    cuts = content_cuts(np.array([*DOCUMENTS[0], *DOCUMENTS[1]][cached:]), to_end=False)
    assert sorted(key.count for key in kept(llm)) == sorted(stop - start for start, stop in cuts)


def test_nothing_is_kept_unasked(llm: LLM) -> None:
    ask(llm, [[*DOCUMENTS[0], *question(1)]], keep=False)
    llm.generate([DOCUMENTS[1]], greedy(1))
    ask(llm, [DOCUMENTS[2][:60]])
    assert not kept(llm)


def test_what_waits_is_bounded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of more chunks than may wait leaves the others to a later one."""
    monkeypatch.setattr("quire.engine.blending.LATER", 3)
    prompt = [*DOCUMENTS[0], *DOCUMENTS[1], *question(1)]
    cuts = content_cuts(np.array(prompt[:-ASKING]), to_end=False)
    assert 3 < len(cuts) <= 6 < LATER
    ask(llm, [prompt])
    assert len(kept(llm)) == 3
    ask(llm, [prompt])
    assert len(kept(llm)) == len(cuts)
    assert sum(stop - start for start, stop in cuts) > len(prompt) - ASKING - LONGEST
