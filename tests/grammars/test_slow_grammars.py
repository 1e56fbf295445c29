"""Slow grammars: the time of each is measured, and one that takes too long ends its own request."""

from __future__ import annotations

import numpy as np
import pytest
from tests.small_llms import MakeLLM, check, greedy, random_tokens

from quire import StructuredOutputs
from quire.base.errors import ResourceExhausted
from quire.grammars import grammars as module
from quire.grammars.grammars import Grammars
from quire.grammars.matcher import GRAMMAR_ENDED, MAX_SECONDS, USUAL_SECONDS, GrammarMatcher
from quire.sampling.filters import Words
from quire.text.tokenizer import Tokenizer

from .test_structured import LANGUAGES, Spelled, samples, spell

AMBIGUOUS = {"grammar": 'start: s\ns: s s | s s s | "a" | ""'}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Spelled:
    return spell(tmp_path_factory.mktemp("slow"), "byte_level")


def made_grammars(model: Spelled, *, threads: bool = False) -> Grammars:
    tokenizer = Tokenizer.from_directory(model.checkpoint.path)
    assert tokenizer is not None
    return Grammars(tokenizer, model.vocab_size, threads=threads)


@pytest.mark.parametrize("limit", ["items", "seconds"])
def test_a_slow_grammar_ends_its_request(
    make_llm: MakeLLM, model: Spelled, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """With the reason, while others go on."""
    if limit == "items":
        monkeypatch.setattr("quire.grammars.formats.MASK_ITEMS", 300)
    else:
        monkeypatch.setattr("quire.grammars.matcher.USUAL_SECONDS", 0.0)
        monkeypatch.setattr("quire.grammars.matcher.MAX_SECONDS", 0.05)
    only_a = {model.id(b"a"): 100.0}
    llm = make_llm(model.checkpoint)
    plain = greedy(50)
    prompt = random_tokens(20, seed=1)
    expected = samples(llm.generate(prompt, plain))
    outputs = llm.generate([prompt, prompt], [greedy(200, structured_outputs=AMBIGUOUS, logit_bias=only_a), plain])
    assert samples(outputs[1:]) == expected
    (ended,) = outputs[0].outputs
    assert ended.finish_reason == "error"
    assert (ended.error or "").startswith(GRAMMAR_ENDED)
    assert ("items" if limit == "items" else " and 0.05 s are allowed") in (ended.error or "")
    assert 3 < len(ended.token_ids) < 200
    check(llm)


def test_time_beyond_the_usual_counts(model: Spelled, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of its thread, mask and token together; forks have taken what their origin did."""
    clock = iter(range(1000))
    step = [0.4 * USUAL_SECONDS]
    monkeypatch.setattr("quire.grammars.matcher.time.thread_time", lambda: next(clock) * step[0])
    grammars = made_grammars(model)
    matcher, a = grammars.matcher(StructuredOutputs(regex="a+")), model.id(b"a")

    def go_on(matcher: GrammarMatcher) -> None:
        # Between two looks at the clock: once around the mask, once around the token.
        grammars.allowed({0: matcher}, {0: ()})
        matcher.accept(a)

    for _ in range(20):
        go_on(matcher)
    step[0] = 0.5 * (MAX_SECONDS / 4 + USUAL_SECONDS) + 1e-6
    for _ in range(3):
        go_on(matcher)
    for one in (matcher.fork(), matcher):
        with pytest.raises(
            ResourceExhausted,
            match=rf"took {MAX_SECONDS}\d* s beyond {USUAL_SECONDS} s each, and {MAX_SECONDS:g} s are",
        ):
            go_on(one)


def test_beside_a_gpu_the_slow_one_is_found(model: Spelled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of many at a time tell no times; when they took long, those of the next step do."""
    grammars = made_grammars(model, threads=True)
    grammars._threads = 3
    wanted = [StructuredOutputs(**language.wanted) for language in LANGUAGES.values()]
    matchers = dict(enumerate(map(grammars.matcher, wanted)))
    ends = dict.fromkeys(matchers, (3,))
    one_by_one = {i: grammars.allowed({i: matcher}, ends)[i] for i, matcher in matchers.items()}
    timed: list[GrammarMatcher] = []
    fill = GrammarMatcher.fill

    def filling(self: GrammarMatcher, masks_MB: Words, row: int) -> None:
        timed.append(self)
        fill(self, masks_MB, row)

    monkeypatch.setattr(GrammarMatcher, "fill", filling)
    for seconds, expected in ((60.0, []), (-1.0, []), (60.0, list(matchers.values())), (60.0, [])):
        monkeypatch.setattr(module, "DOUBTFUL_SECONDS", seconds)
        found = grammars.allowed(matchers, ends)
        assert all(np.array_equal(found[i], one_by_one[i]) for i in matchers)
        assert timed == expected
        timed.clear()
