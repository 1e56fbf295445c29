"""All looking together takes one part in fifty of the time, however many look."""

from __future__ import annotations

import random
import threading

import pytest
from tests.small_llms import random_tokens

from quire import LLM
from quire.engine.view_budget import MOST_FOR_ANSWERS, SHARE, ViewBudget


class Hand:
    """Clocks that are moved by hand."""

    def __init__(self) -> None:
        self.now = self.worked = 0.0

    def budget(self) -> ViewBudget:
        return ViewBudget(clock=lambda: self.now, work=lambda: self.worked)

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.worked += seconds


def test_looking_takes_no_more_than_its_share() -> None:
    """Whatever a look costs, and however eager viewers are."""
    for seed in range(5):
        draw, hand = random.Random(seed), Hand()
        budget = hand.budget()
        looked = 0
        while hand.now < 1000:
            if budget.is_free:
                with budget.spent():
                    hand.work(draw.uniform(0.0, 0.1))
                looked += 1
            hand.now += draw.uniform(0.0, 0.2)
        assert looked > 100
        assert hand.worked <= SHARE * hand.now * 1.01 + 0.1  # the last look is paid for afterwards


def test_waits_add_up() -> None:
    hand = Hand()
    budget = hand.budget()
    assert (budget.is_free, budget.wait) == (True, 0.0)
    budget.spend(0.01)
    budget.spend(0.01)
    assert not budget.is_free
    assert budget.wait == pytest.approx(0.02 / SHARE)
    hand.now += 0.02 / SHARE - 0.001
    assert not budget.is_free
    hand.now += 0.002
    assert budget.is_free
    hand.now += 100.0
    budget.spend(0.01)
    assert budget.wait == pytest.approx(0.01 / SHARE), "what was not used is not saved up"


def test_who_asks_all_the_time_sees_news() -> None:
    """Answers put off the next look by seconds, not for ever."""
    hand = Hand()
    budget = hand.budget()
    budget.spend(0.01)
    due = budget.wait + MOST_FOR_ANSWERS
    while not budget.is_free and hand.now < 100:
        hand.now += 0.001
        budget.answered(0.001)
    # Time goes on by 0.001, and its sums round.
    assert hand.now == pytest.approx(due, abs=0.002)


def test_a_look_within_a_look_counts_once() -> None:
    hand = Hand()
    budget = hand.budget()
    with budget.spent():
        hand.work(0.01)
        with budget.spent():
            hand.work(0.01)
    assert budget.wait == pytest.approx(0.02 / SHARE)


def test_a_look_that_fails_counts() -> None:
    hand = Hand()
    budget = hand.budget()

    def fail() -> None:
        with budget.spent():
            hand.work(0.01)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert budget.wait == pytest.approx(0.01 / SHARE)
    with budget.spent():
        hand.work(0.01)
    assert budget.wait == pytest.approx(0.02 / SHARE - 0.01), "time went on meanwhile"


def test_viewers_share_one_reading(small: LLM) -> None:
    """Many at once, while the state changes: as many readings as the budget allows, and each
    document is made once of each.
    """
    views = small.views
    made: list[int] = []

    def look() -> None:
        for _ in range(20):
            found = views.shared("numbers", lambda state: made.append(state.reading.number) or state.reading.number)
            assert found in made

    with small.session(random_tokens(20)) as session:
        views.state()
        views.budget.spend(1000.0)
        before = views._number
        threads = [threading.Thread(target=look) for _ in range(8)]
        for thread in threads:
            thread.start()
        session.append([1, 2, 3])
        for thread in threads:
            thread.join()
        assert views._number == before, "there was no time"
        assert set(made) == {before}
        views.budget._free = float("-inf")
        assert views.shared("numbers", lambda state: state.reading.number) == before + 1
        assert views.remembered("numbers") == before + 1
        assert views.remembered("others") is None
        session.append([4])
        assert views.remembered("numbers") == before + 1, "the look before is not paid for yet"
        views.budget._free = float("-inf")
        assert views.remembered("numbers") is None
        views.forget()
        assert views.remembered("numbers") is None


def test_nothing_new_is_not_read_anew(small: LLM) -> None:
    views = small.views
    with small.session(random_tokens(20)) as session:
        first = views.state(anew=False)
        views.budget._free = float("-inf")
        assert views.state(anew=False) is first
        session.name = "another"
        later = views.state(anew=False)
        assert later is not first, "a name is something new"
        views.budget._free = float("-inf")
        session.append([5])  # it is not run yet
        assert views.state(anew=False).reading.number == later.reading.number + 1
    views.budget._free = float("-inf")
    assert views.state(anew=False).branches.kinds() == {}, "a session was closed"
