"""Drafts from earlier text: what they are, how sure they are, and who may see whose outputs."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from quire.speculation.proposer import Context, Draft
from quire.speculation.proposers import lookup
from quire.speculation.proposers.lookup import CLASSES, Chances, Lookup, length_class
from quire.speculation.suffix_automaton import SuffixAutomaton


def context(ids: list[int], prompt: int, name: str = "a", salt: str | None = None) -> Context:
    return Context(name, np.array(ids, dtype=np.int64), prompt, salt)


def draft(proposer: Lookup, ids: list[int], most: int = 8, prompt: int = 1, **given: str) -> Draft:
    return proposer.propose([context(ids, prompt, **given)], [most])[0]


def test_what_followed_earlier() -> None:
    assert draft(Lookup(), [1, 2, 3, 4, 5, 9, 1, 2, 3], most=2).tokens == [4, 5]
    assert draft(Lookup(), [1, 2, 3]).tokens == ()


def test_tokens_that_hardly_come_are_left_out() -> None:
    """The chances are 1/2, 3/5, 4/6 and so on, one behind the other."""
    known = context([*range(20, 40), 9, 20, 21], 1)
    for least, count in ((0.0, 16), (0.31, 1), (0.19, 3), (0.6, 0)):
        (found,) = Lookup().propose([replace(known, least=least)], [16])
        assert len(found) == count, least
    (found,) = Lookup().propose([context([7, 5, 6, *range(20, 60), 9, 6], 1)], [64])
    assert len(found) == 12
    assert found.promises()[-1] >= lookup.LEAST


def test_a_repetition_goes_on() -> None:
    assert draft(Lookup(), [7, 1, 2, 3, 1, 2, 3, 1]).tokens == [2, 3, 1, 2, 3, 1, 2, 3]
    assert draft(Lookup(), [4, 4, 4]).tokens == [4] * 8


def test_an_image_is_never_drafted() -> None:
    assert draft(Lookup(), [1, 2, 3, -7, 5, 1, 2]).tokens == [3]
    assert draft(Lookup(), [1, 2, -7, 5, 1, 2]).tokens == ()


def test_a_request_may_grow_between_drafts_and_others_come() -> None:
    """The draft follows an earlier occurrence of the longest suffix that has one."""
    proposer, ids, rng = Lookup(), [1, 2, 0], random.Random(0)
    for _ in range(60):
        ids += [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
        found = list(draft(proposer, ids, most=3, prompt=3, name="a").tokens)
        size = next(n for n in range(len(ids) - 1, 0, -1) if occurrences(ids, n))
        assert found[0] in {ids[end] for end in occurrences(ids, size)}
        draft(proposer, ids[::-1], name="b", prompt=len(ids))


def occurrences(ids: list[int], size: int) -> list[int]:
    """Where the last ``size`` ids end earlier."""
    return [end for end in range(size, len(ids)) if ids[end - size : end] == ids[len(ids) - size :]]


class TestOutputs:
    def test_are_found_under_their_salt_only(self) -> None:
        proposer = Lookup()
        proposer.ended(context([9, 1, 2, 3, 4, 5], prompt=1, name="old", salt="mine"))
        assert draft(proposer, [8, 1, 2, 3], name="new", salt="mine").tokens == [4, 5]
        assert draft(proposer, [8, 1, 2, 3], name="other", salt="yours").tokens == ()
        assert draft(proposer, [8, 1, 2, 3], name="none").tokens == ()

    def test_do_not_hold_prompts(self) -> None:
        proposer = Lookup()
        proposer.ended(context([1, 2, 3, 4, 5, 6], prompt=5, name="old"))
        assert draft(proposer, [8, 1, 2, 3], name="new").tokens == ()

    def test_end_where_they_end(self) -> None:
        """The next output does not follow from the one before it."""
        proposer = Lookup()
        proposer.ended(context([9, 1, 2, 3], prompt=1, name="first"))
        proposer.ended(context([9, 4, 5, 6], prompt=1, name="second"))
        assert draft(proposer, [8, 1, 2], name="new").tokens == [3]
        assert draft(proposer, [8, 1, 2, 3], name="newer").tokens == ()

    def test_a_longer_match_of_the_request_itself_wins(self) -> None:
        proposer = Lookup()
        proposer.ended(context([9, 2, 3, 7], prompt=1, name="old"))
        assert draft(proposer, [1, 2, 3, 4, 1, 2, 3], most=1, name="new").tokens == [4]

    def test_that_come_later_are_found_too(self) -> None:
        proposer = Lookup()
        assert draft(proposer, [8, 1, 2], name="new", prompt=3).tokens == ()
        proposer.ended(context([9, 1, 2, 3], prompt=1, name="old"))
        assert draft(proposer, [8, 1, 2], name="new", prompt=3).tokens == ()  # It is found with the next token.
        assert draft(proposer, [8, 1, 2, 7, 1, 2], most=1, name="newest", prompt=6).tokens == [7]
        assert draft(proposer, [8, 0, 1, 2], most=1, name="last", prompt=4).tokens == [3]

    def test_old_ones_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lookup, "OUTPUT_TOKENS", 10)
        proposer = Lookup()
        for number in range(8):
            proposer.ended(context([0, *range(100 * number, 100 * number + 6)], prompt=1, name=str(number)))
        assert draft(proposer, [5, 0, 1, 2], name="x").tokens == ()
        assert list(draft(proposer, [5, 700, 701], name="y").tokens) == [702, 703, 704, 705]
        assert sum(len(text) for text in proposer._outputs[None].texts) <= 2 * (10 + 7)

    def test_of_few_salts_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lookup, "SALTS", 2)
        proposer = Lookup()
        for salt in ("a", "b", "a", "c"):
            proposer.ended(context([9, 1, 2, 3], prompt=1, name="x", salt=salt))
        assert sorted(map(str, proposer._outputs)) == ["a", "c"]

    def test_nothing_stays_of_a_request_that_ended(self) -> None:
        proposer = Lookup()
        draft(proposer, [1, 2, 1, 2], name="x")
        proposer.ended(context([1, 2, 1, 2], prompt=1, name="x"))
        assert not proposer._readers


class TestChances:
    def test_classes_ascend(self) -> None:
        found = [length_class(length) for length in range(1, 1000)]
        assert found == sorted(found)
        assert (found[0], found[-1]) == (1, CLASSES - 1)

    def test_longer_matches_are_surer_at_first(self) -> None:
        chances = Chances()
        assert chances.of(1) < chances.of(2) < chances.of(9) < 1

    def test_are_what_was_counted(self) -> None:
        chances = Chances(Chances())
        for number in range(400):
            chances.count(3, number % 4 == 0)
        # The last fifty tokens count, of which one in four is a hit, give or take one or two.
        assert chances.of(3) == pytest.approx(0.25, abs=0.1)
        assert chances.of(20) > 0.8

    def test_a_request_refines_what_all_have(self) -> None:
        everybody = Chances()
        bad, good = Chances(everybody), Chances(everybody)
        for _ in range(50):
            bad.count(2, False)
        assert bad.of(2) < good.of(2) < 0.2

    def test_are_counted_without_a_draft(self) -> None:
        """Each token of the output is compared with the one to be expected."""
        proposer = Lookup()
        ids = [1, 2, 3, 4] * 3
        before = draft(proposer, ids, prompt=len(ids), name="a").chances[0]
        proposer.propose([context([*ids, *[1, 2, 3, 4] * 5], len(ids), "a")], [1])
        assert proposer._readers["a"].chances.of(8) > before - 0.1
        assert sum(proposer._chances._trials) > 0


class Counting(SuffixAutomaton):
    """One that counts the transitions that it asks for."""

    def __init__(self) -> None:
        self.asked = 0
        super().__init__()

    def step(self, state: int, token: int) -> int:
        self.asked += 1
        return super().step(state, token)


def test_a_long_history_costs_little() -> None:
    """A token asks for as many transitions as at the beginning."""
    rng = random.Random(0)
    text = [int(rng.paretovariate(1)) % 30_000 for _ in range(40_000)]
    automaton = Counting()
    automaton.extend(text[:20_000])
    first = automaton.asked
    automaton.extend(text[20_000:])
    assert automaton.asked - first < 2 * first
    assert automaton.asked < 12 * len(text)


def test_a_text_that_repeats_less_is_soon_known() -> None:
    """Of suffixes of other lengths, too: what holds of all requests does not hold of this one."""
    everybody = Chances()
    for _ in range(200):
        for length in (2, 5, 20):
            everybody.count(length, True)
    one, other = Chances(everybody), Chances(everybody)
    assert one.of(5) > 0.9
    for _ in range(8):
        one.count(2, False)
        other.count(2, True)
    assert one.of(5) < 0.4
    assert other.of(5) > 0.9
    assert Chances(everybody).of(5) > 0.9


def test_outputs_are_forgotten_on_request() -> None:
    found, known = Lookup(), Context("one", np.array([1, 2, 3, 40, 41, 42, 43]), 3, None)
    found.propose([known], [4])
    found.ended(known)
    for name in ("before", "after"):
        (draft,) = found.propose([Context(name, np.array([9, 8, 40, 41]), 3, None)], [4])
        assert list(draft.tokens) == ([42, 43] if name == "before" else [])
        found.forget()
