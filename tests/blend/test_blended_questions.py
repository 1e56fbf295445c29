"""Prompts whose questions tell what is computed anew, and chunks that are exact where they stand.

That the fixed point holds with such a selection too is in ``test_blending``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.small_llms import Checkpoint, MakeLLM, check, engine_of, greedy, random_tokens
from torch import Tensor

from quire import LLM, BlendCalibration, QualityLimits
from quire.base.blend_inputs import BlendInputs
from quire.base.segments import AUTO, DEFAULT_RATIO, Segment
from quire.blend import forward as forward_module
from quire.blend.calibration import BlendQuality
from quire.blend.scores import StatedScore, score_of
from quire.engine import blending as blending_module
from quire.engine.blending import ASKING, LEAD_TEXT, UNCALIBRATED, Blending, lead_text_of, start_of
from quire.engine.step_builder import ScheduledStep
from quire.text.tokenizer import Tokenizer

from .test_blending import (
    COUNT,
    DOCUMENTS,
    PROMPT,
    QUESTION,
    SEGMENTS,
    blended,
    counted,
    joined,
    loads_are_worth_it,  # noqa: F401
    told,
)

TINY = Path(__file__).resolve().parents[2] / "src/quire/data/tiny-python"
RECALL = Path(__file__).resolve().parents[2] / "recipes/chunk_recall/model"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str | None], list[int], list[Tensor]]]:
    """Of each blended step: the scores of its chunks, the rows that went on, and the state of its
    first sequence behind it, by layer."""
    found: list[tuple[list[str | None], list[int], list[Tensor]]] = []
    right = Blending.ran

    def ran(self: Blending, scheduled: ScheduledStep, blend: BlendInputs, masks: Sequence[Any]) -> None:
        work, state = scheduled.requests[0].branch, self._runner.state
        assert work.seq is not None
        export, end = state.open_export(work.seq), work.computed + len(scheduled.step.chunks[0].tokens)
        rows = [part.clone() for layer in self.layout.layers for part in export.rows(layer, 0, end).values()]
        names = [None if one is None else one.score for one in blend.chunks]
        sizes = [len(chunk.tokens) for chunk in scheduled.step.chunks]
        left = [np.zeros(size, bool) if mask is None else mask for size, mask in zip(sizes, masks, strict=True)]
        found.append((names, np.flatnonzero(~np.concatenate(left)).tolist(), rows))
        right(self, scheduled, blend, masks)

    monkeypatch.setattr(Blending, "ran", ran)
    return found


def test_the_state_is_that_of_the_same_rows_given(
    make_llm: MakeLLM,
    llama: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[tuple[list[str | None], list[int], list[Tensor]]],
) -> None:
    """Nothing of the rehearsal is left: the rows that it chose, given by name, give the same state
    to the bit."""

    def run(select: str) -> None:
        llm = make_llm(llama)
        llm.warm(SEGMENTS)
        llm.generate([PROMPT], greedy(1), blend=blended(0.3, select=select))
        check(llm)

    rehearsals = counted(monkeypatch)
    run("v_or_question")
    assert rehearsals == [len(QUESTION)]
    run("v")
    ((names, rows, state), (_, others, _)) = steps
    assert names == ["v_or_question"]
    assert rows != others, "the question changes what is chosen"
    steps.clear()
    chosen = np.isin(np.arange(len(joined(PROMPT))), rows).astype(np.float32)
    monkeypatch.setattr(forward_module, "score_of", lambda name: StatedScore(chosen))
    run("v")
    ((_, found, again),) = steps
    assert found == rows
    assert len(rehearsals) == 1
    assert all(torch.equal(one, other) for one, other in zip(state, again, strict=True))


def test_where_v_takes_its_place(
    make_llm: MakeLLM, llama: Checkpoint, steps: list[tuple[list[str | None], list[int], list[Tensor]]]
) -> None:
    """A piece without a row of the question, one of which most rows have no cached one, and ratios
    that leave no choice."""
    cases: list[tuple[list[Segment | list[int]], float, int, list[str]]] = [
        ([SEGMENTS[0], SEGMENTS[2], SEGMENTS[1], QUESTION], 0.2, 16, ["v", "v_or_question"]),
        ([SEGMENTS[0], SEGMENTS[2], QUESTION], 0.0, 2048, ["v"]),
        ([SEGMENTS[0], SEGMENTS[2], QUESTION], 1.0, 2048, ["v"]),
        ([SEGMENTS[0], SEGMENTS[2], random_tokens(45, seed=5)], 0.2, 2048, ["v_or_question"]),
        ([SEGMENTS[0], SEGMENTS[2], random_tokens(47, seed=5)], 0.2, 2048, ["v"]),
        ([joined([SEGMENTS[0], SEGMENTS[2]])], 0.2, 2048, ["v_or_question"]),
    ]
    for prompt, ratio, budget, expected in cases:
        llm = make_llm(llama, max_num_batched_tokens=budget, page_size=8)
        llm.warm(SEGMENTS)
        steps.clear()
        asked = [prompt] if len(prompt) > 1 else joined(prompt)
        llm.generate(asked, greedy(1), blend=blended(ratio, select="v_or_question"))
        names = [name for names, _, _ in steps for name in names if name is not None]
        assert names[0] == expected[0]
        assert names[-1] == expected[-1]
        check(llm)


def test_edits_ask_their_last_tokens(
    make_llm: MakeLLM,
    llama: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[tuple[list[str | None], list[int], list[Tensor]]],
) -> None:
    rehearsals = counted(monkeypatch)
    session = make_llm(llama).session(random_tokens(240, seed=8))
    report = session.edit((20, 45), [7, 8], mode="blend", blend=blended(0.2, select="v_or_question"))
    assert report.blended
    assert [names for names, _, _ in steps] == [["v_or_question"]]
    assert rehearsals == [ASKING + 2], "and what took the span's place"


def test_the_mass_is_that_of_the_layers_that_select_and_later(
    make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt all of whose cached rows are true it is that of a full computation's weights."""
    llm = make_llm(llama)
    llm.warm(SEGMENTS)
    prompt = [SEGMENTS[0], QUESTION]  # The chunk is exact where it stands, and so no candidate.
    monkeypatch.setattr(Blending, "_find", found_not_exact(Blending._find))
    masses: list[Tensor] = []

    class Watched:
        needs = score_of("v_or_question").needs

        def scores(self, inputs: forward_module.ScoreInputs) -> Tensor:
            assert inputs.question_mass is not None
            masses.append(inputs.question_mass)
            return score_of("v_or_question").scores(inputs)

    monkeypatch.setattr(forward_module, "score_of", lambda name: Watched())
    llm.generate([prompt], greedy(1), blend=blended(0.2, select="v_or_question"))
    ids = torch.tensor([joined(prompt)])
    llama.model.set_attn_implementation("eager")
    weights = llama.model(ids, output_attentions=True).attentions
    first = engine_of(llm).blending.check_layer
    wanted = torch.stack([one[0, :, -len(QUESTION) :].sum((0, 1)) for one in weights[first:]]).sum(0)
    # Sharp weights of another implementation, float32, summed over layers, heads and 9 rows.
    assert torch.allclose(masses[0], wanted.detach(), atol=1e-3, rtol=1e-3)


