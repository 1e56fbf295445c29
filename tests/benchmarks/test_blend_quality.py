"""Blending measured: that the plain forward is right, that the table is what it says, and that the
default reaches what it must on the recipe's model.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import random
import statistics
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from recipes.chunk_recall.task import BOS, Kind, make_question
from transformers import LlamaForCausalLM

from blend_cases import (
    CONTINUED,
    DEFAULT,
    METHODS,
    NAIVE,
    Answer,
    Case,
    Method,
    Outcome,
    answer_plainly,
    compare,
    distances,
    interval,
    make_case,
    make_cases,
    measure,
    rank_correlations,
    relative_errors,
    summary,
)
from plain_llama import PlainLlama
from quire import LLM, BlendParams, SamplingParams, Segment
from quire.base.segments import SelectName

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "recipes/chunk_recall/model"
ONE_LAYER = {name: method for name, method in METHODS.items() if not method.factors}
EXACT_MASK = {name: method for name, method in METHODS.items() if not method.bottom_right}
ROUNDING = 1e-3
"""Of float32 logits of about 20."""


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def model() -> PlainLlama:
    return PlainLlama(KEPT)


@pytest.fixture(scope="module")
def cases(model: PlainLlama) -> list[Case]:
    with torch.inference_mode():
        return make_cases(model, Kind(), 40, 1)


@pytest.mark.slow
class TestPlainForward:
    def test_full_equals_transformers(self, model: PlainLlama, cases: list[Case]) -> None:
        peer = LlamaForCausalLM.from_pretrained(KEPT, dtype=torch.float32)
        for case in cases[::30]:
            torch.testing.assert_close(peer(case.tokens[None]).logits[0], case.full.logits, atol=ROUNDING, rtol=0)

    @pytest.mark.parametrize("name", ONE_LAYER)
    def test_ratio_1_equals_full(self, model: PlainLlama, cases: list[Case], name: str) -> None:
        for case in cases[::30]:
            answer = answer_plainly(model, case, METHODS[name], 1.0)
            assert answer.run is not None
            torch.testing.assert_close(answer.logits, case.full.logits[-2:], atol=ROUNDING, rtol=0)
            torch.testing.assert_close(answer.run.k, case.full.k, atol=ROUNDING, rtol=0)
            torch.testing.assert_close(answer.run.v, case.full.v, atol=ROUNDING, rtol=0)
            assert answer.cost == pytest.approx(1.0, abs=0.05)  # a pass over the question is extra
            torch.testing.assert_close(answer.run.attended, case.full.attended, atol=ROUNDING, rtol=0)
            assert answer.common == CONTINUED

    @pytest.mark.parametrize("name", METHODS)
    def test_true_cached_rows_change_nothing(self, model: PlainLlama, cases: list[Case], name: str) -> None:
        """And a mask aligned at the bottom right changes something: rows read later ones."""
        true = dataclasses.replace(
            cases[7], k=cases[7].full.k, v=cases[7].full.v, wrong=torch.rand(len(cases[7].tokens))
        )
        answer = answer_plainly(model, true, METHODS[name], 0.3)
        assert answer.run is not None
        off = max(float((answer.run.k - true.full.k).abs().max()), float((answer.run.v - true.full.v).abs().max()))
        assert (off > 100 * ROUNDING) == METHODS[name].bottom_right
        assert torch.allclose(answer.logits, true.full.logits[-2:], atol=ROUNDING) or METHODS[name].bottom_right

    def test_what_is_read_and_run(self, model: PlainLlama, cases: list[Case]) -> None:
        """Values at the check layer, K and V of the rows that are left out behind it."""
        case = cases[3]
        count, row = len(case.tokens) - case.context, case.k[0, 0].nbytes
        for layer, ratio in ((1, 0.15), (2, 0.3), (2, 1.0)):
            run = answer_plainly(model, case, Method("v", (layer,)), ratio).run
            assert run is not None
            left = count - len(run.kept)
            assert left == case.asks - math.ceil(ratio * case.asks)
            assert run.read_bytes == row * (case.asks + 2 * left * (model.layers - layer - 1))
            assert run.token_layers == pytest.approx(
                count * layer + len(run.kept) * (model.layers - layer) + 0.1 * left
            )

    def test_continuations(self, model: PlainLlama, cases: list[Case]) -> None:
        """Those of full prefills of longer and longer prompts; the common part ends where a token
        differs, whatever comes behind it."""
        case, run = cases[5], cases[5].full
        tokens = case.tokens
        for token in case.continuation[:6]:
            assert model.full(tokens).logits[-1].argmax() == token
            tokens = torch.cat((tokens, token[None]))
        assert len(case.continuation) == CONTINUED
        assert model.common(run, case.continuation) == CONTINUED
        for at in (0, 1, 40):
            other = case.continuation.clone()
            other[at] = (other[at] + 1) % 50
            assert model.common(run, other) == at

    def test_cached_rows_are_those_of_chunks_alone(self, model: PlainLlama) -> None:
        question = make_question(random.Random(0), Kind(), 1)
        case = make_case(model, question.chunks, question.ask)
        start = 1 + len(question.chunks[0])
        stop = start + len(question.chunks[1])
        tokens = torch.tensor([BOS, *question.chunks[0], *question.chunks[1]])
        layer_0 = model.full(tokens)  # where nothing depends on what stands before
        torch.testing.assert_close(case.k[0, start:stop], layer_0.k[0, start:], atol=ROUNDING, rtol=0)
        assert float(case.wrong[:start].max()) == 0.0
        assert float(case.wrong[start:stop].max()) > 0.1
        assert (case.context, case.starts[0]) == (start, 0)
        assert case.context + case.asks == len(case.tokens) - 2


@pytest.mark.slow
class TestTable:
    def test_means(self) -> None:
        def outcome(hops: int, kl: float, right: bool) -> Outcome:
            return Outcome(
                hops=hops,
                kl=kl,
                agrees=right,
                right=right,
                full_right=True,
                cost=0.5,
                errors=(0.0, kl),
                attention=(0.5, kl),
                recall=0.25,
                common=64 if right else 2,
                token_layers=30.0,
                read_bytes=100 * (hops + 1),
            )

        naive = [outcome(0, 2.0, False), outcome(1, 2.0, False)]
        row = summary([outcome(0, 0.1, True), outcome(1, 0.3, False)], naive)
        assert row["kl"] == pytest.approx(0.2)
        assert (row["kl1"], row["acc0"], row["acc1"], row["recovered"]) == (0.3, 1.0, 0.0, 0.5)
        assert (row["agree"], row["recall"], row["cost"]) == (0.5, 0.25, 0.5)
        assert row["errors"] == [0.0, pytest.approx(0.2)]
        assert (row["attention_errors"], row["attention"]) == ([0.5, pytest.approx(0.2)], pytest.approx(0.35))
        assert (row["common"], row["token_layers"], row["bytes"]) == (33, 30, 150)
        assert "acc2" not in row

    def test_errors_are_relative_and_by_layer(self) -> None:
        true = torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]])
        assert relative_errors([true + torch.tensor([1.0, 0.0])], [true]) == pytest.approx((0.2, 0.5))
        both = relative_errors([true, 0 * true], [true, true])
        assert both == pytest.approx((0.5**0.5, 0.5**0.5))

    def test_attention_of_the_question(self, model: PlainLlama, cases: list[Case]) -> None:
        """No error where nothing cached is read, and the error of the rows that were compared."""
        found = measure(partial(answer_plainly, model), cases[60], NAIVE, 0.0)
        run = answer_plainly(model, cases[60], NAIVE, 0.0).run
        assert run is not None
        assert run.attended.shape == (5, len(cases[60].tokens) - cases[60].context - cases[60].asks, 96)
        off = (run.attended[3] - cases[60].full.attended[3]).norm() / cases[60].full.attended[3].norm()
        assert found.attention[3] == pytest.approx(float(off))
        assert found.attention[0] < ROUNDING < found.attention[3]

    def test_rank_correlations(self, cases: list[Case]) -> None:
        """Those of the definition; None for layer 0, whose rows depend on nothing before them."""
        found = rank_correlations(cases[:3])
        for one, other in ((1, 2), (2, 4), (3, 3)):
            expected = []
            for case in cases[:3]:
                off = distances(case.k, case.full.k) + distances(case.v, case.full.v)
                rows = range(case.context, case.context + case.asks)
                a, b = (
                    {row: rank for rank, row in enumerate(sorted(rows, key=off[at].tolist().__getitem__))}
                    for at in (one, other)
                )
                squares = sum((a[row] - b[row]) ** 2 for row in rows)
                expected.append(1 - 6 * squares / (len(rows) * (len(rows) ** 2 - 1)))
            assert found[one][other] == pytest.approx(statistics.fmean(expected))
        assert found[0] == [None] * 5
        assert [row[0] for row in found] == [None] * 5

    def test_interval_holds_the_mean_and_shrinks(self) -> None:
        drawn = torch.rand(400, generator=torch.Generator().manual_seed(0)).tolist()
        (few_low, few_high), (low, high) = interval(drawn[:25]), interval(drawn)
        assert few_low < low < 0.5 < high < few_high
        assert high - low == pytest.approx(2 * 1.96 * 12**-0.5 / 20, rel=0.2)  # that of a uniform variable

    def test_kl_and_answers_of_a_backend(self, cases: list[Case]) -> None:
        case = cases[0]
        assert case.question is not None
        same = measure(lambda *_: Answer(case.full.logits[-1:], 1.0), case, NAIVE, 0.0)
        assert (same.kl, same.agrees, same.cost) == (0.0, True, 1.0)
        sure = torch.full_like(case.full.logits[-1:], -30.0)
        sure[0, case.question.answer] = 0.0
        assert measure(lambda *_: Answer(sure, 1.0), case, NAIVE, 0.0).right
        wrong = measure(lambda *_: Answer(sure.roll(1), 1.0), case, NAIVE, 0.0)
        assert not wrong.right
        assert wrong.kl > 1.0


@pytest.mark.slow
class TestQuality:
    def test_the_default_reaches_its_goals(self, model: PlainLlama, cases: list[Case]) -> None:
        """At 15 %: KL at most 0.1, 0.92 right, and 5 times less KL than the method as published."""
        methods = {name: METHODS[name] for name in (DEFAULT, "v c=1, bottom right", "random")}
        rows = {row["method"]: row for row in compare(partial(answer_plainly, model), cases, methods, [0.15])}
        default, published = rows[DEFAULT], rows["v c=1, bottom right"]
        assert default["kl"] <= 0.1
        assert default["kl"] * 5 <= published["kl"]
        assert min(default["acc1"], default["acc2"]) >= 0.92
        assert default["kl"] * 5 <= rows["random"]["kl"]
        assert default["recovered"] >= 0.95
        assert max(rows["reuse alone"]["acc1"], rows["reuse alone"]["acc2"]) < 0.6

    def test_more_rows_are_better(self, model: PlainLlama, cases: list[Case]) -> None:
        rows = compare(partial(answer_plainly, model), cases, {DEFAULT: METHODS[DEFAULT]}, [0.1, 0.3, 1.0])
        kls = [row["kl"] for row in rows]
        assert kls == sorted(kls, reverse=True)
        assert abs(kls[-1]) < ROUNDING


class TestEngine:
    @pytest.mark.parametrize("select", get_args(SelectName)[1:])
    def test_computes_what_plain_torch_does(self, model: PlainLlama, select: SelectName) -> None:
        """The same number of rows, the same answers; of cached rows that are wrong."""
        off = 0.0
        with LLM(KEPT, dtype="float32", device="cpu", kv_cache_memory="64MiB", max_model_len=512) as llm:
            llm.engine.stored.is_worth = lambda tokens, nbytes: True  # whatever the machine is busy with
            drawn = [(random.Random(f"1/blend/{hops}"), hops) for hops in (1, 2)]
            for made in [make_question(rng, Kind(), hops) for rng, hops in drawn for _ in range(40)][5::15]:
                case, first = make_case(model, made.chunks, made.ask, question=made), list[torch.Tensor]()
                prompt = [[BOS, *made.chunks[0]], *map(Segment, made.chunks[1:]), list(made.ask)]
                llm.warm(prompt[1:-1])
                greedy = SamplingParams(
                    temperature=0, max_tokens=1, logits_processors=[lambda _, row, to=first: to.append(row) or row]
                )
                params = BlendParams(ratio=0.3, select=select, least=16, keep=False)
                (output,) = llm.generate([prompt], greedy, blend=params)
                plain = answer_plainly(model, case, Method(select, (2,)), 0.3)
                assert output.blend is not None
                assert plain.run is not None
                assert output.blend.recomputed == len(plain.run.kept) - len(made.ask)
                torch.testing.assert_close(first[0].float().flatten(), plain.logits[-1], atol=ROUNDING, rtol=0)
                off = max(off, float((plain.logits[-1] - case.full.logits[-1]).abs().max()))
        assert off > 100 * ROUNDING, "the full prefill is another"


class TestCommand:
    @pytest.fixture
    def script(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        monkeypatch.syspath_prepend(str(ROOT / "bench"))
        return importlib.import_module("blend_quality")

    def run(self, script: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
        sys.argv = ["blend_quality.py", *arguments]
        script.main()
        table, line = capsys.readouterr().out.rstrip().rsplit("\n", 1)
        assert table.startswith("method")
        return json.loads(line, parse_constant=pytest.fail)

    def test_recall(
        self, script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "argv", [])
        found = self.run(script, capsys, "--prompts", "2", "--ratios", "0,0.5", "--methods", "_or_,random")
        assert found["cases"] == 6
        assert len(found["rows"]) == 1 + 2 * 3
        assert all(len(row["errors"]) == len(row["attention_errors"]) == 5 for row in found["rows"])
        assert all({"attention", "common", "recovered", "bytes", "token_layers"} <= set(row) for row in found["rows"])
        assert len(found["rank_correlations"]) == 5

    @pytest.mark.slow
    def test_text(
        self, script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Blended text is as likely as with full prefill, to a fiftieth."""
        monkeypatch.setattr(sys, "argv", [])
        found = self.run(script, capsys, "--text", "--prompts", "3", "--ratios", "0.15", "--methods", DEFAULT)
        full, reuse, default = found["rows"]
        assert default["perplexity"] == pytest.approx(full["perplexity"], rel=0.02)  # 0.3 % over many files
        assert default["kl"] < reuse["kl"]
