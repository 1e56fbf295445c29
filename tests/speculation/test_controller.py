"""How many drafts are taken, by what steps cost and what was accepted."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from quire.speculation.controller import FEW_ROWS, Controller, Pace, StepCosts, Trust
from quire.speculation.proposer import Draft


def controller(slope: float, widths: Iterable[int] = range(1, 40)) -> Controller:
    """Return one that knows all widths: one row takes a second, each other ``slope``."""
    found = Controller()
    for _ in range(5):
        for rows in widths:
            found.costs.measured(rows, 1 + slope * (rows - 1), 1)
    return found


def chain(chance: float, count: int) -> list[float]:
    """Return what drafts promise of which each is right with the same chance."""
    return [chance ** (number + 1) for number in range(count)]


def test_sure_drafts_are_taken_where_rows_cost_little() -> None:
    assert controller(0.03).depths([chain(0.95, 16)], decodes=1, rows=1, most=64) == [16]
    assert controller(0.03).depths([chain(0.95, 16)], decodes=1, rows=1, most=5) == [5]


def test_nothing_is_taken_where_a_row_costs_a_step() -> None:
    assert controller(1.0).depths([chain(0.95, 16)], decodes=1, rows=1, most=64) == [0]


def test_unsure_drafts_are_left() -> None:
    assert controller(0.1).depths([chain(0.05, 16)], decodes=1, rows=1, most=64) == [0]


def test_the_surest_requests_come_first() -> None:
    shallow, deep = controller(0.12).depths([chain(0.3, 16), chain(0.97, 16)], decodes=2, rows=2, most=64)
    assert deep > shallow


def test_unsure_drafts_are_left_in_large_batches() -> None:
    """Alone a request takes what it would not take among eight."""
    assert controller(0.03).depths([[0.6]], decodes=1, rows=1, most=64) == [1]
    assert controller(0.03).depths([[0.6]] * 8, decodes=8, rows=8, most=64) == [0] * 8
    assert controller(0.03).depths([[0.9]] * 8, decodes=8, rows=8, most=64) == [1] * 8


@pytest.mark.parametrize("seed", range(4))
def test_where_nothing_can_be_gained_nothing_is_taken(seed: int) -> None:
    """And it can be where sure drafts are taken."""
    rng, seen = random.Random(seed), [0, 0]
    for _ in range(100):
        found = controller(rng.uniform(0.0, 1.2))
        found.costs.wide_steps = rng.choice([0, 9])
        found.costs._wide_row = rng.choice([0.0, rng.uniform(0.0, 1.2)])
        decodes = rng.choice([1, 2, 4, 8, 9, 16, 40])
        rows, most = decodes + rng.choice([0, 0, 5, 100]), rng.choice([0, 1, 5, 64])
        depths = found.depths([[1.0] * 64] * decodes, decodes=decodes, rows=rows, most=most)
        assert found.may_gain(decodes, rows, most) is any(depths)
        seen[any(depths)] += 1
    assert min(seen) > 10


@pytest.mark.parametrize("seed", range(3))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    """Against every number of drafts of one request."""
    rng = random.Random(seed)
    for _ in range(50):
        slope, chance = rng.uniform(0.01, 0.5), rng.uniform(0.2, 0.99)
        chooser = controller(slope)

        def rate(depth: int, chance: float = chance, chooser: Controller = chooser) -> float:
            tokens = 1 + sum(chance ** (number + 1) for number in range(depth))
            return tokens / chooser.costs.seconds(1 + depth)

        (found,) = chooser.depths([chain(chance, 12)], decodes=1, rows=1, most=64)
        best = max(rate(depth) for depth in range(13))
        assert rate(found) == pytest.approx(best) or (found == 0 and best <= 1.03 * rate(0))


def test_beside_a_long_prompt_rows_cost_their_own_time() -> None:
    """256 rows of a prompt are paid anyway."""
    assert controller(0.05, widths=(1, 2, 3, 5, 257, 259, 261)).depths(
        [chain(0.9, 4)], decodes=1, rows=257, most=64
    ) == [4]
    assert controller(0.9, widths=(1, 2, 3, 5, 257, 259, 261)).depths(
        [chain(0.9, 4)], decodes=1, rows=257, most=64
    ) == [0]


class TestCosts:
    def test_are_monotone_whatever_was_measured(self) -> None:
        rng = random.Random(1)
        costs = StepCosts()
        for _ in range(300):
            costs.measured(rng.choice([1, 2, 3, 5, 8, 17, 33]), rng.uniform(0.5, 3), 1)
            costs.measured(rng.randint(16, 60), rng.uniform(0.5, 30), rng.randint(1, 15))
            costs.measured_prompts(64, rng.uniform(0.5, 300))
            found = [costs.seconds(rows) for rows in range(1, 60)]
            assert found == sorted(found)
            assert found[0] > 0

    def test_follow_what_is_measured(self) -> None:
        costs = StepCosts()
        for _ in range(60):
            costs.measured(1, 0.1, 1)
            costs.measured(9, 0.2, 1)
        # An estimate forgets the first guess by a fifth with each measurement.
        assert costs.seconds(1) == pytest.approx(0.1, rel=0.1)
        # As above.
        assert costs.seconds(9) == pytest.approx(0.2, rel=0.1)
        # As above.
        assert costs.seconds(5) == pytest.approx(0.15, rel=0.1)

    @pytest.mark.parametrize("seed", range(3))
    def test_a_busy_machine_does_not_hide_what_a_row_costs(self, seed: int) -> None:
        """Steps of 75 ms and 9 for each row take up to four times as long, five in a row."""
        rng, costs, noise, found = random.Random(seed), StepCosts(), 1.0, list[float]()
        for step in range(600):
            noise = rng.uniform(1, 4) if step % 5 == 0 else noise
            rows = rng.choice([1, 1, 1, 5, 17, 33])
            costs.measured(rows, noise * (75 + 9 * rows), 1)
            if step > 100:
                found.append((costs.seconds(2) - costs.seconds(1)) / costs.seconds(1))
        # A noise has a standard deviation of a third, and the line remembers some ten of them.
        assert sum(found) / len(found) == pytest.approx(9 / 84, rel=0.25)

    def test_a_row_costs_what_a_prompts_row_does_until_that_is_known(self) -> None:
        """A batch of 16 whose rows cost nearly as much as its tokens does not draft at first."""
        for row, drafts in ((0.0025, 0), (0.0002, FEW_ROWS)):
            chooser = Controller()
            chooser.costs.measured_prompts(2048, 2048 * row)
            for _ in range(5):
                chooser.costs.measured(16, 0.044, 16)
            assert sum(chooser.depths([chain(0.97, 2)] * 16, decodes=16, rows=16, most=200)) == drafts
        chooser.costs.measured_prompts(20, 20 * 1.0)  # too few rows to tell
        assert chooser.costs.seconds(17) == pytest.approx(0.0442, rel=0.01)

    @pytest.mark.parametrize(("row", "drafts"), [(0.0028, 0), (0.0008, 64)])
    def test_drafts_of_a_large_batch_follow_what_their_rows_cost(self, row: float, drafts: int) -> None:
        """After a few steps of few drafts, whatever the rows of small batches cost. A prompt's rows
        have no logits."""
        chooser, chosen = Controller(), list[int]()
        chooser.costs.measured_prompts(2048, 2048 * 0.65 * row)
        for _ in range(60):
            for rows in (4, 8, 12):
                chooser.costs.measured(rows, 0.018 + 0.0015 * rows, 4)
        for _ in range(30):
            found = sum(chooser.depths([chain(0.97, 4)] * 16, decodes=16, rows=16, most=200))
            chooser.costs.measured(16 + found, 0.045 + row * found, 16)
            chosen.append(found)
        assert max(chosen[:4]) <= FEW_ROWS
        assert chosen[-1] == drafts
        assert sum(chosen[:10]) <= 10 * drafts + 5 * FEW_ROWS

    def test_a_hiccup_ends_nothing(self) -> None:
        chooser = controller(0.03)
        chooser.costs.measured(5, 1000.0, 1)
        assert chooser.depths([chain(0.95, 16)], decodes=1, rows=1, most=64) == [16]

    def test_a_width_that_was_dear_is_tried_again(self) -> None:
        chooser = Controller()
        for _ in range(30):
            chooser.costs.measured(1, 1.0, 1)
            chooser.costs.measured(9, 30.0, 1)
        assert chooser.depths([chain(0.9, 8)], decodes=1, rows=1, most=64) == [0]
        for _ in range(2000):
            chooser.costs.measured(1, 1.0, 1)
        assert chooser.depths([chain(0.9, 8)], decodes=1, rows=1, most=64) != [0]


class TestTrust:
    def test_falls_with_promises_that_are_not_kept(self) -> None:
        """Sure drafts, however many, promise a quarter of a token together then."""
        trust, others = Trust(), Trust()
        one = Trust(others)
        for _ in range(20):
            trust.verified(1.0, 0)
            one.verified(1.0, 0)
        assert sum(trust.factor**number for number in range(1, 33)) < 0.25
        # The next request begins with that.
        assert Trust(others).factor == others.factor < 0.2

    def test_counts_what_was_compared(self) -> None:
        """Drafts behind the first wrong one tell nothing: half of those compared were right."""
        trust, draft = Trust(), Draft([5] * 8, [1.0] * 8)
        for _ in range(200):
            trust.verified(draft.compared([0]), 1)
        assert trust.factor == pytest.approx(0.5, rel=0.1)  # 4 right ones are counted beforehand

    def test_copies_in_a_batch_grow_with_what_was_right(self) -> None:
        trust, found = Trust(), list[int]()
        for _ in range(4):
            found.append(trust.most_in_batch)
            trust.verified(1.0, found[-1])
        trust.verified(1.0, 0)
        assert [*found, trust.most_in_batch] == [2, 6, 14, 30, 2]

    def test_stays_with_those_that_are(self) -> None:
        trust = Trust()
        for _ in range(20):
            trust.verified(8.0, 8)
        assert trust.factor == 1

    def test_comes_back_with_time(self) -> None:
        trust = Trust()
        trust.verified(1.0, 0)
        for _ in range(20):
            trust.verified(1.0, 0)
        for _ in range(1000):
            trust.rested()
        assert trust.factor > 0.9


# -- a proposer that takes time --------------------------------------------------------------------


def drafted(
    steps: int, drafting: tuple[float, float], plain: tuple[float, float] = (1.0, 1.0), *, requests: int = 1
) -> list[bool]:
    """Which steps draft, if a step takes so many seconds and brings each request so many tokens."""
    now, tokens, found = 0.0, 0.0, list[bool]()
    pace = Pace(lambda: now)
    for _ in range(steps):
        found.append(pace.drafts({name: int(tokens) for name in range(requests)}))
        seconds, gained = drafting if found[-1] else plain
        now, tokens = now + seconds, tokens + gained
    return found


@pytest.mark.parametrize("requests", [1, 3, 16])
def test_drafts_that_pay_are_taken(requests: int) -> None:
    found = drafted(1000, (1.5, 3.0), requests=requests)
    assert 0.9 < sum(found) / 1000 < 1.0
    assert not all(found[:20])


@pytest.mark.parametrize("seconds", [1.0, 1.5, 3.0])
def test_drafts_that_bring_nothing_are_soon_left(seconds: float) -> None:
    found = drafted(3000, (seconds, 1.0))
    assert sum(found) < 60
    assert any(found[1000:])


def test_each_number_of_requests_is_judged_by_itself() -> None:
    """Alone drafts pay, and for eight requests together they do not."""
    now, tokens, taken = 0.0, 0, {1: 0, 8: 0}
    pace = Pace(lambda: now)
    for step in range(2000):
        requests = 1 if step // 100 % 2 else 8
        drafts = pace.drafts({(requests, name): tokens for name in range(requests)})
        taken[requests] += drafts
        now += (1.2 if requests == 1 else 5.0) if drafts else 1.0
        tokens += 3 if drafts else 1
    assert taken[1] > 800
    assert taken[8] < 100


def test_time_without_requests_counts_for_nothing() -> None:
    """A request that comes after a pause tells nothing of the steps before."""
    now, taken = 0.0, 0
    pace = Pace(lambda: now)
    for request in range(100):
        tokens = 0
        for _ in range(20):
            drafts = pace.drafts({request: tokens})
            taken += drafts
            now += 1.5 if drafts else 1.0
            tokens += 3 if drafts else 1
        now += 1000.0
    assert taken > 1700


def test_what_pays_may_change() -> None:
    """A text that repeats comes behind one that does not."""
    now, tokens, found = 0.0, 0, list[bool]()
    pace = Pace(lambda: now)
    for step in range(4000):
        found.append(pace.drafts({0: tokens}))
        now += 1.5 if found[-1] else 1.0
        tokens += 4 if found[-1] and step >= 1000 else 1
    assert sum(found[:1000]) < 50
    assert sum(found[-1000:]) > 900