def found_not_exact(right: Callable[..., object]) -> Callable[..., object]:
    def find(self: Blending, work: object, blend: object) -> object:
        found = right(self, work, blend)
        blend.exact[:] = False  # type: ignore[attr-defined]
        return found

    return find


# -- chunks that are exact -------------------------------------------------------------------------


def test_a_chunk_where_it_was_computed_is_exact(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """It is never computed anew, it counts as exact, and other prompts find it."""
    llm = make_llm(llama)
    for ratio in (0.0, 0.5, 0.9):
        llm.reset_prefix_cache()
        llm.warm(SEGMENTS)
        (output,) = llm.generate([[*SEGMENTS[:2], QUESTION]], greedy(1), blend=blended(ratio))
        found = told(output)
        assert output.num_cached_tokens == 0
        assert found.exact >= 40
        assert found.recomputed == -int(-ratio * 33 // 1)
        assert found.blended == 33 - found.recomputed
        assert found.by_tier == {"memory": 73}
        prompt = [*DOCUMENTS[0], *random_tokens(20, seed=6)]
        (other,) = llm.generate([prompt], greedy(COUNT))
        assert other.num_cached_tokens >= 40 - 15
        assert other.outputs[0].token_ids == llama.greedy(prompt, COUNT)
        check(llm)
    llm.reset_prefix_cache()
    llm.warm(SEGMENTS)
    (alone,) = llm.generate([[SEGMENTS[2], QUESTION]], greedy(COUNT), blend=blended(0.0))
    assert told(alone).blended == 0
    assert told(alone).exact == 52 + len(QUESTION)
    assert told(alone).by_tier in ({"memory": 52}, {})
    assert alone.outputs[0].token_ids == llama.greedy(joined([SEGMENTS[2], QUESTION]), COUNT)


def test_only_behind_its_lead() -> None:
    llm = LLM(RECALL, dtype="float32", device="cpu", kv_cache_memory="32MiB", max_model_len=512)
    (lead,) = engine_of(llm).blending.lead
    chunk, question = [7 + row % 5 for row in range(40)], [9, 8, 9]
    for before, exact in (([lead], 1 + 40), ([lead + 1], 1), ([lead, lead], 2), ([], 0)):
        llm.reset_prefix_cache()
        llm.warm([Segment(chunk)])
        parts = [before, Segment(chunk), Segment(chunk), question] if before else [Segment(chunk), question]
        (output,) = llm.generate([parts], greedy(1), blend=blended(0.0))
        assert told(output).exact == exact
        assert told(output).blended == (40 if exact > 40 or not before else 80)
    llm.close()


# -- the lead and the warning ----------------------------------------------------------------------


def test_chunks_are_computed_behind_a_text_where_the_vocabulary_has_it() -> None:
    """A text in the middle of a prompt has read others, and so has a chunk. A vocabulary that
    cannot spell the text has none, and short contexts have no room for it."""
    tiny = Tokenizer.from_directory(TINY)
    assert tiny is not None
    text = lead_text_of(tiny, 10**6)
    assert tiny.decode(text) == LEAD_TEXT
    assert lead_text_of(tiny, 16 * len(text)) == text
    assert lead_text_of(tiny, 16 * len(text) - 1) == ()
    assert lead_text_of(None, 10**6) == ()
    llm = LLM(RECALL, dtype="float32", device="cpu", kv_cache_memory="32MiB", max_model_len=512)
    assert lead_text_of(engine_of(llm).tokenizer, 10**6) == (), "its vocabulary has no words"
    llm.close()


def test_the_lead_has_the_text() -> None:
    """Behind what a sequence begins with."""
    llm = LLM("tiny-python", kv_cache_memory="32MiB", device="cpu")
    blending, tokenizer = engine_of(llm).blending, engine_of(llm).tokenizer
    assert blending.lead == (*start_of(tokenizer), *lead_text_of(tokenizer, 10**6))
    assert len(blending.lead) > 64 > len(blending.start)
    llm.close()


def test_the_lead_is_what_a_chunk_has_read(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """A prompt that begins with the whole lead has the chunk's rows exactly; they do not depend on
    what a prompt has in front of them."""
    llm = make_llm(llama)
    blending = engine_of(llm).blending
    blending.lead = tuple(random_tokens(21, seed=30))
    llm.warm(SEGMENTS)
    prompt = [list(blending.lead), SEGMENTS[2], QUESTION]
    (output,) = llm.generate([prompt], greedy(COUNT), blend=blended(0.0))
    assert told(output).exact == len(joined(prompt))
    assert output.outputs[0].token_ids == llama.greedy(joined(prompt), COUNT)
    (other,) = llm.generate([[list(blending.lead)[:20], SEGMENTS[2], QUESTION]], greedy(COUNT), blend=blended(0.0))
    assert told(other).blended == 52
    check(llm)


def test_chunks_behind_what_prompts_begin_with(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """The first segment is exact. Prompts that begin otherwise, and segments that were computed
    without, use and keep what they did before."""
    llm = make_llm(llama)
    engine, begin, other = engine_of(llm), random_tokens(21, seed=30), random_tokens(21, seed=31)
    llm.warm([SEGMENTS[1]])
    prompt = [begin, SEGMENTS[2], QUESTION]
    for behind, computed in ((prompt, 52), (begin, 0), ([begin, SEGMENTS[0], SEGMENTS[2]], 0)):
        assert [one.computed for one in llm.warm([SEGMENTS[2]], behind=behind)] == [computed]

    (home,) = llm.generate([prompt], greedy(COUNT), blend=blended(0.0))
    assert (told(home).blended, told(home).exact) == (0, len(joined(prompt)))
    assert home.outputs[0].token_ids == llama.greedy(joined(prompt), COUNT)
    (behind,) = llm.generate([[begin, [5], SEGMENTS[2], QUESTION]], greedy(COUNT), blend=blended(0.0))
    assert told(behind).blended == 52
    (missed,) = llm.generate([[other, SEGMENTS[2], QUESTION]], greedy(COUNT), blend=blended(0.0))
    assert "0 tokens have a state" in told(missed).reason
    (earlier,) = llm.generate([[begin, SEGMENTS[1], QUESTION]], greedy(COUNT), blend=blended(0.0))
    assert told(earlier).blended == 33
    (most,) = llm.generate([[begin, *SEGMENTS[1:3], QUESTION]], greedy(COUNT), blend=blended(0.0))
    assert told(most).exact > 52, "52 tokens behind the beginning are more than 33 without"
    # What is kept in idle time is computed behind the beginning, too.
    llm.generate([[begin, SEGMENTS[0], QUESTION]], greedy(COUNT), blend=blended(0.0, keep=True))
    while engine.blending.under_way:
        llm.generate([[1]], greedy(1))
    assert [one.computed for one in llm.warm([SEGMENTS[0]], behind=begin)] == [0]
    check(llm)


def test_chunks_behind_a_chat() -> None:
    """Messages without a segment are followed by a user's."""
    llm = LLM("tiny-python", kv_cache_memory="32MiB", device="cpu")
    engine_of(llm).stored.is_worth = lambda tokens, nbytes: True
    system, text = {"role": "system", "content": "Geometry."}, "def area(width, height):\n    return width\n\n" * 4
    parts = [{"type": "text", "text": text, "segment": True}, {"type": "text", "text": "def volume("}]
    chat = [system, {"role": "user", "content": parts}]
    assert [one.computed > 0 for one in llm.warm([Segment(text)], behind=[system])] == [True]
    assert [one.computed for one in llm.warm([Segment(text)], behind=chat)] == [0]
    (output,) = llm.chat(chat, greedy(2), blend=blended(0.0))
    assert told(output).exact == len(output.prompt_token_ids), "it stands where it was computed"
    assert told(output).by_tier
    assert [one.computed > 0 for one in llm.warm([Segment(text)])] == [True]
    llm.close()


def test_beginnings_are_bounded(make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """In number and in length; the longest counts."""
    blending = engine_of(make_llm(llama)).blending
    monkeypatch.setattr(blending_module, "LEADS", 2)
    monkeypatch.setattr(blending_module, "LEAD_TOKENS", 4)
    text = np.arange(1, 9)
    assert blending.lead_of(text) == blending.add_lead(text[:0]) == blending.lead
    assert blending.add_lead(text) == blending.lead_of(text) == (1, 2, 3, 4)
    assert blending.add_lead(text[:2]) == blending.lead_of(np.array([1, 2, 9])) == (1, 2)
    assert blending.lead_of(text) == (1, 2, 3, 4)
    blending.add_lead(text[3:])
    assert blending.lead_of(text) == (1, 2)


def test_a_model_that_is_not_calibrated_warns(
    make_llm: MakeLLM, llama: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """Once in the log, and in each answer of which some is blended."""
    llm = make_llm(llama)
    llm.warm(SEGMENTS)
    found = [told(llm.generate([PROMPT], greedy(1), blend=blended(ratio))[0]) for ratio in (0.2, 0.4, 1.0)]
    assert [one.warning for one in found] == [UNCALIBRATED, UNCALIBRATED, ""]
    assert sum(UNCALIBRATED in record.message for record in caplog.records) == 1
    quality = BlendQuality(
        layer=1, ratio=0.0, mean_kl=0.0, agreement=1.0, worst_agreement=1.0, equal_texts=1.0, cost=0.5
    )
    engine_of(llm).blending.calibration = BlendCalibration(
        layer=1, probes=1, sampled=False, limits=QualityLimits(), qualities=(quality,)
    )
    assert told(llm.generate([PROMPT], greedy(1), blend=blended(0.2))[0]).warning == ""


def test_the_defaults_are_those_that_were_measured() -> None:
    """On a real model (``docs/blend.md``)."""
    assert (AUTO, DEFAULT_RATIO) == ("v_or_question", 0.3)
    assert (QualityLimits().mean_kl, QualityLimits().equal_texts) == (0.05, 0.9)
