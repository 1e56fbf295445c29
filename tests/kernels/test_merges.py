"""Merges out of scores in C++, against all merges of the reference."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from quire.kernels.merges import LONG, scored_merges, used_merges
from quire.kernels.native_library import native_problem
from quire.text.gguf_tokenizer import Merges, merges_of

pytestmark = pytest.mark.skipif(bool(native_problem()), reason=native_problem())

ALPHABETS = ("ab", "abc▁", "aé你👍")


def vocabulary(generator: random.Random) -> tuple[list[str], list[float], list[int]]:
    """Tokens, some twice and some of letters that are no tokens, their scores, some equal, and the
    numbers of those that may be unions."""
    letters = generator.choice(ALPHABETS)
    tokens = [one for one in letters if generator.random() < 0.9]
    for _ in range(generator.randrange(3, 60)):
        tokens.append("".join(generator.choice(letters) for _ in range(generator.choice((2, 2, 3, 3, 4, 5, 9, 17)))))
        if generator.random() < 0.1:
            tokens.append(generator.choice(tokens))
    if letters == "ab":
        tokens += ["a" * LONG, "a" * (LONG + 1), "ab" * LONG]
    generator.shuffle(tokens)
    joined = [number for number in range(len(tokens)) if generator.random() < 0.95]
    scores = [float(generator.randrange(-40, 0)) for _ in tokens]
    return tokens, scores, joined


def encoder(tokens: Sequence[str], merges: Merges) -> Tokenizer:
    ids = {token: number for number, token in reversed([*enumerate(tokens)])}
    return Tokenizer(BPE({**ids, "<unk>": len(tokens)}, merges, unk_token="<unk>"))


@pytest.mark.parametrize("seed", range(40))
def test_every_text_has_the_tokens_of_all_merges(seed: int) -> None:
    generator = random.Random(seed)
    tokens, scores, joined = vocabulary(generator)
    every, used = merges_of(tokens, scores, joined), used_merges(tokens, scores, joined)
    kept = set(used)
    # A pair that is there twice has its later place: a dictionary keeps the last value of a key.
    places = {pair: place for place, pair in enumerate(every)}
    assert used == sorted(kept, key=places.__getitem__)
    unions = [left + right for left, right in used if len(left + right) <= LONG]
    assert len(unions) == len(set(unions))
    ours, theirs = encoder(tokens, used), encoder(tokens, every)
    letters = sorted(set("".join(tokens)))
    for text in (*tokens, *("".join(generator.choice(letters) for _ in range(40)) for _ in range(60))):
        assert ours.encode(text).ids == theirs.encode(text).ids, text


def test_each_merge_is_used_by_its_union() -> None:
    """Without one of the merges, BPE does not make its union, so none is superfluous."""
    tokens, scores, joined = vocabulary(random.Random(1))
    used = [pair for pair in used_merges(tokens, scores, joined) if len("".join(pair)) <= LONG]
    whole = encoder(tokens, used)
    for number, (left, right) in enumerate(used):
        union = left + right
        assert whole.encode(union).tokens == [union]
        assert encoder(tokens, used[:number] + used[number + 1 :]).encode(union).tokens != [union]


def test_empty_vocabularies_and_empty_tokens() -> None:
    assert used_merges([], [], []) == []
    assert used_merges(["", "a", "", "aa"], [0.0] * 4, [0, 1, 2, 3]) == [("a", "a")]
    assert scored_merges() is used_merges
