"""The suffix automaton against comparisons of all substrings."""

from __future__ import annotations

import random

import pytest

from quire.speculation.suffix_automaton import SuffixAutomaton


def repeat(text: list[int]) -> int:
    """The length of the longest suffix that occurs earlier too."""
    size = len(text)
    return max(
        (n for n in range(size) if any(text[end - n : end] == text[size - n :] for end in range(n, size))), default=0
    )


def common(text: list[int], other: list[int]) -> int:
    """The length of the longest suffix of ``other`` that ``text`` has."""
    found = (
        n for n in range(len(other) + 1) if any(text[k : k + n] == other[len(other) - n :] for k in range(len(text)))
    )
    return max(found, default=0)


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_repeat(seed: int) -> None:
    rng = random.Random(seed)
    letters, text, automaton = rng.choice([1, 2, 3, 7]), list[int](), SuffixAutomaton()
    for _ in range(60):
        text.append(rng.randrange(letters))
        automaton.append(text[-1])
        length, behind = automaton.longest_repeat()
        assert length == repeat(text)
        if length:
            assert behind < len(text)
            assert text[behind - length : behind] == text[len(text) - length :]


@pytest.mark.parametrize("seed", range(60))
def test_another_text_walks_along_while_it_grows(seed: int) -> None:
    """A state may be split under the walker's feet."""
    rng = random.Random(seed)
    letters = rng.choice([2, 3, 5])
    text = [rng.randrange(letters) for _ in range(rng.randrange(30))]
    automaton, other, state, length = SuffixAutomaton(text), list[int](), 0, 0
    for _ in range(60):
        for token in [rng.randrange(letters) for _ in range(rng.choice([0, 1, 12]))]:
            text.append(token)
            automaton.append(token)
        other.append(rng.randrange(letters))
        # It goes on from what it knew, though the text may have longer suffixes by now.
        expected = common(text, other[len(other) - 1 - length :])
        state, length = automaton.walk(state, length, other[-1])
        assert length == expected
        if length:
            behind = automaton.behind(state)
            assert text[behind - length : behind] == other[len(other) - length :]


def test_it_is_small() -> None:
    rng = random.Random(0)
    text = [rng.randrange(50) for _ in range(3000)]
    automaton = SuffixAutomaton(text)
    assert len(automaton) == 3000
    assert len(automaton._length) <= 2 * 3000
    assert sum(map(len, automaton._more.values())) <= 3 * 3000


def test_the_occurrence_is_the_last_one_that_was_asked_for() -> None:
    automaton = SuffixAutomaton([1, 2, 9, 1, 2])
    assert automaton.longest_repeat() == (2, 2)
    automaton.extend([8, 1, 2])
    assert automaton.longest_repeat() == (2, 5)
