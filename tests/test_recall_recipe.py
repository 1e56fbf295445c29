"""The recipe of the model that blending is measured on: what its prompts mean, its stages in
miniature, and the checkpoint that is kept.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.base.errors import InvalidArgument

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.chunk_recall import task, train
from recipes.chunk_recall.task import ARROW, ASK, BOS, END, EQUALS, FIRST_VALUE, WORDS, Kind

KEPT = Path(__file__).resolve().parents[1] / "recipes/chunk_recall/model"
KINDS = [
    Kind(),
    Kind(chunks=1),
    Kind(aliases=0.0),
    Kind(distractors=0.3),
    Kind(overridden=0.5),
    Kind(repeated=True),
    Kind(permuted=True, overridden=0.2),
    Kind(shortest=12, longest=12),
    Kind(shortest=8, longest=8, statements=2),
    Kind(shortest=256, longest=256),
]


def meaning(chunks: list[list[int]]) -> tuple[dict[int, tuple[int | None, int]], list[tuple[int, int]]]:
    """Read chunks as a program: value and aliases of each key, and what each ``;`` stands for."""
    known: dict[int, tuple[int | None, int]] = {}
    labels, place = [], 1
    for chunk in chunks:
        for index, token in enumerate(chunk):
            if token == END:
                key, sign, right = chunk[index - 3 : index]
                if sign == ARROW:
                    known[key] = (right, 0)
                else:
                    assert sign == EQUALS
                    value, hops = known.get(right, (None, 0))
                    known[key] = (value, hops + 1)
                value = known[key][0]
                if value is not None:
                    labels.append((place + index, value))
        place += len(chunk)
    return known, labels


class TestTask:
    @given(st.integers(0, 10_000), st.sampled_from(KINDS))
    def test_prompts_mean_what_they_say(self, seed: int, kind: Kind) -> None:
        prompt = task.make_prompt(random.Random(seed), kind)
        chunks = [list(chunk) for chunk in prompt.chunks]
        known, labels = meaning(chunks)
        assert len(chunks) == kind.chunks + kind.repeated
        assert all(kind.shortest <= len(chunk) <= kind.longest for chunk in chunks)
        assert all(chunk.count(END) == kind.statements for chunk in chunks)
        assert prompt.body == [BOS, *(token for chunk in chunks for token in chunk)]
        assert prompt.labels == labels
        assert {key: made.value for key, made in prompt.known.items()} == {key: told[0] for key, told in known.items()}
        for hops in range(3):
            assert set(prompt.keys(hops)) == {key for key, (value, far) in known.items() if value and far == hops}

    @given(st.integers(0, 10_000), st.booleans())
    def test_an_alias_needs_an_earlier_chunk(self, seed: int, overridden: bool) -> None:
        """So that no chunk that is read alone tells it."""
        prompt = task.make_prompt(random.Random(seed), Kind(overridden=0.3 * overridden))
        for chunk in prompt.chunks:
            said: set[int] = set()
            for index in (index for index, token in enumerate(chunk) if token == END):
                key, sign, right = chunk[index - 3 : index]
                assert sign == ARROW or right not in said
                said.add(key)

    @pytest.mark.parametrize("hops", range(3))
    def test_questions_have_the_hops_that_were_asked_for(self, hops: int) -> None:
        for seed in range(20):
            question = task.make_question(random.Random(seed), Kind(overridden=0.2), hops)
            known, _ = meaning([list(chunk) for chunk in question.chunks])
            assert known[question.ask[1]] == (question.answer, hops)
            assert question.tokens[-2:] == [ASK, question.ask[1]]

    def test_refusals(self) -> None:
        with pytest.raises(InvalidArgument, match="12 tokens or more"):
            Kind(shortest=11)
        with pytest.raises(InvalidArgument, match="12 tokens or more"):
            Kind(longest=15)
        with pytest.raises(InvalidArgument, match="1 to 48 statements"):
            Kind(chunks=17)
        with pytest.raises(InvalidArgument, match="2 hops"):
            task.make_question(random.Random(0), Kind(aliases=0.0), 2)


class TestTraining:
    @given(st.integers(0, 1000), st.sampled_from([kind for kind in KINDS if not kind.permuted]))
    def test_every_label_is_the_value_of_its_place(self, seed: int, kind: Kind) -> None:
        batch = train.make_batch(random.Random(seed), kind, 500)
        assert batch.ids.shape == batch.labels.shape == batch.asked.shape
        for ids, labels, asked in zip(
            *(each[:4].tolist() for each in (batch.ids, batch.labels, batch.asked)), strict=True
        ):
            begin = ids.index(ASK)
            known, stands_for = meaning([ids[1:begin]])
            assert {place: label for place, label in enumerate(labels[:begin]) if label >= 0} == dict(stands_for)
            places = [place for place, hops in enumerate(asked) if hops]
            assert places == [begin + 1 + 2 * at for at in range(train.QUESTIONS)]
            assert [(labels[place], asked[place] - 1) for place in places] == [known[ids[place]] for place in places]
            assert max(labels[places[-1] + 1 :], default=train.IGNORED) == train.IGNORED

    @pytest.mark.slow
    def test_training_ends_better_than_it_began_and_is_kept_as_quire_loads_it(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(train, "STAGES", tuple((kind, 512) for kind, _ in train.STAGES))
        monkeypatch.setattr(train, "VARIANTS", {"default": Kind()})
        output = tmp_path / "model"
        assert train.main(["--output", str(output), "--steps", "25", "--evaluated", "3", "--report-every", "12"]) == 0
        said = capfd.readouterr()
        first, *_, last = (float(line.split("loss ")[1].split()[0]) for line in said.err.splitlines() if "loss" in line)
        assert last < first - 0.5
        assert len(json.loads(said.out.splitlines()[-1])["accuracy"]) == 3
        assert train.main(["--output", str(output)]) == 2
        llm = LLM(output, dtype="float32", kv_cache_memory="4MiB")
        question = task.make_question(random.Random(0), Kind(), 1)
        assert llm.tokenizer is not None
        assert llm.tokenizer.encode(" ".join(WORDS[token] for token in question.tokens)) == question.tokens


class TestKeptModel:
    def test_it_answers(self) -> None:
        """By the engine, with full prefill: 0.99, 0.98 and 0.98 on many prompts."""
        llm = LLM(KEPT, dtype="float32", kv_cache_memory="16MiB")
        for hops in range(3):
            rng = random.Random(f"tests/{hops}")
            questions = [task.make_question(rng, Kind(), hops) for _ in range(60)]
            outputs = llm.generate(
                [question.tokens for question in questions], SamplingParams(temperature=0, max_tokens=1)
            )
            right = [out.outputs[0].token_ids == [made.answer] for out, made in zip(outputs, questions, strict=True)]
            assert sum(right) >= 57

    def test_it_is_small(self) -> None:
        assert sum(path.stat().st_size for path in KEPT.iterdir()) < 1_500_000

    def test_its_vocabulary_is_the_task(self) -> None:
        words = json.loads((KEPT / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        assert list(words) == list(WORDS)
        assert WORDS[FIRST_VALUE] == "v00"
