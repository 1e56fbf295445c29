"""``allowed_token_ids`` and ``bad_words``: with each way to draw, the tokens are those of a logits
processor that looks at the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.engine.test_steps_ahead import ahead
from tests.small_llms import EOS, VOCAB, check, engine_of, greedy, random_tokens
from tests.speculation.test_speculation import Told, drafting
from tests.speculation_matrix.worlds import FORMS, World, make_world, vocabulary
from torch import Tensor

from quire import LLM, SamplingParams, Unsupported
from quire.base.errors import InvalidArgument

PROMPT = random_tokens(20)
LETTERS = [number for number, text in enumerate(vocabulary()) if set(text) <= set("abcdefgh,")]
DRAWN: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.3, "seed": 3, "top_p": 0.97, "n": 4},
    "penalised": {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.3, "logit_bias": {7: 2.0}},
}


@dataclass
class Way:
    """An LLM, and whether tokens are drawn from drafts of it."""

    llm: LLM
    told: Told | None = None


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world("dense", tmp_path_factory.mktemp("exclusions"))


@pytest.fixture(scope="module", params=["plain", "ahead", "drafts", "lookup"])
def way(request: pytest.FixtureRequest, world: World) -> Iterator[Way]:
    drafts = request.param in ("drafts", "lookup")
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "8MiB", "max_num_seqs": 8}
    with LLM(world.checkpoint.path, speculative="lookup" if drafts else None, **options) as llm:
        made = Way(ahead(llm) if request.param == "ahead" else llm)
        if request.param == "drafts":
            made.told = Told()
            drafting(llm, made.told)
        yield made
        check(llm)


Excluded = Callable[[list[int]], Sequence[int]]


def naive(excluded: Excluded) -> Callable[[list[int], Tensor], Tensor]:
    """Return a processor that excludes tokens by what was generated."""

    def process(generated: list[int], logits: Tensor) -> Tensor:
        return logits.index_fill(0, torch.tensor(list(excluded(generated)), dtype=torch.int64), -torch.inf)

    return process


def completing(words: Sequence[str], llm: LLM) -> Excluded:
    """Return what would complete the tokens of a word."""
    assert llm.tokenizer is not None
    sequences = llm.tokenizer.spellings(words)
    return lambda generated: [
        token
        for token in range(VOCAB)
        if any([*generated, token][-len(sequence) :] == sequence for sequence in sequences)
    ]


def tokens_of(way: Way, params: SamplingParams) -> list[list[int]]:
    (output,) = way.llm.generate(PROMPT, params, use_tqdm=False)
    return [one.token_ids for one in output.outputs]


def expected(way: Way, params: SamplingParams, excluded: Excluded) -> list[list[int]]:
    """Return what the processor gives, which the drafts then know."""
    plain = params.replace(allowed_token_ids=None, bad_words=None, logits_processors=[naive(excluded)])
    found = tokens_of(way, plain.replace(speculative=False))
    if way.told is not None:
        way.told.known = [PROMPT + tokens for tokens in found]
    return found


@pytest.mark.parametrize("drawn", DRAWN)
def test_only_allowed_tokens_are_drawn(way: Way, drawn: str) -> None:
    allowed = [3, *range(20, 60), 3]
    params = SamplingParams(max_tokens=24, logprobs=2, allowed_token_ids=allowed, **DRAWN[drawn])
    others = sorted(set(range(VOCAB)) - set(allowed))
    found = expected(way, params, lambda _: others)
    assert tokens_of(way, params) == found
    assert {token for tokens in found for token in tokens} <= set(allowed)
    assert all(len(tokens) == 24 for tokens in found), "the end token is not one of them"
    (output,) = way.llm.generate(PROMPT, params, use_tqdm=False)
    assert way.told is None or output.speculation is None or output.speculation.accepted
    entries = output.outputs[0].logprobs
    assert entries is not None
    assert any(set(entry) - set(allowed) for entry in entries), "log-probabilities are of all tokens"


@pytest.mark.parametrize("drawn", DRAWN)
def test_bad_words_are_not_spelled(way: Way, drawn: str) -> None:
    free = SamplingParams(max_tokens=24, ignore_eos=True, **DRAWN[drawn])
    said = tokens_of(way, free)
    assert way.llm.tokenizer is not None
    # What the model says otherwise: single tokens, and several in a row.
    words = [way.llm.tokenizer.decode(said[0][2:3]), way.llm.tokenizer.decode(said[-1][5:8]), "zz=x", "a"]
    params = free.replace(bad_words=words)
    excluded = completing(words, way.llm)
    found = expected(way, params, excluded)
    assert tokens_of(way, params) == found != said
    for tokens in found:
        assert not any(token in excluded(tokens[:place]) for place, token in enumerate(tokens))


def test_they_hold_under_a_grammar_and_behind_processors(way: Way) -> None:
    given: dict[str, Any] = {"structured_outputs": FORMS["pattern"], "temperature": 1.5, "max_tokens": 16}
    free = [SamplingParams(seed=seed, **given) for seed in range(6)]
    words = ["ab", "ba", "aa", "cd", "b", "e", "g", "c,", "ff"]
    for params in free:
        limited = params.replace(bad_words=words, allowed_token_ids=[*LETTERS, EOS])
        banned = completing(words, way.llm)
        outside = set(range(VOCAB)) - {*LETTERS, EOS}

        def excluded(generated: list[int], banned: Excluded = banned, outside: set[int] = outside) -> Sequence[int]:
            return [*banned(generated), *outside]

        found = expected(way, limited, excluded)
        assert tokens_of(way, limited) == found
        raised = limited.replace(logits_processors=[lambda _, logits: logits.index_fill(0, torch.arange(VOCAB), 1.0)])
        (tokens,) = tokens_of(way, raised)
        assert not any(token in excluded(tokens[:place]) for place, token in enumerate(tokens))


def test_a_session_counts_the_words_of_its_new_text(way: Way) -> None:
    """As in vLLM, what is in the prompt completes no word."""
    assert way.llm.tokenizer is not None
    params = greedy(6)
    with way.llm.session(PROMPT) as session:
        first = session.generate(params).outputs[0].token_ids
        session.rewind(n=len(first))
        second = session.generate(params.replace(bad_words=[way.llm.tokenizer.decode(first[1:4])])).outputs[0].token_ids
    assert second[: len(first)] != first


def test_a_text_for_which_nothing_is_left_fails(way: Way) -> None:
    params = greedy(4, allowed_token_ids=[9], bad_words=[vocabulary()[9]])
    (output,) = way.llm.generate(PROMPT, params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    assert "no token to draw" in str(output.outputs[0].error)


def test_what_cannot_be_served_is_refused(small: LLM) -> None:
    with pytest.raises(Unsupported, match="bad_words need a tokenizer"):
        small.generate(PROMPT, greedy(1, bad_words=["a"]))
    with pytest.raises(InvalidArgument, match=f"allowed_token_ids must be token ids in 0..{VOCAB - 1}, got {VOCAB}"):
        small.generate(PROMPT, greedy(1, allowed_token_ids=[VOCAB]))
    assert not engine_of(small).has_work


def test_words_at_the_beginning_and_within_a_text(world: World, way: Way) -> None:
    tokenizer = way.llm.tokenizer
    assert tokenizer is not None
    inside = tokenizer.encode_inside
    assert tokenizer.spellings(["abc", " abc"]) == [inside("abc"), inside(" abc")]
    assert tokenizer.spellings(["\n"]) == [inside("\n")]
